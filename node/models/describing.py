"""What a run's model is, found out where it can be built, and written into the run's folder.

`description.json` holds its tensors, and the digest of the weights that the run begins with where they
are given; `first.safetensors` holds those that torch has drawn. `atoll init` has it made by a process of
this side, which also says what of a run file follows from a model's folder and from data: the coordinator
imports no torch. The digest is of the tensors in the order of fragments, which are chosen by what was found:
so a folder's weights are read by a second process, once the run file is there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from node.island.data.dataset import refuse_other_than_text, sizes_of_splits, text_files
from node.island.models.code import DIGITS, code_digest, functions_of
from node.island.parallel.auto_mesh import DeviceKind, need_of, node_bytes, wanted_bytes
from node.island.parallel.mesh_shape import LocalTraining, MeshShape
from node.kept import say_of_many
from node.machine.hardware import Hardware, look_around
from node.models.ends_of_answers import look_at_ends_of_answers, look_at_ends_of_private_answers
from node.models.folders import CONFIG, has_weights
from node.models.reading import (
    check_tensors,
    digest_of_first,
    look_at_model,
    read_config,
    read_settings,
    read_tensors,
    read_weights,
    refuse_what_is_no_number,
    stored_tensors,
    tensors_in,
    write_first,
)
from node.outer_state import Vector
from protocol.errors import BadDataError, CannotCreateError, NoInputError, UsageError
from protocol.files.durable import as_typed, refusal_to_write, write_atomically
from protocol.run.models import (
    BYTES_VOCABULARY,
    FIRST_WEIGHTS,
    DecoderModel,
    Description,
    FunctionModel,
    TransformersModel,
    layout_of,
)
from protocol.run.run_files import (
    DESCRIPTION_FILE,
    Asked,
    description_file,
    load_run_file,
    load_run_folder,
    validated,
)
from protocol.run.run_spec import DataSection, RunSpec
from protocol.service.limits import usable_cores
from protocol.terminal.console import count_in_words

RUN_FILE = "run.toml"
TOKENIZER = "tokenizer.json"
MOST_SAMPLES = 1 << 12
"""Of one step of one device: nobody wants more, however small the model is."""

HAS_LOADED = (
    "the function loads its weights, for another seed gives the same: the run goes on with them, and rates "
    "and exchanges are chosen for that; if it draws them by a seed of its own, let it take the run's"
)

COMPARES_SAMPLES = (
    "the loss compares samples of a batch with each other, so that of one says nothing: whether members have "
    "trained the samples that they were leased is not checked in this run, and micro_batch and copies, which "
    "part a batch, have to be alike on all nodes"
)

_MORE_THAN_MODEL = (
    "adapters of rank {} have more parameters than the model below them: a lower rank learns as much with "
    "fewer, and without --lora all of the model is trained"
)

Tables = dict[str, dict[str, Any]]


def describe_asked(folder: Path, source: Path | None, asked: Asked) -> dict[str, Any]:
    """Finds out all of a new run, writes its description into its folder, and says what was found.

    What is cheap is looked at first: a mistake is told before weights are read.
    """
    tables: Tables = {}
    model_vocab_size = None
    notes: list[str] = []
    if source is not None and asked.by != "function":
        # What is no folder of a model is told without loading transformers.
        look_at_model(source)
    data, vocab_size, there = _data_of(source, asked)
    if (packed := there.get("packed_context")) is not None:
        asked = replace(asked, context=_as_packed(packed, asked, notes))
    if there.pop("has_answers", False) and asked.by != "function":
        if _keeps_documents_apart(source, asked, notes):
            data["across_documents"] = False
        look_at_ends_of_answers(source, asked, notes)
    if data.get("private") and data["source"] == "tokens":
        look_at_ends_of_private_answers(source, asked.tokenizer, notes)
    has_samples = asked.data_function is not None or asked.loop
    if asked.by == "function" and not has_samples and asked.context is None:
        raise UsageError(
            f"the model of --function {asked.function} learns from tokens, and nothing says how many a "
            "sample has",
            next_step="say it with --context, as --context 512",
        )
    if asked.by is not None:
        tables["model"], model_vocab_size = _model_of(source, asked)
    if asked.lora is not None:
        tables["lora"] = {"rank": asked.lora}
    tables["data"] = data
    if source is not None and model_vocab_size is not None:
        _require_fitting_tokens(source, asked, tables["data"], model_vocab_size, vocab_size)
    if tables["data"].get("source") == "text" and not asked.private:
        there = _look_at_text(asked.data, notes)
    facts: dict[str, Any] = {**tables, "vocab_size": vocab_size, **there}
    facts["notes"] = notes
    facts.pop("lora", None)
    if asked.by is None:
        return facts
    inner = {} if asked.batch is None else {"batch": asked.batch}
    spec = validated({**tables, "inner": inner}, origin="the new run")
    if asked.by == "transformers" and source is not None and not has_weights(source):
        notes.append(f"{source} has no weights, so the run begins with random ones")
    found = _facts_of(_describe(folder, spec, source), source)
    return {**facts, **found, "notes": [*notes, *found["notes"]]}


def describe_run(folder: Path, *, source: Path | None, is_forced: bool) -> dict[str, Any]:
    """Describes the run of the run file in `folder`; says what was found.

    Raises UsageError for a run that needs none, CannotCreateError when it is there already.
    """
    path = folder / DESCRIPTION_FILE
    if path.exists() and not is_forced:
        raise CannotCreateError(
            f"{path} is there already",
            next_step="add --force to make it anew; a run that has begun keeps what it has",
        )
    spec = _describe(folder, load_run_file(folder / RUN_FILE), source)
    if spec.first_digest is None:
        spec = _with_first_digest(folder, spec, source)
    return _facts_of(spec, source)


def describe_first(folder: Path, *, source: Path | None) -> dict[str, Any]:
    """Reads the weights that the described run of the run file in `folder` begins with; says their digest."""
    spec = load_run_folder(folder, RUN_FILE, may_be_stale=True)
    spec = _with_first_digest(folder, spec, source)
    assert spec.description is not None
    return {"first_digest": spec.description.first_digest}


def in_words(facts: Mapping[str, Any]) -> str:
    """What `describe_run` found, for a person."""
    return "\n".join((_size_in_words(facts), *facts["notes"]))


def _size_in_words(facts: Mapping[str, Any]) -> str:
    count = count_in_words(facts["num_parameters"])
    if not facts["first_digest"]:
        return f"{count} parameters, drawn from the run's seed"
    # The folder may have another name by the time that somebody reads this.
    first = facts["first_weights"]
    return (
        f"{count} parameters, which begin with given weights ({facts['first_digest'][:12]}); one node has "
        f"to be started with them: atoll node start --weights "
        f"{f'DIR/{first}' if first == FIRST_WEIGHTS else first}"
    )


def _facts_of(spec: RunSpec, source: Path | None) -> dict[str, Any]:
    assert spec.description is not None
    given = spec.description.first_digest or ""
    is_decoder, is_function = (
        isinstance(spec.model, kind) for kind in (DecoderModel, FunctionModel)
    )
    first_weights = str(source) if is_decoder else FIRST_WEIGHTS
    return {
        "num_parameters": spec.num_parameters,
        "num_frozen": spec.description.num_frozen,
        "num_samples": spec.description.num_samples,
        "num_layers": spec.num_layers,
        "has_loaded": spec.description.has_loaded,
        "first_digest": given,
        "first_weights": first_weights,
        "code_digest": code_digest(spec)[:DIGITS] if functions_of(spec) else "",
        "machine": _machine(spec, look_around("auto")),
        "notes": [
            note
            for note, holds in (
                (HAS_LOADED, spec.description.has_loaded and is_function),
                (COMPARES_SAMPLES, spec.description.compares_samples),
                (_MORE_THAN_MODEL.format(spec.lora.rank), _has_more_than_its_model(spec)),
            )
            if holds
        ],
    }


def _has_more_than_its_model(spec: RunSpec) -> bool:
    assert spec.description is not None
    return spec.adapters is not None and spec.num_parameters > spec.description.num_frozen


def _model_of(source: Path | None, asked: Asked) -> tuple[dict[str, Any], int | None]:
    """[model] of the new run, and its vocabulary where it is one of tokens."""
    if asked.by == "function":
        model = {"source": "function", "function": asked.function, "context": asked.context or 1}
        return model, None
    assert source is not None
    if asked.by == "decoder":
        decoder = read_config(source, context=asked.context)
        return decoder.model_dump(mode="json", exclude_none=True), decoder.vocab_size
    from node.island.models.transformers import sizes_of

    longest, vocab_size = sizes_of(source)
    if asked.context is None and longest is None:
        raise UsageError(
            f"{source / CONFIG} does not say how long its samples may be",
            next_step="say it with --context",
        )
    return {"source": "transformers", "context": asked.context or longest}, vocab_size


def _data_of(
    source: Path | None, asked: Asked
) -> tuple[dict[str, Any], int | None, dict[str, Any]]:
    """[data] of the new run, how many different tokens there are, and facts of those to train on."""
    if asked.data_function is not None:
        return {"source": "function", "function": asked.data_function}, None, {}
    if asked.loop:
        return {"source": "loop"}, None, {}
    if asked.private:
        return (*_private_data(source, asked.tokenizer), {})
    paths = list(asked.data)
    if not paths:
        return {}, None, {}
    if not any(Path(path).is_dir() for path in paths):
        return {"source": "text", "paths": paths}, None, {}
    if len(paths) > 1:
        raise UsageError(
            f"--data names {len(paths)} paths, and a folder of tokens stands alone",
            next_step="name one folder that 'atoll data prepare' wrote, or files and globs of text",
        )
    from node.island.data.manifest import read_manifest

    manifest = read_manifest(Path(paths[0]))
    if source is not None and asked.by != "function":
        _require_same_tokenizer(source, Path(paths[0]), are_bytes=manifest.tokenizer == "bytes")
    table = {"source": "tokens", "paths": paths, "digest": manifest.digest().hex()}
    there = {
        "num_tokens": manifest.num_tokens("training"),
        "training_shards": [shard.num_tokens for shard in manifest.training],
        "held_out_shards": [shard.num_tokens for shard in manifest.held_out],
        "packed_context": None if manifest.row is None else manifest.row - 1,
        "has_answers": manifest.has_answers,
    }
    return table, manifest.vocab_size, there


def _keeps_documents_apart(source: Path | None, asked: Asked, notes: list[str]) -> bool:
    """Whether answers are learned without what stands before their conversation; says why, or why not."""
    if asked.by == "transformers":
        from node.island.models.transformers import KEEPS_DOCUMENTS_APART, config_of

        assert source is not None
        kind = config_of(source)["model_type"]
        if kind not in KEEPS_DOCUMENTS_APART:
            notes.append(
                f"conversations that share a sample see each other: no test shows that models of type "
                f"{kind!r} keep them apart"
            )
            return False
    notes.append(
        f"[data] across_documents = false: of the tokens in {asked.data[0]} only answers are learned, so "
        "conversations that share a sample do not see each other"
    )
    return True


def _as_packed(packed: int, asked: Asked, notes: list[str]) -> int:
    """The context of rows that were packed for it. Raises UsageError where another one is asked for."""
    if asked.context not in (None, packed):
        raise UsageError(
            f"the tokens in {asked.data[0]} are packed for a context of {packed}, and --context is "
            f"{asked.context}",
            next_step="leave --context out, or pack them for that: atoll data prepare … --pack "
            f"{asked.context} --out NEWDIR",
        )
    if asked.context is None:
        notes.append(f"context {packed}: the tokens in {asked.data[0]} are packed for it")
    return packed


def _look_at_text(paths: Sequence[str], notes: list[str]) -> dict[str, Any]:
    """How much text there is, where all of it is here; what is not may be where nodes are.

    Raises NoInputError for what no node would take as text.
    """
    are_all_here = True
    for path in paths:
        try:
            found = text_files([path], Path.cwd())
        except NoInputError:
            notes.append(
                f"--data {path}: nothing of that name is here, so nodes will look for text of it where they "
                "start"
            )
            found, are_all_here = [], False
        for file in [each.path for each in found] or [Path(path)]:
            try:
                refuse_other_than_text(file)
            except NoInputError as error:
                raise NoInputError(
                    error.what,
                    next_step=f"make tokens of it once: atoll data prepare {as_typed(path)} --out tokens; "
                    "then --data tokens",
                ) from error
    if not are_all_here:
        return {}
    data = DataSection(source="text", paths=tuple(paths))
    training, held_out = sizes_of_splits(text_files(data.paths, Path.cwd()), data.held_out)
    num_tokens = max(0, training - 1)  # the first is not predicted
    return {
        "num_tokens": num_tokens,
        "training_shards": [training],
        "held_out_shards": [held_out],
    }


def _private_data(source: Path | None, named: str | None) -> tuple[dict[str, Any], int | None]:
    """Data that holders keep: tokens of the tokenizer that is named or the model's own, else bytes."""
    if named is None and (source is None or not (source / TOKENIZER).is_file()):
        return {"source": "text", "private": True}, None
    from node.island.data.manifest import entry_of_file
    from node.island.data.tokenizing import open_tokenizer, tokenizer_files, vocab_size_of

    path = tokenizer_files(Path(named) if named is not None else source or Path())[TOKENIZER]
    vocab_size = vocab_size_of(open_tokenizer(path))  # what is no tokenizer is refused here
    table = {"source": "tokens", "private": True, "tokenizer": entry_of_file(path).digest}
    return table, vocab_size


def _require_same_tokenizer(source: Path, tokens: Path, *, are_bytes: bool) -> None:
    """Raises BadDataError where the model has a tokenizer.json, and the tokens were made otherwise."""
    ours, theirs = tokens / TOKENIZER, source / TOKENIZER
    if are_bytes and theirs.is_file():
        raise BadDataError(
            f"the tokens in {tokens} are bytes, and the model in {source} has a tokenizer",
            next_step=f"make them with it: atoll data prepare … --tokenizer {as_typed(source)} --out NEWDIR",
        )
    if ours.is_file() and theirs.is_file() and ours.read_bytes() != theirs.read_bytes():
        raise BadDataError(
            f"the tokens in {tokens} were made with another tokenizer than {theirs}",
            next_step=f"make them with it: atoll data prepare … --tokenizer {as_typed(theirs)} --out NEWDIR",
        )


def _require_fitting_tokens(
    source: Path,
    asked: Asked,
    data: Mapping[str, Any],
    model_vocab_size: int,
    vocab_size: int | None,
) -> None:
    """Raises UsageError for a model of tokens that would be trained on bytes, or on more than it has."""
    if data.get("source") not in ("tokens", "loop") and model_vocab_size != BYTES_VOCABULARY:
        if data.get("private"):
            raise UsageError(
                f"the model in {source} is one of tokens, and there is no {TOKENIZER}",
                next_step="name the one that data holders are to use with --tokenizer FILE",
            )
        named, typed = " ".join(asked.data), " ".join(map(as_typed, asked.data))
        why = f"--data {named} is no folder of them" if named else "no --data names any"
        raise UsageError(
            f"the model in {source} is one of tokens, and {why}",
            next_step=f"make them once: atoll data prepare {typed or 'TEXT…'} --tokenizer {as_typed(source)} "
            "--out tokens; then --data tokens",
        )
    if (vocab_size or 0) > model_vocab_size:
        raise UsageError(
            f"the data have {vocab_size} different tokens, and the model in {source} "
            f"{model_vocab_size}",
            next_step="make the tokens with its own tokenizer: atoll data prepare … --tokenizer "
            f"{as_typed(source)}",
        )


def _machine(spec: RunSpec, hardware: Hardware) -> dict[str, Any]:
    """What trains here, and how many samples of the run go through it at once."""
    gpus = hardware.gpus
    if gpus is None:  # of a maker whom only torch can ask
        return {"name": "a GPU", "most_samples": None}
    if gpus:
        fits = _most_samples(spec, gpus[0].free_bytes, "cuda")
        return {"name": gpus[0].name, "most_samples": fits}
    cores = usable_cores()
    fits = _most_samples(spec, hardware.memory_bytes - node_bytes(spec), "cpu")
    return {"name": f"{cores} CPU cores", "num_cores": cores, "most_samples": fits}


def _most_samples(spec: RunSpec, num_bytes: int, kind: DeviceKind) -> int:
    """The most samples, a power of two, that one device trains at once; 0 where it cannot hold one."""
    local = LocalTraining(precision="bf16" if kind == "cuda" else "fp32")
    fitting = 0
    samples = 1
    while samples <= MOST_SAMPLES:
        inner = spec.inner.model_copy(update={"batch": samples})
        trained = spec.model_copy(update={"inner": inner})
        need = need_of(MeshShape(), trained, local, is_copied=kind == "cpu")
        if wanted_bytes(need, kind) > num_bytes:
            break
        fitting, samples = samples, 2 * samples
    return fitting


def _describe(folder: Path, spec: RunSpec, source: Path | None) -> RunSpec:
    """The run with its description, which is written; so are first weights that torch has made."""
    description = _described(spec, folder, source)
    described = spec.model_copy(update={"description": description})
    write_atomically(folder / DESCRIPTION_FILE, description_file(described))
    return described


def _with_first_digest(folder: Path, spec: RunSpec, source: Path | None) -> RunSpec:
    """The described run with the digest of its first weights: a folder's, or those that torch has made."""
    is_decoder = isinstance(spec.model, DecoderModel)
    origin = source if is_decoder and source is not None else folder / FIRST_WEIGHTS
    say_of_many(spec.num_parameters, f"reading the weights in {origin}")
    weights = np.empty(spec.num_parameters, np.float32)
    if is_decoder:
        read_weights(origin, spec, weights)
    else:
        read_tensors(tensors_in(origin), spec, weights, origin=origin)
    refuse_what_is_no_number(weights, layout_of(spec), origin=origin)
    assert spec.description is not None
    digest = digest_of_first(weights).hex()
    description = spec.description.model_copy(update={"first_digest": digest})
    spec = spec.model_copy(update={"description": description})
    write_atomically(folder / DESCRIPTION_FILE, description_file(spec))
    return spec


def _described(spec: RunSpec, folder: Path, source: Path | None) -> Description:
    if isinstance(spec.model, DecoderModel):
        if source is None:
            raise UsageError(
                "the tensors of this run's model follow from its sizes, and its weights from its seed",
                next_step="name a transformers folder with --from to begin with its weights",
            )
        look_at_model(source)
        check_tensors(stored_tensors(source), spec, origin=source)
        return Description.model_validate({"has_loaded": True, **read_settings(source)})
    from node.island.models.describing import describe, first_vector, has_loaded

    if isinstance(spec.model, TransformersModel) and source is None:
        raise UsageError(
            'a run with [model] source = "transformers" is made from the folder of a model',
            next_step="name it with --from; one without weights begins with random ones",
        )
    description = describe(spec, source)
    described = spec.model_copy(update={"description": description})
    is_whole = isinstance(spec.model, TransformersModel) and spec.adapters is None
    is_given = source is not None and has_weights(source)
    if is_given and source is not None:
        look_at_model(source)
        say_of_many(described.num_parameters, f"reading the weights in {source}")
    weights = first_vector(described, source if is_given and is_whole else None)
    refuse_what_is_no_number(weights, layout_of(described), origin=source)
    _write_weights(folder / FIRST_WEIGHTS, described, weights)
    is_function = isinstance(spec.model, FunctionModel)
    first = {
        "first_digest": digest_of_first(weights).hex(),
        "has_loaded": has_loaded(described, weights) if is_function else is_given,
    }
    return description.model_copy(update=first)


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
