"""A node tells its owner what its heartbeats say, under the coordinator's names."""

import asyncio
import http.client
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from node.daemon import NodeFacts
from node.own_metrics import own_metrics
from protocol.errors import SystemRefusedError
from protocol.web.metrics import NODE_METRICS, PARTS
from protocol.wire.vitals import LinkState, UploadPace, Utilisation
from tests.unit.exchange_scene import A
from tests.unit.test_link_calls import VITALS

FACTS = NodeFacts(
    node_id=A, node_name="attic", public_key=bytes(32), device="cpu", num_ranks=2, version="9"
)
MADE = Utilisation(
    round=3,
    tokens_per_second=200.0,
    flops_per_second=2e9,
    mfu=None,
    peak_flops_per_second=None,
    is_peak_measured=False,
    compute_share=0.5,
    local_communication_share=0.25,
    publish_share=0.0625,
    adopt_share=0.0625,
    exchange_share=0.0625,
    waiting_share=0.0625,
    peak_memory_bytes=77,
)


def fetched(port: int | None) -> str:
    assert port is not None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


async def test_a_node_tells_what_it_would_tell_the_coordinator() -> None:
    vitals = replace(
        VITALS, utilisation=MADE, wire={"result": (5, 6)}, mesh="shard 2", let_go_rounds=2.5
    )
    async with own_metrics("127.0.0.1:0", FACTS, lambda: vitals, lambda: "attic-2") as port:
        text = await asyncio.to_thread(fetched, port)
        vitals = replace(vitals, utilisation=replace(MADE, mfu=0.5))
        again = await asyncio.to_thread(fetched, port)
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert {s.name for s in samples} <= {metric.name for metric in NODE_METRICS}
    assert {(s.labels["node"], s.labels["node_id"]) for s in samples} == {("attic-2", A)}
    values = {s.name: s.value for s in samples}
    assert values["atoll_node_late_work_let_go_rounds_total"] == 2.5
    shares = {s.labels["part"]: s.value for s in samples if s.name == "atoll_node_time_share"}
    assert set(shares) == set(PARTS)
    assert sum(shares.values()) == 1.0
    assert "mfu" not in text  # its peak is not known
    assert "atoll_node_mfu_ratio" in again  # what holds when it is asked


async def test_what_holds_uploads_back_is_a_metric_by_its_kind_while_there_are_any() -> None:
    pace = UploadPace(held_by="link", bytes_per_second=2e6)
    vitals = replace(VITALS, link=LinkState(upload_pace=pace))
    async with own_metrics("127.0.0.1:0", FACTS, lambda: vitals, lambda: "attic") as port:
        held = await asyncio.to_thread(fetched, port)
        vitals = VITALS
        assert "atoll_node_upload" not in await asyncio.to_thread(fetched, port)
    samples = [s for family in text_string_to_metric_families(held) for s in family.samples]
    told = {(s.name, s.labels["by"]): s.value for s in samples if "upload" in s.name}
    assert told == {
        ("atoll_node_upload_held", "link"): 1,
        ("atoll_node_upload_pace_bytes_per_second", "link"): 2e6,
    }


async def test_nothing_listens_unless_it_is_asked_for() -> None:
    async with own_metrics("", FACTS, lambda: VITALS, lambda: "attic") as port:
        assert port is None


async def test_an_address_of_another_machine_is_refused_in_one_sentence() -> None:
    with pytest.raises(
        SystemRefusedError,
        match=r"^cannot serve pages on 192\.0\.2\.1:9101: .*; choose another address with --metrics",
    ):
        async with own_metrics("192.0.2.1:9101", FACTS, lambda: VITALS, lambda: "attic"):
            pass
