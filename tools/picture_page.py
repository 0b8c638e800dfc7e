"""Draws docs/figures/page*.png and page.webp: the page of a real coordinator whose swarm of six is played.

    pip install pillow && PYTHONPATH=. python tools/picture_page.py [FOLDER]

One node becomes slow, another one's contributions are refused, one dies, and one joins: the recording shows
what the page says of each, and the pictures what it looks like afterwards, narrow and wide, light and dark.
It takes a minute, and wants Debian's chromium.
"""

import asyncio
import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.async_api import Page, async_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from coordinator.config import create_home  # noqa: E402
from tests.integration.coordinator_scene import LOCAL, described, invite_from, joined, serving  # noqa: E402
from tests.integration.played_swarm import Played, PlayedNode, played  # noqa: E402

RUN = """
[run]
name = "six-islands"
rounds = 100
min_nodes = 2
[deadlines]
lease = 8
[outer]
audit = 0
[evaluation]
every_rounds = 2
prompts = ["Once ", "The sea "]
"""
NAMES = ["attic", "campus", "cellar", "hut", "office", "shed"]
TRAIN_SECONDS = 0.8
LEFT_OUT = """
main > :not(#nodes, :has(#timeline), :has(#news)), .round:nth-child(n+3), #news li:nth-child(n+9) {
  display: none !important
}
"""
"""Of the page, in the recording: what needs no explanation in it."""
WIDTH, HEIGHT, SHOWN_WIDTH = 1300, 1320, 820
FRAME_SECONDS, FRAMES_AFTER = 0.4, 3
SHOWN_SECONDS = 0.7
PICTURES = (
    *(("page.png", 1920, 2300, "light"), ("page-dark.png", 1920, 2300, "dark")),
    *(("page-phone.png", 390, 2300, "light"), ("page-phone-dark.png", 390, 2300, "dark")),
)


class Recording:
    """Frames of a page, taken while one waits for what it says."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self.frames: list[Image.Image] = []

    async def shoot(self, count: int = 1) -> None:
        """Takes frames, a while apart."""
        for _ in range(count):
            picture = Image.open(io.BytesIO(await self._page.screenshot()))
            height = round(picture.height * SHOWN_WIDTH / WIDTH)
            self.frames.append(
                picture.convert("RGB").resize((SHOWN_WIDTH, height), Image.Resampling.LANCZOS)
            )
            await asyncio.sleep(FRAME_SECONDS)

    async def until(self, where: str, text: str) -> None:
        """Goes on until the page says it, and some frames more."""
        while not await self._page.locator(where, has_text=text).count():
            await self.shoot()
        await self.shoot(FRAMES_AFTER)


async def sees(page: Page, where: str, text: str) -> None:
    """Waits until the page says it."""
    await page.locator(where, has_text=text).first.wait_for()


async def play_and_draw(out: Path) -> None:
    """Plays the six, and writes all figures."""
    play = Played(
        train_seconds=TRAIN_SECONDS,
        writes="upon a time a lamp stood on the outermost rock, and whoever came home late at night "
        "looked for it first.",
    )
    with tempfile.TemporaryDirectory() as folder:
        home = create_home(
            Path(folder) / "home",
            config=LOCAL.with_changes(dashboard="127.0.0.1:0"),
            text=lambda building: described(building, RUN),
        )
        async with (
            serving(home) as coordinator,
            played(home, NAMES, play) as nodes,
            async_playwright() as running,
        ):
            browser = await running.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            link = f"http://127.0.0.1:{coordinator.dashboard_port}/"
            context = await browser.new_context(
                viewport={"width": WIDTH, "height": HEIGHT}, bypass_csp=True
            )
            page = await context.new_page()
            page.set_default_timeout(90_000)
            await page.goto(link)
            await page.add_style_tag(content=LEFT_OUT)
            await sees(page, "#news li", "Round 4 is committed")
            recording = Recording(page)
            await recording.until("#news li", "Round 6 is committed")
            nodes["campus"].pace = 3.0
            await recording.until("#timeline h3", "campus was last to train")
            nodes["campus"].pace = 1.0
            play.left_out.add(nodes["attic"].node.node_id)
            await recording.until("#news .warning", "attic: ")
            play.left_out.clear()
            await nodes["hut"].die()
            await recording.until("#news li", "hut has not been heard")
            invite, _ = await invite_from(home, uses=1)
            joiner = PlayedNode(await joined(invite, "barn"), play)
            await joiner.start()
            await recording.until("#news li", "barn is ready")
            await recording.shoot(2 * FRAMES_AFTER)
            save_recording(recording.frames, out / "page.webp")
            await page.close()
            for name, width, height, scheme in PICTURES:
                page = await browser.new_page(
                    viewport={"width": width, "height": height},
                    color_scheme=scheme,  # type: ignore[arg-type] # one of two words
                )
                await page.goto(link)
                await sees(page, "#news li", "barn is ready")
                await page.locator("#curve canvas").wait_for()
                picture = Image.open(io.BytesIO(await page.screenshot()))
                picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=256).save(
                    out / name, optimize=True
                )
                await page.close()
            await joiner.die()
            await browser.close()


def save_recording(frames: list[Image.Image], path: Path) -> None:
    """One picture that moves."""
    first, *others = frames
    first.save(
        path,
        save_all=True,
        append_images=others,
        duration=round(1000 * SHOWN_SECONDS),
        loop=0,
        method=6,
        quality=60,
    )
    print(f"{path}: {len(frames)} frames, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    asyncio.run(
        play_and_draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "figures")
    )
