"""Follows a run: asks for its status every second and shows it as a picture or line by line."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Protocol, Self

import click
from rich.live import Live

from protocol.errors import TemporaryError, UnavailableError
from protocol.terminal import console
from protocol.terminal.status_view import render
from protocol.terminal.status_words import summary_line, what_people_wait_for
from protocol.v1 import status_pb2 as pb

REFRESH_SECONDS = 1.0

MOST_ROUNDS = 4000
"""That a coordinator lists at once."""


class Screen(Protocol):
    """Where a run is shown while it goes on."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def say(self, line: str) -> None:
        """Shows a line that stays."""

    def show(self, status: pb.GetStatusResponse) -> None:
        """Shows a status."""

    def away(self, why: str) -> None:
        """Shows that no status could be had, and that it is tried again."""


class LiveScreen:
    """A picture on a terminal that is drawn anew in its place."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live = Live(console=console.terminal(), auto_refresh=False)
        self._last: pb.GetStatusResponse | None = None
        self._away_since: float | None = None

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        """Shows a line above the picture."""
        self._live.console.print(line)

    def show(self, status: pb.GetStatusResponse) -> None:
        """Draws the status."""
        self._last, self._away_since = status, None
        self._live.update(render(status), refresh=True)

    def away(self, why: str) -> None:
        """Draws the last status again, and for how long it has been the last one."""
        if self._away_since is None:
            self._away_since = self._clock()
        seconds = console.seconds_in_words(self._clock() - self._away_since)
        notice = f"coordinator away for {seconds}, retrying ({why})"
        self._live.update(render(self._last or pb.GetStatusResponse(), notice=notice), refresh=True)


class _Unframed:
    """A screen that has nothing to set up and to put back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


class LineScreen(_Unframed):
    """One line for each change, for logs and pipes. `key` tells what counts as a change."""

    def __init__(
        self, *, key: Callable[[pb.GetStatusResponse], object] = what_people_wait_for
    ) -> None:
        self._key = key
        self._last: object = None
        self._is_away = False

    def say(self, line: str) -> None:
        """Prints the line."""
        click.echo(line)

    def show(self, status: pb.GetStatusResponse) -> None:
        """Prints a line when the status differs from the last one in its key."""
        key = self._key(status)
        if key == self._last and not self._is_away:
            return
        self._last, self._is_away = key, False
        click.echo(summary_line(status))

    def away(self, why: str) -> None:
        """Prints a line at the beginning of an absence."""
        if not self._is_away:
            self._is_away = True
            click.echo(f"coordinator away, retrying: {why}")


class StreamScreen(_Unframed):
    """Lines that `made` makes of each status; what is no status goes to standard error."""

    def __init__(self, made: Callable[[pb.GetStatusResponse], Iterable[str]]) -> None:
        self._made = made
        self._is_away = False

    def say(self, line: str) -> None:
        """Prints the line beside the stream."""
        click.echo(line, err=True)

    def show(self, status: pb.GetStatusResponse) -> None:
        """Prints what the status makes."""
        self._is_away = False
        for line in self._made(status):
            click.echo(line)

    def away(self, why: str) -> None:
        """Says so at the beginning of an absence."""
        if not self._is_away:
            self._is_away = True
            self.say(f"coordinator away, retrying: {why}")


def json_line(value: Mapping[str, object]) -> str:
    """One value of a stream of JSON lines."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


class NewRounds:
    """Which closed rounds are new: each once, oldest first, when it changes no more."""

    def __init__(self, ask: Callable[[int], pb.ListRoundsResponse], *, limit: int) -> None:
        """`ask` gives the latest so many rounds, newest first; the first time `limit` of them count."""
        self._ask = ask
        self._limit = limit
        self._seen: int | None = None
        self._waiting: list[pb.RoundSummary] = []

    def look(self, run: pb.RunStatus) -> None:
        """Asks for rounds when there are new ones."""
        newest = run.committed_round
        if self._seen is not None and newest < self._seen:
            self._seen = newest  # the run went back: its rounds are made again
        if self._seen == newest:
            return
        wanted = self._limit if self._seen is None else min(MOST_ROUNDS, newest - self._seen + 1)
        is_over = run.phase == pb.RUN_PHASE_FINISHED
        for closed in reversed(self._ask(wanted).rounds):
            # While nodes apply a round its digest and bytes are not all known.
            is_settled = is_over or bool(closed.outer_digest) or closed.round < newest
            if is_settled and closed.round > (self._seen or 0):
                self._waiting.append(closed)
                self._seen = closed.round

    def take(self) -> list[pb.RoundSummary]:
        """What was found since the last call."""
        found, self._waiting = self._waiting, []
        return found


def watch(
    ask: Callable[[], pb.GetStatusResponse],
    screen: Screen,
    *,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Shows the status until the run is finished. A coordinator that goes away is waited for.

    It must have answered once: before that a wrong address would be waited for just as patiently.
    """
    screen.show(status := ask())
    while status.run.phase != pb.RUN_PHASE_FINISHED:
        pause(REFRESH_SECONDS)
        try:
            status = ask()
        except (UnavailableError, TemporaryError) as error:
            screen.away(error.what)
        else:
            screen.show(status)
