"""Joining a swarm that trains on, in virtual time: donors that die, lie and move on meanwhile."""

import asyncio
from collections.abc import Sequence

import pytest

from lab.simulation.memory_transport import MemoryNetwork
from lab.simulation.swarm import Life, Script, SimulatedNode, SimulatedRun, simulate
from node.exchange import giving
from node.exchange.fetching import MOST_AT_ONCE
from node.exchange.peers import Want, WantChunk
from node.exchange.state.chunks import Manifest
from node.island.data.dataset import Corpus
from protocol.wire.payload import Payload
from protocol.wire.rounds import NodeId
from tests.tiny_runs import tiny
from tests.unit.download_scene import changed, cut_small

DEADLINES = {"train": 20, "contribute": 30, "commit": 40, "apply": 10, "lease": 15}
STEADY = Life(seconds_per_inner_step=1.0)
"""Takes five virtual seconds for a round."""

JOINS_AT = 42.0
"""In the ninth round: results of the first ones are held no more."""

LATE = Life(starts_at=JOINS_AT, seconds_per_inner_step=1.0)
CHUNK_BYTES = 4096
CHUNKS_A_SECOND = 1.05
"""From each donor and stream: the tiny model's state is some dozens of chunks. Nothing of a chunk comes
before all of it, which must take less than the second after which a donor is silent."""


@pytest.fixture(autouse=True)
def a_state_of_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of what a joiner missed only the latest can be replayed."""
    cut_small(monkeypatch, CHUNK_BYTES)
    monkeypatch.setattr(giving, "KEPT_ROUNDS", 6)


class Watch:
    """Slows chunks down, counts who gave them, and notes when each round was applied."""

    def __init__(self, then: Script | None = None) -> None:
        self.given: dict[NodeId, int] = {}
        self.applied_at: dict[int, float] = {}
        self.joined_at_round = 0
        self._then = then

    async def __call__(self, network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        loop = asyncio.get_running_loop()
        for node in nodes:
            self._slow_down(node)
        then = None if self._then is None else asyncio.ensure_future(self._then(network, nodes))
        while True:
            self.applied_at.setdefault(nodes[0].outer.round, loop.time())
            joiner = nodes[-1].outer.round
            if joiner and not self.joined_at_round:
                self.joined_at_round = joiner
            await asyncio.sleep(0.25)
            if then is not None and then.done():
                then.result()

    def _slow_down(self, node: SimulatedNode) -> None:
        exchange = node._daemon._exchange
        honest = exchange.supply

        async def supply(sender: NodeId, want: Want) -> Payload | None:
            payload = await honest(sender, want)
            if isinstance(want, WantChunk) and payload is not None:
                self.given[node.node_id] = self.given.get(node.node_id, 0) + 1
                await asyncio.sleep(1 / CHUNKS_A_SECOND)
            return payload

        exchange.supply = supply  # type: ignore[method-assign]

    def round_seconds(self, first: int, last: int) -> list[float]:
        return [self.applied_at[r] - self.applied_at[r - 1] for r in range(first, last + 1)]


def joined(corpus: Corpus, lives: list[Life], watch: Watch, *, rounds: int = 16) -> SimulatedRun:
    spec = tiny(run={"rounds": rounds, "min_nodes": 2}, deadlines=DEADLINES)
    return simulate(spec, lives=[*lives, LATE], corpus=corpus, script=watch)


def assert_joined(run: SimulatedRun, num_nodes: int) -> None:
    """All agree, and the joiner's work counts in full at the end."""
    assert run.final.outer_digest is not None
    assert set(run.digests.values()) == {run.final.outer_digest}
    assert len(run.digests) == num_nodes
    for outcome in run.commits[-1].slices:
        assert outcome.digest is not None
        tokens = {c.tokens for c in outcome.contributors}
        assert len(outcome.contributors) == num_nodes
        assert tokens == {5 * 4 * 32}


def num_chunks_of(run: SimulatedRun) -> int:
    return Manifest.num_chunks(run.parameters.size)


def test_nobody_waits_for_a_joiner_that_downloads_from_all(
    corpus: Corpus,
) -> None:
    watch = Watch()
    run = joined(corpus, [STEADY] * 3, watch)
    assert_joined(run, 4)
    num_chunks = num_chunks_of(run)
    assert sum(watch.given.values()) == num_chunks > 20
    assert len(watch.given) == 3
    assert max(watch.given.values()) <= num_chunks / 2
    # It downloaded for longer than a round, and every round took as long as those before it.
    first = int(JOINS_AT // 5)
    last = watch.joined_at_round
    assert num_chunks / CHUNKS_A_SECOND / 4 > 5
    assert watch.round_seconds(first, last + 2) == pytest.approx([5] * (last + 3 - first), abs=0.5)


def test_a_donor_that_dies_in_the_middle_leaves_the_download_to_the_others(
    corpus: Corpus,
) -> None:
    watch = Watch()
    mortal = Life(seconds_per_inner_step=1.0, absences=((JOINS_AT + 5, None),))
    run = joined(corpus, [STEADY, STEADY, mortal], watch)
    assert_joined(run, 3)
    assert len(watch.given) == 3  # it gave some


def test_a_donor_that_lies_costs_time_and_no_correctness(
    corpus: Corpus,
) -> None:
    lied = []

    async def lie(network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        exchange = nodes[0]._daemon._exchange
        honest = exchange.supply

        async def supply(sender: NodeId, want: Want) -> Payload | None:
            payload = await honest(sender, want)
            if isinstance(want, WantChunk) and payload is not None:
                lied.append(want.index)
                return changed(payload, bytes(len(payload.body)))
            return payload

        exchange.supply = supply  # type: ignore[method-assign]

    run = joined(corpus, [STEADY] * 3, Watch(lie))
    assert_joined(run, 4)
    assert 1 <= len(lied) <= 2  # then it is not asked any more


def test_a_joiner_that_is_cut_off_goes_on_where_it_was(
    corpus: Corpus,
) -> None:
    async def cut_for_a_while(network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        await asyncio.sleep(JOINS_AT + 5)
        for node in nodes[:-1]:
            network.cut(node.node_id, nodes[-1].node_id)
        await asyncio.sleep(10)
        for node in nodes[:-1]:
            network.mend(node.node_id, nodes[-1].node_id)

    watch = Watch(cut_for_a_while)
    run = joined(corpus, [STEADY] * 3, watch)
    assert_joined(run, 4)
    # What was on its way when the links broke was sent in vain, and nothing else.
    num_chunks = num_chunks_of(run)
    assert num_chunks < sum(watch.given.values()) <= num_chunks + 2 * MOST_AT_ONCE
