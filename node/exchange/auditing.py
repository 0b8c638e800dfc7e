"""Audits of reducers: what is given to an auditor, and how it makes a result again, bit for bit.

A reducer keeps what contributors sent it until its round is committed, and so long it gives an auditor each
body, with its contributor's signature, and the error that it has added to the mean. The auditor makes the
result by the same code from the same bytes. Another result is the reducer's lie, or the auditor's.
"""

import asyncio
import math
import struct
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import structlog
from blake3 import blake3

from node.exchange.codecs.codec import CodecError
from node.exchange.fetching import Donors
from node.exchange.outer import Outer
from node.exchange.reduction import Reduction, SliceResult
from node.exchange.round.admission import misfit
from node.exchange.round.state import MakeAgain, RoundState
from node.exchange.transport.transport import (
    NotHeldError,
    PeerUnreachableError,
    TransferRefusedError,
    WantInput,
)
from node.heavy import Heavy
from node.outer_state import Vector
from protocol.wire.messages import AuditAsked, Audited, Reduced
from protocol.wire.payload import REDUCER_ERROR, Payload, PayloadError, PayloadHeader
from protocol.wire.rounds import Digest, NodeId, contribution_digest

log = structlog.get_logger()

INPUTS_AT_ONCE = 4
"""Bodies on their way from a reducer to one auditor at the same time."""

MOST_CHARACTERS = 200
"""Of what was wrong, as it is told."""

IN_TIME = 0.8
"""An auditor gives up after this part of the time that it is given, and says so rather than be silent."""


class NotGivenError(Exception):
    """The reducer does not give what it says that it has made the result of."""


def input_of(outer: Outer, state: RoundState, want: WantInput) -> Payload | None:
    """What this node, as the reducer of a slice, has made its result of; None when it is not here."""
    known = state.slices.get(want.slice_index)
    if known is None or state.plan.round != want.round:
        return None
    if want.contributor_id is not None:
        given = known.contributions.get(want.contributor_id)
        is_it = given is not None and contribution_digest(given.header.body_digest) == want.digest
        return given if is_it else None
    error = outer.carried(known.part, state.plan.fragment)
    if error is None:
        return None
    return Payload.seal(
        kind=REDUCER_ERROR,
        run_digest=state.rules.run_digest,
        round=want.round,
        fragment=state.plan.fragment,
        slice_index=want.slice_index,
        start=known.part.start,
        num_elements=known.part.num_elements,
        codec="fp32/1",
        sender_id=state.rules.node_id,
        body=np.ascontiguousarray(error, dtype="<f4").tobytes(),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Auditor:
    """Makes results of a round again."""

    state: RoundState
    outer: Outer
    donors: Donors
    heavy: Heavy

    async def audited(self, order: MakeAgain) -> Audited:
        """What came of an audit, within the time that is given for it."""
        asked, part = order.asked, order.slice
        digest = asked.reduced.digest
        assert digest is not None, "nobody audits what is empty"
        finding = partial(Audited, slice_index=part.index, digest=digest)
        try:
            async with asyncio.timeout(IN_TIME * asked.seconds):
                found = await self._found(order)
        except TimeoutError:
            return finding(found=b"", why="its inputs did not come in time")
        except NotGivenError as error:
            return finding(found=b"", why=str(error)[:MOST_CHARACTERS])
        is_same = found == _finding_of(asked.reduced)
        why = "" if is_same else "another result comes out of the same inputs"
        if why:
            log.warning(why, round=asked.round, slice=part.index, reducer=asked.reducer_id)
        return finding(found=digest if is_same else found, why=why)

    async def _found(self, order: MakeAgain) -> Digest:
        asked, part = order.asked, order.slice
        named = zip(asked.reduced.contributors, asked.reduced.contributions, strict=True)
        places = asyncio.Semaphore(INPUTS_AT_ONCE)

        async def given(node_id: NodeId, digest: bytes) -> Payload:
            own = order.own
            if (
                node_id == self.state.rules.node_id
                and own is not None
                and contribution_digest(own.header.body_digest) == digest
            ):
                return own
            want = WantInput(
                round=asked.round, slice_index=part.index, contributor_id=node_id, digest=digest
            )
            async with places:
                payload = await self._fetched(
                    asked, want, self.outer.uplink.most_bytes(part.num_elements)
                )
            self._check(payload.header, order)
            return payload

        fetching = [given(c.node_id, digest) for c, digest in named]
        contributions = await _all(fetching)
        carried = await self._error(order)
        reduction = Reduction(
            plan=self.state.plan,
            slice=part,
            contributions={payload.header.sender_id: payload for payload in contributions},
            late=frozenset(asked.reduced.late),
            uplink=self.outer.uplink,
            context=self.state.rules.context,
            attempt=asked.attempt,
        )
        make = partial(
            self.outer.made_again,
            reduction,
            self.state.plan.fragment,
            missed=dict(asked.reduced.missed),
            carried=carried,
        )
        try:
            result = await self.heavy(make)
        except CodecError as error:
            raise NotGivenError(f"nothing can be made of its inputs: {error}") from error
        return _finding_of_result(result)

    def _check(self, header: PayloadHeader, order: MakeAgain) -> None:
        """Raises NotGivenError unless it is a contribution of this very slice, signed by its maker."""
        why = self.donors.forgery(header) or misfit(header, order.slice, self.outer.uplink)
        if not why and header.base_digest != self.state.plan.base_digest:
            why = f"the contribution of {header.sender_id} is from another state"
        if why:
            raise NotGivenError(f"what it has taken counts nothing: {why}")

    async def _error(self, order: MakeAgain) -> Vector | None:
        asked, part = order.asked, order.slice
        if not asked.reduced.error_before:
            return None
        want = WantInput(
            round=asked.round,
            slice_index=part.index,
            contributor_id=None,
            digest=asked.reduced.error_before,
        )
        payload = await self._fetched(asked, want, 4 * part.num_elements)
        if payload.header.body_bytes != 4 * part.num_elements:
            raise NotGivenError("its error is of another size than the slice")
        return np.frombuffer(payload.body, dtype="<f4").astype(np.float32, copy=False)

    async def _fetched(self, asked: AuditAsked, want: WantInput, most_bytes: int) -> Payload:
        what = "its error" if want.contributor_id is None else f"that of {want.contributor_id}"
        try:
            return await self.donors.transport.fetch(
                asked.reducer_id, want, max_body_bytes=most_bytes, timeout_seconds=asked.seconds
            )
        except (
            PeerUnreachableError,
            TransferRefusedError,
            NotHeldError,
            PayloadError,
        ) as error:
            raise NotGivenError(f"it does not give {what}: {error}") from error


async def _all(fetching: Iterable[Coroutine[Any, Any, Payload]]) -> list[Payload]:
    """All of them; the first that fails ends the others."""
    tasks = [asyncio.create_task(each) for each in fetching]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _finding_of_result(result: SliceResult | None) -> Digest:
    if result is None:
        return Digest(blake3(b"nothing").digest())
    return _digest_of(
        result.payload.header,
        [(c.node_id, c.samples, c.tokens) for c in result.contributors],
        result.factors,
        result.inputs.error_after,
    )


def _finding_of(told: Reduced) -> Digest:
    """The same of what the reducer says."""
    return _digest_of(
        PayloadHeader.decode(told.header),
        [(c.node_id, c.samples, c.tokens) for c in told.contributors],
        told.factors,
        told.error_after,
    )


def _digest_of(
    header: PayloadHeader,
    contributors: list[tuple[NodeId, int, int]],
    factors: tuple[int, ...],
    error_after: bytes,
) -> Digest:
    """Of all that a result is: body, norm, whose work it counts and how much of it, what it leaves."""
    norm = header.norm if math.isfinite(header.norm) else 0.0
    told = repr((sorted(contributors), factors, error_after.hex())).encode()
    return Digest(blake3(header.body_digest + struct.pack("<d", norm) + told).digest())
