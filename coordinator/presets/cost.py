"""What a round's exchange takes, and how much of the time nodes compute: a formula. Pure.

Of N equal nodes each reduces an equal slice of a fragment of S = parameters / fragments values, with
u and d bits for each value in contributions and in results. A node sends

    (N - 1) / N · S · (u + d) / 8     bytes a round

contributions to the others' slices, then the results of its own slice, and receives as many. Where a share p
of the slices is audited, auditors are given the contributions to them and, where reducers keep what encoding
rounds away, that error in bf16:

    p · S · (u + 16 / N) / 8          more bytes a round for each node, on average

and a share p of the contributions is spot-checked, where there are three nodes or more. Who checks one
fetches what it has not reduced of it:

    p · (N - 1) / N · S · u / 8       more bytes again

These travel beside training, so they take time where training is over before them, or an exchange is
beside it. To measure one, its checker passes four times through the model for each of n samples of a lease of
steps · batch, without gradients (protocol.wire.rounds.num_spot_checked). It trains as much less, so that no
round takes longer:

    p · 4 · n / (3 · steps · batch)   of the time in inner steps is for checks; a third of p for most leases

Both ways fill at once, so the slower direction of the link counts (coordinator/presets/cost.py): of
what it is said to carry a share is achieved, after TCP's slow start where there is one, and all of what
exchanges were seen to achieve on it.

    exchange = bytes · 8 / (share · slower direction) + slow start + ROUND_TRIPS · round trip + host work
    host work = what a node does with the fragment on the cores that training leaves, one thing after the
                other: encode, decode the contributions to its slice, screen and average them, encode
                their mean, decode all results, form sums and apply them, and digest what has changed of
                the outer state; and what the coordinator does for each node

Without overlap a round takes training + exchange. With overlap the exchange goes on beside the next
round's training and may take as long as that; nodes wait for what it takes longer:

    round = training + exchange                          without overlap
    round = max(training, exchange) + publish and adopt  with it
            where audits take time: max(training, audits) + exchange, or max(training, exchange + audits)
    utilisation = training / round                       checks are training here

Fragments cut what a round sends and trains alike, so bytes for an inner step go by fragments · steps, the
inner steps between two exchanges of the same parameters: more fragments at the same interval save none of
them. They bring results sooner, and take less memory while they travel. Fragments hold whole tensors, and
an embedding may be larger than all else in one: a round is that of each fragment by its size, and their mean
counts.

That is of rounds in the middle of a run whose nodes and links are alike; nothing hides the last
exchange. Deaths, stragglers and evaluations are not in it.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from protocol.run.node_memory import CODEC_BITS
from protocol.run.run_spec import InnerSection
from protocol.wire.rounds import (
    LEAST_CHECKED,
    PASSES_OF_CHECK,
    PASSES_OF_TRAINING,
    num_spot_checked,
)

# How long a link takes for an exchange's bytes, by TCP's slow start and what a full link gets.
#
# Of a link that is full, bodies get a share. Before that cubic, Linux's default, has to feel its way: after
# a pause it begins with ten packets (RFC 6928) and sends twice as much in each round trip (RFC 5681), until
# the link is full. That costs as many round trips however many bytes follow, and the more of them the
# faster and the longer the link is. bbr goes on at the rate that it has seen, and cubic does where hosts
# keep its windows over pauses (net.ipv4.tcp_slow_start_after_idle = 0).
#
# The share was measured (benchmarks/exchange/shares.py): two nodes, 100 and 10 Mbit/s, 50 ms. Slow start is
# arithmetic; kept windows saved as much of it as it says, to a round trip, at 100 Mbit/s and 50 ms.


CongestionControl = Literal["cubic", "bbr"]

CUBIC: CongestionControl = "cubic"
"""What counts where nobody says: Linux's default, and of the two the one that gets less."""

MEASURED_SHARE = 0.86
"""The median, of cubic and bbr alike: they differ by less than exchanges over one of them do. Headers are in
it, and what cores did meanwhile, which is counted once more: a little too careful rather than too bold."""

WHOLE = 1.0
"""Of rates that nodes have measured: they are of exchanges, so what those lose is lost already."""

FIRST_WINDOW_BYTES = 10 * 1448
"""Ten packets on Ethernet. A node sends to several peers, each over a connection that begins so; all their
bytes are counted as if they went over one."""

NO_DISTANCE = math.inf
"""Round trips that bytes take where one takes no time."""

LEAST_TOLD = 0.05
"""Round trips that slow start costs; below that nothing is said of it."""

_FASTEST = 2.0**32
"""So many times the slowest link that might do is as fast as any."""

_HALVINGS = 64
"""After so many, what is left between two rates is nothing to a float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The slower direction of a node's link, and how TCP uses it."""

    bits_per_second: float
    round_trip_seconds: float
    congestion_control: CongestionControl | None  # None: the rate is what exchanges achieved
    keeps_windows: bool = False  # over pauses

    @property
    def full_share(self) -> float:
        """What bodies get of its rate once it is full."""
        return WHOLE if self.congestion_control is None else MEASURED_SHARE

    @property
    def begins_slowly(self) -> bool:
        """Whether an exchange, which comes after a pause, has to find out what the link carries."""
        return self.congestion_control == CUBIC and not self.keeps_windows

    def round_trips_of(self, num_bytes: float) -> float:
        """How many pass while it carries these bytes at its whole rate."""
        if not self.round_trip_seconds:
            return NO_DISTANCE
        return num_bytes * 8 / self.bits_per_second / self.round_trip_seconds

    def round_trips_lost(self, num_bytes: float) -> float:
        """To slow start, in which the link is not full."""
        return self._lost_at(self.bits_per_second, num_bytes)

    def seconds_of(self, num_bytes: float) -> float:
        """What these bytes take, slow start included."""
        return self._seconds_at(self.bits_per_second, num_bytes)

    def share_of(self, num_bytes: float) -> float:
        """The part of its whole rate that they get on average."""
        return num_bytes * 8 / self.bits_per_second / self.seconds_of(num_bytes)

    def enough_bits_per_second(self, num_bytes: float, seconds: float) -> float | None:
        """The rate at which these bytes take these seconds; None: slow start alone takes longer.

        A faster link never takes longer, so there is one answer. Without slow start it is plain; with it,
        halving finds it.
        """
        least = num_bytes * 8 / seconds / self.full_share
        if not self.begins_slowly:
            return least
        most = least * _FASTEST
        if self._seconds_at(most, num_bytes) > seconds:
            return None
        for _ in range(_HALVINGS):
            middle = math.sqrt(least * most)
            if self._seconds_at(middle, num_bytes) > seconds:
                least = middle
            else:
                most = middle
        return most

    def _seconds_at(self, bits_per_second: float, num_bytes: float) -> float:
        lost = self._lost_at(bits_per_second, num_bytes) * self.round_trip_seconds
        return num_bytes * 8 / (self.full_share * bits_per_second) + lost

    def _lost_at(self, bits_per_second: float, num_bytes: float) -> float:
        if not self.begins_slowly:
            return 0.0
        full_bytes = bits_per_second / 8 * self.round_trip_seconds
        return round_trips_lost(num_bytes / FIRST_WINDOW_BYTES, full_bytes / FIRST_WINDOW_BYTES)


def round_trips_lost(windows: float, windows_a_round_trip: float) -> float:
    """To slow start, by so many first windows' bytes over a link that carries so many in a round trip.

    As a fluid: 2^t - 1 windows have been sent after t round trips, ever faster until the link is full.
    """
    if windows_a_round_trip <= math.log(2):
        return 0.0
    until_full = windows_a_round_trip / math.log(2)  # 2^t when the link is
    ended = min(until_full, 1 + windows)
    return math.log2(ended) - (ended - 1) / windows_a_round_trip


def share_in_words(link: Link, num_bytes: float) -> str:
    """For the reason of a choice: what is counted on, and where that is from."""
    if link.congestion_control is None:
        return "counts on all of the link: its rate is what exchanges achieved"
    counted = f"counts on {link.share_of(num_bytes):.2f} of the link"
    size = f"{_three_digits(num_bytes / 1e6)} MB"
    round_trips = link.round_trips_of(num_bytes)
    if round_trips == NO_DISTANCE:
        return f"{counted}: {size} over no distance, with {link.congestion_control}"
    words = f"{counted}: {size} are {_three_digits(round_trips)} round trips of it, with "
    words += link.congestion_control
    if (lost := link.round_trips_lost(num_bytes)) >= LEAST_TOLD:
        words += f", plus {lost:.1f} of slow start"
    return words


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


FP32_BYTES = 4

PEER_ROUND_TRIPS = 1
"""Half of it until the first contribution is there, half until the last result is: what else is said travels
beside bodies. If there were two, some exchanges would have got more than their link
(benchmarks/exchange/shares.py)."""

COORDINATOR_ROUND_TRIPS = 2
"""One from the last report to the commit, one from the report that it is applied to the next plan."""

ROUND_TRIPS = PEER_ROUND_TRIPS + COORDINATOR_ROUND_TRIPS

GOAL = 0.95
"""The part of the time in inner steps that presets aim at."""

RANK_BYTES, FROZEN_BYTES = 16, 4
"""Of memory for each parameter in a node's ranks together: the model, its gradients and AdamW's two moments
in fp32; and for each that is not trained, as those below adapters. Activations come on top."""

DISK_BYTES = 4 * 16 + 2 * 8 + 8
"""Of a node's disk for each parameter: four snapshots, two of them by keep_snapshots, two checkpoints of the
inner optimizer, and results."""

AUDITED_ERROR_BITS = 16
"""Of each value of a kept error, as auditors are given it."""

PAYLOAD_HEADER_BYTES = 300
"""What goes before each body, whatever its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """Bits a value with headers, and GB/s of fp32 on one core (docs/results/codec.jsonl)."""

    bits: float
    encode: float
    decode: float


CODEC_COSTS: Mapping[str, CodecCost] = MappingProxyType(
    {
        "fp32": CodecCost(bits=CODEC_BITS["fp32"], encode=7.18, decode=6.28),
        "bf16": CodecCost(bits=CODEC_BITS["bf16"], encode=11.09, decode=14.25),
        "int8": CodecCost(bits=CODEC_BITS["int8"], encode=7.04, decode=11.19),
        "int4": CodecCost(bits=CODEC_BITS["int4"], encode=8.76, decode=8.61),
        "ec3": CodecCost(bits=CODEC_BITS["ec3"], encode=1.74, decode=1.18),
        "ec2": CodecCost(bits=CODEC_BITS["ec2"], encode=2.49, decode=1.84),
        "int2": CodecCost(bits=CODEC_BITS["int2"], encode=2.43, decode=18.96),
        "ec1": CodecCost(bits=CODEC_BITS["ec1"], encode=2.38, decode=1.82),
        "sign": CodecCost(bits=CODEC_BITS["sign"], encode=7.12, decode=5.92),
        "topk256": CodecCost(bits=CODEC_BITS["topk256"], encode=1.64, decode=4.75),
        "topk64": CodecCost(bits=CODEC_BITS["topk64"], encode=3.70, decode=9.91),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpeeds:
    """GB/s of a fragment's fp32 parameters on one core, codecs apart, and the coordinator's time.

    From docs/results/outer-arithmetic.jsonl, the copies from island-speed.jsonl, where slowest.
    """

    member_seconds: float = 0.008  # of a round, for each node (docs/results/coordinator.jsonl)
    sums: float = 2.9  # pseudo-gradient, residual, and what they become after the commit
    reduce: float = 5.7  # screening and the mean of what all sent to a slice
    apply: float = 7.5  # a first look at results, and the outer optimizer
    digest: float = 3.6  # of parameters and momentum
    copy: float = 7.4  # ranks publish or adopt it; nobody trains meanwhile
    codecs: float = 1.0  # CODEC_COSTS, so many times as fast


MEASURED_HOST = HostSpeeds()
INSTANT_HOST = HostSpeeds(
    member_seconds=0.0,
    sums=float("inf"),
    reduce=float("inf"),
    apply=float("inf"),
    digest=float("inf"),
    copy=float("inf"),
    codecs=float("inf"),
)
"""As in virtual time, where only links and inner steps take any."""


ACCELERATED_FLOPS, ACCELERATED_TIMES = 2e12, 6.0
"""From so many operations a second on a node trains on GPUs, and its exchange has the cores beside them:
eight are assumed, of which each does three quarters of what one alone does. Not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A swarm of equal nodes. The link is that of the slowest node that one counts on."""

    num_parameters: int  # that are trained
    num_layers: int
    num_nodes: int
    down_bits_per_second: float
    up_bits_per_second: float
    round_trip_seconds: float
    seconds_per_inner_step: float
    total_steps: int  # inner steps of one node in the whole run
    batch: int = InnerSection().batch  # samples of an inner step
    congestion_control: CongestionControl | None = CUBIC  # None: rates are what exchanges got

    keeps_windows: bool = False  # TCP's, over pauses: see Link
    arithmetic: float | None = None
    """How fast the slowest node does an exchange's arithmetic, in multiples of HostSpeeds and CODEC_COSTS, as
    nodes measured it; None: assumed, by flops_per_second."""

    inner_optimizer: str = "muon"
    """As run files name it, and 'atoll init' writes it for new decoders."""

    has_weights: bool = False
    """Whether nodes go on with weights that are given."""

    may_check: bool = True
    """Whether nodes spot-check each other's contributions: those of loops and of private data nobody can."""

    num_frozen: int = 0
    """Parameters that are not trained, and lie in ranks all the same."""

    flops_per_second: float = 0.0
    """What a node achieves, by 6 operations for each parameter and token; 0: as a CPU does."""

    fragment_sizes: tuple[tuple[int, ...], ...] = ()
    """Values of each fragment of the model in one, in two, and so on (protocol.run.models); of more
    fragments than are told here all are taken for equal."""

    @property
    def rank_bytes(self) -> int:
        """Of memory in a node's ranks, activations apart."""
        return RANK_BYTES * self.num_parameters + FROZEN_BYTES * self.num_frozen

    def sizes_of(self, num_fragments: int) -> Sequence[float]:
        """Values of each of so many fragments."""
        if num_fragments <= len(self.fragment_sizes):
            return self.fragment_sizes[num_fragments - 1]
        return [self.num_parameters / num_fragments] * num_fragments

    @property
    def spot_checks(self) -> bool:
        """Whether nodes do so: it takes three."""
        return self.may_check and self.num_nodes >= 3

    @property
    def times_as_fast(self) -> float:
        """A node's arithmetic: see `arithmetic`."""
        if self.arithmetic is not None:
            return self.arithmetic
        return ACCELERATED_TIMES if self.flops_per_second >= ACCELERATED_FLOPS else 1.0

    @property
    def link(self) -> Link:
        """The slower of the two directions."""
        return Link(
            bits_per_second=min(self.down_bits_per_second, self.up_bits_per_second),
            round_trip_seconds=self.round_trip_seconds,
            congestion_control=self.congestion_control,
            keeps_windows=self.keeps_windows,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What of the run file decides what an exchange costs."""

    uplink: str
    downlink: str
    fragments: int
    has_overlap: bool
    steps: int  # inner steps of a round
    audit: float = 0.0  # the part of the slices that another member makes again
    keeps_error: bool = True  # whether reducers keep what encoding results rounds away

    @property
    def interval(self) -> int:
        """Inner steps between two exchanges of the same parameters."""
        return self.fragments * self.steps


UNEVEN = 1.2
"""An exchange that takes so many times as long as the mean is told beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the formula says of a setting."""

    bytes_per_round: float  # that one node sends, and receives, in exchanges, on average
    audit_bytes: float  # and gives auditors, on average
    link_share: float  # what of the link's rate an exchange of so many bytes gets
    training_seconds: float
    exchange_seconds: float  # on average
    longest_exchange_seconds: float  # of the largest fragment
    round_seconds: float  # on average
    peak_bits_per_second: float  # in each direction, while bytes travel
    late_steps: int
    """Inner steps trained on, with overlap, before a round's results are taken over; on average of all
    values."""

    enough_bits_per_second: float | None
    """The link at which GOAL is met, also in rounds of the largest fragment; None: no link does."""

    utilisation: float  # part of the time in inner steps, and in checks
    checking_share: float  # part of that time in spot checks
    times_fewer_bytes: float  # than a ring all-reduce of fp32 gradients at every inner step

    @property
    def is_uneven(self) -> bool:
        """Whether the largest fragment takes clearly longer than the mean one."""
        return self.longest_exchange_seconds >= UNEVEN * self.exchange_seconds


def all_reduce_bytes_per_step(situation: Situation) -> float:
    """What a node sends to average fp32 gradients (Patarasuk and Yuan 2009): 2 (N - 1) / N of them."""
    num_nodes = situation.num_nodes
    return 2 * (num_nodes - 1) / num_nodes * FP32_BYTES * situation.num_parameters


def bytes_per_round(situation: Situation, setting: Setting, values: float | None = None) -> float:
    """What a node sends in one, and receives, with a fragment of so many values, or one of the mean size."""
    num_nodes = situation.num_nodes
    values = _values(situation, setting) if values is None else values
    bits = CODEC_COSTS[setting.uplink].bits + CODEC_COSTS[setting.downlink].bits
    bodies = (num_nodes - 1) / num_nodes * values * bits / 8
    return bodies + 2 * (num_nodes - 1) * PAYLOAD_HEADER_BYTES


def audit_bytes(situation: Situation, setting: Setting) -> float:
    """What a node gives auditors in a round, and those who spot-check contributions, on average."""
    nodes, contribution = situation.num_nodes, CODEC_COSTS[setting.uplink].bits
    error = AUDITED_ERROR_BITS / nodes if setting.keeps_error else 0.0
    checks = (nodes - 1) / nodes if situation.spot_checks else 0.0
    bodies = _values(situation, setting) * ((1 + checks) * contribution + error) / 8
    return setting.audit * (bodies + (nodes + 1 + nodes * checks) * PAYLOAD_HEADER_BYTES)


def checking_share(situation: Situation, setting: Setting) -> float:
    """The part of the time for inner steps that nodes spot-check each other in, on average."""
    samples = setting.steps * situation.batch
    if not situation.spot_checks or samples < LEAST_CHECKED:
        return 0.0
    passes = PASSES_OF_CHECK * num_spot_checked(samples)
    return setting.audit * passes / (PASSES_OF_TRAINING * samples)


def _values(situation: Situation, setting: Setting) -> float:
    """Of one fragment, on average."""
    return situation.num_parameters / setting.fragments


def host_seconds(
    situation: Situation, setting: Setting, host: HostSpeeds, values: float | None = None
) -> float:
    """Work on a node's cores in the exchange of a fragment of so many values, or one of the mean size."""
    values = _values(situation, setting) if values is None else values
    up, down = CODEC_COSTS[setting.uplink], CODEC_COSTS[setting.downlink]
    # A node decodes N contributions to an N-th of the fragment, and encodes their mean.
    coding = (
        1 / up.encode + 1 / up.decode + 1 / (situation.num_nodes * down.encode) + 1 / down.decode
    )
    summing = sum(1 / x for x in (host.sums, host.reduce, host.apply, host.digest))
    work = _gigabytes(values) * (summing + coding / host.codecs)
    return work / situation.times_as_fast + host.member_seconds * situation.num_nodes


def exchange_bytes_per_second(uplink: str, downlink: str) -> float:
    """What node.exchange.codecs.registry would measure on the machine of HostSpeeds and CODEC_COSTS."""
    up, down = CODEC_COSTS[uplink], CODEC_COSTS[downlink]
    host = MEASURED_HOST
    seconds = sum(1 / x for x in (up.encode, up.decode, down.decode, host.digest, host.copy))
    return 1e9 / seconds


def _gigabytes(values: float) -> float:
    """Of a fragment, as fp32."""
    return FP32_BYTES * values / 1e9


def _late_steps(situation: Situation, setting: Setting, exchange_seconds: float) -> int:
    """Nodes end the inner step in progress; and no more is leased than a round's."""
    if not setting.has_overlap:
        return 0
    trained = exchange_seconds / situation.seconds_per_inner_step
    return setting.steps if trained >= setting.steps else math.ceil(trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Of a fragment: what its exchange takes, the whole round, and the link at which that meets the goal."""

    exchange: float
    seconds: float
    enough_bits_per_second: float | None


def _round(situation: Situation, setting: Setting, host: HostSpeeds, values: float) -> _Round:
    """With a fragment of so many values."""
    link = situation.link
    num_bytes = bytes_per_round(situation, setting, values)
    audits = audit_bytes(situation, setting) * values / _values(situation, setting)
    waits = ROUND_TRIPS * situation.round_trip_seconds
    waits += host_seconds(situation, setting, host, values)
    exchange = link.seconds_of(num_bytes) + waits
    training = setting.steps * situation.seconds_per_inner_step
    copies = 2 * _gigabytes(values) / host.copy / situation.times_as_fast
    auditing = audits * 8 / (link.full_share * link.bits_per_second)
    busy = (
        max(training, exchange + auditing)
        if setting.has_overlap
        else max(training, auditing) + exchange
    )
    # The rest of a round that meets the goal, for bytes alone.
    left = training / GOAL - copies - waits - (0 if setting.has_overlap else training)
    copies_fit = training + copies <= training / GOAL
    enough = None
    if left > 0 and copies_fit:
        beside = audits if setting.has_overlap else 0.0
        enough = link.enough_bits_per_second(num_bytes + beside, left)
    return _Round(exchange=exchange, seconds=busy + copies, enough_bits_per_second=enough)


def predicted(
    situation: Situation, setting: Setting, host: HostSpeeds = MEASURED_HOST
) -> Prediction:
    """See the formula above."""
    num_bytes, audits = bytes_per_round(situation, setting), audit_bytes(situation, setting)
    link = situation.link
    training = setting.steps * situation.seconds_per_inner_step
    sizes = Counter(situation.sizes_of(setting.fragments))
    rounds = {values: _round(situation, setting, host, values) for values in sizes}
    largest = rounds[max(sizes)]

    def mean(of: Callable[[_Round], float]) -> float:
        return sum(times * of(rounds[values]) for values, times in sizes.items()) / sizes.total()

    exchange, round_seconds = mean(lambda each: each.exchange), mean(lambda each: each.seconds)
    late = sum(
        times * values * _late_steps(situation, setting, rounds[values].exchange)
        for values, times in sizes.items()
    )
    saved = all_reduce_bytes_per_step(situation) * setting.steps / (num_bytes + audits)
    return Prediction(
        bytes_per_round=num_bytes,
        audit_bytes=audits,
        link_share=link.share_of(num_bytes),
        training_seconds=training,
        exchange_seconds=exchange,
        longest_exchange_seconds=largest.exchange,
        round_seconds=round_seconds,
        peak_bits_per_second=link.full_share * link.bits_per_second,
        late_steps=math.ceil(late / sum(values * times for values, times in sizes.items())),
        enough_bits_per_second=largest.enough_bits_per_second,
        utilisation=training / round_seconds,
        checking_share=checking_share(situation, setting),
        times_fewer_bytes=saved,
    )
