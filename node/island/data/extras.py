"""Packages that only some data needs, imported when it does."""

from importlib import import_module
from typing import Any

from protocol.errors import SystemRefusedError

_EXTRAS = {
    "pyarrow": "parquet",
    "tokenizers": "tokenizers",
    "transformers": "transformers",
    "fsspec": "remote",
}


def needs_package(name: str, *, what: str) -> Any:
    """The module; raises SystemRefusedError with what to install where it is not there."""
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ImportError as error:
        raise SystemRefusedError(
            f"{what}, and the package {package} is not installed",
            next_step=f"pip install 'atoll[{_EXTRAS[package]}]'",
        ) from error
