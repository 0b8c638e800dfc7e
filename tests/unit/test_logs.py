"""The logs of all processes of a folder as one: what is kept, in which order, and over rotation."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from node.island.ranks import forkserver as rank_output
from node.island.ranks.forkserver import RankOutput
from protocol.errors import ExitCode, UsageError
from protocol.files.rolling import RollingFile, lines_of
from protocol.terminal import console
from protocol.terminal.cli import root
from protocol.terminal.logging import keeping_the_end
from protocol.terminal.logs import Logs, line_of, shown, since_of

ROOT = Path(__file__).parents[2]


def a_line(at: int, event: str = "said", *, process: str = "node", **facts: object) -> str:
    when = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"at": when, "level": "info", "process": process, "event": event, **facts})


def write(folder: Path, process: str, *lines: str) -> RollingFile:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    file = RollingFile(folder / "logs" / f"{process}.log", most_bytes=300)
    for line in lines:
        file.append([line])
    return file


def read(folder: Path, *options: str) -> list[dict[str, object]]:
    result = CliRunner().invoke(root, ["logs", str(folder), "--json", *options])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


def test_lines_of_all_processes_come_in_the_order_of_time(tmp_path: Path) -> None:
    write(tmp_path / "coordinator", "coordinator", a_line(1, "a", process="coordinator"))
    write(tmp_path / "node-1", "node", a_line(2, "b", node="one"), a_line(4, "d", node="one"))
    write(tmp_path / "node-1", "ranks", a_line(3, "c", process="ranks", node="one"))
    assert [line["event"] for line in read(tmp_path)] == ["a", "b", "c", "d"]
    output = CliRunner().invoke(root, ["logs", str(tmp_path)]).output
    for words in ("coordinator info    a", "one info    b", "one ranks info    c"):
        assert words in output
    assert [line["event"] for line in read(tmp_path / "node-1", "--lines", "2")] == ["c", "d"]
    assert read(tmp_path, "--lines", "0") == []


def test_only_what_is_late_and_grave_enough_is_shown(tmp_path: Path) -> None:
    now = int(time.time())
    grave = a_line(now - 30, "bad").replace('"info"', '"warning"')
    write(tmp_path, "node", a_line(now - 4000, "old"), a_line(now - 30, "new"), grave)
    assert [line["event"] for line in read(tmp_path, "--since", "10m")] == ["new", "bad"]
    assert [line["event"] for line in read(tmp_path, "--level", "warning")] == ["bad"]
    begin = datetime.fromtimestamp(now - 3000, UTC).isoformat()
    assert [line["event"] for line in read(tmp_path, "--since", begin)] == ["new", "bad"]
    with pytest.raises(UsageError, match="'soon' is no time"):
        since_of("soon", now=datetime.now(UTC))


def test_a_folder_without_logs_is_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "node-1.log").write_text("12:00:00 a line for people\n")
    assert console.run(root, ["logs", str(tmp_path)]) == ExitCode.NO_INPUT
    assert f"there are no logs in {tmp_path}: nothing was started there" in capsys.readouterr().err


def test_the_folder_may_be_named_as_other_commands_name_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "node", a_line(1, "here"))
    result = CliRunner().invoke(root, ["logs", "--dir", str(tmp_path), "--json"])
    assert json.loads(result.output)["event"] == "here"
    assert console.run(root, ["logs", str(tmp_path), "--dir", "elsewhere"]) == ExitCode.USAGE
    assert "--dir elsewhere both name a folder" in capsys.readouterr().err


def test_cut_and_foreign_lines_are_left_out() -> None:
    for text in ('{"at": "2030-01-', "[1]", '{"at": 1, "level": 2, "process": 3, "event": 4}', ""):
        assert line_of(text, "folder") is None
    told = line_of(a_line(0, "said", exception="Traceback…", why="it is so"), "folder")
    assert told is not None
    assert click.unstyle(shown(told)).endswith('folder info    said  why="it is so"\nTraceback…')


def test_of_which_node_a_coordinator_speaks_is_shown_and_a_node_is_named_once() -> None:
    own = {"at": "2030-01-01T00:00:00.000+00:00", "level": "info", "event": "left", "node": "it"}
    for process, words in (("coordinator", "info    left  node=it"), ("node", "it info    left")):
        line = line_of(json.dumps(own | {"process": process}), "folder")
        assert line is not None and click.unstyle(shown(line)).endswith(words)


@given(
    steps=st.lists(st.sampled_from(["write", "look"]), max_size=60),
)
def test_who_follows_sees_each_line_once_and_in_order_over_rotation(
    steps: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    file = write(folder, "node")
    follower, seen, written, since_look = Logs(folder), [], 0, 0
    for step in [*steps, "look"]:
        if (
            step == "write" and since_look < 2
        ):  # a file takes two: one rotation between two looks at most
            file.append([a_line(written, str(written), node="n" * 8)])
            written, since_look = written + 1, since_look + 1
        else:
            seen += [str(line.told["event"]) for line in follower.read()]
            since_look = 0
    assert seen == [str(number) for number in range(written)]


def test_following_shows_what_is_added_until_ctrl_c(tmp_path: Path) -> None:
    file = write(tmp_path, "node", a_line(1, "before"))
    command = [sys.executable, "-m", "protocol.terminal.cli", "logs", "-f", "--json", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "before" in process.stdout.readline()
        for number in range(6):  # through two rotations
            file.append([a_line(2 + number, f"after {number}")])
            assert f"after {number}" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=180) == 0


def started(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    begin = (
        "import logging, os, structlog\nfrom pathlib import Path\n"
        "from protocol.terminal.logging import start_logging\n"
        f"start_logging(as_json=False, folder=Path({str(folder)!r}), process='node', node='it')\n"
        "log = structlog.get_logger()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", begin + program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=True,
    )


def test_what_goes_to_standard_error_is_kept_in_the_folder_with_its_facts(tmp_path: Path) -> None:
    ran = started(
        tmp_path,
        "log.info('attached', round=3, at='a fact of this name gives way')\n"
        "logging.getLogger('lib').warning('beware')\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('failed')\n",
    )
    assert "attached" in ran.stderr and "beware" in ran.stderr and "ZeroDivisionError" in ran.stderr
    attached, beware, failed = read(tmp_path)
    assert (attached["round"], attached["node"], attached["process"]) == (3, "it", "node")
    assert (beware["level"], beware["event"]) == ("warning", "lib: beware")
    assert "ZeroDivisionError" in str(failed["exception"])
    assert (tmp_path / "logs" / "node.log").stat().st_mode & 0o777 == 0o600


def test_by_what_error_a_process_ended_is_kept(tmp_path: Path) -> None:
    with pytest.raises(UsageError), keeping_the_end(tmp_path, "node"):
        raise UsageError("it makes no sense", next_step="make some")
    with pytest.raises(ZeroDivisionError), keeping_the_end(tmp_path, "node"):
        raise ZeroDivisionError
    sentence, bug = read(tmp_path)
    assert sentence["event"] == "ended: it makes no sense; make some"
    assert "exception" not in sentence and "ZeroDivisionError" in str(bug["exception"])


def test_a_daemon_whose_helpers_pipe_broke_does_not_end_like_a_reader_that_has_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def live() -> None:
        with keeping_the_end(tmp_path, "node"):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    assert console.run(click.Command("start", callback=live), []) == ExitCode.SYSTEM
    assert "a process that this one talks to has gone" in capsys.readouterr().err
    (kept,) = read(tmp_path)
    assert "BrokenPipeError" in str(kept["exception"])


def test_a_folder_that_takes_no_log_is_told_once_and_standard_error_goes_on(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    ran = started(tmp_path, "log.info('first')\nlog.info('second')\n")
    first, second = ran.stderr.splitlines()
    assert "not_in_log_file" in first and "not_in_log_file" not in second and "second" in second


def test_what_ranks_write_is_passed_on_as_it_is_and_kept_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_output, "MOST_BYTES", 10)
    whole: list[str] = []
    lines: list[str] = []
    output = RankOutput(tmp_path / "logs" / "ranks.txt", show=whole.append, keep=lines.append)
    subprocess.run(
        [sys.executable, "-c", "import os; os.write(2, b'one\\n\\ntwo\\nwithout an end')"],
        stderr=output.descriptor,
        check=True,
    )
    output.close()
    assert "".join(whole) == "one\n\ntwo\nwithout an end"
    assert lines == ["one", "two", "without an end"]
    assert (tmp_path / "logs" / "ranks.txt").stat().st_size == 0, "it begins anew when it is large"


def test_where_a_rank_met_a_fault_of_native_code_is_kept_and_not_shown(tmp_path: Path) -> None:
    whole: list[str] = []
    lines: list[str] = []
    output = RankOutput(tmp_path / "logs" / "ranks.txt", show=whole.append, keep=lines.append)
    dumps = "import faulthandler, os, signal, threading, time, numpy; faulthandler.enable(file=2); "
    dumps += "threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); "
    dumps += "os.write(2, b'loading: 5 %'); os.kill(os.getpid(), signal.SIGBUS)"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", dumps], stderr=output.descriptor)
        os.write(output.descriptor, b"another rank\nhalf a line")
    output.close()
    assert "".join(whole) == "loading: 5 %another rank\nhalf a line" * 2
    assert "loading: 5 %Fatal Python error: Bus error" in lines
    kept = "\n".join(lines)
    assert kept.count("Current thread 0x") == kept.count("Extension modules: numpy") == 2


def test_a_dump_that_comes_in_pieces_is_not_shown_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_output, "PASS_ON_SECONDS", 600.0)  # only `take` passes on
    whole: list[str] = []
    output = RankOutput(tmp_path / "ranks.txt", show=whole.append, keep=lambda _: None)
    dump = b'Bus error\n\nThread 0x1:\n  File "x", line 3 in f\n  ...\nafter\n'
    for piece in (b"before\n 5 %", b"Fatal Python error: ", *(bytes([one]) for one in dump)):
        os.write(output.descriptor, piece)
        output._take()
    output.close()
    assert "".join(whole) == "before\n 5 %after\n"


def test_a_progress_bar_of_a_rank_is_kept_as_its_last_state_in_no_more_than_a_line(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    output = RankOutput(tmp_path / "logs" / "ranks.txt", show=lambda _: None, keep=lines.append)
    for step in range(20_000):
        os.write(output.descriptor, f"\rloading: {step} of 20000".encode())
    os.write(output.descriptor, b"\rloaded\r\n")
    os.write(output.descriptor, b"." * (rank_output.MOST_LINE_BYTES + 1) + b"\nhalf\r")
    output.close()
    assert lines[0] == "loaded" and lines[-1] == "half"
    assert "".join(lines[1:-1]) == "." * (rank_output.MOST_LINE_BYTES + 1)
    assert max(map(len, lines)) < 3 * rank_output.MOST_LINE_BYTES


def test_a_line_that_a_full_disk_took_a_part_of_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RollingFile(tmp_path / "lines", most_bytes=1000)
    file.append(["first"])
    write_all, room = os.write, [4]

    def write_a_part(descriptor: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_all(descriptor, data[: room.pop()])

    with monkeypatch.context() as full:
        full.setattr(os, "write", write_a_part)
        with pytest.raises(OSError, match="No space left"):
            file.append(["second"])
    file.append(["third"])
    assert list(lines_of(tmp_path / "lines")) == ["first", "seco", "third"]
