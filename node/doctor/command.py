"""`atoll node doctor`: looks at everything, one thing after the other, and says what it found."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from node.config import NodeSettings, load_settings
from node.doctor import checks
from node.doctor.network import (
    ABOUT_NETWORK,
    Finding,
    exit_code_of,
    kernel_findings,
    what_to_use,
    wrong,
)
from protocol.errors import AtollError
from protocol.terminal import console

_INDENT = 8  # as wide as the longest verdict and two spaces


def examined(folder: Path) -> Iterator[Finding]:
    """All findings, as they are made; the last says what this network needs.

    Defaults stand in for settings that cannot be read.
    """
    is_helper = checks.is_helpers(folder)
    yield from checks.version_findings(checks.HELPERS if is_helper else checks.PROGRAMS)
    try:
        settings = load_settings(folder)
        num_ranks = 0 if is_helper else settings.ranks_here
    except AtollError as error:
        yield wrong("settings", error)
        settings, num_ranks = NodeSettings(name="node"), 1
    if not is_helper:
        yield from checks.device_findings(settings)
    yield from checks.open_files_findings(num_ranks)
    yield from checks.disk_findings(folder, settings, num_ranks)
    network = checks.network_here(folder, settings)
    yield from checks.coordinator_findings(folder, network=network)
    yield from checks.proxy_findings(folder)
    yield from checks.notices_findings(settings)
    yield from checks.port_findings(folder, settings)
    yield from checks.address_findings(folder, settings)
    yield from checks.libp2p_findings(folder, settings, network=network)
    yield from kernel_findings()
    yield what_to_use(network)


def run_doctor(folder: Path, *, is_json: bool) -> int:
    """Prints what was found; returns the exit code."""
    findings = []
    for finding in examined(folder):
        findings.append(finding)
        if not is_json and finding.about != ABOUT_NETWORK:
            _say(finding)
    if is_json:
        console.print_json([as_json(finding) for finding in findings])
    else:
        click.echo(summary_of(findings))
        _say(findings[-1])  # what the network needs has the last word
    return exit_code_of(findings)


def _say(finding: Finding) -> None:
    click.echo(line_of(finding))
    if finding.next_step and finding.verdict != "fine":
        click.echo(f"{'':{_INDENT}}next: {finding.next_step}")


def line_of(finding: Finding) -> str:
    """One finding without what to do about it."""
    return f"{finding.verdict:{_INDENT}}{finding.about}: {finding.what}"


def summary_of(findings: Sequence[Finding]) -> str:
    """The last line."""
    counts = Counter(finding.verdict for finding in findings)
    if counts["wrong"]:
        return f"{counts['wrong']} of {len(findings)} things are wrong"
    if counts["advice"]:
        return f"nothing is wrong; {counts['advice']} things could be better"
    return "nothing is wrong"


def as_json(finding: Finding) -> dict[str, object]:
    """A finding for programs."""
    return {
        "about": finding.about,
        "verdict": finding.verdict,
        "what": finding.what,
        "next_step": finding.next_step,
        "exit_code": int(finding.exit_code),
    }
