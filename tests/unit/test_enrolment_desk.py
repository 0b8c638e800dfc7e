"""The enrolment desk: who gets a certificate, and how often a host may guess."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.driver import Driver, LoopClock
from coordinator.invite_rows import Invite
from coordinator.rules import rules_of
from coordinator.services.enrolment import (
    FAILURE_SECONDS,
    MAX_AT_ONCE,
    MAX_FAILURES,
    MAX_LOGGED,
    Certificates,
    ControlEndpoint,
    EnrolmentDesk,
    Failures,
    enrolment_service,
    host_of,
)
from coordinator.services.ruling import Rulings
from coordinator.store import Store
from protocol.errors import BadDataError, NotPermittedError, TemporaryError
from protocol.run.run_spec import RunSpec
from protocol.trust.identity import Identity
from protocol.trust.invite import hash_of_secret
from protocol.trust.pki import (
    Authority,
    enrolment_statement,
    make_request,
    new_swarm_id,
    principal_of,
)
from protocol.trust.signing import CommitSigner
from protocol.v1 import enrolment_pb2

T = TypeVar("T")

NODE = Identity.generate()
SECRET = b"s" * 32
WALL = 1_700_000_000.0


def enrolment_desk() -> tuple[EnrolmentDesk, Store]:
    store = Store.in_memory()
    state = store.load(rules_of(RunSpec()), RunSpec().digest())
    driver = Driver(state=state, store=store, clock=LoopClock(starts_at=0.0))
    store.invites.add(
        Invite(
            invite_id="inv",
            secret_hash=hash_of_secret(SECRET),
            max_uses=1,
            expires_utc_seconds=WALL + 60,
            host="h",
        )
    )
    authority = Authority.create(new_swarm_id())
    rulings = Rulings(driver, RunSpec(), CommitSigner(Ed25519PrivateKey.generate()))
    certificates = Certificates(
        authority,
        authority.certificate_pem,
        store,
        standing_of=rulings.standing_of,
        enrolment_port=7701,
        clock=lambda: 0.0,
        wall_clock=lambda: WALL,
    )
    desk = EnrolmentDesk(
        store,
        certificates,
        rulings,
        leads_to=ControlEndpoint(run_name="r", port=7700, authority_pem=authority.certificate_pem),
        clock=lambda: 0.0,
        wall_clock=lambda: WALL,
        write=written,
    )
    return desk, store


async def written(change: Callable[[], T]) -> T:
    return change()


def enrol_request(signer: Identity = NODE) -> enrolment_pb2.EnrolRequest:
    request_der, _ = make_request()
    return enrolment_pb2.EnrolRequest(
        invite_id="inv",
        invite_secret=SECRET,
        public_key=NODE.public_key,
        certificate_request=request_der,
        proof=signer.sign(enrolment_statement("inv", request_der)),
        node_name="node-a",
    )


async def test_a_certificate_names_the_node_whose_key_signed_for_it() -> None:
    desk, store = enrolment_desk()
    response = await desk.enrol("host", enrol_request())
    assert principal_of(response.certificate_pem).node_id == NODE.node_id
    assert store.invites.member(NODE.node_id) is not None


async def test_who_claims_the_identity_of_another_is_refused_and_the_invite_keeps_its_use() -> None:
    desk, store = enrolment_desk()
    stolen = enrol_request()
    stolen.certificate_request = make_request().request_der  # the thief's key under NODE's proof
    for request in (enrol_request(signer=Identity.generate()), stolen):
        with pytest.raises(BadDataError, match="not signed"):
            await desk.enrol("host", request)
    assert store.invites.member(NODE.node_id) is None


async def test_who_guesses_locks_nobody_out_that_has_an_invite_and_shares_the_address() -> None:
    desk, store = enrolment_desk()
    wrong = enrol_request()
    wrong.invite_secret = b"x" * 32
    for _ in range(MAX_FAILURES):
        with pytest.raises(NotPermittedError, match="not an invite"):
            await desk.enrol("host", wrong)
    with pytest.raises(TemporaryError, match="from host"):
        await desk.enrol("host", wrong)
    await desk.enrol("host", enrol_request())
    assert store.invites.member(NODE.node_id) is not None


class Called:
    """The context of a call, from a host."""

    def __init__(self, host: str) -> None:
        self._host = host

    def peer(self) -> str:
        return f"ipv4:{self._host}:55"

    async def abort(self, *_: object, **__: object) -> None:
        raise ConnectionAbortedError


async def test_strangers_fill_no_log() -> None:
    desk, _ = enrolment_desk()
    told: list[str] = []
    now = 0.0
    servicer = enrolment_service(
        desk, on_refused=lambda host, _: told.append(host), clock=lambda: now
    )
    wrong = enrol_request()
    wrong.invite_secret = b"x" * 32

    async def try_from(host: str) -> None:
        with pytest.raises(ConnectionAbortedError):
            answer: Any = servicer.Enrol(wrong, Called(host))  # type: ignore[arg-type]
            await answer

    for _ in range(3 * MAX_FAILURES):
        await try_from("192.0.2.1")
    assert told == ["192.0.2.1"] * MAX_FAILURES
    for number in range(2 * MAX_LOGGED):
        await try_from(f"198.51.100.{number}")
    assert len(told) == MAX_LOGGED
    now = MAX_LOGGED
    await try_from("203.0.113.1")
    assert told[-1] == "203.0.113.1"


def test_failed_attempts_are_limited_by_host_and_forgotten_after_a_while() -> None:
    now = 0.0
    failures = Failures(lambda: now)
    for _ in range(MAX_FAILURES):
        failures.check("a")
        failures.add("a")
    with pytest.raises(TemporaryError, match="from a"):
        failures.check("a")
    failures.check("b")
    now = FAILURE_SECONDS
    failures.check("a")


@pytest.mark.parametrize(
    ("peer", "host"),
    [("ipv4:192.0.2.1:55", "192.0.2.1"), ("ipv6:%5B2001:db8::1%5D:55", "[2001:db8::1]")],
)
def test_ports_do_not_make_hosts(peer: str, host: str) -> None:
    assert host_of(peer) == host


async def test_who_joins_with_too_many_others_at_once_hears_so_and_has_not_failed() -> None:
    desk, _ = enrolment_desk()
    is_free = asyncio.Event()

    async def slowly(change: Callable[[], T]) -> T:
        await is_free.wait()
        return change()

    desk._write = slowly
    waiting = [asyncio.create_task(desk.enrol("host", enrol_request())) for _ in range(MAX_AT_ONCE)]
    await asyncio.sleep(0)
    for _ in range(MAX_FAILURES + 1):
        with pytest.raises(TemporaryError, match="32 others join at this moment"):
            await desk.enrol("host", enrol_request())
    is_free.set()
    assert len({answer.node_id for answer in await asyncio.gather(*waiting)}) == 1
    assert (await desk.enrol("host", enrol_request())).node_id == NODE.node_id
