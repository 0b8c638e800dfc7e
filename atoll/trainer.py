"""transformers.Trainer as an island: a callback that joins, steps and leaves.

trainer = Trainer(model, arguments, train_dataset=data, callbacks=[atoll.TrainerCallback()])
trainer.train()
"""

import atexit
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback as Base
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from atoll.connection import find_folder
from atoll.errors import SwarmError
from atoll.swarm import Swarm, join

DEFAULT_SEED = 42
"""Of TrainingArguments."""

TELL_TOKENS = (
    "give TrainerCallback tokens_per_step=…, what this process trains in a step of the optimizer"
)

LABELS = ("shift_labels", "labels")
"""Of what a model is given, the targets: the first that is there counts."""

IGNORED = -100
"""The label of what a loss of transformers leaves out, as padding and prompts."""

SHIFTED_LOSSES = ("ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration")
"""The `loss_type` of models whose loss is the ForCausalLMLoss of transformers."""

_log = logging.getLogger("atoll")

_joined: dict[Path, "TrainerCallback"] = {}
"""Those of this process that have not left, by their nodes' folders."""


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's loss compares a position with the label of the next one: the first is no target."""
    get_base = getattr(model, "get_base_model", None)  # of peft
    bare = model if get_base is None else get_base()
    is_causal = (
        getattr(bare, "loss_type", None) in SHIFTED_LOSSES
        or type(bare).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    )
    return is_causal and not getattr(getattr(bare, "config", None), "is_encoder_decoder", False)


def targets_of(inputs: Mapping[str, Any], *, context: int, is_shifted: bool) -> int | Tensor:
    """Targets that a forward pass trains, as what it is given tells them; samples where a sample has one.

    Those are the labels but for the ignored ones. Without labels they are what the attention mask lets
    through, or whole samples of the run's context. Raises SwarmError where the inputs tell nothing.
    """
    rows = next((len(v) for v in inputs.values() if isinstance(v, Tensor) and v.dim()), None)
    mask = inputs.get("attention_mask")
    for name in LABELS:
        labels = inputs.get(name)
        if not isinstance(labels, Tensor) or not labels.dim():
            continue
        if context == 1 and labels.dim() > 1:
            return len(labels)
        is_cut = is_shifted and name == "labels" and labels.dim() > 1
        return (labels[..., 1:] if is_cut else labels).ne(IGNORED).sum()
    if context > 1 and isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.ne(0).sum()
    if rows is None:
        raise SwarmError(
            f"what the model is given tells no number of samples: {', '.join(inputs) or 'nothing by name'}",
            next_step=TELL_TOKENS,
        )
    return rows * context


def loss_in(outputs: Any) -> Tensor | None:
    """The loss that a model has returned, where it has one."""
    of_name = (
        outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    )
    found = outputs[0] if of_name is None and isinstance(outputs, tuple) and outputs else of_name
    return found if isinstance(found, Tensor) and found.numel() == 1 else None


class SeenCount(Tensor):
    """What a model is given as `num_items_in_batch`: it remembers whether its loss has looked at it.

    A trainer gives it to each model that takes further arguments, and many of those pass over it.
    """

    is_used = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in (*args, *(kwargs or {}).values()):
            if isinstance(each, SeenCount):
                each.is_used = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


def share_of(told: int | Tensor, *, rank: int, sharers: int) -> int | Tensor:
    """What one of the processes counts of what the trainer has counted over all; together they tell all."""
    total = told.reshape(-1)[0] if isinstance(told, Tensor) else told
    return (total + sharers - 1 - rank) // sharers


class TrainerCallback(Base):
    """Joins when training begins, counts each step of the optimizer, and leaves when training ends.

    `tokens_per_step` is what this process trains in a step of the optimizer; left out, the targets are
    counted in what the model is given (`targets_of`), over the micro-batches of the step. With
    `follows_learning_rate` the optimizer has the run's learning rate, in place of the trainer's schedule.
    What else is given goes to `atoll.join`. A run that is over stops the trainer. Its logs and checkpoints
    stay its own.
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
        # Of the step's forward passes, maybe of several threads.
        self._counts: list[int | Tensor] = []
        self._step_count: int | Tensor | None = None  # of all of them, where the trainer tells it
        self._losses: list[Tensor] = []  # of the same forward passes …
        self._sharers = (
            0  # … which are parts of a sum that so many processes share; 0: each is a mean
        )
        self._has_warned = False
        self._has_warned_of_sums = False
        self._hooks: list[Any] = []
        self._folder = Path()
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
        # An error, or Ctrl-C, ends a trainer without a word to its callbacks: its process may end with it,
        # or train again, as a cell of a notebook and `auto_find_batch_size` do.
        folder = find_folder(self._join_arguments.get("folder")).absolute()
        if (before := _joined.get(folder)) is not None:
            before._leave_unheard()
        self.swarm = join(model, optimizer, **self._join_arguments)
        self._folder = folder
        _joined[folder] = self
        atexit.register(self._leave_unheard)
        if self._tokens_per_step is None:
            self._count_in(model, self.swarm.run.context, args)
        self._hear_losses_of(model, args)
        self._follow(optimizer, kwargs.get("lr_scheduler"))

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Counts anew: what went through the model since the step before trained nothing."""
        self._counts.clear()
        self._losses.clear()
        self._step_count = None

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Counts a step, and stops the trainer when the run is over."""
        assert self.swarm is not None
        loss = self._loss_of_step(state)
        if self.swarm.step(tokens=self._tokens_of_step(), loss=loss).is_over:
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
        self._let_go()
        self.swarm.__exit__(None, None, None)

    def _count_in(self, model: nn.Module, context: int, how: TrainingArguments) -> None:
        """Has each forward pass of training counted: the trainer shows its callbacks no batch.

        Where its loss is not the model's own, as with label smoothing, it keeps the labels from the model. It
        has counted them then for the whole step, and passes that figure on to models that take it.
        """
        is_shifted = shifts_labels(model)
        sharers = how.world_size if how.average_tokens_across_devices else 1

        def count(module: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
            if not (module.training and torch.is_grad_enabled()):
                return
            told = inputs.get("num_items_in_batch")
            has_labels = any(isinstance(inputs.get(name), Tensor) for name in LABELS)
            if context > 1 and not has_labels and told is not None:
                self._step_count = share_of(told, rank=how.process_index, sharers=sharers)
                return
            if context > 1 and not has_labels and not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "the model is given no labels, so all that the attention mask lets through counts, "
                    "prompts too; if your loss masks some of it, %s",
                    TELL_TOKENS,
                )
            self._counts.append(targets_of(inputs, context=context, is_shifted=is_shifted))

        self._hooks.append(model.register_forward_pre_hook(count, with_kwargs=True))

    def _hear_losses_of(self, model: nn.Module, how: TrainingArguments) -> None:
        """Keeps the losses that the model returns: what the trainer logs is of some steps, and earlier.

        Only those that a backward pass goes through: a trainer with a loss of its own, as trl's GRPO, may
        give the model labels all the same, and its loss is not what is trained then.
        """
        sharers = how.world_size if how.average_tokens_across_devices else 1
        times = sharers * how.gradient_accumulation_steps

        def show_count(module: nn.Module, args: Any, inputs: dict[str, Any]) -> Any:
            told = inputs.get("num_items_in_batch")
            is_trained = module.training and torch.is_grad_enabled()
            if not is_trained or not isinstance(told, Tensor) or torch.compiler.is_compiling():
                return None
            return args, {**inputs, "num_items_in_batch": told.as_subclass(SeenCount)}

        def hear(module: nn.Module, args: Any, inputs: dict[str, Any], outputs: Any) -> None:
            if (
                module.training
                and torch.is_grad_enabled()
                and (loss := loss_in(outputs)) is not None
            ):
                kept = loss.detach()
                told = inputs.get("num_items_in_batch")
                is_mean = told is None or (isinstance(told, SeenCount) and not told.is_used)

                def is_trained(_: Tensor) -> None:
                    self._losses.append(kept)
                    if is_mean and told is not None and times > 1:
                        self._warn_of_sums(type(module).__name__, times)

                if torch.compiler.is_compiling():  # what is compiled takes no hook
                    self._losses.append(kept)
                elif loss.requires_grad:
                    loss.register_hook(is_trained)  # type: ignore[no-untyped-call]  # torch gives it none
                self._sharers = 0 if is_mean else sharers

        self._hooks.append(model.register_forward_pre_hook(show_count, with_kwargs=True))
        self._hooks.append(model.register_forward_hook(hear, with_kwargs=True))

    def _warn_of_sums(self, model: str, times: int) -> None:
        if not self._has_warned_of_sums:
            self._has_warned_of_sums = True
            _log.warning(
                "the loss of %s is a mean of each micro-batch, and the trainer takes it for a part of one: "
                "the gradients, and the loss that the trainer logs, are %d times too large. Set "
                "trainer.model_accepts_loss_kwargs = False before it trains",
                model,
                times,
            )

    def _loss_of_step(self, state: TrainerState) -> float | Tensor | None:
        if not self._losses:
            # An evaluation has logged since, where the newest entry has no loss.
            return next(
                (told["loss"] for told in reversed(state.log_history) if "loss" in told), None
            )
        first, *others = self._losses
        total = first.float() + sum(loss.to(first.device).float() for loss in others)
        return total * self._sharers if self._sharers else total / len(self._losses)

    def _tokens_of_step(self) -> int:
        if self._tokens_per_step is not None:
            return self._tokens_per_step
        if self._step_count is not None:
            return int(self._step_count)
        if not self._counts:
            raise SwarmError(
                "a step of the optimizer came without a forward pass of the model that joined, so what it "
                "has trained is not known",
                next_step=TELL_TOKENS,
            )
        return sum(int(count) for count in self._counts)

    def _follow(self, optimizer: Any, scheduler: Any) -> None:
        """Sets the run's rate: after the trainer's scheduler, which has set its own by now."""
        if not self._follows_learning_rate or self.swarm is None:
            return
        rate = self.swarm.learning_rate
        for group in optimizer.param_groups:
            group["lr"] = rate
        if scheduler is not None:
            scheduler._last_lr = [rate] * len(optimizer.param_groups)  # what the trainer logs

    def _let_go(self) -> None:
        atexit.unregister(self._leave_unheard)
        _joined.pop(self._folder, None)
        for hook in self._hooks:
            hook.remove()

    def _leave_unheard(self) -> None:
        """As the end of a `with` block: what was trained is contributed, unless an error has ended it."""
        assert self.swarm is not None
        self._let_go()
        error = getattr(sys, "last_value", None)
        self.swarm.__exit__(type(error) if error else None, error, None)
