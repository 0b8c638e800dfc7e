"""Audits of reducers: what is given for them, and what this node finds by them.

Rounds go on meanwhile. So for AUDIT_ROUNDS more each node keeps what a round's results follow from: as a
reducer each body, with its contributor's signature, and the error that it has added to the mean; as somebody
who may be asked, the plan and what of the state the merge depends on. The auditor makes the result by the
same code from the same bytes, bit for bit. Another result is the reducer's lie, or the auditor's.
"""

import asyncio
import math
import struct
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog
from blake3 import blake3

from node.exchange.codecs.codec import CodecError
from node.exchange.fetching import Donors
from node.exchange.outer import Base, Outer
from node.exchange.peers import NotHeldError, PeerUnreachableError, TransferRefusedError, WantInput
from node.exchange.reduction import AS_KEPT, Reduction
from node.exchange.round.state import RoundState, Rules, misfit
from node.exchange.state.sources import StateHere
from node.heavy import Heavy, cancelled
from node.outer_state import Vector
from protocol.wire.findings import Audited
from protocol.wire.messages import AuditAsked, Reduced, Report
from protocol.wire.payload import REDUCER_ERROR, Payload, PayloadError, PayloadHeader
from protocol.wire.rounds import AUDIT_ROUNDS, Digest, NodeId, Plan, Slice, contribution_digest

log = structlog.get_logger()

INPUTS_AT_ONCE = 4
"""Bodies on their way from a reducer to one auditor at the same time."""

MOST_CHARACTERS = 200
"""Of what was wrong, as it is told."""

PAUSE_SECONDS = 5.0
"""When no auditor asks for so long, those of the newest round have what they need: they begin as soon as they
apply its commit."""

IN_TIME = 0.8
"""An auditor gives up after this part of the time that it is given, and says so rather than be silent."""


class NotGivenError(Exception):
    """An audit, or a check, cannot be made: what it needs of others is not given."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """What the results of one round follow from, as far as this node has it."""

    plan: Plan
    contributions: Mapping[int, Mapping[NodeId, Payload]]  # by slice: of those reduced here
    errors: Mapping[int, bytes]  # by slice, likewise: what was added to the mean, in AS_KEPT
    base: Base

    @classmethod
    def of(cls, state: RoundState, base: Base, outer: Outer) -> "Inputs":
        """Before the round's commit is applied, which moves errors on. Heavy."""
        own = {
            i: known for i, known in state.slices.items() if known.part.reducer_id == outer.node_id
        }
        errors = {i: outer.carried(known.part, state.plan.fragment) for i, known in own.items()}
        return cls(
            plan=state.plan,
            contributions={i: known.contributions for i, known in own.items()},
            errors={i: AS_KEPT.encode(e) for i, e in errors.items() if e is not None},
            base=base,
        )


class Audits:
    """Keeps inputs of the latest rounds, gives them to auditors, and audits when the coordinator asks."""

    def __init__(
        self,
        rules: Rules,
        here: StateHere,
        *,
        donors: Donors,
        report: Callable[[int, Report], None],
    ) -> None:
        self._rules = rules
        self._outer = here.outer
        self._heavy = here.heavy
        self._donors = donors
        self._report = report
        self._kept: dict[int, Inputs] = {}  # by round
        self._early: list[AuditAsked] = []  # of rounds whose commits are not applied here yet
        self._tasks: dict[tuple[int, int, int], asyncio.Task[None]] = {}
        self._asked_at = -math.inf  # by an auditor, for what a result here was made of
        self._kept_at = -math.inf  # what the newest results here were made of

    async def keep(self, state: RoundState) -> None:
        """Keeps what a round's results follow from; before its commit is applied."""
        if state.plan.participants == (self._rules.node_id,):
            return  # nobody is there to audit what it makes alone
        base = await self._heavy(partial(self._outer.base_of, state.plan))
        if base is None:
            return
        number = state.plan.round
        self._kept[number] = await self._heavy(partial(Inputs.of, state, base, self._outer))
        self._kept_at = asyncio.get_running_loop().time()
        for old in [round for round in self._kept if round <= number - AUDIT_ROUNDS]:
            del self._kept[old]
        await self._end(lambda round: round <= number - AUDIT_ROUNDS)
        early, self._early = self._early, []
        for asked in early:
            self.ask(asked)

    def ask(self, asked: AuditAsked) -> None:
        """Begins an audit, once; or later, when the round's commit is about to be applied here."""
        place = asked.round, asked.reduced.slice_index, asked.attempt
        if place in self._tasks:
            return
        if inputs := self._kept.get(asked.round):
            self._tasks[place] = asyncio.get_running_loop().create_task(self._audit(asked, inputs))
        elif asked.round > self._outer.round:
            self._early.append(asked)
        else:  # what the round's results follow from of the state is not known here any more
            log.info("not audited", round=asked.round, why="this node did not take part in it")

    async def _audit(self, asked: AuditAsked, inputs: Inputs) -> None:
        try:
            part = next(p for p in inputs.plan.slices if p.index == asked.reduced.slice_index)
            auditor = Auditor(
                asked=asked,
                slice=replace(part, reducer_id=asked.reducer_id),
                inputs=inputs,
                rules=self._rules,
                outer=self._outer,
                donors=self._donors,
                heavy=self._heavy,
            )
            finding = await auditor.audited()
            self._report(asked.round, self._outer.signed_finding(finding, asked.round))
        except Exception:  # nobody waits for this task
            log.exception("audit failed", round=asked.round, slice=asked.reduced.slice_index)

    def supply(self, want: WantInput, state: RoundState | None) -> Payload | None:
        """What this node, as a slice's reducer, has made its result of; None when it is not here. Heavy.

        `state` is of the round that is open here: others may have applied its commit already.
        """
        if state is not None and state.plan.round == want.round:
            inputs: Inputs | None = Inputs.of(state, {}, self._outer)
        else:
            inputs = self._kept.get(want.round)
        if inputs is None or want.slice_index not in inputs.contributions:
            return None
        if want.contributor_id is not None:
            given = inputs.contributions[want.slice_index].get(want.contributor_id)
            is_it = given and contribution_digest(given.header.body_digest) == want.digest
            return given if is_it else None
        error = inputs.errors.get(want.slice_index)
        if error is None:
            return None
        part = next(p for p in inputs.plan.slices if p.index == want.slice_index)
        return Payload.seal(
            kind=REDUCER_ERROR,
            run_digest=self._rules.run_digest,
            round=want.round,
            fragment=inputs.plan.fragment,
            slice_index=want.slice_index,
            start=part.start,
            num_elements=part.num_elements,
            codec=AS_KEPT.name,
            sender_id=self._rules.node_id,
            body=error,
        )

    def note_asked(self) -> None:
        """An auditor wants what a result here was made of."""
        self._asked_at = asyncio.get_running_loop().time()

    async def answer(self) -> None:
        """Returns when auditors of the newest round have what they need of this node; at once without any.

        What a node that leaves takes with it nobody can make again, and then the run goes back.
        """
        if not self._has_reduced:
            return
        clock = asyncio.get_running_loop().time
        until = clock() + PAUSE_SECONDS
        while (left := until - clock()) > 0:
            await asyncio.sleep(left)
            until = max(until, self._asked_at + PAUSE_SECONDS)

    @property
    def may_be_asked(self) -> bool:
        """Whether auditors of the newest round may still come for what results here were made of."""
        latest = max(self._asked_at, self._kept_at)
        now = asyncio.get_running_loop().time()
        return self._has_reduced and now < latest + PAUSE_SECONDS

    @property
    def _has_reduced(self) -> bool:
        newest = self._kept.get(max(self._kept, default=0))
        return newest is not None and bool(newest.contributions)

    async def forget_after(self, round: int) -> None:
        """Later rounds are undone: nobody asks for what made their results."""
        self._early = []
        for number in [number for number in self._kept if number > round]:
            del self._kept[number]
        await self._end(lambda number: number > round)

    async def stop(self) -> None:
        """Ends what is under way."""
        await self._end(lambda _: True)

    async def _end(self, is_over: Callable[[int], bool]) -> None:
        await cancelled(
            [self._tasks.pop(place) for place in list(self._tasks) if is_over(place[0])]
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Auditor:
    """Makes one result again."""

    asked: AuditAsked
    slice: Slice
    inputs: Inputs
    rules: Rules
    outer: Outer
    donors: Donors
    heavy: Heavy

    async def audited(self) -> Audited:
        """What came of it, within the time that is given for it."""
        asked, part = self.asked, self.slice
        digest = asked.reduced.digest
        assert digest is not None, "nobody audits what is empty"
        finding = partial(Audited, slice_index=part.index, digest=digest)
        try:
            async with asyncio.timeout(IN_TIME * asked.seconds):
                found = await self._found()
        except TimeoutError:
            return finding(found=b"", why="its inputs did not come in time")
        except NotGivenError as error:
            return finding(found=b"", why=str(error)[:MOST_CHARACTERS])
        told = PayloadHeader.decode(asked.reduced.header)
        is_same = found == _finding_of(told, asked.reduced)
        why = "" if is_same else "another result comes out of the same inputs"
        if why:
            log.warning(why, round=asked.round, slice=part.index, reducer=asked.reducer_id)
        return finding(found=digest if is_same else found, why=why)

    async def _found(self) -> Digest:
        asked, part = self.asked, self.slice
        header = PayloadHeader.decode(asked.reduced.header)
        if why := header.forgery():
            raise NotGivenError(why)
        if header.report_digest != asked.reduced.statement_digest:
            raise NotGivenError("its report is not the one that it has signed with its result")
        named = zip(asked.reduced.contributors, asked.reduced.contributions, strict=True)
        places = asyncio.Semaphore(INPUTS_AT_ONCE)
        uplink = self.outer.rules_in(asked.round).uplink

        async def given(node_id: NodeId, digest: bytes) -> Payload:
            want = WantInput(
                round=asked.round, slice_index=part.index, contributor_id=node_id, digest=digest
            )
            async with places:
                payload = await self._fetched(want, uplink.most_bytes(part.num_elements))
            self._check(payload.header)
            return payload

        fetching = [given(c.node_id, digest) for c, digest in named]
        contributions = await _all(fetching)
        carried = await self._error()
        reduction = Reduction(
            plan=self.inputs.plan,
            slice=part,
            contributions={payload.header.sender_id: payload for payload in contributions},
            late=frozenset(asked.reduced.late),
            uplink=uplink,
            context=self.rules.context,
            attempt=asked.attempt,
        )
        make = partial(
            self.outer.made_again,
            reduction,
            self.inputs.base[part.index],
            missed=dict(asked.reduced.missed),
            carried=carried,
        )
        try:
            result = await self.heavy(make)
        except CodecError as error:
            raise NotGivenError(f"nothing can be made of its inputs: {error}") from error
        if result is None:
            return Digest(blake3(b"nothing").digest())
        return _finding_of(result.payload.header, result.made_of)

    def _check(self, header: PayloadHeader) -> None:
        """Raises NotGivenError unless it is a contribution of this very slice, signed by its maker."""
        uplink = self.outer.rules_in(self.asked.round).uplink
        why = self.donors.forgery(header) or misfit(header, self.slice, uplink)
        if not why and header.base_digest != self.inputs.plan.base_digest:
            why = f"the contribution of {header.sender_id} is from another state"
        if why:
            raise NotGivenError(f"what it has taken counts nothing: {why}")

    async def _error(self) -> Vector | None:
        asked, part = self.asked, self.slice
        if not asked.reduced.error_before:
            return None
        want = WantInput(
            round=asked.round,
            slice_index=part.index,
            contributor_id=None,
            digest=asked.reduced.error_before,
        )
        payload = await self._fetched(want, AS_KEPT.encoded_bytes(part.num_elements))
        try:
            return await self.heavy(partial(AS_KEPT.decode, payload.body, part.num_elements))
        except CodecError as error:
            raise NotGivenError(f"its error is none of this slice: {error}") from error

    async def _fetched(self, want: WantInput, most_bytes: int) -> Payload:
        return await fetched_from(
            self.donors, self.asked.reducer_id, want, most_bytes, seconds=self.asked.seconds
        )


async def fetched_from(
    donors: Donors, reducer_id: NodeId, want: WantInput, most_bytes: int, *, seconds: float
) -> Payload:
    """What a reducer has made a result of."""
    try:
        return await donors.transport.fetch(
            reducer_id, want, max_body_bytes=most_bytes, timeout_seconds=seconds
        )
    except (PeerUnreachableError, TransferRefusedError, NotHeldError, PayloadError) as error:
        whose = want.contributor_id
        what = "its error" if whose is None else f"that of {whose}"
        raise NotGivenError(f"{reducer_id} does not give {what}: {error}") from error


async def _all(fetching: Iterable[Coroutine[Any, Any, Payload]]) -> list[Payload]:
    """All of them; the first that fails ends the others."""
    tasks = [asyncio.create_task(each) for each in fetching]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _finding_of(header: PayloadHeader, made: Reduced) -> Digest:
    """Of all that a result is: body, norm, whose work it counts and how much of it, what it leaves."""
    contributors = sorted((c.node_id, c.samples, c.tokens) for c in made.contributors)
    norm = header.norm if math.isfinite(header.norm) else 0.0
    told = repr((contributors, made.factors, made.error_after.hex(), *made.undecodable)).encode()
    return Digest(blake3(header.body_digest + struct.pack("<d", norm) + told).digest())
