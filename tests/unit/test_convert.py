from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ProtocolMismatchError
from protocol.v1 import round_pb2, session_pb2
from protocol.wire import convert, findings, messages, rounds
from protocol.wire.messages import (
    message_from_wire,
    message_to_wire,
    report_from_wire,
    report_to_wire,
)
from protocol.wire.rounds import Digest

digests = st.binary(min_size=32, max_size=32)
uint32, uint64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
NARROW = {
    "index",
    "fragment",
    "inner_steps",
    "incarnation",
    "slice_index",
    "attempt",
    "num_samples",
}  # narrower on the wire than in Python


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of one of the dataclasses of protocol.wire.rounds, by its annotations."""
    drawn = st.builds(
        kind,
        **{
            field.name: of_type(get_type_hints(kind)[field.name], field.name)
            for field in fields(kind)
        },
    )
    if kind is rounds.Plan:
        return drawn.flatmap(with_as_many_votes)
    if kind is messages.Reduced:  # the norm stands in its header, and missed rounds are a mapping
        missed = ((rounds.NodeId("n"), 3),)
        drawn = drawn.map(lambda report: replace(report, norm=0.0, missed=missed))
    has_contributions = kind in (rounds.SliceOutcome, messages.Reduced)
    return drawn.map(with_a_contribution_of_each) if has_contributions else drawn


def with_as_many_votes(plan: rounds.Plan) -> st.SearchStrategy[rounds.Plan]:
    num = len(plan.assignments)
    votes = st.lists(uint32, min_size=num, max_size=num).map(tuple)
    return st.builds(lambda told: replace(plan, votes=told), st.just(()) | votes)


def with_a_contribution_of_each(outcome: Any) -> Any:
    contributions = (rounds.ContributionDigest(bytes(range(n, n + 16))) for n in range(3))
    return replace(
        outcome,
        contributions=tuple(c for c, _ in zip(contributions, outcome.contributors, strict=False)),
        factors=tuple(n * rounds.WHOLE // 3 for n in range(len(outcome.contributors))),
    )


def of_type(hint: Any, name: str) -> st.SearchStrategy[Any]:
    if hint in (Digest, bytes):
        return digests
    if hint is rounds.ContributionDigest:
        return st.binary(min_size=16, max_size=16)
    if hint == Digest | None:
        return st.none() | digests
    if hint == float | None:
        return st.none() | st.floats(allow_nan=False, allow_infinity=False)
    if hint is bool:
        return st.booleans()
    if name == "factor":
        return st.integers(0, rounds.WHOLE)
    if hint is int:
        return uint32 if name in NARROW else uint64
    if hint is float:
        return st.floats(allow_nan=False)
    if hint is str or hint is rounds.NodeId:
        return st.text(max_size=20)
    if args := get_args(hint):
        return st.lists(of_type(args[0], ""), max_size=3).map(tuple)
    return values(hint)


def both_ways(
    kind: type, wire: type[Message]
) -> tuple[Callable[[Any], Message], Callable[[Any], Any]]:
    return (lambda value: convert.to_wire(value, wire)), (
        lambda told: convert.from_wire(told, kind)
    )


PAIRS: dict[type, tuple[Callable[[Any], Message], Callable[[Any], Any]]] = {
    rounds.Plan: both_ways(rounds.Plan, round_pb2.Plan),
    rounds.Commit: (convert.commit_to_wire, convert.commit_from_wire),
    rounds.RosterEntry: both_ways(rounds.RosterEntry, session_pb2.RosterEntry),
    rounds.LayoutSummary: both_ways(rounds.LayoutSummary, session_pb2.LayoutSummary),
    rounds.CorpusSummary: both_ways(rounds.CorpusSummary, session_pb2.CorpusSummary),
}


@pytest.mark.parametrize("kind", PAIRS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_what_crosses_the_wire_is_the_same_value(kind: type, data: st.DataObject) -> None:
    to_wire, from_wire = PAIRS[kind]
    value = data.draw(values(kind))
    wire = to_wire(value)
    assert from_wire(type(wire).FromString(wire.SerializeToString())) == value


WRITTEN_OUT = messages.RoundCommitted, messages.RulingsTold
WRITTEN_OUT_REPORTS = messages.Reduced, messages.Applied


@pytest.mark.parametrize(
    "kind",
    sorted({*get_args(messages.Message)} - {*WRITTEN_OUT}, key=str),
    ids=lambda k: k.__name__,
)
@given(data=st.data())
def test_a_message_crosses_the_wire_whole(kind: type, data: st.DataObject) -> None:
    value = data.draw(values(kind))
    wire = session_pb2.SubscribeResponse.FromString(message_to_wire(value).SerializeToString())
    assert message_from_wire(wire) == value


@pytest.mark.parametrize(
    "kind",
    sorted({*get_args(messages.Report)} - {*WRITTEN_OUT_REPORTS}, key=str),
    ids=lambda k: k.__name__,
)
@given(data=st.data())
def test_a_report_crosses_the_wire_whole(kind: type, data: st.DataObject) -> None:
    value = data.draw(values(kind))
    wire = session_pb2.Report.FromString(report_to_wire(7, value).SerializeToString())
    assert wire.round == 7 and report_from_wire(wire, most_contributors=8) == value
    said = wire.WhichOneof("report")
    assert said is not None
    told = getattr(wire, said)
    named = {field.on_wire for field in convert._fields_of(kind)}
    assert named == {field.name for field in told.DESCRIPTOR.fields}  # nothing is told in vain


def test_an_agreement_that_is_no_number_is_none() -> None:
    held = messages.Held(slice_index=1, digest=Digest(bytes(32)), agreement=float("nan"))
    told = report_from_wire(report_to_wire(7, held), most_contributors=8)
    assert told == replace(held, agreement=None)


def test_what_an_auditor_found_is_a_digest_or_nothing() -> None:
    finding = findings.Audited(slice_index=1, digest=Digest(bytes(32)), found=b"short")
    with pytest.raises(ProtocolMismatchError, match="what an auditor found has 5 bytes"):
        report_from_wire(report_to_wire(7, finding), most_contributors=8)


def test_a_plan_with_votes_of_others_than_its_participants_is_refused() -> None:
    assignments = [round_pb2.Assignment(node_id="a", inner_steps=1, num_samples=1)]
    wire = round_pb2.Plan(round=1, base_digest=bytes(32), assignments=assignments, votes=[1, 2])
    with pytest.raises(ProtocolMismatchError, match="1 participants has 2 votes"):
        convert.from_wire(wire, rounds.Plan)


def test_rosters_and_counts_cross_the_wire() -> None:
    address = rounds.PeerAddress(public_key=bytes(32), multiaddrs=("/ip4/10.0.0.7/tcp/4001",))
    members = (rounds.RosterEntry(node_id=rounds.NodeId("a"), node_name="b", address=address),)
    roster = session_pb2.Roster(members=map(convert.fields_to_wire, members))
    assert tuple(convert.from_wire(each, rounds.RosterEntry) for each in roster.members) == members
    counts = convert.wire_counts_to_wire({"control": (3, 4), "contribution": (1, 2)})
    told = [(count.kind, count.sent_bytes, count.received_bytes) for count in counts]
    assert told == [("contribution", 1, 2), ("control", 3, 4)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda wire: wire.contributor_sets[0].nodes.__setitem__(0, 2),
        lambda wire: wire.without_tokens.nodes.__setitem__(0, 2),
        lambda wire: wire.slices[0].holders.append(2),
        lambda wire: setattr(wire.slices[0], "contributor_set", 1),
        lambda wire: wire.ClearField("contributor_sets"),
    ],
    ids=["contributor", "without tokens", "holder", "set", "no sets"],
)
def test_a_commit_that_speaks_of_nodes_which_it_does_not_name_is_refused(
    damage: Callable[[round_pb2.Commit], object],
) -> None:
    nodes = rounds.NodeId("a"), rounds.NodeId("b")
    outcome = rounds.SliceOutcome(
        index=0,
        start=0,
        num_elements=1,
        digest=Digest(bytes(32)),
        contributors=(rounds.Contributor(node_id=nodes[0], samples=1, tokens=5),),
        holder_ids=nodes,
    )
    commit = rounds.Commit(
        round=1,
        fragment=0,
        base_digest=Digest(bytes(32)),
        slices=(outcome,),
        without_tokens=(rounds.Contributor(node_id=nodes[1], samples=4, tokens=0),),
    )
    wire = convert.commit_to_wire(commit)
    assert list(wire.node_ids) == list(nodes)
    damage(wire)
    with pytest.raises(ProtocolMismatchError, match="does not name"):
        convert.commit_from_wire(wire)


@pytest.mark.parametrize("field", ["tokens", "samples"])
def test_contributors_without_their_samples_and_tokens_are_refused(field: str) -> None:
    """As those of commits from before samples were counted apart are."""
    commit = rounds.Commit(
        round=1, fragment=0, base_digest=Digest(bytes(32)), slices=(outcome_of_two(),)
    )
    wire = convert.commit_to_wire(commit)
    del getattr(wire.contributor_sets[0], field)[0]
    with pytest.raises(ProtocolMismatchError, match=r"has 2 nodes, \d counts of tokens and \d of"):
        convert.commit_from_wire(wire)


def test_a_digest_or_key_of_the_wrong_size_is_refused() -> None:
    commit = rounds.Commit(
        round=1,
        fragment=0,
        base_digest=Digest(bytes(32)),
        slices=(rounds.SliceOutcome(index=0, start=0, num_elements=1, digest=None),),
    )
    assert convert.commit_from_wire(convert.commit_to_wire(commit)) == commit
    short = Digest(bytes(31))
    for wrong in (
        replace(commit, base_digest=short),
        replace(commit, base_digest=Digest(b"")),
        replace(commit, outer_digest=short),
        replace(commit, slices=(replace(commit.slices[0], digest=short),)),
    ):
        with pytest.raises(ProtocolMismatchError, match=r"digest of .* bytes instead of 32"):
            convert.commit_from_wire(convert.commit_to_wire(wrong))
    address = rounds.PeerAddress(public_key=bytes(33), multiaddrs=())
    with pytest.raises(ProtocolMismatchError, match="public key has 33 bytes"):
        convert.from_wire(convert.to_wire(address, session_pb2.PeerAddress), rounds.PeerAddress)


def test_a_commit_says_of_each_contributor_which_bytes_are_in_the_result() -> None:
    outcome = outcome_of_two()
    assert outcome.contribution_of(rounds.NodeId("b")) == bytes([2]) * 16
    assert outcome.contribution_of(rounds.NodeId("c")) is None
    assert replace(outcome, contributions=()).contribution_of(rounds.NodeId("b")) is None


@pytest.mark.parametrize("num_bytes", [1, 16, 31, 48])
def test_contributions_that_are_not_one_for_each_contributor_are_refused(num_bytes: int) -> None:
    commit = rounds.Commit(
        round=1, fragment=0, base_digest=Digest(bytes(32)), slices=(outcome_of_two(),)
    )
    wire = convert.commit_to_wire(commit)
    assert convert.commit_from_wire(wire) == commit
    wire.slices[0].contributions = bytes(num_bytes)
    with pytest.raises(ProtocolMismatchError, match="16 bytes of its digest"):
        convert.commit_from_wire(wire)


def test_a_commit_from_before_contributions_were_named_is_still_read() -> None:
    commit = rounds.Commit(
        round=1,
        fragment=0,
        base_digest=Digest(bytes(32)),
        slices=(replace(outcome_of_two(), contributions=()),),
    )
    assert convert.commit_from_wire(convert.commit_to_wire(commit)) == commit


def outcome_of_two() -> rounds.SliceOutcome:
    return rounds.SliceOutcome(
        index=0,
        start=0,
        num_elements=1,
        digest=Digest(bytes(32)),
        contributors=tuple(
            rounds.Contributor(node_id=rounds.NodeId(name), samples=1, tokens=5) for name in "ab"
        ),
        contributions=tuple(rounds.ContributionDigest(bytes([n]) * 16) for n in (1, 2)),
    )
