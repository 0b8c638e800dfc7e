"""A process beside the ranks, for what needs torch but trains nothing: the daemon goes without it.

It comes from the forkserver, as ranks do, and so has torch loaded already. What is asked of it is its
owner's business: devices (node.island.ranks.devices), a meeting point (node.hosts.wire).
"""

import asyncio
import multiprocessing
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from node.island.ranks.forkserver import prepare_forkserver
from protocol.errors import AtollError, SystemRefusedError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Work = Callable[..., None]
"""Takes its end of a pipe and its arguments, and sends its answers, of which most have one. A function of a
module."""

_context = multiprocessing.get_context("forkserver")
_END_SECONDS = 1.0


class Aside:
    """Such a process, from its answer until it is closed; it sees that as the end of its pipe."""

    def __init__(self, work: Work, *arguments: object) -> None:
        self._connection, self._theirs = _context.Pipe()
        self._process = _context.Process(
            target=_live,
            args=(self._theirs, work, arguments),
            name=f"atoll-{work.__name__.strip('_')}",
            daemon=True,
        )

    async def answer(self) -> Any:
        """Starts it and waits for what it says; raises that if it is an AtollError.

        That takes until the forkserver has imported torch. Call close() afterwards in any case.
        """
        prepare_forkserver()
        starting = asyncio.ensure_future(asyncio.to_thread(self._process.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])  # else close() would not find it
            raise
        self._theirs.close()  # else we would never see its end close
        return await self.next_answer()

    async def next_answer(self) -> Any:
        """Waits for what it says next; raises as `answer`."""
        loop, is_told = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._connection.fileno(), is_told.set)
        try:
            await is_told.wait()
            answer = self._connection.recv()
        except EOFError as error:
            self._process.join(_END_SECONDS)
            raise SystemRefusedError(
                f"{self._process.name} ended with {self._process.exitcode} and no answer",
                next_step="see the log; if the machine ran out of memory, free some",
            ) from error
        finally:
            loop.remove_reader(self._connection.fileno())
        if isinstance(answer, AtollError):
            raise answer
        return answer

    def close(self) -> None:
        """Ends it, whatever it does: a driver may have it hang."""
        self._theirs.close()
        self._connection.close()
        if self._process.pid is not None:
            self._process.kill()
            self._process.join(_END_SECONDS)


def _live(connection: "Connection[Any, Any]", work: Work, arguments: tuple[object, ...]) -> None:
    from node.island.ranks.preload import begin_collecting  # not in the daemon: it loads torch

    begin_collecting()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's, which then ends us
    try:
        work(connection, *arguments)
    except AtollError as error:
        connection.send(error)
