"""A node's folder and its settings: what a contributor may change about their own machine."""

import errno
import ipaddress
import json
import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import structlog
from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from node.disk.round_folder import DiskBudget, Retention
from node.island.data.places import DataPlaces
from node.island.parallel.mesh_shape import (
    Accumulating,
    LocalTraining,
    MeshShape,
    Precision,
    Recomputing,
    ScheduleName,
)
from node.machine.limits import Limits, hours_of
from node.machine.notices import CloudChoice
from protocol.errors import (
    AtollError,
    ConfigError,
    NoInputError,
    NotPermittedError,
    SystemRefusedError,
    UsageError,
)
from protocol.files.durable import expanded, read_toml, write_atomically
from protocol.run.models import Section, nearest_key
from protocol.terminal.console import bits_per_second_of, web_address_of
from protocol.trust.credentials import COORDINATOR_FILE, IDENTITY_FILE, LINK_FILE, Credentials
from protocol.trust.invite import endpoint_of
from protocol.trust.pki import Role

SETTINGS_FILE = "node.toml"
SNAPSHOTS_FOLDER = "snapshots"
HISTORY_FILE = "history"
RULINGS_FILE = "rulings"
SENT_FILE = "sent"
DATA_CACHE_FOLDER = "data-cache"


def has_snapshots(folder: Path) -> bool:
    """Whether a node's folder holds anything of the run's state: then it goes on from that."""
    return any((folder / SNAPSHOTS_FOLDER).glob("*"))


TEMPLATE = (resources.files("node") / "node_template.toml").read_text(encoding="utf-8")
"""What a new folder has."""

OF_HELPERS = frozenset(
    {"name", "max_disk", "max_disk_writes", "listen", "port", "announce", "max_upload", "metrics"}
    | {"interface"}
    | {"ask_router", "carry", "drain_within", "cloud"}
)
"""The settings that mean something to a helper."""

SLOWEST_UPLOAD_BYTES_PER_SECOND = 32_000.0
"""256 kbit/s. With less, several transfers at once are slower than peers wait for."""


def bytes_per_second_of(rate: str) -> float | None:
    """What a rate such as "10mbit" or "1.25MB/s" is; None for the empty text: no limit.

    Raises PydanticCustomError. A rate such as "10mb" is refused, as it may mean either.
    """
    if not rate:
        return None
    bits_per_second = bits_per_second_of(rate)
    if bits_per_second is None:
        raise PydanticCustomError(
            "rate", "Write bits a second as 10mbit, or bytes a second as 1.25MB/s"
        )
    bytes_per_second = bits_per_second / 8
    if bytes_per_second < SLOWEST_UPLOAD_BYTES_PER_SECOND:
        raise PydanticCustomError("rate", "Less than 256kbit is too slow to take part")
    return bytes_per_second


LEAST_CACHE_BYTES = 256 * 10**6
"""Batches draw from many pieces of 16 MiB: with fewer of them here each is fetched again and again."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(MB|GB|TB)")


def bytes_of(size: str) -> int:
    """What a size such as "500MB" or "1.5TB" is. Raises PydanticCustomError."""
    match = _SIZE.fullmatch(size)
    if match is None:
        raise PydanticCustomError("size", "Write a size as 500MB, 20GB or 1.5TB")
    return round(float(match[1]) * {"MB": 10**6, "GB": 10**9, "TB": 10**12}[match[2]])


def _cache_size(text: str) -> str:
    if bytes_of(text) < LEAST_CACHE_BYTES:
        raise PydanticCustomError("size", "Less than 256MB holds too few pieces of the data")
    return text


def _size_or_none(text: str) -> str:
    if text:
        bytes_of(text)
    return text


def _disk_rate(text: str) -> str:
    if not bits_per_second_of(text):
        raise PydanticCustomError("rate", "Write bytes a second as 40MB/s")
    return text


def _rate(text: str) -> str:
    bytes_per_second_of(text)
    return text


_LISTEN_ADDRESS = re.compile(r"((?:[0-9]{1,3}\.){3}[0-9]{1,3}):([0-9]{1,5})")


def _listen_address(text: str) -> str:
    if text and _LISTEN_ADDRESS.fullmatch(text) is None:
        raise PydanticCustomError("listen", "Write an IPv4 address and a port, as 10.0.0.1:7720")
    return text


def _hours(text: str) -> str:
    try:
        hours_of(text)
    except ValueError as error:
        raise PydanticCustomError(
            "hours", "Write hours as 22:00-07:00, or several with commas"
        ) from error
    return text


def _pages_address(text: str) -> str:
    try:
        if text:
            web_address_of(text)
    except ValueError as error:
        raise PydanticCustomError("metrics", "Write HOST:PORT, as 127.0.0.1:9101") from error
    return text


MOST_NAME_CHARACTERS = 64

RankCount = Annotated[int, Field(ge=1, le=64)]


class NodeSettings(Section):
    """node.toml."""

    name: Annotated[str, Field(min_length=1, max_length=MOST_NAME_CHARACTERS)]
    device: str = "auto"
    ranks: RankCount = 1
    mesh: Literal["sizes", "auto"] = "sizes"
    replicate: RankCount = 1
    shard: RankCount = 1
    tp: RankCount = 1
    pp: RankCount = 1
    cp: RankCount = 1
    hosts: RankCount = 1
    island_listen: Annotated[str, AfterValidator(_listen_address)] = ""
    zero: Annotated[int, Field(ge=1, le=3)] = 3
    schedule: ScheduleName = "1f1b"
    microbatches: Annotated[int, Field(ge=0, le=1024)] = 0
    offload: bool = False
    micro_batch: Annotated[int, Field(ge=0, lt=2**31)] = 0
    accumulate: Accumulating = "sharded"
    precision: Precision = "auto"
    activation_checkpointing: Recomputing = "none"
    compile: bool | Literal["auto"] = "auto"
    deterministic: bool = False
    data: str = ""
    may_read: Annotated[tuple[str, ...], Field(strict=False)] = ()  # TOML gives lists
    data_cache: Annotated[str, AfterValidator(_cache_size)] = "20GB"
    serve_data: bool = True
    allow_functions: Annotated[tuple[str, ...], Field(strict=False)] = ()  # TOML gives lists
    code: str = ""
    base: str = ""
    checkpoint_every_rounds: Annotated[int, Field(ge=0, lt=2**31)] = 10
    keep_snapshots: Annotated[int, Field(ge=0, le=10_000)] = 2
    keep_every: Annotated[int, Field(ge=1, lt=2**31)] = 8
    max_disk: Annotated[str, AfterValidator(_size_or_none)] = ""
    max_disk_writes: Annotated[str, AfterValidator(_disk_rate)] = "40MB/s"
    hang_seconds: Annotated[float, Field(ge=0, le=7 * 86400)] = 120.0
    loop: bool = False
    listen: str = ""
    port: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    announce: str = ""
    interface: Annotated[str, Field(max_length=15)] = ""  # as Linux names them
    ask_router: bool = True
    max_upload: Annotated[str, AfterValidator(_rate)] = ""
    carry: Annotated[float, Field(ge=0, le=1)] = 0.5
    hours: Annotated[str, AfterValidator(_hours)] = ""
    on_battery: bool = True
    only_idle: bool = False
    load: Annotated[float, Field(ge=0.1, le=1)] = 1.0
    metrics: Annotated[str, AfterValidator(_pages_address)] = ""
    drain_within: Annotated[float, Field(ge=0, le=86400)] = 30.0
    cloud: CloudChoice = "auto"
    weights: str = ""

    @property
    def mesh_shape(self) -> MeshShape:
        """The mesh of the sizes given; ranks alone are copies. Raises ConfigError."""
        shape = MeshShape(
            replicate=self.replicate,
            shard=self.shard,
            tensor=self.tp,
            pipeline=self.pp,
            context=self.cp,
            zero=self.zero,
            schedule=self.schedule,
            num_microbatches=self.microbatches,
            has_offload=self.offload,
        )
        if self.mesh == "auto" and shape != MeshShape():
            raise ConfigError(
                f'mesh = "auto" picks the sizes, and {shape} is asked for',
                next_step='remove the sizes, or set mesh = "sizes"',
            )
        if shape.num_ranks == 1:
            return replace(shape, replicate=self.ranks)
        if self.ranks not in (1, shape.num_ranks):
            raise ConfigError(
                f"ranks = {self.ranks}, but the mesh {shape} has {shape.num_ranks}",
                next_step="leave ranks out, or make the sizes' product equal to it",
            )
        return shape

    @property
    def ranks_here(self) -> int:
        """Ranks of the mesh that are on this machine. Raises ConfigError."""
        if self.loop:
            self._check_loop()
            return 1
        num_ranks = self.mesh_shape.num_ranks
        if self.hosts == 1:
            return num_ranks
        if self.mesh == "auto":
            raise ConfigError(
                f'mesh = "auto" knows one machine, and hosts = {self.hosts}',
                next_step="give the sizes, such as --shard 16",
            )
        if num_ranks % self.hosts:
            raise ConfigError(
                f"hosts = {self.hosts} cannot share {num_ranks} ranks evenly",
                next_step="make the product of the sizes a multiple of hosts",
            )
        if not self.island_listen:
            raise ConfigError(
                f"hosts = {self.hosts}, and nobody can follow without an address",
                next_step="set island_listen to this machine's, as: --island-listen 10.0.0.1:7720",
            )
        return num_ranks // self.hosts

    def _check_loop(self) -> None:
        """Raises ConfigError where ranks are asked for beside a loop of one's own."""
        if self.mesh != "sizes" or self.hosts != 1 or self.mesh_shape.num_ranks != 1:
            raise ConfigError(
                "loop = true leaves training to a program of your own, and ranks are asked for as well",
                next_step="remove ranks, the mesh and hosts from node.toml, or loop = true; the program "
                "chooses its own ranks, with torchrun",
            )
        if self.load != 1:
            raise ConfigError(
                f"load = {self.load} has no effect on a program of your own, and loop = true",
                next_step="remove load from node.toml, and let the program rest between its steps",
            )

    @property
    def island_address(self) -> tuple[str, int]:
        """Where other hosts find this one."""
        host, _, port = self.island_listen.partition(":")
        return host, int(port)

    def listen_addresses(self, coordinator_host: str, *, has_ipv6: bool) -> tuple[str, ...]:
        """Where peers connect to: loopback for a coordinator there, every interface otherwise."""
        if self.listen:
            return (self.listen,)
        if is_loopback(coordinator_host) and not self.interface:
            return ("::1" if ":" in coordinator_host else "127.0.0.1",)
        return ("0.0.0.0", "::") if has_ipv6 else ("0.0.0.0",)

    def require_interface(self) -> None:
        """Raises ConfigError where the named interface decides nothing, SystemRefusedError without it."""
        named = "listen" if self.listen else "announce" if self.announce else ""
        if self.interface and named:
            raise ConfigError(
                f"interface = {self.interface!r}, and {named} = {self.listen or self.announce!r} decides "
                "what peers are told",
                next_step=f"remove interface or {named} from node.toml, or from the command",
            )
        if self.interface:
            from node.machine.addresses import interface_addresses, require_interface

            require_interface(self.interface, interface_addresses())

    def require_port(self, coordinator_host: str, coordinator_ports: Collection[int] = ()) -> None:
        """Raises SystemRefusedError where nobody can listen where peers are to connect to.

        So where the coordinator, or the relay that carries it, has that very address and port: whoever dials
        the one would get the other.
        """
        from node.machine.addresses import has_ipv6

        listening = self.listen_addresses(coordinator_host, has_ipv6=has_ipv6())
        if self.port and self.port in coordinator_ports:
            self._refuse_the_coordinators(coordinator_host, listening)
        for address in listening:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                socket.create_server((address, self.port), family=family).close()
            except OSError as error:
                raise SystemRefusedError(
                    f"nobody can listen on {address} port {self.port}: {os.strerror(error.errno or 0)}",
                    next_step="let everybody have it: 'sudo sysctl -w "
                    f"net.ipv4.ip_unprivileged_port_start={self.port}'"
                    if error.errno == errno.EACCES
                    else "choose another --listen or --port, or stop what listens there",
                ) from error

    def _refuse_the_coordinators(self, host: str, listening: Sequence[str]) -> None:
        from node.machine.addresses import own_among

        here = own_among(host)
        is_same = self.announce.lower() == host.lower() if self.announce else bool(here)
        if is_same and (self.announce or here & {*listening} or "0.0.0.0" in listening):
            raise SystemRefusedError(
                f"{endpoint_of(host, self.port)} is the coordinator's, and peers that dial it get no member",
                next_step="start this one on a server with another address, or choose another --port",
            )

    def asks_router(self, coordinator_host: str) -> bool:
        """Whether a router is asked to forward the port."""
        return self.ask_router and self.punches(coordinator_host) and not self.announce

    def punches(self, coordinator_host: str) -> bool:
        """Whether it looks for ways through routers: where it listens on all interfaces of IPv4."""
        return "0.0.0.0" in self.listen_addresses(coordinator_host, has_ipv6=False)

    @property
    def max_upload_bytes_per_second(self) -> float | None:
        """None is no limit."""
        return bytes_per_second_of(self.max_upload)

    @property
    def limits(self) -> Limits:
        """When it may train."""
        return Limits(
            hours=hours_of(self.hours), on_battery=self.on_battery, only_idle=self.only_idle
        )

    @property
    def retention(self) -> Retention:
        """Which snapshots stay beside the newest."""
        return Retention(keep=self.keep_snapshots, every=self.keep_every)

    @property
    def disk_budget(self) -> DiskBudget:
        """Of all records of this node."""
        bits_per_second = bits_per_second_of(self.max_disk_writes)
        assert bits_per_second is not None, "it was checked when it was read"
        return DiskBudget(
            most_bytes=bytes_of(self.max_disk) if self.max_disk else None,
            bytes_per_second=bits_per_second / 8,
        )

    def data_places(self, *, home: Path, folder: Path) -> DataPlaces:
        """Where the data, the functions and the base of the run are; relative paths begin at `folder`."""
        return DataPlaces(
            folder=folder,
            own=self.data,
            may_read=tuple((folder / expanded(each)).absolute() for each in self.may_read),
            code=self.code_folder(folder),
            base=folder / expanded(self.base) if self.base else None,
            cache=home / DATA_CACHE_FOLDER,
            cache_bytes=bytes_of(self.data_cache),
        )

    def code_folder(self, folder: Path) -> Path | None:
        """Where functions of the run are; a relative path begins at `folder`."""
        return (folder / expanded(self.code)).resolve() if self.code else None

    @property
    def local_training(self) -> LocalTraining:
        """What the ranks are told of it; "auto" compiles nothing (see node.machine.placement)."""
        return LocalTraining(
            micro_batch=self.micro_batch,
            accumulate=self.accumulate,
            precision=self.precision,
            activation_checkpointing=self.activation_checkpointing,
            compile=self.compile is True,
            deterministic=self.deterministic,
            load=self.load,
        )


def is_loopback(host: str) -> bool:
    """Whether a host, a name or an address, is this machine to itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


Limit = str | float | bool


def check_limits(folder: Path, limits: Mapping[str, Limit]) -> None:
    """Raises UsageError for limits that 'atoll join' cannot write: wrong ones, or where a node.toml is."""
    load_settings(folder, **limits)
    if limits and (folder / SETTINGS_FILE).exists():
        options = ", ".join(f"--{key.replace('_', '-')}" for key in limits)
        raise UsageError(
            f"{options}: {folder / SETTINGS_FILE} is there already, and stays as it is",
            next_step="write limits there; its comments say how",
        )


def write_settings(
    folder: Path, *, name: str, is_helper: bool = False, limits: Mapping[str, Limit] | None = None
) -> None:
    """Writes a commented node.toml with these limits in it, unless the contributor has one already."""
    path = folder / SETTINGS_FILE
    if path.exists():
        return
    named = f"name = {json.dumps(name, ensure_ascii=False)}"
    text = (helper_template() if is_helper else TEMPLATE).replace('name = ""', named, 1)
    for key, value in (limits or {}).items():
        # A helper's has no line for what means nothing to it.
        line = f"{key} = {json.dumps(value)}".replace("\\", "\\\\")
        text = re.sub(rf"^{key} = .*$", line, text, count=1, flags=re.M)
    write_atomically(path, text.encode())


def helper_template() -> str:
    """Of the template what means something to a helper, which has neither ranks nor data."""
    head, *rest = TEMPLATE.split("\n\n")
    kept = [part for part in rest if OF_HELPERS.intersection(re.findall(r"^(\w+) =", part, re.M))]
    return (
        "\n\n".join([head.replace("atoll node start", "atoll helper start"), *kept]).rstrip() + "\n"
    )


def require_node_folder(folder: Path) -> None:
    """Raises NoInputError for a folder without a node's identity."""
    if (folder / IDENTITY_FILE).is_file():
        _refuse_viewers(folder)
        return
    if (folder / LINK_FILE).is_file() and (folder / SETTINGS_FILE).is_file():
        raise NoInputError(
            f"{folder / IDENTITY_FILE} is not there, the key by which the swarm knows this node",
            next_step="restore it from a backup; without it join again: "
            "'atoll join INVITE --dir NEWDIR'",
        )
    is_coordinators = (folder / COORDINATOR_FILE).is_file()
    what = "a coordinator's folder, not a node's" if is_coordinators else "not a node's folder"
    raise NoInputError(
        f"{folder} is {what}",
        next_step="choose a node's with --dir DIR, or make one with 'atoll join INVITE --dir DIR'",
    )


def _refuse_viewers(folder: Path) -> None:
    try:
        role = Credentials.load(folder).principal.role
    except AtollError:
        return  # whoever needs them says what is wrong
    if role is Role.VIEWER:
        raise NotPermittedError(
            f"{folder} is a viewer's folder: a viewer sees the status and takes no part",
            next_step="ask the run owner for an invite of a node, and join with it in another folder",
        )


def tell_missing_settings(folder: Path) -> None:
    """Says that limits which a contributor may have set are gone with the file that 'atoll join' wrote.

    Half of it is as good TOML as the whole, and only its last line tells: 'atoll join' ends each.
    """
    log, path = structlog.get_logger(), folder / SETTINGS_FILE
    if not path.is_file():
        log.warning(
            "the file with this node's settings is not there: defaults hold, without limits",
            path=str(path),
            next_step="restore it; docs/reference.md has the keys",
        )
    elif not path.read_bytes().endswith(b"\n"):
        log.warning(
            "this node's settings end within a line, as if cut off: limits behind it do not hold",
            path=str(path),
            next_step="see whether all that you set is in it, and end its last line",
        )


def load_settings(folder: Path, **overrides: Any) -> NodeSettings:
    """Reads node.toml; options of the command line that are not None come first.

    Raises UsageError for a wrong option, ConfigError for the first thing that is wrong in the file.
    """
    path = folder / SETTINGS_FILE
    values: dict[str, Any] = {"name": folder.resolve().name[:MOST_NAME_CHARACTERS] or "node"}
    if os.path.lexists(path):
        values |= read_toml(path, when_missing="join a swarm with 'atoll join INVITE'")
    options = {key: value for key, value in overrides.items() if value is not None}
    try:
        return NodeSettings.model_validate(values | options)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        message = f"{problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
        if key in options:
            typed = click.get_current_context(silent=True)
            command = "atoll node start" if typed is None else typed.command_path
            raise UsageError(
                f"--{key.replace('_', '-')} {message}", next_step=f"see '{command} --help'"
            ) from error
        known = ", ".join(NodeSettings.model_fields)
        raise ConfigError(
            f"{path}: {key}: unknown key{nearest_key(key, NodeSettings)}"
            if problem["type"] == "extra_forbidden"
            else f"{path}: {key} = {message}",
            next_step=f"correct it, or remove the line to take the default; the keys are {known}",
        ) from error
