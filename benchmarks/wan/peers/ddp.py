"""torch's DistributedDataParallel over gloo: gradients are averaged at every inner step.

Options: `hook` is "" for fp32, "fp16" (torch's hook for bf16 asks for NCCL), or "powersgd" with `rank`;
`bucket_mb` is how much goes into one all-reduce, so that the first ones leave while the backward pass
goes on.
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.wan.peers.training import Training, join_gloo, own_order


def compressed(model: DistributedDataParallel, options: Mapping[str, Any]) -> None:
    """Registers what the option `hook` names."""
    match options.get("hook", ""):
        case "":
            return
        case "fp16":
            model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
        case "powersgd":
            state = PowerSGDState(
                process_group=None,
                matrix_approximation_rank=int(options["rank"]),
                start_powerSGD_iter=2,
                use_error_feedback=True,
                warm_start=True,
            )
            model.register_comm_hook(state, powerSGD_hook)
        case unknown:
            raise ValueError(f"no communication hook {unknown!r}")


def main() -> None:
    """Trains until it is ended."""
    order = own_order()
    join_gloo(order)
    training = Training(order)
    training.objective = model = DistributedDataParallel(
        training.objective,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=order.options.get("bucket_mb", 4),
    )
    compressed(model, order.options)
    dist.barrier()
    step = 0
    while True:
        training.inner_step(step)
        step += 1
        training.save_if_due(exchanges=step)


if __name__ == "__main__":
    main()
