"""The results that this node holds: of the round in flight, and of the latest ones for who missed them."""

from protocol.payload import Payload
from protocol.rounds import Digest

KEPT_ROUNDS = 16
"""Results of this many rounds are kept, for peers that replay."""


class HeldResults:
    """Payloads by round and slice."""

    def __init__(self) -> None:
        self._payloads: dict[tuple[int, int], Payload] = {}

    def hold(self, payload: Payload) -> None:
        """Keeps a result; one that was held for the same slice goes."""
        self._payloads[payload.header.round, payload.header.slice_index] = payload

    def drop(self, round: int, slice_index: int) -> None:
        """Forgets the result of a slice: another node reduces it anew."""
        self._payloads.pop((round, slice_index), None)

    def get(self, round: int, slice_index: int) -> Payload | None:
        """The result of a slice, whatever its digest."""
        return self._payloads.get((round, slice_index))

    def find(self, round: int, slice_index: int, digest: Digest) -> Payload | None:
        """The result of a slice with this digest."""
        payload = self._payloads.get((round, slice_index))
        return payload if payload is not None and payload.digest == digest else None

    def forget_from(self, round: int) -> None:
        """Drops this round and later ones: they are planned anew, and no commit took these results."""
        for key in [key for key in self._payloads if key[0] >= round]:
            del self._payloads[key]

    def forget_before(self, round: int) -> None:
        """Drops earlier rounds."""
        for key in [key for key in self._payloads if key[0] < round]:
            del self._payloads[key]

    def forget_old(self, newest_round: int) -> None:
        """Drops rounds that are too old to be asked for."""
        self.forget_before(newest_round - KEPT_ROUNDS + 1)
