"""What people name as a model's folder and is none, or not a whole one, is told with what to name instead."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MixtralForCausalLM,
)

from coordinator.presets import loss
from node.island.data.tokenizing import open_tokenizer, tokenizer_files
from node.island.models.transformers import saved_model
from node.models.folders import name_of_model
from node.models.reading import StoredTensor, look_at_first, look_at_model
from node.outer_state import Vector
from protocol.errors import AtollError, BadDataError
from tests.transformers_configs import CONFIGS, SIZES
from tests.unit.new_run_scene import described_here, init, llama, made
from tests.unit.tokens_scene import prepared, write_jsonl

__all__ = ["described_here", "llama"]

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
ADAPTERS = '{"base_model_name_or_path": "Qwen/Qwen2-0.5B", "peft_type": "LORA"}'


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A whole model's, to be spoilt."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def with_adapters_alone(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text(ADAPTERS)
    save_file({"x.lora_A.weight": torch.zeros(1)}, folder / "adapter_model.safetensors")
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()
    return folder


def with_adapters_and_a_config(folder: Path) -> Path:
    """As axolotl leaves them."""
    with_adapters_alone(folder)
    (folder / "config.json").write_text("{}")
    return folder


def with_adapters_of_atoll(folder: Path) -> Path:
    with_adapters_alone(folder)
    (folder / "atoll.json").write_text("{}")
    return folder


def with_adapters_beside_weights(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text(ADAPTERS)
    return folder


def that_holds_checkpoints(folder: Path) -> Path:
    shutil.copytree(folder, folder.parent / "out" / "checkpoint-500")
    return folder.parent / "out"


def of_the_hubs_cache(folder: Path) -> Path:
    root = folder.parent / "models--meta--tiny"
    shutil.copytree(folder, root / "snapshots" / "abc123")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc123")
    return root


def with_links_to_nowhere(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/4d7a21")
    return folder


def with_a_pointer_for_weights(folder: Path) -> Path:
    (folder / "model.safetensors").write_text(LFS)
    return folder


def with_a_pointer_for_its_config(folder: Path) -> Path:
    (folder / "config.json").write_text(LFS)
    return folder


def in_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, own in enumerate((names[:4], names[4:]), 1):
        shard = {name: tensors[name] for name in own}
        save_file(shard, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
    index = {name: f"model-{1 + (name not in names[:4])}.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def without_its_index(folder: Path) -> Path:
    in_shards(folder)
    (folder / "model.safetensors.index.json").unlink()
    return folder


def without_a_shard(folder: Path) -> Path:
    in_shards(folder)
    (folder / "model-2.safetensors").unlink()
    return folder


def cut_off(folder: Path) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    return folder


def quantised(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    how = {"quant_method": "gptq", "bits": 4, "modules_to_not_convert": ["lm_head"] * 40}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    return folder


def only_as(name: str) -> Callable[[Path], Path]:
    def spoil(folder: Path) -> Path:
        (folder / "model.safetensors").rename(folder / name)
        (folder / "optimizer.pt").touch()
        return folder

    spoil.__name__ = f"only_as_{name}"
    return spoil


def as_a_file_of_gguf(folder: Path) -> Path:
    path = folder / "tiny-Q4_K_M.gguf"
    path.touch()
    return path


def of_gguf(folder: Path) -> Path:
    other = folder.parent / "gguf"
    other.mkdir()
    (other / "tiny-Q4_K_M.gguf").touch()
    return other


@pytest.mark.parametrize(
    ("spoil", "words", "next_step"),
    [
        (with_adapters_alone, "holds adapters of Qwen/Qwen2-0.5B", "merge_and_unload"),
        (with_adapters_and_a_config, "holds adapters of Qwen/Qwen2-0.5B", "merge_and_unload"),
        (with_adapters_of_atoll, "holds adapters of Qwen/Qwen2-0.5B", "atoll export --merged"),
        (with_adapters_beside_weights, "holds adapters of Qwen/Qwen2-0.5B", "merge_and_unload"),
        (
            that_holds_checkpoints,
            "has no config.json, and 1 below it has one",
            "out/checkpoint-500",
        ),
        (of_the_hubs_cache, "has no config.json, and 1 below it has one", "snapshots/abc123"),
        (with_links_to_nowhere, "is a link to ../../blobs/4d7a21, which is not there", "cp -rL"),
        (with_a_pointer_for_weights, "is a pointer of Git LFS", "git lfs pull"),
        (with_a_pointer_for_its_config, "is a pointer of Git LFS", "git lfs pull"),
        (without_its_index, "has model-1.safetensors, and neither model.safetensors nor", "copy"),
        (without_a_shard, "model-2.safetensors is not there", "copy the whole folder"),
        (cut_off, "is damaged or cut off", "copy the whole folder"),
        (quantised, "says that the model is quantised (gptq), and", "that it was quantised from"),
        (only_as("pytorch_model-00001-of-00002.bin"), "pickles are not read", "save_pretrained"),
        (only_as("pytorch_model.bin"), "pickles are not read", "save_pretrained"),
        (only_as("consolidated.00.pth"), "pickles are not read", "save_pretrained"),
        (only_as("consolidated.safetensors"), "only safetensors are read", "save_pretrained"),
        (only_as("tiny.gguf"), "has its weights as tiny.gguf only", "save_pretrained"),
        (only_as("tf_model.h5"), "has its weights as tf_model.h5 only", "save_pretrained"),
        (as_a_file_of_gguf, "is a file, and a model is taken from a folder", "safetensors"),
        (of_gguf, "and weights are in tiny-Q4_K_M.gguf only", "safetensors"),
    ],
)
@pytest.mark.parametrize("look", [look_at_model, saved_model])
def test_a_folder_that_is_no_whole_model_is_told_with_what_to_name(
    look: Callable[[Path], object],
    spoil: Callable[[Path], Path],
    words: str,
    next_step: str,
    folder: Path,
) -> None:
    look(folder)
    with pytest.raises(AtollError) as refused:
        look(spoil(folder))
    assert words in refused.value.what
    assert next_step in refused.value.next_step
    assert len(refused.value.what) < 300, "as where a whole table of the config is printed"


@pytest.mark.parametrize(
    ("named", "fetched"),
    [
        ("Qwen/Qwen2-0.5B", "'hf download Qwen/Qwen2-0.5B --local-dir Qwen2-0.5B'"),
        (
            "Qwen/Qwen2-0.5B@v2",
            "'hf download Qwen/Qwen2-0.5B --revision v2 --local-dir Qwen2-0.5B'",
        ),
        ("https://huggingface.co/Qwen/Qwen2-0.5B", "'hf download Qwen/Qwen2-0.5B --local-dir"),
        ("https://huggingface.co/Qwen/Qwen2-0.5B/tree/v2", "Qwen2-0.5B --revision v2 --local-dir"),
    ],
)
def test_a_name_on_the_hub_is_told_with_what_fetches_it(
    named: str, fetched: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AtollError, match="is not there") as refused:
        look_at_model(Path(named))
    assert fetched in refused.value.next_step
    assert refused.value.next_step.endswith("then --from Qwen2-0.5B")


@pytest.mark.parametrize(
    ("spoil", "words", "next_step"),
    [
        (of_the_hubs_cache, "has no tokenizer.json, and 1", "snapshots/abc123"),
        (lambda folder: spoilt(folder, "pointer"), "is a pointer of Git LFS", "git lfs pull"),
        (lambda folder: spoilt(folder, "link"), "is a link to ../blobs/1, which is not", "cp -rL"),
        (lambda folder: spoilt(folder, "nothing"), "has no tokenizer.json", "AutoTokenizer"),
        (lambda _: Path("Qwen/Qwen2-0.5B"), "is not there", "then --tokenizer Qwen2-0.5B"),
    ],
)
def test_a_folder_without_its_tokenizer_is_told_likewise(
    spoil: Callable[[Path], Path], words: str, next_step: str, folder: Path
) -> None:
    named = spoil(folder)
    with pytest.raises(AtollError) as refused:
        open_tokenizer(tokenizer_files(named)["tokenizer.json"])
    assert words in refused.value.what
    assert next_step in refused.value.next_step


def spoilt(folder: Path, left: str) -> Path:
    """The folder with this in the place of its tokenizer."""
    path = folder / "tokenizer.json"
    path.unlink()
    if left == "pointer":
        path.write_text(LFS)
    elif left == "link":
        path.symlink_to("../blobs/1")
    return folder


def test_a_snapshot_in_the_hubs_cache_is_known_by_its_name_on_the_hub() -> None:
    cache = Path("/home/me/.cache/huggingface/hub")
    assert name_of_model(cache / "models--Qwen--Qwen2-0.5B/snapshots/abc") == "Qwen/Qwen2-0.5B"
    assert name_of_model(cache / "models--gpt2/snapshots/abc") == "gpt2"
    assert name_of_model(Path("/srv/snapshots/tiny")) == name_of_model(Path("/srv/tiny")) == "tiny"


@pytest.mark.usefixtures("described_here")
@pytest.mark.parametrize("by", [("--by", "decoder"), ("--by", "transformers"), ("--lora", "2")])
def test_weights_that_are_no_numbers_are_refused_by_their_tensor(
    by: tuple[str, str],
    llama: Path,
    folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][1, 2:4] = torch.tensor([float("nan"), float("inf")])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = ("--data", llama.parent / "tokens", "--context", 32)
    assert init(tmp_path / "run", "--from", folder, *tokens, *by) == 65
    assert f"{name} in {folder} has 2 values that are no finite numbers" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("described_here")
def test_what_is_wrong_with_data_is_told_before_weights_are_read(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(StoredTensor, "read", lambda *_: pytest.fail("it reads"))
    tokens = ("--data", llama.parent / "tokens", "--context", 32, "--batch", 10_000_000)
    assert init(tmp_path / "run", "--from", llama, *tokens) == 66
    assert "one batch takes 10,000,000" in capfd.readouterr().err


@pytest.mark.usefixtures("described_here")
@pytest.mark.parametrize("fragments", [1, 2])
def test_weights_are_read_once_whatever_fragments_are_chosen(
    fragments: int, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "_cuts", lambda situation, given: [(fragments, 4)])
    names: list[str] = []
    read = StoredTensor.read

    def counted(tensor: StoredTensor, out: Vector) -> None:
        names.append(tensor.name)
        read(tensor, out)

    monkeypatch.setattr(StoredTensor, "read", counted)
    tokens = ("--data", llama.parent / "tokens", "--context", 32)
    spec = made(tmp_path / "run", "--from", llama, *tokens, "--link", "10mbit", "--step", "1s")
    assert spec.exchange.fragments == fragments
    assert spec.first_digest is not None
    assert sorted(names) == sorted(tensor.name for tensor in spec.tensors)


@pytest.mark.usefixtures("described_here")
@pytest.mark.parametrize(("rank", "is_told"), [(2, False), (64, True)])
def test_adapters_that_are_more_than_their_model_are_told(
    rank: int, is_told: bool, llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokens = ("--data", llama.parent / "tokens", "--context", 32)
    made(tmp_path / "run", "--from", llama, *tokens, "--lora", rank)
    told = f"adapters of rank {rank} have more parameters than the model below them"
    assert (told in capfd.readouterr().out) == is_told


@pytest.mark.usefixtures("described_here")
def test_a_folder_whose_tensors_have_other_names_on_disk_is_told_with_the_file_that_fits(
    llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mixtral"
    MixtralForCausalLM(CONFIGS["mixtral"]).save_pretrained(folder)
    write_jsonl(tmp_path / "text.jsonl", 100)
    prepared(tmp_path / "text.jsonl", out=tmp_path / "tokens")  # bytes
    run, tokens = tmp_path / "run", ("--data", tmp_path / "tokens", "--context", 16)
    spec = made(run, "--from", folder, "--by", "transformers", *tokens)
    look_at_first(run, spec)
    with pytest.raises(BadDataError, match="has no tensor") as refused:
        look_at_first(folder, spec)
    assert (
        "name the first.safetensors of the folder that 'atoll init' made" in refused.value.next_step
    )


@pytest.mark.usefixtures("described_here")
def test_of_a_model_of_images_too_the_language_model_trains_as_the_docs_take_it_out(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = Path("gemma-3-4b")
    vocab_size = AutoConfig.from_pretrained(llama).vocab_size
    text = {key: value for key, value in SIZES.items() if "token_id" not in key}
    sees = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = Gemma3Config(
        text_config=text | {"vocab_size": vocab_size},
        vision_config=sees | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=1,
        image_token_index=1,
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(whole)
    asked = ("--by", "transformers", "--data", llama.parent / "tokens", "--context", 32)
    for more in ((), ("--lora", 2)):
        assert init(tmp_path / "no", "--from", whole, *asked, *more) == 78
        assert "save its language model as a folder of its own" in capfd.readouterr().err
    page = (Path(__file__).parents[2] / "docs" / "models-and-data.md").read_text()
    (lines,) = re.findall(r"```python\n(from transformers .*?)```", page, re.DOTALL)
    exec(lines, {})
    shutil.copy(llama / "tokenizer.json", f"{whole}-text")
    spec = made(tmp_path / "run", "--from", f"{whole}-text", *asked)
    taken = saved_model(Path(f"{whole}-text")).eval()
    tokens = torch.arange(2, 14)[None]
    with torch.no_grad():
        theirs = model(input_ids=tokens).logits
        torch.testing.assert_close(taken(input_ids=tokens).logits, theirs, rtol=0, atol=1e-5)
    assert spec.description is not None
    assert spec.description.config["model_type"] == "gemma3_text"
