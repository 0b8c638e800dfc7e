"""Which way two nodes find to each other, by the routers that they are behind, and how soon.

    python -m benchmarks.wire.homes [--kinds open "full cone" …] [--seconds 60]
        [--report] [--results docs/results/homes.jsonl]

Each pair is a swarm of real processes in the network laboratory: a coordinator and a helper with open
ports, and two nodes that train, each behind a router of its kind ("double" is a port restricted one behind
a full cone, "firewall" lets nothing in that opens a conversation, UDP neither, and "open" is none at all).
Links carry 20 Mbit/s up and 100 down, with 40 ms between any two. From when both nodes are attached it is
watched for some seconds which way the coordinator tells of; "after" is when it told of the last one. Then
what goes between the two straight, and between either and the helper, which also reduces its part; rounds
are those that took both nodes' work, whole.

Pairs that are in the file of results are not run again. Needs root.
"""

import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measurement import Row, Rows, add_results, machine, markdown, parser_of, read_rows
from lab.network.lab import NetworkLab
from lab.network.links import Link
from lab.network.router import NatKind
from lab.processes.family import nothing_left
from lab.processes.swarm import RealSwarm

RESULTS = Path("docs/results/homes.jsonl")
COORDINATOR, HELPER, ONE, OTHER = "coordinator", "helper", "one", "other"
ACCESS = Link(up_bits_per_second=20e6, down_bits_per_second=100e6, delay_seconds=0.01)

ROUTERS: dict[str, Sequence[NatKind]] = {
    "open": (),
    "full cone": ("full cone",),
    "port restricted": ("port restricted",),
    "symmetric": ("symmetric",),
    "symmetric, IPv6": ("symmetric",),
    "double": ("port restricted", "full cone"),
    "firewall": (),
}
LETS_NOTHING_IN = ("firewall",)
HAS_IPV6 = ("symmetric, IPv6",)
"""Beside IPv4; the coordinator and the helper have none."""

RUN_FILE = """\
[run]
name = "homes"
rounds = 1000
min_nodes = 2

[model]
hidden_size = 64
num_heads = 4
num_kv_heads = 2
ffn_size = 176
context = 64

[inner]
steps = 1000000
batch = 4

[deadlines]
train = 2
contribute = 8
commit = 14

[outer]
audit = 0.0
"""
"""Rounds end at their deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The way between the two as the coordinator tells it, and the newest round."""

    way: str
    round: int


def seen_in(swarm: RealSwarm) -> Seen | None:
    """None before both nodes are attached."""
    nodes = {node["node_name"]: node for node in swarm.asked("nodes")}
    told = {name: (nodes.get(name) or {}).get("heartbeat") for name in (ONE, OTHER)}
    if not all(told.values()):
        return None
    ends: dict[str, Any] = {name: told[name] for name in (ONE, OTHER)}

    def says(field: str) -> bool:
        return any(
            nodes[other]["node_id"] in ends[name].get(field, ())
            for name, other in ((ONE, OTHER), (OTHER, ONE))
        )

    way = "punched" if says("punched_ids") else "direct"
    if says("unreachable_ids"):
        way = "through the helper"
    return Seen(way=way, round=swarm.committed_round)


def measure(one: str, other: str, seconds: float) -> Row:
    """Watches one pair."""
    routers = {name: ROUTERS[kind] for name, kind in ((ONE, one), (OTHER, other)) if ROUTERS[kind]}
    families = {name: "46" for name, kind in ((ONE, one), (OTHER, other)) if kind in HAS_IPV6}
    with (
        tempfile.TemporaryDirectory() as folder,
        NetworkLab(
            dict.fromkeys((COORDINATOR, HELPER, ONE, OTHER), ACCESS),
            routers=routers,
            families=families,
        ) as lab,
    ):
        for name, kind in ((ONE, one), (OTHER, other)):
            if kind in LETS_NOTHING_IN:
                lab.firewall(name)
        with contextlib.ExitStack() as stack:
            with lab.inside(COORDINATOR):
                swarm = RealSwarm(Path(folder), RUN_FILE, host=lab.address(COORDINATOR))
                stack.enter_context(swarm)
            return _watched(lab, swarm, seconds) | {"one": one, "other": other}


def _watched(lab: NetworkLab, swarm: RealSwarm, seconds: float) -> Row:
    for name, role in ((HELPER, "helper"), (ONE, "node"), (OTHER, "node")):
        with lab.inside(name):
            options = () if role == "helper" else ("--load", "0.2")
            (member,) = swarm.join(name, role=role, options=options)
            member.start()
    with lab.inside(COORDINATOR):
        swarm.until(lambda: seen_in(swarm) is not None, "both nodes to be attached")
        began_at = time.monotonic()
        ways: list[tuple[float, Seen]] = []
        bytes_then: dict[str, int] = {}
        while (at := time.monotonic() - began_at) < seconds or not ways:
            seen = seen_in(swarm)
            if seen is not None and (not ways or ways[-1][1].way != seen.way):
                ways.append((at, seen))
                bytes_then = _carried(lab)
            time.sleep(0.5)
        found_after, found = ways[-1]
        left = time.monotonic() - began_at - found_after
        carried = {way: num - bytes_then[way] for way, num in _carried(lab).items()}
        whole = [
            closed
            for closed in swarm.asked("rounds")
            if closed["round"] > found.round
            and closed["num_contributors"] == 2
            and closed["num_committed_slices"] == closed["num_slices"]
        ]
    return {
        "way": found.way,
        "after_seconds": round(found_after, 1),
        "watched_seconds": round(left, 1),
        "rounds": len(whole),
        "straight_kbit": round(8e-3 * carried["straight"] / left, 1),
        "with_helper_kbit": round(8e-3 * carried["helper"] / left, 1),
    }


def _carried(lab: NetworkLab) -> dict[str, int]:
    """Bytes so far between the two, and between either and the helper."""
    return {
        "straight": sum(
            lab.traffic(*pair).delivered_bytes for pair in ((ONE, OTHER), (OTHER, ONE))
        ),
        "helper": sum(
            lab.traffic(*pair).delivered_bytes
            for name in (ONE, OTHER)
            for pair in ((name, HELPER), (HELPER, name))
        ),
    }


def report(rows: Sequence[Row]) -> Iterator[str]:
    """For pages, the way of each pair; then how soon each way was there, and what went straight by it."""
    ways = {(row["one"], row["other"]): row["way"].removeprefix("through the ") for row in rows}
    yield markdown(
        ("", *ROUTERS),
        [(one, *(ways.get((one, other), "") for other in ROUTERS)) for one in ROUTERS],
    )
    for way in dict.fromkeys(row["way"] for row in rows):
        found = [row for row in rows if row["way"] == way]
        seconds, kbit = (
            sorted(row[key] for row in found) for key in ("after_seconds", "straight_kbit")
        )
        yield f"{way} after {seconds[0]:.0f} to {seconds[-1]:.0f} s"
        yield f"{way}: {kbit[0]:.0f} to {kbit[-1]:.0f} kbit/s go straight"


def main() -> int:
    """Runs the pairs that are missing and prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--report", action="store_true", help="print what is there, run nothing")
    add_results(parser, RESULTS)
    chosen = parser.parse_args()
    known = read_rows(chosen.results) if chosen.results.exists() else []
    done = {(row["one"], row["other"]) for row in known}
    rows = Rows(chosen.results, about=machine())
    if not chosen.report:
        for pair in itertools.combinations_with_replacement(chosen.kinds, 2):
            if pair not in done:
                rows.add(measure(*pair, chosen.seconds))
    print("\n\n".join(report([*known, *rows.rows])))
    return 0


if __name__ == "__main__":
    with nothing_left():
        sys.exit(main())
