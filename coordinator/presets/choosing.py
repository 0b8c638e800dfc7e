"""Which exchange a run takes, by its model, its links and its nodes' speed. Pure.

The first rung of the ladder (ladder.py) that keeps nodes computing for GOAL of the time is taken, so nothing
is compressed more than it must be; and of that rung the fewest fragments that bring results soon enough.
When no rung reaches the goal, the one that computes most of the time is taken, and told.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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
from coordinator.presets.ladder import (
    AUDIT_SHARES,
    LEAST_FOR_SPARSE,
    MOST_FOR_AUDITS,
    SPARSE,
    USUAL_INTERVAL,
    Given,
    exchanges_of,
    keeps_error,
    ladder,
    results_hold_all,
)
from protocol.run.run_spec import EvaluationSection

Value = str | int | float
Told = tuple[str, str, Value, str]
"""Table, key, value and reason."""

Found = tuple[Setting, Prediction]

SOON_STEPS = 5
"""So late results cost nothing in Streaming DiLoCo (Douillard et al. 2025, section 3), and least here; what
later ones cost (benchmarks.convergence, "fragments") is what fragments are for."""

LEVEL = 0.99
"""Where nodes wait for links whatever is chosen, so much of the best still counts as level with it."""

SOME_EXCHANGES, MANY_EXCHANGES = 32, 1000
"""From so many of each parameter on an outer momentum of 0.6, and the published 0.9. In 16 exchanges 0.3 was
best here; in 50, 0.5 to 0.8 ended alike (benchmarks.convergence, "outer" and "tuning")."""

MANY_SPARSE_EXCHANGES = 300
"""From so many on 0.5 for top-k whose results hold all; in 80, 0.3 was best ("long" and "tuning")."""


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
    setting: Setting
    prediction: Prediction
    waiting: Prediction  # of the rung before, whose nodes wait
    shortest: int  # interval on the ladder
    late_steps_whole: int  # with the fewest fragments of the same rung
    exchanges: int


def chosen(
    situation: Situation, given: Given | None = None, host: HostSpeeds = MEASURED_HOST
) -> Plan:
    """The first rung that meets the goal and is not too late, or else the setting that comes nearest."""
    given = given or {}
    rungs = [
        [(setting, predicted(situation, setting, host)) for setting in rung]
        for rung in ladder(situation, given)
    ]
    soonest = [_soonest(rung) for rung in rungs]
    place = _first_good_enough(soonest)
    setting, prediction = soonest[place]
    case = _Case(
        situation=situation,
        given=given,
        setting=setting,
        prediction=prediction,
        waiting=_waiting(rungs[: place + 1]),
        shortest=rungs[0][0][0].interval,
        late_steps_whole=rungs[place][0][1].late_steps,
        exchanges=exchanges_of(situation, given, (setting.fragments, setting.steps)),
    )
    last, _ = rungs[-1][0]
    return Plan(
        situation=situation,
        setting=setting,
        prediction=prediction,
        exchanges=case.exchanges,
        choices=tuple(_choices(case)),
        verdict=_verdict(prediction, has_sparse=last.uplink in SPARSE),
    )


def _waiting(rungs: list[list[Found]]) -> Prediction:
    """Of the last rung whose nodes wait; of the first where none do, for overlap is given."""
    waiting = [rung[0][1] for rung in rungs if not rung[0][0].has_overlap]
    return waiting[-1] if waiting else rungs[0][0][1]


def _soonest(rung: list[Found]) -> Found:
    """Of those that reach the goal, or are level with the best, the fewest fragments that are soon enough."""
    best = max(outcome.utilisation for _, outcome in rung)
    least = GOAL if best >= GOAL else LEVEL * best
    enough = [found for found in rung if found[1].utilisation >= least]
    # min takes the first of equals.
    return min(enough, key=lambda found: max(SOON_STEPS, found[1].late_steps))


def _first_good_enough(founds: list[Found]) -> int:
    """Place of the first that reaches the goal, or of the next codec where its results come too late.

    Too late is half of the interval: ec2, which loses nothing measurable, brings them in half the time.
    """
    reaching = [p for p, (_, outcome) in enumerate(founds) if outcome.utilisation >= GOAL]
    if not reaching:
        shares = [outcome.utilisation for _, outcome in founds]
        return shares.index(max(shares))
    first, _ = founds[reaching[0]]
    alike = [p for p in reaching if founds[p][0].interval == first.interval]
    dense = [p for p in alike if _is_dense(founds[p][0])]
    soon = max(SOON_STEPS, first.interval // 2)
    return min(dense or alike[:1], key=lambda p: max(soon, founds[p][1].late_steps))


def _is_dense(setting: Setting) -> bool:
    return setting.uplink not in SPARSE and setting.downlink not in SPARSE


def _verdict(prediction: Prediction, *, has_sparse: bool) -> str:
    share = f"{100 * prediction.utilisation:.1f} %"
    if prediction.utilisation >= GOAL:
        return f"nodes compute for {share} of the time"
    enough = prediction.enough_bits_per_second
    if enough is None:
        advice = "no link is fast enough for that: round trips and the nodes' own work take longer"
    else:
        advice = f"it takes {enough / 1e6:.3g} Mbit/s with these settings"
    if not has_sparse:
        advice += f", or sparse codecs, for which a run must exchange each parameter {LEAST_FOR_SPARSE} times"
    return (
        f"no setting keeps nodes computing for {100 * GOAL:.0f} % of the time: the best is {share}, "
        f"{prediction.exchange_seconds:.3g} s of exchange for {prediction.training_seconds:.3g} s of "
        f"inner steps; {advice}"
    )


def _choices(case: _Case) -> Iterator[Choice]:
    """Every key with its reason, in the order of the run file."""
    situation, setting, given = case.situation, case.setting, case.given
    rounds = -(-situation.total_steps // setting.steps)
    why_uplink = reasons.of_uplink(setting, situation, case.prediction)
    why_steps = reasons.of_steps(
        setting, situation.total_steps, case.exchanges, shortest=case.shortest
    )
    if isinstance(told_rounds := given.get(("run", "rounds")), int):
        why_steps = reasons.of_rounds_given(setting, situation.total_steps, told_rounds)
    why_fragments = reasons.of_fragments(setting, case.prediction, case.late_steps_whole)
    values: list[Told] = [
        ("run", "rounds", rounds, f"{reasons.counted(situation.total_steps, 'inner step')} in all"),
        ("inner", "steps", setting.steps, why_steps),
        *_outer(case),
        *_audits(setting),
        ("exchange", "uplink", setting.uplink, why_uplink),
        ("exchange", "downlink", setting.downlink, reasons.of_downlink(setting, situation)),
        *_owed(setting, situation, given),
        ("exchange", "fragments", setting.fragments, why_fragments),
        *_overlap(setting, case.waiting),
        *_evaluation(setting, situation.total_steps, given),
    ]
    for table, key, value, reason in values:
        told = given.get((table, key))
        if told is not None:
            assert isinstance(told, (str, int, float))
            yield Choice(table=table, key=key, value=told, reason=GIVEN)
        else:
            yield Choice(table=table, key=key, value=value, reason=reason)
    yield from _deadlines(case.prediction, given)


def _outer(case: _Case) -> list[Told]:
    """The outer optimizer that fits what is given, the codecs, and how many exchanges there are."""
    setting, nodes = case.setting, case.situation.num_nodes
    if case.given.get(("outer", "optimizer")) == "sgd":
        is_sparse = setting.uplink in SPARSE
        return [
            ("outer", "optimizer", "sgd", GIVEN),
            ("outer", "learning_rate", 1.0, reasons.SPARSE_RATE if is_sparse else reasons.SGD_RATE),
            ("outer", "momentum", 0.0, "sgd has none"),
        ]
    if results_hold_all(setting, nodes):
        why = "best measured for top-k whose results hold all that nodes send"
        momentum, lost = 0.3, f"{why}: none, or 0.6, ended 0.02 to 0.03 nats per byte higher"
        if case.exchanges >= MANY_SPARSE_EXCHANGES:
            momentum, lost = 0.5, reasons.MORE_MOMENTUM_FOR_SPARSE
        return [
            ("outer", "optimizer", "nesterov", why),
            ("outer", "learning_rate", 1.0, why),
            ("outer", "momentum", momentum, lost),
        ]
    told_momentum = case.given.get(("outer", "momentum"))
    if setting.uplink in SPARSE and not told_momentum:
        why = reasons.SPARSE_RATE
        if setting.downlink in SPARSE:
            why += " where results do not hold all that nodes send"
        return [
            ("outer", "optimizer", "sgd", why),
            ("outer", "learning_rate", 1.0, why),
            ("outer", "momentum", 0.0, why),
        ]
    often = f"{reasons.counted(case.exchanges, 'exchange')} of each parameter"
    rate, why_rate = 0.7, "1.0 overshot in short runs"
    if case.exchanges >= MANY_EXCHANGES:
        rate, why_rate = 0.6 if nodes < 8 else 0.8, f"usual for {nodes} nodes with momentum 0.9"
        momentum, why = 0.9, f"{often}: many enough for the published one"
    elif case.exchanges >= SOME_EXCHANGES:
        momentum, why = 0.6, f"{often}: 0.9 wants a thousand"
    else:
        momentum, why = 0.3, f"{often}: more would overshoot"
    why_optimizer = "momentum is given, and sgd has none" if told_momentum else "for dense codecs"
    return [
        ("outer", "optimizer", "nesterov", why_optimizer),
        ("outer", "learning_rate", rate, why_rate),
        ("outer", "momentum", momentum, why),
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


def _overlap(setting: Setting, plain: Prediction) -> list[Told]:
    if not setting.has_overlap:
        return [("exchange", "overlap", "none", "waiting costs less than 5 % of the time")]
    waited = f"waiting would leave {100 * plain.utilisation:.0f} % for inner steps"
    return [
        ("exchange", "overlap", "keep", waited),
        ("exchange", "blend", 0.5, "late results cost least so, whatever the inner optimizer"),
    ]


USUAL_EVERY_ROUNDS = EvaluationSection().every_rounds

EVALUATED_STEPS = USUAL_EVERY_ROUNDS * USUAL_INTERVAL
"""Inner steps between evaluations, where rounds are of the usual interval and every_rounds is as usual."""

LEAST_EVALUATIONS = 4


def _evaluation(setting: Setting, total_steps: int, given: Given) -> list[Told]:
    """Where short intervals were chosen: 64 samples evaluated cost a node about what 20 trained ones do."""
    is_fixed = ("run", "rounds") in given or ("inner", "steps") in given
    steps = min(EVALUATED_STEPS, total_steps // LEAST_EVALUATIONS)
    if is_fixed or setting.interval >= USUAL_INTERVAL or steps < setting.steps:
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
    half = max(LEAST_EXCHANGE_SECONDS, DEADLINE_FACTOR * prediction.exchange_seconds / 2)
    half = min(half, MOST_SECONDS / 4)
    train = max(LEAST_TRAIN_SECONDS, DEADLINE_FACTOR * prediction.training_seconds)
    train = min(train, MOST_SECONDS - 2 * half)
    reason = f"{DEADLINE_FACTOR} times what is predicted, or the usual"
    if train < prediction.training_seconds or 2 * half < prediction.exchange_seconds:
        reason = "as long as a run file may say, and shorter than what is predicted"
    for key, seconds in (
        ("train", train),
        ("contribute", train + half),
        ("commit", train + 2 * half),
    ):
        yield Choice(table="deadlines", key=key, value=round(seconds), reason=reason)
