"""Who may call which service, and how answers and errors leave it."""

import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol, TypeVar

import structlog

from coordinator.server import Context, caller, certificate_of
from coordinator.store import Store
from protocol.errors import (
    AtollError,
    HeldBackError,
    NotPermittedError,
    SystemRefusedError,
    TemporaryError,
    UnavailableError,
)
from protocol.trust.pki import Principal, Role, refuse_ended, renew_in_seconds
from protocol.trust.rulings import Ruling, refuse_barred
from protocol.wire.rounds import NodeId
from protocol.wire.status_codes import abort

_log = structlog.get_logger()

T = TypeVar("T")


class Write(Protocol):
    """Makes a change to the database when it is its turn, and returns when it is durable."""

    def __call__(self, change: Callable[[], T]) -> Awaitable[T]:
        """See coordinator.driver.Driver.write."""
        ...


Caller = TypeVar("Caller")


MOST_CALLS = 1000
CALLS_A_SECOND = 100.0
"""A member may call so often, and a thousand times at once: ten times what the shortest rounds make of it.
One that calls in a loop takes a twentieth of a core, not all of it."""


REJOIN_SECONDS = 60.0
"""After a start members bring back rulings that the database lacks: also who joined by which invite."""

MOST_TOLD = 64
"""Nodes that are not let in, and that the log names: of those that joined after a copy was made, for one."""


MOST_ATTACHES = 30
ATTACHES_A_SECOND = 1 / 3
"""A member may attach so often. Each time all others are told where it is, and dial it there, and the disk
takes a line of the database and one of the log. A link that drops every ten seconds has a third of it."""


class CallRates:
    """How many calls each member has left: a bucket that fills with time (a token bucket)."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        most: int = MOST_CALLS,
        a_second: float = CALLS_A_SECOND,
        next_step: str = f"call less than {CALLS_A_SECOND:g} times a second",
    ) -> None:
        self._most = most
        self._a_second = a_second
        self._next_step = next_step
        self._clock = clock
        self._left: dict[NodeId, tuple[float, float]] = {}  # calls, and when that was

    def take(self, node_id: NodeId) -> None:
        """Counts a call; raises TemporaryError when there were too many."""
        now = self._clock()
        left, at = self._left.get(node_id, (float(self._most), now))
        left = min(float(self._most), left + self._a_second * (now - at))
        if left < 1:
            raise TemporaryError(
                f"{self._most} calls of node {node_id} came at once", next_step=self._next_step
            )
        self._left[node_id] = (left - 1, now)


class Gate:
    """Tells callers apart by their certificates; raises NotPermittedError for the wrong ones.

    A certificate is not enough for a node or a viewer: this coordinator's database must know it as
    well, no ruling may bar it, its dates must hold also on a connection that was opened long ago, and it may
    not call without end. `standing_of` gives the latest ruling on a node, `clock` seconds, `wall_clock` UTC
    seconds. `on_member` hears gRPC's name of each connection by which a member called, and of its key.
    """

    def __init__(
        self,
        *,
        swarm_id: str,
        store: Store,
        standing_of: Callable[[NodeId], Ruling | None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
        on_member: Callable[[str, str], None] = lambda peer, key: None,
    ) -> None:
        self._swarm_id = swarm_id
        self._store = store
        self._standing_of = standing_of
        self._on_member = on_member
        self._calls = CallRates(clock)
        self._clock = clock
        self._hears_members_until = clock() + REJOIN_SECONDS
        self._told_unknown: set[NodeId] = set()
        self._wall_clock = wall_clock

    def node(self, context: Context) -> NodeId:
        """The enrolled node that calls, and may; a helper is one.

        Raises ExpelledError for one that never may again, HeldBackError for one that has to wait.
        """
        principal = self._principal(context)
        if principal.role not in (Role.NODE, Role.HELPER) or principal.node_id is None:
            raise NotPermittedError(
                f"the {principal.role}'s certificate is not a node's",
                next_step="join the swarm with 'atoll join INVITE' in another folder",
            )
        return self._member(principal.node_id, context)

    def operator(self, context: Context) -> None:
        """Lets the run owner pass."""
        principal = self._principal(context)
        if principal.role is not Role.OPERATOR:
            raise NotPermittedError(
                f"only the run owner may do this, not a {principal.role}",
                next_step="run it in the coordinator's folder, or with --dir",
            )
        self._on_member(context.peer(), principal.role)

    def anyone(self, context: Context) -> Role:
        """Lets the run owner, enrolled nodes and viewers pass; returns which of them calls."""
        principal = self._principal(context)
        match principal:
            case Principal(role=Role.OPERATOR):
                self._on_member(context.peer(), principal.role)
            case Principal(role=Role.VIEWER, node_id=str(viewer_id)):
                self._member(NodeId(viewer_id), context)
            case _:
                self.node(context)
        return principal.role

    def _member(self, node_id: NodeId, context: Context) -> NodeId:
        member = self._store.invites.member(node_id)
        if member is None:
            raise self._unknown(node_id)
        standing = self._standing_of(node_id)
        refuse_barred(standing)
        if standing is None and member.needs_approval:
            raise HeldBackError(
                f"{member.node_name} has joined and waits until the run owner approves it",
                next_step=f"the run owner types 'atoll nodes approve {member.node_name}'",
            )
        self._on_member(context.peer(), node_id)
        self._calls.take(node_id)
        return node_id

    def _unknown(self, node_id: NodeId) -> AtollError:
        """Of a node whose certificate is ours, and whom the database does not know: it is older."""
        what = (
            f"node {node_id} is not enrolled here: it joined after the copy was made from which the "
            "coordinator goes on"
        )
        if self._clock() < self._hears_members_until and self._store.invites.members():
            return TemporaryError(
                f"{what}, and members of before may yet bring back by which invite",
                next_step=f"wait: this is known {REJOIN_SECONDS:.0f} s after the coordinator's start",
            )
        if node_id not in self._told_unknown and len(self._told_unknown) < MOST_TOLD:
            self._told_unknown.add(node_id)
            _log.warning(
                "a node that joined after the copy was made is not let in: its invite is not known here",
                node_id=node_id,
                next_step="make an invite, 'atoll invite create', and send it to its owner, who types "
                "'atoll join' in the same folder",
            )
        return NotPermittedError(
            what,
            next_step="ask the run owner for a new invite, and type 'atoll join' in the same folder: key "
            "and work stay",
        )

    def _principal(self, context: Context) -> Principal:
        principal = caller(context)
        if principal.swarm_id != self._swarm_id:
            raise NotPermittedError(
                f"the certificate is of swarm {principal.swarm_id}, this is {self._swarm_id}",
                next_step="join the swarm with 'atoll join INVITE'",
            )
        refuse_ended(certificate_of(context), self._wall_clock())
        return principal

    def times(self, context: Context) -> tuple[float, float]:
        """When the caller is to renew its certificate, in seconds, and the time now, in UTC seconds."""
        now = self._wall_clock()
        return renew_in_seconds(certificate_of(context), now), now


def service(admit: Callable[[Context], Caller], **answers: Callable[[Caller, Any], Any]) -> Any:
    """A gRPC service: each of its calls by name admits the caller, then answers it.

    An answer that waits for the disk is awaited: see coordinator.driver. An AtollError ends the call with it.
    """
    return SimpleNamespace(**{name: _call(admit, answer) for name, answer in answers.items()})


def _call(
    admit: Callable[[Context], Caller], answer: Callable[[Caller, Any], Any]
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def call(request: Any, context: Context) -> Any:
        try:
            told = answer(admit(context), request)
            return await told if isinstance(told, Awaitable) else told
        except AtollError as error:
            await refuse(context, error)

    return call


def for_all(answer: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """An answer that is the same whoever asks."""
    return lambda _, request: answer(request)


async def refuse(context: Context, error: AtollError) -> NoReturn:
    """Ends a call with an error.

    What this machine refuses is no fault of the caller's, which shall wait and try again: a node
    that met it as its own would end.
    """
    if isinstance(error, SystemRefusedError):
        _log.error("refused by this machine", why=error.what, next_step=error.next_step)
        error = UnavailableError(
            f"the coordinator's machine refuses: {error.what}",
            next_step=f"on that machine: {error.next_step}",
        )
    await abort(context, error)
