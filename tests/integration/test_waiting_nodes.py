"""A node that is there before its coordinator, and one that looks for it, over real TLS."""

import asyncio
import random
import time
from pathlib import Path

import structlog

from coordinator.app import Coordinator
from node.doctor.checks import coordinator_findings
from node.link.calls import CoordinatorLink, run_of_coordinator
from protocol.errors import ExitCode
from protocol.trust.enrolment import enrol
from protocol.trust.identity import Identity
from protocol.v1.session_pb2_grpc import SessionServiceStub
from protocol.wire.channel import open_channel
from tests.integration.coordinator_scene import PATIENCE_SECONDS, invite_from, new_home, serving


async def test_a_node_waits_until_its_coordinator_has_started(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home):
        invite, _ = await invite_from(home)
        credentials = await enrol(invite, Identity.generate(), "early")
    config = home.config.model_copy(update={"control_port": credentials.control_port})
    with structlog.testing.capture_logs() as lines:
        async with open_channel(credentials) as channel, asyncio.timeout(PATIENCE_SECONDS):
            link = CoordinatorLink(SessionServiceStub(channel))
            waiting = asyncio.create_task(
                run_of_coordinator(link, waits=True, rng=random.Random(0))
            )
            while not any("why" in line for line in lines):  # noqa: ASYNC110 - logs set no event
                await asyncio.sleep(0.05)
            coordinator = await Coordinator.start(home, config)
            try:
                assert await waiting == home.run
            finally:
                await coordinator.stop()
    reasons = [line["why"] for line in lines if "why" in line]
    assert f"no coordinator answers at {credentials.endpoint}" in reasons[0]


async def test_the_doctor_asks_the_coordinator_for_its_clock(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home):
        invite, _ = await invite_from(home)
        credentials = await enrol(invite, Identity.generate(), "patient")
        credentials.save(tmp_path / "node")

        async def found(ahead_seconds: float) -> dict[str, str]:
            findings = await asyncio.to_thread(
                coordinator_findings, tmp_path / "node", lambda: time.time() + ahead_seconds
            )
            return {finding.about: finding.verdict for finding in findings}

        assert await found(0) == {"coordinator": "fine", "clock": "fine"}
        assert await found(-3600) == {"coordinator": "fine", "clock": "advice"}
    (away,) = await asyncio.to_thread(coordinator_findings, tmp_path / "node")
    assert (away.verdict, away.exit_code) == ("wrong", ExitCode.UNAVAILABLE)
