"""What benchmarks.convergence compares: parts, each with settings that differ in one thing.

The first setting of a part is what the others are compared with.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np

from benchmarks.convergence.long import (
    fragments_part,
    frontier_part,
    long_muon_part,
    long_part,
    muon_part,
    tuning_part,
)
from benchmarks.convergence.settings import (
    BASE,
    DATA_PARALLEL,
    INNER_STEPS,
    codecs,
    every,
    nodes,
    outer,
)
from lab.simulation.plain_calls import Setting
from node.exchange.codecs.registry import codec_named
from protocol.run.run_spec import WANTS_FEEDBACK, CodecName

COARSE_BITS = 4.5
"""A codec of no more bits for a value is tried with every treatment of what it rounds away."""


DECAYED = ("int2", "topk64", "topk256")
"""Codecs that send an error long after it was made, where they are there."""


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
    return [
        BASE.changed("all text"),
        replace(BASE.changed("own text"), own_text=True),
        BASE.changed("all text, H = 80", **every(80)),
        replace(BASE.changed("own text, H = 80", **every(80)), own_text=True),
    ]


def drops_part() -> list[Setting]:
    """Contributions that come too late, and count in a later round."""
    return [
        BASE.changed("none late"),
        *(replace(BASE.changed(f"{p:.0%} late"), drop_rate=p) for p in (0.1, 0.25, 0.5)),
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
        replace(tiny.changed("tiny, own text, late", **int4), own_text=True, drop_rate=0.5),
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
    "long-muon": long_muon_part,
    "fragments": fragments_part,
}


def bits_of(codec: str) -> float:
    """What a value takes in a slice of normal values."""
    values = np.random.default_rng(0).standard_normal(1 << 16, dtype=np.float32)
    return 8 * len(codec_named(codec).encode(values)) / values.size
