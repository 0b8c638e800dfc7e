"""What an exchange costs in loss, by runs that are like it, and the settings that presets choose from. Pure.

How much higher than data parallelism over links without limits a run ends, as a part of that loss:

    above = (SELDOM · (1 - 1 / nodes) · (interval + LATE · late steps) ** 0.65 + the codecs') / steps

The steps are the inner steps of a node in the whole run; the interval is those between two exchanges of the
same parameters, which is fragments times the steps of a round. What is late is apart for longer, and an inner
step of that costs as several of the interval. Four times the steps cost a quarter: so it was from 1,600 to
6,400 steps with AdamW. Muon's 4,800 and 9,600 steps lost 1.4 to 2.4 times what that makes of its 1,200, at
every interval, so that the same is chosen (benchmarks.race --times). All figures are of models of 0.1 million
parameters, and none of a large one (benchmarks.convergence, "frontier" and "long";
benchmarks.learning.intervals, whose --fit finds SELDOM and LATE).

Fragments send as much for an inner step, headers apart. They bring results sooner, and cost round trips.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from coordinator.presets.cost import Setting, Situation, audit_bytes, bytes_per_round
from protocol.run.run_spec import OuterSection

Given = Mapping[tuple[str, str], object]
"""What the run file says already, by table and key."""

SELDOM, POWER = {"adamw": 8.0, "muon": 4.5}, 0.65
"""By the inner optimizer; others are taken for AdamW.

By that four nodes that exchanged int4 every 32 steps ended 3.3 % above in 1,600 steps, and 0.7 % in 6,400;
every 80 steps that was 6.4 and 1.2 %. Two nodes lost two thirds as much."""

LATE = {"adamw": 4.0, "muon": 2.5}
"""Of AdamW, every 4 steps and 2 to 3 late costs as much as every 12 to 20 and in time (--fit)."""

MOST_STEPS, MOST_STEPS_OF_CODECS = 12_000, 100_000
"""Longer runs cost as one of the first by what is seldom and late, as one of the second by codecs.

9,600 steps are the longest that were measured, and published runs lose more by long intervals."""

STEPS_OF_GIVEN = 1200
"""Inner steps that weights which are given count as. Nodes that went on with ones of so many lost as much in
the next 300 as that place of a longer run costs, or less (benchmarks.learning.given_weights)."""

SLOPE = 0.1
"""What time costs that is not spent in inner steps: so much of the loss a run loses that has an e-th of it.

0.12 to 0.19 between 600 and 1,200 steps, 0.07 between 1,200 and 4,800, 0.04 between 4,800 and 9,600."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecLoss:
    """What one direction's codec costs: at all intervals, and besides for each step of the interval.

    Rounding is noise. What sparse codecs leave out is late.
    """

    noise: float = 0.0
    delay: float = 0.0


CODEC_LOSSES: Mapping[str, CodecLoss] = {
    "fp32": CodecLoss(),
    "bf16": CodecLoss(),
    "int8": CodecLoss(),
    "int4": CodecLoss(noise=2),
    "ec3": CodecLoss(noise=3),
    "ec2": CodecLoss(noise=5),
    "int2": CodecLoss(noise=5),
    "ec1": CodecLoss(noise=12),
    "sign": CodecLoss(noise=16),
    "topk256": CodecLoss(delay=3.3),
    "topk64": CodecLoss(delay=3.9),
}
"""Of int4, ec2 and top-k by those runs; of the others assumed, by what they round away beside these."""

PAIRS = (("int4", "int4"), ("ec2", "int4"), ("ec2", "ec2"))
"""Contributions and results."""

SPARSE_PAIRS = (("topk64", "topk256"), ("topk64", "topk64"))
"""For links over which no other keeps nodes computing; the second where the first does not either.

Of long runs too little was measured to take them for their bytes alone."""

SPARSE = {"topk256": 256, "topk64": 64}
"""How many of 4096 values each sends."""

LEAST_FOR_SPARSE = 100
"""What waits in the residual wants many exchanges to be sent."""

LEAST_SPARSE_INTERVAL = 20
"""Exchanged every two steps, topk256 cost 4 to 5 % in 600 exchanges."""

INTERVALS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 120, 160, 240, 320, 480)

LEAST_EXCHANGES = 16
"""As often as parameters were exchanged in the shortest run that figures come from."""

MEASURED_INTERVAL, LEAST_FOR_FAR = 160, 100
"""Intervals beyond those that were measured here are for long runs: DiLoCo (Douillard et al. 2023) was
published with 500 steps, and well over a hundred exchanges."""

MOST_FRAGMENTS = 8

AUDIT_SHARES = (OuterSection().audit, 0.02, 0.01)
"""How many of the slices are audited: as usual, or fewer where sparse bodies are much smaller than the error
that an auditor is given with them."""

MOST_FOR_AUDITS = 0.1
"""Of a round's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Above:
    """How much higher than data parallelism's a run's loss ends, in parts of it, and by what."""

    seldom: float
    codecs: float
    late: float

    @property
    def whole(self) -> float:
        """Of all."""
        return self.seldom + self.codecs + self.late


def above(
    setting: Setting, *, num_nodes: int, total_steps: int, late_steps: int, inner_optimizer: str
) -> Above:
    """See the formula above; what is lost by the interval alone is seldom, and the rest of that late."""
    interval = setting.interval
    optimizer = inner_optimizer if inner_optimizer in LATE else "adamw"
    apart = interval + LATE[optimizer] * late_steps
    scale = SELDOM[optimizer] * (1 - 1 / num_nodes)
    steps = min(total_steps, MOST_STEPS)
    losses = [CODEC_LOSSES[codec] for codec in (setting.uplink, setting.downlink)]
    return Above(
        seldom=scale * interval**POWER / steps,
        codecs=sum(each.noise + each.delay * interval for each in losses)
        / min(total_steps, MOST_STEPS_OF_CODECS),
        late=scale * (apart**POWER - interval**POWER) / steps,
    )


def above_in(situation: Situation, setting: Setting, *, late_steps: int) -> Above:
    """Of a situation's run; weights that are given have steps behind them."""
    before = STEPS_OF_GIVEN if situation.has_weights else 0
    return above(
        setting,
        num_nodes=situation.num_nodes,
        total_steps=situation.total_steps + before,
        late_steps=late_steps,
        inner_optimizer=situation.inner_optimizer,
    )


def exchanges_of(situation: Situation, given: Given, setting: Setting) -> int:
    """How often a run exchanges each parameter."""
    rounds = given.get(("run", "rounds"), situation.total_steps // setting.steps)
    assert isinstance(rounds, int)
    return rounds // setting.fragments


def settings_of(situation: Situation, given: Given) -> list[Setting]:
    """All that may be chosen, with what is given held fast; at least one."""
    found = [
        _audited(
            Setting(
                uplink=up,
                downlink=down,
                fragments=fragments,
                has_overlap=has_overlap,
                steps=steps,
            ),
            situation,
            given,
        )
        for fragments, steps in _cuts(situation, given)
        for has_overlap in _overlaps(given, fragments)
        for up, down in _pairs(given)
        if _suits(situation, given, (up, down), fragments * steps)
    ]
    return list(dict.fromkeys(found))


def _overlaps(given: Given, fragments: int) -> tuple[bool, ...]:
    told = given.get(("exchange", "overlap"))
    if told is not None:
        return (told != "none",)
    # Who waits has the results at once, however large the fragment.
    return (False, True) if fragments == 1 or ("exchange", "fragments") in given else (True,)


def _pairs(given: Given) -> Iterator[tuple[str, str]]:
    has_feedback = given.get(("exchange", "error_feedback")) is not False
    # Below 4 bits codecs need it.
    for up, down in (*PAIRS, *SPARSE_PAIRS) if has_feedback else PAIRS[:1]:
        yield (
            str(given.get(("exchange", "uplink"), up)),
            str(given.get(("exchange", "downlink"), down)),
        )


def _suits(situation: Situation, given: Given, pair: tuple[str, str], interval: int) -> bool:
    """Whether the pair was measured at such an interval and run, or is all that is left by what is given."""
    told = {("exchange", "uplink"), ("exchange", "downlink")} & given.keys()
    if told or pair not in SPARSE_PAIRS:
        return True
    often = situation.total_steps // interval >= LEAST_FOR_SPARSE
    return often and interval >= LEAST_SPARSE_INTERVAL


def most_fragments(num_layers: int) -> int:
    """That are chosen for a model of so many layers."""
    return min(MOST_FRAGMENTS, max(1, num_layers))


def _cuts(situation: Situation, given: Given) -> list[tuple[int, int]]:
    """Fragments and inner steps of a round."""
    steps, fragments = _fixed_steps(situation, given), _number(given, ("exchange", "fragments"))
    most = most_fragments(situation.num_layers)
    counts = [fragments] if fragments else list(range(1, most + 1))
    if steps:
        # What is given stays; fragments beyond the whole model only where the run is long enough for them.
        return [
            (count, steps)
            for count in counts
            if count == counts[0] or situation.total_steps >= LEAST_EXCHANGES * count * steps
        ]
    cuts = [
        (count, max(1, round(interval / count)) if fragments else interval // count)
        for interval in INTERVALS
        for count in counts
        if fragments or interval % count == 0
    ]
    shortest = (counts[0], 1)
    return [cut for cut in cuts if _is_often(situation, *cut)] or [shortest]


def _is_often(situation: Situation, fragments: int, steps: int) -> bool:
    interval = fragments * steps
    least = LEAST_FOR_FAR if interval > MEASURED_INTERVAL else LEAST_EXCHANGES
    return situation.total_steps >= least * interval


def results_hold_all(setting: Setting, num_nodes: int) -> bool:
    """Whether sparse results have room for every value that sparse contributions bring."""
    up, down = SPARSE.get(setting.uplink), SPARSE.get(setting.downlink)
    return up is not None and down is not None and num_nodes * up <= down


def keeps_error(setting: Setting, num_nodes: int) -> bool:
    """Whether reducers keep what encoding results rounds away, where nobody says."""
    return setting.downlink != "topk256" or results_hold_all(setting, num_nodes)


def _audited(setting: Setting, situation: Situation, given: Given) -> Setting:
    """The setting with what is given, or the largest of AUDIT_SHARES to add a tenth of its bytes at most."""
    rule = given.get(("exchange", "reducer_error"))
    keeps = keeps_error(setting, situation.num_nodes) if rule is None else rule == "keep"
    setting = replace(setting, keeps_error=keeps)
    if (told := given.get(("outer", "audit"))) is not None:
        assert isinstance(told, int | float)
        return replace(setting, audit=float(told))
    most_bytes = MOST_FOR_AUDITS * bytes_per_round(situation, setting)
    shares = [replace(setting, audit=share) for share in AUDIT_SHARES]
    fitting = (each for each in shares if audit_bytes(situation, each) <= most_bytes)
    return next(fitting, shares[-1])


def _fixed_steps(situation: Situation, given: Given) -> int | None:
    """The inner steps of a round where they are given, or follow from the rounds that are."""
    rounds = _number(given, ("run", "rounds"))
    if rounds is not None:
        return _number(given, ("inner", "steps")) or max(1, situation.total_steps // rounds)
    return _number(given, ("inner", "steps"))


def _number(given: Given, place: tuple[str, str]) -> int | None:
    value = given.get(place)
    assert value is None or isinstance(value, int)
    return value
