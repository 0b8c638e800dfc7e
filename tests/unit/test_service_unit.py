"""The unit that `install-service` writes: what systemd reads in it, and when it is refused."""

import configparser
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import CannotCreateError, ExitCode
from protocol.files.durable import owner_of
from protocol.service import unit
from protocol.service.unit import NOT_AGAIN, Unit, install, own_program, units_folder

UNIT = Unit(
    role="node",
    called="basement 4090",
    command=("/bin/true", "node", "start", "--dir", "/srv/my atoll"),
    folder=Path("/srv/my atoll"),
    start_in=Path("/tmp"),
    stop_seconds=120.0,
)


def read(unit: Unit) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.text())
    return parser


def test_a_unit_waits_for_readiness_watches_and_gives_time_to_leave() -> None:
    service = read(UNIT)["Service"]
    assert service["Type"] == "notify" and service["TimeoutStartSec"] == "infinity"
    assert service["KillMode"] == "mixed", "ranks that are signalled hand in no work"
    assert service["TimeoutStopSec"] == "120"
    assert float(service["WatchdogSec"]) > 0
    assert service["ExecStart"] == '/bin/true node start --dir "/srv/my atoll"'
    assert UNIT.name == "atoll-node-basement-4090.service"


def test_it_is_started_again_unless_that_wants_a_person() -> None:
    service = read(UNIT)["Service"]
    assert service["Restart"] == "on-failure"
    codes = {ExitCode(int(code)) for code in service["RestartPreventExitStatus"].split()}
    assert codes == set(NOT_AGAIN)
    passing = {ExitCode.UNAVAILABLE, ExitCode.SYSTEM, ExitCode.INTERNAL, ExitCode.TEMPORARY}
    assert set(ExitCode) - codes == {*passing, ExitCode.OK, ExitCode.INTERRUPTED}, "each is decided"
    page = (Path(unit.__file__).parents[2] / "docs" / "nodes.md").read_text()
    told = re.search(
        r"The \[exit codes\]\(exit-codes.md\) ([\d, and\n]+?)\s+want\s+a\s+person", page
    )
    assert told and {int(code) for code in re.findall(r"\d+", told[1])} == set(map(int, codes))


def test_a_rank_that_the_kernel_kills_for_want_of_memory_does_not_end_its_daemon() -> None:
    assert read(UNIT)["Service"]["OOMPolicy"] == "continue", "systemd would stop the whole unit"


def test_a_service_of_the_machine_runs_as_the_folders_owner(tmp_path: Path) -> None:
    user = read(UNIT)
    assert "User" not in user["Service"] and user["Install"]["WantedBy"] == "default.target"
    system = read(replace(UNIT, user=owner_of(tmp_path)))
    assert system["Service"]["User"] == tmp_path.owner()
    assert system["Install"]["WantedBy"] == "multi-user.target"
    assert "After" in system["Unit"] and "After" not in user["Unit"]


@pytest.mark.parametrize("user", ["", "root"])
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_no_fault_in_a_unit(tmp_path: Path, user: str) -> None:
    odd = replace(UNIT, user=user, called='100% "mine"', folder=Path("/srv/$x 50%"))
    made = replace(odd, command=(*UNIT.command[:-1], str(odd.folder)))
    path = tmp_path / made.name
    path.write_text(made.text())
    ran = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
    if "Failed to initialize manager" in ran.stderr:
        pytest.skip(ran.stderr)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_installing_says_what_to_type_next_and_may_be_done_again(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        install(UNIT, into=tmp_path / "units", running=None, say=said.append)
    assert (tmp_path / "units" / UNIT.name).read_text() == UNIT.text()
    assert f"  systemctl --user enable --now --no-block {UNIT.name}" in said
    assert any("enable-linger" in line for line in said)
    install(UNIT, into=tmp_path / "units", running=4711, say=said.append)
    assert "process 4711 uses the folder: stop it first" in said


def test_the_service_of_another_folder_is_not_written_over(tmp_path: Path) -> None:
    install(UNIT, into=tmp_path, running=None, say=lambda _: None)
    other = replace(UNIT, folder=Path("/srv/other"), command=("/bin/true", "/srv/other"))
    with pytest.raises(CannotCreateError, match="is a service of another folder"):
        install(other, into=tmp_path, running=None, say=lambda _: None)
    assert (tmp_path / UNIT.name).read_text() == UNIT.text()


def test_units_lie_where_systemd_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/me/settings")
    assert units_folder(is_system=False) == Path("/home/me/settings/systemd/user")
    assert units_folder(is_system=True) == Path("/etc/systemd/system")


def test_a_service_starts_the_atoll_that_wrote_it(tmp_path: Path) -> None:
    script = tmp_path / "atoll"
    script.touch()
    assert own_program(str(script)) == (str(script),)
    assert own_program("-c")[1:] == ("-P", "-m", "protocol.terminal.cli")
