"""Which files inputs name, and of what kind each is by its name. Nothing in them is read here."""

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NoReturn

from protocol.errors import NoInputError
from protocol.files.durable import expanded

SOME_OF_A_FOLDER = "name the others: 'folder/**/*.txt', in quotes, takes all such below a folder"

Kind = Literal["text", "json", "jsonl", "csv", "parquet", "arrow"]

KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
BESIDE_TOKENS = (".idx", ".index", ".metadata", ".loss")
"""What lies beside files of tokens and is read with them."""

COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst"})
"""They are unpacked while they are read, so not from the middle."""


def input_files(patterns: Iterable[str], *, but_for: Sequence[str] = ()) -> list[Path]:
    """Files that paths, folders and globs name, each once: all below a folder, sorted.

    What `but_for` names as well is left out: a file that is held out is not trained on.
    Raises NoInputError for what matches nothing.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        path = expanded(pattern)
        if path.is_file():
            matches = [path]
        elif path.is_dir():
            matches, _ = _data_within(path)
        else:
            matches = [Path(each) for each in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207 - Path.glob takes no absolute patterns
        files = [each for each in matches if each.is_file()]
        if not files:
            raise NoInputError(f"{pattern} names no file", next_step=_how_to_name(path))
        for each in files:
            found.setdefault(each.resolve(), each)
    for each in input_files(but_for) if but_for else ():
        found.pop(each.resolve(), None)
    if but_for and not found:
        raise NoInputError(
            f"all that is to be trained on is held out: {' '.join(but_for)}",
            next_step="hold other files out, or a share, as --held-out 0.01",
        )
    return list(found.values())


def _how_to_name(path: Path) -> str:
    """What to do where a path leads to nothing that is read."""
    if path.is_fifo() or path.is_char_device() or str(path) == "-":
        return "write what comes through that pipe into a file first, and name the file"
    if "://" in str(path) or ":/" in str(path):
        return "fetch it first, and name the file: text is prepared once, on one machine"
    fixed = [each for each in path.parents if "[" in each.name and each.is_dir()]
    if fixed:
        return f"beside wildcards a bracket of a name is written as [[]: {glob.escape(str(fixed[0]))}/…"
    return "correct the path; 'folder/**/*.txt', in quotes, takes all below a folder"


def passed_over(patterns: Iterable[str]) -> Iterator[str]:
    """For each folder of which not all files are read a sentence with how many, and one of the others."""
    for folder in filter(Path.is_dir, map(expanded, patterns)):
        taken, others = _data_within(folder)
        if others:
            kinds = " and ".join(sorted({suffix_of(each) for each in taken}))
            yield (
                f"{folder}: {len(taken):,} of {len(taken) + len(others):,} files are read, as {kinds}; to "
                f"read others, such as {others[0].relative_to(folder)}, name them apart"
            )


def _data_within(folder: Path) -> tuple[list[Path], list[Path]]:
    """All files below a folder, and the others where some are of a kind made for data: then those alone."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(each.parent.name for each in folder.glob("*/state.json"))
        raise NoInputError(
            f"{folder} holds several splits: {', '.join(splits)}",
            next_step=f"name one, as {folder / splits[0] if splits else folder}; --held-out takes another",
        )
    if (folder / "state.json").is_file():  # datasets' save_to_disk
        named = json.loads((folder / "state.json").read_bytes())["_data_files"]
        return [folder / each["filename"] for each in named], []
    files = sorted(_files_below(folder))
    # Beside data of another kind .json is as often a description of them.
    is_json = {suffix_of(each) for each in files} <= {".json", ".md", ""}
    kinds = frozenset({".json"}) if is_json else _MADE_FOR_DATA
    of_kinds = [each for each in files if suffix_of(each) in kinds and not _is_derived(each)]
    taken = frozenset(of_kinds)
    others = [
        each for each in files if each not in taken and each.suffix not in {*BESIDE_TOKENS, ".md"}
    ]
    for each in of_kinds or files:
        if not each.exists():
            raise NoInputError(
                f"{each} is a link to {each.readlink()}, which is not there",
                next_step=f"fetch that file, or remove the link; {SOME_OF_A_FOLDER}",
            )
    _refuse_several_splits(folder, of_kinds)
    return (of_kinds, others) if of_kinds else (files, [])


_SPLIT = re.compile(
    r"(?<![a-z])(train(?:ing)?|valid(?:ation)?|val|dev|test(?:ing)?|eval(?:uation)?)(?![a-z])", re.I
)


def _refuse_several_splits(folder: Path, files: Sequence[Path]) -> None:
    """Raises NoInputError where names say that a part of a folder is to be measured by, as on the Hub."""
    found: dict[str, tuple[Path, str]] = {}
    for file in files:
        if names := _SPLIT.findall(file.relative_to(folder).as_posix()):
            found.setdefault(names[-1].lower(), (file, names[-1]))
    trained, name = found.get("train") or found.get("training") or (None, "")
    if trained is None or len(found) < 2:
        return
    is_folder = _SPLIT.search(trained.name) is None
    named = trained.parent if is_folder else trained.parent / f"*{name}*{trained.suffix}"
    raise NoInputError(
        f"{folder} holds several splits by the names of its files: {', '.join(sorted(found))}",
        next_step=f"name what is trained on, as '{named}', in quotes, and what is not with --held-out; "
        f"'{folder}/**/*{trained.suffix}' takes all",
    )


def _files_below(folder: Path) -> Iterator[Path]:
    """All that are not hidden, also in folders that are linked to; each once, as links may go round."""
    seen = set[Path]()

    def cannot_be_read(error: OSError) -> NoReturn:
        raise NoInputError(
            f"{error.filename} cannot be read: {error.strerror}",
            next_step="allow this user to read it, or name what else is to be read apart",
        ) from error

    for place, names, files in os.walk(folder, followlinks=True, onerror=cannot_be_read):
        real = Path(place).resolve()
        if real in seen:
            names.clear()
            continue
        seen.add(real)
        names[:] = sorted(name for name in names if not name.startswith("."))
        found = (Path(place, name) for name in files if not name.startswith("."))
        yield from (each for each in found if each.is_file() or each.is_symlink())


def _is_derived(path: Path) -> bool:
    """Whether datasets keeps there what a map or a filter made of the files beside it."""
    return path.name.startswith("cache-") and path.suffix == ".arrow"


_MADE_FOR_DATA = frozenset({*KINDS, ".bin", ".ds"})


def suffix_of(path: Path) -> str:
    """What a name ends in, in small letters, but for what it is compressed by."""
    suffix = Path(path.stem).suffix if is_compressed(path) else path.suffix
    return suffix.lower()


def is_compressed(path: Path) -> bool:
    """Whether it is unpacked while it is read."""
    return path.suffix.lower() in COMPRESSED
