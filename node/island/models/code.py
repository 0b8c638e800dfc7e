"""Functions that a run brings: where their files are, who agrees to run them, and getting at them.

A run names functions as `module:function`. Their code never travels: a contributor has it installed, or in
a folder of node.toml's `code`, and says which runs may use it. The run has a digest of each file of that
folder, for one may import the other. All of that is decided without running a line of it; `loaded` runs
it, in a rank.
"""

import importlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder, all_suffixes
from pathlib import Path
from traceback import walk_tb
from typing import Any

import blake3

from protocol.errors import (
    AtollError,
    BadDataError,
    ConfigError,
    NoInputError,
    NotPermittedError,
    ProtocolMismatchError,
)
from protocol.run.models import FunctionModel
from protocol.run.run_spec import RunSpec


def functions_of(spec: RunSpec) -> list[str]:
    """What a node has to run of the run's own code."""
    names = [spec.model.function] if isinstance(spec.model, FunctionModel) else []
    if spec.data.function is not None and spec.data.function not in names:
        names.append(spec.data.function)
    return names


def check_functions(spec: RunSpec, *, allowed: Sequence[str], code: Path | None) -> None:
    """Looks whether this node may run the run's functions, and whether they are the run's.

    Raises NotPermittedError with the line to write where nobody has agreed, NoInputError for one that is
    not here, ProtocolMismatchError for a file that is not the run's. Runs none of them.
    """
    named = functions_of(spec)
    if not named:
        return
    _require_permission(spec, allowed)
    here, theirs = files_of(spec, code), code_of(spec)
    for name in sorted(here.keys() | theirs.keys()):
        if name not in here:
            what = f"{name} is not here, and belongs to the run's code"
        elif name not in theirs:
            what = (
                f"{here[name]} lies beside the run's code, which may import it, and is none of it"
            )
        elif (ours := digest_of(here[name])) != theirs[name]:
            what = (
                f"{here[name]} is not the run's code: its digest is {ours[:12]}…, and the run's is "
                f"{theirs[name][:12]}…"
            )
        else:
            continue
        raise ProtocolMismatchError(
            what,
            next_step="get the folder that the run was made with, as it is, and name it: code in "
            "node.toml, or --code FOLDER",
        )


def is_allowed(spec: RunSpec, allowed: Sequence[str]) -> bool:
    """By the run's name, or by that with the beginning of what it runs: `RUN@DIGEST`."""
    digest = code_digest(spec)
    named = [entry.partition("@") for entry in allowed]
    return any(name == spec.run.name and digest.startswith(of_code) for name, _, of_code in named)


def _require_permission(spec: RunSpec, allowed: Sequence[str]) -> None:
    if is_allowed(spec, allowed):
        return
    digest = code_digest(spec)
    others = [entry for entry in allowed if entry.partition("@")[0] != spec.run.name]
    mine = f"{spec.run.name}@{digest[:DIGITS]}"
    line = f"allow_functions = {_toml_list([*others, mine])}"
    other_code = next((each for each in allowed if each not in others), None)
    raise NotPermittedError(
        f"run {spec.run.name!r} trains with code of its own, {in_words(spec)}, and this node's owner has "
        + (f"allowed other code, {other_code}" if other_code is not None else "not allowed it"),
        next_step=f"read that code, and if you trust it write '{line}' into node.toml, or start with "
        f"--allow-function {mine}; a training loop of your own needs none of it: --loop",
    )


DIGITS = 16
"""Of a digest that a contributor allows: enough that nobody finds other code with the same ones in time."""

_SHOWN_FILES = 12
_MOST_FILES = 2000


def code_of(spec: RunSpec) -> Mapping[str, str]:
    """The run's own files with their digests."""
    return {} if spec.description is None else spec.description.sources


def code_digest(spec: RunSpec) -> str:
    """Of all that running the run's functions depends on: their names, arguments and files."""
    arguments = spec.model.arguments if isinstance(spec.model, FunctionModel) else {}
    parts = [functions_of(spec), arguments, spec.data.arguments, dict(code_of(spec))]
    return blake3.blake3(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def in_words(spec: RunSpec) -> str:
    """What a node runs of the run's own code, file by file."""
    files = [f"{name} {digest[:12]}" for name, digest in sorted(code_of(spec).items())]
    if len(files) > _SHOWN_FILES:
        files = [*files[:_SHOWN_FILES], f"and {len(files) - _SHOWN_FILES} more"]
    return f"{' and '.join(functions_of(spec))} of {', '.join(files) or 'files that nobody knows'}"


def sources_of(spec: RunSpec, code: Path | None) -> dict[str, str]:
    """A digest for each file of the run's code, for its description. Raises NoInputError."""
    return {name: digest_of(path) for name, path in files_of(spec, code).items()}


def files_of(spec: RunSpec, code: Path | None) -> dict[str, Path]:
    """The run's code on this machine: each function's own folder, whole, by paths within it.

    That is `code`, all of which a module in it can import, or the package that is installed. What else is
    installed is the contributor's own choice. Raises NoInputError for a function that is not here, and
    ConfigError for a folder with much more than a run's code.
    """
    found: dict[str, Path] = {}
    for function in functions_of(spec):
        file = file_of(function, code).absolute()
        if code is not None and file.is_relative_to(code.absolute()):
            root = top = code.absolute()
        else:
            names = function.partition(":")[0].split(".")
            root = file.parents[len(names) - (file.stem != "__init__")]
            top = root / names[0]
        for path in _importable(top) if top.is_dir() else [file]:
            found[path.relative_to(root).as_posix()] = path
        if len(found) > _MOST_FILES:
            raise ConfigError(
                f"{top} has more than {_MOST_FILES} files that Python imports: all of them belong to the run",
                next_step="name a folder that has the run's code alone",
            )
    return found


def _importable(folder: Path) -> Iterator[Path]:
    """What Python may import from a folder, but for what it has compiled itself; also by links."""
    suffixes = tuple(all_suffixes())
    seen = set()
    for own, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(own)
        is_new = real not in seen  # links may lead in circles
        seen.add(real)
        folders[:] = sorted(
            name
            for name in folders
            if is_new and not name.startswith(".") and name != "__pycache__"
        )
        if is_new:
            yield from (Path(own, name) for name in sorted(files) if name.endswith(suffixes))


def file_of(function: str, code: Path | None) -> Path:
    """The file of `module:function`, first in the folder `code`; found without running anything.

    Raises NoInputError.
    """
    module = function.partition(":")[0]
    folders: list[str] | None = [*([str(code)] if code is not None else []), *sys.path]
    name, spec = "", None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, folders)
        if spec is None:
            break
        folders = list(spec.submodule_search_locations or [])
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise NoInputError(
            f"the run's function {function} is not on this machine: there is no module {module!r}"
            + (f" in {code} or installed" if code is not None else " installed"),
            next_step='name the folder that has it: in node.toml, as code = "/path/to/folder", or with '
            "--code FOLDER; of 'atoll init' with --from",
        )
    return Path(spec.origin)


def digest_of(path: Path) -> str:
    """BLAKE3 of the file, in hex."""
    return blake3.blake3(path.read_bytes()).hexdigest()


def find_code(code: Path | None) -> None:
    """Lets this process import what is in the folder."""
    if code is not None and str(code) not in sys.path:
        sys.path.insert(0, str(code))


def loaded(function: str) -> Callable[..., Any]:
    """The function itself: runs its module. Raises ConfigError where it is not to be had."""
    module_name, _, name = function.partition(":")
    with_reason = "see the traceback in the log, and tell the run's owner"
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:
        raise ConfigError(
            f"the run's module {module_name} fails when it is imported: {said(error)}",
            next_step=with_reason,
        ) from error
    if not callable(found):
        raise ConfigError(
            f"the run's module {module_name} has no function {name!r}",
            next_step="have the run's owner correct [model] function or [data] function",
        )
    call: Callable[..., Any] = found
    return call


def called(function: str, arguments: Mapping[str, Any]) -> Any:
    """What a run's function returns for its arguments. Raises ConfigError where it fails."""
    call = loaded(function)
    try:
        return call(**arguments)
    except AtollError:
        raise
    except Exception as error:
        next_step = "correct it, or the arguments in run.toml"
        if "meta tensor" in str(error):
            next_step = (
                "let it read no values of parameters, as torch's orthogonal does: Atoll first calls it for "
                "their names and shapes alone, with parameters on the meta device"
            )
        raise ConfigError(
            f"the run's function {function} failed: {said(error)}", next_step=next_step
        ) from error


def refuse(function: str, what: str) -> BadDataError:
    """What to say of a function that returns something else than it should."""
    return BadDataError(
        f"the run's function {function} returns {what}",
        next_step="docs/models-and-data.md says what it should return",
    )


_ATOLL = str(Path(__file__).parents[2])


def said(error: Exception) -> str:
    """The error, and the last line that it passed of code that is neither a library's nor Atoll's."""
    own = [(file, line) for file, line in _passed(error) if not file.startswith(_ATOLL)]
    # The name is enough, without the path.
    place = f" ({os.path.basename(own[-1][0])}, line {own[-1][1]})" if own else ""  # noqa: PTH119
    return f"{type(error).__name__}: {error}{place}"


def is_of_other_code(error: Exception) -> bool:
    """Whether neither Atoll nor a library that Atoll had called has failed, but code that a run brings."""
    passed = _passed(error)
    return bool(passed) and not passed[-1][0].startswith(_ATOLL)


def _passed(error: Exception) -> list[tuple[str, int]]:
    """Files and lines that an error has passed, the last one at last, without those of libraries."""
    libraries = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<")
    frames = ((frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__))
    return [(file, line) for file, line in frames if not file.startswith(libraries)]


def _toml_list(names: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
