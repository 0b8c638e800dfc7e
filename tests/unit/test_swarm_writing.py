"""Which model writes on from the run's prompts, on whose node, and which texts are kept."""

from dataclasses import replace

import pytest

from coordinator.swarm.books import without_evaluations_since
from coordinator.swarm.events import Reported, Tell
from coordinator.swarm.explain import explain
from coordinator.swarm.state import KEPT_WRITTEN, Written
from protocol.wire.messages import EvaluationAsked, RunFinished, Wrote
from protocol.wire.rounds import NodeId
from tests.unit.swarm_scene import Scene, asked_of, of_kind

NODES = ("node-a", "node-b")


def scene_of(*, rounds: int = 5, every: int = 1, watches_loss: bool = False) -> Scene:
    scene = Scene(min_nodes=2, rounds=rounds, evaluate_every=every)
    scene.amend(num_prompts=2, watches_loss=watches_loss)
    return scene


def write(scene: Scene, name: str, round: int, *texts: str, why_not: str = "") -> None:
    report = Wrote(texts=texts, why_not=why_not)
    scene.do(Reported(node_id=NodeId(name), round=round, report=report))


def writers(scene: Scene) -> list[tuple[int, str]]:
    return [
        (told.message.round, node_id)
        for told in scene.log
        if isinstance(told, Tell) and isinstance(told.message, EvaluationAsked)
        if told.message.writes
        for node_id in told.to or ()
    ]


def test_of_those_who_evaluate_one_has_the_model_write_another_one_each_time() -> None:
    scene = scene_of(watches_loss=True)
    scene.attach(*NODES)
    scene.run_round(*NODES)
    scene.run_round(*NODES)
    assert writers(scene) == [(0, "node-a"), (1, "node-b"), (2, "node-a")]
    assert sorted(asked_of(scene.log, EvaluationAsked)) == ["node-a"] * 3 + ["node-b"] * 3


def test_a_run_without_prompts_asks_nobody_to_write() -> None:
    scene = Scene(min_nodes=2, evaluate_every=1)
    scene.attach(*NODES)
    scene.run_round(*NODES)
    assert of_kind(scene.log, EvaluationAsked) and not writers(scene)
    write(scene, "node-a", 0, "unasked")
    assert scene.state.written == ()


def test_a_text_that_comes_rounds_later_is_kept_with_its_round_and_one_nobody_asked_for_is_not() -> (
    None
):
    scene = scene_of()
    scene.attach(*NODES)
    scene.run_round(*NODES)
    scene.run_round(*NODES)
    write(scene, "node-b", 1, "one", "two")
    write(scene, "node-b", 1, "again", "and again")
    write(scene, "node-b", 0, "not", "asked")
    write(scene, "node-a", 0, "first", "model")
    assert [(w.round, w.node_id, w.texts) for w in scene.state.written] == [
        (0, "node-a", ("first", "model")),
        (1, "node-b", ("one", "two")),
    ]


@pytest.mark.parametrize(
    ("texts", "why_not", "kept"),
    [
        (
            (),
            "the run's tokenizer is not on this machine",
            "the run's tokenizer is not on this machine",
        ),
        (("one",), "", "it gave 1 texts for 2 prompts"),
        (("one", "two", "three"), "", "it gave 3 texts for 2 prompts"),
    ],
)
def test_why_nothing_was_written_is_kept_instead(
    texts: tuple[str, ...], why_not: str, kept: str
) -> None:
    scene = scene_of()
    scene.attach(*NODES)
    write(scene, "node-a", 0, *texts, why_not=why_not)
    assert [(w.texts, w.why_not) for w in scene.state.written] == [((), kept)]


def test_texts_of_a_long_run_are_bounded_and_lie_further_apart_the_older_they_are() -> None:
    num_rounds = 10 * KEPT_WRITTEN
    scene = scene_of(rounds=num_rounds + 1)
    scene.attach(*NODES)
    for _ in range(num_rounds):
        scene.run_round(*NODES)
        number, name = writers(scene)[-1]
        write(scene, name, number, "one", "two")
    kept = [w.round for w in scene.state.written]
    assert len(kept) <= KEPT_WRITTEN and kept == sorted(kept)
    assert kept[0] == 1 and kept[-1] == num_rounds
    assert kept[-10:] == [*range(num_rounds - 9, num_rounds + 1)]
    assert kept[1] - kept[0] > num_rounds / 26
    assert len(scene.state.writing) <= 4


def test_the_run_ends_when_its_last_model_has_written_or_its_time_is_up() -> None:
    for has_written in (True, False):
        scene = scene_of(rounds=1)
        scene.attach(*NODES)
        scene.run_round(*NODES)
        (number, name) = writers(scene)[-1]
        scene.evaluate(name, round=1)
        assert (number, scene.state.is_finished) == (1, False)
        assert f"waiting for the final model of {name} to write" in explain(scene.state, scene.now)
        if has_written:
            write(scene, name, 1, "one", "two")
            assert scene.state.written[-1].round == 1
        else:
            assert scene.state.end_waits_until is not None
            scene.wait_until(scene.state.end_waits_until)
        assert scene.state.is_finished and of_kind(scene.log, RunFinished)


def test_the_end_does_not_wait_for_a_writer_that_has_left() -> None:
    scene = scene_of(rounds=1)
    scene.attach(*NODES)
    scene.run_round(*NODES)
    (_, name) = writers(scene)[-1]
    scene.evaluate(name, round=1)
    scene.leave(name)
    assert scene.state.is_finished


def test_what_a_state_that_is_no_more_wrote_is_forgotten_and_not_taken() -> None:
    scene = scene_of()
    scene.attach(*NODES)
    write(scene, "node-a", 0, "one", "two")
    scene.run_round(*NODES)
    before = scene.state
    assert [one.round for one in before.writing] == [1]
    known = Written(round=1, node_id=NodeId("node-b"), texts=("three", "four"))
    gone = without_evaluations_since(replace(before, written=(*before.written, known)), 1)
    assert [one.round for one in gone.written] == [0] and gone.writing == ()
