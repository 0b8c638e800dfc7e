"""Ranks as real processes: same training as inline, and no rank outlives what it belongs to."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import pytest

from lab.simulation.inline_island import InlineIsland
from node.island.data.places import DataPlaces
from node.island.island import InnerReport, InnerWork, Progress
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh_shape import PLAIN, LocalTraining, MeshShape
from node.island.ranks import rank
from node.island.ranks.commands import Alive, Done, Halt, RankSetup
from node.island.ranks.faults import RankDiedError, RankFailedError, TrainingDivergedError
from node.island.ranks.launcher import ProcessIsland, RanksHere
from node.outer_state import SharedVectors
from protocol.errors import ConfigError, NoInputError
from protocol.run.models import layout_of
from protocol.run.run_spec import EvaluationSection, ExchangeSection, RunSpec
from tests.islands.rank_scene import initial_vectors, small_spec
from tests.unit.tokens_scene import prepared, spec_of
from tests.unit.work_scene import inner_work

ENDLESS = 1_000_000


def work_of(inner_steps: int, max_seconds: float = 60.0) -> InnerWork:
    return inner_work(
        inner_steps, round=3, num_samples=ENDLESS * 8, round_tokens=64, max_seconds=max_seconds
    )


def ignore(progress: Progress) -> None:
    pass


pytestmark = pytest.mark.usefixtures("forkserver")


@contextlib.asynccontextmanager
async def running(
    spec: RunSpec,
    vectors: SharedVectors,
    folder: Path,
    ranks: int,
    local: LocalTraining = PLAIN,
) -> AsyncIterator[ProcessIsland]:
    island = ProcessIsland(
        ranks=RanksHere(
            devices=("cpu",) * ranks,
            num_threads=1,
        ),
        spec=spec,
        names=vectors.names,
        data=DataPlaces(folder=folder),
        local=local,
    )
    try:
        await island.start()
        await island.adopt()
        yield island
    finally:
        await island.stop()


async def trained_inline(spec: RunSpec, vectors: SharedVectors, folder: Path) -> np.ndarray:
    published = np.zeros_like(vectors.parameters)
    island = InlineIsland(
        spec=spec, parameters=vectors.parameters.copy(), published=published, folder=folder
    )
    await island.start()
    await island.adopt()
    await island.train(work_of(6), ignore)
    await island.publish(0)
    return published


async def test_a_rank_process_trains_bit_for_bit_like_the_inline_island(
    vectors: SharedVectors, folder: Path
) -> None:
    spec = small_spec()
    async with running(spec, vectors, folder, ranks=1) as island:
        report = await island.train(work_of(6), ignore)
        await island.publish(0)
    assert (report.inner_steps, report.tokens) == (6, 6 * 64)
    assert not np.array_equal(vectors.published, vectors.parameters)
    assert np.array_equal(vectors.published, await trained_inline(spec, vectors, folder))


def threads_of(process_id: int) -> list[str]:
    threads = Path(f"/proc/{process_id}/task").glob("*/comm")
    return [thread.read_text().strip() for thread in threads]


async def test_ranks_that_are_copies_have_one_process_group(
    vectors: SharedVectors, folder: Path
) -> None:
    """Each is a thread of gloo's that wakes up a hundred times a second."""
    async with running(small_spec(), vectors, folder, ranks=2) as island:
        await island.train(work_of(1), ignore)
        threads = [threads_of(process_id) for process_id in island.process_ids]
    assert [names.count("gloo_tcp_loop") for names in threads] == [1, 1], threads


async def test_a_rank_process_trains_in_the_precision_of_its_machine(
    vectors: SharedVectors, folder: Path
) -> None:
    spec = small_spec()
    local = LocalTraining(precision="fp16")
    async with running(spec, vectors, folder, ranks=1, local=local) as island:
        await island.train(work_of(6), ignore)
        await island.publish(0)
    in_fp32 = await trained_inline(spec, vectors, folder)
    assert not np.array_equal(vectors.published, in_fp32)
    moved = np.linalg.norm(in_fp32 - vectors.parameters)
    assert np.linalg.norm(vectors.published - in_fp32) < 0.2 * moved


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_rank_is_deterministic_when_its_machine_says_so(
    vectors: SharedVectors, folder: Path, monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(rank, "be_deterministic", lambda: asked.append(True))
    setup = RankSetup(
        spec=small_spec(),
        names=vectors.names,
        rank=0,
        shape=MeshShape(),
        device="cpu",
        num_threads=1,
        local=LocalTraining(deterministic=is_asked),
        data=DataPlaces(folder=folder),
        meeting=folder / "store",
    )
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        rank._Rank(theirs, setup)
    assert asked == [True] * is_asked


@pytest.mark.parametrize("micro_batch", [0, 1])
async def test_two_ranks_train_and_evaluate_like_one(
    vectors: SharedVectors, folder: Path, micro_batch: int
) -> None:
    spec = small_spec()
    local = LocalTraining(micro_batch=micro_batch)
    async with running(spec, vectors, folder, ranks=2, local=local) as island:
        two = await island.evaluate()
        two_singles = await island.losses_at(2 * vectors.parameters, (7, 0, 30))
        await island.train(work_of(6), ignore)
        await island.publish(0)
    async with running(spec, vectors, folder, ranks=1) as island:
        one = await island.evaluate()
        one_singles = await island.losses_at(2 * vectors.parameters, (7, 0, 30))
    assert two_singles == pytest.approx(one_singles, rel=1e-5)
    assert two.tokens == one.tokens == 7 * 16
    assert two.loss == pytest.approx(one.loss, rel=1e-6)
    # Only fp32 sums in another order: far below the 6 × 0.01 that the steps moved.
    np.testing.assert_allclose(
        vectors.published, await trained_inline(spec, vectors, folder), atol=2e-4
    )


async def test_two_ranks_tell_the_loss_of_each_source_as_one_does(tmp_path: Path) -> None:
    """Of the rare source there is one sample less than there are ranks: the other rank has none."""
    for name, count in (("often", 60), ("rare", 1)):
        lines = [json.dumps({"text": f"{name} {i} " * 3}) + "\n" for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    exams = tuple(str(tmp_path / f"{name}.jsonl") for name in ("often", "rare"))
    (tmp_path / "a.txt").write_text("to be or not to be " * 40)
    prepared(tmp_path / "a.txt", out=tmp_path / "out", held_out_inputs=exams)
    spec = spec_of(tmp_path / "out").model_copy(
        update={"evaluation": EvaluationSection(samples=1 << 20)}
    )
    found = []
    with initial_vectors(spec.model) as vectors:
        for ranks in (2, 1):
            async with running(spec, vectors, tmp_path, ranks=ranks) as island:
                found.append(await island.evaluate())
    two, one = found
    assert [each.source for each in one.by_source] == ["often", "rare"]
    assert one.by_source[1].tokens == spec.model.context
    assert two.loss == pytest.approx(one.loss, abs=1e-5)
    for ours, theirs in zip(two.by_source, one.by_source, strict=True):
        assert (ours.source, ours.tokens) == (theirs.source, theirs.tokens)
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)


async def test_ranks_take_over_a_fragment_and_evaluate_without_losing_their_own(
    folder: Path,
) -> None:
    spec = small_spec().model_copy(
        update={
            "model": small_spec().model.model_copy(update={"num_layers": 2}),
            "exchange": ExchangeSection(fragments=2, overlap="blend"),
        }
    )
    layout = layout_of(spec)
    first = initial_parameters(spec)
    vectors = SharedVectors.create(layout.num_elements, layout.largest_fragment)
    other, mine = (fragment.span for fragment in layout.fragments)
    of_other, of_mine = (vectors.published[: f.num_elements] for f in layout.fragments)
    try:
        vectors.parameters[:] = first
        async with running(spec, vectors, folder, ranks=2) as island:
            vectors.parameters[:] = 3 * first
            await island.adopt(1)
            await island.evaluate()
            await island.publish(1)
            np.testing.assert_allclose(of_mine, 2 * first[mine], rtol=1e-6)
            await island.adopt(1, is_taken=False)  # nothing was trained since publishing
            await island.publish(0)
            np.testing.assert_array_equal(of_other, first[other])
            await island.publish(1)
            np.testing.assert_allclose(of_mine, 3 * first[mine], rtol=1e-6)
    finally:
        del of_other, of_mine
        vectors.close()


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_killed_rank_fails_the_call_and_the_island_starts_again(
    ranks: int, vectors: SharedVectors, folder: Path
) -> None:
    async with running(small_spec(), vectors, folder, ranks) as island:
        training = asyncio.create_task(island.train(work_of(ENDLESS), ignore))
        victim = island.process_ids[-1]
        await asyncio.sleep(0)  # lets the task give its order
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(RankDiedError, match=f"rank {ranks - 1} on cpu was ended by SIGKILL"):
            await training
        with pytest.raises(RankDiedError):
            await island.evaluate()
        await island.stop()
        await island.start()
        await island.adopt()
        assert (await island.train(work_of(2), ignore)).inner_steps == 2


NATIVE_FAULT = """
import os
from node.island.ranks import rank
rank._end_with_daemon = lambda: None
rank._Rank = lambda connection, setup: os.abort()
rank.run_rank(None, None)
"""


def test_a_rank_that_native_code_ends_says_where_it_was() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", NATIVE_FAULT], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in ended.stderr
    assert "in run_rank" in ended.stderr


@pytest.mark.parametrize("ranks", [1, 2])
async def test_halted_training_returns_what_was_trained_and_the_ranks_go_on(
    ranks: int, vectors: SharedVectors, folder: Path
) -> None:
    async with running(small_spec(), vectors, folder, ranks) as island:
        island.halt()  # nothing is trained: no rank may take it for the next order's
        seen = asyncio.Event()
        training = asyncio.create_task(
            island.train(work_of(ENDLESS, max_seconds=1e6), lambda progress: seen.set())
        )
        await seen.wait()
        island.halt()
        island.halt()
        report = await training
        assert 1 < report.inner_steps < ENDLESS
        assert report.tokens == report.inner_steps * 64
        await island.publish(0)
        assert not np.array_equal(vectors.published, vectors.parameters)
        assert (await island.train(work_of(2), ignore)).inner_steps == 2


async def test_cancelled_training_leaves_off_and_the_ranks_go_on(
    vectors: SharedVectors, folder: Path
) -> None:
    async with running(small_spec(), vectors, folder, ranks=2) as island:
        seen = asyncio.Event()
        training = asyncio.create_task(
            island.train(work_of(ENDLESS, max_seconds=1e6), lambda progress: seen.set())
        )
        await seen.wait()
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        report: InnerReport = await island.train(work_of(2), ignore)
        assert report.inner_steps == 2


async def test_cancelled_training_ends_without_waiting_for_another_order(
    vectors: SharedVectors, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_off = asyncio.Event()
    take = ProcessIsland._take

    def spied(island: ProcessIsland, member: object, reply: object) -> None:
        if isinstance(reply, Done) and isinstance(reply.answer, InnerReport):
            left_off.set()
        take(island, member, reply)  # type: ignore[arg-type]

    monkeypatch.setattr(ProcessIsland, "_take", spied)
    async with running(small_spec(), vectors, folder, ranks=1) as island:
        seen = asyncio.Event()
        training = asyncio.create_task(
            island.train(work_of(ENDLESS, max_seconds=1e6), lambda progress: seen.set())
        )
        await seen.wait()
        training.cancel()
        await asyncio.wait_for(left_off.wait(), 20)


async def test_a_rank_ignores_ctrl_c(vectors: SharedVectors, folder: Path) -> None:
    async with running(small_spec(), vectors, folder, ranks=1) as island:
        os.kill(island.process_ids[0], signal.SIGINT)
        assert (await island.train(work_of(2), ignore)).inner_steps == 2


async def test_an_error_in_a_rank_reaches_the_daemon_as_what_it_is(
    vectors: SharedVectors, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(NoInputError, match=r"'\*.txt' of \[data\] paths matches no file"):
        async with running(small_spec(), vectors, empty, ranks=1):
            pass
    vectors.parameters[0] = np.nan
    async with running(small_spec(), vectors, folder, ranks=1) as island:
        with pytest.raises(TrainingDivergedError, match="round 3"):
            await island.train(work_of(5), ignore)


async def test_a_bug_in_a_rank_is_told_apart_from_its_death(
    vectors: SharedVectors, folder: Path
) -> None:
    async with running(small_spec(), vectors, folder, ranks=2) as island:
        with pytest.raises(RankFailedError, match="IndexError"):
            await island.publish(9)


async def test_a_batch_that_ranks_cannot_share_is_refused_before_a_process_starts(
    vectors: SharedVectors, folder: Path
) -> None:
    island = ProcessIsland(
        ranks=RanksHere(devices=("cpu",) * 3),
        spec=small_spec(batch=4),
        names=vectors.names,
        data=DataPlaces(folder=folder),
    )
    with pytest.raises(ConfigError, match=r"batch = 4 cannot be shared evenly by 3 ranks"):
        await island.start()
    assert not multiprocessing.active_children()


async def test_stop_ends_ranks_in_the_middle_of_training_and_may_be_repeated(
    vectors: SharedVectors, folder: Path
) -> None:
    async with running(small_spec(), vectors, folder, ranks=2) as island:
        seen = asyncio.Event()
        training = asyncio.create_task(
            island.train(work_of(ENDLESS, max_seconds=1e6), lambda progress: seen.set())
        )
        await seen.wait()
        async with asyncio.timeout(5):
            await asyncio.gather(island.stop(), island.stop())
        with pytest.raises(RankDiedError, match="stopped"):
            await training
        assert not multiprocessing.active_children()


DAEMON = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from tests.islands.test_ranks import ENDLESS, DataPlaces, LocalTraining, ProcessIsland, RanksHere
from tests.islands.test_ranks import SharedVectors, layout_of, small_spec, work_of

async def main():
    vectors = SharedVectors.create(layout_of(small_spec()).num_elements)
    island = ProcessIsland(spec=small_spec(), names=vectors.names,
                           ranks=RanksHere(devices=("cpu",) * 2, num_threads=1),
                           local=LocalTraining(load=float(sys.argv[2])),
                           data=DataPlaces(folder=Path(sys.argv[1])))
    await island.start()
    await island.adopt()
    told = lambda progress: print(*island.process_ids, flush=True)
    await island.train(work_of(ENDLESS, max_seconds=1e6), told)

if __name__ == "__main__":
    asyncio.run(main())
"""


def has_ended(process: int) -> bool:
    """Waits for the process behind a pidfd, which is readable once it has ended."""
    ended = wait([process], timeout=10)
    os.close(process)
    return bool(ended)


@pytest.mark.parametrize("load", [1.0, pytest.param(0.1, marks=pytest.mark.nightly)])
def test_ranks_in_training_end_at_once_when_the_daemon_is_killed(folder: Path, load: float) -> None:
    script = folder / "daemon.py"
    script.write_text(DAEMON)
    log = folder / "daemon.log"
    here = Path(__file__).parent
    daemon = subprocess.Popen(
        [sys.executable, *map(str, (script, folder, load, here, here.parents[1]))],
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
    )
    assert daemon.stdout is not None
    ranks = [int(word) for word in daemon.stdout.readline().split()]
    assert len(ranks) == 2, log.read_text()
    handles = [os.pidfd_open(rank) for rank in ranks]
    # With rank 0 held still, rank 1 hangs in a collective and cannot look at its pipe.
    os.kill(ranks[0], signal.SIGSTOP)
    try:
        daemon.kill()
        daemon.wait()
        daemon.stdout.close()
        assert has_ended(handles[1])
    finally:
        os.kill(ranks[0], signal.SIGCONT)
        assert has_ended(handles[0])


def test_a_rank_that_rests_says_that_it_lives_and_hears_what_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank, "SIGN_OF_LIFE_SECONDS", 0.01)
    daemons, ranks = multiprocessing.Pipe()
    resting = threading.Thread(target=rank.rest, args=(ranks, 1e6), daemon=True)
    resting.start()
    assert [daemons.recv() for _ in range(2)] == [Alive()] * 2
    daemons.send(Halt())
    resting.join(60)
    assert not resting.is_alive()
    assert ranks.recv() == Halt()  # it is the training that is told
