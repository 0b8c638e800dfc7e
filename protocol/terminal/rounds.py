"""`atoll rounds` and `atoll rounds show`: closed rounds as a table, and one as a chart of text."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from protocol.errors import UsageError
from protocol.terminal import console
from protocol.terminal.lazy_group import Entry, LazyGroup, Sections
from protocol.terminal.query import (
    StatusLink,
    as_json,
    dir_option,
    json_option,
    print_fitting,
    watch_until_finished,
)

if TYPE_CHECKING:
    from protocol.v1 import status_pb2 as pb

NAME_WIDTH = 16
BAR_WIDTH = 60
"""Of a chart, which with a name fits 80 columns."""

MOST_CHARACTERS = 4000
"""Of a text that somebody else wrote."""

TRAINS, REDUCES, RECEIVES, APPLIES, MISSING = "█▓▒░·"

LEGEND = (
    f"{TRAINS} trains  {REDUCES} sends and reduces  {RECEIVES} sends and receives  "
    f"{APPLIES} applies  {MISSING} not done"
)


DEFAULT_LIMIT = 20

CSV_COLUMNS = (
    *("round", "seconds", "tokens", "loss", "held_out_loss", "held_out_metric", "participants"),
    *("contributors", "slices", "committed_slices", "screened_nodes", "sent_bytes", "outer_digest"),
    *("reason", "counted"),
)

_ROUNDS_COMMANDS: Sections = {
    "Anyone": (
        Entry(
            "show",
            "protocol.terminal.rounds:show_round",
            "Show when each node did what in a round.",
        ),
    ),
}


@click.group(cls=LazyGroup, sections=_ROUNDS_COMMANDS, invoke_without_command=True)
@click.option(
    "--limit", type=click.IntRange(1, 4000), help="How many.  [default: 20; all of a CSV]"
)
@click.option(
    "--watch", "is_watching", is_flag=True, help="Then one line for each round that closes."
)
@json_option
@click.option("--csv", "is_csv", is_flag=True, help="Print a row for each round, oldest first.")
@dir_option
@click.pass_context
def rounds(
    context: click.Context,
    limit: int | None,
    is_watching: bool,
    is_json: bool,
    is_csv: bool,
    directory: Path | None,
) -> None:
    """List the latest closed rounds, newest first; or show one.

    \b
    Examples:
      atoll rounds --limit 5
      atoll rounds show 41
      atoll rounds --csv > my-run.csv
      atoll rounds --watch --json

    JSON is a list of RoundSummary (proto/protocol/v1/status.proto):

    \b
      [{"round": 7, "num_participants": 3, "num_committed_slices": 3, "tokens": 184320,
        "seconds": 8.4, "loss": 2.1, "outer_digest": "8f3a…", "reason": "…", …}]
    """
    if context.invoked_subcommand is not None:
        return
    if is_csv and (is_json or is_watching):
        raise UsageError(
            f"--csv and {'--json' if is_json else '--watch'} are both given",
            next_step="leave one out",
        )
    with StatusLink(directory) as link:
        if is_watching:
            _watch(link, limit or DEFAULT_LIMIT, is_json=is_json)
            return
        from protocol.terminal.watch import MOST_ROUNDS

        answer = link.rounds(limit or (MOST_ROUNDS if is_csv else DEFAULT_LIMIT))
        run = None if is_json else link.status().run
    if run is None:
        console.print_json([as_json(closed) for closed in answer.rounds])
        return
    held_out = {one.round: one for one in run.held_out_losses}
    if is_csv:
        csv_text = as_csv(
            answer.rounds, held_out, counted=run.counted or "tokens", has_all=limit is None
        )
        click.echo(csv_text, nl=False)
        return
    if not answer.rounds:
        click.echo("no round has closed yet; 'atoll status' says what the run waits for")
        return
    _print_rows(answer.rounds, run, held_out)


def _print_rows(
    closed_rounds: Sequence["pb.RoundSummary"],
    run: "pb.RunStatus",
    held_out: Mapping[int, "pb.HeldOutLoss"],
) -> None:
    from protocol.terminal.node_words import counted_in_words
    from protocol.terminal.status_words import ledger_bytes, screened_in_words
    from protocol.wire.vitals import loss_in_words

    counted = counted_in_words(run)
    rows = [
        (
            str(closed.round),
            f"{closed.num_contributors} of {closed.num_participants}",
            f"{closed.num_committed_slices} of {closed.num_slices}",
            console.count_in_words(closed.tokens),
            console.bytes_in_words(ledger_bytes(closed.wire)),
            console.seconds_in_words(closed.seconds),
            loss_in_words(closed.loss) if closed.loss else "-",
            loss_in_words(held_out[closed.round].loss) if closed.round in held_out else "-",
            console.digest_in_words(closed.outer_digest),
            screened_in_words(closed),
            closed.reason,
        )
        for closed in closed_rounds
    ]
    columns = (
        *("round", "nodes", "slices", counted, "sent", "took", "loss", "held-out", "digest"),
        *("screened", "reason"),
    )
    right = ("round", counted, "sent", "took", "loss", "held-out")
    print_fitting(
        columns, rows, spare=("reason", "digest", "sent", "slices", "screened"), right=right
    )


def as_csv(
    rounds: Sequence["pb.RoundSummary"],
    held_out: Mapping[int, "pb.HeldOutLoss"],
    *,
    counted: str,
    has_all: bool,
) -> str:
    """A header, and a row for each round, oldest first; what nobody knows is empty.

    `counted` says what the column of tokens has: samples, where a sample counts as one.

    `rounds` come newest first, and `held_out` by the rounds of the states. With all rounds comes round 0, the
    loss that the run began with.
    """
    from protocol.terminal.status_words import ledger_bytes

    def held_out_of(round: int) -> dict[str, object]:
        one = held_out.get(round)
        if one is None or not math.isfinite(one.loss):
            return {}
        metric = one.metric if one.HasField("metric") else ""
        return {"held_out_loss": one.loss, "held_out_metric": metric}

    facts: list[dict[str, object]] = [
        {
            "round": closed.round,
            "seconds": f"{closed.seconds:.3f}",
            "tokens": closed.tokens,
            "loss": closed.loss or "",
            **held_out_of(closed.round),
            "participants": closed.num_participants,
            "contributors": closed.num_contributors,
            "slices": closed.num_slices,
            "committed_slices": closed.num_committed_slices,
            "screened_nodes": len(closed.screened),
            "sent_bytes": ledger_bytes(closed.wire),
            "outer_digest": closed.outer_digest.hex(),
            "reason": closed.reason,
            "counted": counted,
        }
        for closed in reversed(rounds)
    ]
    if has_all and 0 in held_out:
        facts.insert(0, {"round": 0, **held_out_of(0)})
    written = io.StringIO()
    rows = csv.DictWriter(written, CSV_COLUMNS, restval="", lineterminator="\n")
    rows.writeheader()
    rows.writerows(facts)
    return written.getvalue()


def _watch(link: StatusLink, limit: int, *, is_json: bool) -> None:
    """A line for each of the latest rounds, oldest first, and then for each that closes."""
    from protocol.terminal.node_words import counted_in_words
    from protocol.terminal.watch import NewRounds, StreamScreen, json_line

    new = NewRounds(link.rounds, limit=limit)
    counted = "" if is_json else counted_in_words(link.status().run)

    def in_words(closed: "pb.RoundSummary") -> str:
        return json_line(as_json(closed)) if is_json else line_of(closed, counted)

    screen = StreamScreen(lambda _: map(in_words, new.take()))
    watch_until_finished(link, screen, look=lambda answer: new.look(answer.run))


def line_of(closed: "pb.RoundSummary", counted: str) -> str:
    """A closed round in one line."""
    from protocol.terminal.status_words import ledger_bytes, screened_in_words
    from protocol.wire.vitals import loss_in_words

    parts = [
        f"round {closed.round}: {closed.num_contributors} of {closed.num_participants} nodes",
        f"{closed.num_committed_slices} of {closed.num_slices} slices",
        f"{console.count_in_words(closed.tokens)} {counted}",
        f"{console.bytes_in_words(ledger_bytes(closed.wire))} sent",
        f"took {console.seconds_in_words(closed.seconds)}",
        *([f"loss {loss_in_words(closed.loss)}"] if closed.loss else []),
        *([f"screened {screened_in_words(closed)}"] if closed.screened else []),
        closed.reason,
    ]
    return ", ".join(filter(None, parts))


@click.command("show")
@click.argument("number", metavar="[ROUND]", type=click.IntRange(min=1), required=False)
@json_option
@dir_option
def show_round(number: int | None, is_json: bool, directory: Path | None) -> None:
    """Show when each node did what in a round; without a number in the one in flight, or the newest.

    \b
    Example:
      atoll rounds show 41

    JSON holds the fields of GetRoundResponse (proto/protocol/v1/status.proto):

    \b
      {"summary": {"round": 41, …}, "is_open": false, "seconds": 12.4, "committed_seconds": 10.1,
       "waited_for": "…", "nodes": [{"node_name": "node-1", "trained_seconds": 7.9, …}], …}
    """
    from protocol.terminal.node_words import counted_in_words

    with StatusLink(directory) as link:
        answer = link.round(number or 0)
        run = None if is_json else link.status().run
    if run is None:
        console.print_json(as_json(answer))
        return
    for line in (*_facts(answer, counted_in_words(run)), *chart(answer)):
        click.echo(line)
    rows = [tuple(_row(node).values()) for node in _by_name(answer)]
    if rows:
        click.echo()
        columns = tuple(_row(answer.nodes[0]))
        print_fitting(columns, rows, spare=("loss", "tokens", "steps"), right=columns[1:-1])
    for void in answer.void_slices:
        click.echo(f"slice {void.index} is void: {void.reason}")
    if answer.not_kept:
        click.echo(answer.not_kept)
    if answer.HasField("written"):
        click.echo("\n" + written_in_full(answer.written))


def written_in_full(written: "pb.Written") -> str:
    """What the round's model wrote, each text below its prompt."""
    by = f", on {console.printable(written.node_name, most=64)}" if written.node_name else ""
    if written.why_not:
        why = console.printable(written.why_not, most=MOST_CHARACTERS)
        return f"the model wrote nothing{by}: {why}"
    lines = [f"what the model wrote{by}"]
    for one in written.texts:
        text = console.printable(one.text, most=MOST_CHARACTERS)
        prompt = console.printable(one.prompt, most=MOST_CHARACTERS)
        lines += ["", *(f"  {line}" for line in f"{prompt}│{text}".split("\n"))]
    return "\n".join(lines)


def _facts(answer: "pb.GetRoundResponse", counted: str) -> list[str]:
    from protocol.terminal.status_words import screened_in_words
    from protocol.wire.vitals import loss_in_words

    told = answer.summary
    is_committed = answer.HasField("committed_seconds") or not answer.is_open
    name = f"round {told.round}"
    if answer.is_open:
        so_far = console.seconds_in_words(answer.seconds)
        name += f", {'committed, nodes apply it' if is_committed else 'in flight'}, {so_far} so far"
    elif answer.HasField("seconds"):
        name += f", {console.seconds_in_words(answer.seconds)}"
    lines = [name, told.reason]
    if is_committed:
        lines.append(
            f"{told.num_contributors} of {told.num_participants} nodes are in it, "
            f"{told.num_committed_slices} of {told.num_slices} slices are committed, "
            f"{console.count_in_words(told.tokens)} {counted}"
            + (f", loss {loss_in_words(told.loss)}" if told.loss else "")
        )
    if told.screened:
        lines.append(f"screened: {screened_in_words(told)}")
    return [*filter(None, (*lines, answer.waited_for)), ""]


def chart(answer: "pb.GetRoundResponse") -> list[str]:
    """A bar for each node from the plan to the end of the round; nothing where no times are known."""
    whole = answer.seconds
    timed = any(node.HasField("trained_seconds") for node in answer.nodes)
    if whole <= 0 or not (timed or answer.is_open):
        return []
    rows = [
        f"{_short(node).ljust(NAME_WIDTH)}  {bar(node, whole=whole, is_open=answer.is_open)}"
        for node in _by_name(answer)
    ]
    axis = ["0 s".ljust(BAR_WIDTH - len(end := console.seconds_in_words(whole))) + end]
    if answer.HasField("committed_seconds"):
        place = min(BAR_WIDTH - 1, int(answer.committed_seconds / whole * BAR_WIDTH))
        words = f"commit at {console.seconds_in_words(answer.committed_seconds)}"
        fits = place + 2 + len(words) <= BAR_WIDTH
        axis.append(" " * place + f"↑ {words}" if fits else f"{words} ↑".rjust(place + 1))
    return [*rows, *(" " * (NAME_WIDTH + 2) + line for line in axis), LEGEND]


def bar(node: "pb.NodeInRound", *, whole: float, is_open: bool) -> str:
    """What a node does at each moment, of which BAR_WIDTH make the whole; spaces once it is done.

    After the last stage that is known to be over comes the next one, or that it was not done.
    """
    stages = [
        *([(TRAINS, "trained_seconds")] if _trains(node) else []),
        *([(REDUCES, "reduced_seconds")] if _reduces(node) else []),
        (RECEIVES, "held_seconds"),
        (APPLIES, "applied_seconds"),
    ]
    over = [
        (mark, getattr(node, field))
        for mark, field in stages
        if node.HasField(field)  # type: ignore[arg-type] # a name from the list above
    ]
    last = over[-1][0] if over else ""
    later = [mark for mark, _ in stages]
    later = later[later.index(last) + 1 :] if last else later
    goes_on = (later[0] if is_open else MISSING) if later else " "
    moments = ((cell + 0.5) / BAR_WIDTH * whole for cell in range(BAR_WIDTH))
    drawn = (next((mark for mark, at in over if moment < at), goes_on) for moment in moments)
    return "".join(drawn).rstrip()


def _trains(node: "pb.NodeInRound") -> bool:
    """A helper does not."""
    return bool(node.inner_steps) or (_has_lost_its_plan(node) and node.HasField("trained_seconds"))


def _reduces(node: "pb.NodeInRound") -> bool:
    return bool(node.num_slices_reduced) or (
        _has_lost_its_plan(node) and node.HasField("reduced_seconds")
    )


def _has_lost_its_plan(node: "pb.NodeInRound") -> bool:
    """Of rounds so far back that only the times say what a node did."""
    return not (node.inner_steps or node.num_slices_reduced)


def _row(node: "pb.NodeInRound") -> dict[str, str]:
    from protocol.terminal.node_words import screening_in_words
    from protocol.wire.vitals import loss_in_words

    def at(field: str) -> str:
        return f"{getattr(node, field):.1f} s" if node.HasField(field) else "-"  # type: ignore[arg-type]

    taken = screening_in_words(node.screening)
    if node.HasField("screening"):
        whole = node.screening.num_contributions
        cut = node.screening.num_clipped or node.screening.num_left_out
        taken = taken if cut else f"all {whole} taken" if whole else "none"
    return {
        "node": _short(node),
        "trained": at("trained_seconds"),
        "reduced": at("reduced_seconds"),
        "held": at("held_seconds"),
        "applied": at("applied_seconds"),
        "steps": f"{node.trained_inner_steps} of {node.inner_steps}"
        if node.HasField("trained_inner_steps")
        else "-"
        if _trains(node)
        else "helper",
        "tokens": console.count_in_words(node.trained_tokens) if node.trained_tokens else "-",
        "loss": loss_in_words(node.loss) if node.loss else "-",
        "contributions": taken,
    }


def _by_name(answer: "pb.GetRoundResponse") -> Sequence["pb.NodeInRound"]:
    return sorted(answer.nodes, key=lambda node: (node.node_name, node.node_id))


def _short(node: "pb.NodeInRound") -> str:
    from protocol.terminal.node_words import short_name

    return short_name(node.node_name or node.node_id[:8])
