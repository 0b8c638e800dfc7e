"""Streams between two members that a third one carries: what both ends do, and what the third does.

Some pairs reach each other neither directly nor through holes, and the coordinator names others for them that
both reach (coordinator.swarm.reach). The first of the two opens a stream to one of these, which opens one to
the second and passes on what comes, both ways. Between the two it is TLS, and inside goes what goes
elsewhere. A node carries for pairs of the latest two plans alone, by what its owner lets it, and for members
only.

It is a protocol of libp2p's of its own, beside that of transfers, with places of its own.
"""

import asyncio
import os
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import structlog
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from node.exchange.peers import Limits, PeerUnreachableError, TransferRefusedError
from node.exchange.transport.rates.traffic import TokenBucket, Traffic
from node.exchange.transport.rates.uplink import FIRST_BYTES_PER_SECOND
from node.exchange.transport.receiver import StreamAdmission
from node.exchange.transport.streams import BROKEN, FrameError, TransferStream, expect
from node.heavy import cancelled
from protocol.errors import CertificateRefusedError
from protocol.trust.identity import Identity
from protocol.trust.pki import VALID_FROM, VALID_UNTIL
from protocol.v1 import transfer_pb2 as wire
from protocol.wire.rounds import NodeId, RosterEntry, Way

MOST_CHUNK_BYTES = 64 * 1024
"""Passed on at a time: less is written sooner, more takes less of the processor."""

LEAST_BYTES_PER_SECOND = 1e4
"""Of what is carried: with less the ends would give the stream up."""

OpenDirect = Callable[[RosterEntry], Awaitable[TransferStream]]
"""A stream of ours to a member without a third one. Raises what is BROKEN."""

_log = structlog.get_logger(__name__)


class Carrying:
    """What a transport does for pairs that do not reach each other: its own ones, and others'."""

    def __init__(
        self,
        identity: Identity,
        *,
        share: float,
        limits: Limits,
        traffic: Traffic,
        open_direct: OpenDirect,
    ) -> None:
        """Others may have `share` of what is uploaded; with 0 nothing is carried for them."""
        self._node_id = identity.node_id
        self._tls = PeerTls.of(identity)
        self._share = share
        self._limits = limits
        self._traffic = traffic
        self._open_direct = open_direct
        self._members: Mapping[NodeId, RosterEntry] = {}
        self._ways: deque[tuple[Way, ...]] = deque([()], maxlen=2)  # of the latest two plans
        self._working: dict[NodeId, NodeId] = {}
        self._failed: set[tuple[NodeId, NodeId]] = set()  # members, and who did not carry to them
        self._turn = asyncio.Lock()  # first come, first served
        self._bucket: TokenBucket | None = None  # until something is carried
        self._carried = _places(limits, limits.max_streams)  # by pair
        # By who carries, until it is TLS.
        self._taken = _places(limits, limits.max_streams_per_peer)

    @property
    def through(self) -> Mapping[NodeId, NodeId]:
        """Members with whom a carried stream came to be lately, and who carries."""
        return self._working

    @property
    def bytes_per_second(self) -> float:
        """What may be carried for others, of what our owner allows or our link was measured to carry."""
        allowed = self._traffic.allowed_bytes_per_second
        up = allowed or self._traffic.rates.up_bytes_per_second or FIRST_BYTES_PER_SECOND
        return max(LEAST_BYTES_PER_SECOND, self._share * up) if self._share else 0.0

    def set_roster(self, members: Mapping[NodeId, RosterEntry]) -> None:
        """Says who is a member now, beside us."""
        self._members = members
        self._forget_those_without()

    def set_ways(self, ways: tuple[Way, ...]) -> None:
        """Says who carries for whom, from a plan on."""
        if ways != self._ways[-1]:
            self._ways.append(ways)
            self._failed.clear()
            self._forget_those_without()

    def _forget_those_without(self) -> None:
        for peer, carrier in tuple(self._working.items()):
            if carrier not in self.carriers_to(peer):
                del self._working[peer]

    def carriers_to(self, peer: NodeId) -> tuple[NodeId, ...]:
        """Who carries between us and a member, in the order of asking; mostly nobody."""
        through = [n for n in self._named(self._node_id, peer) if n in self._members]
        return tuple(sorted(through, key=lambda carrier: (peer, carrier) in self._failed))

    def _named(self, one: NodeId, other: NodeId) -> tuple[NodeId, ...]:
        pair = (min(one, other), max(one, other))
        ways = (way for plan in reversed(self._ways) for way in plan)
        return next((way.through for way in ways if (way.one, way.other) == pair), ())

    # The first of the two.

    async def open(self, peer: RosterEntry) -> TransferStream:
        """A stream to a member that others carry to.

        Raises what is BROKEN, PeerUnreachableError, FrameError or TransferRefusedError.
        """
        failed: Exception = PeerUnreachableError("nobody carries to it")
        for carrier in self.carriers_to(peer.node_id):
            try:
                return await self._open_through(self._members[carrier], peer)
            except (*BROKEN, FrameError, TransferRefusedError) as error:
                failed = error
                self._failed.add((peer.node_id, carrier))
                if self._working.get(peer.node_id) == carrier:
                    del self._working[peer.node_id]
        raise failed

    async def _open_through(self, carrier: RosterEntry, peer: RosterEntry) -> TransferStream:
        stream = await self._open_direct(carrier)
        try:
            async with asyncio.timeout(self._limits.knock_seconds):  # then the next one is asked
                ask = wire.Carry(to_id=peer.node_id, certificate=self._tls.certificate)
                await stream.send(ask)
                answer = await expect(stream, wire.TRANSFER_STATUS_GO_ON)
                await stream.secure(self._context(peer, answer.certificate, is_server=False))
        except BaseException:
            stream.abort()
            stream.count_ended()
            raise
        self._note(peer, carrier)
        return stream

    def _context(self, peer: RosterEntry, certificate: bytes, *, is_server: bool) -> ssl.SSLContext:
        try:
            return self._tls.context(certificate, peer.address.public_key, is_server=is_server)
        except CertificateRefusedError as error:
            _log.warning("who carries a stream shows a false certificate", of=peer.node_id)
            raise TransferRefusedError(str(error)) from error

    def _note(self, peer: RosterEntry, carrier: RosterEntry) -> None:
        if self._working.get(peer.node_id) != carrier.node_id:
            self._working[peer.node_id] = carrier.node_id
            _log.info("reached through another member", who=peer.node_name, by=carrier.node_name)

    # The second, and the one between.

    async def answer(self, stream: TransferStream, sender: NodeId) -> NodeId | None:
        """Answers a member that opens a stream to be carried.

        Where we carry it returns None once it has ended. Where it was carried to us, returns from whom: what
        comes now is from that member. Raises TransferRefusedError, FrameError, or what is BROKEN.
        """
        request = await stream.receive(wire.Carry)
        if request.from_id:
            return await self._take(stream, sender, request)
        await self._carry(stream, sender, request)
        return None

    async def _take(self, stream: TransferStream, sender: NodeId, request: wire.Carry) -> NodeId:
        origin, carrier = self._members.get(NodeId(request.from_id)), self._members[sender]
        if origin is None or sender not in self.carriers_to(origin.node_id):
            raise TransferRefusedError("no plan here names you for this pair")
        with self._taken.let_in(sender):
            context = self._context(origin, request.certificate, is_server=True)
            go_on = wire.TransferResponse(
                status=wire.TRANSFER_STATUS_GO_ON, certificate=self._tls.certificate
            )
            await stream.send(go_on)
            await stream.secure(context)
        self._note(origin, carrier)
        return origin.node_id

    async def _carry(self, stream: TransferStream, sender: NodeId, request: wire.Carry) -> None:
        to_id = NodeId(request.to_id)
        if not self._share:
            raise TransferRefusedError("this node carries nothing: its owner wants it so")
        if self._node_id not in self._named(sender, to_id) or to_id not in self._members:
            raise TransferRefusedError("no plan here names this node for this pair")
        with self._carried.let_in(" ".join(sorted((sender, to_id)))):
            try:
                onward = await self._open_direct(self._members[to_id])
            except BROKEN as error:
                raise TransferRefusedError(
                    f"this node does not reach it either: {error}"
                ) from error
            stream.kind = onward.kind = "carried"
            try:
                ask = wire.Carry(from_id=sender, certificate=request.certificate)
                await onward.send(ask)
                await self._pass_both_ways(stream, onward)
            finally:
                onward.abort()
                onward.count_ended()

    async def _pass_both_ways(self, one: TransferStream, other: TransferStream) -> None:
        """Until either of them ends. Who ends it first has all that it waited for."""
        ways = [
            asyncio.ensure_future(
                source.pass_on(
                    sink,
                    leave=self._leave,
                    chunk_bytes=self._chunk_bytes,
                    idle_seconds=self._limits.at_rest_seconds,
                )
            )
            for source, sink in ((one, other), (other, one))
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled(ways)

    def _chunk_bytes(self) -> int:
        depth_bytes = self._limits.burst_seconds * self.bytes_per_second
        return max(1, min(MOST_CHUNK_BYTES, self._traffic.chunk_bytes, int(depth_bytes)))

    async def _leave(self, num_bytes: int) -> None:
        """Waits until so much may be passed on, of one chunk."""
        async with self._turn:
            now, rate = self._traffic.clock(), self.bytes_per_second
            depth_bytes = max(self._limits.burst_seconds * rate, num_bytes)
            if self._bucket is None:
                self._bucket = TokenBucket(bytes_per_second=rate, depth_bytes=depth_bytes, now=now)
            self._bucket.change(bytes_per_second=rate, depth_bytes=depth_bytes, now=now)
            await asyncio.sleep(self._bucket.seconds_until(num_bytes, now))
            self._bucket.take(num_bytes, self._traffic.clock())
        await self._traffic.leave(num_bytes)


def _places(limits: Limits, most: int) -> StreamAdmission:
    """For so many streams, and fewer where few files may be open: each that we carry takes two."""
    most = min(most, max(1, limits.max_waiting_streams // 4))
    return StreamAdmission(replace(limits, max_streams=most, max_waiting_streams=0))


# TLS 1.3 between two members that know each other's key
#
# Each makes a certificate of the Ed25519 key that the roster has of it, and signs it with that key. Either is
# given the other's certificate by whom it does not trust, looks whether the key in it is the right one, and
# then takes that certificate alone. So whoever is between reads nothing, changes nothing and speaks for
# nobody.

MOST_CERTIFICATE_BYTES = 1024
"""Ours have about 300."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTls:
    """One member's certificate, and what it makes of the others'."""

    certificate: bytes  # DER
    _chain_pem: bytes = field(repr=False)  # with the private key

    @classmethod
    def of(cls, identity: Identity) -> Self:
        """Holds for ever: a certificate is believed for the key in it, as long as the roster has that."""
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, identity.node_id)])
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(identity.private_key.public_key())
            .serial_number(1)
            .not_valid_before(VALID_FROM)
            .not_valid_after(VALID_UNTIL)
            .sign(identity.private_key, None)
        )
        key_pem = identity.private_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return cls(
            certificate=made.public_bytes(serialization.Encoding.DER),
            _chain_pem=made.public_bytes(serialization.Encoding.PEM) + key_pem,
        )

    def context(
        self, peer_certificate: bytes, peer_key: bytes, *, is_server: bool
    ) -> ssl.SSLContext:
        """Our side of TLS with the member of this key (Ed25519, 32 bytes) and nobody else.

        Raises CertificateRefusedError where the certificate is of another key, or none.
        """
        if _key_in(peer_certificate) != peer_key:
            raise CertificateRefusedError(
                "the certificate that came is not of the key that the roster has of this member"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # no name stands for a member, only its key
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=peer_certificate)
        file = os.memfd_create("key")  # Python takes keys from files only; this one is on no disk
        with os.fdopen(file, "wb") as writer:
            writer.write(self._chain_pem)
            writer.flush()
            context.load_cert_chain(f"/proc/self/fd/{file}")
        return context


def _key_in(certificate: bytes) -> bytes:
    """The Ed25519 key of a certificate, DER; empty where it has none."""
    if len(certificate) > MOST_CERTIFICATE_BYTES:
        return b""
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm):
        return b""
    return key.public_bytes_raw() if isinstance(key, Ed25519PublicKey) else b""
