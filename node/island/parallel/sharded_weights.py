"""Sharded weights: giving them back, and what they are gathered in (lower to train, fp32 to measure).

Shards stay fp32, and so do the sums of gradients over ranks. Were weights cast after gathering, as
autocast does it, backward would need the casts of all layers at once, and sharding save nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

_AS_THEY_ARE = MixedPrecisionPolicy()


def policy_of(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """For the matrices of a layer. Inputs stay what they are: autocast sees to them."""
    if dtype == torch.float32:
        return _AS_THEY_ARE
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


@contextmanager
def gathered_as_they_are(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Within it all layers are gathered in fp32; before and after, their weights are given back.

    torch has a policy for good only, so this goes by its private names: the buffers that it gathers
    into are made at their first use, in that use's precision.
    """
    reshard(parts)
    groups = list(_lower_groups_of(parts))
    policies = [group.mp_policy for group in groups]
    for group in groups:
        _set_policy(group, _AS_THEY_ARE)
    try:
        yield
    finally:
        reshard(parts)
        for group, policy in zip(groups, policies, strict=True):
            _set_policy(group, policy)


def reshard(parts: Sequence[nn.Module]) -> None:
    """Gives FSDP's gathered parameters back; edits of those, after a forward alone, would be lost."""
    for module in _sharded(parts):
        module.reshard()


def _sharded(parts: Sequence[nn.Module]) -> Iterator[FSDPModule]:
    for part in parts:
        yield from (module for module in part.modules() if isinstance(module, FSDPModule))


def _lower_groups_of(parts: Sequence[nn.Module]) -> Iterator[Any]:
    for module in _sharded(parts):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if group.mp_policy.param_dtype is not None:
                yield group


def _set_policy(group: Any, policy: MixedPrecisionPolicy) -> None:
    group.mp_policy = policy
    group._init_mp_dtypes()
    for each in group.fsdp_params:
        each.all_gather_outputs = []
        if hasattr(each, "_unsharded_param"):
            del each._unsharded_param
