"""The door to what a run trains on: bytes of text, or tokens; where the run file or this node has them."""

from dataclasses import dataclass
from pathlib import Path

from node.island.data.corpus import read_corpus
from node.island.data.dataset import Dataset
from node.island.data.token_shards import open_tokens, vocabulary_of
from protocol.errors import ConfigError
from protocol.models import BYTES_VOCABULARY
from protocol.run_spec import DataSection, RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlaces:
    """Where a node has the data of its run."""

    folder: Path  # where relative paths begin
    own: str = ""  # in place of the run file's paths; "" for none
    code: Path | None = None  # where functions of the run are found, beside what is installed
    base: Path | None = None  # the model that the run's adapters belong to


def open_dataset(spec: RunSpec, places: DataPlaces) -> Dataset:
    """What a run trains on. Raises AtollError where it is not there."""
    if spec.data.source == "function":
        from node.island.data.functions import FunctionData

        return FunctionData(spec)
    data = _as_here(spec.data, places)
    if data.source == "tokens":
        return open_tokens(spec, places.folder, data.paths[0])
    vocabulary = vocabulary_of(spec)
    if vocabulary is not None and vocabulary < BYTES_VOCABULARY:
        raise ConfigError(
            f"text is read as {BYTES_VOCABULARY} different bytes, and [model] vocab_size is {vocabulary}",
            next_step=f"set [model] vocab_size = {BYTES_VOCABULARY}, or train on tokens",
        )
    context, batch = spec.model.context, spec.inner.batch
    return read_corpus(data, context=context, batch=batch, folder=places.folder)


def _as_here(data: DataSection, places: DataPlaces) -> DataSection:
    if data.private and not places.own:
        raise ConfigError(
            "in this run each node trains data of its own, and none is named here",
            next_step="name it: data in node.toml, or 'atoll node start --data PATH'",
        )
    if not places.own:
        return data
    if data.source == "python-stdlib":
        raise ConfigError(
            f"node.toml says data = {places.own!r}, and the run trains on the standard library of Python",
            next_step="remove the key data",
        )
    return data.model_copy(update={"paths": (places.own,)})
