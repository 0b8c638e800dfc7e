"""Who is cut off from whom, against the definition that looks at all pairs."""

from dataclasses import replace
from itertools import combinations

from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from coordinator.swarm.reach import best_reducers, cut_off_from, newly_cut_pairs
from coordinator.swarm.state import Member, MemberState, Rules, SwarmState
from coordinator.swarm.transition import initial_state
from protocol.rounds import CorpusSummary, Digest, NodeId, PeerAddress

DIGEST = Digest(bytes(32))
NAMES = [NodeId(name) for name in "abcdefgh"]
STATES = st.sampled_from((MemberState.READY, MemberState.JOINING, MemberState.LOST))
RULES = Rules(
    total_rounds=1,
    min_nodes=1,
    inner_steps=1,
    batch=1,
    context=1,
    train_seconds=1,
    contribute_seconds=1,
    commit_seconds=1,
    apply_seconds=1,
    lease_seconds=1,
    evaluate_every_rounds=1,
)


def member(node_id: NodeId, state: MemberState, unreachable: list[NodeId]) -> Member:
    return Member(
        node_id=node_id,
        node_name=node_id,
        address=PeerAddress(public_key=bytes(32), multiaddrs=()),
        device="cpu",
        num_ranks=1,
        version="1",
        corpus=CorpusSummary(digest=DIGEST, num_samples=1, num_bytes=1),
        state=state,
        session_id=1,
        lease_until=1.0,
        outer_round=0,
        outer_digest=DIGEST,
        unreachable=tuple(unreachable),
    )


MEMBERS = st.lists(
    st.builds(member, st.sampled_from(NAMES), STATES, st.lists(st.sampled_from(NAMES), max_size=5)),
    min_size=1,
    unique_by=lambda one: one.node_id,
)


def is_cut_off(one: Member, other: Member) -> bool:
    return other.node_id in one.unreachable or one.node_id in other.unreachable


@examples(400)
@given(members=MEMBERS)
def test_reducers_are_those_who_are_cut_off_from_the_fewest(members: list[Member]) -> None:
    num_cut = [
        sum(is_cut_off(one, other) for other in members if other is not one) for one in members
    ]
    found = cut_off_from(members)
    assert [len(found.get(one.node_id, ())) for one in members] == num_cut
    best = [one for one, num in zip(members, num_cut, strict=True) if num == min(num_cut)]
    assert best_reducers(members) == best


def cut_pairs(state: SwarmState) -> set[tuple[NodeId, NodeId]]:
    present = sorted(
        (m for m in state.members.values() if m.state is not MemberState.LOST),
        key=lambda one: one.node_id,
    )
    return {
        (one.node_id, other.node_id)
        for one, other in combinations(present, 2)
        if is_cut_off(one, other)
    }


@examples(400)
@given(was=MEMBERS, now=MEMBERS, num_same=st.integers(0, 8))
def test_pairs_are_told_that_were_not_cut_off_from_each_other_before(
    was: list[Member], now: list[Member], num_same: int
) -> None:
    empty = initial_state(RULES, DIGEST)
    before = replace(empty, members={one.node_id: one for one in was})
    after = replace(
        empty,
        members={**before.members, **{one.node_id: one for one in now[num_same:]}},
    )
    changed = [n for n, one in after.members.items() if before.members.get(n) is not one]
    told = [(one.node_id, other.node_id) for one, other in newly_cut_pairs(before, after, changed)]
    assert told == sorted(cut_pairs(after) - cut_pairs(before))
