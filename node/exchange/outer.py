"""A node's replica of the outer state: the only code that changes global parameters and momentum.

What comes in are committed results. What goes out, and what is still owed, is owing's. Everything
here is arithmetic on vectors: no I/O and no waiting.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import structlog

from node.disk.history import SentLog
from node.disk.snapshots import Owed, Snapshot, SnapshotWriting
from node.exchange.codecs.codec import ONE_THREAD, CodecError, Opened, Tiles
from node.exchange.codecs.dense import round_to_bf16
from node.exchange.codecs.registry import compile_kernels
from node.exchange.error_feedback import ReducerError, Residual
from node.exchange.mean import BlockSums, Encoded, agreement, largest_norm, norm_of, weighted_sum
from node.exchange.outer_optimizer import (
    OuterOptimizer,
    OuterRules,
    outer_rules_of,
    refuse_flushed_subnormals,
)
from node.exchange.owing import Owing
from node.exchange.reduction import Merging, Reduction, Sender, SliceResult, digest_of_error
from node.exchange.round.state import Awaited, Missed, less_awaited, with_commit
from node.exchange.screening import missed_in_a_row
from node.outer_state import OuterDigest, Vector
from protocol.run.models import Layout
from protocol.run.run_spec import WANTS_FEEDBACK, RunSpec
from protocol.trust.identity import Identity
from protocol.trust.receipts import PayloadSigner
from protocol.wire.findings import SignedT
from protocol.wire.payload import Payload, PayloadHeader
from protocol.wire.rounds import BLOCK, WHOLE, Commit, Digest, NodeId, Plan, Slice, SliceOutcome

log = structlog.get_logger()


def compile_arithmetic(optimizer: OuterOptimizer) -> None:
    """Does once what a round does besides encoding, so that no round waits for its kernels."""
    zeros = np.zeros(BLOCK, dtype=np.float32)
    residual = Residual(BLOCK)
    residual.owed(slice(0, BLOCK), zeros, zeros)
    residual.settling_taken(slice(0, BLOCK), zeros, zeros)(0, zeros)
    weighted_sum([zeros, zeros], [0.5, 0.5])
    optimizer.apply(zeros.copy(), zeros.copy(), zeros)
    BlockSums(BLOCK).take(0, zeros)
    round_to_bf16(zeros)
    digest_of_error(zeros)


Base = Mapping[int, Merging]
"""By slice, how contributions to it are merged on the state that its round builds on."""


class NotApplicableError(Exception):
    """A commit that cannot be applied here, with what is here. Nothing has changed."""


class UnequalBaseError(NotApplicableError):
    """The commit applies to another outer state than ours: ours must be fetched anew."""


class Position(NamedTuple):
    """Which state is held: one value, for heartbeats tell of it while another thread moves it."""

    round: int
    digest: Digest


class Outer:
    """Global parameters, momentum and what this node owes, at one round."""

    def __init__(self, owing: Owing, *, momentum: Vector | None = None) -> None:
        """Of the same layout, parameters and rules as what is owed. With None the momentum is zero."""
        rules, parameters = owing.rules, owing.parameters
        self.layout = owing.layout
        self.layout_digest = self.layout.summary().digest
        self.uplink = rules.uplink  # of the run file, as this one
        self.downlink = rules.downlink
        self.rules_in = owing.rules_in
        """Of a round: see `go_by`."""
        self._parameters = parameters
        self._momentum: Vector = np.zeros_like(parameters) if momentum is None else momentum
        self.owing = owing
        owing.before_change = self._before_change
        self.writing: SnapshotWriting | None = None
        """Of a snapshot that is being written: it hears of each change before it is made."""
        self._optimizer = rules.optimizer
        self._rate_scale = rules.rate_scale
        self._sender = owing.sender
        self.node_id = owing.sender.node_id
        self._opened: dict[tuple[str, Digest, int], Opened] = {}  # results since the last commit
        self._missed: dict[NodeId, int] = {}  # rounds in a row that took nothing of a participant
        self._lacking: dict[NodeId, Missed] = {}
        self._digest = OuterDigest(
            parameters, self._momentum, each_run=partial(rules.downlink.tiles.each_run, unit=1)
        )
        self.position = Position(round=0, digest=self._digest.value)

    @classmethod
    def of_run(
        cls,
        spec: RunSpec,
        *,
        layout: Layout,
        parameters: Vector,
        published: Vector,
        node_id: NodeId,
        identity: Identity | None = None,
        tiles: Tiles = ONE_THREAD,
        sent: SentLog | None = None,
        momentum: Vector | None = None,
    ) -> "Outer":
        """By the rules of a run file; `parameters` and `momentum` are what it begins with. Heavy.

        `identity` signs what leaves here; peers of a real swarm take nothing without.
        """
        exchange = spec.exchange
        rules = outer_rules_of(spec, tiles)
        signer = None if identity is None else PayloadSigner(identity)
        sender = Sender(run_digest=spec.digest(), node_id=node_id, signer=signer)
        owing = Owing(
            layout=layout,
            parameters=parameters,
            published=published,
            rules=rules,
            residual=Residual(
                layout.num_elements,
                error_feedback=exchange.error_feedback,
                decay=exchange.residual_decay,
                needs_feedback=exchange.uplink in WANTS_FEEDBACK,
                tiles=tiles,
            ),
            reducer_error=ReducerError(
                rule=exchange.reducer_error,
                num_fragments=len(layout.fragments),
                is_audited=spec.outer.audit > 0,
            ),
            sender=sender,
            sent=sent,
        )
        return cls(owing, momentum=momentum)

    @property
    def round(self) -> int:
        """How many rounds the state has behind it."""
        return self.position.round

    @property
    def digest(self) -> Digest:
        """Of parameters and momentum."""
        return self.position.digest

    def go_by(self, rules_in: Callable[[int], OuterRules]) -> None:
        """Has each round go by its own rules: amendments change codecs, the learning rate, merges, decay."""
        self.rules_in = self.owing.rules_in = rules_in

    def sign_as(self, process_id: int) -> None:
        """Has what leaves here signed for this process of the node, as it is announced."""
        if self._sender.signer is not None:
            self._sender.signer.process_id = process_id

    def receipt_for(self, contribution: PayloadHeader, *, attempt: int) -> bytes:
        """A receipt of this node for a contribution that it has taken as the reducer of its slice.

        Empty where nobody audits: a result's header does not name the report that a receipt is held against.
        And where a result without it is signed already.
        """
        signer = self._sender.signer
        if signer is None or not self.are_receipts_due(contribution.round):
            return b""
        receipt = signer.receipt(contribution, attempt=attempt)
        return b"" if receipt is None else receipt.encode()

    def are_receipts_due(self, round: int) -> bool:
        """Whether reducers give receipts in a round."""
        return self.rules_in(round).merging.is_audited

    def signed_finding(self, finding: SignedT, round: int) -> SignedT:
        """What this node has found out about another one's work, with its signature where it has one."""
        signer, run_digest = self._sender.signer, self._sender.run_digest
        if signer is None:
            return finding
        return signer.signed_finding(finding, run_digest=run_digest, round=round)

    def beside(self, span: slice, difference: Vector, sign: int) -> Vector:
        """The global parameters with a difference [span] added (-1) or subtracted (1), new. Heavy."""
        moved = self._parameters.copy()
        (np.subtract if sign > 0 else np.add)(moved[span], difference, out=moved[span])
        return moved

    def compile_kernels(self) -> None:
        """Gets codecs and arithmetic ready, which takes seconds on a machine's first start. Heavy.

        Those of the next round, and those that the run began with.
        """
        coming = self.rules_in(self.round + 1)
        used = (self.uplink, self.downlink, coming.uplink, coming.downlink)
        for codec in {codec.name: codec for codec in used}.values():
            compile_kernels(codec)
        compile_arithmetic(self._optimizer)

    def result_of(self, reduction: Reduction, fragment: int) -> SliceResult | None:
        """The result of a slice that this node reduces, or None when nothing was contributed.

        Moves nothing: tell `owing.note_result` when it is to be handed out. Heavy.
        """
        part = reduction.slice
        span = self.layout.span_of(fragment, part.start, part.num_elements)
        result = self._reduced(
            reduction,
            self._merging_on(span),
            sender=self._sender,
            missed=self._missed,
            carried=self.carried(part, fragment),
        )
        if result is not None:
            header = result.payload.header
            self._opened[header.codec, header.body_digest, part.num_elements] = result.encoded
        return result

    def carried(self, part: Slice, fragment: int) -> Vector | None:
        """What this node adds to the mean of a slice: the error of its earlier results."""
        span = self.layout.span_of(fragment, part.start, part.num_elements)
        return self.owing.reducer_error.carried(span)

    def base_of(self, plan: Plan) -> Base | None:
        """What a round's results follow from of the state that it builds on; None where nobody audits.

        Also where this node holds another state. Heavy: reads the fragment, and for merges by the momentum
        makes a vector of its size.
        """
        merging = self.rules_in(plan.round).merging
        if not merging.is_audited or (plan.round - 1, plan.base_digest) != self.position:
            return None
        base = {}
        for part in plan.slices:
            by = self._merging_on(self.layout.span_of(plan.fragment, part.start, part.num_elements))
            assert by.norm_of_parameters is not None
            norm = by.norm_of_parameters()
            base[part.index] = replace(by, norm_of_parameters=partial(float, norm))
        return base

    def made_again(
        self,
        reduction: Reduction,
        by: Merging,
        *,
        missed: Mapping[NodeId, int],
        carried: Vector | None,
    ) -> SliceResult | None:
        """What its reducer must have made of the same inputs, bit for bit, but for the signature. Heavy."""
        reducer = Sender(
            run_digest=self._sender.run_digest, node_id=reduction.slice.reducer_id, signer=None
        )
        return self._reduced(reduction, by, sender=reducer, missed=missed, carried=carried)

    def _reduced(
        self,
        reduction: Reduction,
        by: Merging,
        *,
        sender: Sender,
        missed: Mapping[NodeId, int],
        carried: Vector | None,
    ) -> SliceResult | None:
        return reduction.result(
            downlink=self.rules_in(reduction.plan.round).downlink,
            sender=sender,
            by=replace(by, missed=missed),
            carried=carried,
            wants_error=self.owing.reducer_error.rule != "drop",
            rounds_error=self.owing.reducer_error.rule == "keep",
        )

    def _merging_on(self, span: slice) -> Merging:
        """How contributions to a slice are merged in the next round, as the state now has it."""
        merging = self.rules_in(self.round + 1).merging
        return replace(merging, norm_of_parameters=partial(norm_of, self._parameters[span]))

    def check_result(
        self, payload: Payload, own: Payload | None = None, *, drawn: int = 0
    ) -> float | None:
        """Raises CodecError unless the result decodes, to the norm that its header declares.

        The coordinator bounds results by these norms, so nobody holds one that is longer than it says.
        Heavy for the first time; it is applied from what was opened here. Returns how far it leads where
        `own`, this node's contribution to it, does: see node.exchange.mean.agreement, which `drawn` is for.
        """
        opened = self._open(payload)
        if own is None:
            return None
        header = own.header
        codec = self.rules_in(header.round).uplink
        sent = Encoded(codec=codec, body=own.body, size=header.num_elements)
        return agreement(opened, sent, drawn=drawn)

    def _open(self, payload: Payload) -> Opened:
        header = payload.header
        downlink = self.rules_in(header.round).downlink
        key = downlink.name, header.body_digest, header.num_elements
        opened = self._opened.get(key)
        if opened is None:
            opened = downlink.opened(payload.body, header.num_elements)
            squares = BlockSums(header.num_elements)
            opened.each_tile(squares.take)
            if (norm := squares.norm()) != header.norm:
                raise CodecError(f"its norm is {norm!r}, and its header says {header.norm!r}")
            self._opened[key] = opened
        return opened

    def is_base_of(self, commit: Commit) -> bool:
        """Whether the commit applies to the state that is held now."""
        return (commit.round - 1, commit.base_digest) == (self.round, self.digest)

    def apply(self, commit: Commit, results: Mapping[int, Payload]) -> None:
        """Moves to the state at the commit's round, and settles what is pending of that.

        `results` holds the payload of every slice that is not void. Raises NotApplicableError or
        CodecError before anything changes: once the first element moves, nothing may fail any more.
        """
        if not self.is_base_of(commit):
            raise UnequalBaseError(
                f"round {commit.round} applies to state {commit.base_digest.hex()[:8]} at round "
                f"{commit.round - 1}, we hold {self.digest.hex()[:8]} at round {self.round}"
            )
        self._check_fits(commit)
        committed = [outcome for outcome in commit.slices if outcome.digest is not None]
        opened = self._opened_of(committed, results, round=commit.round)
        refuse_flushed_subnormals()
        self._optimizer = self.rules_in(commit.round).optimizer
        self._opened.clear()
        self._before_change(self.layout.fragments[commit.fragment].span)
        reducers = {index: payload.header.sender_id for index, payload in results.items()}
        self.owing.settle(commit, reducers)
        for outcome in committed:
            norm = results[outcome.index].header.norm * outcome.factor / WHOLE
            self._move(commit.fragment, outcome, opened.pop(outcome.index), norm)
        own = {index for index, reducer in reducers.items() if reducer == self.node_id}
        self.count_missed(commit, own)
        self._digest.renew(
            (
                self.layout.span_of(commit.fragment, each.start, each.num_elements)
                for each in committed
            ),
            has_momentum_changed=self._optimizer.moves_momentum,
        )
        self.position = Position(round=commit.round, digest=self._digest.value)

    def _opened_of(
        self, committed: Sequence[SliceOutcome], results: Mapping[int, Payload], *, round: int
    ) -> dict[int, Opened]:
        """Each slice's result; raises NotApplicableError where one is not that of the commit."""
        opened: dict[int, Opened] = {}
        for outcome in committed:
            result = results.get(outcome.index)
            if result is None or result.digest != outcome.digest:
                what = "is not here" if result is None else "is another one"
                raise NotApplicableError(
                    f"the result of slice {outcome.index} of round {round} {what}"
                )
            header = result.header
            if (header.start, header.num_elements) != (outcome.start, outcome.num_elements):
                raise NotApplicableError(
                    f"the result of slice {outcome.index} of round {round} is of "
                    f"{header.num_elements} elements from {header.start} on, not of "
                    f"{outcome.num_elements} from {outcome.start} on"
                )
            opened[outcome.index] = self._open(result)
        return opened

    def count_missed(self, commit: Commit, own_slices: Collection[int] = ()) -> None:
        """Takes in whose work a commit took: the tokens of who is missing again and again do not count."""
        self._missed = missed_in_a_row(self._missed, commit, own_slices)
        self._lacking = with_commit(self._lacking, commit, own_slices)

    def less_awaited(self, plan: Plan) -> dict[NodeId, Awaited]:
        """For whose contributions to a round this node does not wait until the deadline."""
        return less_awaited(plan, self._lacking)

    def _before_change(self, span: slice) -> None:
        """Elements of the state, or of what is owed, are about to change."""
        if (writing := self.writing) is not None:
            writing.keep(span)

    def _check_fits(self, commit: Commit) -> None:
        """Raises NotApplicableError unless the slices lie in the commit's fragment, one behind the other."""
        fragments = self.layout.fragments
        size = fragments[commit.fragment].num_elements if commit.fragment < len(fragments) else 0
        end = 0
        for outcome in sorted(commit.slices, key=lambda outcome: outcome.start):
            if outcome.start < end or outcome.num_elements < 1:
                raise NotApplicableError(f"slices of round {commit.round} overlap")
            end = outcome.start + outcome.num_elements
        if end > size or len({outcome.index for outcome in commit.slices}) < len(commit.slices):
            raise NotApplicableError(
                f"round {commit.round} has other slices than fragment {commit.fragment} of the model"
            )
        pending = self.owing.pending
        is_ours = pending is not None and pending.round == commit.round
        if pending is not None and is_ours and pending.fragment != commit.fragment:
            raise NotApplicableError(
                f"round {commit.round} is of fragment {commit.fragment}, and this node has "
                f"contributed to fragment {pending.fragment}"
            )

    def _move(self, fragment: int, outcome: SliceOutcome, result: Opened, norm: float) -> None:
        """Applies the outer optimizer to a slice, with as much of its result as the commit says.

        `norm` is what the result comes to then.
        """
        span = self.layout.span_of(fragment, outcome.start, outcome.num_elements)
        largest = largest_norm(
            outcome.num_elements,
            asked_for=norm,
            norm_of_parameters=partial(norm_of, self._parameters[span]),
        )
        if norm > largest:
            # No bound of the coordinator's has held it, as in a first round. All nodes see the same.
            log.error(
                "a committed result changes nothing: no training comes to such a norm",
                start=outcome.start,
                norm=norm,
                largest=largest,
            )
            return
        rate_scale = self._rate_scale.of(outcome.taken)
        factor = np.float32(outcome.factor / WHOLE)

        def move(start: int, mean: Vector) -> None:
            if factor != 1:
                np.multiply(mean, factor, out=mean)
            tile = slice(span.start + start, span.start + start + mean.size)
            self._optimizer.apply(self._parameters[tile], self._momentum[tile], mean, rate_scale)

        result.each_tile(move)

    def held(self) -> tuple[Snapshot, Owed]:
        """The state and what this node owes, not copies of them: the next commit changes both."""
        state = Snapshot(
            round=self.round,
            run_digest=self._sender.run_digest,
            layout_digest=self.layout_digest,
            parameters=self._parameters,
            momentum=self._momentum,
            known_digest=self.digest,
        )
        return state, self.owing.held()

    def snapshot(self) -> Snapshot:
        """A copy of the state."""
        state, _ = self.held()
        return replace(
            state,
            parameters=state.parameters.copy(),
            momentum=state.momentum.copy(),
            known_digest=None,
        )

    def owed(self) -> Owed:
        """A copy of what this node still owes."""
        _, owed = self.held()
        return replace(owed, residual=owed.residual.copy())

    def leap(self, snapshot: Snapshot, passed: Sequence[Commit]) -> None:
        """Takes over a later state of the history that ours is of.

        `passed` are all commits from ours to that one: what they did not take is still owed. Raises
        NotApplicableError before anything changes. Heavy.
        """
        self._check_state(snapshot, None)
        for commit in passed:
            self._check_fits(commit)
        self._before_change(slice(0, self.layout.num_elements))
        for commit in passed:
            self.owing.settle(commit, {})
            self.count_missed(commit)
        self.restore(snapshot, self.owing.held())

    def step_back(self, round: int) -> None:
        """Takes the state for that of an earlier round: only void rounds led from there to it."""
        self.owing.step_back(round)
        self.position = Position(round=round, digest=self.digest)

    def restore(self, snapshot: Snapshot, owed: Owed | None) -> None:
        """Takes over another state; with None, nothing is owed any more. Heavy.

        Raises NotApplicableError before anything changes.
        """
        self._check_state(snapshot, owed)
        self._before_change(slice(0, self.layout.num_elements))
        self.owing.restore(owed, round=snapshot.round)
        self._parameters[:] = snapshot.parameters
        self._momentum[:] = snapshot.momentum
        self._digest.renew([slice(0, self.layout.num_elements)])
        self.position = Position(round=snapshot.round, digest=self._digest.value)

    def _check_state(self, snapshot: Snapshot, owed: Owed | None) -> None:
        size = self.layout.num_elements
        vectors = {"parameters": snapshot.parameters, "momentum": snapshot.momentum}
        if owed is not None:
            vectors["residual"] = owed.residual
        for name, vector in vectors.items():
            if vector.shape != (size,):
                raise NotApplicableError(
                    f"the {name} of round {snapshot.round} have shape {vector.shape}, and the model "
                    f"has {size:,} elements"
                )
        end = 0
        for start, kept in sorted(((owed and owed.reducer_error) or {}).items()):
            if start < end or start + kept.size > size:
                raise NotApplicableError(
                    f"a reducer's error of round {snapshot.round} is of {kept.size:,} elements from "
                    f"{start:,} on, after one that ends at {end:,}, and the model has {size:,}"
                )
            end = start + kept.size
