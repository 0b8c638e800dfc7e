"""`atoll track`: the run's figures for the tools that researchers look at, each round once.

It asks the coordinator for its history, as `atoll rounds` does, and follows. What it has written stands in
a note beside the files, so that it goes on there after it ended or was killed.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import click

from protocol.errors import BadDataError, UsageError
from protocol.files.durable import refusing, write_atomically
from protocol.terminal.console import PathAtHome, printable
from protocol.terminal.query import StatusLink, dir_option, watch_until_finished
from protocol.terminal.sinks import (
    DEFAULT_ENDPOINT,
    Note,
    ReceiverAwayError,
    Row,
    Sink,
    open_sink,
    required,
)
from protocol.wire.rounds import OTHER_SOURCES

if TYPE_CHECKING:
    from protocol.v1 import status_pb2 as pb

NOTE_FILE = "atoll-track.json"

TOOLS = ("tensorboard", "wandb", "trackio", "opentelemetry")

TIMED_ROUNDS = 1000
"""Of rounds so far back at most, when each node did what is asked for: of older ones it is not kept."""

RETRY_SECONDS = 10.0
"""Until a tool that has not answered is asked again."""

MOST_CHARACTERS = 4000
"""Of a text that a model wrote."""


def values_of(closed: "pb.RoundSummary") -> dict[str, float]:
    """The figures of a closed round."""
    from protocol.terminal.status_words import ledger_bytes

    told = {
        "loss/training": closed.loss or math.nan,
        "round/tokens": closed.tokens,
        "round/seconds": closed.seconds,
        "round/tokens_per_second": closed.tokens / closed.seconds if closed.seconds else math.nan,
        "round/sent_bytes": ledger_bytes(closed.wire),
        "round/participants": closed.num_participants,
        "round/contributors": closed.num_contributors,
        "round/void_slices": closed.num_slices - closed.num_committed_slices,
        "round/screened_nodes": len(closed.screened),
    }
    return {tag: float(value) for tag, value in told.items() if math.isfinite(value)}


def texts_of(written: "pb.Written") -> dict[str, str]:
    """What a round's model wrote, each with its prompt, by the place of the prompt."""
    return {
        f"text/{place}": printable(one.prompt + one.text, most=MOST_CHARACTERS)
        for place, one in enumerate(written.texts, 1)
    }


def rows_of(
    rounds: Sequence["pb.RoundSummary"],
    status: "pb.GetStatusResponse",
    note: Note,
    written: Sequence["pb.Written"] = (),
    times: Mapping[int, "pb.GetRoundResponse"] = MappingProxyType({}),
) -> tuple[list[Row], Note]:
    """What is new, oldest first, and the note when that is written.

    `rounds` and `written` are new ones, oldest first, and `times` what each round's nodes did, where it is
    wanted. When each closed is counted back from the latest.
    """
    at: dict[int, float] = {}
    values: dict[int, dict[str, float]] = {}
    then, later = status.unix_seconds, 0
    for closed in reversed(rounds):
        # Of those between nothing is kept.
        then -= closed.seconds * max(0, later - closed.round - 1)
        at[closed.round] = then
        then, later = then - closed.seconds, closed.round
        values[closed.round] = values_of(closed)
    losses = [one for one in status.run.held_out_losses if one.round > note.held_out_round]
    for one in losses:
        told = {"loss/held_out": one.loss}
        if one.HasField("metric"):
            told["loss/held_out_metric"] = one.metric
        for own in one.by_source:
            told[f"loss/held_out/{own.source or OTHER_SOURCES}"] = own.loss
        finite = {tag: value for tag, value in told.items() if math.isfinite(value)}
        values.setdefault(one.round, {}).update(finite)
    texts = {one.round: texts_of(one) for one in written}
    rows = [
        Row(
            round=number,
            at=at.get(number, status.unix_seconds),
            values=values.get(number, {}),
            texts=texts.get(number, {}),
            told=times.get(number),
        )
        for number in sorted(values.keys() | texts.keys())
    ]
    return rows, replace(
        note,
        round=rounds[-1].round if rounds else note.round,
        incarnation=rounds[-1].incarnation if rounds else note.incarnation,
        held_out_round=losses[-1].round if losses else note.held_out_round,
        text_round=written[-1].round if written else note.text_round,
    )


def went_back_to(note: Note, rounds: Sequence["pb.RoundSummary"], committed: int) -> int | None:
    """The newest round that still holds, where later ones that were written do not; None else."""
    again = [r.round for r in rounds if r.round <= note.round and r.incarnation > note.incarnation]
    newest = min([*(number - 1 for number in again), committed])
    return newest if newest < note.round else None


class Tracker:
    """Takes what a coordinator tells to a tool, each round once."""

    def __init__(self, note: Note, sink: Sink, *, note_path: Path) -> None:
        self._note = note
        self._sink = sink
        self._path = note_path
        self._num_went_back = -1  # times that the run has, as far as was looked at
        self._said: list[str] = []

    def look(
        self,
        status: "pb.GetStatusResponse",
        ask: Callable[[int], Sequence["pb.RoundSummary"]],
        ask_one: Callable[[int], "pb.GetRoundResponse"],
    ) -> None:
        """Writes what is new.

        `ask` gives the latest so many rounds, newest first, and `ask_one` all of one of them.
        """
        from protocol.terminal.watch import MOST_ROUNDS, settled_after
        from protocol.v1 import status_pb2 as pb

        run = status.run
        rounds: Sequence[pb.RoundSummary] = ()
        if len(run.went_back) != self._num_went_back:  # what was written may not hold any more
            rounds = ask(MOST_ROUNDS)
            self._num_went_back = len(run.went_back)
        elif run.committed_round > self._note.round:
            rounds = ask(min(MOST_ROUNDS, run.committed_round - self._note.round + 1))
        back = went_back_to(self._note, rounds, run.committed_round)
        if back is not None:
            self._said.append(f"the run went back: rounds from {back + 1} on are written again")
            self._sink.rewind(back, status.unix_seconds)
            held_out = min(self._note.held_out_round, back)
            text = min(self._note.text_round, back)
            self._note = replace(self._note, round=back, held_out_round=held_out, text_round=text)
        new = settled_after(self._note.round, rounds, run)
        numbers = [n for n in run.written_rounds if n > self._note.text_round]
        times = {
            closed.round: ask_one(closed.round)
            if closed.round > run.committed_round - TIMED_ROUNDS
            else pb.GetRoundResponse(summary=closed)
            for closed in (new if self._sink.wants_times else ())
        }
        written = [ask_one(number).written for number in numbers]
        rows, note = rows_of(new, status, self._note, written, times)
        if rows:
            self._sink.put(rows, lambda size: self._save(replace(note, size=size)))
            count = f"{len(new)} round{'s' * (len(new) != 1)}" if new else "a held-out loss or text"
            self._said.append(f"wrote {count}, up to round {note.round} of {run.total_rounds}")

    def said(self) -> list[str]:
        """What it did since the last call, in words."""
        said, self._said = self._said, []
        return said

    def _save(self, note: Note) -> None:
        with refusing(self._path):
            write_atomically(self._path, json.dumps(asdict(note)).encode())
        self._note = note


class Away:
    """A tool that does not answer: it is said once, and asked again after a while."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = float("-inf")
        self.error: ReceiverAwayError | None = None  # since it has not answered

    def trying(self, look: Callable[[], None], say: Callable[[str], None]) -> None:
        """Looks, unless it is too early to try again."""
        if self._clock() < self._next:
            return
        try:
            look()
        except ReceiverAwayError as error:
            if self.error is None:
                say(f"{error.what}; what is new waits")
            self.error, self._next = error, self._clock() + RETRY_SECONDS
        else:
            self.error = None


def note_of(out: Path, *, swarm_id: str, tool: str) -> Note:
    """What was written to a folder before; raises UsageError when it was another run's, or tool's."""
    path = out / NOTE_FILE
    try:
        note = Note(**json.loads(path.read_text()))
    except FileNotFoundError:
        return Note(swarm_id=swarm_id, tool=tool)
    except (ValueError, TypeError) as error:
        raise BadDataError(
            f"{path} is damaged: {error}", next_step="write to another folder with --out"
        ) from error
    if (note.swarm_id, note.tool) != (swarm_id, tool):
        whose = "of another run" if note.swarm_id != swarm_id else f"for {note.tool}"
        raise UsageError(
            f"{out} has figures {whose}", next_step="write to another folder with --out"
        )
    return note


@click.command()
@click.option("--to", "tool", type=click.Choice(TOOLS), required=True, help="Where they go.")
@click.option(
    "--out",
    type=PathAtHome(path_type=Path, file_okay=False),
    help="Folder for its files. Default: the tool's name.",
)
@click.option(
    "--endpoint",
    metavar="URL",
    envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
    help="Where OpenTelemetry's receiver takes OTLP by HTTP. Default: http://localhost:4318.",
)
@click.option("--once", "is_once", is_flag=True, help="Write what there is, and end.")
@dir_option
def track(
    tool: str, out: Path | None, endpoint: str | None, is_once: bool, directory: Path | None
) -> None:
    """Write the run's figures for TensorBoard, Weights & Biases, trackio or OpenTelemetry, and follow it.

    Each round is written once, also when the command is ended and started again. The first three also get
    what models write on from the prompts of the run file, and OpenTelemetry gets when each node did what.
    Weights & Biases is offline unless $WANDB_MODE says otherwise.

    \b
    Examples:
      atoll track --to tensorboard --out curves
      atoll track --to wandb --once
      atoll track --to opentelemetry --endpoint http://localhost:4318
    """
    folder = out or Path(tool)
    if tool != "tensorboard":
        required(tool, folder)
    with StatusLink(directory) as link:
        first = link.status()
        note = note_of(folder, swarm_id=first.run.swarm_id, tool=tool)
        with refusing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            sink = open_sink(
                note,
                folder,
                first.run.run_name,
                at=first.unix_seconds,
                endpoint=endpoint or DEFAULT_ENDPOINT,
            )
        tracker = Tracker(note, sink, note_path=folder / NOTE_FILE)
        away = Away()

        def look(status: "pb.GetStatusResponse") -> None:
            with refusing(folder):
                tracker.look(status, lambda limit: link.rounds(limit).rounds, link.round)

        try:
            if is_once:
                look(first)
                click.echo("\n".join(tracker.said() or ["nothing is new"]))
            else:
                from protocol.terminal.watch import StreamScreen

                screen = StreamScreen(lambda _: tracker.said())
                watch_until_finished(
                    link, screen, look=lambda status: away.trying(lambda: look(status), screen.say)
                )
                if away.error is not None:
                    raise away.error
        finally:
            sink.close()
