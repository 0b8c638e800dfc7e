"""What is news to who runs a swarm, with its reason: a value, and a line of the coordinator's log."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog

from coordinator.presets.choosing import Plan
from coordinator.swarm.agreement import awaits_first_weights
from coordinator.swarm.books import screenings_of
from coordinator.swarm.events import EndSession, Tell
from coordinator.swarm.explain import alike_in_words, differing_in_words, unevaluated_in_words
from coordinator.swarm.ledger import num_reached
from coordinator.swarm.members import PRESENT, Member, MemberState, Verdict
from coordinator.swarm.reach import helper_between, newly_cut_pairs
from coordinator.swarm.start import missing
from coordinator.swarm.state import RoundPhase, SwarmState, name_of, names_of
from coordinator.swarm.transition import Transition
from coordinator.swarm.weighing import common_corpus
from protocol.errors import AtollError
from protocol.files.durable import as_typed
from protocol.trust.rulings import in_words
from protocol.wire.messages import (
    CommitsWanted,
    RefetchAsked,
    ResultOffered,
    RoundCommitted,
    RoundOpened,
    RunFinished,
    SliceTakenOver,
)
from protocol.wire.rounds import OTHER_SOURCES, NodeId, training_in

_log = structlog.get_logger()

MOST_NAMED = 8
"""Nodes in one line."""

Level = Literal["debug", "info", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """One thing that has happened."""

    level: Level
    what: str
    facts: Mapping[str, object]


def _news(level: Level, what: str, /, **facts: object) -> News:
    return News(level=level, what=what, facts=facts)


_NEWS = {
    MemberState.READY: "node ready",
    MemberState.DIVERGED: "node diverged",
    MemberState.LOST: "node lost",
    MemberState.LEFT: "node left",
    MemberState.QUARANTINED: "node quarantined",
    MemberState.EXPELLED: "node expelled",
}


def log_backup(line: str) -> None:
    """What the process that makes copies says (coordinator.backups.in_a_line)."""
    told = json.loads(line)
    if "failed" in told:
        again = round(told["next_seconds"])
        _log.error(
            "no backup", why=told["failed"], next_step=told["next_step"], next_try_seconds=again
        )
    else:
        size = told["num_bytes"]
        _log.info("backup made", round=told["committed_round"], to=told["copied"], bytes=size)


def log_damaged(error: AtollError) -> None:
    """A file of the folder is of no use, and the run goes on without it."""
    _log.error("a file is damaged", why=error.what, next_step=error.next_step)


def log_transition(before: SwarmState, transition: Transition) -> list[News]:
    """Logs what is news to who runs the swarm, and returns it."""
    told = list(news_of(before, transition))
    for news in told:
        getattr(_log, news.level)(news.what, **news.facts)
    return told


def news_of(before: SwarmState, transition: Transition) -> Iterator[News]:
    """What is news to who runs the swarm: no heartbeats, no single reports. Pure."""
    after = transition.state
    changed = _changed_members(before, after)
    why = {a.node_id: a.reason for a in transition.actions if isinstance(a, EndSession)}
    for node_id, member, was in changed:
        yield from _member(after, member, was, why.get(node_id, ""))
    for ruling in after.rulings[len(before.rulings) :]:
        yield _news("info", "ruled", number=ruling.number, what=in_words(ruling), by=ruling.by)
    for node_id in before.members.keys() - after.members.keys():
        gone = before.members[node_id]
        yield _news(
            "info",
            "node forgotten",
            node=gone.node_name,
            id=node_id,
            gone_at_round=gone.gone_at_round,
            committed_tokens=gone.committed_tokens,
        )
    for one, other in newly_cut_pairs(before, after, (node_id for node_id, _, _ in changed)):
        nodes = [one.node_name, other.node_name]
        if (helper := helper_between(after, one, other)) is not None:
            told_of = {"nodes": nodes, "helper": helper.node_name}
            yield _news("info", "two nodes reach each other through", **told_of)
        else:
            yield _news("warning", "two nodes do not reach each other", nodes=nodes)
    told = [action for action in transition.actions if isinstance(action, Tell)]
    has_decided = any(
        isinstance(message.message, RoundCommitted) and not message.is_learned for message in told
    )
    if after.committed_round > before.committed_round and not has_decided:
        reason_of = "" if after.last_closed is None else after.last_closed.reason
        yield _news("info", "round learned", round=after.committed_round, reason=reason_of)
    for message in told:
        yield from _told(after, message)
    yield from _epochs(before, after)
    yield from _held_out(before, after)
    yield from _alike(before, after)
    yield from _audits(before, after)
    yield from _start(before, after)
    yield from _phases(before, after)


def _member(after: SwarmState, member: Member, was: Member | None, why: str) -> Iterator[News]:
    """What has become of one; `why` its session was ended, if it was."""
    if was is None or was.session_id != member.session_id:
        named = {} if member.asked_name == member.node_name else {"asked": member.asked_name}
        yield _news(
            "info",
            "node attached",
            node=member.node_name,
            **named,
            id=member.node_id,
            device=member.device,
        )
        was = None
    if awaits_first_weights(after, member):
        return  # as it should
    if (was is None or was.state is not member.state) and member.state in _NEWS:
        reason = {"why": why} if why else {}
        what, round_held = _NEWS[member.state], member.outer_round
        yield _news("info", what, node=member.node_name, round=round_held, **reason)
    if was is not None and was.against.back_at_round < member.against.back_at_round:
        yield _news(
            "warning",
            "node sits out",
            node=member.node_name,
            until_round=member.against.back_at_round,
            why="most of the others point against what it contributes, round after round",
            next_step="look at its data, its model code and its devices; 'atoll nodes expel' ends it",
        )


def _epochs(before: SwarmState, after: SwarmState) -> Iterator[News]:
    """That all samples were leased once, and the next are leased again.

    Holders of private data have samples of their own.
    """
    if after.ledger is before.ledger or after.rules.has_private_data:
        return
    common = common_corpus(after)
    if common is None or not common.num_samples:
        return
    was, epoch = (
        (num_reached(state.ledger) - 1) // common.num_samples + 1 for state in (before, after)
    )
    if epoch > max(1, was):
        yield _news("info", "the data begins anew", epoch=epoch, samples=common.num_samples)


def _held_out(before: SwarmState, after: SwarmState) -> Iterator[News]:
    """What was measured, and what it is not to be compared with."""
    if after.held_out_text_from > before.held_out_text_from:
        yield _news(
            "warning",
            "held-out losses are of another text",
            from_round=after.held_out_text_from,
            why="nodes have other data, or evaluate by another function, than before: losses on both "
            "sides of it are not compared",
        )
    if before.differing is None and after.differing is not None:
        yield _news(
            "warning",
            "held-out losses of one state differ",
            round=after.differing.round,
            why=differing_in_words(after),
        )
    if (why := unevaluated_in_words(after)) and not unevaluated_in_words(before):
        yield _news("warning", "nobody evaluates", why=why)
    for held_out in after.held_out[len(before.held_out) :]:
        own: dict[str, object] = {}
        if held_out.metric is not None:
            own["metric"] = _digits(held_out.metric)
        if held_out.holders:
            own["holders"] = {
                name_of(after, one.node_id): _digits(one.loss) for one in held_out.holders
            }
        if held_out.by_source:
            own["by_source"] = {
                one.source or OTHER_SOURCES: _digits(one.loss) for one in held_out.by_source
            }
        yield _news(
            "info", "evaluated", round=held_out.round, held_out_loss=_digits(held_out.loss), **own
        )


def _digits(value: float) -> float:
    """For the log: losses of one's own may be of any size."""
    return float(f"{value:.6g}")


def _alike(before: SwarmState, after: SwarmState) -> Iterator[News]:
    """That loops train on the same samples; once, for as long as they do."""
    is_new = after.last_closed is not before.last_closed
    if is_new and (why := alike_in_words(after)) and not alike_in_words(before):
        yield _news("warning", "loops train on the same samples", why=why)


def _audits(before: SwarmState, after: SwarmState) -> Iterator[News]:
    """What came of audits; one that agreed with its first auditor is no news."""
    if after.audits is before.audits:
        return
    known = {(a.round, a.slice.index) for a in before.audits if a.verdict is not None}
    for audit in after.audits:
        place = audit.round, audit.slice.index
        is_news = audit.is_contested or audit.verdict is not Verdict.AGREED
        if audit.verdict is None or place in known or not is_news:
            continue
        yield _news(
            "warning",
            "slice audited",
            round=audit.round,
            slice=audit.slice.index,
            reducer=name_of(after, audit.slice.reducer_id),
            verdict=audit.verdict.value,
            why=audit.why,
            differing=[
                name_of(after, f.node_id) for f in audit.findings if f.found != audit.reduced.digest
            ],
        )


def _told(after: SwarmState, told: Tell) -> Iterator[News]:
    """What nodes are told of, as far as it is news to who runs the swarm."""
    match told.message:
        case RoundOpened(plan=plan):
            nodes = len(plan.participants)
            yield _news("info", "round opened", round=plan.round, nodes=nodes, reason=plan.reason)
        case RoundCommitted(commit=commit) if not told.is_learned:
            yield from _commit(after, commit.round)
        case SliceTakenOver(round=number, slice_index=index, reducer_id=reducer_id):
            reducer = name_of(after, reducer_id)
            yield _news("info", "slice taken over", round=number, slice=index, reducer=reducer)
        case ResultOffered(round=number, slice_index=index, holder_ids=holder_ids):
            holders = [name_of(after, node_id) for node_id in holder_ids]
            yield _news(
                "info", "result offered by holders", round=number, slice=index, holders=holders
            )
        case CommitsWanted(after_round=number):
            for node_id in told.to or ():
                yield _news(
                    "warning", "node is ahead of us", node=name_of(after, node_id), our_round=number
                )
        case RefetchAsked(reason=reason):
            for node_id in told.to or ():
                if not awaits_first_weights(after, after.members[node_id]):
                    yield _news(
                        "warning",
                        "node told to refetch",
                        node=name_of(after, node_id),
                        reason=reason,
                    )
        case RunFinished(round=number, reason=reason):
            yield _news("info", "run finished", round=number, reason=reason)


def _start(before: SwarmState, after: SwarmState) -> Iterator[News]:
    """Whom the coordinator waits for when it starts, and who has not come."""
    if before.awaited is None and after.awaited is not None:
        awaited = [name_of(after, node_id) for node_id in missing(after)]
        yield _news(
            "info", "waiting for nodes to come back", nodes=awaited, round=after.committed_round
        )
    elif before.awaited is not None and after.awaited is None:
        lost = MemberState.LOST
        absent = [n for n in before.awaited.node_ids if after.members[n].state is lost]
        if absent:
            names = [name_of(after, node_id) for node_id in absent]
            yield _news("warning", "going on without nodes that have not come back", nodes=names)


def _changed_members(
    before: SwarmState, after: SwarmState
) -> list[tuple[NodeId, Member, Member | None]]:
    """With what they were, in the order of their ids."""
    if after.members is before.members:
        return []
    was = before.members.get
    return sorted((n, m, was(n)) for n, m in after.members.items() if was(n) is not m)


def _phases(before: SwarmState, after: SwarmState) -> Iterator[News]:
    """How far rounds have come, for who looks for a fault; one step may take two phases."""
    was, now = before.open_round, after.open_round
    is_same = was is not None and now is not None and was.number == now.number
    if was is not None and now is not None and is_same and now.trained and not was.trained:
        yield _news("debug", "phase", phase="exchanging", round=now.number)
    if after.committed_round > before.committed_round:
        yield _news("debug", "phase", phase="committed", round=after.committed_round)
    if was is not None and not is_same:
        yield _news("debug", "phase", phase="settled", round=was.number)
    if now is not None and not is_same:
        yield _news("debug", "phase", phase="opened", round=now.number)


def log_slept(seconds: float) -> None:
    """Logs that this process, or its machine, was stopped for a while."""
    _log.warning("heard nobody", seconds=round(seconds, 1))


def log_copy(state: SwarmState, node_id: NodeId) -> None:
    """Logs that another process with the key of a member was not attached beside it."""
    _log.warning(
        "two processes have one node's key, and the second waits",
        node=name_of(state, node_id),
        id=node_id,
        next_step="stop one of them, unless the node was restarted after a power cut",
    )


def log_stopping(state: SwarmState, directory: Path) -> None:
    """Logs what becomes of the nodes when their coordinator is stopped."""
    _log.info(
        "stopping",
        what=farewell(state),
        next_step=f"'atoll coordinator start {as_typed(directory)}'",
    )


def farewell(state: SwarmState) -> str:
    """What becomes of the nodes while their coordinator is away, in words."""
    num_nodes = sum(m.state in PRESENT and m.is_heard for m in state.members.values())
    if state.is_finished:
        return "the run is finished, so no node needs the coordinator"
    if not num_nodes:
        return "no node is attached; nodes that are started meanwhile wait for the coordinator"
    one = num_nodes == 1
    nodes = "1 node is attached: it" if one else f"{num_nodes} nodes are attached: they"
    current = state.open_round
    is_training = current is not None and current.phase is RoundPhase.TRAINING
    trains = ""
    if is_training and current is not None:
        trains = f" {'trains' if one else 'train'} to the end of round {current.number},"
    keeps, comes = ("keeps", "comes") if one else ("keep", "come")
    has = "has" if one else "have"
    it = "it" if one else "they"
    return (
        f"{nodes}{trains} {keeps} what {it} {has} trained, and {comes} back when the coordinator "
        "starts again"
    )


def log_refusal(host: str, error: AtollError) -> None:
    """Logs that somebody was not let in."""
    _log.warning("enrolment refused", host=host, reason=error.what)


def _commit(state: SwarmState, number: int) -> Iterator[News]:
    closed = state.last_closed
    if closed is None or closed.commit.round != number:
        return
    slices = closed.commit.slices
    num_committed = sum(outcome.digest is not None for outcome in slices)
    incarnation = closed.commit.incarnation
    yield _news(
        "info",
        "round committed",
        round=number,
        **({"incarnation": incarnation} if incarnation else {}),
        slices=f"{num_committed} of {len(slices)}",
        tokens=closed.tokens,
        seconds=round(closed.seconds, 1),
        reason=closed.reason,
    )
    screened = screenings_of(closed.commit)
    for node_id, told in screened.items():
        if told.num_left_out or told.num_clipped:
            what = "contributions left out" if told.num_left_out else "contributions clipped"
            yield _news(
                "warning",
                what,
                node=name_of(state, node_id),
                round=number,
                slices=f"{told.num_left_out or told.num_clipped} of {told.num_contributions}",
                why="they are much longer than is usual for their work, or most others point against them"
                if len(screened) > 1
                else "they are longer than any training makes them",
            )
    missed = [
        node_id for node_id in training_in(closed.plan.assignments) if node_id not in screened
    ]
    if num_committed and missed:
        more = f" and {len(missed) - MOST_NAMED} more" if len(missed) > MOST_NAMED else ""
        names = names_of(state, missed[:MOST_NAMED])
        yield _news(
            "warning",
            "went on without contributions of",
            nodes=names + more,
            round=number,
            next_step="what they trained counts in a later round",
        )


def log_settled(plan: Plan) -> None:
    """Says what a preset has become, key by key, and what it should come to."""
    for choice in plan.choices:
        key = f"{choice.table}.{choice.key}"
        _log.info("preset settled", key=key, value=choice.value, reason=choice.reason)
    prediction = plan.prediction
    _log.info(
        "preset predicts",
        bytes_per_round=round(prediction.bytes_per_round),
        exchange_seconds=round(prediction.exchange_seconds, 1),
        training_seconds=round(prediction.training_seconds, 1),
        verdict=plan.verdict,
    )
