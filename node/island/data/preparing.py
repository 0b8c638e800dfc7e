"""From files to a folder of tokens: what is to be done, processes that do it, and a result that is whole.

Shards are written into a hidden folder beside the result, each with a receipt once it is complete. A
preparation that was ended goes on from the receipts, whose files are checked; the manifest comes last,
and then the folder takes its name. What comes out depends on the input and the options, never on the
number of processes or on what was interrupted.
"""

import functools
import itertools
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import blake3
import numpy as np

from node.island.data.documents import (
    DOCUMENT_BYTES,
    DOCUMENT_BYTES_OF_LITTLE_TEXT,
    LITTLE_TEXT_BYTES,
    Part,
    parts_of,
)
from node.island.data.inputs import input_files, passed_over
from node.island.data.manifest import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    ShardEntry,
    Split,
    State,
    check_pieces,
    check_sizes,
    entry_of_file,
)
from node.island.data.packing import pack
from node.island.data.shard_files import ShardReader, ShardWriter, WrittenFiles, token_bytes_of
from node.island.data.shard_writing import (
    HASHES,
    Encoding,
    InSeveral,
    Named,
    Receipt,
    ShardJob,
    hashes_of,
    write_shard,
)
from node.island.data.tokenizing import (
    Encoded,
    Tokenizer,
    kept_of_tokenizer,
    tokenizer_files,
)
from protocol.errors import (
    AtollError,
    BadDataError,
    CannotCreateError,
    SystemRefusedError,
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

MOST_SHARD_BYTES = 256 << 20
LEAST_SHARD_BYTES = 4 << 20
SHARDS_AIMED_AT = 64
HELD_OUT_SHARD_TOKENS = 64 << 20
LEAST_END = 0.05
"""Of a single document at least this share is held out, or there would be no sample."""

_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a person asked for."""

    inputs: tuple[str, ...]
    out: Path
    tokenizer: Path | None = None
    end_of_document: str | None = None
    field: str = "text"
    held_out: float = 0.01
    held_out_inputs: tuple[str, ...] = ()  # in place of a share
    repeated: tuple[tuple[str, float], ...] = ()  # patterns, and how often what they name is read
    row: int | None = None
    jobs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a preparation has made."""

    manifest: Manifest
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
    if is_taken(wanted.out):
        raise CannotCreateError(
            f"{wanted.out} is there already",
            next_step="choose another folder with --out, or remove it",
        )
    copied = (
        {} if wanted.tokenizer is None else kept_of_tokenizer(tokenizer_files(wanted.tokenizer))
    )
    for line in passed_over((*wanted.inputs, *wanted.held_out_inputs)):
        say(line)
    jobs = plan_jobs(wanted)
    times = _times_of(jobs)
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
            held_out_below=0 if wanted.held_out_inputs else round(wanted.held_out * HASHES),
            row=wanted.row,
            held_out_hashes=work / _HASHES_FILE if wanted.held_out_inputs else None,
        )
        _begin(work, _identity(wanted, jobs, copied, times), say)
        for name, content in copied.items():
            with refusing(work / name):
                (work / name).write_bytes(content)
        tokenizer = encoding.opened(
            origin=wanted.tokenizer
        )  # what is wrong with it is told before any work
        if encoding.held_out_hashes is not None:
            held_out = hashes_of((job for job in jobs if job.is_held_out), wanted.field)
            with refusing(work):
                encoding.held_out_hashes.write_bytes(held_out.tobytes())
        receipts = _write_all(work, jobs, encoding, wanted.jobs, on_state)
        if not wanted.held_out_inputs:
            receipts = _with_one_held_out(work, jobs, encoding, wanted, receipts, on_state)
        for path in (path for path, time in _times_of(jobs).items() if time != times[path]):
            say(
                f"warning: {path} was changed while it was read, so what was read may be of before and of "
                "after; prepare it again once nobody writes it"
            )
        manifest = _merged(work, receipts, encoding, tokenizer, tuple(copied))
        num_empty = sum(receipt.num_empty for receipt in receipts)
        num_held_out_too = sum(receipt.num_held_out_too for receipt in receipts)
        _check_both_splits(manifest, wanted, num_empty=num_empty, num_held_out_too=num_held_out_too)
        _check_something_is_learned(manifest)
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
    if manifest.training and manifest.held_out:
        return
    documents = sum(s.num_documents for s in (*manifest.training, *manifest.held_out))
    if not documents:
        found = f"{num_empty:,} documents, all of them empty" if num_empty else "not one document"
        raise BadDataError(
            f"{' '.join(wanted.inputs)} has no text: {found}",
            next_step="name other files, or the key or column that has the text with --field KEY",
        )
    if num_held_out_too and not manifest.training:
        raise BadDataError(
            f"all {num_held_out_too:,} documents to train on are held out too: "
            f"{' '.join(wanted.held_out_inputs)} has the same ones",
            next_step="hold other files out, or a share, as --held-out 0.01",
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
        if not manifest.num_tokens(split):
            raise BadDataError(
                f"of the documents to {what} not one token is to be learned: none has an answer that is",
                next_step="let answers have the role 'assistant' and no 'weight' or 'train' of 0, or see "
                "what {% generation %} marks in the tokenizer's chat_template.jinja",
            )


def plan_jobs(wanted: Wanted) -> list[ShardJob]:
    """Who writes what: neighbouring parts of files, so that shards are of about one size.

    What is repeated follows when all is there once: a document beside its copy would teach to copy.
    """
    jobs: list[ShardJob] = []
    kept_back = wanted.held_out_inputs
    for patterns, but_for, is_held_out in (
        (wanted.inputs, kept_back, False),
        (kept_back, (), True),
    ):
        files = input_files(patterns, but_for=but_for)
        sources = {} if is_held_out else _sources_of(files, wanted.repeated)
        total = sum(file.stat().st_size for file in files)
        shard_bytes = min(MOST_SHARD_BYTES, max(LEAST_SHARD_BYTES, total // SHARDS_AIMED_AT))
        each = DOCUMENT_BYTES if total >= LITTLE_TEXT_BYTES else DOCUMENT_BYTES_OF_LITTLE_TEXT
        parts: list[Part] = []
        taken = 0
        for file, source, repetition, share in _readings(files, sources):
            for part in parts_of(file, shard_bytes, document_bytes=each):
                parts.append(replace(part, source=source, repetition=repetition, share=share))
                taken += part.num_bytes
                if taken >= shard_bytes:
                    jobs.append(
                        ShardJob(number=len(jobs), parts=tuple(parts), is_held_out=is_held_out)
                    )
                    parts, taken = [], 0
        if parts:
            jobs.append(ShardJob(number=len(jobs), parts=tuple(parts), is_held_out=is_held_out))
    return jobs


def _sources_of(
    files: Sequence[Path], repeated: Sequence[tuple[str, float]]
) -> dict[Path, tuple[str, float]]:
    """How often files are read, with the pattern that says so. Raises UsageError for what cannot be meant."""
    found: dict[Path, tuple[str, float]] = {}
    by_place = {file.resolve(): file for file in files}
    for pattern, times in repeated:
        own = [by_place[f.resolve()] for f in input_files([pattern]) if f.resolve() in by_place]
        if not own:
            raise UsageError(
                f"--repeat {pattern}={times:g} names no file that is to be trained on",
                next_step="name files of the inputs, as they are named there",
            )
        for file in own:
            if file in found:
                raise UsageError(
                    f"{file} is named by --repeat {found[file][0]} and by --repeat {pattern}",
                    next_step="let each file be named once",
                )
            found[file] = pattern, times
    return found


def _readings(
    files: Sequence[Path], sources: Mapping[Path, tuple[str, float]]
) -> Iterator[tuple[Path, str, int, float]]:
    """Files, each as often as it is read, with its source, how often before, and the share that is taken."""
    most = max((times for _, times in sources.values()), default=1.0)
    for repetition in range(math.ceil(most)):
        for file in files:
            source, times = sources.get(file, ("", 1.0))
            if times > repetition:
                yield file, source, repetition, min(1.0, times - repetition)


def _times_of(jobs: Sequence[ShardJob]) -> dict[Path, int | None]:
    """When the files of some jobs were last changed; None for one that is gone."""
    paths = {part.path for job in jobs for part in job.parts}
    return {path: path.stat().st_mtime_ns if path.exists() else None for path in sorted(paths)}


def _identity(
    wanted: Wanted,
    jobs: Sequence[ShardJob],
    copied: Mapping[str, bytes],
    times: Mapping[Path, int | None],
) -> str:
    """Of the input and all options that the result depends on."""
    options = replace(wanted, inputs=(), out=Path(), tokenizer=None, held_out_inputs=(), jobs=1)
    hasher = blake3.blake3(repr(options).encode())
    for name, content in sorted(copied.items()):
        hasher.update(name.encode() + blake3.blake3(content).digest())
    for job in jobs:
        for part in job.parts:
            hasher.update(repr((job.number, job.is_held_out, part, times[part.path])).encode())
    return hasher.hexdigest()


_IDENTITY_FILE = "identity"
_HASHES_FILE = "held-out.hashes"


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


def _write_all(
    work: Path,
    jobs: Sequence[ShardJob],
    encoding: Encoding,
    num_processes: int,
    on_state: Callable[[State], None],
) -> list[Receipt]:
    """Has processes write the shards that are not there yet."""
    receipts = {job.number: _receipt_of(work, job) for job in jobs}
    left = [job for job in jobs if receipts[job.number] is None]
    total = sum(job.num_bytes for job in jobs)
    resumed = total - sum(job.num_bytes for job in left)
    on_state(State(done_bytes=resumed, total_bytes=total, resumed_bytes=resumed))
    context = multiprocessing.get_context("spawn")
    counter = context.Value("Q", 0)
    pool = ProcessPoolExecutor(
        max(1, min(num_processes, len(left))),
        mp_context=context,
        initializer=_begin_worker,
        initargs=(counter,),
    )
    try:
        futures: dict[Future[Receipt], ShardJob] = {
            pool.submit(_write_one, job, encoding, work): job for job in left
        }
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                receipts[futures[future].number] = future.result()
            on_state(
                State(done_bytes=resumed + counter.value, total_bytes=total, resumed_bytes=resumed)
            )
    except BrokenProcessPool as error:
        raise SystemRefusedError(
            "a process that writes shards has ended by itself; the machine may be out of memory",
            next_step="type the same again with fewer --jobs: it goes on from the finished shards",
        ) from error
    except BaseException:
        _end_workers(pool)
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return [receipt for _, receipt in sorted(receipts.items()) if receipt is not None]


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
    if least is None or any(receipt.held_out is not None for receipt in receipts):
        return receipts
    changed = replace(encoding, held_out_below=int(least, 16) + 1)
    if sum(receipt.num_documents - receipt.num_empty for receipt in receipts) == 1:
        changed = replace(encoding, end_held_out=max(wanted.held_out, LEAST_END))
    again = [job for job, r in zip(jobs, receipts, strict=True) if r.least_hash == least]
    for job in again:
        _receipt_path(work, job.number).unlink()
    anew = iter(_write_all(work, again, changed, wanted.jobs, on_state))
    return [next(anew) if receipt.least_hash == least else receipt for receipt in receipts]


def _end_workers(pool: ProcessPoolExecutor) -> None:
    # They hold nothing that is not begun anew; Python 3.14 has terminate_workers for it.
    for process in list((pool._processes or {}).values()):
        process.terminate()


_counter: Any = None  # of a worker: bytes of input that all have read


def _begin_worker(counter: Any) -> None:
    global _counter
    _counter = counter
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then ends us
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _tell(num_bytes: int) -> None:
    with _counter.get_lock():
        _counter.value += num_bytes


def _write_one(job: ShardJob, encoding: Encoding, work: Path) -> Receipt:
    receipt = write_shard(job, encoding, work, _tell)
    sync_folder(work)
    write_atomically(_receipt_path(work, job.number), receipt.model_dump_json().encode())
    return receipt


def _receipt_path(work: Path, number: int) -> Path:
    return work / f"{number:05}.receipt"


def _receipt_of(work: Path, job: ShardJob) -> Receipt | None:
    """The receipt of a finished job whose files are as it says."""
    path = _receipt_path(work, job.number)
    if not path.exists():
        return None
    try:
        receipt = Receipt.model_validate_json(path.read_bytes())
        check_sizes(work, receipt.files)
        for name, entry in receipt.files.items():
            check_pieces(work / name, entry)
    except (AtollError, ValueError):
        return None  # it is written again
    return receipt


def _merged(
    work: Path,
    receipts: Sequence[Receipt],
    encoding: Encoding,
    tokenizer: Tokenizer,
    copied: tuple[str, ...],
) -> Manifest:
    """The manifest; what was held out of many shards becomes a few."""
    token_bytes = token_bytes_of(tokenizer.vocab_size)
    files: dict[str, FileEntry] = {name: entry_of_file(work / name) for name in copied}
    held_out: list[ShardEntry] = []
    pieces = [receipt.held_out for receipt in receipts if receipt.held_out is not None]
    while pieces:
        name = f"held-out-{len(held_out):05}"
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
        held_out.append(shard)
        files |= own_files
    training = [receipt.training for receipt in receipts if receipt.training is not None]
    for receipt in receipts:
        merged = (
            {receipt.held_out.tokens, receipt.held_out.offsets, receipt.held_out.mask}
            if receipt.held_out
            else set()
        )
        files |= {name: entry for name, entry in receipt.files.items() if name not in merged}
    return Manifest(
        token_bytes=token_bytes,
        vocab_size=tokenizer.vocab_size,
        tokenizer="bytes" if encoding.tokenizer is None else "tokenizer.json",
        end_of_document=tokenizer.end_of_document,
        row=encoding.row,
        has_answers=any(receipt.num_answering for receipt in receipts),
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
