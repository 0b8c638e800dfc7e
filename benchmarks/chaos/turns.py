"""A speed of its own for every node on a machine with fewer cores than nodes.

Far-apart machines do not get faster when one of them dies. Nodes that share cores do: the others
train on what the dead one leaves, and slow down while it starts again, so a throughput under faults
would say little. So ranks train in turns, by SIGSTOP and SIGCONT. A cycle has a slot for each node,
and as many in which nobody trains, which leaves the cores to everything else. Only ranks in the
midst of training are held; the slot of a node that is away stays empty.
"""

import os
import signal
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from lab.processes.logs import Entry
from lab.processes.swarm import RealSwarm

SLOT_SECONDS = 0.015


@dataclass(frozen=True, slots=True)
class _Held:
    """The ranks of one life of a node, by descriptors: their numbers may become others'."""

    descriptors: tuple[int, ...]

    def send(self, number: signal.Signals) -> None:
        for descriptor in self.descriptors:
            try:
                signal.pidfd_send_signal(descriptor, number)
            except ProcessLookupError:
                continue  # it has ended

    def release(self) -> None:
        """Lets them run, also those whose node is dead: they end when they see that."""
        self.send(signal.SIGCONT)
        for descriptor in self.descriptors:
            os.close(descriptor)


class Turns:
    """Gives the ranks of a swarm their turns, in a thread of its own."""

    def __init__(self, swarm: RealSwarm, *, num_nodes: int) -> None:
        self._swarm = swarm
        self._num_nodes = num_nodes
        self._held: dict[str, _Held] = {}
        self._wanted: dict[str, bool] = {}  # node → whether it has begun, or ended, training
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._go_round, name="turns", daemon=True)
        swarm.logs.listen(self._hear)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        for held in self._held.values():
            held.release()

    def _hear(self, name: str, entry: Entry) -> None:
        if entry.get("event") == "phase" and entry["phase"] in ("training", "contributing"):
            with self._lock:
                self._wanted[name] = entry["phase"] == "training"
        elif entry.get("event") == "ranks started again" and name in self._held:
            with self._lock:
                self._wanted[name] = True

    def _go_round(self) -> None:
        while not self._is_over.is_set():
            names = sorted(self._held)
            for slot in range(self._num_nodes):
                self._take_over_what_is_wanted()
                for place, name in enumerate(names):
                    if place % self._num_nodes == slot and name in self._held:
                        self._held[name].send(signal.SIGCONT)
                time.sleep(SLOT_SECONDS)
                for held in self._held.values():
                    held.send(signal.SIGSTOP)
                time.sleep(SLOT_SECONDS)

    def _take_over_what_is_wanted(self) -> None:
        with self._lock:
            wanted, self._wanted = self._wanted, {}
        for name, is_training in wanted.items():
            if (before := self._held.pop(name, None)) is not None:
                before.release()
            if is_training and name in self._swarm.nodes:
                self._held[name] = _Held(self._swarm.nodes[name].open_ranks())
