"""Kernels of a run, compiled before its first round in a process of their own.

The compiler holds Python's lock for seconds at a time. In the daemon's process not even answers to pings
would leave meanwhile, and the coordinator would take the node for gone. So the daemon only loads what
is in the cache, and lets another process fill it: `python -m node.exchange.preparing`, which reads the
run file on standard input and tells its progress in lines of JSON.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import structlog
from numba.core import event

from node.exchange.codecs.codec import compiling_alone, has_cache
from node.exchange.codecs.registry import codec_named, compile_kernels
from node.exchange.outer import compile_arithmetic
from node.exchange.outer_optimizer import outer_optimizer_of
from node.heavy import in_thread
from protocol.run.run_files import run_from_json
from protocol.run.run_spec import RunSpec

log = structlog.get_logger()

_COMPILE = "numba:compile"
"""What numba tells listeners of when a kernel is not in the cache."""

_ROOT = Path(__file__).parents[2]


class _NotInCacheError(Exception):
    """A kernel would have to be compiled."""


class _Refusal(event.Listener):
    """Refuses to compile anything."""

    def on_start(self, event: object) -> None:
        raise _NotInCacheError

    def on_end(self, event: object) -> None:
        pass


def parts_of(spec: RunSpec) -> Iterable[tuple[str, Callable[[], None]]]:
    """What a run uses, for people, and how to get each ready."""
    names = (spec.exchange.uplink, spec.exchange.downlink)
    for codec in {codec.name: codec for codec in map(codec_named, names)}.values():
        yield f"codec {codec.name}", partial(compile_kernels, codec)
    arithmetic = partial(compile_arithmetic, outer_optimizer_of(spec.outer))
    yield f"outer optimizer {spec.outer.optimizer}", arithmetic


def are_loaded(spec: RunSpec) -> bool:
    """Loads the run's kernels as far as they are in the cache; whether all of them are. Heavy."""
    refusal = _Refusal()
    event.register(_COMPILE, refusal)  # type: ignore[no-untyped-call]  # of numba
    try:
        for _, get_ready in parts_of(spec):
            get_ready()
    except _NotInCacheError:
        return False
    finally:
        event.unregister(_COMPILE, refusal)  # type: ignore[no-untyped-call]
    return True


async def prepare_kernels(spec: RunSpec) -> None:
    """Sees to it that the run's kernels are in the cache, where there can be one.

    Where there cannot, or where the process that compiles fails, that is said, and whoever uses a
    kernel first compiles it.
    """
    if await in_thread(partial(are_loaded, spec)):
        return
    if not has_cache():
        log.warning(
            "compiled kernels cannot be kept here, so this process compiles them at each start, and the "
            "coordinator may count it as away for some seconds",
            next_step="set XDG_CACHE_HOME to a folder that can be written to",
        )
        return
    log.info("compiling kernels for this processor, once; the next start finds them in the cache")
    began_at = time.monotonic()
    if why := await _compiled_elsewhere(spec):
        log.warning(
            "the process that compiles kernels has failed, so this one compiles them, and the "
            "coordinator may count it as away for some seconds",
            why=why,
        )
    else:
        log.info("kernels compiled", seconds=round(time.monotonic() - began_at, 1))


async def _compiled_elsewhere(spec: RunSpec) -> str:
    """Runs the process to its end and logs its progress; what went wrong, in words, or nothing."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "node.exchange.preparing"),  # -P: no module of this folder
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert process.stdin and process.stdout and process.stderr
    complaints = asyncio.ensure_future(process.stderr.read())
    try:
        process.stdin.write(spec.canonical_json().encode())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its exit code tells more
            await process.stdin.drain()
        process.stdin.close()
        async for line in process.stdout:
            if line.startswith(b"{"):  # and not what numba prints when it is told to
                log.info(**json.loads(line))
        code = await process.wait()
        words = (await complaints).decode(errors="replace").strip()
    finally:
        complaints.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code == 0:
        return ""
    last = words.rpartition("\n")[2] if words else "no reason given"
    return f"it ended with {code}: {last}"


@contextmanager
def _told(what: str) -> Iterator[None]:
    began_at = time.monotonic()
    yield
    seconds = round(time.monotonic() - began_at, 1)
    _tell({"event": "compiled", "what": what, "seconds": seconds, "process": os.getpid()})


def _tell(line: Mapping[str, object]) -> None:
    print(json.dumps(line), flush=True)  # noqa: T201 - to the daemon, which logs it


def main() -> None:
    """What the other process does."""
    spec = run_from_json(sys.stdin.read())
    waiting = {"event": "waiting for another process that compiles kernels on this machine"}
    with compiling_alone(on_wait=lambda: _tell(waiting)):
        for what, get_ready in parts_of(spec):
            with _told(what):
                get_ready()


if __name__ == "__main__":
    main()
