"""transformers.Trainer as an island: a callback that joins, steps and leaves.

trainer = Trainer(model, arguments, train_dataset=data, callbacks=[atoll.TrainerCallback()])
trainer.train()
"""

from typing import Any

from transformers import TrainerCallback as Base
from transformers import TrainerControl, TrainerState, TrainingArguments

from atoll.swarm import Swarm, join


class TrainerCallback(Base):
    """Joins when training begins, counts each step of the optimizer, and leaves when training ends.

    `tokens_per_step` is what this process trains in a step of the optimizer; left out, it is taken from
    the arguments: samples of a step times `context` of the run. What else is given goes to `atoll.join`.
    A run that is over stops the trainer. Its schedule, logs and checkpoints stay its own.
    """

    def __init__(self, *, tokens_per_step: int | None = None, **join_arguments: Any) -> None:
        self._tokens_per_step = tokens_per_step
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
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        self.swarm = join(model, optimizer, **self._join_arguments)
        if self._tokens_per_step is None:
            samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
            self._tokens_per_step = samples * max(1, args.n_gpu) * self.swarm.run.context

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Counts a step, and stops the trainer when the run is over."""
        assert self.swarm is not None
        logged = state.log_history[-1].get("loss") if state.log_history else None
        if self.swarm.step(tokens=self._tokens_per_step, loss=logged).is_over:
            control.should_training_stop = True

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Leaves with what was trained last."""
        if self.swarm is not None:
            self.swarm.__exit__(None, None, None)
