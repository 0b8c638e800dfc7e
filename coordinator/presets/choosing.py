"""Which exchange a run takes, by its model, its links and its nodes' speed. Pure.

Of all settings that suit the run (loss.py) each costs loss in two ways: what it exchanges teaches less than
data parallelism would, and time that nodes wait teaches nothing. The setting with the least of both is taken,
or one that sends fewer bytes and costs hardly more: no more than NEAR.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from coordinator.presets import reasons
from coordinator.presets.cost import (
    GOAL,
    MEASURED_HOST,
    HostSpeeds,
    Prediction,
    Setting,
    Situation,
    predicted,
)
from coordinator.presets.loss import (
    AUDIT_SHARES,
    LEAST_FOR_SPARSE,
    MOST_FOR_AUDITS,
    SLOPE,
    SPARSE,
    SPARSE_PAIRS,
    Above,
    Given,
    above_in,
    exchanges_of,
    keeps_error,
    results_hold_all,
    settings_of,
)
from protocol.run.run_spec import EvaluationSection

Value = str | int | float
Told = tuple[str, str, Value, str]
"""Table, key, value and reason."""

HEADERS = 0.01
"""Of the bytes of a step: what is sent for it differs by no more where only the fragments do."""

NEAR = 0.002
"""So much of the loss more is hardly more: seeds differ by five times that."""

OFTEN_STEPS, OFTEN_STEPS_OF_MORE = 12, 8
"""Exchanged every so many inner steps or fewer, the plain mean is best: in 600 exchanges, every two steps,
Nesterov's 0.7, 0.6 ended 2 to 5 % higher (benchmarks.learning.intervals). The second is of more nodes than
FEW_NODES: four ended level every 8 steps, and four and eight lower by Nesterov's every 12
(benchmarks.learning.overlap --often)."""

BLENDS = "adamw"
"""Whose results are better blended where they are late by half of a short interval or more, and the outer
step is then Nesterov's: exchanging every 4 to 10 of 1,200 inner steps, AdamW ended 0 to 2 % lower so, and
Muon 0.4 and 0.6 % higher (benchmarks.learning.intervals)."""

FEW_NODES, MOST_MOMENTUM = 2, 0.6
"""Up to so many hold on to half of their own weights where they take late results over. Four and eight that
held on to nothing ended 0.2 to 2.9 % lower where results were late by less than half of the interval, by
outer momenta up to this one: what they hold on to keeps them apart (benchmarks.learning.overlap
--by-nodes)."""

SOME_EXCHANGES, MANY_EXCHANGES = 32, 1000
"""From so many of each parameter on an outer momentum of 0.6, and the published 0.9. In 16 exchanges 0.3 was
best here; in 50, 0.5 to 0.8 ended alike (benchmarks.convergence, "outer" and "tuning")."""

MANY_SPARSE_EXCHANGES = 300
"""From so many on 0.5 for top-k whose results hold all; in 80, 0.3 was best ("long" and "tuning")."""


OFTEN_STEPS_OF_SGD = 4
"""The same of loops by SGD with momentum: every 2 steps 0.7, 0.6 ended 14 % lower with one model and
16 % higher with another, from every 5 on lower with both (benchmarks.learning.other_models)."""


def often_steps(num_nodes: int, inner_optimizer: str = "adamw") -> int:
    """Up to so many inner steps from one exchange to the next the plain mean is best."""
    if inner_optimizer == "sgd":
        return OFTEN_STEPS_OF_SGD
    return OFTEN_STEPS if num_nodes <= FEW_NODES else OFTEN_STEPS_OF_MORE


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A setting, what it takes and what it costs."""

    setting: Setting
    prediction: Prediction
    exchanges: int
    above: Above

    @property
    def waiting(self) -> float:
        """What the time costs that is not spent in inner steps."""
        return -SLOPE * math.log(self.prediction.utilisation)

    @property
    def loss(self) -> float:
        """Above data parallelism without limits, in parts of its loss: not learned, or not in time."""
        return self.above.whole + self.waiting

    @property
    def bytes_of_step(self) -> float:
        """What a node sends for one inner step."""
        there = self.prediction
        return (there.bytes_per_round + there.audit_bytes) / self.setting.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One key of the run file, its value, and why."""

    table: str
    key: str
    value: Value
    reason: str

    @property
    def is_given(self) -> bool:
        """Whether the run file said so."""
        return self.reason == GIVEN


GIVEN = "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All choices, what they come to, and a sentence about the goal."""

    situation: Situation
    choices: tuple[Choice, ...]
    setting: Setting
    prediction: Prediction
    exchanges: int  # of each parameter, in the whole run
    above: Above  # data parallelism over links without limits, as expected
    verdict: str

    @property
    def is_too_short(self) -> bool:
        """Whether the run ends before each parameter was exchanged; only what is given makes it so."""
        return self.situation.total_steps < self.setting.interval

    @property
    def overlap(self) -> Value:
        """What the run file will say of it."""
        key = ("exchange", "overlap")
        return next(choice.value for choice in self.choices if (choice.table, choice.key) == key)

    @property
    def rounds(self) -> int:
        """Of the whole run."""
        rounds = next(c.value for c in self.choices if (c.table, c.key) == ("run", "rounds"))
        assert isinstance(rounds, int)
        return rounds

    @property
    def run_seconds(self) -> float:
        """How long the whole run takes, when all goes as predicted."""
        return self.rounds * self.prediction.round_seconds

    @property
    def meets_goal(self) -> bool:
        """Whether nodes compute as much of the time as they should."""
        return self.prediction.utilisation >= GOAL


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What keys follow from."""

    situation: Situation
    given: Given
    taken: Found
    oftener: Found | None  # the best at a shorter interval
    waiting: Found  # the same, whole and without overlap
    whole: Found  # the same, whole

    @property
    def setting(self) -> Setting:
        return self.taken.setting

    @property
    def is_often(self) -> bool:
        """Whether each parameter is exchanged so often that momentum has little to do."""
        return self.setting.interval <= often_steps(
            self.situation.num_nodes, self.situation.inner_optimizer
        )

    @property
    def is_late(self) -> bool:
        """Whether results come half of the interval late, or later."""
        return 2 * self.taken.prediction.late_steps >= self.setting.interval

    @property
    def is_dense(self) -> bool:
        """Whether contributions hold all values."""
        return self.setting.uplink not in SPARSE

    @property
    def blends(self) -> bool:
        """Whether ranks move half of the way to results that are late, instead of by them: see BLENDS."""
        told = self.given.get(("exchange", "overlap"), "blend")
        may_blend = self.setting.has_overlap and told == "blend" and self.is_late
        has_gained = self.situation.inner_optimizer == BLENDS and self.is_dense
        return may_blend and has_gained and self.setting.interval <= OFTEN_STEPS

    def holds_on(self, momentum: float) -> bool:
        """Whether ranks hold on to half of their own weights where they take results over: see FEW_NODES."""
        was_measured = self.is_dense and not self.is_late and momentum <= MOST_MOMENTUM
        return self.situation.num_nodes <= FEW_NODES or not was_measured

    @property
    def goes_on_by_adamw(self) -> bool:
        """Whether weights are given, for what was measured of them: Muon's exchanges were not."""
        return self.situation.has_weights and self.situation.inner_optimizer == "adamw"

    @property
    def why_not_oftener(self) -> str:
        """What keeps parameters from being exchanged oftener; empty where nothing shorter may be chosen."""
        taken, oftener = self.taken, self.oftener
        if oftener is None:
            return ""
        if oftener.loss <= taken.loss:
            return reasons.HARDLY_MORE
        more = {
            "time that nodes wait": oftener.waiting - taken.waiting,
            "coarser codecs": oftener.above.codecs - taken.above.codecs,
            "later results": oftener.above.late - taken.above.late,
        }
        return f"{reasons.COSTS_MORE} {max(more, key=lambda each: more[each])}"


def found(
    setting: Setting, situation: Situation, given: Given, host: HostSpeeds = MEASURED_HOST
) -> Found:
    """What a setting takes and costs."""
    prediction = predicted(situation, setting, host)
    return Found(
        setting=setting,
        prediction=prediction,
        exchanges=exchanges_of(situation, given, setting),
        above=above_in(situation, setting, late_steps=prediction.late_steps),
    )


def chosen(
    situation: Situation, given: Given | None = None, host: HostSpeeds = MEASURED_HOST
) -> Plan:
    """The setting that loses least, or hardly more with fewer bytes."""
    given = given or {}

    def costs_of(setting: Setting) -> Found:
        return found(setting, situation, given, host)

    every = [costs_of(setting) for setting in settings_of(situation, given)]
    taken = _taken(every)
    setting = taken.setting
    whole = replace(setting, fragments=1, steps=setting.interval)
    case = _Case(
        situation=situation,
        given=given,
        taken=taken,
        oftener=min(
            (each for each in every if each.setting.interval < setting.interval),
            key=lambda each: each.loss,
            default=None,
        ),
        waiting=costs_of(replace(whole, has_overlap=False)),
        whole=costs_of(whole),
    )
    return Plan(
        situation=situation,
        setting=setting,
        prediction=taken.prediction,
        exchanges=taken.exchanges,
        above=taken.above,
        choices=tuple(_choices(case)),
        verdict=_verdict(
            taken.prediction, has_sparse=any(each.setting.uplink in SPARSE for each in every)
        ),
    )


def _taken(every: list[Found]) -> Found:
    """The best of dense codecs, or where that misses the goal of one sparse pair more, and then of both."""
    for count in range(len(SPARSE_PAIRS)):
        without = SPARSE_PAIRS[count:]
        some = [f for f in every if (f.setting.uplink, f.setting.downlink) not in without]
        if some and (best := best_of(some)).prediction.utilisation >= GOAL:
            return best
    return best_of(every)


def best_of(every: list[Found]) -> Found:
    """Of all that lose hardly more than the best, the one with the fewest bytes.

    Of several that send as many, headers apart, the one that loses least.
    """
    least = min(each.loss for each in every)
    near = [each for each in every if each.loss <= least + NEAR]
    fewest = min(each.bytes_of_step for each in near)
    alike = [each for each in near if each.bytes_of_step <= (1 + HEADERS) * fewest]
    return min(alike, key=lambda each: each.loss)


def _verdict(prediction: Prediction, *, has_sparse: bool) -> str:
    share = f"{100 * prediction.utilisation:.1f} %"
    if prediction.utilisation >= GOAL:
        return f"nodes compute for {share} of the time"
    enough = prediction.enough_bits_per_second
    if enough is None:
        advice = "no link is fast enough for more: round trips and the nodes' own work take longer"
    else:
        advice = f"{100 * GOAL:.0f} % takes {enough / 1e6:.3g} Mbit/s with these settings"
    if not has_sparse:
        advice += f", or sparse codecs, for which a run must exchange each parameter {LEAST_FOR_SPARSE} times"
    longest = prediction.longest_exchange_seconds
    of_largest = f", or {longest:.3g} of the largest fragment," if prediction.is_uneven else ""
    return (
        f"nodes compute for only {share} of the time, with {prediction.exchange_seconds:.3g} s of exchange"
        f"{of_largest} for {prediction.training_seconds:.3g} s of inner steps, and what waits less loses "
        f"more; {advice}"
    )


def _choices(case: _Case) -> Iterator[Choice]:
    """Every key with its reason, in the order of the run file."""
    situation, setting, given = case.situation, case.setting, case.given
    prediction = case.taken.prediction
    rounds = -(-situation.total_steps // setting.steps)
    why_uplink = reasons.of_uplink(setting, situation, prediction, codecs=case.taken.above.codecs)
    why_steps = reasons.of_steps(
        setting,
        case.taken.exchanges,
        seldom=case.taken.above.seldom,
        oftener=case.why_not_oftener,
    )
    if isinstance(told_rounds := given.get(("run", "rounds")), int):
        why_steps = reasons.of_rounds_given(setting, situation.total_steps, told_rounds)
    why_fragments = reasons.of_fragments(setting, prediction, case.whole.prediction.late_steps)
    outer = _outer(case)
    momentum = given.get(("outer", "momentum"), outer[-1][2])
    assert isinstance(momentum, int | float)
    values: list[Told] = [
        ("run", "rounds", rounds, f"{reasons.counted(situation.total_steps, 'inner step')} in all"),
        ("inner", "steps", setting.steps, why_steps),
        *outer,
        *_audits(setting),
        ("exchange", "uplink", setting.uplink, why_uplink),
        ("exchange", "downlink", setting.downlink, reasons.of_downlink(setting, situation)),
        *_owed(setting, situation, given),
        ("exchange", "fragments", setting.fragments, why_fragments),
        *_overlap(case, momentum),
        *_evaluation(setting, situation.total_steps, given),
    ]
    for table, key, value, reason in values:
        told = given.get((table, key))
        if told is not None:
            assert isinstance(told, (str, int, float))
            yield Choice(table=table, key=key, value=told, reason=GIVEN)
        else:
            yield Choice(table=table, key=key, value=value, reason=reason)
    yield from _deadlines(prediction, given)


def _outer(case: _Case) -> list[Told]:
    """The outer optimizer that fits what is given, the codecs, and how often there are exchanges."""
    setting, nodes = case.setting, case.situation.num_nodes
    is_sparse = setting.uplink in SPARSE
    if case.given.get(("outer", "optimizer")) == "sgd":
        why = reasons.SPARSE_RATE if is_sparse else reasons.SGD_RATE
        return _outer_step("sgd", 1.0, 0.0, GIVEN, why, reasons.NO_MOMENTUM)
    if results_hold_all(setting, nodes):
        why = "best measured for top-k whose results hold all that nodes send"
        momentum, lost = 0.3, f"{why}: none, or 0.6, ended 0.02 to 0.03 nats per byte higher"
        if case.taken.exchanges >= MANY_SPARSE_EXCHANGES:
            momentum, lost = 0.5, reasons.MORE_MOMENTUM_FOR_SPARSE
        return _outer_step("nesterov", 1.0, momentum, why, why, lost)
    wants_momentum = bool(case.given.get(("outer", "momentum")))
    if case.situation.inner_optimizer == "sgd" and not is_sparse and not case.is_often:
        return _outer_step("nesterov", 0.7, 0.6, *[reasons.BY_SGD] * 3)
    if case.goes_on_by_adamw and not is_sparse:
        return _outer_step("nesterov", 0.7, 0.6, reasons.WEIGHTS, reasons.WEIGHTS, reasons.WEIGHTS)
    if (is_sparse or case.is_often) and not (wants_momentum or case.blends):
        why = reasons.SPARSE_RATE if is_sparse else reasons.OFTEN
        if is_sparse and setting.downlink in SPARSE:
            why += " where results do not hold all that nodes send"
        return _outer_step("sgd", 1.0, 0.0, why, why, reasons.NO_MOMENTUM)
    often = f"{reasons.counted(case.taken.exchanges, 'exchange')} of each parameter"
    rate, why_rate = 0.7, "1.0 overshot in short runs"
    if case.blends:
        momentum, why = 0.6, reasons.BLENDED
    elif case.is_often:
        momentum, why = 0.3, reasons.OFTEN
    elif case.taken.exchanges < SOME_EXCHANGES:
        momentum, why = 0.3, f"{often}: by AdamW more would overshoot"
    elif setting.interval <= OFTEN_STEPS:  # often for few nodes alone
        momentum, why = 0.6, reasons.OFTEN_BY_MORE
    elif case.taken.exchanges < MANY_EXCHANGES:
        momentum, why = 0.6, f"{often}: 0.9 wants a thousand"
    else:
        rate, why_rate = 0.6 if nodes < 8 else 0.8, f"usual for {nodes} nodes with momentum 0.9"
        momentum, why = 0.9, f"{often}: many enough for the published one"
    why_optimizer = "momentum is given, and sgd has none" if wants_momentum else "for dense codecs"
    return _outer_step("nesterov", rate, momentum, why_optimizer, why_rate, why)


def _outer_step(
    optimizer: str, rate: float, momentum: float, why: str, why_rate: str, why_momentum: str
) -> list[Told]:
    return [
        ("outer", "optimizer", optimizer, why),
        ("outer", "learning_rate", rate, why_rate),
        ("outer", "momentum", momentum, why_momentum),
    ]


def _owed(setting: Setting, situation: Situation, given: Given) -> list[Told]:
    """What becomes of what encoding rounds away."""
    if setting.uplink in SPARSE and given.get(("exchange", "error_feedback")) is not False:
        decay, why_decay = 0.95, "what waits for many rounds is of weights that are gone"
    else:
        decay, why_decay = 1.0, "nothing is forgotten"
    if results_hold_all(setting, situation.num_nodes):
        rule, why_rule = "keep", "results hold all that nodes send, so next to nothing is owed"
    elif not keeps_error(setting, situation.num_nodes):
        rule, why_rule = "drop", "keeping it was worse with topk256"
    else:
        rule, why_rule = "keep", "costs no bytes and loses nothing"
    return [
        ("exchange", "residual_decay", decay, why_decay),
        ("exchange", "reducer_error", rule, why_rule),
    ]


def _audits(setting: Setting) -> list[Told]:
    """Where they are fewer than usual."""
    if setting.audit >= AUDIT_SHARES[0]:
        return []
    why = f"{AUDIT_SHARES[0]:g} would add more than {100 * MOST_FOR_AUDITS:.0f} % to the bytes"
    return [("outer", "audit", setting.audit, why)]


def _overlap(case: _Case, momentum: float) -> list[Told]:
    plain = case.waiting.prediction
    if not case.setting.has_overlap:
        why = f"waiting leaves {100 * plain.utilisation:.1f} % of the time for inner steps"
        return [("exchange", "overlap", "none", why)]
    waited = f"waiting would leave {100 * plain.utilisation:.0f} % for inner steps"
    why = reasons.BLENDED if case.blends else "late results cost least so"
    share = 0.5
    if not case.holds_on(momentum):
        share, why = 0.0, reasons.WHOLLY_TAKEN
    return [
        ("exchange", "overlap", "blend" if case.blends else "keep", waited),
        ("exchange", "blend", share, why),
    ]


USUAL_EVERY_ROUNDS = EvaluationSection().every_rounds

EVALUATED_STEPS = 30 * USUAL_EVERY_ROUNDS
"""Inner steps between evaluations, as with the run file's usual rounds of 30 and its usual every_rounds."""

LEAST_EVALUATIONS = 4


def _evaluation(setting: Setting, total_steps: int, given: Given) -> list[Told]:
    """Where short intervals were chosen: 64 samples evaluated cost a node about what 20 trained ones do."""
    is_fixed = ("run", "rounds") in given or ("inner", "steps") in given
    steps = min(EVALUATED_STEPS, total_steps // LEAST_EVALUATIONS)
    if is_fixed or setting.steps >= 30 or steps < setting.steps:
        return []
    rounds = max(USUAL_EVERY_ROUNDS, steps // setting.steps)
    why = f"every {rounds * setting.steps} inner steps: more would take time from them"
    return [("evaluation", "every_rounds", rounds, why)]


DEADLINE_FACTOR = 4
LEAST_TRAIN_SECONDS = 600
LEAST_EXCHANGE_SECONDS = 60
MOST_SECONDS = 7 * 86400
"""What a run file takes at most."""


def _deadlines(prediction: Prediction, given: Given) -> Iterator[Choice]:
    """Bounds for the first rounds and the worst; after four the coordinator goes by what it sees.

    None when the run file says any of the three: they go together.
    """
    if any(("deadlines", key) in given for key in ("train", "contribute", "commit")):
        return
    exchange = prediction.longest_exchange_seconds
    half = max(LEAST_EXCHANGE_SECONDS, DEADLINE_FACTOR * exchange / 2)
    half = min(half, MOST_SECONDS / 4)
    train = max(LEAST_TRAIN_SECONDS, DEADLINE_FACTOR * prediction.training_seconds)
    train = min(train, MOST_SECONDS - 2 * half)
    reason = f"{DEADLINE_FACTOR} times what is predicted, or the usual"
    if train < prediction.training_seconds or 2 * half < exchange:
        reason = "as long as a run file may say, and shorter than what is predicted"
    for key, seconds in (
        ("train", train),
        ("contribute", train + half),
        ("commit", train + 2 * half),
    ):
        yield Choice(table="deadlines", key=key, value=round(seconds), reason=reason)
