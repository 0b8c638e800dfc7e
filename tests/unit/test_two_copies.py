"""Two processes with one node's key, in virtual time: real sessions at a real coordinator's desk."""

import asyncio
import random
from typing import Any

from structlog.testing import capture_logs

from coordinator.services.session import SessionDesk
from coordinator.services.status import StatusDesk
from lab.simulation.coordinator import DeskStub, SimulatedCoordinator
from lab.simulation.swarm import identity_of
from node.disk.history import KeptRulings
from node.link.calls import Attachment, CoordinatorLink
from node.link.session import NodeSide, Session
from protocol.errors import UnavailableError
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec
from protocol.terminal.node_words import copies_in_words
from protocol.terminal.query import as_json
from protocol.terminal.status_words import summary_line
from protocol.v1 import status_pb2
from protocol.wire.channel import RETRY_CAP_SECONDS
from protocol.wire.rounds import CorpusSummary, Digest, PeerAddress
from protocol.wire.vitals import Announcement
from tests.unit.exchange_scene import in_virtual_time
from tests.unit.test_link_calls import VITALS

DIGEST = Digest(b"d" * 32)
SPEC = RunSpec()
LEASE_SECONDS = SPEC.deadlines.lease


class Process:
    """A process of a node: its session, and what it heard."""

    def __init__(self, coordinator: SimulatedCoordinator, *, place: int = 0, number: int) -> None:
        identity = identity_of(place)
        self.node_id = identity.node_id
        self.stub = DeskStub(coordinator, identity.node_id)
        self.attachments: list[Attachment] = []
        announcement = Announcement(
            node_name="vm",
            address=PeerAddress(
                public_key=identity.public_key, multiaddrs=("/ip4/127.0.0.1/tcp/1",)
            ),
            run_digest=SPEC.digest(),
            layout=layout_of(SPEC).summary(),
            codecs=("int4/1", "int4/1"),
            corpus=CorpusSummary(digest=DIGEST, num_samples=9, num_bytes=9),
            outer_round=0,
            outer_digest=DIGEST,
            outer_incarnation=0,
            device="cpu",
            num_ranks=1,
            version="0",
            process_id=number,
        )
        self.session = Session(
            link=CoordinatorLink(self.stub),
            node=NodeSide(
                announce=lambda: announcement,
                vitals=lambda: VITALS,
                on_attached=self.attachments.append,
                on_message=lambda event: None,
            ),
            rng=random.Random(number),
            rulings=KeptRulings(SPEC),
        )
        self.running = asyncio.ensure_future(self.session.run())

    async def die(self) -> None:
        """As the kernel sees to it: its stream breaks, and nothing is said."""
        self.stub.is_cut = True
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


def status_of(coordinator: SimulatedCoordinator) -> status_pb2.GetStatusResponse:
    desk: Any = coordinator.desk
    assert isinstance(desk, SessionDesk)
    status = StatusDesk(coordinator.driver, desk._telemetry, SPEC, swarm_id="swarm")
    return status.get_status(status_pb2.GetStatusRequest())


def told(logs: list[Any], words: str) -> list[Any]:
    return [line for line in logs if words in line["event"]]


@in_virtual_time
async def test_the_second_copy_waits_while_the_first_is_heard_and_all_three_say_so() -> None:
    coordinator = SimulatedCoordinator(SPEC, None)
    with capture_logs() as logs:
        first = Process(coordinator, number=1)
        await asyncio.sleep(1)
        assert not copies_in_words(status_of(coordinator).nodes)
        second = Process(coordinator, number=2)
        for _ in range(60):  # an hour
            await asyncio.sleep(60)
            status = status_of(coordinator)
            assert status.nodes[0].has_waiting_copy
            assert "vm has a second process with its key waiting" in summary_line(status)
    assert len(first.attachments) == 1, "its session was ended"
    assert not second.attachments
    (refused,) = told(logs, "not attached: this node's key is in use")
    assert refused["log_level"] == "error"
    assert "key of vm is attached" in refused["why"]
    assert "stop one of the two" in refused["next_step"]
    (warned,) = told(logs, "another process with this node's key asks to attach")
    assert warned["log_level"] == "warning"
    assert "stop one of the two" in warned["next_step"]
    (noted,) = told(logs, "two processes have one node's key")
    assert noted["node"] == "vm"
    await second.die()
    await asyncio.sleep(60)
    assert not as_json(status_of(coordinator).nodes[0])["has_waiting_copy"]
    await first.die()
    await coordinator.end()


@in_virtual_time
async def test_the_second_takes_over_soon_after_the_first_has_died_and_is_alone_then() -> None:
    coordinator = SimulatedCoordinator(SPEC, None)
    first = Process(coordinator, number=1)
    await asyncio.sleep(1)
    second = Process(coordinator, number=2)
    await asyncio.sleep(600)
    await first.die()
    await asyncio.sleep(RETRY_CAP_SECONDS + 1)
    assert len(second.attachments) == 1
    assert not status_of(coordinator).nodes[0].has_waiting_copy
    await second.die()
    await coordinator.end()


@in_virtual_time
async def test_a_restarted_node_is_let_in_at_once_and_a_broken_link_locks_nobody_out() -> None:
    coordinator = SimulatedCoordinator(SPEC, None)
    first = Process(coordinator, number=1)
    await asyncio.sleep(100)
    for _ in range(5):
        first.stub.is_cut = True
        await asyncio.sleep(LEASE_SECONDS / 2)
        first.stub.is_cut = False
        await asyncio.sleep(100)
    assert len(first.attachments) == 6
    await first.die()
    with capture_logs() as logs:
        restarted = Process(coordinator, number=2)
        await asyncio.sleep(1)
    assert len(restarted.attachments) == 1
    assert not told(logs, "key")
    await restarted.die()
    await coordinator.end()


@in_virtual_time
async def test_one_of_two_copies_stays_attached_after_the_coordinator_came_back() -> None:
    coordinator = SimulatedCoordinator(SPEC, None)
    processes = [Process(coordinator, number=1)]
    await asyncio.sleep(1)
    processes.append(Process(coordinator, number=2))
    await asyncio.sleep(100)
    coordinator.driver.end_all(UnavailableError("the coordinator stops"))
    await asyncio.sleep(100)
    num_attached = sum(len(process.attachments) for process in processes)
    await asyncio.sleep(3600)
    assert sum(len(process.attachments) for process in processes) == num_attached <= 3
    for process in processes:
        await process.die()
    await coordinator.end()


@in_virtual_time
async def test_two_nodes_of_one_name_are_told_what_the_swarm_calls_them() -> None:
    coordinator = SimulatedCoordinator(SPEC, None)
    processes = []
    for place in range(3):
        processes.append(Process(coordinator, place=place, number=place))
        await asyncio.sleep(1)
    names = [process.attachments[0].node_name for process in processes]
    assert names == ["vm", "vm-2", "vm-3"]
    shown = {node.node_id: node.node_name for node in status_of(coordinator).nodes}
    assert [shown[process.node_id] for process in processes] == names
    await processes[1].die()
    again = Process(coordinator, place=1, number=9)
    await asyncio.sleep(1)
    assert again.attachments[0].node_name == "vm-2"
    for process in (*processes, again):
        await process.die()
    await coordinator.end()
