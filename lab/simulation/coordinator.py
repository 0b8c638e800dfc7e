"""The coordinator of a simulated swarm: the real core, store and desk, without gRPC between."""

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message

from coordinator.database import DATABASE_NAME
from coordinator.driver import Driver, LoopClock
from coordinator.rules import rules_in_force
from coordinator.services.ruling import Rulings
from coordinator.services.session import SessionDesk
from coordinator.store import Store
from coordinator.streams import Telemetry
from coordinator.swarm.events import Tell
from coordinator.swarm.state import SwarmState
from coordinator.swarm.transition import Transition
from protocol.errors import UnavailableError
from protocol.run.run_spec import RunSpec
from protocol.trust.rulings import RulingVerifier
from protocol.trust.signing import CommitSigner
from protocol.v1 import session_pb2
from protocol.wire.messages import AuditAsked, RoundOpened
from protocol.wire.rounds import NodeId

Wire = TypeVar("Wire", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """When the coordinator dies and comes back from its database, or from a copy made earlier."""

    dies_at: float
    returns_at: float
    copied_at: float | None = None


class DeskStub:
    """SessionService without gRPC: what a stub's caller sees, answered by a desk in this process."""

    def __init__(
        self,
        coordinator: "SimulatedCoordinator",
        node_id: NodeId,
        *,
        says: Callable[[Any], Message] | None = None,
    ) -> None:
        """`says` makes of each message of the node what the coordinator gets: a liar's."""
        self.is_cut = False
        self._says = says or (lambda message: message)
        self._coordinator = coordinator
        self._node_id = node_id

    @property
    def _desk(self) -> SessionDesk:
        """Whom a call reaches now; raises UnavailableError when nobody."""
        if self.is_cut:
            raise UnavailableError("the simulated link is cut")
        if self._coordinator.desk is None:
            raise UnavailableError("the simulated coordinator is down")
        return self._coordinator.desk

    async def GetRun(self, request: Message) -> Any:
        return self._told(partial(self._desk.get_run, self._node_id), request)

    async def Attach(self, request: Message) -> Any:
        return await self._asked(partial(self._desk.attach, self._node_id), request)

    async def Heartbeat(self, request: Message) -> Any:
        return await self._asked(partial(self._desk.heartbeat, self._node_id), request)

    async def Report(self, request: Message) -> Any:
        return await self._asked(partial(self._desk.report, self._node_id), request)

    async def ListCommits(self, request: Message) -> Any:
        return await self._asked(self._desk.list_commits, request)

    async def SubmitCommits(self, request: Message) -> Any:
        return await self._asked(partial(self._desk.submit_commits, self._node_id), request)

    async def SubmitRulings(self, request: Message) -> Any:
        return await self._asked(partial(self._desk.submit_rulings, self._node_id), request)

    async def Detach(self, request: Message) -> Any:
        return await self._asked(partial(self._desk.detach, self._node_id), request)

    def Subscribe(self, request: session_pb2.SubscribeRequest) -> "DeskStream":
        return DeskStream(self._desk.subscribe(self._node_id, _over_the_wire(request)))

    def _told(self, answer: Callable[[Any], Message], request: Message) -> Message:
        return _over_the_wire(answer(self._says(_over_the_wire(request))))

    async def _asked(
        self, answer: Callable[[Any], Awaitable[Message]], request: Message
    ) -> Message:
        return _over_the_wire(await answer(self._says(_over_the_wire(request))))


class SimulatedCoordinator:
    """The real core, store and desk. Its database is in a folder if there is one, else in memory."""

    def __init__(self, spec: RunSpec, folder: Path | None) -> None:
        self.desk: SessionDesk | None = None
        self.begins: dict[int, float] = {}  # when each round was opened
        self.num_audits = 0  # that members were asked for
        self._spec = spec
        self._folder = folder
        self._signer = CommitSigner(Ed25519PrivateKey.from_private_bytes(bytes(32)))
        self._clock: asyncio.Task[None] | None = None
        self.begin(Store.in_memory() if folder is None else Store.open(new_folder(folder)))

    @property
    def verifier(self) -> RulingVerifier:
        """What checks its rulings."""
        return RulingVerifier(self._signer.public_key)

    def begin(self, store: Store) -> None:
        """Serves what the store holds."""
        self.store = store
        rules = rules_in_force(self._spec, (signed.ruling for signed in store.rulings()))
        self.driver = Driver(
            state=replace(
                store.load(rules, self._spec.digest()),
                audit_secret=self._signer.audit_secret(self._spec.digest()),
            ),
            store=store,
            clock=LoopClock(starts_at=store.saved_now),
            watch=self._note,
        )
        self.rulings = Rulings(self.driver, self._spec, self._signer, wall_clock=lambda: 0.0)
        self.desk = SessionDesk(self.driver, Telemetry(), self._spec, self._signer, self.rulings)
        self._clock = asyncio.ensure_future(self.driver.run_clock())

    def _note(self, _: SwarmState, transition: Transition) -> None:
        now = asyncio.get_running_loop().time()
        for action in transition.actions:
            match action:
                case Tell(message=RoundOpened(plan=plan)):
                    self.begins[plan.round] = now
                case Tell(message=AuditAsked(), to=auditors):
                    self.num_audits += len(auditors or ())

    async def end(self) -> None:
        """Serves nobody any more."""
        self.desk = None
        self.driver.end_all(UnavailableError("the simulated coordinator has died"))
        if self._clock is not None:
            self._clock.cancel()
            await asyncio.gather(self._clock, return_exceptions=True)
        self.store.close()

    async def suffer(self, outages: Sequence[Outage]) -> None:
        """Dies and comes back, once or several times. Copies are made of what it served first."""
        assert self._folder is not None, "an outage needs a folder"
        clock = asyncio.get_running_loop().time
        first = self._folder
        copies = {
            o.copied_at: first.with_name(f"copy-{o.copied_at:g}") for o in outages if o.copied_at
        }
        events = sorted(
            [(at, None) for at in copies] + [(o.dies_at, o) for o in outages], key=itemgetter(0)
        )
        for at, outage in events:
            await asyncio.sleep(at - clock())
            if outage is None:
                with (
                    closing(sqlite3.connect(first / DATABASE_NAME)) as source,
                    closing(sqlite3.connect(new_folder(copies[at]) / DATABASE_NAME)) as target,
                ):
                    source.backup(target)
                continue
            await self.end()
            await asyncio.sleep(outage.returns_at - clock())
            serves = (
                first
                if outage.copied_at is None
                else new_folder(first.with_name(f"serves-{outage.dies_at:g}"))
            )
            if outage.copied_at is not None:
                shutil.copy(copies[outage.copied_at] / DATABASE_NAME, serves / DATABASE_NAME)
            self.begin(Store.open(serves))


class DeskStream:
    """A stream as a stub's caller sees it."""

    def __init__(self, events: AsyncIterator[Message]) -> None:
        self._events = events

    async def __aiter__(self) -> AsyncIterator[Message]:
        async for event in self._events:
            yield _over_the_wire(event)

    def cancel(self) -> None:
        """Nothing to do: the desk's stream ends with its reader."""


def _over_the_wire(message: Wire) -> Wire:
    return type(message).FromString(message.SerializeToString())


def new_folder(folder: Path) -> Path:
    """The folder, which is there from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder
