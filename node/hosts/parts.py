"""Checkpoints of several hosts: each has its own ranks' part on its own disk, and a set is all parts.

A start takes a set of which every host still has its part. Pure but for the follower's shelf; writing
and reading a part is node.island.checkpoint_writer's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from node.island.checkpoints import Checkpoint, CheckpointFolder
from protocol.files import make_folder
from protocol.folder_lock import FolderLock
from protocol.rounds import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One host's part of one writing."""

    set_id: str
    host: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Which of the hosts that follow takes which place, and what all of them then have."""

    order: tuple[int, ...]  # of the first place the index of its host, and so on
    set_ids: frozenset[str]


def part_of(checkpoint: Checkpoint) -> Part:
    """Whose part of what it is."""
    return Part(set_id=checkpoint.about.set_id, host=checkpoint.about.host)


def arranged(own: Sequence[Part], others: Sequence[Sequence[Part]]) -> Arrangement:
    """Gives hosts the places that they had when the newest set was written that is still complete.

    They come in any order, and a host can read its own part only. `own` is the leader's, the newest
    first. Without a complete set the order is that in which they came.
    """
    own = [part for part in own if part.host == 0]
    orders = (_order_in(part.set_id, others) for part in own)
    order = next((order for order in orders if order is not None), None)
    if order is None:
        return Arrangement(order=tuple(range(len(others))), set_ids=frozenset())
    return Arrangement(
        order=order,
        set_ids=frozenset(part.set_id for part in own if _order_in(part.set_id, others) == order),
    )


def _order_in(set_id: str, others: Sequence[Sequence[Part]]) -> tuple[int, ...] | None:
    """The indices of the hosts by their places in a set; None when it is not complete."""
    of_place = {
        part.host: index
        for index, parts in enumerate(others)
        for part in parts
        if part.set_id == set_id
    }
    order = tuple(of_place.get(place, -1) for place in range(1, len(others) + 1))
    return order if sorted(order) == list(range(len(others))) else None


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

    def open(
        self,
        *,
        run_digest: str,
        layout_digest: str,
        every_rounds: int,
        num_hosts: int,
        mesh: str,
        num_elements: int,
        num_parts: int,
    ) -> list[Part]:
        """What lies there of this run. No rank may run. Raises SystemRefusedError."""
        self._folder = CheckpointFolder(
            path=self._path,
            run_digest=Digest(bytes.fromhex(run_digest)),
            layout_digest=Digest(bytes.fromhex(layout_digest)),
            every_rounds=every_rounds,
            num_hosts=num_hosts,
            mesh=mesh,
        )
        self._folder.require_room(num_elements, num_parts, besides_bytes=0)
        self._folder.remove_unfinished()
        self._checkpoints = {
            checkpoint.about.set_id: checkpoint for checkpoint in self._folder.whole()
        }
        return [part_of(checkpoint) for checkpoint in self._checkpoints.values()]

    @property
    def folder(self) -> CheckpointFolder:
        """Where ranks write."""
        assert self._folder is not None, "the shelf is opened before anything is kept"
        return self._folder

    def checkpoint(self, set_id: str) -> Checkpoint:
        """One of those that `open` found."""
        return self._checkpoints[set_id]

    def close(self) -> None:
        """Lets another process have the folder; safe to repeat."""
        self._lock.release()
