"""DiLoCo as a page of torch: local AdamW, an all-reduce of pseudo-gradients over gloo, Nesterov.

Option: `dtype` is "fp32", or "bf16" for half the bytes. Nodes wait while the all-reduce goes on.
"""

import torch
import torch.distributed as dist

from benchmarks.wan.peers.training import Training, join_gloo, own_order

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    """Trains until it is ended."""
    order = own_order()
    join_gloo(order)
    training = Training(order)
    dtype = DTYPES[order.options.get("dtype", "fp32")]
    local = list(training.decoder.parameters())
    outer = training.spec.outer
    global_ = torch.nn.Parameter(torch.nn.utils.parameters_to_vector(local).detach().clone())
    optimizer = torch.optim.SGD(
        [global_], lr=outer.learning_rate, momentum=outer.momentum, nesterov=outer.momentum > 0
    )
    dist.barrier()
    step = 0
    while True:
        for _ in range(training.spec.inner.steps):
            training.inner_step(step)
            step += 1
        with torch.no_grad():
            trained = torch.nn.utils.parameters_to_vector(local)
            pseudo_gradient = (global_ - trained).div_(order.num_nodes).to(dtype)
            dist.all_reduce(pseudo_gradient)
            global_.grad = pseudo_gradient.to(torch.float32)
            optimizer.step()
            torch.nn.utils.vector_to_parameters(global_.detach(), local)
            # vector_to_parameters leaves views: the next round would train the global parameters.
            for parameter in local:
                parameter.data = parameter.data.clone()
        training.save_if_due(exchanges=step // training.spec.inner.steps)


if __name__ == "__main__":
    main()
