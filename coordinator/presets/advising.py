"""What the exchange of a running run would better be, by what its nodes and links have shown. Pure.

Presets count on what links are said to carry, before the first round. Here the same formulas (cost.py,
loss.py) count with what exchanges achieved and nodes trained, and choose among what may be amended while a
run goes on: inner steps of a round, and codecs. All else stays as the run has it. What links carry and how
fast nodes compute serves the next run's file as well.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from coordinator.presets.choosing import NEAR, Found, best_of, found, often_steps
from coordinator.presets.cost import CODEC_COSTS, Setting, Situation, exchange_bytes_per_second
from coordinator.presets.costly import costs_in_words
from coordinator.presets.loss import SPARSE, Given, settings_of
from coordinator.presets.reasons import counted
from protocol.errors import TemporaryError, UsageError
from protocol.run.models import fragment_sizes
from protocol.run.run_spec import RunSpec
from protocol.terminal.console import seconds_in_words
from protocol.trust.rulings import Ruling, RulingKind
from protocol.v1 import status_pb2 as pb

_PRESENT = {pb.NODE_STATE_JOINING, pb.NODE_STATE_READY}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """The slowest way down and up, bits per second, and of how many nodes."""

    down_bits_per_second: float
    up_bits_per_second: float
    num_nodes: int
    num_with_bbr: int  # who does not say counts as one with cubic
    arithmetic: float | None = None  # of the slowest node that told: see Situation

    @property
    def advice(self) -> str:
        """What would make them carry more; empty when all nodes have done it."""
        rest = self.num_nodes - self.num_with_bbr
        if not rest:
            return ""
        return (
            f"{rest} of {self.num_nodes} nodes use cubic, or do not say and count so: over bbr exchanges "
            "get more of a link; 'atoll node doctor' on them says how"
        )


def measured_links(nodes: Iterable[pb.NodeStatus], *, instead: str = "") -> MeasuredLinks:
    """Of the nodes that are there, or of all that were when none is: the run is finished.

    A direction that nobody has measured is taken for the other. Raises TemporaryError when there is
    no rate at all; `instead` says what else can be done then.
    """
    known = list(nodes)
    present = [node for node in known if node.state in _PRESENT] or known
    rates = [node.link_rates for node in present if node.HasField("link_rates")]
    downs = [r.down_bytes_per_second for r in rates if r.down_bytes_per_second > 0]
    ups = [r.up_bytes_per_second for r in rates if r.up_bytes_per_second > 0]
    if not downs and not ups:
        raise TemporaryError(
            f"none of {len(present)} nodes has measured its link yet"
            if present
            else "no node has come yet",
            next_step=f"wait until rounds have moved 4 MiB ('atoll nodes' shows links){instead}",
        )
    return MeasuredLinks(
        down_bits_per_second=8 * min(downs or ups),
        up_bits_per_second=8 * min(ups or downs),
        num_nodes=len(present),
        num_with_bbr=sum(node.heartbeat.congestion_control == "bbr" for node in present),
        arithmetic=min(_arithmetic_of(present), default=None),
    )


def _arithmetic_of(nodes: Iterable[pb.NodeStatus]) -> Iterator[float]:
    """Of each node that has told, in multiples of the tables that presets count with."""
    for node in nodes:
        told = node.heartbeat.exchange_speed
        if told.bytes_per_second > 0 and {told.uplink, told.downlink} <= CODEC_COSTS.keys():
            yield told.bytes_per_second / exchange_bytes_per_second(told.uplink, told.downlink)


LAST_ROUNDS = 9
"""Rounds whose time counts."""

LEAST_ROUNDS = 3

CHANGED = ("inner.steps", "exchange.uplink", "exchange.downlink")
"""What is advised on. Rounds from before it was amended last say nothing of now."""

Changes = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What the run does, what it would better do, and what to amend for it."""

    links: MeasuredLinks
    seconds_per_inner_step: float  # of the fastest node, which takes all steps of a round
    round_seconds: float  # measured, the median of the last ones
    now: Found
    better: Found
    changes: Changes  # empty: nothing is better by more than seeds differ
    costs: tuple[str, ...]  # loss that its settings cost those who take part, in words
    wants_fork: bool  # the best exchanges so often that the run's outer momentum would overshoot

    @property
    def utilisation(self) -> float:
        """The part of the time in inner steps, as measured."""
        return min(1.0, self.now.prediction.training_seconds / self.round_seconds)


def advice_for(
    spec: RunSpec,
    run: pb.RunStatus,
    nodes: Iterable[pb.NodeStatus],
    rounds: Sequence[pb.RoundSummary],
    *,
    first_round: int,
    round_trip_seconds: float,
) -> Advice:
    """By the rules in force since `first_round`, and the newest rounds, the newest first.

    Raises TemporaryError before enough was measured, and UsageError when the run is finished.
    """
    if run.phase == pb.RUN_PHASE_FINISHED:
        raise UsageError(
            "the run is finished: nothing of it can be amended but its end",
            next_step="'atoll init NEW --measured DIR' makes a run by what this one has measured",
        )
    nodes = list(nodes)
    links = measured_links(nodes)
    speeds = [n.inner_steps_per_second for n in nodes if n.inner_steps_per_second > 0]
    last = [r for r in rounds if r.num_committed_slices and r.round >= first_round][:LAST_ROUNDS]
    if not speeds or len(last) < LEAST_ROUNDS:
        raise TemporaryError(
            f"{counted(len(last), 'round')} committed by the rules in force: too few to tell their time",
            next_step=f"wait until {LEAST_ROUNDS} have",
        )
    step_seconds = 1 / max(speeds)
    num_nodes = max(2, taking_part(last))
    steps = spec.steps_among(num_nodes)
    situation = Situation(
        num_parameters=run.num_parameters,
        num_layers=spec.num_layers,
        num_nodes=num_nodes,
        down_bits_per_second=links.down_bits_per_second,
        up_bits_per_second=links.up_bits_per_second,
        round_trip_seconds=round_trip_seconds,
        seconds_per_inner_step=step_seconds,
        total_steps=run.total_rounds * steps,
        batch=spec.inner.batch,
        congestion_control=None,
        arithmetic=links.arithmetic,
        inner_optimizer=spec.inner.optimizer,
        has_weights=spec.goes_on_with_weights,
        may_check=spec.data.may_be_checked,
        flops_per_second=6.0 * run.num_parameters * spec.tokens_per_inner_step / step_seconds,
        fragment_sizes=fragment_sizes(spec.tensors, spec.exchange.fragments),
    )
    given = _given(spec, steps)
    now = found(_setting_of(spec, steps), situation, given)
    every = [found(each, situation, given) for each in settings_of(situation, given)]
    every = [each for each in every if _fits(each, spec)]
    has_momentum = spec.outer.optimizer == "nesterov" and spec.outer.momentum > 0
    often = often_steps(num_nodes, spec.inner.optimizer)
    may_often = not has_momentum or now.setting.interval <= often
    may = [each for each in every if may_often or each.setting.interval > often]
    least, least_of_all = (min(each.loss for each in [now, *some]) for some in (may, every))
    better = now if least > now.loss - NEAR else best_of(may)
    return Advice(
        links=links,
        seconds_per_inner_step=step_seconds,
        round_seconds=median(each.seconds for each in last),
        now=now,
        better=better,
        changes=_changes(run, now.setting, better.setting),
        costs=tuple(costs_in_words(spec, num_nodes=num_nodes)),
        wants_fork=least_of_all < least - NEAR,
    )


def taking_part(rounds: Sequence[pb.RoundSummary]) -> int:
    """How many nodes usually do, in at least one round."""
    return round(median(each.num_participants for each in rounds))


def _given(spec: RunSpec, steps: int) -> Given:
    """What a run cannot change, and sparse codecs: what they owe wants another outer step."""
    given: dict[tuple[str, str], object] = {
        ("exchange", "fragments"): spec.exchange.fragments,
        ("exchange", "overlap"): spec.exchange.overlap,
        ("exchange", "error_feedback"): spec.exchange.error_feedback,
        ("exchange", "reducer_error"): spec.exchange.reducer_error,
        ("outer", "audit"): spec.outer.audit,
    }
    if spec.exchange.uplink in SPARSE:
        given["exchange", "uplink"] = spec.exchange.uplink
        given["exchange", "downlink"] = spec.exchange.downlink
    if spec.inner.round_tokens is not None:
        given["inner", "steps"] = steps
    return given


def _setting_of(spec: RunSpec, steps: int) -> Setting:
    return Setting(
        uplink=spec.exchange.uplink,
        downlink=spec.exchange.downlink,
        fragments=spec.exchange.fragments,
        has_overlap=spec.exchange.overlap != "none",
        steps=steps,
        audit=spec.outer.audit,
        keeps_error=spec.exchange.reducer_error == "keep",
    )


def _fits(each: Found, spec: RunSpec) -> bool:
    """Whether it needs neither sparse codecs that the run has not, nor longer deadlines."""
    is_new = each.setting.uplink in SPARSE and spec.exchange.uplink not in SPARSE
    within = spec.deadlines.commit - spec.deadlines.train
    return (
        not is_new
        and each.prediction.training_seconds <= spec.deadlines.train
        and each.prediction.longest_exchange_seconds <= within
    )


def _changes(run: pb.RunStatus, now: Setting, better: Setting) -> Changes:
    """Keys of the run file; as many inner steps are left as before, so the schedule ends where it did."""
    changes: list[tuple[str, int | str]] = []
    if better.steps != now.steps:
        left = (run.total_rounds - run.committed_round) * now.steps
        changes.append(("inner.steps", better.steps))
        changes.append(("run.rounds", run.committed_round + -(-left // better.steps)))
    for key, before, after in (
        ("exchange.uplink", now.uplink, better.uplink),
        ("exchange.downlink", now.downlink, better.downlink),
    ):
        if before != after:
            changes.append((key, after))
    return tuple(changes)


def rules_since(rulings: Iterable[Ruling]) -> int:
    """The first round by the steps and codecs that are in force."""
    since = 1
    for ruling in rulings:
        if ruling.kind is RulingKind.ROLLED_BACK:  # rules hold from the first undone round on
            since = min(since, ruling.from_round)
        elif ruling.kind is RulingKind.AMENDED and not dict(ruling.changes).keys().isdisjoint(
            CHANGED
        ):
            since = ruling.from_round
    return since


COLUMNS = ("", "inner steps", "up / down", "a round", "in inner steps", "above")


def rows_of(advice: Advice) -> Sequence[tuple[str, ...]]:
    """What is, as measured and as expected, and what is advised."""
    measured = (seconds_in_words(advice.round_seconds), f"{100 * advice.utilisation:.0f} %", "")
    rows = [
        ("now", *_setting_in_words(advice.now), *measured),
        ("as expected", *_setting_in_words(advice.now), *_expected_in_words(advice.now)),
    ]
    if advice.changes:
        better = (*_setting_in_words(advice.better), *_expected_in_words(advice.better))
        rows.append(("better", *better))
    return rows


def links_in_words(advice: Advice) -> str:
    """What all is counted with."""
    links = advice.links
    return (
        f"exchanges get {links.down_bits_per_second / 1e6:.3g} Mbit/s down and "
        f"{links.up_bits_per_second / 1e6:.3g} up of the slowest of {counted(links.num_nodes, 'node')}; "
        f"an inner step takes {advice.seconds_per_inner_step:.2g} s"
    )


def verdict_of(advice: Advice) -> Iterator[str]:
    """What to type, or that nothing is to be done."""
    yield (
        '"above" is how much higher the loss ends than by averaging gradients at every inner step, by runs '
        "of small models"
    )
    if advice.changes:
        yield f"to change it from the next round on: atoll run amend {' '.join(amendments_of(advice))}"
    else:
        yield "nothing that can be amended is better by more than chance: leave it as it is"
    if advice.wants_fork:
        yield (
            "oftener still is better without outer momentum, which only a fork can leave out: "
            "'atoll node fork', with [outer] optimizer = \"sgd\" and learning_rate = 1.0"
        )
    yield from map("loss: {}".format, advice.costs)


def amendments_of(advice: Advice) -> list[str]:
    """As they are typed."""
    return [f"{key}={value}" for key, value in advice.changes]


def as_json(advice: Advice) -> dict[str, Any]:
    """For scripts; seconds, bits per second, parts of 1."""
    return {
        "nodes": advice.links.num_nodes,
        "down_bits_per_second": advice.links.down_bits_per_second,
        "up_bits_per_second": advice.links.up_bits_per_second,
        "seconds_per_inner_step": advice.seconds_per_inner_step,
        "round_seconds": advice.round_seconds,
        "utilisation": advice.utilisation,
        "now": _setting_as_json(advice.now),
        "better": _setting_as_json(advice.better),
        "amend": amendments_of(advice),
        "costs": list(advice.costs),
        "wants_fork": advice.wants_fork,
    }


def _setting_as_json(each: Found) -> dict[str, Any]:
    return {
        "steps": each.setting.steps,
        "uplink": each.setting.uplink,
        "downlink": each.setting.downlink,
        "expected_round_seconds": each.prediction.round_seconds,
        "expected_utilisation": each.prediction.utilisation,
        "expected_above": each.above.whole,
    }


def _setting_in_words(each: Found) -> tuple[str, str]:
    setting = each.setting
    return str(setting.steps), f"{setting.uplink} / {setting.downlink}"


def _expected_in_words(each: Found) -> tuple[str, str, str]:
    there = each.prediction
    return (
        seconds_in_words(there.round_seconds),
        f"{100 * there.utilisation:.0f} %",
        f"{100 * each.above.whole:.2g} %",
    )
