"""A status as a picture in a terminal. Pure: it neither asks for a status nor prints one."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from protocol.terminal.console import (
    count_in_words,
)
from protocol.terminal.node_words import (
    GONE,
    SILENT_SECONDS,
    activity_in_words,
    by_name,
    copies_in_words,
    counted_in_words,
    cut_off,
    name_of,
    rates_in_words,
    short_name,
    styled_state,
    wire_in_words,
)
from protocol.terminal.status_words import (
    PHASES,
    agreement_in_words,
    backups_in_words,
    clock_in_words,
    compute_share,
    held_out_in_words,
    mean_time_in_words,
    owner_troubles,
    relay_in_words,
    releases_in_words,
    round_shown,
    saving_in_words,
    software_in_words,
    sparkline,
    training_loss,
    undone_in_words,
    written_in_words,
)
from protocol.v1 import status_pb2 as pb
from protocol.wire.vitals import upload_in_words

_BAR_WIDTH = 24


def render(status: pb.GetStatusResponse, *, notice: str = "") -> RenderableType:
    """Draws the run, its losses, its outer state and its nodes.

    Fits 80 columns. `notice` is shown first: that the coordinator is away, for example. Then what the run
    owner has to mend.
    """
    lines: list[RenderableType] = [Text(notice, style="bold yellow")] if notice else []
    lines += [Text(trouble, style="bold red") for trouble in owner_troubles(status.run)]
    lines += [_run_line(status.run), _loss_line(status)]
    if curve := sparkline([held_out.loss for held_out in status.run.held_out_losses]):
        lines.append(_labelled("", Text(f"{curve}  held-out", style="cyan")))
    lines.append(_digest_line(status))
    lines.append(_labelled("clock", Text(clock_in_words(status.run))))
    if status.run.reason:
        lines.append(_labelled("", Text(status.run.reason, style="italic")))
    for label, words, style in (
        ("relay", relay_in_words(status.run), ""),
        ("backup", backups_in_words(status.run), ""),
        ("links", cut_off(status.nodes), "yellow"),
        ("copies", copies_in_words(status.nodes), "yellow"),
        ("atoll", releases_in_words(status.nodes), "yellow"),
        ("torch", software_in_words(status.nodes), "yellow"),
        ("rates", rates_in_words(status.nodes), ""),
        ("time", mean_time_in_words(status.nodes), ""),
        ("rules", "; ".join(status.run.amendments), ""),
        ("undone", undone_in_words(status.run), "yellow"),
        ("wire", saving_in_words(status.run.wire), ""),
        ("text", written_in_words(status.run), ""),
    ):
        if words:
            lines.append(_labelled(label, Text(words, style=style)))
    return Group(*lines, Text(), _node_table(status))


def _labelled(label: str, words: Text) -> RenderableType:
    """A line whose rest, where it is too long, stands below its beginning and not below the label."""
    line = Table.grid()
    line.add_column(width=len("digest "), no_wrap=True, style="dim")
    line.add_column(overflow="fold")
    line.add_row(label, words)
    return line


def _run_line(run: pb.RunStatus) -> Text:
    word, colour = PHASES.get(run.phase, ("unknown", ""))
    done = run.committed_round / run.total_rounds if run.total_rounds else 0.0
    full = round(_BAR_WIDTH * min(done, 1.0))
    return Text.assemble(
        (run.run_name, "bold"),
        "  ",
        ("━" * full, "green"),
        ("─" * (_BAR_WIDTH - full), "dim"),
        f"  round {round_shown(run)} of {run.total_rounds}  ",
        (word, colour),
    )


def _loss_line(status: pb.GetStatusResponse) -> RenderableType:
    loss, share = training_loss(status.nodes), compute_share(status.nodes)
    words = Text.assemble(
        f"training {'-' if loss is None else f'{loss:.3f}'}",
        f"   held-out {held_out_in_words(status.run) or '-'}",
        f"   {count_in_words(status.run.token_clock)} {counted_in_words(status.run)}",
        "" if share is None else f"   computing {share:.0%}",
    )
    return _labelled("loss", words)


def _digest_line(status: pb.GetStatusResponse) -> RenderableType:
    is_bad = bool(status.run.outer_digest) and not status.run.digests_agree
    return _labelled("digest", Text(agreement_in_words(status), style="bold red" if is_bad else ""))


def _node_table(status: pb.GetStatusResponse) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("node", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("does", no_wrap=True)
    speed = "tok/s" if counted_in_words(status.run) == "tokens" else "samples/s"
    for heading in ("loss", speed, "sent", "received"):
        table.add_column(heading, no_wrap=True, justify="right")
    # The only column that wraps: the others hold figures, and this one gives way on 80 columns.
    table.add_column("waits for", overflow="fold", min_width=12)
    for node in by_name(status.nodes):
        table.add_row(*_node_cells(node, status.run))
    return table


def _node_cells(node: pb.NodeStatus, run: pb.RunStatus) -> tuple[Text, ...]:
    beat = node.heartbeat
    word, colour = styled_state(node)
    is_gone = node.state in GONE
    if is_gone:
        does, loss, speed, waits_for = Text("-"), "-", "-", node.standing
    else:
        does = _activity(node, run)
        loss = f"{beat.loss:.3f}" if beat.loss > 0 else "-"
        speed = count_in_words(beat.tokens_per_second) if beat.tokens_per_second > 0 else "-"
        uploads = upload_in_words(beat.upload_pace)
        upload = f"upload: {uploads}" if uploads else ""
        waits_for = "; ".join(filter(None, (node.standing, beat.waiting_for, upload)))
    return (
        Text(short_name(name_of(node)), style="dim" if is_gone else ""),
        Text(word, style=colour),
        does,
        Text(loss),
        Text(speed),
        *map(Text, wire_in_words(node)),
        Text(waits_for),
    )


def _activity(node: pb.NodeStatus, run: pb.RunStatus) -> Text:
    is_silent = node.silent_seconds > SILENT_SECONDS
    return Text(activity_in_words(node, run), style="yellow" if is_silent else "")
