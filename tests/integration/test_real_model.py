"""From a transformers folder and text to a trained transformers folder, by the commands that people type."""

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from typed_commands import Swarm, atoll, done, refused

from node.newest import newest_model

CONTEXT = 32
TEXTS = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py"))[:12]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model of SmolLM2's kind, with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("model") / "small"
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in TEXTS], trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>"
    ).save_pretrained(folder)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=500,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokens(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tokens"
    made = atoll(
        "data", "prepare", *TEXTS, "--tokenizer", model_folder, "--held-out", "0.2", "--out", folder
    )
    assert made.code == 0, made.err
    return folder


@pytest.fixture
def swarm(tmp_path: Path, model_folder: Path, tokens: Path) -> Iterator[Swarm]:
    swarm = Swarm.made(
        tmp_path / "swarm",
        *("--from", model_folder, "--data", tokens, "--context", str(CONTEXT)),
        *("--batch", "8", "--steps", "10", "--nodes", "2", "--name", "real-model"),
        changes={"rounds": 4, "every_rounds": 2, "samples": 16, "learning_rate": 3e-3},
    )
    yield swarm
    swarm.end()


def test_a_model_of_transformers_goes_in_and_a_better_one_comes_out(
    swarm: Swarm, model_folder: Path, tmp_path: Path
) -> None:
    invite = swarm.invite("--uses", "2")
    homes = [swarm.join(name, invite) for name in ("has-weights", "fetches")]
    nodes = [
        swarm.start_node("has-weights", "--weights", str(model_folder)),
        swarm.start_node("fetches"),
    ]
    memories = [node.shared_memory() for node in nodes]
    for node, memory in zip(nodes, memories, strict=True):
        node.ends(memory)
    models = [newest_model(home) for home in homes]
    assert models[0].outer_digest == models[1].outer_digest
    losses = json.loads(done(atoll("status", "--json", "--dir", swarm.home)))["run"][
        "held_out_losses"
    ]
    assert losses[-1]["loss"] < losses[0]["loss"] - 0.3
    assert " bits a byte" in done(atoll("status", "--dir", swarm.home))

    out = tmp_path / "out"
    done(atoll("export", out, "--dir", homes[1]))
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert type(model) is transformers.LlamaForCausalLM
    assert (
        tokenizer.get_vocab()
        == transformers.AutoTokenizer.from_pretrained(model_folder).get_vocab()
    )
    prompt = tokenizer("import os\n\n\ndef ", return_tensors="pt")["input_ids"]
    before = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.no_grad():
        assert model(prompt, labels=prompt).loss < before(prompt, labels=prompt).loss
    assert len(model.generate(prompt, max_new_tokens=8)[0]) > prompt.shape[1]
    assert done(atoll("sample", "--dir", homes[0], "--prompt", "import ", "--tokens", "8"))


def test_a_model_of_tokens_is_not_trained_on_bytes(model_folder: Path, tmp_path: Path) -> None:
    refused(
        atoll("init", tmp_path / "run", "--from", model_folder),
        64,
        "is one of tokens, and no --data names any",
        "atoll data prepare",
    )
    assert not (tmp_path / "run").exists()


def test_tokens_of_another_tokenizer_are_refused(
    model_folder: Path, tokens: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in model_folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<|endoftext|>"', '"<|end|>"'))
    refused(
        atoll("init", tmp_path / "run", "--from", other, "--data", tokens),
        65,
        "were made with another tokenizer",
    )
    assert not (tmp_path / "run").exists()
