"""What a reducer's own encoding rounds away."""

import numpy as np
import pytest
from structlog.testing import capture_logs

from node.exchange.error_feedback import ReducerError
from protocol.wire.rounds import Digest, SliceOutcome

SPAN = slice(4, 8)
OURS, ANOTHERS = Digest(b"o" * 32), Digest(b"a" * 32)


def error(value: float) -> np.ndarray:
    return np.full(4, value, dtype=np.float32)


def outcome(digest: Digest | None) -> SliceOutcome:
    return SliceOutcome(index=1, start=4, num_elements=4, digest=digest)


def keeping(value: float) -> ReducerError:
    """One that has kept this much of a committed result."""
    kept = ReducerError(rule="keep")
    kept.stage(1, 1, OURS, error(value), share=0.25)
    assert kept.settle(1, outcome(OURS), SPAN, may_be_ours=True) is None
    return kept


def carried(kept: ReducerError) -> list[float]:
    values = kept.carried(slice(0, 12))
    return [0.0] * 12 if values is None else [float(value) for value in values]


def test_what_a_committed_result_left_out_goes_into_the_next_mean_of_its_elements() -> None:
    assert carried(keeping(0.5)) == [0, 0, 0, 0, 0.5, 0.5, 0.5, 0.5, 0, 0, 0, 0]


@pytest.mark.parametrize("digest", [None, ANOTHERS], ids=["void", "another node's result"])
def test_a_result_that_is_not_committed_leaves_no_trace(digest: Digest | None) -> None:
    kept = keeping(0.5)
    kept.stage(2, 1, OURS, error(3), share=0.25)
    kept.settle(2, outcome(digest), SPAN, may_be_ours=False)
    assert carried(kept) == carried(keeping(0.5))


def test_staging_changes_nothing_yet() -> None:
    kept = keeping(0.5)
    kept.stage(2, 1, OURS, error(3), share=0.25)
    assert carried(kept) == carried(keeping(0.5))
    kept.forget(up_to_round=2)
    kept.settle(2, outcome(OURS), SPAN, may_be_ours=False)
    assert carried(kept) == carried(keeping(0.5))


def test_of_two_results_of_a_slice_the_later_counts() -> None:
    kept = keeping(0.5)
    kept.stage(2, 1, ANOTHERS, error(9), share=0.25)
    kept.stage(2, 1, OURS, error(3), share=0.25)
    kept.settle(2, outcome(OURS), SPAN, may_be_ours=True)
    assert carried(kept)[4:8] == [3, 3, 3, 3]


def test_other_slices_and_rounds_stay_staged() -> None:
    kept = keeping(0.5)
    kept.stage(3, 1, OURS, error(3), share=0.25)
    kept.forget(up_to_round=2)
    kept.settle(3, outcome(OURS), SPAN, may_be_ours=True)
    assert carried(kept)[4:8] == [3, 3, 3, 3]


def test_what_a_former_process_kept_was_in_its_committed_result() -> None:
    """Adding it to another mean would count it twice. What that result left out is lost, and said."""
    kept = keeping(0.5)
    with capture_logs() as logs:
        kept.settle(2, outcome(ANOTHERS), SPAN, may_be_ours=True)
    assert carried(kept) == [0] * 12
    assert kept.num_lost_elements == 4
    assert [(entry["event"], entry["elements"]) for entry in logs] == [("rounding error lost", 4)]


def test_a_replaced_state_loses_it_and_says_so() -> None:
    kept = keeping(0.5)
    with capture_logs() as logs:
        kept.restore(None, round=9)
        kept.restore(None, round=10)  # nothing is left to lose
    assert carried(kept) == [0] * 12
    assert kept.num_lost_elements == 4
    assert [entry["round"] for entry in logs] == [9]


def test_a_restored_state_brings_its_own() -> None:
    kept, before = keeping(0.5), keeping(0.25)
    kept.stage(2, 1, OURS, error(3), share=0.25)
    kept.restore(before.values, round=1)
    assert carried(kept) == carried(keeping(0.25))
    kept.settle(2, outcome(OURS), SPAN, may_be_ours=False)
    assert carried(kept) == carried(keeping(0.25))


@pytest.mark.parametrize("span", [SPAN, slice(2, 7)])
def test_what_is_carried_is_only_to_be_read(span: slice) -> None:
    values = keeping(0.5).carried(span)
    assert values is not None
    with pytest.raises(ValueError, match="read-only"):
        values[:] = 7


def settled(kept: ReducerError, round: int, start: int, stop: int, value: float) -> None:
    """A committed result of this node leaves that much of a span."""
    part = SliceOutcome(index=round, start=start, num_elements=stop - start, digest=OURS)
    kept.stage(round, round, OURS, np.full(stop - start, value, dtype=np.float32), share=0.5)
    kept.settle(round, part, slice(start, stop), may_be_ours=True)


def held(kept: ReducerError) -> dict[int, list[float]]:
    assert kept.values is not None
    return {start: values.tolist() for start, values in kept.values.items()}


def test_memory_is_taken_for_what_this_node_reduces_and_for_nothing_else() -> None:
    kept = ReducerError(rule="keep")
    assert held(kept) == {} and kept.carried(SPAN) is None
    settled(kept, 1, 4, 8, 1.0)
    assert held(kept) == {4: [1] * 4}


def test_slices_that_moved_replace_what_they_cover_and_leave_the_rest() -> None:
    kept = ReducerError(rule="keep")
    settled(kept, 1, 0, 4, 1.0)
    settled(kept, 1, 4, 10, 2.0)
    settled(kept, 2, 2, 6, 3.0)
    assert held(kept) == {0: [1, 1], 2: [3] * 4, 6: [2] * 4}
    settled(kept, 3, 7, 9, 4.0)
    assert held(kept) == {0: [1, 1], 2: [3] * 4, 6: [2], 7: [4, 4], 9: [2]}
    assert carried(kept) == [1, 1, 3, 3, 3, 3, 2, 4, 4, 2, 0, 0]
    settled(kept, 4, 0, 12, 5.0)
    assert held(kept) == {0: [5] * 12}
    assert kept.num_lost_elements == 0


@pytest.mark.parametrize(("num_fragments", "last"), [(1, 17), (3, 49)])
def test_what_another_node_reduces_for_long_is_lost_and_said(num_fragments: int, last: int) -> None:
    kept = ReducerError(rule="keep", num_fragments=num_fragments)
    settled(kept, 1, 4, 8, 1.0)
    kept.settle(last, outcome(ANOTHERS), SPAN, may_be_ours=False)
    assert held(kept) == {4: [1] * 4}
    with capture_logs() as logs:
        kept.settle(last + 1, outcome(ANOTHERS), SPAN, may_be_ours=False)
    assert held(kept) == {}
    assert [(entry["event"], entry["elements"]) for entry in logs] == [("rounding error lost", 4)]


def test_owned_errors_are_handed_over_once() -> None:
    owned = ReducerError(rule="own")
    assert owned.values is None and owned.carried(SPAN) is None and owned.num_kept() == 0
    owned.stage(1, 1, OURS, error(2), share=0.25)
    found = owned.settle(1, outcome(OURS), SPAN, may_be_ours=True)
    assert found is not None and (found == 8).all()  # a quarter of it is in the next mean
    assert owned.settle(1, outcome(OURS), SPAN, may_be_ours=True) is None
    owned.stage(2, 1, OURS, error(2), share=0.25)
    assert owned.settle(2, outcome(ANOTHERS), SPAN, may_be_ours=False) is None
    owned.stage(3, 1, OURS, error(2), share=0.25)
    assert owned.settle(3, outcome(None), SPAN, may_be_ours=False) is None


def test_dropped_errors_take_no_memory() -> None:
    dropped = ReducerError(rule="drop")
    dropped.stage(1, 1, OURS, error(2), share=0.25)
    assert dropped.values is None and dropped.carried(SPAN) is None
    assert dropped.settle(1, outcome(OURS), SPAN, may_be_ours=True) is None
    dropped.restore(None, round=1)
    assert dropped.num_lost_elements == 0
