"""Who may open one more stream with us: peers share the places, and none takes all of its own."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from node.exchange.transport.limits import Limits
from node.exchange.transport.transport import TransferRefusedError

_PARTS_SHARE = 0.75  # of the places; bodies go on over fewer streams, but an offer must get in

_ENOUGH_STREAMS = 2  # of a peer, when others need the places; a joiner gets on with fewer fetches


class StreamAdmission:
    """Counts the streams that peers have open with us."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: Counter[str] = Counter()

    def is_crowded(self, peer: str) -> bool:
        """Whether so many places are taken that a stream of parts must leave the rest to other transfers."""
        return (
            self._open.total() > _PARTS_SHARE * self._limits.max_streams
            or self._open[peer] > _PARTS_SHARE * self._limits.max_streams_per_peer
        )

    def is_served_enough(self, peer: str) -> bool:
        """Whether so many places are taken that a peer must go on with the fetches that it has."""
        return self.is_crowded(peer) and self._open[peer] >= _ENOUGH_STREAMS

    @contextmanager
    def let_in(self, peer: str) -> Iterator[None]:
        """Holds a place while a stream is served; raises TransferRefusedError when none is left."""
        total = self._open.total()
        if total >= self._limits.max_streams:
            raise TransferRefusedError(f"busy with {total} transfers; try again later")
        if self._open[peer] >= self._limits.max_streams_per_peer:
            raise TransferRefusedError(f"busy with {self._open[peer]} transfers of yours already")
        self._open[peer] += 1
        try:
            yield
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]
