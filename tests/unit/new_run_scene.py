"""'atoll init' in this process, and what it may begin with."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace

import pytest
import torch

from coordinator.presets import wanted as asking
from protocol.run.run_files import load_run_folder
from protocol.run.run_spec import RunSpec
from protocol.terminal import cli, console
from tests.unit.tokens_scene import prepared, write_jsonl, write_llama

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "functions"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in bf16 with its tokenizer, and beside it tokens of that tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    write_llama(folder, dtype=torch.bfloat16)
    write_jsonl(folder.parent / "text.jsonl", 300)
    prepared(folder.parent / "text.jsonl", out=folder.parent / "tokens", tokenizer=folder)
    return folder


@pytest.fixture
def described_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command that describes a run runs in this process, which has loaded torch and transformers.

    One test starts it, as 'atoll init' does, which takes four seconds. Their log wants `capfd`.
    """
    examples = [file.stem for file in EXAMPLES.glob("*.py")]
    before = {name: sys.modules.pop(name) for name in examples if name in sys.modules}

    def run(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        words = command[command.index(cli.__name__) + 1 :]
        path = list(sys.path)
        with TemporaryFile("w+") as answer:
            with redirect_stdout(answer):
                code = console.run(cli.root, words)
            answer.seek(0)
            sys.path[:] = path
            for name in examples:  # it may be other code the next time
                sys.modules.pop(name, None)
            return subprocess.CompletedProcess(command, code, stdout=answer.read())

    here = SimpleNamespace(run=run, PIPE=subprocess.PIPE)
    monkeypatch.setattr(asking, "subprocess", here)
    # Changed within a second and of the same length, code would be taken for what was compiled before.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    sys.modules.update(before)


VISION = ("--function", "vision:model", "--data-function", "vision:data", "--from", EXAMPLES)


def init(folder: Path, *arguments: object) -> int:
    """The exit code of 'atoll init'."""
    words = ["init", str(folder), "--host", "127.0.0.1", *map(str, arguments)]
    return console.run(cli.root, words)


def made(folder: Path, *arguments: object) -> RunSpec:
    """The run that the command has made."""
    assert init(folder, *arguments) == 0
    return load_run_folder(folder, "run.toml")
