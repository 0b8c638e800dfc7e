"""One of the streams that parts of bodies go over to a peer, and what is under way on it."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from node.exchange.transport.frames import TransferStream
from node.exchange.transport.load import Load
from node.exchange.transport.parts import PARTS_IN_WINDOW
from node.exchange.transport.rates.uplink import UnderWay
from protocol.v1 import transfer_pb2 as wire


class Sent(NamedTuple):
    """A part on its way over a stripe."""

    load: Load
    part: int
    at: float  # when it was begun to be sent, by the tally's clock
    under_way: UnderWay

    @property
    def num_bytes(self) -> int:
        """Of the part."""
        return len(self.load.part(self.part))


@dataclass(slots=True)
class Stripe:
    """What a conveyor knows of one of its streams."""

    under_way: deque[Sent] = field(default_factory=deque)
    is_wide: asyncio.Event = field(default_factory=asyncio.Event)
    """Its window has opened at least once, and libp2p doubles it each time."""
    is_ready: bool = False  # for a part
    num_carried: int = 0  # parts that arrived

    @property
    def num_in_window(self) -> int:
        """Parts that a window lets be under way, though it may never have opened."""
        return min(len(self.under_way), PARTS_IN_WINDOW)


async def send_part(stream: TransferStream, sent: Sent) -> None:
    """Hands a part on to libp2p; it will be answered."""
    payload, part = sent.load.payload, sent.load.part(sent.part)
    stream.carries(payload.header.kind)
    header = wire.Part(index=sent.part, digest=payload.digest, num_bytes=len(part))
    await stream.send(header)
    await stream.send_body(part, is_answered=True)
    sent.under_way.is_out(asyncio.get_running_loop().time())
