"""What must hold of plans, takeovers, commits and the ledger, by the world's own books."""

import math
from collections.abc import Collection
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

from coordinator.swarm.ledger import Places, free_again
from coordinator.swarm.members import PRESENT, Member, MemberState
from coordinator.swarm.penalties import MOST_CONTRADICTED
from coordinator.swarm.state import RoundPhase, SwarmState
from coordinator.swarm.weighing import say_of, unchecked
from protocol.wire.messages import SliceTakenOver
from protocol.wire.rounds import Assignment, Commit, Digest, NodeId, Plan
from tests.property.swarm_books import LAYOUT, Books, is_void, places_of, tokens_of


def check_plan(books: Books, plan: Plan, state: SwarmState) -> None:
    assert plan.round == len(books.commits) + 1
    assert plan.base_digest == state.outer_digest
    assert plan.num_training >= state.rules.min_nodes
    assert list(plan.participants) == sorted(set(plan.participants))
    _check_clock(plan, state)
    for node_id in plan.participants:
        assert state.members[node_id].state is MemberState.READY
        assert not state.members[node_id].is_draining, "a plan counts on who leaves"
    _check_reducers(plan, state)
    _check_ways(plan, state)
    _check_assignments(books, plan, state)
    _check_durations(plan, state)
    covered = 0
    for part in plan.slices:
        assert part.start == covered and part.reducer_id in plan.participants
        covered += part.num_elements
    assert covered == LAYOUT.fragment_elements[plan.fragment]


def _check_clock(plan: Plan, state: SwarmState) -> None:
    """It begins where the last plan left it, or what commits have counted since; never further."""
    rules, asked = state.rules, sum(a.inner_steps for a in plan.assignments)
    last = state.last_closed
    left_at = 0 if last is None else last.plan.token_clock + last.plan.round_tokens
    assert plan.token_clock == max(state.token_clock, left_at), "a schedule goes back"
    places = sum(p.end - p.first for p in state.ledger.committed) * rules.context
    is_known = state.token_clock > 0 and places > 0
    share = Fraction(state.token_clock, places) if is_known else 1
    counted = state.token_clock + math.floor(rules.batch * rules.context * asked * share)
    assert plan.token_clock + plan.round_tokens == max(plan.token_clock, counted)


def _check_reducers(plan: Plan, state: SwarmState) -> None:
    """Those who reach all others, unless others outweigh whom they are cut off from and are more.

    Where helpers reduce only those beside them who reach all others, and not helpers that half do not reach;
    where everybody is cut off, those that are from fewest, whoever they are.
    """
    members = state.members
    nodes, helpers = (
        [n for n in plan.participants if members[n].is_helper is kind] for kind in (False, True)
    )
    among = [
        *([n for n in nodes if not members[n].standing.is_on_trial] or nodes),
        *([n for n in helpers if not members[n].standing.is_on_trial] or helpers),
    ]
    told = {n: set(state.members[n].unreachable) for n in among}
    cut = {n: {m for m in among if m != n and (m in told[n] or n in told[m])} for n in among}
    weight = say_of([state.members[n] for n in among], plan.round - 1, unchecked(state)).weights
    lost = {n: sum(weight.get(m, 0) for m in cut[n]) for n in among}
    has_helper = any(part.reducer_id in helpers for part in plan.slices)
    for part in plan.slices:
        is_best = lost[part.reducer_id] == min(lost.values())
        if has_helper:
            is_helper = part.reducer_id in helpers
            most = (sum(weight.values()) - 1) // 2 if is_helper else 0
            assert is_best or lost[part.reducer_id] <= most, "who is cut off reduces beside helpers"
            continue
        taken = [
            Fraction(weight[m], lost[m] or weight[m]) for m in cut[part.reducer_id] if weight.get(m)
        ]
        assert is_best or sum(taken) < 1, "who is cut off from most of the others reduces"


def _check_ways(plan: Plan, state: SwarmState) -> None:
    """Who is cut off from a reducer has a way to it where somebody reaches both, and nobody else has one."""

    def is_cut(one: NodeId, other: NodeId) -> bool:
        members = state.members
        return other in members[one].unreachable or one in members[other].unreachable

    reducers = {part.reducer_id for part in plan.slices}
    ways = {(way.one, way.other): way.through for way in plan.ways}
    assert len(ways) == len(plan.ways)
    for one, other in combinations(plan.participants, 2):
        able = [
            n
            for n in plan.participants
            if n not in (one, other)
            and state.members[n].carry_bytes_per_second
            and not (is_cut(one, n) or is_cut(n, other))
        ]
        is_needed = is_cut(one, other) and not reducers.isdisjoint((one, other))
        through = ways.pop((one, other), ())
        assert set(through) <= set(able) and len(through) == is_needed * min(2, len(able))
    assert not ways, "a way for somebody who takes no part"


def _check_durations(plan: Plan, state: SwarmState) -> None:
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


def _check_assignments(books: Books, plan: Plan, state: SwarmState) -> None:
    """Every sample is leased to one node and counted once, and those given back come first."""
    rules = state.rules
    steps = {a.node_id: a.inner_steps for a in plan.assignments}
    assert tuple(steps) == plan.participants
    helping = [a for a in plan.assignments if state.members[a.node_id].is_helper]
    assert all((a.inner_steps, a.first_sample, a.num_samples) == (0, 0, 0) for a in helping)
    training = [a for a in plan.assignments if a not in helping]
    steps = {a.node_id: a.inner_steps for a in training}
    honoured = {n: a for n, a in books.ahead.items() if n in steps}
    assert min(steps.values()) >= 1
    if rules.round_steps is None:
        assert max(steps.values()) <= rules.inner_steps
        assert honoured or max(steps.values()) == rules.inner_steps
    elif not honoured:  # what is leased ahead may not suit who is here
        _check_shared(steps.values(), rules.round_steps, plan.reason)
    taken = set(books.committed_places)
    for a in honoured.values():
        taken.update(places_of(a))
    leased_until = books.leased_until
    for a in training:
        if a.node_id in honoured:
            assert a == honoured[a.node_id], "what may be trained already is not asked for"
        else:
            leased_until = _check_lease(a, taken, leased_until, rules.batch)
    is_last = plan.round == rules.total_rounds
    may_lead = rules.has_overlap and not is_last
    assert [a.node_id for a in plan.ahead] == list(steps if may_lead else ())
    assert plan.ahead == state.ledger.ahead
    for a in plan.ahead:
        assert 1 <= a.inner_steps <= (rules.round_steps or rules.inner_steps)
        leased_until = _check_lease(a, taken, leased_until, rules.batch)


def _check_shared(steps: Collection[int], round_steps: int, reason: str) -> None:
    """Together what the run file says, or one each, or fewer for want of time, and the plan says so."""
    if sum(steps) > round_steps:
        assert sum(steps) == len(steps) and "one at least" in reason
    elif sum(steps) < round_steps:
        assert "no more fit into" in reason
    else:
        assert "make round_tokens = " in reason


def _check_lease(a: Assignment, taken: set[int], leased_until: int, batch: int) -> int:
    """A new lease beside those in `taken`, to which it is added; returns where leases end with it."""
    assert a.num_samples == a.inner_steps * batch
    places = places_of(a)
    assert not taken.intersection(places), "a sample is leased twice, or after its commit"
    in_a_row = 0
    for place in range(a.first_sample):
        in_a_row = 0 if place in taken else in_a_row + 1
        assert in_a_row < a.num_samples, "samples that were given back are passed over"
    assert a.first_sample <= leased_until, "a sample is left out"
    taken.update(places)
    return max(leased_until, places.stop)


def check_takeover(
    books: Books, told: SliceTakenOver, before: SwarmState, after: SwarmState
) -> None:
    """Somebody who takes part and is here reduces a slice whose result nobody here has, or most refuse."""
    assert len(books.commits) + 1 == told.round, "a committed round is not taken over"
    index = told.slice_index
    assert told.attempt == books.attempts.get(index, 0) + 1
    reducer = after.members[told.reducer_id]
    assert reducer.state in PRESENT and not reducer.is_draining
    assert told.reducer_id in books.leased, "a node that does not take part reduces"
    current = after.open_round
    if current is not None and current.phase is not RoundPhase.APPLYING:
        assert current.slices[index].digest is None, "the former reducer's result is kept"
    given_up, former = None, None
    if before.open_round is not None:
        former = before.open_round.slices[index].slice.reducer_id
        given_up = before.open_round.slices[index].digest
    if given_up is not None and former not in {c.node_id for c in after.convicted}:
        present = {n for n in books.leased if after.members[n].state in PRESENT}
        held = books.held.get((told.round, index), {})
        assert given_up not in {held.get(n) for n in present}


def check_commit(books: Books, commit: Commit, before: SwarmState, after: SwarmState) -> None:
    """A round's first commit."""
    current = before.open_round
    assert commit.round == len(books.commits) + 1, "a round must have exactly one commit"
    assert commit.incarnation == books.incarnation
    assert current is not None and current.number == commit.round
    assert commit.assignments == current.assignments
    leased = {n: len(places) for n, places in books.leased.items()}
    assert leased.keys() == {a.node_id for a in commit.assignments}
    idle = {n: t.samples for n, t in current.trained.items() if t.tokens == 0 and t.samples}
    assert {c.node_id: c.samples for c in commit.without_tokens} == idle
    present = {n for n in leased if after.members[n].state in PRESENT}
    for outcome in commit.slices:
        place = (commit.round, outcome.index)
        assert (outcome.digest is None) == bool(outcome.void_reason)
        if outcome.digest is None:
            assert not outcome.contributors and not outcome.holder_ids
            assert not outcome.contributions
            continue
        told = books.ever_told.get(place, ())
        assert outcome.digest in told, "the reducer of now did not report this digest"
        for holder in outcome.holder_ids:
            assert holder in present
            is_held = books.held.get(place, {}).get(holder) == outcome.digest
            is_made = outcome.digest in books.told.get(place, {}).get(holder, ())
            assert is_held or is_made, "who did not say so does not hold it"
        training = {a.node_id for a in current.assignments if a.trains}
        awaited = present - set(current.on_trial)
        awaited = awaited if awaited & training else present
        assert len(awaited.intersection(outcome.holder_ids)) >= max(1, min(2, len(awaited)))
        assert len(outcome.contributions) == len(outcome.contributors)
        names = [c.node_id for c in outcome.contributors]
        assert len(set(names)) == len(names) > 0
        assert all(0 <= c.tokens <= c.samples * before.rules.context for c in outcome.contributors)
        assert all(0 <= c.samples <= leased[c.node_id] for c in outcome.contributors)


def credit_of(commit: Commit, state: SwarmState) -> dict[NodeId, int]:
    """What each earns: its tokens by each slice's part of the fragment, no more than it said it trained.

    Nor more than the steps that the core believes it, which the tests of speeds are about.
    """
    whole = sum(outcome.num_elements for outcome in commit.slices)
    parts: dict[NodeId, int] = {}
    for outcome in commit.slices:
        for c in outcome.contributors:
            parts[c.node_id] = parts.get(c.node_id, 0) + c.tokens * outcome.num_elements
    current = state.open_round
    is_known = current is not None and current.number == commit.round
    told = current.trained if current is not None and is_known else {}
    steps = current.credible_steps if current is not None and is_known else {}
    step_tokens = state.rules.batch * state.rules.context
    return {
        n: min(
            part // whole,
            told[n].tokens if n in told else part,
            steps[n] * step_tokens if n in steps else part,
        )
        for n, part in parts.items()
    }


def check_retraction(
    books: Books, commit: Commit, before: SwarmState, after: SwarmState, now: float
) -> None:
    """A later version of a round: only of what nobody here can supply, and only of the newest."""
    old = books.commits[commit.round - 1]
    assert commit.incarnation == before.incarnation + 1, "incarnations grow one by one"
    assert commit.assignments == old.assignments
    if is_void(old):  # it goes with the one before it, or with what was agreed on after that
        is_anew = commit.round == books.newest_with_results() + 1
        assert is_anew or books.commits[commit.round - 2].incarnation == commit.incarnation
    else:
        assert commit.round == books.newest_with_results(), "only the newest is taken back"
    assert not before.is_finished
    present = {n for n, m in after.members.items() if m.state in PRESENT}
    assert present, "while nobody is here, who comes back may hold it all"
    for new, was in zip(commit.slices, old.slices, strict=True):
        if new != was:
            assert new == replace(
                was,
                digest=None,
                contributors=(),
                contributions=(),
                holder_ids=(),
                void_reason=new.void_reason,
            )
            assert new.void_reason.startswith("taken back")
    apply_seconds = before.rules.apply_seconds
    if before.open_round is None:
        assert now >= books.supplied_at + apply_seconds, "somebody here held the state just now"
        assert is_void(commit) and commit.outer_digest == commit.base_digest
        base = after.outer_digest if is_void(old) else old.base_digest
        assert commit.base_digest == base
        return
    assert before.open_round.phase is RoundPhase.APPLYING
    assert commit.round == len(books.commits) and commit.base_digest == old.base_digest
    assert now >= books.committed_at + apply_seconds
    lost = [was for new, was in zip(commit.slices, old.slices, strict=True) if new != was]
    assert lost, "a new incarnation takes something back"
    # Who is not in the plan holds results of another one, before a copy was restored. Real ones are
    # never the same bytes as these.
    named = {assignment.node_id for assignment in old.assignments} & set(present)
    for outcome in old.slices:
        holders = books.held.get((commit.round, outcome.index), {})
        said = any(holders.get(n) == outcome.digest for n in named)
        made = any(
            outcome.digest in digests
            for n, digests in books.told.get((commit.round, outcome.index), {}).items()
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


def check_learned(books: Books, commit: Commit, before: SwarmState, after: SwarmState) -> None:
    """The next commit of the history that the coordinator has, signed by it."""
    assert commit.round == after.committed_round
    if commit.round <= len(books.commits):  # taken back since the copy was made
        known = books.commits[commit.round - 1]
        is_filled = is_void(known) and not is_void(commit)
        is_later = commit.incarnation > known.incarnation
        assert is_filled or is_later, "what is here is worth more"
        newer = books.commits[commit.round :]
        assert is_later or all(map(is_void, newer)), "what was committed since is lost"
        books.is_finished = False
        assert commit.base_digest == known.base_digest
    else:
        assert commit.round == len(books.commits) + 1
        assert commit.base_digest == before.outer_digest
    assert after.incarnation >= before.incarnation


def check_finish(books: Books, state: SwarmState) -> None:
    """Whoever is here can get to the final state, or is too far behind for anybody to help."""
    newest = books.newest_with_results()
    present = [m for m in state.members.values() if m.state in PRESENT]
    held = {(m.outer_round, m.outer_digest) for m in present}
    is_held = any(m.state is MemberState.READY for m in present)
    # Void rounds leave the state as it is, so it may be held under the number of any of them.
    is_held = is_held or any(n >= newest and digest == state.outer_digest for n, digest in held)
    if newest and not is_held:
        assert (newest - 1, books.commits[newest - 1].base_digest) not in held


def check_state(books: Books, before: SwarmState, state: SwarmState, now: float) -> None:
    assert state.committed_round == len(books.commits)
    assert state.incarnation >= before.incarnation
    for closed in state.recent:
        assert replace(closed.commit, outer_digest=None, signature=b"") == replace(
            books.commits[closed.commit.round - 1], outer_digest=None, signature=b""
        )
    _check_ledger(books, state)
    tokens: dict[NodeId, int] = {}
    for commit in books.commits:
        for node_id, count in tokens_of(commit).items():
            tokens[node_id] = tokens.get(node_id, 0) + count
    assert state.token_clock == sum(tokens.values())
    assert {n: m.committed_tokens for n, m in state.members.items() if m.committed_tokens} == {
        n: count for n, count in tokens.items() if count
    }
    work: dict[NodeId, int] = {}
    for credit in books.credits.values():
        for node_id, count in credit.items():
            work[node_id] = work.get(node_id, 0) + count
    for node_id, member in state.members.items():
        counted = sum(t for _, t in member.work.by_stretch)
        if member.audits.num_contradicted < MOST_CONTRADICTED:
            assert counted == work.get(node_id, 0)
        else:
            assert counted <= work.get(node_id, 0), "who said what is not so loses its say"
    _check_evaluations(books, state)
    assert state.is_finished == books.is_finished
    if state.outer_digest is not None:
        for member in state.members.values():
            if member.state is MemberState.READY:
                assert member.outer_digest == state.outer_digest
                assert member.outer_round == state.committed_round
    is_same_round = state.committed_round == before.committed_round > 0
    has_changed = before.outer_digest not in (None, state.outer_digest)
    is_same_history = bool(before.recent and state.recent) and (
        _bare(before.recent[0].commit) == _bare(state.recent[0].commit)
    )
    if is_same_round and has_changed and is_same_history:
        newest = books.commits[before.recent[0].commit.round - 1]
        if not is_void(newest):  # or else it was taken back
            _check_agreed_anew(books, newest, before, state, now)
    _check_slices(books, state, now)


def _bare(commit: Commit) -> Commit:
    return replace(commit, outer_digest=None, signature=b"")


def _check_evaluations(books: Books, state: SwarmState) -> None:
    """Losses are of states that the history went through; and only at its end the run waits for one."""
    rounds = [kept.round for kept in state.held_out]
    assert rounds == sorted(set(rounds))
    agreed = {closed.commit.round: closed.commit.outer_digest for closed in state.recent}
    agreed[state.committed_round] = state.outer_digest
    for number in books.evaluated.keys() & set(rounds):
        digest = agreed.get(number)
        assert digest in (None, books.evaluated[number]), "the loss of a state that is no more"
    is_last = state.committed_round == state.rules.total_rounds and state.outer_digest is not None
    may_end = is_last and not state.is_finished and state.unsupplied_since is None
    if state.awaited is not None:  # nothing is decided before the nodes are back
        return
    assert may_end == (state.end_waits_until is not None)


def _check_agreed_anew(
    books: Books, newest: Commit, before: SwarmState, after: SwarmState, now: float
) -> None:
    """A settled digest changes only for one that as many hold as decide one."""
    assert before.open_round is None
    assert now >= books.supplied_at + before.rules.apply_seconds, "somebody held it just now"
    held: list[Digest | None] = [
        m.outer_digest
        for m in before.members.values()
        if m.state in PRESENT
        and m.outer_round == newest.round
        and m.outer_incarnation >= newest.incarnation
    ]
    (agreed,) = {c.commit.outer_digest for c in after.recent if c.commit.round == newest.round}
    assert held.count(agreed) >= 2
    named = {a.node_id for a in newest.assignments}
    work = {n: sum(t for _, t in m.work.by_stretch) for n, m in before.members.items()}
    for_it = sum(
        work[n]
        for n, m in before.members.items()
        if m.state in PRESENT and (m.outer_round, m.outer_digest) == (newest.round, agreed)
    )
    rules = before.rules
    if now >= books.supplied_at + rules.apply_seconds + rules.commit_seconds:
        named = {n for n in named if before.members[n].state in PRESENT}
    if any(work[n] for n in named):  # all rounds are of one half life, so work is weight
        assert 2 * for_it > sum(work[n] for n in named)


def _check_ledger(books: Books, state: SwarmState) -> None:
    def places_in(pieces: tuple[Places, ...]) -> list[int]:
        return [place for p in pieces for place in range(p.first, p.end)]

    ledger = state.ledger
    committed, leased = places_in(ledger.committed), places_in(ledger.leased)
    assert set(committed) == books.committed_places
    assert state.ledger.ahead == tuple(books.ahead.values())
    all_leased = (*books.leased.values(), *map(places_of, books.ahead.values()))
    assert set(leased) == {place for places in all_leased for place in places}
    free = places_in(free_again(ledger))
    assert sorted(committed + leased + free) == list(range(books.leased_until))


def _reached_by_all(members: Collection[Member], opened_at: float) -> bool:
    """Whether one of them is cut off from no other, and was here long enough for them to say so."""
    return any(
        (one.is_helper or (one.work.by_stretch and opened_at - one.came_at >= 30.0))
        and not any(
            o.node_id in one.unreachable or one.node_id in o.unreachable
            for o in members
            if o is not one
        )
        for one in members
    )


def _check_slices(books: Books, state: SwarmState, now: float) -> None:
    """No slice waits for a reducer that cannot finish, while another could."""
    current = state.open_round
    if current is None or current.phase is RoundPhase.APPLYING or state.awaited is not None:
        return
    here = [
        m
        for a in current.assignments
        if (m := state.members[a.node_id]).state in PRESENT and not m.is_draining
    ]
    for progress in current.slices:
        index, place = progress.slice.index, (current.number, progress.slice.index)
        assert progress.slice.reducer_id == books.reducers[index]
        assert progress.attempt == books.attempts.get(index, 0)
        if progress.is_empty or not here or current.commit_deadline - now < 1:
            continue
        reducer = state.members[progress.slice.reducer_id]
        is_gone = reducer.state not in PRESENT or progress.is_orphaned
        stays = not reducer.is_draining or (
            reducer.is_helper and not _reached_by_all(here, current.opened_at)
        )
        if not is_gone and (progress.digest is not None or stays):
            continue
        holders = books.held.get(place, {})
        made = books.told.get(place, {}).get(reducer.node_id, ())
        assert progress.digest is not None and (
            (reducer.state in PRESENT and progress.digest in made)
            or any(
                state.members[n].state in PRESENT and progress.digest == digest
                for n, digest in holders.items()
            )
        ), "a slice waits for a reducer that is gone"
        assert progress.is_offered
