"""Of a conversation only what the assistant says is learned, as its chat template writes it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from node.island.data.documents import documents_of, parts_of
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.data.records import Document, document_of
from node.island.data.tokenizing import FileTokenizer
from protocol.errors import BadDataError, ConfigError
from tests.unit.tokens_scene import prepared, spec_of, write_tokenizer

TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "what is word1x1?"},
    {"role": "assistant", "content": "it is a wörd"},
    {"role": "user", "content": "and word2x2?"},
    {"role": "assistant", "content": "likewise"},
]


def conversation(turns: list[dict[str, Any]]) -> Document:
    return document_of({"messages": turns}, "text", "a record")


def test_only_the_assistants_turns_with_their_ends_are_learned(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    [[encoded]] = FileTokenizer(folder).encode([conversation(TURNS)])
    assert encoded.counted is not None
    learned = tokenizer.decode(encoded.tokens[encoded.counted].tolist(), skip_special_tokens=False)
    rest = tokenizer.decode(encoded.tokens[~encoded.counted].tolist(), skip_special_tokens=False)
    assert learned == "it is a wörd<|im_end|>\nlikewise<|im_end|>\n"
    assert rest == (
        "<|im_start|>user\nwhat is word1x1?<|im_end|>\n<|im_start|>assistant\n"
        "<|im_start|>user\nand word2x2?<|im_end|>\n<|im_start|>assistant\n<|im_end|>"
    )
    assert encoded.text_bytes == len(learned.encode())


def test_an_answer_of_weight_0_is_read_and_not_learned(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first, told, second, last = TURNS
    turns = [first, told | {"weight": 0}, second, last | {"weight": 1}]
    [plain], [weighed] = FileTokenizer(folder).encode([conversation(TURNS), conversation(turns)])
    assert weighed.counted is not None and np.array_equal(plain.tokens, weighed.tokens)
    learned = tokenizer.decode(weighed.tokens[weighed.counted].tolist(), skip_special_tokens=False)
    assert learned == "likewise<|im_end|>\n"


def test_a_weight_between_is_refused(tmp_path: Path) -> None:
    turns = [TURNS[0], TURNS[1] | {"weight": 0.5}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    [part] = parts_of(tmp_path / "a.jsonl", 1 << 20)
    with pytest.raises(
        BadDataError, match=r"a\.jsonl, byte 0: a message has 'weight' 0\.5"
    ) as refused:
        list(documents_of(part, field="text"))
    assert "write 0" in refused.value.next_step


def test_texts_and_conversations_come_back_in_their_order(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    plain = Document(text=b"word1x1 word1x2")
    found = [e for [e] in FileTokenizer(folder).encode([plain, conversation(TURNS), plain])]
    assert [each.counted is None for each in found] == [True, False, True]
    assert np.array_equal(found[0].tokens, found[2].tokens)


def test_a_conversation_is_prepared_and_read_with_its_mask(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    lines = [{"text": f"plain text {i} " * 9} for i in range(10)]
    talks = [{"messages": [*TURNS, {"role": "user", "content": f"bye {i}"}]} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines + talks))
    made = prepared(tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=folder)
    dataset = open_dataset(spec_of(tmp_path / "out"), DataPlaces(folder=Path("/")))
    batch = dataset.batch("training", np.arange(dataset.num_samples))
    assert batch.counted is not None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    counted = np.concatenate(([True], batch.counted.flatten()))  # targets follow one another
    tokens = np.concatenate((batch.tokens[0, :1], batch.tokens[:, 1:].flatten()))
    learned = tokenizer.decode(tokens[counted].tolist(), skip_special_tokens=False)
    assert learned.count("it is a wörd") == learned.count("likewise") > 20
    assert "and word2x2" not in learned and "bye" not in learned
    assert learned.count("plain text") > 50
    shard = made.manifest.training[0]
    assert shard.mask is not None
    assert dataset.num_counted("training", np.arange(dataset.num_samples)) == batch.counted.sum()
    assert 0.2 < batch.counted.mean() < 0.7


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"of": "a tówn"}}}]
WITH_TOOLS = (
    "{% if tools is not none %}<tools>{{ tools | tojson(indent=1) }}</tools>{% endif %}"
    "{% if documents is not none %}{{ raise_exception('there are none') }}{% endif %}"
    "{% if terse %}be terse{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% if 'tool_calls' in m %}{% for call in m.tool_calls %}<call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def calling(content: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"function": {"name": "weather", "arguments": {"town": "Oslo"}}}
    return [
        {"role": "user", "content": "is it cold in Oslo?"},
        {"role": "assistant", "tool_calls": [call], **content},
        {"role": "tool", "content": "-3"},
        {"role": "assistant", "content": "yes"},
    ]


@pytest.mark.parametrize("content", [{"content": ""}, {"content": None}, {}], ids=str)
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), None], ids=["list", "text", "none"])
def test_a_conversation_has_its_tools_and_what_else_its_template_takes(
    tools: object, content: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    (folder / "chat_template.jinja").write_text(WITH_TOOLS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    record = {
        "messages": calling(content),
        "tools": tools,
        "chat_template_kwargs": {"terse": True},
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    [part] = parts_of(tmp_path / "a.jsonl", 1 << 20)
    [[encoded]] = FileTokenizer(folder).encode(list(documents_of(part, field="text")))
    assert encoded.counted is not None
    learned = tokenizer.decode(encoded.tokens[encoded.counted].tolist(), skip_special_tokens=False)
    whole = tokenizer.decode(encoded.tokens.tolist(), skip_special_tokens=False)
    assert learned == '<call>weather {"town": "Oslo"}</call><|im_end|>\nyes<|im_end|>\n'
    told = f"<tools>{json.dumps(TOOLS, ensure_ascii=False, indent=1)}</tools>" if tools else ""
    assert whole.startswith(f"{told}be terse<|im_start|>user\nis it cold")


@pytest.mark.parametrize("in_files", [False, True], ids=["in a list", "in files"])
def test_of_several_templates_the_one_for_tools_writes_conversations_that_have_some(
    in_files: bool, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    usual = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"default": usual, "tool_use": WITH_TOOLS, "rag": "{{ documents }}"}
    settings["chat_template"] = [{"name": key, "template": text} for key, text in named.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    if in_files:
        folder = tmp_path / "saved"
        theirs.save_pretrained(folder)
        assert (folder / "additional_chat_templates" / "tool_use.jinja").is_file()
        (folder / "additional_chat_templates" / "not-one.txt").write_text("x")
    assert theirs.chat_template == named
    records = [{"messages": TURNS}, {"messages": calling({"content": ""}), "tools": TOOLS}]
    for record in records:
        [[encoded]] = FileTokenizer(folder).encode([document_of(record, "text", "")])
        expected = theirs.apply_chat_template(
            record["messages"], tools=record.get("tools"), return_dict=True
        )["input_ids"]
        assert encoded.tokens[:-1].tolist() == expected
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records * 9))
    prepared(tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=folder)
    kept: Any = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    assert kept.chat_template == named and kept.eos_token == theirs.eos_token
    [again] = FileTokenizer(tmp_path / "out").encode([document_of(records[1], "text", "")])
    assert np.array_equal(again[0].tokens, encoded.tokens)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tools", "[", "'tools' is no JSON"),
        ("tools", {"name": "weather"}, "'tools' is an object, and not a list"),
        ("chat_template_kwargs", [1], "'chat_template_kwargs' is a list, and not an object"),
    ],
)
def test_what_is_no_list_of_tools_is_refused(
    key: str, value: object, words: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TURNS, key: value}) + "\n")
    [part] = parts_of(tmp_path / "a.jsonl", 1 << 20)
    with pytest.raises(BadDataError, match=rf"a\.jsonl, byte 0: {words}"):
        list(documents_of(part, field="text"))


def test_a_tables_conversations_are_those_of_json_lines(tmp_path: Path) -> None:
    records = [
        {"text": None, "messages": calling({"content": None}), "tools": json.dumps(TOOLS)},
        {"text": None, "messages": TURNS, "tools": None},
        {"text": "none of these", "messages": None, "tools": None},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    tables, lines = (
        [
            document
            for part in parts_of(tmp_path / name, 1 << 20)
            for document in documents_of(part, field="text")
        ]
        for name in ("a.parquet", "a.jsonl")
    )
    assert tables == lines
    assert [bool(each.messages) for each in lines] == [True, True, False]


def test_a_token_that_the_assistant_shares_with_its_prompt_is_learned(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "word1x1 word1x2"}]
    [[encoded]] = FileTokenizer(folder).encode([conversation(turns)])
    assert encoded.counted is not None
    learned = tokenizer.decode(encoded.tokens[encoded.counted].tolist())
    assert learned == " word1x1 word1x2\n"


def test_a_template_that_changes_what_it_wrote_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    (folder / "chat_template.jinja").write_text(
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(
        BadDataError, match="asks for answer 1 of a conversation with '1what is word1x1"
    ):
        FileTokenizer(folder).encode([conversation(TURNS)])


def test_a_template_that_refuses_says_why(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system, please') }}")
    with pytest.raises(BadDataError, match="refuses a conversation: no system, please"):
        FileTokenizer(folder).encode([conversation(TURNS)])


def test_conversations_without_a_template_are_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "plain")
    with pytest.raises(ConfigError, match="without a chat template"):
        FileTokenizer(folder).encode([conversation(TURNS)])


MARKED = {
    "answers alone": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>"
    "{% endif %}\n{% endfor %}",
    "with lines trimmed": "{%- for m in messages %}\n    {{- m.role + ': ' }}"
    "\n    {%- if m.role == 'assistant' %}"
    "\n        {%- generation -%}\n        {{- m.content + '<|im_end|>' -}}\n        {%- endgeneration -%}"
    "\n    {%- else %}\n        {{- m.content }}\n    {%- endif %}\n{% endfor %}",
    "the last answer, though earlier ones are written otherwise": "{{ messages | length }}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {% if loop.last %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "nothing": "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if false %}{% generation %}{% endgeneration %}{% endif %}",
}


@pytest.mark.parametrize("template", MARKED.values(), ids=MARKED.keys())
def test_what_a_template_marks_is_learned_as_transformers_masks_it(
    template: str, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    (folder / "chat_template.jinja").write_text(template)
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        TURNS, return_assistant_tokens_mask=True, return_dict=True
    )
    [[encoded]] = FileTokenizer(folder).encode([conversation(TURNS)])
    assert encoded.counted is not None
    num = len(theirs["input_ids"])
    assert encoded.tokens[:num].tolist() == theirs["input_ids"]
    assert encoded.counted[:num].tolist() == [bool(each) for each in theirs["assistant_masks"]]
    assert len(encoded.tokens) <= num + 1 and not encoded.counted[num:].any()


def test_of_marked_answers_those_of_weight_0_are_not_learned(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    turns = [TURNS[0], TURNS[1] | {"weight": 0}, *TURNS[2:]]
    (folder / "chat_template.jinja").write_text(MARKED["answers alone"])
    [[encoded]] = FileTokenizer(folder).encode([conversation(turns)])
    learned = tokenizer.decode(encoded.tokens[encoded.counted].tolist(), skip_special_tokens=False)
    assert learned == "likewise<|im_end|>"
    (folder / "chat_template.jinja").write_text(MARKED["nothing"])
    with pytest.raises(BadDataError, match="marks 0 parts of a conversation with 2 answers"):
        FileTokenizer(folder).encode([conversation(turns)])


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": calling({})}, "does not write the call of 'weather'"),
        ({"messages": TURNS, "tools": TOOLS}, "does not write the tool 'weather'"),
        (
            {"messages": [{"role": "system", "content": " be terse\n"}, *TURNS]},
            "does not write what the system says: 'be terse'",
        ),
    ],
)
def test_a_template_that_passes_over_what_a_conversation_has_is_refused(
    record: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(BadDataError, match=f"a record: the chat template {words}"):
        FileTokenizer(folder).encode([document_of(record, "text", "a record")])


@pytest.mark.parametrize(
    ("written", "learned"),
    [
        ("{{ c.function.arguments | tojson }}", '{"town": "Oslo"}'),
        (
            "{{ c.function.arguments if c.function.arguments is string else "
            "c.function.arguments | tojson }}",
            '{"town": "Oslo"}',
        ),
        ("{{ '```' + c.function.arguments + '```' }}", '```{"town":"Oslo"}```'),
    ],
    ids=["as JSON", "either", "as text"],
)
def test_arguments_of_calls_that_are_json_within_a_string_are_written_once(
    written: str, learned: str, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}"
        + written
        + "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"town":"Oslo"}'}}
    turns = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    [[encoded]] = FileTokenizer(folder).encode([conversation(turns)])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = tokenizer.decode(encoded.tokens[encoded.counted].tolist(), skip_special_tokens=False)
    assert found == f"f{learned}<|im_end|>\n"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {% for p in m.content %}{{ p.text }}{% endfor %}{{ '\n' }}"
        "{% endfor %}",
    ],
    ids=["shows a list", "fails", "takes both", "takes parts alone"],
)
def test_content_in_parts_is_the_text_that_they_have(template: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    (folder / "chat_template.jinja").write_text(
        template + "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    turns = [
        {
            "role": role,
            "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}],
        }
        for role in ("user", "assistant")
    ]
    [[encoded]] = FileTokenizer(folder).encode([conversation(turns)])
    written = tokenizer.decode(encoded.tokens.tolist())
    assert written.startswith("user: one two\nassistant: one two\n")


@pytest.mark.parametrize("own", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("templates", ["reasoning_content", "thinking"])
def test_what_a_model_thought_is_learned_by_whatever_name_it_has(
    own: str, templates: str, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m."
        + templates
        + " %}<think>{{ m."
        + templates
        + " }}</think>{% endif %}{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    turns = [TURNS[0], TURNS[1] | {own: "let me see"}]
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        turns, return_dict=True
    )
    [[encoded]] = FileTokenizer(folder).encode([conversation(turns)])
    assert encoded.tokens[:-1].tolist() == theirs["input_ids"]
    assert "let me see" in Tokenizer.from_file(str(folder / "tokenizer.json")).decode(
        encoded.tokens[encoded.counted].tolist()
    )


def test_a_template_may_leave_a_loop_as_those_of_transformers_may(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    path = folder / "chat_template.jinja"
    plain = FileTokenizer(folder).encode([conversation(TURNS)])[0][0].tokens
    text = path.read_text()
    path.write_text("{% for m in messages %}{% break %}{% endfor %}" + text)
    again = FileTokenizer(folder).encode([conversation(TURNS)])[0][0].tokens
    assert np.array_equal(plain, again)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", r"chat template cannot be read: line 1: Expected an expression"),
        (
            "{{ strftime_now('%Y') }}",
            r"talk\.jsonl, byte 0: the chat template asks for something that is not given here: "
            "'strftime_now' is undefined",
        ),
    ],
)
def test_a_template_that_cannot_be_followed_is_told_with_its_reason(
    template: str, words: str, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    (folder / "chat_template.jinja").write_text(template)
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": TURNS}) + "\n")
    with pytest.raises(BadDataError, match=words) as refused:
        prepared(tmp_path / "talk.jsonl", out=tmp_path / "out", tokenizer=folder)
    assert "chat_template.jinja" in refused.value.next_step
