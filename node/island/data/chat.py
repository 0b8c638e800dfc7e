"""Conversations written out by a tokenizer's chat template, in Jinja as transformers has it.

Which letters of it are to be learned is told beside: by the template's own marks, or by what each turn adds.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from node.island.data.records import Document
from protocol.errors import BadDataError


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` as transformers has it; Jinja's own escapes what HTML would take for its own."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


BEGIN_MARK, END_MARK = "\ufdd0", "\ufdd1"
"""Around what a template marks, until it is written out: code points that no text may have, by Unicode."""


class _Marks(Extension):
    """`{% generation %} … {% endgeneration %}`, by which templates say what is to be learned."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """See Extension."""
        self.environment.extend(has_marks=True)
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return BEGIN_MARK + caller() + END_MARK


class ChatTemplate:
    """A chat template with the tokens that it has names for."""

    def __init__(self, source: str, names: dict[str, Any]) -> None:
        def refuse(message: str) -> None:
            raise ValueError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _as_json
        environment.globals["raise_exception"] = refuse
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise BadDataError(
                f"the tokenizer's chat template cannot be read: line {error.lineno}: {error.message}",
                next_step="correct chat_template.jinja in the tokenizer's folder",
            ) from error
        self._has_marks = getattr(environment, "has_marks", False)
        self._names = names
        self._takes_parts = self._writes_parts_as_text()
        self._takes_objects = self._writes_arguments_of_calls()

    def written_out(self, document: Document) -> tuple[str, list[tuple[int, int]]]:
        """A conversation as text, and where in it stands what is to be learned.

        Where a template marks that, its marks count. Else it is what an answer adds to the text up to it,
        with the prompt that asks for it, and so with the end of the turn. Raises BadDataError where a
        template does not write turn after turn, or marks something else than answers.
        """
        messages = [self._taken(each) for each in document.messages]
        whole = self._rendered(messages, document.given)
        _check_all_is_written(whole, messages, document.given)
        if self._has_marks:
            return _without_marks(whole, document)
        spans = []
        for i, is_learned in enumerate(document.learned):
            if not is_learned:
                continue
            before = self._rendered(messages[:i], document.given, add_generation_prompt=True)
            after = (
                whole
                if i == len(messages) - 1
                else self._rendered(messages[: i + 1], document.given)
            )
            if not (after.startswith(before) and whole.startswith(after)):
                raise BadDataError(
                    "the chat template writes a conversation otherwise than turn after turn, so what the "
                    "assistant says cannot be told from the rest",
                    next_step="put a template that marks it with {% generation %} in the place of "
                    "chat_template.jinja, such as trl/chat_templates/*_training.jinja of the package trl, or "
                    "write the conversations as text yourself, as {'text': …}",
                )
            spans.append((len(before), len(after)))
        return whole, spans

    def _writes_parts_as_text(self) -> bool:
        """Whether content may be a list of parts; most templates would write that list as Python shows it."""
        told = [{"role": "user", "content": [{"type": "text", "text": "told"}]}]
        try:
            written = self._rendered(told, {})
        except BadDataError:
            return False
        return "told" in written and "'text'" not in written and '"text"' not in written

    def _writes_arguments_of_calls(self) -> bool:
        """Whether a call's arguments are an object, as transformers asks: some templates join texts."""
        call = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
        asked = {"role": "user", "content": "look"}
        try:
            self._rendered([asked, {"role": "assistant", "content": "", "tool_calls": [call]}], {})
        except BadDataError:
            return False
        return True

    def _taken(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as this template takes it: parts and arguments come in two ways."""
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(content, list) and not self._takes_parts:
            message = {**message, "content": "".join(part["text"] for part in content)}
        if isinstance(calls, list) and self._takes_objects:
            message = {**message, "tool_calls": list(map(_with_object, calls))}
        return message

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        given: dict[str, Any],
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        try:
            return self._template.render(
                {
                    # Templates ask whether these two are none, not whether they are there.
                    "tools": None,
                    "documents": None,
                    **self._names,
                    **given,
                    "messages": list(messages),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except UndefinedError as error:  # such as strftime_now: tokens would differ by the day
            raise BadDataError(
                f"the chat template asks for something that is not given here: {error.message}",
                next_step="write a value in its place into chat_template.jinja in the tokenizer's folder",
            ) from error
        except (TemplateError, ValueError, TypeError) as error:
            raise BadDataError(
                f"the chat template refuses a conversation: {error}",
                next_step="correct the conversation, or leave it out",
            ) from error


def _check_all_is_written(
    whole: str, messages: list[dict[str, Any]], given: Mapping[str, Any]
) -> None:
    """Raises BadDataError for what a template passes over: many know no tools, or no system.

    An answer may lose what was thought before it, and what tools answer may be written as JSON.
    """
    needed = [("the tool", _name_of(tool)) for tool in given.get("tools") or ()]
    for message in messages:
        needed += [("the call of", _name_of(call)) for call in message.get("tool_calls") or ()]
        content = message.get("content")
        if message["role"] in ("system", "user") and isinstance(content, str):
            needed.append((f"what the {message['role']} says:", content.strip()))
    for what, text in needed:
        if text not in whole:
            raise BadDataError(
                f"the chat template does not write {what} {text[:40]!r}",
                next_step="take a template that does, as chat_template.jinja in the tokenizer's folder, or "
                "leave such conversations out",
            )


def _name_of(tool: Any) -> str:
    """Of a tool, or of a call of one; empty where it has none."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _with_object(call: Any) -> Any:
    """A call whose arguments are an object, which OpenAI's format has as JSON within a string.

    A template would write that string as JSON once more.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _without_marks(marked: str, document: Document) -> tuple[str, list[tuple[int, int]]]:
    """The text, and what lay between marks. Raises BadDataError where marks are not one for each answer.

    That is asked only where some answers are not learned.
    """
    if any(mark in document.text.decode() for mark in (BEGIN_MARK, END_MARK)):
        raise BadDataError(
            "a conversation has U+FDD0 or U+FDD1 in it, which are no characters",
            next_step="remove them: Unicode keeps them from being exchanged",
        )
    spans: list[tuple[int, int]] = []
    pieces: list[str] = []
    length = 0
    for piece in marked.split(BEGIN_MARK):
        own, *rest = piece.split(END_MARK)
        if rest:
            spans.append((length, length + len(own)))
        pieces += [own, *rest]
        length += sum(map(len, (own, *rest)))
    answers = [
        is_learned
        for message, is_learned in zip(document.messages, document.learned, strict=True)
        if message["role"] == "assistant"
    ]
    if all(answers):
        return "".join(pieces), spans
    if len(answers) != len(spans):
        raise BadDataError(
            f"the chat template marks {len(spans)} parts of a conversation with {len(answers)} answers, of "
            "which some are not to be learned",
            next_step="write {% generation %} around each answer in chat_template.jinja",
        )
    return "".join(pieces), [
        span for span, is_learned in zip(spans, answers, strict=True) if is_learned
    ]
