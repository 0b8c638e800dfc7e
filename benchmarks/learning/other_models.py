"""What outer step models want that are no language models: held-out loss beside data parallelism.

    python -m benchmarks.learning.other_models [--seeds 0 1 2] [--steps 480] [--every 15] [--models digits]
        [--results docs/results/other-models.jsonl] [--report]

Two nodes train as loops of one's own do, by SGD with momentum or by AdamW, whose states they keep from round
to round. Means are of fp32, and the outer step is the node's own. Each draws for itself from one set of
data. What is in the file of results is not run again.

- digits: a residual network with batch norm tells digits of 8 x 8 pixels (examples/functions/vision.py).
- noise: a convolutional network finds the noise that was put on such digits, as in diffusion.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 — its usual name

from benchmarks.learning.intervals import in_per_cent
from benchmarks.measurement import (
    Rows,
    add_results,
    asked_by,
    markdown,
    parser_of,
    read_rows,
    run_missing,
)
from examples.functions import vision
from node.exchange.outer_optimizer import Nesterov
from node.outer_state import Vector

RESULTS = Path("docs/results/other-models.jsonl")
NUM_NODES, BATCH = 2, 16
STEPS, INTERVALS = 480, (2, 5, 15, 30)
OUTER = ((1.0, 0.0), (0.7, 0.3), (0.7, 0.6))
WARM_UP, FINAL = 0.05, 0.02
"""Parts of the run and of the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One run; without an interval it is data parallelism."""

    model: str
    optimizer: str
    interval: int = 0
    outer: tuple[float, float] = OUTER[0]  # rate and momentum of Nesterov's step
    steps: int = STEPS
    seed: int = 0


Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model with its loss, and data: inputs and what is to be told of them."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch, torch.Generator], Tensor]
    training: Batch
    held_out: Batch
    rates: dict[str, float]

    def drawn(self, count: int, draws: torch.Generator) -> Batch:
        """Some of the samples to train on."""
        inputs, targets = self.training
        chosen = torch.randint(len(inputs), (count,), generator=draws)
        return inputs[chosen], targets[chosen]


def _digits() -> tuple[Batch, Batch]:
    """Every third is held out."""
    images = torch.from_numpy(load_digits().images).float()[:, None] / 8 - 1  # [n, 1, 8, 8]
    numbers = torch.from_numpy(load_digits().target)
    is_held_out = torch.arange(len(images)) % 3 == 0
    return (images[~is_held_out], numbers[~is_held_out]), (
        images[is_held_out],
        numbers[is_held_out],
    )


def classified(module: nn.Module, batch: Batch, draws: torch.Generator) -> Tensor:
    """Nats a sample."""
    inputs, targets = batch
    return F.cross_entropy(module(inputs), targets)


class Denoiser(nn.Module):
    """The noise in images of one share of noise each."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.share = nn.Sequential(nn.Linear(8, channels), nn.SiLU(), nn.Linear(channels, channels))
        self.first = nn.Conv2d(1, channels, 3, padding=1)
        self.inner = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1)
            )
            for _ in range(3)
        )
        self.last = nn.Conv2d(channels, 1, 3, padding=1)

    def forward(self, images: Tensor, shares: Tensor) -> Tensor:
        """Of images [B, 1, 8, 8] and shares [B]."""
        waves = shares[:, None] * math.pi * 2 ** torch.arange(4)
        told = self.share(torch.cat((waves.sin(), waves.cos()), dim=1))[:, :, None, None]
        x = self.first(images)
        for block in self.inner:
            x = x + block(x + told)
        found: Tensor = self.last(F.silu(x))
        return found


def denoised(module: nn.Module, batch: Batch, draws: torch.Generator) -> Tensor:
    """Mean squared error of the noise (Ho et al. 2020, algorithm 1), by a cosine schedule."""
    images, _ = batch
    shares = torch.rand(len(images), generator=draws)
    noise = torch.randn(images.shape, generator=draws)
    angle = (shares * math.pi / 2)[:, None, None, None]
    found: Tensor = module(angle.cos() * images + angle.sin() * noise, shares)
    return (found - noise).square().mean()


@cache
def task_of(name: str) -> Task:
    """By its name; rates are about the best for data parallelism of two nodes."""
    training, held_out = _digits()
    is_noise = name == "noise"
    return Task(
        build=Denoiser if is_noise else lambda: vision.model(norm="batch")[0],
        loss=denoised if is_noise else classified,
        training=training,
        held_out=held_out,
        rates={"sgd": 0.15, "adamw": 6e-3} if is_noise else {"sgd": 0.02, "adamw": 3e-3},
    )


MODELS, OPTIMIZERS = ("digits", "noise"), ("sgd", "adamw")


def run(tried: Try) -> float:
    """The held-out loss at the end, in the model's own units."""
    task = task_of(tried.model)
    is_parallel = not tried.interval
    num_loops, batch = (1, NUM_NODES * BATCH) if is_parallel else (NUM_NODES, BATCH)
    loops = [Loop(task, tried, number) for number in range(num_loops)]
    state = np.ascontiguousarray(loops[0].parameters())
    momentum, outer = (
        np.zeros_like(state),
        Nesterov(learning_rate=tried.outer[0], momentum=tried.outer[1]),
    )
    for step in range(1, tried.steps + 1):
        for loop in loops:
            loop.step(batch, progress=step / tried.steps)
        if tried.interval and step % tried.interval == 0:
            moved = np.stack([state - loop.parameters() for loop in loops])  # [nodes, n]
            outer.apply(state, momentum, moved.mean(axis=0))
            for loop in loops:
                loop.take(state)
    return loops[0].evaluate()


class Loop:
    """A node's model and optimizer."""

    def __init__(self, task: Task, tried: Try, number: int) -> None:
        torch.manual_seed(tried.seed)
        self._task = task
        self._module = task.build()
        self._rate = task.rates[tried.optimizer]
        self._draws = torch.Generator().manual_seed(1000 * tried.seed + number)
        parameters = self._module.parameters()
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, momentum=0.9, weight_decay=1e-4)
            if tried.optimizer == "sgd"
            else torch.optim.AdamW(parameters, weight_decay=0.01)
        )

    def step(self, batch: int, *, progress: float) -> None:
        """One inner step by a cosine schedule."""
        share = FINAL + (1 - FINAL) * (1 + math.cos(math.pi * progress)) / 2
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * share * min(1, progress / WARM_UP)
        loss = self._task.loss(self._module, self._task.drawn(batch, self._draws), self._draws)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        self._optimizer.step()

    def parameters(self) -> Vector:
        """All of them, one after another."""
        return nn.utils.parameters_to_vector(self._module.parameters()).detach().numpy().copy()

    @torch.no_grad()
    def take(self, state: Vector) -> None:
        """Goes on from these."""
        nn.utils.vector_to_parameters(torch.from_numpy(state.copy()), self._module.parameters())

    @torch.no_grad()
    def evaluate(self) -> float:
        """With running statistics that are means over batches to train on, as loops' are."""
        norms = [each for each in self._module.modules() if isinstance(each, nn.BatchNorm2d)]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        draws = torch.Generator().manual_seed(0)
        if norms:
            for _ in range(64):
                self._module(self._task.drawn(BATCH, draws)[0])
        self._module.eval()
        losses = [
            self._task.loss(self._module, self._task.held_out, draws).item() for _ in range(8)
        ]
        return statistics.mean(losses)


def tries_of(model: str, steps: int, intervals: Sequence[int]) -> Iterator[Try]:
    """What is run of a model."""
    for optimizer in OPTIMIZERS:
        first = Try(model=model, optimizer=optimizer, steps=steps)
        yield first
        for interval, outer in itertools.product(intervals, OUTER):
            yield replace(first, interval=interval, outer=outer)


Losses = dict[Try, float]


def report(known: Losses, steps: int) -> Iterator[str]:
    """How much more loss than data parallelism of the same seed, by the outer step, of what was run."""
    rows: list[Sequence[object]] = []
    for model, optimizer, interval in itertools.product(MODELS, OPTIMIZERS, INTERVALS):
        first = Try(model=model, optimizer=optimizer, interval=interval, steps=steps)
        cells = [_above(known, replace(first, outer=outer)) for outer in OUTER]
        if any(cells):
            rows.append((f"{model}, {optimizer}", interval, steps // interval, *cells))
    names = ("plain mean", *(f"{rate:g}, {momentum:g}" for rate, momentum in OUTER[1:]))
    yield markdown(("model, optimizer", "every", "exchanges", *names), rows)


def _above(known: Losses, tried: Try) -> str:
    found = []
    for each, loss in known.items():
        ceiling = replace(each, interval=0, outer=OUTER[0])
        if replace(each, seed=tried.seed) == tried and ceiling in known:
            found.append(loss / known[ceiling] - 1)
    return in_per_cent(found)


def known_in(file: Path) -> Losses:
    """What was run already."""
    return {asked_by(Try, row): row["loss"] for row in read_rows(file)}


def main() -> None:
    """Runs what is missing, seed by seed, and prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--every", type=int, nargs="+", choices=INTERVALS, default=INTERVALS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--report", action="store_true", help="print what is there, run nothing")
    add_results(parser, RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known, results = known_in(options.results), Rows(options.results, is_printed=False)
    if not options.report:
        asked = itertools.chain.from_iterable(
            (replace(tried, seed=seed) for tried in tries_of(model, options.steps, options.every))
            for seed, model in itertools.product(options.seeds, options.models)
        )
        run_missing(asked, known, results, run)
    print("\n\n".join(report(known, options.steps)))


if __name__ == "__main__":
    main()
