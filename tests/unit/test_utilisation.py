"""What the formula counts is what torch counts; a peak is known by name or not at all."""

import copy
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from node.island import measuring as measured_peak
from node.island.measuring import flops_per_token, measure_peak_if_unknown, measured, peak_of
from node.island.models.decoder_modules import Decoder, Objective
from node.island.models.describing import describe
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import MeshShape
from protocol.run.models import DecoderModel, TransformersModel
from protocol.run.run_spec import RunSpec
from tests.transformers_configs import CONFIGS

CPU = torch.device("cpu")


class OfTwo(Mesh):
    """Rank 1 of two that share a model; rank 0 said what is given."""

    of_first: torch.Tensor

    def __init__(self, peak: float, memory: float, *, is_measured: bool = False) -> None:
        super().__init__(rank=1, shape=MeshShape(tensor=2))
        said = torch.tensor([peak, memory, is_measured], dtype=torch.float64)
        object.__setattr__(self, "of_first", said)

    def added(self, values: torch.Tensor) -> torch.Tensor:
        assert not values[:, 0].any()  # that is the other's to say
        values[:, 0] = self.of_first
        return values


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_the_formula_counts_what_forward_and_backward_multiply(
    tie_embeddings: bool, num_kv_heads: int
) -> None:
    spec = DecoderModel(
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        ffn_size=24,
        context=8,
        tie_embeddings=tie_embeddings,
    )
    objective = Objective(Decoder(spec))
    windows = torch.randint(256, (3, 9))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        objective(windows[:, :-1], windows[:, 1:]).backward()
    assert counter.get_total_flops() == 3 * 8 * flops_per_token(RunSpec(model=spec))


def test_a_layer_with_a_window_attends_to_that_many_positions() -> None:
    whole = DecoderModel(context=128, num_layers=4)
    sliding = whole.model_copy(update={"sliding_window": 32, "sliding_layers": (1, 3)})
    of_a_layer = 12 * whole.num_heads * whole.values_of_head
    saved = flops_per_token(RunSpec(model=whole)) - flops_per_token(RunSpec(model=sliding))
    assert saved == 2 * of_a_layer * (128 - 32)


def test_a_peak_is_that_of_the_precision() -> None:
    assert (
        peak_of("NVIDIA H200", torch.bfloat16) == peak_of("NVIDIA H200", torch.float16) == 989.4e12
    )
    assert peak_of("NVIDIA H200", torch.float32) == 66.9e12


@pytest.mark.parametrize(
    "name", ["cpu", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H2000", "nvidia h200", ""]
)
def test_a_device_that_is_not_known_by_its_whole_name_has_no_peak(name: str) -> None:
    assert peak_of(name, torch.bfloat16) is None


@pytest.fixture
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_peak, "_peaks", {})


@pytest.mark.usefixtures("nothing_measured")
def test_a_device_that_no_table_names_has_the_peak_that_was_measured_and_it_is_said() -> None:
    unknown = measured(CPU, torch.float32, Mesh())
    assert (unknown.peak_flops_per_second, unknown.is_peak_measured) == (None, False)
    measure_peak_if_unknown(CPU, torch.float32)
    known = measured(CPU, torch.float32, Mesh())
    assert known.is_peak_measured
    assert known.peak_flops_per_second == measured_peak.measured_peak_of(CPU, torch.float32)
    assert measured(CPU, torch.bfloat16, Mesh()).peak_flops_per_second is None  # another question


@pytest.mark.usefixtures("nothing_measured")
def test_a_peak_is_that_of_the_fastest_product_and_takes_a_tenth_of_a_second() -> None:
    ticks = [0.0, 0.0, 0.04, 1.0, 1.03, 1.04, 1.05, 1.08, 2.0]
    times = iter(ticks)
    peak = measured_peak.measure_peak(CPU, torch.float32, clock=lambda: next(times))
    assert peak == pytest.approx(2 * 512**3 / 0.04)  # and no other was begun
    assert next(times) == 1.03


@pytest.mark.usefixtures("nothing_measured")
def test_what_the_table_names_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    gpu = torch.device("cuda:0")
    measure_peak_if_unknown(gpu, torch.bfloat16)
    assert measured_peak.measured_peak_of(gpu, torch.bfloat16) is None


@pytest.mark.usefixtures("nothing_measured")
def test_a_process_on_a_cpu_tells_the_memory_that_it_takes() -> None:
    ballast = torch.ones(50_000_000)  # 200 MB
    assert 1e8 < ballast.nbytes < measured(CPU, torch.float32, Mesh()).peak_memory_bytes < 1e11


def test_an_island_has_a_peak_when_all_its_ranks_have(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7_000)
    both = measured(gpu, torch.bfloat16, OfTwo(peak=1e12, memory=9_000))
    assert (both.peak_flops_per_second, both.is_peak_measured) == (122e12, False)
    mixed = measured(gpu, torch.bfloat16, OfTwo(peak=1e12, memory=9_000, is_measured=True))
    assert (mixed.peak_flops_per_second, mixed.is_peak_measured) == (122e12, True)
    assert both.peak_memory_bytes == 9_000
    one = measured(gpu, torch.bfloat16, OfTwo(peak=0.0, memory=5_000))
    assert one.peak_flops_per_second is None
    assert one.peak_memory_bytes == 7_000


def test_operations_of_experts_are_of_those_that_a_token_goes_to(tmp_path: Path) -> None:
    """Which ones is a value, and how many is known on shapes."""
    spec = RunSpec(model=TransformersModel(source="transformers", context=16))
    flops = []
    for routed in (1, 2):
        config = copy.deepcopy(CONFIGS["mixtral"])
        config.num_experts_per_tok = routed
        config.save_pretrained(tmp_path / str(routed))
        with capture_logs() as told:
            described = describe(spec, tmp_path / str(routed))
        assert not [line for line in told if "estimated" in line["event"]]
        assert described.flops_per_token is not None and described.activation_bytes
        flops.append(described.flops_per_token)
    matrices_of_an_expert, num_layers = 3 * 24 * 32, 2
    assert flops[1] - flops[0] == 6 * num_layers * matrices_of_an_expert
