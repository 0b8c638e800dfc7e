"""What each role takes: megabytes of packages in a fresh environment, and the memory of its processes.

    python -m benchmarks.roles [--folder DIR] [--results FILE]

Makes one environment for each of coordinator, helper and node by the lines of docs/getting-started.md, with
constraints.txt, and starts a swarm in which each role runs in its own: so the lines suffice.
Memory is proportional (pages that others share count in part), of all processes of a role, after a committed
round of a model of 3 million parameters. It needs a package index, and a gigabyte of disk for torch.
"""

import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.island.node_start import proportional_bytes
from benchmarks.measurement import Rows, add_results, machine, parser_of
from lab.processes.family import MARK, SOURCES, Family, atoll_environment

INSTALLED = {
    "coordinator": ((str(SOURCES),),),
    "helper": ((f"{SOURCES}[helper]",), ("--no-deps", "hivemind")),
    "node": (("torch",), (f"{SOURCES}[node]",)),
}
"""What pip installs of each role, one line after the other."""

RUN = """
[run]
name = "roles"
rounds = 100
min_nodes = 1

[model]
hidden_size = 256
num_layers = 4
num_heads = 4
num_kv_heads = 4
ffn_size = 768
context = 64

[inner]
steps = 2
batch = 2
"""

PATIENCE_SECONDS = 300.0


def made(folder: Path, role: str) -> tuple[Path, int]:
    """A fresh environment for a role: its Python, and the bytes that pip has added."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python, before = folder / "bin" / "python", bytes_in(folder)
    for packages in INSTALLED[role]:
        constraints = ("-c", str(SOURCES / "constraints.txt"))
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *constraints]
        subprocess.run([*command, *packages], check=True)
    return python, bytes_in(folder) - before


def bytes_in(folder: Path) -> int:
    """Of all files below; what is linked counts once."""
    files = (path.lstat() for path in folder.rglob("*") if not path.is_dir())
    return sum({stat.st_ino: stat.st_size for stat in files}.values())


class Started:
    """A command that goes on, by the Python of a role."""

    def __init__(self, python: Path, log: Path, *arguments: str | Path) -> None:
        mark = uuid.uuid4().hex
        self._log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                typed(python, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=log.parent,
                env=environment() | {MARK: mark},
            )
        self.family = Family(mark)

    def says(self, words: str, *, times: int = 1) -> str:
        """Waits until its log has the words so often; returns the last line with them."""
        wait_until(lambda: self._log.read_text().count(words) >= times, f"{words!r} in {self._log}")
        return [line for line in self._log.read_text().splitlines() if words in line][-1]

    def memory_bytes(self) -> int:
        """Of all its processes."""
        return sum(map(proportional_bytes, self.family.members()))


def typed(python: Path, *arguments: str | Path) -> list[str]:
    """A command of Atoll, in the environment of that Python."""
    return [str(python), "-P", "-m", "protocol.terminal.cli", *map(str, arguments)]


def environment() -> dict[str, str]:
    """Without this checkout: what runs is what pip has installed."""
    return {key: value for key, value in atoll_environment({}).items() if key != "PYTHONPATH"}


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Raises TimeoutError when it takes too long."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        if time.monotonic() >= give_up_at:
            raise TimeoutError(f"no end of waiting for {what}")
        time.sleep(0.2)


@contextmanager
def swarm(folder: Path, pythons: dict[str, Path]) -> Iterator[dict[str, Started]]:
    """A coordinator, a helper and a node, each in its own environment."""
    run_file, home = folder / "run.toml", folder / "home"
    run_file.write_text(RUN)

    def done(role: str, *arguments: str | Path) -> str:
        command = typed(pythons[role], *arguments)
        ran = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment(), check=True
        )
        return ran.stdout

    started: dict[str, Started] = {}

    def start(role: str, *arguments: str | Path) -> Started:
        started[role] = Started(pythons[role], folder / f"{role}.log", *arguments)
        return started[role]

    ports = ("--host", "127.0.0.1", "--port", "0", "--enrolment-port", "0")
    done("coordinator", "coordinator", "init", home, "--run", run_file, *ports)
    try:
        start("coordinator", "coordinator", "start", home).says("coordinator ready")
        for role in ("helper", "node"):
            invite = done("coordinator", "invite", "create", "--role", role, "--dir", home)
            done(role, "join", invite.split()[-1], "--dir", folder / role, "--name", role)
            start(role, role, "start", "--dir", folder / role).says("attached")
        yield started
    finally:
        for running in started.values():
            running.family.end()
            running.process.wait()


def main() -> None:
    """Measures, prints, and writes the raw figures where it is told to."""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, help="an empty folder to work in; kept")
    add_results(parser)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        environments = {role: made(folder / f"env-{role}", role) for role in INSTALLED}
        with swarm(folder, {role: python for role, (python, _) in environments.items()}) as running:
            running["coordinator"].says("round committed", times=3)
            for role, (_, installed_bytes) in environments.items():
                memory = running[role].memory_bytes()
                print(
                    f"{role}: {installed_bytes / 1e6:.0f} MB installed, {memory / 1e6:.0f} MB of memory"
                )
                row = {"role": role, "installed_bytes": installed_bytes, "memory_bytes": memory}
                Rows(chosen.results, about=machine(), is_printed=False).add(row)


if __name__ == "__main__":
    main()
