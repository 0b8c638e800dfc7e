"""What this node has of the run's tokens, for the daemon: to give it to peers, and to add what they give.

Its ranks read the same files by themselves (node.island.data.opening). Of private data there is no
TokensHere: nothing can be asked of it.
"""

import threading
from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from node.island.data.fetching import PieceCache
from node.island.data.manifest import (
    MANIFEST_FILE,
    TOKENIZER_FILE,
    Manifest,
    Piece,
    damaged,
    manifest_of,
    piece_digests,
    read_manifest,
)
from node.island.data.opening import (
    check_is_runs,
    keep_manifest,
    kept_manifest,
    token_folders,
)
from node.island.data.places import DataPlaces
from node.island.data.tokenizing import COPIED_FILES, tokenizer_folder
from protocol.errors import ConfigError
from protocol.files.durable import make_folder, write_atomically
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import Digest

MOST_PIECE_BYTES = 64 << 20
"""Larger pieces do not go between peers: a few of them are in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """The run's manifest, and which of its files folders here have whole."""

    manifest: Manifest
    files: dict[str, Path]

    @cached_property
    def is_whole(self) -> bool:
        """Whether folders have all that is trained on."""
        return self.manifest.files.keys() - {TOKENIZER_FILE} <= self.files.keys()

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """In the order of their places."""
        return self.manifest.pieces()

    @cached_property
    def by_place(self) -> dict[tuple[str, int], Piece]:
        """By file and number."""
        return {(piece.file, piece.number): piece for piece in self.pieces}

    @cached_property
    def by_digest(self) -> dict[str, Piece]:
        """Where several are the same, one that a folder has."""
        own = [piece for piece in self.pieces if piece.file in self.files]
        return {piece.digest: piece for piece in (*self.pieces, *own)}


class TokensHere:
    """Files of folders and pieces of the cache, by digest; see node.exchange.tokens. Calls are heavy."""

    def __init__(self, spec: RunSpec, places: DataPlaces) -> None:
        """Raises NoInputError where the folder that this node's owner names is not there."""
        if spec.data.source != "tokens" or spec.data.private or spec.data.digest is None:
            raise ValueError("only tokens that the run file names go from node to node")
        if places.cache is None:
            raise ValueError("what peers give needs a folder")
        self.digest = Digest(bytes.fromhex(spec.data.digest))
        self.cache = PieceCache(
            places.cache, limit_bytes=places.cache_bytes, leave_bytes=places.leave_bytes
        )
        self.cache_bytes = places.cache_bytes
        self._spec = spec
        self._folders = token_folders(spec, places)
        self._lock = threading.Lock()
        self.found: Listed | None = None
        self._damaged: set[str] = set()  # digests of pieces of folders; the cache may have them

    def listed(self) -> Listed | None:
        """What there is; None without a manifest. Raises BadDataError for that of other tokens."""
        with self._lock:
            if self.found is None and (manifest := self._look()) is not None:
                if manifest.piece_bytes > MOST_PIECE_BYTES:
                    raise ConfigError(
                        f"the tokens are in pieces of {manifest.piece_bytes:,} bytes, and peers give none of "
                        f"more than {MOST_PIECE_BYTES:,}",
                        next_step="copy them to each node, and name their folder with data = in node.toml",
                    )
                self.found = Listed(manifest=manifest, files=self._files_of(manifest))
            return self.found

    def manifest(self) -> bytes | None:
        """See node.exchange.tokens."""
        listed = self.listed()
        return None if listed is None else listed.manifest.as_written()

    def piece_map(self) -> bytes:
        """See node.exchange.tokens."""
        listed = self.listed()
        if listed is None:
            return b""
        cached = self.cache.digests()
        has = [
            piece.digest in cached or self.path_of(listed, piece) is not None
            for piece in listed.pieces
        ]
        return np.packbits(np.array(has, bool), bitorder="little").tobytes()

    def piece(self, digest: Digest) -> bytes | None:
        """See node.exchange.tokens. Nothing that the run's manifest does not name is ever read.

        Damage is told once; until the next start that folder has the piece no more, and peers may give it.
        """
        listed, name = self.listed(), digest.hex()
        piece = None if listed is None else listed.by_digest.get(name)
        if listed is None or piece is None:
            return None
        path = self.path_of(listed, piece)
        if path is None:
            return self.cache.checked(name)
        try:
            found = _read(path, piece)
        except OSError:
            return None
        if piece_digests([found]) == (name,):
            return found
        self._damaged.add(name)
        raise damaged(path, piece.number, listed.manifest.piece_bytes)

    def path_of(self, listed: Listed, piece: Piece) -> Path | None:
        """The file of a folder that has the piece; None where none does, or has it damaged."""
        return None if piece.digest in self._damaged else listed.files.get(piece.file)

    def damaged_file(self, piece: Piece) -> Path | None:
        """The file of a folder that has the piece damaged; None where none does."""
        if self.found is None or piece.digest not in self._damaged:
            return None
        return self.found.files.get(piece.file)

    @property
    def has_all(self) -> bool:
        """Whether folders have all that is trained on, as far as anybody has seen."""
        return self.found is not None and self.found.is_whole and not self._damaged

    def lose(self, digest: str) -> None:
        """A rank has found this piece damaged: it is to come again, and what else is, beside it.

        A disk seldom damages one alone, and each that ranks come to costs a start of them.
        """
        listed = self.listed()
        piece = None if listed is None else listed.by_digest.get(digest)
        path = None if listed is None or piece is None else self.path_of(listed, piece)
        if listed is None or piece is None or path is None:
            for cached in self.cache.digests():
                self.cache.checked(cached)
            return
        self._damaged.add(digest)
        for each in listed.pieces:
            if each.file == piece.file:
                try:
                    found = _read(path, each)
                except OSError:
                    found = b""
                if piece_digests([found]) != (each.digest,):
                    self._damaged.add(each.digest)

    def keep(self, piece: Piece, content: bytes, *, spare: Container[str] = ()) -> None:
        """Adds a piece that came and was checked; those to spare make no room for it.

        Raises AtollError where the disk refuses.
        """
        self.cache.put(piece.digest, content, spare=spare)

    def lacking_tokenizer(self) -> tuple[str, ...]:
        """Files of the tokenizer that are on no disk here, which exports and samples of text need."""
        listed = self.listed()
        if listed is None or listed.manifest.tokenizer != TOKENIZER_FILE:
            return ()
        folder = tokenizer_folder(self.cache.folder, listed.manifest.tokenizer_digest)
        return tuple(
            name
            for name in COPIED_FILES
            if name in listed.manifest.files
            and name not in listed.files
            and not (folder / name).is_file()
        )

    def keep_tokenizer(self, name: str, content: bytes) -> None:
        """Adds a file of the tokenizer. Raises AtollError where the disk refuses."""
        listed = self.listed()
        assert listed is not None
        folder = tokenizer_folder(self.cache.folder, listed.manifest.tokenizer_digest)
        make_folder(folder)
        write_atomically(folder / name, content)

    def keep_manifest(self, text: bytes, *, origin: str) -> None:
        """Adds the manifest; raises BadDataError for another one than the run's."""
        manifest = manifest_of(text, origin=origin)
        check_is_runs(manifest, self._spec, origin)
        keep_manifest(self._spec, self.cache.folder, manifest.as_written())

    def _look(self) -> Manifest | None:
        for folder in self._folders:
            if (folder / MANIFEST_FILE).exists():
                manifest = read_manifest(folder)
                check_is_runs(manifest, self._spec, str(folder))
                return manifest
        return kept_manifest(self._spec, self.cache.folder)

    def _files_of(self, manifest: Manifest) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for name, entry in manifest.files.items():
            for folder in self._folders:
                path = folder / name
                if path.is_file() and path.stat().st_size == entry.bytes:
                    found[name] = path
                    break
        return found


def _read(path: Path, piece: Piece) -> bytes:
    with path.open("rb") as file:
        file.seek(piece.start)
        return file.read(piece.bytes)
