"""What a daemon tells the service manager that started it: that it is ready, lives, and is stopping.

And the signals by which whoever started it has it stop.

systemd's protocol (sd_notify(3)): lines in one datagram to the socket that $NOTIFY_SOCKET names.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Self

import structlog

log = structlog.get_logger()

ADDRESS_VARIABLE = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE = "WATCHDOG_USEC"
WATCHED_PROCESS_VARIABLE = "WATCHDOG_PID"

SEND_SECONDS = 1.0
"""How long a manager that is busy may let a message wait."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those that mean stop; not a closed terminal's for a daemon that nohup started."""
    ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if ends_with_terminal else ()))


class ServiceManager:
    """The manager behind this process, or nobody: then telling it anything does nothing."""

    def __init__(self, *, address: str = "", watchdog_seconds: float = 0.0) -> None:
        """`address` is a path, or a name in the abstract space behind an @."""
        self._address = address
        self._watchdog_seconds = watchdog_seconds
        self._is_lost = False

    @classmethod
    def of_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Self:
        """The one that the environment names. Takes it out, so that children do not speak for us."""
        address = environment.pop(ADDRESS_VARIABLE, "")
        microseconds = environment.pop(WATCHDOG_VARIABLE, "")
        watched = environment.pop(WATCHED_PROCESS_VARIABLE, "") or str(os.getpid())
        is_ours = microseconds.isdecimal() and watched == str(os.getpid())
        return cls(
            address=address, watchdog_seconds=int(microseconds) / 1e6 if address and is_ours else 0
        )

    def ready(self, status: str) -> None:
        """What the service is for begins; `status` is a sentence for people."""
        self._tell("READY=1", f"STATUS={status}")

    def doing(self, status: str) -> None:
        """A sentence for people, which 'systemctl status' shows."""
        self._tell(f"STATUS={status}")

    def stopping(self, status: str, *, within_seconds: float) -> None:
        """It ends by itself, and takes so long at most, whatever limit the unit gives."""
        self._tell(
            "STOPPING=1",
            f"STATUS={status}",
            f"EXTEND_TIMEOUT_USEC={round(within_seconds * 1e6)}",
        )

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Within it, the manager hears at every half of its watchdog's time that the event loop lives."""
        if not self._watchdog_seconds:
            yield
            return
        task = asyncio.ensure_future(self._keep_telling())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _keep_telling(self) -> None:
        while True:
            self._tell("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_seconds / 2)

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        name = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
                told.settimeout(SEND_SECONDS)
                told.connect(name)
                told.send("\n".join(line.replace("\n", " ") for line in lines).encode())
        except OSError as error:
            if not self._is_lost:  # it will think us dead: say why, once
                log.warning(
                    "the service manager does not hear us", socket=self._address, why=str(error)
                )
            self._is_lost = True
        else:
            self._is_lost = False


NOBODY = ServiceManager()
