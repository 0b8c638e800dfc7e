"""Liars among contributors and reducers: whom a round speaks against, and with which share of the work."""

from dataclasses import dataclass

from effort import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from coordinator.swarm.contradiction import LEAST_OF_HALF, spoken_against
from coordinator.swarm.state import Say
from node.exchange.screening import contradicted
from protocol.wire.rounds import (
    WHOLE,
    Commit,
    ContributionDigest,
    Contributor,
    Digest,
    NodeId,
    SliceOutcome,
)

DIGEST = Digest(b"d" * 32)
MANY_ELEMENTS = 1 << 30  # chance explains nothing
HONEST_COSINES = st.floats(0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Contributors, each of whom reduces a slice; of each pair the cosine."""

    honest: list[NodeId]
    liars: list[NodeId]
    say: Say
    cosines: dict[tuple[NodeId, NodeId], float]

    @property
    def members(self) -> list[NodeId]:
        return [*self.liars, *self.honest]

    def share(self, node_ids: list[NodeId]) -> float:
        weights = self.say.weights
        return sum(weights[n] for n in node_ids) / sum(weights.values())

    def left_out_by_honest(self) -> set[NodeId]:
        """As a reducer decides that tells the truth: by what has come, whoever sent it."""
        members = self.members
        rows = [[self.cosines[min(a, b), max(a, b)] for b in members if b != a] for a in members]
        return {members[i] for i in contradicted(rows, num_elements=MANY_ELEMENTS)}

    def against(self, lies: dict[NodeId, set[NodeId]]) -> frozenset[NodeId]:
        """Whom the round speaks against; liars leave out whom they like."""
        truth = self.left_out_by_honest()
        slices = tuple(
            SliceOutcome(
                index=index,
                start=index,
                num_elements=1,
                digest=DIGEST,
                contributors=tuple(
                    Contributor(node_id=n, samples=1, tokens=1) for n in self.members
                ),
                contributions=tuple(ContributionDigest(bytes(16)) for _ in self.members),
                factors=tuple(0 if n in lies.get(reducer, truth) else WHOLE for n in self.members),
            )
            for index, reducer in enumerate(self.members)
        )
        commit = Commit(round=1, fragment=0, base_digest=DIGEST, slices=slices)
        return spoken_against(
            commit, self.members, helpers=(), say=self.say, among=tuple(self.members)
        )


@st.composite
def rounds(draw: st.DrawFn, *, against_honest: bool) -> Round:
    """Liars point against one honest member, or against all of them."""
    least = 50 if against_honest else 1
    by_honest = draw(st.lists(st.integers(least, 100), min_size=2, max_size=8))
    most = 100 if against_honest else draw(st.sampled_from([100, 20, 8]))
    num = (
        len(by_honest) - 1 if against_honest else 8
    )  # many may have less than a quarter of the work
    by_liars = draw(st.lists(st.integers(min(most, least), most), min_size=1, max_size=num))
    honest = [NodeId(f"honest-{n}") for n in range(len(by_honest))]
    liars = [NodeId(f"a-liar-{n}") for n in range(len(by_liars))]
    weights = dict(zip([*honest, *liars], [*by_honest, *by_liars], strict=True))
    target = honest if against_honest else draw(st.lists(st.sampled_from(honest), min_size=1))
    cosines = {}
    members = sorted([*honest, *liars])
    for place, one in enumerate(members):
        for other in members[place + 1 :]:
            if one in liars and other in liars:
                cosine = 1.0
            elif one in liars:
                cosine = -0.9 if other in target else draw(st.floats(-1.0, 1.0))
            else:
                cosine = 0.5 if against_honest else draw(HONEST_COSINES)
            cosines[one, other] = cosine
    say = Say(weights=weights, is_confirmed=True)
    return Round(honest=honest, liars=liars, say=say, cosines=cosines)


@examples(300)
@given(st.data())
def test_liars_speak_against_no_honest_member(data: st.DataObject) -> None:
    """Without half of the work, and half of the contributions or a quarter of the work.

    Whatever they contribute and report; honest ones point the same way, or are at right angles.
    """
    round = data.draw(rounds(against_honest=False))
    is_most_by_number = len(round.liars) > (len(round.members) - 1) // 2
    share = round.share(round.liars)
    assume(share < (LEAST_OF_HALF if is_most_by_number else 0.5))
    whom = st.sets(st.sampled_from(round.honest))
    lies = {n: data.draw(whom) for n in round.liars}
    assert round.against(lies).isdisjoint(round.honest)


@examples(300)
@given(st.data())
def test_no_round_speaks_against_half_of_the_work(data: st.DataObject) -> None:
    """Whoever lies, and whatever they are: then nobody says who is right."""
    round = data.draw(rounds(against_honest=False))
    lies = {n: data.draw(st.sets(st.sampled_from(round.members))) for n in round.members}
    assert round.share(list(round.against(lies))) < 0.5


@examples(300)
@given(round=rounds(against_honest=True))
def test_whom_the_others_contradict_is_found_whatever_it_reports(round: Round) -> None:
    """While honest members have more than half of the work and of the number, and their work is like."""
    assume(len(round.liars) <= (len(round.members) - 1) // 2)
    assume(round.share(round.liars) < 0.5)
    weights = sorted(round.say.weights.values())
    lighter = sum(weights[: (len(weights) - 1) // 2 + 1])
    assume(lighter >= LEAST_OF_HALF * sum(weights))
    assert round.against({n: set(round.honest) for n in round.liars}) == set(round.liars)
