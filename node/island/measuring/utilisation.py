"""What a rank's device could do and what it did: operations by formula, peaks by name, memory.

The formula and the peaks are in docs/watching.md. Names are compared whole, since a part of a GPU is
named like the GPU, and slower. A device that the table does not name has the peak that its rank has
measured by matrix products, or none.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from node.island.parallel.mesh import Mesh
from node.island.ranks.accelerator import name_of, peak_memory_bytes
from protocol.run.models import DecoderModel
from protocol.run.run_spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Most that a GPU does, in FLOP/s, by its vendor: dense, summed in fp32."""

    half: float  # bf16 or fp16, on tensor cores; TF32 has half of it there
    single: float  # fp32, outside them


_PEAKS = {
    "NVIDIA GB200": Peak(half=2500e12, single=80e12),
    "NVIDIA B200": Peak(half=2250e12, single=75e12),
    "NVIDIA H200": Peak(half=989.4e12, single=66.9e12),
    "NVIDIA H20": Peak(half=148e12, single=44e12),
    "NVIDIA H800": Peak(half=989.4e12, single=66.9e12),
    "NVIDIA H100 80GB HBM3": Peak(half=989.4e12, single=66.9e12),
    "NVIDIA H100 PCIe": Peak(half=756e12, single=51.2e12),
    "NVIDIA A100-SXM4-40GB": Peak(half=312e12, single=19.5e12),
    "NVIDIA A100-SXM4-80GB": Peak(half=312e12, single=19.5e12),
    "NVIDIA A100-PCIE-40GB": Peak(half=312e12, single=19.5e12),
    "NVIDIA A100 80GB PCIe": Peak(half=312e12, single=19.5e12),
    "NVIDIA A800-SXM4-80GB": Peak(half=312e12, single=19.5e12),
    "NVIDIA L40S": Peak(half=362e12, single=91.6e12),
    "NVIDIA L4": Peak(half=121e12, single=30.3e12),
    "NVIDIA A10": Peak(half=125e12, single=31.2e12),
    "NVIDIA RTX A6000": Peak(half=154.8e12, single=38.7e12),
    "NVIDIA GeForce RTX 5090": Peak(half=209.5e12, single=104.8e12),
    "NVIDIA GeForce RTX 4090": Peak(half=165.2e12, single=82.6e12),
    "NVIDIA GeForce RTX 3090": Peak(half=71e12, single=35.6e12),
    "Tesla V100-SXM2-16GB": Peak(half=125e12, single=15.7e12),
    "Tesla V100-SXM2-32GB": Peak(half=125e12, single=15.7e12),
    "Tesla T4": Peak(half=65e12, single=8.1e12),
    "AMD Instinct MI300X": Peak(half=1307.4e12, single=163.4e12),
    "AMD Instinct MI325X": Peak(half=1307.4e12, single=163.4e12),
    "AMD Instinct MI250X": Peak(half=191.5e12, single=23.9e12),  # of one of its two dies
}


def flops_per_token(spec: RunSpec) -> int:
    """Floating-point operations of forward and backward for one token.

    PaLM (Chowdhery et al., 2022, appendix B): 6 for each weight of a matrix product (the head is
    one, the embedding is not), and 12 · layers · hidden size · context for attention, without a
    discount for the causal mask; a layer with a sliding window counts that for the context. What is
    computed again does not count.
    """
    if spec.description is not None and spec.description.flops_per_token is not None:
        return spec.description.flops_per_token
    if not isinstance(spec.model, DecoderModel):
        return 6 * spec.num_parameters // spec.model.context  # nobody could count them
    model = spec.model
    weights = model.vocab_size * model.hidden_size  # of the head, also when it is the embedding
    weights += sum(
        tensor.num_elements
        for tensor in spec.tensors
        if tensor.layer is not None and len(tensor.shape) == 2
    )
    attended = sum(model.window_of(i) or model.context for i in range(model.num_layers))
    attention = model.num_heads * model.values_of_head * attended
    return 6 * weights + 12 * attention


def peak_of(device_name: str, dtype: torch.dtype) -> float | None:
    """Most FLOP/s of a GPU with that name; None when it is not known."""
    peak = _PEAKS.get(device_name)
    if peak is None:
        return None
    if dtype != torch.float32:
        return peak.half
    return peak.half / 2 if torch.get_float32_matmul_precision() != "highest" else peak.single


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandHardware:
    """Over all ranks of an island."""

    peak_flops_per_second: float | None  # None: not known of every rank
    is_peak_measured: bool  # of some rank, for no table names its device
    peak_memory_bytes: int  # of the rank that took most


def measure_peak_if_unknown(device: torch.device, dtype: torch.dtype) -> None:
    """Takes a moment on a device that the table does not name."""
    if peak_of(name_of(device), dtype) is None:
        measure_peak(device, dtype)


def measured(device: torch.device, dtype: torch.dtype, mesh: Mesh) -> IslandHardware:
    """What all ranks' devices can do and have taken; all ranks ask together."""
    own = torch.zeros(3, mesh.num_ranks, dtype=torch.float64)
    known = peak_of(name_of(device), dtype)
    own[0, mesh.rank] = known or measured_peak_of(device, dtype) or 0.0
    own[1, mesh.rank] = peak_memory_bytes(device)
    own[2, mesh.rank] = known is None
    peaks, memory, is_measured = mesh.added(own)
    return IslandHardware(
        peak_flops_per_second=peaks.sum().item() if bool((peaks > 0).all()) else None,
        is_peak_measured=bool((peaks > 0).all() and is_measured.any()),
        peak_memory_bytes=int(memory.max()),
    )


_SIZES = {"cpu": 512}
_SIZE_ELSEWHERE = 4096
_MOST_PRODUCTS = 8
_MOST_SECONDS = 0.1

Key = tuple[str, torch.dtype]

_peaks: dict[Key, float] = {}  # of this process


def measure_peak(
    device: torch.device, dtype: torch.dtype, clock: Callable[[], float] | None = None
) -> float:
    """Measures and keeps the peak of a device, in FLOP/s; a rank has one device."""
    if clock is None:
        clock = time.thread_time if device.type == "cpu" else time.perf_counter
    size = _SIZES.get(device.type, _SIZE_ELSEWHERE)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = left @ right  # libraries load and choose at the first one
    wait_for(device)
    began_at = clock()
    least = float("inf")
    for _ in range(_MOST_PRODUCTS):
        started_at = clock()
        torch.mm(left, right, out=product)
        wait_for(device)
        least = min(least, clock() - started_at)
        if clock() - began_at >= _MOST_SECONDS:
            break
    _peaks[device.type, dtype] = 2 * size**3 / least
    return _peaks[device.type, dtype]


def measured_peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """What was measured; None when nothing was."""
    return _peaks.get((device.type, dtype))


def wait_for(device: torch.device) -> None:
    """Returns when the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
