"""Backups on object storage and back: a folder by fsspec, and an S3 server where moto is installed."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from coordinator.backups import CopyName
from coordinator.config import Home
from coordinator.remote_backup import RemoteCopies, _Place
from lab.processes.family import atoll_command, atoll_environment
from protocol.errors import BadDataError, UnavailableError
from tests.deployed import coordinator_in
from tests.integration.typed_commands import Swarm, atoll, done, refused, typed_here, until
from tests.tiny_runs import tiny_text

RUN = tiny_text(run={"name": "kept", "rounds": 100, "min_nodes": 1})

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    url: str
    files: Any  # the storage, of fsspec
    environment: dict[str, str]


@pytest.fixture(params=["file", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """A place of its own for each test, on one server for all."""
    if request.param == "file":
        (tmp_path / "storage" / "copy").mkdir(parents=True)
        url = f"file://{tmp_path}/storage/copy"
        return Storage(url=url, files=fsspec.filesystem("file"), environment={})
    server: Storage = request.getfixturevalue("server")
    bucket = f"backups-{next(BUCKETS)}"
    server.files.mkdir(bucket)
    return replace(server, url=f"s3://{bucket}/copy")


BUCKETS = count()


@pytest.fixture(scope="module")
def server() -> Iterator[Storage]:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
        environment = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "tested",
            "AWS_SECRET_ACCESS_KEY": "tested",
            "AWS_DEFAULT_REGION": "eu-west-1",
        }
        files = fsspec.filesystem(
            "s3",
            key="tested",
            secret="tested",
            client_kwargs={"endpoint_url": endpoint, "region_name": "eu-west-1"},
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        yield Storage(url="s3://", files=files, environment=environment)
        server.stdin.close()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    "storage", [pytest.param("file", marks=pytest.mark.nightly), "s3"], indirect=True
)
def test_a_backup_comes_back_as_it_was_sent_and_a_coordinator_starts_from_it(
    swarm: Swarm, storage: Storage, tmp_path: Path
) -> None:
    swarm.join("node", swarm.invite())
    said = done(atoll("coordinator", "backup", swarm.home, storage.url, **storage.environment))
    assert f"copied run 'kept' at round 0 of 100 to {storage.url}" in said
    assert not list(swarm.home.glob(".upload-*")), "no copy of the keys stays behind"
    again = typed_here("coordinator", "backup", swarm.home, storage.url, **storage.environment)
    refused(again, 73, "is not empty")

    back = tmp_path / "back"
    said = done(atoll("coordinator", "restore", storage.url, back, **storage.environment))
    assert "restored run 'kept' at round 0" in said
    kept = content(swarm.home)
    for name, body in content(back).items():
        assert body == kept[name] or name in ("atoll.db", "lock"), name
        assert (back / name).stat().st_mode & 0o077 == 0
    assert {"ca.key", "coordinator.key", "run.toml", "atoll.db"} <= set(content(back))
    again = typed_here("coordinator", "restore", storage.url, back, **storage.environment)
    refused(again, 73, "not empty")
    swarm.coordinator.stop(signal.SIGTERM)
    swarm.home = back
    swarm.start_coordinator()
    assert "node joined with invite" in done(typed_here("audit", "--dir", back))


@pytest.mark.parametrize(
    "storage", ["file", pytest.param("s3", marks=pytest.mark.nightly)], indirect=True
)
def test_what_was_changed_or_is_not_whole_is_no_backup(
    swarm: Swarm, storage: Storage, tmp_path: Path
) -> None:
    back = tmp_path / "back"
    typed = ("coordinator", "restore", storage.url, back)
    refused(typed_here(*typed, **storage.environment), 66, "no whole backup lies at")
    done(typed_here("coordinator", "backup", swarm.home, storage.url, **storage.environment))
    path = storage.url.partition("://")[2]
    listing = json.loads(storage.files.cat_file(f"{path}/backup.json"))
    assert listing["run"] == "kept" and "atoll.db" in listing["files"]

    sent = storage.files.cat_file(f"{path}/run.toml")
    storage.files.pipe_file(f"{path}/run.toml", sent.replace(b"kept", b"lost"))  # as long
    refused(typed_here(*typed, **storage.environment), 65, "run.toml is not what was sent")
    storage.files.rm(f"{path}/run.toml")
    refused(typed_here(*typed, **storage.environment), 65, "lacks run.toml")
    elsewhere = dict(listing, files={"../run.toml": listing["files"]["run.toml"]})
    storage.files.pipe_file(f"{path}/backup.json", json.dumps(elsewhere).encode())
    refused(typed_here(*typed, **storage.environment), 65, "names that lead elsewhere")
    assert not back.exists() and not os.path.lexists(tmp_path / "run.toml")


def test_addresses_that_lead_nowhere_are_refused(swarm: Swarm, tmp_path: Path) -> None:
    refused(
        typed_here("coordinator", "backup", swarm.home, "nosuch://bucket/copy"),
        65,
        "nosuch://bucket/copy",
    )
    typed = typed_here("coordinator", "restore", tmp_path, tmp_path / "back")
    refused(typed, 66, f"no whole backup lies at {tmp_path}")


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_a_bucket_that_is_not_there_is_said(swarm: Swarm, storage: Storage) -> None:
    nowhere = ("coordinator", "backup", swarm.home, "s3://nowhere/copy")
    typed = typed_here(*nowhere, **storage.environment)
    refused(typed, 69, "s3://nowhere/copy cannot be used", "bucket")


@pytest.mark.parametrize(
    "storage", ["file", pytest.param("s3", marks=pytest.mark.nightly)], indirect=True
)
def test_copies_follow_each_other_and_the_newest_whole_one_comes_back(
    swarm: Swarm, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in storage.environment.items():
        monkeypatch.setenv(key, value)
    path = storage.url.partition("://")[2]

    def copies() -> list[str]:
        names = {name.partition(f"{path}/")[2].split("/")[0] for name in storage.files.find(path)}
        return sorted(names)

    broken_off = f"kept-{Home.load(swarm.home).issuer.swarm_id[:8]}-20260101T000000Z"
    storage.files.mkdirs(f"{path}/{broken_off}", exist_ok=True)
    storage.files.pipe_file(f"{path}/{broken_off}/run.toml", b"its sender was killed")
    command = ("coordinator", "backup", swarm.home, storage.url, "--every", "1s", "--keep", "2")
    backups = swarm.start(*command)
    backups.says(f"copied run 'kept' at round 0 of 100 to {storage.url}/kept-", times=4)
    backups.stop(signal.SIGTERM)
    assert not list(swarm.home.glob(".upload-*")), "no copy of the keys stays behind"
    assert broken_off not in copies() and 2 <= len(copies()) <= 4

    whole = [name for name in copies() if storage.files.exists(f"{path}/{name}/backup.json")]
    newest = CopyName.read(whole[-1])
    assert newest is not None
    unfinished = str(replace(newest, at=newest.at + timedelta(seconds=1)))
    storage.files.mkdirs(f"{path}/{unfinished}", exist_ok=True)
    storage.files.pipe_file(f"{path}/{unfinished}/run.toml", b"half of one")
    back = tmp_path / "back"
    said = done(atoll("coordinator", "restore", storage.url, back))
    assert f"restored run 'kept' at round 0 to {back}, from {storage.url}/{whole[-1]}" in said
    assert (back / "ca.key").read_bytes() == (swarm.home / "ca.key").read_bytes()

    storage.files.pipe_file(f"{path}/{whole[-1]}/run.toml", b"changed")
    typed = atoll("coordinator", "restore", storage.url, tmp_path / "again")
    older = f"atoll coordinator restore {storage.url}/{whole[-2]} {tmp_path / 'again'}"
    refused(typed, 65, "run.toml is not what was sent", older)
    assert "restored run" in done(atoll(*older.split()[1:]))


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_a_large_file_goes_in_one_piece_so_none_stay_of_an_upload_that_breaks_off(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in storage.environment.items():
        monkeypatch.setenv(key, value)
    _Place.at(storage.url).send("atoll.db", bytes(110 << 20))
    sent = storage.files.info(f"{storage.url}/atoll.db")
    assert sent["size"] == 110 << 20
    assert "-" not in sent["ETag"], "with which S3 marks what came in parts"


def test_a_storage_that_says_nothing_is_told_before_anybody_waits_for_long(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.remote_backup._PATIENCE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tested")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tested")
        kind = fsspec.get_filesystem_class("s3")
        kind.clear_instance_cache()  # one of another test would go to that one's server
        try:
            copies = RemoteCopies.at("s3://backups/of-silence")
            for call in (copies.found, lambda: copies.add(swarm.home, "first")):
                with pytest.raises(UnavailableError, match="it has not answered within 0 s"):
                    call()
        finally:
            kind.clear_instance_cache()


def know_no_key_after(endpoint: str, num_calls: int) -> None:
    """From then on the server refuses all keys, as one that was taken back."""
    told = Request(f"{endpoint}/moto-api/reset-auth", data=str(num_calls).encode())
    told.add_header("Content-Type", "text/plain")  # a form's would not reach it
    with urlopen(told) as answer:
        assert answer.status == 200


@pytest.mark.nightly
@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_a_key_that_was_taken_back_is_the_first_that_the_run_owner_reads(
    swarm: Swarm, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in storage.environment.items():
        monkeypatch.setenv(key, value)
    command = ("coordinator", "backup", swarm.home, storage.url, "--every", "1s", "--keep", "2")
    backups = swarm.start(*command)
    backups.says("copied run 'kept' at round 0")
    endpoint = storage.environment["AWS_ENDPOINT_URL"]
    shown = done(atoll("status", "--dir", swarm.home))
    assert "backup " in shown and not shown.startswith("no backup")
    know_no_key_after(endpoint, 0)
    backups.says("no copy: ", times=2)
    first, *_ = done(atoll("status", "--dir", swarm.home)).splitlines()
    assert first.startswith("no backup for ")
    whole = " ".join(done(atoll("status", "--dir", swarm.home)).split())
    assert f"tries at {storage.url} in" in whole and "Access Key Id" in whole
    assert "next: check the bucket, its region and your credentials" in whole
    know_no_key_after(endpoint, 1_000_000)
    num_made = backups.log.count("copied run")
    backups.says("copied run", times=num_made + 1)
    assert not done(atoll("status", "--dir", swarm.home)).startswith("no backup")
    backups.stop(signal.SIGTERM)


def test_what_a_storage_keeps_otherwise_than_it_was_sent_is_no_copy(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage that takes all and loses some: the copy is read back, and older ones stay."""
    (tmp_path / "storage").mkdir()
    copies = RemoteCopies.at(f"file://{tmp_path}/storage")
    copies.add(swarm.home, "first")
    sent = LocalFileSystem.pipe_file

    def loses(self: LocalFileSystem, path: str, value: bytes, **options: Any) -> Any:
        return sent(self, path, value[:-1] if path.endswith("server.key") else value, **options)

    monkeypatch.setattr(LocalFileSystem, "pipe_file", loses)
    with pytest.raises(BadDataError, match=r"server\.key is not what was sent"):
        copies.add(swarm.home, "second")
    assert copies.found()["first"]


@pytest.mark.nightly
@pytest.mark.parametrize("storage", ["s3"], indirect=True)
@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml"])
def test_what_deploy_starts_copies_itself_to_a_bucket_and_comes_back_from_there(
    swarm: Swarm, storage: Storage, tmp_path: Path, name: str
) -> None:
    """By the scripts of its files; only the page's port is another one."""
    swarm.join("node", swarm.invite())
    swarm.coordinator.stop(signal.SIGTERM)
    (programs := tmp_path / "programs").mkdir()
    (programs / "atoll").write_text(f'#!/bin/sh\nexec {shlex.join(atoll_command())} "$@"\n')
    (programs / "atoll").chmod(0o755)
    place = tmp_path / "data"
    place.mkdir()
    swarm.home.rename(place / "run")
    script = coordinator_in(name)[0].replace("127.0.0.1:9101", "127.0.0.1:0")
    if name == "compose.yaml":  # which fills its environment in by itself
        script = script.replace("/backups/run", storage.url)
    changes = {"PATH": f"{programs}:{os.environ['PATH']}", "ATOLL_BACKUP": storage.url}
    environment = atoll_environment(storage.environment | changes) | changes

    def run_until(words: str, **more: str) -> str:
        with (
            (tmp_path / "log").open("w+") as log,
            subprocess.Popen(
                ["sh", "-euc", script], cwd=place, env=environment | more, stdout=log, stderr=log
            ) as coordinator,
        ):
            try:
                until(lambda: words in (tmp_path / "log").read_text(), f"{words!r} in its log")
                assert "node joined with invite" in done(atoll("audit", "--dir", place / "run"))
            finally:
                coordinator.terminate()
        assert coordinator.returncode == 0
        return (tmp_path / "log").read_text()

    run_until("backup made")
    shutil.rmtree(place / "run")
    if name == "compose.yaml":
        script = script.replace('test -z ""', 'test -z "yes"')
    said = run_until("coordinator ready", ATOLL_RESTORE="yes")
    assert "restored run 'kept' at round 0" in said
