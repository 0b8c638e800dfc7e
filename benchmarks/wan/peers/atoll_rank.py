"""Atoll's own ranks in the benchmark's pace: imported by the forkserver, so every rank has it.

Inner steps get their length, and global parameters are kept when they are adopted. Nothing else of
the rank changes.
"""

import os
from functools import wraps
from typing import Any

from benchmarks.wan.peers.order import ORDER_VARIABLE, Order, Teller
from benchmarks.wan.peers.pace import Pace
from node.island.training.trainer import Trainer
from node.outer_state import Vector


class Watch:
    """What the benchmark knows of this rank's trainer."""

    def __init__(self) -> None:
        order = Order.read(os.environ[ORDER_VARIABLE])
        self.teller = Teller(order)
        self.pace = Pace(order.step_seconds)
        self.num_adopted = 0
        self.is_evaluating = False

    def adopted(self, parameters: Vector) -> None:
        """Global parameters have come; those before the first inner step are the first weights."""
        if self.teller.has_begun and not self.is_evaluating:
            self.num_adopted += 1
            self.teller.save_if_due(
                lambda: parameters,
                exchanges=self.num_adopted,
                steps=self.pace.steps,
                late_steps=self.pace.late_steps,
            )


def watch_trainers() -> None:
    """Changes the class, in the process that ranks are forked from."""
    made, stepped = Trainer.__init__, Trainer._inner_step
    adopted, merged, evaluated = Trainer.adopt, Trainer.merge, Trainer.evaluate_at

    @wraps(made)
    def make(self: Any, **settings: Any) -> None:
        made(self, **settings)
        self.watch = Watch()
        (decoder,) = self._engine.parts
        self.watch.pace.attach(decoder.model.layers)

    @wraps(stepped)
    def step(self: Any, first_sample: int) -> Any:
        if not self.watch.teller.has_begun:
            self.watch.teller.begin()
        self.watch.pace.begin()
        result = stepped(self, first_sample)
        self.watch.pace.end()
        return result

    @wraps(adopted)
    def adopt(self: Any, parameters: Vector) -> None:
        adopted(self, parameters)
        self.watch.adopted(parameters)

    @wraps(merged)
    def merge(self: Any, parameters: Vector, *rest: Any, **more: Any) -> None:
        merged(self, parameters, *rest, **more)
        self.watch.adopted(parameters)

    @wraps(evaluated)
    def evaluate(self: Any, *arguments: Any) -> Any:
        self.watch.is_evaluating = True
        try:
            return evaluated(self, *arguments)
        finally:
            self.watch.is_evaluating = False

    # Through a name without a type: methods of a class are not meant to be replaced.
    watched: Any = Trainer
    watched.__init__, watched._inner_step, watched.evaluate_at = make, step, evaluate
    watched.adopt, watched.merge = adopt, merge


if ORDER_VARIABLE in os.environ:
    watch_trainers()
