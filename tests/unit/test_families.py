"""Models of transformers are imported with the same logits and gradients, and come out as what they were."""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 — its usual name

from node.island.models.generate import decoder_of
from node.models.export import export_model
from node.models.families import FAMILIES, config_of
from node.models.reading import read_config, read_settings, read_weights
from protocol.errors import BadDataError
from protocol.run.models import DecoderModel, Description, RopeScaling
from protocol.run.run_spec import RunSpec
from tests.unit.test_export import ORIGIN, load_exported

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 5,
    "eos_token_id": [6, 7],
    "attn_implementation": "eager",
}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model of transformers, and keys of [model] that must come of it."""

    kind: str
    config: dict[str, Any]
    expected: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case(
        kind="Llama",
        config={"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        expected={"rope_theta": 500.0, "tie_embeddings": False},
    ),
    "tied llama 3.1": Case(
        kind="Llama",
        config={"tie_word_embeddings": True, "head_dim": 10, "rope_parameters": LLAMA_3_ROPE},
        expected={"head_size": 10, "rope_scaling": RopeScaling(factor=4.0, original_context=16)},
    ),
    "llama with biases": Case(
        kind="Llama",
        config={"attention_bias": True, "mlp_bias": True},
        expected={"attention_bias": "all", "mlp_bias": True},
    ),
    "qwen 2": Case(
        kind="Qwen2",
        config={"tie_word_embeddings": True},
        expected={"attention_bias": "qkv", "sliding_window": None},
    ),
    "qwen 2 with windows": Case(
        kind="Qwen2",
        config={"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        expected={"sliding_window": 5, "sliding_layers": (1, 2)},
    ),
    "qwen 3": Case(
        kind="Qwen3",
        config={"head_dim": 8, "tie_word_embeddings": True},
        expected={"qk_norm": True, "head_size": 8, "attention_bias": "none"},
    ),
    "qwen 3 with biases and windows": Case(
        kind="Qwen3",
        config={
            "head_dim": 6,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        expected={"attention_bias": "all", "sliding_layers": (0, 2), "head_size": None},
    ),
    "mistral": Case(
        kind="Mistral",
        config={"sliding_window": 6, "head_dim": 8},
        expected={"sliding_window": 6, "sliding_layers": None},
    ),
    "mistral without a window": Case(
        kind="Mistral", config={"sliding_window": None}, expected={"sliding_window": None}
    ),
}
NAMES = list(CASES)


def drawn(name: str) -> Any:
    """The model of a case with random weights, biases and norms."""
    import transformers  # takes seconds

    case = CASES[name]
    config = getattr(transformers, f"{case.kind}Config")(**SIZES | case.config)
    torch.manual_seed(NAMES.index(name))
    model = getattr(transformers, f"{case.kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    return model


@cache
def tokens() -> torch.Tensor:
    return torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(0))


def spec_of(folder: Path) -> RunSpec:
    settings: dict[str, Any] = read_settings(folder)
    return RunSpec(model=read_config(folder), description=Description(**settings))


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_imported_with_its_logits_and_gradients(name: str, tmp_path: Path) -> None:
    theirs = drawn(name)
    theirs.save_pretrained(tmp_path)
    spec = spec_of(tmp_path)
    for key, value in CASES[name].expected.items():
        assert getattr(spec.model, key) == value
    weights = np.full(spec.num_parameters, np.nan, np.float32)
    read_weights(tmp_path, spec, weights)
    ours = decoder_of(spec, weights)
    logits, expected = ours(tokens()), theirs(tokens()).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    loss_of(logits).backward()
    loss_of(expected).backward()
    gradients = dict(theirs.named_parameters())
    for parameter_name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            parameter.grad, gradients[parameter_name].grad, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", NAMES)
def test_an_imported_model_comes_out_as_what_it_was(name: str, tmp_path: Path) -> None:
    import transformers  # takes seconds

    theirs = drawn(name)
    theirs.save_pretrained(tmp_path / "in")
    spec = spec_of(tmp_path / "in")
    weights = np.empty(spec.num_parameters, np.float32)
    read_weights(tmp_path / "in", spec, weights)
    problem = export_model(
        spec=spec, parameters=weights, origin=ORIGIN, out=tmp_path / "out", shard_bytes=20_000
    )
    assert not problem
    assert len(list((tmp_path / "out").glob("model-0*-of-0*.safetensors"))) > 1
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    assert type(again) is type(theirs)
    with torch.no_grad():
        torch.testing.assert_close(
            again(tokens()).logits, theirs(tokens()).logits, rtol=0, atol=1e-6
        )
    assert again.config.to_diff_dict() | {"dtype": 0} == theirs.config.to_diff_dict() | {"dtype": 0}
    assert again.generation_config.to_diff_dict() == theirs.generation_config.to_diff_dict()
    model, loaded = load_exported(tmp_path / "out")
    assert model == spec.model == read_config(tmp_path / "out")
    assert loaded.tobytes() == weights.tobytes()


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "gpt2"}, "says model_type = 'gpt2', and Atoll's decoder is llama, qwen2,"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "says rope_type = 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "says rope_type = 'linear'"),
        ({"partial_rotary_factor": 0.5}, r"says partial_rotary_factor = 0\.5"),
        ({"hidden_act": "gelu"}, "says hidden_act = 'gelu'"),
        ({"attention_dropout": 0.1}, r"says attention_dropout = 0\.1"),
        (
            {"model_type": "qwen3", "layer_types": ["chunked_attention"] * 3},
            "says layer_types = 'chunked_attention'",
        ),
        (
            {"model_type": "mistral", "layer_types": ["sliding_attention", "full_attention"]},
            "says layer_types = 'sliding_attention'",
        ),
        ({"is_causal": False}, "says is_causal = False"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
            r"says full_attention = \{'rope_theta': 5\.0\}",
        ),
        (
            {
                "rope_parameters": {"rope_type": "default"},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            "says rope_type = 'linear'",
        ),
    ],
)
def test_what_the_decoder_cannot_be_is_refused_with_key_and_value(
    config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    write(tmp_path, {"model_type": "llama", **SIZES, **config})
    with pytest.raises(BadDataError, match=problem) as refused:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in refused.value.what
    assert "--by transformers" in refused.value.next_step


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": LLAMA_3_ROPE, "original_max_position_embeddings": 8},
        {"rope_parameters": LLAMA_3_ROPE, "original_max_position_embeddings": 8},
        {"rope_parameters": {**LLAMA_3_ROPE, "factor": 9.0}, "rope_scaling": LLAMA_3_ROPE},
        {"rope_parameters": LLAMA_3_ROPE, "rope_scaling": None, "rope_theta": 77.0},
        {"rope_parameters": {"rope_theta": 300.0}, "rope_scaling": {"type": "default"}},
    ],
    ids=str,
)
def test_positions_that_a_config_says_twice_are_those_that_transformers_takes(
    config: dict[str, Any], tmp_path: Path
) -> None:
    import transformers  # takes seconds

    write(tmp_path, {"model_type": "llama", **SIZES, **config})
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    # What the model computes with: reading a config alone is not yet all that transformers does with it.
    theirs = transformers.AutoModelForCausalLM.from_config(read).config.rope_parameters
    ours = read_config(tmp_path)
    assert ours.rope_theta == theirs["rope_theta"]
    if ours.rope_scaling is None:
        assert theirs["rope_type"] == "default"
    else:
        assert ours.rope_scaling.factor == theirs["factor"]
        assert ours.rope_scaling.original_context == theirs["original_max_position_embeddings"]


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "default"}, "rope_theta": 50},
        {"rope_scaling": LLAMA_3_ROPE, "original_max_position_embeddings": 8},
        {"rms_norm_eps": 1e-2, "hidden_act": "swish", "pretraining_tp": 2},
        {"sliding_window": 5, "use_sliding_window": False},
        {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 9},
        {"layer_norm_eps": 0.1, "logit_scale": 2.0, "residual_multiplier": 0.5},
        {"qk_norm": True, "use_bidirectional_attention": True, "no_rope_layers": [0, 1, 0]},
        {"attention_bias": True, "mlp_bias": True, "attention_chunk_size": 4},
        {"is_causal": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_a_config_says_the_logits_are_transformers_own_or_it_is_refused(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    import transformers  # takes seconds
    from safetensors.torch import save_file

    write(tmp_path, {"model_type": family, **SIZES, **config})
    torch.manual_seed(0)
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_config(read, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        expected = theirs(tokens(), use_cache=False).logits
    values = {name: value.clone() for name, value in theirs.state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    try:
        spec = spec_of(tmp_path)
    except BadDataError as error:
        assert "is_causal" in str(error)
        return
    weights = np.full(spec.num_parameters, np.nan, np.float32)
    read_weights(tmp_path, spec, weights)
    torch.testing.assert_close(decoder_of(spec, weights)(tokens()), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification", "Model"])
def test_a_model_with_another_head_is_refused_and_sent_to_a_loss_of_its_own(
    head: str, tmp_path: Path
) -> None:
    config = {"model_type": "llama", **SIZES, "architectures": [f"Llama{head}"]}
    write(tmp_path, config)
    with pytest.raises(BadDataError, match=f"'Llama{head}'") as refused:
        read_config(tmp_path)
    assert "--function MODULE:NAME" in refused.value.next_step
    write(tmp_path, {**config, "architectures": ["LLaMAForCausalLM"]})  # of folders of 2023
    read_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"hidden_size": None}, "does not describe a model: "),
        ({"hidden_size": "24"}, "hidden_size = '24': input should be a valid integer"),
        ({"num_attention_heads": 5, "head_dim": None}, "hidden_size 24 is not a multiple of"),
    ],
)
def test_sizes_that_cannot_be_are_told(
    config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    write(tmp_path, {"model_type": "llama", **SIZES, **config})
    with pytest.raises(BadDataError, match=problem):
        read_config(tmp_path)


def test_a_size_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 4})
    with pytest.raises(BadDataError, match="has no vocab_size"):
        read_config(tmp_path)


def test_what_an_old_config_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    import transformers  # takes seconds

    for family in FAMILIES.values():
        config = {
            key: value for key, value in SIZES.items() if key not in ("num_key_value_heads",)
        } | {"model_type": family.model_type, "num_attention_heads": 32, "hidden_size": 64}
        write(tmp_path, config | {"rope_theta": 700.0})
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        ours = read_config(tmp_path)
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.values_of_head == (getattr(theirs, "head_dim", None) or 64 // 32)
        assert ours.norm_epsilon == theirs.rms_norm_eps
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"] == 700.0
        assert ours.tie_embeddings == theirs.tie_word_embeddings
        assert ours.sliding_window == getattr(theirs, "sliding_window", None)
        if family.windows == "layers":
            window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
            write(tmp_path, config | window)
            theirs, ours = transformers.AutoConfig.from_pretrained(tmp_path), read_config(tmp_path)
            slide = [kind == "sliding_attention" for kind in theirs.layer_types]
            assert [ours.window_of(i) == 8 for i in range(3)] == slide == [False, True, True]
        del config["max_position_embeddings"]
        write(tmp_path, config)
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        assert read_config(tmp_path).context == theirs.max_position_embeddings


def test_samples_may_be_shorter_than_the_model_allows_and_it_still_allows_them(
    tmp_path: Path,
) -> None:
    write(tmp_path, {"model_type": "llama", **SIZES})
    short = read_config(tmp_path, context=16)
    assert (short.context, read_config(tmp_path).context) == (16, 32)
    written = config_of(short, read_settings(tmp_path)["config"])
    assert written is not None
    assert written["max_position_embeddings"] == 32
    with pytest.raises(BadDataError, match="a context of 64 tokens is more than the 32"):
        read_config(tmp_path, context=64)


def test_a_model_keeps_its_family_only_as_long_as_it_fits_it() -> None:
    model = DecoderModel(num_heads=4)
    mistral = {"model_type": "mistral", "pad_token_id": 3}
    kept, other = config_of(model, mistral), config_of(model, {"model_type": "qwen3", "x": 1})
    assert kept is not None and other is not None
    assert (kept["model_type"], kept["pad_token_id"]) == ("mistral", 3)
    assert other["model_type"] == "llama"
    assert "x" not in other


def test_a_model_like_none_of_transformers_is_exported_and_told_so(tmp_path: Path) -> None:
    spec = RunSpec(model=DecoderModel(qk_norm=True, logit_softcap=15.0, num_layers=1))
    weights = np.arange(spec.num_parameters, dtype=np.float32)
    problem = export_model(spec=spec, parameters=weights, origin=ORIGIN, out=tmp_path / "out")
    assert "llama has no logit_softcap = 15.0" in problem
    assert problem in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] not in FAMILIES
    model, again = load_exported(tmp_path / "out")
    assert model == spec.model
    assert np.array_equal(again, weights)


def write(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
