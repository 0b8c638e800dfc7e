"""One step of the core in the making: the state so far, and the actions it asks for.

A step passes through several decisions, each of which sees what the ones before changed. They
share a Turn, which never leaves the step, so `step` stays a function.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from operator import is_
from typing import TypeVar, TypeVarTuple

from coordinator.swarm.events import Action
from coordinator.swarm.members import PRESENT, Member, Members, MemberState
from coordinator.swarm.state import Round, SliceProgress, SwarmState
from protocol.trust.rulings import undoes
from protocol.wire.rounds import Assignment, NodeId

T = TypeVar("T")
Values = TypeVarTuple("Values")

REMEMBERED = 4


def remembered(work: Callable[[*Values], T]) -> Callable[[*Values], T]:
    """The function, which knows its latest results for the very same values, as they are never changed.

    Many decisions in a row ask for the same: a report changes neither sessions nor assignments. To compare a
    thousand ids would take as long as to look at them.
    """
    known: tuple[tuple[tuple[object, ...], T], ...] = ()

    @wraps(work)
    def found(*values: *Values) -> T:
        nonlocal known
        for had, result in known:
            if all(map(is_, had, values)):
                return result
        result = work(*values)
        known = ((values, result), *known[: REMEMBERED - 1])
        return result

    return found


@remembered
def as_set(node_ids: tuple[NodeId, ...]) -> frozenset[NodeId]:
    """The same ids, to be looked up in."""
    return frozenset(node_ids)


@remembered
def _all_among(assignments: tuple[Assignment, ...]) -> frozenset[NodeId]:
    return frozenset(a.node_id for a in assignments)


@remembered
def _by_node(assignments: tuple[Assignment, ...]) -> Mapping[NodeId, Assignment]:
    return {a.node_id: a for a in assignments}


@remembered
def _present_among(
    assignments: tuple[Assignment, ...], present_ids: tuple[NodeId, ...]
) -> tuple[NodeId, ...]:
    present = frozenset(present_ids)
    return tuple(sorted(a.node_id for a in assignments if a.node_id in present))


@remembered
def _awaited_among(
    assignments: tuple[Assignment, ...],
    present_ids: tuple[NodeId, ...],
    on_trial: tuple[NodeId, ...],
) -> tuple[NodeId, ...]:
    left_out = frozenset(on_trial)
    awaited = tuple(n for n in _present_among(assignments, present_ids) if n not in left_out)
    asked = _by_node(assignments)
    return awaited if any(asked[node_id].trains for node_id in awaited) else ()


@dataclass(slots=True, kw_only=True)
class Turn:
    """Mutable within a step only. `state` is replaced, never changed in place."""

    state: SwarmState
    now: float
    actions: list[Action] = field(default_factory=list)
    has_new_state: bool = False  # a committed state that nobody was asked to evaluate

    @property
    def current(self) -> Round:
        """The round in flight, where there is one."""
        assert self.state.open_round is not None
        return self.state.open_round

    def act(self, action: Action) -> None:
        """Asks the edge for something, after everything asked before."""
        self.actions.append(action)

    def put_member(self, member: Member) -> None:
        """Adds a member or replaces it."""
        if self.state.members.get(member.node_id) != member:
            members = members_of(self.state).with_member(member)
            self.state = replace(self.state, members=members)

    def put_round(self, current: Round | None) -> None:
        """Replaces the round in flight."""
        if self.state.open_round != current:
            self.state = replace(self.state, open_round=current)

    def put_slice(self, current: Round, progress: SliceProgress) -> None:
        """Replaces a slice of the round in flight, which is otherwise as it is given."""
        index = progress.slice.index
        slices = (*current.slices[:index], progress, *current.slices[index + 1 :])
        self.put_round(replace(current, slices=slices))


def members_of(state: SwarmState) -> Members:
    """The members, with what is known of all of them."""
    assert isinstance(state.members, Members)  # any mapping may be given, and this is made of it
    return state.members


def members_where(state: SwarmState, is_wanted: Callable[[Member], bool]) -> list[Member]:
    """The members that satisfy the condition, in the order of their ids, as everything is done."""
    members = members_of(state)
    return [member for node_id in members.ids if is_wanted(member := members[node_id])]


def present_members(state: SwarmState) -> list[Member]:
    """Members with a live session, in the order of their ids."""
    members = members_of(state)
    return [members[node_id] for node_id in members.present_ids]


def ready_members(state: SwarmState) -> list[Member]:
    """Members that hold the committed state, in the order of their ids."""
    return members_where(state, lambda member: member.state is MemberState.READY)


def available_members(state: SwarmState) -> list[Member]:
    """Ready members that stay: who may be asked for anything new, in the order of their ids."""
    return [member for member in ready_members(state) if not member.is_draining]


def training_among(current: Round, node_ids: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """Those of a round's participants that train, in the order given: all but helpers."""
    asked = assignments_of(current)
    return tuple(node_id for node_id in node_ids if asked[node_id].trains)


def is_present(state: SwarmState, node_id: NodeId) -> bool:
    """Whether the node is a member with a live session."""
    member = state.members.get(node_id)
    return member is not None and member.state in PRESENT


def is_held_by(node_id: NodeId, current: Round, progress: SliceProgress) -> bool:
    """Whether the node says that it holds the result which the slice's reducer reported."""
    results = current.held.get(node_id, {})
    return progress.digest is not None and results.get(progress.slice.index) == progress.digest


def holds_undone(state: SwarmState, member: Member) -> bool:
    """Whether the member holds the state after a round that is undone."""
    return undoes(state.rolled_back, member.outer_round, member.outer_incarnation)


def participants_of(current: Round) -> frozenset[NodeId]:
    """Who takes part in the round, present or not."""
    return _all_among(current.assignments)


def others_in(current: Round, node_ids: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """Who takes part in the round beside these, in the order of the plan."""
    left_out = frozenset(node_ids)
    return tuple(a.node_id for a in current.assignments if a.node_id not in left_out)


def present_participants(state: SwarmState, current: Round) -> tuple[NodeId, ...]:
    """The round's participants that have a live session, in the order of their ids."""
    return _present_among(current.assignments, members_of(state).present_ids)


def awaited_participants(state: SwarmState, current: Round) -> tuple[NodeId, ...]:
    """The present participants that the round waits for: all but those on trial.

    All of them where nobody else trains: helpers alone have nothing to reduce.
    """
    present_ids = members_of(state).present_ids
    awaited = _awaited_among(current.assignments, present_ids, current.on_trial)
    return awaited or present_participants(state, current)


def assignments_of(current: Round) -> Mapping[NodeId, Assignment]:
    """What the round asks of each participant."""
    return _by_node(current.assignments)


def without(reports: Mapping[NodeId, T], node_id: NodeId) -> dict[NodeId, T]:
    """What all nodes but one have reported."""
    return {other: report for other, report in reports.items() if other != node_id}


def name_of(state: SwarmState, node_id: NodeId) -> str:
    """What people call the node."""
    member = state.members.get(node_id)
    return member.node_name if member else node_id


def names_of(state: SwarmState, node_ids: Iterable[NodeId]) -> str:
    """What people call several nodes, in their order."""
    return ", ".join(name_of(state, node_id) for node_id in node_ids)


def names_with_other_data(state: SwarmState, node_id: NodeId) -> list[str]:
    """Members present whose data differ from those of this one, where numbers should name the same samples.

    Helpers tell of no data, and neither do members that have yet to get theirs, or bring their own.
    """
    own = state.members[node_id].corpus
    if state.rules.has_private_data or not own.num_samples:
        return []
    return sorted(
        member.node_name
        for member in state.members.values()
        if member.state in PRESENT and not member.is_helper and member.corpus.num_samples
        if not member.corpus.is_same(own)
    )
