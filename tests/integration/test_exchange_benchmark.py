"""The exchange benchmark, with a small model: all of it runs, and what it counts is right."""

import pytest

from benchmarks.exchange.case import Case, codecs_named
from benchmarks.exchange.command import measure
from benchmarks.exchange.report import cells_of

pytestmark = pytest.mark.usefixtures("may_make_network_labs")


async def test_all_that_nodes_sent_is_counted_in_its_round_and_against_the_links_meant() -> None:
    case = Case(
        num_nodes=2,
        codecs=codecs_named("int8/int4"),
        num_elements=65_536,
        mbit=100.0,
        round_trip_ms=4.0,
        slow_motion=2.0,
    )
    row = await measure(
        case, num_rounds=1, pause_seconds=0.0, congestion_control="", num_warm=2, has_plain=False
    )
    assert (row["num_nodes"], row["codec"], row["slices"]) == (2, "int8/int4", [0.5, 0.5])
    assert len(row["learnt_mbit"]) == 2
    # Each sends a contribution to one half, and the result of the other, with headers.
    bodies = 65_536 / 2 * (8.125 + 4.125) / 8
    assert row["received_over_sent"] == pytest.approx(1.0, abs=0.01)
    assert bodies < row["most_sent_bytes"] < 1.2 * bodies
    assert row["limit_seconds"] == pytest.approx(8 * row["most_sent_bytes"] / 100e6, abs=0.001)


@pytest.mark.nightly
async def test_helpers_reduce_all_for_nodes_whom_nobody_dials_and_their_links_are_the_limit() -> (
    None
):
    case = Case(
        num_nodes=3,
        num_helpers=1,
        codecs=codecs_named("int4"),
        num_elements=65_536,
        mbit=100.0,
        round_trip_ms=4.0,
    )
    row = await measure(
        case, num_rounds=1, pause_seconds=0.0, congestion_control="", num_warm=2, has_plain=False
    )
    assert "1 helper reduces all" in row["reason"]
    body = 65_536 * 4.125 / 8
    # Three contributions come to the helper, and its results go to three.
    assert 3 * body < row["most_sent_bytes"] < 1.2 * 3 * body
    assert row["limit_seconds"] == pytest.approx(8 * row["most_sent_bytes"] / 100e6, abs=0.001)
    assert cells_of(row | {"cores": 2})[0] == "3 by 1 helper"
