"""Swarms in virtual time whose exchanges take as long as a test says."""

from collections.abc import Sequence

from lab.simulation.memory_transport import MemoryNetwork
from lab.simulation.swarm import Life, SimulatedNode, SimulatedRun, simulate
from node.island.data.dataset import Corpus
from protocol.run.run_spec import RunSpec


def run_with(spec: RunSpec, corpus: Corpus | None, *, delay_seconds: float) -> SimulatedRun:
    """Equal nodes, a second an inner step, and half of the delay for contributions, half for results."""

    async def slow_down(network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        network.latency_seconds = delay_seconds / 2

    lives = [Life(seconds_per_inner_step=1.0)] * spec.run.min_nodes
    return simulate(spec, lives=lives, corpus=corpus, script=slow_down)
