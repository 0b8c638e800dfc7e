"""Swarms in one process of which one member, node-2, lies."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

from blake3 import blake3

from lab.simulation.swarm import Life, SimulatedRun, identity_of, simulate
from node.island.data.dataset import Corpus
from protocol.wire.payload import Payload
from protocol.wire.rounds import Digest
from tests.tiny_runs import tiny

NUM_NODES = 5
LIAR, CALLED = identity_of(1).node_id, "node-2"


def run(corpus: Corpus, *, screening: bool = True) -> SimulatedRun:
    spec = tiny(outer={"screening": screening}, run={"min_nodes": NUM_NODES})
    return simulate(spec, lives=[Life()] * NUM_NODES, corpus=corpus)


LONG = {"train": 600, "contribute": 660, "commit": 720, "apply": 60, "lease": 15}
SHORT = {"train": 20, "contribute": 30, "commit": 40, "apply": 10, "lease": 15}
"""Deadlines; a round takes five virtual seconds where nobody is waited for."""


IDLER = Life(seconds_per_inner_step=1.0, is_liar=True, absences=((500.0, None),))


def run_with_an_idler(
    corpus: Corpus,
    idler: Life = IDLER,
    *,
    deadlines: dict[str, int] = SHORT,
    outer: dict[str, Any] | None = None,
    **run: int,
) -> SimulatedRun:
    """A run of which no round needs the liar, and which ends."""
    spec = tiny(run={"min_nodes": NUM_NODES - 1, **run}, deadlines=deadlines, outer=outer or {})
    honest = Life(seconds_per_inner_step=1.0)
    lives = [idler if place == 1 else honest for place in range(NUM_NODES)]
    attacked = simulate(spec, lives=lives, corpus=corpus, within_seconds=1000)
    assert attacked.final.is_finished
    return attacked


def has_void_slices(attacked: SimulatedRun) -> bool:
    return any(outcome.digest is None for c in attacked.commits for outcome in c.slices)


def seconds_of(attacked: SimulatedRun) -> list[float]:
    """How long each round but the last takes."""
    return [after - before for before, after in pairwise(attacked.begins)]


def nonsense(payload: Payload, *, is_signed_for: bool = True) -> Payload:
    """The same with a body of the right size that no codec takes, and its digest where that is asked for."""
    body = b"\xff" * len(payload.body)
    if not is_signed_for:
        return Payload(header=payload.header, body=body)
    header = replace(payload.header, body_digest=Digest(blake3(body).digest()))
    return Payload(header=header, body=body)
