"""Where a run's coordinator is now: members tell those that hold an invite, over libp2p.

An invite names one address. When the coordinator has moved and its old machine is gone, whoever holds one
asks the members that it names besides. They are asked by strangers, for joining makes a member. So they tell
nothing but addresses, and those only to whom knows the pin of the coordinator's certificate, as each invite
does. Their word is a hint: whoever joins believes nobody there whose certificate is not the pinned one.

A protocol of libp2p's of its own: one question, one answer.
"""

import asyncio
import hmac
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from node.exchange.limits import Limits
from node.exchange.transport.p2pd import DaemonError, P2pd
from node.exchange.transport.rates.traffic import Traffic
from node.exchange.transport.streams import BROKEN, FrameError, TransferStream
from protocol.errors import AtollError
from protocol.trust.credentials import Credentials
from protocol.trust.identity import Identity, peer_id_of
from protocol.trust.invite import Invite, InvitedBy
from protocol.trust.pki import pin_of
from protocol.v1 import transfer_pb2 as wire
from protocol.wire.wire_count import WireCounts

WHEREABOUTS = "atoll/1/whereabouts"

MOST_PLACES = 4
"""That an answer is believed to name."""

SECONDS = 20.0
"""For one member: to dial it, and to hear its answer."""

Place = tuple[str, int]
"""Host and enrolment port."""

Tell = Callable[[bytes], Sequence[Place]]
"""Where the coordinator of this pin is, or nothing."""

_log = structlog.get_logger(__name__)


def told_by(credentials: Callable[[], Credentials]) -> Tell:
    """What a member tells: where it finds the coordinator, and where that is to move to."""

    def tell(pin: bytes) -> list[Place]:
        ours = credentials()
        server_pem = ours.bundle.server_pem
        if not server_pem or not hmac.compare_digest(pin_of(server_pem), pin):
            return []
        places = [(ours.host, ours.enrolment_port)]
        if ours.elsewhere is not None:
            places.append((ours.elsewhere.host, ours.elsewhere.enrolment_port))
        return [place for place in places if place[1]]

    return tell


async def answer(stream: TransferStream, tell: Tell) -> None:
    """Answers one question. Raises FrameError, or what is BROKEN."""
    question = await stream.receive(wire.Whereabouts)
    places = [wire.Place(host=host, enrolment_port=port) for host, port in tell(question.pin)]
    await stream.send(wire.WhereaboutsAnswer(places=places))
    await stream.outlast()


async def places_of(invite: Invite) -> list[Place]:
    """Where those that an invite names say that its coordinator is; its own address is left out.

    Raises AtollError where libp2p does not start here.
    """
    if not invite.members:
        return []
    limits = Limits()
    traffic = Traffic(WireCounts(), limits=limits)
    daemon = await P2pd.start(
        Identity.generate(),
        listen_multiaddrs=("/ip4/127.0.0.1/tcp/0",),
        on_streams={},
        limits=limits,
    )
    try:
        asked = [_asked(daemon, member, invite.pin, traffic) for member in invite.members]
        told = [place for places in await asyncio.gather(*asked) for place in places]
    finally:
        await daemon.stop()
    return [place for place in dict.fromkeys(told) if place != (invite.host, invite.port)]


async def _asked(daemon: P2pd, member: InvitedBy, pin: bytes, traffic: Traffic) -> list[Place]:
    peer_id = peer_id_of(member.public_key)
    try:
        async with asyncio.timeout(SECONDS):
            await daemon.connect(peer_id, (member.multiaddr,))
            reader, writer = await daemon.open_stream(peer_id, WHEREABOUTS)
            stream = TransferStream(reader, writer, idle_seconds=SECONDS, traffic=traffic)
            try:
                await stream.send(wire.Whereabouts(pin=pin))
                found = await stream.receive(wire.WhereaboutsAnswer)
            finally:
                stream.abort()
    except (DaemonError, FrameError, *BROKEN) as error:
        _log.debug(
            "a member does not say where the coordinator is", at=member.multiaddr, why=str(error)
        )
        return []
    return [(place.host, place.enrolment_port) for place in found.places[:MOST_PLACES]]


async def invites_elsewhere(invite: Invite) -> list[Invite]:
    """The same invite at the places that members name, those that can be."""
    found = []
    for host, port in await places_of(invite):
        with suppress(AtollError):  # what a member names may be no host
            found.append(invite.at(host, port))
    return found
