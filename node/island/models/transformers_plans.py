"""What models of transformers say themselves of cutting them: tensor parallel, and stages of a pipeline.

A plan is taken where all that it says is done here; where it is not, the reason stands in the run's
description. How a module is cut by a plan is node.island.models.generic's, and stages'.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from node.island.models.stages import joined
from protocol.errors import ConfigError
from protocol.run.models import StageUnit, TensorStyle

_STYLES: Mapping[str, TensorStyle] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "embedding_rowwise": "table",
    "replicated_with_grad_allreduce": "sequence",
}
"""What a plan of transformers calls a style, of those that are known here."""


def tensor_plan_of(model: nn.Module) -> tuple[dict[str, TensorStyle], str]:
    """The model's own plan for tensor parallel; or none, with the reason."""
    kind = type(model).__name__
    named: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    if not any(".layers." in name or "." in name for name in named):
        return {}, f"tp needs the model's own plan, which {kind} has not"
    unknown = sorted(set(named.values()) - set(_STYLES))
    if unknown:
        return {}, f"the plan of {kind} has {unknown[0]!r}, which is not done here"
    plan = {name: _STYLES[style] for name, style in named.items()}
    table: Any = model.get_input_embeddings()  # type: ignore[operator]  # a method of transformers' models
    if type(table) is not nn.Embedding:  # it computes something of its own with what it looks up
        names = {name for name, module in model.named_modules() if module is table}
        is_tied = "lm_head.weight" not in dict(model.named_parameters())
        left_whole = names | ({"lm_head"} if is_tied else set())
        plan = {name: style for name, style in plan.items() if name not in left_whole}
    return plan, ""


CUT_INTO_STAGES = (
    *("cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_neox", "gpt_oss"),
    *("granite", "llama", "ministral3", "mistral", "mixtral", "olmo2", "olmo3", "phi", "phi3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2"),
)
"""Kinds of models of which a test shows that their stages one after another are the whole.

Others may do something between layers that a plan does not name. A comparison on each rank, as for plans
of functions, would need the whole model there, which pipelines are for doing without.
"""


def stages_of(model: nn.Module, context: int) -> tuple[tuple[StageUnit, ...], str]:
    """Layers with what is before and after them, where the model has a plan for pipelines; or why not.

    What a layer costs goes by its parameters: those of a table only by what is looked up, which is nothing.
    """
    own: Any = model
    kind, config = type(model).__name__, own.config
    plan = list(getattr(config, "base_model_pp_plan", None) or ())
    base, head = own.base_model_prefix, own.get_output_embeddings()
    layers = dict(model.named_modules()).get(f"{base}.layers")
    if "layers" not in plan or not isinstance(layers, nn.ModuleList):
        return (), f"pp needs the model's own plan, which {kind} has not"
    if config.model_type not in CUT_INTO_STAGES:
        return (), f"no test shows that stages of {kind} are the whole of it"
    if getattr(config, "output_router_logits", False):
        return (), "a router's own loss needs all layers in one process"
    at = plan.index("layers")
    heads = [name for name, module in model.named_modules() if module is head]
    names = [
        tuple(f"{base}.{name}" for name in plan[:at]),
        *((f"{base}.layers.{i}",) for i in range(len(layers))),
        (*(f"{base}.{name}" for name in plan[at + 1 :]), *heads),
    ]
    units = [
        StageUnit(
            modules=modules,
            output=(context, config.hidden_size),
            operations=sum(
                parameter.numel()
                for name in modules
                if not isinstance(model.get_submodule(name), nn.Embedding)
                for parameter in model.get_submodule(name).parameters()
            ),
        )
        for modules in names
    ]
    try:
        return joined(model, units), ""
    except ConfigError as error:
        return (), error.what


def run_alone(
    part: nn.Module, modules: Sequence[nn.Module], *, is_first: bool, is_last: bool
) -> None:
    """Has a stage go through the model's own code, past what other stages have.

    So masks, positions and whatever a model does around its layers are its own. What comes from the stage
    before stands in for what a layer before the stage's own ones gives.
    """
    own: Any = part
    received: list[Tensor] = []
    is_before = not is_first
    for layer in own.base_model.layers:
        if layer in modules:
            is_before = False
        else:
            layer.forward = partial(_passed, received if is_before else None)
    for name, module in own.base_model.named_children():
        if name in own.config.base_model_pp_plan and name != "layers" and module not in modules:
            module.forward = partial(_passed, None)
    whole = part.forward

    def forward(x: Tensor) -> Tensor:
        received[:] = [x]
        inputs = {"input_ids": x} if is_first else {"inputs_embeds": x.detach()}
        if is_last:
            logits: Tensor = whole(**inputs, use_cache=False).logits
            return logits
        hidden: Tensor = own.base_model(**inputs, use_cache=False).last_hidden_state
        return hidden

    part.forward = forward


def _passed(received: list[Tensor] | None, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """A module that another stage has: gives what it is given, or what came from the stage before."""
    return received[0] if received else x
