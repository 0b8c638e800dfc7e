"""Writes a rank's part of checkpoints behind the training, and reads them when ranks start.

All ranks make the same calls in the same order. The copy of the state is taken at once; torch cuts
it, and agrees with the other ranks, in a thread and over a process group of its own. Of several hosts
each writes what its own ranks hold, to its own disk; they agree only that all have done so. Their
ranks read together, as one may want what another host's disk has.
"""

import contextlib
import os
import shutil
import threading
import warnings
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from node.island.checkpoints.folder import About, CheckpointFolder, Kept, Loaded, NoCheckpointError
from node.island.checkpoints.inner_state import Blank, PartPlanner, Tensors
from node.island.checkpoints.passing import PassingReader
from node.island.parallel.mesh import Mesh
from node.island.training.trainer import Trainer
from protocol.errors import AtollError

_NICENESS = 10
"""Of the thread that writes, where threads have their own: training comes first."""


class CheckpointWriter:
    """At most one checkpoint is being written at a time."""

    def __init__(self, trainer: Trainer, mesh: Mesh) -> None:
        self._trainer = trainer
        self._mesh = mesh
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._newest_round: int | None = None
        # torch says so of every island with a single rank, and it is so.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or")

    def keep(
        self, folder: CheckpointFolder, round: int, *, set_id: str = "", is_waited: bool
    ) -> Kept:
        """Copies the inner optimizer's state and lets it be written; waits for that if asked to."""
        if is_waited:
            self._wait()
        # Rank 0 decides. The threads of others end at about the same time.
        is_busy = self._mesh.decided_by_first(self._thread is not None and self._thread.is_alive())
        if not is_busy and round != self._newest_round:
            self._wait()
            self._begin(folder, round, set_id)
            if is_waited:
                self._wait()
        failure, self._failure = self._failure, ""
        return Kept(is_busy=is_busy, failure=failure)

    def load(self, about: About, path: Path | None) -> Loaded:
        """Takes the state over, or says why not, when any rank could not: then none has changed.

        `path` is this host's part. Of several hosts some may have none.
        """
        failure = ""
        try:
            state = self._trainer.blank_inner_state()
        except Exception as error:  # too little memory, say
            failure = _sentence(error)
        if self._has_any_failed(failure):
            return Loaded(failure=failure or "another rank has no memory for it")
        passed_bytes = 0
        try:
            if self._mesh.num_hosts == 1:
                assert path is not None, "a host that is alone reads what it has"
                state.read(filesystem.FileSystemReader(path), self._groups[0])
            else:
                group, _ = self._groups
                assert group is not None, "several hosts have several ranks"
                reader = PassingReader(path, self._mesh, group)
                _read_together(state, reader)
                passed_bytes = reader.received_bytes
        # torch raises whatever it met, and any of it only means that this state cannot be had.
        except (CheckpointException, Exception) as error:
            failure = _sentence(error)
        if self._has_any_failed(failure):
            return Loaded(failure=failure or "another rank could not read it")
        self._trainer.take_over(state, about)
        passed = self._mesh.added(torch.tensor(passed_bytes))
        return Loaded(passed_bytes=int(passed.item()))

    def _has_any_failed(self, failure: str) -> bool:
        return self._mesh.added(torch.tensor(float(bool(failure)))).item() > 0

    def _begin(self, folder: CheckpointFolder, round: int, set_id: str) -> None:
        failure = ""
        try:
            tensors, about = self._trainer.inner_state(
                run_digest=folder.run_digest, layout_digest=folder.layout_digest, round=round
            )
        except Exception as error:  # too little memory, say: no reason to stop training
            failure = _sentence(error)
        if self._has_any_failed(failure):
            self._failure = failure or "another rank could not copy its state"
            return
        about = about.model_copy(
            update={
                "set_id": set_id,
                "num_hosts": self._mesh.num_hosts,
                "host": self._mesh.host,
            }
        )
        self._newest_round = round
        # Not to be waited for at the end of the process: a dead rank would have it hang there.
        self._thread = threading.Thread(
            target=self._write,
            args=(folder, tensors, about, *self._groups),
            name="write-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def _write(
        self,
        folder: CheckpointFolder,
        tensors: Tensors,
        about: About,
        of_all: dist.ProcessGroup | None,
        of_host: dist.ProcessGroup | None,
    ) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            failure = self._make_room(folder, about.round)
            # Or others would wait in the writing.
            has_room = not _has_any_built_badly(failure, of_all)
            if has_room:
                failure = self._build(folder, tensors, about, of_host)
            # A name only when all parts are there: then what hosts have differs by the newest at most.
            if not has_room or _has_any_built_badly(failure, of_all):
                failure = failure or "another rank could not write its part"
            elif self._mesh.is_first_of_host:
                folder.finish(about.round)
        except Exception as error:
            failure = _sentence(error)
        if failure:
            self._failure = failure
            if self._mesh.is_first_of_host:
                shutil.rmtree(folder.building(about.round), ignore_errors=True)

    def _make_room(self, folder: CheckpointFolder, round: int) -> str:
        """Drops what must go before this host's part is written; returns why it could not."""
        try:
            if self._mesh.is_first_of_host:
                folder.make_room(round)
        except (AtollError, OSError) as error:
            return _sentence(error)
        return ""

    def _build(
        self,
        folder: CheckpointFolder,
        tensors: Tensors,
        about: About,
        group: dist.ProcessGroup | None,
    ) -> str:
        """Writes this host's part without its name; returns why not."""
        building = folder.building(about.round)
        try:
            state_dict_saver.save(
                tensors,
                storage_writer=filesystem.FileSystemWriter(building),
                planner=PartPlanner() if self._mesh.num_hosts > 1 else None,
                process_group=group,
                no_dist=group is None,
            )
            if self._mesh.is_first_of_host:
                folder.seal(about)
        except (CheckpointException, Exception) as error:
            return _sentence(error)
        return ""

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @cached_property
    def _groups(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """All ranks of the island, and those of this host; None for a single rank.

        They are the writer's own, or what is being written would mix with what is being trained.
        """
        if not dist.is_initialized():
            return None, None
        every = dist.new_group(backend="gloo")
        return every, every if self._mesh.num_hosts == 1 else self._mesh.new_host_group()


def _has_any_built_badly(failure: str, group: dist.ProcessGroup | None) -> bool:
    flag = torch.tensor(float(bool(failure)))
    if group is not None:
        dist.all_reduce(flag, group=group)
    return flag.item() > 0


def _read_together(state: Blank, reader: PassingReader) -> None:
    """Reads on ranks of several hosts; raises NoCheckpointError on all of them where one cannot.

    torch plans for each rank alone, and so tells no rank of another's failure.
    """
    failure = ""
    try:
        state.read(reader, None)
    except (CheckpointException, Exception) as error:
        cause = _cause(error)
        if isinstance(cause, NoCheckpointError):
            raise cause from error  # which all ranks do
        failure = _sentence(cause)
        reader.give_up(failure)
    reader.end(failure)


def _cause(error: BaseException) -> BaseException:
    """The first rank's reason, without torch's wrapping of it."""
    while isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return error


def _sentence(error: BaseException) -> str:
    """The first rank's reason, without torch's traceback of it."""
    if isinstance(error, CheckpointException):
        rank, (reason, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_sentence(reason)}"
    if isinstance(error, AtollError):
        return error.what
    if isinstance(error, NoCheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"
