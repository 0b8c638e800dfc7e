"""The coordinator as a node calls it: the stub's messages on one side, the node's values on the other.

`RenewingCalls` is a stub over a channel that is opened anew with each new certificate. A certificate is
renewed in the session, or, where the coordinator refuses the one that there is, by the identity on the
joining port. Calls in flight go on over the channel on which they began, the stream of messages too.

Where the run owner has told that the coordinator moves, calls look for it at both addresses in turns: each
that finds nobody has the next ones go to the other one. Once it has answered at the new one, only that stays.
So they do where its name has led while it answered: a network whose names fail may reach it all the same.
A node that starts, and finds nobody, asks the members that its folder names as well: it was off when the rest
was told. A running one that is away for a while asks those that it is connected to: it may have been cut off.

`run_of_coordinator` is a node's first question, asked until it is answered. A machine that boots before the
coordinator's, or before its own network is up, waits: it has nothing else to do, and nobody may be there to
start it again. So does one that finds another run's coordinator in the place of its own. What no waiting can
mend ends it at once: a node that is not let in any more, another version.
"""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc.aio
import structlog

from protocol.errors import (
    AtollError,
    CertificateRefusedError,
    HeldBackError,
    NotPermittedError,
    OtherSwarmError,
    ProtocolMismatchError,
    TemporaryError,
    UnavailableError,
)
from protocol.run.run_files import run_from_json
from protocol.run.run_spec import RunSpec
from protocol.trust.credentials import Credentials
from protocol.trust.enrolment import no_new_one, renew_by_identity, renewal_request, taken
from protocol.trust.handshake import addresses_of, fetch_certificate
from protocol.trust.identity import Identity
from protocol.trust.invite import InvitedBy, endpoint_of, named_members
from protocol.trust.pki import pin_of
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
from protocol.wire.channel import DEADLINE_SECONDS, left_alone, open_channel, retried
from protocol.wire.message_sizes import USUAL_REPORTS_BYTES, in_messages
from protocol.wire.messages import (
    Message,
    PassedOver,
    Report,
    RosterChanged,
    RosterTold,
    message_from_wire,
    report_to_wire,
)
from protocol.wire.payload import WireCounts
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


ASK_MEMBERS_AGAIN_SECONDS = 60.0

MOST_KEPT_MEMBERS = 4
"""In link.toml."""


def kept_members(
    kept: Sequence[InvitedBy], met: Sequence[RosterEntry], *, own_id: NodeId
) -> tuple[InvitedBy, ...]:
    """Whom a node's folder names: those of before where they are, then others, if all can dial them first.

    Nobody is forgotten while nobody is here.
    """
    here = named_members(entry.address for entry in met if entry.node_id != own_id)
    if not here:
        return tuple(kept)
    were = {member.public_key for member in kept}
    ordered = sorted(here, key=lambda one: (one.is_local, one.public_key not in were))
    return tuple(ordered[:MOST_KEPT_MEMBERS])


class RenewingCalls:
    """A SessionStub. Leave it as a context manager: it closes its channels.

    `ask_members` is how those that credentials name are asked where the coordinator is.
    """

    def __init__(
        self,
        credentials: Credentials,
        identity: Identity,
        counts: WireCounts,
        ask_members: AskMembers | None = None,
    ) -> None:
        self._ask_members = ask_members
        self._asked_at = -math.inf
        self._has_told_of_asking = False  # since it has answered last
        self._credentials = credentials
        self._identity = identity
        self._counts = counts
        self._channel = open_channel(credentials, counts)
        self._stream_channel: grpc.aio.Channel | None = None  # of the messages, the last time
        self._led_to: dict[str, tuple[str, ...]] = {}  # a name, when somebody answered there
        self._is_by_address = False
        self._noting: asyncio.Task[None] | None = None  # where the channel's name leads
        self._is_at_the_other = False  # than link.toml has first
        self._turn = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "RenewingCalls":
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in {self._channel, self._stream_channel}:
            if channel is not None:
                await channel.close()
        self._end_noting()
        await asyncio.gather(*self._closing, return_exceptions=True)

    @property
    def credentials(self) -> Credentials:
        """Those that new connections are made with."""
        return self._credentials

    def __getattr__(self, method: str) -> Callable[[Any], Any]:
        """The call of that name."""
        if method.startswith("_"):
            raise AttributeError(method)
        return self._streamed if method == "Subscribe" else self._unary(method)

    def _unary(self, method: str) -> Callable[[Any], Any]:
        async def call(request: Any) -> Any:
            used, channel = self._credentials, self._channel
            try:
                answer = await getattr(SessionServiceStub(channel), method)(request)
                if channel is self._channel and self._noting is None:
                    self._noting = asyncio.create_task(self._note_addresses())
                if self._is_at_the_other and used is self._credentials:
                    self._found()
                self._has_told_of_asking = False
                return answer
            except CertificateRefusedError as error:
                try:
                    await self._renew_refused(used, error)
                except OtherSwarmError:
                    if used is self._credentials:
                        self._look_at_the_other()
                    raise
                answer = await getattr(SessionServiceStub(self._channel), method)(request)
                log.info("the certificate was refused, and the identity has got a new one")
                return answer
            except UnavailableError:
                if channel is self._channel:
                    self._look_further()
                raise

        return call

    def moves_to(self, address: Address) -> None:
        """The coordinator will be there: calls that find nobody look there in turns. Kept in link.toml."""
        ours = self._credentials
        there = (address.host, address.control_port)
        if there == (ours.host, ours.control_port) or self._is_at_the_other:
            return
        self._credentials = replace(ours, elsewhere=address)
        self._credentials.save_renewed()
        log.info("the coordinator will move", to=endpoint_of(*there))

    def meets(self, members: Sequence[RosterEntry]) -> None:
        """Keeps in link.toml who else is here, for a start that finds no coordinator."""
        ours = self._credentials
        own_id = NodeId(ours.principal.node_id or "")
        kept = kept_members(ours.members, members, own_id=own_id)
        if set(kept) != set(ours.members):
            self._credentials = replace(ours, members=kept)
            self._credentials.save_link()

    async def look_elsewhere(self, ask: AskMembers | None = None) -> bool:
        """Asks members where the coordinator is; later calls go there. Not again for a while.

        A running node says how it asks those that it is connected to. Else those are asked that link.toml
        names. Returns whether the coordinator shows its certificate at another address; that is kept once
        it has answered there.
        """
        now = asyncio.get_running_loop().time()
        members = self._credentials.members
        if ask is None and (self._ask_members is None or not members):
            return False
        if now < self._asked_at + ASK_MEMBERS_AGAIN_SECONDS:
            return False
        self._asked_at = now
        where = [endpoint_of(member.host, member.port) for member in members]
        whom = {"members": where} if ask is None else {}
        say = log.debug if self._has_told_of_asking else log.info
        self._has_told_of_asking = True
        say("asking members where the coordinator is", **whom)
        asked = ask or self._ask_members
        assert asked is not None
        try:
            found = self._credentials.unknown_among(await asked(self._credentials))
        except AtollError as error:
            log.warning("members are not asked", why=error.what, next_step=error.next_step)
            return False
        shown = [await self._shows_our_pin(address) for address in found]
        there = next(
            (address for address, is_shown in zip(found, shown, strict=True) if is_shown), None
        )
        if there is None:
            say("they know no other address where it answers, or do not answer", told=len(found))
            return False
        if self._is_at_the_other:
            self._look_at_the_other()
        self._credentials = replace(self._credentials, elsewhere=there)
        self._look_at_the_other()
        return True

    async def _shows_our_pin(self, address: Address) -> bool:
        """Whether the coordinator is there: members may be mistaken, or lie, and are not believed."""
        pin, proxy = pin_of(self._credentials.server_root_pem), self._credentials.proxy
        try:
            certificate = await left_alone(
                lambda: fetch_certificate(address.host, address.control_port, proxy)
            )
        except AtollError as error:
            log.info("a member names a place where no coordinator is", why=error.what)
            return False
        return pin_of(certificate) == pin

    def _look_at_the_other(self) -> None:
        if self._credentials.elsewhere is not None:
            self._is_by_address = False
            self._credentials = self._credentials.at_the_other
            self._is_at_the_other = not self._is_at_the_other
            self.reconnect()

    def _look_further(self) -> None:
        """Calls that find nobody go where the name has led before, and then to the other place, in turns."""
        ours = self._credentials
        before = self._led_to.get(ours.host, ())
        if self._is_by_address:
            self._led_to[ours.host] = (*before[1:], *before[:1])
        self._is_by_address = not self._is_by_address and bool(before)
        if self._is_by_address or ours.elsewhere is None:
            self.reconnect()
        else:
            self._look_at_the_other()

    async def _note_addresses(self) -> None:
        """While the name leads somewhere. A proxy looks it up by itself."""
        host, proxy = self._credentials.host, self._credentials.proxy
        if not self._is_by_address and proxy is None:
            found = await left_alone(partial(addresses_of, host))
            self._led_to[host] = found or self._led_to.get(host, ())

    def _end_noting(self) -> None:
        if self._noting is not None:
            self._noting.cancel()
            self._noting = None

    def _opened(self) -> grpc.aio.Channel:
        self._end_noting()
        address = self._led_to[self._credentials.host][0] if self._is_by_address else None
        return open_channel(self._credentials, self._counts, address=address)

    def _found(self) -> None:
        """Somebody of ours has answered where the coordinator was to move to."""
        self._credentials = replace(self._credentials, elsewhere=None)
        self._is_at_the_other = False
        self._credentials.save_renewed()
        log.info("the coordinator has moved", to=self._credentials.endpoint)

    def _streamed(self, request: Any) -> Any:
        """A stream that breaks is not opened again here: the session attaches before."""
        before, self._stream_channel = self._stream_channel, self._channel
        if before is not None and before is not self._channel:
            self._close(before)
        return SessionServiceStub(self._channel).Subscribe(request)

    async def renew(self) -> float:
        """A new certificate by the one that there is; returns in how many seconds to do so again."""
        async with self._turn:
            stub = SessionServiceStub(self._channel)
            answer = await stub.Renew(renewal_request(self._credentials, self._identity))
            self._go_on_with(taken(self._credentials, answer))
            return answer.renew_in_seconds

    async def _renew_refused(self, used: Credentials, refusal: CertificateRefusedError) -> None:
        """By the identity. Raises why not, or the refusal where who answers there is none of ours."""
        async with self._turn:
            if used is not self._credentials:
                return  # another call has done it meanwhile
            try:
                renewed = await renew_by_identity(self._credentials, self._identity)
            except (NotPermittedError, HeldBackError, TemporaryError):
                raise
            except AtollError as error:
                log.debug("no new certificate", why=error.what)
                raise no_new_one(self._credentials, refusal, error) from error
            self._go_on_with(renewed)

    def _go_on_with(self, renewed: Credentials) -> None:
        renewed.save_renewed()
        before, self._credentials = self._channel, renewed
        self._channel = self._opened()
        if before is not self._stream_channel:
            self._close(before)

    def reconnect(self) -> None:
        """Later calls go over a new connection. Those in flight may still be answered."""
        before, self._channel = self._channel, self._opened()
        if before is not self._stream_channel:
            self._close(before)

    def _close(self, channel: grpc.aio.Channel) -> None:
        """When the calls on it have ended."""
        task = asyncio.create_task(channel.close(DEADLINE_SECONDS))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


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
