"""Parts that came before the offer of their body: kept for a moment, and little of each sender.

An offer leaves first, but opens a stream for itself, which takes it through libp2p's queue more often
than a part on a stripe that is there already. When links are full, parts overtake it.
"""

import asyncio
from collections import Counter

from protocol.rounds import Digest, NodeId

EARLY_SECONDS = 5.0
"""How long parts are kept for an offer; it should come within a few round trips."""

MOST_EARLY_BYTES = 4 << 20
"""Of one sender: a third of a second at 100 Mbit/s."""

MOST_EARLY_BYTES_OF_ALL = 32 << 20

_OVERHEAD_BYTES = 1024  # so that a sender of empty parts fills its room too


class EarlyParts:
    """Keeps parts by their sender and the digest of their payload."""

    def __init__(self) -> None:
        self._parts: dict[tuple[NodeId, Digest], dict[int, bytes]] = {}
        self._timers: dict[tuple[NodeId, Digest], asyncio.TimerHandle] = {}
        self._num_bytes: Counter[NodeId] = Counter()

    def keep(self, sender: NodeId, digest: Digest, index: int, content: bytes) -> bool:
        """Keeps a part; False when there is no room for it."""
        key = (sender, digest)
        if index in self._parts.get(key, {}):
            return True  # once is enough
        size = _size(digest, content)
        if (
            self._num_bytes[sender] + size > MOST_EARLY_BYTES
            or self._num_bytes.total() + size > MOST_EARLY_BYTES_OF_ALL
        ):
            return False
        if key not in self._parts:
            self._parts[key] = {}
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_later(EARLY_SECONDS, self.take, sender, digest)
        self._num_bytes[sender] += size
        self._parts[key][index] = content
        return True

    def take(self, sender: NodeId, digest: Digest) -> dict[int, bytes]:
        """What is kept of a body, by its place; nothing is kept of it any more."""
        key = (sender, digest)
        parts = self._parts.pop(key, {})
        if parts:
            self._timers.pop(key).cancel()
            self._num_bytes[sender] -= sum(_size(digest, part) for part in parts.values())
            if not self._num_bytes[sender]:
                del self._num_bytes[sender]
        return parts

    def clear(self) -> None:
        """Forgets all of them."""
        for sender, digest in list(self._parts):
            self.take(sender, digest)


def _size(digest: Digest, content: bytes) -> int:
    return len(content) + len(digest) + _OVERHEAD_BYTES
