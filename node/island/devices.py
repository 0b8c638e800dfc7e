"""Which devices the ranks of this node use. What is asked for and not there is refused."""

import os
import re

from protocol.errors import ConfigError
from protocol.run_spec import RunSpec


def devices_of(choice: str, ranks: int | None = None) -> tuple[str, ...]:
    """A device for each rank.

    `choice` is "auto" (CUDA when there is a GPU, else the CPU), "cpu", "cuda" or one GPU such as
    "cuda:1". Without `ranks`, "cuda" takes every GPU and the others one rank. Raises ConfigError
    with what there is.
    """
    check_choice(choice, ranks)
    if choice == "cpu":
        return ("cpu",) * (ranks or 1)
    import torch  # here: the launcher imports this module before torch is wanted

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "auto" and not num_gpus:
        return ("cpu",) * (ranks or 1)
    there = f"there are {num_gpus} CUDA GPUs" if num_gpus else "no CUDA GPU is usable here"
    number = choice.partition(":")[2]
    wanted = [int(number)] if number else list(range(ranks or num_gpus))
    if not wanted or max(wanted) >= num_gpus:
        asked = f"{ranks} GPUs" if ranks else choice
        raise ConfigError(
            f"{asked} asked for, but {there} (torch {torch.__version__})",
            next_step='choose fewer ranks or "cpu", or check nvidia-smi and CUDA_VISIBLE_DEVICES',
        )
    return tuple(f"cuda:{index}" for index in wanted)


def check_choice(choice: str, ranks: int | None = None) -> None:
    """Raises ConfigError for what no machine has; needs no torch, so people are told at once."""
    if ranks is not None and ranks < 1:
        raise ConfigError(f"{ranks} ranks cannot train", next_step="ask for at least one")
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", choice):
        raise ConfigError(
            f"unknown device {choice!r}",
            next_step='choose "auto", "cpu", "cuda" or one GPU such as "cuda:0"',
        )
    if ":" in choice and (ranks or 1) != 1:
        raise ConfigError(
            f"{ranks} ranks cannot share {choice}", next_step='choose "cuda", or one rank'
        )


def check_batch(spec: RunSpec, num_ranks: int) -> None:
    """Raises ConfigError when a batch cannot be shared evenly; ask before starting ranks."""
    if spec.inner.batch % num_ranks:
        raise ConfigError(
            f"[inner] batch = {spec.inner.batch} cannot be shared evenly by {num_ranks} ranks",
            next_step="start the node with a number of ranks that divides it",
        )


def default_threads(num_ranks: int) -> int:
    """CPU threads of each rank: OMP_NUM_THREADS when set, else the usable cores shared out."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)
