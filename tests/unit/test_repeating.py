"""Documents of a source are trained on as often as was asked for, and what is held out never is."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from node.island.data import shard_plan
from node.island.data.manifest import read_manifest
from protocol.errors import ExitCode, UsageError
from protocol.terminal import cli, console
from tests.unit.tokens_scene import documents_of, prepared


def write_sources(folder: Path, **counts: int) -> None:
    for name, count in counts.items():
        lines = [f'{{"text": "{name} {i:03}"}}\n' for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def copies_of(folder: Path, split: str, source: str) -> Counter[bytes]:
    return Counter(each for each in documents_of(folder, split) if each.startswith(source.encode()))


@pytest.mark.parametrize("is_cut", [False, True], ids=["one shard", "many shards"])
def test_sources_are_repeated_and_thinned(
    is_cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_cut:
        monkeypatch.setattr(shard_plan, "LEAST_SHARD_BYTES", 2048)
        monkeypatch.setattr(shard_plan, "SHARDS_AIMED_AT", 1 << 30)
    write_sources(tmp_path, code=400, web=400, book=50)
    repeated = ((str(tmp_path / "code.jsonl"), 2.25), (str(tmp_path / "web*"), 0.25))
    made = prepared(tmp_path, out=tmp_path / "out", repeated=repeated, held_out=0.1)
    plain = prepared(tmp_path / "*.jsonl", out=tmp_path / "plain", held_out=0.1)
    code, web, book = (copies_of(tmp_path / "out", "training", s) for s in ("code", "web", "book"))
    assert set(code.values()) == {2, 3} and set(web.values()) == set(book.values()) == {1}
    assert set(code) == set(copies_of(tmp_path / "plain", "training", "code"))
    assert set(book) == set(copies_of(tmp_path / "plain", "training", "book"))
    assert 0.15 < Counter(code.values())[3] / len(code) < 0.35
    assert 0.15 < len(web) / len(copies_of(tmp_path / "plain", "training", "web")) < 0.35
    for source in ("code", "book"):
        assert copies_of(tmp_path / "out", "held_out", source) == copies_of(
            tmp_path / "plain", "held_out", source
        )
    assert not set(documents_of(tmp_path / "out", "held_out")) & {*code, *web, *book}
    tokens = [sum(len(text) + 1 for text in each.elements()) for each in (code, web, book)]
    assert list(made.tokens_of.values()) == tokens
    assert made.manifest.num_tokens("training") == sum(tokens)
    assert list(plain.tokens_of) == [""]


@pytest.mark.parametrize("in_one", [True, False], ids=["in one file", "a file each"])
def test_a_document_and_its_copy_lie_apart(in_one: bool, tmp_path: Path) -> None:
    if in_one:
        write_sources(tmp_path, code=60, web=60)
    else:
        for i in range(60):
            write_sources(tmp_path, **{f"code-{i}": 1, f"web-{i}": 1})
    prepared(tmp_path, out=tmp_path / "out", repeated=((str(tmp_path / "code*"), 2.0),))
    places: dict[bytes, list[int]] = {}
    for place, each in enumerate(documents_of(tmp_path / "out", "training")):
        places.setdefault(each, []).append(place)
    apart = [np.diff(own).min() for own in places.values() if len(own) > 1]
    assert len(apart) > 30 and min(apart) > 30


def test_of_a_single_document_that_is_repeated_the_end_is_held_out_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(300)))
    repeated = ((str(tmp_path / "a.txt"), 3.0),)
    plain = prepared(tmp_path / "a.txt", out=tmp_path / "plain")
    made = prepared(tmp_path / "a.txt", out=tmp_path / "out", repeated=repeated)
    assert made.manifest.num_tokens("held_out") == plain.manifest.num_tokens("held_out")
    trained = made.manifest.num_tokens("training")
    assert trained == 3 * plain.manifest.num_tokens("training") == sum(made.tokens_of.values())


def test_what_is_repeated_does_not_depend_on_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_plan, "LEAST_SHARD_BYTES", 2048)
    monkeypatch.setattr(shard_plan, "SHARDS_AIMED_AT", 1 << 30)
    write_sources(tmp_path, code=200, web=200)
    repeated = ((str(tmp_path / "code.jsonl"), 1.5),)
    one, two = (
        prepared(tmp_path / "*.jsonl", out=tmp_path / f"by-{n}", repeated=repeated, jobs=n)
        for n in (1, 2)
    )
    assert one == two


def test_the_command_says_how_much_of_each_source_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sources(tmp_path, code=100, book=300)
    command = ["data", "prepare", "*.jsonl", "--held-out", "book.jsonl", "--jobs", "1", "--out"]
    write_sources(tmp_path, web=300)
    asked = ["--repeat", "code.jsonl=3", "--repeat", "web.jsonl=1"]
    assert console.run(cli.root, [*command, "out", *asked]) == ExitCode.OK
    said = capsys.readouterr().out
    assert "code.jsonl, 3 times: 2.7k tokens to train on, 52.9% of all" in said
    assert "web.jsonl, once: 2.4k tokens to train on, 47.1% of all" in said
    assert read_manifest(tmp_path / "out").num_tokens("training") == 5100
    assert console.run(cli.root, [*command, "unnamed", *asked[:2]]) == ExitCode.OK
    assert "others, once: 2.4k tokens to train on, 47.1% of all" in capsys.readouterr().out
    for wrong in ("code.jsonl", "code.jsonl=0", "code.jsonl=x", "=2", "code.jsonl=101"):
        assert console.run(cli.root, [*command, "x", "--repeat", wrong]) == ExitCode.USAGE


@pytest.mark.parametrize(
    ("repeated", "words"),
    [
        ((("elsewhere.txt", 2.0),), "elsewhere.txt=2 names no file that is to be trained on"),
        (
            (("*.jsonl", 2.0), ("code.jsonl", 3.0)),
            r"code\.jsonl is named by --repeat \*\.jsonl and by",
        ),
    ],
)
def test_a_repetition_that_cannot_be_meant_is_refused(
    repeated: tuple[tuple[str, float], ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sources(tmp_path, code=30)
    (tmp_path / "elsewhere.txt").write_text("x")
    with pytest.raises(UsageError, match=words):
        prepared("code.jsonl", out=tmp_path / "out", repeated=repeated)
