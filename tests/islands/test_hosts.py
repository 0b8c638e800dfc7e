"""An island of two hosts: the leader is this process, the follower is one that people would start."""

import asyncio
import contextlib
import re
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from lab.processes.family import MARK, Family, atoll_command, atoll_environment
from lab.simulation.inline_island import InlineIsland
from node.hosts.following import Shelf, follow
from node.hosts.leading import HostDesk, HostsIsland
from node.hosts.wire import HostToken, LeaderKey, connect
from node.island.checkpoints.folder import CheckpointFolder
from node.island.data.places import DataPlaces
from node.island.island import Island, Progress
from node.island.parallel.mesh_shape import MeshShape
from node.island.ranks.faults import RankDiedError
from node.island.ranks.launcher import ProcessIsland, RanksHere
from node.outer_state import SharedVectors, Vector
from protocol.errors import ConfigError, ProtocolMismatchError
from protocol.run.models import layout_of
from protocol.run.run_spec import ExchangeSection, RunSpec
from protocol.wire.versions import release
from tests.islands.rank_scene import small_spec
from tests.islands.test_ranks import ENDLESS, ignore, trained_inline, work_of

SPEC = small_spec().model_copy(
    update={"model": small_spec().model.model_copy(update={"num_layers": 2})}
)
VERSION = release()
PATIENCE_SECONDS = 900.0  # for a hang only
SHARDS, STAGES, COPIES = MeshShape(shard=2), MeshShape(pipeline=2), MeshShape(replicate=2)
FOUR = MeshShape(shard=4)
AT_ONCE = SPEC.model_copy(  # else weights hardly move in a few inner steps
    update={"inner": SPEC.inner.model_copy(update={"warmup_tokens": 0})}
)
BLENDED = AT_ONCE.model_copy(update={"exchange": ExchangeSection(overlap="blend", fragments=2)})


pytestmark = pytest.mark.usefixtures("forkserver")


class Follower:
    """`atoll node follow` as a process in a folder with the text, and what came of it."""

    def __init__(self, folder: Path, token: Path) -> None:
        mark = uuid.uuid4().hex
        self.family = Family(mark)
        self.log = folder / "follower.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                atoll_command("node", "follow", token, "--device", "cpu", "--name", "two"),
                cwd=folder,
                env=atoll_environment({MARK: mark}),
                stdout=log,
                stderr=log,
            )

    def end(self) -> int:
        """As its owner does; its exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE_SECONDS)


@contextlib.asynccontextmanager
async def following(
    token: Path, folder: Path, *, name: str = "two"
) -> AsyncIterator[asyncio.Task[str]]:
    """What the command runs, in this process; its ranks are processes of their own all the same."""
    leader = HostToken.read(token)
    shelf = Shelf(folder / f"inner-{name}")
    task = asyncio.create_task(
        follow(
            leader,
            name=name,
            device="cpu",
            version=VERSION,
            data=DataPlaces(folder=folder),
            shelf=shelf,
        )
    )
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        shelf.close()


@contextlib.asynccontextmanager
async def open_desk(
    folder: Path,
) -> AsyncIterator[tuple[HostDesk, Path]]:
    """A desk on loopback, and the file with its token."""
    key = LeaderKey.of_folder(folder)
    desk = HostDesk(key=key, version=VERSION, device_kind="cpu")
    port = await desk.open("127.0.0.1", 0)
    try:
        yield desk, key.write_token(folder, "127.0.0.1", port)
    finally:
        await desk.close()


def island_of(
    desk: HostDesk,
    vectors: SharedVectors,
    folder: Path,
    shape: MeshShape = SHARDS,
    *,
    spec: RunSpec = SPEC,
    checkpoints: CheckpointFolder | None = None,
    num_hosts: int = 2,
) -> HostsIsland:
    each = shape.num_ranks // num_hosts
    own = ProcessIsland(
        ranks=RanksHere(
            devices=("cpu",) * each,
            shape=shape,
            ranks=range(each),
            num_threads=1,
        ),
        spec=spec,
        names=vectors.names,
        data=DataPlaces(folder=folder),
        checkpoints=checkpoints,
    )
    return HostsIsland(
        own=own,
        desk=desk,
        num_hosts=num_hosts,
        listen_host="127.0.0.1",
        shared=vectors,
        come_back_seconds=PATIENCE_SECONDS,
    )


async def evaluated_inline(vectors: SharedVectors, folder: Path) -> float:
    island = InlineIsland(
        spec=SPEC, parameters=vectors.parameters, published=vectors.published, folder=folder
    )
    await island.start()
    await island.adopt()
    return (await island.evaluate()).loss


async def test_two_hosts_train_as_one_process_and_end_together(
    vectors: SharedVectors, folder: Path
) -> None:
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        open_desk(folder) as (desk, token),
        following(token, folder) as follower,
    ):
        island = island_of(desk, vectors, folder, STAGES)
        try:
            await island.start()
            vectors.parameters[:] *= 2  # the follower has to be told
            await island.adopt()
            two, one = await island.evaluate(), await evaluated_inline(vectors, folder)
            assert two.loss == pytest.approx(one, rel=1e-6)
            report = await island.train(work_of(6), ignore)
            assert (report.inner_steps, report.tokens) == (6, 6 * 64)
            vectors.published[:] = np.nan
            await island.publish(0)
            np.testing.assert_allclose(
                vectors.published, await trained_inline(SPEC, vectors, folder), atol=2e-4
            )
            seen: list[Progress] = []

            def halt(progress: Progress) -> None:  # told by the follower, which has the loss
                seen.append(progress)
                island.halt()

            report = await island.train(work_of(ENDLESS, max_seconds=1e6), halt)
            assert seen
            assert report.inner_steps < ENDLESS  # perhaps a single one, where each takes long
        finally:
            await island.stop()
        await desk.close()
        assert await follower == "the leader has ended"


async def overlapped(island: Island, vectors: tuple[Vector, Vector]) -> list[Vector]:
    """What is published over two rounds of each fragment, trained on through both adoptions."""
    parameters, published = vectors
    layout = layout_of(BLENDED)
    found = []
    await island.adopt()
    await island.train(work_of(3), ignore)
    for fragment, is_taken in ((0, True), (1, False), (0, False), (1, True)):
        span = layout.fragments[fragment].span
        own = published[: span.stop - span.start]
        own[:] = np.nan
        await island.publish(fragment)
        found.append(own.copy())
        await island.train(work_of(2), ignore)
        parameters[span] += 0.1
        await island.adopt(fragment, is_taken=is_taken)
    for fragment in (0, 1):
        await island.publish(fragment)
        found.append(published[: layout.fragments[fragment].num_elements].copy())
    return found


async def test_two_hosts_that_train_through_the_exchange_stay_one_model(
    vectors: SharedVectors, folder: Path
) -> None:
    """Each rank holds all tensors and publishes half: it needs what the other host published."""
    plain = (vectors.parameters.copy(), vectors.published.copy())
    inline = InlineIsland(spec=BLENDED, parameters=plain[0], published=plain[1], folder=folder)
    await inline.start()
    expected = await overlapped(inline, plain)
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        open_desk(folder) as (desk, token),
        following(token, folder),
    ):
        island = island_of(desk, vectors, folder, COPIES, spec=BLENDED)
        try:
            await island.start()
            found = await overlapped(island, (vectors.parameters, vectors.published))
        finally:
            await island.stop()
    for one, two in zip(expected, found, strict=True):
        np.testing.assert_allclose(two, one, atol=1e-4)


def folder_of(path: Path, spec: RunSpec = AT_ONCE, *, num_hosts: int = 2) -> CheckpointFolder:
    return CheckpointFolder(
        path=path,
        run_digest=spec.digest(),
        layout_digest=layout_of(spec).summary().digest,
        every_rounds=1,
        num_hosts=num_hosts,
    )


def names_in(path: Path) -> set[str]:
    return {found.name for found in path.iterdir()} - {"lock"}


@pytest.mark.timeout(900)  # twelve ranks
async def test_hosts_that_start_again_go_on_from_the_newest_checkpoint_that_all_of_them_have(
    vectors: SharedVectors, folder: Path
) -> None:
    plain = (vectors.parameters.copy(), np.zeros_like(vectors.parameters))
    inline = InlineIsland(spec=AT_ONCE, parameters=plain[0], published=plain[1], folder=folder)
    await inline.start()
    await inline.adopt()
    for _ in range(2):
        await inline.train(work_of(3), ignore)
    await inline.publish(0)
    own, other = folder / "inner", folder / "inner-two"

    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        open_desk(folder) as (desk, token),
        following(token, folder),
    ):
        kept = folder_of(own)  # two ranks on each host
        island = island_of(desk, vectors, folder, FOUR, spec=AT_ONCE, checkpoints=kept)

        async def started_again() -> list[Any]:
            await island.stop()
            with capture_logs() as lines:
                await island.start()
            await island.adopt()
            return lines

        try:
            await started_again()
            await island.train(work_of(3), ignore)
            await island.publish(0)
            await island.keep(1, is_last=True)
            vectors.parameters[:] = vectors.published

            lines = await started_again()
            assert ("inner optimizer goes on from its checkpoint", 1) in told(lines)
            assert not any("passed_bytes" in line for line in lines)  # each host has its own part
            await island.train(work_of(3), ignore)
            await island.publish(0)
            # Sums in another order; with the optimizer at zero it would be a hundred times as much.
            np.testing.assert_allclose(vectors.published, plain[1], atol=1e-4)
            await island.keep(2, is_last=True)
            assert names_in(own) == names_in(other) == {"round-1", "round-2"}

            # What a host has that lost its power just before it gave its part a name.
            (other / "round-2").rename(other / ".round-2")
            lines = await started_again()
            assert ("inner optimizer goes on from its checkpoint", 1) in told(lines)
            assert "host 1's part of it is not here" in {line.get("why") for line in lines}
            assert names_in(other) == {"round-1"}

            # One that cannot write: no host gives its part a name.
            (other / ".round-3.new").touch()
            await island.train(work_of(1), ignore)
            with capture_logs() as lines:
                await island.keep(3, is_last=True)
            assert [line["event"] for line in lines] == ["checkpoint not written"]
            assert re.search(r"host two: .*FileExistsError", lines[0]["why"])
            assert names_in(own) == {"round-1", "round-2"}
        finally:
            await island.stop()


def told(lines: list[Any]) -> set[tuple[str, int]]:
    return {(line["event"], line.get("round", 0)) for line in lines}


async def test_a_rank_or_a_host_that_dies_fails_the_call_and_a_fresh_start_goes_on(
    vectors: SharedVectors, folder: Path
) -> None:
    async def trained_until(island: HostsIsland, strike: Callable[[], object]) -> None:
        def once(progress: Progress) -> None:
            if not struck:
                struck.append(strike())

        struck: list[object] = []
        await island.train(work_of(ENDLESS, max_seconds=1e6), once)

    async with asyncio.timeout(PATIENCE_SECONDS), open_desk(folder) as (desk, token):
        followers = [Follower(folder, token)]
        island = island_of(desk, vectors, folder)
        try:
            await island.start()
            await island.adopt()

            def kill_rank() -> None:
                (rank,) = followers[0].family.ranks()
                assert followers[0].family.send(rank, signal.SIGKILL)

            with pytest.raises(RankDiedError, match="host two: rank 1 on cpu was ended by SIGKILL"):
                await trained_until(island, kill_rank)
            await island.stop()
            await island.start()
            await island.adopt()
            with pytest.raises(RankDiedError, match=r"host two \(127.0.0.1\).* is gone"):
                await trained_until(island, followers[0].process.kill)
            await island.stop()
            followers.append(Follower(folder, token))
            await island.start()
            await island.adopt()
            assert (await island.train(work_of(2), ignore)).inner_steps == 2
            assert await asyncio.to_thread(followers[1].end) == 0
        finally:
            await island.stop()
            for follower in followers:
                follower.process.kill()
                follower.process.wait()


async def test_who_has_not_the_secret_is_turned_away_and_a_false_leader_is_not_told_it(
    folder: Path,
) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), open_desk(folder) as (desk, path):
        token = HostToken.read(path)
        assert path.stat().st_mode & 0o077 == 0
        stranger = await connect(replace(token, secret="0" * 64))
        with pytest.raises((EOFError, ConnectionError)):
            await stranger.send({"name": "three", "version": VERSION, "device_kind": "cpu"})
            await stranger.receive()
        with pytest.raises(RankDiedError, match="0 of 1 hosts follow"):
            await desk.hosts(1, within_seconds=0)
        with pytest.raises(ProtocolMismatchError, match="is not the token's leader"):
            await connect(replace(token, pin=bytes(32)))
        for hello in ({"version": "0", "device_kind": "cpu"}, {"version": VERSION}):
            other = await connect(token)
            await other.send(hello)
            assert "refused" in await other.receive()
            other.close()
        with pytest.raises(RankDiedError, match="0 of 1 hosts follow"):
            await desk.hosts(1, within_seconds=0)


async def test_hosts_that_read_other_text_are_refused(
    vectors: SharedVectors, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for i in range(12):
        (elsewhere / f"{i}.txt").write_text(f"{i}: another text " * 40)
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        open_desk(folder) as (desk, token),
        following(token, elsewhere),
    ):
        island = island_of(desk, vectors, folder)
        try:
            with pytest.raises(ConfigError, match="host two reads other text than the leader"):
                await island.start()
        finally:
            await island.stop()
