"""What held-out losses say: which are plausible, and whether the run was harmed. Pure.

A run that was harmed shows in them. A loss is implausible when it is no finite number, or further above what
it was than the run's own history explains. What it was is the median of the latest three, so one odd loss
does not move it; what the history explains is JUMP_SHARE of that, or MOST_TIMES_USUAL what losses usually
move from one to the next. Losses fall in runs that learn, so a rise is compared with moves in either
direction. Nor may three losses in a row lie so far above the best three of the run: so slow harm shows too,
by which each next loss looks usual.

Then the run goes back by itself to the state after the latest round with a plausible loss, or after the best
rounds where it has risen slowly, once for each place: where it finds the same again after going back, it
pauses, for the cause is then in its rules or data. When the run owner resumes it, losses count anew. Most
of those who were asked must say so, and two at least: one that lies can neither start anything nor hide it.
Where data are private two holders must, each by what was found on its own data: texts are not equally hard.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from coordinator.swarm.going_back import latest_in_reach
from coordinator.swarm.state import Alarm, HeldOut, HolderLoss, SwarmState, present_members
from coordinator.swarm.weighing import Kind, kind_of, worth
from protocol.trust.rulings import COORDINATOR, RulingKind
from protocol.wire.rounds import NodeId
from protocol.wire.vitals import loss_in_words

KEPT_LOSSES = 5
"""Of the latest losses, what is usual follows from so many."""

LEAST_LOSSES = 3
"""With fewer nothing but a loss that is not finite is implausible: it is not known how losses move."""

JUMP_SHARE = 0.2
"""A rise by so much of the loss is a jump, where losses hardly move."""

LESS_IS_BETTER = "less is better: evaluate=… returns accuracy and rewards with a minus"
"""What the owners of loops may not have known: such a run goes back while it learns."""

MOST_TIMES_USUAL = 6.0
"""Where they move more, a rise by so many times the usual move is one."""


@dataclass(slots=True)
class Curve:
    """Plausible losses of a run, oldest first, and what may follow on them."""

    losses: list[float] = field(default_factory=list)
    best_end: int = 0  # where the three in a row end whose median is least; 0 while there are none
    _best: float = math.inf
    _from: int = 0

    def add(self, loss: float) -> None:
        """One more."""
        self.losses.append(loss)
        if len(self.losses) - self._from < LEAST_LOSSES:
            return
        if (now := median(self.losses[-LEAST_LOSSES:])) < self._best:
            self._best, self.best_end = now, len(self.losses)

    def seek_best_anew(self) -> None:
        """What was best before counts no more."""
        self._best, self.best_end, self._from = math.inf, 0, len(self.losses)

    def allows(self, loss: float) -> bool:
        """Whether the loss is plausible as the next one."""
        return not self.has_jumped(loss) and not self.has_risen(loss)

    def has_jumped(self, loss: float) -> bool:
        """Whether it is no number, or further above the latest three than the latest moves explain."""
        if not math.isfinite(loss):
            return True
        latest = self.losses[-KEPT_LOSSES:]
        if len(latest) < LEAST_LOSSES:
            return False
        return loss > _most(median(latest[-LEAST_LOSSES:]), latest)

    def has_risen(self, loss: float) -> bool:
        """Whether it and the two before it are as far above the best three."""
        if not self.best_end:
            return False
        around = self.losses[max(self._from, self.best_end - KEPT_LOSSES) : self.best_end]
        return median([*self.losses[1 - LEAST_LOSSES :], loss]) > _most(self._best, around)


def _most(reference: float, around: Sequence[float]) -> float:
    """What a loss may be above a reference, beside losses that moved so."""
    usual = median([abs(later - earlier) for earlier, later in pairwise(around)])
    return reference + max(JUMP_SHARE * abs(reference), MOST_TIMES_USUAL * usual)


@dataclass(slots=True, kw_only=True)
class Known:
    """Plausible losses on one text, and the evaluations that they are of."""

    curve: Curve = field(default_factory=Curve)
    found: list[HeldOut] = field(default_factory=list)


def plausible_losses(
    state: SwarmState, before_round: int
) -> tuple[list[HeldOut], defaultdict[str, Known]]:
    """Those of states before a round that may follow on those before, and what is known on each text.

    Where data are private each holder has a text of its own, and one that finds a loss implausible may lie:
    then the others' count. What the run owner resumed after a pause is accepted, and losses before that count
    no more; nor do those on another text. What was best does not count under other rates and steps, which
    losses follow.
    """
    amended = _amended_from(state)
    accepted = max(_accepted_from(state), state.held_out_text_from)
    kept: list[HeldOut] = []
    known: defaultdict[str, Known] = defaultdict(Known)
    has_amended = False
    for each in state.held_out:
        if not accepted <= each.round < before_round:
            continue
        if each.round >= amended > 0 and not has_amended:
            has_amended = True
            for one in known.values():
                one.curve.seek_best_anew()
        losses = {_held_by(state, one.node_id): one.loss for one in each.holders}
        losses = losses or {"": each.loss}
        good = {text: loss for text, loss in losses.items() if known[text].curve.allows(loss)}
        if len(losses) - len(good) < min(2, len(losses)):
            kept.append(each)
            for text, loss in good.items():
                known[text].curve.add(loss)
                known[text].found.append(each)
    return kept, known


def _held_by(state: SwarmState, node_id: NodeId) -> str:
    """What a node's loss is of: its holder's data where they are private, else that of all."""
    if not state.rules.has_private_data:
        return ""
    member = state.members.get(node_id)
    return node_id if member is None else member.corpus.digest.hex()


def _accepted_from(state: SwarmState) -> int:
    """The committed round at which the run owner last resumed a run that had paused by itself; or 0."""
    accepted, paused_by = 0, ""
    for ruling in state.rulings:
        if ruling.kind in (RulingKind.PAUSED, RulingKind.WITHDRAWN):
            paused_by = ruling.by
        elif ruling.kind is RulingKind.RESUMED:
            if paused_by == COORDINATOR:
                accepted = ruling.from_round - 1
            paused_by = ""
        elif ruling.kind is RulingKind.ROLLED_BACK:
            accepted = min(accepted, ruling.from_round - 1)
    return max(0, accepted)


def _amended_from(state: SwarmState) -> int:
    """The first round under the latest rules by which losses go; 0 where they are as they were."""
    rounds = [
        ruling.from_round
        for ruling in state.rulings
        if ruling.kind is RulingKind.AMENDED
        and any(key.startswith(_MOVING_LOSSES) for key, _ in ruling.changes)
    ]
    return max(rounds, default=0)


_MOVING_LOSSES = ("inner.", "outer.", "evaluation.go_back")
"""Keys of the run file: amending them may have losses rise for a good reason."""


def middle_loss(state: SwarmState, found: Sequence[HolderLoss]) -> HolderLoss:
    """Of losses of one state on one text: the middle one, and of two that of more confirmed work.

    Members are drawn by confirmed work, so each counts alike.
    """
    ranked = sorted(found, key=lambda one: (_or_infinite(one.loss), one.node_id))
    if len(ranked) == 2:
        round = state.committed_round
        return max(ranked, key=lambda one: worth(state.members[one.node_id].work, round))
    return ranked[(len(ranked) - 1) // 2]


def _or_infinite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def alarm_of(state: SwarmState, round: int, found: Sequence[HolderLoss]) -> Alarm | None:
    """What follows from what members found of the state after a round; None where all is well.

    Nothing follows from one member alone, unless the swarm has no other.
    """
    good, known = plausible_losses(state, round)
    on = {one.node_id: known[_held_by(state, one.node_id)] for one in found}
    bad = [one for one in found if not on[one.node_id].curve.allows(one.loss)]
    losses = [one.loss for one in bad]
    is_alone = sum(not m.cannot_evaluate for m in present_members(state)) <= 1
    if len(bad) < (1 if is_alone else 2):  # of the three at most that were asked, or of the holders
        return None
    if not good:
        return Alarm(round=None, reason=f"{_found(losses)} after round {round}, and was never good")
    last = good[-1]
    if not any(on[one.node_id].curve.has_jumped(one.loss) for one in bad):
        best = (on[one.node_id].found[on[one.node_id].curve.best_end - 1] for one in bad)
        last = min(best, key=lambda one: one.round)
    text = _held_by(state, min(bad, key=lambda one: _or_infinite(one.loss)).node_id)
    was = next((h.loss for h in last.holders if _held_by(state, h.node_id) == text), last.loss)
    what = f"{_found(losses)} after round {round}, and was {loss_in_words(was)} after round {last.round}"
    if all(kind_of(state.members[one.node_id]) is Kind.LOOP for one in bad):
        what += f" ({LESS_IS_BETTER})"
    if _was_here_before(state, round):
        return Alarm(round=None, reason=f"{what}, again after the run went back from there")
    reached = latest_in_reach(state, last.round)
    if reached is None:
        return Alarm(round=None, reason=f"{what}, and nodes that are here cannot go back so far")
    return Alarm(round=reached, reason=what)


def _was_here_before(state: SwarmState, round: int) -> bool:
    """Whether the run went back by itself from here once: by a ruling, which outlasts this coordinator."""
    later = round - state.rules.evaluate_every_rounds
    return any(
        ruling.kind is RulingKind.ROLLED_BACK
        and ruling.by == COORDINATOR
        and ruling.from_round <= round
        and later <= ruling.last_round
        for ruling in state.rulings  # also those that were withdrawn since
    )


def _found(losses: Sequence[float]) -> str:
    finite = [loss for loss in losses if math.isfinite(loss)]
    return (
        f"the held-out loss was {loss_in_words(min(finite))}"
        if finite
        else "the held-out loss was no number"
    )
