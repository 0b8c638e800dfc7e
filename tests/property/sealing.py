"""The swarm's state as the core must treat it: a mapping in it that somebody changes in place raises."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, NoReturn, TypeVar

from coordinator.swarm.members import Members
from protocol.run.models import Section

T = TypeVar("T")
PLAIN = frozenset({type(None), bool, int, float, str, bytes})


class SealedMapping(dict[Any, Any]):
    """Equal to the dict it was made from."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("the state before is changed in place")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


class Sealer:
    """Seals states one after the other. What it has sealed before it takes as it is, by identity."""

    def __init__(self) -> None:
        self._sealed: dict[int, object] = {}  # by id; keeps them, so that no id is used again

    def seal(self, value: T) -> T:
        """The same value, of which no part can be changed in place."""
        if type(value) in PLAIN or id(value) in self._sealed:
            return value
        sealed = self._rebuilt(value)
        self._sealed[id(sealed)] = sealed
        return sealed

    def _rebuilt(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return value
        if isinstance(value, Members):  # what it knows of all of them shall be what the core made
            for node_id, member in value.items():
                if (sealed := self.seal(member)) is not member:
                    value = value.with_member(sealed)
                    assert value[node_id] is sealed
            return value
        if isinstance(value, Mapping):
            return SealedMapping({key: self.seal(part) for key, part in value.items()})
        if isinstance(value, tuple):
            parts = tuple(self.seal(part) for part in value)
            is_same = all(new is old for new, old in zip(parts, value, strict=True))
            return value if is_same else parts
        if isinstance(value, Section):  # of a run file: its fields are frozen
            assert all(self.seal(part) is part for _, part in value)
            return value
        assert is_dataclass(value) and not isinstance(value, type)
        assert value.__dataclass_params__.frozen, (  # type: ignore[attr-defined]  # not in the stubs
            f"{value!r} in the state can be changed in place"
        )
        changed = {}
        for field in fields(value):
            old = getattr(value, field.name)
            if (new := self.seal(old)) is not old:
                changed[field.name] = new
        return replace(value, **changed) if changed else value
