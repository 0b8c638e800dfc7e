"""Run files so small that a whole swarm trains within a test."""

from collections.abc import Mapping
from typing import Any

from lab.run_files import TINY_MODEL
from protocol.files.durable import toml_of
from protocol.run.models import DecoderModel
from protocol.run.run_files import validated
from protocol.run.run_spec import ExchangeSection, RunSection, RunSpec

TINY: dict[str, dict[str, Any]] = {
    "run": {"rounds": 4, "min_nodes": 3, "seed": 1},
    "model": {**TINY_MODEL},
    "inner": {"steps": 5, "batch": 4},
    "outer": {"audit": 0.0},  # else by chance what a reducer that is killed has made is undone
    "evaluation": {"every_rounds": 2, "samples": 16},
}


def tiny(**changes: Mapping[str, object]) -> RunSpec:
    """The tiny run with some keys changed, given by table."""
    return validated(_changed(changes), origin="the test")


def tiny_text(**changes: Mapping[str, object]) -> str:
    """The same as a run file, for commands that people type."""
    return toml_of(_changed(changes))


def run_of(model: DecoderModel, *, seed: int = 0, fragments: int = 1) -> RunSpec:
    """A run of that model, with the usual values for all else."""
    return RunSpec(
        run=RunSection(seed=seed), model=model, exchange=ExchangeSection(fragments=fragments)
    )


def _changed(changes: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, Any]]:
    tables = {name: {**table} for name, table in TINY.items()}
    for table, values in changes.items():
        tables.setdefault(table, {}).update(values)
    return tables
