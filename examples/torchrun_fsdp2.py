"""FSDP2 on several ranks: torchrun --nproc-per-node 2 torchrun_fsdp2.py NODE_FOLDER TEXT_FILE."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import atoll

folder, text = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()
is_on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if is_on_gpu else "gloo")
if is_on_gpu:
    torch.cuda.set_device(dist.get_rank())
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # of what was sharded, so after it
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

with atoll.join(model, optimizer, folder=folder) as swarm:
    length = swarm.run.context + 1
    windows = data[: len(data) // length * length].view(-1, length)
    for numbers in swarm.samples():  # this rank's share of what the ledger leased
        batch = windows[numbers % len(windows)].to("cuda" if is_on_gpu else "cpu")
        loss = cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        swarm.step(loss=loss)
print(f"rank {dist.get_rank()}: {swarm.why_over}")
dist.destroy_process_group()
