"""What the run waits for, in words that a person can act on, and when it will be done. Pure.

A deadline bounds the slowest case; most rounds end long before theirs. So an estimate stands beside it, by
what each phase took in recent rounds. It needs `ROUNDS_NEEDED` of them, and says nothing before.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import fmean, median

from coordinator.swarm.deadlines import ROUNDS_NEEDED
from coordinator.swarm.end import ends_at, finished_reason, is_evaluated, members_behind
from coordinator.swarm.evaluation import awaited_writers, may_be_evaluated
from coordinator.swarm.going_back import rounds_in_reach
from coordinator.swarm.members import Member, MemberState
from coordinator.swarm.opening import schedule_in_words
from coordinator.swarm.retraction import (
    goes_on_from,
    takes_back_at,
    unfollowed_in_words,
    waits_for_a_holder,
)
from coordinator.swarm.rounds import awaited_appliers, is_undecided
from coordinator.swarm.shares import budgets_in_words
from coordinator.swarm.standing import returning
from coordinator.swarm.start import bringing, missing, waits_until
from coordinator.swarm.state import (
    Awaited,
    Measured,
    Round,
    RoundPhase,
    SwarmState,
    is_present,
    name_of,
    names_of,
    num_of,
    present_members,
)
from coordinator.swarm.weighing import Kind, held_in_words, kind_of
from protocol.trust.rulings import Ruling
from protocol.wire.messages import Trained
from protocol.wire.rounds import NodeId, training_in
from protocol.wire.vitals import loss_in_words


def explain(state: SwarmState, now: float) -> str:
    """What the run is doing or waiting for at `now`."""
    if state.is_finished:
        return finished_reason(state)
    if state.awaited is not None:
        return _started(state, state.awaited, now)
    if state.open_round is not None:
        return _round_in_flight(state, state.open_round, now)
    if state.alarm is not None:
        return f"the run is about to go back by itself: {state.alarm.reason}"
    if state.is_at_end:
        return _end(state, now)
    if state.paused is not None:
        return paused_in_words(state.paused)
    return _not_open(state, now)


def differing_in_words(state: SwarmState) -> str:
    """That those who evaluate do not find the same of one state, or that nobody can; else empty."""
    if (told := state.differing) is None:
        return unevaluated_in_words(state)
    low, high = told.holders[0], told.holders[-1]
    return (
        f"{name_of(state, low.node_id)} finds {loss_in_words(low.loss)} and "
        f"{name_of(state, high.node_id)} {loss_in_words(high.loss)} of the state after round {told.round}: "
        "they evaluate on other data, as batches drawn anew each time, or by other code, as that which their "
        "functions call, or with batch norm's statistics of too few samples, or one of them lies"
    )


def unevaluated_in_words(state: SwarmState) -> str:
    """That no round has had a held-out loss, for none of those who are here can measure one."""
    if not state.committed_round or state.held_out or may_be_evaluated(state):
        return ""
    return (
        "no node here evaluates, so no held-out loss says how good the model is: give atoll.join, or "
        "TrainerCallback, evaluate=… in one of the loops and start it again, or start a node without --loop "
        "where the run has data"
    )


def alike_in_words(state: SwarmState) -> str:
    """That loops have trained on the same samples in the newest round; empty where none have.

    As programs do that draw their batches by one seed: all learn what one of them would alone. Their mean
    losses are equal to the last bit then, which those of other samples are not. Where losses are too coarse
    or untold, what they contribute tells: the same bytes, for as long as they owe the same.
    """
    if (newest := state.last_closed) is None:
        return ""
    by_work: dict[tuple[object, ...], list[NodeId]] = {}
    for node_id, told in newest.trained.items():
        member = state.members.get(node_id)
        if not told.tokens or member is None or kind_of(member) is not Kind.LOOP:
            continue
        sent = [each.contribution_of(node_id) for each in newest.commit.slices]
        if (is_fine := _is_fine(told)) or (sent and None not in sent):
            work = told.inner_steps, told.tokens, told.loss, () if is_fine else tuple(sent)
            by_work.setdefault(work, []).append(node_id)
    words = [
        f"{names_of(state, sorted(nodes))} have trained on the same samples in round "
        f"{newest.commit.round}"
        for nodes in by_work.values()
        if len(nodes) > 1
    ]
    if not words:
        return ""
    return (
        f"{'; '.join(words)}: their losses, or what they contribute, are equal to the last digit, so all "
        "together learn what one would alone; give each loop a seed, or a part of the data, of its own"
    )


def _is_fine(told: Trained) -> bool:
    """Whether samples are known again by the loss: none of 16 bits, nor of few decimals, as 0 for no loss."""
    of_all_steps = told.loss * told.inner_steps
    return all(
        abs(part - round(part)) > 1e-3 for part in (of_all_steps * 2**14, of_all_steps * 1e5)
    )


def paused_in_words(paused: Ruling) -> str:
    """Who has paused the run, and since when."""
    since = datetime.fromtimestamp(paused.unix_seconds, UTC)
    why = f": {paused.reason}" if paused.reason else ""
    return f"paused by {paused.by} since {since:%Y-%m-%d %H:%M:%S} UTC{why}; 'atoll run resume' goes on"


def _started(state: SwarmState, awaited: Awaited, now: float) -> str:
    """Whom a coordinator waits for that has just started."""
    waits = []
    if absent := missing(state):
        number = state.committed_round if state.open_round is None else state.open_round.number
        whose = f"nodes of round {number}" if number else "members"
        waits.append(f"these {whose} to come back: {names_of(state, absent)}")
    if ahead := [member.node_id for member in bringing(state)]:
        waits.append(f"the commits that are missing here: {names_of(state, ahead)} bring them")
    left = _left(waits_until(state, awaited), now)
    return f"the coordinator has started and waits for {' and for '.join(waits)}, {left}"


def _not_open(state: SwarmState, now: float) -> str:
    """Why no round is open."""
    if not state.members:
        return "waiting for the first node"
    present = present_members(state)
    with_state = [m for m in present if m.state is MemberState.READY and not m.is_helper]
    num_ready = sum(not m.cannot_train for m in with_state)
    if state.rules.first_digest is not None and not state.committed_round and not with_state:
        return (
            "waiting for a node that holds the run's first weights: "
            "'atoll node start --weights FOLDER' on a machine that has them"
        )
    needed = max(1, state.rules.min_nodes)
    missing = max(0, needed - num_ready)
    verb = "is" if num_ready == 1 else "are"
    parts = [f"waiting for {num_of(missing, 'more node')}: {num_ready} of {needed} {verb} ready"]
    parts += [_not_ready(state, m) for m in present if m.state is not MemberState.READY]
    idle = [m for m in with_state if m.cannot_train]
    parts += [f"{member.node_name} trains nothing now: its own line says why" for member in idle]
    if state.unsupplied_since is not None:
        parts.append(_unsupplied(state, state.unsupplied_since, now))
    elif present and waits_for_a_holder(state):
        parts.append(_without_holder(state))
    if words := unfollowed_in_words(state, now):
        parts.append(words)
    return "; ".join(parts)


def _unsupplied(state: SwarmState, since: float, now: float) -> str:
    left = _left(takes_back_at(state) or since, now)
    is_mistaken = goes_on_from(state) is not None
    what = "another that most hold is agreed on" if is_mistaken else "it is taken back"
    return (
        f"nobody here holds the state after round {state.committed_round}: "
        f"{what} unless a node returns with it, {left}"
    )


def _without_holder(state: SwarmState) -> str:
    """Where all that are here are more than a round behind: others may come back, or never."""
    number = state.committed_round
    what = f"nobody here holds the state after round {number}, nor the one before it"
    newest = max((span.last for span in rounds_in_reach(state)), default=0)
    if not newest:  # they may have just begun
        return f"{what}: a node that does has to come back"
    return (
        f"{what}: start a node that does, or, where none is left, go on from what those here keep: "
        f"'atoll run rollback {newest}'"
    )


def _not_ready(state: SwarmState, member: Member) -> str:
    """What keeps a present member from taking part."""
    if member.state is MemberState.DIVERGED:
        if not state.committed_round and state.rules.first_digest is not None:
            return f"{member.node_name} fetches the weights that the run begins with"
        return f"{member.node_name} holds another state and fetches the swarm's"
    if member.outer_round > state.committed_round:
        return _ahead(state, member)
    if member.outer_round == state.committed_round:
        return f"{member.node_name} has yet to confirm round {state.committed_round}"
    return (
        f"{member.node_name} is at round {member.outer_round} "
        f"and has to apply round {state.committed_round}"
    )


def _ahead(state: SwarmState, member: Member) -> str:
    """Of a node whose state builds on commits that are not here."""
    what = f"{member.node_name} holds round {member.outer_round}, which is not the swarm's"
    if not member.has_told_history:
        return what
    return (
        f"{what}: no node that is here keeps all commits after round {state.committed_round}, where "
        f"this coordinator's database ends, nor holds that round; start the coordinator from a newer "
        f"copy, or a node that holds round {state.committed_round}"
    )


def _round_in_flight(state: SwarmState, current: Round, now: float) -> str:
    if current.phase is RoundPhase.APPLYING:
        return _applying(state, current, now)
    asked = training_in(current.assignments)
    num_nodes = len(asked)
    verb = "is" if num_nodes == 1 else "are"
    trained = f"{len(current.trained)} of {num_of(num_nodes, 'node')} {verb} done"
    if gone := [a.node_id for a in current.assignments if not is_present(state, a.node_id)]:
        trained += f", {names_of(state, gone)} left"
    if current.phase is RoundPhase.TRAINING:
        left = left_in_words(state, current.train_deadline, now)
        return f"training: {trained}, {left}{_asked(state, current)}"
    waits: dict[str, list[int]] = {}  # slices, which may be many, by what each waits for
    for progress in current.slices:
        if not is_undecided(state, current, progress):
            continue
        if progress.digest is None:
            what = f"from the reducer {name_of(state, progress.slice.reducer_id)}"
        else:
            what = f"held by {held_in_words(state, current, progress)}"
        waits.setdefault(what, []).append(progress.slice.index)
    num_waits = sum(map(len, waits.values()))
    parts = (
        f"{f'slice {found[0]}' if len(found) == 1 else f'{len(found)} slices'} {what}"
        for what, found in waits.items()
    )
    training = [n for n in asked if n not in current.trained and is_present(state, n)]
    busy = f" ({names_of(state, training)} still training)" if training else ""
    return (
        f"exchanging: waiting for {num_waits} of {num_of(len(current.slices), 'slice')}{busy}: "
        f"{', '.join(parts)}, {left_in_words(state, current.commit_deadline, now)}"
    )


def _asked(state: SwarmState, current: Round) -> str:
    """How nodes share the round's tokens, where they do, and whether the schedule is at its end."""
    rules = state.rules
    steps = [a.inner_steps for a in current.assignments if a.trains]
    shared = "" if rules.round_steps is None else budgets_in_words(steps, rules)
    return shared + schedule_in_words(rules, current.token_clock)


def _applying(state: SwarmState, current: Round, now: float) -> str:
    if current.returns_until is not None and (due := returning(state, current)):
        return (
            f"applying: waiting for {names_of(state, [one.node_id for one in due])}, left out until now, to "
            f"fetch round {current.number}, {left_in_words(state, current.returns_until, now)}"
        )
    waiting = [n for n in awaited_appliers(state, current) if n not in current.applied]
    left = left_in_words(state, current.apply_deadline, now)
    is_extended = current.apply_deadline > current.committed_at + state.rules.apply_seconds
    is_heard = any(is_present(state, node_id) for node_id in current.applied)
    if not waiting or (is_extended and not is_heard):
        return (
            f"applying: no participant has reported the state after round {current.number} yet; "
            f"waiting for any node to catch up, {left}"
        )
    asked = state.evaluating
    measuring = [] if asked is None else [n for n in asked.node_ids if n in waiting]
    measured = (
        f"; {names_of(state, measuring)} may still measure the loss of round {asked.round}"
        if asked is not None and measuring
        else ""
    )
    return (
        f"applying: waiting for {names_of(state, waiting)} to apply round {current.number}, "
        f"{left}{measured}"
    )


def _end(state: SwarmState, now: float) -> str:
    """What the run waits for after its last round."""
    if state.unsupplied_since is not None:
        return _unsupplied(state, state.unsupplied_since, now)
    until = ends_at(state)
    assert until is not None  # otherwise the run would be finished
    left = _left(until, now)
    behind = members_behind(state)
    is_settled = is_evaluated(state) or not may_be_evaluated(state)
    if is_settled and not behind and (writers := awaited_writers(state)):
        parts = [f"waiting for the final model of {names_of(state, writers)} to write, {left}"]
    elif is_settled:
        parts = [f"waiting for {num_of(len(behind), 'node')} to take the final state over, {left}"]
    elif state.evaluating is None:
        parts = [f"waiting for a ready node that can evaluate the final state, {left}"]
    else:
        evaluators = names_of(state, state.evaluating.node_ids)
        parts = [f"waiting for {evaluators} to evaluate the final state, {left}"]
    return "; ".join([*parts, *(_not_ready(state, member) for member in behind)])


def _left(deadline: float, now: float) -> str:
    return f"{max(0.0, deadline - now):.0f} s left"


def phase_seconds_left(state: SwarmState, now: float) -> float | None:
    """Until the phase of the round in flight ends; None when nobody can tell."""
    current = state.open_round
    if current is None:
        return None
    times, num_elements = state.phase_times, state.rules.layout.fragment_elements[current.fragment]
    if current.phase is RoundPhase.APPLYING:
        usual = _median(times.apply, num_elements)
        return None if usual is None else max(0.0, current.committed_at + usual - now)
    if current.phase is RoundPhase.TRAINING:
        usual = _median(times.train, num_elements)
        return None if usual is None else max(0.0, current.opened_at + usual - now)
    after_training = _sum(
        _median(times.exchange, num_elements), _median(times.commit, num_elements)
    )
    if after_training is None:
        return None
    began = max(current.trained_at.values(), default=current.opened_at)
    return max(0.0, began + after_training - now)


def run_seconds_left(state: SwarmState, now: float) -> float | None:
    """Until the last round has ended, at the pace of recent rounds; 0 once the run is finished."""
    if state.is_finished:
        return 0.0
    a_round = round_seconds(state)
    if a_round is None:
        return None
    rounds_left = state.rules.total_rounds - state.committed_round
    spent = 0.0
    if (current := state.open_round) is not None:
        spent = min(a_round, now - current.opened_at)
        # The commit of a round that is being applied counts already.
        rounds_left += current.phase is RoundPhase.APPLYING
    return max(0.0, rounds_left * a_round - spent)


def round_seconds(state: SwarmState) -> float | None:
    """From one plan to the next, with nodes that are here, and a fragment of the usual size.

    The mean of what each phase took, without the eighth that took longest and the one that took least: where
    some rounds are long and others short, as with a node that often comes too late, a median would swing
    between the two.
    """
    times, elements = state.phase_times, state.rules.layout.fragment_elements
    phases = (times.train, times.exchange, times.commit, times.apply)
    return _sum(*(_middle_mean(phase, fmean(elements)) for phase in phases))


def left_in_words(state: SwarmState, deadline: float, now: float) -> str:
    """Until the phase of the round in flight ends: as it usually does, and at its deadline."""
    at_most = f"{max(0.0, deadline - now):.0f} s"
    left = phase_seconds_left(state, now)
    if left is None or left > deadline - now:
        return f"{at_most} left"
    if left < 1:
        return f"later than usual, {at_most} left at most"
    return f"about {left:.0f} s left, {at_most} at most"


def _median(history: Sequence[Measured], num_elements: float) -> float | None:
    taken = _taken(history, num_elements)
    return median(taken) if len(taken) >= ROUNDS_NEEDED else None


def _middle_mean(history: Sequence[Measured], num_elements: float) -> float | None:
    taken = sorted(_taken(history, num_elements))
    outside = max(1, len(taken) // 8)  # on each side
    return fmean(taken[outside : len(taken) - outside]) if len(taken) >= ROUNDS_NEEDED else None


def _taken(history: Sequence[Measured], num_elements: float) -> list[float]:
    """What a phase takes with a fragment of that size; where nodes were cut off, by the time it was given."""
    return [
        m.times_for(num_elements) * (m.given_seconds if m.seconds is None else m.seconds)
        for m in history
    ]


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
