"""FSDP2 on the run's own data: torchrun --nproc-per-node 2 torchrun_fsdp2.py NODE_FOLDER."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

import atoll

is_on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if is_on_gpu else "gloo")
if is_on_gpu:
    torch.cuda.set_device(dist.get_rank())
model = Qwen3ForCausalLM(
    Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # of what was sharded, so after it

with atoll.join(model, optimizer, folder=sys.argv[1]) as swarm:
    for batch in swarm.batches():  # this rank's share of what the ledger has leased
        tokens = batch.tokens.to("cuda" if is_on_gpu else "cpu")  # [B, T + 1]
        targets = tokens[:, 1:]  # [B, T]
        if batch.counted is not None:  # padding and prompts are not learned, and weigh nothing
            targets = targets.masked_fill(~batch.counted.to(tokens.device), -100)
        loss = cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        swarm.step(loss=loss)
print(f"rank {dist.get_rank()}: {swarm.why_over}")
dist.destroy_process_group()
