"""From files to a folder of tokens: what is to be done, processes that do it, and a result that is whole.

Shards are written into a hidden folder beside the result, each with a receipt once it is complete. A
preparation that was ended goes on from the receipts, whose files are checked; the manifest comes last,
and then the folder takes its name. What comes out depends on the input and the options, never on the
number of processes or on what was interrupted.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import blake3
import numpy as np
import numpy.typing as npt

from node.island.data.adding import (
    bring,
    going_on,
    held_out_hashes_of,
    manifest_before,
    next_shards,
    num_there_before,
    together,
)
from node.island.data.inputs import passed_over
from node.island.data.manifest import (
    HELD_OUT_HASHES_FILE,
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    ShardEntry,
    Split,
    State,
    entry_of_file,
)
from node.island.data.packing import pack
from node.island.data.shard_files import ShardReader, ShardWriter, WrittenFiles, token_bytes_of
from node.island.data.shard_plan import Wanted, names_of_sources, plan_jobs, times_of
from node.island.data.shard_workers import receipt_path, write_all
from node.island.data.shard_writing import (
    HASH_TYPE,
    HASHES,
    Encoding,
    InSeveral,
    Named,
    Receipt,
    ShardJob,
    hashes_of,
)
from node.island.data.tokenizing import (
    Encoded,
    Tokenizer,
    kept_of_tokenizer,
    tokenizer_files,
)
from protocol.errors import (
    BadDataError,
    CannotCreateError,
    UsageError,
)
from protocol.files.durable import (
    LOCK_NAME,
    FolderLock,
    is_taken,
    make_folder,
    refusing,
    sync_folder,
    toml_value,
    write_atomically,
)
from protocol.wire.rounds import MOST_SOURCES

HELD_OUT_SHARD_TOKENS = 64 << 20
LEAST_END = 0.05
"""Of a single document at least this share is held out, or there would be no sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a preparation has made."""

    manifest: Manifest
    new: Manifest  # without the tokens to which these were added
    num_files: int
    num_empty: int
    num_held_out_too: int  # left out of what is trained on: files of their own hold the same out
    num_cut: int  # pieces to train on that begin within a document longer than a row
    in_several: InSeveral
    named: Named
    not_utf8: tuple[str, ...]  # places of documents that are no text, and are taken as bytes
    unknown_share: float  # of all tokens: those for text that the tokenizer has no token for
    tokens_of: dict[str, int]  # to train on, for each pattern that is repeated; "" has the others'


def prepare(
    wanted: Wanted, *, on_state: Callable[[State], None], say: Callable[[str], None]
) -> Prepared:
    """Prepares tokens; raises AtollError, and then the result is not there."""
    add_to = wanted.add_to
    before = None if add_to is None else manifest_before(add_to, wanted.out)
    if is_taken(wanted.out):
        raise CannotCreateError(
            f"{wanted.out} is there already",
            next_step="choose another folder with --out, or remove it",
        )
    if add_to is not None and before is not None:
        wanted = going_on(wanted, add_to, before)
    copied = (
        {}
        if wanted.tokenizer is None or before is not None
        else kept_of_tokenizer(tokenizer_files(wanted.tokenizer))
    )
    for line in passed_over((*wanted.inputs, *wanted.held_out_inputs)):
        say(line)
    first_number, first_held_out = next_shards(before)
    jobs = plan_jobs(wanted, first_number=first_number)
    times = times_of(jobs)
    work = wanted.out.resolve().parent / f".{wanted.out.resolve().name}.preparing"
    make_folder(work)
    lock = FolderLock.take(
        work,
        holder="'atoll data prepare'",
        next_step="wait for it, or choose another folder with --out",
    )
    try:
        encoding = Encoding(
            tokenizer=None if wanted.tokenizer is None else work,
            end_of_document=wanted.end_of_document,
            field=wanted.field,
            held_out_below=_held_out_below(wanted, before),
            row=wanted.row,
            held_out_hashes=work / HELD_OUT_HASHES_FILE
            if wanted.held_out_inputs
            else None
            if before is None
            else held_out_hashes_of(work, before),
        )
        _begin(work, _identity(wanted, jobs, copied, times, before), say)
        if add_to is not None and before is not None:
            bring(add_to, work, before, say)
        for name, content in copied.items():
            with refusing(work / name):
                (work / name).write_bytes(content)
        # What is wrong with it is told before any work.
        tokenizer = encoding.opened(origin=wanted.tokenizer)
        if wanted.held_out_inputs:
            held_out = hashes_of((job for job in jobs if job.is_held_out), wanted.field)
            _write_hashes(work, held_out)
        receipts = write_all(work, jobs, encoding, wanted.jobs, on_state)
        if not wanted.held_out_inputs and before is None:
            receipts = _with_one_held_out(work, jobs, encoding, wanted, receipts, on_state)
        for path in (path for path, time in times_of(jobs).items() if time != times[path]):
            say(
                f"warning: {path} was changed while it was read, so what was read may be of before and of "
                "after; prepare it again once nobody writes it"
            )
        new = _merged(work, receipts, encoding, tokenizer, wanted, copied, first_held_out)
        num_empty = sum(receipt.num_empty for receipt in receipts)
        num_held_out_too = sum(receipt.num_held_out_too for receipt in receipts)
        _check_both_splits(new, wanted, num_empty=num_empty, num_held_out_too=num_held_out_too)
        _check_something_is_learned(new)
        manifest = new if before is None else together(before, new)
        _check_num_sources(manifest)
        if before is not None:
            num_again, num_new = num_there_before(work, before, new)
            if num_again:
                say(
                    f"warning: {num_again:,} of {num_new:,} added documents that are held out are in "
                    f"{add_to} too, so about as large a share of the others is trained on twice; name "
                    "files that it does not have"
                )
        with refusing(wanted.out):
            write_atomically(work / MANIFEST_FILE, manifest.as_written())
            for each in work.iterdir():
                if each.name not in {*manifest.files, MANIFEST_FILE}:
                    each.unlink()
            sync_folder(work)
            work.rename(wanted.out)
            sync_folder(wanted.out.resolve().parent)
    finally:
        lock.release()
    return Prepared(
        manifest=manifest,
        new=new,
        num_files=len(times),
        num_empty=num_empty,
        num_held_out_too=num_held_out_too,
        num_cut=sum(receipt.num_cut for receipt in receipts),
        in_several=functools.reduce(
            InSeveral.plus, (receipt.in_several for receipt in receipts), InSeveral()
        ),
        not_utf8=tuple(where for receipt in receipts for where in receipt.not_utf8),
        unknown_share=sum(receipt.num_unknown for receipt in receipts)
        / max(1, sum(receipt.num_encoded for receipt in receipts)),
        named=functools.reduce(Named.plus, (receipt.named for receipt in receipts), Named()),
        tokens_of={
            source: sum(receipt.tokens_of.get(source, 0) for receipt in receipts)
            for source in (*(pattern for pattern, _ in wanted.repeated), "")
        },
    )


def _check_both_splits(
    manifest: Manifest, wanted: Wanted, *, num_empty: int, num_held_out_too: int
) -> None:
    """Raises BadDataError where nothing is there to train on, or nothing is held out."""
    documents = sum(s.num_documents for s in (*manifest.training, *manifest.held_out))
    if (manifest.training and manifest.held_out) or (documents and wanted.add_to is not None):
        return
    if num_held_out_too and not manifest.training:
        raise BadDataError(
            f"all {num_held_out_too:,} documents to train on are held out too: "
            f"{' '.join(wanted.held_out_inputs) or wanted.add_to} has the same ones",
            next_step="name other documents"
            if wanted.add_to is not None
            else "hold other files out, or a share, as --held-out 0.01",
        )
    if not documents:
        found = f"{num_empty:,} documents, all of them empty" if num_empty else "not one document"
        raise BadDataError(
            f"{' '.join(wanted.inputs)} has no text: {found}",
            next_step="name other files, or the key or column that has the text with --field KEY",
        )
    which = "held out" if manifest.training else "left to train on"
    raise BadDataError(
        f"of {documents} documents none is {which}",
        next_step="hold out another share, as --held-out 0.1, or files of their own, as "
        "--held-out FILE; where all documents are equal, give others: equal ones stay together",
    )


def _check_something_is_learned(manifest: Manifest) -> None:
    splits: tuple[tuple[Split, str], ...] = (("training", "train on"), ("held_out", "hold out"))
    for split, what in splits:
        if manifest.shards(split) and not manifest.num_tokens(split):
            raise BadDataError(
                f"of the documents to {what} not one token is to be learned: none has an answer that is",
                next_step="let answers have the role 'assistant' and no 'weight' or 'train' of 0, or see "
                "what {% generation %} marks in the tokenizer's chat_template.jinja",
            )


def _check_num_sources(manifest: Manifest) -> None:
    sources = {shard.source for shard in manifest.held_out}
    if len(sources) > MOST_SOURCES:
        raise UsageError(
            f"what is held out has {len(sources)} sources, and {MOST_SOURCES} are told apart at most",
            next_step="name fewer with --repeat or --held-out: a pattern may name many files",
        )


def _identity(
    wanted: Wanted,
    jobs: Sequence[ShardJob],
    copied: Mapping[str, bytes],
    times: Mapping[Path, int | None],
    before: Manifest | None,
) -> str:
    """Of the input and all options that the result depends on."""
    options = replace(
        wanted, inputs=(), out=Path(), tokenizer=None, held_out_inputs=(), add_to=None, jobs=1
    )
    hasher = blake3.blake3(repr(options).encode())
    if before is not None:
        hasher.update(before.digest())
    for name, content in sorted(copied.items()):
        hasher.update(name.encode() + blake3.blake3(content).digest())
    for job in jobs:
        for part in job.parts:
            hasher.update(repr((job.number, job.is_held_out, part, times[part.path])).encode())
    return hasher.hexdigest()


_IDENTITY_FILE = "identity"


def _begin(work: Path, identity: str, say: Callable[[str], None]) -> None:
    """Takes up what was begun of the same, or empties the folder."""
    path = work / _IDENTITY_FILE
    if path.exists() and path.read_text() != identity:
        say(
            "the input or the options are others than those of the preparation begun here: it starts anew"
        )
    if not path.exists() or path.read_text() != identity:
        with refusing(work):
            for each in work.iterdir():
                if each.name != LOCK_NAME:
                    each.unlink()
        write_atomically(path, identity.encode())


def _held_out_below(wanted: Wanted, before: Manifest | None) -> int:
    """Documents whose hash is less are held out."""
    if before is not None:
        return int(str(before.held_out_below), 16)
    return 0 if wanted.held_out_inputs else round(wanted.held_out * HASHES)


def _write_hashes(work: Path, hashes: npt.NDArray[np.uint64]) -> None:
    with refusing(work):
        (work / HELD_OUT_HASHES_FILE).write_bytes(hashes.tobytes())


def _with_one_held_out(
    work: Path,
    jobs: Sequence[ShardJob],
    encoding: Encoding,
    wanted: Wanted,
    receipts: list[Receipt],
    on_state: Callable[[State], None],
) -> list[Receipt]:
    """Of few documents the share may take none: then the one with the least hash is held out.

    Of a single document the end is. The shards that change are written again.
    """
    least = min((r.least_hash for r in receipts if r.least_hash is not None), default=None)
    if least is None or any(receipt.held_out for receipt in receipts):
        return receipts
    changed = replace(encoding, held_out_below=int(least, 16) + 1)
    if sum(receipt.num_documents - receipt.num_empty for receipt in receipts) == 1:
        changed = replace(encoding, end_held_out=max(wanted.held_out, LEAST_END))
    again = [job for job, r in zip(jobs, receipts, strict=True) if r.least_hash == least]
    for job in again:
        receipt_path(work, job.number).unlink()
    anew = iter(write_all(work, again, changed, wanted.jobs, on_state))
    return [next(anew) if receipt.least_hash == least else receipt for receipt in receipts]


def _merged(
    work: Path,
    receipts: Sequence[Receipt],
    encoding: Encoding,
    tokenizer: Tokenizer,
    wanted: Wanted,
    copied: Iterable[str],
    first_held_out: int,
) -> Manifest:
    """The manifest; what was held out of many shards becomes a few, of each source its own."""
    token_bytes = token_bytes_of(tokenizer.vocab_size)
    if ends := [receipt.least_hash for receipt in receipts if receipt.end_held_out]:
        # Its beginning is trained on: a copy of it would be so with the end.
        _write_hashes(work, np.array([int(str(one), 16) for one in ends], HASH_TYPE))
    has_hashes = bool(ends or wanted.held_out_inputs)
    beside = (*copied, *([HELD_OUT_HASHES_FILE] if has_hashes else ()))
    files: dict[str, FileEntry] = {name: entry_of_file(work / name) for name in beside}
    held_out: list[ShardEntry] = []
    names = names_of_sources(
        [p for p, _ in wanted.repeated] if not wanted.held_out_inputs else wanted.held_out_inputs
    )
    patterns = dict.fromkeys(pattern for receipt in receipts for pattern in receipt.held_out)
    for pattern in patterns:
        pieces = [r.held_out[pattern] for r in receipts if pattern in r.held_out]
        while pieces:
            name = f"held-out-{first_held_out + len(held_out):05}"
            writer = ShardWriter(work, name, token_bytes=token_bytes)
            while pieces and writer.num_tokens < HELD_OUT_SHARD_TOKENS:
                _add_shard(writer, work, pieces.pop(0), token_bytes)
            shard, own_files = writer.close()
            if encoding.row is not None:
                shard, own_files = pack(
                    work,
                    shard,
                    name,
                    row=encoding.row,
                    token_bytes=token_bytes,
                    padding=tokenizer.end_of_document,
                )
            held_out.append(shard.model_copy(update={"source": names.get(pattern, "")}))
            files |= own_files
    training = [receipt.training for receipt in receipts if receipt.training is not None]
    for receipt in receipts:
        merged = {
            name
            for shard in receipt.held_out.values()
            for name in (shard.tokens, shard.offsets, shard.mask)
        }
        files |= {name: entry for name, entry in receipt.files.items() if name not in merged}
    return Manifest(
        token_bytes=token_bytes,
        vocab_size=tokenizer.vocab_size,
        tokenizer="bytes" if encoding.tokenizer is None else "tokenizer.json",
        end_of_document=tokenizer.end_of_document,
        row=encoding.row,
        has_answers=any(receipt.num_answering for receipt in receipts),
        held_out_below=max(
            (receipt.held_out_below for receipt in receipts),
            key=lambda one: int(one, 16),
            default=None,
        ),
        files=files,
        training=tuple(training),
        held_out=tuple(held_out),
    )


def _add_shard(writer: ShardWriter, work: Path, shard: ShardEntry, token_bytes: int) -> None:
    """Adds the documents of a shard, a part of them at a time."""
    reader = ShardReader(WrittenFiles(work), token_bytes=token_bytes)
    offsets = reader.offsets(shard)
    assert offsets is not None
    for start, stop in itertools.pairwise(offsets.tolist()):
        writer.add(
            Encoded(
                tokens=reader.tokens(shard, start, stop).astype(np.uint32),
                counted=reader.counted(shard, start, stop),
                text_bytes=0,
            )
        )
    writer.add_text_bytes(shard.text_bytes or 0)


def as_run_file(out: Path, manifest: Manifest) -> str:
    """The lines of a run file that name these tokens."""
    return (
        f'[data]\nsource = "tokens"\npaths = [{toml_value(out)}]\n'
        f'digest = "{manifest.digest().hex()}"\n'
    )
