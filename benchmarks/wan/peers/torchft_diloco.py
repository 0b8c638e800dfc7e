"""torchft's DiLoCo over its gloo process group, with its lighthouse in the host in the middle.

Options: `delay_share` lets the all-reduce go on for that share of a round's inner steps, and `alpha` is
the share of the local weights afterwards (Streaming DiLoCo). Quantisation is not offered: without
Triton torchft sends fp32 and does not say so.

    python -m benchmarks.wan.peers.torchft_diloco lighthouse NUM_NODES

is the lighthouse.
"""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from benchmarks.wan.peers.training import Training, meet, own_order

LIGHTHOUSE_PORT = 29510
STORE_PORT = 29511
PATIENCE = timedelta(seconds=300)


def be_lighthouse(num_nodes: int) -> None:
    """Serves until it is ended."""
    lighthouse = LighthouseServer(
        bind=f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=num_nodes, join_timeout_ms=1000
    )
    print(lighthouse.address(), flush=True)
    while True:
        time.sleep(60)


def train() -> None:
    """Trains until it is ended."""
    order = own_order()
    training = Training(order)
    decoder, outer = training.decoder, training.spec.outer
    store = dist.TCPStore(  # type: ignore[attr-defined]  # is public
        host_name=order.address, port=STORE_PORT, is_master=True, wait_for_workers=False
    )
    assert (
        store.port == STORE_PORT
    )  # and it must live as long as the manager, which has its address
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=lambda _: None,
        state_dict=dict,
        min_replica_size=order.num_nodes,
        use_async_quorum=False,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=order.address,
        store_port=STORE_PORT,
        lighthouse_addr=f"http://{order.middle}:{LIGHTHOUSE_PORT}",
        replica_id=f"node_{order.rank}",
        hostname=order.address,
        init_sync=False,  # first weights are equal
    )
    outer_optimizer = torch.optim.SGD(
        decoder.parameters(),
        lr=outer.learning_rate,
        momentum=outer.momentum,
        nesterov=outer.momentum > 0,
    )
    inner_steps = training.spec.inner.steps
    synchronised = DiLoCo(
        manager,
        [decoder],
        training.optimizer,
        outer_optimizer,
        sync_every=inner_steps,
        use_bucketization=True,  # else each tensor is an all-reduce of its own, and pays the delay
        fragment_sync_delay=int(inner_steps * order.options.get("delay_share", 0.0)),
        fragment_update_alpha=float(order.options.get("alpha", 0.0)),
    )
    fragment = synchronised._fragments[0]

    def global_weights() -> "torch.Tensor":
        named = fragment.original_parameters
        return torch.cat([named[name].reshape(-1) for name, _ in decoder.named_parameters()])

    meet(order)
    with synchronised:
        step = 0
        while True:
            for _ in range(inner_steps):
                training.inner_step(step)
                step += 1
            committed = manager.current_step()
            if committed != step // inner_steps:
                training.teller.say("trouble", what=f"{committed} commits after {step} steps")
            training.teller.save_if_due(
                lambda: global_weights().numpy(),
                exchanges=committed,
                steps=training.pace.steps,
                late_steps=training.pace.late_steps,
            )


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        be_lighthouse(int(sys.argv[2]))
    else:
        train()
