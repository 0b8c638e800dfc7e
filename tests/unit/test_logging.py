"""A log that cannot be written costs its lines, and neither time nor the process."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import structlog

from protocol.terminal.logging import (
    FIGURES,
    MOST_LINES,
    MOST_REMEMBERED,
    MOST_WARNINGS,
    QUIET_ROUNDS,
    LogStream,
    SparseFigures,
    SparseLines,
    SparseWarnings,
)

ROOT = Path(__file__).parents[2]
LINE = "x" * 999 + "\n"


def test_a_reader_that_reads_no_more_holds_up_nobody_and_learns_how_much_it_missed() -> None:
    reading, writing = os.pipe()
    stream = LogStream(writing)
    written = 0
    while not stream.lost_lines:  # a write that waited for the reader would wait for ever
        stream.write(LINE)
        written += 1
    stream.write(LINE)
    assert stream.lost_lines == 2
    kept = b""
    while len(kept) < (written - 1) * len(LINE):
        kept += os.read(reading, 1 << 20)
    assert stream.lost_lines == 2
    stream.write("again\n")
    assert stream.lost_lines == 0
    assert os.read(reading, 100).endswith(b"again\n")
    os.close(reading)
    os.close(writing)


def test_a_reader_that_has_gone_and_a_full_disk_raise_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    full = os.open("/dev/full", os.O_WRONLY)
    for descriptor in (writing, full):
        stream = LogStream(descriptor)
        stream.write(LINE)
        stream.write(LINE)
        assert stream.lost_lines == 2
        os.close(descriptor)


def test_a_long_line_arrives_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        LogStream(file.fileno()).write("é" * 10_000 + "\n")
    assert path.read_text() == "é" * 10_000 + "\n"


def test_the_line_after_a_gap_says_how_many_are_missing() -> None:
    program = (
        "import os, sys, structlog\n"
        "from protocol.terminal.logging import start_logging\n"
        "nowhere, somewhere = os.open('/dev/full', os.O_WRONLY), os.dup(2)\n"
        "stream = start_logging(as_json=True, node='it')\n"
        "log = structlog.get_logger()\n"
        "for descriptor in (somewhere, nowhere, nowhere, somewhere, somewhere):\n"
        "    os.dup2(descriptor, stream._descriptor)\n"
        "    log.info('said', number=descriptor)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    said = [json.loads(line) for line in ran.stderr.splitlines()]
    assert [line.get("lost_lines", 0) for line in said] == [0, 2, 0]
    assert {(line["event"], line["node"]) for line in said} == {("said", "it")}


def test_of_short_rounds_people_are_shown_some_figures_and_how_many_were_left_out() -> None:
    now = 0.0
    sparse = SparseFigures(lambda: now)
    shown: list[tuple[float, str, int]] = []
    for number in range(16):  # rounds of 2 s
        now = 2.0 * number
        for name in (*FIGURES, "applied"):
            with suppress(structlog.DropEvent):
                event = sparse(None, "info", {"event": name, "round": number})
                shown.append((event["round"], name, event.get("rounds_left_out", 0)))
    assert [told[0] for told in shown if told[1] == "applied"] == list(range(16))
    for name in FIGURES:
        kept = [(number, left_out) for number, own, left_out in shown if own == name]
        assert kept == [(0, 0), (5, 4), (10, 4), (15, 4)]


def test_a_folder_s_log_has_all_figures_and_warnings_of_rounds_and_so_has_json(
    tmp_path: Path,
) -> None:
    program = (
        "import sys, structlog\n"
        "from pathlib import Path\n"
        "from protocol.terminal.logging import start_logging\n"
        "start_logging(as_json=len(sys.argv) > 2, folder=Path(sys.argv[1]), process='node')\n"
        "for number in range(3):\n"
        "    structlog.get_logger().info('wire', round=number)\n"
        "    structlog.get_logger().warning('contribution clipped', round=number)\n"
    )
    for more, num_shown in (((), 1 + 2), (("json",), 3 + 3)):
        folder = tmp_path / str(num_shown)
        folder.mkdir()
        command = [sys.executable, "-c", program, str(folder), *more]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
        assert ran.returncode == 0, ran.stderr
        assert len(ran.stderr.splitlines()) == num_shown
        assert len((folder / "logs" / "node.log").read_text().splitlines()) == 6


def test_lines_go_where_standard_error_was_though_somebody_closes_it() -> None:
    """And never into the file that has its number then, which may be the global parameters."""
    program = (
        "import os, sys, tempfile, structlog\n"
        "from protocol.terminal.logging import start_logging\n"
        "start_logging(as_json=True)\n"
        "os.close(2)\n"
        "file = tempfile.TemporaryFile()\n"
        "assert file.fileno() == 2\n"
        "structlog.get_logger().info('said')\n"
        "assert os.fstat(2).st_size == 0\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert ran.returncode == 0 and json.loads(ran.stderr)["event"] == "said", ran.stderr


def test_what_is_said_again_and_again_is_shown_so_often_and_the_next_line_says_of_how_many() -> (
    None
):
    now = 0.0
    sparse = SparseLines(lambda: now)

    def shown(method: str, name: str) -> dict[str, object] | None:
        try:
            return dict(sparse(None, method, {"event": name}))
        except structlog.DropEvent:
            return None

    flood = [shown("warning", "refused a stream of a stranger") for _ in range(1000)]
    assert sum(line is not None for line in flood) == MOST_WARNINGS
    assert shown("warning", "another") == {"event": "another"}
    assert all(shown("debug", "refused a stream of a stranger") for _ in range(1000))
    joined = [shown("info", "node left") for _ in range(2 * MOST_LINES)]
    assert sum(line is not None for line in joined) == MOST_LINES
    now = MOST_WARNINGS
    assert shown("warning", "refused a stream of a stranger") == {
        "event": "refused a stream of a stranger",
        "left_out": 1000 - MOST_WARNINGS,
    }


def test_a_warning_of_each_round_is_shown_ever_more_seldom_and_again_after_quiet_rounds() -> None:
    sparse = SparseWarnings()

    def shown(number: int, **facts: object) -> object:
        event = {"event": "contribution clipped", "round": number, "factor": number / 7} | facts
        try:
            return sparse(None, "warning", event).get("left_out", 0)
        except structlog.DropEvent:
            return None

    told = {n: left_out for n in range(1, 1001) if (left_out := shown(n, sender="a")) is not None}
    assert told == {1: 0, 2: 0, 4: 1, 8: 3, 16: 7, 32: 15, 64: 31, 128: 63, 256: 127, 512: 255}
    assert shown(1000, sender="b") == 0, "another node is news"
    assert shown(1000 + QUIET_ROUNDS + 1, sender="a") == 0, "and so is what has passed"


def test_of_warnings_of_each_round_nothing_else_is_left_out() -> None:
    """Neither errors, nor warnings without a round, which come when something happens."""
    sparse = SparseWarnings()
    for number in range(20):
        assert sparse(None, "error", {"event": "not saved", "round": number})
        assert sparse(None, "info", {"event": "applied", "round": number})
        assert sparse(None, "warning", {"event": "rank died", "why": "it was killed"})


def test_names_of_any_number_take_no_room_for_good() -> None:
    sparse = SparseWarnings()
    for number in range(3 * MOST_REMEMBERED):
        assert sparse(None, "warning", {"event": "late", "round": 1, "node": str(number)})
    assert len(sparse._seen) == MOST_REMEMBERED
