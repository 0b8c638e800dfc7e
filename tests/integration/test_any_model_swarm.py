"""Swarms of models that Atoll does not know: a run's functions, and a model of transformers."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from node.kept import kept_model
from protocol.files.durable import toml_of
from protocol.run.models import FIRST_WEIGHTS
from tests.integration.own_loops_scene import Loop
from tests.integration.typed_commands import ROOT, Swarm
from tests.transformers_configs import CONFIGS

EXAMPLES = ROOT / "examples" / "functions"
RULES: dict[str, dict[str, Any]] = {
    "run": {"name": "any-model", "rounds": 2, "min_nodes": 2},
    "inner": {"steps": 5, "batch": 8, "learning_rate": 1e-2},
    "evaluation": {"every_rounds": 1, "samples": 64},
}
RATINGS = {
    **RULES,
    "model": {"source": "function", "function": "recommend:model"},
    "data": {"source": "function", "function": "recommend:data"},
    "inner": {**RULES["inner"], "sparse": True},
}
DIGITS = {
    **RULES,
    "model": {"source": "function", "function": "vision:model"},
    "data": {"source": "function", "function": "vision:data"},
}
TRANSFORMERS = {**RULES, "model": {"source": "transformers", "context": 16}}

Start = Callable[[dict[str, dict[str, Any]], Path], Swarm]


@pytest.fixture
def swarm_of(tmp_path: Path) -> Iterator[Start]:
    """Makes a run as people do; that describes it."""
    made: list[Swarm] = []

    def start(tables: dict[str, dict[str, Any]], source: Path) -> Swarm:
        options = ("--from", source)
        made.append(Swarm(tmp_path / "swarm", toml_of(tables), init_options=options))
        return made[0]

    yield start
    for swarm in made:
        swarm.end()


def trained_alike(swarm: Swarm, invite: str, *options: str, first: tuple[str, ...]) -> None:
    """Two nodes, one with another mesh, end with the same bits."""
    homes = [swarm.join(name, invite) for name in ("one", "other")]
    weights = str(swarm.home / FIRST_WEIGHTS)
    one = swarm.start_node("one", "--weights", weights, *first, *options)
    other = swarm.start_node("other", *options)
    memories = one.shared_memory(), other.shared_memory()
    one.ends(memories[0])
    other.ends(memories[1])
    models = [kept_model(home) for home in homes]
    assert models[0].round == models[1].round == 2
    assert models[0].outer_digest == models[1].outer_digest


def test_functions_train_where_their_contributor_agrees_and_nowhere_else(
    swarm_of: Start,
) -> None:
    swarm = swarm_of(RATINGS, EXAMPLES)
    invite = swarm.invite("--uses", "3")
    swarm.join("careful", invite)
    swarm.start_node("careful").ends_with(77, "trains with code of its own", "allow_functions")
    allowed = ("--allow-function", "any-model", "--code", str(EXAMPLES))
    trained_alike(swarm, invite, *allowed, first=("--shard", "2"))


@pytest.mark.nightly
def test_a_model_of_transformers_trains_in_a_swarm_and_is_refused_where_it_cannot(
    swarm_of: Start, tmp_path: Path
) -> None:
    CONFIGS["gpt2"].save_pretrained(tmp_path / "gpt2")
    swarm = swarm_of(TRANSFORMERS, tmp_path / "gpt2")
    invite = swarm.invite("--uses", "3")
    swarm.join("refused", invite)
    swarm.start_node("refused", "--tp", "2").ends_with(78, "which GPT2LMHeadModel has not")
    trained_alike(swarm, invite, first=("--replicate", "2"))


@pytest.mark.parametrize("kind", ["a function", "transformers"])
@pytest.mark.nightly
def test_a_node_with_a_pipeline_ends_with_the_bits_of_one_without(
    kind: str, swarm_of: Start, tmp_path: Path
) -> None:
    if kind == "transformers":
        CONFIGS["llama"].save_pretrained(tmp_path / "llama")
        swarm = swarm_of(TRANSFORMERS, tmp_path / "llama")
        options: tuple[str, ...] = ()
    else:
        swarm = swarm_of(DIGITS, EXAMPLES)
        options = ("--allow-function", "any-model", "--code", str(EXAMPLES))
    trained_alike(swarm, swarm.invite("--uses", "2"), *options, first=("--pp", "2"))


DIFFERING = """
import os

import torch
from torch.utils.data import TensorDataset


def model():
    return torch.nn.Linear(4, 1), lambda module, rows: (module(rows[0]) - rows[1]).square().mean()


def data():
    torch.manual_seed(int.from_bytes(os.urandom(4)))  # as what a folder lists, in its own order
    rows = torch.randn(400, 4)
    dataset = TensorDataset(rows, rows.sum(dim=1, keepdim=True))
    return torch.utils.data.random_split(dataset, (300, 100))
"""


@pytest.mark.nightly
def test_a_node_whose_function_gives_other_samples_says_so_and_the_status_shows_it(
    swarm_of: Start, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "net.py").write_text(DIFFERING)
    run = {
        **RULES,
        "run": {"name": "any-model", "rounds": 1000, "min_nodes": 2},
        "model": {"source": "function", "function": "net:model"},
        "data": {"source": "function", "function": "net:data"},
    }
    swarm = swarm_of(run, code)
    invite = swarm.invite("--uses", "2")
    allowed = ("--allow-function", "any-model", "--code", str(code))
    for name in ("one", "other"):
        swarm.join(name, invite)
    one = swarm.start_node("one", "--weights", str(swarm.home / FIRST_WEIGHTS), *allowed)
    one.says("attached")
    assert "other data" not in one.log
    other = swarm.start_node("other", *allowed)
    other.says("other nodes train on other data")
    assert "nodes=one" in other.log and "let net:data give the same samples" in other.log
    swarm.coordinator.says("nodes train on different data")
    told = {name: node.same_corpus for name, node in swarm.nodes().items()}
    assert sorted(told.values()) == [False, True]


@pytest.mark.nightly
def test_ranks_of_two_meshes_train_and_measure_a_model_with_batch_norm(swarm_of: Start) -> None:
    run = {**RESIDUAL, "run": RULES["run"], "evaluation": RULES["evaluation"]}
    swarm = swarm_of(run, EXAMPLES)
    allowed = ("--allow-function", "any-model", "--code", str(EXAMPLES))
    trained_alike(swarm, swarm.invite("--uses", "2"), *allowed, first=("--replicate", "2"))
    losses = [told.loss for told in swarm.status().run.held_out_losses]
    assert len(losses) == 3 and losses[-1] < 0.5 * losses[0], losses


LOOP = f"""
import sys

import torch

import atoll

sys.path.insert(0, {str(EXAMPLES)!r})
import recommend  # the contributor's own choice: nothing of the run makes it import this

training, _ = recommend.data()
model, loss_of = recommend.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with atoll.join(model, optimizer, folder=sys.argv[1]) as swarm:
    while not swarm.is_over:
        numbers = torch.randint(len(training), (8,)).tolist()
        batch = torch.utils.data.default_collate([training[number] for number in numbers])
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        swarm.step(tokens=8, loss=loss)
"""


@pytest.mark.nightly
def test_a_loop_of_one_s_own_trains_any_model_and_its_node_runs_no_code_of_the_run(
    swarm_of: Start, tmp_path: Path
) -> None:
    swarm = swarm_of(RATINGS, EXAMPLES)
    invite = swarm.invite("--uses", "2")
    homes = [swarm.join(name, invite) for name in ("one", "loop")]
    allowed = ("--allow-function", "any-model", "--code", str(EXAMPLES))
    one = swarm.start_node("one", "--weights", str(swarm.home / FIRST_WEIGHTS), *allowed)
    node = swarm.start_node("loop", "--loop")
    program = tmp_path / "loop.py"
    program.write_text(LOOP)
    loop = Loop(program, homes[1], log=tmp_path / "log")
    try:
        memories = one.shared_memory(), node.shared_memory()
        assert loop.ends() == 0, loop.log
        one.ends(memories[0])
        node.ends(memories[1])
        models = [kept_model(home) for home in homes]
        assert models[0].outer_digest == models[1].outer_digest
        assert swarm.nodes()["loop"].committed_tokens > 0 and not node.has_torch()
    finally:
        loop.kill()


RESIDUAL: dict[str, dict[str, Any]] = {
    **DIGITS,
    "run": {"name": "any-model", "rounds": 6, "min_nodes": 2},
    "model": {
        "source": "function",
        "function": "vision:model",
        "arguments": {"norm": "batch"},
    },
    "inner": {"steps": 20, "batch": 16, "learning_rate": 3e-3, "schedule": "constant"},
    "evaluation": {"every_rounds": 6, "samples": 360},
}

BATCH_NORM_LOOP = f"""
import sys

import torch
from torch.utils.data import default_collate

import atoll

sys.path.insert(0, {str(EXAMPLES)!r})
import vision

training, held_out = vision.data()
model, loss_of, accuracy, _ = vision.model(norm="batch")
optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)


def batch_of(data, numbers):
    return default_collate([data[number] for number in numbers])


def see_some_batches():
    for first in range(0, 1024, 64):
        model(batch_of(training, range(first, first + 64))[0])


@torch.no_grad()
def evaluate():
    model.eval()
    loss = loss_of(model, batch_of(held_out, range(len(held_out))))
    model.train()
    return loss.item(), len(held_out)


torch.manual_seed(int(sys.argv[2]))
with atoll.join(
    model, optimizer, folder=sys.argv[1], evaluate=evaluate, statistics=see_some_batches
) as swarm:
    while not swarm.is_over:
        for group in optimizer.param_groups:
            group["lr"] = swarm.learning_rate
        loss = loss_of(model, batch_of(training, torch.randint(len(training), (16,)).tolist()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        swarm.step(tokens=16, loss=loss)
torch.save(model.state_dict(), sys.argv[3])
"""


@pytest.mark.nightly
def test_a_residual_network_with_batch_norm_is_as_good_in_a_swarm_s_loops_as_alone(
    swarm_of: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = swarm_of(RESIDUAL, EXAMPLES)
    invite = swarm.invite("--uses", "2")
    homes = [swarm.join(name, invite) for name in ("one", "other")]
    weights = ("--weights", str(swarm.home / FIRST_WEIGHTS))
    nodes = [swarm.start_node("one", "--loop", *weights), swarm.start_node("other", "--loop")]
    program = tmp_path / "loop.py"
    program.write_text(BATCH_NORM_LOOP)
    loops = [
        Loop(program, home, str(seed), tmp_path / f"{seed}.pt", log=tmp_path / f"{seed}.log")
        for seed, home in enumerate(homes)
    ]
    try:
        memories = [node.shared_memory() for node in nodes]
        for loop in loops:
            assert loop.ends() == 0, loop.log
        for node, memory in zip(nodes, memories, strict=True):
            node.ends(memory)
        told = swarm.status().run.held_out_losses[-1]
    finally:
        for loop in loops:
            loop.kill()

    monkeypatch.syspath_prepend(EXAMPLES)
    vision = importlib.import_module("vision")
    training, held_out = vision.data()
    everything = default_collate([held_out[number] for number in range(len(held_out))])
    alone, loss_of, accuracy, _ = vision.model(norm="batch")
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=3e-3)
    for _ in range(2 * 6 * 20):
        numbers = torch.randint(len(training), (16,)).tolist()
        loss_of(alone, default_collate([training[number] for number in numbers])).backward()
        optimizer.step()
        optimizer.zero_grad()
    measured = {"alone": accuracy(alone.eval(), everything).item()}
    for seed in (0, 1):
        kept, *_ = vision.model(norm="batch")
        kept.load_state_dict(torch.load(tmp_path / f"{seed}.pt"))
        measured[f"loop {seed}"] = accuracy(kept.eval(), everything).item()
        loss = loss_of(kept, everything).item()
        assert told.round == 6 and loss == pytest.approx(told.loss, rel=0.05)
    assert min(measured.values()) > 0.9, measured
    assert min(measured.values()) > measured["alone"] - 0.05, measured
    # The statistics that a loop's own weights have left are none of the global ones'.
    kept[0][1].reset_running_stats()
    assert accuracy(kept, everything).item() < measured["loop 1"] - 0.05, "a test that can fail"
