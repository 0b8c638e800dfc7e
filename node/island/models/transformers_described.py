"""What is found out of a model of transformers before there is a run, and refused.

A model that would learn something else than to predict the next token by those before it, or of which nodes
would not have all values.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from node.island.models.architecture import (
    digest_of_values,
    few_values_of,
    keeping_parameters,
    kept_buffers,
)
from node.island.models.decoder_modules import mean_nats
from node.island.models.running_statistics import spectral_vectors_of
from node.island.models.transformers import (
    BY_FUNCTION,
    KEEPS_DOCUMENTS_APART,
    NextToken,
    built,
    config_of,
    first_line,
    left_alone,
    longest_context,
    saved_model,
    values_in,
)
from node.island.models.transformers_plans import stages_of, tensor_plan_of
from protocol.errors import BadDataError, ConfigError
from protocol.run.models import Description
from protocol.run.run_spec import RunSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def described(spec: RunSpec, folder: Path) -> tuple["PreTrainedModel", Description]:
    """The module, and what can be said of it without computing anything."""
    config = (spec.description.config if spec.description else {}) or config_of(folder)
    model = built(config)
    _check_context(model, spec)
    if not spec.data.across_documents and config["model_type"] not in KEEPS_DOCUMENTS_APART:
        raise ConfigError(
            f"[data] across_documents = false does not go with models of type {config['model_type']!r}: "
            "no test shows that they keep documents apart",
            next_step="write across_documents = true, or choose another model",
        )
    if spec.adapters is None:
        _refuse_frozen(model)
    plan, why_not = tensor_plan_of(model)
    stages, no_stages = stages_of(model, spec.model.context)
    frozen: dict[str, Tensor] = {}
    if spec.adapters is not None:
        model, plan, why_not = built(config, spec.adapters), {}, "adapters are not cut"
        stages, no_stages = (), why_not
        saved = saved_model(folder)
        check_looks_back(saved, spec.model.context)
        check_loss(saved)
        frozen = values_in(saved, left_alone(model))
    return model, Description(
        config={**config, "architectures": [type(model).__name__]},
        generation_config=_generation_config_of(folder),
        tensor_plan=plan,
        no_tensor_plan=why_not,
        stages=stages,
        no_stages=no_stages,
        frozen_digest=digest_of_values(frozen) if frozen else None,
        frozen_values=few_values_of(frozen),
    )


def how_to_train_less(model: "PreTrainedModel", spec: RunSpec) -> str:
    """What to do about parameters that no loss over texts reaches, as those of a part that sees images."""
    config: Any = model.config
    if config.get_text_config() is not config:
        return (
            "save its language model as a folder of its own, and name that (docs/models-and-data.md, "
            "'Folders that are taken')"
        )
    if spec.adapters is not None:
        return "name other modules in a run file's [lora] targets"
    return f"train adapters with --lora RANK, {BY_FUNCTION}"


def _refuse_frozen(model: "PreTrainedModel") -> None:
    """Raises ConfigError for a kind of model that leaves some of its parameters as they are."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise ConfigError(
                f"{type(model).__name__} does not train its {name}, so that no node would get its values",
                next_step="train adapters with --lora RANK, where each node reads the folder",
            )


def _generation_config_of(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadDataError(
            f"{path} is no JSON: {error}", next_step="copy the folder again"
        ) from error
    return found


def _check_context(model: "PreTrainedModel", spec: RunSpec) -> None:
    most = longest_context(model.config)
    if most is not None and most < spec.model.context:
        raise ConfigError(
            f"[model] context = {spec.model.context}, and the model has {most} positions",
            next_step=f"write context = {most} or less",
        )


_LOOKED_AT = 16
"""Tokens that a model is tried with; one that wants more at once is tried with a sample of the run."""

_NO_INFLUENCE = 1e-6
"""Of the largest influence on an answer, what rounding alone may leave."""


def check_looks_back(model: "PreTrainedModel", context: int) -> None:
    """Raises ConfigError for a model whose answers depend on later tokens, or that fails to give any.

    Such a model would learn to copy the token that it should predict: BERT's kinds are built as causal
    language models too. What an answer depends on shows in the gradients of the embedded tokens.
    """
    tokens = min(context, _LOOKED_AT)
    with keeping_parameters(model):
        try:
            before, after = _influences(model, tokens)
        except Exception:
            try:
                before, after = _influences(model, context)
            except Exception as error:  # whatever a model does with what it does not take
                raise ConfigError(
                    f"{type(model).__name__} fails with a sample of {context} tokens: {first_line(error)}",
                    next_step=f"try it in transformers itself as model(input_ids=…), {BY_FUNCTION}",
                ) from error
    if after > _NO_INFLUENCE * before:
        is_encoder = not getattr(model.config, "is_decoder", True)
        raise ConfigError(
            f"{type(model).__name__} sees the tokens that it should predict: its answers depend on later "
            "ones, and it would learn to copy them",
            next_step=f"name the folder of a causal language model, {BY_FUNCTION}"
            + ("; to make a decoder of it write is_decoder = true into config.json" * is_encoder),
        )


_SAME_LOSS = 1e-3
"""How far, of the whole, two ways to compute one loss lie apart at most."""


def check_loss(model: "PreTrainedModel") -> None:
    """Raises ConfigError for a model whose own loss has parts that NextToken does not add.

    What transformers computes of labels is compared. Kinds that give no such loss have no such parts, and
    of some the labels are the next tokens already.
    """
    draws = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocabulary, (1, _LOOKED_AT), generator=draws)
    was_training = model.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            output: Any = model.train()(input_ids=tokens, labels=tokens, use_cache=False)
    except Exception:
        return  # it wants more tokens, or other labels; what fails without them is told before
    finally:
        model.train(was_training)
    if not isinstance(output.loss, Tensor):
        return
    targets = {"next": (output.logits[:, :-1], tokens[:, 1:]), "same": (output.logits, tokens)}
    added = NextToken(model).router_loss(output)
    ours = [float(mean_nats(*each) + added) for each in targets.values()]
    theirs = float(output.loss)
    if min(abs(each - theirs) for each in ours) > _SAME_LOSS * max(1.0, abs(theirs)):
        raise ConfigError(
            f"the loss of {type(model).__name__} has a part that is not trained here: of some tokens it is "
            f"{theirs:.4g} in transformers, and {ours[0]:.4g} by their nats",
            next_step="set what asks for it in config.json to 0, as z_loss_coefficient, "
            f"{BY_FUNCTION}",
        )


def _influences(model: "PreTrainedModel", num_tokens: int) -> tuple[float, float]:
    """How much answers of the first half depend on tokens of that half, and of the other one."""
    trained = [p for p in model.parameters() if p.requires_grad]
    was_training = model.training
    embedded: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    handle = model.get_input_embeddings().register_forward_hook(keep)
    half = num_tokens // 2
    draws = torch.Generator().manual_seed(0)
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        tokens = torch.randint(vocabulary, (1, num_tokens), generator=draws)
        logits: Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
        # Some sum of them: a plain one is the same for all inputs, often.
        answers = logits[:, :half]
        (answers * torch.randn(answers.shape, generator=draws)).sum().backward()  # type: ignore[no-untyped-call]
    finally:
        handle.remove()
        model.train(was_training)
        for parameter in trained:
            parameter.requires_grad_()
    size = sum(each.grad.abs() for each in embedded if each.grad is not None)
    assert isinstance(size, Tensor)
    return float(size[:, :half].max()), float(size[:, half:].max())


def check_buffers(saved: "PreTrainedModel", config: Mapping[str, Any]) -> None:
    """Raises ConfigError where a folder has buffers that its config does not give: nodes build by that.

    Spectral norm's vectors are not among them: they follow from the weights.
    """
    given = kept_buffers(built(config))
    computed = {name for each in spectral_vectors_of(saved) for name in each.names}
    for name, buffer in kept_buffers(saved).items():
        if name in computed:
            continue
        own = given[name]
        if own.is_meta or not torch.equal(buffer, own.to(buffer.dtype)):
            raise ConfigError(
                f"the folder has values of its own for the buffer {name}, and those are no parameters: no "
                "node would get them",
                next_step="train adapters with --lora RANK, where each node reads the folder",
            )
