"""Members tell where the coordinator is to whom knows the pin of its certificate, and to nobody else."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

from node.exchange.transport.libp2p import Libp2pTransport
from node.exchange.transport.whereabouts import (
    MOST_PLACES,
    addresses_elsewhere,
    addresses_told,
    invites_elsewhere,
    told_by,
)
from protocol.trust.credentials import Credentials
from protocol.trust.identity import Identity
from protocol.trust.invite import Invite, InvitedBy
from protocol.trust.pki import Authority, new_swarm_id, pin_of
from protocol.trust.rulings import Address
from protocol.wire.payload import WireCounts
from tests.integration.transport_peers import Desk

PIN = bytes(range(32))


def at(host: str, enrolment_port: int = 7701, control_port: int = 7700) -> Address:
    return Address(host=host, control_port=control_port, enrolment_port=enrolment_port)


OLD, NEW = at("localhost"), at("new.example.org")  # its members here are on loopback


def invite_of(*members: InvitedBy) -> Invite:
    return Invite(
        host=OLD.host,
        port=7701,
        pin=PIN,
        invite_id="k3v9",
        secret=bytes(32),
        members=members,
    )


async def running(told: Sequence[Address]) -> tuple[Libp2pTransport, InvitedBy]:
    identity = Identity.generate()
    transport = Libp2pTransport(
        identity=identity,
        counts=WireCounts(),
        whereabouts=lambda pin: told if pin == PIN else (),
    )
    await transport.start(Desk())
    named = InvitedBy.at(identity.public_key, transport.multiaddrs[0])
    assert named is not None
    return transport, named


async def test_a_stranger_with_an_invite_is_told_and_one_with_another_pin_is_not() -> None:
    transport, named = await running([NEW, OLD, OLD])
    try:
        assert await addresses_told(PIN, [named], known_host=OLD.host) == [NEW, OLD]
        (found,) = await invites_elsewhere(invite_of(named))
        assert (found.host, found.port, found.pin) == (NEW.host, NEW.enrolment_port, PIN)
        assert await addresses_told(bytes(32), [named], known_host=OLD.host) == []
    finally:
        await transport.stop()


async def test_what_cannot_be_a_place_is_left_out_and_a_long_answer_is_cut() -> None:
    told = [at("no host"), at("h", 0), *(at(f"h{n}", 1) for n in range(2 * MOST_PLACES))]
    transport, named = await running(told)
    try:
        found = await invites_elsewhere(invite_of(named))
        assert [(each.host, each.port) for each in found] == [("h0", 1), ("h1", 1)]
    finally:
        await transport.stop()


async def test_a_folder_is_told_of_what_it_does_not_know_and_of_no_place_without_a_port_for_members() -> (
    None
):
    authority = Authority.create(new_swarm_id())
    server_pem = authority.issue_server().certificate_pem
    pin = pin_of(server_pem)
    newest, half = at("newest.example.org"), at("half.example.org", control_port=0)
    identity = Identity.generate()
    transport = Libp2pTransport(
        identity=identity,
        counts=WireCounts(),
        whereabouts=lambda asked: [OLD, half, NEW, newest] if asked == pin else (),
    )
    await transport.start(Desk())
    try:
        named = InvitedBy.at(identity.public_key, transport.multiaddrs[0])
        assert named is not None
        ours = Credentials(
            swarm_id="s",
            run_name="r",
            host=OLD.host,
            control_port=OLD.control_port,
            authority_pem=server_pem,
            certificate_pem=authority.issue_operator().certificate_pem,
            key_pem=b"",
            elsewhere=NEW,
            members=(named,),
        )
        assert await addresses_elsewhere(ours) == [newest]
        assert await addresses_elsewhere(replace(ours, members=())) == []
    finally:
        await transport.stop()


async def test_a_member_that_is_gone_or_is_another_than_the_named_one_tells_nothing() -> None:
    transport, named = await running([NEW])
    try:
        other = InvitedBy(
            public_key=Identity.generate().public_key, host=named.host, port=named.port
        )
        gone = InvitedBy(public_key=named.public_key, host="127.0.0.1", port=1)
        assert await addresses_told(PIN, [other, gone], known_host=OLD.host) == []
        assert await addresses_told(PIN, [other, named], known_host=OLD.host) == [NEW]
    finally:
        await transport.stop()


async def test_nobody_is_sent_to_look_for_the_coordinator_on_its_own_loopback() -> None:
    transport, named = await running([at("127.0.0.1"), at("169.254.169.254"), NEW])
    try:
        assert await addresses_told(PIN, [named], known_host=OLD.host) == [at("127.0.0.1"), NEW]
        assert await addresses_told(PIN, [named], known_host="old.example.org") == []
    finally:
        await transport.stop()


def test_a_member_tells_where_it_finds_the_coordinator_of_that_pin_and_where_it_moves_to() -> None:
    server_pem = Authority.create(new_swarm_id()).issue_server().certificate_pem
    ours = SimpleNamespace(
        host=OLD.host,
        control_port=7700,
        enrolment_port=7701,
        elsewhere=None,
        bundle=SimpleNamespace(server_pem=server_pem),
    )
    tell = told_by(lambda: ours)  # type: ignore[arg-type, return-value]
    assert tell(pin_of(server_pem)) == [OLD]
    assert tell(bytes(32)) == []
    ours.elsewhere = NEW
    assert tell(pin_of(server_pem)) == [OLD, NEW]
    ours.enrolment_port = 0  # it has not been told
    assert tell(pin_of(server_pem)) == [NEW]
    ours.bundle.server_pem = b""  # it joined before members were given it
    assert tell(pin_of(server_pem)) == []
