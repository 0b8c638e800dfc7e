"""Earlier states of a node's own that are the swarm's: on its disk, or the first, which it draws itself."""

from functools import partial

import numpy as np
import structlog

from node.disk.snapshots import Owed, Snapshot
from node.exchange.giving import KEPT_ROUNDS
from node.exchange.outer import Outer
from node.exchange.state.listed import Listed
from node.exchange.state.on_disk import StateOnDisk
from node.heavy import Heavy
from node.history import History
from node.outer_state import Vector
from protocol.wire.rounds import Commit, Digest

log = structlog.get_logger()

Kept = tuple[Snapshot, Owed | None]
"""A state, and what was owed beside it."""


class OwnStates:
    """What a node can go back to without its peers."""

    def __init__(
        self,
        *,
        run_digest: Digest,
        outer: Outer,
        disk: StateOnDisk | None,
        history: History,
        heavy: Heavy,
        listed: Listed,
    ) -> None:
        self._run_digest = run_digest
        self._outer = outer
        self._disk = disk
        self._history = history
        self._heavy = heavy
        self._listed = listed

    async def go_back(self) -> bool:
        """Takes up an earlier state of ours that is the swarm's, as late a one as there is.

        Ours now is not: it was taken back, or is of a node that went astray. Where only void rounds
        led to it that are no more, it is one all the same, under an earlier number.
        """
        if await self._stepped_back():
            return True
        kept = await self._on_disk(self._outer.round)
        if kept is None:
            return False
        await self.take_up(kept)
        return True

    async def before(self, round: int, first: Vector | None) -> Kept | None:
        """The latest state of an earlier round, by which nothing has moved yet.

        `first` are the weights of round 0, where this node draws them and results lead on from there.
        """
        kept = await self._on_disk(round - 1)
        if kept is not None or first is None:
            return kept
        state = Snapshot(
            round=0,
            run_digest=self._run_digest,
            layout_digest=self._outer.layout_digest,
            parameters=first,
            momentum=np.zeros_like(first),
        )
        return state, None

    def leads_from_the_first(self) -> bool:
        """Whether results may still be had from round 0 on."""
        return self._outer.round <= KEPT_ROUNDS

    async def take_up(self, kept: Kept) -> None:
        """Takes the place of the state that is held, and of what is owed."""
        snapshot, owed = kept
        await self._heavy(partial(self._outer.restore, snapshot, owed))
        if owed is not None:
            log.warning("went back to a state of ours", round=snapshot.round, residual="kept")

    async def _on_disk(self, last: int) -> Kept | None:
        """The latest that is the swarm's, of this round or an earlier one."""
        for number in [] if self._disk is None else self._disk.snapshots.rounds():
            if number <= last:
                digest = await self._listed.settled_digest(number)
                if digest is not None and (kept := await self._loaded(number, digest)) is not None:
                    return kept
        return None

    async def _loaded(self, round: int, digest: Digest) -> Kept | None:
        assert self._disk is not None
        return await self._heavy(partial(self._disk.snapshots.load, round, digest))

    async def _stepped_back(self) -> bool:
        """Leaves void rounds behind which the coordinator has no more."""
        first, last = self._outer.round, self._outer.round
        while (commit := self._history.at(first)) is not None and is_void(commit):
            first -= 1
        for number in range(last - 1, first - 1, -1):
            if await self._listed.settled_digest(number) == self._outer.digest:
                await self._heavy(partial(self._outer.step_back, number))
                log.warning(
                    "void rounds are no more", round=number, instead_of=last, residual="kept"
                )
                return True
        return False


def is_void(commit: Commit) -> bool:
    """Whether the commit leaves the state as it was."""
    return all(outcome.digest is None for outcome in commit.slices)
