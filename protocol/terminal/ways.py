"""How present nodes reach each other, as a status tells it: pairs of them, and words. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from protocol.terminal.node_words import by_name, is_present, name_of
from protocol.v1 import status_pb2 as pb
from protocol.v1.session_pb2 import HeartbeatRequest

MOST_NAMED = 4
"""Nodes in a line; of the others the number."""

MOST_PAIRS = 20
"""Of nodes that do not reach each other, in one sentence."""

NARROW = "only small packets get through"
NARROW_STEP = "lower the MTU of one of the two: 'sudo ip link set dev NAME mtu 1280'"

Pair = tuple[str, str]
"""Ids of two present nodes, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """What one of each pair says; nothing of pairs that reach each other directly."""

    present: Mapping[str, pb.NodeStatus]  # by id
    cut: set[Pair]  # without a connection
    narrow: set[Pair]  # likewise, for large packets between them get lost
    punched: set[Pair]  # through holes in their routers
    by_proxy: set[Pair]  # through a network's proxy
    carried: Mapping[Pair, str]  # by whom
    helpers: Sequence[str]  # by name

    @classmethod
    def among(cls, nodes: Iterable[pb.NodeStatus]) -> Self:
        """Who was not heard since the coordinator's restart may have left meanwhile."""
        present = {n.node_id: n for n in nodes if is_present(n) and not n.is_unheard}

        def pairs(others_of: Callable[[HeartbeatRequest], Iterable[str]]) -> set[Pair]:
            return {
                _pair(node_id, other)
                for node_id, node in present.items()
                for other in others_of(node.heartbeat)
                if other in present
            }

        cut = pairs(lambda beat: beat.unreachable_ids)
        return cls(
            present=present,
            cut=cut,
            narrow=pairs(lambda beat: beat.narrow_ids),
            punched=pairs(lambda beat: beat.punched_ids) - cut,
            by_proxy=pairs(lambda beat: beat.by_proxy_ids) - cut,
            carried={
                _pair(node_id, told.node_id): told.through_id
                for node_id, node in present.items()
                for told in node.heartbeat.through
                if {told.node_id, told.through_id} <= present.keys()
            },
            helpers=[node.node_id for node in by_name(present.values()) if node.is_helper],
        )

    def between(self, pair: Pair) -> str:
        """Who carries for a pair that is cut off, or else the first helper that both reach; or nobody."""
        if between := self.carried.get(pair):
            return self.name(between)
        helpers = self.helpers if {*pair}.isdisjoint(self.helpers) else ()
        reached = (h for h in helpers if not any(_pair(n, h) in self.cut for n in pair))
        return self.name(helper) if (helper := next(reached, "")) else ""

    def name(self, node_id: str) -> str:
        """What people call the node."""
        return name_of(self.present[node_id])

    def names(self, pair: Iterable[str]) -> list[str]:
        """In order."""
        return sorted(map(self.name, pair))


def cut_pairs(nodes: Iterable[pb.NodeStatus]) -> set[Pair]:
    """Each two present nodes of which one says that it does not reach the other."""
    return _Ways.among(nodes).cut


def cut_off(nodes: Iterable[pb.NodeStatus]) -> str:
    """Which nodes do not reach each other, and which do by other ways than directly; empty when all do."""
    ways = _Ways.among(nodes)
    apart: list[str] = []
    through: dict[str, set[str]] = {}  # names, by who is between
    for pair in ways.cut:
        names = ways.names(pair)
        if between := ways.between(pair):
            through.setdefault(between, set()).update(names)
        if pair in ways.narrow:
            apart.append(f"between {names[0]} and {names[1]} {NARROW}: {NARROW_STEP}")
        elif not between:
            strict = ways.names(n for n in pair if ways.present[n].has_symmetric_router)
            why = f" (symmetric router: {', '.join(strict)})" if strict else ""
            apart.append(f"{names[0]} and {names[1]} do not reach each other{why}")
    told = _some_of(apart)
    for between, ends in sorted(through.items()):
        told.append(f"{_some_named(ends)} reach each other through {between}")
    holes = map(ways.names, ways.punched)
    told += _some_of(f"{one} and {other} reach each other, punched" for one, other in holes)
    for node_id, node in ways.present.items():
        others = (o for o in node.heartbeat.by_proxy_ids if _pair(node_id, o) in ways.by_proxy)
        if names := [ways.name(other) for other in others]:
            told.append(f"{name_of(node)} reaches {_some_named(names)} by proxy")
    return "; ".join(told)


def ways_to_others(node: pb.NodeStatus, nodes: Iterable[pb.NodeStatus]) -> str:
    """How a present node reaches the others, in words."""
    told = [f"{name} {way}" for name, way in ways_of(node, nodes)]
    if len(told) > MOST_PAIRS:
        told[MOST_PAIRS:] = [f"and {len(told) - MOST_PAIRS} more"]
    return ", ".join(told)


def ways_of(node: pb.NodeStatus, nodes: Iterable[pb.NodeStatus]) -> list[tuple[str, str]]:
    """The others by name, each with its way: direct, punched, by proxy, through another, or not reached.

    Nothing of a node that is not present.
    """
    ways = _Ways.among(nodes)
    if node.node_id not in ways.present:
        return []
    told = []
    for other in by_name(ways.present.values()):
        pair = _pair(node.node_id, other.node_id)
        if pair[0] == pair[1]:
            continue
        by_proxy = "by proxy" if pair in ways.by_proxy else "direct"
        way = "punched" if pair in ways.punched else by_proxy
        if pair in ways.cut:
            between = ways.between(pair)
            way = f"through {between}" if between else "not reached"
            if pair in ways.narrow:
                way = f"{way} ({NARROW})" if between else NARROW
        told.append((name_of(other), way))
    return told


def _some_named(names: Iterable[str]) -> str:
    """A few names in order, or how many nodes they are."""
    told = sorted(names)
    return ", ".join(told) if len(told) <= MOST_NAMED else f"{len(told)} nodes"


def _some_of(pairs: Iterable[str]) -> list[str]:
    told = sorted(pairs)
    if len(told) > MOST_PAIRS:
        told[MOST_PAIRS:] = [f"and {len(told) - MOST_PAIRS} more pairs"]
    return told


def _pair(one: str, other: str) -> Pair:
    return min(one, other), max(one, other)
