"""The coordinator's pages: /, /metrics and /healthz, and what the page's script asks for.

What they tell is read from the desk on the event loop, and written out in a thread, so that who asks
often cannot delay heartbeats. All who watch get the same bytes, made once.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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


Rounds = Sequence[pb.RoundSummary]

Read = Callable[[Rounds], Callable[[], bytes]]
"""Reads from the desk, beside the latest rounds, and returns what writes that out in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """What all who ask get until its rest is over."""

    body: bytes
    rest: float
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
        self._made: dict[str, _Made] = {}  # by path
        self._stamp: tuple[int, ...] = ()  # of the curves that readers are told to have
        self._stamped_at = float("-inf")
        self._drawn: tuple[int, ...] = ()  # of those that are made

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
        return Answer(body=(await self._picture()).body, content_type=JSON)

    async def live(self) -> AsyncIterator[bytes]:
        """The same as often as it changes, as server-sent events."""
        yield b"retry: 2000\n\n"
        while True:
            made = await self._picture()
            yield b"data: " + made.body + b"\n\n"
            await asyncio.sleep(max(0.05, made.until - self._now()))

    async def _picture(self) -> _Made:
        def read(rounds: Rounds) -> Callable[[], bytes]:
            now, status = self._now(), self._status()
            self._look_at_curves(status.run)
            seen = {
                "times": shown(self._timeline.rounds, now=now),
                "news": self._news.latest[:NEWS_AT_ONCE],
                "curves": " ".join(map(str, self._stamp)),
            }
            return lambda: _as_json({**view_of(status, rounds), **seen})

        return await self._at_rest("/now", read, num_rounds=NUM_ROUNDS)

    def _status(self) -> pb.GetStatusResponse:
        """Of all held-out losses the page and the metrics show the first and the latest."""
        return self._desk.get_status(pb.GetStatusRequest(), most_losses=2)

    def _look_at_curves(self, run: pb.RunStatus) -> None:
        """Whether readers are told to ask for them: when they would look different, and not too often."""
        stamp, made = curves_stamp(run), self._made.get("/history")
        rest = EVERY_SECONDS if made is None else made.rest
        if stamp != self._stamp and self._now() - self._stamped_at >= rest:
            self._stamp, self._stamped_at = stamp, self._now()

    async def history(self) -> Answer:
        """Columns for the curves; made once for all who are told to ask."""

        def read(rounds: Rounds) -> Callable[[], bytes]:
            run = self._desk.run_status()
            return lambda: _as_json(history_of(run, rounds))

        async with self._writing:
            if not self._stamp:
                self._look_at_curves(self._status().run)
            if self._drawn != self._stamp:
                stamp = self._stamp
                await self._make("/history", read, num_rounds=MAX_ROUNDS)
                self._drawn = stamp
            return Answer(body=self._made["/history"].body, content_type=JSON)

    async def news(self) -> Answer:
        """All that is kept of what has happened, newest first."""
        made = await self._at_rest("/news", lambda _: partial(_as_json, self._news.latest))
        return Answer(body=made.body, content_type=JSON)

    async def written(self) -> Answer:
        """All that is kept of what models wrote, newest first."""

        def read(_: Rounds) -> Callable[[], bytes]:
            return partial(_as_json, [*map(written_view, self._desk.written())])

        return Answer(body=(await self._at_rest("/written", read)).body, content_type=JSON)

    async def metrics(self) -> Answer:
        """For Prometheus."""

        def read(rounds: Rounds) -> Callable[[], bytes]:
            status, counts = self._status(), self._tally.counts(self._now())
            newest = rounds[0] if rounds else None
            return lambda: board_of(status, newest, counts, version=self._version).text()

        made = await self._at_rest("/metrics", read, num_rounds=1)
        return Answer(body=made.body, content_type=CONTENT_TYPE)

    async def _at_rest(self, path: str, read: Read, *, num_rounds: int = 0) -> _Made:
        """What `read` finds, made at most once in a while: a LEAST_REST-th of a core, whoever asks.

        On loopback nobody needs a token, so any program of the machine may ask in a loop.
        """
        async with self._writing:
            made = self._made.get(path)
            if made is None or self._now() >= made.until:
                made = await self._make(path, read, num_rounds=num_rounds)
            return made

    async def _make(self, path: str, read: Read, *, num_rounds: int) -> _Made:
        rounds: Rounds = ()
        if num_rounds:
            request = pb.ListRoundsRequest(limit=num_rounds)
            rounds = (await self._desk.list_rounds(request)).rounds
        began = thread_time()
        write = read(rounds)
        spent = thread_time() - began
        body, written = await asyncio.to_thread(_timed, write)
        rest = max(EVERY_SECONDS, LEAST_REST * (spent + written))
        made = self._made[path] = _Made(body=body, rest=rest, until=self._now() + rest)
        return made

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
            content_type=JSON,
            status=200 if is_serving else SICK,
        )


async def _ready(answer: Answer) -> Answer:
    return answer


def _as_json(value: object) -> bytes:
    """On one line, as an event has to be, and without NaN, which no browser reads."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _timed(make: Callable[[], bytes]) -> tuple[bytes, float]:
    """What it makes, and seconds of a core for it."""
    began = thread_time()
    made = make()
    return made, thread_time() - began
