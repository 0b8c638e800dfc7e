"""Tokens to which others are added: what new ones have in common with them, and how both become one folder.

The folder of before stays as it is, for a run that has begun reads it. What lies in it is linked into the
new one, or copied where the disk does not link. A document is held out by its hash, so it is in the split
in which it was before; where files of their own were held out, their hashes lie beside the tokens.
"""

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import blake3

from node.island.data.manifest import (
    HELD_OUT_HASHES_FILE,
    TOKENIZER_FILE,
    Manifest,
    check_sizes,
    entry_of_file,
    read_manifest,
)
from node.island.data.shard_files import ShardReader, WrittenFiles
from node.island.data.shard_plan import Wanted
from node.island.data.tokenizing import open_tokenizer, tokenizer_files
from protocol.errors import BadDataError, CannotCreateError, UsageError
from protocol.files.durable import refusing
from protocol.terminal.console import bytes_in_words


def manifest_before(folder: Path, out: Path) -> Manifest:
    """The manifest of tokens to which others are added. Raises AtollError where they cannot be."""
    if folder.resolve() == out.resolve():
        raise CannotCreateError(
            f"--add-to {folder} stays as it is, for a run that has begun reads it, and --out names it too",
            next_step="name a new folder with --out: what is there already is linked, and takes no room",
        )
    before = read_manifest(folder)
    if before.held_out_below is None:
        raise BadDataError(
            f"{folder} does not say what it holds out, so that it might be trained on: other software wrote "
            "its tokens, or an earlier Atoll",
            next_step="prepare all of the text anew, without --add-to",
        )
    check_sizes(folder, before.files)
    return before


def going_on(wanted: Wanted, folder: Path, before: Manifest) -> Wanted:
    """What is wanted, with the tokenizer and the rows of before. Raises UsageError for others."""
    if wanted.row not in (None, before.row):
        packed = "not packed" if before.row is None else f"packed for {before.row - 1}"
        raise UsageError(
            f"--pack {(wanted.row or 0) - 1}: the tokens in {folder} are {packed}",
            next_step="leave it out, or prepare all of the text anew",
        )
    is_same, end = wanted.tokenizer is None, None
    if before.tokenizer == TOKENIZER_FILE:
        tokenizer = open_tokenizer(folder / TOKENIZER_FILE)
        end = tokenizer.id_to_token(before.end_of_document)
        if wanted.tokenizer is not None:
            named = tokenizer_files(wanted.tokenizer)[TOKENIZER_FILE]
            is_same = entry_of_file(named) == before.files[TOKENIZER_FILE]
    if not is_same:
        theirs = "bytes" if before.tokenizer == "bytes" else "of another tokenizer"
        raise UsageError(
            f"--tokenizer {wanted.tokenizer}: the tokens in {folder} are {theirs}",
            next_step="leave it out: new ones are made as those are",
        )
    if wanted.end_of_document not in (None, end):
        raise UsageError(
            f"--end-of-document {wanted.end_of_document}: documents in {folder} end with {end}",
            next_step="leave it out: new ones end as those do",
        )
    return replace(
        wanted,
        tokenizer=folder if before.tokenizer == TOKENIZER_FILE else None,
        end_of_document=end,
        row=before.row,
    )


def bring(folder: Path, work: Path, before: Manifest, say: Callable[[str], None]) -> None:
    """Has the files of before in another folder: links, or copies, which are told."""
    has_told = False
    for name, entry in before.files.items():
        there = work / name
        if there.exists() and there.stat().st_size == entry.bytes:
            continue
        there.unlink(missing_ok=True)
        with refusing(there):
            try:
                os.link(folder / name, there)
            except OSError:  # another disk, or one that knows no links
                if not has_told:
                    has_told = True
                    total = sum(each.bytes for each in before.files.values())
                    say(f"copying {bytes_in_words(total)} from {folder}, which cannot be linked")
                shutil.copyfile(folder / name, there)
                with there.open("rb") as file:
                    os.fsync(file.fileno())


def held_out_hashes_of(work: Path, before: Manifest) -> Path | None:
    """Hashes of what files of their own held out before; None where none did."""
    return work / HELD_OUT_HASHES_FILE if HELD_OUT_HASHES_FILE in before.files else None


def next_shards(before: Manifest | None) -> tuple[int, int]:
    """The numbers that new shards begin with: those to train on, and those that are held out."""
    names = () if before is None else tuple(before.files)

    def after(pattern: str) -> int:
        found = [re.match(pattern, name) for name in names]
        return 1 + max((int(one.group(1)) for one in found if one is not None), default=-1)

    return after(r"(\d+)\."), after(r"held-out-(\d+)\.")


def num_there_before(work: Path, before: Manifest, new: Manifest) -> tuple[int, int]:
    """How many of the new documents that are held out were held out before, and how many there are.

    They are drawn by their hash, so of those to train on about the same share has come again.
    """
    had = set(_held_out_documents(work, before))
    found = [digest in had for digest in _held_out_documents(work, new)]
    return sum(found), len(found)


def _held_out_documents(work: Path, manifest: Manifest) -> Iterator[bytes]:
    """A digest of each; where rows are packed, of long pieces: short ends of documents are often equal."""
    reader = ShardReader(WrittenFiles(work), token_bytes=manifest.token_bytes)
    least = (manifest.row or 0) // 2
    for shard in manifest.held_out:
        offsets = reader.offsets(shard)
        assert offsets is not None  # adopted tokens alone lack them
        for start, stop in itertools.pairwise(offsets.tolist()):
            if stop - start > least:
                yield blake3.blake3(reader.tokens(shard, start, stop).tobytes()).digest()


def together(before: Manifest, new: Manifest) -> Manifest:
    """Both; tokens of before come first."""
    return before.model_copy(
        update={
            "files": before.files | new.files,
            "training": before.training + new.training,
            "held_out": before.held_out + new.held_out,
            "has_answers": before.has_answers or new.has_answers,
        }
    )
