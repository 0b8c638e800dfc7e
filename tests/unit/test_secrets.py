"""Keys that others on the machine can read are refused by whoever uses them, with what to type."""

from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from coordinator.config import Home
from coordinator.dashboard.link import TOKEN_FILE, page_token
from node.hosts.wire import LeaderKey
from protocol.errors import NotPermittedError
from protocol.files.durable import read_secret
from protocol.terminal import cli, console
from protocol.trust.credentials import Credentials
from protocol.trust.identity import Identity
from tests.unit.test_credentials import joined


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o666, 0o601])
def test_a_secret_that_others_may_read_or_change_is_not_read(mode: int, tmp_path: Path) -> None:
    key = tmp_path / "a.key"
    key.write_bytes(b"hush-hush")
    key.chmod(mode)
    with pytest.raises(NotPermittedError, match=f"mode {mode:03o}") as caught:
        read_secret(key)
    assert f"chmod 600 {key}" in caught.value.next_step
    assert b"hush-hush" not in str(caught.value).encode()


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_its_owner_reads_it_and_the_group_may(mode: int, tmp_path: Path) -> None:
    key = tmp_path / "a.key"
    key.write_bytes(b"hush-hush")
    key.chmod(mode)
    assert read_secret(key) == b"hush-hush"


def an_identity(folder: Path) -> None:
    Identity.generate().save(folder / "node.key")


def some_credentials(folder: Path) -> None:
    joined().save(folder)


def a_coordinator(folder: Path) -> None:
    assert console.run(cli.root, ["init", str(folder / "run")]) == 0


def a_leader(folder: Path) -> None:
    LeaderKey.of_folder(folder)


@pytest.mark.parametrize(
    ("made", "name", "load"),
    [
        (an_identity, "node.key", lambda folder: Identity.load(folder / "node.key")),
        (some_credentials, "client.key", Credentials.load),
        (a_leader, "island.key", LeaderKey.of_folder),
        *(
            (a_coordinator, f"run/{name}", lambda folder: Home.load(folder / "run"))
            for name in ("ca.key", "server.key", "client.key")
        ),
    ],
)
def test_each_key_of_a_folder_is_looked_at_before_it_is_used(
    made: Callable[[Path], None], name: str, load: Callable[[Path], object], tmp_path: Path
) -> None:
    made(tmp_path)
    load(tmp_path)
    (tmp_path / name).chmod(0o644)
    with pytest.raises(NotPermittedError, match=name):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n", bytes(23), b"\xff\xfe" * 12, b"Wzj8aQ0pTnq\n"])
def test_a_damaged_token_of_the_page_lets_nobody_in(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / TOKEN_FILE
    path.write_bytes(content)
    path.chmod(0o600)
    with capture_logs() as told:
        token = page_token(tmp_path)
    assert len(token) == 22 and page_token(tmp_path) == token
    (line,) = told
    assert "links of before are useless" in line["event"]


def test_a_token_of_the_page_stays_and_one_may_be_chosen(tmp_path: Path) -> None:
    assert page_token(tmp_path) == page_token(tmp_path)
    path = tmp_path / TOKEN_FILE
    path.write_text("correct-horse-battery-staple\n")
    assert page_token(tmp_path) == "correct-horse-battery-staple"
    assert path.stat().st_mode & 0o777 == 0o600
