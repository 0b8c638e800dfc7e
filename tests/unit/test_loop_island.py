"""What a training loop trains by a node's orders, and what it is told."""

import asyncio
import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import atoll
from atoll.training import MOST_SKIPPED
from atoll.watch import STILL_STEPS
from node.island.data.dataset import Batch, Corpus, Indices
from node.island.data.manifest import Split
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.island import Ability
from node.island.models.decoder_modules import Decoder
from node.island.ranks.faults import LoopGoneError, TrainingDivergedError
from protocol.run.run_spec import DataSection
from protocol.run.schedule import share_of_peak
from tests.islands.rank_scene import small_spec
from tests.unit.loop_scene import (
    BATCH,
    CONTEXT,
    STEP_TOKENS,
    Normed,
    ends,
    nudge,
    scene,
    steps_on_samples,
    work,
)
from tests.unit.tokens_scene import prepared, spec_of


async def test_orders_are_carried_out_within_step_and_the_report_tells_what_was_trained(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        assert one.island.ability == Ability(trains=False, evaluates=False)
        model = Decoder(one.spec.decoder)

        def train(swarm: atoll.Swarm) -> None:
            assert all((p == 0.5).all() for p in model.parameters()), (
                "adopted before the first step"
            )
            for _ in swarm.samples():
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1.0)
                swarm.step(loss=torch.tensor(2.0))

        thread = await one.joined(train, model=model)
        report = await one.train(work())
        assert (report.inner_steps, report.tokens, report.loss) == (3, 3 * STEP_TOKENS, 2.0)
        await one.island.publish(0)
        assert (one.vectors.published == 3.5).all()
        one.vectors.parameters[:] = -1.0
        await one.island.adopt(0)
        assert all((p == -1).all() for p in model.parameters())
        await one.stops(thread)
        assert one.ended == [None]
        assert one.progress[0].round == 1 and one.progress[0].loss == 2.0


async def test_samples_are_those_that_were_leased_in_the_run_s_order_and_each_once(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        thread = await one.joined(steps_on_samples)
        for number in (1, 2):
            await one.train(work(number))
            await one.island.publish(0)
            await one.island.adopt(0)
        await one.stops(thread)
        taken = one.ended[0]
        assert one.island._samples._order is not None
        expected = [
            one.island._samples._order.indices(100 * (number - 1) + step * BATCH, BATCH).tolist()
            for number in (1, 2)
            for step in range(3)
        ]
        assert [numbers for _, numbers in taken] == expected
        steps = [step for step, _ in taken]
        assert [step.steps_left for step in steps] == [2, 1, 3, 2, 1, 0]
        assert [step.is_replaced for step in steps] == [False, False, True, False, False, True]
        assert [step.round for step in steps] == [1, 1, 2, 2, 2, 2]
        assert [step.is_over for step in steps] == [False] * 5 + [True]


async def test_batches_are_the_tokens_of_the_leased_samples(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        found = []

        def train(swarm: atoll.Swarm) -> None:
            for batch in swarm.batches():
                found.append(batch)
                swarm.step()

        thread = await one.joined(train)
        assert (await one.train(work())).tokens == 3 * STEP_TOKENS
        await one.stops(thread)
        dataset = open_dataset(one.spec, DataPlaces(folder=tmp_path))
        assert len(found) == 3
        for batch in found:
            read = dataset.batch("training", batch.numbers.numpy())
            assert isinstance(read, Batch)
            assert torch.equal(batch.tokens, torch.from_numpy(read.tokens))
            assert batch.tokens.shape == (BATCH, CONTEXT + 1) and batch.counted is None


async def test_batches_weigh_by_what_counts_in_them_and_use_their_samples_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Corpus.batch

    def masked(corpus: Corpus, split: Split, indices: Indices) -> Batch:
        counted = np.arange(CONTEXT)[None, :] < 1 + indices[:, None] % 3
        return replace(read(corpus, split, indices), counted=counted)

    monkeypatch.setattr(Corpus, "batch", masked)
    async with scene(tmp_path) as one:
        numbers: list[int] = []

        def train(swarm: atoll.Swarm) -> None:
            batches = swarm.batches()
            for _ in range(3):
                numbers.extend(next(batches).numbers.tolist())
                swarm.step()
            few = next(batches)
            assert few.counted is not None
            swarm.step(tokens=int(few.counted.sum()) - 1)  # the loop masks one more

        thread = await one.joined(train)
        report = await one.train(work())
        assert report.samples == 3 * BATCH
        assert report.tokens == sum(1 + number % 3 for number in numbers)
        report = await one.train(work(2, steps=1))
        assert report.samples == BATCH
        await one.stops(thread)
        assert one.ended == [None]


async def test_numbers_alone_weigh_by_what_counts_in_their_samples(tmp_path: Path) -> None:
    lines = [json.dumps({"text": chr(97 + i % 26) * (2 + i * 7 % 59)}) + "\n" for i in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    prepared(tmp_path / "a.jsonl", out=tmp_path / "out", row=CONTEXT + 1)
    spec = spec_of(tmp_path / "out", context=CONTEXT, batch=BATCH)
    async with scene(tmp_path, spec) as one:
        dataset = open_dataset(spec, DataPlaces(folder=tmp_path))
        thread = await one.joined(steps_on_samples)
        report = await one.train(work())
        await one.stops(thread)
        numbers = np.array([number for _, own in one.ended[0] for number in own])
        assert report.samples == len(numbers) == 3 * BATCH
        assert report.tokens == dataset.num_counted("training", numbers) < 3 * STEP_TOKENS


async def test_a_node_without_the_run_s_data_says_so_and_takes_loops_that_have_their_own(
    tmp_path: Path,
) -> None:
    data = DataSection(source="text", paths=("nowhere/*.txt",))
    async with scene(tmp_path, small_spec().model_copy(update={"data": data})) as one:

        def train(swarm: atoll.Swarm) -> None:
            assert swarm.run.num_samples == 0
            with pytest.raises(atoll.SamplesError, match=r"'nowhere/\*\.txt' of \[data\] paths"):
                next(swarm.samples())
            swarm.step(tokens=5)

        thread = await one.joined(train)
        assert (await one.train(work(steps=1))).tokens == 5
        await one.stops(thread)
        assert one.ended == [None]


async def test_a_loader_of_one_s_own_counts_its_tokens_and_no_more_than_were_leased(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as one:

        def train(swarm: atoll.Swarm) -> None:
            for tokens in (10, 20, 30, 1000, 1000, 1000):
                swarm.step(tokens=tokens)

        thread = await one.joined(train)
        report = await one.train(work())
        assert (report.tokens, report.samples) == (60, 3 * BATCH), "what was leased is used up"
        assert (await one.train(work(2))).tokens == 3 * STEP_TOKENS
        await one.stops(thread)
        assert caplog.text.count("a step of this loop has 1000 tokens, and only 64") == 1
        assert "; make the run with this loop's batch and context" in caplog.text


async def test_a_loop_whose_samples_count_as_one_hears_of_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = small_spec()
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"context": 1})})
    async with scene(tmp_path, spec) as one:
        model = Decoder(one.spec.decoder)

        def train(swarm: atoll.Swarm) -> list[str]:
            told = []
            wrong: tuple[Any, ...] = (None, 2.5)
            for tokens in wrong:
                with pytest.raises(ValueError) as error:
                    swarm.step(tokens=tokens)
                told.append(str(error.value))
            next(swarm.samples())
            with pytest.raises(ValueError) as error:
                swarm.step(tokens=5)
            nudge(model)
            swarm.step()
            nudge(model)
            swarm.step(tokens=4 * 128)
            return [*told, str(error.value)]

        thread = await one.joined(train, model=model)
        assert (await one.train(work(steps=2))).tokens == 4 + 4
        await one.stops(thread)
        assert "only 4 of them weigh" in caplog.text and "atoll init … --batch 512'" in caplog.text
        (told,) = one.ended
        assert "how many samples this rank trained" in told[0]
        assert "how many samples there are" in told[1]
        assert "has 4 samples to train on, not 5" in told[2]


async def test_step_wants_tokens_and_samples_want_step(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:

        def train(swarm: atoll.Swarm) -> None:
            with pytest.raises(ValueError, match=r"step\(\) wants tokens="):
                swarm.step()
            samples = swarm.samples()
            next(samples)
            with pytest.raises(ValueError, match="has 64 tokens to train on, not 65"):
                swarm.step(tokens=65)
            with pytest.raises(atoll.SamplesError, match="must not fetch ahead"):
                next(samples)

        thread = await one.joined(train)
        asyncio.get_running_loop().call_later(5, one.island.halt)
        with pytest.raises(LoopGoneError):
            await one.train(work())
        await ends(thread)
        assert one.ended == [None]


async def test_a_halt_ends_training_after_the_step_in_progress(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        goes_on, stepped = threading.Event(), threading.Event()

        def train(swarm: atoll.Swarm) -> None:
            swarm.step(tokens=1)
            stepped.set()
            goes_on.wait(20)
            assert swarm.step(tokens=1).is_over

        thread = await one.joined(train)
        training = asyncio.ensure_future(one.train(work(steps=1000)))
        await asyncio.to_thread(stepped.wait, 20)
        one.island.halt()
        await asyncio.sleep(0.1)
        goes_on.set()
        assert (await training).inner_steps == 2
        await one.stops(thread)
        assert one.ended == [None]


async def test_training_ends_with_the_plan_s_time(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)

        def train(swarm: atoll.Swarm) -> None:
            while not swarm.is_over:
                nudge(model)
                swarm.step(tokens=1)

        thread = await one.joined(train, model=model)
        report = await one.train(work(steps=10_000_000, max_seconds=0.3))
        assert 0.3 <= report.seconds < 10 and report.inner_steps < 10_000_000
        await one.stops(thread)


async def test_what_was_trained_is_lost_with_its_loop_and_the_next_call_tells(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, return_seconds=20.0) as one:

        def fails(swarm: atoll.Swarm) -> None:
            swarm.step(tokens=1)
            raise RuntimeError("the loop's own fault")

        thread = await one.joined(fails)
        with pytest.raises(LoopGoneError, match="RuntimeError: the loop's own fault"):
            await one.train(work())
        await ends(thread)
        assert str(one.ended[0]) == "the loop's own fault", "the person's error is the person's"
        # Another loop goes on, from the global parameters.
        thread = one.loop(steps_on_samples)
        assert (await one.train(work())).inner_steps == 3
        await one.stops(thread)


def in_two_ways(value: float) -> tuple[float | torch.Tensor, ...]:
    """As loops tell their loss."""
    return value, torch.tensor([value])


@pytest.mark.parametrize("loss", in_two_ways(math.nan))
async def test_a_loss_that_is_no_number_of_ruined_weights_ends_training_with_a_sentence(
    tmp_path: Path, loss: float | torch.Tensor
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)

        def train(swarm: atoll.Swarm) -> None:
            with torch.no_grad():
                next(model.parameters())[0, 0] = math.nan
            while not swarm.is_over:
                swarm.step(tokens=1, loss=loss)

        thread = await one.joined(train, model=model)
        with pytest.raises(
            TrainingDivergedError, match="round 1: the training loop's loss"
        ) as error:
            await one.train(work())
        await one.island.stop(str(error.value))
        await ends(thread)
        log = (tmp_path / "logs" / "loop.log").read_text()
        assert "loss is no longer finite at inner step 1; lower the learning rate" in log


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("the run is finished: ops has stopped the run after round 7", None),
        ("the node was stopped by its owner, after the commit of round 7", None),
        ("", "the node has stopped"),
    ],
)
async def test_a_loop_is_told_why_its_node_ends(tmp_path: Path, why: str, said: str | None) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)

        def train(swarm: atoll.Swarm) -> str:
            while not swarm.is_over:
                nudge(model)
                swarm.step(tokens=1, loss=1.0)
            return swarm.why_over

        thread = await one.joined(train, model=model)
        await one.train(work())
        await one.island.stop(why)
        await ends(thread)
        assert one.ended == [said or why]


@pytest.mark.parametrize("bad", [*in_two_ways(math.nan), *in_two_ways(math.inf)])
async def test_steps_that_a_scaler_skips_may_have_a_loss_that_is_no_number(
    tmp_path: Path, bad: float | torch.Tensor
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)

        def train(swarm: atoll.Swarm) -> str:
            for loss in (bad, 1.0, bad, torch.tensor(3.0), bad):
                nudge(model)
                swarm.step(tokens=1, loss=loss)
            return swarm.why_over

        thread = await one.joined(train, model=model)
        report = await one.train(work(steps=5))
        await one.stops(thread)
        assert (report.loss, report.inner_steps) == (2.0, 5)
        assert one.ended == ["the node has stopped"]


async def test_losses_that_are_no_numbers_again_and_again_end_training(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)

        def train(swarm: atoll.Swarm) -> None:
            for _ in range(MOST_SKIPPED):
                nudge(model)
                swarm.step(tokens=1, loss=math.nan)

        thread = await one.joined(train, model=model)
        with pytest.raises(TrainingDivergedError):
            await one.train(work(steps=MOST_SKIPPED))
        await one.stops(thread)


async def test_a_loop_reads_the_run_s_rates_and_is_told_once_of_an_amendment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = small_spec()
    inner = spec.inner.model_copy(update={"schedule": "linear", "warmup_tokens": 0})
    spec = spec.model_copy(update={"inner": inner})
    async with scene(tmp_path, spec) as one:
        told: list[tuple[float, int]] = []
        model = Decoder(spec.decoder)

        def train(swarm: atoll.Swarm) -> None:
            with pytest.raises(atoll.SwarmError, match=r"says nothing of inner\.muon_learning"):
                _ = swarm.muon_learning_rate
            while not swarm.is_over:
                told.append((swarm.learning_rate, swarm.run.rounds))
                nudge(model)
                swarm.step(tokens=1)

        orders = [
            work(1),
            work(2, rate_factor=0.1, num_rounds=9),
            work(3, steps=200, rate_factor=0.1, num_rounds=9),
        ]
        thread = await one.joined(train, model=model)
        for order in orders:
            await one.train(order)
        await one.stops(thread)
        rates = [
            inner.learning_rate
            * order.rate_factor
            * share_of_peak(inner, order.position(spec, step))
            for order in orders
            for step in range(order.inner_steps)
        ]
        assert [rate for rate, _ in told] == pytest.approx(rates, rel=1e-6)
        assert [rounds for _, rounds in told][:4] == [spec.run.rounds] * 3 + [9]
        said = [record for record in caplog.messages if "the run was amended" in record]
        assert len(said) == 1
        assert f"run.rounds {spec.run.rounds} -> 9" in said[0]
        assert "inner.learning_rate 0.01 -> 0.001" in said[0]


async def test_a_loop_that_never_looks_whether_the_run_is_over_ends_with_the_global_parameters(
    tmp_path: Path,
) -> None:
    """As the README's loop: it takes one more step of its optimizer before step() leaves the block."""
    async with scene(tmp_path) as one:
        model = Normed(one.spec)

        def train(swarm: atoll.Swarm) -> None:
            while True:
                nudge(model)
                model.norm(torch.randn(8, 1))
                swarm.step(tokens=1)

        def see() -> None:
            model.norm(torch.full((8, 1), 5.0))

        thread = await one.joined(train, model=model, statistics=see)
        await one.train(work(one.spec.run.rounds, steps=3))
        await one.island.publish(0)
        one.vectors.parameters[:] = 0.25  # the commit
        await one.island.adopt(0)
        await one.stops(thread)
        assert one.ended == [], "the block was left without an error"
        for parameter in model.module.parameters():
            assert torch.equal(parameter, torch.full_like(parameter, 0.25))
        assert model.norm.running_mean is not None
        assert model.norm.running_mean.item() == pytest.approx(5.0)


async def test_a_loop_that_trains_another_copy_of_the_model_ends_and_says_so(
    tmp_path: Path,
) -> None:
    def train(swarm: atoll.Swarm) -> None:
        while not swarm.is_over:
            swarm.step(tokens=1)

    async with scene(tmp_path) as one:
        thread = await one.joined(train)
        await one.train(work(steps=STILL_STEPS - 1))  # as long as a scaler looks for its scale
        await one.island.publish(0)
        await one.island.adopt(0)
        with pytest.raises(LoopGoneError, match="have changed nothing of the model that joined"):
            await one.train(work(2, steps=9))
        await ends(thread)
        assert isinstance(one.ended[0], atoll.ModelMismatchError)
        assert "changed nothing" in str(one.ended[0])


async def test_a_loop_whose_first_steps_are_skipped_trains_on(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)

        def train(swarm: atoll.Swarm) -> int:
            for number in range(3 * STILL_STEPS):
                if number == 5:  # and never again
                    nudge(model)
                swarm.step(tokens=1)
            return 3 * STILL_STEPS

        thread = await one.joined(train, model=model)
        await one.train(work(steps=3 * STILL_STEPS))
        await one.stops(thread)
        assert one.ended == [3 * STILL_STEPS]


@pytest.mark.parametrize(
    ("tokens", "told"), [(-5, "-5"), (math.nan, "nan"), (2.5, "2.5"), (1 << 63, "9223372")]
)
async def test_a_number_of_tokens_that_is_none_is_told_to_the_program_alone(
    tmp_path: Path, tokens: float, told: str
) -> None:
    async with scene(tmp_path) as one:
        thread = await one.joined(lambda swarm: swarm.step(tokens=tokens))  # type: ignore[arg-type]
        with pytest.raises(LoopGoneError, match=told):
            await one.train(work(steps=3))
        await ends(thread)
        assert isinstance(one.ended[0], ValueError) and "how many tokens" in str(one.ended[0])


async def test_a_loss_of_several_values_is_told_to_the_program(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        thread = await one.joined(lambda swarm: swarm.step(tokens=1, loss=torch.ones(4)))
        with pytest.raises(LoopGoneError, match=r"tensor of shape \[4\]: tell its mean"):
            await one.train(work(steps=3))
        await ends(thread)
