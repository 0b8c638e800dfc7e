"""The node's round against events in any order: what must hold whatever peers and coordinator do."""

from collections.abc import Set
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from node.exchange.round.state import (
    Awaited,
    Closed,
    Committed,
    ContributionBegan,
    ContributionEncoded,
    ContributionEnded,
    Drop,
    Event,
    Fetch,
    FetchEnded,
    Hold,
    Links,
    MeanTaken,
    Phase,
    PushBegan,
    PushEnded,
    Reduce,
    ResultFetched,
    ResultUndecodable,
    RoundState,
    Send,
    SliceState,
    Tell,
    TimePassed,
    opened,
    refusal,
)
from node.exchange.round.transition import (
    collecting,
    is_complete,
    is_wanted,
    late_for,
    step,
    waiting_for,
)
from protocol.wire.findings import ResultRefused
from protocol.wire.messages import (
    Held,
    ParticipantsDeparted,
    ParticipantsIdle,
    Reduced,
    ResultOffered,
    ResultsSilent,
    TrainingEnded,
)
from protocol.wire.payload import CONTRIBUTION, Payload
from protocol.wire.rounds import (
    BLOCK,
    Commit,
    ContributionDigest,
    Contributor,
    Digest,
    NodeId,
    SliceOutcome,
)
from tests.property.effort import examples
from tests.unit.exchange_scene import RUN, TOKENS, A, B, C, plan_for
from tests.unit.round_scene import (
    NODES,
    RULES,
    body_of,
    contributed,
    made_by,
    reduced_to,
    taken_over,
)

STRANGER = NodeId("stranger")

INDEX = st.integers(0, 2)
NODE = st.sampled_from(NODES)
WHICH = st.integers(0, 1)
SECONDS = st.sampled_from([0.0, 0.0, 0.1, 1.0, 5.0, 30.0])


@dataclass(slots=True, kw_only=True)
class Edge:
    """What the actions have led to, as a runner would carry them out."""

    held: dict[int, Payload] = field(default_factory=dict)
    told: list[tuple[object, int]] = field(default_factory=list)  # reports with their attempts
    sends: list[Send] = field(default_factory=list)
    reducing: list[Reduce] = field(default_factory=list)
    fetching: list[Fetch] = field(default_factory=list)
    reported: dict[tuple[int, int], int] = field(default_factory=dict)
    coming: list[tuple[NodeId, Payload, int]] = field(default_factory=list)  # with attempts
    given_up: set[NodeId] = field(default_factory=set)
    silent: tuple[int, ...] = ()  # as told last
    training_ended_at: float | None = None


class RoundMachine(RuleBasedStateMachine):
    state: RoundState

    @initialize(awaited=st.lists(st.sampled_from([*Awaited]), min_size=3, max_size=3))
    def begin(self, awaited: list[Awaited]) -> None:
        self.now = 100.0
        self.edge = Edge()
        less = {n: a for n, a in zip(NODES, awaited, strict=True) if a is not Awaited.FULLY}
        self.state = opened(
            plan_for(*NODES), RULES, patience_seconds=50.0, now=self.now, less_awaited=less
        )
        assert A not in self.state.awaited, "a node is not waited for by itself"

    def feed(self, event: Event) -> str:
        before = self.state
        transition = step(before, event, self.now)
        self.state = transition.state
        if before.is_closed:
            assert not transition.actions, "a round that is over does nothing more"
        for action in transition.actions:
            self.note(before, event, action)
        return transition.refusal

    def wake_at(self) -> float | None:
        return step(self.state, TimePassed(links=self.state.links), self.now).wake_at

    def note(self, before: RoundState, event: Event, action: object) -> None:
        match action:
            case Send():
                assert is_wanted(self.state, action), "nothing is sent that nobody wants"
                assert action.peer != A
                assert action not in self.edge.sends
                self.edge.sends.append(action)
            case Reduce(reduction=reduction):
                assert reduction.slice.reducer_id == A
                assert reduction.late.isdisjoint(reduction.contributions)
                known = self.state.slices[reduction.slice.index]
                if self.now < known.deadline and reduction.late:
                    self.check_briefly_awaited(known, reduction.late)
                    if 2 * len(reduction.late) < len(NODES):
                        self.edge.given_up |= reduction.late - {A}
                self.edge.reducing.append(action)
            case Hold(payload=payload):
                index, held = payload.header.slice_index, self.edge.held
                assert index not in held or held[index].digest != payload.digest, "held twice"
                is_asked_for = isinstance(event, ResultFetched)  # by the digest that counts
                reducer = before.slices[index].part.reducer_id
                assert is_asked_for or payload.header.sender_id == reducer
                assert is_asked_for or index not in held, "another one is held"
                held[index] = payload
            case Drop(index=index):
                del self.edge.held[index]
            case Tell(report=Reduced() | Held() as report):
                known = self.state.slices[report.slice_index]
                assert (report, known.attempt) not in self.edge.told, "told twice"
                self.edge.told.append((report, known.attempt))
                if isinstance(report, Reduced):
                    assert known.part.reducer_id == A
                else:
                    assert self.edge.held[report.slice_index].digest == report.digest
            case Tell(report=ResultRefused() as report):
                known = self.state.slices[report.slice_index]
                assert (report, known.attempt) not in self.edge.told, "told twice"
                self.edge.told.append((report, known.attempt))
                header = known.refused
                assert header is not None and report.digest == header.digest
                assert header.sender_id == known.part.reducer_id, "of nobody else is told"
            case Tell(report=ResultsSilent(slice_indexes=silent)):
                assert silent != self.edge.silent, "told twice"
                self.edge.silent = silent
            case Fetch():
                self.edge.fetching.append(action)

    def check_briefly_awaited(self, known: SliceState, late: Set[NodeId]) -> None:
        """Nothing comes of those that are missing before the deadline, and they were waited for."""
        given_up = self.edge.given_up if known.attempt else set()
        awaited = {n: self.state.awaited.get(n, Awaited.FULLY) for n in late}
        awaited |= {n: Awaited.NOT for n in given_up & late if not self.state.num_coming.get(n)}
        waited_for = {n for n, each in awaited.items() if each is not Awaited.NOT}
        coming = {n for n, p, _ in self.edge.coming if p.header.kind == CONTRIBUTION}
        assert waited_for.isdisjoint(coming)
        assert known.others_at is not None
        took = known.others_at - known.begun_at
        assert not waited_for or self.now >= known.begun_at + 1.25 * took
        if Awaited.FULLY in awaited.values():
            assert 2 * len(late) < len(NODES), "not where that were half of all"
            if (ended_at := self.edge.training_ended_at) is None:
                assert self.now >= known.begun_at + max(4 * took, took + 10)
                return
            assert known.most_at is not None
            most = known.most_at - known.begun_at
            assert self.now >= max(known.most_at, ended_at) + max(0.4 * most, 4) - 1e-9

    # What happens

    @rule(index=INDEX)
    def our_contribution_is_encoded(self, index: int) -> None:
        self.feed(ContributionEncoded(payload=contributed(A, index, 0)))

    @rule(
        sender=st.sampled_from([*NODES, STRANGER]),
        name=st.sampled_from([*NODES, None, None]),
        index=INDEX,
        which=WHICH,
        is_result=st.booleans(),
    )
    def a_payload_is_offered(
        self, sender: NodeId, name: NodeId | None, index: int, which: int, is_result: bool
    ) -> None:
        make = made_by if is_result else contributed
        payload = make(name or sender, index, which)
        if refusal(RULES, self.state, sender, payload.header):
            return
        assert payload.header.sender_id == sender != STRANGER
        self.feed(PushBegan(index=index) if is_result else ContributionBegan(sender=sender))
        self.edge.coming.append((sender, payload, self.state.slices[index].attempt))

    @rule()
    def all_have_trained(self) -> None:
        if self.edge.training_ended_at is None and not self.state.is_closed:
            self.edge.training_ended_at = self.now
        self.feed(TrainingEnded(round=1))

    @rule(index=INDEX)
    def all_contribute(self, index: int) -> None:
        for sender in (B, C):
            self.feed(body_of(contributed(sender, index, 0)))

    @precondition(lambda self: self.edge.coming)
    @rule(place=st.integers(0, 100), is_whole=st.booleans())
    def a_payload_has_come_or_broken_off(self, place: int, is_whole: bool) -> None:
        sender, payload, attempt = self.edge.coming.pop(place % len(self.edge.coming))
        header = payload.header
        before = self.state.slices.get(header.slice_index)
        if is_whole:
            why = self.feed(body_of(payload, attempt))
            if not why and header.kind == CONTRIBUTION:
                assert before is not None
                kept = self.state.slices[header.slice_index].contributions
                assert kept[sender].header == header, "what is taken counts"
                assert before.phase is Phase.COLLECTING or kept == before.contributions
            elif not why:
                assert self.state.slices[header.slice_index].attempt == attempt
                assert self.edge.held[header.slice_index].digest == payload.digest
            elif before is not None:
                assert self.state.slices[header.slice_index] == before
        if header.kind != CONTRIBUTION:
            self.feed(PushEnded(index=header.slice_index, attempt=attempt, sender=sender))
        else:
            self.feed(ContributionEnded(sender=sender))

    @precondition(lambda self: self.edge.coming)
    @rule(place=st.integers(0, 100))
    def a_result_has_come_that_does_not_decode(self, place: int) -> None:
        sender, payload, attempt = self.edge.coming[place % len(self.edge.coming)]
        if payload.header.kind == CONTRIBUTION:
            return
        del self.edge.coming[place % len(self.edge.coming)]
        before = dict(self.edge.held)
        if not (known := self.state.slices.get(payload.header.slice_index)) or known.refused:
            return
        self.feed(ResultUndecodable(header=payload.header))
        self.feed(PushEnded(index=payload.header.slice_index, attempt=attempt, sender=sender))
        assert self.edge.held == before
        if known.part.reducer_id == sender:
            assert refusal(RULES, self.state, sender, payload.header), "it is not taken again"

    @precondition(lambda self: self.edge.reducing)
    @rule(place=st.integers(0, 100), is_empty=st.sampled_from([False, False, True]))
    def a_mean_is_taken(self, place: int, is_empty: bool) -> None:
        reduce = self.edge.reducing.pop(place % len(self.edge.reducing))
        index, contributions = reduce.reduction.slice.index, reduce.reduction.contributions
        result = None
        if contributions and not is_empty:
            result = replace(
                reduced_to(made_by(A, index, 0)),
                made_of=Reduced(
                    slice_index=index,
                    digest=None,
                    contributors=tuple(
                        Contributor(node_id=n, samples=TOKENS, tokens=TOKENS)
                        for n in sorted(contributions)
                    ),
                    contributions=tuple(
                        ContributionDigest(contributions[n].header.body_digest[:16])
                        for n in sorted(contributions)
                    ),
                ),
            )
        told, known = len(self.edge.told), self.state.slices.get(index)
        self.feed(MeanTaken(index=index, attempt=reduce.attempt, result=result))
        if known is None or known.attempt != reduce.attempt:
            assert len(self.edge.told) == told, "what was given up is told to nobody"

    @rule(index=INDEX, to=NODE, is_old=st.booleans(), seconds=SECONDS)
    def a_slice_is_taken_over(self, index: int, to: NodeId, is_old: bool, seconds: float) -> None:
        if self.state.is_closed:
            return
        before = self.state
        attempt = before.slices[index].attempt + (not is_old)
        sends = [s for s in self.edge.sends if s.payload.header.slice_index == index]
        self.feed(taken_over(index, to, attempt=attempt, seconds=seconds))
        if is_old:
            assert self.state.slices == before.slices
            return
        assert index not in self.edge.held
        assert not any(is_wanted(self.state, send) for send in sends)

    @rule(node_id=st.sampled_from([B, C]), is_gone=st.booleans())
    def a_participant_departs_or_is_idle(self, node_id: NodeId, is_gone: bool) -> None:
        if not is_gone:
            self.feed(ParticipantsIdle(round=1, node_ids=(node_id,)))
            return
        self.feed(ParticipantsDeparted(round=1, node_ids=(node_id,)))
        to_it = [send for send in self.edge.sends if send.peer == node_id]
        assert not any(is_wanted(self.state, send) for send in to_it)

    def reported(self, index: int, which: int) -> Digest:
        """What the coordinator knows of a slice: one result of a reducer, whatever that pushes."""
        known = self.state.slices[index]
        which = self.edge.reported.setdefault((index, known.attempt), which)
        return made_by(known.part.reducer_id, index, which).digest

    @rule(index=INDEX, which=WHICH)
    def a_result_is_offered(self, index: int, which: int) -> None:
        if self.state.is_closed:
            return
        digest = self.reported(index, which)
        self.feed(ResultOffered(round=1, slice_index=index, digest=digest, holder_ids=NODES))

    @precondition(lambda self: self.edge.fetching)
    @rule(place=st.integers(0, 100), is_delivered=st.booleans())
    def a_fetch_ends(self, place: int, is_delivered: bool) -> None:
        fetch = self.edge.fetching.pop(place % len(self.edge.fetching))
        for outcome in fetch.outcomes if is_delivered else ():
            payloads = [made_by(n, outcome.index, which) for n in NODES for which in (0, 1)]
            (payload,) = (p for p in payloads if p.digest == outcome.digest)
            self.feed(ResultFetched(payload=payload))
        self.feed(FetchEnded(is_committed=fetch.is_committed))

    @precondition(lambda self: not self.state.is_closed and self.state.commit is None)
    @rule(
        which=st.lists(st.sampled_from([0, 0, 1, None]), min_size=3, max_size=3),
        is_meant=st.sampled_from([False, False, True]),
    )
    def the_round_is_committed(self, which: list[int | None], is_meant: bool) -> None:
        if not is_meant:
            return
        outcomes = []
        for part, body in zip(self.state.plan.slices, which, strict=True):
            digest = None if body is None else self.reported(part.index, body)
            outcomes.append(
                SliceOutcome(index=part.index, start=part.start, num_elements=BLOCK, digest=digest)
            )
        commit = Commit(round=1, fragment=0, base_digest=RUN, slices=tuple(outcomes))
        self.feed(Committed(commit=commit, links=Links()))

    @rule(seconds=SECONDS, is_cut=st.booleans())
    def time_passes(self, seconds: float, is_cut: bool) -> None:
        """Never past the time at which the core wants to be woken."""
        wake = self.wake_at()
        self.now = min(self.now + seconds, wake) if wake is not None else self.now + seconds
        unreachable = frozenset({B}) if is_cut else frozenset()
        self.feed(TimePassed(links=Links(unreachable=unreachable)))

    @precondition(lambda self: self.state.commit is not None or self.now > 140)
    @rule(is_meant=st.sampled_from([False, False, False, False, True]))
    def the_round_is_closed(self, is_meant: bool) -> None:
        if is_meant:
            self.feed(Closed())
            assert not any(is_wanted(self.state, send) for send in self.edge.sends)
            assert not self.state.slices, "nothing of it stays in the memory"

    # What holds at any time

    @invariant()
    def time_has_nothing_to_do_before_it_is_asked(self) -> None:
        wake = self.wake_at()
        assert wake is None or wake > self.now
        again = step(self.state, TimePassed(links=self.state.links), self.now)
        assert not again.actions, "all that can be decided now has been"

    @invariant()
    def nobody_is_waited_for_who_is_not_missing(self) -> None:
        for known in collecting(self.state):
            assert late_for(self.state, known), "all is here, and no mean is taken"
            assert known.part.reducer_id == A
        is_over = self.state.is_closed or is_complete(self.state)
        if self.state.commit is not None and not is_over:
            has_prospects = self.wake_at() or self.edge.fetching or self.edge.coming
            assert has_prospects, "it waits for what nothing will bring"
        if self.state.is_closed:
            assert waiting_for(self.state) == "" or self.state.commit is None

    @invariant()
    def contributions_are_only_here_where_this_node_reduces(self) -> None:
        for known in self.state.slices.values():
            is_ours = known.part.reducer_id == A
            assert (known.phase is Phase.ELSEWHERE) == (not is_ours)
            assert is_ours or not known.contributions
            assert known.num_arriving >= 0

    @invariant()
    def no_result_is_called_silent_of_which_something_comes(self) -> None:
        if self.state.commit is not None or self.state.is_closed:
            return
        for known in (self.state.slices[index] for index in self.edge.silent):
            assert known.held is None and known.part.reducer_id != A
            assert not known.num_arriving
            assert self.state.most_held_at is not None, "where most are missing it is the network"

    @invariant()
    def the_core_knows_what_is_held(self) -> None:
        known = {i: each.held for i, each in self.state.slices.items() if each.held is not None}
        assert self.state.is_closed or known == self.edge.held


TestRounds = RoundMachine.TestCase
TestRounds.settings = settings(examples(300), stateful_step_count=60)
