"""The models that a node's folder holds: listed, and read for export, sampling and forks; running or not."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from node.config import (
    HISTORY_FILE,
    SETTINGS_FILE,
    SNAPSHOTS_FOLDER,
    has_snapshots,
    load_settings,
    require_node_folder,
)
from node.island.data.places import DataPlaces
from protocol.errors import AtollError, BadDataError, IncompleteError, NoInputError
from protocol.files.durable import as_typed, write_atomically
from protocol.run.run_files import run_from_json
from protocol.run.run_spec import RunSpec
from protocol.terminal import console
from protocol.terminal.query import StatusLink, print_fitting
from protocol.trust.credentials import IDENTITY_FILE, Credentials
from protocol.wire.rounds import CorpusSummary, Digest
from protocol.wire.vitals import loss_in_words

if TYPE_CHECKING:
    from node.link.calls import RunOver
    from node.outer_state import Vector
    from protocol.run.models import Layout
    from protocol.v1 import status_pb2 as pb


RUN_FILE = "run.json"
PLACES_FILE = "places.json"
CORPUS_FILE = "corpus.json"


MANY_PARAMETERS = 50_000_000
"""So many take seconds to be read and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """Committed parameters with what is needed to use them."""

    spec: RunSpec
    layout: "Layout"
    round: int
    outer_digest: Digest
    parameters: "Vector"


def keep_run(folder: Path, spec: RunSpec) -> None:
    """Remembers the run file, so that the folder's snapshots can be read without a coordinator."""
    write_atomically(folder / RUN_FILE, spec.canonical_json().encode())


def kept_run(folder: Path) -> RunSpec:
    """The run file that was kept, which must be there. Raises BadDataError where it is damaged."""
    with _telling_damage(folder / RUN_FILE, or_else=_OF_ANOTHER):
        kept = (folder / RUN_FILE).read_text(encoding="utf-8")
        spec = run_from_json(kept)
        # All keys stand there: of one that is missing the default would be read, which is another run.
        if json.loads(kept) != json.loads(spec.canonical_json()):
            raise ValueError("keys are missing")
        return spec


_OF_ANOTHER = f"copy {RUN_FILE} from another node's folder, where it is the same"

_WITHOUT = f"remove it, and name in {SETTINGS_FILE}, as data and base, what is elsewhere"


@contextmanager
def _telling_damage(path: Path, *, or_else: str) -> Iterator[None]:
    """`or_else` is what to do where no coordinator answers, without which no node starts."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        is_text = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
        why = str(error) if is_text else "it is not what a node writes there"
        raise BadDataError(
            f"{path} is damaged: {why}", next_step=_to_write_anew(path.parent, or_else)
        ) from error


def _to_write_anew(folder: Path, or_else: str) -> str:
    start = f"'atoll node start --dir {as_typed(folder)}'"
    return f"start the node, which writes it anew: {start}; or, where its run is over, {or_else}"


def keep_places(folder: Path, places: DataPlaces) -> None:
    """Remembers where this node has its data, for commands that are typed elsewhere or with fewer options."""
    base = None if places.base is None else str(places.base.absolute())
    kept = {"folder": str(places.folder.absolute()), "data": places.own, "base": base}
    write_atomically(folder / PLACES_FILE, json.dumps(kept).encode())


def keep_corpus(folder: Path, run_digest: Digest, corpus: CorpusSummary) -> None:
    """Remembers what this node's ranks train on: it can say so before they have looked again."""
    kept = {k: v.hex() if isinstance(v, bytes) else v for k, v in asdict(corpus).items()}
    write_atomically(folder / CORPUS_FILE, json.dumps(kept | {"run": run_digest.hex()}).encode())


def kept_corpus(folder: Path, run_digest: Digest) -> CorpusSummary | None:
    """What this node's ranks trained on last, in this run; None where that is not known."""
    try:
        kept = json.loads((folder / CORPUS_FILE).read_text(encoding="utf-8"))
        if kept.pop("run") != run_digest.hex():
            return None
        digests = {
            key: Digest(bytes.fromhex(value))
            for key, value in kept.items()
            if key.endswith("digest") and value is not None
        }
        return CorpusSummary(**kept | digests)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None  # of a version that kept another one


def places_of(folder: Path, *, base: str | None, typed_in: Path) -> DataPlaces:
    """Where the node of a folder has its data: as node.toml says, else as it was last started with.

    Relative paths begin where it was started; `base`, an option, at `typed_in`.
    """
    settings = load_settings(folder, base=base)
    here = settings.data_places(home=folder, folder=typed_in)
    if not (folder / PLACES_FILE).is_file():
        return here
    with _telling_damage(folder / PLACES_FILE, or_else=_WITHOUT):
        kept = json.loads((folder / PLACES_FILE).read_text(encoding="utf-8"))
        started_in, data = Path(kept["folder"]), kept["data"]
        started = Path(kept["base"]) if kept["base"] is not None else None
    there = settings.data_places(home=folder, folder=started_in)
    return replace(
        there,
        own=settings.data or data,
        base=here.base if base is not None else there.base or started,
    )


def kept_model(folder: Path, round: int | None = None) -> KeptModel:
    """Reads the newest whole snapshot, or that of a round. Raises NoInputError when it is not there."""
    path = folder / RUN_FILE
    if not path.is_file():
        Credentials.load(folder, markers=[IDENTITY_FILE])  # a folder that never joined is told so
        require_node_folder(folder)
        if has_snapshots(folder):
            raise NoInputError(
                f"{path} is not there, which says what the snapshots beside it are of",
                next_step=_to_write_anew(folder, _OF_ANOTHER),
            )
        raise _nothing_yet(folder)
    spec = kept_run(folder)
    # Only now, for torch comes with it.
    from node.disk.snapshot_folder import SnapshotFolder
    from protocol.run.models import layout_of

    layout = layout_of(spec)
    say_of_many(layout.num_elements, f"reading the state in {folder / SNAPSHOTS_FOLDER}")
    snapshots = SnapshotFolder(folder / SNAPSHOTS_FOLDER)
    kept = snapshots.load_parameters(spec.digest(), layout.summary().digest, round=round)
    if kept is None:
        raise _nothing_yet(folder)
    return KeptModel(
        spec=spec,
        layout=layout,
        round=kept.round,
        outer_digest=kept.outer_digest,
        parameters=kept.values,
    )


def say_of_many(num_parameters: int, what: str) -> None:
    """What a command does that takes seconds for a large model; on standard error, for people."""
    if num_parameters >= MANY_PARAMETERS:
        click.echo(f"{what}: {num_parameters / 1e6:,.0f} million parameters", err=True)


def refuse_what_nobody_gives(folder: Path, over: "RunOver") -> None:
    """Raises IncompleteError where a run is over, and its final state neither in the folder nor here."""
    from node.disk.history import History
    from node.disk.snapshot_folder import SnapshotFolder

    rounds = SnapshotFolder(folder / SNAPSHOTS_FOLDER).rounds()
    newest = rounds[0] if rounds else 0
    if (
        over.is_held_here
        or newest >= over.last_round
        or History(folder / HISTORY_FILE).is_known(over.last_round)  # it may hold the results
    ):
        return
    held = f"a state of round {newest}" if newest else "no state of the run"
    export = f"; what is here: atoll export OUT --dir {as_typed(folder)}" if newest else ""
    raise IncompleteError(
        f"the run is over ({over.why}), and no member is here that holds its final state, of round "
        f"{over.last_round}: this folder holds {held}",
        next_step="type 'atoll export OUT' where a node has taken part to the end, or ask the run owner for "
        f"more rounds ('atoll run extend') and have such a node started{export}",
    )


def _nothing_yet(folder: Path) -> NoInputError:
    return NoInputError(
        f"the node in {folder} holds no committed state yet",
        next_step=f"start it with 'atoll node start --dir {as_typed(folder)}' and wait for its first round",
    )


# `atoll node snapshots`: the committed models in a node's folder, with the figures of their rounds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One snapshot. Of its figures None is what nobody knows: the coordinator, or of a round so old."""

    round: int
    num_bytes: int
    digest: str  # of the outer state, in hex; empty where the file is damaged
    damage: str  # why it cannot be used, in words; empty where it can
    loss: float | None = None  # mean training loss of the round
    held_out: float | None = None  # of exactly this state
    tokens: int | None = None  # of the round


def snapshots_in(folder: Path) -> list[Listed]:
    """What is on the disk, the newest first; only the form of each file is checked, not all of its bytes."""
    from node.disk.snapshot_folder import SnapshotError, SnapshotFolder

    snapshots = SnapshotFolder(folder / SNAPSHOTS_FOLDER)
    found = []
    for round in snapshots.rounds():
        digest, damage, path = "", "", snapshots.folder.path_of(round)
        try:
            digest = snapshots.open(round).outer_digest().hex()
        except SnapshotError as error:
            if not path.exists():
                continue  # a running node has written its next one over it
            damage = str(error)
        size = path.stat().st_size
        found.append(Listed(round=round, num_bytes=size, digest=digest, damage=damage))
    return found


def with_figures(
    listed: Sequence[Listed],
    status: "pb.GetStatusResponse",
    ask: "Callable[[int], pb.GetRoundResponse]",
) -> list[Listed]:
    """The snapshots with what the coordinator knows of their rounds; `ask` gives one round."""
    held_out = {one.round: one.loss for one in status.run.held_out_losses}
    told = []
    for one in listed:
        loss, tokens = None, None
        try:
            summary = ask(one.round).summary if one.round else None
        except NoInputError:  # too old to be kept
            summary = None
        if summary is not None:
            loss, tokens = summary.loss or None, summary.tokens or None
        figures = {"loss": loss, "tokens": tokens, "held_out": held_out.get(one.round)}
        told.append(Listed(**asdict(one) | figures))
    return told


def list_snapshots(folder: Path, *, is_json: bool) -> None:
    """Prints them. Without the coordinator they come without figures, and that is said."""
    listed = snapshots_in(folder)
    if not listed:
        Credentials.load(folder, markers=[IDENTITY_FILE])  # a folder that never joined is told so
        require_node_folder(folder)
        raise NoInputError(
            f"there is no snapshot in {folder / SNAPSHOTS_FOLDER} yet",
            next_step=f"start the node with 'atoll node start --dir {as_typed(folder)}' and wait for its "
            "first round",
        )
    try:
        with StatusLink(folder) as link:
            listed = with_figures(listed, link.status(), link.round)
    except AtollError as error:
        click.echo(f"without figures: {error.what}", err=True)
    if is_json:
        console.print_json([asdict(one) for one in listed])
        return
    columns = ("round", "loss", "held-out", "tokens", "size", "digest", "")
    print_fitting(columns, [row_of(one) for one in listed], spare=("tokens",), right=columns[:5])


def row_of(one: Listed) -> tuple[str, ...]:
    """For people."""
    return (
        str(one.round),
        "-" if one.loss is None else loss_in_words(one.loss),
        "-" if one.held_out is None else loss_in_words(one.held_out),
        "-" if one.tokens is None else console.count_in_words(one.tokens),
        console.bytes_in_words(one.num_bytes),
        one.digest[:12] or "-",
        f"damaged: {one.damage}" if one.damage else "",
    )
