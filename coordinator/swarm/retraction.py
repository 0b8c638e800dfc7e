"""History that is taken back without being asked: what is lost, what is false, what nobody follows. Pure.

Every node that held a result may die right after the commit. The others can then never apply it,
and would wait for ever. So the round is committed once more without the slices that are lost, under
a new incarnation number; who had applied the first version goes back to the state before it.

Or a state was taken for agreed that nobody holds: one node alone reported it in time, and it was
wrong. Then the others agree anew, and nothing is lost.

A result that is proven false has the run go back to before its round, by the ruling that the run owner would
make, or as near as nodes reach.

A going back that nobody can follow is withdrawn, and the run has what it had. Who says that it keeps a
state may lie, and a disk may fail. So nodes keep what they hold until they have the state that the run went
back to, and no round opens before enough of them do. Where they do not for as long as the longest round
takes, a ruling withdraws the going back. Nodes then bring the commits of the rounds that hold again, as they
do to an older copy of the database, and the run owner says what happens next. It ends: each time there is one
going back less, and the run makes none by itself while it is paused.
"""

from collections.abc import Sequence
from dataclasses import replace

from coordinator.swarm.agreement import agree_on, commits_wanted, judge
from coordinator.swarm.books import book, unbook, without_evaluations_since
from coordinator.swarm.evaluation import sound_alarm
from coordinator.swarm.events import Tell, Turn, WithdrawalAsked
from coordinator.swarm.going_back import are_believed, latest_in_reach, possible_in_words
from coordinator.swarm.members import Member, MemberState
from coordinator.swarm.state import (
    Alarm,
    ClosedRound,
    Round,
    SwarmState,
    Unfollowed,
    is_present,
    members_of,
    name_of,
    names_of,
    num_of,
    present_members,
    ready_members,
)
from coordinator.swarm.weighing import heaviest, is_enough, say_of, unchecked
from protocol.errors import UsageError
from protocol.trust.rulings import Ruling, undoes
from protocol.wire.messages import RoundCommitted
from protocol.wire.rounds import WHOLE, Digest, NodeId, SliceOutcome


def lost_slices(state: SwarmState, current: Round) -> list[SliceOutcome]:
    """The committed slices of an applied round whose result no present member holds.

    None are lost as long as a present member has applied the round: it supplies the state.
    """
    assert current.commit is not None
    if any(is_present(state, node_id) for node_id in current.applied):
        return []
    return [
        outcome
        for outcome in current.commit.slices
        if outcome.digest is not None
        and not any(
            results.get(outcome.index) == outcome.digest and is_present(state, node_id)
            for node_id, results in current.held.items()
        )
    ]


def retract_lost(turn: Turn) -> bool:
    """Commits the round in flight once more without what is lost; False when nothing is.

    Not while nobody is here: who comes back first may hold it all. And not before the time that the
    run file gives for applying, however short nodes usually are about it.
    """
    current = turn.state.open_round
    assert current is not None and current.commit is not None
    if turn.now < current.committed_at + turn.state.rules.apply_seconds:
        return False
    lost = {outcome.index for outcome in lost_slices(turn.state, current)}
    if not lost or not present_members(turn.state):
        return False
    before = current.commit
    incarnation = turn.state.incarnation + 1
    commit = replace(
        before,
        incarnation=incarnation,
        slices=tuple(
            _voided(turn.state, outcome) if outcome.index in lost else outcome
            for outcome in before.slices
        ),
    )
    *before_it, closed = turn.state.recent
    closed = replace(
        closed,
        commit=commit,
        tokens=sum(commit.tokens.values()),
        reason=f"{num_of(len(lost), 'slice')} of {len(commit.slices)} taken back: "
        "every node that held the result is gone",
    )
    if closed.is_void:
        commit = replace(commit, outer_digest=before.base_digest)
        closed = replace(closed, commit=commit)
        before_it = list(turn.state.earlier)  # whose state nobody may hold either
    turn.state = replace(
        book(unbook(turn.state, before), commit),
        incarnation=incarnation,
        open_round=replace(
            current,
            commit=commit,
            apply_deadline=turn.now + turn.state.rules.apply_seconds,
            applied={},
        ),
        recent=(*before_it, closed),
    )
    turn.act(Tell(message=RoundCommitted(commit=commit)))
    return True


def supply_anew(turn: Turn) -> None:
    """Goes on from another state when nobody here holds the committed one, between two rounds.

    From the one that most nodes hold alike after the newest round, if there is one: what the
    swarm took for agreed was a mistake, or a lie. Otherwise from the state before that round, if
    somebody holds it: all that had applied it may be gone before the others could fetch it. They
    are given as long as nodes are given to apply a commit. If neither, and those who had most of the
    say stay away for the longest round's time beside that, what most of who is here hold alike. Void
    rounds after it go with it, for they left its state as it was, and so do the held-out losses of
    the state that is no more.
    Never more than that: nodes that are further behind may simply have just begun, and those who
    are gone may come back.
    """
    state = turn.state
    goes_on_at = _goes_on_after(state)
    if goes_on_at is None:
        if state.unsupplied_since is not None:
            turn.state = replace(state, unsupplied_since=None)
    elif state.unsupplied_since is None:
        turn.state = replace(state, unsupplied_since=turn.now)
    elif turn.now < state.unsupplied_since + goes_on_at:
        return
    else:
        agreed = goes_on_from(state)
        newest = state.recent[0].commit
        state = without_evaluations_since(state, newest.round)
        turn.state, turn.has_new_state = replace(state, unsupplied_since=None), True
        if agreed is not None:
            _agree_anew(turn, agreed)
        else:
            _retract_newest(turn)


def takes_back_at(state: SwarmState) -> float | None:
    """When `supply_anew` goes on from another state, if nobody comes or goes until then."""
    seconds = _goes_on_after(state)
    if state.unsupplied_since is None or seconds is None:
        return None
    return state.unsupplied_since + seconds


def _goes_on_after(state: SwarmState) -> float | None:
    """For how long nobody holds the committed state before the run goes on from another; None: never."""
    if not _is_unsupplied(state):
        return None
    if held_by_most(state) is not None or _is_base_here(state):
        return state.rules.apply_seconds
    if held_by_most(state, of_all=False) is not None:
        return state.rules.apply_seconds + state.rules.commit_seconds
    return None


def waits_for_a_holder(state: SwarmState) -> bool:
    """Whether nobody here holds the committed state, nor what would have the run go on from another."""
    return _is_unsupplied(state) and _goes_on_after(state) is None


def goes_on_from(state: SwarmState) -> Digest | None:
    """The state that is agreed on anew when nobody returns; None: the newest round is taken back."""
    agreed = held_by_most(state)
    return agreed or (None if _is_base_here(state) else held_by_most(state, of_all=False))


def _is_unsupplied(state: SwarmState) -> bool:
    """Whether a round that is not void has led to a state that nobody here holds."""
    if state.open_round or state.outer_digest is None or state.is_finished or not state.recent:
        return False
    if unfollowed(state) is not None:  # what becomes of that is decided there
        return False
    is_here = any(_holds_it(state, member) for member in present_members(state))
    return not state.recent[0].is_void and not is_here


def _is_base_here(state: SwarmState) -> bool:
    newest = state.recent[0].commit
    before = (newest.round - 1, newest.base_digest)
    return any((m.outer_round, m.outer_digest) == before for m in present_members(state))


def held_by_most(state: SwarmState, *, of_all: bool = True) -> Digest | None:
    """What those that are here hold alike after the newest round, with enough of the say of its nodes.

    Of all of them, or else of those that are here. So much weight decides a digest in the first place,
    joiners' beside the participants': nobody gets more say than before. Two at least: one alone may
    itself have gone astray.
    """
    newest = state.recent[0].commit
    held = {
        member.node_id: member.outer_digest
        for member in present_members(state)
        if member.outer_round == newest.round and member.outer_incarnation >= newest.incarnation
    }
    if len(held) < 2:
        return None
    known = members_of(state)
    among = known if of_all else frozenset(known.present_ids)
    named = {a.node_id for a in newest.assignments if a.node_id in among}
    voters = sorted(named | held.keys())
    say = say_of((state.members[n] for n in voters), newest.round, unchecked(state))
    digest = heaviest(say, held)
    alike = [node_id for node_id, each in held.items() if each == digest]
    return digest if len(alike) >= 2 and is_enough(say, alike, voters) else None


def _holds_it(state: SwarmState, member: Member) -> bool:
    """Whether it holds the committed state.

    Void rounds leave the state as it is, so who has yet to apply those holds it too. Who says to hold a later
    one may lie, or hold one that is undone: nobody waits for that, for what is taken back holds again when a
    member brings its commits.
    """
    newest = state.recent[0].commit
    at = member.outer_round, member.outer_digest
    return member.state is MemberState.READY or at == (newest.round, newest.outer_digest)


def _agree_anew(turn: Turn, digest: Digest) -> None:
    """The newest round's commit stays what it is; only what nodes have come to by it is put right."""
    newest, *later = turn.state.recent
    newest = replace(
        newest,
        commit=replace(newest.commit, outer_digest=digest),
        reason=f"{newest.reason}; agreed on anew: nobody held the state that had been agreed on",
    )
    turn.state = replace(turn.state, recent=(newest,))
    if later:
        _commit_void(turn, later, base=digest)
    agree_on(turn, digest)


def _retract_newest(turn: Turn) -> None:
    newest, *later = turn.state.recent
    newest = replace(
        newest, reason="taken back: every node that held the state after it is gone", tokens=0
    )
    turn.state = replace(turn.state, recent=())
    base = newest.commit.base_digest
    _commit_void(turn, (newest, *later), base=base)
    turn.state = replace(turn.state, outer_digest=base)


def _commit_void(turn: Turn, rounds: Sequence[ClosedRound], *, base: Digest) -> None:
    """Commits the newest rounds once more with nothing in them, on another state."""
    state = turn.state
    state = replace(state, incarnation=state.incarnation + 1)
    for closed in rounds:
        commit = replace(
            closed.commit,
            incarnation=state.incarnation,
            base_digest=base,
            outer_digest=base,
            slices=tuple(_voided(state, outcome) for outcome in closed.commit.slices),
        )
        state = book(unbook(state, closed.commit), commit)
        state = replace(state, recent=(*state.recent, replace(closed, commit=commit)))
        turn.act(Tell(message=RoundCommitted(commit=commit)))
    turn.state = state


def _voided(state: SwarmState, outcome: SliceOutcome) -> SliceOutcome:
    if outcome.digest is None:
        return outcome
    holders = names_of(state, outcome.holder_ids)
    return replace(
        outcome,
        digest=None,
        contributors=(),
        contributions=(),
        factors=(),
        norm=0.0,
        factor=WHOLE,
        holder_ids=(),
        void_reason=f"taken back: all that held it are gone ({holders})",
    )


# What is false


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


# A going back that nobody follows


def unfollowed(state: SwarmState) -> Ruling | None:
    """The latest going back, while not enough members hold the state that it led to."""
    if not state.rolled_back or state.is_finished or state.open_round is not None:
        return None
    ruling = state.rolled_back[-1]
    newest = state.recent[-1].commit.incarnation if state.recent else 0
    is_where_it_led = state.committed_round == ruling.from_round - 1
    if (
        not is_where_it_led
        or newest >= ruling.incarnation
        or are_believed(state, _ready_ids(state))
    ):
        return None
    return ruling


def watch_going_back(turn: Turn) -> None:
    """Asks for a withdrawal once the time is over, and anew where that could not be ruled.

    The time begins anew with each member that first comes to hold the state, and does not run while one holds
    it that the run owner believes. What can be had instead somebody must hold: while nobody does, whoever
    returns may hold either.
    """
    state = turn.state
    ruling = None if state.stopped is not None else unfollowed(state)
    first = None if ruling is None else _first_to_go(state)
    if ruling is None or first is None or _gives_it(state, ruling):
        if state.unfollowed is not None:
            turn.state = replace(state, unfollowed=None)
        return
    ready = _ready_ids(state)
    known = state.unfollowed
    if known is None or known.incarnation != ruling.incarnation:
        known = None
    ever_ready = frozenset(ready if known is None else (*ready, *known.ready_ids))
    now = Unfollowed(
        since=turn.now, incarnation=ruling.incarnation, ready_ids=tuple(sorted(ever_ready))
    )
    if known is None or now.ready_ids != known.ready_ids:
        turn.state = replace(state, unfollowed=now)
    elif turn.now >= known.since + _seconds(state):
        turn.state = replace(state, unfollowed=now)
        turn.act(_asked(state, ruling, first))


def withdraws_at(state: SwarmState) -> float | None:
    """When the latest going back is withdrawn, unless more members come to hold its state."""
    return None if state.unfollowed is None else state.unfollowed.since + _seconds(state)


def refuse_withdrawal(state: SwarmState, incarnation: int) -> None:
    """Raises UsageError where the run has gone on from what it went back to, or never went."""
    current = state.open_round
    newest = state.recent[-1].commit.incarnation if state.recent else 0
    has_gone_on = (current is not None and current.commit is None) or newest >= incarnation
    if has_gone_on or all(one.incarnation < incarnation for one in state.rolled_back):
        raise UsageError(
            "there is no going back to withdraw",
            next_step="'atoll status' shows how the run stands",
        )


def withdrawn(turn: Turn) -> None:
    """The ruling is made: nodes that hold what is undone no more are asked for its commits."""
    turn.state = replace(turn.state, unfollowed=None)
    for member in present_members(turn.state):
        judge(turn, member.node_id, is_news=True)
    turn.act(Tell(message=commits_wanted(turn.state)))  # also those that say to hold less


def unfollowed_in_words(state: SwarmState, now: float) -> str:
    """What a going back waits for, and what can be typed; empty where it waits for nothing."""
    ruling = unfollowed(state)
    if ruling is None:
        return ""
    ready, round = ready_members(state), ruling.from_round - 1
    if _gives_it(state, ruling):
        name = name_of(state, ruling.node_id)
        return (
            f"the others fetch the state after round {round} from {name}; if it does not give it, "
            f"'atoll nodes quarantine {name}' withdraws the going back"
        )
    who = f"{ready[0].node_name} alone holds" if len(ready) == 1 else "too few nodes hold"
    waits = f"{who if ready else 'nobody holds'} the state after round {round} that the run went back to"
    at = withdraws_at(state)
    if at is None:
        return f"{waits}; start a node that keeps it"
    return f"{waits}: unless more do, that is withdrawn, {max(0.0, at - now):.0f} s left"


def _gives_it(state: SwarmState, ruling: Ruling) -> bool:
    """Whether the member holds the state that the run owner believed; others may need long to fetch it."""
    believed = state.members.get(ruling.node_id)
    return believed is not None and believed.state is MemberState.READY


def _ready_ids(state: SwarmState) -> tuple[NodeId, ...]:
    return tuple(member.node_id for member in ready_members(state))


def _seconds(state: SwarmState) -> float:
    return state.rules.commit_seconds + state.rules.apply_seconds


def _first_to_go(state: SwarmState) -> Ruling | None:
    """The first going back of those by which the newest state is undone that somebody here holds."""
    newest, first = (-1, -1), None
    for member in present_members(state):
        held = member.outer_incarnation, member.outer_round
        undoing = [r for r in state.rolled_back if undoes([r], held[1], held[0])]
        if undoing and held > newest:
            newest, first = held, min(undoing, key=lambda r: r.incarnation)
    return first


def _asked(state: SwarmState, ruling: Ruling, first: Ruling) -> WithdrawalAsked:
    round, last = ruling.from_round - 1, max(r.last_round for r in state.rolled_back)
    rounds = possible_in_words(replace(state, committed_round=last))
    reason = f"too few nodes came to hold the state after round {round} in {_seconds(state):.0f} s; {rounds}"
    return WithdrawalAsked(withdrawn=first, reason=reason)
