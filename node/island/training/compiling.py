"""Two switches of torch that hold for a rank's whole process or model: compiling, and determinism."""

import os
import shutil
from collections.abc import Iterable

import torch
import torch._inductor.config
from torch import nn
from torch.utils._triton import has_triton

from protocol.errors import ConfigError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def compile_layers(
    layers: Iterable[nn.Module], device: torch.device, *, backend: str = "inductor"
) -> None:
    """Has torch compile each layer at its first use; equal layers share the code.

    Comes before recompute_layers: torch would not compile what recomputes, and not say so.

    Raises ConfigError when the compiler that torch calls for this device is not there: it would
    only fail in the middle of the first inner step.
    """
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None and shutil.which("clang++") is None:
            raise ConfigError(
                f"compile = true needs a C++ compiler, and {compiler!r} is not found",
                next_step="install g++, or set compile = false in node.toml",
            )
    elif not has_triton():
        raise ConfigError(
            f"compile = true needs Triton for {device}, and it is not there or too old a GPU for it",
            next_step="install triton, or set compile = false in node.toml",
        )
    torch._inductor.config.compile_threads = 1  # else a pool of processes that a killed rank leaves
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend)


def be_deterministic() -> None:
    """The same work gives the same bits; torch raises where it cannot. Before CUDA is first used."""
    os.environ[_WORKSPACE] = ":4096:8"  # cuBLAS picks by what is free otherwise
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
