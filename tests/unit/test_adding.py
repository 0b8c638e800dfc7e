"""Tokens are added to others: what is held out stays so, and the folder of before stays as it is."""

import json
from pathlib import Path

import pytest

from node.island.data import shard_plan
from node.island.data.manifest import MANIFEST_FILE, State, check_folder, read_manifest
from node.island.data.preparing import prepare
from node.island.data.shard_plan import Wanted
from protocol.errors import BadDataError, CannotCreateError, ExitCode, UsageError
from protocol.terminal import cli, console
from tests.unit.tokens_scene import documents_of, prepared, words, write_jsonl, write_tokenizer


def write_more(path: Path, first: int, last: int) -> list[str]:
    texts = [words(i) for i in range(first, last)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def both(folder: Path) -> tuple[set[bytes], set[bytes]]:
    return set(documents_of(folder, "training")), set(documents_of(folder, "held_out"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def before(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", 60)
    prepared(tmp_path / "a.jsonl", out=tmp_path / "before", held_out=0.2)
    return tmp_path / "before"


def test_new_documents_come_behind_those_of_before_which_stay_as_they_are(
    tmp_path: Path, before: Path
) -> None:
    texts = write_more(tmp_path / "b.jsonl", 60, 120)
    was = contents(before)
    prepared(tmp_path / "b.jsonl", out=tmp_path / "out", add_to=before)
    assert contents(before) == was
    check_folder(tmp_path / "out", on_state=lambda state: None)
    for split in ("training", "held_out"):
        old, new = documents_of(before, split), documents_of(tmp_path / "out", split)
        assert new[: len(old)] == old and len(new) > len(old)
    trained, kept_back = both(tmp_path / "out")
    assert len(trained) + len(kept_back) == 120 and {*map(str.encode, texts)} < trained | kept_back
    manifest = read_manifest(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*manifest.files, MANIFEST_FILE}
    assert manifest.digest() != read_manifest(before).digest()
    assert (tmp_path / "out" / "00000.tokens").samefile(before / "00000.tokens")


def test_a_document_that_is_added_again_is_in_the_split_in_which_it_was(
    tmp_path: Path, before: Path
) -> None:
    write_more(tmp_path / "b.jsonl", 0, 70)  # with other options, which would split otherwise
    prepared(tmp_path / "b.jsonl", out=tmp_path / "out", add_to=before, held_out=0.5)
    trained, kept_back = both(before)
    now_trained, now_kept_back = both(tmp_path / "out")
    assert not now_trained & now_kept_back
    assert trained < now_trained and kept_back <= now_kept_back


def test_what_files_of_their_own_held_out_is_not_trained_on_when_it_is_added(
    tmp_path: Path,
) -> None:
    write_jsonl(tmp_path / "a.jsonl", 20)
    exam = write_more(tmp_path / "exam.jsonl", 20, 24)
    prepared(
        tmp_path / "a.jsonl",
        out=tmp_path / "before",
        held_out_inputs=(str(tmp_path / "exam.jsonl"),),
    )
    write_more(tmp_path / "b.jsonl", 18, 30)
    made = prepared(tmp_path / "b.jsonl", out=tmp_path / "out", add_to=tmp_path / "before")
    trained, kept_back = both(tmp_path / "out")
    assert kept_back == {*map(str.encode, exam)} and not trained & kept_back
    assert made.num_held_out_too == 4 and len(trained) == 26
    # And once more: the hashes have come along.
    write_more(tmp_path / "c.jsonl", 22, 40)
    prepared(tmp_path / "c.jsonl", out=tmp_path / "third", add_to=tmp_path / "out")
    assert both(tmp_path / "third")[1] == kept_back and not both(tmp_path / "third")[0] & kept_back
    with pytest.raises(BadDataError, match="all 4 documents to train on are held out too"):
        prepared(tmp_path / "exam.jsonl", out=tmp_path / "none", add_to=tmp_path / "out")


def test_a_single_document_whose_end_is_held_out_is_not_trained_on_as_a_whole_when_it_is_added(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(300)))
    prepared(tmp_path / "a.txt", out=tmp_path / "before")
    write_more(tmp_path / "b.jsonl", 0, 20)
    made = prepared(
        tmp_path / "a.txt", tmp_path / "b.jsonl", out=tmp_path / "out", add_to=tmp_path / "before"
    )
    assert made.num_held_out_too == 1
    files = {shard.tokens for shard in made.manifest.training}
    trained = b"".join((tmp_path / "out" / name).read_bytes() for name in sorted(files))
    assert b"line 100\n" in trained and b"word7x1" in trained and b"line 299\n" not in trained


def test_of_few_documents_the_one_that_was_held_out_stays_so(tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 6)
    prepared(tmp_path / "a.jsonl", out=tmp_path / "before", held_out=1e-9)
    (kept_back,) = documents_of(tmp_path / "before", "held_out")
    write_more(tmp_path / "b.jsonl", 0, 9)
    prepared(tmp_path / "b.jsonl", out=tmp_path / "out", add_to=tmp_path / "before", held_out=1e-9)
    trained, now = both(tmp_path / "out")
    assert kept_back in now and kept_back not in trained
    assert {*map(str.encode, texts)} <= trained | now


def test_rows_and_tokenizer_are_those_of_before(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 60)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    prepared(tmp_path / "a.jsonl", out=tmp_path / "before", tokenizer=tokenizer, row=129)
    write_more(tmp_path / "b.jsonl", 60, 90)
    old = prepared(tmp_path / "b.jsonl", out=tmp_path / "out", add_to=tmp_path / "before").manifest
    alone = prepared(tmp_path / "b.jsonl", out=tmp_path / "b", tokenizer=tokenizer, row=129).new
    assert (old.row, old.tokenizer_digest) == (129, alone.tokenizer_digest)
    assert old.files["00001.tokens"] == alone.files["00000.tokens"]
    other = write_tokenizer(tmp_path / "other", is_chat=True)
    refused: list[tuple[dict[str, object], str]] = [
        ({"tokenizer": other}, "are of another tokenizer"),
        ({"row": 65}, "--pack 64: the tokens in .* are packed for 128"),
        ({"end_of_document": "x"}, r"documents in .* end with <\|endoftext\|>"),
    ]
    for options, said in refused:
        with pytest.raises(UsageError, match=said):
            prepared(
                tmp_path / "b.jsonl", out=tmp_path / "x", add_to=tmp_path / "before", **options
            )
    assert not (tmp_path / "x").exists()


def test_an_adding_that_is_interrupted_loses_nothing_and_goes_on(
    tmp_path: Path, before: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_plan, "LEAST_SHARD_BYTES", 4096)
    monkeypatch.setattr(shard_plan, "SHARDS_AIMED_AT", 1 << 30)
    write_more(tmp_path / "b.jsonl", 60, 160)
    wanted = Wanted(inputs=(str(tmp_path / "b.jsonl"),), out=tmp_path / "out", add_to=before)
    was = contents(before)

    def interrupt(state: State) -> None:
        if state.done_bytes > state.total_bytes // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(wanted, on_state=interrupt, say=print)
    assert contents(before) == was and not (tmp_path / "out").exists()
    states: list[State] = []
    prepare(wanted, on_state=states.append, say=print)
    assert states[0].resumed_bytes > 0
    prepared(tmp_path / "b.jsonl", out=tmp_path / "at-once", add_to=before)
    assert contents(tmp_path / "at-once") == contents(tmp_path / "out")


def test_where_the_disk_does_not_link_files_are_copied_and_that_is_said(
    tmp_path: Path, before: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_paths: object, **_options: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    write_more(tmp_path / "b.jsonl", 60, 70)
    said: list[str] = []
    wanted = Wanted(inputs=(str(tmp_path / "b.jsonl"),), out=tmp_path / "out", add_to=before)
    prepare(wanted, on_state=lambda state: None, say=said.append)
    assert len(said) == 1 and "cannot be linked" in said[0]
    assert not (tmp_path / "out" / "00000.tokens").samefile(before / "00000.tokens")
    check_folder(tmp_path / "out", on_state=lambda state: None)


def test_what_cannot_be_added_to_is_refused(tmp_path: Path, before: Path) -> None:
    write_more(tmp_path / "b.jsonl", 60, 70)
    with pytest.raises(CannotCreateError, match="stays as it is"):
        prepared(tmp_path / "b.jsonl", out=before / ".." / "before", add_to=before)
    told = json.loads((before / MANIFEST_FILE).read_text())
    del told["held_out_below"]
    (before / MANIFEST_FILE).write_text(json.dumps(told))
    with pytest.raises(BadDataError, match="does not say what it holds out"):
        prepared(tmp_path / "b.jsonl", out=tmp_path / "out", add_to=before)


def test_the_command_says_what_was_added_and_that_a_run_that_has_begun_keeps_its_own(
    tmp_path: Path, before: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_more(tmp_path / "b.jsonl", 60, 70)
    command = ["data", "prepare", str(tmp_path / "b.jsonl"), "--jobs", "1"]
    command += ["--add-to", str(before), "--out", str(tmp_path / "out")]
    assert console.run(cli.root, [*command, "--held-out", "0.1"]) == ExitCode.USAGE
    assert "what is held out goes on as in" in capsys.readouterr().err
    assert console.run(cli.root, command) == ExitCode.OK
    told = capsys.readouterr().out
    assert "of 10 documents from 1 file" in told and ": added " in told
    assert f"a run that has begun keeps {before}" in told and "atoll node fork ROUND" in told


@pytest.mark.parametrize("row", [None, 129])
def test_that_documents_come_again_is_told(tmp_path: Path, before: Path, row: int | None) -> None:
    if row is not None:
        prepared(tmp_path / "a.jsonl", out=tmp_path / "packed", row=row)
        before = tmp_path / "packed"
    write_more(tmp_path / "b.jsonl", 60, 120)
    said: list[str] = []
    for name in ("b", "a"):
        wanted = Wanted(
            inputs=(str(tmp_path / f"{name}.jsonl"),), out=tmp_path / f"with-{name}", add_to=before
        )
        prepare(wanted, on_state=lambda state: None, say=said.append)
    assert len(said) == 1  # of the others nothing
    assert "added documents that are held out are in" in said[0] and "trained on twice" in said[0]
