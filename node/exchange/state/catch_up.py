"""How a node gets from the outer state it holds to the committed one.

First by replay: fetch the committed results after its round from those who hold them and apply them
in order. Failing that by a snapshot from peers, whose digest must be the one that the swarm settled
on. Donors may lie or die: what does not match is thrown away and another one is asked. Either way
what the node still owes stays owed, as long as its state is one of the swarm's history.

Where it is not, the coordinator may have gone back to an older copy of its database. So before the node
gives anything up, it brings its own commits; then it goes back as little as it can.

What to fetch and when is decided here. `ResultsHere` are the results that commits name: which are in memory
or on the disk, and how others come here. How a state is fetched stands in download.py; what the coordinator
lists, and what this node can go back to by itself, in sources.py.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import structlog

from node.disk.history import ResultLog
from node.disk.snapshots import Snapshot
from node.exchange.codecs.codec import CodecError
from node.exchange.fetching import Donors, fetch_results
from node.exchange.outer import NotApplicableError, Position
from node.exchange.peers import Patience, WantResult
from node.exchange.state.chunks import Arriving
from node.exchange.state.download import Download
from node.exchange.state.sources import Listed, OwnStates, StateHere, is_same
from protocol.wire.messages import Report
from protocol.wire.payload import Payload
from protocol.wire.rounds import Commit, Digest, SliceOutcome

log = structlog.get_logger()

ASKS_BEFORE_SNAPSHOT = 3
"""How often everybody is asked for results before the node asks for a snapshot as well."""

ROUNDS_AHEAD = 4
"""Results of so many rounds are fetched together, and are in memory before they are applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorCalls:
    """What the exchange asks of the coordinator, and how patiently it asks again."""

    report: Callable[[int, Report], None]  # of a round
    list_commits: Callable[[int], Awaitable[tuple[Commit, ...]]]  # after a round
    bring_back: Callable[[int], Awaitable[bool]]  # our commits after a round, which it lacks
    patience: Patience


class CatchUp:
    """Applies commits, fetching what is missing."""

    def __init__(
        self,
        here: StateHere,
        *,
        run_digest: Digest,
        coordinator: CoordinatorCalls,
        donors: Donors,
    ) -> None:
        self.waiting_for = ""
        self.refused = ""
        """Why the state that the swarm is said to have is not taken over, in a sentence."""
        self._disbelieved: tuple[int, Digest] | None = None
        self._outer = here.outer
        self._held = here.held
        self._heavy = here.heavy
        self._history = here.history
        self._bring_back = coordinator.bring_back
        self._patience = coordinator.patience
        self._brought_for: tuple[Position, object] | None = None
        self._donors = donors
        self._listed = Listed(coordinator.list_commits, here, donors.waits)
        self.own = OwnStates(here, self._listed, run_digest=run_digest)
        self._results = ResultsHere(here, donors, say=self._say)
        self._download = Download(
            run_digest=run_digest,
            layout_digest=here.outer.layout_digest,
            num_elements=here.outer.layout.num_elements,
            heavy=here.heavy,
            donors=donors,
            folder=None if here.disk is None else here.disk.path,
            say=self._say,
        )

    @property
    def arriving(self) -> Arriving | None:
        """The state that is on its way here, as far as it has come."""
        return self._download.arriving

    async def to_commit(self, commit: Commit) -> None:
        """Reaches the commit's round or a later one."""
        if self._outer.is_base_of(commit):  # without asking the coordinator: it may be away
            await self._pass(commit)
        await self.to_round(commit.round)

    async def to_round(self, round: int) -> None:
        """Reaches a committed round or a later one.

        Returns early when the coordinator knows of no such round: it has gone back, and will say.
        """
        while self._outer.round < round:
            commits = await self._listed.after(self._outer.round)
            if not commits:
                log.warning("the coordinator lists no such round", round=round)
                return
            if commits[0].round > self._outer.round + 1 and self._outer.round:
                self._say_too_far_behind(commits[0].round)
            if not self._outer.is_base_of(commits[0]) and (
                await self._brought_own(commits[0]) or await self.own.go_back()
            ):
                continue
            for place, commit in enumerate(commits):
                if place > 0:  # the first has shown that results are still held
                    await self._results.fetch_ahead(commits[place : place + ROUNDS_AHEAD])
                if not await self._pass(commit):
                    break

    def _say_too_far_behind(self, oldest_kept: int) -> None:
        """Says what becomes of what this node owes, before anything of it goes."""
        log.warning(
            "further behind than the coordinator keeps commits",
            round=self._outer.round,
            oldest_kept=oldest_kept,
            owed="let go with the state that is fetched: no commit can say what of it was taken",
            next_step="nothing, it goes on from there; what it owes is kept while it is fewer rounds "
            "behind than that",
        )

    async def is_right(self, round: int, digest: Digest) -> bool:
        """Whether ours is the swarm's state of this round, which has that digest, or a later one.

        What the coordinator says now counts more than the digest, for nodes may have agreed anew. While
        they have yet to agree, a state is right that the commit in the list has led to.
        """
        settled = await self._listed.settled_digest(self._outer.round)
        if settled is None and self._outer.round >= round and await self._listed.has_ours():
            return True
        if settled is None and self._outer.round == round:
            settled = digest
        return self._outer.round >= round and settled == self._outer.digest

    async def replace(self, round: int, digest: Digest) -> bool:
        """Takes over a peer's state of this round or a later one; False when nobody supplies one now.

        Its own, where it is on the disk: then it goes on from there. What this node still owes goes
        with a state that is not of the swarm's history, and that is said.
        """
        await self._brought_own((round, digest))
        if await self.is_right(round, digest):
            return True
        if await self._disbelieves(round, digest):
            self._say(self.refused)
            return False
        if await self.is_right(round, digest):
            return True
        is_later = self._outer.round > round
        if await self.own.stepped_back() or (not is_later and await self.own.go_back()):
            await self.to_round(round)
        elif is_later:  # the run went back: ours may be wanted again, until we have that one
            await self._remade(round, from_before=round + 1)
        if await self.is_right(round, digest):
            return True
        snapshot = await self._fetched_state(round, (round, digest))
        self.waiting_for = ""
        if snapshot is None or not await self._taken_over(snapshot, ()):
            return False
        await self._download.taken_over()
        return True

    async def _disbelieves(self, round: int, digest: Digest) -> bool:
        """Whether the state that the swarm is said to have at a round is another than signed bytes lead to.

        The outer state is a function of the first one and the committed results. So before a node
        believes that its own is wrong, it makes it again: from an older snapshot of its own, or the first
        weights that it draws itself, with the results that commits name. If it comes to another state
        than it is told, that one is made up, whoever says so. What it cannot replay it has to believe.
        """
        if self._disbelieved == (round, digest):
            return True
        self.refused = ""
        if self._outer.round != round:
            return False
        before, owed = self._outer.position, await self._heavy(self._outer.owed)
        is_remade = await self._remade(round, from_before=max(round, 1))
        if self._outer.position == before:  # then what is owed beside it is right, too
            await self._heavy(partial(self._outer.owing.restore, owed, round=round))
        else:
            self._say_let_go(await self._heavy(lambda: float(np.linalg.norm(owed.residual))))
        if not is_remade:
            return False
        if self._outer.digest == digest:
            log.warning("this node's state was wrong, and is made again", round=round)
            return False
        self._disbelieved = round, digest
        self.refused = (
            f"the state {digest.hex()[:8]} that the swarm is said to have at round {round} is made up: "
            f"the first state and the committed results lead to {self._outer.digest.hex()[:8]}"
        )
        log.error(
            "a made-up state is refused",
            round=round,
            told=digest.hex()[:12],
            replayed=self._outer.digest.hex()[:12],
            next_step="tell the run owner: members that say so have agreed on weights that no "
            "training led to; this node keeps its own, and goes on when the run does from them",
        )
        return True

    async def _remade(self, round: int, *, from_before: int) -> bool:
        """Makes our state of a round by replay alone; False when something for that is missing.

        It begins with a state of ours of a round before `from_before`. All results are looked for before
        anything moves.
        """
        kept = await self.own.before(from_before)
        if kept is None:
            return False
        start, _ = kept
        commits = await self._listed.chain(
            start.round, await self._heavy(start.outer_digest), round
        )
        if len(commits) < round - start.round or not await self._results.are_here(commits):
            return False
        await self.own.take_up(kept)
        for commit in commits:
            if not await self._replayed(commit):
                return False  # a file was damaged meanwhile
        return True

    async def _pass(self, commit: Commit) -> bool:
        """Gets past a commit; False when it is none of the swarm's history any more.

        Never gives up otherwise: holders and donors may come back. Both ways are tried in turn.
        After a cut between all nodes nobody may have a later state yet, and only results bring the
        first of them there.
        """
        asked = 0
        while self._outer.round < commit.round:
            if asked or not self._outer.is_base_of(commit):
                # It, or what it follows, may have been taken back meanwhile, if nobody is left who holds a
                # result.
                listed = await self._listed.commit_of(commit.round)
                is_other = listed is None or not is_same(listed, commit)
                if listed is None or (is_other and not self._outer.is_base_of(listed)):
                    self.waiting_for = ""
                    return False  # the coordinator went back to a copy, and another history goes on
                commit = listed
            is_base = self._outer.is_base_of(commit)
            if is_base and await self._replayed(commit):
                break
            asked += 1
            if not is_base and await self._disbelieves(commit.round - 1, commit.base_digest):
                self._say(self.refused)
                await self._patience.pause(asked, first_seconds=self._donors.waits.pause_seconds)
                continue
            is_base = self._outer.is_base_of(commit)
            if (not is_base or asked >= ASKS_BEFORE_SNAPSHOT) and await self._leapt(commit.round):
                break
            if asked == 1:
                why = "nobody supplies a result" if is_base else "our state is not its base"
                log.warning(
                    "commit not applied yet",
                    round=commit.round,
                    why=why,
                    waits_for=f"a node that holds the results of round {commit.round} or the state "
                    "after it; it is asked for ever more rarely, and at once when the coordinator "
                    "tells of somebody new",
                )
            await self._patience.pause(asked, first_seconds=self._donors.waits.pause_seconds)
        self.waiting_for = ""
        return True

    async def _replayed(self, commit: Commit) -> bool:
        """Fetches what is missing of a commit and applies it; False when that did not work now."""
        results = await self._results.of(commit)
        if results is None:
            return False
        self._history.moves_by(commit)
        try:
            await self._heavy(lambda: self._outer.apply(commit, results))
        except (NotApplicableError, CodecError) as error:
            log.warning("commit not applied", round=commit.round, why=str(error))
            return False
        self._history.add(commit)
        self._held.forget_old(self._outer.round)
        return True

    def _say(self, waiting_for: str) -> None:
        self.waiting_for = waiting_for

    async def _leapt(self, at_least_round: int) -> bool:
        """Takes over a later state; False when nobody supplies one now."""
        snapshot = await self._fetched_state(at_least_round, None)
        if snapshot is None:
            return False
        passed = await self._listed.from_ours_to(snapshot)
        if not await self._taken_over(snapshot, passed):
            return False
        await self._download.taken_over()
        self._held.forget_old(self._outer.round)
        return True

    async def _taken_over(self, snapshot: Snapshot, passed: Sequence[Commit]) -> bool:
        """Goes on from a peer's state; False when it does not fit, and then nothing has moved.

        `passed` leads there from ours; without it, what was owed on ours cannot be owed on that one.
        How the swarm came there is asked for before, and noted as soon as the state has moved, so
        that the state never stands without its history.
        """
        commits = await self._listed.before(snapshot.round)
        owed = await self._heavy(self._outer.owing.norm)
        if passed:
            move = partial(self._outer.leap, snapshot, passed)
        else:
            move = partial(self._outer.restore, snapshot, None)
        before = self._outer.position
        if commits:
            self._history.moves_by(commits[-1])
        try:
            await self._heavy(move)
        except (NotApplicableError, CodecError) as error:
            log.warning("a state that was fetched is refused", round=snapshot.round, why=str(error))
            await self._download.taken_over()  # what is kept of it would come again
            return False
        finally:
            if self._outer.position != before:  # also where the node was told to stop meanwhile
                for commit in commits:
                    self._history.add(commit)
        if passed or owed == 0:
            residual = "kept" if passed else "nothing is owed"
            log.info("state fetched", round=snapshot.round, residual=residual)
            return True
        self._say_let_go(owed)
        return True

    def _say_let_go(self, norm: float) -> None:
        """Says that what this node owed is of another history than the swarm's."""
        if norm > 0:
            log.warning(
                "state replaced: what this node owed is let go, for its own state is none of the swarm's",
                round=self._outer.round,
                residual="dropped",
                norm=round(norm, 3),
            )

    async def _brought_own(self, cause: object) -> bool:
        """Brings the coordinator the commits that it does not have as we do; once for each cause.

        True when what it lists after our state is now made on it, so that there is no need to go back.
        """
        asked_for = self._outer.position, cause
        if self._brought_for == asked_for:
            return False
        self._brought_for = asked_for
        after = await self._listed.last_shared_round()
        if after == self._outer.round:
            return False
        asked = 0
        while not await self._bring_back(after):
            asked += 1
            if asked == 1:
                log.info("own commits are not brought back yet", after_round=after)
            await self._patience.pause(asked, first_seconds=self._donors.waits.pause_seconds)
        commits = await self._listed.after(self._outer.round)
        return not commits or self._outer.is_base_of(commits[0])

    async def _fetched_state(
        self, at_least_round: int, known: tuple[int, Digest] | None
    ) -> Snapshot | None:
        """The swarm's state at this round or later; None when nobody supplies one now."""
        self._say(f"a snapshot of round {at_least_round} or later")
        if await self._listed.settled_digest(at_least_round, known) is None:
            return None  # nothing could be checked: spare the link
        return await self._download.fetch(
            at_least_round, partial(self._listed.is_the_swarms, known)
        )


class ResultsHere:
    """Of rounds that are not applied yet."""

    def __init__(self, here: StateHere, donors: Donors, *, say: Callable[[str], None]) -> None:
        self._outer = here.outer
        self._held = here.held
        self._disk = here.disk
        self._heavy = here.heavy
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
                rules_in=self._outer.rules_in,
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
