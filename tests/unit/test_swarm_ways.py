"""Who carries for whom: what two exchange that do not reach each other goes through one that reaches both."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest

from coordinator.swarm.reach import MOST_WAYS, ways_between, ways_in_words
from protocol.wire.messages import RoundOpened
from protocol.wire.rounds import NodeId, cut_into_slices
from tests.unit.swarm_scene import INITIAL, Scene, asked_of, digest_of

MB = 1e6
CONE, PORT_RESTRICTED, SYMMETRIC = ("a",), ("b", "c", "d"), ("e", "f")
HOMES = (*CONE, *PORT_RESTRICTED, *SYMMETRIC)


def routers(one: str, other: str) -> bool:
    """Whether a hole between the routers of two homes comes to be."""
    strict = {one, other} & {*SYMMETRIC}
    return not strict or bool({one, other} & {*CONE})


def ring(one: str, other: str) -> bool:
    """Each reaches its two neighbours on either side of a ring of six, and nobody reaches all."""
    return (HOMES.index(one) - HOMES.index(other)) % len(HOMES) != 3


class Homes(Scene):
    """Six homes of which some pairs do not reach each other."""

    def __init__(self, reaches: Callable[[str, str], bool]) -> None:
        super().__init__(min_nodes=len(HOMES))
        self.reaches = reaches


def scene(reaches: Callable[[str, str], bool], carry: dict[str, float]) -> Homes:
    """In their first round."""
    on_stage = Homes(reaches)
    on_stage.attach(*HOMES[:-1])
    for name in HOMES[:-1]:
        beat(on_stage, name, carry)
    on_stage.attach(HOMES[-1])
    return on_stage


def beat(
    on_stage: Homes,
    name: str,
    carry: dict[str, float],
    *,
    at: int = 0,
    through: dict[str, str] | None = None,
) -> None:
    cut = tuple(o for o in HOMES if o != name and not on_stage.reaches(name, o))
    digest = digest_of(f"state {at}") if at else INITIAL
    on_stage.beat(
        name, at=at, digest=digest, unreachable=cut, carry=carry.get(name, 0.0), through=through
    )


def unserved(on_stage: Homes) -> set[tuple[str, str]]:
    """Pairs of a contributor and a reducer that have no way to each other."""
    ways = {(way.one, way.other) for way in on_stage.round.ways}
    reducers = {p.slice.reducer_id for p in on_stage.round.slices}
    return {
        (one, other)
        for one, other in combinations(HOMES, 2)
        if {one, other} & reducers and not on_stage.reaches(one, other) and (one, other) not in ways
    }


def play(on_stage: Homes, carry: dict[str, float], **through: dict[str, str]) -> None:
    number = on_stage.round.number
    for name in HOMES:
        on_stage.train(name)
    on_stage.commit(*HOMES)
    on_stage.apply(digest_of(f"state {number}"), *HOMES[:-1])
    for name in HOMES[:-1]:
        beat(on_stage, name, carry, at=number, through=through.get(name))
    on_stage.apply(digest_of(f"state {number}"), HOMES[-1])


def test_without_carriers_slices_miss_those_that_do_not_reach_their_reducers_and_the_plan_says_so() -> (
    None
):
    on_stage = scene(routers, {})
    assert {p.slice.reducer_id for p in on_stage.round.slices} == {"a", "b", "c", "d"}
    assert len(unserved(on_stage)) == 6
    assert "6 pairs do not reach each other, and nobody carries for them" in on_stage.round.reason


def test_one_whom_everybody_reaches_carries_for_symmetric_routers_to_those_that_reduce() -> None:
    on_stage = scene(routers, {"a": MB})
    assert not unserved(on_stage)
    assert {way.through for way in on_stage.round.ways} == {("a",)}
    assert "a carries for 6 pairs" in on_stage.round.reason
    (told,) = on_stage.asked(RoundOpened)
    assert told.plan.ways == on_stage.round.ways
    assert asked_of(on_stage.actions, RoundOpened) == list(HOMES)  # who carries hears of it too


def test_where_nobody_reaches_everybody_several_carry_and_each_pair_has_a_second_one() -> None:
    on_stage = scene(ring, dict.fromkeys(HOMES, MB))
    assert not unserved(on_stage)
    assert len(on_stage.round.ways) == 3
    for way in on_stage.round.ways:
        assert len({*way.through}) == 2
        for carrier in way.through:
            assert ring(carrier, way.one) and ring(carrier, way.other)
    assert len({way.through[0] for way in on_stage.round.ways}) == 3  # they share


def test_a_carrier_whose_owner_lets_it_carry_ten_times_as_much_is_asked_first() -> None:
    on_stage = scene(ring, {**dict.fromkeys(HOMES, MB), "b": 10 * MB})
    firsts = {(way.one, way.other): way.through[0] for way in on_stage.round.ways}
    assert [pair for pair in firsts if firsts[pair] == "b"] == [("a", "d"), ("c", "f")]


def test_one_whose_owner_refuses_carries_nothing() -> None:
    on_stage = scene(ring, {**dict.fromkeys(HOMES, MB), "b": 0.0})
    assert all("b" not in way.through for way in on_stage.round.ways)


@pytest.mark.parametrize("told", [1.0, 1e13])
def test_what_no_link_carries_is_not_believed(told: float) -> None:
    on_stage = scene(ring, {"b": told})
    assert on_stage.round.ways == ()


def test_who_did_not_deliver_is_replaced_and_who_did_goes_on() -> None:
    carry = dict.fromkeys(HOMES, MB)
    on_stage = scene(ring, carry)
    before = {(str(way.one), str(way.other)): way.through for way in on_stage.round.ways}
    works = before["a", "d"][0]
    play(on_stage, carry, a={"d": works})
    after = {(str(way.one), str(way.other)): way.through for way in on_stage.round.ways}
    assert after["a", "d"][0] == works
    for pair in (("b", "e"), ("c", "f")):
        assert after[pair][0] != before[pair][0]


def test_who_did_not_deliver_is_asked_again_where_nobody_else_reaches_both() -> None:
    carry = {"a": MB}
    on_stage = scene(routers, carry)
    play(on_stage, carry)
    assert {way.through for way in on_stage.round.ways} == {("a",)}


def test_pairs_that_come_to_reach_each_other_need_nobody_from_the_next_round_on() -> None:
    carry = dict.fromkeys(HOMES, MB)
    on_stage = scene(ring, carry)
    on_stage.reaches = lambda one, other: True
    play(on_stage, carry)
    assert on_stage.round.ways == ()


def test_a_plan_names_no_more_ways_than_fit_and_says_how_many_pairs_are_left() -> None:
    on_stage = scene(ring, {})
    some = on_stage.member("a")
    ids = [NodeId(f"{place:032}") for place in range(60)]
    members = [
        replace(
            some,
            node_id=n,
            unreachable=tuple(o for o in ids[:-1] if o != n),
            carry_bytes_per_second=MB,
        )
        for n in ids[:-1]
    ]
    members.append(replace(some, node_id=ids[-1], unreachable=(), carry_bytes_per_second=MB))
    slices = cut_into_slices(60 * 256, tuple(ids))
    ways = ways_between(members, slices)
    assert len(ways) == MOST_WAYS
    left = 59 * 58 // 2 - MOST_WAYS
    assert f"{left} pairs do not reach each other, and nobody" in ways_in_words(
        members, slices, ways
    )


def test_many_carriers_are_counted_in_the_reason_and_not_named() -> None:
    on_stage = scene(ring, dict.fromkeys(HOMES, MB))
    ids = [NodeId(name) for name in "abcdefghijkl"]
    members = [  # each is cut off from the one opposite
        replace(
            on_stage.member("a"),
            node_id=n,
            node_name=n,
            unreachable=(ids[(place + 6) % 12],),
            carry_bytes_per_second=MB,
        )
        for place, n in enumerate(ids)
    ]
    slices = cut_into_slices(12 * 256, tuple(ids))
    words = ways_in_words(members, slices, ways_between(members, slices))
    assert words == "; 6 members carry for 6 pairs"
