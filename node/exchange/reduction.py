"""One slice at its reducer: contributions come in, the mean goes out once, as the same bytes for everyone."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import structlog

from node.exchange.codecs.codec import Codec, Opened
from node.exchange.fitting import check_fits, place_of
from node.exchange.mean import Encoded, UndecodableError, merged
from node.exchange.transport.transport import Admission, TransferRefusedError
from node.outer_state import Vector
from protocol.payload import RESULT, Payload, PayloadHeader
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


class Reduction:
    """Collects the contributions to a slice until all are here or its deadline passes."""

    def __init__(
        self,
        *,
        plan: Plan,
        slice_: Slice,
        uplink: Codec,
        context: int,  # tokens of a sample
    ) -> None:
        self.slice = slice_
        self._plan = plan
        self._uplink = uplink
        self._context = context
        self._assigned = {a.node_id: a.num_samples for a in plan.assignments}
        self._holders = {a.node_id: book_of(a.first_sample) for a in plan.assignments}
        self._contributions: dict[NodeId, Payload] = {}
        self._departed: frozenset[NodeId] = frozenset()
        self._is_closed = False
        self._is_given_up = False
        self._time_limit: asyncio.Timeout | None = None
        self._complete = asyncio.Event()

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        """Refuses a contribution that does not belong into the mean, before its body is read."""
        place = place_of(header)
        if header.sender_id != sender:
            raise TransferRefusedError(
                f"{sender} offers a contribution in the name of {header.sender_id}"
            )
        if sender not in self._assigned:
            raise TransferRefusedError(f"{sender} takes no part in round {self._plan.round}")
        check_fits(header, self.slice, self._uplink)
        if header.samples > self._assigned[sender]:
            raise TransferRefusedError(
                f"{header.samples} samples for {place}, where {self._assigned[sender]} were assigned"
            )
        if not 0 < header.tokens <= header.samples * self._context:
            raise TransferRefusedError(
                f"{header.tokens} tokens in {header.samples} samples for {place}, which have "
                f"{header.samples * self._context}"
            )
        known = self._contributions.get(sender)
        if known is not None and known.header.body_digest != header.body_digest:
            raise TransferRefusedError(f"{place} has another contribution of {sender} already")
        if known is None and self._is_closed:
            raise TransferRefusedError(f"{place} is already reduced")
        return Admission(take=self._take)

    async def _take(self, payload: Payload) -> None:
        if self._is_given_up:
            raise TransferRefusedError(f"{place_of(payload.header)} is not reduced here any more")
        self.add(payload)

    def add(self, contribution: Payload) -> None:
        """Keeps a contribution; one that comes too late is left to its sender's residual."""
        if not self._is_closed:
            self._contributions.setdefault(contribution.header.sender_id, contribution)
            self._check_complete()

    def depart(self, node_ids: Iterable[NodeId]) -> None:
        """Does not wait for these any longer; what has arrived from them counts."""
        self._departed |= frozenset(node_ids)
        self._check_complete()

    def _check_complete(self) -> None:
        if set(self._assigned) <= self._contributions.keys() | self._departed:
            self._complete.set()

    @property
    def missing(self) -> tuple[NodeId, ...]:
        """Who is still waited for."""
        return tuple(sorted(set(self._assigned) - self._contributions.keys() - self._departed))

    @property
    def is_closed(self) -> bool:
        """Whether the mean is being taken: nothing more is collected."""
        return self._is_closed

    @property
    def is_given_up(self) -> bool:
        """Whether nobody wants the result any more."""
        return self._is_given_up

    def give_up(self) -> None:
        """Another node reduces the slice, or the round is over: contributions leave the memory.

        A mean that is being taken meanwhile is of those that were here when it began.
        """
        self._is_given_up = self._is_closed = True
        self._contributions = {}
        self._complete.set()

    def extend(self, deadline: float) -> None:
        """Collects until then, by the loop's clock, unless that is earlier than before."""
        limit = self._time_limit
        if limit is not None and not limit.expired() and deadline > (limit.when() or 0):
            limit.reschedule(deadline)

    async def collected(self, *, deadline: float) -> None:
        """Returns when all contributions are here, or at the deadline with what there is."""
        try:
            async with asyncio.timeout_at(deadline) as self._time_limit:
                await self._complete.wait()
        except TimeoutError:
            log.info(
                "reducing without some",
                round=self._plan.round,
                slice=self.slice.index,
                missing=[str(node_id) for node_id in self.missing],
            )
        self._is_closed = True

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

        Who is still waited for will contribute in a later round: their tokens count now, those of all
        samples that they were assigned, unless they are `long_missed`: of what these owe no more is
        kept (node.exchange.residual). Who is gone or excused has nothing to bring.

        Contributions are added in the order of node ids, so that equal contributions give equal
        bytes. One that does not decode is left out, and said. Heavy; call it once, when collected.
        """
        contributions = self._contributions  # in a thread: the reduction may be given up meanwhile
        late_samples = sum(self._assigned[n] for n in self.missing if n not in long_missed)
        contributors = [
            Contributor(
                node_id=sender, samples=payload.header.samples, tokens=payload.header.tokens
            )
            for sender, payload in sorted(contributions.items())
        ]
        while contributors:
            late_tokens = tokens_of_late(late_samples, contributors, context=self._context)
            try:
                bodies = [contributions[each.node_id].body for each in contributors]
                weights = [each.tokens for each in contributors]
                if most_weight is not None:
                    holders = [self._holders[each.node_id] for each in contributors]
                    weights = bounded_weights(weights, holders, most=most_weight)
                values = self._merged(weights, bodies, merge, late_tokens)
                break
            except UndecodableError as error:  # then all is added anew: its tokens do not count
                sender = contributors.pop(error.index).node_id
                log.warning(
                    "contribution left out", round=self._plan.round, sender=sender, why=str(error)
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
            round=self._plan.round,
            fragment=self._plan.fragment,
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
        codec, size = self._uplink, self.slice.num_elements
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
