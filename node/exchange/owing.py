"""What a node owes the swarm, through a round: sent + kept = accumulated, rounded once at most.

A round accumulates what is owed (its pseudo-gradient and the residual) and sends it, encoded, slice by
slice. That is pending until the round's commit: where it took a contribution, what the encoding left
out is kept; everywhere else, all of it. A round that ends otherwise leaves the residual as it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from node.exchange.codecs.codec import Codec
from node.exchange.reducer_error import ReducerError
from node.exchange.reduction import SliceResult
from node.exchange.residual import Residual
from node.exchange.state.snapshot import Owed
from node.outer_state import Layout, Vector
from protocol.payload import CONTRIBUTION, Payload
from protocol.rounds import Commit, Digest, NodeId, Slice, SliceOutcome


@dataclass(slots=True, kw_only=True)
class Pending:
    """What this node has sent, or would have sent, in a round that is not yet committed."""

    round: int
    fragment: int
    accumulated: Vector  # [fragment]: pseudo-gradient plus residual
    bodies: dict[int, bytes] = field(default_factory=dict)  # slice index -> as encoded for the wire
    later: Vector | None = None  # [fragment]: what was trained since, and is owed on top


class Owing:
    """The residual, the reducer's error, and what is pending of the round in flight."""

    def __init__(
        self,
        *,
        layout: Layout,
        parameters: Vector,
        published: Vector,
        uplink: Codec,
        residual: Residual,
        reducer_error: ReducerError,
        run_digest: Digest,
        node_id: NodeId,
    ) -> None:
        self.residual = residual
        self.reducer_error = reducer_error
        self.pending: Pending | None = None
        self.holds_work = False
        """Whether inner steps that no commit took came into the residual since `note_saved`."""
        self._layout = layout
        self._parameters = parameters
        self._published = published
        self._uplink = uplink
        self._run_digest = run_digest
        self._node_id = node_id
        self._settled_round = 0
        self._room: Vector | None = None

    def accumulate(self, *, round: int, fragment: int) -> Pending:
        """Forms (global − published) + residual of a fragment, which is pending from now on."""
        span = self._layout.fragments[fragment].span
        if self._room is None:
            # Kept from round to round: new memory takes longer to get than to write.
            largest = max(fragment.num_elements for fragment in self._layout.fragments)
            self._room = np.empty(largest, dtype=np.float32)
        accumulated = self.residual.owed(
            span,
            self._parameters[span],
            self._published[span],
            out=self._room[: span.stop - span.start],
        )
        self.pending = Pending(round=round, fragment=fragment, accumulated=accumulated)
        return self.pending

    def contribution_to(self, part: Slice, tokens: int) -> Payload:
        """What is pending of a slice, encoded. Heavy; raises CodecError when it is not finite."""
        assert self.pending is not None, "accumulate comes first"
        end = part.start + part.num_elements
        body = self._uplink.encode(self.pending.accumulated[part.start : end])
        self.pending.bodies[part.index] = body
        return Payload.seal(
            kind=CONTRIBUTION,
            run_digest=self._run_digest,
            round=self.pending.round,
            fragment=self.pending.fragment,
            slice_index=part.index,
            start=part.start,
            num_elements=part.num_elements,
            codec=self._uplink.name,
            tokens=tokens,
            sender_id=self._node_id,
            body=body,
        )

    def forget_pending(self) -> None:
        """The round ends without a commit for this node: what is owed is as it was before."""
        self.pending = None

    def what_matters_of(self, commit: Commit) -> Commit:
        """The commit without what settles nothing here: all of it counts only for what is pending."""
        is_pending = self.pending is not None and self.pending.round == commit.round
        if is_pending or self.reducer_error.has_staged(commit.round):
            return commit
        ours = (o for o in commit.slices if _tokens_of(o, self._node_id) > 0)
        slices = tuple(
            replace(
                outcome,
                contributors=tuple(c for c in outcome.contributors if c.node_id == self._node_id),
                holder_ids=(),
            )
            for outcome in ours
        )
        return replace(commit, slices=slices, assignments=())

    def norm(self) -> float:
        """How much is owed: the Euclidean norm of the residual. Heavy."""
        return float(np.linalg.norm(self.residual.values))

    def step_back(self, round: int) -> None:
        """The state counts as that of an earlier round; what is owed stays, whatever was sent."""
        self.forget_pending()
        self._arrive_at(round)

    def published_of(self, fragment: int) -> Vector:
        """A copy of what the island published last of a fragment."""
        return self._published[self._layout.fragments[fragment].span].copy()

    def add_published(self, fragment: int, before: Vector) -> None:
        """Owes what the island has just published of a fragment outside of any round.

        `before` is what it had published before. What a contribution in flight holds is settled by
        its commit, so of that fragment only the rest is added.
        """
        self.holds_work = True
        span, pending = self._layout.fragments[fragment].span, self.pending
        if pending is None or pending.fragment != fragment:
            values = self.residual.values[span]
            values += self._parameters[span] - self._published[span]
            return
        later = before - self._published[span]
        pending.later = later if pending.later is None else pending.later + later

    def note_result(self, result: SliceResult) -> None:
        """Remembers what a result of ours leaves for this node to owe if it is committed."""
        header = result.payload.header
        if result.error is not None and header.round > self._settled_round:
            tokens = {c.node_id: c.tokens for c in result.contributors}
            # Who only reduces will weigh as much as the others next time.
            own_tokens = tokens.get(self._node_id) or sum(tokens.values()) / len(tokens)
            self.reducer_error.stage(
                header.round,
                header.slice_index,
                result.payload.digest,
                result.error,
                share=own_tokens / result.weighed_tokens,
            )

    def settle(self, commit: Commit, reducers: Mapping[int, NodeId]) -> None:
        """Moves what is owed: by the residual's rules, then by those of the reducer's error.

        `reducers` says who made the committed results, as far as that is known.
        """
        pending = self.pending
        if pending is not None and pending.round != commit.round:
            pending = None
        for outcome in commit.slices:
            span = self._layout.span_of(commit.fragment, outcome.start, outcome.num_elements)
            self._settle_residual(outcome, span, pending)
            own_tokens = _tokens_of(outcome, self._node_id)
            reducer = reducers.get(outcome.index)
            if reducer is not None:
                may_be_ours = reducer == self._node_id
            else:  # a process that contributed knows what it has reduced; another one may have
                may_be_ours = own_tokens > 0 and pending is None
            error = self.reducer_error.settle(commit.round, outcome, span, may_be_ours=may_be_ours)
            if error is not None:
                self.residual.add(span, error)
        self._arrive_at(commit.round)

    def _settle_residual(self, outcome: SliceOutcome, span: slice, pending: Pending | None) -> None:
        """A taken contribution leaves its encoding error, any other stays whole."""
        is_taken = _tokens_of(outcome, self._node_id) > 0
        if pending is None:
            if is_taken:
                # Sent by this node before it was restarted: what was owed then was in it. The
                # encoding error is not known any more; owing all of it again would count twice.
                self.residual.values[span] = 0
            return
        part = slice(outcome.start, outcome.start + outcome.num_elements)
        if is_taken:
            self._settle_taken(span, pending.accumulated[part], pending.bodies[outcome.index])
        else:
            self.residual.settle_missed(span, pending.accumulated[part])
            self.holds_work = True
        if pending.later is not None:
            self.residual.values[span] += pending.later[part]

    def _settle_taken(self, span: slice, accumulated: Vector, body: bytes) -> None:
        def settle(start: int, sent: Vector) -> None:
            end = start + sent.size
            tile = slice(span.start + start, span.start + end)
            self.residual.settle_taken(tile, accumulated[start:end], sent)

        self._uplink.each_tile(body, accumulated.size, settle)

    def _arrive_at(self, round: int) -> None:
        """Nothing is pending any more of rounds up to this one."""
        self._settled_round = round
        self.reducer_error.forget(up_to_round=round)
        if self.pending is not None and self.pending.round <= round:
            self.pending = None

    def restore(self, owed: Owed | None, *, round: int) -> None:
        """Takes up what was owed with another state; with None, nothing is owed any more."""
        self.residual.values[:] = 0 if owed is None else owed.residual
        self.reducer_error.restore(None if owed is None else owed.reducer_error, round=round)
        if owed is None:
            self.pending = None
        self._arrive_at(round)

    def note_saved(self) -> None:
        """All that is owed is on the disk."""
        self.holds_work = False

    def held(self) -> Owed:
        """All that is owed, no copy of it: the next commit changes it."""
        return Owed(residual=self.residual.values, reducer_error=self.reducer_error.values)

    def kept_elements(self) -> int:
        """Of how many elements this node, as their reducer, still has to add an error to a mean."""
        kept = self.reducer_error.values
        return 0 if kept is None else int(np.count_nonzero(kept))


def _tokens_of(outcome: SliceOutcome, node_id: NodeId) -> int:
    """What a node's contribution to a slice weighed; 0 when the slice did not take any."""
    return next((c.tokens for c in outcome.contributors if c.node_id == node_id), 0)
