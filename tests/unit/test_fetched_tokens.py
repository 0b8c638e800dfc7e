"""What a node lacks of the tokens it fetches when it needs it, checked, and keeps within a limit."""

import json
import os
import pickle
import shutil
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from node.island.data import fetching
from node.island.data.dataset import Dataset
from node.island.data.fetching import FetchedFiles, FsspecOrigin, PieceCache, is_url
from node.island.data.manifest import FileEntry, piece_digests, read_manifest
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.ranks.faults import LostPieceError, OriginAwayError
from protocol.errors import BadDataError, ConfigError, NoInputError, UnavailableError
from protocol.run.run_spec import RunSpec
from tests.unit.served_folder import certificate_of, serving
from tests.unit.tokens_scene import small_shards, spec_of

PIECE = 512


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tokens in some shards of several small pieces."""
    monkeypatch.setattr(fetching, "FIRST_PAUSE_SECONDS", 0.0)
    return small_shards(tmp_path, piece_bytes=PIECE)


def fetched_from(
    url: str, spec: RunSpec, home: Path, *, own: str = "", limit: int = 10**9
) -> Dataset:
    """What a node opens whose run file has the URL."""
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"paths": (url,)})})
    places = DataPlaces(folder=home, own=own, cache=home / "cache", cache_bytes=limit)
    return open_dataset(spec, places)


def everything(dataset: Dataset) -> list[np.ndarray]:
    return [
        dataset.batch("training", np.arange(dataset.num_samples)).tokens,
        dataset.batch("held_out", np.arange(dataset.num_held_out_samples)).tokens,
    ]


def same(one: Dataset, other: Dataset) -> bool:
    return all(map(np.array_equal, everything(one), everything(other)))


def here(folder: Path) -> Dataset:
    return open_dataset(spec_of(folder), DataPlaces(folder=Path("/")))


def test_a_node_without_tokens_reads_the_samples_of_one_that_has_them(
    folder: Path, tmp_path: Path
) -> None:
    with serving(folder) as served:
        dataset = fetched_from(served.url, spec_of(folder), tmp_path)
        assert [name for name, _ in served.asked] == ["manifest.json"]  # a start waits for no data
        assert dataset.summary() == here(folder).summary()
        assert same(dataset, here(folder))
        asked = served.of_tokens()
        everything(dataset)
        assert served.of_tokens() == asked  # each piece came once
        pieces = sum(
            len(e.pieces) for n, e in read_manifest(folder).files.items() if n.endswith("tokens")
        )
        assert len(asked) == pieces > 20
        again = fetched_from(served.url, spec_of(folder), tmp_path)
        assert same(again, here(folder))
    assert same(
        fetched_from(served.url, spec_of(folder), tmp_path), here(folder)
    )  # without a server


def test_nodes_with_half_of_the_shards_each_fetch_the_other_half(
    folder: Path, tmp_path: Path
) -> None:
    shards = [shard.tokens for shard in read_manifest(folder).training]
    halves = {"even": shards[::2], "odd": shards[1::2]}
    with serving(folder) as served:
        for name, kept in halves.items():
            own = tmp_path / name
            own.mkdir()
            for each in kept:
                (own / each).write_bytes((folder / each).read_bytes())
            dataset = fetched_from(
                served.url, spec_of(folder), tmp_path / f"{name}-home", own=str(own)
            )
            assert same(dataset, here(folder))
            assert not set(served.of_tokens()) & set(kept)
            assert set(served.of_tokens()) >= set(shards) - set(kept)
            served.asked.clear()


def test_a_shard_here_of_another_length_is_refused_though_it_could_be_fetched(
    folder: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "00000.tokens").write_bytes(b"half")
    with serving(folder) as served, pytest.raises(BadDataError, match=r"00000\.tokens has 4 bytes"):
        fetched_from(served.url, spec_of(folder), tmp_path, own=str(own))


@pytest.mark.parametrize("kept", [0, 1, PIECE - 1])
def test_a_piece_that_the_disk_has_cut_is_fetched_again(
    folder: Path, tmp_path: Path, kept: int
) -> None:
    with serving(folder) as served:
        everything(fetched_from(served.url, spec_of(folder), tmp_path))
        pieces = sorted((tmp_path / "cache").glob("*.piece"))
        for piece in pieces[::2]:
            os.truncate(piece, min(kept, piece.stat().st_size - 1))
        served.asked.clear()
        assert same(fetched_from(served.url, spec_of(folder), tmp_path), here(folder))
        assert len(served.of_tokens()) == len(pieces[::2])


def test_a_piece_of_peers_that_the_disk_changed_is_told_from_one_without_room(
    tmp_path: Path,
) -> None:
    contents = b"one tokens", b"two tokens"
    entry = FileEntry(bytes=20, pieces=piece_digests(contents))
    cache = PieceCache(tmp_path, limit_bytes=100)
    for digest, content in zip(entry.pieces, contents, strict=True):
        cache.put(digest, content)
    files = FetchedFiles([], {"a": entry}, 10, cache)
    cache.path_of(entry.pieces[0]).write_bytes(b"one tokans")
    cache.path_of(entry.pieces[1]).unlink()
    with pytest.raises(LostPieceError, match="was damaged in") as damaged:
        files.read("a", 0, 10)
    with pytest.raises(LostPieceError, match=r"is not in .* any more") as gone:
        files.read("a", 10, 20)
    assert "data_cache" in gone.value.next_step and "data_cache" not in damaged.value.next_step
    assert (damaged.value.piece, gone.value.piece) == entry.pieces
    assert pickle.loads(pickle.dumps(gone.value)).piece == entry.pieces[1], "as ranks send it"


def test_a_damaged_piece_of_the_owners_folder_is_fetched(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    content = bytearray((own / "00001.tokens").read_bytes())
    content[PIECE + 1] ^= 1
    (own / "00001.tokens").write_bytes(content)
    with serving(folder) as served:
        dataset = fetched_from(served.url, spec_of(folder), tmp_path, own=str(own))
        with capture_logs() as logs:
            assert same(dataset, here(folder))
        assert served.of_tokens() == ["00001.tokens"], "nothing else came"
    assert [(each["file"], each["piece"]) for each in logs] == [(str(own / "00001.tokens"), 1)]
    (tmp_path / "cache" / f"{read_manifest(folder).files['00001.tokens'].pieces[1]}.piece").unlink()
    with pytest.raises(BadDataError, match=rf"{own}/00001\.tokens is damaged: piece 1"):
        everything(fetched_from(served.url, spec_of(folder), tmp_path, own=str(own)))


def test_what_was_not_used_for_longest_makes_room(folder: Path, tmp_path: Path) -> None:
    with serving(folder) as served:
        dataset = fetched_from(served.url, spec_of(folder), tmp_path, limit=6 * PIECE)
        assert same(dataset, here(folder))
        kept = list((tmp_path / "cache").glob("*.piece"))
        assert 0 < sum(path.stat().st_size for path in kept) <= 6 * PIECE
        assert not list((tmp_path / "cache").glob("*.lock"))


def test_a_cache_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = PieceCache(tmp_path / "cache", limit_bytes=20)
    for number, digest in enumerate("abc"):
        cache.put(digest, bytes(8))
        path = cache.path_of(digest)
        if path.exists():
            os.utime(path, (number, number))
        if digest == "b":
            cache.touch("a")
    assert [digest for digest in "abc" if cache.path_of(digest).exists()] == ["a", "c"]
    cache.put("d", bytes(100))  # larger than the limit: it is needed now
    assert [digest for digest in "abcd" if cache.path_of(digest).exists()] == ["d"]


def test_on_a_disk_that_is_nearly_full_the_cache_leaves_room_for_the_node_s_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_bytes = 100

    def disk_usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=disk_bytes - sum(p.stat().st_size for p in folder.iterdir()))

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    cache = PieceCache(tmp_path, limit_bytes=1000, leave_bytes=40)
    with capture_logs() as logs:
        for number, digest in enumerate("abcdefgh"):
            cache.put(digest, bytes(10), spare={"a"})
            os.utime(cache.path_of(digest), (number, number))
    assert cache.digests() == set("adefgh"), "what is read now stays, and the newest"
    assert cache.room_bytes() == 60
    [told] = logs
    assert told["left_bytes"] == 40 and "data_cache" in told["next_step"]
    narrow = PieceCache(tmp_path, limit_bytes=1000, leave_bytes=90)
    assert narrow.room_bytes() == 50, "half: a node that waits for each piece trains nothing"


def test_a_piece_that_was_changed_on_its_way_is_refused_by_name(
    folder: Path, tmp_path: Path
) -> None:
    spec = spec_of(folder)
    path = folder / "00001.tokens"
    content = bytearray(path.read_bytes())
    content[PIECE + 1] ^= 1
    path.write_bytes(content)
    with serving(folder) as served:
        dataset = fetched_from(served.url, spec, tmp_path)
        with pytest.raises(BadDataError, match=rf"{served.url}/00001\.tokens is damaged: piece 1"):
            everything(dataset)


def test_a_piece_that_the_disk_changed_is_fetched_again(folder: Path, tmp_path: Path) -> None:
    with serving(folder) as served:
        everything(fetched_from(served.url, spec_of(folder), tmp_path))
        for path in (tmp_path / "cache").glob("*.piece"):
            path.write_bytes(b"\xff" * path.stat().st_size)
        assert same(fetched_from(served.url, spec_of(folder), tmp_path), here(folder))


def test_a_server_that_fails_for_a_while_is_asked_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(folder) as served:
        dataset = fetched_from(served.url, spec_of(folder), tmp_path)
        served.failures = fetching.NUM_TRIES - 1
        dataset.batch("training", np.array([0]))
        served.failures = 10**6
        with pytest.raises(OriginAwayError, match=r"tokens cannot be fetched: HTTP Error 503"):
            everything(dataset)
        num_asked = len(served.asked)
        monkeypatch.setattr(fetching, "TRYING_SECONDS", -1.0)
        with pytest.raises(OriginAwayError):
            everything(dataset)
        assert len(served.asked) == num_asked + 1, "slow tries are fewer"


def test_a_storage_that_says_nothing_does_not_hold_a_rank_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetching, "STORAGE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        origin = FsspecOrigin(f"http://127.0.0.1:{silent.getsockname()[1]}/tokens")
        with pytest.raises(TimeoutError, match=r"longer than 0\.2 s"):
            origin.fetch("00000.tokens", 0, 10)


def test_a_connection_that_is_cut_in_the_middle_of_a_piece_is_no_damage_and_tried_again(
    folder: Path, tmp_path: Path
) -> None:
    with serving(folder) as served:
        served.cuts = 1  # of the manifest
        dataset = fetched_from(served.url, spec_of(folder), tmp_path)
        served.cuts = fetching.NUM_TRIES - 1
        assert same(dataset, here(folder))
        served.cuts = 10**6
        with pytest.raises(
            OriginAwayError,
            match=r"cannot be fetched: the connection ends [0-9,]+ bytes too early",
        ):
            fetched_from(served.url, spec_of(folder), tmp_path / "other")


def test_a_cut_is_no_damage_where_the_server_says_no_length_either(
    folder: Path, tmp_path: Path
) -> None:
    with serving(folder) as served:
        served.says_length = False
        served.cuts = 1  # of the manifest
        dataset = fetched_from(served.url, spec_of(folder), tmp_path)
        served.cuts = fetching.NUM_TRIES - 1
        assert same(dataset, here(folder))


def test_a_server_that_names_another_address_is_followed(folder: Path, tmp_path: Path) -> None:
    with serving(folder) as far, serving(folder) as served:
        served.moved_to = far.url
        assert same(fetched_from(served.url, spec_of(folder), tmp_path), here(folder))
        assert far.of_tokens() == served.of_tokens() != []
        assert all(span for _, span in far.asked)


def test_a_web_page_in_place_of_a_file_is_called_so_and_tried_again(
    folder: Path, tmp_path: Path
) -> None:
    with serving(folder) as served:
        served.pages = 1  # of the manifest
        dataset = fetched_from(served.url, spec_of(folder), tmp_path)
        served.pages = fetching.NUM_TRIES - 1
        assert same(dataset, here(folder))
        served.pages = 10**6
        with pytest.raises(OriginAwayError, match="a web page comes instead, from http://127"):
            fetched_from(served.url, spec_of(folder), tmp_path / "other")


def test_what_a_server_compresses_is_not_called_damaged(folder: Path, tmp_path: Path) -> None:
    with serving(folder) as served:
        dataset = fetched_from(served.url, spec_of(folder), tmp_path)
        served.packs = True
        for read in (
            lambda: everything(dataset),
            lambda: fetched_from(served.url, spec_of(folder), tmp_path / "other"),
        ):
            with pytest.raises(BadDataError, match="is served with Content-Encoding gzip"):
                read()


def test_a_certificate_that_nobody_here_knows_is_told_at_once_with_what_makes_it_known(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it is tried again"))
    with serving(folder, certificate_of("localhost", tmp_path)) as served:
        with pytest.raises(UnavailableError, match="certificate verify failed") as refused:
            fetched_from(served.url, spec_of(folder), tmp_path)
        assert "SSL_CERT_FILE" in refused.value.next_step
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        assert same(fetched_from(served.url, spec_of(folder), tmp_path), here(folder))


def test_a_file_that_is_not_served_is_not_asked_for_again(folder: Path, tmp_path: Path) -> None:
    with serving(folder) as served:
        dataset = fetched_from(served.url, spec_of(folder), tmp_path)
        (folder / "00000.tokens").rename(folder / "elsewhere")
        with pytest.raises(UnavailableError, match="HTTP Error 404"):
            dataset.batch("training", np.array([0]))
        assert served.of_tokens() == ["00000.tokens"]
        with pytest.raises(UnavailableError, match=r"nowhere/manifest\.json cannot be fetched"):
            fetched_from(f"{served.url}/nowhere", spec_of(folder), tmp_path / "other")


def test_a_server_without_ranges_is_refused(folder: Path, tmp_path: Path) -> None:
    with serving(folder) as served:
        dataset = fetched_from(served.url, spec_of(folder), tmp_path)
        served.knows_ranges = False
        with pytest.raises(BadDataError, match="is served whole where a part is asked for"):
            everything(dataset)


def test_other_tokens_behind_the_url_are_refused(folder: Path, tmp_path: Path) -> None:
    spec = spec_of(folder)
    tables = json.loads((folder / "manifest.json").read_text()) | {"vocab_size": 257}
    (folder / "manifest.json").write_text(json.dumps(tables))
    with serving(folder) as served, pytest.raises(BadDataError, match="holds other tokens than"):
        fetched_from(served.url, spec, tmp_path)


def test_fsspec_reads_from_where_it_can(folder: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    try:
        dataset = fetched_from("memory://bucket", spec_of(folder), tmp_path)
        assert same(dataset, here(folder))
    finally:
        memory.rm("/bucket", recursive=True)
    with pytest.raises(UnavailableError, match=r"nosuch://x cannot be read"):
        fetched_from("nosuch://x", spec_of(folder), tmp_path / "other")


def test_what_is_expected_is_on_its_way_in_the_order_of_its_use(
    folder: Path, tmp_path: Path
) -> None:
    with serving(folder) as served:
        dataset = fetched_from(served.url, spec_of(folder), tmp_path)
        wanted = np.arange(dataset.num_samples)[::-1]
        dataset.expect("training", wanted)
        entries = read_manifest(folder).training
        pieces = sum(-(-shard.num_tokens // PIECE) for shard in entries)
        deadline = time.monotonic() + 30
        while len(list((tmp_path / "cache").glob("*.piece"))) < pieces:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        order = list(dict.fromkeys(served.of_tokens()))
        assert order == [shard.tokens for shard in reversed(entries)]
        served.asked.clear()
        dataset.batch("training", wanted)
        assert not served.asked


def test_ranks_of_a_host_fetch_a_piece_once(tmp_path: Path) -> None:
    content = bytes(range(200))
    entry = FileEntry(bytes=200, pieces=piece_digests([content]))
    asked: list[int] = []
    both_wait = threading.Barrier(2)

    class Slow:
        name = "slow"

        def fetch(self, file: str, start: int, stop: int) -> bytes:
            asked.append(start)
            time.sleep(0.05)
            return content

    found: list[bytes] = []

    def rank() -> None:
        cache = PieceCache(tmp_path / "cache", limit_bytes=10**6)
        files = FetchedFiles([Slow()], {"a": entry}, 1024, cache)
        both_wait.wait()
        found.append(files.read("a", 10, 20).tobytes())

    threads = [threading.Thread(target=rank) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [content[10:20]] * 2
    assert asked == [0]


def test_what_is_missing_and_cannot_be_fetched_is_named(folder: Path, tmp_path: Path) -> None:
    spec = spec_of(folder)
    (folder / "00001.offsets").unlink()
    with pytest.raises(NoInputError, match=r"00001\.offsets is not there"):
        open_dataset(spec, DataPlaces(folder=Path("/")))
    of_url = spec.model_copy(
        update={"data": spec.data.model_copy(update={"paths": ("http://x/y",)})}
    )
    with pytest.raises(ConfigError, match="no folder for what is fetched"):
        open_dataset(of_url, DataPlaces(folder=tmp_path))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://bucket/x", True),
        ("HTTP://x", True),
        ("./tokens", False),
        ("C:/tokens", False),
        ("a/b://c", False),
    ],
)
def test_a_url_is_told_from_a_path(path: str, expected: bool) -> None:
    assert is_url(path) is expected
