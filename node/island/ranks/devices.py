"""Which devices the ranks of this node use, and how much memory is left. What is not there is refused.

What torch knows of GPUs is asked in a process aside, and not only because the daemon goes without torch:
whoever asks a GPU for its free memory keeps a context on it, some hundreds of megabytes that belong to the
ranks. A container's limit of memory (a control group's, of either version) is not in /proc/meminfo, and a
process that takes more is killed without a word.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from node.island.parallel.auto_mesh import DeviceKind
from node.island.parallel.mesh_shape import Precision
from node.island.ranks.aside import Aside
from protocol.errors import ConfigError
from protocol.service.limits import UNLIMITED, groups, usable_cores

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
    return max(1, usable_cores() // num_ranks)


if TYPE_CHECKING:
    from multiprocessing.connection import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableDevices:
    """A device for each rank, the memory that each rank may take of it now, and what it computes in."""

    names: tuple[str, ...]
    bytes_per_rank: int
    auto_precision: Precision  # what "auto" comes to there


async def usable_devices(choice: str, num_ranks: int | None = None) -> UsableDevices:
    """What `devices_of` says, by torch's word; raises ConfigError with what there is.

    For the CPU nobody need be asked.
    """
    if choice == "cpu":
        return _looked_up(choice, num_ranks)
    aside = Aside(_devices, choice, num_ranks)
    try:
        usable: UsableDevices = await aside.answer()
    finally:
        aside.close()
    return usable


def _devices(
    connection: "Connection[UsableDevices, None]", choice: str, num_ranks: int | None
) -> None:
    connection.send(_looked_up(choice, num_ranks))


def _looked_up(choice: str, num_ranks: int | None) -> UsableDevices:
    names = devices_of(choice, num_ranks)
    return UsableDevices(
        names=names, bytes_per_rank=bytes_per_rank(names), auto_precision=_auto_precision(names)
    )


def _auto_precision(names: tuple[str, ...]) -> Precision:
    if kind_of(names) == "cpu":
        return "fp32"
    import torch  # as above

    from node.island.ranks.accelerator import dtype_of

    in_bf16 = all(dtype_of("auto", torch.device(name)) is torch.bfloat16 for name in names)
    return "bf16" if in_bf16 else "fp32"


def free_bytes(root: Path = Path("/")) -> int:
    """What the kernel can give without swapping, or what the tightest limit leaves."""
    available = _available_bytes((root / "proc/meminfo").read_text())
    return min([available, *(max(0, limit) for limit in _left_by_limits(root))])


def _available_bytes(meminfo: str) -> int:
    match = re.search(r"^MemAvailable: +(\d+) kB$", meminfo, flags=re.MULTILINE)
    assert match is not None, "Linux has it since 3.14"
    return 1024 * int(match[1])


def _left_by_limits(root: Path) -> Iterator[int]:
    """Of our own group and of all around it. Cached files count as used, and are given up at need."""
    for folder, version in groups(root, "memory"):
        limit_name, usage_name, cache_name = _MEMORY_FILES[version]
        try:
            limit = (folder / limit_name).read_text().strip()
            if not limit.isdecimal() or int(limit) >= UNLIMITED:
                continue
            used = int((folder / usage_name).read_text())
            stat = (folder / "memory.stat").read_text()
        except OSError:
            continue  # the root group has no limit; or it is not shown in here
        cached = re.search(rf"^{cache_name} (\d+)$", stat, flags=re.MULTILINE)
        yield int(limit) - used + (int(cached[1]) if cached else 0)


_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By the version of control groups: limit, usage, and the cache in memory.stat."""
