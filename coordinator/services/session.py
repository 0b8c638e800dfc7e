"""The link to the nodes: attach, heartbeats, events, reports, catching up.

`SessionDesk` answers; it knows nothing of gRPC, so a swarm in one process talks to it directly.
`SessionServicer` puts it on the wire, for callers that are enrolled nodes.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, MutableSequence, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, cast

import structlog

from coordinator.driver import Driver
from coordinator.invite_rows import EnrolledMember
from coordinator.journal import log_copy
from coordinator.server import Context
from coordinator.services import checks
from coordinator.services.accusations import Accusations
from coordinator.services.answering import (
    ATTACHES_A_SECOND,
    MOST_ATTACHES,
    MOST_TOLD,
    CallRates,
    Gate,
    for_all,
    refuse,
    service,
)
from coordinator.services.enrolment import Certificates
from coordinator.services.outside import Lookout
from coordinator.services.ruling import Rulings
from coordinator.streams import Telemetry
from coordinator.swarm.end import finished_reason
from coordinator.swarm.events import (
    Attached,
    BaseLearned,
    CommitLearned,
    Detached,
    HeartbeatSeen,
    HistoryTold,
    Reported,
    ReportedTogether,
)
from coordinator.swarm.members import PRESENT, Condition
from coordinator.swarm.membership import HEARTBEATS_PER_LEASE
from coordinator.swarm.state import Round, SwarmState, name_of, present_members
from protocol.errors import AtollError, BadDataError, CopyAttachedError, ProtocolMismatchError
from protocol.run.amendments import in_force
from protocol.run.run_spec import RunSpec
from protocol.trust.pki import Role
from protocol.trust.rulings import MOST_RULINGS, digest_of, rulings_from_wire
from protocol.trust.signing import CommitSigner, statement_of
from protocol.v1 import round_pb2
from protocol.v1 import session_pb2 as pb
from protocol.v1.session_pb2_grpc import SessionServiceServicer
from protocol.wire import convert
from protocol.wire.findings import EquivocationSeen, Finding, LeftOutSeen, ResultRefused
from protocol.wire.messages import (
    Message,
    PassedOver,
    Reduced,
    RoundCommitted,
    RulingsTold,
    message_to_wire,
    report_from_wire,
)
from protocol.wire.payload import PayloadError, PayloadHeader
from protocol.wire.rounds import Commit, Digest, NodeId
from protocol.wire.versions import COORDINATOR, NODE, WIRE, refuse_foreign_wire
from protocol.wire.vitals import Announcement, LinkRates

MAX_COMMITS = 64
MAX_COMMITS_BYTES = 1 << 20
"""An answer with commits ends with the one that passes this: a message holds 4 MiB at most, and a
commit of a hundred nodes has half of one."""

MOST_CHECKED = 16
"""Commits whose signatures are checked at a time, aside: heartbeats and lists go on between."""

MAX_REPORTS = 1024

MOST_PROOFS = 16
"""Of equivocation in one call, of which the others are not looked at: each costs two signatures to check."""

_log = structlog.get_logger()

MOST_NAMED = 8
"""Of nodes with other data than one that attaches."""

MOST_OUT_OF_REACH = 16
"""Of a node, in a status: a thousand that do not reach five hundred others fill four messages."""

MAX_STRANGERS = 1024
"""Out of reach: as many ids as there are members, and so many of nodes that are none any more, or not
yet to a coordinator that was started from an older copy. Those are left out."""


class SentMessages:
    """Messages as they go out, each made once: a plan for a thousand nodes names a thousand nodes."""

    KEPT = 8

    def __init__(self, signer: CommitSigner) -> None:
        self._signer = signer
        self._signature_of_ruling = lru_cache(maxsize=MOST_RULINGS)(signer.signature_of)
        self._made: deque[tuple[Message, pb.SubscribeResponse]] = deque(maxlen=self.KEPT)

    def made_of(self, message: Message) -> pb.SubscribeResponse:
        """The message on the wire, a commit with its signature; do not change it."""
        for known, wire in self._made:
            if known is message:
                return wire
        if isinstance(message, RulingsTold) and not message.signatures:
            signed = (self._signature_of_ruling(ruling.statement) for ruling in message.rulings)
            wire = message_to_wire(replace(message, signatures=tuple(signed)))
        else:
            wire = message_to_wire(message)
        if isinstance(message, RoundCommitted):
            wire.commit.signature = self._signer.signature_of(statement_of(wire.commit))
        self._made.appendleft((message, wire))
        return wire


class SessionDesk:
    """Answers nodes, whose identity the caller has checked. Everything raises AtollError."""

    def __init__(
        self,
        driver: Driver,
        telemetry: Telemetry,
        run: RunSpec,
        signer: CommitSigner,
        rulings: Rulings | None = None,
        lookout: Lookout | None = None,
    ) -> None:
        """Without `rulings` nobody else in this process makes any; without `lookout` nobody looks out."""
        self._lookout = lookout or Lookout(driver.clock.now)
        self._driver = driver
        self._telemetry = telemetry
        self._run = run
        self._signer = signer
        self._rulings = rulings or Rulings(driver, run, signer)
        self._accusations = Accusations(driver, self._rulings)
        self._sent = SentMessages(signer)
        self._attaches = CallRates(
            driver.clock.now,
            most=MOST_ATTACHES,
            a_second=ATTACHES_A_SECOND,
            next_step="wait; a node that attaches again and again says in its log why its sessions end",
        )
        self._passed_over: set[str] = set()  # names that the log has
        self._brought: dict[NodeId, Commit] = {}  # the last one that each node brought back
        self._told_unfit: set[NodeId] = set()

    def get_run(self, node_id: NodeId, request: pb.GetRunRequest) -> pb.GetRunResponse:
        """The run file, and how a run that is over is held here."""
        answer = pb.GetRunResponse(
            run_json=self._run.canonical_json(), run_digest=self._run.digest()
        )
        if (amended := in_force(self._run, self._rulings.all)) != self._run:
            answer.amended_json = amended.canonical_json()
        state = self._driver.state
        if state.is_finished:
            answer.over = finished_reason(state)
            answer.last_round = state.committed_round
            answer.is_held_here = any(
                member.outer_round >= state.committed_round and member.node_id != node_id
                for member in present_members(state)
            )
        return answer

    async def attach(self, node_id: NodeId, request: pb.AttachRequest) -> pb.AttachResponse:
        """Opens a session; raises ProtocolMismatchError for another run file, layout or codec.

        Raises CopyAttachedError while another process of the node is attached, TemporaryError for one that
        attaches again and again.
        """
        self._attaches.take(node_id)
        joined = self._driver.store.invites.member(node_id)  # None: never did, as in a simulation
        try:
            return await self._attach(node_id, request, joined)
        except ProtocolMismatchError as error:
            if node_id not in self._told_unfit and len(self._told_unfit) < MOST_TOLD:
                self._told_unfit.add(node_id)
                name = node_id if joined is None else joined.node_name
                _log.warning("a node is not let in, and ends", node=name, why=error.what)
            raise

    async def _attach(
        self, node_id: NodeId, request: pb.AttachRequest, joined: EnrolledMember | None
    ) -> pb.AttachResponse:
        refuse_foreign_wire(request.wire_version, whose=NODE, here=COORDINATOR)
        checks.said(request, of="the attaching node")
        event = Attached(
            **convert.values_from_wire(request, Announcement),
            node_id=node_id,
            invite_id="" if joined is None else joined.invite_id,
            is_helper=joined is not None and joined.role is Role.HELPER,
        )
        checks.announced(event, node_id)
        try:
            state = (await self._driver.apply(event)).state
        except CopyAttachedError:
            if self._telemetry.copy_refused(node_id, now=self._driver.clock.now()):
                log_copy(self._driver.state, node_id)
            raise
        self._telemetry.attached(node_id, now=self._driver.clock.now())
        self._telemetry.keep_only(state.members)
        lease_seconds = state.rules.lease_seconds
        missing = next(self._rulings.missing(request.num_rulings, request.rulings_digest), None)
        others = names_with_other_data(state, node_id)[:MOST_NAMED]
        if others:
            name = state.members[node_id].node_name
            _log.warning("nodes train on different data", node=name, others=", ".join(others))
        return pb.AttachResponse(
            rulings=None if missing is None else self._sent.made_of(missing).rulings,
            session_id=state.members[node_id].session_id,
            lease_seconds=lease_seconds,
            heartbeat_seconds=lease_seconds / HEARTBEATS_PER_LEASE,
            committed_round=state.committed_round,
            node_name=state.members[node_id].node_name,
            num_rulings=len(state.rulings),
            rulings_digest=digest_of(state.rulings),
            other_data_names=others,
            wire_version=WIRE,
        )

    async def heartbeat(
        self, node_id: NodeId, request: pb.HeartbeatRequest
    ) -> pb.HeartbeatResponse:
        """Renews the lease; raises SessionEndedError when the session is not the node's."""
        told = _known_of(request, self._driver.state.members.keys())
        event = HeartbeatSeen(
            node_id=node_id,
            session_id=told.session_id,
            outer_round=told.outer_round,
            outer_digest=convert.digest_from_wire(told.outer_digest, of="the outer state"),
            outer_incarnation=told.outer_incarnation,
            rates=_rates_of(told),
            outside=self._lookout.of(node_id, told.outside_token),
            **convert.values_from_wire(told, Condition),
        )
        state = (await self._driver.apply(event)).state
        now = self._driver.clock.now()
        _shorten(told)
        self._telemetry.heartbeat(node_id, told, now=now)
        return pb.HeartbeatResponse(
            lease_seconds=state.rules.lease_seconds,
            has_waiting_copy=self._telemetry.has_waiting_copy(node_id, now=now),
            outside_ports=self._lookout.ports,
            outside=event.outside,
        )

    async def report(self, node_id: NodeId, request: pb.ReportRequest) -> pb.ReportResponse:
        """Takes steps of rounds in, in their order; they are durable when this returns.

        All are looked at before the first is taken in: a batch with a fault changes nothing.
        """
        session = (node_id, request.session_id)
        self._driver.session_of(*session)  # a report of an ended one is not worth reading
        checks.at_most(request.reports, MAX_REPORTS, of="reports")
        state = self._driver.state
        current = state.open_round
        read = [_reported(node_id, report, current, state.run_digest) for report in request.reports]
        told = [one for one in read if isinstance(one, Reported)]
        for one in read:
            if isinstance(one, PassedOver) and one.is_new_among(self._passed_over):
                node, what = self._called(node_id), one.name
                _log.info("passed over what a later release of Atoll tells", node=node, told=what)
        proofs = [one.report for one in told if isinstance(one.report, EquivocationSeen)]
        left_out = [one.report for one in told if isinstance(one.report, LeftOutSeen)]
        refused = [one.report for one in told if isinstance(one.report, ResultRefused)]
        for shown in left_out[:MOST_PROOFS]:  # before a report that may end the round
            await self._accusations.heed_left_out(shown, of=node_id, session=session)
        # A copy that is restored plans rounds anew, and nodes repeat what they told of the plan before.
        reports = tuple(
            one
            for one in told
            if not isinstance(one.report, EquivocationSeen | LeftOutSeen | ResultRefused)
            and not (
                isinstance(one.report, Reduced)
                and current is not None
                and one.round == current.number
                and _is_of_another_plan(one.report.header, current)
            )
        )
        if reports:
            await self._driver.apply(ReportedTogether(reports=reports), session=session)
        for refusal in refused[:MOST_PROOFS]:
            await self._accusations.heed_refusal(refusal, of=node_id, session=session)
        for proof in proofs[:MOST_PROOFS]:
            await self._accusations.heed_equivocation(proof, of=node_id)
        self._telemetry.heard(node_id, now=self._driver.clock.now())
        return pb.ReportResponse()

    def _called(self, node_id: NodeId) -> str:
        return name_of(self._driver.state, node_id)

    async def submit_commits(
        self, node_id: NodeId, request: pb.SubmitCommitsRequest
    ) -> pb.SubmitCommitsResponse:
        """Learns commits that this coordinator lacks; none at all says that there are no more.

        Raises BadDataError for one that it never signed.
        """
        session = (node_id, request.session_id)
        self._driver.session_of(*session)
        commits: list[Commit] = []
        for start in range(0, len(request.commits), MOST_CHECKED):
            piece = request.commits[start : start + MOST_CHECKED]
            commits += await self._driver.aside(partial(self._checked, piece))
        for commit in sorted(commits, key=lambda commit: (commit.round, -commit.incarnation)):
            before = self._brought.get(node_id)  # messages end anywhere in a history
            if before is not None and before.round == commit.round - 1:
                await self._driver.apply(
                    BaseLearned(after=before, digest=commit.base_digest), session=session
                )
            await self._driver.apply(CommitLearned(commit=commit, node_id=node_id), session=session)
            self._brought[node_id] = commit
        if not commits:
            self._brought.pop(node_id, None)
            await self._driver.apply(HistoryTold(node_id=node_id), session=session)
        return pb.SubmitCommitsResponse(committed_round=self._driver.state.committed_round)

    def _checked(self, wire: Sequence[round_pb2.Commit]) -> list[Commit]:
        """Commits as values, each of which this coordinator has signed. For a thread aside."""
        commits = [convert.commit_from_wire(commit) for commit in wire]
        for commit in commits:
            if not self._rulings.has_signed(commit):
                raise BadDataError(
                    f"the commit of round {commit.round} does not bear this coordinator's signature",
                    next_step="move the node's history file away and start it again",
                )
        return commits

    async def list_commits(self, request: pb.ListCommitsRequest) -> pb.ListCommitsResponse:
        """The commits after a round, oldest first; the node asks again after the last one.

        The first is of a later round than the next one when older ones are not kept any more.
        """
        after = checks.count(request.after_round, of="the round")
        return await self._driver.aside(lambda: self._commits_after(after))

    def _commits_after(self, after: int) -> pb.ListCommitsResponse:
        page = self._driver.store.page_of_commits(
            after, limit=MAX_COMMITS, max_bytes=MAX_COMMITS_BYTES
        )
        for commit in page:
            if not commit.signature:  # a version of Atoll wrote it that signed when it was asked
                signed = self._signer.signed(convert.commit_from_wire(commit))
                commit.signature = signed.signature
        return pb.ListCommitsResponse(commits=page)

    async def submit_rulings(
        self, node_id: NodeId, request: pb.SubmitRulingsRequest
    ) -> pb.SubmitRulingsResponse:
        """Learns rulings that this coordinator lacks; raises BadDataError for one it never signed."""
        session = (node_id, request.session_id)
        self._driver.session_of(*session)
        checks.at_most(request.rulings.rulings, MOST_RULINGS, of="rulings")
        brought = rulings_from_wire(request.rulings)
        known = await self._rulings.learn(brought, session=session)
        return pb.SubmitRulingsResponse(num_rulings=known)

    async def detach(self, node_id: NodeId, request: pb.DetachRequest) -> pb.DetachResponse:
        """Ends the session; raises SessionEndedError when it has ended already."""
        reason = checks.words(request.reason, of="the reason")
        event = Detached(node_id=node_id, session_id=request.session_id, reason=reason)
        await self._driver.apply(event)
        self._lookout.forget(node_id)
        return pb.DetachResponse()

    async def subscribe(
        self, node_id: NodeId, request: pb.SubscribeRequest
    ) -> AsyncGenerator[pb.SubscribeResponse, None]:
        """The session's events, beginning with what holds now; ends by SessionEndedError."""
        stream = self._driver.subscribe(node_id, request.session_id)
        try:
            for told in self._rulings.missing(request.num_rulings, request.rulings_digest):
                yield self._sent.made_of(told)
            while True:
                yield self._sent.made_of(await stream.next())
        except (GeneratorExit, asyncio.CancelledError):  # the reader is gone
            self._driver.stream_broken(stream)
            raise
        finally:
            self._driver.unsubscribe(stream)


def _reported(
    node_id: NodeId, wire: pb.Report, current: Round | None, run_digest: Digest
) -> Reported | PassedOver:
    """A report that can be. `current` is the round whose reports can still matter.

    Of a round that is over, or has another plan here, nothing but its number is looked at: the plan is
    another where the coordinator goes on from an older copy, or the run has gone back.
    """
    number = checks.count(wire.round, of="the round")
    current = current if current is not None and current.number == number else None
    most = 0 if current is None else len(current.assignments)
    read = report_from_wire(wire, most_contributors=most)
    if isinstance(read, PassedOver):
        return read
    report = checks.report(read)
    if (
        isinstance(report, Reduced)
        and current is not None
        and not _is_of_another_plan(report.header, current)
    ):
        report = checks.reduced(report, node_id=node_id, round=number)
    if isinstance(report, Finding):
        checks.finding(report, node_id=node_id, round=number, run_digest=run_digest)
    return Reported(node_id=node_id, round=number, report=report)


def _is_of_another_plan(header: bytes, current: Round) -> bool:
    """Whether a result was made by an earlier plan of the round, as its header says."""
    try:
        return bool(header) and PayloadHeader.decode(header).plan_opened_at != current.opened_at
    except PayloadError:
        return False


_PEERS = {
    "unreachable_ids": "members out of reach",
    "punched_ids": "members behind holes in routers",
    "narrow_ids": "members that only small packets get to",
    "by_proxy_ids": "members that it reaches by its proxy",
    "through": "members that others carry to",
}
"""Lists of a heartbeat by their names."""


def _known_of(request: pb.HeartbeatRequest, members: AbstractSet[NodeId]) -> pb.HeartbeatRequest:
    """What can be of a heartbeat: a message may hold fields that nobody here knows, and ids of no members."""
    checks.said(request, of="the heartbeat")
    checks.round_spans(request.reach_back)
    checks.place_by_ipv6(request.outside_by_ipv6)
    for name, what in _PEERS.items():
        checks.at_most(getattr(request, name), len(members) + MAX_STRANGERS, of=what)
    wire = checks.wire(convert.wire_counts_from_wire(request.wire))
    known = pb.HeartbeatRequest()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    _put(known.wire, convert.wire_counts_to_wire(wire))
    carried = {t.node_id: t for t in request.through if {t.node_id, t.through_id} <= members}
    _put(known.through, [carried[node_id] for node_id in sorted(carried)])
    for name in _PEERS.keys() - {"through"}:
        _put(getattr(known, name), sorted(members & {*getattr(request, name)}))
    return known


def _shorten(known: pb.HeartbeatRequest) -> None:
    """Leaves what `status` shows to everybody: kept, one member's megabytes would be in every answer."""
    for name in _PEERS:
        del getattr(known, name)[MOST_OUT_OF_REACH:]
    known.outside_token = b""  # with it others could say where this node is
    known.outside_by_ipv6 = ""


def _put(into: MutableSequence[Any], items: Iterable[object]) -> None:
    del into[:]
    into.extend(items)


def _rates_of(request: pb.HeartbeatRequest) -> LinkRates:
    """What a node says of its link. The core leaves out what no link carries."""
    told = request.link_rates
    return LinkRates(
        up_bytes_per_second=told.up_bytes_per_second or None,
        down_bytes_per_second=told.down_bytes_per_second or None,
    )


def session_service(
    desk: SessionDesk, gate: Gate, certificates: Certificates
) -> SessionServiceServicer:
    """The desk on gRPC; every caller is an enrolled node."""
    calls = service(
        gate.node,
        GetRun=desk.get_run,
        Attach=desk.attach,
        Renew=certificates.renew_in_session,
        Heartbeat=desk.heartbeat,
        Report=desk.report,
        ListCommits=for_all(desk.list_commits),
        SubmitCommits=desk.submit_commits,
        SubmitRulings=desk.submit_rulings,
        Detach=desk.detach,
    )
    attach = calls.Attach

    async def attach_and_tell_times(
        request: pb.AttachRequest, context: Context
    ) -> pb.AttachResponse:
        answer: pb.AttachResponse = await attach(request, context)
        answer.renew_in_seconds, answer.unix_seconds = gate.times(context)
        return answer

    async def subscribe(
        request: pb.SubscribeRequest, context: Context
    ) -> AsyncIterator[pb.SubscribeResponse]:
        try:
            async with aclosing(desk.subscribe(gate.node(context), request)) as events:
                async for event in events:
                    yield event
        except AtollError as error:
            await refuse(context, error)

    calls.Attach, calls.Subscribe = attach_and_tell_times, subscribe
    return cast("SessionServiceServicer", calls)


def names_with_other_data(state: SwarmState, node_id: NodeId) -> list[str]:
    """Members present whose data differ from those of this one, where numbers should name the same samples.

    Helpers tell of no data, and neither do members that have yet to get theirs, or bring their own.
    """
    own = state.members[node_id].corpus
    if state.rules.has_private_data or not own.num_samples:
        return []
    return sorted(
        member.node_name
        for member in state.members.values()
        if member.state in PRESENT and not member.is_helper and member.corpus.num_samples
        if not member.corpus.is_same(own)
    )
