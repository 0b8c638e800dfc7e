"""What presets choose for links and models, what that should come to, and the speeds behind it.

python -m benchmarks.presets            # the tables of docs/performance.md
python -m benchmarks.presets --check    # predicted rounds beside simulated ones, in virtual time
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import structlog

from benchmarks.measurement import parser_of
from coordinator.presets.choosing import Plan, chosen
from coordinator.presets.composing import NAMED_MODELS
from coordinator.presets.cost import (
    CUBIC,
    INSTANT_HOST,
    ROUND_TRIPS,
    CongestionControl,
    Prediction,
    Setting,
    Situation,
    predicted,
)
from coordinator.presets.loss import most_fragments
from lab.simulation.memory_transport import QueuedNetwork
from lab.simulation.swarm import Life, simulate
from protocol.run.models import fragment_sizes
from protocol.run.run_files import validated
from protocol.run.run_spec import RunSpec

MODELS = ("125m", "1b", "7b")
LINKS_MBIT = (10, 100, 1000)

CHECKED_BITS_PER_SECOND = 21e3
CHECKED_ROUND_TRIP_SECONDS = 0.2
CHECKED_ROUNDS = 6


def situation_of(
    model_name: str, mbit: float, congestion_control: CongestionControl = CUBIC
) -> Situation:
    """The swarm that the table is for."""
    model = NAMED_MODELS[model_name].model
    tensors = RunSpec(model=model).tensors
    num_parameters = sum(tensor.num_elements for tensor in tensors)
    tokens = NAMED_MODELS[model_name].tokens_per_inner_step
    return Situation(
        num_parameters=num_parameters,
        num_layers=model.num_layers,
        fragment_sizes=fragment_sizes(tensors, most_fragments(model.num_layers)),
        num_nodes=4,
        down_bits_per_second=mbit * 1e6,
        up_bits_per_second=mbit * 1e6,
        round_trip_seconds=0.1,
        seconds_per_inner_step=1.0,
        total_steps=100_000,
        congestion_control=congestion_control,
        flops_per_second=6.0 * num_parameters * tokens,
    )


def table(congestion_control: CongestionControl) -> str:
    """All models on all links, as Markdown."""
    lines = [
        "| model | link, Mbit/s | up / down | fragments | overlap | steps | outer "
        "| a round sends | exchange | computing | times fewer bytes |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model_name in MODELS:
        for mbit in LINKS_MBIT:
            plan = chosen(situation_of(model_name, mbit, congestion_control))
            lines.append(_row(model_name, mbit, plan))
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
        f"{(prediction.bytes_per_round + prediction.audit_bytes) / 1e6:.1f} MB",
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

    @property
    def predicted_bytes(self) -> float:
        """What a node was to send in a round."""
        return self.prediction.bytes_per_round + self.prediction.audit_bytes


def checked(spec: RunSpec, *, seconds_per_inner_step: float = 1.0) -> Checked:
    """Runs it in virtual time, where cores take none, over rates that exchanges achieve."""
    num_nodes = spec.run.min_nodes
    bits = CHECKED_BITS_PER_SECOND
    situation = Situation(
        num_parameters=spec.num_parameters,
        num_layers=spec.num_layers,
        fragment_sizes=fragment_sizes(spec.tensors, spec.exchange.fragments),
        num_nodes=num_nodes,
        down_bits_per_second=bits,
        up_bits_per_second=bits,
        round_trip_seconds=CHECKED_ROUND_TRIP_SECONDS,
        seconds_per_inner_step=seconds_per_inner_step,
        total_steps=spec.run.rounds * spec.inner.steps,
        congestion_control=None,
    )
    setting = Setting(
        uplink=spec.exchange.uplink,
        downlink=spec.exchange.downlink,
        fragments=spec.exchange.fragments,
        has_overlap=spec.exchange.overlap != "none",
        steps=spec.inner.steps,
        audit=spec.outer.audit,
        keeps_error=spec.exchange.reducer_error == "keep",
    )
    run = simulate(
        spec,
        lives=[Life(seconds_per_inner_step=seconds_per_inner_step)] * num_nodes,
        network=QueuedNetwork(
            bytes_per_second=bits / 8,
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
    codecs: tuple[str, str],
    *,
    nodes: int,
    fragments: int,
    overlap: str,
    steps: int,
    audit: float = 0.0,
    vocab_size: int = 256,
) -> RunSpec:
    """A model small enough that training it takes no time to speak of.

    All slices are audited or none: in so few rounds a share between is a matter of luck.
    """
    return validated(
        {
            "run": {"rounds": CHECKED_ROUNDS, "min_nodes": nodes, "seed": 1},
            "model": {
                "vocab_size": vocab_size,
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 2,
                "num_kv_heads": 1,
                "ffn_size": 64,
                "context": 32,
            },
            "inner": {"steps": steps, "batch": 4},
            "outer": {"audit": audit},
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
    """Each part of the formula at least once: nodes, codecs, fragments, overlap, audits, links that limit."""
    for codecs, nodes, fragments, overlap, steps, audit in (
        (("int4", "int4"), 2, 1, "none", 5, 0.0),
        (("int4", "int4"), 4, 1, "none", 5, 0.0),
        (("int4", "int4"), 3, 1, "blend", 10, 0.0),
        (("int4", "int4"), 3, 1, "blend", 5, 0.0),
        (("ec2", "int4"), 3, 2, "none", 5, 0.0),
        (("sign", "sign"), 3, 1, "none", 5, 0.0),
        (("topk64", "topk256"), 3, 1, "none", 5, 0.0),
        (("int4", "int4"), 4, 1, "none", 40, 1.0),
    ):
        name = f"{nodes} nodes, {codecs[0]} / {codecs[1]}, {fragments} fragments, {overlap}, {steps} steps"
        name += ", all audited" * bool(audit)
        yield (
            name,
            checked_spec(
                codecs, nodes=nodes, fragments=fragments, overlap=overlap, steps=steps, audit=audit
            ),
        )
    for overlap, steps in (("none", 5), ("blend", 10)):
        yield (
            f"3 nodes, 2 fragments of which one is five times as large, {overlap}, {steps} steps",
            checked_spec(
                ("int4", "int4"),
                nodes=3,
                fragments=2,
                overlap=overlap,
                steps=steps,
                vocab_size=1536,
            ),
        )


def _print_checks() -> None:
    print("setting | round predicted | simulated | bytes predicted | simulated")
    for name, spec in checks():
        found = checked(spec)
        print(
            f"{name} | {found.prediction.round_seconds:.2f} s | {found.round_seconds:.2f} s | "
            f"{found.predicted_bytes:.0f} | {found.bytes_per_round:.0f}"
        )


def main() -> None:
    """Prints what was asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if asked.check:
        _print_checks()
    else:
        for congestion_control in get_args(CongestionControl):
            print(f"{congestion_control}\n\n{table(congestion_control)}\n")


if __name__ == "__main__":
    main()
