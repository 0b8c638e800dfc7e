"""Headers of payloads: one value has one form, since their digest is what commits name."""

from dataclasses import replace
from typing import Any

import pytest

from protocol.trust.identity import Identity
from protocol.wire.payload import (
    CONTRIBUTION,
    MAX_HEADER_BYTES,
    Payload,
    PayloadError,
    PayloadHeader,
)
from protocol.wire.rounds import Digest, NodeId

RUN = Digest(bytes(range(32)))


def header_of(**changes: int) -> PayloadHeader:
    values: dict[str, Any] = {"round": 7, "fragment": 0, "slice_index": 1, "start": 256} | changes
    values = {"samples": 2, "tokens": 5} | values
    return Payload.seal(
        kind=CONTRIBUTION,
        run_digest=RUN,
        num_elements=4,
        codec="fp32/1",
        sender_id=NodeId("a"),
        body=b"body",
        **values,
    ).header


def field(number: int, value: bytes) -> bytes:
    """A field of the wire type "length-delimited"."""
    return bytes([number << 3 | 2, len(value)]) + value


ENCODED = header_of().encode()
ROUND = bytes([3 << 3, 7])


def test_a_header_reads_as_it_was_written() -> None:
    for header in (
        *(header_of(), header_of(round=0, samples=0, tokens=0)),
        *(header_of(start=2**64 - 1), header_of(samples=7), header_of(tokens=7)),
    ):
        assert PayloadHeader.decode(header.encode()) == header


def test_the_bytes_of_a_header_are_the_ones_that_they_have_always_been() -> None:
    """Digests in commits are of these bytes; whoever changes them begins another version of Atoll."""
    assert header_of().encode().hex() == (
        "08011220000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f18072801"
        "30800238044206667033322f314805520161580462200be9c598ae63835518e7fb422dc3027f452d"
        "75f3dbdb94c90d843298b1180ad96802"
    )


@pytest.mark.parametrize(
    "encoded",
    [
        ENCODED + bytes([0x9A, 1, 4]) + b"more",
        ENCODED + ROUND,
        ENCODED.replace(ROUND, bytes([3 << 3, 0x87, 0])),
        ENCODED.replace(ROUND, b"") + ROUND,
        ROUND + ENCODED.replace(ROUND, b""),
        ENCODED + bytes([4 << 3, 0]),
        ENCODED.replace(ROUND, ROUND + ROUND),
    ],
    ids=[
        "an unknown field",
        "a field twice",
        "a number with a byte too many",
        "a field that comes late",
        "a field that comes early",
        "a zero that is told",
        "a field twice in a row",
    ],
)
def test_a_header_in_another_form_than_ours_is_refused(encoded: bytes) -> None:
    """It reads as the same values, and has another digest: two reducers could disagree on it."""
    assert encoded != ENCODED
    with pytest.raises(PayloadError, match="canonically"):
        PayloadHeader.decode(encoded)


@pytest.mark.parametrize(
    ("encoded", "why"),
    [
        (b"\xff", "not a payload header"),
        (ENCODED.replace(field(2, RUN), field(2, RUN[:31])), "32 bytes"),
        (bytes([1 << 3, 99]) + ENCODED[2:], "unknown payload kind"),
        (bytes(MAX_HEADER_BYTES + 1), "longer than"),
    ],
)
def test_what_is_no_header_is_refused(encoded: bytes, why: str) -> None:
    with pytest.raises(PayloadError, match=why):
        PayloadHeader.decode(encoded)


def test_a_body_is_joined_only_with_the_header_that_announced_its_size_and_its_digest() -> None:
    header = header_of()
    assert Payload.verified(header, b"body").body == b"body"
    with pytest.raises(PayloadError, match="damaged"):
        Payload.verified(header, b"bodY")
    with pytest.raises(PayloadError, match="4 bytes was announced as 5"):
        Payload.verified(replace(header, body_bytes=5), b"body")


def signed() -> PayloadHeader:
    identity = Identity.generate()
    header = replace(header_of(), sender_id=identity.node_id, base_digest=bytes(32))
    return header.signed(identity)


def test_a_signed_header_is_believed_without_asking_anybody_for_a_key() -> None:
    header = signed()
    assert header.forgery() == ""
    assert PayloadHeader.decode(header.encode()) == header


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"round": 8}, "a signature that is not"),
        ({"tokens": 6}, "a signature that is not"),
        ({"body_digest": Digest(bytes(32))}, "a signature that is not"),
        ({"base_digest": bytes([1]) * 32}, "a signature that is not"),
        ({"norm": 1.0}, "a signature that is not"),
        ({"sender_id": NodeId("a")}, "another key"),
        ({"sender_key": bytes(32)}, "another key"),
        ({"signature": b""}, "not signed"),
    ],
)
def test_whatever_is_changed_in_a_signed_header_is_noticed(
    change: dict[str, Any], why: str
) -> None:
    assert why in replace(signed(), **change).forgery()


@pytest.mark.parametrize("norm", [-1.0, float("inf"), float("nan")])
def test_a_norm_that_no_result_has_is_refused(norm: float) -> None:
    with pytest.raises(PayloadError, match="norm is"):
        PayloadHeader.decode(replace(header_of(), norm=norm).encode())
