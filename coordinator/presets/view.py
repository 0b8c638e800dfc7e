"""What a preset chose and what that should come to, for people and as JSON."""

import math
from dataclasses import asdict

import click

from coordinator.presets.choosing import Plan
from coordinator.presets.cost import DISK_BYTES, Situation, share_in_words
from coordinator.presets.loss import Above
from coordinator.presets.reasons import counted, every
from protocol.run.node_memory import NODE_PROCESS_BYTES, daemon_bytes
from protocol.terminal import console
from protocol.terminal.console import rate_in_words


def show(plan: Plan) -> None:
    """Prints the choices with their reasons, then the prediction."""
    rows = [
        (f"{choice.table}.{choice.key}", str(choice.value), choice.reason)
        for choice in plan.choices
    ]
    console.terminal().print(console.table(("key", "value", "why"), rows))
    click.echo("\n".join(["", *prediction_lines(plan)]))


def prediction_lines(plan: Plan) -> list[str]:
    """The situation, the prediction and the verdict, a sentence each."""
    situation, prediction = plan.situation, plan.prediction
    parameters = situation.num_parameters
    beside = "beside" if plan.setting.has_overlap else "after"
    link = f"{rate_in_words(situation.down_bits_per_second)} down"
    link += f", {rate_in_words(situation.up_bits_per_second)} up"
    share = share_in_words(situation.link, prediction.bytes_per_round)
    is_late = plan.setting.has_overlap
    num_bytes = prediction.bytes_per_round + prediction.audit_bytes
    lines = [
        f"for {console.count_in_words(parameters)} parameters, "
        f"{situation.num_nodes} nodes, {link}, "
        f"a round trip of {1000 * situation.round_trip_seconds:.3g} ms, "
        f"inner steps of {situation.seconds_per_inner_step:.3g} s:",
        f"a node sends and receives {console.bytes_in_words(num_bytes)} a round at up to "
        f"{rate_in_words(prediction.peak_bits_per_second)}, "
        f"{prediction.times_fewer_bytes:.0f} times less than averaging gradients"
        + (
            f"; {console.bytes_in_words(prediction.audit_bytes)} of that are for audits"
            if prediction.audit_bytes
            else ""
        ),
        *_checks_in_words(prediction.checking_share),
        f"an exchange takes {prediction.exchange_seconds:.3g} s{_longest_in_words(plan)} {beside} "
        f"{prediction.training_seconds:.3g} s of inner steps; it {share}",
        f"each parameter is exchanged {every(plan.setting.interval, 'inner step')}, "
        f"{counted(plan.exchanges, 'time')}"
        + (
            f"; results come {counted(prediction.late_steps, 'inner step')} late" if is_late else ""
        ),
        _loss_in_words(plan.above),
        f"a node takes about {console.bytes_in_words(_daemon_bytes(plan))} of memory beside "
        f"{console.bytes_in_words(situation.rank_bytes)} in its ranks, activations apart, and "
        f"{console.bytes_in_words(DISK_BYTES * parameters)} of disk",
        f"a round takes {console.seconds_in_words(prediction.round_seconds)}, the run of "
        f"{counted(plan.rounds, 'round')} {console.seconds_in_words(plan.run_seconds)}",
        _arithmetic_in_words(situation),
        plan.verdict,
    ]
    if plan.meets_goal and prediction.enough_bits_per_second is not None:
        enough = rate_in_words(prediction.enough_bits_per_second)
        lines.append(f"a link of {enough} would do for 95 %")
    return lines + warnings_of(plan)


def _longest_in_words(plan: Plan) -> str:
    """That of the largest fragment, where it takes clearly longer."""
    prediction = plan.prediction
    if not prediction.is_uneven:
        return ""
    largest = max(plan.situation.sizes_of(plan.setting.fragments))
    return (
        f", that of the largest fragment, of {console.count_in_words(round(largest))} parameters, "
        f"{prediction.longest_exchange_seconds:.3g} s,"
    )


def _checks_in_words(share: float) -> list[str]:
    if not share:
        return []
    return [
        f"spot checks take {100 * share:.2g} % of the time for inner steps; rounds take no longer"
    ]


def _loss_in_words(above: Above) -> str:
    if above.whole >= 0.1:
        return "so short a run ends far above averaging gradients at every inner step"
    parts = (
        (above.seldom, "seldom exchanges"),
        (above.codecs, "codecs"),
        (above.late, "late results"),
    )
    return (
        f"by runs of small models, the loss ends about {100 * above.whole:.2g} % above averaging gradients "
        f"at every inner step: {', '.join(f'{100 * part:.2g} % by {what}' for part, what in parts)}"
    )


def _arithmetic_in_words(situation: Situation) -> str:
    times = "" if situation.times_as_fast == 1 else f"{situation.times_as_fast:.2g} times "
    times += "as fast as one core of docs/performance.md"
    if situation.arithmetic is not None:
        return f"the slowest node's own work is {times}"
    beside = ", on cores beside GPUs" if situation.times_as_fast > 1 else ""
    return (
        f"the nodes' own work is assumed to be {times}{beside}: --measured DIR goes by what nodes of a "
        "swarm measured"
    )


LONG_ROUND_SECONDS = 3600.0


def warnings_of(plan: Plan) -> list[str]:
    """What a run owner should know before the run begins."""
    prediction = plan.prediction
    if prediction.round_seconds < LONG_ROUND_SECONDS:
        return []
    if prediction.training_seconds >= prediction.exchange_seconds:
        advice = f"fewer inner steps shorten it: --steps, now {plan.setting.steps}"
    else:
        advice = "the exchange takes most of it: faster links or a smaller model shorten it"
    return [
        f"warning: a round takes {console.seconds_in_words(prediction.round_seconds)}: so much work is lost "
        f"with a node that dies, and nobody sees the model meanwhile; {advice}"
    ]


def _daemon_bytes(plan: Plan) -> int:
    """With the programs themselves: as 'atoll join' says it of the run."""
    rules = [choice.value for choice in plan.choices if choice.key == "reducer_error"]
    return NODE_PROCESS_BYTES + daemon_bytes(
        num_elements=plan.situation.num_parameters,
        largest_fragment=math.ceil(max(plan.situation.sizes_of(plan.setting.fragments))),
        num_reducers=plan.situation.num_nodes,
        keeps_error=rules in ([], ["keep"]),
        uplink=plan.setting.uplink,
        downlink=plan.setting.downlink,
        is_audited=plan.setting.audit > 0,
    )


def as_json(plan: Plan) -> dict[str, object]:
    """The same as values: bits and bytes per second, seconds."""
    return {
        "situation": asdict(plan.situation),
        "choices": [
            {
                "key": f"{choice.table}.{choice.key}",
                "value": choice.value,
                "given": choice.is_given,
                "reason": choice.reason,
            }
            for choice in plan.choices
        ],
        "steps_between_exchanges": plan.setting.interval,
        "exchanges": plan.exchanges,
        "prediction": asdict(plan.prediction),
        "rounds": plan.rounds,
        "run_seconds": plan.run_seconds,
        "node_bytes": {
            "daemon": _daemon_bytes(plan),
            "ranks": plan.situation.rank_bytes,
            "disk": DISK_BYTES * plan.situation.num_parameters,
        },
        "warnings": warnings_of(plan),
        "meets_goal": plan.meets_goal,
        "verdict": plan.verdict,
    }
