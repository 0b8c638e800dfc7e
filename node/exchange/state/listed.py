"""What the coordinator lists of the swarm's history, and how that lies to the history of this node.

Of a commit that is listed the outer digest is what nodes have agreed on; None while they have not.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from node.disk.snapshots import Snapshot
from node.exchange.outer import Outer
from node.heavy import Heavy
from node.history import History
from protocol.wire.rounds import Commit, Digest

KEPT_WHEN_LEAPING = 128
"""Of the latest rounds whose results were never here the commits are kept all the same, so that a
coordinator that lost them can be given them."""

PAGE_ROUNDS = 64
"""The coordinator lists at most so many commits in an answer."""


class Listed:
    """The coordinator's list of commits."""

    def __init__(
        self,
        list_commits: Callable[[int], Awaitable[tuple[Commit, ...]]],
        *,
        outer: Outer,
        history: History,
        heavy: Heavy,
        settle_seconds: float,
        pause_seconds: float,
    ) -> None:
        self.after = list_commits
        """A page of the commits after a round, oldest first."""
        self._outer = outer
        self._history = history
        self._heavy = heavy
        self._settle_seconds = settle_seconds
        self._pause_seconds = pause_seconds

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
        give_up_at = asyncio.get_running_loop().time() + self._settle_seconds
        while True:
            settled = await self.settled_digest(round, known)
            is_open = settled is None and await self.commit_of(round) is not None
            if not is_open or asyncio.get_running_loop().time() >= give_up_at:
                return settled == digest
            await asyncio.sleep(self._pause_seconds)

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

    async def between(self, outer: Outer, snapshot: Snapshot) -> list[Commit]:
        """All commits from our state to a later one; none when ours does not lead there.

        Of those that do not name this node only what says so is kept: there may be thousands.
        """
        passed = await self.chain(
            outer.round, outer.digest, snapshot.round, outer.owing.what_matters_of
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
