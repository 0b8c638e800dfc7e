"""What a node does one thing after the other: takes part in rounds, applies commits, catches up.

The island and the outer state are never in two rounds at once: events that ask for something wait
here for their turn. What they are, and when all ends, is in node.duties.work; how they come is the daemon's
business.
"""

import asyncio
from typing import TYPE_CHECKING

import structlog

from node.disk.history import KeptRulings
from node.duties.lasting_island import LastingIsland, Measuring
from node.duties.work import (
    Ahead,
    AheadFailed,
    CatchUpNeeded,
    Drain,
    PlanReceived,
    PlansOver,
    RoundTimes,
    RunEnd,
    Saves,
    Work,
    by_rules,
    counted,
    counted_anew,
    incomplete,
    log_fields_of,
    progress_of,
    trained_of,
    work_ahead_of,
    work_of,
)
from node.exchange.exchange import Exchange
from node.exchange.peers import Patience
from node.exchange.spot_checks import SpotCheckReady
from node.heavy import Meters
from node.island.island import InnerReport, Progress
from node.link.session import Session
from protocol.run.run_spec import RunSpec
from protocol.trust.rulings import Ruling, in_words
from protocol.wire.messages import (
    Applied,
    EvaluationAsked,
    ParticipantsIdle,
    RefetchAsked,
    RoundCommitted,
    RunFinished,
    Trained,
)
from protocol.wire.payload import WireTotals, grown
from protocol.wire.rounds import Assignment, Commit, Digest, NodeId, Plan

if TYPE_CHECKING:
    from protocol.wire.vitals import Utilisation

log = structlog.get_logger()

REFETCH_PAUSE_SECONDS = 2.0
"""Before peers are asked a second time for a state that nobody supplied; later pauses are longer."""


class Duties:
    """Work in the order in which it comes. `activity` and `progress` say what is being done.

    `end` hears that the run goes on, and `saves` is told to save when nothing moves the state any more.
    """

    def __init__(
        self,
        *,
        node_id: NodeId,
        spec: RunSpec,
        island: LastingIsland,
        exchange: Exchange,
        session: Session,
        meters: Meters,
        patience: Patience,
        rulings: KeptRulings,
    ) -> None:
        self.inner_step = 0
        self.progress: Progress | None = None
        self.utilisation: Utilisation | None = None  # of the round that ended last
        self.last_planned_round = 0
        self._planned_base: Digest | None = None  # of the last planned round
        self._doing = "starting"
        self._node_id = node_id
        self._context = spec.model.context
        # Whether ranks go on from more than the global parameters.
        self._keeps_local = spec.exchange.fragments > 1 or spec.exchange.overlap != "none"
        self._island = island
        self._exchange = exchange
        self._outer = exchange.outer
        self._history = exchange.history
        self._session = session
        self._counts, self._exchange_time = meters.counts, meters.exchange_time
        self._counted: WireTotals = {}  # when the outer state moved the last time
        self._times = RoundTimes()
        self._work: asyncio.Queue[Work] = asyncio.Queue()
        self._ahead = Ahead(
            island, self._on_progress, on_fault=lambda: self._work.put_nowait(AheadFailed())
        )
        self._measuring = Measuring(
            island,
            exchange,
            session.report,
            batch=spec.inner.batch,
            has_private_data=spec.data.private,
            is_last=lambda round: round >= rulings.spec_in(round).run.rounds,
        )
        self._checks = self._measuring.checks
        self._trains_for: int | None = None  # the round, while ranks train
        self._trained: Trained | None = None  # in the round that was planned last
        self._published_round = 0  # the last one that the ranks published for
        self._unanswered: RefetchAsked | None = None  # nobody supplied the state yet
        self._num_unanswered = 0  # times in a row
        self._patience = patience
        self._rulings = rulings
        self._spec = spec
        self._drain = Drain(session, on_over=lambda: self.put(PlansOver()))
        self.saves = Saves(exchange)
        self.end = RunEnd()

    @property
    def activity(self) -> str:
        """What is being done, for people."""
        if self._doing in ("waiting", "training") and not self._island.ability.trains:
            return f"waiting for {self._island.ability.waits_for}"
        if self._doing in ("training", "evaluating") and self._island.is_without_tokens:
            return "waiting for the run's tokens"
        is_ahead = self._doing == "waiting" and self._ahead.is_training
        return "training ahead" if is_ahead else self._doing

    @property
    def waiting_for(self) -> str:
        """Who has to come before this node gets the state that it was asked to fetch; empty where nobody."""
        if (asked := self._unanswered) is None or self._doing != "refetching":
            return ""
        if self._is_first(asked):
            return "a node that has the weights that the run begins with"
        return f"a node that holds the state after round {asked.round}"

    def put(self, work: Work) -> None:
        """Adds something to be done after all that was added before. The end of the run limits that too."""
        if (
            isinstance(work, PlanReceived)
            and not self._drain.has_refused
            and self._only_reduces(work.plan)
        ):
            self._drain.asked_round = work.plan.round
        self._work.put_nowait(work)
        if isinstance(work, RunFinished):
            self.end.hear(work)

    def decided(self, round: int) -> None:
        """A round is committed: training for it on would only keep this node from the next one.

        What it has trained stays in its residual, like any work that no commit took.
        """
        trains_for = self._ahead.round if self._ahead.is_training else self._trains_for
        if trains_for is not None and trains_for <= round:
            log.info("round decided without us", round=round)
            self._island.cut_short()

    def hand_in(self, round: int) -> None:
        """What is trained of the round until now is contributed: nobody waits for much more."""
        if self._trains_for == round:
            log.info("handing in what is trained: the others are done", round=round)
            self._island.cut_short()

    def go_back(self, ruling: Ruling) -> None:
        """The run goes back: what is trained now counts no more, and this node follows in its turn."""
        is_older = self._history.incarnation_at(self._outer.round) < ruling.incarnation
        is_planned = self.is_round_in_flight and self.last_planned_round >= ruling.from_round
        if not self._holds_undone() and not (is_planned and is_older):
            return  # a ruling that is told again, for example
        log.warning("the run goes back", what=in_words(ruling), by=ruling.by)
        self._island.cut_short()
        self.put(
            RefetchAsked(
                round=ruling.from_round - 1,
                outer_digest=Digest(bytes.fromhex(ruling.outer_digest)),
                reason=in_words(ruling),
            )
        )

    def _holds_undone(self) -> bool:
        """Whether the state is one that the run has gone back from."""
        round = self._outer.round
        return self._rulings.undo(round, self._history.incarnation_at(round))

    def _only_reduces(self, plan: Plan) -> bool:
        assignment = plan.assignment_of(self._node_id)
        return assignment is not None and not assignment.trains and plan.round > self._outer.round

    @property
    def has_to_finish(self) -> bool:
        """Whether a round counts on this node: one in flight, or that a helper was just asked to reduce for.

        A node that trains would only come to such a round to leave it.
        """
        return self.is_round_in_flight or self._drain.counts_on_us(self._outer.round)

    @property
    def is_round_in_flight(self) -> bool:
        """Whether this node takes part in a round that it has not applied yet."""
        return self.last_planned_round > self._outer.round

    @property
    def is_draining(self) -> bool:
        """Whether this node leaves."""
        return self._drain.is_begun

    def drain(self) -> None:
        """Ends the round in flight with what is trained of it, and begins nothing new."""
        round = max(self.last_planned_round, self._outer.round)
        self._drain.begin(round, has_to_finish=self.has_to_finish)
        self._island.halt()

    def how_drained(self) -> str:
        """How far a drain has come, in words."""
        if not self.last_planned_round:
            return "stopped by its owner, with no round in flight"
        before_or_after = "before" if self.is_round_in_flight else "after"
        return (
            f"stopped by its owner, {before_or_after} the commit of round {self.last_planned_round}"
        )

    async def run(self) -> str:
        """Does its duties until the run is finished, or a drain is over; returns why it ended.

        Raises IncompleteError when the run is finished and nobody supplies its final state.
        """
        try:
            async with self.end.limiting():
                return await self._run()
        except TimeoutError:
            if self.end.missed is None:
                raise
            await self.saves.done()
            raise incomplete(self.end.missed, self._outer.round) from None
        finally:
            self._drain.cancel()
            self._ahead.cancel()
            await self._measuring.end()

    async def _run(self) -> str:
        while True:
            self._doing = "waiting"
            if self.is_draining and not self.has_to_finish:
                if self._trained is not None and self._trained.tokens > 0:
                    await self._island.keep(self.last_planned_round, is_last=True)
                return self.how_drained()
            has_time = self._work.empty() and self.is_round_in_flight and not self.is_draining
            if has_time and self._checks.of is not None:
                await self._check(self._checks.of)
                continue
            await self._ahead.resume()
            match await self._work.get():
                case EvaluationAsked() | SpotCheckReady() if self.is_draining:
                    pass
                case PlanReceived(plan=plan) if (
                    self.is_draining and plan.round != self._drain.asked_round
                ):
                    pass
                case PlanReceived() as received:
                    await self._take_part(received)
                    if received.plan.round == self._drain.asked_round:
                        self._drain.asked_round = 0
                case RoundCommitted(commit=commit):
                    await self._apply(commit)
                case EvaluationAsked() as wanted:
                    await self._evaluate(wanted)
                case SpotCheckReady() as ready:
                    self._checks.add(ready)
                case CatchUpNeeded(round=round):
                    await self._catch_up(round)
                case RefetchAsked() as asked:
                    await self._refetch(asked)
                case RunFinished() as finished:
                    if await self._has_final_state(finished):
                        return finished.reason
                case AheadFailed():
                    await self._ahead.pause()
                case PlansOver():
                    pass

    async def _has_final_state(self, finished: RunFinished) -> bool:
        """Takes over the final state, however often it must be asked for; the limit ends that.

        False when the run goes on: it was extended, or the coordinator had closed the last round without
        its nodes, from an older copy of its database, and has taken over the commit that this node or
        another holds.
        """
        asked = 0
        if self.end.told == finished:
            await self._catch_up(finished.round)
        while self.end.told == finished and not self._holds(finished):
            self._doing = "refetching"
            if await self._exchange.refetch(finished.round, finished.outer_digest):
                await self._adopted()
                if not self._holds(finished):
                    log.warning("the run goes on: its end was taken back", round=finished.round)
                    if self.end.told == finished:
                        self.end.forget()
                    return False
            else:
                asked += 1
                await self._patience.pause(asked, first_seconds=REFETCH_PAUSE_SECONDS)
                await self._catch_up(finished.round)
        if self._trained is not None and self._trained.tokens > 0:  # for the day it is extended
            await self._island.keep(self.last_planned_round, is_last=True)
        await self.saves.done()
        if self.end.told != finished:
            return False
        log.info("run finished", round=finished.round, why=finished.reason)
        return True

    def _holds(self, finished: RunFinished) -> bool:
        return self._outer.position == (finished.round, finished.outer_digest)

    async def _take_part(self, received: PlanReceived) -> None:
        plan = received.plan
        if plan.num_rulings > self._rulings.number:
            log.warning(
                "plan refused: it goes by rulings that are not here",
                round=plan.round,
                rulings=plan.num_rulings,
                here=self._rulings.number,
            )
            return
        if self._rulings.undo_plan(plan):
            return  # it was on its way when the run went back
        assignment = plan.assignment_of(self._node_id)
        if assignment is None or plan.round <= self._outer.round:
            return
        is_planned = (plan.round, plan.base_digest) == (self.last_planned_round, self._planned_base)
        if is_planned:  # else it is later, or this node has gone back since to another history
            await self._take_part_again(received, assignment)
            return
        # A commit that passed while the session was broken. Even a void one, which leaves the
        # digest as it is, must be heard of before the plan: it settles what the round before owes.
        await self._catch_up(plan.round - 1)
        if (plan.round - 1, plan.base_digest) != (self._outer.round, self._outer.digest):
            log.warning("plan refused: its base is not our state", round=plan.round)
            return
        plan = received.plan_at(asyncio.get_running_loop().time())
        self.last_planned_round, self._planned_base = plan.round, plan.base_digest
        self._trained = None
        await self._exchange.open_round(plan)
        trained = await self._train(plan, assignment)
        if trained.tokens > 0:
            self._published_round = plan.round
            await self._island.keep(plan.round)
            ahead = None if self.is_draining else work_ahead_of(plan, self._node_id)
            self._ahead.lease(None if ahead is None else by_rules(ahead, self._rulings, self._spec))
            await self._ahead.resume()
        self._doing = "contributing"
        log.debug("phase", phase="contributing", round=plan.round)
        await self.saves.before_commit_of(plan)
        self._trained = trained_of(trained)
        if not self._island.ability.trains:  # before this round can close, and the next count on it
            await self._session.tell_vitals()
        self._session.report(plan.round, self._trained)
        if trained.tokens > 0:
            await self._exchange.contribute(samples=trained.samples, tokens=trained.tokens)
        else:  # others hear of it from the coordinator; slices that this node reduces wait for it too
            self._exchange.tell(ParticipantsIdle(round=plan.round, node_ids=(self._node_id,)))

    async def _train(self, plan: Plan, assignment: Assignment) -> InnerReport:
        await self._ahead.pause()
        self._ahead.lease(None)
        self._times.begin(
            asyncio.get_running_loop().time(), exchange_seconds=self._exchange_time.seconds
        )
        self._doing, self.inner_step = "training", 0
        log.debug("phase", phase="training", round=plan.round)
        self._trains_for = plan.round
        report = await self._island.train_and_publish(
            by_rules(work_of(plan, assignment), self._rulings, self._spec),
            plan.fragment,
            self._on_progress,
        )
        trained = counted(report, assignment)
        self._trains_for = None
        self._times.trained(trained)
        if trained.tokens > 0 and (self.progress is None or self.progress.round != plan.round):
            self._on_progress(progress_of(trained))  # the round was too short for ranks to tell any
        if trained.skipped_steps:
            log.warning(
                "inner steps left out: gradients did not fit into fp16",
                round=plan.round,
                skipped=trained.skipped_steps,
                of=trained.inner_steps,
            )
        return trained

    async def _take_part_again(self, received: PlanReceived, assignment: Assignment) -> None:
        """A plan comes again after every break of the session, and then nothing need be done.

        Unless the coordinator went back to an older copy of its database: then the reports of the
        round are lost, and the plan may be another. What was trained is contributed all the same.
        """
        plan, trained = received.plan, self._trained
        if trained is None:
            return
        if self._exchange.is_open_by(plan):
            self._session.repeat(plan.round)
            return
        log.warning("the plan of the round has changed", round=plan.round)
        await self._exchange.open_round(received.plan_at(asyncio.get_running_loop().time()))
        self._session.withdraw(plan.round)
        self._trained = counted_anew(trained, assignment, context=self._context)
        self._session.report(plan.round, self._trained)
        if self._trained.tokens > 0:
            await self._exchange.contribute(
                samples=self._trained.samples, tokens=self._trained.tokens
            )

    def _on_progress(self, progress: Progress) -> None:
        self.progress = progress
        self.inner_step = progress.inner_step

    async def _apply(self, commit: Commit) -> None:
        is_undone = self._rulings.undo(commit.round, commit.incarnation)
        if commit.round <= self._outer.round or is_undone:
            return
        self._doing = "applying"
        log.debug("phase", phase="applying", round=commit.round)
        is_published = commit.round == self._outer.round + 1 == self._published_round
        if self.is_draining or not is_published:
            await self._hand_in()
        was_undone = self._holds_undone()
        await self._exchange.apply(commit)
        await self._begin_anew_if(was_undone)
        if is_published and self._keeps_local and self._outer.round == commit.round:
            await self._adopted(commit)
        else:  # by a leap, too, which replaces other fragments than this
            await self._adopted()

    async def _catch_up(self, round: int) -> None:
        if round > self._outer.round:
            self._doing = "catching up"
            log.debug("phase", phase="catching up", round=round)
            await self._hand_in()
            was_undone = self._holds_undone()
            await self._exchange.catch_up(round)
            await self._begin_anew_if(was_undone)
            await self._adopted()

    async def _hand_in(self) -> None:
        """What the ranks hold and no round has published is owed from here on: they lose it now.

        Commits that came without us change fragments under them, and who takes over a later state
        has nothing else to tell what was trained.
        """
        if self._keeps_local and self._island.has_progress:
            await self._ahead.pause()
            await self._exchange.take_in(self._island.publish)

    async def _refetch(self, asked: RefetchAsked) -> None:
        is_first = self._is_first(asked)
        if asked is not self._unanswered:
            self._num_unanswered = 0
            if is_first:
                log.info("fetching the weights that the run begins with")
            else:
                log.warning(
                    "asked to fetch the outer state anew", round=asked.round, why=asked.reason
                )
        self._doing = "refetching"
        await self._ahead.pause()
        before, was_undone = (self._outer.round, self._outer.digest), self._holds_undone()
        is_done = await self._exchange.refetch(asked.round, asked.outer_digest)
        await self._begin_anew_if(was_undone)
        if (self._outer.round, self._outer.digest) != before:
            self._island.forget()  # trained from a state that is not the swarm's
            self._published_round = 0
            await self._adopted()
        self._unanswered = None
        if is_done:
            self._num_unanswered = 0
        else:
            await self._refetch_later(asked, is_first=is_first)

    def _is_first(self, asked: RefetchAsked) -> bool:
        """Whether it is the weights that the run begins with."""
        return not self._outer.round and asked.outer_digest == self._spec.first_digest

    async def _refetch_later(self, asked: RefetchAsked, *, is_first: bool) -> None:
        """Tries again after what has come meanwhile, which may make it needless."""
        self._unanswered = asked
        self._num_unanswered += 1
        if is_first and self._num_unanswered == 1:
            log.info(
                "no node here has the weights that the run begins with; this one waits",
                next_step="start one of them with --weights, as 'atoll init' has printed it",
            )
        elif self._num_unanswered == 1 and not self._exchange.refused:
            log.warning(
                "nobody here supplies the state that this node was asked to fetch",
                round=asked.round,
                waits_for=f"a node that holds the state after round {asked.round}, or a "
                "coordinator that knows of a later one; it asks ever more rarely, and at once "
                "when the coordinator tells something new",
            )
        await self._patience.pause(self._num_unanswered, first_seconds=REFETCH_PAUSE_SECONDS)
        self.put(asked)

    async def _begin_anew_if(self, was_undone: bool) -> None:
        """Drops all that is left of undone rounds, once the state is none of theirs any more.

        What was owed has gone with the state. Ranks lose what their inner optimizers learnt since.
        """
        if not was_undone or self._holds_undone():
            return
        round = self._outer.round
        log.warning("went back", round=round, dropped="what was owed and learnt in undone rounds")
        self._session.withdraw_after(round)
        self._trained, self._published_round = None, 0
        self.last_planned_round, self._planned_base = round, None
        self._ahead.lease(None)
        self._checks.forget_after(round)
        await self._exchange.forget_after(round)
        await self._island.begin_anew(round)

    async def _adopted(self, commit: Commit | None = None) -> None:
        """The outer state moved: the coordinator learns it, then ranks take it over, then the disk.

        The next plan comes while ranks end their inner step, and waits here until they have adopted.
        `commit` is what moved it, if ranks have published for that round: then they take over its
        fragment. Else all of it.
        """
        await self.saves.raise_refusal()  # a full disk ends the node before it is in another plan
        incarnation = self._history.incarnation_at(self._outer.round)
        applied = Applied(
            outer_digest=self._outer.digest, incarnation=incarnation, wire=self._wire_of_round()
        )
        self._session.report(self._outer.round, applied)
        again = {"incarnation": incarnation} if incarnation else {}
        log.info("applied", round=self._outer.round, digest=self._outer.digest.hex()[:12], **again)
        if not self.is_draining:  # then they do not train any more
            log.debug("phase", phase="adopting", round=self._outer.round)
            await self._adopt(commit)
        await self.saves.begin()
        self._checks.applied(self._outer.round)

    def _wire_of_round(self) -> WireTotals:
        """All bytes so far; logs those since the round before."""
        totals = self._counts.totals()
        news = grown(self._counted, totals)
        self._counted = totals
        sent = {f"{kind}_sent": sent for kind, (sent, _) in news.items() if sent}
        received = {
            f"{kind}_received": received for kind, (_, received) in news.items() if received
        }
        log.info("wire", round=self._outer.round, **sent, **received)
        return totals

    async def _adopt(self, commit: Commit | None) -> None:
        await self._ahead.pause()
        clock = asyncio.get_running_loop().time
        began_at = clock()
        if commit is None:
            await self._island.adopt()
        else:
            await self._island.adopt(commit.fragment, is_taken=self._outer.owing.is_taken)
        if self._ahead.round is not None and self._ahead.round <= self._outer.round:
            self._ahead.lease(None)  # decided without us
        self._times.adopted(clock() - began_at)
        self.utilisation = self._times.end(
            self._outer.round,
            clock(),
            compute_seconds=self._island.compute_seconds,
            exchange_seconds=self._exchange_time.seconds,
        )
        if self.utilisation is not None:
            log.info("utilisation", **log_fields_of(self.utilisation))

    async def _evaluate(self, asked: EvaluationAsked) -> None:
        if asked.round != self._outer.round:
            return  # the coordinator asks another node when its time limit passes
        self._doing = "evaluating"
        await self._ahead.pause()
        await self._measuring.evaluate(asked)

    async def _check(self, node_id: NodeId) -> None:
        """Has ranks measure a piece of what a member has learned of its lease, at the state that is here now.

        This node waits for others meanwhile: before it has trained for a round, that is what it owes.
        """
        self._doing = f"checking what {node_id[:12]} trained"
        await self._ahead.pause()
        await self._checks.go_on()
