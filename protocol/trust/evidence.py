"""What a ruling rests on: signed bytes of those whom it is about, which anybody checks who has the log.

A coordinator that makes a member out to be a liar has no such bytes: a proof of equivocation and one of an
omission are signed by the liar itself, and what audits found is signed by the auditors. Each piece is a word
for its kind and its bytes in hexadecimal digits.

Equivocation is two contributions, or two results, that one process signed for one slot. A reducer takes one
contribution of each node, and a slice has one result; whoever signs two tells different members different
things. The proof needs no word of who brings it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from google.protobuf.message import Message as WireMessage

from protocol.errors import BadDataError
from protocol.trust.receipts import omission_in
from protocol.trust.rulings import Ruling
from protocol.v1 import session_pb2 as pb
from protocol.wire.convert import from_wire
from protocol.wire.findings import Audited, Finding, ResultRefused, SpotChecked
from protocol.wire.messages import Reduced, reduced_from_wire, reduced_to_wire
from protocol.wire.payload import RESULT, PayloadError, PayloadHeader
from protocol.wire.rounds import Digest, NodeId

Evidence = tuple[str, ...]
FindingT = TypeVar("FindingT", bound=Finding)
WireT = TypeVar("WireT", bound=WireMessage)

MOST_CHARACTERS = 1 << 16
"""Of one ruling's evidence, which all members keep; what is longer is left out of it."""

_HEADER, _RECEIPT, _REPORT, _FINDING = "header", "receipt", "report", "finding"
_SPOT, _NONSENSE, _REFUSED = "spot", "undecodable", "refused"

MOST_REFUSALS = 64
"""In evidence of a result that does not decode: with more it would be too long to be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivocation:
    """Who has lied, and how; the same words whoever brings the proof, and in whichever order."""

    node_id: NodeId
    reason: str


def equivocation_in(one: bytes, other: bytes, *, run_digest: Digest) -> Equivocation:
    """What two encoded headers prove. Raises BadDataError, with what is missing, where they prove nothing."""
    try:
        headers = [PayloadHeader.decode(encoded) for encoded in (one, other)]
    except PayloadError as error:
        raise BadDataError(f"what is shown of a lie is no header: {error}") from error
    first, second = sorted(headers, key=lambda header: header.digest)
    if first.run_digest != run_digest:
        raise BadDataError("what is shown of a lie is of another run")
    if not first.contradicts(second):
        raise BadDataError(
            f"a {first.kind_name} and a {second.kind_name} of {first.sender_id} and {second.sender_id} "
            "do not contradict each other"
        )
    for header in (first, second):
        if why := header.forgery():
            raise BadDataError(f"what is shown of a lie is no proof: {why}")
    digests = " and ".join(f"{header.digest.hex()[:12]}…" for header in (first, second))
    return Equivocation(
        node_id=first.sender_id,
        reason=(
            f"it signed two different {first.kind_name}s to slice {first.slice_index} of round "
            f"{first.round}: {digests}"
        ),
    )


def of_equivocation(one: bytes, other: bytes) -> Evidence:
    """Two signed headers of one process for one slot."""
    return _kept([(_HEADER, one), (_HEADER, other)])


def of_omission(receipt: bytes, told: Reduced) -> Evidence:
    """A reducer's receipt, and its signed report that does not name what it is for."""
    return _kept([(_RECEIPT, receipt), (_REPORT, _reduced_to_bytes(told))])


def of_findings(told: Reduced, findings: Iterable[Audited]) -> Evidence:
    """The signed header of a reducer's result, and what auditors of it have found and signed."""
    signed = _signed(findings)
    return _kept([(_HEADER, told.header), *signed]) if signed else ()


def of_nonsense(contributor_id: NodeId, told: Reduced, findings: Iterable[Audited]) -> Evidence:
    """Whose contribution does not decode: its reducer's signed report, and findings of who made it again."""
    signed = _signed(findings)
    about = (_NONSENSE, contributor_id.encode())
    return _kept([about, (_REPORT, _reduced_to_bytes(told)), *signed]) if signed else ()


def of_spot_checks(findings: Iterable[SpotChecked]) -> Evidence:
    """What checkers have measured of one member, and signed."""
    return _kept([(_SPOT, finding.encode()) for finding in findings])


def of_refusals(header: bytes, refusals: Iterable[ResultRefused]) -> Evidence:
    """The signed header of a result, and who has signed that it does not decode."""
    signed = [each for each in refusals if each.signature][:MOST_REFUSALS]
    pieces = [(_REFUSED, replace(each, header=b"").encode()) for each in signed]
    return _kept([(_HEADER, header), *pieces]) if pieces else ()


def proven_by(ruling: Ruling, *, run_digest: Digest) -> str:
    """What a ruling's evidence proves, in words; empty for one without.

    Raises BadDataError where it proves nothing, or something about another member than the ruling.
    """
    if not ruling.evidence:
        return ""
    about, words = _proven(ruling.evidence, run_digest)
    if ruling.node_id and about != ruling.node_id:
        raise BadDataError(
            f"ruling {ruling.number} is about {ruling.node_id}, and its evidence about {about}"
        )
    return words


def _signed(findings: Iterable[Audited]) -> list[tuple[str, bytes]]:
    return [(_FINDING, finding.encode()) for finding in findings if finding.signature]


def _kept(pieces: Sequence[tuple[str, bytes]]) -> Evidence:
    kept = tuple(f"{kind} {content.hex()}" for kind, content in pieces)
    return kept if sum(map(len, kept)) <= MOST_CHARACTERS else ()


def _proven(evidence: Evidence, run_digest: Digest) -> tuple[NodeId, str]:
    """Whom it is about, and what it proves."""
    kinds, contents = zip(*map(_read, evidence), strict=True)
    if kinds == (_HEADER, _HEADER):
        lie = equivocation_in(*contents, run_digest=run_digest)
        return lie.node_id, "its two signatures"
    if kinds == (_RECEIPT, _REPORT):
        told = _reduced_from_bytes(contents[1])
        omission = omission_in(contents[0], told, run_digest=run_digest)
        return omission.reducer_id, "its receipt and its report"
    if len(kinds) > 1 and kinds == (_HEADER, *[_FINDING] * (len(kinds) - 1)):
        return _proven_by_findings(contents[0], contents[1:], run_digest)
    if len(kinds) > 2 and kinds == (_NONSENSE, _REPORT, *[_FINDING] * (len(kinds) - 2)):
        return _proven_nonsense(contents[0], contents[1], contents[2:], run_digest)
    if len(kinds) > 1 and kinds == (_HEADER, *[_REFUSED] * (len(kinds) - 1)):
        return _proven_by_refusals(contents[0], contents[1:], run_digest)
    if set(kinds) == {_SPOT}:
        return _proven_by_spot_checks(contents, run_digest)
    raise BadDataError(f"evidence of {', '.join(kinds)} is of no kind that this version knows")


def _proven_nonsense(
    about: bytes, report: bytes, findings: Sequence[bytes], run_digest: Digest
) -> tuple[NodeId, str]:
    told, contributor_id = _reduced_from_bytes(report), NodeId(about.decode(errors="replace"))
    if contributor_id not in told.undecodable:
        raise BadDataError(f"the reducer's report does not say that {contributor_id} sent nonsense")
    reducer_id, _ = _proven_by_findings(told.header, findings, run_digest)
    header = PayloadHeader.decode(told.header)
    if not header.report_digest or header.report_digest != told.statement_digest:
        raise BadDataError("the reducer's report is not the one that is signed with its result")
    found = _audited(findings)
    if any(finding.found != finding.digest for finding in found):
        raise BadDataError("the evidence has a finding that says otherwise")
    if contributor_id in {reducer_id, *(finding.signer_id for finding in found)}:
        raise BadDataError("the evidence has a finding of the member that it is about")
    who = "one auditor" if len(findings) == 1 else f"{len(findings)} auditors"
    return contributor_id, f"its reducer's signed report, and signed findings of {who}"


def _proven_by_refusals(
    header: bytes, refusals: Sequence[bytes], run_digest: Digest
) -> tuple[NodeId, str]:
    result = _signed_result(header, run_digest)
    members = set()
    for refusal in _read_findings(ResultRefused, refusals, of="a refusal"):
        if (refusal.run_digest, refusal.digest) != (run_digest, result.digest):
            raise BadDataError("the evidence has a refusal of another result")
        if why := refusal.forgery(refusal.signer_id):
            raise BadDataError(f"the evidence is no proof: {why}")
        members.add(refusal.signer_id)
    if result.sender_id in members:
        raise BadDataError("the evidence has a finding of the member that it is about")
    who = "one member" if len(members) == 1 else f"{len(members)} members"
    return result.sender_id, f"its signed result, which {who} signed that it does not decode"


def _signed_result(header: bytes, run_digest: Digest) -> PayloadHeader:
    try:
        result = PayloadHeader.decode(header)
    except PayloadError as error:
        raise BadDataError(f"the evidence has no header of a result: {error}") from error
    if result.kind != RESULT or result.run_digest != run_digest:
        raise BadDataError("the evidence is of another run, or of something else than a result")
    if why := result.forgery():
        raise BadDataError(f"the evidence is no proof: {why}")
    return result


def _proven_by_findings(
    header: bytes, findings: Sequence[bytes], run_digest: Digest
) -> tuple[NodeId, str]:
    result = _signed_result(header, run_digest)
    place = run_digest, result.round, result.slice_index, result.digest
    auditors = set()
    for finding in _audited(findings):
        told = finding.run_digest, finding.round, finding.slice_index, finding.digest
        if told != place:
            raise BadDataError("the evidence has a finding on another result")
        auditor_id = finding.signer_id
        if why := finding.forgery(auditor_id):
            raise BadDataError(f"the evidence is no proof: {why}")
        auditors.add((auditor_id, finding.found == finding.digest))
    differing = sum(not is_same for _, is_same in auditors)
    agreeing = len(auditors) - differing
    beside = f", and of {agreeing} that it is right" if agreeing else ""
    who = "one auditor" if differing == 1 else f"{differing} auditors"
    return result.sender_id, f"signed findings of {who}{beside}"


def _proven_by_spot_checks(findings: Sequence[bytes], run_digest: Digest) -> tuple[NodeId, str]:
    checks = _read_findings(SpotChecked, findings, of="a spot check")
    about = checks[0].contributor_id
    for check in checks:
        if (check.run_digest, check.contributor_id) != (run_digest, about):
            raise BadDataError("the evidence has a spot check of another member, or another run")
        if why := check.forgery(check.signer_id):
            raise BadDataError(f"the evidence is no proof: {why}")
    num_checkers = len({check.signer_id for check in checks})
    who = "one member" if num_checkers == 1 else f"{num_checkers} members"
    return about, f"{len(checks)} signed spot checks of {who}"


def _read(piece: str) -> tuple[str, bytes]:
    kind, _, content = piece.partition(" ")
    try:
        return kind, bytes.fromhex(content)
    except ValueError as error:
        raise BadDataError(f"evidence of the kind {kind!r} cannot be read") from error


def _reduced_to_bytes(report: Reduced) -> bytes:
    return reduced_to_wire(report).SerializeToString(deterministic=True)


def _reduced_from_bytes(kept: bytes) -> Reduced:
    return reduced_from_wire(_parsed(pb.ReducedReport, kept, of="a reducer's report"))


def _audited(kept: Iterable[bytes]) -> list[Audited]:
    return _read_findings(Audited, kept, of="an auditor's finding")


def _read_findings(kind: type[FindingT], kept: Iterable[bytes], *, of: str) -> list[FindingT]:
    return [from_wire(_parsed(kind.MESSAGE, each, of=of), kind) for each in kept]


def _parsed(kind: type[WireT], kept: bytes, *, of: str) -> WireT:
    try:
        return kind.FromString(kept)
    except Exception as error:  # protobuf's DecodeError has no public base across versions
        raise BadDataError(f"{of} cannot be read: {error}") from error
