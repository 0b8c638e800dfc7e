"""Domain errors on their way through gRPC: AtollErrors become statuses, and AtollErrors again.

The status carries the sentence; trailing metadata carries the class and the next step.
"""

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn, cast
from urllib.parse import quote

import grpc
import grpc.aio

from protocol import errors
from protocol.errors import (
    NOT_STARTED,
    SAME_VERSION,
    AtollError,
    NotPermittedError,
    ProtocolMismatchError,
    TemporaryError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

CLASS_KEY = "atoll-error"
NEXT_STEP_KEY = "atoll-next-step-bin"  # gRPC lets only "-bin" values hold more than ASCII

MAX_TEXT_BYTES = 3000
"""Of a sentence, percent-encoded: beyond 8 KiB of metadata gRPC drops a status, now and then."""

CROWDED = "Concurrent RPC limit exceeded"
"""With what gRPC itself refuses a call beyond `maximum_concurrent_rpcs`."""

_CLASSES: dict[str, type[AtollError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, AtollError)
}

# For programs that are not Atoll; ours go by the class name. The first class that fits counts.
_STATUS_OF: tuple[tuple[type[AtollError], grpc.StatusCode], ...] = (
    (errors.SessionEndedError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.TemporaryError, grpc.StatusCode.ABORTED),
    (errors.UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.BadDataError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NoInputError, grpc.StatusCode.NOT_FOUND),
    (errors.UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.SystemRefusedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.CannotCreateError, grpc.StatusCode.ALREADY_EXISTS),
    (errors.ProtocolMismatchError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.NotPermittedError, grpc.StatusCode.PERMISSION_DENIED),
    (errors.ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.AtollError, grpc.StatusCode.INTERNAL),
)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: AtollError) -> NoReturn:
    """Ends a call with a domain error, which `translated` gives the caller back."""
    status = next(status for kind, status in _STATUS_OF if isinstance(error, kind))
    # A subclass that protocol.errors does not know travels as the nearest one that it does.
    name = next(
        kind.__name__ for kind in type(error).__mro__ if _CLASSES.get(kind.__name__) is kind
    )
    await context.abort(
        status,
        _shortened(error.what),
        ((CLASS_KEY, name), (NEXT_STEP_KEY, _shortened(error.next_step).encode())),
    )


def is_domain_error(error: grpc.RpcError) -> bool:
    """Whether the other side ended the call with `abort`, as opposed to anything between us."""
    return CLASS_KEY in _trailing_metadata(error)


def translated(error: grpc.RpcError, *, endpoint: str) -> AtollError:
    """What an error of a call means to people. Takes nothing but the error, touches no network.

    Channels of protocol.wire.channel do this on their own.
    """
    details = error.details() or "no details"
    metadata = _trailing_metadata(error)
    if CLASS_KEY in metadata:
        kind = _CLASSES.get(_as_text(metadata[CLASS_KEY]), AtollError)
        return kind(details, next_step=_as_text(metadata.get(NEXT_STEP_KEY, "")))
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return UnavailableError(
                f"no coordinator answers at {endpoint} ({details})",
                next_step=NOT_STARTED,
            )
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return UnavailableError(
                f"the coordinator at {endpoint} did not answer in time",
                next_step="try again; if it stays so, look at the coordinator's log",
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED if details.startswith(CROWDED):
            return TemporaryError(
                f"the coordinator at {endpoint} answers as many others at once as it can",
                next_step="try again in a few seconds",
            )
        case grpc.StatusCode.CANCELLED:
            return TemporaryError(
                f"the call to {endpoint} was cancelled ({details})", next_step="try again"
            )
        case grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolMismatchError(
                f"the coordinator at {endpoint} does not know this call ({details})",
                next_step=SAME_VERSION,
            )
        case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNAUTHENTICATED:
            return NotPermittedError(
                f"the coordinator at {endpoint} refuses: {details}",
                next_step="ask the run owner for an invite: 'atoll invite create'",
            )
        case code:
            return AtollError(
                f"the coordinator at {endpoint} failed ({code.name}: {details})",
                next_step="look at the coordinator's log",
            )


def _trailing_metadata(error: grpc.RpcError) -> dict[str, str | bytes]:
    pairs = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    return dict(pairs)


def _as_text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


def _shortened(text: str) -> str:
    sizes = accumulate(len(quote(character)) for character in text[:MAX_TEXT_BYTES])
    num_fitting = sum(size <= MAX_TEXT_BYTES for size in sizes)
    return text if num_fitting == len(text) else text[: num_fitting - 1] + "…"
