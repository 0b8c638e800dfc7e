"""The coordinator's pages: /, /metrics and /healthz.

What they tell is read from the desk on the event loop, and written out in a thread, so that who asks
often cannot delay heartbeats.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from importlib import metadata

from coordinator.dashboard.round_tally import RoundTally
from coordinator.dashboard.run_metrics import board_of
from coordinator.dashboard.run_page import NUM_ROUNDS, page_of
from coordinator.services.status import StatusDesk
from protocol.v1 import status_pb2 as pb
from protocol.web.metrics import CONTENT_TYPE
from protocol.web.server import Answer, Page

SICK = 503  # HTTP's "service unavailable"


class Pages:
    """Answers from the status desk, as of one instant."""

    def __init__(
        self,
        desk: StatusDesk,
        tally: RoundTally,
        *,
        now: Callable[[], float],
        is_serving: Callable[[], bool],
    ) -> None:
        self._desk = desk
        self._tally = tally
        self._now = now
        self._is_serving = is_serving
        self._version = metadata.version("atoll")
        self._writing = asyncio.Lock()  # one page after the other: threads share a core with rounds

    def by_path(self) -> Mapping[str, Page]:
        """All pages."""
        return {"/": self.run, "/metrics": self.metrics, "/healthz": self.healthz}

    async def run(self) -> Answer:
        """For people."""
        status = self._desk.get_status(pb.GetStatusRequest())
        rounds = (await self._desk.list_rounds(pb.ListRoundsRequest(limit=NUM_ROUNDS))).rounds
        text = await self._written(lambda: page_of(status, rounds).encode())
        return Answer(body=text, content_type="text/html; charset=utf-8")

    async def metrics(self) -> Answer:
        """For Prometheus."""
        status = self._desk.get_status(pb.GetStatusRequest())
        closed = (await self._desk.list_rounds(pb.ListRoundsRequest(limit=1))).rounds
        newest = closed[0] if closed else None
        counts = self._tally.counts(self._now())
        text = await self._written(
            lambda: board_of(status, newest, counts, version=self._version).text()
        )
        return Answer(body=text, content_type=CONTENT_TYPE)

    async def _written(self, write: Callable[[], bytes]) -> bytes:
        async with self._writing:
            return await asyncio.to_thread(write)

    async def healthz(self) -> Answer:
        """For who restarts it: 200 while rounds can go on."""
        is_serving = self._is_serving()
        run = self._desk.get_status(pb.GetStatusRequest()).run
        said = {
            "status": "ok" if is_serving else "the clock of rounds has stopped",
            "committed_round": run.committed_round,
            "uptime_seconds": round(run.uptime_seconds, 1),
        }
        return Answer(
            body=(json.dumps(said) + "\n").encode(),
            content_type="application/json",
            status=200 if is_serving else SICK,
        )
