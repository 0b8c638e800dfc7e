"""A new run that begins with the weights of another run's round: its run file, description and weights.

A run's amendments change what may change while nodes go on; a fork may change everything else too. The
coordinator sees no weights, so a fork is made where a node keeps a snapshot of the round.
"""

from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from node.config import RULINGS_FILE
from node.history import KeptRulings
from node.kept import KeptModel
from node.models.reading import digest_of_first, write_first
from node.outer_state import Vector
from protocol.errors import CannotCreateError
from protocol.files.durable import (
    is_taken,
    refusal_to_write,
    toml_of,
    whole_folder,
    write_atomically,
)
from protocol.run.models import FIRST_WEIGHTS, Description
from protocol.run.run_spec import DESCRIPTION_FILE, RunSpec, validated_file

RUN_FILE = "run.toml"


def fork(model: KeptModel, home: Path, to: Path) -> RunSpec:
    """Writes what the new run is made of into a new folder; returns the new run.

    Its rules are those in force after the round. Raises CannotCreateError when the folder is not empty.
    """
    if is_taken(to):
        raise CannotCreateError(f"{to} exists and is not empty", next_step="choose another folder")
    rulings = KeptRulings(model.spec, path=home / RULINGS_FILE)
    spec = rulings.spec_in(model.round + 1)
    name = f"{spec.run.name}-from-{model.round}"
    tables = spec.model_dump(mode="json", exclude_defaults=True, exclude={"description"})
    tables["run"] = {**tables.get("run", {}), "name": name}
    if spec.model.source != "decoder":
        tables["model"]["source"] = spec.model.source
    text = toml_of(tables)
    forked = validated_file(tables, origin=str(to / RUN_FILE))
    description = spec.description or Description()
    first = digest_of_first(np.asarray(model.parameters))
    description = description.model_copy(update={"first_digest": first.hex()})
    with whole_folder(to) as building:
        header = (
            f"# Made from run {spec.run.name!r} after round {model.round}, with the rules in force then.\n"
            "# Its rounds, its schedule and its samples begin anew: another seed gives another order.\n\n"
        )
        write_atomically(building / RUN_FILE, (header + text).encode())
        write_atomically(building / DESCRIPTION_FILE, description.to_json())
        _write_weights(building / FIRST_WEIGHTS, model, model.parameters)
    return forked.model_copy(update={"description": description})


def _write_weights(path: Path, model: KeptModel, weights: Vector) -> None:
    try:
        write_first(path, model.layout, weights)
    except (OSError, SafetensorError) as error:
        raise refusal_to_write(path, OSError(str(error))) from error
