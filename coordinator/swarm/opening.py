"""How a round opens: who takes part with how many inner steps, on which samples, who reduces what. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.swarm.deadlines import next_deadlines
from coordinator.swarm.events import Tell, Turn
from coordinator.swarm.ledger import Places, end_ahead, lease, num_samples_of
from coordinator.swarm.members import Member
from coordinator.swarm.penalties import may_reduce, sitting_out_in_words
from coordinator.swarm.reach import best_reducers, newcomers, ways_between, ways_in_words
from coordinator.swarm.retraction import unfollowed
from coordinator.swarm.rounds import plan_of
from coordinator.swarm.shares import (
    budgets_in_words,
    capped_in_words,
    reducer_shares,
    shares_in_words,
    step_budgets,
    usual_speeds,
)
from coordinator.swarm.spot_checks import plan_for_checks
from coordinator.swarm.standing import counted_on
from coordinator.swarm.state import (
    Round,
    RoundPhase,
    Rules,
    SliceProgress,
    SwarmState,
    available_members,
)
from coordinator.swarm.weighing import say_of, unchecked
from protocol.wire.messages import RoundOpened
from protocol.wire.rounds import Assignment, NodeId, Slice, book_of_data, cut_into_slices

MOST_REDUCERS = 64
"""A node has a connection to every reducer, and reports for every slice: more would cost the swarm
more in both than they save in bytes at each."""

MOST_SLICES = 64
"""A reducer with several slices reduces one while the next arrives. No more are cut than this, or as
many as there are reducers: each is reported and committed."""

ENOUGH_SLICES = 4
"""Of a reducer. A small stretch is cut into as many: results go out while contributions still come."""

MOST_IN_USUAL = 16
"""… but no slice is smaller than this part of what is usual, or messages would take more than its bytes."""


def least_elements_of_a_slice(num_elements: int, num_reducers: int, usual_elements: int) -> int:
    """How small the slices of a fragment may be, so that a reducer sends while it still receives."""
    stretch = num_elements // num_reducers
    least = min(usual_elements, max(stretch // ENOUGH_SLICES, usual_elements // MOST_IN_USUAL))
    return max(least, num_elements // MOST_SLICES)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Party:
    """Who takes part in a round, each in the order of their ids."""

    ready: Sequence[Member]  # who train
    helpers: Sequence[Member]
    members: Sequence[Member]  # of both
    sure: Sequence[Member]  # of these who may reduce
    reducers: Sequence[Member]  # and who do
    sitting_out: str  # in words, who could train and is not counted on


def open_round(turn: Turn) -> None:
    """Opens the next round with all ready members that train, when there are enough of them."""
    state, rules = turn.state, turn.state.rules
    if _must_not_open(state) or state.outer_digest is None:
        return
    party = _party(state, turn.now)
    if party is None:
        return
    number = state.committed_round + 1
    fragment = number % len(rules.layout.fragment_elements)
    assignments = _with_helpers(_assign(turn, party.ready), party.helpers)
    ahead = _lease_ahead(turn, party.ready) if number < rules.total_rounds else ()
    steps = [assignment.inner_steps for assignment in assignments if assignment.trains]
    places = rules.batch * rules.context * sum(steps)
    clock, clock_after = _clock_told(state), state.token_clock + expected_tokens(state, places)
    deadlines = next_deadlines(state, assignments, fragment=fragment)
    slices, shares = _slices_of(rules, fragment, party)
    last_ways = state.last_closed.plan.ways if state.last_closed else ()
    ways = ways_between(party.members, slices, last_ways)
    on_trial = tuple(m.node_id for m in party.members if m.standing.is_on_trial)
    reason = (
        "1 node is ready" if len(party.ready) == 1 else f"{len(party.ready)} nodes are ready",
        _reducers_in_words(party.sure, party.reducers),
        shares,
        ways_in_words(party.members, slices, ways),
        budgets_in_words(steps, rules),
        capped_in_words(party.ready),
        _trial_in_words(len(on_trial)),
        party.sitting_out,
        _expected_in_words(state, places),
        schedule_in_words(rules, clock),
        deadlines.reason,
    )
    current = Round(
        number=number,
        fragment=fragment,
        base_digest=state.outer_digest,
        phase=RoundPhase.TRAINING,
        opened_at=turn.now,
        train_deadline=turn.now + deadlines.train_seconds,
        contribute_deadline=turn.now + deadlines.contribute_seconds,
        commit_deadline=turn.now + deadlines.commit_seconds,
        assignments=assignments,
        slices=tuple(SliceProgress(slice=part) for part in slices),
        token_clock=clock,
        round_tokens=max(0, clock_after - clock),
        reason="".join(reason),
        ahead=ahead,
        apply_seconds=deadlines.apply_seconds,
        say=say_of(party.ready, number - 1, unchecked(state)),
        usual_speeds=usual_speeds(party.ready),
        on_trial=on_trial,
        later_session_id=state.next_session_id,
        num_rulings=len(state.rulings),
        ways=ways,
    )
    turn.put_round(current)
    turn.has_new_state |= state.committed_round == 0  # the initial state, which no round led to
    plan = plan_of(current, turn.now)
    turn.act(Tell(message=RoundOpened(plan=plan), to=plan.participants))


def _party(state: SwarmState, now: float) -> _Party | None:
    """All that can train and are counted on, with helpers; None where too few are ready."""
    number, min_nodes = state.committed_round + 1, state.rules.min_nodes
    available = available_members(state)
    helpers = [member for member in available if member.is_helper]
    able = [member for member in available if not member.is_helper and not member.cannot_train]
    if not able or len(able) < min_nodes:
        return None
    ready = counted_on(able, number, least=max(1, min_nodes))
    helpers = counted_on(helpers, number, least=1)
    sure = sorted((*_sure(ready), *_sure(helpers)), key=lambda member: member.node_id)
    sure = [member for member in sure if may_reduce(member, number)] or sure
    return _Party(
        ready=ready,
        helpers=helpers,
        members=sorted((*ready, *helpers), key=lambda member: member.node_id),
        sure=sure,
        reducers=_reducers_of(state, sure, now),
        sitting_out=sitting_out_in_words(able, number),
    )


def _slices_of(rules: Rules, fragment: int, party: _Party) -> tuple[tuple[Slice, ...], str]:
    """The fragment's slices, by what its reducers' links carry, and their shares in words."""
    reducer_ids = frozenset(member.node_id for member in party.reducers)
    reduces = [member.node_id in reducer_ids for member in party.members]
    shares = reducer_shares(
        [member.rates for member in party.members],
        reduces,
        [member.is_helper for member in party.members],
    )
    num_elements, num_reducers = rules.layout.fragment_elements[fragment], len(party.reducers)
    slices = cut_into_slices(
        num_elements,
        tuple(member.node_id for member in party.reducers),
        tuple(share for share, may in zip(shares, reduces, strict=True) if may),
        least_elements=least_elements_of_a_slice(num_elements, num_reducers, rules.slice_elements),
    )
    return slices, shares_in_words(shares, reduces)


def _must_not_open(state: SwarmState) -> bool:
    """Whether something stands against any further round, whoever is here."""
    rules = state.rules
    return (
        state.open_round is not None
        or state.paused is not None
        or state.alarm is not None
        or state.committed_round >= rules.total_rounds
        or unfollowed(state) is not None
    )


def _sure(members: Sequence[Member]) -> Sequence[Member]:
    """Those that are not on trial; all of them where there are no others."""
    return [member for member in members if not member.standing.is_on_trial] or members


def _with_helpers(
    assignments: Sequence[Assignment], helpers: Sequence[Member]
) -> tuple[Assignment, ...]:
    """The assignments, and those of helpers, which ask for nothing to be trained."""
    without_steps = (
        Assignment(node_id=member.node_id, inner_steps=0, first_sample=0, num_samples=0)
        for member in helpers
    )
    return tuple(sorted((*assignments, *without_steps), key=lambda a: a.node_id))


def _reducers_of(state: SwarmState, members: Sequence[Member], now: float) -> list[Member]:
    """Of those who reach the others as many as may reduce, in the order of their ids.

    Helpers, then the ones with more confirmed work, up to a factor of two: a key can be made to have any
    id, and slices are not to move each time that somebody has a little more.
    """
    say = say_of(members, state.committed_round, unchecked(state))
    # After a void round others than helpers may be what it takes.
    was_void = state.last_closed is not None and state.last_closed.is_void
    new = frozenset[NodeId]() if was_void else newcomers(members, say, now)
    best = best_reducers(members, say, new=new)

    def rank(member: Member) -> tuple[bool, int, NodeId]:
        weight = say.weights.get(member.node_id, 0)
        return not member.is_helper, -weight.bit_length(), member.node_id

    return sorted(sorted(best, key=rank)[:MOST_REDUCERS], key=lambda m: m.node_id)


def _reducers_in_words(sure: Sequence[Member], reducers: Sequence[Member]) -> str:
    """What the plan's reason adds where not all reduce, or helpers do."""
    num_helpers = sum(member.is_helper for member in reducers)
    num_nodes = len(reducers) - num_helpers
    words = ""
    if num_helpers:
        words = ", 1 helper reduces" if num_helpers == 1 else f", {num_helpers} helpers reduce"
    num_sure = sum(not member.is_helper for member in sure)
    if num_nodes == num_sure:
        return words
    if not num_nodes:
        return f"{words} all, as not all nodes are known to reach each other"
    verb = "reduces" if num_nodes == 1 else "reduce"
    if len(reducers) == MOST_REDUCERS:
        return f"{words}, {num_nodes} of them {verb}"
    return f"{words}, {num_nodes} of them {verb}: not all reach each other"


def _trial_in_words(num_on_trial: int) -> str:
    if not num_on_trial:
        return ""
    nodes = "1 node is" if num_on_trial == 1 else f"{num_on_trial} nodes are"
    return (
        f"; nobody waits for {num_on_trial} of them, as {nodes} on trial after missing a deadline"
    )


def expected_tokens(state: SwarmState, places: int) -> int:
    """How many of so many places in samples will count: the same part as of all that commits took.

    All of them before anything did.
    """
    committed = num_samples_of(state.ledger.committed) * state.rules.context
    is_known = state.token_clock > 0 and committed > 0
    return places * state.token_clock // committed if is_known else places


def _expected_in_words(state: SwarmState, places: int) -> str:
    expected = expected_tokens(state, places)
    if 100 * expected > 99 * places:
        return ""
    return f"; of {places} tokens in their samples about {expected} count"


def _clock_told(state: SwarmState) -> int:
    """Where schedules in tokens stand: what commits have counted, but never before where they were.

    The last plan counted on all that it asked for, and nodes have trained to its end.
    """
    closed = state.last_closed
    if closed is None:
        return state.token_clock
    return max(state.token_clock, closed.plan.token_clock + closed.plan.round_tokens)


def _assign(turn: Turn, participants: Sequence[Member]) -> tuple[Assignment, ...]:
    """Gives each participant what it may be training already, or else steps by its speed.

    What was leased ahead to others is free again first.
    """
    here = {member.node_id for member in participants}
    ahead = {a.node_id: a for a in turn.state.ledger.ahead}
    ledger = end_ahead(turn.state.ledger, ahead.keys() - here)
    turn.state = replace(turn.state, ledger=replace(ledger, ahead=()))
    kept = {node_id: a for node_id, a in ahead.items() if node_id in here}
    fresh = {a.node_id: a for a in _leased(turn, participants, but=kept)}
    return tuple((kept | fresh)[member.node_id] for member in participants)


def _lease_ahead(turn: Turn, participants: Sequence[Member]) -> tuple[Assignment, ...]:
    """What participants may train for the next round, by the speeds that are known now."""
    if not turn.state.rules.has_overlap:
        return ()
    ahead = _leased(turn, participants, but={})
    turn.state = replace(turn.state, ledger=replace(turn.state.ledger, ahead=ahead))
    return ahead


def _leased(
    turn: Turn, participants: Sequence[Member], *, but: Mapping[NodeId, Assignment]
) -> tuple[Assignment, ...]:
    """Inner steps by speed, and leases of the samples for them, for all participants but some."""
    rules = turn.state.rules
    settled = {node_id: assignment.inner_steps for node_id, assignment in but.items()}
    checking = plan_for_checks(turn, {m.node_id for m in participants}.difference(but))
    asked = step_budgets(participants, rules, settled, checking)
    books: dict[int, list[NodeId]] = {}
    for node_id in asked:
        digest = turn.state.members[node_id].corpus.digest
        books.setdefault(book_of_data(digest) if rules.has_private_data else 0, []).append(node_id)
    places: dict[NodeId, Places] = {}
    ledger = turn.state.ledger
    for book, node_ids in sorted(books.items()):
        wanted = [asked[node_id] * rules.batch for node_id in node_ids]
        ledger, leased = lease(ledger, wanted, book=book)
        places.update(zip(node_ids, leased, strict=True))
    turn.state = replace(turn.state, ledger=ledger)
    return tuple(
        Assignment(
            node_id=node_id,
            inner_steps=inner_steps,
            first_sample=places[node_id].first,
            num_samples=places[node_id].num_samples,
        )
        for node_id, inner_steps in asked.items()
    )


def schedule_in_words(rules: Rules, clock: int) -> str:
    """What the plan's reason adds once the schedule has come to its end before the run."""
    end = rules.schedule.ends_at_tokens
    if end is None or clock < end:
        return ""
    return f"; the learning rate stays at its end: total_tokens = {end} are trained"
