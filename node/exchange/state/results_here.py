"""The results that commits name: which are here, on the disk or in memory, and how others come here."""

from collections.abc import Callable, Sequence
from functools import partial

from node.disk.logs import ResultLog
from node.exchange.fetching import Donors, fetch_results
from node.exchange.giving import HeldResults
from node.exchange.outer import Outer
from node.exchange.state.on_disk import StateOnDisk
from node.exchange.transport.transport import WantResult
from node.heavy import Heavy
from protocol.wire.payload import Payload
from protocol.wire.rounds import Commit, SliceOutcome


class ResultsHere:
    """Of rounds that are not applied yet."""

    def __init__(
        self,
        *,
        outer: Outer,
        held: HeldResults,
        disk: StateOnDisk | None,
        heavy: Heavy,
        donors: Donors,
        say: Callable[[str], None],
    ) -> None:
        self._outer = outer
        self._held = held
        self._disk = disk
        self._heavy = heavy
        self._donors = donors
        self._say = say

    async def of(self, commit: Commit) -> dict[int, Payload] | None:
        """By slice, fetched where need be; None when not all of them come now."""
        if self._missing(commit):
            await self._fetch((commit,))
        found = {
            outcome.index: payload
            for outcome in commit.slices
            if (payload := self._find(commit.round, outcome)) is not None
        }
        committed = sum(outcome.digest is not None for outcome in commit.slices)
        return found if len(found) == committed else None

    async def fetch_ahead(self, commits: Sequence[Commit]) -> None:
        """Fetches what is missing of some rounds together, once it is missing of the first."""
        if self._outer.is_base_of(commits[0]) and self._missing(commits[0]):
            await self._fetch(commits)

    async def are_here(self, commits: Sequence[Commit]) -> bool:
        """Whether all results of these rounds are here; those that are not on the disk are fetched.

        What is on the disk stays there: it may be more than fits into memory.
        """
        absent = [c for c in commits if await self._heavy(partial(self._is_absent, c))]
        if absent:
            await self._fetch(absent)
        return not any(map(self._missing, absent))

    def _is_absent(self, commit: Commit) -> bool:
        """Whether a result is neither in memory nor on the disk."""
        return any(
            self._on_disk(commit.round, outcome) is None for outcome in self._missing(commit)
        )

    def _on_disk(self, round: int, outcome: SliceOutcome) -> Payload | None:
        if self._disk is None or outcome.digest is None:
            return None
        return self._disk.results.find(round, outcome.index, outcome.digest)

    def _find(self, round: int, outcome: SliceOutcome) -> Payload | None:
        if outcome.digest is None:
            return None
        return self._held.find(round, outcome.index, outcome.digest)

    def _missing(self, commit: Commit) -> list[SliceOutcome]:
        """The slices of a commit whose result is not in memory."""
        return [
            outcome
            for outcome in commit.slices
            if outcome.digest is not None and self._find(commit.round, outcome) is None
        ]

    async def _fetch(self, commits: Sequence[Commit]) -> None:
        """Fetches the results that are missing of some rounds, from our own disk first."""
        if self._disk is not None:
            await self._heavy(partial(self._recall, self._disk.results, commits))
        wanted = {
            WantResult(round=commit.round, slice_index=each.index, digest=each.digest): each
            for commit in commits
            for each in self._missing(commit)
            if each.digest is not None
        }
        if wanted:
            rounds = [want.round for want in wanted]
            first, last = min(rounds), max(rounds)
            which = f"round {first}" if first == last else f"rounds {first} to {last}"
            self._say(f"results of {which}")
            await fetch_results(
                wanted,
                self._keep,
                of=self._donors,
                peers=self._donors.peers(),
                downlink=self._outer.downlink,
            )

    async def _keep(self, payload: Payload) -> None:
        self._held.hold(payload)

    def _recall(self, results: ResultLog, commits: Sequence[Commit]) -> None:
        for commit in commits:
            for outcome in self._missing(commit):
                assert outcome.digest is not None
                payload = results.find(commit.round, outcome.index, outcome.digest)
                if payload is not None:
                    self._held.hold(payload)
