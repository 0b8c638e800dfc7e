"""Stages of any model: modules one after another, followed once on shapes, and cut for a pipeline.

What is followed is what a pipeline will do: each module takes what the one before gave, and nothing else.
How stages are balanced is node.island.parallel.mesh_shape's, their schedule node.island.parallel.pipeline's.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from node.island.models.architecture import Roles, container_of_layers, roles_of
from node.island.parallel.mesh_shape import MeshShape, matches
from protocol.errors import ConfigError
from protocol.run.models import StageUnit


@dataclass(slots=True)
class _Call:
    """What a module was called with, and gave."""

    name: str
    inputs: list[Any]
    operations: int
    output: Any = None


def units_of(
    module: nn.Module,
    patterns: Sequence[str],
    compute: Callable[[nn.Module], Any],
    num_samples: int,
) -> tuple[StageUnit, ...]:
    """The units of a plan's stages, by a loss that `compute` takes of the module on shapes alone.

    Raises ConfigError with the first module that does not follow the one before it.
    """
    names = named_in_order(module, patterns)
    calls = _followed(module, names, compute)
    for name, output in _chained(names, calls):
        if not isinstance(output, Tensor) or output.dtype != torch.float32:
            kind = output.dtype if isinstance(output, Tensor) else type(output).__name__
            raise _wrong(f"{name} gives {kind}, and fp32 tensors travel between stages")
        if output.ndim < 1 or len(output) != num_samples:
            raise _wrong(f"{name} gives {list(output.shape)}, whose first dimension is no samples")
    units = [
        StageUnit(
            modules=(name,),
            output=tuple(calls[name].output.shape[1:]),
            operations=calls[name].operations // num_samples,
        )
        for name in names
    ]
    return joined(module, units)


def named_in_order(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The modules that a plan's patterns mean. Raises ConfigError for none, and for one named twice."""
    every = [name for name, _ in module.named_modules() if name]
    names: list[str] = []
    for pattern in patterns:
        meant = [name for name in every if matches(str(pattern), name)]
        if not meant:
            raise _wrong(f"they name {pattern!r}, and the model has no such module")
        names += meant
    for name in names:
        if names.count(name) > 1 or any(other.startswith(f"{name}.") for other in names):
            raise _wrong(f"they name {name} twice, or a part of it besides")
    return names


def joined(module: nn.Module, units: Iterable[StageUnit]) -> tuple[StageUnit, ...]:
    """Units that have something to train each: one that has nothing goes with the next, or the last.

    Raises ConfigError for parameters in no unit, or in two that need not be the first and the last.
    """
    found: list[StageUnit] = []
    waiting: StageUnit | None = None
    for each in units:
        unit = each if waiting is None else _together(waiting, each)
        trains = any(True for name in unit.modules for _ in module.get_submodule(name).parameters())
        waiting = None if trains else unit
        if trains:
            found.append(unit)
    if waiting is not None and found:
        found[-1] = _together(found[-1], waiting)
    owners = _owners(module, found)
    for name, own in owners.items():
        if not own:
            raise _wrong(f"they leave out the parameter {name}")
        if len(own) > 1 and own != {0, len(found) - 1}:
            raise _wrong(f"the parameter {name} is in several of them")
    if sum(len(own) > 1 for own in owners.values()) > 1:
        raise _wrong("more than one parameter is both in the first and in the last")
    return tuple(found)


def _together(one: StageUnit, other: StageUnit) -> StageUnit:
    return StageUnit(
        modules=(*one.modules, *other.modules),
        output=other.output,
        operations=one.operations + other.operations,
    )


def _owners(module: nn.Module, units: Sequence[StageUnit]) -> dict[str, set[int]]:
    """Which units hold each parameter, by its first name."""
    first = {parameter: name for name, parameter in module.named_parameters()}
    owners: dict[str, set[int]] = {name: set() for name in first.values()}
    for i, unit in enumerate(units):
        for name in unit.modules:
            for parameter in module.get_submodule(name).parameters():
                owners[first[parameter]].add(i)
    return owners


def _followed(
    module: nn.Module, names: Sequence[str], compute: Callable[[nn.Module], Any]
) -> dict[str, _Call]:
    """What each of the modules, and the whole under "", is called with and gives; by the order of calls."""
    calls: dict[str, _Call] = {}
    handles = []
    with FlopCounterMode(display=False) as counter:

        def before(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
                if name in calls:
                    raise _wrong(f"{name or 'the model itself'} is called twice for one batch")
                # Given by name or by place, it is the same to a module.
                given = [*tree_leaves(inputs), *tree_leaves(named)]
                calls[name] = _Call(name, given, counter.get_total_flops())

            return hook

        def after(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, inputs: Any, output: Any) -> None:
                calls[name].output = output
                calls[name].operations = counter.get_total_flops() - calls[name].operations

            return hook

        for name in ("", *names):
            each = module.get_submodule(name)
            handles.append(each.register_forward_pre_hook(before(name), with_kwargs=True))
            handles.append(each.register_forward_hook(after(name)))
        try:
            compute(module)
        except ConfigError:
            raise
        except Exception as error:  # whatever a model does with values that are not there
            said = " ".join(str(error).split())[:200]
            raise _wrong(
                f"the model cannot be followed on shapes alone ({type(error).__name__}: {said})"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
    return calls


def _chained(names: Sequence[str], calls: dict[str, _Call]) -> Iterable[tuple[str, Any]]:
    """Each module's name and output; raises ConfigError where one does not take what the one before gave."""
    if "" not in calls:
        raise _wrong("the loss does not call the model as such, module(…)")
    given = calls[""].inputs
    before = "the model's own inputs"
    for name in names:
        if name not in calls:
            raise _wrong(f"{name} is not called")
        if not _are_same(calls[name].inputs, given):
            raise _wrong(f"{name} takes something else than {before}")
        yield name, calls[name].output
        given, before = [calls[name].output], f"what {name} gives"
    if calls[""].output is not given[0]:
        raise _wrong(f"the model gives something else than {before}")


def _are_same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    ones, others = ([each for each in every if each is not None] for every in (ones, others))
    return len(ones) == len(others) and all(a is b for a, b in zip(ones, others, strict=True))


def _wrong(why: str) -> ConfigError:
    return ConfigError(
        f"the stages of the plan are no pipeline: {why}",
        next_step="name modules of which each takes what the one before gives and nothing else, the first "
        'the model\'s own inputs, as {"stages": ["embed", "layers.*", "head"]}; or leave stages out',
    )


class Cut:
    """Which stage of a model each part is, and what a whole model knows that its parts do not."""

    def __init__(self, units: Sequence[StageUnit]) -> None:
        self._units = units
        self._stages: dict[nn.Module, range] = {}
        self._layers: tuple[str, list[str]] = ("", [])
        self._matrices: set[str] = set()
        self._tables: set[str] = set()
        self._tied: str | None = None

    def leave(self, whole: nn.Module, shape: MeshShape, stage: int) -> None:
        """Takes the parameters and buffers of other stages out of a model.

        Modules stay where they are, so names do. A parameter of both ends keeps the name that it has in
        the whole model, at both.
        """
        self._learn(whole)
        own = shape.units_of(stage, [unit.operations for unit in self._units])
        kept = {id(value) for i in own for value in self._values(whole, i)}
        others = set(range(len(self._units))) - set(own)
        gone = {id(value) for i in others for value in self._values(whole, i)} - kept
        for module in whole.modules():
            for values in (module._parameters, module._buffers):
                for name, value in list(values.items()):
                    if value is not None and id(value) in gone:
                        del values[name]
        self._stages[whole] = own

    def has(self, part: nn.Module) -> bool:
        """Whether a module is a stage, rather than a whole model."""
        return part in self._stages

    def _values(self, whole: nn.Module, unit: int) -> list[Tensor]:
        modules = [whole.get_submodule(name) for name in self._units[unit].modules]
        return [value for m in modules for value in (*m.parameters(), *m.buffers())]

    def _learn(self, whole: nn.Module) -> None:
        self._layers = container_of_layers(whole)
        roles = roles_of(whole)
        named = dict(whole.named_parameters())
        self._matrices = {name for name, p in named.items() if p in roles.matrices}
        self._tables = {name for name, p in named.items() if p in roles.tables}
        owners = _owners(whole, self._units)
        self._tied = next((name for name, own in owners.items() if len(own) > 1), None)

    def modules_of(self, part: nn.Module) -> list[nn.Module]:
        """Those of a part, one after another."""
        names = [name for i in self._stages[part] for name in self._units[i].modules]
        return [part.get_submodule(name) for name in names]

    def layers(self, part: nn.Module) -> list[nn.Module]:
        """Those of the whole model's layers that a part has."""
        name, keys = self._layers
        children = dict(part.get_submodule(name).named_children())
        layers = [children[key] for key in keys]
        return [layer for layer in layers if any(True for _ in layer.parameters())]

    def roles(self, part: nn.Module) -> Roles:
        """As in the whole model."""
        named = dict(part.named_parameters())
        return Roles(
            matrices=frozenset(p for name, p in named.items() if name in self._matrices),
            tables=frozenset(p for name, p in named.items() if name in self._tables),
        )

    def tied(self, part: nn.Module) -> nn.Parameter | None:
        """See Architecture."""
        return None if self._tied is None else dict(part.named_parameters()).get(self._tied)

    def copies(self, part: nn.Module) -> frozenset[nn.Parameter]:
        """See Architecture."""
        tied = self.tied(part)
        return frozenset() if tied is None or 0 in self._stages[part] else frozenset({tied})

    def leaving(self, shape: MeshShape) -> list[tuple[int, ...]]:
        """The shape of one sample after each stage."""
        operations = [unit.operations for unit in self._units]
        return [
            self._units[shape.units_of(stage, operations)[-1]].output
            for stage in range(shape.num_stages)
        ]
