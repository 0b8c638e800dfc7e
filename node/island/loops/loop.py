"""The ranks of one start of a contributor's program: who may be one of them, and which samples they get.

A loop may ask for the samples that its order to train has leased, as numbers or tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import structlog

from node.island.data.dataset import Batch, Dataset, SampleOrder
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.island import InnerWork
from node.island.loops.door import Visitor
from node.island.loops.messages import VERSION, Hello, no_samples, samples
from protocol.errors import AtollError, ConfigError, NoInputError
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import CorpusSummary, Digest


@dataclass(slots=True, kw_only=True, eq=False)
class Loop:
    """The ranks of one start of a program."""

    group: str
    world_size: int
    evaluates: bool
    visitors: dict[int, Visitor] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    is_fresh: bool = True  # it has not adopted the global parameters yet
    unpublished_steps: int = 0
    is_done: bool = False  # it has left with its work
    software: str = ""  # as its ranks tell it

    @property
    def is_whole(self) -> bool:
        """Whether all ranks take orders."""
        return len(self.ready) == self.world_size

    def say(self, message: dict[str, Any]) -> None:
        """Says it to all ranks."""
        for visitor in self.visitors.values():
            visitor.say(message)


def refusal_of(hello: Hello, here: Loop | None) -> tuple[str, str] | None:
    """Why a rank may not come in, and what its owner may do; None when it may. Pure."""
    if hello.version != VERSION:
        return (
            f"the loop's package atoll speaks version {hello.version} and the node version {VERSION}",
            "install the same version of Atoll in both environments",
        )
    if hello.rank >= hello.world_size:
        return (f"rank {hello.rank} of {hello.world_size} is none", "")
    if here is not None and (
        here.group != hello.group
        or here.world_size != hello.world_size
        or hello.rank in here.visitors
    ):
        others = ", ".join(str(visitor.process_id) for visitor in here.visitors.values())
        return (
            f"another training loop is with this node: process {others}",
            "end that one first; a second loop needs a node of its own, in a folder of its own",
        )
    return None


log = structlog.get_logger()

NUMBERS_AT_ONCE = 4096  # of samples, in one message
TOKENS_AT_ONCE = 1 << 18  # likewise

_NO_DATA = CorpusSummary(digest=Digest(bytes(32)), num_samples=0, num_bytes=0)


class LeasedSamples:
    """The run's data as this node has it; a loop with data of its own needs none here."""

    def __init__(self, spec: RunSpec, places: DataPlaces) -> None:
        self._spec = spec
        self._places = places
        self._order: SampleOrder | None = None
        self._dataset: Dataset | None = None  # opened for the first loop that wants tokens
        self._why_none = ""
        self.summary = _NO_DATA

    def look(self) -> None:
        """Finds out what is here. Heavy. A run's own code is run by loops alone, never here."""
        if self._spec.data.source == "function":
            self._why_none = "the run's samples come from a function, which the loop calls itself"
            return
        try:
            found = open_dataset(self._spec, self._places)
        except (NoInputError, ConfigError) as error:
            log.warning("the run's data is not here: loops need data of their own", why=error.what)
            self._why_none = error.what
            return
        self.summary = found.summary()
        self._order = SampleOrder(
            seed=self._spec.run.seed,
            num_samples=found.num_samples,
            num_together=found.num_together,
        )

    def told(self, work: InnerWork, first_step: int, *, wants_tokens: bool) -> dict[str, Any]:
        """The message with samples of as many steps as it holds, or why there are none. Heavy."""
        if self._order is None:
            return no_samples(self._why_none)
        batch = self._spec.inner.batch
        at_once = NUMBERS_AT_ONCE // batch
        if wants_tokens:
            at_once = TOKENS_AT_ONCE // self._spec.tokens_per_inner_step
        steps = max(0, min(work.inner_steps - first_step, max(1, at_once)))
        numbers = self._order.indices(work.first_sample + first_step * batch, steps * batch)
        if not wants_tokens:
            return samples(numbers, None)
        try:
            if self._dataset is None:
                self._dataset = open_dataset(self._spec, self._places)
            # What the next message tells, too, may be far: it is on its way while the loop trains.
            later = min(2 * steps, work.inner_steps - first_step)
            ahead = self._order.indices(work.first_sample + first_step * batch, later * batch)
            self._dataset.expect("training", ahead)
            found = self._dataset.batch("training", numbers)
        except AtollError as error:
            return no_samples(error.what)
        assert isinstance(found, Batch)  # only functions give other things
        return samples(numbers, found)
