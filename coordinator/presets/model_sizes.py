"""Decoders by name, with the batch and the rate that go with their size.

Learning rates of 125m and above are those of GPT-3 (Brown et al. 2020, table 2.1); 0.2m is the model of
the demo and of the template, with their batch and rate. Those between are in between, and not tried.

Muon's steps are scaled to the size of AdamW's, so that AdamW's rates suit it (Liu et al. 2025, "Muon is
Scalable for LLM Training"); how much higher both may be beside each other was tried with the demo's model.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.run.models import DecoderModel

MUON_TIMES, BESIDE_MUON_TIMES = 1.2, 5.0
"""Muon's rate on matrices, and AdamW's on all else then, in multiples of AdamW's on everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model and what usually goes with its size."""

    model: DecoderModel
    batch: int  # samples of one node in an inner step
    learning_rate: float  # AdamW's, at its peak

    @property
    def tokens_per_inner_step(self) -> int:
        """Of one node."""
        return self.batch * self.model.context

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(tensor.num_elements for tensor in self.model.tensors())


def _named(
    hidden: int, layers: int, heads: int, kv: int, ffn: int, context: int, batch: int, rate: float
) -> NamedModel:
    model = DecoderModel(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        ffn_size=ffn,
        context=context,
        qk_norm=True,
    )
    return NamedModel(model=model, batch=batch, learning_rate=rate)


NAMED_MODELS: Mapping[str, NamedModel] = {
    "0.2m": _named(64, 3, 4, 2, 192, 128, 8, 1e-2),
    "3m": _named(192, 8, 6, 6, 480, 256, 32, 2e-3),
    "42m": _named(512, 14, 8, 8, 1360, 512, 64, 1e-3),
    "125m": _named(768, 18, 12, 12, 2048, 1024, 64, 6e-4),
    "350m": _named(1024, 28, 16, 16, 2736, 1024, 128, 3e-4),
    "1b": _named(2048, 20, 16, 16, 5504, 2048, 128, 2e-4),
    "7b": _named(4096, 35, 32, 32, 11008, 2048, 256, 1.2e-4),
}
