"""What one node of a contender is told, and what it says of itself while it trains.

Both are files, so that contenders share nothing else with the benchmark: the order is JSON, the words
are JSON lines, and saved weights are canonical vectors. Clocks are monotonic, which all processes of
a machine share.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from node.outer_state import Vector
from protocol.run.run_files import validated
from protocol.run.run_spec import RunSpec

ORDER_VARIABLE = "ATOLL_WAN_ORDER"
"""Names the order's file to Atoll's ranks, which get no arguments of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One node's part in a contender's training."""

    rank: int
    addresses: tuple[str, ...]  # of all nodes, by rank
    middle: str  # address of the host that a coordinator or a lighthouse is on
    interface: str
    tables: Mapping[str, Any]  # of the run file
    options: Mapping[str, Any] = field(default_factory=dict)  # the contender's own
    step_seconds: float
    save_seconds: float
    last_step: int | None = None  # of inner steps; None: until it is ended
    folder: Path

    @property
    def num_nodes(self) -> int:
        return len(self.addresses)

    @property
    def address(self) -> str:
        """That of the node itself."""
        return self.addresses[self.rank]

    @property
    def spec(self) -> RunSpec:
        return validated(dict(self.tables), origin="the benchmark's run file")

    @property
    def log(self) -> Path:
        """Where the node says what happens."""
        return self.folder / f"said-{self.rank}.jsonl"

    def write(self) -> Path:
        """Leaves the order where the node finds it; returns the file."""
        path = self.folder / f"order-{self.rank}.json"
        path.write_text(json.dumps(asdict(self) | {"folder": str(self.folder)}))
        self.log.touch()
        return path

    @classmethod
    def read(cls, path: Path | str) -> "Order":
        told = json.loads(Path(path).read_text())
        told |= {"addresses": tuple(told["addresses"]), "folder": Path(told["folder"])}
        return cls(**told)


class Teller:
    """Says what a node does, and keeps its weights from time to time to be evaluated afterwards."""

    def __init__(self, order: Order, clock: Callable[[], float] = time.monotonic) -> None:
        self._order = order
        self._clock = clock
        self._began_at: float | None = None
        self._newest_slot = 0
        self._newest_steps = 0

    @property
    def has_begun(self) -> bool:
        return self._began_at is not None

    def begin(self) -> None:
        """The first inner step begins: the clock runs from here."""
        self._began_at = self._clock()
        self._say("begun", at=self._began_at)

    def say(self, said: str, **fields: Any) -> None:
        self._say(said, at=self._clock(), **fields)

    def save_if_due(
        self, weights: Callable[[], Vector], *, exchanges: int, steps: int, late_steps: int
    ) -> None:
        """Keeps the weights once in `save_seconds`, and when the last step is done; they are those of now.

        Replicas are compared where their number of exchanges is the same.
        """
        now = self._clock()
        if self._began_at is None:
            raise RuntimeError("call begin() first")
        slot = int((now - self._began_at) / self._order.save_seconds)
        last_step = self._order.last_step
        is_first_at_end = last_step is not None and self._newest_steps < last_step <= steps
        if slot <= self._newest_slot and not is_first_at_end:
            return
        self._newest_slot, self._newest_steps = slot, steps
        path = self._order.folder / f"weights-{self._order.rank}-{exchanges}.npy"
        np.save(path, weights())
        self._say(
            "saved",
            at=now,
            path=path.name,
            exchanges=exchanges,
            steps=steps,
            late_steps=late_steps,
            cost_seconds=self._clock() - now,
        )

    def _say(self, said: str, **fields: Any) -> None:
        line = json.dumps({"said": said, **fields}) + "\n"
        # One write: who follows the file never sees half a line of two processes.
        descriptor = os.open(self._order.log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
