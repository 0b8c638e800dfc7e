"""A model's folder as people have it: which of its files hold weights; or what it is instead of a model's.

Only names, JSON and links are looked at. Tensors are node.models.reading's business, and what config.json
says that of node.models.families.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from protocol.errors import BadDataError, NoInputError
from protocol.files.durable import as_typed

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
COPY_AGAIN = "copy the whole folder of the model again"

LFS_POINTER = b"version https://git-lfs"
"""How a file begins that a clone without Git LFS has in place of a large one."""

_ADAPTERS = "adapter_config.json"
_MERGE = "peft's model.merge_and_unload().save_pretrained(…)"
_ABOUT = "atoll.json"
_MERGE_OURS = "'atoll export --merged'"
_BELOW = ("*", "*/*", "*/*/*")
"""How far below a folder a model is looked for: a trainer's checkpoints, a snapshot in the hub's cache."""

_HUB_NAME = re.compile(
    r"(?:https?:/+[\w.-]+/)?(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+)|/tree/(?P<branch>[\w./-]+))?"
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_OTHER_FORMATS = (*_PICKLES, ".gguf", ".h5", ".msgpack")
_OF_TRAINERS = ("optimizer", "scheduler", "scaler", "rng_state", "training_args")
"""How names of files begin that trainers write beside a model's weights."""


def require_model(folder: Path) -> None:
    """Raises NoInputError or BadDataError, saying what it is, unless it is the folder of a whole model."""
    adapters = folder / _ADAPTERS
    if adapters.is_file():
        base = read_json(adapters).get("base_model_name_or_path") or "their model"
        is_ours = (folder / _ABOUT).is_file()
        raise BadDataError(
            f"{folder} holds adapters of {base}, which are no whole model",
            next_step=f"name the folder that {_MERGE_OURS if is_ours else _MERGE} writes; or that of {base}, "
            "to begin without them",
        )
    if (folder / CONFIG).exists():
        return
    if folder.is_file():
        raise NoInputError(
            f"{folder} is a file, and a model is taken from a folder with {CONFIG} and safetensors",
            next_step=_ANOTHER_FORMAT if folder.suffix in _OTHER_FORMATS else "name its folder",
        )
    if not folder.exists():
        raise NoInputError(
            f"{folder} is not there",
            next_step=f"name a folder as transformers' save_pretrained writes it{fetching(folder, '--from')}",
        )
    require_none_below(folder, CONFIG)
    other = next(_in_other_formats(folder), None)
    raise NoInputError(
        f"{folder / CONFIG} is not there" + (f", and weights are in {other} only" if other else ""),
        next_step=_ANOTHER_FORMAT if other else "name a folder as save_pretrained writes it",
    )


_ANOTHER_FORMAT = (
    "name a folder of the same model as save_pretrained writes it, with safetensors in fp32 or bf16"
)


def name_of_model(folder: Path) -> str:
    """What others know a model as: by its folder's name, or of a snapshot in the hub's cache by the hub's."""
    kind, *name = folder.parent.parent.name.split("--")
    return "/".join(name) if kind == "models" and folder.parent.name == "snapshots" else folder.name


def require_none_below(folder: Path, file: str) -> None:
    """Raises NoInputError where folders below this one, which has no such file, have one."""
    if below := sorted(path.parent for glob in _BELOW for path in folder.glob(f"{glob}/{file}")):
        raise NoInputError(
            f"{folder} has no {file}, and {len(below)} below it {'has' if len(below) == 1 else 'have'} one",
            next_step=f"name that folder itself, as {as_typed(below[0])}",
        )


def fetching(folder: Path, option: str) -> str:
    """What fetches what is not here, where it may be a name on the hub: nothing is fetched unasked."""
    found = _HUB_NAME.fullmatch(str(folder))
    if found is None:
        return ""
    to = found["name"].rpartition("/")[2]
    revision = found["revision"] or found["branch"]
    at = f" --revision {revision}" if revision else ""
    return f"; 'hf download {found['name']}{at} --local-dir {to}' fetches one, then {option} {to}"


def weight_files(folder: Path) -> dict[str, list[str] | None]:
    """The folder's files of weights, with the tensors that each has by the index; None where there is none.

    Raises NoInputError for a folder without weights, BadDataError for an index that is none.
    """
    if (folder / WEIGHTS).exists():
        return {WEIGHTS: None}
    if not (folder / INDEX).exists():
        if not has_weights(folder):
            raise NoInputError(
                f"{folder} has no weights: neither {WEIGHTS} nor {INDEX} is there",
                next_step=f"{COPY_AGAIN}; to begin with random weights, add --by transformers",
            )
        if (parts := _safetensors_of(folder)) != [WEIGHTS]:
            raise NoInputError(
                f"{folder} has {parts[0]}, and neither {WEIGHTS} nor {INDEX}, which says what is where",
                next_step=COPY_AGAIN,
            )
        return {WEIGHTS: None}  # a link that leads nowhere
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadDataError(f"{folder / INDEX} has no weight_map", next_step=COPY_AGAIN)
    files: dict[str, list[str] | None] = {}
    for file in sorted(set(map(str, weight_map.values()))):
        if Path(file).name != file:
            raise BadDataError(
                f"{folder / INDEX} names {file!r}, which is no file of that folder",
                next_step=COPY_AGAIN,
            )
        files[file] = [name for name, its in weight_map.items() if its == file]
    return files


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights beside its config. Raises BadDataError where other formats hold them."""
    if _safetensors_of(folder) or (folder / INDEX).exists():
        return True
    if other := next(_in_other_formats(folder), None):
        is_pickle = other.endswith((*_PICKLES, ".json"))
        raise BadDataError(
            f"{folder} has its weights as {other} only, and "
            + (
                "pickles are not read: they may run code"
                if is_pickle
                else "only safetensors are read"
            ),
            next_step="save the model with safetensors, as transformers' save_pretrained does",
        )
    return False


def _safetensors_of(folder: Path) -> list[str]:
    """By name; consolidated ones are the same weights once more, by the names of those who made the model."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    return [name for name in names if not name.startswith(("adapter_", "consolidated"))]


def _in_other_formats(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*")):
        name = path.name
        is_known = path.suffix in _OTHER_FORMATS or name.endswith((".bin.index.json",))
        is_consolidated = name.startswith("consolidated") and path.suffix == ".safetensors"
        if (is_known or is_consolidated) and not name.startswith(_OF_TRAINERS):
            yield name


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises NoInputError or BadDataError."""
    try:
        text = path.read_bytes()
        if text.startswith(LFS_POINTER):
            raise pointer_of_lfs(path)
        value = json.loads(text)
    except FileNotFoundError as error:
        raise not_there(path) from error
    except OSError as error:
        raise NoInputError(
            f"{path} cannot be read: {error.strerror}", next_step="make it a file that you may read"
        ) from error
    except ValueError as error:
        raise BadDataError(f"{path} is not JSON: {error}", next_step=COPY_AGAIN) from error
    if not isinstance(value, Mapping):
        raise BadDataError(f"{path} is no table of keys and values", next_step=COPY_AGAIN)
    return dict(value)


def not_there(path: Path) -> NoInputError:
    """What to say of a file of a model's folder that is missing, or a link to nowhere."""
    if not path.is_symlink():
        return NoInputError(f"{path} is not there", next_step=COPY_AGAIN)
    return NoInputError(
        f"{path} is a link to {path.readlink()}, which is not there",
        next_step="fetch the model again; folders of the hub's cache hold links, and 'cp -rL' copies what "
        "they lead to",
    )


def is_pointer_of_lfs(path: Path) -> bool:
    """Whether a clone without Git LFS has left a pointer in the file's place."""
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:  # whoever reads it says why
        return False


def pointer_of_lfs(path: Path) -> BadDataError:
    """What to say of a file that a clone without Git LFS has."""
    return BadDataError(
        f"{path} is a pointer of Git LFS, and not the file itself",
        next_step=f"type 'git lfs pull' in {path.parent}, or fetch the model with 'hf download'",
    )
