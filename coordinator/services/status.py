"""Read-only answers for people and programs: the run, its nodes, its rounds."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from coordinator.dashboard.given import Given, Tally
from coordinator.dashboard.timeline import RoundTimes, Timeline
from coordinator.driver import Driver
from coordinator.round_rows import screening_to_wire, wire_ledger
from coordinator.services import checks
from coordinator.services.answering import Gate, for_all, service
from coordinator.services.one_round import closed_round, open_round
from coordinator.streams import Telemetry
from coordinator.swarm.agreement import awaits_first_weights
from coordinator.swarm.books import recent_screening
from coordinator.swarm.explain import (
    alike_in_words,
    differing_in_words,
    explain,
    paused_in_words,
    run_seconds_left,
)
from coordinator.swarm.going_back import books_after, rounds_in_reach, spans_in_words
from coordinator.swarm.ledger import free_again, num_reached, num_samples_of, used_up
from coordinator.swarm.members import BARRED, PRESENT, Member, MemberState
from coordinator.swarm.reach import is_symmetric
from coordinator.swarm.standing import waiting_in_words
from coordinator.swarm.state import (
    HeldOut,
    RoundPhase,
    SwarmState,
    Written,
    next_round,
    present_members,
)
from coordinator.swarm.weighing import common_corpus, say_of, unchecked, weight_of
from protocol.errors import NoInputError
from protocol.run.amendments import still_in_force
from protocol.run.run_spec import RunSpec
from protocol.trust.pki import Role
from protocol.trust.rulings import Ruling, RulingKind, in_words
from protocol.v1 import session_pb2
from protocol.v1 import status_pb2 as pb
from protocol.v1.status_pb2_grpc import StatusServiceServicer
from protocol.wire import convert
from protocol.wire.rounds import CorpusSummary, Digest, NodeId
from protocol.wire.vitals import UNMEASURED, LinkRates

DEFAULT_ROUNDS = 20
MAX_ROUNDS = 4000
"""More than a database has figures of, for runs of up to 100 million rounds."""

MOST_TRIES = 3
"""A round may be closed while the database is asked for the commits before."""

MOST_LOSSES = 2000
"""Held-out losses in an answer: the newest half of them, and of those before as many, evenly spread."""

_PHASES = {
    RoundPhase.TRAINING: pb.RUN_PHASE_TRAINING,
    RoundPhase.EXCHANGING: pb.RUN_PHASE_EXCHANGING,
    RoundPhase.APPLYING: pb.RUN_PHASE_APPLYING,
}
_NODE_STATES = {
    MemberState.JOINING: pb.NODE_STATE_JOINING,
    MemberState.READY: pb.NODE_STATE_READY,
    MemberState.DIVERGED: pb.NODE_STATE_DIVERGED,
    MemberState.LOST: pb.NODE_STATE_LOST,
    MemberState.LEFT: pb.NODE_STATE_LEFT,
    MemberState.QUARANTINED: pb.NODE_STATE_QUARANTINED,
    MemberState.EXPELLED: pb.NODE_STATE_EXPELLED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What is remembered of rounds for people, beside what the swarm decides by."""

    timeline: Timeline = field(default_factory=Timeline)
    kept_times: Callable[[int], RoundTimes | None] = lambda number: None
    """Of a round that the timeline has no more. For a thread aside."""
    given: Tally | None = None


class StatusDesk:
    """Answers from the state, the telemetry and the store, as of one instant."""

    def __init__(
        self,
        driver: Driver,
        telemetry: Telemetry,
        run: RunSpec,
        *,
        swarm_id: str,
        past: Past | None = None,
        relay: Callable[[], str] = lambda: "",
        add_for_owner: Callable[[pb.RunStatus, float], None] = lambda run, now: None,
    ) -> None:
        self._driver = driver
        self._telemetry = telemetry
        self._run = run
        self._prompts = run.evaluation.prompts
        self._swarm_id = swarm_id
        self._past = past or Past()
        self._relay = relay
        self._add_for_owner = add_for_owner
        self._started_at = driver.clock.now()

    def get_status(
        self,
        request: pb.GetStatusRequest,
        role: Role = Role.OPERATOR,
        *,
        most_losses: int = MOST_LOSSES,
    ) -> pb.GetStatusResponse:
        """The run, the round in flight and all nodes; for viewers without their addresses.

        Of backups and of the coordinator's disk only the run owner is told.
        Of more than `most_losses` held-out losses it has so many, the first and the latest among them.
        """
        state, now = self._driver.state, self._driver.clock.now()
        shares = confirmed_shares(state)
        steps, corpus = _steps_asked(state), common_corpus(state)
        nodes = [
            self._node_status(
                state, member, now, shares.get(node_id), steps.get(node_id, 0), corpus
            )
            for node_id, member in state.members.items()
        ]
        nodes += self._never_attached(state)
        if role is Role.VIEWER:
            for node in nodes:
                node.ClearField("address")
        unix_seconds = time.time()
        run = self._run_status(state, now, most_losses)
        if role is Role.OPERATOR:
            self._add_for_owner(run, unix_seconds)
        return pb.GetStatusResponse(
            run=run,
            nodes=sorted(nodes, key=lambda node: node.node_id),
            unix_seconds=unix_seconds,
        )

    def _never_attached(self, state: SwarmState) -> list[pb.NodeStatus]:
        """Nodes that have joined and are held back, and were not here since."""
        found = []
        for one in self._driver.store.invites.members():
            standing = state.latest_rulings.get(one.node_id)
            if one.node_id in state.members or one.role is Role.VIEWER:
                continue
            if standing is not None and standing.kind in _BARRED:
                how, words = _BARRED[standing.kind], standing_in_words(standing)
            elif standing is None and one.needs_approval:
                how = pb.NODE_STATE_UNAPPROVED
                words = f"waits for 'atoll nodes approve {one.node_name}'"
            else:
                continue
            found.append(
                pb.NodeStatus(
                    node_id=one.node_id, node_name=one.node_name, state=how, standing=words
                )
            )
        return found

    def written(self) -> list[pb.Written]:
        """All that is kept of what models wrote, newest first."""
        state = self._driver.state
        return [written_to_wire(state, one, self._prompts) for one in reversed(state.written)]

    async def list_rounds(self, request: pb.ListRoundsRequest) -> pb.ListRoundsResponse:
        """The latest closed rounds, newest first."""
        limit = checks.count(request.limit, of="the number of rounds", most=MAX_ROUNDS)
        store = self._driver.store
        rounds = await self._driver.aside(lambda: store.latest_figures(limit or DEFAULT_ROUNDS))
        return pb.ListRoundsResponse(rounds=rounds)

    async def get_round(self, request: pb.GetRoundRequest) -> pb.GetRoundResponse:
        """One round, in flight or closed; raises NoInputError where there is none, or none is kept."""
        state = self._driver.state
        current = state.open_round
        newest = state.committed_round if current is None else current.number
        number = checks.count(request.round, of="the round") or newest
        if not 0 < number <= max(newest, state.committed_round):
            if not newest:
                raise NoInputError(
                    "no round has begun yet", next_step="'atoll status' says what the run waits for"
                )
            raise NoInputError(
                f"round {number} has not begun: the newest is {newest}",
                next_step="'atoll rounds' lists the latest",
            )
        figures, closed = await self._driver.aside(lambda: self._driver.store.closed_round(number))
        times = self._past.timeline.of(number)
        if times is None:
            times = await self._driver.aside(lambda: self._past.kept_times(number))
        if current is not None and current.number == number:
            told = open_round(state, current, figures, times, now=self._driver.clock.now())
            if request.wants_books:
                await self._add_books(told, number)
            return told
        written = next((one for one in state.written if one.round == number), None)
        if figures is None and written is not None:
            # Texts are kept of some rounds that figures are not.
            figures = pb.RoundSummary(round=number)
        if figures is None:
            raise NoInputError(
                f"round {number} is too old to be kept: of rounds as old only some are",
                next_step=f"'atoll rounds --limit {MAX_ROUNDS}' lists those",
            )
        told = closed_round(state, figures, closed, times)
        if written is not None:
            told.written.CopyFrom(written_to_wire(state, written, self._prompts))
        if request.wants_books:
            await self._add_books(told, number)
        return told

    async def _add_books(self, told: pb.GetRoundResponse, round: int) -> None:
        """What was counted after a round, where all commits since are kept."""
        for _ in range(MOST_TRIES):
            state = self._driver.state
            later = await self._driver.aside(lambda: self._driver.store.whole_commits_after(round))
            books = books_after(state, round, later)
            if books is not None:
                token_clock, ledger = books
                told.books_after.token_clock = token_clock
                told.books_after.used_up.extend(used_up(ledger))
                return

    def committed_and_uptime(self) -> tuple[int, float]:
        """The newest committed round, and seconds since the start."""
        return self._driver.state.committed_round, self._driver.clock.now() - self._started_at

    def run_status(self) -> pb.RunStatus:
        """The run alone, with all held-out losses that an answer has room for."""
        return self._run_status(self._driver.state, self._driver.clock.now(), MOST_LOSSES)

    def _run_status(self, state: SwarmState, now: float, most_losses: int) -> pb.RunStatus:
        names = {node_id: member.node_name for node_id, member in state.members.items()}
        agreed_round, agreed = agreed_state(state)
        return pb.RunStatus(
            swarm_id=self._swarm_id,
            run_name=self._run.run.name,
            run_digest=state.run_digest,
            phase=_phase_of(state),
            reason=explain(state, now),
            committed_round=state.committed_round,
            total_rounds=state.rules.total_rounds,
            open_round=0 if state.open_round is None else state.open_round.number,
            token_clock=state.token_clock,
            outer_digest=convert.optional_digest_to_wire(agreed),
            outer_digest_round=agreed_round,
            digests_agree=all(
                member.outer_digest == agreed
                for member in state.members.values()
                if member.state in PRESENT
                and member.outer_round == agreed_round
                and not awaits_first_weights(state, member)
            ),
            num_parameters=sum(state.rules.layout.fragment_elements),
            inner_steps=state.rules.inner_steps,
            held_out_losses=[
                _held_out_loss(names, one) for one in _spread(state.held_out, most_losses)
            ],
            held_out_bytes_per_token=_held_out_bytes_per_token(state),
            written=written_to_wire(state, state.written[-1], self._prompts)
            if state.written
            else None,
            written_rounds=[one.round for one in state.written],
            uptime_seconds=now - self._started_at,
            min_nodes=state.rules.min_nodes,
            data=data_status(state),
            wire=wire_ledger(state.wire, state.all_reduce_bytes),
            elapsed_seconds=now if state.finished_at is None else state.finished_at,
            estimated_seconds_left=run_seconds_left(state, now),
            paused="" if state.paused is None else paused_in_words(state.paused),
            differing=differing_in_words(state),
            alike=alike_in_words(state),
            amendments=[in_words(ruling) for ruling in still_in_force(state.rulings)],
            went_back=[f"{in_words(ruling)} (by {ruling.by})" for ruling in state.rolled_back],
            rounds_in_reach=spans_in_words(rounds_in_reach(state)),
            relay=self._relay(),
            counted=self._run.counted,
            has_own_loss=self._run.has_own_loss,
        )

    def _node_status(
        self,
        state: SwarmState,
        member: Member,
        now: float,
        share: float | None,
        inner_steps: int,
        corpus: CorpusSummary | None,
    ) -> pb.NodeStatus:
        standing = state.latest_rulings.get(member.node_id)
        is_barred = standing is not None and member.state in BARRED
        heard, given = self._telemetry.of(member.node_id), self._past.given
        screened = recent_screening(member, state.committed_round)
        return pb.NodeStatus(
            node_id=member.node_id,
            node_name=member.node_name,
            state=pb.NODE_STATE_JOINING
            if awaits_first_weights(state, member)
            else _NODE_STATES[member.state],
            device=member.device,
            num_ranks=member.num_ranks,
            # Before a restart nobody's calls are known: as silent as this process is old.
            silent_seconds=now - (self._started_at if heard is None else heard.at),
            is_unheard=heard is None,
            committed_tokens=member.committed_tokens,
            address=convert.to_wire(member.address, session_pb2.PeerAddress),
            heartbeat=None if heard is None else heard.heartbeat,
            same_corpus=corpus is None or member.is_helper or member.corpus.is_same(corpus),
            version=member.version,
            inner_steps=inner_steps,
            inner_steps_per_second=member.inner_steps_per_second,
            is_draining=member.is_draining,
            link_rates=_rates_to_wire(member.rates),
            has_waiting_copy=self._telemetry.has_waiting_copy(member.node_id, now=now),
            screening=screening_to_wire(state, member.node_id, screened)
            if screened.round
            else None,
            confirmed_work_share=share,
            standing=standing_in_words(standing)
            if standing is not None and is_barred
            else waiting_in_words(member, next_round(state)),
            is_helper=member.is_helper,
            has_symmetric_router=is_symmetric(member),
            is_own=member.is_own,
            invite_id=member.invite_id,
            given=None if given is None else given_to_wire(given.of(member.node_id)),
        )


_BARRED = {
    RulingKind.QUARANTINED: pb.NODE_STATE_QUARANTINED,
    RulingKind.EXPELLED: pb.NODE_STATE_EXPELLED,
}


def given_to_wire(given: Given) -> pb.Given:
    """What a node has given."""
    return pb.Given(
        num_rounds=given.num_rounds,
        sent_bytes=given.sent_bytes,
        received_bytes=given.received_bytes,
        present_seconds=given.present_seconds,
    )


def standing_in_words(standing: Ruling) -> str:
    """Who decided how a node stands, and why."""
    why = f": {standing.reason}" if standing.reason else ""
    return f"by {standing.by}{why}"


def confirmed_shares(state: SwarmState) -> Mapping[NodeId, float]:
    """What each present member's confirmed work is of all of theirs; empty while nobody has any."""
    say = say_of(present_members(state), state.committed_round, unchecked(state))
    if not say.is_confirmed:
        return {}
    whole = weight_of(say, say.weights)
    return {node_id: weight / whole for node_id, weight in say.weights.items()}


def written_to_wire(state: SwarmState, written: Written, prompts: Sequence[str]) -> pb.Written:
    """What a model wrote, each text with its prompt."""
    member = state.members.get(written.node_id)
    return pb.Written(
        round=written.round,
        node_name="" if member is None else member.node_name,
        texts=[
            pb.PromptedText(prompt=prompt, text=text)
            for prompt, text in zip(prompts, written.texts, strict=False)
        ],
        why_not=written.why_not,
    )


def _held_out_loss(names: Mapping[NodeId, str], held_out: HeldOut) -> pb.HeldOutLoss:
    return pb.HeldOutLoss(
        round=held_out.round,
        loss=held_out.loss,
        tokens=held_out.tokens,
        metric=held_out.metric,
        holders=[
            pb.HolderLoss(
                node_id=one.node_id,
                node_name=names.get(one.node_id, ""),
                loss=one.loss,
                held_out_tokens=one.weight,
                metric=one.metric,
            )
            for one in held_out.holders
        ],
        by_source=[convert.to_wire(one, session_pb2.SourceLoss) for one in held_out.by_source],
    )


def _held_out_bytes_per_token(state: SwarmState) -> float:
    """Of the held-out split as a whole, as most of the weight has it; 0 where that does not know.

    Where data are private, of the splits of all that the latest evaluation is of.
    """
    common = common_corpus(state)
    corpora = [] if common is None else [common]
    if state.held_out and state.held_out[-1].holders:
        known = (state.members.get(one.node_id) for one in state.held_out[-1].holders)
        corpora = [member.corpus for member in known if member is not None]
    if not corpora or not all(
        one.num_held_out_tokens and one.num_held_out_bytes for one in corpora
    ):
        return 0.0
    num_bytes = sum(corpus.num_held_out_bytes for corpus in corpora)
    return num_bytes / sum(corpus.num_held_out_tokens for corpus in corpora)


def _spread(losses: Sequence[HeldOut], most: int) -> Sequence[HeldOut]:
    """All of them, or `most`; the first is among them."""
    half = most // 2
    if len(losses) <= most:
        return losses
    old, new = losses[:-half], losses[-half:]
    return [*(old[len(old) * place // half] for place in range(half)), *new]


def _rates_to_wire(rates: LinkRates) -> session_pb2.LinkRates | None:
    if rates == UNMEASURED:
        return None
    return session_pb2.LinkRates(
        up_bytes_per_second=rates.up_bytes_per_second or 0.0,
        down_bytes_per_second=rates.down_bytes_per_second or 0.0,
    )


def data_status(state: SwarmState) -> pb.DataStatus:
    """What became of the samples so far."""
    waiting, common = free_again(state.ledger), common_corpus(state)
    return pb.DataStatus(
        # Places of all holders' books, in samples of one of them, would be no epochs.
        epoch_samples=0 if common is None or state.rules.has_private_data else common.num_samples,
        committed_samples=num_samples_of(state.ledger.committed),
        leased_samples=num_samples_of(state.ledger.leased),
        free_again_samples=num_samples_of(waiting),
        free_again_pieces=len(waiting),
        frontier=num_reached(state.ledger),
        skipped_samples=num_samples_of(state.ledger.skipped),
    )


def agreed_state(state: SwarmState) -> tuple[int, Digest | None]:
    """The newest round whose outer digest is settled, and that digest.

    While nodes apply a commit it is the state that the commit builds on.
    """
    if state.outer_digest is None and state.open_round is not None:
        return state.open_round.number - 1, state.open_round.base_digest
    return state.committed_round, state.outer_digest


def _steps_asked(state: SwarmState) -> Mapping[NodeId, int]:
    """Inner steps of the round in flight, of those who take part."""
    assignments = () if state.open_round is None else state.open_round.assignments
    return {assignment.node_id: assignment.inner_steps for assignment in assignments}


def _phase_of(state: SwarmState) -> pb.RunPhase.ValueType:
    if state.is_finished:
        return pb.RUN_PHASE_FINISHED
    if state.open_round is None:
        return pb.RUN_PHASE_WAITING
    return _PHASES[state.open_round.phase]


def status_service(desk: StatusDesk, gate: Gate) -> StatusServiceServicer:
    """The desk on gRPC; any enrolled node and the run owner may call."""
    calls = service(
        gate.anyone,
        GetStatus=lambda role, request: desk.get_status(request, role),
        ListRounds=for_all(desk.list_rounds),
        GetRound=for_all(desk.get_round),
    )
    return cast("StatusServiceServicer", calls)
