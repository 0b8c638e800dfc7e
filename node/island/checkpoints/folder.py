"""The checkpoints of a node's folder: which one a start goes on from, and which ones are removed.

A checkpoint is the inner optimizer's state after a round's training, in a folder `round-N` that gets
its name when it is whole. Weights are not in it: they are the outer state's. Of an island of several
hosts each has its own ranks' part, and all parts of one writing have the same `set_id`. Needs no
torch; what is in the files is node.island.checkpoints.inner_state's business.
"""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import blake3
import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import SystemRefusedError
from protocol.files.durable import make_folder, sync_folder, write_atomically
from protocol.rounds import Digest

log = structlog.get_logger()

CHECKPOINTS_FOLDER = "inner"
KEPT = 2
"""A damaged newest one costs some rounds' moments, not all."""

_ABOUT = "checkpoint.json"
_NAME = re.compile(r"round-(\d+)")
_ELEMENT_BYTES = 8  # AdamW's two moments; Muon has one
_PART_BYTES = 8192  # at most, of what lies around the values of one rank's part of a tensor


class FileSeal(BaseModel):
    """What a file must be to be read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_bytes: int
    digest: str  # BLAKE3, hex


class About(BaseModel):
    """checkpoint.json: what the tensors do not say."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["atoll checkpoint 1"] = "atoll checkpoint 1"
    run_digest: str
    layout_digest: str
    round: int
    mesh: str  # of the ranks that wrote it; any other may read it
    num_hosts: int = 1
    host: int = 0  # whose part this is
    set_id: str = ""  # what the parts of one writing have in common, and no other writing
    loss_scale: float | None = None  # of fp16
    loss_scale_steps: int = 0  # since it was changed
    rewarming_steps: int = 0  # that were left
    files: dict[str, FileSeal] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole one."""

    path: Path
    about: About


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What ranks answer when they are to keep their state."""

    is_busy: bool  # nothing was begun: the one before is still being written
    failure: str  # of the last one whose writing has ended; empty: it was written


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What ranks answer when they are to take a checkpoint over."""

    failure: str = ""  # why none has changed; empty: all have taken it over
    passed_bytes: int = 0  # that ranks of all hosts got from other hosts' disks


def moments_bytes(num_elements: int) -> int:
    """What the inner optimizer's state takes, without headers."""
    return _ELEMENT_BYTES * num_elements


class NoCheckpointError(ValueError):
    """A folder that is none, or a damaged one, or one of another run; or parts that are no whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFolder:
    """The checkpoints of one node. Its rank 0 writes; its daemon reads while no rank runs."""

    path: Path
    run_digest: Digest
    layout_digest: Digest
    every_rounds: int
    """After how many rounds that the node trained in another one is written …"""

    least_seconds: float = 0.0
    """… and no sooner than so long after the one before."""

    num_hosts: int = 1
    """Of the island: one alone cannot read parts, as the others are not there."""

    def require_room(self, num_elements: int, num_parts: int, *, besides_bytes: int) -> None:
        """Raises SystemRefusedError unless the disk has room for all that will ever be written.

        `num_parts` is tensors times ranks; `besides_bytes` is what else the node will still write to
        the same disk.
        """
        make_folder(self.path)
        one = moments_bytes(num_elements) + _PART_BYTES * num_parts
        held = sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())
        disk = os.statvfs(self.path)
        free = max(0, disk.f_bavail * disk.f_frsize - besides_bytes)
        if (KEPT + 1) * one > held + free:
            raise SystemRefusedError(
                f"checkpoints of the inner optimizer need {(KEPT + 1) * one:,} bytes in "
                f"{self.path}: they take {held:,} and {free:,} are free beside the snapshots",
                next_step="free some space on that disk, or set checkpoint_every_rounds = 0 in "
                "node.toml",
            )

    def building(self, round: int) -> Path:
        """Where a checkpoint is made before it gets its name."""
        return self.path / f".round-{round}"

    def remove_unfinished(self) -> None:
        """What a rank was writing when it died. No rank may run."""
        for path in self.path.glob(".round-*"):
            shutil.rmtree(path, ignore_errors=True)

    def seal(self, about: About) -> None:
        """Says what was built, so that damage shows. Raises OSError or AtollError."""
        building = self.building(about.round)
        files = {path.name: _seal_of(path) for path in building.iterdir()}
        whole = about.model_copy(update={"files": files})
        write_atomically(building / _ABOUT, whole.model_dump_json(indent=1).encode())

    def finish(self, round: int) -> None:
        """Gives what was built and sealed its name; then removes all but the two newest.

        Raises OSError.
        """
        path = self.path / f"round-{round}"
        # Trained again after a death: the older one of that name makes room.
        shutil.rmtree(path, ignore_errors=True)
        self.building(round).rename(path)
        sync_folder(self.path)
        # Later rounds are of a history that was left, by a return to an earlier one.
        paths = self._paths()
        own = paths.index(path)
        for other in (*paths[:own], *paths[own + KEPT :]):
            shutil.rmtree(other, ignore_errors=True)

    def whole(self) -> Iterator[Checkpoint]:
        """Those that may be loaded, the newest first; the log tells why others are not."""
        for path in self._paths():
            try:
                yield self._read(path)
            except (NoCheckpointError, OSError) as error:
                log.warning("checkpoint left out", path=str(path), why=str(error))

    def discard(self, checkpoint: Checkpoint) -> None:
        """Removes one that cannot be loaded, so that it is not tried for ever."""
        shutil.rmtree(checkpoint.path, ignore_errors=True)

    def _paths(self) -> list[Path]:
        """The newest first."""
        rounds = {
            int(match[1]): path
            for path in self.path.glob("round-*")
            if (match := _NAME.fullmatch(path.name))
        }
        return [rounds[number] for number in sorted(rounds, reverse=True)]

    def _read(self, path: Path) -> Checkpoint:
        try:
            about = About.model_validate_json((path / _ABOUT).read_bytes())
        except (FileNotFoundError, ValidationError) as error:
            raise NoCheckpointError(f"its {_ABOUT} is not there or damaged") from error
        if about.run_digest != self.run_digest.hex():
            raise NoCheckpointError(f"it is of another run: {about.run_digest[:12]}…")
        if about.layout_digest != self.layout_digest.hex():
            raise NoCheckpointError(f"its model has another layout: {about.layout_digest[:12]}…")
        self._check_hosts(about)
        names = {file.name for file in path.iterdir()} - {_ABOUT}
        if names != about.files.keys():
            raise NoCheckpointError("files are missing, or there are others")
        for name, seal in about.files.items():
            if _seal_of(path / name) != seal:
                raise NoCheckpointError(f"{name} is damaged")
        return Checkpoint(path=path, about=about)

    def _check_hosts(self, about: About) -> None:
        if self.num_hosts == 1 and about.num_hosts != 1:
            raise NoCheckpointError(
                f"it is one of the parts that {about.num_hosts} hosts wrote: --hosts "
                f"{about.num_hosts} reads them"
            )


def _seal_of(path: Path) -> FileSeal:
    hasher = blake3.blake3()
    hasher.update_mmap(path)
    return FileSeal(num_bytes=path.stat().st_size, digest=hasher.hexdigest())
