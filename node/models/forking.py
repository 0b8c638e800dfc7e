"""A new run that begins with the weights of another run's round: its run file, description and weights.

A run's amendments change what may change while nodes go on; a fork may change everything else too. The
coordinator sees no weights, so a fork is made where a node keeps a snapshot of the round. Where the fork goes
on with the run's samples and tokens, the coordinator is asked for them.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError

from node.config import RULINGS_FILE, SNAPSHOTS_FOLDER
from node.disk.history import KeptRulings
from node.disk.snapshot_folder import SnapshotFolder
from node.kept import KeptModel
from node.models.reading import digest_of_first, write_first
from node.outer_state import Vector
from protocol.errors import BadDataError, CannotCreateError, NoInputError, UsageError
from protocol.files.durable import (
    is_taken,
    refusal_to_write,
    toml_of,
    whole_folder,
    write_atomically,
)
from protocol.run.models import FIRST_WEIGHTS, Beginning, Description
from protocol.run.run_files import DESCRIPTION_FILE, description_file, tables_of, validated_file
from protocol.run.run_spec import RunSpec

if TYPE_CHECKING:
    from protocol.v1.status_pb2 import GetRoundResponse

RUN_FILE = "run.toml"

_ANEW = "# Its rounds, its schedule and its samples begin anew: another seed gives another order.\n"
_GOES_ON = (
    "# Its rounds are those that were left. Its schedule, samples and outer momentum go on from there, as\n"
    f"# {DESCRIPTION_FILE} has them: with another seed, data or batch other samples are trained.\n"
)


def fork(
    model: KeptModel, home: Path, to: Path, *, told: "GetRoundResponse | None" = None
) -> RunSpec:
    """Writes what the new run is made of into a new folder; returns the new run.

    Its rules are those in force after the round. `told` is what the coordinator tells of it, with its books,
    where the new run is to go on from there. Raises CannotCreateError when the folder is not empty,
    UsageError where no rounds are left, NoInputError where that round's books are not known.
    """
    if is_taken(to):
        raise CannotCreateError(f"{to} exists and is not empty", next_step="choose another folder")
    rulings = KeptRulings(model.spec, path=home / RULINGS_FILE)
    spec = rulings.spec_in(model.round + 1)
    name = f"{spec.run.name}-from-{model.round}"
    tables = tables_of(spec)
    tables["run"] = {**tables.get("run", {}), "name": name}
    beginning: Beginning | None = None
    momentum: Vector | None = None
    if told is not None:
        tables["run"]["rounds"] = _rounds_left(model, rulings)
        beginning = _beginning(model, rulings, told)
        momentum = _momentum(model, home)
    text = toml_of(tables)
    forked = validated_file(tables, origin=str(to / RUN_FILE))
    description = spec.description or Description()
    first = digest_of_first(np.asarray(model.parameters), momentum)
    description = description.model_copy(
        update={
            "first_digest": first.hex(),
            "first_fragments": spec.exchange.fragments,
            "beginning": beginning,
        }
    )
    with whole_folder(to) as building:
        header = (
            f"# Made from run {spec.run.name!r} after round {model.round}, with the rules in force then.\n"
            f"{_ANEW if beginning is None else _GOES_ON}\n"
        )
        write_atomically(building / RUN_FILE, (header + text).encode())
        forked = forked.model_copy(update={"description": description})
        write_atomically(building / DESCRIPTION_FILE, description_file(forked))
        _write_weights(building / FIRST_WEIGHTS, model, momentum)
    return forked


def _rounds_left(model: KeptModel, rulings: KeptRulings) -> int:
    left = rulings.last_round - model.round
    if left < 1:
        raise UsageError(
            f"round {model.round} is the last of run {model.spec.run.name!r}: it leaves none to go on with",
            next_step="leave --keep-progress out, or go on in that run: 'atoll run extend N'",
        )
    return left


def _beginning(model: KeptModel, rulings: KeptRulings, told: "GetRoundResponse") -> Beginning:
    if not told.summary.outer_digest:
        raise NoInputError(
            f"nodes have not agreed yet on the state after round {model.round}",
            next_step="type it again in a moment, or take an earlier round",
        )
    if told.summary.outer_digest != model.outer_digest:
        raise BadDataError(
            f"the snapshot of round {model.round} is of another state than the run had after that round",
            next_step="take a round that 'atoll node snapshots' and 'atoll rounds' have the same digest of",
        )
    if not told.HasField("books_after"):
        raise NoInputError(
            f"which samples were trained until round {model.round} is not known any more",
            next_step="take a later round, or leave --keep-progress out",
        )
    return Beginning(
        round=model.round,
        progress=rulings.span_in(model.round + 1).begin,
        tokens=told.books_after.token_clock,
        trained=tuple(told.books_after.used_up),
    )


def _momentum(model: KeptModel, home: Path) -> Vector:
    kept = SnapshotFolder(home / SNAPSHOTS_FOLDER).load(model.round, model.outer_digest)
    if kept is None:
        raise NoInputError(
            f"the snapshot of round {model.round} is gone: a running node keeps the latest",
            next_step="take another: 'atoll node snapshots'",
        )
    return kept[0].momentum


def _write_weights(path: Path, model: KeptModel, momentum: Vector | None) -> None:
    try:
        write_first(path, model.layout, model.parameters, momentum)
    except (OSError, SafetensorError) as error:
        raise refusal_to_write(path, OSError(str(error))) from error
