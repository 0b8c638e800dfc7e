"""`atoll track`: each round once, whatever ends the command, and in a form that the tools read."""

import contextlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import BadDataError, ExitCode, UsageError
from protocol.terminal import console, sinks, track
from protocol.terminal.cli import root
from protocol.terminal.query import StatusLink
from protocol.terminal.sinks import (
    EVENTS_PREFIX,
    EventFile,
    Logger,
    Note,
    TensorBoard,
    crc32c,
    rewind_event,
    scalars_event,
)
from protocol.terminal.track import NOTE_FILE, Tracker, note_of, rows_of
from protocol.v1 import status_pb2 as pb

SWARM = "5d41402abc4b2a76b9719d911017c592"


def event_class() -> Any:
    """TensorFlow's Event, as its .proto has it, for protobuf's own decoder."""
    double, floating, int64, text, message, enum = 1, 2, 3, 9, 11, 14
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="t", syntax="proto3")
    kinds: dict[str, list[tuple[str, int, int, str, bool]]] = {
        "Value": [
            ("tag", 1, text, "", False),
            ("simple_value", 2, floating, "", False),
            ("tensor", 8, message, ".t.Tensor", False),
            ("metadata", 9, message, ".t.Metadata", False),
        ],
        "Tensor": [
            ("dtype", 1, int64, "", False),
            ("tensor_shape", 2, message, ".t.Shape", False),
            ("string_val", 8, text, "", True),
        ],
        "Shape": [("dim", 2, message, ".t.Dim", True)],
        "Dim": [("size", 1, int64, "", False)],
        "Metadata": [("plugin_data", 1, message, ".t.Plugin", False)],
        "Plugin": [("plugin_name", 1, text, "", False)],
        "Summary": [("value", 1, message, ".t.Value", True)],
        "SessionLog": [("status", 1, enum, ".t.Status", False)],
        "Event": [
            ("wall_time", 1, double, "", False),
            ("step", 2, int64, "", False),
            ("file_version", 3, text, "", False),
            ("summary", 5, message, ".t.Summary", False),
            ("session_log", 7, message, ".t.SessionLog", False),
        ],
    }
    status = file.enum_type.add(name="Status")
    for number, name in enumerate(("NONE", "START")):
        status.value.add(name=name, number=number)
    for name, fields in kinds.items():
        described = file.message_type.add(name=name)
        for field, number, kind, of, is_many in fields:
            added = described.field.add(name=field, number=number, label=3 if is_many else 1)
            added.type = kind  # type: ignore[assignment] # a number of an enum
            if of:
                added.type_name = of
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Event"))


EVENT = event_class()


def events_in(path: Path) -> list[Any]:
    """Reads records as TensorFlow does: lengths and both checksums must hold, to the last byte."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        for part, at in ((data[:8], 8), (data[12 : 12 + length], 12 + length)):
            crc = crc32c(part)
            masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
            assert struct.unpack("<I", data[at : at + 4]) == (masked,)
        found.append(EVENT.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return found


def steps_in(path: Path) -> list[int]:
    """The rounds that it shows: what a start takes back is gone."""
    steps: list[int] = []
    for event in events_in(path):
        if event.session_log.status == 1:
            steps = [step for step in steps if step < event.step]
        if any(value.tag == "round/seconds" for value in event.summary.value):
            steps.append(event.step)
    return steps


def test_the_checksum_is_that_of_rfc_3720() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


def test_a_file_of_events_is_read_by_what_reads_protocol_buffers(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events", size=0, at=5.0)
    file.append([scalars_event(7.5, 300, {"loss/training": 2.5, "round/tokens": 1e9})])
    file.append([rewind_event(8.0, 200)])
    file.close()
    first, second, third = events_in(tmp_path / "events")
    assert (first.wall_time, first.file_version) == (5.0, "brain.Event:2")
    assert (second.wall_time, second.step) == (7.5, 300)
    told = [(value.tag, value.simple_value) for value in second.summary.value]
    assert told == [("loss/training", 2.5), ("round/tokens", 1e9)]
    assert (third.step, third.session_log.status) == (200, 1)


def test_tensorboard_reads_what_is_written_and_drops_what_is_made_again(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="TensorBoard is not in the development environment: its format is checked above",
    )
    file = EventFile(tmp_path / f"{EVENTS_PREFIX}x", size=0, at=5.0)
    file.append([scalars_event(float(n), n, {"loss": 1.0 * n}) for n in range(1, 6)])
    file.append([rewind_event(6.0, 4), scalars_event(7.0, 4, {"loss": 40.0})])
    file.close()
    read = accumulator.EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(one.step, one.value) for one in read.Scalars("loss")] == [
        *((1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0))
    ]


def a_round(number: int, **changes: object) -> pb.RoundSummary:
    told = {"round": number, "tokens": 1000, "seconds": 2.0, "loss": 3.0, "outer_digest": b"d"}
    return pb.RoundSummary(**told | changes)  # type: ignore[arg-type]


class Run:
    """What a coordinator tells of a run."""

    def __init__(self) -> None:
        self.rounds: list[pb.RoundSummary] = []
        self.went_back: list[str] = []
        self.losses: list[pb.HeldOutLoss] = []
        self.texts: dict[int, str] = {}
        self.asked: list[int] = []

    def grow(self, count: int = 1) -> None:
        for _ in range(count):
            number = len(self.rounds) + 1
            self.rounds.append(a_round(number, incarnation=len(self.went_back)))

    def go_back(self, to: int) -> None:
        self.rounds = self.rounds[:to]
        self.went_back.append(f"to {to}")

    def status(self) -> pb.GetStatusResponse:
        run = pb.RunStatus(
            swarm_id=SWARM,
            run_name="run",
            committed_round=len(self.rounds),
            total_rounds=100,
            went_back=self.went_back,
            held_out_losses=self.losses,
            written_rounds=sorted(self.texts),
        )
        return pb.GetStatusResponse(run=run, unix_seconds=1000.0)

    def listed(self, limit: int) -> Sequence[pb.RoundSummary]:
        self.asked.append(limit)
        return self.rounds[::-1][:limit]

    def one(self, number: int) -> pb.GetRoundResponse:
        text = pb.PromptedText(prompt="Once ", text=self.texts[number])
        return pb.GetRoundResponse(written=pb.Written(round=number, texts=[text]))


class CrashError(Exception):
    """The machine stops."""


class MortalTracker(Tracker):
    """One whose machine may stop when it writes its note."""

    dies = ""

    def _save(self, note: Note) -> None:
        if "before" not in self.dies:
            super()._save(note)
        if self.dies:
            raise CrashError


def begun(folder: Path) -> tuple[MortalTracker, TensorBoard]:
    note = note_of(folder, swarm_id=SWARM, tool="tensorboard")
    sink = TensorBoard(folder, note, at=0.0)
    return MortalTracker(note, sink, note_path=folder / NOTE_FILE), sink


@given(
    steps=st.lists(
        st.sampled_from(["grow", "look", "crash before the note", "crash after it", "go back"]),
        max_size=25,
    )
)
def test_every_round_is_in_the_event_file_once_whenever_the_machine_stops(
    steps: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, run = tmp_path_factory.mktemp("out"), Run()
    tracker, sink = begun(folder)
    for step in [*steps, "look"]:
        match step:
            case "grow":
                run.grow(2)
            case "go back":
                run.go_back(max(0, len(run.rounds) - 3))
            case "look":
                tracker.look(run.status(), run.listed, run.one)
            case _:
                tracker.dies = step
                with contextlib.suppress(CrashError):
                    tracker.look(run.status(), run.listed, run.one)
                sink.close()
                tracker, sink = begun(folder)
    sink.close()
    path = folder / f"{EVENTS_PREFIX}{SWARM[:12]}"
    assert steps_in(path) == [closed.round for closed in run.rounds]


def test_nothing_is_asked_for_while_nothing_is_new(tmp_path: Path) -> None:
    run = Run()
    run.grow(3)
    tracker, sink = begun(tmp_path)
    for _ in range(3):
        tracker.look(run.status(), run.listed, run.one)
    assert run.asked == [4000]
    run.grow()
    tracker.look(run.status(), run.listed, run.one)
    assert run.asked == [4000, 2]
    assert tracker.said() == [
        "wrote 3 rounds, up to round 3 of 100",
        "wrote 1 round, up to round 4 of 100",
    ]
    sink.close()


def as_table(columns: list[str], rows: list[list[object]]) -> object:
    return [dict(zip(columns, row, strict=True)) for row in rows]


def test_loggers_get_what_models_write_as_a_table_at_its_round(tmp_path: Path) -> None:
    run, logged = Run(), dict[int, object]()
    run.grow(3)
    run.texts = {2: "upon\x1b a time"}
    sink = Logger(
        lambda told, step: logged.update({step: told.get("texts")}), lambda: None, as_table
    )
    tracker = Tracker(Note(swarm_id=SWARM, tool="wandb"), sink, note_path=tmp_path / NOTE_FILE)
    tracker.look(run.status(), run.listed, run.one)
    text = {"round": 2, "prompt": "text/1", "text": "Once upon\ufffd a time"}
    assert logged == {1: None, 2: [text], 3: None}


def test_a_logger_that_is_killed_has_no_row_twice(tmp_path: Path) -> None:
    run, logged = Run(), list[int]()
    run.grow(2)

    def log(values: dict[str, object], step: int) -> None:
        assert values["round"] == step
        logged.append(step)

    def kill(values: dict[str, object], step: int) -> None:
        raise CrashError

    for each in (kill, log, log):
        note = note_of(tmp_path, swarm_id=SWARM, tool="trackio")
        sink = Logger(each, lambda: None, as_table)
        tracker = Tracker(note, sink, note_path=tmp_path / NOTE_FILE)
        try:
            tracker.look(run.status(), run.listed, run.one)
        except CrashError:
            run.grow()
    assert logged == [3], "rounds 1 and 2 were on their way when it was killed"


def test_a_held_out_loss_belongs_to_its_round_and_comes_once() -> None:
    run = Run()
    run.grow(3)
    run.losses = [
        pb.HeldOutLoss(round=0, loss=5.0),
        pb.HeldOutLoss(round=2, loss=4.0, metric=0.5),
    ]
    run.losses[1].by_source.add(source="code", loss=3.0)
    run.losses[1].by_source.add(source="", loss=6.0)
    note = Note(swarm_id=SWARM, tool="wandb")
    rows, after = rows_of(run.rounds, run.status(), note)
    assert [row.round for row in rows] == [0, 1, 2, 3]
    assert rows[0].values == {"loss/held_out": 5.0}
    assert rows[2].values["loss/held_out"] == 4.0
    assert rows[2].values["loss/held_out_metric"] == 0.5
    assert rows[2].values["loss/held_out/code"] == 3.0
    assert rows[2].values["loss/held_out/others"] == 6.0
    assert rows_of([], run.status(), after) == ([], after)


def test_when_rounds_closed_is_counted_back_and_no_number_is_written_that_is_none() -> None:
    rounds = [a_round(10, seconds=5.0), a_round(20, loss=0.0), a_round(21, loss=float("inf"))]
    rows, _ = rows_of(rounds, Run().status(), Note(swarm_id=SWARM, tool="wandb"))
    assert [row.at for row in rows] == [1000.0 - 2 - 2 - 9 * 5, 998.0, 1000.0]
    assert ["loss/training" in row.values for row in rows] == [True, False, False]


def test_rounds_that_nodes_still_apply_wait(tmp_path: Path) -> None:
    run, sink = Run(), Logger(lambda values, step: None, lambda: None, as_table)
    run.grow(2)
    run.rounds[-1].outer_digest = b""
    tracker = Tracker(Note(swarm_id=SWARM, tool="wandb"), sink, note_path=tmp_path / NOTE_FILE)
    tracker.look(run.status(), run.listed, run.one)
    assert tracker.said() == ["wrote 1 round, up to round 1 of 100"]


def test_what_models_write_is_in_the_event_file_once_as_text_that_is_no_markup(
    tmp_path: Path,
) -> None:
    run = Run()
    run.grow(4)
    run.texts = {2: "<b>upon</b>\n```\n\x1b# a time", 4: "more"}
    for _ in range(2):
        tracker, sink = begun(tmp_path)
        tracker.look(run.status(), run.listed, run.one)
        sink.close()
    events = events_in(tmp_path / f"{EVENTS_PREFIX}{SWARM[:12]}")
    texts = [
        (event.step, value.tag, list(value.tensor.string_val))
        for event in events
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "text"
        if (value.tensor.dtype, [dim.size for dim in value.tensor.tensor_shape.dim]) == (7, [1])
    ]
    assert texts == [
        (2, "text/1", ["    Once <b>upon</b>\n    ```\n    \ufffd# a time"]),
        (4, "text/1", ["    Once more"]),
    ]
    run.go_back(3)
    tracker, sink = begun(tmp_path)
    run.texts = {2: run.texts[2]}
    tracker.look(run.status(), run.listed, run.one)
    run.grow()
    run.texts[4] = "again"
    tracker.look(run.status(), run.listed, run.one)
    sink.close()
    last = events_in(tmp_path / f"{EVENTS_PREFIX}{SWARM[:12]}")[-1]
    assert (last.step, list(last.summary.value[0].tensor.string_val)) == (4, ["    Once again"])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    run = Run()
    run.grow(2)
    rounds: Callable[[StatusLink, int], pb.ListRoundsResponse] = lambda link, limit: (  # noqa: E731
        pb.ListRoundsResponse(rounds=run.listed(limit))
    )
    monkeypatch.setattr(StatusLink, "status", lambda link: run.status())
    monkeypatch.setattr(StatusLink, "rounds", rounds)
    yield run


def test_the_command_goes_on_where_it_ended(
    told: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["track", "--to", "tensorboard", "--out", str(tmp_path / "curves"), "--once"]
    for grown in (0, 0, 3):
        told.grow(grown)
        assert console.run(root, words) == ExitCode.OK
    assert capsys.readouterr().out.splitlines() == [
        "wrote 2 rounds, up to round 2 of 100",
        "nothing is new",
        "wrote 3 rounds, up to round 5 of 100",
    ]
    assert steps_in(tmp_path / "curves" / f"{EVENTS_PREFIX}{SWARM[:12]}") == [1, 2, 3, 4, 5]
    other = ["track", "--to", "wandb", "--out", str(tmp_path / "curves"), "--once"]
    with patch.object(track, "required"):
        assert console.run(root, other) == ExitCode.USAGE
    assert "has figures for tensorboard" in capsys.readouterr().err


def test_a_tool_that_is_not_installed_is_told_with_the_line_that_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ModuleNotFoundError("No module named 'wandb'", name="wandb")
    with patch.object(sinks, "import_module", side_effect=missing):
        words = ["track", "--to", "wandb", "--out", str(tmp_path / "curves")]
        assert console.run(root, words) == ExitCode.USAGE
    assert "pip install 'atoll[wandb]'" in capsys.readouterr().err
    assert not (tmp_path / "curves").exists()


def test_a_note_of_another_run_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / NOTE_FILE).write_text(json.dumps({"swarm_id": "other", "tool": "wandb"}))
    with pytest.raises(UsageError, match="has figures of another run"):
        note_of(tmp_path, swarm_id=SWARM, tool="wandb")
    for text in ("{", '{"swarm": 1}', "[]"):
        (tmp_path / NOTE_FILE).write_text(text)
        with pytest.raises(BadDataError, match="is damaged"):
            note_of(tmp_path, swarm_id=SWARM, tool="wandb")
