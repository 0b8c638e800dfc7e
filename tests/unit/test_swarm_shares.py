"""Who reduces how much, by what links carry."""

import math

import pytest

from coordinator.swarm.membership import STICKY, steadied
from coordinator.swarm.shares import MOST_OF_EQUAL, reducer_shares, shares_in_words
from protocol.wire.rounds import BLOCK, LayoutSummary, NodeId, cut_into_slices
from protocol.wire.vitals import UNMEASURED, LinkRates
from tests.unit.shares_scene import MB, all_may, both, seconds
from tests.unit.swarm_scene import INITIAL, Scene


def test_a_slow_link_among_fast_ones_reduces_nothing() -> None:
    links = both(10, 10, 10, 1)
    assert reducer_shares(links, all_may(links)) == pytest.approx((1 / 3, 1 / 3, 1 / 3, 0))


def test_a_somewhat_slower_link_reduces_less() -> None:
    links = both(10, 10, 10, 10, 10, 10, 10, 6)
    shares = reducer_shares(links, all_may(links))
    assert 0 < shares[-1] < shares[0]
    assert len({round(share, 12) for share in shares[:-1]}) == 1
    assert seconds(links, shares) < 0.95 * seconds(links, (1 / 8,) * 8)


def test_a_crumb_is_not_worth_a_slice() -> None:
    links = both(*[10.0] * 7, 5.5)  # the last one's room would be 0.4 % of the fragment
    assert reducer_shares(links, all_may(links)) == pytest.approx((1 / 7,) * 7 + (0,))


def test_the_slower_direction_decides() -> None:
    home = LinkRates(up_bytes_per_second=1 * MB, down_bytes_per_second=50 * MB)
    links = [*both(10, 10, 10), home]
    assert reducer_shares(links, all_may(links))[-1] == 0


def test_one_fast_link_takes_more_but_no_more_than_its_memory_bears() -> None:
    links = both(*[1.0] * 7, 100)
    shares = reducer_shares(links, all_may(links))
    assert shares[-1] == pytest.approx(MOST_OF_EQUAL / 8)
    assert min(shares) > 0


def test_links_that_differ_by_noise_are_equal() -> None:
    links = both(10, 9.5, 8, 6.8)
    assert reducer_shares(links, all_may(links)) == (0.25,) * 4


def test_an_unknown_link_is_as_good_as_the_median() -> None:
    links = both(10, 10, None, 1)
    assert reducer_shares(links, all_may(links)) == pytest.approx((1 / 3, 1 / 3, 1 / 3, 0))
    assert reducer_shares(both(None, None, None), [True] * 3) == (1 / 3,) * 3


def test_two_nodes_share_equally_whatever_their_links() -> None:
    links = both(10, 1)
    assert reducer_shares(links, all_may(links)) == (0.5, 0.5)


def test_who_may_not_reduce_still_counts_as_a_sender() -> None:
    links = both(10, 10, 10, 10)
    assert reducer_shares(links, [True, True, True, False]) == pytest.approx((1 / 3,) * 3 + (0,))
    with pytest.raises(ValueError, match="somebody"):
        reducer_shares(links, [False] * 4)


def test_a_rate_counts_only_when_it_has_changed_by_much() -> None:
    used = LinkRates(up_bytes_per_second=10 * MB, down_bytes_per_second=10 * MB)
    near = LinkRates(up_bytes_per_second=(1 + STICKY) * 10 * MB, down_bytes_per_second=10 * MB)
    assert steadied(used, near) == used
    assert steadied(used, UNMEASURED) == used
    assert steadied(used, LinkRates(up_bytes_per_second=5 * MB)) == LinkRates(
        up_bytes_per_second=5 * MB, down_bytes_per_second=10 * MB
    )
    assert steadied(UNMEASURED, near) == near


@pytest.mark.parametrize("lie", [math.nan, math.inf, -1.0, 0.0, 1e30, 1e-9])
def test_what_no_link_carries_is_no_measurement(lie: float) -> None:
    assert (
        steadied(UNMEASURED, LinkRates(up_bytes_per_second=lie, down_bytes_per_second=lie))
        == UNMEASURED
    )


def test_uneven_slices_are_said_and_even_ones_are_not() -> None:
    assert shares_in_words((0.5, 0.5), (True, True)) == ""
    assert shares_in_words((0.5, 0.5, 0.0), (True, True, False)) == ""
    assert shares_in_words((0.5, 0.5, 0.0), (True, True, True)) == ("; 1 slow link reduces nothing")
    assert shares_in_words((0.5, 0.4, 0.1, 0.0, 0.0), (True,) * 5) == (
        "; 2 slow links reduce nothing, slices by bandwidth, 10 to 50 % of the fragment"
    )


def test_equal_shares_are_cut_as_without_shares() -> None:
    reducers = tuple(NodeId(name) for name in "abc")
    for num_elements in (1, BLOCK, 5 * BLOCK + 1, 1000 * BLOCK):
        shares = (1 / 3,) * 3
        assert cut_into_slices(num_elements, reducers, shares) == cut_into_slices(
            num_elements, reducers
        )


def test_a_large_stretch_is_cut_into_slices_that_follow_each_other() -> None:
    reducers = (NodeId("a"), NodeId("b"))
    slices = cut_into_slices(100 * BLOCK, reducers, (0.7, 0.3), least_elements=15 * BLOCK)
    assert [(p.reducer_id, p.num_elements // BLOCK) for p in slices] == [
        ("a", 17),
        ("a", 18),
        ("a", 17),
        ("a", 18),
        ("b", 15),
        ("b", 15),
    ]
    assert [p.index for p in slices] == list(range(6))


def test_a_plan_has_no_more_slices_than_are_worth_their_reports() -> None:
    layout = LayoutSummary(digest=INITIAL, fragment_elements=(1000 * BLOCK,))
    scene = Scene(min_nodes=2, layout=layout, slice_elements=BLOCK)
    scene.attach("a", "b")
    reducers = [p.slice.reducer_id for p in scene.round.slices]
    assert reducers == ["a"] * 32 + ["b"] * 32


@pytest.mark.parametrize(
    ("num_blocks", "num_slices"),
    [(1, 1), (3, 1), (4, 2), (7, 3), (8, 4), (32, 4), (128, 4), (200, 6), (1000, 31)],
)
def test_a_small_stretch_is_cut_into_smaller_slices(num_blocks: int, num_slices: int) -> None:
    """One node, so one stretch; 32 blocks are usual for a slice, and 2 the least."""
    layout = LayoutSummary(digest=INITIAL, fragment_elements=(num_blocks * BLOCK,))
    scene = Scene(min_nodes=1, layout=layout, slice_elements=32 * BLOCK)
    scene.attach("a")
    assert len(scene.round.slices) == num_slices


def test_a_plan_cuts_by_the_rates_that_nodes_told_and_says_so() -> None:
    layout = LayoutSummary(digest=INITIAL, fragment_elements=(100 * BLOCK,))
    scene = Scene(min_nodes=5, layout=layout)
    scene.attach("a", "b", "c", "d")
    for name, rate in zip("abcd", (10, 10, 10, 1), strict=True):
        scene.beat(
            name,
            at=0,
            digest=INITIAL,
            rates=LinkRates(up_bytes_per_second=rate * MB, down_bytes_per_second=rate * MB),
        )
    scene.attach("e")  # nothing is known of it
    assert [p.slice.reducer_id for p in scene.round.slices] == ["a", "b", "c", "e"]
    assert {p.slice.num_elements for p in scene.round.slices} == {25 * BLOCK}
    assert "1 slow link reduces nothing" in scene.round.reason


def test_a_node_that_attaches_again_keeps_its_rates() -> None:
    scene = Scene(min_nodes=5)
    scene.attach("a")
    told = LinkRates(up_bytes_per_second=3 * MB, down_bytes_per_second=4 * MB)
    scene.beat("a", at=0, digest=INITIAL, rates=told)
    scene.attach("a")
    assert scene.member("a").rates == told
