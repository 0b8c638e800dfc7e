"""`atoll evaluate`: lm-eval is given an export that transformers loads; what it says is passed on.

lm-eval itself is no part of the development environment: a program in its place opens what it is given.
Where lm-eval is installed, the last test runs it on a task that lies on this machine.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from node.kept import keep_run, kept_run
from protocol.errors import ExitCode
from protocol.run.run_spec import DataSection
from protocol.terminal import console
from protocol.terminal.cli import root
from tests.unit.test_forking import node_home

PROMPT = "def nai\u0308ve"
"""With two signs for one letter, which other tokenizers make one of."""

STAND_IN = (
    f"PROMPT = {PROMPT!r}"
    + """
import json, sys
from pathlib import Path
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
if given["--tasks"] == "none":
    sys.exit(3)
from transformers import AutoTokenizer
named = dict(one.split("=") for one in given["--model_args"].split(","))
folder = named["pretrained"]
tokenizer = AutoTokenizer.from_pretrained(named.get("tokenizer", folder))  # as lm-eval does
tokens, loss = tokenizer(PROMPT).input_ids, None
if given["--tasks"] != "only tokens":  # torch takes seconds
    import torch
    from transformers import AutoModelForCausalLM
    prompt = torch.tensor([tokens])
    loss = AutoModelForCausalLM.from_pretrained(folder)(prompt, labels=prompt).loss.item()
about = json.loads((Path(folder) / "atoll.json").read_text())
told = {"command": sys.argv[1], "given": given, "loss": loss, "round": about["round"]}
told |= {"folder": folder, "tokens": tokens}
Path(given["--output_path"]).write_text(json.dumps(told))
"""
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return node_home(tmp_path / "node")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "path" / "lm_eval").mkdir(parents=True)
    (tmp_path / "path" / "lm_eval" / "__init__.py").touch()
    (tmp_path / "path" / "lm_eval" / "__main__.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path / "path")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    return tmp_path / "told.json"


def evaluate(home: Path, *arguments: str) -> int:
    return console.run(root, ["evaluate", "--dir", str(home), *arguments])


def test_lm_eval_gets_a_model_of_bytes_whole_and_its_own_options_and_no_folder_stays(
    home: Path, stand_in: Path
) -> None:
    options = ("--", "--output_path", str(stand_in), "--limit", "7")
    assert evaluate(home, "--tasks", "one,two", "--round", "16", *options) == ExitCode.OK
    told = json.loads(stand_in.read_text())
    given = told["given"]
    assert (told["command"], told["round"]) == ("run", 16)
    assert np.isfinite(told["loss"])
    assert (given["--model"], given["--tasks"], given["--limit"]) == ("hf", "one,two", "7")
    assert told["tokens"] == list(PROMPT.encode())
    assert given["--model_args"] == f"pretrained={told['folder']}"
    assert not Path(told["folder"]).parent.exists()


def test_a_qwen2_with_another_tokenizer_than_its_family_s_is_measured_on_the_tokens_it_was_trained_on(
    tmp_path: Path, stand_in: Path
) -> None:
    home = node_home(tmp_path / "other", model={"attention_bias": "qkv"})
    only_tokens = ("--tasks", "only tokens", "--", "--output_path", str(stand_in))
    assert evaluate(home, *only_tokens) == ExitCode.OK
    told = json.loads(stand_in.read_text())
    assert told["tokens"] == list(PROMPT.encode())
    assert not Path(told["folder"]).parent.exists()


def test_a_run_without_data_says_that_its_tokenizer_has_to_be_named(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = kept_run(home)
    keep_run(home, spec.model_copy(update={"data": DataSection(source="loop")}))
    assert evaluate(home, "--tasks", "one") == ExitCode.NO_INPUT
    told = capsys.readouterr().err
    assert "nothing says which tokens a text is to its model" in told
    assert "--tokenizer PATH" in told


def test_that_lm_eval_fails_is_this_command_s_failure(
    home: Path, stand_in: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = evaluate(home, "--tasks", "none", "--", "--output_path", str(stand_in))
    assert code == ExitCode.SYSTEM
    assert "lm-eval ended with 3" in capfd.readouterr().err


def test_a_model_that_transformers_does_not_load_is_refused_before_lm_eval_begins(
    tmp_path: Path, stand_in: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = node_home(tmp_path / "other", model={"logit_softcap": 30.0})
    code = evaluate(home, "--tasks", "one", "--", "--output_path", str(stand_in))
    assert code == ExitCode.USAGE and not stand_in.exists()
    assert "which does not load this one" in capfd.readouterr().err


def test_without_lm_eval_the_line_that_installs_it_is_told(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert evaluate(home, "--tasks", "one") == ExitCode.SYSTEM
    assert "pip install 'atoll[lm-eval]'" in capfd.readouterr().err


TASK = """
task: atoll_local
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="the extra lm-eval is not installed")
def test_lm_eval_itself_runs_a_task_of_this_machine(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = tmp_path / "questions.jsonl"
    rows = [{"question": "1 + 1 =", "choices": [" 2", " 3"], "answer": 0}] * 4
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local.yaml").write_text(TASK.replace("DATA", str(data)))
    out = tmp_path / "results.json"
    options = ("--include_path", str(tmp_path / "tasks"), "--output_path", str(out))
    assert evaluate(home, "--tasks", "atoll_local", "--", *options, "--device", "cpu") == 0
    (found,) = tmp_path.glob("results*.json")
    results = json.loads(found.read_text())["results"]["atoll_local"]
    assert results["acc,none"] in (0.0, 1.0)
