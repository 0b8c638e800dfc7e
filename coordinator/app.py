"""A running coordinator: the store, the driver and its clock, both gRPC servers."""

import asyncio
import secrets
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import grpc.aio

from coordinator.authority_key import refuse_damaged
from coordinator.backups import BackupRecords, add_to, has_any
from coordinator.config import AUTHORITY_KEY_FILE, RUN_FILE, Home, unfinished_rotation_folder
from coordinator.dashboard.given import GivenFile
from coordinator.dashboard.link import open_dashboard, page_link, page_token
from coordinator.dashboard.news_file import NewsFile
from coordinator.dashboard.timeline import RoundTally, Timeline, TimesFile
from coordinator.database import DATABASE_NAME, NEWS_FILE
from coordinator.disk import Disk
from coordinator.driver import Driver, LoopClock, seconds_since_boot
from coordinator.journal import (
    log_backup,
    log_damaged,
    log_refusal,
    log_settled,
    log_slept,
    log_stopping,
    log_transition,
)
from coordinator.ports import Ports, bind, require_room_for
from coordinator.presets.choosing import Plan
from coordinator.presets.costly import costs_in_words
from coordinator.relay.forwarding import refuse_beside_the_moved
from coordinator.relay.line import Carriage
from coordinator.relay.through import Through
from coordinator.rules import rules_in_force
from coordinator.services.answering import Gate
from coordinator.services.enrolment import (
    Certificates,
    ControlEndpoint,
    EnrolmentDesk,
    enrolment_service,
)
from coordinator.services.operator import Entrance, OperatorDesk, operator_service
from coordinator.services.outside import Lookout, listen
from coordinator.services.ruling import Rulings, refuse_replaced_key, tell_of_clock
from coordinator.services.session import SessionDesk, session_service
from coordinator.services.status import Past, StatusDesk, status_service
from coordinator.settings import CoordinatorConfig, local_host
from coordinator.store import Store, may_have_begun
from coordinator.streams import Telemetry
from coordinator.swarm.state import KEPT_ROUNDS, SwarmState
from coordinator.swarm.transition import Transition
from protocol.errors import BadDataError, UnavailableError
from protocol.files.durable import LOCK_NAME, as_typed, require_ours
from protocol.service.beside import beside
from protocol.service.notify import ServiceManager, stop_signals
from protocol.terminal.console import say
from protocol.terminal.logging import LOGS_FOLDER, LogStream, keeping_the_end, start_logging
from protocol.terminal.status_words import no_backup_in_words
from protocol.trust.invite import endpoint_of
from protocol.trust.pki import pin_of
from protocol.trust.rulings import checked_chain
from protocol.trust.signing import CommitSigner
from protocol.v1 import status_pb2 as pb
from protocol.v1.enrolment_pb2_grpc import add_EnrolmentServiceServicer_to_server
from protocol.v1.operator_pb2_grpc import add_OperatorServiceServicer_to_server
from protocol.v1.session_pb2_grpc import add_SessionServiceServicer_to_server
from protocol.v1.status_pb2_grpc import add_StatusServiceServicer_to_server

if TYPE_CHECKING:
    from protocol.web.server import WebServer

TIMES_FILE = "times.jsonl"
"""In the coordinator's folder: when which node did what in closed rounds."""

GIVEN_FILE = "given.json"
"""Beside it: what each node has given over the whole run."""

WRITTEN = (
    *(LOCK_NAME, DATABASE_NAME, f"{DATABASE_NAME}-wal", f"{DATABASE_NAME}-shm"),
    *(NEWS_FILE, TIMES_FILE, LOGS_FOLDER),
)
"""What a coordinator changes in its folder where it is, and the folder that it fills."""

GRACE_SECONDS = 1.0
"""Calls in flight may take this long to end when the coordinator stops."""

STOP_SECONDS = 60.0
"""What a service manager should grant it for all of its end, on a busy machine with a slow disk."""


class Coordinator:
    """A coordinator that serves. Make one with `start`."""

    def __init__(
        self,
        *,
        driver: Driver,
        ports: Ports,
        disk: Disk,
        given: GivenFile,
        opened: AsyncExitStack,
        dashboard_port: int | None,
        through: Through | None,
    ) -> None:
        """`opened` closes all that serves, and then the store."""
        self.driver = driver
        self.connections = ports.connections
        self.through = through
        self.dashboard_port = dashboard_port
        self.control_port = ports.control_port
        self.enrolment_port = ports.enrolment_port
        self._given = given
        self._opened = opened
        self._clock_task = asyncio.create_task(driver.run_clock())
        watching = (ports.connections.watch(), disk.watch())
        self._lasting = (self._clock_task, *map(asyncio.create_task, watching))

    @classmethod
    async def start(
        cls, home: Home, config: CoordinatorConfig, carriage: Carriage | None = None
    ) -> Self:
        """Recovers the state, listens, and serves.

        Raises SystemRefusedError for a folder or port in use, ConfigError for a changed run file, and what
        the relay of `carriage` refuses with.
        """
        signer = CommitSigner.of_key(home.issuer.key_pem)
        async with AsyncExitStack() as opened:
            recovered = _recover(home, signer, opened)
            driver, rulings, watched = recovered.driver, recovered.rulings, recovered.watched
            opened.push_async_callback(driver.settled)
            if carriage is None:
                await refuse_beside_the_moved(home, config, rulings.all)
            await rulings.announce_key(home.key_number, home.tail_pem)
            ports = bind(home, config, opened, is_carried=carriage is not None)
            lookout = Lookout(driver.clock.now)
            through = None
            if carriage is None:
                await _look_out(lookout, config, ports, opened)
            else:
                through = _through(carriage, home, ports, lookout, opened)
                driver.may_be_cut_off = lambda: through is not None and through.is_away
            certificates = Certificates(
                home.issuer,
                home.tail_pem,
                driver.store,
                standing_of=rulings.standing_of,
                enrolment_port=ports.enrolment_port,
                clock=driver.clock.now,
                wall_clock=time.time,
            )
            disk = Disk(home.directory, now=driver.clock.now)
            driver.on_write = disk.note_write
            status = _add_member_services(
                ports,
                home,
                config,
                recovered,
                through=through,
                signer=signer,
                certificates=certificates,
                lookout=lookout,
                disk=disk,
            )
            _add_enrolment(ports, home, rulings, certificates, driver=driver)
            dashboard = _dashboard_of(status, watched, home, config, driver)
            if dashboard is not None:
                opened.push_async_callback(dashboard.close)
            home.save_link(host=ports.here, control_port=ports.local[ports.control_port])
            opened.push_async_callback(_end_calls, ports.control, ports.enrolment)
            await ports.control.start()
            await ports.enrolment.start()
            if through is not None:
                await through.start()
            return cls(
                driver=driver,
                ports=ports,
                disk=disk,
                given=watched.given,
                opened=opened.pop_all(),
                dashboard_port=None if dashboard is None else dashboard.port,
                through=through,
            )

    async def serve_until(self, stopped: asyncio.Event) -> None:
        """Serves until the event, or until what must last fails, and then raises why."""
        stop = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait({stop, *self._lasting}, return_when=asyncio.FIRST_COMPLETED)
            for task in self._lasting:
                if task.done():
                    # Without the clock rounds would never end: better to be restarted by whoever watches.
                    task.result()
        finally:
            stop.cancel()

    async def stop(self) -> None:
        """Ends event streams, lets calls in flight end, and closes the store."""
        for task in self._lasting:
            task.cancel()
        # If one failed, serve_until has raised that.
        await asyncio.gather(*self._lasting, return_exceptions=True)
        self.driver.end_all(
            UnavailableError(
                "the coordinator is stopping", next_step="nodes reconnect when it is back"
            )
        )
        await self._opened.aclose()
        self._given.save()


async def _end_calls(*servers: grpc.aio.Server) -> None:
    await asyncio.gather(*(server.stop(GRACE_SECONDS) for server in servers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What hears each transition, for the log and for the pages."""

    tally: RoundTally
    timeline: Timeline
    news: NewsFile
    given: GivenFile
    times: TimesFile

    @classmethod
    def of(cls, home: Home, driver: Driver) -> Self:
        """By the files in the coordinator's folder."""
        times = TimesFile(home.directory / TIMES_FILE)
        return cls(
            tally=RoundTally(driver.state, now=driver.clock.now()),
            timeline=Timeline(
                times.latest(),
                keep=times.add,
                unix_of=lambda at: time.time() - (driver.clock.now() - at),
            ),
            news=NewsFile(home.directory / NEWS_FILE),
            given=GivenFile(
                home.directory / GIVEN_FILE,
                closed=lambda: driver.store.latest_rounds(KEPT_ROUNDS),
                now=driver.clock.now(),
            ),
            times=times,
        )

    def hear(self, before: SwarmState, transition: Transition) -> None:
        """A step was taken."""
        self.tally.hear(transition)
        self.timeline.hear(before, transition)
        self.given.hear(transition)
        self.news.add(log_transition(before, transition), unix_seconds=time.time())


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What the folder tells of the run: its state, which the driver leads, and what was ruled."""

    driver: Driver
    rulings: Rulings
    watched: Watched


def _recover(home: Home, signer: CommitSigner, opened: AsyncExitStack) -> Recovered:
    """Reads the store; `opened` closes it."""
    require_ours(home.directory, WRITTEN)
    store = Store.open(home.directory, sign=signer.signature_of)
    opened.callback(store.close)
    # The folder is ours now: keys of a change that was killed early are nobody's.
    shutil.rmtree(unfinished_rotation_folder(home.directory), ignore_errors=True)
    writer, reader = (
        ThreadPoolExecutor(max_workers=1, thread_name_prefix=name) for name in ("commits", "reads")
    )
    opened.callback(writer.shutdown)
    opened.callback(reader.shutdown)
    store.keep_or_compare(home.run, home.directory / RUN_FILE)
    kept = store.rulings()
    verifier = checked_chain(kept, home.verifier)
    refuse_replaced_key(home, [signed.ruling for signed in kept])
    rules = rules_in_force(home.run, (signed.ruling for signed in kept))
    driver = Driver(
        state=replace(
            store.load(rules, home.run.digest()),
            audit_secret=signer.audit_secret(home.run.digest()),
        ),
        store=store,
        clock=LoopClock(
            starts_at=store.saved_now,
            source=seconds_since_boot,
            hears_nobody=lambda: driver.may_be_cut_off() and not driver.has_streams,
        ),
        watch=lambda before, transition: watched.hear(before, transition),
        on_slept=log_slept,
        writer=writer,
        reader=reader,
    )
    rulings = Rulings(driver, home.run, signer, verifier=verifier)
    tell_of_clock((signed.ruling for signed in kept), now=time.time())
    watched = Watched.of(home, driver)
    return Recovered(driver=driver, rulings=rulings, watched=watched)


def _add_member_services(
    ports: Ports,
    home: Home,
    config: CoordinatorConfig,
    recovered: Recovered,
    *,
    through: Through | None,
    signer: CommitSigner,
    certificates: Certificates,
    lookout: Lookout,
    disk: Disk,
) -> StatusDesk:
    """What is behind mutual TLS; returns the desk that tells how the run is doing."""
    driver, rulings, watched = recovered.driver, recovered.rulings, recovered.watched
    telemetry = Telemetry()
    swarm_id = home.issuer.swarm_id
    gate = Gate(
        swarm_id=swarm_id,
        store=driver.store,
        standing_of=rulings.standing_of,
        clock=driver.clock.now,
        on_member=ports.connections.is_of,
    )
    session = SessionDesk(driver, telemetry, home.run, signer, rulings, lookout)
    records = BackupRecords(home.directory)

    def add_for_owner(run: pb.RunStatus, now: float) -> None:
        add_to(run, records.latest(), configured=config.backup, now=now)
        disk.add_to(run)

    status = StatusDesk(
        driver,
        telemetry,
        home.run,
        swarm_id=swarm_id,
        past=Past(
            timeline=watched.timeline, kept_times=watched.times.of, given=watched.given.tally
        ),
        relay=(lambda: "") if through is None else through.in_words,
        add_for_owner=add_for_owner,
    )
    operator = OperatorDesk(
        driver,
        rulings,
        entrance=Entrance(
            host=config.advertise if through is None else through.line.host,
            control_port=ports.control_port,
            enrolment_port=ports.enrolment_port,
            pin=pin_of(home.server_pem),
        ),
        batch=home.run.inner.batch,
        wall_clock=time.time,
        random_bytes=secrets.token_bytes,
    )
    add_SessionServiceServicer_to_server(
        session_service(session, gate, certificates), ports.control
    )
    add_StatusServiceServicer_to_server(status_service(status, gate), ports.control)
    add_OperatorServiceServicer_to_server(operator_service(operator, gate), ports.control)
    return status


async def _look_out(
    lookout: Lookout, config: CoordinatorConfig, ports: Ports, opened: AsyncExitStack
) -> None:
    """Sees by datagrams where routers put members, at the ports that these know."""
    listening = await listen(lookout.saw, config.host, tuple(ports.local))
    lookout.ports = listening.ports
    opened.callback(listening.close)


def _through(
    carriage: Carriage, home: Home, ports: Ports, lookout: Lookout, opened: AsyncExitStack
) -> Through:
    """The relay by which nodes come, and which sees their datagrams; not dialled yet."""
    through = Through(
        carriage,
        name=home.run.run.name,
        host=local_host(ports.here),
        ports=ports.local,
        lookout=lookout,
    )
    opened.push_async_callback(through.stop)
    return through


def _dashboard_of(
    status: StatusDesk, watched: Watched, home: Home, config: CoordinatorConfig, driver: Driver
) -> "WebServer | None":
    """Its libraries are loaded only now: who wants no pages need not wait for them."""
    if not config.dashboard:
        return None
    from coordinator.dashboard.pages import Pages

    pages = Pages(
        status,
        watched.tally,
        watched.timeline,
        watched.news,
        now=driver.clock.now,
        is_serving=lambda: driver.is_keeping_time,
    )
    return open_dashboard(config, pages, token=page_token(home.directory))


def _add_enrolment(
    ports: Ports, home: Home, rulings: Rulings, certificates: Certificates, *, driver: Driver
) -> None:
    """What strangers with an invite reach."""
    desk = EnrolmentDesk(
        driver.store,
        certificates,
        rulings,
        leads_to=ControlEndpoint(
            run_name=home.run.run.name,
            port=ports.control_port,
            authority_pem=home.authority_pem,
        ),
        clock=driver.clock.now,
        wall_clock=time.time,
        write=driver.write,
    )
    add_EnrolmentServiceServicer_to_server(
        enrolment_service(desk, on_refused=log_refusal, clock=driver.clock.now), ports.enrolment
    )


async def _serve(
    home: Home,
    config: CoordinatorConfig,
    carriage: Carriage | None,
    log: LogStream,
    manager: ServiceManager,
) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in stop_signals():
        loop.add_signal_handler(signal_number, stopped.set)
    coordinator = await Coordinator.start(home, config, carriage)
    try:
        host = config.host
        if coordinator.through is not None and config.has_one_port:
            host = coordinator.through.line.host
        control = endpoint_of(host, coordinator.control_port)
        enrolment = endpoint_of(host, coordinator.enrolment_port)
        say(f"coordinator ready: control {control}, enrolment {enrolment}", or_else=log.write)
        directory = home.directory
        if coordinator.through is not None:
            log.write(f"nodes come {_through_in_words(coordinator)}\n")
        if coordinator.dashboard_port is not None:
            link = page_link(directory, config, coordinator.dashboard_port)
            log.write(f"page: {link}\n")
        named = as_typed(directory)
        log.write(f"invite a node: atoll invite create --dir {named}\n")
        log.write(f"watch the run: atoll status --watch --dir {named}\n")
        if not has_any(BackupRecords(directory).latest(), configured=config.backup):
            log.write(f"backup: {no_backup_in_words(named)}\n")
        if not may_have_begun(directory) and (costs := list(costs_in_words(home.run))):
            for told in (
                *costs,
                "run.toml may change until the first invite: stop this, and start again",
            ):
                log.write(f"loss: {told}\n")
        try:
            refuse_damaged(directory / AUTHORITY_KEY_FILE, home.authority_pem)
        except BadDataError as error:  # nothing that a running coordinator does needs it
            log_damaged(error)
        manager.ready(f"serves nodes at {control}, and who joins at {enrolment}")
        async with manager.watching(), _backing_up(home, config):
            await coordinator.serve_until(stopped)
        manager.stopping("stopping", within_seconds=STOP_SECONDS)
        log_stopping(coordinator.driver.state, directory)
    finally:
        await coordinator.stop()


def _backing_up(home: Home, config: CoordinatorConfig) -> AbstractAsyncContextManager[None]:
    """In a process beside this one: reading each row of a copy takes a core, and storages take their time."""
    if not config.backup:
        return nullcontext()
    command = ("coordinator", "backup", str(home.directory.absolute()), config.backup)
    options = ("--every", config.backup_every, "--keep", str(config.backup_keep), "--json")
    return beside("the backup", (*command, *options), hear=log_backup)


def _through_in_words(coordinator: Coordinator) -> str:
    through = coordinator.through
    assert through is not None
    ports = f"ports {coordinator.control_port} and {coordinator.enrolment_port}"
    if coordinator.control_port == coordinator.enrolment_port:
        ports = f"port {coordinator.control_port}"
    return f"{through.in_words()}, {ports}; tell nodes of before by 'atoll run move {through.line.host}'"


def run_coordinator(
    home: Home,
    config: CoordinatorConfig,
    *,
    log_json: bool,
    carriage: Carriage | None = None,
    settled: Plan | None = None,
) -> None:
    """Serves until a signal stops it; `config` is the folder's, with what the caller overrides.

    `settled` is what this start has chosen for a preset, to be logged.
    """
    require_room_for(config, min_nodes=home.run.run.min_nodes, is_carried=carriage is not None)
    log = start_logging(as_json=log_json, folder=home.directory, process="coordinator")
    if settled is not None:
        log_settled(settled)
    with keeping_the_end(home.directory, "coordinator"):
        asyncio.run(_serve(home, config, carriage, log, ServiceManager.of_environment()))
