"""Wall clocks that jump by hours, back and forth, while a swarm trains in virtual time."""

import datetime
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import pytest

from lab.simulation.swarm import Life, SimulatedRun, simulate
from node.island.data.dataset import Corpus
from tests.tiny_runs import tiny

HOUR = 3600.0
ROOMS = ("node", "protocol", "coordinator", "lab", "benchmarks")
REAL = (time.time, time.time_ns, datetime.datetime)


def run_of(corpus: Corpus) -> SimulatedRun:
    deadlines = {"train": 20, "contribute": 30, "commit": 40, "apply": 10, "lease": 15}
    spec = tiny(run={"rounds": 5, "min_nodes": 2}, deadlines=deadlines)
    lives = [
        Life(seconds_per_inner_step=1.0),
        Life(seconds_per_inner_step=3.0),
        Life(starts_at=20.0, seconds_per_inner_step=1.0),
        Life(seconds_per_inner_step=1.0, absences=((17.0, None),)),
    ]
    return simulate(spec, lives=lives, corpus=corpus)


@contextmanager
def jumping_clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each look at the wall clock sees it hours away from the last one."""
    jumps, real = cycle((5 * HOUR, -26 * HOUR, 2 * HOUR, -HOUR)), REAL[0]

    def wild() -> float:
        return real() + next(jumps)

    class WildDatetime(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return datetime.datetime.fromtimestamp(wild(), tz)

    wild_of = dict(zip(REAL, (wild, lambda: int(wild() * 1e9), WildDatetime), strict=True))
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", wild)
        patched.setattr(time, "time_ns", wild_of[REAL[1]])
        patched.setattr(datetime, "datetime", WildDatetime)
        for name, module in tuple(sys.modules.items()):
            if name.partition(".")[0] not in ROOMS:
                continue
            for attribute, value in tuple(vars(module).items()):
                if any(value is real_one for real_one in REAL):
                    patched.setattr(module, attribute, wild_of[value])
        yield


def test_jumps_of_the_wall_clock_change_nothing(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady = run_of(corpus)
    with jumping_clocks(monkeypatch):
        looks = time.time(), datetime.datetime.now().timestamp()
        assert abs(looks[0] - looks[1]) > HOUR
        jumpy = run_of(corpus)
    assert jumpy.commits == steady.commits
    assert jumpy.digests == steady.digests
    assert jumpy.final == steady.final
    assert jumpy.seconds == steady.seconds
    assert len(steady.digests) == 3 and set(steady.digests.values()) == {steady.final.outer_digest}
