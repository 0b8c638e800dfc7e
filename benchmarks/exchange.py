"""How long one round's exchange takes, against what its links could do at best.

    python -m benchmarks.exchange [--nodes 2 4 8] [--codecs int4] [--megabytes 4 16] [--slow 0.2]
                                  [--keep-window 0 1] [--congestion-control bbr] [--plain]

Each node is a process of its own (exchange_node.py) in a host of the network lab: real exchange,
codecs and libp2p, with random pseudo-gradients in place of training. The coordinator's pure core
makes the plans and decides the commits in this process; its messages go over pipes, so they cost
nothing. A round lasts from the first node that begins to encode until the last one holds all
results. Its limit is the wire ledger's bytes over each link divided by the link's rate, for the
link that needs the most; the lab's own counters are shown beside the ledger's.

The machine must carry all links at once: `--mbit` is the rate of a link for two nodes, and more
nodes get less each, so that the sum stays. With `--slow` one node has so much of the others' rate,
and each case runs twice: with equal slices and with slices by bandwidth. `--plain` adds what plain TCP
takes for as many bytes between two nodes, in the same lab: what is more than that is ours. Needs root.
Prints JSON and, last, a table; `--output` appends the JSON lines to a file.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.ending import nothing_left
from benchmarks.exchange_plain import plain_seconds
from benchmarks.exchange_swarm import BITS_PER_ELEMENT, Case, Swarm
from benchmarks.network_lab import LabUnavailableError, NetworkLab
from node.exchange.transport.parts import MOST_STREAMS
from protocol import console

WARM_ROUNDS = 2
"""Rounds that do not count: connections are made, TCP feels its way, rates are learnt."""


async def measure(
    case: Case, num_rounds: int, pause_seconds: float, congestion_control: str, *, has_plain: bool
) -> dict[str, object]:
    """Runs one case; returns its row."""
    plain: list[float] = []
    with NetworkLab(
        case.links(), congestion_control=congestion_control, keeps_window=case.keeps_window
    ) as lab:
        swarm = Swarm(case, lab)
        try:
            await swarm.start()
            timed = []
            for _ in range(WARM_ROUNDS + num_rounds):
                await asyncio.sleep(pause_seconds)
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
                pause_seconds=pause_seconds,
            )
    rounds = [time_ for time_, _ in timed[WARM_ROUNDS:]]
    ratios = [time_.ratio for time_ in rounds]
    slices = timed[-1][1].slices
    return {
        **asdict(case),
        "congestion_control": congestion_control,
        "pause_seconds": pause_seconds,
        "seconds": round(statistics.median(t.seconds for t in rounds), 3),
        "limit_seconds": round(statistics.median(t.limit_seconds for t in rounds), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_least": round(min(ratios), 3),
        "ratio_most": round(max(ratios), 3),
        "plain_seconds": round(statistics.median(plain), 3) if plain else None,
        "counted_over_seen": round(
            sum(t.counted_bytes for t in rounds) / sum(t.seen_bytes for t in rounds), 3
        ),
        "slices": [round(part.num_elements / case.num_elements, 3) for part in slices],
        "reason": timed[-1][1].reason,
    }


def cases_of(chosen: argparse.Namespace) -> list[Case]:
    """Every combination that was asked for."""
    cases = []
    for num_nodes, codec, megabytes, stripes, keeps_window in itertools.product(
        chosen.nodes, chosen.codecs, chosen.megabytes, chosen.stripes, chosen.keep_window
    ):
        even = Case(
            stripes=stripes,
            keeps_window=bool(keeps_window),
            num_nodes=num_nodes,
            codec=codec,
            megabytes=megabytes,
            mbit=chosen.mbit * 2 / num_nodes,
            round_trip_ms=chosen.round_trip_ms,
        )
        if chosen.slow is None:
            cases.append(even)
        else:
            slow = replace(even, slow=chosen.slow)
            cases += [replace(slow, by_bandwidth=False), slow]
    return cases


def main() -> None:
    """Measures all cases, prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--codecs", nargs="+", default=["int4"], choices=sorted(BITS_PER_ELEMENT))
    parser.add_argument("--megabytes", type=float, nargs="+", default=[4, 16])
    parser.add_argument("--mbit", type=float, default=100.0, help="of a link of two nodes")
    parser.add_argument("--round-trip-ms", type=float, default=50.0)
    parser.add_argument("--slow", type=float, help="the last node's share of the others' rate")
    parser.add_argument(
        "--stripes",
        type=int,
        nargs="+",
        default=[MOST_STREAMS],
        help="streams for one body at most",
    )
    parser.add_argument("--rounds", type=int, default=5, help="that count (default 5)")
    parser.add_argument(
        "--pause", type=float, default=1.0, help="seconds before each round, as if they trained"
    )
    parser.add_argument(
        "--keep-window",
        type=int,
        nargs="+",
        default=[0],
        choices=(0, 1),
        help="1: TCP does not forget over a pause what a link carries (see atoll node doctor)",
    )
    parser.add_argument("--congestion-control", default="cubic", help="TCP's (default cubic)")
    parser.add_argument(
        "--plain", action="store_true", help="what plain TCP takes for as many bytes, two nodes"
    )
    parser.add_argument("--output", type=Path, help="a file that the JSON lines are added to")
    chosen = parser.parse_args()
    rows = []
    for case in cases_of(chosen):
        try:
            row = asyncio.run(
                measure(
                    case,
                    chosen.rounds,
                    chosen.pause,
                    chosen.congestion_control,
                    has_plain=chosen.plain,
                )
            )
        except LabUnavailableError as error:
            sys.exit(str(error))
        rows.append(
            {
                "machine": f"{platform.system()} on {platform.machine()}",
                "cores": os.cpu_count(),
                **row,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        if chosen.output is not None:
            with chosen.output.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    columns = (
        "nodes",
        "codec",
        "MB",
        "Mbit/s",
        "slow",
        "slices",
        "streams",
        "window",
        "took",
        "limit",
        "ratio",
        "spread",
        "plain TCP",
    )
    cells = [
        (
            f"{row['num_nodes']}",
            f"{row['codec']}",
            f"{row['megabytes']:g}",
            f"{row['mbit']:g}",
            f"{row['slow']:g}",
            "by bandwidth" if row["by_bandwidth"] else "equal",
            f"{row['stripes']}",
            "kept" if row["keeps_window"] else "by TCP",
            f"{row['seconds']:.2f} s",
            f"{row['limit_seconds']:.2f} s",
            f"{row['ratio']:.2f}",
            f"{row['ratio_least']:.2f} to {row['ratio_most']:.2f}",
            "" if row["plain_seconds"] is None else f"{row['plain_seconds']:.2f} s",
        )
        for row in rows
    ]
    console.terminal().print(
        console.table(columns, cells, right=columns[2:5] + columns[6:7] + columns[8:])
    )


if __name__ == "__main__":
    with nothing_left():
        main()
