"""Atoll and its peers over slow links, side by side: time and bytes to a loss, on the network lab.

    python -m benchmarks.wan [--rates 100] [--round-trips 50] [--contenders atoll@5 ddp …]

Without arguments it measures the case that docs/performance.md publishes. Every contender trains the
same model from the same weights on the same samples, one process for each node, in hosts of the network
lab, one contender after the other. Held-out loss is measured after each has ended. An inner step lasts
`--step-seconds`, as on a GPU of one's own: what is not computed is slept, alike for all
(benchmarks/wan/peers/pace.py), so the cores stay free for the network. The loss to be reached is the
lowest that a peer ends with, unless `--target` names one; times lie on straight lines between
evaluations.

`gloo-diloco@20` takes 20 inner steps between two exchanges, and a name without a number `--inner-steps`.
Who sends much does best to exchange seldom, so a contender may run with several numbers: each variant
has a row of its own, and the best one counts, of a peer and of Atoll. An inner step has as many tokens
in all of them. A contender ends with its last exchange in time: what it trained after that is in no
global weights, and the time that it took is not counted either.

`--rates 0` lifts the limits of the links, and with `--steps` all contenders end after as many inner
steps, so settings are compared by their loss alone. The number must be a multiple of all numbers of
steps between two exchanges: then all have exchanged what as many tokens taught, and nobody ends in the
middle of a round. `--set outer.learning_rate=0.7` changes the run file, for all variants of all.

Needs root. Prints tables and adds JSON lines to `--output`.

A command that has measured a case prints the newest run of it again with `--report`, and draws it with
`--report --figure FILE`.
"""

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog
import torch

from benchmarks.measurement import Rows, add_results, machine, parser_of, read_rows
from benchmarks.wan.figure import Chosen, drawn, newest_run
from benchmarks.wan.peers.contender import PUBLISHED, Contender, named
from benchmarks.wan.report import COLUMNS, Measured, as_markdown, cells_of, target_of, verdict
from benchmarks.wan.run import Case, Judge, measure
from lab.network.lab import LabUnavailableError, check_this_machine
from protocol.errors import AtollError, UsageError
from protocol.terminal import console

MODELS: dict[str, dict[str, Any]] = {
    "1m": {"hidden_size": 128, "num_layers": 6, "ffn_size": 384},
    "3m": {"hidden_size": 256, "num_layers": 4, "ffn_size": 768},
    "5m": {"hidden_size": 256, "num_layers": 6, "ffn_size": 768},
}

FOREVER_ROUNDS = 2**31 - 1


def tables_of(chosen: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The run file that all contenders share."""
    tables: dict[str, dict[str, Any]] = {
        "run": {
            "name": "wan",
            "seed": chosen.seed,
            "rounds": 1_000_000,  # it is ended, and does not end
            "min_nodes": chosen.nodes,
        },
        "model": {"num_heads": 4, "num_kv_heads": 2, "context": 64} | MODELS[chosen.model_size],
        "inner": {
            "steps": chosen.inner_steps,
            "batch": 2,
            "learning_rate": 2e-3,
            # Contenders differ in how many steps they get: nothing may depend on their number.
            "schedule": "constant",
            "warmup_tokens": 20 * chosen.nodes * 2 * 64,
        },
        "outer": {"optimizer": "nesterov", "learning_rate": 0.7, "momentum": 0.3},
        "evaluation": {"every_rounds": FOREVER_ROUNDS, "samples": 128},
    }
    for change in chosen.set:
        place, _, value = change.partition("=")
        table, _, key = place.partition(".")
        try:
            tables.setdefault(table, {})[key] = json.loads(value)
        except json.JSONDecodeError as error:
            raise UsageError(
                f"--set {change}: {value!r} is no JSON value",
                next_step="write --set outer.learning_rate=0.7",
            ) from error
    return tables


def cases_of(chosen: argparse.Namespace) -> list[Case]:
    """Every combination of links that was asked for."""
    return [
        Case(
            num_nodes=chosen.nodes,
            mbit=rate,
            up_share=up_share,
            round_trip_ms=round_trip,
            step_seconds=chosen.step_seconds,
            seconds=chosen.seconds,
            most_steps=chosen.steps,
            num_saves=chosen.saves,
            tables=tables_of(chosen),
        )
        for rate, round_trip, up_share in itertools.product(
            chosen.rates, chosen.round_trips, chosen.up_shares
        )
    ]


def check_ends(case: Case, contenders: Sequence[Contender]) -> None:
    """Raises UsageError when the last inner step is in the middle of somebody's round."""
    if case.most_steps is None:
        return
    together = math.lcm(*(case.steps_between(contender) for contender in contenders))
    if case.most_steps % together:
        raise UsageError(
            f"--steps {case.most_steps}: not all contenders exchange after that inner step",
            next_step=f"choose a multiple of {together}",
        )


def show(line: str) -> None:
    """Something for who waits: one line that is written over on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
    elif "inner steps" not in line:
        print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def print_table(case: Case, rows: list[Measured], target: float | None, *, of: str) -> None:
    """One case, for people and for docs."""
    up = "" if case.up_share == 1 else f", uplinks {case.mbit * case.up_share:g} Mbit/s"
    print(
        f"\n{case.mbit:g} Mbit/s{up}, round trip {case.round_trip_ms:g} ms, "
        f"{case.num_nodes} nodes, {case.seconds:g} s each; "
        + ("no loss to reach" if target is None else f"the loss to reach is {target:.3f}")
    )
    console.terminal().print(
        console.table(COLUMNS, cells_of(rows, target), right=COLUMNS[1:5] + COLUMNS[5:])
    )
    for row in rows:
        if row.trouble:
            print(f"{row.name}: {row.trouble}")
    print(as_markdown(rows, target, of=of))
    print(verdict(rows, target))


def chosen_case(chosen: argparse.Namespace, case: Case) -> Chosen:
    """What a figure is of."""
    return Chosen.of({**asdict(case), "model": chosen.model_size})


def report(chosen: argparse.Namespace) -> None:
    """Prints the newest run of each case that is in the results, and draws it."""
    cases = cases_of(chosen)
    if chosen.figure is not None and len(cases) > 1:
        raise UsageError(
            f"a figure is of one case, and these are {len(cases)}",
            next_step="name one of --rates, --round-trips and --up-shares each",
        )
    lines = read_rows(chosen.results)
    for case in cases:
        meant = chosen_case(chosen, case)
        rows = newest_run(lines, meant, chosen.contenders)
        if not any(row.has_trained for row in rows):
            raise UsageError(
                f"{chosen.results} has no line of this case: {meant.words()}",
                next_step="measure it first: the same command without --report",
            )
        print_table(case, rows, chosen.target or target_of(rows), of=meant.title())
        if chosen.figure is not None:
            chosen.figure.write_text(drawn(rows, meant, chosen.target))


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = parser_of(__doc__, prog="python -m benchmarks.wan")
    made.add_argument("--rates", type=float, nargs="+", default=[100.0], help="Mbit/s of links")
    made.add_argument("--round-trips", type=float, nargs="+", default=[50.0], help="in ms")
    made.add_argument(
        "--up-shares", type=float, nargs="+", default=[1.0], help="an uplink's part of the rate"
    )
    made.add_argument(
        "--contenders",
        nargs="+",
        metavar="NAME[@STEPS]",
        help="by default those of the docs, and with --report all that ran",
    )
    made.add_argument("--nodes", type=int, default=2)
    made.add_argument("--seconds", type=float, default=60.0, help="that each contender trains")
    made.add_argument("--steps", type=int, help="… or inner steps, whichever ends first")
    made.add_argument(
        "--step-seconds", type=float, default=0.3, help="of an inner step; 0: its own"
    )
    made.add_argument(
        "--inner-steps", type=int, default=5, help="between two exchanges, where no name says it"
    )
    made.add_argument("--model-size", choices=sorted(MODELS), default="5m")
    made.add_argument("--saves", type=int, default=14, help="evaluations of each contender")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--target", type=float, help="the loss to be reached, in nats per byte")
    made.add_argument("--set", nargs="*", default=[], metavar="TABLE.KEY=JSON")
    made.add_argument(
        "--note", default="", help="stands in the results: what else ran, for example"
    )
    add_results(made, Path("docs/results/wan.jsonl"))
    made.add_argument(
        "--report", action="store_true", help="measure nothing: print the newest run of the case"
    )
    made.add_argument("--figure", type=Path, help="with --report: where it is drawn, as SVG")
    return made


def main() -> None:
    """Measures all cases, prints."""
    arguments = parser()
    chosen = arguments.parse_args()
    if chosen.figure is not None and not chosen.report:
        arguments.error("--figure draws what was measured: add --report")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    torch.set_num_threads(1)
    try:
        if chosen.report:
            report(chosen)
            return
        cases = cases_of(chosen)
        contenders = [named(name) for name in dict.fromkeys(chosen.contenders or PUBLISHED)]
        for case in cases:
            check_ends(case, contenders)
        check_this_machine()
        judge = Judge(cases[0].shared_spec())
        results = Rows(chosen.results, about=machine() | {"note": chosen.note}, is_printed=False)
        for case in cases:
            rows: list[Measured] = []
            for contender in contenders:
                rows.append(measure(contender, case, judge, show))
                results.add(
                    {
                        **asdict(case),
                        "model": chosen.model_size,
                        "parameters": int(judge.first.size),
                        **asdict(rows[-1]),
                    }
                )
            target = chosen.target or target_of(rows)
            print_table(case, rows, target, of=chosen_case(chosen, case).title())
    except LabUnavailableError as error:
        sys.exit(str(error))
    except AtollError as error:
        sys.exit(str(error))
