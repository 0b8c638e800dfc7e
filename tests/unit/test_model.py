"""The model is Hugging Face's Llama to the bit, and every machine begins with the same weights."""

import blake3
import numpy as np
import pytest
import torch

from node.island.first_weights import initial_parameters
from node.island.generate import decoder_of, sample_text
from node.island.model import Decoder
from protocol.layout import layout_of
from protocol.models import DecoderModel
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


@pytest.mark.parametrize("spec", [TIED, UNTIED, DecoderModel()])
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


def test_first_weights_never_change_their_bits() -> None:
    weights = initial_parameters(run_of(TIED, seed=7))
    digest = blake3.blake3(weights.astype("<f4").tobytes()).hexdigest()
    assert digest == "edda5b6af1a3c75c5809784e1ba61f5d53ad1978fb4c629a6eed22e6fa4e566f"
    assert not np.array_equal(weights, initial_parameters(run_of(TIED, seed=8)))


def test_first_weights_have_the_deviations_that_they_say() -> None:
    spec = DecoderModel(num_layers=2)
    weights = initial_parameters(run_of(spec, seed=0))
    tensors = {
        place.name: weights[place.offset : place.offset + place.num_elements]
        for place in layout_of(run_of(spec)).places
    }
    for name, values in tensors.items():
        if "norm" in name:
            assert (values == 1).all(), name
        else:
            is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert values.std() == pytest.approx(0.01 if is_residual else 0.02, rel=0.06), name
            assert abs(values.mean()) < 1e-3, name
    first, second = (tensors[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    normal_within_one_deviation = 0.683
    assert (np.abs(first) < 0.02).mean() == pytest.approx(normal_within_one_deviation, abs=0.02)


def test_sampled_text_follows_its_seed_and_goes_on_past_the_context() -> None:
    decoder = decoder_of(run_of(TIED), 8 * initial_parameters(run_of(TIED, seed=0)))

    def sampled(temperature: float, seed: int) -> bytes:
        return sample_text(decoder, b"def ", num_bytes=24, temperature=temperature, seed=seed)

    assert len(sampled(1.0, 1)) == 24
    assert sampled(1.0, 1) == sampled(1.0, 1) != sampled(1.0, 2)
    assert sampled(0.0, 1) == sampled(0.0, 2)
