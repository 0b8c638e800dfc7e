"""Text to a run's model and back: bytes, or the tokenizer that the run's tokens were made with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from node.island.data.fetching import FetchedFiles, Origin, PieceCache, is_url, origin_of
from node.island.data.manifest import (
    MANIFEST_FILE,
    TOKENIZER_FILE,
    Manifest,
    entry_of_file,
    read_manifest,
)
from node.island.data.opening import kept_manifest, manifest_of_run
from node.island.data.places import DataPlaces
from node.island.data.tokenizing import (
    COPIED_FILES,
    USUAL_TEMPLATE,
    before_a_text,
    chat_templates_of,
    open_tokenizer,
    settings_of_tokenizer,
    tokenizer_files,
    tokenizer_folder,
)
from node.models.reading import ends_in
from protocol.errors import ConfigError, NoInputError
from protocol.files.durable import expanded, make_folder, write_atomically
from protocol.run.models import BYTES_VOCABULARY
from protocol.run.run_spec import RunSpec

BYTES_FOLDER = Path(__file__).parent / "bytes"
"""A tokenizer whose token i is the byte i, but for 0, which separates texts: for programs that want one."""

_NAME_IT = "name it with --tokenizer PATH"


class Text(Protocol):
    """Tokens for text, and text for tokens."""

    ends: frozenset[int]
    """Tokens after which nothing more is written."""

    def tokens_of(self, text: str) -> list[int]:
        """At least one."""

    def tokens_that_ask(self, said: str) -> list[int]:
        """What a user says, as the chat template has it answered; raises ConfigError without one."""

    def text_of(self, tokens: Sequence[int]) -> str:
        """What does not make whole characters is replaced."""


class ByteText:
    """Each byte is a token; the zero byte that separates files stands for no text.

    A model may have more tokens than there are bytes: those are of no text, as a byte that is none.
    """

    ends: frozenset[int] = frozenset()

    def tokens_of(self, text: str) -> list[int]:
        """See Text."""
        return list(text.encode() or b"\0")

    def tokens_that_ask(self, said: str) -> list[int]:
        """See Text."""
        raise ConfigError(
            "the run's tokens are bytes, and bytes have no chat template",
            next_step="give the text that the model goes on from with --prompt",
        )

    def text_of(self, tokens: Sequence[int]) -> str:
        """See Text."""
        known = (token if token < BYTES_VOCABULARY else 0xFF for token in tokens)
        return bytes(known).decode(errors="replace")


class TokenizedText:
    """By a tokenizer.json."""

    def __init__(self, path: Path, *, ends: frozenset[int]) -> None:
        self._tokenizer: Any = open_tokenizer(path)
        self._begin = before_a_text(self._tokenizer)
        self._folder = path.parent
        self.ends = ends

    def tokens_of(self, text: str) -> list[int]:
        """See Text. Special tokens are what their names say, so that a prompt may be a conversation.

        What the tokenizer puts before a text is there once, and what it puts behind one is not: it would be
        an end, and the model goes on from it.
        """
        tokens = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if tokens[: len(self._begin)] != self._begin:
            tokens = [*self._begin, *tokens]
        return tokens or sorted(self.ends)[:1] or [0]

    def tokens_that_ask(self, said: str) -> list[int]:
        """See Text: the template writes all special tokens, also the first."""
        templates = chat_templates_of(self._folder, settings_of_tokenizer(self._folder))
        if (template := templates.get(USUAL_TEMPLATE)) is None:
            raise ConfigError(
                f"the tokenizer in {self._folder} comes without a chat template",
                next_step="name a folder with one with --tokenizer, or give the text that the model goes on "
                "from with --prompt",
            )
        return list(self._tokenizer.encode(template.asking(said), add_special_tokens=False).ids)

    def text_of(self, tokens: Sequence[int]) -> str:
        """See Text."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def files_of_tokenizer(
    spec: RunSpec, places: DataPlaces, *, named: Path | None = None
) -> Mapping[str, Path]:
    """What is kept of the run's tokenizer, by its name; of bytes one that says just that.

    None where samples are a function's, or of loops, and nobody knows of what.

    `named` comes before the folder of the run's tokens, and where that has an address the files are
    fetched and checked. Raises NoInputError where it cannot be had, UnavailableError for an address that
    does not answer.
    """
    if named is not None:
        return tokenizer_files(named)
    if spec.data.source in ("function", "loop"):
        return {}
    files = _tokenizer_of_run(spec, places)[1] if spec.data.source == "tokens" else {}
    return files or tokenizer_files(BYTES_FOLDER)


def end_of_text(spec: RunSpec, places: DataPlaces, *, named: Path | None = None) -> int | None:
    """The token that ends documents, where tokens were made with the tokenizer that is kept."""
    if named is not None or spec.data.source != "tokens":
        return None
    manifest, files = _tokenizer_of_run(spec, places)
    return manifest.end_of_document if files else None


def text_of_run(spec: RunSpec, places: DataPlaces, *, named: Path | None = None) -> Text:
    """How text goes to the run's model and comes back. Raises as `files_of_tokenizer`, or BadDataError."""
    ends = _ends_of(spec)
    if named is not None:
        return TokenizedText(tokenizer_files(named)[TOKENIZER_FILE], ends=ends)
    if spec.data.source == "loop":
        raise refusal_without_data(spec)
    if spec.data.source != "tokens":
        return ByteText()
    manifest, files = _tokenizer_of_run(spec, places)
    if not files:
        return ByteText()
    if not ends and manifest.end_of_document is not None:
        ends = frozenset({manifest.end_of_document})
    return TokenizedText(files[TOKENIZER_FILE], ends=ends)


def refusal_without_data(spec: RunSpec) -> NoInputError:
    """What to say where a text is to become tokens of a run of training loops alone."""
    return NoInputError(
        f"run {spec.run.name!r} has no data, so nothing says which tokens a text is to its model",
        next_step=_NAME_IT,
    )


def _tokenizer_of_run(spec: RunSpec, places: DataPlaces) -> tuple[Manifest, Mapping[str, Path]]:
    """The manifest of the run's tokens and the files of their tokenizer; none where they are bytes.

    From this node's own place of the tokens or the run file's, the folders first.
    """
    named = [path for path in (places.own, *spec.data.paths) if path]
    origins = [origin_of(path) for path in named if is_url(path)]
    folders = [places.folder / expanded(path) for path in named if not is_url(path)]
    for folder in folders:
        if not (folder / MANIFEST_FILE).exists():
            continue
        manifest = read_manifest(folder)
        if not _has_tokenizer(manifest, str(folder)):
            return manifest, {}
        if (folder / TOKENIZER_FILE).is_file() or not origins:
            return manifest, tokenizer_files(folder)
    kept = None if origins else kept_manifest(spec, places.cache)
    if kept is not None and places.cache is not None:  # what peers gave while the node ran
        if not _has_tokenizer(kept, str(places.cache)):
            return kept, {}
        files = tokenizer_folder(places.cache, kept.tokenizer_digest)
        if (files / TOKENIZER_FILE).is_file():
            return kept, tokenizer_files(files)
    if not origins or places.cache is None:
        where = f"there are no tokens in {folders[0]}" if folders else "it has no folder of tokens"
        raise NoInputError(
            f"the run's tokenizer is not on this machine: {where}", next_step=_NAME_IT
        )
    manifest = manifest_of_run(spec, [], origins, places.cache)
    if not _has_tokenizer(manifest, origins[0].name):
        return manifest, {}
    return manifest, _fetched(manifest, origins, places.cache, places.cache_bytes)


def _has_tokenizer(manifest: Manifest, place: str) -> bool:
    if manifest.tokenizer == "unknown":
        raise NoInputError(
            f"{place} does not say which tokenizer its tokens are of", next_step=_NAME_IT
        )
    return manifest.tokenizer != "bytes"


def _fetched(
    manifest: Manifest, origins: Sequence[Origin], cache: Path, cache_bytes: int
) -> Mapping[str, Path]:
    """The tokenizer's files in a folder of the cache, those that are not there yet fetched and checked."""
    folder = tokenizer_folder(cache, manifest.tokenizer_digest)
    make_folder(folder)
    pieces = PieceCache(cache, limit_bytes=cache_bytes)
    far = FetchedFiles(origins, manifest.files, manifest.piece_bytes, pieces)
    found = {}
    for name in COPIED_FILES:
        entry = manifest.files.get(name)
        if entry is None or not entry.bytes:
            continue
        found[name] = folder / name
        if not found[name].is_file() or entry_of_file(found[name]) != entry:
            write_atomically(found[name], far.read(name, 0, entry.bytes).tobytes())
    return found


def _ends_of(spec: RunSpec) -> frozenset[int]:
    """What the folder that the run was made from says to end with."""
    if spec.description is None:
        return frozenset()
    return ends_in(spec.description.generation_config, spec.description.config)
