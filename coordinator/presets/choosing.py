"""Which exchange a run takes, by its model, its links and its nodes' speed. Pure.

A ladder of settings, those that cost the least loss first; the first that keeps nodes computing for
GOAL of the time is taken, so nothing is compressed more than it must be. Each step of the ladder sends
fewer bytes for an inner step than the one before, or as many and hides them. When no step reaches the
goal, the one that computes most of the time is taken, and told. Why in this order: docs/decisions.md.

With bytes that never rise along the ladder, a slower link never leads to more bytes for an inner step:
a step that fails at one rate fails at every lower one. Where all fail, 1 / utilisation rises with 1 / rate,
the faster the more bytes a step sends; only bends in the shares of links (link_shares.py) may turn two
steps around that compute as long, to a hundredth.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from coordinator.presets.cost import (
    GOAL,
    MEASURED_HOST,
    HostSpeeds,
    Prediction,
    Setting,
    Situation,
    bytes_per_round,
    predicted,
)
from coordinator.presets.link_shares import share_in_words

Value = str | int | float
Told = tuple[str, str, Value, str]
"""Table, key, value and reason."""

Given = Mapping[tuple[str, str], object]
"""What the run file says already, by table and key."""

USUAL_STEPS = 30
LONGER = (2, 4)
"""How often the usual inner steps a round may take at most, in this order. Five times lies within what was
measured too (LONG_ROUNDS), but saves only a fifth more, and then fragments come round too seldom for what
comes after it."""

LONG_ROUNDS = "ec2 every 160 steps, in 40 exchanges, ended 1.9 % above data parallelism"
"""benchmarks.convergence, "long"; so did no codec that sends as little more often."""

LEAST_SYNCHRONISATIONS = 16
"""As often as each fragment was exchanged in the shortest run that figures come from."""

LAYERS_OF_A_FRAGMENT = 3
"""Streaming DiLoCo (Douillard et al. 2025), section 3: about three are best."""

MOST_FRAGMENTS = 8

SOME_SYNCHRONISATIONS, MANY_SYNCHRONISATIONS = 32, 1000
"""From so many on an outer momentum of 0.6, and the published 0.9. In 16 exchanges 0.3 was best here; in
50, 0.5 to 0.8 ended alike (benchmarks.convergence, "outer" and "tuning")."""

SPARSE = {"topk256": 256, "topk64": 64}
"""How many of 4096 values each sends."""

SPARSE_UP, SPARSE_DOWN = "topk64", "topk256"
"""Exchanged after the usual steps, they send fewer bytes than ec2 in rounds four times as long. One bit and
topk256 both ways are not on the ladder: at as many bytes these, more often, lost less than either
(benchmarks.convergence, "long")."""

LEAST_FOR_SPARSE = 100
"""Sparse codecs cost 0.3 to 0.6 nats per byte in 16 exchanges: what waits in the residual wants many more to
be sent. topk64 up with topk256 down still cost 12.1 % in 80 and 3.4 % in 256."""


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
    verdict: str

    @property
    def meets_goal(self) -> bool:
        """Whether nodes compute as much of the time as they should."""
        return self.prediction.utilisation >= GOAL


def ladder(situation: Situation, given: Given) -> Iterator[Setting]:
    """Settings from the least loss to the fewest bytes, with what is given held fast."""
    steps = _number(given, ("inner", "steps"), USUAL_STEPS)
    overlap = given.get(("exchange", "overlap"))

    def fitted(setting: Setting) -> Setting:
        return replace(
            setting,
            uplink=str(given.get(("exchange", "uplink"), setting.uplink)),
            downlink=str(given.get(("exchange", "downlink"), setting.downlink)),
            fragments=_number(given, ("exchange", "fragments"), setting.fragments),
            has_overlap=setting.has_overlap if overlap is None else overlap != "none",
        )

    plain = Setting(uplink="int4", downlink="int4", fragments=1, has_overlap=False, steps=steps)
    yield fitted(plain)
    most = plain
    for fragments in _fragment_counts(situation, steps):
        most = replace(plain, fragments=fragments, has_overlap=True)
        yield fitted(most)
    if given.get(("exchange", "error_feedback")) is False:
        return  # below 4 bits codecs need it
    for downlink in ("int4", "ec2"):
        most = replace(most, uplink="ec2", downlink=downlink)
        yield fitted(most)

    multiples = (1,) if ("inner", "steps") in given else (1, *LONGER)
    lengths = [replace(most, steps=times * steps) for times in multiples]
    often = [situation.total_steps // (s.steps * fitted(s).fragments) for s in lengths]
    for longer, exchanges in zip(lengths[1:], often[1:], strict=True):
        if exchanges >= LEAST_SYNCHRONISATIONS:
            most = longer
            yield fitted(most)
    sparse = [
        replace(setting, uplink=SPARSE_UP, downlink=SPARSE_DOWN)
        for setting, exchanges in zip(lengths, often, strict=True)
        if exchanges >= LEAST_FOR_SPARSE
    ]
    if sparse:
        sparse.append(replace(sparse[-1], downlink=SPARSE_UP))
    most_bytes = _bytes_of_step(situation, fitted(most))
    for setting in map(fitted, sparse):  # not where a codec is given, or headers are most of it
        if _bytes_of_step(situation, setting) <= most_bytes:
            yield setting


def _bytes_of_step(situation: Situation, setting: Setting) -> float:
    """What a node sends for one inner step."""
    return bytes_per_round(situation, setting) / setting.steps


def _fragment_counts(situation: Situation, steps: int) -> Iterator[int]:
    """1, 2, 4, … as long as fragments have layers enough and come round often enough."""
    most = min(MOST_FRAGMENTS, max(1, situation.num_layers // LAYERS_OF_A_FRAGMENT))
    count = 1
    while count <= most:
        if count == 1 or count * steps * LEAST_SYNCHRONISATIONS <= situation.total_steps:
            yield count
        count *= 2


def chosen(
    situation: Situation, given: Given | None = None, host: HostSpeeds = MEASURED_HOST
) -> Plan:
    """The first step of the ladder that meets the goal, or else the one that comes nearest."""
    given = given or {}
    settings = list(ladder(situation, given))
    outcomes = [predicted(situation, setting, host) for setting in settings]
    # max takes the first of equals: the one that costs less loss.
    nearest = max(range(len(settings)), key=lambda place: outcomes[place].utilisation)
    place = next((p for p, o in enumerate(outcomes) if o.utilisation >= GOAL), nearest)
    setting, prediction = settings[place], outcomes[place]
    return Plan(
        situation=situation,
        setting=setting,
        prediction=prediction,
        choices=tuple(
            _choices(situation, setting, given, plain=outcomes[0], prediction=prediction)
        ),
        verdict=_verdict(prediction, has_sparse=settings[-1].uplink in SPARSE),
    )


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
        advice += (
            f", or sparse codecs, for which each fragment must come round {LEAST_FOR_SPARSE} times"
        )
    return (
        f"no setting keeps nodes computing for {100 * GOAL:.0f} % of the time: the best is {share}, "
        f"{prediction.exchange_seconds:.3g} s of exchange for {prediction.training_seconds:.3g} s of "
        f"inner steps; {advice}"
    )


def _choices(
    situation: Situation,
    setting: Setting,
    given: Given,
    *,
    plain: Prediction,
    prediction: Prediction,
) -> Iterator[Choice]:
    """Every key with its reason, in the order of the run file."""
    rounds = -(-situation.total_steps // setting.steps)
    values: list[Told] = [
        ("run", "rounds", rounds, f"{situation.total_steps} inner steps in all"),
        ("inner", "steps", setting.steps, _why_steps(setting)),
        *_outer(situation, setting, given),
        ("exchange", "uplink", setting.uplink, _why_uplink(setting, situation, prediction)),
        ("exchange", "downlink", setting.downlink, _why_downlink(setting, situation)),
        *_owed(setting, situation, given),
        ("exchange", "fragments", setting.fragments, _why_fragments(setting)),
        *_overlap(setting, given, plain),
    ]
    for table, key, value, reason in values:
        told = given.get((table, key))
        if told is not None:
            assert isinstance(told, (str, int, float))
            yield Choice(table=table, key=key, value=told, reason=GIVEN)
        else:
            yield Choice(table=table, key=key, value=value, reason=reason)
    yield from _deadlines(prediction, given)


def _results_hold_all(setting: Setting, num_nodes: int) -> bool:
    """Whether sparse results have room for every value that sparse contributions bring."""
    up, down = SPARSE.get(setting.uplink), SPARSE.get(setting.downlink)
    return up is not None and down is not None and num_nodes * up <= down


def _outer(situation: Situation, setting: Setting, given: Given) -> list[Told]:
    """The outer optimizer that fits: to sparse codecs, and to how often a fragment comes round."""
    if _results_hold_all(setting, situation.num_nodes):
        why = "best measured for top-k whose results hold all that nodes send"
        lost = f"{why}: none, or 0.6, ended 0.02 to 0.03 nats per byte higher"
        return [
            ("outer", "optimizer", "nesterov", why),
            ("outer", "learning_rate", 1.0, why),
            ("outer", "momentum", 0.3, lost),
        ]
    if setting.uplink in SPARSE:
        why = "top-k with error feedback wants no momentum"
        if setting.downlink in SPARSE:
            why += " where results do not hold all that nodes send"
        return [
            ("outer", "optimizer", "sgd", why),
            ("outer", "learning_rate", 1.0, why),
            ("outer", "momentum", 0.0, why),
        ]
    nodes = situation.num_nodes
    rounds = _number(given, ("run", "rounds"), situation.total_steps // setting.steps)
    often = rounds // setting.fragments
    if often >= MANY_SYNCHRONISATIONS:
        rate = 0.6 if nodes < 8 else 0.8
        why_rate = f"usual for {nodes} nodes with momentum 0.9"
        momentum, why = 0.9, f"each fragment is exchanged {often} times"
    elif often >= SOME_SYNCHRONISATIONS:
        rate, why_rate = 0.7, "1.0 overshot in short runs"
        momentum, why = 0.6, f"{often} exchanges of each fragment: 0.9 wants a thousand"
    else:
        rate, why_rate = 0.7, "1.0 overshot in short runs"
        momentum, why = 0.3, f"{often} exchanges of each fragment: more would overshoot"
    return [
        ("outer", "optimizer", "nesterov", "for dense codecs"),
        ("outer", "learning_rate", rate, why_rate),
        ("outer", "momentum", momentum, why),
    ]


def _owed(setting: Setting, situation: Situation, given: Given) -> list[Told]:
    """What becomes of what encoding rounds away."""
    if setting.uplink in SPARSE and given.get(("exchange", "error_feedback")) is not False:
        decay, why_decay = 0.95, "what waits for many rounds is of weights that are gone"
    else:
        decay, why_decay = 1.0, "nothing is forgotten"
    if _results_hold_all(setting, situation.num_nodes):
        rule, why_rule = "keep", "results hold all that nodes send, so next to nothing is owed"
    elif setting.downlink == "topk256":
        rule, why_rule = "drop", "keeping it was worse with topk256"
    else:
        rule, why_rule = "keep", "costs no bytes and loses nothing"
    return [
        ("exchange", "residual_decay", decay, why_decay),
        ("exchange", "reducer_error", rule, why_rule),
    ]


def _why_steps(setting: Setting) -> str:
    if setting.steps <= USUAL_STEPS:
        return "usual; longer costs loss"
    return (
        f"{setting.steps // USUAL_STEPS} times the usual: finer codecs and fragments are not enough; "
        + LONG_ROUNDS
    )


def _why_uplink(setting: Setting, situation: Situation, prediction: Prediction) -> str:
    share = share_in_words(
        situation.congestion_control,
        prediction.bytes_per_round,
        situation.round_trips_of(prediction.bytes_per_round),
    )
    return "; ".join(why for why in (_why_codec(setting.uplink), share) if why)


def _why_downlink(setting: Setting, situation: Situation) -> str:
    nodes = situation.num_nodes
    up, down = SPARSE.get(setting.uplink), SPARSE.get(setting.downlink)
    if up is None or down is None:
        return _why_codec(setting.downlink)
    if _results_hold_all(setting, nodes):
        return (
            f"{down} of 4096 values have room for {up} of each of {nodes} nodes; with topk64 up it cost "
            "12.1 % in 80 exchanges, 3.4 % in 256, and topk256 both ways 17.4 % and 3.7 % at as many bytes"
        )
    return (
        f"{down} of 4096 values, of up to {nodes * up} that {nodes} nodes send: lossy both ways, which cost "
        "0.3 to 0.6 nats per byte in 16 rounds"
    )


def _why_codec(codec: str) -> str:
    often = f"each fragment comes round {LEAST_FOR_SPARSE} times or more, which it wants"
    return {
        "int4": "4 bits lose nothing measurable",
        "ec2": "2 bits with error feedback lost nothing measurable either",
        "topk256": f"256 of 4096 values: nothing finer is enough, and {often}",
        "topk64": f"64 of 4096 values: nothing finer is enough, and {often}",
    }.get(codec, "")


def _why_fragments(setting: Setting) -> str:
    if setting.fragments == 1:
        return "the whole model in each round"
    return f"a round sends one part of {setting.fragments}; the same loss, within noise"


def _overlap(setting: Setting, given: Given, plain: Prediction) -> list[Told]:
    if not setting.has_overlap:
        return [("exchange", "overlap", "none", "waiting costs less than 5 % of the time")]
    waited = f"waiting would leave {100 * plain.utilisation:.0f} % for inner steps"
    told = given.get(("exchange", "overlap"), "blend")
    chosen_overlap: list[Told] = [("exchange", "overlap", "blend", waited)]
    if told == "blend":
        chosen_overlap.append(("exchange", "blend", 0.5, "as published; level with waiting"))
    return chosen_overlap


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


def _number(given: Given, place: tuple[str, str], otherwise: int) -> int:
    value = given.get(place, otherwise)
    assert isinstance(value, int)
    return value
