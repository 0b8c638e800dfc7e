"""Held-out text is never trained on, whatever a node has of the text."""

import glob
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.island.data.dataset import Corpus, read_corpus, sizes_of_splits, stdlib_files, text_files
from node.kept import keep_corpus, kept_corpus
from protocol.errors import NoInputError
from protocol.run.run_spec import DataSection
from protocol.wire.rounds import CorpusSummary, Digest

CONTEXT = 8
RUN = Digest(b"r" * 32)


def read(folder: Path, *paths: str, held_out: float = 0.3, batch: int = 1) -> Corpus:
    data = DataSection(source="text", paths=paths, held_out=held_out)
    return read_corpus(data, context=CONTEXT, batch=batch, folder=folder)


def write(folder: Path, num_files: int) -> dict[str, bytes]:
    """Files of which every 4-byte word says whose it is."""
    texts = {f"{i:02}.txt": f"<{i:02}>".encode() * (30 + i) for i in range(num_files)}
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    return texts


def names_in(split: np.ndarray) -> set[bytes]:
    return {part[1:3] for text in split.tobytes().split(b"\0") for part in text.split(b">") if part}


def test_whole_files_are_held_out_and_every_file_is_somewhere(tmp_path: Path) -> None:
    texts = write(tmp_path, 30)
    corpus = read(tmp_path, "*.txt")
    trained, kept_back = names_in(corpus.training), names_in(corpus.held_out)
    assert not trained & kept_back
    assert trained | kept_back == {name[:2].encode() for name in texts}
    assert corpus.training.tobytes().count(b"\0") == len(trained) - 1
    assert kept_back


def test_a_file_stays_in_its_split_whatever_other_files_a_node_has(tmp_path: Path) -> None:
    write(tmp_path, 30)
    everything = names_in(read(tmp_path, "*.txt").held_out)
    some = names_in(read(tmp_path, "0*.txt", "2*.txt").held_out)
    assert some == {name for name in everything if not name.startswith(b"1")}


def test_where_the_text_lies_does_not_matter(tmp_path: Path) -> None:
    for place in ("here", "very/far"):
        (tmp_path / place).mkdir(parents=True)
        write(tmp_path / place, 30)
    here = read(tmp_path, "here/*.txt")
    far = read(Path("/"), f"{tmp_path}/very/far/**/*.txt")
    assert here.digest == far.digest
    assert np.array_equal(here.held_out, far.held_out)
    (tmp_path / "here/00.txt").write_bytes(b"different" * 20)
    (tmp_path / "here/01.txt").write_bytes(b"different" * 20)
    assert read(tmp_path, "here/*.txt").digest != far.digest


def test_one_big_file_is_held_out_in_blocks_that_no_training_sample_touches(tmp_path: Path) -> None:
    digits = np.arange(100_000)[:, None] // 255 ** np.arange(4) % 255
    numbers = (digits + 1).astype(np.uint8)  # each word of 4 is unique; none holds a zero
    (tmp_path / "one").write_bytes(numbers.tobytes())
    corpus = read(tmp_path, "one", held_out=0.2)
    kept_back = corpus.held_out[corpus.held_out != 0]
    share = len(kept_back) / numbers.nbytes
    assert 0.05 < share < 0.4

    def words(split: np.ndarray) -> set[bytes]:
        pieces = _pieces_between_joints(split)
        return {piece[i : i + 4] for piece in pieces for i in range(0, len(piece), 4)}

    assert not words(corpus.training) & words(corpus.held_out)
    assert len(words(corpus.training) | words(corpus.held_out)) == len(numbers)


def _pieces_between_joints(split: np.ndarray) -> list[bytes]:
    """Cuts at the joints, which are zero bytes after whole blocks of 4 KiB."""
    text, pieces = split.tobytes(), []
    while text:
        end = 4096
        while end < len(text) and text[end] != 0:
            end += 4096
        pieces.append(text[:end])
        text = text[end + 1 :]
    return pieces


def test_windows_cover_each_byte_once_as_a_target(tmp_path: Path) -> None:
    write(tmp_path, 30)
    corpus = read(tmp_path, "*.txt")
    windows = corpus.windows(corpus.training, np.arange(corpus.num_samples))
    assert windows.shape == (corpus.num_samples, CONTEXT + 1)
    targets = windows[:, 1:].flatten()
    assert np.array_equal(targets, corpus.training[1 : len(targets) + 1])
    assert len(corpus.training) - 1 - len(targets) < CONTEXT
    exact = replace(corpus, training=np.arange(3 * CONTEXT, dtype=np.uint8))
    assert exact.num_samples == 2  # the third window would lack the byte after its last
    summary = corpus.summary()
    assert (summary.num_samples, summary.num_bytes) == (len(windows), len(corpus.training))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30_000), min_size=1, max_size=9),
    share=st.floats(0.001, 0.5),
)
def test_the_sizes_of_both_splits_are_told_without_reading(
    sizes: list[int], share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("sizes")
    for number, size in enumerate(sizes):
        (folder / f"{number}.txt").write_bytes(b"t" * size)
    data = DataSection(source="text", paths=("*.txt",), held_out=share)
    told = sizes_of_splits(text_files(data.paths, folder), share)
    try:
        corpus = read_corpus(data, context=1, batch=1, folder=folder)
    except NoInputError as error:
        assert f"{told[0]:,} bytes to train on and {told[1]:,} held out" in error.what
    else:
        assert told == (len(corpus.training), len(corpus.held_out))


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("no/*.text",), r"'no/\*\.text' of \[data\] paths matches no file"),
        (("sub*",), r"'sub\*' of \[data\] paths matches only folders"),
        (("0*.txt",), r"samples of 9 bytes, but one batch takes 1000"),
    ],
)
def test_text_that_is_not_there_or_too_little_is_refused(
    paths: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    write(tmp_path, 10)
    (tmp_path / "sub").mkdir()
    with pytest.raises(NoInputError, match=message):
        read(tmp_path, *paths, batch=1000)


def test_overlapping_patterns_take_a_file_once_and_names_may_look_like_globs(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "odd[1]"
    folder.mkdir()
    write(folder, 3)
    (folder / "a[b].txt").write_bytes(b"x")
    found = text_files(["*.txt", "a[b].txt", f"{glob.escape(str(folder))}/0*.txt"], folder)
    assert [file.name for file in found] == ["00.txt", "01.txt", "02.txt", "a[b].txt"]


def test_the_standard_library_comes_without_its_tests() -> None:
    names = [file.name for file in stdlib_files()]
    assert names == sorted(names)
    assert "asyncio/base_events.py" in names
    assert "json/decoder.py" in names
    assert not [n for n in names if {"test", "tests", "site-packages"} & set(n.split("/"))]


def test_a_file_more_shows_in_the_summary_whichever_split_it_is_in(tmp_path: Path) -> None:
    """As nodes compare them; a node remembers its own whole."""
    write(tmp_path, 30)
    before = read(tmp_path, "*.txt").summary()
    keep_corpus(tmp_path, RUN, before)
    assert kept_corpus(tmp_path, RUN) == before
    splits = set()
    for number in range(40):
        (tmp_path / f"new{number}.txt").write_bytes(b"what came later " * 9)
        after = read(tmp_path, "*.txt").summary()
        (tmp_path / f"new{number}.txt").unlink()
        assert not after.is_same(before)
        splits.add(after.digest == before.digest)
    assert splits == {True, False}, "some were held out"
    assert replace(before, held_out_digest=None).is_same(before)


@pytest.mark.parametrize("held_out_digest", [None, Digest(b"h" * 32)])
def test_a_node_remembers_what_its_ranks_train_on(
    tmp_path: Path, held_out_digest: Digest | None
) -> None:
    told = CorpusSummary(digest=RUN, num_samples=3, num_bytes=4, held_out_digest=held_out_digest)
    keep_corpus(tmp_path, RUN, told)
    assert kept_corpus(tmp_path, RUN) == told
    assert kept_corpus(tmp_path, Digest(b"o" * 32)) is None
