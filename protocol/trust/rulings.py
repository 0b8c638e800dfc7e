"""Rulings: signed, numbered facts about who takes part in a run and by which rules; its audit log.

Each names the digest of the one before, so none can be left out or put between unnoticed. What is signed
is the canonical JSON that travels. Nodes keep them, and bring them back to a coordinator that was
restored from an older copy. What an amendment changes stands in protocol.run.amendments.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from typing import Any

import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import TypeAdapter, ValidationError

from protocol.errors import (
    SAME_VERSION,
    BadDataError,
    ExpelledError,
    HeldBackError,
    ProtocolMismatchError,
)
from protocol.trust.signing import Bundle, Trust, commit_statement
from protocol.v1 import ruling_pb2
from protocol.wire.rounds import Commit, Digest, NodeId, same_fields

TAG = b"atoll ruling 1\n"
"""What is signed begins with this, so that no signature can be taken for one of another kind."""

NO_DIGEST = Digest(bytes(32))
"""What the first ruling names instead of one before it."""

NOBODY = NodeId("")
"""Of a ruling that is about no node."""

RUN_OWNER, COORDINATOR = "the run owner", "the coordinator"

Scalar = int | float | str | bool


class RulingKind(StrEnum):
    """What is ruled."""

    INVITED = "invited"  # an invite was made
    REVOKED = "revoked"  # an invite was made useless
    JOINED = "joined"  # a node has used an invite
    APPROVED = "approved"  # a node that waited may take part
    EXPELLED = "expelled"  # a node's key is refused
    QUARANTINED = "quarantined"  # a node waits, and takes part in nothing
    READMITTED = "readmitted"  # it may take part again
    PAUSED = "paused"  # no round opens
    RESUMED = "resumed"
    STOPPED = "stopped"  # the run ends before `from_round`
    AMENDED = "amended"  # the run's rules are others from `from_round` on
    ROLLED_BACK = "rolled_back"  # rounds from `from_round` on are undone
    WITHDRAWN = "withdrawn"  # going back to before `from_round`, and since, holds no more
    MOVED = "moved"  # the coordinator will be at another address: `changes` has it
    KEYED = "keyed"  # the coordinator has another key: `changes` has its number and certificates
    PASSED_OVER = "passed over"  # of a later release, and optional: only the chain has it


ABOUT_NODES = frozenset(
    {
        RulingKind.APPROVED,
        RulingKind.EXPELLED,
        RulingKind.QUARANTINED,
        RulingKind.READMITTED,
    }
)
"""The latest of these on a node says how it stands."""


_OF_SOME_KINDS = frozenset(
    {"last_round", "incarnation", "outer_digest", "contributors", "evidence", "optional"}
)

KIND = "kind"
"""Among what is optional of a ruling: a release that does not know the kind may pass over all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is ruled, before it has its place in the chain."""

    kind: RulingKind
    by: str  # who decided it
    unix_seconds: float  # when, by the clock of the coordinator's machine
    node_id: NodeId = NOBODY
    node_name: str = ""
    reason: str = ""
    invite_id: str = ""
    changes: tuple[tuple[str, Scalar], ...] = ()  # "run.rounds" and its value, by key
    from_round: int = 0
    last_round: int = 0  # of those that are undone, as the coordinator knew it
    incarnation: int = 0  # of commits from then on: what is undone has a lower one
    outer_digest: str = ""  # of the state that the run goes on from, in hexadecimal digits
    contributors: tuple[str, ...] = ()  # to what is undone, by their names
    evidence: tuple[str, ...] = ()  # what it rests on: protocol.trust.evidence


def decision_of(decided: Decision) -> dict[str, Any]:
    """The fields that a ruling shares with what has led to it, by their names."""
    return same_fields(decided, Decision)


@dataclass(frozen=True, kw_only=True)
class Ruling(Decision):
    """One of them. `before` is the digest of the one before in hexadecimal digits."""

    number: int  # from 1
    before: str
    optional: tuple[str, ...] = ()  # fields, keys of `changes` or KIND that a release need not know
    text: str = ""  # as it is signed, where this release does not know all of that

    def canonical_json(self) -> str:
        """What is signed, told and kept. Fields that only some kinds have are left out of all others."""
        return self._json

    @cached_property
    def _json(self) -> str:
        """Made once: whoever joins a run of a thousand members is told a thousand of them."""
        if self.text:
            return self.text
        fields = {k: v for k, v in asdict(self).items() if v or k not in _OF_SOME_KINDS}
        del fields["text"]
        return _canonical(fields)

    def digest(self) -> Digest:
        """BLAKE3 of it: what the next ruling names."""
        return Digest(blake3.blake3(self.canonical_json().encode()).digest())

    @property
    def statement(self) -> bytes:
        """What the coordinator's key signs."""
        return TAG + self.canonical_json().encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRuling:
    """A ruling with the coordinator's signature."""

    ruling: Ruling
    signature: bytes


def _canonical(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


_RULING: TypeAdapter[Ruling] = TypeAdapter(Ruling)
_FIELDS = frozenset(field.name for field in fields_of(Ruling)) - {"text"}
_KINDS = frozenset(map(str, RulingKind)) - {str(RulingKind.PASSED_OVER)}


def ruling_from_json(text: str) -> Ruling:
    """Reads one; what it says to be optional this release need not know.

    Raises BadDataError for what is none, or is not written as it is signed, and ProtocolMismatchError for one
    of a later release that must be followed.
    """
    try:
        fields: Any = json.loads(text)
        is_whole = isinstance(fields, dict) and _canonical(fields) == text
        ruling = _RULING.validate_python(_known_of(fields, text) if is_whole else fields)
    except (ValueError, TypeError, ValidationError) as error:
        raise BadDataError("a ruling cannot be read", next_step=SAME_VERSION) from error
    if ruling.canonical_json() != text:
        raise BadDataError(
            "a ruling has other fields than this version knows", next_step=SAME_VERSION
        )
    return ruling


def _known_of(fields: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    """The fields without what is unknown here; raises ProtocolMismatchError where that must be known."""
    kind = fields.get(KIND)
    is_new = isinstance(kind, str) and kind not in _KINDS
    unknown = {*(fields.keys() - _FIELDS), *([KIND] if is_new else [])}
    if not unknown:
        return fields
    if needed := sorted(unknown - {*fields.get("optional", ())}):
        what = f"is of kind {kind!r}" if KIND in needed else f"has {', '.join(needed)}"
        raise ProtocolMismatchError(
            f"ruling {fields.get('number')} {what}, which this release does not know and must follow",
            next_step="install the coordinator's version of Atoll: 'atoll --version'",
        )
    known = {key: fields[key] for key in fields.keys() & _FIELDS} | {"text": text}
    return known | {KIND: str(RulingKind.PASSED_OVER)} if is_new else known


def digest_of(rulings: Sequence[Ruling]) -> Digest:
    """Of the latest of a chain, and with it of all."""
    return rulings[-1].digest() if rulings else NO_DIGEST


def follows(ruling: Ruling, before: Ruling | None) -> bool:
    """Whether a ruling is the next one of its chain."""
    number, digest = (0, NO_DIGEST) if before is None else (before.number, before.digest())
    return ruling.number == number + 1 and ruling.before == digest.hex()


MOST_RULINGS = 4096
MOST_CHARACTERS = 2 << 20
"""In a message, which has 4 MiB at most: a ruling has hundreds of characters, thousands with evidence."""


def num_in_a_message(rulings: Iterable[Ruling]) -> int:
    """How many of these, from the first on, have room in one message; at least one where there is any."""
    num_rulings = num_characters = 0
    for ruling in rulings:
        num_characters += len(ruling.canonical_json())
        if num_rulings and (num_rulings == MOST_RULINGS or num_characters > MOST_CHARACTERS):
            break
        num_rulings += 1
    return num_rulings


def holding(rulings: Iterable[Ruling]) -> tuple[Ruling, ...]:
    """Those by which the run has gone back, and which nobody has withdrawn since, in order."""
    found: tuple[Ruling, ...] = ()
    for ruling in rulings:
        if ruling.kind is RulingKind.ROLLED_BACK:
            found = (*found, ruling)
        elif ruling.kind is RulingKind.WITHDRAWN:
            found = tuple(one for one in found if not withdraws(ruling, one))
    return found


def withdraws(ruling: Ruling, earlier: Ruling) -> bool:
    """Whether the run did not go back by an earlier ruling after all: nobody could follow it.

    What it had gone back by since then goes with it.
    """
    return (
        ruling.kind is RulingKind.WITHDRAWN
        and earlier.kind is RulingKind.ROLLED_BACK
        and earlier.incarnation >= ruling.incarnation
    )


def undoes(rulings: Iterable[Ruling], round: int, incarnation: int) -> bool:
    """Whether the commit of a round, of this incarnation, is undone by one of these.

    What was committed since is of a later incarnation; what a ruling says holds for everybody who has it,
    whatever else he has heard, until it is withdrawn.
    """
    return any(
        round >= ruling.from_round and incarnation < ruling.incarnation
        for ruling in holding(rulings)
    )


NUMBER, CERTIFICATES = "number", "certificates"
"""What a ruling on the coordinator's key has for changes: `Bundle` reads the second."""


OWN = (("own", True),)
"""What a ruling on an invite has for changes where it is for the run owner's own machines."""


def owned_invite(ruling: Ruling) -> str:
    """The invite that a ruling says to be for the run owner's own machines; empty for any other ruling."""
    is_own = ruling.kind is RulingKind.INVITED and dict(ruling.changes).get("own") is True
    return ruling.invite_id if is_own else ""


ROUNDS = "run.rounds"
"""What an amendment has among its changes where it says how many rounds the run has."""


def sets_rounds(ruling: Ruling) -> bool:
    """Whether a ruling says how many rounds the run has; one that was stopped is it no more by it."""
    return ruling.kind is RulingKind.AMENDED and ROUNDS in dict(ruling.changes)


MAX_NODES = "max_nodes"
"""What a ruling on an invite has for changes where it bounds how many of its members take part at once."""


def limit_of_invite(ruling: Ruling) -> int | None:
    """How many of its members an invite lets take part at once, 0 for all; None where this does not say."""
    told = dict(ruling.changes).get(MAX_NODES) if ruling.kind is RulingKind.INVITED else None
    return told if type(told) is int and told >= 0 else None


HOST, CONTROL_PORT, ENROLMENT_PORT = "host", "control_port", "enrolment_port"
"""What a ruling on the coordinator's address has for changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a coordinator's ports are."""

    host: str
    control_port: int
    enrolment_port: int

    @property
    def changes(self) -> tuple[tuple[str, Scalar], ...]:
        """As a ruling has it, in the order in which it is signed."""
        return tuple(sorted(asdict(self).items()))


def moved_to(ruling: Ruling) -> Address | None:
    """Where a ruling has the coordinator go; None for any other ruling, or one that cannot be followed."""
    told = dict(ruling.changes)
    host, *ports = (told.get(name) for name in (HOST, CONTROL_PORT, ENROLMENT_PORT))
    if ruling.kind is not RulingKind.MOVED or not isinstance(host, str) or not host:
        return None
    control, enrolment = (port if type(port) is int and 0 < port < 1 << 16 else 0 for port in ports)
    if not (control and enrolment):
        return None
    return Address(host=host, control_port=control, enrolment_port=enrolment)


def key_number(ruling: Ruling) -> int:
    """Of the coordinator's key that a ruling is about; 0 for any other ruling."""
    if ruling.kind is not RulingKind.KEYED:
        return 0
    number = dict(ruling.changes).get(NUMBER)
    return number if isinstance(number, int) else 0


def least_key(rulings: Iterable[Ruling], *, round: int | None = None) -> int:
    """The number of the key that may sign what comes after these rulings, or the commit of a round.

    Later ones may as well; what an earlier one signs does not hold any more.
    """
    keyed: list[tuple[int, int]] = []  # from which round, and which
    before: list[tuple[Ruling, int]] = []  # each going back, and how many keys were told then
    for ruling in rulings:
        if ruling.kind is RulingKind.KEYED:
            keyed.append((ruling.from_round, key_number(ruling)))
        elif ruling.kind is RulingKind.ROLLED_BACK:
            before.append((ruling, len(keyed)))
        elif ruling.kind is RulingKind.WITHDRAWN:  # its rounds hold again, as they were signed
            while before and withdraws(ruling, before[-1][0]):
                gone, num = before.pop()
                later = [(max(first, gone.last_round + 1), key) for first, key in keyed[num:]]
                keyed[num:] = later
    return max((key for first, key in keyed if round is None or first <= round), default=0)


class RulingVerifier:
    """Checks signatures, of rulings and of commits, by the keys of the run's coordinators."""

    def __init__(self, trust: Trust | Ed25519PublicKey) -> None:
        """A key alone is of a run whose keys nobody changes."""
        self.trust = trust if isinstance(trust, Trust) else Trust(keys={0: trust})

    @classmethod
    def of_authority(cls, authority_pem: bytes, bundle: bytes = b"") -> "RulingVerifier":
        """Reads an authority's certificate, and what it vouches for (protocol.trust.signing)."""
        return cls(Trust.of_authority(authority_pem, bundle))

    def check(self, signed: SignedRuling, *, least: int = 0) -> None:
        """Raises BadDataError unless a key of that number, or a later one, has signed it."""
        if not self.trust.has_signed(signed.ruling.statement, signed.signature, least=least):
            raise BadDataError(
                f"ruling {signed.ruling.number} does not bear the signature of the run's coordinator"
            )

    def has_signed(self, commit: Commit, rulings: Iterable[Ruling]) -> bool:
        """Whether a commit is one of the run's coordinator, by the key that was in force in its round."""
        least = least_key(rulings, round=commit.round)
        return self.trust.has_signed(commit_statement(commit), commit.signature, least=least)

    def after(self, ruling: Ruling) -> "RulingVerifier":
        """With the keys that a ruling tells of. Raises BadDataError where the authority does not vouch."""
        number = key_number(ruling)
        if ruling.kind is not RulingKind.KEYED or number in self.trust.keys:
            return self
        try:
            bundle = str(dict(ruling.changes).get(CERTIFICATES)).encode()
            if Bundle.read(bundle).newest != number:
                raise ProtocolMismatchError(f"its certificates are not of key {number}")
            return RulingVerifier(self.trust.taking(bundle))
        except ProtocolMismatchError as error:
            raise BadDataError(
                f"ruling {ruling.number} changes the coordinator's key without right: {error.what}"
            ) from error


def checked_chain(rulings: Iterable[SignedRuling], verifier: RulingVerifier) -> RulingVerifier:
    """Checks all rulings from the first on; returns what checks those that are to come.

    Raises BadDataError at the first that is not signed, or does not follow the one before.
    """
    before: Ruling | None = None
    least = 0  # the number of the key that may sign the next
    for signed in rulings:
        verifier = verifier.after(signed.ruling)
        least = max(least, key_number(signed.ruling))
        verifier.check(signed, least=least)
        if not follows(signed.ruling, before):
            at = 0 if before is None else before.number
            raise BadDataError(
                f"the ruling after number {at} is not the one that was made after it"
            )
        before = signed.ruling
    return verifier


def in_words(ruling: Ruling) -> str:
    """A ruling as people read it, without who decided it and when."""
    who = ruling.node_name or ruling.node_id[:12]
    why = f": {ruling.reason}" if ruling.reason else ""
    match ruling.kind:
        case RulingKind.INVITED:
            whose = " for the run owner's own machines" if owned_invite(ruling) else ""
            most = limit_of_invite(ruling)
            nodes = "one node" if most == 1 else f"{most or 'all its'} nodes"
            at_once = "" if most is None else f", for {nodes} at once"
            return f"invite {ruling.invite_id} was made{whose}{at_once}{why}"
        case RulingKind.REVOKED:
            return f"invite {ruling.invite_id} was revoked"
        case RulingKind.JOINED:
            return f"{who} joined with invite {ruling.invite_id}{why}"
        case RulingKind.PAUSED:
            return f"the run was paused{why}"
        case RulingKind.RESUMED:
            return "the run was resumed"
        case RulingKind.STOPPED:
            return f"the run was stopped after round {ruling.from_round - 1}{why}"
        case RulingKind.AMENDED:
            changes = ", ".join(f"{key} = {json.dumps(value)}" for key, value in ruling.changes)
            return f"{changes} from round {ruling.from_round} on{why}"
        case RulingKind.ROLLED_BACK:
            return _undone_in_words(ruling) + why
        case RulingKind.WITHDRAWN:
            return (
                f"the run did not go back to the state after round {ruling.from_round - 1}, and is "
                f"paused with the one that it had{why}"
            )
        case RulingKind.MOVED:
            told = dict(ruling.changes)
            return f"the coordinator moves to {told.get(HOST)}, port {told.get(CONTROL_PORT)}{why}"
        case RulingKind.KEYED:
            return (
                f"the coordinator's keys were changed: key {key_number(ruling)} signs from now on"
            )
        case RulingKind.PASSED_OVER:
            kind = json.loads(ruling.text)[KIND]
            return f"a ruling of kind {kind!r}, which this release does not know and need not{why}"
        case _:
            return f"{who} was {ruling.kind}{why}"


def _undone_in_words(ruling: Ruling) -> str:
    first, last = ruling.from_round, ruling.last_round
    rounds = f"round {first} is" if first == last else f"rounds {first} to {last} are"
    by = f", to which {', '.join(ruling.contributors)} contributed" if ruling.contributors else ""
    alone = f", which {ruling.node_name} alone said to keep" if ruling.node_name else ""
    return f"the run went back to the state after round {first - 1}{alone}; {rounds} undone{by}"


def refuse_barred(standing: Ruling | None) -> None:
    """Raises ExpelledError or HeldBackError for a node whose latest ruling bars it."""
    if standing is None:
        return
    when = datetime.fromtimestamp(standing.unix_seconds, UTC)
    why = f": {standing.reason}" if standing.reason else ""
    words = (
        f"{standing.by} has {standing.kind} {standing.node_name} ({when:%Y-%m-%d %H:%M} UTC){why}"
    )
    if standing.kind is RulingKind.EXPELLED:
        raise ExpelledError(
            words, next_step="ask the run owner: another invite does not let this key in"
        )
    if standing.kind is RulingKind.QUARANTINED:
        raise HeldBackError(
            words,
            next_step=f"it waits until the run owner types 'atoll nodes readmit {standing.node_name}'",
        )


def rulings_to_wire(signed: Iterable[SignedRuling]) -> ruling_pb2.Rulings:
    """Signed rulings."""
    return ruling_pb2.Rulings(
        rulings=[
            ruling_pb2.Ruling(ruling_json=one.ruling.canonical_json(), signature=one.signature)
            for one in signed
        ]
    )


def rulings_from_wire(wire: ruling_pb2.Rulings) -> tuple[SignedRuling, ...]:
    """Signed rulings; raises BadDataError for one that cannot be read. Checks no signature."""
    return tuple(
        SignedRuling(ruling=ruling_from_json(one.ruling_json), signature=one.signature)
        for one in wire.rulings
    )
