"""Tokens from a run's model, whatever kind it is of: for `atoll sample`."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from node.island.generate import decoder_of, sample_tokens
from node.outer_state import Vector
from protocol.errors import ConfigError, UsageError
from protocol.models import DecoderModel, TransformersModel
from protocol.run_spec import RunSpec


def written_by(
    spec: RunSpec,
    parameters: Vector,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    temperature: float,
    seed: int,
    ends: Collection[int] = (),
    base: Path | None = None,
) -> list[int]:
    """Tokens that follow the prompt: `num_tokens`, or fewer that end with one of `ends`.

    Temperature 0 takes the likeliest each time. `base` is the model that adapters belong to. Raises
    ConfigError for a model that a function makes: what it does with tokens is not known. Raises UsageError
    for more tokens than a model of transformers has positions.
    """
    if isinstance(spec.model, DecoderModel):
        return sample_tokens(
            decoder_of(spec, parameters),
            prompt,
            num_tokens=num_tokens,
            temperature=temperature,
            seed=seed,
            ends=ends,
        )
    if not isinstance(spec.model, TransformersModel):
        raise ConfigError(
            "nothing is known of how this run's function writes text",
            next_step="export the model, and use it in a program of your own: 'atoll export OUT'",
        )
    from node.island.models.describing import model_with

    model: Any = model_with(spec, parameters, base=base).eval()
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and len(prompt) + num_tokens > most:
        raise UsageError(
            f"a prompt of {len(prompt)} tokens and {num_tokens} more are beyond the model's {most}",
            next_step="shorten the prompt, or ask for fewer with --tokens",
        )
    torch.manual_seed(seed)
    chances: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        chances = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.no_grad():
        tokens = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            eos_token_id=sorted(ends) or None,
            pad_token_id=next(iter(sorted(ends)), 0),
            **chances,
        )
    found: list[int] = tokens[0, len(prompt) :].tolist()
    return found
