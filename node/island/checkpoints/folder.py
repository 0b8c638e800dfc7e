"""The checkpoints of a node's folder: which one ranks go on from when they start, and which are removed.

A checkpoint is the inner optimizer's state after a round's training, in a folder `round-N` that gets
its name when it is whole. Weights are not in it: they are the outer state's. Of an island of several
hosts each has its own ranks' part, and all parts of one writing have the same `set_id`. Needs no
torch; what is in the files is node.island.checkpoints.inner_state's business.
"""

import asyncio
import math
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import blake3
import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from node.disk.round_folder import Need, RoundFolder
from node.island.ranks.faults import RankDiedError
from protocol.files.durable import write_atomically
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import Digest

log = structlog.get_logger()

CHECKPOINTS_FOLDER = "inner"
KEPT = 2
"""A damaged newest one costs some rounds' moments, not all. The older one makes room for the next."""

_ABOUT = "checkpoint.json"
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
    """A folder that is none, or one of another run; or parts that are no whole."""


class DamagedCheckpointError(NoCheckpointError):
    """A folder that cannot be what was written."""


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

    @property
    def _records(self) -> RoundFolder:
        return RoundFolder(self.path, suffix="", kept=self._kept, digits=1)

    @property
    def _kept(self) -> int:
        """Of several hosts each keeps one more: what one of them has not finished, the others cannot use."""
        return KEPT if self.num_hosts == 1 else KEPT + 1

    def need(self, num_elements: int, num_parts: int) -> Need:
        """What is ever kept at most; `num_parts` is tensors times ranks."""
        return Need(
            what="checkpoints of the inner optimizer",
            path=self.path,
            num_bytes=self._kept * (moments_bytes(num_elements) + _PART_BYTES * num_parts),
            held_bytes=self._records.held_bytes(),
        )

    def building(self, round: int) -> Path:
        """Where a checkpoint is made before it gets its name."""
        return self._records.building(round)

    def make_room(self, round: int) -> None:
        """Drops what must go before a checkpoint of this round is made; one that is whole stays."""
        self._records.make_room(round)

    def remove_unfinished(self) -> None:
        """What a rank was writing when it died. No rank may run."""
        self._records.sweep()

    def seal(self, about: About) -> None:
        """Says what was built, so that damage shows. Raises OSError or AtollError."""
        building = self.building(about.round)
        files = {path.name: _seal_of(path) for path in building.iterdir()}
        whole = about.model_copy(update={"files": files})
        write_atomically(building / _ABOUT, whole.model_dump_json(indent=1).encode())

    def finish(self, round: int) -> None:
        """Gives what was built and sealed its name. Raises AtollError."""
        self._records.finish(round)

    def whole(self) -> Iterator[Checkpoint]:
        """Those that may be loaded, the newest first; the log tells why others are not."""
        for round in self._records.rounds():
            path = self._records.path_of(round)
            try:
                yield self._read(path)
            except (NoCheckpointError, OSError) as error:
                log.warning("checkpoint left out", path=str(path), why=str(error))
                if isinstance(error, DamagedCheckpointError):
                    self._records.set_apart(round)

    def discard(self, checkpoint: Checkpoint) -> None:
        """Removes one that cannot be loaded, so that it is not tried for ever."""
        shutil.rmtree(checkpoint.path, ignore_errors=True)

    def _read(self, path: Path) -> Checkpoint:
        try:
            about = About.model_validate_json((path / _ABOUT).read_bytes())
        except (FileNotFoundError, ValidationError) as error:
            raise DamagedCheckpointError(f"its {_ABOUT} is not there or damaged") from error
        if about.run_digest != self.run_digest.hex():
            raise NoCheckpointError(f"it is of another run: {about.run_digest[:12]}…")
        if about.layout_digest != self.layout_digest.hex():
            raise NoCheckpointError(f"its model has another layout: {about.layout_digest[:12]}…")
        self._check_hosts(about)
        names = {file.name for file in path.iterdir()} - {_ABOUT}
        if names != about.files.keys():
            raise DamagedCheckpointError("files are missing, or there are others")
        for name, seal in about.files.items():
            if _seal_of(path / name) != seal:
                raise DamagedCheckpointError(f"{name} is damaged")
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


Load = Callable[[Checkpoint], Awaitable[Loaded]]
"""Has the ranks take over a checkpoint."""


class Resuming:
    """The checkpoints of an island over its ranks' lives. Without a folder there are none."""

    def __init__(
        self,
        folder: CheckpointFolder | None,
        spec: RunSpec,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._spec = spec
        self._clock = clock
        self.leave_out_after: int | None = None
        """At the next start: checkpoints of later rounds are of a history that is undone."""
        self._is_at_zero = True
        self._rounds_since_kept = 0
        self._kept_until = -math.inf  # by the clock: none is due before

    async def resume(self, load: Load, among: Iterable[Checkpoint] | None = None) -> None:
        """Takes the newest checkpoint that loads. A rank that dies of it must not meet it again.

        `among`, the newest first, are those of which all parts are here, where there are several hosts.
        """
        self._is_at_zero = True
        if self.folder is None:
            return
        # The first round from here on is kept: what is there may be old, or nothing.
        self._rounds_since_kept, self._kept_until = self.folder.every_rounds - 1, -math.inf
        await asyncio.to_thread(self.folder.remove_unfinished)
        checkpoints = self.folder.whole() if among is None else iter(among)
        checkpoints_left_out = 0
        newest, self.leave_out_after = self.leave_out_after, None
        while checkpoint := await asyncio.to_thread(next, checkpoints, None):
            if newest is not None and checkpoint.about.round > newest:
                self.folder.discard(checkpoint)
                continue
            try:
                loaded = await load(checkpoint)
            except RankDiedError:
                self.folder.discard(checkpoint)
                raise
            if not loaded.failure:
                self.goes_on_from(checkpoint.about, loaded)
                return
            log.warning("checkpoint left out", path=str(checkpoint.path), why=loaded.failure)
            checkpoints_left_out += 1
        if checkpoints_left_out:
            log.warning(
                "inner optimizer begins at zero", why="no checkpoint of this run can be loaded"
            )

    def goes_on_from(self, about: About, loaded: Loaded) -> None:
        """The ranks have taken this one over."""
        self._is_at_zero = False
        passed = {"passed_bytes": loaded.passed_bytes} if loaded.passed_bytes else {}
        log.info("inner optimizer goes on from its checkpoint", round=about.round, **passed)

    def tell_of_training(self, token_clock: int) -> None:
        """Says once that learning rates rise, where they do."""
        if self._is_at_zero and token_clock > 0:
            log.info(
                "re-warm-up: learning rates rise, as the inner optimizer began at zero in mid-run",
                inner_steps=rewarming_steps(self._spec),
            )
        self._is_at_zero = False

    def folder_if_due(self, *, is_last: bool) -> CheckpointFolder | None:
        """Where the round that was just trained is to be kept; None when it is not to be."""
        if self.folder is None:
            return None
        self._rounds_since_kept += 1
        is_soon = self._rounds_since_kept < self.folder.every_rounds
        if is_soon or self._clock() < self._kept_until:
            return self.folder if is_last else None
        self._rounds_since_kept = 0
        self._kept_until = self._clock() + self.folder.least_seconds
        return self.folder

    def tell_of_keeping(self, round: int, kept: Kept) -> None:
        """Says what went wrong; training goes on without."""
        if kept.failure:
            log.warning("checkpoint not written", why=kept.failure)
        if kept.is_busy:
            log.warning("no checkpoint: the one before is still being written", round=round)


def rewarming_steps(spec: RunSpec) -> int:
    """Inner steps over which learning rates rise when moments begin at zero in the midst of a run.

    2 / (1 - beta2), the rule of Ma and Yarats, 2021, "On the adequacy of untuned warmup for adaptive
    optimization", section 5: so long the second moment is a mean of too few gradients, and steps are
    too large. A round's steps at most: a restart should not cost more than one.
    """
    return min(spec.node_steps, round(2 / (1 - spec.inner.beta2)))
