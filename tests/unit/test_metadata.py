"""Three clouds' metadata services are asked as each wants it, over real HTTP."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.config import NodeSettings
from node.doctor.checks import notices_findings
from node.machine.notices import (
    Cloud,
    Leaving,
    NoAnswerError,
    cloud_here,
    heeding_notices,
    service_of,
)
from tests.fake_metadata import (
    AWS_ACTION,
    AZURE_EVENTS,
    AZURE_NAME,
    GCP,
    Metadata,
    in_seconds,
    serving,
)


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with serving() as made:
        yield made


def test_aws_is_asked_with_a_token_which_may_end(metadata: Metadata) -> None:
    aws = service_of("aws", metadata.address)
    assert aws.notice() is None
    metadata.token = "second"
    assert aws.notice() is None
    metadata.says[AWS_ACTION] = json.dumps({"action": "stop", "time": in_seconds(60)})
    notice = aws.notice()
    assert notice is not None and notice.what == "AWS is about to stop this spot machine"
    assert 50 < notice.seconds_left < 70


def test_google_is_asked_for_preemption_and_maintenance(metadata: Metadata) -> None:
    metadata.says |= {f"{GCP}preempted": "FALSE", f"{GCP}maintenance-event": "NONE"}
    gcp = service_of("gcp", metadata.address)
    assert gcp.notice() is None
    metadata.says[f"{GCP}preempted"] = "TRUE"
    notice = gcp.notice()
    assert notice is not None and notice.what == "Google is preempting this machine"


def test_azure_is_asked_for_this_machines_events(metadata: Metadata) -> None:
    metadata.says |= {AZURE_NAME: "mine", AZURE_EVENTS: '{"Events": []}'}
    azure = service_of("azure", metadata.address)
    assert azure.notice() is None
    event = {"EventType": "Terminate", "Resources": ["mine"], "NotBefore": ""}
    metadata.says[AZURE_EVENTS] = json.dumps({"Events": [event]})
    notice = azure.notice()
    assert notice is not None and notice.seconds_left == 0


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_what_is_no_answer_is_no_notice(metadata: Metadata, cloud: Cloud) -> None:
    metadata.says |= {AWS_ACTION: "<html>", AZURE_NAME: "mine", AZURE_EVENTS: "[]"}
    with pytest.raises(NoAnswerError):
        service_of(cloud, metadata.address).notice()
    with serving() as gone:
        address = gone.address
    with pytest.raises(NoAnswerError, match=r"127\.0\.0\.1"):
        service_of(cloud, address).notice()


async def test_a_node_is_told_once_and_only_when_it_is_time(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.address)
    metadata.says[AWS_ACTION] = json.dumps({"action": "terminate", "time": in_seconds(3600)})
    told: list[Leaving] = []
    heard = asyncio.Event()

    def leave(leaving: Leaving) -> None:
        told.append(leaving)
        heard.set()

    async with heeding_notices("aws", leave, every_seconds=0.001):
        while metadata.asked.count(AWS_ACTION) < 3:  # noqa: ASYNC110 - a thread sets no event
            await asyncio.sleep(0.001)
        assert told == []
        metadata.says[AWS_ACTION] = json.dumps({"action": "terminate", "time": in_seconds(100)})
        async with asyncio.timeout(30):
            await heard.wait()
        num_asked = len(metadata.asked)
        await asyncio.sleep(0.01)
        assert len(metadata.asked) == num_asked, "nobody asks any more"
    (leaving,) = told
    assert 60 < leaving.within_seconds < 95 and "AWS is about to terminate" in leaving.reason


async def test_where_no_notices_are_wanted_nobody_is_asked(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.address)
    async with heeding_notices("off", lambda _: None, every_seconds=0):
        await asyncio.sleep(0.01)
    assert metadata.asked == []
    assert cloud_here("auto", tmp_path) is None
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    assert cloud_here("auto", tmp_path) == "aws"
    assert cloud_here("gcp", tmp_path) == "gcp"
    assert cloud_here("off", tmp_path) is None


def test_the_doctor_says_whether_the_cloud_can_be_asked(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.address)
    (fine,) = notices_findings(NodeSettings(name="n", cloud="aws"))
    assert (fine.verdict, fine.what) == ("fine", "aws answers: this machine stays")
    metadata.says[AWS_ACTION] = "<html>"
    (advice,) = notices_findings(NodeSettings(name="n", cloud="aws"))
    assert advice.verdict == "advice" and "does not answer" in advice.what
    assert notices_findings(NodeSettings(name="n", cloud="off")) == []
