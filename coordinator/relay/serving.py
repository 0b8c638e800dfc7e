"""A relay as a process: its folder, its line, signals and its service manager."""

import asyncio
import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path

import click

from coordinator.relay.doors import Limits
from coordinator.relay.line import LINE_FILE, PORTS_FILE, KeptPorts, RelayKey
from coordinator.relay.server import Relay
from protocol.files.descriptors import require_open_files
from protocol.files.durable import make_folder, write_atomically
from protocol.files.folder_lock import FolderLock
from protocol.service.beside import beside
from protocol.service.notify import ServiceManager
from protocol.terminal.logging import keeping_the_end, start_logging
from protocol.trust.invite import endpoint_of

OWN_OPEN_FILES = 64
STOP_SECONDS = 20.0
"""What a service manager should grant it for its end."""

HELPER_SECONDS = 150.0
"""For a helper beside it to leave with its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What 'atoll relay start' was told."""

    host: str
    port: int
    allowed: range
    advertise: str
    limits: Limits
    helper: Path | None = None  # whose helper runs beside it


async def until_stopped(status: str) -> None:
    """Tells the service manager what is served, and waits for SIGINT or SIGTERM."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    manager = ServiceManager.of_environment()
    manager.ready(status)
    async with manager.watching():
        await stopped.wait()
    manager.stopping("stopping", within_seconds=STOP_SECONDS)


def _helping(folder: Path | None) -> contextlib.AbstractAsyncContextManager[None]:
    """It ends before the relay does, through which it may reach its coordinator."""
    if folder is None:
        return contextlib.nullcontext()
    command = ("helper", "start", "--dir", str(folder))
    return beside("the helper", command, hear=click.echo, end_seconds=HELPER_SECONDS)


async def run_relay(folder: Path, settings: Settings, *, log_json: bool) -> None:
    """Serves until SIGINT or SIGTERM. Raises AtollError."""
    require_open_files(OWN_OPEN_FILES + 2 * settings.limits.most, of="the relay")
    make_folder(folder, mode=0o700)
    lock = FolderLock.take(folder, holder="relay", next_step="stop it, or choose another folder")
    try:
        log = start_logging(as_json=log_json, folder=folder, process="relay")
        with keeping_the_end(folder, "relay"):
            key = RelayKey.of_folder(folder)
            relay = Relay(
                key=key,
                ports=KeptPorts(folder / PORTS_FILE),
                host=settings.host,
                port=settings.port,
                allowed=settings.allowed,
                limits=settings.limits,
            )
            try:
                line = key.line(settings.advertise, relay.port)
                path = folder / LINE_FILE
                is_new = not path.exists()
                write_atomically(path, f"{line.encode()}\n".encode(), mode=0o600)
                click.echo(f"relay ready at {endpoint_of(settings.host, relay.port)}")
                if is_new:
                    click.echo(f"atoll coordinator start DIR --through {line.encode()}")
                log.write(f"the line for coordinators, who dial {line.endpoint}, is in {path}\n")
                async with _helping(settings.helper):
                    await until_stopped(f"serves coordinators at {line.endpoint}")
            finally:
                await relay.stop()
    finally:
        lock.release()
