"""Run files so small that a whole swarm trains within a test."""

from protocol.run_spec import RunSpec, validated

TINY = {
    "run": {"rounds": 4, "min_nodes": 3, "seed": 1},
    "model": {
        "hidden_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "ffn_size": 64,
        "context": 32,
    },
    "inner": {"steps": 5, "batch": 4},
    "evaluation": {"every_rounds": 2, "samples": 16},
}


def tiny(**changes: dict[str, object]) -> RunSpec:
    """The tiny run with some keys changed, given by table."""
    tables = {name: {**table} for name, table in TINY.items()}
    for table, values in changes.items():
        tables.setdefault(table, {}).update(values)
    return validated(tables, origin="the test")
