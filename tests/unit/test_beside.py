"""A command that runs beside a daemon: started again when it fails, and ended with the daemon."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from protocol.service import beside as room
from protocol.service.beside import beside

PROGRAM = """
import signal, sys, time
from protocol.service.beside import heed_stdin

num, codes = len(open(sys.argv[1]).read()), sys.argv[2].split(",")
open(sys.argv[1], "a").write("x")
assert sys.argv[-1] == "--until-stdin-closes"

def end(*_):
    print("ending", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
heed_stdin()
print("started", flush=True)
if num < len(codes):
    sys.exit(int(codes[num]))
time.sleep(600)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that ends with the given codes, the first time with the first, and then goes on."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "starts").touch()
    command = (sys.executable, str(tmp_path / "program.py"))
    monkeypatch.setattr(room, "own_program", lambda: command)
    monkeypatch.setattr(room, "FIRST_PAUSE_SECONDS", 0.01)
    return tmp_path / "starts"


async def heard(program: Path, codes: str, *, until: str, times: int = 1) -> tuple[list[str], str]:
    """What it says, and what is logged of it, until that was said or logged so often."""
    said: list[str] = []
    with structlog.testing.capture_logs() as logged:
        async with (
            asyncio.timeout(60),
            beside("the copy", (str(program), codes), hear=said.append),
        ):
            while [*said, *(line["event"] for line in logged)].count(until) < times:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    return said, " ".join(line["event"] for line in logged)


async def test_one_that_fails_is_started_again_and_one_that_runs_is_ended_in_the_end(
    program: Path,
) -> None:
    said, logged = await heard(program, "1,70", until="started", times=3)
    assert said == ["started", "started", "started", "ending"]
    assert logged.count("the copy has ended, and is started again") == 2


@pytest.mark.parametrize(
    "code, words",
    [
        ("0", "the copy has ended"),
        ("78", "the copy has ended, and wants a person: it says above what to do"),
    ],
)
async def test_one_that_ended_well_or_wants_a_person_stays_ended(
    program: Path, code: str, words: str
) -> None:
    said, logged = await heard(program, code, until=words)
    assert (said, logged) == (["started"], words)


def test_it_ends_where_whoever_started_it_is_killed(program: Path) -> None:
    program.write_text("x")  # it has been started once, and goes on this time
    command: list[str | Path] = [
        sys.executable,
        str(program.parent / "program.py"),
        program,
        "70",
        "--until-stdin-closes",
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.stdin.close()  # as the kernel does for a process that was killed
        assert process.wait(60) == 0
        assert process.stdout.read() == "ending\n"
