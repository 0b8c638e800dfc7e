"""Rules on what of a loop's model has changed since `join` or the last `step`.

Between those calls the model is the loop's own. So what it held then is compared with what it holds now, and
each difference has a ruling:

    what has changed                      by what                          ruling
    values of what the run trains         the optimizer                    trained: published
                                          what comes with most steps       trained: clipped, normalised
                                          what comes once, and goes far    refused: old weights are back
                                          nothing, in 24 inner steps       refused
                                          a step, back to the loop's own   refused: likewise
    its tensors, replaced by others       anything                         taken if the optimizer steps them
    its names and shapes                  anything                         refused (weights.py)
    its types, devices, requires_grad     anything                         taken
    what is trained besides               unfreezing, adding               refused
    frozen parameters, kept buffers       anything                         refused
    running statistics, spectral vectors  training                         computed anew for evaluation
    copies of the weights in its state    the optimizer                    moved along (optimizers.py)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from atoll.errors import ModelMismatchError
from atoll.frozen import frozen_of, persistent_buffers
from atoll.moves import Adoption, Moves
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

Bits = dict[str, tuple[int, ...]]
"""Of the tensors of a model, by their names in the run."""

STILL_STEPS = 24
"""Inner steps that may leave a model as it was: a GradScaler's first ones, until its scale has come down."""

SAMPLED = 128
"""Tensors, at most, by a few values of which the weights are known again after each step."""

SUMMED_AT_A_LOOK = 1 << 26
"""Values that are read of what is frozen, at most but for the last parameter: a tenth of a second."""

MOST_OPTIMIZERS = 10
"""Of as many with equal parts of the model each is looked at; not of those that step in a backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a tensor holds that may not change: a few of its values, and the sum of all their bits."""

    few: str  # as text: what is no number is not equal to itself
    bits: int

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Of what this rank holds."""
        return cls(few=_few(tensor), bits=bits_of(local_of(tensor)))


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
        reshard(model)
        known = {id(tensor) for tensor in tensors_of(model, places).values()}
        self._buffers = {
            name: Kept.of(buffer)
            for name, buffer in persistent_buffers(model)
            if id(buffer) not in known and name not in but_for and not buffer.is_meta
        }
        self._frozen = {name: Kept.of(parameter) for name, parameter in frozen_of(model)}
        self._turn = 0
        self._adoption = Adoption()
        self._bits: Bits = {}  # of the weights as the loop was given them
        self._still_steps = 0  # one after another, of earlier orders, that have changed nothing …
        self._still: dict[str, int] = {}  # … of these tensors, while others have changed
        # Steps that told tokens: others, as where all rewards are equal, may change nothing.
        self._told_steps = 0  # in this order
        self._still_told_steps = 0  # in earlier ones that have changed nothing
        self._told: set[str] = set()  # advice
        self.has_moved = False  # a step has changed the weights since the loop came in
        self._sample = self._sampled()
        self._moves = Moves(held=self.values())
        self._rates: list[float] = []  # when the loop was given its weights
        self._at_work = 0  # optimizers, one within another
        self._gradient: Tensor | None = None  # of the last step, where all that is sampled has one
        # The largest since steps last changed something; None: no optimizer's step had one.
        self._largest_gradient: Tensor | None = None
        self._taken_over: float | None = None  # the way of the last adoption; of the first one 0
        self._handles = [register_optimizer_step_pre_hook(self._enters)]
        self._known: WeakSet[torch.optim.Optimizer] = WeakSet()  # whose steps' ends are seen

    def close(self) -> None:
        """Optimizers of this process are no longer watched."""
        for handle in self._handles:
            handle.remove()

    # A round, in the order of what happens

    def given(self, bits: Bits, own: Tensor | None) -> None:
        """The loop has the weights from now on; `own` are values that were replaced, if they were."""
        self._sample = self._sampled()
        now = self.values()
        self._moves = Moves(held=now)
        self._rates = self._optimizers.rates()
        self._bits = bits
        self._at_work = 0
        self._told_steps = 0
        if own is not None and len(own) == len(now):
            self._adoption.took_over(own, now)
            way = float((own - now).norm())
            # What was here at first is nothing that the loop has trained.
            self._taken_over = 0.0 if self._taken_over is None else way

    def took_a_step(self, *, is_first: bool, counts: bool) -> None:
        """After an inner step, which has told tokens if it `counts`.

        Raises ModelMismatchError for what may not have changed.
        """
        self._at_work = 0
        self._told_steps += counts
        self._moves.came_to(self.values(), by_optimizer=False)
        self._moves.steps += 1
        self._adoption.took_a_step(self._moves.held, self._gradient)
        self._gradient = None
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

    def ends(self, steps: int, bits: Callable[[], Bits]) -> None:
        """Before what a round has trained is published. Raises ModelMismatchError where that is nothing."""
        if self._ranks.said_by_any(float(self._went_astray)):
            raise self._moves.refusal()
        if self._ranks.said_by_any(float(self._adoption.is_undone())):
            raise self._adoption.refusal()
        self.is_still(steps, bits, is_last=True)

    def ends_alone(self) -> None:
        """The same as the loop leaves, without the other ranks: they may be gone."""
        self._moves.came_to(self.values(), by_optimizer=False)
        if self._went_astray:
            raise self._moves.refusal()

    def advice(self, *, follows: bool) -> list[str]:
        """What to tell of a round that does no harm, and less good than it could; each but once.

        `follows`: whether the loop asks how far the run is.
        """
        found = {}
        rates = self._optimizers.rates()
        if not follows and len(rates) == len(self._rates) and rates != self._rates:
            found["rates"] = (
                "the learning rate changes by a schedule of this loop's own. By its steps it ends too early "
                "or too late, for plans say how many come; by its losses, as ReduceLROnPlateau, it falls at "
                "another time on each node; and on a node that joins late it begins anew. Let it follow "
                "swarm.progress, or take swarm.learning_rate over, as "
                "TrainerCallback(follows_learning_rate=True) does"
            )
        taken, steps = self._moves.optimizer_steps, self._told_steps
        if 0 < 3 * taken <= 2 * steps:  # of micro-batches a half, at most
            found["step"] = (
                f"the optimizer has taken {taken} steps in {steps} calls of step(): call it once for each, "
                "with the tokens of all its micro-batches, unless a GradScaler has skipped the others"
            )
        nothing = self._largest_gradient is not None and not self._largest_gradient
        if nothing and self._still_told_steps >= STILL_STEPS:
            found["zero"] = (
                f"{self._still_told_steps} inner steps had gradients of nothing but zeros, as where all "
                "rewards are equal: tell such steps as step(tokens=0), else they hold back what others train"
            )
        still = [(name, steps) for name, steps in self._still.items() if steps >= STILL_STEPS]
        if still and not found.get("zero"):
            name, steps = still[0]
            more = f" and {len(still) - 1} more" if len(still) > 1 else ""
            found["still"] = (
                f"{steps} inner steps have changed nothing of {name}{more}, which the run trains: where this "
                "loop trains nothing, it holds back what others train. See whether it is frozen, no "
                "optimizer steps it, or nothing comes to it, as to an expert that no router picks"
            )
        new = found.keys() - self._told
        self._told |= new
        return [found[each] for each in sorted(new)]

    def is_still(self, steps: int, bits: Callable[[], Bits], *, is_last: bool) -> None:
        """Raises ModelMismatchError where too many inner steps have changed nothing.

        A loop that trains another copy would contribute zeros, and with the weight of its tokens. It is
        looked for at a round's end, and once before, until a step has changed something.
        """
        steps += self._still_steps
        told_steps = self._told_steps + self._still_told_steps
        if not is_last and (self.has_moved or steps != STILL_STEPS):
            return
        now = bits()
        is_moved = self._ranks.said_by_any(float(now != self._bits))
        self.has_moved |= is_moved
        if is_last:
            self._still_steps = 0 if is_moved else steps
            self._still_told_steps = 0 if is_moved else told_steps
            same = [name for name, own in now.items() if own == self._bits.get(name)]
            self._still = {name: self._still.get(name, 0) + self._told_steps for name in same}
        if is_last and is_moved:
            self._largest_gradient = None
        # Without a gradient there is nothing to learn, as of samples whose rewards are all equal.
        learns = told_steps >= STILL_STEPS and (
            self._largest_gradient is None or bool(self._largest_gradient != 0)
        )
        if not is_moved and steps >= STILL_STEPS and self._ranks.said_by_any(float(learns)):
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
    def _went_astray(self) -> bool:
        return self._moves.went_astray(self._taken_over or 0.0)

    def _enters(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_ours(optimizer):
            self._see_ends_of(optimizer)
            self._at_work += 1
            if self._at_work == 1:
                self._moves.came_to(self.values(), by_optimizer=False)

    def _see_ends_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Before what hooks of its own do to the weights then, as clipping them, which is no step of it.

        One of all optimizers would come after those.
        """
        if optimizer not in self._known:
            self._known.add(optimizer)
            handle = optimizer.register_step_post_hook(self._leaves)
            hooks: Any = optimizer._optimizer_step_post_hooks  # ordered, as all of torch's
            hooks.move_to_end(handle.id, last=False)
            self._handles.append(handle)

    def _leaves(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_ours(optimizer) and self._at_work:
            self._at_work -= 1
            if self._at_work == 0:
                self._moves.came_to(self.values(), by_optimizer=True)
                gradients = [each.grad for each in self._sample if each.grad is not None]
                self._gradient = few_of_all(gradients)
                if len(self._gradient):
                    largest, before = self._gradient.abs().max(), self._largest_gradient
                    self._largest_gradient = largest if before is None else largest.max(before)
                self._optimizers.saw(optimizer)

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it steps much of the model: to look before and after each of hundreds costs too much."""
        if torch.compiler.is_compiling():  # what is compiled runs without
            return False
        own = {id(tensor) for tensor in self._sample}
        stepped = sum(id(p) in own for group in optimizer.param_groups for p in group["params"])
        return MOST_OPTIMIZERS * stepped >= len(own) > 0

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
