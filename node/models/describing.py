"""What a run's model is, found out where it can be built, and written into the run's folder.

`description.json` holds its tensors, and the digest of the weights that the run begins with where they
are given; `first.safetensors` holds those that torch has drawn. `atoll init` has it made by a process of
this side, for the coordinator imports no torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from node.models.reading import (
    CONFIG,
    FIRST_WEIGHTS,
    digest_of_first,
    read_config,
    read_json,
    read_settings,
    read_weights,
    write_first,
)
from node.outer_state import Vector
from protocol.console import count_in_words
from protocol.errors import BadDataError, CannotCreateError, UsageError
from protocol.files import refusal_to_write, write_atomically
from protocol.layout import layout_of
from protocol.models import DecoderModel, Description, TransformersModel
from protocol.run_spec import DESCRIPTION_FILE, RunSpec, load_run_file

RUN_FILE = "run.toml"
TOKENIZER = "tokenizer.json"
LONGEST_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len")
"""How configurations of transformers call the most positions of a sample."""


def facts_of(
    source: Path | None, *, by: str, context: int | None, data: Sequence[str]
) -> dict[str, Any]:
    """What `atoll init` writes into a run file for a transformers folder and for data."""
    facts: dict[str, Any] = {}
    if source is not None:
        spec, vocabulary = _model_of(source, by=by, context=context)
        facts |= {
            "model": spec.model.model_dump(mode="json", exclude_none=True),
            "num_parameters": spec.num_parameters,
            "num_layers": spec.num_layers,
            "model_vocab_size": vocabulary,
        }
    if data:
        facts |= _facts_of_data(data)
        if source is not None and facts["data"]["source"] == "tokens":
            _require_same_tokenizer(source, Path(data[0]))
    return facts


def _model_of(source: Path, *, by: str, context: int | None) -> tuple[RunSpec, int]:
    """The folder's model as a run has it, and its vocabulary."""
    if by == "decoder":
        decoder = read_config(source, context=context)
        return RunSpec(model=decoder), decoder.vocab_size
    from node.island.models.describing import describe

    config = read_json(source / CONFIG)
    longest = [config[key] for key in LONGEST_CONTEXT if isinstance(config.get(key), int)]
    if context is None and not longest:
        raise UsageError(
            f"{source / CONFIG} does not say how long its samples may be",
            next_step="say it with --context",
        )
    spec = RunSpec(model=TransformersModel(source="transformers", context=context or longest[0]))
    description = describe(spec, source)
    return spec.model_copy(update={"description": description}), int(config.get("vocab_size", 0))


def _require_same_tokenizer(source: Path, tokens: Path) -> None:
    """Raises BadDataError where both have a tokenizer.json and they differ."""
    ours, theirs = tokens / TOKENIZER, source / TOKENIZER
    if ours.is_file() and theirs.is_file() and ours.read_bytes() != theirs.read_bytes():
        raise BadDataError(
            f"the tokens in {tokens} were made with another tokenizer than {theirs}",
            next_step=f"make them with it: atoll data prepare … --tokenizer {theirs} --out NEWDIR",
        )


def _facts_of_data(paths: Sequence[str]) -> dict[str, Any]:
    """Tokens by their manifest, or text as it stands."""
    if not any(Path(path).is_dir() for path in paths):
        return {"data": {"source": "text", "paths": list(paths)}}
    if len(paths) > 1:
        raise UsageError(
            f"--data names {len(paths)} paths, and a folder of tokens stands alone",
            next_step="name one folder that 'atoll data prepare' wrote, or files and globs of text",
        )
    from node.island.data.manifest import read_manifest

    manifest = read_manifest(Path(paths[0]))
    table = {"source": "tokens", "paths": list(paths), "digest": manifest.digest().hex()}
    return {"data": table, "vocab_size": manifest.vocab_size}


def describe_run(folder: Path, *, source: Path | None, is_forced: bool) -> str:
    """Writes the description of the run in `folder`; says what it wrote.

    Raises UsageError for a run that needs none, CannotCreateError when it is there already.
    """
    path = folder / DESCRIPTION_FILE
    if path.exists() and not is_forced:
        raise CannotCreateError(
            f"{path} is there already",
            next_step="add --force to make it anew; a run that has begun keeps what it has",
        )
    spec = load_run_file(folder / RUN_FILE)
    description = _described(spec, folder, source)
    write_atomically(path, description.to_json())
    count = count_in_words(spec.model_copy(update={"description": description}).num_parameters)
    if description.first_digest is None:
        return f"{count} parameters, drawn from the run's seed"
    # The folder may have another name by the time that somebody reads this.
    is_decoder = isinstance(spec.model, DecoderModel)
    place = str(source) if is_decoder else f"DIR/{FIRST_WEIGHTS}"
    return (
        f"{count} parameters, which begin with given weights ({description.first_digest[:12]}); one node has "
        f"to be started with them: atoll node start --weights {place}"
    )


def _described(spec: RunSpec, folder: Path, source: Path | None) -> Description:
    """The description; first weights that torch has read or drawn are written into the run's folder."""
    if isinstance(spec.model, DecoderModel):
        if source is None:
            raise UsageError(
                "the tensors of this run's model follow from its sizes, and its weights from its seed",
                next_step="name a transformers folder with --from to begin with its weights",
            )
        weights = np.empty(spec.num_parameters, np.float32)
        read_weights(source, spec, weights)
        digest = digest_of_first(weights)
        return Description.model_validate({"first_digest": digest.hex(), **read_settings(source)})
    from node.island.models.describing import describe, first_vector

    if isinstance(spec.model, TransformersModel) and source is None:
        raise UsageError(
            'a run with [model] source = "transformers" is made from the folder of a model',
            next_step="name it with --from; one without weights begins with random ones",
        )
    own = Path.cwd() if source is None else source
    description = describe(spec, own)
    described = spec.model_copy(update={"description": description})
    is_whole = isinstance(spec.model, TransformersModel) and spec.adapters is None
    is_given = is_whole and any(own.glob("*.safetensors"))
    weights = first_vector(described, own if is_given else None)
    _write_weights(folder / FIRST_WEIGHTS, described, weights)
    return description.model_copy(update={"first_digest": digest_of_first(weights).hex()})


def _write_weights(path: Path, spec: RunSpec, weights: Vector) -> None:
    """Writes the file whole or not at all; raises an AtollError where it cannot be."""
    beside = path.with_name(f".{path.name}.new")
    try:
        write_first(beside, layout_of(spec), weights)
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        raise refusal_to_write(path, OSError(str(error))) from error
    finally:
        beside.unlink(missing_ok=True)
