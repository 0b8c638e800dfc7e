"""A node's folder and its settings: what a contributor may change about their own machine."""

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import ConfigError
from protocol.files import write_atomically

IDENTITY_FILE = "identity.key"
SETTINGS_FILE = "node.toml"
SNAPSHOTS_FOLDER = "snapshots"

TEMPLATE = """\
# This machine's part in the swarm. Changes count from the next 'atoll node start'.

# What people call this node.
name = {name}

# Where to train: "auto" takes a GPU when there is one; or "cpu", "cuda", "mps", "xpu".
device = "auto"

# Training processes. With GPUs, one for each.
ranks = 1

# Address and port that peers connect to; port 0 picks a free one. An empty address means loopback
# for a coordinator on this machine, and every interface otherwise.
listen = ""
port = 0

# Host to tell peers instead of the one found here, when a router forwards the port: an address or
# a name. Empty means the addresses found.
announce = ""
"""


class NodeSettings(BaseModel):
    """node.toml. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=64)]
    device: str = "auto"
    ranks: Annotated[int, Field(ge=1, le=64)] = 1
    listen: str = ""
    port: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    announce: str = ""


def write_settings(folder: Path, *, name: str) -> None:
    """Writes a commented node.toml, unless the contributor has one already."""
    path = folder / SETTINGS_FILE
    if not path.exists():
        escaped = name.replace("\\", "\\\\").replace('"', '\\"')
        write_atomically(path, TEMPLATE.format(name=f'"{escaped}"').encode())


def load_settings(folder: Path, **overrides: Any) -> NodeSettings:
    """Reads node.toml; options of the command line that are not None come first.

    Raises ConfigError with the first thing that is wrong.
    """
    path = folder / SETTINGS_FILE
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        values = {"name": folder.name or "node"}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}", next_step="correct that line") from error
    values |= {key: value for key, value in overrides.items() if value is not None}
    try:
        return NodeSettings.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        what = (
            f"{path}: {key}: unknown key"
            if problem["type"] == "extra_forbidden"
            else f"{path}: {key} = {problem['input']!r}: {problem['msg']}"
        )
        raise ConfigError(
            what, next_step="correct it, or remove the line to take the default"
        ) from error
