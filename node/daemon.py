"""The one place that knows session, island and exchange: a node from its first attach to its end.

Events arrive on the session. What they ask for is done one after the other (node.duties.duties); what must
not wait for that (a changed roster, participants that are gone) is done on arrival.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from node.disk.history import History, KeptRulings
from node.duties.duties import Duties
from node.duties.lasting_island import LastingIsland, Writer
from node.duties.work import CatchUpNeeded, PlanReceived
from node.exchange.exchange import Exchange
from node.exchange.outer import Outer
from node.exchange.peers import Patience, Transport
from node.exchange.round.state import Rules
from node.exchange.state.catch_up import CoordinatorCalls
from node.exchange.state.on_disk import StateOnDisk
from node.exchange.state.sources import FirstState, StateHere
from node.exchange.tokens import HeldTokens, PeerTokens
from node.heavy import Heavy, Meters
from node.island.data.island import SuppliedIsland
from node.island.data.places import how_to_have_the_same
from node.island.island import Island
from node.island.ranks.faults import TrainingDivergedError
from node.link.calls import Attachment, CoordinatorLink
from node.link.session import NodeSide, Session
from node.machine.addresses import address_changes, most_useful
from node.stopping import LOOK_SECONDS, NotSavedError
from protocol.errors import AtollError, SystemRefusedError
from protocol.run.run_spec import RunSpec
from protocol.service.notify import NOBODY, ServiceManager
from protocol.terminal.logging import call_in_every_line
from protocol.trust.credentials import Credentials
from protocol.trust.pki import pin_of
from protocol.trust.rulings import (
    Address,
    RulingKind,
    SignedRuling,
    in_words,
    moved_to,
    sets_rounds,
)
from protocol.wire.channel import retried
from protocol.wire.messages import (
    CommitsWanted,
    EvaluationAsked,
    Message,
    ParticipantsIdle,
    PunchAsked,
    RefetchAsked,
    RosterChanged,
    RosterTold,
    RoundCommitted,
    RoundOpened,
    RulingsTold,
    RunFinished,
)
from protocol.wire.rounds import MOST_MULTIADDRS, Commit, CorpusSummary, NodeId, PeerAddress
from protocol.wire.vitals import SHORT_WORDS, Announcement, ExchangeSpeed, Vitals

log = structlog.get_logger()

MAX_BROUGHT_BYTES = 1 << 20
"""Of commits in one message to a coordinator that lacks them."""


SHOW_SECONDS = 5.0
"""Between two times that the coordinator is shown where our router puts us; half a minute is too long."""

SEEN_SECONDS = 1.0
"""What a datagram takes at most, nearly always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node says of itself."""

    node_id: NodeId
    node_name: str
    public_key: bytes
    device: str
    num_ranks: int
    version: str
    mesh: str = ""  # in words
    congestion_control: str = ""  # of its host's TCP; empty: not known
    software: str = ""  # whose versions decide what its ranks compute
    exchange_speed: ExchangeSpeed | None = None  # of its machine; None: not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What this node has of the run's tokens and does about those that it has not; never of private data."""

    held: HeldTokens
    is_given: bool  # to peers, by its owner's word
    supplied: SuppliedIsland | None = None  # the node's island, where peers supply it


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What a node holds of the run."""

    outer: Outer
    disk: StateOnDisk | None  # None: nothing outlives the process
    history: History
    tokens: Tokens | None = None
    first_state: FirstState | None = None  # draws the weights of round 0, where nobody gives them
    rulings: KeptRulings | None = None  # None: in memory alone, of a coordinator in this process
    corpus: CorpusSummary | None = None  # what the ranks trained on last; None: they are waited for
    keep_corpus: Callable[[CorpusSummary], None] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterparts:
    """What a daemon talks to: the coordinator, the peers, its own ranks and its owner."""

    coordinator: CoordinatorLink
    transport: Transport
    island: Island
    why_paused: Callable[[], str] = lambda: ""  # by the owner: it trains nothing now
    manager: ServiceManager = NOBODY  # behind this process
    writer: Writer | None = None  # has the model write; None: nothing here can
    address_changes: Callable[[], AsyncIterator[None]] = address_changes  # of this machine


class Daemon:
    """A node from its first attach to the end of the run."""

    def __init__(
        self,
        *,
        facts: NodeFacts,
        spec: RunSpec,
        holdings: Holdings,
        counterparts: Counterparts,
        heavy: Heavy,
        meters: Meters,
        rng: random.Random,
    ) -> None:
        """The transport tells the meters when a body is on its way, if it can."""
        self._facts, self._spec, self._rng = facts, spec, rng
        self._run_digest = spec.digest()
        self._counts = meters.counts
        self._link, self._transport = counterparts.coordinator, counterparts.transport
        self._why_paused, self._manager = counterparts.why_paused, counterparts.manager
        self._address_changes = counterparts.address_changes
        self._outer, self._history = holdings.outer, holdings.history
        self._corpus, self._keep_corpus = holdings.corpus, holdings.keep_corpus
        self._rulings = holdings.rulings or KeptRulings(spec)
        self._asking = Patience(rng)
        self._session = self._session_of_its_own()
        self._island = LastingIsland(
            counterparts.island,
            meters.exchange_time,
            why_paused=self._why_paused,
            writer=counterparts.writer,
        )
        self._supplied = None if holdings.tokens is None else holdings.tokens.supplied
        self._peer_tokens = self._tokens_of_peers(holdings.tokens, heavy)
        self._exchange = self._exchange_of(holdings, heavy=meters.exchange_time.over(heavy))
        self._duties = Duties(
            node_id=facts.node_id,
            spec=spec,
            island=self._island,
            exchange=self._exchange,
            session=self._session,
            meters=meters,
            patience=self._asking,
            rulings=self._rulings,
        )
        self._exchange.spot_checks.on_ready = self._duties.put
        self._process_id = rng.getrandbits(63)
        self._outer.sign_as(self._process_id)
        self.called = facts.node_name
        """The node's name in the swarm: another node may have its own."""
        self._other_data: tuple[str, ...] = ()  # nodes that train on other data
        self._commits_wanted: asyncio.Queue[int] = asyncio.Queue()  # after these rounds
        self._is_ending = False
        self._unsaved: AtollError | None = None  # why the disk did not take what it held last
        self._drain_ended = asyncio.Event()  # it has taken as long as it may
        self._drain_timer: asyncio.TimerHandle | None = None

    def _session_of_its_own(self) -> Session:
        node = NodeSide(
            announce=self._announcement,
            vitals=self.vitals,
            on_attached=self._on_attached,
            on_message=self._on_message,
            ask_members=self._ask_members,
        )
        return Session(link=self._link, node=node, rng=self._rng, rulings=self._rulings)

    def _tokens_of_peers(self, tokens: Tokens | None, heavy: Heavy) -> PeerTokens | None:
        if tokens is None:
            return None
        return PeerTokens(
            held=tokens.held,
            is_given=tokens.is_given,
            node_id=self._facts.node_id,
            run_digest=self._run_digest,
            transport=self._transport,
            heavy=heavy,
            is_exchanging=lambda: self._exchange.is_sending,
            rng=self._rng,
        )

    def _exchange_of(self, holdings: Holdings, *, heavy: Heavy) -> Exchange:
        rules = Rules(
            node_id=self._facts.node_id,
            run_digest=self._run_digest,
            context=self._spec.model.context,
            uplink=self._outer.uplink,
            downlink=self._outer.downlink,
        )
        state = StateHere(
            outer=self._outer,
            history=self._history,
            disk=holdings.disk,
            heavy=heavy,
            first_state=holdings.first_state,
            first_digest=self._spec.first_digest,
        )
        coordinator = CoordinatorCalls(
            report=self._session.report,
            list_commits=self._list_commits,
            bring_back=self._bring_commits,
            patience=self._asking,
        )
        supply = None if self._peer_tokens is None else self._peer_tokens.supply
        return Exchange(
            rules,
            state,
            transport=self._transport,
            coordinator=coordinator,
            give_tokens=supply,
        )

    async def run(self) -> str:
        """Takes part until the run is finished; returns why it ended. Raises AtollError.

        Cancel it to leave at once, or `drain` it: it says goodbye and stops what it started. Raises
        NotSavedError, in both cases, where the disk does not take what it holds at the end.
        """
        why = "stopped by its owner"
        try:
            why = await self._live()
        except asyncio.CancelledError:
            if self._unsaved is None:
                raise
        except AtollError:  # which whoever has it stop takes for what stopping does to its ranks
            if self._unsaved is None or not self._duties.is_draining:
                raise
        if (refusal := self._unsaved) is not None:
            raise NotSavedError(
                f"{why}, and what it held last is not saved: {refusal.what}",
                next_step=refusal.next_step,
            ) from refusal
        return why

    async def _live(self) -> str:
        goodbye, why = "stopped by its owner", ""
        ranks = asyncio.ensure_future(self._bring_ranks_up())
        transport = asyncio.ensure_future(self._transport.start(self._exchange))
        tasks: list[asyncio.Task[Any]] = [ranks, transport]
        try:
            await (transport if self._corpus is not None else asyncio.gather(ranks, transport))
            work = asyncio.ensure_future(self._duties.run())
            session = asyncio.ensure_future(self._session.run())
            drain_ended = asyncio.ensure_future(self._drain_ended.wait())
            tasks = [
                *(work, session, drain_ended),
                asyncio.ensure_future(_failed(ranks)),
                asyncio.ensure_future(self._watch_transport()),
                asyncio.ensure_future(self._bring_back()),
                asyncio.ensure_future(self._heed_pauses()),
                asyncio.ensure_future(self._heed_addresses()),
                asyncio.ensure_future(self._show_outside()),
            ]
            if self._supplied is not None and self._peer_tokens is not None:
                tasks.append(
                    asyncio.ensure_future(
                        self._have_tokens_come(ranks, self._supplied, self._peer_tokens)
                    )
                )
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # raises what went wrong
            if self._duties.is_draining:
                tasks.append(asyncio.ensure_future(self._exchange.audits.answer()))
                await asyncio.wait((tasks[-1], drain_ended), return_when=asyncio.FIRST_COMPLETED)
                goodbye = self._duties.how_drained()
                return goodbye
            await self._session.flush(timeout_seconds=5)
            goodbye = "the run is finished"
            why = f"{goodbye}: {work.result()}"
            return work.result()
        except TrainingDivergedError as error:
            # It is of the run, not of this machine: its owner may know.
            goodbye, why = f"stopped by an error: {error.what}", str(error)
            raise
        except Exception as error:
            goodbye = "stopped by an error, which its log tells"
            why = f"the node was stopped by an error: {error}"
            raise
        finally:
            await self._leave(tasks, goodbye=goodbye, why=why or f"the node was {goodbye}")

    async def _leave(self, tasks: Sequence[asyncio.Task[Any]], *, goodbye: str, why: str) -> None:
        """Ends all that runs, each whatever becomes of the others; the disk gets what is held last."""
        self._is_ending = True
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        for task in tasks:
            if not task.cancelling():  # a second time would break off what it is ending
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.leave(goodbye)
        await self._exchange.stop()
        faults = await asyncio.gather(
            self._transport.stop(),
            self._island.stop(why),
            self._duties.saves.at_end(),
            return_exceptions=True,
        )
        for fault in faults:
            if isinstance(fault, AtollError):
                log.error("not stopped cleanly", why=str(fault))
            elif isinstance(fault, BaseException):
                log.error("not stopped cleanly", exc_info=fault)
        self._unsaved = faults[-1] if isinstance(faults[-1], AtollError) else None

    async def _bring_ranks_up(self) -> None:
        """Starts the ranks. A node that was here before takes part meanwhile, and trains once they are up.

        What it said of its data then was what its ranks had the last time.
        """
        told, corpus = self._corpus, await self._island.start()
        self._train_on(corpus)
        if told not in (None, corpus):
            self._session.move()  # it attaches anew, with what is right
        self._island.come_up()
        if told is None:
            await self._island.adopt()
            return
        log.info("the ranks are up")
        await self._session.tell_vitals()  # plans count on them from now on

    async def _have_tokens_come(
        self, ranks: asyncio.Future[None], supplied: SuppliedIsland, source: PeerTokens
    ) -> None:
        """Once the ranks are up, or wait for tokens: both may start them."""
        await ranks
        await supplied.supplied_by(source, self._train_on)

    def _train_on(self, corpus: CorpusSummary) -> None:
        self._corpus = corpus
        if corpus.num_samples:
            self._keep_corpus(corpus)

    def drain(self, within_seconds: float) -> bool:
        """Lets the node leave with its work; asked again, the new limit counts.

        It trains no further, contributes what it has, and `run` returns once the round is committed
        and applied, and auditors have what its results were made of, or after so long. A helper first waits
        for a plan that may be on its way to it. False when there is nothing of this, or no time: then cancel
        `run`.
        """
        if self._is_ending:
            return True
        if not self._duties.is_draining:
            is_wanted = self._duties.has_to_finish or self._exchange.audits.may_be_asked
            if within_seconds <= 0 or not (is_wanted or not self._facts.num_ranks):
                return False
            self._duties.drain()
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        loop = asyncio.get_running_loop()
        self._drain_timer = loop.call_later(within_seconds, self._drain_ended.set)
        return True

    async def _heed_pauses(self) -> None:
        """Ends training when the node's owner pauses it, and lets the coordinator know of each change."""
        was_paused = ""
        while True:
            why = self._why_paused()
            if bool(why) != bool(was_paused):
                log.info(
                    "paused by its owner" if why else "goes on", **({"why": why} if why else {})
                )
                if why:
                    self._island.cut_short()
                await self._session.tell_vitals()
            was_paused = why
            await asyncio.sleep(LOOK_SECONDS)

    async def _heed_addresses(self) -> None:
        """Attaches anew where this machine's addresses change: peers are told the new ones by it."""
        async for _ in self._address_changes():
            if await self._transport.heed_addresses():
                told = self._transport.multiaddrs
                log.info("this machine's addresses have changed", peers_are_told=told)
                self._session.move()
        await asyncio.Event().wait()  # there are none where nobody tells of them

    async def _show_outside(self) -> None:
        """Has the coordinator see where this machine's router puts it, where that matters."""
        while True:
            self._transport.heed_outside(self._link.outside)
            if await self._transport.show_outside(self._link.observers):
                await asyncio.sleep(SEEN_SECONDS)
                await self._session.tell_vitals()  # what was seen counts with a heartbeat
            await asyncio.sleep(SHOW_SECONDS)

    async def _watch_transport(self) -> None:
        reason = await self._transport.wait_failed()
        raise SystemRefusedError(
            f"the transport to peers has failed: {reason}", next_step="run 'atoll node start' again"
        )

    # What the session asks

    def _announcement(self) -> Announcement:
        assert self._corpus is not None
        outer_round, outer_digest = self._outer.position
        return Announcement(
            node_name=self._facts.node_name,
            address=PeerAddress(
                public_key=self._facts.public_key,
                multiaddrs=most_useful(self._transport.multiaddrs, MOST_MULTIADDRS),
            ),
            run_digest=self._run_digest,
            layout=self._outer.layout.summary(),
            codecs=(self._outer.uplink.name, self._outer.downlink.name),
            corpus=self._corpus,
            outer_round=outer_round,
            outer_digest=outer_digest,
            outer_incarnation=self._history.incarnation_at(outer_round),
            device=self._facts.device,
            num_ranks=self._facts.num_ranks,
            version=self._facts.version,
            process_id=self._process_id,
            cannot_train=not self._island.ability.trains,
            cannot_evaluate=not self._island.ability.evaluates,
        )

    def vitals(self) -> Vitals:
        """How the node is doing now."""
        progress = self._duties.progress
        outer_round, outer_digest = self._outer.position
        return Vitals(
            outer_round=outer_round,
            outer_digest=outer_digest,
            outer_incarnation=self._history.incarnation_at(outer_round),
            activity="restarting ranks" if self._island.is_restarting else self._duties.activity,
            waiting_for=self._waiting_for(),
            inner_step=self._duties.inner_step,
            loss=progress.loss if progress else 0.0,
            tokens_per_second=progress.tokens_per_second if progress else 0.0,
            wire=self._counts.totals(),
            link=self._transport.seen(),
            utilisation=self._duties.utilisation,
            mesh=self._facts.mesh,
            congestion_control=self._facts.congestion_control,
            software=self._facts.software or self._island.ability.software,
            let_go_rounds=self._outer.owing.let_go_rounds,
            exchange_speed=self._facts.exchange_speed,
            reach_back=self._exchange.reach_back(),
            cannot_train=not self._island.ability.trains,
            cannot_evaluate=not self._island.ability.evaluates,
            evaluates_by=self._island.ability.evaluates_by,
        )

    def _waiting_for(self) -> str:
        if self._supplied is not None and (words := self._supplied.waiting_for):
            return words
        activity = self._duties.activity
        if activity == "training":
            return ""
        if len(activity) > SHORT_WORDS:
            return activity  # there it is cut off
        return (
            self._exchange.waiting_for()
            or self._duties.waiting_for
            or ("the next plan" if activity == "waiting" else "")
        )

    async def _ask_members(self, credentials: Credentials) -> Sequence[Address]:
        return await self._transport.coordinator_addresses(pin_of(credentials.server_root_pem))

    def _on_attached(self, attachment: Attachment) -> None:
        log.info(
            "attached", session=attachment.session_id, committed_round=attachment.committed_round
        )
        called = attachment.node_name or self._facts.node_name
        if called not in (self._facts.node_name, self.called):
            log.warning(
                f"another node is called {self._facts.node_name}, so the swarm calls this one {called}",
                next_step="write another name into node.toml, and restart the node, to choose it yourself",
            )
        self.called = called
        call_in_every_line(called)  # two nodes of a machine have its name at first
        self._manager.ready(f"takes part as {called}, from round {attachment.committed_round} on")
        if attachment.other_data_names and attachment.other_data_names != self._other_data:
            log.warning(
                "other nodes train on other data: the ledger leases samples by number, and the same number "
                "is another sample here",
                nodes=", ".join(attachment.other_data_names),
                next_step=how_to_have_the_same(self._spec.data),
            )
        self._other_data = attachment.other_data_names
        if attachment.committed_round > self._outer.round:
            self._duties.put(CatchUpNeeded(round=attachment.committed_round))

    def _on_message(self, message: Message) -> None:
        self._asking.tell()
        match message:
            case RosterTold(members=members):
                self._exchange.set_roster(members)
                if self._peer_tokens is not None:
                    self._peer_tokens.set_roster(members)
            case RulingsTold(rulings=rulings, signatures=signatures):
                signed = zip(rulings, signatures, strict=True)
                for ruling in self._rulings.take(
                    [SignedRuling(ruling=r, signature=s) for r, s in signed]
                ):
                    log.info("ruled", number=ruling.number, what=in_words(ruling), by=ruling.by)
                    if ruling.kind is RulingKind.ROLLED_BACK:
                        self._duties.go_back(ruling)
                    if sets_rounds(ruling):
                        self._duties.end.go_on(self._rulings.last_round)
                    if (address := moved_to(ruling)) is not None:
                        self._link.moves_to(address)
            case ParticipantsIdle(round=round, node_ids=late) if self._facts.node_id in late:
                self._duties.hand_in(round)  # others have waited for this node long enough
            case CommitsWanted(after_round=after_round):
                log.warning("the coordinator lacks commits", after_round=after_round)
                self._commits_wanted.put_nowait(after_round)
            case RoundCommitted(commit=commit):
                self._rulings.check_commit(commit)
                self._duties.decided(commit.round)
                self._duties.put(message)
            case RoundOpened(plan=plan):
                self._transport.set_ways(plan.ways)
                now = asyncio.get_running_loop().time()
                self._duties.put(PlanReceived(plan=plan, at=now))
            case PunchAsked(node_id=peer, multiaddr=multiaddr):
                self._transport.punch(peer, multiaddr)
            case EvaluationAsked() | RefetchAsked() | RunFinished():
                self._duties.put(message)
            case RosterChanged():
                pass  # the link tells whole rosters
            case _:  # news of a round, and checks of others' work
                self._exchange.tell(message)

    async def _bring_back(self) -> None:
        """Gives a coordinator that lost commits those that our state builds on, whenever it asks."""
        while True:
            after_round = await self._commits_wanted.get()
            while not self._commits_wanted.empty():  # the newest wish counts
                after_round = self._commits_wanted.get_nowait()
            await self._bring_commits(after_round)

    async def _bring_commits(self, after_round: int) -> bool:
        return await self._session.bring_back(
            lambda known: self._history.after(known, max_bytes=MAX_BROUGHT_BYTES), after_round
        )

    async def _list_commits(self, after_round: int) -> tuple[Commit, ...]:
        """Outlives a coordinator that is away for a while."""
        commits = await retried(
            lambda: self._link.list_commits(after_round),
            is_wanted=lambda: True,
            random=self._rng,
            on_wait=lambda error, _: log.info("no list of commits yet", why=error.what),
        )
        for commit in commits:
            self._rulings.check_commit(commit)
        return commits


async def _failed(task: asyncio.Future[None]) -> None:
    """Raises what the task has raised; never returns where it went well."""
    await task
    await asyncio.Event().wait()
