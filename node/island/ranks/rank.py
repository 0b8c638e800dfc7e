"""A rank's process: takes orders from the daemon over a pipe until the pipe closes.

The forkserver imports this module once, by node.island.ranks.preload, so that a new rank need not import
torch. Nothing here may touch a GPU or start a thread at import: ranks are forked from that process.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from functools import partial
from multiprocessing import parent_process
from typing import TYPE_CHECKING

import torch

from node.island.checkpoints.writer import CheckpointWriter
from node.island.data.opening import open_dataset
from node.island.island import Progress
from node.island.models.code import find_code, functions_of, is_of_other_code, said
from node.island.parallel.mesh import Mesh
from node.island.parallel.modules import be_deterministic
from node.island.ranks.accelerator import bind_to_near_cores, pin, select
from node.island.ranks.commands import (
    Adopt,
    Alive,
    Begin,
    Command,
    Done,
    Evaluate,
    Failed,
    Halt,
    Keep,
    Measure,
    Order,
    Publish,
    RankSetup,
    Reply,
    Resume,
    Told,
    Train,
)
from node.island.ranks.faults import OutOfMemoryError, RankFailedError
from node.island.training.trainer import Trainer
from node.machine.hardware import keep_freed_memory
from node.outer_state import SharedVectors
from protocol.errors import AtollError, ConfigError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


_PEER_DEATH_SECONDS = 2.0
SIGN_OF_LIFE_SECONDS = 1.0


def run_rank(connection: "Connection[Reply, Order | Halt]", setup: RankSetup) -> None:
    """The whole life of a rank."""
    faulthandler.enable(file=2)  # a fault of native code then says where it was
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's, which then stops us
    threading.Thread(target=_end_with_daemon, name="end-with-daemon", daemon=True).start()
    try:
        _Rank(connection, setup).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the daemon is gone or has closed the pipe
    except AtollError as error:
        _send_last(connection, Failed(error))
    except Exception as error:
        if setup.shape.num_ranks > 1:
            # When another rank dies, this one fails in a collective. The daemon sees that death and
            # ends us before anything is said of a failure that was none of ours.
            time.sleep(_PEER_DEATH_SECONDS)
        with contextlib.suppress(OSError):  # a full log must not keep the daemon from knowing
            traceback.print_exc(file=sys.stderr)
        _send_last(connection, Failed(_as_people_see_it(error, setup)))


_FULL = ("can't allocate memory", "out of memory")
"""What torch says of the CPU's memory, and of a GPU without room for so much as a context."""


def _as_people_see_it(error: Exception, setup: RankSetup) -> AtollError:
    """Too little memory is no bug: it is said by itself, with what takes less."""
    is_full = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    is_full = is_full or any(words in str(error) for words in _FULL)
    if not is_full and is_of_other_code(error) and functions_of(setup.spec):
        return ConfigError(
            f"the run's own code failed on rank {setup.rank}: {said(error)}",
            next_step="have the run's owner correct it; the log has the traceback",
        )
    if not is_full:
        return RankFailedError(
            f"rank {setup.rank} failed: {type(error).__name__}: {error}",
            next_step="see the traceback in the log, and report it",
        )
    told = " ".join(str(error).split()).partition(" If reserved but unallocated")[0]
    return OutOfMemoryError(
        f"rank {setup.rank} has no memory left on {setup.device}: {told or type(error).__name__}",
        next_step='set micro_batch = 1 or activation_checkpointing = "full" in node.toml, take more '
        "ranks with shard or --mesh auto, or end what else uses the device",
    )


class _Rank:
    """Carries out orders, one at a time."""

    def __init__(self, connection: "Connection[Reply, Order | Halt]", setup: RankSetup) -> None:
        self._connection = connection
        self._vectors = SharedVectors.attach(setup.names)
        torch.set_num_threads(setup.num_threads)
        keep_freed_memory()
        if setup.local.deterministic:
            be_deterministic()
        device = torch.device(setup.device)
        select(device)
        bind_to_near_cores(device)
        if not setup.shape.has_offload:
            pin(self._vectors.parameters, device)
            pin(self._vectors.published, device)
        if setup.local.precision == "tf32":
            torch.set_float32_matmul_precision("high")
        find_code(setup.data.code)
        self._corpus = open_dataset(setup.spec, setup.data)
        mesh = Mesh.joined(shape=setup.shape, rank=setup.rank, device=device, meeting=setup.meeting)
        self._trainer = Trainer(
            spec=setup.spec,
            corpus=self._corpus,
            device=device,
            mesh=mesh,
            clock=time.monotonic,
            local=setup.local,
        )
        self._trainer.take_base(setup.data.base)
        self._trainer.know_peak()
        self._writer = CheckpointWriter(self._trainer, mesh)
        self._speaks = mesh.speaks

    def serve(self) -> None:
        """Answers orders; raises EOFError when the pipe closes."""
        order: Order | Halt = Order(0, Begin())
        while True:
            # A Halt that comes when nothing is trained arrived too late: nothing to do.
            if isinstance(order, Order):
                answer = self._carry_out(order.number, order.command)
                self._connection.send(Done(order.number, answer))
            order = self._connection.recv()

    def _carry_out(self, number: int, command: Command) -> object:
        def alive() -> None:
            self._connection.send(Alive())

        match command:
            case Begin():
                return self._corpus.summary()
            case Adopt(fragment, is_taken):
                vectors = self._vectors
                if fragment is None:
                    self._trainer.adopt(vectors.parameters)
                else:
                    self._trainer.merge(
                        vectors.parameters, vectors.published, fragment, is_taken=is_taken
                    )
                return None
            case Publish(fragment):
                self._trainer.publish(self._vectors.published, fragment)
                return None
            case Resume(about, path):
                return self._writer.load(about, path)
            case Keep(folder, round_, is_waited, set_id):
                return self._writer.keep(folder, round_, set_id=set_id, is_waited=is_waited)
            case Evaluate():
                return self._trainer.evaluate_at(self._vectors.parameters, alive)
            case Measure(names, places):
                beside = SharedVectors.attach(names)
                try:
                    return self._trainer.losses_at(beside.parameters, places, alive)
                finally:
                    beside.close()
            case Train(work):

                def tell(progress: Progress) -> None:
                    if self._speaks:
                        self._connection.send(Told(number, progress))

                # Orders come one at a time, so anything in the pipe meanwhile means Halt.
                return self._trainer.train(
                    work, tell, self._connection.poll, partial(rest, self._connection)
                )


def rest(connection: "Connection[Reply, Order | Halt]", seconds: float) -> None:
    """Waits that long, or until the daemon says something; it must not take a long rest for a hang."""
    ends_at = time.monotonic() + seconds
    while (left := ends_at - time.monotonic()) > 0:
        if connection.poll(min(left, SIGN_OF_LIFE_SECONDS)):
            return
        if left > SIGN_OF_LIFE_SECONDS:
            connection.send(Alive())


def _send_last(connection: "Connection[Reply, Order | Halt]", reply: Reply) -> None:
    try:
        connection.send(reply)
    except OSError:
        return  # nobody is left to hear it


def _end_with_daemon() -> None:
    """Ends the process when the daemon is gone, also in the middle of training."""
    daemon = parent_process()
    assert daemon is not None
    daemon.join()
    os._exit(0)
