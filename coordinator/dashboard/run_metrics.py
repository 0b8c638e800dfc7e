"""The run and its nodes as metrics: the facts of `atoll status`, under names that do not change."""

from collections.abc import Sequence

from coordinator.dashboard.timeline import RoundCounts
from protocol.terminal.node_words import name_of
from protocol.terminal.status_words import bits_per_byte
from protocol.v1 import status_pb2 as pb
from protocol.web.metrics import NODE_METRICS, Board, Metric, put_node

_STATES = {
    pb.NODE_STATE_JOINING: "joining",
    pb.NODE_STATE_READY: "ready",
    pb.NODE_STATE_DIVERGED: "diverged",
    pb.NODE_STATE_LOST: "lost",
    pb.NODE_STATE_LEFT: "left",
    pb.NODE_STATE_UNAPPROVED: "unapproved",
    pb.NODE_STATE_QUARANTINED: "quarantined",
    pb.NODE_STATE_EXPELLED: "expelled",
}
_GONE = frozenset(
    {
        *(pb.NODE_STATE_LOST, pb.NODE_STATE_LEFT, pb.NODE_STATE_UNAPPROVED),
        *(pb.NODE_STATE_QUARANTINED, pb.NODE_STATE_EXPELLED),
    }
)

RUN_METRICS = (
    Metric(
        name="atoll_run_info",
        kind="gauge",
        meaning="1, with the run's name, its digest and the coordinator's version",
        labels=("run", "run_digest", "version"),
    ),
    Metric(
        name="atoll_uptime_seconds",
        kind="gauge",
        meaning="Seconds since this coordinator process started",
    ),
    Metric(
        name="atoll_committed_round",
        kind="gauge",
        meaning="Newest committed round; 0 before the first",
    ),
    Metric(name="atoll_open_round", kind="gauge", meaning="Round in flight; left out when none is"),
    Metric(name="atoll_run_rounds", kind="gauge", meaning="Rounds that the run asks for"),
    Metric(name="atoll_run_finished", kind="gauge", meaning="Whether all rounds are done: 1 or 0"),
    Metric(
        name="atoll_run_paused",
        kind="gauge",
        meaning="Whether the run is paused, by its owner or by itself: 1 or 0",
    ),
    Metric(
        name="atoll_members",
        kind="gauge",
        meaning="Members by how they stand with the swarm",
        labels=("state",),
    ),
    Metric(name="atoll_min_nodes", kind="gauge", meaning="Nodes that a round needs"),
    Metric(
        name="atoll_digests_agree",
        kind="gauge",
        meaning="Whether all nodes at the newest agreed round hold the same state: 1 or 0",
    ),
    Metric(name="atoll_parameters", kind="gauge", meaning="Parameters of the model"),
    Metric(
        name="atoll_committed_tokens_total",
        kind="counter",
        meaning="Tokens committed since the run began",
    ),
    Metric(
        name="atoll_tokens_per_second",
        kind="gauge",
        meaning="Training speed of all nodes that are there, over their latest inner steps",
    ),
    Metric(
        name="atoll_training_loss_nats",
        kind="gauge",
        meaning="Mean training loss of the newest committed round, by tokens, nats per token or as a "
        "function of the run's own has it",
    ),
    Metric(
        name="atoll_held_out_loss_nats",
        kind="gauge",
        meaning="Held-out loss of the latest evaluation, nats per token or as a function of the run's own "
        "has it",
    ),
    Metric(
        name="atoll_held_out_bits_per_byte",
        kind="gauge",
        meaning="The same loss in bits per byte of text, by which tokenizers are compared",
    ),
    Metric(
        name="atoll_held_out_metric",
        kind="gauge",
        meaning="What the run's own function measures beside the loss",
    ),
    Metric(
        name="atoll_held_out_loss_round", kind="gauge", meaning="Round of that evaluation's state"
    ),
    Metric(
        name="atoll_round_seconds",
        kind="gauge",
        meaning="Seconds from plan to commit of the newest committed round",
    ),
    Metric(name="atoll_round_tokens", kind="gauge", meaning="Tokens of the newest committed round"),
    Metric(
        name="atoll_phase_seconds_total",
        kind="counter",
        meaning="Seconds in each phase of rounds since this coordinator started",
        labels=("phase",),
    ),
    Metric(
        name="atoll_commits_total",
        kind="counter",
        meaning="Commits since this coordinator started, void ones included",
    ),
    Metric(
        name="atoll_void_slices_total",
        kind="counter",
        meaning="Slices of those commits that are void",
    ),
    Metric(
        name="atoll_takeovers_total",
        kind="counter",
        meaning="Slices that were given to another reducer since this coordinator started",
    ),
    Metric(
        name="atoll_audits_total",
        kind="counter",
        meaning="Times that a member was asked to make a slice again since this coordinator started",
    ),
    Metric(
        name="atoll_wire_bytes_total",
        kind="counter",
        meaning="Bytes that committed rounds have cost all nodes since the run began",
        labels=("direction", "kind"),
    ),
    Metric(
        name="atoll_all_reduce_bytes_total",
        kind="counter",
        meaning="Bytes that averaging gradients at every inner step would have cost instead",
    ),
    Metric(
        name="atoll_samples",
        kind="gauge",
        meaning="Places of the sample order: committed, leased now, or free to be leased again",
        labels=("state",),
    ),
    Metric(
        name="atoll_backup_age_seconds",
        kind="gauge",
        meaning="Seconds since the newest whole copy of the coordinator, wherever it lies",
    ),
    Metric(
        name="atoll_backup_failures",
        kind="gauge",
        meaning="Tries to copy the coordinator that failed in a row, at the place where most did",
    ),
    Metric(
        name="atoll_backup_abandoned",
        kind="gauge",
        meaning="Whether a copy for some place is so long overdue that nobody can be making any: 1 or 0",
    ),
    Metric(
        name="atoll_disk_free_bytes",
        kind="gauge",
        meaning="Free bytes of the disk of the coordinator's folder",
    ),
    Metric(
        name="atoll_disk_low",
        kind="gauge",
        meaning="Whether that is so little that somebody should make room: 1 or 0",
    ),
    Metric(
        name="atoll_node_silent_seconds",
        kind="gauge",
        meaning="Seconds since the node was last heard",
        labels=("node", "node_id"),
    ),
    Metric(
        name="atoll_node_committed_tokens_total",
        kind="counter",
        meaning="Tokens that commits took from the node",
        labels=("node", "node_id"),
    ),
)
"""Of the coordinator, besides those of each node (protocol.web.metrics)."""


def board_of(
    status: pb.GetStatusResponse,
    newest: pb.RoundSummary | None,
    counts: RoundCounts,
    *,
    version: str,
) -> Board:
    """What holds now. Nodes that are gone keep their tokens; all else is of those that are there."""
    board = Board((*RUN_METRICS, *NODE_METRICS))
    _put_run(board, status.run, version)
    _put_members(board, status.nodes)
    _put_counts(board, counts)
    if newest is not None:
        board.put("atoll_round_seconds", newest.seconds)
        board.put("atoll_round_tokens", newest.tokens)
        board.put("atoll_training_loss_nats", newest.loss or None)
    return board


def _put_run(board: Board, run: pb.RunStatus, version: str) -> None:
    digest = run.run_digest.hex()
    board.put("atoll_run_info", 1, run=run.run_name, run_digest=digest, version=version)
    board.put("atoll_uptime_seconds", run.uptime_seconds)
    board.put("atoll_committed_round", run.committed_round)
    board.put("atoll_open_round", run.open_round or None)
    board.put("atoll_run_rounds", run.total_rounds)
    board.put("atoll_run_finished", run.phase == pb.RUN_PHASE_FINISHED)
    board.put("atoll_run_paused", bool(run.paused))
    board.put("atoll_min_nodes", run.min_nodes)
    board.put("atoll_digests_agree", run.digests_agree if run.outer_digest else None)
    board.put("atoll_parameters", run.num_parameters or None)
    board.put("atoll_committed_tokens_total", run.token_clock)
    if run.held_out_losses:
        board.put("atoll_held_out_loss_nats", run.held_out_losses[-1].loss)
        board.put("atoll_held_out_bits_per_byte", bits_per_byte(run.held_out_losses[-1].loss, run))
        if run.held_out_losses[-1].HasField("metric"):
            board.put("atoll_held_out_metric", run.held_out_losses[-1].metric)
        board.put("atoll_held_out_loss_round", run.held_out_losses[-1].round)
    for counted in run.wire.counts:
        for direction, num_bytes in (
            ("sent", counted.sent_bytes),
            ("received", counted.received_bytes),
        ):
            board.put("atoll_wire_bytes_total", num_bytes, direction=direction, kind=counted.kind)
    board.put("atoll_all_reduce_bytes_total", run.wire.all_reduce_bytes)
    board.put("atoll_samples", run.data.committed_samples, state="committed")
    board.put("atoll_samples", run.data.leased_samples, state="leased")
    board.put("atoll_samples", run.data.free_again_samples, state="free_again")
    if run.HasField("disk_free_bytes"):
        board.put("atoll_disk_free_bytes", run.disk_free_bytes)
        board.put("atoll_disk_low", run.is_disk_low)
    _put_backups(board, run.backups)


def _put_backups(board: Board, backups: Sequence[pb.BackupStatus]) -> None:
    """By no place: where copies lie is the run owner's, and metrics are whoever's has the page's link."""
    ages = [one.made_seconds for one in backups if one.HasField("made_seconds")]
    followed = [one for one in backups if one.HasField("next_seconds")]
    board.put("atoll_backup_age_seconds", min(ages, default=None))
    if followed:
        board.put("atoll_backup_failures", max(one.num_failures for one in followed))
        board.put("atoll_backup_abandoned", any(one.is_abandoned for one in followed))


def _put_members(board: Board, nodes: Sequence[pb.NodeStatus]) -> None:
    for state, word in _STATES.items():
        board.put("atoll_members", sum(node.state == state for node in nodes), state=word)
    present = [node for node in nodes if node.state not in _GONE]
    board.put("atoll_tokens_per_second", sum(n.heartbeat.tokens_per_second for n in present))
    for node in nodes:
        own = {"node": name_of(node), "node_id": node.node_id}
        board.put("atoll_node_committed_tokens_total", node.committed_tokens, **own)
    for node in present:
        own = {"node": name_of(node), "node_id": node.node_id}
        board.put("atoll_node_silent_seconds", node.silent_seconds, **own)
        put_node(
            board,
            node_name=name_of(node),
            node_id=node.node_id,
            device=node.device,
            version=node.version,
            heartbeat=node.heartbeat if node.HasField("heartbeat") else None,
        )


def _put_counts(board: Board, counts: RoundCounts) -> None:
    for phase, seconds in counts.phase_seconds.items():
        board.put("atoll_phase_seconds_total", seconds, phase=phase)
    board.put("atoll_commits_total", counts.commits)
    board.put("atoll_void_slices_total", counts.void_slices)
    board.put("atoll_takeovers_total", counts.takeovers)
    board.put("atoll_audits_total", counts.audits)
