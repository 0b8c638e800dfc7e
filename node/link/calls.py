"""The coordinator as a node calls it: the stub's messages on one side, the node's values on the other.

`run_of_coordinator` is a node's first question, asked until it is answered. A machine that boots before the
coordinator's, or before its own network is up, waits: it has nothing else to do, and nobody may be there to
start it again. So does one that finds another run's coordinator in the place of its own. What no waiting can
mend ends it at once: a node that is not let in any more, another version.
"""

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import structlog

from protocol.errors import (
    AtollError,
    HeldBackError,
    OtherSwarmError,
    ProtocolMismatchError,
    UnavailableError,
)
from protocol.run.run_files import run_from_json
from protocol.run.run_spec import RunSpec
from protocol.trust.credentials import Credentials
from protocol.trust.rulings import (
    NO_DIGEST,
    Address,
    SignedRuling,
    rulings_from_wire,
    rulings_to_wire,
)
from protocol.v1 import session_pb2
from protocol.v1.session_pb2_grpc import SessionServiceStub
from protocol.wire import convert
from protocol.wire.channel import USUAL_REPORTS_BYTES, open_channel, retried
from protocol.wire.messages import (
    Message,
    PassedOver,
    Report,
    RosterChanged,
    RosterTold,
    message_from_wire,
    report_to_wire,
)
from protocol.wire.rounds import Commit, Digest, NodeId, RosterEntry
from protocol.wire.versions import COORDINATOR, NODE, WIRE, refuse_foreign_wire
from protocol.wire.vitals import LONG_WORDS, Announcement, Vitals, heartbeat_of, words_for_people

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What the coordinator answers."""

    session_id: int
    heartbeat_seconds: float
    committed_round: int
    node_name: str = ""  # what the swarm calls the node
    num_rulings: int = 0  # that the coordinator knows
    rulings_digest: Digest = NO_DIGEST
    rulings: tuple[SignedRuling, ...] = field(  # of those that the node lacks
        default=(), metadata=convert.converted_by(rulings_to_wire, rulings_from_wire)
    )
    renew_in_seconds: float = 0.0  # 0 where there is no certificate
    unix_seconds: float = 0.0  # the coordinator's time; 0 where it does not say
    other_data_names: tuple[str, ...] = ()  # nodes that train on other data than this one


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOver:
    """How a run has ended."""

    why: str
    last_round: int
    is_held_here: bool  # by a member other than this one, which is here now


class SessionStub(Protocol):
    """The calls of atoll.v1.SessionService; tests put a coordinator in the same process behind it."""

    @property
    def GetRun(self) -> Any: ...  # noqa: D102, N802
    @property
    def Attach(self) -> Any: ...  # noqa: D102, N802
    @property
    def Heartbeat(self) -> Any: ...  # noqa: D102, N802
    @property
    def Subscribe(self) -> Any: ...  # noqa: D102, N802
    @property
    def Report(self) -> Any: ...  # noqa: D102, N802
    @property
    def ListCommits(self) -> Any: ...  # noqa: D102, N802
    @property
    def SubmitCommits(self) -> Any: ...  # noqa: D102, N802
    @property
    def SubmitRulings(self) -> Any: ...  # noqa: D102, N802
    @property
    def Detach(self) -> Any: ...  # noqa: D102, N802


AskMembers = Callable[[Credentials], Awaitable[Sequence[Address]]]
"""Asks members where the coordinator of these credentials is."""


async def _nowhere_else(ask: AskMembers | None = None) -> bool:
    return False


class CoordinatorLink:
    """Calls the coordinator. Errors are AtollErrors, translated where the stub was made.

    `renew` gets a new certificate, and returns in how many seconds to get the next. `reconnect` has later
    calls go over a new connection: the one that there is may be dead, and nobody has said so. `moves_to`
    has them look at another address as well. `host` is where they go now. `look_elsewhere` asks members where
    the coordinator is, and returns whether there is another address to try; `meets` is told who they are.
    """

    def __init__(
        self,
        stub: SessionStub,
        *,
        renew: Callable[[], Awaitable[float]] | None = None,
        reconnect: Callable[[], None] = lambda: None,
        moves_to: Callable[[Address], None] = lambda _: None,
        host: Callable[[], str] = lambda: "",
        look_elsewhere: Callable[[AskMembers | None], Awaitable[bool]] = _nowhere_else,
        meets: Callable[[Sequence[RosterEntry]], None] = lambda _: None,
    ) -> None:
        self._stub = stub
        self._meets = meets
        self.look_elsewhere = look_elsewhere
        self._host = host
        self._passed_over: set[str] = set()  # names that the log has
        self._outside_ports: tuple[int, ...] = ()
        self.outside: tuple[str, ...] = ()
        """What the coordinator has seen of us lately, by multiaddresses: where routers put us."""
        self.moves_to = moves_to
        self.renew = renew
        self.reconnect = reconnect
        self.rules = RunSpec()
        """Those in force when the run was got, for estimates: what holds stands in signed rulings."""
        self.over: RunOver | None = None
        """Of a run that was over when it was got; None of one that went on."""

    async def get_run(self) -> RunSpec:
        """The run file. Raises when this software reads it differently than the coordinator does."""
        answer = await self._stub.GetRun(session_pb2.GetRunRequest())
        spec = run_from_json(answer.run_json)
        if spec.digest() != answer.run_digest:
            raise ProtocolMismatchError(
                f"the run file reads as {spec.digest().hex()[:12]} here and "
                f"{answer.run_digest.hex()[:12]} at the coordinator",
                next_step="install the same version of Atoll on both sides: 'atoll --version'",
            )
        self.rules = run_from_json(answer.amended_json) if answer.amended_json else spec
        if answer.over:
            self.over = RunOver(
                why=answer.over, last_round=answer.last_round, is_held_here=answer.is_held_here
            )
        return spec

    async def attach(
        self,
        announcement: Announcement,
        *,
        num_rulings: int = 0,
        rulings_digest: Digest = NO_DIGEST,
    ) -> Attachment:
        """Opens a session. The rulings are those that the node keeps."""
        request = convert.to_wire(announcement, session_pb2.AttachRequest)
        request.num_rulings, request.rulings_digest = num_rulings, rulings_digest
        request.wire_version = WIRE
        answer = await self._stub.Attach(request)
        refuse_foreign_wire(answer.wire_version, whose=COORDINATOR, here=NODE)
        return convert.from_wire(answer, Attachment)

    async def heartbeat(self, session_id: int, vitals: Vitals) -> bool:
        """Renews the lease. Raises SessionEndedError when the session is over.

        Returns whether another process with this node's key asks to attach, and is refused.
        """
        answer = await self._stub.Heartbeat(heartbeat_of(session_id, vitals))
        self._outside_ports = tuple(answer.outside_ports)
        self.outside = tuple(answer.outside)
        return bool(answer.has_waiting_copy)

    @property
    def observers(self) -> tuple[tuple[str, int], ...]:
        """Where the coordinator sees from where our datagrams come: hosts, and ports of UDP."""
        host = self._host()
        return tuple((host, port) for port in self._outside_ports) if host else ()

    async def report(self, session_id: int, reports: Sequence[tuple[int, Report]]) -> None:
        """Makes reports, each with its round, durable at the coordinator, in their order."""
        made = [report_to_wire(round, report) for round, report in reports]
        for some in in_messages(made, most_bytes=USUAL_REPORTS_BYTES):
            await self._stub.Report(session_pb2.ReportRequest(session_id=session_id, reports=some))

    async def messages(
        self, session_id: int, *, num_rulings: int = 0, rulings_digest: Digest = NO_DIGEST
    ) -> AsyncIterator[Message]:
        """What happens, as it happens, beginning with what holds now; the roster always whole.

        The rulings that the node keeps are not told again.
        """
        call = self._stub.Subscribe(
            session_pb2.SubscribeRequest(
                session_id=session_id, num_rulings=num_rulings, rulings_digest=rulings_digest
            )
        )
        members: dict[NodeId, RosterEntry] = {}
        try:
            async for wire in call:
                message = message_from_wire(wire)
                match message:
                    case PassedOver(name=name):
                        if message.is_new_among(self._passed_over):
                            log.info("passed over what a later release of Atoll tells", told=name)
                        continue
                    case RosterTold():
                        members = {entry.node_id: entry for entry in message.members}
                    case RosterChanged(joined=joined, gone=gone):
                        members = {n: entry for n, entry in members.items() if n not in gone}
                        members |= {entry.node_id: entry for entry in joined}
                        message = RosterTold(members=tuple(m for _, m in sorted(members.items())))
                if isinstance(message, RosterTold):
                    self._meets(message.members)
                yield message
        finally:
            call.cancel()  # gRPC keeps a stream open whose reader merely went away

    async def list_commits(self, after_round: int) -> tuple[Commit, ...]:
        """Commits of later rounds, oldest first, at most 64."""
        answer = await self._stub.ListCommits(
            session_pb2.ListCommitsRequest(after_round=after_round)
        )
        return tuple(convert.commit_from_wire(commit) for commit in answer.commits)

    async def submit_commits(self, session_id: int, commits: tuple[Commit, ...]) -> int:
        """Brings signed commits back, oldest first; returns the newest round that is known then."""
        answer = await self._stub.SubmitCommits(
            session_pb2.SubmitCommitsRequest(
                session_id=session_id, commits=[convert.commit_to_wire(c) for c in commits]
            )
        )
        return int(answer.committed_round)

    async def submit_rulings(self, session_id: int, rulings: Sequence[SignedRuling]) -> int:
        """Brings rulings back, in their order; returns how many the coordinator knows then."""
        answer = await self._stub.SubmitRulings(
            session_pb2.SubmitRulingsRequest(
                session_id=session_id, rulings=rulings_to_wire(rulings)
            )
        )
        return int(answer.num_rulings)

    async def detach(self, session_id: int, reason: str) -> None:
        """Says goodbye."""
        said = words_for_people(reason, most=LONG_WORDS)
        await self._stub.Detach(session_pb2.DetachRequest(session_id=session_id, reason=said))


class _Reasons:
    """Says why it waits: once for each change of the reason, not once for each try."""

    def __init__(self) -> None:
        self.num_tries = 0
        self._last = ""

    def note(self, error: AtollError, _seconds: float) -> None:
        self.num_tries += 1
        if error.what != self._last:
            self._last = error.what
            held_back = isinstance(error, HeldBackError)
            log.warning(
                f"waiting for the {'run owner' if held_back else 'coordinator'}; "
                "Ctrl-C ends it, --no-wait does not wait",
                why=error.what,
                next_step=error.next_step,
            )


async def run_of_coordinator(link: CoordinatorLink, *, waits: bool, rng: random.Random) -> RunSpec:
    """The run file, once the coordinator answers; without `waits` at once or never.

    Raises what no waiting can mend, and without `waits` what is PASSING as well.
    """

    async def ask() -> RunSpec:
        try:
            return await link.get_run()
        except (UnavailableError, OtherSwarmError):
            if not await link.look_elsewhere(None):
                raise
            return await link.get_run()

    if not waits:
        return await ask()
    reasons = _Reasons()
    spec = await retried(ask, is_wanted=lambda: True, random=rng, on_wait=reasons.note)
    if reasons.num_tries:
        log.info("the coordinator is there", after_tries=reasons.num_tries)
    return spec


async def run_in_force(folder: Path) -> RunSpec:
    """The run file as it is amended, asked once of the coordinator that a node's folder names."""
    async with open_channel(Credentials.load(folder)) as channel:
        link = CoordinatorLink(SessionServiceStub(channel))
        await link.get_run()
        return link.rules


def in_messages(
    items: Sequence[session_pb2.Report], *, most_bytes: int
) -> Iterator[list[session_pb2.Report]]:
    """The items in their order, as many at a time as have room; one that has none alone."""
    some: list[session_pb2.Report] = []
    num_bytes = 0
    for item in items:
        size = item.ByteSize()
        if some and num_bytes + size > most_bytes:
            yield some
            some, num_bytes = [], 0
        some.append(item)
        num_bytes += size
    if some:
        yield some
