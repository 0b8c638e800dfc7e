"""What a death in every round costs a swarm: the time of those who live, in virtual time.

    python -m benchmarks.learning.churn --nodes 6 --rounds 20 --round-seconds 60 --seeds 0

Two runs of the same swarm through the real core, store, daemons and codecs (lab.simulation.swarm):
one without faults, and one in which a node is killed in every round, at a random time, and its
process begins again after a while. Transfers take no virtual time, so this measures waiting and
lost work, not bandwidth; benchmarks.chaos does the same with real processes.

A dead node's own time cannot be used by anybody: from its death until it is in a plan again, and what
it had trained in that round before. So the aim is what the others alone would have trained.
"""

import logging
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
import structlog

from lab.simulation.swarm import Life, SimulatedRun, identity_of, simulate
from protocol.run.run_files import validated
from protocol.run.run_spec import RunSpec

STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run with deaths, beside one without."""

    num_deaths: int
    num_void_slices: int
    num_slices: int
    own_share: float  # of all node time, in which dead nodes could not help
    throughput: float  # committed tokens per second, as a share of the fault-free run's
    seconds_per_round: float
    faultless_seconds_per_round: float

    @property
    def of_the_living(self) -> float:
        """Throughput as a share of what the living alone would have reached."""
        return self.throughput / (1 - self.own_share)


def spec_of(rounds: int, num_nodes: int) -> RunSpec:
    """A model that trains in no time; what counts is when things happen."""
    return validated(
        {
            "run": {"name": "churn", "rounds": rounds, "min_nodes": num_nodes - 2},
            "model": {
                "hidden_size": 16,
                "num_layers": 1,
                "num_heads": 2,
                "num_kv_heads": 1,
                "ffn_size": 16,
                "context": 16,
            },
            "inner": {"steps": STEPS, "batch": 1},
            "evaluation": {"every_rounds": rounds, "samples": 1},
        },
        origin="benchmarks.learning.churn",
    )


def deaths_of(
    rounds: int, num_nodes: int, round_seconds: float, away_seconds: float, rng: random.Random
) -> list[list[tuple[float, float | None]]]:
    """For each node when it dies and returns: one death within each time that a round should take."""
    absences: list[list[tuple[float, float | None]]] = [[] for _ in range(num_nodes)]
    for number in range(2, rounds):
        dies_at = round_seconds * (number + rng.random())
        living = [
            place
            for place, past in enumerate(absences)
            if not past or (past[-1][1] or 0.0) + round_seconds < dies_at
        ]
        absences[rng.choice(living)].append((dies_at, dies_at + away_seconds))
    return absences


def without_faults(*, num_nodes: int, rounds: int, round_seconds: float) -> SimulatedRun:
    """The run that the others are compared with."""
    steady = Life(seconds_per_inner_step=round_seconds / STEPS)
    return simulate(spec_of(rounds, num_nodes), lives=[steady] * num_nodes)


def compared(
    faultless: SimulatedRun,
    *,
    num_nodes: int,
    rounds: int,
    round_seconds: float,
    away_seconds: float,
    seed: int,
) -> Outcome:
    """Runs the same swarm with deaths, and compares it."""
    spec = spec_of(rounds, num_nodes)
    pace = round_seconds / STEPS
    rng = random.Random(seed)
    absences = deaths_of(rounds, num_nodes, round_seconds, away_seconds, rng)
    lives = [Life(seconds_per_inner_step=pace, absences=tuple(times)) for times in absences]
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(spec, lives=lives, disks=Path(folder))
    _check(run, rounds)
    slices = [outcome for commit in run.commits for outcome in commit.slices]
    happened = [
        (place, time)
        for place, times in enumerate(absences)
        for time, _ in times
        if time < run.seconds
    ]
    return Outcome(
        num_deaths=len(happened),
        num_void_slices=sum(outcome.digest is None for outcome in slices),
        num_slices=len(slices),
        own_share=sum(_own_seconds(run, *death) for death in happened) / (num_nodes * run.seconds),
        throughput=_tokens_per_second(run) / _tokens_per_second(faultless),
        seconds_per_round=run.seconds / rounds,
        faultless_seconds_per_round=faultless.seconds / rounds,
    )


def _check(run: SimulatedRun, rounds: int) -> None:
    """The same model everywhere, and every round once; otherwise no figure means anything."""
    assert set(run.digests.values()) == {run.final.outer_digest}
    assert [commit.round for commit in run.commits] == list(range(1, rounds + 1))
    assert run.final.ledger.leased == ()


def _own_seconds(run: SimulatedRun, place: int, dies_at: float) -> float:
    """From the start of the round in which a node died to that of the next one that it is in."""
    node_id = identity_of(place).node_id
    begins = [(commit, begin) for commit, begin in zip(run.commits, run.begins, strict=True)]
    died_in = max((begin for _, begin in begins if begin <= dies_at), default=0.0)
    back_in = min(
        (
            begin
            for commit, begin in begins
            if begin > dies_at and any(a.node_id == node_id for a in commit.assignments)
        ),
        default=run.seconds,
    )
    return back_in - died_in


def _tokens_per_second(run: SimulatedRun) -> float:
    return run.final.token_clock / run.seconds


@click.command()
@click.option("--nodes", "num_nodes", default=6, show_default=True)
@click.option("--rounds", default=20, show_default=True)
@click.option(
    "--round-seconds",
    multiple=True,
    default=(20.0, 60.0, 300.0),
    show_default=True,
    help="What a round's training takes; may be given more than once.",
)
@click.option(
    "--away-seconds", default=10.0, show_default=True, help="From a death to the new process."
)
@click.option("--seeds", multiple=True, default=(0, 1, 2), show_default=True)
def main(
    num_nodes: int,
    rounds: int,
    round_seconds: tuple[float, ...],
    away_seconds: float,
    seeds: tuple[int, ...],
) -> None:
    """Prints, for rounds of each length, what one death a round costs those who live."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    click.echo(
        f"{num_nodes} nodes, {rounds} rounds, one death a round, back after {away_seconds:g} s"
    )
    for seconds in round_seconds:
        faultless = without_faults(num_nodes=num_nodes, rounds=rounds, round_seconds=seconds)
        for seed in seeds:
            outcome = compared(
                faultless,
                num_nodes=num_nodes,
                rounds=rounds,
                round_seconds=seconds,
                away_seconds=away_seconds,
                seed=seed,
            )
            click.echo(
                f"training {seconds:g} s, seed {seed}: {outcome.num_deaths} deaths, "
                f"{outcome.num_void_slices} of {outcome.num_slices} slices void, "
                f"{outcome.seconds_per_round:.1f} s a round instead of "
                f"{outcome.faultless_seconds_per_round:.1f}; throughput "
                f"{100 * outcome.throughput:.1f} % of fault-free, "
                f"{100 * outcome.of_the_living:.1f} % of what the living could reach"
            )


if __name__ == "__main__":
    main()
