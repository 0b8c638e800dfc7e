"""Rows of a fixed length, packed with documents of a shard.

Rows are packed when all documents of a shard are there, out of a mapped file: each row with a document's
beginning at its own. By best fit a document goes to the row in which it leaves the least room (Ding et al.
2024, "Fewer Truncations Improve Language Modeling"). Only documents longer than a row are cut. What stays
empty is padding, which is never learned and counts as no token.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from node.island.data.manifest import FileEntry, ShardEntry
from node.island.data.shard_files import ShardReader, ShardWriter, WrittenFiles
from node.island.data.tokenizing import Encoded

Lengths = npt.NDArray[np.int64]


def best_fit(lengths: Lengths, row: int) -> list[list[int]]:
    """Which pieces share a row, by number; each is at most a row long. The longest go first.

    The rows with each room that is left are kept together, and a bit for each room that some row
    has: the least that suffices is then a matter of two shifts.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(row + 1)]
    rooms = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, chosen = row, len(rows)
            rows.append([])
        rows[chosen].append(piece)
        left = room - length
        if left:
            with_room[left].append(chosen)
            rooms |= 1 << left
    return rows


def pack(
    folder: Path,
    shard: ShardEntry,
    name: str,
    *,
    row: int,
    token_bytes: int,
    padding: int,
) -> tuple[ShardEntry, dict[str, FileEntry]]:
    """Writes a shard again in rows of `row` tokens, in place of what it was.

    A row's first token is nobody's target, so it is not counted.
    """
    reader = ShardReader(WrittenFiles(folder), token_bytes=token_bytes)
    offsets = reader.offsets(shard)
    assert offsets is not None and shard.offsets is not None
    starts, lengths = _pieces(offsets, row)
    bytes_a_token = (shard.text_bytes or 0) / max(1, shard.num_counted)
    writer = ShardWriter(folder, f"{name}.rows", token_bytes=token_bytes)
    for pieces in best_fit(lengths, row):
        for i, piece in enumerate(pieces):
            start, length = int(starts[piece]), int(lengths[piece])
            counted = reader.counted(shard, start, start + length)
            if counted is None:
                counted = np.ones(length, np.bool_)
            if i == 0:
                counted[0] = False
            own = reader.tokens(shard, start, start + length).astype(np.uint32)
            if i == len(pieces) - 1:
                missing = row - int(lengths[pieces].sum())
                own = np.append(own, np.full(missing, padding, np.uint32))
                counted = np.append(counted, np.zeros(missing, np.bool_))
            writer.add(Encoded(tokens=own, counted=counted, text_bytes=0))
    packed, files = writer.close()
    # Which bytes of text the uncounted first tokens stand for is not known to the byte.
    text_bytes = round(packed.num_counted * bytes_a_token)
    old = {shard.tokens, shard.offsets, *([shard.mask] if shard.mask else [])}
    for each in old:
        (folder / each).unlink()
    renamed = {each: each.replace(".rows.", ".") for each in files}
    for before, after in renamed.items():
        (folder / before).rename(folder / after)
    return packed.model_copy(
        update={
            "tokens": f"{name}.tokens",
            "offsets": f"{name}.offsets",
            "mask": f"{name}.mask" if packed.mask else None,
            "text_bytes": text_bytes,
        }
    ), {after: files[before] for before, after in renamed.items()}


def _pieces(offsets: Lengths, row: int) -> tuple[Lengths, Lengths]:
    """Beginnings and lengths of documents, cut where they are longer than a row."""
    sizes = np.diff(offsets)
    counts = -(-sizes // row)
    first_of_document = np.repeat(offsets[:-1], counts)
    ends = np.repeat(offsets[1:], counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = first_of_document + within * row
    return starts, np.minimum(starts + row, ends) - starts
