"""Spot checks: what this node measures of whether another one has trained what it was leased.

It fetches the contribution from those that reduced it, as an auditor does, and compares it with the
round's results, which it holds: ranks then measure losses a little along that difference, and against it,
at whatever state the node has (node.duties.lasting_island). The base of the round is not needed: it has
moved by little.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import structlog

from node.exchange.auditing import Audits, NotGivenError, fetched_from
from node.exchange.codecs.codec import CodecError
from node.exchange.fetching import Donors
from node.exchange.peers import WantInput, WantResult
from node.exchange.round.state import misfit
from node.exchange.state.sources import StateHere
from node.heavy import cancelled
from node.outer_state import Vector
from protocol.wire.findings import SpotChecked
from protocol.wire.messages import SpotCheckAsked
from protocol.wire.payload import Payload
from protocol.wire.rounds import (
    AUDIT_ROUNDS,
    BOOK_PLACES,
    PASSES_OF_CHECK,
    PASSES_OF_TRAINING,
    Commit,
    NodeId,
    Slice,
    SliceOutcome,
    num_spot_checked,
)

log = structlog.get_logger()

MOST_PIECES = 16
"""Of one check."""

UNLEASED_FROM, UNLEASED = 1 << 38, 1 << 30
"""Places of the sample order, from the first on, that no run gets to. Samples of a small dataset come there
as they do in earlier epochs: a few are leased ones, which takes as much from what is found."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpotCheckReady:
    """All that is needed of others for a check is here."""

    asked: SpotCheckAsked
    fragment: int
    half: Vector  # [fragment]: half of what lies between contribution and results
    leased: tuple[int, ...]  # places of the sample order, in an order by lot
    unleased: tuple[int, ...]  # as many

    def found(self, leased: Sequence[float], unleased: Sequence[float]) -> SpotChecked:
        """What follows from how much better samples are known with the contribution than against it.

        The score goes by ranks (Mann and Whitney 1947): a few samples learned by heart hardly move it. Its
        standard error is 1 for any number of samples, so one of the first few says no more than these show.
        """
        n, ours, others = len(leased), np.asarray(leased), np.asarray(unleased)
        ahead = (ours[:, None] > others).mean() + (ours[:, None] == others).mean() / 2
        return SpotChecked(
            contributor_id=self.asked.contributor_id,
            num_samples=n,
            gap=float(ours.mean() - others.mean()),
            score=float(ahead - 0.5) * math.sqrt(12 * n * n / (2 * n + 1)),
        )


def piece_of(num: int, batch: int) -> int:
    """How many of a check's leased samples are measured in one go: a commit may wait so long.

    Half of an inner step takes as long; or a 16th of the check, for each piece moves the whole model twice.
    """
    in_half_a_step = PASSES_OF_TRAINING * batch // (2 * PASSES_OF_CHECK)
    return max(1, in_half_a_step, -(-num // MOST_PIECES))


class SpotChecks:
    """Fetches what is needed for the checks that the coordinator asks for."""

    def __init__(
        self,
        here: StateHere,
        *,
        audits: Audits,
        donors: Donors,
        result: Callable[[WantResult], Awaitable[Payload | None]],
    ) -> None:
        self.on_ready: Callable[[SpotCheckReady], None] = lambda ready: None
        """Hears of checks that ranks may measure; the daemon sets it."""
        self._outer = here.outer
        self._history = here.history
        self._heavy = here.heavy
        self._audits = audits
        self._donors = donors
        self._result = result
        self._moved = asyncio.Event()
        self._tasks: dict[tuple[int, NodeId], asyncio.Task[None]] = {}

    def ask(self, asked: SpotCheckAsked) -> None:
        """Begins a check, once."""
        place = asked.round, asked.contributor_id
        oldest = asked.round - AUDIT_ROUNDS  # of earlier ones nobody asks any more
        self._tasks = {
            at: task for at, task in self._tasks.items() if at[0] > oldest or not task.done()
        }
        if place not in self._tasks:
            self._tasks[place] = asyncio.get_running_loop().create_task(self._prepare(asked))

    def note_applied(self) -> None:
        """The outer state has moved: checks of that round may begin."""
        self._moved.set()

    async def stop(self) -> None:
        """Ends what is under way."""
        tasks, self._tasks = self._tasks, {}
        await cancelled(tasks.values())

    async def _prepare(self, asked: SpotCheckAsked) -> None:
        try:
            async with asyncio.timeout(asked.seconds):
                self.on_ready(await self._ready(asked))
        except (NotGivenError, TimeoutError) as error:
            why = str(error) or f"it took more than {asked.seconds:g} s"
            log.info("not checked", round=asked.round, of=asked.contributor_id, why=why)
        except Exception:  # nobody waits for this task
            log.exception("spot check failed", round=asked.round, of=asked.contributor_id)

    async def _ready(self, asked: SpotCheckAsked) -> SpotCheckReady:
        commit = await self._applied(asked.round)
        assignment = next(a for a in commit.assignments if a.node_id == asked.contributor_id)
        span = self._outer.layout.fragments[commit.fragment].span
        half = np.zeros(span.stop - span.start, dtype=np.float32)
        there = [outcome for outcome in commit.slices if outcome.digest is not None]
        lacking, why, samples = 0, "", 0
        for outcome in there:
            try:
                place = _place_of(outcome, asked.contributor_id)
                samples = max(samples, outcome.contributors[place].samples)
                await self._add(half, commit, outcome, place, asked)
            except NotGivenError as error:  # a reducer may hide what it has sent, or an accomplice
                lacking, why = lacking + outcome.num_elements, str(error)
        if 2 * lacking > sum(outcome.num_elements for outcome in there):
            raise NotGivenError(why)
        rng = np.random.default_rng(asked.seed)
        first = assignment.first_sample % BOOK_PLACES
        samples = min(samples, assignment.num_samples)
        num = num_spot_checked(samples)
        leased = first + rng.choice(samples, num, replace=False)
        unleased = UNLEASED_FROM + rng.choice(UNLEASED, num, replace=False)
        return SpotCheckReady(
            asked=asked,
            fragment=commit.fragment,
            half=half,
            leased=tuple(map(int, leased)),
            unleased=tuple(map(int, unleased)),
        )

    async def _applied(self, round: int) -> Commit:
        """The round's commit, once it is applied here: from then on its results are held."""
        while self._outer.round < round:
            self._moved.clear()
            await self._moved.wait()
        commit = self._history.at(round)
        if commit is None:
            raise NotGivenError("this node has not applied that round")
        return commit

    async def _add(
        self, half: Vector, commit: Commit, outcome: SliceOutcome, place: int, asked: SpotCheckAsked
    ) -> None:
        """Half of what lies between a contribution and the result, in its slice."""
        assert outcome.digest is not None
        wanted = WantResult(round=commit.round, slice_index=outcome.index, digest=outcome.digest)
        result = await self._result(wanted)
        if result is None:
            raise NotGivenError(f"the result of slice {outcome.index} is not here")
        part = Slice(
            index=outcome.index,
            start=outcome.start,
            num_elements=outcome.num_elements,
            reducer_id=result.header.sender_id,
        )
        given = await self._given(part, outcome, place, asked)
        end = part.start + part.num_elements
        await self._heavy(
            partial(self._put_half, half[part.start : end], given, result, part.num_elements)
        )

    def _put_half(self, half: Vector, given: Payload, result: Payload, size: int) -> None:
        try:
            codecs = self._outer.rules_in(given.header.round)
            contributed = codecs.uplink.decode(given.body, size)
            merged = codecs.downlink.decode(result.body, size)
        except CodecError as error:
            raise NotGivenError(f"a body does not decode: {error}") from error
        np.subtract(contributed, merged, out=half)
        np.multiply(half, np.float32(0.5), out=half)

    async def _given(
        self, part: Slice, outcome: SliceOutcome, place: int, asked: SpotCheckAsked
    ) -> Payload:
        """The very bytes that the commit names, from who has reduced them."""
        want = WantInput(
            round=asked.round,
            slice_index=part.index,
            contributor_id=asked.contributor_id,
            digest=outcome.contributions[place],
        )
        uplink = self._outer.rules_in(asked.round).uplink
        if part.reducer_id == self._outer.node_id:
            given = await self._heavy(partial(self._audits.supply, want, None))
        else:
            most = uplink.most_bytes(part.num_elements)
            donor = part.reducer_id
            given = await fetched_from(self._donors, donor, want, most, seconds=asked.seconds)
        if given is None:
            raise NotGivenError("what this node has reduced is not kept any more")
        if why := self._donors.forgery(given.header) or misfit(given.header, part, uplink):
            raise NotGivenError(f"what {part.reducer_id} gives counts nothing: {why}")
        return given


def _place_of(outcome: SliceOutcome, node_id: NodeId) -> int:
    """Where a slice's outcome names a contributor that it took something of; raises NotGivenError."""
    for place, contributor in enumerate(outcome.contributors):
        if contributor.node_id == node_id and contributor.tokens and outcome.factor_of(node_id):
            return place
    raise NotGivenError(f"slice {outcome.index} has nothing of it")
