"""Who misses deadlines is left out of what the next ones wait for."""

from dataclasses import replace

import pytest

from coordinator.swarm.explain import explain
from coordinator.swarm.members import Standing, Work
from coordinator.swarm.standing import (
    BRIEF_TRIAL_SECONDS,
    FORGOTTEN_AFTER,
    HURRY_MARGIN,
    PATIENT_TRIALS,
    TRIAL_MARGIN,
    waiting_in_words,
)
from coordinator.swarm.state import RoundPhase
from protocol.wire.messages import ParticipantsIdle, RoundCommitted
from protocol.wire.rounds import NodeId
from tests.unit.swarm_scene import Scene, asked_of, digest_of, of_kind

HONEST = ("node-a", "node-b", "node-c")
IDLER = "idler"


def swarm() -> Scene:
    """Four nodes; all of them have done their part in one round."""
    scene = Scene(min_nodes=4, rounds=200)
    scene.attach(*HONEST, IDLER)
    scene.amend(min_nodes=2)
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


def test_who_contributes_to_slices_of_its_own_alone_is_late_however_it_says_that_it_has_trained() -> (
    None
):
    scene = swarm()
    for _ in range(2):
        assert IDLER in participants(scene)
        close_round_with(scene, {name: [*HONEST] for name in HONEST} | {IDLER: [*HONEST, IDLER]})
    assert scene.member(IDLER).standing.is_on_trial
    assert not any(scene.member(name).standing.num_faults for name in HONEST)


def test_one_reducer_that_leaves_others_out_makes_nobody_late() -> None:
    """It may be the one that lies."""
    scene = swarm()
    everybody = [*HONEST, IDLER]
    for _ in range(3):
        named = dict.fromkeys(everybody, everybody) | {"node-b": ["node-b"]}
        close_round_with(scene, named)
    assert {m.standing for m in scene.state.members.values()} == {Standing()}


def close_round_with(scene: Scene, named: dict[str, list[str]]) -> None:
    """A round in which all have trained; each reducer names these in its slices."""
    number = scene.round.number
    for name in named:
        asked = next(a for a in scene.round.assignments if a.node_id == name)
        scene.train(name, inner_steps=asked.inner_steps, tokens=asked.num_samples * 8)
    tokens = {str(a.node_id): a.num_samples * 8 for a in scene.round.assignments}
    for progress in scene.round.slices:
        reducer, digest = str(progress.slice.reducer_id), digest_of(f"{number}/{progress.slice}")
        of = {name: tokens[name] for name in named[reducer]}
        scene.reduce(reducer, progress.slice.index, digest, of)
        for name in named:
            if scene.state.committed_round < number:
                scene.hold(name, progress.slice.index, digest)
    assert scene.state.committed_round == number
    for name in named:
        if scene.state.open_round is not None and scene.round.number == number:
            scene.apply(digest_of(f"after {number}"), name)


NEWCOMERS = tuple(f"node-{place}" for place in range(8))
IDLE = ("node-0", "node-7")
BUSY = tuple(name for name in NEWCOMERS if name not in IDLE)


def first_round(*, idle: tuple[str, ...] = IDLE) -> Scene:
    """Eight of whom nobody has confirmed work; all but the idle ones have trained for 40 seconds."""
    scene = Scene(min_nodes=8)
    for name in NEWCOMERS:
        scene.attach(name, invite=name)
    scene.amend(min_nodes=2)
    scene.wait(40)
    for name in NEWCOMERS:
        if name not in idle:
            scene.train(name)
    return scene


def test_members_that_idle_in_their_first_round_lengthen_it_by_half_of_the_others_training() -> (
    None
):
    scene = first_round()
    began = scene.round.opened_at
    scene.wait_until(began + TRIAL_MARGIN * 40)
    assert scene.round.is_excused
    reducers = {progress.slice.reducer_id for progress in scene.round.slices}
    assert reducers <= set(BUSY), "others reduce what they were to reduce"
    scene.commit(*BUSY, tokens=dict.fromkeys(BUSY, 80))
    scene.apply(digest_of("after 1"), *BUSY)
    assert scene.round.number == 2, "nor is the commit waited for that they do not apply"
    assert {a.node_id for a in scene.round.assignments} == set(BUSY)
    assert scene.now - began <= TRIAL_MARGIN * 40


def test_who_is_slow_hands_in_what_it_has_and_is_not_left_out() -> None:
    scene = first_round(idle=("node-7",))
    scene.wait_until(scene.round.opened_at + HURRY_MARGIN * 40)
    assert asked_of(scene.log, ParticipantsIdle) == ["node-7"], "the others still wait for it"
    scene.train("node-7", inner_steps=3, tokens=3 * 16, seconds=50.0)
    scene.wait_until(scene.round.opened_at + TRIAL_MARGIN * 40)
    assert not scene.round.is_excused
    scene.commit(*NEWCOMERS, tokens=dict.fromkeys(NEWCOMERS[:-1], 80) | {"node-7": 48})
    assert scene.member("node-7").standing == Standing()
    assert not any(measured.cut_session_ids for measured in scene.state.phase_times.train)


def test_who_hands_in_late_does_not_let_the_others_idle_for_longer() -> None:
    scene = first_round()
    began = scene.round.opened_at
    scene.wait_until(began + 0.9 * TRIAL_MARGIN * 40)
    scene.train("node-7")
    scene.wait_until(began + TRIAL_MARGIN * 40)
    assert scene.round.is_excused and scene.round.on_trial == ("node-0",)


@pytest.mark.parametrize("num_idle", [3, 5])
def test_nobody_is_hurried_by_fewer_than_decide(num_idle: int) -> None:
    """Two thirds of the invites, while nobody has confirmed work."""
    scene = first_round(idle=NEWCOMERS[:num_idle])
    scene.wait_until(scene.round.opened_at + 2 * TRIAL_MARGIN * 40 - 30)
    assert scene.round.hurried_at is None and not of_kind(scene.log, ParticipantsIdle)


def in_no_time(scene: Scene, *names: str) -> None:
    """These train as soon as the round is open."""
    for name in names:
        steps = next(a for a in scene.round.assignments if a.node_id == name)
        scene.train(name, inner_steps=steps.inner_steps, tokens=steps.num_samples * 8)


def test_rounds_that_take_no_time_wait_a_second_for_who_is_on_trial() -> None:
    scene = swarm()
    a_round(scene, *HONEST)
    a_round(scene, *HONEST)
    assert IDLER in participants(scene)
    in_no_time(scene, *HONEST)
    assert scene.now == scene.round.opened_at and not scene.round.is_excused
    scene.wait(BRIEF_TRIAL_SECONDS)
    assert scene.round.is_excused


def test_who_missed_a_deadline_is_back_by_training_as_fast_as_those_that_take_no_time() -> None:
    scene = swarm()
    a_round(scene, *HONEST)
    a_round(scene, *HONEST)
    in_no_time(scene, *HONEST)
    assert IDLER not in asked_of(scene.actions, ParticipantsIdle)
    in_no_time(scene, IDLER)
    everybody = (*HONEST, IDLER)
    scene.commit(*everybody)
    scene.apply(digest_of("after 4"), *everybody)
    assert not scene.member(IDLER).standing.is_on_trial
    assert IDLER in participants(scene)


def left_out(
    scene: Scene, *, idler_applies_after: float | None, exchange_seconds: float = 0.0
) -> list[float]:
    """Rounds of a second in which nobody counts on the idler; how long each took, and who then plans it."""
    seconds: list[float] = []
    while IDLER not in participants(scene) and len(seconds) < 12:
        began, number = scene.now, scene.round.number
        scene.wait(1)
        in_no_time(scene, *HONEST)
        scene.wait(exchange_seconds)
        scene.commit(*HONEST)
        scene.apply(digest_of(f"after {number}"), *HONEST, round=number)
        if idler_applies_after is not None:
            scene.wait(idler_applies_after)
            scene.apply(digest_of(f"after {number}"), IDLER, round=number)
        elif scene.round.number == number:
            assert "waiting for idler, left out until now" in explain(scene.state, scene.now)
            scene.wait_until(scene.round.returns_until or scene.now)
        seconds.append(scene.now - began)
    return seconds


def test_who_was_left_out_is_waited_for_until_it_holds_the_state_that_the_next_plan_builds_on() -> (
    None
):
    scene = swarm()
    a_round(scene, *HONEST)
    assert IDLER not in participants(scene)
    assert len(left_out(scene, idler_applies_after=0.4)) == 1
    assert IDLER in participants(scene)


def test_who_never_comes_back_though_it_is_due_costs_a_second_more_and_more_rarely() -> None:
    scene = swarm()
    a_round(scene, *HONEST)
    seconds = left_out(scene, idler_applies_after=None)
    assert max(seconds) <= 1 + BRIEF_TRIAL_SECONDS
    assert sum(each > 1 for each in seconds) <= 3
    assert scene.member(IDLER).standing.num_faults <= 4


@pytest.mark.parametrize(
    ("work", "num_faults", "comes_back"),
    [(None, 6, True), (Work(), PATIENT_TRIALS, True), (Work(), PATIENT_TRIALS + 1, False)],
)
def test_who_was_left_out_has_as_long_as_an_exchange_to_fetch_what_others_were_sent(
    work: Work | None, num_faults: int, comes_back: bool
) -> None:
    """A large model over a slow link: its results take the others as long, before they commit."""
    scene = swarm()
    a_round(scene, *HONEST)
    member = scene.member(IDLER)
    assert waiting_in_words(member, 3).startswith("waits until round 4: it was too late in round 2")
    standing = replace(member.standing, num_faults=num_faults)
    scene.change(IDLER, standing=standing, work=member.work if work is None else work)
    seconds = left_out(scene, idler_applies_after=25, exchange_seconds=20)
    assert (len(seconds) == 1) == comes_back
    assert (IDLER in participants(scene)) == comes_back


def test_who_does_not_come_back_after_a_long_exchange_costs_others_as_much_and_more_rarely() -> (
    None
):
    scene = swarm()
    a_round(scene, *HONEST)
    seconds = left_out(scene, idler_applies_after=None, exchange_seconds=20)
    usual = 1 + 20
    assert max(seconds) <= usual + TRIAL_MARGIN * 20
    assert sum(each > usual for each in seconds) <= 3
