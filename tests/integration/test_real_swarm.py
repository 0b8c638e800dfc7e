"""A swarm as people run it: real processes from the first command to the exported model."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.kept import kept_model
from node.machine.hardware import congestion_control
from protocol.terminal.console import printable
from tests.integration.typed_commands import Running, Swarm, atoll, done, refused, typed_here, until
from tests.tiny_runs import tiny_text
from tests.unit.test_export import load_exported

RUN = tiny_text(
    run={"name": "real", "rounds": 4, "min_nodes": 2},
    # Rounds end at their deadline: none is over before the test has seen it.
    inner={"steps": 1_000_000},
    deadlines={"train": 3, "contribute": 20, "commit": 30},
    evaluation={"every_rounds": 2, "prompts": ["def ", "class "], "prompt_tokens": 20},
)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path / "swarm", RUN, is_typed=True)
    yield swarm
    swarm.end()


def asked(swarm: Swarm, command: str) -> Any:
    return json.loads(done(atoll(command, "--json", "--dir", swarm.home)))


def test_a_swarm_trains_a_model_though_one_leaves_and_another_joins_and_a_rank_dies(
    swarm: Swarm,
) -> None:
    invite = swarm.invite("--uses", "3")
    homes = {name: swarm.join(name, invite) for name in ("stays", "leaves", "joins")}
    stays, leaves = swarm.start_node("stays", "--ranks", "2"), swarm.start_node("leaves")
    swarm.coordinator.says("round opened", times=2)
    memory, memory_of_leaves = stays.shared_memory(), leaves.shared_memory()
    assert "it has left" in done(atoll("node", "drain", "--dir", homes["leaves"]))
    leaves.ends(memory_of_leaves, seconds=1)
    # For when it comes back. Which round it is depends on how long the command took to start.
    kept = {checkpoint.name for checkpoint in (homes["leaves"] / "inner").iterdir()}
    assert kept - {"round-1"}, "its last round is not kept"
    assert asked(swarm, "rounds")[0]["num_contributors"] == 2  # what it trained last counts
    refused(typed_here("node", "drain", "--dir", homes["leaves"]), 71, "no node runs in ")

    joins = swarm.start_node("joins")
    joins.says("attached")
    memory_of_joins = joins.shared_memory()
    swarm.coordinator.says("round opened", times=3)
    assert not any(node.has_torch() for node in (stays, joins))
    until(lambda: len(stays.ranks()) >= 2, "two ranks")
    os.kill(stays.ranks()[1], signal.SIGKILL)
    stays.says("inner optimizer goes on from its checkpoint")
    stays.says("ranks started again")
    stays.ends(memory)
    joins.ends(memory_of_joins)
    assert "run finished" in stays.log and "run finished" in joins.log
    assert "re-warm-up" in joins.log and "re-warm-up" not in stays.log + leaves.log

    # Two ranks wait for each other and say how long; bytes travel while ranks do nothing.
    assert re.search(r"local_communication=(?!0\.0%)\d", stays.log)
    assert "local_communication=0.0%" in joins.log
    assert re.search(r"exchange=(?!0\.0%)\d", stays.log)

    status, nodes, rounds = (asked(swarm, command) for command in ("status", "nodes", "rounds"))
    run = status["run"]
    assert (run["phase"], run["committed_round"], run["open_round"]) == ("finished", 4, 0)
    assert run["digests_agree"] and run["outer_digest_round"] == 4
    assert [measured["round"] for measured in run["held_out_losses"]] == [0, 2, 4]
    for node in (*nodes, *status["nodes"]):
        assert node.pop("silent_seconds") >= 0  # time goes on between the two
    assert nodes == status["nodes"]
    by_name = {node["node_name"]: node for node in nodes}
    assert {name: node["state"] for name, node in by_name.items()} == dict.fromkeys(homes, "left")
    assert {name: node["num_ranks"] for name, node in by_name.items()} == {
        "stays": 2,
        "leaves": 1,
        "joins": 1,
    }
    beat = by_name["stays"]["heartbeat"]
    assert beat["mesh"] == "replicate 2"
    assert beat.get("congestion_control", "") == (congestion_control() or "")
    assert [closed["round"] for closed in rounds] == [4, 3, 2, 1]
    assert rounds[-1]["num_contributors"] == rounds[0]["num_contributors"] == 2
    assert sum(closed["tokens"] for closed in rounds) == run["token_clock"]
    assert sum(node["committed_tokens"] for node in nodes) == run["token_clock"]
    assert all(node["committed_tokens"] > 0 for node in nodes)

    # One digest, however it is asked for, and it is that of the very weights.
    digest = run["outer_digest"]
    assert rounds[0]["outer_digest"] == digest
    for name in ("stays", "joins"):
        heartbeat = by_name[name]["heartbeat"]
        assert (heartbeat["outer_round"], heartbeat["outer_digest"]) == (4, digest)
    model = kept_model(homes["stays"])
    assert (model.round, model.outer_digest.hex()) == (4, digest)

    # What the final model wrote beside the ranks is what it writes wherever it is.
    assert {0, 4} <= set(run["written_rounds"]) <= {0, 2, 4}  # who left may have been asked for 2
    shown = json.loads(done(atoll("rounds", "show", "4", "--json", "--dir", swarm.home)))["written"]
    text = shown["texts"][0]
    again = done(
        atoll(
            *("sample", "--dir", homes["stays"], "--prompt", text["prompt"]),
            *("--tokens", "20", "--temperature", "0.7", "--seed", "1"),
        )
    )
    assert printable(again.removesuffix("\n"), most=999) == text["prompt"] + text["text"]
    assert [text["prompt"] for text in shown["texts"]] == ["def ", "class "]

    out = swarm.folder / "model"
    assert digest[:12] in done(atoll("export", out, "--dir", homes["joins"]))
    spec, parameters = load_exported(out)
    assert spec == model.spec.model
    assert np.array_equal(parameters, model.parameters)
    assert json.loads((out / "atoll.json").read_text())["outer_digest"] == digest
    listed = done(typed_here("node", "snapshots", "--json", "--dir", homes["joins"]))
    newest = json.loads(listed)[0]
    assert (newest["round"], newest["digest"]) == (4, digest)
    assert newest["held_out"] == run["held_out_losses"][-1]["loss"]
    refused(typed_here("export", out, "--dir", homes["stays"]), 73, f"{out} exists already")
    swarm.coordinator.stop(signal.SIGTERM)


def test_the_demo_trains_a_model_to_one_state_and_leaves_nothing_running(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    demo = Running("demo", "--nodes", "2", "--rounds", "2", "--out", out)
    try:
        demo.ends(set())
        assert "the same on node-1, node-2" in demo.log
        assert f"model         {out / 'model'}" in demo.log
    finally:
        demo.clean_up()
    one, other = (kept_model(out / name) for name in ("node-1", "node-2"))
    assert one.round == other.round == 2 and one.outer_digest == other.outer_digest
    _, parameters = load_exported(out / "model")
    assert np.array_equal(parameters, one.parameters)
    refused(typed_here("demo", "--out", out), 73, f"{out} exists")
