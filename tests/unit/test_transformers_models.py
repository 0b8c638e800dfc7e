"""Models of transformers: what describing them shows, what is refused, and training as transformers does."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MptConfig,
    RwkvConfig,
    XLNetConfig,
)

from node.island.data.dataset import SampleOrder, read_corpus
from node.island.models import transformers_described
from node.island.models.architecture import architecture_of, container_of_layers, give_memory
from node.island.models.describing import describe, export_state, first_vector
from node.island.models.stages import Cut
from node.island.models.transformers import (
    KEEPS_DOCUMENTS_APART,
    NextToken,
    built,
    config_of,
    saved_model,
    sizes_of,
)
from node.island.models.transformers_described import check_buffers, check_looks_back, check_loss
from node.island.models.transformers_plans import CUT_INTO_STAGES, run_alone, stages_of
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import PLAIN, LocalTraining, MeshShape, check_shape
from node.island.parallel.modules import compile_layers
from node.island.training import engine
from node.island.training.trainer import Trainer
from protocol.errors import AtollError, BadDataError, ConfigError, ExitCode, NoInputError
from protocol.run.models import TransformersModel, layout_of
from protocol.run.run_spec import (
    DataSection,
    EvaluationSection,
    InnerSection,
    LoraSection,
    RunSpec,
)
from tests.transformers_configs import CONFIGS, ODD, ROUTED, small
from tests.unit.work_scene import inner_work


def run_of(config: Any, folder: Path, **inner: Any) -> RunSpec:
    config.save_pretrained(folder)
    spec = RunSpec(
        model=TransformersModel(source="transformers", context=16),
        data=DataSection(source="text", paths=("*.txt",), held_out=0.2),
        inner=InnerSection(
            batch=4, learning_rate=1e-2, schedule="constant", warmup_tokens=0, **inner
        ),
        evaluation=EvaluationSection(samples=5),
    )
    return spec.model_copy(update={"description": describe(spec, folder)})


def with_text(folder: Path) -> Path:
    for i in range(12):
        (folder / f"{i}.txt").write_text("the quick brown fox; " * (20 + i))
    return folder


def trainer_of(spec: RunSpec, folder: Path, local: LocalTraining = PLAIN) -> Trainer:
    trainer = Trainer(
        spec=spec,
        corpus=read_corpus(spec.data, context=16, batch=4, folder=folder),
        device=torch.device("cpu"),
        mesh=Mesh(),
        clock=lambda: 0.0,
        local=local,
    )
    trainer.adopt(first_vector(spec))
    return trainer


def published(trainer: Trainer, spec: RunSpec) -> np.ndarray:
    vector = np.zeros(layout_of(spec).num_elements, np.float32)
    trainer.publish(vector, 0)
    return vector


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_training_is_what_a_loop_over_transformers_own_loss_comes_to(
    kind: str, tmp_path: Path
) -> None:
    spec = run_of(CONFIGS[kind], with_text(tmp_path))
    trainer = trainer_of(spec, tmp_path)
    report = trainer.train(inner_work(4), lambda progress: None)

    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32)
    place_of = {place.name: place for place in layout_of(spec).places}
    first = first_vector(spec)
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        place = place_of[name]
        values = first[place.offset : place.offset + place.num_elements].reshape(place.shape)
        parameter.data.copy_(torch.from_numpy(values))
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1 and p not in tables]},
        {
            "params": [p for p in model.parameters() if p.ndim == 1 or p in tables],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=1e-2,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    corpus = read_corpus(spec.data, context=16, batch=4, folder=tmp_path)
    order = SampleOrder(seed=0, num_samples=corpus.num_samples)
    losses = []
    for step in range(4):
        windows = torch.from_numpy(corpus.windows(corpus.training, order.indices(4 * step, 4)))
        loss = model(input_ids=windows, labels=windows).loss  # shifts them itself
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert report.loss == pytest.approx(np.mean(losses), abs=1e-5)
    last = published(trainer, spec)
    for name, parameter in model.named_parameters():
        place = place_of[name]
        ours = last[place.offset : place.offset + place.num_elements].reshape(place.shape)
        np.testing.assert_allclose(ours, parameter.detach().numpy(), rtol=0, atol=2e-4)


def test_a_routers_own_loss_is_trained_where_the_config_asks_for_it_and_never_measured(
    tmp_path: Path,
) -> None:
    plain = run_of(CONFIGS["mixtral"], with_text(tmp_path))
    assert plain.description is not None
    asked = plain.description.config | {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    described = plain.description.model_copy(update={"config": asked})
    routed = plain.model_copy(update={"description": described})
    one, other = trainer_of(plain, tmp_path), trainer_of(routed, tmp_path)
    assert one.evaluate() == other.evaluate()
    losses = [trainer.train(inner_work(1), lambda progress: None).loss for trainer in (one, other)]
    assert losses[1] > losses[0] + 0.5  # at least 0.5 · the number of experts that a token takes


@pytest.mark.parametrize("kind", ROUTED)
def test_a_routers_own_loss_is_as_much_of_the_whole_as_in_transformers(kind: str) -> None:
    model: Any = with_values(ROUTED[kind]()).train()
    tokens = torch.randint(1, 64, (2, 17))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    theirs = model(input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False)
    assert NextToken(model)(inputs, targets).item() == pytest.approx(theirs.loss.item(), abs=1e-5)
    check_loss(model)
    if kind != "a router that there is none of":
        assert theirs.aux_loss > 0.1
        model.router_aux_loss_coef = model.aux_loss_coef = 0.0
        assert NextToken(model)(inputs, targets).item() < theirs.loss.item() - 0.1


def test_a_model_whose_loss_has_a_part_that_is_not_trained_here_is_refused() -> None:
    model: Any = with_values(ODD["bamba"]())
    check_loss(model)
    model.z_loss_coefficient = 0.5
    with pytest.raises(ConfigError, match="loss of BambaForCausalLM has a part that") as caught:
        check_loss(model)
    assert "z_loss_coefficient" in caught.value.next_step


def test_a_model_that_leaves_parameters_as_they_are_is_refused_but_for_adapters(
    tmp_path: Path,
) -> None:
    config = ODD["ernie4_5_moe"]()
    with pytest.raises(ConfigError, match=r"does not train its .*e_score_corr") as caught:
        run_of(config, tmp_path)
    assert "--lora" in caught.value.next_step
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    plain = run_of(CONFIGS["gpt2"], tmp_path / "other")
    spec = plain.model_copy(update={"lora": LoraSection(rank=4), "description": None})
    described = describe(spec, tmp_path)
    assert any("e_score_correction_bias" in name for name in described.frozen_values)


def test_a_parameter_that_no_loss_reaches_is_refused_with_what_trains_the_others(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"not depend on .* bert\.pooler\.weight") as caught:
        run_of(small("big_bird", attention_type="original_full"), tmp_path)
    assert "--lora" in caught.value.next_step


def test_dropout_draws_the_same_again_for_the_same_work_and_none_when_measuring(
    tmp_path: Path,
) -> None:
    config = GPT2Config(
        n_embd=16,
        n_layer=1,
        n_head=2,
        vocab_size=256,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    spec = run_of(config, with_text(tmp_path))
    first, second = trainer_of(spec, tmp_path), trainer_of(spec, tmp_path)
    assert first.evaluate() == first.evaluate()
    for trainer in (first, second):
        trainer.train(inner_work(3), lambda progress: None)
    assert np.array_equal(published(first, spec), published(second, spec))
    dry = spec.description
    assert dry is not None
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    spec = spec.model_copy(
        update={"description": dry.model_copy(update={"config": dry.config | without})}
    )
    third = trainer_of(spec, tmp_path)
    third.train(inner_work(3), lambda progress: None)
    assert not np.array_equal(published(first, spec), published(third, spec))


def test_a_description_has_each_trained_tensor_once_with_its_layer(tmp_path: Path) -> None:
    spec = run_of(CONFIGS["gpt2"], tmp_path)
    model = built(config_of(tmp_path))
    assert [(t.name, t.shape) for t in spec.tensors] == [
        (name, tuple(p.shape)) for name, p in model.named_parameters()
    ]
    assert "lm_head.weight" not in [t.name for t in spec.tensors]  # it is the embedding
    assert {t.layer for t in spec.tensors if t.name.startswith("transformer.h.2.")} == {2}
    assert {t.layer for t in spec.tensors if ".h." not in t.name} == {None}
    assert spec.num_layers == 3
    assert all(parameter.is_meta for parameter in model.parameters())


def test_experts_of_a_layer_are_not_taken_for_layers() -> None:
    layers = nn.ModuleList(
        nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(8))})
        for _ in range(2)
    )
    assert container_of_layers(nn.ModuleDict({"layers": layers})) == ("layers", ["0", "1"])


def test_operations_of_a_token_are_those_of_the_formula_for_a_llama(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
    )
    spec = run_of(config, tmp_path)
    described = spec.description
    assert described is not None and described.flops_per_token is not None
    matrices = 256 * 32 + sum(
        t.num_elements for t in spec.tensors if t.layer is not None and len(t.shape) == 2
    )
    expected = 6 * matrices + 12 * 2 * 32 * 16
    assert described.flops_per_token == pytest.approx(expected, rel=0.05)
    assert described.activation_bytes is not None and described.activation_bytes > 16 * 256 * 4


def test_what_is_exported_loads_with_the_same_weights(tmp_path: Path) -> None:
    spec = run_of(CONFIGS["mixtral"], tmp_path)
    vector = first_vector(spec)
    export_state(spec, vector, tmp_path / "out")
    assert first_vector(spec, tmp_path / "out").tobytes() == vector.tobytes()
    written = config_of(tmp_path / "out")
    assert written.pop("architectures") == ["MixtralForCausalLM"]
    assert written["dtype"] == "float32"
    # A configuration that transformers has built a model of says so too.
    given = {key: value for key, value in config_of(tmp_path).items() if key != "architectures"}
    assert written == {**given, "dtype": "float32"}


@pytest.mark.parametrize(
    ("kind", "shape", "match"),
    [
        (
            "gpt2",
            MeshShape(tensor=2),
            "tp needs the model's own plan, which GPT2LMHeadModel has not",
        ),
        ("mixtral", MeshShape(tensor=2), "'moe_tp_experts', which is not done here"),
        (
            "gpt2",
            MeshShape(pipeline=2),
            "pp needs the model's own plan, which GPT2LMHeadModel has not",
        ),
        ("gpt2", MeshShape(context=2), 'cp = 2 does not go with .*source = "transformers"'),
        ("qwen3", MeshShape(tensor=4), "tp = 4 does not divide num_key_value_heads = 2"),
    ],
    ids=str,
)
def test_a_mesh_that_the_model_cannot_do_is_refused_with_what_works(
    kind: str, shape: MeshShape, match: str, tmp_path: Path
) -> None:
    spec = run_of(CONFIGS[kind], tmp_path)
    check_shape(MeshShape(shard=2), spec)
    with pytest.raises(ConfigError, match=match) as caught:
        check_shape(shape, spec)
    assert "shard" in caught.value.next_step


SELECTIVE = LocalTraining(activation_checkpointing="selective")
COMPILED = LocalTraining(compile=True)


@pytest.mark.parametrize(
    ("kind", "local"),
    [
        *((kind, local) for kind in ("gpt2", "qwen3") for local in (SELECTIVE, COMPILED)),
        ("mixtral", SELECTIVE),
        pytest.param("mixtral", COMPILED, marks=pytest.mark.nightly),
        ("gpt2 with dropout", SELECTIVE),
        pytest.param("gpt2 with dropout", COMPILED, marks=pytest.mark.nightly),
    ],
    ids=lambda value: value if isinstance(value, str) else f"compile {value.compile}",
)
def test_recomputed_and_compiled_layers_train_as_plain_ones_do(
    kind: str, local: LocalTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Code is made of what was traced, so running the trace will do; its random numbers are as without.
    monkeypatch.setattr(engine, "compile_layers", partial(compile_layers, backend="aot_eager"))
    config = CONFIGS[kind.split()[0]]
    if "dropout" in kind:
        config = GPT2Config.from_dict(config.to_dict() | {"resid_pdrop": 0.3, "attn_pdrop": 0.3})
    spec = run_of(config, with_text(tmp_path))
    torch._dynamo.utils.counters.clear()
    found = []
    for each in (PLAIN, local):
        trainer = trainer_of(spec, tmp_path, each)
        report = trainer.train(inner_work(4), lambda progress: None)
        found.append((report.loss, trainer.evaluate().loss, published(trainer, spec)))
    (loss, after, last), (one_loss, one_after, one_last) = found
    assert (loss, after) == pytest.approx((one_loss, one_after), abs=1e-5)
    np.testing.assert_allclose(last, one_last, rtol=0, atol=1e-4)
    # Two kinds of code for all layers, to train and to measure; more would fall back to none one day.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if local.compile else 0)


def test_a_model_of_other_shapes_than_the_runs_is_refused_by_name_and_both_shapes(
    tmp_path: Path,
) -> None:
    spec = run_of(CONFIGS["gpt2"], tmp_path)
    assert spec.description is not None
    tensors = list(spec.tensors)
    tensors[3] = tensors[3].model_copy(update={"shape": (7,)})
    other = spec.description.model_copy(update={"tensors": tuple(tensors)})
    with pytest.raises(
        AtollError, match=r"transformer\.h\.0\.ln_1\.bias of 7, and .* it of 24"
    ) as e:
        architecture_of(spec.model_copy(update={"description": other})).part(Mesh(), 0)
    assert e.value.exit_code == ExitCode.PROTOCOL


def test_a_folder_without_config_or_weights_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NoInputError, match=r"has no config\.json"):
        config_of(tmp_path)
    spec = run_of(CONFIGS["gpt2"], tmp_path)
    with pytest.raises(NoInputError, match="has no weights"):
        first_vector(spec, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(BadDataError, match="is damaged or cut off"):
        first_vector(spec, tmp_path)


def test_weights_that_lack_a_tensor_are_refused_by_its_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    spec = run_of(CONFIGS["gpt2"], tmp_path)
    export_state(spec, first_vector(spec), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(BadDataError, match=r"missing keys .*h\.1\.mlp\.c_fc\.weight"):
        first_vector(spec, tmp_path / "out")


@pytest.mark.parametrize(
    "key", ["auto_map", "attn_implementation", "quantization_config", "_experts_implementation"]
)
def test_a_config_that_asks_for_code_of_others_is_refused(key: str) -> None:
    config = {**CONFIGS["gpt2"].to_dict(), key: {"a": "b"}}
    with pytest.raises(ConfigError, match=f"'{key}', which asks for code or weights"):
        built(config)


def test_a_known_kind_needs_no_code_of_its_folder_and_may_say_how_it_attends(
    tmp_path: Path,
) -> None:
    config = CONFIGS["gpt2"].to_dict() | {"attn_implementation": "eager"}
    assert built(config).config._attn_implementation == "eager"
    own = json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    (tmp_path / "config.json").write_text(own)
    assert "auto_map" not in config_of(tmp_path)


def test_an_unknown_kind_of_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="makes no causal language model"):
        built({"model_type": "resnet"})
    (tmp_path / "config.json").write_text('{"model_type": "none-such"}')
    with pytest.raises(BadDataError, match="is not a config that transformers knows"):
        config_of(tmp_path)


def test_other_kinds_than_causal_language_models_are_refused_with_what_trains_them(
    tmp_path: Path,
) -> None:
    for kind, words in (
        ("t5", "of type 't5'"),
        ("vit", "of type 'vit'"),
        ("bart", "is an encoder and"),
    ):
        AutoConfig.for_model(kind).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=words) as caught:
            sizes_of(tmp_path)
        assert "--function MODULE:NAME" in caught.value.next_step
        with pytest.raises(ConfigError, match=words):
            built(config_of(tmp_path))


def test_a_model_that_sees_what_it_should_predict_is_refused(tmp_path: Path) -> None:
    spec = run_of(ODD["bert"](), tmp_path)
    with pytest.raises(
        ConfigError, match="BertLMHeadModel sees the tokens that it should"
    ) as caught:
        first_vector(spec)
    assert "is_decoder = true" in caught.value.next_step
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_decoder": True}))
    spec = spec.model_copy(update={"description": None})
    first_vector(spec.model_copy(update={"description": describe(spec, tmp_path)}))


@pytest.mark.parametrize("kind", ["gemma", "mixtral", "mamba2"])
def test_a_model_that_looks_back_alone_is_as_it_was_after_it_was_looked_at(kind: str) -> None:
    config = CONFIGS[kind] if kind in CONFIGS else ODD[kind]()
    model: Any = with_values(config)
    model.train()
    check_looks_back(model, 16)
    assert model.training and all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize("rescale_every", [6, 0])
def test_a_model_that_scales_its_weights_to_evaluate_is_refused(rescale_every: int) -> None:
    config = RwkvConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=7, rescale_every=rescale_every
    )
    model: Any = with_values(config)
    if not rescale_every:
        check_looks_back(model, 8)
        return
    with pytest.raises(ConfigError, match=r"changes the parameter .*weight of a Linear as it is"):
        check_looks_back(model, 8)


def test_a_model_of_any_length_is_one_whose_config_names_no_positions(tmp_path: Path) -> None:
    XLNetConfig(vocab_size=64).save_pretrained(tmp_path)
    assert sizes_of(tmp_path) == (None, 64)


def test_a_sample_has_no_more_positions_than_an_mpt(tmp_path: Path) -> None:
    config = MptConfig(d_model=24, n_heads=4, n_layers=2, max_seq_len=8, vocab_size=64)
    with pytest.raises(ConfigError, match="context = 16, and the model has 8 positions"):
        run_of(config, tmp_path)


def test_a_config_with_numbers_that_json_does_not_have_is_built(tmp_path: Path) -> None:
    spec = run_of(ODD["mamba2"](), tmp_path)
    assert spec.description is not None
    assert built(spec.description.config).config.time_step_limit[1] == float("inf")
    assert sizes_of(tmp_path) == (None, 64)


def test_buffers_that_only_the_folder_has_are_refused_where_no_node_would_get_them(
    tmp_path: Path,
) -> None:
    config = ODD["gemma4"]()
    spec = run_of(config, tmp_path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    first_vector(spec, tmp_path)
    model.model.layers[1].layer_scalar.fill_(0.5)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"the buffer model\.layers\.1\.layer_scalar") as caught:
        first_vector(spec, tmp_path)
    assert "--lora" in caught.value.next_step


@pytest.mark.parametrize("put", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_a_folder_may_have_spectral_norm_s_vectors_which_nodes_compute(
    put: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, by_its_config = (put(nn.Linear(3, 4)) for _ in range(2))
    monkeypatch.setattr(transformers_described, "built", lambda _: by_its_config)
    check_buffers(saved, {})


def test_weights_of_another_kind_of_model_are_called_so(tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification

    LlamaForSequenceClassification(CONFIGS["llama"]).save_pretrained(tmp_path)
    with pytest.raises(BadDataError, match="of a LlamaForSequenceClassification, not of a Llama"):
        saved_model(tmp_path)


CPU = torch.device("cpu")


def with_values(config: Any) -> nn.Module:
    """A model to measure with, of large random weights."""
    model = built({**config.to_dict(), "model_type": config.model_type}).eval()
    give_memory(model, parameters_on=CPU, buffers_on=CPU)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2).add_(float("norm" in name))
    return model


@pytest.mark.parametrize("model_type", KEEPS_DOCUMENTS_APART)
def test_documents_in_a_row_come_out_as_each_by_itself(model_type: str) -> None:
    objective = NextToken(with_values(small(model_type)))
    tokens, targets = torch.randint(1, 64, (2, 2, 16))
    documents = torch.tensor([[0] * 5 + [1] + [2] * 10, [0] * 16])
    whole = objective(tokens, targets, documents)
    spans = [(0, slice(0, 5)), (0, slice(5, 6)), (0, slice(6, 16)), (1, slice(0, 16))]
    one_by_one = sum(
        objective(tokens[row : row + 1, span], targets[row : row + 1, span]) * len(range(16)[span])
        for row, span in spans
    )
    assert whole.item() == pytest.approx(one_by_one.item() / 32, abs=1e-5)
    assert whole.item() != pytest.approx(objective(tokens, targets).item(), abs=1e-3)


def test_a_model_that_is_not_known_to_keep_documents_apart_is_refused(tmp_path: Path) -> None:
    spec = run_of(CONFIGS["gpt2"], tmp_path).model_copy(update={"description": None})
    data = DataSection(source="tokens", paths=("x",), digest="0" * 64, across_documents=False)
    spec = spec.model_copy(update={"data": data})
    assert describe(spec, tmp_path).tensors
    small("opt").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="does not go with models of type 'opt'"):
        describe(spec, tmp_path)


@pytest.mark.parametrize("model_type", CUT_INTO_STAGES)
def test_stages_of_a_model_one_after_another_give_what_it_gives(model_type: str) -> None:
    config = small(model_type)
    whole = with_values(config)
    units, why_not = stages_of(whole, 16)
    assert (len(units), why_not) == (6, "")
    tokens = torch.randint(1, 64, (2, 16))
    logits = whole(input_ids=tokens, use_cache=False).logits
    logits.logsumexp(-1).sum().backward()
    shape, cut, x = MeshShape(pipeline=3), Cut(units), tokens
    gradients: dict[str, torch.Tensor] = {}
    parts = []
    for stage in range(3):
        part = built({**config.to_dict(), "model_type": config.model_type}).eval()
        cut.leave(part, shape, stage)
        run_alone(part, cut.modules_of(part), is_first=stage == 0, is_last=stage == 2)
        give_memory(part, parameters_on=CPU, buffers_on=CPU)
        with torch.no_grad():
            for name, parameter in part.named_parameters():
                parameter.copy_(whole.get_parameter(name))
        x = part(x)
        parts.append(part)
    torch.testing.assert_close(x, logits)
    x.logsumexp(-1).sum().backward()
    published = []
    for part in parts:
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None
            gradients[name] = gradients.get(name, 0) + parameter.grad
            published += [name] * (parameter not in cut.copies(part))
    assert sorted(published) == sorted(name for name, _ in whole.named_parameters())
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-4)


def test_a_model_that_is_not_known_to_be_its_stages_is_refused() -> None:
    units, why_not = stages_of(built(small("helium").to_dict()), 16)
    assert (units, why_not) == (
        (),
        "no test shows that stages of HeliumForCausalLM are the whole of it",
    )
