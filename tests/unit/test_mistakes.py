"""What a person types wrong is told in a sentence, with what to type instead."""

import ast
import errno
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from structlog.testing import capture_logs

from coordinator import config, settings
from coordinator.settings import CONFIG_FILE
from node.config import TEMPLATE, load_settings, require_node_folder, tell_missing_settings
from node.island.data.dataset import _read as read_text
from node.island.data.dataset import text_files
from node.link.join import read_invite
from protocol.errors import ConfigError, ExitCode, NoInputError
from protocol.files.durable import as_typed
from protocol.terminal import cli, console
from protocol.trust.credentials import IDENTITY_FILE, LINK_FILE, Credentials
from protocol.trust.identity import Identity
from protocol.trust.invite import Invite
from protocol.trust.pki import Authority, Role, make_request, new_swarm_id


def typed(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """A command's exit code, and what it says on standard error."""
    code = console.run(cli.root, words)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.err


@pytest.mark.parametrize(
    ("advertised", "host"),
    [
        ("train.example.org:7700", "train.example.org"),
        ("https://train.example.org/run", "train.example.org"),
        ("grpc://10.0.0.1:7700", "10.0.0.1"),
        ("[2001:db8::5]:7700", "2001:db8::5"),
        ("[2001:db8::5]", "2001:db8::5"),
    ],
)
def test_a_host_to_advertise_is_a_host_alone_and_the_right_one_is_named(
    advertised: str, host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    code, said = typed(["coordinator", "init", run, "--advertise", advertised], capsys)
    assert code == ExitCode.USAGE
    assert f"advertise = '{advertised}': not a host alone" in said and f"path: '{host}'" in said
    assert not (tmp_path / "run").exists()
    code, _ = typed(["coordinator", "init", run, "--advertise", host], capsys)
    assert code == ExitCode.OK


def test_equal_ports_are_one_port_for_members_and_who_joins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, port, has_one_port in (("run", "7701", True), ("any", "0", False)):
        made = ["coordinator", "init", str(tmp_path / name), "--port", port]
        assert typed([*made, "--enrolment-port", port], capsys)[0] == ExitCode.OK
        assert config.Home.load(tmp_path / name).config.has_one_port is has_one_port


def test_a_second_run_on_a_machine_has_ports_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ["init", "--host", "127.0.0.1"]
    with socket.create_server(("127.0.0.1", 0)) as other_run:
        usual = other_run.getsockname()[1]
        monkeypatch.setattr(settings, "DEFAULT_CONTROL_PORT", usual - 1)
        monkeypatch.setattr(settings, "DEFAULT_ENROLMENT_PORT", usual)
        assert console.run(cli.root, [*made, str(tmp_path / "second")]) == ExitCode.OK
        said = capsys.readouterr().out
        given = config.Home.load(tmp_path / "second").config
        assert {given.control_port, given.enrolment_port}.isdisjoint({usual - 1, usual})
        assert f"this run has {given.control_port} and {given.enrolment_port}" in said
        asked = [*made, str(tmp_path / "third"), "--port", "7705", "--enrolment-port", str(usual)]
        assert console.run(cli.root, asked) == ExitCode.OK
        assert config.Home.load(tmp_path / "third").config.enrolment_port == usual


@pytest.mark.parametrize("name", ["invite.txt", "my.invite", "./invite", "folder/invite"])
def test_a_file_with_an_invite_that_is_not_there_is_missed_as_a_file(name: str) -> None:
    with pytest.raises(NoInputError, match="there is no file"):
        read_invite(name)


@pytest.mark.parametrize(
    "place", ["atoll1-invitation.txt", "atoll1-myfriends", "atoll1-abcdefgh/x"]
)
def test_an_invite_is_read_from_a_file_that_begins_as_one_does(place: str, tmp_path: Path) -> None:
    invite = Invite(host="h", port=7701, pin=bytes(32), invite_id="ab", secret=bytes(range(32)))
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(f"atoll join {invite.encode()}\n")
    assert read_invite(str(tmp_path / place)) == invite


def test_a_tilde_that_no_shell_replaced_is_the_home_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in --dir=~/my-node, which bash hands over as it stands: a folder of the name ~ was made."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert typed(["init", "~/my-run"], capsys)[0] == ExitCode.OK
    assert (tmp_path / "my-run" / CONFIG_FILE).is_file()
    for option in ("--dir=~/none", "--dir=~/none/"):
        code, said = typed(["status", option], capsys)
        assert code == ExitCode.NO_INPUT and f"no swarm joined in {tmp_path / 'none'}" in said
    code, said = typed(["status", "--dir=~nobody-of-that-name/x"], capsys)
    assert code == ExitCode.NO_INPUT and "no home folder of that user" in said
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("words", [["status"], ["node", "start"], ["node", "snapshots"]])
def test_folders_named_in_place_of_a_wrong_one_are_of_the_kind_that_the_command_takes(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert typed(["init", "a-run"], capsys)[0] == ExitCode.OK
    for folder, file in (("a-view", LINK_FILE), ("mine", LINK_FILE), ("mine", IDENTITY_FILE)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / file).touch()
    code, said = typed([*words, "--dir", "none"], capsys)
    assert code == ExitCode.NO_INPUT, said
    named = "--dir mine" + (" or --dir a-run or --dir a-view" if words == ["status"] else "")
    assert said.rstrip().endswith(f"name a folder that is here: {named}")


def test_a_folder_of_another_user_is_told_as_such_and_not_as_a_wrong_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").symlink_to("nowhere")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as root, all may be read
    for words in (["status", "--dir"], ["node", "start", "--dir"], ["coordinator", "start"]):
        code, said = typed([*words, str(tmp_path)], capsys)
        assert code == ExitCode.NO_INPUT
        assert f"{tmp_path} cannot be read: Permission denied" in said
        assert "run as the user whose it is" in said
    code, said = typed(["status", "--dir", str(tmp_path / "broken")], capsys)
    assert "cannot be read" not in said


def test_a_key_of_another_user_is_not_taken_for_lost(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(config, "read_secret", refuse)
    code, said = typed(["coordinator", "start", str(runs / "run")], capsys)
    assert code == ExitCode.NO_INPUT and ".key cannot be read: Permission denied" in said
    assert "run as the user whose it is" in said and "backup" not in said


def every_parameter(command: click.Command) -> Iterator[tuple[str, click.Parameter]]:
    for parameter in command.params:
        yield f"{command.name} {parameter.name}", parameter
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from every_parameter(found)


def test_every_path_that_a_command_takes_may_begin_at_the_home_folder() -> None:
    paths = {
        name: parameter.type
        for name, parameter in every_parameter(cli.root)
        if isinstance(parameter.type, click.Path)
    }
    assert len(paths) > 30
    assert not [name for name, kind in paths.items() if not isinstance(kind, console.PathAtHome)]


A_COMMAND = re.compile(r"(atoll [a-z]+|chmod|chown)( [^';:]*)? ['\"]?$")
A_PATH = re.compile(
    r"\b(\w*_)?(folder|home|directory|path|target|destination|source|tokenizer|theirs|run_file|RUN_FILE)\b"
)


def bare_paths_in(file: Path) -> Iterator[str]:
    """Paths that texts of a program name within a command, and not as a shell takes them."""
    for text in ast.walk(ast.parse(file.read_text())):
        before = ""
        for part in text.values if isinstance(text, ast.JoinedStr) else ():
            if isinstance(part, ast.FormattedValue):
                named = ast.unparse(part.value)
                is_quoted = "as_typed" in named or "shlex" in named
                if A_COMMAND.search(before) and A_PATH.search(named) and not is_quoted:
                    yield f"{file}:{part.lineno}: {named}"
                before += "X"
            elif isinstance(part, ast.Constant):
                before += str(part.value)


def test_paths_in_commands_to_type_are_as_a_shell_takes_them(tmp_path: Path) -> None:
    rooms = ("node", "coordinator", "protocol", "atoll")
    sources = [file for room in rooms for file in Path(room).rglob("*.py")]
    assert len(sources) > 300
    assert not [bare for file in sources for bare in bare_paths_in(file)]
    folder = tmp_path / "mein Lauf"
    folder.mkdir()
    (folder / CONFIG_FILE).touch()
    with pytest.raises(NoInputError) as told:
        Credentials.load(folder)
    assert f"'atoll coordinator start \"{folder}\"'" in str(told.value)
    for odd in ("it's", 'a "b" c', "$HOME `x`", "a\\ b", "plain/path", "wow!", "läuft"):
        assert shlex.split(as_typed(tmp_path / odd)) == [str(tmp_path / odd)]


def test_a_folder_that_is_given_the_other_way_is_named_the_right_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, said = typed(["node", "start", "my-node"], capsys)
    assert code == ExitCode.USAGE and "'atoll node start --dir DIR'" in said
    code, said = typed(["coordinator", "start", "--dir", "my-run"], capsys)
    assert code == ExitCode.USAGE and "'atoll coordinator start DIR'" in said
    code, said = typed(["node", "start", "--fast"], capsys)
    assert code == ExitCode.USAGE and "'atoll node start --help' lists what it takes" in said


@pytest.mark.parametrize("command", [["node", "start"], ["export", "out"], ["node", "drain"]])
def test_a_coordinators_folder_is_not_taken_for_a_nodes(command: list[str], tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text("")
    words = [sys.executable, "-m", "protocol.terminal.cli", *command, "--dir", str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == ExitCode.NO_INPUT
    assert f"{tmp_path} is a coordinator's folder" in ended.stderr
    assert "atoll join INVITE" in ended.stderr
    with pytest.raises(NoInputError, match="is a coordinator's folder, not a node's"):
        require_node_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("talk.jsonl", b'{"text": "hello"}\n', "a record a line"),
        ("table.parquet", b"PAR1", "a table"),
        ("table.csv", b"id,text\n", "a table"),
        ("text.txt.gz", b"\x1f\x8b", "compressed"),
        ("weights.txt", b"\x7fELF\0\0\0", "binary: it has zero bytes"),
    ],
)
def test_what_is_no_text_is_not_learned_byte_by_byte(
    name: str, content: bytes, what: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    (file,) = text_files([name], tmp_path)
    with pytest.raises(NoInputError, match=f"is no text but {what}"):
        read_text(file.path)


def test_a_table_loses_columns_in_their_order_until_it_fits() -> None:
    columns, rows = ("node", "id", "state"), [("a-node", "5d41402abc4b", "ready")]
    assert console.fitting(columns, rows, spare=("id",), width=80) == (
        ["node", "id", "state"],
        [["a-node", "5d41402abc4b", "ready"]],
        [],
    )
    assert console.fitting(columns, rows, spare=("id", "state"), width=20) == (
        ["node", "state"],
        [["a-node", "ready"]],
        ["id"],
    )
    assert console.fitting(columns, rows, spare=("id", "state"), width=10)[2] == ["id", "state"]
    assert console.fitting(columns, [], spare=("id",), width=None)[2] == []


def test_the_folder_of_a_coordinator_with_a_link_is_no_node_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    assert typed(["init", run], capsys)[0] == ExitCode.OK
    for words in (["node", "start"], ["node", "pause"], ["helper", "start"]):
        code, said = typed([*words, "--dir", run], capsys)
        assert code == ExitCode.NO_INPUT
        assert "is a coordinator's folder, not a node's" in said and "operator" not in said


def test_a_viewer_s_folder_has_nothing_that_a_node_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority, request, identity = (
        Authority.create(new_swarm_id()),
        make_request(),
        Identity.generate(),
    )
    issued = authority.issue_node(request.request_der, identity.node_id, role=Role.VIEWER)
    identity.save(tmp_path / "identity.key")
    Credentials(
        swarm_id=authority.swarm_id,
        run_name="seen",
        host="127.0.0.1",
        control_port=1,
        authority_pem=authority.certificate_pem,
        certificate_pem=issued,
        key_pem=request.key_pem,
    ).save(tmp_path)
    for words in (["node", "start"], ["node", "pause"], ["node", "snapshots"]):
        code, said = typed([*words, "--dir", str(tmp_path)], capsys)
        assert code == ExitCode.NO_PERMISSION and "is a viewer's folder" in said


KEYS = (
    *("ca.pem", "coordinator.pem", "server.pem", "client.pem"),
    *("coordinator.key", "server.key", "client.key"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of two runs, which were never started."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("run", "other"):
        made = ["init", str(folder / name), "--port", "0", "--enrolment-port", "0"]
        assert console.run(cli.root, made) == ExitCode.OK
    return folder


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("how", ["half", "empty", "gone", "another run's"])
def test_a_key_or_certificate_that_is_damaged_is_told_before_anything_listens(
    name: str, how: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs / "run", folder)
    whole = (folder / name).read_bytes()
    if how == "gone":
        (folder / name).unlink()
    elif how == "another run's":
        shutil.copy(runs / "other" / name, folder / name)
    else:
        (folder / name).write_bytes(whole[: len(whole) // 2] if how == "half" else b"")
    code, said = typed(["coordinator", "start", str(folder)], capsys)
    assert code == (ExitCode.NO_INPUT if how == "gone" else ExitCode.BAD_DATA)
    assert name in said and str(folder) in said and "restore it from a backup" in said


@pytest.mark.parametrize("who", ["coordinator", "server", "client"])
def test_a_key_that_is_gone_with_its_certificate_has_no_other_take_its_place(
    who: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs / "run", folder)
    for name in (f"{who}.pem", f"{who}.key"):
        (folder / name).unlink()
    code, said = typed(["coordinator", "start", str(folder)], capsys)
    assert code == ExitCode.NO_INPUT and f"{who}.pem cannot be read" in said


def test_what_a_node_may_do_does_not_fall_away_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "node.toml").symlink_to("node.toml")
    with pytest.raises(NoInputError, match="symbolic links"):
        load_settings(tmp_path)
    (tmp_path / "node.toml").unlink()
    (tmp_path / "node.toml").touch()
    with pytest.raises(ConfigError, match="is empty"):
        load_settings(tmp_path)


def test_a_node_whose_settings_are_gone_says_that_no_limits_hold(tmp_path: Path) -> None:
    with capture_logs() as told:
        tell_missing_settings(tmp_path)
        (tmp_path / "node.toml").write_text("name = 'a'\n")
        tell_missing_settings(tmp_path)
    (line,) = told
    assert "without limits" in line["event"] and line["path"] == str(tmp_path / "node.toml")


def test_a_node_whose_settings_are_cut_off_says_that_limits_may_be_gone(tmp_path: Path) -> None:
    whole = TEMPLATE
    for length in range(1, len(whole) + 1, 97):
        (tmp_path / "node.toml").write_text(whole[:length])
        with capture_logs() as told:
            tell_missing_settings(tmp_path)
        assert len(told) == (not whole[:length].endswith("\n"))
        assert all("limits behind it do not hold" in line["event"] for line in told)
    (tmp_path / "node.toml").write_text(whole)
    with capture_logs() as told:
        tell_missing_settings(tmp_path)
    assert not told


def test_a_node_is_called_like_its_folder_as_far_as_names_go(tmp_path: Path) -> None:
    assert load_settings(tmp_path / ("long" * 30)).name == "long" * 16


def test_a_node_without_its_key_is_told_which_file_is_missing(tmp_path: Path) -> None:
    (tmp_path / "link.toml").touch()
    (tmp_path / "node.toml").touch()
    with pytest.raises(NoInputError, match=r"identity\.key is not there"):
        require_node_folder(tmp_path)
