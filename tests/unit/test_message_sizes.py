"""What honest nodes of the largest swarms send is well below what each call may have."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from coordinator.services.checks import MAX_FRAGMENTS, MAX_MULTIADDR_LENGTH, MAX_SPANS
from coordinator.services.session import MAX_STRANGERS
from node.link.calls import CoordinatorLink, in_messages
from protocol.v1 import session_pb2
from protocol.wire import convert
from protocol.wire.channel import (
    BYTES_OF_CALLS,
    MAX_MESSAGE_BYTES,
    OTHER_BYTES,
    USUAL_REPORTS_BYTES,
    most_bytes_of,
)
from protocol.wire.messages import Reduced
from protocol.wire.rounds import (
    MOST_MULTIADDRS,
    Commit,
    ContributionDigest,
    Contributor,
    Digest,
    NodeId,
    SliceOutcome,
)

NODES = [NodeId(f"{number:032x}") for number in range(1000)]


def of_session(call: str) -> int:
    return most_bytes_of(f"/atoll.v1.SessionService/{call}", most=MAX_MESSAGE_BYTES)


def test_a_heartbeat_that_reaches_none_of_a_thousand_members_has_room() -> None:
    request = session_pb2.HeartbeatRequest(
        unreachable_ids=NODES,
        narrow_ids=NODES,
        punched_ids=NODES,
        through=[session_pb2.Through(node_id=one, through_id=one) for one in NODES],
        reach_back=[session_pb2.RoundSpan(first=1 << 40, last=1 << 41)] * MAX_SPANS,
        waiting_for="w" * 256,
    )
    assert request.ByteSize() < of_session("Heartbeat")
    assert len(NODES) <= MAX_STRANGERS


def test_an_attaching_node_with_all_that_it_may_tell_has_room() -> None:
    request = session_pb2.AttachRequest(
        address=session_pb2.PeerAddress(multiaddrs=["a" * MAX_MULTIADDR_LENGTH] * MOST_MULTIADDRS),
        layout=session_pb2.LayoutSummary(fragment_elements=[1 << 53] * MAX_FRAGMENTS),
        codecs=["c" * 64] * 2,
    )
    assert request.ByteSize() < of_session("Attach") / 2


def test_the_run_owner_may_send_more_than_a_member() -> None:
    assert most_bytes_of("/atoll.v1.OperatorService/AmendRun", most=1 << 22) == 1 << 22
    assert of_session("GetRun") == OTHER_BYTES
    assert max(BYTES_OF_CALLS.values()) < MAX_MESSAGE_BYTES


async def test_a_reducer_of_everything_from_a_thousand_members_reports_in_several_messages() -> (
    None
):
    """All 64 slices in one message would have 9 MB, which no coordinator takes: it would never be heard."""
    report = Reduced(
        slice_index=0,
        digest=None,
        contributors=tuple(
            Contributor(node_id=one, samples=1 << 20, tokens=1 << 40) for one in NODES
        ),
        contributions=tuple(ContributionDigest(bytes(range(16))) for _ in NODES),
        factors=tuple(20000 for _ in NODES),
        late=tuple(NODES),
        missed=tuple((one, 1 << 20) for one in NODES),
    )
    sent: list[session_pb2.ReportRequest] = []

    async def heard(request: session_pb2.ReportRequest) -> None:
        sent.append(request)

    link = CoordinatorLink(cast("Any", SimpleNamespace(Report=heard)))
    await link.report(7, [(3, replace(report, slice_index=index)) for index in range(64)])
    assert [told.reduced.slice_index for one in sent for told in one.reports] == list(range(64))
    assert {one.session_id for one in sent} == {7}
    assert max(one.ByteSize() for one in sent) < of_session("Report")


def test_what_has_room_goes_in_one_message() -> None:
    reports = [session_pb2.Report(round=number) for number in range(1, 100)]
    assert list(in_messages(reports, most_bytes=USUAL_REPORTS_BYTES)) == [reports]
    assert list(in_messages([], most_bytes=USUAL_REPORTS_BYTES)) == []


def test_what_is_too_long_for_any_message_goes_alone() -> None:
    reports = [session_pb2.Report(round=1 << 60) for _ in range(3)]
    assert list(in_messages(reports, most_bytes=1)) == [[one] for one in reports]


def test_the_commit_of_a_round_of_a_thousand_nodes_can_be_brought_back() -> None:
    slices = tuple(
        SliceOutcome(
            index=index,
            start=index << 20,
            num_elements=1 << 20,
            digest=Digest(bytes(32)),
            contributors=tuple(
                Contributor(node_id=one, samples=200 + (index + place) % 50, tokens=1 << 20)
                for place, one in enumerate(NODES)
            ),
            contributions=tuple(ContributionDigest(bytes(range(16))) for _ in NODES),
            factors=tuple(20_000 for _ in NODES),
            holder_ids=tuple(NODES),
        )
        for index in range(64)
    )
    commit = Commit(round=1, fragment=0, base_digest=Digest(bytes(32)), slices=slices)
    num_bytes = convert.commit_to_wire(commit).ByteSize()
    assert 1_000_000 < num_bytes < of_session("SubmitCommits")
