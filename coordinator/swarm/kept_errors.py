"""What reducers keep: the error that one adds must be what a committed result of its own has left. Pure."""

from dataclasses import replace

from coordinator.swarm.events import Turn
from coordinator.swarm.members import KeptError
from coordinator.swarm.penalties import strike
from coordinator.swarm.state import Round, SliceProgress, SwarmState
from protocol.wire.rounds import Commit

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
