"""How a model is cut into fragments, and how ranks take one over without losing the others."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.island.data.dataset import Corpus
from node.island.models.first_weights import initial_parameters
from node.island.models.generate import decoder_of
from node.island.parallel.mesh import Mesh
from node.island.training.trainer import Trainer
from node.outer_state import Vector
from protocol.errors import ConfigError
from protocol.run.models import DecoderModel, Layout, layout_of
from protocol.run.run_files import validated
from protocol.run.run_spec import RunSpec
from tests.tiny_runs import run_of, tiny
from tests.unit.work_scene import inner_work

BLEND = 0.25


@given(
    num_layers=st.integers(1, 9),
    share=st.floats(0, 1),
    tie=st.booleans(),
    hidden=st.sampled_from([16, 64]),
)
def test_fragments_are_strided_whole_and_cover_every_tensor_once(
    num_layers: int, share: float, tie: bool, hidden: int
) -> None:
    spec = DecoderModel(num_layers=num_layers, hidden_size=hidden, tie_embeddings=tie)
    num_fragments = max(1, round(share * num_layers))
    layout = layout_of(run_of(spec, fragments=num_fragments))
    assert [f.index for f in layout.fragments] == list(range(num_fragments))
    assert sorted((p.name, p.shape) for p in layout.places) == sorted(
        (t.name, t.shape) for t in spec.tensors()
    )
    at = 0
    for fragment in layout.fragments:
        assert fragment.start == at
        for place in layout.places:
            if fragment.start <= place.offset < fragment.start + fragment.num_elements:
                assert place.offset == at
                at += place.num_elements
                layer = place.name.removeprefix("model.layers.").partition(".")[0]
                assert not layer.isdigit() or int(layer) % num_fragments == fragment.index
        assert at == fragment.start + fragment.num_elements
    assert at == layout.num_elements == layout_of(run_of(spec)).num_elements


def test_what_is_in_no_layer_goes_where_there_is_least() -> None:
    spec = DecoderModel(num_layers=4, tie_embeddings=False)
    layout = layout_of(run_of(spec, fragments=3))  # of four layers the first fragment holds two
    owner = {p.name: f.index for p in layout.places for f in layout.fragments if _holds(f.span, p)}
    assert {owner["model.embed_tokens.weight"], owner["lm_head.weight"]} == {1, 2}
    assert (
        layout_of(run_of(spec)).places
        == Layout.of([(t.name, t.shape) for t in spec.tensors()]).places
    )


def _holds(span: slice, place: object) -> bool:
    return span.start <= place.offset < span.stop  # type: ignore[attr-defined]


def test_more_fragments_than_layers_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"fragments = 4.* the model has 3"):
        validated({"exchange": {"fragments": 4}}, origin="run.toml")
    with pytest.raises(ConfigError, match=r'blend = 0.5 belongs to overlap = "keep" or "blend"'):
        validated({"exchange": {"blend": 0.5}}, origin="run.toml")
    with pytest.raises(ConfigError, match=r'blend = 0 drops .* take overlap = "keep"'):
        validated({"exchange": {"overlap": "blend", "blend": 0}}, origin="run.toml")


def test_a_run_that_ends_before_each_fragment_had_a_round_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rounds = 2: each .* fragments = 3"):
        validated({"run": {"rounds": 2}, "exchange": {"fragments": 3}}, origin="run.toml")


def test_the_weights_of_a_model_do_not_depend_on_its_fragments() -> None:
    whole, cut = (run_of(DecoderModel(), seed=5, fragments=number) for number in (1, 3))
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        one = decoder_of(whole, initial_parameters(whole))(tokens)
        three = decoder_of(cut, initial_parameters(cut))(tokens)
    assert torch.equal(one, three)
    assert initial_parameters(whole).tobytes() != initial_parameters(cut).tobytes()


# Taking a fragment over


def spec_of(overlap: str) -> RunSpec:
    exchange: dict[str, object] = {"fragments": 2, "overlap": overlap.removesuffix(" all")}
    if overlap in ("keep", "blend"):
        exchange["blend"] = BLEND
    return tiny(model={"num_layers": 2}, exchange=exchange)


class Rank:
    """A trainer that has trained, published a fragment, and trained on."""

    def __init__(self, corpus: Corpus, overlap: str) -> None:
        spec = spec_of(overlap)
        self.trainer = Trainer(
            spec=spec, corpus=corpus, device=torch.device("cpu"), mesh=Mesh(), clock=lambda: 0.0
        )
        self.layout = layout_of(spec)
        self.old = initial_parameters(spec)
        self.published = np.zeros(self.layout.largest_fragment, dtype=np.float32)
        self.trainer.adopt(self.old)
        self.train()
        self.trainer.publish(self.published, 1)
        self.train()
        self.before = self.local
        self.new = self.old + np.float32(0.01)

    def train(self) -> None:
        work = inner_work(2, num_samples=8, token_clock=1000, round_tokens=1)
        self.trainer.train(work, lambda progress: None)

    @property
    def local(self) -> Vector:
        vector = np.zeros_like(self.old)
        for fragment in self.layout.fragments:
            self.trainer.publish(vector[fragment.span], fragment.index)
        return vector


@pytest.mark.parametrize(
    ("overlap", "is_taken"),
    [
        ("none", True),
        ("keep", True),
        ("keep", False),
        ("keep all", True),
        ("blend", True),
        ("blend", False),
    ],
)
def test_a_rank_takes_one_fragment_over_and_goes_on_from_its_own_of_the_others(
    corpus: Corpus, overlap: str, is_taken: bool
) -> None:
    rank = Rank(corpus, overlap)
    rank.trainer.merge(rank.new, rank.published, 1, is_taken=is_taken)
    own, other = rank.layout.fragments[1].span, rank.layout.fragments[0].span
    published = rank.published[: own.stop - own.start]
    trained_since = rank.before[own] - published
    assert np.abs(trained_since).max() > 1e-4
    expected = {
        ("none", True): rank.new[own],
        ("keep", True): rank.before[own] + (1 - BLEND) * (rank.new[own] - published),
        ("blend", True): BLEND * rank.before[own] + (1 - BLEND) * rank.new[own],
    }.get((overlap, is_taken), rank.new[own] + trained_since)
    np.testing.assert_allclose(rank.local[own], expected, atol=1e-6)
    assert np.array_equal(rank.local[other], rank.before[other])


def test_losses_of_single_samples_are_those_at_other_parameters_and_leave_the_rank_its_own(
    corpus: Corpus,
) -> None:
    rank = Rank(corpus, "none")
    there = rank.trainer.losses_at(rank.old, (3, 900, 4))
    assert np.array_equal(rank.local, rank.before)
    assert there != rank.trainer.losses_at(rank.before, (3, 900, 4))
    assert rank.trainer.losses_at(rank.old, (900,)) == there[1:2]
    rank.trainer.adopt(rank.old)
    assert there == rank.trainer.losses_at(rank.local, (3, 900, 4))


def test_an_evaluation_is_of_the_global_parameters_and_leaves_the_rank_its_own(
    corpus: Corpus,
) -> None:
    rank = Rank(corpus, "none")
    found = rank.trainer.evaluate_at(rank.old)
    assert np.array_equal(rank.local, rank.before)
    assert found.loss != rank.trainer.evaluate().loss
    rank.trainer.adopt(rank.old)
    assert found.loss == rank.trainer.evaluate().loss
