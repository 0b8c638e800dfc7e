"""A slice's result: the mean of its contributions, encoded once, as the same bytes for everyone."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import structlog

from node.exchange.codecs.codec import Codec, Opened
from node.exchange.mean import Encoded, UndecodableError, merged
from node.outer_state import Vector
from protocol.payload import RESULT, Payload
from protocol.rounds import (
    Commit,
    ContributionDigest,
    Contributor,
    Digest,
    NodeId,
    Plan,
    Slice,
    book_of,
    contribution_digest,
)
from protocol.run_spec import Merge

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SliceResult:
    """What a reducer makes of a slice."""

    payload: Payload
    encoded: Opened = field(repr=False)  # the payload's body
    contributors: tuple[Contributor, ...]
    contributions: tuple[ContributionDigest, ...]  # of each of them, the bytes that are in the mean
    weighed_tokens: int  # what a token's work was divided by: all tokens, those of late work too
    error: Vector | None = field(
        repr=False
    )  # [slice]: what the encoding rounded away, if asked for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """A slice with the contributions that are in its mean: what was here when that began."""

    plan: Plan
    slice: Slice
    contributions: Mapping[NodeId, Payload]  # by sender
    late: Set[NodeId] = frozenset()  # whose contributions were waited for in vain
    uplink: Codec
    context: int  # tokens of a sample

    def result(
        self,
        *,
        downlink: Codec,
        run_digest: Digest,
        node_id: NodeId,
        merge: Merge = "mean",
        carried: Vector | None = None,
        wants_error: bool = False,
        long_missed: Set[NodeId] = frozenset(),
        most_weight: float | None = None,
    ) -> SliceResult | None:
        """The encoded mean with whose contributions it holds, or None when there are none.

        `most_weight` bounds the part of the mean that is of one data holder (`bounded_weights`).

        `carried` [slice] is added to the mean before it is encoded (node.exchange.reducer_error).

        Who is late will contribute in a later round: their tokens count now, those of all samples that
        they were assigned, unless they are `long_missed`: of what these owe no more is kept
        (node.exchange.residual). Who is gone or excused has nothing to bring, and is not late.

        Contributions are added in the order of node ids, so that equal contributions give equal
        bytes. One that does not decode is left out, and said. Heavy.
        """
        contributions, assigned = self.contributions, self.plan.assignments
        late = self.late - long_missed
        late_samples = sum(a.num_samples for a in assigned if a.node_id in late)
        contributors = [
            Contributor(
                node_id=sender, samples=payload.header.samples, tokens=payload.header.tokens
            )
            for sender, payload in sorted(contributions.items())
        ]
        while contributors:
            late_tokens = tokens_of_late(late_samples, contributors, context=self.context)
            try:
                bodies = [contributions[each.node_id].body for each in contributors]
                weights = [each.tokens for each in contributors]
                if most_weight is not None:
                    books = {a.node_id: book_of(a.first_sample) for a in assigned}
                    holders = [books[each.node_id] for each in contributors]
                    weights = bounded_weights(weights, holders, most=most_weight)
                values = self._merged(weights, bodies, merge, late_tokens)
                break
            except UndecodableError as error:  # then all is added anew: its tokens do not count
                sender = contributors.pop(error.index).node_id
                log.warning(
                    "contribution left out", round=self.plan.round, sender=sender, why=str(error)
                )
        else:
            return None
        if carried is not None:
            owed = carried

            def add(first: int, past: int) -> None:
                np.add(values[first:past], owed[first:past], out=values[first:past])

            downlink.tiles.each_run(values.size, add)
        encoded = downlink.encoded(values)
        rounded_away = None
        if wants_error:
            rounded_away = values

            def leave_rounded_away(start: int, decoded: Vector) -> None:
                tile = values[start : start + decoded.size]
                np.subtract(tile, decoded, out=tile)

            encoded.each_tile(leave_rounded_away)
        payload = Payload.seal(
            kind=RESULT,
            run_digest=run_digest,
            round=self.plan.round,
            fragment=self.plan.fragment,
            slice_index=self.slice.index,
            start=self.slice.start,
            num_elements=self.slice.num_elements,
            codec=downlink.name,
            tokens=0,
            sender_id=node_id,
            body=encoded.body,
        )
        return SliceResult(
            payload=payload,
            encoded=encoded,
            contributors=tuple(contributors),
            contributions=tuple(
                contribution_digest(contributions[each.node_id].header.body_digest)
                for each in contributors
            ),
            weighed_tokens=late_tokens + sum(each.tokens for each in contributors),
            error=rounded_away,
        )

    def _merged(
        self, weights: list[int], bodies: list[bytes], merge: Merge, late_tokens: int
    ) -> Vector:
        codec, size = self.uplink, self.slice.num_elements
        return merged(
            [
                (weight, Encoded(codec=codec, body=body, size=size))
                for weight, body in zip(weights, bodies, strict=True)
            ],
            merge,
            late_tokens=late_tokens,
            tiles=codec.tiles,
            unit=codec.unit,
        )


def bounded_weights(tokens: Sequence[int], holders: Sequence[int], *, most: float) -> list[int]:
    """Weights by tokens, so that nobody's data make up more than `most` of a mean.

    `holders` says whose data each contribution is of. Who has more than that part is brought down to it,
    and its nodes share what is left by their tokens. Where so few hold data that all would be brought
    down, all holders weigh the same. Whole numbers, rounded down, and at least 1.
    """
    sums: dict[int, int] = {}
    for holder, count in zip(holders, tokens, strict=True):
        sums[holder] = sums.get(holder, 0) + count
    bounded: set[int] = set()
    allowed = 0.0
    while True:
        rest = sum(count for holder, count in sums.items() if holder not in bounded)
        part = 1 - most * len(bounded)
        if rest == 0 or part <= 0:  # all are above it, whatever it is measured by
            bounded, allowed = set(sums), float(min(sums.values()))
            break
        allowed = most * rest / part
        above = {holder for holder in sums.keys() - bounded if sums[holder] > most * rest / part}
        if not above:
            break
        bounded |= above
    return [
        max(1, int(count * allowed / sums[holder])) if holder in bounded else count
        for holder, count in zip(holders, tokens, strict=True)
    ]


def tokens_of_late(samples: int, contributors: Sequence[Contributor], *, context: int) -> int:
    """What samples will weigh that come too late: as many tokens of each count as of those that are here.

    How many of its own will count only the node knows that trains them. Where all do, all are told.
    """
    here = sum(each.samples for each in contributors) * context
    return samples * context * sum(each.tokens for each in contributors) // here


COUNTED_ROUNDS = 3
"""So many rounds in a row the tokens of a participant count in means that its work does not get into."""


def missed_in_a_row(
    before: Mapping[NodeId, int], commit: Commit, own_slices: Collection[int] = ()
) -> dict[NodeId, int]:
    """In how many rounds up to this one the work of each participant got into no result.

    Of a reducer's own slices, where it had any: somebody may get through to all others. Rounds that
    a node has no part in change nothing, and neither do void slices.
    """
    results = [each for each in commit.slices if each.digest is not None]
    results = [each for each in results if each.index in own_slices] or results
    if not results:
        return dict(before)
    here = {c.node_id for outcome in results for c in outcome.contributors}
    counted = {a.node_id: before.get(a.node_id, 0) + 1 for a in commit.assignments}
    return {**before, **counted, **dict.fromkeys(here, 0)}
