"""Which documents go into which shard: files, cut into parts, as often as a person wants them read.

It depends on the files and what was asked for, never on how many processes write.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from node.island.data.documents import (
    DOCUMENT_BYTES,
    DOCUMENT_BYTES_OF_LITTLE_TEXT,
    LITTLE_TEXT_BYTES,
    Part,
    parts_of,
)
from node.island.data.inputs import input_files
from node.island.data.shard_writing import ShardJob
from protocol.errors import UsageError

MOST_SHARD_BYTES = 256 << 20
LEAST_SHARD_BYTES = 4 << 20
SHARDS_AIMED_AT = 64


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
    add_to: Path | None = None  # a folder of tokens, to which these are added
    jobs: int = 1


def plan_jobs(wanted: Wanted, *, first_number: int = 0) -> list[ShardJob]:
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
        sources = (
            _held_out_sources(kept_back) if is_held_out else _sources_of(files, wanted.repeated)
        )
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
                    number = first_number + len(jobs)
                    jobs.append(
                        ShardJob(number=number, parts=tuple(parts), is_held_out=is_held_out)
                    )
                    parts, taken = [], 0
        if parts:
            number = first_number + len(jobs)
            jobs.append(ShardJob(number=number, parts=tuple(parts), is_held_out=is_held_out))
    return jobs


def _held_out_sources(patterns: Sequence[str]) -> dict[Path, tuple[str, float]]:
    """Files that are held out, by the pattern that names them; of a single one nobody tells them apart."""
    found: dict[Path, tuple[str, float]] = {}
    for pattern in patterns if len(patterns) > 1 else ():
        for file in input_files([pattern]):
            found.setdefault(file, (pattern, 1.0))
    return found


def names_of_sources(patterns: Sequence[str]) -> dict[str, str]:
    """What people call the sources that patterns name: a folder or a file, by as little as tells them apart.

    Members see the names, and so not where somebody keeps the files.
    """
    parts = {pattern: _named_parts(pattern) for pattern in patterns}
    for depth in range(1, max(map(len, parts.values()), default=0) + 1):
        names = {pattern: "/".join(own[-depth:]) for pattern, own in parts.items()}
        if len(set(names.values())) == len(names):
            return {pattern: name[:LONGEST_NAME] for pattern, name in names.items()}
    return {pattern: f"source {number}" for number, pattern in enumerate(patterns, start=1)}


LONGEST_NAME = 100


def _named_parts(pattern: str) -> list[str]:
    """The parts of a path before its first wildcard; the last of a file without its ending."""
    parts = [part for part in Path(pattern).parts if part not in ("/", ".", "..")]
    before = list(itertools.takewhile(lambda part: not _WILDCARDS.intersection(part), parts))
    if before and len(before) == len(parts):
        before[-1] = before[-1].partition(".")[0] or before[-1]
    return ["".join(filter(str.isprintable, part)) for part in before]


_WILDCARDS = frozenset("*?[")


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


def times_of(jobs: Sequence[ShardJob]) -> dict[Path, int | None]:
    """When the files of some jobs were last changed; None for one that is gone."""
    paths = {part.path for job in jobs for part in job.parts}
    return {path: path.stat().st_mtime_ns if path.exists() else None for path in sorted(paths)}
