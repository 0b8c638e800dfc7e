"""Asks the cloud's metadata service of this machine whether it is about to be taken away."""

import asyncio
import contextlib
import http.client
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import structlog

from node.machine.notices import (
    Cloud,
    CloudChoice,
    Leaving,
    Notice,
    aws_notice,
    azure_notice,
    cloud_of,
    gcp_notice,
    leaving_of,
)

log = structlog.get_logger()

ADDRESS = "169.254.169.254"
"""Where all three clouds answer their own machines; it is not routed."""

ADDRESS_VARIABLES: Mapping[Cloud, str] = {
    "aws": "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "gcp": "GCE_METADATA_HOST",
}
"""The clouds' own names for another address, which their tools heed as well."""

FIRMWARE = Path("/sys/class/dmi/id")
FIRMWARE_FILES = ("sys_vendor", "product_name", "bios_version", "bios_vendor", "chassis_asset_tag")

POLL_SECONDS = 3.0
ANSWER_SECONDS = 2.0
SILENT_SECONDS = 180.0
"""How long the service may not answer before that is told: Azure's first answer takes two minutes."""

_TOKEN_SECONDS = 21_600
_MOST_BYTES = 1 << 20
_OK, _UNAUTHORIZED, _NOT_FOUND = 200, 401, 404


class NoAnswerError(Exception):
    """The metadata service did not answer, or said what it should not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a metadata service said."""

    status: int
    body: str
    at: datetime  # by its clock: this machine's may be wrong


class Watched(Protocol):
    """One cloud's metadata service. Blocks for as long as `ANSWER_SECONDS` a question."""

    def notice(self) -> Notice | None:
        """What it says now. Raises NoAnswerError."""


class _Service:
    """HTTP to the metadata service, by no proxy, and following nobody elsewhere."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address if "//" in address else f"//{address}")
        self._host, self._port = parts.hostname or ADDRESS, parts.port or 80

    def ask(self, path: str, *, method: str = "GET", **headers: str) -> Answer:
        """Raises NoAnswerError. Underscores of header names are hyphens."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_SECONDS)
        try:
            connection.request(method, path, headers=named)
            response = connection.getresponse()
            body = response.read(_MOST_BYTES).decode(errors="replace")
            date = response.getheader("Date")
            at = parsedate_to_datetime(date) if date else datetime.now(UTC)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswerError(
                f"{self._host}:{self._port}: {error or type(error).__name__}"
            ) from error
        finally:
            connection.close()
        return Answer(status=response.status, body=body, at=at)

    def text(self, path: str, **headers: str) -> str:
        """The body of an answer that must be there. Raises NoAnswerError."""
        answer = self.ask(path, **headers)
        if answer.status != _OK:
            raise NoAnswerError(f"{self._host}:{self._port}{path}: status {answer.status}")
        return answer.body


class Aws:
    """Spot machines' interruption notices, two minutes ahead, by version 2 of the service (a token)."""

    def __init__(self, service: _Service) -> None:
        self._service = service
        self._token = ""

    def notice(self) -> Notice | None:
        """See Watched."""
        answer = self._action()
        if answer.status == _UNAUTHORIZED:  # the token has ended
            self._token = ""
            answer = self._action()
        if answer.status == _NOT_FOUND:
            return None
        if answer.status != _OK:
            raise NoAnswerError(f"spot/instance-action: status {answer.status}")
        with _understanding():
            return aws_notice(answer.body, now=answer.at)

    def _action(self) -> Answer:
        if not self._token:
            headers = {"X_aws_ec2_metadata_token_ttl_seconds": str(_TOKEN_SECONDS)}
            answer = self._service.ask("/latest/api/token", method="PUT", **headers)
            if answer.status != _OK:
                raise NoAnswerError(f"api/token: status {answer.status}")
            self._token = answer.body
        return self._service.ask(
            "/latest/meta-data/spot/instance-action", X_aws_ec2_metadata_token=self._token
        )


class Gcp:
    """Preemption and maintenance."""

    def __init__(self, service: _Service) -> None:
        self._service = service

    def notice(self) -> Notice | None:
        """See Watched."""
        preempted, maintenance = (
            self._service.text(f"/computeMetadata/v1/instance/{name}", Metadata_Flavor="Google")
            for name in ("preempted", "maintenance-event")
        )
        return gcp_notice(preempted=preempted, maintenance=maintenance)


class Azure:
    """Scheduled Events."""

    def __init__(self, service: _Service) -> None:
        self._service = service
        self._machine = ""

    def notice(self) -> Notice | None:
        """See Watched."""
        if not self._machine:
            self._machine = self._service.text(
                "/metadata/instance/compute/name?api-version=2021-02-01&format=text",
                Metadata="true",
            )
        answer = self._service.ask(
            "/metadata/scheduledevents?api-version=2020-07-01", Metadata="true"
        )
        if answer.status != _OK:
            raise NoAnswerError(f"scheduledevents: status {answer.status}")
        with _understanding():
            return azure_notice(answer.body, machine=self._machine, now=answer.at)


@contextlib.contextmanager
def _understanding() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, AttributeError) as error:
        raise NoAnswerError(f"it is not understood: {error}") from error


def cloud_here(choice: CloudChoice, firmware: Path = FIRMWARE) -> Cloud | None:
    """Whose notices to heed: the owner's word, or by the firmware, which needs no network."""
    if choice == "off":
        return None
    if choice != "auto":
        return choice
    told = {}
    for name in FIRMWARE_FILES:
        with contextlib.suppress(OSError):
            told[name] = (firmware / name).read_text(errors="replace").strip()
    return cloud_of(told)


def service_of(cloud: Cloud, address: str = "") -> Watched:
    """The cloud's metadata service, at its usual address unless another is given or set."""
    variable = ADDRESS_VARIABLES.get(cloud, "")
    service = _Service(address or os.environ.get(variable, "") or ADDRESS)
    match cloud:
        case "aws":
            return Aws(service)
        case "gcp":
            return Gcp(service)
        case "azure":
            return Azure(service)


@asynccontextmanager
async def heeding_notices(
    choice: CloudChoice, leave: Callable[[Leaving], None], *, every_seconds: float = POLL_SECONDS
) -> AsyncIterator[None]:
    """Within it, `leave` is called once, when the machine is about to be taken away."""
    cloud = cloud_here(choice)
    if cloud is None:
        yield
        return
    log.info(
        f"heeding the notices of {cloud}: this node leaves with its work before its machine goes"
    )
    task = asyncio.ensure_future(_watch(service_of(cloud), leave, every_seconds))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _watch(service: Watched, leave: Callable[[Leaving], None], every_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    answered_at, is_told = loop.time(), False
    while True:
        try:
            notice = await asyncio.to_thread(service.notice)
            answered_at, is_told = loop.time(), False
        except NoAnswerError as error:
            notice = None
            if not is_told and loop.time() - answered_at > SILENT_SECONDS:
                log.warning(
                    "no notices: the cloud's metadata service does not answer",
                    why=str(error),
                    next_step='in a container allow it one more hop, or set cloud = "off"',
                )
                is_told = True
        if notice is not None and (leaving := leaving_of(notice)) is not None:
            leave(leaving)
            return
        await asyncio.sleep(every_seconds)
