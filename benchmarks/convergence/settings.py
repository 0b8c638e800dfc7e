"""What settings of benchmarks.convergence are made of: the one that all differ from, and tables over it."""

from typing import Any

from lab.simulation.plain_calls import Setting

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
