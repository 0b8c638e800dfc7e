"""A coordinator has moved, and who knows its old address alone is carried on to the new one."""

import asyncio
import shutil
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.config import Home
from coordinator.relay.doors import Limits
from coordinator.relay.forwarding import Forwarding, is_here, moved, ways
from coordinator.settings import CoordinatorConfig
from coordinator.store import Store
from node.link.renewing import RenewingCalls
from protocol.errors import (
    AtollError,
    NoInputError,
    SystemRefusedError,
    UnavailableError,
    UsageError,
)
from protocol.terminal import cli, console
from protocol.trust.credentials import Credentials
from protocol.trust.rulings import Address, moved_to, rulings_from_wire
from protocol.v1 import operator_pb2, session_pb2
from protocol.v1.operator_pb2_grpc import OperatorServiceStub
from protocol.wire.channel import open_blocking_channel
from protocol.wire.payload import WireCounts
from tests.integration.coordinator_scene import FakeNode, invite_from, joined, new_home, serving
from tests.relay_scene import free_port

OLD, NEW = "127.0.0.2", "127.0.0.3"


def tell_move(home: Home, address: Address) -> None:
    request = operator_pb2.SteerRunRequest(
        verdict=operator_pb2.RUN_VERDICT_MOVE,
        host=address.host,
        control_port=address.control_port,
        enrolment_port=address.enrolment_port,
    )
    with open_blocking_channel(Credentials.load(home.directory)) as channel:
        OperatorServiceStub(channel).SteerRun(request)


async def test_an_old_invite_and_a_node_that_was_away_find_the_coordinator_where_it_is_now(
    tmp_path: Path,
) -> None:
    home = new_home(tmp_path / "old", host=OLD)
    home = replace(home, config=home.config.with_changes(advertise=OLD))
    new = Address(host=NEW, control_port=free_port(), enrolment_port=free_port())
    async with serving(home) as coordinator:
        old = home.config.with_changes(
            control_port=coordinator.control_port, enrolment_port=coordinator.enrolment_port
        )
        invite, _ = await invite_from(home)
        away = await joined(invite, "away")  # before anybody has said that it moves
        await away.close()
        await asyncio.to_thread(tell_move, home, new)
    shutil.copytree(home.directory, tmp_path / "new")
    there = Home.load(tmp_path / "new")
    there = replace(
        there,
        config=old.with_changes(
            host=NEW, control_port=new.control_port, enrolment_port=new.enrolment_port
        ),
    )
    with pytest.raises(AtollError, match="no coordinator answers"):
        await joined(invite, "too early")
    store = Store.open(home.directory)
    assert moved(store, home) == new
    with pytest.raises(SystemRefusedError, match="another coordinator"):
        Store.open(home.directory)  # what forwards holds the folder
    forwarding = Forwarding(OLD, ways(old, new), to=NEW, limits=Limits())
    async with serving(there):
        newcomer = await joined(invite, "newcomer")
        back = FakeNode(away.identity, away.credentials, "away")
        for node in (newcomer, back):
            assert node.credentials.host == OLD
            told = rulings_from_wire((await node.attach()).rulings)
            assert new in [moved_to(one.ruling) for one in told]
            moved_on = FakeNode(
                node.identity,
                replace(node.credentials, host=NEW, control_port=new.control_port),
                node.name,
            )
            await moved_on.attach()
            await moved_on.close()
            await node.close()
    await forwarding.stop()
    store.close()


async def test_a_member_that_was_told_where_the_coordinator_will_be_goes_there_and_keeps_it(
    tmp_path: Path,
) -> None:
    home, folder = new_home(tmp_path / "old"), tmp_path / "member"
    new = Address(host=NEW, control_port=free_port(), enrolment_port=free_port())
    there = home.config.with_changes(
        host=NEW, control_port=new.control_port, enrolment_port=new.enrolment_port
    )
    async with AsyncExitStack() as stack:
        async with serving(home):
            node = await joined((await invite_from(home))[0], "node")
            await node.close()
            node.credentials.save(folder)
            credentials = Credentials.load(folder)
            calls = await stack.enter_async_context(
                RenewingCalls(credentials, node.identity, WireCounts())
            )
            calls.moves_to(new)
            assert Credentials.load(folder).elsewhere == new
            await calls.GetRun(session_pb2.GetRunRequest())  # it is still where it was
            assert calls.credentials.control_port == credentials.control_port
        shutil.copytree(home.directory, tmp_path / "new")
        async with serving(replace(Home.load(tmp_path / "new"), config=there)):
            with pytest.raises(UnavailableError):
                await calls.GetRun(session_pb2.GetRunRequest())
            await calls.GetRun(session_pb2.GetRunRequest())
        kept = Credentials.load(folder)
        assert (kept.host, kept.control_port, kept.elsewhere) == (NEW, new.control_port, None)


async def test_the_old_folder_does_not_start_while_its_coordinator_answers_where_it_has_moved(
    tmp_path: Path,
) -> None:
    home = new_home(tmp_path / "old", host=OLD)
    home = replace(home, config=home.config.with_changes(advertise=OLD))
    new = Address(host=NEW, control_port=free_port(), enrolment_port=free_port())
    async with serving(home):
        await asyncio.to_thread(tell_move, home, new)
    async with serving(home):  # it has not moved yet
        pass
    await asyncio.to_thread(shutil.copytree, tmp_path / "old", tmp_path / "new")
    copy = Home.load(tmp_path / "new")
    there = copy.config.with_changes(
        host=NEW, advertise=NEW, control_port=new.control_port, enrolment_port=new.enrolment_port
    )
    async with serving(replace(copy, config=there)):
        with pytest.raises(SystemRefusedError, match=rf"has moved to {NEW}:.* two of them") as told:
            async with serving(home):
                pass
        assert "atoll coordinator forward" in told.value.next_step


def test_old_ports_and_the_numbers_of_the_new_ones_lead_on() -> None:
    old = CoordinatorConfig(control_port=7700, enrolment_port=7701)
    assert ways(old, Address(host=NEW, control_port=7700, enrolment_port=7701)) == {
        7700: 7700,
        7701: 7701,
    }
    assert ways(old, Address(host=NEW, control_port=7800, enrolment_port=7801)) == {
        7700: 7800,
        7701: 7801,
        7800: 7800,
        7801: 7801,
    }
    here = Address(host=OLD, control_port=7800, enrolment_port=7801)
    assert ways(old, here, is_same_machine=True) == {7700: 7800, 7701: 7801}
    with pytest.raises(UsageError, match=r"127\.0\.0\.2 is this machine, and port 7701"):
        ways(old, replace(here, enrolment_port=7701), is_same_machine=True)
    with pytest.raises(UsageError, match="port 7701 is for nodes at one address"):
        ways(old, Address(host=NEW, control_port=7701, enrolment_port=7702))


def test_a_coordinator_is_not_forwarded_to_itself() -> None:
    assert is_here("127.0.0.1", "0.0.0.0") and is_here("localhost", "::")
    assert is_here(NEW, NEW) and not is_here(NEW, OLD)
    assert not is_here("192.0.2.1", "0.0.0.0") and not is_here("no.such.host.invalid", OLD)


async def test_a_folder_whose_coordinator_has_not_moved_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = new_home(tmp_path / "run")

    def forwarded() -> int:
        return console.run(cli.root, ["coordinator", "forward", str(home.directory)])

    assert await asyncio.to_thread(forwarded) == 66
    assert "was never started" in capsys.readouterr().err
    async with serving(home):
        pass
    store = Store.open(home.directory)
    with pytest.raises(NoInputError, match="was never said to move"):
        moved(store, home)
    store.close()
