"""From text to tokens: bytes, which need nothing, or a tokenizer.json with its chat template.

Text of documents never becomes a special token: a document that has the letters of the end-of-document
token in it is no end of a document. A conversation is written out by the tokenizer's chat template, and
only what the assistant says is to be learned.
"""

import itertools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from node.installed import needs_package
from node.island.data.documents import DOCUMENT_BYTES, LONGEST_LINE_BYTES
from node.island.data.manifest import TOKENIZER_FILE
from node.island.data.records import Document
from node.models.folders import (
    fetching,
    is_pointer_of_lfs,
    not_there,
    pointer_of_lfs,
    require_none_below,
)
from protocol.errors import BadDataError, ConfigError, NoInputError, UsageError

if TYPE_CHECKING:
    from node.island.data.chat import ChatTemplate, Span


def tokenizer_folder(cache: Path, digest: str | None) -> Path:
    """Where a node has the files of a tokenizer that it fetched, beside the pieces of tokens."""
    return cache / f"tokenizer-{str(digest)[:16]}"


TOKENIZER_SETTINGS = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_TEMPLATE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"

COPIED_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_SETTINGS,
    _SPECIAL_TOKENS,
    _TEMPLATE,
    "generation_config.json",
)
"""What of a tokenizer's folder is kept beside its tokens, for export and for text out."""

_USUAL_ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>"),
    *("[EOS]", "<|endofdocument|>"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """Tokens of a document with its end, and which of them are to be learned."""

    tokens: npt.NDArray[np.uint32]
    counted: npt.NDArray[np.bool_] | None  # None: all
    text_bytes: int  # of what is to be learned

    @property
    def num_counted(self) -> int:
        """Tokens that are to be learned."""
        return len(self.tokens) if self.counted is None else int(self.counted.sum())


class Tokenizer(Protocol):
    """Turns documents into tokens, the same on every machine."""

    vocab_size: int
    end_of_document: int
    unknown: int | None  # stands for text that it has no token for; None where it has one for all

    def encode(self, documents: list[Document]) -> list[list[Encoded]]:
        """Each document with its end; a conversation may become several. Raises BadDataError for no text."""

    def named_in(self, document: Document) -> str | None:
        """The first special token whose name the document's own words have; None where they have none."""


class ByteTokenizer:
    """Each byte is a token, and a zero byte ends a document."""

    vocab_size = 256
    end_of_document = 0
    unknown: int | None = None

    def encode(self, documents: list[Document]) -> list[list[Encoded]]:
        """See Tokenizer."""
        return [[self._encoded(document)] for document in documents]

    def named_in(self, document: Document) -> str | None:
        """See Tokenizer: no byte has a name."""
        return None

    def _encoded(self, document: Document) -> Encoded:
        if document.messages:
            raise ConfigError(
                "the data has conversations in 'messages', and bytes have no chat template",
                next_step="name a tokenizer that has one with --tokenizer FOLDER",
            )
        tokens = np.frombuffer(document.text + b"\0", np.uint8).astype(np.uint32)
        counted = None
        if document.prompt_bytes:
            counted = np.arange(len(tokens)) >= document.prompt_bytes
        return Encoded(
            tokens=tokens,
            counted=counted,
            text_bytes=len(document.text) - document.prompt_bytes,
        )


class FileTokenizer:
    """A tokenizer.json."""

    def __init__(
        self, folder: Path, *, end_of_document: str | None = None, origin: Path | None = None
    ) -> None:
        """Raises BadDataError for one that cannot be read, ConfigError without an end of documents.

        They name `origin`, where the folder has a copy of it.
        """
        path = folder / TOKENIZER_FILE
        self._tokenizer = open_tokenizer(path, origin=origin)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = vocab_size_of(self._tokenizer)
        self._config = settings_of_tokenizer(folder)
        self.end_of_document = self._end(vocabulary, end_of_document, origin or path)
        self._begin = before_a_text(self._tokenizer)
        self._templates = chat_templates_of(folder, self._config)
        self.unknown = _unknown_of(self._tokenizer, vocabulary)
        if self.unknown == self.end_of_document:  # then nobody can tell
            self.unknown = None
        added = self._tokenizer.get_added_tokens_decoder().values()
        names = sorted(
            (re.escape(each.content.encode()) for each in added if each.special), key=len
        )
        self._names = re.compile(b"|".join(reversed(names))) if names else None

    def _end(self, vocabulary: dict[str, int], named: str | None, path: Path) -> int:
        if named is not None:
            if named not in vocabulary:
                raise UsageError(
                    f"--end-of-document {named!r} is no token of {path}",
                    next_step="name one of its special tokens",
                )
            return vocabulary[named]
        usual = (self._config.get("eos_token"), *_USUAL_ENDS)
        for token in usual:
            if token in vocabulary:
                return vocabulary[token]
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = ", ".join(each.content for each in added if each.special)
        raise ConfigError(
            f"{path} does not say which token ends a document; its special tokens are {special or 'none'}",
            next_step="name it with --end-of-document TOKEN",
        )

    def encode(self, documents: list[Document]) -> list[list[Encoded]]:
        """See Tokenizer."""
        self._tokenizer.encode_special_tokens = True  # as letters, in spite of its name
        plain = iter(self._plain([_text_of(each) for each in documents if not has_parts(each)]))
        answers = iter([self._answer(each) for each in documents if each.prompt_bytes])
        self._tokenizer.encode_special_tokens = False
        return [
            self._conversation(document)
            if document.messages
            else [next(answers)]
            if document.prompt_bytes
            else [Encoded(tokens=next(plain), counted=None, text_bytes=len(document.text))]
            for document in documents
        ]

    def named_in(self, document: Document) -> str | None:
        """See Tokenizer."""
        found = None if self._names is None else self._names.search(document.text)
        return None if found is None else found.group().decode()

    def _plain(self, texts: list[str]) -> list[npt.NDArray[np.uint32]]:
        """Tokens of texts, with their ends. A long one is encoded a piece at a time: see _pieces_of."""
        pieces = [_pieces_of(text) for text in texts]
        whole = [own[0] for own in pieces if len(own) == 1]
        encoded = iter(self._tokenizer.encode_batch_fast(whole, add_special_tokens=False))
        found = []
        for own in pieces:
            parts = (
                [next(encoded).ids]
                if len(own) == 1
                else (self._tokenizer.encode(each, add_special_tokens=False).ids for each in own)
            )
            joined = itertools.chain([self._begin], parts, [[self.end_of_document]])
            found.append(np.concatenate([np.array(each, np.uint32) for each in joined]))
        return found

    def _answer(self, document: Document) -> Encoded:
        """A prompt and what follows it: one text, as whoever asks the model gives it the prompt."""
        text = _text_of(document)
        prompt_length = len(document.text[: document.prompt_bytes].decode())
        tokens, counted = [np.array(self._begin, np.uint32)], [np.zeros(len(self._begin), np.bool_)]
        start = 0
        for piece in _pieces_of(text):
            encoding = self._tokenizer.encode(piece, add_special_tokens=False)
            tokens.append(np.array(encoding.ids, np.uint32))
            counted.append(_within(encoding, [(prompt_length - start, len(text) - start)]))
            start += len(piece)
        tokens.append(np.array([self.end_of_document], np.uint32))
        counted.append(np.ones(1, np.bool_))
        return Encoded(
            tokens=np.concatenate(tokens),
            counted=np.concatenate(counted),
            text_bytes=len(document.text) - document.prompt_bytes,
        )

    def _conversation(self, document: Document) -> list[Encoded]:
        has_tools = bool(document.given.get("tools"))
        template = self._templates.get(_FOR_TOOLS if has_tools else USUAL_TEMPLATE)
        if template is None:
            raise ConfigError(
                "the data has conversations in 'messages', and the tokenizer comes without a chat template",
                next_step="add chat_template.jinja to its folder, and name the folder with --tokenizer",
            )
        try:
            texts = template.written_out(document)
        except BadDataError as error:
            raise BadDataError(
                f"{document.where}: {error.what}", next_step=error.next_step
            ) from error
        return [self._written_out(text, spans) for text, spans in texts]

    def _written_out(self, text: str, spans: "list[Span]") -> Encoded:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        counted = _within(encoding, spans)
        tokens = np.array(encoding.ids, np.uint32)
        if not len(tokens) or tokens[-1] != self.end_of_document:
            tokens = np.append(tokens, np.uint32(self.end_of_document))
            counted = np.append(counted, False)
        return Encoded(
            tokens=tokens,
            counted=counted,
            text_bytes=sum(len(text[begin:end].encode()) for begin, end in spans),
        )


def has_parts(document: Document) -> bool:
    """Whether not all of it is learned alike."""
    return bool(document.messages or document.prompt_bytes)


def _within(encoding: Any, spans: "list[Span]") -> npt.NDArray[np.bool_]:
    """Which tokens have a letter of one of the spans."""
    begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    counted = np.zeros(len(begins), np.bool_)
    for begin, end in spans:
        # A word may be one token with the space before it, where the prompt ends in that.
        counted |= (ends > begin) & (begins < end)
    return counted


USUAL_TEMPLATE, _FOR_TOOLS = "default", "tool_use"
"""Chat templates, as transformers names them where a tokenizer has several."""


def chat_templates_of(folder: Path, config: dict[str, Any]) -> "dict[str, ChatTemplate]":
    """The usual template of a tokenizer's folder and the one for tools, which may be the same."""
    sources = _templates_in_files(folder) or _templates_in(config)
    if not sources:
        return {}
    from node.island.data.chat import ChatTemplate

    names = {key: value for key, value in config.items() if key.endswith("_token")}
    found = {
        name: ChatTemplate(sources[name], {"bos_token": "", "eos_token": "", **names})
        for name in (USUAL_TEMPLATE, _FOR_TOOLS)
        if name in sources
    }
    return {_FOR_TOOLS: found[USUAL_TEMPLATE], **found} if USUAL_TEMPLATE in found else found


def _templates_in_files(folder: Path) -> dict[str, str]:
    """Chat templates by their names, which transformers puts before those of the settings."""
    more = sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))
    files = {USUAL_TEMPLATE: folder / _TEMPLATE, **{path.stem: path for path in more}}
    return {name: path.read_text("utf-8") for name, path in files.items() if path.is_file()}


def _templates_in(config: dict[str, Any]) -> dict[str, str]:
    """Chat templates of a tokenizer's settings: one, or a list of several with their names."""
    found = config.get("chat_template")
    if isinstance(found, list):
        return {each["name"]: each["template"] for each in found}
    return (
        found if isinstance(found, dict) else {} if found is None else {USUAL_TEMPLATE: str(found)}
    )


LONGEST_ENCODED = DOCUMENT_BYTES + LONGEST_LINE_BYTES
"""Characters that are encoded at once, as many as a document of plain text has bytes."""

PIECE_ENCODED = LONGEST_LINE_BYTES
"""Of longer ones. A tokenizer takes 200 bytes of memory for each character, and leaves it in pieces."""


def _pieces_of(text: str) -> list[str]:
    """A text in pieces that end with a line, or before a space, where they do; most texts are one."""
    if len(text) <= LONGEST_ENCODED:
        return [text]
    pieces, start = [], 0
    while len(text) - start > PIECE_ENCODED:
        most = start + PIECE_ENCODED
        at = text.rfind("\n", start, most) + 1 or text.rfind(" ", start + 1, most)
        at = at if at > start else most
        pieces.append(text[start:at])
        start = at
    return [*pieces, text[start:]]


def _unknown_of(tokenizer: Any, vocabulary: Mapping[str, int]) -> int | None:
    """The token for what a model has no token for; None for one that falls back to bytes."""
    model = json.loads(tokenizer.to_str())["model"]
    if model.get("byte_fallback"):
        return None
    if model.get("type") == "Unigram":
        unknown: int | None = model.get("unk_id")
        return unknown
    return vocabulary.get(model.get("unk_token") or "")


def before_a_text(tokenizer: Any) -> list[int]:
    """What a tokenizer puts before a text by itself, as <bos>: who asks the model does so as well."""
    some = "a"
    alone = tokenizer.encode(some, add_special_tokens=False).ids
    whole = list(tokenizer.encode(some, add_special_tokens=True).ids)
    for at in range(len(whole)):
        if whole[at : at + len(alone)] == alone:
            return whole[:at]
    return []


def _text_of(document: Document) -> str:
    try:
        return document.text.decode()
    except UnicodeDecodeError as error:
        near = document.text[max(0, error.start - 20) : error.start].decode(errors="replace")
        raise BadDataError(
            f"{document.where}: a document is not UTF-8: its byte {error.start}, after {near!r}, is "
            f"{error.object[error.start]:#x}",
            next_step="convert it, as 'iconv -f ISO-8859-1 -t UTF-8', or leave it out",
        ) from error


def settings_of_tokenizer(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, where there is one, with tokens as their texts.

    Of an older folder, with what special_tokens_map.json says: transformers looks there where the settings do
    not list added tokens.
    """
    config = _object_in(folder / TOKENIZER_SETTINGS)
    if "added_tokens_decoder" not in config:
        config |= _object_in(folder / _SPECIAL_TOKENS)
    return {
        key: value["content"] if isinstance(value, dict) and "content" in value else value
        for key, value in config.items()
    }


def _object_in(path: Path) -> dict[str, Any]:
    """What a JSON file says; nothing where it is not there."""
    if not path.is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadDataError(f"{path} is no JSON: {error}", next_step="fetch it again") from error
    return found


def open_tokenizer(path: Path, *, origin: Path | None = None) -> Any:
    """The tokenizer of a tokenizer.json; raises BadDataError for one that cannot be read.

    It names `origin`, where the file is a copy of it.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes share the cores
    tokenizers = needs_package("tokenizers", what=f"{path} is a tokenizer")
    if is_pointer_of_lfs(path):
        raise pointer_of_lfs(origin or path)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        next_step = (
            "write it again with the version that is installed here, or upgrade tokenizers"
            if _is_tokenizer_json(path)
            else f"name a tokenizer.json; of other files {_WRITE_ONE}"
        )
        raise BadDataError(
            f"{origin or path} is no tokenizer that this version of tokenizers reads: {error}",
            next_step=next_step,
        ) from error


_WRITE_ONE = (
    "transformers writes it with 'AutoTokenizer.from_pretrained(…).save_pretrained(FOLDER)'"
)


def _is_tokenizer_json(path: Path) -> bool:
    """Whether it is one by its keys, of whatever version."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "model" in found


def vocab_size_of(tokenizer: Any) -> int:
    """One more than the largest token of what `open_tokenizer` gave."""
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return max(vocabulary.values(), default=0) + 1


def tokenizer_files(path: Path) -> dict[str, Path]:
    """What is kept of a tokenizer, by its name: of a tokenizer.json alone, or of a folder.

    Raises NoInputError where there is none.
    """
    if path.is_file():
        return {TOKENIZER_FILE: path}
    if (path / TOKENIZER_FILE).is_file():
        return {name: path / name for name in COPIED_FILES if (path / name).is_file()}
    if (path / TOKENIZER_FILE).is_symlink():
        raise not_there(path / TOKENIZER_FILE)
    require_none_below(path, TOKENIZER_FILE)
    what = "has no tokenizer.json" if path.is_dir() else "is not there"
    fetched = "" if path.is_dir() else fetching(path, "--tokenizer")
    raise NoInputError(
        f"the tokenizer {path} {what}",
        next_step=f"name a tokenizer.json, or a folder with one{fetched or f'; {_WRITE_ONE}'}",
    )


def kept_of_tokenizer(files: Mapping[str, Path]) -> dict[str, bytes]:
    """What `tokenizer_files` names, as it is kept: side by side.

    Chat templates of a folder beside them go into the settings, all that there are, as transformers has
    written them before; both forms mean the same to it.
    """
    kept = {name: path.read_bytes() for name, path in files.items()}
    folder = files[TOKENIZER_FILE].parent
    if TOKENIZER_SETTINGS in files and (folder / _MORE_TEMPLATES).is_dir():
        named = _templates_in_files(folder) or _templates_in(
            _object_in(folder / TOKENIZER_SETTINGS)
        )
        templates = [{"name": name, "template": text} for name, text in named.items()]
        settings = _object_in(folder / TOKENIZER_SETTINGS) | {"chat_template": templates}
        kept[TOKENIZER_SETTINGS] = json.dumps(settings, indent=2, ensure_ascii=False).encode()
        kept.pop(_TEMPLATE, None)
    return kept
