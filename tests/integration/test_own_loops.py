"""Training loops of contributors' own in a swarm of real processes, beside ranks of the node's."""

import json
from pathlib import Path

import pytest
import torch

from node.kept import kept_model
from tests.integration.own_loops_scene import SECONDS, Scene, assert_holds
from tests.integration.typed_commands import atoll, done, until

RUN: dict[str, dict[str, object]] = {
    "run": {"name": "loops", "rounds": 4, "min_nodes": 2},
    "evaluation": {"every_rounds": 2},
}
SHORT = {"name": "loops", "rounds": 2, "min_nodes": 2}
# Rounds end at their deadline: none is over before the test has seen it.
SLOW = {
    "inner": {"steps": 1_000_000},
    "deadlines": {"train": 3, "contribute": 20, "commit": 30},
}


def test_a_loop_and_ranks_train_one_model_bit_by_bit_and_each_sample_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **RUN)
    try:
        _, node = scene.start_nodes()
        node.says("a training loop may come in")
        loop = scene.start_loop("plain", "evaluates=yes", "seed=5")
        node.says("a training loop is here")
        memory = node.shared_memory()
        assert loop.ends() == 0, loop.log
        assert "the run is finished" in loop.log
        node.ends(memory)
        logged = done(atoll("logs", scene.homes["loop"]))
        events = [json.loads(line) for line in (scene.homes["loop"] / "logs" / "loop.log").open()]
        assert [event["event"] for event in events] == [
            *("waiting for the swarm's next round", "trained", "trained", "trained", "trained"),
            "left the swarm",
        ]
        assert all(event["event"] in logged for event in events)
        assert not node.has_torch() and "the ledger counts its tokens" not in node.log
        scene.agree()
        assert_holds(tmp_path / "plain.pt", scene.homes["loop"])
        told = scene.told("plain")
        # Of the round after it asks as many as this machine's speed allows.
        assert [step["steps_left"] for step in told[:4]] == [4, 3, 2, 1] and told[4]["steps_left"]
        assert [step["is_replaced"] for step in told[:5]] == [False] * 4 + [True]
        progress = [step["progress"] for step in told]
        assert progress == sorted(progress) and 0.9 < progress[-1] <= 1
        numbers = [number for step in told for number in step["numbers"]]
        assert len(set(numbers)) == len(numbers)
        assert scene.tokens()["loop"] == len(told) * 4 * 32
        assert [measured.round for measured in scene.run().held_out_losses] == [0, 2, 4]
    finally:
        scene.end()


@pytest.mark.nightly
def test_a_loop_that_ends_or_is_killed_or_hangs_is_replaced_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    """One swarm for all three: most of what they cost is its start."""
    scene = Scene(tmp_path, **SLOW, run={"name": "loops", "rounds": 10, "min_nodes": 2})
    try:
        settings = scene.homes["loop"] / "node.toml"
        text = settings.read_text()
        settings.write_text(text.replace("hang_seconds = 120", "hang_seconds = 2"))
        _, node = scene.start_nodes()

        # One that ends by itself contributes what it has trained of the round.
        short = scene.start_loop("short", "step_seconds=0.1", "ends_after=7")
        assert short.ends() == 0, short.log
        node.says("it has left")
        assert "inner_steps_lost=0" in node.log
        scene.waits_for_loop()
        assert scene.tokens()["loop"] == 7 * 4 * 32

        # What a killed one has trained is lost with it, and the node says how much.
        killed = scene.start_loop("killed", "step_seconds=0.05")
        until(lambda: len(scene.told("killed")) > 10, killed.log, seconds=SECONDS)
        killed.kill()
        node.says("the training loop is gone", times=2)
        node.says("inner_steps_lost=", times=2)
        scene.waits_for_loop()

        # One that stops calling step is found and said.
        hangs = scene.start_loop("hangs", "step_seconds=0.3", "hangs_after=8")
        hangs.says("the loop hangs")
        node.says("gave no sign of life for")
        assert "raise hang_seconds" in node.log
        scene.waits_for_loop()
        assert hangs.process.poll() is None, "a person's program is not ours to end"
        scene.finish("another")  # from the global parameters
    finally:
        scene.end()


@pytest.mark.nightly
def test_a_loop_outlives_its_node_and_goes_on_with_the_next_and_hears_of_an_amendment(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, **SLOW, run={**SHORT, "rounds": 5})
    try:
        _, node = scene.start_nodes()
        loop = scene.start_loop("stays", "step_seconds=0.05")
        until(lambda: len(scene.told("stays")) > 10, loop.log, seconds=SECONDS)
        amend = ("run", "amend", "--dir", scene.swarm.home)
        said = done(atoll(*amend, "inner.learning_rate=0.002"))
        assert "loop trains by a loop of its owner, which takes this over only by swarm." in said
        assert "of its owner" not in done(atoll(*amend, "deadlines.train=4"))
        node.process.kill()
        loop.says("the loop was cut off")
        again = scene.swarm.start_node("loop", "--loop")
        again.says("a training loop is here")
        assert loop.ends() == 0, loop.log
        log = (scene.homes["loop"] / "logs" / "loop.log").read_text()
        assert log.count("the run was amended: inner.learning_rate 0.01 -> 0.002.") == 1
        scene.agree()
        assert "training -" not in done(atoll("status", "--dir", scene.swarm.home))
        assert_holds(tmp_path / "stays.pt", scene.homes["loop"])
    finally:
        scene.end()


@pytest.mark.nightly
def test_a_loop_in_bf16_trains_ahead_while_bytes_travel_and_holds_the_rounded_state(
    tmp_path: Path,
) -> None:
    overlap = {"overlap": "keep"}
    scene = Scene(tmp_path, **RUN, exchange=overlap)
    try:
        _, node = scene.start_nodes()
        loop = scene.start_loop("ahead", "dtype=bfloat16")
        assert loop.ends() == 0, loop.log
        scene.agree()
        tensors = torch.load(tmp_path / "ahead.pt")
        model = kept_model(scene.homes["loop"])
        for place in model.layout.places:
            values = model.parameters[place.offset : place.offset + place.num_elements]
            rounded = torch.from_numpy(values.copy()).bfloat16()
            assert torch.equal(tensors[place.name].flatten(), rounded)
        assert scene.tokens()["loop"] == len(scene.told("ahead")) * 4 * 32, (
            "also what it trained ahead"
        )
        assert "Traceback" not in node.log
    finally:
        scene.end()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["lookahead", "schedule-free"])
def test_of_loops_whose_optimizers_keep_weights_the_swarm_has_the_mean(
    tmp_path: Path, kind: str
) -> None:
    """In an exchange that neither rounds nor overshoots, whatever the optimizer of each."""
    plain: dict[str, dict[str, object]] = {
        "outer": {"optimizer": "sgd", "learning_rate": 1.0, "screening": False, "audit": 0.0},
        "exchange": {"uplink": "fp32", "downlink": "fp32"},
    }
    scene = Scene(tmp_path, "mine", "theirs", **RUN, **plain)
    try:
        for name in ("mine", "theirs"):
            scene.swarm.start_node(name, "--loop").says("a training loop may come in")
        mine = scene.start_loop("keeps", f"optimizer={kind}", "rate=0.5", node="mine")
        theirs = scene.start_loop("plain", "seed=3", node="theirs")
        assert (mine.ends(), theirs.ends()) == (0, 0), mine.log + theirs.log
        scene.agree()
        for name, home in (("keeps", "mine"), ("plain", "theirs")):
            assert_holds(tmp_path / f"{name}.pt", scene.homes[home])
        told = [torch.load(tmp_path / f"{name}.adopted.pt") for name in ("keeps", "plain")]
        assert len(told[0]) == len(told[1]) == 4
        for ours, others in zip(*told, strict=True):
            (own, tokens, came), (other, more, also_came) = ours, others
            mean = (own * tokens + other * more) / (tokens + more)
            torch.testing.assert_close(came, mean, rtol=0, atol=1e-5)
            torch.testing.assert_close(came, also_came, rtol=0, atol=1e-5)
            assert (own - came).abs().max() > 1e-4, "they have trained apart"
    finally:
        scene.end()


@pytest.mark.nightly
def test_loops_whose_one_function_calls_other_helpers_are_named_by_status_and_once_in_the_log(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, "mine", "theirs", **RUN)
    try:
        for name in ("mine", "theirs"):
            scene.swarm.start_node(name, "--loop").says("a training loop may come in")
        in_nats = scene.start_loop("nats", "evaluates=yes", node="mine")
        in_bits = scene.start_loop("bits", "evaluates=yes", "in_bits=yes", node="theirs")
        assert (in_nats.ends(), in_bits.ends()) == (0, 0), in_nats.log + in_bits.log
        scene.agree()
        words = scene.run().differing
        assert words.startswith("mine finds ") and " and theirs " in words, scene.run()
        log = scene.swarm.coordinator.log
        assert log.count("held-out losses of one state differ") == 1, log
        assert "mine finds" in done(atoll("status", "--dir", scene.swarm.home))
    finally:
        scene.end()
