"""A node's own page of metrics, where its owner asks for one: what its heartbeats say, and no more."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from node.daemon import NodeFacts
from protocol.terminal.console import web_address_of
from protocol.trust.invite import endpoint_of
from protocol.wire.vitals import Vitals, heartbeat_of

_log = structlog.get_logger()

_NO_SESSION = 0


@asynccontextmanager
async def own_metrics(
    address: str, facts: NodeFacts, vitals: Callable[[], Vitals], called: Callable[[], str]
) -> AsyncIterator[int | None]:
    """Serves /metrics at HOST:PORT meanwhile and yields the port; nothing with an empty address.

    `called` tells the node's name in the swarm.

    Raises SystemRefusedError when it cannot listen there.
    """
    if not address:
        yield None
        return
    # Only now: who wants no pages need not wait for their libraries.
    from protocol.web.metrics import CONTENT_TYPE, Board, NodeTold, put_node
    from protocol.web.server import Answer, WebServer

    async def metrics() -> Answer:
        board = Board()
        node = NodeTold(
            node_name=called(),
            node_id=facts.node_id,
            device=facts.device,
            version=facts.version,
            heartbeat=heartbeat_of(_NO_SESSION, vitals()),
        )
        put_node(board, node)
        return Answer(body=board.text(), content_type=CONTENT_TYPE)

    host, port = web_address_of(address)
    server = WebServer.open((host, port), {"/metrics": metrics}, option="--metrics")
    _log.info("metrics", url=f"http://{endpoint_of(host, server.port)}/metrics")
    try:
        yield server.port
    finally:
        await server.close()
