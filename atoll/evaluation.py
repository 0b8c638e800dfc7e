"""Measures the held-out loss of the global parameters, by a loop's own function."""

import gc
import hashlib
import inspect
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from atoll.draws import drawing_alike
from atoll.errors import ModelMismatchError, SwarmError
from atoll.optimizers import Optimizers, is_apart
from atoll.running_statistics import RunningStatistics
from atoll.weights import Place, Weights, few_of_all, tensors_of

Evaluate = Callable[[], float | tuple[float, int] | tuple[float, int, float]]

SAME = 2**-6
"""How far weights may be from what they were after an optimizer has changed its mode and back, as a share."""


def evaluated(
    evaluate: Evaluate,
    *,
    model: nn.Module,
    weights: Weights,
    statistics: RunningStatistics,
    optimizers: Optimizers,
    values: Callable[[], Tensor],
) -> tuple[float, int, float | None]:
    """The loss of the global parameters, on how many tokens it was measured, and a figure beside it.

    The loop's own weights stay, and so do the modes of its modules and what it draws at random next: a
    function that calls `eval()` need not undo it. `values` are a few of some weights, for each pass. Raises
    SwarmError for what is no loss, and ModelMismatchError for one of other weights.
    """
    own = weights.aside()
    modes = [(module, module.training) for module in model.modules()]
    weights.show_global()
    share = optimizers.have_modes * SAME

    def differ(found: Tensor, shown: Tensor) -> bool:
        return float((found - shown).norm()) > share * float(shown.norm())

    all_shown, some_shown = weights.few(), values()

    def is_other(copy: nn.Module) -> bool:
        found = weights.few(copy).to(all_shown.device)
        # One of another type is made of these weights for the evaluation, and rounded.
        is_rounded = weights.types_of(copy) != weights.types_of(model)
        most = (SAME if is_rounded else share) * float(all_shown.norm())
        return float((found - all_shown).norm()) > most

    look = _Look(lambda: differ(values(), some_shown))
    wrappers, copies = kin_of(model, weights.places)
    at_copies = {copy: _Look(partial(is_other, copy)) for copy in copies}
    looks = dict.fromkeys((model, *wrappers), look) | at_copies
    handles = [module.register_forward_pre_hook(each) for module, each in looks.items()]
    try:
        with statistics.of_these_weights(), drawing_alike(model):
            found = evaluate()
        optimizers.evaluate()
        has_changed = differ(weights.few(), all_shown)
    finally:
        for handle in handles:
            handle.remove()
        weights.put_back(own)
        for module, is_training in modes:
            module.training = is_training
    result = _evaluation_of(found)
    if has_changed:
        raise ModelMismatchError(
            "the function given as evaluate=… has left other weights in the model than it found there",
            next_step="let it measure those, and put back what it changes; an RWKV of transformers does "
            "with rescale_every = 0 in its config",
        )
    is_of_a_copy = not look.has_looked and any(one.has_seen_others for one in at_copies.values())
    if look.has_seen_others or is_of_a_copy:
        raise ModelMismatchError(
            "the function given as evaluate=… has measured other weights than those that it found in the "
            "model, which are the swarm's",
            next_step="let it measure those; the loss of an average of this loop's own may be its metric "
            "beside that",
        )
    return result


class _Look:
    """Notes at each pass of a model whether its weights are others than were shown.

    A model that is copied or saved meanwhile has what passes inputs on in its place, and needs no Atoll.
    """

    def __init__(self, are_others: Callable[[], bool]) -> None:
        self.has_looked = self.has_seen_others = False
        self._are_others = are_others

    def __call__(self, _module: nn.Module, _inputs: object) -> None:
        self.has_looked = True
        # What is compiled goes without: in one piece it could not stop to compare.
        if not torch.compiler.is_compiling() and self._are_others():
            self.has_seen_others = True

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ({}, "get")


def kin_of(model: nn.Module, places: Sequence[Place]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Modules of this process around the model, as compiled ones, and copies of what the run trains of it.

    Averages (EMA) and references are copies.
    """
    own = {id(module) for module in model.modules()}
    shapes = {place.name: place.shape for place in places}
    wrappers, copies = [], []
    for each in gc.get_objects():
        # By its type, for proxies answer for others; and one that is being unpickled is not whole.
        if not issubclass(type(each), nn.Module) or "_modules" not in vars(each):
            continue
        if id(each) in own:
            continue
        if any(module is model for module in each.modules()):
            wrappers.append(each)
        elif {n: tuple(t.shape) or (1,) for n, t in tensors_of(each, places).items()} == shapes:
            copies.append(each)
    return wrappers, copies


class EarlyCopies:
    """Copies of the model that were made before `join`, and so of weights that it has replaced.

    A reference is right so. An average (EMA) goes on from them, and the slower it is the longer. It may be a
    module, or a list or a dictionary of tensors, which this holds on to: until the first round is trained.
    """

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        """Before the first weights are taken over."""
        self._first = weights.few()
        _, copies = kin_of(model, weights.places)
        self._copies = [weakref.ref(each) for each in copies if self._way(each, weights) == 0]
        self._replaced = 0.0
        told = tensors_of(model, weights.places)
        few = {name: few_of_all([each]).cpu() for name, each in told.items()}
        # What is all the same, as zeros, is like much else.
        self._known = {
            n: each for n, each in few.items() if len(each) and bool((each != each[0]).any())
        }
        self._loose = list(self._holding_copies(told))
        self._replaced_of_known = 0.0

    def look(self, weights: Weights) -> None:
        """Once the first weights have been taken over."""
        self._replaced = self._way(None, weights)
        now = tensors_of(weights.model, weights.places)
        self._replaced_of_known = self._way_of({name: now[name] for name in self._known})

    def are_averages(self, weights: Weights) -> bool:
        """After some steps: whether one has moved, and not half as far as `join` has moved the model."""
        copies = [copy for each in self._copies if (copy := each()) is not None]
        ways = [(self._way(each, weights), self._replaced) for each in copies]
        for held, keys in self._loose:
            found = {name: held[key] for name, key in keys.items() if _has(held, key)}
            if len(found) == len(keys):
                ways.append((self._way_of(found), self._replaced_of_known))
        return any(0 < way < replaced / 2 for way, replaced in ways)

    def _holding_copies(self, told: Mapping[str, Tensor]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Lists and dictionaries with a copy of each tensor, and where in them each is, by its name."""
        shapes = {tuple(told[name].shape) for name in self._known}
        # By their types: compilers keep lists of tensors that have shapes and no values.
        kinds = {Tensor, nn.Parameter, *map(type, told.values())}
        for held in gc.get_objects() if self._known else ():
            if type(held) not in (list, dict, OrderedDict) or len(held) < len(self._known):
                continue
            items = list(held.items() if isinstance(held, dict) else enumerate(held))
            tensors = [(key, each) for key, each in items if type(each) in kinds]
            left = [(key, t) for key, t in tensors if tuple(t.shape) in shapes and not t.is_meta]
            if len(left) < len(self._known):
                continue
            keys: dict[str, Any] = {}
            for name, known in self._known.items():
                own = told[name]
                for place, (key, each) in enumerate(left):
                    if each.shape == own.shape and is_apart(each, own) and _is(each, known):
                        keys[name] = key
                        del left[place]
                        break
                else:
                    break
            if len(keys) == len(self._known):
                yield held, keys

    def _way_of(self, found: Mapping[str, Tensor]) -> float:
        ways = [(few_of_all([found[name]]).cpu() - was).norm() for name, was in self._known.items()]
        return float(torch.stack(ways).norm()) if ways else 0.0

    def _way(self, of: nn.Module | None, weights: Weights) -> float:
        few = weights.few(of)
        return math.inf if few.is_meta else float((few.to(self._first.device) - self._first).norm())


def _is(tensor: Tensor, few: Tensor) -> bool:
    return torch.equal(few_of_all([tensor]).cpu(), few)


def _has(held: Any, key: Any) -> bool:
    there = key in held if isinstance(held, dict) else key < len(held)
    return there and isinstance(held[key], Tensor)


def digest_of_function(function: Callable[..., Any] | None) -> str:
    """By which losses of other functions are told apart; empty without a function.

    It is of the source, for bytecode differs by Python's version. What it calls and closes over is not in it.
    """
    if function is None:
        return ""
    while isinstance(function, partial):
        function = function.func
    body = function if inspect.isroutine(function) else type(function).__call__
    body = inspect.unwrap(body)
    try:
        source = "" if inspect.getfile(body) == "<string>" else inspect.getsource(body)
    except (OSError, TypeError):  # typed into a prompt, or of no Python
        source = ""
    if not source:  # also what exec made: Python 3.13 would give it lines of `python -c`
        return "a function without source"
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=4).hexdigest()


def _evaluation_of(found: Any) -> tuple[float, int, float | None]:
    """The held-out loss that a loop's function has returned, its tokens and metric. Raises SwarmError."""
    metric: float | None = None
    try:
        loss, tokens, *more = found if isinstance(found, tuple) else (found, 0)
        loss, tokens = float(loss), int(tokens)
        if more:
            (metric,) = map(float, more)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        loss = math.nan
    if not math.isfinite(loss) or tokens < 0:
        raise SwarmError(
            f"the function given as evaluate=… has returned {found!r}, and not a finite loss, or that and "
            "how many tokens it was measured on, or both and a metric",
            next_step="correct it; where the loss is no number on the global parameters, the run has "
            "diverged: lower the learning rate",
        )
    # For people alone: an area under a curve may be no number of some samples, and nothing is lost.
    return loss, tokens, metric if metric is not None and math.isfinite(metric) else None
