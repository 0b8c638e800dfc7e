"""Tokens from a model, one after the other: to see what a run has learned."""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from node.island.models.architecture import copy_parameters
from node.island.models.decoder_modules import Attention, Decoder, attend_to_earlier
from node.outer_state import Vector
from protocol.errors import UsageError
from protocol.run.models import DecoderModel, TransformersModel, layout_of
from protocol.run.run_spec import RunSpec


def decoder_of(spec: RunSpec, parameters: Vector) -> Decoder:
    """A model on the CPU with the weights of a canonical vector."""
    decoder = Decoder(spec.decoder)
    copy_parameters(decoder, layout_of(spec), parameters)
    return decoder.eval()


class WritesOn(Protocol):
    """A model that goes on from a prompt: see `sample_tokens`."""

    def __call__(
        self,
        prompt: Sequence[int],
        *,
        num_tokens: int,
        temperature: float,
        seed: int,
        ends: Collection[int] = (),
    ) -> list[int]:
        """The tokens that follow."""


def model_that_writes(spec: RunSpec, parameters: Vector, *, base: Path | None = None) -> WritesOn:
    """The run's model with the values of a state, on the CPU; it holds a copy of them.

    One of transformers goes on within its context only, and raises UsageError beyond it. `base` is the
    folder of the model that adapters belong to. Raises UsageError for a model that makes no tokens.
    """
    if isinstance(spec.model, DecoderModel):
        return partial(sample_tokens, decoder_of(spec, parameters))
    if not isinstance(spec.model, TransformersModel):
        raise UsageError(
            "the run's model is a function's, and nobody knows whether what it gives is text",
            next_step="export it with 'atoll export OUT', and use it in a program of your own",
        )
    from node.island.models.describing import model_with

    return partial(_generated, model_with(spec, parameters, base=base).eval())


def _generated(
    model: Any,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    temperature: float,
    seed: int,
    ends: Collection[int] = (),
) -> list[int]:
    """As `sample_tokens`, of a model of transformers."""
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and len(prompt) + num_tokens > most:
        raise UsageError(
            f"a prompt of {len(prompt)} tokens and {num_tokens} more are beyond the model's {most}",
            next_step="shorten the prompt, or ask for fewer with --tokens",
        )
    torch.manual_seed(seed)
    chances = {"do_sample": True, "temperature": float(temperature), "top_k": 0, "top_p": 1.0}
    chosen = model.generate(
        torch.tensor([list(prompt)]),
        # Nothing is padded; left to itself, transformers would take a 0 of the prompt for padding.
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=0,
        **(chances if temperature else {"do_sample": False}),
    )
    return list(chosen[0, len(prompt) :].tolist())


def sample_tokens(
    decoder: Decoder,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    temperature: float,
    seed: int,
    ends: Collection[int] = (),
) -> list[int]:
    """Tokens that follow the prompt: `num_tokens`, or fewer that end with one of `ends`.

    Temperature 0 takes the likeliest each time. Within one context a token costs a pass over itself
    alone; beyond it, over the last context.
    """
    if temperature < 0:
        raise ValueError(f"a temperature of {temperature} is below 0")
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    with torch.no_grad():
        for logits in _logits_after(decoder, tokens):
            if len(tokens) == len(prompt) + num_tokens or (
                len(tokens) > len(prompt) and tokens[-1] in ends
            ):
                break
            if temperature == 0:
                token = logits.argmax()
            else:
                chances = torch.softmax(logits / temperature, dim=-1)
                token = torch.multinomial(chances, 1, generator=generator)
            tokens.append(int(token))
    return tokens[len(prompt) :]


def _logits_after(decoder: Decoder, tokens: list[int]) -> Iterator[Tensor]:
    """Logits [vocabulary] after `tokens`, which who takes them lengthens by one each time."""
    stack = decoder.model
    attentions = [module for module in stack.modules() if isinstance(module, Attention)]
    usual = [attention.attend for attention in attentions]
    cosines, sines = stack.cosines, stack.sines
    try:
        for attention in attentions:
            attention.attend = _RememberingAttention(attention.window)
        position = 0
        while len(tokens) <= decoder.context:
            stack.cosines, stack.sines = cosines[position:], sines[position:]
            new, position = tokens[position:], len(tokens)
            yield decoder(torch.tensor([new]))[0, -1].float()
    finally:
        stack.cosines, stack.sines = cosines, sines
        for attention, attend in zip(attentions, usual, strict=True):
            attention.attend = attend
    while True:
        yield decoder(torch.tensor([tokens[-decoder.context :]]))[0, -1].float()


class _RememberingAttention:
    """Causal attention of new positions to all before, whose keys and values it keeps."""

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._keys_and_values: Tensor | None = None  # [2, B, kv heads, T so far, head size]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See node.island.models.decoder_modules.Attend."""
        new = torch.stack((k, v))
        before = self._keys_and_values
        self._keys_and_values = new if before is None else torch.cat((before, new), dim=3)
        k, v = self._keys_and_values
        return attend_to_earlier(q, k, v, self._window)
