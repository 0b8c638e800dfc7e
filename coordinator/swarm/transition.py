"""The door of the core: what an event does to a swarm, and when time alone would do something."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from coordinator.swarm.agreement import agree_on_initial_state, history_told
from coordinator.swarm.audit import audited, decide_audits, next_audit_end
from coordinator.swarm.end import end_run, ends_at
from coordinator.swarm.evaluation import (
    ask_if_due,
    evaluated,
    give_up_evaluation,
    sound_alarm,
    wrote,
)
from coordinator.swarm.events import (
    Action,
    Attached,
    BaseLearned,
    CommitLearned,
    Detached,
    Event,
    HeartbeatSeen,
    HistoryTold,
    LeftOutProven,
    RefusalSeen,
    Reported,
    ReportedTogether,
    Ruled,
    RulingsLearned,
    SamplesSkipped,
    Started,
    StreamBroken,
    Ticked,
    Turn,
    Woke,
)
from coordinator.swarm.explain import explain
from coordinator.swarm.ledger import skip, trained_already
from coordinator.swarm.membership import (
    applied,
    attach,
    detach,
    drain,
    expire_leases,
    forget_long_gone,
    heartbeat,
    renew_leases,
    stream_broken,
)
from coordinator.swarm.opening import open_round
from coordinator.swarm.penalties import sound_convictions
from coordinator.swarm.reports import (
    left_out,
    note_most_held,
    refusal_seen,
    results_held,
    results_silent,
    slice_reduced,
    training_done,
)
from coordinator.swarm.retraction import (
    decide_alarm,
    supply_anew,
    takes_back_at,
    watch_going_back,
    withdraws_at,
)
from coordinator.swarm.rounds import close_round, settle_round
from coordinator.swarm.spot_checks import spot_checked
from coordinator.swarm.standing import excuse, excuses_at, tell_training_ended
from coordinator.swarm.start import (
    end_waiting,
    learn_base,
    learn_commit,
    start,
    tell_learned,
    tell_when_all_is_learned,
    wait_longer,
    waits_until,
)
from coordinator.swarm.state import RoundPhase, Rules, SwarmState, members_of
from coordinator.swarm.steering import learn_rulings, rule
from coordinator.swarm.takeover import next_overdue, take_over
from protocol.wire.findings import Audited, SpotChecked
from protocol.wire.messages import (
    Applied,
    Draining,
    Evaluated,
    Held,
    Reduced,
    ResultsSilent,
    Trained,
    Wrote,
)
from protocol.wire.rounds import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """What an event led to: the state, and what the edge does in this order."""

    state: SwarmState
    actions: tuple[Action, ...]
    at: float  # when, by the coordinator's clock

    @property
    def reason(self) -> str:
        """What the run waits for, in words; made when it is asked for, as reports come by hundreds."""
        return explain(self.state, self.at)


def initial_state(rules: Rules, run_digest: Digest) -> SwarmState:
    """A run that no node has attached to yet."""
    return SwarmState(
        rules=rules,
        run_digest=run_digest,
        outer_digest=rules.first_digest,
        token_clock=rules.tokens_before,
        ledger=trained_already(rules.trained_before),
    )


def step(state: SwarmState, event: Event, now: float) -> Transition:
    """What `event` does to the swarm at `now`, in seconds of the coordinator's clock.

    `now` is never less than before. The event is taken in before the time is looked at, so a
    heartbeat renews its lease as long as nobody has noticed that it ran out: a coordinator that
    was busy does not lose its nodes. Reports that are repeated, stale, or of unknown rounds change
    nothing by themselves.

    Raises ProtocolMismatchError or BadDataError for a node that cannot take part, and
    SessionEndedError for a session that is over; then nothing has happened.
    """
    turn = Turn(state=state, now=now)
    _take_in(turn, event)
    # The order makes one pass enough: no decision can enable one before it.
    expire_leases(turn)
    if isinstance(event, Started) or turn.state.awaited is not None:
        end_waiting(turn)
        sound_convictions(turn)  # of before a restart, as the alarm
        sound_alarm(turn)
    if turn.state.awaited is None:
        _decide(turn, round_before=state.committed_round)
    else:
        give_up_evaluation(turn)
    if turn.state.has_untold:
        tell_when_all_is_learned(turn)
    return Transition(state=turn.state, actions=tuple(turn.actions), at=now)


def _decide(turn: Turn, *, round_before: int) -> None:
    """What becomes of rounds, and of the run."""
    if not turn.state.committed_round:
        agree_on_initial_state(turn)
    excuse(turn)
    tell_training_ended(turn)
    take_over(turn)
    decide_audits(turn)
    if turn.state.alarm is not None:
        decide_alarm(turn)
    close_round(turn)
    settle_round(turn)
    supply_anew(turn)
    if turn.state.rolled_back or turn.state.unfollowed is not None:
        watch_going_back(turn)
    if turn.state.committed_round != round_before:
        forget_long_gone(turn)
    give_up_evaluation(turn)
    open_round(turn)
    ask_if_due(turn)  # after the plan: its node trains and contributes first
    if turn.state.is_at_end:
        end_run(turn)


def next_deadline(state: SwarmState) -> float | None:
    """The earliest time at which Ticked could change something; None when time changes nothing."""
    deadlines = []
    if (lease_end := members_of(state).first_lease_end()) < math.inf:
        deadlines.append(lease_end)
    if state.evaluating is not None:
        deadlines.append(state.evaluating.until)
    if state.awaited is not None:
        return min([*deadlines, waits_until(state, state.awaited)])
    if state.open_round is not None:
        is_applying = state.open_round.phase is RoundPhase.APPLYING
        round_ = state.open_round
        deadlines.append(round_.apply_deadline if is_applying else round_.commit_deadline)
        if is_applying and round_.returns_until is not None:
            deadlines.append(round_.returns_until)
    others = [next_overdue, excuses_at, next_audit_end]
    if state.unsupplied_since is not None:
        others.append(takes_back_at)
    if state.unfollowed is not None:
        others.append(withdraws_at)
    if state.end_waits_until is not None:
        others.append(ends_at)
    deadlines += [at for of in others if (at := of(state)) is not None]
    return min(deadlines, default=None)


def _take_in(turn: Turn, event: Event) -> None:
    match event:
        case Attached():
            attach(turn, event)
        case HeartbeatSeen():
            heartbeat(turn, event)
        case SamplesSkipped(pieces=pieces):
            turn.state = replace(turn.state, ledger=skip(turn.state.ledger, pieces))
        case StreamBroken():
            stream_broken(turn, event)
        case Detached():
            detach(turn, event)
        case Reported():
            _take_in_row(turn, (event,))
        case ReportedTogether(reports=reports):
            for _, in_a_row in groupby(reports, key=lambda r: (r.node_id, type(r.report))):
                _take_in_row(turn, tuple(in_a_row))
        case LeftOutProven():
            left_out(turn, event)
        case RefusalSeen():
            refusal_seen(turn, event)
        case BaseLearned():
            learn_base(turn, event)
        case CommitLearned():
            learn_commit(turn, event)
        case HistoryTold():
            history_told(turn, event)
            tell_learned(turn)  # whoever is ahead still has nothing to bring
        case Ruled():
            rule(turn, event)
        case RulingsLearned():
            learn_rulings(turn, event)
        case Ticked():
            pass
        case Started():
            start(turn)
        case Woke():
            renew_leases(turn, event)
            wait_longer(turn, event.pause_seconds)


def _take_in_row(turn: Turn, row: Sequence[Reported]) -> None:
    """Reports of one node and kind in a row. It holds as many results at once as there are slices."""
    held = [(told.round, told.report) for told in row if isinstance(told.report, Held)]
    if held:
        results_held(turn, row[0].node_id, held)
        note_most_held(turn, row[0].node_id)
        return
    for told in row:
        match told.report:
            case Trained():
                training_done(turn, told.node_id, told.round, told.report)
            case Reduced():
                slice_reduced(turn, told.node_id, told.round, told.report)
            case ResultsSilent():
                results_silent(turn, told.node_id, told.round, told.report)
            case Applied():
                applied(turn, told.node_id, told.round, told.report)
            case Audited():
                audited(turn, told.node_id, told.round, told.report)
            case SpotChecked():
                spot_checked(turn, told.node_id, told.round, told.report)
            case Evaluated():
                evaluated(turn, told.node_id, told.round, told.report)
            case Wrote():
                wrote(turn, told.node_id, told.round, told.report)
            case Draining():
                drain(turn, told.node_id)
