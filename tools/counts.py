"""Counts what a reader meets: files and lines of each room, and files that a round and a push enter.

    python tools/counts.py           # --files lists what a round and a push enter, and between which files

A round is the third of a swarm of three in one process (lab.simulation), from one commit to the next;
a push is a body of 1 MB between two real transports that have pushed one before, its parts over one stream:
how many it would open else depends on how busy the machine is. A file is entered
when a function of it is called; a change of file is a call into another file than that of the call before.
A coroutine that goes on after a wait is not called again.
Messages are counted by the files that import them.
"""

import ast
import asyncio
import dis
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import structlog  # noqa: E402  # after the path to our own packages

from lab.run_files import TINY_MODEL  # noqa: E402
from lab.simulation.swarm import Life, simulate  # noqa: E402
from node.exchange.peers import Admission, Limits, Want  # noqa: E402
from node.exchange.transport.libp2p import Libp2pTransport  # noqa: E402
from protocol.run.run_files import validated  # noqa: E402
from protocol.trust.identity import Identity  # noqa: E402
from protocol.wire import findings, messages  # noqa: E402
from protocol.wire.payload import RESULT, Payload, PayloadHeader, WireCounts  # noqa: E402
from protocol.wire.rounds import Digest, NodeId, PeerAddress, RosterEntry  # noqa: E402

PRODUCT = ("atoll", "protocol", "coordinator", "node")
ROOMS = (*PRODUCT, "node/exchange", "node/island", "lab", "benchmarks", "tests")
PUSHED_BYTES = 1_000_000
TINY = {
    "run": {"rounds": 4, "min_nodes": 3, "seed": 1},
    "model": TINY_MODEL,
    "inner": {"steps": 5, "batch": 4},
    "evaluation": {"every_rounds": 2, "samples": 16},
}


def files_of(room: str) -> list[Path]:
    """Its modules, without generated ones and without those that say only what a folder is."""
    return [
        file
        for file in sorted((ROOT / room).rglob("*.py"))
        if "v1" not in file.parts and file.name != "__init__.py"
    ]


@dataclass(kw_only=True)
class Entered:
    """Which files were entered, in which order."""

    counts: Counter[str] = field(default_factory=Counter)
    comings: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, ...]] = field(default_factory=Counter)
    last: str = ""

    @property
    def changes(self) -> int:
        """Of file, from one call to the next."""
        return self.comings.total()

    def enter(self, file: str) -> None:
        """A function of the file is called."""
        self.counts[file] += 1
        if file != self.last:
            self.comings[file] += 1
            self.pairs[tuple(sorted((self.last, file)))] += 1
        self.last = file

    def words(self) -> str:
        """Files by package, and changes."""
        packages = Counter(file.partition("/")[0] for file in self.counts)
        by_package = ", ".join(f"{package} {packages[package]}" for package in sorted(packages))
        return f"{len(self.counts)} files ({by_package}), {self.changes:,} changes of file"

    def listed(self) -> str:
        """Each file with its calls, and how often it was come to from another."""
        files = [
            f"{calls:>8,}{self.comings[file]:>8,}  {file}"
            for file, calls in self.counts.most_common()
        ]
        pairs = [f"{num:>16,}  {' and '.join(pair)}" for pair, num in self.pairs.most_common(20)]
        return "\n".join((*files, "changes between", *pairs))


def is_resumed(frame: FrameType) -> bool:
    """Whether a coroutine or a generator goes on: `sys.setprofile` takes each time for a call.

    Each of its functions has an instruction RESUME at its beginning, with 0, and one behind each wait.
    """
    opcode, argument = frame.f_code.co_code[frame.f_lasti :][:2]
    return opcode == dis.opmap["RESUME"] and argument & 3 > 0


@contextmanager
def following(entered: Entered, is_on: Callable[[FrameType], bool]) -> Iterator[None]:
    """Notes calls into our packages while `is_on`, which is told every call."""
    prefix = len(f"{ROOT}{os.sep}")
    ours = tuple(f"{ROOT / package}{os.sep}" for package in PRODUCT)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not is_on(frame) or is_resumed(frame):
            return
        file = frame.f_code.co_filename
        if file.startswith(ours) and f"{os.sep}v1{os.sep}" not in file:
            entered.enter(file[prefix:])

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def entered_by_a_round() -> Entered:
    """From the second commit to the third, coordinator and nodes together."""
    entered, committed = Entered(), 0

    def is_third(frame: FrameType) -> bool:
        nonlocal committed
        if frame.f_code.co_name == "__init__" and frame.f_code.co_filename == "<string>":
            made = frame.f_locals.get("self")
            if isinstance(made, messages.RoundCommitted):
                committed = max(committed, frame.f_locals["commit"].round)
        return committed == 2

    with following(entered, is_third):
        simulate(validated(TINY, origin="this count"), lives=[Life()] * 3)
    return entered


class _Taker:
    """Takes whatever comes."""

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        async def take(payload: Payload) -> bytes:
            del payload
            return b""

        return Admission(take=take)

    async def supply(self, sender: NodeId, want: Want) -> Payload | None:
        return None


def _payload(sender: Identity, round: int) -> Payload:
    return Payload.seal(
        kind=RESULT,
        run_digest=Digest(bytes(32)),
        round=round,
        fragment=0,
        slice_index=0,
        start=0,
        num_elements=PUSHED_BYTES // 4,
        codec="fp32/1",
        samples=1,
        tokens=1,
        sender_id=sender.node_id,
        body=bytes(PUSHED_BYTES),
    )


async def entered_by_a_push() -> Entered:
    """Sender and receiver in one process, over libp2p on loopback."""
    entered = Entered()
    identities = [Identity.generate() for _ in range(2)]
    transports = [
        Libp2pTransport(
            identity=identity, counts=WireCounts(), limits=Limits(max_streams_per_body=1)
        )
        for identity in identities
    ]
    try:
        for transport in transports:
            await transport.start(_Taker())
        roster = tuple(
            RosterEntry(
                node_id=identity.node_id,
                node_name=name,
                address=PeerAddress(
                    public_key=identity.public_key, multiaddrs=transport.multiaddrs
                ),
            )
            for name, identity, transport in zip(
                ("one", "two"), identities, transports, strict=True
            )
        )
        for transport in transports:
            transport.set_roster(roster)
        sender, receiver = transports[0], identities[1].node_id
        await sender.push(receiver, _payload(identities[0], 1), timeout_seconds=60)
        with following(entered, lambda frame: True):
            await sender.push(receiver, _payload(identities[0], 2), timeout_seconds=60)
    finally:
        for transport in transports:
            await transport.stop()
    return entered


def importing_files() -> Counter[str]:
    """By the name of a message, how many of the product's files take it from where it is declared."""
    return Counter(
        alias.name
        for room in PRODUCT
        for file in files_of(room)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
        and node.module in (messages.__name__, findings.__name__)
        and f"protocol.wire.{file.stem}" != messages.__name__  # which only takes findings in
        for alias in node.names
    )


def constants_of(room: str) -> int:
    """Numbers with a name, at the top of modules."""
    count = 0
    for file in files_of(room):
        for node in ast.parse(file.read_text()).body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            count += value is not None and any(
                isinstance(part, ast.Constant) and isinstance(part.value, int | float)
                for part in ast.walk(value)
            )
    return count


def widest_constructors(most: int) -> list[str]:
    """Classes that take more arguments than so many."""
    found = []
    for room in PRODUCT:
        for file in files_of(room):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    for inner in node.body:
                        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                            arguments = inner.args
                            num = len(arguments.args) - 1 + len(arguments.kwonlyargs)
                            if num > most:
                                found.append(f"{node.name} {num}")
    return found


def main() -> None:
    """Prints all counts."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    print(f"{'room':<16}{'files':>6}{'lines':>8}{'a file':>8}{'over 400':>10}")
    for room in ROOMS:
        lines = [len(file.read_text().splitlines()) for file in files_of(room)]
        print(
            f"{room:<16}{len(lines):>6}{sum(lines):>8,}{sum(lines) / len(lines):>8.0f}"
            f"{sum(each > 400 for each in lines):>10}"
        )
    of_a_round, of_a_push = entered_by_a_round(), asyncio.run(entered_by_a_push())
    print("a round:", of_a_round.words())
    print("a push: ", of_a_push.words())
    if "--files" in sys.argv[1:]:
        print(f"{'calls':>8}{'comings':>8}  a round's files\n{of_a_round.listed()}")
        print(f"{'calls':>8}{'comings':>8}  a push's files\n{of_a_push.listed()}")
    told = [each.__name__ for each in (*messages.Message.__args__, *messages.Report.__args__)]
    importing = importing_files()
    named = [1 + importing[name] for name in told]  # and the one that declares it
    print(
        f"a message: named in {min(named)} to {max(named)} files, "
        f"{sum(named) / len(named):.1f} in the mean of {len(named)}"
    )
    print("constants of the transport:", constants_of("node/exchange/transport"))
    print("constructors of more than 8 arguments:", ", ".join(widest_constructors(8)) or "none")


if __name__ == "__main__":
    main()
