"""The in-memory network with uplinks: what one node sends goes out one payload after the other."""

import asyncio

from node.exchange.transport.memory import MemoryNetwork
from protocol.wire.rounds import NodeId


class QueuedNetwork(MemoryNetwork):
    """Every node's uplink carries so much, for all of its payloads together.

    In swarms of equal nodes downlinks then carry as much and need no queue of their own.
    """

    def __init__(self, *, bytes_per_second: float, latency_seconds: float) -> None:
        super().__init__()
        self.latency_seconds = latency_seconds
        self._bytes_per_second_of_all = bytes_per_second
        self._free_at: dict[NodeId, float] = {}

    def seconds_for(self, sender: NodeId, num_bytes: int) -> float:
        """Until the payload is at the other side: behind all that its sender has sent before."""
        now = asyncio.get_running_loop().time()
        begins = max(now, self._free_at.get(sender, now))
        self._free_at[sender] = begins + num_bytes / self._bytes_per_second_of_all
        return self._free_at[sender] + self.latency_seconds - now
