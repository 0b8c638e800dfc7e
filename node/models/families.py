"""The families of models that transformers and the decoder both know: config.json, and [model] from it.

Pure: dictionaries and sizes go in and come out. A setting under which the two would compute something
else is refused with its key and value; one that says nothing of the arithmetic is left alone. Files are
node.models.reading's business.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from protocol.errors import BadDataError
from protocol.run.models import DecoderModel, RopeScaling

Config = Mapping[str, Any]
"""A config.json."""

Biases = Literal["none", "qkv", "all"]

_USE_TRANSFORMERS = (
    "add --by transformers, whose own code then builds it: on one rank, on copies and on shards"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of model: what of the decoder it has, and what holds where config.json is silent."""

    model_type: str
    architecture: str
    biases: tuple[Biases, ...]  # that a model of it may have
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    windows: Literal["none", "whole", "layers"] = "none"
    wants_whole_heads: bool = False  # hidden_size a multiple of the heads, whatever head_dim is
    num_kv_heads: int | None = None  # None: as many as there are heads
    head_dim: int | None = None  # None: hidden_size / heads
    context: int = 32768


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            architecture="LlamaForCausalLM",
            biases=("none", "all"),
            has_mlp_bias=True,
            wants_whole_heads=True,
            context=2048,
        ),
        Family(
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            biases=("qkv",),
            windows="layers",
            num_kv_heads=32,
        ),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            biases=("none", "all"),
            has_qk_norm=True,
            windows="layers",
            num_kv_heads=32,
            head_dim=128,
        ),
        Family(
            model_type="mistral",
            architecture="MistralForCausalLM",
            biases=("none",),
            windows="whole",
            num_kv_heads=8,
            context=4096 * 32,
        ),
    )
}
"""By model_type, in the order in which one is chosen for a model that several fit."""

_WINDOW = 4096  # of Mistral and Qwen, where config.json is silent
_FULL_LAYERS = 28  # of Qwen with windows: so many layers come before the first that slides
_EPSILON = 1e-6
_THETA = 10_000.0


def decoder_of(config: Config, *, origin: str, context: int | None = None) -> DecoderModel:
    """[model] for a config.json; `context` for samples shorter than the longest that it allows.

    Raises BadDataError with the key and its value for what the decoder cannot be.
    """
    refuse_quantised(config, origin=origin)
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        known = ", ".join(FAMILIES)
        raise BadDataError(
            f"{origin} says model_type = {config.get('model_type')!r}, and Atoll's decoder is {known}",
            next_step=f"where it is a causal language model, {_USE_TRANSFORMERS}",
        )
    kinds = config.get("architectures") or [family.architecture]
    if not any(str(kind).endswith("ForCausalLM") for kind in kinds):
        raise BadDataError(
            f"{origin} says architectures = {kinds!r}, and what is trained here is a "
            f"{family.architecture}: a model with another head wants another loss",
            next_step="train it with a loss of yours, --function MODULE:NAME (docs/models-and-data.md, 'A "
            "model from a function'), or name the folder of the language model",
        )
    for key, value in _not_ours(config, family):
        raise BadDataError(
            f"{origin} says {key} = {value!r}, which Atoll's decoder does not have",
            next_step=_USE_TRANSFORMERS,
        )
    longest = config.get("max_position_embeddings", family.context)
    if context is not None and context > longest:
        raise BadDataError(
            f"a context of {context} tokens is more than the {longest} of max_position_embeddings in "
            f"{origin}",
            next_step=f"choose {longest} at most, or raise that value if it is to learn longer texts",
        )
    try:
        return _decoder_of(config, family, context=context or longest)
    except KeyError as error:
        raise BadDataError(
            f"{origin} has no {error.args[0]}", next_step="copy the whole folder of the model again"
        ) from error
    except (TypeError, ValidationError) as error:
        raise BadDataError(
            f"{origin} does not describe a model: {_first_problem(error)}",
            next_step="copy the whole folder of the model again",
        ) from error


def refuse_quantised(config: Config, *, origin: str) -> None:
    """Raises BadDataError for a model of rounded weights: nobody trains those, nor adapters on them here."""
    how = config.get("quantization_config")
    if how is None:
        return
    method = how.get("quant_method") if isinstance(how, Mapping) else None
    raise BadDataError(
        f"{origin} says that the model is quantised ({method or 'quantization_config'}), and weights are "
        "taken as they were before, in bf16, fp16 or fp32",
        next_step="name the folder of the model that it was quantised from, which its card names",
    )


def _decoder_of(config: Config, family: Family, *, context: int) -> DecoderModel:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim", family.head_dim)
    rope = _rope_of(config)
    window, layers = _windows_of(config, family)
    biases: Biases = "qkv" if "qkv" in family.biases else "none"
    if "all" in family.biases and config.get("attention_bias"):
        biases = "all"
    return DecoderModel(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads", family.num_kv_heads) or heads,
        head_size=None if head_size is None or head_size * heads == hidden else head_size,
        ffn_size=config["intermediate_size"],
        context=context,
        rope_theta=rope["rope_theta"],
        norm_epsilon=config.get("rms_norm_eps", _EPSILON),
        tie_embeddings=config.get("tie_word_embeddings", False),
        qk_norm=family.has_qk_norm,
        attention_bias=biases,
        mlp_bias=family.has_mlp_bias and config.get("mlp_bias", False),
        sliding_window=window,
        sliding_layers=layers,
        rope_scaling=_scaling_of(rope, config),
    )


def _not_ours(config: Config, family: Family) -> Iterator[tuple[str, Any]]:
    """Settings under which transformers would compute something else."""
    rope = _rope_of(config)
    kind = _kind_of(rope)
    if kind not in ("default", "llama3"):
        yield "rope_type", kind
    for key, value in rope.items():
        if isinstance(value, Mapping):
            yield key, value  # of layers of that kind
    for table in (rope, config):
        if table.get("partial_rotary_factor", 1.0) != 1.0:
            yield "partial_rotary_factor", table["partial_rotary_factor"]
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        yield "hidden_act", config["hidden_act"]
    if config.get("attention_dropout"):
        yield "attention_dropout", config["attention_dropout"]
    if config.get("is_causal", True) is not True:
        yield "is_causal", config["is_causal"]
    if family.windows != "none":
        kinds = ("full_attention", "sliding_attention") if family.windows == "layers" else ()
        for kind in config.get("layer_types") or ():
            if kind not in kinds:
                yield "layer_types", kind


def _rope_of(config: Config) -> dict[str, Any]:
    """How positions are written down: `rope_parameters` today, `rope_scaling` and a theta before.

    Of both transformers takes the latter.
    """
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    return {"rope_theta": config.get("rope_theta", _THETA)} | rope


def _kind_of(rope: Config) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _scaling_of(rope: Config, config: Config) -> RopeScaling | None:
    if _kind_of(rope) == "default":
        return None
    original = "original_max_position_embeddings"  # the config's own comes first in transformers
    longest = config.get(original) or rope.get(original) or config["max_position_embeddings"]
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_context=longest,
    )


def _windows_of(config: Config, family: Family) -> tuple[int | None, tuple[int, ...] | None]:
    """The window, and the layers that have it; None for none, and for all."""
    if family.windows == "none":
        return None, None
    window = config.get("sliding_window", _WINDOW)
    if family.windows == "whole":
        return window, None
    num_layers = config["num_hidden_layers"]
    if not config.get("use_sliding_window", False) or window is None:
        return None, None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", _FULL_LAYERS)
        layers = tuple(range(first, num_layers))
    else:
        layers = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    if not layers:
        return None, None
    return window, None if len(layers) == num_layers else layers


def config_of(model: DecoderModel, described: Config) -> dict[str, Any] | None:
    """config.json for a model, from the one that its run was made from; None where no family fits.

    What `described` says besides sizes stays: special tokens, the longest context. Its family stays
    where the model still fits it.
    """
    family = _family_of(model, described.get("model_type"))
    if family is None:
        return None
    kept = dict(described) if described.get("model_type") == family.model_type else {}
    for key in ("dtype", "rope_parameters"):
        kept.pop(key, None)
    rope = _written_rope(model)
    sizes: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": max(model.context, kept.get("max_position_embeddings", 0)),
        "num_attention_heads": model.num_heads,
        "num_hidden_layers": model.num_layers,
        "num_key_value_heads": model.num_kv_heads,
        "rms_norm_eps": model.norm_epsilon,
        # transformers 4 reads the first two, transformers 5 the third.
        "rope_theta": model.rope_theta,
        "rope_scaling": rope if model.rope_scaling else None,
        "rope_parameters": {"rope_theta": model.rope_theta, **rope},
        "tie_word_embeddings": model.tie_embeddings,
        "torch_dtype": "float32",  # what an export may change
        "vocab_size": model.vocab_size,
    }
    usual = {
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    return usual | kept | sizes | dict(_written_of(model, family))


def _family_of(model: DecoderModel, preferred: object) -> Family | None:
    fitting = [family for family in FAMILIES.values() if not why_not(model, family)]
    same = [family for family in fitting if family.model_type == preferred]
    return next(iter(same + fitting), None)


def why_none(model: DecoderModel) -> str:
    """What keeps each family from being the model's: such as "llama has no qk_norm = true, …"."""
    return ", ".join(f"{name} has no {why_not(model, each)}" for name, each in FAMILIES.items())


def why_not(model: DecoderModel, family: Family) -> str:
    """The key of [model] that a family has no place for; empty where it fits."""
    has_layers = model.sliding_layers is not None
    if model.logit_softcap is not None:
        return f"logit_softcap = {model.logit_softcap}"
    if model.qk_norm != family.has_qk_norm:
        return f"qk_norm = {str(model.qk_norm).lower()}"
    if model.attention_bias not in family.biases:
        return f'attention_bias = "{model.attention_bias}"'
    if model.mlp_bias and not family.has_mlp_bias:
        return "mlp_bias = true"
    if model.sliding_window is not None and family.windows == "none":
        return f"sliding_window = {model.sliding_window}"
    if has_layers and family.windows != "layers":
        return "sliding_layers"
    if family.wants_whole_heads and model.hidden_size % model.num_heads:
        return f"head_size = {model.head_size}"
    return ""


def _written_rope(model: DecoderModel) -> dict[str, Any]:
    scaling = model.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }


def _written_of(model: DecoderModel, family: Family) -> Iterator[tuple[str, Any]]:
    """What only some families have."""
    if family.model_type != "qwen2" or model.head_size is not None:
        yield "head_dim", model.values_of_head
    if "all" in family.biases:
        yield "attention_bias", model.attention_bias == "all"
    if family.has_mlp_bias:
        yield "mlp_bias", model.mlp_bias
    if family.windows == "none":
        return
    yield "sliding_window", model.sliding_window
    if family.windows == "layers":
        sliding = model.sliding_layers
        if sliding is None:
            sliding = tuple(range(model.num_layers)) if model.sliding_window is not None else ()
        kinds = ("full_attention", "sliding_attention")
        yield "use_sliding_window", model.sliding_window is not None
        are_last = sliding == tuple(range(model.num_layers))[-len(sliding) :]
        if are_last:  # else layer_types alone say it
            yield "max_window_layers", sliding[0]
        yield "layer_types", [kinds[i in sliding] for i in range(model.num_layers)]


def _first_problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    return f"{place} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
