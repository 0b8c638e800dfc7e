"""The wall clock may be wrong on any machine, so nothing that matters asks for it."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("node", "protocol", "coordinator")

ALLOWED = {
    "coordinator/app.py: time.time": "the expiry of invites, and when something happened, for people",
    "coordinator/backups.py: datetime.now": "what a copy is called, for people",
    "coordinator/cli.py: time.time": "the number of a new key, which is larger than all before, and when "
    "a copy was made, for people",
    "coordinator/services/answering.py: time.time": "the end of members' certificates",
    "node/link/session.py: time.time": "to tell its owner that this machine's clock is wrong",
    "coordinator/services/ruling.py: time.time": "when something was ruled, for people",
    "coordinator/services/status.py: time.time": "what 'atoll doctor' says of the clocks",
    "node/doctor/checks.py: time.time": "likewise",
    "node/machine/notices.py: datetime.now": "how long before a cloud takes the machine, by its date",
    "node/machine/limits.py: datetime.now": "the hours of the day at which a node may train",
    "node/machine/limits.py: time.time": "when a key was last pressed, as the system dates it",
    "protocol/terminal/logging.py: datetime.now": "when a line was logged",
    "protocol/terminal/logs.py: datetime.now": "which lines 'atoll logs --since' means",
}
"""Who may ask for the wall clock, and what for. Logs are stamped by structlog's TimeStamper."""

WALL = {
    "time": {
        "time",
        "time_ns",
        "localtime",
        "gmtime",
        "ctime",
        "asctime",
        "strftime",
        "CLOCK_REALTIME",
    },
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
"""What a module, or a class of the standard library, tells of the wall clock."""


def uses_of_the_wall_clock(source: str) -> Iterator[str]:
    """Every use in a program, as "time.time"; names bound by an import as well."""
    renamed: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            renamed |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            for alias in node.names:
                if alias.name in WALL["time"] and node.module == "time":
                    yield f"time.{alias.name}"
                renamed[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            name = renamed.get(name, name)
            if node.attr in WALL.get(name, ()):
                yield f"{name}.{node.attr}"


def test_only_what_people_read_and_invites_go_by_the_wall_clock() -> None:
    found = {
        f"{path.relative_to(ROOT).as_posix()}: {use}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for use in uses_of_the_wall_clock(path.read_text())
    }
    assert found == set(ALLOWED)


def test_every_way_to_ask_for_the_wall_clock_would_be_found() -> None:
    for program, use in (
        ("import time\nclock = time.time", "time.time"),
        ("import time as t\nt.time_ns()", "time.time_ns"),
        ("from time import time as now", "time.time"),
        ("from datetime import UTC, datetime\nx = datetime.now(UTC)", "datetime.now"),
        ("from datetime import datetime as d\nx = d.utcnow()", "datetime.utcnow"),
        ("import datetime\ndatetime.datetime.now()", "datetime.now"),
        ("import datetime as d\nd.date.today()", "date.today"),
        ("import time\ntime.clock_gettime(time.CLOCK_REALTIME)", "time.CLOCK_REALTIME"),
    ):
        assert list(uses_of_the_wall_clock(program)) == [use], program
    innocent = (
        "import time\nfrom datetime import UTC, datetime\n"
        "time.monotonic(); datetime.fromtimestamp(0, UTC); loop.time(); clock.now()"
    )
    assert list(uses_of_the_wall_clock(innocent)) == []
