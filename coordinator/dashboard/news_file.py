"""What has happened to the swarm, for its page: the latest lines, in memory and in a file across starts."""

import json
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Formatter

import structlog

from coordinator.journal import News
from protocol.files.rolling import RollingFile, lines_of

_log = structlog.get_logger()

KEPT = 400
"""Lines that the page can go back, of what does not happen in every round."""

KEPT_ROUTINE = 60
"""Of what does: it must not drive out what somebody looks for an hour later."""

MOST_BYTES = 500_000
"""Of the file, and of the one before."""

_UNTOLD = frozenset({"round opened"})
"""What the page shows better elsewhere."""


ROUTINE = "routine"
"""Marks a line of what happens in every round."""

_SHOWN = {"at", "level", "text"}

Line = tuple[int, Mapping[str, object]]
"""A line of the page, and its place among all."""


class NewsFile:
    """Takes what is news; a disk that is full costs what the next start would know, and is said once."""

    def __init__(self, path: Path) -> None:
        self._file = RollingFile(path, most_bytes=MOST_BYTES)
        self._lines: deque[Line] = deque(maxlen=KEPT)
        self._routine: deque[Line] = deque(maxlen=KEPT_ROUTINE)
        self._num_lines = 0
        self._is_writable = True
        for line in _read(path):
            self._keep(line)

    @property
    def latest(self) -> list[Mapping[str, object]]:
        """Newest first."""
        lines = sorted([*self._lines, *self._routine], key=lambda line: line[0], reverse=True)
        return [shown for _, shown in lines]

    def _keep(self, line: Mapping[str, object]) -> None:
        shown = {key: line[key] for key in _SHOWN}
        self._num_lines += 1
        (self._routine if ROUTINE in line else self._lines).append((self._num_lines, shown))

    def add(self, told: Iterable[News], *, unix_seconds: float) -> None:
        """Takes those that people read."""
        lines = [
            {
                "at": round(unix_seconds, 1),
                "level": news.level,
                "text": sentence_of(news),
                **({ROUTINE: True} if is_routine(news) else {}),
            }
            for news in told
            if news.level != "debug" and news.what not in _UNTOLD
        ]
        if not lines:
            return
        for line in lines:
            self._keep(line)
        try:
            self._file.append(map(json.dumps, lines))
            self._is_writable = True
        except OSError as error:
            if self._is_writable:  # once: a full disk is full for every line
                _log.warning(
                    "news are not kept for the page", file=str(self._file.path), why=str(error)
                )
            self._is_writable = False


SENTENCES = {
    "node attached": "{node} has come, on {device}",
    "node ready": "{node} is ready",
    "node diverged": "{node} holds another state than the others, and fetches theirs",
    "node lost": "{node} has not been heard for longer than its lease",
    "node left": "{node} has left: {why}",
    "node quarantined": "{node} is in quarantine",
    "node expelled": "{node} is expelled",
    "ruled": "{what}, by {by}",
    "round committed": "Round {round} is committed: {slices} slices, {tokens} tokens, {seconds} s; {reason}",
    "round learned": "Round {round} is known from nodes",
    "contributions left out": "{node}: {slices} contributions to round {round} are left out, as {why}",
    "contributions clipped": "{node}: {slices} contributions to round {round} are clipped, as {why}",
    "node sits out": "{node} sits out until round {until_round}: {why}",
    "went on without contributions of": "Round {round} went on without {nodes}: {next_step}",
    "slice audited": "Slice {slice} of round {round}, which {reducer} reduced, was audited: {verdict}",
    "slice taken over": "{reducer} reduces slice {slice} of round {round} instead of a node that is gone",
    "two nodes do not reach each other": "{nodes} do not reach each other",
    "two nodes reach each other through": "{nodes} reach each other through {helper}",
    "waiting for nodes to come back": "The coordinator has started, and waits for {nodes}",
    "going on without nodes that have not come back": "{nodes} have not come back; the run goes on",
    "node told to refetch": "{node} is told to fetch the state anew: {reason}",
    "node is ahead of us": "{node} knows rounds after {our_round}, and is asked for them",
    "the data begins anew": "The data begins anew in another order: epoch {epoch} of {samples} samples",
    "evaluated": "The held-out loss after round {round} is {held_out_loss}",
    "held-out losses of one state differ": "{why}",
    "loops train on the same samples": "{why}",
    "run finished": "The run is finished after round {round}",
}
"""How the page says what a line of the log says; of others it shows what the log has."""


def is_routine(news: News) -> bool:
    """Whether it is what happens all the time when nothing is wrong."""
    if news.what == "round committed":
        committed, _, whole = str(news.facts.get("slices", "")).partition(" of ")
        return committed == whole
    return news.what == "evaluated"


def sentence_of(news: News) -> str:
    """For people."""
    facts = {key: said for key, value in news.facts.items() if (said := _said(value))}
    sentence = SENTENCES.get(news.what, "")
    fields = set(_fields(sentence))
    if sentence and fields <= facts.keys():
        why = f"; {facts['why']}" if "why" in facts.keys() - fields else ""
        return sentence.format_map(facts) + why
    words = "; ".join(f"{key.replace('_', ' ')} {said}" for key, said in facts.items())
    return news.what + (f" ({words})" if words else "")


def _fields(sentence: str) -> list[str]:
    return [name for _, name, *_ in Formatter().parse(sentence) if name]


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return " and ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _read(path: Path) -> list[Mapping[str, object]]:
    lines: list[Mapping[str, object]] = []
    for line in lines_of(path):
        try:
            value = json.loads(line)
        except ValueError:  # a line that was cut when the machine stopped
            continue
        if isinstance(value, dict) and value.keys() - {ROUTINE} == _SHOWN:
            lines.append(value)
    return lines
