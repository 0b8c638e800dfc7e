"""hivemind's Optimizer with local updates: every node steps alone, parameters are averaged each round.

Options: `compression` is "none" or "float16" (8-bit codecs raise with numpy 2.4 and later, and the
error is swallowed: replicas would never meet); `delay` averages in the background.
"""

import time
from collections.abc import Callable
from pathlib import Path

import hivemind
from hivemind.compression import CompressionBase, Float16Compression, NoCompression

from benchmarks.wan.peers.order import Order
from benchmarks.wan.peers.training import Training, meet, own_order

PORT = 29600
COMPRESSIONS: dict[str, Callable[[], CompressionBase]] = {
    "none": NoCompression,
    "float16": Float16Compression,
}


def joined_dht(order: Order) -> hivemind.DHT:
    """The first node is where the others enter; they read its address from a file."""
    place = order.folder / "dht"
    entry: list[str] = []
    if order.rank:
        while not place.exists():
            time.sleep(0.1)
        entry = place.read_text().split()
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{order.address}/tcp/{PORT}"],
        initial_peers=entry,
        use_auto_relay=False,
        start=True,
    )
    if not order.rank:
        written = Path(f"{place}.new")
        written.write_text(" ".join(map(str, dht.get_visible_maddrs())))
        written.rename(place)
    return dht


def main() -> None:
    """Trains until it is ended."""
    order = own_order()
    training = Training(order)
    dht = joined_dht(order)
    inner = training.spec.inner
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="wan",
        batch_size_per_step=inner.batch,
        target_batch_size=inner.batch * inner.steps * order.num_nodes,
        optimizer=training.optimizer,
        use_local_updates=True,
        delay_state_averaging=bool(order.options.get("delay", False)),
        matchmaking_time=float(order.options.get("matchmaking_seconds", 3.0)),
        averaging_timeout=120.0,
        state_averaging_compression=COMPRESSIONS[order.options.get("compression", "float16")](),
        # A full group begins at once, and progress is looked at more often than every few seconds.
        averager_opts={"target_group_size": order.num_nodes, "request_timeout": 1.0},
        tracker_opts={"default_refresh_period": 0.5, "max_refresh_period": 1.0},
    )
    # Who has no sample yet is not counted as a peer, and averages with nobody.
    while optimizer.tracker.global_progress.num_peers < order.num_nodes:
        optimizer.tracker.report_local_progress(local_epoch=0, samples_accumulated=1)
        time.sleep(0.2)
    meet(order)
    step = 0
    while True:
        before = optimizer.local_epoch
        training.inner_step(step, optimizer.step)
        step += 1
        if optimizer.local_epoch != before:
            training.save_if_due(exchanges=optimizer.local_epoch)


if __name__ == "__main__":
    main()
