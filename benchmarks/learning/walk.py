"""The run that the README's walk makes beside the demo's settings: real processes, equal tokens.

    python -m benchmarks.learning.walk

Two nodes on loopback train the template of `atoll coordinator init`, and then the demo's run file with as
many rounds as make the same tokens. Printed are the held-out losses of both ends, over the same samples.
"""

import tempfile
import tomllib
from pathlib import Path

from benchmarks.measurement import parser_of
from coordinator.config import RUN_TEMPLATE
from lab.processes.swarm import RealSwarm
from node.demo.command import RUN_FILE
from protocol.run.run_files import validated
from protocol.run.run_spec import RunSpec

NODES = 2
EVALUATED_SAMPLES = 512


def main() -> None:
    """Trains both, one after the other, and prints what they came to."""
    parser = parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, help="of the walk, instead of the template's")
    parser.add_argument("--hours", type=float, default=1.0, help="given up after")
    chosen = parser.parse_args()
    walk = RUN_TEMPLATE.replace("seed = 0 ", f"seed = {chosen.seed} ", 1)
    if chosen.rounds:
        walk = walk.replace("rounds = 100 ", f"rounds = {chosen.rounds} ", 1)
    walk = walk.replace("samples = 64 ", f"samples = {EVALUATED_SAMPLES} ", 1)
    tokens = tokens_of(spec_of(walk))
    demo = RUN_FILE.format(seed=chosen.seed, rounds=1, num_nodes=NODES)
    rounds = tokens // tokens_of(spec_of(demo))
    demo = RUN_FILE.format(seed=chosen.seed, rounds=rounds, num_nodes=NODES)
    demo += f"samples = {EVALUATED_SAMPLES}\n"
    losses = {}
    for name, text in {"walk": walk, "demo": demo}.items():
        spec = spec_of(text)
        trained, losses[name] = trained_by(text, seconds=3600 * chosen.hours)
        print(
            f"{name}: {spec.run.rounds} rounds, {trained:,} tokens, held-out loss "
            f"{losses[name]:.4f} nats per byte",
            flush=True,
        )
    print(f"walk / demo: {losses['walk'] / losses['demo']:.4f}")


def spec_of(text: str) -> RunSpec:
    """The run file, checked as a coordinator checks it."""
    return validated(tomllib.loads(text), origin="the benchmark's run file")


def tokens_of(spec: RunSpec) -> int:
    """Of the whole run, when both nodes train all of it."""
    return spec.run.rounds * NODES * spec.inner.steps * spec.tokens_per_inner_step


def trained_by(text: str, *, seconds: float) -> tuple[int, float]:
    """Tokens that commits took, and the held-out loss at the end."""
    with tempfile.TemporaryDirectory() as folder, RealSwarm(Path(folder), text) as swarm:
        for node in swarm.join(*(f"node-{number + 1}" for number in range(NODES))):
            node.start()
        swarm.until(lambda: swarm.is_finished, "the end of the run", seconds=seconds)
        run = swarm.asked("status")["run"]
        return int(run["token_clock"]), float(run["held_out_losses"][-1]["loss"])


if __name__ == "__main__":
    main()
