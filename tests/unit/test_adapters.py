"""Adapters of a model that is left as it is: what is trained, how the rest is proved, and what comes out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from atoll import ModelMismatchError
from atoll.frozen import check_frozen
from atoll.optimizers import Optimizers
from atoll.weights import Place, check_model, check_scaling
from node.island.data.dataset import held_out_choice, read_corpus
from node.island.loops.messages import welcome
from node.island.models.describing import describe, export_state, first_vector
from node.island.models.generate import model_that_writes
from node.island.models.transformers import NextToken, saved_model
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import MeshShape, check_shape
from node.island.training.trainer import Trainer
from node.models.card import Origin
from node.models.export import export_model
from protocol.errors import BadDataError, ConfigError, NoInputError
from protocol.run.models import DecoderModel, TransformersModel, layout_of
from protocol.run.run_files import validated
from protocol.run.run_spec import DataSection, EvaluationSection, InnerSection, LoraSection, RunSpec
from protocol.wire.rounds import Digest
from tests.transformers_configs import CONFIGS, ODD
from tests.unit.test_transformers_models import published, with_text
from tests.unit.work_scene import inner_work

RUN = RunSpec(
    model=TransformersModel(source="transformers", context=16),
    data=DataSection(source="text", paths=("*.txt",), held_out=0.2),
    inner=InnerSection(batch=4, learning_rate=1e-2, schedule="constant", warmup_tokens=0),
    evaluation=EvaluationSection(samples=5),
    lora=LoraSection(rank=4, alpha=8.0),
)


def base_in(folder: Path, kind: str, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = CONFIGS[kind] if kind in CONFIGS else ODD[kind]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):  # which checkpoints have
            buffer.fill_(0.5 + seed)
    model.save_pretrained(folder)
    return folder


def described(base: Path, lora: LoraSection = RUN.lora) -> RunSpec:
    spec = RUN.model_copy(update={"lora": lora})
    return spec.model_copy(update={"description": describe(spec, base)})


def trainer_of(spec: RunSpec, folder: Path) -> Trainer:
    corpus = read_corpus(spec.data, context=16, batch=4, folder=folder)
    return Trainer(
        spec=spec, corpus=corpus, device=torch.device("cpu"), mesh=Mesh(), clock=lambda: 0.0
    )


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        output = model.eval()(input_ids=torch.arange(12)[None])
    logits: torch.Tensor = output.logits
    return logits


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "mixtral", "gemma4"])
def test_only_adapters_are_trained_and_they_begin_as_nothing(kind: str, tmp_path: Path) -> None:
    base = base_in(tmp_path / "base", kind)
    spec = described(base)
    assert all(".lora_A." in t.name or ".lora_B." in t.name for t in spec.tensors)
    assert {t.layer for t in spec.tensors} >= {0, 1}
    trainer = trainer_of(spec, with_text(tmp_path))
    trainer.take_base(base)
    trainer.adopt(first_vector(spec))
    before = trainer.evaluate()

    corpus = read_corpus(spec.data, context=16, batch=4, folder=tmp_path)
    windows = torch.from_numpy(
        corpus.batch("held_out", held_out_choice(5, corpus.num_held_out_samples)).tokens
    )
    with torch.no_grad():
        loss = NextToken(saved_model(base).eval())(windows[:, :-1], windows[:, 1:])
    assert before.loss == pytest.approx(loss.item(), abs=1e-5)

    trainer.train(inner_work(20), lambda progress: None)
    assert trainer.evaluate().loss < before.loss - 0.1
    assert len(published(trainer, spec)) == spec.num_parameters
    spec_of_all = spec.description
    assert spec_of_all is not None and spec.num_parameters < spec_of_all.num_frozen


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "mixtral", "gemma4"])
def test_adapters_load_in_peft_and_merged_ones_in_transformers(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    base = base_in(tmp_path / "base", kind)
    spec = described(base)
    trainer = trainer_of(spec, with_text(tmp_path))
    trainer.take_base(base)
    trainer.adopt(first_vector(spec))
    trainer.train(inner_work(5), lambda progress: None)
    trained = published(trainer, spec)

    (tmp_path / "adapter").mkdir()
    export_state(spec, trained, tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(saved_model(base), tmp_path / "adapter")
    export_state(spec, trained, tmp_path / "merged", base=base)
    merged = saved_model(tmp_path / "merged")
    assert not torch.allclose(logits_of(adapted), logits_of(saved_model(base)), atol=1e-3)
    torch.testing.assert_close(logits_of(adapted), logits_of(merged), rtol=0, atol=1e-4)


def test_buffers_of_a_base_are_exported_with_all_their_bits(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model = AutoModelForCausalLM.from_config(ODD["deepseek_v3"](), dtype=torch.float32)
    model.get_buffer(name).copy_(0.3 + torch.arange(8) / 1e4)  # which bf16 has as one value
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.save_pretrained(tmp_path / "base")
    spec = described(tmp_path / "base")
    merged = tmp_path / "merged"
    export_state(spec, first_vector(spec), merged, base=tmp_path / "base", dtype="bfloat16")
    for loaded in (saved_model(merged), AutoModelForCausalLM.from_pretrained(merged)):
        assert torch.equal(loaded.get_buffer(name), model.get_buffer(name))
    assert loaded.dtype == torch.bfloat16


def test_an_export_of_adapters_or_merged_is_a_whole_folder_that_loads(tmp_path: Path) -> None:
    from peft import PeftModel

    base = base_in(tmp_path / "base", "gpt2")
    spec = described(base)
    trained = first_vector(spec) + np.float32(0.01)
    origin = Origin(
        run="my-run", run_digest=spec.digest(), round=1, outer_digest=Digest(b"\2" * 32)
    )
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    of_words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    of_words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = {"tokenizer.json": tmp_path / "tokenizer.json"}
    for out, how in ((adapter, {"base_name": "base"}), (merged, {"base": base})):
        export_model(
            spec=spec, parameters=trained, origin=origin, out=out, tokenizer=tokenizer, **how
        )
        assert AutoTokenizer.from_pretrained(out).encode("b") == [1]
    assert spec.description is not None
    frozen = f"of {spec.description.num_frozen:,} ("
    for out, name, said in (
        (adapter, "`base`, ", "alone, beside it"),
        (merged, "", "added to the"),
    ):
        card = (out / "README.md").read_text()
        assert f"| base model | {name}a GPT2LMHeadModel {frozen}" in card
        assert str(spec.description.frozen_digest) in card
        assert f"| adapters | {said}" in card
        assert "| rank, alpha | 4, 8 |" in card
        assert "| targets | c_attn, c_fc, c_proj |" in card
    card = (adapter / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n") and "\nbase_model: base\n" in card
    assert "PeftModel.from_pretrained(base" in card
    assert 'tokenizer = AutoTokenizer.from_pretrained(".")' in card
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "base"
    assert not (adapter / "config.json").exists()  # it would be taken for a whole model
    for out in (adapter, merged):
        assert (out / "README.md").is_file() and (out / "atoll.json").is_file()
    adapted = PeftModel.from_pretrained(saved_model(base), adapter)
    torch.testing.assert_close(
        logits_of(adapted), logits_of(saved_model(merged)), rtol=0, atol=1e-4
    )
    other = base_in(tmp_path / "other", "gpt2", seed=1)
    with pytest.raises(BadDataError, match="is not the one that this run adapts: its digest is"):
        export_model(spec=spec, parameters=trained, origin=origin, out=tmp_path / "x", base=other)
    assert not (tmp_path / "x").exists()


def test_text_is_written_by_adapters_and_their_base_together(tmp_path: Path) -> None:
    base = base_in(tmp_path / "base", "gpt2")
    spec = described(base)
    first = first_vector(spec)
    other = np.random.default_rng(0).normal(0, 0.5, first.size).astype(np.float32)
    written = [
        model_that_writes(spec, vector, base=base)([65, 66], num_tokens=8, temperature=0, seed=0)
        for vector in (first, first, other)
    ]
    assert len(written[0]) == 8 and written[0] == written[1] != written[2]
    drawn = [
        model_that_writes(spec, first, base=base)([65], num_tokens=8, temperature=1.0, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_another_base_than_the_runs_is_refused_by_its_digest(tmp_path: Path) -> None:
    spec = described(base_in(tmp_path / "base", "gpt2"))
    trainer = trainer_of(spec, with_text(tmp_path))
    other = base_in(tmp_path / "other", "gpt2", seed=1)
    with pytest.raises(BadDataError, match="is not the one that this run adapts: its digest is"):
        trainer.take_base(other)
    with pytest.raises(NoInputError, match="nothing says where it is") as caught:
        trainer.take_base(None)
    assert 'base = "FOLDER"' in caught.value.next_step


def test_a_base_with_fewer_layers_than_the_runs_is_refused_in_a_sentence(tmp_path: Path) -> None:
    spec = described(base_in(tmp_path / "base", "gpt2"))
    trainer = trainer_of(spec, with_text(tmp_path))
    config = CONFIGS["gpt2"].to_dict() | {"n_layer": 1}
    smaller = AutoModelForCausalLM.from_config(type(CONFIGS["gpt2"])(**config))
    smaller.save_pretrained(tmp_path / "smaller")
    with pytest.raises(
        BadDataError, match=r"smaller has no .*h\.1.*, which the run's has"
    ) as caught:
        trainer.take_base(tmp_path / "smaller")
    assert "the very model" in caught.value.next_step


def test_a_quantised_base_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    spec = described(base_in(tmp_path / "base", "gpt2"))
    trainer = trainer_of(spec, with_text(tmp_path))
    config = tmp_path / "base" / "config.json"
    quantised = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    config.write_text(json.dumps(json.loads(config.read_text()) | quantised))
    with pytest.raises(BadDataError, match=r"is quantised \(bitsandbytes\)") as caught:
        trainer.take_base(tmp_path / "base")
    assert "that it was quantised from" in caught.value.next_step


def test_adapters_are_drawn_from_the_seed_alone(tmp_path: Path) -> None:
    spec = described(base_in(tmp_path / "base", "gpt2"))
    first = first_vector(spec)
    assert np.array_equal(first, first_vector(spec))
    other = spec.model_copy(update={"run": spec.run.model_copy(update={"seed": 1})})
    assert not np.array_equal(first, first_vector(other))


def test_targets_that_no_module_has_and_cuts_of_adapters_are_refused(tmp_path: Path) -> None:
    base = base_in(tmp_path / "base", "qwen3")
    with pytest.raises(ConfigError, match=r"\[lora\] targets = \['none_such'\]"):
        described(base, LoraSection(rank=4, targets=("none_such",)))
    spec = described(base, LoraSection(rank=4, targets=("q_proj",)))
    assert len(spec.tensors) == 2 * 3
    with pytest.raises(ConfigError, match="adapters are not cut"):
        check_shape(MeshShape(tensor=2), spec)


def test_adapters_of_the_built_in_decoder_are_refused_in_the_run_file() -> None:
    tables = {"model": DecoderModel().model_dump(exclude_none=True), "lora": {"rank": 4}}
    with pytest.raises(ConfigError, match=r'\[lora\] goes with \[model\] source = "transformers"'):
        validated(tables, origin="the test")


def test_a_loop_s_model_of_peft_is_the_run_s_and_another_alpha_or_base_is_not(
    tmp_path: Path,
) -> None:
    base = base_in(tmp_path / "base", "qwen3")
    told = welcome(spec := described(base), layout_of(spec), num_samples=0)
    places = [Place(name=name, shape=tuple(s), offset=at) for name, s, at in told["tensors"]]

    def adapted(folder: Path, called: str = "default", **changes: Any) -> torch.nn.Module:
        how: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **changes}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **how), called)

    def compare(model: torch.nn.Module) -> None:
        check_model(model, places)
        check_frozen(model, told["frozen_values"])
        check_scaling(model, told["lora_scaling"])

    model = adapted(base)
    compare(model)
    Optimizers(torch.optim.SGD(model.parameters(), lr=1.0)).check(model, places)
    compare(torch.nn.ModuleDict({"module": model}))  # as DistributedDataParallel names it
    with pytest.raises(ModelMismatchError, match=r"self_attn.q_proj is scaled by 4, and the run's"):
        compare(adapted(base, lora_alpha=16))
    with pytest.raises(ModelMismatchError, match="scaled by 4, and the run's by 2"):
        compare(adapted(base, use_rslora=True))
    with pytest.raises(ModelMismatchError, match="another one here than in the run"):
        compare(adapted(base_in(tmp_path / "other", "qwen3", seed=1)))
    with pytest.raises(
        ModelMismatchError, match=r"no such tensor; what it trains is .*q_proj\.lora_A\.own"
    ):
        compare(adapted(base, "own"))
    like_the_run = r"get_peft_model as the run does, .* \[lora\] in its run\.toml"
    with pytest.raises(
        ModelMismatchError, match=rf"k_proj\.lora_A.* no such tensor.*{like_the_run}"
    ):
        compare(adapted(base, target_modules=["q_proj", "v_proj"]))
    with pytest.raises(
        ModelMismatchError, match=rf"is \[8, .* in this model and \[4.*{like_the_run}"
    ):
        compare(adapted(base, r=8, lora_alpha=16))
    with pytest.raises(ModelMismatchError, match=r"magnitude.*which the run does not.*use_dora"):
        compare(adapted(base, use_dora=True))
    check_scaling(model, None)  # a run whose function makes adapters of its own
