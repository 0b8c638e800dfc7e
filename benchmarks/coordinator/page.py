"""The coordinator's page of a long run: how soon it opens, and what people who watch it cost.

    python -m benchmarks.coordinator.page --run 100000x8 --run 20000x1000 --results docs/results/page.jsonl

For each run `benchmarks.coordinator.long_run` writes the folder; a coordinator is started in it as people
start it, and simulated nodes attach over TLS and go on with its rounds. The page is opened as a
browser does, each file, the first picture and the curves, over HTTP on a connection each; and in chromium
where it is installed, until the curve is drawn. Then the coordinator's processor time is compared while
nobody watches and while ten do, in turns, each of them a reader of the server-sent events that asks for
the curves when the page would.
"""

import asyncio
import json
import resource
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.coordinator.command import AT_ONCE, LOCAL, CoordinatorProcess, make_home
from benchmarks.coordinator.long_run import write_long_run
from benchmarks.coordinator.nodes import SimulatedNode, Timings
from benchmarks.measurement import Rows, add_results, machine, markdown, parser_of
from coordinator.config import Home
from protocol.errors import TemporaryError, UnavailableError
from protocol.trust.credentials import Credentials
from protocol.trust.enrolment import enrol
from protocol.trust.identity import Identity

WATCHERS = 10

FILES = ("page.css", "uplot.css", "page.js", "uplot.js")
"""That the page's first answer names."""

PROMPTS = '[evaluation]\nevery_rounds = 10\nprompts = ["The sea ", "Once "]\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A run that is pretended, and how long it is looked at."""

    num_rounds: int
    num_nodes: int
    num_attached: int  # of them, which send heartbeats; the others are members that are not heard
    num_played: int  # through the core; of the rounds before rows are written
    round_seconds: float
    openings: int
    chromium: str | None  # the browser, where there is one
    turns: int  # of watching, and of not watching
    turn_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What came of it. Seconds and bytes, unless it says otherwise."""

    num_rounds: int
    num_nodes: int
    num_attached: int
    round_seconds: float
    start_seconds: float  # of the coordinator, with all that the run has left
    database_bytes: int
    first_open_seconds: float  # of the page, by the first who looks after a start
    first_open_cpu_seconds: float  # of the coordinator meanwhile, all else that it did included
    open_seconds: float  # median of the later ones
    chromium_seconds: float | None  # median until the curve is drawn; None: no chromium here
    open_bytes: int  # all that comes until the curve can be drawn
    picture_bytes: int  # that each reader gets of each instant, median
    history_bytes: int
    pictures_per_second: float  # to one of ten readers
    histories_per_minute: float  # that one of ten readers asks for
    core_share_unwatched: float  # of a core: the nodes' heartbeats and rounds
    core_share_watched: float  # the same with ten readers
    core_shares_unwatched: tuple[float, ...]  # of each turn
    core_shares_watched: tuple[float, ...]
    memory_bytes: int


@dataclass(slots=True)
class Seen:
    """What one reader has got."""

    picture_bytes: list[int] = field(default_factory=list)
    history_bytes: list[int] = field(default_factory=list)


async def fetched(port: int, path: str) -> bytes:
    """The body of one answer; raises RuntimeError for another status than 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET /{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise RuntimeError(f"/{path} was answered with {head[:80]!r}")
    return body


@asynccontextmanager
async def pictures(port: int) -> AsyncIterator[AsyncIterator[bytes]]:
    """The events of /live as they come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)

    async def events() -> AsyncIterator[bytes]:
        while line := await reader.readline():
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ")

    writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        yield events()
    finally:
        writer.close()


async def opened(port: int) -> tuple[float, int]:
    """Opens the page as a browser does; returns seconds, and bytes until the curve can be drawn."""
    began = time.monotonic()
    page = await fetched(port, "")
    files = await asyncio.gather(*(fetched(port, name) for name in FILES))
    async with pictures(port) as events:
        picture = await anext(events)
        curves = await fetched(port, "history")
    if not json.loads(curves)["rounds"]:
        raise RuntimeError("the history is empty")
    size = len(page) + sum(map(len, files)) + len(picture) + len(curves)
    return time.monotonic() - began, size


async def watch(port: int, seen: Seen) -> None:
    """Reads as the page's script does, until it is cancelled."""
    drawn = None
    async with pictures(port) as events:
        async for picture in events:
            seen.picture_bytes.append(len(picture))
            told = json.loads(picture)["curves"]
            if told != drawn:
                drawn = told
                seen.history_bytes.append(len(await fetched(port, "history")))


async def opened_in_chromium(port: int, chromium: str, times: int) -> float:
    """Median seconds until the browser has drawn the curve and a row of a node."""
    from playwright.async_api import async_playwright

    seconds = []
    async with async_playwright() as running:
        browser = await running.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        for _ in range(times):
            page = await browser.new_page(viewport={"width": 1280, "height": 900})
            began = time.monotonic()
            await page.goto(f"http://127.0.0.1:{port}/")
            await page.locator("#curve canvas").wait_for()
            await page.locator("#node-rows tr").first.wait_for()
            seconds.append(time.monotonic() - began)
            await page.close()
        await browser.close()
    return statistics.median(seconds)


async def enrolled(folder: Path, asked: Asked) -> list[SimulatedNode]:
    """Nodes of the run, which a coordinator in its folder has let in; it is ended then."""
    coordinator = await asyncio.to_thread(CoordinatorProcess, folder)
    places, timings = asyncio.Semaphore(AT_ONCE), Timings()
    try:
        invite = await asyncio.to_thread(coordinator.invite, asked.num_attached)

        async def made(number: int) -> tuple[Identity, Credentials, str]:
            async with places:
                identity, name = Identity.generate(), f"node-{number}"
                while True:  # as people do whose coordinator is busy
                    with suppress(UnavailableError, TemporaryError):
                        return identity, await enrol(invite, identity, name), name

        parts = await asyncio.gather(*map(made, range(asked.num_attached)))
    finally:
        await asyncio.to_thread(coordinator.stop)
    return [
        SimulatedNode(
            identity=identity,
            credentials=credentials,
            name=name,
            timings=timings,
            outer_round=asked.num_rounds,
            train_seconds=asked.round_seconds,
        )
        for identity, credentials, name in parts
    ]


async def measured(folder: Path, asked: Asked) -> Measured:
    """Writes the run, starts its coordinator and its nodes, and looks at its page."""
    make_home(
        folder,
        num_nodes=asked.num_nodes,
        num_rounds=asked.num_rounds + 10_000,
        config=LOCAL.with_changes(dashboard="127.0.0.1:0", control_port=_free_port()),
        more=PROMPTS,
    )
    nodes = await enrolled(folder, asked)
    home = Home.load(folder)
    await asyncio.to_thread(
        write_long_run,
        home,
        [
            *((node.node_id, node.name) for node in nodes),
            *(
                (Identity.generate().node_id, f"node-{number}")
                for number in range(asked.num_attached, asked.num_nodes)
            ),
        ],
        num_rounds=asked.num_rounds,
        num_played=asked.num_played,
        round_seconds=asked.round_seconds,
    )
    began = time.monotonic()
    coordinator = await asyncio.to_thread(CoordinatorProcess, folder)
    start_seconds = time.monotonic() - began
    port = await asyncio.to_thread(coordinator.page_port)
    running: list[asyncio.Task[None]] = []
    places = asyncio.Semaphore(AT_ONCE)

    async def attach(node: SimulatedNode) -> None:
        async with places:
            while not node.attached.is_set():  # as nodes do whose coordinator is busy
                with suppress(UnavailableError, TemporaryError):
                    await node.attach()
        running.append(asyncio.create_task(node.run()))

    try:
        await asyncio.gather(*map(attach, nodes))
        cpu_before = coordinator.cpu_seconds()
        first_open_seconds, open_bytes = await opened(port)
        first_open_cpu_seconds = coordinator.cpu_seconds() - cpu_before
        openings = [(await opened(port))[0] for _ in range(asked.openings)]
        chromium_seconds = None
        if asked.chromium is not None:
            chromium_seconds = await opened_in_chromium(port, asked.chromium, asked.openings)
        shares: dict[int, list[float]] = {0: [], WATCHERS: []}
        seen = [Seen() for _ in range(WATCHERS)]
        for _ in range(asked.turns):
            for watchers, found in shares.items():
                found.append(await _core_share(coordinator, port, seen[:watchers], asked))
        watched_seconds = asked.turns * asked.turn_seconds
        return Measured(
            num_rounds=asked.num_rounds,
            num_nodes=asked.num_nodes,
            num_attached=asked.num_attached,
            round_seconds=asked.round_seconds,
            start_seconds=start_seconds,
            database_bytes=coordinator.database_bytes(),
            first_open_seconds=first_open_seconds,
            first_open_cpu_seconds=first_open_cpu_seconds,
            open_seconds=statistics.median(openings),
            chromium_seconds=chromium_seconds,
            open_bytes=open_bytes,
            picture_bytes=round(statistics.median(seen[0].picture_bytes)),
            history_bytes=round(statistics.median(seen[0].history_bytes)),
            pictures_per_second=len(seen[0].picture_bytes) / watched_seconds,
            histories_per_minute=60 * len(seen[0].history_bytes) / watched_seconds,
            core_share_unwatched=statistics.mean(shares[0]),
            core_share_watched=statistics.mean(shares[WATCHERS]),
            core_shares_unwatched=tuple(shares[0]),
            core_shares_watched=tuple(shares[WATCHERS]),
            memory_bytes=coordinator.most_memory_bytes(),
        )
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.gather(*(node.close() for node in nodes))
        await asyncio.to_thread(coordinator.stop)


def _free_port() -> int:
    """The nodes find the coordinator there again after it was started anew."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


async def _core_share(
    coordinator: CoordinatorProcess, port: int, seen: list[Seen], asked: Asked
) -> float:
    watching = [asyncio.create_task(watch(port, one)) for one in seen]
    before, began = coordinator.cpu_seconds(), time.monotonic()
    await asyncio.sleep(asked.turn_seconds)
    share = (coordinator.cpu_seconds() - before) / (time.monotonic() - began)
    for task in watching:
        if task.done():
            task.result()
            raise RuntimeError("a reader's stream has ended")
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    return share


def table(results: list[Measured]) -> str:
    """One column for each run."""
    rows = [
        ("the page opens in, s", [f"{m.open_seconds:.2f}" for m in results]),
        ("for the first who looks, s", [f"{m.first_open_seconds:.2f}" for m in results]),
        ("of it processor time, s", [f"{m.first_open_cpu_seconds:.2f}" for m in results]),
        (
            "in chromium, s",
            ["-" if m.chromium_seconds is None else f"{m.chromium_seconds:.2f}" for m in results],
        ),
        ("with, kB", [f"{m.open_bytes / 1e3:.0f}" for m in results]),
        ("a picture, kB", [f"{m.picture_bytes / 1e3:.0f}" for m in results]),
        ("pictures a minute", [f"{60 * m.pictures_per_second:.0f}" for m in results]),
        ("curves a minute", [f"{m.histories_per_minute:.1f}" for m in results]),
        ("of a core, nobody watches", [f"{m.core_share_unwatched:.1%}" for m in results]),
        ("of a core, ten watch", [f"{m.core_share_watched:.1%}" for m in results]),
        ("memory, MB", [f"{m.memory_bytes / 1e6:.0f}" for m in results]),
        ("database, MB", [f"{m.database_bytes / 1e6:.0f}" for m in results]),
    ]
    columns = ["", *(f"{m.num_rounds} rounds, {m.num_nodes} nodes" for m in results)]
    return markdown(columns, [[name, *values] for name, values in rows])


def main() -> None:
    """See the module's docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("--run", action="append", metavar="ROUNDSxNODES", dest="runs")
    parser.add_argument(
        "--played", type=int, help="of them through the core; default: as many as 8000 / nodes"
    )
    parser.add_argument("--attached", type=int, help="nodes that really attach (default: all)")
    parser.add_argument("--round-seconds", type=float, default=10.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--turn-seconds", type=float, default=20.0)
    add_results(parser)
    options = parser.parse_args()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    results, rows = [], Rows(options.results, about=machine(), is_printed=False)
    for run in options.runs or ["100000x8", "20000x1000"]:
        num_rounds, num_nodes = map(int, run.split("x"))
        asked = Asked(
            num_rounds=num_rounds,
            num_nodes=num_nodes,
            num_attached=min(num_nodes, options.attached or num_nodes),
            num_played=options.played or max(2, 8000 // num_nodes),
            round_seconds=options.round_seconds,
            openings=5,
            chromium=shutil.which("chromium"),
            turns=options.turns,
            turn_seconds=options.turn_seconds,
        )
        with tempfile.TemporaryDirectory(prefix="atoll-page-") as folder:
            results.append(asyncio.run(measured(Path(folder) / "home", asked)))
        rows.add(asdict(results[-1]))
    print(table(results))


if __name__ == "__main__":
    from lab.processes.family import nothing_left

    with nothing_left():
        main()
