"""The run owner's commands about a coordinator and its folder: `atoll coordinator …`.

gRPC, TLS and SQLite are imported inside the commands, so that help and mistakes are quick.
"""

import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from coordinator.new_run import init as new_run
from protocol.errors import AtollError, NoInputError, UnavailableError, UsageError
from protocol.files.durable import as_typed, expanded
from protocol.service.beside import ENDS_WITH_STDIN
from protocol.service.unit import PRINT, SYSTEM, install_service
from protocol.terminal import console
from protocol.terminal.console import PathAtHome, as_seconds
from protocol.terminal.lazy_group import WholeGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from coordinator.backups import Failed, Made, Waits
    from protocol.v1.operator_pb2_grpc import OperatorServiceStub

_FOLDER = PathAtHome(file_okay=False, path_type=Path)
_PORT = click.IntRange(0, 65535)

_CONFIG_FILE = "coordinator.toml"


@click.group(cls=WholeGroup)
def coordinator() -> None:
    """Set up and start the coordinator of a run."""


coordinator.add_command(new_run)


@coordinator.command()
@click.argument("directory", metavar="[DIR]", type=_FOLDER, required=False)
@click.option("--host", help="Address to listen on, instead of coordinator.toml's.")
@click.option("--port", "control_port", type=_PORT, help="Port for nodes; 0 picks one.")
@click.option("--enrolment-port", type=_PORT, help="Port for joining; 0 picks one.")
@click.option(
    "--one-port",
    metavar="PORT",
    type=click.IntRange(1, 65535),
    help="One port for both, as 443: the only one that some networks let out.",
)
@click.option(
    "--dashboard",
    metavar="HOST:PORT",
    help="Serve the run's page, /metrics and /healthz there; beyond this machine its link has a token.  "
    "[default: 127.0.0.1:7702, or the next port that is free]",
)
@click.option("--no-dashboard", is_flag=True, help="Serve no page.")
@click.option(
    "--through",
    metavar="LINE",
    help="Let nodes come through a relay: the line of 'atoll relay start', or its file relay.line. The "
    "folder keeps it for later starts; 'none' forgets it.",
)
@click.option(
    "--backup",
    metavar="TARGET",
    help="Copy the run again and again to that folder or address, instead of coordinator.toml's.",
)
@click.option("--backup-every", metavar="TIME", help="How often: 90s, 10m, 1h.")
@click.option(
    "--backup-keep", type=click.IntRange(1), help="How many copies stay; older ones are removed."
)
@click.option("--log-json", is_flag=True, help="Write the log for machines.")
def start(
    directory: Path | None,
    host: str | None,
    control_port: int | None,
    enrolment_port: int | None,
    one_port: int | None,
    dashboard: str | None,
    no_dashboard: bool,
    through: str | None,
    backup: str | None,
    backup_every: str | None,
    backup_keep: int | None,
    log_json: bool,
) -> None:
    """Serve the run in DIR until Ctrl-C.

    DIR may be left out within the folder, or with $ATOLL_DIR set. Prints one line on standard
    output when it is ready; the log goes to standard error.

    Example: atoll coordinator start my-run
    """
    from coordinator.app import run_coordinator
    from coordinator.backup import clear_unfinished_backups
    from coordinator.config import RUN_FILE, Home, settle_preset
    from coordinator.presets.wanted import look_at_data
    from coordinator.relay.line import Carriage
    from coordinator.remote_backup import clear_unsent, require_target
    from coordinator.store import may_have_begun, write_lost_anew

    if no_dashboard and dashboard is not None:
        raise UsageError(
            f"--dashboard {dashboard} and --no-dashboard are both given", next_step="leave one out"
        )
    if one_port is not None:
        for option, given in (("--port", control_port), ("--enrolment-port", enrolment_port)):
            if given is not None:
                raise UsageError(
                    f"--one-port {one_port} and {option} {given} are both given",
                    next_step="leave one out",
                )
        control_port = enrolment_port = one_port
    folder = folder_of(directory)
    clear_unfinished_backups(folder)
    clear_unsent(folder)
    write_lost_anew(folder / RUN_FILE)  # without its description it may read as another run
    settled = settle_preset(folder)
    home = Home.load(folder)
    config = home.config.with_changes(
        host=host,
        control_port=control_port,
        enrolment_port=enrolment_port,
        dashboard="" if no_dashboard else dashboard,
        backup=backup,
        backup_every=backup_every,
        backup_keep=backup_keep,
    )
    if config.backup:
        require_target(config.backup)
    if not may_have_begun(folder):  # its run file may have been changed since 'atoll init'
        look_at_data(folder, home.run)
    plan = None if settled is None else settled.plan
    carriage = Carriage.chosen(folder, through)
    run_coordinator(home, config, carriage=carriage, log_json=log_json, settled=plan)


@coordinator.command()
@click.argument("directory", metavar="DIR", type=_FOLDER)
@click.option("--host", help="Address to listen on, instead of coordinator.toml's.")
@click.option("--port", "control_port", type=_PORT, help="Port that nodes know.")
@click.option("--enrolment-port", type=_PORT, help="Port that invites know.")
@click.option("--log-json", is_flag=True, help="Write the log for machines.")
def forward(
    directory: Path,
    host: str | None,
    control_port: int | None,
    enrolment_port: int | None,
    log_json: bool,
) -> None:
    """On the machine that a coordinator has left: carry nodes on to where it has moved, until Ctrl-C.

    So invites of before go on to work, and nodes that were away find it. DIR is its old folder, which says
    where it has moved ('atoll run move'). What goes through is encrypted from end to end.

    Example: atoll coordinator forward my-run
    """
    import asyncio

    from coordinator.config import Home
    from coordinator.relay.forwarding import run_forwarding

    home = Home.load(directory)
    config = home.config.with_changes(
        host=host, control_port=control_port, enrolment_port=enrolment_port
    )
    asyncio.run(run_forwarding(home, config, log_json=log_json))


@coordinator.command("install-service")
@click.argument("directory", metavar="[DIR]", type=_FOLDER, required=False)
@SYSTEM
@PRINT
def service(directory: Path | None, is_system: bool, prints: bool) -> None:
    """Have systemd start the coordinator of DIR, watch it, and start it again.

    Writes a unit and says what to type next; nothing is started. Addresses and ports are those of
    coordinator.toml.

    Example: atoll coordinator install-service my-run --print
    """
    from coordinator.app import STOP_SECONDS
    from coordinator.config import Home
    from protocol.files.durable import FolderLock

    folder = folder_of(directory).absolute()
    install_service(
        "coordinator",
        folder,
        called=Home.load(folder).run.run.name,
        arguments=("coordinator", "start", str(folder)),
        stop_seconds=STOP_SECONDS,
        running=FolderLock.holder_of(folder),
        is_system=is_system,
        prints=prints,
    )


@coordinator.command()
@click.argument("directory", metavar="DIR", type=_FOLDER)
@click.argument("target", metavar="TARGET")
@click.option(
    "--every",
    metavar="TIME",
    callback=as_seconds,
    help="Make a copy below TARGET that often, as 10m, until Ctrl-C.",
)
@click.option(
    "--keep",
    type=click.IntRange(1),
    help="With --every: how many copies stay; older ones are removed.  [default: 24]",
)
@click.option("--json", "is_json", is_flag=True, help="Print JSON: an object a line for each copy.")
@ENDS_WITH_STDIN
def backup(
    directory: Path,
    target: str,
    every: float | None,
    keep: int | None,
    is_json: bool,
    ends_with_stdin: bool,
) -> None:
    """Copy the run in DIR to the new folder or address TARGET, while its coordinator runs or not.

    TARGET holds the keys too, as far as they lie in DIR: keep it as private as that. 'atoll coordinator
    start TARGET' goes on from a folder, 'restore' makes one of an address; never run both. An address is one
    of object storage: s3:// or another that fsspec knows, by 'pip install atoll[remote] s3fs'.

    With --every it goes on. Each copy gets a name with its time below TARGET; 'restore TARGET' takes the
    newest. A copy is read back before an older one goes. A failure is said, and tried again.

    \b
    Examples:
      atoll coordinator backup my-run /mnt/backups/my-run
      atoll coordinator backup my-run s3://backups/my-run-monday
      atoll coordinator backup my-run s3://backups/my-run --every 10m --keep 24
    """
    from coordinator.backups import BackupRecords, Made, Waits, copies_at, once, without_password

    records = BackupRecords(directory)
    if every is None:
        if keep is not None:
            raise UsageError(
                f"--keep {keep} is for copies that follow each other",
                next_step="add --every 10m, or leave --keep out",
            )
        made = once(directory, target)
        click.echo(_in_words(made, is_json=is_json))
        _noted(lambda: records.note("", made, now=time.time()))
        return
    from coordinator.backups import DEFAULT_KEEP, Series, back_up_for_good, until_signals
    from coordinator.remote_backup import is_remote

    if every < 1:
        raise UsageError(f"--every {every:g}s is less than a second", next_step="write 10m")
    series = Series.of(directory, keep=keep or DEFAULT_KEEP, every_seconds=every)

    called = without_password(target) if is_remote(target) else str(expanded(target).absolute())

    def say(told: "Made | Failed | Waits") -> None:
        _noted(lambda: records.note(called, told, now=time.time()))
        if isinstance(told, Waits):
            return
        if isinstance(told, Made) or is_json:
            console.say(_in_words(told, is_json=is_json))
            return
        error, again = told.error, console.seconds_in_words(told.next_seconds)
        console.say(f"no copy: {error.what}; tried again in {again}", err=True)
        if error.next_step:
            console.say(f"  next: {error.next_step}", err=True)

    with until_signals(ends_with_stdin=ends_with_stdin) as wait:
        back_up_for_good(directory, copies_at(target), series, say=say, wait=wait)
    _noted(lambda: records.end(called))
    sys.stdout.flush()
    os._exit(0)  # threads of a storage whose call was broken off complain when Python ends in order


def _noted(note: "Callable[[], None]") -> None:
    """A folder that refuses a note is no reason against a copy elsewhere."""
    try:
        note()
    except AtollError as error:
        console.say(f"not noted for 'atoll status': {error.what}", err=True)


def _in_words(told: "Made | Failed", *, is_json: bool) -> str:
    from coordinator.backups import Made, in_a_line

    if is_json:
        return in_a_line(told)
    assert isinstance(told, Made)
    made = told.backup
    return (
        f"copied run {made.run_name!r} at round {made.committed_round} of {made.total_rounds} "
        f"to {told.place} ({console.bytes_in_words(made.num_bytes)}), {made.authority_key}"
    )


@coordinator.command("restore")
@click.argument("source", metavar="SOURCE")
@click.argument("directory", metavar="DIR", type=_FOLDER)
def restore_backup(source: str, directory: Path) -> None:
    """Make the new folder DIR of a backup. Nothing is started.

    SOURCE is the folder or address of a backup, or the one below which 'atoll coordinator backup --every'
    puts copies: of these it takes the newest.

    \b
    Examples:
      atoll coordinator restore s3://backups/my-run-monday my-run
      atoll coordinator restore /mnt/backups my-run
    """
    from coordinator.backups import restore

    restored = restore(source, directory)
    click.echo(
        f"restored run {restored.run_name!r} at round {restored.committed_round} to {directory}, "
        f"from {restored.place}"
    )
    click.echo(
        f"next, where the run's coordinator runs nowhere else: atoll coordinator start "
        f"{as_typed(directory)}"
    )


_PASSPHRASE_FD = click.option(
    "--passphrase-fd",
    "descriptor",
    metavar="N",
    type=click.IntRange(0),
    help="Read the passphrase of the authority's key from this file descriptor.  "
    "[default: $ATOLL_PASSPHRASE, or you are asked]",
)


@coordinator.command()
@click.argument("directory", metavar="DIR", type=_FOLDER)
@click.option("--authority", "with_authority", is_flag=True, help="Change the authority's key too.")
@click.option(
    "--authority-key",
    metavar="FILE",
    type=PathAtHome(dir_okay=False, path_type=Path),
    help="Where the authority's key lies.  [default: ca.key in DIR]",
)
@_PASSPHRASE_FD
def rotate(
    directory: Path, with_authority: bool, authority_key: Path | None, descriptor: int | None
) -> None:
    """Give the coordinator of DIR, which does not run now, other keys for the same run.

    Its next start announces them, and nodes follow by themselves. What the old keys sign after that
    counts for nothing; commits that they signed stay good.

    \b
    Examples:
      atoll coordinator rotate my-run
      atoll coordinator rotate my-run --authority --authority-key /media/stick/ca.key
    """
    from coordinator.rotation import Rotation

    number = Rotation(
        directory=directory,
        with_authority=with_authority,
        authority_key=authority_key,
        descriptor=descriptor,
        now=time.time(),
    ).make()
    whose = "the coordinator and its authority have" if with_authority else "the coordinator has"
    click.echo(f"{whose} other keys: number {number}; invites made before are useless")
    click.echo(f"next: atoll coordinator start {as_typed(directory)}")


@coordinator.command()
@click.argument("directory", metavar="DIR", type=_FOLDER)
@_PASSPHRASE_FD
def protect(directory: Path, descriptor: int | None) -> None:
    """Encrypt the authority's key in DIR by a passphrase. Only 'rotate' asks for it.

    Example: atoll coordinator protect my-run
    """
    from coordinator.rotation import protect as encrypt

    path = encrypt(directory, descriptor=descriptor)
    click.echo(
        f"{path} is encrypted; without the passphrase nobody can change this run's keys any more"
    )


DIR_OPTION = click.option(
    "--dir",
    "directory",
    metavar="DIR",
    type=_FOLDER,
    help="The coordinator's folder.  [default: $ATOLL_DIR, or the current folder]",
)


def folder_of(directory: Path | None) -> Path:
    """The folder meant: before its first start a coordinator's has no link.toml to find it by."""
    from protocol.trust.credentials import HOME_VARIABLE, find_home

    if directory is None and not os.environ.get(HOME_VARIABLE) and Path(_CONFIG_FILE).is_file():
        return Path.cwd()
    return find_home(directory)


@contextmanager
def operator_of(directory: Path | None) -> "Iterator[OperatorServiceStub]":
    """The run owner's way to the coordinator, by the credentials in its folder."""
    from protocol.trust.credentials import LINK_FILE, Credentials, in_place_of
    from protocol.v1.operator_pb2_grpc import OperatorServiceStub
    from protocol.wire.channel import open_blocking_channel

    home = folder_of(directory)
    if not (home / LINK_FILE).is_file():
        if (home / _CONFIG_FILE).is_file():
            raise UnavailableError(
                f"the coordinator of {home} was never started, so its port is not known",
                next_step=f"start it with 'atoll coordinator start {as_typed(home)}'",
            )
        raise NoInputError(
            f"{home} is not a coordinator's folder, and this command is the run owner's",
            next_step=f"name it: {in_place_of(home, _CONFIG_FILE) or '--dir DIR'}",
        )
    with open_blocking_channel(Credentials.load(home)) as channel:
        yield OperatorServiceStub(channel)
