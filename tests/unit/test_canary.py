"""When a held-out loss is implausible, who must say so, and what follows from it."""

import math
import random
from dataclasses import replace
from statistics import median

import pytest

from coordinator.swarm.evaluation import drawn_evaluators
from coordinator.swarm.events import GoBack, Ruled, Started
from coordinator.swarm.losses import Curve
from coordinator.swarm.members import Work
from coordinator.swarm.state import Alarm
from protocol.trust.rulings import COORDINATOR, RulingKind
from protocol.wire.messages import RunFinished
from protocol.wire.rounds import RoundSpan
from tests.unit.going_back_scene import EVERYWHERE, Kept
from tests.unit.swarm_scene import Scene


def watched(losses: list[float], *, rounds: int = 100) -> Kept:
    """A swarm of two that measures every state, and has measured these, beginning with the first."""
    kept = Kept(scene=Scene(min_nodes=2, rounds=rounds, evaluate_every=1))
    kept.scene.amend(watches_loss=True)
    kept.attach("a")
    kept.attach("b")
    for place, loss in enumerate(losses):
        tell(kept, loss, loss)
        if place < len(losses) - 1:
            kept.rounds(1)
    return kept


def tell(kept: Kept, *losses: float) -> None:
    """What a and b say of the newest state."""
    asked = kept.scene.state.evaluating
    assert asked is not None and asked.node_ids == ("a", "b")
    for name, loss in zip(("a", "b"), losses, strict=False):
        kept.scene.evaluate(name, round=asked.round, loss=loss)


def test_two_are_asked_and_the_loss_that_counts_is_the_one_of_more_confirmed_work() -> None:
    kept = watched([5.0, 4.0, 3.5])
    kept.rounds(1)
    tell(kept, 3.3, 3.2)
    assert [one.loss for one in kept.scene.state.held_out] == [5.0, 4.0, 3.5, 3.2]


@pytest.mark.parametrize("bad", [9.0, math.inf])
def test_the_run_goes_back_to_the_latest_round_with_a_plausible_loss(bad: float) -> None:
    kept = watched([5.0, 4.0, 3.5, 3.3, 3.2])
    kept.rounds(1)
    tell(kept, bad, bad)
    (action,) = [a for a in kept.scene.actions if isinstance(a, GoBack)]
    assert action.alarm.round == 4
    words = "was 9.000" if math.isfinite(bad) else "was no number"
    assert (
        action.alarm.reason
        == f"the held-out loss {words} after round 5, and was 3.200 after round 4"
    )
    assert kept.scene.state.alarm == action.alarm
    assert (
        f"about to go back by itself: {action.alarm.reason}" in kept.scene.reason
        or kept.scene.round
    )


def test_no_round_opens_and_the_run_does_not_end_before_it_is_ruled_what_follows() -> None:
    kept = watched([5.0, 4.0, 3.5, 3.3, 3.2], rounds=5)
    kept.rounds(1)
    tell(kept, 9.0, 9.0)
    assert kept.scene.state.alarm is not None
    kept.scene.wait(1000)
    assert kept.scene.asked(RunFinished) == [] and not kept.scene.state.is_finished
    assert kept.scene.reason.startswith("the run is about to go back by itself")
    kept.go_back(4, by=COORDINATOR)
    assert kept.scene.state.alarm is None and kept.scene.state.committed_round == 4


def test_void_rounds_are_not_evaluated_and_do_not_have_the_next_loss_seem_a_jump() -> None:
    """What they did not commit is committed together later, and moves the loss as several rounds do."""
    kept = watched([5.0, 4.0, 3.2])
    for _ in range(5):
        kept.scene.wait(80)
        kept.scene.apply(kept.state_after(2), "a", "b")
        assert kept.scene.state.evaluating is None
    assert kept.scene.state.committed_round == 7
    kept.rounds(1)
    tell(kept, 4.2, 4.2)
    assert kept.scene.state.alarm is None
    assert [one.round for one in kept.scene.state.held_out] == [0, 1, 2, 8]


def test_a_state_that_nobody_has_evaluated_is_evaluated_after_a_void_round() -> None:
    kept = watched([5.0, 4.0])
    kept.rounds(1)
    kept.scene.wait(80)
    kept.scene.apply(kept.state_after(2), "a", "b")
    asked = kept.scene.state.evaluating
    assert asked is not None and asked.round == 3


def test_one_member_alone_starts_nothing() -> None:
    kept = watched([5.0, 4.0, 3.5, 3.3, 3.2])
    kept.rounds(1)
    tell(kept, 9.0, 3.1)
    assert kept.scene.state.alarm is None
    kept.rounds(1)
    tell(kept, 9.0)
    asked = kept.scene.state.evaluating
    assert asked is not None and asked.node_ids == ("b",)
    kept.scene.wait_until(asked.until)
    assert kept.scene.state.alarm is None


def test_the_second_time_at_the_same_place_the_run_pauses() -> None:
    kept = watched([5.0, 4.0, 3.5, 3.3, 3.2])
    kept.rounds(1)
    tell(kept, 9.0, 9.0)
    kept.go_back(4, by=COORDINATOR)
    kept.all_follow()
    kept.rounds(1)
    tell(kept, 9.0, 9.0)
    alarm = kept.scene.state.alarm
    assert alarm is not None and alarm.round is None
    assert alarm.reason.endswith("again after the run went back from there")
    for later in range(3):
        kept.scene.state = replace(kept.scene.state, alarm=None)
        kept.rounds(1)
        tell(kept, 3.0 - later / 10, 3.0 - later / 10)
    kept.rounds(1)
    tell(kept, 9.0, 9.0)
    alarm = kept.scene.state.alarm
    assert alarm is not None and alarm.round == 8, "elsewhere it goes back once more"


def test_it_goes_back_no_further_than_nodes_reach_and_else_pauses() -> None:
    for reach, wanted in (
        ((RoundSpan(first=1, last=2),), 2),
        ((RoundSpan(first=5, last=5),), None),
        (EVERYWHERE, 4),
    ):
        kept = watched([5.0, 4.0, 3.5, 3.3, 3.2])
        kept.rounds(1)
        kept.scene.change(reach_back=reach)
        tell(kept, 9.0, 9.0)
        alarm = kept.scene.state.alarm
        assert alarm is not None and alarm.round == wanted


def test_a_coordinator_that_died_before_the_ruling_makes_it_when_its_nodes_are_back() -> None:
    kept = watched([5.0, 4.0, 3.5, 3.3, 3.2])
    kept.rounds(1)
    tell(kept, 9.0, 9.0)
    alarm = kept.scene.state.alarm
    kept.save()
    kept.scene.state = kept.store.load(kept.scene.state.rules, kept.scene.state.run_digest)
    assert kept.scene.state.alarm == alarm is not None
    kept.scene.do(Started())
    assert not [a for a in kept.scene.actions if isinstance(a, GoBack)]
    for name in ("a", "b"):
        kept.attach(name)
    sounded = [a.alarm for a in kept.scene.log if isinstance(a, GoBack)]
    assert sounded == [alarm, alarm]


def test_what_the_run_owner_rules_meanwhile_ends_the_alarm() -> None:
    kept = watched([5.0, 4.0, 3.5, 3.3, 3.2])
    kept.scene.state = replace(kept.scene.state, alarm=Alarm(round=2, reason="no number"))
    kept.scene.do(Ruled(kind=RulingKind.PAUSED, by="the run owner", unix_seconds=0.0))
    assert kept.scene.state.alarm is None


def test_honest_runs_of_many_kinds_raise_no_false_alarm() -> None:
    """Falling and flat curves, with noise from 0.2 to 5 % of the loss, also in plateaus and slow waves."""
    num_false = num_losses = 0
    for seed in range(600):
        rng = random.Random(seed)
        start, end = rng.choice([(10.8, 3.0), (5.5, 1.4), (2.3, 0.05), (3.2, 3.0)])
        noise, slowness = rng.uniform(0.002, 0.05), rng.uniform(0.05, 1.0)
        wave = rng.uniform(0, 0.05)
        kept = Curve()
        for place in range(60):
            level = end + (start - end) / (1 + slowness * place)
            level *= 1 + wave * math.sin(place / 7)
            loss = level * (1 + noise * rng.gauss(0, 1))
            num_losses += 1
            if kept.allows(loss):
                kept.add(loss)
            else:
                num_false += 1
    assert num_losses == 36_000
    assert num_false / num_losses < 1e-4, num_false


def curve_of(*losses: float) -> Curve:
    curve = Curve()
    for loss in losses:
        curve.add(loss)
    return curve


def test_what_harms_a_run_is_seen_at_the_next_loss() -> None:
    curve = curve_of(5.3, 3.9, 3.1, 2.8, 2.7, 2.66, 2.62)
    for harmed in (3.2, 5.54, 256.0, math.nan, math.inf):
        assert not curve.allows(harmed)
    assert curve.allows(2.9)


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1, 0.195])
def test_however_slowly_a_loss_rises_it_comes_no_further_above_the_best_of_the_run(
    share: float,
) -> None:
    """No further than by a jump, and two steps more: two of three must lie above it."""
    curve = curve_of(3.0, 2.9, 2.8, 2.75)
    while curve.allows(worse := median(curve.losses[-3:]) * (1 + share)):
        curve.add(worse)
    assert worse <= (2.8 + 6 * 0.1) * (1 + share) ** 2
    assert not curve.has_jumped(worse), "it looks usual beside those before"


def test_a_slow_rise_takes_the_run_back_to_its_best_state() -> None:
    kept = watched([5.0, 4.0, 3.5, 3.3, 3.2, 3.2, 3.5, 3.8])
    for loss in (4.1, 4.4, 4.7):
        kept.rounds(1)
        tell(kept, loss, loss)
        if kept.scene.state.alarm is not None:
            break
    alarm = kept.scene.state.alarm
    assert alarm is not None and alarm.round == 5
    assert alarm.reason.endswith("and was 3.200 after round 5")


@pytest.mark.parametrize("device", ["own loop", "cpu"])
def test_loops_whose_accuracy_takes_the_run_back_are_told_that_less_is_better(device: str) -> None:
    kept = watched([0.1])
    for name in ("a", "b"):
        kept.scene.change(name, device=device)
    accuracy = 0.1
    while kept.scene.state.alarm is None:
        accuracy += 0.02
        assert accuracy < 1
        kept.rounds(1)
        tell(kept, accuracy, accuracy)
    reason = kept.scene.state.alarm.reason
    assert ("evaluate=… returns accuracy and rewards with a minus" in reason) is (
        device == "own loop"
    )


def test_a_small_rise_that_lasts_is_no_alarm() -> None:
    """As of a run that begins to fit its samples more than the held-out text, or whose ranks began anew."""
    curve = curve_of(3.0, 2.6, 2.4, 2.3, 2.25, 2.22)
    for place in range(40):
        loss = 2.22 * (1 + 0.15 * place / 40)
        assert curve.allows(loss)
        curve.add(loss)


def test_what_the_run_owner_resumes_is_accepted_and_losses_count_anew() -> None:
    kept = watched([5.0, 4.0, 3.5, 3.3, 3.2])
    kept.rounds(1)
    tell(kept, 9.0, 9.0)
    for by, is_paused in (("the run owner", True), (COORDINATOR, False)):
        kept.scene.state = replace(kept.scene.state, alarm=None)
        kept.scene.do(Ruled(kind=RulingKind.PAUSED, by=by, unix_seconds=0.0))
        kept.rounds(1)  # the one in flight
        kept.scene.do(Ruled(kind=RulingKind.RESUMED, by="the run owner", unix_seconds=0.0))
        if kept.scene.state.evaluating is not None:
            tell(kept, 9.0, 9.0)
        kept.rounds(1)
        tell(kept, 9.0, 9.0)
        assert (kept.scene.state.alarm is not None) is is_paused, by


def test_rates_that_are_amended_may_raise_the_loss_above_the_best_but_not_by_a_jump() -> None:
    kept = watched([5.0, 4.0, 3.5, 3.3, 3.2, 3.2])
    kept.scene.do(
        Ruled(
            kind=RulingKind.AMENDED,
            by="the run owner",
            unix_seconds=0.0,
            changes=(("inner.learning_rate", 0.01),),
        )
    )
    for loss in (3.5, 3.8, 4.1, 4.4):
        kept.rounds(1)
        tell(kept, loss, loss)
        assert kept.scene.state.alarm is None, loss
    kept.rounds(1)
    tell(kept, 40.0, 40.0)
    assert kept.scene.state.alarm is not None


def of_three(*losses: float, invites: str = "xyz") -> Kept:
    """Four members, of whom three are asked; what those say."""
    kept = Kept(scene=Scene(min_nodes=4, rounds=100, evaluate_every=1))
    kept.scene.amend(watches_loss=True)
    kept.scene.state = replace(kept.scene.state, audit_secret=b"secret")
    for name, invite in zip("abcd", invites + invites[-1], strict=True):
        kept.attach(name, invite=invite)
    for loss in (5.0, 4.0, 3.5, 3.3, 3.2):
        said(kept, loss, loss, loss)
        kept.rounds(1)
    said(kept, *losses)
    return kept


def said(kept: Kept, *losses: float) -> None:
    asked = kept.scene.state.evaluating
    assert asked is not None and len(asked.node_ids) == 3
    for name, loss in zip(asked.node_ids, losses, strict=False):
        kept.scene.evaluate(name, round=asked.round, loss=loss)


def test_of_three_one_that_lies_can_neither_hide_a_jump_nor_start_anything() -> None:
    for losses, is_seen, counts in (
        ((9.0, 9.0, 3.1), True, 9.0),
        ((3.1, 9.0, 9.0), True, 9.0),
        ((9.0, 3.1, 3.15), False, 3.15),
        ((3.1, 0.1, 3.15), False, 3.1),
    ):
        kept = of_three(*losses)
        assert (kept.scene.state.alarm is not None) is is_seen, losses
        assert kept.scene.state.held_out[-1].loss == counts


def test_one_that_is_silent_hides_nothing_either_and_two_must_agree() -> None:
    for losses, is_seen in (((9.0, 9.0), True), ((9.0, 3.1), False), ((9.0,), False)):
        kept = of_three(*losses)
        asked = kept.scene.state.evaluating
        assert asked is not None
        kept.scene.wait_until(asked.until)
        assert (kept.scene.state.alarm is not None) is is_seen, losses


def test_who_is_asked_is_drawn_by_a_secret_from_different_invites() -> None:
    def drawn(kept: Kept, rounds: int) -> list[tuple[str, ...]]:
        found = []
        for _ in range(rounds):
            kept.rounds(1)
            asked = kept.scene.state.evaluating
            assert asked is not None
            found.append(tuple(map(str, asked.node_ids)))
            said(kept, 3.2, 3.2, 3.2)
        return found

    found = drawn(of_three(3.2, 3.2, 3.2), 30)
    assert all({"a", "b"} < set(three) for three in found), "c and d share an invite"
    assert {three[2] for three in found} == {"c", "d"}
    again, other = of_three(3.2, 3.2, 3.2), of_three(3.2, 3.2, 3.2)
    other.scene.state = replace(other.scene.state, audit_secret=b"another")
    assert drawn(again, 30) == found != drawn(other, 30)
    alike = drawn(of_three(3.2, 3.2, 3.2, invites="xxx"), 60)
    assert {len(three) for three in alike} == {3} and len(set(alike)) == 4


def test_members_without_work_are_asked_only_where_nobody_else_is_left() -> None:
    kept = of_three(3.2, 3.2, 3.2)
    kept.scene.change("a", "b", work=Work())
    for _ in range(10):
        ready = [kept.scene.member(name) for name in "abcd"]
        chosen = drawn_evaluators(kept.scene.state, ready)
        assert len(chosen) == 3 and set(chosen) & {"c", "d"}
        kept.scene.state = replace(
            kept.scene.state, committed_round=kept.scene.state.committed_round + 1
        )
