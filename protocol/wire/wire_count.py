"""How many bytes crossed the network, by kind, since the process started."""

import threading
from collections.abc import Mapping
from typing import Literal, get_args

WireKind = Literal["contribution", "result", "snapshot", "data", "control", "carried"]

WireTotals = Mapping[str, tuple[int, int]]
"""Bytes sent and received of each kind."""

WIRE_KINDS: tuple[WireKind, ...] = get_args(WireKind)


def grown(before: WireTotals, after: WireTotals) -> WireTotals:
    """How much later totals exceed earlier ones, in each direction; never less than nothing."""
    return {
        kind: (max(0, sent - had[0]), max(0, received - had[1]))
        for kind, (sent, received) in after.items()
        for had in (before.get(kind, (0, 0)),)
    }


class WireCounts:
    """Counts from the event loop and from threads alike; starts at zero with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[str, int] = dict.fromkeys(WIRE_KINDS, 0)
        self._received: dict[str, int] = dict.fromkeys(WIRE_KINDS, 0)

    def sent(self, kind: WireKind, num_bytes: int) -> None:
        """Counts bytes that went out."""
        self._add(self._sent, kind, num_bytes)

    def received(self, kind: WireKind, num_bytes: int) -> None:
        """Counts bytes that came in."""
        self._add(self._received, kind, num_bytes)

    def totals(self) -> WireTotals:
        """Bytes sent and received of each kind, all kinds always, as of one instant."""
        with self._lock:
            return {kind: (self._sent[kind], self._received[kind]) for kind in WIRE_KINDS}

    def _add(self, counts: dict[str, int], kind: str, num_bytes: int) -> None:
        if kind not in counts or num_bytes < 0:
            raise ValueError(f"cannot count {num_bytes} bytes of {kind!r}; kinds are {WIRE_KINDS}")
        with self._lock:
            counts[kind] += num_bytes
