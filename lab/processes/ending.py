"""Whatever a benchmark started ends with it, however it dies: what stayed would spoil the next figures.

    if __name__ == "__main__":
        with nothing_left():
            main()

A signal ends the benchmark as an error would: `with` blocks take away what they made. For the rest,
and for a benchmark that was killed, there is a caretaker: a process that waits for the benchmark's end,
and then ends all that bears its mark.

Not PR_SET_PDEATHSIG: it comes when the *thread* ends that started a child, it needs a preexec_fn, which
forks and gRPC does not survive that, and it says nothing to a child's children. Not the end of a pipe
either: any fork keeps that open.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from types import FrameType

from lab.processes.family import SOURCES, Family

STARTED_BY = "STARTED_BY_BENCHMARK"
"""Not among the variables that begin with ATOLL_, which are kept from what benchmarks start."""


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """For the whole of a benchmark. Needs Linux for the caretaker; elsewhere signals alone are minded."""
    mark = uuid.uuid4().hex
    os.environ.pop(STARTED_BY, None)  # of a benchmark that started us; its caretaker lets ours live
    if sys.platform == "linux":
        subprocess.Popen(
            [sys.executable, "-m", "lab.processes.ending", str(os.getpid()), mark],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # who reads ours to its end does not wait for it
            cwd=SOURCES,
            start_new_session=True,  # Ctrl-C, and a signal to all of us, are not for it
        )
    os.environ[STARTED_BY] = mark

    def stop(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # who signals again does not want to wait
        # First: some `with` blocks, such as a pool's, wait until what they began has done its work.
        Family(mark, variable=STARTED_BY).kill()
        sys.exit(f"stopped by {signal.Signals(number).name}; everything that was started has ended")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # in the background, SIGINT too
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, stop)
    yield


def main() -> None:
    """The caretaker's life."""
    benchmark, mark = int(sys.argv[1]), sys.argv[2]
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(benchmark)
        if os.getppid() == benchmark:  # else it has ended, and the number may be another's
            select.select([descriptor], [], [])
    Family(mark, variable=STARTED_BY).end()


if __name__ == "__main__":
    main()
