"""The door to what a run trains on: bytes of text, or tokens."""

from pathlib import Path

from node.island.data.corpus import read_corpus
from node.island.data.dataset import Dataset
from node.island.data.token_shards import open_tokens
from protocol.run_spec import RunSpec


def open_dataset(spec: RunSpec, folder: Path) -> Dataset:
    """What a run trains on; relative paths start at `folder`. Raises AtollError where it is not there."""
    if spec.data.source == "tokens":
        return open_tokens(spec, folder)
    context, batch = spec.model.context, spec.inner.batch
    return read_corpus(spec.data, context=context, batch=batch, folder=folder)
