"""Who is ahead of the others, among peers that move as much over a link that they share.

A slice is reduced when the last of its contributions is here, and a round is over when the last peer has
the last result. TCP gives connections through one narrow link shares that differ by a factor of two or three,
for as long as a round takes. So whoever is ahead waits a little, and the room goes to the others.

Pure: it is told what moves.
"""

from collections import Counter
from collections.abc import Hashable

from node.exchange.limits import LEAST_PART_BYTES

LEAD_OF_SENDERS_BYTES = 2 * LEAST_PART_BYTES
"""For so much no sender is held up: bytes come in parts."""

LEAD_OF_RECEIVERS_BYTES = 8 * LEAST_PART_BYTES
"""For so much no receiver is: its answers wait in its own uplink behind what it sends."""

_SLOWEST = 1 / 4  # of the peers, one at least: the others do not wait for these


class Evenness:
    """How far each peer is in the newest round. All of them are to move as much in it."""

    def __init__(self, most_lead_bytes: int) -> None:
        self._most_lead_bytes = most_lead_bytes
        self._round = -1
        self._num_bytes: Counter[Hashable] = Counter()
        self._active: Counter[Hashable] = Counter()

    def begin(self, peer: Hashable, round: int) -> None:
        """A body of this round is on its way."""
        if round > self._round:
            self._round = round
            self._num_bytes.clear()
        self._active[peer] += 1

    def end(self, peer: Hashable) -> None:
        """A body is on its way no longer, whether it has arrived or not."""
        self._active[peer] -= 1
        if not self._active[peer]:
            del self._active[peer]

    def moved(self, peer: Hashable, round: int, num_bytes: int) -> None:
        """So much of a body of this round has arrived."""
        if round == self._round:
            self._num_bytes[peer] += num_bytes

    def is_ahead(self, peer: Hashable) -> bool:
        """Whether a peer is further than those that others wait for.

        Nobody waits for the slowest quarter, nor for the slowest one: it may never come.
        """
        others = sorted(self._num_bytes[each] for each in self._active)
        if len(others) < 2:
            return False
        behind = others[max(1, int(_SLOWEST * len(others)))]
        return self._num_bytes[peer] - behind > self._most_lead_bytes
