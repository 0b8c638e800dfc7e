"""Rules on what of a loop's model has changed since `join` or the last `step`.

Between those calls the model is the loop's own. So what it held then is compared with what it holds now, and
each difference has a ruling:

    what has changed                      by what                          ruling
    values of what the run trains         the optimizer                    trained: published
                                          what comes with most steps       trained: clipped, normalised
                                          what comes once, and goes far    refused: old weights are back
                                          nothing, in 24 inner steps       refused
                                          the first step, back to its own  refused: likewise
    its tensors, replaced by others       anything                         taken if the optimizer steps them
    its names and shapes                  anything                         refused (weights.py)
    its types, devices, requires_grad     anything                         taken
    what is trained besides               unfreezing, adding               refused
    frozen parameters, kept buffers       anything                         refused
    running statistics                    training                         computed anew for evaluation
    copies of the weights in its state    the optimizer                    moved along (optimizers.py)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from atoll.errors import ModelMismatchError
from atoll.frozen import frozen_of, persistent_buffers
from atoll.optimizers import Optimizers
from atoll.ranks import Ranks
from atoll.weights import (
    Place,
    bits_of,
    check_trains_no_more,
    few_of_all,
    local_of,
    reshard,
    tensors_of,
)

STILL_STEPS = 24
"""Inner steps that may leave a model as it was: a GradScaler's first ones, until its scale has come down."""

SAMPLED = 128
"""Tensors, at most, by a few values of which the weights are known again after each step."""

SUMMED_AT_A_LOOK = 1 << 26
"""Values that are read of what is frozen, at most but for the last parameter: a tenth of a second."""

MOST_OPTIMIZERS = 10
"""Of as many with equal parts of the model each is looked at; not of those that step in a backward pass."""

FAR = 4.0
"""Inner steps that lie between weights that are told apart: nearer ones say nothing."""

NEAR = 1 / 3
"""Share of the way to the adopted weights within which the first inner step brings the own ones back."""

MOST_TIMES = 2
"""Rounds one after another in which that may happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a tensor holds that may not change: a few of its values, and the sum of all their bits."""

    few: str  # as text: what is no number is not equal to itself
    bits: int

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Of what this rank holds."""
        return cls(few=_few(tensor), bits=bits_of(local_of(tensor)))


@dataclass(slots=True, kw_only=True)
class Adoption:
    """A few values of the weights before and after they were taken over, and a step later.

    An optimizer that keeps weights of its own where nobody finds them, and a loop that restores what it had
    put aside, bring their own weights back. What they contribute is the way from the global parameters to
    those, in each round anew, and the swarm's work never reaches them.
    """

    _own: Tensor | None = None
    _adopted: Tensor | None = None
    _first: Tensor | None = None
    _times: int = 0

    def took_over(self, own: Tensor, adopted: Tensor) -> None:
        """The values before and after; of several takings before a step those of the first and the last."""
        if self._own is None or self._first is not None:
            self._own, self._first = own, None
        self._adopted = adopted

    def took_a_step(self, values: Tensor) -> None:
        """The values after the first inner step since, and after the second.

        Raises ModelMismatchError. The second step tells how long one is: a single long step is no return.
        """
        if self._own is None or self._adopted is None:
            return
        if self._first is None:
            self._first = values
            return
        own, adopted, first = self._own, self._adopted, self._first
        self._own = self._adopted = self._first = None
        way, step = float((own - adopted).norm()), float((values - first).norm())
        is_back = 0 < FAR * step < way and float((first - own).norm()) < NEAR * way
        self._times = self._times + 1 if is_back else 0
        if self._times >= MOST_TIMES:
            raise ModelMismatchError(
                f"in {self._times} rounds one after another the first inner step has put this loop's own "
                "weights back over those taken over from the swarm",
                next_step="give an optimizer that keeps weights nowhere but in its state, if at all; "
                "and restore no average or checkpoint into the model that joined",
            )


class Watch:
    """What a loop's model held when it was last looked at, and the rulings on what has become of it."""

    def __init__(
        self,
        model: nn.Module,
        *,
        places: Sequence[Place],
        optimizers: Optimizers,
        ranks: Ranks,
        but_for: Iterable[str] = (),
    ) -> None:
        """`but_for` names buffers that training may change."""
        self._model = model
        self._places = places
        self._optimizers = optimizers
        self._ranks = ranks
        known = {id(tensor) for tensor in tensors_of(model, places).values()}
        self._buffers = {
            name: Kept.of(buffer)
            for name, buffer in persistent_buffers(model)
            if id(buffer) not in known and name not in but_for and not buffer.is_meta
        }
        self._frozen = {name: Kept.of(parameter) for name, parameter in frozen_of(model)}
        self._turn = 0
        self._adoption = Adoption()
        self._bits: list[int] = []  # of the weights as the loop was given them
        self._still_steps = 0  # one after another, of earlier orders, that have changed nothing
        self.has_moved = False  # a step has changed the weights since the loop came in
        # What follows is of a few values of some weights.
        self._sample = self._sampled()
        self._held: Tensor | None = (
            None  # as they were given to the loop, or an optimizer left them
        )
        self._found: Tensor | None = None  # as the optimizer that is at work found them
        self._at_work = 0  # optimizers, one within another
        self._steps = 0  # of this round
        self._by_optimizers: Tensor | float = 0.0  # the furthest that a step has moved them …
        self._by_others: Tensor | float = 0.0  # … and anything else …
        self._times_by_others: Tensor | int = 0  # … and how often
        self._taken_over: float | None = None  # how far the last adoption but the first has
        self._handles = (
            register_optimizer_step_pre_hook(self._enters),
            register_optimizer_step_post_hook(self._leaves),
        )

    def close(self) -> None:
        """Optimizers of this process are no longer watched."""
        for handle in self._handles:
            handle.remove()

    # A round, in the order of what happens

    def given(self, bits: list[int], own: Tensor | None) -> None:
        """The loop has the weights from now on; `own` are values that were replaced, if they were."""
        self._sample = self._sampled()
        self._held = self.values()
        self._bits = bits
        self._at_work, self._steps, self._times_by_others = 0, 0, 0
        self._by_optimizers = self._by_others = 0.0
        if own is not None and len(own) == len(self._held):
            self._adoption.took_over(own, self._held)
            way = float((own - self._held).norm())
            # What was here at first is nothing that the loop has trained.
            self._taken_over = 0.0 if self._taken_over is None else way

    def took_a_step(self, *, is_first: bool) -> None:
        """After an inner step. Raises ModelMismatchError for what may not have changed."""
        values = self.values()
        self._moved_by_others(values)
        self._at_work = 0
        self._steps += 1
        self._adoption.took_a_step(values)
        if is_first:
            self.look()

    def look(self) -> None:
        """Compares what the run does not train, and what the optimizer steps. Raises ModelMismatchError."""
        reshard(self._model)
        check_trains_no_more(self._model, self._places)
        self._optimizers.check(self._model, self._places)
        self._optimizers.find_copies(tensors_of(self._model, self._places).values())
        self._look_at_buffers()
        self._look_at_frozen()

    def ends(self, steps: int, bits: Callable[[], list[int]]) -> None:
        """Before what a round has trained is published. Raises ModelMismatchError where that is nothing."""
        if self._ranks.said_by_any(float(self.was_moved)):
            raise self.refusal()
        self.is_still(steps, bits, is_last=True)

    def is_still(self, steps: int, bits: Callable[[], list[int]], *, is_last: bool) -> None:
        """Raises ModelMismatchError where too many inner steps have changed nothing.

        A loop that trains another copy would contribute zeros, and with the weight of its tokens. It is
        looked for at a round's end, and once before, until a step has changed something.
        """
        steps += self._still_steps
        if not is_last and (self.has_moved or steps != STILL_STEPS):
            return
        is_moved = self._ranks.said_by_any(float(bits() != self._bits))
        self.has_moved |= is_moved
        if is_last:
            self._still_steps = 0 if is_moved else steps
        if not is_moved and steps >= STILL_STEPS:
            raise ModelMismatchError(
                f"{steps} inner steps have changed nothing of the model that joined",
                next_step="call step() after the optimizer's, and let it step this very model's parameters: "
                "no copy of it, and a learning rate above 0",
            )

    # What moves the weights

    def _sampled(self) -> list[Tensor]:
        reshard(self._model)
        tensors = list(tensors_of(self._model, self._places).values())
        return tensors[:: len(tensors) // SAMPLED + 1]

    @torch.no_grad()
    def values(self) -> Tensor:
        """A few values of some weights, by which they are known again."""
        return few_of_all(self._sample)

    @property
    def was_moved(self) -> bool:
        """Whether anything but an optimizer has moved the weights in this round, once, and far.

        What moves them at most steps is a part of training. What brings them back into bounds now and then
        moves them less than what has taken them out.
        """
        by_optimizers, by_others = float(self._by_optimizers), float(self._by_others)
        most = max(FAR * by_optimizers, self._taken_over or 0.0)
        is_rare = 2 * int(self._times_by_others) < self._steps
        return is_rare and by_optimizers > 0 and most < by_others

    def refusal(self) -> ModelMismatchError:
        """What to say then."""
        times = float(self._by_others) / max(float(self._by_optimizers), 1e-30)
        return ModelMismatchError(
            f"something beside the optimizer has moved the weights {times:.3g} times as far as its longest "
            "step of this round, and further than the swarm has: as a checkpoint does that is loaded after "
            "join, or an average that is left in the model",
            next_step="load before join, which takes the global parameters over, and put back what you swap "
            "in for an evaluation",
        )

    def _enters(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_ours(optimizer):
            self._at_work += 1
            if self._at_work == 1:
                self._found = self.values()
                self._moved_by_others(self._found)

    def _leaves(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_ours(optimizer) and self._at_work:
            self._at_work -= 1
            if self._at_work == 0 and self._found is not None:
                self._held = self.values()
                way = (self._held - self._found).norm()
                self._by_optimizers = torch.maximum(
                    way, torch.as_tensor(self._by_optimizers).to(way)
                )
                self._optimizers.saw(optimizer)

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it steps much of the model: to look before and after each of hundreds costs too much."""
        if torch.compiler.is_compiling():  # what is compiled runs without
            return False
        own = {id(tensor) for tensor in self._sample}
        stepped = sum(id(p) in own for group in optimizer.param_groups for p in group["params"])
        return MOST_OPTIMIZERS * stepped >= len(own) > 0

    def _moved_by_others(self, values: Tensor) -> None:
        if self._held is not None and len(values) == len(self._held):
            way = (values - self._held).norm()
            self._by_others = torch.maximum(way, torch.as_tensor(self._by_others).to(way))
            self._times_by_others = self._times_by_others + (way > 0)
        self._held = values

    # What may not change

    def _look_at_buffers(self) -> None:
        now = dict(persistent_buffers(self._model))
        for name, kept in self._buffers.items():
            # By its values: codebooks write to `.data`, of which torch's counter of changes knows nothing,
            # and copies of a model write the same into each other's (DistributedDataParallel).
            if name not in now or Kept.of(now[name]) == kept:
                continue
            owner = type(self._model.get_submodule(name.rpartition(".")[0])).__name__
            raise ModelMismatchError(
                f"training changes the buffer {name} of a {owner}, and buffers are not exchanged: each node "
                "would go on with its own",
                next_step="make it a parameter that the run trains, or register it with persistent=False "
                "where nodes may differ in it",
            )

    def _look_at_frozen(self) -> None:
        """A few values of each, and all of some: in turns, for bits of a billion values take a second."""
        now = [(name, each) for name, each in frozen_of(self._model) if name in self._frozen]
        left = SUMMED_AT_A_LOOK
        changed = [name for name, each in now if self._frozen[name].few != _few(each)]
        for _ in now if not changed else ():
            name, each = now[self._turn % len(now)]
            if Kept.of(each) != self._frozen[name]:
                changed.append(name)
            self._turn += 1
            if (left := left - each.numel()) <= 0:
                break
        if changed:
            raise ModelMismatchError(
                f"the loop changes {changed[0]}, which is frozen and not exchanged: each node would go on "
                "with its own",
                next_step="let the run train it, or keep it in a module beside the one that joins where "
                "nodes may differ in it, as in averages of weights",
            )


def _few(tensor: Tensor) -> str:
    return str(few_of_all([tensor]).tolist())
