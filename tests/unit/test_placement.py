"""What a run, a machine and a contributor's choices make of a mesh, before anything is loaded."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.config import NodeSettings
from node.island.parallel.auto_mesh import DeviceKind, need_of, node_bytes
from node.island.parallel.mesh_shape import MeshShape
from node.machine import hardware
from node.machine.gpus import Gpu
from node.machine.hardware import Hardware
from node.machine.placement import (
    COMPILES_FROM,
    local_training_of,
    may_need_compiler,
    mesh_for,
    parted_batch,
    refuse_small_helper,
    refuse_what_cannot_work,
    system_bytes,
    training_bytes,
)
from protocol.errors import ConfigError
from protocol.run.models import DecoderModel, Description, TransformersModel
from protocol.run.run_spec import InnerSection, RunSpec

GIB = 1 << 30
DOCS = Path(__file__).resolve().parents[2] / "docs"
LARGE = RunSpec(
    model=DecoderModel(
        hidden_size=2048, num_layers=24, num_heads=16, num_kv_heads=8, ffn_size=5632, context=512
    ),
    inner=InnerSection(batch=8),
)  # 1.1 billion parameters


def settings_of(**changes: object) -> NodeSettings:
    return NodeSettings.model_validate({"name": "tested", **changes})


def hardware_of(*gpu_gib: float, memory_gib: float = 512) -> Hardware:
    gpus = tuple(Gpu(name="GPU", free_bytes=int(size * GIB)) for size in gpu_gib)
    return Hardware(memory_bytes=int(memory_gib * GIB), gpus=gpus)


@pytest.mark.parametrize(
    ("changes", "hardware", "words"),
    [
        ({"tp": 3}, hardware_of(), "tp = 3 does not divide [model] num_heads = 16"),
        ({"pp": 32}, hardware_of(), "32 stages (a stage on each rank), and it has 24 layers"),
        ({"shard": 3}, hardware_of(), "batch = 8 cannot be shared evenly by 3 ranks"),
        ({"pp": 16}, hardware_of(), "cannot cut 8 samples of a batch into microbatches"),
        ({"pp": 2, "schedule": "zbv", "shard": 2}, hardware_of(), "zero = 3 gives them back"),
        ({"pp": 2, "micro_batch": 2}, hardware_of(), "micro_batch = 2 does not go with pp = 2"),
        ({"tp": 4}, hardware_of(80, 80), "4 CUDA GPUs asked for, and this machine has 2"),
        ({"offload": True}, hardware_of(), "the ranks train on the CPU"),
        ({}, hardware_of(8), "a rank of the mesh 1 rank needs about 2"),
        ({"device": "cpu"}, hardware_of(memory_gib=60), "and has 31.6 GiB"),
        ({"mesh": "auto"}, hardware_of(1, 1), "do not fit 2 × 1.0 GiB"),
        ({"device": "cpu"}, hardware_of(memory_gib=8), "the outer state of 1,133,086,720"),
        ({}, hardware_of(80, memory_gib=8), "takes about 28.4 GiB of memory, and 8.0 GiB are free"),
        ({}, hardware_of(80, memory_gib=36), "and 8.4 GiB that its ranks keep there"),
        ({"offload": True}, hardware_of(16, memory_gib=50), "or set offload = false or"),
        ({"micro_batch": 1}, hardware_of(8), "or set micro_batch or offload = true in node.toml"),
        ({"micro_batch": 1, "compile": True}, hardware_of(8), "or set micro_batch in node.toml"),
        ({"offload": True}, hardware_of(1), "a rank of the mesh 1 rank needs about"),
    ],
)
def test_what_cannot_work_is_refused_with_the_numbers(
    changes: dict[str, object], hardware: Hardware, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_what_cannot_work(settings_of(**changes), LARGE, hardware)
    assert words in str(refused.value), str(refused.value)
    assert refused.value.exit_code == 78 and refused.value.next_step


@pytest.mark.parametrize(
    ("changes", "hardware"),
    [
        ({}, hardware_of(80)),
        ({"shard": 2}, hardware_of(24, 24)),
        ({"mesh": "auto"}, hardware_of(16, 16, 16, 16)),
        ({"device": "cpu", "tp": 2}, hardware_of(memory_gib=256)),
        ({"checkpoint_every_rounds": 0}, hardware_of(80, memory_gib=36)),
        ({"offload": True, "micro_batch": 1}, hardware_of(4)),
    ],
)
def test_what_may_work_is_not(changes: dict[str, object], hardware: Hardware) -> None:
    refuse_what_cannot_work(settings_of(**changes), LARGE, hardware)


def test_where_only_torch_can_tell_the_mesh_is_looked_at_all_the_same() -> None:
    unknown = Hardware(memory_bytes=512 * GIB, gpus=None)
    refuse_what_cannot_work(settings_of(tp=4), LARGE, unknown)
    with pytest.raises(ConfigError, match="tp = 3 does not divide"):
        refuse_what_cannot_work(settings_of(tp=3), LARGE, unknown)


def test_ranks_on_the_cpu_share_its_memory_with_the_node_itself() -> None:
    need = need_of(MeshShape(), LARGE)
    on_cpu, on_gpu = settings_of(device="cpu"), settings_of(device="cuda")
    together = need.num_bytes + need.moments + node_bytes(LARGE)
    mesh_for(on_cpu, LARGE, devices=("cpu",), bytes_per_rank=together)
    with pytest.raises(ConfigError, match="a rank of the mesh 1 rank needs about") as refused:
        mesh_for(on_cpu, LARGE, devices=("cpu",), bytes_per_rank=together - 1)
    assert "8.4 GiB copied for checkpoints" in refused.value.what
    assert "checkpoint_every_rounds = 0" in (refused.value.next_step or "")
    frugal = settings_of(device="cpu", checkpoint_every_rounds=0)
    mesh_for(frugal, LARGE, devices=("cpu",), bytes_per_rank=together - need.moments)
    mesh_for(on_gpu, LARGE, devices=("cuda:0",), bytes_per_rank=need.num_bytes)


def test_what_is_offloaded_counts_in_the_memory_where_it_is() -> None:
    plain, offloads = need_of(MeshShape(), LARGE), need_of(MeshShape(has_offload=True), LARGE)
    assert offloads.parameters + offloads.gradients < plain.parameters / 5 and not offloads.moments
    assert offloads.offloaded == plain.parameters + plain.gradients + plain.moments
    keeps_all = need_of(MeshShape(has_offload=True, zero=2), LARGE)
    assert keeps_all.parameters == plain.parameters, "between forward and backward"
    split = need_of(MeshShape(shard=2, has_offload=True), LARGE)
    assert split.offloaded == offloads.offloaded // 2
    devices, shape = ("cuda:0", "cuda:1"), MeshShape(shard=2)
    moments = need_of(shape, LARGE).moments
    assert system_bytes(settings_of(shard=2), LARGE, devices, shape) == 2 * moments
    without = settings_of(shard=2, checkpoint_every_rounds=0)
    assert system_bytes(without, LARGE, devices, shape) == 0
    offloading = replace(shape, has_offload=True)
    assert system_bytes(without, LARGE, devices, offloading) == 2 * split.offloaded
    assert system_bytes(settings_of(), LARGE, ("cpu",), MeshShape()) == 0


def test_what_a_rank_takes_is_told_where_it_is_known_before_it_starts() -> None:
    need, on_cpu = need_of(MeshShape(), LARGE), settings_of(device="cpu")
    assert training_bytes(on_cpu, LARGE, ("cpu",)) == need.num_bytes + need.moments
    lower = need_of(MeshShape(), LARGE, settings_of().local_training)
    assert training_bytes(settings_of(), LARGE, ("cuda:0",)) == lower.num_bytes
    assert training_bytes(settings_of(mesh="auto"), LARGE, ("cuda:0",)) is None
    assert training_bytes(settings_of(loop=True), LARGE, ("cpu",)) is None
    assert training_bytes(settings_of(), LARGE, ()) is None  # only torch can tell of them


def test_a_node_is_counted_with_what_its_processes_were_seen_to_take() -> None:
    """One rank that waits: it has next to nothing but its process."""
    lines = (DOCS / "results" / "node-start.jsonl").read_text().splitlines()[1:]
    most = max(json.loads(line)["starts"][0]["all_bytes"] for line in lines)
    counted = node_bytes(RunSpec()) + need_of(MeshShape(), RunSpec()).process
    assert most <= counted <= 1.05 * most


def test_what_cannot_work_is_found_without_torch() -> None:
    """Torch takes seconds to load, and a typing error should not. Nor does the daemon load it later."""
    program = (
        "import sys, node.app; assert 'numba' not in sys.modules\n"
        "import node.assembly, node.hosts.following, node.exchange.transport.p2pd as p2pd\n"
        "p2pd._load_hivemind()\n"
        "from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=Path.cwd()).returncode == 0


def test_a_helper_needs_room_for_the_state_and_for_all_contributions_of_a_round() -> None:
    """Three vectors, an error and two of a fragment are 24 bytes a parameter, int4 the rest."""
    many = LARGE.model_copy(update={"run": LARGE.run.model_copy(update={"min_nodes": 32})})
    refuse_small_helper(LARGE, hardware_of(memory_gib=32))
    with pytest.raises(ConfigError, match="the outer state of"):
        refuse_small_helper(LARGE, hardware_of(memory_gib=24))
    with pytest.raises(ConfigError, match="the outer state of"):
        refuse_small_helper(many, hardware_of(memory_gib=32))


def compiles(
    *, spec: RunSpec = LARGE, kind: DeviceKind = "cuda", there: bool = True, **settings: object
) -> bool:
    chosen = settings_of(**settings)
    return local_training_of(
        chosen, spec, chosen.mesh_shape, kind=kind, has_compilers=lambda: there
    ).compile


def test_layers_are_compiled_unasked_where_that_was_tried_and_pays() -> None:
    assert LARGE.num_parameters > COMPILES_FROM
    assert compiles() and compiles(shard=8) and compiles(pp=2, microbatches=4)
    assert not compiles(kind="cpu") and not compiles(kind="xpu")
    assert not compiles(there=False), "without Triton or a C compiler it would end the node"
    assert not compiles(spec=RunSpec()), "a small run is over before it has paid"
    assert not compiles(deterministic=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"tp": 2},
        {"shard": 2, "offload": True},
        {"pp": 2, "schedule": "zbv", "microbatches": 4},
        {"activation_checkpointing": "selective"},
    ],
    ids=str,
)
def test_auto_compiles_nothing_beside_what_it_does_not_go_with(settings: dict[str, Any]) -> None:
    assert not compiles(**settings)


def test_models_of_others_are_compiled_only_when_they_are_asked_for() -> None:
    model = TransformersModel(source="transformers", context=16)
    other = LARGE.model_copy(update={"model": model})
    assert not compiles(spec=other)
    assert compiles(spec=other, compile=True), "asked for is asked for"
    assert not compiles(compile=False)


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", lambda name: name == "clang" or None)
    monkeypatch.setattr(Path, "is_file", lambda path: path.name == "Python.h")
    assert hardware.has_compilers({})
    assert not hardware.has_compilers({"CC": "gcc"}), "torch takes what CC names"
    monkeypatch.setattr(hardware, "find_spec", lambda name: None)
    assert not hardware.has_compilers({})


@pytest.mark.parametrize(
    ("changes", "hardware", "may"),
    [
        ({"device": "cpu"}, hardware_of(), False),
        ({}, hardware_of(), False),
        ({"device": "cpu", "replicate": 2}, hardware_of(), True),
        ({"device": "cpu", "compile": True}, hardware_of(), True),
        ({"device": "cpu", "activation_checkpointing": "full"}, hardware_of(), True),
        (
            {"device": "cpu", "shard": 2, "hosts": 2, "island_listen": "10.0.0.1:7720"},
            hardware_of(),
            True,
        ),
        ({"device": "cuda"}, hardware_of(80), True),  # "auto" may compile there
        ({"device": "cuda", "compile": False}, hardware_of(80), False),
        ({"device": "xpu"}, hardware_of(), True),
    ],
)
def test_torchs_compiler_is_left_out_where_no_rank_needs_it(
    changes: dict[str, object], hardware: Hardware, may: bool
) -> None:
    """It takes a third of a second of a start; ranks that need it all the same import it themselves."""
    assert may_need_compiler(settings_of(**changes), hardware) is may


@pytest.mark.parametrize(
    ("changes", "together"),
    [
        ({}, 8),
        ({"micro_batch": 8}, 8),
        ({"micro_batch": 2}, 2),
        ({"replicate": 2}, 4),
        ({"shard": 4, "micro_batch": 1}, 1),
        ({"tp": 2}, 8),
        ({"pp": 2}, 4),
    ],
)
def test_a_node_says_that_it_parts_a_batch_whose_samples_the_loss_compares(
    changes: dict[str, int], together: int
) -> None:
    settings = settings_of(**changes)
    shape, local = settings.mesh_shape, settings.local_training
    assert not parted_batch(LARGE, shape, local)
    spec = LARGE.model_copy(update={"description": Description(compares_samples=True)})
    said = parted_batch(spec, shape, local)
    assert (f"here {together} of 8 go" in said) == bool(said) == (together < 8)
