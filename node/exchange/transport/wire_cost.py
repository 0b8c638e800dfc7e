"""What a transfer costs on the wire beyond its own bytes: an estimate from measured constants.

p2pd does not tell how much it sent. To the bytes that we hand over come encryption (Noise), streams
(yamux), TCP and IP (52 bytes in each packet of 1500), and the acknowledgements of the other way.

Measured by benchmarks/wire/transport.py (2 nodes, MTU 1500, IP headers included, no link layer);
body, then bytes on the wire for a push and for a fetch, both ways together:

    20 KB    22.2 KB  22.1 KB       2 MB   2.084 MB  2.088 MB
    200 KB   210 KB   212 KB       20 MB   20.93 MB  20.99 MB

The estimate is within 1.5 % of these. With loopback's own MTU of 64 KiB, where headers vanish, it
is at most 6 % too high. Not counted: keepalives, a few bytes in a minute.
"""

HEADER_SHARE = 0.0375
"""TCP, IP, yamux and Noise headers, for each byte in the same direction."""

ACKNOWLEDGEMENT_SHARE = 0.008
"""Bare acknowledgements, for each byte in the other direction; half as many as TCP's worst case."""

STREAM_BYTES = 550
"""Opening and closing a stream and its small messages' packets, in each direction."""

CONNECTION_BYTES = 2050
"""TCP, Noise and identify handshakes of a new connection, in each direction."""


def wire_bytes(bytes_sent: int, bytes_received: int, *, num_streams: int = 1) -> tuple[int, int]:
    """Estimate of the bytes that left and that reached the network interface for one transfer."""
    return (
        _one_way(bytes_sent, other_way=bytes_received) + num_streams * STREAM_BYTES,
        _one_way(bytes_received, other_way=bytes_sent) + num_streams * STREAM_BYTES,
    )


def _one_way(num_bytes: int, *, other_way: int) -> int:
    shares = HEADER_SHARE * num_bytes + ACKNOWLEDGEMENT_SHARE * other_way
    return num_bytes + round(shares)
