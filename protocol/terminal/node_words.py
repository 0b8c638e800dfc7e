"""What a status says of nodes, in words and figures: of each, and how they reach each other. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from protocol.terminal.console import age_in_words, bytes_in_words, count_in_words, seconds_in_words
from protocol.v1 import status_pb2 as pb
from protocol.v1.session_pb2 import HeartbeatRequest
from protocol.wire.rounds import OWN_LOOP
from protocol.wire.vitals import loss_in_words, upload_in_words

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


# How they reach each other

MOST_NAMED = 4
"""Nodes in a line; of the others the number."""

MOST_PAIRS = 20
"""Of nodes that do not reach each other, in one sentence."""

NARROW = "only small packets get through"
NARROW_STEP = "lower the MTU of one of the two: 'sudo ip link set dev NAME mtu 1280'"

Pair = tuple[str, str]
"""Ids of two present nodes, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """What one of each pair says; nothing of pairs that reach each other directly."""

    present: Mapping[str, pb.NodeStatus]  # by id
    cut: set[Pair]  # without a connection
    narrow: set[Pair]  # likewise, for large packets between them get lost
    punched: set[Pair]  # through holes in their routers
    by_proxy: set[Pair]  # through a network's proxy
    carried: Mapping[Pair, str]  # by whom
    helpers: Sequence[str]  # by name

    @classmethod
    def among(cls, nodes: Iterable[pb.NodeStatus]) -> Self:
        """Who was not heard since the coordinator's restart may have left meanwhile."""
        present = {n.node_id: n for n in nodes if is_present(n) and not n.is_unheard}

        def pairs(others_of: Callable[[HeartbeatRequest], Iterable[str]]) -> set[Pair]:
            return {
                _pair(node_id, other)
                for node_id, node in present.items()
                for other in others_of(node.heartbeat)
                if other in present
            }

        cut = pairs(lambda beat: beat.unreachable_ids)
        return cls(
            present=present,
            cut=cut,
            narrow=pairs(lambda beat: beat.narrow_ids),
            punched=pairs(lambda beat: beat.punched_ids) - cut,
            by_proxy=pairs(lambda beat: beat.by_proxy_ids) - cut,
            carried={
                _pair(node_id, told.node_id): told.through_id
                for node_id, node in present.items()
                for told in node.heartbeat.through
                if {told.node_id, told.through_id} <= present.keys()
            },
            helpers=[node.node_id for node in by_name(present.values()) if node.is_helper],
        )

    def between(self, pair: Pair) -> str:
        """Who carries for a pair that is cut off, or else the first helper that both reach; or nobody."""
        if between := self.carried.get(pair):
            return self.name(between)
        helpers = self.helpers if {*pair}.isdisjoint(self.helpers) else ()
        reached = (h for h in helpers if not any(_pair(n, h) in self.cut for n in pair))
        return self.name(helper) if (helper := next(reached, "")) else ""

    def name(self, node_id: str) -> str:
        """What people call the node."""
        return name_of(self.present[node_id])

    def names(self, pair: Iterable[str]) -> list[str]:
        """In order."""
        return sorted(map(self.name, pair))


def cut_pairs(nodes: Iterable[pb.NodeStatus]) -> set[Pair]:
    """Each two present nodes of which one says that it does not reach the other."""
    return _Ways.among(nodes).cut


def cut_off(nodes: Iterable[pb.NodeStatus]) -> str:
    """Which nodes do not reach each other, and which do by other ways than directly; empty when all do."""
    ways = _Ways.among(nodes)
    apart: list[str] = []
    through: dict[str, set[str]] = {}  # names, by who is between
    for pair in ways.cut:
        names = ways.names(pair)
        if between := ways.between(pair):
            through.setdefault(between, set()).update(names)
        if pair in ways.narrow:
            apart.append(f"between {names[0]} and {names[1]} {NARROW}: {NARROW_STEP}")
        elif not between:
            strict = ways.names(n for n in pair if ways.present[n].has_symmetric_router)
            why = f" (symmetric router: {', '.join(strict)})" if strict else ""
            apart.append(f"{names[0]} and {names[1]} do not reach each other{why}")
    told = _some_of(apart)
    for between, ends in sorted(through.items()):
        told.append(f"{_some_named(ends)} reach each other through {between}")
    holes = map(ways.names, ways.punched)
    told += _some_of(f"{one} and {other} reach each other, punched" for one, other in holes)
    for node_id, node in ways.present.items():
        others = (o for o in node.heartbeat.by_proxy_ids if _pair(node_id, o) in ways.by_proxy)
        if names := [ways.name(other) for other in others]:
            told.append(f"{name_of(node)} reaches {_some_named(names)} by proxy")
    return "; ".join(told)


def ways_to_others(node: pb.NodeStatus, nodes: Iterable[pb.NodeStatus]) -> str:
    """How a present node reaches the others, in words."""
    told = [f"{name} {way}" for name, way in ways_of(node, nodes)]
    if len(told) > MOST_PAIRS:
        told[MOST_PAIRS:] = [f"and {len(told) - MOST_PAIRS} more"]
    return ", ".join(told)


def ways_of(node: pb.NodeStatus, nodes: Iterable[pb.NodeStatus]) -> list[tuple[str, str]]:
    """The others by name, each with its way: direct, punched, by proxy, through another, or not reached.

    Nothing of a node that is not present.
    """
    ways = _Ways.among(nodes)
    if node.node_id not in ways.present:
        return []
    told = []
    for other in by_name(ways.present.values()):
        pair = _pair(node.node_id, other.node_id)
        if pair[0] == pair[1]:
            continue
        by_proxy = "by proxy" if pair in ways.by_proxy else "direct"
        way = "punched" if pair in ways.punched else by_proxy
        if pair in ways.cut:
            between = ways.between(pair)
            way = f"through {between}" if between else "not reached"
            if pair in ways.narrow:
                way = f"{way} ({NARROW})" if between else NARROW
        told.append((name_of(other), way))
    return told


def _some_named(names: Iterable[str]) -> str:
    """A few names in order, or how many nodes they are."""
    told = sorted(names)
    return ", ".join(told) if len(told) <= MOST_NAMED else f"{len(told)} nodes"


def _some_of(pairs: Iterable[str]) -> list[str]:
    told = sorted(pairs)
    if len(told) > MOST_PAIRS:
        told[MOST_PAIRS:] = [f"and {len(told) - MOST_PAIRS} more pairs"]
    return told


def _pair(one: str, other: str) -> Pair:
    return min(one, other), max(one, other)


# All that 'atoll nodes' says of a node, by its columns and labels


def node_facts(node: pb.NodeStatus) -> dict[str, str]:
    """All columns of `atoll nodes`, in words."""
    return {
        "node": name_of(node),
        "id": node.node_id[:12],
        "state": state_in_words(node),
        "device": device_in_words(node),
        "heard": heard_in_words(node),
        "tokens": count_in_words(node.committed_tokens),
        "work": work_in_words(node),
        "screened": screening_in_words(node.screening),
        "link": link_in_words(node),
        "upload": upload_in_words(node.heartbeat.upload_pace) or "-",
        "tcp": node.heartbeat.congestion_control or "-",
        "time of a round": time_in_words(node),
        "mfu": mfu_in_words(node),
        "peak memory": memory_in_words(node),
        "text": text_in_words(node),
        "invite": invite_in_words(node),
        "version": node.version,
        "addresses": " ".join(node.address.multiaddrs),
    }


def node_details(node: pb.NodeStatus, status: pb.GetStatusResponse) -> dict[str, str]:
    """All that is known of one node, in words; what is not known is left out."""
    beat = node.heartbeat
    sent, received = wire_in_words(node)
    told = node_facts(node) | {
        "id": node.node_id,
        "standing": node.standing,
        "software": beat.software,
        "evaluates by": beat.evaluates_by,
        "does": activity_in_words(node, status.run),
        "waits for": beat.waiting_for,
        "loss": loss_in_words(beat.loss) if beat.loss else "",
        "speed": f"{count_in_words(beat.tokens_per_second)} {counted_in_words(status.run)} a second"
        if beat.tokens_per_second > 0
        else "",
        "steps asked": str(node.inner_steps or ""),
        "state held": f"round {beat.outer_round}" if node.HasField("heartbeat") else "",
        "sent": sent,
        "received": received,
        "carried": carried_in_words(node),
        "let go": f"{beat.let_go_rounds:.1f} rounds of late work" if beat.let_go_rounds else "",
        "gave": f"{node.given.num_rounds} rounds, {given_in_words(node.given)}, "
        f"{seconds_in_words(node.given.present_seconds)} present"
        if node.HasField("given")
        else "",
        "reaches": ways_to_others(node, status.nodes),
        "second process": "waits with the same key: stop one of the two"
        if node.has_waiting_copy
        else "",
    }
    return {label: words for label, words in told.items() if words not in ("", "-")}
