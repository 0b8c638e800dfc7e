"""Rounds of a given length, and the deadlines that plans then have."""

from typing import Any

import pytest

from coordinator.swarm.state import Measured
from protocol.wire.messages import RoundOpened
from protocol.wire.rounds import Plan
from tests.unit.swarm_scene import TOKENS, Scene, digest_of, of_kind

A, B, C = "node-a", "node-b", "node-c"


def swarm_of(*names: str, **rules: Any) -> Scene:
    """The run file's bounds are 60, 70 and 80 s, and 20 s to apply; the floor is 5 s."""
    scene = Scene(min_nodes=len(names), rounds=100, adapts_deadlines=True, **rules)
    scene.attach(*names)
    scene.amend(min_nodes=2)  # from the second round on
    return scene


def participants(scene: Scene) -> list[str]:
    return [str(a.node_id) for a in scene.round.assignments]


def train(scene: Scene, *names: str, inner_steps: int | None = None) -> None:
    """Takes all the steps of the plan, or fewer, in no time by the node's own clock."""
    for a in scene.round.assignments:
        if a.node_id in names:
            steps = a.inner_steps if inner_steps is None else inner_steps
            tokens = steps * TOKENS // 5
            scene.train(a.node_id, inner_steps=steps, tokens=tokens, seconds=0)


def reduce_and_hold(scene: Scene, *names: str, seconds: float, of: tuple[str, ...] = ()) -> None:
    """These reduce what they have to, from contributors `of`, and after a while all hold it."""
    number = scene.round.number
    indices = [p.slice.index for p in scene.round.slices if p.slice.reducer_id in names]
    tokens = {str(n): t.tokens for n, t in scene.round.trained.items() if not of or n in of}
    for index in indices:
        reducer = scene.round.slices[index].slice.reducer_id
        scene.reduce(reducer, index, digest_of(f"{number}/{index}"), tokens)
    if scene.state.committed_round < number:
        scene.wait(seconds)
        for index in indices:
            for name in names:
                if scene.state.committed_round < number:
                    scene.hold(name, index, digest_of(f"{number}/{index}"))


def a_round(
    scene: Scene,
    *,
    train_seconds: float = 20,
    exchange_seconds: float = 4,
    commit_seconds: float = 1,
    apply_seconds: float = 2,
) -> None:
    """Everybody does everything; the next round opens."""
    names, number = participants(scene), scene.round.number
    scene.wait(train_seconds)
    train(scene, *names)
    scene.wait(exchange_seconds)
    reduce_and_hold(scene, *names, seconds=commit_seconds)
    assert scene.state.committed_round == number, scene.reason
    apply(scene, *names, seconds=apply_seconds)


def apply(scene: Scene, *names: str, seconds: float = 2) -> None:
    scene.wait(seconds)
    scene.apply(digest_of(f"after {scene.state.committed_round}"), *names)


def given(scene: Scene) -> tuple[Any, ...]:
    """Seconds for training, for the exchange, for the commit and to apply it."""
    plan = last_plan(scene)
    assert scene.round.apply_seconds is not None
    return (
        plan.train_seconds,
        pytest.approx(plan.contribute_seconds - plan.train_seconds),
        pytest.approx(plan.commit_seconds - plan.contribute_seconds),
        scene.round.apply_seconds,
    )


def late_in(history: tuple[Measured, ...], scene: Scene) -> set[str]:
    """Who was not done in time in the latest round."""
    sessions = history[-1].cut_session_ids
    return {str(n) for n, member in scene.state.members.items() if member.session_id in sessions}


def last_plan(scene: Scene) -> Plan:
    plan = of_kind(scene.log, RoundOpened)[-1].plan
    assert plan.round == scene.round.number
    return plan
