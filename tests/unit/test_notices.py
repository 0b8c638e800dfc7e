"""When a node leaves because its machine goes: what clouds say, and what is made of it."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from node.machine.notices import (
    LEAD_SECONDS,
    Notice,
    aws_notice,
    azure_notice,
    cloud_of,
    gcp_notice,
    leaving_of,
)

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def test_a_machine_is_known_by_its_firmware() -> None:
    assert cloud_of({"sys_vendor": "Amazon EC2"}) == "aws"
    assert cloud_of({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}) == "aws"
    assert cloud_of({"product_name": "Google Compute Engine"}) == "gcp"
    tag = "7783-7084-3265-9085-8269-3286-77"
    assert cloud_of({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": tag}) == "azure"
    assert cloud_of({"sys_vendor": "Microsoft Corporation"}) is None, "a Surface, or Hyper-V"
    assert cloud_of({}) is None


def test_aws_says_when() -> None:
    body = '{"action": "terminate", "time": "2026-03-01T12:01:30Z"}'
    notice = aws_notice(body, now=NOW)
    assert notice == Notice(what="AWS is about to terminate this spot machine", seconds_left=90)
    late = aws_notice(body, now=NOW + timedelta(hours=1))
    assert late is not None and late.seconds_left == 0


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"action": "stop", "time": "soon"}'])
def test_what_is_no_notice_of_aws_is_refused(body: str) -> None:
    with pytest.raises(ValueError):
        aws_notice(body, now=NOW)


def test_google_tells_of_preemption_and_of_maintenance_that_ends_a_machine() -> None:
    assert gcp_notice(preempted="FALSE\n", maintenance="NONE\n") is None
    assert gcp_notice(preempted="FALSE", maintenance="MIGRATE_ON_HOST_MAINTENANCE") is None
    preempted = gcp_notice(preempted="TRUE", maintenance="NONE")
    assert preempted is not None and preempted.seconds_left == 30
    stopped = gcp_notice(preempted="FALSE", maintenance="TERMINATE_ON_HOST_MAINTENANCE")
    assert stopped is not None and stopped.seconds_left == 60


def azure(*events: dict[str, object]) -> str:
    return json.dumps({"DocumentIncarnation": 1, "Events": list(events)})


def event(kind: str, *machines: str, seconds: float | None = 30) -> dict[str, object]:
    at = None if seconds is None else NOW + timedelta(seconds=seconds)
    return {
        "EventId": "1",
        "EventType": kind,
        "Resources": list(machines),
        "EventStatus": "Started" if seconds is None else "Scheduled",
        "NotBefore": at.strftime("%a, %d %b %Y %H:%M:%S GMT") if at else "",
    }


def test_azure_tells_of_several_machines_and_of_several_ends() -> None:
    assert azure_notice(azure(), machine="mine", now=NOW) is None
    others = azure(event("Preempt", "other"), event("Freeze", "mine", "other"))
    assert azure_notice(others, machine="mine", now=NOW) is None
    both = azure(event("Terminate", "MINE", seconds=300), event("Preempt", "other", "mine"))
    notice = azure_notice(both, machine="mine", now=NOW)
    assert notice == Notice(what="Azure is about to preempt this machine", seconds_left=30)
    begun = azure_notice(azure(event("Preempt", "mine", seconds=None)), machine="mine", now=NOW)
    assert begun is not None and begun.seconds_left == 0
    with pytest.raises(ValueError):
        azure_notice('{"error": "no"}', machine="mine", now=NOW)


def test_a_node_trains_on_until_two_minutes_before_and_leaves_some_time_for_the_disk() -> None:
    assert leaving_of(Notice(what="x", seconds_left=LEAD_SECONDS + 1)) is None
    within = {}
    for seconds in (120, 30, 4):
        leaving = leaving_of(Notice(what="x", seconds_left=seconds))
        assert leaving is not None
        within[seconds] = leaving.within_seconds
    assert within == {120: 108, 30: 25, 4: 0}
