"""What travels between a node and its coordinator, as the node's values."""

import json
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from structlog.testing import capture_logs

from coordinator.services.session import SentMessages
from node.link import renewing
from node.link.calls import Attachment, CoordinatorLink, RunOver
from node.link.renewing import RenewingCalls
from protocol.errors import ConfigError, ProtocolMismatchError, UnavailableError
from protocol.run.amendments import amended
from protocol.run.run_spec import RunSpec
from protocol.trust.credentials import Credentials
from protocol.trust.identity import Identity
from protocol.trust.rulings import Ruling, RulingKind, SignedRuling
from protocol.trust.signing import CommitSigner
from protocol.v1 import session_pb2 as pb
from protocol.wire import convert
from protocol.wire.messages import (
    Applied,
    CommitsWanted,
    Draining,
    Evaluated,
    EvaluationAsked,
    Held,
    Message,
    ParticipantsDeparted,
    ParticipantsIdle,
    Reduced,
    RefetchAsked,
    Report,
    ResultOffered,
    RosterChanged,
    RosterTold,
    RoundCommitted,
    RoundOpened,
    RunFinished,
    SliceTakenOver,
    Trained,
    message_to_wire,
    report_from_wire,
)
from protocol.wire.payload import WireCounts
from protocol.wire.rounds import (
    Commit,
    ContributionDigest,
    Contributor,
    CorpusSummary,
    Digest,
    LayoutSummary,
    PeerAddress,
    RosterEntry,
)
from protocol.wire.vitals import (
    FREE,
    Announcement,
    LinkRates,
    LinkState,
    UploadPace,
    Utilisation,
    Vitals,
    upload_in_words,
)
from tests.unit.exchange_scene import A, B, plan_for

SIGNER = CommitSigner(Ed25519PrivateKey.generate())
DIGEST = Digest(bytes(range(32)))
COMMIT = Commit(round=4, fragment=0, base_digest=DIGEST, slices=())
MEMBER = RosterEntry(
    node_id=A, node_name="attic", address=PeerAddress(public_key=bytes(32), multiaddrs=("/x",))
)
VITALS = Vitals(
    outer_round=3,
    outer_digest=DIGEST,
    outer_incarnation=0,
    activity="waiting",
    waiting_for="",
    inner_step=2,
    loss=1.0,
    tokens_per_second=200.0,
    wire={},
)


class Stub:
    """Answers with what it was given, and keeps what it was asked."""

    SubmitCommits: Any  # is asked of none
    SubmitRulings: Any
    Detach: Any

    def __init__(self, answers: tuple[Any, ...] = (None,)) -> None:
        self.answers = answers
        self.answer = answers[0]
        self.asked: list[Any] = []
        self.is_cancelled = False

    async def GetRun(self, request: Any) -> Any:  # noqa: N802 - gRPC's names
        return self.answer

    async def Attach(self, request: Any) -> Any:  # noqa: N802
        return self.answer

    async def Report(self, request: Any) -> Any:  # noqa: N802
        self.asked.append(request)

    async def Heartbeat(self, request: Any) -> Any:  # noqa: N802
        self.asked.append(request)
        return pb.HeartbeatResponse()

    async def ListCommits(self, request: Any) -> Any:  # noqa: N802
        self.asked.append(request)
        return self.answer

    def Subscribe(self, request: Any) -> "Stub":  # noqa: N802
        return self

    async def __aiter__(self) -> AsyncIterator[Any]:
        for answer in self.answers:
            yield answer

    def cancel(self) -> None:
        self.is_cancelled = True


def link_that_answers(*answers: Any) -> tuple[CoordinatorLink, Stub]:
    stub = Stub(answers)
    return CoordinatorLink(stub), stub


@pytest.mark.parametrize(
    "message",
    [
        RosterTold(members=(MEMBER,)),
        RoundOpened(plan=plan_for(A, B)),
        RoundCommitted(commit=SIGNER.signed(COMMIT)),
        ParticipantsDeparted(round=4, node_ids=(A, B)),
        ParticipantsIdle(round=4, node_ids=(A,)),
        SliceTakenOver(round=4, slice_index=1, reducer_id=B, attempt=2, contribute_seconds=3.5),
        ResultOffered(round=4, slice_index=1, digest=DIGEST, holder_ids=(A, B)),
        CommitsWanted(after_round=4),
        EvaluationAsked(round=4),
        RefetchAsked(round=4, outer_digest=DIGEST, reason="odd"),
        RunFinished(round=4, outer_digest=DIGEST, reason="done"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_what_the_coordinator_tells_is_what_the_node_hears(message: Message) -> None:
    link, stub = link_that_answers(SentMessages(SIGNER).made_of(message))
    assert [heard async for heard in link.messages(1)] == [message]
    assert stub.is_cancelled  # or gRPC keeps the stream open


def test_a_commit_leaves_with_a_signature_and_each_message_is_made_once() -> None:
    sent, message = SentMessages(SIGNER), RoundCommitted(commit=COMMIT)
    assert SIGNER.has_signed(convert.commit_from_wire(sent.made_of(message).commit))
    assert sent.made_of(message) is sent.made_of(message)


async def test_changes_of_the_roster_add_up() -> None:
    moved = replace(MEMBER, node_name="moved")
    other = replace(MEMBER, node_id=B)
    told: tuple[Message, ...] = (
        RosterTold(members=(MEMBER,)),
        RosterChanged(joined=(other,), gone=()),
        RosterChanged(joined=(moved,), gone=()),
        RosterChanged(joined=(), gone=(other.node_id,)),
    )
    link, _ = link_that_answers(*map(message_to_wire, told))
    heard = [
        message.members async for message in link.messages(1) if isinstance(message, RosterTold)
    ]
    assert heard == [(MEMBER,), (MEMBER, other), (moved, other), (moved,)]


def of_a_later_release(optional: str = "") -> pb.SubscribeResponse:
    """An event with the number 1000, which no release has yet."""
    known = pb.SubscribeResponse(optional=optional)
    return pb.SubscribeResponse.FromString(known.SerializeToString() + b"\xc2\x3e\x03new")


async def test_what_a_later_release_calls_optional_is_passed_over_with_one_line_in_the_log() -> (
    None
):
    new, old = (
        of_a_later_release("mood\x1b[2J" + "y" * 99),
        message_to_wire(CommitsWanted(after_round=4)),
    )
    link, _ = link_that_answers(new, old, new, old)
    with capture_logs() as logged:
        heard = [message async for message in link.messages(1)]
    assert heard == [CommitsWanted(after_round=4)] * 2
    (line,) = logged
    assert line["told"].startswith("mood\ufffd[2Jy") and len(line["told"]) == 64


async def test_a_later_releases_message_that_must_be_followed_ends_with_what_to_install() -> None:
    link, _ = link_that_answers(of_a_later_release())
    with pytest.raises(ProtocolMismatchError, match="does not know and must follow") as refused:
        await anext(aiter(link.messages(1)))
    assert "install a later release of Atoll for this node" in refused.value.next_step


@pytest.mark.parametrize(
    ("report", "kind", "fields"),
    [
        (
            Trained(inner_steps=3, samples=12, tokens=96, loss=1.5, seconds=2.0),
            "trained",
            {"inner_steps": 3, "samples": 12, "tokens": 96, "loss": 1.5, "seconds": 2.0},
        ),
        (
            Reduced(
                slice_index=1,
                digest=DIGEST,
                contributors=(Contributor(node_id=A, samples=12, tokens=96),),
                contributions=(ContributionDigest(bytes(range(16))),),
            ),
            "reduced",
            {"slice_index": 1, "digest": DIGEST},
        ),
        (
            Reduced(slice_index=1, digest=None, contributors=(), contributions=()),
            "reduced",
            {"digest": b""},
        ),
        (Held(slice_index=0, digest=DIGEST), "held", {"slice_index": 0, "digest": DIGEST}),
        (Held(slice_index=0, digest=DIGEST, agreement=-0.5), "held", {"agreement": -0.5}),
        (
            Applied(outer_digest=DIGEST, incarnation=3, wire={"result": (5, 6)}),
            "applied",
            {
                "outer_digest": DIGEST,
                "incarnation": 3,
                "wire": [pb.WireCount(kind="result", sent_bytes=5, received_bytes=6)],
            },
        ),
        (Draining(), "draining", {}),
        (
            Evaluated(held_out_loss=0.0, tokens=0),
            "evaluated",
            {"held_out_loss": 0.0, "tokens": 0},
        ),
    ],
)
async def test_every_report_says_what_it_is_even_when_it_is_zero(
    report: Report, kind: str, fields: dict[str, Any]
) -> None:
    link, stub = link_that_answers(None)
    await link.report(7, [(4, report)])
    request = pb.ReportRequest.FromString(stub.asked[0].SerializeToString())
    (sent,) = request.reports
    assert (request.session_id, sent.round, sent.WhichOneof("report")) == (7, 4, kind)
    body = getattr(sent, kind)
    assert {name: getattr(body, name) for name in fields} == fields
    assert report_from_wire(sent, most_contributors=1) == report


async def test_a_run_file_that_reads_differently_here_is_refused() -> None:
    spec = RunSpec()
    right = pb.GetRunResponse(run_json=spec.canonical_json(), run_digest=spec.digest())
    link, _ = link_that_answers(right)
    assert await link.get_run() == spec == link.rules
    assert link.over is None
    finer = amended(spec, (("exchange.downlink", "fp32"),))
    right.amended_json = finer.canonical_json()
    assert await link.get_run() == spec
    assert link.rules == finer
    right.over, right.last_round, right.is_held_here = "done", 3, True
    link, _ = link_that_answers(right)
    await link.get_run()
    assert link.over == RunOver(why="done", last_round=3, is_held_here=True)
    right.run_digest = bytes(32)
    with pytest.raises(ProtocolMismatchError, match="reads as"):
        await link_that_answers(right)[0].get_run()


async def test_a_run_whose_codec_this_node_lacks_is_refused_with_what_to_do() -> None:
    tables = RunSpec().model_dump(mode="json")
    tables["exchange"]["downlink"] = "ec9"
    answer = pb.GetRunResponse(run_json=json.dumps(tables), run_digest=DIGEST)
    with pytest.raises(ConfigError, match=r"downlink = 'ec9': input should be 'fp32'") as refused:
        await link_that_answers(answer)[0].get_run()
    assert (
        refused.value.next_step == "install the coordinator's version of Atoll: 'atoll --version'"
    )


ANNOUNCEMENT = Announcement(
    node_name="attic",
    address=MEMBER.address,
    run_digest=DIGEST,
    layout=convert.from_wire(pb.LayoutSummary(digest=DIGEST, fragment_elements=[1]), LayoutSummary),
    codecs=("ec2/1", "int4/1"),
    corpus=convert.from_wire(pb.CorpusSummary(digest=DIGEST), CorpusSummary),
    outer_round=0,
    outer_digest=DIGEST,
    outer_incarnation=0,
    device="cpu",
    num_ranks=1,
    version="1",
    process_id=7,
)


async def test_what_the_coordinator_answers_to_an_attach_is_read_whole() -> None:
    paused = Ruling(
        number=1, before=bytes(32).hex(), kind=RulingKind.PAUSED, by="operator", unix_seconds=0.0
    )
    attachment = Attachment(
        session_id=3,
        heartbeat_seconds=1.5,
        committed_round=5,
        node_name="attic-2",
        num_rulings=1,
        rulings_digest=paused.digest(),
        rulings=(SignedRuling(ruling=paused, signature=b"s"),),
        renew_in_seconds=60.0,
        unix_seconds=7e8,
        other_data_names=("cellar",),
    )
    answer = convert.to_wire(attachment, pb.AttachResponse)
    link, _ = link_that_answers(answer)
    assert await link.attach(ANNOUNCEMENT) == attachment


async def test_an_answer_with_a_digest_of_the_wrong_size_is_refused() -> None:
    link, _ = link_that_answers(pb.AttachResponse(rulings_digest=b"short"))
    with pytest.raises(ProtocolMismatchError, match="has 5 bytes instead of 32"):
        await link.attach(ANNOUNCEMENT)


async def test_commits_are_listed_after_a_round() -> None:
    answer = pb.ListCommitsResponse(commits=[convert.commit_to_wire(COMMIT)])
    link, stub = link_that_answers(answer)
    assert await link.list_commits(3) == (COMMIT,)
    assert stub.asked[0].after_round == 3


async def test_a_heartbeat_has_what_the_node_made_of_its_round_and_no_mfu_without_a_peak() -> None:
    made = Utilisation(
        round=3,
        tokens_per_second=200.0,
        flops_per_second=2e9,
        mfu=None,
        peak_flops_per_second=None,
        is_peak_measured=False,
        compute_share=0.5,
        publish_share=0.125,
        adopt_share=0.25,
        waiting_share=0.03125,
        local_communication_share=None,
        exchange_share=0.0625,
        peak_memory_bytes=77,
    )
    stub = Stub()
    link = CoordinatorLink(stub)
    measured = replace(
        made,
        local_communication_share=0.0,
        mfu=0.5,
        peak_flops_per_second=4e9,
        is_peak_measured=True,
    )
    for utilisation in (None, made, measured):
        await link.heartbeat(
            1, replace(VITALS, utilisation=utilisation, mesh="tensor 2", congestion_control="bbr")
        )
    nothing, without, with_mfu = stub.asked
    assert not nothing.HasField("utilisation")
    expected = {k: v for k, v in asdict(made).items() if v is not None and v is not False}
    assert {field.name: value for field, value in without.utilisation.ListFields()} == expected
    of_peak = with_mfu.utilisation
    assert (of_peak.mfu, of_peak.peak_flops_per_second, of_peak.is_peak_measured) == (
        0.5,
        4e9,
        True,
    )
    assert of_peak.HasField("local_communication_share")  # none with one rank: that is known
    assert (with_mfu.mesh, with_mfu.congestion_control) == ("tensor 2", "bbr")


async def test_a_heartbeat_tells_what_the_link_carries_once_it_was_measured() -> None:
    stub = Stub()
    link = CoordinatorLink(stub)
    await link.heartbeat(1, VITALS)
    await link.heartbeat(
        1, replace(VITALS, link=LinkState(link_rates=LinkRates(up_bytes_per_second=5e6)))
    )
    unknown, up_only = stub.asked
    assert not unknown.HasField("link_rates")
    assert up_only.link_rates == pb.LinkRates(up_bytes_per_second=5e6)


async def test_a_heartbeat_tells_what_keeps_uploads_from_going_faster_while_there_are_any() -> None:
    stub = Stub()
    link = CoordinatorLink(stub)
    await link.heartbeat(1, VITALS)
    for pace in (FREE, UploadPace(held_by="limit", bytes_per_second=2e6)):
        await link.heartbeat(1, replace(VITALS, link=LinkState(upload_pace=pace)))
    nothing, free, limited = stub.asked
    assert not nothing.HasField("upload_pace")
    assert upload_in_words(free.upload_pace) == "as fast as the network takes it"
    assert upload_in_words(limited.upload_pace) == "its owner's limit of 2 MB/s"


class Channel:
    """To the place that it was opened for."""

    def __init__(self, where: str) -> None:
        self.where = where

    async def close(self, _grace: float | None = None) -> None:
        pass


async def test_where_a_name_led_is_tried_in_turns_with_the_name_when_that_leads_nowhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here, asked = {"train.example.org"}, []

    class Reached(Stub):
        def __init__(self, channel: Channel) -> None:
            super().__init__()
            self.where = channel.where

        async def Heartbeat(self, request: Any) -> Any:  # noqa: N802
            asked.append(self.where)
            if self.where not in here:
                raise UnavailableError("nobody answers", next_step="try again")
            return pb.HeartbeatResponse()

    monkeypatch.setattr(
        renewing,
        "open_channel",
        lambda ours, _counts, *, address=None: Channel(address or ours.host),
    )
    monkeypatch.setattr(renewing, "SessionServiceStub", Reached)
    monkeypatch.setattr(renewing, "addresses_of", lambda host: ("2001:db8::1", "192.0.2.1"))
    ours = Credentials(
        swarm_id="s",
        run_name="r",
        host="train.example.org",
        control_port=7700,
        authority_pem=b"",
        certificate_pem=b"",
        key_pem=b"",
        folder=tmp_path,
    )
    async with RenewingCalls(ours, Identity.generate(), WireCounts()) as link:
        await link.Heartbeat(None)
        assert link._noting is not None
        await link._noting
        here.clear()
        here.add("192.0.2.1")
        for _ in range(3):
            with pytest.raises(UnavailableError):
                await link.Heartbeat(None)
        for _ in range(2):  # and stays where it is answered
            await link.Heartbeat(None)
    assert asked == [
        "train.example.org",
        "train.example.org",
        "2001:db8::1",
        "train.example.org",
        "192.0.2.1",
        "192.0.2.1",
    ]
    assert link.credentials.host == "train.example.org"
