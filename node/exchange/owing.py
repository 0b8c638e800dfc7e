"""What a node owes the swarm, through a round: sent + kept = accumulated, rounded once at most.

A round accumulates what is owed (its pseudo-gradient and the residual) and sends it, encoded, slice by
slice. That is pending until the round's commit: where it took a contribution, what the encoding left
out is kept; everywhere else, all of it. A round that ends otherwise leaves the residual as it was.

So does one that commits nothing at all, and its samples are leased again. Else all nodes would owe what
each has trained from the same state, and together overshoot by as many rounds.

What is pending is (global − published) + residual, formed where it is needed: the three stay as they are
from the encoding to the commit, so no fourth vector keeps their sum. Where one of them must change
before, what is pending is set aside.

A commit took a contribution when it names the very bytes that this node has sent: a reducer that names
a contributor of which it has nothing, or has something else, makes nobody drop anything. What the commit
says was cut off a contribution is let go like late work, and said: owed again, it would be cut again.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import numpy as np
import structlog

from node.disk.history import SentLog, SentSlice
from node.disk.snapshots import Owed
from node.exchange.codecs.codec import Opened
from node.exchange.error_feedback import ReducerError, Residual
from node.exchange.outer_optimizer import OuterRules
from node.exchange.reduction import Sender, SliceResult
from node.outer_state import Vector
from protocol.run.models import Layout
from protocol.wire.payload import CONTRIBUTION, Payload
from protocol.wire.rounds import (
    WHOLE,
    Commit,
    NodeId,
    Slice,
    SliceOutcome,
    contribution_digest,
    training_in,
)

log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class Pending:
    """What this node has sent, or would have sent, in a round that is not yet committed."""

    round: int
    fragment: int
    base_digest: bytes = b""  # of the state that it was trained from
    plan_opened_at: float = 0.0
    share: float = 1.0  # of the round's inner steps that were trained
    sent: dict[int, SentSlice] = field(default_factory=dict)  # by the slice's index
    encoded: dict[int, Opened] = field(default_factory=dict)  # the bodies of these


@dataclass(slots=True, kw_only=True)
class _Aside:
    """What was pending when what it is formed from was about to change."""

    round: int
    fragment: int
    accumulated: Vector  # [fragment]: pseudo-gradient plus residual
    published: Vector  # [fragment]: the newest
    later: Vector | None = None  # [fragment]: what was trained since, and is owed on top


class _Fate(Enum):
    """What a commit did with this node's contribution to a slice."""

    TAKEN = auto()  # what is pending of it
    TAKEN_BEFORE = auto()  # what was sent before that: by a killed process, or by an earlier plan
    MISSED = auto()


class Owing:
    """The residual, the reducer's error, and what is pending of the round in flight."""

    def __init__(
        self,
        *,
        layout: Layout,
        parameters: Vector,
        published: Vector,
        rules: OuterRules,
        residual: Residual,
        reducer_error: ReducerError,
        sender: Sender,
        sent: SentLog | None = None,
    ) -> None:
        """`published` begins with what the island published last, of one fragment.

        `sent` is what earlier processes of the node have sent; None: nothing is known of any.
        """
        self.before_change: Callable[[slice], None] = lambda span: None
        """Hears of a span before what is owed of it changes outside of a commit."""
        self.residual = residual
        self.reducer_error = reducer_error
        self.pending: Pending | None = None
        self.holds_work = False
        """Whether inner steps that no commit took came into the residual since `note_saved`."""
        self.let_go_rounds = 0.0
        """How many rounds' pseudo-gradients of late work this process has let go."""
        self.is_taken = True
        """Whether the latest commit took of every slice what this node sent for its round."""
        self.layout = layout
        self.parameters = parameters
        self._published = published
        self.rules = rules
        """Those of the run file."""
        self.rules_in: Callable[[int], OuterRules] = lambda round: rules
        """Of a round: amendments change them."""
        self.sender = sender
        self._sent = sent or SentLog(None)
        # The residual of these fragments may hold work of earlier rounds, and not only what encoding left
        # out.
        self._late_fragments = set(range(len(layout.fragments)))
        self._settled_round = 0
        self._aside: _Aside | None = None
        self._rooms: list[Vector] = []  # not in use: new memory takes longer to get than to write

    def accumulate(
        self,
        *,
        round: int,
        fragment: int,
        base_digest: bytes = b"",
        plan_opened_at: float = 0.0,
        share: float = 1.0,
    ) -> Pending:
        """What is owed of a fragment that was published, (global − published) + residual, is pending now.

        `share` is the part of the round's inner steps that was trained. Of late work no more is owed
        than the residual's rule allows. Heavy.
        """
        aside, self._aside = self._aside, None
        if aside is not None and (aside.round, aside.fragment) == (round, fragment):
            # Other fragments were handed in since, in the same memory.
            self._published[: aside.published.size] = aside.published
        span = self.layout.fragments[fragment].span
        if self.residual.goes_by(self.rules_in(round).uplink):
            # What a coarse codec has left out is late work for one that sends all of it at once.
            self._late_fragments.update(range(len(self.layout.fragments)))
        if fragment in self._late_fragments:
            self.before_change(span)
            rounds = self.residual.limit(
                span, self.parameters[span], self._published_of(span), share=share
            )
            self._say_let_go(rounds, round=round, fragment=fragment)
        self.pending = Pending(
            round=round,
            fragment=fragment,
            base_digest=base_digest,
            plan_opened_at=plan_opened_at,
            share=share,
        )
        return self.pending

    @contextmanager
    def _room(self, num_elements: int) -> Iterator[Vector]:
        """Memory for so many values, kept from slice to slice and from round to round."""
        try:
            room = self._rooms.pop()
        except IndexError:
            room = np.empty(0, dtype=np.float32)
        if room.size < num_elements:
            room = np.empty(num_elements, dtype=np.float32)
        yield room[:num_elements]
        self._rooms.append(room)

    def accumulated(self, start: int, num_elements: int, *, out: Vector | None = None) -> Vector:
        """What is pending of a part of the fragment [num_elements], in `out` or new memory. Heavy."""
        pending, end = self.pending, start + num_elements
        assert pending is not None, "accumulate comes first"
        if (aside := self._aside_of(pending)) is not None:
            return aside.accumulated[start:end]
        span = self.layout.span_of(pending.fragment, start, num_elements)
        return self.residual.owed(span, self.parameters[span], self._published[start:end], out=out)

    def _published_of(self, span: slice) -> Vector:
        """What was published last, if it is of the fragment with this span."""
        return self._published[: span.stop - span.start]

    def _aside_of(self, pending: Pending) -> _Aside | None:
        aside = self._aside
        is_its_own = aside is not None and aside.round == pending.round
        return aside if is_its_own else None

    def _set_aside(self) -> None:
        """Keeps what is pending as vectors: what it is formed from is about to change."""
        pending = self.pending
        if pending is None or self._aside_of(pending) is not None:
            return
        span = self.layout.fragments[pending.fragment].span
        self._aside = _Aside(
            round=pending.round,
            fragment=pending.fragment,
            accumulated=self.accumulated(0, span.stop - span.start),
            published=self._published_of(span).copy(),
        )

    def contribution_to(self, part: Slice, *, samples: int, tokens: int) -> Payload:
        """What is pending of a slice, encoded. Heavy; raises CodecError when it is not finite.

        Raises AlreadySignedError when this process has contributed something else by the same plan.
        """
        assert self.pending is not None, "accumulate comes first"
        uplink = self.rules_in(self.pending.round).uplink
        with self._room(part.num_elements) as room:
            encoded = uplink.encoded(self.accumulated(part.start, part.num_elements, out=room))
        payload = Payload.seal(
            kind=CONTRIBUTION,
            run_digest=self.sender.run_digest,
            round=self.pending.round,
            fragment=self.pending.fragment,
            slice_index=part.index,
            start=part.start,
            num_elements=part.num_elements,
            codec=uplink.name,
            samples=samples,
            tokens=tokens,
            sender_id=self.sender.node_id,
            body=encoded.body,
            base_digest=self.pending.base_digest,
            plan_opened_at=self.pending.plan_opened_at,
        )
        payload = self.sender.signed(payload)
        sent = SentSlice(
            index=part.index,
            start=part.start,
            num_elements=part.num_elements,
            contribution=contribution_digest(payload.header.body_digest),
        )
        self._sent.note(self.pending.round, sent)
        self.pending.sent[part.index], self.pending.encoded[part.index] = sent, encoded
        return payload

    def forget_pending(self) -> None:
        """The round ends without a commit for this node: what is owed is as it was before."""
        self.pending = None

    def what_matters_of(self, commit: Commit) -> Commit:
        """The commit without what settles nothing here: all of it counts only for what is pending."""
        is_pending = self.pending is not None and self.pending.round == commit.round
        if is_pending or self.reducer_error.has_staged(commit.round):
            return commit
        slices = []
        for outcome in commit.slices:
            named = zip(outcome.contributors, outcome.contributions, strict=True)
            ours = [(c, digest) for c, digest in named if c.node_id == self.sender.node_id]
            if ours and _tokens_of(outcome, self.sender.node_id) > 0:
                contributors, contributions = zip(*ours, strict=True)
                place = outcome.contributors.index(contributors[0])
                slices.append(
                    replace(
                        outcome,
                        contributors=contributors,
                        contributions=contributions,
                        factors=outcome.factors[place : place + 1],
                        holder_ids=(),
                    )
                )
        return replace(commit, slices=tuple(slices), assignments=())

    def norm(self) -> float:
        """How much is owed: the Euclidean norm of the residual. Heavy."""
        return float(np.linalg.norm(self.residual.values))

    def step_back(self, round: int) -> None:
        """The state counts as that of an earlier round; what is owed stays, whatever was sent."""
        self.forget_pending()
        self._arrive_at(round)

    def published_of(self, fragment: int) -> Vector:
        """What the island published last of a fragment, before it publishes outside of any round. Heavy.

        What is pending is set aside, for it does so in the same memory.
        """
        self._set_aside()
        aside = self._aside
        if aside is not None and aside.fragment == fragment:
            return aside.published
        return self._published_of(self.layout.fragments[fragment].span)

    def add_published(self, fragment: int, before: Vector) -> None:
        """Owes what the island has just published of a fragment outside of any round.

        `before` is what `published_of` gave. What a contribution in flight holds is settled by its
        commit, so of that fragment only the rest is added. Heavy.
        """
        self.holds_work = True
        self._late_fragments.add(fragment)
        span, pending = self.layout.fragments[fragment].span, self.pending
        published = self._published_of(span)
        self.before_change(span)
        if pending is None or pending.fragment != fragment:
            self.residual.owed(
                span, self.parameters[span], published, out=self.residual.values[span]
            )
            return
        aside = self._aside_of(pending)
        assert aside is not None, "published_of comes first"
        later = before - published
        aside.later = later if aside.later is None else aside.later + later
        aside.published = published.copy()

    def note_result(self, result: SliceResult) -> None:
        """Remembers what a result of ours leaves for this node to owe if it is committed."""
        header = result.payload.header
        if result.error is not None and header.round > self._settled_round:
            tokens = {c.node_id: c.tokens for c in result.made_of.contributors}
            # A node that only reduces will weigh as much as the others next time.
            own_tokens = tokens.get(self.sender.node_id) or sum(tokens.values()) / len(tokens)
            self.reducer_error.stage(
                header.round,
                header.slice_index,
                result.payload.digest,
                result.error,
                share=own_tokens / result.weighed_tokens,
            )

    def settle(self, commit: Commit, reducers: Mapping[int, NodeId]) -> None:
        """Moves what is owed: by the residual's rules, then by those of the reducer's error.

        It comes before the global parameters move, of which what is pending is formed.
        `reducers` says who made the committed results, as far as that is known. The commit fits the
        layout (Outer checks it): nothing here may fail once the first element has moved.
        """
        pending = self.pending
        if pending is not None and pending.round != commit.round:
            pending = None
        self.residual.decay = self.rules_in(commit.round).residual_decay
        fates = {each.index: self._fate_of(each, commit.round, pending) for each in commit.slices}
        # Where late work has a bound at all.
        is_void = self.residual.most_owed < math.inf and all(
            outcome.digest is None for outcome in commit.slices
        )
        let_go = cut = 0.0
        is_screened = False
        for outcome in commit.slices:
            span = self.layout.span_of(commit.fragment, outcome.start, outcome.num_elements)
            fate = fates[outcome.index]
            if is_void:
                self._keep_later(outcome, span, pending)
                continue
            rounds = self._settle_residual(outcome, span, pending, fate)
            let_go += rounds * outcome.num_elements
            if fate is not _Fate.MISSED:
                taken = outcome.factor_of(self.sender.node_id)
                cut += (1 - taken) * outcome.num_elements
                is_screened |= taken * WHOLE < outcome.factor
            own_tokens = _tokens_of(outcome, self.sender.node_id)
            reducer = reducers.get(outcome.index)
            if reducer is not None:
                may_be_ours = reducer == self.sender.node_id
            else:  # a process that contributed knows what it has reduced; another one may have
                may_be_ours = own_tokens > 0 and pending is None
            error = self.reducer_error.settle(commit.round, outcome, span, may_be_ours=may_be_ours)
            if error is not None:
                self.residual.add(span, error)
        self.is_taken = _Fate.MISSED not in fates.values()
        if pending is not None:
            aside = self._aside_of(pending)
            if self.is_taken and (aside is None or aside.later is None):
                self._late_fragments.discard(commit.fragment)
            else:
                self._late_fragments.add(commit.fragment)
            size = self.layout.fragments[commit.fragment].num_elements
            if is_void:
                self._say_void(pending)
            self._say_let_go(let_go / size, round=commit.round, fragment=commit.fragment)
        if cut > 0:
            rounds = cut / self.layout.fragments[commit.fragment].num_elements
            self._say_cut(rounds, commit, is_screened=is_screened)
        self._arrive_at(commit.round)

    def _fate_of(self, outcome: SliceOutcome, round: int, pending: Pending | None) -> _Fate:
        """Whether the commit took what this node has sent of a slice, by the bytes that it names."""
        if outcome.digest is None or _tokens_of(outcome, self.sender.node_id) == 0:
            return _Fate.MISSED
        sent = self._named(outcome)
        if sent is not None and pending is not None and pending.sent.get(outcome.index) == sent:
            return _Fate.TAKEN
        if sent is not None and self._sent.has(round, sent):
            return _Fate.TAKEN_BEFORE
        if pending is None and not self._sent.knows(round):
            # What a process before this one sent is not known: to owe it again could count it twice.
            return _Fate.TAKEN_BEFORE
        log.warning(
            "a commit names this node for what it did not send: all of it stays owed",
            round=round,
            slice=outcome.index,
        )
        return _Fate.MISSED

    def _named(self, outcome: SliceOutcome) -> SentSlice | None:
        """What the commit says that this node has sent of a slice."""
        contribution = outcome.contribution_of(self.sender.node_id)
        if contribution is None:
            return None
        return SentSlice(
            index=outcome.index,
            start=outcome.start,
            num_elements=outcome.num_elements,
            contribution=contribution,
        )

    def _settle_residual(
        self, outcome: SliceOutcome, span: slice, pending: Pending | None, fate: _Fate
    ) -> float:
        """A taken contribution leaves its encoding error, any other stays.

        Returns how many rounds of late work are let go.
        """
        if fate is _Fate.TAKEN_BEFORE:
            # What was owed then was in it, and so were the samples of what is pending now. The encoding
            # error is not known any more; owing all of it again would count it twice.
            self.residual.values[span] = 0
        if pending is None:
            return 0.0
        let_go = 0.0
        match fate:
            case _Fate.TAKEN:
                self._settle_taken(outcome, span, pending.encoded[outcome.index])
            case _Fate.MISSED:
                let_go = self.residual.settle_missed(
                    span,
                    self.accumulated(outcome.start, outcome.num_elements),
                    share=pending.share,
                )
                self.holds_work = True
        self._keep_later(outcome, span, pending)
        return let_go

    def _keep_later(self, outcome: SliceOutcome, span: slice, pending: Pending | None) -> None:
        """Owes what was trained since what is pending was sent."""
        aside = None if pending is None else self._aside_of(pending)
        if aside is not None and aside.later is not None:
            values = self.residual.values[span]
            values += aside.later[outcome.start : outcome.start + outcome.num_elements]

    def _say_void(self, pending: Pending) -> None:
        self.let_go_rounds += pending.share
        log.warning(
            "a round committed nothing, and its work is let go: its samples are trained again",
            round=pending.round,
            fragment=pending.fragment,
            by_this_process=float(f"{self.let_go_rounds:.3g}"),
        )

    def _say_let_go(self, rounds: float, *, round: int, fragment: int) -> None:
        if rounds > 0:
            self.let_go_rounds += rounds
            log.warning(
                "late work is let go: so much of it at once would harm the model",
                round=round,
                fragment=fragment,
                rounds_of_work=float(f"{rounds:.2g}"),
                by_this_process=float(f"{self.let_go_rounds:.3g}"),
            )

    def _say_cut(self, rounds: float, commit: Commit, *, is_screened: bool) -> None:
        self.let_go_rounds += rounds
        if is_screened and training_in(commit.assignments) != (self.sender.node_id,):
            far = (
                "this node's work moves the weights more than twice as far as the others' does, or "
                "against most of it"
            )
            otherwise = (
                "give this node the learning rate, the tokens of a step and the data that the others "
                "have; a training loop sets its own rate, and swarm.learning_rate is the run's"
            )
        else:
            far = "this round moves the weights further than a round may after those before it"
            otherwise = "ask the run owner to lower the learning rates by 'atoll run amend'"
        log.warning(
            f"{far}: the swarm has not taken all of it, and the rest is let go",
            round=commit.round,
            fragment=commit.fragment,
            rounds_of_work=float(f"{rounds:.2g}"),
            by_this_process=float(f"{self.let_go_rounds:.3g}"),
            next_step=f"nothing, if it passes; else {otherwise}",
        )

    def _settle_taken(self, outcome: SliceOutcome, span: slice, encoded: Opened) -> None:
        if outcome.factor_of(self.sender.node_id) == 0:
            # What was refused whole cannot be right in what its encoding left out.
            self.residual.values[span] = 0
            return
        aside = None if self.pending is None else self._aside_of(self.pending)
        if aside is None:
            published = self._published[outcome.start : outcome.start + outcome.num_elements]
            settling = self.residual.settling_taken(span, self.parameters[span], published)
            encoded.each_tile(settling)
            return

        def settle(start: int, sent: Vector) -> None:
            tile = slice(span.start + start, span.start + start + sent.size)
            first = outcome.start + start
            self.residual.settle_taken(tile, aside.accumulated[first : first + sent.size], sent)

        encoded.each_tile(settle)

    def _arrive_at(self, round: int) -> None:
        """Nothing is pending any more of rounds up to this one."""
        self._settled_round = round
        self.reducer_error.forget(up_to_round=round)
        if self.pending is not None and self.pending.round <= round:
            self.pending = None
        if self._aside is not None and self._aside.round <= round:
            self._aside = None

    def restore(self, owed: Owed | None, *, round: int) -> None:
        """Takes up what was owed with another state; with None, nothing is owed any more.

        It comes before the other state takes the place of the one that is held.
        """
        if owed is not None and self.pending is not None and self.pending.round > round:
            self._set_aside()
        self.residual.values[:] = 0 if owed is None else owed.residual
        self.reducer_error.restore(None if owed is None else owed.reducer_error, round=round)
        self._late_fragments = set(range(len(self.layout.fragments)))
        if owed is None:
            self.pending = None
        self._arrive_at(round)

    def note_saved(self) -> None:
        """All that is owed is on the disk."""
        self.holds_work = False

    def held(self) -> Owed:
        """All that is owed, no copy of it: the next commit changes it."""
        return Owed(residual=self.residual.values, reducer_error=self.reducer_error.values)


def _tokens_of(outcome: SliceOutcome, node_id: NodeId) -> int:
    """What a node's contribution to a slice weighed; 0 when the slice did not take any."""
    return next((c.tokens for c in outcome.contributors if c.node_id == node_id), 0)
