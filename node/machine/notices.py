"""What clouds say when they are about to take a machine away: which cloud, what it says, when to leave.

Pure: texts and times in, decisions with their reasons out. node.machine.metadata asks for the texts.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal

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
