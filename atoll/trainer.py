"""transformers.Trainer as an island: a callback that joins, steps and leaves.

trainer = Trainer(model, arguments, train_dataset=data, callbacks=[atoll.TrainerCallback()])
trainer.train()
"""

import atexit
import logging
import sys
from typing import Any

from transformers import TrainerCallback as Base
from transformers import TrainerControl, TrainerState, TrainingArguments

from atoll.errors import SwarmError
from atoll.swarm import Swarm, join

DEFAULT_SEED = 42
"""Of TrainingArguments."""

_log = logging.getLogger("atoll")


class TrainerCallback(Base):
    """Joins when training begins, counts each step of the optimizer, and leaves when training ends.

    `tokens_per_step` is what this process trains in a step of the optimizer; left out, it is taken from
    the arguments: samples of a step times `context` of the run. With `follows_learning_rate` the optimizer
    has the run's learning rate, in place of the trainer's schedule. What else is given goes to `atoll.join`.
    A run that is over stops the trainer. Its logs and checkpoints stay its own.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int | None = None,
        follows_learning_rate: bool = False,
        **join_arguments: Any,
    ) -> None:
        self._tokens_per_step = tokens_per_step
        self._follows_learning_rate = follows_learning_rate
        self._join_arguments = join_arguments
        self.swarm: Swarm | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Joins, which replaces the model's weights by the swarm's."""
        if args.load_best_model_at_end:
            raise SwarmError(
                "load_best_model_at_end would put old weights in the place of what this loop contributes",
                next_step="leave it out, and save the best checkpoint in atoll's evaluate=…, which sees the "
                "global parameters",
            )
        if args.seed == DEFAULT_SEED and args.data_seed in (None, DEFAULT_SEED):
            _log.warning(
                "the trainer shuffles by its default seed, %d: all nodes that do so train the same samples "
                "in the same order; give each node's TrainingArguments a seed of its own",
                DEFAULT_SEED,
            )
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        self.swarm = join(model, optimizer, **self._join_arguments)
        # An error, or Ctrl-C, ends the trainer without a word to its callbacks.
        atexit.register(self._leave_at_exit)
        if self._tokens_per_step is None:
            samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
            self._tokens_per_step = samples * max(1, args.n_gpu) * self.swarm.run.context
        self._follow(optimizer, kwargs.get("lr_scheduler"))

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Counts a step, and stops the trainer when the run is over."""
        assert self.swarm is not None
        # An evaluation has logged since, where the newest entry has no loss.
        logged = next(
            (told["loss"] for told in reversed(state.log_history) if "loss" in told), None
        )
        if self.swarm.step(tokens=self._tokens_per_step, loss=logged).is_over:
            control.should_training_stop = True
        else:
            self._follow(kwargs.get("optimizer"), kwargs.get("lr_scheduler"))

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Leaves with what was trained last."""
        if self.swarm is None:
            return
        atexit.unregister(self._leave_at_exit)
        if not self.swarm.is_over:
            _log.warning(
                "the trainer has ended after %d steps, and the run goes on: raise max_steps to stay to its "
                "end",
                state.global_step,
            )
        self.swarm.__exit__(None, None, None)

    def _follow(self, optimizer: Any, scheduler: Any) -> None:
        """Sets the run's rate: after the trainer's scheduler, which has set its own by now."""
        if not self._follows_learning_rate or self.swarm is None:
            return
        rate = self.swarm.learning_rate
        for group in optimizer.param_groups:
            group["lr"] = rate
        if scheduler is not None:
            scheduler._last_lr = [rate] * len(optimizer.param_groups)  # what the trainer logs

    def _leave_at_exit(self) -> None:
        """As the end of a `with` block: what was trained is contributed, unless an error has ended it."""
        assert self.swarm is not None
        error = getattr(sys, "last_value", None)
        self.swarm.__exit__(type(error) if error else None, error, None)
