"""The desks refuse what cannot be, before the core or the database sees it."""

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from structlog.testing import capture_logs

from coordinator.services import checks, session
from coordinator.services.answering import CALLS_A_SECOND, MOST_ATTACHES, MOST_CALLS, CallRates
from coordinator.services.session import SessionDesk
from coordinator.streams import Telemetry
from protocol.errors import (
    AtollError,
    BadDataError,
    ProtocolMismatchError,
    SessionEndedError,
    TemporaryError,
)
from protocol.run.run_files import run_from_json
from protocol.run.run_spec import RunSpec
from protocol.trust.signing import CommitSigner
from protocol.v1 import session_pb2
from protocol.wire import convert
from protocol.wire.messages import Reduced, reduced_from_wire
from protocol.wire.payload import RESULT
from protocol.wire.rounds import Commit, Digest, NodeId, SliceOutcome
from protocol.wire.versions import WIRE
from protocol.wire.vitals import LONG_WORDS, Vitals, heartbeat_of, words_for_people
from tests.unit.desk_scene import DIGEST, NODE, SIGNER, attach_request, new_desk, with_unknown_field
from tests.unit.exchange_scene import in_virtual_time
from tests.unit.payload_scene import sealed
from tests.unit.rulings_scene import amendment

T = TypeVar("T")


def field(request: session_pb2.AttachRequest, name: str, value: object) -> None:
    """Sets a field; a list replaces the one that was there."""
    *path, last = name.split(".")
    holder: object = request
    for part in path:
        holder = getattr(holder, part)
    if isinstance(value, list):
        del getattr(holder, last)[:]
        getattr(holder, last).extend(value)
    else:
        setattr(holder, last, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("node_name", ""),
        ("node_name", "n" * 65),
        ("node_name", "clear\x1b[2J"),
        ("address.public_key", b"k" * 32),
        ("address.public_key", b"short"),
        ("address.multiaddrs", ["/ip4/::1"] * 17),
        ("address.multiaddrs", ["m" * 257]),
        ("run_digest", b"d" * 31),
        ("outer_digest", b""),
        ("layout.digest", b""),
        ("codecs", ["int4/1"] * 3),
        ("codecs", ["int4/1", "x" * 1000]),
        ("layout.fragment_elements", []),
        ("layout.fragment_elements", [256, 0]),
        ("layout.fragment_elements", [1] * 1025),
        ("layout.fragment_elements", [1 << 60]),
        ("corpus.num_samples", 1 << 63),
        ("outer_round", 1 << 63),
        ("num_ranks", 1 << 20),
        ("device", "d" * 65),
    ],
)
async def test_an_attach_that_cannot_be_is_refused(name: str, value: object) -> None:
    desk, driver = new_desk()
    request = attach_request()
    field(request, name, value)
    with pytest.raises(AtollError) as refused:
        await desk.attach(NODE.node_id, request)
    assert refused.value.what
    assert not driver.state.members
    await desk.attach(NODE.node_id, attach_request())
    assert driver.state.members


async def test_the_run_owner_reads_once_that_a_node_of_another_release_is_not_let_in() -> None:
    desk, _ = new_desk()
    later = attach_request()
    later.wire_version = WIRE + 1
    with capture_logs() as logs:
        for _ in range(3):
            with pytest.raises(ProtocolMismatchError):
                await desk.attach(NODE.node_id, later)
    assert [line["why"] for line in logs if "not let in" in line["event"]] == [
        f"the node speaks version {WIRE + 1} of the protocol, and the coordinator versions 1 to {WIRE}"
    ]


async def test_reports_of_numbers_that_are_none_are_refused() -> None:
    desk, driver = new_desk()
    session_id = (await desk.attach(NODE.node_id, attach_request())).session_id
    before = driver.state
    heartbeat = session_pb2.HeartbeatRequest(session_id=session_id, outer_digest=DIGEST)
    heartbeat.loss = math.nan
    with pytest.raises(BadDataError, match="loss is nan"):
        await desk.heartbeat(NODE.node_id, heartbeat)
    heartbeat = session_pb2.HeartbeatRequest(session_id=session_id, let_go_rounds=math.inf)
    heartbeat.outer_digest = DIGEST
    with pytest.raises(BadDataError, match="let go rounds is inf"):
        await desk.heartbeat(NODE.node_id, heartbeat)
    fields = ("flops_per_second", "mfu", "peak_flops_per_second", "waiting_share")
    for field in (*fields, "local_communication_share", "exchange_share"):
        heartbeat = session_pb2.HeartbeatRequest(session_id=session_id, outer_digest=DIGEST)
        setattr(heartbeat.utilisation, field, math.inf)
        with pytest.raises(BadDataError, match="is inf, which is not a finite number"):
            await desk.heartbeat(NODE.node_id, heartbeat)
    heartbeat = session_pb2.HeartbeatRequest(session_id=session_id, outer_digest=DIGEST)
    heartbeat.mesh = "shard 2\x1b[2J"
    with pytest.raises(BadDataError, match=r"mesh .* cannot be shown"):
        await desk.heartbeat(NODE.node_id, heartbeat)
    heartbeat.mesh, heartbeat.upload_pace.held_by = "", "limit\x1b[2J"
    with pytest.raises(BadDataError, match="upload pace's held by"):
        await desk.heartbeat(NODE.node_id, heartbeat)
    heartbeat.upload_pace.held_by, heartbeat.upload_pace.bytes_per_second = "limit", math.nan
    with pytest.raises(BadDataError, match="upload pace's bytes per second"):
        await desk.heartbeat(NODE.node_id, heartbeat)
    heartbeat.upload_pace.bytes_per_second = 0.0
    heartbeat.link_rates.up_bytes_per_second = math.inf
    with pytest.raises(BadDataError, match="link rates's up bytes"):
        await desk.heartbeat(NODE.node_id, heartbeat)
    heartbeat.ClearField("link_rates")
    heartbeat.utilisation.peak_memory_bytes = 1 << 63
    with pytest.raises(
        BadDataError, match="utilisation's peak memory bytes is 9223372036854775808"
    ):
        await desk.heartbeat(NODE.node_id, heartbeat)
    heartbeat.ClearField("utilisation")
    heartbeat.mesh, heartbeat.congestion_control = "", "bbr\x1b[2J"
    with pytest.raises(BadDataError, match=r"congestion control .* cannot be shown"):
        await desk.heartbeat(NODE.node_id, heartbeat)
    good = session_pb2.Report(round=1, trained=session_pb2.TrainedReport(inner_steps=1))
    request = session_pb2.ReportRequest(session_id=session_id, reports=[good])
    report = request.reports.add(round=1)
    with pytest.raises(ProtocolMismatchError, match="does not know and must act on"):
        await desk.report(NODE.node_id, request)
    report.trained.loss = math.inf
    with pytest.raises(BadDataError, match="loss is inf"):
        await desk.report(NODE.node_id, request)
    request.session_id += 1
    with pytest.raises(SessionEndedError):
        await desk.report(NODE.node_id, request)
    assert driver.state is before


async def test_a_report_that_a_later_release_calls_optional_is_passed_over_and_the_others_count() -> (
    None
):
    desk, driver = new_desk()
    session_id = (await desk.attach(NODE.node_id, attach_request())).session_id
    new = session_pb2.Report(round=1, optional="mood")
    drains = session_pb2.Report(round=1, draining=session_pb2.DrainingReport())
    request = session_pb2.ReportRequest(session_id=session_id)
    request.reports.add().MergeFromString(with_unknown_field(new, 5))
    request.reports.append(drains)
    with capture_logs() as logged:
        await desk.report(NODE.node_id, request)
        await desk.report(NODE.node_id, request)
    told = [one["told"] for one in logged if one["event"].startswith("passed over")]
    assert told == ["mood"], "once"
    assert driver.state.members[NODE.node_id].is_draining


@pytest.mark.parametrize(
    "words",
    [
        "waiting for its owner: this machine is in use: other programs take 89% of its processors",
        "waiting for its owner: this machine is in use: a game\n\x1b[2J of mine, " + "x" * 5000,
        "",
    ],
)
async def test_whatever_a_node_has_to_say_of_itself_is_taken(words: str) -> None:
    """A heartbeat that is refused ends the node: so did the reason that a machine was in use, being long."""
    telemetry = Telemetry()
    _, driver = new_desk()
    desk = SessionDesk(driver, telemetry, RunSpec(), SIGNER)
    session_id = (await desk.attach(NODE.node_id, attach_request())).session_id
    vitals = Vitals(
        outer_round=0,
        outer_digest=DIGEST,
        outer_incarnation=0,
        activity=words,
        waiting_for=words,
        mesh=words,
        inner_step=0,
        loss=0.0,
        tokens_per_second=0.0,
        wire={},
    )
    await desk.heartbeat(NODE.node_id, heartbeat_of(session_id, vitals))
    reason = words_for_people(words, most=LONG_WORDS)
    await desk.detach(NODE.node_id, session_pb2.DetachRequest(session_id=session_id, reason=reason))
    assert reason[:25] == words[:25] and reason.isprintable()


async def test_bytes_of_a_kind_that_there_is_not_are_refused() -> None:
    desk, driver = new_desk()
    session_id = (await desk.attach(NODE.node_id, attach_request())).session_id
    before = driver.state
    request = session_pb2.ReportRequest(session_id=session_id)
    report = request.reports.add(round=0)
    report.applied.outer_digest = DIGEST
    report.applied.wire.add(kind="gossip", sent_bytes=1)
    with pytest.raises(BadDataError, match="no kind of bytes 'gossip'"):
        await desk.report(NODE.node_id, request)
    report.applied.wire[0].kind = "result"
    report.applied.wire[0].sent_bytes = 1 << 60
    with pytest.raises(BadDataError, match="bytes sent"):
        await desk.report(NODE.node_id, request)
    assert driver.state is before


async def test_of_lists_that_are_too_long_no_entry_is_looked_at() -> None:
    class Long:
        def __len__(self) -> int:
            return 1 << 21

        def __iter__(self) -> Iterator[object]:
            raise AssertionError("two million entries take a second to look at")

    with pytest.raises(BadDataError, match="there are 2097152 reports; 1024 is the most"):
        checks.at_most(Long(), 1024, of="reports")
    kinds = [session_pb2.WireCount(kind="result")] * 65
    with pytest.raises(ProtocolMismatchError, match="there are 65 kinds of bytes"):
        convert.wire_counts_from_wire(kinds)
    told = session_pb2.ReducedReport(missed={f"node-{number}": 1 for number in range(9)})
    assert not reduced_from_wire(told, most_contributors=8).missed
    assert len(reduced_from_wire(told, most_contributors=9).missed) == 9


def commit_of(number: int, base: bytes) -> Commit:
    outcome = SliceOutcome(
        index=0, start=0, num_elements=256, digest=Digest(DIGEST), holder_ids=(NODE.node_id,)
    )
    return Commit(round=number, fragment=0, base_digest=Digest(base), slices=(outcome,))


async def test_commits_that_this_coordinator_never_signed_are_not_learned() -> None:
    desk, driver = new_desk()
    session_id = (await desk.attach(NODE.node_id, attach_request())).session_id
    base = driver.state.outer_digest
    assert base is not None

    async def bring(*commits: Commit) -> int:
        wire = [convert.commit_to_wire(commit) for commit in commits]
        request = session_pb2.SubmitCommitsRequest(session_id=session_id, commits=wire)
        return (await desk.submit_commits(NODE.node_id, request)).committed_round

    before = driver.state
    commit = commit_of(1, base)
    good = SIGNER.signed(commit)
    forged = CommitSigner(Ed25519PrivateKey.generate()).signed(commit)
    changed = replace(good, slices=(replace(good.slices[0], digest=Digest(b"x" * 32)),))
    for bad in (commit, forged, changed, replace(good, signature=good.signature[:-1])):
        with pytest.raises(
            BadDataError, match="round 1 does not bear this coordinator's signature"
        ):
            await bring(bad)
        assert driver.state is before
    assert await bring(good) == 1
    assert driver.state.committed_round == 1


async def test_signatures_are_checked_aside_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node that brings a long history back must not delay the heartbeats of the others."""
    desk, driver = new_desk()
    session_id = (await desk.attach(NODE.node_id, attach_request())).session_id
    base = driver.state.outer_digest
    assert base is not None
    history = [SIGNER.signed(commit_of(1, base))]
    for number in range(2, 100):
        history.append(SIGNER.signed(commit_of(number, b"%032d" % number)))
    pieces: list[int] = []
    checked = 0
    has_signed = SIGNER.has_signed

    def counted(commit: Commit) -> bool:
        nonlocal checked
        checked += 1
        return has_signed(commit)

    async def aside(read: Callable[[], T]) -> T:
        before = checked
        result = read()
        pieces.append(checked - before)
        return result

    monkeypatch.setattr(desk._rulings, "has_signed", counted)
    monkeypatch.setattr(driver, "aside", aside)
    wire = [convert.commit_to_wire(commit) for commit in history]
    request = session_pb2.SubmitCommitsRequest(session_id=session_id, commits=wire)
    await desk.submit_commits(NODE.node_id, request)
    assert sum(pieces) == checked == len(history)
    assert max(pieces) <= session.MOST_CHECKED
    assert driver.state.committed_round == len(history)


async def test_a_page_of_commits_ends_with_the_one_that_fills_the_answer_and_all_are_signed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk, driver = new_desk()
    session_id = (await desk.attach(NODE.node_id, attach_request())).session_id
    base = driver.state.outer_digest
    assert base is not None
    void = SliceOutcome(index=0, start=0, num_elements=256, digest=None, void_reason="so")
    for number in range(1, 4):
        commit = SIGNER.signed(replace(commit_of(number, base), slices=(void,)))
        wire = session_pb2.SubmitCommitsRequest(
            session_id=session_id, commits=[convert.commit_to_wire(commit)]
        )
        await desk.submit_commits(NODE.node_id, wire)

    async def listed(after: int) -> list[Commit]:
        answer = await desk.list_commits(session_pb2.ListCommitsRequest(after_round=after))
        return [convert.commit_from_wire(wire) for wire in answer.commits]

    assert [commit.round for commit in await listed(0)] == [1, 2, 3]
    assert all(SIGNER.has_signed(commit) for commit in await listed(1))
    monkeypatch.setattr(session, "MAX_COMMITS_BYTES", 10)
    assert [commit.round for commit in await listed(1)] == [2]
    monkeypatch.setattr(session, "MAX_COMMITS", 2)
    monkeypatch.setattr(session, "MAX_COMMITS_BYTES", 1 << 20)
    assert [commit.round for commit in await listed(0)] == [1, 2]


def test_a_member_that_calls_in_a_loop_is_told_to_wait_and_delays_nobody_else() -> None:
    now = 0.0
    calls = CallRates(lambda: now)
    for _ in range(MOST_CALLS):
        calls.take(NodeId("loops"))
    with pytest.raises(TemporaryError, match="calls of node loops came at once"):
        calls.take(NodeId("loops"))
    calls.take(NodeId("another"))
    now = 1.0
    for _ in range(int(CALLS_A_SECOND)):
        calls.take(NodeId("loops"))
    with pytest.raises(TemporaryError):
        calls.take(NodeId("loops"))


@in_virtual_time
async def test_a_member_that_attaches_in_a_loop_waits_and_one_whose_link_drops_does_not() -> None:
    """All others are told of each time where it is, and dial it there."""
    desk, driver = new_desk()
    for _ in range(MOST_ATTACHES):
        await desk.attach(NODE.node_id, attach_request())
    with pytest.raises(TemporaryError, match=f"{MOST_ATTACHES} calls of node {NODE.node_id}"):
        await desk.attach(NODE.node_id, attach_request())
    for _ in range(100):
        for _ in range(10):
            await asyncio.sleep(1.0)
            driver.clock.now()  # what nobody looks at for longer is no time of the run
        await desk.attach(NODE.node_id, attach_request())


async def test_who_asks_for_a_run_that_is_over_is_told_whether_another_holds_its_end() -> None:
    _, driver = new_desk()
    desk = SessionDesk(driver, Telemetry(), RunSpec(), SIGNER)
    await desk.attach(NODE.node_id, attach_request())
    asked = session_pb2.GetRunRequest()
    assert not desk.get_run(NODE.node_id, asked).over
    driver._state = replace(driver.state, finished_at=driver.clock.now())
    own, others = (desk.get_run(NodeId(one), asked) for one in (NODE.node_id, "another"))
    assert own.over == others.over and own.over.startswith("all ")
    assert own.last_round == others.last_round == driver.state.committed_round
    assert (own.is_held_here, others.is_held_here) == (False, True)
    driver._state = replace(driver.state, committed_round=driver.state.committed_round + 1)
    assert not desk.get_run(NodeId("another"), asked).is_held_here


async def test_who_asks_for_an_amended_run_gets_it_as_it_is_in_force_too() -> None:
    _, driver = new_desk()
    desk, asked = SessionDesk(driver, Telemetry(), RunSpec(), SIGNER), session_pb2.GetRunRequest()
    assert not desk.get_run(NODE.node_id, asked).amended_json
    ruling = amendment(2, exchange__downlink="fp32/1")
    driver._state = replace(driver.state, rulings=(ruling,))
    answer = desk.get_run(NODE.node_id, asked)
    assert answer.run_json == RunSpec().canonical_json()
    assert run_from_json(answer.amended_json).exchange.downlink == "fp32"


def test_a_reducers_report_that_is_not_the_one_signed_with_its_result_is_refused() -> None:
    told = Reduced(
        slice_index=2, digest=None, contributors=(), contributions=(), late=(NODE.node_id,)
    )
    made = sealed(
        RESULT,
        NODE.node_id,
        round=4,
        slice_index=2,
        num_elements=8,
        norm=1.5,
        report_digest=told.statement_digest,
        signer=NODE,
    )
    told = replace(told, digest=made.digest, header=made.header.encode())
    assert checks.reduced(told, node_id=NODE.node_id, round=4).norm == 1.5
    for false in (replace(told, late=()), replace(told, error_before=b"e" * 32)):
        with pytest.raises(BadDataError, match="not the one that is signed with its result"):
            checks.reduced(false, node_id=NODE.node_id, round=4)
