"""The parts of benchmarks.convergence whose runs are longer: loss against bytes, Muon, and fragments.

The first setting of a part is what the others are compared with.
"""

from dataclasses import replace
from typing import Any

from benchmarks.convergence.settings import BASE, DATA_PARALLEL, codecs, outer
from coordinator.presets.choosing import SOME_EXCHANGES
from lab.simulation.plain_calls import Setting

FRONTIER_STEPS = 1600
LONG_STEPS = 4 * FRONTIER_STEPS

FRONTIER = BASE.changed(
    "frontier",
    inner={"batch": 16, "learning_rate": 9e-3},
    outer={"learning_rate": 0.7, "momentum": 0.6},
)
"""A longer run with larger batches, nodes at the inner rate that is best for them: see `tuning_part`."""


BEST_ALONE: dict[str, dict[str, Any]] = {"inner": {"learning_rate": 1.2e-2}}
"""Data parallelism is tried with this rate, which suits its larger batch, and with half of it."""

SPARSE: dict[str, dict[str, Any]] = {
    "outer": {"optimizer": "sgd", "learning_rate": 1.0, "momentum": 0},
    "exchange": {"residual_decay": 0.95},
}
"""What top-k wants: a value comes late and all at once, which momentum would carry too far."""


LITTLE_MOMENTUM = 0.3
"""Of top-k whose results hold all that nodes send, unless a setting's name says more."""


def tuning_part() -> list[Setting]:
    """What the frontier's rates rest on: ec2 every 32 steps, and top-k, with other rates."""
    base = FRONTIER.changed(
        "tuning",
        run={"rounds": FRONTIER_STEPS // 32},
        inner={"steps": 32},
        **codecs("ec2", "ec2"),
    )
    outers = [(0.9, 0.5, "mean"), (0.7, 0.8, "mean"), (0.7, 0.6, "norm-preserving")]
    return [
        base.changed("inner rate 0.009"),
        *(
            base.changed(f"inner rate {rate}", inner={"learning_rate": rate})
            for rate in (0.003, 0.006, 0.015)
        ),
        *(
            base.changed(f"outer {rate}, {mu}, {merge}", outer=_outer_table(rate, mu, merge))
            for rate, mu, merge in outers
        ),
        *(
            _exchanged(32, "topk256", of=FRONTIER_STEPS, **SPARSE).changed(
                f"topk256, residual kept to {decay}", exchange={"residual_decay": decay}
            )
            for decay in (1.0, 0.99)
        ),
        *(
            _all_that_arrived(20, of=FRONTIER_STEPS).changed(
                f"topk64 up, topk256 down, outer {rate}, {momentum}",
                outer={"learning_rate": rate, "momentum": momentum},
            )
            for rate, momentum in ((1.0, 0.0), (1.0, 0.6), (0.7, 0.6))
        ),
    ]


def _outer_table(rate: float, momentum: float, merge: str) -> dict[str, Any]:
    table = {"learning_rate": rate, "momentum": momentum}
    return table if merge == "mean" else table | {"merge": merge}


def frontier_part() -> list[Setting]:
    """Loss against bytes: inner steps and codecs that send 60 to 4,000 times less than DDP does."""
    return [
        _exchanged(32, "fp32", of=FRONTIER_STEPS).changed(DATA_PARALLEL, **BEST_ALONE),
        _exchanged(32, "fp32", of=FRONTIER_STEPS),
        _exchanged(32, "int4", of=FRONTIER_STEPS),
        _exchanged(80, "int4", of=FRONTIER_STEPS),
        _exchanged(40, "ec2", of=FRONTIER_STEPS),
        _exchanged(80, "ec1", of=FRONTIER_STEPS),
        _exchanged(32, "topk256", of=FRONTIER_STEPS, **SPARSE),
        _all_that_arrived(20, of=FRONTIER_STEPS),
    ]


def long_part() -> list[Setting]:
    """The frontier's run with four times as many steps, so with hundreds of exchanges.

    So long a run wants a lower inner rate where exchanges are frequent, and not where they are few.
    """
    momentum = outer(momentum=0.8)
    few_bytes = [
        _exchanged(40, "ec2", of=LONG_STEPS, **momentum),
        _exchanged(65, "int4", of=LONG_STEPS, **momentum),
        _exchanged(160, "ec2", of=LONG_STEPS, **momentum),
        _all_that_arrived(25, of=LONG_STEPS),
    ]
    return [
        _exchanged(32, "fp32", of=LONG_STEPS, **momentum).changed(DATA_PARALLEL, **BEST_ALONE),
        *few_bytes,
        *(
            each.changed(f"{each.name}, at 0.006", inner={"learning_rate": 6e-3})
            for each in few_bytes
        ),
        _all_that_arrived(21, of=LONG_STEPS),
        _all_that_arrived(21, of=LONG_STEPS, momentum=0.5),
        _exchanged(32, "topk256", of=LONG_STEPS, **SPARSE),
        *(_exchanged(steps, "int4", of=LONG_STEPS, **momentum) for steps in (32, 80)),
        _exchanged(80, "ec1", of=LONG_STEPS, **momentum),
    ]


def _exchanged(steps: int, codec: str, *, of: int, **tables: dict[str, Any]) -> Setting:
    """The frontier's run with an exchange after so many inner steps of so many, one codec both ways."""
    name = f"{codec}, H = {steps}"
    every = {"run": {"rounds": of // steps}, "inner": {"steps": steps}}
    return FRONTIER.changed(name, **every, **codecs(codec, codec)).changed(name, **tables)


def _all_that_arrived(steps: int, *, of: int, momentum: float = LITTLE_MOMENTUM) -> Setting:
    """Top-k whose results have room for what four nodes sent: reducers owe nearly nothing.

    It wants a little momentum, as `tuning_part` shows, and more of it in a longer run.
    """
    name = f"topk64 up, topk256 down, H = {steps}"
    return _exchanged(steps, "topk64", of=of, **SPARSE).changed(
        name if momentum == LITTLE_MOMENTUM else f"{name}, momentum {momentum}",
        outer={"optimizer": "nesterov", "momentum": momentum},
        exchange={"downlink": "topk256"},
    )


def muon_part() -> list[Setting]:
    """The frontier's run with Muon on matrices. Data parallelism has the better of two rates of Muon's."""
    alone, swarm = _by_muon(FRONTIER_STEPS, 32, "int4", 2.4e-2), (2.4e-2, 1.2e-2)
    return [
        alone.changed(DATA_PARALLEL),
        _by_muon(FRONTIER_STEPS, 32, "int4", 1.2e-2).changed(f"{DATA_PARALLEL}, at 0.012"),
        *(_by_muon(FRONTIER_STEPS, steps, "int4", 2.4e-2) for steps in (32, 80)),
        *(_by_muon(FRONTIER_STEPS, 34, "ec2", rate) for rate in swarm),
        *(_by_muon(FRONTIER_STEPS, 145, "ec2", rate) for rate in swarm),
    ]


def long_muon_part() -> list[Setting]:
    """The same in four times as many steps, at the lower rate."""
    often, seldom = (_by_muon(LONG_STEPS, steps, "ec2", 1.2e-2) for steps in (34, 136))
    return [often.changed(DATA_PARALLEL), often, seldom]


def _by_muon(total_steps: int, steps: int, codec: str, rate: float) -> Setting:
    """One that exchanges every so many inner steps, at a rate of Muon's; few exchanges want less momentum."""
    usual = 2.4e-2 if total_steps == FRONTIER_STEPS else 1.2e-2
    name = f"{codec}, H = {steps}" + (f", at {rate}" if rate != usual else "")
    setting = FRONTIER.changed(
        name,
        run={"rounds": total_steps // steps},
        inner={"optimizer": "muon", "muon_learning_rate": rate, "steps": steps},
        **codecs(codec, codec),
    )
    is_seldom = total_steps // steps < SOME_EXCHANGES and codec == "ec2"
    return setting.changed(name, outer={"momentum": 0.3}) if is_seldom else setting


FRAGMENTS_STEPS = 960

CUT = BASE.changed("cut", model={"num_layers": 4}, inner={"learning_rate": 6e-3})
"""A run three times as long as the others', with layers enough for four fragments."""


def fragments_part() -> list[Setting]:
    """Rounds of a part of the model each, as often or with the same steps between exchanges of all of it.

    A fragment is exchanged every F · H inner steps. Late: with overlap, taken over when nine tenths of
    the next round are trained, as over links that are just fast enough.
    """
    waiting = [("int4", 1, 15), ("int4", 1, 60), ("int4", 2, 30), ("int4", 4, 15)]
    waiting += [("ec2", 1, 15), ("ec2", 1, 30), ("ec2", 2, 15)]
    late = [("int4", 1, 60, 54), ("int4", 2, 30, 27), ("int4", 4, 15, 14), ("int4", 1, 60, 14)]
    late += [("ec2", 1, 30, 27), ("ec2", 2, 15, 14), ("ec2", 1, 30, 5)]
    return [
        *(_cut(codec, fragments, steps) for codec, fragments, steps in waiting),
        *(
            replace(
                _cut(codec, fragments, steps).changed(
                    f"{codec}, F = {fragments}, H = {steps}, {late_steps} late",
                    exchange={"overlap": "blend"},
                ),
                late_steps=late_steps,
            )
            for codec, fragments, steps, late_steps in late
        ),
    ]


def _cut(codec: str, fragments: int, steps: int) -> Setting:
    """The momentum is what presets give to as many exchanges."""
    exchanges = FRAGMENTS_STEPS // (fragments * steps)
    return CUT.changed(
        f"{codec}, F = {fragments}, H = {steps}",
        run={"rounds": FRAGMENTS_STEPS // steps},
        inner={"steps": steps},
        outer={"momentum": 0.6 if exchanges >= 32 else 0.3},
        exchange={"uplink": codec, "downlink": codec, "fragments": fragments},
    )
