"""Plain sockets that hold nothing up: calls that block, names, the first address that answers, and ends.

A resolver that hangs holds each look-up up for ten seconds and more. asyncio looks names up in the threads
that it has for everything: a few dead names would take them all, and rounds and a Ctrl-C would wait.
"""

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

MOST_AT_ONCE = 16
"""Look-ups of a process; others wait."""

STAGGER_SECONDS = 0.25
"""An address that does not answer holds the next one up so long: RFC 8305, Happy Eyeballs, section 5."""

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_Answer = TypeVar("_Answer")

_places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def in_own_thread(work: Callable[[], _Answer]) -> _Answer:
    """Runs `work` in a thread that nobody waits for when the process ends.

    For asyncio's own threads it waits: a look at a host that swallows packets, or at a name that no
    server resolves yet, would hold up a Ctrl-C for many seconds.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_Answer] = loop.create_future()

    def settle(answer: _Answer | None, error: BaseException | None) -> None:
        if outcome.done():
            return  # whoever asked has gone
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(cast("_Answer", answer))

    def run() -> None:
        answer, error = None, None
        try:
            answer = work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, answer, error)

    threading.Thread(target=run, name="own thread", daemon=True).start()
    return await outcome


async def looked_up(
    host: str,
    port: int,
    *,
    family: int = socket.AF_UNSPEC,
    kind: int = socket.SOCK_STREAM,
    seconds: float | None = None,
) -> list[str]:
    """The addresses that a name leads to, in the order to try them; an address leads to itself.

    Raises OSError, also where there is no answer within `seconds`.
    """
    look = partial(socket.getaddrinfo, host, port, family, kind)
    try:
        found = look(flags=socket.AI_NUMERICHOST)  # asks nobody
    except socket.gaierror:
        try:
            async with asyncio.timeout(seconds):
                found = await _in_its_turn(look)
        except TimeoutError as error:
            raise socket.gaierror(socket.EAI_AGAIN, "no name server answers in time") from error
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


async def _in_its_turn(look: Callable[[], _Answer]) -> _Answer:
    """A look-up that nobody waits for any more keeps its place until it ends, or there would be ever more."""
    loop = asyncio.get_running_loop()
    places = _places.setdefault(loop, asyncio.Semaphore(MOST_AT_ONCE))
    await places.acquire()
    looking = asyncio.ensure_future(in_own_thread(look))

    def end(done: asyncio.Future[_Answer]) -> None:
        places.release()
        if not done.cancelled():
            done.exception()  # whoever waits is told; nobody may

    looking.add_done_callback(end)
    return await asyncio.shield(looking)


NO_WAY = (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Of an address that nothing leads to from here, as one of IPv6 where there is IPv4 alone."""


def most_telling(failures: Sequence[BaseException]) -> BaseException:
    """Of what became of a name's addresses: where none leads anywhere is said only if that holds of all."""
    others = [one for one in failures if getattr(one, "errno", None) not in NO_WAY]
    return [OSError("no address"), *failures, *others][-1]


def blocking_connection_to(host: str, port: int, *, seconds: float) -> socket.socket:
    """A connection to the first of a name's addresses that answers; `seconds` are for each, and for answers.

    Raises the most telling OSError where none does.
    """
    try:
        return socket.create_connection((host, port), timeout=seconds, all_errors=True)
    except ExceptionGroup as failures:
        raise most_telling(failures.exceptions) from None


async def connection_to(hosts: Sequence[str], port: int, **how: Any) -> Ends:
    """A connection to the first of several addresses that answers; `how` is asyncio.open_connection's.

    The next one is dialled soon, for the first may be of a family that leads nowhere here. Raises the
    most telling OSError where none does.
    """
    left = list(hosts)
    dials: set[asyncio.Task[Ends]] = set()
    failures: list[BaseException] = []
    made: Ends | None = None
    try:
        while left or dials:
            if left:
                dials.add(asyncio.create_task(asyncio.open_connection(left.pop(0), port, **how)))
            patience = STAGGER_SECONDS if left else None
            done, dials = await asyncio.wait(
                dials, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            for dial in done:
                if (error := dial.exception()) is not None:
                    failures.append(error)
                elif made is None:
                    made = dial.result()
                else:
                    dial.result()[1].transport.abort()
            if made is not None:
                ignore_end_of(made[1])
                return made
        raise most_telling(failures)
    finally:
        for dial in dials:
            dial.add_done_callback(_drop)
            dial.cancel()


def ignore_end_of(writer: asyncio.StreamWriter) -> None:
    """For a connection whose end nobody waits for: what broke it is raised by its reads and writes.

    asyncio keeps the error for who waits, too, and reports it as one that nobody has looked at where Python's
    collector comes to it before the connection: a traceback in somebody's log, minutes later.
    """
    protocol: Any = writer.transport.get_protocol()
    # A private name: wait_closed() would take a task for each connection.
    protocol._get_close_waiter(writer).add_done_callback(_look_at)


def _look_at(end: asyncio.Future[None]) -> None:
    if not end.cancelled():
        end.exception()


def _drop(dial: asyncio.Task[Ends]) -> None:
    if not dial.cancelled() and dial.exception() is None:
        dial.result()[1].transport.abort()
