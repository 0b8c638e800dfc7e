"""The wheel that `make dist` makes has all that Atoll reads, and says where it does not run."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from protocol.errors import ExitCode
from protocol.terminal.cli import other_system

ROOT = Path(__file__).parents[2]
PACKAGES = ("atoll", "node", "protocol", "coordinator")

ELSEWHERE = """
import click, os, sys
sys.modules.update(fcntl=None, resource=None, pwd=None)  # Windows has none of them
from protocol.terminal.cli import main
sys.platform = "win32"
del os.uname
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (made,) = folder.iterdir()
    return zipfile.ZipFile(made)


def tracked() -> set[str]:
    listing = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(listing.stdout.split())


def test_every_file_of_the_packages_is_in_the_wheel_and_no_other(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside >= tracked()
    assert {name.partition("/")[0] for name in inside} == set(PACKAGES)
    others = [name for name in tracked() if not name.endswith((".py", ".pyi"))]
    assert len(others) > 4, "the page's files, at least"


def test_a_wheel_names_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
    assert "atoll = protocol.terminal.cli:main" in wheel.read(entry_points).decode()
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_what_make_dist_asks_for_is_what_builds() -> None:
    recipe = (ROOT / "Makefile").read_text()
    assert re.search(r"^\t\$\(BIN\)/python -m hatchling build --target wheel", recipe, re.M)


@pytest.mark.parametrize(
    ("platform", "machine", "here"),
    [
        ("darwin", "arm64", "darwin on arm64"),
        ("linux", "aarch64", "linux on aarch64"),
        ("win32", "", "win32"),
    ],
)
def test_other_systems_are_refused_by_name(platform: str, machine: str, here: str) -> None:
    refusal = other_system(platform, machine)
    assert refusal is not None and refusal.what.endswith(f"and this is {here}")
    assert other_system("linux", "x86_64") is None


def test_on_another_system_a_command_is_refused_in_one_sentence_and_help_is_shown() -> None:
    def typed(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", ELSEWHERE, *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    refused = typed("status")
    assert (refused.returncode, refused.stdout) == (ExitCode.SYSTEM, "")
    what, next_step = refused.stderr.splitlines()
    assert what == "atoll: Atoll runs on Linux on x86-64, and this is win32"
    assert "WSL 2" in next_step
    for shown in ("--version", "--help"):
        assert typed(shown).returncode == 0
