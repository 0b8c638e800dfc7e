"""What a node owes goes by the bytes that a commit names, and never grows without bound."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from node.disk.history import SentLog
from node.disk.snapshots import Owed
from node.exchange.codecs.registry import codec_named
from node.exchange.error_feedback import MOST_OWED
from node.exchange.outer import NotApplicableError, Outer
from node.exchange.outer_optimizer import OuterRules
from node.outer_state import Vector
from protocol.run.models import Layout
from protocol.wire.payload import Payload
from protocol.wire.rounds import (
    BLOCK,
    WHOLE,
    Commit,
    ContributionDigest,
    Contributor,
    Digest,
    NodeId,
    SliceOutcome,
    contribution_digest,
)
from tests.unit.exchange_scene import NUM_ELEMENTS, TOKENS, A, B, C, outer_of, plan_for, result_of

SLICES = plan_for(A, B, C).slices
OTHER_BYTES = ContributionDigest(bytes(16))


def normal(seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(NUM_ELEMENTS, dtype=np.float32)


def contributed(outer: Outer, work: Vector, *, slices: int = 3) -> list[ContributionDigest]:
    """Sends so many slices of the work in the next round; returns what names them."""
    outer.owing._published[:] = outer._parameters[:NUM_ELEMENTS] - work
    outer.owing.accumulate(round=outer.round + 1, fragment=0)
    sent = [
        outer.owing.contribution_to(part, samples=TOKENS, tokens=TOKENS) for part in SLICES[:slices]
    ]
    return [contribution_digest(payload.header.body_digest) for payload in sent]


def all_pending(outer: Outer) -> Vector:
    """What is pending of the whole fragment."""
    return outer.owing.accumulated(0, NUM_ELEMENTS).copy()


def results_of(outer: Outer, value: float = 0.0) -> dict[int, Payload]:
    values = np.full(BLOCK, value, dtype=np.float32)
    return {
        index: result_of(values, sender_id=B, round=outer.round + 1, index=index)
        for index in range(3)
    }


def commit_naming(
    outer: Outer, results: dict[int, Payload], named: list[ContributionDigest] | None
) -> Commit:
    """A commit that takes of this node what is named, slice by slice; without names, nobody's."""
    return Commit(
        round=outer.round + 1,
        fragment=0,
        base_digest=outer.digest,
        slices=tuple(
            SliceOutcome(
                index=index,
                start=index * BLOCK,
                num_elements=BLOCK,
                digest=result.digest,
                contributors=(Contributor(node_id=A if named else B, samples=1, tokens=TOKENS),),
                contributions=(named[index] if named else OTHER_BYTES,),
            )
            for index, result in results.items()
        ),
    )


def state_of(outer: Outer) -> tuple[object, ...]:
    snapshot = outer.snapshot()
    vectors = (snapshot.parameters, snapshot.momentum, outer.owed().residual)
    return (*(vector.tobytes() for vector in vectors), outer.position)


# What a commit names


@pytest.mark.parametrize(
    ("participants", "of_sender", "of_result", "speaks_of_others"),
    [
        ((A, B), WHOLE // 2, WHOLE, True),
        ((A, B), WHOLE, WHOLE // 2, False),
        ((A,), 0, WHOLE, False),
    ],
)
def test_work_that_is_cut_is_compared_with_the_others_only_where_a_reducer_did_so(
    participants: tuple[NodeId, ...], of_sender: int, of_result: int, speaks_of_others: bool
) -> None:
    outer, results = outer_of(A), results_of(outer_of(A))
    commit = commit_naming(outer, results, contributed(outer, normal(0)))
    slices = [replace(one, factors=(of_sender,), factor=of_result) for one in commit.slices]
    plan = plan_for(*participants)
    with capture_logs() as lines:
        outer.apply(replace(commit, slices=tuple(slices), assignments=plan.assignments), results)
    (told,) = [line["event"] for line in lines if "let go" in line["event"]]
    assert ("others" in told) == speaks_of_others


@pytest.mark.parametrize("is_pending", [True, False])
def test_a_reducer_that_names_a_contributor_of_whom_it_has_nothing_makes_it_drop_nothing(
    is_pending: bool,
) -> None:
    outer, work, results = outer_of(A), normal(0), results_of(outer_of(A))
    first, *_ = contributed(outer, work)
    commit = commit_naming(outer, results, [first, OTHER_BYTES, OTHER_BYTES])
    if not is_pending:
        outer.owing.residual.values[:] = work
        outer.owing.forget_pending()
    outer.apply(commit, results)
    assert not outer.owed().residual[:BLOCK].any()
    np.testing.assert_array_equal(outer.owed().residual[BLOCK:], work[BLOCK:])
    assert not outer.owing.is_taken


def test_a_contributor_named_before_it_has_sent_anything_owes_all_of_it_and_the_state_moves() -> (
    None
):
    outer, work, results = outer_of(A), normal(0), results_of(outer_of(A), 1.0)
    named = contributed(outer, work, slices=1)
    outer.apply(commit_naming(outer, results, [*named, *named, *named]), results)
    assert outer.round == 1
    assert (outer.snapshot().parameters == -1).all()
    np.testing.assert_array_equal(outer.owed().residual[BLOCK:], work[BLOCK:])
    assert not outer.owed().residual[:BLOCK].any()


def test_bytes_sent_for_other_elements_are_not_those_that_are_named() -> None:
    outer, work = outer_of(A), np.ones(NUM_ELEMENTS, dtype=np.float32)
    named = contributed(outer, work)  # the same bytes thrice
    outer.owing.pending.sent.pop(2)  # type: ignore[union-attr]
    outer.owing._sent = SentLog(None)
    results = results_of(outer)
    outer.apply(commit_naming(outer, results, named), results)
    np.testing.assert_array_equal(outer.owed().residual[2 * BLOCK :], work[2 * BLOCK :])


def test_what_was_sent_by_a_plan_that_has_changed_since_counts_once() -> None:
    """The reducer had the first plan's contribution already; what is pending is the same work."""
    outer, work = outer_of(A), normal(0)
    named = contributed(outer, work)
    outer.owing.forget_pending()
    outer.owing.accumulate(round=1, fragment=0)  # and nothing of it is encoded yet
    results = results_of(outer)
    outer.apply(commit_naming(outer, results, named), results)
    assert not outer.owed().residual.any()
    assert outer.owing.is_taken


@pytest.mark.parametrize("is_trained_again", [True, False])
def test_a_restarted_node_knows_what_its_last_process_has_sent(
    tmp_path: Path, is_trained_again: bool
) -> None:
    work, results = normal(0), results_of(outer_of(A))
    named = contributed(outer_of(A, sent=SentLog(tmp_path / "sent")), work)
    outer = outer_of(A, sent=SentLog(tmp_path / "sent"))
    outer.restore(outer.snapshot(), Owed(residual=normal(1)))
    if is_trained_again:  # other bytes; the reducers have the first ones, and refuse these
        contributed(outer, normal(2))
    outer.apply(commit_naming(outer, results, [named[0], OTHER_BYTES, named[2]]), results)
    residual = outer.owed().residual
    owed = normal(1) + (normal(2) if is_trained_again else 0)
    assert not residual[:BLOCK].any()
    assert not residual[2 * BLOCK :].any()
    np.testing.assert_array_equal(residual[BLOCK : 2 * BLOCK], owed[BLOCK : 2 * BLOCK])


def test_a_record_that_was_cut_off_costs_itself_and_the_next_one_is_written_whole(
    tmp_path: Path,
) -> None:
    path = tmp_path / "folder" / "sent"
    named = contributed(outer_of(A, sent=SentLog(path)), normal(0))
    path.write_bytes(path.read_bytes()[:-1])
    again = outer_of(A, sent=SentLog(path))
    assert contributed(again, normal(0)) == named
    log = SentLog(path)
    assert again.owing.pending is not None
    sent = again.owing.pending.sent.values()
    assert [log.has(1, each) for each in sent] == [True, True, True]
    assert not log.knows(2)
    log.forget_before(2)
    assert not SentLog(path).knows(1)


def test_a_disk_that_refuses_keeps_no_contribution_back(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("not a folder")
    log = SentLog(tmp_path / "folder" / "sent")
    assert len(contributed(outer_of(A, sent=log), normal(0))) == 3
    assert log.knows(1)


# All is checked before anything moves


def damaged(commit: Commit, **changes: object) -> Commit:
    *others, last = commit.slices
    return replace(commit, slices=(*others, replace(last, **changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda commit: damaged(commit, start=BLOCK), "overlap"),
        (lambda commit: damaged(commit, num_elements=0), "overlap"),
        (lambda commit: damaged(commit, num_elements=BLOCK + 1), "other slices than fragment"),
        (lambda commit: damaged(commit, index=0), "other slices than fragment"),
        (lambda commit: replace(commit, fragment=1), "other slices than fragment"),
        (lambda commit: damaged(commit, digest=Digest(bytes(32))), "is another one"),
        (lambda commit: damaged(commit, num_elements=BLOCK - 1), "elements from"),
        (lambda commit: damaged(commit, index=3), "is not here"),
    ],
)
def test_a_commit_that_does_not_fit_what_is_here_changes_nothing(damage: object, why: str) -> None:
    outer, results = outer_of(A), results_of(outer_of(A), 1.0)
    named = contributed(outer, normal(0))
    commit = damage(commit_naming(outer, results, named))  # type: ignore[operator]
    before = state_of(outer)
    with pytest.raises(NotApplicableError, match=why):
        outer.apply(commit, results)
    assert state_of(outer) == before
    assert outer.owing.pending is not None


def test_a_commit_of_another_fragment_than_the_round_was_planned_for_changes_nothing() -> None:
    outer = outer_of(A, layout=Layout.of([("v", (BLOCK,))], [("w", (NUM_ELEMENTS,))]))
    outer.owing.accumulate(round=1, fragment=0)
    results = results_of(outer)
    before = state_of(outer)
    with pytest.raises(NotApplicableError, match=r"is of fragment 1, .* to fragment 0"):
        outer.apply(replace(commit_naming(outer, results, None), fragment=1), results)
    assert state_of(outer) == before


def test_a_leap_past_a_commit_that_does_not_fit_changes_nothing() -> None:
    outer, work = outer_of(A), normal(0)
    named = contributed(outer, work)
    commit = commit_naming(outer, results_of(outer), named)
    later = replace(outer.snapshot(), round=1)
    before = state_of(outer)
    with pytest.raises(NotApplicableError, match="other slices"):
        outer.leap(later, [commit, replace(commit, fragment=1)])
    assert state_of(outer) == before


def test_a_state_of_another_size_is_not_half_taken_over() -> None:
    outer = outer_of(A)
    outer.owing.residual.values[:] = normal(0)
    other = outer_of(A, layout=Layout.of([("w", (2 * BLOCK,))])).snapshot()
    whole = replace(outer.snapshot(), round=7, parameters=normal(1))
    before = state_of(outer)
    for snapshot, owed in (
        (other, None),
        (replace(whole, momentum=other.momentum), None),
        (whole, Owed(residual=other.momentum)),
    ):
        with pytest.raises(NotApplicableError, match="have shape"):
            outer.restore(snapshot, owed)
        assert state_of(outer) == before


# How much may be owed


def norm(values: Vector) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))


def late(outer: Outer, work: Vector, *, rounds: int) -> None:
    """Rounds that do not take what this node sends."""
    for _ in range(rounds):
        contributed(outer, work)
        results = results_of(outer)
        outer.apply(commit_naming(outer, results, None), results)


@pytest.mark.parametrize("rounds", [8, 30, 300])
def test_a_node_that_was_late_for_many_rounds_moves_the_model_by_three_rounds_at_most(
    rounds: int,
) -> None:
    outer, work = outer_of(A), normal(0)
    late(outer, work, rounds=rounds)
    contributed(outer, work)
    np.testing.assert_allclose(all_pending(outer), 3 * work, rtol=1e-5)
    assert norm(outer.owed().residual) <= 3.0001 * norm(work)
    assert outer.owing.let_go_rounds == pytest.approx(rounds - 2, rel=1e-3)


def test_the_work_of_two_rounds_in_a_row_stays_owed_to_the_last_bit() -> None:
    outer, work = outer_of(A), normal(0)
    late(outer, work, rounds=2)
    contributed(outer, work)
    assert outer.owing.pending is not None
    assert all_pending(outer).tobytes() == (work + (work + work)).tobytes()
    assert outer.owing.let_go_rounds == 0


def test_a_round_that_commits_nothing_leaves_what_was_owed_before_it() -> None:
    outer = outer_of(A)
    late(outer, normal(1), rounds=1)
    before = outer.owing.residual.values.copy()
    assert norm(before) > 0
    contributed(outer, normal(2))
    void = tuple(
        replace(outcome, digest=None, contributors=(), contributions=())
        for outcome in commit_naming(outer, results_of(outer), None).slices
    )
    outer.owing.settle(replace(commit_naming(outer, results_of(outer), None), slices=void), {})
    np.testing.assert_array_equal(outer.owing.residual.values, before)
    assert outer.owing.let_go_rounds == 1 and outer.owing.pending is None
    contributed(outer, normal(3))
    one_is_here = (commit_naming(outer, results_of(outer), None).slices[0], *void[1:])
    outer.owing.settle(
        replace(commit_naming(outer, results_of(outer), None), slices=one_is_here), {}
    )
    assert norm(outer.owing.residual.values - before) > 0, "a round that commits some is missed"


def test_a_round_that_was_cut_short_bounds_no_more_than_a_whole_one() -> None:
    outer, work = outer_of(A), normal(0)
    late(outer, work, rounds=1)
    outer.owing._published[:] = outer._parameters - work / 50
    outer.owing.accumulate(round=2, fragment=0, share=1 / 50)
    np.testing.assert_allclose(all_pending(outer), work + work / 50, rtol=1e-6)


def test_work_of_a_time_when_steps_were_larger_is_measured_by_those_of_now() -> None:
    outer, work = outer_of(A), normal(0)
    hundredth = work / np.float32(100)
    late(outer, work, rounds=2)
    outer.restore(outer.snapshot(), outer.owed())  # a week later, by another process
    contributed(outer, hundredth)
    assert outer.owing.pending is not None
    assert norm(all_pending(outer)) <= 3.01 * norm(hundredth)


def test_where_nothing_was_learned_nothing_is_measured_and_nothing_let_go() -> None:
    outer, work = outer_of(A), normal(0)
    late(outer, work, rounds=1)
    late(outer, np.zeros_like(work), rounds=1)
    assert outer.owed().residual.tobytes() == work.tobytes()


@pytest.mark.parametrize("codec", ["int4", "ec1", "sign", "topk256", "topk64"])
def test_what_encoding_leaves_out_is_never_let_go_while_all_is_taken(codec: str) -> None:
    outer = outer_of(A, codec)
    for number in range(30):
        named = contributed(outer, normal(0) + normal(number))
        pending = outer.owing.pending
        assert pending is not None
        left = all_pending(outer) - np.concatenate(
            [outer.uplink.decode(pending.encoded[i].body, BLOCK) for i in range(3)]
        )
        results = {
            index: Payload(header=result.header, body=outer.downlink.encode(np.zeros(BLOCK, "f4")))
            for index, result in results_of(outer).items()
        }
        outer.apply(commit_naming(outer, results, named), results)
        np.testing.assert_array_equal(outer.owed().residual, left)
    assert outer.owing.let_go_rounds == 0


def test_what_encoding_left_out_stays_when_the_next_rounds_learn_little() -> None:
    """At the end of a schedule a pseudo-gradient is far smaller than the one before it."""
    outer = outer_of(A, "int2")
    for size in (1, 1e-4):
        left = outer.owed().residual
        named = contributed(outer, np.float32(size) * normal(0))
        np.testing.assert_array_equal(all_pending(outer), np.float32(size) * normal(0) + left)
        results = {
            index: Payload(header=result.header, body=outer.downlink.encode(np.zeros(BLOCK, "f4")))
            for index, result in results_of(outer).items()
        }
        outer.apply(commit_naming(outer, results, named), results)
    assert norm(left) > 1000 * norm(np.float32(size) * normal(0))
    assert outer.owing.let_go_rounds == 0


@pytest.mark.parametrize("codec", ["sign", "topk64"])
def test_error_feedback_of_many_rounds_outlives_a_missed_one_and_late_work_does_not_grow_on_it(
    codec: str,
) -> None:
    outer, work = outer_of(A, codec), normal(0)
    error = 8 * normal(1)
    outer.owing.residual.values[:] = error
    for _ in range(20):
        contributed(outer, work)
        results = {
            index: Payload(header=result.header, body=outer.downlink.encode(np.zeros(BLOCK, "f4")))
            for index, result in results_of(outer).items()
        }
        outer.apply(commit_naming(outer, results, None), results)
        assert 0.99 * norm(error) <= norm(outer.owed().residual) <= 1.01 * norm(error)
    assert outer.owing.let_go_rounds > 0


@pytest.mark.parametrize(("coarse", "owed"), [("topk64", 8), ("int4", 0)])
def test_a_finer_uplink_sends_what_the_one_before_left_out_and_of_many_rounds_two(
    coarse: str, owed: int
) -> None:
    """What topk64 leaves out are many pseudo-gradients, which it sends bit by bit: int8 sends all at once."""
    outer, work = outer_of(A, coarse), normal(0)
    fine = codec_named("int8")
    before = outer.rules_in(1)
    after = replace(before, uplink=fine, downlink=fine)
    outer.go_by(lambda round: after if round > 1 else before)
    outer.owing.residual.values[:] = owed * work
    named = contributed(outer, work)
    results = {
        index: Payload(header=result.header, body=outer.downlink.encode(np.zeros(BLOCK, "f4")))
        for index, result in results_of(outer).items()
    }
    outer.apply(commit_naming(outer, results, named), results)
    left = outer.owed().residual.copy()
    contributed(outer, work)
    assert outer.owing.pending is not None
    part, opened = SLICES[0], outer.owing.pending.encoded[0]
    assert opened.body == fine.encode(outer.owing.accumulated(part.start, part.num_elements))
    if owed:
        assert norm(left) > MOST_OWED * norm(work) and outer.owing.let_go_rounds > 0
        assert norm(all_pending(outer) - work) == pytest.approx(MOST_OWED * norm(work), rel=1e-3)
    else:
        assert norm(left) > 0 and outer.owing.let_go_rounds == 0
        np.testing.assert_array_equal(all_pending(outer), work + left)


def decaying_after_the_first(rules: OuterRules, round: int) -> OuterRules:
    return replace(rules, residual_decay=0.5) if round > 1 else rules


def test_an_amended_decay_is_of_the_errors_of_rounds_from_then_on() -> None:
    left = {}
    for decays in (False, True):
        outer, work = outer_of(A, "int4"), normal(0)
        if decays:
            outer.go_by(partial(decaying_after_the_first, outer.rules_in(1)))
        for _ in range(2):
            outer.owing.residual.values[:] = 0
            named = contributed(outer, work)
            results = {
                index: Payload(
                    header=result.header, body=outer.downlink.encode(np.zeros(BLOCK, "f4"))
                )
                for index, result in results_of(outer).items()
            }
            outer.apply(commit_naming(outer, results, named), results)
            left[decays, outer.round] = outer.owed().residual.copy()
    assert norm(left[False, 2]) > 0
    np.testing.assert_array_equal(left[True, 1], left[False, 1])
    np.testing.assert_array_equal(left[True, 2], np.float32(0.5) * left[False, 2])


def test_a_result_is_decoded_as_its_round_was_encoded() -> None:
    outer = outer_of(A)
    bf16, fp32 = codec_named("bf16"), codec_named("fp32")
    before = outer.rules_in(1)
    after = replace(before, downlink=bf16)
    outer.go_by(lambda round: before if round == 1 else after)
    for codec in (fp32, bf16):
        values = np.full(BLOCK, 0.5, np.float32)
        results = {
            index: Payload(header=result.header, body=codec.encode(values))
            for index, result in results_of(outer, 0.5).items()
        }
        outer.apply(commit_naming(outer, results, None), results)
    assert (outer.snapshot().parameters[:NUM_ELEMENTS] == -1.0).all()


def test_what_ranks_hand_in_without_a_round_is_bounded_when_it_is_sent() -> None:
    outer, work = outer_of(A), normal(0)
    contributed(outer, work)
    results = results_of(outer)
    named = [
        contribution_digest(Digest(each.contribution))
        for each in outer.owing.pending.sent.values()  # type: ignore[union-attr]
    ]
    outer.apply(commit_naming(outer, results, named), results)
    for _ in range(20):
        before = outer.owing.published_of(0)
        outer.owing._published[:] = outer._parameters - work
        outer.owing.add_published(0, before)
    contributed(outer, work)
    np.testing.assert_allclose(all_pending(outer), 3 * work, rtol=1e-5)


# What is pending stays what it was, whatever is done with what it is formed from


def in_two(*, sent: Vector, trained: Vector) -> tuple[Outer, list[ContributionDigest]]:
    """A fragment of work was sent for round 1; since then the ranks have trained both fragments on.

    They hand in all that they hold, as before a commit that came without them.
    """
    outer = outer_of(A, layout=Layout.of([("v", (NUM_ELEMENTS,))], [("w", (NUM_ELEMENTS,))]))
    named = contributed(outer, sent)
    for fragment in (0, 1):
        before = outer.owing.published_of(fragment)
        outer.owing._published[:] = -(sent + trained if fragment == 0 else trained)
        outer.owing.add_published(fragment, before)
    return outer, named


@pytest.mark.parametrize("is_taken", [True, False])
def test_what_ranks_hand_in_while_a_round_is_in_flight_leaves_what_was_sent_as_it_was(
    is_taken: bool,
) -> None:
    sent, trained = np.float32(8) * np.ones(NUM_ELEMENTS, "f4"), np.ones(NUM_ELEMENTS, "f4")
    outer, named = in_two(sent=sent, trained=trained)
    np.testing.assert_array_equal(all_pending(outer), sent)
    results = results_of(outer)
    outer.apply(commit_naming(outer, results, named if is_taken else None), results)
    first, second = outer.owed().residual.reshape(2, -1)
    np.testing.assert_array_equal(first, trained if is_taken else sent + trained)
    np.testing.assert_array_equal(second, trained)


def test_a_plan_that_changes_after_a_hand_in_sends_the_fragment_that_was_published() -> None:
    sent, trained = np.float32(8) * np.ones(NUM_ELEMENTS, "f4"), np.ones(NUM_ELEMENTS, "f4")
    outer, _ = in_two(sent=sent, trained=trained)
    outer.owing.forget_pending()
    outer.owing.accumulate(round=1, fragment=0)
    np.testing.assert_array_equal(all_pending(outer), sent + trained)


def test_a_return_to_an_earlier_state_leaves_what_was_sent_as_it_was() -> None:
    outer, work = outer_of(A), normal(0)
    earlier, owed = outer.snapshot(), outer.owed()
    outer.apply(commit_naming(outer, {}, None), {})
    outer._parameters[:] = 5
    outer.owing.residual.values[:] = normal(1)
    contributed(outer, work)  # for round 2
    before = all_pending(outer)
    outer.restore(earlier, owed)
    assert outer.owing.pending is not None
    assert all_pending(outer).tobytes() == before.tobytes()
