"""Whole swarms with random lives and cuts, in virtual time: real daemons, real training.

One node at most dies: where all holders of a commit's results die at once, the run cannot go on
(docs/watching.md, "All nodes at once").
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.swarm.ledger import num_samples_of
from lab.simulation.memory_transport import MemoryNetwork
from lab.simulation.swarm import Life, SimulatedNode, simulate
from node.island.data.dataset import Corpus
from protocol.wire.rounds import NodeId
from tests.property.effort import examples
from tests.tiny_runs import tiny

ROUNDS = 8
DEADLINES = {"train": 20, "contribute": 30, "commit": 40, "apply": 30, "lease": 15, "floor": 2}
LAST_CHANGE_SECONDS = 10.0
"""Before the run can be over: nodes that come, or are reachable again, later than that find nobody."""

PACE = st.sampled_from([1.0, 0.5, 2.0, 6.0])
NODE = st.integers(0, 3)


A_STEP_OUTLASTS_APPLYING = {"paces": [1.0, 1.0, 6.0], "starts": [0.0] * 3, "overlap": "keep"}
NOTHING_HAPPENS: dict[str, Any] = {"dies_after": None, "cuts": [], "fragments": 1}


@examples(12)
@example(**A_STEP_OUTLASTS_APPLYING, **NOTHING_HAPPENS, adapt=True)
@given(
    paces=st.lists(PACE, min_size=2, max_size=4),
    starts=st.lists(st.floats(0, LAST_CHANGE_SECONDS), min_size=3, max_size=3),
    dies_after=st.none() | st.floats(0.1, 30),
    cuts=st.lists(
        st.tuples(NODE, NODE, st.floats(0, LAST_CHANGE_SECONDS), st.floats(0, 5)), max_size=3
    ),
    adapt=st.booleans(),
    fragments=st.integers(1, 2),
    overlap=st.sampled_from(["none", "keep", "blend"]),
)
def test_whoever_comes_dies_and_is_cut_off_all_end_with_the_same_state(
    corpus: Corpus,
    paces: list[float],
    starts: list[float],
    dies_after: float | None,
    cuts: list[tuple[int, int, float, float]],
    adapt: bool,
    fragments: int,
    overlap: str,
) -> None:
    lives = [
        Life(starts_at=start, seconds_per_inner_step=pace)
        for pace, start in zip(paces, [0.0, *starts], strict=False)
    ]
    if dies_after is not None:
        lives[-1] = Life(
            starts_at=lives[-1].starts_at,
            seconds_per_inner_step=lives[-1].seconds_per_inner_step,
            absences=((lives[-1].starts_at + dies_after, None),),
        )

    async def cut(network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        async with asyncio.TaskGroup() as group:
            for first, second, at, seconds in cuts:
                pair = nodes[first % len(nodes)].node_id, nodes[second % len(nodes)].node_id
                if pair[0] != pair[1]:
                    until = min(at + seconds, LAST_CHANGE_SECONDS)
                    group.create_task(cut_for(network, *pair, at, until))

    spec = tiny(
        run={"rounds": ROUNDS, "min_nodes": 1},
        model={"num_layers": 2},
        exchange={"fragments": fragments, "overlap": overlap},
        deadlines=DEADLINES | {"adapt": adapt},
    )
    run = simulate(spec, lives=lives, corpus=corpus, script=cut)
    assert [commit.round for commit in run.commits] == list(range(1, ROUNDS + 1))
    assert run.final.outer_digest == run.commits[-1].outer_digest
    # It may have been about to die when the run was over.
    assert len(lives) - (dies_after is not None) <= len(run.digests) <= len(lives)
    assert set(run.digests.values()) == {run.final.outer_digest}
    ledger = run.final.ledger
    assert ledger.leased == ()
    assert num_samples_of(ledger.committed) * spec.model.context == run.final.token_clock
    ends = [piece.end for piece in ledger.committed]
    assert all(end < p.first for end, p in zip(ends, ledger.committed[1:], strict=False))


async def cut_for(
    network: MemoryNetwork, first: NodeId, second: NodeId, at: float, until: float
) -> None:
    await asyncio.sleep(at)
    network.cut(first, second)
    await asyncio.sleep(max(0.0, until - at))
    network.mend(first, second)
