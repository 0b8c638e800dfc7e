"""Writes a committed model as a folder that Hugging Face transformers loads, and reads it back.

The folder is complete or absent: it is written beside its place and renamed.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from node.outer_state import Vector
from protocol.errors import BadDataError, CannotCreateError, NoInputError
from protocol.layout import Layout, layout_of
from protocol.models import DecoderModel
from protocol.run_spec import RunSpec

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
ABOUT = "atoll.json"
NOTE = "README.md"


def export_model(
    *,
    spec: DecoderModel,
    layout: Layout,
    parameters: Vector,
    out: Path,
    metadata: Mapping[str, str],
) -> None:
    """Writes weights (fp32), config.json, atoll.json with the metadata, and a note.

    Raises CannotCreateError when `out` exists and is not an empty folder, or cannot be written.
    """
    if len(parameters) != layout.num_elements:
        raise ValueError(f"{len(parameters)} values do not fill a layout of {layout.num_elements}")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CannotCreateError(f"{out} exists already", next_step="name a new folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise _cannot_write(out, error) from error
    try:
        _write_files(beside, spec, layout, parameters, metadata)
        beside.chmod(0o755)
        beside.rename(out)
    except (OSError, SafetensorError) as error:
        raise _cannot_write(out, error) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # gone already when all went well


def load_exported(folder: Path) -> tuple[DecoderModel, Vector]:
    """Reads what export_model wrote. Raises NoInputError or BadDataError."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError as error:
        raise NoInputError(
            f"{folder} is no exported model: {Path(error.filename or WEIGHTS).name} is missing",
            next_step="name the folder that 'atoll export' wrote",
        ) from error
    except (ValueError, SafetensorError) as error:
        raise BadDataError(
            f"{folder} cannot be read: {error}", next_step="export it again"
        ) from error
    spec = _spec_of(config, folder)
    layout = layout_of(RunSpec(model=spec))
    if sorted(tensors) != sorted(place.name for place in layout.places):
        raise BadDataError(
            f"{folder / WEIGHTS} does not hold the tensors that {CONFIG} describes",
            next_step="export it again",
        )
    parameters = np.empty(layout.num_elements, np.float32)
    for place in layout.places:
        tensor = tensors[place.name]
        if tensor.shape != place.shape or tensor.dtype != np.float32:
            raise BadDataError(
                f"{place.name} in {folder / WEIGHTS} is {tensor.dtype} {tensor.shape}, "
                f"not float32 {place.shape}",
                next_step="export it again",
            )
        parameters[place.offset : place.offset + place.num_elements] = tensor.reshape(-1)
    return spec, parameters


def _write_files(
    folder: Path,
    spec: DecoderModel,
    layout: Layout,
    parameters: Vector,
    metadata: Mapping[str, str],
) -> None:
    tensors = {
        place.name: parameters[place.offset : place.offset + place.num_elements].reshape(
            place.shape
        )
        for place in layout.places
    }
    # "format" is what transformers asks for before it reads a file.
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    _write_json(folder / CONFIG, _config_of(spec))
    _write_json(folder / ABOUT, dict(metadata))
    (folder / NOTE).write_text(_note_of(spec, layout, metadata), encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _config_of(spec: DecoderModel) -> dict[str, Any]:
    """The fields of transformers' LlamaConfig."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": spec.values_of_head,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": spec.ffn_size,
        "max_position_embeddings": spec.context,
        "mlp_bias": False,
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": spec.norm_epsilon,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tie_embeddings,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": spec.vocab_size,
    }


def _spec_of(config: dict[str, Any], folder: Path) -> DecoderModel:
    try:
        return DecoderModel(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            ffn_size=config["intermediate_size"],
            context=config["max_position_embeddings"],
            rope_theta=config["rope_theta"],
            norm_epsilon=config["rms_norm_eps"],
            tie_embeddings=config["tie_word_embeddings"],
        )
    except (KeyError, TypeError, ValidationError) as error:
        raise BadDataError(
            f"{folder / CONFIG} does not describe a model of Atoll's: {error}",
            next_step="export it again",
        ) from error


def _note_of(spec: DecoderModel, layout: Layout, metadata: Mapping[str, str]) -> str:
    lines = "".join(f"- {key}: {value}\n" for key, value in metadata.items())
    return (
        "# A model trained with Atoll\n\n"
        f"{layout.num_elements:,} parameters, context {spec.context}.\n\n"
        f"{lines}\n"
        "Tokens are bytes: token i is the byte i, there is no tokenizer and no special token.\n"
        "Token 0 separates texts.\n\n"
        "```python\n"
        "import torch\n"
        "from transformers import LlamaForCausalLM\n\n"
        'model = LlamaForCausalLM.from_pretrained(".")\n'
        'prompt = torch.tensor([list(b"def ")])\n'
        "print(bytes(model.generate(prompt, max_new_tokens=64)[0].tolist()))\n"
        "```\n"
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _cannot_write(out: Path, error: Exception) -> CannotCreateError:
    return CannotCreateError(
        f"{out} cannot be written: {getattr(error, 'strerror', None) or error}",
        next_step="name a folder that you can write",
    )
