"""What torch does to layers on request: it compiles them, or computes them again in backward.

Activation checkpointing: backward computes parts of a layer again instead of having kept them (Chen et al.,
2016, "Training deep nets with sublinear memory cost"). Layers keep their names and their place in the module
tree: only what calling one does is replaced.
"""

import os
import shutil
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._triton import has_triton
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from node.island.parallel.mesh_shape import Recomputing
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
    import torch._inductor.config  # with torch's compiler: a second of every start

    torch._inductor.config.compile_threads = 1  # else a pool of processes that a killed rank leaves
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend)


def be_deterministic() -> None:
    """The same work gives the same bits; torch raises where it cannot. Before CUDA is first used."""
    os.environ[_WORKSPACE] = ":4096:8"  # cuBLAS picks by what is free otherwise
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


_aten = torch.ops.aten
_DEAR = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""Matrix products and attention: nearly all the time of a layer, in less than half of its memory."""


def recompute_layers(
    layers: Iterable[nn.Module], recomputing: Recomputing, *, draws: bool = False
) -> None:
    """Makes backward compute "full" layers again, or ("selective") all but their dear products.

    Layers that draw random numbers, for dropout, have to draw the same ones again.
    """
    if recomputing == "none":
        return
    # Where nothing in a layer is random, there is no state of generators to keep and to set again.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    if recomputing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, **options)


def _policy(context: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    is_dear = operation in _DEAR
    return CheckpointPolicy.MUST_SAVE if is_dear else CheckpointPolicy.PREFER_RECOMPUTE
