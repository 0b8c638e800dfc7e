"""A plain training loop as an island of a swarm: python plain_torch.py NODE_FOLDER TEXT_FILE."""

import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

import atoll

CONTEXT, BATCH = 128, 8  # [model] context and [inner] batch of the run
SIZES = Qwen3Config(  # the run's [model]: here that of the template
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
folder, text = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
data = data[: len(data) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)  # [windows, T + 1]
held_out, training = data[:16], data[16:]
model = Qwen3ForCausalLM(SIZES)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def loss_of(windows: torch.Tensor) -> torch.Tensor:
    logits = model(windows[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate() -> tuple[float, int]:
    return loss_of(held_out).item(), held_out[:, 1:].numel()


with atoll.join(model, optimizer, folder=folder, evaluate=evaluate) as swarm:
    while not swarm.is_over:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - 0.9 * swarm.progress)  # a schedule of one's own
        loss = loss_of(training[torch.randint(len(training), (BATCH,))])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        swarm.step(tokens=BATCH * CONTEXT, loss=loss)
print(f"{swarm.why_over}; {evaluate()[0]:.3f} nats per byte here")
