"""What a record says: a text, an answer to a prompt, or a conversation, as the tools of others write them.

A key by which one of them decides what is learned is honoured here, or refused by its name: a run never
learns something else than its data mean. How a conversation is written out is the tokenizer's chat template's
(node.island.data.chat).
"""

import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node.island.data.inputs import SOME_OF_A_FOLDER
from protocol.errors import BadDataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text, or a conversation as a list of {"role": …, "content": …}.

    `given` is what its chat template is given beside that, such as tools.
    """

    text: bytes
    prompt_bytes: int = 0  # of the text: its beginning, which is read and not learned
    messages: tuple[dict[str, Any], ...] = ()
    learned: tuple[bool, ...] = ()  # for each message
    given: dict[str, Any] = field(default_factory=dict)
    where: str = field(default="", compare=False)  # the file, and the byte that it begins at


TEXT = "text"
MESSAGES, CONVERSATIONS = "messages", "conversations"
PROMPT, COMPLETION = "prompt", "completion"
TOOLS, TEMPLATE_ARGUMENTS, SYSTEM = "tools", "chat_template_kwargs", "system"
"""Keys beside the messages that a conversation is written out by, as trl and transformers know them."""

_NOT_READ = {
    "functions": "write them as 'tools', each as {'type': 'function', 'function': …}",
    "images": "take the records with text alone: a token stands for text here",
    "videos": "take the records with text alone: a token stands for text here",
    "audios": "take the records with text alone: a token stands for text here",
    "mask": "write what is not to be learned into its messages, as 'train': false",
}
"""Keys beside the messages that change what is learned, and what to do instead."""

_OF_RECORDS = (
    *(MESSAGES, CONVERSATIONS, PROMPT, COMPLETION, TOOLS, TEMPLATE_ARGUMENTS, SYSTEM),
    *(*_NOT_READ, "label"),
)

_COMPARED = (
    "answers that are compared are learned by a loss of yours, in a training loop (docs/loops.md) or as "
    "--function MODULE:NAME (docs/models-and-data.md, 'A model from a function')"
)
_OTHER_SHAPES: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset({"chosen", "rejected"}),
        _COMPARED,
    ),
    (
        frozenset({"instruction", "output"}),
        'make messages of instructions: jq -c \'{messages: [{role: "user", content: ([.instruction, .input] '
        '| map(select(. != null and . != "")) | join("\\n"))}, {role: "assistant", content: .output}]}\'',
    ),
    *(
        (
            frozenset({asks, answers}),
            f'make messages of them: jq -c \'{{messages: [{{role: "user", content: .{asks}}}, '
            f'{{role: "assistant", content: .{answers}}}]}}\'',
        )
        for asks, answers in (
            *(("question", "answer"), ("prompt", "response"), ("query", "response")),
            ("input", "output"),
        )
    ),
)
"""Keys of records that mean something, and how else they are trained on."""


def columns_of(names: Sequence[str], field: str, path: Path) -> list[str]:
    """Columns that documents are made of; raises BadDataError where none has a text or a conversation."""
    own = field if field in names else field.partition(".")[0]
    if names.count(own) > 1:
        raise BadDataError(
            f"{path}: {names.count(own)} columns are called {own!r}",
            next_step="give each a name of its own, and name the one that has the text with --field COLUMN",
        )
    is_other = {MESSAGES, CONVERSATIONS} & set(names) or {PROMPT, COMPLETION} <= set(names)
    if own in names or (field == TEXT and is_other):
        return [each for each in dict.fromkeys((own, *_OF_RECORDS)) if each in names]
    without = ", and no 'messages'" if field == TEXT else ""
    raise BadDataError(
        f"{path}: no column {field!r}{without}; there are {', '.join(sorted(names)) or 'none'}",
        next_step=_how_else(names, "COLUMN") + f"; to leave the file out, {SOME_OF_A_FOLDER}",
    )


def _how_else(names: Collection[str], what: str) -> str:
    for keys, next_step in _OTHER_SHAPES:
        if keys <= set(names):
            return next_step
    return (
        f"name the {what.lower()} that has the text with --field {what}, or write questions and answers as "
        "'messages', a list of {'role': …, 'content': …}"
    )


def document_of(record: dict[str, Any], field: str, place: str) -> Document:
    """A record's text, its answer to a prompt, or its conversation. Raises BadDataError for one without.

    One with nothing in its place has an empty text. A field other than `text` was named by somebody, so it
    has to be there, and may have messages.
    """
    text, is_there = _value_at(record, field), _has_place(record, field)
    if isinstance(text, float) and math.isnan(text):  # as pandas has what is missing
        text = None
    talks = (field,) if field in (MESSAGES, CONVERSATIONS) else (MESSAGES, CONVERSATIONS)
    if isinstance(text, str) and field not in talks:
        return Document(text=_encoded(text, place), where=place)
    if isinstance(text, list) and field not in (TEXT, *talks):
        within = {} if field in record else _value_at(record, field.rpartition(".")[0])
        return _conversation({**record, **within}, text, place)
    if field != TEXT and not is_there:
        raise BadDataError(
            f"{place}: the record has no {field!r}; its keys are {', '.join(map(repr, record)) or 'none'}",
            next_step="name the key that has the text or the messages with --field KEY, or write null there "
            "in records that have none",
        )
    for key in talks:
        if (turns := record.get(key)) is not None:
            turns = _from_json(turns, key, place) or []
            return _conversation(record, _of_kind(turns, list, key, place), place)
    if record.keys() >= {PROMPT, COMPLETION}:
        return _answer(record, place)
    if text is None and (is_there or record.keys() & {MESSAGES, CONVERSATIONS}):
        return Document(text=b"", where=place)
    if isinstance(text, bytes):
        raise BadDataError(
            f"{place}: {field!r} is a column of bytes, and text is one of strings",
            next_step="write it as strings, as pandas' df[column].str.decode('utf-8') makes them, or name "
            "the column that has the text with --field COLUMN",
        )
    kind = kind_in_words(text) if text is not None else "no text"
    raise BadDataError(
        f"{place}: the record has {kind} in {field!r}, and no conversation in 'messages'; its keys "
        f"are {', '.join(map(repr, record)) or 'none'}",
        next_step=_how_else(record, "KEY"),
    )


def _value_at(record: Mapping[str, Any], field: str) -> Any:
    """What a key has, or else what a path of keys with dots between leads to."""
    if field in record or "." not in field:
        return record.get(field)
    first, _, rest = field.partition(".")
    within = record.get(first)
    return _value_at(within, rest) if isinstance(within, Mapping) else None


def _has_place(record: Mapping[str, Any], field: str) -> bool:
    """Whether a record without a text has where it would stand; tables leave empty keys within others out."""
    first = field.partition(".")[0]
    return field in record or (first in record and isinstance(record[first], Mapping | None))


def _encoded(text: str, place: str) -> bytes:
    """Raises BadDataError for half of a character, which JSON can write, and no text can hold."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.start]
        raise BadDataError(
            f"{place}: after {near!r} stands \\u{ord(text[error.start]):04x}, which is half of a character: "
            "JSON writes those beyond \\uffff as two halves, and the other one is not there",
            next_step="write both, as \\ud83d\\ude00, or remove that half: a text that was cut may end in it",
        ) from error


def _answer(record: dict[str, Any], place: str) -> Document:
    """A prompt and its completion, of which the completion is learned, as trl has them."""
    _refuse_others(record, {**_NOT_READ, "label": _COMPARED}, place)
    prompt, completion = record[PROMPT], record[COMPLETION]
    if isinstance(prompt, list) and isinstance(completion, list):
        return _conversation(record, [*prompt, *completion], place, num_prompt=len(prompt))
    if not completion:
        return Document(text=b"", where=place)
    if not (isinstance(prompt, str | None) and isinstance(completion, str)):
        raise BadDataError(
            f"{place}: {PROMPT!r} is {kind_in_words(prompt)}, and {COMPLETION!r} "
            f"{kind_in_words(completion)}",
            next_step="write both as texts, or both as lists of messages",
        )
    begins = _encoded(prompt or "", place)
    return Document(
        text=begins + _encoded(completion, place), prompt_bytes=len(begins), where=place
    )


def _conversation(
    record: dict[str, Any], turns: list[Any], place: str, *, num_prompt: int = 0
) -> Document:
    """Messages, of which the assistant's are learned, but for those of the first `num_prompt`."""
    if not turns:
        return Document(text=b"", where=place)
    _refuse_others(record, _NOT_READ, place)
    messages = [_message(each, place) for each in turns]
    learned = [_is_learned(each, place) and i >= num_prompt for i, each in enumerate(messages)]
    if any(learned) and not any(map(_says_something, itertools.compress(messages, learned))):
        return Document(text=b"", where=place)
    learned = [own and _says_something(each) for own, each in zip(learned, messages, strict=True)]
    if system := record.get(SYSTEM):
        first = {"role": "system", "content": system}
        if messages[0]["role"] == "system" and messages[0] != first:
            raise BadDataError(
                f"{place}: {SYSTEM!r} says something else than the first message, which is the system's too",
                next_step="leave one of them out",
            )
        if messages[0] != first:
            messages, learned = [first, *messages], [False, *learned]
    given = _given_of(record, place)
    whole = {"messages": messages, **given} if given else messages
    return Document(
        text=_encoded(json.dumps(whole, sort_keys=True, ensure_ascii=False), place),
        messages=tuple(messages),
        learned=tuple(learned),
        given=given,
        where=place,
    )


def _refuse_others(found: Mapping[str, Any], others: Mapping[str, str], place: str) -> None:
    """Raises BadDataError for a key that changes what is meant, and is not read."""
    for key, next_step in others.items():
        if found.get(key) not in (None, "", [], {}):
            raise BadDataError(
                f"{place}: {key!r} is not read, and without it something else would be learned",
                next_step=next_step,
            )


_SPEAKERS = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""Whom ShareGPT's 'from' names, in the words of chat templates."""

_CALL = "function_call"

_ASSISTANTS = frozenset(
    {"assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "ai", _CALL}
)
"""Roles, in small letters, of one who answers. Templates and masks know the first alone."""

_LEARNED = ("weight", "train", "training", "trainable", "loss")
"""Of an answer: with 0 or false it is not learned. OpenAI, axolotl and ms-swift call it so."""

_AS_MARKS = "mark whole messages, as 'train': true or false"
_NOT_READ_OF_MESSAGES = {
    **dict.fromkeys(
        ("mask", "loss_mask", "loss_scale", "train_detail", "training_detail"), _AS_MARKS
    ),
    _CALL: "write it as 'tool_calls': [{'type': 'function', 'function': …}]",
}

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of one and the same, for which templates know the first or the second; transformers fills them so."""


def _message(turn: Any, place: str) -> dict[str, Any]:
    """A turn as chat templates know it. Raises BadDataError for what is none."""
    if isinstance(turn, dict) and turn.keys() >= {"from", "value"}:
        turn = _of_sharegpt(turn, place)
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise _no_message(turn, place)
    _refuse_others(turn, _NOT_READ_OF_MESSAGES, place)
    if not turn.keys() & {"content", "tool_calls"}:
        raise _no_message(turn, place)
    role, content = turn["role"], turn.get("content")
    if content is None and not turn.get("tool_calls"):
        content = ""  # templates would write null as the word None
    message: dict[str, Any] = {**turn, "content": content} if "content" in turn else {**turn}
    if role != "assistant" and role.lower() in _ASSISTANTS:
        raise BadDataError(
            f"{place}: a message has the role {role!r}, and what is learned is the role 'assistant'",
            next_step="write 'assistant' in its place",
        )
    if not isinstance(content, str | list | None) and role != "tool":  # some answer with objects
        raise BadDataError(
            f"{place}: a message of the role {role!r} has {kind_in_words(content)} as its content",
            next_step="write a text there",
        )
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise BadDataError(
                f"{place}: a message has a part {kind!r}, and only text is learned from",
                next_step="take the records with text alone",
            )
    if (
        thought := next((message[k] for k in _REASONING if message.get(k) is not None), None)
    ) is not None:
        return {"thinking": thought, **message, "reasoning_content": thought}
    return message


def _says_something(answer: dict[str, Any]) -> bool:
    """Whether an answer has words, thoughts or calls: of one without a model would learn to end at once."""
    content = answer.get("content")
    said = "".join(part["text"] for part in content) if isinstance(content, list) else content
    thought = answer.get("reasoning_content")
    return any(each not in (None, "", []) for each in (said, thought, answer.get("tool_calls")))


def _no_message(turn: Any, place: str) -> BadDataError:
    what = (
        f"has the keys {', '.join(map(repr, turn))}"
        if isinstance(turn, dict)
        else f"is {turn!r:.40}"
    )
    return BadDataError(
        f"{place}: a message {what}",
        next_step="write each as {'role': …, 'content': …}, or as ShareGPT does: {'from': …, 'value': …}",
    )


def _of_sharegpt(turn: dict[str, Any], place: str) -> dict[str, Any]:
    speaker = str(turn["from"]).lower()
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if speaker == _CALL:
        calls = _from_json(turn["value"], _CALL, place)
        functions = calls if isinstance(calls, list) else [calls]
        if not all(isinstance(each, dict) and "name" in each for each in functions):
            raise BadDataError(
                f"{place}: {_CALL!r} has no 'name' of a function: {turn['value']!r:.60}",
                next_step="write {'name': …, 'arguments': {…}}",
            )
        called = [{"type": "function", "function": each} for each in functions]
        return {"role": "assistant", "content": "", "tool_calls": called, **others}
    if speaker not in _SPEAKERS:
        raise BadDataError(
            f"{place}: a message is from {turn['from']!r}, who is none of {', '.join(_SPEAKERS)}, {_CALL}",
            next_step="write one of these",
        )
    return {"role": _SPEAKERS[speaker], "content": turn["value"], **others}


def _is_learned(message: dict[str, Any], place: str) -> bool:
    """Whether it is the assistant's, and nothing says that it is not to be learned."""
    is_answer: bool = message["role"] == "assistant"
    found = is_answer
    for key in _LEARNED:
        value = message.get(key)
        if value is None:
            continue
        if value not in (0, 1):
            raise BadDataError(
                f"{place}: a message has {key!r} {value!r}, and an answer is learned whole or not at all",
                next_step="write 0 for one that is not to be learned; without that key it is",
            )
        if value and not is_answer:
            raise BadDataError(
                f"{place}: a message has {key!r} {value!r} and the role {message['role']!r}, and only the "
                "assistant's are learned",
                next_step=f"leave {key!r} out of it, or write the conversations as {{'text': …}}",
            )
        found = found and bool(value)
    return found


def _given_of(record: dict[str, Any], place: str) -> dict[str, Any]:
    """What a record gives its chat template beside the messages; both may be JSON within a string.

    Columns of tables often are that, as tools have no one schema.
    """
    found: dict[str, Any] = {}
    for key, kind in ((TEMPLATE_ARGUMENTS, dict), (TOOLS, list)):
        if value := _from_json(record.get(key), key, place):
            value = _of_kind(value, kind, key, place)
            found |= value if kind is dict else {key: value}
    return found


def _from_json(value: Any, key: str, place: str) -> Any:
    """What a string has as JSON, and any other value as it is. Raises BadDataError for other strings."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise BadDataError(
            f"{place}: {key!r} is no JSON: {error}", next_step="correct that record"
        ) from error


def _of_kind(value: Any, kind: type, key: str, place: str) -> Any:
    if isinstance(value, kind):
        return value
    raise BadDataError(
        f"{place}: {key!r} is {kind_in_words(value)}, and not {_KINDS_IN_WORDS[kind]}",
        next_step=_AS_KINDS[key],
    )


_KINDS_IN_WORDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def kind_in_words(value: Any) -> str:
    """What a value of a record is, in JSON's words; a table's may be of other types too, as dates."""
    return _KINDS_IN_WORDS.get(type(value), f"of type {type(value).__name__}")


_AS_KINDS = {
    MESSAGES: "write a list of {'role': …, 'content': …}",
    CONVERSATIONS: "write a list of {'from': …, 'value': …}",
    TOOLS: "write a list of JSON schemas",
    TEMPLATE_ARGUMENTS: "write an object of what else the chat template takes",
}
