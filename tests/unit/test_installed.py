"""What is installed for each role suffices for it: imports that find nothing beyond its extra."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from node import installed
from node.installed import HELPER, NODE, require_installed
from protocol.errors import SystemRefusedError
from protocol.terminal import cli

ROOT = Path(cli.__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ABOUT_NODES = ("torch", "numba", "hivemind", "numpy", "safetensors")

ONLY_WITH = """
import sys
allowed = set(sys.argv[1].split())
class Elsewhere:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package in denied:
            raise ModuleNotFoundError(f"{package} is not of this role", name=package)
from importlib import metadata
found = metadata.packages_distributions()
denied = {p for p, of in found.items() if not any(d.lower().replace("_", "-") in allowed for d in of)}
denied -= {"atoll", "node", "protocol", "coordinator", "hivemind" if "py-cid" in allowed else ""}
sys.meta_path.insert(0, Elsewhere())
exec(sys.argv[2])
"""

COORDINATOR = "import coordinator.app, coordinator.new_run, coordinator.steering, node.link.join"
HELPS = (
    "import node.app, node.assembly, node.doctor.command\n"
    "from node.exchange.transport import p2pd\n"
    "p2pd._load_hivemind()\n"
    "from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client\n"
    "from hivemind.utils.multiaddr import Multiaddr\n"
    "from hivemind.proto import p2pd_pb2\n"
    "Multiaddr('/ip4/10.0.0.1/tcp/7710'), Multiaddr('/ip6/::1/tcp/1'), Multiaddr('/unix/tmp/s')\n"
    "Multiaddr('/dns4/home.example.org/tcp/7710')"
)


def closure(requirements: list[str]) -> set[str]:
    """The distributions that pip installs for these, by the metadata of those that are here."""
    found: set[str] = set()
    wanted = [Requirement(text) for text in requirements]
    while wanted:
        requirement = wanted.pop()
        name = requirement.name.lower().replace("_", "-")
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        wanted += [Requirement(text) for text in metadata.requires(name) or ()]
    return found


def imports_with(requirements: list[str], code: str) -> None:
    """Runs the code where no module can be imported that pip would not have installed."""
    words = " ".join(closure(requirements))
    ran = subprocess.run(
        [sys.executable, "-c", ONLY_WITH, words, code], capture_output=True, text=True, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr


def test_a_coordinator_and_queries_need_nothing_but_what_comes_without_an_extra() -> None:
    assert not closure(PROJECT["dependencies"]) & set(ABOUT_NODES)
    imports_with(PROJECT["dependencies"], COORDINATOR)


def test_a_helper_needs_nothing_but_its_extra_and_hivemind_without_its_own_needs() -> None:
    assert not closure(EXTRAS["helper"]) & {"torch", "scipy", "hivemind"}
    imports_with([*PROJECT["dependencies"], *EXTRAS["helper"]], HELPS)


def test_what_commands_look_for_is_what_the_extras_install() -> None:
    named = {Requirement(text).name for text in EXTRAS["node"]}
    assert named == set(NODE)
    found = metadata.packages_distributions()
    helpers = closure(EXTRAS["helper"]) | {"hivemind"}
    assert all({each.lower() for each in found[package]} & helpers for package in HELPER)


@pytest.mark.parametrize(
    ("packages", "line"),
    [(NODE, "pip install 'atoll[node]'"), (HELPER, "pip install --no-deps hivemind")],
)
def test_a_missing_package_is_one_sentence_with_the_line_to_type(
    packages: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_installed(packages, to="start it")
    monkeypatch.setattr(installed, "find_spec", lambda name: None if name == "numba" else True)
    with pytest.raises(SystemRefusedError) as refused:
        require_installed(packages, to="start it")
    assert refused.value.what == "numba is not installed, and needed to start it"
    assert line in refused.value.next_step
