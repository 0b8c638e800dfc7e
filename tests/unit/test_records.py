"""Records are learned as those who wrote them mean it, or refused by the key that says otherwise."""

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from node.island.data import documents as reading
from node.island.data.documents import documents_of, parts_of
from node.island.data.inputs import input_files, passed_over
from node.island.data.records import Document, document_of
from node.island.data.tokenizing import ByteTokenizer, FileTokenizer
from protocol.errors import BadDataError
from tests.unit.tokens_scene import END, prepared, write_tokenizer

MESSAGES = [
    {"role": "system", "content": "be terse"},
    {"role": "user", "content": "what is word1x1?"},
    {"role": "assistant", "content": "it is a word"},
]


def read(path: Path, field: str = "text") -> list[Document]:
    return [each for part in parts_of(path, 64) for each in documents_of(part, field=field)]


def meant(record: dict[str, Any]) -> tuple[tuple[dict[str, Any], ...], tuple[bool, ...]]:
    document = document_of(record, "text", "a record")
    return document.messages, document.learned


@pytest.mark.parametrize("system", [True, False], ids=["system within", "system beside"])
def test_a_conversation_of_sharegpt_is_the_messages_that_it_has(system: bool) -> None:
    turns = [
        {"from": "system", "value": "be terse"},
        {"from": "human", "value": "what is word1x1?"},
        {"from": "gpt", "value": "it is a word"},
    ]
    record = (
        {"conversations": turns} if system else {"conversations": turns[1:], "system": "be terse"}
    )
    assert meant(record) == meant({"messages": MESSAGES}) == (tuple(MESSAGES), (False, False, True))
    assert document_of(record, "text", "") == document_of({"messages": MESSAGES}, "text", "")


def test_calls_of_sharegpt_are_those_that_chat_templates_know() -> None:
    call = {"name": "weather", "arguments": {"town": "Oslo"}}
    record = {
        "conversations": [
            {"from": "human", "value": "is it cold in Oslo?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "-3"},
            {"from": "gpt", "value": "yes"},
        ],
        "tools": json.dumps([{"name": "weather"}]),
    }
    messages, learned = meant(record)
    assert messages[1]["tool_calls"] == [{"type": "function", "function": call}]
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "assistant"]
    assert learned == (False, True, False, True)
    assert document_of(record, "text", "").given == {"tools": [{"name": "weather"}]}


@pytest.mark.parametrize("key", ["weight", "train", "training", "trainable", "loss"])
@pytest.mark.parametrize("no", [0, False])
def test_an_answer_is_not_learned_where_one_of_the_usual_keys_says_so(key: str, no: object) -> None:
    question, answer = MESSAGES[1:]
    for messages in (
        [
            question,
            {**answer, key: no},
            question,
            {**answer, key: 1},
            question,
            {**answer, key: None},
        ],
        [
            question,
            {**answer, key: no},
            {**question, key: no},
            answer,
            question,
            {**answer, key: True},
        ],
    ):
        assert meant({"messages": messages})[1] == (False, False, False, True, False, True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mask": 1}, "'mask' is not read"),
        ({"train_detail": [{"begin_offset": 0}]}, "'train_detail' is not read"),
        ({"loss_scale": 0.5}, "'loss_scale' is not read"),
        ({"function_call": {"name": "f"}}, "'function_call' is not read"),
        ({"train": "no"}, "a message has 'train' 'no', and an answer is learned whole"),
        ({"role": "user", "train": True}, "'train' True and the role 'user', and only"),
        ({"role": "gpt"}, "the role 'gpt', and what is learned is the role 'assistant'"),
        ({"role": "Assistant"}, "the role 'Assistant'"),
        ({"content": [{"type": "image_url"}]}, "has a part 'image_url', and only text"),
        ({"role": None}, "a message has the keys 'role', 'content'"),
    ],
)
def test_a_message_that_means_more_than_is_read_is_refused(
    changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadDataError, match=words):
        meant({"messages": [MESSAGES[1], {**MESSAGES[2], **changed}]})


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({"functions": [{"name": "f"}]}, "'functions' is not read"),
        ({"images": ["a.png"]}, "'images' is not read"),
        ({"mask": "User"}, "'mask' is not read"),
        ({"system": "be verbose"}, "'system' says something else than the first message"),
    ],
)
def test_what_stands_beside_messages_and_changes_them_is_refused(
    beside: dict[str, Any], words: str, tmp_path: Path
) -> None:
    record = {"messages": MESSAGES, **beside}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    for name in ("a.parquet", "a.jsonl"):
        with pytest.raises(BadDataError, match=words):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("record", "next_step"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "--function MODULE:NAME"),
        ({"instruction": "a", "input": "", "output": "c"}, "jq -c '{messages: "),
        ({"question": "a", "answer": "b"}, 'content: .question}, {role: "assistant"'),
        ({"title": "a", "answer": "b"}, "--field"),
        ({"prompt": "a", "completion": "b", "label": False}, None),
        ({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}, None),
        ({"conversations": [{"from": "somebody", "value": "x"}]}, None),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, None),
        ({"conversations": ["hello"]}, None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_records_of_another_shape_are_refused_with_what_to_type(
    record: dict[str, Any], next_step: str | None, tmp_path: Path
) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    for name in ("a.parquet", "a.jsonl"):
        with pytest.raises(BadDataError) as refused:
            read(tmp_path / name)
        assert next_step is None or next_step in refused.value.next_step


@pytest.mark.parametrize("key", ["user", "assistant", "system"])
def test_a_message_without_words_is_not_the_word_none(key: str, tmp_path: Path) -> None:
    record = {"messages": [{"role": key, "content": None}, *MESSAGES[1:]]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    folder = write_tokenizer(tmp_path / "tokenizer", is_chat=True)
    tokenizer = FileTokenizer(folder)
    for name in ("a.parquet", "a.jsonl"):
        [document] = read(tmp_path / name)
        [[encoded]] = tokenizer.encode([document])
        text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(
            encoded.tokens.tolist(), skip_special_tokens=False
        )
        assert text.startswith(f"<|im_start|>{key}\n<|im_end|>\n") and "None" not in text


@pytest.mark.parametrize("nothing", ["", None, [], [{"type": "text", "text": ""}]])
def test_an_answer_without_words_is_not_learned(nothing: object) -> None:
    empty = {"role": "assistant", "content": nothing}
    _, learned = meant({"messages": [MESSAGES[1], empty, *MESSAGES[1:]]})
    assert learned == (False, False, False, True)
    assert document_of({"messages": [MESSAGES[1], empty]}, "text", "").text == b""
    assert document_of({"prompt": [MESSAGES[1]], "completion": [empty]}, "text", "").text == b""
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    for beside in ({"tool_calls": [call]}, {"reasoning_content": "hm"}):
        _, learned = meant({"messages": [MESSAGES[1], {**empty, **beside}]})
        assert learned == (False, True)


def test_content_that_is_no_text_is_refused_but_for_what_tools_answer() -> None:
    for content in (5, {"a": 1}, True):
        with pytest.raises(BadDataError, match=r"of the role 'user' has .* as its content"):
            meant({"messages": [{"role": "user", "content": content}]})
        meant({"messages": [{"role": "tool", "content": content}]})


def test_of_a_prompt_and_its_completion_the_completion_is_learned(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    record = {"prompt": "what is wörd1x1? ", "completion": "it is a wörd"}
    document = document_of(record, "text", "")
    plain = document_of({"text": "what is wörd1x1? it is a wörd"}, "text", "")
    [[encoded], [whole]] = FileTokenizer(folder).encode([document, plain])
    assert encoded.counted is not None
    assert encoded.tokens.tolist() == whole.tokens.tolist()
    learned = tokenizer.decode(encoded.tokens[encoded.counted].tolist(), skip_special_tokens=False)
    assert learned == f"it is a wörd{END}"
    assert encoded.text_bytes == len("it is a wörd".encode())
    [[as_bytes]] = ByteTokenizer().encode([document])
    assert as_bytes.counted is not None
    assert bytes(as_bytes.tokens[as_bytes.counted].tolist()).decode() == "it is a wörd\0"


def test_a_long_answer_is_learned_beyond_what_is_encoded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    monkeypatch.setattr("node.island.data.tokenizing.LONGEST_ENCODED", 64)
    monkeypatch.setattr("node.island.data.tokenizing.PIECE_ENCODED", 32)
    prompt, completion = "what is it?\n" * 9, "it is a word\n" * 30
    [[encoded]] = FileTokenizer(folder).encode(
        [document_of({"prompt": prompt, "completion": completion}, "text", "")]
    )
    assert encoded.counted is not None
    learned, rest = (
        tokenizer.decode(encoded.tokens[which].tolist(), skip_special_tokens=False)
        for which in (encoded.counted, ~encoded.counted)
    )
    assert (rest, learned) == (prompt, completion + END)


def test_messages_of_a_prompt_are_not_learned() -> None:
    answer = {"role": "assistant", "content": "yes"}
    record = {"prompt": [MESSAGES[1], MESSAGES[2], MESSAGES[1]], "completion": [answer]}
    assert meant(record)[1] == (False, False, False, True)


def test_prompts_and_completions_are_prepared_with_their_mask(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"ask {i}", "completion": "no"}) + "\n" for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join([*lines, '{"prompt": "x", "completion": ""}\n']))
    made = prepared(tmp_path / "a.jsonl", out=tmp_path / "out")
    assert made.num_empty == 1
    assert made.manifest.num_tokens("training") + made.manifest.num_tokens("held_out") == 40 * 3


def test_data_of_which_nothing_is_learned_are_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chat", is_chat=True)
    lines = [json.dumps({"messages": [{"role": "user", "content": f"x {i}"}]}) for i in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(BadDataError, match="to train on not one token is to be learned"):
        prepared(tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=folder)
    assert not (tmp_path / "out").exists()


def test_a_field_may_lie_within_others(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"id": i, "raw": {"of": {"text": f"text {i}", "n": i}}} for i in range(50)
    ]
    records[7]["raw"]["of"]["text"] = None
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    texts = [b"" if i == 7 else f"text {i}".encode() for i in range(50)]
    for name in ("a.jsonl", "a.parquet"):
        assert [each.text for each in read(tmp_path / name, "raw.of.text")] == texts
    (tmp_path / "b.jsonl").write_text(json.dumps({"raw.text": "as it is", "raw": {"text": "no"}}))
    assert read(tmp_path / "b.jsonl", "raw.text")[0].text == b"as it is"


def write_both(folder: Path, record: dict[str, Any]) -> list[Path]:
    """A record as a line and as a table."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), folder / "a.parquet")
    (folder / "a.jsonl").write_text(json.dumps(record))
    return [folder / "a.parquet", folder / "a.jsonl"]


def test_a_field_that_was_named_is_there_or_refused(tmp_path: Path) -> None:
    others = {"prompt": "a", "completion": "b", "messages": MESSAGES}
    for path in write_both(tmp_path, others):
        for field in ("contnet", "raw.text", "conversations"):
            with pytest.raises(BadDataError, match=f"no (column )?'{field}'; .* '?completion"):
                read(path, field)
        assert read(path, "completion")[0].text == b"b"
        assert read(path)[0].messages == tuple(MESSAGES)
    for path in write_both(tmp_path, {**others, "content": None}):
        assert read(path, "content")[0].messages == tuple(MESSAGES)


@pytest.mark.parametrize("field", ["talk", "raw.talk", "messages", "conversations"])
def test_a_field_may_have_messages(field: str, tmp_path: Path) -> None:
    told = [*MESSAGES, {"role": "user", "content": "told"}]
    first, _, rest = field.partition(".")
    record: dict[str, Any] = {"messages": MESSAGES, "conversations": MESSAGES}
    record |= {"system": "be terse", first: {rest: told} if rest else told}
    for path in write_both(tmp_path, record):
        [document] = read(path, field)
        assert [*document.messages[-len(told) :]] == told
        assert document.messages[0] == {"role": "system", "content": "be terse"}
    texts = {"messages": json.dumps(MESSAGES), "conversations": json.dumps(told)}
    for path in write_both(tmp_path, texts):
        assert read(path, "conversations")[0].messages == tuple(told)


@pytest.mark.parametrize("separator", [",", "\t"])
def test_a_table_in_text_is_read_with_ends_of_lines_in_quotes(
    separator: str, tmp_path: Path
) -> None:
    path = tmp_path / ("a.csv.gz" if separator == "," else "a.tsv")
    rows = [["id", "text"], ["1", '"one\r\n""two"", three"'], ["2", ""], ["3", "größer"]]
    text = "\ufeff" + "".join(separator.join(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if separator == "," else text.encode())
    found = read(path)
    assert [each.text.decode() for each in found] == ['one\r\n"two", three', "", "größer"]
    assert found[0].where == f"{path}, line 2"


@pytest.mark.parametrize(
    "lines",
    [
        "id;text\n1;a, and b\n",
        "text;id\na, and b;1\n",
        '"id"\ttext\n1\ta, and b\n',
        'text\n"a, and b"\n',
    ],
)
def test_a_table_in_text_may_have_semicolons_or_tabs_between_its_fields(
    lines: str, tmp_path: Path
) -> None:
    (tmp_path / "a.CSV").write_text(lines)
    assert [each.text for each in read(tmp_path / "a.CSV")] == [b"a, and b"]


@pytest.mark.parametrize("name", ["a.json", "a.json.GZ"])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_of_records_is_read_a_little_at_a_time(
    indent: int | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "READ_AHEAD", 7)
    texts = [f'"größer" [{i}, {"x" * i}' for i in range(40)]
    for own in (texts, []):
        whole = json.dumps([{"text": each} for each in own], indent=indent, ensure_ascii=False)
        data = f"\ufeff \n{whole}\n".encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("GZ") else data)
        found = read(tmp_path / name)
        assert [each.text.decode() for each in found] == own


@pytest.mark.parametrize(
    "name",
    [*("a.jsonl.zst", "a.jsonl.bz2", "a.jsonl.xz", "a.json.gz", "a.json"), "A.JSONL.GZ"],
)
def test_lines_are_read_however_they_are_compressed_and_called(name: str, tmp_path: Path) -> None:
    def in_frames(data: bytes) -> bytes:
        half = data.index(b"\n", len(data) // 2) - 3
        codec = pyarrow.Codec("zstd")
        return b"".join(codec.compress(each, asbytes=True) for each in (data[:half], data[half:]))

    compress = {".zst": in_frames, ".bz2": bz2.compress, ".xz": lzma.compress, ".gz": gzip.compress}
    texts = [f"text {i}" for i in range(99)]
    lines = "".join(json.dumps({"text": each}) + "\n" for each in texts).encode()
    (tmp_path / name).write_bytes(compress.get(Path(name).suffix.lower(), bytes)(lines))
    assert [each.text.decode() for each in read(tmp_path / name)] == texts


def test_a_file_that_is_damaged_within_is_named(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(999))))
    whole[len(whole) // 2] ^= 0xFF
    (tmp_path / "a.jsonl.gz").write_bytes(whole)
    with pytest.raises(BadDataError, match=r"a\.jsonl\.gz"):
        read(tmp_path / "a.jsonl.gz")


def test_an_arrow_file_is_read_as_a_stream_is(tmp_path: Path) -> None:
    table = pyarrow.table({"text": [f"text {i}" for i in range(40)]})
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=7)
    with pyarrow.ipc.new_stream(tmp_path / "b.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=7)
    found = [[each.text for each in read(tmp_path / name)] for name in ("a.arrow", "b.arrow")]
    assert found[0] == found[1] == [each.encode() for each in table["text"].to_pylist()]


def test_what_datasets_has_made_of_its_own_files_is_not_read_beside_them(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["one"]})
    for name in ("set-train.arrow", "cache-8c1f.arrow"):
        with pyarrow.ipc.new_stream(tmp_path / name, table.schema) as stream:
            stream.write_table(table)
    assert [each.name for each in input_files([str(tmp_path)])] == ["set-train.arrow"]
    [said] = passed_over([str(tmp_path)])
    assert "1 of 2 files are read" in said and "cache-8c1f.arrow" in said


def test_masks_of_answers_are_those_of_bytes_counted_by_hand() -> None:
    records = [{"prompt": "é" * i, "completion": "x" * (i + 1)} for i in range(5)]
    found = ByteTokenizer().encode([document_of(each, "text", "") for each in records])
    for i, [each] in enumerate(found):
        counted = np.ones(len(each.tokens), bool) if each.counted is None else each.counted
        assert counted.sum() == i + 2 and not counted[: 2 * i].any()
