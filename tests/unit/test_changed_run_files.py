"""Run files that a person changes after they were made, and forks: what they keep, and what is refused."""

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from coordinator import app
from coordinator.config import Home
from coordinator.rules import rules_of
from coordinator.store import Store, may_have_begun, write_lost_anew
from coordinator.swarm.transition import initial_state
from protocol.errors import ConfigError, NoInputError
from protocol.run.run_files import load_run_folder
from protocol.run.run_spec import RunSpec
from protocol.terminal import cli, console
from protocol.wire.rounds import Digest
from tests.unit.new_run_scene import EXAMPLES, VISION, described_here, init, llama, made

__all__ = ["described_here", "llama"]


def forked(folder: Path, *arguments: object) -> dict[str, Any]:
    """A new run made into what 'atoll node fork' writes; returns its description."""
    made(folder, *arguments)
    told: dict[str, Any] = json.loads((folder / "description.json").read_text())
    told |= {"first_digest": "ab" * 32, "first_fragments": 1}
    (folder / "description.json").write_text(json.dumps(told))
    (folder / "first.safetensors").write_bytes(b"trained weights")
    return told


@pytest.mark.usefixtures("described_here")
def test_a_fork_of_a_function_keeps_its_weights_though_its_code_or_data_change(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As somebody does who wants more data for a run: they are what its code returns."""
    fork, code = tmp_path / "fork", tmp_path / "code"
    told = forked(fork, *VISION)
    code.mkdir()
    text = (EXAMPLES / "vision.py").read_text()
    (code / "vision.py").write_text(text.replace("arange(1797)", "arange(1700)"))
    capfd.readouterr()

    again = made(tmp_path / "again", "--run", fork / "run.toml", "--from", code)
    assert again.description is not None
    assert again.description.sources != told["sources"]
    assert (again.description.first_digest, again.description.first_fragments) == ("ab" * 32, 1)
    assert (tmp_path / "again" / "first.safetensors").read_bytes() == b"trained weights"
    assert "beginning with the weights abababababab" in capfd.readouterr().out

    copied = made(tmp_path / "copied", "--run", fork / "run.toml")
    assert copied.description is not None and copied.description.sources == told["sources"]
    told_how = capfd.readouterr().out
    assert f"--allow-function {copied.run.name}@DIGEST --code CODE" in told_how
    assert (
        "with a training loop of its own" in told_how and "  atoll node start --loop\n" in told_how
    )

    (code / "vision.py").write_text(text.replace("channels: int = 16", "channels: int = 32"))
    assert init(tmp_path / "wider", "--run", fork / "run.toml", "--from", code) == 78
    assert "the code makes another model than the fork has weights of" in capfd.readouterr().err
    assert not (tmp_path / "wider").exists()


def rewritten(path: Path, *changes: str) -> None:
    """Keys of a run file with other values, as a person writes them."""
    for change in changes:
        key = re.escape(change.partition(" =")[0])
        as_it_is = change.replace("\\", r"\\")
        text, count = re.subn(rf"(?m)^#? ?{key} =.*$", as_it_is, path.read_text())
        assert count, f"{key} is no key"
        path.write_text(text)


@pytest.mark.usefixtures("described_here")
def test_a_run_file_changed_by_hand_no_longer_has_the_model_that_was_described(
    llama: Path, tmp_path: Path
) -> None:
    def refused(home: Path, change: str, *words: str) -> None:
        kept = (home / "run.toml").read_text()
        rewritten(home / "run.toml", change)
        with pytest.raises(ConfigError) as caught:
            load_run_folder(home, "run.toml")
        for word in (*words, "write it as it was", f"'atoll node describe {home} --force"):
            assert word in str(caught.value)
        (home / "run.toml").write_text(kept)

    own, given, adapted = (tmp_path / name for name in ("own", "given", "adapted"))
    made(own, *VISION)
    refused(own, "arguments = {width = 9}", '[model] arguments is {"width": 9}', "with {}")
    refused(own, 'function = "vision:other"', '[model] function is "vision:other"')
    rewritten(own / "run.toml", "rounds = 7", "batch = 3", "seed = 5", "learning_rate = 0.5")
    load_run_folder(own, "run.toml")  # nothing is frozen that the seed would draw

    asked = ("--from", llama, "--data", llama.parent / "tokens", "--context", 32)
    made(given, *asked)
    refused(given, "num_heads = 2", "[model] num_heads is 2", "with 4")
    refused(given, "fragments = 2", "[exchange] fragments is 2", "with 1")
    rewritten(given / "run.toml", "context = 16", "rope_theta = 5000.0")
    load_run_folder(given, "run.toml")  # the weights are those of the folder

    made(adapted, *asked, "--lora", 4)
    refused(adapted, "rank = 8", "[lora] rank is 8, and", "with 4")
    rewritten(adapted / "run.toml", "alpha = 3.0", "context = 16")
    load_run_folder(adapted, "run.toml")


@pytest.mark.usefixtures("described_here")
def test_a_batch_above_the_samples_of_a_function_is_refused_before_any_node_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    made(own, *VISION)
    assert re.search(r"train \S+ samples, [\d,.]+ times what the data have", capfd.readouterr().out)
    spec = load_run_folder(own, "run.toml")
    assert spec.description is not None and spec.description.num_samples is not None
    unsaid = spec.description.model_copy(update={"num_samples": None})
    assert spec.digest() == spec.model_copy(update={"description": unsaid}).digest()
    assert "num_samples" not in spec.canonical_json(), "releases before do not know it"

    num_samples = spec.description.num_samples
    rewritten(own / "run.toml", f"batch = {num_samples}")
    load_run_folder(own, "run.toml")
    rewritten(own / "run.toml", f"batch = {num_samples + 1}")
    told = f"batch is {num_samples + 1}, and vision:data gave {num_samples} samples to train on"
    with pytest.raises(ConfigError, match=told) as caught:
        load_run_folder(own, "run.toml")
    assert caught.value.next_step.startswith("lower batch; or where it gives more by now")
    assert console.run(cli.root, ["coordinator", "start", str(own)]) == 78
    load_run_folder(own, "run.toml", may_be_stale=True)


@pytest.mark.usefixtures("described_here")
def test_what_a_fork_changes_of_its_model_is_described_by_a_new_run_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Describing it in its place would draw new weights over the fork's."""
    fork = tmp_path / "fork"
    forked(fork, *VISION)
    run_file = fork / "run.toml"
    run_file.write_text(run_file.read_text() + '\n[model.arguments]\ndevice = "cpu"\n')
    with pytest.raises(ConfigError) as caught:
        load_run_folder(fork, "run.toml")
    assert f"'atoll init NEWDIR --run {run_file} --from CODE'" in caught.value.next_step
    assert "describe" not in caught.value.next_step.replace("describe the model anew", "")
    assert init(tmp_path / "run", "--run", run_file) == ConfigError.exit_code
    told = capfd.readouterr().err
    assert f"atoll: {run_file}: [model] arguments is" in told and "unfinished" not in told


@pytest.mark.usefixtures("described_here")
def test_a_forks_weights_are_not_put_on_another_frozen_body(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, fork = tmp_path / "code", tmp_path / "fork"
    code.mkdir()
    (code / "mine.py").write_text(
        "import torch\n"
        "def model():\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 2))\n"
        "    return net, lambda net, rows: net(rows).square().mean()\n"
        "def data():\n"
        "    return [torch.ones(2)] * 9, [torch.ones(2)] * 9\n"
    )
    forked(fork, "--function", "mine:model", "--data-function", "mine:data", "--from", code)
    again = (tmp_path / "run", "--run", fork / "run.toml", "--from", code)
    rewritten(fork / "run.toml", "seed = 5")
    assert init(*again) == ConfigError.exit_code
    assert "other frozen values than those that the fork's weights" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
    rewritten(fork / "run.toml", "seed = 0", "rounds = 7")
    assert init(*again) == 0
    capfd.readouterr()


def test_a_coordinator_does_not_start_a_run_that_every_node_would_refuse(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_bytes(b"much " * 100_000)
    home = tmp_path / "run"
    made(home, "--data", tmp_path / "a.txt", "--port", 0, "--enrolment-port", 0)
    rewritten(home / "run.toml", "batch = 5000")
    assert console.run(cli.root, ["coordinator", "start", str(home)]) == NoInputError.exit_code
    assert "but one batch takes 5000" in capfd.readouterr().err
    assert not (home / "atoll.db").exists(), "and the file may still be changed"
    spec = load_run_folder(home, "run.toml")
    with closing(
        Store.open(home, sign=lambda commit: b"")
    ) as store:  # as a start that nobody joined
        store.keep_or_compare(spec, home / "run.toml")
    assert not may_have_begun(home)
    assert console.run(cli.root, ["coordinator", "start", str(home)]) == NoInputError.exit_code
    capfd.readouterr()


@pytest.mark.usefixtures("described_here")
def test_a_begun_runs_file_that_is_lost_is_written_anew_as_its_database_has_it(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ("--from", llama, "--data", llama.parent / "tokens", "--context", 32)
    made(tmp_path / "plain", "--link", "10mbit")
    made(tmp_path / "function", *VISION)
    made(tmp_path / "adapters", *asked, "--lora", 4)
    made(tmp_path / "loop", "--loop", *VISION[:2], "--from", EXAMPLES)
    made(tmp_path / "given", *asked)
    for home in (tmp_path / name for name in ("plain", "function", "adapters", "loop", "given")):
        run_file, described_in = home / "run.toml", home / "description.json"
        run = begun(home)
        assert run_file in write_lost_anew_after(home, run_file, described_in)
        assert Home.load(home).run.digest() == run.digest()
        if run.description is not None:
            assert write_lost_anew_after(home, described_in) == [described_in]
            assert Home.load(home).run.digest() == run.digest()
        assert write_lost_anew(run_file) == []

        run_file.write_text("[run]\nrounds = three\n")
        with pytest.raises(ConfigError) as refused:
            Home.load(home)
        assert f"remove {run_file}" in refused.value.next_step
        run_file.unlink()
        capfd.readouterr()
        assert Home.load(home).run.digest() == run.digest()
        assert f"{run_file} was gone, and is written anew from atoll.db" in capfd.readouterr().err


@pytest.mark.usefixtures("described_here")
def test_a_start_writes_a_lost_description_anew_though_the_run_file_reads_without_it(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "given"
    made(home, "--from", llama, "--data", llama.parent / "tokens", "--context", 32)
    run = begun(home)
    (home / "description.json").unlink()
    assert Home.load(home).run.digest() != run.digest()
    served: list[Home] = []
    monkeypatch.setattr(app, "run_coordinator", lambda home, config, **told: served.append(home))
    assert console.run(cli.root, ["coordinator", "start", str(home)]) == 0
    assert [each.run.digest() for each in served] == [run.digest()]


def test_a_lost_run_file_is_not_written_where_the_database_has_another_or_none_yet(
    tmp_path: Path,
) -> None:
    home = tmp_path / "run"
    made(home)
    run = begun(home, state_of=b"another run".ljust(32))
    assert write_lost_anew_after(home, home / "run.toml") == []
    with pytest.raises(NoInputError, match=r"run\.toml is not there"):
        Home.load(home)
    (home / "atoll.db").unlink()
    with closing(Store.open(home, sign=lambda commit: b"")) as store:
        store.keep_or_compare(run, home / "run.toml")
    assert write_lost_anew(home / "run.toml") == [], "it has not begun"
    (home / "atoll.db").write_bytes(b"damaged")
    assert write_lost_anew(home / "run.toml") == []


def begun(home: Path, *, state_of: bytes | None = None) -> RunSpec:
    """Lets the run of a coordinator's folder begin, and returns it."""
    run = load_run_folder(home, "run.toml")
    with closing(Store.open(home, sign=lambda commit: b"")) as store:
        store.keep_or_compare(run, home / "run.toml")
        state = initial_state(rules_of(run), Digest(state_of or run.digest()))
        store.save(state, state, now=1000.0)
    return run


def write_lost_anew_after(home: Path, *lost: Path) -> list[Path]:
    """What is written once those files are gone."""
    for path in lost:
        path.unlink(missing_ok=True)
    return write_lost_anew(home / "run.toml")


@pytest.mark.usefixtures("described_here")
def test_a_description_that_lost_its_keys_is_not_that_of_a_run_without_weights(
    llama: Path, tmp_path: Path
) -> None:
    home = tmp_path / "given"
    made(home, "--from", llama, "--data", llama.parent / "tokens", "--context", 32)
    assert load_run_folder(home, "run.toml").first_digest is not None
    (home / "description.json").write_text("{}")
    with pytest.raises(ConfigError, match="it does not say what it was made of"):
        load_run_folder(home, "run.toml")


@pytest.mark.usefixtures("described_here")
def test_a_fork_of_given_weights_takes_no_others(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fork = tmp_path / "fork"
    asked = ("--data", llama.parent / "tokens", "--context", 32, "--by", "transformers")
    forked(fork, "--from", llama, *asked)
    assert init(tmp_path / "run", "--run", fork / "run.toml", "--from", llama) == 64
    assert "begins with the weights beside it" in capfd.readouterr().err
    made(tmp_path / "run", "--run", fork / "run.toml")
