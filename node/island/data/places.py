"""Where a node has the data of its run, as its owner says. Importing it costs nothing."""

import glob
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError, NotPermittedError
from protocol.files.durable import expanded
from protocol.run.run_spec import DataSection, RunSpec

DEFAULT_CACHE_BYTES = 20 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlaces:
    """Folders and limits for the data of a run."""

    folder: Path  # where relative paths begin
    own: str = ""  # before the run file's paths; "" for none
    may_read: tuple[Path, ...] = ()  # where text of the run file may lie, beside `folder`
    code: Path | None = None  # where functions of the run are found, beside what is installed
    base: Path | None = None  # the model that the run's adapters belong to
    cache: Path | None = None  # for what is fetched; None: nothing can be
    cache_bytes: int = DEFAULT_CACHE_BYTES
    leave_bytes: int = 0  # that stay free on its disk, for the node's records
    has_supply: bool = False  # the daemon has what is not here come from peers before it is read


def reads_in_words(data: DataSection, *, own: str) -> str:
    """What a run reads of a machine, whose owner has named data of his own or not (`own` is empty).

    Patterns are shown as Python quotes them: whoever writes a run file must not move a contributor's cursor.
    """
    if own:
        return f"{own!r}, which you have named"
    if data.private:
        return (
            "data of your own, which you name: data in node.toml, or 'atoll node start --data PATH'"
        )
    named = ", ".join(map(repr, data.paths))
    match data.source:
        case "python-stdlib":
            return "the standard library of Python"
        case "text":
            return f"text that the run names, from where the node is started: {named}"
        case "tokens":
            return f"tokens that the run names, here or from other members: {named}"
        case "function":
            return f"what the run's function gives: {data.function}"
        case "loop":
            return "nothing of it, for the run names no data: a training loop of yours has its own"


def refusal_without_a_loop(spec: RunSpec) -> ConfigError:
    """What to say where a run without data is to be trained, measured or asked about here."""
    return ConfigError(
        f"run {spec.run.name!r} has no data of its own: its nodes train by loops of theirs, on what these "
        "bring",
        next_step="start with --loop, and a training loop that calls atoll.join (docs/loops.md)",
    )


def check_reach(patterns: Iterable[str], places: DataPlaces) -> None:
    """Refuses text that a run file names outside of what this machine's owner lets it read.

    Whoever writes a run file must not choose which of a contributor's files are trained on, and so
    told to the swarm: none above the node's folder or elsewhere, and nothing hidden. Paths are compared as
    they are written; a link in the folder is its owner's doing. Raises NotPermittedError.
    """
    here = places.folder.absolute()
    roots = [Path(os.path.normpath(root)) for root in (here, *places.may_read)]
    for pattern in patterns:
        whole = here / expanded(pattern)
        at = Path(os.path.normpath(whole))
        root = next((root for root in roots if at.is_relative_to(root)), None)
        first_wild = next((i for i, p in enumerate(whole.parts) if glob.has_magic(p)), None)
        climbs = first_wild is not None and ".." in whole.parts[first_wild:]
        if root is None or climbs:
            why = f"it lies outside of {here}"
        elif any(part.startswith(".") for part in at.relative_to(root).parts):
            why = "it is hidden"
        else:
            continue
        raise NotPermittedError(
            f"the run wants to train on {pattern!r} of this machine, and {why}: its owner has not "
            "allowed that",
            next_step=f'if you want it, add may_read = ["{before_wildcards(at)}"] to node.toml; '
            "or name text of yours: data there, or --data",
        )


def before_wildcards(pattern: Path) -> Path:
    """The folder before the first wildcard, or that of a file."""
    parts = pattern.parts
    num_fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:num_fixed])


def how_to_have_the_same(data: DataSection) -> str:
    """What to do where other nodes train on other data than this one."""
    match data.source:
        case "function":
            return (
                f"let {data.function} give the same samples on all nodes: a seed for what it draws, sorted "
                "names for what it lists, the same files"
            )
        case "python-stdlib":
            return (
                f"take the same Python on all nodes, which is {platform.python_version()} here: its library "
                "is the run's text"
            )
    return (
        "name the very data that the run was made with, as data in node.toml; a file that was added or "
        "changed since makes them others"
    )
