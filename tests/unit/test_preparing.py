"""What is prepared holds every document once, whoever did it and however often they were interrupted."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from node.island.data import documents as reading
from node.island.data import preparing, shard_plan
from node.island.data.command import HOW_TO_GO_ON
from node.island.data.documents import documents_of as read_documents
from node.island.data.documents import parts_of
from node.island.data.manifest import State, read_manifest
from node.island.data.records import Document
from node.island.data.shard_plan import Wanted
from node.island.data.shard_writing import HASHES, hash_of
from protocol.errors import (
    BadDataError,
    CannotCreateError,
    ConfigError,
    ExitCode,
    NoInputError,
    SystemRefusedError,
    UsageError,
)
from protocol.terminal import cli, console
from tests.unit.tokens_scene import (
    END,
    documents_of,
    prepared,
    spec_of,
    tokens_of,
    write_jsonl,
    write_tokenizer,
)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of a few kilobytes, so that little input makes several."""
    monkeypatch.setattr(shard_plan, "LEAST_SHARD_BYTES", 4096)
    monkeypatch.setattr(shard_plan, "SHARDS_AIMED_AT", 1 << 30)


def every_document(folder: Path) -> list[bytes]:
    return documents_of(folder, "training") + documents_of(folder, "held_out")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_document_is_in_one_split_once(tmp_path: Path, small_shards: None) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 100)
    made = prepared(tmp_path / "a.jsonl", out=tmp_path / "tokens")
    trained, kept_back = (documents_of(tmp_path / "tokens", s) for s in ("training", "held_out"))
    assert sorted(trained + kept_back) == sorted(text.encode() for text in texts)
    assert not set(trained) & set(kept_back)
    assert 5 < len(kept_back) < 40
    assert len(made.manifest.training) > 5
    for split, own in (("training", trained), ("held_out", kept_back)):
        assert made.manifest.text_bytes(split) == sum(map(len, own))  # type: ignore[arg-type]
        assert made.manifest.num_tokens(split) == sum(map(len, own)) + len(own)  # type: ignore[arg-type]


def test_the_result_does_not_depend_on_the_processes(tmp_path: Path, small_shards: None) -> None:
    write_jsonl(tmp_path / "a.jsonl", 60)
    prepared(tmp_path / "a.jsonl", out=tmp_path / "one", jobs=1)
    prepared(tmp_path / "a.jsonl", out=tmp_path / "three", jobs=3)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "three")
    assert not list(tmp_path.glob(".*"))


def test_a_document_is_held_out_by_what_it_says_wherever_it_stands(tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 60)
    backwards = "".join(json.dumps({"text": text}) + "\n" for text in reversed(texts * 2))
    (tmp_path / "b.jsonl").write_text(backwards)
    for name in ("a", "b"):
        prepared(tmp_path / f"{name}.jsonl", out=tmp_path / name)
    assert set(documents_of(tmp_path / "a", "held_out")) == set(
        documents_of(tmp_path / "b", "held_out")
    )
    share = sum(
        hash_of(Document(text=bytes([i, j]))) < 0.1 * HASHES for i in range(99) for j in range(99)
    )
    assert share / 99**2 == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("ending", ["\n", ""])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.gz", "txt.gz", "parquet"])
def test_parts_of_a_file_have_each_document_once(
    kind: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"a.{kind}"
    texts = [f"line {i} " + "é" * (i * 7 % 50) for i in range(200)]
    if kind == "parquet":
        table = pyarrow.table({"text": texts, "other": list(range(200))})
        pyarrow.parquet.write_table(table, path, row_group_size=30)
    else:
        lines = texts if kind.startswith("txt") else [json.dumps({"text": t}) for t in texts]
        whole = ("\n".join(lines) + ending).encode()
        path.write_bytes(gzip.compress(whole) if kind.endswith("gz") else whole)
    for part_bytes in (1, 100, 1000, 10**6):
        parts = parts_of(path, part_bytes, document_bytes=64)
        found = [document.text for part in parts for document in read_documents(part, field="text")]
        if kind.startswith("txt"):
            assert b"".join(found) == ("\n".join(texts) + ending).encode()
            for text in found[:-1]:
                assert text.endswith(b"\n") and 1 <= len(text) < 64 + 2 * 120
        else:
            assert [text.decode() for text in found] == texts
        assert sum(part.num_bytes for part in parts) > 0
        assert len(parts) > 3 or part_bytes > 100 or kind.endswith("gz")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("lead", range(4))
def test_text_without_lines_is_cut_between_characters(
    lead: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LONGEST_LINE_BYTES", 16)
    text = "a" * lead + "aé€😀" * 100
    is_compressed = name.endswith("gz")
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if is_compressed else text.encode())
    parts = parts_of(tmp_path / name, 128, document_bytes=64)
    found = [
        document.text.decode() for part in parts for document in read_documents(part, field="text")
    ]
    assert "".join(found) == text
    assert len(found) > 10


class InterruptedByTestError(Exception):
    pass


def test_a_preparation_that_was_ended_goes_on_from_its_finished_shards(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl", 60)
    prepared(tmp_path / "a.jsonl", out=tmp_path / "whole")

    def interrupt(state: State) -> None:
        if state.done_bytes > 5000:
            raise InterruptedByTestError

    wanted = Wanted(inputs=(str(tmp_path / "a.jsonl"),), out=tmp_path / "out", held_out=0.2)
    with pytest.raises(InterruptedByTestError):
        preparing.prepare(wanted, on_state=interrupt, say=print)
    assert not (tmp_path / "out").exists()
    work = tmp_path / ".out.preparing"
    receipts = {path: path.stat().st_mtime_ns for path in work.glob("*.receipt")}
    assert receipts
    damaged = min(receipts)
    shard = work / f"{damaged.stem}.tokens"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    states: list[State] = []
    preparing.prepare(wanted, on_state=states.append, say=print)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert (states[0].resumed_bytes > 0) == (len(receipts) > 1)
    assert states[-1].done_bytes == states[-1].total_bytes


def test_another_input_begins_anew_and_says_so(tmp_path: Path, small_shards: None) -> None:
    write_jsonl(tmp_path / "a.jsonl", 30)
    work = tmp_path / ".out.preparing"
    work.mkdir()
    (work / "identity").write_text("of something else")
    (work / "00000.receipt").write_text("{}")
    said: list[str] = []
    wanted = Wanted(inputs=(str(tmp_path / "a.jsonl"),), out=tmp_path / "out", held_out=0.2)
    preparing.prepare(wanted, on_state=lambda state: None, say=said.append)
    assert "starts anew" in said[0]
    assert len(every_document(tmp_path / "out")) == 30


def test_a_file_that_is_changed_while_it_is_read_is_named(tmp_path: Path) -> None:
    said: list[str] = []
    for name in ("a.jsonl", "b.jsonl"):
        write_jsonl(tmp_path / name, 30)

    def write_more(state: State) -> None:
        with (tmp_path / "b.jsonl").open("a") as file:
            file.write(json.dumps({"text": "more"}) + "\n")

    wanted = Wanted(inputs=(str(tmp_path / "*.jsonl"),), out=tmp_path / "out")
    preparing.prepare(wanted, on_state=write_more, say=said.append)
    assert len(said) == 1 and said[0].startswith(
        f"warning: {tmp_path / 'b.jsonl'} was changed while"
    )


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGKILL, -signal.SIGKILL),  # as a machine without memory does it
        (signal.SIGTERM, ExitCode.INTERRUPTED),  # as a batch system
        (signal.SIGINT, ExitCode.INTERRUPTED),  # Ctrl-C
    ],
)
def test_a_preparation_that_a_signal_ends_leaves_no_process_and_goes_on(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    write_jsonl(tmp_path / "a.jsonl", 4000, count=400)
    command = [
        sys.executable,
        "-m",
        "protocol.terminal.cli",
        "data",
        "prepare",
        "a.jsonl",
        "--out",
        "out",
    ]
    root = Path(cli.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen(
        [*command, "--jobs", "2"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    work = tmp_path / ".out.preparing"
    deadline = time.monotonic() + 60
    while not list(work.glob("*.tokens")) and time.monotonic() < deadline:
        time.sleep(0.01)
    workers = _children_of(process.pid)
    assert workers
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    if number != signal.SIGKILL:
        *_, last = said.strip().splitlines()  # a slow machine tells progress before it
        assert last == f"stopped; {HOW_TO_GO_ON}"
    assert not (tmp_path / "out").exists()
    while any(_is_running(each) for each in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)
    assert len(every_document(tmp_path / "out")) == 4000


def _children_of(process_id: int) -> list[int]:
    return [
        int(each)
        for each in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    ]


def _is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_tokenizer_makes_tokens_that_it_reads_back(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    texts = write_jsonl(tmp_path / "a.jsonl", 30)
    made = prepared(tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for shard in (*made.manifest.training, *made.manifest.held_out):
        text = tokenizer.decode(
            tokens_of(tmp_path / "out", made.manifest, shard).tolist(), skip_special_tokens=False
        )
        found += text.split(END)[:-1]
    assert sorted(found) == sorted(texts)
    assert made.manifest.vocab_size == tokenizer.get_vocab_size() > 256
    assert made.manifest.token_bytes == 2
    kept = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert kept == (folder / "tokenizer.json").read_bytes()
    assert "tokenizer_config.json" in made.manifest.files


def test_text_that_spells_a_special_token_is_no_special_token(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    lines = [json.dumps({"text": f"a {END} b {i}"}) + "\n" for i in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    made = prepared(tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=folder / "tokenizer.json")
    ends = [
        int(
            (
                tokens_of(tmp_path / "out", made.manifest, shard) == made.manifest.end_of_document
            ).sum()
        )
        for shard in (*made.manifest.training, *made.manifest.held_out)
    ]
    assert sum(ends) == 30


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": \n',
            BadDataError,
            r"a\.jsonl: the line at byte 14 is no JSON",
        ),
        ("a.jsonl", b'{"body": "x"}\n', BadDataError, r"no text in 'text'.*keys are 'body'"),
        ("a.jsonl", b"[1]\n", BadDataError, "a list, no object"),
        (
            "a.jsonl",
            b"[" * 9999 + b"]" * 9999,
            BadDataError,
            "at byte 0 is no JSON record: maximum",
        ),
        (
            "a.jsonl",
            '{"text": "größer"}\n'.encode("latin-1"),
            BadDataError,
            "at byte 0 is not UTF-8: its byte 12 is 0xf6; convert",
        ),
        (
            "a.jsonl",
            b'{"text": "cut \\ud83d"}\n',
            BadDataError,
            r"byte 0: after 'cut ' stands .ud83d, which is half of a character",
        ),
        (
            "a.jsonl",
            b'{"messages": [{"role": "user", "content": "cut \\ud83d"}]}\n',
            BadDataError,
            "which is half of a character",
        ),
        (
            "a.jsonl",
            b'{"messages": [{"role": "user", "content": "x"}]}\n',
            ConfigError,
            "no chat template",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(mtime=0, data=b'{"text": "x"}\n' * 99)[:-9],
            BadDataError,
            "is damaged",
        ),
        ("a.parquet", b"PAR1 no", BadDataError, "is damaged"),
        ("a.json", b'{"data": [{"text": "x"}]', BadDataError, "neither a list of records nor a"),
        (
            "a.json",
            b'[{"text": "x"}, 5]',
            BadDataError,
            "record 1 of its list.* a number, no object",
        ),
        (
            "a.json",
            b'[{"text": "x"} {"text": "y"}]',
            BadDataError,
            "record 1 .* missing before '{'",
        ),
        ("a.json", b'[{"text": "x"},', BadDataError, "record 1 of its list"),
        ("a.json", b'[{"text": "x"}', BadDataError, "record 1 .* missing before ''"),
        ("a.json", '[{"text": "grö"}]'.encode("latin-1"), BadDataError, "record 0 .*'utf-8' codec"),
        ("a.jsonl.zst", b"x", BadDataError, "is damaged"),
        ("a.jsonl.bz2", b"x", BadDataError, "is damaged"),
        ("a.jsonl.xz", b"x", BadDataError, "is damaged"),
        (
            "a.csv",
            b"id,body\n1,x\n",
            BadDataError,
            r"a\.csv: no column 'text'.* there are body, id",
        ),
        (
            "a.csv",
            b"id,text\n1,x,y\n",
            BadDataError,
            "ends in line 2 has 3 fields.*first line names 2",
        ),
        ("a.csv", b"text,text\n1,2\n", BadDataError, "a.csv: 2 columns are called 'text'"),
        ("a.csv", b"id,text\n1\n", BadDataError, "line 2 has 1 field, and the first line names 2"),
        ("a.csv", b'text\nx\n"y\n', BadDataError, "what follows line 2 cannot be read"),
        ("a.csv", "text\ngrö\n".encode("latin-1"), BadDataError, "cannot be read: 'utf-8' codec"),
        ("a.txt", b"a\0b", BadDataError, "zero bytes"),
        ("a.txt", "größer".encode("utf-16"), BadDataError, "a.txt is UTF-16, by its first bytes"),
        ("a.jsonl", '{"text": "x"}\n'.encode("utf-32"), BadDataError, "a.jsonl is UTF-32"),
        ("a.json", '[{"text": "x"}]'.encode("utf-16"), BadDataError, "a.json is UTF-16"),
        (
            "a.jsonl",
            b'{"text": "x"}\n' * 9,
            BadDataError,
            "of 9 documents none is left to train on",
        ),
        ("a.jsonl", b'{"text": ""}\n' * 9, BadDataError, "has no text: 9 documents, all of them"),
        ("a.jsonl", b"", BadDataError, "a.jsonl has no text: not one document"),
        ("a.jsonl", b'{"text": 5}\n', BadDataError, r"has a number in 'text'"),
        ("a.jsonl", b'{"text": true}\n', BadDataError, r"has true or false in 'text'"),
        ("a.jsonl", b'{"text": {}}\n', BadDataError, r"has an object in 'text'"),
    ],
)
def test_input_that_cannot_be_used_is_refused_and_leaves_no_result(
    name: str, content: bytes, error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        prepared(tmp_path / name, out=tmp_path / "out", held_out=0.01)
    assert not (tmp_path / "out").exists()


def test_a_column_of_bytes_is_refused_with_how_it_becomes_text(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"text": b"hello"}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(BadDataError, match="'text' is a column of bytes, and text is") as caught:
        prepared(tmp_path / "a.parquet", out=tmp_path / "out")
    assert "decode('utf-8')" in caught.value.next_step


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_record_with_nothing_in_its_place_is_left_out_and_counted(
    kind: str, tmp_path: Path
) -> None:
    texts = [f"text {i}" for i in range(20)]
    nan = [float("nan")] if kind == "jsonl" else []  # as Python writes what pandas misses
    cases: tuple[tuple[str, list[Any]], ...] = (
        ("text", ["", None, *nan]),
        ("messages", [[], None]),
    )
    for column, nothing in cases:
        rows: list[dict[str, Any]] = [*({"text": text, "messages": None} for text in texts)]
        rows += [{"text": None, "messages": None, column: each} for each in nothing]
        path = tmp_path / f"{column}.{kind}"
        if kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        made = prepared(path, out=tmp_path / column)
        assert made.num_empty == len(nothing)
        assert sorted(every_document(tmp_path / column)) == sorted(t.encode() for t in texts)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
def test_the_mark_of_utf_8_is_no_text(name: str, tmp_path: Path) -> None:
    text = '{"text": "größer"}\n' if name == "a.jsonl" else "größer"
    written = text.encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(written) if name.endswith("gz") else written)
    [part] = parts_of(tmp_path / name, 1 << 20)
    [document] = read_documents(part, field="text")
    assert document.text.decode() == "größer"


def test_text_that_is_not_utf_8_is_told_where_it_is_taken_as_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("a", "größer".encode("latin-1")), ("b", "größer".encode()), ("c", b"c")):
        (tmp_path / f"{name}.txt").write_bytes(text)
    out = tmp_path / "out"
    arguments = ["data", "prepare", str(tmp_path / "*.txt"), "--held-out", "0.3", "--out", str(out)]
    assert console.run(cli.root, arguments) == 0
    told = capsys.readouterr().err
    assert (
        f"1 document is not UTF-8, as {tmp_path / 'a.txt'}, byte 0: the bytes are learned" in told
    )
    assert sorted(every_document(out)) == [b"c", "größer".encode(), "größer".encode("latin-1")]


def test_text_that_is_not_utf_8_is_refused_for_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("größer".encode("latin-1"))
    folder = write_tokenizer(tmp_path / "tokenizer")
    words = r"a\.txt, byte 0: a document is not UTF-8: its byte 2, after 'gr', is 0xf6"
    with pytest.raises(BadDataError, match=words):
        prepared(tmp_path / "a.txt", out=tmp_path / "out", tokenizer=folder)


def test_a_tokenizer_that_is_none_is_refused_before_any_work(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 30)
    for content, next_step in ((b"{}", "save_pretrained"), (b'{"model": 1}', "upgrade tokenizers")):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(BadDataError, match=r"tokenizer\.json is no tokenizer") as caught:
            prepared(
                tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=tmp_path / "tokenizer.json"
            )
        assert next_step in caught.value.next_step
    with pytest.raises(NoInputError, match=r"the tokenizer .*nowhere is not there"):
        prepared(tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=tmp_path / "nowhere")
    folder = write_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(UsageError, match="'<stop>' is no token"):
        prepared(
            tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=folder, end_of_document="<stop>"
        )


def test_a_result_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 30)
    prepared(tmp_path / "a.jsonl", out=tmp_path / "out")
    with pytest.raises(CannotCreateError, match="is there already"):
        prepared(tmp_path / "a.jsonl", out=tmp_path / "out")


def test_two_preparations_of_one_folder_do_not_mix(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 30)

    def again(state: State) -> None:
        with pytest.raises(SystemRefusedError, match="another 'atoll data prepare'"):
            prepared(tmp_path / "a.jsonl", out=tmp_path / "out")

    wanted = Wanted(inputs=(str(tmp_path / "a.jsonl"),), out=tmp_path / "out", held_out=0.2)
    preparing.prepare(wanted, on_state=again, say=print)
    assert read_manifest(tmp_path / "out").num_tokens("training")


def test_the_command_prints_what_a_run_file_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl", 60)
    monkeypatch.chdir(tmp_path)
    command = ["data", "prepare", "*.jsonl", "--out", "tokens", "--held-out", "0.2", "--jobs", "1"]
    assert console.run(cli.root, command) == ExitCode.OK
    said = capsys.readouterr().out
    assert 'source = "tokens"' in said
    digest = spec_of(Path("tokens")).data.digest
    assert digest is not None and digest in said
    assert "vocab_size = 256" in said and "next: atoll init my-run --data " in said
    assert console.run(cli.root, ["data", "check", "tokens"]) == ExitCode.OK
    assert console.run(cli.root, command) == ExitCode.CANNOT_CREATE
    assert console.run(cli.root, [*command[:-4], "--held-out", "2"]) == ExitCode.USAGE
    assert console.run(cli.root, ["data", "prepare", "*.txt", "--out", "x"]) == ExitCode.NO_INPUT
    shard = tmp_path / "tokens" / "00000.tokens"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    capsys.readouterr()
    assert console.run(cli.root, ["data", "check", "tokens"]) == ExitCode.BAD_DATA
    assert "00000.tokens is damaged: piece 0" in capsys.readouterr().err


def test_of_few_documents_one_is_held_out_wherever_it_stands(
    tmp_path: Path, small_shards: None
) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 30, count=100)
    documents = [Document(text=text.encode()) for text in texts]
    least = min(documents, key=hash_of)
    copies = "".join(json.dumps({"text": text}) + "\n" for text in [*texts, least.text.decode()])
    (tmp_path / "b.jsonl").write_text(copies)
    for name in ("a", "b"):
        made = prepared(tmp_path / f"{name}.jsonl", out=tmp_path / name, held_out=1e-9)
        assert len(made.manifest.training) > 2
        assert set(documents_of(tmp_path / name, "held_out")) == {least.text}
        assert len(documents_of(tmp_path / name, "training")) == 29


@pytest.mark.parametrize("row", [None, 33])
def test_of_a_single_document_the_end_is_held_out(row: int | None, tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(300))
    (tmp_path / "a.txt").write_text(text)
    made = prepared(tmp_path / "a.txt", out=tmp_path / "out", held_out=0.01, row=row)
    if row is None:
        trained, kept_back = (
            b"".join(
                tokens_of(tmp_path / "out", made.manifest, shard).astype("u1").tobytes()
                for shard in shards
            )
            for shards in (made.manifest.training, made.manifest.held_out)
        )
        assert (trained + kept_back).decode() == text + "\0"
        assert len(kept_back) == round(0.05 * (len(text) + 1))
        assert made.manifest.text_bytes("training") + made.manifest.text_bytes("held_out") == len(  # type: ignore[operator]
            text
        )
    assert made.manifest.num_tokens("held_out") > 32
