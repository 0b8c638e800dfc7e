"""What Prometheus reads of a real coordinator after a round, and who may not listen where."""

import asyncio
import http.client
import json
import socket
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.app import Coordinator
from coordinator.backup import Backup
from coordinator.backups import BackupRecords, Made
from coordinator.config import Home, create_home
from coordinator.dashboard.pages import EVERY_SECONDS
from coordinator.dashboard.run_metrics import RUN_METRICS
from coordinator.services.status import StatusDesk
from coordinator.swarm.state import HeldOut
from protocol.errors import SystemRefusedError
from protocol.v1 import session_pb2
from protocol.web.metrics import NODE_METRICS, PARTS
from tests.integration.coordinator_scene import (
    LOCAL,
    MIDDLE,
    NUM_ELEMENTS,
    RUN,
    FakeNode,
    described,
    new_home,
    serving,
    two_nodes,
)

PATIENCE_SECONDS = 60.0
PATIENT = f"{RUN}[deadlines]\nlease = 300\n"  # nodes here beat only when a test says so

Labels = frozenset[tuple[str, str]]


def home_with_pages(folder: Path, address: str = "127.0.0.1:0", text: str = PATIENT) -> Home:
    return create_home(
        folder,
        config=LOCAL.with_changes(dashboard=address),
        text=lambda building: described(building, text),
    )


def fetched(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


async def ask(coordinator: Coordinator, path: str, method: str = "GET") -> tuple[int, str]:
    assert coordinator.dashboard_port is not None
    return await asyncio.to_thread(fetched, coordinator.dashboard_port, path, method)


async def scraped(coordinator: Coordinator) -> dict[str, dict[Labels, float]]:
    status, text = await ask(coordinator, "/metrics")
    assert status == 200
    values: dict[str, dict[Labels, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name][frozenset(sample.labels.items())] = sample.value
    return values


def beat_of(node: FakeNode, **changes: object) -> session_pb2.HeartbeatRequest:
    beat = session_pb2.HeartbeatRequest(
        session_id=node.session_id,
        outer_round=1,
        outer_digest=MIDDLE,
        inner_step=7,
        loss=2.5,
        tokens_per_second=100.0,
        mesh="shard 2",
        wire=[session_pb2.WireCount(kind="result", sent_bytes=11, received_bytes=22)],
        link_rates=session_pb2.LinkRates(up_bytes_per_second=5.0, down_bytes_per_second=6.0),
        upload_pace=session_pb2.UploadPace(held_by="limit", bytes_per_second=4.0),
        exchange_speed=session_pb2.ExchangeSpeed(
            bytes_per_second=1e9, uplink="int4", downlink="int4"
        ),
        utilisation=session_pb2.Utilisation(
            round=1,
            tokens_per_second=100.0,
            flops_per_second=1e9,
            mfu=0.25,
            peak_flops_per_second=4e9,
            is_peak_measured=True,
            compute_share=0.5,
            local_communication_share=0.2,
            publish_share=0.03,
            adopt_share=0.02,
            exchange_share=0.15,
            waiting_share=0.1,
            peak_memory_bytes=4096,
        ),
    )
    beat.MergeFrom(session_pb2.HeartbeatRequest(**changes))  # type: ignore[arg-type]
    return beat


async def go_through_a_round(a: FakeNode, b: FakeNode) -> None:
    plans = [(await node.next("plan")).plan for node in (a, b)]
    for node in (a, b):
        await node.trained(1)
        await node.reduced(plans[0])
    for node in (a, b):
        await node.held(plans[0])
    for node in (a, b):
        await node.next("commit")
        wire = [session_pb2.WireCount(kind="result", sent_bytes=11, received_bytes=22)]
        await node.report(1, applied=session_pb2.AppliedReport(outer_digest=MIDDLE, wire=wire))


async def test_a_round_and_its_nodes_are_told_to_prometheus(tmp_path: Path) -> None:
    home = home_with_pages(tmp_path / "home")
    async with serving(home) as coordinator, two_nodes(home) as (a, b):
        await go_through_a_round(a, b)
        await a.session.Heartbeat(beat_of(a))
        other = beat_of(b)
        other.utilisation.ClearField("local_communication_share")
        other.utilisation.ClearField("mfu")
        await b.session.Heartbeat(other)
        values = await scraped(coordinator)

        def value(name: str, **labels: str) -> float:
            return values[name][frozenset(labels.items())]

        assert value("atoll_committed_round") == 1
        assert value("atoll_open_round") == 2
        assert value("atoll_run_rounds") == 2
        assert value("atoll_run_finished") == 0
        assert value("atoll_digests_agree") == 1
        assert value("atoll_parameters") == NUM_ELEMENTS
        assert value("atoll_committed_tokens_total") == 2000
        assert value("atoll_round_tokens") == 2000
        assert value("atoll_tokens_per_second") == 200
        assert value("atoll_training_loss_nats") == 2.0
        assert value("atoll_commits_total") == 1
        assert value("atoll_void_slices_total") == 0
        assert value("atoll_wire_bytes_total", direction="received", kind="result") == 44
        assert value("atoll_members", state="ready") == 2
        assert value("atoll_members", state="lost") == 0
        assert value("atoll_samples", state="leased") > 0
        phases = {dict(labels)["phase"] for labels in values["atoll_phase_seconds_total"]}
        assert {"waiting", "training", "exchanging", "applying"} <= phases
        # Counted from before the desk is there, and read after its uptime: no second is in none.
        seconds = sum(values["atoll_phase_seconds_total"].values())
        assert seconds >= value("atoll_uptime_seconds") > 0

        one = {"node": "node-a", "node_id": a.node_id}
        two = {"node": "node-b", "node_id": b.node_id}
        shares = [value("atoll_node_time_share", **one, part=part) for part in PARTS]
        assert sum(shares) == pytest.approx(1.0)
        assert value("atoll_node_time_share", **one, part="local_communication") == 0.2
        unknown = frozenset({**two, "part": "local_communication"}.items())
        assert unknown not in values["atoll_node_time_share"], "not measured is not 0"
        assert value("atoll_node_mfu_ratio", **one) == 0.25
        assert frozenset(two.items()) not in values["atoll_node_mfu_ratio"]
        assert value("atoll_node_peak_flops_per_second", **one, origin="measured") == 4e9
        assert value("atoll_node_peak_memory_bytes", **one) == 4096
        assert value("atoll_node_committed_tokens_total", **one) == 1000
        sent = {**one, "direction": "sent", "kind": "result"}
        assert value("atoll_node_bytes_total", **sent) == 11
        assert value("atoll_node_link_bytes_per_second", **one, direction="down") == 6.0
        info = {dict(labels)["node"]: dict(labels) for labels in values["atoll_node_info"]}
        assert (info["node-a"]["mesh"], info["node-a"]["device"]) == ("shard 2", "cpu")
        assert all(v >= 0 for samples in values.values() for v in samples.values())

        await b.session.Detach(session_pb2.DetachRequest(session_id=b.session_id, reason="bye"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while value("atoll_members", state="left") != 1:
                values = await scraped(coordinator)
        assert frozenset(two.items()) not in values["atoll_node_tokens_per_second"]
        assert value("atoll_node_committed_tokens_total", **two) == 1000


async def test_every_declared_metric_is_told_and_none_that_is_not(tmp_path: Path) -> None:
    home = home_with_pages(tmp_path / "home", text=f"{PATIENT}[evaluation]\nevery_rounds = 1\n")
    async with serving(home) as coordinator, two_nodes(home) as (a, b):
        await go_through_a_round(a, b)
        code = session_pb2.SourceLoss(source="code", loss=3.5, tokens=64)
        evaluated = session_pb2.EvaluatedReport(
            held_out_loss=3.5, tokens=64, metric=0.5, by_source=[code]
        )
        for node in (a, b):
            await node.next("evaluate")
            await node.report(1, evaluated=evaluated)
        for node in (a, b):
            await node.session.Heartbeat(beat_of(node))
        backup = Backup(
            run_name="r", committed_round=1, total_rounds=9, num_bytes=1, authority_key=""
        )
        shown = json.loads((await ask(coordinator, "/now"))[1])["run"]["backup"]
        assert shown.startswith("none is made") and "atoll coordinator backup DIR" in shown
        made = Made(place="s3://b/run/one", backup=backup, next_seconds=600)
        BackupRecords(home.directory).note("s3://b/run", made, now=time.time())
        values = await scraped(coordinator)
        for path in ("/now", "/metrics", "/news"):
            assert "s3://" not in (await ask(coordinator, path))[1]
    assert set(values) == {metric.name for metric in (*RUN_METRICS, *NODE_METRICS)}


async def test_pages_are_read_only_and_name_no_secret(tmp_path: Path) -> None:
    home = home_with_pages(tmp_path / "home")
    async with serving(home) as coordinator, two_nodes(home) as (a, _):
        await a.session.Heartbeat(beat_of(a, outer_round=0))
        assert (await ask(coordinator, "/metrics", "POST"))[0] == 405
        assert (await ask(coordinator, "/run.toml"))[0] == 404
        text = "".join(
            [(await ask(coordinator, path))[1] for path in ("/metrics", "/now", "/news")]
        )
        assert a.node_id in text
        for secret in ("/ip4/", "BEGIN", a.identity.public_key.hex(), str(home.directory)):
            assert secret not in text


async def test_who_asks_for_metrics_in_a_loop_has_them_made_once_in_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On loopback nobody needs a token, and a status of a large swarm takes a core for long."""
    monkeypatch.setattr("coordinator.dashboard.pages.EVERY_SECONDS", 1e6)
    home = home_with_pages(tmp_path / "home")
    async with serving(home) as coordinator, two_nodes(home) as (a, _):
        before = [await ask(coordinator, path) for path in ("/metrics", "/news")]
        await a.session.Detach(session_pb2.DetachRequest(session_id=a.session_id, reason="bye"))
        assert [await ask(coordinator, path) for path in ("/metrics", "/news")] == before


async def test_a_browser_is_told_the_run_and_its_nodes(tmp_path: Path) -> None:
    home = home_with_pages(tmp_path / "home")
    async with serving(home) as coordinator, two_nodes(home) as (a, b):
        await go_through_a_round(a, b)
        await a.session.Heartbeat(beat_of(a))
        for path, what in (
            ("/", "<!doctype html>"),
            ("/page.js", '"use strict"'),
            ("/uplot.js", "uPlot"),
        ):
            status, text = await ask(coordinator, path)
            assert (status, what in text) == (200, True)
        view = json.loads((await ask(coordinator, "/now"))[1])
        history = json.loads((await ask(coordinator, "/history"))[1])
    assert view["run"]["sentence"].startswith("Training round 2 of 2; 2 of 2 nodes ready")
    assert view["nodes"][0]["time"] == "50% compute, 20% local, 20% exchange, 10% waiting"
    assert view["rounds"][0]["reason"] == "all slices are committed"
    assert history["rounds"] == [1]


async def test_what_happens_is_told_in_words_by_the_first_picture_after_it(tmp_path: Path) -> None:
    """And a picture is a second old at most while making one is quick."""
    assert EVERY_SECONDS <= 1
    home = home_with_pages(tmp_path / "home")
    async with serving(home) as coordinator, two_nodes(home) as (_, b):
        port = coordinator.dashboard_port
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(PATIENCE_SECONDS):
            before = await _event(reader)
            await b.session.Detach(session_pb2.DetachRequest(session_id=b.session_id, reason="bye"))
            left_at = time.time()
            while (after := await _event(reader))["at"] < left_at:
                pass
        writer.close()
    assert "node-b has left" not in json.dumps(before)
    assert "node-b has left" in json.dumps(after)
    assert [node["state"] for node in after["nodes"]] == ["ready", "left"]


async def test_a_picture_has_two_held_out_losses_and_no_more_however_long_the_run_is(
    tmp_path: Path,
) -> None:
    home = home_with_pages(tmp_path / "home")
    async with serving(home) as coordinator, two_nodes(home):
        state = coordinator.driver.state
        losses = tuple(HeldOut(round=n, loss=9.0 - n / 1000, tokens=64) for n in range(3000))
        coordinator.driver._state = replace(state, held_out=losses)
        sizes = []
        for path in ("/now", "/history"):
            status, text = await ask(coordinator, path)
            assert status == 200
            sizes.append(len(text))
        view = json.loads((await ask(coordinator, "/now"))[1])
        metrics = await scraped(coordinator)
        coordinator.driver._state = state
    run = view["run"]
    assert (run["heldOutFirst"], run["heldOutNow"]) == ("9.000", "6.001")
    assert sizes[0] < 10_000 < sizes[1]
    assert metrics["atoll_held_out_loss_round"][frozenset()] == 2999


async def test_who_watches_gets_the_next_picture_and_all_get_the_same(tmp_path: Path) -> None:
    home = home_with_pages(tmp_path / "home")
    async with serving(home) as coordinator:
        readers = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", coordinator.dashboard_port)
            writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            readers.append((reader, writer))
        async with asyncio.timeout(PATIENCE_SECONDS):
            told = [[await _event(reader) for _ in range(2)] for reader, _ in readers]
        for _, writer in readers:
            writer.close()
    assert told[0][0] == told[1][0] == told[2][0]
    assert all(first["at"] < second["at"] for first, second in told)


async def _event(reader: asyncio.StreamReader) -> dict[str, Any]:
    while not (line := await reader.readline()).startswith(b"data: "):
        assert line, "the stream ended"
    told: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return told


async def test_health_is_200_until_the_clock_of_rounds_stops(tmp_path: Path) -> None:
    async with serving(home_with_pages(tmp_path / "home")) as coordinator:
        status, text = await ask(coordinator, "/healthz")
        assert (status, json.loads(text)["status"]) == (200, "ok")
        assert json.loads(text)["committed_round"] == 0
        coordinator._clock_task.cancel()
        await asyncio.wait([coordinator._clock_task])
        status, text = await ask(coordinator, "/healthz")
        assert (status, json.loads(text)["status"]) == (503, "the clock of rounds has stopped")


async def test_whoever_asks_for_health_without_end_has_no_status_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a status of thousands of nodes, for anybody")

    monkeypatch.setattr(StatusDesk, "get_status", made)
    monkeypatch.setattr(StatusDesk, "run_status", made)
    async with serving(home_with_pages(tmp_path / "home")) as coordinator:
        assert (await ask(coordinator, "/healthz"))[0] == 200


async def test_a_taken_address_is_refused_in_one_sentence_and_frees_the_folder(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        home = home_with_pages(tmp_path / "home", address)
        with pytest.raises(SystemRefusedError) as refused:
            await Coordinator.start(home, home.config)
    assert str(refused.value) == (
        f"cannot serve pages on {address}: Address already in use; "
        "choose another address with --dashboard HOST:PORT, or leave it out"
    )
    async with serving(home) as coordinator:  # the port is free now, and so is the folder
        assert (await ask(coordinator, "/healthz"))[0] == 200


async def test_unasked_pages_are_served_on_this_machine_at_the_next_port_that_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        monkeypatch.setattr("coordinator.settings.DEFAULT_DASHBOARD", f"127.0.0.1:{first}")
        home = home_with_pages(tmp_path / "home", f"127.0.0.1:{first}")
        async with serving(home) as coordinator:
            assert coordinator.dashboard_port not in (None, first)
            assert (await ask(coordinator, "/healthz"))[0] == 200
    async with serving(home) as coordinator:
        assert coordinator.dashboard_port == first


async def test_unasked_pages_that_cannot_be_served_do_not_keep_a_coordinator_from_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = "192.0.2.1:7702"  # an address that no machine has
    monkeypatch.setattr("coordinator.settings.DEFAULT_DASHBOARD", nowhere)
    home = home_with_pages(tmp_path / "home", nowhere)
    async with serving(home) as coordinator:
        assert coordinator.dashboard_port is None


async def test_who_wants_no_page_has_none(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home) as coordinator:
        assert coordinator.dashboard_port is None


def test_who_wants_no_pages_does_not_wait_for_their_libraries() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import sys, coordinator.app; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.partition(".")[0] for name in told.stdout.split()}
    assert "grpc" in loaded
    assert not loaded & {"uvicorn", "starlette", "prometheus_client", "torch"}
