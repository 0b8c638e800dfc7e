"""Whether a new run's model learns to stop: some token that ends its answers, of those after which it stops.

Said to who makes the run, by `atoll init`; nothing is refused.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from node.models.folders import GENERATION_CONFIG
from node.models.reading import ends_in, read_settings
from protocol.errors import AtollError
from protocol.run.run_files import Asked

_TOKENIZER = "tokenizer.json"


def look_at_ends_of_answers(source: Path | None, asked: Asked, notes: list[str]) -> None:
    """Says where a model learns no token after which it stops writing: it would go on after each answer.

    So it is with a chat template whose turns end otherwise than the documents of its tokenizer.
    """
    from node.island.data.manifest import read_manifest
    from node.island.data.token_shards import learned_of_held_out
    from node.island.data.tokenizing import open_tokenizer

    tokens = Path(asked.data[0])
    manifest = read_manifest(tokens)
    learned = learned_of_held_out(tokens, manifest)
    if not (tokens / _TOKENIZER).is_file() or not learned.any():
        return
    tokenizer = open_tokenizer(tokens / _TOKENIZER)
    found = _end_that_is_learned(tokenizer, _ends_of(source, manifest.end_of_document), learned)
    if found is None:
        return
    stops, name, ends = found
    if name is None:
        notes.append(
            f"no answer in {tokens} ends with {stops}, after which the model writes no more, so it will "
            "write on after its answers: let the chat template write it after each answer, and prepare the "
            "conversations again"
        )
        return
    mend = (
        f"prepare them with --end-of-document '{name}'"
        if source is None
        else f'write "eos_token_id": {ends} into {source / GENERATION_CONFIG}, and begin anew'
    )
    notes.append(
        f"answers in {tokens} end with {name!r}, and the model writes until {stops}, so it will write on "
        f"after its answers: {mend}"
    )


def look_at_ends_of_private_answers(
    source: Path | None, named: str | None, notes: list[str]
) -> None:
    """The same of data that are not here, by an answer that the tokenizer's chat template writes out."""
    from node.island.data.records import Document
    from node.island.data.tokenizing import FileTokenizer, open_tokenizer, tokenizer_files

    path = tokenizer_files(Path(named) if named is not None else source or Path())[_TOKENIZER]
    asked = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}
    conversation = Document(text=b"", messages=asked, learned=(False, True), where="a conversation")
    try:
        tokenizer = FileTokenizer(path.parent)
        ((answer, *_),) = tokenizer.encode([conversation])
    except AtollError:
        return  # without a chat template, or one that can be used, holders can have no conversations
    assert answer.counted is not None  # of a conversation not all is learned
    learned = np.bincount(answer.tokens[answer.counted], minlength=tokenizer.vocab_size)
    ends = _ends_of(source, tokenizer.end_of_document)
    found = _end_that_is_learned(open_tokenizer(path), ends, learned)
    if found is None:
        return
    stops, name, both = found
    end = "no special token" if name is None else repr(name)
    if name is None:
        mend = f"let the chat template beside {path} write it after each answer"
    elif source is None:
        mend = f'write "eos_token": "{name}" into {path.parent / "tokenizer_config.json"}'
    else:
        mend = f'write "eos_token_id": {both} into {source / GENERATION_CONFIG}'
    notes.append(
        f"where members' data are conversations, answers end with {end} by the chat "
        f"template beside {path}, and the model writes until {stops}, so it will write on after its answers: "
        f"{mend}, and begin anew"
    )


def _ends_of(source: Path | None, end_of_document: int | None) -> frozenset[int]:
    """The tokens after which the model writes no more."""
    ends = frozenset[int]()
    if source is not None:
        told = read_settings(source)
        ends = ends_in(told.get("generation_config", {}), told["config"])
    return ends or frozenset(() if end_of_document is None else (end_of_document,))


def _end_that_is_learned(
    tokenizer: Any, ends: frozenset[int], learned: npt.NDArray[np.integer]
) -> tuple[str, str | None, list[int]] | None:
    """Where the model does not learn to write an end: its ends in words, what it does learn, and all of them.

    `learned` is how often each token is. None where it learns one, or has none.
    """
    if not ends or any(learned[end] for end in ends if end < len(learned)):
        return None
    stops = " or ".join(repr(tokenizer.id_to_token(end) or str(end)) for end in sorted(ends))
    added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
    special = [token for token, each in added.items() if each.special and learned[token]]
    if not special:
        return stops, None, sorted(ends)
    usual = max(special, key=lambda token: learned[token])
    return stops, added[usual].content, sorted({usual, *ends})
