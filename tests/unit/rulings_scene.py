"""Rulings for tests: the first of a chain unless told otherwise, at no time, by whom it usually is."""

from typing import Any

from protocol.trust.rulings import NO_DIGEST, RUN_OWNER, Ruling, RulingKind, Scalar
from protocol.wire.rounds import NodeId


def ruling_of(kind: RulingKind, number: int = 1, **fields: Any) -> Ruling:
    """With these fields of Ruling."""
    plain = {"before": NO_DIGEST.hex(), "by": RUN_OWNER, "unix_seconds": 0.0}
    return Ruling(kind=kind, number=number, **{**plain, **fields})


def amendment(from_round: int, number: int = 1, **changes: Scalar) -> Ruling:
    """`outer__learning_rate=0.5` is of the key outer.learning_rate."""
    told = tuple((key.replace("__", "."), value) for key, value in changes.items())
    return ruling_of(RulingKind.AMENDED, number, from_round=from_round, changes=told)


def quarantine(node_id: str, evidence: tuple[str, ...]) -> Ruling:
    """As the coordinator makes it of a lie."""
    by = "the coordinator"
    return ruling_of(RulingKind.QUARANTINED, by=by, node_id=NodeId(node_id), evidence=evidence)
