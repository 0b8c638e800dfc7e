"""What a run's model is, found out where it can be built, and written into the run's folder.

`description.json` holds its tensors, and the digest of the weights that the run begins with where they
are given; `first.safetensors` holds those weights. `atoll init` has both made by a process of this side,
for the coordinator's imports no torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from node.first_state import FIRST_WEIGHTS, digest_of_first, write_first
from protocol.console import count_in_words
from protocol.errors import CannotCreateError, UsageError
from protocol.files import refusal_to_write, write_atomically
from protocol.layout import layout_of
from protocol.models import DecoderModel, Description
from protocol.run_spec import DESCRIPTION_FILE, RunSpec, load_run_file

RUN_FILE = "run.toml"


def facts_of(source: Path | None, *, context: int | None, data: Sequence[str]) -> dict[str, Any]:
    """What `atoll init` writes into a run file for a transformers folder and for data."""
    facts: dict[str, Any] = {}
    if source is not None:
        from node.model_folder import read_config

        spec = RunSpec(model=read_config(source, context=context))
        facts |= {
            "model": spec.model.model_dump(mode="json", exclude_none=True),
            "num_parameters": spec.num_parameters,
            "num_layers": spec.num_layers,
        }
    if data:
        facts |= {"data": {"source": "text", "paths": list(data)}}
    return facts


def describe_run(folder: Path, *, source: Path | None, is_forced: bool) -> str:
    """Writes the description of the run in `folder`, and its first weights; says what it wrote.

    Raises UsageError for a run that needs none, CannotCreateError when it is there already.
    """
    path = folder / DESCRIPTION_FILE
    if path.exists() and not is_forced:
        raise CannotCreateError(
            f"{path} is there already",
            next_step="add --force to make it anew; a run that has begun keeps what it has",
        )
    spec = load_run_file(folder / RUN_FILE)
    description, weights = _described(spec, source)
    if weights is not None:
        digest = digest_of_first(weights)
        description = description.model_copy(update={"first_digest": digest.hex()})
        _write_weights(folder / FIRST_WEIGHTS, spec, description, weights)
    write_atomically(path, description.to_json())
    spec = spec.model_copy(update={"description": description})
    count = count_in_words(spec.num_parameters)
    if weights is None:
        return f"{path}: {count} parameters"
    return (
        f"{path}: {count} parameters, which begin with {folder / FIRST_WEIGHTS} "
        f"({digest.hex()[:12]}); start one node with it: atoll node start --weights {FIRST_WEIGHTS}"
    )


def _described(spec: RunSpec, source: Path | None) -> tuple[Description, Any]:
    if isinstance(spec.model, DecoderModel):
        if source is None:
            raise UsageError(
                "the tensors of this run's model follow from its sizes, and its weights from its seed",
                next_step="name a transformers folder with --from to begin with its weights",
            )
        from node.model_folder import read_weights

        weights = np.empty(spec.num_parameters, np.float32)
        read_weights(source, spec, weights)
        return Description(), weights
    raise NotImplementedError


def _write_weights(path: Path, spec: RunSpec, description: Description, weights: Any) -> None:
    beside = path.with_name(f".{path.name}.new")
    try:
        described = spec.model_copy(update={"description": description})
        write_first(beside, layout_of(described), weights)
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        raise refusal_to_write(path, OSError(str(error))) from error
    finally:
        beside.unlink(missing_ok=True)
