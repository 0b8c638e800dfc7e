"""Another `atoll` command that runs beside a daemon: a process of its own, which ends with it.

What it does cannot hold up the daemon's event loop, and its end is not the daemon's.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import click
import structlog

from protocol.service.unit import NOT_AGAIN, own_program

END_SECONDS = 20.0
"""For its end, before it is killed."""

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
"""Before it is started again, each twice as long, unless it has run for longer than that."""

ENDS_WITH_STDIN = click.option("--until-stdin-closes", "ends_with_stdin", is_flag=True, hidden=True)

_log = structlog.get_logger(__name__)


@contextlib.asynccontextmanager
async def beside(
    called: str,
    arguments: Sequence[str],
    *,
    hear: Callable[[str], None],
    end_seconds: float = END_SECONDS,
) -> AsyncIterator[None]:
    """Within it the command runs, and is started again when it fails; afterwards it has ended.

    `hear` gets its lines; its standard error is the daemon's. The command has ENDS_WITH_STDIN, so that it
    does not outlive a daemon that is killed. It is signalled by the daemon alone, and not by a Ctrl-C at its
    terminal, and has `end_seconds` to end. One that ended well, or for what wants a person, stays ended.
    """
    running = asyncio.create_task(_run(called, arguments, hear, end_seconds))
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _run(
    called: str, arguments: Sequence[str], hear: Callable[[str], None], end_seconds: float
) -> None:
    clock = asyncio.get_running_loop().time
    pause = FIRST_PAUSE_SECONDS
    code: int | str
    while True:
        started_at = clock()
        try:
            code = await _run_once((*arguments, "--until-stdin-closes"), hear, end_seconds)
        except (OSError, ValueError) as error:  # no process, or lines that nobody understands
            code = str(error)
        if code == 0:
            _log.info(f"{called} has ended")
            return
        if code in NOT_AGAIN:
            _log.error(
                f"{called} has ended, and wants a person: it says above what to do", code=code
            )
            return
        if clock() - started_at > LONGEST_PAUSE_SECONDS:
            pause = FIRST_PAUSE_SECONDS
        _log.error(f"{called} has ended, and is started again", why=code, in_seconds=pause)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


async def _run_once(
    arguments: Sequence[str], hear: Callable[[str], None], end_seconds: float
) -> int:
    process = await asyncio.create_subprocess_exec(
        *own_program(),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            hear(line.decode(errors="replace").rstrip("\n"))
        return await process.wait()
    finally:
        if process.returncode is None:
            await asyncio.shield(_end(process, hear, end_seconds))


async def _end(
    process: asyncio.subprocess.Process, hear: Callable[[str], None], seconds: float
) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(seconds):
            with contextlib.suppress(ValueError):  # a line that nobody understands
                async for line in process.stdout:  # else a full pipe would hold it up
                    hear(line.decode(errors="replace").rstrip("\n"))
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def heed_stdin() -> None:
    """The end of standard input is SIGTERM to this process: whoever started it has ended."""

    def read() -> None:
        with contextlib.suppress(OSError):
            while os.read(sys.stdin.fileno(), 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, name="standard input", daemon=True).start()
