"""What benchmarks.convergence compares: parts, each with settings that differ in one thing.

The first setting of a part is what the others are compared with.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from benchmarks.local_swarm import Setting
from node.exchange.codecs.registry import codec_named
from protocol.run_spec import WANTS_FEEDBACK, CodecName

INNER_STEPS = 320
"""Of each node in a whole run, however they are cut into rounds."""

BASE = Setting(
    name="base",
    tables={
        "run": {"rounds": 16, "min_nodes": 4},
        "model": {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "ffn_size": 192,
            "context": 64,
        },
        "inner": {"steps": 20, "batch": 4, "learning_rate": 3e-3},
        "outer": {"learning_rate": 0.7, "momentum": 0.3},
        "exchange": {"uplink": "fp32", "downlink": "fp32"},
        "evaluation": {"samples": 512},
    },
)

DATA_PARALLEL = "data parallel"
"""Settings whose name begins so average the gradients of all nodes at every inner step."""

COARSE_BITS = 4.5
"""A codec of no more bits for a value is tried with every treatment of what it rounds away."""


DECAYED = ("int2", "topk64", "topk256")
"""Codecs that send an error long after it was made, where they are there."""


def every(steps: int) -> dict[str, dict[str, Any]]:
    """Tables for an exchange after so many inner steps, with as many in the whole run."""
    return {"run": {"rounds": INNER_STEPS // steps}, "inner": {"steps": steps}}


def nodes(count: int) -> dict[str, dict[str, Any]]:
    """Tables for so many nodes, each with as many inner steps as ever."""
    return {"run": {"min_nodes": count}}


def outer(**values: Any) -> dict[str, dict[str, Any]]:
    """Tables for the outer optimizer."""
    return {"outer": values}


def codecs(uplink: str, downlink: str, **rules: Any) -> dict[str, dict[str, Any]]:
    """Tables for both codecs, and what becomes of their errors."""
    return {"exchange": {"uplink": uplink, "downlink": downlink} | rules}


def steps_part() -> list[Setting]:
    """How long nodes train alone."""
    return [
        BASE.changed("H = 20"),
        BASE.changed(DATA_PARALLEL),
        *(BASE.changed(f"H = {steps}", **every(steps)) for steps in (5, 10, 40, 80)),
    ]


def nodes_part() -> list[Setting]:
    """How many nodes, each with as much work as ever, so that more of them train more tokens."""
    return [
        BASE.changed("4 nodes"),
        *(BASE.changed(f"{count} nodes", **nodes(count)) for count in (1, 2, 8)),
        BASE.changed(f"{DATA_PARALLEL}, 8 nodes", **nodes(8)),
    ]


def codecs_part() -> list[Setting]:
    """Every codec both ways; coarse ones with each treatment of both errors."""
    settings = [BASE.changed("fp32 / fp32")]
    for name in get_args(CodecName):
        if name == "fp32":
            continue
        if bits_of(name) > COARSE_BITS:
            settings.append(BASE.changed(f"{name} / {name}", **codecs(name, name)))
            continue
        if name not in WANTS_FEEDBACK:
            settings.append(
                BASE.changed(
                    f"{name} / {name}, no feedback",
                    **codecs(name, name, error_feedback=False, reducer_error="drop"),
                )
            )
        settings += [
            BASE.changed(f"{name} / {name}, {rule}", **codecs(name, name, reducer_error=rule))
            for rule in ("drop", "keep", "own")
        ]
        if name != "int4":
            settings.append(
                BASE.changed(f"{name} / int4", **codecs(name, "int4", reducer_error="drop"))
            )
        if name in DECAYED:
            decay = codecs(name, "int4", reducer_error="drop", residual_decay=0.95)
            settings.append(BASE.changed(f"{name} / int4, decay 0.95", **decay))
    return settings


def bits_part() -> list[Setting]:
    """Loss against bits: every codec both ways, coarse ones with what becomes of errors by default."""
    settings = []
    for name in get_args(CodecName):
        is_coarse = bits_of(name) <= COARSE_BITS
        rules = {"reducer_error": "keep"} if is_coarse else {}
        settings.append(BASE.changed(name, **codecs(name, name, **rules)))
    return settings


def inner_part() -> list[Setting]:
    """AdamW and Muon, alone and in a swarm."""
    muon = {"inner": {"optimizer": "muon", "muon_learning_rate": 2.4e-2}}
    return [
        BASE.changed("AdamW"),
        BASE.changed("Muon", **muon),
        BASE.changed(f"{DATA_PARALLEL}, AdamW"),
        BASE.changed(f"{DATA_PARALLEL}, Muon", **muon),
        BASE.changed("AdamW, H = 80", **every(80)),
        BASE.changed("Muon, H = 80", **every(80)).changed("Muon, H = 80", **muon),
    ]


def text_part() -> list[Setting]:
    """All nodes on all of the text, or each on topics of its own."""
    alone = {"own_text": True}
    return [
        BASE.changed("all text"),
        _with(BASE.changed("own text"), **alone),
        BASE.changed("all text, H = 80", **every(80)),
        _with(BASE.changed("own text, H = 80", **every(80)), **alone),
    ]


def drops_part() -> list[Setting]:
    """Contributions that come too late, and count in a later round."""
    return [
        BASE.changed("none late"),
        *(_with(BASE.changed(f"{p:.0%} late"), drop_rate=p) for p in (0.1, 0.25, 0.5)),
    ]


def outer_part() -> list[Setting]:
    """Outer optimizers, each at several rates."""
    nesterov = [(0.7, 0.9), (0.4, 0.9), (0.7, 0.6), (0.4, 0.6), (0.5, 0.3), (1.0, 0.2)]
    return [
        BASE.changed("nesterov 0.7, 0.3"),
        *(
            BASE.changed(f"nesterov {rate}, {mu}", **outer(learning_rate=rate, momentum=mu))
            for rate, mu in nesterov
        ),
        *(
            BASE.changed(f"sgd {rate}", **outer(optimizer="sgd", learning_rate=rate, momentum=0))
            for rate in (0.5, 0.7, 1.0)
        ),
    ]


def merges_part() -> list[Setting]:
    """The plain mean and the norm-preserving one; a rate that suits one may be too high for the other."""
    return [
        BASE.changed(
            f"{merge}, rate {rate}, {count} nodes",
            run={"min_nodes": count},
            outer={"learning_rate": rate, "merge": merge},
        )
        for count in (4, 8)
        for merge, rate in (("mean", 0.7), ("norm-preserving", 0.7), ("norm-preserving", 0.5))
    ]


def rates_part() -> list[Setting]:
    """Which outer rate is best for how many nodes and steps: what a rule of scaling must meet."""
    return [
        BASE.changed(
            f"rate {rate}, {count} nodes, H = {steps}",
            run={"min_nodes": count, "rounds": INNER_STEPS // steps},
            inner={"steps": steps},
            outer={"learning_rate": rate},
        )
        for count, steps in ((4, 20), (1, 20), (8, 20), (4, 80))
        for rate in (0.7, 0.35, 0.5, 1.0)
    ]


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
        _exchanged(32, "topk256", of=LONG_STEPS, **SPARSE),
        _exchanged(32, "int4", of=LONG_STEPS, **momentum),
        _exchanged(80, "int4", of=LONG_STEPS, **momentum),
        _exchanged(80, "ec1", of=LONG_STEPS, **momentum),
    ]


def _exchanged(steps: int, codec: str, *, of: int, **tables: dict[str, Any]) -> Setting:
    """The frontier's run with an exchange after so many inner steps of so many, one codec both ways."""
    name = f"{codec}, H = {steps}"
    every = {"run": {"rounds": of // steps}, "inner": {"steps": steps}}
    return FRONTIER.changed(name, **every, **codecs(codec, codec)).changed(name, **tables)


def _all_that_arrived(steps: int, *, of: int) -> Setting:
    """Top-k whose results have room for what four nodes sent: reducers owe nearly nothing.

    It wants a little momentum, as `tuning_part` shows.
    """
    return _exchanged(steps, "topk64", of=of, **SPARSE).changed(
        f"topk64 up, topk256 down, H = {steps}",
        outer={"optimizer": "nesterov", "momentum": 0.3},
        exchange={"downlink": "topk256"},
    )


def muon_part() -> list[Setting]:
    """The frontier's run with Muon on matrices: nodes and data parallelism at the rate best for both."""
    muon = {"optimizer": "muon", "muon_learning_rate": 2.4e-2}
    base = FRONTIER.changed("Muon", inner=muon, **codecs("int4", "int4"))

    def exchanged(steps: int) -> Setting:
        rounds = FRONTIER_STEPS // steps
        return base.changed(f"int4, H = {steps}", run={"rounds": rounds}, inner={"steps": steps})

    return [exchanged(32).changed(DATA_PARALLEL), exchanged(32), exchanged(80)]


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
            _with(
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


def quick_part() -> list[Setting]:
    """A few seconds through all of the code: no figure to believe."""
    tiny = BASE.changed(
        "tiny",
        run={"rounds": 2, "min_nodes": 2},
        inner={"steps": 2, "batch": 2},
        model={"hidden_size": 16, "num_layers": 1, "ffn_size": 32, "context": 16},
        evaluation={"samples": 8},
    )
    int4 = codecs("int4", "int4")
    return [
        tiny.changed("tiny"),
        tiny.changed(DATA_PARALLEL),
        tiny.changed("tiny, int4", **int4),
        _with(tiny.changed("tiny, own text, late", **int4), own_text=True, drop_rate=0.5),
    ]


PARTS: dict[str, Callable[[], list[Setting]]] = {
    "steps": steps_part,
    "nodes": nodes_part,
    "codecs": codecs_part,
    "bits": bits_part,
    "inner": inner_part,
    "text": text_part,
    "drops": drops_part,
    "outer": outer_part,
    "merges": merges_part,
    "rates": rates_part,
    "frontier": frontier_part,
    "long": long_part,
    "tuning": tuning_part,
    "muon": muon_part,
    "fragments": fragments_part,
}


def bits_of(codec: str) -> float:
    """What a value takes in a slice of normal values."""
    values = np.random.default_rng(0).standard_normal(1 << 16, dtype=np.float32)
    return 8 * len(codec_named(codec).encode(values)) / values.size


def _with(setting: Setting, **changes: Any) -> Setting:
    return replace(setting, **changes)
