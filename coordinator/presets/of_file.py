"""A run file that somebody wrote, or of a fork, made into a new run: preset answered, model described."""

import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

from coordinator.config import RUN_FILE
from coordinator.presets.composing import TO_BE_TOLD, NewRun
from coordinator.presets.settling import settled_run_file, wants_settling, without_preset
from coordinator.presets.wanted import Facts, described
from protocol.errors import ConfigError, UsageError
from protocol.files.durable import TOML_ENCODING, read_toml, refusing, write_atomically
from protocol.run.models import FIRST_WEIGHTS
from protocol.run.run_files import (
    DESCRIPTION_FILE,
    description_file,
    load_run_folder,
    validated_file,
)
from protocol.run.run_spec import RunSpec


def run_of_file(run_file: Path, source: Path | None, folder: Path) -> NewRun:
    """A run file that somebody wrote, with its preset answered; its model is described in `folder`."""
    tables = read_toml(run_file, when_missing="name a run file that is there")
    is_decoder = tables.get("model", {}).get("source", "decoder") == "decoder"
    if source is None and ((run_file.parent / DESCRIPTION_FILE).is_file() or is_decoder):
        settled = settled_run_file(run_file)
        text = run_file.read_text(encoding=TOML_ENCODING) if settled is None else settled.text
        plan = None if settled is None else settled.plan
        if not (run_file.parent / DESCRIPTION_FILE).is_file():
            return NewRun(text=text, plan=plan)
        return NewRun(text=text, plan=plan, facts=_copied(run_file, text, folder))
    fork = _fork_beside(run_file)
    if fork is not None and fork.model.source != "function":
        raise UsageError(
            f"{run_file} is of a fork, which begins with the weights beside it, and {source} has others",
            next_step="leave --from out, or take a run file that is of no fork",
        )
    text = run_file.read_text(encoding=TOML_ENCODING)
    if wants_settling(tables):
        text = without_preset(text, origin=str(run_file))
    validated_file(tomllib.loads(text), origin=str(run_file))
    write_atomically(folder / RUN_FILE, text.encode())
    facts = described(folder, source)
    if fork is not None:
        facts = _going_on(fork, run_file.parent, folder, facts)
    settled = settled_run_file(run_file, described_in=folder)
    plan = None if settled is None else settled.plan
    text = text if settled is None else settled.text
    return NewRun(text=text, plan=plan, notes=tuple(facts.notes), facts=facts)


def _fork_beside(run_file: Path) -> RunSpec | None:
    """The run that 'atoll node fork' wrote, with its weights; its run file may have been changed since."""
    made = run_file.parent
    if not (made / DESCRIPTION_FILE).is_file() or not (made / FIRST_WEIGHTS).is_file():
        return None
    found = load_run_folder(made, run_file.name, may_be_stale=True)
    is_fork = found.description is not None and found.description.first_fragments is not None
    return found if is_fork else None


def _going_on(fork: RunSpec, made: Path, folder: Path, facts: Facts) -> Facts:
    """Lets the run of changed code begin with the fork's weights, and not with random ones.

    Raises ConfigError where the code makes another model than the fork's.
    """
    described_anew = load_run_folder(folder, RUN_FILE)
    ours = {each.name: each.shape for each in described_anew.tensors}
    theirs = {each.name: each.shape for each in fork.tensors}
    if other := sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name)):
        raise ConfigError(
            f"the code makes another model than the fork has weights of: {other[0]} is "
            f"{list(ours.get(other[0], ())) or 'not there'} in the one and "
            f"{list(theirs.get(other[0], ())) or 'not there'} in the other",
            next_step="let the function return the same tensors, or take a run file that is of no fork",
        )
    assert described_anew.description is not None and fork.description is not None
    if described_anew.description.frozen_digest != fork.description.frozen_digest:
        raise ConfigError(
            "the code makes other frozen values than those that the fork's weights were trained with; "
            f"[run] seed = {described_anew.run.seed} is what a function's are drawn from",
            next_step="write the seed as it was, or let the function draw or load what is frozen as before",
        )
    first = ("first_digest", "first_fragments", "beginning")
    description = described_anew.description.model_copy(
        update={key: getattr(fork.description, key) for key in first}
    )
    described_anew = described_anew.model_copy(update={"description": description})
    write_atomically(folder / DESCRIPTION_FILE, description_file(described_anew))
    with refusing(folder / FIRST_WEIGHTS):
        shutil.copyfile(made / FIRST_WEIGHTS, folder / FIRST_WEIGHTS)
    return replace(facts, first_digest=fork.description.first_digest or "")


def _copied(run_file: Path, text: str, folder: Path) -> Facts:
    """A description that lies beside a run file, as 'atoll node fork' writes it, with first weights."""
    for name in (DESCRIPTION_FILE, FIRST_WEIGHTS):  # one node starts with the weights
        if (run_file.parent / name).is_file():
            with refusing(folder / name):
                shutil.copyfile(run_file.parent / name, folder / name)
    write_atomically(folder / RUN_FILE, text.encode())
    spec = load_run_folder(folder, RUN_FILE, named=run_file)
    has_weights = (folder / FIRST_WEIGHTS).is_file()
    return Facts(
        num_parameters=spec.num_parameters,
        num_layers=spec.num_layers,
        first_digest="" if spec.first_digest is None else spec.first_digest.hex(),
        first_weights=FIRST_WEIGHTS if has_weights else "",
        code_digest=TO_BE_TOLD if "function" in (spec.model.source, spec.data.source) else "",
    )
