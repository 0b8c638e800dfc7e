"""Models, code, adapters and private data of one's own: each door is one `atoll init`."""

import json
import sys
from pathlib import Path

import click
import numpy as np
import pytest

from coordinator import new_run as command
from coordinator.presets import loss
from coordinator.presets.wanted import Wanted
from node.island.data.manifest import read_manifest
from node.island.models.code import code_digest
from node.models.reading import read_first
from protocol.errors import CannotCreateError
from protocol.run.run_files import load_run_file
from tests.unit.new_run_scene import EXAMPLES, VISION, described_here, init, llama, made
from tests.unit.tokens_scene import prepared

__all__ = ["described_here", "llama"]

SIZES = "hidden_size = 32\nnum_layers = 1\nnum_heads = 2\nnum_kv_heads = 1\nffn_size = 48\n"
NEXT_TOKEN = """
from torch import nn
from torch.nn.functional import cross_entropy

def model():
    net = nn.Sequential(nn.Embedding(512, 8), nn.Linear(8, 512))
    return net, lambda net, batch: cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten())
"""


@pytest.mark.usefixtures("described_here")
def test_adapters_are_one_command_and_say_what_nodes_need(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "run"
    tokens = llama.parent / "tokens"
    spec = made(home, "--from", llama, "--data", tokens, "--lora", 4, "--context", 32)
    assert (spec.model.source, spec.lora.rank, spec.model.context) == ("transformers", 4, 32)
    assert spec.num_parameters == sum(t.num_elements for t in spec.tensors if ".lora_" in t.name)
    assert spec.description is not None and spec.description.num_frozen > spec.num_parameters
    assert spec.inner.learning_rate == pytest.approx(2e-2), "ten times a fifth of a new model's"
    assert spec.outer.momentum == 0.6, "with weights that are given, and so low a rate"
    assert spec.data.digest == read_manifest(tokens).digest().hex()
    told = capfd.readouterr().out
    assert f"  atoll node start --base {llama}\n" in told
    assert f"--base {llama} --weights {home / 'first.safetensors'}\n" in told
    made(tmp_path / "again", "--run", home / "run.toml")
    assert "  atoll node start --base MODEL\n" in capfd.readouterr().out
    linked = ("--from", llama, "--data", tokens, "--lora", 4, "--context", 32, "--link", "10mbit")
    made(tmp_path / "linked", *linked, "--json")
    ranks = json.loads(capfd.readouterr().out)["node_bytes"]["ranks"]
    assert ranks == 16 * spec.num_parameters + 4 * spec.description.num_frozen


@pytest.mark.usefixtures("described_here")
def test_a_function_is_one_command_and_its_run_is_named_by_its_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "digits"
    spec = made(home, *VISION, "--batch", 16, "--json")
    assert (spec.run.name, spec.model.context, spec.inner.batch) == ("digits", 1, 16)
    assert spec.data.function == "vision:data"
    started = json.loads(capfd.readouterr().out)["start"]
    allowed = f"digits@{code_digest(spec)[:16]}"
    assert started["nodes"] == f"atoll node start --allow-function {allowed} --code {EXAMPLES}"
    assert started["first_weights"] == f"--weights {home / 'first.safetensors'}"


@pytest.mark.usefixtures("described_here")
def test_a_run_of_loops_names_no_data_and_its_function_may_return_the_module_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "alone.py").write_text(
        "from torch import nn\n\n\ndef model():\n"
        "    return nn.Sequential(nn.EmbeddingBag(5, 4, sparse=True), nn.Linear(4, 1))\n"
    )
    home = tmp_path / "run"
    spec = made(home, "--function", "alone:model", "--from", code, "--loop")
    assert (spec.data.source, spec.counted, spec.num_parameters) == ("loop", "samples", 25)
    told = capfd.readouterr().out
    assert "  atoll node start --loop\n" in told and "--allow-function" not in told
    assert f"  atoll node start --loop --weights {home / 'first.safetensors'}\n" in told
    assert "needs nothing of that" not in told
    made(tmp_path / "again", "--run", home / "run.toml")
    assert "  atoll node start --loop --weights" in capfd.readouterr().out
    words = ("--function", "alone:model", "--from", code, "--private", "--context", 8)
    assert init(tmp_path / "other", *words) == 65
    assert "Sequential instead of (module, loss)" in capfd.readouterr().err
    spec = made(tmp_path / "decoder", "--model", "0.2m", "--loop")
    assert (spec.data.source, spec.counted) == ("loop", "tokens")


@pytest.mark.usefixtures("described_here")
def test_a_run_file_of_loops_has_what_reaches_them_and_an_outer_step_for_what_they_train_by(
    tmp_path: Path, llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "one.py").write_text(
        "from torch import nn\n\n\ndef model():\n    return nn.Linear(700, 700)\n"
    )
    run = ("--function", "one:model", "--from", code, "--loop", "--link", "1mbit", "--step", "1s")
    by_adamw = made(tmp_path / "adamw", *run, "--total-steps", 300)
    by_sgd = made(tmp_path / "sgd", *run, "--total-steps", 300, "--optimizer", "sgd")
    assert by_adamw.outer.optimizer == "sgd", "the plain mean"
    assert (by_sgd.outer.optimizer, by_sgd.outer.learning_rate) == ("nesterov", 0.7)
    assert (by_sgd.outer.momentum, by_sgd.inner.optimizer) == (0.6, "sgd")
    often = made(tmp_path / "often", *run[:5], "--optimizer", "sgd", "--steps", 4)
    assert (often.outer.optimizer, often.outer.momentum) == ("sgd", 0.0)
    rarer = made(tmp_path / "rarer", *run[:5], "--optimizer", "sgd", "--steps", 5)
    assert (rarer.outer.optimizer, rarer.outer.momentum) == ("nesterov", 0.6)
    told = capfd.readouterr().out
    assert "4 nodes" in told and "spot checks" not in told, "nobody can train what a loop makes"
    for spec in (by_adamw, by_sgd, often, rarer):
        text = (tmp_path / spec.run.name / "run.toml").read_text()
        for key in ("paths", "held_out", "beta2", "weight_decay", "clip", "sparse", "prompts"):
            assert f"\n{key} " not in text, key
        assert "[lora]" not in text and "[exchange]" in text and "schedule =" in text
        assert "# what loops train by" in text
    adapters = made(tmp_path / "adapters", "--from", llama, "--loop", "--lora", 4)
    assert adapters.lora.rank == 4 and "alpha" in (tmp_path / "adapters" / "run.toml").read_text()
    assert init(tmp_path / "other", "--optimizer", "sgd") == 64
    assert "add --loop" in capfd.readouterr().err


@pytest.mark.usefixtures("described_here")
def test_a_transformers_folder_is_trained_by_loops_without_any_tokens(
    llama: Path, tmp_path: Path
) -> None:
    for more in ((), ("--lora", 4), ("--by", "transformers")):
        spec = made(tmp_path / "-".join(map(str, ("run", *more))), "--from", llama, "--loop", *more)
        assert spec.data.source == "loop"


def test_what_a_runs_code_prints_is_not_taken_for_what_was_found_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "talkative.py").write_text(
        "import os\n"
        "from vision import data, model as silent\n"
        "def model():\n"
        "    print('building the model')\n"
        "    os.write(1, b'and so says a library')\n"
        "    return silent()\n"
    )
    (code / "vision.py").write_text((EXAMPLES / "vision.py").read_text())
    words = ("--function", "talkative:model", "--data-function", "vision:data", "--from", code)
    spec = made(tmp_path / "run", *words)
    assert spec.description is not None and spec.num_parameters > 0
    told = capfd.readouterr()
    assert "building the model" in told.err and "and so says a library" in told.err
    assert "building" not in told.out


@pytest.mark.usefixtures("described_here")
def test_a_mixture_of_experts_is_one_command(llama: Path, tmp_path: Path) -> None:
    import transformers  # takes seconds

    config = transformers.MixtralConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "mixtral")
    tokens = llama.parent / "tokens"
    asked = ("--from", tmp_path / "mixtral", "--by", "transformers", "--data", tokens)
    spec = made(tmp_path / "run", *asked)
    assert spec.description is not None and spec.description.activation_bytes


@pytest.mark.usefixtures("described_here")
def test_private_data_are_one_command_with_the_tokenizer_of_the_model_or_one_that_is_named(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    manifest = read_manifest(llama.parent / "tokens")
    spec = made(tmp_path / "given", "--from", llama, "--private")
    assert (spec.data.private, spec.data.source) == (True, "tokens")
    assert spec.data.tokenizer == manifest.tokenizer_digest
    told = capfd.readouterr().out
    assert f"atoll node start --data TOKENS --weights {llama}\n" in told
    assert f"  atoll data prepare FILES --tokenizer {llama} --out TOKENS\n" in told
    new = made(tmp_path / "new", "--model", "0.2m", "--private", "--tokenizer", llama)
    assert new.data.tokenizer == manifest.tokenizer_digest
    assert new.decoder.vocab_size == manifest.vocab_size
    spec = made(tmp_path / "bytes", "--private")
    assert (spec.data.private, spec.data.source, spec.data.tokenizer) == (True, "text", None)
    assert spec.outer.merge == "mean", "what one node alone learns is no lie"
    told = capfd.readouterr().out
    assert "atoll node start --data FILES\n" in told
    assert "nobody can check what a holder trains" in " ".join(told.split()), (
        "said where it is made"
    )


@pytest.mark.usefixtures("described_here")
def test_what_a_transformers_folder_cannot_be_leaves_no_folder(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((llama / "config.json").read_text())
    for arguments, code, words in (
        (["--from", tmp_path / "bare", "--private"], 64, "there is no tokenizer.json"),
        (["--from", llama], 64, "no --data names any"),
        (["--from", llama, "--data", "nowhere"], 64, "--data nowhere is no folder of them"),
        (["--from", "owner/model", "--data", llama], 66, "hf download owner/model"),
        (["--data", "talk.jsonl"], 66, "is no text but a record a line"),
        (["--data", "talk.jsonl"], 66, "atoll data prepare talk.jsonl --out tokens"),
        (["--private", "--tokenizer", "nowhere"], 66, "the tokenizer nowhere is not there"),
        (["--from", llama, "--private", "--lora", 4, "--context", 999], 78, "64 positions"),
    ):
        assert init(tmp_path / "run", *arguments) == code
        assert words in capfd.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["bare"]


@pytest.mark.usefixtures("described_here")
def test_tokens_of_bytes_are_refused_for_a_model_that_has_a_tokenizer(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prepared(llama.parent / "text.jsonl", out=tmp_path / "bytes")
    assert init(tmp_path / "run", "--from", llama, "--data", tmp_path / "bytes") == 65
    told = capfd.readouterr().err
    assert f"are bytes, and the model in {llama} has a tokenizer" in told
    assert f"atoll data prepare … --tokenizer {llama}" in told


@pytest.mark.usefixtures("described_here")
def test_a_folder_without_weights_begins_with_random_ones_at_a_new_models_rate_and_says_so(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (bare / name).write_text((llama / name).read_text())
    asked = ("--data", llama.parent / "tokens", "--by", "transformers")
    new = made(tmp_path / "new", "--from", bare, *asked)
    assert f"{bare} has no weights, so the run begins with random ones" in capfd.readouterr().out
    given = made(tmp_path / "given", "--from", llama, *asked)
    assert (given.goes_on_with_weights, new.goes_on_with_weights) == (True, False), (
        "as advice goes by"
    )
    assert given.inner.learning_rate == pytest.approx(new.inner.learning_rate / 5)
    assert "random" not in capfd.readouterr().out
    (bare / "pytorch_model.bin").write_bytes(b"pickle")
    assert init(tmp_path / "run", "--from", bare, *asked) == 65
    assert "pytorch_model.bin only, and pickles are not read" in capfd.readouterr().err


@pytest.mark.usefixtures("described_here")
def test_a_new_run_says_how_often_it_goes_through_its_data(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokens = llama.parent / "tokens"
    asked = ("--from", llama, "--data", tokens, "--batch", 4, "--context", 32, "--nodes", 3)
    spec = made(tmp_path / "run", *asked)
    trained = spec.run.rounds * spec.inner.steps * 4 * 32 * 3
    times = trained / read_manifest(tokens).num_tokens("training")
    told = capfd.readouterr().out
    assert f"100 rounds of 3 nodes train 576.0k tokens, {times:.2g} times what the data" in told


@pytest.mark.usefixtures("described_here")
def test_tokens_that_are_no_batch_are_refused_when_the_run_is_made(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokens = llama.parent / "tokens"
    there = read_manifest(tokens).num_tokens("training")
    batch = sum((shard.num_tokens - 1) // 32 for shard in read_manifest(tokens).training) + 1
    asked = ("--from", llama, "--data", tokens, "--context", 32, "--batch")
    assert init(tmp_path / "run", *asked, batch) == 66
    told = capfd.readouterr().err
    assert (
        f"{there:,} tokens to train on, which are {batch - 1:,} samples of 32, and one batch"
        in told
    )
    assert not (tmp_path / "run").exists()
    made(tmp_path / "run", *asked, batch - 1)


def test_text_that_is_not_here_is_told_when_the_run_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = made(tmp_path / "run", "--data", tmp_path / "elsewhere" / "*.txt")
    assert spec.data.source == "text"
    assert "nothing of that name is here, so nodes will look for text" in capsys.readouterr().out


@pytest.mark.usefixtures("described_here")
@pytest.mark.parametrize(
    ("num_bytes", "context", "told"),
    [
        (40_000, 512, "samples of 512, and one batch takes 128"),
        (900_000, 131_072, "tokens are held out, and none of their shards has a sample of 131,072"),
    ],
)
def test_text_that_every_node_would_refuse_as_too_little_is_refused_when_the_run_is_made(
    num_bytes: int, context: int, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"some text " * (num_bytes // 10))
    batch = 128 if context == 512 else 1
    asked = ("--data", text, "--context", context, "--batch", batch)
    assert init(tmp_path / "run", *asked) == 66
    assert told in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
    made(tmp_path / "run", "--data", text, "--context", 64, "--batch", 4)


@pytest.mark.usefixtures("described_here")
def test_packed_tokens_say_the_context_and_another_one_is_refused(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokens, text = tmp_path / "tokens", llama.parent / "text.jsonl"
    prepared(text, out=tokens, tokenizer=llama, row=25)
    sizes = tmp_path / "sizes.toml"
    sizes.write_text(f"[model]\n{SIZES}context = 32\n")
    packed = ("--data", tokens, "--batch", 2)
    for number, named in enumerate((("--from", llama), ("--from", llama, "--lora", 2), ())):
        assert made(tmp_path / str(number), *named, *packed).model.context == 24
        assert f"context 24: the tokens in {tokens} are packed for it" in capfd.readouterr().out
    (code := tmp_path / "code").mkdir()
    (code / "next_token.py").write_text(NEXT_TOKEN)
    own = ("--function", "next_token:model", "--from", code)
    assert made(tmp_path / "own", *own, *packed).model.context == 24
    assert init(tmp_path / "run", *own, "--data", llama.parent / "tokens") == 64
    assert "nothing says how many a sample has" in capfd.readouterr().err
    made(tmp_path / "same", *packed, "--context", 24, "--model", sizes)
    assert "are packed" not in capfd.readouterr().out
    for named in (("--from", llama, "--context", 64), ("--context", 64), ("--model", sizes)):
        assert init(tmp_path / "run", *named, *packed) == 64
        told = capfd.readouterr().err
        assert "are packed for a context of 24, and" in told and "--pack " in told
        assert not (tmp_path / "run").exists()


def test_a_terminal_asks_for_what_goes_with_the_model_that_is_named(
    monkeypatch: pytest.MonkeyPatch, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answered(*answers: str) -> Wanted:
        left = iter(answers)

        def prompt(
            text: str, default: object = None, type: object = None, show_default: bool = True
        ) -> object:
            answer = next(left)
            # Click shows an empty one as [].
            assert default != "" or (text.endswith("]") and not show_default), text
            return default if answer == "" else type_of(default)(answer)

        monkeypatch.setattr(click, "prompt", prompt)
        wanted = command._answered(Wanted())
        assert not list(left), "everything was asked for"
        return wanted

    def type_of(default: object) -> type:
        return int if isinstance(default, int) else str

    wanted = answered(str(llama), "16", "private", "", "")
    assert (wanted.source, wanted.lora, wanted.private) == (llama, 16, True)
    wanted = answered("vision:model", str(EXAMPLES), "vision:data", "3", "100mbit")
    assert (wanted.function, wanted.data_function) == ("vision:model", "vision:data")
    assert (wanted.source, wanted.num_nodes, wanted.link) == (EXAMPLES, 3, "100mbit")
    wanted = answered("lm:model", "", "tokens", "64", "", "")
    assert (wanted.source, wanted.data, wanted.context) == (None, ("tokens",), 64)
    wanted = answered("gan:model", "", "loop", "sgd", "", "")
    assert (wanted.function, wanted.loop, wanted.data, wanted.context, wanted.optimizer) == (
        *("gan:model", True, ()),
        *(None, "sgd"),
    )
    wanted = answered("3m", "loop", "", "", "")
    assert (wanted.model, wanted.loop, wanted.data, wanted.optimizer) == ("3m", True, (), "muon")
    monkeypatch.setenv("HOME", str(llama.parent))
    wanted = answered("~/llama", "", "~/tokens", "", "")
    assert (wanted.source, wanted.data) == (llama, (str(llama.parent / "tokens"),)), (
        "as a shell does"
    )
    wanted = answered("3m", "a.txt b.txt", "", "")
    assert (wanted.model, wanted.data, wanted.lora) == ("3m", ("a.txt", "b.txt"), None)
    # What cannot be is said at once, and asked again.
    capsys.readouterr()
    bad_models = ("4m", str(llama.parent), "vision:", "no-such.toml")
    wanted = answered(*bad_models, "3m", "", "", "fast", "100mbit")
    assert (wanted.model, wanted.link) == ("3m", "100mbit")
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 5
    assert "'4m' is neither a size nor a file; choose one of 0.2m" in told[0]
    assert "is no folder of transformers: it has no config.json" in told[1]
    assert "vision: names no function" in told[2]
    assert "'fast'" in told[4]


def test_on_a_terminal_a_folder_that_is_taken_is_refused_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").touch()
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(click, "prompt", lambda *_, **__: pytest.fail("it asks"))
    with pytest.raises(CannotCreateError, match="exists and is not empty"):
        command.init.main([str(tmp_path)], standalone_mode=False)


@pytest.mark.usefixtures("described_here")
def test_a_run_file_goes_on_saying_all_of_it_with_its_code_beside(tmp_path: Path) -> None:
    spec = made(tmp_path / "run", "--run", EXAMPLES / "vision.toml", "--from", EXAMPLES)
    assert spec.description is not None and spec.description.sources
    assert load_run_file(tmp_path / "run" / "run.toml") == load_run_file(EXAMPLES / "vision.toml")


@pytest.mark.usefixtures("described_here")
@pytest.mark.parametrize("by", ["decoder", "transformers"])
def test_nodes_can_begin_with_the_weights_whatever_fragments_were_chosen_for_a_link(
    by: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "_cuts", lambda situation, given: [(2, 4)])  # as for larger models
    tokens = ("--data", llama.parent / "tokens", "--context", 32, "--by", by)
    spec = made(tmp_path / "run", "--from", llama, *tokens, "--link", "10mbit", "--step", "1s")
    assert spec.exchange.fragments == 2
    given = llama if by == "decoder" else tmp_path / "run"
    read_first(given, spec, np.empty(spec.num_parameters, np.float32))
