"""A person sees what was prepared: documents as text, and what of them is learned."""

import json
from pathlib import Path

import numpy as np
import pytest

from node.island.data.manifest import read_manifest
from node.island.data.showing import TokenFolder, lengths_in_words
from protocol.errors import ExitCode
from protocol.terminal import cli, console
from tests.unit.tokens_scene import END, prepared, write_jsonl, write_tokenizer


def opened(folder: Path) -> TokenFolder:
    return TokenFolder(folder, read_manifest(folder))


def write_conversations(path: Path, num: int) -> None:
    turns = [
        ("user", "where to?"),
        ("assistant", "word1x2 🙂"),
        ("user", "and?"),
        ("assistant", "x"),
    ]
    records = (
        {"messages": [{"role": role, "content": f"{i} {said}"} for role, said in turns]}
        for i in range(num)
    )
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_texts_are_shown_as_they_were_given_by_bytes_and_by_a_tokenizer(tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 30)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    for end, options in (("␀", {}), (END, {"tokenizer": tokenizer})):
        out = tmp_path / end
        prepared(tmp_path / "a.jsonl", out=out, **options)
        shown = opened(out)
        found = [
            shown.document(split, number)
            for split in ("training", "held_out")
            for number in range(len(shown.lengths(split)))
        ]
        assert sorted(each.stretches[0].text for each in found) == sorted(
            text + end for text in texts
        )
        assert all(len(each.stretches) == 1 and each.stretches[0].is_learned for each in found)


@pytest.mark.parametrize("row", [None, 129])
def test_of_a_conversation_the_answers_are_told_apart(row: int | None, tmp_path: Path) -> None:
    write_conversations(tmp_path / "a.jsonl", 20)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", is_chat=True)
    prepared(tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=tokenizer, row=row)
    shown = opened(tmp_path / "out")
    lengths = shown.lengths("training")
    documents = [shown.document("training", number) for number in range(len(lengths))]
    assert [each.num_tokens + each.num_padding for each in documents] == lengths.tolist()
    assert (sum(each.num_padding for each in documents) > 0) == (row is not None)
    for document in documents:
        learned = [each.text for each in document.stretches if each.is_learned]
        number = learned[0].partition(" ")[0]
        assert learned == [f"{number} word1x2 🙂<|im_end|>\n", f"{number} x<|im_end|>\n"]
        assert document.stretches[0].text == (
            f"<|im_start|>user\n{number} where to?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert document.num_learned == sum(
            each.num_tokens for each in document.stretches if each.is_learned
        )


def test_tokens_without_a_tokenizer_are_shown_as_numbers(tmp_path: Path) -> None:
    np.arange(2000, dtype="<u2").tofile(tmp_path / "a.bin")
    arguments = ["data", "prepare", str(tmp_path / "a.bin"), "--token-bytes", "2"]
    arguments += ["--vocab-size", "2000", "--out", str(tmp_path / "out")]
    assert console.run(cli.root, arguments) == 0
    shown = opened(tmp_path / "out").document("held_out", 0)
    assert shown.stretches[0].text.split() == [str(token) for token in range(1980, 2000)]


def test_lengths_are_told_by_which_a_context_is_chosen() -> None:
    assert lengths_in_words(np.arange(1, 1001)) == (
        "half have up to 501 tokens, 99 in 100 up to 991, and the longest 1,000"
    )


def test_the_command_shows_some_documents_or_those_that_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_conversations(tmp_path / "a.jsonl", 20)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", is_chat=True)
    prepared(tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=tokenizer)

    def shown(*options: str) -> str:
        assert console.run(cli.root, ["data", "show", str(tmp_path / "out"), *options]) == 0
        return capsys.readouterr().out

    some = shown()
    assert some.startswith("1") and "documents to train on: half have up to" in some
    assert some.count(", in 00000.tokens: ") == 3
    assert "\n     read | <|im_start|>user\n          | " in some
    assert shown("--held-out").count(" of them learned\n") >= 1
    one = shown("--document", "2")
    assert one.count(", in 00000.tokens: ") == 1 and "\ndocument 2, in 00000.tokens: " in one
    assert "\n  learned | " in one


def test_a_long_text_is_cut_unless_it_is_asked_for_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "a.jsonl", 10, count=400)
    prepared(tmp_path / "a.jsonl", out=tmp_path / "out")
    arguments = ["data", "show", str(tmp_path / "out"), "--document", "0"]
    assert console.run(cli.root, arguments) == 0
    assert capsys.readouterr().out.rstrip().endswith("…")
    assert console.run(cli.root, [*arguments, "--whole"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("x399␀")


def test_a_document_that_is_not_there_is_refused_with_the_numbers_that_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "a.jsonl", 10)
    made = prepared(tmp_path / "a.jsonl", out=tmp_path / "out")
    arguments = ["data", "show", str(tmp_path / "out"), "--document", "10"]
    assert console.run(cli.root, arguments) == ExitCode.USAGE
    last = sum(shard.num_documents for shard in made.manifest.training) - 1
    assert f"no document 10: they are numbered from 0 to {last}" in capsys.readouterr().err
