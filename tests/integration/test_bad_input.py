"""What new users get wrong: one clear sentence each, and nothing half done.

Of each command some mistakes are typed for real; of long lists of them, the command runs in this process.
Exit codes stand as numbers: they are an interface.
"""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from node.config import load_settings
from protocol.trust.invite import Invite
from protocol.v1 import status_pb2
from tests import ports
from tests.integration.typed_commands import Swarm, Typed, atoll, done, refused, typed_here
from tests.tiny_runs import tiny_text

RUN = tiny_text(
    run={"name": "tried", "rounds": 100, "min_nodes": 2},
    inner={"steps": 1_000_000},  # rounds end at their deadline
    deadlines={"train": 4, "contribute": 8, "commit": 12, "lease": 5},
)

NO_TEXT = '[data]\nsource = "text"\npaths = ["nowhere/*.txt"]\n'


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path_factory.mktemp("tried") / "swarm", RUN)
    yield swarm
    swarm.end()


@pytest.fixture(scope="module")
def member(swarm: Swarm) -> Path:
    """The folder of a node that has joined and never started."""
    return swarm.join("member", swarm.invite())


@pytest.fixture(scope="module")
def other_swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """One whose text is nowhere."""
    swarm = Swarm(tmp_path_factory.mktemp("other") / "swarm", RUN + NO_TEXT)
    yield swarm
    swarm.end()


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# The run owner


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[inner]\nstepz = 30", "[inner] stepz: unknown key; did you mean 'steps'?"),
        ("[innner]\nsteps = 30", "[innner]: unknown table; did you mean 'inner'?"),
        ("[evaluation]\nevery_round = 3", "unknown key; did you mean 'every_rounds'?"),
        ("[inner]\nzebra = 30", "[inner] zebra: unknown key\n"),
        ('[run]\nname = "My run"', "'My run': write lowercase letters, digits and hyphens"),
        ('[data]\ndigest = "12"', "[data] digest = '12': write 64 hexadecimal digits"),
        ("[inner]\nsteps = -3", "[inner] steps = -3"),
        ('[inner]\nsteps = "30"', "[inner] steps = '30'"),
        ("[run]\nrounds = 99999999999999999999", "[run] rounds = 99999999999999999999"),
        ("run = 3", "run = 3"),
        ("[model]\nnum_heads = 3", "hidden_size 64 is not a multiple of num_heads 3"),
        ("[deadlines]\ntrain = 700", "deadlines must rise: train 700"),
        ("[run]\nrounds = ten", "not TOML: Invalid value (at line 2, column 10)"),
    ],
)
def test_a_wrong_run_file_is_refused_with_place_and_value(
    tmp_path: Path, text: str, words: str
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(text)
    typed = typed_here("coordinator", "init", tmp_path / "home", "--run", run_file)
    refused(typed, 78, words, str(run_file))
    assert list(tmp_path.iterdir()) == [run_file]


def test_a_coordinator_needs_a_folder_of_its_own(swarm: Swarm, tmp_path: Path) -> None:
    file, locked = tmp_path / "file", tmp_path / "locked"
    file.touch()
    locked.mkdir(mode=0o555)
    refused(typed_here("coordinator", "init", file), 64, f"'{file}' is a file")
    refused(atoll("coordinator", "init", locked / "home"), 73, str(locked))
    refused(
        typed_here("coordinator", "init", swarm.home), 73, f"{swarm.home} exists and is not empty"
    )
    refused(
        typed_here("coordinator", "start", tmp_path),
        66,
        f"{tmp_path} is not a coordinator's folder",
    )
    refused(atoll("coordinator", "start", swarm.home), 71, "another coordinator (process ")
    both = ("--one-port", "443", "--port", "7700")
    refused(
        typed_here("coordinator", "start", swarm.home, *both), 64, "--one-port 443 and --port 7700"
    )
    assert list(locked.iterdir()) == []


# Joining


def test_a_setting_that_costs_loss_is_said_at_each_start_while_the_run_file_may_change(
    tmp_path: Path,
) -> None:
    costly = tiny_text(
        run={"rounds": 8, "min_nodes": 2}, inner={"steps": 15}, outer={"momentum": 0.6}
    )
    swarm = Swarm(tmp_path / "swarm", costly)
    try:
        swarm.coordinator.says("loss: run.toml may change until the first invite")
        said = swarm.coordinator.log
        assert "loss: [outer] momentum = 0.6 overshoots" in said and "write momentum = 0.3" in said
        swarm.coordinator.stop(signal.SIGTERM)
        run_file = swarm.home / "run.toml"
        run_file.write_text(costly.replace("momentum = 0.6", "momentum = 0.3"))
        swarm.start_coordinator()
        swarm.coordinator.stop(signal.SIGTERM)
        assert "loss: " not in swarm.coordinator.log
        run_file.write_text(costly)
        swarm.start_coordinator()
        swarm.invite()
        swarm.coordinator.stop(signal.SIGTERM)
        swarm.start_coordinator()
        swarm.coordinator.stop(signal.SIGTERM)
        assert "loss: " not in swarm.coordinator.log  # nothing could be written any more
    finally:
        swarm.end()


def test_an_invite_that_does_not_hold_is_refused_and_leaves_no_trace(
    swarm: Swarm, tmp_path: Path, free_port: int
) -> None:
    home = tmp_path / "node"
    good = Invite.decode(swarm.invite())
    for span in ("0s", "0"):
        never = typed_here("invite", "create", "--expires", span, "--dir", swarm.home)
        refused(never, 64, "an invite cannot be valid for 0 s", "--expires more than 0")
    used_up, expired, revoked = swarm.invite(), swarm.invite("--expires", "0.1s"), swarm.invite()
    done(typed_here("join", used_up, "--dir", tmp_path / "user"))
    done(typed_here("invite", "revoke", Invite.decode(revoked).invite_id, "--dir", swarm.home))
    text = good.encode()
    for invite, code, words in (
        (used_up, 77, "is used up: 1 of 1 nodes joined with it"),
        (expired, 77, "expired at 20"),
        (revoked, 77, "revoked"),
        (replace(good, secret=b"s" * 32).encode(), 77, "invite"),
        (replace(good, pin=b"p" * 32).encode(), 76, "has certificate "),
        (
            replace(good, port=free_port).encode(),
            69,
            f"no coordinator answers at 127.0.0.1:{free_port}",
        ),
        (text[:-10] + "a" + text[-9:], 65, "a character of the invite is wrong"),
        (text[:-10], 65, f"truncated: {len(text) - 10} characters arrived of {len(text)}"),
        ("atoll9-abc", 65, "another version of Atoll: atoll9"),
        ("x" * 5000, 65, "invites begin with 'atoll1-'"),
    ):
        refused(typed_here("join", invite, "--dir", home), code, words)
        assert not home.exists(), words
    refused(atoll("join", used_up, "--dir", home), 77, "is used up: 1 of 1 nodes joined with it")
    assert not home.exists()


def joined_at_a_terminal(invite: str, home: Path) -> str:
    """What a terminal shows to a person who types 'atoll join' and then pastes the invite, in two lines."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "protocol.terminal.cli", "join", "--dir", str(home)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    joining = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how the end of a terminal shows
        while piece := os.read(ours, 4096):
            if b"not shown" in piece:
                os.write(ours, f"atoll join {invite[:80]}\n{invite[80:]}\n".encode())
            shown += piece
    os.close(ours)
    assert joining.wait() == 0, shown.decode()
    return shown.decode()


def test_an_invite_is_taken_from_a_file_standard_input_the_environment_and_a_terminal(
    swarm: Swarm, tmp_path: Path
) -> None:
    file, invite = tmp_path / "invite.txt", swarm.invite("--uses", "4")
    file.write_text(f"atoll join {invite}\n")
    late = typed_here("join", file, "--hours", "late", "--dir", tmp_path / "a")
    refused(late, 64, "--hours 'late'")
    assert not (tmp_path / "a").exists(), "the invite is as good as before"
    done(atoll("join", file, "--hours", "22-7", "--no-battery", "--dir", tmp_path / "a"))
    settings = load_settings(tmp_path / "a")
    assert (settings.hours, settings.on_battery, settings.only_idle) == ("22-7", False, False)
    done(atoll("join", "-", "--dir", tmp_path / "b", stdin=f"{invite}\n"))
    done(atoll("join", "--dir", tmp_path / "c", ATOLL_INVITE=invite))
    asked = joined_at_a_terminal(invite, tmp_path / "e")
    assert "joined" in asked and invite[:80] not in asked and invite[80:] not in asked
    file.write_text("\n")
    home = ("--dir", tmp_path / "d")
    refused(typed_here("join", file, *home), 65, f"{file} holds no invite: it is empty")
    refused(atoll("join", "-", *home), 65, "standard input holds no invite")
    refused(atoll("join", *home), 64, "no invite given and ATOLL_INVITE is not set")
    refused(
        typed_here("join", tmp_path / "none", *home), 66, f"there is no file {tmp_path / 'none'}"
    )
    refused(typed_here("join", tmp_path, *home), 66, f"{tmp_path} cannot be read: Is a directory")
    refused(typed_here("join", "~nobody-of-that-name/invite", *home), 66, "no home folder")
    assert not (tmp_path / "d").exists()


def test_a_folder_joins_once_and_a_damaged_one_may_again(
    swarm: Swarm, other_swarm: Swarm, tmp_path: Path
) -> None:
    home = tmp_path / "node"
    done(typed_here("join", swarm.invite(), "--dir", home))
    before = contents(home)
    invite = other_swarm.invite()
    refused(typed_here("join", invite, "--dir", home), 73, f"{home} is a member of 'tried'")
    refused(
        typed_here("join", invite, "--dir", swarm.home),
        73,
        f"{swarm.home} is a coordinator's folder",
    )
    assert contents(home) == before
    (home / "client.key").write_text("nonsense")
    refused(atoll("node", "start", "--dir", home), 65, f"the credentials in {home} are damaged")
    done(typed_here("join", invite, "--dir", home))
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    refused(atoll("join", invite, "--dir", locked), 71, f"{locked / 'lock'} cannot be opened")


# The contributor


@pytest.mark.parametrize(
    ("typed", "setting", "code", "words"),
    [
        (typed_here, "gpus = 1", 78, "node.toml: gpus: unknown key"),
        (typed_here, 'ranks = "two"', 78, "node.toml: ranks = 'two'"),
        (
            typed_here,
            'compile = true\nactivation_checkpointing = "selective"',
            78,
            '"selective" has no effect on compiled layers',
        ),
        (
            typed_here,
            'precision = "fp8"',
            78,
            "node.toml: precision = 'fp8': input should be 'auto', 'fp32'",
        ),
        (typed_here, "micro_batch = -1", 78, "node.toml: micro_batch = -1"),
        (typed_here, "ranks 2", 78, "node.toml: not TOML"),
        (atoll, 'device = "banana"', 78, "unknown device 'banana'"),
    ],
)
def test_a_wrong_setting_of_a_node_is_refused(
    member: Path, typed: Callable[..., Typed], setting: str, code: int, words: str
) -> None:
    file = member / "node.toml"
    before = file.read_text()
    file.write_text(f'name = "member"\n{setting}\n')
    try:
        refused(typed("node", "start", "--dir", member), code, words)
    finally:
        file.write_text(before)


def test_a_place_for_temporary_files_that_no_socket_fits_into_is_refused(
    swarm: Swarm, member: Path, tmp_path: Path
) -> None:
    long = tmp_path / ("long" * 25)
    long.mkdir()
    typed = atoll("node", "start", "--dir", member, TMPDIR=str(long))
    refused(typed, 71, f"{long}, has a name of ", "of at most 64", "TMPDIR=/tmp")
    done(atoll("status", "--dir", member, TMPDIR=str(long)))  # which needs no socket there


def test_a_wrong_option_of_a_node_is_refused(member: Path, tmp_path: Path) -> None:
    start = ("node", "start", "--dir", member)
    refused(typed_here(*start, "--ranks", "0"), 64, "--ranks 0")
    refused(typed_here(*start, "--port", "70000"), 64, "--port 70000")
    refused(typed_here("node", "start", "--dir", tmp_path), 66, f"no swarm joined in {tmp_path}")
    typed = atoll(*start, "--ranks", "3")
    assert typed.code == 78
    assert "[inner] batch = 4 cannot be shared evenly by 3 ranks" in typed.err
    typed = atoll(*start, "--tp", "3")
    assert typed.code == 78
    assert "tp = 3 does not divide [model] num_heads = " in typed.err
    file = member / "node.toml"
    before = file.read_text()
    file.write_text('name = "member"\nactivation_checkpointing = "selective"\n')
    try:
        typed = atoll(*start, "--shard", "2")
    finally:
        file.write_text(before)
    assert typed.code == 78
    assert '"selective" does not go with shard = 2 (zero = 3)' in typed.err


def test_a_model_that_is_not_there_yet_cannot_be_exported(member: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    refused(atoll("export", out, "--dir", member), 66, f"the node in {member} holds no committed")
    refused(
        typed_here("export", out, "--dir", tmp_path / "none"), 66, f"no swarm joined in {tmp_path}"
    )
    assert not out.exists()


def test_a_coordinator_that_is_away_or_of_another_swarm_is_told_apart(
    swarm: Swarm, other_swarm: Swarm, free_port: int, tmp_path: Path
) -> None:
    home = tmp_path / "node"
    done(typed_here("join", swarm.invite(), "--dir", home))
    link = home / "link.toml"
    text = link.read_text()
    for port, code, words, options in (
        (other_swarm.control_port, 76, "is not of swarm ", ()),
        (str(free_port), 69, f"no coordinator answers at 127.0.0.1:{free_port}", ("--no-wait",)),
    ):
        link.write_text(text.replace(swarm.control_port, port))
        refused(atoll("node", "start", "--dir", home, *options), code, words)
        refused(atoll("status", "--dir", home), code, words)
    waiting = swarm.start("node", "start", "--dir", home)
    waiting.says(f"no coordinator answers at 127.0.0.1:{free_port}")
    waiting.stop(signal.SIGINT)
    assert "loading torch" not in waiting.log


def test_the_doctor_finds_nothing_wrong_with_a_member(member: Path) -> None:
    found = json.loads(done(atoll("node", "doctor", "--json", "--dir", member)))
    verdicts = {finding["about"]: finding["verdict"] for finding in found}
    assert {verdicts[about] for about in ("coordinator", "clock", "port", "libp2p")} == {"fine"}
    assert "wrong" not in verdicts.values()


def test_a_glob_that_matches_nothing_is_told_by_the_node(other_swarm: Swarm) -> None:
    home = other_swarm.join("reader", other_swarm.invite())
    typed = atoll("node", "start", "--dir", home)
    assert typed.code == 66
    assert "atoll: 'nowhere/*.txt' of [data] paths matches no file" in typed.err
    assert not list((home / "snapshots").glob("*"))


# Stopping


@pytest.mark.nightly
def test_a_node_in_any_phase_stops_when_asked_and_leaves_nothing(swarm: Swarm) -> None:
    invite = swarm.invite("--uses", "3")
    for name in ("first", "second", "third"):
        swarm.join(name, invite)

    starting = swarm.start_node("second")
    starting.loads_torch()
    starting.stop(signal.SIGINT, is_impatient=True)

    first = swarm.start_node("first")
    first.says("attached")
    twice = atoll("node", "start", "--dir", swarm.folder / "first")
    refused(
        twice, 71, f"another node (process {first.process.pid}) runs in {swarm.folder / 'first'}"
    )
    swarm.does("waiting", "first")

    # Nodes outlive their coordinator and come back by themselves.
    swarm.coordinator.stop(signal.SIGINT)
    first.says("coordinator away")
    run_file = swarm.home / "run.toml"
    run_text = run_file.read_text()
    run_file.write_text(run_text.replace("batch = 4", "batch = 8"))
    refused(
        atoll("coordinator", "start", swarm.home),
        78,
        "run.toml has changed",
        "[inner] batch was 4 and is 8",
        "write batch = 4",
    )
    run_file.write_text(run_text)
    swarm.start_coordinator()
    first.says("attached", times=2)
    swarm.does("waiting", "first")

    second = swarm.start_node("second", "--ranks", "2")
    swarm.does("training", "first", "second")
    assert len(second.shared_memory()) == 2
    second.stop(signal.SIGTERM, is_impatient=True)
    assert swarm.nodes()["second"].state == status_pb2.NODE_STATE_LEFT  # it said goodbye

    # A killed daemon takes its ranks and p2pd with it, and its shared memory is freed.
    third = swarm.start_node("third", "--ranks", "2")
    swarm.does("training", "first", "third")
    memory = third.shared_memory()
    assert len(memory) == 2 and len(third.processes()) >= 6
    third.process.kill()
    third.process.wait()
    third.left_nothing(memory)

    swarm.does("waiting", "first")
    first.stop(signal.SIGTERM)
