"""What clouds say when they are about to take a machine away: which cloud, what it says, when to leave.

Pure: texts and times in, decisions with their reasons out. node.machine.notices asks for the texts.
"""

import asyncio
import contextlib
import http.client
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import structlog

log = structlog.get_logger()

Cloud = Literal["aws", "gcp", "azure"]

CloudChoice = Literal["auto", "aws", "gcp", "azure", "off"]

GCP_PREEMPTED_SECONDS = 30.0
GCP_MAINTENANCE_SECONDS = 60.0
"""Google tells that it takes a machine, not when: these are the shortest times that it promises."""

LEAD_SECONDS = 120.0
"""A node trains on until so long before its machine is taken: as long as spot machines of AWS have."""

MARGIN_SECONDS = 5.0
MARGIN_SHARE = 0.1
"""Of the time left, for the last snapshot: the larger of both."""

_VENDORS: tuple[tuple[str, Cloud], ...] = (
    ("amazon", "aws"),
    ("google", "gcp"),
    ("7783-7084-3265-9085-8269-3286-77", "azure"),  # its machines' asset tag: Hyper-V's have none
)

_AZURE_TAKES = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""Its kinds of events that end what runs. A freeze of seconds is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A machine is about to be taken away."""

    what: str  # in words, with the cloud
    seconds_left: float  # 0 and more


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """What to do about a notice now."""

    within_seconds: float
    reason: str


def cloud_of(firmware: Mapping[str, str]) -> Cloud | None:
    """Whose machine it is by what its firmware says of itself (/sys/class/dmi/id); None: no cloud's."""
    told = " ".join(firmware.values()).lower()
    return next((cloud for word, cloud in _VENDORS if word in told), None)


def aws_notice(body: str, *, now: datetime) -> Notice | None:
    """Of `spot/instance-action`. Raises ValueError for what is no such document."""
    told = _object(body)
    action, text = told.get("action"), told.get("time")
    if not isinstance(action, str) or not isinstance(text, str):
        raise ValueError("no action and time")
    at = datetime.fromisoformat(text)
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return Notice(
        what=f"AWS is about to {action} this spot machine", seconds_left=_seconds(at, now)
    )


def gcp_notice(*, preempted: str, maintenance: str) -> Notice | None:
    """Of `instance/preempted` and `instance/maintenance-event`; a migration is no notice."""
    if preempted.strip().upper() == "TRUE":
        return Notice(what="Google is preempting this machine", seconds_left=GCP_PREEMPTED_SECONDS)
    if maintenance.strip().upper().startswith("TERMINATE"):
        return Notice(
            what="Google is about to stop this machine for maintenance",
            seconds_left=GCP_MAINTENANCE_SECONDS,
        )
    return None


def azure_notice(body: str, *, machine: str, now: datetime) -> Notice | None:
    """Of Scheduled Events, the first that takes this machine. Raises ValueError for another document.

    A document may tell of other machines of the same set.
    """
    events = _object(body).get("Events")
    if not isinstance(events, list):
        raise ValueError("no list of events")
    notices = []
    for event in events:
        kind = event.get("EventType")
        concerned = [str(name).lower() for name in event.get("Resources") or ()]
        if kind not in _AZURE_TAKES or machine.lower() not in concerned:
            continue
        not_before = event.get("NotBefore") or ""  # empty once it has begun
        left = _seconds(parsedate_to_datetime(not_before), now) if not_before else 0.0
        notices.append(
            Notice(what=f"Azure is about to {kind.lower()} this machine", seconds_left=left)
        )
    return min(notices, key=lambda notice: notice.seconds_left, default=None)


def leaving_of(notice: Notice) -> Leaving | None:
    """What to do now; None: train on, and look again."""
    left = notice.seconds_left
    if left > LEAD_SECONDS:
        return None
    within = max(0.0, left - max(MARGIN_SECONDS, MARGIN_SHARE * left))
    return Leaving(within_seconds=within, reason=f"{notice.what} in {left:.0f} s")


def _object(body: str) -> dict[str, Any]:
    told = json.loads(body)  # its error is a ValueError
    if not isinstance(told, dict):
        raise ValueError("no JSON object")
    return told


def _seconds(at: datetime, now: datetime) -> float:
    return max(0.0, (at - now).total_seconds())


# Asks the cloud's metadata service of this machine whether it is about to be taken away.


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
