"""The root command: what it lists, what it loads, and what it leaves unloaded."""

import csv
import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import click
import pytest

from protocol.errors import ExitCode
from protocol.terminal import cli, console, query
from protocol.terminal.lazy_group import OTHER_WORDS
from protocol.v1 import session_pb2, status_pb2

ROOT = Path(cli.__file__).parents[2]


def loaded_by(arguments: list[str]) -> tuple[int, set[str]]:
    """The modules that a fresh process has imported after running the command."""
    program = (
        "import sys; from protocol.terminal import cli; from protocol.terminal import console; "
        f"code = console.run(cli.root, {arguments!r}); "
        "print(); print('LOADED', code, *sorted(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    _, code, *modules = ran.stdout.splitlines()[-1].split()
    return int(code), set(modules)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["status", "--help"], []])
def test_help_waits_for_no_heavy_import(arguments: list[str]) -> None:
    code, modules = loaded_by(arguments)
    assert code == ExitCode.OK
    assert "protocol.terminal.cli" in modules
    assert not {"torch", "hivemind", "numba", "numpy", "grpc", "rich", "pydantic"} & modules


def test_a_query_imports_neither_torch_nor_hivemind_nor_asks_for_them(tmp_path: Path) -> None:
    code, modules = loaded_by(["status", "--dir", str(tmp_path)])
    assert code == ExitCode.NO_INPUT  # no swarm joined in this folder
    assert "protocol.trust.credentials" in modules
    assert not {"torch", "hivemind", "numba", "numpy"} & modules


def test_the_help_names_every_command_under_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(cli.root, ["--help"]) == ExitCode.OK
    out = capsys.readouterr().out
    titles = ["Try it:", "Run owner:", "Contributor:", "Anyone:"]
    assert [line for line in out.splitlines() if line in titles] == titles
    for entries in cli.SECTIONS.values():
        for entry in entries:
            assert f"  {entry.name} " in out
            assert entry.summary in out


def test_no_help_cuts_what_a_command_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for name in ("coordinator", "helper", "invite", "node", "relay", "run"):
        assert console.run(cli.root, [name, "--help"]) == 0
        assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


def test_every_command_of_the_table_exists() -> None:
    context = cli.root.make_context("atoll", [], resilient_parsing=True)
    for name in cli.root.list_commands(context):
        command = cli.root.get_command(context, name)
        assert command is not None
        assert command.help, f"{name} says nothing in its --help"


def test_the_table_names_modules_that_stand_beside_protocol() -> None:
    rooms = {
        entry.target.partition(".")[0] for entries in cli.SECTIONS.values() for entry in entries
    }
    assert rooms == {"protocol", "node", "coordinator"}
    assert all(find_spec(room) is not None for room in rooms)


def test_a_mistyped_command_is_answered_with_the_nearest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert console.run(cli.root, ["stauts"]) == ExitCode.USAGE
    assert capsys.readouterr().err == (
        "atoll: there is no command 'stauts'\n  next: did you mean 'atoll status'?\n"
    )


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("pause", "did you mean 'atoll run pause' or 'atoll node pause'?"),  # it is in other groups
        ("doctr", "did you mean 'atoll node doctor'?"),
        (
            "node status",
            "did you mean 'atoll status'?",
        ),  # and not 'start', which is nearer in letters
        ("leave", "did you mean 'atoll node drain'?"),  # another word for it
        ("node stop", "did you mean 'atoll node drain'?"),  # not 'run stop': it asks about a node
        ("stop", "did you mean 'atoll run stop' or 'atoll node drain'?"),
        ("nodes kick node-7", "did you mean 'atoll nodes expel'?"),
        ("help", "did you mean 'atoll --help'?"),
        ("node expell", "see 'atoll node --help'; or did you mean 'atoll nodes expel'?"),
        ("run frobnicate", "see 'atoll run --help'"),
    ],
)
def test_a_command_that_is_called_otherwise_or_lies_elsewhere_is_named(
    capsys: pytest.CaptureFixture[str], typed: str, meant: str
) -> None:
    assert console.run(cli.root, typed.split()) == ExitCode.USAGE
    assert capsys.readouterr().err.endswith(f"\n  next: {meant}\n")


@pytest.mark.parametrize("typed", ["node limits", "node limit", "limits"])
def test_limits_of_a_machine_are_not_taken_for_those_of_an_invite(
    capsys: pytest.CaptureFixture[str], typed: str
) -> None:
    assert console.run(cli.root, typed.split()) == ExitCode.USAGE
    told = capsys.readouterr().err.partition("\n  next: ")[2]
    assert told.startswith("write max_upload, hours, only_idle, on_battery, load or max_disk into")


def test_every_other_word_leads_to_a_command() -> None:
    context = cli.root.make_context("atoll", [], resilient_parsing=True)
    for words in chain.from_iterable(OTHER_WORDS.values()):
        command: click.Command | None = cli.root
        for word in words.split():
            if word.startswith("--"):
                assert command is not None
                assert any(word in each.opts for each in command.get_params(context)), words
                break
            assert isinstance(command, click.Group)
            command = command.get_command(context, word)
            assert command is not None, words


def test_the_module_is_the_command_and_passes_the_exit_code_on() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "protocol.terminal.cli", "no-such"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == ExitCode.USAGE
    assert ran.stdout == ""


@pytest.mark.parametrize(
    "program",
    [
        "from protocol.terminal.cli import main; main(['--help'])",
        "import click, sys; from protocol.terminal import console; "
        "show = lambda: console.terminal().print(console.table(['node'], [['a']] * 9999)); "
        "sys.exit(console.run(click.Command('it', callback=show), []))",
    ],
)
def test_a_reader_that_goes_away_ends_the_command_quietly(program: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert ran.returncode == 1
    assert ran.stderr == ""


@pytest.mark.parametrize("typed", ["invite list", "run pause", "audit", "coordinator start"])
def test_a_run_owner_s_command_asks_for_the_run_s_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, typed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path / "nowhere"))
    assert console.run(cli.root, typed.split()) == ExitCode.NO_INPUT
    err = capsys.readouterr().err
    assert "nowhere is not a coordinator's folder" in err
    assert "atoll join" not in err
    (tmp_path / "my-run").mkdir()
    (tmp_path / "my-run" / "coordinator.toml").touch()
    assert console.run(cli.root, typed.split()) == ExitCode.NO_INPUT
    assert "my-run\n" in capsys.readouterr().err


def test_nodes_are_watched_as_json_or_by_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(cli.root, ["nodes", "--watch"]) == ExitCode.USAGE
    assert "add --json, or watch the nodes with 'atoll status --watch'" in capsys.readouterr().err


def test_json_has_every_field_with_hex_bytes_short_enums_and_null_for_what_is_absent() -> None:
    node = status_pb2.NodeStatus(node_id="ab", state=status_pb2.NODE_STATE_READY)
    assert query.as_json(node) == {
        "node_id": "ab",
        "node_name": "",
        "state": "ready",
        "device": "",
        "num_ranks": 0,
        "silent_seconds": 0.0,
        "committed_tokens": 0,
        "address": None,
        "heartbeat": None,
        "same_corpus": False,
        "version": "",
        "inner_steps": 0,
        "inner_steps_per_second": None,
        "is_draining": False,
        "link_rates": None,
        "has_waiting_copy": False,
        "screening": None,
        "confirmed_work_share": None,
        "standing": "",
        "is_helper": False,
        "has_symmetric_router": False,
        "invite_id": "",
        "is_unheard": False,
        "is_own": False,
        "given": None,
    }
    node.heartbeat.CopyFrom(
        session_pb2.HeartbeatRequest(outer_digest=b"\x01\xff", loss=float("nan"))
    )
    node.heartbeat.wire.add(kind="control", sent_bytes=2**63)
    shown = query.as_json(node)
    assert isinstance(shown, dict) and isinstance(beat := shown["heartbeat"], dict)
    assert beat["outer_digest"] == "01ff"
    assert beat["loss"] is None
    assert beat["wire"] == [{"kind": "control", "sent_bytes": 2**63, "received_bytes": 0}]


def test_data_shows_samples_epochs_and_pieces(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = status_pb2.DataStatus(
        epoch_samples=400,
        committed_samples=600,
        leased_samples=80,
        free_again_samples=20,
        free_again_pieces=1,
        frontier=700,
    )
    answer = status_pb2.GetStatusResponse(run=status_pb2.RunStatus(data=samples))
    monkeypatch.setattr(query.StatusLink, "status", lambda self: answer)
    assert console.run(cli.root, ["data"]) == ExitCode.OK
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [
        "committed 600 1.500 in the model, each counted once",
        "leased now 80 0.200 to the participants of the round in flight",
        "to be leased again 20 0.050 leased, not committed; in 1 piece",
        "reached 700 1.750 all of the above; what follows was never leased",
    ]
    assert console.run(cli.root, ["data", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == {
        "epoch_samples": 400,
        "committed_samples": 600,
        "leased_samples": 80,
        "free_again_samples": 20,
        "free_again_pieces": 1,
        "frontier": 700,
        "skipped_samples": 0,
    }


def test_rounds_come_as_csv_with_the_losses_of_exactly_their_states(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = status_pb2.RoundSummary(
        round=1, seconds=2.5, tokens=100, loss=5.25, reason='void, "late"'
    )
    second = status_pb2.RoundSummary(
        round=2,
        seconds=2.0,
        tokens=120,
        num_participants=3,
        num_contributors=2,
        outer_digest=b"\xff",
    )
    losses = [
        status_pb2.HeldOutLoss(round=0, loss=5.5),
        status_pb2.HeldOutLoss(round=2, loss=4.75, metric=0.5),
        status_pb2.HeldOutLoss(round=3, loss=4.5),  # of a round that closes just now
    ]
    status = status_pb2.GetStatusResponse(run=status_pb2.RunStatus(held_out_losses=losses))
    asked: list[int] = []

    def rounds(self: query.StatusLink, limit: int) -> status_pb2.ListRoundsResponse:
        asked.append(limit)
        return status_pb2.ListRoundsResponse(rounds=[second, first][:limit])

    monkeypatch.setattr(query.StatusLink, "status", lambda self: status)
    monkeypatch.setattr(query.StatusLink, "rounds", rounds)
    assert console.run(cli.root, ["rounds", "--csv"]) == ExitCode.OK
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["round"] for row in rows] == ["0", "1", "2"]
    assert [row["held_out_loss"] for row in rows] == ["5.5", "", "4.75"]
    assert [row["loss"] for row in rows] == ["", "5.25", ""]
    assert rows[1]["reason"] == 'void, "late"'
    assert rows[1]["counted"] == "tokens"
    assert (rows[2]["held_out_metric"], rows[2]["outer_digest"]) == ("0.5", "ff")
    assert console.run(cli.root, ["rounds", "--csv", "--limit", "1"]) == ExitCode.OK
    assert [row["round"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))] == ["2"]
    assert asked == [4000, 1]
    assert console.run(cli.root, ["rounds", "--csv", "--json"]) == ExitCode.USAGE
    assert "--csv and --json are both given" in capsys.readouterr().err
    assert console.run(cli.root, ["rounds"]) == ExitCode.OK
    assert "4.750" in capsys.readouterr().out


@pytest.mark.parametrize("coding", ["ascii", "latin-1"])
def test_a_terminal_that_is_not_utf_8_gets_what_it_can_show_and_programs_all_of_it(
    coding: str,
) -> None:
    program = (
        "from protocol.terminal import cli, console\n"
        "def told(*_):\n"
        "    console.terminal().print('\u2500 \u017e')\n"
        "    console.print_json({'a': '\u017e'})\n"
        "    return 0\n"
        "console.run = told\n"
        "cli.main(['status'])"
    )
    environment = {**os.environ, "PYTHONIOENCODING": f"{coding}:strict", "PYTHONUTF8": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, env=environment
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert ran.stdout.decode(coding) == '? ?\n{\n  "a": "\\u017e"\n}\n'


def test_a_glob_that_the_shell_has_spread_out_is_told_of_without_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / f"{number}.txt") for number in range(50)]
    for each in files:
        Path(each).touch()
    typed = ["init", str(tmp_path / "run"), "--data", *files]
    assert console.run(cli.root, typed) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert said.startswith(f"atoll: {files[1]} and 48 more files stand where no path belongs")
    assert f"next: write the glob in quotes, as '{tmp_path}/*.txt'" in said
    assert files[2] not in said and not (tmp_path / "run").exists()
