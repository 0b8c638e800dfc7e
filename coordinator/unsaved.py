"""What of the swarm's state the database does not hold yet: the difference of two states. Pure.

Most steps change a member or a round, and rows are written for these alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Self

from coordinator.swarm.ledger import Ledger
from coordinator.swarm.members import Member
from coordinator.swarm.state import ClosedRound, HeldOut, SwarmState, Written
from protocol.trust.rulings import Ruling
from protocol.wire.rounds import NodeId


def to_save(before: SwarmState, after: Sequence[SwarmState]) -> list[SwarmState]:
    """The states between which all differences show.

    A state keeps only the latest rounds, so none may be left out that brought one of them or took
    one back. Of the others the last one of a row tells all.
    """
    brought = (
        state
        for state, earlier in zip(after, (before, *after), strict=False)
        if state.recent is not earlier.recent or state is after[-1]
    )
    return [before, *brought]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What of a state has to be written that the database holds as it was before."""

    after: SwarmState
    are_scalars_new: bool
    members: tuple[Member, ...]
    gone: frozenset[NodeId]
    is_round_new: bool
    is_ledger_new: bool
    num_losses_kept: int | None  # of the held-out losses, from the first on; None: no other ones
    written: tuple[Written, ...]
    forgotten: frozenset[int]  # rounds whose texts are not kept any more
    is_taken_back: bool
    closed: tuple[ClosedRound, ...]
    rulings: tuple[Ruling, ...]

    @property
    def is_any(self) -> bool:
        """Whether there is anything to write."""
        are_rows_new = bool(
            self.members
            or self.gone
            or self.closed
            or self.rulings
            or self.written
            or self.forgotten
        )
        is_one_new = self.is_round_new or self.is_ledger_new or self.num_losses_kept is not None
        return self.are_scalars_new or are_rows_new or is_one_new

    @classmethod
    def between(cls, before: SwarmState, after: SwarmState) -> Self:
        """What is new in `after`."""
        members: tuple[Member, ...] = ()
        gone: frozenset[NodeId] = frozenset()
        if after.members is not before.members:
            was = before.members
            members = tuple(
                member
                for node_id, member in after.members.items()
                if was.get(node_id) is not member and not _is_saved_as(was.get(node_id), member)
            )
            gone = frozenset(was.keys() - after.members.keys())
        return cls(
            after=after,
            are_scalars_new=without_rows(after) != without_rows(before),
            members=members,
            gone=gone,
            is_round_new=_is_new(before.open_round, after.open_round),
            is_ledger_new=_is_new(before.ledger, after.ledger),
            num_losses_kept=_num_kept(before.held_out, after.held_out),
            written=tuple(one for one in after.written if one not in before.written)
            if after.written is not before.written
            else (),
            forgotten=frozenset(one.round for one in before.written)
            - frozenset(one.round for one in after.written)
            if after.written is not before.written
            else frozenset(),
            is_taken_back=after.committed_round < before.committed_round,
            closed=_new_rounds(before.recent, after.recent),
            rulings=after.rulings[len(before.rulings) :],
        )


def _num_kept(before: Sequence[HeldOut], after: Sequence[HeldOut]) -> int | None:
    """How many losses are the same ones, in the same places; None when all are."""
    if after is before or after == before:
        return None
    pairs = zip(before, after, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _new_rounds(
    before: tuple[ClosedRound, ...], after: tuple[ClosedRound, ...]
) -> tuple[ClosedRound, ...]:
    """Most are the very same ones, and there may be many void rounds in a row."""
    same = {id(closed) for closed in before}
    return tuple(closed for closed in after if id(closed) not in same and closed not in before)


def _is_new(before: object, after: object) -> bool:
    return after is not before and after != before


def without_rows(state: SwarmState) -> SwarmState:
    """The state without what has tables of its own, or follows from those."""
    return replace(
        state,
        members={},
        open_round=None,
        recent=(),
        norms=(),
        audit_secret=b"",  # of the key, which lies elsewhere
        ledger=Ledger(),
        held_out=(),
        written=(),
        rulings=(),
        latest_rulings={},
        rolled_back=(),
        paused=None,
        stopped=None,
    )


def _is_saved_as(before: Member | None, after: Member) -> bool:
    """Whether the database needs no new row; a lease alone is not worth a write."""
    if before is None or before is after:
        return before is after
    return replace(before, lease_until=0.0) == replace(after, lease_until=0.0)
