"""What the run's model writes on from the run file's prompts, in a process beside the ranks.

On the CPU, whatever the ranks train on: so it works with every mesh, and takes no memory of a GPU. It takes
as much memory as the model in fp32 while it writes, and few cores.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog

from node.island.data.places import DataPlaces
from node.island.ranks.aside import Aside
from node.outer_state import SharedNames, SharedVectors
from protocol.errors import AtollError
from protocol.run.run_spec import RunSpec
from protocol.wire.messages import Wrote

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

log = structlog.get_logger()

TEMPERATURE = 0.7
"""As 'atoll sample' has it. The seed is the run's, so that texts of two rounds differ by their models."""

MOST_CHARACTERS = 4000
"""Of a text; the coordinator keeps fewer."""


class TextWriter:
    """Writes from the global parameters in shared memory."""

    def __init__(
        self, spec: RunSpec, names: SharedNames, places: DataPlaces, *, num_threads: int
    ) -> None:
        self._arguments = (spec, names, places, num_threads)

    async def write(self, on_copied: Callable[[], None]) -> Wrote:
        """A text for each prompt, or why there is none. The parameters may move after `on_copied`."""
        aside = Aside(_write, *self._arguments)
        try:
            await aside.answer()
            on_copied()
            texts: tuple[str, ...] = await aside.next_answer()
            return Wrote(texts=texts)
        except AtollError as error:
            log.warning("the model wrote nothing", why=error.what, next_step=error.next_step)
            return Wrote(why_not=error.what)
        finally:
            aside.close()


def _write(
    connection: "Connection[Any, Any]",
    spec: RunSpec,
    names: SharedNames,
    places: DataPlaces,
    num_threads: int,
) -> None:
    """The process: says that it has a copy of the parameters, then what it wrote."""
    import torch

    from node.island.models.generate import model_that_writes
    from node.models.text import text_of_run

    os.nice(10)  # ranks that compute on the same cores come first
    torch.set_num_threads(num_threads)
    text = text_of_run(spec, places)
    vectors = SharedVectors.attach(names)
    writes_on = model_that_writes(spec, vectors.parameters, base=places.base)
    connection.send(None)
    connection.send(
        tuple(
            text.text_of(
                writes_on(
                    text.tokens_of(prompt),
                    num_tokens=spec.evaluation.prompt_tokens,
                    temperature=TEMPERATURE,
                    seed=spec.run.seed,
                    ends=text.ends,
                )
            )[:MOST_CHARACTERS]
            for prompt in spec.evaluation.prompts
        )
    )
