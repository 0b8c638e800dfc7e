"""Honest nodes as the core sees them: what they remember, what they report, how they catch up.

They do what real ones do (node.daemon, node.exchange), at once and without bytes: a state is a
digest, and a result can be had as long as the process of a node that holds it lives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import blake3

from coordinator.swarm.events import Event, HeartbeatSeen, Reported, Ticked, Woke
from protocol.wire.messages import (
    Applied,
    Draining,
    Held,
    Reduced,
    ResultOffered,
    SliceTakenOver,
    Trained,
)
from protocol.wire.rounds import (
    Commit,
    ContributionDigest,
    Contributor,
    CorpusSummary,
    Digest,
    NodeId,
    Plan,
)

INITIAL = Digest(b"initial")
CONTEXT = 4

Place = tuple[int, int]
"""A round and a slice of it."""

State = tuple[int, Digest, int]
"""An outer state: its round, its digest, and the incarnation of the commit that led to it."""


def state_after(digest: Digest, commit: Commit) -> Digest:
    """The outer state that an honest node has after a commit, as a digest."""
    taken = [outcome.digest for outcome in commit.slices if outcome.digest is not None]
    return Digest(blake3.blake3(digest + b"".join(taken)).digest()) if taken else digest


@dataclass(frozen=True, kw_only=True)
class Swarm:
    """What a node can learn of the others: the commits, the agreed digests, and who supplies what."""

    commits: Sequence[Commit]
    settled: Mapping[int, Digest]
    peers: Sequence["SimulatedNode"]


CORPUS = CorpusSummary(digest=Digest(b"c" * 32), num_samples=9, num_bytes=9)


@dataclass
class SimulatedNode:
    """An honest node's memory, and its disk."""

    node_id: NodeId
    seconds_per_inner_step: float = 0.0
    state: State = (0, INITIAL, 0)
    session_id: int | None = None
    is_draining: bool = False
    unreachable: tuple[NodeId, ...] = ()
    # In memory, of the round whose plan it knows.
    plan: Plan | None = None
    is_taking_part: bool = False
    trained: Trained | None = None
    reducers: dict[int, NodeId] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    reduced: dict[Place, Digest] = field(default_factory=dict)
    offers: dict[Place, ResultOffered] = field(default_factory=dict)
    # In memory, of all rounds.
    held: dict[Place, set[Digest]] = field(default_factory=dict)
    asked_after: int | None = None  # the coordinator lacks the commits after this round
    refetch: tuple[int, Digest] | None = None
    # On the disk.
    disk: set[State] = field(default_factory=lambda: {(0, INITIAL, 0)})
    history: dict[int, Commit] = field(default_factory=dict)
    unsaved_since: State | None = None  # the state on the disk, while the newest is not there yet
    is_astray: bool = False
    process_id: int = 0
    invite_id: str = ""
    device: str = "cpu"
    corpus: CorpusSummary = CORPUS
    is_helper: bool = False

    @property
    def told(self) -> State:
        """The state that it says it has."""
        return self.state

    def restart(self, *, loses_newest: bool) -> None:
        """A new process. It loses a state that was reported, and not yet saved, at most."""
        if loses_newest and self.unsaved_since is not None and not self.is_astray:
            self.disk.discard(self.state)
            self._go_to(self.unsaved_since)
        self.process_id += 1
        self.unsaved_since = None
        self.is_draining = False
        self.plan = self.trained = self.asked_after = self.refetch = None
        self.is_taking_part = False
        for memory in (self.reducers, self.attempts, self.reduced, self.offers, self.held):
            memory.clear()

    def go_astray(self, round_number: int, digest: Digest) -> None:
        """Its memory flips a bit: from now on it holds another state."""
        self.state = (round_number, digest, self._incarnation_at(round_number))
        self.disk.add(self.state)
        self.is_astray = True

    def _incarnation_at(self, round_number: int) -> int:
        known = self.history.get(round_number)
        return known.incarnation if known else 0

    # ---- what it is told

    def hear_plan(self, plan: Plan) -> None:
        """The same plan may come again, with other reducers; another one of its round is new."""
        known = self.plan
        if known is None or (known.round, known.base_digest, known.assignments) != (
            plan.round,
            plan.base_digest,
            plan.assignments,
        ):
            self.is_taking_part, self.trained = False, None
            for memory in (self.reducers, self.attempts, self.reduced, self.offers):
                memory.clear()
            for place in [place for place in self.held if place[0] == plan.round]:
                del self.held[place]
            self.plan = plan
            self.reducers = {part.index: part.reducer_id for part in plan.slices}

    def hear_takeover(self, told: SliceTakenOver) -> None:
        """What its former reducer made of the slice counts no more; old messages change nothing."""
        index, place = told.slice_index, (told.round, told.slice_index)
        if self.plan is None or self.plan.round != told.round:
            return
        if told.attempt > self.attempts.get(index, 0):
            self.attempts[index] = told.attempt
            self.reducers[index] = told.reducer_id
            self.reduced.pop(place, None)
            self.held.pop(place, None)
            self.offers.pop(place, None)

    def hear_offer(self, told: ResultOffered) -> None:
        self.offers[told.round, told.slice_index] = told

    # ---- what it reports

    def heartbeat(self) -> HeartbeatSeen | None:
        if self.session_id is None:
            return None
        number, digest, incarnation = self.told
        return HeartbeatSeen(
            node_id=self.node_id,
            session_id=self.session_id,
            outer_round=number,
            outer_digest=digest,
            outer_incarnation=incarnation,
            unreachable=self.unreachable,
            carry_bytes_per_second=1e6,
            cannot_train=self.is_helper,
            cannot_evaluate=self.is_helper,
        )

    def work(self, swarm: Swarm, *, missing: NodeId | None, is_idle: bool) -> list[Event]:
        """What it can report of the round it knows: trained, reduced, held."""
        plan = self.plan
        events: list[Event] = (
            [Reported(node_id=self.node_id, round=0, report=Draining())] if self.is_draining else []
        )
        if plan is None or plan.round <= len(swarm.commits):
            return events
        own = plan.assignment_of(self.node_id)
        if own is None or not (
            self.is_taking_part or self.state[:2] == (plan.round - 1, plan.base_digest)
        ):
            return events  # a plan whose base is not our state is refused
        self.is_taking_part = True
        self.unsaved_since = None  # the base is on the disk before anything of the round is told
        if self.trained is None:
            # Who is idle has taken no step, or has steps behind it without a token to predict.
            is_idle = is_idle or self.is_helper
            num_steps = 0 if is_idle and plan.round % 2 else own.inner_steps
            samples = own.num_samples * num_steps // max(1, own.inner_steps)
            self.trained = Trained(
                inner_steps=num_steps,
                samples=samples,
                tokens=0 if is_idle else samples * CONTEXT - plan.round % 3,
                loss=1.0,
                seconds=num_steps * self.seconds_per_inner_step,
            )
        events.append(Reported(node_id=self.node_id, round=plan.round, report=self.trained))
        peers = {peer.node_id: peer for peer in (*swarm.peers, self)}
        for part in plan.slices:
            place = (plan.round, part.index)
            if self.reducers[part.index] == self.node_id:
                events.append(self._reduce(plan, part.index, peers, missing))
            source = peers.get(self.reducers[part.index])
            if source is not None and (result := source.reduced.get(place)) is not None:
                self.held.setdefault(place, set()).add(result)
            if (offer := self.offers.get(place)) is not None and any(
                offer.digest in peers[n].held.get(place, ()) for n in offer.holder_ids if n in peers
            ):
                self.held.setdefault(place, set()).add(offer.digest)
            events += [
                Reported(
                    node_id=self.node_id,
                    round=plan.round,
                    report=Held(slice_index=part.index, digest=digest),
                )
                for digest in sorted(self.held.get(place, ()))
            ]
        return events

    def _reduce(
        self,
        plan: Plan,
        index: int,
        peers: Mapping[NodeId, "SimulatedNode"],
        missing: NodeId | None,
    ) -> Reported:
        place = (plan.round, index)
        leased = {a.node_id: a.num_samples for a in plan.assignments}
        idle = {n for n, peer in peers.items() if peer.trained and peer.trained.tokens == 0}
        asked = [a.node_id for a in plan.assignments if a.trains]
        names = [n for n in asked if n != missing and n not in idle]
        contributors = tuple(
            Contributor(
                node_id=name,
                samples=max(0, leased[name] - i),
                tokens=max(0, (leased[name] - i) * CONTEXT - 7 * i),
            )
            for i, name in enumerate(names)
        )
        told = f"{place} {self.attempts.get(index, 0)} by {self.node_id}: {contributors}"
        digest = Digest(plan.base_digest[:8] + blake3.blake3(told.encode()).digest()[:8])
        if names:
            self.reduced.setdefault(place, digest)
        return Reported(
            node_id=self.node_id,
            round=plan.round,
            report=Reduced(
                slice_index=index,
                digest=self.reduced[place] if names else None,
                contributors=contributors,
                contributions=tuple(
                    ContributionDigest(f"{place} {each.node_id}"[:16].ljust(16).encode())
                    for each in contributors
                ),
            ),
        )

    # ---- how it catches up

    def catch_up(self, swarm: Swarm) -> list[Event]:
        """Gets as far as commits, results and peers allow, and reports the state it holds then."""
        before = self.state
        if self.refetch is not None:
            self._fetch_anew(swarm, *self.refetch)
        else:
            self._replay(swarm)
        if self.state != before:
            self.unsaved_since = before if before[0] < self.state[0] else None
        number, digest, incarnation = self.told
        return [
            Reported(
                node_id=self.node_id,
                round=number,
                report=Applied(outer_digest=digest, incarnation=incarnation),
            )
        ]

    def _replay(self, swarm: Swarm) -> None:
        has_gone_back = False
        while (number := self.state[0]) < len(swarm.commits):
            commit = swarm.commits[number]
            if self.state[1] == commit.base_digest:
                if not self._applied(swarm, commit) and not self._leapt(swarm, number + 1, None):
                    return
            elif not has_gone_back and self._gone_back(swarm):
                has_gone_back = True  # once: what it comes to from there may be wrong again
            elif not self._leapt(swarm, number + 1, None):
                return

    def _fetch_anew(self, swarm: Swarm, number: int, digest: Digest) -> None:
        def is_right() -> bool:
            known = digest if self.state[0] == number else swarm.settled.get(self.state[0])
            return self.state[0] >= number and self.state[1] == known

        if not is_right() and self._gone_back(swarm):
            self._replay(swarm)
        if is_right() or self._leapt(swarm, number, (number, digest)):
            self.refetch = None

    def _applied(self, swarm: Swarm, commit: Commit) -> bool:
        """Applies a commit, if each of its results is held by somebody here."""
        wanted = {(commit.round, s.index): s.digest for s in commit.slices if s.digest is not None}
        for place, result in wanted.items():
            if not any(result in node.held.get(place, ()) for node in (self, *swarm.peers)):
                return False
        for place, result in wanted.items():
            self.held.setdefault(place, set()).add(result)
        self._remember(commit)
        self._go_to((commit.round, state_after(self.state[1], commit), commit.incarnation))
        return True

    def _leapt(self, swarm: Swarm, least: int, known: tuple[int, Digest] | None) -> bool:
        """Takes over a peer's state, if it is the swarm's."""
        settled = {**swarm.settled, **dict([known] if known else [])}
        donors = [peer.state for peer in swarm.peers if peer.node_id != self.node_id]
        right = [s for s in donors if s[0] >= least and settled.get(s[0]) == s[1]]
        if not right:
            return False
        newest = max(right)
        for commit in swarm.commits[self.state[0] : newest[0]]:
            self._remember(commit)
        self._go_to((*newest[:2], self._incarnation_at(newest[0])))
        return True

    def _gone_back(self, swarm: Swarm) -> bool:
        """Takes up an older state of its own that is the swarm's, where the disk has one."""
        kept = [s for s in self.disk if s[0] <= self.state[0] and swarm.settled.get(s[0]) == s[1]]
        if not kept:
            return False
        self._go_to(max(kept))
        return True

    def _go_to(self, state: State) -> None:
        self.state = state
        self.disk.add(state)
        self.is_astray = False

    def _remember(self, commit: Commit) -> None:
        """Of two commits of a round the later one counts, and makes all after it void."""
        for number in [n for n in self.history if n >= commit.round]:
            del self.history[number]
        self.history[commit.round] = commit

    def commits_after(self, number: int) -> list[Commit]:
        return [commit for n, commit in sorted(self.history.items()) if n > number]


def spoiled(event: Event, digest: Digest, node: SimulatedNode) -> Event:
    """The event as a liar would send it: what it says to hold are its own wrong bytes."""
    match event:
        case Reported(report=Reduced() as report):
            greedy = tuple(
                replace(c, samples=c.samples * (1 + place), tokens=c.tokens * 1000)
                for place, c in enumerate(report.contributors)
            )
            return replace(event, report=replace(report, contributors=greedy))
        case Reported(report=Held() as report):
            node.held.setdefault((event.round, report.slice_index), set()).add(digest)
            return replace(event, report=replace(report, digest=digest))
        case Reported(report=Applied() as report) if event.round == node.state[0]:
            node.go_astray(event.round, digest)
            return replace(event, report=replace(report, outer_digest=digest))
        case HeartbeatSeen() if event.outer_round == node.state[0]:
            node.go_astray(event.outer_round, digest)
            return replace(event, outer_digest=digest)
        case _:
            return event


def sender_of(event: Event) -> NodeId | None:
    """Who sent the event; nobody sends the coordinator's own."""
    if isinstance(event, Ticked | Woke):
        return None
    return getattr(event, "node_id", None)
