"""A loop's optimizers: what they step, the weights that some keep in their state, and their modes.

The swarm moves a model's weights between two steps of its optimizer. One that keeps weights of its own (fp32
masters, Lookahead's slow ones, schedule-free's z, the point where Prodigy began) would pull the model back to
where they are. So what it keeps goes along, by as much as the weights are moved: for what follows it is as if
the loop had trained there from the start.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from atoll.errors import ModelMismatchError
from atoll.weights import Place, few_of_all, listed, local_of, tensors_of

NEAR = 0.5
"""How far a copy is from the weights at most when it is found, as a share of their norm."""

_OF_GRADIENTS = frozenset(
    {"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "grad_avg", "sum"}
    | {"acc_delta", "exp_inf", "prev", "step_size"}
)
"""What torch's optimizers call averages of gradients: no weights, however near them a toy problem is."""


class Optimizers:
    """Those that were given to `join`, and others that are seen to step the model."""

    def __init__(self, given: Any) -> None:
        several = isinstance(given, (list, tuple))
        self._given: list[Any] = list(given) if several else [] if given is None else [given]
        self._seen: WeakSet[torch.optim.Optimizer] = WeakSet()
        self.copies: set[str] = set()  # keys of states that hold copies of weights

    def check(self, model: nn.Module, places: Iterable[Place]) -> None:
        """Raises ModelMismatchError where those that were given leave out what the run trains.

        As one does that was made before the model was moved, wrapped or sharded, or before its parameters
        were replaced by others.
        """
        if not self._given:
            return
        stepped = {id(parameter) for parameter in self._stepped()}
        left_out = [
            (name, tuple(tensor.shape))
            for name, tensor in tensors_of(model, places).items()
            if isinstance(tensor, nn.Parameter) and id(tensor) not in stepped
        ]
        if left_out:
            raise ModelMismatchError(
                f"the optimizer does not step {listed(left_out)}",
                next_step="make it from model.parameters() after the model was moved, wrapped or sharded, "
                "and replace no parameter after that; of what is to rest for now give it all, and freeze it "
                "after join",
            )

    def stepped_besides(self, model: nn.Module) -> str:
        """What they step that is no part of the model, in words; empty where there is nothing."""
        own = {id(parameter) for parameter in model.parameters()}
        besides = [each for each in self._stepped() if id(each) not in own and each.requires_grad]
        return listed(("a parameter", tuple(each.shape)) for each in besides)

    def saw(self, optimizer: torch.optim.Optimizer) -> None:
        """One has stepped the model: also such as nobody gave, or made later."""
        self._seen.add(optimizer)

    def rates(self) -> list[float]:
        """Their learning rates, by their groups; without those that choose their own, as Adafactor may."""
        found = [_rate_of(group) for each in self._all() for group in each.param_groups]
        return [rate for rate in found if rate is not None]

    @property
    def are_given(self) -> bool:
        """Whether `join` was told of any."""
        return bool(self._given)

    def keep_any_of(self, weights: Iterable[Tensor]) -> bool:
        """Whether some state has values for each value of a weight, as moments are.

        Not one that has seen no step: Adagrad makes its own as it is made.
        """
        return any(
            isinstance(value, Tensor) and value.shape == weight.shape and value.ndim > 0
            for weight in weights
            for each in self._all()
            if isinstance(state := each.state.get(weight), Mapping) and not _is_new(state)
            for value in state.values()
        )

    def step_matrices_at(self, rate: float, weights: Iterable[Tensor]) -> bool:
        """Whether most of the matrices among the weights are stepped at this rate, and not by Muon."""
        stepped = {
            id(parameter)
            for each in self._all()
            if "muon" not in type(each).__name__.lower()
            for group in each.param_groups
            if math.isclose(_rate_of(group) or 0.0, rate, rel_tol=1e-6)
            for parameter in group["params"]
        }
        matrices = [id(tensor) for tensor in weights if tensor.ndim > 1]
        return 2 * len(stepped.intersection(matrices)) > len(matrices)

    def find_copies(self, weights: Iterable[Tensor]) -> set[str]:
        """Looks which keys of the states hold copies of the weights, and returns what is new.

        They are near them when they are made, and may be far later: what was found once stays found.
        """
        between: dict[str, tuple[float, float]] = {}  # squares of distances, and of weights
        others = set(_OF_GRADIENTS)
        for parameter in weights:
            here = few_of_all([parameter])
            for key, value in self._state_of(parameter):
                # A count of steps, which a scalar's state has in the scalar's shape, is one of others too.
                if value.shape != parameter.shape:
                    others.add(key)
                elif is_apart(value, parameter) and key not in self.copies:
                    away, size = between.get(key, (0.0, 0.0))
                    # Some keep them in memory of the CPU.
                    away += float((few_of_all([value]).to(here.device) - here).square().sum())
                    between[key] = away, size + float(here.square().sum())
        found = {key for key, (away, size) in between.items() if away < NEAR**2 * size} - others
        self.copies |= found
        return found

    def copies_of(self, parameter: Tensor) -> list[Tensor]:
        """The copies of a parameter that are kept."""
        return [
            value
            for key, value in self._state_of(parameter)
            if key in self.copies and is_apart(value, parameter)
        ]

    def forget_curvature(self) -> None:
        """Has LBFGS begin anew, where the swarm has moved the weights.

        It takes the gradients before and after for those of a step of its own, and would learn a curvature
        that there is not.
        """
        for each in self._all():
            if isinstance(each, torch.optim.LBFGS):
                for state in each.state.values():
                    state["n_iter"] = 0  # by which it tells its first step

    @property
    def have_modes(self) -> bool:
        """Whether some train with other weights than they evaluate with, as schedule-free ones do."""
        return any(_has_modes(each) for each in self._all())

    def evaluate(self) -> None:
        """Lets the model have the weights that are evaluated and kept, and so exchanged."""
        for each in self._all():
            if _has_modes(each):
                each.eval()

    def train(self) -> None:
        """Lets the model have the weights that are trained."""
        for each in self._all():
            if _has_modes(each):
                each.train()

    @property
    def given(self) -> list[Any]:
        """Those that `join` was told of, and what they wrap; each state once."""
        return _with_wrapped(self._given)

    def _all(self) -> list[Any]:
        """Given or seen, and what they wrap; each state once."""
        return _with_wrapped((*self._given, *self._seen))

    def _state_of(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        for each in self._all():
            state = each.state.get(parameter)
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if isinstance(value, Tensor):
                    yield str(key), value

    def _stepped(self) -> list[Tensor]:
        """Raises ModelMismatchError for what is no optimizer of torch."""
        found: list[Tensor] = []
        for each in self._given:
            if not hasattr(each, "param_groups"):
                raise ModelMismatchError(
                    f"join(model, optimizer) was given a value of type {type(each).__name__}, which has "
                    "no param_groups",
                    next_step="give an optimizer of torch, or a list of several",
                )
            found += [parameter for group in each.param_groups for parameter in group["params"]]
        return found


def _rate_of(group: Mapping[str, Any]) -> float | None:
    """A group's learning rate, which may be a tensor; None where it has none."""
    rate = group.get("lr")
    return None if rate is None else float(rate)


def _is_new(state: Mapping[Any, Any]) -> bool:
    """Whether it counts its steps, and has counted none."""
    steps = state.get("step")
    is_count = isinstance(steps, (int, float)) or (isinstance(steps, Tensor) and steps.numel() == 1)
    return is_count and not steps


def _with_wrapped(optimizers: Iterable[Any]) -> list[Any]:
    found: dict[int, Any] = {}
    for outer in optimizers:
        for each in (outer, *vars(outer).values()):
            if hasattr(each, "param_groups") and isinstance(
                state := getattr(each, "state", None), Mapping
            ):
                found.setdefault(id(state), each)
    return list(found.values())


def is_apart(value: Tensor, parameter: Tensor) -> bool:
    """Whether it could be a copy of it, and is not the parameter itself, as after `p.data = kept`."""
    return (
        value.is_floating_point()
        and value.layout is torch.strided
        and value.shape == parameter.shape
        and (kept := local_of(value)).shape == (own := local_of(parameter)).shape
        and kept.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()
    )


def _has_modes(optimizer: Any) -> bool:
    return callable(getattr(optimizer, "eval", None)) and callable(
        getattr(optimizer, "train", None)
    )
