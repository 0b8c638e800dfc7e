"""What a node's daemon takes of memory for a run: one formula, for who plans a run and for who joins it."""

from collections.abc import Mapping
from types import MappingProxyType

from protocol.wire.rounds import AUDIT_ROUNDS

CODEC_BITS: Mapping[str, float] = MappingProxyType(
    {
        "fp32": 32.0,
        "bf16": 16.0,
        "int8": 8.125,
        "int4": 4.125,
        "ec3": 3.134,
        "ec2": 2.13,
        "int2": 2.031,
        "ec1": 1.093,
        "sign": 1.008,
        "topk256": 0.48,
        "topk64": 0.17,
    }
)
"""Of a value, with headers (docs/results/codec.jsonl); where it depends on the values, the larger number."""

NODE_PROCESS_BYTES = 400 << 20
"""The daemon, p2pd, and the process that ranks are forked from, by docs/results/node-start.jsonl: all of
a node's processes at their fullest start, 524 MB, less a rank's own."""

_VALUE_BYTES, _KEPT_BYTES = 4, 2


def daemon_bytes(
    *,
    num_elements: int,
    largest_fragment: int,
    num_reducers: int,
    keeps_error: bool,
    uplink: str,
    downlink: str,
    is_audited: bool,
) -> int:
    """What the daemon holds at the fullest moment of a round.

    With N reducers and fragments of a share f of the model it is, for each parameter,

        4 · (parameters 1 + momentum 1 + residual 1 + published f)
        + 4 · reducer's error (1 + f) / N, that of the round in flight beside what is kept
        + f · bodies: what is sent and what comes to be reduced; results of three rounds
        + f · for auditors, of AUDIT_ROUNDS: what came to be reduced, and 2 · reducer's error / N;
          nobody audits a node that is alone

    So it is 12.5 + 4.5 / N bytes a parameter with eight fragments, and bodies; benchmarks/outer_memory.py
    measures it. Entropy-coded results wait for their commit with their codes, a byte each at most.
    """
    model = 3 * num_elements + largest_fragment
    error = (num_elements + largest_fragment) / num_reducers if keeps_error else 0
    waiting = 8.0 if downlink.startswith("ec") else 0.0
    bits = 2 * CODEC_BITS[uplink] + 3 * CODEC_BITS[downlink] + waiting
    kept = 0.0
    if is_audited and num_reducers > 1:
        kept_error = _KEPT_BYTES / num_reducers if keeps_error else 0.0
        kept = AUDIT_ROUNDS * largest_fragment * (CODEC_BITS[uplink] / 8 + kept_error)
    return int(_VALUE_BYTES * (model + error) + bits / 8 * largest_fragment + kept)


def helper_bytes(
    *,
    num_elements: int,
    largest_fragment: int,
    num_contributions: int,
    keeps_error: bool,
    uplink: str,
    downlink: str,
    is_audited: bool,
) -> int:
    """What a helper's daemon holds at the fullest moment of a round that it reduces alone.

    As a node's that has all of the reducer's error: it owes nothing, and its residual is there all the
    same. Instead of what it sends and its share of what comes it has all contributions.
    """
    bodies = (num_contributions - 2) * CODEC_BITS[uplink] / 8 * largest_fragment
    if is_audited and num_contributions > 1:
        kept = num_contributions * CODEC_BITS[uplink] / 8 + _KEPT_BYTES * keeps_error
        bodies += AUDIT_ROUNDS * kept * largest_fragment
    return int(bodies) + daemon_bytes(
        num_elements=num_elements,
        largest_fragment=largest_fragment,
        num_reducers=1,
        keeps_error=keeps_error,
        uplink=uplink,
        downlink=downlink,
        is_audited=False,  # counted above
    )
