"""The world's own books of a run, and what must hold of plans, commits and the ledger by them.

They are kept from events and actions alone, never from the core's own sums.
"""

from copy import deepcopy
from dataclasses import dataclass, field, replace

from swarm_nodes import CONTEXT, Place

from coordinator.swarm.actions import SendTakeover
from coordinator.swarm.events import Attached, Event, ResultHeld, SliceReduced
from coordinator.swarm.ledger import Places, free_again
from coordinator.swarm.state import PRESENT, MemberState, RoundPhase, SwarmState
from protocol.rounds import Assignment, Commit, Digest, LayoutSummary, NodeId, Plan

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


def _places_of(a: Assignment) -> range:
    return range(a.first_sample, a.first_sample + a.num_samples)


@dataclass
class Books:
    """What was planned, reported and committed so far."""

    commits: list[Commit] = field(default_factory=list)  # of each round the version that holds
    settled: dict[int, Digest] = field(default_factory=dict)  # what nodes agreed on after a round
    leased: dict[NodeId, range] = field(default_factory=dict)  # in the round in flight
    ahead: dict[NodeId, Assignment] = field(default_factory=dict)  # for the round after it
    leased_until: int = 0
    counted: dict[int, set[int]] = field(default_factory=dict)  # places that each commit took
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

    # ---- what happens

    def note(self, event: Event, state: SwarmState) -> None:
        """Takes note of a report before the core hears it."""
        known = state.members.get(event.node_id) if isinstance(event, Attached) else None
        if known is not None and known.process_id != event.process_id:
            for reports in (*self.held.values(), *self.told.values()):
                reports.pop(event.node_id, None)
        current = state.open_round
        if not isinstance(event, ResultHeld | SliceReduced) or event.digest is None:
            return
        if current is None or current.number != event.round:
            return
        place = (event.round, event.slice_index)
        if isinstance(event, SliceReduced):
            if self.reducers.get(event.slice_index) == event.node_id:
                self.told.setdefault(place, {}).setdefault(event.node_id, set()).add(event.digest)
                self.ever_told.setdefault(place, set()).add(event.digest)
        elif state.members[event.node_id].state in PRESENT:
            self.held.setdefault(place, {})[event.node_id] = event.digest

    def note_takeover(self, told: SendTakeover, before: SwarmState, after: SwarmState) -> None:
        """What the former reducer told is void, and so is what others hold of it."""
        assert len(self.commits) + 1 == told.round, "a committed round is not taken over"
        index = told.slice_index
        assert told.attempt == self.attempts.get(index, 0) + 1
        reducer = after.members[told.reducer_id]
        assert reducer.state in PRESENT and not reducer.is_draining
        assert told.reducer_id in self.leased, "a node that does not take part reduces"
        place = (told.round, index)
        current = after.open_round
        if current is not None and current.phase is not RoundPhase.APPLYING:
            assert current.slices[index].digest is None, "the former reducer's result is kept"
        given_up = before.open_round.slices[index].digest if before.open_round else None
        if given_up is not None:
            present = {n for n in self.leased if after.members[n].state in PRESENT}
            assert given_up not in {self.held.get(place, {}).get(n) for n in present}
        for reports in (self.told, self.ever_told, self.held):
            reports.pop(place, None)
        self.attempts[index] = told.attempt
        self.reducers[index] = told.reducer_id

    def note_plan(self, plan: Plan) -> None:
        self.reducers = {part.index: part.reducer_id for part in plan.slices}
        self.attempts = {}
        for reports in (self.told, self.ever_told, self.held):
            reports.clear()

    def put_commit(self, commit: Commit) -> None:
        """The version of its round that holds from now on; only the last rounds change."""
        self.commits[commit.round - 1 :] = [
            commit,
            *self.commits[commit.round :],
        ]
        step_tokens = self.batch * CONTEXT
        counted: set[int] = set()
        tokens = tokens_of(commit)
        for a in commit.assignments:
            num_samples = tokens.get(a.node_id, 0) // step_tokens * self.batch
            counted |= set(range(a.first_sample, a.first_sample + num_samples))
        others = set().union(*(c for r, c in self.counted.items() if r != commit.round))
        assert not counted & others, "a sample is counted twice"
        self.counted[commit.round] = counted
        self.settled.pop(commit.round, None)
        if commit.outer_digest is not None:
            self.settled[commit.round] = commit.outer_digest
        self.leased = {}

    # ---- what must hold

    def check_plan(self, plan: Plan, state: SwarmState) -> None:
        assert plan.round == len(self.commits) + 1
        assert plan.base_digest == state.outer_digest
        assert len(plan.participants) >= state.rules.min_nodes
        assert list(plan.participants) == sorted(set(plan.participants))
        assert plan.token_clock == state.token_clock
        for node_id in plan.participants:
            assert state.members[node_id].state is MemberState.READY
            assert not state.members[node_id].is_draining, "a plan counts on who leaves"
        self._check_reducers(plan, state)
        self._check_assignments(plan, state)
        self._check_durations(plan, state)
        covered = 0
        for part in plan.slices:
            assert part.start == covered and part.reducer_id in plan.participants
            covered += part.num_elements
        assert covered == LAYOUT.fragment_elements[plan.fragment]

    def _check_reducers(self, plan: Plan, state: SwarmState) -> None:
        """Those who reach most of the others."""
        cut = {n: set(state.members[n].unreachable) for n in plan.participants}
        num_cut = {
            n: sum(n != m and (m in cut[n] or n in cut[m]) for m in plan.participants)
            for n in plan.participants
        }
        for part in plan.slices:
            assert num_cut[part.reducer_id] == min(num_cut.values())

    def _check_durations(self, plan: Plan, state: SwarmState) -> None:
        """Between the floor and the run file's bounds, whatever was measured."""
        rules, floor = state.rules, state.rules.floor_seconds
        caps = (rules.train_seconds, rules.contribute_seconds, rules.commit_seconds)
        durations = (plan.train_seconds, plan.contribute_seconds, plan.commit_seconds)
        if not rules.adapts_deadlines:
            assert durations == caps
            return
        before = 0.0
        assert state.open_round is not None
        apply_seconds = state.open_round.apply_seconds
        assert apply_seconds is not None and floor <= apply_seconds <= rules.apply_seconds
        for duration, cap in zip(durations, caps, strict=True):
            assert before < duration <= cap
            assert duration - before > min(floor, cap - before) - 1e-6
            before = duration

    def _check_assignments(self, plan: Plan, state: SwarmState) -> None:
        """Every sample is leased to one node and counted once, and those given back come first."""
        rules = state.rules
        steps = {a.node_id: a.inner_steps for a in plan.assignments}
        assert tuple(steps) == plan.participants
        honoured = {n: a for n, a in self.ahead.items() if n in steps}
        assert min(steps.values()) >= 1 and max(steps.values()) <= rules.inner_steps
        assert honoured or max(steps.values()) == rules.inner_steps
        step_tokens = rules.batch * rules.context
        assert plan.tokens_per_inner_step == step_tokens * sum(steps.values()) // rules.inner_steps
        taken = set(self.committed_places)
        for a in honoured.values():
            taken.update(_places_of(a))
        self.leased, self.ahead = {}, {}
        for a in plan.assignments:
            if a.node_id in honoured:
                assert a == honoured[a.node_id], "what may be trained already is not asked for"
            else:
                self._check_lease(a, taken, rules.batch)
            self.leased[a.node_id] = _places_of(a)
        is_last = plan.round == rules.total_rounds
        may_lead = rules.has_overlap and not is_last
        assert [a.node_id for a in plan.ahead] == list(plan.participants if may_lead else ())
        assert plan.ahead == state.ledger.ahead
        for a in plan.ahead:
            assert 1 <= a.inner_steps <= rules.inner_steps
            self._check_lease(a, taken, rules.batch)
            self.ahead[a.node_id] = a

    def _check_lease(self, a: Assignment, taken: set[int], batch: int) -> None:
        """A new lease beside those in `taken`, to which it is added."""
        assert a.num_samples == a.inner_steps * batch
        places = _places_of(a)
        assert not taken.intersection(places), "a sample is leased twice, or after its commit"
        in_a_row = 0
        for place in range(a.first_sample):
            in_a_row = 0 if place in taken else in_a_row + 1
            assert in_a_row < a.num_samples, "samples that were given back are passed over"
        assert a.first_sample <= self.leased_until, "a sample is left out"
        self.leased_until = max(self.leased_until, places.stop)
        taken.update(places)

    def _lease(self, a: Assignment) -> None:
        places = _places_of(a)
        self.leased_until = max(self.leased_until, places.stop)
        self.leased[a.node_id] = places

    def check_commit(self, commit: Commit, before: SwarmState, after: SwarmState) -> None:
        """A round's first commit."""
        current = before.open_round
        assert commit.round == len(self.commits) + 1, "a round must have exactly one commit"
        assert commit.incarnation == self.incarnation
        assert current is not None and current.number == commit.round
        assert commit.assignments == current.assignments
        leased = {n: len(places) * before.rules.context for n, places in self.leased.items()}
        assert leased.keys() == {a.node_id for a in commit.assignments}
        present = {n for n in leased if after.members[n].state in PRESENT}
        for outcome in commit.slices:
            place = (commit.round, outcome.index)
            assert (outcome.digest is None) == bool(outcome.void_reason)
            if outcome.digest is None:
                assert not outcome.contributors and not outcome.holder_ids
                continue
            told = self.ever_told.get(place, ())
            assert outcome.digest in told, "the reducer of now did not report this digest"
            for holder in outcome.holder_ids:
                assert holder in present
                is_held = self.held.get(place, {}).get(holder) == outcome.digest
                is_made = outcome.digest in self.told.get(place, {}).get(holder, ())
                assert is_held or is_made, "who did not say so does not hold it"
            assert len(set(outcome.holder_ids)) >= max(1, min(2, len(present)))
            names = [c.node_id for c in outcome.contributors]
            assert len(set(names)) == len(names) > 0
            assert all(0 <= c.tokens <= leased[c.node_id] for c in outcome.contributors)

    def check_retraction(
        self, commit: Commit, before: SwarmState, after: SwarmState, now: float
    ) -> None:
        """A later version of a round: only of what nobody here can supply, and only of the newest."""
        old = self.commits[commit.round - 1]
        assert commit.incarnation == before.incarnation + 1, "incarnations grow one by one"
        assert commit.assignments == old.assignments
        if is_void(old):  # it goes with the one before it, or with what was agreed on after that
            is_anew = commit.round == self.newest_with_results() + 1
            assert is_anew or self.commits[commit.round - 2].incarnation == commit.incarnation
        else:
            assert commit.round == self.newest_with_results(), "only the newest is taken back"
        assert not before.is_finished
        present = {n for n, m in after.members.items() if m.state in PRESENT}
        assert present, "while nobody is here, who comes back may hold it all"
        for new, was in zip(commit.slices, old.slices, strict=True):
            if new != was:
                assert new == replace(
                    was,
                    digest=None,
                    contributors=(),
                    holder_ids=(),
                    void_reason=new.void_reason,
                )
                assert new.void_reason.startswith("taken back")
        apply_seconds = before.rules.apply_seconds
        if before.open_round is None:
            assert now >= self.supplied_at + apply_seconds, "somebody here held the state just now"
            assert is_void(commit) and commit.outer_digest == commit.base_digest
            base = after.outer_digest if is_void(old) else old.base_digest
            assert commit.base_digest == base
            return
        assert before.open_round.phase is RoundPhase.APPLYING
        assert commit.round == len(self.commits) and commit.base_digest == old.base_digest
        assert now >= self.committed_at + apply_seconds
        lost = [was for new, was in zip(commit.slices, old.slices, strict=True) if new != was]
        assert lost, "a new incarnation takes something back"
        for outcome in old.slices:
            holders = self.held.get((commit.round, outcome.index), {})
            said = any(holders.get(n) == outcome.digest for n in present)
            made = any(
                outcome.digest in digests
                for n, digests in self.told.get((commit.round, outcome.index), {}).items()
                if n in present
            )
            if outcome in lost:
                assert not said, "somebody here holds what is taken back"
            else:
                assert outcome.digest is None or said or made, "nobody here holds what is kept"
        for node_id in present:
            member = after.members[node_id]
            is_same = member.outer_incarnation >= old.incarnation
            assert member.outer_round != commit.round or not is_same, "somebody had applied it"

    def check_learned(self, commit: Commit, before: SwarmState, after: SwarmState) -> None:
        """The next commit of the history that the coordinator has, signed by it."""
        assert commit.round == after.committed_round
        if commit.round <= len(self.commits):  # taken back since the copy was made
            known = self.commits[commit.round - 1]
            assert commit.incarnation > known.incarnation
            assert commit.base_digest == known.base_digest
            for number in range(commit.round, len(self.commits) + 1):
                self.counted.pop(number)
                self.settled.pop(number, None)
            del self.commits[commit.round - 1 :]
        else:
            assert commit.round == len(self.commits) + 1
            assert commit.base_digest == before.outer_digest
        assert after.incarnation >= before.incarnation
        for reports in (self.told, self.ever_told, self.held):
            reports.clear()  # who holds its results is not known, until they say so again
        self.ahead = {}  # leased by a history that went otherwise
        for a in commit.assignments:
            self._lease(a)

    def check_finish(self, state: SwarmState) -> None:
        """Whoever is here can get to the final state, or is too far behind for anybody to help."""
        newest = self.newest_with_results()
        present = [m for m in state.members.values() if m.state in PRESENT]
        if newest and not any(m.state is MemberState.READY for m in present):
            before = (newest - 1, self.commits[newest - 1].base_digest)
            assert before not in {(m.outer_round, m.outer_digest) for m in present}

    def check_state(self, before: SwarmState, state: SwarmState, now: float) -> None:
        assert state.committed_round == len(self.commits)
        assert state.incarnation >= before.incarnation
        self.incarnation = state.incarnation
        if state.outer_digest is not None:
            self.settled[state.committed_round] = state.outer_digest
        for closed in state.recent:
            assert replace(closed.commit, outer_digest=None, signature=b"") == replace(
                self.commits[closed.commit.round - 1], outer_digest=None, signature=b""
            )
            if closed.commit.outer_digest is not None:
                self.settled[closed.commit.round] = closed.commit.outer_digest
        is_supplied = state.open_round is not None or any(
            member.state is MemberState.READY
            or (member.state in PRESENT and member.outer_round > state.committed_round)
            for member in state.members.values()
        )
        if is_supplied:
            self.supplied_at = now
        self._check_ledger(state)
        tokens: dict[NodeId, int] = {}
        for commit in self.commits:
            for node_id, count in tokens_of(commit).items():
                tokens[node_id] = tokens.get(node_id, 0) + count
        assert state.token_clock == sum(tokens.values())
        assert {n: m.committed_tokens for n, m in state.members.items() if m.committed_tokens} == {
            n: count for n, count in tokens.items() if count
        }
        assert [h.round for h in state.held_out] == sorted({h.round for h in state.held_out})
        assert state.is_finished == self.is_finished
        if state.outer_digest is not None:
            for member in state.members.values():
                if member.state is MemberState.READY:
                    assert member.outer_digest == state.outer_digest
                    assert member.outer_round == state.committed_round
        is_same_round = state.committed_round == before.committed_round > 0
        has_changed = before.outer_digest not in (None, state.outer_digest)
        if is_same_round and has_changed:
            newest = self.commits[before.recent[0].commit.round - 1]
            if not is_void(newest):  # or else it was taken back
                self._check_agreed_anew(newest, before, now)
        self._check_slices(state, now)

    def _check_agreed_anew(self, newest: Commit, before: SwarmState, now: float) -> None:
        """A settled digest changes only for one that most of those hold who have decided it."""
        assert before.open_round is None
        assert now >= self.supplied_at + before.rules.apply_seconds, "somebody held it just now"
        held = {
            m.node_id: m.outer_digest
            for m in before.members.values()
            if m.state in PRESENT
            and m.outer_round == newest.round
            and m.outer_incarnation >= newest.incarnation
        }
        assert set(held.values()) == {self.settled[newest.round]}
        participants = {a.node_id for a in newest.assignments}
        assert 2 * len(participants & held.keys()) > len(participants) >= 2

    def _check_ledger(self, state: SwarmState) -> None:
        def places_in(pieces: tuple[Places, ...]) -> list[int]:
            return [place for p in pieces for place in range(p.first, p.end)]

        ledger = state.ledger
        committed, leased = places_in(ledger.committed), places_in(ledger.leased)
        assert set(committed) == self.committed_places
        assert state.ledger.ahead == tuple(self.ahead.values())
        all_leased = (*self.leased.values(), *map(_places_of, self.ahead.values()))
        assert set(leased) == {place for places in all_leased for place in places}
        free = places_in(free_again(ledger))
        assert sorted(committed + leased + free) == list(range(self.leased_until))

    def _check_slices(self, state: SwarmState, now: float) -> None:
        """No slice waits for a reducer that cannot finish, while another could."""
        current = state.open_round
        if current is None or current.phase is RoundPhase.APPLYING:
            return
        here = [
            m
            for a in current.assignments
            if (m := state.members[a.node_id]).state in PRESENT and not m.is_draining
        ]
        for progress in current.slices:
            index, place = progress.slice.index, (current.number, progress.slice.index)
            assert progress.slice.reducer_id == self.reducers[index]
            assert progress.attempt == self.attempts.get(index, 0)
            if progress.is_empty or not here or current.commit_deadline - now < 1:
                continue
            reducer = state.members[progress.slice.reducer_id]
            is_gone = reducer.state not in PRESENT or progress.is_orphaned
            if not is_gone and (progress.digest is not None or not reducer.is_draining):
                continue
            holders = self.held.get(place, {})
            made = self.told.get(place, {}).get(reducer.node_id, ())
            assert progress.digest is not None and (
                (reducer.state in PRESENT and progress.digest in made)
                or any(
                    state.members[n].state in PRESENT and progress.digest == digest
                    for n, digest in holders.items()
                )
            ), "a slice waits for a reducer that is gone"
            assert progress.is_offered
