"""Text to a run's model and back: bytes, or the tokenizer that the run's tokens were made with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from node.island.data.fetching import is_url
from node.island.data.manifest import MANIFEST_FILE, TOKENIZER_FILE, Manifest, read_manifest
from node.island.data.places import DataPlaces
from node.island.data.tokenizing import open_tokenizer, tokenizer_files
from protocol.errors import NoInputError
from protocol.files import expanded
from protocol.models import BYTES_VOCABULARY
from protocol.run_spec import RunSpec

_NAME_IT = "name it with --tokenizer PATH"


class Text(Protocol):
    """Tokens for text, and text for tokens."""

    ends: frozenset[int]
    """Tokens after which nothing more is written."""

    def tokens_of(self, text: str) -> list[int]:
        """At least one."""

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

    def text_of(self, tokens: Sequence[int]) -> str:
        """See Text."""
        known = (token if token < BYTES_VOCABULARY else 0xFF for token in tokens)
        return bytes(known).decode(errors="replace")


class TokenizedText:
    """By a tokenizer.json."""

    def __init__(self, path: Path, *, ends: frozenset[int]) -> None:
        self._tokenizer: Any = open_tokenizer(path)
        self.ends = ends

    def tokens_of(self, text: str) -> list[int]:
        """See Text. Special tokens are what their names say, so that a prompt may be a conversation."""
        return list(self._tokenizer.encode(text).ids) or sorted(self.ends)[:1] or [0]

    def text_of(self, tokens: Sequence[int]) -> str:
        """See Text."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def files_of_tokenizer(
    spec: RunSpec, places: DataPlaces, *, named: Path | None = None
) -> Mapping[str, Path]:
    """What is kept of the run's tokenizer, by its name; none where tokens are bytes.

    `named` comes before the folder of the run's tokens. Raises NoInputError where it is not on this
    machine.
    """
    if named is not None:
        return tokenizer_files(named)
    if spec.data.source != "tokens":
        return {}
    folder, manifest = _tokens_of(spec, places)
    if manifest.tokenizer == "unknown":
        raise NoInputError(
            f"{folder} does not say which tokenizer its tokens are of", next_step=_NAME_IT
        )
    return {} if manifest.tokenizer == "bytes" else tokenizer_files(folder)


def text_of_run(spec: RunSpec, places: DataPlaces, *, named: Path | None = None) -> Text:
    """How text goes to the run's model and comes back. Raises NoInputError or BadDataError."""
    files = files_of_tokenizer(spec, places, named=named)
    if not files:
        return ByteText()
    ends = _ends_of(spec)
    if not ends and named is None:
        end = _tokens_of(spec, places)[1].end_of_document
        ends = frozenset() if end is None else frozenset({end})
    return TokenizedText(files[TOKENIZER_FILE], ends=ends)


def _tokens_of(spec: RunSpec, places: DataPlaces) -> tuple[Path, Manifest]:
    """The folder of the run's tokens on this machine: this node's own, or as the run file says."""
    named = [path for path in (places.own, *spec.data.paths) if path and not is_url(path)]
    folders = [places.folder / expanded(path) for path in named]
    there = next((folder for folder in folders if (folder / MANIFEST_FILE).exists()), None)
    if there is None:
        where = f"there are no tokens in {folders[0]}" if folders else "it has no folder of tokens"
        raise NoInputError(
            f"the run's tokenizer is not on this machine: {where}", next_step=_NAME_IT
        )
    return there, read_manifest(there)


def _ends_of(spec: RunSpec) -> frozenset[int]:
    """What the folder that the run was made from says to end with."""
    if spec.description is None:
        return frozenset()
    for settings in (spec.description.generation_config, spec.description.config):
        ends = settings.get("eos_token_id")
        if ends is not None:
            return frozenset(ends if isinstance(ends, list) else [ends])
    return frozenset()
