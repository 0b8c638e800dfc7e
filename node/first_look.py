"""What a contributor sees after joining: this machine, the run, what that takes, and what it may give a day.

Nothing is loaded that takes seconds: of the node's own speed others of its kind are the measure.
"""

import asyncio
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from node.config import NodeSettings, load_settings
from node.disk.history import History
from node.installed import software_of
from node.island.data.places import reads_in_words
from node.island.models.code import DIGITS, check_functions, code_digest, functions_of, is_allowed
from node.island.parallel.auto_mesh import node_bytes
from node.link.calls import run_in_force
from node.machine.hardware import Hardware, likely_devices, look_around
from node.machine.limits import Limits
from node.machine.placement import (
    num_ranks_of,
    refuse_small_helper,
    system_bytes,
    training_bytes,
    what_a_start_checks,
)
from node.records import BESIDE_BYTES, Records
from protocol.errors import AtollError
from protocol.run.run_spec import RunSpec
from protocol.terminal import console
from protocol.terminal.node_words import is_present
from protocol.terminal.query import StatusLink
from protocol.v1 import status_pb2
from protocol.wire.rounds import OWN_LOOP

WEIGHT_BYTES, STATE_BYTES = 4, 8
"""Of each parameter: the weights, and the outer optimizer's momentum with them, which begins at zero."""

_DAY_SECONDS = 86_400
_MINUTES_OF_DAY = 24 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What one more node gives and moves in a day, as far as those that are there show it."""

    tokens: float | None  # None: no node of its kind trains now
    # Each way, for what one sends another gets; None: before the first round.
    moved_bytes: float | None


def expected_a_day(status: status_pb2.GetStatusResponse, *, kind: str, limits: Limits) -> Expected:
    """Of a node on that kind of device: `cpu`, `cuda`.

    Tokens are what nodes of the kind train in a second, in the median, for as many hours as the owner gives.
    Bytes go on beyond those, for a node stays a member.
    """
    members = [n for n in status.nodes if is_present(n) and not n.is_helper]
    paces = [
        node.heartbeat.tokens_per_second
        * (
            node.heartbeat.utilisation.compute_share
            if node.heartbeat.HasField("utilisation")
            else 1
        )
        / node.num_ranks
        for node in members
        if node.device.partition(":")[0] == kind and node.num_ranks
    ]
    paces = [pace for pace in paces if pace > 0]
    seconds, run = status.run.elapsed_seconds, status.run
    sent = sum(count.sent_bytes for count in run.wire.counts)
    has_rounds = run.committed_round > 0 and seconds > 0 and members
    return Expected(
        tokens=median(paces) * _DAY_SECONDS * share_of_day(limits) if paces else None,
        moved_bytes=sent / seconds * _DAY_SECONDS / len(members) if has_rounds else None,
    )


def share_of_day(limits: Limits) -> float:
    """The part of a day in which the owner lets the node train."""
    if not limits.hours:
        return 1.0
    minutes = sum(any(s.has(minute) for s in limits.hours) for minute in range(_MINUTES_OF_DAY))
    return minutes / _MINUTES_OF_DAY


def start_options(settings: NodeSettings, spec: RunSpec) -> list[str]:
    """What 'atoll node start' has to be told that node.toml does not say; what nobody knows, in capitals."""
    options: list[str] = []
    if spec.data.source == "loop":
        return options if settings.loop else ["--loop"]
    if functions_of(spec) and not settings.loop:
        name, code = spec.run.name, settings.code_folder(Path.cwd())
        if not is_allowed(spec, settings.allow_functions):
            options += ["--allow-function", f"{name}@{code_digest(spec)[:DIGITS]}"]
        try:
            check_functions(spec, allowed=[name], code=code)
        except AtollError:
            options += ["--code", "CODE"]
    if spec.adapters is not None and not (settings.base or settings.loop):
        options += ["--base", "MODEL"]
    if spec.data.private and not (settings.data or settings.loop):
        options += ["--data", "PATH"]
    return options


def first_look(folder: Path, command: Sequence[str], *, is_helper: bool) -> Iterator[str]:
    """Lines for people, as they are found, the last ones with what to type next: `command` and its options.

    What keeps the node from its work is one of them, no error.
    """
    settings = load_settings(folder)
    hardware = look_around("cpu" if is_helper else settings.device)
    free = console.bytes_in_words(shutil.disk_usage(folder).free)
    memory = console.bytes_in_words(hardware.memory_bytes)
    devices: Sequence[str] = ()
    if not is_helper:
        try:
            devices = likely_devices(settings.device, num_ranks_of(settings), hardware) or ()
        except AtollError as error:
            yield f"devices: {error}"
    trains_on = "" if is_helper else f"{_in_words(devices, hardware)}, "
    try:
        spec = asyncio.run(run_in_force(folder))  # what follows are estimates
        with StatusLink(folder) as link:
            link.status()  # makes the connection, which takes several round trips
            asked_at = time.monotonic()
            status = link.status()
            trip = f"{1e3 * (time.monotonic() - asked_at):.0f} ms"
    except AtollError as error:
        yield f"this machine: {trains_on}{memory} of memory and {free} of disk free"
        yield f"the run: not known yet, {error.what}"
        yield f"next: {shlex.join(command)}"
        return
    yield (
        f"this machine: {trains_on}{memory} of memory and {free} of disk free; the coordinator answers "
        f"within {trip}, and the link to peers is measured in the first exchanges"
    )
    run = status.run
    num_present = sum(map(is_present, status.nodes))
    yield (
        f"the run: {console.count_in_words(spec.num_parameters)} parameters, round {run.committed_round} of "
        f"{run.total_rounds}, {num_present} members now; data: "
        + ("its members' training loops have" if spec.data.source == "loop" else spec.data.source)
        + (", each member's own" if spec.data.private else "")
    )
    yield from what_is_over(status)
    if not (is_helper or settings.loop):
        yield from other_software(software_of(spec), status)
    if not is_helper:
        yield f"it reads: {reads_in_words(spec.data, own=settings.data)}"
    yield from _takes(folder, settings, spec, hardware, devices, is_helper=is_helper)
    if not is_helper:
        kind = devices[0].partition(":")[0] if devices else "cpu"
        ours = expected_a_day(status, kind=kind, limits=settings.limits)
        num_ranks, has_rounds = max(1, len(devices)), run.committed_round > 0
        words = _day_in_words(
            ours, num_ranks=num_ranks, kind=kind, has_rounds=has_rounds, counted=spec.counted
        )
        yield f"a day, as members here do: {words}"
    limits = (
        "max_upload, max_disk"
        if is_helper
        else "hours, only_idle, on_battery, load, max_upload, max_disk"
    )
    yield f"limits that you may set: {limits} in {folder / 'node.toml'}"
    options = [] if is_helper else start_options(settings, spec)
    yield from _comes_first(spec, run.committed_round, is_helper=is_helper)
    yield from next_lines(command, options)


def next_lines(command: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    """What to type next: with a training loop of one's own too, where a node that trains needs more."""
    if options and "--loop" not in options:
        yield (
            "next, with a training loop of your own, which needs nothing of that: "
            + shlex.join([*command, "--loop"])
        )
        yield f"next, where the node trains itself: {shlex.join([*command, *options])}"
    else:
        yield f"next: {shlex.join([*command, *options])}"


def what_is_over(status: status_pb2.GetStatusResponse) -> Iterator[str]:
    """What starting comes to where the run is finished; nothing while it goes on."""
    if status.run.phase != status_pb2.RUN_PHASE_FINISHED:
        return
    held = any(
        is_present(node) and node.heartbeat.outer_round >= status.run.committed_round
        for node in status.nodes
    )
    comes_to = (
        "a node that starts now takes its final state from one that is here, and ends"
        if held
        else "no member is here that holds its final state, so a node that starts now ends at once; 'atoll "
        "export OUT' gets the model, typed where a node has taken part"
    )
    yield f"the run is finished: {comes_to}; 'atoll run extend', typed by the run owner, opens it again"


def other_software(ours: str, status: status_pb2.GetStatusResponse) -> Iterator[str]:
    """That members compute with other versions than this machine would."""
    ranks = [node for node in status.nodes if is_present(node) and node.device != OWN_LOOP]
    members = sorted(ranks, key=lambda node: node.node_name)
    others = [n for n in members if n.heartbeat.software not in ("", ours)]
    if not others or any(n.heartbeat.software == ours for n in members):
        return
    yield (
        f"versions: {ours} here, and {others[0].heartbeat.software} on {others[0].node_name}: what is "
        "computed of the same samples may differ, so install what members have"
    )


def _comes_first(spec: RunSpec, committed_round: int, *, is_helper: bool) -> Iterator[str]:
    """What of the run's state has to come from other members before this one takes part."""
    weights = console.bytes_in_words(WEIGHT_BYTES * spec.num_parameters)
    if committed_round:
        state = console.bytes_in_words(STATE_BYTES * spec.num_parameters)
        yield f"at its start it fetches the run's state from other members: {state}"
    elif spec.first_digest is not None and not is_helper:
        given = "FOLDER" if spec.model.source == "decoder" else "FILE"
        yield (
            f"the run begins with given weights: one member starts with --weights {given} as well, and the "
            f"others fetch them from it, {weights} each"
        )


def _takes(
    folder: Path,
    settings: NodeSettings,
    spec: RunSpec,
    hardware: Hardware,
    devices: Sequence[str],
    *,
    is_helper: bool,
) -> Iterator[str]:
    """What the run takes of the machine; and what 'atoll node start' would refuse."""
    num_ranks = 0 if is_helper else settings.ranks_here
    records = Records.of(
        folder, settings, spec, rules=spec, history=History(None), num_ranks=num_ranks
    )
    disk = (
        f"{console.bytes_in_words(sum(need.num_bytes for need in records.needs))} of disk, in time "
        f"{console.bytes_in_words(BESIDE_BYTES)} more for commits and logs"
    )
    if not is_helper and spec.data.source == "tokens" and not spec.data.private:
        disk += f", and {settings.data_cache} for tokens that are fetched"
    if is_helper:
        yield f"it takes: up to {disk}"
    else:
        memory, training = node_bytes(spec), "what training takes"
        if (of_rank := training_bytes(settings, spec, devices)) is not None:
            memory += system_bytes(settings, spec, devices, settings.mesh_shape)
            training = f"about {console.bytes_in_words(of_rank)} for each rank on {devices[0]}"
        yield f"it takes: {console.bytes_in_words(memory)} of memory beside {training}, and up to {disk}"
    checks: list[Callable[[], None]] = [records.require_room]
    if is_helper:
        checks.append(lambda: refuse_small_helper(spec, hardware))
    else:
        checks += what_a_start_checks(folder, settings, spec, hardware)
    for check in checks:
        try:
            check()
        except AtollError as error:
            yield f"before it can start: {error}"


def _in_words(devices: Sequence[str], hardware: Hardware) -> str:
    if not devices:
        return "devices that only torch can tell of"
    if devices[0] == "cpu" or not hardware.gpus:
        return f"{len(devices)} × {devices[0].partition(':')[0]}"
    return ", ".join(hardware.gpus[int(each.partition(":")[2])].name for each in devices)


def _day_in_words(
    ours: Expected, *, num_ranks: int, kind: str, has_rounds: bool, counted: str
) -> str:
    parts = []
    if ours.tokens is not None:
        parts.append(f"about {console.count_in_words(ours.tokens * num_ranks)} {counted}")
    else:
        parts.append(f"{counted} are not known, for no member trains on {kind} now")
    if ours.moved_bytes is not None:
        parts.append(f"about {console.bytes_in_words(ours.moved_bytes)} each way")
    elif has_rounds:
        parts.append("bytes are not known while nobody is here")
    else:
        parts.append("bytes are not known before the first round")
    return "; ".join(parts)
