"""What the coordinator knows of each member and of its work, as immutable values; and of all together."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

from protocol.wire.findings import Audited, ResultRefused, SpotChecked
from protocol.wire.messages import Reduced
from protocol.wire.payload import WireTotals
from protocol.wire.rounds import CorpusSummary, Digest, NodeId, PeerAddress, RoundSpan, Slice
from protocol.wire.vitals import UNMEASURED, LinkRates


class MemberState(StrEnum):
    """How a member stands with the swarm."""

    JOINING = "joining"  # attached, on its way to the committed state
    READY = "ready"  # holds the committed state
    DIVERGED = "diverged"  # its outer state differs; told to fetch it anew
    LOST = "lost"  # silent for longer than its lease
    LEFT = "left"  # said goodbye
    QUARANTINED = "quarantined"  # waits until the run owner readmits it
    EXPELLED = "expelled"  # the run owner refuses its key


PRESENT = frozenset({MemberState.JOINING, MemberState.READY, MemberState.DIVERGED})


BARRED = frozenset({MemberState.QUARANTINED, MemberState.EXPELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Confirmed work of a member: coordinator.swarm.weighing has the rules.

    What the newest of its rounds earned is kept apart as well, because that round may be taken back.
    """

    by_stretch: tuple[tuple[int, int], ...] = ()  # stretches of rounds, and tokens, oldest first
    newest_round: int = 0
    newest_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Screening:
    """What became of a member's contributions to one committed round, one for each slice."""

    round: int
    num_contributions: int
    num_clipped: int = 0
    num_left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Whether others wait for a member: coordinator.swarm.standing has the rules."""

    num_faults: int = 0  # of which some are forgotten again
    back_at_round: int = 0  # no plan of an earlier round counts on it
    is_on_trial: bool = False  # nobody waits for it until it has been in time
    num_in_time: int = 0  # rounds in a row
    lateness: int = 0  # grows by late rounds, falls by those in time
    late_round: int = 0  # the latest of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """Whether most of the others contradict a member: coordinator.swarm.penalties has the rules."""

    rounds: int = 0  # that speak against it, and are not outweighed by others
    num_times_out: int = 0
    back_at_round: int = 0  # no plan of an earlier round counts on it


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """What audits have shown of a member, as a reducer and as an auditor."""

    num_disputed: int = 0  # audits that convicted nobody and found nobody right: a party to each
    back_at_round: int = 0  # no plan of an earlier round has it reduce, or audit
    num_void: int = 0  # rounds in which its result reached too few, one soon after the other
    void_round: int = 0  # the latest of these
    unmade_round: int = 0  # the latest in which others had to make a slice that it had not
    num_contradicted: int = 0  # findings that others of more weight contradict
    num_unanswered: int = 0  # audits that it was asked for, and was silent on
    audits_from_round: int = 0  # it is drawn for none of an earlier round


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotFinding:
    """What one checker has measured of what a member has learned of its lease."""

    checker_id: NodeId
    num_samples: int
    score: float  # standard normal where it has learned nothing more of it
    expected: float  # what a member that trains was expected to score, when it came
    signed: SpotChecked  # as its checker has signed it


@dataclass(frozen=True, slots=True, kw_only=True)
class PunchTries:
    """How often two members were told to dial each other: coordinator.swarm.reach has the rules."""

    between: tuple[str, ...]  # the addresses that were known of both
    num: int
    latest_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotCheck:
    """A check that goes on."""

    round: int
    contributor_id: NodeId
    checker_id: NodeId
    num_samples: int  # of the lease
    seed: int
    seconds: float  # that the checker may take
    is_planned_for: bool = False  # a plan asks the checker to train less for it
    part: float = 1.0  # of the committed elements that the contribution is in


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one auditor has found: the result's own digest, another one, or nothing for want of inputs."""

    node_id: NodeId
    found: bytes
    why: str = ""
    signed: Audited | None = None  # as its auditor has signed it


class Verdict(StrEnum):
    """What came of an audit: coordinator.swarm.audit has the rules."""

    AGREED = "agreed"
    UNANSWERED = "unanswered"  # no auditor answered in time: it counts as not audited
    DISPUTED = "disputed"  # neither side has the weight to decide: the result stays
    UNPROVEN = "unproven"  # nobody can make the result again, or most cannot: it is undone
    CONVICTED = "convicted"  # most of the weight makes another one of it: it is undone


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The audit of one slice of a committed round."""

    round: int
    slice: Slice  # with who has reduced it
    attempt: int  # takeovers of it
    reduced: Reduced  # the report as it was made
    participants: tuple[NodeId, ...]  # of the round
    process_id: int  # of the reducer: another one has not kept what it made the result of
    seconds: float  # that each stage may take
    auditor_ids: tuple[NodeId, ...]  # who was asked, in order
    until: float
    findings: tuple[Finding, ...] = ()
    accused: tuple[NodeId, ...] = ()  # whose contributions do not decode, as the reducer has signed
    leads_elsewhere: bool = False  # as its contributors find
    is_contested: bool = False  # others were asked than the first auditor
    verdict: Verdict | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptError:
    """What the encoding of a committed result has left to its reducer, by its digest."""

    reducer_id: NodeId
    fragment: int
    start: int
    num_elements: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A participant has signed that a result does not decode."""

    node_id: NodeId
    refused: ResultRefused  # as it has signed it, with the result's header


@dataclass(frozen=True, slots=True, kw_only=True)
class Conviction:
    """A member's result is proven false, or what it signed: it is to be quarantined."""

    node_id: NodeId
    node_name: str
    reason: str
    evidence: tuple[str, ...] = ()  # as in its ruling: protocol.trust.evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """How a node is by its latest heartbeat, as far as plans go by it, but for the state that it holds."""

    cannot_train: bool = False  # its owner's loop does not run: no plan counts on it
    cannot_evaluate: bool = False  # nobody asks it for a held-out loss
    evaluates_by: str = ""  # of a loop: a digest of its function for that
    unreachable: tuple[NodeId, ...] = ()  # members that it has no connection to
    reach_back: tuple[RoundSpan, ...] = ()  # rounds whose states it can go back to by itself
    outside_by_ipv6: str = ""  # the multiaddress that it says it has
    carry_bytes_per_second: float = 0.0  # for others; of a member as plans count on it
    through: Mapping[NodeId, NodeId] = field(default_factory=dict)  # by member: who carries to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Member(Condition):
    """One enrolled node that has attached at least once."""

    node_id: NodeId
    node_name: str  # no other member has it
    address: PeerAddress
    device: str
    num_ranks: int
    version: str
    corpus: CorpusSummary
    state: MemberState
    session_id: int
    lease_until: float
    outer_round: int
    outer_digest: Digest
    outer_incarnation: int = 0
    process_id: int = 0  # told by the node, and another one after each restart of it
    committed_tokens: int = 0
    inner_steps_per_second: float | None = None  # smoothed; None before the first measurement
    is_draining: bool = False  # leaves after the round in flight
    has_told_history: bool = False  # in this session: all commits that it keeps
    rates: LinkRates = UNMEASURED  # what its link carries, as plans count on it
    wire_told: WireTotals = field(default_factory=dict)  # by its process, at the latest round
    gone_at_round: int = 0  # the committed round when it was lost or left, or 0 while it is present
    asked_name: str = ""  # what it calls itself
    is_heard: bool = True  # since its stream broke, or the coordinator started or could hear nobody
    invite_id: str = ""  # that it joined with
    is_own: bool = False  # the run owner's own, by that invite: coordinator.swarm.weighing
    is_helper: bool = False  # by its certificate: it reduces for those who cannot be dialled
    came_at: float = 0.0  # when its process attached first
    work: Work = field(default_factory=Work)
    standing: Standing = field(default_factory=Standing)
    screenings: tuple[Screening, ...] = ()  # of its rounds among the latest, oldest first
    against: Against = field(default_factory=Against)
    audits: AuditRecord = field(default_factory=AuditRecord)
    outside: tuple[str, ...] = ()  # as in its latest heartbeat
    punches: Mapping[NodeId, PunchTries] = field(default_factory=dict)  # with members of higher ids
    spots: tuple[SpotFinding, ...] = ()  # of whether it trains what it is leased, oldest first


_LEASE_UNTIL = attrgetter("lease_until")


class Members(dict[NodeId, Member]):
    """Members by their ids, never changed in place; knows what most steps ask about all of them.

    What a step does not change it need not look at: of a thousand members, one sent a heartbeat.
    """

    __slots__ = ("_no_lease_ends_before", "ids", "present_ids")

    ids: tuple[NodeId, ...]  # in order
    present_ids: tuple[NodeId, ...]  # those with a live session, in order

    def __init__(self, members: Mapping[NodeId, Member]) -> None:
        super().__init__(members)
        self.ids = tuple(sorted(self))
        self.present_ids = tuple(n for n in self.ids if self[n].state in PRESENT)
        self._no_lease_ends_before = -math.inf

    def with_member(self, member: Member) -> "Members":
        """The same with one more, or with another value of one."""
        node_id = member.node_id
        before = self.get(node_id)
        is_present = member.state in PRESENT
        after = Members.__new__(Members, ())
        after.update(self)
        after[node_id] = member
        after.ids = self.ids if before is not None else _with(self.ids, node_id)
        after.present_ids = self.present_ids
        if is_present and (before is None or before.state not in PRESENT):
            after.present_ids = _with(self.present_ids, node_id)
        elif not is_present and before is not None and before.state in PRESENT:
            place = bisect_left(self.present_ids, node_id)
            after.present_ids = self.present_ids[:place] + self.present_ids[place + 1 :]
        after._no_lease_ends_before = self._no_lease_ends_before
        if is_present:
            after._no_lease_ends_before = min(after._no_lease_ends_before, member.lease_until)
        return after

    def is_lease_over(self, now: float) -> bool:
        """Whether a present member was silent for as long as its lease."""
        if now < self._no_lease_ends_before:
            return False
        self._no_lease_ends_before = self.first_lease_end()  # known better now, and no other fact
        return self._no_lease_ends_before <= now

    def first_lease_end(self) -> float:
        """When the first lease of a present member ends; infinity when nobody is present."""
        present = map(self.__getitem__, self.present_ids)
        return min(map(_LEASE_UNTIL, present), default=math.inf)


def _with(node_ids: tuple[NodeId, ...], node_id: NodeId) -> tuple[NodeId, ...]:
    """One more, in its place."""
    place = bisect_left(node_ids, node_id)
    return (*node_ids[:place], node_id, *node_ids[place:])
