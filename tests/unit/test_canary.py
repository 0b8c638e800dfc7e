"""When a held-out loss is implausible, who must say so, and what follows from it."""

import math
import random
from dataclasses import replace

import pytest
from going_back_scene import EVERYWHERE, Kept
from swarm_scene import Scene

from coordinator.swarm.canary import COORDINATOR, is_plausible
from coordinator.swarm.events import GoBack, Ruled, Started
from coordinator.swarm.state import Alarm
from protocol.trust.rulings import RulingKind
from protocol.wire.messages import RunFinished
from protocol.wire.rounds import RoundSpan


def watched(losses: list[float], *, rounds: int = 100) -> Kept:
    """A swarm of two that measures every state, and has measured these, beginning with the first."""
    kept = Kept(scene=Scene(min_nodes=2, rounds=rounds, evaluate_every=1))
    rules = replace(kept.scene.state.rules, watches_loss=True)
    kept.scene.state = replace(kept.scene.state, rules=rules)
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
        members = {n: replace(m, reach_back=reach) for n, m in kept.scene.state.members.items()}
        kept.scene.state = replace(kept.scene.state, members=members)
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
        kept: list[float] = []
        for place in range(60):
            level = end + (start - end) / (1 + slowness * place)
            level *= 1 + wave * math.sin(place / 7)
            loss = level * (1 + noise * rng.gauss(0, 1))
            num_losses += 1
            if is_plausible(kept, loss):
                kept.append(loss)
            else:
                num_false += 1
    assert num_losses == 36_000
    assert num_false / num_losses < 1e-4, num_false


def test_what_harms_a_run_is_seen_at_the_next_loss() -> None:
    losses = [5.3, 3.9, 3.1, 2.8, 2.7, 2.66, 2.62]
    for harmed in (3.2, 5.54, 256.0, math.nan, math.inf):
        assert not is_plausible(losses, harmed)
    assert is_plausible(losses, 2.9)
