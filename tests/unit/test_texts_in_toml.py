"""Any text that is UTF-8 can stand in the files that we write; what is none is refused before any work."""

import os
import tomllib
from pathlib import Path

import pytest

from coordinator.presets.settling import with_values
from protocol.errors import BadDataError, ExitCode
from protocol.files.durable import toml_of
from protocol.terminal import cli, console


@pytest.mark.parametrize(
    "text",
    ["Körner", "data-\U0001f600", 'a "b" \\ c', "tab\tline\nnext\u2028end\x85\x7f\0", ""],
)
def test_any_text_reads_back_and_stands_in_one_line(text: str) -> None:
    tables = {"data": {"paths": [text, {text: text}], "one": text}}
    written = toml_of(tables)
    assert tomllib.loads(written) == tables
    assert len(written.splitlines()) == 3
    values = {("data", "paths"): ([text], ""), ("run", "name"): (text, "")}
    edited = with_values("[data]\n", values)  # type: ignore[arg-type]
    assert tomllib.loads(edited) == {"data": {"paths": [text]}, "run": {"name": text}}


def test_a_name_that_is_no_utf_8_is_refused_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = os.fsdecode(b"K\xf6rner.txt")
    with pytest.raises(BadDataError, match="is no UTF-8, and a TOML file is"):
        toml_of({"data": {"paths": [name]}})
    (tmp_path / name).write_text("much text " * 100_000)
    (tmp_path / "a.txt").write_text("text")
    for words in (
        ["init", str(tmp_path / "run"), "--data", str(tmp_path / name)],
        ["data", "prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / f"of-{name}")],
    ):
        assert console.run(cli.root, words) == ExitCode.BAD_DATA
        assert "is no UTF-8" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a.txt", name])
