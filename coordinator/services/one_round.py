"""One round for people: what its database row, its figures and its times tell of each participant. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from coordinator.dashboard.timeline import MOST_NODES, RoundTimes, Stages, waited_for
from coordinator.round_rows import screening_to_wire
from coordinator.swarm.books import screenings_of
from coordinator.swarm.members import Screening
from coordinator.swarm.state import KEPT_ROUNDS, ClosedRound, Round, SwarmState
from protocol.v1 import status_pb2 as pb
from protocol.wire.messages import Trained
from protocol.wire.rounds import Assignment, Commit, NodeId, Slice, training_in

LATE_START_SECONDS = 1.0
"""A coordinator that heard a round's first report so long after its plan was started in between."""

NO_TIMES = (
    "when each node did what is not known of this round: the coordinator has kept no times of it"
)


def open_round(
    state: SwarmState,
    current: Round,
    figures: pb.RoundSummary | None,
    times: RoundTimes | None,
    *,
    now: float,
) -> pb.GetRoundResponse:
    """The round in flight; with `figures` once it is committed."""
    training = len(training_in(current.assignments))
    summary = figures or pb.RoundSummary(
        round=current.number,
        fragment=current.fragment,
        num_participants=training,
        num_slices=len(current.slices),
        reason=current.reason,
    )
    told = pb.GetRoundResponse(
        summary=summary,
        is_open=True,
        seconds=max(0.0, now - current.opened_at),
        committed_seconds=max(0.0, current.committed_at - current.opened_at)
        if current.commit is not None
        else None,
        nodes=_nodes(
            state,
            current.assignments,
            [progress.slice for progress in current.slices],
            current.trained,
            current.commit,
            times,
        ),
        void_slices=_void(current.commit),
    )
    _add_times(told, times)
    return told


def closed_round(
    state: SwarmState,
    figures: pb.RoundSummary,
    closed: ClosedRound | None,
    times: RoundTimes | None,
) -> pb.GetRoundResponse:
    """A round that is over, as far as it is kept."""
    told = pb.GetRoundResponse(summary=figures)
    if figures.seconds:  # a round that nodes brought back took nobody knows how long
        told.seconds = told.committed_seconds = figures.seconds
    if closed is not None:
        commit = closed.commit
        told.nodes.extend(
            _nodes(state, commit.assignments, closed.plan.slices, closed.trained, commit, times)
        )
        told.void_slices.extend(_void(commit))
    else:
        told.not_kept = f"of rounds more than {KEPT_ROUNDS} back only the figures are kept"
        told.nodes.extend(_of_times_alone(times))
    _add_times(told, times)
    return told


def _add_times(told: pb.GetRoundResponse, times: RoundTimes | None) -> None:
    gaps = [told.not_kept] if told.not_kept else []
    if times is None:
        gaps.append(NO_TIMES)
    else:
        told.waited_for = waited_for(times)
        if times.ended is not None:
            told.seconds = max(0.0, times.ended - times.opened)
            if times.ended_unix is not None:
                told.opened_unix_seconds = times.ended_unix - told.seconds
        if times.committed is not None:
            told.committed_seconds = max(0.0, times.committed - times.opened)
        late = times.heard - times.opened
        if late > LATE_START_SECONDS:
            gaps.append(
                f"the coordinator was started {late:.0f} s into this round: what it was told before "
                "that counts from then"
            )
        if len(told.nodes) > MOST_NODES:
            gaps.append(
                f"of a round of more than {MOST_NODES} nodes the times of those that were last are "
                "kept, and none of reducing and receiving"
            )
    told.not_kept = "; ".join(gaps)


def _nodes(
    state: SwarmState,
    assignments: Sequence[Assignment],
    slices: Iterable[Slice],
    trained: Mapping[NodeId, Trained],
    commit: Commit | None,
    times: RoundTimes | None,
) -> list[pb.NodeInRound]:
    reduces: dict[NodeId, int] = {}
    for each in slices:
        reduces[each.reducer_id] = reduces.get(each.reducer_id, 0) + 1
    screened = {} if commit is None else screenings_of(commit)
    told = []
    for assignment in sorted(assignments, key=lambda one: one.node_id):
        node_id = assignment.node_id
        stages = None if times is None else times.nodes.get(node_id)
        node = _stages_to_wire(node_id, stages, times)
        if (member := state.members.get(node_id)) is not None:
            node.node_name = member.node_name
        node.inner_steps = assignment.inner_steps
        node.num_slices_reduced = reduces.get(node_id, 0)
        if (report := trained.get(node_id)) is not None:
            node.trained_inner_steps = report.inner_steps
            node.trained_tokens = report.tokens
            node.loss = report.loss
        if commit is not None:
            none = Screening(round=commit.round, num_contributions=0, num_clipped=0, num_left_out=0)
            node.screening.CopyFrom(screening_to_wire(state, node_id, screened.get(node_id, none)))
        told.append(node)
    return told


def _of_times_alone(times: RoundTimes | None) -> list[pb.NodeInRound]:
    if times is None:
        return []
    return [
        _stages_to_wire(node_id, times.nodes[node_id], times) for node_id in sorted(times.nodes)
    ]


def _stages_to_wire(
    node_id: NodeId, stages: Stages | None, times: RoundTimes | None
) -> pb.NodeInRound:
    node = pb.NodeInRound(node_id=node_id)
    if stages is None or times is None:
        return node
    node.node_name = stages.name
    for field, at in (
        ("trained_seconds", stages.trained),
        ("reduced_seconds", stages.reduced),
        ("held_seconds", stages.held),
        ("applied_seconds", stages.applied),
    ):
        if at is not None:
            setattr(node, field, round(max(0.0, at - times.opened), 3))
    return node


def _void(commit: Commit | None) -> list[pb.VoidSlice]:
    return [
        pb.VoidSlice(index=outcome.index, reason=outcome.void_reason)
        for outcome in (() if commit is None else commit.slices)
        if outcome.digest is None
    ]
