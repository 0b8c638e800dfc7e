"""Versions: one number for what goes over the wire to the coordinator, one for each kind of file in a folder.

A change of what is written or sent raises its number, and keeps the one before readable: nodes of this
release and of the one before take part in one run, and folders of the one before open. Transfers between
peers and codecs have versions in their names, and never differ within a run.
"""

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib import metadata
from pathlib import Path

from protocol.errors import ProtocolMismatchError

WIRE = 2
"""What this release says to coordinators and nodes. 1 is of those that say no number: certificates without an
end, and no renewal."""

OLDEST_WIRE = 1
"""What it still understands."""

MERGE = 2
"""The arithmetic by which a reducer screens and merges contributions, and nodes apply results. Reducer and
auditor, or two nodes, that differ in it would contradict each other, and one would be convicted: so a run has
one, its coordinator's, and releases of others are refused. Golden files in tests hold it. By 1 a member
with most of the work had others left out alone."""

NODE, COORDINATOR = "the node", "the coordinator"
"""Who speaks it."""


OURS = ("atoll", "coordinator", "node", "protocol")
"""Packages that Atoll is."""


@cache
def release() -> str:
    """Which Atoll this is, for people, as "0.1.0+3f2a1b9c": its release, and what its code comes to.

    Of two states of the code between releases the first is the same, and machines must tell them apart.
    Run from sources that nobody installed, it is of release 0.
    """
    try:
        number = metadata.version("atoll")
    except metadata.PackageNotFoundError:
        number = "0"
    code = code_digest(Path(__file__).parents[2])
    return f"{number}+{code}" if code else number


def code_digest(root: Path) -> str:
    """Eight hex digits, of each Python file of Atoll under `root`; none where it lies in an archive."""
    digest = blake2b(digest_size=4)
    files = sorted(file for room in OURS for file in (root / room).rglob("*.py"))
    for file in files:
        body = file.read_bytes()
        digest.update(f"{file.relative_to(root).as_posix()} {len(body)}\n".encode())
        digest.update(body)
    return digest.hexdigest() if files else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A kind of file: the version that is written, those that are read, and which releases wrote which."""

    name: str
    writes: int
    reads: frozenset[int]
    releases: dict[int, str]  # the last ones that opened them

    def next_step(self, version: int) -> str:
        """What to type where a file is of a version that is not read."""
        if version > self.writes:
            return "install the release of Atoll that wrote it, or a later one, from where you have this one"
        if release := self.releases.get(version):
            return f"install the release that opens it, {release}, from where you have this one"
        return "no release of Atoll opens it: it is of a state of the code between releases"


DATABASE = Format(
    name="the coordinator's database", writes=10, reads=frozenset({10}), releases={10: "0.1.0"}
)

RESULTS_MAGIC = b"atollrs1"
"""What each file of results begins with; the last character is the version."""

MANIFEST_MAGIC = b"atollmf1"
"""What a manifest of a state begins with, likewise."""


def refuse_foreign_wire(told: int, *, whose: str, here: str) -> None:
    """Raises ProtocolMismatchError for the version of another side that this one does not understand.

    Whichever of the two finds it, the node's owner reads it: it says "the node" and "the coordinator".
    """
    theirs = told or 1  # a release that tells none is of version 1
    if OLDEST_WIRE <= theirs <= WIRE:
        return
    older, newer = (here, whose) if theirs > WIRE else (whose, here)
    installs = (
        "ask the run owner to install a later release of Atoll there, or install an earlier one here"
        if older == COORDINATOR
        else "install a later release of Atoll here"
    )
    raise ProtocolMismatchError(
        f"{whose} speaks version {theirs} of the protocol, and {here} versions {OLDEST_WIRE} to {WIRE}",
        next_step=f"{installs}: {newer} knows one version before its own",
    )
