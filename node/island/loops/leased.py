"""The samples that a loop may ask for: those that its order to train has leased, as numbers or tokens."""

from typing import Any

import structlog

from node.island.data.dataset import Batch, Dataset
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.data.samples import SampleOrder
from node.island.island import InnerWork
from node.island.loops.messages import no_samples, samples
from protocol.errors import AtollError, ConfigError, NoInputError
from protocol.rounds import CorpusSummary, Digest
from protocol.run_spec import RunSpec

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
