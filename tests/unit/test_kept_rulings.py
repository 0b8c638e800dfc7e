"""The rulings that a node keeps: checked, on its disk, and by the coordinator's word where they differ."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from structlog.testing import capture_logs

from coordinator.services.ruling import tell_of_clock
from node.disk.history import KeptRulings
from protocol.errors import BadDataError, ConfigError, ProtocolMismatchError
from protocol.run.amendments import in_force
from protocol.run.run_spec import RunSpec
from protocol.trust.rulings import (
    RUN_OWNER,
    Address,
    Ruling,
    RulingKind,
    RulingVerifier,
    Scalar,
    SignedRuling,
    digest_of,
    in_words,
    moved_to,
    ruling_from_json,
    rulings_from_wire,
    rulings_to_wire,
)
from protocol.trust.signing import CommitSigner
from tests.unit.rulings_scene import amendment

SPEC = RunSpec()
SIGNER = CommitSigner(Ed25519PrivateKey.generate())
VERIFIER = RulingVerifier(SIGNER.public_key)


def signed(ruling: Ruling) -> SignedRuling:
    return SignedRuling(ruling=ruling, signature=SIGNER.signature_of(ruling.statement))


def chain(*reasons: str, after: tuple[SignedRuling, ...] = ()) -> tuple[SignedRuling, ...]:
    made = list(after)
    for reason in reasons:
        ruling = Ruling(
            number=len(made) + 1,
            before=digest_of([one.ruling for one in made]).hex(),
            kind=RulingKind.PAUSED,
            by=RUN_OWNER,
            unix_seconds=1.5,
            reason=reason,
        )
        made.append(signed(ruling))
    return tuple(made)


def of_a_later_release(number: int, before: Ruling | None, **fields: object) -> SignedRuling:
    """What a release to come may rule; `fields` are those that this one does not know, or their values."""
    known = Ruling(
        number=number,
        before=digest_of([before] if before else []).hex(),
        kind=RulingKind.PAUSED,
        by=RUN_OWNER,
        unix_seconds=1.5,
        reason="a new idea",
    )
    told = json.loads(known.canonical_json()) | fields
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    ruling = ruling_from_json(text)
    assert ruling.canonical_json() == text
    signature = SIGNER.signature_of(b"atoll ruling 1\n" + text.encode())
    return SignedRuling(ruling=ruling, signature=signature)


def test_a_ruling_of_a_kind_to_come_that_is_optional_counts_in_the_chain_and_for_nothing_else(
    tmp_path: Path,
) -> None:
    (first,) = chain("a pause")
    second = of_a_later_release(
        2, first.ruling, kind="greeted", colour="red", optional=["colour", "kind"]
    )
    assert second.ruling.kind is RulingKind.PASSED_OVER
    assert in_words(second.ruling) == (
        "a ruling of kind 'greeted', which this release does not know and need not: a new idea"
    )
    path = tmp_path / "rulings"
    kept = KeptRulings(SPEC, path=path, verifier=VERIFIER)
    kept.take((first, second))
    (third,) = chain("later", after=(first, second))[2:]
    kept.take((third,))
    again = KeptRulings(SPEC, path=path, verifier=VERIFIER)
    assert again.rulings == kept.rulings and again.digest == digest_of([third.ruling])
    assert rulings_from_wire(rulings_to_wire(again.after(0))) == (first, second, third)
    assert not again.are_amending and again.spec_in(9) == SPEC


def test_of_a_ruling_that_is_known_only_what_is_optional_may_be_unknown() -> None:
    ruling = of_a_later_release(1, None, colour="red", optional=["colour"]).ruling
    assert ruling.kind is RulingKind.PAUSED and ruling.reason == "a new idea"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kind": "greeted"}, "ruling 1 is of kind 'greeted', which this release does not know"),
        ({"kind": "greeted", "optional": ["colour"]}, "is of kind 'greeted'"),
        ({"kind": "passed over"}, "is of kind 'passed over'"),
        ({"colour": "red", "optional": ["kind"]}, "ruling 1 has colour"),
        ({"text": "anything"}, "ruling 1 has text"),
    ],
)
def test_a_ruling_that_must_be_followed_and_is_not_known_is_refused(
    fields: dict[str, object], why: str
) -> None:
    with pytest.raises(ProtocolMismatchError, match=why) as refused:
        of_a_later_release(1, None, **fields)
    assert refused.value.next_step is not None and "install" in refused.value.next_step


@pytest.mark.parametrize("optional", [5, [5], [[]], "kind"])
def test_what_says_nonsense_of_what_is_optional_is_refused(optional: object) -> None:
    with pytest.raises((BadDataError, ProtocolMismatchError)):
        of_a_later_release(1, None, kind="greeted", optional=optional)


def test_an_amendment_of_a_key_to_come_is_followed_without_it_where_nodes_need_not_know_it() -> (
    None
):
    changes = [["outer.learning_rate", 0.4], ["outer.shyness", 2]]
    amends: dict[str, object] = {"kind": "amended", "changes": changes, "from_round": 3}
    coordinators = of_a_later_release(1, None, **amends, optional=["outer.shyness"]).ruling
    assert in_force(SPEC, [coordinators]).outer.learning_rate == 0.4
    everybodys = of_a_later_release(1, None, **amends).ruling
    with pytest.raises(
        ConfigError, match=r"ruling 1 amends what this version cannot follow.*shyness"
    ):
        in_force(SPEC, [everybodys])


def test_a_ruling_is_read_as_it_was_written() -> None:
    (one,) = chain("a reason")
    assert ruling_from_json(one.ruling.canonical_json()) == one.ruling
    text = one.ruling.canonical_json().replace('"number":1', '"number": 1')
    with pytest.raises(BadDataError, match="other fields"):
        ruling_from_json(text)
    with pytest.raises(BadDataError, match="cannot be read"):
        ruling_from_json("{}")


def test_only_a_whole_address_is_followed() -> None:
    there = Address(host="new.example.org", control_port=7710, enrolment_port=7711)

    def moving(*changes: tuple[str, Scalar], kind: RulingKind = RulingKind.MOVED) -> Ruling:
        return replace(chain("")[0].ruling, kind=kind, changes=changes)

    ruling = moving(*there.changes)
    assert moved_to(ruling_from_json(ruling.canonical_json())) == there
    assert in_words(ruling) == "the coordinator moves to new.example.org, port 7710"
    assert moved_to(moving(*there.changes, kind=RulingKind.AMENDED)) is None
    for name, value in (("host", ""), ("host", 7), ("control_port", 0), ("control_port", True)):
        assert moved_to(moving(*(dict(there.changes) | {name: value}).items())) is None
    assert moved_to(moving(("host", "new.example.org"))) is None


def test_rulings_outlive_a_restart_and_what_was_written_half_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rulings"
    told = chain("one", "two")
    kept = KeptRulings(SPEC, path=path, verifier=VERIFIER)
    assert kept.take(told[:1]) and kept.take(told) == (told[1].ruling,)
    path.write_bytes(path.read_bytes() + b"\x10\0\0\0half")
    again = KeptRulings(SPEC, path=path, verifier=VERIFIER)
    assert again.after(0) == told and again.digest == kept.digest
    third = chain("three", after=told)
    again.take(third)
    assert KeptRulings(SPEC, path=path, verifier=VERIFIER).after(0) == third


def test_the_coordinators_rulings_take_the_place_of_others_with_their_numbers(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rulings"
    kept = KeptRulings(SPEC, path=path, verifier=VERIFIER)
    first = chain("one")
    kept.take(chain("two", "three", after=first))
    other = chain("another two", after=first)
    assert kept.take(other) == (other[1].ruling,)
    assert KeptRulings(SPEC, path=path, verifier=VERIFIER).after(0) == other


def test_what_is_not_signed_or_leaves_a_gap_is_refused_and_nothing_changes() -> None:
    kept = KeptRulings(SPEC, verifier=VERIFIER)
    told = chain("one", "two", "three")
    kept.take(told[:1])
    with pytest.raises(BadDataError, match="ruling 3 does not follow the 1"):
        kept.take(told[2:])
    forged = SignedRuling(ruling=told[1].ruling, signature=told[0].signature)
    with pytest.raises(BadDataError, match="ruling 2 does not bear the signature"):
        kept.take([forged])
    assert kept.after(0) == told[:1]


def test_an_amendment_that_this_version_cannot_follow_is_refused() -> None:
    ruling = amendment(2, outer__warmth=3)
    with pytest.raises(ConfigError, match="ruling 1 amends what this version cannot follow"):
        KeptRulings(SPEC, verifier=VERIFIER).take([signed(ruling)])


def test_the_rules_of_a_round_are_those_of_its_amendments() -> None:
    kept = KeptRulings(SPEC)
    assert not kept.are_amending
    ruling = amendment(4, inner__learning_rate=0.5)
    made: list[float] = []

    def make(spec: RunSpec) -> float:
        made.append(spec.inner.learning_rate)
        return spec.inner.learning_rate

    rate_in = kept.made_in(make)
    assert [rate_in(3), rate_in(4)] == 2 * [SPEC.inner.learning_rate] and len(made) == 1
    assert kept.spec_in(4) == SPEC, "what was asked before the amendment is not remembered after it"
    kept.take([signed(ruling)])
    assert kept.spec_in(3) == SPEC and kept.spec_in(4).inner.learning_rate == 0.5
    assert [rate_in(3), rate_in(4)] == [SPEC.inner.learning_rate, 0.5]


@pytest.mark.parametrize(
    ("hours", "is_told"), [(2, False), (0.05, False), (-0.05, False), (-1, True)]
)
def test_a_run_owner_hears_of_a_clock_that_is_behind_what_the_run_has_seen(
    hours: float, is_told: bool
) -> None:
    rulings = [one.ruling for one in chain("first", "second")]
    with capture_logs() as told:
        tell_of_clock(rulings, now=1.5 + hours * 3600)
        tell_of_clock([], now=0.0)
    assert len(told) == is_told
    if is_told:
        assert "clock is 1 h 0 min behind the run's latest ruling" in told[0]["event"]
