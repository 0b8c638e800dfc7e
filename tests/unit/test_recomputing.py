"""Recomputing saves what it says it saves, and changes no gradient."""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from node.island.models.architecture import layers_of
from node.island.models.decoder_modules import Decoder, Objective
from node.island.parallel.mesh_shape import LocalTraining, Recomputing
from node.island.parallel.modules import (
    accumulate_gradients,
    be_deterministic,
    compile_layers,
    recompute_layers,
)
from protocol.errors import ConfigError, ExitCode
from protocol.run.models import DecoderModel

MODEL = DecoderModel(
    hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_size=24, context=16
)
WINDOWS = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
TOKENS, TARGETS = WINDOWS[:, :-1], WINDOWS[:, 1:]
CPU = torch.device("cpu")


class Counting(TorchDispatchMode):
    """Counts the operations that are carried out, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[operation.__name__.split(".")[0]] += 1
        return operation(*args, **(kwargs or {}))


def decoder_with(recomputing: Recomputing) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(MODEL)
    recompute_layers(layers_of(decoder), recomputing)
    return decoder


def gradients_of(decoder: Decoder, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    accumulate_gradients(Objective(decoder), TOKENS, TARGETS, micro_batch=0, dtype=dtype)
    return [p.grad for p in decoder.parameters() if p.grad is not None]


def counts_of(recomputing: Recomputing) -> Counter[str]:
    decoder = decoder_with(recomputing)
    with Counting() as counting:
        gradients_of(decoder)
    return counting.counts


@pytest.mark.parametrize("recomputing", ["selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_to_the_bit(recomputing: Recomputing, dtype: torch.dtype) -> None:
    kept = gradients_of(decoder_with("none"), dtype)
    recomputed = gradients_of(decoder_with(recomputing), dtype)
    assert len(kept) == len(list(MODEL.tensors()))
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


def test_full_computes_whole_layers_twice_and_selective_all_but_products_and_attention() -> None:
    none, selective, full = (counts_of(choice) for choice in ("none", "selective", "full"))
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert none["silu"] == none[attention] == MODEL.num_layers
    assert selective["silu"] == full["silu"] == 2 * MODEL.num_layers
    assert selective[attention] == MODEL.num_layers
    assert full[attention] == 2 * MODEL.num_layers
    assert selective["mm"] == none["mm"]
    # The last product of a layer is never needed again, so torch stops before it.
    assert none["mm"] + 6 * MODEL.num_layers <= full["mm"] <= none["mm"] + 7 * MODEL.num_layers


@pytest.mark.parametrize("recomputing", ["none", "selective", "full"])
def test_names_stay_canonical(recomputing: Recomputing) -> None:
    names = [name for name, _ in decoder_with(recomputing).named_parameters()]
    assert names == [tensor.name for tensor in MODEL.tensors()]


@pytest.mark.parametrize("recomputing", ["none", "full"])
def test_compiled_layers_are_compiled_and_compute_the_same(recomputing: Recomputing) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    decoder = Decoder(MODEL)
    compile_layers(layers_of(decoder), CPU, backend="aot_eager")
    recompute_layers(layers_of(decoder), recomputing)
    counters["frames"].clear()
    compiled = gradients_of(decoder)
    assert counters["frames"]["ok"] >= 1
    plain = gradients_of(decoder_with("none"))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain, compiled, strict=True))
    assert [name for name, _ in decoder.named_parameters()] == [
        tensor.name for tensor in MODEL.tensors()
    ]


def test_selective_is_refused_for_compiled_layers() -> None:
    LocalTraining(activation_checkpointing="full", compile=True).check()
    LocalTraining(activation_checkpointing="selective").check()
    with pytest.raises(
        ConfigError, match='"selective" has no effect on compiled layers'
    ) as refusal:
        LocalTraining(activation_checkpointing="selective", compile=True).check()
    assert refusal.value.exit_code == 78


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("restored")
def test_determinism_holds_for_torch_and_for_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    be_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (CPU, r"compile = true needs a C\+\+ compiler, and 'nowhere-g\+\+' is not found"),
        (torch.device("cuda:0"), r"compile = true needs Triton for cuda:0"),
    ],
)
def test_compiling_without_a_compiler_is_refused(
    device: torch.device, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "nowhere-g++")
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("node.island.parallel.modules.has_triton", lambda: False)
    with pytest.raises(ConfigError, match=message) as refusal:
        compile_layers(layers_of(decoder_with("none")), device)
    assert refusal.value.exit_code == ExitCode.CONFIG == 78
