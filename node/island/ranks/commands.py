"""What the daemon and its ranks say to each other, over a pipe between our own processes."""

from dataclasses import dataclass
from pathlib import Path

from node.island.checkpoints.folder import About, CheckpointFolder
from node.island.data.places import DataPlaces
from node.island.island import InnerWork, Progress
from node.island.parallel.mesh_shape import LocalTraining, MeshShape
from node.outer_state import SharedNames
from protocol.errors import AtollError
from protocol.run.run_spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """Where ranks of several hosts meet, and their own interface on the way there."""

    host: str
    port: int
    interface: str
    num_hosts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """Everything that a rank needs to begin."""

    spec: RunSpec
    names: SharedNames
    rank: int
    shape: MeshShape
    device: str
    num_threads: int
    local: LocalTraining
    data: DataPlaces
    meeting: Path | MeetingPoint  # where the ranks of this attempt meet; a file on one host


@dataclass(frozen=True, slots=True)
class Begin:
    """Build model and data; answered with a CorpusSummary. A rank does it unasked."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take over the global parameters, of a fragment or of all; answered with None."""

    fragment: int | None
    is_taken: bool


@dataclass(frozen=True, slots=True)
class Train:
    """Take inner steps; answered with Progress meanwhile, then an InnerReport."""

    work: InnerWork


@dataclass(frozen=True, slots=True)
class Publish:
    """Copy local parameters of a fragment to shared memory; answered with None."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Measure the held-out loss; answered with an Evaluation."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure single samples at other parameters, which are shared; answered with their losses in nats."""

    names: SharedNames
    places: tuple[int, ...]  # of the sample order


@dataclass(frozen=True, slots=True)
class Resume:
    """Take over the inner optimizer's state; answered with a Loaded."""

    about: About
    path: Path | None  # None: this host has no part of it


@dataclass(frozen=True, slots=True)
class Keep:
    """Copy the inner optimizer's state for a checkpoint; answered with a Kept."""

    folder: CheckpointFolder
    round: int
    is_waited: bool  # answer only when it is written
    set_id: str = ""  # of several hosts


@dataclass(frozen=True, slots=True)
class Halt:
    """Leave off the training in progress, which is answered with what it did. Not answered itself."""


Command = Begin | Resume | Adopt | Train | Publish | Keep | Evaluate | Measure


@dataclass(frozen=True, slots=True)
class Order:
    """A command with the number under which it is answered."""

    number: int
    command: Command


@dataclass(frozen=True, slots=True)
class Told:
    """Progress of the order with that number."""

    number: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class Alive:
    """The rank goes on with what it was ordered to do."""


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to the order with that number."""

    number: int
    answer: object


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank cannot go on, and ends."""

    error: AtollError


Reply = Alive | Told | Done | Failed
