"""How long a joiner takes to fetch the outer state, against what its links could do at best.

    python -m benchmarks.wire.fetch [--donors 1 3] [--joiners 1] [--links 100/50 100/200] [--megabytes 32]

Each node is a process of its own (fetch_node.py) in a host of the network lab, over real libp2p. All
have the same link, given as Mbit/s and the milliseconds of a round trip. A fetch lasts from the
first question for a manifest until the whole state is here and its digest is right, over connections
that it makes itself, as a joiner's does. Its limit is the wire ledger's bytes divided by the rate of
the joiner's link. With `--joiners` several fetch at once, over the connections that they have, once: then
the limit is the state over one link, and it is said how often donors have given it. `--apart` keeps
joiners from each other: all of it comes from donors. Needs root. Prints a table; `--results` adds the rows as
JSON lines to a file.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.measurement import Rows, add_results, machine, parser_of
from lab.network.lab import LabUnavailableError, NetworkLab
from lab.network.links import Link
from lab.processes.family import nothing_left
from protocol.errors import SystemRefusedError
from protocol.terminal import console

STATE_BYTES_PER_ELEMENT = 8
SECONDS = 300.0
"""For every answer of a node: far more than it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is fetched, from how many, over which links."""

    num_donors: int
    num_joiners: int
    is_apart: bool  # joiners do not know each other
    megabytes: float  # of the state
    mbit: float
    round_trip_ms: float
    congestion_control: str

    @property
    def joiners(self) -> tuple[str, ...]:
        """Hosts that fetch."""
        return tuple(f"joiner-{number}" for number in range(self.num_joiners))

    @property
    def donors(self) -> tuple[str, ...]:
        """Hosts that hold the state."""
        return tuple(f"donor-{number}" for number in range(self.num_donors))

    def link(self) -> Link:
        """Two links make a path, and a round trip passes it twice. A round trip of buffer."""
        rate = 1e6 * self.mbit
        return Link(
            up_bits_per_second=rate,
            down_bits_per_second=rate,
            delay_seconds=self.round_trip_ms / 4e3,
            buffer_bytes=max(100_000, int(rate * self.round_trip_ms / 8e3)),
        )


class Nodes:
    """The processes of one case, by host."""

    def __init__(self, processes: dict[str, asyncio.subprocess.Process]) -> None:
        self._processes = processes

    async def ask(self, host: str, said: str, **order: Any) -> dict[str, Any]:
        """Gives an order and waits for its answer."""
        self.tell(host, **order)
        return await self.hear(host, said)

    def tell(self, host: str, **order: Any) -> None:
        """Gives an order."""
        stdin = self._processes[host].stdin
        assert stdin is not None
        stdin.write(json.dumps(order).encode() + b"\n")

    async def hear(self, host: str, said: str) -> dict[str, Any]:
        """Waits for an answer of a kind."""
        stdout = self._processes[host].stdout
        assert stdout is not None
        async with asyncio.timeout(SECONDS):
            line = await stdout.readline()
        told: dict[str, Any] = json.loads(line) if line else {"said": "nothing: it ended"}
        if told["said"] != said:
            raise SystemRefusedError(f"{host} said {told}", next_step="read its words above")
        return told


@contextlib.asynccontextmanager
async def started(case: Case, lab: NetworkLab) -> AsyncIterator[Nodes]:
    """All nodes of a case, who know each other; they end with the block."""
    processes = {
        host: await asyncio.create_subprocess_exec(
            *lab.command(host, [sys.executable, "-m", "benchmarks.wire.fetch_node"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for host in lab.hosts
    }
    try:
        nodes = Nodes(processes)
        for host in lab.hosts:
            nodes.tell(
                host,
                address=lab.address(host),
                num_elements=int(case.megabytes * 1e6 / STATE_BYTES_PER_ELEMENT),
                is_whole=host not in case.joiners or case.num_joiners == 1,
            )
        members = []
        for host in lab.hosts:
            told = await nodes.hear(host, "started")
            members.append((host, told["public_key"], told["multiaddrs"]))
        for host in lab.hosts:
            strangers = case.joiners if case.is_apart and host in case.joiners else ()
            known = [member for member in members if member[0] not in strangers]
            await nodes.ask(host, "met", do="roster", members=known)
        yield nodes
    finally:
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in processes.values():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(30):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()


async def measured(case: Case, num_fetches: int) -> dict[str, Any]:
    """Runs one case; returns its row."""
    hosts = (*case.donors, *case.joiners)
    links = dict.fromkeys(hosts, case.link())
    with NetworkLab(links, congestion_control=case.congestion_control) as lab:
        async with started(case, lab) as nodes:
            if case.num_joiners == 1:
                (joiner,) = case.joiners
                fetches = [
                    await nodes.ask(joiner, "fetched", do="fetch") for _ in range(num_fetches)
                ]
            else:
                fetches = await asyncio.gather(
                    *(nodes.ask(joiner, "joined", do="join") for joiner in case.joiners)
                )
            given = [await nodes.ask(donor, "counted", do="count") for donor in case.donors]
    limit_seconds = 8 * fetches[0]["received_bytes"] / (1e6 * case.mbit)
    seconds = [fetch["seconds"] for fetch in fetches]
    given_bytes = sum(each["sent_bytes"] for each in given)
    return {
        **asdict(case),
        "seconds": round(statistics.median(seconds), 3),
        "limit_seconds": round(limit_seconds, 3),
        "given": round(given_bytes / (1e6 * case.megabytes), 3),
        "ratio": round(statistics.median(seconds) / limit_seconds, 3),
        "ratio_least": round(min(seconds) / limit_seconds, 3),
        "ratio_most": round(max(seconds) / limit_seconds, 3),
    }


def link_of(text: str) -> tuple[float, float]:
    """Mbit/s and the milliseconds of a round trip, from "100/50"."""
    mbit, _, round_trip_ms = text.partition("/")
    return float(mbit), float(round_trip_ms)


def cases_of(chosen: argparse.Namespace) -> list[Case]:
    """Every combination that was asked for."""
    return [
        Case(
            num_donors=num_donors,
            num_joiners=chosen.joiners,
            is_apart=chosen.apart,
            megabytes=megabytes,
            mbit=mbit,
            round_trip_ms=round_trip_ms,
            congestion_control=chosen.congestion_control,
        )
        for (mbit, round_trip_ms), megabytes, num_donors in itertools.product(
            chosen.links, chosen.megabytes, chosen.donors
        )
    ]


def main() -> None:
    """Measures all cases, prints."""
    parser = parser_of(__doc__, prog="python -m benchmarks.wire.fetch")
    parser.add_argument("--donors", type=int, nargs="+", default=[1, 3])
    parser.add_argument(
        "--links",
        type=link_of,
        nargs="+",
        default=[(100, 50), (100, 200)],
        help="Mbit/s and milliseconds of a round trip, as 100/50",
    )
    parser.add_argument("--megabytes", type=float, nargs="+", default=[32])
    parser.add_argument("--joiners", type=int, default=1, help="that fetch at once (default 1)")
    parser.add_argument("--apart", action="store_true", help="joiners do not know each other")
    parser.add_argument("--fetches", type=int, default=3, help="of each case (default 3)")
    parser.add_argument("--congestion-control", default="cubic", help="TCP's; '': the kernel's")
    add_results(parser)
    chosen = parser.parse_args()
    results = Rows(chosen.results, about=machine())
    for case in cases_of(chosen):
        try:
            results.add(asyncio.run(measured(case, chosen.fetches)))
        except LabUnavailableError as error:
            sys.exit(str(error))
    columns = (
        *("donors", "joiners", "MB", "Mbit/s", "round trip", "took", "limit", "given"),
        *("ratio", "spread"),
    )
    cells = [
        (
            f"{row['num_donors']}",
            f"{row['num_joiners']}{' apart' if row['is_apart'] else ''}",
            f"{row['megabytes']:g}",
            f"{row['mbit']:g}",
            f"{row['round_trip_ms']:g} ms",
            f"{row['seconds']:.2f} s",
            f"{row['limit_seconds']:.2f} s",
            f"× {row['given']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_least']:.2f} to {row['ratio_most']:.2f}",
        )
        for row in results.rows
    ]
    console.terminal().print(console.table(columns, cells, right=columns[:9]))


if __name__ == "__main__":
    with nothing_left():
        main()
