"""Which devices the ranks of this node use. What is asked for and not there is refused."""

import os
import re
from typing import get_args

from node.island.parallel.auto_mesh import DeviceKind
from node.island.ranks.free_memory import free_bytes
from protocol.errors import ConfigError

_GPUS: dict[DeviceKind, tuple[str, str]] = {
    "cuda": ("CUDA GPU", "nvidia-smi (rocm-smi for AMD's) and CUDA_VISIBLE_DEVICES"),
    "xpu": ("Intel GPU", "xpu-smi and ZE_AFFINITY_MASK"),
    "mps": ("Apple GPU", "that this torch is one for macOS"),
}
"""Kinds of GPUs in the order in which "auto" looks for them, with what to check when there is none."""


def devices_of(choice: str, ranks: int | None = None) -> tuple[str, ...]:
    """A device for each rank.

    `choice` is "auto" (the first kind of GPU that is there, else the CPU), "cpu", a kind of GPU, or
    one GPU such as "cuda:1". Without `ranks`, a kind takes every GPU of it and others one rank.
    Raises ConfigError with what there is.
    """
    check_choice(choice, ranks)
    kind: DeviceKind = next(
        (known for known in get_args(DeviceKind) if choice.startswith(known)), "cpu"
    )
    if choice == "auto":
        kind = next((known for known in _GPUS if _num_gpus(known)), "cpu")
    if kind == "cpu":
        return ("cpu",) * (ranks or 1)
    number = choice.partition(":")[2]
    there = _num_gpus(kind)
    wanted = [int(number)] if number else list(range(ranks or there))
    if not wanted or max(wanted) >= there:
        import torch  # as below

        name, check = _GPUS[kind]
        found = {0: f"no {name} is usable here", 1: f"there is 1 {name}"}
        raise ConfigError(
            f"{choice if ranks in (None, 1) else f'{ranks} GPUs'} asked for, but "
            f"{found.get(there, f'there are {there} {name}s')} (torch {torch.__version__})",
            next_step=f'choose fewer ranks or "cpu", or check {check}',
        )
    return tuple(kind if kind == "mps" else f"{kind}:{index}" for index in wanted)


def check_choice(choice: str, ranks: int | None = None) -> None:
    """Raises ConfigError for what no machine has; needs no torch, so people are told at once."""
    if ranks is not None and ranks < 1:
        raise ConfigError(f"{ranks} ranks cannot train", next_step="ask for at least one")
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:[0-9]+)?", choice):
        raise ConfigError(
            f"unknown device {choice!r}",
            next_step='choose "auto", "cpu", "cuda", "xpu", "mps" or one GPU such as "cuda:0"',
        )
    if ":" in choice and (ranks or 1) != 1:
        kind = choice.partition(":")[0]
        raise ConfigError(
            f"{ranks} ranks cannot share {choice}", next_step=f'choose "{kind}", or one rank'
        )


def _num_gpus(kind: DeviceKind) -> int:
    import torch  # here: the launcher imports this module before torch is wanted

    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = torch.xpu if kind == "xpu" else torch.cuda
    return module.device_count() if module.is_available() else 0


def kind_of(devices: tuple[str, ...]) -> DeviceKind:
    """What the ranks train on: all on the same kind."""
    return next(kind for kind in get_args(DeviceKind) if devices[0].startswith(kind))


def bytes_per_rank(devices: tuple[str, ...]) -> int:
    """Memory that each rank may take now: of its GPU, or its part of what the system can give."""
    kind = kind_of(devices)
    if kind == "cpu":
        return free_bytes() // len(devices)
    import torch  # as above

    if kind == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    module = torch.xpu if kind == "xpu" else torch.cuda
    return min(int(module.mem_get_info(device)[0]) for device in devices)


def check_offload(*, has_offload: bool, kind: DeviceKind) -> None:
    """Raises ConfigError where parameters are in the CPU's memory anyway."""
    if has_offload and kind in ("cpu", "mps"):
        why = "the ranks train on the CPU" if kind == "cpu" else "an Apple GPU has no other"
        raise ConfigError(
            f"offload keeps parameters in the CPU's memory, and {why}",
            next_step="remove offload, or choose a GPU with --device cuda",
        )


def default_threads(num_ranks: int) -> int:
    """CPU threads of each rank: OMP_NUM_THREADS when set, else the usable cores shared out."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)
