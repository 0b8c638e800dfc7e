"""A training loop as a contributor writes one, for tests: the run's decoder, in a process of its own.

Typed as: loop_program.py FOLDER RUN_FILE OUT [what=…]. Writes a line of JSON for each inner step, and at
the end the model.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import atoll
from node.island.models.decoder_modules import Decoder
from protocol.run.models import DecoderModel
from protocol.run.run_files import load_run_file
from tests.loop_optimizers import Lookahead, ScheduleFree

OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "lookahead": Lookahead,
    "schedule-free": ScheduleFree,
}


def main() -> None:
    folder, run_file, out = map(Path, sys.argv[1:4])
    options = dict(option.split("=", 1) for option in sys.argv[4:])
    spec = load_run_file(run_file)
    torch.manual_seed(int(options.get("seed", "0")))
    device = torch.device(options.get("device", "cpu"))
    assert isinstance(spec.model, DecoderModel)
    model = Decoder(spec.model).to(device, getattr(torch, options.get("dtype", "float32")))
    kind = OPTIMIZERS[options.get("optimizer", "adamw")]
    optimizer = kind(model.parameters(), lr=float(options.get("rate", "1e-3")))
    scaler = torch.amp.GradScaler(device.type, enabled="scaled" in options)
    forward = torch.compile(model) if "compiled" in options else model

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.float16, enabled=scaler.is_enabled()):
            logits = forward(tokens[:, :-1])
        return cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def batch_of(numbers: torch.Tensor) -> torch.Tensor:
        # Of the number of a sample, so that whatever is trained twice is the same.
        steps = torch.arange(spec.model.context + 1)
        return ((numbers[:, None] * 7 + steps * (1 + numbers[:, None] % 3)) % 64).to(device)

    def exchanged() -> torch.Tensor:
        """What the swarm should have of this loop: of a schedule-free one x, made of its y and z."""
        values = [p.detach().clone() for p in model.parameters()]
        (group,) = optimizer.param_groups
        if isinstance(optimizer, ScheduleFree) and group["is_training"]:
            zs = [optimizer.state[p].get("z", p) for p in model.parameters()]
            beta = group["beta"]
            values = [y + (1 - 1 / beta) * (z - y) for y, z in zip(values, zs, strict=True)]
        return torch.cat([each.flatten() for each in values])

    def in_its_unit(loss: float) -> float:
        return loss / math.log(2) if "in_bits" in options else loss

    def evaluate() -> tuple[float, int]:
        with torch.no_grad():
            loss = loss_of(batch_of(torch.arange(4))).item()
        return in_its_unit(loss), 4 * spec.model.context

    num_steps, tokens = 0, 0
    adopted: list[tuple[torch.Tensor, int, torch.Tensor]] = []  # own, their tokens, and what came
    with (
        out.open("a") as told,
        atoll.join(
            model,
            optimizer,
            folder=folder,
            invite=options.get("invite"),
            evaluate=evaluate if "evaluates" in options else None,
        ) as swarm,
    ):
        print("the loop trains", flush=True)
        for numbers in swarm.samples():
            loss = loss_of(batch_of(numbers))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            time.sleep(float(options.get("step_seconds", "0")))
            num_steps += 1
            if num_steps == int(options.get("hangs_after", "0")):
                print("the loop hangs", flush=True)
                time.sleep(1000)
            own, tokens = exchanged(), tokens + len(numbers) * spec.model.context
            step = swarm.step(loss=loss)
            if step.is_replaced:
                adopted.append((own, tokens, exchanged()))
                tokens = 0
            line = {
                "round": step.round,
                "is_replaced": step.is_replaced,
                "steps_left": step.steps_left,
                "progress": swarm.progress,
                "numbers": numbers.tolist(),
            }
            told.write(json.dumps(line) + "\n")
            told.flush()
            if num_steps == int(options.get("ends_after", "0")):
                break
        print(f"the loop ends: {swarm.why_over}", flush=True)
    held = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    torch.save(held, out.with_suffix(".pt"))
    torch.save(adopted, out.with_suffix(".adopted.pt"))
    assert all(values.isfinite().all() for values in held.values())


if __name__ == "__main__":
    main()
