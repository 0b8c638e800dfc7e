"""At a coordinator's old address: carries who still comes there on to where it has moved.

Old invites, and nodes that were away when it moved, know the old address alone. What they say is TLS with the
coordinator itself, so nothing needs to be believed here; its rulings tell them the new address.
"""

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from functools import partial

import structlog

from coordinator.config import Home
from coordinator.database import DATABASE_NAME
from coordinator.relay.doors import EVERYWHERE, Doors, Limits, Place, Places, listening_socket
from coordinator.relay.server import until_stopped
from coordinator.relay.stream import CHUNK_BYTES, Connection, joined
from coordinator.settings import CoordinatorConfig
from coordinator.store import Store
from protocol.errors import AtollError, NoInputError, SystemRefusedError, UsageError
from protocol.files.durable import as_typed
from protocol.service.limits import require_open_files
from protocol.terminal.console import say
from protocol.terminal.logging import start_logging
from protocol.trust.handshake import LOOK_UP_SECONDS, fetch_certificate
from protocol.trust.invite import endpoint_of
from protocol.trust.pki import has_issued
from protocol.trust.rulings import Address, Ruling, checked_chain, moved_to
from protocol.wire.sockets import connection_to, in_own_thread, looked_up

DIAL_SECONDS = 10.0
OWN_OPEN_FILES = 64

_log = structlog.get_logger(__name__)


def new_address(rulings: Sequence[Ruling]) -> Address | None:
    """Where the latest of these rulings has the coordinator go."""
    found = [address for ruling in rulings if (address := moved_to(ruling)) is not None]
    return found[-1] if found else None


def ways(old: CoordinatorConfig, new: Address, *, is_same_machine: bool = False) -> dict[int, int]:
    """Which port leads to which: the old ones, and the new ones' numbers.

    Whoever joins at the old joining port is told the number of the new one for nodes, and looks for it at the
    host that its invite names; on the same machine the coordinator itself is there. Raises UsageError where a
    number would lead to two ports, or to itself.
    """
    found = {new.control_port: new.control_port, new.enrolment_port: new.enrolment_port}
    if is_same_machine and (kept := found.keys() & {old.control_port, old.enrolment_port}):
        raise UsageError(
            f"{new.host} is this machine, and port {min(kept)} is the coordinator's own",
            next_step="'atoll coordinator start' here; forwarding is for the address that it has left",
        )
    for here, there in (
        (old.control_port, new.control_port),
        (old.enrolment_port, new.enrolment_port),
    ):
        if found.setdefault(here, there) != there:
            raise UsageError(
                f"port {here} is for nodes at one address and for joining at the other",
                next_step="move once more, to ports that differ: 'atoll run move HOST --port N'",
            )
    if is_same_machine:
        del found[new.control_port], found[new.enrolment_port]
    return found


class Forwarding:
    """Carries connections on, until it is stopped."""

    def __init__(self, host: str, ports: dict[int, int], *, to: str, limits: Limits) -> None:
        """Listens. Raises SystemRefusedError."""
        self._to, self._limits = to, limits
        self._places, self._doors = Places(limits), Doors()
        self._was_away = False
        with contextlib.ExitStack() as opened:
            listeners = {
                here: opened.enter_context(listening_socket(host, here)) for here in sorted(ports)
            }
            opened.pop_all()
        for here, listener in listeners.items():
            self._doors.open(listener, lambda _: self._places, partial(self._carry, ports[here]))

    async def stop(self) -> None:
        """Ends all connections."""
        await self._doors.close()

    async def _carry(self, port: int, connection: Connection, _: Place) -> None:
        limits = self._limits
        async with asyncio.timeout(limits.first_bytes_seconds):
            first = await connection.reader.read(CHUNK_BYTES)
        if not first:
            return
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                hosts = await looked_up(self._to, port, seconds=LOOK_UP_SECONDS)
                there = await connection_to(hosts, port, limit=CHUNK_BYTES)
        except OSError as error:
            if not self._was_away:
                why = error.strerror or str(error) or "no answer in time"
                _log.warning(
                    "the coordinator is not there", at=endpoint_of(self._to, port), why=why
                )
            self._was_away = True
            return
        self._was_away = False
        other = Connection(*there)
        other.writer.write(first)
        await joined(connection, other, idle_seconds=limits.idle_seconds)


def moved(store: Store, home: Home) -> Address:
    """Where the folder's rulings, which are checked, have its coordinator go. Raises NoInputError."""
    signed = store.rulings()
    checked_chain(signed, home.verifier)
    address = new_address([one.ruling for one in signed])
    if address is None:
        raise NoInputError(
            f"the coordinator of {home.directory} was never said to move",
            next_step="'atoll run move HOST' while it runs; then stop it, and start its copy there",
        )
    return address


async def refuse_beside_the_moved(
    home: Home, config: CoordinatorConfig, rulings: Sequence[Ruling]
) -> None:
    """Raises SystemRefusedError where this run's coordinator answers already at the address it moved to.

    A service starts the old folder when its machine boots, and invites of before lead there: two
    coordinators would part the run. Waits a few seconds where nothing answers.
    """
    there = new_address(rulings)
    if there is None or (there.host, there.control_port) == (config.advertise, config.control_port):
        return
    try:
        shown = await in_own_thread(partial(fetch_certificate, there.host, there.control_port))
    except AtollError:
        return
    if has_issued(home.authority_pem, shown):
        raise SystemRefusedError(
            f"this run's coordinator has moved to {endpoint_of(there.host, there.control_port)}, and "
            "answers there: two of them would part the run",
            next_step=f"'atoll coordinator forward {as_typed(home.directory)}' carries nodes on from here; "
            "to come back, stop the other one first",
        )


def is_here(host: str, listening: str) -> bool:
    """Whether who dials a host would come back to us, who listen at an address, or at all of them."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False  # it may be known later
    for family, kind, protocol, _, address in found:
        if listening not in EVERYWHERE:
            if address[0] == listening:
                return True
            continue
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return True
    return False


async def run_forwarding(home: Home, config: CoordinatorConfig, *, log_json: bool) -> None:
    """Serves until a signal stops it, with the folder held: its coordinator cannot be started meanwhile."""
    limits = Limits()
    require_open_files(OWN_OPEN_FILES + 2 * limits.most, of="forwarding")
    if not (home.directory / DATABASE_NAME).is_file():
        raise NoInputError(
            f"the coordinator of {home.directory} was never started, so nobody knows its address",
            next_step=f"'atoll coordinator start {as_typed(home.directory)}'",
        )
    store = Store.open(home.directory)
    try:
        address = moved(store, home)
        if not (config.control_port and config.enrolment_port):
            raise UsageError(
                f"nobody knows the ports that the coordinator of {home.directory} had: the system chose them",
                next_step="give those that invites and nodes know by --port and --enrolment-port",
            )
        ports = ways(config, address, is_same_machine=is_here(address.host, config.host))
        log = start_logging(as_json=log_json, folder=home.directory, process="coordinator")
        forwarding = Forwarding(config.host, ports, to=address.host, limits=limits)
        try:
            there = endpoint_of(address.host, address.control_port)
            named = ", ".join(map(str, sorted(ports)))
            say(f"forwarding ready: ports {named}, to {there}", or_else=log.write)
            log.write("nodes that come here are told the new address; stop it once all have come\n")
            await until_stopped(f"forwards to {there}")
        finally:
            await forwarding.stop()
    finally:
        store.close()
