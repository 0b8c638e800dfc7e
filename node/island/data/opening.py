"""The door to what a run trains on: bytes of text, or tokens."""

from pathlib import Path

from node.island.data.corpus import read_corpus
from node.island.data.dataset import Dataset
from node.island.data.token_shards import open_tokens, vocabulary_of
from protocol.errors import ConfigError
from protocol.models import BYTES_VOCABULARY
from protocol.run_spec import RunSpec


def open_dataset(spec: RunSpec, folder: Path) -> Dataset:
    """What a run trains on; relative paths start at `folder`. Raises AtollError where it is not there."""
    if spec.data.source == "tokens":
        return open_tokens(spec, folder)
    vocabulary = vocabulary_of(spec)
    if vocabulary is not None and vocabulary < BYTES_VOCABULARY:
        raise ConfigError(
            f"text is read as {BYTES_VOCABULARY} different bytes, and [model] vocab_size is {vocabulary}",
            next_step=f"set [model] vocab_size = {BYTES_VOCABULARY}, or train on tokens",
        )
    context, batch = spec.model.context, spec.inner.batch
    return read_corpus(spec.data, context=context, batch=batch, folder=folder)
