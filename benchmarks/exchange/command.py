"""How long one round's exchange takes, against what its links could do at best.

    python -m benchmarks.exchange [--nodes 2 4 8] [--codecs int4 topk64/topk256] [--megabytes 4 16]
                                  [--parameters 8m] [--mbit-each 20 --slow-motion 10] [--slow 0.2]
                                  [--slices equal bandwidth] [--helpers 1 2]
                                  [--keep-window 0 1] [--congestion-control bbr] [--plain]
    python -m benchmarks.exchange --report docs/results/exchange-nodes.jsonl [--figure FILE.svg]

Each node is a process of its own (benchmarks/exchange/node.py) in a host of the network lab: real exchange,
codecs and libp2p, with random pseudo-gradients in place of training. The coordinator's pure core
makes the plans and decides the commits in this process; its messages go over pipes, so they cost
nothing. A round lasts from the first node that begins to encode until the last one holds all
results. Its limit is the wire ledger's bytes over each link divided by the link's rate, for the
link that needs the most; the lab's own counters are shown beside the ledger's.

This machine must carry all links at once, and its cores must hardly count. So with --mbit more nodes get
slower links, so that the sum stays; with --mbit-each they do not. --slow-motion 10 makes links of a tenth
of the rate and ten times the round trip, and lets the exchange wait ten times as long wherever it waits
by the clock: what remains at its own speed is computing, TCP's own timers, and the lab's buffers, which hold
500 kB. Times are printed as of the links that were named. "cores, ours" says what all processes of the
benchmark took on average during its rounds, and "cores, all" what the whole machine was busy with: where
the former comes near to their number, or the latter is much more than the former, a row says little of
links.

With --slow one node has so much of the others' rate: --slices equal bandwidth shows what slices by
bandwidth gain then. With --helpers nobody can dial a node, and so many helpers, with links as fast as the
nodes', reduce everything. --plain adds what plain TCP takes for as many bytes between two nodes, in the same
lab: what is more than that is ours. Needs root. Prints JSON and, last, a table; --output appends the
JSON lines to a file.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from benchmarks.exchange.case import Case, Rate, Size, cases_of, codecs_named, count_of
from benchmarks.exchange.plain import plain_seconds
from benchmarks.exchange.report import COLUMNS, WORDS, as_markdown, cells_of, drawn, newest
from benchmarks.exchange.swarm import Swarm
from benchmarks.measurement import Row, Rows, add_results, machine, parser_of, read_rows
from lab.network.lab import LabUnavailableError, NetworkLab
from node.exchange.peers import Limits
from protocol.errors import AtollError
from protocol.terminal import console

Value = TypeVar("Value")

EQUAL, BY_BANDWIDTH = "equal", "bandwidth"


async def measure(
    case: Case,
    num_rounds: int,
    pause_seconds: float,
    congestion_control: str,
    *,
    num_warm: int,
    has_plain: bool,
) -> Row:
    """Runs one case; returns its row, of the rounds after the first `num_warm`."""
    plain: list[float] = []
    with NetworkLab(
        case.links(), congestion_control=congestion_control, keeps_window=case.keeps_window
    ) as lab:
        swarm = Swarm(case, lab)
        try:
            await swarm.start()
            timed = []
            for _ in range(num_warm + num_rounds):
                await asyncio.sleep(pause_seconds * case.slow_motion)
                timed.append(await swarm.round())
        finally:
            await swarm.stop()
        if has_plain and case.num_nodes == 2:
            plain = await asyncio.to_thread(
                plain_seconds,
                lab,
                contribution_bytes=int(1e6 * case.megabytes / 2),
                pieces=len(timed[-1][1].slices) // 2,
                num_rounds=num_rounds,
                pause_seconds=pause_seconds * case.slow_motion,
            )
            plain = [seconds / case.slow_motion for seconds in plain]
    rounds = [time_ for time_, _ in timed[num_warm:]]
    ratios = [time_.ratio for time_ in rounds]
    slices = timed[-1][1].slices
    clock_seconds = sum(time_.clock_seconds for time_ in rounds)
    return {
        **case.words(),
        "congestion_control": congestion_control,
        "pause_seconds": pause_seconds,
        "warm_rounds": num_warm,
        "rounds": num_rounds,
        "seconds": round(statistics.median(t.seconds for t in rounds), 3),
        "limit_seconds": round(statistics.median(t.limit_seconds for t in rounds), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_least": round(min(ratios), 3),
        "ratio_most": round(max(ratios), 3),
        "plain_seconds": round(statistics.median(plain), 3) if plain else None,
        "most_sent_bytes": round(statistics.median(t.most_sent_bytes for t in rounds)),
        "counted_over_seen": round(
            sum(t.counted_bytes for t in rounds) / sum(t.seen_bytes for t in rounds), 3
        ),
        "received_over_sent": round(
            sum(t.received_bytes for t in rounds) / sum(t.counted_bytes for t in rounds), 4
        ),
        "cores_ours": round(sum(t.processor.ours for t in rounds) / clock_seconds, 3),
        "cores_machine": round(sum(t.processor.machine for t in rounds) / clock_seconds, 3),
        "slices": [round(part.num_elements / case.num_elements, 3) for part in slices],
        "learnt_mbit": [
            [None if rate is None else round(8e-6 * rate * case.slow_motion, 2) for rate in link]
            for link in swarm.learnt_rates
        ],
        "reason": timed[-1][1].reason,
    }


def chosen_cases(chosen: argparse.Namespace) -> list[Case]:
    """What the arguments ask for."""
    if chosen.parameters:
        sizes = [Size(parameters=count) for count in chosen.parameters]
    else:
        sizes = [Size(megabytes=megabytes) for megabytes in chosen.megabytes]
    is_shared = chosen.mbit_each is None
    return list(
        cases_of(
            nodes=chosen.nodes,
            codecs=chosen.codecs,
            sizes=sizes,
            rate=Rate(mbit=chosen.mbit if is_shared else chosen.mbit_each, is_shared=is_shared),
            round_trip_ms=chosen.round_trip_ms,
            stripes=chosen.stripes,
            keep_window=[bool(keeps) for keeps in chosen.keep_window],
            by_bandwidth=[slices == BY_BANDWIDTH for slices in chosen.slices],
            slow=chosen.slow,
            slow_motion=chosen.slow_motion,
            helpers=chosen.helpers,
        )
    )


def _told(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """For argparse, which says what is wrong in its own words otherwise."""

    def parsed(text: str) -> Value:
        try:
            return parse(text)
        except AtollError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = parser_of(__doc__, prog="python -m benchmarks.exchange")
    made.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    made.add_argument(
        "--codecs",
        type=_told(codecs_named),
        nargs="+",
        default=[codecs_named("int4")],
        metavar="CODEC[/CODEC]",
        help="of contributions and results, or of each apart: topk64/topk256 (default int4)",
    )
    size = made.add_mutually_exclusive_group()
    size.add_argument(
        "--megabytes",
        type=float,
        nargs="+",
        default=[4, 16],
        help="of a node's contribution on the wire, whatever the codec (default 4 16)",
    )
    size.add_argument(
        "--parameters",
        type=_told(count_of),
        nargs="+",
        metavar="COUNT",
        help="of the model, so that codecs may be compared: 8m, 500k",
    )
    rate = made.add_mutually_exclusive_group()
    rate.add_argument(
        "--mbit",
        type=float,
        default=100.0,
        help="each link's rate with two nodes; with n nodes each link gets 2/n of it (default 100)",
    )
    rate.add_argument(
        "--mbit-each", type=float, help="each link's rate, however many nodes there are"
    )
    made.add_argument("--round-trip-ms", type=float, default=50.0)
    made.add_argument(
        "--slow-motion", type=float, default=1.0, help="how many times as long everything takes"
    )
    made.add_argument(
        "--slow", type=float, default=1.0, help="the last node's share of the others' rate"
    )
    made.add_argument(
        "--helpers",
        type=int,
        nargs="+",
        default=[0],
        help="hosts that reduce for nodes whom nobody can dial (default: none, and all can)",
    )
    made.add_argument(
        "--slices",
        nargs="+",
        choices=(EQUAL, BY_BANDWIDTH),
        default=[BY_BANDWIDTH],
        help="equal, or by the rates that nodes learn of their links, as a swarm does (default)",
    )
    made.add_argument(
        "--stripes",
        type=int,
        nargs="+",
        default=[Limits().max_streams_per_body],
        help="streams for one body at most",
    )
    made.add_argument("--rounds", type=int, default=5, help="that count (default 5)")
    made.add_argument(
        "--warm",
        type=int,
        default=6,
        help="rounds before, in which connections are made, TCP feels its way, and links are learnt, by"
        " which slices are cut and uploads paced (default 6)",
    )
    made.add_argument(
        "--pause",
        type=float,
        default=1.0,
        help="seconds before each round, as if they trained (default 1)",
    )
    made.add_argument(
        "--keep-window",
        type=int,
        nargs="+",
        default=[0],
        choices=(0, 1),
        help="1: TCP does not forget over a pause what a link carries (see atoll node doctor)",
    )
    made.add_argument("--congestion-control", default="cubic", help="TCP's (default cubic)")
    made.add_argument(
        "--plain", action="store_true", help="what plain TCP takes for as many bytes, two nodes"
    )
    made.add_argument(
        "--note", default="", help="stands in the results: what else ran, for example"
    )
    add_results(made)
    made.add_argument(
        "--report",
        type=Path,
        nargs="+",
        metavar="RESULTS",
        help="measure nothing: print the newest line of each case in these files",
    )
    made.add_argument("--figure", type=Path, help="with --report: where it is drawn, as SVG")
    return made


def report(chosen: argparse.Namespace) -> None:
    """Prints, and draws, what is there."""
    rows = read_rows(*chosen.report)
    print(as_markdown(newest(rows)))
    if chosen.figure is not None:
        chosen.figure.write_text(drawn(rows))


def measure_all(chosen: argparse.Namespace) -> None:
    """Measures all cases, prints."""
    results = Rows(chosen.results, about=machine() | {"note": chosen.note})
    for case in chosen_cases(chosen):
        try:
            row = asyncio.run(
                measure(
                    case,
                    chosen.rounds,
                    chosen.pause,
                    chosen.congestion_control,
                    num_warm=chosen.warm,
                    has_plain=chosen.plain,
                )
            )
        except LabUnavailableError as error:
            sys.exit(str(error))
        results.add(row)
    right = tuple(column for column in COLUMNS if column not in WORDS)
    console.terminal().print(console.table(COLUMNS, list(map(cells_of, results.rows)), right=right))


def main() -> None:
    """Measures, or reports what was measured."""
    arguments = parser()
    chosen = arguments.parse_args()
    if chosen.report:
        report(chosen)
    elif chosen.figure is not None:
        arguments.error("--figure draws what --report reads: name files of results with --report")
    else:
        measure_all(chosen)
