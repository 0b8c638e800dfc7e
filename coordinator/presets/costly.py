"""What settings of a run file cost in loss, before the run begins, with what to write instead. Pure.

Presets choose by the same rules, so nothing is said of what they chose. Only what cost more than seeds differ
is said, and of runs that are like the measured ones: with new weights, dense codecs, and two nodes or more.
"""

from collections.abc import Iterator

from coordinator.presets.choosing import (
    BLENDS,
    FEW_NODES,
    OFTEN_STEPS,
    OFTEN_STEPS_OF_MORE,
    OFTEN_STEPS_OF_SGD,
    SOME_EXCHANGES,
)
from coordinator.presets.loss import LEAST_EXCHANGES, SPARSE
from coordinator.presets.reasons import BY_SGD, OFTEN_BY_MORE, SELDOM_BY_TWO, counted, every
from protocol.run.run_spec import RunSpec

SHORT_STEPS, LEAST_IN_SHORT, ENOUGH_IN_SHORT = 300, 4, 8
"""By AdamW with 0.3: in 120 inner steps 8 exchanges ended as low as 24, and 2 ended 5 % higher; in 360, 12
ended 5 and 7 % higher than 24 (benchmarks.learning.intervals)."""

SOME_MOMENTUM, MUCH_MOMENTUM = 0.3, 0.8
"""Above the first it costs where exchanges are few or frequent; from the second on it does so by far.

In 120 inner steps AdamW ended alike with 0.3 and 0.6 in 12 exchanges, every 10. Muon ended 1 % lower with 0.6
in 8, every 15."""

LEAST_OF_SGD = 12
"""From so many exchanges on loops by SGD were measured (benchmarks.learning.other_models)."""

IF_BY_SGD = 'if they do by SGD, write [inner] optimizer = "sgd" instead'
NESTEROV = 'write optimizer = "nesterov", learning_rate = 0.7 and momentum = 0.6'

SELDOM_STEPS = 30
"""From so many inner steps on the plain mean costs two nodes more than seeds differ, by AdamW."""


def costs_in_words(run: RunSpec, *, num_nodes: int | None = None) -> Iterator[str]:
    """A sentence for each setting that costs loss; nothing where none does.

    `num_nodes` take part; where nobody knows that yet, [run] min_nodes do at least.
    """
    num_nodes = num_nodes or run.run.min_nodes
    if num_nodes < 2:
        return
    steps, rounds = run.steps_among(num_nodes), run.run.rounds
    fragments = run.exchange.fragments
    exchanges, total_steps = rounds // fragments, rounds * steps
    is_short = total_steps < SHORT_STEPS
    if exchanges < (LEAST_IN_SHORT if is_short else LEAST_EXCHANGES):
        enough = ENOUGH_IN_SHORT if is_short else LEAST_EXCHANGES
        times = "once" if exchanges == 1 else counted(exchanges, "time")
        yield (
            f"each parameter is exchanged {times} in the whole run, and runs of small models ended 4 % "
            f"lower or more with {enough} exchanges: write {_oftener(run, steps, enough)}"
        )
        if rounds >= enough:
            fragments = max(1, rounds // enough)
        else:
            fragments, steps = 1, max(1, total_steps // enough)
        exchanges = total_steps // (fragments * steps)
    if run.goes_on_with_weights or run.exchange.uplink in SPARSE:
        return
    interval = fragments * steps
    if run.inner.optimizer == "sgd":
        is_often = interval <= OFTEN_STEPS_OF_SGD
        if _momentum_of(run) <= SOME_MOMENTUM and exchanges >= LEAST_OF_SGD and not is_often:
            yield f"[outer] {BY_SGD}, or by a momentum of {SOME_MOMENTUM:g}: {NESTEROV}"
    elif _momentum_of(run) > SOME_MOMENTUM:
        yield from _of_momentum(run, interval=interval, exchanges=exchanges)
    elif _momentum_of(run) == 0 and exchanges >= SOME_EXCHANGES:
        yield from _of_plain_mean(run, interval=interval, num_nodes=num_nodes)


def _oftener(run: RunSpec, now: int, enough: int) -> str:
    """What makes as many exchanges of as many inner steps: fewer fragments, or rounds of fewer than `now`."""
    if run.run.rounds >= enough:
        return f"[exchange] fragments = {max(1, run.run.rounds // enough)}"
    total_steps = run.run.rounds * now
    steps = max(1, total_steps // enough)
    rounds = f"[run] rounds = {-(-total_steps // steps)}"
    fewer = "" if run.exchange.fragments == 1 else ", and [exchange] fragments = 1"
    if run.inner.round_tokens is not None:
        share = run.inner.round_tokens * steps // now
        return f"{rounds} and [inner] round_tokens = {share}{fewer}"
    return f"{rounds} and [inner] steps = {steps}{fewer}"


def _momentum_of(run: RunSpec) -> float:
    return run.outer.momentum if run.outer.optimizer == "nesterov" else 0.0


def _of_momentum(run: RunSpec, *, interval: int, exchanges: int) -> Iterator[str]:
    momentum = _momentum_of(run)
    # In a run of loops alone "adamw" may be nobody's choice: it is what a file says that was not asked.
    is_of_loops = run.data.source == "loop"
    by_adamw = f" if loops train by AdamW; {IF_BY_SGD}" if is_of_loops else ""
    if run.exchange.overlap == "blend" and run.inner.optimizer == BLENDS:
        return
    # Between this and OFTEN_STEPS it costs no more than seeds differ.
    if interval <= OFTEN_STEPS_OF_MORE:
        if exchanges >= LEAST_EXCHANGES and interval * exchanges >= SHORT_STEPS:
            yield (
                f"[outer] momentum = {momentum:g} overshoots where each parameter is exchanged "
                f"{every(interval, 'inner step')}: 0.6 ended up to 12 % higher than the plain mean; write "
                f'optimizer = "sgd" and learning_rate = 1.0 there, and leave momentum out{by_adamw}'
            )
    elif interval > OFTEN_STEPS and exchanges < SOME_EXCHANGES and run.inner.optimizer == "adamw":
        far = ", and 0.9 6 to 21 %" if momentum >= MUCH_MOMENTUM else ""
        yield (
            f"[outer] momentum = {momentum:g} overshoots where each parameter is exchanged only "
            f"{counted(exchanges, 'time')}: 0.6 ended 1 to 9 % higher than 0.3{far}; write momentum = "
            f"{SOME_MOMENTUM:g}{by_adamw}"
        )


def _of_plain_mean(run: RunSpec, *, interval: int, num_nodes: int) -> Iterator[str]:
    """Where exchanges are neither few nor frequent; of two nodes Muon's lose less by it than seeds differ."""
    if num_nodes > FEW_NODES and interval > OFTEN_STEPS_OF_MORE:
        lost = OFTEN_BY_MORE
    elif interval >= SELDOM_STEPS and run.inner.optimizer != "muon":
        lost = SELDOM_BY_TWO
    else:
        return
    yield (
        f"[outer] a plain mean learns less than Nesterov's step where each parameter is exchanged "
        f"{every(interval, 'inner step')}: {lost}; {NESTEROV}"
    )
