"""Who may open one more stream with us: peers share the places, take turns, and none takes all of its own.

A body needs a place for its offer, and its sender one for a stream of parts, which is kept free for it. When
there are none left, offers wait in line, first come, first served, and go in one peer after the other: a peer
that is in goes on with its next body. So hundreds of contributors get in without asking again and again.
"""

from asyncio import Future, get_running_loop
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from node.exchange.transport.limits import Limits
from node.exchange.transport.transport import TransferRefusedError

_PARTS_SHARE = 0.75  # of the places; bodies go on over fewer streams, but an offer must get in

_ENOUGH_STREAMS = 2  # of a peer, when others need the places; a joiner gets on with fewer fetches


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ticket:
    """An offer that waits in line."""

    peer: str
    is_in_parts: bool
    is_gone: Callable[[], bool]
    turn: Future[None] = field(default_factory=lambda: get_running_loop().create_future())
    """Done when there is a place; raises EOFError when its sender is gone."""


class StreamAdmission:
    """Counts the streams that peers have open with us, by what they are for."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: Counter[str] = Counter()  # all of a peer, those that wait included
        self._offers: Counter[str] = (
            Counter()
        )  # of bodies in parts; these have a place, as all that follow
        self._wholes: Counter[str] = Counter()  # offers with their bodies
        self._parts: Counter[str] = Counter()
        self._fetches: Counter[str] = Counter()
        self._line: list[_Ticket] = []

    # What a peer may do.

    @contextmanager
    def let_in(self, peer: str) -> Iterator[None]:
        """Counts a stream whose request is read; raises TransferRefusedError when there are too many."""
        limits, total = self._limits, self._open.total()
        if total >= limits.max_streams + limits.max_waiting_streams:
            raise TransferRefusedError(f"busy with {total} transfers; try again later")
        if self._open[peer] >= limits.max_streams_per_peer:
            raise TransferRefusedError(f"busy with {self._open[peer]} transfers of yours already")
        with self._counted(self._open, peer):
            yield

    @asynccontextmanager
    async def offer(
        self, peer: str, *, is_in_parts: bool, is_gone: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[None]:
        """Waits for a place, and holds it; raises EOFError when the peer is gone when its turn comes."""
        ticket = _Ticket(peer=peer, is_in_parts=is_in_parts, is_gone=is_gone)
        self._line.append(ticket)
        self._next_turns()
        try:
            await ticket.turn
            yield
        finally:
            if ticket in self._line:
                self._line.remove(ticket)
            elif not ticket.turn.exception():
                self._leave(self._offers if is_in_parts else self._wholes, peer)

    @contextmanager
    def parts(self, peer: str) -> Iterator[None]:
        """Holds a place for a stream of parts: the first of a peer whose offer is in, or a further one.

        Raises TransferRefusedError when places are wanted for others.
        """
        if self._parts[peer] and self._is_crowded(peer, 1):
            raise TransferRefusedError("busy; go on with the streams that you have")
        if not self._is_kept_for(peer) and (self._line or not self._has_room()):
            raise TransferRefusedError("busy; your parts may come when your offer is answered")
        with self._counted(self._parts, peer):
            yield

    @contextmanager
    def fetch(self, peer: str, *, is_large: bool) -> Iterator[None]:
        """Holds a place for what a peer asks for; raises TransferRefusedError when it has enough."""
        if is_large and self._is_crowded(peer) and self._num_served(peer) >= _ENOUGH_STREAMS:
            raise TransferRefusedError("busy; go on with the transfers that you have")
        if not self._has_room():
            raise TransferRefusedError(f"busy with {self._num_served()} transfers; try again later")
        with self._counted(self._fetches, peer):
            yield

    # Places.

    def _num_served(self, peer: str | None = None) -> int:
        counts = (self._offers, self._wholes, self._parts, self._fetches)
        return sum(count.total() if peer is None else count[peer] for count in counts)

    def _is_crowded(self, peer: str, num_more: int = 0) -> bool:
        """Whether so many places are taken that this peer must leave the rest to others."""
        limits = self._limits
        return (
            self._num_served() + num_more > _PARTS_SHARE * limits.max_streams
            or self._num_served(peer) + num_more > _PARTS_SHARE * limits.max_streams_per_peer
        )

    def _is_kept_for(self, peer: str) -> bool:
        """Whether a place is kept for the parts of an offer that is in."""
        return self._offers[peer] > 0 and not self._parts[peer]

    def _has_room(self, num_more: int = 1) -> bool:
        """Whether there are so many places more, beside those that are kept."""
        num_kept = sum(self._is_kept_for(peer) for peer in self._offers)
        return self._num_served() + num_kept + num_more <= self._limits.max_streams

    def _next_turns(self) -> None:
        """Lets in who may go: first peers that are in already, or their parts would come in vain."""
        if not self._line:
            return
        for ticket in [each for each in self._line if each.is_gone() and not each.turn.done()]:
            self._line.remove(ticket)
            ticket.turn.set_exception(EOFError("the sender has dropped its offer"))
        waiting = [ticket for ticket in self._line if not ticket.turn.done()]  # else: cancelled
        is_full = False
        for ticket in sorted(waiting, key=lambda each: not self._num_served(each.peer)):
            peer = ticket.peer
            # Its stream of parts waits for this offer, and would hold its place in vain.
            is_awaited = ticket.is_in_parts and self._parts[peer] and not self._offers[peer]
            needs_parts = ticket.is_in_parts and not (self._offers[peer] or self._parts[peer])
            is_full = is_full or not self._has_room(1 + needs_parts)
            if is_full and not is_awaited:
                continue
            self._line.remove(ticket)
            counts = self._offers if ticket.is_in_parts else self._wholes
            counts[peer] += 1
            ticket.turn.set_result(None)

    @contextmanager
    def _counted(self, counts: Counter[str], peer: str) -> Iterator[None]:
        counts[peer] += 1
        try:
            yield
        finally:
            self._leave(counts, peer)

    def _leave(self, counts: Counter[str], peer: str) -> None:
        counts[peer] -= 1
        if not counts[peer]:
            del counts[peer]
        self._next_turns()
