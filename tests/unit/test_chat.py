"""Of a conversation only what the assistant says is learned, as its chat template writes it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from node.island.data.documents import Document
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
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
    return Document(text=json.dumps(turns).encode(), messages=tuple(turns))


def test_only_the_assistants_turns_with_their_ends_are_learned(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    [encoded] = FileTokenizer(folder).encode([conversation(TURNS)])
    assert encoded.counted is not None
    learned = tokenizer.decode(encoded.tokens[encoded.counted].tolist(), skip_special_tokens=False)
    rest = tokenizer.decode(encoded.tokens[~encoded.counted].tolist(), skip_special_tokens=False)
    assert learned == "it is a wörd<|im_end|>\nlikewise<|im_end|>\n"
    assert rest == (
        "<|im_start|>user\nwhat is word1x1?<|im_end|>\n<|im_start|>assistant\n"
        "<|im_start|>user\nand word2x2?<|im_end|>\n<|im_start|>assistant\n<|im_end|>"
    )
    assert encoded.text_bytes == len(learned.encode())


def test_texts_and_conversations_come_back_in_their_order(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    plain = Document(text=b"word1x1 word1x2")
    found = FileTokenizer(folder).encode([plain, conversation(TURNS), plain])
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


def test_a_template_that_changes_what_it_wrote_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    (folder / "chat_template.jinja").write_text(
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(BadDataError, match="otherwise than turn after turn"):
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


def test_the_marks_of_transformers_templates_are_passed_over(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    marked = (
        (folder / "chat_template.jinja")
        .read_text()
        .replace(
            "{{ message.content }}", "{%- generation %}{{ message.content }}{% endgeneration -%}"
        )
    )
    plain = FileTokenizer(folder).encode([conversation(TURNS)])[0].tokens
    (folder / "chat_template.jinja").write_text(marked)
    again = FileTokenizer(folder).encode([conversation(TURNS)])[0]
    assert len(again.tokens) and again.counted is not None
    assert abs(len(again.tokens) - len(plain)) <= len(TURNS)  # trimmed line breaks apart


def test_a_template_may_leave_a_loop_as_those_of_transformers_may(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    path = folder / "chat_template.jinja"
    plain = FileTokenizer(folder).encode([conversation(TURNS)])[0].tokens
    text = path.read_text()
    path.write_text("{% for m in messages %}{% break %}{% endfor %}" + text)
    again = FileTokenizer(folder).encode([conversation(TURNS)])[0].tokens
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
