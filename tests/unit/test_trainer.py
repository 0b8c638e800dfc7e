"""One rank's inner steps: what they take, when they stop, and that they repeat."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from node.island import measuring as measured_peak
from node.island.checkpoints.folder import rewarming_steps
from node.island.data.dataset import Batch, Corpus, SampleOrder, read_corpus
from node.island.island import InnerReport, InnerWork, Progress
from node.island.measuring import flops_per_token
from node.island.models.decoder_modules import Objective
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh import Mesh, places_of_ranks
from node.island.parallel.mesh_shape import PLAIN, LocalTraining, MeshShape, Precision, Recomputing
from node.island.parallel.modules import compile_layers, recompute_layers
from node.island.ranks.faults import TrainingDivergedError
from node.island.training import engine
from node.island.training.engine import Engine
from node.island.training.trainer import Trainer
from node.outer_state import Vector
from protocol.run.models import DecoderModel, layout_of
from protocol.run.run_spec import DataSection, EvaluationSection, InnerSection, RunSection, RunSpec
from protocol.run.schedule import Position, share_of_peak
from tests.tiny_runs import run_of
from tests.unit.work_scene import inner_work

MODEL = DecoderModel(
    hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=24, context=16
)
SPEC = RunSpec(
    model=MODEL,
    data=DataSection(source="text", paths=("*.txt",), held_out=0.2),
    inner=InnerSection(batch=4, learning_rate=1e-2, schedule="constant", warmup_tokens=0),
    evaluation=EvaluationSection(samples=10),
)
STEP_TOKENS = 4 * 16


def with_inner(**changes: object) -> RunSpec:
    """The run with other [inner] keys."""
    return SPEC.model_copy(update={"inner": SPEC.inner.model_copy(update=changes)})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        (folder / f"{i}.txt").write_text("the quick brown fox; " * (20 + i))
    return read_corpus(SPEC.data, context=16, batch=4, folder=folder)


def ticking(seconds: float) -> Callable[[], float]:
    """A clock that moves on by so many seconds whenever it is read."""
    times: Iterator[float] = (i * seconds for i in range(10**6))
    return lambda: next(times)


def trainer_of(
    corpus: Corpus,
    spec: RunSpec = SPEC,
    tick_seconds: float = 0.0,
    local: LocalTraining = PLAIN,
) -> Trainer:
    trainer = Trainer(
        spec=spec,
        corpus=corpus,
        device=torch.device("cpu"),
        mesh=Mesh(),
        clock=ticking(tick_seconds),
        local=local,
    )
    trainer.adopt(initial_parameters(spec))
    return trainer


def ignore(progress: Progress) -> None:
    pass


def published(trainer: Trainer) -> Vector:
    vector = np.zeros(layout_of(SPEC).num_elements, np.float32)
    trainer.publish(vector, 0)
    return vector


def test_what_was_adopted_is_what_is_published(corpus: Corpus) -> None:
    weights = initial_parameters(run_of(MODEL, seed=5))
    trainer = trainer_of(corpus)
    trainer.adopt(weights)
    assert np.array_equal(published(trainer), weights)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_learns_and_repeats_to_the_bit(corpus: Corpus, optimizer: str) -> None:
    spec = with_inner(optimizer=optimizer)
    first, second = trainer_of(corpus, spec), trainer_of(corpus, spec)
    before = first.evaluate()
    report = first.train(inner_work(40), ignore)
    second.train(inner_work(40), ignore)
    assert (report.inner_steps, report.tokens) == (40, 40 * STEP_TOKENS)
    assert np.array_equal(published(first), published(second))
    after = first.evaluate()
    assert after.tokens == before.tokens == 10 * 16
    assert after.loss < 0.8 * before.loss
    assert after.loss < report.loss < before.loss


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_lower_precision_learns_nearly_the_same(corpus: Corpus, precision: Precision) -> None:
    whole, lower = trainer_of(corpus), trainer_of(corpus, local=LocalTraining(precision=precision))
    losses = [trainer.train(inner_work(20), ignore).loss for trainer in (whole, lower)]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert published(lower).dtype == np.float32


def test_a_step_whose_gradient_overflows_in_fp16_changes_nothing_and_is_counted(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.island.ranks.accelerator._HIGHEST_LOSS_SCALE", 2.0**40)
    trainer = trainer_of(corpus, local=LocalTraining(precision="fp16"))
    start = published(trainer)
    assert trainer.train(inner_work(2), ignore).skipped_steps == 2
    assert np.array_equal(published(trainer), start)
    report = trainer.train(inner_work(60), ignore)  # each overflow halves the scale
    assert 5 < report.skipped_steps < 40
    assert report.inner_steps == 60
    assert not np.array_equal(published(trainer), start)


@pytest.mark.parametrize("recomputing", ["selective", "full"])
def test_recomputing_trains_the_same_weights_to_the_bit(
    corpus: Corpus, recomputing: Recomputing, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def noting(layers: list[nn.Module], recomputing: Recomputing, **options: bool) -> None:
        asked.append(recomputing)
        recompute_layers(layers, recomputing, **options)

    monkeypatch.setattr(engine, "recompute_layers", noting)
    local = LocalTraining(activation_checkpointing=recomputing)
    kept, recomputed = trainer_of(corpus), trainer_of(corpus, local=local)
    for trainer in (kept, recomputed):
        trainer.train(inner_work(3), ignore)
    assert asked == ["none", recomputing]
    assert np.array_equal(published(kept), published(recomputed))


def test_layers_are_compiled_before_the_first_round(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    quickly = partial(compile_layers, backend="aot_eager")
    monkeypatch.setattr(engine, "compile_layers", quickly)
    torch._dynamo.reset()
    counters["frames"].clear()
    plain, compiled = trainer_of(corpus), trainer_of(corpus, local=LocalTraining(compile=True))
    num_compiled = counters["frames"]["ok"]
    assert num_compiled >= 1
    for trainer in (plain, compiled):
        trainer.train(inner_work(5), ignore)
    assert np.allclose(published(plain), published(compiled), atol=1e-5)
    assert compiled.evaluate().loss == pytest.approx(plain.evaluate().loss, rel=1e-5)
    assert counters["frames"]["ok"] == num_compiled


def test_what_is_clipped_in_fp16_is_the_gradient_without_its_scale(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms: list[float] = []
    clip = torch.nn.utils.clip_grad_norm_

    def noting(*args: Any, **options: Any) -> torch.Tensor:
        norms.append(float(norm := clip(*args, **options)))
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", noting)
    for precision in ("fp32", "fp16"):
        trainer_of(corpus, local=LocalTraining(precision=precision)).train(inner_work(1), ignore)
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)


def test_evaluation_too_puts_no_more_samples_through_the_model_than_allowed(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    forward = Objective.forward

    def noting(self: Objective, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        sizes.append(len(tokens))
        return forward(self, tokens, targets)

    monkeypatch.setattr(Objective, "forward", noting)
    trainer_of(corpus, local=LocalTraining(micro_batch=3)).evaluate()
    assert sizes == [3, 3, 3, 3]  # the last is padded


def test_a_batch_in_parts_trains_the_same_weights_but_for_rounding(corpus: Corpus) -> None:
    whole, parts = trainer_of(corpus), trainer_of(corpus, local=LocalTraining(micro_batch=3))
    reports = [trainer.train(inner_work(5), ignore) for trainer in (whole, parts)]
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-6)
    assert np.allclose(published(whole), published(parts), atol=1e-5)
    assert whole.evaluate().loss == pytest.approx(parts.evaluate().loss, rel=1e-5)


def test_the_report_says_the_operations_of_its_tokens_and_the_memory_taken(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_peak, "_peaks", {})  # other tests have measured this process's
    report = trainer_of(corpus).train(inner_work(3), ignore)
    assert report.flops == 3 * STEP_TOKENS * flops_per_token(SPEC)
    assert report.peak_flops_per_second is None  # of a CPU that nobody measured
    assert report.peak_memory_bytes > 10**7
    assert report.skipped_steps == 0


def test_adam_remembers_over_rounds(corpus: Corpus) -> None:
    whole, halves = trainer_of(corpus), trainer_of(corpus)
    whole.train(inner_work(6), ignore)
    halves.train(inner_work(3), ignore)
    halves.adopt(published(halves))
    halves.train(inner_work(3, first_sample=12), ignore)
    assert np.array_equal(published(whole), published(halves))


def test_other_samples_train_other_weights(corpus: Corpus) -> None:
    first, second = trainer_of(corpus), trainer_of(corpus)
    first.train(inner_work(3), ignore)
    second.train(inner_work(3, first_sample=12), ignore)
    assert not np.array_equal(published(first), published(second))


def last_rate(trainer: Trainer) -> float:
    """Of the inner step that was taken last."""
    (rate,) = {group["lr"] for o in trainer._optimizers for group in o.param_groups}
    return float(rate)


def test_the_first_inner_step_of_a_run_moves_the_weights(corpus: Corpus) -> None:
    spec = with_inner(warmup_tokens=None, schedule="cosine")
    start = initial_parameters(spec)
    trainer = trainer_of(corpus, spec)
    trainer.train(inner_work(1), ignore)
    assert not np.array_equal(published(trainer), start)


def test_the_learning_rate_follows_the_token_clock_of_the_whole_swarm(corpus: Corpus) -> None:
    # Three nodes take two steps each: half of a warm-up of twelve steps, whose middle is a quarter.
    spec = with_inner(warmup_tokens=12 * STEP_TOKENS, weight_decay=0.0, learning_rate=1e-3)
    start = initial_parameters(spec)
    trainer = trainer_of(corpus, spec)
    trainer.train(inner_work(1, round_tokens=6 * STEP_TOKENS), ignore)
    # Adam's first step moves each weight by the rate, wherever the gradient is not tiny.
    moved = np.abs(published(trainer) - start)
    assert np.quantile(moved, 0.9) == pytest.approx(0.25e-3, rel=1e-2)
    later = trainer_of(corpus, spec)
    later.train(inner_work(1, token_clock=6 * STEP_TOKENS, round_tokens=6 * STEP_TOKENS), ignore)
    # A trainer that begins here begins with small steps.
    assert last_rate(later) == pytest.approx(0.75e-3 / (rewarming_steps(spec) + 1))


def test_nodes_with_different_histories_have_the_same_rate_at_the_same_progress_of_the_run(
    corpus: Corpus,
) -> None:
    spec = with_inner(schedule="cosine", warmup_tokens=None, beta2=0.0)
    spec = spec.model_copy(update={"run": RunSection(rounds=10, min_nodes=1)})
    always, late, halved, missing = (trainer_of(corpus, spec) for _ in range(4))
    work_in = partial(inner_work, token_clock=10**6)  # so a node that begins here warms up anew
    for number in range(1, 7):
        always.train(work_in(3, round=number), ignore)
        if number in (1, 2, 5):  # it was away, and others went on
            missing.train(work_in(3, round=number, num_participants=7), ignore)
    late.train(work_in(9, round=5), ignore)  # comes in mid-run, is three times as fast
    late.train(work_in(9, round=6), ignore)
    halved.train(work_in(2, round=6, max_seconds=0.0), ignore)  # what it had in time
    for trainer in (always, late, missing):
        trainer.train(work_in(1, round=7), ignore)
    expected = share_of_peak(spec.inner, Position(progress=6.5 / 10, tokens=0)) * 1e-2
    assert last_rate(always) == last_rate(late) == last_rate(missing) == pytest.approx(expected)
    halved.train(work_in(1, round=7), ignore)
    assert last_rate(halved) == pytest.approx(expected * 2 / 3)  # its re-warm-up of 2 is not over


def test_a_round_that_is_trained_in_two_parts_has_the_rates_of_one(corpus: Corpus) -> None:
    spec = with_inner(schedule="linear", warmup_tokens=0)
    spec = spec.model_copy(update={"run": RunSection(rounds=2, min_nodes=1)})
    whole, halves = trainer_of(corpus, spec), trainer_of(corpus, spec)
    whole.train(inner_work(4), ignore)
    halves.train(inner_work(1), ignore)
    halves.train(inner_work(3, first_sample=4, steps_before=1), ignore)
    assert last_rate(halves) == last_rate(whole)


def test_the_learning_rate_follows_the_number_of_participants(corpus: Corpus) -> None:
    spec = with_inner(scaling="linear", weight_decay=0.0, learning_rate=1e-3)
    start = initial_parameters(spec)
    trainer = trainer_of(corpus, spec)
    trainer.train(inner_work(1, num_participants=4), ignore)
    moved = np.abs(published(trainer) - start)
    assert np.quantile(moved, 0.9) == pytest.approx(4e-3, rel=1e-2)  # Adam's first step


def test_training_stops_at_its_time_its_samples_and_a_halt(corpus: Corpus) -> None:
    # The clock is read once at the start, then once after each step.
    late = trainer_of(corpus, tick_seconds=0.1).train(inner_work(50, max_seconds=0.35), ignore)
    assert late.inner_steps == 4
    few = trainer_of(corpus).train(inner_work(50, num_samples=11), ignore)
    assert (few.inner_steps, few.tokens) == (2, 2 * STEP_TOKENS)
    halts = iter([False, False, True])
    halted = trainer_of(corpus).train(inner_work(50), ignore, lambda: next(halts))
    assert halted.inner_steps == 3
    with pytest.raises(ValueError, match="no inner step"):
        trainer_of(corpus).train(inner_work(50, num_samples=3), ignore)


class LoneHalf(Mesh):
    """Rank 1 of two, whose rank 0 says nothing."""

    def __init__(self) -> None:
        super().__init__(rank=1, shape=MeshShape(replicate=2))

    def said_by_first(self, number: int) -> int:
        return number

    def added(self, values: torch.Tensor) -> torch.Tensor:
        return values


def test_each_rank_trains_its_own_half_of_a_batch(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Batch] = []
    train = Engine.train

    def spied(engine: Engine, batch: Batch) -> torch.Tensor:
        seen.append(batch)
        return train(engine, batch)

    monkeypatch.setattr(Engine, "train", spied)
    monkeypatch.setattr(engine, "DistributedDataParallel", lambda module, **options: module)
    trainer = Trainer(
        spec=SPEC,
        corpus=corpus,
        device=torch.device("cpu"),
        mesh=LoneHalf(),
        clock=ticking(0.0),
    )
    trainer.adopt(initial_parameters(SPEC))
    report = trainer.train(inner_work(1), ignore)
    batch = SampleOrder(seed=0, num_samples=corpus.num_samples).indices(0, 4)
    assert np.array_equal(seen[0].tokens, corpus.windows(corpus.training, batch[2:]))
    assert report.tokens == STEP_TOKENS  # of the island, not of the rank


def test_progress_comes_every_half_second_with_the_loss_since_the_last(corpus: Corpus) -> None:
    told: list[Progress] = []
    report = trainer_of(corpus, tick_seconds=0.2).train(inner_work(6), told.append)
    assert [progress.inner_step for progress in told] == [3, 6]
    assert [progress.tokens_per_second for progress in told] == pytest.approx(
        [3 * STEP_TOKENS / 0.8, 3 * STEP_TOKENS / 0.8]
    )
    assert told[1].loss < told[0].loss
    assert report.loss == pytest.approx((told[0].loss + told[1].loss) / 2)


def test_ruined_weights_stop_training_with_round_and_steps(corpus: Corpus) -> None:
    trainer = trainer_of(corpus)
    weights = initial_parameters(SPEC)
    weights[7] = np.inf
    trainer.adopt(weights)
    with pytest.raises(TrainingDivergedError, match=r"round 1: .* \(inner step 1 to 5\); look at"):
        trainer.train(inner_work(5), ignore)  # nothing was learnt yet: no rate can be too high
    with pytest.raises(
        TrainingDivergedError, match=r"round 2: .* 1 to 5\); tell the run owner: 'atoll run"
    ):
        trainer.train(inner_work(5, round=2), ignore)


def test_an_infinite_gradient_under_a_finite_loss_stops_training_too(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    infinite = torch.tensor(torch.inf)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args, **options: infinite)
    with pytest.raises(TrainingDivergedError):
        trainer_of(corpus).train(inner_work(1), ignore)


def test_every_tensor_is_published_by_one_rank_and_the_ranks_have_about_as_much() -> None:
    layout = layout_of(RunSpec())
    dealt = places_of_ranks(layout.places, 4)
    assert sorted(place.name for places in dealt for place in places) == sorted(
        place.name for place in layout.places
    )
    elements = [sum(place.num_elements for place in places) for places in dealt]
    assert max(elements) - min(elements) <= max(place.num_elements for place in layout.places)


class Stepping:
    """A trainer of which each inner step takes ten seconds, and what it rests."""

    def __init__(self, corpus: Corpus, load: float) -> None:
        self.now = 0.0
        self.rests: list[float] = []
        self.trainer = trainer_of(corpus, local=LocalTraining(load=load))
        self.trainer._clock = lambda: self.now
        self._step = self.trainer._inner_step
        self.trainer._inner_step = self.step  # type: ignore[method-assign]

    def step(self, first_sample: int) -> Any:
        self.now += 10.0
        return self._step(first_sample)

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds

    def train(self, work: InnerWork) -> InnerReport:
        return self.trainer.train(work, ignore, rest=self.rest)

    def warmed_up(self) -> "Stepping":
        self.train(inner_work(5))
        self.now = 0.0
        self.rests.clear()
        return self


def test_with_a_load_of_a_quarter_a_rank_rests_three_times_as_long_as_it_trains_and_learns_the_same(
    corpus: Corpus,
) -> None:
    rests, does_not = (Stepping(corpus, load=load).warmed_up() for load in (0.25, 1.0))
    reports = rests.train(inner_work(5)), does_not.train(inner_work(5))
    assert (rests.rests, does_not.rests) == ([30.0] * 4, [])
    assert [report.seconds for report in reports] == [170.0, 50.0]
    assert reports[0].loss == reports[1].loss


def test_no_rest_goes_beyond_the_time_that_there_is(corpus: Corpus) -> None:
    rests = Stepping(corpus, load=0.1).warmed_up()
    report = rests.train(inner_work(5, max_seconds=30.0))
    assert (report.inner_steps, report.seconds, rests.rests) == (1, 30.0, [20.0])


def test_nobody_rests_for_the_first_step_of_a_process_in_which_layers_compile(
    corpus: Corpus,
) -> None:
    rests = Stepping(corpus, load=0.1)
    report = rests.train(inner_work(5, max_seconds=130.0))
    assert rests.rests == [0.0, 90.0, 10.0], "after the second step for that one alone"
    assert (report.inner_steps, report.seconds) == (3, 130.0)
