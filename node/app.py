"""A node from the outside: who it is, which run it is for, and how it ends.

What people got wrong is found here, before the seconds that torch takes to load in the process that
ranks come from: a coordinator that is another's, a device that no machine has, a folder in use.
"""

import asyncio
import gc
import os
import random
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import structlog

from node.config import (
    DATA_CACHE_FOLDER,
    HISTORY_FILE,
    RULINGS_FILE,
    SENT_FILE,
    SNAPSHOTS_FOLDER,
    NodeSettings,
)
from node.disk.history import History
from node.island.checkpoints.folder import CHECKPOINTS_FOLDER
from node.island.data.opening import data_here
from node.island.data.places import DataPlaces, check_reach, reads_in_words
from node.island.models.code import DIGITS, code_digest, functions_of, in_words
from node.island.ranks.forkserver import end_forkserver, prepare_forkserver, rank_output
from node.kept import refuse_what_nobody_gives
from node.link.calls import CoordinatorLink, run_of_coordinator
from node.link.renewing import RenewingCalls
from node.machine.hardware import (
    Hardware,
    keep_freed_memory,
    likely_devices,
    look_around,
    processes_for,
)
from node.machine.notices import heeding_notices
from node.machine.placement import (
    may_need_compiler,
    num_ranks_of,
    refuse_small_helper,
    what_a_start_checks,
)
from node.outer_state import tell_leftovers
from node.stopping import NotSavedError, StopSignals
from protocol.errors import AtollError, NoInputError, NotPermittedError
from protocol.files.durable import LOCK_NAME, FolderLock, require_ours
from protocol.files.leftovers import temporary_directory
from protocol.run.run_spec import RunSpec
from protocol.service.limits import require_open_files, require_processes
from protocol.service.notify import ServiceManager
from protocol.terminal.logging import LOGS_FOLDER
from protocol.trust.credentials import IDENTITY_FILE, Credentials
from protocol.trust.identity import Identity
from protocol.trust.pki import Role
from protocol.trust.rulings import Address
from protocol.wire.payload import WireCounts

log = structlog.get_logger()

OWN_OPEN_FILES = 256
OPEN_FILES_PER_RANK = 8
"""What gRPC, torch and files take, and a socket to p2pd for each transfer; pipes of a rank. p2pd
has as many again, for its connections."""

WRITTEN = (
    *(LOCK_NAME, HISTORY_FILE, RULINGS_FILE, SENT_FILE),
    *(LOGS_FOLDER, SNAPSHOTS_FOLDER, CHECKPOINTS_FOLDER, DATA_CACHE_FOLDER),
)
"""What a node changes in its folder where it is, and the folders that it fills."""

_STOPPED = "stopped by its owner"


async def run_node(
    folder: Path, settings: NodeSettings, *, waits: bool, ends_with_stdin: bool = False
) -> str:
    """Runs the node of a folder until the run is finished or its owner stops it; returns why.

    With `waits` a coordinator that is away is waited for; else that raises UnavailableError. With
    `ends_with_stdin` the owner also stops it by closing its standard input, as a program does that
    started it and was killed.

    No process that it started is left when it ends. The last thing that its process does: signals
    are ignored from then on.
    """
    credentials = Credentials.load(folder)
    identity = Identity.load(folder / IDENTITY_FILE)
    is_helper = credentials.principal.role is Role.HELPER
    num_ranks = 0 if is_helper else settings.ranks_here
    hardware = look_around("cpu" if is_helper else settings.device)
    if not is_helper and not settings.loop:
        likely_devices(settings.device, num_ranks_of(settings), hardware)
        settings.local_training.check()
    settings.require_interface()
    what = "the helper" if is_helper else "the node"
    require_open_files(OWN_OPEN_FILES + OPEN_FILES_PER_RANK * num_ranks, of=what)
    require_processes(processes_for(num_ranks), of=what)
    temporary_directory(has_sockets=True)
    require_ours(folder, WRITTEN)
    lock = FolderLock.take(
        folder,
        holder="node",
        next_step="stop that one first; another node on this machine needs a folder of its own",
    )
    tell_leftovers()
    manager = ServiceManager.of_environment()
    async with manager.watching():
        with ExitStack() as at_last, StopSignals(manager) as signals:
            if ends_with_stdin:
                signals.heed_stdin()
            try:
                settings.require_port(credentials.host, credentials.ports)
                return await _run(
                    folder, settings, credentials, identity, hardware, signals, at_last, waits=waits
                )
            except asyncio.CancelledError:
                return _STOPPED
            except AtollError as error:
                if not signals.is_asked or isinstance(error, NotSavedError):
                    raise
                # Whoever stops a service signals all its processes, and we may see a rank end first.
                log.info("while stopping", error=str(error))
                return _STOPPED
            finally:
                end_forkserver()
                lock.release()


async def _run(
    folder: Path,
    settings: NodeSettings,
    credentials: Credentials,
    identity: Identity,
    hardware: Hardware,
    signals: StopSignals,
    at_last: ExitStack,
    *,
    waits: bool,
) -> str:
    counts = WireCounts()
    async with (
        heeding_notices(settings.cloud, signals.leave),
        RenewingCalls(credentials, identity, counts, _ask_members) as calls,
    ):
        link = CoordinatorLink(
            calls,
            renew=calls.renew,
            reconnect=calls.reconnect,
            moves_to=calls.moves_to,
            host=lambda: calls.credentials.host,
            look_elsewhere=calls.look_elsewhere,
            meets=calls.meets,
        )
        signals.manager.doing(f"looking for the coordinator at {credentials.endpoint}")
        spec = await run_of_coordinator(link, waits=waits, rng=random.Random())
        is_helper = credentials.principal.role is Role.HELPER
        if link.over is not None:
            refuse_what_nobody_gives(folder, link.over)
        if is_helper:
            refuse_small_helper(link.rules, hardware)
        else:
            _refuse_or_tell(folder, settings, link.rules, hardware)
        from node.records import Records  # with kernels, for which no error of typing waits

        num_ranks = 0 if is_helper else settings.ranks_here
        records = Records.of(
            folder, settings, spec, rules=link.rules, history=History(None), num_ranks=num_ranks
        )
        records.require_room()  # the daemon asks again, for the ranks that there come to be
        log.info(
            "run", name=spec.run.name, rounds=spec.run.rounds, coordinator=credentials.endpoint
        )
        if not is_helper and not settings.loop:
            log.info("loading torch: it takes some seconds")
            output = at_last.enter_context(closing(rank_output(folder, settings.name)))
            # It imports torch while we import the rest, and do without.
            prepare_forkserver(
                standard_error=output.descriptor,
                with_compiler=may_need_compiler(settings, hardware),
            )
        keep_freed_memory()
        gc.disable()  # what imports make is not garbage, and looking for some takes a sixth of them
        with signals.blocking():
            from node.assembly import NodeStart, run_daemon
        gc.freeze()  # it stays, so nobody need look through it later either
        gc.enable()
        start = NodeStart(
            folder=folder,
            settings=settings,
            credentials=calls.credentials,  # they may be new already
            identity=identity,
            spec=spec,
            rules=link.rules,
            link=link,
            counts=counts,
            current_credentials=lambda: calls.credentials,
        )
        return await run_daemon(start, hardware, signals)


async def _ask_members(credentials: Credentials) -> Sequence[Address]:
    """Loads what that takes only when it is needed."""
    from node.exchange.transport.whereabouts import addresses_elsewhere

    return await addresses_elsewhere(credentials)


def _refuse_or_tell(
    folder: Path, settings: NodeSettings, spec: RunSpec, hardware: Hardware
) -> None:
    """What of the run runs and is read here, and whether it can be trained here. Raises AtollError."""
    for check in what_a_start_checks(folder, settings, spec, hardware):
        check()
    if not settings.loop:
        data_here(spec.data, settings.data_places(home=folder, folder=Path.cwd()))
    if functions_of(spec) and not settings.loop:  # else nothing here runs them
        log.info(
            "the run's own code runs here, as its owner allows",
            code=in_words(spec),
            folder=str(settings.code_folder(Path.cwd()) or "installed"),
            digest=code_digest(spec)[:DIGITS],
        )
    log.info("the run reads", what=reads_in_words(spec.data, own=settings.data))
    if spec.data.source == "text" and not spec.data.private and not settings.data:
        places = settings.data_places(home=folder, folder=Path.cwd())
        try:
            _tell_what_is_read(spec.data.paths, places)
        except (NoInputError, NotPermittedError):
            if not settings.loop:  # which may have data of its own: its node says so
                raise


def _tell_what_is_read(patterns: tuple[str, ...], places: DataPlaces) -> None:
    """Says which files of this machine the run file names, before any is read. Raises AtollError."""
    from node.island.data.dataset import text_files

    check_reach(patterns, places)
    files = [file.path for file in text_files(patterns, places.folder)]
    log.info(
        "the run trains on text of this machine",
        files=len(files),
        bytes=sum(path.stat().st_size for path in files),
        folder=os.path.commonpath([path.absolute().parent for path in files]),
        first=[path.name for path in files[:3]],
    )
