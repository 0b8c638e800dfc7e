"""Checkpoints of several hosts: each has its own ranks' part on its own disk, and a set is all parts.

A start takes a set whose parts are all with hosts that are here, however many there were when it was
written, and whatever their mesh. Pure but for the follower's shelf; writing and reading, and how values come
to ranks of other hosts, is node.island.checkpoints' (writer, passing).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from node.disk.budget import DiskBudget
from node.hosts.orders import OpenShelf, Part
from node.island.checkpoints.folder import Checkpoint, CheckpointFolder
from protocol.files.durable import make_folder
from protocol.files.folder_lock import FolderLock
from protocol.wire.rounds import Digest

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Which of the hosts that follow takes which place, and which of the leader's sets can be had."""

    order: tuple[int, ...]  # of the first place the index of its host, and so on
    lacks: tuple[str, ...]  # of each what is not here; empty: all of it is


def part_of(checkpoint: Checkpoint) -> Part:
    """Whose part of what it is."""
    about = checkpoint.about
    return Part(set_id=about.set_id, host=about.host, num_hosts=about.num_hosts)


def arranged(own: Sequence[Part], others: Sequence[Sequence[Part]]) -> Arrangement:
    """Gives hosts the places that they had when the newest set was written of which all parts are here.

    They come in any order, and with its old place a host finds most of what it wants on its own disk.
    Hosts that have no part come last. `own` is what the leader has, the newest first; of other sets
    nobody would know the round. Without a set the order is that in which they came.
    """
    lacks = tuple(_lack_of(part, others) for part in own)
    newest = next((part.set_id for part, lack in zip(own, lacks, strict=True) if not lack), None)
    place_of = {
        index: part.host
        for index, parts in enumerate(others)
        for part in parts
        if part.set_id == newest
    }
    order = sorted(range(len(others)), key=lambda index: place_of.get(index, math.inf))
    return Arrangement(order=tuple(order), lacks=lacks)


def _lack_of(part: Part, others: Sequence[Sequence[Part]]) -> str:
    """What is not here of a set of which the leader has a part."""
    here = {other.host for parts in others for other in parts if other.set_id == part.set_id}
    missing = sorted(set(range(part.num_hosts)) - here - {part.host})
    if not missing:
        return ""
    whose = " and ".join(f"host {host}'s" for host in missing)
    return f"{whose} part of it is not here"


class Shelf:
    """Where a follower keeps its parts, for as long as its process lives, whatever leader it has."""

    def __init__(self, path: Path) -> None:
        """Takes the folder for this process. Raises SystemRefusedError, CannotCreateError."""
        make_folder(path)
        self._lock = FolderLock.take(
            path,
            holder="follower",
            next_step="give this one another --name, or a folder of its own with --checkpoints",
        )
        self._path = path.absolute()  # ranks need not be where we are
        self._folder: CheckpointFolder | None = None
        self._checkpoints: dict[str, Checkpoint] = {}

    def open(self, order: OpenShelf) -> list[Part]:
        """What lies there of this run. No rank may run. Raises SystemRefusedError."""
        self._folder = CheckpointFolder(
            path=self._path,
            run_digest=Digest(bytes.fromhex(order.run_digest)),
            layout_digest=Digest(bytes.fromhex(order.layout_digest)),
            every_rounds=order.every_rounds,
            num_hosts=order.num_hosts,
        )
        DiskBudget().require([self._folder.need(order.num_elements, order.num_parts)])
        self._folder.remove_unfinished()
        self._checkpoints = {}
        for checkpoint in self._folder.whole():
            if checkpoint.about.num_hosts == 1:  # and so no set, but a node's that was alone
                log.warning(
                    "checkpoint left out",
                    path=str(checkpoint.path),
                    why="one host wrote it alone: where it leads, it can be read",
                )
            else:
                self._checkpoints[checkpoint.about.set_id] = checkpoint
        return [part_of(checkpoint) for checkpoint in self._checkpoints.values()]

    @property
    def folder(self) -> CheckpointFolder:
        """Where ranks write."""
        assert self._folder is not None, "the shelf is opened before anything is kept"
        return self._folder

    def part_of(self, set_id: str) -> Path | None:
        """Where our part of a set lies, if `open` found one."""
        checkpoint = self._checkpoints.get(set_id)
        return None if checkpoint is None else checkpoint.path

    def close(self) -> None:
        """Lets another process have the folder; safe to repeat."""
        self._lock.release()
