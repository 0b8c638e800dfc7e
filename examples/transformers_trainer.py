"""transformers.Trainer as an island of a swarm: python transformers_trainer.py NODE_FOLDER TEXT_FILE."""

import os
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

import atoll

CONTEXT = 128  # [model] context of the run
folder, text = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()
windows = [list(text[i : i + CONTEXT]) for i in range(0, len(text) - CONTEXT, CONTEXT)]
samples = [{"input_ids": tokens, "labels": tokens} for tokens in windows]
held_out, training = samples[:16], samples[16:]
model = Qwen3ForCausalLM(
    Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def evaluate() -> tuple[float, int]:
    tokens = len(held_out) * (CONTEXT - 1)  # nothing predicts the first
    return trainer.evaluate()["eval_loss"], tokens


def share_of_rate(_: int) -> float:  # by how far the run is: max_steps says nothing of that
    return 1 - 0.9 * (callback.swarm.progress if callback.swarm else 0.0)


callback = atoll.TrainerCallback(folder=folder, evaluate=evaluate)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate)
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=8,
        max_steps=1_000_000,  # the run ends it
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        seed=int.from_bytes(os.urandom(4)),  # each node's own: else all shuffle alike
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=training,
    eval_dataset=held_out,
    optimizers=(optimizer, schedule),
    callbacks=[callback],
)
trainer.train()
