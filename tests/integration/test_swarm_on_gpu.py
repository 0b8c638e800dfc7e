"""Swarms of real processes in which one node trains on a GPU and another on the CPU.

Left out where CUDA shows no GPU, so also in CI.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from node.kept import kept_model
from protocol.files.durable import toml_of
from protocol.run.models import FIRST_WEIGHTS
from tests.integration.own_loops_scene import Scene, assert_holds
from tests.integration.test_any_model_swarm import DIGITS, EXAMPLES, RESIDUAL, RULES, TRANSFORMERS
from tests.integration.typed_commands import Swarm, atoll, done
from tests.transformers_configs import CONFIGS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA shows no GPU here")

LORA = {**TRANSFORMERS, "lora": {"rank": 4}}
RUNS: dict[str, dict[str, Any]] = {
    "digits": DIGITS,
    "batch norm": {**RESIDUAL, "run": RULES["run"], "evaluation": RULES["evaluation"]},
    "llama": TRANSFORMERS,
    "lora": LORA,
}
LOOPS = {
    "plain": ("device=cuda", "evaluates=yes"),
    "bf16": ("device=cuda", "dtype=bfloat16"),
    "fp16 with a scaler": ("device=cuda", "scaled=yes"),
    "compiled": ("device=cuda", "compiled=yes"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_gpu_and_a_cpu_end_with_the_same_bits(name: str, tmp_path: Path) -> None:
    source: Path = EXAMPLES
    options: tuple[str, ...] = ("--allow-function", "any-model", "--code", str(EXAMPLES))
    if name in ("llama", "lora"):
        source, options = tmp_path / "llama", ()
        AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(source)
    if name == "lora":
        options = ("--base", str(source))
    swarm = Swarm(tmp_path / "swarm", toml_of(RUNS[name]), init_options=("--from", source))
    try:
        invite = swarm.invite("--uses", "2")
        homes = [swarm.join(device, invite) for device in ("cuda", "cpu")]
        first = swarm.home / FIRST_WEIGHTS
        weights = ("--weights", str(first)) if first.exists() else ()
        nodes = [
            swarm.start_node("cuda", "--device", "cuda", *weights, *options),
            swarm.start_node("cpu", "--device", "cpu", *options),
        ]
        memories = [node.shared_memory() for node in nodes]
        for node, memory in zip(nodes, memories, strict=True):
            node.ends(memory)
        for node, device in zip(nodes, ("cuda:0", "cpu"), strict=True):
            assert f"on={device}" in node.log, node.log
        losses = [told.loss for told in swarm.status().run.held_out_losses]
        assert losses[-1] < losses[0], losses
        told = swarm.nodes()
        assert all(told[name].committed_tokens > 0 for name in ("cuda", "cpu"))
        models = [kept_model(home) for home in homes]
        assert models[0].outer_digest == models[1].outer_digest
        assert models[0].round == 2
    finally:
        swarm.end()


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_one_s_own_trains_on_a_gpu_beside_ranks_on_it(name: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, run={"name": "loops", "rounds": 4, "min_nodes": 2})
    try:
        scene.swarm.start_node("ranks", "--device", "cuda")
        scene.swarm.start_node("loop", "--loop")
        loop = scene.start_loop("own", *LOOPS[name])
        assert loop.ends() == 0, loop.log
        scene.agree()
        assert_holds(tmp_path / "own.pt", scene.homes["loop"])
        tokens = scene.tokens()
        assert tokens["ranks"] > 0 and tokens["loop"] == len(scene.told("own")) * 4 * 32
        losses = [told.loss for told in scene.run().held_out_losses]
        assert losses[-1] < losses[0], losses
        assert "Traceback" not in done(atoll("logs", scene.homes["loop"]))
    finally:
        scene.end()
