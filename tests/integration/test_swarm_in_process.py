"""A whole swarm in one process, in virtual time: real core, real nodes, real training, no network."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lab.simulation.swarm import Life, SimulatedRun, simulate
from node.island.data.dataset import Corpus
from node.island.island import InnerReport, InnerWork
from node.island.parallel.mesh_shape import LocalTraining, Precision
from node.island.training.trainer import Trainer
from tests.tiny_runs import tiny


@pytest.fixture(scope="module")
def finished(corpus: Corpus) -> SimulatedRun:
    return simulate(tiny(), lives=[Life()] * 3, corpus=corpus)


def test_the_same_run_file_gives_the_same_digests_twice(
    finished: SimulatedRun, corpus: Corpus
) -> None:
    again = simulate(tiny(), lives=[Life()] * 3, corpus=corpus)
    assert [c.outer_digest for c in again.commits] == [c.outer_digest for c in finished.commits]
    assert again.digests == finished.digests
    assert again.held_out == finished.held_out


def test_another_seed_gives_other_digests(finished: SimulatedRun, corpus: Corpus) -> None:
    other = simulate(tiny(run={"seed": 2}), lives=[Life()] * 3, corpus=corpus)
    assert set(other.digests.values()).isdisjoint(finished.digests.values())


def test_all_nodes_hold_the_same_state_and_it_is_the_settled_one(finished: SimulatedRun) -> None:
    assert set(finished.digests.values()) == {finished.final.outer_digest}
    assert finished.commits[-1].outer_digest == finished.final.outer_digest


def test_every_slice_of_every_round_holds_all_contributions(finished: SimulatedRun) -> None:
    assert [commit.round for commit in finished.commits] == [1, 2, 3, 4]
    tokens_of_a_node = 5 * 4 * 32
    for commit in finished.commits:
        assert len(commit.slices) == 3
        for outcome in commit.slices:
            assert [c.tokens for c in outcome.contributors] == [tokens_of_a_node] * 3
    assert finished.final.token_clock == 4 * 3 * tokens_of_a_node


def test_training_lowers_the_held_out_loss(finished: SimulatedRun) -> None:
    assert [held_out.round for held_out in finished.held_out] == [0, 2, 4]
    first, *_, last = finished.held_out
    assert first.loss == pytest.approx(np.log(256), abs=0.2)  # an untrained model knows nothing
    assert last.loss < first.loss - 0.5


def test_nodes_of_three_precisions_end_in_the_same_state_and_learn(
    finished: SimulatedRun, corpus: Corpus
) -> None:
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
    mixed = simulate(
        tiny(),
        lives=[Life(local=LocalTraining(precision=precision)) for precision in precisions],
        corpus=corpus,
    )
    assert set(mixed.digests.values()) == {mixed.final.outer_digest}
    assert set(mixed.digests.values()).isdisjoint(finished.digests.values())  # they do differ
    assert [len(outcome.contributors) for outcome in mixed.commits[-1].slices] == [3] * 3
    losses = [held_out.loss for held_out in mixed.held_out]
    assert losses == pytest.approx([held_out.loss for held_out in finished.held_out], rel=2e-2)
    assert losses[-1] < losses[0] - 0.5


def test_one_node_with_sgd_at_rate_1_and_fp32_is_plain_training(corpus: Corpus) -> None:
    """With nothing to average and nothing rounded away, adopting is going on where one was."""
    plain = {"optimizer": "sgd", "learning_rate": 1.0}
    exact = {"uplink": "fp32", "downlink": "fp32"}
    alone = {"min_nodes": 1, "rounds": 4}
    in_rounds = simulate(
        tiny(run=alone, outer=plain, exchange=exact), lives=[Life()], corpus=corpus
    )
    at_once = simulate(
        tiny(run={**alone, "rounds": 1}, inner={"steps": 20}, outer=plain, exchange=exact),
        lives=[Life()],
        corpus=corpus,
    )
    np.testing.assert_allclose(in_rounds.parameters, at_once.parameters, atol=5e-6)


def test_int4_sends_about_an_eighth_of_fp32(finished: SimulatedRun, corpus: Corpus) -> None:
    exact = simulate(
        tiny(exchange={"uplink": "fp32", "downlink": "fp32"}), lives=[Life()] * 3, corpus=corpus
    )
    ratio = sum(exact.bytes_sent.values()) / sum(finished.bytes_sent.values())
    assert 6 < ratio < 8.5  # headers and scales keep it below 8, audits of fp32 errors may not


def test_settled_digests_form_a_chain(finished: SimulatedRun) -> None:
    for before, after in zip(finished.commits, finished.commits[1:], strict=False):
        assert after.base_digest == before.outer_digest
    assert replace(finished.commits[0]).base_digest not in {None, finished.final.outer_digest}


@pytest.mark.parametrize("overlap", ["none", "keep"])
@pytest.mark.parametrize("num_nodes", [1, 4])
def test_the_learning_rate_in_the_middle_of_a_run_is_the_schedules_middle_however_many_nodes_train(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, num_nodes: int, overlap: str
) -> None:
    rates: dict[int, set[float]] = {}
    train = Trainer.train

    def told(self: Trainer, work: InnerWork, *arguments: Any) -> InnerReport:
        report = train(self, work, *arguments)
        if work.steps_before + report.inner_steps == 5:  # the round's last inner step
            rates.setdefault(work.round, set()).add(self._optimizers[0].param_groups[0]["lr"])
        return report

    monkeypatch.setattr(Trainer, "train", told)
    # A re-warm-up is over after two inner steps with beta2 = 0: nodes join while the first trains.
    inner = {"schedule": "linear", "final_fraction": 0.0, "warmup_tokens": 0, "beta2": 0.0}
    spec = tiny(
        run={"rounds": 6, "min_nodes": 1},
        inner={**inner, "learning_rate": 1e-2},
        exchange={"overlap": overlap},
    )
    lives = [Life(seconds_per_inner_step=0.1 + 0.01 * place) for place in range(num_nodes)]
    run = simulate(spec, lives=lives, corpus=corpus)
    assert len(run.commits[-1].assignments) == num_nodes
    # Each inner step has the rate of its middle, here that of the fifth of five in each round.
    expected = {number: 1e-2 * (1 - (number - 1 + 0.9) / 6) for number in range(1, 7)}
    assert {number: min(found) for number, found in rates.items()} == pytest.approx(expected)
    assert all(max(found) == min(found) for found in rates.values()), "nodes differ"
