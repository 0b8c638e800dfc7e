"""Exposed communication is what the trace shows of waiting: no more, no less, and never a guess."""

from hypothesis import given
from hypothesis import strategies as st

from node.island.measuring import Operation, exposed_share

STEP = "step"


def entry(
    name: str, began_at: int, ended_at: int, thread: int = 1, on_device: str = ""
) -> Operation:
    return Operation(
        name=name, thread=thread, began_at=began_at, ended_at=ended_at, on_device=on_device
    )


def share_of(*entries: Operation, seconds: int = 100) -> float | None:
    return exposed_share([entry(STEP, 0, seconds), *entries], within=STEP)


def test_a_collective_that_nothing_overlaps_is_exposed() -> None:
    gather = entry("gloo:all_gather", 20, 60, thread=7)
    assert share_of(entry("aten::mm", 0, 20), gather, entry("aten::mm", 60, 100)) == 0.4


def test_what_computing_overlaps_is_not_exposed() -> None:
    reduction = entry("gloo:all_reduce", 10, 90, thread=7)
    assert share_of(entry("aten::mm", 0, 50), entry("aten::mul", 60, 70), reduction) == 0.3
    assert share_of(entry("aten::mm", 0, 100), reduction) == 0.0


def test_collectives_at_the_same_time_count_once() -> None:
    ends = entry("gloo:send", 10, 50, thread=7), entry("gloo:recv", 30, 60, thread=8)
    assert share_of(*ends) == 0.5


def test_an_operator_that_waits_within_itself_does_not_compute_meanwhile() -> None:
    """So it is with tensor parallel: the product of cut matrices holds the sum over ranks."""
    waits = entry("_c10d_functional::wait_tensor", 30, 80)
    assert share_of(entry("aten::linear", 0, 100), waits) == 0.5
    elsewhere = entry("_c10d_functional::wait_tensor", 30, 80, thread=2)
    assert share_of(entry("aten::linear", 0, 100), elsewhere) == 0.0


def test_what_a_collective_copies_is_a_part_of_it() -> None:
    submits = entry("c10d::_reduce_scatter_base_", 10, 40)
    assert share_of(submits, entry("aten::copy_", 20, 30)) == 0.3


def test_what_is_outside_of_the_step_does_not_count() -> None:
    assert share_of(entry("gloo:broadcast", 90, 250, thread=7)) == 0.1


def test_wrappers_around_collectives_do_not_compute() -> None:
    wrapper = entry("autograd::engine::evaluate_function: X", 0, 100)
    assert share_of(wrapper, entry("gloo:all_gather", 0, 50, thread=7)) == 0.5


def test_a_gpu_is_measured_by_what_it_did_and_not_by_its_host() -> None:
    host = entry("aten::mm", 0, 100), entry("c10d::allreduce_", 0, 100)
    product = entry("sm90_gemm", 0, 60, on_device="kernel")
    copied = entry("Memcpy DtoD", 70, 80, thread=3, on_device="gpu_memcpy")
    nccl = entry("ncclDevKernel_AllReduce_Sum_f32", 50, 100, thread=2, on_device="kernel")
    named = entry(STEP, 0, 100, on_device="gpu_user_annotation")
    assert share_of(*host, product, copied, nccl, named) == 0.3


def test_without_the_step_in_it_a_trace_says_nothing() -> None:
    assert exposed_share([entry("gloo:all_gather", 0, 50)], within=STEP) is None
    assert exposed_share([entry(STEP, 5, 5)], within=STEP) is None


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8)


@given(collectives=spans, computing=spans)
def test_it_is_the_ticks_with_a_collective_and_no_computing(
    collectives: list[tuple[int, int]], computing: list[tuple[int, int]]
) -> None:
    def ticks(spans: list[tuple[int, int]]) -> set[int]:
        return {tick for at, length in spans for tick in range(at, at + length)}

    entries = [entry("gloo:x", at, at + length, thread=2) for at, length in collectives]
    entries += [entry("aten::x", at, at + length) for at, length in computing]
    exposed = (ticks(collectives) - ticks(computing)) & set(range(50))
    assert share_of(*entries, seconds=50) == len(exposed) / 50
