"""The node's round against events in any order: what must hold whatever peers and coordinator do."""

from collections.abc import Set
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from node.exchange.codecs.registry import codec_named
from node.exchange.reduction import SliceResult
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
    PayloadCame,
    Phase,
    PushBegan,
    PushEnded,
    Reduce,
    ResultFetched,
    ResultUndecodable,
    RoundState,
    Rules,
    Send,
    SliceState,
    Tell,
    TimePassed,
    contradicted,
    opened,
    refusal,
)
from node.exchange.round.transition import (
    collecting,
    collects_until,
    is_complete,
    is_wanted,
    late_for,
    step,
    waiting_for,
)
from protocol.wire.messages import (
    Held,
    ParticipantsDeparted,
    ParticipantsIdle,
    Reduced,
    ResultOffered,
    ResultRefused,
    ResultsSilent,
    SliceTakenOver,
    TrainingEnded,
)
from protocol.wire.payload import CONTRIBUTION, Payload
from protocol.wire.rounds import (
    BLOCK,
    WHOLE,
    Commit,
    ContributionDigest,
    Contributor,
    Digest,
    NodeId,
    SliceOutcome,
    Way,
)
from tests.property.effort import examples
from tests.unit.exchange_scene import (
    RUN,
    TOKENS,
    A,
    B,
    C,
    contribution_of,
    plan_for,
    result_of,
)

NODES = (A, B, C)
"""The round is A's; each of the three reduces a slice at first."""
STRANGER = NodeId("stranger")
FP32 = codec_named("fp32")
RULES = Rules(node_id=A, run_digest=RUN, context=1, uplink=FP32, downlink=FP32)
BODIES = [np.full(BLOCK, value, dtype="<f4") for value in (1, 2)]
"""Two for each sender: who sends both lies, or was restarted."""

INDEX = st.integers(0, 2)
NODE = st.sampled_from(NODES)
WHICH = st.integers(0, 1)
SECONDS = st.sampled_from([0.0, 0.0, 0.1, 1.0, 5.0, 30.0])


def contributed(sender: NodeId, index: int, which: int) -> Payload:
    return contribution_of(BODIES[which].tobytes(), sender_id=sender, index=index)


def made_by(reducer: NodeId, index: int, which: int) -> Payload:
    return result_of(BODIES[which], sender_id=reducer, index=index)


def body_of(payload: Payload, attempt: int = 0) -> PayloadCame:
    return PayloadCame(sender=payload.header.sender_id, payload=payload, admitted_in=attempt)


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
            payload = made_by(A, index, 0)
            result = SliceResult(
                payload=payload,
                encoded=RULES.downlink.opened(payload.body, BLOCK),
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
                weighed_tokens=TOKENS,
                error=None,
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
        self.feed(
            SliceTakenOver(
                round=1,
                slice_index=index,
                reducer_id=to,
                attempt=attempt,
                contribute_seconds=seconds,
            )
        )
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


def test_the_mean_is_of_what_was_here_when_it_began() -> None:
    """The example that the machine comes to by itself only now and then."""
    state = opened(plan_for(*NODES), RULES, patience_seconds=50.0, now=0.0)
    for sender in (A, B):
        state = step(state, body_of(contributed(sender, 0, 0)), 1.0).state
    (reduce,) = step(state, TimePassed(links=Links()), 20.0).actions
    assert isinstance(reduce, Reduce)
    assert (set(reduce.reduction.contributions), reduce.reduction.late) == ({A, B}, {C})
    state = step(state, TimePassed(links=Links()), 20.0).state
    late = step(state, body_of(contributed(C, 0, 0)), 20.1)
    assert late.refusal == "slice 0 of round 1 is already reduced"
    assert set(late.state.slices[0].contributions) == {A, B}


def test_a_mean_of_before_a_takeover_is_told_to_nobody() -> None:
    state = opened(plan_for(*NODES), RULES, patience_seconds=50.0, now=0.0)
    everybody = ParticipantsIdle(round=1, node_ids=NODES)
    state = step(state, everybody, 1.0).state
    news = SliceTakenOver(round=1, slice_index=0, reducer_id=A, attempt=1, contribute_seconds=9.0)
    (reduce,) = step(state, news, 2.0).actions  # taken anew, while the first is still being taken
    state = step(state, news, 2.0).state
    assert isinstance(reduce, Reduce)
    assert not step(state, MeanTaken(index=0, attempt=0, result=None), 3.0).actions
    assert step(state, MeanTaken(index=0, attempt=reduce.attempt, result=None), 3.0).actions


def reduced_to(payload: Payload) -> SliceResult:
    """A reducer's, with this payload and nothing else to tell."""
    return SliceResult(
        payload=payload,
        encoded=RULES.downlink.opened(payload.body, BLOCK),
        made_of=Reduced(slice_index=0, digest=None, contributors=(), contributions=()),
        weighed_tokens=TOKENS,
        error=None,
    )


def test_no_result_of_ours_stands_in_the_place_of_the_committed_one() -> None:
    """An earlier process of this node has made it, and the coordinator went back to a copy since."""
    state = opened(plan_for(*NODES), RULES, patience_seconds=50.0, now=0.0)
    state = step(state, ParticipantsIdle(round=1, node_ids=NODES), 1.0).state  # the mean is taken
    committed, ours = made_by(A, 0, 0), made_by(A, 0, 1)
    outcome = SliceOutcome(index=0, start=0, num_elements=BLOCK, digest=committed.digest)
    commit = Commit(round=1, fragment=0, base_digest=RUN, slices=(outcome,))
    state = step(state, Committed(commit=commit, links=Links()), 2.0).state
    state = step(state, ResultFetched(payload=committed), 3.0).state
    late = step(state, MeanTaken(index=0, attempt=0, result=reduced_to(ours)), 4.0)
    assert not late.actions and late.state.slices[0].held is committed


def test_a_slice_that_comes_back_in_time_keeps_what_came_and_the_later_deadline() -> None:
    state = opened(plan_for(*NODES), RULES, patience_seconds=50.0, now=0.0)
    state = step(state, body_of(contributed(B, 0, 0)), 1.0).state
    for attempt, seconds in ((1, 5.0), (2, 40.0)):
        news = SliceTakenOver(
            round=1, slice_index=0, reducer_id=A, attempt=attempt, contribute_seconds=seconds
        )
        state = step(state, news, 2.0).state
        assert set(state.slices[0].contributions) == {B}
        assert state.slices[0].deadline == max(20.0, 2.0 + seconds)


def test_a_push_of_before_a_takeover_says_nothing_of_those_that_come_now() -> None:
    state = opened(plan_for(*NODES), RULES, patience_seconds=50.0, now=0.0)
    state = step(state, PushBegan(index=1), 1.0).state
    news = SliceTakenOver(round=1, slice_index=1, reducer_id=C, attempt=1, contribute_seconds=9.0)
    for event in (news, PushBegan(index=1), PushEnded(index=1, attempt=0, sender=B)):
        state = step(state, event, 2.0).state
    assert state.slices[1].num_arriving == 1 and not state.slices[1].is_broken


def test_of_another_runs_payload_only_the_run_is_looked_at() -> None:
    state = opened(plan_for(*NODES), RULES, patience_seconds=50.0, now=0.0)
    header = replace(contributed(B, 0, 0).header, run_digest=Digest(b"x" * 32))
    assert refusal(RULES, state, B, header).startswith("run digest 7878")


def awaiting(less: dict[NodeId, Awaited], *ways: Way) -> RoundState:
    """A round from 0 s on, whose contributions end at 20 s; A and then B have contributed to A's slice."""
    plan = plan_for(*NODES, ways=ways)
    state = opened(plan, RULES, patience_seconds=50.0, now=0.0, less_awaited=less)
    state = step(state, ContributionEncoded(payload=contributed(A, 0, 0)), 2.0).state
    return step(state, body_of(contributed(B, 0, 0)), 8.0).state


def reduced_at(state: RoundState, *events: tuple[float, Event]) -> float:
    """When the mean of A's slice is begun, after these events."""
    for at, event in events:
        state = step(state, event, at).state
    while state.slices[0].phase is Phase.COLLECTING:
        at = collects_until(state, state.slices[0])
        state = step(state, TimePassed(links=Links()), at).state
    return at


def test_who_kept_contributions_lately_is_waited_for_a_quarter_as_long_again_as_others_took() -> (
    None
):
    assert reduced_at(awaiting({C: Awaited.BRIEFLY})) == 10.0
    assert awaiting({C: Awaited.NOT}).slices[0].phase is Phase.AVERAGING, "at once"
    assert reduced_at(awaiting({B: Awaited.BRIEFLY})) == 12.0, "for C in full, as A took 2 s"
    assert reduced_at(awaiting({})) == 20.0, "four times 8 s are more than there is"


def test_who_is_asked_for_more_steps_than_the_others_is_waited_for_as_much_longer() -> None:
    """Others check somebody's work, and the coordinator asks them for fewer steps."""
    steps = {A: 10, B: 5, C: 16}
    plan = plan_for(*NODES)
    assignments = tuple(replace(a, inner_steps=steps[a.node_id]) for a in plan.assignments)
    for awaited, at in ((Awaited.BRIEFLY, 8 * 1.6 * 1.25), (Awaited.NOT, 8 * 1.6)):
        state = opened(
            replace(plan, assignments=assignments),
            RULES,
            patience_seconds=50.0,
            now=0.0,
            less_awaited={C: awaited},
        )
        state = step(state, ContributionEncoded(payload=contributed(A, 0, 0)), 2.0).state
        state = step(state, body_of(contributed(B, 0, 0)), 8.0).state
        assert reduced_at(state) == at


def test_who_is_carried_to_us_gets_a_quarter_more_though_it_was_waited_for_in_vain_and_no_more() -> (
    None
):
    through = Way(one=A, other=C, through=(B,))
    state = awaiting({C: Awaited.NOT}, through)
    assert reduced_at(state) == 10.0
    assert reduced_at(state, (9.0, ContributionBegan(sender=C))) == 10.0, (
        "who trickles gains nothing"
    )
    came = step(state, body_of(contributed(C, 0, 0)), 9.5).state
    assert came.slices[0].phase is Phase.AVERAGING and C in came.slices[0].contributions
    between_others = awaiting({C: Awaited.NOT}, Way(one=B, other=C, through=(A,)))
    assert between_others.slices[0].phase is Phase.AVERAGING, "C reaches us"


def test_who_was_waited_for_in_vain_has_a_quarter_more_while_something_comes() -> None:
    """Else a member with the slowest link, once late, was never in time again."""
    plan = plan_for(*NODES)
    state = opened(plan, RULES, patience_seconds=50.0, now=0.0, less_awaited={C: Awaited.NOT})
    state = step(state, ContributionEncoded(payload=contributed(A, 0, 0)), 2.0).state
    state = step(state, ContributionBegan(sender=C), 7.0).state
    state = step(state, body_of(contributed(B, 0, 0)), 8.0).state
    assert reduced_at(state) == 10.0
    assert reduced_at(state, (9.0, ContributionEnded(sender=C))) == 9.0, "it broke off"
    came = step(state, body_of(contributed(C, 0, 0)), 9.5).state
    assert came.slices[0].phase is Phase.AVERAGING and C in came.slices[0].contributions


def collecting_for(*senders: NodeId, at: float, until: float) -> RoundState:
    """A round from 0 s on, in which these contribute to A's slice, at the same time."""
    plan = replace(plan_for(*NODES), contribute_seconds=until, commit_seconds=until + 10)
    state = opened(plan, RULES, patience_seconds=50.0, now=0.0)
    for sender in senders:
        event = body_of(contributed(sender, 0, 0))
        if sender == A:
            state = step(state, ContributionEncoded(payload=event.payload), at).state
        else:
            state = step(state, event, at).state
    return state


def test_one_of_whom_nothing_comes_is_not_waited_for_to_a_deadline_of_hours() -> None:
    state = collecting_for(A, B, at=8.0, until=3600.0)
    assert reduced_at(state) == 4 * 8.0
    assert reduced_at(state, (31.0, ContributionBegan(sender=C))) == 3600.0, "its link is slow"
    begins, ends = ContributionBegan(sender=C), ContributionEnded(sender=C)
    grace = RULES.waits.grace_seconds
    assert reduced_at(state, (9.0, begins), (31.5, ends)) == max(32.0, 31.5 + grace)
    assert reduced_at(collecting_for(A, B, at=1.0, until=3600.0)) == 1.0 + 10.0
    assert reduced_at(collecting_for(A, at=8.0, until=3600.0)) == 3600.0, "most are late"


def test_once_all_have_trained_nobody_waits_long_for_one_of_whom_nothing_comes() -> None:
    ended = TrainingEnded(round=1)
    state = collecting_for(A, B, at=20.0, until=3600.0)
    assert reduced_at(state, (20.0, ended)) == 1.4 * 20
    assert reduced_at(state, (20.0, ended), (27.0, ended)) == 1.4 * 20, "told again"
    assert reduced_at(state, (50.0, ended)) == 50 + 0.4 * 20, "it has trained for longer"
    assert reduced_at(collecting_for(A, B, at=1.0, until=3600.0), (1.0, ended)) == 1.0 + 4.0
    assert reduced_at(state, (20.0, ended), (27.0, ContributionBegan(sender=C))) == 3600.0
    assert reduced_at(collecting_for(A, at=8.0, until=3600.0), (8.0, ended)) == 3600.0


def test_members_that_come_one_after_the_other_do_not_have_a_reducer_wait_for_the_last() -> None:
    """It goes by when most of the weight was here: here four of six, at 20 s."""
    nodes = tuple(NodeId(name) for name in "abcdef")
    plan = replace(plan_for(*nodes), contribute_seconds=3600.0, commit_seconds=3700.0)
    state = opened(plan, RULES, patience_seconds=50.0, now=0.0)
    state = step(state, TrainingEnded(round=1), 20.0).state
    state = step(state, ContributionEncoded(payload=contributed(A, 0, 0)), 20.0).state
    for sender, at in zip(nodes[1:-1], (20.0, 20.0, 20.0, 27.0), strict=True):
        state = step(state, body_of(contributed(sender, 0, 0)), at).state
    assert reduced_at(state) == 28.0


def test_votes_say_who_most_are() -> None:
    votes = (WHOLE // 8, WHOLE // 8, WHOLE - 2 * (WHOLE // 8))
    plan = replace(plan_for(*NODES), contribute_seconds=3600.0, commit_seconds=3700.0, votes=votes)
    state = opened(plan, RULES, patience_seconds=50.0, now=0.0)
    state = step(state, TrainingEnded(round=1), 8.0).state
    for sender in (A, B):
        state = step(state, body_of(contributed(sender, 0, 0)), 8.0).state
    assert reduced_at(state) == 4 * 8.0, "C has most of the weight"


def test_a_result_of_which_nothing_comes_is_told_of_while_most_others_are_here() -> None:
    state = opened(plan_for(*NODES), RULES, patience_seconds=50.0, now=0.0)
    told: list[tuple[float, tuple[int, ...]]] = []

    def feed(event: Event, at: float) -> None:
        nonlocal state
        transition = step(state, event, at)
        state = transition.state
        for action in transition.actions:
            if isinstance(action, Tell) and isinstance(action.report, ResultsSilent):
                told.append((at, action.report.slice_indexes))

    feed(PayloadCame(sender=B, payload=made_by(B, 1, 0), admitted_in=0), 10.0)
    assert state.most_held_at is None, "one of three"
    taken_over = SliceTakenOver(
        round=1, slice_index=0, reducer_id=B, attempt=1, contribute_seconds=9
    )
    feed(taken_over, 10.0)
    feed(PayloadCame(sender=B, payload=made_by(B, 0, 0), admitted_in=1), 20.0)
    wake = step(state, TimePassed(links=Links()), 20.0).wake_at
    assert wake == 1.2 * 20
    feed(TimePassed(links=Links()), wake)
    feed(PushBegan(index=2), 25.0)
    feed(PushEnded(index=2, attempt=0, sender=C), 40.0)
    feed(TimePassed(links=Links()), 44.0)
    assert told == [(24.0, (2,)), (25.0, ()), (44.0, (2,))], "it broke off, and nothing came again"


def test_in_a_slice_that_comes_to_us_nobody_is_waited_for_of_whom_nothing_came_before() -> None:
    for begins, phase in ((False, Phase.AVERAGING), (True, Phase.COLLECTING)):
        state = collecting_for(A, B, at=20.0, until=3600.0)
        events: tuple[tuple[Event, float], ...] = (
            (TrainingEnded(round=1), 20.0),
            (TimePassed(links=Links()), 28.0),
            (ContributionEncoded(payload=contributed(A, 2, 0)), 28.0),
            (
                SliceTakenOver(
                    round=1, slice_index=2, reducer_id=A, attempt=1, contribute_seconds=100.0
                ),
                30.0,
            ),
            *([(ContributionBegan(sender=C), 30.5)] if begins else []),
            (body_of(contributed(B, 2, 0), 1), 31.0),
        )
        for event, at in events:
            state = step(state, event, at).state
        assert state.slices[2].phase is phase, "what comes is waited for"


def test_of_whom_no_contribution_came_a_result_is_not_waited_for_as_long_again() -> None:
    state = collecting_for(A, B, at=20.0, until=3600.0)
    state = step(state, TrainingEnded(round=1), 20.0).state
    state = step(state, TimePassed(links=Links()), 28.0).state
    assert state.given_up == {C}
    ours, theirs = made_by(A, 0, 0), made_by(B, 1, 0)
    state = step(state, body_of(theirs), 28.0).state
    held = step(state, MeanTaken(index=0, attempt=0, result=reduced_to(ours)), 28.0)
    assert held.wake_at == 28.0 + 1.0


def test_a_result_that_does_not_decode_is_told_of_once_and_its_bytes_are_not_taken_again() -> None:
    state = opened(plan_for(*NODES), RULES, patience_seconds=50.0, now=0.0)
    nonsense, other = (made_by(B, 1, which).header for which in (0, 1))
    first = step(state, ResultUndecodable(header=nonsense), 1.0)
    (told,) = (each.report for each in first.actions if isinstance(each, Tell))
    assert told == ResultRefused(slice_index=1, digest=nonsense.digest, header=nonsense.encode())
    assert not step(first.state, ResultUndecodable(header=nonsense), 2.0).actions
    assert "does not decode" in refusal(RULES, first.state, B, nonsense)
    assert not refusal(RULES, first.state, B, other), "another one may decode"
    assert contradicted(first.state, replace(other, attempt=nonsense.attempt)) == nonsense
    assert not step(state, ResultUndecodable(header=made_by(C, 1, 0).header), 1.0).actions
    taken_over = SliceTakenOver(
        round=1, slice_index=1, reducer_id=C, attempt=1, contribute_seconds=9.0
    )
    anew = step(first.state, taken_over, 2.0).state
    assert anew.slices[1].refused is None


def test_of_whom_something_comes_is_waited_for_as_long_as_it_does() -> None:
    begins, ends = ContributionBegan(sender=C), ContributionEnded(sender=C)
    state = awaiting({C: Awaited.BRIEFLY})
    assert reduced_at(state, (9.0, begins)) == 20.0
    assert reduced_at(state, (9.0, begins), (15.0, ends)) == 15.0 + RULES.waits.grace_seconds
    assert reduced_at(state, (9.0, begins), (9.5, ends)) == 9.5 + RULES.waits.grace_seconds
    assert reduced_at(state, (8.0, begins), (8.0, ends)) == 10.0


def test_what_comes_in_time_counts_whoever_was_waited_for() -> None:
    state = step(awaiting({C: Awaited.BRIEFLY}), body_of(contributed(C, 0, 0)), 11.0).state
    assert state.slices[0].phase is Phase.AVERAGING
    assert set(state.slices[0].contributions) == {A, B, C}


def test_a_slice_that_is_taken_over_is_sent_anew_and_waited_for_anew() -> None:
    state = opened(
        plan_for(*NODES), RULES, patience_seconds=50.0, now=0.0, less_awaited={C: Awaited.BRIEFLY}
    )
    news = SliceTakenOver(round=1, slice_index=1, reducer_id=A, attempt=1, contribute_seconds=30.0)
    state = step(state, news, 10.0).state
    for sender in (A, B):
        state = step(state, body_of(contributed(sender, 1, 0), 1), 14.0).state
    assert collects_until(state, state.slices[1]) == 15.0
