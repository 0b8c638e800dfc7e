"""What hosts of one island are given: read back whole, refused when damaged, kept from others."""

from pathlib import Path

import pytest

from node.config import load_settings
from node.hosts.wire import HostToken, LeaderKey, interface_of
from protocol.errors import BadDataError, ConfigError, NoInputError, UsageError
from protocol.trust.armour import ISLAND_PREFIX, masked


def test_a_token_is_read_back_and_the_leaders_key_lasts(tmp_path: Path) -> None:
    key = LeaderKey.of_folder(tmp_path)
    path = key.write_token(tmp_path, "10.0.0.1", 7720)
    token = HostToken.read(path)
    assert (token.host, token.port, token.secret) == ("10.0.0.1", 7720, key.secret.hex())
    assert len(token.pin) == 32
    assert LeaderKey.of_folder(tmp_path) == key
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


def test_a_token_in_the_place_of_its_file_is_not_shown_again(tmp_path: Path) -> None:
    key = LeaderKey.of_folder(tmp_path)
    path = key.write_token(tmp_path, "leader.example.org", 7720)
    text = path.read_text().strip()
    assert key.secret.hex() not in repr(HostToken.read(path))
    with pytest.raises(NoInputError) as raised:
        HostToken.read(Path(text))
    assert text in raised.value.what
    told = masked(raised.value.what)
    assert told.startswith(f"{ISLAND_PREFIX}{text.removeprefix(ISLAND_PREFIX)[:4]}… cannot be read")


@pytest.mark.parametrize("text", ["", "atoll-island-", "atoll1-abc", "atoll-island-WzFd", "\udcff"])
def test_a_damaged_token_is_refused(text: str) -> None:
    with pytest.raises(BadDataError, match=r"not a whole island token; copy the leader's"):
        HostToken.parse(text)


def test_a_token_that_is_not_there_and_a_damaged_key_are_told(tmp_path: Path) -> None:
    with pytest.raises(NoInputError, match=r"copy island\.token from the leader"):
        HostToken.read(tmp_path / "island.token")
    (tmp_path / "island.key").write_text("{}")
    (tmp_path / "island.key").chmod(0o600)
    with pytest.raises(BadDataError, match="is damaged; remove it"):
        LeaderKey.of_folder(tmp_path)


def test_loopback_has_an_interface_and_a_foreign_address_none() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ConfigError, match=r"address 192\.0\.2\.1"):
        interface_of("192.0.2.1")  # of no machine (RFC 5737)


def test_hosts_share_the_ranks_of_a_mesh_evenly(tmp_path: Path) -> None:
    listen = {"island_listen": "10.0.0.1:7720"}
    assert load_settings(tmp_path, hosts=2, shard=8, **listen).ranks_here == 4
    assert load_settings(tmp_path, shard=8).ranks_here == 8
    assert load_settings(tmp_path, **listen).island_address == ("10.0.0.1", 7720)
    for settings, words in (
        ({"hosts": 2, "shard": 3} | listen, "hosts = 2 cannot share 3 ranks evenly"),
        ({"hosts": 2, "shard": 2}, "set island_listen"),
        ({"hosts": 2, "mesh": "auto"} | listen, 'mesh = "auto" knows one machine'),
    ):
        with pytest.raises(ConfigError, match=words):
            _ = load_settings(tmp_path, **settings).ranks_here
    with pytest.raises(UsageError, match="an IPv4 address and a port"):
        load_settings(tmp_path, island_listen="eth0")
