"""Reads a whole folder of tokens and compares it with its manifest."""

from collections.abc import Callable
from pathlib import Path

from node.island.data.manifest import (
    Manifest,
    check_sizes,
    damaged,
    piece_digests,
    pieces_of_file,
    read_manifest,
)
from node.island.data.progress import State


def check_folder(folder: Path, *, on_state: Callable[[State], None]) -> Manifest:
    """Raises NoInputError or BadDataError for the first file that is not what its manifest says."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest.files)
    total = sum(entry.bytes for entry in manifest.files.values())
    done = 0
    for name, entry in manifest.files.items():
        pieces = pieces_of_file(folder / name, manifest.piece_bytes)
        for number, (piece, digest) in enumerate(zip(pieces, entry.pieces, strict=True)):
            if piece_digests([piece]) != (digest,):
                raise damaged(folder / name, number, manifest.piece_bytes)
            done += len(piece)
            on_state(State(done_bytes=done, total_bytes=total, resumed_bytes=0))
    return manifest
