"""transformers.Trainer with atoll's callback, against the daemon's island of loops."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import atoll
from node.island.training.schedule import position_of
from protocol.run.schedule import share_of_peak
from tests.unit.loop_scene import CONTEXT, Scene, ends, scene, work


def train(one: Scene, *, how: dict[str, Any], **arguments: Any) -> threading.Thread:
    """A trainer in a thread, on the run's model; `ended` has what came of it."""
    sizes = one.spec.decoder
    model = LlamaForCausalLM(
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
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (16, CONTEXT))]
    callback = atoll.TrainerCallback(folder=one.home, wait_seconds=1.0, **how)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(one.home / "trainer"),
            per_device_train_batch_size=4,
            logging_steps=1,
            learning_rate=0.5,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **{"save_strategy": "no", "max_steps": 1000, "seed": 7} | arguments,
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
        assert report.tokens == 4 * 4 * CONTEXT and report.loss > 0
        await one.stops(thread)
        (state,) = one.ended
        rates = [
            0.5 * one.spec.inner.learning_rate * share_of_peak(one.spec.inner, at)
            for at in (position_of(one.spec, order, step) for step in range(4))
        ]
        logged = [told["learning_rate"] for told in state.log_history if "learning_rate" in told]
        assert logged == pytest.approx(rates, rel=1e-6)
        assert state.global_step == 4
        assert "seed" not in caplog.text


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
        assert "ended after 2 steps, and the run goes on: raise max_steps" in caplog.text
        assert "the trainer shuffles by its default seed, 42" in caplog.text


async def test_an_old_checkpoint_in_the_place_of_what_was_trained_is_refused(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        best = {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"}
        await ends(train(one, how={}, **best))
        assert isinstance(one.ended[0], atoll.SwarmError)
        assert "load_best_model_at_end would put old weights" in str(one.ended[0])
