"""Run files as they are read: by their owner's hand, with a description beside them, or from a coordinator.

What one may say stands in protocol.run.run_spec; here is who reads it, and what to type where it is wrong.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from protocol.errors import ConfigError
from protocol.files.durable import as_typed, read_toml
from protocol.run.models import DecoderModel, first_problem
from protocol.run.run_spec import DataSection, RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What `atoll init` was asked for that the nodes' side knows the meaning of, and is asked by it."""

    by: str | None = None
    """Who builds the model: "decoder", "transformers", "function"; None: nobody new."""

    function: str | None = None
    lora: int | None = None
    context: int | None = None
    data: Sequence[str] = ()
    data_function: str | None = None
    private: bool = False
    loop: bool = False  # nodes train by loops of their own, on data of their own
    tokenizer: str | None = None
    batch: int | None = None


def validated(tables: dict[str, Any], *, origin: str) -> RunSpec:
    """Checks tables from `origin`; raises ConfigError with the first thing that is wrong."""
    exchange = tables.get("exchange")
    if isinstance(exchange, dict) and "preset" in exchange:
        raise ConfigError(
            f"{origin}: [exchange] preset = {exchange['preset']!r} is not settled yet",
            next_step="it is by 'atoll init DIR --run FILE', or by the first "
            "'atoll coordinator start DIR'",
        )
    try:
        return RunSpec.model_validate(tables)
    except ValidationError as error:
        raise ConfigError(
            f"{origin}: {first_problem(error, RunSpec)}",
            next_step="correct it; 'atoll init DIR' writes a run.toml that explains each key",
        ) from error


def validated_file(tables: dict[str, Any], *, origin: str) -> RunSpec:
    """As `validated`, of what somebody wrote; also refuses what they wrote in vain.

    Not of what a coordinator sends: defaults stand there like all else.
    """
    spec = validated(tables, origin=origin)
    if spec.outer.optimizer == "sgd" and (momentum := tables["outer"].get("momentum")):
        raise ConfigError(
            f'{origin}: [outer] momentum = {momentum} belongs to optimizer = "nesterov", not to "sgd"',
            next_step='remove momentum, or write optimizer = "nesterov"',
        )
    default = DataSection.model_fields["held_out"].default  # as it stands in the template
    if spec.data.source == "tokens" and spec.data.held_out != default:
        raise ConfigError(
            f"{origin}: [data] held_out = {spec.data.held_out} says nothing of tokens",
            next_step="remove it: what is held out was settled when the tokens were prepared",
        )
    evaluation = tables.get("evaluation", {})
    if "prompt_tokens" in evaluation and not spec.evaluation.prompts:
        raise ConfigError(
            f"{origin}: [evaluation] prompt_tokens = {spec.evaluation.prompt_tokens} has no effect without "
            "prompts",
            next_step='add prompts, as prompts = ["The sea "], or remove it',
        )
    inner = tables.get("inner", {})
    if "steps" in inner and spec.inner.round_tokens is not None:
        raise ConfigError(
            f"{origin}: [inner] steps = {spec.inner.steps} and round_tokens = {spec.inner.round_tokens} "
            "both say how long a round is",
            next_step="remove steps, and nodes share the tokens of a round; or remove round_tokens, "
            "and each node has its steps",
        )
    return spec


def tables_of(spec: RunSpec) -> dict[str, Any]:
    """What a run.toml of the run says: its description lies beside it, and defaults stand for themselves."""
    tables = spec.model_dump(mode="json", exclude_defaults=True, exclude={"description"})
    if spec.model.source != "decoder":  # what it is told from the others by
        tables["model"]["source"] = spec.model.source
    return tables


DESCRIPTION_FILE = "description.json"
"""Beside a run.toml whose model was built to be known (`atoll node describe`)."""

MADE_OF = "made_of"
"""In that file alone, and no part of the run: what of the run file its description follows from."""


def description_file(spec: RunSpec) -> bytes:
    """The file that tells the description of a run, and what it was made of: people may read it."""
    assert spec.description is not None
    told = spec.description.model_dump(mode="json", exclude_defaults=True)
    if (num_samples := spec.description.num_samples) is not None:
        told["num_samples"] = num_samples
    if spec.description.has_loaded:
        told["has_loaded"] = True
    return (json.dumps({**told, MADE_OF: _made_of(spec)}, indent=1) + "\n").encode()


def _made_of(spec: RunSpec) -> dict[str, dict[str, Any]]:
    """Keys of the run file, by tables, with which another model, or other frozen values, would be built."""
    model = spec.model.model_dump(mode="json")
    if spec.model.source == "transformers":
        # Estimates follow from it, and stages, which nodes with pipelines compare.
        del model["context"]
    found = {"model": model}
    if spec.adapters is not None:
        found["lora"] = spec.lora.model_dump(mode="json", include={"rank", "targets"})
    if spec.data.source == "function":
        found["data"] = spec.data.model_dump(mode="json", include={"function", "arguments"})
    if spec.model.source == "function" and spec.description and spec.description.num_frozen:
        found["run"] = {"seed": spec.run.seed}
    if spec.first_digest is not None:  # it is of the tensors in the order of fragments
        found["exchange"] = {"fragments": spec.exchange.fragments}
    return found


def _refuse_other_than_described(
    spec: RunSpec, made_of: dict[str, dict[str, Any]], path: Path
) -> None:
    """Raises ConfigError for a run file that was changed since its model was described."""
    now = _made_of(spec)
    changed = [
        (table, key, made_of.get(table, {}).get(key), now.get(table, {}).get(key))
        for table in dict.fromkeys((*made_of, *now))
        for key in dict.fromkeys((*made_of.get(table, {}), *now.get(table, {})))
    ]
    changed = [each for each in changed if each[2] != each[3]]
    has_other_order = any(table == "exchange" for table, *_ in changed)
    if isinstance(spec.model, DecoderModel) and not has_other_order:  # only its weights are given
        try:
            described = DecoderModel.model_validate(made_of["model"])
        except (KeyError, ValidationError):
            return  # of a version that has other keys
        if [*described.tensors()] == [*spec.model.tensors()]:
            return
    if not changed:
        return
    table, key, was, is_now = changed[0]
    is_fork = spec.description is not None and spec.description.first_fragments is not None
    raise ConfigError(
        f"{path}: [{table}] {key} is {_as_toml(is_now)}, and {DESCRIPTION_FILE} beside it "
        f"describes the model with {_as_toml(was)}",
        next_step="write it as it was; or describe the model anew: "
        + (
            f"'atoll init NEWDIR --run {as_typed(path)} --from CODE', where a function makes it"
            if is_fork
            else f"'atoll node describe {as_typed(path.parent)} --force --from FOLDER', with its weights "
            "or its code"
        ),
    )


def _refuse_less_than_a_batch(spec: RunSpec, path: Path) -> None:
    """Raises ConfigError for a batch that was made larger than the samples of the run's function are many."""
    num_samples = None if spec.description is None else spec.description.num_samples
    if num_samples is not None and spec.inner.batch > num_samples:
        raise ConfigError(
            f"{path}: [inner] batch is {spec.inner.batch}, and {spec.data.function} gave {num_samples} "
            "samples to train on when the run was described: no node could start",
            next_step="lower batch; or where it gives more by now: 'atoll node describe "
            f"{as_typed(path.parent)} --force --from FOLDER', with its code",
        )


def _as_toml(value: object) -> str:
    return "nothing" if value is None else json.dumps(value)


WHEN_MISSING = "restore it from a backup, or make a new run with 'atoll init NEWDIR'"
"""What to do without a file that is made together with others: no other one fits those."""


def load_run_file(path: Path) -> RunSpec:
    """Reads a run.toml; raises NoInputError or ConfigError."""
    tables = read_toml(path, when_missing=WHEN_MISSING)
    return validated_file(tables, origin=str(path))


def description_beside(folder: Path) -> dict[str, Any] | None:
    """What the description in a run's folder says, with MADE_OF; None where there is none.

    Raises ConfigError for one that cannot be read.
    """
    path = folder / DESCRIPTION_FILE
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise _not_a_description(path, str(error)) from error


def _not_a_description(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read: {why}",
        next_step=f"make it anew: 'atoll node describe {as_typed(path.parent)} --force'",
    )


def load_run_folder(
    folder: Path, run_file: str, *, may_be_stale: bool = False, named: Path | None = None
) -> RunSpec:
    """Reads a run.toml with the description beside it; raises NoInputError or ConfigError.

    The second also for a model that needs a description and has none, or has that of another model; the
    latter `may_be_stale` where it is to be made anew. `named` is the run file that this one is a copy of.
    """
    spec = load_run_file(folder / run_file)
    path = folder / DESCRIPTION_FILE
    if (description := description_beside(folder)) is not None:
        made_of = description.pop(MADE_OF, None)
        if not isinstance(made_of, dict):  # else an empty one would say that the run begins anew
            raise _not_a_description(path, "it does not say what it was made of")
        spec = validated({**spec.model_dump(), "description": description}, origin=str(path))
        if not may_be_stale:
            _refuse_other_than_described(spec, made_of, named or folder / run_file)
            _refuse_less_than_a_batch(spec, named or folder / run_file)
    if not spec.is_described:
        raise ConfigError(
            f'{folder / run_file}: a model with source = "{spec.model.source}" is known only once it was '
            f"built, and {path} is not there",
            next_step=f"on a machine with torch: 'atoll node describe {as_typed(folder)}'",
        )
    return spec


def run_from_json(text: str) -> RunSpec:
    """Reads what the coordinator sent; raises ConfigError when this software cannot follow it."""
    try:
        return validated(json.loads(text), origin="the coordinator's run file")
    except ConfigError as error:
        # It was valid there: what we lack, a codec for example, a newer version has.
        raise ConfigError(
            error.what, next_step="install the coordinator's version of Atoll: 'atoll --version'"
        ) from error
