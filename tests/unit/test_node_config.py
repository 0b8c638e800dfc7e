"""node.toml, and the options that come before it."""

import socket
import tomllib
from pathlib import Path

import pytest

from node.config import (
    OF_HELPERS,
    SETTINGS_FILE,
    NodeSettings,
    check_limits,
    load_settings,
    write_settings,
)
from protocol.errors import ConfigError, ExitCode, SystemRefusedError, UsageError
from protocol.terminal import cli, console
from protocol.trust.invite import Invite


def test_the_file_that_joining_writes_explains_every_key_and_says_the_defaults(
    tmp_path: Path,
) -> None:
    write_settings(tmp_path, name='a "name"')
    written = tomllib.loads((tmp_path / SETTINGS_FILE).read_text())
    assert written.keys() == NodeSettings.model_fields.keys()
    assert load_settings(tmp_path) == NodeSettings(name='a "name"')


def test_a_helpers_file_has_the_keys_that_mean_something_to_it(tmp_path: Path) -> None:
    write_settings(tmp_path, name="helper-1", is_helper=True)
    text = (tmp_path / SETTINGS_FILE).read_text()
    assert tomllib.loads(text).keys() == OF_HELPERS
    assert "atoll helper start" in text and "atoll node start" not in text
    assert load_settings(tmp_path) == NodeSettings(name="helper-1")


LIMITS: dict[str, str | float | bool] = {
    "max_upload": "10mbit",
    "hours": "22-7",
    "only_idle": True,
    "on_battery": False,
    "load": 0.5,
}


def test_limits_that_joining_is_told_stand_in_the_file_beside_all_other_keys(
    tmp_path: Path,
) -> None:
    write_settings(tmp_path, name="größe 🌋 \\", limits=LIMITS)
    written = tomllib.loads((tmp_path / SETTINGS_FILE).read_text())
    assert written.keys() == NodeSettings.model_fields.keys()
    assert load_settings(tmp_path) == NodeSettings(name="größe 🌋 \\", **LIMITS)  # type: ignore[arg-type]
    (tmp_path / SETTINGS_FILE).unlink()
    write_settings(tmp_path, name="h", is_helper=True, limits=LIMITS)
    assert load_settings(tmp_path) == NodeSettings(name="h", max_upload="10mbit")


def test_limits_that_cannot_be_written_are_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    check_limits(tmp_path, LIMITS)
    with pytest.raises(UsageError, match="--hours 'late'"):
        check_limits(tmp_path, {"hours": "late"})
    write_settings(tmp_path, name="node")
    check_limits(tmp_path, {})
    with pytest.raises(UsageError, match=r"--max-upload, --load: .*node\.toml is there already"):
        check_limits(tmp_path, {"max_upload": "1mbit", "load": 0.5})


def test_a_router_is_asked_for_a_port_unless_that_is_refused_or_makes_no_sense() -> None:
    elsewhere = "train.example.org"
    assert NodeSettings(name="node").asks_router(elsewhere)
    assert not NodeSettings(name="node", listen="::").asks_router(
        elsewhere
    )  # nothing is translated there
    assert not NodeSettings(name="node").asks_router("127.0.0.1")
    assert not NodeSettings(name="node", ask_router=False).asks_router(elsewhere)
    assert not NodeSettings(name="node", listen="10.0.0.2").asks_router(elsewhere)
    assert not NodeSettings(name="node", announce="home.example.org").asks_router(elsewhere)


@pytest.mark.parametrize(
    ("rate", "bytes_per_second"),
    [
        ("10mbit", 1_250_000),
        ("10Mbit/s", 1_250_000),
        ("1.5MB/s", 1_500_000),
        ("64 kB/s", 64_000),
        ("1gbit", 125_000_000),
        ("256kbit", 32_000),
        ("", None),
    ],
)
def test_a_rate_is_read_in_bits_or_in_bytes(rate: str, bytes_per_second: float | None) -> None:
    settings = NodeSettings(name="node", max_upload=rate)
    assert settings.max_upload_bytes_per_second == bytes_per_second


def test_an_address_of_metrics_is_checked_before_anything_starts(tmp_path: Path) -> None:
    write_settings(tmp_path, name="node")
    assert load_settings(tmp_path, metrics="[::1]:9101").metrics == "[::1]:9101"
    with pytest.raises(UsageError, match=r"write HOST:PORT, as 127\.0\.0\.1:9101"):
        load_settings(tmp_path, metrics="everywhere")


@pytest.mark.parametrize(
    "rate", ["10mb", "10", "fast", "-1mbit", "1e3kbit", "10MB", "1,5MB/s", "9" * 400 + "bit"]
)
def test_a_rate_that_may_mean_two_things_is_refused_with_what_to_write(
    tmp_path: Path, rate: str
) -> None:
    why = f"'{rate}': write bits a second as 10mbit, or bytes a second as 1.25MB/s"
    with pytest.raises(UsageError) as of_option:
        load_settings(tmp_path, max_upload=rate)
    assert str(of_option.value).startswith(f"--max-upload {why}")
    (tmp_path / SETTINGS_FILE).write_text(f'max_upload = "{rate}"')
    with pytest.raises(ConfigError) as of_file:
        load_settings(tmp_path)
    assert f"max_upload = {why}" in str(of_file.value)


def test_a_mistyped_key_of_the_file_is_answered_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / SETTINGS_FILE).write_text('max_uplod = "10mbit"')
    with pytest.raises(ConfigError, match="max_uplod: unknown key; did you mean 'max_upload'"):
        load_settings(tmp_path)


def test_a_wrong_option_is_explained_by_the_help_of_its_own_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invite = Invite(host="127.0.0.1", port=1, pin=bytes(32), invite_id="i", secret=bytes(32))
    typed = ["join", invite.encode(), "--dir", str(tmp_path / "node"), "--hours", "25:00-26:00"]
    assert console.run(cli.root, typed) == ExitCode.USAGE
    assert capsys.readouterr().err.endswith("next: see 'atoll join --help'\n")


def test_a_rate_below_what_peers_wait_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="less than 256kbit is too slow"):
        load_settings(tmp_path, max_upload="255kbit")


def test_a_port_that_somebody_has_is_refused_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            SystemRefusedError, match=f"127.0.0.1 port {port}: Address already in use"
        ):
            NodeSettings(name="n", port=port).require_port("127.0.0.1")
        NodeSettings(name="n").require_port("127.0.0.1")  # any that is free
    NodeSettings(name="n", port=port).require_port("127.0.0.1")


def test_a_helper_beside_its_coordinator_cannot_have_the_same_port() -> None:
    """Also where nothing listens there now: a relay does once the coordinator is here."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    for settings, host in (
        (NodeSettings(name="n", port=port), "localhost"),
        (NodeSettings(name="n", port=port, listen="127.0.0.1"), "127.0.0.1"),
        (NodeSettings(name="n", port=port, listen="0.0.0.0"), "127.0.0.1"),
        (NodeSettings(name="n", port=port, announce="home.example.org"), "Home.example.org"),
    ):
        with pytest.raises(SystemRefusedError, match=f"{host}:{port} is the coordinator's") as told:
            settings.require_port(host, (port, port))
        assert "another address, or choose another --port" in told.value.next_step
    for settings, host in (
        (NodeSettings(name="n", port=port), "192.0.2.1"),
        (NodeSettings(name="n", port=port, listen="::1"), "127.0.0.1"),
        (NodeSettings(name="n", port=port, announce="home.example.org"), "run.example.org"),
    ):
        settings.require_port(host, (port, port))
    NodeSettings(name="n", port=port).require_port("127.0.0.1", (port + 1,))


def test_a_loop_of_one_s_own_and_ranks_exclude_each_other(tmp_path: Path) -> None:
    assert load_settings(tmp_path, loop=True).ranks_here == 1
    for key, value in (("ranks", 2), ("shard", 2), ("mesh", "auto"), ("hosts", 2)):
        with pytest.raises(ConfigError, match="loop = true leaves training to a program"):
            _ = load_settings(tmp_path, loop=True, **{key: value}).ranks_here
    with pytest.raises(ConfigError, match=r"load = 0\.5 has no effect on a program of your own"):
        _ = load_settings(tmp_path, loop=True, load=0.5).ranks_here
