"""What is held out keeps its source, and a model's held-out loss is told for each of them."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from node.island.data.fetching import PieceCache
from node.island.data.manifest import read_manifest
from node.island.data.opening import keep_manifest, open_dataset
from node.island.data.places import DataPlaces
from node.island.data.shard_plan import names_of_sources
from node.island.island import Evaluation
from node.island.parallel.mesh import Mesh
from node.island.training.trainer import Trainer
from node.kept import kept_model, kept_run
from protocol.errors import ExitCode
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec
from protocol.terminal import console
from protocol.terminal.cli import root
from tests.unit.test_forking import node_home, weights_of
from tests.unit.tokens_scene import documents_of, prepared, spec_of


def write_sources(folder: Path) -> None:
    """Two sources that are not equally hard, and a third without a name."""
    for name, word in (("code", "x = x"), ("prose", "said the old"), ("rest", "&%$ /")):
        (folder / name).mkdir(parents=True)
        lines = [json.dumps({"text": f"{word} {i} " * 12}) + "\n" for i in range(60)]
        (folder / name / "a.jsonl").write_text("".join(lines))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    write_sources(tmp_path)
    repeated = ((str(tmp_path / "code" / "*.jsonl"), 2.0), (str(tmp_path / "prose"), 1.0))
    prepared(
        *(tmp_path / n for n in ("code", "prose", "rest")), out=tmp_path / "out", repeated=repeated
    )
    return tmp_path / "out"


def measured(spec: RunSpec, folder: Path) -> Evaluation:
    trainer = Trainer(
        spec=spec,
        corpus=open_dataset(spec, DataPlaces(folder=folder)),
        device=torch.device("cpu"),
        mesh=Mesh(),
        clock=time.monotonic,
    )
    size = layout_of(spec).num_elements
    return trainer.evaluate_at(np.random.default_rng(0).normal(0, 0.3, size).astype(np.float32))


def test_held_out_documents_lie_in_shards_of_their_source(tokens: Path) -> None:
    manifest = read_manifest(tokens)
    assert [shard.source for shard in manifest.held_out] == ["code", "prose", ""]
    assert {shard.source for shard in manifest.training} == {""}
    documents = iter(documents_of(tokens, "held_out"))
    for shard, word in zip(manifest.held_out, (b"x = x", b"said the", b"&%$"), strict=True):
        assert shard.num_documents > 3
        assert all(next(documents).startswith(word) for _ in range(shard.num_documents))


def test_a_document_is_shown_with_its_source(
    tokens: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ["data", "show", str(tokens), "--held-out", "--document", "0"]
    assert console.run(root, asked) == ExitCode.OK
    assert "document 0, in held-out-00000.tokens of code: " in capfd.readouterr().out


def test_files_that_are_held_out_are_sources_where_there_are_several(tmp_path: Path) -> None:
    write_sources(tmp_path)
    exams = tuple(str(tmp_path / name) for name in ("code", "prose"))
    for held_out, names in ((exams, ["code", "prose"]), (exams[:1], [""])):
        out = tmp_path / f"out-{len(held_out)}"
        prepared(tmp_path / "rest", out=out, held_out_inputs=held_out)
        assert [shard.source for shard in read_manifest(out).held_out] == names


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (("/home/me/code/*.jsonl", "prose"), ["code", "prose"]),
        (("a/code.jsonl.gz", "./b/chats-[0-9]*"), ["code", "b"]),
        (("a/web/*", "b/web/*"), ["a/web", "b/web"]),
        (("*.txt", "*.jsonl"), ["source 1", "source 2"]),
    ],
)
def test_sources_have_short_names_that_tell_no_place_of_a_machine(
    patterns: tuple[str, ...], names: list[str]
) -> None:
    assert list(names_of_sources(patterns).values()) == names


def test_an_evaluation_tells_the_loss_of_each_source_and_theirs_make_the_whole(
    tokens: Path,
) -> None:
    spec = spec_of(tokens)
    found = measured(spec, tokens.parent)
    assert [each.source for each in found.by_source] == ["code", "prose", ""]
    losses = [each.loss for each in found.by_source]
    weights = [each.tokens for each in found.by_source]
    assert len({round(loss, 3) for loss in losses}) == 3
    assert sum(weights) == found.tokens == spec.evaluation.samples * spec.model.context
    assert found.loss == pytest.approx(np.average(losses, weights=weights), rel=1e-6)


def test_the_loss_of_a_source_is_that_of_its_documents_alone(tokens: Path) -> None:
    tmp_path = tokens.parent
    prepared(tmp_path / "code", out=tmp_path / "alone")
    every = {"evaluation": spec_of(tokens).evaluation.model_copy(update={"samples": 1 << 20})}
    among = measured(spec_of(tokens).model_copy(update=every), tmp_path)
    alone = measured(spec_of(tmp_path / "alone").model_copy(update=every), tmp_path)
    assert alone.by_source == ()  # there is one alone
    code = among.by_source[0]
    assert code.tokens == alone.tokens and code.loss == pytest.approx(alone.loss, rel=1e-6)


@pytest.fixture
def home(tokens: Path) -> Path:
    """A node's folder whose run trains on the tokens."""
    data = spec_of(tokens).data.model_dump(mode="json")
    model: dict[str, object] = {"vocab_size": 256, "context": 16}
    return node_home(tokens.parent / "node", data=data, model=model)


@pytest.mark.filterwarnings("error::UserWarning")
def test_the_command_measures_a_kept_model_by_source(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", "--dir", str(home), "--held-out"]
    assert console.run(root, [*command, "--json", "--round", "16"]) == ExitCode.OK
    told = json.loads(capfd.readouterr().out)
    assert (told["round"], [one["source"] for one in told["by_source"]]) == (
        16,
        ["code", "prose", ""],
    )
    model = kept_model(home, 16)
    assert (model.parameters == weights_of(16, len(model.parameters))).all()
    assert told["tokens"] == model.spec.evaluation.samples * 16
    assert console.run(root, [*command, "--samples", "100000"]) == ExitCode.OK
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("held-out loss ") and "others" in lines[3]
    tokens = [int(line.split()[-2].replace(",", "")) for line in lines]
    assert tokens[0] == sum(tokens[1:]) > told["tokens"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "nothing says what the model is measured on"),
        (("--held-out", "--tasks", "mine"), "--tasks mine is for lm-eval"),
        (("--tasks", "mine", "--json"), "--samples and --json belong to --held-out"),
    ],
)
def test_what_the_command_would_not_heed_is_refused(
    home: Path, options: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert console.run(root, ["evaluate", "--dir", str(home), *options]) == ExitCode.USAGE
    assert said in capfd.readouterr().err


def test_tokens_that_are_not_here_are_missed_in_a_sentence(
    home: Path, tokens: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokens.rename(tokens.parent / "elsewhere")
    assert console.run(root, ["evaluate", "--dir", str(home), "--held-out"]) == ExitCode.NO_INPUT
    assert "holds no tokens" in capfd.readouterr().err


def test_what_peers_gave_of_the_tokens_is_measured_on_and_what_is_gone_is_named(
    home: Path, tokens: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    manifest = read_manifest(tokens)
    cache = home / "data-cache"
    keep_manifest(kept_run(home), cache, manifest.as_written())
    kept = PieceCache(cache, limit_bytes=1 << 30)
    for shard in manifest.held_out:
        (digest,) = manifest.files[shard.tokens].pieces
        kept.put(digest, (tokens / shard.tokens).read_bytes())
    tokens.rename(tokens.parent / "elsewhere")
    asked = ["evaluate", "--dir", str(home), "--held-out"]
    assert console.run(root, asked) == ExitCode.OK
    assert "  prose   " in capfd.readouterr().out
    kept.path_of(digest).unlink()
    assert console.run(root, asked) != ExitCode.OK
    assert (
        f"piece 0 of {shard.tokens} came from peers and is not in {cache}" in capfd.readouterr().err
    )
