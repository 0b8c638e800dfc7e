"""`atoll node snapshots`: the committed models in a node's folder, with the figures of their rounds."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from node.config import SNAPSHOTS_FOLDER, require_node_folder
from protocol.errors import AtollError, NoInputError
from protocol.terminal import console
from protocol.terminal.query import StatusLink, print_fitting
from protocol.trust.credentials import Credentials

if TYPE_CHECKING:
    from protocol.v1 import status_pb2 as pb


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
        Credentials.load(folder)  # a folder that never joined is told so
        require_node_folder(folder)
        raise NoInputError(
            f"there is no snapshot in {folder / SNAPSHOTS_FOLDER} yet",
            next_step=f"start the node with 'atoll node start --dir {folder}' and wait for its first round",
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
        "-" if one.loss is None else f"{one.loss:.3f}",
        "-" if one.held_out is None else f"{one.held_out:.3f}",
        "-" if one.tokens is None else console.count_in_words(one.tokens),
        console.bytes_in_words(one.num_bytes),
        one.digest[:12] or "-",
        f"damaged: {one.damage}" if one.damage else "",
    )
