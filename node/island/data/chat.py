"""Conversations written out by a tokenizer's chat template, in Jinja as transformers has it.

Which letters of it are to be learned is told beside: by the template's own marks, or by what each answer adds
to the prompt that asks for it.
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


Span = tuple[int, int]
Written = tuple[str, list[Span]]
"""A text, and where in it stands what is to be learned."""


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
        self._source, self._names = source, names
        self._takes_parts = self._writes_parts_as_text()
        self._takes_objects = self._writes_arguments_of_calls()

    def written_out(self, document: Document) -> list[Written]:
        """A conversation as one text, or as several where its template writes earlier answers otherwise.

        Where a template marks what is learned, its marks count. Else it is what an answer adds to the prompt
        that asks for it, both as the conversation up to this answer is written: so a model is asked later.
        Where what follows an answer changes how it stands, as one that loses what was thought before it,
        the answer ends a text of its own. Raises BadDataError where answers cannot be told from the rest or
        are not written whole, or where marks are something else than answers.
        """
        messages = [self._taken(each) for each in document.messages]
        whole = self._rendered(messages, document.given)
        _check_all_is_written(whole, messages, document.given)
        if self._has_marks:
            if document.learned[-1]:
                _check_thought(messages[-1], whole)
            return [_without_marks(whole, document)]
        found: list[Written] = []
        for i, is_learned in enumerate(document.learned):
            if is_learned:
                text, span = self._answer(messages[: i + 1], document.given)
                if found and (spans := self._continued(found[-1], text)) is not None:
                    found[-1] = text, [*spans, span]
                else:
                    found.append((text, [span]))
        if not found:
            return [(whole, [])]
        if whole.startswith(found[-1][0]):  # whoever has the last word is read, too
            found[-1] = whole, found[-1][1]
        return found

    def asking(self, said: str) -> str:
        """The prompt that asks for an answer to what a user says. Raises BadDataError as `written_out`."""
        asked = [self._taken({"role": "user", "content": said})]
        return self._rendered(asked, {}, add_generation_prompt=True)

    def _answer(self, messages: list[dict[str, Any]], given: dict[str, Any]) -> tuple[str, Span]:
        """A conversation that ends with an answer, and where that stands; it includes the end of the turn."""
        text = self._rendered(messages, given)
        try:
            before = self._rendered(messages[:-1], given, add_generation_prompt=True)
        except BadDataError as error:
            if any(each["role"] == "user" for each in messages[:-1]):
                raise
            raise _unasked() from error
        begins = _num_common(before, text)
        _check_thought(messages[-1], text[begins:])
        if begins < len(before):
            raise self._asked_otherwise(before[begins:], text[begins:], messages)
        return text, (len(before), len(text))

    def _asked_otherwise(
        self, asked: str, written: str, messages: list[dict[str, Any]]
    ) -> BadDataError:
        """What to say where an answer does not begin with the prompt that asks for it."""
        if len(messages) == 1:
            return _unasked()
        has_thought = json.dumps(bool(_thought_of(messages[-1])))
        answers = [each["role"] == "assistant" for each in messages]
        if all(answers[-2:]):
            next_step = "join answers that follow one another into one message"
        elif "enable_thinking" in self._source:
            next_step = (
                f'let the record have "chat_template_kwargs": {{"enable_thinking": {has_thought}}}, or '
                f"{_MARK_IT}"
            )
        else:
            next_step = _MARK_IT
        return BadDataError(
            f"the chat template asks for answer {sum(answers)} of a conversation with {asked[:40]!r}, and "
            f"writes {written[:40]!r} in its place once the answer is there, so what is learned would not be "
            "what is asked for",
            next_step=next_step,
        )

    def _continued(self, earlier: Written, text: str) -> list[Span] | None:
        """What is learned of an earlier text where another goes on from it; None where it does not.

        Some templates write the end of a text behind the last turn, whoever has it: Phi's do.
        """
        before, spans = earlier
        if text.startswith(before):
            return spans
        open_end = before.removesuffix(self._names["eos_token"] or "")
        if open_end == before or not text.startswith(open_end):
            return None
        return [*spans[:-1], (spans[-1][0], len(open_end))]

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


def _thought_of(message: dict[str, Any]) -> str:
    """What an answer says that it thought, by a key or within <think>; empty where it does not."""
    thought, content = message.get("reasoning_content"), message.get("content")
    if not isinstance(thought, str) and isinstance(content, str) and "</think>" in content:
        thought = content.split("</think>")[0].rpartition("<think>")[2]
    return thought.strip() if isinstance(thought, str) else ""


def _num_common(one: str, other: str) -> int:
    """How many letters two texts begin with alike."""
    if other.startswith(one):
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _unasked() -> BadDataError:
    return BadDataError(
        "a conversation begins with an answer, and the chat template asks for one after a user only",
        next_step="leave that answer out, or write 'train': false into it: it is read then, and not learned",
    )


def _check_thought(answer: dict[str, Any], written: str) -> None:
    """Raises BadDataError for a template that leaves out what was thought before a learned answer."""
    thought = _thought_of(answer)
    if thought not in written:
        raise BadDataError(
            f"the chat template does not write what was thought before an answer: {thought[:40]!r}",
            next_step="take a template that does, as chat_template.jinja in the tokenizer's folder (the "
            "package trl has some, trl/chat_templates/*_training.jinja), or leave it out of the messages",
        )


_MARK_IT = (
    "put a template that marks answers with {% generation %} in the place of chat_template.jinja, such as "
    "trl/chat_templates/*_training.jinja of the package trl, or write the conversations as text yourself, as "
    "{'text': …}"
)


def _without_marks(marked: str, document: Document) -> Written:
    """The text, and what lay between marks. Raises BadDataError where marks are not one for each answer.

    That is asked only where some answers are not learned.
    """
    if any(mark in document.text.decode() for mark in (BEGIN_MARK, END_MARK)):
        raise BadDataError(
            "a conversation has U+FDD0 or U+FDD1 in it, which are no characters",
            next_step="remove them: Unicode keeps them from being exchanged",
        )
    spans: list[Span] = []
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
