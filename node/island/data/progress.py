"""How far something long is, as a value."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How far it is."""

    done_bytes: int
    total_bytes: int
    resumed_bytes: int  # of the done ones: by another process before this one
