"""The convergence benchmark trains what a swarm trains, and says what it measured."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.convergence.claims import CLAIMS
from benchmarks.convergence.command import digest_of
from benchmarks.convergence.long import FRAGMENTS_STEPS, FRONTIER_STEPS, LONG_STEPS
from benchmarks.convergence.parts import PARTS
from benchmarks.convergence.report import Difference, Losses, frontier, verdict
from benchmarks.convergence.settings import INNER_STEPS
from benchmarks.learning.data_parallel import train_data_parallel
from lab.processes.family import SOURCES, atoll_environment
from lab.simulation.plain_calls import Setting, parts_of, swarm_at_end, train_swarm
from lab.simulation.swarm import Life, simulate
from node.island.data.dataset import Corpus
from node.island.models.first_weights import initial_parameters
from protocol.run.run_files import validated
from tests.slow_exchange import run_with
from tests.tiny_runs import tiny

PLAIN = Setting(name="plain")


@pytest.mark.parametrize("fragments", [1, 2])
def test_it_trains_to_the_same_bits_as_a_whole_swarm(fragments: int, corpus: Corpus) -> None:
    """With coordinator, daemons and transport beside it: so its losses are theirs."""
    spec = tiny(model={"num_layers": 2}, exchange={"fragments": fragments})
    swarm = simulate(spec, lives=[Life()] * 3, corpus=corpus)
    nodes = swarm_at_end(PLAIN, spec, corpus)
    assert nodes[0].parameters.tobytes() == swarm.parameters.tobytes()


@pytest.mark.parametrize(
    "overlap",
    [
        {"overlap": "blend"},
        {"overlap": "keep", "blend": 0.5},
        pytest.param({"overlap": "keep"}, marks=pytest.mark.nightly),
    ],
)
def test_results_that_are_late_are_taken_over_as_in_a_whole_swarm(
    overlap: dict[str, object], corpus: Corpus
) -> None:
    """Whose exchange ends in the middle of the third inner step; the next pauses for it."""
    spec = tiny(model={"num_layers": 2}, exchange={"fragments": 2, **overlap})
    swarm = run_with(spec, corpus, delay_seconds=2.5)
    nodes = swarm_at_end(replace(PLAIN, late_steps=3), spec, corpus)
    assert nodes[0].parameters.tobytes() == swarm.parameters.tobytes()
    sooner = swarm_at_end(replace(PLAIN, late_steps=2), spec, corpus)
    assert sooner[0].parameters.tobytes() != swarm.parameters.tobytes()


def test_results_cannot_be_later_than_the_next_round_or_at_all_without_overlap(
    corpus: Corpus,
) -> None:
    for exchange, late_steps in (({"overlap": "blend"}, 6), ({}, 1)):
        with pytest.raises(ValueError, match=f"{late_steps} inner steps late"):
            swarm_at_end(replace(PLAIN, late_steps=late_steps), tiny(exchange={**exchange}), corpus)


def test_data_parallelism_of_one_node_trains_what_a_swarm_of_one_trains(corpus: Corpus) -> None:
    """With the same schedule to its end: a swarm of one that takes its pseudo-gradients as they are."""
    spec = tiny(
        run={"min_nodes": 1, "rounds": 4},
        outer={"optimizer": "sgd", "learning_rate": 1.0, "momentum": 0.0},
        exchange={"uplink": "fp32", "downlink": "fp32"},
    )
    alone = train_data_parallel(spec, corpus, learning_rate=spec.inner.learning_rate)
    swarm = train_swarm(PLAIN, spec, corpus)
    assert alone == pytest.approx(swarm.loss, abs=1e-4)


def test_late_work_is_not_lost(corpus: Corpus) -> None:
    spec = tiny()
    nodes = swarm_at_end(replace(PLAIN, drop_rate=0.6), spec, corpus)
    owed = [float(np.abs(node.outer.owed().residual).max()) for node in nodes]
    in_time = swarm_at_end(PLAIN, spec, corpus)
    rounding = [float(np.abs(node.outer.owed().residual).max()) for node in in_time]
    assert max(owed) > 2 * max(rounding)
    moved, moved_in_time = (
        float(np.abs(swarm[0].parameters - initial_parameters(spec)).mean())
        for swarm in (nodes, in_time)
    )
    assert 0.2 * moved_in_time < moved < moved_in_time  # late work counts later, and not before


def test_own_texts_do_not_overlap_and_are_equally_long(corpus: Corpus) -> None:
    parts = parts_of(corpus, 3)
    joined = np.concatenate([part.training for part in parts])
    assert joined.tobytes() == corpus.training[: joined.size].tobytes()
    assert len({part.training.size for part in parts}) == 1
    assert corpus.training.size - joined.size < 3


@pytest.mark.nightly
def test_every_setting_of_every_part_is_a_run_and_has_a_name_of_its_own() -> None:
    steps = dict.fromkeys(("frontier", "tuning", "muon"), FRONTIER_STEPS)
    steps |= dict.fromkeys(("long", "long-muon"), LONG_STEPS) | {"fragments": FRAGMENTS_STEPS}
    for part, settings in PARTS.items():
        names = [setting.name for setting in settings()]
        assert len(set(names)) == len(names), part
        for setting in settings():
            spec = validated(setting.tables, origin=setting.name)
            trained = spec.run.rounds * spec.inner.steps
            # Whole rounds only: never more tokens than data parallelism has, and less than a round fewer.
            assert 0 <= steps.get(part, INNER_STEPS) - trained < spec.inner.steps, setting.name
    known = {part: {setting.name for setting in settings()} for part, settings in PARTS.items()}
    for claim in CLAIMS:
        assert {claim.of, claim.against} <= known[claim.part]


def line(setting: str, seed: int, loss: float) -> dict[str, object]:
    return {
        "part": "p",
        "setting": setting,
        "seed": seed,
        "loss": loss,
        "bits_up": 4,
        "bits_down": 4,
    }


def test_settings_are_compared_seed_by_seed() -> None:
    """The seeds differ by far more than the settings, and that cancels."""
    losses = Losses([line("a", 0, 2.0), line("a", 1, 3.0), line("b", 1, 3.5), line("b", 0, 2.25)])
    found = losses.difference("p", "b", "a")
    assert found == Difference(mean=0.375, error=0.125)
    assert losses.table("p")[2:] == [
        "| a | 2.500 | 2 |  |",
        "| b | 2.875 | 2 | +0.375 ± 0.125 |",
    ]
    assert losses.difference("p", "b", "c") is None


@pytest.mark.parametrize(
    ("sign", "mean", "error", "says"),
    [
        (1, 0.1, 0.01, "reproduced"),
        (-1, 0.1, 0.01, "**not reproduced**"),
        (1, 0.1, 0.06, "not clear"),
        (0, 0.004, 0.001, "reproduced"),
        (0, 0.1, 0.01, "**not reproduced**"),
        (0, 0.1, 0.06, "not clear"),
        (0, -0.1, 0.01, "reproduced"),
        (0, 0.004, math.inf, "reproduced"),
        (1, 0.1, math.inf, "one seed only"),
    ],
)
def test_a_sign_is_only_judged_when_the_difference_is_clear(
    sign: int, mean: float, error: float, says: str
) -> None:
    assert verdict(sign, Difference(mean=mean, error=error)) == says


def test_a_run_is_known_by_all_that_makes_it_what_it_is() -> None:
    other = PLAIN.changed("plain", run={"rounds": 3})
    runs = {
        digest_of(PLAIN, 0),
        digest_of(PLAIN, 1),
        digest_of(other, 0),
        digest_of(replace(PLAIN, drop_rate=0.5), 0),
        digest_of(replace(PLAIN, own_text=True), 0),
        digest_of(replace(PLAIN, late_steps=1), 0),
        digest_of(replace(PLAIN, name="data parallel"), 0),
    }
    assert len(runs) == 7
    assert digest_of(replace(PLAIN, name="another name"), 0) == digest_of(PLAIN, 0)


@pytest.mark.nightly
def test_its_quick_form_goes_through_all_of_it(tmp_path: object) -> None:
    results = f"{tmp_path}/results.jsonl"
    command = [sys.executable, "-m", "benchmarks.convergence", "--quick", "--seeds", "0"]
    ran = subprocess.run(
        [*command, "--processes", "1", "--results", results],
        cwd=SOURCES,
        env=atoll_environment({}),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    with open(results) as file:  # noqa: PTH123 - a path as text
        lines = [json.loads(text) for text in file]
    assert len(lines) == 4
    assert all(5 < entry["loss"] < 6 for entry in lines)  # an untrained model: ln 256 is 5.55
    assert "| tiny, int4 | " in ran.stdout


def test_the_frontier_counts_bytes_against_an_all_reduce_at_every_step_seed_by_seed() -> None:
    def run(setting: str, seed: int, loss: float, bits: float | None) -> dict[str, object]:
        told = {"part": "frontier", "setting": setting, "seed": seed, "loss": loss}
        return told | {"bits_up": bits, "bits_down": bits}

    (point,) = frontier(
        [
            run("data parallel", 0, 2.0, None),
            run("data parallel", 1, 1.0, None),
            run("int4, H = 32", 0, 2.02, 4.0),
            run("int4, H = 32", 1, 1.03, 4.0),
            run("int4, H = 32", 2, 9.0, 4.0),  # has nothing to be compared with
        ]
    )
    # Of n nodes each sends 2 (n - 1) / n of 32 bits at each of 32 steps, or (n - 1) / n of 4 + 4 once.
    assert point.x == pytest.approx(2 * 32 * 32 / 8)
    assert (point.y, point.low, point.high) == pytest.approx((2.0, 1.0, 3.0))
