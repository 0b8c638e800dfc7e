"""Whether members have trained what they were leased: who checks whom, and what follows. Pure.

A checker measures how much more a member's contribution has learned of its lease than of other samples. A
member that trained on its lease has learned more of it; who copies others, trains a part, or makes something
up has not (Lidin et al. 2025, "Incentivizing Permissionless Distributed Learning of LLMs"; docs/decisions.md
has our figures). One check shows little, so scores add up as in Wald's sequential test (1945): each finding
moves a member's balance by the logarithm of how much likelier its score is for a member that trains than for
one that does not. Liars may be among the checkers, so the half of the weight that accuses most is not
counted. Where what is left comes to one in CHANCE, the member is put in quarantine and its confirmed work
counts no more. So liars of less than half of the weight add nothing: without them the others would convict it
all the same.

What training scores depends on the run, and is taken from the other members: the middle one by weight, and
a part of that. So nobody is convicted where honest members score nothing either, and lies of less than half
of the weight neither convict nor set what is usual. What a checker says in a member's favour saves it from
no other checker's findings, for it may be an accomplice.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from coordinator.swarm.audit import STAGE_ROUNDS
from coordinator.swarm.events import Tell, Turn
from coordinator.swarm.members import Member, MemberState, SpotCheck, SpotFinding, Work
from coordinator.swarm.penalties import MOST_CONTRADICTED, convict
from coordinator.swarm.state import Round, Say, SwarmState, is_present, present_members
from coordinator.swarm.weighing import (
    Kind,
    can_check,
    drawn,
    is_enough,
    kind_of,
    lot,
    number_of,
    say_of,
    unchecked,
    unchecked_of,
    weight_of,
)
from protocol.trust.evidence import of_spot_checks
from protocol.wire.findings import SpotChecked
from protocol.wire.messages import SpotCheckAsked
from protocol.wire.rounds import (
    AUDIT_ROUNDS,
    LEAST_CHECKED,
    PASSES_OF_CHECK,
    PASSES_OF_TRAINING,
    WHOLE,
    Commit,
    NodeId,
    num_spot_checked,
)

CHANCE = 1e-3
"""That a member whose scores are what is expected is convicted, whatever liars with less than half of the
weight say. Where all tell what they measured both halves must go astray: the chance is the square of this."""

EXPECTED_SHARE = 0.7
"""Of what other members usually score: from a lease of twice as many samples less is learned of each."""

USUAL_FINDINGS = 8
"""Of each member, the newest: what is usual changes as a run goes on."""

LEAST_USUAL = 4
"""Findings on two other members at least, before it is known what is usual."""

LEAST_SECONDS = 2.0
"""A checker has so long at least."""

KEPT_FINDINGS = 64
"""On one member, the newest."""

MOST_CHECKERS = 16
"""So many members check one, and decide, where they are less than half of the weight."""

LEAST_ACCUSING = 1.0
"""What the findings of one member take from a balance, at least, if a conviction names it."""


def draw(turn: Turn, closed: Round, commit: Commit) -> None:
    """Has contributors of a round that was just committed checked, by lot."""
    state = turn.state
    kept = [c for c in state.spot_checks if c.round > closed.number - AUDIT_ROUNDS]
    turn.state = replace(state, spot_checks=tuple(kept))
    if not state.rules.checks_training:
        return
    convicted = {conviction.node_id for conviction in state.convicted}
    for node_id, (samples, part) in sorted(_taken(commit).items()):
        if samples < LEAST_CHECKED or not is_present(turn.state, node_id) or node_id in convicted:
            continue
        if kind_of(turn.state.members[node_id]) is not Kind.RANKS:
            continue
        if lot(turn.state, "is checked", closed.number, node_id) >= state.rules.audited_share:
            continue
        if len(may := _may_check(turn.state, closed, node_id)) > 1:  # one alone convicts nobody
            checker_id = _drawn(turn.state, closed.number, node_id, may)
            _ask(turn, closed, node_id, checker_id, samples=samples, part=part)


def spot_checked(turn: Turn, node_id: NodeId, round: int, report: SpotChecked) -> None:
    """Takes in what a checker that was asked has measured; others change nothing."""
    place = round, report.contributor_id, node_id
    asked = [
        c for c in turn.state.spot_checks if (c.round, c.contributor_id, c.checker_id) == place
    ]
    member = turn.state.members.get(report.contributor_id)
    if not asked or member is None or not report.num_samples >= LEAST_CHECKED:
        return
    rest = tuple(check for check in turn.state.spot_checks if check not in asked)
    turn.state = replace(turn.state, spot_checks=rest)
    if report.num_samples > asked[0].num_samples:
        return
    most = most_score(report.num_samples)
    usual = usual_effect(turn.state, member.node_id)
    finding = SpotFinding(
        checker_id=node_id,
        num_samples=report.num_samples,
        score=max(-most, min(most, report.score)),
        # Of a part of the elements samples differ less, by its root: by chance they add up so.
        expected=EXPECTED_SHARE * usual * math.sqrt(asked[0].part * report.num_samples),
        signed=report,
    )
    turn.put_member(replace(member, spots=(*member.spots, finding)[-KEPT_FINDINGS:]))
    _decide(turn, member.node_id)


def plan_for_checks(turn: Turn, node_ids: Collection[NodeId]) -> dict[NodeId, float]:
    """So many inner steps less these should be asked for, who check others while the rest trains.

    Not for what of that they would wait anyway, as rounds were lately. Each check counts in one plan.
    """
    state, steps = turn.state, dict[NodeId, float]()
    due = [c for c in state.spot_checks if c.checker_id in node_ids and not c.is_planned_for]
    if not due:
        return {}
    rest = tuple(replace(c, is_planned_for=True) if c in due else c for c in state.spot_checks)
    turn.state = replace(state, spot_checks=rest)
    for check in due:
        passes = PASSES_OF_CHECK * num_spot_checked(check.num_samples)
        taken = passes / (PASSES_OF_TRAINING * state.rules.batch)
        steps[check.checker_id] = steps.get(check.checker_id, 0.0) + taken
    waited = _seconds_waited(state)
    speeds = {n: state.members[n].inner_steps_per_second or 0.0 for n in steps}
    return {n: taken - waited * speeds[n] for n, taken in steps.items()}


def _seconds_waited(state: SwarmState) -> float:
    """Between training and commit, at least, in the latest rounds; none where ranks train on meanwhile."""
    taken = [measured.seconds for measured in state.phase_times.exchange]
    if state.rules.has_overlap:
        return 0.0
    return min((seconds for seconds in taken if seconds is not None), default=0.0)


def orders_for(state: SwarmState, node_id: NodeId) -> tuple[SpotCheckAsked, ...]:
    """What a member was asked to check, and has not."""
    return tuple(_order_of(check) for check in state.spot_checks if check.checker_id == node_id)


def most_score(num_samples: int) -> float:
    """What a score by ranks is at most, where every leased sample is ahead of every other one."""
    return math.sqrt(3 * num_samples**2 / (2 * num_samples + 1))


def usual_effect(state: SwarmState, node_id: NodeId) -> float:
    """What members beside this one score per root of samples: the middle one of them by weight.

    0 while too little is known: findings that come then show nothing.
    """
    others = [m for m in present_members(state) if m.node_id != node_id and m.spots]
    if len(others) < 2 or sum(len(m.spots) for m in others) < LEAST_USUAL:
        return 0.0
    say = say_of(others, state.committed_round, unchecked(state))
    effects = sorted(
        (_middle(map(_effect, m.spots[-USUAL_FINDINGS:])), say.weights[m.node_id]) for m in others
    )
    whole, so_far = sum(weight for _, weight in effects), 0
    for effect, weight in effects:
        so_far += weight
        if 2 * so_far >= whole:
            return max(0.0, effect)
    return 0.0


def balances(state: SwarmState, member: Member) -> dict[NodeId, float]:
    """By checkers that are here: what their findings say together, in nats; below 0 it has not trained."""
    by_checker: dict[NodeId, float] = {}
    for finding in member.spots:
        if is_present(state, finding.checker_id):
            gain = finding.expected * finding.score - finding.expected**2 / 2
            by_checker[finding.checker_id] = by_checker.get(finding.checker_id, 0.0) + gain
    return by_checker


def evidence(say: Say, by_checker: Mapping[NodeId, float], among: Collection[NodeId]) -> float:
    """What accuses a member, in nats below 0, without the half of the weight that accuses most.

    Of whoever has less than half of the weight of those among whom it is decided all is left out so, or what
    accuses more. A member that is part of either half counts in part, and one without weight not at all.
    """
    left_out, counted = weight_of(say, among) / 2, 0.0
    weighing = [n for n in among if by_checker.get(n, 0.0) < 0.0 and say.weights.get(n, 0)]
    for node_id in sorted(weighing, key=lambda n: (by_checker[n] / say.weights[n], n)):
        weight = say.weights[node_id]
        part = min(weight, left_out)
        left_out -= part
        counted += by_checker[node_id] * (1.0 - part / weight)
    return counted


def _decide(turn: Turn, node_id: NodeId) -> None:
    state, member = turn.state, turn.state.members[node_id]
    by_checker = balances(state, member)
    others = [m.node_id for m in _judging(state, member)]
    among = sorted(by_checker) if len(by_checker) >= MOST_CHECKERS else others
    say = say_of((state.members[n] for n in others), state.committed_round, unchecked(state))
    # Of each checker only what accuses counts. So each may go astray once in two more ways: 2 to the power
    # of their number bounds the mean of the product of likelihood ratios, instead of 1.
    if evidence(say, by_checker, among) >= math.log(CHANCE) - len(by_checker) * math.log(2):
        return
    accusing = [n for n, balance in by_checker.items() if balance <= -LEAST_ACCUSING]
    if not (
        is_enough(say, accusing, among) and _are_independent(state, accusing, [*others, node_id])
    ):
        return
    signed = [f.signed for f in member.spots if f.checker_id in accusing]
    usual = usual_effect(state, node_id)
    own = sum(map(_effect, member.spots)) / len(member.spots)
    reason = (
        f"it has not trained what it was leased: {len(member.spots)} spot checks, by "
        f"{len(by_checker)} members, find {own:.2f} of what trained samples show, others "
        f"usually {usual:.2f}"
    )
    convict(turn, node_id, reason, of_spot_checks(signed))
    turn.put_member(replace(turn.state.members[node_id], work=Work(), spots=()))
    # What others have yet to measure is of before as well: it counts no more if the member is readmitted.
    rest = tuple(c for c in turn.state.spot_checks if c.contributor_id != node_id)
    turn.state = replace(turn.state, spot_checks=rest)


def _judging(state: SwarmState, accused: Member) -> list[Member]:
    """Who decides on a member: all others that are here; of its own invite only where there is no other.

    Those of its invite may be one person with it, and never check it where others can: their weight would be
    a shield and nothing else. So would that of members whom nobody checks, once those that are checked are
    enough. The run owner vouches for his own machines.
    """
    here = [m for m in present_members(state) if m.node_id != accused.node_id and not m.is_helper]
    others = [m for m in here if accused.is_own or m.invite_id != accused.invite_id] or here
    left_out = unchecked_of(others)
    rest = [m for m in others if m.node_id not in left_out]
    return rest if any(can_check(m, accused) for m in rest) else others


def _are_independent(
    state: SwarmState, accusing: Sequence[NodeId], among: Sequence[NodeId]
) -> bool:
    """Whether two accuse, and of two invites where members have several, or the run owner's own."""
    invites = {state.members[n].invite_id for n in accusing}
    all_invites = {state.members[n].invite_id for n in among}
    is_vouched_for = any(state.members[n].is_own for n in accusing)
    return len(accusing) > 1 and (len(invites) > 1 or len(all_invites) == 1 or is_vouched_for)


def _effect(finding: SpotFinding) -> float:
    return finding.score / math.sqrt(finding.num_samples)


def _middle(values: Iterable[float]) -> float:
    """The middle one, of an even number the lower."""
    in_order = sorted(values)
    return in_order[(len(in_order) - 1) // 2]


# Who is checked, and by whom


def _taken(commit: Commit) -> dict[NodeId, tuple[int, float]]:
    """Of whose contributions most of what was committed has taken something: samples, and how much of it.

    A member may keep its contribution from a reducer, have it left out by one, or tell that one of fewer
    samples. It shall not go unchecked by that: what it tells of the most samples counts.
    """
    outcomes = [outcome for outcome in commit.slices if outcome.digest is not None]
    whole = sum(outcome.num_elements for outcome in outcomes)
    samples, taken = dict[NodeId, int](), dict[NodeId, int]()
    for outcome in outcomes:
        factors = outcome.factors or (WHOLE,) * len(outcome.contributors)
        for contributor, factor in zip(outcome.contributors, factors, strict=True):
            node_id = contributor.node_id
            if factor and contributor.tokens:
                samples[node_id] = max(samples.get(node_id, 0), contributor.samples)
                taken[node_id] = taken.get(node_id, 0) + outcome.num_elements
    return {
        a.node_id: (min(a.num_samples, samples[a.node_id]), taken[a.node_id] / whole)
        for a in commit.assignments
        if a.trains and 2 * taken.get(a.node_id, 0) >= whole > 0
    }


def _may_check(state: SwarmState, closed: Round, node_id: NodeId) -> list[Member]:
    """Present participants that trained and can evaluate; of other invites than the member's, if any.

    Samples of a number are the same for those alone that have the same data. The run owner's own check each
    other too: what they usually score tells what others should.
    """
    checked = state.members[node_id]
    may = [
        member
        for a in closed.assignments
        if a.trains
        and a.node_id != node_id
        and is_present(state, a.node_id)
        and (member := state.members[a.node_id]).state is not MemberState.DIVERGED
        and not member.is_draining
        and not member.cannot_evaluate
        and can_check(member, checked)
        and not member.standing.is_on_trial
        and member.audits.num_contradicted < MOST_CONTRADICTED
    ]
    others = [member for member in may if member.invite_id != checked.invite_id]
    return may if checked.is_own else others or may


def _drawn(state: SwarmState, round: int, node_id: NodeId, may: Sequence[Member]) -> NodeId:
    """One of them by confirmed work; who has checked this member before, more seldom."""
    say, spots = say_of(may, round, unchecked(state)), state.members[node_id].spots
    before = [sum(f.checker_id == member.node_id for f in spots) for member in may]
    weights = [
        say.weights.get(member.node_id, 0) / (1 + num) ** 2
        for member, num in zip(may, before, strict=True)
    ]
    if sum(num > 0 for num in before) >= MOST_CHECKERS:  # of more each would show too little
        weights = [weight if num else 0.0 for weight, num in zip(weights, before, strict=True)]
    return drawn(state, may, weights, "checker", round, node_id).node_id


def _ask(
    turn: Turn, closed: Round, node_id: NodeId, checker_id: NodeId, *, samples: int, part: float
) -> None:
    check = SpotCheck(
        round=closed.number,
        contributor_id=node_id,
        checker_id=checker_id,
        num_samples=samples,
        part=part,
        seed=number_of(turn.state, "samples", closed.number, node_id),
        seconds=max(LEAST_SECONDS, STAGE_ROUNDS * (turn.now - closed.opened_at)),
    )
    turn.state = replace(turn.state, spot_checks=(*turn.state.spot_checks, check))
    turn.act(Tell(message=_order_of(check), to=(checker_id,)))


def _order_of(check: SpotCheck) -> SpotCheckAsked:
    return SpotCheckAsked(
        round=check.round,
        contributor_id=check.contributor_id,
        seed=check.seed,
        seconds=check.seconds,
    )
