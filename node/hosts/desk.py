"""The leader's desk: hosts that come to follow, and orders to each of them.

What they are ordered to do is node.hosts.leading's.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from node.hosts.orders import End, Order, answer_from_wire, to_wire
from node.hosts.wire import LeaderKey, Message, Wire, is_invited, zeros
from node.island.island import Progress
from node.island.ranks.faults import RankDiedError, RankFailedError, TrainingDivergedError
from node.outer_state import Vector
from protocol.errors import AtollError, ConfigError, ProtocolMismatchError, SystemRefusedError

log = structlog.get_logger()

_FAULTS: dict[str, type[AtollError]] = {
    kind.__name__: kind
    for kind in (RankDiedError, RankFailedError, TrainingDivergedError, ConfigError)
}
"""Errors of a follower that mean the same here; others are told as one of its machine's."""

STOP_SECONDS = 10.0

Answer = TypeVar("Answer")


class Host:
    """One that follows. It gets one order at a time; `is_gone` says that it went."""

    def __init__(self, wire: Wire, *, name: str, device_kind: str) -> None:
        self._wire = wire
        self.name = name
        self.device_kind = device_kind
        self.address = wire.peer
        self._number = 0
        self._answer: asyncio.Future[Any] | None = None
        self._into: Vector | None = None
        self._most_elements = 0  # of the order that last asked for values
        self._on_progress: Callable[[Progress], None] | None = None
        self._listening = asyncio.create_task(self._listen())

    @property
    def is_gone(self) -> bool:
        """Whether the connection has ended."""
        return self._listening.done()

    async def give(
        self,
        order: Order[Answer],
        *,
        vector: Vector | None = None,
        into: Vector | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Answer:
        """Its answer; a vector in it lies in `into`. Raises what the follower met, or RankDiedError."""
        if self.is_gone:
            raise self._death()
        self._number += 1
        self._answer = asyncio.get_running_loop().create_future()
        self._into, self._on_progress = into, on_progress
        self._most_elements = self._most_elements if into is None else len(into)
        try:
            with suppress(OSError):  # the listener says what became of the connection
                await self._wire.send(to_wire(order) | {"number": self._number}, vector)
            return answer_from_wire(order, await self._answer)
        finally:
            self._answer = self._into = self._on_progress = None

    async def close(self) -> None:
        """Lets it go; safe to repeat."""
        self._listening.cancel()
        # Not by catching CancelledError, which could be our own.
        await asyncio.gather(self._listening, return_exceptions=True)
        self._wire.close()

    def _death(self) -> RankDiedError:
        return RankDiedError(
            f"host {self.name} ({self.address}), which followed, is gone",
            next_step="see its log, and start it again: atoll node follow island.token",
        )

    async def _listen(self) -> None:
        try:
            while True:
                self._take(await self._received())
        except (OSError, EOFError):
            pass
        except ProtocolMismatchError as error:
            log.warning("a host is let go", host=self.name, why=error.what)
        finally:
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(self._death())
            self._wire.close()

    async def _received(self) -> Message:
        message = await self._wire.receive()
        if "num_elements" in message:
            is_awaited = self._into is not None and message.get("number") == self._number
            # When its order was given up, the values are read all the same, and forgotten.
            into = self._into if is_awaited else zeros(self._most_elements)
            assert into is not None
            await self._wire.receive_vector(message, into)
        return message

    def _take(self, message: Message) -> None:
        if message.get("number") != self._number or self._answer is None or self._answer.done():
            return
        if "progress" in message and self._on_progress is not None:
            self._on_progress(Progress(**message["progress"]))
        elif "fault" in message:
            kind = _FAULTS.get(message["fault"], SystemRefusedError)
            what = f"host {self.name}: {message['what']}"
            self._answer.set_exception(kind(what, next_step=message["next_step"]))
        elif "answer" in message:
            self._answer.set_result(message["answer"])


class HostDesk:
    """Listens for hosts that want to follow, on one address."""

    def __init__(self, *, key: LeaderKey, version: str, device_kind: str) -> None:
        self._key = key
        self._version = version
        self._device_kind = device_kind
        self._hosts: list[Host] = []
        self._come = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._welcoming: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int) -> int:
        """Begins to listen; returns the port. Raises SystemRefusedError."""
        try:
            self._server = await asyncio.start_server(
                self._meet,
                host,
                port,
                ssl=self._key.server_context(),
                ssl_handshake_timeout=STOP_SECONDS,
            )
        except OSError as error:
            raise SystemRefusedError(
                f"cannot listen for hosts on {host}:{port}: {error.strerror}",
                next_step="choose another address with --island-listen",
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Tells all hosts that it is over, and stops listening."""
        if self._server is not None:
            self._server.close()
        for task in list(self._welcoming):
            task.cancel()
        for host in self._hosts:
            with suppress(AtollError, TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await host.give(End())
            await host.close()
        self._hosts = []

    async def hosts(self, number: int, *, within_seconds: float | None) -> list[Host]:
        """That many hosts, when they are there. Raises RankDiedError when they do not come."""
        self._hosts = [host for host in self._hosts if not host.is_gone]
        if len(self._hosts) < number:
            log.info("waiting for hosts to follow", there=len(self._hosts), of=number)
        try:
            async with asyncio.timeout(within_seconds), self._come:
                while len(self._hosts) < number:
                    await self._come.wait()
                    self._hosts = [host for host in self._hosts if not host.is_gone]
        except TimeoutError:
            raise RankDiedError(
                f"{len(self._hosts)} of {number} hosts follow, and no more came within "
                f"{within_seconds:g} s",
                next_step="start the others again: atoll node follow island.token",
            ) from None
        return self._hosts[:number]

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._welcoming.add(task)
        try:
            wire = Wire(reader, writer)  # which fails when the other side is gone already
            if await is_invited(wire, self._key.secret.hex()):
                await self._welcome(wire)
            else:
                log.warning("turned away who does not know the island's secret", peer=wire.peer)
                writer.close()
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError, ProtocolMismatchError):
            writer.close()
        finally:
            self._welcoming.discard(task)

    async def _welcome(self, wire: Wire) -> None:
        async with asyncio.timeout(10):
            hello = await wire.receive()
        for what, theirs, ours in (
            ("version", hello.get("version"), self._version),
            ("kind of device", hello.get("device_kind"), self._device_kind),
        ):
            if theirs != ours:
                await wire.send({"refused": f"its {what} is {theirs!r}, and the leader's {ours!r}"})
                wire.close()
                return
        await wire.send({"welcome": True})
        async with self._come:
            name = str(hello.get("name"))[:64]
            self._hosts.append(Host(wire, name=name, device_kind=self._device_kind))
            log.info("a host follows", host=name, address=wire.peer, hosts=len(self._hosts))
            self._come.notify_all()
