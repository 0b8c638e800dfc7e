"""How nodes were doing when last heard. In memory only: nothing is decided by it."""

from collections.abc import Collection
from dataclasses import dataclass

from protocol.v1.session_pb2 import HeartbeatRequest
from protocol.wire.channel import DEADLINE_SECONDS, RETRY_CAP_SECONDS
from protocol.wire.rounds import NodeId

COPY_SECONDS = DEADLINE_SECONDS + RETRY_CAP_SECONDS
"""A process that waits to attach asks at least this often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """When a node was last heard, in coordinator time, and its latest heartbeat."""

    at: float
    heartbeat: HeartbeatRequest | None


class Telemetry:
    """The latest heartbeat of each node."""

    def __init__(self) -> None:
        self._heard: dict[NodeId, Heard] = {}
        self._copies: dict[NodeId, float] = {}  # when another process of a node was refused last

    def attached(self, node_id: NodeId, *, now: float) -> None:
        """The node attached: what it said before may be of another process."""
        self._copies.pop(node_id, None)
        self._heard[node_id] = Heard(at=now, heartbeat=None)

    def copy_refused(self, node_id: NodeId, *, now: float) -> bool:
        """Another process of the node asked to attach; returns whether that is news."""
        is_news = not self.has_waiting_copy(node_id, now=now)
        self._copies[node_id] = now
        return is_news

    def has_waiting_copy(self, node_id: NodeId, *, now: float) -> bool:
        """Whether one has asked so lately that it still waits, for all that is known."""
        return node_id in self._copies and now - self._copies[node_id] < COPY_SECONDS

    def heard(self, node_id: NodeId, *, now: float) -> None:
        """The node called, with something else than a heartbeat."""
        before = self._heard.get(node_id)
        self._heard[node_id] = Heard(at=now, heartbeat=None if before is None else before.heartbeat)

    def heartbeat(self, node_id: NodeId, heartbeat: HeartbeatRequest, *, now: float) -> None:
        """The node sent a heartbeat."""
        self._heard[node_id] = Heard(at=now, heartbeat=heartbeat)

    def keep_only(self, node_ids: Collection[NodeId]) -> None:
        """Forgets nodes that are no members any more."""
        if len(self._heard) > len(node_ids):
            self._heard = {n: heard for n, heard in self._heard.items() if n in node_ids}

    def of(self, node_id: NodeId) -> Heard | None:
        """What is known of a node; None when it has not called since this coordinator started."""
        return self._heard.get(node_id)
