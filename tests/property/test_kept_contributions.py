"""A member that keeps contributions from whom it likes, when it likes: how often rounds wait for it."""

from collections.abc import Mapping, Set
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from node.exchange.round.state import (
    BRIEF_ROUNDS,
    KEPT_ROUNDS,
    MOST_IN_TIME,
    Awaited,
    Missed,
    less_awaited,
    with_commit,
)
from protocol.wire.rounds import (
    Assignment,
    Commit,
    Contributor,
    Digest,
    NodeId,
    Plan,
    Slice,
    SliceOutcome,
)
from tests.property.effort import examples

NODES = tuple(NodeId(name) for name in "abcdef")
KEEPER = NODES[-1]
OTHERS = NODES[:-1]
ASSIGNMENTS = tuple(
    Assignment(node_id=n, inner_steps=10, first_sample=0, num_samples=10) for n in NODES
)
"""Each of them reduces the slice of its place."""

Lacking = Mapping[NodeId, Set[NodeId]]
"""By reducers: whose work their slices lack."""


def plan(round: int) -> Plan:
    return Plan(
        round=round,
        fragment=0,
        base_digest=Digest(b"base"),
        assignments=ASSIGNMENTS,
        slices=tuple(
            Slice(index=place, start=256 * place, num_elements=256, reducer_id=n)
            for place, n in enumerate(NODES)
        ),
        token_clock=0,
        train_seconds=10.0,
        contribute_seconds=20.0,
        commit_seconds=30.0,
        reason="",
    )


def commit(round: int, lacking: Lacking) -> Commit:
    return Commit(
        round=round,
        fragment=0,
        base_digest=Digest(b"base"),
        assignments=ASSIGNMENTS,
        slices=tuple(
            SliceOutcome(
                index=place,
                start=256 * place,
                num_elements=256,
                digest=Digest(b"result"),
                contributors=tuple(
                    Contributor(node_id=n, samples=10, tokens=10)
                    for n in NODES
                    if n not in lacking.get(reducer, ())
                ),
            )
            for place, reducer in enumerate(NODES)
        ),
    )


class World:
    """What each reducer knows after each round, and for whom it then waits."""

    def __init__(self) -> None:
        self.round = 0
        self.known: dict[NodeId, dict[NodeId, Missed]] = {n: {} for n in NODES}

    def awaited(self, reducer: NodeId, node_id: NodeId) -> Awaited:
        return less_awaited(plan(self.round + 1), self.known[reducer]).get(node_id, Awaited.FULLY)

    def close(self, lacking: Lacking) -> None:
        self.round += 1
        closed = commit(self.round, lacking)
        self.known = {
            n: with_commit(before, closed, {place})
            for place, (n, before) in enumerate(self.known.items())
        }


KEPT_FROM = st.lists(st.sets(st.sampled_from(OTHERS)), min_size=1, max_size=150)


@given(kept_from=KEPT_FROM)
@examples(300)
def test_one_round_in_seventeen_waits_to_its_deadline_for_who_keeps_contributions(
    kept_from: list[set[NodeId]],
) -> None:
    world = World()
    to_the_deadline: list[int] = []
    briefly: dict[NodeId, list[int]] = {n: [] for n in OTHERS}
    for reducers in kept_from:
        waits = {n: world.awaited(n, KEEPER) for n in reducers}
        if Awaited.FULLY in waits.values():
            to_the_deadline.append(world.round)
        for n, awaited in waits.items():
            if awaited is Awaited.BRIEFLY:
                briefly[n].append(world.round)
        world.close({n: {KEEPER} for n in reducers})
    for one, other in pairwise(to_the_deadline):
        assert other - one > BRIEF_ROUNDS
    for n, rounds in briefly.items():
        for place, (one, other) in enumerate(pairwise(rounds)):
            lately = [r for r in rounds[: place + 1] if one - r < KEPT_ROUNDS]
            in_time = [r for r in range(one + 1, other) if n not in kept_from[r]]
            assert len(in_time) >= min(MOST_IN_TIME, 2 ** (len(lately) - 1))


def test_who_keeps_all_is_waited_for_twice_and_then_until_it_works_again_by_nobody() -> None:
    world = World()
    waits = []
    for _ in range(3 * KEPT_ROUNDS):
        waits.append({world.awaited(n, KEEPER) for n in OTHERS})
        world.close({n: {KEEPER} for n in OTHERS})
    assert waits == [{Awaited.FULLY}, {Awaited.BRIEFLY}, *[{Awaited.NOT}] * (len(waits) - 2)]
    world.close({})
    assert all(world.awaited(n, KEEPER) is Awaited.BRIEFLY for n in OTHERS)


@given(kept_from=KEPT_FROM)
@examples(100)
def test_who_works_again_is_waited_for_as_before_after_so_many_rounds(
    kept_from: list[set[NodeId]],
) -> None:
    world = World()
    for reducers in kept_from:
        world.close({n: {KEEPER} for n in reducers})
    for _ in range(BRIEF_ROUNDS):
        world.close({})
    assert all(world.awaited(n, KEEPER) is Awaited.FULLY for n in OTHERS)


@given(
    left_out=st.lists(
        st.fixed_dictionaries({n: st.sets(st.sampled_from(NODES)) for n in NODES[:1]}),
        max_size=100,
    )
)
@examples(300)
def test_a_reducer_that_leaves_others_out_has_nobody_else_give_them_up(
    left_out: list[dict[NodeId, set[NodeId]]],
) -> None:
    """Those are waited for a quarter as long again as the others at least: they lose nothing by its lie."""
    world = World()
    for lacking in left_out:
        for reducer in NODES[1:]:
            assert all(world.awaited(reducer, n) is not Awaited.NOT for n in NODES)
        world.close(lacking)


def test_where_most_came_too_late_it_was_the_deadline() -> None:
    world = World()
    world.close({reducer: set(NODES[:4]) for reducer in NODES})
    assert all(world.awaited(n, other) is Awaited.FULLY for n in NODES for other in NODES)


def test_where_most_would_not_be_waited_for_all_are() -> None:
    world = World()
    for place in (0, 2):
        world.close({NODES[5]: set(NODES[place : place + 2])})
    assert all(world.awaited(NODES[0], n) is Awaited.FULLY for n in NODES)
    world.close({})
    for _ in range(BRIEF_ROUNDS - 2):
        world.close({})
    assert world.awaited(NODES[0], NODES[2]) is Awaited.BRIEFLY, "the first two are forgotten"
    assert world.awaited(NODES[0], NODES[0]) is Awaited.FULLY
