"""What presets choose for links and models, what that should come to, and the speeds behind it.

python -m benchmarks.presets            # the table of docs/performance.md
python -m benchmarks.presets --check    # predicted rounds beside simulated ones, in virtual time
python -m benchmarks.presets --host     # a core's speeds, as in coordinator/presets/cost.py
"""

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import structlog

from benchmarks.queued_network import QueuedNetwork
from benchmarks.simulation import Life, simulate
from coordinator.presets.choosing import Plan, chosen
from coordinator.presets.cost import (
    INSTANT_HOST,
    LINK_SHARE,
    ROUND_TRIPS,
    Prediction,
    Setting,
    Situation,
    predicted,
)
from coordinator.presets.model_sizes import NAMED_MODELS, num_parameters
from node.exchange.outer_optimizer import outer_optimizer_of
from node.outer_state import outer_digest
from protocol.run_spec import RunSpec, validated

MODELS = ("0.2m", "125m", "1b", "7b")
LINKS_MBIT = (10, 100, 1000)

CHECKED_BITS_PER_SECOND = 30e3
CHECKED_ROUND_TRIP_SECONDS = 0.2
CHECKED_ROUNDS = 6


def situation_of(model_name: str, mbit: float) -> Situation:
    """The swarm that the table is for."""
    model = NAMED_MODELS[model_name].model
    return Situation(
        num_parameters=num_parameters(model),
        num_layers=model.num_layers,
        num_nodes=4,
        down_bits_per_second=mbit * 1e6,
        up_bits_per_second=mbit * 1e6,
        round_trip_seconds=0.1,
        seconds_per_inner_step=1.0,
        total_steps=100_000,
    )


def table() -> str:
    """All models on all links, as Markdown."""
    lines = [
        "| model | link, Mbit/s | up / down | fragments | overlap | steps | outer "
        "| a round sends | exchange | computing | times fewer bytes |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model_name in MODELS:
        for mbit in LINKS_MBIT:
            lines.append(_row(model_name, mbit, chosen(situation_of(model_name, mbit))))
    return "\n".join(lines)


def _row(model_name: str, mbit: int, plan: Plan) -> str:
    values = {(choice.table, choice.key): choice.value for choice in plan.choices}
    setting, prediction = plan.setting, plan.prediction
    outer = f"{values['outer', 'optimizer']} {values['outer', 'learning_rate']}"
    if values["outer", "momentum"]:
        outer += f", {values['outer', 'momentum']}"
    cells = (
        model_name,
        str(mbit),
        f"{setting.uplink} / {setting.downlink}",
        str(setting.fragments),
        str(values["exchange", "overlap"]),
        str(setting.steps),
        outer,
        f"{prediction.bytes_per_round / 1e6:.1f} MB",
        f"{prediction.exchange_seconds:.1f} s",
        f"{100 * prediction.utilisation:.1f} %",
        f"{prediction.times_fewer_bytes:,.0f}",
    )
    return f"| {' | '.join(cells)} |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One setting, predicted and simulated."""

    prediction: Prediction
    round_seconds: float  # of rounds in the middle of the run, the mean
    bytes_per_round: float  # of the node that sent most


def checked(spec: RunSpec, *, seconds_per_inner_step: float = 1.0) -> Checked:
    """Runs it in virtual time, where cores take none, on links that carry what the formula counts on."""
    num_nodes = spec.run.min_nodes
    bits = CHECKED_BITS_PER_SECOND
    situation = Situation(
        num_parameters=num_parameters(spec.model),
        num_layers=spec.model.num_layers,
        num_nodes=num_nodes,
        down_bits_per_second=bits,
        up_bits_per_second=bits,
        round_trip_seconds=CHECKED_ROUND_TRIP_SECONDS,
        seconds_per_inner_step=seconds_per_inner_step,
        total_steps=spec.run.rounds * spec.inner.steps,
    )
    setting = Setting(
        uplink=spec.exchange.uplink,
        downlink=spec.exchange.downlink,
        fragments=spec.exchange.fragments,
        has_overlap=spec.exchange.overlap != "none",
        steps=spec.inner.steps,
    )
    run = simulate(
        spec,
        lives=[Life(seconds_per_inner_step=seconds_per_inner_step)] * num_nodes,
        network=QueuedNetwork(
            bytes_per_second=LINK_SHARE * bits / 8,
            # Half of all round trips with the contribution, half with the result.
            latency_seconds=ROUND_TRIPS * CHECKED_ROUND_TRIP_SECONDS / 2,
        ),
    )
    begins = run.begins[1:]  # the first round has nothing to hide behind
    return Checked(
        prediction=predicted(situation, setting, INSTANT_HOST),
        round_seconds=(begins[-1] - begins[0]) / (len(begins) - 1),
        bytes_per_round=max(run.bytes_sent.values()) / spec.run.rounds,
    )


def checked_spec(
    codecs: tuple[str, str], *, nodes: int, fragments: int, overlap: str, steps: int
) -> RunSpec:
    """A model small enough that training it takes no time to speak of."""
    return validated(
        {
            "run": {"rounds": CHECKED_ROUNDS, "min_nodes": nodes, "seed": 1},
            "model": {
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 2,
                "num_kv_heads": 1,
                "ffn_size": 64,
                "context": 32,
            },
            "inner": {"steps": steps, "batch": 4},
            "exchange": {
                "uplink": codecs[0],
                "downlink": codecs[1],
                "fragments": fragments,
                "overlap": overlap,
            },
            "evaluation": {"every_rounds": CHECKED_ROUNDS, "samples": 16},
        },
        origin="the benchmark's run file",
    )


def checks() -> Iterator[tuple[str, RunSpec]]:
    """Each part of the formula at least once: nodes, codecs, fragments, overlap, links that limit."""
    for codecs, nodes, fragments, overlap, steps in (
        (("int4", "int4"), 2, 1, "none", 5),
        (("int4", "int4"), 4, 1, "none", 5),
        (("int4", "int4"), 3, 1, "blend", 10),
        (("int4", "int4"), 3, 1, "blend", 5),
        (("ec2", "int4"), 3, 2, "none", 5),
        (("sign", "sign"), 3, 1, "none", 5),
        (("topk256", "topk256"), 3, 1, "none", 5),
    ):
        name = f"{nodes} nodes, {codecs[0]} / {codecs[1]}, {fragments} fragments, {overlap}, {steps} steps"
        spec = checked_spec(codecs, nodes=nodes, fragments=fragments, overlap=overlap, steps=steps)
        yield name, spec


def _print_checks() -> None:
    print("setting | round predicted | simulated | bytes predicted | simulated")
    for name, spec in checks():
        found = checked(spec)
        print(
            f"{name} | {found.prediction.round_seconds:.2f} s | {found.round_seconds:.2f} s | "
            f"{found.prediction.bytes_per_round:.0f} | {found.bytes_per_round:.0f}"
        )


def _print_host_speeds() -> None:
    size = 16_000_000
    parameters = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    momentum, mean = np.zeros_like(parameters), parameters.copy()
    optimizer = outer_optimizer_of(RunSpec().outer)

    def sums() -> None:  # global − published + residual, less what was taken; fresh vectors each
        accumulated = parameters - mean
        accumulated += momentum
        _ = accumulated - mean

    parts: dict[str, Callable[[], object]] = {
        "apply": lambda: optimizer.apply(parameters, momentum, mean, np.float32(1.0)),
        "sums": sums,
        "digest": lambda: outer_digest(parameters, momentum),
    }
    print(
        f"GB/s of fp32 parameters on one core, {size / 1e6:.0f} M of them; least, median, most of 7"
    )
    for name, part in parts.items():
        speeds = []
        for _ in range(7):
            began = time.process_time()
            part()
            speeds.append(4 * size / 1e9 / (time.process_time() - began))
        print(f"{name}: {min(speeds):.2f}, {statistics.median(speeds):.2f}, {max(speeds):.2f}")


def main() -> None:
    """Prints what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--host", action="store_true")
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if asked.check:
        _print_checks()
    elif asked.host:
        _print_host_speeds()
    else:
        print(table())


if __name__ == "__main__":
    main()
