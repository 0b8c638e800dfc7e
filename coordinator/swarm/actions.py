"""What the core asks the edge to do. All state is in SwarmState; these only say what follows from it."""

from dataclasses import dataclass

from coordinator.swarm.state import Alarm, Conviction
from protocol.trust.rulings import Ruling
from protocol.wire.messages import Message
from protocol.wire.rounds import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """Answers an attach: this session now speaks for the node; streams of older ones end."""

    node_id: NodeId
    session_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSession:
    """The node is lost or has left: its stream ends."""

    node_id: NodeId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRoster:
    """The present members changed: every session is told how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """A message to the sessions of these nodes, or of all."""

    message: Message
    to: tuple[NodeId, ...] | None = None  # None: all
    is_learned: bool = False  # a commit that was made before the database was copied, or in another


@dataclass(frozen=True, slots=True, kw_only=True)
class GoBack:
    """The run is to go back by itself, or to pause: the edge makes the ruling, which needs the database."""

    alarm: Alarm


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawalAsked:
    """Nobody could follow a going back: the edge makes the ruling that withdraws it."""

    withdrawn: Ruling
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineAsked:
    """A member is convicted: the edge makes the ruling, which needs a date and a signature."""

    conviction: Conviction


Action = OpenSession | EndSession | SendRoster | Tell | GoBack | WithdrawalAsked | QuarantineAsked
