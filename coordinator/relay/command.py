"""`atoll relay …`: for the owner of a small server that others can dial."""

import asyncio
from pathlib import Path

import click

from protocol.errors import UsageError
from protocol.service.unit import PRINT, SYSTEM, install_service
from protocol.terminal.console import PathAtHome, bits_per_second_of
from protocol.terminal.lazy_group import WholeGroup

DEFAULT_PORT = 7720
DEFAULT_PORTS = "7700-7719"

_FOLDER = PathAtHome(file_okay=False, path_type=Path)


@click.group(cls=WholeGroup)
def relay() -> None:
    """Carry coordinators that nobody can dial: behind a router, or on a laptop."""


@relay.command()
@click.argument("directory", metavar="DIR", type=_FOLDER)
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=DEFAULT_PORT,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port that coordinators dial; 0 picks one.",
)
@click.option(
    "--ports",
    default=DEFAULT_PORTS,
    show_default=True,
    metavar="FIRST-LAST",
    help="Ports that it may listen on for coordinators, each with the numbers that it has at home.",
)
@click.option(
    "--advertise", help="Host by which others dial this machine.  [default: its own address]"
)
@click.option(
    "--max-rate",
    metavar="RATE",
    help="Most that it carries, as 20mbit or 2.5MB/s, both ways together.  [default: no limit]",
)
@click.option(
    "--max-connections",
    default=1000,
    show_default=True,
    type=click.IntRange(1, 100_000),
    help="Most that are carried at once.",
)
@click.option(
    "--connections-per-address",
    default=64,
    show_default=True,
    type=click.IntRange(4, 100_000),
    help="Most of one address, which all machines of an office may share.",
)
@click.option(
    "--helper",
    metavar="DIR",
    type=_FOLDER,
    help="Run the helper of that folder beside it, by its node.toml.",
)
@click.option("--log-json", is_flag=True, help="Write the log for machines.")
def start(
    directory: Path,
    host: str,
    port: int,
    ports: str,
    advertise: str | None,
    max_rate: str | None,
    max_connections: int,
    connections_per_address: int,
    helper: Path | None,
    log_json: bool,
) -> None:
    """Carry coordinators through this machine until Ctrl-C; DIR keeps its key.

    Prints a line for coordinators at its first start, and keeps it in relay.line of DIR. Who has that line
    may be carried: send it privately. The relay reads nothing of what it carries.

    With --helper the same command runs a helper, which has joined before in a folder of its own. It leaves
    with its work when the relay is stopped, and where its run is finished the relay goes on.

    \b
    Example, and what the coordinator's owner types at home:
      atoll relay start my-relay --advertise relay.example.org --max-rate 20mbit
      atoll coordinator start my-run --through LINE
      atoll relay start my-relay --advertise relay.example.org --helper my-helper
    """
    from coordinator.relay.doors import Limits
    from coordinator.relay.server import Settings, run_relay
    from coordinator.settings import advertised_host
    from protocol.trust.invite import check_endpoint

    outside = advertise or advertised_host(host)
    check_endpoint(outside, DEFAULT_PORT)
    settings = Settings(
        host=host,
        port=port,
        allowed=_range(ports),
        advertise=outside,
        limits=Limits(
            most=max_connections,
            most_per_address=connections_per_address,
            burst_per_address=connections_per_address,
            bytes_per_second=_rate(max_rate),
        ),
        helper=None if helper is None else _helpers_folder(helper),
    )
    asyncio.run(run_relay(directory, settings, log_json=log_json))


@relay.command("install-service")
@click.argument("directory", metavar="DIR", type=_FOLDER)
@click.argument("options", metavar="[-- OPTION]...", nargs=-1)
@SYSTEM
@PRINT
def service(directory: Path, options: tuple[str, ...], is_system: bool, prints: bool) -> None:
    """Have systemd start the relay of DIR, watch it, and start it again.

    Writes a unit and says what to type next; nothing is started. What follows -- are options of 'atoll relay
    start' in it.

    Example: atoll relay install-service my-relay --print -- --advertise relay.example.org
    """
    from coordinator.relay.server import HELPER_SECONDS, STOP_SECONDS
    from protocol.files.durable import FolderLock, as_typed

    if not directory.is_dir():
        raise UsageError(
            f"there is no folder {directory}",
            next_step=f"'atoll relay start {as_typed(directory)}' first",
        )
    folder = directory.absolute()
    has_helper = any(option.partition("=")[0] == "--helper" for option in options)
    install_service(
        "relay",
        folder,
        called=folder.name,
        arguments=("relay", "start", *options, str(folder)),
        stop_seconds=STOP_SECONDS + (HELPER_SECONDS if has_helper else 0.0),
        running=FolderLock.holder_of(folder),
        is_system=is_system,
        prints=prints,
    )


def _helpers_folder(folder: Path) -> Path:
    """Absolute; raises AtollError for a folder that is no helper's."""
    from protocol.trust.credentials import Credentials
    from protocol.trust.pki import Role

    role = Credentials.load(folder).principal.role
    if role is not Role.HELPER:
        raise UsageError(
            f"--helper {folder} is a {role}'s folder",
            next_step="join there with an invite of 'atoll invite create --role helper', in another folder",
        )
    return folder.absolute()


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 1 << 16):
        raise UsageError(
            f"{text!r} are no ports", next_step="write the first and the last, as 7700-7719"
        )
    return range(int(first), int(last) + 1)


def _rate(text: str | None) -> float | None:
    if text is None:
        return None
    bits = bits_per_second_of(text)
    if not bits:
        raise UsageError(
            f"{text!r} is no rate",
            next_step="write bits a second as 20mbit, or bytes a second as 2.5MB/s",
        )
    return bits / 8
