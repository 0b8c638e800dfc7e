"""What leads a node back to the swarm's history: the coordinator's list, and states of its own.

`Listed` is the coordinator's list of commits and how it lies to this node's; of a commit in it the outer
digest is what nodes have agreed on, None while they have not. `OwnStates` are earlier states of this node
that are the swarm's: on its disk, or the first, which it draws itself.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import structlog

from node.disk.history import History
from node.disk.snapshots import Owed, Snapshot
from node.exchange.giving import KEPT_ROUNDS, HeldResults
from node.exchange.outer import Outer
from node.exchange.peers import Waits
from node.exchange.state.on_disk import MOST_SPANS, StateOnDisk
from node.heavy import Heavy
from node.outer_state import Vector
from protocol.wire.rounds import Commit, Digest, RoundSpan

log = structlog.get_logger()

KEPT_WHEN_LEAPING = 128
"""Of the latest rounds whose results were never here the commits are kept all the same, so that a
coordinator that lost them can be given them."""

PAGE_ROUNDS = 64
"""The coordinator lists at most so many commits in an answer."""


FirstState = Callable[[], Vector]
"""Draws the weights of round 0 from the run file's seed. Heavy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateHere:
    """What this node has of the run's state, and where work on it is done that takes long."""

    outer: Outer
    history: History
    disk: StateOnDisk | None  # None: nothing outlives the process
    heavy: Heavy
    first_state: FirstState | None = None  # None: the weights of round 0 come from elsewhere
    first_digest: Digest | None = None  # of these, where they are given
    held: HeldResults = field(default_factory=HeldResults)


class Listed:
    """The coordinator's list of commits."""

    def __init__(
        self,
        list_commits: Callable[[int], Awaitable[tuple[Commit, ...]]],
        here: StateHere,
        waits: Waits,
    ) -> None:
        self.after = list_commits
        """A page of the commits after a round, oldest first."""
        self._outer = here.outer
        self._history = here.history
        self._heavy = here.heavy
        self._waits = waits

    async def commit_of(self, round: int) -> Commit | None:
        """The commit of a round, if it is listed."""
        commits = await self.after(round - 1) if round > 0 else ()
        return commits[0] if commits and commits[0].round == round else None

    async def settled_digest(
        self, round: int, known: tuple[int, Digest] | None = None
    ) -> Digest | None:
        """The digest that the swarm settled on for a round, or None while it has not."""
        if known is not None and known[0] == round:
            return known[1]
        if round == 0:  # no commit led there
            commits = await self.after(0)
            return commits[0].base_digest if commits else None
        commit = await self.commit_of(round)
        return None if commit is None else commit.outer_digest

    async def is_the_swarms(
        self, known: tuple[int, Digest] | None, round: int, digest: Digest
    ) -> bool:
        """Whether a state is the swarm's, which may still be agreeing on its newest round."""
        give_up_at = asyncio.get_running_loop().time() + self._waits.settle_seconds
        while True:
            settled = await self.settled_digest(round, known)
            is_open = settled is None and await self.commit_of(round) is not None
            if not is_open or asyncio.get_running_loop().time() >= give_up_at:
                return settled == digest
            await asyncio.sleep(self._waits.pause_seconds)

    async def has_ours(self) -> bool:
        """Whether the commit is listed that led to our state."""
        ours = self._history.at(self._outer.round)
        listed = await self.commit_of(self._outer.round)
        return ours is not None and listed is not None and is_same(ours, listed)

    async def last_shared_round(self) -> int:
        """The last round of ours whose commit is listed as we have it; where ours end otherwise."""
        end = self._outer.round
        while end > 0 and self._history.at(end) is not None:
            start = max(0, end - PAGE_ROUNDS)
            listed = {commit.round: commit for commit in await self.after(start)}
            for number in range(end, start, -1):
                ours = self._history.at(number)
                if ours is None:
                    return number
                if number in listed and is_same(ours, listed[number]):
                    return number
            end = start
        return end

    async def before(self, round: int) -> list[Commit]:
        """How the swarm came to a state: its incarnation is told with it."""
        commits: list[Commit] = []
        at = max(0, round - KEPT_WHEN_LEAPING)
        while at < round and (page := await self.after(at)):
            commits += [commit for commit in page if commit.round <= round]
            at = page[-1].round
        return commits

    async def from_ours_to(self, snapshot: Snapshot) -> list[Commit]:
        """All commits from our state to a later one; none when ours does not lead there.

        A commit that does not name this node is cut to what says so: there may be thousands.
        """
        passed = await self.chain(
            self._outer.round,
            self._outer.digest,
            snapshot.round,
            self._outer.owing.what_matters_of,
        )
        if not passed:
            return []
        end = passed[-1].outer_digest
        return passed if end == await self._heavy(snapshot.outer_digest) else []

    async def chain(
        self,
        round: int,
        digest: Digest,
        to_round: int,
        kept_of: Callable[[Commit], Commit] = lambda commit: commit,
    ) -> list[Commit]:
        """The commits from a state to a later round, page by page; none where they do not lead there."""
        passed: list[Commit] = []
        at = round
        base: Digest | None = digest  # None while nodes have yet to agree on it
        while at < to_round:
            page = await self.after(at)
            if not page:
                return []
            for commit in page[: to_round - at]:
                if (commit.round, commit.base_digest) != (at + 1, base or commit.base_digest):
                    return []  # another history goes on since
                at, base = commit.round, commit.outer_digest
                passed.append(kept_of(commit))
        return passed


def is_same(one: Commit, other: Commit) -> bool:
    """Whether two are one commit, before or after nodes agreed on the state that it leads to."""
    return replace(one, outer_digest=None) == replace(other, outer_digest=None)


Kept = tuple[Snapshot, Owed | None]
"""A state, and what was owed beside it."""


class OwnStates:
    """What a node can go back to without its peers."""

    def __init__(self, here: StateHere, listed: Listed, *, run_digest: Digest) -> None:
        self._run_digest = run_digest
        self._outer = here.outer
        self._disk = here.disk
        self._history = here.history
        self._heavy = here.heavy
        self._first_state = here.first_state
        self._listed = listed

    async def go_back(self) -> bool:
        """Takes up an earlier state of ours that is the swarm's, as late a one as there is.

        Ours now is not: it was taken back, or is of a node that went astray. Where only void rounds
        led to it that are no more, it is one all the same, under an earlier number.
        """
        if await self.stepped_back():
            return True
        kept = await self._on_disk(self._outer.round)
        if kept is None:
            return False
        await self.take_up(kept)
        return True

    def reach_back(self) -> tuple[RoundSpan, ...]:
        """Rounds up to ours to whose states this leads, in order: to that of round 0 where we draw it."""
        spans = () if self._disk is None else self._disk.reach_back(self._outer.round)
        if self._first_state is None or (spans and spans[0].first == 0):
            return spans
        if spans and spans[0].first == 1:
            return (replace(spans[0], first=0), *spans[1:])
        return (RoundSpan(first=0, last=0), *spans[1 - MOST_SPANS :])

    async def before(self, round: int) -> Kept | None:
        """The latest state of an earlier round, by which nothing has moved yet.

        That is the one of round 0 where this node draws its weights, and results may still be had from
        there on, or none are needed.
        """
        kept = await self._on_disk(round - 1)
        is_too_far = self._outer.round > KEPT_ROUNDS and round > 1
        if kept is not None or self._first_state is None or is_too_far:
            return kept
        first = await self._heavy(self._first_state)
        state = Snapshot(
            round=0,
            run_digest=self._run_digest,
            layout_digest=self._outer.layout_digest,
            parameters=first,
            momentum=np.zeros_like(first),
        )
        return state, None

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

    async def stepped_back(self) -> bool:
        """Leaves void rounds behind which the coordinator has no more."""
        first, last = self._outer.round, self._outer.round
        while (commit := self._history.at(first)) is not None and commit.is_void:
            first -= 1
        for number in range(last - 1, first - 1, -1):
            if await self._listed.settled_digest(number) == self._outer.digest:
                await self._heavy(partial(self._outer.step_back, number))
                log.warning(
                    "void rounds are no more", round=number, instead_of=last, residual="kept"
                )
                return True
        return False
