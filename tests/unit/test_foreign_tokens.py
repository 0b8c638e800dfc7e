"""Tokens of other software are read as they are; its files are written here byte by byte."""

import json
import struct
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from node.island.data.foreign import Adopted, adopt
from node.island.data.manifest import Manifest, check_folder
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.data.token_shards import TokenShards
from protocol.errors import AtollError, BadDataError, ExitCode, NoInputError, UsageError
from protocol.terminal import cli, console
from tests.unit.tokens_scene import documents_of, prepared, spec_of, tokens_of, write_tokenizer

LENGTHS = [5, 40, 3, 1, 60, 33, 20]
TOKENS = np.arange(sum(LENGTHS)) * 7 % 301


def megatron_index(lengths: list[int], documents: list[int], *, code: int, size: int) -> bytes:
    """By the layout of Megatron-LM's indexed_dataset: documents are numbers of sequences."""
    places = [sum(lengths[:i]) * size for i in range(len(lengths))]
    return b"".join(
        (
            b"MMIDIDX\x00\x00",
            struct.pack("<Q", 1),
            struct.pack("<B", code),
            struct.pack("<Q", len(lengths)),
            struct.pack("<Q", len(documents)),
            struct.pack(f"<{len(lengths)}i", *lengths),
            struct.pack(f"<{len(places)}q", *places),
            struct.pack(f"<{len(documents)}q", *documents),
        )
    )


def write_megatron(path: Path, *, code: int = 8, letter: str = "H") -> Path:
    path.write_bytes(struct.pack(f"<{len(TOKENS)}{letter}", *TOKENS))
    size = struct.calcsize(letter)
    every = list(range(len(LENGTHS) + 1))
    path.with_suffix(".idx").write_bytes(megatron_index(LENGTHS, every, code=code, size=size))
    return path


def adopted(*files: Path, out: Path, **options: object) -> Manifest:
    wanted = {"held_out": 0.25, "vocab_size": 301, **options}
    return adopt(Adopted(files=files, out=out, **wanted), on_state=lambda state: None)  # type: ignore[arg-type] # options are typed where they are used


def read_back(folder: Path) -> tuple[list[int], list[int]]:
    """All tokens of both splits, one after the other."""
    spec = spec_of(folder, context=8)
    dataset = open_dataset(spec, DataPlaces(folder=Path("/")))
    assert isinstance(dataset, TokenShards)
    manifest = dataset._manifest
    found = []
    for shards in (manifest.training, manifest.held_out):
        tokens = [tokens_of(folder, manifest, shard) for shard in shards]
        found.append(np.concatenate(tokens).tolist())
    samples = dataset.batch("training", np.arange(dataset.num_samples)).tokens
    assert samples[0].tolist() == found[0][:9]
    return found[0], found[1]


@pytest.mark.parametrize(("code", "letter"), [(8, "H"), (4, "i"), (3, "h")])
def test_megatrons_files_are_read_with_their_documents(
    code: int, letter: str, tmp_path: Path
) -> None:
    path = write_megatron(tmp_path / "a.bin", code=code, letter=letter)
    manifest = adopted(path, out=tmp_path / "out")
    trained, kept_back = read_back(tmp_path / "out")
    assert trained + kept_back == TOKENS.tolist()
    # A quarter of 162 tokens; the document around token 121 begins at 109.
    assert len(trained) == sum(LENGTHS[:5]) == 109
    [shard], [held_out] = manifest.training, manifest.held_out
    assert (shard.num_documents, held_out.num_documents) == (5, 2)
    offsets = np.fromfile(tmp_path / "out" / str(shard.offsets), "<u8")
    assert offsets.tolist() == [0, 5, 45, 48, 49, 109]
    offsets = np.fromfile(tmp_path / "out" / str(held_out.offsets), "<u8")
    assert offsets.tolist() == [0, 33, 53]
    assert (tmp_path / "out" / "00000.tokens").resolve() == path.resolve()
    assert manifest.text_bytes("training") is None


def test_documents_of_several_sequences_are_documents(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a.bin")
    index = megatron_index(LENGTHS, [0, 2, 2, 5, 7], code=8, size=2)  # one is empty
    path.with_suffix(".idx").write_bytes(index)
    manifest = adopted(path, out=tmp_path / "out", held_out=0.01)
    offsets = np.fromfile(tmp_path / "out" / str(manifest.training[0].offsets), "<u8")
    assert offsets.tolist() == [0, 45, 109]


def test_datatroves_files_are_read_with_what_is_not_to_be_learned(tmp_path: Path) -> None:
    (tmp_path / "a.ds").write_bytes(struct.pack(f"<{len(TOKENS)}I", *TOKENS))
    ends = np.cumsum(LENGTHS).tolist()
    (tmp_path / "a.ds.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    learned = [i % 3 != 0 for i in range(len(TOKENS))]
    (tmp_path / "a.ds.loss").write_bytes(struct.pack(f"<{len(learned)}?", *learned))
    manifest = adopted(tmp_path / "a.ds", out=tmp_path / "out")
    assert manifest.token_bytes == 4
    trained, kept_back = read_back(tmp_path / "out")
    assert trained + kept_back == TOKENS.tolist()
    dataset = open_dataset(spec_of(tmp_path / "out", context=8), DataPlaces(folder=Path("/")))
    for split, first in (("training", 0), ("held_out", 109)):
        batch = dataset.batch(split, np.array([1]))  # type: ignore[arg-type]
        assert batch.counted is not None
        assert batch.counted[0].tolist() == learned[first + 9 : first + 17]
    assert manifest.num_tokens("training") == sum(learned[:109])


def test_flat_files_are_read_with_and_without_the_header_of_llm_c(tmp_path: Path) -> None:
    flat = struct.pack(f"<{len(TOKENS)}H", *TOKENS)
    (tmp_path / "plain.bin").write_bytes(flat)
    header = struct.pack("<256i", 20240520, 1, len(TOKENS), *([0] * 253))
    (tmp_path / "headed.bin").write_bytes(header + flat)
    for name in ("plain", "headed"):
        adopted(tmp_path / f"{name}.bin", out=tmp_path / name, token_bytes=2)
        trained, kept_back = read_back(tmp_path / name)
        assert trained + kept_back == TOKENS.tolist()
        assert len(kept_back) == 40


def test_a_file_of_its_own_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(TOKENS.astype("<u2").tobytes())
    (tmp_path / "b.bin").write_bytes(TOKENS[::-1].astype("<u2").tobytes())
    held_out = (tmp_path / "b.bin",)
    adopted(tmp_path / "a.bin", out=tmp_path / "out", token_bytes=2, held_out_files=held_out)
    assert read_back(tmp_path / "out") == (TOKENS.tolist(), TOKENS[::-1].tolist())


def index_with(change: str) -> bytes:
    whole = bytearray(megatron_index(LENGTHS, list(range(8)), code=8, size=2))
    match change:
        case "magic":
            whole[0] ^= 1
        case "version":
            whole[9] = 2
        case "type":
            whole[17] = 6
        case "places":
            whole[34 + 4 * 7 + 8] ^= 1
        case "truncated":
            del whole[-4:]
        case "documents":
            whole[-8] = 6
    return bytes(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("magic", "does not begin as Megatron's"),
        ("version", "version 2"),
        ("type", "numbers of type 6"),
        ("places", "do not lie one after the other"),
        ("truncated", "has 178 bytes and says that it has 182"),
        ("documents", "do not lie one after the other"),
    ],
)
def test_a_damaged_index_is_named(change: str, message: str, tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a.bin")
    path.with_suffix(".idx").write_bytes(index_with(change))
    with pytest.raises(BadDataError, match=rf"a\.idx cannot be used: .*{message}"):
        adopted(path, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, UsageError, "does not say how many bytes a token of it has"),
        ({"token_bytes": 2, "vocab_size": None}, UsageError, "how large its vocabulary is"),
        (
            {"token_bytes": 2, "vocab_size": 250},
            BadDataError,
            r"has the token 2\d\d, and a vocabulary of 250",
        ),
        ({"token_bytes": 4}, BadDataError, "has the token"),
    ],
)
def test_what_a_flat_file_does_not_say_has_to_be_said(
    options: dict[str, object], error: type[AtollError], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.bin").write_bytes(TOKENS.astype("<u2").tobytes())
    with pytest.raises(error, match=message):
        adopted(tmp_path / "a.bin", out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_comes_along(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    path = write_megatron(tmp_path / "a.bin")
    manifest = adopted(path, out=tmp_path / "out", vocab_size=None, tokenizer=folder)
    assert manifest.tokenizer == "tokenizer.json"
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    read_back(tmp_path / "out")


def test_the_command_tells_tokens_from_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_megatron(tmp_path / "a.bin")
    (tmp_path / "b.txt").write_text("text")
    command = [
        "data",
        "prepare",
        "a.*",
        "--out",
        "out",
        "--vocab-size",
        "301",
        "--held-out",
        "0.25",
    ]
    assert console.run(cli.root, command) == ExitCode.OK
    assert 'source = "tokens"' in capsys.readouterr().out
    assert console.run(cli.root, ["data", "check", "out"]) == ExitCode.OK
    assert (
        console.run(cli.root, ["data", "prepare", "*.bin", "*.txt", "--out", "x"]) == ExitCode.USAGE
    )
    for option, value in (("--pack", "16"), ("--repeat", "a.*=2"), ("--field", "raw")):
        capsys.readouterr()
        other = [*command[:4], "y", *command[5:], option, value]
        assert console.run(cli.root, other) == ExitCode.USAGE
        assert f"{option} {value}" in capsys.readouterr().err
    assert (
        console.run(cli.root, ["data", "prepare", "b.txt", "--out", "z", "--vocab-size", "9"])
        == ExitCode.USAGE
    )
    assert not {"x", "y", "z"} & {path.name for path in tmp_path.iterdir()}


def test_a_folder_that_datasets_saved_is_read(tmp_path: Path) -> None:
    """As save_to_disk writes it: Arrow streams of record batches, and a state that names them."""
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    texts = [f"document {i} " * 5 for i in range(90)]
    schema = pyarrow.schema([("id", pyarrow.int64()), ("text", pyarrow.string())])
    for number in range(2):
        name = f"data-{number:05}-of-00002.arrow"
        with (
            pyarrow.OSFile(str(folder / name), "wb") as file,
            pyarrow.ipc.new_stream(file, schema) as stream,
        ):
            for start in range(45 * number, 45 * (number + 1), 10):
                own = texts[start : min(start + 10, 45 * (number + 1))]
                stream.write_batch(pyarrow.record_batch([list(range(len(own))), own], schema))
    files = [{"filename": f"data-{number:05}-of-00002.arrow"} for number in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
    (folder / "dataset_info.json").write_text("{}")
    (folder.parent / "dataset_dict.json").write_text('{"splits": ["train"]}')
    prepared(folder, out=tmp_path / "out")
    found = documents_of(tmp_path / "out", "training") + documents_of(tmp_path / "out", "held_out")
    assert sorted(found) == sorted(text.encode() for text in texts)
    with pytest.raises(AtollError, match="holds several splits: train"):
        prepared(folder.parent, out=tmp_path / "other")
    (folder / files[1]["filename"]).write_bytes(b"no arrow")
    with pytest.raises(BadDataError, match=r"arrow is damaged"):
        prepared(folder, out=tmp_path / "other")


def test_a_link_to_tokens_that_were_moved_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(2000))
    adopted(tmp_path / "a.bin", out=tmp_path / "out", token_bytes=2, vocab_size=9, held_out=0.2)
    spec = spec_of(tmp_path / "out", vocab_size=9)
    (tmp_path / "a.bin").rename(tmp_path / "b.bin")
    said = f"00000.tokens is a link to {tmp_path / 'a.bin'}, which is not there"
    for look in (
        lambda: check_folder(tmp_path / "out", on_state=lambda state: None),
        lambda: open_dataset(spec, DataPlaces(folder=Path("/"))),
    ):
        with pytest.raises(NoInputError, match=said) as caught:
            look()
        assert "prepare it again where it is now" in caught.value.next_step
