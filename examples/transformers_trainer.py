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
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=8,
        max_steps=1_000_000,  # the run ends it
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        seed=int.from_bytes(os.urandom(4)),  # each node's own: else all shuffle alike
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=[{"input_ids": tokens, "labels": tokens} for tokens in windows],
    callbacks=[atoll.TrainerCallback(folder=folder)],
)
trainer.train()
