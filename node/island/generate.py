"""Text from a model, byte by byte: to see what a run has learned."""

import torch

from node.island.model import Decoder, copy_parameters
from node.outer_state import Vector
from protocol.layout import layout_of
from protocol.run_spec import RunSpec


def decoder_of(spec: RunSpec, parameters: Vector) -> Decoder:
    """A model on the CPU with the weights of a canonical vector."""
    decoder = Decoder(spec.decoder)
    copy_parameters(decoder, layout_of(spec), parameters)
    return decoder.eval()


def sample_text(
    decoder: Decoder, prompt: bytes, *, num_bytes: int, temperature: float, seed: int
) -> bytes:
    """`num_bytes` bytes that follow the prompt; temperature 0 takes the likeliest each time.

    Each byte costs a whole pass over at most one context: there is no key-value cache. An empty
    prompt stands for the zero byte that separates files.
    """
    if temperature < 0:
        raise ValueError(f"a temperature of {temperature} is below 0")
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt or b"\0")
    with torch.no_grad():
        for _ in range(num_bytes):
            window = torch.tensor([tokens[-decoder.context :]])  # [1, T]
            logits = decoder(window)[0, -1].float()  # [256]
            if temperature == 0:
                token = logits.argmax()
            else:
                chances = torch.softmax(logits / temperature, dim=-1)
                token = torch.multinomial(chances, 1, generator=generator)
            tokens.append(int(token))
    return bytes(tokens[len(prompt or b"\0") :])
