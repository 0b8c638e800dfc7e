"""Spot checks in a whole swarm, by production's code: who trains stays, who only says so loses its place."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from coordinator.swarm.state import MemberState
from lab.simulation.swarm import Life, SimulatedRun, identity_of, simulate
from node.island.data.corpus import Corpus
from node.outer_state import Vector
from protocol.trust.evidence import proven_by
from protocol.trust.rulings import RulingKind
from tests.tiny_runs import tiny

NUM_NODES, LIAR_PLACE, ROUNDS = 5, 4, 18
LIAR = identity_of(LIAR_PLACE).node_id
MODEL = {"hidden_size": 32, "num_heads": 2, "ffn_size": 64, "context": 32}
HONEST = Life(seconds_per_inner_step=1.0)


def run(corpus: Corpus, lives: Sequence[Life]) -> SimulatedRun:
    """A round takes sixteen virtual seconds; each contributor of each is checked."""
    spec = tiny(
        outer={"audit": 1.0},
        run={"min_nodes": NUM_NODES - 1, "rounds": ROUNDS},
        model=MODEL,
        inner={"steps": 16, "batch": 2, "learning_rate": 1e-2},
        evaluation={"every_rounds": 100},
    )
    return simulate(
        spec, lives=lives, corpus=replace(corpus, context=MODEL["context"]), within_seconds=2000
    )


def with_liar(liar: Life) -> list[Life]:
    return [*[HONEST] * LIAR_PLACE, as_liar(liar)]


def as_liar(life: Life) -> Life:
    """It waits in quarantine for ever, so it is killed once the others are done."""
    return replace(life, is_liar=True, absences=((1000.0, None),))


class Copier:
    """Publishes the mean of what others have published in the round: no work of its own."""

    def __init__(self) -> None:
        self.others: dict[int, Vector] = {}

    def watch(self, place: int) -> Life:
        def see(parameters: Vector, published: Vector) -> None:
            self.others[place] = parameters - published

        return replace(HONEST, on_published=see)

    def copy(self, parameters: Vector, published: Vector) -> None:
        middle = np.mean(list(self.others.values()), axis=0, dtype=np.float32)
        np.subtract(parameters, middle, out=published)


def put_out(done: SimulatedRun) -> dict[str, str]:
    return {
        ruling.node_id: ruling.reason
        for ruling in done.final.rulings
        if ruling.kind is RulingKind.QUARANTINED
    }


def expect_liar_put_out(done: SimulatedRun) -> None:
    """It alone, with evidence; the others finish the run."""
    assert set(put_out(done)) == {LIAR}
    assert "has not trained what it was leased" in put_out(done)[LIAR]
    (ruling,) = [r for r in done.final.rulings if r.kind is RulingKind.QUARANTINED]
    assert "signed spot checks of" in proven_by(ruling, run_digest=done.final.run_digest)
    assert done.final.members[LIAR].state is MemberState.QUARANTINED
    assert done.final.committed_round == ROUNDS
    later = [c for c in done.commits if LIAR not in {a.node_id for a in c.assignments}]
    assert later, "plans go on without it"


def test_nobody_that_trains_is_put_out_and_all_are_found_to_have_trained(corpus: Corpus) -> None:
    done = run(corpus, [HONEST] * NUM_NODES)

    assert not put_out(done)
    for member in done.final.members.values():
        assert len(member.spots) > ROUNDS / 2, "each is checked in nearly every round"
        scores = [finding.score for finding in member.spots]
        assert np.mean(scores) > 1.5


def test_who_copies_the_mean_of_the_others_is_put_out(corpus: Corpus) -> None:
    copier = Copier()
    liar = replace(HONEST, seconds_per_inner_step=1.01, on_published=copier.copy)

    expect_liar_put_out(run(corpus, [*map(copier.watch, range(LIAR_PLACE)), as_liar(liar)]))


@pytest.mark.nightly
def test_who_trains_an_eighth_of_what_it_says_is_put_out(corpus: Corpus) -> None:
    expect_liar_put_out(run(corpus, with_liar(replace(HONEST, trained_share=1 / 8))))
