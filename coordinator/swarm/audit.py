"""Audits of reducers: which slices are made again, by whom, and what follows from what is found. Pure.

When a slice is reduced it is drawn, or not, by a secret that members do not know: so none knows before it
reports whether anybody will look. One auditor makes the result again from the signed contributions. The
slice commits when that one agrees, or does not answer in time. When it finds something else, or is not given
the inputs, others are asked too. What more than half of the weight of those present says holds: the
reducer is convicted, or who has found otherwise is contradicted. Where neither side has as much, the
slice is void, and for 1, 2, 4, … rounds neither its reducer reduces nor its first auditor audits. So who
reduces falsely loses its place, and who audits falsely its say, and a few rounds' slices are all it costs.
"""

from collections.abc import Sequence
from dataclasses import replace

from blake3 import blake3

from coordinator.swarm.actions import QuarantineAsked, Tell
from coordinator.swarm.state import (
    Finding,
    KeptError,
    Member,
    MemberState,
    Round,
    RoundPhase,
    SliceAudit,
    SliceProgress,
    SwarmState,
    Verdict,
    Work,
)
from coordinator.swarm.turn import Turn, is_present, name_of, present_participants
from coordinator.swarm.weighing import is_enough, say_in, weight_of
from protocol.wire.messages import AuditAsked, Audited
from protocol.wire.rounds import Commit, NodeId

MOST_AUDITORS = 16
"""Asked for one slice, those of most weight: each fetches all its contributions from its reducer."""

LEAST_SECONDS = 1.0
"""With less time before the commit deadline nobody could make a result again."""

MOST_ROUNDS_OUT = 64
MOST_CONTRADICTED = 2
"""So often a member's findings are contradicted until its confirmed work counts no more."""

UNKNOWN_ROUNDS = 64
"""For so many rounds after history was taken back or learnt, reducers may keep what is not known here."""


def draw(turn: Turn, index: int) -> None:
    """Has a slice that was just reduced audited, by lot."""
    state, current = turn.state, turn.state.open_round
    assert current is not None
    progress = current.slices[index]
    if not state.rules.audited_share or progress.reduced is None:
        return
    if why := _untraced(state, current, progress):
        audit = SliceAudit(auditor_ids=(), until=turn.now, verdict=Verdict.VOID, why=why)
        _put(turn, replace(progress, audit=audit))
        _strike(turn, progress.slice.reducer_id)
        return
    if _lot(state, current, progress, "is audited") >= state.rules.audited_share:
        return
    may = _may_audit(state, current, progress)
    left = current.commit_deadline - turn.now
    if not may or left < LEAST_SECONDS:
        return
    auditor = _drawn(state, current, progress, may)
    audit = SliceAudit(auditor_ids=(auditor,), until=turn.now + left / 2)
    _put(turn, replace(progress, audit=audit))
    _ask(turn, current, progress, audit, (auditor,))


def audited(turn: Turn, node_id: NodeId, round: int, report: Audited) -> None:
    """Takes in a finding of who was asked, about the result that was reported; others change nothing."""
    current = turn.state.open_round
    if current is None or current.number != round or current.phase is RoundPhase.APPLYING:
        return
    if not 0 <= report.slice_index < len(current.slices):
        return
    progress = current.slices[report.slice_index]
    audit = progress.audit
    if audit is None or audit.verdict is not None or progress.digest != report.digest:
        return
    if node_id not in audit.auditor_ids or any(f.node_id == node_id for f in audit.findings):
        return
    finding = Finding(node_id=node_id, found=report.found, why=report.why)
    findings = (*audit.findings, finding)
    _put(turn, replace(progress, audit=replace(audit, findings=findings)))


def decide_audits(turn: Turn) -> None:
    """What follows from the findings that are here, and from the time."""
    current = turn.state.open_round
    if current is None or current.phase is RoundPhase.APPLYING:
        return
    for index, progress in enumerate(current.slices):
        audit = progress.audit
        if audit is not None and audit.verdict is None:
            if audit.is_contested:
                _decide_contested(turn, index)
            else:
                _decide_first(turn, index)


def next_audit_end(state: SwarmState) -> float | None:
    """When the next audit ends without an answer."""
    current = state.open_round
    if current is None or current.phase is RoundPhase.APPLYING:
        return None
    pending = (p.audit for p in current.slices if p.audit is not None and p.audit.verdict is None)
    return min((audit.until for audit in pending), default=None)


def is_pending(progress: SliceProgress) -> bool:
    """Whether the slice waits for an auditor."""
    return progress.audit is not None and progress.audit.verdict is None


def audit_void_reason(progress: SliceProgress) -> str:
    """Why an audit makes the slice void, in words; empty when it does not."""
    audit = progress.audit
    is_void = audit is not None and audit.verdict in (Verdict.VOID, Verdict.CONVICTED)
    return audit.why if audit is not None and is_void else ""


def audits_in_words(state: SwarmState, current: Round) -> str:
    """What the round's audits have shown, for its reason; empty when there was none."""
    said = []
    for progress in current.slices:
        audit = progress.audit
        if audit is None or not audit.auditor_ids:
            continue
        names = ", ".join(name_of(state, node_id) for node_id in audit.auditor_ids)
        verdict = audit.verdict or Verdict.UNANSWERED
        said.append(f"slice {progress.slice.index} audited by {names}: {verdict}")
    return "; ".join(said)


def may_reduce(member: Member, number: int) -> bool:
    """Whether a plan of this round may have the member reduce."""
    return member.audits.back_at_round <= number


# What reducers keep


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
    if not told.error_before:
        return ""
    part = progress.slice
    place = part.reducer_id, current.fragment, part.start, part.num_elements
    for error in state.errors:
        if (error.reducer_id, error.fragment, error.start, error.num_elements) == place:
            return "" if error.digest == told.error_before else _UNTRACED
    is_unknown = current.number <= state.errors_unknown_until
    return "" if is_unknown or state.errors_incarnation != state.incarnation else _UNTRACED


_UNTRACED = "its reducer adds an error that no committed result of its own has left"


# Who audits


def _lot(state: SwarmState, current: Round, progress: SliceProgress, of: str) -> float:
    """A number from 0 to 1 that nobody knows who does not know the secret."""
    place = (
        f"{of}, {state.incarnation}, {current.number}, {progress.slice.index}, {progress.attempt}"
    )
    digest = blake3(state.audit_secret + place.encode() + (progress.digest or b"")).digest()
    return int.from_bytes(digest[:8], "little") / 2.0**64


def _may_audit(state: SwarmState, current: Round, progress: SliceProgress) -> list[NodeId]:
    """Present participants beside the reducer that hold the base and stay; of other invites, if any."""
    reducer = progress.slice.reducer_id
    invite = state.members[reducer].invite_id if reducer in state.members else ""
    may = [
        member
        for node_id in present_participants(state, current)
        if node_id != reducer
        and (member := state.members[node_id]).state is MemberState.READY
        and not member.is_draining
        and not member.standing.is_on_trial
        and max(member.audits.back_at_round, member.audits.audits_from_round) <= current.number
        and member.audits.num_contradicted < MOST_CONTRADICTED
    ]
    others = [member.node_id for member in may if member.invite_id != invite]
    return others or [member.node_id for member in may]


def _drawn(
    state: SwarmState, current: Round, progress: SliceProgress, may: Sequence[NodeId]
) -> NodeId:
    """One of them, each as likely as its confirmed work weighs."""
    say = say_in(state, current, may)
    weights = [say.weights.get(node_id, 0) for node_id in may]
    if not any(weights):
        weights = [1] * len(may)
    left = _lot(state, current, progress, "auditor") * sum(weights)
    for node_id, weight in zip(may, weights, strict=True):
        left -= weight
        if left < 0:
            return node_id
    return may[-1]


def _ask(
    turn: Turn,
    current: Round,
    progress: SliceProgress,
    audit: SliceAudit,
    node_ids: tuple[NodeId, ...],
) -> None:
    assert progress.reduced is not None
    asked = AuditAsked(
        round=current.number,
        reducer_id=progress.slice.reducer_id,
        attempt=progress.attempt,
        seconds=max(0.0, audit.until - turn.now),
        reduced=progress.reduced,
    )
    turn.act(Tell(message=asked, to=node_ids))


# What follows


def _decide_first(turn: Turn, index: int) -> None:
    current = turn.state.open_round
    assert current is not None
    progress = current.slices[index]
    audit = progress.audit
    assert audit is not None
    if not audit.findings:
        auditor = audit.auditor_ids[0]
        if turn.now >= audit.until or not is_present(turn.state, auditor):
            _put(turn, replace(progress, audit=replace(audit, verdict=Verdict.UNANSWERED)))
            _was_silent(turn, auditor)
        return
    if audit.findings[0].found == progress.digest:
        _put(turn, replace(progress, audit=replace(audit, verdict=Verdict.AGREED)))
        return
    first = audit.auditor_ids[0]
    may = [n for n in _may_audit(turn.state, current, progress) if n != first]
    say = say_in(turn.state, current, present_participants(turn.state, current))
    jury = tuple(sorted(may, key=lambda n: (-say.weights.get(n, 0), n))[: MOST_AUDITORS - 1])
    left = current.commit_deadline - turn.now
    if not jury or left < LEAST_SECONDS:
        _void(turn, index)
        return
    contested = replace(
        audit, is_contested=True, auditor_ids=(first, *jury), until=turn.now + left / 2
    )
    _put(turn, replace(progress, audit=contested))
    _ask(turn, current, progress, contested, jury)


def _decide_contested(turn: Turn, index: int) -> None:
    current = turn.state.open_round
    assert current is not None
    progress = current.slices[index]
    audit, reducer = progress.audit, progress.slice.reducer_id
    assert audit is not None
    among = present_participants(turn.state, current)
    say = say_in(turn.state, current, among)
    agreeing = [f.node_id for f in audit.findings if f.found == progress.digest]
    others: dict[bytes, list[NodeId]] = {}
    for finding in audit.findings:
        if finding.found and finding.found != progress.digest:
            others.setdefault(finding.found, []).append(finding.node_id)
    heaviest = max(others.values(), key=lambda nodes: weight_of(say, nodes), default=[])
    if len(heaviest) > 1 and is_enough(say, heaviest, among):
        _convict(turn, index, heaviest, agreeing)
        return
    differing = [node_id for nodes in others.values() for node_id in nodes]
    right = {*agreeing, reducer}
    is_over = len(audit.findings) == len(audit.auditor_ids) or turn.now >= audit.until
    is_sure = bool(agreeing) and is_enough(say, right, among)
    is_outweighed = weight_of(say, right) <= weight_of(say, differing)
    if is_sure or (agreeing and is_over and not is_outweighed):
        _put(turn, replace(progress, audit=replace(audit, verdict=Verdict.AGREED)))
        for node_id in differing if is_sure else ():
            _contradict(turn, node_id)
    elif is_over:
        _void(turn, index)


def _convict(turn: Turn, index: int, by: Sequence[NodeId], agreeing: Sequence[NodeId]) -> None:
    state, current = turn.state, turn.state.open_round
    assert current is not None
    progress = current.slices[index]
    assert progress.audit is not None
    reducer = progress.slice.reducer_id
    names = ", ".join(name_of(state, node_id) for node_id in by)
    reason = (
        f"{names} made slice {index} of round {current.number} again and found another result "
        f"than it has signed"
    )
    why = f"its reducer {name_of(state, reducer)} is convicted: {reason}"
    audit = replace(progress.audit, verdict=Verdict.CONVICTED, why=why)
    _put(turn, replace(progress, audit=audit))
    for node_id in agreeing:
        _contradict(turn, node_id)
    _strike(turn, reducer)
    turn.act(QuarantineAsked(node_id=reducer, node_name=name_of(state, reducer), reason=reason))


def _void(turn: Turn, index: int) -> None:
    """Neither side has enough weight: both parties neither reduce nor audit for a while."""
    state, current = turn.state, turn.state.open_round
    assert current is not None
    progress = current.slices[index]
    assert progress.audit is not None
    first = progress.audit.findings[0] if progress.audit.findings else None
    by = "" if first is None else f" by {name_of(state, first.node_id)}: {first.why}"
    audit = replace(progress.audit, verdict=Verdict.VOID, why=f"its audit{by}")
    _put(turn, replace(progress, audit=audit))
    for node_id in {progress.slice.reducer_id, progress.audit.auditor_ids[0]}:
        _strike(turn, node_id)


def _strike(turn: Turn, node_id: NodeId) -> None:
    member, current = turn.state.members.get(node_id), turn.state.open_round
    if member is None or current is None:
        return
    num_voided = member.audits.num_voided + 1
    out = min(MOST_ROUNDS_OUT, 1 << (num_voided - 1))
    record = replace(member.audits, num_voided=num_voided, back_at_round=current.number + 1 + out)
    turn.put_member(replace(member, audits=record))


def _was_silent(turn: Turn, node_id: NodeId) -> None:
    """Who is asked and does not answer holds a round up: it is asked more and more seldom."""
    member, current = turn.state.members.get(node_id), turn.state.open_round
    if member is None or current is None or member.audits.audits_from_round > current.number:
        return  # it is gone, or was silent on another slice of this round
    silent = member.audits.num_unanswered + 1
    out = min(MOST_ROUNDS_OUT, 1 << (silent - 1))
    record = replace(
        member.audits, num_unanswered=silent, audits_from_round=current.number + 1 + out
    )
    turn.put_member(replace(member, audits=record))


def _contradict(turn: Turn, node_id: NodeId) -> None:
    """A member's finding is not what more than half of the weight found: on repeat it loses its say."""
    member = turn.state.members.get(node_id)
    if member is None:
        return
    record = replace(member.audits, num_contradicted=member.audits.num_contradicted + 1)
    member = replace(member, audits=record)
    if record.num_contradicted >= MOST_CONTRADICTED:
        member = replace(member, work=Work())
    turn.put_member(member)


def _put(turn: Turn, progress: SliceProgress) -> None:
    current = turn.state.open_round
    assert current is not None
    index = progress.slice.index
    slices = (*current.slices[:index], progress, *current.slices[index + 1 :])
    turn.put_round(replace(current, slices=slices))
