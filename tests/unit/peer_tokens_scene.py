"""Members of a swarm in one process and in virtual time, which have some of the run's tokens each."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from random import Random

from lab.simulation.memory_transport import MemoryNetwork, MemoryTransport
from node.exchange.peers import Admission, TransferRefusedError, Want, WantTokens
from node.exchange.tokens import PeerTokens
from node.heavy import in_place
from node.island.data.held import TokensHere
from node.island.data.manifest import Piece, read_manifest
from node.island.data.places import DataPlaces
from node.island.data.supply import TokenSupply
from protocol.run.run_spec import RunSpec
from protocol.wire.payload import Payload, PayloadHeader, WireCounts
from protocol.wire.rounds import Digest, NodeId, PeerAddress, RosterEntry

PIECE = 512
NOWHERE = "on-the-owners-machine"


def from_peers(spec: RunSpec) -> RunSpec:
    """The run with a folder that no other machine has."""
    data = spec.data.model_copy(update={"paths": (NOWHERE,)})
    return spec.model_copy(update={"data": data})


def copied(folder: Path, to: Path, files: Iterable[str]) -> Path:
    """A folder with some of the files."""
    to.mkdir()
    for file in files:
        shutil.copy(folder / file, to / file)
    return to


def files_of(folder: Path) -> list[str]:
    """Names of all that lies in it."""
    return sorted(path.name for path in folder.iterdir())


def flipped(path: Path, byte: int) -> None:
    """One bit of a file is another one."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


class Member:
    """A node with its tokens; `own` is its folder, and what it fetches lies below `home`."""

    def __init__(
        self,
        name: str,
        network: MemoryNetwork,
        spec: RunSpec,
        home: Path,
        *,
        own: Path | None = None,
        is_given: bool = True,
        cache_bytes: int = 10**9,
    ) -> None:
        self.node_id = NodeId(name)
        self.counts = WireCounts()
        self.transport = MemoryTransport(network=network, node_id=self.node_id, counts=self.counts)
        self.places = DataPlaces(
            folder=home,
            own="" if own is None else str(own),
            cache=home / f"{name}-cache",
            cache_bytes=cache_bytes,
            has_supply=True,
        )
        self.held = TokensHere(spec, self.places)
        self.is_exchanging = False
        self.tokens = PeerTokens(
            held=self.held,
            is_given=is_given,
            node_id=self.node_id,
            run_digest=Digest(bytes(32)),
            transport=self.transport,
            heavy=in_place,
            is_exchanging=lambda: self.is_exchanging,
            rng=Random(0),
        )
        self.supply = TokenSupply(spec=spec, places=self.places, held=self.held, heavy=in_place)
        self.asked: list[Want] = []

    @property
    def entry(self) -> RosterEntry:
        address = PeerAddress(public_key=bytes(32), multiaddrs=())
        return RosterEntry(node_id=self.node_id, node_name=f"{self.node_id}-name", address=address)

    # TransferHandler

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        raise TransferRefusedError("nothing is pushed here")

    async def supply_(self, sender: NodeId, want: Want) -> Payload | None:
        self.asked.append(want)
        assert isinstance(want, WantTokens)
        return await self.tokens.supply(sender, want)


class _Desk:
    def __init__(self, member: Member) -> None:
        self.admit = member.admit
        self.supply = member.supply_


async def introduce(*members: Member) -> None:
    """Starts all, and makes all members of one another's rosters."""
    roster = tuple(member.entry for member in members)
    for member in members:
        await member.transport.start(_Desk(member))
        member.transport.set_roster(roster)
        member.tokens.set_roster(roster)


def pieces_of(folder: Path) -> tuple[Piece, ...]:
    """All of a folder of tokens."""
    return read_manifest(folder).pieces()


def content_of(folder: Path, piece: Piece) -> bytes:
    """What the piece ought to be."""
    whole = (folder / piece.file).read_bytes()
    return whole[piece.start : piece.start + piece.bytes]


async def piece_for(member: Member, piece: Piece) -> bytes | None:
    """What peers give the member."""
    return await member.tokens.piece(Digest(bytes.fromhex(piece.digest)), piece.place, piece.bytes)
