"""Which files paths, folders and patterns name, and what is said of those that are not read."""

import os
import re
from pathlib import Path

import pytest

from node.island.data import preparing
from node.island.data.inputs import input_files, passed_over
from node.island.data.shard_plan import Wanted
from protocol.errors import NoInputError
from tests.unit.tokens_scene import documents_of, prepared, write_jsonl


def every_document(folder: Path) -> list[bytes]:
    return documents_of(folder, "training") + documents_of(folder, "held_out")


def test_files_of_a_folder_that_are_not_read_are_told(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "a.jsonl", 30)
    (tmp_path / "in" / "README.md").write_text("a card")
    said: list[str] = []

    def prepare_into(name: str) -> None:
        wanted = Wanted(inputs=(str(tmp_path / "in"),), out=tmp_path / name, held_out=0.2)
        preparing.prepare(wanted, on_state=lambda state: None, say=said.append)

    prepare_into("alone")
    assert not said
    (tmp_path / "in" / "book.txt").write_text("a book")
    prepare_into("beside")
    assert said == [
        f"{tmp_path / 'in'}: 1 of 2 files are read, as .jsonl; to read others, such as book.txt, name them "
        "apart"
    ]
    assert len(every_document(tmp_path / "beside")) == 30


def test_a_compressed_file_of_a_folder_is_not_said_to_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    (tmp_path / "b.JSONL").write_bytes(b"")
    assert not list(passed_over([str(tmp_path)]))
    assert [path.name for path in input_files([str(tmp_path)])] == ["a.jsonl.gz", "b.JSONL"]


@pytest.mark.parametrize(
    ("names", "next_step"),
    [
        (
            ("data/train-00000-of-00002.jsonl", "data/test-00000-of-00001.jsonl"),
            "/data/*train*.jsonl'",
        ),
        (("train/a.jsonl", "validation/a.jsonl"), "/train'"),
        (("en.train.jsonl", "en.dev.jsonl"), "/*train*.jsonl'"),
        (("Training_2.jsonl", "my-eval.jsonl.gz"), "/*Training*.jsonl'"),
        (("train-0.jsonl", "train-1.jsonl"), None),
        (("trains.jsonl", "contest.jsonl", "train.jsonl"), None),
        (("test-0.jsonl", "validation.jsonl"), None),
    ],
)
def test_a_folder_of_several_splits_is_refused_with_how_one_is_named(
    names: tuple[str, ...], next_step: str | None, tmp_path: Path
) -> None:
    folder = tmp_path / "train of a test"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / name, 3)
    if next_step is None:
        assert len(input_files([str(folder)])) == len(names)
        return
    with pytest.raises(NoInputError, match="holds several splits by the names") as caught:
        input_files([str(folder)])
    assert f"as '{folder}{next_step}" in caught.value.next_step
    assert len(input_files([f"{folder}/**/*.jsonl*"])) == len(names)


@pytest.mark.parametrize(
    ("name", "next_step"),
    [
        ("nowhere.txt", "correct the path"),
        ("-", "write what comes through that pipe into a file first"),
        ("pipe", "write what comes through that pipe into a file first"),
        ("https://127.0.0.1/a.jsonl", "fetch it first"),
        ("of [1]/*.txt", r"a bracket of a name is written as \[\[\]: .*of \[\[\]1\]/"),
    ],
)
def test_an_input_that_is_no_file_is_refused_with_how_it_becomes_one(
    name: str, next_step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("of [1]").mkdir()
    with pytest.raises(NoInputError, match=f"{re.escape(name)} names no file; .*{next_step}"):
        input_files([name])


def test_lists_of_a_folder_are_read_without_the_card_beside_them(tmp_path: Path) -> None:
    for name in ("a.json", "sub/b.json.gz", "README.md", "LICENSE"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in input_files([str(tmp_path)])] == ["a.json", "b.json.gz"]
    assert [line.count("such as LICENSE") for line in passed_over([str(tmp_path)])] == [1]
    (tmp_path / "book.txt").write_text("a book")
    assert len(input_files([str(tmp_path)])) == 5


def test_folders_that_a_folder_links_to_are_read_once(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    (elsewhere / ".hidden").mkdir(parents=True)
    folder.mkdir()
    write_jsonl(elsewhere / "a.jsonl", 30)
    write_jsonl(elsewhere / ".hidden" / "b.jsonl", 3)
    (folder / "linked").symlink_to(elsewhere)
    (elsewhere / "round").symlink_to(folder)
    prepared(folder, out=tmp_path / "out")
    assert len(every_document(tmp_path / "out")) == 30


def test_a_link_of_a_folder_to_nothing_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", 30)
    (folder / "b.jsonl").symlink_to("annexed.jsonl")
    with pytest.raises(NoInputError, match=r"b\.jsonl is a link to annexed\.jsonl, which is not"):
        prepared(folder, out=tmp_path / "out")
