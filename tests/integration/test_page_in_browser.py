"""The page in a real browser, of a real coordinator whose swarm is played: what people see."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coordinator.config import Home, create_home
from coordinator.dashboard.link import page_link
from tests.integration.coordinator_scene import LOCAL, described, invite_from, joined, serving
from tests.integration.played_swarm import Played, PlayedNode, played

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

playwright = pytest.importorskip("playwright.async_api", reason="the extra dev has it")

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    assert "ATOLL_NEEDS_BROWSER" not in os.environ, "no chromium is installed"
    pytest.skip("Debian's package chromium is not installed", allow_module_level=True)

PATIENCE_SECONDS = 60.0
RUN = """
[run]
name = "seen"
rounds = 400
min_nodes = 2
[deadlines]
lease = 4
[evaluation]
every_rounds = 2
prompts = ["Once ", "The sea"]
"""
HOSTILE = "<img src=x onerror=document.title='taken'>"[:60]

A_CROWD = """() => {
  const crowd = Array.from({ length: 60 }, (_, place) => ({
    id: `id-${10 + place}`, name: `contributor-at-home-${place}`, state: "ready", tone: "good",
    isHelper: false, workShare: 0, committed: "1", committedTokens: place < 20 ? 100 : 5 }));
  showBoard(crowd);
  showNodes({ nodes: crowd, moreNodes: 5 });
  const rows = [document.querySelectorAll("#node-rows tr").length, byId("more-nodes").textContent];
  byId("all-nodes").click();
  showNodes({ nodes: crowd, moreNodes: 5 });
  rows.push(document.querySelectorAll("#node-rows tr").length);
  byId("all-nodes").click();
  showMap({ nodes: crowd.slice(0, 24), run: { reach: "two do not" }, cutPairs: [["id-10", "id-11"]] });
  return {
    rows,
    board: [...document.querySelectorAll("#board li")].map((line) => line.textContent),
    named: [...document.querySelectorAll("#map text")].map((name) => name.textContent),
    marks: document.querySelectorAll("#map circle").length };
}"""
"""Drawn for a moment in the place of the three, as the page draws so many."""


def home_in(folder: Path, dashboard: str = "127.0.0.1:0") -> Home:
    config = LOCAL.with_changes(dashboard=dashboard)
    return create_home(folder, config=config, text=lambda building: described(building, RUN))


@asynccontextmanager
async def browser() -> AsyncIterator["Browser"]:
    async with playwright.async_playwright() as running:
        opened = await running.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield opened
        finally:
            await opened.close()


@asynccontextmanager
async def page_of(opened: "Browser", port: int) -> AsyncIterator[tuple["Page", list[str]]]:
    """A page, and what its console says against it; then it has to have said nothing."""
    page = await opened.new_page(viewport={"width": 1200, "height": 900})
    page.set_default_timeout(1000 * PATIENCE_SECONDS)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None,
    )
    await page.goto(f"http://127.0.0.1:{port}/")
    yield page, complaints
    await page.close()


async def sees(page: "Page", where: str, text: str) -> None:
    await page.locator(where, has_text=text).first.wait_for()


async def test_a_death_a_late_node_a_joiner_and_a_refused_contribution_are_seen_in_words(
    tmp_path: Path,
) -> None:
    home, play = home_in(tmp_path / "home"), Played(train_seconds=0.4, writes=HOSTILE + "\x1b[2J")
    async with serving(home) as coordinator, browser() as opened:
        port = coordinator.dashboard_port
        assert port is not None
        async with (
            played(home, ["attic", "campus", "hut"], play) as nodes,
            page_of(opened, port) as (page, complaints),
        ):
            await sees(page, "#sentence", "of 400; 3 of 3 nodes ready")
            await sees(page, "#news li", "is committed")
            await page.locator("#curve canvas").wait_for()
            assert await page.locator("#node-rows tr").count() == 3
            await sees(page, ".cards", "held-out loss")

            await sees(page, "#written p", f"Once {HOSTILE}\ufffd[2J")
            await sees(page, "#written p", "The seaand a second text")
            await sees(page, "#written h3", "after round 4")
            await page.get_by_role("button", name="show all that is kept").first.click()
            await sees(page, "#written h3", "after round 0")
            await sees(page, "#written h3", "after round 4")
            assert await page.title() != "taken"

            nodes["campus"].pace = 4.0
            await sees(page, "#timeline h3", "campus was last to train")

            play.left_out.add(nodes["attic"].node.node_id)
            await sees(page, "#news .warning", "attic: 3 of 3 contributions to round")
            await sees(page, "#node-rows tr[data-node=attic]", "left out of")
            play.left_out.clear()

            await nodes["hut"].die()
            await sees(page, "#news li", "hut has not been heard for longer than its lease")
            await sees(page, "#node-rows tr[data-node=hut] .bad", "lost")

            invite, _ = await invite_from(home, uses=1)
            joiner = PlayedNode(await joined(invite, HOSTILE), play)
            await joiner.start()
            await sees(page, "#news li", f"{HOSTILE} has come")
            await sees(page, "#node-rows", HOSTILE)
            assert await page.title() != "taken"

            drawn = await page.evaluate(A_CROWD)
            assert len(drawn["board"]) == 21
            assert drawn["board"][-1] == "and 40 more, who gave 9 % of the tokens"
            assert drawn["rows"] == [40, "and 25 more", 60]
            assert drawn["named"] == ["contributor-at-…"] * 2, (
                "the two that do not reach each other"
            )
            assert drawn["marks"] == 24

            for axis in ("tokens", "time", "rounds"):
                button = page.get_by_role("button", name=axis, exact=True)
                await button.focus()
                await page.keyboard.press("Enter")
                assert await button.get_attribute("aria-pressed") == "true"
            for width in (390, 1920):
                await page.set_viewport_size({"width": width, "height": 900})
                # Charts follow a frame later. A page on which one has to scroll sideways never comes to it.
                await page.wait_for_function(
                    "width => document.documentElement.scrollWidth <= width", arg=width
                )
            await joiner.die()
            assert complaints == []


async def test_a_page_that_is_left_open_goes_on_when_the_coordinator_comes_back(
    tmp_path: Path,
) -> None:
    home, play = home_in(tmp_path / "home"), Played(train_seconds=0.3)
    async with browser() as opened:
        async with serving(home) as coordinator:
            port = coordinator.dashboard_port
            assert port is not None
            page = await opened.new_page()
            page.set_default_timeout(1000 * PATIENCE_SECONDS)
            await page.goto(f"http://127.0.0.1:{port}/")
            async with played(home, ["attic", "campus"], play):
                await sees(page, "#news li", "Round 1 is committed")
        await sees(page, "#live", "the coordinator is away since")
        again = home_again(home, f"127.0.0.1:{port}")
        async with serving(again):
            await (
                page.locator("#live", has_text="live")
                .and_(page.locator("#live:not(.away)"))
                .wait_for()
            )
            await page.locator("#older").click()
            await sees(page, "#news li", "Round 1 is committed")
            await sees(page, "#news li", "attic is ready")


def home_again(home: Home, dashboard: str) -> Home:
    loaded = Home.load(home.directory)
    return replace(loaded, config=loaded.config.with_changes(dashboard=dashboard))


async def test_beyond_loopback_a_page_wants_the_token_of_its_link(tmp_path: Path) -> None:
    home = home_in(tmp_path / "home", "0.0.0.0:0")
    async with serving(home) as coordinator, browser() as opened:
        port = coordinator.dashboard_port
        assert port is not None
        page = await opened.new_page()
        refused = await page.goto(f"http://127.0.0.1:{port}/")
        assert refused is not None and refused.status == 403
        link = page_link(home.directory, home.config, port)
        await page.goto(link)
        await sees(page, "#sentence", "the run is waiting")
        assert "token" not in page.url
        assert (await asyncio.wait_for(page.reload(), PATIENCE_SECONDS)) is not None
        await sees(page, "#live", "live")
