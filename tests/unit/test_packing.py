"""Rows hold whole documents, begin with one, and what they are filled up with is never learned."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.island.data.opening import open_dataset
from node.island.data.packing import best_fit
from node.island.data.places import DataPlaces
from node.island.data.token_shards import TokenShards
from protocol.errors import ConfigError
from tests.unit.tokens_scene import prepared, spec_of

ROW = 17


@given(st.lists(st.integers(1, 20), max_size=200), st.integers(20, 30))
def test_every_piece_is_in_one_row_that_it_fits(lengths: list[int], row: int) -> None:
    rows = best_fit(np.array(lengths, np.int64), row)
    assert sorted(piece for own in rows for piece in own) == list(range(len(lengths)))
    filled = [sum(lengths[piece] for piece in own) for own in rows]
    assert all(0 < used <= row for used in filled)
    # No two rows could be one: else the second was opened in vain.
    assert sum(2 * used <= row for used in filled) <= 1


def test_a_piece_goes_where_it_leaves_the_least_room() -> None:
    assert best_fit(np.array([5, 7, 3, 2]), 10) == [[1, 2], [0, 3]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Documents of bytes between 2 and 60 long, packed into rows of 17 tokens."""
    texts = [chr(ord("a") + i % 26) * (2 + i * 7 % 59) for i in range(200)]
    lines = [json.dumps({"text": f"{text}{i}"}) + "\n" for i, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    prepared(tmp_path / "a.jsonl", out=tmp_path / "out", row=ROW)
    return tmp_path / "out"


def opened(folder: Path, *, context: int = ROW - 1) -> TokenShards:
    spec = spec_of(folder, context=context)
    dataset = open_dataset(spec, DataPlaces(folder=Path("/")))
    assert isinstance(dataset, TokenShards)
    return dataset


def test_packed_rows_hold_every_document_and_count_no_padding(folder: Path, tmp_path: Path) -> None:
    dataset = opened(folder)
    batch = dataset.batch("training", np.arange(dataset.num_samples))
    held_out = dataset.batch("held_out", np.arange(dataset.num_held_out_samples))
    pieces: list[bytes] = []
    for tokens, counted in ((batch.tokens, batch.counted), (held_out.tokens, held_out.counted)):
        assert counted is not None
        for row, own in zip(tokens, counted, strict=True):
            assert row[0] != 0  # a row begins with a document, which begins with no zero byte
            num_used = 1 + int(own.sum())
            assert own[: num_used - 1].all()  # what is not counted is the end of the row
            assert not row[num_used:].any()
            pieces += row[:num_used].astype(np.uint8).tobytes().split(b"\0")
    texts = [json.loads(line)["text"].encode() for line in (tmp_path / "a.jsonl").open()]
    assert sum(map(len, pieces)) == sum(map(len, texts))
    whole = {text for text in texts if len(text) < ROW}
    assert len(whole) > 20
    assert whole <= set(pieces)  # only what is longer than a row is cut
    num_counted = dataset.num_counted("training", np.arange(dataset.num_samples))
    assert num_counted == int(batch.counted.sum()) < batch.counted.size  # type: ignore[union-attr]
    used = num_counted + len(batch.tokens)
    assert used / batch.tokens.size > 0.95


def test_packed_tokens_serve_the_context_that_they_were_packed_for(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"packed for a context of 16, and \[model\] context is 32"
    ):
        opened(folder, context=32)


def test_documents_of_a_row_are_told_apart(folder: Path) -> None:
    spec = spec_of(folder, context=ROW - 1)
    plain = opened(folder)
    told = TokenShards(plain._manifest, plain._files, context=ROW - 1, has_documents=True)
    indices = np.arange(plain.num_samples)
    batch = told.batch("training", indices)
    assert batch.documents is not None and batch.counted is not None
    for row, documents, counted in zip(batch.tokens, batch.documents, batch.counted, strict=True):
        assert documents[0] == 0
        num_used = 1 + int(counted.sum())
        ends = np.concatenate(([0], np.cumsum(row[: num_used - 1] == 0)))
        assert np.array_equal(documents[:num_used], ends)
    assert spec.model.context == ROW - 1
