"""One slice at its reducer: what becomes of the contributions that are here."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.exchange.codecs.dense import round_to_bf16
from node.exchange.codecs.registry import codec_named
from node.exchange.reduction import Merging, Reduction, Sender
from node.exchange.screening import COUNTED_ROUNDS, bounded_weights, missed_in_a_row
from protocol.run.run_spec import Merge
from protocol.wire.payload import Payload
from protocol.wire.rounds import BLOCK, WHOLE, Commit, Contributor, Digest, NodeId, SliceOutcome
from protocol.wire.versions import MERGE
from tests.unit.exchange_scene import RUN, TOKENS, A, B, C, contribution_of, plan_for
from tests.unit.golden.golden_file import matches_golden

PLAN = plan_for(A, B, C)
FP32 = codec_named("fp32")
BY_A = Sender(run_digest=RUN, node_id=A)


def contribution(sender: NodeId, value: float, *, tokens: int = TOKENS) -> Payload:
    body = np.full(BLOCK, value, dtype="<f4").tobytes()
    return contribution_of(body, sender_id=sender, tokens=tokens)


def reduction_of(*given: Payload, silent: Sequence[NodeId] = ()) -> Reduction:
    """The first slice, which A reduces; who neither gave something nor is silent is late."""
    contributions = {payload.header.sender_id: payload for payload in given}
    return Reduction(
        plan=PLAN,
        slice=PLAN.slices[0],
        contributions=contributions,
        late=frozenset(PLAN.participants) - contributions.keys() - set(silent),
        uplink=FP32,
        context=1,
    )


def mean_of(reduction: Reduction) -> tuple[Payload, tuple[Contributor, ...]]:
    reduced = reduction.result(downlink=FP32, sender=BY_A)
    assert reduced is not None
    assert reduced.error is None  # nobody asked
    return reduced.payload, reduced.made_of.contributors


def test_the_order_of_arrival_changes_no_bit_and_tokens_are_the_weights() -> None:
    given = [contribution(A, 0.2, tokens=1), contribution(B, 0.3, tokens=5), contribution(C, 0.17)]
    digests = set()
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        payload, _ = mean_of(reduction_of(*(given[place] for place in order)))
        digests.add(payload.digest)
    assert len(digests) == 1
    expected = (1 * 0.2 + 5 * 0.3 + TOKENS * 0.17) / (6 + TOKENS)
    assert FP32.decode(payload.body, BLOCK)[0] == pytest.approx(expected, rel=1e-6)


def test_a_contribution_that_does_not_decode_is_left_out_and_named_with_a_factor_of_0() -> None:
    reduction = reduction_of(contribution(B, np.nan), contribution(C, 2), silent=[A])
    reduced = reduction.result(downlink=FP32, sender=BY_A)
    assert reduced is not None
    assert FP32.decode(reduced.payload.body, BLOCK)[0] == 2
    assert [c.node_id for c in reduced.made_of.contributors] == [B, C]
    assert reduced.made_of.factors == (0, WHOLE)


@pytest.mark.parametrize("carried", [None, 0.25])
def test_what_is_carried_goes_into_the_mean_and_what_is_rounded_away_is_told(
    carried: float | None,
) -> None:
    reduction = reduction_of(contribution(B, 1), contribution(C, 2), silent=[A])
    old = None if carried is None else np.linspace(0, carried, BLOCK, dtype=np.float32)
    int4 = codec_named("int4")
    reduced = reduction.result(
        downlink=int4, sender=BY_A, carried=old, wants_error=True, rounds_error=True
    )
    assert reduced is not None and reduced.error is not None
    summed = np.full(BLOCK, 1.5, np.float32) + (np.float32(0) if old is None else old)
    decoded = int4.decode(reduced.payload.body, BLOCK)
    error = summed - decoded
    round_to_bf16(error)  # as it is kept, and given to auditors
    np.testing.assert_array_equal(reduced.error, error)
    assert reduced.error.any() == (old is not None)


def test_the_merge_is_the_runs() -> None:
    apart = contribution(B, 0)
    values = np.zeros(BLOCK, dtype="<f4")
    values[0] = 4
    lone = replace(apart, body=values.tobytes())
    reduction = reduction_of(lone, contribution(C, 0), silent=[A])
    reduced = reduction.result(downlink=FP32, sender=BY_A, by=Merging(merge="norm-preserving"))
    assert reduced is not None
    assert FP32.decode(reduced.payload.body, BLOCK)[0] == 2  # one of two is as long as the mean
    third = replace(contribution(A, 0), body=np.roll(values, 1).tobytes())
    reduction = reduction_of(lone, contribution(C, 0), third)
    reduced = reduction.result(downlink=FP32, sender=BY_A, by=Merging(merge="norm-preserving"))
    assert reduced is not None
    merged = FP32.decode(reduced.payload.body, BLOCK)
    assert merged[0] == merged[1] == pytest.approx(4 / 3 * 2**0.5)


FIVE = tuple(NodeId(letter * 32) for letter in "abcde")


@pytest.mark.parametrize("merge", get_args(Merge))
def test_what_a_reducer_makes_of_contributions_is_of_this_version_of_the_arithmetic(
    merge: Merge,
) -> None:
    """Another result of the same bytes is another version: raise protocol.wire.versions.MERGE with it.

    Else a reducer and an auditor of two releases would convict each other. One of five contributions is far
    too long, one points the other way, and one is of less work.
    """
    plan = plan_for(*FIVE)
    turn = ((np.arange(BLOCK) * 37 % 101 - 50) / 64).astype(np.float32)  # exact on any machine
    given = [
        contribution_of(
            (scale * np.roll(turn, place)).astype("<f4").tobytes(), sender_id=node, tokens=tokens
        )
        for place, (node, scale, tokens) in enumerate(
            zip(FIVE, (1.0, 1.1, 40.0, -0.9, 1.2), (8, 8, 8, 8, 3), strict=True)
        )
    ]
    reduction = Reduction(
        plan=plan,
        slice=plan.slices[0],
        contributions={payload.header.sender_id: payload for payload in given},
        late=frozenset(),
        uplink=FP32,
        context=1,
    )
    reduced = reduction.result(
        downlink=codec_named("int4"),
        sender=BY_A,
        by=Merging(merge=merge),
        carried=np.linspace(0, 0.25, BLOCK, dtype=np.float32),
        wants_error=True,
    )
    assert reduced is not None and reduced.error is not None
    told = repr((MERGE, reduced.made_of.factors, reduced.weighed_tokens)).encode()
    body = reduced.payload.body + reduced.error.astype("<f4").tobytes()
    assert matches_golden(f"merge-{MERGE}-{merge}", blake3.blake3(told + body).digest())


def test_late_work_counts_in_a_later_mean_and_not_twice_by_its_absence() -> None:
    """B's 4 tokens come now; A's and C's, 8 each as they were assigned, with a later contribution."""
    reduction = reduction_of(contribution(B, 5, tokens=4))
    payload, contributors = mean_of(reduction)
    assert FP32.decode(payload.body, BLOCK)[0] == 1
    assert contributors == (Contributor(node_id=B, samples=4, tokens=4),)


def test_late_work_weighs_as_if_as_much_of_it_counted_as_of_what_is_here() -> None:
    """Of A's 8 tokens 1 counts and of B's 3, so of C's 2 may: it is late, and nobody knows better."""
    given = []
    for sender, value, tokens in ((A, 6, 1), (B, 10, 3)):
        whole = contribution(sender, value)
        given.append(replace(whole, header=replace(whole.header, tokens=tokens)))
    reduced = reduction_of(*given).result(downlink=FP32, sender=BY_A)
    assert reduced is not None
    assert reduced.weighed_tokens == 1 + 3 + 2
    assert FP32.decode(reduced.payload.body, BLOCK)[0] == pytest.approx((6 * 1 + 10 * 3) / 6)
    assert [(c.samples, c.tokens) for c in reduced.made_of.contributors] == [
        (TOKENS, 1),
        (TOKENS, 3),
    ]


def test_a_reducer_divides_its_own_error_by_the_share_that_it_has_beside_late_work() -> None:
    """With `"own"` its error must be as much in the next mean as its contribution is."""
    given = [contribution(A, 1, tokens=4), contribution(B, 5, tokens=4)]
    reduced = reduction_of(*given).result(downlink=FP32, sender=BY_A)
    assert reduced is not None
    assert reduced.weighed_tokens == 4 + 4 + TOKENS  # C's is late
    reduced = reduction_of(*given, silent=[C]).result(downlink=FP32, sender=BY_A)
    assert reduced is not None
    assert reduced.weighed_tokens == 4 + 4


def test_the_tokens_of_who_never_gets_through_do_not_count() -> None:
    reduction = reduction_of(contribution(B, 5, tokens=4))
    missed = {A: COUNTED_ROUNDS, B: COUNTED_ROUNDS}  # B is in time now: it counts like any other
    reduced = reduction.result(downlink=FP32, sender=BY_A, by=Merging(missed=missed))
    assert reduced is not None
    assert FP32.decode(reduced.payload.body, BLOCK)[0] == pytest.approx(5 * 4 / (4 + TOKENS))
    assert reduced.weighed_tokens == 4 + TOKENS


def test_a_result_says_of_each_contributor_which_bytes_are_in_it() -> None:
    broken = contribution(A, float("nan"))
    sent = [broken, contribution(C, 2), contribution(B, 1)]
    reduced = reduction_of(*sent).result(downlink=FP32, sender=BY_A)
    assert reduced is not None
    assert [c.node_id for c in reduced.made_of.contributors] == [A, B, C]
    digests = [blake3.blake3(payload.body).digest()[:16] for payload in (broken, sent[2], sent[1])]
    assert list(reduced.made_of.contributions) == digests


def missed_after(*rounds: tuple[str, str], own_slices: tuple[int, ...] = ()) -> dict[NodeId, int]:
    """After commits of two slices, each given by whose contributions are in it; "-" is void."""
    missed: dict[NodeId, int] = {}
    for number, slices in enumerate(rounds, start=1):
        commit = Commit(
            round=number,
            fragment=0,
            base_digest=RUN,
            assignments=PLAN.assignments,
            slices=tuple(
                SliceOutcome(
                    index=index,
                    start=index * BLOCK,
                    num_elements=BLOCK,
                    digest=None if names == "-" else RUN,
                    contributors=tuple(
                        Contributor(node_id=NodeId(name), samples=1, tokens=1)
                        for name in names.strip("-")
                    ),
                )
                for index, names in enumerate(slices)
            ),
        )
        missed = missed_in_a_row(missed, commit, own_slices)
    return missed


def test_rounds_are_counted_in_a_row_and_only_those_that_had_a_result() -> None:
    assert missed_after(("ab", "ab")) == {A: 0, B: 0, C: 1}
    assert missed_after(("ab", "ab"), ("-", "-"), ("ab", "b")) == {A: 0, B: 0, C: 2}
    assert missed_after(("ab", "ab"), ("ab", "abc"), ("ab", "ab")) == {A: 0, B: 0, C: 1}


def test_a_reducer_goes_by_its_own_slices_where_it_had_any() -> None:
    """Somebody may get through to all reducers but one, whose means it would damp for ever."""
    rounds = [("ab", "abc")] * 4
    assert missed_after(*rounds, own_slices=(0,))[C] == 4
    assert missed_after(*rounds, own_slices=(1,))[C] == missed_after(*rounds)[C] == 0


def test_the_work_of_who_is_gone_is_not_waited_for_in_later_means() -> None:
    reduction = reduction_of(contribution(B, 5, tokens=4), silent=[A, C])
    payload, _ = mean_of(reduction)
    assert FP32.decode(payload.body, BLOCK)[0] == 5


def test_nothing_to_reduce_is_no_result() -> None:
    assert reduction_of().result(downlink=FP32, sender=BY_A) is None


# One data holder's part of a mean


@given(
    tokens=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 10**9)), min_size=1, max_size=12),
    most=st.floats(0.05, 0.95),
)
def test_no_holder_has_more_than_its_part_of_a_mean_unless_too_few_hold_data(
    tokens: list[tuple[int, int]], most: float
) -> None:
    holders, counts = [holder for holder, _ in tokens], [1000 * count for _, count in tokens]
    weights = bounded_weights(counts, holders, most=most)
    assert all(0 < weight <= count for weight, count in zip(weights, counts, strict=True))
    sums = {
        h: sum(w for w, each in zip(weights, holders, strict=True) if each == h) for h in holders
    }
    if most * len(sums) > 1:
        assert max(sums.values()) <= most * sum(sums.values()) * 1.01 + 2 * len(tokens)
    else:
        assert max(sums.values()) - min(sums.values()) <= 2 * len(tokens), "all weigh the same"


def test_who_is_within_the_bound_keeps_its_tokens() -> None:
    assert bounded_weights([100, 10, 10], [1, 2, 3], most=0.5) == [20, 10, 10]
    assert bounded_weights([30, 70, 100], [1, 1, 2], most=0.5) == [30, 70, 100]
    assert bounded_weights([30, 90, 20, 40], [1, 1, 2, 3], most=0.5) == [15, 45, 20, 40]
    assert bounded_weights([100, 10], [1, 2], most=0.2) == [10, 10]


def test_where_reducers_are_audited_the_signed_header_names_the_whole_report() -> None:
    """So a reducer that tells an auditor something else than the coordinator has signed neither."""
    reduction = reduction_of(contribution(B, 1), contribution(C, 2))
    by = Merging(is_audited=True, missed={A: 3})
    made = reduction.result(downlink=codec_named("int4"), sender=BY_A, by=by, wants_error=True)
    assert made is not None
    told = replace(
        made.report,
        contributors=made.report.contributors[::-1],
        contributions=made.report.contributions[::-1],
    )
    assert made.payload.header.report_digest == told.statement_digest, "in any order"
    other = Digest(b"o" * 32)
    first, second = told.contributors
    for false in (
        replace(told, slice_index=told.slice_index + 1),
        replace(told, contributors=(replace(first, tokens=first.tokens + 1), second)),
        replace(told, contributions=told.contributions[::-1]),
        replace(told, factors=(WHOLE, WHOLE // 2)),
        replace(told, late=()),
        replace(told, missed=()),
        replace(told, error_before=other),
        replace(told, error_after=other),
    ):
        assert false.statement_digest != told.statement_digest
    unaudited = reduction.result(downlink=codec_named("int4"), sender=BY_A)
    assert unaudited is not None and not unaudited.payload.header.report_digest
