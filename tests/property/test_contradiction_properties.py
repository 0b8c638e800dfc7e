"""Liars among contributors and reducers: whom a round speaks against, and with which share of the work."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from hypothesis import assume, given
from hypothesis import strategies as st

from coordinator.swarm.penalties import spoken_against
from coordinator.swarm.state import Say
from coordinator.swarm.weighing import votes_of
from node.exchange.screening import MOST_COMPARED_WITH, NOT_HERE, Cosine, contradicted, votes_about
from protocol.wire.rounds import (
    WHOLE,
    Commit,
    ContributionDigest,
    Contributor,
    Digest,
    NodeId,
    SliceOutcome,
)
from tests.property.effort import examples

DIGEST = Digest(b"d" * 32)
HONEST_COSINES = st.floats(0.0, 1.0)
MOST_LYING = 0.499  # votes are whole numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Participants, each of whom reduces a slice; of each pair the cosine. Some of them do not contribute."""

    honest: list[NodeId]
    liars: list[NodeId]
    late: list[NodeId]
    say: Say
    cosines: dict[tuple[NodeId, NodeId], float]

    @property
    def members(self) -> list[NodeId]:
        return sorted([*self.liars, *self.honest])

    @property
    def here(self) -> list[NodeId]:
        return [node_id for node_id in self.members if node_id not in self.late]

    def share(self, node_ids: Iterable[NodeId]) -> float:
        weights = self.say.weights
        return sum(weights[n] for n in node_ids) / sum(weights.values())

    def left_out_by_honest(self) -> set[NodeId]:
        """As a reducer decides that tells the truth, by what has come and the plan's votes."""
        told = dict(zip(self.members, votes_of(self.say, self.members), strict=True))
        votes = [told[node_id] for node_id in self.here]
        about = votes_about(votes, not_here=WHOLE - sum(votes), seed=b"seed")
        places = enumerate(self.here)
        cosines = {
            (i, j): Cosine(value=self.cosines[a, b], error=0.0)  # chance explains nothing
            for (i, a), (j, b) in combinations(places, 2)
        }
        return {self.here[i] for i in contradicted(cosines, about, votes)}

    def against(self, lies: dict[NodeId, set[NodeId]]) -> frozenset[NodeId]:
        """Whom the round speaks against; liars leave out whom they like."""
        truth = self.left_out_by_honest()
        slices = tuple(
            SliceOutcome(
                index=index,
                start=index,
                num_elements=1,
                digest=DIGEST,
                contributors=tuple(Contributor(node_id=n, samples=1, tokens=1) for n in self.here),
                contributions=tuple(ContributionDigest(bytes(16)) for _ in self.here),
                factors=tuple(0 if n in lies.get(reducer, truth) else WHOLE for n in self.here),
            )
            for index, reducer in enumerate(self.members)
        )
        commit = Commit(round=1, fragment=0, base_digest=DIGEST, slices=slices)
        return spoken_against(
            commit, self.members, helpers=(), say=self.say, among=tuple(self.members)
        )


@st.composite
def rounds(draw: st.DrawFn, *, against_all: bool, some_late: bool = False) -> Round:
    """Liars, any number of whom may have no work, point against some honest members or all of them."""
    by_honest = draw(st.lists(st.integers(1, 100), min_size=2, max_size=5))
    most = draw(st.sampled_from([100, 20, 1]))
    by_liars = draw(st.lists(st.integers(0, most), min_size=1, max_size=7))
    honest = [NodeId(f"honest-{n}") for n in range(len(by_honest))]
    liars = [NodeId(f"a-liar-{n}") for n in range(len(by_liars))]
    weights = dict(zip([*honest, *liars], [*by_honest, *by_liars], strict=True))
    target = honest if against_all else draw(st.lists(st.sampled_from(honest), min_size=1))
    late = draw(st.lists(st.sampled_from(honest), unique=True)) if some_late else []
    cosines = {}
    for one, other in combinations(sorted([*honest, *liars]), 2):
        if one in liars and other in liars:
            cosine = 1.0
        elif one in liars:
            cosine = -0.9 if other in target else draw(st.floats(-1.0, 1.0))
        else:
            cosine = 0.5 if against_all else draw(HONEST_COSINES)
        cosines[one, other] = cosine
    say = Say(weights=weights, is_confirmed=True)
    return Round(honest=honest, liars=liars, late=late, say=say, cosines=cosines)


@examples(200)
@given(st.data())
def test_liars_have_no_honest_member_left_out_and_speak_against_none(data: st.DataObject) -> None:
    """Without half of the work, whatever they contribute and report, and however many keys they have.

    Whoever is late; honest contributions agree, or are at right angles.
    """
    round = data.draw(rounds(against_all=False, some_late=True))
    assume(round.share(round.liars) < MOST_LYING)
    assert round.left_out_by_honest().isdisjoint(round.honest)
    whom = st.sets(st.sampled_from(round.honest))
    lies = {n: data.draw(whom) for n in round.liars}
    assert round.against(lies).isdisjoint(round.honest)


@examples(200)
@given(st.data())
def test_no_round_speaks_against_half_of_the_work(data: st.DataObject) -> None:
    """Whoever lies, and whatever they are: then nobody says who is right."""
    round = data.draw(rounds(against_all=False))
    lies = {n: data.draw(st.sets(st.sampled_from(round.members))) for n in round.members}
    assert round.share(round.against(lies)) < 0.5


@examples(200)
@given(round=rounds(against_all=True))
def test_whom_the_others_contradict_is_found_whatever_it_reports(round: Round) -> None:
    """While honest members have more than half of the work, and nobody of them has it alone."""
    assume(round.share(round.liars) < MOST_LYING and len(round.members) > 2)
    assume(max(round.share([node_id]) for node_id in round.honest) < MOST_LYING)
    assert round.left_out_by_honest() == set(round.liars)
    assert round.against({n: set(round.honest) for n in round.liars}) == set(round.liars)


@examples(100)
@given(
    by_honest=st.lists(st.integers(1, 100), min_size=1, max_size=30),
    num_keys=st.integers(0, 60),
    not_here=st.integers(0, 50),
    seed=st.binary(max_size=4),
)
def test_of_many_contributions_words_are_drawn_by_what_they_count(
    by_honest: list[int], num_keys: int, not_here: int, seed: bytes
) -> None:
    """Keys without work are asked nothing, whatever their number, and no word is drawn too often."""
    votes = [*by_honest, *([0] * num_keys)]
    whole = sum(votes) + not_here
    for about in votes_about(votes, not_here=not_here, seed=seed):
        asked = sum(about.values())
        for place, word in enumerate([*votes, not_here]):
            said = about.get(place if place < len(votes) else NOT_HERE, 0)
            assert abs(said - asked * word / whole) < (
                1 if len(votes) > MOST_COMPARED_WITH + 1 else 1e-9
            )


@examples(200)
@given(
    others=st.lists(st.integers(0, 100), min_size=2, max_size=6),
    against=st.floats(-1.0, -0.01),
    not_here=st.integers(0, 50),
    data=st.data(),
)
def test_one_alone_leaves_nobody_out_however_much_it_has_done(
    others: list[int], against: float, not_here: int, data: st.DataObject
) -> None:
    """A node of most of the work, from whose weights all others lead back: nobody says who is right."""
    votes = [sum(others) + not_here + 1, *others]
    cosines = {(0, place): against for place in range(1, len(votes))} | {
        pair: data.draw(st.floats(-1.0, 1.0)) for pair in combinations(range(1, len(votes)), 2)
    }

    def left_out() -> set[int]:
        about = votes_about(votes, not_here=not_here)
        told = {pair: Cosine(value=each, error=0.0) for pair, each in cosines.items()}
        return set(contradicted(told, about, votes))

    assert left_out() == set()
    cosines[0, 1] = 0.5
    assert left_out() == {place for place in range(2, len(votes)) if against < -0.25 * 0.5}


def test_a_cosine_that_chance_gives_speaks_against_nobody() -> None:
    """Three standard errors: what rows that few samples touch make of honest work."""
    about = votes_about([1, 1, 1])

    def left_out(error: float) -> set[int]:
        cosines = {(0, 1): 0.3, (0, 2): -0.1, (1, 2): -0.1}
        of_error = {pair: Cosine(value=each, error=error) for pair, each in cosines.items()}
        return set(contradicted(of_error, about, [1, 1, 1]))

    assert left_out(error=0.035) == set()
    assert left_out(error=0.03) == {2}


def test_votes_are_by_work_and_two_thirds_of_invites_decide_before_there_is_any() -> None:
    names = [NodeId(name) for name in "abc"]
    assert votes_of(Say(weights={names[0]: 3, names[1]: 5}, is_confirmed=True), names) == (
        3 * WHOLE // 8,
        5 * WHOLE // 8,
        0,
    )
    quarter = WHOLE // 4
    assert votes_of(Say(weights=dict.fromkeys(names, 7)), names) == (quarter, quarter, quarter)
    assert votes_of(Say(weights=dict.fromkeys(names, 0)), names) == votes_of(None, names) == ()
