"""The decoder that comes with Atoll, with the parameter names and shapes of Hugging Face.

Names, shapes and arithmetic follow `LlamaForCausalLM`, and with the keys for them `Qwen2ForCausalLM`,
`Qwen3ForCausalLM` and `MistralForCausalLM`, so that an export loads there unchanged.
What lives elsewhere: names and shapes in the canonical vector (protocol.run.models), the first weights
(first_weights, beside this), training (node.island.training.trainer), folders of transformers
(node.models.families).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 — its usual name
from torch import Tensor, nn

from node.island.models.architecture import Counted
from protocol.run.models import DecoderModel, RopeScaling


def rotary_tables(spec: DecoderModel) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE, each [context, head size], for the rotate-half convention.

    RoFormer (Su et al., 2021), section 3.2.2, with the pairs laid out as Llama's checkpoints have
    them: value i turns together with value i + head size / 2.
    """
    head_size = spec.values_of_head
    frequencies = 1.0 / spec.rope_theta ** (torch.arange(0, head_size, 2).float() / head_size)
    if spec.rope_scaling is not None:
        frequencies = stretched(frequencies, spec.rope_scaling)
    positions = torch.arange(spec.context).float()
    angles = torch.outer(positions, frequencies)  # [context, head size / 2]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """RoPE's frequencies, in radians a position, for contexts longer than the original one.

    Llama 3.1 (Grattafiori et al., 2024): fast ones stay, slow ones are divided by the factor, and
    those between go from one to the other with the number of turns that they make.
    """
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)  # of the frequency as it was
    return (1 - share) * frequencies / scaling.factor + share * frequencies


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns queries or keys [B, heads, T, head size] by their positions; tables [T, head size]."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Values for queries [B, heads, T, head size] from keys and values [B, kv heads, T, head size]."""


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each position attends to itself and to those before it."""
    k, v = for_each_head(k, v, q)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


def attend_in_window(q: Tensor, k: Tensor, v: Tensor, *, window: int) -> Tensor:
    """Each position attends to itself and to the `window` - 1 before it.

    Block by block: queries of a window attend to its keys and to those of the window before, which
    costs T · window rather than T², in time and for the mask.
    """
    batch, _, length, head_size = q.shape
    if length <= window:
        return attend_causally(q, k, v)
    first = attend_causally(q[:, :, :window], k[:, :, :window], v[:, :, :window])
    k, v = for_each_head(k, v, q)
    missing = -length % window

    def folded(x: Tensor, size: int) -> Tensor:
        """The blocks [B · N, heads, size, head size] that begin after each window."""
        blocks = F.pad(x, (0, 0, 0, missing)).unfold(2, size, window).mT
        return blocks.transpose(1, 2).flatten(0, 1)

    mixed = F.scaled_dot_product_attention(
        folded(q[:, :, window:], window),
        folded(k, 2 * window),
        folded(v, 2 * window),
        attn_mask=causal_mask(window, 2 * window, q.device, window),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    later = mixed.view(batch, -1, q.shape[1], window, head_size).transpose(1, 2)
    later = later.flatten(2, 3)[:, :, : length - window]  # [B, heads, T - window, head size]
    return torch.cat((first, later), dim=2)


def attend_to_earlier(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention of queries to keys that end at the same position."""
    if window is not None:
        seen = q.shape[2] + window - 1  # by the first query or a later one
        k, v = k[:, :, -seen:], v[:, :, -seen:]
    k, v = for_each_head(k, v, q)
    mask = causal_mask(q.shape[2], k.shape[2], q.device, window)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
    )


def within_documents(documents: Tensor) -> Tensor:
    """What hides later positions and other documents [B, 1, T, T], to be added to scores.

    `documents` [B, T] numbers them. Made once and shared by all layers, as it is the largest thing there.
    """
    length = documents.shape[1]
    is_seen = causal_mask(length, length, documents.device) & (
        documents[:, None, :, None] == documents[:, None, None, :]
    )
    return torch.zeros(is_seen.shape, device=documents.device).masked_fill(~is_seen, -math.inf)


def attend_under(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Attention under a mask [B, 1, T, T] that is added to scores, and a window."""
    if window is not None:
        is_near = causal_mask(q.shape[2], k.shape[2], q.device, window)
        mask = mask.masked_fill(~is_near, -math.inf)
    k, v = for_each_head(k, v, q)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask.to(q.dtype), enable_gqa=q.shape[1] != k.shape[1]
    )


def causal_mask(
    num_queries: int, num_keys: int, device: torch.device, window: int | None = None
) -> Tensor:
    """Which of the keys [queries, keys] a query attends to, where both end at the same position."""
    earlier = num_keys - num_queries
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(earlier)
    return mask if window is None else mask.triu(earlier - window + 1)


def for_each_head(k: Tensor, v: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, repeated for the query heads that share them where kernels want it.

    On a GPU only those for half precision take grouped heads: fp32 would fall to the kernel that
    writes all T × T scores, which is far more than a copy of keys and values.
    """
    num_shared = q.shape[1] // k.shape[1]
    kind = q.device.type
    if num_shared == 1 or kind == "cpu" or torch.is_autocast_enabled(kind):
        return k, v
    return k.repeat_interleave(num_shared, dim=1), v.repeat_interleave(num_shared, dim=1)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share a key and value head (GQA)."""

    def __init__(self, spec: DecoderModel, layer: int) -> None:
        super().__init__()
        self.head_size = spec.values_of_head
        self.window = spec.window_of(layer)
        self.attend: Attend = (  # context parallel puts its own here
            attend_causally
            if self.window is None
            else partial(attend_in_window, window=self.window)
        )
        query_size, kv_size = (
            self.head_size * heads for heads in (spec.num_heads, spec.num_kv_heads)
        )
        has_bias, has_output_bias = spec.attention_bias != "none", spec.attention_bias == "all"
        self.q_proj = nn.Linear(spec.hidden_size, query_size, bias=has_bias)
        self.k_proj = nn.Linear(spec.hidden_size, kv_size, bias=has_bias)
        self.v_proj = nn.Linear(spec.hidden_size, kv_size, bias=has_bias)
        self.o_proj = nn.Linear(query_size, spec.hidden_size, bias=has_output_bias)
        self.has_qk_norm = spec.qk_norm
        if spec.qk_norm:  # Henry et al., "Query-key normalization for Transformers", 2020
            self.q_norm = nn.RMSNorm(self.head_size, eps=spec.norm_epsilon)
            self.k_norm = nn.RMSNorm(self.head_size, eps=spec.norm_epsilon)

    def forward(
        self, x: Tensor, cosines: Tensor, sines: Tensor, *, mask: Tensor | None = None
    ) -> Tensor:
        """Mixes x [B, T, hidden] over the positions before each, or those of them that a mask leaves."""
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_size)
        q = self.q_proj(x).view(heads)  # [B, T, heads, head size]
        k = self.k_proj(x).view(heads)  # [B, T, kv heads, head size]
        v = self.v_proj(x).view(heads)  # [B, T, kv heads, head size]
        if self.has_qk_norm:
            # In the norms' own fp32 also where products come out in bf16: no fused kernel takes both.
            dtype = self.q_norm.weight.dtype
            q, k = self.q_norm(q.to(dtype)), self.k_norm(k.to(dtype))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, heads, T, …]
        q, k = rotate(q, cosines, sines), rotate(k, cosines, sines)
        mixed = self.attend(q, k, v) if mask is None else attend_under(mask, q, k, v, self.window)
        return cast("Tensor", self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1)))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, "GLU variants improve Transformer", 2020)."""

    def __init__(self, spec: DecoderModel) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.ffn_size, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.hidden_size, spec.ffn_size, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.ffn_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transforms each position of x [B, T, hidden] by itself."""
        return cast("Tensor", self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class DecoderLayer(nn.Module):
    """Attention, then feed-forward, each on normalised input and added to the stream."""

    def __init__(self, spec: DecoderModel, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(spec, layer)
        self.mlp = FeedForward(spec)
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_epsilon)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_epsilon)

    def forward(
        self, x: Tensor, cosines: Tensor, sines: Tensor, *, mask: Tensor | None = None
    ) -> Tensor:
        """One layer over x [B, T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines, mask=mask)
        return cast("Tensor", x + self.mlp(self.post_attention_layernorm(x)))


class Stack(nn.Module):
    """Embedding, layers and the last norm: what Hugging Face calls `model`."""

    cosines: Tensor  # [context, head size]; with context parallel the rank's own positions
    sines: Tensor  # likewise

    def __init__(self, spec: DecoderModel, tables: tuple[Tensor, Tensor] | None) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        # A dictionary, not a list: names stay canonical when a pipeline rank holds layers 4 to 7.
        self.layers = nn.ModuleDict({str(i): DecoderLayer(spec, i) for i in range(spec.num_layers)})
        self.norm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_epsilon)
        cosines, sines = rotary_tables(spec) if tables is None else tables
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)


class Decoder(nn.Module):
    """The whole model, or the part of it that `cut` leaves. Its weights are torch's own at first.

    `tables` are those of rotary_tables(), for who has them already, or is to fill them.
    """

    def __init__(self, spec: DecoderModel, tables: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        self.context = spec.context
        self.model = Stack(spec, tables)
        if not spec.tie_embeddings:
            self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self.is_tied = spec.tie_embeddings
        self.logit_softcap = spec.logit_softcap
        self.is_first = self.is_last = True

    def cut(self, layers: range, *, is_first: bool, is_last: bool) -> None:
        """Leaves one stage of a pipeline. A tied embedding stays at both ends."""
        self.is_first, self.is_last = is_first, is_last
        for name in list(self.model.layers):
            if int(name) not in layers:
                del self.model.layers[name]
        if not is_first and not (is_last and self.is_tied):
            del self.model.embed_tokens
        if not is_last:
            del self.model.norm
            if not self.is_tied:
                del self.lm_head

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits [B, T, vocabulary] of the token after each of tokens [B, T], T ≤ context.

        A stage takes and gives hidden states [B, T, hidden] where the model is cut. With `documents`
        [B, T], of a model that is not, a token sees its own document only.
        """
        mask = None if documents is None else within_documents(documents)
        stack = self.model
        # Hidden states come from a whole context, and may be one rank's part of its positions.
        length = x.shape[1] if self.is_first else len(stack.cosines)
        cosines, sines = stack.cosines[:length], stack.sines[:length]
        if self.is_first:
            x = stack.embed_tokens(x)
        for layer in stack.layers.values():
            x = layer(x, cosines, sines, mask=mask)
        if not self.is_last:
            return x
        head = stack.embed_tokens.weight if self.is_tied else self.lm_head.weight
        logits = F.linear(stack.norm(x), head)
        if self.logit_softcap is None:
            return logits
        # Gemma 2 (Gemma Team, 2024), section 2: smoothly within ± the cap.
        return self.logit_softcap * torch.tanh(logits / self.logit_softcap)


NO_TARGET = -100
"""Stands for the token that padding should predict: none. Torch's own number for it."""


def mean_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over targets [B, T] of what logits [B, T, vocabulary] miss; padding counts as 0.

    A sum, divided: over sharded logits torch has no mean.
    """
    flat = logits.flatten(0, 1).float()
    nats = F.cross_entropy(flat, targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
    return nats / targets.numel()


class Objective(nn.Module):
    """The loss as a module, so that DistributedDataParallel wraps forward and loss as one."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Mean nats per token over tokens and targets, each [B, T]; `documents` as in Decoder."""
        return mean_nats(self.decoder(tokens, documents), targets)


class TokenInputs:
    """Tokens and targets of windows; the part of Architecture that is the same for all such models."""

    def inputs(self, batch: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tokens, and the ones after them, [B, T] each, of windows [B, T + 1]; or the two as they come.

        And their documents, [B, T], where attention keeps to those.
        """
        return batch if isinstance(batch, tuple) else (batch[:, :-1], batch[:, 1:])

    def padded(self, inputs: tuple[Tensor, ...], rows: int) -> tuple[Tensor, ...]:
        """Exactly `rows` samples: pipelines have one shape, and shards are gathered by all at once."""
        tokens, targets, *documents = inputs
        missing = rows - len(tokens)
        return (
            nn.functional.pad(tokens, (0, 0, 0, missing)),
            nn.functional.pad(targets, (0, 0, 0, missing), value=NO_TARGET),
            *(nn.functional.pad(each, (0, 0, 0, missing)) for each in documents),
        )

    def measured(
        self, mean: Tensor | Counted, inputs: tuple[Tensor, ...], num_samples: int
    ) -> tuple[Tensor, Tensor]:
        """The mean is over all targets, and those that are not counted added nothing to it."""
        assert isinstance(mean, Tensor)
        targets = inputs[1]
        return mean * targets.numel(), (targets != NO_TARGET).sum()
