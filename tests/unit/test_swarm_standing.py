"""Who misses deadlines is left out of what the next ones wait for."""

from dataclasses import replace

import pytest
from swarm_scene import Scene, digest_of, of_kind

from coordinator.swarm.standing import FORGOTTEN_AFTER
from coordinator.swarm.state import RoundPhase, Standing
from protocol.wire.messages import ParticipantsIdle, RoundCommitted
from protocol.wire.rounds import NodeId

HONEST = ("node-a", "node-b", "node-c")
IDLER = "idler"


def swarm() -> Scene:
    """Four nodes; all of them have done their part in one round."""
    scene = Scene(min_nodes=4, rounds=200)
    scene.attach(*HONEST, IDLER)
    scene.state = replace(scene.state, rules=replace(scene.state.rules, min_nodes=2))
    a_round(scene, *HONEST, IDLER)
    return scene


def participants(scene: Scene) -> set[str]:
    return {str(a.node_id) for a in scene.round.assignments}


def a_round(scene: Scene, *names: str) -> float:
    """These do all that is asked of them, in a second or when nobody is waited for; how long it took."""
    began, number = scene.now, scene.round.number
    here = participants(scene)
    working = [name for name in names if name in here]
    scene.wait(1)
    for name in working:
        steps = next(a for a in scene.round.assignments if a.node_id == name)
        tokens = steps.num_samples * 8
        scene.train(name, inner_steps=steps.inner_steps, tokens=tokens, seconds=1.0)
    told = {
        NodeId(n)
        for idle in of_kind(scene.log, ParticipantsIdle)
        for n in idle.node_ids
        if idle.round == number
    }
    silent = here - {str(n) for n in told} - set(working)
    if silent:
        scene.wait(1)  # for those on trial
        told = {
            NodeId(n)
            for idle in of_kind(scene.log, ParticipantsIdle)
            for n in idle.node_ids
            if idle.round == number
        }
        if silent - {str(n) for n in told}:
            scene.wait_until(scene.round.contribute_deadline)
    tokens_of = {
        str(a.node_id): a.num_samples * 8 for a in scene.round.assignments if a.node_id in working
    }
    while scene.state.committed_round < number:
        for progress in scene.round.slices:
            index, reducer = progress.slice.index, str(progress.slice.reducer_id)
            if scene.state.committed_round < number and reducer in working:
                scene.reduce(reducer, index, digest_of(f"{number}/{index}"), tokens_of)
                for name in working:
                    if scene.state.committed_round < number:
                        scene.hold(name, index, digest_of(f"{number}/{index}"))
        if scene.state.committed_round < number:
            scene.wait(1)
    if scene.state.recent[-1].is_void:
        return scene.now - began
    *first, last = working
    scene.apply(digest_of(f"after {number}"), *first)
    if IDLER not in names:  # it copies what the others say
        scene.apply(digest_of(f"after {number}"), IDLER)
    scene.apply(digest_of(f"after {number}"), last)
    if scene.state.open_round is not None and scene.round.phase is RoundPhase.APPLYING:
        scene.wait_until(scene.round.apply_deadline)
    return scene.now - began


def test_a_member_that_does_nothing_lengthens_one_round_and_its_trials_none() -> None:
    scene = swarm()
    seconds, trials = [], []
    for _ in range(40):
        trials.append(IDLER in participants(scene))
        seconds.append(a_round(scene, *HONEST))
    assert seconds[0] > 60
    assert max(seconds[1:]) <= 2, "nobody waits for it again"
    assert [place for place, is_in in enumerate(trials) if is_in] == [0, 2, 5, 10, 19, 36]
    weighty = scene.member(IDLER).standing
    assert weighty.is_on_trial and weighty.num_faults == 6


def test_who_is_on_trial_reduces_nothing_and_is_back_by_doing_its_part_once() -> None:
    scene = swarm()
    a_round(scene, *HONEST)
    assert participants(scene) == set(HONEST)
    a_round(scene, *HONEST)
    assert participants(scene) == {*HONEST, IDLER}
    assert "1 node is on trial" in scene.round.reason
    assert IDLER not in {str(p.slice.reducer_id) for p in scene.round.slices}
    a_round(scene, *HONEST, IDLER)
    assert not scene.member(IDLER).standing.is_on_trial
    assert IDLER in {str(p.slice.reducer_id) for p in scene.round.slices}
    for _ in range(FORGOTTEN_AFTER):
        a_round(scene, *HONEST, IDLER)
    assert scene.member(IDLER).standing == Standing()


def test_of_two_the_one_that_works_goes_on_alone_however_much_the_other_has_done() -> None:
    scene = Scene(min_nodes=2, rounds=50)
    scene.attach("node-a", IDLER)
    a_round(scene, "node-a", IDLER)
    a_round(scene, "node-a")
    assert participants(scene) == {"node-a", IDLER}, "min_nodes wants both"
    assert a_round(scene, "node-a") <= 2
    commits = of_kind(scene.log, RoundCommitted)
    assert commits[-1].commit.round == 3
    assert {outcome.void_reason for outcome in commits[-1].commit.slices} == {""}


def test_who_is_in_no_plan_and_applies_late_is_awaited_once() -> None:
    scene = swarm()
    scene.attach("reader", at=1, digest=digest_of("after 1"), cannot_train=True)
    assert a_round(scene, *HONEST, IDLER) >= 20
    for _ in range(3):
        digest = scene.state.outer_digest
        assert digest is not None
        scene.beat("reader", at=scene.state.committed_round, digest=digest, cannot_train=True)
        assert a_round(scene, *HONEST, IDLER) <= 1


def test_a_node_that_was_restarted_in_mid_round_is_not_at_fault() -> None:
    scene = swarm()
    scene.attach(IDLER, at=1, digest=digest_of("after 1"))
    a_round(scene, *HONEST)
    assert not scene.member(IDLER).standing.num_faults


def test_when_nobody_has_trained_nobody_is_at_fault() -> None:
    scene = swarm()
    scene.wait_until(scene.round.commit_deadline)
    assert {m.standing for m in scene.state.members.values()} == {Standing()}


@pytest.mark.parametrize("num_late", [1, 2])
def test_a_late_contribution_is_a_fault_the_second_time(num_late: int) -> None:
    scene = swarm()
    for _ in range(num_late):
        for name in (*HONEST, IDLER):
            scene.train(name)
        a_round(scene, *HONEST)
    assert scene.member(IDLER).standing.is_on_trial == (num_late == 2)
