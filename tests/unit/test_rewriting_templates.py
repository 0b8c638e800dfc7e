"""Where a template writes earlier answers otherwise, each is learned as the model is asked for it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from node.island.data.manifest import read_manifest
from node.island.data.records import document_of
from node.island.data.tokenizing import Encoded, FileTokenizer
from protocol.errors import BadDataError, ExitCode
from protocol.terminal import cli, console
from tests.unit.tokens_scene import CHAT_TEMPLATE, prepared, tokens_of, write_tokenizer

FORGETTING = (
    # What was thought stays behind the last question only, as in Qwen 3's; so does the place for it.
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<told>' + m.content + '</told>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{# tools: {{ tools }} #}"
)
ALWAYS_THINKING = (
    # The prompt begins the thought, as in Qwen 3.5's and QwQ's.
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
LOSING_ALL = (
    # As DeepSeek R1's: what was thought is never written, and yet the prompt begins it.
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
ENDING = CHAT_TEMPLATE.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
"""As Phi 3's: the end of a text behind the last turn."""


def asks(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, thought: str | None = None, **others: Any) -> dict[str, Any]:
    thoughts = {} if thought is None else {"reasoning_content": thought}
    return {"role": "assistant", "content": text, **thoughts, **others}


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Oslo"}}}
TOLD = {"role": "tool", "content": "-3"}
PLAIN = [asks("what?"), says("it"), asks("and?"), says("likewise"), asks("so?"), says("no")]
THOUGHT = [asks("what?"), says("it", "let me see"), asks("and?"), says("likewise", "hm")]
CALLING = [
    *(asks("cold?"), says("", "I look", tool_calls=[CALL]), TOLD, TOLD, says("yes", "it is")),
    *(asks("thanks"), says("welcome", "polite")),
]


def chat_folder(place: Path, template: str, *, end: str = "<|im_end|>") -> Path:
    folder = write_tokenizer(place / "chat", is_chat=True)
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return folder


def as_transformers_has_them(
    folder: Path, record: dict[str, Any], learned: list[bool]
) -> list[tuple[list[int], int]]:
    """Each learned answer with the conversation up to it, and how much of that asks for it."""
    from transformers import PreTrainedTokenizerFast

    theirs: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    given = record.get("chat_template_kwargs", {})
    turns = record["messages"]

    def ids(count: int, *, asked: bool) -> list[int]:
        found: list[int] = theirs.apply_chat_template(
            turns[:count], add_generation_prompt=asked, return_dict=True, **given
        )["input_ids"]
        return found

    return [
        (ids(i + 1, asked=False), len(ids(i, asked=True))) for i, own in enumerate(learned) if own
    ]


def check_as_asked(documents: list[Encoded], answers: list[tuple[list[int], int]]) -> None:
    """Each answer is learned in one document, behind what it is asked with; nothing else is learned."""
    left = list(answers)
    for each in documents:
        expected = np.zeros(len(each.tokens), bool)
        own = [(ids, at) for ids, at in left if each.tokens[: len(ids)].tolist() == ids]
        assert own
        for ids, at in own:
            expected[at : len(ids)] = True
            left.remove((ids, at))
        assert each.counted is not None and np.array_equal(each.counted, expected)
    assert not left


@pytest.mark.parametrize(
    ("template", "record", "num_documents"),
    [
        (CHAT_TEMPLATE, {"messages": PLAIN}, 1),
        (FORGETTING, {"messages": PLAIN}, 3),
        (FORGETTING, {"messages": PLAIN, "chat_template_kwargs": {"enable_thinking": False}}, 3),
        (FORGETTING, {"messages": THOUGHT}, 2),
        (FORGETTING, {"messages": [*THOUGHT, asks("bye")]}, 2),
        (FORGETTING, {"messages": [says("hello", train=False), *THOUGHT]}, 2),
        (FORGETTING, {"messages": CALLING}, 2),  # what was thought stays while tools answer
        (ALWAYS_THINKING, {"messages": PLAIN}, 3),
        (ALWAYS_THINKING, {"messages": THOUGHT}, 2),
        (CHAT_TEMPLATE, {"messages": [asks("x"), says("<think>\nhm\n</think>\n\ny")]}, 1),
    ],
)
def test_each_answer_is_learned_as_transformers_writes_it_for_who_asks(
    template: str, record: dict[str, Any], num_documents: int, tmp_path: Path
) -> None:
    folder = chat_folder(tmp_path, template)
    document = document_of(record, "text", "a record")
    [encoded] = FileTokenizer(folder).encode([document])
    assert len(encoded) == num_documents
    check_as_asked(encoded, as_transformers_has_them(folder, record, list(document.learned)))


@pytest.mark.parametrize("key", ["weight", "train"])
def test_answers_that_are_not_learned_make_no_document(key: str, tmp_path: Path) -> None:
    folder = chat_folder(tmp_path, FORGETTING)
    turns = [*PLAIN[:3], PLAIN[3] | {key: 0}, *PLAIN[4:]]
    [encoded] = FileTokenizer(folder).encode([document_of({"messages": turns}, "text", "")])
    record = {"messages": turns}
    learned = [False, True, False, False, False, True]
    check_as_asked(encoded, as_transformers_has_them(folder, record, learned))
    assert len(encoded) == 2
    answer = {"prompt": PLAIN[:3], "completion": PLAIN[3:]}
    [encoded] = FileTokenizer(folder).encode([document_of(answer, "text", "")])
    learned = [False, False, False, True, False, True]
    check_as_asked(encoded, as_transformers_has_them(folder, {"messages": PLAIN}, learned))


def test_an_end_of_the_text_behind_the_last_turn_keeps_a_conversation_in_one_document(
    tmp_path: Path,
) -> None:
    folder = chat_folder(tmp_path, ENDING, end="<|endoftext|>")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    [[encoded]] = FileTokenizer(folder).encode([document_of({"messages": PLAIN}, "text", "")])
    [(whole, _)] = as_transformers_has_them(folder, {"messages": PLAIN}, [False] * 5 + [True])
    assert encoded.tokens.tolist() == whole
    learned = tokenizer.decode(encoded.tokens[encoded.counted].tolist(), skip_special_tokens=False)
    assert learned == "it<|im_end|>\nlikewise<|im_end|>\nno<|im_end|>\n<|endoftext|>"
    assert encoded.text_bytes == len(learned.encode())


@pytest.mark.parametrize(
    ("template", "record", "words", "next_step"),
    [
        (LOSING_ALL, {"messages": PLAIN}, "asks for answer 1 .* with '<think>', and writes 'it<", "trl"),
        (
            LOSING_ALL,
            {"messages": [asks("x"), says("<think>a b</think>y")]},
            "does not write what was thought before an answer: 'a b'",
            "leave it out of the messages",
        ),
        (CHAT_TEMPLATE, {"messages": THOUGHT}, "what was thought before an answer: 'let me see'", "trl"),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
            {"messages": THOUGHT},
            "what was thought before an answer: 'hm'",
            "trl",
        ),
        (
            FORGETTING,
            {"messages": THOUGHT, "chat_template_kwargs": {"enable_thinking": False}},
            r"asks for answer 1 of a conversation with '\\n</think>.*, and writes 'let me see",
            '{"enable_thinking": true}, or put a template',
        ),
        (
            FORGETTING,
            {"messages": [asks("x"), says("one"), says("two")]},
            "asks for answer 2 of a conversation with '<think>.*, and writes 'one",
            "join answers that follow one another",
        ),
        (
            "{% if messages[0].role == 'system' %}{% endif %}" + CHAT_TEMPLATE,
            {"messages": [says("hello"), *PLAIN]},
            "a conversation begins with an answer",
            "'train': false",
        ),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_written_as_it_is_asked_for_is_refused(
    template: str, record: dict[str, Any], words: str, next_step: str, tmp_path: Path
) -> None:
    folder = chat_folder(tmp_path, template)
    with pytest.raises(BadDataError, match=f"a record: .*{words}") as refused:
        FileTokenizer(folder).encode([document_of(record, "text", "a record")])
    assert next_step in refused.value.next_step


def write_talks(path: Path) -> None:
    """Forty conversations of three answers and ten of one; each question names its conversation."""
    talks = [
        [turn | {"content": f"{turn['content']} word{i}x1"} for turn in PLAIN] for i in range(40)
    ]
    talks += [[asks(f"once {i}"), says(f"word{i}x2")] for i in range(10)]
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in talks))


def test_documents_of_a_conversation_stay_in_its_split_and_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = chat_folder(tmp_path, FORGETTING)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    write_talks(tmp_path / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    command = ["data", "prepare", "a.jsonl", "--tokenizer", "chat", "--held-out", "0.2"]
    command += ["--jobs", "1", "--repeat", "a.jsonl=2"]
    assert console.run(cli.root, [*command, "--out", "out"]) == ExitCode.OK
    said = capsys.readouterr().out
    manifest = read_manifest(Path("out"))
    numbers: dict[str, set[int]] = {}
    for split in ("training", "held_out"):
        [shard] = getattr(manifest, split)
        text = tokenizer.decode(tokens_of(Path("out"), manifest, shard).tolist())
        numbers[split] = {i for i in range(40) if f"what? word{i}x1\n" in text + "\n"}
        each = 3 * len(numbers[split]) + sum(f"once {i}\n" in text for i in range(10))
        assert shard.num_documents == each * (2 if split == "training" else 1)
    assert numbers["training"] | numbers["held_out"] == set(range(40))
    assert not numbers["training"] & numbers["held_out"]
    assert "40 conversations became 120 documents with 2.2 times their tokens: their chat" in said


def test_what_becomes_of_conversations_depends_on_no_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.island.data.shard_plan.LEAST_SHARD_BYTES", 4096)
    monkeypatch.setattr("node.island.data.shard_plan.SHARDS_AIMED_AT", 1 << 30)
    folder = chat_folder(tmp_path, FORGETTING)
    write_talks(tmp_path / "a.jsonl")
    one, two = (
        prepared(tmp_path / "a.jsonl", out=tmp_path / f"out{jobs}", tokenizer=folder, jobs=jobs)
        for jobs in (1, 2)
    )
    assert one == two and len(one.manifest.training) > 1
    assert one.in_several.num_documents == 120


def test_of_a_single_conversation_the_end_of_its_last_document_is_held_out(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path, FORGETTING)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": PLAIN}) + "\n")
    made = prepared(tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=folder, held_out=0.3)
    [trained], [kept_back] = made.manifest.training, made.manifest.held_out
    assert (trained.num_documents, kept_back.num_documents) == (3, 1)
    [encoded] = FileTokenizer(folder).encode([document_of({"messages": PLAIN}, "text", "")])
    tokens = np.concatenate([each.tokens for each in encoded])
    found = [tokens_of(tmp_path / "out", made.manifest, each) for each in (trained, kept_back)]
    assert np.array_equal(np.concatenate(found), tokens)
    assert len(found[1]) == round(0.3 * len(encoded[-1].tokens))


@pytest.mark.parametrize(
    ("record", "pack", "warning"),
    [
        ({"messages": PLAIN}, [], "samples cut through conversations"),
        ({"prompt": "what? ", "completion": "it"}, [], "samples cut through conversations"),
        ({"messages": PLAIN}, ["--pack", "16"], "pieces begin within a document that is longer than 16"),
        ({"messages": PLAIN}, ["--pack", "512"], ""),
        ({"text": "plain " * 9}, [], ""),
        ({"text": "plain " * 99}, ["--pack", "16"], ""),
    ],
)  # fmt: skip
def test_answers_that_are_cut_from_what_asks_for_them_are_told(
    record: dict[str, Any],
    pack: list[str],
    warning: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat_folder(tmp_path, FORGETTING)
    key = next(iter(record))
    some = [{**record, key: [asks(f"x{i}"), *PLAIN]} for i in range(9)]
    if isinstance(record[key], str):
        some = [{**record, key: f"{i} {record[key]}"} for i in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in some))
    monkeypatch.chdir(tmp_path)
    command = ["data", "prepare", "a.jsonl", "--tokenizer", "chat", "--held-out", "0.3", *pack]
    assert console.run(cli.root, [*command, "--jobs", "1", "--out", "out"]) == ExitCode.OK
    said = capsys.readouterr()
    assert warning in said.err and said.err.count("warning: ") <= bool(warning)
    is_apart = "across_documents = false" in said.out.split("[data]")[1]
    assert is_apart == ("text" not in record)
