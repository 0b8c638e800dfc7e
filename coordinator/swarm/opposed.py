"""Of whom nothing counts, round after round, as most of the others point against it: it sits out. Pure.

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

from coordinator.swarm.events import Turn
from coordinator.swarm.members import Against, Member
from coordinator.swarm.standing import MOST_ROUNDS_OUT
from coordinator.swarm.state import Round, Say, present_participants
from coordinator.swarm.weighing import is_enough, say_in, weight_of
from protocol.wire.rounds import Commit, NodeId

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
        back_at_round=number + 1 + _rounds_out(known.num_times_out),
    )


def _rounds_out(num_times_before: int) -> int:
    return min(MOST_ROUNDS_OUT, FEWEST_ROUNDS_OUT << num_times_before)


def without_rounds_undone(known: Against, *, after: int, newest: int) -> Against:
    """What a member is still known for when rounds are undone, which may all have spoken against it.

    So nobody is excused of more than these, though an accomplice has a run go back.
    """
    out_since = (
        known.back_at_round - _rounds_out(known.num_times_out - 1) if known.num_times_out else 0
    )
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
