"""What only the run owner may do: invites, members, steering, and taking samples out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from coordinator.driver import Driver
from coordinator.invite_rows import Invite as InviteRow
from coordinator.invite_rows import InviteRecord
from coordinator.services import checks
from coordinator.services.answering import Gate, for_all, service
from coordinator.services.ruling import Rulings, changes_from_wire
from coordinator.swarm.events import SamplesSkipped
from coordinator.swarm.ledger import Places
from coordinator.swarm.membership import members_by
from coordinator.swarm.state import KEPT_ROUNDS, present_members
from coordinator.swarm.weighing import Kind, kind_of
from protocol.errors import BadDataError, NoInputError, UsageError
from protocol.run.amendments import INNER_RATES
from protocol.trust.invite import MOST_MEMBERS, SECRET_BYTES, Invite, hash_of_secret, named_members
from protocol.trust.pki import JOINING, Role
from protocol.trust.rulings import (
    MAX_NODES,
    MOST_RULINGS,
    OWN,
    Address,
    Ruling,
    RulingKind,
    moved_to,
    num_in_a_message,
    rulings_to_wire,
)
from protocol.v1 import operator_pb2 as pb
from protocol.v1 import ruling_pb2
from protocol.v1.operator_pb2_grpc import OperatorServiceServicer
from protocol.wire.rounds import NodeId

MAX_USES = 100_000
MOST_PLACES = 1 << 63
MAX_VALID_SECONDS = 366 * 86400.0
MOST_HOST_LENGTH = 253
"""Of a name in DNS."""
INVITE_ID_BYTES = 4
"""Of randomness in an invite's public name: short enough to type into 'atoll invite revoke'."""


_OF_NODES = {
    pb.NODE_VERDICT_APPROVE: RulingKind.APPROVED,
    pb.NODE_VERDICT_EXPEL: RulingKind.EXPELLED,
    pb.NODE_VERDICT_QUARANTINE: RulingKind.QUARANTINED,
    pb.NODE_VERDICT_READMIT: RulingKind.READMITTED,
}
_OF_RUNS = {
    pb.RUN_VERDICT_PAUSE: RulingKind.PAUSED,
    pb.RUN_VERDICT_RESUME: RulingKind.RESUMED,
    pb.RUN_VERDICT_STOP: RulingKind.STOPPED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """Where others find the coordinator, and the pin of the certificate that they are to expect there."""

    host: str
    control_port: int
    enrolment_port: int
    pin: bytes


class OperatorDesk:
    """Answers the run owner. `wall_clock` gives UTC seconds, `random_bytes` secrets."""

    def __init__(
        self,
        driver: Driver,
        rulings: Rulings,
        *,
        entrance: Entrance,
        batch: int,
        wall_clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        """`batch` is samples in an inner step."""
        self._driver = driver
        self._store = driver.store
        self._rulings = rulings
        self._entrance = entrance
        self._batch = batch
        self._wall_clock = wall_clock
        self._random_bytes = random_bytes

    async def create_invite(self, request: pb.CreateInviteRequest) -> pb.CreateInviteResponse:
        """Makes an invite; its secret is in the answer and nowhere else."""
        if request.max_uses < 1:
            raise BadDataError("an invite that nobody may use", next_step="give --uses 1 or more")
        max_uses = checks.count(request.max_uses, of="the number of uses", most=MAX_USES)
        valid_seconds = checks.finite(request.valid_seconds, of="the time until it expires")
        if not 0 < valid_seconds <= MAX_VALID_SECONDS:
            raise BadDataError(
                f"an invite cannot be valid for {valid_seconds:g} s",
                next_step=f"give --expires more than 0 and at most {MAX_VALID_SECONDS / 86400:g}d",
            )
        helpers = [m.address for m in present_members(self._driver.state) if m.is_helper]
        invite = Invite(
            host=request.host or self._entrance.host,
            port=self._entrance.enrolment_port,
            pin=self._entrance.pin,
            invite_id=self._random_bytes(INVITE_ID_BYTES).hex(),
            secret=self._random_bytes(SECRET_BYTES),
            members=tuple(named_members(helpers)[:MOST_MEMBERS]),
        )
        label = checks.words(
            request.label, of="the invite's label", max_length=checks.MAX_NAME_LENGTH
        )
        role = _role_of(request.role)
        most = checks.count(request.max_nodes, of="the number of nodes at once", most=MAX_USES)
        if most and role is Role.VIEWER:
            raise UsageError(
                "viewers take no part, so their number at once has no bound",
                next_step="leave --max-nodes out, or give --uses",
            )
        changes = (*(((MAX_NODES, most),) if most else ()), *(OWN if request.own else ()))
        kept = InviteRow(
            invite_id=invite.invite_id,
            secret_hash=hash_of_secret(invite.secret),
            max_uses=max_uses,
            expires_utc_seconds=self._wall_clock() + valid_seconds,
            host=invite.host,
            label=label,
            needs_approval=request.needs_approval,
            role=role,
        )
        await self._driver.write(lambda: self._store.invites.add(kept))
        await self._rulings.make(
            RulingKind.INVITED, invite_id=invite.invite_id, reason=label, changes=changes
        )
        return pb.CreateInviteResponse(invite=invite.encode(), invite_id=invite.invite_id)

    def list_invites(self, request: pb.ListInvitesRequest) -> pb.ListInvitesResponse:
        """The invites, newest first, without their secrets."""
        now, own = self._wall_clock(), self._rulings.own_invites
        state = self._driver.state
        return pb.ListInvitesResponse(
            invites=[
                pb.InviteStatus(
                    invite_id=invite.invite_id,
                    max_uses=invite.max_uses,
                    node_ids=invite.node_ids,
                    remaining_seconds=invite.expires_utc_seconds - now,
                    revoked=invite.is_revoked,
                    label=invite.label,
                    needs_approval=invite.needs_approval,
                    role=str(invite.role),
                    node_names=invite.node_names,
                    own=invite.invite_id in own,
                    max_nodes=state.invite_limits.get(invite.invite_id, 0),
                    num_present=len(members_by(state, invite.invite_id)),
                )
                for invite in self._store.invites.records()
            ]
        )

    async def revoke_invite(self, request: pb.RevokeInviteRequest) -> pb.RevokeInviteResponse:
        """Makes an invite useless; raises NoInputError when there is none of that name."""
        await self._revoke(self._invite(request.invite_id).invite_id)
        return pb.RevokeInviteResponse()

    async def _revoke(self, invite_id: str) -> None:
        await self._driver.write(lambda: self._store.invites.revoke(invite_id))
        await self._rulings.make(RulingKind.REVOKED, invite_id=invite_id)

    async def own_invite(self, request: pb.OwnInviteRequest) -> pb.OwnInviteResponse:
        """Lifts the cap of who joins with it; raises NoInputError, and UsageError where it is lifted."""
        invite = self._invite(request.invite_id)
        if invite.invite_id in self._rulings.own_invites:
            raise UsageError(
                f"invite {invite.invite_id} is for your own machines already",
                next_step="'atoll invite list' shows them",
            )
        await self._rulings.make(
            RulingKind.INVITED, invite_id=invite.invite_id, reason=invite.label, changes=OWN
        )
        return pb.OwnInviteResponse()

    async def limit_invite(self, request: pb.LimitInviteRequest) -> pb.LimitInviteResponse:
        """Bounds how many of its members take part at once; raises NoInputError, and UsageError."""
        invite = self._invite(request.invite_id)
        most = checks.count(request.max_nodes, of="the number of nodes at once", most=MAX_USES)
        if invite.role is Role.VIEWER:
            raise UsageError(
                f"invite {invite.invite_id} is for viewers, who take no part",
                next_step="'atoll invite list' shows the others",
            )
        if most == self._driver.state.invite_limits.get(invite.invite_id, 0):
            raise UsageError(
                f"invite {invite.invite_id} has that limit already",
                next_step="'atoll invite list' shows them",
            )
        await self._rulings.make(
            RulingKind.INVITED,
            invite_id=invite.invite_id,
            reason=invite.label,
            changes=((MAX_NODES, most),),
        )
        here = members_by(self._driver.state, invite.invite_id)
        return pb.LimitInviteResponse(num_present=len(here))

    def _invite(self, asked: str) -> InviteRecord:
        """Raises NoInputError when there is none of that name."""
        invite_id = checks.name(asked, of="the invite's name")
        for invite in self._store.invites.records():
            if invite.invite_id == invite_id:
                return invite
        raise NoInputError(
            f"there is no invite {invite_id!r}", next_step="'atoll invite list' shows them"
        )

    async def rule_node(self, request: pb.RuleNodeRequest) -> pb.RuleNodeResponse:
        """Decides how a node stands. Raises what Rulings.find and the core refuse with."""
        if request.invite_id:
            return await self._expel_all(request)
        node_id, node_name = self._rulings.find(request.node)
        kind = _OF_NODES.get(request.verdict)
        if kind is None:
            raise BadDataError("it is not said what becomes of the node")
        member = self._store.invites.member(node_id)
        if kind is RulingKind.APPROVED and (member is None or not member.needs_approval):
            raise UsageError(
                f"{node_name} needs no approval",
                next_step="'atoll nodes' shows how each node stands",
            )
        await self._rulings.make(
            kind,
            node_id=node_id,
            node_name=node_name,
            reason=checks.words(request.reason, of="the reason"),
        )
        still_open = self._open_invites_of(node_id) if kind is RulingKind.EXPELLED else []
        return pb.RuleNodeResponse(node_id=node_id, node_name=node_name, open_invites=still_open)

    async def _expel_all(self, request: pb.RuleNodeRequest) -> pb.RuleNodeResponse:
        """Expels all that joined by an invite, in a ruling each. It is revoked first, so nobody slips in."""
        if request.node or request.verdict != pb.NODE_VERDICT_EXPEL:
            raise BadDataError(
                "by their invite nodes can only be expelled",
                next_step="'atoll nodes expel --invite ID'",
            )
        invite = self._invite(request.invite_id)
        reason = checks.words(request.reason, of="the reason")
        if not invite.is_revoked:
            await self._revoke(invite.invite_id)
        names = []
        for node_id in self._invite(invite.invite_id).node_ids:
            standing = self._rulings.standing_of(node_id)
            if standing is not None and standing.kind is RulingKind.EXPELLED:
                continue
            _, node_name = self._rulings.find(node_id)
            await self._rulings.make(
                RulingKind.EXPELLED, node_id=node_id, node_name=node_name, reason=reason
            )
            names.append(node_name)
        return pb.RuleNodeResponse(expelled_names=names)

    def _open_invites_of(self, node_id: NodeId) -> list[str]:
        """Invites that it joined with, and with which its owner can join by a new key."""
        now = self._wall_clock()
        return [
            invite.invite_id
            for invite in self._store.invites.records()
            if node_id in invite.node_ids
            and not invite.is_revoked
            and invite.expires_utc_seconds > now
            and len(invite.node_ids) < invite.max_uses
        ]

    async def steer_run(self, request: pb.SteerRunRequest) -> pb.SteerRunResponse:
        """Pauses, resumes or stops the run. Raises UsageError where that changes nothing."""
        if request.verdict == pb.RUN_VERDICT_MOVE:
            return await self._move(request)
        kind = _OF_RUNS.get(request.verdict)
        if kind is None:
            raise BadDataError("it is not said what becomes of the run")
        reason = checks.words(request.reason, of="the reason")
        ruling = await self._rulings.make(kind, reason=reason)
        return pb.SteerRunResponse(ruling=self._wire(ruling))

    async def _move(self, request: pb.SteerRunRequest) -> pb.SteerRunResponse:
        """Tells where the coordinator will be. Raises UsageError for no address, or that told last."""
        host = checks.words(request.host, of="the host", max_length=MOST_HOST_LENGTH)
        here = self._entrance
        ports = (
            request.control_port or here.control_port,
            request.enrolment_port or here.enrolment_port,
        )
        if not host or not all(0 < port < 1 << 16 for port in ports):
            raise UsageError(
                f"{host!r} with ports {ports[0]} and {ports[1]} is no address",
                next_step="'atoll run move train2.example.org', for example",
            )
        to = Address(host=host, control_port=ports[0], enrolment_port=ports[1])
        told = [address for one in self._rulings.all if (address := moved_to(one)) is not None]
        if told and told[-1] == to:
            raise UsageError(
                f"nodes are told already that the coordinator moves to {host}, port {ports[0]}",
                next_step="stop it, and start it there",
            )
        ruling = await self._rulings.make(
            RulingKind.MOVED,
            changes=to.changes,
            reason=checks.words(request.reason, of="the reason"),
        )
        return pb.SteerRunResponse(ruling=self._wire(ruling))

    async def amend_run(self, request: pb.AmendRunRequest) -> pb.AmendRunResponse:
        """Changes rules from the next round on. Raises UsageError or ConfigError for what cannot be."""
        ruling = await self._rulings.amend(
            changes_from_wire([(change.key, change.value_json) for change in request.changes]),
            more_rounds=checks.count(request.more_rounds, of="the number of rounds", most=MAX_USES),
            reason=checks.words(request.reason, of="the reason"),
        )
        own_loops = [
            member.node_name
            for member in present_members(self._driver.state)
            if kind_of(member) is Kind.LOOP and not INNER_RATES.isdisjoint(dict(ruling.changes))
        ]
        return pb.AmendRunResponse(ruling=self._wire(ruling), own_loops=sorted(own_loops))

    async def roll_back_run(self, request: pb.RollBackRunRequest) -> pb.RollBackRunResponse:
        """Has the run go back to the state after a round. Raises UsageError where it cannot."""
        round = checks.count(request.round, of="the round")
        reason = checks.words(request.reason, of="the reason")
        ruling = await self._rulings.go_back(round, reason=reason, believed=request.believed)
        return pb.RollBackRunResponse(ruling=self._wire(ruling))

    def _wire(self, ruling: Ruling) -> ruling_pb2.Ruling:
        return rulings_to_wire([self._rulings.signed(ruling)]).rulings[0]

    def list_rulings(self, request: pb.ListRulingsRequest) -> pb.ListRulingsResponse:
        """The audit log, as it lies on the disk."""
        kept = self._store.rulings(request.after, limit=MOST_RULINGS)
        page = kept[: num_in_a_message(one.ruling for one in kept)]
        return pb.ListRulingsResponse(
            rulings=rulings_to_wire(page).rulings, run_digest=self._rulings.run_digest
        )

    async def skip_samples(self, request: pb.SkipSamplesRequest) -> pb.SkipSamplesResponse:
        """Takes samples out, in whole inner steps.

        Raises BadDataError for a range that is none, NoInputError for a round whose samples are not known.
        """
        pieces = []
        for asked in request.ranges:
            if not 0 <= asked.first < asked.end <= MOST_PLACES:
                raise BadDataError(
                    f"{asked.first}-{asked.end} is no range of samples",
                    next_step="write the first place and the one after the last, as 36000-36800",
                )
            pieces.append(self._whole(asked.first, asked.end))
        if request.round:
            commits = self._store.commits_after(request.round - 1, 1)
            if not commits or commits[0].round != request.round:
                raise NoInputError(
                    f"which samples round {request.round} trained is not known here",
                    next_step="'atoll rounds' lists committed rounds, of which the newest "
                    f"{KEPT_ROUNDS} are known; or name the samples themselves",
                )
            pieces += [
                self._whole(a.first_sample, a.first_sample + a.num_samples)
                for a in commits[0].assignments
                if a.trains
            ]
        if not pieces:
            raise BadDataError(
                "no samples are named", next_step="name a range, as 36000-36800, or --round N"
            )
        await self._driver.apply(SamplesSkipped(pieces=tuple(pieces)))
        return pb.SkipSamplesResponse(
            ranges=[pb.SampleRange(first=piece.first, end=piece.end) for piece in pieces]
        )

    def _whole(self, first: int, end: int) -> Places:
        batch = self._batch
        return Places(first=first // batch * batch, end=-(-end // batch) * batch)


def _role_of(told: str) -> Role:
    """What an invite is for: nodes unless told; raises BadDataError for what nobody can be by one."""
    told = told or Role.NODE
    if told not in JOINING:
        raise BadDataError(
            f"nobody joins as {told!r}", next_step="give --role node, helper or viewer"
        )
    return Role(told)


def operator_service(desk: OperatorDesk, gate: Gate) -> OperatorServiceServicer:
    """The desk on gRPC; only the run owner may call."""
    calls = service(
        gate.operator,
        CreateInvite=for_all(desk.create_invite),
        ListInvites=for_all(desk.list_invites),
        RevokeInvite=for_all(desk.revoke_invite),
        OwnInvite=for_all(desk.own_invite),
        LimitInvite=for_all(desk.limit_invite),
        SkipSamples=for_all(desk.skip_samples),
        RuleNode=for_all(desk.rule_node),
        SteerRun=for_all(desk.steer_run),
        AmendRun=for_all(desk.amend_run),
        RollBackRun=for_all(desk.roll_back_run),
        ListRulings=for_all(desk.list_rulings),
    )
    return cast("OperatorServiceServicer", calls)
