"""The exchange room's front desk: what the daemon asks for, and what peers ask for.

It owns the outer state and the round in flight. The daemon calls it in the order of a round;
peers call it at any time through the transport.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import Random

import structlog

from node.exchange.auditing import Audits
from node.exchange.fetching import Donors, Silences
from node.exchange.giving import KEPT_ROUNDS, Pushes
from node.exchange.peers import (
    Admission,
    TransferRefusedError,
    Transport,
    Want,
    WantChunk,
    WantChunkMap,
    WantInput,
    WantManifest,
    WantResult,
    WantTokens,
)
from node.exchange.round.state import Rules, refusal
from node.exchange.round.transition import waiting_for
from node.exchange.runner import RoundRunner
from node.exchange.spot_checks import SpotCheckReady, SpotChecks
from node.exchange.state.catch_up import CatchUp, CoordinatorCalls
from node.exchange.state.donor import Donor, ServedState
from node.exchange.state.sources import StateHere
from node.outer_state import Vector
from protocol.errors import AtollError
from protocol.wire.messages import AuditAsked, RoundNews, SliceTakenOver, SpotCheckAsked
from protocol.wire.payload import Payload, PayloadHeader
from protocol.wire.rounds import Commit, Digest, NodeId, Plan, RosterEntry, RoundSpan

log = structlog.get_logger()

GiveTokens = Callable[[NodeId, WantTokens], Awaitable[Payload | None]]
"""Who asks, and for what; raises TransferRefusedError."""


class Exchange:
    """One node's side of the slow links. Also the transport's handler."""

    def __init__(
        self,
        rules: Rules,
        here: StateHere,
        *,
        transport: Transport,
        coordinator: CoordinatorCalls,
        give_tokens: GiveTokens | None = None,
        forgery: Callable[[PayloadHeader], str] = PayloadHeader.forgery,
    ) -> None:
        """`give_tokens` answers what peers ask of the run's tokens; None: nothing is given.

        `forgery` says why a header is not signed as it must be.
        """
        self._give_tokens = give_tokens
        self._here = here
        self.outer, self.history = here.outer, here.history
        self._rules = rules
        self._transport = transport
        self._disk = here.disk
        self._heavy = here.heavy
        self._report = coordinator.report
        self._held = here.held
        self._round: RoundRunner | None = None
        # One for all rounds: peers still wait for results when the next round begins.
        self._pushes = Pushes(transport, Random(rules.node_id), rules.waits)
        self._members: tuple[NodeId, ...] = ()
        self._processes: dict[NodeId, int] = {}  # of each member, as it announced
        self._ahead: tuple[int, float] | None = None  # a round that is trained ahead, since when
        self._early: list[tuple[float, RoundNews]] = []  # of rounds that are not open here yet
        # Taken while the outer state changes or is copied: a snapshot is never half of two rounds.
        self._lock = asyncio.Lock()
        self._donor = Donor(
            node_id=rules.node_id,
            run_digest=rules.run_digest,
            layout_digest=here.outer.layout_digest,
            num_elements=here.outer.layout.num_elements,
            oldest_round=self._oldest_useful_round,
            open_state=self._opened_state,
            arriving=lambda: self._catch_up.arriving,
            heavy=here.heavy,
        )
        self._donors = Donors(
            node_id=rules.node_id,
            transport=transport,
            peers=self._peers,
            silences=Silences(transport.round_trip_seconds, rules.waits),
            forgery=forgery,
            process_of=lambda node_id: self._processes.get(node_id, 0),
        )
        self.audits = Audits(rules, here, donors=self._donors, report=coordinator.report)
        self.spot_checks = SpotChecks(
            here, audits=self.audits, donors=self._donors, result=self._result
        )
        self._catch_up = CatchUp(
            here, run_digest=rules.run_digest, coordinator=coordinator, donors=self._donors
        )

    # What the daemon asks for

    def set_roster(self, members: tuple[RosterEntry, ...]) -> None:
        """Tells the transport who is a member, and remembers whom to ask."""
        self._transport.set_roster(members)
        self._processes = {m.node_id: m.process_id for m in members}
        self._members = tuple(m.node_id for m in members if m.node_id != self._rules.node_id)

    def _peers(self) -> tuple[NodeId, ...]:
        """Whom to ask, those first that can be reached."""
        unreachable = frozenset(self._transport.seen().unreachable)  # or carried: last too
        return tuple(sorted(self._members, key=lambda peer: peer in unreachable))

    async def open_round(self, plan: Plan) -> None:
        """Begins to take contributions and results of a round.

        Nothing of another plan of the same round is kept: results of its slices would stand in the way.
        """
        await self._break_off_round()
        await self._pushes.stop(from_round=plan.round)
        self._held.forget_from(plan.round)
        now = asyncio.get_running_loop().time()
        ahead, self._ahead = self._ahead, (plan.round + 1, now) if plan.ahead else None
        codecs = self.outer.rules_in(plan.round)
        self._round = RoundRunner(
            plan,
            replace(self._rules, uplink=codecs.uplink, downlink=codecs.downlink),
            self._here,
            report=self._report,
            pushes=self._pushes,
            donors=self._donors,
            begun_at=ahead[1] if ahead is not None and ahead[0] == plan.round else None,
        )
        # Kept as long as the round may be planned anew.
        self._early = [(at, news) for at, news in self._early if news.round >= plan.round]
        for told_at, news in self._early:
            if news.round == plan.round:
                self._round.hear(_aged(news, now - told_at))

    def is_open_by(self, plan: Plan) -> bool:
        """Whether the open round goes by this plan; who reduces may have changed since."""
        return self._round is not None and self._round.state.goes_by(plan)

    async def contribute(self, *, samples: int, tokens: int) -> None:
        """Sends what the island published for the open round: see RoundRunner.contribute."""
        assert self._round is not None, "contribute follows open_round"
        await self._round.contribute(samples=samples, tokens=tokens)

    async def take_in(self, publish: Callable[[int], Awaitable[bool]]) -> None:
        """Has the island publish all that it trained, fragment by fragment; it is owed from then on.

        For what no round has published, before a catch-up replaces the island's weights. `publish`
        returns False when there is nothing left to publish.
        """
        async with self._lock:
            for fragment in range(len(self.outer.layout.fragments)):
                before = await self._heavy(partial(self.outer.owing.published_of, fragment))
                if not await publish(fragment):
                    return
                await self._heavy(partial(self.outer.owing.add_published, fragment, before))

    def tell(self, news: RoundNews | AuditAsked | SpotCheckAsked) -> None:
        """Takes in what the coordinator says of a round, which may not be open here yet."""
        if isinstance(news, AuditAsked):
            self.audits.ask(news)
        elif isinstance(news, SpotCheckAsked):
            self.spot_checks.ask(news)
        elif self._round is not None and self._round.state.plan.round == news.round:
            self._round.hear(news)
        elif news.round > self.outer.round:
            self._early.append((asyncio.get_running_loop().time(), news))

    async def _end_round(self, committed_round: int) -> None:
        """Closes the round in flight, which the commit may be of, or an earlier one than that.

        Then auditors ask what its results were made of, also where the commit came by the list.
        """
        if self._round is not None and self._round.state.plan.round <= committed_round:
            async with self._lock:
                await self.audits.keep(self._round.state)
        await self._close_round()

    async def _close_round(self) -> None:
        """Ends the transfers of the round in flight; what is pending of it waits for the commit."""
        closing, self._round = self._round, None
        if closing is not None:
            await closing.close()

    async def _break_off_round(self) -> None:
        """Ends the round in flight without its commit."""
        await self._close_round()
        self.outer.owing.forget_pending()

    async def stop(self) -> None:
        """Ends everything in flight, results that peers still wait for included."""
        self._donor.drop()
        await self.audits.stop()
        await self.spot_checks.stop()
        await self._break_off_round()
        await self._pushes.stop()
        if kept := await self._heavy(self.outer.owing.reducer_error.num_kept):
            # Nobody else can owe it: lost with this node, unless it comes back with its folder.
            log.info("rounding error leaves", round=self.outer.round, elements=kept)

    async def apply(self, commit: Commit) -> None:
        """Brings the outer state to the commit's round, by results or, failing that, by a snapshot."""
        if self._round is not None and self._round.state.plan.round == commit.round:
            await self._round.complete(commit)
        await self._end_round(commit.round)
        async with self._lock:
            await self._catch_up.to_commit(commit)
        self.spot_checks.note_applied()

    async def catch_up(self, round: int) -> None:
        """Brings the outer state to a committed round or a later one."""
        await self._end_round(round)
        async with self._lock:
            await self._catch_up.to_round(round)
        self.spot_checks.note_applied()

    async def refetch(self, round: int, digest: Digest) -> bool:
        """Replaces the outer state by that of a peer at this round or later.

        Does nothing when there is no need: requests are repeated, and come late. False when nobody
        supplies such a state now.
        """
        if await self._catch_up.is_right(round, digest):
            return True
        await self._break_off_round()
        async with self._lock:
            self._donor.drop()  # what was ours may have been wrong for some rounds
            return await self._catch_up.replace(round, digest)

    async def forget_after(self, round: int) -> None:
        """Later rounds are undone: nothing of theirs is kept, here or for peers."""
        self._early = []
        self._held.forget_from(round + 1)
        await self.audits.forget_after(round)
        if self._disk is None:
            self.history.forget_after(round)
        else:
            with suppress(AtollError):  # what is still being written is undone, too
                await self._disk.settled()
            async with self._lock:
                await self._heavy(partial(self._disk.forget_after, round))
        self._donor.drop()

    @property
    def is_durable(self) -> bool:
        """Whether what is on the disk leads to the state that is here now; not where there is no disk."""
        return self._disk is not None and self._disk.is_durable(self.outer)

    async def save(self, *, is_last: bool = False) -> None:
        """Makes the outer state durable, if the node has a folder: see StateOnDisk.save.

        Its lock is held for as long as it takes to see what to write, whatever is written.
        """
        if self._disk is None:
            return
        await self._disk.save(
            self.outer, self._held, lock=self._lock, heavy=self._heavy, is_last=is_last
        )
        # A peer that asks for earlier ones gets them from the disk.
        self._held.forget_before(self.outer.round - 1)

    async def gains(
        self,
        ready: SpotCheckReady,
        places: Sequence[int],
        losses_at: Callable[[Vector, Sequence[int]], Awaitable[Sequence[float] | None]],
    ) -> Sequence[float] | None:
        """How much better ranks know samples [places] with a check's difference than against it, in nats.

        None where they do not measure.
        """
        span = self.outer.layout.fragments[ready.fragment].span
        losses = []
        for sign in (-1, 1):
            async with self._lock:
                beside = await self._heavy(partial(self.outer.beside, span, ready.half, sign))
            measured = await losses_at(beside, places)
            if measured is None:
                return None
            losses.append(measured)
        return [before - after for before, after in zip(*losses, strict=True)]

    def reach_back(self) -> tuple[RoundSpan, ...]:
        """Rounds to whose states this node can go back by itself, in order. Looks at the folder."""
        return self._catch_up.own.reach_back()

    @property
    def is_sending(self) -> bool:
        """Whether contributions or results are on their way to peers."""
        return not self._pushes.is_idle

    @property
    def refused(self) -> str:
        """Why this node does not take over the state that the swarm is said to have; empty if it would."""
        return self._catch_up.refused

    def waiting_for(self) -> str:
        """What the exchange waits for, in words; empty when for nothing."""
        if self._catch_up.waiting_for:
            return self._catch_up.waiting_for
        return waiting_for(self._round.state) if self._round is not None else ""

    # What peers ask for (TransferHandler)

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        """Decides on an offered payload by its header alone."""
        state = None if self._round is None else self._round.state
        if self._round is not None:
            self._round.look_at(header)
        if header.process_id != self._processes.get(sender, header.process_id):
            raise TransferRefusedError(
                f"it is of another process of {sender} than the one that is here"
            )
        if why := refusal(self._rules, state, sender, header) or self._donors.forgery(header):
            raise TransferRefusedError(why)
        assert self._round is not None, "nothing is taken for a round that is not open"
        return self._round.admit(sender, header)

    async def supply(self, sender: NodeId, want: Want) -> Payload | None:
        """A held result, or a part of an outer state or of the run's tokens."""
        match want:
            case WantResult():
                return await self._result(want)
            case WantManifest():
                return await self._donor.manifest(want)
            case WantChunk():
                return await self._donor.chunk(want)
            case WantChunkMap():
                return await self._donor.chunk_map(want)
            case WantInput():
                self.audits.note_asked()
                state = None if self._round is None else self._round.state
                return await self._heavy(partial(self.audits.supply, want, state))
            case WantTokens():
                return None if self._give_tokens is None else await self._give_tokens(sender, want)

    async def _result(self, want: WantResult) -> Payload | None:
        held = self._held.find(want.round, want.slice_index, want.digest)
        if held is not None or self._disk is None:
            return held
        find = self._disk.results.find
        return await self._heavy(partial(find, want.round, want.slice_index, want.digest))

    async def _opened_state(self, want: WantManifest) -> ServedState | None:
        """The newest state that is asked for: from disk, or copied where there is no folder."""
        if not self.outer.round and self._here.first_digest not in (None, self.outer.digest):
            return None  # it waits for the first weights itself
        if self._disk is not None:
            return await self._disk.served(
                want.includes, self.outer, lock=self._lock, heavy=self._heavy
            )
        if self._lock.locked():
            return None  # it is changing; two nodes that catch up must not wait for each other
        async with self._lock:
            return (
                await self._heavy(self.outer.snapshot) if want.includes(self.outer.round) else None
            )

    def _oldest_useful_round(self) -> int:
        """After earlier states there may soon be no results to replay."""
        newest_files = [] if self._disk is None else self._disk.snapshots.rounds()[:1]
        return min([self.outer.round - KEPT_ROUNDS // 2, *newest_files])


def _aged(news: RoundNews, seconds: float) -> RoundNews:
    """What was told so many seconds ago, as if it were told now."""
    if isinstance(news, SliceTakenOver):
        return replace(news, contribute_seconds=news.contribute_seconds - seconds)
    return news
