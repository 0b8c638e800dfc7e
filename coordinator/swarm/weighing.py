"""Who decides, by confirmed work: what each weighs, who holds enough, and whose work others can check. Pure.

Identities are free and work is not. Confirmed work is tokens of a member's contributions that commits took,
in each slice by its part of the fragment: a reducer that names somebody who sent nothing, or leaves somebody
out, changes no more than its own part. No round counts for more than the speed that the coordinator has seen
explains. Rounds of half a life ago count half, in steps: all sums are of whole numbers, so copies of a
coordinator that learn the same commits agree, and a round that is taken back leaves nothing.

There is no cap for a single key: whoever has much work could have split it over many, and a cap by the
number of keys would let many small ones take the say of a large one. A helper earns nothing and weighs
nothing: that it may reduce is the run owner's word. A member can earn no more in a round
than twice the mean of its participants (coordinator.swarm.shares). An invite is not free, and may be one
person with many keys whose work nobody has checked yet. So the largest weighs less than all others together,
and at most twice what is usual among these. The run owner may say that an invite is of machines of his own:
those weigh by their work alone.

Work that nobody can check weighs less than what is checked. Whoever says what it is may say something
else, so this has to be nobody's gain:

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

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import TypeVar

from blake3 import blake3

from coordinator.swarm.members import PRESENT, Member, Work
from coordinator.swarm.state import (
    Round,
    Say,
    SliceProgress,
    SwarmState,
    as_set,
    awaited_participants,
    is_held_by,
    present_members,
    present_participants,
)
from protocol.wire.rounds import OWN_LOOP, CorpusSummary, Digest, NodeId
from protocol.wire.rounds import WHOLE as WHOLE_FACTOR

Told = TypeVar("Told")

HALF_LIFE_ROUNDS = 64
"""Newcomers have half of the say that their work deserves in the long run after so many rounds. Shorter
than most runs, and so long that nobody gets most of the say by an hour's work."""

KEPT_STRETCHES = 8
"""Half lives after which work counts no more: the last of them counts 1 in 128."""

WHOLE = 1 << 40
"""What an invite weighs while nobody has confirmed work; its members share it."""


# Deciding


def worth(work: Work, round_number: int) -> int:
    """What the work counts at a round: a token of the stretch that the round is in counts 128."""
    stretch = round_number // HALF_LIFE_ROUNDS
    ages = ((stretch - s, t) for s, t in work.by_stretch)
    return sum(t << (KEPT_STRETCHES - 1 - age) for age, t in ages if 0 <= age < KEPT_STRETCHES)


def say_of(
    members: Iterable[Member], round_number: int, unchecked_ids: Collection[NodeId] = ()
) -> Say:
    """What each of the members weighs when they decide together.

    While none of them has confirmed work each invite weighs alike, and its members share it; each of the
    run owner's own nodes weighs like an invite. Helpers weigh nothing. Those of `unchecked_ids` weigh
    less together than the others, where any of these has work.
    """
    members = [member for member in members if not member.is_helper]
    worths = {member.node_id: worth(member.work, round_number) for member in members}
    by_invite: dict[str, list[NodeId]] = {}
    own = 0
    for member in members:
        if member.is_own:
            own += worths[member.node_id]
        else:
            by_invite.setdefault(member.invite_id, []).append(member.node_id)
    if not any(worths.values()):
        shares = {member.node_id: WHOLE for member in members if member.is_own}
        shares |= {n: WHOLE // len(alike) for alike in by_invite.values() for n in alike}
        return Say(weights=shares)
    together = [sum(worths[n] for n in alike) for alike in by_invite.values()]
    cap = cap_of(together, own=own)
    for alike, whole in zip(by_invite.values(), together, strict=True):
        if whole > cap:
            _shrink(worths, alike, whole, cap)
    others = [n for n, worth in worths.items() if worth and n in unchecked_ids]
    whole = sum(worths[n] for n in others)
    checked = sum(worths.values()) - whole
    if whole >= checked > 0:
        # In parts so fine that each keeps some: whoever weighs nothing is a newcomer, whom nobody waits for.
        parts = len(others) + 2
        worths = {n: worth * parts for n, worth in worths.items()}
        _shrink(worths, others, whole * parts, checked * parts - 1 - len(others))
        worths |= {n: worths[n] + 1 for n in others}
    return Say(weights=worths, is_confirmed=True)


def _shrink(worths: dict[NodeId, int], alike: Sequence[NodeId], whole: int, cap: int) -> None:
    """Has members who are worth `whole` weigh `cap` together, by their work."""
    so_far = 0
    for node_id in sorted(alike):
        before, so_far = so_far, so_far + worths[node_id]
        worths[node_id] = so_far * cap // whole - before * cap // whole


def cap_of(values: Sequence[int], *, own: int = 0) -> int:
    """What the members of one invite weigh together at most, given what those of each are worth.

    It follows from all invites but the largest, so none moves its own: less than all others together, with
    the run owner's `own` nodes; and twice what is usual among those others. With two invites there is no
    cap, for the smaller one would decide alone. Where `own` is something it bounds even a single other.
    """
    some = sorted(filter(None, values), reverse=True)
    if len(some) < (1 if own else 3):
        return sum(some)
    others = some[1:]
    less_than_others = own + sum(others) - 1
    return min(less_than_others, 2 * _usual(others)) if others else less_than_others


def _usual(values: Sequence[int]) -> int:
    """The mean of those values that are at least half of the middle one, in order from the largest down.

    The middle one is where the larger ones make up half of all. So no number of small values takes
    anything from one that is no larger than the middle one.
    """
    whole, so_far, middle = sum(values), 0, 0
    for value in values:
        so_far, middle = so_far + value, value
        if 2 * so_far >= whole:
            break
    usual = [value for value in values if 2 * value >= middle]
    return sum(usual) // len(usual)


def weight_of(say: Say, node_ids: Iterable[NodeId]) -> int:
    """What the nodes weigh together."""
    weights = say.weights
    return sum(weights.get(node_id, 0) for node_id in node_ids)


def weights_of(say: Say, node_ids: Iterable[NodeId]) -> list[int]:
    """What each of some weighs; all of them alike where none weighs anything."""
    weights = [say.weights.get(node_id, 0) for node_id in node_ids]
    return weights if any(weights) else [1] * len(weights)


def is_enough(say: Say, some: Collection[NodeId], among: Collection[NodeId]) -> bool:
    """Whether some nodes decide for all those among whom they are.

    More than half of the confirmed work; two thirds of the weight while nobody has any. And both of two.
    """
    if len(some) < min(2, len(among)) or not among:
        return False
    held, whole = weight_of(say, some), weight_of(say, among)
    return 2 * held > whole if say.is_confirmed else 3 * held >= 2 * whole


def say_in(state: SwarmState, current: Round, among: Collection[NodeId]) -> Say:
    """What participants of a round weigh: as when it was opened, while any of those asked for does."""
    if current.say is not None and weight_of(current.say, among):
        return current.say
    return say_of((state.members[n] for n in among), current.number - 1, unchecked(state))


VOTES_WITHOUT_WORK = 0.75
"""All votes while nobody has confirmed work, of the whole: half of the whole is two thirds of them."""


def votes_of(say: Say | None, participants: Sequence[NodeId]) -> tuple[int, ...]:
    """What each participant's word counts about contributions, by what it weighed when the round opened.

    In 65,536ths: more than half of these is what decides (`is_enough`).
    """
    weights = [0 if say is None else say.weights.get(node_id, 0) for node_id in participants]
    if say is None or not any(weights):
        return ()
    votes = WHOLE_FACTOR if say.is_confirmed else int(VOTES_WITHOUT_WORK * WHOLE_FACTOR)
    ends = [votes * so_far // sum(weights) for so_far in accumulate(weights, initial=0)]
    return tuple(end - first for first, end in pairwise(ends))


def heaviest(say: Say, reports: Mapping[NodeId, Told]) -> Told:
    """What members of most weight tell; of equals, the smallest node id's. `reports` is not empty."""
    votes: dict[Told, list[NodeId]] = {}
    for node_id in sorted(reports):
        votes.setdefault(reports[node_id], []).append(node_id)
    return min(votes, key=lambda told: (-weight_of(say, votes[told]), votes[told][0]))


# Drawing, by a secret that members do not know: who is audited, checked, or asked for a loss


def number_of(state: SwarmState, *of: object) -> int:
    """A number of 63 bits, another one for each thing that it is drawn for, and in each incarnation."""
    place = ", ".join(map(str, (*of, state.incarnation)))
    digest = blake3(state.audit_secret + place.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def lot(state: SwarmState, *of: object) -> float:
    """A number from 0 to 1, likewise."""
    return number_of(state, *of) / 2.0**63


def drawn(state: SwarmState, may: Sequence[Told], weights: Sequence[float], *of: object) -> Told:
    """One of some, each as likely as it weighs."""
    left = lot(state, *of) * sum(weights)
    for each, weight in zip(may, weights, strict=True):
        left -= weight
        if left < 0:
            return each
    return may[-1]


# Holding


def holders_of(state: SwarmState, current: Round, progress: SliceProgress) -> tuple[NodeId, ...]:
    """The present participants that hold the result which the slice's reducer reported."""
    participants = present_participants(state, current)
    return tuple(n for n in participants if is_held_by(n, current, progress))


def refusers_of(current: Round, progress: SliceProgress) -> list[NodeId]:
    """Who has signed that the result which the reducer reported does not decode, and does not hold it."""
    return [
        refusal.node_id
        for refusal in progress.refusals
        if refusal.refused.digest == progress.digest
        and not is_held_by(refusal.node_id, current, progress)
    ]


def deciders(state: SwarmState, current: Round, *, is_late: bool) -> tuple[NodeId, ...]:
    """Those among whom it is decided that a slice is held by enough: who is here and waited for.

    At the deadline only who was heard of in this round: others may be dead, and their leases not over.
    """
    awaited = awaited_participants(state, current)
    if not is_late:
        return awaited
    heard = tuple(n for n in awaited if n in current.trained or n in current.held)
    return heard or awaited


def is_held_by_enough(
    state: SwarmState, current: Round, progress: SliceProgress, *, is_late: bool
) -> bool:
    """Whether those that hold the slice's result decide for all.

    Two at least, where two are here: a node may die at any time, and with it all that it alone holds.
    """
    if progress.digest is None:
        return False
    among = deciders(state, current, is_late=is_late)
    holding = _holding(current, progress, among)
    if len(holding) < min(2, len(awaited_participants(state, current))):
        return False
    return is_enough(say_in(state, current, among), holding, among)


def _holding(current: Round, progress: SliceProgress, among: tuple[NodeId, ...]) -> list[NodeId]:
    """Asked with every report, of a thousand nodes: so it goes by what was told, and not by nodes."""
    index, digest, asked = progress.slice.index, progress.digest, as_set(among)
    told = current.held.items()
    return [n for n, results in told if results.get(index) == digest and n in asked]


def held_in_words(state: SwarmState, current: Round, progress: SliceProgress) -> str:
    """How many of those who decide hold the slice's result, and how much they weigh."""
    among = deciders(state, current, is_late=False)
    holding = _holding(current, progress, among)
    say = say_in(state, current, among)
    share = weight_of(say, holding) / max(1, weight_of(say, among))
    return f"{len(holding)} of {len(among)} nodes with {100 * share:.0f} % of the weight"


# Checking


def common_corpus(state: SwarmState) -> CorpusSummary | None:
    """The data that members of most weight tell of; of those that are gone where nobody present has any.

    Helpers tell of none, and neither do members that have yet to get theirs.
    """
    known = [m for m in state.members.values() if not m.is_helper and m.corpus.num_samples]
    known = [member for member in known if member.state in PRESENT] or known
    if not known:
        return None
    say = say_of(known, state.committed_round, unchecked(state))
    return heaviest(say, {m.node_id: m.corpus for m in known})


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
