"""A status as a picture in a terminal, and a run that is followed: once a second, as that or line by line."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

import click
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from protocol.errors import PASSING
from protocol.terminal import console
from protocol.terminal.console import count_in_words
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
    epoch_shown,
    functions_in_words,
    held_out_in_words,
    mean_time_in_words,
    owner_troubles,
    relay_in_words,
    releases_in_words,
    round_shown,
    saving_in_words,
    software_in_words,
    sparkline,
    summary_line,
    training_loss,
    undone_in_words,
    what_people_wait_for,
    written_in_words,
)
from protocol.v1 import status_pb2 as pb
from protocol.wire.vitals import loss_in_words, upload_in_words

# A status as a picture in a terminal. Pure: it neither asks for a status nor prints one.


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
        ("data", status.run.alike, "yellow"),
        ("eval", status.run.differing, "yellow"),
        ("eval", functions_in_words(status.nodes), "yellow"),
        ("rates", rates_in_words(status.nodes), ""),
        ("time", mean_time_in_words(status.nodes), ""),
        ("rules", "; ".join(status.run.amendments), ""),
        ("undone", undone_in_words(status.run), "yellow"),
        ("wire", saving_in_words(status.run.wire), ""),
        ("text", written_in_words(status.run), ""),
    ):
        if words:
            lines.append(_labelled(label, Text(words, style=style)))
    return Group(*lines, Text(), _Nodes(status))


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
        f"training {'-' if loss is None else loss_in_words(loss)}",
        f"   held-out {held_out_in_words(status.run) or '-'}",
        f"   {count_in_words(status.run.token_clock)} {counted_in_words(status.run)}",
        f"   epoch {epoch}" if (epoch := epoch_shown(status.run)) > 1 else "",
        "" if share is None else f"   computing {share:.0%}",
    )
    return _labelled("loss", words)


def _digest_line(status: pb.GetStatusResponse) -> RenderableType:
    is_bad = bool(status.run.outer_digest) and not status.run.digests_agree
    return _labelled("digest", Text(agreement_in_words(status), style="bold red" if is_bad else ""))


_LEAST_WAITS_WIDTH = 12


class _Nodes:
    """The table of nodes, with the columns that there is room for: rich says how wide it is."""

    def __init__(self, status: pb.GetStatusResponse) -> None:
        speed = "tok/s" if counted_in_words(status.run) == "tokens" else "samples/s"
        self._columns = ("node", "state", "does", "loss", speed, "sent", "received")
        self._rows = [_node_cells(node, status.run) for node in by_name(status.nodes)]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        shown, _cells, left_out = console.fitting(
            self._columns,
            [[cell.plain for cell in row[:-1]] for row in self._rows],
            spare=tuple(reversed(self._columns[2:])),
            width=options.max_width - _LEAST_WAITS_WIDTH - 1,
            gap=1,
        )
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for column in shown:
            is_figure = column in self._columns[3:]
            table.add_column(column, no_wrap=True, justify="right" if is_figure else "left")
        # The only column that wraps: the others hold figures.
        table.add_column("waits for", overflow="fold", min_width=_LEAST_WAITS_WIDTH)
        for row in self._rows:
            kept = (cell for name, cell in zip(self._columns, row, strict=False) if name in shown)
            table.add_row(*kept, row[-1])
        yield table
        if left_out:
            yield console.left_out_in_words(self._columns, left_out)


def _node_cells(node: pb.NodeStatus, run: pb.RunStatus) -> tuple[Text, ...]:
    beat = node.heartbeat
    word, colour = styled_state(node)
    is_gone = node.state in GONE
    if is_gone:
        does, loss, speed, waits_for = Text("-"), "-", "-", node.standing
    else:
        does = _activity(node, run)
        loss = loss_in_words(beat.loss) if beat.loss else "-"
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


REFRESH_SECONDS = 1.0

MOST_ROUNDS = 4000
"""That a coordinator lists at once."""


class Screen(Protocol):
    """Where a run is shown while it goes on."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def say(self, line: str) -> None:
        """Shows a line that stays."""

    def show(self, status: pb.GetStatusResponse) -> None:
        """Shows a status."""

    def away(self, why: str) -> None:
        """Shows that no status could be had, and that it is tried again."""


class LiveScreen:
    """A picture on a terminal that is drawn anew in its place."""

    def __init__(self) -> None:
        self._live = Live(console=console.terminal(), auto_refresh=False)
        self._last: pb.GetStatusResponse | None = None
        self._away_since: float | None = None

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        """Shows a line above the picture."""
        self._live.console.print(line)

    def show(self, status: pb.GetStatusResponse) -> None:
        """Draws the status."""
        self._last, self._away_since = status, None
        self._live.update(render(status), refresh=True)

    def away(self, why: str) -> None:
        """Draws the last status again, and for how long it has been the last one."""
        if self._away_since is None:
            self._away_since = time.monotonic()
        seconds = console.seconds_in_words(time.monotonic() - self._away_since)
        notice = f"coordinator away for {seconds}, retrying ({why})"
        self._live.update(render(self._last or pb.GetStatusResponse(), notice=notice), refresh=True)


class _Lines:
    """Lines that stay as they are: nothing to set up, and nothing to put back."""

    def __init__(self) -> None:
        self._is_away = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def say(self, line: str) -> None:
        """Prints the line."""
        click.echo(line)

    def away(self, why: str) -> None:
        """Says so at the beginning of an absence."""
        if not self._is_away:
            self._is_away = True
            self.say(f"coordinator away, retrying: {why}")


class LineScreen(_Lines):
    """One line for each change, for logs and pipes. `key` tells what counts as a change."""

    def __init__(
        self, *, key: Callable[[pb.GetStatusResponse], object] = what_people_wait_for
    ) -> None:
        super().__init__()
        self._key = key
        self._last: object = None

    def show(self, status: pb.GetStatusResponse) -> None:
        """Prints a line when the status differs from the last one in its key."""
        key = self._key(status)
        if key == self._last and not self._is_away:
            return
        self._last, self._is_away = key, False
        click.echo(summary_line(status))


class StreamScreen(_Lines):
    """Lines that `made` makes of each status; what is no status goes to standard error."""

    def __init__(self, made: Callable[[pb.GetStatusResponse], Iterable[str]]) -> None:
        super().__init__()
        self._made = made

    def say(self, line: str) -> None:
        """Prints the line beside the stream."""
        click.echo(line, err=True)

    def show(self, status: pb.GetStatusResponse) -> None:
        """Prints what the status makes."""
        self._is_away = False
        for line in self._made(status):
            click.echo(line)


def json_line(value: Mapping[str, object]) -> str:
    """One value of a stream of JSON lines."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def settled_after(
    seen: int, rounds: Sequence[pb.RoundSummary], run: pb.RunStatus
) -> list[pb.RoundSummary]:
    """Those of `rounds`, newest first, that are new and change no more, oldest first."""
    is_over = run.phase == pb.RUN_PHASE_FINISHED
    return [
        closed
        for closed in reversed(rounds)
        if closed.round > seen
        # While nodes apply a round its digest and bytes are not all known.
        and (is_over or closed.outer_digest or closed.round < run.committed_round)
    ]


class NewRounds:
    """Which closed rounds are new: each once, oldest first, when it changes no more."""

    def __init__(self, ask: Callable[[int], pb.ListRoundsResponse], *, limit: int) -> None:
        """`ask` gives the latest so many rounds, newest first; the first time `limit` of them count."""
        self._ask = ask
        self._limit = limit
        self._seen: int | None = None
        self._waiting: list[pb.RoundSummary] = []

    def look(self, run: pb.RunStatus) -> None:
        """Asks for rounds when there are new ones."""
        newest = run.committed_round
        if self._seen is not None and newest < self._seen:
            self._seen = newest  # the run went back: its rounds are made again
        if self._seen == newest:
            return
        wanted = self._limit if self._seen is None else min(MOST_ROUNDS, newest - self._seen + 1)
        found = settled_after(self._seen or 0, self._ask(wanted).rounds, run)
        if found:
            self._waiting += found
            self._seen = found[-1].round

    def take(self) -> list[pb.RoundSummary]:
        """What was found since the last call."""
        found, self._waiting = self._waiting, []
        return found


def watch(
    ask: Callable[[], pb.GetStatusResponse],
    screen: Screen,
    *,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Shows the status until the run is finished. A coordinator that goes away is waited for.

    It must have answered once: before that a wrong address would be waited for just as patiently.
    """
    screen.show(status := ask())
    while status.run.phase != pb.RUN_PHASE_FINISHED:
        pause(REFRESH_SECONDS)
        try:
            status = ask()
        except PASSING as error:
            screen.away(error.what)
        else:
            screen.show(status)
