"""What follows from a proven lie, from a result that nobody can make again, and from contradiction. Pure.

A ruling puts a member that is convicted in quarantine, with the evidence. The run goes back to before the
round, by the ruling that the run owner would make, or as near as nodes reach. A reducer whose results are in
doubt stays away from slices for 1, 2, 4, … rounds.

The error that a reducer adds must be what a committed result of its own has left.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from coordinator.swarm.evaluation import sound_alarm
from coordinator.swarm.events import LeftOutProven, QuarantineAsked
from coordinator.swarm.members import BARRED, PRESENT, Against, Member, Work
from coordinator.swarm.reach_back import latest_in_reach
from coordinator.swarm.standing import MOST_ROUNDS_OUT, rounds_out
from coordinator.swarm.state import (
    Alarm,
    Conviction,
    KeptError,
    Round,
    Say,
    SliceProgress,
    SwarmState,
)
from coordinator.swarm.turn import Turn, is_present, name_of, present_participants
from coordinator.swarm.weighing import is_enough, say_in, weight_of
from protocol.wire.rounds import WHOLE, Commit, NodeId

MOST_CONTRADICTED = 2
"""So often a member's findings are contradicted until its confirmed work counts no more."""


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


def left_out(turn: Turn, event: LeftOutProven) -> None:
    """A reducer has left out a contribution that it gave a receipt for; heard until its round is settled."""
    omission, current = event.omission, turn.state.open_round
    if current is None or current.number != omission.round:
        return
    progress = current.slices[omission.slice_index]
    place = progress.slice.reducer_id, progress.digest
    is_known = any(c.node_id == omission.reducer_id for c in turn.state.convicted)
    if place != (omission.reducer_id, omission.result) or progress.refused or is_known:
        return
    name, left = (name_of(turn.state, n) for n in (omission.reducer_id, omission.contributor_id))
    reason = (
        f"it left {left} out of slice {omission.slice_index} of round {omission.round}, whose "
        f"contribution it had signed a receipt for"
    )
    convict(turn, omission.reducer_id, reason, event.evidence)
    commit, index = current.commit, omission.slice_index
    if commit is not None and commit.slices[index].digest is not None:
        go_back_before(turn, omission.round, f"{name} is convicted: {reason}", event.evidence)
    elif commit is None:
        turn.put_slice(current, replace(progress, refused=f"{name} is convicted: {reason}"))


def sound_convictions(turn: Turn) -> None:
    """Has the edge rule what follows from convictions that a coordinator before this one came to."""
    for conviction in turn.state.convicted if turn.state.awaited is None else ():
        turn.act(QuarantineAsked(conviction=conviction))


def go_back_before(turn: Turn, round: int, reason: str, evidence: tuple[str, ...]) -> None:
    """Wants the run to go back to before the round, once it shows how near to that nodes can get."""
    state, round = turn.state, round - 1
    if state.stopped is not None or state.is_finished:
        return
    if (pending := state.alarm) is not None:  # the earlier of both undoes what the other one would
        round = round if pending.round is None else min(round, pending.round)
        reason = f"{pending.reason}; {reason}"
        evidence = pending.evidence or evidence
    until = turn.now + state.rules.lease_seconds
    alarm = Alarm(round=round, reason=reason, until=until, evidence=evidence)
    turn.state = replace(state, alarm=alarm, end_waits_until=None)


def decide_alarm(turn: Turn) -> None:
    """Has the run go back to before a false result, or as near as nodes reach; to nowhere, it pauses.

    What they reach they say with heartbeats, which come more seldom than quick rounds. Convicted members are
    put out first: what they say of themselves counts for nothing.
    """
    alarm = turn.state.alarm
    if alarm is None or alarm.until is None or alarm.round is None or turn.state.convicted:
        return
    reached = latest_in_reach(turn.state, alarm.round)
    if 0 < alarm.round != reached and turn.now < alarm.until:
        return
    reason = alarm.reason
    if reached is None:
        reason = f"{reason}, and no node that is here can go back to before that round"
    sounded = Alarm(round=reached, reason=reason, evidence=alarm.evidence)
    turn.state = replace(turn.state, alarm=sounded)
    sound_alarm(turn)


def strike(turn: Turn, node_id: NodeId) -> None:
    """Keeps a member from slices and audits for a while, twice as long each time."""
    member = turn.state.members.get(node_id)
    if member is None:
        return
    num_disputed = member.audits.num_disputed + 1
    back_at = next_round(turn.state) + rounds_out(num_disputed)
    record = replace(member.audits, num_disputed=num_disputed, back_at_round=back_at)
    turn.put_member(replace(member, audits=record))


def contradict(turn: Turn, node_id: NodeId) -> None:
    """A member's finding is not what more than half of the weight found: on repeat it loses its say."""
    member = turn.state.members.get(node_id)
    if member is None:
        return
    record = replace(member.audits, num_contradicted=member.audits.num_contradicted + 1)
    member = replace(member, audits=record)
    if record.num_contradicted >= MOST_CONTRADICTED:
        member = replace(member, work=Work())
    turn.put_member(member)


def rest_of_void(turn: Turn, closed: Round, commit: Commit) -> None:
    """Keeps those from slices for a while whose results reached too few, while results of others did.

    Its link may be slow, its bytes may not decode, or it keeps them to accomplices: members cannot tell these
    apart, and the slice is lost each time. Where as many slices are void as not, the network is at fault.
    """
    void = [o for o in commit.slices if o.digest is None]
    if 2 * len(void) >= len(commit.slices):
        return
    for node_id in sorted({closed.slices[o.index].slice.reducer_id for o in void}):
        own = [p for p in closed.slices if p.slice.reducer_id == node_id]
        is_reported = any(
            p.digest is not None and not p.refused and commit.slices[p.slice.index].digest is None
            for p in own
        )
        member = turn.state.members.get(node_id)
        if member is None or not is_reported or not is_present(turn.state, node_id):
            continue
        rest(turn, node_id, closed.number)


def rest(turn: Turn, node_id: NodeId, number: int) -> None:
    """Keeps a member from slices for 1, 2, 4, … rounds, whose result of a round did not reach the others."""
    member = turn.state.members.get(node_id)
    if member is None or (member.audits.num_void and member.audits.void_round == number):
        return
    record = member.audits
    num_void = record.num_void + 1 if is_void_again(member, number) else 1
    back_at = next_round(turn.state) + rounds_out(num_void)
    record = replace(
        record,
        num_void=num_void,
        void_round=number,
        back_at_round=max(record.back_at_round, back_at),
    )
    turn.put_member(replace(member, audits=record))


def note_unmade(turn: Turn, node_id: NodeId, number: int) -> None:
    """Remembers that others had to make a slice which this reducer had not made when they had all."""
    if (member := turn.state.members.get(node_id)) is not None:
        turn.put_member(replace(member, audits=replace(member.audits, unmade_round=number)))


def is_void_again(member: Member, number: int) -> bool:
    """Whether a result of the member reached too few in a round not long before this one."""
    record = member.audits
    return record.num_void > 0 and 0 < number - record.void_round <= 2 * MOST_ROUNDS_OUT


def may_reduce(member: Member, number: int) -> bool:
    """Whether a plan of this round may have the member reduce."""
    return member.audits.back_at_round <= number


def next_round(state: SwarmState) -> int:
    """The first round that has no plan yet."""
    current = state.open_round
    return 1 + (state.committed_round if current is None else current.number)


UNKNOWN_ROUNDS = 64
"""For so many rounds after history was taken back or learnt, reducers may keep what is not known here."""


def refuse_untraced(turn: Turn, index: int) -> None:
    """Refuses a result that was just reported if it has in it what no committed result has left."""
    state, current = turn.state, turn.current
    progress = current.slices[index]
    if progress.reduced is None or not (why := _untraced(state, current, progress)):
        return
    turn.put_slice(current, replace(progress, refused=why))
    strike(turn, progress.slice.reducer_id)


def errors_after(state: SwarmState, current: Round, commit: Commit) -> tuple[KeptError, ...]:
    """What reducers keep once a commit is settled: of each slice that it took, what its result left."""
    errors = list(state.errors)
    for progress, outcome in zip(current.slices, commit.slices, strict=True):
        if outcome.digest is None or progress.reduced is None:
            continue
        part = progress.slice
        first, past = part.start, part.start + part.num_elements
        errors = [
            e
            for e in errors
            if (e.reducer_id, e.fragment) != (part.reducer_id, current.fragment)
            or e.start >= past
            or e.start + e.num_elements <= first
        ]
        if progress.reduced.error_after:
            kept = KeptError(
                reducer_id=part.reducer_id,
                fragment=current.fragment,
                start=part.start,
                num_elements=part.num_elements,
                digest=progress.reduced.error_after,
            )
            errors.append(kept)
    return tuple(errors)


def forget_errors(state: SwarmState) -> SwarmState:
    """The state after history was taken back, or learnt from a node: who keeps what shows again."""
    return replace(
        state,
        errors=(),
        errors_unknown_until=state.committed_round + UNKNOWN_ROUNDS,
        errors_incarnation=state.incarnation,
    )


def _untraced(state: SwarmState, current: Round, progress: SliceProgress) -> str:
    """Why the error that a reducer adds is none that a committed result has left; empty when it is one."""
    told = progress.reduced
    assert told is not None
    if not told.error_before or state.errors_incarnation != state.incarnation:
        return ""  # after history was taken back, what is known here is of undone rounds
    part = progress.slice
    place = part.reducer_id, current.fragment, part.start, part.num_elements
    for error in state.errors:
        if (error.reducer_id, error.fragment, error.start, error.num_elements) == place:
            return "" if error.digest == told.error_before else _UNTRACED
    return "" if current.number <= state.errors_unknown_until else _UNTRACED


_UNTRACED = "its reducer adds an error that no committed result of its own has left"


# Of whom nothing counts, round after round, as most of the others point against it: it sits out.
#
# Reducers leave out whom most contributions to a slice point against, and who is many times as long
# (node.exchange.screening). Who goes on so lies, has other data, or a device that computes wrong. What it
# is leased nobody trains, its link is planned for, and each round is another chance. Nobody can tell these
# apart, and data that only one member has look so in the end, too. So it is a member as before, and no plan
# counts on it for 16, 32, 64 rounds. Then one round shows whether it agrees.
#
# A round speaks against a member when reducers leave it out of more than half of what each of them made, and
#
# - they have more than half of the confirmed weight of all that take part and are here, itself among them; or
#   they are helpers that made more than half of the round, and two reducers at least;
# - all whom it speaks against have less than half of that weight together. Else nobody says who is right;
# - of what it is about, slices count to which members with LEAST_NAMED of that weight have contributed: with
#   many late, a few liars could be most of what a reducer measures by.
#
# What each contributor's word counts is in the plan, by the same confirmed work: many keys without work are
# nothing to compare with.
#
# A round in which most of what others make takes something of a member counts four times for it. So who is
# left out now and then stays, and nobody is excused by keeping what it should contribute.


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

VOTES_WITHOUT_WORK = 0.75
"""All votes while nobody has confirmed work, of the whole: half of the whole is two thirds of them."""


def votes_of(say: Say | None, participants: Sequence[NodeId]) -> tuple[int, ...]:
    """What each participant's word counts about contributions, by what it weighed when the round opened.

    In 65,536ths: more than half of these is what decides (`is_enough`).
    """
    weights = [0 if say is None else say.weights.get(node_id, 0) for node_id in participants]
    if say is None or not any(weights):
        return ()
    votes = WHOLE if say.is_confirmed else int(VOTES_WITHOUT_WORK * WHOLE)
    ends = [votes * so_far // sum(weights) for so_far in accumulate(weights, initial=0)]
    return tuple(end - first for first, end in pairwise(ends))


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


def waiting_in_words(member: Member, number: int) -> str:
    """What a member is told that sits out when this round is planned next; empty for others."""
    if member.state not in PRESENT:
        return ""
    if member.against.back_at_round > number:
        return (
            f"waits until round {member.against.back_at_round}: most of the others point against what came "
            "of it; see whether its data, its model code and its devices are as theirs"
        )
    if member.standing.back_at_round > number:
        return (
            f"waits until round {member.standing.back_at_round}: it was too late in round "
            f"{member.standing.late_round}; see whether its link or its machine stalls"
        )
    return ""


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
