"""What the leader orders of a host that follows, and what it answers: values, and how they look on the wire.

Another machine sends them, so each is checked against its type before it is acted on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from node.hosts.wire import Message
from node.island.checkpoints.folder import About, Kept, Loaded
from node.island.island import Evaluation, InnerReport, InnerWork
from node.island.parallel.mesh_shape import LocalTraining, MeshShape
from protocol.errors import ProtocolMismatchError

Answer = TypeVar("Answer")


class Order(Generic[Answer]):
    """One order, by the type of its answer. An argument too many is refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The ranks are up."""

    corpus: str  # digest of what they read, in hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Order[Started]):
    """Bring up these ranks of the island. Answered when all hosts' ranks have met."""

    spec: dict[str, Any]  # the run file's tables
    shape: MeshShape
    local: LocalTraining
    first_rank: int
    num_ranks: int
    host: str  # where ranks meet
    port: int
    num_hosts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One host's part of one writing."""

    set_id: str
    host: int
    num_hosts: int  # that wrote

    @classmethod
    def of(cls, about: About) -> Self:
        """Whose part of what a checkpoint is."""
        return cls(set_id=about.set_id, host=about.host, num_hosts=about.num_hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelved:
    """The parts of checkpoints that lie here."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenShelf(Order[Shelved]):
    """Look which parts of this run's checkpoints are here. No rank runs."""

    run_digest: str  # in hex
    layout_digest: str
    every_rounds: int
    num_hosts: int
    num_elements: int
    num_parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver(Order[Loaded]):
    """Have the ranks go on from a checkpoint; `about` goes without its files, which differ by host."""

    about: About


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(Order[None]):
    """Note what all hosts published of a fragment; its values come with the order."""

    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt(Order[None]):
    """Take over global parameters, of a fragment or of all; they come with the order."""

    fragment: int | None
    is_taken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(Order[InnerReport]):
    """Take inner steps; progress is told meanwhile."""

    work: InnerWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish(Order[None]):
    """Send what these ranks publish of a fragment, zero where others do: the values come with the answer."""

    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepPart(Order[Kept]):
    """Write these ranks' part of a checkpoint."""

    round: int
    is_waited: bool
    set_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate(Order[Evaluation]):
    """Measure the held-out loss of the global parameters, which come with the order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Order[None]):
    """End the ranks; others may be started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Order[None]):
    """The leader ends."""


_ANSWERS: Mapping[type[Order[Any]], Any] = {
    Start: Started,
    OpenShelf: Shelved,
    TakeOver: Loaded,
    Hold: None,
    Adopt: None,
    Train: InnerReport,
    Publish: None,
    KeepPart: Kept,
    Evaluate: Evaluation,
    Stop: None,
    End: None,
}
_BY_NAME = {order.__name__: order for order in _ANSWERS}
_ORDER_OF = {order: TypeAdapter(order) for order in _ANSWERS}
_ANSWER_OF: Mapping[type[Order[Any]], TypeAdapter[Any]] = {
    order: TypeAdapter(answer) for order, answer in _ANSWERS.items()
}


def to_wire(order: Order[Any]) -> Message:
    """An order as a message."""
    kind = type(order)
    return {"order": kind.__name__, "arguments": _ORDER_OF[kind].dump_python(order)}


def from_wire(message: Message) -> Order[Any]:
    """The order that a message holds; raises ProtocolMismatchError."""
    kind = _BY_NAME.get(str(message.get("order")))
    if kind is None:
        raise ProtocolMismatchError(
            f"the leader orders {message.get('order')!r}, which is no order"
        )
    try:
        order: Order[Any] = _ORDER_OF[kind].validate_python(message.get("arguments"))
    except ValidationError as error:
        raise ProtocolMismatchError(
            f"the leader orders {kind.__name__} wrongly: {_first(error)}"
        ) from error
    return order


def answer_to_wire(order: Order[Answer], answer: Answer) -> Any:
    """An answer as it goes into a message."""
    return _ANSWER_OF[type(order)].dump_python(answer)


def answer_from_wire(order: Order[Answer], told: object) -> Answer:
    """What was answered; raises ProtocolMismatchError."""
    try:
        answer: Answer = _ANSWER_OF[type(order)].validate_python(told)
    except ValidationError as error:
        name = type(order).__name__
        raise ProtocolMismatchError(f"{name} was answered wrongly: {_first(error)}") from error
    return answer


def _first(error: ValidationError) -> str:
    """Its first complaint, with the place."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else str(first["msg"])
