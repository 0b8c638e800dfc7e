"""The chunks that have come, in memory and on disk, over restarts and crashes."""

import errno
import os
from pathlib import Path

import pytest

from node.disk.snapshots import Snapshot
from node.exchange.state.chunks import Arrivals, Manifest
from protocol.errors import SystemRefusedError
from tests.unit.download_scene import (
    CHUNK_BYTES,
    LAYOUT,
    NUM_CHUNKS,
    RUN,
    assert_is,
    manifest_of,
    small_chunks,
    state_at,
)

__all__ = ["small_chunks"]

pytestmark = pytest.mark.usefixtures("small_chunks")

STATE = state_at(7)
STATE_FILE = "round-00000007.arriving"


def arrivals(folder: Path | None) -> Arrivals:
    return Arrivals(folder, run_digest=RUN, layout_digest=LAYOUT)


def chunk(manifest: Manifest, index: int, state: Snapshot = STATE) -> bytes:
    return state.read(*manifest.span(index))


def begin(folder: Path | None, *come: int) -> Arrivals:
    """A state of which some chunks have come."""
    store, manifest = arrivals(folder), manifest_of(STATE)
    arriving = store.begin(manifest)
    for index in come:
        arriving.put(index, chunk(manifest, index))
    return store


def resumed(folder: Path) -> Arrivals:
    store = arrivals(folder)
    store.resume()
    return store


@pytest.mark.parametrize("on_disk", [True, False])
def test_chunks_in_any_order_make_the_state(tmp_path: Path, on_disk: bool) -> None:
    store = begin(tmp_path if on_disk else None, *reversed(range(NUM_CHUNKS)))
    assert store.current is not None
    assert store.current.missing == set()
    found = store.current.snapshot()
    assert_is(found, STATE)
    assert found is not None
    with pytest.raises(ValueError, match="read-only"):
        found.parameters[0] = 1
    store.discard()
    assert_is(found, STATE)  # it stays readable while somebody takes it over
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("on_disk", [True, False])
def test_chunks_that_do_not_make_the_state_make_nothing(tmp_path: Path, on_disk: bool) -> None:
    store = begin(tmp_path if on_disk else None, *range(NUM_CHUNKS))
    assert store.current is not None
    store.current.put(3, bytes(CHUNK_BYTES))
    assert store.current.snapshot() is None
    store.current.check()
    assert store.current.missing == {3}


def test_what_has_come_is_there_after_a_restart(tmp_path: Path) -> None:
    begin(tmp_path, 0, 5, NUM_CHUNKS - 1)
    store = resumed(tmp_path)
    assert store.current is not None
    assert store.current.manifest == manifest_of(STATE)
    assert store.current.missing == set(range(NUM_CHUNKS)) - {0, 5, NUM_CHUNKS - 1}
    for index in sorted(store.current.missing):
        store.current.put(index, chunk(store.current.manifest, index))
    assert_is(store.current.snapshot(), STATE)


def test_what_a_crash_left_half_written_is_missing(tmp_path: Path) -> None:
    begin(tmp_path, 0, 1)
    content = bytearray((tmp_path / STATE_FILE).read_bytes())
    content[CHUNK_BYTES + 50 : 2 * CHUNK_BYTES] = bytes(CHUNK_BYTES - 50)
    (tmp_path / STATE_FILE).write_bytes(content)
    store = resumed(tmp_path)
    assert store.current is not None
    assert 1 in store.current.missing
    assert 0 not in store.current.missing


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"short"),
        lambda path: path.write_bytes(path.read_bytes()[1:]),
        lambda path: path.write_bytes(path.read_bytes() + b"0"),
        lambda path: path.write_bytes(path.read_bytes().replace(b"atollmf1", b"nonsense")),
    ],
)
def test_what_cannot_be_gone_on_with_is_removed(tmp_path: Path, damage: object) -> None:
    begin(tmp_path, 0, 1)
    damage(tmp_path / STATE_FILE)  # type: ignore[operator]
    assert resumed(tmp_path).current is None
    assert list(tmp_path.iterdir()) == []


def test_what_a_process_left_that_was_killed_while_it_began_is_removed(tmp_path: Path) -> None:
    (tmp_path / f".{STATE_FILE}.new").write_bytes(bytes(8000))
    (tmp_path / "arriving.state").write_bytes(b"of an earlier version")
    (tmp_path / "round-00000007.safetensors").write_bytes(b"ours")
    assert resumed(tmp_path).current is None
    assert [path.name for path in tmp_path.iterdir()] == ["round-00000007.safetensors"]


def test_what_belongs_to_another_run_is_removed(tmp_path: Path) -> None:
    begin(tmp_path, 0, 1)
    other = Arrivals(tmp_path, run_digest=LAYOUT, layout_digest=LAYOUT)
    other.resume()
    assert other.current is None
    assert list(tmp_path.iterdir()) == []


def test_another_state_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    store = begin(tmp_path, *range(NUM_CHUNKS))
    arriving = store.begin(manifest_of(state_at(8)))
    assert arriving.missing == set(range(NUM_CHUNKS))
    assert store.begin(manifest_of(state_at(8))) is arriving  # the same goes on
    assert resumed(tmp_path).current is not None


def test_a_full_disk_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        assert length == manifest_of(STATE).state_bytes
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(SystemRefusedError, match="No space left"):
        begin(tmp_path)
    assert not list(tmp_path.iterdir())
    assert resumed(tmp_path).current is None
