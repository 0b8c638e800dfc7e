"""The world's own books of a run: what was planned, reported and committed.

They are kept from events and actions alone, never from the core's own sums. What must hold by them
stands in swarm_audit.
"""

from copy import deepcopy
from dataclasses import dataclass, field

from coordinator.swarm.events import Attached, Event, Reported
from coordinator.swarm.members import PRESENT, MemberState
from coordinator.swarm.state import SwarmState
from protocol.wire.messages import Held, Reduced, SliceTakenOver
from protocol.wire.rounds import Assignment, Commit, Digest, LayoutSummary, NodeId, Plan
from tests.property.swarm_nodes import Place

CODECS = ("int4/1", "int4/1")
LAYOUT = LayoutSummary(digest=Digest(b"l" * 32), fragment_elements=(700, 200))


def is_void(commit: Commit) -> bool:
    return all(outcome.digest is None for outcome in commit.slices)


def tokens_of(commit: Commit) -> dict[NodeId, int]:
    """What the commit takes of each contributor: its largest weight, once."""
    largest: dict[NodeId, int] = {}
    for contributor in (c for outcome in commit.slices for c in outcome.contributors):
        known = largest.get(contributor.node_id, 0)
        largest[contributor.node_id] = max(contributor.tokens, known)
    return largest


def samples_of(commit: Commit) -> dict[NodeId, int]:
    """What the commit uses up of each node's: the most that any slice names, or that held no token."""
    everyone = (*(c for outcome in commit.slices for c in outcome.contributors),)
    most: dict[NodeId, int] = {}
    for contributor in (*everyone, *commit.without_tokens):
        most[contributor.node_id] = max(contributor.samples, most.get(contributor.node_id, 0))
    return most


def places_of(a: Assignment) -> range:
    """Its samples' places in the seeded order."""
    return range(a.first_sample, a.first_sample + a.num_samples)


@dataclass
class Books:
    """What was planned, reported and committed so far."""

    commits: list[Commit] = field(default_factory=list)  # of each round the version that holds
    settled: dict[int, Digest] = field(default_factory=dict)  # what nodes agreed on after a round
    evaluated: dict[int, Digest] = field(default_factory=dict)  # of which state a loss was told
    leased: dict[NodeId, range] = field(default_factory=dict)  # in the round in flight
    ahead: dict[NodeId, Assignment] = field(default_factory=dict)  # for the round after it
    leased_until: int = 0
    counted: dict[int, set[int]] = field(default_factory=dict)  # places that each commit took
    credits: dict[int, dict[NodeId, int]] = field(default_factory=dict)  # work that each brought
    sessions: set[int] = field(default_factory=set)
    reducers: dict[int, NodeId] = field(default_factory=dict)  # of each slice in flight
    attempts: dict[int, int] = field(default_factory=dict)
    told: dict[Place, dict[NodeId, set[Digest]]] = field(default_factory=dict)  # by who reduces now
    ever_told: dict[Place, set[Digest]] = field(default_factory=dict)  # the same, before a restart
    held: dict[Place, dict[NodeId, Digest]] = field(default_factory=dict)  # what each said last
    committed_at: float = 0.0
    supplied_at: float = 0.0  # when somebody who holds the committed state was here last
    incarnation: int = 0
    is_finished: bool = False
    batch: int = 2

    def copy(self) -> "Books":
        """As they are now; commits are values."""
        memo = {id(self.commits): list(self.commits)}
        return deepcopy(self, memo)

    @property
    def committed_places(self) -> set[int]:
        return set().union(*self.counted.values())

    def newest_with_results(self) -> int:
        """The last round that is not void, or 0."""
        return max((c.round for c in self.commits if not is_void(c)), default=0)

    def note(self, event: Event, state: SwarmState) -> None:
        """Takes note of a report before the core hears it."""
        if isinstance(event, Attached):
            known = state.members.get(event.node_id)
            if known is not None and known.process_id != event.process_id:
                for held in self.held.values():
                    held.pop(event.node_id, None)
                for told in self.told.values():
                    told.pop(event.node_id, None)
        current = state.open_round
        if not isinstance(event, Reported) or not isinstance(event.report, Held | Reduced):
            return
        node_id, report = event.node_id, event.report
        if report.digest is None or current is None or current.number != event.round:
            return
        place = (event.round, report.slice_index)
        if isinstance(report, Reduced):
            if self.reducers.get(report.slice_index) == node_id:
                self.told.setdefault(place, {}).setdefault(node_id, set()).add(report.digest)
                self.ever_told.setdefault(place, set()).add(report.digest)
        elif state.members[node_id].state in PRESENT:
            self.held.setdefault(place, {})[node_id] = report.digest

    def note_takeover(self, told: SliceTakenOver) -> None:
        """What the former reducer told is void, and so is what others hold of it."""
        index, place = told.slice_index, (told.round, told.slice_index)
        for reports in (self.told, self.ever_told, self.held):
            reports.pop(place, None)
        self.attempts[index] = told.attempt
        self.reducers[index] = told.reducer_id

    def note_plan(self, plan: Plan) -> None:
        self.reducers = {part.index: part.reducer_id for part in plan.slices}
        self.attempts = {}
        self._forget_reports()
        self.leased = {a.node_id: places_of(a) for a in plan.assignments}
        self.ahead = {a.node_id: a for a in plan.ahead}
        self._lease_until(plan.assignments + plan.ahead)

    def put_commit(self, commit: Commit) -> None:
        """The version of its round that holds from now on; only the last rounds change."""
        self.commits[commit.round - 1 :] = [
            commit,
            *self.commits[commit.round :],
        ]
        counted: set[int] = set()
        samples = samples_of(commit)
        for a in commit.assignments:
            num_samples = samples.get(a.node_id, 0) // self.batch * self.batch
            counted |= set(range(a.first_sample, a.first_sample + num_samples))
        others = set().union(*(c for r, c in self.counted.items() if r != commit.round))
        assert not counted & others, "a sample is counted twice"
        self.counted[commit.round] = counted
        self.settled.pop(commit.round, None)
        if commit.outer_digest is not None:
            self.settled[commit.round] = commit.outer_digest
        self.leased = {}

    def note_learned(self, commit: Commit) -> None:
        """A commit that a node brings back: what was here of its round and later ones never was."""
        for number in range(commit.round, len(self.commits) + 1):
            self.counted.pop(number)
            self.credits.pop(number, None)
            self.settled.pop(number, None)
        del self.commits[commit.round - 1 :]
        self._forget_reports()  # who holds its results is not known, until they say so again
        self.ahead = {}  # leased by a history that went otherwise
        self._lease_until(commit.assignments)

    def note_state(self, state: SwarmState, now: float) -> None:
        """What nodes have agreed on after a step, and whether anybody here holds it."""
        self.incarnation = state.incarnation
        if state.outer_digest is not None:
            self.settled[state.committed_round] = state.outer_digest
        for closed in state.recent:
            if closed.commit.outer_digest is not None:
                self.settled[closed.commit.round] = closed.commit.outer_digest
        self.evaluated = {
            kept.round: self.evaluated.get(kept.round, self.settled[kept.round])
            for kept in state.held_out
        }
        is_supplied = state.open_round is not None or any(
            member.state is MemberState.READY
            or (member.state in PRESENT and member.outer_round > state.committed_round)
            for member in state.members.values()
        )
        if is_supplied:
            self.supplied_at = now

    def _lease_until(self, assignments: tuple[Assignment, ...]) -> None:
        self.leased_until = max(self.leased_until, *(places_of(a).stop for a in assignments))

    def _forget_reports(self) -> None:
        for reports in (self.told, self.ever_told, self.held):
            reports.clear()
