"""A daemon as a service of systemd: the unit's text, where it goes, and what to type next."""

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from protocol.errors import CannotCreateError, ExitCode, NotPermittedError, UsageError
from protocol.files.durable import as_typed, expanded, owner_of, refusing, write_atomically

SYSTEM_UNITS = Path("/etc/systemd/system")

WATCHDOG_SECONDS = 120
"""A daemon whose event loop is silent for so long is killed and started again."""

RESTART_SECONDS = 15

NOT_AGAIN = (
    *(ExitCode.USAGE, ExitCode.BAD_DATA, ExitCode.NO_INPUT, ExitCode.CANNOT_CREATE),
    *(ExitCode.INCOMPLETE, ExitCode.PROTOCOL, ExitCode.NO_PERMISSION, ExitCode.CONFIG),
    ExitCode.EXPELLED,
)
"""The exit codes that another start does not change: a person has to do something first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A daemon that systemd starts."""

    role: str  # node, helper, coordinator
    called: str  # what people call it
    command: tuple[str, ...]  # its program and arguments
    folder: Path  # of the daemon, absolute
    start_in: Path  # where relative paths of its settings begin
    stop_seconds: float  # what it may take to end
    user: str = ""  # whose process it is; empty: of the manager of one user

    @property
    def name(self) -> str:
        """The unit's, as `systemctl` takes it."""
        return (
            f"atoll-{self.role}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', self.called).strip('-')}.service"
        )

    @property
    def systemctl(self) -> str:
        """The command that speaks to its manager."""
        return "sudo systemctl" if self.user else "systemctl --user"

    @property
    def journal(self) -> str:
        """The command that shows its log."""
        return f"journalctl {'--unit' if self.user else '--user-unit'} {self.name} --follow"

    def text(self) -> str:
        """The unit file."""
        system = [f"User={self.user}"] if self.user else []
        network = ["Wants=network-online.target", "After=network-online.target"]
        return "\n".join(
            [
                f"# Written by 'atoll {self.role} install-service', and written anew by it.",
                "[Unit]",
                f"Description=Atoll {self.role} {_literal(self.called)}",
                *(network if self.user else []),
                "StartLimitIntervalSec=0",
                "",
                "[Service]",
                "# It is ready when it takes part, and may have to wait for that.",
                "Type=notify",
                "NotifyAccess=main",
                "TimeoutStartSec=infinity",
                f"ExecStart={' '.join(map(_word, self.command))}",
                f"WorkingDirectory={_literal(str(self.start_in))}",
                *system,
                "# The daemon ends what it started: ranks that are signalled hand in no work.",
                "KillMode=mixed",
                f"TimeoutStopSec={round(self.stop_seconds)}",
                "# What the kernel kills for want of memory, a rank or a backup, the daemon starts again.",
                "OOMPolicy=continue",
                f"WatchdogSec={WATCHDOG_SECONDS}",
                "# A run that is finished stays so, and these codes want a person.",
                "Restart=on-failure",
                f"RestartSec={RESTART_SECONDS}",
                f"RestartPreventExitStatus={' '.join(str(int(code)) for code in NOT_AGAIN)}",
                "",
                "[Install]",
                f"WantedBy={'multi-user.target' if self.user else 'default.target'}",
                "",
            ]
        )


def _literal(text: str) -> str:
    """Without meaning to systemd, whose % are specifiers."""
    return text.replace("%", "%%").replace("\n", " ")


def _word(word: str) -> str:
    """One word of a command line, as systemd.service(5) quotes them."""
    escaped = _literal(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{escaped}"' if re.search(r"[^\w@%+=:,./-]", word) else escaped


def own_program(started_as: str = sys.argv[0]) -> tuple[str, ...]:
    """How this very Atoll is started by its full path, whatever $PATH a service has."""
    script = Path(started_as)
    if script.name == "atoll" and script.is_file():
        return (str(script.absolute()),)
    return (sys.executable, "-P", "-m", "protocol.terminal.cli")


def units_folder(*, is_system: bool) -> Path:
    """Where units of the system, or of the one who asks, lie."""
    if is_system:
        return SYSTEM_UNITS
    settings = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return expanded(settings) / "systemd" / "user"


def install(
    unit: Unit,
    *,
    into: Path,
    running: int | None,
    say: Callable[[str], None],
) -> None:
    """Writes the unit file and says what to type next; starts nothing.

    `running` is the process that uses the folder at the moment. Raises CannotCreateError where a unit of
    another folder has that name, NotPermittedError where the units' folder is not ours to write to.
    """
    path = into / unit.name
    text = unit.text()
    if path.is_file():
        is_ours = f"{_word(str(unit.folder))}\n" in path.read_text(errors="replace")
        if not is_ours:
            raise CannotCreateError(
                f"{path} is a service of another folder",
                next_step=f"give this {unit.role} another name, or remove that file",
            )
    if unit.user and not os.access(into, os.W_OK):
        raise NotPermittedError(
            f"{into} may not be written to by this user",
            next_step=f"type the command with sudo, or '{unit.role} install-service' without --system",
        )
    with refusing(into):
        into.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())
    path.chmod(0o644)
    say(f"wrote {path}; relative paths of its settings begin at {unit.start_in}")
    if unit.user == "root":
        say("it will run as root, who owns the folder; a folder of another user is safer")
    if running is not None:
        say(f"process {running} uses the folder: stop it first")
    say("next, for now and for each start of the machine:")
    say(f"  {unit.systemctl} daemon-reload")
    say(f"  {unit.systemctl} enable --now --no-block {unit.name}")
    if not unit.user:
        say("  loginctl enable-linger      # else it runs only while you are logged in")
    elif unit.user != "root":
        # Without it logind removes a user's shared memory when their last session ends.
        say(f"  sudo loginctl enable-linger {unit.user}      # keeps its shared memory")
    say(f"  {unit.journal}")


SYSTEM = click.option(
    "--system",
    "is_system",
    is_flag=True,
    help="A service of the machine, which runs as the folder's owner, instead of one of yours.",
)
PRINT = click.option("--print", "prints", is_flag=True, help="Show the unit, and write nothing.")


def install_service(
    role: str,
    folder: Path,
    *,
    called: str,
    arguments: Sequence[str],
    stop_seconds: float,
    running: int | None,
    is_system: bool,
    prints: bool,
) -> None:
    """What 'atoll … install-service' does. `arguments` follow the program; the last names the folder."""
    if sys.platform != "linux":
        raise UsageError(
            f"{sys.platform} has no systemd",
            next_step=f"let its own service manager start 'atoll {' '.join(map(as_typed, arguments))}'",
        )
    unit = Unit(
        role=role,
        called=called,
        command=(*own_program(), *arguments),
        folder=folder.absolute(),
        start_in=Path.cwd(),
        stop_seconds=stop_seconds,
        user=owner_of(folder) if is_system else "",
    )
    if prints:
        click.echo(unit.text(), nl=False)
        return
    install(unit, into=units_folder(is_system=is_system), running=running, say=click.echo)
