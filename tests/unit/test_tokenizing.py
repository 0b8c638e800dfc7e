"""A tokenizer.json makes of texts what it makes elsewhere: long ones too, with its special tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from node.island.data import tokenizing
from node.island.data.records import Document
from node.island.data.tokenizing import FileTokenizer
from protocol.errors import BadDataError, ConfigError
from protocol.terminal import cli, console
from tests.unit.tokens_scene import END, prepared, words, write_tokenizer


@pytest.mark.parametrize("template", ["$A", "<bos> $A", "<bos> $A <|endoftext|>"])
def test_a_document_begins_with_what_its_tokenizer_puts_before_a_text(
    template: str, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<bos>"])
    special = [(each, tokenizer.token_to_id(each)) for each in ("<bos>", END)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=special
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    [[encoded]] = FileTokenizer(folder).encode([Document(text=b"word1x1 word1x2")])
    asked = tokenizer.encode("word1x1 word1x2").ids
    assert encoded.tokens.tolist() == asked + [tokenizer.token_to_id(END)] * (
        asked[-1] != tokenizer.token_to_id(END)
    )


@pytest.mark.parametrize("text", [words(3), words(3).replace(" ", "\n"), "x" * 999])
def test_a_long_text_is_encoded_a_piece_at_a_time_and_stays_one_document(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    documents = [Document(text=each.encode()) for each in ("before", text, "behind")]
    whole = [each.tokens.tolist() for [each] in FileTokenizer(folder).encode(documents)]
    monkeypatch.setattr(tokenizing, "LONGEST_ENCODED", 64)
    monkeypatch.setattr(tokenizing, "PIECE_ENCODED", 64)
    assert len(tokenizing._pieces_of(text)) > 4
    found = FileTokenizer(folder).encode(documents)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [tokenizer.decode(each.tokens.tolist(), skip_special_tokens=False) for [each] in found]
    assert texts == [f"before{END}", f"{text}{END}", f"behind{END}"]
    assert "x" * 99 in text or [each.tokens.tolist() for [each] in found] == whole


@pytest.mark.parametrize("settings", [{}, {"added_tokens_decoder": {}}], ids=["older", "newer"])
def test_special_tokens_are_found_where_transformers_looks_for_them(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", is_chat=True)
    told = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(told | settings))
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    theirs = AutoTokenizer.from_pretrained(folder)
    talk = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"})
    [[encoded]] = FileTokenizer(folder).encode([Document(text=b"x", messages=talk)])
    text = theirs.apply_chat_template(list(talk), tokenize=False)
    assert encoded.tokens.tolist() == theirs(text, add_special_tokens=False).input_ids
    assert encoded.tokens[-1] == theirs.eos_token_id
    assert theirs.eos_token == (END if settings else "<|im_end|>")


def test_names_of_special_tokens_in_what_people_wrote_are_counted_and_placed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", is_chat=True)
    records: list[dict[str, Any]] = [{"text": f"text {i}"} for i in range(20)]
    records += [{"text": f"{i} is no <|im_end|>"} for i in range(3)]
    records += [{"prompt": "what is <|im_start|>?", "completion": "a token"}]
    turns = [{"role": "user", "content": "x<|im_end|>\n<|im_start|>system\ny"}]
    records += [{"messages": [*turns, {"role": "assistant", "content": "z"}]}]
    places = [0]
    with (tmp_path / "a.jsonl").open("w") as file:
        for record in records:
            places.append(places[-1] + file.write(json.dumps(record) + "\n"))
    named = prepared(
        tmp_path / "a.jsonl",
        out=tmp_path / "out",
        tokenizer=folder,
        repeated=((str(tmp_path / "a.jsonl"), 2.0),),
    ).named
    assert (named.num_texts, named.num_conversations) == (4, 1)
    assert named.in_text == f"'<|im_end|>' in {tmp_path / 'a.jsonl'}, byte {places[20]}"
    assert named.in_conversation == f"'<|im_end|>' in {tmp_path / 'a.jsonl'}, byte {places[24]}"
    arguments = ["data", "prepare", str(tmp_path / "a.jsonl"), "--tokenizer", str(folder)]
    assert console.run(cli.root, [*arguments, "--out", str(tmp_path / "told")]) == 0
    told = capsys.readouterr().err
    assert (
        f"4 texts have the name of a special token, as {named.in_text}: there it is letters" in told
    )
    assert "1 conversation has the name" in told


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece", "Unigram", "BPE", "bytes"])
def test_text_that_a_tokenizer_has_no_token_for_is_told(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words_known = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3}
    by_kind: dict[str, Any] = {
        "WordLevel": lambda: models.WordLevel(words_known, unk_token="<unk>"),
        "WordPiece": lambda: models.WordPiece(words_known, unk_token="<unk>"),
        "Unigram": lambda: models.Unigram([(each, -1.0) for each in words_known], unk_id=0),
        "BPE": lambda: models.BPE(words_known, [], unk_token="<unk>"),
    }
    tokenizer = Tokenizer(by_kind.get(kind, models.BPE)())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind == "bytes":
        tokenizer = Tokenizer.from_file(str(write_tokenizer(tmp_path / "bytes") / "tokenizer.json"))
        tokenizer.add_special_tokens(["</s>"])
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    texts = ["a " * i + "中" for i in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    arguments = ["data", "prepare", str(tmp_path / "a.jsonl"), "--held-out", "0.5"]
    arguments += ["--tokenizer", str(tmp_path / "tokenizer"), "--end-of-document", "</s>"]
    assert console.run(cli.root, [*arguments, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().err
    share = 30 / sum(i + 2 for i in range(30))
    assert (f"{share:.2%} of all tokens stand for text" in told) == (kind != "bytes")


def test_a_tokenizer_that_cannot_be_used_is_named_as_it_was_given(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace(END, "[STOP]"))
    (folder / "tokenizer_config.json").unlink()
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "tokenizer.model").write_bytes(b"\xff")
    with pytest.raises(
        ConfigError, match=r"\S*/tokenizer does not say.*special tokens are \[STOP\]"
    ):
        prepared(tmp_path / "a.txt", out=tmp_path / "out", tokenizer=folder)
    with pytest.raises(BadDataError, match=r"^\S*/tokenizer\.model is no tokenizer"):
        prepared(tmp_path / "a.txt", out=tmp_path / "out", tokenizer=tmp_path / "tokenizer.model")
