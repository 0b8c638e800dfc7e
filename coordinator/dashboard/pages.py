"""The coordinator's pages: /, /metrics and /healthz, and what the page's script asks for.

What they tell is read from the desk on the event loop, and written out in a thread, so that who asks
often cannot delay heartbeats. All who watch get the same bytes, made once.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from time import thread_time

from coordinator.dashboard.news_file import NewsFile
from coordinator.dashboard.run_metrics import board_of
from coordinator.dashboard.run_view import (
    NUM_ROUNDS,
    curves_stamp,
    history_of,
    view_of,
    written_view,
)
from coordinator.dashboard.timeline import RoundTally, Timeline, shown
from coordinator.services.status import MAX_ROUNDS, StatusDesk
from protocol.v1 import status_pb2 as pb
from protocol.web.metrics import CONTENT_TYPE
from protocol.web.server import Answer, Page, Stream
from protocol.wire.versions import release

SICK = 503  # HTTP's "service unavailable"

JSON = "application/json"

EVERY_SECONDS = 1.0
"""Between two pictures for who watches, while making one takes less than a LEAST_REST-th of it."""

LEAST_REST = 100
"""Times as long as making a picture took of a core nobody makes the next. On a busy machine it takes longer,
and costs others no more."""

NEWS_AT_ONCE = 30
"""Lines with each picture; who looks for older ones asks for all."""

SITE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/uplot.js": ("uplot.js", "text/javascript; charset=utf-8"),
    "/uplot.css": ("uplot.css", "text/css; charset=utf-8"),
}


@dataclass(slots=True)
class _Made:
    """What all who ask get until its rest is over."""

    body: bytes
    until: float


class Pages:
    """Answers from the status desk, as of one instant."""

    def __init__(
        self,
        desk: StatusDesk,
        tally: RoundTally,
        timeline: Timeline,
        news: NewsFile,
        *,
        now: Callable[[], float],
        is_serving: Callable[[], bool],
    ) -> None:
        self._desk = desk
        self._tally = tally
        self._timeline = timeline
        self._news = news
        self._now = now
        self._is_serving = is_serving
        self._version = release()
        self._writing = asyncio.Lock()  # one page after the other: threads share a core with rounds
        self._files = {
            path: Answer(
                body=(resources.files("coordinator.dashboard") / "site" / name).read_bytes(),
                content_type=content_type,
            )
            for path, (name, content_type) in SITE.items()
        }
        self._picture = b""
        self._made_at = float("-inf")
        self._rest = EVERY_SECONDS
        self._stamp: tuple[int, ...] = ()  # of the curves that readers are told to have
        self._curves: tuple[tuple[int, ...], bytes] = ((), b"")
        self._curves_at, self._curves_rest = float("-inf"), EVERY_SECONDS
        self._made: dict[str, _Made] = {}  # by path

    def by_path(self) -> Mapping[str, Page]:
        """All pages."""
        return {
            **{path: partial(_ready, answer) for path, answer in self._files.items()},
            "/now": self.now,
            "/history": self.history,
            "/news": self.news,
            "/written": self.written,
            "/metrics": self.metrics,
            "/healthz": self.healthz,
        }

    def streams(self) -> Mapping[str, Stream]:
        """What goes on: a picture whenever it is due."""
        return {"/live": self.live}

    async def now(self) -> Answer:
        """What the page shows of this instant."""
        return Answer(body=await self._newest_picture(), content_type=JSON)

    async def live(self) -> AsyncIterator[bytes]:
        """The same as often as it changes, as server-sent events."""
        yield b"retry: 2000\n\n"
        while True:
            yield b"data: " + await self._newest_picture() + b"\n\n"
            await asyncio.sleep(max(0.05, self._made_at + self._rest - self._now()))

    async def _newest_picture(self) -> bytes:
        """Made at most once in a while, however many watch."""
        async with self._writing:
            if self._now() - self._made_at >= self._rest:
                now, began = self._now(), thread_time()
                status = self._status()
                self._look_at_curves(status.run)
                seen = {
                    "times": shown(self._timeline.rounds, now=now),
                    "news": self._news.latest[:NEWS_AT_ONCE],
                    "curves": " ".join(map(str, self._stamp)),
                }
                spent = thread_time() - began
                request = pb.ListRoundsRequest(limit=NUM_ROUNDS)
                rounds = (await self._desk.list_rounds(request)).rounds
                self._picture, written = await asyncio.to_thread(
                    _as_json, lambda: {**view_of(status, rounds), **seen}
                )
                self._made_at = self._now()
                self._rest = max(EVERY_SECONDS, LEAST_REST * (spent + written))
            return self._picture

    def _status(self) -> pb.GetStatusResponse:
        """Of all held-out losses the page and the metrics show the first and the latest."""
        return self._desk.get_status(pb.GetStatusRequest(), most_losses=2)

    def _look_at_curves(self, run: pb.RunStatus) -> None:
        """Whether readers are told to ask for them: when they would look different, and not too often."""
        stamp = curves_stamp(run)
        if stamp != self._stamp and self._now() - self._curves_at >= self._curves_rest:
            self._stamp, self._curves_at = stamp, self._now()

    async def history(self) -> Answer:
        """Columns for the curves; made once for all who are told to ask."""
        async with self._writing:
            if not self._stamp:
                self._look_at_curves(self._status().run)
            if self._curves[0] != self._stamp:
                stamp, began = self._stamp, thread_time()
                run = self._desk.run_status()
                spent = thread_time() - began
                listed = await self._desk.list_rounds(pb.ListRoundsRequest(limit=MAX_ROUNDS))
                body, written = await asyncio.to_thread(
                    _as_json, lambda: history_of(run, listed.rounds)
                )
                self._curves = (stamp, body)
                self._curves_rest = max(EVERY_SECONDS, LEAST_REST * (spent + written))
        return Answer(body=self._curves[1], content_type=JSON)

    async def news(self) -> Answer:
        """All that is kept of what has happened, newest first."""

        async def lines() -> Callable[[], bytes]:
            latest = self._news.latest
            return lambda: _as_json(lambda: latest)[0]

        return Answer(body=await self._at_rest("/news", lines), content_type=JSON)

    async def written(self) -> Answer:
        """All that is kept of what models wrote, newest first."""

        async def texts() -> Callable[[], bytes]:
            written = [*map(written_view, self._desk.written())]
            return lambda: _as_json(lambda: written)[0]

        return Answer(body=await self._at_rest("/written", texts), content_type=JSON)

    async def metrics(self) -> Answer:
        """For Prometheus."""

        async def values() -> Callable[[], bytes]:
            status = self._status()
            closed = (await self._desk.list_rounds(pb.ListRoundsRequest(limit=1))).rounds
            newest = closed[0] if closed else None
            counts = self._tally.counts(self._now())
            return lambda: board_of(status, newest, counts, version=self._version).text()

        return Answer(body=await self._at_rest("/metrics", values), content_type=CONTENT_TYPE)

    async def _at_rest(
        self, path: str, read: Callable[[], Awaitable[Callable[[], bytes]]]
    ) -> bytes:
        """What `read` finds, written out in a thread: at most a LEAST_REST-th of a core, whoever asks.

        On loopback nobody needs a token, so any program of the machine may ask in a loop.
        """
        async with self._writing:
            made = self._made.get(path)
            if made is None or self._now() >= made.until:
                began = thread_time()
                write = await read()
                spent = thread_time() - began
                body, written = await asyncio.to_thread(_timed, write)
                rest = max(EVERY_SECONDS, LEAST_REST * (spent + written))
                made = self._made[path] = _Made(body=body, until=self._now() + rest)
            return made.body

    async def healthz(self) -> Answer:
        """For who restarts it: 200 while rounds can go on. It needs no token, so it must cost nothing."""
        is_serving = self._is_serving()
        committed_round, uptime_seconds = self._desk.committed_and_uptime()
        said = {
            "status": "ok" if is_serving else "the clock of rounds has stopped",
            "committed_round": committed_round,
            "uptime_seconds": round(uptime_seconds, 1),
        }
        return Answer(
            body=(json.dumps(said) + "\n").encode(),
            content_type="application/json",
            status=200 if is_serving else SICK,
        )


async def _ready(answer: Answer) -> Answer:
    return answer


def _as_json(make: Callable[[], object]) -> tuple[bytes, float]:
    """On one line, as an event has to be, no NaN, which no browser reads; and seconds of a core for it."""
    return _timed(lambda: json.dumps(make(), separators=(",", ":"), allow_nan=False).encode())


def _timed(make: Callable[[], bytes]) -> tuple[bytes, float]:
    began = thread_time()
    made = make()
    return made, thread_time() - began
