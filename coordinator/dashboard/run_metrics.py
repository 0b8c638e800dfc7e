"""The run and its nodes as metrics: the facts of `atoll status`, under names that do not change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.dashboard.timeline import RoundCounts
from protocol.terminal.node_words import STATES, is_present, name_of
from protocol.terminal.status_words import bits_per_byte
from protocol.v1 import status_pb2 as pb
from protocol.web.metrics import Board, Metric, NodeTold, Values, by_direction_and_kind, put_node
from protocol.wire.rounds import OTHER_SOURCES


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTold:
    """What holds of the run now."""

    run: pb.RunStatus
    nodes: Sequence[pb.NodeStatus]
    newest: pb.RoundSummary | None  # of committed rounds
    counts: RoundCounts
    version: str


def _of_newest(read: Callable[[pb.RoundSummary], float | None]) -> Callable[[RunTold], Values]:
    return lambda told: None if told.newest is None else read(told.newest)


def _of_evaluation(
    read: Callable[[RunTold, pb.HeldOutLoss], float | None],
) -> Callable[[RunTold], Values]:
    def latest(told: RunTold) -> Values:
        found = told.run.held_out_losses
        return read(told, found[-1]) if found else None

    return latest


def _of_sources(told: RunTold) -> Values:
    found = told.run.held_out_losses
    by_source = found[-1].by_source if found else ()
    return {(one.source or OTHER_SOURCES,): one.loss for one in by_source} or None


def _samples(told: RunTold) -> Values:
    data = told.run.data
    return {
        ("committed",): data.committed_samples,
        ("leased",): data.leased_samples,
        ("free_again",): data.free_again_samples,
    }


def _followed(told: RunTold) -> list[pb.BackupStatus]:
    """By no place: where copies lie is the run owner's, and metrics are whoever's has the page's link."""
    return [one for one in told.run.backups if one.HasField("next_seconds")]


def _backup_age(told: RunTold) -> Values:
    ages = [one.made_seconds for one in told.run.backups if one.HasField("made_seconds")]
    return min(ages, default=None)


def _backup_abandoned(told: RunTold) -> Values:
    followed = _followed(told)
    return any(one.is_abandoned for one in followed) if followed else None


_OF_RUN: tuple[Metric[RunTold], ...] = (
    Metric(
        name="atoll_run_info",
        meaning="1, with the run's name, its digest and the coordinator's version",
        labels=("run", "run_digest", "version"),
        of=lambda told: {(told.run.run_name, told.run.run_digest.hex(), told.version): 1},
    ),
    Metric(
        name="atoll_uptime_seconds",
        meaning="Seconds since this coordinator process started",
        of=lambda told: told.run.uptime_seconds,
    ),
    Metric(
        name="atoll_committed_round",
        meaning="Newest committed round; 0 before the first",
        of=lambda told: told.run.committed_round,
    ),
    Metric(
        name="atoll_open_round",
        meaning="Round in flight",
        of=lambda told: told.run.open_round or None,
    ),
    Metric(
        name="atoll_run_rounds",
        meaning="Rounds that the run asks for",
        of=lambda told: told.run.total_rounds,
    ),
    Metric(
        name="atoll_run_finished",
        meaning="Whether all rounds are done: 1 or 0",
        of=lambda told: told.run.phase == pb.RUN_PHASE_FINISHED,
    ),
    Metric(
        name="atoll_run_paused",
        meaning="Whether the run is paused, by its owner or by itself: 1 or 0",
        of=lambda told: bool(told.run.paused),
    ),
    Metric(
        name="atoll_members",
        meaning="Members by how they stand with the swarm",
        labels=("state",),
        of=lambda told: {
            (word,): sum(n.state == s for n in told.nodes) for s, (word, _) in STATES.items()
        },
    ),
    Metric(
        name="atoll_min_nodes",
        meaning="Nodes that a round needs",
        of=lambda told: told.run.min_nodes,
    ),
    Metric(
        name="atoll_digests_agree",
        meaning="Whether all nodes at the newest agreed round hold the same state: 1 or 0",
        of=lambda told: told.run.digests_agree if told.run.outer_digest else None,
    ),
    Metric(
        name="atoll_parameters",
        meaning="Parameters of the model",
        of=lambda told: told.run.num_parameters or None,
    ),
    Metric(
        name="atoll_committed_tokens_total",
        meaning="Tokens committed since the run began",
        of=lambda told: told.run.token_clock,
    ),
    Metric(
        name="atoll_tokens_per_second",
        meaning="Training speed of all nodes that are there, over their latest inner steps",
        of=lambda told: sum(n.heartbeat.tokens_per_second for n in told.nodes if is_present(n)),
    ),
    Metric(
        name="atoll_training_loss_nats",
        meaning="Mean training loss of the newest committed round, by tokens",
        of=_of_newest(lambda newest: newest.loss or None),
    ),
    Metric(
        name="atoll_held_out_loss_nats",
        meaning="Held-out loss of the latest evaluation",
        of=_of_evaluation(lambda told, found: found.loss),
    ),
    Metric(
        name="atoll_held_out_source_loss_nats",
        meaning="The same of each source of the data, where there are several",
        labels=("source",),
        of=_of_sources,
    ),
    Metric(
        name="atoll_held_out_bits_per_byte",
        meaning="The same loss in bits per byte of text, by which tokenizers are compared",
        of=_of_evaluation(lambda told, found: bits_per_byte(found.loss, told.run)),
    ),
    Metric(
        name="atoll_held_out_metric",
        meaning="What the run's own function measures beside the loss",
        of=_of_evaluation(lambda told, found: found.metric if found.HasField("metric") else None),
    ),
    Metric(
        name="atoll_held_out_loss_round",
        meaning="Round of that evaluation's state",
        of=_of_evaluation(lambda told, found: found.round),
    ),
    Metric(
        name="atoll_round_seconds",
        meaning="Seconds from plan to commit of the newest committed round",
        of=_of_newest(lambda newest: newest.seconds),
    ),
    Metric(
        name="atoll_round_tokens",
        meaning="Tokens of the newest committed round",
        of=_of_newest(lambda newest: newest.tokens),
    ),
    Metric(
        name="atoll_phase_seconds_total",
        meaning="Seconds in each phase of rounds",
        labels=("phase",),
        of=lambda told: {(phase,): s for phase, s in told.counts.phase_seconds.items()},
    ),
    Metric(
        name="atoll_commits_total",
        meaning="Commits, void ones included",
        of=lambda told: told.counts.commits,
    ),
    Metric(
        name="atoll_void_slices_total",
        meaning="Slices of those commits that are void",
        of=lambda told: told.counts.void_slices,
    ),
    Metric(
        name="atoll_takeovers_total",
        meaning="Slices that were given to another reducer",
        of=lambda told: told.counts.takeovers,
    ),
    Metric(
        name="atoll_audits_total",
        meaning="Times that a member was asked to make a slice again",
        of=lambda told: told.counts.audits,
    ),
    Metric(
        name="atoll_wire_bytes_total",
        meaning="Bytes that committed rounds have cost all nodes since the run began",
        labels=("direction", "kind"),
        of=lambda told: by_direction_and_kind(told.run.wire.counts),
    ),
    Metric(
        name="atoll_all_reduce_bytes_total",
        meaning="Bytes that averaging gradients at every inner step would have cost instead",
        of=lambda told: told.run.wire.all_reduce_bytes,
    ),
    Metric(
        name="atoll_samples",
        meaning="Places of the sample order: committed, leased now, or free to be leased again",
        labels=("state",),
        of=_samples,
    ),
    Metric(
        name="atoll_backup_age_seconds",
        meaning="Seconds since the newest whole copy of the coordinator, wherever it lies",
        of=_backup_age,
    ),
    Metric(
        name="atoll_backup_failures",
        meaning="Tries to copy the coordinator that failed in a row, at the place where most did",
        of=lambda told: max((one.num_failures for one in _followed(told)), default=None),
    ),
    Metric(
        name="atoll_backup_abandoned",
        meaning="Whether a copy for some place is so long overdue that nobody can be making any: 1 or 0",
        of=_backup_abandoned,
    ),
    Metric(
        name="atoll_disk_free_bytes",
        meaning="Free bytes of the disk of the coordinator's folder",
        of=lambda told: told.run.disk_free_bytes if told.run.HasField("disk_free_bytes") else None,
    ),
    Metric(
        name="atoll_disk_low",
        meaning="Whether that is so little that somebody should make room: 1 or 0",
        of=lambda told: told.run.is_disk_low if told.run.HasField("disk_free_bytes") else None,
    ),
    Metric(
        name="atoll_disk_write_seconds",
        meaning="Seconds of the coordinator's slowest write in ten minutes; all nodes wait for each",
        of=lambda told: (
            told.run.disk_write_seconds if told.run.HasField("disk_write_seconds") else None
        ),
    ),
)

_OF_MEMBERS: tuple[Metric[pb.NodeStatus], ...] = (
    Metric(
        name="atoll_node_silent_seconds",
        meaning="Seconds since the node was last heard",
        labels=("node", "node_id"),
        of=lambda node: node.silent_seconds if is_present(node) else None,
    ),
    Metric(
        name="atoll_node_committed_tokens_total",
        meaning="Tokens that commits took from the node",
        labels=("node", "node_id"),
        of=lambda node: node.committed_tokens,
    ),
)
"""Nodes that are gone keep their tokens; all else is of those that are there."""

RUN_METRICS: tuple[Metric[Any], ...] = (*_OF_RUN, *_OF_MEMBERS)
"""Of the coordinator, besides those of each node (protocol.web.metrics)."""


def board_of(
    status: pb.GetStatusResponse,
    newest: pb.RoundSummary | None,
    counts: RoundCounts,
    *,
    version: str,
) -> Board:
    """What holds now."""
    board, run, nodes = Board(), status.run, status.nodes
    told = RunTold(run=run, nodes=nodes, newest=newest, counts=counts, version=version)
    board.tell(_OF_RUN, told)
    for node in nodes:
        board.tell(_OF_MEMBERS, node, name_of(node), node.node_id)
        if is_present(node):
            beat = node.heartbeat if node.HasField("heartbeat") else None
            node_told = NodeTold(
                node_name=name_of(node),
                node_id=node.node_id,
                device=node.device,
                version=node.version,
                heartbeat=beat,
            )
            put_node(board, node_told)
    return board
