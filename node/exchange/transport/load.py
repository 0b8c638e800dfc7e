"""One body on a conveyor: which of its parts a stripe may take next, and when the next body may begin."""

import asyncio
from collections.abc import Callable

from node.exchange.transport.parts import Outgoing, held_in
from protocol.payload import Payload


class Turn:
    """The right to be the next body, until it is passed on."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self._is_ours = True

    def pass_on(self) -> None:
        """Lets the next body begin."""
        if self._is_ours:
            self._is_ours = False
            self._lock.release()


class Load:
    """One body on the conveyor."""

    def __init__(self, payload: Payload, turn: Turn, *, on_waiting: Callable[[], None]) -> None:
        """`on_waiting` is called when parts wait for a stripe that did not before."""
        self.payload = payload
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what broke the stripes when no part gets through any more."""
        self._turn = turn
        self._on_waiting = on_waiting
        self._held: frozenset[int] | None = None  # by the receiver, when it accepted the offer
        self._kept: set[int] = set()  # by the receiver, until then
        self._is_held_up = False  # until the offer is answered: its parts would be dropped
        self._outgoing = Outgoing(body_bytes=len(payload.body))

    @property
    def num_waiting(self) -> int:
        """Parts that no stripe carries, and one may."""
        return 0 if self._is_held_up else self._outgoing.num_waiting

    def take(self) -> int | None:
        """The next part for a stripe; with the last one the turn is passed on."""
        if self._is_held_up:
            return None
        index = self._outgoing.take()
        if not self._outgoing.num_waiting:
            self._turn.pass_on()
        return index

    def part(self, index: int) -> memoryview:
        """The bytes of a part."""
        return memoryview(self.payload.body)[self._outgoing.span(index)]

    def accept(self, held_map: bytes) -> None:
        """The offer was accepted; the receiver has these parts of an earlier one.

        Some of them may be under way once more.
        """
        self._held = held_in(held_map)
        self._is_held_up = False
        self._outgoing.skip(self._held)
        self._outgoing.give_back(self._kept)  # those of them that are not held
        if self._outgoing.num_waiting:
            self._on_waiting()
        else:
            self._turn.pass_on()

    def acknowledge(self, index: int) -> int:
        """A part is there; returns how many bytes more than before are."""
        return self._outgoing.acknowledge(index)

    def keep(self, index: int) -> int:
        """The receiver has a part whose offer it had not; returns how many bytes that are.

        It may have none of it any more when the offer comes.
        """
        if self._held is None:
            self._kept.add(index)
        elif index not in self._held:
            self.give_back(index)
        return len(self.part(index))

    def give_back(self, index: int) -> None:
        """A part did not get through."""
        self._outgoing.give_back([index])
        self._on_waiting()

    def drop(self, index: int) -> None:
        """The receiver did not take a part.

        Unless the offer was answered, the part came before it, and there was no room for it: then
        all of them wait for that answer, and other bodies do not.
        """
        if self._held is None:
            self._is_held_up = True
            self._turn.pass_on()
        self.give_back(index)

    def fail(self, error: Exception) -> None:
        """Ends the push of this body."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # nobody may be listening any more
