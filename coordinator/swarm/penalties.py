"""What keeps a member from slices, audits or plans for a while, or has it put out. Pure.

A ruling puts a member that is convicted in quarantine, with the evidence. A reducer whose results are in
doubt, or reached too few, stays away from slices for 1, 2, 4, … rounds. Of whom nothing counts, round after
round, as most of the others point against it, sits out.

Reducers leave out whom most contributions to a slice point against, and who is many times as long
(node.exchange.screening). Who goes on so lies, has other data, or a device that computes wrong. What it
is leased nobody trains, its link is planned for, and each round is another chance. Nobody can tell these
apart, and data that only one member has look so in the end, too. So it is a member as before, and no plan
counts on it for 16, 32, 64 rounds. Then one round shows whether it agrees.

A round speaks against a member when reducers leave it out of more than half of what each of them made, and

- they have more than half of the confirmed weight of all that take part and are here, itself among them; or
  they are helpers that made more than half of the round, and two reducers at least;
- all whom it speaks against have less than half of that weight together. Else nobody says who is right;
- of what it is about, slices count to which members with LEAST_NAMED of that weight have contributed: with
  many late, a few liars could be most of what a reducer measures by.

What each contributor's word counts is in the plan, by the same confirmed work: many keys without work are
nothing to compare with.

A round in which most of what others make takes something of a member counts four times for it. So who is
left out now and then stays, and nobody is excused by keeping what it should contribute.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from coordinator.swarm.events import QuarantineAsked, Turn
from coordinator.swarm.members import BARRED, Against, Conviction, Member, Work
from coordinator.swarm.standing import MOST_ROUNDS_OUT, rounds_out
from coordinator.swarm.state import (
    Round,
    Say,
    is_present,
    name_of,
    next_round,
    present_participants,
)
from coordinator.swarm.weighing import is_enough, say_in, weight_of
from protocol.wire.rounds import Commit, NodeId

MOST_CONTRADICTED = 2
"""So often a member's findings are contradicted until its confirmed work counts no more."""

MOST_AGAINST = 16
"""So many rounds in a row that speak against a member have it sit out."""

IN_FAVOUR = 4
"""So many of them are forgotten for each round that does not."""

FEWEST_ROUNDS_OUT = 16
"""For the first time."""

MOST_NAMED = 4
"""Who sit out, in a plan's reason."""

LEAST_NAMED = 0.75
"""Of the weight, which a slice's contributors must have. So liars need three eighths to be half of them."""


def convict(turn: Turn, node_id: NodeId, reason: str, evidence: tuple[str, ...]) -> None:
    """Has a member put in quarantine, once, unless it is barred already."""
    strike(turn, node_id)
    state, member = turn.state, turn.state.members.get(node_id)
    is_asked = any(conviction.node_id == node_id for conviction in state.convicted)
    if member is None or member.state in BARRED or is_asked:
        return
    conviction = Conviction(
        node_id=node_id, node_name=name_of(state, node_id), reason=reason, evidence=evidence
    )
    turn.state = replace(state, convicted=(*state.convicted, conviction))
    turn.act(QuarantineAsked(conviction=conviction))


def sound_convictions(turn: Turn) -> None:
    """Has the edge rule what follows from convictions that a coordinator before this one came to."""
    for conviction in turn.state.convicted if turn.state.awaited is None else ():
        turn.act(QuarantineAsked(conviction=conviction))


def strike(turn: Turn, node_id: NodeId) -> None:
    """Keeps a member from slices and audits for a while, twice as long each time."""
    if (member := turn.state.members.get(node_id)) is not None:
        num_disputed = member.audits.num_disputed + 1
        back_at = next_round(turn.state) + rounds_out(num_disputed)
        _note(turn, member, num_disputed=num_disputed, back_at_round=back_at)


def contradict(turn: Turn, node_id: NodeId) -> None:
    """A member's finding is not what more than half of the weight found: on repeat it loses its say."""
    if (member := turn.state.members.get(node_id)) is not None:
        num_contradicted = member.audits.num_contradicted + 1
        if num_contradicted >= MOST_CONTRADICTED:
            member = replace(member, work=Work())
        _note(turn, member, num_contradicted=num_contradicted)


def was_silent(turn: Turn, node_id: NodeId) -> None:
    """Who is asked and does not answer lets results pass unseen: it is asked more and more seldom."""
    member, planned = turn.state.members.get(node_id), next_round(turn.state)
    if member is None or member.audits.audits_from_round > planned:
        return  # it is gone, or was silent on another slice too
    silent = member.audits.num_unanswered + 1
    from_round = planned + rounds_out(silent)
    _note(turn, member, num_unanswered=silent, audits_from_round=from_round)


def rest_of_void(turn: Turn, closed: Round, commit: Commit) -> None:
    """Keeps those from slices for a while whose results reached too few, while results of others did.

    Its link may be slow, its bytes may not decode, or it keeps them to accomplices: members cannot tell these
    apart, and the slice is lost each time. Where as many slices are void as not, the network is at fault.
    """
    void = [closed.slices[o.index] for o in commit.slices if o.digest is None]
    if 2 * len(void) >= len(commit.slices):
        return
    made = {p.slice.reducer_id for p in void if p.digest is not None and not p.refused}
    for node_id in sorted(made):
        if is_present(turn.state, node_id):
            rest(turn, node_id, closed.number)


def rest(turn: Turn, node_id: NodeId, number: int) -> None:
    """Keeps a member from slices for 1, 2, 4, … rounds, whose result of a round did not reach the others."""
    member = turn.state.members.get(node_id)
    if member is None or (member.audits.num_void and member.audits.void_round == number):
        return
    num_void = member.audits.num_void + 1 if is_void_again(member, number) else 1
    back_at = max(member.audits.back_at_round, next_round(turn.state) + rounds_out(num_void))
    _note(turn, member, num_void=num_void, void_round=number, back_at_round=back_at)


def note_unmade(turn: Turn, node_id: NodeId, number: int) -> None:
    """Remembers that others had to make a slice which this reducer had not made when they had all."""
    if (member := turn.state.members.get(node_id)) is not None:
        _note(turn, member, unmade_round=number)


def _note(turn: Turn, member: Member, **changes: int) -> None:
    turn.put_member(replace(member, audits=replace(member.audits, **changes)))


def is_void_again(member: Member, number: int) -> bool:
    """Whether a result of the member reached too few in a round not long before this one."""
    record = member.audits
    return record.num_void > 0 and 0 < number - record.void_round <= 2 * MOST_ROUNDS_OUT


def may_reduce(member: Member, number: int) -> bool:
    """Whether a plan of this round may have the member reduce."""
    return member.audits.back_at_round <= number


# Whom most of the others point against


def note_contradicted(turn: Turn, current: Round, commit: Commit) -> None:
    """Counts a round that closes now for or against its contributors, and says who sits out the next ones."""
    state = turn.state
    among = present_participants(state, current)
    reducers = [progress.slice.reducer_id for progress in current.slices]
    helpers = {n for n in reducers if n in state.members and state.members[n].is_helper}
    against = spoken_against(
        commit, reducers, helpers=helpers, say=say_in(state, current, among), among=among
    )
    for node_id in sorted(_named(commit)):
        member = turn.state.members.get(node_id)
        if member is None or (node_id not in against and member.against == Against()):
            continue
        known = member.against
        if node_id in against:
            known = replace(known, rounds=known.rounds + 1)
            if known.rounds >= MOST_AGAINST:
                known = _sitting_out(known, commit.round)
        elif _is_taken(commit, reducers, node_id):
            known = replace(known, rounds=max(0, known.rounds - IN_FAVOUR))
            known = known if known.rounds else Against()
        turn.put_member(replace(member, against=known))


def _sitting_out(known: Against, number: int) -> Against:
    """One more round against it has it sit out again, twice as long."""
    return Against(
        rounds=MOST_AGAINST - 1,
        num_times_out=known.num_times_out + 1,
        back_at_round=number + 1 + rounds_out(known.num_times_out + 1, first=FEWEST_ROUNDS_OUT),
    )


def without_rounds_undone(known: Against, *, after: int, newest: int) -> Against:
    """What a member is still known for when rounds are undone, which may all have spoken against it.

    So nobody is excused of more than these, though an accomplice has a run go back.
    """
    out_since = 0
    if known.num_times_out:
        out_since = known.back_at_round - rounds_out(known.num_times_out, first=FEWEST_ROUNDS_OUT)
    if known.back_at_round > after + 1 and out_since <= after + 1:
        return known  # it has had no part in what is undone
    if out_since > after + 1:
        num_before = known.num_times_out - 1
        known = Against(
            rounds=MOST_AGAINST,
            num_times_out=num_before,
            back_at_round=after + 1 if num_before else 0,
        )
        newest = out_since - 1
    known = replace(known, rounds=max(0, known.rounds - (newest - after)))
    return known if known.rounds or known.num_times_out else Against()


def sitting_out_in_words(members: Iterable[Member], number: int) -> str:
    """What a plan's reason adds where some sit out."""
    until = [(m.node_name, m.against.back_at_round) for m in members]
    out = [f"{name} (until round {back_at})" for name, back_at in until if back_at > number]
    if not out:
        return ""
    more = f" and {len(out) - MOST_NAMED} more" if len(out) > MOST_NAMED else ""
    names = ", ".join(out[:MOST_NAMED])
    return f"; without {names}{more}, as most of the others point against what came of them"


def spoken_against(
    commit: Commit,
    reducers: Sequence[NodeId],
    *,
    helpers: Collection[NodeId],
    say: Say,
    among: Collection[NodeId],
) -> frozenset[NodeId]:
    """Whom a round speaks against. `reducers` made its slices, in order; `among` take part and are here."""
    made: dict[NodeId, int] = {}
    left_out: dict[NodeId, dict[NodeId, int]] = {}
    whole = weight_of(say, among)
    weights_of: dict[int, int] = {}  # contributors, which are mostly the same for all slices
    for reducer_id, outcome in zip(reducers, commit.slices, strict=True):
        if outcome.digest is None:
            continue
        made[reducer_id] = made.get(reducer_id, 0) + outcome.num_elements
        of = id(outcome.contributors)
        if of not in weights_of:
            names = {contributor.node_id for contributor in outcome.contributors}
            weights_of[of] = weight_of(say, names.intersection(among))
        if weights_of[of] < LEAST_NAMED * whole:
            continue
        for contributor, factor in zip(outcome.contributors, outcome.factors, strict=False):
            if not factor and contributor.node_id != reducer_id:
                by = left_out.setdefault(contributor.node_id, {})
                by[reducer_id] = by.get(reducer_id, 0) + outcome.num_elements
    if not left_out or not say.is_confirmed:
        return frozenset()
    half, here, found = sum(made.values()) / 2, frozenset(among), set()
    for node_id, by in left_out.items():
        saying = {n for n, num_elements in by.items() if 2 * num_elements > made[n]}
        of_helpers = sum(made[n] for n in saying.intersection(helpers))
        is_said_by_helpers = of_helpers > half and len(saying) > 1
        if is_said_by_helpers or is_enough(say, saying & here, among):
            found.add(node_id)
    is_most = 2 * weight_of(say, found & here) >= whole
    return frozenset() if is_most else frozenset(found)


def _is_taken(commit: Commit, reducers: Sequence[NodeId], node_id: NodeId) -> bool:
    made = taken = 0
    for reducer_id, outcome in zip(reducers, commit.slices, strict=True):
        if outcome.digest is not None and reducer_id != node_id:
            made += outcome.num_elements
            taken += outcome.num_elements if outcome.factor_of(node_id) > 0 else 0
    return 2 * taken > made


def _named(commit: Commit) -> set[NodeId]:
    """Who has contributed to anything that was committed; mostly it is one set for all slices."""
    sets = {id(outcome.contributors): outcome.contributors for outcome in commit.slices}
    return {contributor.node_id for each in sets.values() for contributor in each}
