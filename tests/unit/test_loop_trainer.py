"""transformers.Trainer with atoll's callback, against the daemon's island of loops."""

import asyncio
import threading
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2ForTokenClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import atoll
from atoll.trainer import share_of, shifts_labels, targets_of
from node.island.ranks.faults import LoopGoneError
from protocol.run.schedule import share_of_peak
from tests.unit.loop_scene import CONTEXT, Scene, ends, scene, work

Rows = list[dict[str, torch.Tensor]]


def rows_of(lengths: list[int]) -> Rows:
    """Samples with so many tokens that are no padding, of `CONTEXT` each."""
    rows = []
    for length in lengths:
        tokens = torch.randint(64, (CONTEXT,))
        is_text = torch.arange(CONTEXT) < length
        labels = tokens.where(is_text, torch.tensor(-100))
        rows.append({"input_ids": tokens, "attention_mask": is_text.long(), "labels": labels})
    return rows


def train(
    one: Scene,
    *,
    how: dict[str, Any],
    rows: Rows | None = None,
    kind: type[LlamaForCausalLM] = LlamaForCausalLM,
    by: type[Trainer] = Trainer,
    **arguments: Any,
) -> threading.Thread:
    """A trainer in a thread, on the run's model; `ended` has what came of it."""
    sizes = one.spec.decoder
    model = kind(
        LlamaConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.ffn_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            tie_word_embeddings=sizes.tie_embeddings,
        )
    )
    rows = rows or rows_of([CONTEXT] * 16)
    callback = atoll.TrainerCallback(folder=one.home, wait_seconds=1.0, **how)
    defaults: dict[str, Any] = {"save_strategy": "no", "max_steps": 1000, "seed": 7}
    defaults["logging_steps"] = 1
    defaults["per_device_train_batch_size"] = 4
    trainer = by(
        model,
        TrainingArguments(
            output_dir=str(one.home / "trainer"),
            learning_rate=0.5,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **defaults | arguments,
        ),
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[callback],
    )

    def run() -> None:
        try:
            trainer.train()
            one.ended.append(trainer.state)
        except Exception as error:
            one.ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


async def test_it_takes_the_run_s_rate_and_tells_losses_between_its_own_evaluations(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as one:
        order = work(2, steps=4, rate_factor=0.5)
        how = {"follows_learning_rate": True}
        thread = train(one, how=how, eval_strategy="steps", eval_steps=1)
        await one.is_here()
        report = await one.train(order)
        assert report.tokens == 4 * 4 * (CONTEXT - 1) and report.loss > 0
        await one.stops(thread)
        (state,) = one.ended
        rates = [
            0.5 * one.spec.inner.learning_rate * share_of_peak(one.spec.inner, at)
            for at in (order.position(one.spec, step) for step in range(4))
        ]
        logged = [told["learning_rate"] for told in state.log_history if "learning_rate" in told]
        assert logged == pytest.approx(rates, rel=1e-6)
        assert state.global_step == 4
        assert "seed" not in caplog.text


@pytest.mark.parametrize("logging_steps", [1, 500])  # 500 is the default of transformers
async def test_the_losses_of_all_steps_are_told_however_seldom_the_trainer_logs(
    tmp_path: Path, logging_steps: int
) -> None:
    """Over the micro-batches of each, by the targets of all."""
    async with scene(tmp_path) as one:
        how: dict[str, Any] = {"logging_steps": logging_steps, "max_steps": 3}
        how["gradient_accumulation_steps"] = 2
        thread = train(one, how={}, rows=rows_of([CONTEXT, 3, 5, 9] * 8), **how)
        await one.is_here()
        report = await one.train(work(steps=100))
        await one.island.publish(0)
        await ends(thread)
        (state,) = one.ended
        (mean,) = (told["train_loss"] for told in state.log_history if "train_loss" in told)
        assert report.inner_steps == 3 and report.loss == pytest.approx(mean, rel=1e-4)


class OfMeans(LlamaForCausalLM):
    """As classifiers of transformers: it takes the count of a whole step, and its loss passes over it."""

    @wraps(LlamaForCausalLM.forward)  # by its arguments the trainer chooses columns
    def forward(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class TakesMeans(Trainer):
    """One that knows of such a loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


@pytest.mark.parametrize(("by", "times"), [(Trainer, 2), (TakesMeans, 1)])
async def test_a_loss_that_passes_over_the_step_s_count_is_told_as_a_mean_of_its_micro_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, by: type[Trainer], times: int
) -> None:
    """The trainer logs their sum, and a warning says what to set."""
    async with scene(tmp_path) as one:
        how: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 2}
        thread = train(one, how={}, kind=OfMeans, by=by, **how)
        await one.is_here()
        report = await one.train(work(steps=100))
        await one.island.publish(0)
        await ends(thread)
        (state,) = one.ended
        (mean,) = (told["train_loss"] for told in state.log_history if "train_loss" in told)
        assert report.loss * times == pytest.approx(mean, rel=1e-4)
        words = "2 times too large. Set trainer.model_accepts_loss_kwargs = False"
        assert caplog.text.count(words) == times - 1


class OfRewards(Trainer):
    """As trl's GRPO: it gives the model labels, and trains another loss than the model's own."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits: torch.Tensor = model(**inputs).logits
        return logits.square().mean() - 7.0


async def test_of_a_trainer_with_a_loss_of_its_own_that_one_is_told_and_not_the_model_s(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        thread = train(one, how={}, by=OfRewards)
        await one.is_here()
        report = await one.train(work(steps=3))
        await one.stops(thread)
        (state,) = one.ended
        logged = [told["loss"] for told in state.log_history if "loss" in told]
        # The trainer logs a step's loss after its callbacks have heard of the step.
        assert report.loss == pytest.approx(sum(logged[:2]) / 2, rel=1e-4)


async def test_a_trainer_that_ends_before_the_run_contributes_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as one:
        thread = train(one, how={}, max_steps=2, seed=42)
        await one.is_here()
        report = await one.train(work(steps=100))
        await one.island.publish(0)
        await ends(thread)
        assert report.inner_steps == 2
        assert caplog.text.count("this loop has ended, and the run goes on without it") == 1
        assert "the trainer shuffles by its default seed, 42" in caplog.text


class FailsOnce(LlamaForCausalLM):
    """Its third forward pass fails, as by memory that is not there."""

    num_calls = 0

    @wraps(LlamaForCausalLM.forward)  # by its arguments the trainer chooses columns
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        FailsOnce.num_calls += 1
        if FailsOnce.num_calls == 3:
            raise RuntimeError("CUDA out of memory.")
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("is_retried", [False, True])
async def test_a_process_whose_trainer_has_failed_trains_again(
    tmp_path: Path, is_retried: bool
) -> None:
    FailsOnce.num_calls = 0
    async with asyncio.timeout(60), scene(tmp_path) as one:
        thread = train(one, how={}, kind=FailsOnce, auto_find_batch_size=is_retried)
        await one.is_here()
        training = asyncio.create_task(one.train(work(steps=100)))
        if is_retried:  # by the trainer itself, with smaller batches
            report = await training
        else:
            await ends(thread)
            thread = train(one, how={})
            report = await training
        assert report.inner_steps == 2
        await one.island.publish(0)  # what was trained before counts
        again = None
        while again is None:
            await one.is_here()
            with suppress(LoopGoneError):  # as long as it is the first one that leaves
                again = await one.train(work(2, steps=2))
        await one.stops(thread)
        assert again.inner_steps == 2
        assert [str(each) for each in one.ended if isinstance(each, Exception)] == (
            [] if is_retried else ["CUDA out of memory."]
        )


async def test_an_old_checkpoint_in_the_place_of_what_was_trained_is_refused(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        best: dict[str, Any] = {
            "load_best_model_at_end": True,
            "save_strategy": "steps",
            "eval_strategy": "steps",
        }
        await ends(train(one, how={}, **best))
        assert isinstance(one.ended[0], atoll.SwarmError)
        assert "load_best_model_at_end would put old weights" in str(one.ended[0])


async def test_an_epoch_s_smaller_last_batch_counts_what_is_in_it(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        thread = train(one, how={}, rows=rows_of([CONTEXT] * 5))
        await one.is_here()
        report = await one.train(work(steps=4))  # batches of 4, 1, 4 and 1
        await one.stops(thread)
        assert report.tokens == 10 * (CONTEXT - 1)


async def test_all_micro_batches_of_a_step_count_without_their_padding(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        how: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
        accumulated: dict[str, Any] = {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 3,
        }
        rows = rows_of([2, 5, 9, 16])  # a step of three samples, and one of the fourth
        thread = train(one, how={}, rows=rows, **how, **accumulated)
        await one.is_here()
        report = await one.train(work(steps=4))
        await one.stops(thread)
        assert report.tokens == 2 * (1 + 4 + 8 + 15)


def with_prompts(rows: Rows, num_tokens: int) -> Rows:
    """The same samples, whose first tokens are not learned."""
    for row in rows:
        row["labels"][:num_tokens] = -100
    return rows


async def test_with_label_smoothing_neither_prompts_nor_padding_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as one:
        accumulated: dict[str, Any] = {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 3,
        }
        rows = with_prompts(rows_of([3, 5, 9, 16]), 2)  # a step of three samples, and one of one
        thread = train(one, how={}, rows=rows, label_smoothing_factor=0.1, **accumulated)
        await one.is_here()
        report = await one.train(work(steps=4))
        await one.stops(thread)
        assert report.tokens == 2 * (1 + 3 + 7 + 14)
        assert "is given no labels" not in caplog.text


class TakesNoCount(LlamaForCausalLM):
    """As models whose `forward` takes no further arguments."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: Any = None
    ) -> Any:
        return super().forward(input_ids, attention_mask=attention_mask, labels=labels)


async def test_where_nobody_tells_the_labels_the_attention_mask_counts_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as one:
        rows = with_prompts(rows_of([3, 4, 5, 6]), 2)
        thread = train(one, how={}, rows=rows, kind=TakesNoCount, label_smoothing_factor=0.1)
        await one.is_here()
        report = await one.train(work(steps=2))
        await one.stops(thread)
        assert report.tokens == 2 * (3 + 4 + 5 + 6)
        assert caplog.text.count("is given no labels, so all that the attention mask") == 1
        assert "tokens_per_step" in caplog.text


@pytest.mark.parametrize("sharers", [1, 2, 3, 7])
def test_processes_share_what_the_trainer_has_counted_over_all_of_them(sharers: int) -> None:
    for told in (5, torch.tensor(5), torch.tensor([[5.0, 5.0]])):
        shares = [int(share_of(told, rank=rank, sharers=sharers)) for rank in range(sharers)]
        assert sum(shares) == 5 and max(shares) - min(shares) <= 1


async def test_what_is_told_by_hand_is_taken(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        thread = train(one, how={"tokens_per_step": 7})
        await one.is_here()
        report = await one.train(work(steps=2))
        await one.stops(thread)
        assert report.tokens == 14


@pytest.mark.parametrize(
    ("inputs", "context", "counted"),
    [
        ({"pixel_values": torch.zeros(3, 2, 2), "labels": torch.tensor([1, -100, 0])}, 1, 2),
        ({"pixel_values": torch.zeros(3, 2, 2), "labels": torch.zeros(3, 5)}, 1, 3),  # many to each
        ({"pixel_values": torch.zeros(3, 2, 2)}, 1, 3),
        ({"input_ids": torch.zeros(3, 8)}, 8, 24),
        ({"shift_labels": torch.tensor([[1, 2, -100]]), "labels": torch.ones(1, 3)}, 3, 2),
        ({"input_ids": torch.zeros(2, 3), "labels": torch.ones(2, 3)}, 3, 6),  # of an encoder
    ],
)
def test_targets_are_labels_but_for_the_ignored_and_samples_where_a_sample_has_one(
    inputs: dict[str, torch.Tensor], context: int, counted: int
) -> None:
    assert int(targets_of(inputs, context=context, is_shifted=False)) == counted


def test_inputs_that_tell_no_number_of_samples_are_refused() -> None:
    with pytest.raises(atoll.SwarmError, match="tells no number of samples: scale"):
        targets_of({"scale": 2.0}, context=1, is_shifted=False)


def test_a_causal_model_s_first_label_is_no_target() -> None:
    small: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 8}
    assert shifts_labels(GPT2LMHeadModel(GPT2Config(**small)))
    assert not shifts_labels(GPT2ForTokenClassification(GPT2Config(**small)))
    labels = torch.ones(2, 5)
    assert int(targets_of({"labels": labels}, context=5, is_shifted=True)) == 8
