"""Whom to ask for which chunk of a state, where many fetch it at once. Pure: it is told the maps of others.

Donors hold the whole state, or fetch it too and have part of it, which their maps name. The fewest hold it
whole, and their uplinks would carry it once for each joiner. So a joiner asks for chunks in this order:

- those first that the fewest other joiners have (rarest first: Cohen, "Incentives Build Robustness in
  BitTorrent", 2003, section 2.4);
- of equally rare ones those first that fall to this node. Each node draws a score for each chunk from its id,
  and a chunk falls to the joiner with the highest ("rendezvous hashing": Thaler and Ravishankar, 1998). All
  know all scores, so that joiners take different chunks from the holder without a word;
- a joiner that is through with its own helps the others from their lists' ends.

This is an order and never a rule: who is idle is asked for whatever it has. So a donor whose map lies, or one
that is slow or leaves, costs time alone.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import blake3
import numpy as np
import numpy.typing as npt

from node.exchange.fetching import Job, Outcome, Schedule, Silences
from protocol.wire.rounds import Digest, NodeId

ChunkMap = npt.NDArray[np.bool_]
"""Whether a node has each chunk."""

MOST_OTHERS = 12
"""Of so many that fetch the state too chunks are asked; there is always room for those that hold it."""


class Spreading(Schedule[int]):
    """Which chunk to ask whom for next.

    A donor without a map holds the whole state. Call `put_in_order` after maps have come or gone.
    """

    def __init__(
        self,
        missing: Iterable[int],
        donors: Iterable[NodeId],
        silences: Silences,
        *,
        node_id: NodeId,
        num_chunks: int,
        outer_digest: Digest,
    ) -> None:
        super().__init__(dict.fromkeys(sorted(missing), ()), donors, silences)
        self._node_id = node_id
        self._num_chunks = num_chunks
        self._outer_digest = outer_digest
        self._maps: dict[NodeId, ChunkMap] = {}
        self._scores: dict[NodeId, npt.NDArray[np.uint64]] = {}
        self._barren: set[NodeId] = set()
        """Donors with a map that have nothing of what waits; until they have more, or more waits."""
        self.put_in_order()

    @property
    def others(self) -> tuple[NodeId, ...]:
        """Donors that fetch the state too."""
        return tuple(donor for donor in self.donors if donor in self._maps)

    @property
    def num_whole(self) -> int:
        """How many donors hold the whole state."""
        return len(self.donors) - len(self.others)

    @property
    def num_asked(self) -> int:
        """From how many chunks are under way."""
        return len({job.donor for job in self._under_way})

    def add_donor(self, donor: NodeId) -> None:
        """Asks one that holds the whole state, also one that fetched it until now."""
        self._maps.pop(donor, None)
        self._barren.discard(donor)
        super().add_donor(donor)

    def take_map(self, donor: NodeId, chunk_map: ChunkMap) -> None:
        """Asks one, that may be new, for the chunks of its map; with all of them it holds the whole."""
        self.add_donor(donor)
        if not chunk_map.all():
            self._maps[donor] = chunk_map

    def drop_donor(self, donor: NodeId) -> None:
        """Asks a donor for nothing more; what is under way from it ends by itself."""
        self._maps.pop(donor, None)
        if donor in self.donors:
            self.donors.remove(donor)

    def end(self, job: Job[int], outcome: Outcome, now: float) -> tuple[Job[int], ...]:
        """See Schedule.end."""
        if outcome is not Outcome.ARRIVED:
            self._barren.clear()  # it waits again
        return super().end(job, outcome, now)

    def put_in_order(self) -> None:
        """Sorts what waits by who has it now."""
        waiting = np.fromiter(self._waiting, dtype=np.int64, count=len(self._waiting))
        copies = np.zeros(waiting.size, dtype=np.int64)
        better = np.zeros(waiting.size, dtype=np.int64)  # joiners that a chunk falls to before us
        ours = self._scores_of(self._node_id)[waiting]
        best = ours
        for other in self.others:
            copies += self._maps[other][waiting]
            theirs = self._scores_of(other)[waiting]
            better += theirs > ours
            best = np.maximum(best, theirs)
        # Each begins at the top of its own list, and helps from the bottom of the others'.
        place = np.where(better == 0, ~ours, best)
        order = np.lexsort((place, better, copies))
        self._waiting = dict.fromkeys(waiting[order].tolist())

    def _scores_of(self, node_id: NodeId) -> npt.NDArray[np.uint64]:
        """One for each chunk, which all nodes know."""
        if node_id not in self._scores:
            seed = blake3.blake3(self._outer_digest + node_id.encode())
            stream = seed.digest(length=8 * self._num_chunks)
            self._scores[node_id] = np.frombuffer(stream, dtype="<u8")
        return self._scores[node_id]

    # How Schedule chooses

    def _choose(
        self,
        free: Sequence[NodeId],
        busy: Counter[NodeId],
        silent: frozenset[NodeId],
        overdue: Sequence[int],
    ) -> Job[int] | None:
        """For the most idle donor that has something, the first chunk in order of which it has it."""
        for donor in sorted(free, key=lambda d: (d in silent, busy[d], d in self._maps)):
            if donor not in self._barren:
                for index in self._waiting:
                    if self._may_ask(donor, index, silent):
                        return Job(key=index, donor=donor)
                if donor in self._maps and not silent:
                    self._barren.add(donor)
            for index in overdue:
                if self._may_ask(donor, index, silent):
                    return Job(key=index, donor=donor)
        return None

    def _may_ask(self, donor: NodeId, index: int, silent: frozenset[NodeId]) -> bool:
        if not self._can_give(donor, index):
            return False
        # One that sends and is only busy is waited for, rather than to ask one that is silent.
        return donor not in silent or not any(
            other not in silent and self._can_give(other, index) for other in self.donors
        )

    def _can_give(self, donor: NodeId, index: int) -> bool:
        chunk_map = self._maps.get(donor)
        has = chunk_map is None or bool(chunk_map[index])
        return has and not self._is_tried(Job(key=index, donor=donor))

    def _looks_for_overdue(self) -> bool:
        return True  # what waits may be nobody's yet
