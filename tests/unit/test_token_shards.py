"""Samples of token shards are those of the text, and what is damaged is named before it is trained."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.island.data import manifest as manifests
from node.island.data.manifest import manifest_of, read_manifest
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.data.token_shards import MappedFiles, TokenShards
from protocol.errors import AtollError, BadDataError, ConfigError, ExitCode, NoInputError
from protocol.run.models import DecoderModel
from protocol.run.run_spec import RunSpec
from tests.unit.tokens_scene import prepared, spec_of, tokens_of, write_jsonl, write_tokenizer

HERE = DataPlaces(folder=Path("/"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tokens in several shards, with a tokenizer."""
    monkeypatch.setattr("node.island.data.shard_plan.LEAST_SHARD_BYTES", 4096)
    monkeypatch.setattr("node.island.data.shard_plan.SHARDS_AIMED_AT", 1 << 30)
    write_jsonl(tmp_path / "a.jsonl", 60)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    prepared(tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=tokenizer)
    return tmp_path / "out"


def opened(folder: Path, **options: int) -> TokenShards:
    dataset = open_dataset(spec_of(folder, **options), HERE)
    assert isinstance(dataset, TokenShards)
    return dataset


def test_samples_cover_each_token_of_each_shard_once_as_a_target(folder: Path) -> None:
    manifest = read_manifest(folder)
    dataset = opened(folder)
    tokens = dataset.batch("training", np.arange(dataset.num_samples)).tokens
    assert tokens.shape == (dataset.num_samples, 17) and tokens.dtype == np.int64
    at = 0
    for shard in manifest.training:
        whole = tokens_of(folder, manifest, shard)
        own = tokens[at : at + (len(whole) - 1) // 16]
        targets = own[:, 1:].flatten()
        assert np.array_equal(targets, whole[1 : len(targets) + 1])
        assert np.array_equal(own[:, 0], whole[: len(targets) : 16])
        assert len(whole) - 1 - len(targets) < 16
        at += len(own)
    assert at == dataset.num_samples > 100
    assert len(manifest.training) > 3


def test_samples_come_in_the_order_that_is_asked_for_from_the_split_that_is_asked_for(
    folder: Path,
) -> None:
    dataset = opened(folder)
    wanted = np.array([70, 3, 3, dataset.num_samples - 1])
    found = dataset.batch("training", wanted)
    for row, index in zip(found.tokens, wanted, strict=True):
        assert np.array_equal(row, dataset.batch("training", np.array([index])).tokens[0])
    kept_back = dataset.batch("held_out", np.arange(dataset.num_held_out_samples)).tokens
    assert len(kept_back) > 5
    assert dataset.num_counted("training", wanted) == 4 * 16
    assert found.counted is None and found.documents is None
    with pytest.raises(IndexError):
        dataset.batch("training", np.array([dataset.num_samples]))


def test_the_summary_names_the_manifest(folder: Path) -> None:
    manifest = read_manifest(folder)
    summary = opened(folder).summary()
    assert summary.digest == manifest.digest()
    assert (summary.num_samples, summary.num_bytes) == (
        opened(folder).num_samples,
        manifest.text_bytes("training"),
    )


def test_opening_reads_no_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the start of a node would take longer the more data there is."""
    read: list[str] = []
    real_open = Path.open

    def noted(self: Path, *arguments: Any, **named: Any) -> Any:
        read.append(self.name)
        return real_open(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", noted)
    opened(folder)
    assert set(read) <= {"manifest.json", "tokenizer.json"}


def test_a_flipped_byte_is_named_with_its_shard_when_it_is_read(folder: Path) -> None:
    path = folder / "00001.tokens"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    dataset = opened(folder)
    num_first = (read_manifest(folder).training[0].num_tokens - 1) // 16
    dataset.batch("training", np.arange(num_first))
    with pytest.raises(BadDataError, match=r"00001\.tokens is damaged: piece 0, from byte 0 on"):
        dataset.batch("training", np.array([num_first]))


def test_only_the_piece_that_is_read_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(range(200))
    (tmp_path / "0.tokens").write_bytes(content)
    entry = manifests.FileEntry(
        bytes=200, pieces=manifests.piece_digests(content[i : i + 64] for i in range(0, 200, 64))
    )
    files = MappedFiles(tmp_path, {"0.tokens": entry}, 64)
    (tmp_path / "0.tokens").write_bytes(content[:130] + b"\0" + content[131:])
    assert files.read("0.tokens", 10, 128).tobytes() == content[10:128]
    assert files.read("0.tokens", 195, 200).tobytes() == content[195:]
    with pytest.raises(BadDataError, match="piece 2, from byte 128 on"):
        files.read("0.tokens", 100, 129)


def flip(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_a_shard_that_was_cut_since_the_start_is_told_before_it_is_mapped(
    folder: Path, num_bytes: int
) -> None:
    """Who reads behind the end of what is mapped is killed by SIGBUS, without a word."""
    dataset = open_dataset(spec_of(folder), HERE)
    os.truncate(folder / "00000.tokens", num_bytes)
    with pytest.raises(BadDataError, match=rf"00000\.tokens has {num_bytes} bytes, and"):
        dataset.batch("training", np.arange(1))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("break_it", "error", "message"),
    [
        (
            lambda folder: truncate(folder / "00000.tokens"),
            BadDataError,
            r"00000\.tokens has .* bytes, and",
        ),
        (
            lambda folder: truncate(folder / "00000.offsets"),
            BadDataError,
            r"00000\.offsets has .* bytes",
        ),
        (
            lambda folder: (folder / "00000.offsets").unlink(),
            NoInputError,
            r"00000\.offsets is not there",
        ),
        (lambda folder: (folder / "manifest.json").unlink(), NoInputError, "holds no tokens"),
        (
            lambda folder: flip(folder / "manifest.json"),
            BadDataError,
            "is no manifest of tokens: not JSON",
        ),
        (
            lambda folder: flip(folder / "tokenizer.json"),
            BadDataError,
            "is not the tokenizer that made",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_in_a_sentence(
    break_it: object, error: type[AtollError], message: str, folder: Path
) -> None:
    spec = spec_of(folder)
    break_it(folder)  # type: ignore[operator]
    with pytest.raises(error, match=message) as caught:
        open_dataset(spec, HERE)
    assert caught.value.next_step
    assert caught.value.exit_code in (ExitCode.BAD_DATA, ExitCode.NO_INPUT)


def test_tokens_of_another_run_are_refused_by_digest(folder: Path, tmp_path: Path) -> None:
    spec = spec_of(folder)
    prepared(tmp_path / "a.jsonl", out=tmp_path / "bytes")
    moved = spec.model_copy(
        update={"data": spec.data.model_copy(update={"paths": (str(tmp_path / "bytes"),)})}
    )
    with pytest.raises(BadDataError, match="holds other tokens than the run's: their digest is"):
        open_dataset(moved, HERE)


def test_tokens_beyond_the_models_vocabulary_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"a vocabulary of \d+, and \[model\] vocab_size is 200"):
        opened(folder, vocab_size=200)


def test_too_few_samples_for_a_batch_are_refused(folder: Path) -> None:
    with pytest.raises(NoInputError, match="one batch takes 5000"):
        opened(folder, batch=5000)


def test_bytes_need_a_model_with_every_byte(tmp_path: Path) -> None:
    spec = RunSpec(model=DecoderModel(vocab_size=100))
    with pytest.raises(ConfigError, match="256 different bytes"):
        open_dataset(spec, HERE)


def test_the_digest_is_of_what_a_manifest_says_not_of_how_it_is_written(folder: Path) -> None:
    manifest = read_manifest(folder)
    packed = json.dumps(json.loads((folder / "manifest.json").read_text())).encode()
    assert manifest_of(packed, origin="x").digest() == manifest.digest()
    other = manifest.model_copy(update={"vocab_size": 401})
    assert other.digest() != manifest.digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "atoll-tokens-9"}, "format"),
        ({"token_bytes": 3}, "token_bytes"),
        ({"more": 1}, "more"),
        ({"row": 7}, "not whole rows"),
        ({"piece_bytes": 10}, "digests for"),
        ({"files": {}}, "shorter than a shard"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    change: dict[str, object], message: str, folder: Path
) -> None:
    tables = json.loads((folder / "manifest.json").read_text()) | change
    with pytest.raises(BadDataError, match=message):
        manifest_of(json.dumps(tables).encode(), origin="manifest.json")


def test_a_file_of_a_manifest_lies_in_its_folder(folder: Path) -> None:
    text = (folder / "manifest.json").read_text().replace("00000.tokens", "../00000.tokens")
    with pytest.raises(BadDataError, match="no manifest"):
        manifest_of(text.encode(), origin="manifest.json")
