"""What is answered on a stream: go on, received, not held, or refused with the reason."""

from node.exchange.transport.frames import FrameError, TransferStream
from node.exchange.transport.transport import NotHeldError, TransferRefusedError
from protocol.v1 import transfer_pb2 as wire

MAX_REASON_CHARACTERS = 1000


async def refuse(stream: TransferStream, reason: str) -> None:
    """Tells the other side why not."""
    await stream.send(
        wire.TransferResponse(
            status=wire.TRANSFER_STATUS_REFUSED, reason=reason[:MAX_REASON_CHARACTERS]
        )
    )


async def expect(
    stream: TransferStream, status: "wire.TransferStatus.ValueType"
) -> wire.TransferResponse:
    """Waits for this answer; raises NotHeldError, TransferRefusedError or FrameError at another."""
    response = await stream.receive(wire.TransferResponse, is_patient=True)
    if response.status == status:
        return response
    if response.status == wire.TRANSFER_STATUS_NOT_HELD:
        raise NotHeldError("the peer does not hold it")
    if response.status == wire.TRANSFER_STATUS_REFUSED:
        reason = "".join(c if c.isprintable() else "?" for c in response.reason)
        raise TransferRefusedError(reason[:MAX_REASON_CHARACTERS] or "refused without a reason")
    raise FrameError(f"status {response.status} came where {status} was due")
