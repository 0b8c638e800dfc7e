"""The model is Hugging Face's Llama to the bit, and every machine begins with the same weights."""

from typing import Any

import blake3
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 — its usual name

from node.island.models.decoder_modules import Decoder, attend_in_window, causal_mask
from node.island.models.first_weights import initial_parameters
from node.island.models.generate import decoder_of, sample_tokens
from protocol.errors import ConfigError
from protocol.run.models import DecoderModel, layout_of
from protocol.run.run_files import validated
from tests.tiny_runs import run_of

TIED = DecoderModel(
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=24,
    context=16,
    rope_theta=500.0,
    norm_epsilon=1e-3,
)
QWEN = TIED.model_copy(
    update={"head_size": 6, "qk_norm": True, "attention_bias": "qkv", "tie_embeddings": False}
)
BIASED = TIED.model_copy(update={"attention_bias": "all", "mlp_bias": True})
SLIDING = TIED.model_copy(update={"sliding_window": 3, "sliding_layers": (1,)})
UNTIED = TIED.model_copy(update={"tie_embeddings": False})
PROMPT = b"def main(self):\n"

# From transformers 5.23.0: LlamaForCausalLM.from_pretrained(export of 8 · the weights of seed 7),
# logits [0, -1, :8] and [0, 5, 100:104] of PROMPT. Regenerate by the same lines, never from our model.
HUGGING_FACE_LOGITS = {
    True: (
        [-3.940479, -2.498767, 3.040722, -3.096305, 2.647090, 9.761934, -3.935975, -2.015586],
        [1.661639, 5.780556, 3.234252, 4.397199],
    ),
    False: (
        [-2.936715, 4.414270, -5.107502, 7.385520, -1.733201, 3.081876, -1.823040, 7.049354],
        [2.024110, 5.623072, -4.592959, -2.871814],
    ),
}


def tokens_of(text: bytes) -> torch.Tensor:
    return torch.tensor([list(text)])


@pytest.mark.parametrize("spec", [TIED, UNTIED])
def test_logits_are_those_of_hugging_face_llama(spec: DecoderModel) -> None:
    decoder = decoder_of(run_of(spec), 8 * initial_parameters(run_of(spec, seed=7)))
    with torch.no_grad():
        logits = decoder(tokens_of(PROMPT))[0]
    last, sixth = HUGGING_FACE_LOGITS[spec.tie_embeddings]
    assert logits[-1, :8].tolist() == pytest.approx(last, abs=2e-4)
    assert logits[5, 100:104].tolist() == pytest.approx(sixth, abs=2e-4)


@pytest.mark.parametrize("spec", [TIED, UNTIED, QWEN, BIASED, SLIDING, DecoderModel()])
def test_the_layout_names_every_tensor_of_the_module_in_its_order(spec: DecoderModel) -> None:
    module = Decoder(spec)
    named = [(name, tuple(tensor.shape)) for name, tensor in module.named_parameters()]
    assert [(t.name, t.shape) for t in spec.tensors()] == named
    assert set(module.state_dict()) == {name for name, _ in named}
    assert layout_of(run_of(spec)).num_elements == sum(p.numel() for p in module.parameters())


def test_no_logit_sees_a_later_byte() -> None:
    decoder = decoder_of(run_of(TIED), 8 * initial_parameters(run_of(TIED, seed=0)))
    with torch.no_grad():
        before, after = decoder(tokens_of(b"abcdefgh")), decoder(tokens_of(b"abcdeXgh"))
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5:], after[0, 5:])


@pytest.mark.parametrize(("length", "window"), [(16, 3), (16, 15), (17, 5), (12, 4), (9, 1)])
def test_attention_by_blocks_is_attention_under_the_mask_of_a_window(
    length: int, window: int
) -> None:
    draw = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(2, heads, length, 8, generator=draw).requires_grad_() for heads in (4, 2, 2)
    )
    mask = causal_mask(length, length, q.device, window)
    assert mask.sum(dim=1).tolist() == [min(i + 1, window) for i in range(length)]
    masked = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    by_blocks = attend_in_window(q, k, v, window=window)
    torch.testing.assert_close(by_blocks, masked, rtol=0, atol=1e-5)
    weights = torch.randn(masked.shape, generator=draw)
    for ours, theirs in zip(
        torch.autograd.grad((by_blocks * weights).sum(), (q, k, v)),
        torch.autograd.grad((masked * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_window_hides_what_lies_further_back_in_its_layers_only() -> None:
    narrow = SLIDING.model_copy(update={"sliding_layers": None, "num_layers": 1})
    for spec, is_seen in ((narrow, False), (SLIDING, True)):  # whose first layer sees all
        decoder = decoder_of(run_of(spec), 8 * initial_parameters(run_of(spec)))
        with torch.no_grad():
            before, after = decoder(tokens_of(b"abcdefgh")), decoder(tokens_of(b"Xbcdefgh"))
        assert not torch.allclose(before[0, 2], after[0, 2])
        assert torch.allclose(before[0, 3:], after[0, 3:]) is not is_seen


@pytest.mark.parametrize("spec", [TIED, QWEN, SLIDING])
def test_a_document_is_seen_as_if_it_stood_alone(spec: DecoderModel) -> None:
    decoder = decoder_of(run_of(spec), 8 * initial_parameters(run_of(spec)))
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2], [0] * 12])
    text = torch.stack([tokens_of(b"abcdefghijkl")[0], tokens_of(b"mnopqrstuvwx")[0]])
    with torch.no_grad():
        together = decoder(text, documents)
        assert torch.allclose(together[0, :5], decoder(text[:1, :5])[0], atol=1e-4)
        assert torch.allclose(together[1], decoder(text[1:])[0], atol=1e-4)
        # RoPE says how far apart tokens are, so where a document stands in its row is all the same.
        assert torch.allclose(together[0, 5:11], decoder(text[:1, 5:11])[0], atol=1e-4)
        assert not torch.allclose(together[0, 5:11], decoder(text)[0, 5:11], atol=1e-2)


def test_a_window_as_long_as_a_sample_is_none() -> None:
    wide = SLIDING.model_copy(update={"sliding_window": TIED.context})
    assert [wide.window_of(i) for i in range(2)] == [None, None]
    assert [SLIDING.window_of(i) for i in range(2)] == [None, 3]


def test_a_soft_cap_bends_logits_towards_it() -> None:
    run = run_of(TIED.model_copy(update={"logit_softcap": 5.0}))
    with torch.no_grad():
        plain, capped = (
            decoder_of(each, 8 * initial_parameters(run))(tokens_of(PROMPT))
            for each in (run_of(TIED), run)
        )
    assert plain.abs().max() > 5
    torch.testing.assert_close(capped, 5 * torch.tanh(plain / 5))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"sliding_layers": [0]}, "sliding_layers needs sliding_window"),
        ({"sliding_window": 8, "sliding_layers": [1, 0]}, r"sliding_layers \[1, 0\] do not rise"),
        ({"sliding_window": 8, "sliding_layers": [3]}, "has 3, and layers go from 0 to 2"),
        ({"rope_scaling": {"factor": 8.0}}, r"has no original_context"),
        (
            {"rope_scaling": {"factor": 8.0, "original_context": 8, "high_freq_factor": 1.0}},
            "high_freq_factor 1.0 is not above low_freq_factor 1.0",
        ),
    ],
)
def test_keys_that_do_not_fit_each_other_are_refused(keys: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        validated({"model": keys}, origin="run.toml")


def test_documents_are_kept_apart_only_where_it_is_known_where_they_begin() -> None:
    apart = {"across_documents": False}
    with pytest.raises(ConfigError, match='false needs source = "tokens"'):
        validated({"data": apart}, origin="run.toml")
    tokens = {"source": "tokens", "paths": ["x"], "digest": "0" * 64}
    with pytest.raises(ConfigError, match="a function's model sees what it likes of a row"):
        model = {"source": "function", "function": "a:b"}
        validated({"model": model, "data": tokens | apart}, origin="run.toml")
    assert not validated({"data": tokens | apart}, origin="run.toml").data.across_documents


def test_first_weights_never_change_their_bits() -> None:
    weights = initial_parameters(run_of(TIED, seed=7))
    digest = blake3.blake3(weights.astype("<f4").tobytes()).hexdigest()
    assert digest == "edda5b6af1a3c75c5809784e1ba61f5d53ad1978fb4c629a6eed22e6fa4e566f"
    assert not np.array_equal(weights, initial_parameters(run_of(TIED, seed=8)))


def test_first_weights_have_the_deviations_that_they_say() -> None:
    spec = DecoderModel(num_layers=2, attention_bias="all", mlp_bias=True, qk_norm=True)
    weights = initial_parameters(run_of(spec, seed=0))
    tensors = {
        place.name: weights[place.offset : place.offset + place.num_elements]
        for place in layout_of(run_of(spec)).places
    }
    for name, values in tensors.items():
        if "norm" in name:
            assert (values == 1).all(), name
        elif name.endswith(".bias"):
            assert (values == 0).all(), name
        else:
            is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert values.std() == pytest.approx(0.01 if is_residual else 0.02, rel=0.06), name
            assert abs(values.mean()) < 1e-3, name
    first, second = (tensors[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    normal_within_one_deviation = 0.683
    assert (np.abs(first) < 0.02).mean() == pytest.approx(normal_within_one_deviation, abs=0.02)


@pytest.mark.parametrize("spec", [TIED, QWEN, SLIDING])
def test_tokens_follow_their_seed_and_go_on_past_the_context(spec: DecoderModel) -> None:
    decoder = decoder_of(run_of(spec), 8 * initial_parameters(run_of(spec, seed=0)))

    def sampled(temperature: float, seed: int) -> list[int]:
        return sample_tokens(
            decoder, list(b"def "), num_tokens=24, temperature=temperature, seed=seed
        )

    assert len(sampled(1.0, 1)) == 24
    assert sampled(1.0, 1) == sampled(1.0, 1) != sampled(1.0, 2)
    assert sampled(0.0, 1) == sampled(0.0, 2)
    tokens = list(b"def ")
    with torch.no_grad():
        for _ in range(24):  # without keys and values of before
            tokens.append(int(decoder(torch.tensor([tokens[-spec.context :]]))[0, -1].argmax()))
    assert sampled(0.0, 1) == tokens[4:]


def test_nothing_is_written_after_an_end() -> None:
    decoder = decoder_of(run_of(TIED), 8 * initial_parameters(run_of(TIED, seed=0)))
    options: dict[str, Any] = {"num_tokens": 24, "temperature": 0.0, "seed": 0}
    whole = sample_tokens(decoder, [1, 2], **options)
    end = whole[5]
    cut = sample_tokens(decoder, [end, 2], ends={end}, **options)
    again = sample_tokens(decoder, [end, 2], **options)
    assert cut == again[: again.index(end) + 1 if end in again else 24]
    assert sample_tokens(decoder, [1, 2], ends={end}, **options) == whole[: whole.index(end) + 1]
