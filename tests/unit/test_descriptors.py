"""Limits on open files, threads, and closed standard files, met by real processes that start with them."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
os.execv(sys.executable, [sys.executable, "-c", sys.argv[3]])
"""
"""Not a preexec_fn: that forks, which gRPC in the process that runs the tests does not survive."""

_SHELL = 'exec "$0" -c "$1" '


def limited(soft: int, hard: int, program: str) -> str:
    command = [sys.executable, "-c", _LIMITED, str(soft), str(hard), program]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def closed(redirections: str, program: str) -> "subprocess.CompletedProcess[str]":
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["sh", "-c", _SHELL + redirections, sys.executable, program],
        env=buffered,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    said = limited(
        64,
        200,
        "import resource\n"
        "from protocol.service.limits import require_open_files\n"
        "print(require_open_files(200, of='a test'), resource.getrlimit(resource.RLIMIT_NOFILE))",
    )
    assert said == "200 (200, 200)\n"


def test_a_hard_limit_that_is_too_low_is_refused_with_the_numbers() -> None:
    said = limited(
        64,
        200,
        "from protocol.service.limits import require_open_files\n"
        "from protocol.errors import SystemRefusedError\n"
        "try: require_open_files(201, of='the node')\n"
        "except SystemRefusedError as error: print(error)",
    )
    assert said.startswith("the node needs 201 open files at a time and 200 are allowed; raise ")
    assert "ulimit -Hn 201" in said


@pytest.mark.parametrize("redirections", ["2>&-", "0<&- 2>&-", "0<&- 1>&- 2>&-"])
def test_no_file_takes_the_number_of_a_closed_standard_file(redirections: str) -> None:
    ran = closed(
        redirections,
        "import os, sys\n"
        "from protocol.service.limits import open_standard_files\n"
        "open_standard_files()\n"
        "numbers = [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)]\n"
        "print('to nobody', file=sys.stderr)\n"
        "print('or to somebody', flush=True)\n"
        "sys.exit(numbers != [0, 1, 2] or os.open('.', os.O_RDONLY) <= 2)",
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ("" if "1>&-" in redirections else "or to somebody\n")


@pytest.mark.parametrize("redirections", ["2>&-", "2>/dev/full", "0<&- 1>&- 2>&-"])
def test_a_command_that_cannot_tell_its_error_still_ends_with_its_code(redirections: str) -> None:
    program = (
        "import sys; from protocol.terminal.cli import main; main(['status', '--dir', 'nowhere'])"
    )
    assert closed(redirections, program).returncode == 66


def test_an_output_that_a_disk_has_no_room_for_is_told() -> None:
    ran = closed(">/dev/full", "from protocol.terminal.cli import main; main(['--help'])")
    assert ran.returncode == 71
    assert ran.stderr == (
        "atoll: the machine refuses: No space left on device\n  next: free some space on that disk, or "
        "remove files where 'df -i' shows no inodes left\n"
    )


def test_the_limit_of_this_process_is_left_alone() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft <= hard  # what the tests above set was set for other processes


@pytest.mark.parametrize(
    "arguments", [("coordinator", "start", "my-run"), ("status", "--dir", "my-run")]
)
def test_too_few_threads_are_told_before_grpc_aborts(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    program = (
        "import sys; from protocol.service import limits; from protocol.terminal.cli import main\n"
        "try: main(['init', 'my-run', '--host', '127.0.0.1', '--advertise', '127.0.0.1'])\n"
        "except SystemExit as made: assert not made.code\n"
        "limits.processes_left = lambda root: 3\n"
        f"main({list(arguments)})"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert ran.returncode == 71, ran.stderr
    assert "processes and threads, and 3 more are allowed" in ran.stderr
    assert "'ulimit -u 1024'" in ran.stderr
