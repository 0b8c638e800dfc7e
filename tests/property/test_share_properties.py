"""Slices by bandwidth, for any links: shares are the whole, blocks stay whole, nobody waits longer."""

import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.swarm.shares import EQUAL_LINK_FROM, LEAST_OF_EQUAL, MOST_OF_EQUAL, reducer_shares
from protocol.wire.rounds import BLOCK, NodeId, cut_into_slices
from protocol.wire.vitals import LinkRates
from tests.property.effort import examples
from tests.unit.shares_scene import all_may, both, seconds

rates = st.builds(
    LinkRates,
    up_bytes_per_second=st.none() | st.floats(1e3, 1e10),
    down_bytes_per_second=st.none() | st.floats(1e3, 1e10),
)
swarms = st.lists(st.tuples(rates, st.booleans()), min_size=1, max_size=16).filter(
    lambda swarm: any(may for _, may in swarm)
)


@examples(100)
@given(swarms)
def test_shares_are_the_whole_fragment_and_only_who_may_reduce_has_one(
    swarm: list[tuple[LinkRates, bool]],
) -> None:
    links, may = [link for link, _ in swarm], [may for _, may in swarm]
    shares = reducer_shares(links, may)
    assert sum(shares) == pytest.approx(1)
    for share, is_allowed in zip(shares, may, strict=True):
        assert share >= 0
        assert is_allowed or share == 0


@examples(300)
@example([1.1, 5.0, 1.1, 2.0])
@given(st.lists(st.sampled_from([1.0, 1.1, 1.4, 1.6, 2.0, 3.0, 5.0, 9.0]), min_size=3, max_size=12))
def test_nobody_reduces_more_than_twice_an_equal_share_whatever_links_are_claimed(
    claimed: list[float],
) -> None:
    """Nor more than half; those whose links are too slow to reduce leave theirs to all others."""
    shares = reducer_shares(both(*claimed), [True] * len(claimed))
    num_reducing = sum(share > 0 for share in shares)
    most = max(1 / num_reducing, min(1 / 2, MOST_OF_EQUAL / len(shares)))
    assert max(shares) <= most * (1 + 1e-9)
    assert sum(shares) == pytest.approx(1)


@examples(100)
@given(st.floats(1, 1e4), st.integers(1, 16))
def test_equal_links_reduce_equal_slices(rate: float, num_nodes: int) -> None:
    links = both(*[rate] * num_nodes)
    assert reducer_shares(links, all_may(links)) == (1 / num_nodes,) * num_nodes


@examples(100)
@given(st.lists(st.floats(0.001, 1e4), min_size=3, max_size=16))
def test_slices_by_bandwidth_are_not_done_later_than_equal_ones(
    megabytes: list[float],
) -> None:
    links = both(*megabytes)
    shares = reducer_shares(links, all_may(links))
    equal = (1 / len(links),) * len(links)
    # What counts as equal, and crumbs that others take over, may cost this much.
    assert seconds(links, shares) <= 1.3 / EQUAL_LINK_FROM * seconds(links, equal)


@examples(100)
@given(st.lists(st.floats(0.001, 1e6), min_size=3, max_size=16))
def test_no_reducer_has_more_than_half_of_the_fragment_or_two_equal_shares(
    megabytes: list[float],
) -> None:
    shares = reducer_shares(both(*megabytes), [True] * len(megabytes))
    working = sum(share > 0 for share in shares)
    assert max(shares) <= max(2 / len(shares), 1 / working) * 1.2, shares
    if len(shares) >= 4:
        assert max(shares) <= 0.61  # crumbs that others take over included


def seconds_with(links: list[LinkRates], helps: list[bool], shares: tuple[float, ...]) -> float:
    """How long the slowest link is busy, with helpers, by the docstring's formulas."""
    num_others, num_contributions = len(links) - 1, helps.count(False)
    loads = [
        max(num_others * share, 1 + (num_contributions - 1) * share)
        if is_helper
        else 1 + (num_others - 1) * share
        for share, is_helper in zip(shares, helps, strict=True)
    ]
    return max(
        load / min(link.up_bytes_per_second or math.inf, link.down_bytes_per_second or math.inf)
        for link, load in zip(links, loads, strict=True)
    )


@examples(200)
@given(
    nodes=st.lists(st.sampled_from([1.0, 2.0, 5.0, 10.0]), min_size=2, max_size=8),
    helpers=st.lists(st.sampled_from([1.0, 10.0, 100.0]), min_size=1, max_size=3),
    may=st.booleans(),
)
def test_with_helpers_shares_are_the_whole_and_not_later_than_the_helpers_alone(
    nodes: list[float], helpers: list[float], may: bool
) -> None:
    links, helps = both(*nodes, *helpers), [False] * len(nodes) + [True] * len(helpers)
    may_reduce = [may] * len(nodes) + [True] * len(helpers)
    shares = reducer_shares(links, may_reduce, helps)
    assert sum(shares) == pytest.approx(1)
    most = max(1 / sum(share > 0 for share in shares), min(1 / 2, MOST_OF_EQUAL / len(shares)))
    for share, may_it, is_helper in zip(shares, may_reduce, helps, strict=True):
        assert share == 0 or may_it
        assert is_helper or share <= most * (1 + 1e-9)
    equal = tuple(is_helper / len(helpers) for is_helper in helps)
    slack = 1.3 / EQUAL_LINK_FROM
    assert seconds_with(links, helps, shares) <= slack * seconds_with(links, helps, equal)


@pytest.mark.parametrize("rate", [None, 1.0])
def test_a_helper_alone_reduces_everything_and_two_alike_share(rate: float | None) -> None:
    helps = [False] * 4 + [True]
    assert reducer_shares(both(*[rate] * 5), helps, helps) == (0, 0, 0, 0, 1)
    two = [False] * 4 + [True] * 2
    assert reducer_shares(both(*[rate] * 6), two, two) == pytest.approx((0, 0, 0, 0, 0.5, 0.5))


@examples(50)
@given(
    began=st.lists(st.floats(0.05, 1.0), min_size=2, max_size=4),
    uplinks=st.lists(st.sampled_from([50.0, 100.0, 400.0]), min_size=4, max_size=4),
)
def test_what_helpers_reduce_goes_by_their_links_and_not_by_what_they_had_before(
    began: list[float], uplinks: list[float]
) -> None:
    """A helper that was sent little has shown little of its downlink, which is no reason to send it less."""
    ups = uplinks[: len(began)]
    helps = [False] * 8 + [True] * len(ups)
    fair = reducer_shares(both(*[10.0] * 8, *ups), helps, helps)
    seen = [share / sum(began) for share in began]
    for _ in range(5):  # rounds: who had the smallest share received the most slowly
        told = [
            LinkRates(up_bytes_per_second=up * 1e6, down_bytes_per_second=up * 1e6 * share)
            for up, share in zip(ups, seen, strict=True)
        ]
        shares = reducer_shares([*both(*[10.0] * 8), *told], helps, helps)
        assert shares == pytest.approx(fair)
        seen = list(shares[8:])


def test_a_helper_of_which_nothing_is_known_yet_has_as_much_as_the_others() -> None:
    helps = [False] * 4 + [True] * 2
    links = [*both(1.0, 1.0, 1.0, 1.0, 100.0), LinkRates()]
    assert reducer_shares(links, helps, helps) == pytest.approx((0, 0, 0, 0, 0.5, 0.5))


def test_a_fast_helper_beside_slow_nodes_reduces_almost_all() -> None:
    """A node's link carries its contribution and its results; the helper's the rest."""
    helps = [False] * 4 + [True]
    shares = reducer_shares(both(1.0, 1.0, 1.0, 1.0, 100.0), [True] * 5, helps)
    assert shares == (0, 0, 0, 0, 1)


@examples(100)
@given(st.lists(st.floats(0.001, 1e4), min_size=3, max_size=16))
def test_no_slice_is_a_crumb(megabytes: list[float]) -> None:
    shares = reducer_shares(both(*megabytes), [True] * len(megabytes))
    assert all(share == 0 or share >= LEAST_OF_EQUAL / len(megabytes) for share in shares)


@examples(100)
@given(
    num_elements=st.integers(1, 100 * BLOCK),
    weights=st.lists(st.floats(0, 1), min_size=1, max_size=16).filter(lambda w: sum(w) > 0.1),
    least_elements=st.none() | st.integers(1, 20 * BLOCK),
)
def test_slices_by_shares_are_whole_blocks_and_cover_the_fragment_once(
    num_elements: int, weights: list[float], least_elements: int | None
) -> None:
    reducers = tuple(NodeId(f"{i:02}") for i in range(len(weights)))
    shares = tuple(weight / sum(weights) for weight in weights)
    slices = cut_into_slices(num_elements, reducers, shares, least_elements=least_elements)
    assert [part.index for part in slices] == list(range(len(slices)))
    assert slices[0].start == 0
    assert all(part.start % BLOCK == 0 and part.num_elements > 0 for part in slices)
    assert all(a.start + a.num_elements == b.start for a, b in pairwise(slices))
    assert slices[-1].start + slices[-1].num_elements == num_elements
    num_blocks = -(-num_elements // BLOCK)
    assert [p.reducer_id for p in slices] == sorted(p.reducer_id for p in slices)
    for reducer, share in zip(reducers, shares, strict=True):
        own = [-(-part.num_elements // BLOCK) for part in slices if part.reducer_id == reducer]
        assert sum(own) == pytest.approx(share * num_blocks, abs=1.01)
        assert share > 0 or not own
        if least_elements is None:
            assert len(own) <= 1
        elif len(own) > 1:
            assert max(own) - min(own) <= 1
            assert least_elements // BLOCK <= min(own)
