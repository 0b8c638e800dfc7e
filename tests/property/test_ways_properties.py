"""Who carries, on any graph of reach: nobody whose owner refuses or who is apart; no pair is forgotten."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.swarm.members import Member, MemberState
from coordinator.swarm.membership import SLOWEST
from coordinator.swarm.reach import MOST_CARRIERS, ways_between
from protocol.wire.rounds import CorpusSummary, Digest, NodeId, PeerAddress, Way, cut_into_slices

IDS = tuple(NodeId(name) for name in "abcdefg")
PAIRS = tuple(combinations(IDS, 2))
CARRY = st.sampled_from([0.0, SLOWEST, 1e6, 1e8])


def member(
    node_id: NodeId, unreachable: set[NodeId], carry: float, through: dict[NodeId, NodeId]
) -> Member:
    return Member(
        node_id=node_id,
        node_name=node_id,
        address=PeerAddress(public_key=bytes(32), multiaddrs=()),
        device="cpu",
        num_ranks=1,
        version="1",
        corpus=CorpusSummary(digest=Digest(bytes(32)), num_samples=1, num_bytes=1),
        state=MemberState.READY,
        session_id=1,
        lease_until=1.0,
        outer_round=0,
        outer_digest=Digest(bytes(32)),
        unreachable=tuple(sorted(unreachable)),
        carry_bytes_per_second=carry,
        through=through,
    )


@given(
    told=st.sets(st.sampled_from(PAIRS)),
    carry=st.lists(CARRY, min_size=len(IDS), max_size=len(IDS)),
    reducers=st.sets(st.sampled_from(IDS), min_size=1),
    working=st.dictionaries(st.sampled_from(PAIRS), st.sampled_from(IDS)),
    last=st.dictionaries(st.sampled_from(PAIRS), st.sampled_from(IDS)),
)
def test_each_pair_that_needs_it_has_those_that_reach_both_and_may_carry_and_no_other_has(
    told: set[tuple[NodeId, NodeId]],
    carry: list[float],
    reducers: set[NodeId],
    working: dict[tuple[NodeId, NodeId], NodeId],
    last: dict[tuple[NodeId, NodeId], NodeId],
) -> None:
    members = [
        member(
            node_id,
            {other for one, other in told if one == node_id},
            rate,
            {other: by for (one, other), by in working.items() if one == node_id},
        )
        for node_id, rate in zip(IDS, carry, strict=True)
    ]
    slices = cut_into_slices(256 * len(IDS), tuple(sorted(reducers)))
    before = [Way(one=one, other=other, through=(by,)) for (one, other), by in last.items()]
    ways = {(way.one, way.other): way.through for way in ways_between(members, slices, before)}
    rates = dict(zip(IDS, carry, strict=True))

    def reaches(one: NodeId, other: NodeId) -> bool:
        return (min(one, other), max(one, other)) not in told

    reducing = {part.reducer_id for part in slices}
    for pair in PAIRS:
        able = {c for c in IDS if c not in pair and rates[c] and all(reaches(c, n) for n in pair)}
        is_needed = pair in told and bool(reducing.intersection(pair))
        through = ways.get(pair, ())
        assert {*through} <= able
        assert (
            len({*through}) == len(through) == (min(MOST_CARRIERS, len(able)) if is_needed else 0)
        )
