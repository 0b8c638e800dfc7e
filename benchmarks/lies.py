"""How members of the attacks' benchmark lie: in what they publish, say, sign and send."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np
from blake3 import blake3
from google.protobuf.message import Message

from lab.misreading import Misreading
from lab.simulation.swarm import SimulatedNode
from node.exchange.codecs.registry import codec_named
from node.exchange.mean import norm_of
from node.exchange.reduction import Reduction, SliceResult
from node.exchange.screening import CONTRADICTS_BELOW
from node.outer_state import Vector
from protocol.v1 import session_pb2 as pb
from protocol.wire.payload import CONTRIBUTION, RESULT, Payload, PayloadHeader
from protocol.wire.rounds import Digest, NodeId

SECONDS_A_STEP = 1.0  # virtual

Z_OF_ALIE = 1.5
"""Standard deviations off the mean: what Baruch et al. 2019 ("A Little Is Enough") find to go unnoticed."""


@dataclass(slots=True, kw_only=True)
class Known:
    """What liars know: the pseudo-gradients that honest nodes published last, by their places."""

    last: dict[int, Vector] = field(default_factory=dict)

    def mean(self) -> Vector:
        """Of the honest ones [n]."""
        middle: Vector = np.mean(list(self.last.values()), axis=0).astype(np.float32)
        return middle

    def spread(self) -> Vector:
        """Their standard deviation [n]."""
        spread: Vector = np.std(list(self.last.values()), axis=0).astype(np.float32)
        return spread


Lie = Callable[[Vector, Known], Vector]
"""What a liar publishes, of its own pseudo-gradient [n] and what it knows; both descend when subtracted."""

Says = Callable[[Message], Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """What each liar does."""

    lie: Callable[[np.random.Generator], Lie] | None = None
    says: Says | None = None
    has_poisoned_labels: bool = False
    trained_share: float = 1.0  # of the inner steps that it says it has taken
    seconds_a_step: float = SECONDS_A_STEP
    lies: Callable[[SimulatedNode], None] | None = None
    keys: int = 1
    """That each liar has; several are all of one invite. With none it is not there at all."""


def times(factor: float) -> Callable[[np.random.Generator], Lie]:
    """Its own work, so many times."""
    return lambda _: lambda own, known: own * np.float32(factor)


def everywhere(value: float) -> Callable[[np.random.Generator], Lie]:
    """One number in all places."""
    return lambda _: lambda own, known: np.full_like(own, value)


def gaussian(rng: np.random.Generator) -> Lie:
    """Noise with ten times the norm of its own work."""

    def lie(own: Vector, known: Known) -> Vector:
        noise = rng.standard_normal(own.size, dtype=np.float32)
        return noise * np.float32(10 * np.linalg.norm(own) / np.linalg.norm(noise))

    return lie


def a_little_is_enough(_: np.random.Generator) -> Lie:
    """The honest ones' mean, off by what their own spread hides."""
    return lambda own, known: (
        known.mean() - np.float32(Z_OF_ALIE) * known.spread() if known.last else own
    )


def inner_product(_: np.random.Generator) -> Lie:
    """Against the honest ones' mean (Xie et al. 2020, "Fall of Empires"), at its own norm."""

    def lie(own: Vector, known: Known) -> Vector:
        if not known.last:
            return -own
        against = -known.mean()
        return against * np.float32(np.linalg.norm(own) / (np.linalg.norm(against) + 1e-30))

    return lie


def beside_the_momentum(_: np.random.Generator) -> Lie:
    """The same in all that is new: at right angles to where the model has been going."""
    went: list[Vector] = []

    def lie(own: Vector, known: Known) -> Vector:
        if not known.last:
            return -own
        middle = known.mean()
        way = went.pop() if went else np.zeros_like(middle)
        along = float(middle @ way) / (float(way @ way) + 1e-30)
        against = np.float32(along) * way - middle
        went.append(np.float32(0.7) * way + middle)
        return against * np.float32(np.linalg.norm(own) / (np.linalg.norm(against) + 1e-30))

    return lie


def as_far_as_hidden(rng: np.random.Generator) -> Lie:
    """Against their mean as far as `agreeing` takes for usual, and noise for the rest of its own norm."""

    def lie(own: Vector, known: Known) -> Vector:
        if not known.last:
            return own
        units = [each / (np.linalg.norm(each) + 1e-30) for each in known.last.values()]
        middle = np.mean(units, axis=0)
        # Its length is also how far each agrees with it on average.
        length = float(np.linalg.norm(middle)) + 1e-30
        usual = median(float(one @ other) for one, other in combinations(units, 2))
        part = min(1.0, 0.8 * CONTRADICTS_BELOW * max(0.0, usual) / length)
        noise = rng.standard_normal(own.size, dtype=np.float32)
        hidden = noise * ((1 - part**2) ** 0.5 / np.linalg.norm(noise)) - middle * (part / length)
        told: Vector = (hidden * np.linalg.norm(own)).astype(np.float32)
        return told

    return lie


def copied(_: np.random.Generator) -> Lie:
    """What an honest node published last: no work of its own."""
    return lambda own, known: next(iter(known.last.values()), np.zeros_like(own))


def copied_mean(_: np.random.Generator) -> Lie:
    """What honest nodes published last, on average: no work of its own."""
    return lambda own, known: known.mean() if known.last else own


def with_the_mean(_: np.random.Generator) -> Lie:
    """The same, and its own work on top, at the norm of the mean."""

    def lie(own: Vector, known: Known) -> Vector:
        if not known.last:
            return own
        middle = known.mean()
        both = middle + own
        return both * np.float32(np.linalg.norm(middle) / (np.linalg.norm(both) + 1e-30))

    return lie


def stale(_: np.random.Generator) -> Lie:
    """What it has trained first, in every round."""
    first: list[Vector] = []

    def lie(own: Vector, known: Known) -> Vector:
        first.append(own.copy())
        return first[0]

    return lie


def claims_speed(message: Message) -> Message:
    """Says that it trains 20,000 times as fast, and that its link carries a terabyte a second."""
    if isinstance(message, pb.ReportRequest):
        for report in message.reports:
            if report.HasField("trained"):
                report.trained.seconds /= 20_000
    if isinstance(message, pb.HeartbeatRequest):
        message.link_rates.up_bytes_per_second = 1e12
        message.link_rates.down_bytes_per_second = 1e12
    return message


def votes_for_a_made_up_state(message: Message) -> Message:
    """Reports a digest that no honest node has, the same one as the other liars."""
    made_up = b"\x66" * 32
    if isinstance(message, pb.ReportRequest):
        for report in message.reports:
            if report.HasField("applied"):
                report.applied.outer_digest = made_up
    if isinstance(message, pb.HeartbeatRequest) and message.outer_round:
        message.outer_digest = made_up
    return message


def reports_nothing(message: Message) -> Message:
    """Keeps its lease, and tells of nothing that it did."""
    if isinstance(message, pb.ReportRequest):
        del message.reports[:]
    return message


FIRST_LIE = 2
"""The round from which on liars lie that send others something else: they have work by then."""


def _without(message: Message, *, kinds: Sequence[str], first: int) -> Message:
    """The message without those reports on this round and later ones."""
    if isinstance(message, pb.ReportRequest):
        kept = [
            each
            for each in message.reports
            if each.round < first or each.WhichOneof("report") not in kinds
        ]
        del message.reports[:]
        message.reports.extend(kept)
    return message


def stops_to_report(message: Message) -> Message:
    """Works for three rounds, so that rounds are measured and it decides; then tells of nothing more."""
    kinds = ("trained", "reduced", "held", "applied")
    return _without(message, kinds=kinds, first=FIRST_LIE + 2)


def reports_no_results(message: Message) -> Message:
    """Trains and contributes, and never says that it has made a result."""
    return _without(message, kinds=("reduced",), first=FIRST_LIE)


Sends = Callable[[NodeId, Payload], Sequence[Payload]]
"""What a liar sends a peer in the place of a payload of its own."""


def _sending(node: SimulatedNode, sends: Sends) -> None:
    honest = node.transport.push

    async def push(peer: NodeId, payload: Payload, *, timeout_seconds: float) -> bytes:
        if payload.header.round < FIRST_LIE or payload.header.sender_id != node.node_id:
            return await honest(peer, payload, timeout_seconds=timeout_seconds)
        answer = b""
        for told in sends(peer, payload):
            answer = await honest(peer, told, timeout_seconds=timeout_seconds)
        return answer

    node.transport.push = push  # type: ignore[method-assign] # a liar's


def _signed(node: SimulatedNode, header: PayloadHeader, body: bytes, norm: float) -> Payload:
    changed = replace(header, body_digest=Digest(blake3(body).digest()), norm=norm)
    return Payload(header=changed.signed(node.identity), body=body)


def _turned(node: SimulatedNode, payload: Payload) -> Payload:
    """The same backwards, well-formed and signed."""
    header = payload.header
    codec = codec_named(header.codec)
    body = codec.encode(-codec.decode(payload.body, header.num_elements))
    norm = (
        norm_of(codec.decode(body, header.num_elements)) if header.kind == RESULT else header.norm
    )
    return _signed(node, header, body, norm)


def signs_two_contributions(node: SimulatedNode) -> None:
    """Each reducer gets its work, and then the same backwards for the same slot."""

    def sends(_: NodeId, payload: Payload) -> Sequence[Payload]:
        is_contribution = payload.header.kind == CONTRIBUTION
        return [payload, _turned(node, payload)] if is_contribution else [payload]

    _sending(node, sends)


def signs_two_results(node: SimulatedNode) -> None:
    """Every other member gets another result than it reports."""

    def sends(peer: NodeId, payload: Payload) -> Sequence[Payload]:
        is_lie = payload.header.kind == RESULT and int(peer[:2], 16) % 2 == 0
        return [_turned(node, payload) if is_lie else payload]

    _sending(node, sends)


def sends_nonsense(node: SimulatedNode) -> None:
    """Contributions whose scales are NaN, of the right size and digest and signed, that no codec takes."""

    def sends(_: NodeId, payload: Payload) -> Sequence[Payload]:
        if payload.header.kind != CONTRIBUTION:
            return [payload]
        body = b"\xff" * len(payload.body)
        return [_signed(node, payload.header, body, payload.header.norm)]

    _sending(node, sends)


def keeps_contributions(node: SimulatedNode) -> None:
    """It says that it has trained, and takes its work into its own slices alone."""
    _sending(node, lambda _, payload: [] if payload.header.kind == CONTRIBUTION else [payload])


def keeps_from_one(node: SimulatedNode) -> None:
    """One reducer gets none of its work, always the same: so it was never spot-checked."""
    spared: list[NodeId] = []

    def sends(peer: NodeId, payload: Payload) -> Sequence[Payload]:
        if payload.header.kind != CONTRIBUTION:
            return [payload]
        spared[:] = [min([peer, *spared])]
        return [] if peer == spared[0] else [payload]

    _sending(node, sends)


def keeps_in_turn(node: SimulatedNode) -> None:
    """In each round another reducer gets none of its work."""
    reducers: set[NodeId] = set()

    def sends(peer: NodeId, payload: Payload) -> Sequence[Payload]:
        if payload.header.kind != CONTRIBUTION:
            return [payload]
        reducers.add(peer)
        in_turn = sorted(reducers)[payload.header.round % len(reducers)]
        return [] if peer == in_turn else [payload]

    _sending(node, sends)


def keeps_results(node: SimulatedNode) -> None:
    """It reports the results of its slices, and sends them to nobody."""
    _sending(node, lambda _, payload: [] if payload.header.kind == RESULT else [payload])


def keeps_all(node: SimulatedNode) -> None:
    """It says that it has trained and reduced, and sends nothing to anybody."""
    _sending(node, lambda _, payload: [])


def reduces_backwards(node: SimulatedNode) -> None:
    """Its results are the means of its slices turned round: as long as honest ones, so no bound cuts them."""
    honest = node.outer.result_of

    def lying(reduction: Reduction, fragment: int) -> SliceResult | None:
        if reduction.plan.round >= FIRST_LIE:
            turned: Any = Misreading(reduction.uplink)
            reduction = replace(reduction, uplink=turned)
        return honest(reduction, fragment)

    node.outer.result_of = lying  # type: ignore[method-assign] # a liar's


def makes_nonsense_of_its_slices(node: SimulatedNode) -> None:
    """It reports, signs and sends results that no codec takes, the same to all."""
    honest = node.outer.result_of

    def lying(reduction: Reduction, fragment: int) -> SliceResult | None:
        made = honest(reduction, fragment)
        if made is None or reduction.plan.round < FIRST_LIE:
            return made
        header, body = made.payload.header, b"\xff" * len(made.payload.body)
        return replace(made, payload=_signed(node, header, body, header.norm))

    node.outer.result_of = lying  # type: ignore[method-assign] # a liar's


ATTACKS: Mapping[str, Attack] = {
    "away": Attack(keys=0),
    "sign flip × 1": Attack(lie=times(-1)),
    "sign flip × 10": Attack(lie=times(-10)),
    "scale × 100": Attack(lie=times(100)),
    "1e30": Attack(lie=everywhere(1e30)),
    "Gaussian × 10": Attack(lie=gaussian),
    "ALIE": Attack(lie=a_little_is_enough),
    "inner product": Attack(lie=inner_product),
    "beside the momentum": Attack(lie=beside_the_momentum),
    "as far as hidden": Attack(lie=as_far_as_hidden),
    "copy": Attack(lie=copied),
    "copied mean": Attack(lie=copied_mean),
    "a tenth": Attack(trained_share=0.1),
    "a tenth and the mean": Attack(lie=with_the_mean, trained_share=0.1),
    "nothing": Attack(lie=times(0)),
    "stale": Attack(lie=stale),
    "label poison": Attack(has_poisoned_labels=True),
    "false speed": Attack(says=claims_speed),
    "made-up state": Attack(says=votes_for_a_made_up_state),
    "idle": Attack(says=reports_nothing),
    "idle later": Attack(says=stops_to_report),
    "slow": Attack(seconds_a_step=100 * SECONDS_A_STEP),
    "kept contributions": Attack(lies=keeps_contributions),
    "kept in turn": Attack(lies=keeps_in_turn),
    "copied mean, kept from one": Attack(lie=copied_mean, lies=keeps_from_one),
    "kept results": Attack(lies=keeps_results),
    "kept both": Attack(lies=keeps_all),
    "no results": Attack(lies=keeps_results, says=reports_no_results),
    "NaN": Attack(lies=sends_nonsense),
    "two contributions": Attack(lies=signs_two_contributions),
    "two results": Attack(lies=signs_two_results),
    "lying reducer": Attack(lies=reduces_backwards),
    "nonsense results": Attack(lies=makes_nonsense_of_its_slices),
    "Sybils": Attack(lie=times(-1), says=votes_for_a_made_up_state, keys=4),
}
