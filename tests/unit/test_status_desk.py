"""What the desk for status tells, and what it has of nodes to tell."""

from dataclasses import replace

import pytest

from coordinator.driver import Driver, LoopClock
from coordinator.rules import rules_of
from coordinator.services.outside import TOKEN_BYTES, Lookout
from coordinator.services.session import SessionDesk
from coordinator.services.status import StatusDesk
from coordinator.store import Store
from coordinator.streams import Telemetry
from protocol.errors import BadDataError
from protocol.run.run_spec import RunSpec
from protocol.v1 import session_pb2, status_pb2
from protocol.wire import convert
from protocol.wire.rounds import NodeId
from tests.unit.desk_scene import DIGEST, NODE, SIGNER, attach_request, new_desk, with_unknown_field


async def test_of_a_heartbeat_of_megabytes_the_status_shows_what_it_knows() -> None:
    telemetry = Telemetry()
    _, driver = new_desk()
    desk = SessionDesk(driver, telemetry, RunSpec(), SIGNER)
    status = StatusDesk(driver, telemetry, RunSpec(), swarm_id="swarm")
    session_id = (await desk.attach(NODE.node_id, attach_request())).session_id
    said = session_pb2.HeartbeatRequest(
        session_id=session_id, outer_digest=DIGEST, mesh="2 ranks", unreachable_ids=["x" * 100_000]
    )
    said.utilisation.MergeFromString(with_unknown_field(session_pb2.Utilisation(round=1), 100_000))
    for _ in range(convert.MOST_WIRE_KINDS):
        said.wire.add(kind="control", sent_bytes=7)
    heartbeat = session_pb2.HeartbeatRequest.FromString(with_unknown_field(said, 1_000_000))
    assert heartbeat.ByteSize() > 1_200_000
    await desk.heartbeat(NODE.node_id, heartbeat)
    answer = status.get_status(status_pb2.GetStatusRequest())
    (node,) = answer.nodes
    assert not node.is_unheard
    restarted = StatusDesk(driver, Telemetry(), RunSpec(), swarm_id="swarm")
    assert restarted.get_status(status_pb2.GetStatusRequest()).nodes[0].is_unheard
    assert (node.heartbeat.mesh, node.heartbeat.utilisation.round) == ("2 ranks", 1)
    assert [(each.kind, each.sent_bytes) for each in node.heartbeat.wire] == [("control", 7)]
    assert answer.ByteSize() < 2_000


async def test_where_a_router_puts_a_node_is_told_to_that_node_and_shown_to_nobody() -> None:
    telemetry, lookout = Telemetry(), Lookout(lambda: 0.0)
    lookout.ports = (7700,)
    _, driver = new_desk()
    desk = SessionDesk(driver, telemetry, RunSpec(), SIGNER, lookout=lookout)
    status = StatusDesk(driver, telemetry, RunSpec(), swarm_id="swarm")
    session_id = (await desk.attach(NODE.node_id, attach_request())).session_id
    token = b"t" * TOKEN_BYTES
    heartbeat = session_pb2.HeartbeatRequest(
        session_id=session_id,
        outer_digest=DIGEST,
        outside_token=token,
        punched_ids=[NODE.node_id, "a stranger"],
    )
    answer = await desk.heartbeat(NODE.node_id, heartbeat)
    assert (list(answer.outside_ports), list(answer.outside)) == ([7700], [])
    lookout.saw(token, "203.0.113.1", 20_000, 7700)
    answer = await desk.heartbeat(NODE.node_id, heartbeat)
    assert list(answer.outside) == ["/ip4/203.0.113.1/udp/20000/quic-v1"]
    shown = status.get_status(status_pb2.GetStatusRequest())
    assert list(shown.nodes[0].heartbeat.punched_ids) == [NODE.node_id]
    for secret in (b"203.0.113.1", token):
        assert secret not in shown.SerializeToString()
    heartbeat.outside_by_ipv6 = "/ip6/2a02:db8::7/udp/4001/quic-v1"
    await desk.heartbeat(NODE.node_id, heartbeat)
    shown = status.get_status(status_pb2.GetStatusRequest())
    assert b"2a02:db8::7" not in shown.SerializeToString()
    for place in (
        "/ip4/203.0.113.1/udp/1/quic-v1",
        "/ip6/2a02:db8::7/tcp/4001",
        "/ip6/2a02:db8::7/udp/0/quic-v1",
        "/ip6/2a02:db8::7/udp/65536/quic-v1",
        "/ip6/2a02:db8::7/udp/x/quic-v1",
        "/ip6/2a02:db8::7/udp/1/quic-v1/p2p/12D3",
        "/dns6/example.org/udp/1/quic-v1",
        *(
            f"/ip6/{host}/udp/1/quic-v1"
            for host in ("::", "::1", "fe80::1", "ff02::1", "::ffff:10.0.0.1", "fe80::1%eth0", "no")
        ),
    ):
        heartbeat.outside_by_ipv6 = place
        with pytest.raises(BadDataError, match="no place of QUIC over IPv6"):
            await desk.heartbeat(NODE.node_id, heartbeat)
    heartbeat.outside_by_ipv6 = ""
    heartbeat.outside_token = b"short"
    with pytest.raises(BadDataError, match="a token of 5 bytes"):
        await desk.heartbeat(NODE.node_id, heartbeat)
    heartbeat.outside_token = token
    del heartbeat.punched_ids[:]
    heartbeat.punched_ids.extend(["x"] * 10_000)
    with pytest.raises(BadDataError, match="members behind holes in routers"):
        await desk.heartbeat(NODE.node_id, heartbeat)


async def test_the_status_tells_of_samples_budgets_and_speeds() -> None:
    desk, driver = new_desk()
    status = StatusDesk(driver, Telemetry(), RunSpec(), swarm_id="swarm")
    steps, batch = RunSpec().inner.steps, RunSpec().inner.batch

    def answer() -> status_pb2.GetStatusResponse:
        return status.get_status(status_pb2.GetStatusRequest())

    assert answer().run.data == status_pb2.DataStatus()
    session_id = (await desk.attach(NODE.node_id, attach_request())).session_id
    (node,) = answer().nodes
    assert (node.inner_steps, node.HasField("inner_steps_per_second")) == (steps, False)
    assert answer().run.data == status_pb2.DataStatus(
        epoch_samples=1, leased_samples=steps * batch, frontier=steps * batch
    )
    request = session_pb2.ReportRequest(session_id=session_id)
    trained = request.reports.add(round=1).trained
    trained.inner_steps, trained.seconds = steps, steps / 4
    await desk.report(NODE.node_id, request)
    assert answer().nodes[0].inner_steps_per_second == 4.0
    await desk.detach(NODE.node_id, session_pb2.DetachRequest(session_id=session_id))
    assert answer().nodes[0].inner_steps == 0
    assert answer().run.data == status_pb2.DataStatus(
        epoch_samples=1,
        free_again_samples=steps * batch,
        free_again_pieces=1,
        frontier=steps * batch,
    )


async def test_the_status_tells_what_links_carry_and_what_rounds_have_cost() -> None:
    desk, driver = new_desk()
    status = StatusDesk(driver, Telemetry(), RunSpec(), swarm_id="swarm")
    session_id = (await desk.attach(NODE.node_id, attach_request())).session_id
    (node,) = status.get_status(status_pb2.GetStatusRequest()).nodes
    assert not node.HasField("link_rates")
    heartbeat = session_pb2.HeartbeatRequest(session_id=session_id, outer_digest=DIGEST)
    heartbeat.link_rates.up_bytes_per_second = 2e6
    await desk.heartbeat(NODE.node_id, heartbeat)
    request = session_pb2.ReportRequest(session_id=session_id)
    report = request.reports.add(round=0)
    report.applied.outer_digest = DIGEST
    report.applied.wire.add(kind="result", sent_bytes=70, received_bytes=5)
    await desk.report(NODE.node_id, request)
    answer = status.get_status(status_pb2.GetStatusRequest())
    assert answer.nodes[0].link_rates == session_pb2.LinkRates(up_bytes_per_second=2e6)
    assert list(answer.run.wire.counts) == list(report.applied.wire)


async def test_how_a_node_was_doing_is_forgotten_with_the_node() -> None:
    """The core forgets members that were gone for long; others attach in their place for years."""
    telemetry = Telemetry()
    for number in range(100):
        telemetry.attached(NodeId(f"gone {number}"), now=0.0)
    store = Store.in_memory()
    state = store.load(rules_of(RunSpec()), RunSpec().digest())
    driver = Driver(state=state, store=store, clock=LoopClock(starts_at=0.0))
    desk = SessionDesk(driver, telemetry, RunSpec(), SIGNER)
    await desk.attach(NODE.node_id, attach_request())
    assert telemetry.of(NodeId("gone 7")) is None
    assert telemetry.of(NODE.node_id) is not None


async def test_a_finished_runs_time_stands_still() -> None:
    _, driver = new_desk()
    status = StatusDesk(driver, Telemetry(), RunSpec(), swarm_id="swarm")
    driver._state = replace(driver.state, finished_at=70.0)
    driver.clock = LoopClock(starts_at=5000.0)
    assert status.get_status(status_pb2.GetStatusRequest()).run.elapsed_seconds == 70.0
