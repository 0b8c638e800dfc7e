"""What the demo says at the end: what was learned, what it cost on the wire, whether all agree."""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import AtollError
from protocol.terminal.console import (
    bytes_in_words,
    count_in_words,
    digest_in_words,
    seconds_in_words,
)
from protocol.terminal.node_words import by_name, name_of, sent_bytes
from protocol.v1 import status_pb2 as pb


class NotProvenError(AtollError):
    """The nodes did not all show the same final outer state: the promise of the whole thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes sent over the run against gradient averaging at every inner step."""

    sent_bytes: int  # by all nodes
    averaging_bytes: float  # by all nodes, had they averaged gradients

    @property
    def times_less(self) -> float:
        """How many times fewer bytes were sent; 0 when nothing would have been sent anyway."""
        return self.averaging_bytes / self.sent_bytes if self.sent_bytes else 0.0


def agreed_digest(nodes: Sequence[pb.NodeStatus], *, round: int, num_nodes: int) -> bytes:
    """The outer digest that every node reported itself at the round.

    Raises NotProvenError when one differs, is missing, or stands at another round.
    """
    if len(nodes) != num_nodes:
        raise NotProvenError(f"{len(nodes)} of {num_nodes} nodes are known to the coordinator")
    for node in nodes:
        beat = node.heartbeat
        if beat.outer_round != round or not beat.outer_digest:
            raise NotProvenError(
                f"{name_of(node)} did not report its outer state at round {round}: "
                f"its last report is of round {beat.outer_round}",
                next_step=f"read the log of {name_of(node)}",
            )
    digests = {bytes(node.heartbeat.outer_digest) for node in nodes}
    if len(digests) > 1:
        found = ", ".join(
            f"{name_of(n)} {digest_in_words(n.heartbeat.outer_digest)}" for n in nodes
        )
        raise NotProvenError(
            f"the nodes do not hold the same outer state at round {round}: {found}",
            next_step="report this as a bug, with the folder of the demo",
        )
    return digests.pop()


def traffic_of(
    nodes: Sequence[pb.NodeStatus], *, num_parameters: int, tokens_per_inner_step: int
) -> Traffic:
    """Compares with a ring all-reduce of fp32 gradients at every inner step that commits took.

    In a ring each of N nodes sends 2·(N−1)/N of the vector (Patarasuk and Yuan 2009, "Bandwidth
    optimal all-reduce algorithms"). Framing is left out for it and counted for us.
    """
    share = 2 * (len(nodes) - 1) / len(nodes) if nodes else 0.0
    num_inner_steps = sum(node.committed_tokens for node in nodes) / tokens_per_inner_step
    return Traffic(
        sent_bytes=sum(map(sent_bytes, nodes)),
        averaging_bytes=share * 4 * num_parameters * num_inner_steps,
    )


def final_report(
    status: pb.GetStatusResponse,
    *,
    num_nodes: int,
    tokens_per_inner_step: int,
    seconds: float,
) -> list[str]:
    """The lines about losses, bytes and digests. Raises NotProvenError."""
    run, nodes = status.run, by_name(status.nodes)
    digest = agreed_digest(nodes, round=run.total_rounds, num_nodes=num_nodes)
    traffic = traffic_of(
        nodes,
        num_parameters=run.num_parameters,
        tokens_per_inner_step=tokens_per_inner_step,
    )
    return [
        f"trained       {count_in_words(run.num_parameters)} parameters on "
        f"{count_in_words(run.token_clock)} tokens, {run.total_rounds} rounds, "
        f"{num_nodes} nodes, {seconds_in_words(seconds)} in all",
        _loss_line(run),
        *_traffic_lines(traffic, nodes),
        f"outer state   {digest_in_words(digest)} at round {run.total_rounds}, "
        f"the same on {', '.join(map(name_of, nodes))}",
    ]


def _loss_line(run: pb.RunStatus) -> str:
    if not run.held_out_losses:
        raise NotProvenError("no held-out loss was measured", next_step="read the nodes' logs")
    first, last = run.held_out_losses[0], run.held_out_losses[-1]
    return (
        f"held-out loss {first.loss:.3f} at round {first.round} → "
        f"{last.loss:.3f} at round {last.round}, nats per byte"
    )


def _traffic_lines(traffic: Traffic, nodes: Sequence[pb.NodeStatus]) -> list[str]:
    each = ", ".join(f"{name_of(node)} {bytes_in_words(sent_bytes(node))}" for node in nodes)
    if len(nodes) < 2:
        return [f"sent          {each}; one node has nobody to exchange with"]
    average = bytes_in_words(traffic.averaging_bytes / len(nodes))
    return [
        f"sent          {each}: {traffic.times_less:.0f} times less than averaging gradients",
        f"              ({average} a node: a ring all-reduce in fp32 at every inner step)",
    ]
