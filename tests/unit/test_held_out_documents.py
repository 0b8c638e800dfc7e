"""What files of their own hold out is not trained on, also where other files have it."""

import json
from pathlib import Path

import pytest

from node.island.data.manifest import read_manifest
from protocol.errors import BadDataError
from protocol.terminal import cli, console
from tests.unit.tokens_scene import documents_of, prepared, write_jsonl


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_file_of_its_own_is_held_out_as_a_whole(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 30)
    (tmp_path / "exam.txt").write_text("the exam\n")
    prepared(
        tmp_path / "a.jsonl", out=tmp_path / "out", held_out_inputs=(str(tmp_path / "exam.txt"),)
    )
    assert documents_of(tmp_path / "out", "held_out") == [b"the exam\n"]
    assert len(documents_of(tmp_path / "out", "training")) == 30


def test_a_file_that_is_held_out_is_not_trained_on_though_the_inputs_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(f"{number} " * 9)
    (tmp_path / "long.txt").write_text("longer " * 99)
    (tmp_path / "link.txt").symlink_to("long.txt")
    command = ["data", "prepare", "*.txt", "--out"]
    assert console.run(cli.root, [*command, "out", "--held-out", "long.txt"]) == 0
    made = read_manifest(tmp_path / "out")
    assert made.num_tokens("training") == 9 * (18 + 1)
    assert made.num_tokens("held_out") == 7 * 99 + 1
    assert "more is held out than there is to train on" in capsys.readouterr().err
    assert console.run(cli.root, [*command, "even", "--held-out", "3.txt"]) == 0
    assert "more is held out" not in capsys.readouterr().err
    assert console.run(cli.root, [*command, "none", "--held-out", "*.txt"]) == 66
    assert "all that is to be trained on is held out" in capsys.readouterr().err


def test_tokens_that_are_held_out_are_not_trained_on_though_the_inputs_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, count in (("a", 100), ("b", 50)):
        (tmp_path / f"{name}.bin").write_bytes(bytes(2 * count))
    command = ["data", "prepare", "*.bin", "--vocab-size", "9", "--token-bytes", "2", "--out"]
    assert console.run(cli.root, [*command, "out", "--held-out", "b.bin"]) == 0
    made = read_manifest(tmp_path / "out")
    assert (made.num_tokens("training"), made.num_tokens("held_out")) == (100, 50)
    assert console.run(cli.root, [*command, "none", "--held-out", "*.bin"]) == 66


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_document_that_a_file_holds_out_is_not_trained_on_from_another(
    jobs: int, tmp_path: Path
) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 30)
    exam = write_lines(tmp_path / "exam.jsonl", [texts[3], "of the exam alone", texts[7], ""])
    made = prepared(
        tmp_path / "a.jsonl", out=tmp_path / "out", held_out_inputs=(str(exam),), jobs=jobs
    )
    assert made.num_held_out_too == 2
    trained, kept_back = (documents_of(tmp_path / "out", s) for s in ("training", "held_out"))
    assert kept_back == [texts[3].encode(), b"of the exam alone", texts[7].encode()]
    assert sorted(trained) == sorted(
        text.encode() for i, text in enumerate(texts) if i not in (3, 7)
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "manifest.json",
        *made.manifest.files,
    }


def test_a_repeated_document_that_is_held_out_is_left_out_each_time_and_counted_once(
    tmp_path: Path,
) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 10)
    exam = write_lines(tmp_path / "exam.jsonl", [texts[3]])
    made = prepared(
        tmp_path / "a.jsonl",
        out=tmp_path / "out",
        held_out_inputs=(str(exam),),
        repeated=((str(tmp_path / "a.jsonl"), 3.0),),
    )
    assert made.num_held_out_too == 1
    trained = documents_of(tmp_path / "out", "training")
    assert len(trained) == 27 and texts[3].encode() not in trained


def test_files_that_hold_out_all_that_is_trained_on_are_refused(tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 10)
    copy = write_lines(tmp_path / "copy.jsonl", texts)
    with pytest.raises(BadDataError, match="all 10 documents to train on are held out too"):
        prepared(tmp_path / "a.jsonl", out=tmp_path / "out", held_out_inputs=(str(copy),))
    assert not (tmp_path / "out").exists()


def test_the_command_says_how_many_documents_are_held_out_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 10)
    exam = write_lines(tmp_path / "exam.jsonl", texts[:2])
    arguments = ["data", "prepare", str(tmp_path / "a.jsonl"), "--held-out", str(exam)]
    assert console.run(cli.root, [*arguments, "--out", str(tmp_path / "out"), "--jobs", "1"]) == 0
    told = capsys.readouterr().out
    assert "of 10 documents from 2 files; 2 left out of training, as they are held out too" in told
