"""Low-rank adapters of a model of transformers, by peft: what is trained where the rest is frozen.

"LoRA: Low-rank adaptation of large language models", Hu et al., 2021. The adapted model keeps its class
and its names; a matrix becomes its `base_layer` beside `lora_A` and `lora_B`.
"""

import importlib.util
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from protocol.errors import ConfigError
from protocol.run.run_spec import LoraSection, RunSpec

_ADAPTER = "default"  # what peft calls the only one, within names
_BASE_LAYER = "base_layer"  # one within the other, where a module has several adapted matrices


def adapt(model: nn.Module, lora: LoraSection) -> nn.Module:
    """Puts adapters into a model, in place; all else is frozen. Raises ConfigError."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "[lora] needs the peft package, and it is not installed",
            next_step="pip install 'atoll[lora]'",
        )
    from peft import LoraConfig, inject_adapter_in_model

    linear = {
        name.rpartition(".")[2]
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear)
    }
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of settings that follow from the kind of module
            adapted: nn.Module = inject_adapter_in_model(config, model)
    except ValueError as error:
        told = (
            f"[lora] targets = {list(lora.targets)}" if lora.targets else "adapters of all layers"
        )
        raise ConfigError(
            f"{told}: {error}",
            next_step=f"name some modules of the model in a run file's [lora] targets: {sorted(linear)}"
            + (", or leave targets out for all its layers" if lora.targets else ""),
        ) from error
    return adapted


def first_values(model: nn.Module, spec: RunSpec) -> Iterator[tuple[str, Tensor]]:
    """The adapters that a run begins with, from its seed, as peft draws them: their product is zero.

    Tensor by tensor, as the model itself has no memory.
    """
    torch.manual_seed(spec.run.seed)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        values = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(values, a=math.sqrt(5))
        elif ".lora_embedding_B." in name:
            nn.init.normal_(values)
        yield name, values


def base_name(name: str) -> str:
    """What a frozen parameter is called in the model that was not adapted."""
    return ".".join(part for part in name.split(".") if part != _BASE_LAYER)


def export_adapter(
    model: nn.Module, values: Mapping[str, Tensor], out: Path, *, base_name: str = ""
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, as peft loads them."""
    described: Any = model
    config = described.peft_config[_ADAPTER]
    config.base_model_name_or_path = base_name or None
    config.save_pretrained(out)
    tensors = {
        f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": value.contiguous()
        for name, value in values.items()
    }
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
