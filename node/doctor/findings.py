"""What the doctor says: one finding for each thing that it looked at."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from protocol.errors import AtollError, ExitCode

Verdict = Literal["fine", "note", "advice", "wrong"]
"""A note is for who wants to know; advice makes things better; only what is wrong keeps a node from
its work, and decides on the exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at, and what to type when it could be better."""

    about: str
    verdict: Verdict
    what: str
    next_step: str = ""
    exit_code: ExitCode = ExitCode.OK


def wrong(about: str, error: AtollError) -> Finding:
    """What the node's own check refuses, as `atoll node start` would tell it."""
    return Finding(
        about=about,
        verdict="wrong",
        what=error.what,
        next_step=error.next_step,
        exit_code=error.exit_code,
    )


def exit_code_of(findings: Sequence[Finding]) -> ExitCode:
    """That of the first thing that is wrong."""
    return next((found.exit_code for found in findings if found.verdict == "wrong"), ExitCode.OK)
