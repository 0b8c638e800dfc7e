"""What a state consists of: the same for all who hold it, and refused unless it is one."""

import struct

import blake3
import pytest

from node.exchange.state.chunks import CHUNK_BYTES, HEADER, Manifest, ManifestError
from tests.unit.download_scene import NUM_ELEMENTS, cut_small, manifest_of, small_chunks, state_at
from tests.unit.golden.golden_file import matches_golden
from tests.unit.test_snapshot import LAYOUT, RUN, snapshot_at

__all__ = ["small_chunks"]


def test_a_manifest_never_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small(monkeypatch, 300)
    state = snapshot_at(7)
    manifest = Manifest.of(
        state.read, round=7, num_elements=100, run_digest=RUN, layout_digest=LAYOUT
    )
    body = manifest.to_body()
    assert matches_golden("manifest-body", body)
    assert len(body) == Manifest.body_bytes(100)
    assert Manifest.from_body(body) == manifest


def test_chunks_have_two_mebibytes() -> None:
    assert CHUNK_BYTES == 2 * 1024 * 1024  # a change of it is a change of the protocol


@pytest.mark.usefixtures("small_chunks")
def test_it_digests_the_whole_and_every_chunk() -> None:
    state = state_at(3)
    manifest = manifest_of(state)
    whole = state.parameters.tobytes() + state.momentum.tobytes()
    assert manifest.outer_digest == state.outer_digest()
    for index, digest in enumerate(manifest.chunk_digests):
        start, stop = manifest.span(index)
        assert digest == blake3.blake3(whole[start:stop]).digest()
    assert manifest.span(0)[0] == 0
    assert manifest.span(len(manifest.chunk_digests) - 1)[1] == len(whole)


@pytest.mark.parametrize("chunk_bytes", [7996, 8000, 8004, 3000])
def test_the_last_chunk_is_what_is_left(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    cut_small(monkeypatch, chunk_bytes)
    manifest = manifest_of(state_at(3))
    spans = [manifest.span(index) for index in range(len(manifest.chunk_digests))]
    assert sum(stop - start for start, stop in spans) == manifest.state_bytes == 8 * NUM_ELEMENTS
    assert all(0 < stop - start <= chunk_bytes for start, stop in spans)


@pytest.mark.usefixtures("small_chunks")
def test_what_is_no_manifest_is_refused() -> None:
    body = manifest_of(state_at(3)).to_body()
    fields = HEADER.unpack_from(body)

    def with_field(place: int, value: object) -> bytes:
        changed = (*fields[:place], value, *fields[place + 1 :])
        return HEADER.pack(*changed) + body[HEADER.size :]

    for wrong in (
        b"",
        body[: HEADER.size - 1],
        body[:-1],
        body + b"\0",
        with_field(0, b"atollmf2"),
        with_field(2, 0),
        with_field(2, 0)[: HEADER.size],
        with_field(2, 2**63),
        with_field(3, 0),
        with_field(3, fields[3] + 1),
        with_field(6, bytes(32)),
        body[:-1] + bytes([body[-1] ^ 1]),
    ):
        with pytest.raises(ManifestError):
            Manifest.from_body(wrong)
    assert struct.calcsize(HEADER.format) == 8 + 3 * 8 + 3 * 32
