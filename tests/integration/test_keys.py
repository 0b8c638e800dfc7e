"""Certificates that end and keys that change while a run goes on, over real TLS."""

import asyncio
import contextlib
import functools
import multiprocessing
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.authority_key import read_authority_key, refuse_damaged
from coordinator.backup import back_up
from coordinator.config import Home
from coordinator.rotation import Rotation, protect
from node.disk.history import KeptRulings
from node.link.renewing import RenewingCalls
from protocol.errors import (
    BadDataError,
    CertificateRefusedError,
    ConfigError,
    ExpelledError,
    HeldBackError,
    NoInputError,
    NotPermittedError,
    OtherSwarmError,
    ProtocolMismatchError,
    SystemRefusedError,
    UnavailableError,
    UsageError,
)
from protocol.terminal.query import StatusLink
from protocol.trust.credentials import IDENTITY_FILE, Credentials
from protocol.trust.identity import Identity
from protocol.trust.pki import (
    MEMBER_SECONDS,
    Authority,
    Validity,
    is_key_of,
    make_request,
    new_swarm_id,
    validity_of,
)
from protocol.trust.rulings import Address, rulings_from_wire
from protocol.trust.signing import CommitSigner
from protocol.v1 import operator_pb2, session_pb2
from protocol.v1.operator_pb2_grpc import OperatorServiceStub
from protocol.wire.channel import open_blocking_channel
from protocol.wire.payload import WireCounts
from tests.integration.coordinator_scene import (
    START,
    FakeNode,
    invite_from,
    joined,
    new_home,
    serving,
    two_nodes,
)
from tests.ports import free_port

LONG_AGO = 1e9  # September 2001, as a clock without a battery shows
IN_YEARS = 4e9


def dated(home: Home, node: FakeNode, moment: float) -> Credentials:
    """The node's credentials with a certificate that was made at another time."""
    request_der, key_pem = make_request()
    leaf = home.issuer.issue_node(request_der, node.node_id, validity=Validity.of_member(moment))
    return replace(node.credentials, certificate_pem=leaf + home.tail_pem, key_pem=key_pem)


@asynccontextmanager
async def calls_of(credentials: Credentials, identity: Identity) -> AsyncIterator[RenewingCalls]:
    async with RenewingCalls(credentials, identity, WireCounts()) as calls:
        yield calls


async def get_run(calls: RenewingCalls) -> None:
    await calls.GetRun(session_pb2.GetRunRequest())


async def ruled(home: Home, node: str, verdict: str) -> None:
    def rule() -> None:
        with open_blocking_channel(Credentials.load(home.directory)) as channel:
            value = operator_pb2.NodeVerdict.Value(f"NODE_VERDICT_{verdict}")
            OperatorServiceStub(channel).RuleNode(
                operator_pb2.RuleNodeRequest(node=node, verdict=value)
            )

    await asyncio.to_thread(rule)


def rotated(home: Home, **wants: object) -> Home:
    Rotation(directory=home.directory, now=2e9, **wants).make()  # type: ignore[arg-type]
    return Home.load(home.directory)


def moved(credentials: Credentials, home: Home) -> Credentials:
    """To the ports of this start: a real coordinator's stay the same."""
    control_port = Credentials.load(home.directory).control_port
    return replace(credentials, control_port=control_port)


async def test_a_certificate_of_a_day_is_renewed_in_the_session_without_a_break(
    tmp_path: Path,
) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home), two_nodes(home) as (a, _):
        a.credentials.save(tmp_path / "node")
        ours = Credentials.load(tmp_path / "node")
        holds = validity_of(ours.leaf_pem)
        assert (holds.not_after - holds.not_before).total_seconds() == 2 * MEMBER_SECONDS
        async with calls_of(ours, a.identity) as calls:
            stream = calls.Subscribe(session_pb2.SubscribeRequest(session_id=a.session_id))
            told = stream.__aiter__()
            await anext(told)
            assert MEMBER_SECONDS / 2 - 60 < await calls.renew() <= MEMBER_SECONDS / 2
            await calls.renew()
            renewed = Credentials.load(tmp_path / "node")
            assert renewed.leaf_pem not in (ours.leaf_pem, b"")
            assert renewed.key_pem == ours.key_pem
            assert calls.credentials == renewed
            # The stream that was opened with the first certificate still tells what happens.
            await ruled(home, "node-b", "QUARANTINE")
            while (await anext(told)).WhichOneof("event") != "rulings":
                pass
            beat = session_pb2.HeartbeatRequest(session_id=a.session_id, outer_digest=START)
            await calls.Heartbeat(beat)
            stream.cancel()


async def test_members_are_believed_only_where_the_coordinator_shows_its_certificate(
    tmp_path: Path,
) -> None:
    home, strangers = new_home(tmp_path / "home"), new_home(tmp_path / "strangers")

    def at(control_port: int) -> Address:
        return Address(host="127.0.0.1", control_port=control_port, enrolment_port=1)

    async with serving(home), serving(strangers), two_nodes(home) as (a, _):
        a.credentials.save(tmp_path / "node")
        gone = replace(Credentials.load(tmp_path / "node"), control_port=free_port())
        stranger = Credentials.load(strangers.directory).control_port
        lies, true = (at(free_port()), at(stranger)), at(a.credentials.control_port)
        told: list[Address] = [*lies, true]

        async def ask(credentials: Credentials) -> list[Address]:
            return told

        async with calls_of(gone, a.identity) as calls:
            with pytest.raises(UnavailableError):
                await get_run(calls)
            assert await calls.look_elsewhere(ask)
            await get_run(calls)
            assert Credentials.load(tmp_path / "node").control_port == true.control_port
        told = [*lies]
        async with calls_of(gone, a.identity) as calls:
            assert not await calls.look_elsewhere(ask)
            with pytest.raises(UnavailableError, match=f"{gone.control_port}"):
                await get_run(calls)


@pytest.mark.parametrize("moment", [LONG_AGO, IN_YEARS])
async def test_who_was_away_or_whose_coordinators_clock_was_wrong_gets_a_certificate_by_its_identity(
    tmp_path: Path, moment: float
) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home), two_nodes(home) as (a, b):
        for node in (a, b):
            async with calls_of(dated(home, node, moment), node.identity) as calls:
                await get_run(calls)
                assert calls.credentials.leaf_pem != node.credentials.leaf_pem
        await ruled(home, "node-a", "EXPEL")
        await ruled(home, "node-b", "QUARANTINE")
        for node, kind in ((a, ExpelledError), (b, HeldBackError)):
            async with calls_of(dated(home, node, moment), node.identity) as calls:
                with pytest.raises(kind):
                    await get_run(calls)
        async with calls_of(dated(home, b, moment), Identity.generate()) as calls:
            with pytest.raises(NotPermittedError, match="is not enrolled here"):
                await get_run(calls)
        stale = replace(dated(home, b, moment), enrolment_port=0)
        async with calls_of(stale, b.identity) as calls:
            with pytest.raises(CertificateRefusedError, match="refuses this certificate"):
                await get_run(calls)


async def test_whose_certificate_has_ended_waits_for_a_joining_port_that_is_closed(
    tmp_path: Path,
) -> None:
    """A firewall lets nobody in there once all have joined, or the coordinator has just started."""
    home, closed = new_home(tmp_path / "home"), free_port()
    says = f"refuses this certificate, and a new one is not to be had: .*:{closed}"
    async with serving(home), two_nodes(home) as (a, _):
        late = replace(dated(home, a, LONG_AGO), enrolment_port=closed)
        async with calls_of(late, a.identity) as calls:
            with pytest.raises(UnavailableError, match=says) as refusal:
                await get_run(calls)
            assert f"open the joining port, TCP {closed}" in refusal.value.next_step

            async def carry(inward: asyncio.StreamReader, outward: asyncio.StreamWriter) -> None:
                port = a.credentials.enrolment_port
                there, here = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(_pour(inward, here), _pour(there, outward))

            async with await asyncio.start_server(carry, "127.0.0.1", closed):
                await get_run(calls)
        late.save(tmp_path / "node")
        a.identity.save(tmp_path / "node" / "identity.key")
        with StatusLink(tmp_path / "node") as link, pytest.raises(UnavailableError, match=says):
            await asyncio.to_thread(link.status)


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while content := await reader.read(1 << 16):
            writer.write(content)
            await writer.drain()
        writer.close()


async def test_a_viewers_command_renews_before_it_asks(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home), two_nodes(home) as (a, _):
        dated(home, a, LONG_AGO).save(tmp_path / "node")
        a.identity.save(tmp_path / "node" / "identity.key")
        with StatusLink(tmp_path / "node") as link:
            status = await asyncio.to_thread(link.status)
            assert {node.node_name for node in status.nodes} == {"node-a", "node-b"}


@pytest.mark.parametrize("with_authority", [False, True])
async def test_a_node_that_was_away_follows_other_keys_and_the_old_ones_are_good_for_nothing(
    tmp_path: Path, with_authority: bool
) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home), two_nodes(home) as (a, _):
        kept = KeptRulings(home.run, verifier=home.verifier)
        while kept.number < 3:
            kept.take(rulings_from_wire((await a.next("rulings")).rulings))
        old_port = a.credentials.enrolment_port
        with pytest.raises(SystemRefusedError, match="stop the coordinator first"):
            rotated(home)
        await asyncio.to_thread(back_up, home.directory, tmp_path / "copy")
    thief = Credentials.load(home.directory)
    other = rotated(home, with_authority=with_authority)
    assert other.key_number > home.key_number
    config = other.config.model_copy(update={"enrolment_port": old_port})
    async with serving(replace(other, config=config)):
        away = moved(a.credentials, other)
        async with calls_of(away, a.identity) as calls:
            await get_run(calls)
            assert calls.credentials.bundle.newest == other.key_number
            followed = calls.credentials
        a.credentials = followed
        a.connect()
        opened = await a.attach(num_rulings=kept.number, rulings_digest=kept.digest, process_id=1)
        (news,) = kept.take(rulings_from_wire(opened.rulings))
        assert news.kind == "keyed"
        # Who joins now believes what there is now, and the whole chain.
        late = await joined((await invite_from(other))[0], "late")
        everything = rulings_from_wire((await late.attach(process_id=3)).rulings)
        assert KeptRulings(other.run, verifier=other.verifier).take(everything)
        await late.close()
        # A thief of the old keys owns nothing: not as the run owner, not as the coordinator.
        knowing = followed.certificate_pem.replace(followed.leaf_pem, thief.leaf_pem)
        for certificate_pem in (thief.certificate_pem, knowing):
            stolen = replace(thief, control_port=away.control_port, certificate_pem=certificate_pem)
            with pytest.raises(CertificateRefusedError):
                await asyncio.to_thread(_list_invites, stolen)
        request_der, _ = make_request(followed.key_pem)
        forged = home.issuer.issue_node(request_der, a.node_id) + home.tail_pem
        with pytest.raises(ProtocolMismatchError, match="has replaced it"):
            followed.renewed(forged)
    copy = Home.load(tmp_path / "copy")  # and neither does who has a copy of the folder from before
    async with serving(copy):
        with pytest.raises(CertificateRefusedError, match="is not of swarm"):
            async with calls_of(moved(followed, copy), a.identity) as calls:
                await get_run(calls)
    with pytest.raises(ConfigError, match="was replaced since: its database says so"):
        async with serving(replace(other, issuer=home.issuer)):
            pass


async def test_a_member_goes_on_to_the_told_address_where_another_run_took_the_old_one(
    tmp_path: Path,
) -> None:
    home, other = new_home(tmp_path / "home"), new_home(tmp_path / "other")
    async with serving(home), two_nodes(home) as (a, _):
        a.credentials.save(tmp_path / "node")
        a.identity.save(tmp_path / "node" / IDENTITY_FILE)
        ours = Credentials.load(tmp_path / "node")
    config = other.config.model_copy(
        update={"control_port": ours.control_port, "enrolment_port": ours.enrolment_port}
    )
    new = {"control_port": free_port(), "enrolment_port": free_port()}
    async with serving(replace(other, config=config)), calls_of(ours, a.identity) as calls:
        with pytest.raises(OtherSwarmError, match="is not of swarm"):
            await get_run(calls)
        calls.moves_to(Address(host="127.0.0.1", **new))
        async with serving(replace(home, config=home.config.model_copy(update=new))):
            with StatusLink(tmp_path / "node") as link:  # a command, which nobody has told
                status = await asyncio.to_thread(link.status)
            assert status.run.run_name == home.run.run.name
            with pytest.raises(OtherSwarmError):
                await get_run(calls)
            await get_run(calls)
            assert calls.credentials.control_port == new["control_port"]


def test_the_authoritys_key_may_lie_encrypted_or_elsewhere_and_only_a_change_of_keys_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = new_home(tmp_path / "home")
    key = home.directory / "ca.key"
    monkeypatch.setenv("ATOLL_PASSPHRASE", "short")
    with pytest.raises(UsageError, match="of 5 characters is guessed"):
        protect(home.directory, descriptor=None)
    monkeypatch.setenv("ATOLL_PASSPHRASE", "five words that nobody guesses")
    protect(home.directory, descriptor=None)
    assert key.read_bytes().startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
    assert key.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="is encrypted already"):
        protect(home.directory, descriptor=None)
    second = rotated(home, with_authority=True)
    assert key.read_bytes().startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
    assert second.authority_pem != home.authority_pem
    monkeypatch.setenv("ATOLL_PASSPHRASE", "another one that is wrong")
    with pytest.raises(NotPermittedError, match="does not open"):
        rotated(second)
    monkeypatch.delenv("ATOLL_PASSPHRASE")
    with pytest.raises(UsageError, match="ATOLL_PASSPHRASE is not set"):
        rotated(second)
    elsewhere = tmp_path / "stick.key"
    key.rename(elsewhere)
    with pytest.raises(NoInputError, match=r"cannot be read at .*ca\.key.*--authority-key"):
        rotated(second)
    with (tmp_path / "passphrase").open("w+") as file:
        file.write("five words that nobody guesses\n")
        file.seek(0)
        third = rotated(
            second, with_authority=True, authority_key=elsewhere, descriptor=file.fileno()
        )
    assert not key.exists() and third.key_number > second.key_number
    with pytest.raises(BadDataError, match="is not the key of the authority"):
        rotated(home_of_another := new_home(tmp_path / "other"), authority_key=_plain(elsewhere))
    assert home_of_another.key_number == 1


def _plain(path: Path) -> Path:
    """A key of another authority, as it is."""
    plain = path.with_name("plain.key")
    plain.write_bytes(Authority.create(new_swarm_id()).key_pem)
    plain.chmod(0o600)
    return plain


def rotated_until_killed(
    folder: Path, *, authority_key: str | None, with_authority: bool, passphrase: str
) -> int:
    """Changes keys of copies of a folder, each killed one step later; returns how many were killed.

    They are folder-0, folder-1 and so on. A step is what a crash may come between: a file that takes its
    name, or goes. Run in a process of its own, which forks.
    """
    os.environ["ATOLL_PASSPHRASE"] = passphrase
    step, code = -1, -signal.SIGKILL
    while code == -signal.SIGKILL:
        step += 1
        copy = folder.with_name(f"{folder.name}-{step}")
        shutil.copytree(folder, copy)
        key = None if authority_key is None else copy / authority_key
        if (child := os.fork()) == 0:
            left = step

            def killed(function: Callable[..., None], *arguments: object, **named: object) -> None:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                function(*arguments, **named)

            for name in ("replace", "rename", "rmdir", "unlink"):
                setattr(os, name, functools.partial(killed, getattr(os, name)))
            directory = copy / "home"
            with_key = Rotation(
                directory=directory, authority_key=key, with_authority=with_authority, now=2e9
            )
            try:
                with_key.make()
            finally:
                os._exit(0 if Home.load(directory).key_number > 1 else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, "it failed without being killed"
    return step


@pytest.fixture(scope="module")
def apart() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(
    ("with_authority", "key", "passphrase"),
    [
        (False, None, ""),
        (True, None, ""),
        (True, "stick.key", "five words that nobody guesses"),
    ],
)
def test_a_change_of_keys_that_was_killed_at_any_step_is_finished_or_was_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    apart: ProcessPoolExecutor,
    with_authority: bool,
    key: str | None,
    passphrase: str,
) -> None:
    home = new_home(tmp_path / "all" / "home")
    if passphrase:
        monkeypatch.setenv("ATOLL_PASSPHRASE", passphrase)
        protect(home.directory, descriptor=None)
    if key is not None:
        (home.directory / "ca.key").rename(home.directory.parent / key)
    num_steps = apart.submit(
        rotated_until_killed,
        home.directory.parent,
        authority_key=key,
        with_authority=with_authority,
        passphrase=passphrase,
    ).result()
    assert num_steps >= 15
    have_changed = []
    for step in range(num_steps + 1):
        folder = tmp_path / f"all-{step}"
        found = Home.load(folder / "home")
        have_changed.append(found.key_number > home.key_number)
        assert found.verifier.trust.newest == found.key_number
        assert (
            CommitSigner.of_key(found.issuer.key_pem).public_key
            == (found.verifier.trust.keys[found.key_number])
        )
        assert (found.authority_pem != home.authority_pem) == (with_authority and have_changed[-1])
        found.save_link(host="127.0.0.1", control_port=7)
        assert Credentials.load(found.directory).bundle.newest == found.key_number
        refuse_damaged(found.directory / "ca.key", found.authority_pem)  # as backups do
        at = found.directory / "ca.key" if key is None else folder / key
        again = rotated(found, with_authority=with_authority, authority_key=at if key else None)
        assert is_key_of(read_authority_key(at, passphrase.encode()), again.authority_pem)
        assert at.stat().st_mode & 0o777 == 0o600
        assert not at.with_name(f"{at.name}.new").exists()
    assert have_changed == sorted(have_changed) and set(have_changed) == {False, True}


async def test_a_start_removes_keys_that_a_killed_change_has_left(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    left = home.directory / "keys.new.part"
    left.mkdir(mode=0o700)
    (left / "ca.key").write_bytes(Authority.create(new_swarm_id()).key_pem)
    async with serving(home):
        assert not left.exists()


def _list_invites(credentials: Credentials) -> None:
    with open_blocking_channel(credentials) as channel:
        OperatorServiceStub(channel).ListInvites(operator_pb2.ListInvitesRequest())
