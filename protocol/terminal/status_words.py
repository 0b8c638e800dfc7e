"""What a status says of the run, in words and figures: for the terminal, the page and whoever asks. Pure."""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from protocol.files.durable import as_typed
from protocol.terminal.console import (
    age_in_words,
    bytes_in_words,
    digest_in_words,
    printable,
    seconds_in_words,
)
from protocol.terminal.node_words import (
    GONE,
    MOST_NAMED,
    copies_in_words,
    cut_off,
    is_present,
    screening_in_words,
)
from protocol.v1 import session_pb2
from protocol.v1 import status_pb2 as pb
from protocol.wire.rounds import OTHER_SOURCES, OWN_LOOP
from protocol.wire.vitals import loss_in_words

PHASES: dict[pb.RunPhase.ValueType, tuple[str, str]] = {
    pb.RUN_PHASE_WAITING: ("waiting", "yellow"),
    pb.RUN_PHASE_TRAINING: ("training", "green"),
    pb.RUN_PHASE_EXCHANGING: ("exchanging", "blue"),
    pb.RUN_PHASE_APPLYING: ("applying", "blue"),
    pb.RUN_PHASE_FINISHED: ("finished", "bold green"),
}


def phase_in_words(run: pb.RunStatus) -> str:
    """What the run does, in one word."""
    return PHASES.get(run.phase, ("unknown", ""))[0]


def ledger_bytes(ledger: pb.WireLedger) -> int:
    """Bytes that all nodes sent."""
    return sum(count.sent_bytes for count in ledger.counts)


def saving_in_words(ledger: pb.WireLedger) -> str:
    """What rounds have cost against averaging gradients; empty when there is nothing to compare."""
    sent = ledger_bytes(ledger)
    if not sent or not ledger.all_reduce_bytes:
        return ""
    return (
        f"{bytes_in_words(sent)} sent by all, {ledger.all_reduce_bytes / sent:.0f} times less than "
        "a ring all-reduce in fp32 at every inner step"
    )


def training_loss(nodes: Iterable[pb.NodeStatus]) -> float | None:
    """The mean of the latest training losses of the nodes that are there, or were there last.

    None before the first.
    """
    told = [node for node in nodes if node.heartbeat.loss]
    here = [node for node in told if node.state not in GONE]
    if not here:  # as after the end of the run: of those that stayed longest
        last = max((node.heartbeat.outer_round for node in told), default=0)
        here = [node for node in told if node.heartbeat.outer_round == last]
    return fmean(node.heartbeat.loss for node in here) if here else None


def compute_share(nodes: Iterable[pb.NodeStatus]) -> float | None:
    """The mean share of their latest round that nodes which are there spent in inner steps."""
    shares = [
        node.heartbeat.utilisation.compute_share
        for node in nodes
        if node.state not in GONE and node.heartbeat.HasField("utilisation")
    ]
    return fmean(shares) if shares else None


def mean_time_in_words(nodes: Iterable[pb.NodeStatus]) -> str:
    """Where the time of all nodes' latest rounds went, on average; empty before the first."""
    present = [n for n in nodes if n.state not in GONE and n.heartbeat.HasField("utilisation")]
    if not present:
        return ""
    made = [node.heartbeat.utilisation for node in present]
    local = [m.local_communication_share for m in made if m.HasField("local_communication_share")]
    exchange = [m.exchange_share + m.publish_share + m.adopt_share for m in made]
    unmeasured = len(made) - len(local)
    return (
        f"{fmean(m.compute_share for m in made):.0%} compute, "
        + (f"{sum(local) / len(made):.0%} local, " if local else "")
        + f"{fmean(exchange):.0%} exchange, {fmean(m.waiting_share for m in made):.0%} waiting"
        + (f"; local not measured on {unmeasured} of {len(made)} nodes" if unmeasured else "")
    )


def written_in_words(run: pb.RunStatus) -> str:
    """What the latest model that was asked to wrote on from the first prompt; empty before any was."""
    if not run.HasField("written"):
        return ""
    written = run.written
    after = f"after round {written.round}"
    if written.why_not or not written.texts:
        return f"none {after}: {printable(written.why_not, most=200)}"
    one = written.texts[0]
    text = " ".join(printable(one.prompt + one.text, most=160).split())
    more = len(written.texts) - 1
    rest = f"; all of it and {more} more:" if more else "; all of it:"
    return f"{after} “{text}”" + (
        f"{rest} 'atoll rounds show {written.round}'" if written.round else ""
    )


def undone_in_words(run: pb.RunStatus) -> str:
    """The latest going back, and how often it was done before; empty where it never was."""
    if not run.went_back:
        return ""
    before = len(run.went_back) - 1
    times = {0: "", 1: "; once before"}.get(before, f"; {before} times before")
    return f"{printable(run.went_back[-1], most=600)}{times}" + (times and ": 'atoll audit'")


def relay_in_words(run: pb.RunStatus) -> str:
    """How nodes reach the coordinator; empty where they dial it."""
    return run.relay and f"coordinator {printable(run.relay, most=200)}"


def owner_troubles(run: pb.RunStatus, *, for_everybody: bool = False) -> list[str]:
    """What of the coordinator's machine only its owner can mend, and is told of. Empty where all is well.

    Its disk is nearly full or slow, or a place gets no copies of the run. For everybody without what stands
    where.
    """
    low = [disk_in_words(run)] if run.is_disk_low else []
    slow = [slow_disk_in_words(run)] if run.is_disk_slow else []
    return [*low, *slow] + [
        f"no backup {_since(one)}: 'atoll status' tells the run owner why"
        if for_everybody
        else _backup_trouble(one)
        for one in run.backups
        if one.HasField("next_seconds") and (one.num_failures or one.is_abandoned)
    ]


def disk_in_words(run: pb.RunStatus) -> str:
    """That the disk of the coordinator's folder is nearly full."""
    return (
        f"the coordinator's disk is nearly full: {bytes_in_words(run.disk_free_bytes)} are free, and at the "
        "first write that it refuses the coordinator ends; next: make room on it"
    )


def slow_disk_in_words(run: pb.RunStatus) -> str:
    """That all nodes wait for the disk of the coordinator's folder."""
    return (
        f"the coordinator's disk is slow: a write took {seconds_in_words(run.disk_write_seconds)} in the "
        "last ten minutes, and all nodes wait for each; next: move its folder to a faster disk of that "
        "machine, or end what else keeps the disk busy"
    )


def _since(one: pb.BackupStatus) -> str:
    return f"for {seconds_in_words(one.made_seconds)}" if one.HasField("made_seconds") else "yet"


def _backup_trouble(one: pb.BackupStatus) -> str:
    since = _since(one)
    target = printable(one.target, most=200)
    if one.is_abandoned:
        overdue = seconds_in_words(-one.next_seconds)
        return (
            f"no backup {since}: nobody has made one at {target}, though it was due {overdue} ago; next: "
            "look at the log, and start the coordinator, or 'atoll coordinator backup', again"
        )
    tries = "the try" if one.num_failures == 1 else f"{one.num_failures} tries"
    latest = "" if one.num_failures == 1 else ", the latest"
    step = f"; next: {printable(one.next_step, most=300)}" if one.next_step else ""
    return (
        f"no backup {since}: {tries} at {target} in {seconds_in_words(one.failing_seconds)} failed{latest}: "
        f"{printable(one.why, most=300)}{step}"
    )


def no_backup_in_words(directory: str = "DIR") -> str:
    """That nobody copies the coordinator's folder, and the command that does."""
    return (
        "none is made, and the run cannot go on without the coordinator's folder; "
        f"'atoll coordinator backup {as_typed(directory)} TARGET --every 10m' makes them"
    )


def backups_in_words(run: pb.RunStatus, *, with_place: bool = True) -> str:
    """The newest copy of the coordinator, and when the next is due, or how to have any.

    Empty where the first is on its way, and for those who are not told.
    """
    if run.is_without_backup:
        return no_backup_in_words()
    made = [one for one in run.backups if one.HasField("made_seconds")]
    if not made:
        return ""
    newest = min(made, key=lambda one: one.made_seconds)
    due = [one.next_seconds for one in run.backups if one.HasField("next_seconds")]
    later = (
        f"; the next in {seconds_in_words(max(0.0, min(due)))}" if due else "; none is to follow"
    )
    place = f", at {printable(newest.place, most=200)}" if with_place else ""
    age, size = age_in_words(newest.made_seconds), bytes_in_words(newest.num_bytes)
    return f"{age}, round {newest.committed_round}, {size}{place}{later}"


def releases_in_words(nodes: Iterable[pb.NodeStatus]) -> str:
    """Who runs which release of Atoll; nothing where all of those here run one."""
    return _who_has_which(nodes, lambda node: node.version)


def software_in_words(nodes: Iterable[pb.NodeStatus]) -> str:
    """Who computes with which versions, and loops also on which frozen values; nothing where all are alike.

    Ranks are compared with ranks, and loops with loops, which tell other things.
    """
    told = [node for node in nodes if node.heartbeat.software]
    kinds = ([n for n in told if (n.device == OWN_LOOP) == is_loop] for is_loop in (False, True))
    who = "; ".join(
        filter(None, (_who_has_which(kind, lambda n: n.heartbeat.software) for kind in kinds))
    )
    return f"{who}: what nodes compute of the same samples may differ" if who else ""


def functions_in_words(nodes: Iterable[pb.NodeStatus]) -> str:
    """Which loops evaluate by which functions; nothing where all do by one."""
    told = [node for node in nodes if node.heartbeat.evaluates_by]
    who = _who_has_which(told, lambda node: node.heartbeat.evaluates_by)
    return f"loops evaluate by other functions, one at a time for the curve: {who}" if who else ""


def _who_has_which(
    nodes: Iterable[pb.NodeStatus], version_of: Callable[[pb.NodeStatus], str]
) -> str:
    by_version: dict[str, list[str]] = {}
    for node in nodes:
        if node.state in (pb.NODE_STATE_JOINING, pb.NODE_STATE_READY, pb.NODE_STATE_DIVERGED):
            by_version.setdefault(version_of(node), []).append(node.node_name)
    if len(by_version) < 2:
        return ""
    return "; ".join(
        f"{version}: {', '.join(names[:MOST_NAMED])}"
        + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
        for version, names in sorted(by_version.items())
    )


def summary_line(status: pb.GetStatusResponse) -> str:
    """The status in one line, for logs and pipes."""
    run = status.run
    parts = [f"round {round_shown(run)} of {run.total_rounds}, {phase_in_words(run)}"]
    if (loss := training_loss(status.nodes)) is not None:
        parts.append(f"loss {loss_in_words(loss)}")
    if (share := compute_share(status.nodes)) is not None:
        parts.append(f"computing {share:.0%} of the time")
    if held_out := held_out_in_words(run):
        parts.append(f"held-out {held_out}")
    if (epoch := epoch_shown(run)) > 1:
        parts.append(f"epoch {epoch} of the data")
    num_ready = sum(node.state == pb.NODE_STATE_READY for node in status.nodes)
    parts.append(f"{num_ready} of {len(status.nodes)} nodes ready")
    parts.append(agreement_in_words(status))
    if run.reason:
        parts.append(run.reason)
    if stands := stands_in_words(run):
        parts.append(f"the run is {stands}")
    elif run.HasField("estimated_seconds_left") and run.phase != pb.RUN_PHASE_FINISHED:
        parts.append(f"the run has about {seconds_in_words(run.estimated_seconds_left)} left")
    parts += filter(None, (cut_off(status.nodes), copies_in_words(status.nodes)))
    parts += owner_troubles(run)
    return "; ".join(parts)


def what_people_wait_for(status: pb.GetStatusResponse) -> tuple[object, ...]:
    """What has to differ before a status is worth a new line: not losses, nor seconds left."""
    run = status.run
    return (
        run.phase,
        run.open_round,
        run.committed_round,
        run.digests_agree,
        len(run.held_out_losses),
        tuple((node.node_id, node.state) for node in status.nodes),
        cut_off(status.nodes),
        copies_in_words(status.nodes),
        tuple((one.target, one.why, one.is_abandoned) for one in run.backups),
        run.is_disk_low,
        run.is_disk_slow,
    )


def clock_in_words(run: pb.RunStatus) -> str:
    """How long the run has taken, and how long it will at the pace of recent rounds, or that it waits."""
    taken = f"{seconds_in_words(run.elapsed_seconds)} so far"
    if run.phase == pb.RUN_PHASE_FINISHED:
        return f"{seconds_in_words(run.elapsed_seconds)} in all"
    if stands := stands_in_words(run):
        return f"{taken}; {stands}"
    if not run.HasField("estimated_seconds_left"):
        return f"{taken}; the time left is known after some rounds"
    return f"{taken}, about {seconds_in_words(run.estimated_seconds_left)} left"


def stands_in_words(run: pb.RunStatus) -> str:
    """That no round is open, so no time that is left runs down; empty while one is, and at the end."""
    if run.phase == pb.RUN_PHASE_FINISHED or not (run.paused or run.phase == pb.RUN_PHASE_WAITING):
        return ""
    stands = "paused" if run.paused else "waiting"
    if not run.estimated_seconds_left:  # not known, or its last round is closed
        return stands
    return (
        f"{stands}, with about {seconds_in_words(run.estimated_seconds_left)} left once it goes on"
    )


def round_shown(run: pb.RunStatus) -> int:
    """The open round, or the last one."""
    return run.open_round or run.committed_round


def epoch_shown(run: pb.RunStatus) -> int:
    """Which time the data are gone through, from 1; 0 where nobody knows how many samples there are."""
    data = run.data
    return (data.frontier - 1) // data.epoch_samples + 1 if data.epoch_samples else 0


def held_out_in_words(run: pb.RunStatus) -> str:
    """The first and the latest held-out loss, nats per token; with bits a byte, metric and data holders."""
    losses = [held_out.loss for held_out in run.held_out_losses]
    if not losses:
        return ""
    words = " → ".join(loss_in_words(loss) for loss in (losses[0], losses[-1])[: len(losses)])
    bits = bits_per_byte(losses[-1], run)
    words += "" if bits is None else f", {bits:.3f} bits a byte"
    latest = run.held_out_losses[-1]
    words += f", metric {latest.metric:.4g}" if latest.HasField("metric") else ""
    return words + holders_in_words(latest.holders) + sources_in_words(latest.by_source)


def holders_in_words(holders: Sequence[pb.HolderLoss]) -> str:
    """What the latest held-out loss is of each holder of private data; empty where there are none."""
    if not holders:
        return ""
    losses = sorted(holder.loss for holder in holders)
    if len(losses) > MOST_NAMED:
        return f" ({len(losses)} data holders, {loss_in_words(losses[0])} to {loss_in_words(losses[-1])})"
    named = (f"{one.node_name or one.node_id[:12]} {loss_in_words(one.loss)}" for one in holders)
    return f" ({', '.join(named)})"


def sources_in_words(by_source: Sequence[session_pb2.SourceLoss]) -> str:
    """What the latest held-out loss is of each source of the data; empty where there is one alone."""
    if not by_source:
        return ""
    losses = sorted(one.loss for one in by_source)
    if len(losses) > MOST_NAMED:
        return (
            f" ({len(losses)} sources, {loss_in_words(losses[0])} to {loss_in_words(losses[-1])})"
        )
    named = (f"{one.source or OTHER_SOURCES} {loss_in_words(one.loss)}" for one in by_source)
    return f" ({', '.join(named)})"


def bits_per_byte(loss: float, run: pb.RunStatus) -> float | None:
    """A held-out loss in nats per token as what tokenizers are compared by; None where nobody knows.

    One below 0 is a loop's own, as of rewards, and no nats.
    """
    if not run.held_out_bytes_per_token or loss < 0:
        return None
    return loss / math.log(2) / run.held_out_bytes_per_token


def agreement_in_words(status: pb.GetStatusResponse) -> str:
    """Whether all nodes hold the same outer state, and which."""
    run = status.run
    if not run.outer_digest:
        return "no digest yet"
    here = list(filter(is_present, status.nodes))
    num_holders = sum(node.heartbeat.outer_digest == run.outer_digest for node in here)
    if not here:
        verdict = "and no node is here"
    elif not run.digests_agree:
        verdict = "NOT the same on all nodes"
    elif not num_holders:  # as first weights that nobody has brought yet
        verdict = "and no node here holds it"
    else:
        verdict = "the same on all nodes" + (" at that round" if num_holders < len(here) else "")
    return f"{digest_in_words(run.outer_digest)} at round {run.outer_digest_round}, {verdict}"


def screened_in_words(closed: pb.RoundSummary) -> str:
    """Of whom a round took not all, and what became of it."""
    told = (f"{s.node_name or s.node_id[:12]}: {screening_in_words(s)}" for s in closed.screened)
    return "; ".join(told) or "-"


BLOCKS = "▁▂▃▄▅▆▇█"


MOST_BLOCKS = 40


def sparkline(values: Sequence[float]) -> str:
    """Their course in one line: the latest 40, the least as the lowest block. Empty for fewer than three."""
    latest = [value for value in values if math.isfinite(value)][-MOST_BLOCKS:]
    if len(latest) < 3:
        return ""
    least, most = min(latest), max(latest)
    span = most - least or 1.0
    return "".join(BLOCKS[round((value - least) / span * (len(BLOCKS) - 1))] for value in latest)
