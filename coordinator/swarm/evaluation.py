"""Held-out losses of committed states: who is asked, and what is kept of the answers. Pure.

One of those asked also has the model write on from the run's prompts. That takes longer, and nothing waits
for it but the end of the run. What losses say of the run is for coordinator.swarm.losses.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from coordinator.swarm.events import GoBack, Tell, Turn
from coordinator.swarm.losses import alarm_of, middle_loss
from coordinator.swarm.members import Member
from coordinator.swarm.state import (
    KEPT_WRITTEN,
    Evaluating,
    HeldOut,
    HolderLoss,
    SwarmState,
    Writing,
    Written,
    available_members,
    is_present,
    present_members,
)
from coordinator.swarm.weighing import (
    Kind,
    common_corpus,
    drawn,
    kind_of,
    say_of,
    unchecked,
    weights_of,
)
from protocol.wire.messages import Evaluated, EvaluationAsked, Wrote
from protocol.wire.rounds import NodeId, book_of_data

EVALUATORS = 3
"""Who are asked for one loss where the run goes by it: one that lies changes nothing."""

MOST_WRITING = 4
"""Models that write at the same time: what an earlier one writes is not waited for."""


def ask_if_due(turn: Turn) -> None:
    """Asks one ready member to evaluate a new committed state, when the rules want it evaluated.

    Void rounds leave the state as it was: its loss again would tell nothing, and the canary would believe
    that losses hardly move in this run.
    It holds that state until it applies the next commit, and its ranks are free, or ahead, while the
    bytes of that round travel: so nobody waits for it. The final state is for
    coordinator.swarm.end to ask about, which does wait.
    """
    if not turn.has_new_state:
        return
    turn.has_new_state = False
    committed, rules = turn.state.committed_round, turn.state.rules
    is_due = committed % rules.evaluate_every_rounds == 0 and committed < rules.total_rounds
    if is_due and _has_moved(turn.state):
        ask_somebody(turn)


def _has_moved(state: SwarmState) -> bool:
    """Whether rounds since the newest loss have changed the state, as far as they are kept."""
    if not state.held_out:
        return True
    since = [one for one in state.recent if one.commit.round > state.held_out[-1].round]
    is_all_kept = len(since) == state.committed_round - state.held_out[-1].round
    return not is_all_kept or not all(one.is_void for one in since)


def may_be_evaluated(state: SwarmState) -> bool:
    """Whether somebody who is here can evaluate, or nobody is here and anybody may come."""
    present = present_members(state)
    return not present or not all(member.cannot_evaluate for member in present)


def ask_somebody(turn: Turn) -> None:
    """Asks a ready member that can to evaluate the committed state; with none, nobody evaluates.

    Another one each time, so that not always the same node pays; three, by lot, where the run goes by the
    loss; where data are private, one of each holder. Supersedes an evaluation that has not come back, whose
    state is gone, but for what holders have said of it.
    """
    _keep_found(turn)
    state = turn.state
    ready = [member for member in available_members(state) if not member.cannot_evaluate]
    if not ready:
        return
    ready = _on_common_text(state, ready)
    committed, rules = state.committed_round, state.rules
    place = committed // rules.evaluate_every_rounds  # rounds alone could hit one node every time
    holders: dict[int, list[Member]] = {}
    for member in ready:
        book = book_of_data(member.corpus.digest) if rules.has_private_data else 0
        holders.setdefault(book, []).append(member)
    if rules.watches_loss and not rules.has_private_data:
        chosen = drawn_evaluators(state, ready)
    else:
        chosen = sorted(nodes[place % len(nodes)].node_id for nodes in holders.values())
    current = state.open_round
    until = (turn.now if current is None else current.commit_deadline) + rules.apply_seconds
    asked = Evaluating(node_ids=tuple(chosen), round=committed, until=until)
    turn.state = replace(state, evaluating=asked)
    writer = chosen[place % len(chosen)] if rules.num_prompts else None
    if writer is not None:
        asks = (*state.writing, Writing(node_id=writer, round=committed))
        turn.state = replace(turn.state, writing=asks[-MOST_WRITING:])
    others = tuple(node_id for node_id in chosen if node_id != writer)
    if others:
        turn.act(Tell(message=EvaluationAsked(round=committed), to=others))
    if writer is not None:
        turn.act(Tell(message=EvaluationAsked(round=committed, writes=True), to=(writer,)))


def _on_common_text(state: SwarmState, ready: list[Member]) -> list[Member]:
    """Those with the data of most weight, where any has: losses on other texts are no curve together.

    Nor are those of loops that evaluate by other functions: who goes on with the curve comes first.
    """
    if state.rules.has_private_data:
        return ready
    common = common_corpus(state)
    of_run = [member for member in ready if kind_of(member) is not Kind.LOOP]
    if common is not None:
        on_it = [m for m in of_run if m.corpus.num_samples and m.corpus.is_same(common)]
        if on_it:
            return on_it
    texts = Counter(_text_of(member) for member in ready)
    most = max(sorted(texts), key=lambda text: texts[text])
    text = state.held_out_text if state.held_out_text in texts else most
    return [member for member in ready if _text_of(member) == text]


def _text_of(member: Member) -> str:
    """What its losses are of: its data, and of a loop the function; empty where nobody knows."""
    if kind_of(member) is Kind.LOOP:
        return member.evaluates_by
    corpus = member.corpus
    held_out = corpus.held_out_digest or b""
    return corpus.digest.hex() + held_out.hex() if corpus.num_samples else ""


def drawn_evaluators(state: SwarmState, ready: Sequence[Member]) -> list[NodeId]:
    """Who evaluates, in the order of their ids: by a secret, so that nobody can be where it is wanted.

    Each is as likely as its confirmed work weighs, and of another invite than those before, as far as there
    are such. Who has no work comes after those who have.
    """
    say = say_of(ready, state.committed_round, unchecked(state))
    chosen: list[Member] = []
    while len(chosen) < min(EVALUATORS, len(ready)):
        left = [member for member in ready if member not in chosen]
        weighing = [member for member in left if say.weights.get(member.node_id)] or left
        invites = {member.invite_id for member in chosen}
        may = [member for member in weighing if member.invite_id not in invites] or [
            member for member in left if member.invite_id not in invites
        ]
        may = may or weighing
        weights = weights_of(say, (member.node_id for member in may))
        chosen.append(drawn(state, may, weights, "evaluator", len(chosen), state.committed_round))
    return sorted(member.node_id for member in chosen)


def wrote(turn: Turn, node_id: NodeId, round: int, report: Wrote) -> None:
    """Keeps what a model wrote, if its node was asked: also when later models were asked meanwhile."""
    state = turn.state
    asked = Writing(node_id=node_id, round=round)
    if asked not in state.writing:
        return
    texts, why_not = report.texts, report.why_not
    if not why_not and len(texts) != state.rules.num_prompts:
        why_not = f"it gave {len(texts)} texts for {state.rules.num_prompts} prompts"
    found = Written(round=round, node_id=node_id, texts=() if why_not else texts, why_not=why_not)
    others = [one for one in state.written if one.round != round]
    turn.state = replace(
        state,
        writing=tuple(one for one in state.writing if one != asked),
        written=_spread_out(sorted([*others, found], key=lambda one: one.round)),
    )


def _spread_out(written: Sequence[Written]) -> tuple[Written, ...]:
    """The latest ones, and of those before the first and every other: the older, the further apart."""
    if len(written) <= KEPT_WRITTEN:
        return tuple(written)
    half = KEPT_WRITTEN // 2
    return (*written[:-half][::2], *written[-half:])


def awaited_writers(state: SwarmState) -> list[NodeId]:
    """Who is here and has yet to say what the final model writes."""
    return [
        one.node_id
        for one in state.writing
        if one.round == state.rules.total_rounds and is_present(state, one.node_id)
    ]


def evaluated(turn: Turn, node_id: NodeId, round: int, report: Evaluated) -> None:
    """Keeps the loss, if it is one that was asked for, once all of them are here."""
    asked = turn.state.evaluating
    if asked is None or round != asked.round or node_id not in asked.node_ids:
        return
    own = HolderLoss(
        node_id=node_id,
        loss=report.held_out_loss,
        weight=turn.state.members[node_id].corpus.num_held_out_tokens or report.tokens,
        tokens=report.tokens,
        metric=report.metric,
        by_source=report.by_source,
    )
    _wait_for(turn, [n for n in asked.node_ids if n != node_id], found=(*asked.found, own))


def give_up_evaluation(turn: Turn) -> None:
    """Waits no longer for evaluations that are late or whose nodes are gone."""
    asked = turn.state.evaluating
    if asked is not None:
        is_late = turn.now >= asked.until
        here = [n for n in asked.node_ids if not is_late and is_present(turn.state, n)]
        _wait_for(turn, here, found=asked.found)


def _wait_for(turn: Turn, node_ids: Sequence[NodeId], *, found: tuple[HolderLoss, ...]) -> None:
    asked = turn.state.evaluating
    assert asked is not None
    if (asked.node_ids, asked.found) != (tuple(node_ids), found):
        asked = replace(asked, node_ids=tuple(node_ids), found=found)
        turn.state = replace(turn.state, evaluating=asked)
    if not node_ids:
        _keep_found(turn)


def _keep_found(turn: Turn) -> None:
    """Ends an evaluation with what was found, if it was anything."""
    asked = turn.state.evaluating
    if asked is None:
        return
    turn.state = _noting_its_text(turn.state, asked)
    turn.state = replace(turn.state, differing=_differing(turn.state, asked))
    held_out = turn.state.held_out
    alarm = None
    is_steered = turn.state.paused is not None or turn.state.stopped is not None
    if turn.state.rules.watches_loss and not is_steered and turn.state.alarm is None:
        alarm = alarm_of(turn.state, asked.round, asked.found)
    found = _loss_of(turn.state, asked) if asked.found else None
    if found is not None and math.isfinite(found.loss):
        held_out = (*held_out, found)
    turn.state = replace(turn.state, held_out=held_out, evaluating=None)
    if alarm is not None:
        turn.state = replace(turn.state, alarm=alarm, end_waits_until=None)
        sound_alarm(turn)


def _noting_its_text(state: SwarmState, asked: Evaluating) -> SwarmState:
    """With what the losses are of: where it is another text, they begin anew, and nothing has jumped."""
    if not asked.found or state.rules.has_private_data:
        return state
    text = _text_of(state.members[middle_loss(state, asked.found).node_id])
    before = state.held_out_text
    if not text:
        return state
    if before.startswith(text) or text.startswith(before or text):  # as of nodes that tell less
        return replace(state, held_out_text=max(before, text, key=len))
    return replace(state, held_out_text=text, held_out_text_from=asked.round)


NOISE_SHARE = 0.05
"""Of a loss: losses of one state by the same function of the same data differ by less, on any device."""


def _differing(state: SwarmState, asked: Evaluating) -> HeldOut | None:
    """Losses of one state that are of other data or code, or of a liar; those of before until they agree."""
    if state.rules.has_private_data:  # texts are not equally hard
        return None
    found = sorted((f for f in asked.found if math.isfinite(f.loss)), key=lambda one: one.loss)
    if found and found[-1].loss - found[0].loss > NOISE_SHARE * abs(found[-1].loss):
        loss = middle_loss(state, found).loss
        return HeldOut(round=asked.round, loss=loss, tokens=0, holders=tuple(found))
    if (was := state.differing) is None:
        return None
    apart = [one.node_id for one in (was.holders[0], was.holders[-1])]
    texts = {_text_of(state.members[n]) if is_present(state, n) else n for n in apart}
    is_settled = len(texts) > 1 or {one.node_id for one in found}.issuperset(apart)
    return None if is_settled else was


def sound_alarm(turn: Turn) -> None:
    """Has the edge rule what follows from an alarm; once nodes are back after a start."""
    alarm = turn.state.alarm
    if alarm is not None and alarm.until is None and turn.state.awaited is None:
        turn.act(GoBack(alarm=alarm))


def _loss_of(state: SwarmState, asked: Evaluating) -> HeldOut:
    """Of private data the mean over held-out tokens of the holders' splits, of which they evaluate parts."""
    if not state.rules.has_private_data:
        one = middle_loss(state, asked.found)
        return HeldOut(
            round=asked.round,
            loss=one.loss,
            tokens=one.tokens,
            metric=one.metric,
            by_source=one.by_source,
        )
    found = sorted(asked.found, key=lambda one: one.node_id)
    weights = [one.weight for one in found]
    if not any(weights):  # nobody knows how much it has
        weights = [1 for _ in found]
    metrics = [one.metric for one in found if one.metric is not None]
    return HeldOut(
        round=asked.round,
        loss=_mean(weights, [one.loss for one in found]),
        tokens=sum(one.tokens for one in found),
        metric=_mean(weights, metrics) if len(metrics) == len(found) else None,
        holders=tuple(found),
    )


def _mean(weights: Sequence[int], values: Sequence[float]) -> float:
    if len(values) == 1:  # as it was told
        return values[0]
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
