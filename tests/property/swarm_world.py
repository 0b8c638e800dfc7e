"""A swarm in a hostile world: nodes that die, lie and come back, messages that are lost or late.

It puts every event through the core, and has each step checked. What nodes hear of it stands in
swarm_edge, how honest ones behave in swarm_nodes; what must hold of rounds and samples, in swarm_audit, by
the world's own swarm_books; what must hold of sessions and time, in swarm_laws.
"""

from dataclasses import dataclass, replace
from random import Random

import pytest

from coordinator.swarm.events import (
    Action,
    Attached,
    BaseLearned,
    CommitLearned,
    Detached,
    Event,
    HeartbeatSeen,
    HistoryTold,
    OpenSession,
    Reported,
    Ruled,
    Started,
    StreamBroken,
    Tell,
    Ticked,
)
from coordinator.swarm.members import PRESENT
from coordinator.swarm.state import Rules, SwarmState
from coordinator.swarm.transition import initial_state, next_deadline, step
from protocol.errors import CopyAttachedError, SessionEndedError
from protocol.wire.messages import (
    Evaluated,
    EvaluationAsked,
    ParticipantsIdle,
    RoundCommitted,
    RoundOpened,
    RunFinished,
    SliceTakenOver,
)
from protocol.wire.rounds import Commit, Digest, NodeId, PeerAddress
from tests.property import swarm_audit as audit
from tests.property.sealing import Sealer
from tests.property.swarm_books import CODECS, LAYOUT, Books, is_void
from tests.property.swarm_edge import obey
from tests.property.swarm_laws import MembersStay, check_deadline, check_leases
from tests.property.swarm_nodes import CONTEXT, SimulatedNode, Swarm, sender_of

RUN = Digest(b"r" * 32)
PAUSE_SECONDS = 15.0
MOST_DEADLINES = 100
"""In a week without nodes there may be a deadline every few seconds, and each is as the one before."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy of the coordinator's database, and of the books at that moment."""

    state: SwarmState
    now: float
    books: Books


class World:
    """Nodes, messages under way, and the coordinator's core."""

    def __init__(
        self,
        *,
        num_nodes: int,
        min_nodes: int,
        total_rounds: int,
        adapts_deadlines: bool,
        has_overlap: bool,
        round_steps: int | None = None,
        has_helper: bool = False,
        audited_share: float = 0.0,
    ) -> None:
        rules = Rules(
            total_rounds=total_rounds,
            min_nodes=min_nodes,
            inner_steps=3,
            batch=2,
            context=CONTEXT,
            train_seconds=20,
            contribute_seconds=25,
            commit_seconds=30,
            apply_seconds=10,
            lease_seconds=8,
            evaluate_every_rounds=2,
            adapts_deadlines=adapts_deadlines,
            floor_seconds=3,
            has_overlap=has_overlap,
            round_steps=round_steps,
            layout=LAYOUT,
            codecs=CODECS,
            audited_share=audited_share,
        )
        self._sealer = Sealer()
        self._members = MembersStay()
        self.state: SwarmState = self._sealer.seal(initial_state(rules, RUN))
        self.now = 0.0
        self.nodes = {
            NodeId(f"n{i}"): SimulatedNode(node_id=NodeId(f"n{i}"), seconds_per_inner_step=float(i))
            for i in range(num_nodes)
        }
        if has_helper:
            helper = SimulatedNode(node_id=NodeId("h"), is_helper=True)
            self.nodes[helper.node_id] = helper
        self.under_way: list[tuple[int, Event]] = []  # with the session that each was sent in
        self.books = Books(batch=rules.batch)
        self.copy: Copy | None = None
        self.signed: list[Commit] = []  # all that was ever made
        self.has_failed = False
        self.num_fruitful = 0  # first commits with results

    @property
    def swarm(self) -> Swarm:
        """What nodes can learn of each other now."""
        members = self.state.members
        return Swarm(
            commits=self.books.commits,
            settled=self.books.settled,
            peers=[
                node
                for node_id, node in self.nodes.items()
                if node_id in members and members[node_id].state in PRESENT
            ],
        )

    # ---- what can happen

    def deliver(self, event: Event) -> None:
        """Puts an event through the core, and everything it promises to the test."""
        before, self.has_failed = self.state, True  # until all is checked
        self._put_through(before, event)
        self.has_failed = False

    def _put_through(self, before: SwarmState, event: Event) -> None:
        self.books.note(event, before)
        try:
            transition = step(before, event, self.now)
        except SessionEndedError:
            assert isinstance(event, HeartbeatSeen | Detached)
            return
        assert step(before, event, self.now) == transition, "not deterministic"
        assert transition.reason
        self._members.check(before, transition.state, self.now)
        if transition.state == before and not transition.actions:
            deadline = next_deadline(before)
            assert deadline is None or deadline > self.now
            return  # all else that follows held for this state already
        self.state = self._sealer.seal(transition.state)
        if isinstance(event, CommitLearned) and self.state.recent != before.recent:
            audit.check_learned(self.books, event.commit, before, self.state)
            self.books.note_learned(event.commit)
            self.books.put_commit(event.commit)
            nothing_known = replace(before, open_round=None)
            self.books.credits[event.commit.round] = audit.credit_of(event.commit, nothing_known)
        for action in transition.actions:
            self._check_action(before, action)
            obey(action, self.nodes, self.books.leased, self.state, self.now)
        audit.check_state(self.books, before, self.state, self.now)
        self.books.note_state(self.state, self.now)
        check_leases(before, event, self.state, self.now)
        check_deadline(before, event, self.state, self.now)
        # A step that hands a slice over forgets what it was told of it, this event included.
        is_handed_over = any(
            isinstance(a, Tell) and isinstance(a.message, SliceTakenOver)
            for a in transition.actions
        )
        if not isinstance(event, Attached | HeartbeatSeen | Detached | HistoryTold | Ruled) and (
            not is_handed_over
        ):
            again = step(self.state, event, self.now)
            assert (again.state, again.actions) == (self.state, ()), "not idempotent"

    def send(self, node: SimulatedNode, *events: Event) -> None:
        """Puts messages under way; a node without a session sends none."""
        if node.session_id is not None:
            self.under_way += [(node.session_id, event) for event in events]

    def arrive(self, session_id: int, event: Event) -> None:
        """Delivers a message, unless its session is over: the edge refuses those."""
        member = self.state.members[sender_of(event) or NodeId("")]
        if member.session_id == session_id and member.state in PRESENT:
            self.deliver(event)

    def arrive_at_once(self, node: SimulatedNode, *events: Event) -> None:
        session_id = node.session_id
        for event in events:
            if session_id is not None:
                self.arrive(session_id, event)

    def attach(
        self, node: SimulatedNode, *, has_restarted: bool = True, loses_newest: bool = False
    ) -> None:
        if has_restarted:
            node.restart(loses_newest=loses_newest)
            member = self.state.members.get(node.node_id)
            if member is not None:  # the kernel ends a dead process's connections
                self.deliver(StreamBroken(node_id=node.node_id, session_id=member.session_id))
        self.deliver(self._announcement(node, node.process_id))

    def a_copy_asks(self, node: SimulatedNode) -> None:
        """Another process with the key of a node that is heard is refused, and costs it nothing."""
        member = self.state.members.get(node.node_id)
        if (
            member is not None
            and member.state in PRESENT
            and member.is_heard
            and self.now < member.lease_until
        ):
            with pytest.raises(CopyAttachedError):
                step(self.state, self._announcement(node, -1), self.now)

    @staticmethod
    def _announcement(node: SimulatedNode, process_id: int) -> Attached:
        number, digest, incarnation = node.told
        return Attached(
            node_id=node.node_id,
            node_name="vm",  # as many machines are called
            address=PeerAddress(public_key=b"k" * 32, multiaddrs=()),
            device=node.device,
            num_ranks=1,
            version="1",
            run_digest=RUN,
            layout=LAYOUT,
            codecs=CODECS,
            corpus=node.corpus,
            outer_round=number,
            outer_digest=digest,
            outer_incarnation=incarnation,
            process_id=process_id,
            invite_id=node.invite_id,
            is_helper=node.is_helper,
            cannot_train=node.is_helper,
            cannot_evaluate=node.is_helper,
        )

    def bring_back(self, node: SimulatedNode) -> None:
        """What the coordinator asked for: all that the node keeps after that round."""
        after, node.asked_after = node.asked_after, None
        if after is not None and node.session_id is not None:
            brought = node.commits_after(after)
            for before, commit in zip([None, *brought], brought, strict=False):
                self.learn(node, before, commit)
            self.arrive_at_once(node, HistoryTold(node_id=node.node_id))

    def learn(self, node: SimulatedNode, before: Commit | None, commit: Commit) -> None:
        """One signed commit, and the one before it, as the edge takes it in."""
        if node.session_id is not None:
            if before is not None and before.round == commit.round - 1:
                self.deliver(BaseLearned(after=before, digest=commit.base_digest))
            self.deliver(CommitLearned(commit=commit, node_id=node.node_id))

    def work(
        self, node: SimulatedNode, *, missing: NodeId | None = None, is_idle: bool = False
    ) -> list[Event]:
        return node.work(self.swarm, missing=missing, is_idle=is_idle)

    def catch_up(self, node: SimulatedNode) -> list[Event]:
        self.bring_back(node)
        return node.catch_up(self.swarm)

    def back_up(self) -> None:
        """Copies the coordinator's database."""
        self.copy = Copy(state=self.state, now=self.now, books=self.books.copy())

    def restore(self) -> None:
        """The coordinator dies and goes on from the copy; every session breaks."""
        assert self.copy is not None
        until = self.copy.now + self.state.rules.lease_seconds + PAUSE_SECONDS
        members = {
            node_id: replace(member, lease_until=until) if member.state in PRESENT else member
            for node_id, member in self.copy.state.members.items()
        }
        self.state = self._sealer.seal(replace(self.copy.state, members=members))
        self.now, self.books = self.copy.now, self.copy.books.copy()
        self.under_way.clear()
        for node in self.nodes.values():
            node.session_id = node.asked_after = None
        self.deliver(Started())

    def all_bring_back(self, order: Random, *, late_seconds: float, pause_seconds: float) -> None:
        """All nodes attach and tell what they know: together they know the history.

        They come so late after the coordinator started, and so long one after the other.
        """
        promised = self._known_history()
        self.pass_time(late_seconds)
        for node in order.sample(list(self.nodes.values()), len(self.nodes)):
            self.attach(node, has_restarted=False)
            self.bring_back(node)
            self.pass_time(pause_seconds)
        assert self.state.committed_round >= len(promised), "a part of the history is lost"
        newest = max(node.state[0] for node in self.nodes.values())
        for known in promised[:newest]:  # what nobody has applied may be taken back
            held = self.books.commits[known.round - 1]
            is_same = replace(known, outer_digest=None) == replace(held, outer_digest=None)
            assert is_same or is_void(known), "what was committed is not in the books"

    def pass_time(self, seconds: float) -> None:
        """With the deadlines in between, if they are not too many, and heartbeats of who is here."""
        until = self.now + seconds
        for _ in range(MOST_DEADLINES):
            if self.now >= until:
                return
            deadline = next_deadline(self.state)
            beat_due = self.now + self.state.rules.lease_seconds / 2
            is_anybody_here = any(node.session_id is not None for node in self.nodes.values())
            ends = [until] + [beat_due] * is_anybody_here
            ends += [] if deadline is None else [deadline]
            self.now = max(self.now, min(ends))
            self.deliver(Ticked())
            for node in self.nodes.values():
                if (beat := node.heartbeat()) is not None:
                    self.deliver(beat)
        self.now = until
        self.deliver(Ticked())

    def _known_history(self) -> list[Commit]:
        """All commits to which nodes' commits continue the copy's, if no two tell different."""
        state, commits = self.state, self.books.commits
        known: dict[int, Commit] = {}
        for node in self.nodes.values():
            for number, commit in node.history.items():
                if number > node.state[0]:
                    continue  # it has gone back since
                if known.setdefault(number, commit) != commit or node.is_astray:
                    return []
        for number, digest, _ in (node.state for node in self.nodes.values()):
            if (following := known.get(number + 1)) and following.base_digest != digest:
                return []  # the swarm agreed on a lie
        last = state.committed_round
        agreed: Digest | None = state.outer_digest
        if state.is_finished or any(known.get(c.round, c) != c for c in commits):
            return []
        history = list(commits)
        while (following := known.get(last + 1)) and agreed in (None, following.base_digest):
            last = following.round
            agreed = following.base_digest if is_void(following) else None
            history.append(following)
        return history

    def recover(self) -> None:
        """Faults stop: all nodes are honest, and no message is lost. Rounds must commit again."""
        self.under_way.clear()
        goal = self.num_fruitful + 2
        for _ in range(100):
            if self.books.is_finished or self.num_fruitful >= goal:
                break
            self.now += 4  # half a lease
            for node in self.nodes.values():
                node.unreachable = ()
                member = self.state.members.get(node.node_id)
                if (
                    member is None
                    or member.state not in PRESENT
                    or node.session_id is None
                    or node.is_draining
                    # It lied twice alike; its next session, not its next heartbeat, tells it again.
                    or (node.is_astray and node.refetch is None)
                ):
                    self.attach(node)
                if beat := node.heartbeat():
                    self.deliver(beat)
                for event in (*self.catch_up(node), *self.work(node)):
                    self.arrive_at_once(node, event)
                asked = self.state.evaluating
                if asked is not None and node.node_id in asked.node_ids:
                    self.evaluate(node)
            self.deliver(Ticked())
        else:
            raise AssertionError(f"no progress: {self.state} {self.nodes}")
        if self.books.is_finished:
            assert self.state.committed_round == self.state.rules.total_rounds

    def evaluate(self, node: SimulatedNode) -> None:
        """An honest node evaluates no other state than the one that it holds."""
        number = node.state[0]
        self.arrive_at_once(
            node,
            Reported(
                node_id=node.node_id, round=number, report=Evaluated(held_out_loss=1.0, tokens=8)
            ),
        )

    # ---- what must hold

    def _check_action(self, before: SwarmState, action: Action) -> None:
        match action:
            case OpenSession():
                assert action.session_id not in self.books.sessions
                self.books.sessions.add(action.session_id)
            case Tell():
                self._check_told(before, action)
            case _:
                pass

    def _check_told(self, before: SwarmState, told: Tell) -> None:
        books, state = self.books, self.state
        match told.message:
            case RoundOpened(plan=plan):
                audit.check_plan(books, plan, state)
                books.note_plan(plan)
                assert told.to == plan.participants
            case SliceTakenOver() as takeover:
                audit.check_takeover(books, takeover, before, state)
                books.note_takeover(takeover)
            case ParticipantsIdle(round=number, node_ids=node_ids):
                assert before.open_round is not None and number == before.open_round.number
                assert set(node_ids).isdisjoint(before.open_round.trained), "it may contribute"
            case RoundCommitted(commit=commit) if told.is_learned:
                assert commit == state.recent[-1].commit
            case RoundCommitted(commit=commit):
                if commit.round <= len(books.commits):
                    audit.check_retraction(books, commit, before, state, self.now)
                else:
                    audit.check_commit(books, commit, before, state)
                    is_fruitful = any(outcome.digest for outcome in commit.slices)
                    self.num_fruitful += is_fruitful
                books.put_commit(commit)
                books.credits[commit.round] = audit.credit_of(commit, before)
                books.committed_at = self.now
                self.signed.append(commit)
            case EvaluationAsked(round=number):
                (node_id,) = told.to or ()
                assert state.members[node_id].state in PRESENT
                assert not state.members[node_id].is_draining
                assert number == state.committed_round
            case RunFinished(round=number):
                assert not books.is_finished, "finished twice"
                assert number == state.rules.total_rounds == len(books.commits)
                audit.check_finish(books, state)
                books.is_finished = True
            case _:
                pass
