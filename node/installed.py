"""Which of Atoll's extras are installed here: said in one sentence before anything of them is imported."""

import platform
from collections.abc import Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from protocol.errors import SystemRefusedError
from protocol.run.run_spec import RunSpec

NODE = ("torch", "numba", "hivemind", "numpy", "safetensors")
"""What a node imports beside what coordinators and queries do: the extra `node`."""

HELPER = ("numba", "hivemind", "numpy", "safetensors", "base58", "netaddr", "multihash", "uvloop")
"""What a helper does: the extra `helper`, and hivemind without what its own package asks for."""

READING = ("numpy",)
"""What the commands about data do."""


def require_installed(packages: Sequence[str] = NODE, *, to: str) -> None:
    """Raises SystemRefusedError where a package is missing that is needed `to` do something."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise SystemRefusedError(
            f"{', '.join(missing)} {verb} not installed, and needed to {to}",
            next_step="pip install 'atoll[helper]' && pip install --no-deps hivemind"
            if packages is HELPER
            else "pip install 'atoll[node]'",
        )


_EXTRAS = {
    "pyarrow": "parquet",
    "tokenizers": "tokenizers",
    "transformers": "transformers",
    "fsspec": "remote",
}


def needs_package(name: str, *, what: str) -> Any:
    """A module that only some data needs; SystemRefusedError says what to install where it is missing."""
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ImportError as error:
        raise SystemRefusedError(
            f"{what}, and the package {package} is not installed",
            next_step=f"pip install 'atoll[{_EXTRAS[package]}]'",
        ) from error


def software_of(spec: RunSpec) -> str:
    """Programs by whose versions ranks here may compute something else than elsewhere; nothing is loaded.

    Of Python's own library, where it is the text, each release has another.
    """
    is_text = spec.data.source == "python-stdlib"
    python = platform.python_version() if is_text else _minor(platform.python_version())
    programs = ["torch"]
    if spec.model.source == "transformers":
        programs.append("transformers")
    if spec.adapters is not None:
        programs.append("peft")
    found = [f"Python {python}"]
    for program in programs:
        try:
            found.append(f"{program} {_minor(metadata.version(program))}")
        except metadata.PackageNotFoundError:  # which a start says
            continue
    return ", ".join(found)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
