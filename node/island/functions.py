"""Functions that a run brings: where their files are, who agrees to run them, and getting at them.

A run names functions as `module:function`. Their code never travels: a contributor has it installed, or in
a folder of node.toml's `code`, says by name which runs may use it, and its digest is the run's. All of
that is decided without running a line of it; `loaded` runs it, in a rank.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
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
from protocol.models import FunctionModel
from protocol.run_spec import RunSpec


def functions_of(spec: RunSpec) -> list[str]:
    """What a node has to run of the run's own code."""
    names = [spec.model.function] if isinstance(spec.model, FunctionModel) else []
    if spec.data.function is not None and spec.data.function not in names:
        names.append(spec.data.function)
    return names


def check_functions(spec: RunSpec, *, allowed: Sequence[str], code: Path | None) -> None:
    """Looks whether this node may run the run's functions, and whether they are the run's.

    Raises NotPermittedError with the line to write where nobody has agreed, NoInputError for one that is
    not here, ProtocolMismatchError for a file that differs from the run's. Runs none of them.
    """
    named = functions_of(spec)
    if named and spec.run.name not in allowed:
        line = f"allow_functions = {_toml_list([*allowed, spec.run.name])}"
        raise NotPermittedError(
            f"run {spec.run.name!r} trains with code of its own, {' and '.join(named)}, and this node's "
            "owner has not allowed it",
            next_step=f"read that code, and if you trust it write '{line}' into node.toml, or start "
            f"with --allow-function {spec.run.name}",
        )
    sources = {} if spec.description is None else spec.description.sources
    for function in named:
        path = file_of(function, code)
        ours, theirs = digest_of(path), sources.get(function, "")
        if ours != theirs:
            raise ProtocolMismatchError(
                f"{path} is not the run's code for {function}: its digest is {ours[:12]}…, and the run's "
                f"is {theirs[:12] or 'not known'}…",
                next_step="get the file that the run was made with, and name its folder as code in "
                "node.toml",
            )


def sources_of(spec: RunSpec, code: Path | None) -> dict[str, str]:
    """A digest for the file of each function, for the run's description. Raises NoInputError."""
    return {function: digest_of(file_of(function, code)) for function in functions_of(spec)}


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
            next_step='name the folder that has it in node.toml, as code = "/path/to/folder"',
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
            f"the run's module {module_name} fails when it is imported: {_said(error)}",
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
        raise ConfigError(
            f"the run's function {function} failed: {_said(error)}",
            next_step="correct it, or the arguments in run.toml",
        ) from error


def refuse(function: str, what: str) -> BadDataError:
    """What to say of a function that returns something else than it should."""
    return BadDataError(
        f"the run's function {function} returns {what}",
        next_step="docs/models-and-data.md says what it should return",
    )


def _said(error: Exception) -> str:
    """The error, and the last line of code that it passed."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = ""
    if trace is not None:
        file = os.path.basename(trace.tb_frame.f_code.co_filename)  # noqa: PTH119 - a name, not a path
        place = f" ({file}, line {trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{place}"


def _toml_list(names: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
