"""The settings that presets choose from, those that cost the least loss first. Pure.

What an exchange costs in loss goes by its bits, and by its interval: the inner steps between two exchanges
of the same parameters, which are fragments times steps. So each rung of the ladder is a pair of codecs, an
interval, and whether nodes wait; bits fall before intervals grow beyond the usual one, to which short runs
come from shorter ones. Within a rung settings differ only in the fragments that the interval is cut into,
and send the same for an inner step, headers apart: fragments save no bytes, they bring results sooner. Why
in this order: docs/decisions.md.

With bytes that never rise along the ladder, a slower link never leads to more bytes for an inner step:
a rung that fails at one rate fails at every lower one. Where all fail, 1 / utilisation rises with 1 / rate,
the faster the more bytes a rung sends; only slow start (link_shares.py) may turn two rungs around that
compute as long, to a hundredth.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from coordinator.presets.cost import Setting, Situation, audit_bytes, bytes_per_round
from protocol.run.run_spec import OuterSection

Given = Mapping[tuple[str, str], object]
"""What the run file says already, by table and key."""

Rung = tuple[Setting, ...]
"""Settings of equal codecs and interval, in ever more fragments; at least one."""

Cut = tuple[int, int]
"""An interval as fragments and the inner steps of a round."""

USUAL_INTERVAL = 30

SHORT_INTERVALS = (2, 3, 5, 6, 10, 15)
"""For short runs, before the usual one: divisors of it, so that they can be cut into fragments as well."""

ENOUGH_EXCHANGES = 256
"""From so many of each parameter on the usual interval is short enough. int4 every 32 steps ended 3.3 % above
data parallelism in 50 exchanges, and 0.7 % in 200 (benchmarks.convergence, "frontier" and "long")."""

LEAST_EXCHANGES = 16
"""As often as parameters were exchanged in the shortest run that figures come from."""

LEAST_FOR_FAR = 100
"""Intervals beyond those that were measured here, 160 steps at most, are for long runs: DiLoCo (Douillard
et al. 2023) was published with 500 steps, and well over a hundred exchanges."""

LONGER = {2: LEAST_EXCHANGES, 4: LEAST_EXCHANGES, 8: LEAST_FOR_FAR, 16: LEAST_FOR_FAR}
"""How often the usual interval an interval may be, in this order, and from how many exchanges on."""

LAYERS_OF_A_FRAGMENT = 3
"""Streaming DiLoCo (Douillard et al. 2025), section 3: about three are best."""

MOST_FRAGMENTS = 8

SPARSE = {"topk256": 256, "topk64": 64}
"""How many of 4096 values each sends."""

SPARSE_UP, SPARSE_DOWN = "topk64", "topk256"
"""Exchanged at the usual interval, they send fewer bytes than ec2 at one four times as long. One bit and
topk256 both ways are not on the ladder: at as many bytes these, more often, lost less than either
(benchmarks.convergence, "long")."""

LEAST_FOR_SPARSE = 100
"""Sparse codecs cost 0.3 to 0.6 nats per byte in 16 exchanges: what waits in the residual wants many more to
be sent. topk64 up with topk256 down still cost 12.1 % in 80 and 2.6 % in 304."""

AUDIT_SHARES = (OuterSection().audit, 0.02, 0.01)
"""How many of the slices are audited: as usual, or fewer where sparse bodies are much smaller than the error
that an auditor is given with them."""

MOST_FOR_AUDITS = 0.1
"""Of a round's bytes."""


def ladder(situation: Situation, given: Given) -> Iterator[Rung]:
    """Rungs from the least loss to the fewest bytes, with what is given held fast."""
    overlap = given.get(("exchange", "overlap"))
    usual, *longer = _intervals(situation, given)
    shorter = _shorter(situation, given, usual)

    def rung(cuts: tuple[Cut, ...], uplink: str, downlink: str, *, waits: bool = False) -> Rung:
        has_overlap = not waits if overlap is None else overlap != "none"
        settings = (
            _audited(
                Setting(
                    uplink=str(given.get(("exchange", "uplink"), uplink)),
                    downlink=str(given.get(("exchange", "downlink"), downlink)),
                    fragments=fragments,
                    has_overlap=has_overlap,
                    steps=steps,
                ),
                situation,
                given,
            )
            for fragments, steps in cuts
        )
        # Who waits has the results at once, however large the fragment.
        return tuple(settings) if has_overlap else (next(settings),)

    pairs = [("int4", "int4"), ("ec2", "int4"), ("ec2", "ec2")]
    has_feedback = given.get(("exchange", "error_feedback")) is not False
    if not has_feedback:
        pairs = pairs[:1]  # below 4 bits codecs need it
    for cuts in (*shorter, usual):
        yield rung(cuts, *pairs[0], waits=True)
        yield rung(cuts, *pairs[0])
    for pair in pairs[1:]:
        yield rung(usual, *pair)
    for cuts in longer:
        yield rung(cuts, *pairs[-1])
    if not has_feedback:
        return
    often = [
        cuts
        for cuts in (usual, *longer)
        if exchanges_of(situation, given, cuts[0]) >= LEAST_FOR_SPARSE
    ]
    sparse = [rung(cuts, SPARSE_UP, SPARSE_DOWN) for cuts in often]
    if often:
        sparse.append(rung(often[-1], SPARSE_UP, SPARSE_UP))
    most_bytes = _bytes_of_step(situation, rung([usual, *longer][-1], *pairs[-1]))
    for each in sparse:  # not where a codec is given, or headers are most of it
        if _bytes_of_step(situation, each) <= most_bytes:
            yield each


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


def exchanges_of(situation: Situation, given: Given, cut: Cut) -> int:
    """How often a run exchanges each parameter."""
    fragments, steps = cut
    rounds = given.get(("run", "rounds"), situation.total_steps // steps)
    assert isinstance(rounds, int)
    return rounds // fragments


def _bytes_of_step(situation: Situation, rung: Rung) -> float:
    """What a node sends for one inner step."""
    num_bytes = bytes_per_round(situation, rung[0]) + audit_bytes(situation, rung[0])
    return num_bytes / rung[0].steps


def _intervals(situation: Situation, given: Given) -> list[tuple[Cut, ...]]:
    """The usual interval and longer ones that come round often enough, each with the ways to cut it."""
    steps, fragments = _fixed_steps(situation, given), _number(given, ("exchange", "fragments"))
    if steps and fragments:
        return [((fragments, steps),)]
    # In a short run parameters are exchanged as often as they must be, if they can be.
    usual = steps or max(1, min(USUAL_INTERVAL, situation.total_steps // LEAST_EXCHANGES))
    found = [_cuts(situation, max(usual, fragments or 1), steps, fragments)]
    for times, least_exchanges in LONGER.items():
        cuts = _cuts(situation, times * usual, steps, fragments)
        if cuts and exchanges_of(situation, given, cuts[0]) >= least_exchanges:
            found.append(cuts)
    return found


def _shorter(situation: Situation, given: Given, usual: tuple[Cut, ...]) -> list[tuple[Cut, ...]]:
    """Intervals below the usual one, from that on which makes exchanges enough, or the shortest.

    None where steps are fixed: then no interval is shorter than that.
    """
    if _fixed_steps(situation, given):
        return []
    fragments = _number(given, ("exchange", "fragments"))
    often = [
        interval
        for interval in (*SHORT_INTERVALS, USUAL_INTERVAL)
        if situation.total_steps // interval >= ENOUGH_EXCHANGES
    ]
    least = max(often, default=min(SHORT_INTERVALS))
    found = [
        _cuts(situation, interval, None, fragments)
        for interval in SHORT_INTERVALS
        if max(least, fragments or 1) <= interval < usual[0][0] * usual[0][1]
    ]
    # Fragments that are given may make two of them, or the last and the usual one, the same.
    return [cuts for cuts in dict.fromkeys(found) if cuts[0] != usual[0]]


def _fixed_steps(situation: Situation, given: Given) -> int | None:
    """The inner steps of a round where they are given, or follow from the rounds that are."""
    rounds = _number(given, ("run", "rounds"))
    if rounds is not None:
        return _number(given, ("inner", "steps")) or max(1, situation.total_steps // rounds)
    return _number(given, ("inner", "steps"))


def _cuts(
    situation: Situation, interval: int, steps: int | None, fragments: int | None
) -> tuple[Cut, ...]:
    """The interval as whole rounds of fragments, the fewest first; none where it takes too many."""
    if fragments:
        most_steps = situation.total_steps // LEAST_EXCHANGES // fragments
        return ((fragments, max(1, min(round(interval / fragments), most_steps))),)
    most = min(MOST_FRAGMENTS, max(1, situation.num_layers // LAYERS_OF_A_FRAGMENT))
    if steps:
        count = interval // steps
        return ((count, steps),) if count <= most else ()
    return tuple(
        (count, interval // count) for count in range(1, most + 1) if interval % count == 0
    )


def _number(given: Given, place: tuple[str, str]) -> int | None:
    value = given.get(place)
    assert value is None or isinstance(value, int)
    return value
