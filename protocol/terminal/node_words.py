"""What a status says of nodes, in words and figures. Pure."""

from collections.abc import Iterable

from protocol.terminal.console import age_in_words, bytes_in_words, seconds_in_words
from protocol.v1 import status_pb2 as pb
from protocol.wire.rounds import OWN_LOOP

SILENT_SECONDS = 6.0
"""A node not heard for this long is shown as silent: two heartbeats at the default lease."""

_NAME_WIDTH = 16

STATES: dict[pb.NodeState.ValueType, tuple[str, str]] = {  # word and colour
    pb.NODE_STATE_JOINING: ("joining", "cyan"),
    pb.NODE_STATE_READY: ("ready", "green"),
    pb.NODE_STATE_DIVERGED: ("diverged", "bold red"),
    pb.NODE_STATE_LOST: ("lost", "red"),
    pb.NODE_STATE_LEFT: ("left", "dim"),
    pb.NODE_STATE_UNAPPROVED: ("unapproved", "yellow"),
    pb.NODE_STATE_QUARANTINED: ("quarantined", "yellow"),
    pb.NODE_STATE_EXPELLED: ("expelled", "red"),
}

GONE = frozenset(
    {
        *(pb.NODE_STATE_LOST, pb.NODE_STATE_LEFT, pb.NODE_STATE_UNAPPROVED),
        *(pb.NODE_STATE_QUARANTINED, pb.NODE_STATE_EXPELLED),
    }
)
"""States of a node that takes no part now."""


def is_present(node: pb.NodeStatus) -> bool:
    """Whether the node is a member with a live session."""
    return node.state not in GONE


def state_in_words(node: pb.NodeStatus) -> str:
    """How the node stands with the swarm, in one word."""
    return styled_state(node)[0]


def styled_state(node: pb.NodeStatus) -> tuple[str, str]:
    """In one word, and its colour."""
    if node.is_draining and node.state not in GONE:
        return "leaving", "yellow"
    return STATES.get(node.state, ("unknown", ""))


def name_of(node: pb.NodeStatus) -> str:
    """What people call the node; the beginning of its id when it has no name."""
    return node.node_name or node.node_id[:8]


def by_name(nodes: Iterable[pb.NodeStatus]) -> list[pb.NodeStatus]:
    """The nodes as people look for them; their ids, by which they come, say nothing to people."""
    return sorted(nodes, key=lambda node: (name_of(node), node.node_id))


def heard_in_words(node: pb.NodeStatus) -> str:
    """How long ago the coordinator heard it; '-' of one that was never here."""
    if node.is_unheard:
        return "before the restart"
    return age_in_words(node.silent_seconds) if node.device else "-"


def device_in_words(node: pb.NodeStatus) -> str:
    """What it trains on, and how its ranks share the work; of a helper, that it is one."""
    if node.is_helper:
        return "helper"
    if not node.device:  # it was never here
        return "-"
    ranks = f"{node.device} ×{node.num_ranks}"
    mesh = node.heartbeat.mesh
    return f"{ranks}, {mesh}" if mesh and node.num_ranks > 1 else ranks


def sent_bytes(node: pb.NodeStatus) -> int:
    """Bytes that the node has sent since it started, of all kinds."""
    return sum(count.sent_bytes for count in node.heartbeat.wire)


def wire_in_words(node: pb.NodeStatus) -> tuple[str, str]:
    """Bytes that the node has sent and received since it started; before it has said so, nothing."""
    counts = node.heartbeat.wire
    if not counts:
        return "-", "-"
    received = sum(count.received_bytes for count in counts)
    return bytes_in_words(sent_bytes(node)), bytes_in_words(received)


def carried_in_words(node: pb.NodeStatus) -> str:
    """What it has passed on for pairs that do not reach each other; empty where that is nothing."""
    num_bytes = sum(c.sent_bytes for c in node.heartbeat.wire if c.kind == "carried")
    return f"{bytes_in_words(num_bytes)} for others" if num_bytes else ""


def copies_in_words(nodes: Iterable[pb.NodeStatus]) -> str:
    """Which nodes run twice, in words; empty when none does."""
    twice = [name_of(node) for node in by_name(nodes) if node.has_waiting_copy]
    if not twice:
        return ""
    verb, whose = ("has", "its") if len(twice) == 1 else ("have", "their")
    return (
        f"{', '.join(twice)} {verb} a second process with {whose} key waiting: stop one of the two"
    )


def rates_in_words(nodes: Iterable[pb.NodeStatus]) -> str:
    """What the links of nodes carry; empty before anything was measured."""
    return "; ".join(
        f"{name_of(node)} {link_in_words(node)}"
        for node in by_name(nodes)
        if node.HasField("link_rates") and node.state not in GONE
    )


def link_in_words(node: pb.NodeStatus) -> str:
    """What the node's link carries, as plans count on it."""
    if not node.HasField("link_rates"):
        return "-"
    rates = node.link_rates
    return f"{_rate(rates.up_bytes_per_second)} up, {_rate(rates.down_bytes_per_second)} down"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_in_words(bytes_per_second)}/s" if bytes_per_second else "?"


def time_in_words(node: pb.NodeStatus) -> str:
    """Where the time of its latest round went; what was not measured is said to be so."""
    if node.state in GONE or not node.heartbeat.HasField("utilisation"):
        return "-"
    made = node.heartbeat.utilisation
    local = (
        f"{made.local_communication_share:.0%} local"
        if made.HasField("local_communication_share")
        else "local not measured"
    )
    exchange = made.exchange_share + made.publish_share + made.adopt_share
    return (
        f"{made.compute_share:.0%} compute, {local}, {exchange:.0%} exchange, "
        f"{made.waiting_share:.0%} waiting"
    )


def mfu_in_words(node: pb.NodeStatus) -> str:
    """Of the peak of its devices, and whether that peak is the vendor's."""
    made = node.heartbeat.utilisation
    if node.state in GONE or not made.HasField("mfu"):
        return "-"
    return f"{made.mfu:.1%} of {'a measured' if made.is_peak_measured else 'the'} peak"


def memory_in_words(node: pb.NodeStatus) -> str:
    """Most memory of one of its ranks."""
    made = node.heartbeat.utilisation
    return bytes_in_words(made.peak_memory_bytes) if made.peak_memory_bytes else "-"


def screening_in_words(told: pb.Screening) -> str:
    """How many of a node's contributions screening left out or clipped; "-" where it has had none."""
    if not told.num_contributions:
        return "-"
    counts = ((told.num_left_out, "left out"), (told.num_clipped, "clipped"))
    cut = ", ".join(f"{count} {word}" for count, word in counts if count)
    return f"{cut} of {told.num_contributions}" if cut else f"none of {told.num_contributions}"


def work_in_words(node: pb.NodeStatus) -> str:
    """A node's part of the confirmed work of those present."""
    if not node.HasField("confirmed_work_share"):
        return "-"
    return f"{100 * node.confirmed_work_share:.0f}%"


def given_in_words(given: pb.Given) -> str:
    """The bytes that a node has moved for the run."""
    return (
        f"{bytes_in_words(given.sent_bytes)} sent, {bytes_in_words(given.received_bytes)} received"
    )


def invite_in_words(node: pb.NodeStatus) -> str:
    """By which invite it is here, and whether that is of the run owner's own machines."""
    own = ("own",) if node.is_own else ()
    return " ".join((*own, node.invite_id)) or "-"


def text_in_words(node: pb.NodeStatus) -> str:
    """Whether it reads what others read; '-' of one that was never here, and has not said it."""
    if node.same_corpus:
        return "same"
    if node.device == OWN_LOOP:
        return "its loop's"
    return "other" if node.num_ranks or node.HasField("heartbeat") else "-"


def counted_in_words(run: pb.RunStatus) -> str:
    """What the run counts, in the plural."""
    return run.counted or "tokens"


def short_name(name: str) -> str:
    """A name that fits its column, with its end: nodes of one name differ there."""
    if len(name) <= _NAME_WIDTH:
        return name
    tail = _NAME_WIDTH // 3
    return f"{name[: _NAME_WIDTH - tail - 1]}…{name[-tail:]}"


def activity_in_words(node: pb.NodeStatus, run: pb.RunStatus) -> str:
    """What the node does now, or for how long it has been silent."""
    if node.silent_seconds > SILENT_SECONDS:
        return f"silent {seconds_in_words(node.silent_seconds)}"
    beat = node.heartbeat
    if beat.activity.startswith("training"):
        # Nothing is asked of a node that trains on after its round has ended without it.
        return f"{beat.activity} {beat.inner_step}/{node.inner_steps or run.inner_steps}"
    return beat.activity or "-"
