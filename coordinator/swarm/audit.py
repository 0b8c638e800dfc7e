"""Audits of reducers: which slices are made again, by whom, what follows from that and from any lie. Pure.

When a slice is committed it is drawn, or not, by a secret that members do not know: so none knows before it
reports whether anybody will look, and no round waits for who looks. One auditor makes the result again from
the signed contributions, which nodes keep for a few rounds. When it finds something else, or is not given
the inputs, others are asked too, and the weight of those present decides:

- More than half of it makes the same other result: the reducer is convicted, and put in quarantine.
- More than half of it cannot make the result again: nobody is convicted, but the reducer stays away from
  slices for 1, 2, 4, … rounds. So it is where the reducer is gone with what it made its result of.
- With either the run goes back to before that round, by the ruling that the run owner would make.
- More than half of it makes the same result: who has found otherwise is contradicted.
- Neither side has as much: the result stays, and reducer and first auditor stay away from slices and audits.

A slice is audited without a lot where its contributors find that the result does not lead where they do:
together they see what a mean of theirs cannot be (node.exchange.mean.agreement), and none is believed alone.
They are asked when the round is over, for who is first to hold results may be the liars.
So it is where a reducer has signed that a contribution does not decode, which
its sender has signed as well. When more than half of the weight finds the same, that one is put in
quarantine; and the reducer where they find another result.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from coordinator.swarm.events import Tell, Turn
from coordinator.swarm.going_back import latest_in_reach
from coordinator.swarm.members import BARRED, Audit, Finding, MemberState, Verdict
from coordinator.swarm.penalties import MOST_CONTRADICTED, contradict, convict, strike, was_silent
from coordinator.swarm.retraction import go_back_before
from coordinator.swarm.state import (
    Round,
    Say,
    SwarmState,
    is_held_by,
    is_present,
    name_of,
    names_of,
    next_round,
)
from coordinator.swarm.weighing import (
    drawn,
    is_enough,
    lot,
    say_of,
    unchecked,
    weight_of,
    weights_of,
)
from protocol.trust.evidence import of_findings, of_nonsense
from protocol.wire.findings import Audited
from protocol.wire.messages import AuditAsked
from protocol.wire.rounds import AUDIT_ROUNDS, Commit, NodeId

MOST_AUDITORS = 16
"""Asked for one slice, those of most weight: each fetches all its contributions from its reducer."""

STAGE_ROUNDS = 2
"""The first auditor, and then the others, have as long as the audited round took, so many times: with half
of AUDIT_ROUNDS both are done before nodes forget what they made their results of."""

LEAST_AGREEMENT = 0.25
"""Of what is usual in the round: a result that agrees less with its contributors is audited in any case."""

LEAST_SECONDS = 2.0
"""Each has so long at least."""


def draw(turn: Turn, closed: Round, commit: Commit) -> None:
    """Has slices of a round that was just committed audited: by lot, or where nonsense was contributed."""
    share = turn.state.rules.audited_share
    for index in range(len(commit.slices)):
        if audit := _audit_of(turn, closed, commit, index):
            audit = replace(audit, accused=_newly_accused(turn.state, audit))
            is_drawn = lot(turn.state, *_lot_of(audit, "is audited")) < share
            if is_drawn or (share > 0 and audit.accused):
                _begin(turn, audit)


def draw_what_leads_elsewhere(turn: Turn, closed: Round) -> None:
    """Has slices audited, once all hold the results, of which contributors find that they lead elsewhere."""
    commit = closed.commit
    if commit is None or not turn.state.rules.audited_share:
        return
    begun = {audit.slice.index for audit in turn.state.audits if audit.round == closed.number}
    earlier = [
        s for s in turn.state.norms if s.fragment == commit.fragment and s.round < commit.round
    ]
    reducers = {progress.slice.reducer_id for progress in closed.slices}
    is_first_of_one = not earlier and len(reducers) == 1
    for index in _leading_elsewhere(closed, commit, least_usual=1.0 if is_first_of_one else 0.0):
        if index not in begun and (audit := _audit_of(turn, closed, commit, index)):
            _begin(turn, replace(audit, leads_elsewhere=True))


def _audit_of(turn: Turn, closed: Round, commit: Commit, index: int) -> Audit | None:
    """That nobody has been asked for yet; None where nothing was committed that can be made again."""
    progress = closed.slices[index]
    if commit.slices[index].digest is None or progress.reduced is None:
        return None
    reducer = turn.state.members.get(progress.slice.reducer_id)
    return Audit(
        round=closed.number,
        slice=progress.slice,
        attempt=progress.attempt,
        reduced=progress.reduced,
        participants=tuple(a.node_id for a in closed.assignments),
        process_id=0 if reducer is None else reducer.process_id,
        seconds=max(LEAST_SECONDS, STAGE_ROUNDS * (turn.now - closed.opened_at)),
        auditor_ids=(),
        until=turn.now,
    )


def _begin(turn: Turn, audit: Audit) -> None:
    if may := _may_audit(turn.state, audit):
        weights = weights_of(_say(turn.state, audit), may)
        first = drawn(turn.state, may, weights, *_lot_of(audit, "auditor"))
        audit = replace(audit, auditor_ids=(first,), until=turn.now + audit.seconds)
        turn.state = replace(turn.state, audits=(*turn.state.audits, audit))
        _ask(turn, audit, audit.auditor_ids)


def audited(turn: Turn, node_id: NodeId, round: int, report: Audited) -> None:
    """Takes in a finding of who was asked, about the result that was reported; others change nothing."""
    for audit in pending_audits(turn.state):
        is_it = (audit.round, audit.slice.index, audit.reduced.digest) == (
            round,
            report.slice_index,
            report.digest,
        )
        if is_it and node_id in lacking(audit):
            finding = Finding(node_id=node_id, found=report.found, why=report.why, signed=report)
            _put(turn, replace(audit, findings=(*audit.findings, finding)))


def decide_audits(turn: Turn) -> None:
    """What follows from the findings that are here, and from the time."""
    for audit in pending_audits(turn.state):
        if audit.is_contested:
            _decide_contested(turn, audit)
        else:
            _decide_first(turn, audit)


def pending_audits(state: SwarmState) -> tuple[Audit, ...]:
    """Those that go on."""
    return tuple(audit for audit in state.audits if audit.verdict is None)


def lacking(audit: Audit) -> tuple[NodeId, ...]:
    """Who was asked and has not answered."""
    told = {finding.node_id for finding in audit.findings}
    return tuple(node_id for node_id in audit.auditor_ids if node_id not in told)


def order_of(audit: Audit, now: float) -> AuditAsked:
    """What its auditors are told, with the time that is left."""
    return AuditAsked(
        round=audit.round,
        reducer_id=audit.slice.reducer_id,
        attempt=audit.attempt,
        seconds=max(0.0, audit.until - now),
        reduced=audit.reduced,
    )


def next_audit_end(state: SwarmState) -> float | None:
    """When the next audit ends without an answer, or nodes have had the time to say how far they reach."""
    ends = [audit.until for audit in pending_audits(state)]
    if state.alarm is not None and state.alarm.until is not None and not state.convicted:
        ends.append(state.alarm.until)
    return min(ends, default=None)


def audits_in_words(state: SwarmState) -> str:
    """What audits have shown since the commit before, for a round's reason; empty when there was none."""
    said = []
    for audit in state.audits:
        if audit.verdict is not None:
            names = names_of(state, audit.auditor_ids)
            place = f"slice {audit.slice.index} of round {audit.round}"
            why = ", for contributors found that it leads elsewhere" * audit.leads_elsewhere
            said.append(f"{place} audited by {names}{why}: {audit.verdict}")
    return "; ".join(said)


# Which are audited, and by whom


def _leading_elsewhere(closed: Round, commit: Commit, *, least_usual: float) -> list[int]:
    """The slices, in order, whose results agree much less than others' with what was contributed to them.

    What a slice's contributors tell of it is one number, the median by their weight; so the larger half
    of the slices say what is usual in the round, and no few members draw an audit or avert it.

    Where one reducer has made a fragment's first results, these say nothing of each other, and no bound holds
    them. There is no kept error in them yet, so what is usual is 1, and of a result k times too long 1 / k.
    """
    told: dict[int, float] = {}
    for progress, outcome in zip(closed.slices, commit.slices, strict=True):
        if outcome.digest is not None:
            found = [
                (agreements[outcome.index], contributor.node_id)
                for contributor in outcome.contributors
                if outcome.index in (agreements := closed.agreements.get(contributor.node_id, {}))
                and is_held_by(contributor.node_id, closed, progress)
            ]
            if found:
                told[outcome.index] = _median_by_weight(closed.say, sorted(found))
    if not told:
        return []
    usual = max(least_usual, sorted(told.values())[len(told) // 2])
    return [i for i, each in told.items() if each < max(0.0, LEAST_AGREEMENT * usual)]


def _median_by_weight(say: Say | None, found: Sequence[tuple[float, NodeId]]) -> float:
    """The smallest of values in order up to which lies more than half of what those weigh that tell them."""
    weights = weights_of(say or Say(), (node_id for _, node_id in found))
    half = sum(weights) / 2
    for (value, _), upto in zip(found, accumulate(weights), strict=True):
        if upto > half:
            return value
    return found[-1][0]


def _newly_accused(state: SwarmState, audit: Audit) -> tuple[NodeId, ...]:
    """Whose contributions do not decode, as the reducer says, and whom no audit is about yet."""
    told = audit.reduced
    nothing_of = {c.node_id for c, f in zip(told.contributors, told.factors, strict=False) if not f}
    known = {n for other in state.audits if other.verdict is None for n in other.accused}
    known |= {n for other in state.audits if other.round == audit.round for n in other.accused}
    known |= {conviction.node_id for conviction in state.convicted}
    return tuple(
        n
        for n in told.undecodable
        if n in nothing_of
        and n not in known
        and n in state.members
        and state.members[n].state not in BARRED
    )


def _may_audit(state: SwarmState, audit: Audit) -> list[NodeId]:
    """Present participants beside the reducer that hold the state and stay; of other invites, if any."""
    reducer, planned = audit.slice.reducer_id, next_round(state)
    invite = state.members[reducer].invite_id if reducer in state.members else ""
    may = [
        member
        for node_id in _here(state, audit)
        if node_id not in (reducer, *audit.accused)
        and (member := state.members[node_id]).state is not MemberState.DIVERGED
        and not member.is_draining
        and not member.standing.is_on_trial
        and max(member.audits.back_at_round, member.audits.audits_from_round) <= planned
        and member.audits.num_contradicted < MOST_CONTRADICTED
    ]
    others = [member.node_id for member in may if member.invite_id != invite]
    return others or [member.node_id for member in may]


def _here(state: SwarmState, audit: Audit) -> list[NodeId]:
    """The round's participants that have a live session, in the order of their ids: who decides."""
    return [node_id for node_id in sorted(audit.participants) if is_present(state, node_id)]


def _say(state: SwarmState, audit: Audit) -> Say:
    return say_of((state.members[n] for n in _here(state, audit)), audit.round, unchecked(state))


def _lot_of(audit: Audit, of: str) -> tuple[object, ...]:
    result = audit.reduced.digest or b""
    return of, audit.round, audit.slice.index, audit.attempt, result.hex()


def _ask(turn: Turn, audit: Audit, node_ids: tuple[NodeId, ...]) -> None:
    turn.act(Tell(message=order_of(audit, turn.now), to=node_ids))


# What follows


def _decide_first(turn: Turn, audit: Audit) -> None:
    state, (first,) = turn.state, audit.auditor_ids
    if audit.findings and audit.findings[0].found == audit.reduced.digest:
        is_open = bool(audit.accused) and not _is_sure(turn, audit, [first])
        if not is_open or not _ask_others(turn, audit):
            _agree(turn, audit, [first])
        return
    if _has_lost_its_inputs(turn, audit):
        _end_without_inputs(turn, audit)
        return
    if not audit.findings:
        if _is_over(turn, audit) or not is_present(state, first):
            _end(turn, audit, Verdict.UNANSWERED)
            was_silent(turn, first)
        return
    if not _ask_others(turn, audit):
        _dispute(turn, audit)


def _ask_others(turn: Turn, audit: Audit) -> bool:
    """Has others than the first auditor make the result again; False where there is nobody."""
    state, (first,) = turn.state, audit.auditor_ids
    say = _say(state, audit)
    may = [node_id for node_id in _may_audit(state, audit) if node_id != first]
    jury = tuple(sorted(may, key=lambda n: (-say.weights.get(n, 0), n))[: MOST_AUDITORS - 1])
    if jury:
        asked = (first, *jury)
        audit = replace(audit, is_contested=True, auditor_ids=asked, until=turn.now + audit.seconds)
        _put(turn, audit)
        _ask(turn, audit, jury)
    return bool(jury)


def _decide_contested(turn: Turn, audit: Audit) -> None:
    claimed, reducer = audit.reduced.digest, audit.slice.reducer_id
    among = _here(turn.state, audit)
    say = _say(turn.state, audit)
    agreeing = [f.node_id for f in audit.findings if f.found == claimed]
    others: dict[bytes, list[NodeId]] = {}
    for finding in audit.findings:
        if finding.found and finding.found != claimed:
            others.setdefault(finding.found, []).append(finding.node_id)
    heaviest = max(others.values(), key=lambda nodes: weight_of(say, nodes), default=[])
    if len(heaviest) > 1 and is_enough(say, heaviest, among):
        _convict(turn, audit, heaviest, agreeing)
        return
    differing = [node_id for nodes in others.values() for node_id in nodes]
    failing = [f.node_id for f in audit.findings if f.found != claimed]
    right = {*agreeing, reducer}
    is_over = not lacking(audit) or _is_over(turn, audit)
    is_sure = _is_sure(turn, audit, agreeing)
    is_outweighed = weight_of(say, right) <= weight_of(say, differing)
    if is_sure or (agreeing and is_over and not is_outweighed):
        _agree(turn, audit, agreeing)
        for node_id in differing if is_sure else ():
            contradict(turn, node_id)
    elif not is_over:
        return
    elif _has_lost_its_inputs(turn, audit):
        _end_without_inputs(turn, audit)
    elif len(failing) > 1 and is_enough(say, failing, among):
        why = f"which {name_of(turn.state, reducer)} has reduced: {audit.findings[0].why}"
        _undo_unproven(
            turn, audit, f"{names_of(turn.state, failing)} could not make it again, {why}"
        )
    else:
        _dispute(turn, audit)


def _is_over(turn: Turn, audit: Audit) -> bool:
    is_forgotten = turn.state.committed_round >= audit.round + AUDIT_ROUNDS
    return turn.now >= audit.until or is_forgotten


def _has_lost_its_inputs(turn: Turn, audit: Audit) -> bool:
    """Whether nobody can know any more what the result was made of: its reducer has left, or began anew.

    One that is only silent may come back with it in the time that there is.
    """
    reducer = turn.state.members.get(audit.slice.reducer_id)
    if reducer is None or reducer.process_id != audit.process_id:
        return True
    is_gone = not is_present(turn.state, reducer.node_id)
    return is_gone and (reducer.state is MemberState.LEFT or _is_over(turn, audit))


def _end_without_inputs(turn: Turn, audit: Audit) -> None:
    """Nobody is convicted, for a machine may fail at any time; but what cannot be made again is undone.

    A liar would else only have to leave in time. Not where one member is left, for nobody is independent of
    both, nor where no node can go back so far: a run does not pause because a machine fails.
    """
    others = [n for n in _here(turn.state, audit) if n != audit.slice.reducer_id]
    if len(others) > 1 and latest_in_reach(turn.state, audit.round - 1) is not None:
        why = "is gone, or began anew, with what it was made of"
        _undo_unproven(turn, audit, f"{name_of(turn.state, audit.slice.reducer_id)} {why}")
        return
    _end(turn, audit, Verdict.UNANSWERED, why="its reducer is gone, or began anew")
    strike(turn, audit.slice.reducer_id)


def _convict(turn: Turn, audit: Audit, by: Sequence[NodeId], agreeing: Sequence[NodeId]) -> None:
    state, reducer = turn.state, audit.slice.reducer_id
    reason = (
        f"{names_of(state, by)} made slice {audit.slice.index} of round {audit.round} again and found "
        f"another result than it has signed"
    )
    name = name_of(state, reducer)
    _end(turn, audit, Verdict.CONVICTED, why=reason)
    for node_id in agreeing:
        contradict(turn, node_id)
    convict(turn, reducer, reason, _evidence(audit))
    go_back_before(turn, audit.round, f"{name} is convicted: {reason}", _evidence(audit))


def _is_sure(turn: Turn, audit: Audit, agreeing: Sequence[NodeId]) -> bool:
    """Whether these and the reducer have more than half of the weight."""
    right = {*agreeing, audit.slice.reducer_id}
    return bool(agreeing) and is_enough(_say(turn.state, audit), right, _here(turn.state, audit))


def _agree(turn: Turn, audit: Audit, agreeing: Sequence[NodeId]) -> None:
    """The same came out; where enough of the weight says so, whom the reducer accuses is convicted."""
    is_sure = _is_sure(turn, audit, agreeing)
    _end(turn, audit, Verdict.AGREED)
    for node_id in audit.accused if is_sure else ():
        _convict_of_nonsense(turn, audit, node_id, agreeing)


def _convict_of_nonsense(
    turn: Turn, audit: Audit, node_id: NodeId, agreeing: Sequence[NodeId]
) -> None:
    """It has signed a contribution that does not decode: nothing is undone, for nothing of it counted."""
    state = turn.state
    reason = (
        f"it signed a contribution to slice {audit.slice.index} of round {audit.round} that does not decode, "
        f"as {names_of(state, sorted({audit.slice.reducer_id, *agreeing}))} have found"
    )
    signed = [f.signed for f in audit.findings if f.signed is not None]
    agreed = [finding for finding in signed if finding.found == audit.reduced.digest]
    convict(turn, node_id, reason, of_nonsense(node_id, audit.reduced, agreed))


def _undo_unproven(turn: Turn, audit: Audit, why: str) -> None:
    reason = f"slice {audit.slice.index} of round {audit.round}: {why}"
    _end(turn, audit, Verdict.UNPROVEN, why=reason)
    strike(turn, audit.slice.reducer_id)
    go_back_before(turn, audit.round, reason, _evidence(audit))


def _evidence(audit: Audit) -> tuple[str, ...]:
    """What auditors have signed, for the ruling that follows."""
    signed = (finding.signed for finding in audit.findings)
    return of_findings(audit.reduced, [each for each in signed if each is not None])


def _dispute(turn: Turn, audit: Audit) -> None:
    """Neither side has enough weight: both parties neither reduce nor audit for a while."""
    first = audit.findings[0]
    why = f"{name_of(turn.state, first.node_id)} says: {first.why}"
    _end(turn, audit, Verdict.DISPUTED, why=why)
    for node_id in {audit.slice.reducer_id, audit.auditor_ids[0]}:
        strike(turn, node_id)


def _end(turn: Turn, audit: Audit, verdict: Verdict, *, why: str = "") -> None:
    _put(turn, replace(audit, verdict=verdict, why=why))


def _put(turn: Turn, audit: Audit) -> None:
    place = audit.round, audit.slice.index
    audits = (audit if (a.round, a.slice.index) == place else a for a in turn.state.audits)
    turn.state = replace(turn.state, audits=tuple(audits))
