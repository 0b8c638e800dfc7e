"""From where nodes' datagrams come, as routers on the way have translated it: UDP beside the control port.

A coordinator behind a relay hears them through it (coordinator.relay).

A node that does not reach a member sends its token here, from the socket that it would dial by QUIC from.
The token comes by the node's session first, so a stranger's datagram says nothing and is not kept. Nothing
is ever answered: nobody can have this port send anything to anybody.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence

import structlog

from protocol.errors import SAME_VERSION, BadDataError
from protocol.wire.rounds import NodeId

TOKEN_BYTES = 16

FRESH_SECONDS = 20.0
"""What was seen is true for so long: routers forget a conversation of UDP after 30 s and more."""

Saw = Callable[[bytes, str, int, int], None]
"""A datagram, host and port that it came from, and the port that it came to."""

_log = structlog.get_logger(__name__)


class Lookout:
    """What was seen of whose datagrams. Pure but for the clock that it is given."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.ports: tuple[int, ...] = ()
        """Where nodes send datagrams to, as they are told."""
        self._clock = clock
        self._tokens: dict[NodeId, bytes] = {}
        self._node_ids: dict[bytes, NodeId] = {}
        self._seen: dict[NodeId, dict[int, tuple[str, float]]] = {}  # by port: where, and when

    def of(self, node_id: NodeId, token: bytes) -> tuple[str, ...]:
        """The multiaddresses that each port has seen a node at lately; notes its token.

        Raises BadDataError for what is no token. A token that another node has is not taken.
        """
        if token and len(token) != TOKEN_BYTES:
            raise BadDataError(
                f"a token of {len(token)} bytes, where {TOKEN_BYTES} are wanted",
                next_step=SAME_VERSION,
            )
        if self._tokens.get(node_id, b"") != token:
            self.forget(node_id)
            if token and token not in self._node_ids:
                self._tokens[node_id], self._node_ids[token] = token, node_id
        oldest = self._clock() - FRESH_SECONDS
        seen = self._seen.get(node_id, {})
        return tuple(where for _, (where, at) in sorted(seen.items()) if at >= oldest)

    def forget(self, node_id: NodeId) -> None:
        """Its datagrams say nothing any more."""
        self._node_ids.pop(self._tokens.pop(node_id, b""), None)
        self._seen.pop(node_id, None)

    def saw(self, datagram: bytes, host: str, port: int, on_port: int) -> None:
        """A datagram has come, from anybody."""
        if (node_id := self._node_ids.get(datagram)) is not None:
            where = f"/ip4/{host}/udp/{port}/quic-v1"
            self._seen.setdefault(node_id, {})[on_port] = (where, self._clock())


class Listening:
    """The sockets, by the port of each."""

    def __init__(self, transports: Mapping[int, asyncio.DatagramTransport]) -> None:
        self.ports = tuple(transports)
        self._transports = transports

    def close(self) -> None:
        """Hears nothing any more."""
        for transport in self._transports.values():
            transport.close()


async def listen(saw: Saw, host: str, ports: Sequence[int]) -> Listening:
    """Hears datagrams by IPv4 on the numbers of these ports; where it cannot, says so and goes without.

    Two ports tell a router that gives each place another port from all others.
    """
    loop = asyncio.get_running_loop()
    transports: dict[int, asyncio.DatagramTransport] = {}
    address = "0.0.0.0" if host == "::" else host
    if ":" in address:  # nodes with IPv6 punch holes without being seen
        _log.info("listens by IPv6 alone: nodes that have IPv4 alone do not get here", host=address)
        return Listening({})
    for port in ports:
        try:
            transports[port], _ = await loop.create_datagram_endpoint(
                lambda port=port: _Heard(saw, port),  # type: ignore[misc]
                local_addr=(address, port),
                family=socket.AF_INET,
            )
        except (OSError, ValueError) as error:
            _log.warning(
                "nodes behind routers cannot be helped to dial each other: a port of UDP is not to be had",
                port=port,
                why=str(error),
            )
    return Listening(transports)


class _Heard(asyncio.DatagramProtocol):
    def __init__(self, saw: Saw, on_port: int) -> None:
        self._saw = saw
        self._on_port = on_port

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._saw(data, addr[0], addr[1], self._on_port)
