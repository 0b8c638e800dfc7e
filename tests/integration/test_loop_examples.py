"""The examples as people run them: each is an island of a swarm to its end."""

import ast
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from node.island.models.decoder_modules import Decoder
from tests.integration.own_loops_scene import Scene
from tests.integration.typed_commands import ROOT
from tests.tiny_runs import tiny

EXAMPLES = ROOT / "examples"
PROGRAMS = ("plain_torch.py", "torchrun_fsdp2.py", "transformers_trainer.py")
# What `atoll init` makes, and whose model the examples bring.
TEMPLATE = tomllib.loads((ROOT / "coordinator" / "run_template.toml").read_text())
RUN: dict[str, dict[str, Any]] = {
    "run": {"name": "examples", "rounds": 2, "min_nodes": 2},
    "model": TEMPLATE["model"],
    "inner": {"steps": 4, "batch": 8},
    "evaluation": {"every_rounds": 2},
}


# It listens on all addresses: in a network of its own, which sockets of Unix do not mind.
TORCHRUN = (
    *("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"'),
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--master-addr", "127.0.0.1", "--master-port", "29500"),
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text(" ".join(str(i * i) for i in range(20_000)))
    return path


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_brings_the_model_of_a_run_that_init_makes(name: str) -> None:
    program = ast.parse((EXAMPLES / name).read_text())
    (config,) = (
        node
        for node in ast.walk(program)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Qwen3Config"
    )
    code = compile(ast.Expression(config), name, "eval")
    model = Qwen3ForCausalLM(eval(code, {"Qwen3Config": Qwen3Config, "CONTEXT": 128}))
    spec = tiny(**RUN)
    ranks = Decoder(spec.decoder)
    ranks.load_state_dict(dict(model.named_parameters()))
    tokens = torch.arange(32)[None]
    torch.testing.assert_close(model(tokens).logits, ranks(tokens))


@pytest.mark.nightly
def test_the_three_examples_train_one_model_together(tmp_path: Path, text: Path) -> None:
    names = ("plain", "fsdp2", "trainer")
    scene = Scene(tmp_path, *names, **RUN | {"run": {**RUN["run"], "min_nodes": 3}})
    try:
        nodes = {name: scene.swarm.start_node(name, "--loop") for name in names}
        for node in nodes.values():
            node.says("a training loop may come in")
        commands = {
            "plain": ("plain_torch.py",),
            "fsdp2": ("torchrun_fsdp2.py",),
            "trainer": ("transformers_trainer.py",),
        }
        loops = []
        for name, (program,) in commands.items():
            command = (EXAMPLES / program, scene.homes[name], text)
            through = TORCHRUN if name == "fsdp2" else ()
            loops.append(scene.program(*command, name=name, through=through))
        for loop in loops:
            assert loop.ends() == 0, "\n".join(each.log for each in loops)
        assert "ranks=2" in nodes["fsdp2"].log
        assert all(tokens > 0 for tokens in scene.tokens().values())
        scene.agree()
        assert "the run is finished: all" in loops[0].log and "nats per byte here" in loops[0].log
        assert "'loss'" in loops[2].log
    finally:
        scene.end()


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_loop_with_an_invite_brings_a_node_of_its_own_which_ends_with_it(
    tmp_path: Path, is_killed: bool
) -> None:
    scene = Scene(tmp_path, "ranks", **{**RUN, "run": {**RUN["run"], "min_nodes": 2}})
    program = tmp_path / "atoll"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -P -m protocol.terminal.cli "$@"\n'
    )
    program.chmod(0o755)
    try:
        scene.swarm.start_node("ranks")
        if is_killed:
            first = scene.start_loop("killed", f"invite={scene.invite}", ATOLL_PROGRAM=str(program))
            first.says("the loop trains")
            first.kill()
        loop = scene.start_loop("invited", f"invite={scene.invite}", ATOLL_PROGRAM=str(program))
        assert loop.ends() == 0, loop.log
        log = (scene.homes["loop"] / "node.log").read_text()
        assert log.count("has stopped: ") == 1 + is_killed and "Traceback" not in log
        scene.agree()
    finally:
        scene.end()
