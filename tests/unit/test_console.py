"""Every way a command can end: its words on stderr and its exit code."""

import errno
import io
import json
import sys
from collections.abc import Callable

import click
import pytest

from protocol.errors import ConfigError, ExitCode
from protocol.terminal import console


def command_that(action: Callable[[], None]) -> click.Command:
    return click.Command("it", callback=action)


def fails_with(error: BaseException) -> click.Command:
    def action() -> None:
        raise error

    return command_that(action)


@pytest.fixture(autouse=True)
def _no_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(console.DEBUG_VARIABLE, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_an_error_is_a_sentence_and_a_next_step_and_its_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = console.run(fails_with(ConfigError("[inner] steps = 0", next_step="set it to 1")), [])
    assert code == ExitCode.CONFIG
    out, err = capsys.readouterr()
    assert (out, err) == ("", "atoll: [inner] steps = 0\n  next: set it to 1\n")


def test_a_wrong_command_line_exits_with_64_and_names_the_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert console.run(command_that(lambda: None), ["--no-such"]) == ExitCode.USAGE
    assert capsys.readouterr().err == (
        "atoll: no such option '--no-such'\n  next: 'atoll --help' lists what it takes\n"
    )


@pytest.mark.parametrize(
    "secret",
    ["atoll1-" + "ab2c7" * 20, "atoll1\u2013" + "ab2c7" * 20, "ATOLL-RELAY1-" + "AB2C7" * 20],
)
def test_an_invite_in_the_wrong_place_is_not_shown_again(
    secret: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["folder", f"'{secret}'"]
    assert console.run(click.Command("it"), typed) == ExitCode.USAGE
    console.run(fails_with(ConfigError(f"no file {secret}.txt", next_step=f"see {secret}")), [])
    told = capsys.readouterr().err
    assert told.count(f"{secret[: secret.index('1') + 6]}…") == 3 and secret[:30] not in told
    assert "(folder '" in told and "….txt" in told


def test_a_missing_choice_is_asked_for_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    option = click.Option(["--to"], type=click.Choice(("tensorboard", "wandb")), required=True)
    command = click.Command("it", params=[option], callback=lambda to: None)
    assert console.run(command, []) == ExitCode.USAGE
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "atoll: missing option '--to'. Choose from: tensorboard, wandb"
    assert len(said) == 2


def test_ctrl_c_exits_with_130_and_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(fails_with(KeyboardInterrupt()), []) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err.strip() == ""  # click ends the line that ^C stands in


def test_an_unexpected_exception_is_one_line_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert console.run(fails_with(ValueError("seven")), []) == ExitCode.INTERNAL
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "a bug in Atoll: ValueError: seven; run again with ATOLL_DEBUG=1" in err


def test_debugging_adds_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(console.DEBUG_VARIABLE, "1")
    console.run(fails_with(ValueError("seven")), [])
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_success_and_help_exit_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(command_that(lambda: None), []) == ExitCode.OK
    assert console.run(command_that(lambda: None), ["--help"]) == ExitCode.OK


def test_a_group_without_a_command_shows_its_help_as_a_usage_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    group = click.Group("invite", commands=[click.Command("create")])
    assert console.run(group, []) == ExitCode.USAGE
    assert "create" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "is_terminal", "expected"),
    [
        ("TERM", "xterm", True, True),
        ("TERM", "xterm", False, False),
        ("TERM", "dumb", True, False),
        ("NO_COLOR", "1", True, False),
        ("NO_COLOR", "", True, True),  # no-color.org: set and not empty
    ],
)
def test_colour_is_for_terminals_whose_user_wants_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, is_terminal: bool, expected: bool
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    monkeypatch.setenv(variable, value)
    assert console.is_coloured(Stream()) is expected


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (12_345_678, "12.3 MB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),  # never "1000.0 kB"
        (999.7, "1.0 kB"),
        (5e18, "5000.0 PB"),
    ],
)
def test_bytes_have_decimal_units(num_bytes: float, words: str) -> None:
    assert console.bytes_in_words(num_bytes) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.44, "0.4 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (185, "3 min 5 s"),
        (7800, "2 h 10 min"),
        (4 * 86400 + 3 * 3600, "4 d 3 h"),
    ],
)
def test_durations_are_told_in_their_two_largest_units(seconds: float, words: str) -> None:
    assert console.seconds_in_words(seconds) == words


def test_json_is_printed_with_its_keys_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"b": "→", "a": [1, None]})
    out = capsys.readouterr().out
    assert list(json.loads(out)) == ["b", "a"]
    assert "→" in out


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EROFS, "Read-only file system", "/mnt/a"), "/mnt/a: Read-only"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "/data/corpus.json"), "move it away"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "/" + "d" * 300), "shorter name"),
        (PermissionError(errno.EACCES, "Permission denied", "/root/a"), "/root/a: Permission"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "'ulimit -u'"),
        (RuntimeError("can't start new thread"), "'ulimit -u'"),
        (MemoryError(), "Cannot allocate memory\n  next: end other programs"),
    ],
)
def test_what_the_machine_refuses_is_no_bug_of_ours(
    error: BaseException, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert console.run(fails_with(error), []) == ExitCode.SYSTEM
    said = capsys.readouterr().err
    assert said.startswith("atoll: the machine refuses: ") and words in said
    assert said.count("\n") == 2


def test_a_refusal_that_names_no_file_may_be_a_wrong_call_of_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert console.run(fails_with(PermissionError(errno.EPERM, "no")), []) == ExitCode.INTERNAL
    assert "a bug in Atoll" in capsys.readouterr().err


def test_what_the_machine_refuses_is_said_where_nobody_can_tell_whose_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "protocol.files.durable", None)  # as on Windows
    refused = PermissionError(errno.EACCES, "Permission denied", "/root/a")
    assert console.run(fails_with(refused), []) == ExitCode.SYSTEM
    assert "the machine refuses: /root/a: Permission denied" in capsys.readouterr().err


def test_names_at_the_left_of_a_table_stay_in_one_piece_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    columns = ("invite", "label", "role", "used", "here", "standing", "joined")
    cells = ("0a3b2b01", "-", "own node", "1 of 1", "1 of all", "expires in 23 h", "a (20c3e051)")
    console.terminal().print(console.table(columns, [cells]))
    assert "0a3b2b01" in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (click.INT, "'ten' is not a whole number"),
        (click.IntRange(1), "'ten' is not a whole number"),
        (click.FLOAT, "'ten' is not a number"),
        (click.FloatRange(0), "'ten' is not a number"),
    ],
)
def test_what_is_no_number_is_called_so(
    kind: click.ParamType[float], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = click.Command("c", params=[click.Option(["--num"], type=kind)], callback=print)
    assert console.run(command, ["--num", "ten"]) == ExitCode.USAGE
    assert f"atoll: invalid value for '--num': {words}\n" in capsys.readouterr().err


def test_a_library_that_does_not_fit_into_memory_is_no_bug_however_its_package_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load() -> None:
        try:
            raise OSError("libllvmlite.so: failed to map segment from shared object")
        except OSError:
            raise OSError("Could not find/load shared object file") from None

    assert console.run(command_that(load), []) == ExitCode.SYSTEM
    told = capsys.readouterr().err
    assert "libllvmlite.so: failed to map segment" in told and "'ulimit -v'" in told
    assert "bug" not in told
