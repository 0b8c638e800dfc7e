"""Whose training others can check, by what a member is and which data it has. Pure.

Whoever says what it is may say something else, so this has to be nobody's gain:

| a member | trains | is checked by, and checks |
|---|---|---|
| ranks with the data of most invites | what it was leased | ranks with the same data |
| ranks with other data | samples of the same numbers of those | ranks with these data too, if any |
| a loop of its owner's | what its owner likes | nobody |
| a helper | nothing, and it weighs nothing | nobody |

In a run of private data, whose loss compares samples, or whose `[outer] audit` is 0, nobody is checked, and
all are alike. Else the work of the first line is what checks can confirm. All others together weigh less
than that, once they are no more by invites: see `unchecked_of`. The run owner's own machines need no check.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from coordinator.swarm.members import Member
from coordinator.swarm.state import SwarmState
from coordinator.swarm.turn import present_members
from protocol.wire.rounds import OWN_LOOP, CorpusSummary, Digest, NodeId

NO_DATA = CorpusSummary(digest=Digest(b""), num_samples=0, num_bytes=0)

LEAST_INVITES = 3
"""That of whom one is accused, two others check it. With machines of the run owner's two are enough."""


class Kind(StrEnum):
    """What a member trains."""

    RANKS = "ranks"  # what it was leased
    LOOP = "loop"  # what its owner's program likes
    HELPER = "helper"  # nothing


def kind_of(member: Member) -> Kind:
    """By its certificate, and by what it says itself."""
    if member.is_helper:
        return Kind.HELPER
    return Kind.LOOP if member.device == OWN_LOOP else Kind.RANKS


def can_check(checker: Member, checked: Member) -> bool:
    """Whether a sample of a number is the same for both, and both train what they were leased."""
    are_ranks = kind_of(checker) is Kind.RANKS and kind_of(checked) is Kind.RANKS
    return are_ranks and checker.corpus.is_same(checked.corpus)


def unchecked(state: SwarmState) -> frozenset[NodeId]:
    """Of those that are here: whose work nothing confirms, and who weigh less than all others together."""
    return unchecked_of(present_members(state)) if state.rules.checks_training else frozenset()


def unchecked_of(members: Iterable[Member]) -> frozenset[NodeId]:
    """Of some members those whom nobody checks; nobody, where those that are checked are too few.

    Checked is who has ranks and the data that most invites tell of, or the run owner's own machines do, and
    is of an invite of which all that work have. So none that is checked lends its say to one that is not.
    Invites are not free. Where those that are checked are of fewer than the rest, or of fewer than three
    with each own machine for one, work decides as it is: else a few with a little of it had the most say.
    """
    working = [m for m in members if not m.is_helper and any(t for _, t in m.work.by_stretch)]
    own = [member for member in working if member.is_own]
    others: dict[str, list[Member]] = {}
    for member in working:
        if not member.is_own:
            others.setdefault(member.invite_id, []).append(member)
    checked = _checked_invites(own, others)
    num_checked, num_rest = len(own) + len(checked), len(others) - len(checked)
    if not num_rest or num_checked < max(num_rest, 2 if own else LEAST_INVITES):
        return frozenset()
    return frozenset(m.node_id for i, alike in others.items() if i not in checked for m in alike)


def _checked_invites(own: Sequence[Member], others: Mapping[str, Sequence[Member]]) -> set[str]:
    """Of which all that work have ranks, and data that more invites tell of than of any others.

    None where two kinds of data are told of by as many: nobody knows which of them are the run's.
    """
    told: dict[Digest, dict[Digest | None, set[str]]] = {}  # by the data, and the held-out ones
    for invite, alike in others.items():
        digests = {member.corpus.digest for member in alike}
        held_out = {member.corpus.held_out_digest for member in alike} - {None}
        are_ranks = all(kind_of(member) is Kind.RANKS for member in alike)
        if are_ranks and len(digests) == 1 and len(held_out) < 2:
            by_held_out = told.setdefault(digests.pop(), {})
            by_held_out.setdefault(held_out.pop() if held_out else None, set()).add(invite)
    vouched = [member.corpus for member in own if kind_of(member) is Kind.RANKS]
    found: list[set[str]] = []
    for digest, by_held_out in told.items():
        untold = by_held_out.pop(None, set())
        for held_out_digest, invites in (by_held_out or {None: set[str]()}).items():
            theirs = replace(NO_DATA, digest=digest, held_out_digest=held_out_digest)
            if not vouched or any(map(theirs.is_same, vouched)):
                found.append(invites | untold)
    most = max(map(len, found), default=0)
    largest = [invites for invites in found if len(invites) == most]
    return largest[0] if len(largest) == 1 else set()
