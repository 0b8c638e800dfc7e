"""Swarms that train on while bytes travel, in virtual time: no waiting, and the same learning."""

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.swarm.ledger import num_samples_of
from lab.simulation.swarm import Life, SimulatedRun, simulate
from node.island.data.dataset import Corpus
from protocol.run.run_spec import RunSpec
from tests.slow_exchange import run_with
from tests.tiny_runs import tiny

ROUNDS, STEPS = 12, 5
EXCHANGE_SECONDS = 3.0


def spec_of(overlap: str, fragments: int, num_nodes: int = 2) -> RunSpec:
    return tiny(
        run={"rounds": ROUNDS, "min_nodes": num_nodes},
        model={"num_layers": 2},
        inner={"steps": STEPS},
        exchange={"overlap": overlap, "fragments": fragments},
        evaluation={"every_rounds": ROUNDS},
    )


def seconds_of_a_round(run: SimulatedRun) -> float:
    """Mean, from the third plan to the last: the second is the first that finds work done."""
    return (run.begins[-1] - run.begins[2]) / (len(run.begins) - 3)


def test_with_overlap_a_round_takes_what_its_inner_steps_take(corpus: Corpus) -> None:
    """So at least 95 % of the time is spent in them."""
    waiting = run_with(spec_of("none", 1), corpus, delay_seconds=EXCHANGE_SECONDS)
    assert seconds_of_a_round(waiting) == pytest.approx(STEPS + EXCHANGE_SECONDS)
    first, last = (loss.loss for loss in (waiting.held_out[0], waiting.held_out[-1]))
    for overlap, fragments in (("keep", 1), ("keep", 2), ("blend", 1)):
        run = run_with(spec_of(overlap, fragments), corpus, delay_seconds=EXCHANGE_SECONDS)
        assert seconds_of_a_round(run) <= STEPS / 0.95
        assert run.final.token_clock == waiting.final.token_clock, "not the same tokens"
        assert run.held_out[-1].loss < last + 0.15 * (first - last)
        assert len(set(run.digests.values())) == 1


def test_an_exchange_that_takes_longer_than_training_is_all_that_is_waited_for(
    corpus: Corpus,
) -> None:
    run = run_with(spec_of("keep", 1), corpus, delay_seconds=2 * STEPS)
    assert 2 * STEPS <= seconds_of_a_round(run) <= 2 * STEPS + 1


def test_who_joins_dies_and_comes_back_is_in_step_and_no_sample_counts_twice(
    corpus: Corpus, tmp_path: Path
) -> None:
    """A death in the middle of training ahead, and a joiner that nothing was leased ahead to."""
    spec = spec_of("keep", 2, num_nodes=1)
    life = Life(seconds_per_inner_step=1.0)
    run = simulate(
        spec,
        lives=[
            life,
            replace(life, absences=((17.5, 23.0),)),
            replace(life, starts_at=12.3, seconds_per_inner_step=2.0),
        ],
        corpus=corpus,
        disks=tmp_path,
    )
    assert len(run.digests) == 3
    assert set(run.digests.values()) == {run.final.outer_digest}
    ledger = run.final.ledger
    assert ledger.leased == () == ledger.ahead
    assert num_samples_of(ledger.committed) * spec.model.context == run.final.token_clock
