"""The daemon's island of a training loop, and the loop's side of it in a thread of the same process."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import atoll
from atoll.connection import Connection
from node.island.data.places import DataPlaces
from node.island.island import InnerReport, InnerWork, Progress
from node.island.loops.island import LoopIsland
from node.island.loops.messages import VERSION
from node.island.models.decoder_modules import Decoder
from node.outer_state import SharedVectors
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec
from tests.islands.rank_scene import small_spec, with_texts

BATCH, CONTEXT = 4, 16
STEP_TOKENS = BATCH * CONTEXT


def work(round: int = 1, steps: int = 3, **changes: Any) -> InnerWork:
    values: dict[str, Any] = {
        "round": round,
        "inner_steps": steps,
        "first_sample": 100 * (round - 1),
        "num_samples": steps * BATCH,
        "token_clock": 0,
        "round_tokens": steps * STEP_TOKENS,
        "max_seconds": 60.0,
        "num_participants": 1,
    }
    return InnerWork(**(values | changes))


class Scene:
    """An island, and loops in threads; what the island is asked stands for the daemon."""

    def __init__(self, home: Path, spec: RunSpec, vectors: SharedVectors, **how: float) -> None:
        self.home = home
        self.spec = spec
        self.vectors = vectors
        self.island = LoopIsland(
            spec=spec,
            layout=layout_of(spec),
            names=vectors.names,
            home=home,
            data=DataPlaces(folder=home),
            **how,
        )
        self.progress: list[Progress] = []
        self.ended: list[Any] = []
        self.swarms: list[atoll.Swarm] = []

    def loop(self, train: Callable[[atoll.Swarm], Any], **how: Any) -> threading.Thread:
        """Joins with the run's model in a thread and calls `train`; `ended` has what came of it."""

        def run() -> None:
            model = how.pop("model", None) or Decoder(self.spec.decoder)
            try:
                with atoll.join(model, folder=self.home, wait_seconds=1.0, **how) as swarm:
                    self.ended.append(train(swarm))
            except Exception as error:
                self.ended.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    async def joined(self, train: Callable[[atoll.Swarm], Any], **how: Any) -> threading.Thread:
        """The same, and waits until the loop is here."""
        thread = self.loop(train, **how)
        await self.is_here()
        return thread

    async def stops(self, thread: threading.Thread) -> None:
        """The island stops, and with it the loop."""
        await self.island.stop()
        await ends(thread)

    async def train(self, asked: InnerWork) -> InnerReport:
        return await self.island.train(asked, self.progress.append)

    async def is_here(self) -> None:
        async with asyncio.timeout(20):
            while not self.island.ability.trains:  # noqa: ASYNC110 - it is in the product, not an event
                await asyncio.sleep(0.01)


def nudge(model: nn.Module) -> None:
    """The least that an optimizer's step does."""
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-3


async def ends(thread: threading.Thread) -> None:
    await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive()


@asynccontextmanager
async def scene(folder: Path, spec: RunSpec | None = None, **how: float) -> AsyncIterator[Scene]:
    spec = spec or small_spec()
    vectors = SharedVectors.create(layout_of(spec).num_elements)
    vectors.parameters[:] = 0.5
    made = Scene(with_texts(folder), spec, vectors, **how)
    await made.island.start()
    try:
        yield made
    finally:
        await made.island.stop()
        vectors.close()


def steps_on_samples(swarm: atoll.Swarm) -> list[tuple[atoll.Step, list[int]]]:
    taken = []
    for numbers in swarm.samples():
        taken.append((swarm.step(loss=1.0), numbers.tolist()))
    return taken


class Normed(nn.Module):
    """The run's decoder, and a norm beside it that the run does not train."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__()
        self.module = Decoder(spec.decoder)
        self.norm = nn.BatchNorm1d(1, affine=False)


def come_in_bare(
    one: Scene, version: int = VERSION, *, rank: int = 0, world_size: int = 1
) -> Connection:
    """A rank that only says that it is ready."""
    connection = Connection.open(one.home, wait_seconds=1.0)
    connection.say(
        {
            "kind": "hello",
            "version": version,
            "group": "bare",
            "rank": rank,
            "world_size": world_size,
            "evaluates": False,
        }
    )
    if version == VERSION:
        connection.hear()
        connection.say({"kind": "ready", "software": "", "evaluates_by": ""})
    return connection
