"""How long a member's messages to the coordinator may be, by call.

Reading a message holds up everybody: 4 MiB of empty entries take a core 100 to 300 ms, while a heartbeat has
hundreds of bytes. So each call has its own bound, which what honest nodes of the largest swarms send stays
well below. Nodes divide what they report.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

OTHER_BYTES = 1 << 16
"""Of calls that are not named here: a layout of 1024 fragments has 10 KB, 16 addresses have 4."""

USUAL_REPORTS_BYTES = 1 << 18
"""A node ends a message with the report before the one that passes this."""

BYTES_OF_CALLS = {
    "Heartbeat": 1 << 18,  # five lists of a thousand members that it does not reach: 170 KB
    "Report": USUAL_REPORTS_BYTES + (1 << 18),  # a mean of a thousand contributors has 150 KB
    "SubmitCommits": 2 << 20,  # to MAX_BROUGHT_BYTES, and the commit that passes that
    "SubmitRulings": 3 << 20,  # of MOST_CHARACTERS, with signatures
}

RUN_OWNER = "OperatorService"
"""What the run owner sends has gRPC's bound alone."""


class Sized(Protocol):
    """A message of protobuf."""

    def ByteSize(self) -> int: ...  # noqa: D102, N802


Item = TypeVar("Item", bound=Sized)


def most_bytes_of(path: str, *, most: int) -> int:
    """Of a message to a call, by its path in gRPC: /atoll.v1.SessionService/Report."""
    service, _, call = path.rpartition("/")
    if service.endswith(RUN_OWNER):
        return most
    return min(most, BYTES_OF_CALLS.get(call, OTHER_BYTES))


def in_messages(items: Sequence[Item], *, most_bytes: int) -> Iterator[list[Item]]:
    """The items in their order, as many at a time as have room; one that has none alone."""
    some: list[Item] = []
    num_bytes = 0
    for item in items:
        size = item.ByteSize()
        if some and num_bytes + size > most_bytes:
            yield some
            some, num_bytes = [], 0
        some.append(item)
        num_bytes += size
    if some:
        yield some
