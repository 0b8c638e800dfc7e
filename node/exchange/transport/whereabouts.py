"""Where a run's coordinator is now: members tell those that hold an invite, over libp2p.

An invite names one address, and so does a member's folder. When the coordinator has moved and its old machine
is gone, whoever holds one asks the members that it names besides. They are asked by strangers, for joining
makes a member. So they tell nothing but addresses, and those only to whom knows the pin of the coordinator's
certificate, as each invite does. Their word is a hint: nobody there is believed whose certificate is not the
pinned one.

A protocol of libp2p's of its own: one question, one answer.
"""

import asyncio
import hmac
from collections.abc import Callable, Sequence
from dataclasses import asdict

import structlog

from node.exchange.peers import Limits
from node.exchange.transport.dialling import why_not_dialled
from node.exchange.transport.p2pd import DaemonError, P2pd
from node.exchange.transport.rates.traffic import Traffic
from node.exchange.transport.streams import BROKEN, FrameError, TransferStream
from protocol.errors import UsageError
from protocol.trust.credentials import Credentials
from protocol.trust.identity import Identity, peer_id_of
from protocol.trust.invite import Invite, InvitedBy, check_endpoint
from protocol.trust.pki import pin_of
from protocol.trust.proxy import Proxy
from protocol.trust.rulings import Address
from protocol.v1 import transfer_pb2 as wire
from protocol.wire.payload import WireCounts

WHEREABOUTS = "atoll/1/whereabouts"

MOST_PLACES = 4
"""That an answer is believed to name."""

SECONDS = 20.0
"""For one member: to dial it, and to hear its answer."""

Tell = Callable[[bytes], Sequence[Address]]
"""Where the coordinator of this pin is, or nothing."""

_log = structlog.get_logger(__name__)


def told_by(credentials: Callable[[], Credentials]) -> Tell:
    """What a member tells: where it finds the coordinator, and where that is to move to."""

    def tell(pin: bytes) -> list[Address]:
        ours = credentials()
        server_pem = ours.bundle.server_pem
        if not server_pem or not hmac.compare_digest(pin_of(server_pem), pin):
            return []
        here = Address(
            host=ours.host, control_port=ours.control_port, enrolment_port=ours.enrolment_port
        )
        places = [here] if ours.elsewhere is None else [here, ours.elsewhere]
        return [place for place in places if place.enrolment_port]

    return tell


async def answer(stream: TransferStream, tell: Tell) -> None:
    """Answers one question. Raises FrameError, or what is BROKEN."""
    question = await stream.receive(wire.Whereabouts)
    places = [wire.Place(**asdict(place)) for place in tell(question.pin)]
    await stream.send(wire.WhereaboutsAnswer(places=places))
    await stream.outlast()


async def addresses_told(
    pin: bytes, members: Sequence[InvitedBy], proxy: Proxy | None = None, *, known_host: str
) -> list[Address]:
    """Where these members say that the coordinator of a pin is, which was at `known_host`.

    Raises AtollError where libp2p does not start here.
    """
    if not members:
        return []
    limits = Limits()
    traffic = Traffic(WireCounts(), limits=limits)
    daemon = await P2pd.start(
        Identity.generate(),
        listen_multiaddrs=("/ip4/127.0.0.1/tcp/0",),
        on_streams={},
        limits=limits,
        proxy=proxy,
        here=lambda: (known_host,),
    )
    try:
        asked = [_dialled(daemon, member, pin, traffic) for member in members]
        told = [place for places in await asyncio.gather(*asked) for place in places]
    finally:
        await daemon.stop()
    return list(dict.fromkeys(told))


async def addresses_elsewhere(credentials: Credentials) -> list[Address]:
    """Where the members that a folder names say that its coordinator is, but where it knows of already."""
    pin = pin_of(credentials.server_root_pem)
    told = await addresses_told(
        pin, credentials.members, credentials.proxy, known_host=credentials.host
    )
    return credentials.unknown_among(told)


def ask_members(credentials: Credentials) -> list[Address]:
    """`addresses_elsewhere` for commands without an event loop."""
    return asyncio.run(addresses_elsewhere(credentials))


async def _dialled(daemon: P2pd, member: InvitedBy, pin: bytes, traffic: Traffic) -> list[Address]:
    peer_id = peer_id_of(member.public_key)
    try:
        async with asyncio.timeout(SECONDS):
            await daemon.connect(peer_id, (member.multiaddr,))
    except (DaemonError, TimeoutError) as error:
        _log.debug(
            "a member does not say where the coordinator is", at=member.multiaddr, why=str(error)
        )
        return []
    return await asked_of(daemon, peer_id, pin, traffic)


async def asked_of(daemon: P2pd, peer_id: str, pin: bytes, traffic: Traffic) -> list[Address]:
    """Where a peer that is connected says that the coordinator of a pin is."""
    try:
        async with asyncio.timeout(SECONDS):
            reader, writer = await daemon.open_stream(peer_id, WHEREABOUTS)
            stream = TransferStream(reader, writer, idle_seconds=SECONDS, traffic=traffic)
            try:
                await stream.send(wire.Whereabouts(pin=pin))
                found = await stream.receive(wire.WhereaboutsAnswer)
            finally:
                stream.abort()
    except (DaemonError, FrameError, *BROKEN) as error:
        _log.debug("a member does not say where the coordinator is", peer=peer_id, why=str(error))
        return []
    return [
        Address(
            host=place.host,
            control_port=place.control_port,
            enrolment_port=place.enrolment_port,
        )
        for place in found.places[:MOST_PLACES]
        if not why_not_dialled(place.host, daemon.here())
        and _can_be(place.host, place.enrolment_port, place.control_port or place.enrolment_port)
    ]


def _can_be(host: str, *ports: int) -> bool:
    """What a member names may be no host."""
    try:
        for port in ports:
            check_endpoint(host, port)
    except UsageError:
        return False
    return True


async def invites_elsewhere(invite: Invite, proxy: Proxy | None = None) -> list[Invite]:
    """The same invite at the places that members name, those that can be."""
    places = [
        (address.host, address.enrolment_port)
        for address in await addresses_told(
            invite.pin, invite.members, proxy, known_host=invite.host
        )
    ]
    return [
        invite.at(*place) for place in dict.fromkeys(places) if place != (invite.host, invite.port)
    ]
