"""Mixed precision: what a device does, what is refused, and that weights and sums stay fp32."""

import pytest
import torch

from node.island.models.decoder_modules import Decoder, Objective
from node.island.parallel.modules import accumulate_gradients
from node.island.ranks.accelerator import LossScale, autocast, collectives_of, dtype_of
from node.island.ranks.faults import TrainingDivergedError
from node.island.training.optimizers import iteration_dtype_of
from protocol.errors import ConfigError, ExitCode
from protocol.run.models import DecoderModel

CPU = torch.device("cpu")
GPU = torch.device("cuda:1")
MODEL = DecoderModel(
    hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=24, context=16
)
WINDOWS = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
TOKENS, TARGETS = WINDOWS[:, :-1], WINDOWS[:, 1:]
HALVES = [torch.bfloat16, torch.float16]
FINITE, INFINITE = torch.tensor(1.0), torch.tensor(torch.inf)


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that only emulates bf16."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")


@pytest.fixture
def new_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has bf16."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)


def test_auto_is_fp32_on_a_cpu() -> None:
    assert dtype_of("auto", CPU) == torch.float32


@pytest.mark.usefixtures("new_gpu")
def test_auto_is_bf16_on_a_gpu_that_has_it() -> None:
    assert dtype_of("auto", GPU) == torch.bfloat16


@pytest.mark.parametrize("has_it", [True, False])
def test_auto_asks_intels_gpus_likewise(monkeypatch: pytest.MonkeyPatch, has_it: bool) -> None:
    monkeypatch.setattr(torch.xpu, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda including_emulation: has_it)
    chosen = dtype_of("auto", torch.device("xpu:0"))
    assert chosen == (torch.bfloat16 if has_it else torch.float32)


@pytest.mark.parametrize("is_new", [True, False])
def test_apples_gpus_do_bf16_on_a_macos_that_has_it_and_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: is_new)
    mps = torch.device("mps")
    assert dtype_of("auto", mps) == torch.float32
    if is_new:
        assert dtype_of("bf16", mps) == torch.bfloat16
    else:
        with pytest.raises(ConfigError, match=r"mps \(mps\) has no bf16"):
            dtype_of("bf16", mps)


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "gloo"), ("cuda:1", "cpu:gloo,cuda:nccl"), ("xpu:0", "cpu:gloo,xpu:xccl")],
)
def test_ranks_talk_by_what_their_device_has(device: str, backend: str) -> None:
    assert collectives_of(torch.device(device)) == backend


@pytest.mark.usefixtures("old_gpu")
def test_auto_is_fp32_on_a_gpu_that_would_emulate_bf16() -> None:
    assert dtype_of("auto", GPU) == torch.float32
    assert dtype_of("fp16", GPU) == torch.float16


@pytest.mark.usefixtures("old_gpu")
def test_bf16_is_refused_where_it_would_be_emulated() -> None:
    with pytest.raises(ConfigError, match=r"Tesla T4 \(cuda:1\) has no bf16; .*fp16") as refusal:
        dtype_of("bf16", GPU)
    assert refusal.value.exit_code == ExitCode.CONFIG == 78


def test_a_cpu_does_what_is_asked() -> None:
    asked = [dtype_of(precision, CPU) for precision in ("fp32", "bf16", "fp16")]
    assert asked == [torch.float32, torch.bfloat16, torch.float16]


def test_muon_iterates_in_bf16_only_where_that_is_fast_and_asked_for() -> None:
    assert iteration_dtype_of(torch.bfloat16, GPU) == torch.bfloat16
    for dtype, device in [(torch.float16, GPU), (torch.float32, GPU), (torch.bfloat16, CPU)]:
        assert iteration_dtype_of(dtype, device) == torch.float32


@pytest.mark.parametrize("dtype", HALVES)
def test_products_are_in_the_lower_precision_and_all_that_is_added_up_in_fp32(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    objective = Objective(Decoder(MODEL))
    outputs: dict[str, torch.dtype] = {}
    for name, module in objective.named_modules():
        module.register_forward_hook(
            lambda module, inputs, output, name=name: outputs.update({name: output.dtype})
        )
    loss = accumulate_gradients(objective, TOKENS, TARGETS, micro_batch=1, dtype=dtype)
    assert outputs["decoder.model.layers.0.mlp.up_proj"] == dtype
    assert outputs["decoder.model.layers.0.self_attn.o_proj"] == dtype
    assert outputs["decoder.model.layers.0"] == torch.float32  # the residual stream
    assert outputs["decoder.model.norm"] == torch.float32
    assert outputs[""] == loss.dtype == torch.float32
    for parameter in objective.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_are_those_of_fp32_within_the_lower_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    objective = Objective(Decoder(MODEL))
    gradients = []
    for precision in (torch.float32, dtype):
        objective.zero_grad()
        accumulate_gradients(objective, TOKENS, TARGETS, micro_batch=0, dtype=precision)
        gradients.append(
            torch.cat([p.grad.flatten() for p in objective.parameters() if p.grad is not None])
        )
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert 1e-5 < error < 0.03  # some, as bf16 has 8 bits


def test_autocast_does_nothing_for_fp32() -> None:
    a = torch.randn(4, 4)
    with autocast(torch.float32, CPU):
        assert (a @ a).dtype == torch.float32
    with autocast(torch.bfloat16, CPU):
        assert (a @ a).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_fp16_nothing_is_scaled_and_no_step_is_left_out(dtype: torch.dtype) -> None:
    scale = LossScale(dtype)
    gradient = torch.ones(2)
    scale.remove_from([gradient])
    assert scale.value == 1.0
    assert torch.equal(gradient, torch.ones(2))
    assert scale.allows(INFINITE)  # the tally of losses and norms stops the training


def test_a_scale_is_taken_out_of_the_gradients_exactly() -> None:
    scale = LossScale(torch.float16)
    gradient = torch.tensor([0.1, 3e-7])
    scaled = gradient * scale.value
    scale.remove_from([scaled])
    assert scale.value == 2.0**16
    assert torch.equal(scaled, gradient)


def test_an_overflow_leaves_the_step_out_and_halves_the_scale() -> None:
    scale = LossScale(torch.float16)
    assert not scale.allows(INFINITE)
    assert scale.value == 2.0**15
    assert not scale.allows(torch.tensor(torch.nan))
    assert scale.value == 2.0**14
    assert scale.allows(FINITE)
    assert scale.value == 2.0**14


def test_the_scale_rises_again_after_many_good_steps_in_a_row() -> None:
    scale = LossScale(torch.float16)
    scale.allows(INFINITE)
    scale.allows(INFINITE)
    assert all(scale.allows(FINITE) for _ in range(1999))
    assert scale.value == 2.0**14
    scale.allows(FINITE)
    assert scale.value == 2.0**15
    assert all(scale.allows(FINITE) for _ in range(5000))
    assert scale.value == 2.0**16  # and no further


def test_gradients_that_overflow_at_every_scale_stop_the_training() -> None:
    scale = LossScale(torch.float16)
    for _ in range(16):
        assert not scale.allows(INFINITE)
    assert scale.value == 1.0
    with pytest.raises(TrainingDivergedError, match="even without a loss scale; set precision"):
        scale.allows(INFINITE)
