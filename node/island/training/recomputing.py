"""Activation checkpointing: backward computes parts of a layer again instead of having kept them.

Chen et al., 2016, "Training deep nets with sublinear memory cost". Layers keep their names and their
place in the module tree: only what calling one does is replaced.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from node.island.training.local_training import Recomputing

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
