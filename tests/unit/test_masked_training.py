"""Targets that do not count change neither the loss nor the gradient, and are no tokens."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn import functional

from node.island.data.dataset import Batch, Indices, SampleOrder
from node.island.data.manifest import Split
from node.island.measuring import flops_per_token
from node.island.models.first_weights import initial_parameters
from node.island.models.generate import decoder_of
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import LocalTraining
from node.island.training.trainer import Trainer
from node.outer_state import Vector
from protocol.run.models import DecoderModel
from protocol.run.run_spec import EvaluationSection, InnerSection, RunSpec
from protocol.wire.rounds import CorpusSummary, Digest
from tests.unit.work_scene import inner_work

SPEC = RunSpec(
    model=DecoderModel(
        hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=24, context=16
    ),
    inner=InnerSection(batch=4, schedule="constant", warmup_tokens=0, clip=1e9, learning_rate=1e-3),
    evaluation=EvaluationSection(samples=6),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """Random tokens of which some are not to be predicted; implements Dataset."""

    garbage: int = 0
    """What stands where nothing is counted; nothing may depend on it."""

    without: frozenset[int] = frozenset()
    """Samples in which nothing counts."""

    num_samples: int = 32
    num_held_out_samples: int = 6
    num_together: int = 1

    def expect(self, split: Split, indices: Indices) -> None:
        pass

    def held_out_by_source(self, indices: Indices) -> dict[str, Indices]:
        return {"": indices}

    def summary(self) -> CorpusSummary:
        return CorpusSummary(digest=Digest(bytes(32)), num_samples=self.num_samples, num_bytes=1)

    def batch(self, split: Split, indices: Indices) -> Batch:
        rows = [np.random.Generator(np.random.Philox(int(i))) for i in indices]
        tokens = np.stack([row.integers(0, 256, 17) for row in rows])
        lengths = 3 + indices % 11
        lengths = np.where(np.isin(indices, list(self.without)), 0, lengths)
        counted = np.arange(16) < lengths[:, None]
        tokens[:, 1:][~counted] = self.garbage
        return Batch(tokens=tokens, counted=counted)

    def num_counted(self, split: Split, indices: Indices) -> int:
        counted = self.batch(split, indices).counted
        assert counted is not None
        return int(counted.sum())


def trainer_of(dataset: Masked, spec: RunSpec = SPEC) -> Trainer:
    trainer = Trainer(
        spec=spec, corpus=dataset, device=torch.device("cpu"), mesh=Mesh(), clock=lambda: 0.0
    )
    trainer.adopt(initial_parameters(spec))
    return trainer


def by_hand(batch: Batch) -> tuple[float, list[torch.Tensor]]:
    """Mean nats over what counts, and its gradient, without anything of ours but the model."""
    decoder = decoder_of(SPEC, initial_parameters(SPEC))
    tokens = torch.from_numpy(batch.tokens)
    logits = decoder(tokens[:, :-1])
    counted = torch.from_numpy(batch.counted)
    loss = functional.cross_entropy(logits[counted], tokens[:, 1:][counted])
    loss.backward()
    return loss.item(), [p.grad for p in decoder.parameters() if p.grad is not None]


def test_the_gradient_is_that_of_the_mean_over_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Masked()
    trainer = trainer_of(dataset)
    seen: list[torch.Tensor] = []
    engine = trainer._engine
    clip = engine.clip

    def spied(max_norm: float) -> torch.Tensor:
        seen.extend(
            p.grad.clone() for p in engine.named_parameters.parameters() if p.grad is not None
        )
        return clip(max_norm)

    monkeypatch.setattr(engine, "clip", spied)
    report = trainer.train(inner_work(1), lambda progress: None)
    indices = SampleOrder(seed=0, num_samples=32).indices(0, 4)
    loss, gradients = by_hand(dataset.batch("training", indices))
    assert report.loss == pytest.approx(loss, rel=1e-5)
    assert len(seen) == len(gradients)
    for own, expected in zip(seen, gradients, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-7)


def test_what_does_not_count_as_a_target_is_not_learned() -> None:
    """The garbage is input, so only where it comes after all that counts it changes nothing."""
    reports = [trainer_of(Masked(garbage=g)).train(inner_work(5), lambda p: None) for g in (0, 200)]
    assert reports[0].loss == pytest.approx(reports[1].loss, abs=1e-6)


def test_tokens_that_count_are_told_apart_from_those_of_the_ledger() -> None:
    report = trainer_of(Masked()).train(inner_work(3), lambda progress: None)
    indices = SampleOrder(seed=0, num_samples=32).indices(0, 12)
    assert report.samples == 3 * 4
    assert report.tokens == Masked().num_counted("training", indices) < 3 * 4 * 16
    assert report.flops == 3 * 4 * 16 * flops_per_token(SPEC), (
        "what is masked is computed all the same"
    )


def test_the_held_out_loss_is_the_mean_over_what_counts() -> None:
    dataset = Masked()
    evaluation = trainer_of(dataset).evaluate()
    loss, _ = by_hand(dataset.batch("held_out", np.arange(6)))
    assert evaluation.loss == pytest.approx(loss, rel=1e-5)
    assert evaluation.tokens == dataset.num_counted("held_out", np.arange(6))


def test_parts_of_a_batch_come_to_the_same() -> None:
    whole = trainer_of(Masked())
    parts = Trainer(
        spec=SPEC,
        corpus=Masked(),
        device=torch.device("cpu"),
        mesh=Mesh(),
        clock=lambda: 0.0,
        local=LocalTraining(micro_batch=3),
    )
    parts.adopt(initial_parameters(SPEC))
    losses = [each.train(inner_work(4), lambda p: None).loss for each in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def numbers_of(first: int, count: int) -> frozenset[int]:
    return frozenset(SampleOrder(seed=0, num_samples=32).indices(first, count).tolist())


def weights_of(trainer: Trainer) -> Vector:
    into = np.empty(initial_parameters(SPEC).size, np.float32)
    trainer.publish(into, 0)
    return into


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_batch_in_which_nothing_counts_moves_nothing(optimizer: str) -> None:
    """Momentum and weight decay would: so the weights after it are those before it, to the bit."""
    inner = SPEC.inner.model_copy(update={"optimizer": optimizer, "weight_decay": 0.1})
    spec = SPEC.model_copy(update={"inner": inner})
    trainer = trainer_of(Masked(without=numbers_of(4, 4)), spec)
    report = trainer.train(inner_work(2), lambda progress: None)
    alone = trainer_of(Masked(), spec)
    first = alone.train(inner_work(1), lambda progress: None)
    assert np.array_equal(weights_of(trainer), weights_of(alone))
    assert (report.inner_steps, report.samples) == (2, 8)
    assert (report.tokens, report.loss) == (first.tokens, first.loss)


def test_a_round_in_which_nothing_counts_is_no_work_and_has_used_its_samples() -> None:
    trainer = trainer_of(Masked(without=frozenset(range(32))))
    told: list[float] = []
    report = trainer.train(inner_work(3), lambda progress: told.append(progress.loss))
    assert (report.inner_steps, report.samples, report.tokens, report.loss) == (3, 12, 0, 0.0)
    assert np.array_equal(weights_of(trainer), initial_parameters(SPEC))
