"""Causal language models that transformers builds from a config: source = "transformers".

Its config stands in the run's description, and nothing of a model folder is ever executed. What lives
elsewhere: what is found out and refused of one before there is a run
(node.island.models.transformers_described), the loss over windows of tokens
(node.island.models.decoder_modules), finding layers and roles (node.island.models.architecture), plans for
tensor parallel and pipelines (node.island.models.transformers_plans).
"""

import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from node.island.data.dataset import Tree
from node.island.models.adapters import adapt, base_name
from node.island.models.architecture import (
    check_frozen,
    check_tensors,
    kept_buffers,
    without_memory,
)
from node.island.models.decoder_modules import TokenInputs, mean_nats
from node.island.models.generic import GenericArchitecture
from node.island.models.transformers_plans import run_alone
from node.models.folders import has_weights
from node.models.reading import look_at_model, no_number
from protocol.errors import BadDataError, ConfigError, NoInputError
from protocol.run.run_spec import LoraSection, RunSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersArchitecture(TokenInputs, GenericArchitecture):
    """See Architecture."""

    draws = True
    has_metric = False
    divides_by_all = True
    may_leave_parameters_out = True
    may_count = False

    def build(self) -> nn.Module:
        """See GenericArchitecture."""
        assert self.spec.description is not None
        model: nn.Module = built(self.spec.description.config, self.spec.adapters)
        check_tensors(model, self.spec)
        return model

    def run_alone(
        self, part: nn.Module, modules: Sequence[nn.Module], *, is_first: bool, is_last: bool
    ) -> None:
        """See GenericArchitecture."""
        run_alone(part, modules, is_first=is_first, is_last=is_last)

    def enter(self, inputs: tuple[Tree, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See Ends."""
        return inputs[:1], {}

    def leave(self, output: Tensor, inputs: tuple[Tree, ...]) -> Tensor:
        """See Ends."""
        return mean_nats(output, inputs[1])

    def leave_metric(self, output: Tensor, inputs: tuple[Tree, ...]) -> Tensor | None:
        """See Ends."""
        return None

    def frozen_values(self, names: Iterable[str], base: Path | None) -> dict[str, Tensor]:
        """See Architecture."""
        return frozen_values(names, base)

    def objective(self, part: nn.Module) -> nn.Module:
        """See Architecture."""
        return NextToken(part)


class NextToken(nn.Module):
    """Mean nats per token; a router's own loss is added in training where the config asks for it.

    That is with `output_router_logits`, and as much of it as transformers itself adds, of the samples that
    go through the model together: it is no sum over samples, so it depends a little on how they are shared
    out. A model whose own loss has other parts is refused (`check_loss`).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        config: Any = model.config
        asks = getattr(config, "output_router_logits", False)
        own: Any = model
        shares = (getattr(own, name, 0.0) for name in ("router_aux_loss_coef", "aux_loss_coef"))
        self._router_share = float(next(filter(None, shares), 0.0)) if asks else 0.0

    def forward(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Over tokens and targets, each [B, T]; with `documents` [B, T], a token sees its own one only."""
        # Where positions begin anew, transformers makes masks that keep apart what is on either side.
        apart = {} if documents is None else {"position_ids": positions_within(documents)}
        output: Any = self.model(input_ids=tokens, use_cache=False, **apart)
        loss = mean_nats(output.logits, targets)
        return loss + self.router_loss(output) if self.model.training else loss

    def router_loss(self, output: Any) -> Tensor | float:
        """What is added to the nats; kinds that may do without a router give none then."""
        found = getattr(output, "aux_loss", None)
        return 0.0 if found is None else self._router_share * found


def positions_within(documents: Tensor) -> Tensor:
    """The place [B, T] of each token in its document; `documents` [B, T] numbers them."""
    places = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.diff(documents, dim=1, prepend=documents[:, :1]) != 0
    return places - torch.where(begins, places, 0).cummax(dim=1).values


KEEPS_DOCUMENTS_APART = (
    *("cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_bigcode"),
    *("gpt_neox", "granite", "llama", "ministral3", "mistral", "mixtral", "olmo2", "olmo3"),
    *("olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"),
    *("stablelm", "starcoder2"),
)
"""Kinds of models of which a test shows that documents in a row come out as each by itself does.

Others do not, or not so: a state that goes on from one document into the next, positions by themselves.
"""


def require_transformers() -> None:
    """Raises ConfigError where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            '[model] source = "transformers" needs the transformers package, and it is not installed',
            next_step="pip install 'atoll[transformers]'",
        )
    # Before its first import: what a run asks for must not make a node fetch anything.
    os.environ["HF_HUB_OFFLINE"] = "1"


def _no_base() -> NoInputError:
    return NoInputError(
        "this run adapts a model that each node has, and nothing says where it is",
        next_step='name its transformers folder with --base, or write base = "FOLDER" into node.toml',
    )


def config_of(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json, as transformers completes it."""
    require_transformers()
    if not (folder / "config.json").is_file():
        raise NoInputError(
            f"{folder} has no config.json, so it is no folder of a transformers model",
            next_step="name the folder that save_pretrained wrote, or that was downloaded",
        )
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise BadDataError(
            f"{folder / 'config.json'} is not a config that transformers knows: {first_line(error)}",
            next_step="install a newer transformers; models with code of their own are not run: use "
            'source = "function"',
        ) from error
    return _facts_of(config)


def config_within(module: nn.Module) -> dict[str, Any]:
    """What config.json says of a module of transformers' that a function has built; empty for others."""
    known: Any = sys.modules.get("transformers")  # the function has imported it
    kind = type(module)
    if known is None or not issubclass(kind, known.PreTrainedModel):
        return {}
    if getattr(known, kind.__name__, None) is not kind:
        return {}  # a class of the function's own
    facts = _facts_of(module.config) | {"architectures": [kind.__name__]}
    # A type of values would be that of exports; what a function builds is trained and kept in fp32.
    return {key: facts[key] for key in facts if key not in ("dtype", "torch_dtype")}


def _facts_of(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    found["model_type"] = config.model_type
    return {key: found[key] for key in found if key not in _NOT_OF_THE_MODEL}


_NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path", "auto_map")
"""Where and by what a folder was written, and its own code, which nobody runs: a known kind needs none."""


def built(config: Mapping[str, Any], lora: LoraSection | None = None) -> "PreTrainedModel":
    """The module of a config, adapted or not: parameters without memory, in training mode.

    Raises ConfigError for a config of no causal language model.
    """
    require_transformers()
    with without_memory():
        model = _from_config(config)
        return model if lora is None else adapt(model, lora)


def frozen_values(names: Iterable[str], base: Path | None) -> dict[str, Tensor]:
    """Values of what is not trained, from the folder of the model that is adapted. It is read whole.

    Raises BadDataError for a model without some of them.
    """
    if base is None:
        raise _no_base()
    names, saved = list(names), saved_model(base)
    there = dict(saved.named_parameters()) | kept_buffers(saved)
    if lacking := [base_name(name) for name in names if base_name(name) not in there]:
        raise BadDataError(
            f"the model in {base} has no {lacking[0]}, which the run's has: it is another model",
            next_step="name the folder of the very model that the run was made from, as base in node.toml",
        )
    return values_in(saved, names)


def values_in(saved: "PreTrainedModel", names: Iterable[str]) -> dict[str, Tensor]:
    """Values of a model that was not adapted, by the names that they have in the adapted one."""
    own = dict(saved.named_parameters()) | kept_buffers(saved)
    return {name: own[base_name(name)].detach() for name in names}


def left_alone(adapted: nn.Module) -> dict[str, Tensor]:
    """What adapters leave as it is: frozen parameters, and buffers that checkpoints have."""
    frozen = {name: p.detach() for name, p in adapted.named_parameters() if not p.requires_grad}
    return frozen | kept_buffers(adapted)


def sizes_of(folder: Path) -> tuple[int | None, int]:
    """The most positions of a sample, where the folder's config says it, and its number of tokens.

    Raises ConfigError for a config of no causal language model.
    """
    from transformers import AutoConfig

    values = config_of(folder)
    _require_causal_kind(values)
    _refuse_foreign_code(values)
    config: Any = AutoConfig.for_model(**_decoded(values))
    return longest_context(config), int(getattr(config.get_text_config(), "vocab_size", 0))


def longest_context(config: Any) -> int | None:
    """The most positions of a sample, as configs of several kinds call them."""
    text = config.get_text_config()
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        longest = getattr(text, key, None)
        if isinstance(longest, int) and longest > 0:
            return longest
    return None


def _require_causal_kind(config: Mapping[str, Any]) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.get("model_type", "")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"transformers makes no causal language model of type {kind!r}",
            next_step=f"name the folder of one, {BY_FUNCTION}",
        )
    if config.get("is_encoder_decoder"):
        raise ConfigError(
            f"a model of type {kind!r} is an encoder and a decoder, and of those a causal language model has "
            "the decoder alone",
            next_step=f"name the folder of a causal language model, {BY_FUNCTION}",
        )


def _decoded(value: Any) -> Any:
    """A config with the numbers that JSON does not have, which transformers writes as {"__float__": …}."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(each) for key, each in value.items()}
    return [_decoded(each) for each in value] if isinstance(value, list) else value


BY_FUNCTION = (
    "or train any other model with a loss of yours: --function MODULE:NAME "
    "(docs/models-and-data.md, 'A model from a function')"
)


def _from_config(config: Mapping[str, Any]) -> "PreTrainedModel":
    from transformers import AutoConfig, AutoModelForCausalLM

    _refuse_foreign_code(config)
    _require_causal_kind(config)
    try:
        parsed = AutoConfig.for_model(**_decoded(config))
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            parsed, dtype=torch.float32, trust_remote_code=False
        )
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"transformers makes no causal language model of this config: {first_line(error)}",
            next_step="install the transformers that the run was made with, or name the folder of a "
            "causal language model",
        ) from error
    model.train()
    return model


_FOREIGN = ("auto_map", "implementation", "quantization_config")
"""Parts of keys by which a config has transformers load code of others, or weights that cannot be trained."""

_OWN_IMPLEMENTATIONS = ("eager", "sdpa")


def _refuse_foreign_code(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if value is None or value in _OWN_IMPLEMENTATIONS:
            continue
        if any(part in str(key) for part in _FOREIGN):
            raise ConfigError(
                f"config.json has {key!r}, which asks for code or weights beside the model's own",
                next_step="remove the key, and where it means quantised weights, name the folder of the "
                "model as it was before",
            )
        if isinstance(value, Mapping):
            _refuse_foreign_code(value)


def random_model(spec: RunSpec) -> "PreTrainedModel":
    """The model with weights that its own rules draw, from the run's seed."""
    assert spec.description is not None
    torch.manual_seed(spec.run.seed)
    return _from_config(spec.description.config)


def saved_model(folder: Path) -> "PreTrainedModel":
    """The model of a folder with its weights, in fp32, by transformers itself.

    Raises NoInputError for a folder without weights, BadDataError for ones that do not fit, ConfigError for
    quantised ones.
    """
    look_at_model(folder)
    _refuse_foreign_code(config_of(folder))
    if not has_weights(folder):
        raise NoInputError(
            f"{folder} has no weights: no file there ends in .safetensors",
            next_step="name a folder that save_pretrained wrote with safetensors",
        )
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    _quietly()
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # what it warns of is refused below
    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # safetensors and transformers have no error in common
        raise BadDataError(
            f"the weights in {folder} cannot be read: {first_line(error)}",
            next_step="copy the folder again",
        ) from error
    finally:
        logging.set_verbosity(before)
    saved: PreTrainedModel = model
    kinds = getattr(saved.config, "architectures", None) or [type(saved).__name__]
    is_other = type(saved).__name__ not in kinds
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        if names := told.get(what):
            raise BadDataError(
                f"the weights in {folder} do not fit its config: {what.replace('_', ' ')} "
                f"{sorted(map(str, names))[0]}"
                + (f"; they are of a {kinds[0]}, not of a {type(saved).__name__}" * is_other),
                next_step=f"name the folder of a causal language model, {BY_FUNCTION}"
                if is_other
                else "copy the folder again",
            )
    for name, parameter in saved.named_parameters():
        if not (finite := torch.isfinite(parameter)).all():
            raise no_number(name, int((~finite).sum()), folder)
    return saved


def merged_model(
    spec: RunSpec, base: Path | None, values: Mapping[str, Tensor]
) -> "PreTrainedModel":
    """The model of the folder `base` with adapters of these values added to its matrices.

    Raises NoInputError where nobody says which folder, BadDataError for another model than the run's.
    """
    from peft.tuners.lora import LoraLayer

    assert spec.adapters is not None and spec.description is not None
    if base is None:
        raise _no_base()
    model = adapt(saved_model(base), spec.adapters)
    check_frozen(left_alone(model), spec.description.frozen_digest, base=base)
    with torch.no_grad():
        for name, value in values.items():
            model.get_parameter(name).copy_(value)
    adapted = {name: each for name, each in model.named_modules() if isinstance(each, LoraLayer)}
    for module in adapted.values():
        module.merge()
    for name, module in adapted.items():
        owner, _, own = name.rpartition(".")
        # Else within another of the same module: of several matrices each has one.
        if owner not in adapted:
            setattr(model.get_submodule(owner), own, module.get_base_layer())
    return model


def export_model(model: "PreTrainedModel", out: Path) -> None:
    """Writes weights and config as transformers loads them; safetensors, 5 GB at most each."""
    _quietly()
    model.save_pretrained(out, max_shard_size="5GB")


def _quietly() -> None:
    """Its bars are for notebooks; what takes long here is said by who asked for it."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def first_line(error: Exception) -> str:
    """What a library's error says first, with its kind."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
