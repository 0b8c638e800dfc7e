"""A model of transformers goes into a swarm as a folder, is trained there, and comes out as one."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from node import kept
from node.island.models.generate import decoder_of
from node.kept import kept_model
from protocol.run.run_files import load_run_file
from tests.integration.typed_commands import Swarm, atoll, done, refused, typed_here
from tests.unit.tokens_scene import write_jsonl, write_tokenizer


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen 3 with its tokenizer, and beside it tokens of that tokenizer."""
    import transformers  # takes seconds

    folder = tmp_path_factory.mktemp("models") / "qwen"
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=64,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        eos_token_id=0,
    )
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.generation_config.update(do_sample=True, top_k=7)
    model.save_pretrained(folder)
    write_tokenizer(folder, is_chat=True)
    write_jsonl(folder.parent / "text.jsonl", 300)
    tokens = folder.parent / "tokens"
    done(
        typed_here(
            "data", "prepare", folder.parent / "text.jsonl", "--tokenizer", folder, "--out", tokens
        )
    )
    return folder


@pytest.fixture
def swarm(qwen: Path, tmp_path: Path) -> Iterator[Swarm]:
    """A run for slow links, which cut the model into fragments: the order of its values is another then."""
    swarm = Swarm.made(
        tmp_path / "swarm",
        *("--from", qwen, "--data", qwen.parent / "tokens"),
        *("--nodes", "2", "--context", "32", "--steps", "5"),
        *("--link", "256kbit", "--step", "100ms"),
        changes={"rounds": 3, "learning_rate": 3e-3},
    )
    assert load_run_file(swarm.home / "run.toml").exchange.fragments == 2
    yield swarm
    swarm.end()


def test_a_folder_is_trained_by_two_nodes_and_loads_again_as_the_same_kind_of_model(
    swarm: Swarm, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers  # takes seconds

    invite = swarm.invite("--uses", "2")
    homes = [swarm.join(name, invite) for name in ("alone", "two-ranks")]
    nodes = [
        swarm.start_node("alone"),
        swarm.start_node("two-ranks", "--weights", str(qwen), "--ranks", "2", "--tp", "2"),
    ]
    for node in nodes:
        node.ends(set())
    models = [kept_model(home) for home in homes]
    assert models[0].outer_digest == models[1].outer_digest
    told = json.loads(done(typed_here("status", "--json", "--dir", swarm.home)))["run"]
    first, *_, last = [measured["loss"] for measured in told["held_out_losses"]]
    assert last < first - 0.3
    assert " bits a byte" in done(typed_here("status", "--dir", swarm.home))
    out, as_it_came = swarm.folder / "out", swarm.folder / "as-it-came"
    assert " in bf16, rounded" in done(typed_here("export", as_it_came, "--dir", homes[0]))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(as_it_came)
    assert loaded.dtype == torch.bfloat16, "as the folder that the run began with"
    with monkeypatch.context() as patch:
        patch.setattr(kept, "MANY_PARAMETERS", models[0].layout.num_elements)
        exported = typed_here("export", out, "--dir", homes[0], "--dtype", "fp32")
    assert done(exported).startswith("wrote the model at round 3")
    reads, writes = exported.err.splitlines()
    assert reads.startswith("reading the state in ") and f"of round 3 to {out}: " in writes
    written = done(typed_here("sample", "--dir", homes[0], "--prompt", "word1x1", "--tokens", "5"))
    refused(
        typed_here("sample", "--dir", homes[0], "--bytes", "5"),
        64,
        "--bytes 5 is for a run whose tokens",
    )
    assert written.startswith("word1x1")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(theirs) is transformers.Qwen3ForCausalLM
    assert theirs.generation_config.top_k == 7
    assert theirs.config.max_position_embeddings == 64, "though samples were of 32"
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    prompt = tokenizer("word1x1 word1x2 word1x3 word1x4", return_tensors="pt").input_ids
    assert prompt.shape[1] > 8, "more than the window"
    with torch.no_grad():
        ours = decoder_of(models[0].spec, models[0].parameters)(prompt)
        torch.testing.assert_close(theirs(prompt).logits, ours, rtol=0, atol=1e-5)
    about = json.loads((out / "atoll.json").read_text())
    assert about["round"] == 3
    assert about["outer_digest"] == models[0].outer_digest.hex()
    assert len(about["tokens_by_node"]) == 2
    assert sum(about["tokens_by_node"].values()) == about["tokens"] > 0
    card = (out / "README.md").read_text()
    assert f"| tokens trained | {about['tokens']:,} |" in card


@pytest.fixture
def folder(qwen: Path, tmp_path: Path) -> Path:
    """A copy of the model's, to be spoilt."""
    return Path(shutil.copytree(qwen, tmp_path / "model"))


def refuses_to_begin(folder: Path, qwen: Path, code: int, words: str) -> None:
    new = folder.parent / "new"
    refused(atoll("init", new, "--from", folder, "--data", qwen.parent / "tokens"), code, words)
    assert not new.exists()


def spoil_config(folder: Path, key: str, value: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))


def test_a_folder_that_cannot_be_taken_makes_no_run(folder: Path, qwen: Path) -> None:
    """All that cannot be taken: tests/unit/test_families.py and test_model_folder.py."""
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-7])
    refuses_to_begin(folder, qwen, 65, "is damaged or cut off")
    (folder / "model.safetensors").write_bytes(whole)
    spoil_config(folder, "model_type", "gpt2")
    refuses_to_begin(folder, qwen, 65, "says model_type = 'gpt2'")


@pytest.mark.nightly
def test_a_folder_of_another_kind_or_with_parts_missing_makes_no_run(
    folder: Path, qwen: Path
) -> None:
    config = (folder / "config.json").read_text()
    for key, value, words in (
        ("rope_parameters", {"rope_type": "yarn"}, "says rope_type = 'yarn'"),
        ("hidden_size", "wide", "hidden_size = 'wide'"),
    ):
        spoil_config(folder, key, value)
        refuses_to_begin(folder, qwen, 65, words)
        (folder / "config.json").write_text(config)
    (folder / "model.safetensors").unlink()
    refuses_to_begin(folder, qwen, 66, "has no weights")
    (folder / "config.json").unlink()
    refuses_to_begin(folder, qwen, 66, "config.json is not there")


def test_what_a_model_was_not_made_for_is_refused_before_there_is_a_run(
    qwen: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    refused(
        atoll("init", new, "--from", qwen),
        64,
        "is one of tokens, and no --data names any",
        "atoll data prepare",
    )
    other = tmp_path / "other"
    shutil.copytree(qwen, other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text + " ")
    refused(
        atoll("init", new, "--from", other, "--data", qwen.parent / "tokens"),
        65,
        "were made with another tokenizer",
    )
    assert not new.exists()
