import stat
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import BadDataError, CannotCreateError, NoInputError, UsageError
from protocol.files.durable import user_cache, write_atomically
from protocol.trust import credentials as module
from protocol.trust.credentials import Credentials, find_home
from protocol.trust.identity import Identity
from protocol.trust.pki import Authority, make_request, new_swarm_id
from protocol.trust.rulings import Address


def joined(*, host: str = "coordinator.example") -> Credentials:
    authority, request = Authority.create(new_swarm_id()), make_request()
    return Credentials(
        swarm_id=authority.swarm_id,
        run_name='a "quoted" \\ run \x7f ü',
        host=host,
        control_port=7700,
        authority_pem=authority.certificate_pem,
        certificate_pem=authority.issue_node(request.request_der, Identity.generate().node_id),
        key_pem=request.key_pem,
    )


def test_saved_credentials_are_the_same_when_loaded_and_the_key_is_private(tmp_path: Path) -> None:
    home, credentials = tmp_path / "a" / "home", joined(host="::1")
    credentials.save(home)
    assert Credentials.load(home) == credentials
    assert credentials.endpoint == "[::1]:7700"
    assert stat.S_IMODE((home / "client.key").stat().st_mode) == 0o600
    assert sorted(file.name for file in home.iterdir()) == [
        "ca.pem",
        "client.key",
        "client.pem",
        "link.toml",
    ]


def test_where_the_coordinator_moves_to_is_kept_beside_where_it_is(tmp_path: Path) -> None:
    there = Address(host="new.example.org", control_port=7710, enrolment_port=7711)
    credentials = replace(joined(host="old.example.org"), elsewhere=there)
    credentials.save(tmp_path)
    kept = Credentials.load(tmp_path)
    assert kept == credentials
    assert kept.endpoint == "old.example.org:7700"
    other = kept.at_the_other
    assert (other.endpoint, other.enrolment_port) == ("new.example.org:7710", 7711)
    assert other.at_the_other == kept
    other.save_renewed()  # the address before, of which no port for joining was known, is kept as well
    assert Credentials.load(tmp_path) == other
    stays = joined()
    assert stays.at_the_other is stays


@pytest.mark.parametrize("num_writes", range(4))
def test_an_interrupted_save_leaves_no_mixture_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    joined().save(tmp_path)
    written: list[Path] = []

    def fail_later(path: Path, data: bytes, *, mode: int = 0o644) -> None:
        if len(written) == num_writes:
            raise CannotCreateError("power cut")
        written.append(path)
        write_atomically(path, data, mode=mode)

    monkeypatch.setattr(module, "write_atomically", fail_later)
    with pytest.raises(CannotCreateError, match="power cut"):
        joined().save(tmp_path)
    with pytest.raises(NoInputError, match=r"no swarm joined in .*atoll join INVITE"):
        Credentials.load(tmp_path)


def test_a_folder_without_a_swarm_says_how_to_join_one(tmp_path: Path) -> None:
    with pytest.raises(
        NoInputError, match=r"no swarm joined in .*; join one with 'atoll join INVITE'"
    ):
        Credentials.load(tmp_path / "nowhere")


def test_who_names_no_folder_is_told_of_those_that_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    joined().save(tmp_path / "my node")
    (tmp_path / "my-run").mkdir()
    (tmp_path / "my-run" / module.COORDINATOR_FILE).touch()
    (tmp_path / "tokens").mkdir()
    with pytest.raises(NoInputError, match=r'is here: --dir "my node" or --dir my-run$'):
        Credentials.load(tmp_path / "elsewhere")
    assert module.folders_here(module.COORDINATOR_FILE, besides=tmp_path / "my-run") == []
    for number in range(5):  # of earlier tries
        joined().save(tmp_path / f"a-run-{number}")
    (tmp_path / "my node" / module.IDENTITY_FILE).touch()
    with pytest.raises(NoInputError, match='is here: --dir "my node" or --dir a-run-0 or'):
        Credentials.load(tmp_path / "elsewhere")


def test_files_that_do_not_belong_together_are_called_damaged(tmp_path: Path) -> None:
    credentials, other = joined(), joined()
    for mixture in (
        replace(credentials, swarm_id=other.swarm_id),
        replace(credentials, authority_pem=other.authority_pem),
        replace(credentials, key_pem=other.key_pem),
        replace(credentials, certificate_pem=b"nonsense"),
        replace(credentials, key_pem=b"nonsense"),
    ):
        mixture.save(tmp_path)
        with pytest.raises(BadDataError, match=r"damaged.*join again.*its work stay") as told:
            Credentials.load(tmp_path)
        assert f"'atoll join INVITE --dir {tmp_path}'" in str(told.value), (
            "not the folder in the home"
        )
    credentials.save(tmp_path)
    (tmp_path / "client.pem").unlink()
    with pytest.raises(BadDataError, match=r"damaged.*client\.pem"):
        Credentials.load(tmp_path)
    (tmp_path / "coordinator.toml").touch()
    with pytest.raises(
        BadDataError, match=r"damaged.*'atoll coordinator start .*' writes link.toml anew"
    ):
        Credentials.load(tmp_path)


def test_home_is_what_was_given_then_the_variable_then_here_then_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path / "variable"))
    assert find_home(Path("given")) == Path("given")
    assert find_home(None) == tmp_path / "variable"
    monkeypatch.setenv("ATOLL_DIR", "")
    assert find_home(None) == tmp_path / "data" / "atoll"
    joined().save(here)
    assert find_home(None) == here


def test_a_user_of_a_container_that_has_no_home_is_asked_for_a_folder_and_keeps_nothing_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "ATOLL_DIR", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(user_id: int) -> None:
        raise KeyError(user_id)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert user_cache() is None
    with pytest.raises(UsageError, match="no home folder") as refused:
        find_home(None)
    assert refused.value.next_step == "name it by --dir, or by ATOLL_DIR in the environment"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert user_cache() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert user_cache() == tmp_path / "cache" / "atoll"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotCreateError, match=r"cannot write .*file/home"):
        joined().save(tmp_path / "file" / "home")
