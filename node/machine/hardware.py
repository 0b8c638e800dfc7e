"""What this machine has to train with, found without torch: its memory, and its CUDA GPUs.

What only torch can tell (GPUs of other makers) stays unknown here, and is checked once it is loaded.

Of the Linux kernel's settings it reads which congestion control this host has.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from node.island.ranks.devices import check_choice, free_bytes
from node.machine.gpus import Gpu, has_driver
from protocol.errors import ConfigError

_ASKING_SECONDS = 60.0  # a driver that has just been loaded takes some

_OTHERS = ("dev/kfd", "dev/dri/renderD*")
"""Devices of AMD's and Intel's GPUs; torch for AMD calls its own "cuda" as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What can be trained with."""

    memory_bytes: int  # that the system can give now
    gpus: tuple[Gpu, ...] | None  # None: only torch can tell
    problem: str = ""  # what the driver of the GPUs says that is wrong with them


def look_around(choice: str, root: Path = Path("/")) -> Hardware:
    """What there is for a choice of device; who wants the CPU waits for no GPU's driver."""
    check_choice(choice)
    memory = free_bytes(root)
    if choice == "cpu":
        return Hardware(memory_bytes=memory, gpus=())
    if not has_driver():
        return Hardware(memory_bytes=memory, gpus=None if _has_others(root) else ())
    return _of_answer(_asked([sys.executable, "-m", "node.machine.gpus"]), memory)


def _asked(program: list[str], seconds: float = _ASKING_SECONDS) -> str:
    """What the program prints; a problem when the driver's library has brought it down."""
    try:
        asked = subprocess.run(
            program, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return json.dumps({"problem": f"it has not answered for {seconds:g} s"})
    if asked.returncode:
        return json.dumps({"problem": f"whoever asks it ends with {asked.returncode}"})
    return asked.stdout


def _of_answer(answer: str, memory: int) -> Hardware:
    told = json.loads(answer)
    if "problem" in told:
        return Hardware(memory_bytes=memory, gpus=(), problem=told["problem"])
    return Hardware(memory_bytes=memory, gpus=tuple(Gpu(**gpu) for gpu in told["gpus"]))


def has_compilers(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torch could compile for a CUDA GPU: with Triton, a C compiler, and Python's own headers."""
    names = [environment["CC"]] if environment.get("CC") else ["gcc", "cc", "clang"]
    return (
        find_spec("triton") is not None
        and any(shutil.which(name) for name in names)
        and Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    )


def _has_others(root: Path) -> bool:
    return sys.platform != "linux" or any(any(root.glob(pattern)) for pattern in _OTHERS)


def likely_devices(
    choice: str, num_ranks: int | None, hardware: Hardware
) -> tuple[str, ...] | None:
    """The device of each rank; None when only torch can tell. Raises ConfigError with what there is.

    Without `num_ranks`, GPUs are all taken, and the CPU gets one rank.
    """
    check_choice(choice, num_ranks)
    if choice == "cpu":
        return ("cpu",) * (num_ranks or 1)
    if hardware.gpus is None or not choice.startswith(("auto", "cuda")):
        return None
    there = len(hardware.gpus)
    if choice == "auto" and not there:
        if hardware.problem:
            raise ConfigError(
                f"there is a CUDA driver, and it does not work: {hardware.problem}",
                next_step='mend it (see nvidia-smi), or set device = "cpu" in node.toml',
            )
        return ("cpu",) * (num_ranks or 1)
    number = choice.partition(":")[2]
    wanted = [int(number)] if number else list(range(num_ranks or there))
    if not wanted or max(wanted) >= there:
        asked = choice if number or not num_ranks else f"{num_ranks} CUDA GPUs"
        why = f" ({hardware.problem})" if hardware.problem else ""
        have = f"this machine has {there}" if there else "no CUDA GPU is usable here"
        raise ConfigError(
            f"{asked} asked for, and {have}{why}",
            next_step="choose fewer ranks or --device cpu, or check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES",
        )
    return tuple(f"cuda:{index}" for index in wanted)


def least_free_bytes(devices: tuple[str, ...], hardware: Hardware) -> int:
    """What the fullest of these GPUs has left."""
    assert hardware.gpus is not None
    return min(hardware.gpus[int(device.partition(":")[2])].free_bytes for device in devices)


LEAST_PROCESSES = 20
PROCESSES_PER_RANK = 4
"""Processes and threads on two cores, gRPC's and p2pd's among them; more cores take more."""


def processes_for(num_ranks: int) -> int:
    """How many processes and threads a node, or a helper, needs."""
    return LEAST_PROCESSES + PROCESSES_PER_RANK * num_ranks


SETTINGS = Path("/proc/sys")


def setting(name: str, root: Path = SETTINGS) -> str | None:
    """By its name for sysctl; None where this kernel has none of the name, or does not show it."""
    try:
        return (root / name.replace(".", "/")).read_text().strip()
    except OSError:
        return None


def congestion_control(root: Path = SETTINGS) -> str | None:
    """TCP's, for connections that name none, as all of a node's."""
    return setting("net.ipv4.tcp_congestion_control", root)


# Memory that a process frees stays with it, for it will need as much again.
#
# glibc gives freed memory back to the kernel, which zeroes it and hands it out again page by page. A
# rank frees its gradients in each inner step: for a model of 3 million parameters that was 2,800 page
# faults, and some per cent of a step where faults are dear, as in virtual machines. A daemon frees the
# vectors of each round.


# malloc.h's names for mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

_NEVER = 2**31 - 1
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no larger one; tensors above it are mapped anew


def keep_freed_memory() -> bool:
    """Asks the C library for it; False where it is not glibc, and all stays as it is."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    is_kept: bool = mallopt(_TRIM_THRESHOLD, _NEVER) == 1
    is_on_heap: bool = mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) == 1
    return is_kept and is_on_heap
