"""coordinator.toml: where a coordinator listens, and what it is told besides the run file."""

import json
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, ValidationError, field_validator

from protocol.errors import ConfigError, UsageError
from protocol.files.durable import read_toml
from protocol.run.models import Section, nearest_key
from protocol.run.run_files import WHEN_MISSING
from protocol.terminal.console import seconds_of, web_address_of

DEFAULT_CONTROL_PORT = 7700
DEFAULT_ENROLMENT_PORT = 7701
DEFAULT_DASHBOARD = "127.0.0.1:7702"

CONFIG_FILE = "coordinator.toml"

MOST_PORT = 65535

Port = Annotated[int, Field(ge=0, le=MOST_PORT)]
Host = Annotated[str, Field(min_length=1, max_length=253)]


def _checked_web_address(text: str) -> str:
    if text:
        web_address_of(text)
    return text


WebAddress = Annotated[str, AfterValidator(_checked_web_address)]


def _checked_span(text: str) -> str:
    seconds = seconds_of(text)
    if seconds is None or seconds < 1:
        raise ValueError("not a time span of a second or more, such as 90s or 10m")
    return text


Span = Annotated[str, AfterValidator(_checked_span)]


class CoordinatorConfig(Section):
    """coordinator.toml: where the coordinator listens, and the host that invites send nodes to.

    `dashboard` is where it serves pages, `backup` where copies of the run go; empty: nowhere.
    `connections_per_address` bounds what strangers hold at each port (coordinator.ports).
    """

    host: Host = "0.0.0.0"
    control_port: Port = DEFAULT_CONTROL_PORT
    enrolment_port: Port = DEFAULT_ENROLMENT_PORT
    advertise: Host = "127.0.0.1"
    dashboard: WebAddress = DEFAULT_DASHBOARD
    connections_per_address: int = Field(default=64, ge=4, le=100_000)
    backup: str = ""
    backup_every: Span = "10m"
    backup_keep: Annotated[int, Field(ge=1)] = 24

    @classmethod
    def checked(cls, **values: str | int | None) -> Self:
        """From a command line: None means the default. Raises UsageError for what cannot be."""
        try:
            return cls.model_validate({k: v for k, v in values.items() if v is not None})
        except ValidationError as error:
            raise UsageError(_first_problem(error), next_step="choose another value") from error

    @field_validator("advertise")
    @classmethod
    def _is_a_host_alone(cls, advertise: str) -> str:
        host = advertise.partition("://")[2] or advertise
        host = host.partition("/")[0]
        name, _, port = host.rpartition(":")
        if port.isdecimal() and (":" not in name or name.endswith("]")):
            host = name
        host = host.removeprefix("[").removesuffix("]")
        if host != advertise:
            raise ValueError(
                f"not a host alone; leave out scheme, port and path: {host!r} (the ports are "
                "control_port and enrolment_port)"
            )
        return advertise

    @classmethod
    def new(
        cls, *, host: str, control_port: int | None, enrolment_port: int | None, advertise: str
    ) -> Self:
        """A new run's: its ports follow one another, so that runs with ports of their own share none.

        Raises UsageError.
        """
        if enrolment_port is None and control_port is not None:
            if control_port == MOST_PORT:
                raise UsageError(
                    f"--port {control_port} leaves no port after it for joining",
                    next_step="choose another, or name both: --port and --enrolment-port",
                )
            enrolment_port = control_port and control_port + 1
        made = cls.checked(
            host=host,
            control_port=control_port,
            enrolment_port=enrolment_port,
            advertise=advertise,
        )
        return made.with_changes(dashboard=made._usual_dashboard)

    @property
    def _usual_dashboard(self) -> str:
        beside = max(self.control_port, self.enrolment_port) + 1
        is_port = 1 < beside <= MOST_PORT
        return f"127.0.0.1:{beside}" if is_port else DEFAULT_DASHBOARD

    @property
    def has_usual_dashboard(self) -> bool:
        """Whether nobody has asked for its address: where it is taken, the next that is free does as well."""
        return self.dashboard in {DEFAULT_DASHBOARD, self._usual_dashboard}

    @property
    def has_one_port(self) -> bool:
        """Whether members and who joins come by the same port."""
        return self.control_port == self.enrolment_port != 0

    def with_changes(self, **values: str | int | None) -> Self:
        """The same, but for the values that are not None."""
        changes = {k: v for k, v in values.items() if v is not None}
        return self.checked(**(self.model_dump() | changes))

    def to_toml(self) -> str:
        """The file's text."""
        return (
            "# Where the coordinator listens. Port 0 lets the system choose one at every start.\n"
            f"host = {json.dumps(self.host)}\n"
            f"control_port = {self.control_port}      # nodes and queries: mutual TLS\n"
            f"enrolment_port = {self.enrolment_port}    # 'atoll join': TLS and an invite\n"
            f"advertise = {json.dumps(self.advertise)}  # the host that invites send nodes to\n"
            f'dashboard = {json.dumps(self.dashboard)}  # page and /metrics; "": none\n'
            f"connections_per_address = {self.connections_per_address}  # of machines that have not called "
            "as members yet\n"
            f"backup = {json.dumps(self.backup)}              # where copies of the run go, a folder or s3://…\n"
            f"backup_every = {json.dumps(self.backup_every)}     # how often\n"
            f"backup_keep = {self.backup_keep}          # how many stay\n"
        )


def local_host(host: str) -> str:
    """How commands on this machine reach a coordinator that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def advertised_host(host: str) -> str:
    """The host that invites name when nobody says otherwise: this machine, as others see it."""
    if local_host(host) == host:
        return host
    # No packet is sent: connecting a datagram socket only asks for the route out.
    ways = [(socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")]
    for family, elsewhere in reversed(ways) if host == "::" else ways:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
    return socket.gethostname()


def load_config(path: Path) -> CoordinatorConfig:
    """Reads the file; raises ConfigError for a wrong key or value, and NoInputError where it is missing."""
    values = read_toml(path, when_missing=WHEN_MISSING)
    try:
        return CoordinatorConfig.model_validate(values)
    except ValidationError as error:
        known = ", ".join(CoordinatorConfig.model_fields)
        raise ConfigError(
            f"{path}: {_first_problem(error)}", next_step=f"correct it; the keys are {known}"
        ) from error


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown key{nearest_key(key, CoordinatorConfig)}"
    message = problem["msg"].removeprefix("Value error, ")  # what pydantic says before ours
    if not key:  # of several keys together
        return message
    return f"{key} = {problem['input']!r}: {message[0].lower()}{message[1:]}"
