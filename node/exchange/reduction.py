"""A slice's result: its contributions screened and merged, encoded once, as the same bytes for everyone."""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import structlog
from blake3 import blake3

from node.exchange.codecs.codec import Codec, Opened
from node.exchange.codecs.dense import Bf16, round_to_bf16
from node.exchange.mean import (
    BlockSums,
    Encoded,
    Passes,
    UndecodableError,
    cosines_among,
    largest_norm,
    shares,
    stretched_to,
    weighted_sum,
)
from node.exchange.screening import (
    COUNTED_ROUNDS,
    MOST_OF_MEAN_WEIGHT,
    Verdict,
    allowances,
    bounded_weights,
    contradicted,
    screened,
    tokens_of_late,
    votes_about,
)
from node.outer_state import Vector
from protocol.run.run_spec import Merge
from protocol.trust.receipts import PayloadSigner
from protocol.wire.messages import Reduced
from protocol.wire.payload import RESULT, Payload
from protocol.wire.rounds import (
    WHOLE,
    ContributionDigest,
    Contributor,
    Digest,
    NodeId,
    Plan,
    Slice,
    book_of,
    contribution_digest,
)

log = structlog.get_logger()

AS_KEPT = Bf16()
"""What a reducer's error is rounded to where it is made, and sent to auditors in. In fp32 it would be half of
all that an auditor is given; its last bits are a thousandth of what the encoding rounds away."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SliceResult:
    """What a reducer makes of a slice."""

    payload: Payload
    encoded: Opened = field(repr=False)  # the payload's body
    made_of: Reduced  # without the result; left out contributors have a factor of 0 in it
    weighed_tokens: int  # what a token's work was divided by: all tokens, those of late work too
    error: Vector | None = field(repr=False)  # [slice] that was rounded away, if asked for

    @property
    def report(self) -> Reduced:
        """What the coordinator is told of it."""
        header = self.payload.header
        return replace(
            self.made_of, digest=self.payload.digest, norm=header.norm, header=header.encode()
        )


def _add(values: Vector, owed: Vector, downlink: Codec) -> None:
    def add(first: int, past: int) -> None:
        np.add(values[first:past], owed[first:past], out=values[first:past])

    downlink.tiles.each_run(values.size, add)


def _encoded(
    values: Vector, downlink: Codec, *, leaves_error: bool, rounds_error: bool
) -> tuple[Opened, float]:
    """The values encoded, and the norm of what that decodes to. Where wanted, its error stays in them."""
    encoded = downlink.encoded(values)
    squares = BlockSums(values.size)

    def leave_rounded_away(start: int, decoded: Vector) -> None:
        squares.take(start, decoded)
        if leaves_error:
            tile = values[start : start + decoded.size]
            np.subtract(tile, decoded, out=tile)
            if rounds_error:
                round_to_bf16(tile)

    encoded.each_tile(leave_rounded_away)
    return encoded, squares.norm()


def digest_of_error(error: Vector | None) -> bytes:
    """What names a reducer's error: BLAKE3 of its body in AS_KEPT; empty for none."""
    return b"" if error is None else blake3(AS_KEPT.encode(error)).digest()


class Sender(NamedTuple):
    """In whose name contributions and results are made, and for which run."""

    run_digest: Digest
    node_id: NodeId
    signer: PayloadSigner | None = None  # None where nobody asks for a signature

    def signed(self, payload: Payload) -> Payload:
        """The payload as it leaves here; raises AlreadySignedError."""
        return payload if self.signer is None else self.signer.signed(payload)

    def signed_result(
        self, payload: Payload, contributions: Mapping[NodeId, ContributionDigest]
    ) -> Payload:
        """A result likewise, that is made of these."""
        if self.signer is None:
            return payload
        return self.signer.signed_result(payload, contributions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Merging:
    """How a run's contributions become one, and what a reducer goes by where it reduces a slice."""

    merge: Merge = "mean"
    is_screened: bool = True
    is_audited: bool = False
    most_weight: float | None = None  # the part of a mean that may be of one data holder
    missed: Mapping[NodeId, int] = field(default_factory=dict)  # see `missed_in_a_row`
    norm_of_parameters: Callable[[], float] | None = None
    """Of the slice: what no training exceeds by as much; None: nothing is too large."""


_AS_MEAN = Merging()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Merged:
    values: Vector
    verdicts: Mapping[NodeId, Verdict]
    weighed: int  # by what weights were divided


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """A slice with the contributions that are in its mean: what was here when that began."""

    plan: Plan
    slice: Slice
    contributions: Mapping[NodeId, Payload]  # by sender
    late: Set[NodeId] = frozenset()  # whose contributions were waited for in vain
    uplink: Codec
    context: int  # tokens of a sample
    attempt: int = 0  # takeovers of the slice so far

    def result(
        self,
        *,
        downlink: Codec,
        sender: Sender,
        by: Merging = _AS_MEAN,
        carried: Vector | None = None,
        wants_error: bool = False,
        rounds_error: bool = False,
    ) -> SliceResult | None:
        """The encoded mean with whose contributions it holds, or None when there are none.

        `carried` [slice] is added to the mean before it is encoded (node.exchange.error_feedback). An error
        that auditors may be given is rounded, to what AS_KEPT holds.

        Who is late will contribute in a later round: their tokens count now, those of all samples that
        they were assigned, unless they have missed COUNTED_ROUNDS: of what these owe no more is kept
        (node.exchange.error_feedback). Who is gone or excused has nothing to bring, and is not late.

        Contributions are added in the order of node ids, so that equal contributions give equal
        bytes. One that does not decode, or that screening leaves out, counts for nothing, and that is
        said. Heavy.
        """
        merged = self._merged(sender.node_id, by)
        if merged is None:
            return None
        values = merged.values
        if carried is not None:
            _add(values, carried, downlink)
        encoded, norm = _encoded(
            values, downlink, leaves_error=wants_error, rounds_error=rounds_error
        )
        error = values if wants_error else None
        named = {
            node_id: contribution_digest(self.contributions[node_id].header.body_digest)
            for node_id in merged.verdicts
        }
        made_of = self._made_of(merged.verdicts, named, by)
        if by.is_audited:
            made_of = replace(
                made_of, error_before=digest_of_error(carried), error_after=digest_of_error(error)
            )
        payload = Payload.seal(
            kind=RESULT,
            run_digest=sender.run_digest,
            round=self.plan.round,
            fragment=self.plan.fragment,
            slice_index=self.slice.index,
            start=self.slice.start,
            num_elements=self.slice.num_elements,
            codec=downlink.name,
            sender_id=sender.node_id,
            body=encoded.body,
            norm=norm,
            base_digest=self.plan.base_digest,
            attempt=self.attempt,
            plan_opened_at=self.plan.opened_at,
            report_digest=made_of.statement_digest if by.is_audited else b"",
        )
        return SliceResult(
            payload=sender.signed_result(payload, named),
            encoded=encoded,
            made_of=made_of,
            weighed_tokens=merged.weighed,
            error=error,
        )

    def _made_of(
        self,
        verdicts: Mapping[NodeId, Verdict],
        named: Mapping[NodeId, ContributionDigest],
        by: Merging,
    ) -> Reduced:
        """What the result is made of, and for auditors who is missing; without the reducer's errors."""
        factors = tuple(verdict.factor for verdict in verdicts.values())
        made_of = Reduced(
            slice_index=self.slice.index,
            digest=None,
            contributors=tuple(map(self._contributor, verdicts)),
            contributions=tuple(named.values()),
            factors=() if set(factors) == {WHOLE} else factors,
        )
        if not by.is_audited:
            return made_of
        here = {*self.contributions, *self.late}
        return replace(
            made_of,
            late=tuple(sorted(self.late)),
            missed=tuple(sorted((n, r) for n, r in by.missed.items() if r > 0 and n in here)),
            undecodable=tuple(n for n, v in verdicts.items() if v.is_undecodable),
        )

    def _contributor(self, sender: NodeId) -> Contributor:
        header = self.contributions[sender].header
        return Contributor(node_id=sender, samples=header.samples, tokens=header.tokens)

    def _merged(self, node_id: NodeId, by: Merging) -> _Merged | None:
        """The mean of what screening lets in; None when that is nothing.

        What does not decode or counts for nothing is left out, and all is weighed anew without it: its
        tokens do not count either.
        """
        verdicts = dict.fromkeys(sorted(self.contributions), Verdict())
        merged = None
        while merged is None and (here := [s for s, v in verdicts.items() if v.factor > 0]):
            try:
                merged = self._merged_of(here, node_id, by, verdicts)
            except UndecodableError as error:
                why = str(error)
                verdicts[here[error.index]] = Verdict(factor=0, why=why, is_undecodable=True)
        for sender, verdict in verdicts.items():
            if verdict.why:
                log.warning(
                    "contribution left out" if verdict.factor == 0 else "contribution clipped",
                    round=self.plan.round,
                    slice=self.slice.index,
                    sender=sender,
                    factor=round(verdict.factor / WHOLE, 3),
                    why=verdict.why,
                )
        return merged

    def _merged_of(
        self,
        here: Sequence[NodeId],
        node_id: NodeId,
        by: Merging,
        verdicts: dict[NodeId, Verdict],
    ) -> _Merged | None:
        """The mean of these contributions; None when screening leaves one of them out, which it notes."""
        codec, size = self.uplink, self.slice.num_elements
        passes = Passes(tiles=codec.tiles, unit=codec.unit)
        bodies = [
            Encoded(codec=codec, body=self.contributions[sender].body, size=size) for sender in here
        ]
        weights, late = self._weights(here, by)
        squares = [BlockSums(size) for _ in here]
        # Norms and, where nothing is cut, the mean come of one pass over the bodies.
        mean = weighted_sum(
            bodies,
            shares(weights, late=late),
            passes=passes,
            watch=lambda index, first, tile: squares[index].take(first, tile),
        )
        norms = [each.norm() for each in squares]
        votes, not_here = self._votes(here)
        if by.is_screened:
            own = here.index(node_id) if node_id in here else None
            allowed = allowances(
                [self._contributor(sender).tokens for sender in here],
                [by.missed.get(sender, 0) for sender in here],
            )
            largest = math.inf
            if by.norm_of_parameters is not None:
                largest = largest_norm(
                    size,
                    asked_for=max(norms),
                    norm_of_parameters=by.norm_of_parameters,
                )
            found = screened(norms, allowed, own=own, votes=votes, largest=largest)
            verdicts.update(zip(here, found, strict=True))
            if any(verdict.factor == 0 for verdict in found):
                return None
        if by.merge == "agreeing" and (
            against := self._contradicted(here, bodies, votes, not_here, passes)
        ):
            verdicts.update({here[place]: verdict for place, verdict in against.items()})
            return None
        let_in = [verdicts[sender].factor / WHOLE for sender in here]
        coefficients = shares(weights, late=late, factors=let_in)
        if any(factor != 1 for factor in let_in):
            mean = weighted_sum(bodies, coefficients, passes=passes)
        if by.merge == "norm-preserving":
            norm = math.fsum(c * n for c, n in zip(coefficients, norms, strict=True))
            mean = stretched_to(norm, mean, most=math.sqrt(len(bodies)), passes=passes)
        return _Merged(values=mean, verdicts=verdicts, weighed=sum(weights) + late)

    def _contradicted(
        self,
        here: Sequence[NodeId],
        bodies: Sequence[Encoded],
        votes: Sequence[int],
        not_here: int,
        passes: Passes,
    ) -> Mapping[int, Verdict]:
        """By their places, the contributions that most of the others point against.

        What is compared of many or large contributions is drawn by all of them together: no sender knows
        it, and auditors, who have them, draw the same.
        """
        drawn = blake3()
        for sender in here:
            drawn.update(self.contributions[sender].header.body_digest)
        seed = drawn.digest()
        about = votes_about(votes, not_here=not_here, seed=seed)
        cosines = cosines_among(bodies, about, seed=seed, passes=passes)
        return contradicted(cosines, about, votes)

    def _votes(self, here: Sequence[NodeId]) -> tuple[list[int], int]:
        """What the plan says that words of these count, and those of who is late or left out together.

        Who is gone counts nothing. What votes do not make up of the whole counts as late.
        """
        named = {*self.contributions, *self.late}
        if not self.plan.votes:
            return [1] * len(here), len(named) - len(here)
        told = dict(zip(self.plan.participants, self.plan.votes, strict=True))
        votes = [told.get(node_id, 0) for node_id in here]
        gone = sum(vote for node_id, vote in told.items() if node_id not in named)
        return votes, WHOLE - gone - sum(votes)

    def _weights(self, here: Sequence[NodeId], by: Merging) -> tuple[list[int], int]:
        """What contributions weigh, by tokens and within bounds, and what is late in all."""
        assigned = {a.node_id: a for a in self.plan.assignments}
        contributors = [self._contributor(sender) for sender in here]
        missing = sorted(n for n in self.late if by.missed.get(n, 0) < COUNTED_ROUNDS)
        samples = [assigned[n].num_samples for n in missing if n in assigned]
        expected = partial(tokens_of_late, contributors=contributors, context=self.context)
        late = expected(sum(samples))
        weights = [each.tokens for each in contributors]
        if by.most_weight is not None:
            holders = [book_of(assigned[each.node_id].first_sample) for each in contributors]
            weights = bounded_weights(weights, holders, most=by.most_weight)
        if by.is_screened:
            every = [*weights, *map(expected, samples)]
            most = MOST_OF_MEAN_WEIGHT / len(every)
            bounded = every if most >= 1 else bounded_weights(every, range(len(every)), most=most)
            if bounded != every:
                weights, late = bounded[: len(here)], sum(bounded[len(here) :])
        return weights, late
