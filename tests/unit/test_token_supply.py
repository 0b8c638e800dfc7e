"""An island trains what is here of the run's tokens, and says what it waits for of the rest."""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from lab.simulation.memory_transport import MemoryNetwork
from node.duties.lasting_island import LastingIsland
from node.island.data.dataset import SampleOrder
from node.island.data.island import EVALUATE_SECONDS, SuppliedIsland
from node.island.data.manifest import Piece, read_manifest
from node.island.data.opening import open_dataset
from node.island.data.supply import LOSSES_SECONDS, MOST_LOSSES, ready_steps
from node.island.island import Ability, Evaluation, InnerReport, InnerWork, Island, Progress
from node.island.ranks.faults import LostPieceError
from node.models.text import files_of_tokenizer, text_of_run
from node.outer_state import Vector
from protocol.errors import ConfigError, NoInputError, UnavailableError
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import CorpusSummary, Digest
from tests.unit.exchange_scene import in_virtual_time
from tests.unit.peer_tokens_scene import (
    PIECE,
    Member,
    content_of,
    copied,
    files_of,
    flipped,
    from_peers,
    introduce,
    piece_for,
    pieces_of,
)
from tests.unit.tokens_scene import (
    cut_into_pieces,
    prepared,
    small_shards,
    spec_of,
    write_jsonl,
    write_tokenizer,
)
from tests.unit.work_scene import inner_work

STEP_SECONDS = 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_shards(tmp_path_factory.mktemp("tokens"), piece_bytes=PIECE)


@pytest.fixture
def spec(folder: Path) -> RunSpec:
    return from_peers(spec_of(folder))


class Ranks(Island):
    """An island that reads its samples, as ranks do: what is not here fails its test."""

    def __init__(self, spec: RunSpec, member: Member) -> None:
        self._spec = spec
        self._member = member
        self.calls: list[str] = []
        self.trained: list[int] = []  # samples, in order
        self.progress: list[int] = []
        self._is_halted = False

    @property
    def ability(self) -> Ability:
        return Ability()

    async def start(self) -> CorpusSummary:
        self.calls.append("start")
        self._dataset = open_dataset(self._spec, self._member.places)
        self._order = SampleOrder(
            seed=self._spec.run.seed,
            num_samples=self._dataset.num_samples,
            num_together=self._dataset.num_together,
        )
        return self._dataset.summary()

    async def losses_at(self, parameters: Vector, places: Sequence[int]) -> Sequence[float] | None:
        raise AssertionError("nothing is checked here")

    async def stop(self, why: str = "") -> None:
        self.calls.append("stop")

    async def adopt(self, fragment: int | None = None, *, is_taken: bool = True) -> None:
        self.calls.append(f"adopt {fragment}")

    async def train(self, work: InnerWork, on_progress: Callable[[Progress], None]) -> InnerReport:
        self._is_halted = False
        steps = 0
        clock = asyncio.get_running_loop().time
        ends_at = clock() + work.max_seconds
        batch = self._spec.inner.batch
        while steps < work.inner_steps and not self._is_halted and clock() < ends_at:
            indices = self._order.indices(work.first_sample + steps * batch, batch)
            self._dataset.batch("training", indices)
            self.trained += indices.tolist()
            await asyncio.sleep(STEP_SECONDS)
            steps += 1
            on_progress(Progress(round=work.round, inner_step=steps, loss=1.0, tokens_per_second=1))
        return InnerReport(
            round=work.round,
            inner_steps=steps,
            samples=steps * batch,
            tokens=steps * batch,
            loss=1.0,
            seconds=steps * STEP_SECONDS,
        )

    def halt(self) -> None:
        self._is_halted = True

    async def publish(self, fragment: int) -> None:
        self.calls.append("publish")

    async def begin_anew(self, round: int) -> None:
        pass

    async def keep(self, round: int, *, is_last: bool = False) -> None:
        self.calls.append("keep")

    async def evaluate(self) -> Evaluation:
        chosen = np.arange(self._dataset.num_held_out_samples)
        self._dataset.batch("held_out", chosen[:1])
        self.calls.append("evaluate")
        return Evaluation(loss=1.0, tokens=1)


class Scene:
    """A member whose island is supplied; `start` as its daemon does."""

    def __init__(self, spec: RunSpec, member: Member, *, compiles: bool = False) -> None:
        self.spec = spec
        self.member = member
        self.ranks = Ranks(spec, member)
        self.island = SuppliedIsland(
            island=self.ranks, supply=member.supply, spec=spec, compiles=compiles
        )
        self.told: list[CorpusSummary] = []
        self.supplying: asyncio.Task[None] | None = None

    async def start(self) -> CorpusSummary:
        summary = await self.island.start()
        await self.island.adopt()
        supply = self.island.supplied_by(self.member.tokens, self.told.append)
        self.supplying = asyncio.create_task(supply)
        return summary

    def work(self, steps: int, *, max_seconds: float = 1e4, first: int = 0) -> InnerWork:
        batch = self.spec.inner.batch
        return inner_work(
            steps,
            first_sample=first,
            num_samples=steps * batch,
            round_tokens=1,
            max_seconds=max_seconds,
        )

    async def train(self, steps: int, **changes: float) -> InnerReport:
        def note(progress: Progress) -> None:
            self.ranks.progress.append(progress.inner_step)

        return await self.island.train(self.work(steps, **changes), note)  # type: ignore[arg-type]

    def expected(self, steps: int) -> list[int]:
        listed = self.member.held.listed()
        assert listed is not None
        dataset = open_dataset(self.spec, self.member.places)
        order = SampleOrder(
            seed=0, num_samples=dataset.num_samples, num_together=dataset.num_together
        )
        return order.indices(0, steps * self.spec.inner.batch).tolist()

    async def losses_at(self, parameters: Vector, places: Sequence[int]) -> Sequence[float] | None:
        raise AssertionError("nothing is checked here")

    async def stop(self, why: str = "") -> None:
        if self.supplying is not None:
            self.supplying.cancel()
            await asyncio.gather(self.supplying, return_exceptions=True)


async def beside_one_that_has(
    folder: Path, spec: RunSpec, tmp_path: Path, **changes: Any
) -> tuple[MemoryNetwork, Member, Scene]:
    """A member that has all tokens, and one that has none, has started and knows the other."""
    network = MemoryNetwork()
    has = Member("has", network, spec, tmp_path, own=folder)
    scene = Scene(spec, Member("lacks", network, spec, tmp_path, **changes))
    await introduce(has, scene.member)
    await scene.start()
    await asyncio.sleep(1)
    return network, has, scene


def first_piece(folder: Path, spec: RunSpec) -> Piece:
    """The one that the run's first sample begins in."""
    dataset = open_dataset(spec_of(folder), Member("x", MemoryNetwork(), spec, folder).places)
    order = SampleOrder(seed=0, num_samples=dataset.num_samples, num_together=dataset.num_together)
    file, number = next(iter(dataset.pieces_of("training", order.indices(0, 1))))  # type: ignore[attr-defined]
    return next(p for p in pieces_of(folder) if (p.file, p.number) == (file, number))


@in_virtual_time
async def test_a_node_without_a_manifest_comes_up_when_a_member_gives_one_and_trains_it_all(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    network = MemoryNetwork()
    scene = Scene(spec, Member("lacks", network, spec, tmp_path))
    summary = await scene.start()
    assert (summary.digest.hex(), summary.num_samples) == (spec.data.digest, 0)
    await asyncio.sleep(100)
    assert scene.island.ability == Ability(
        trains=False, evaluates=False, waits_for="the run's tokens"
    )
    assert scene.island.waiting_for == (
        "the manifest of the run's tokens, which no member gives: name a folder that has it with "
        "data = in node.toml, or start a node that has it"
    )
    assert (await scene.train(3)).inner_steps == 0 and await scene.island.evaluate() is None
    assert scene.ranks.calls == []
    has = Member("has", network, spec, tmp_path, own=folder)
    await introduce(has, scene.member)
    await asyncio.sleep(1)
    assert scene.told == [open_dataset(spec_of(folder), has.places).summary()]
    assert scene.island.ability == Ability()
    report = await scene.train(50)
    assert scene.ranks.calls == ["start", "adopt None"], "late ranks adopt before they train"
    assert report.inner_steps == 50 and report.samples == 100
    assert scene.ranks.trained == scene.expected(50)
    assert scene.ranks.progress == list(range(1, 51))
    assert await scene.island.evaluate() == Evaluation(loss=1.0, tokens=1)
    assert scene.island.waiting_for == ""
    await scene.stop()


@in_virtual_time
async def test_what_nobody_has_ends_the_round_with_what_is_trained_and_no_plan_counts_on_the_node(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    network = MemoryNetwork()
    own = copied(folder, tmp_path / "own", files_of(folder))
    piece = first_piece(folder, spec)
    flipped(own / piece.file, piece.start)
    has = Member("has", network, spec, tmp_path, own=own)
    scene = Scene(spec, Member("lacks", network, spec, tmp_path))
    await introduce(has, scene.member)
    await scene.start()
    await asyncio.sleep(1)
    began_at = asyncio.get_running_loop().time()
    report = await scene.train(5)
    assert (report.inner_steps, report.samples, report.tokens) == (0, 0, 0)
    assert asyncio.get_running_loop().time() - began_at < 5, "the round does not wait for it"
    assert not scene.island.ability.trains and scene.island.ability.evaluates
    assert scene.island.waiting_for.startswith(f"piece {piece.number} of {piece.file}")
    right = Member("right", network, spec, tmp_path, own=folder)
    await introduce(has, scene.member, right)
    await asyncio.sleep(10)
    assert scene.island.ability.trains
    assert (await scene.train(5)).inner_steps == 5
    assert scene.ranks.trained == scene.expected(5)
    await scene.stop()


@in_virtual_time
async def test_what_the_disk_damages_of_fetched_tokens_comes_again_and_is_trained(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    *_, scene = await beside_one_that_has(folder, spec, tmp_path)
    assert (await scene.train(5)).inner_steps == 5
    cache = scene.member.held.cache
    damaged = cache.path_of(first_piece(folder, spec).digest)
    flipped(damaged, 3)
    lasting = LastingIsland(scene.island)
    await lasting.start()  # others, which have read nothing yet
    lasting.come_up()
    scene.ranks.trained.clear()
    with capture_logs() as logs:
        report = await lasting.train_and_publish(scene.work(5), 0, lambda progress: None)
    assert report.inner_steps == 5 and scene.ranks.trained == scene.expected(5)
    [told] = [one for one in logs if one["event"] == "a piece of the run's tokens is fetched again"]
    assert f"was damaged in {cache.folder}" in told["why"]
    assert damaged.read_bytes() == content_of(folder, first_piece(folder, spec))
    await scene.stop()


@in_virtual_time
async def test_a_damaged_piece_of_the_owners_folder_comes_from_peers_and_their_file_stays_as_it_is(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    """Both of a file that ranks read, and of the held-out tokens of an evaluation."""
    own = copied(folder, tmp_path / "own", files_of(folder))
    piece = first_piece(folder, spec)
    held_out = next(
        p for p in pieces_of(folder) if p.file == read_manifest(folder).held_out[0].tokens
    )
    for each in (piece, held_out):
        flipped(own / each.file, each.start)
    as_it_was = (own / piece.file).read_bytes()
    network = MemoryNetwork()
    scene = Scene(spec, Member("own", network, spec, tmp_path, own=own))
    await introduce(Member("has", network, spec, tmp_path, own=folder), scene.member)
    await scene.start()
    lasting = LastingIsland(scene.island)
    lasting.come_up()
    report = await lasting.train_and_publish(scene.work(5), 0, lambda progress: None)
    assert report.inner_steps == 5
    assert scene.ranks.trained[-10:] == scene.expected(5)
    assert await lasting.evaluate() == Evaluation(loss=1.0, tokens=1)
    held = scene.member.held
    assert held.piece(Digest(bytes.fromhex(piece.digest))) == content_of(folder, piece)
    assert (own / piece.file).read_bytes() == as_it_was
    await scene.stop()


@in_virtual_time
async def test_a_damaged_piece_that_nobody_else_has_is_told_with_its_file(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    own = copied(folder, tmp_path / "own", files_of(folder))
    piece = first_piece(folder, spec)
    flipped(own / piece.file, piece.start)
    scene = Scene(spec, Member("own", MemoryNetwork(), spec, tmp_path, own=own))
    await introduce(scene.member)
    await scene.start()
    lasting = LastingIsland(scene.island)
    lasting.come_up()
    report = await lasting.train_and_publish(scene.work(5), 0, lambda progress: None)
    assert report.inner_steps == 0 and not scene.island.ability.trains
    assert scene.island.waiting_for.startswith(
        f"piece {piece.number} of {piece.file} (damaged in {own / piece.file}), which no member gives"
    )
    await scene.stop()


@in_virtual_time
async def test_a_disk_that_damages_a_piece_again_and_again_ends_the_node(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    *_, scene = await beside_one_that_has(folder, spec, tmp_path)
    lost = LostPieceError("it is damaged", next_step="look", piece=pieces_of(folder)[0].digest)
    for _ in range(MOST_LOSSES):  # one in a while
        await asyncio.sleep(LOSSES_SECONDS)
        await scene.member.supply.lose(lost)
    for _ in range(MOST_LOSSES - 2):
        await scene.member.supply.lose(lost)
    with pytest.raises(UnavailableError, match="3 times: it is damaged; look"):
        await scene.member.supply.lose(lost)
    await scene.stop()


@in_virtual_time
async def test_a_piece_that_is_slow_ends_the_round_in_time_and_the_next_finds_it_here(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    network, has, scene = await beside_one_that_has(folder, spec, tmp_path)
    network.slow_down(has.node_id, PIECE / 20)  # 20 s and more a piece, two at a time
    report = await scene.train(50, max_seconds=60.0)
    assert 0 < report.inner_steps < 50
    assert 60 <= report.seconds < 62, "what was waited counts: plans go by it"
    assert report.samples == len(scene.ranks.trained) == 2 * report.inner_steps
    assert "from peers" in scene.island.waiting_for and scene.island.ability.trains
    await asyncio.sleep(3600)
    again = await scene.train(50, max_seconds=60.0)
    assert again.inner_steps > report.inner_steps
    await scene.stop()


@in_virtual_time
async def test_a_halt_ends_the_wait_for_a_piece(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    network, has, scene = await beside_one_that_has(folder, spec, tmp_path)
    assert await piece_for(scene.member, pieces_of(folder)[0])  # now it knows who has what
    network.slow_down(has.node_id, 0.1)
    training = asyncio.create_task(scene.train(5))
    await asyncio.sleep(30)
    assert not training.done()
    scene.island.halt()
    await asyncio.sleep(0.1)
    assert training.done() and training.result().inner_steps == 0
    await scene.stop()


@in_virtual_time
async def test_an_evaluation_waits_for_its_pieces_only_so_long(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    network, has, scene = await beside_one_that_has(folder, spec, tmp_path)
    network.slow_down(has.node_id, PIECE / 40)  # and there are more than come in that time
    began_at = asyncio.get_running_loop().time()
    assert await scene.island.evaluate() is None
    assert asyncio.get_running_loop().time() - began_at == pytest.approx(EVALUATE_SECONDS, abs=1)
    await asyncio.sleep(600)  # they go on coming
    assert await scene.island.evaluate() is not None
    await scene.stop()


@in_virtual_time
async def test_a_node_with_all_shards_is_asked_to_train_at_once(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    """Without peers, and without its rounds cut into parts."""
    scene = Scene(spec, Member("has", MemoryNetwork(), spec, tmp_path, own=folder))
    assert (await scene.start()).num_samples > 100
    assert (await scene.train(20)).inner_steps == 20
    assert scene.ranks.trained == scene.expected(20)
    assert scene.island.ability == Ability() and scene.island.waiting_for == ""
    await scene.stop()


@in_virtual_time
async def test_ranks_that_compile_are_started_when_the_pieces_of_their_first_batch_are_here(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    network = MemoryNetwork()
    own = copied(folder, tmp_path / "own", ["manifest.json"])
    scene = Scene(spec, Member("lacks", network, spec, tmp_path, own=own), compiles=True)
    assert (await scene.start()).num_samples == 0
    await asyncio.sleep(100)
    assert scene.ranks.calls == [] and not scene.island.ability.trains
    await introduce(Member("has", network, spec, tmp_path, own=folder), scene.member)
    await asyncio.sleep(10)
    assert scene.ranks.calls == ["start"] and len(scene.told) == 1
    await scene.island.evaluate()  # all of it is here: nothing is fetched for it
    await scene.stop()


@in_virtual_time
async def test_the_cache_keeps_its_limit_and_every_step_finds_its_pieces(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    limit = 12 * PIECE
    *_, scene = await beside_one_that_has(folder, spec, tmp_path, cache_bytes=limit)
    assert (await scene.train(60)).inner_steps == 60
    assert scene.ranks.trained == scene.expected(60)
    kept = (scene.member.held.cache.path_of(digest) for digest in scene.member.held.cache.digests())
    assert sum(path.stat().st_size for path in kept) <= limit
    await scene.stop()


@in_virtual_time
async def test_on_a_full_disk_pieces_come_about_as_often_as_with_a_cache_of_that_size(
    folder: Path, spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes does not drive out what was fetched before it for the same steps."""
    room = 12 * PIECE
    _, has, limited = await beside_one_that_has(folder, spec, tmp_path / "1", cache_bytes=room)
    await limited.train(60)
    await limited.stop()
    usual = len(has.asked)
    _, has, scene = await beside_one_that_has(folder, spec, tmp_path / "2")

    def disk_usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=room - sum(p.stat().st_size for p in folder.glob("*.piece")))

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    assert (await scene.train(60)).inner_steps == 60
    assert scene.ranks.trained == scene.expected(60)
    assert len(has.asked) < 1.2 * usual
    await scene.stop()


@in_virtual_time
async def test_a_cache_that_is_smaller_than_a_step_is_refused(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    *_, scene = await beside_one_that_has(folder, spec, tmp_path, cache_bytes=PIECE // 2)
    with pytest.raises(ConfigError, match="data_cache holds 256"):
        await scene.train(3)
    await scene.stop()


@in_virtual_time
async def test_the_tokenizer_comes_too_so_that_text_goes_in_and_out_on_a_node_without_the_folder(
    tmp_path: Path,
) -> None:
    write_jsonl(tmp_path / "a.jsonl", 60)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    prepared(tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=tokenizer)
    cut_into_pieces(tmp_path / "out", 700)
    spec = from_peers(spec_of(tmp_path / "out"))
    network = MemoryNetwork()
    has = Member("has", network, spec, tmp_path, own=tmp_path / "out")
    scene = Scene(spec, Member("lacks", network, spec, tmp_path))
    await scene.start()
    with pytest.raises(NoInputError, match="the run's tokenizer is not on this machine"):
        text_of_run(spec, scene.member.places)
    await introduce(has, scene.member)
    await asyncio.sleep(30)
    text = text_of_run(spec, scene.member.places)
    said = "word7x3 word7x4"
    assert text.tokens_of(said) == text_of_run(spec, has.places).tokens_of(said)
    assert set(files_of_tokenizer(spec, scene.member.places)) == {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert has.held.lacking_tokenizer() == scene.member.held.lacking_tokenizer() == ()
    await scene.stop()


def _piece(place: int) -> Piece:
    return Piece("a", place, f"{place:064x}", place * 10, 10, place)


def test_steps_are_ready_as_far_as_their_pieces_are_here_and_half_of_the_cache_holds_them() -> None:
    pieces = [_piece(place) for place in range(10)]
    needs = [frozenset(pieces[step : step + 2]) for step in range(9)]
    here = {piece.digest for piece in pieces[:6]}
    assert ready_steps(needs, here, limit_bytes=200) == (5, pieces[:6], pieces[6:])
    assert ready_steps(needs, here, limit_bytes=80) == (3, pieces[:4], pieces[4:8])
    assert ready_steps(needs, set(), limit_bytes=40) == (0, [], pieces[:4])
    assert ready_steps(needs, here, limit_bytes=20) == (1, pieces[:2], []), "one at least"
    every = {piece.digest for piece in pieces}
    assert ready_steps(needs, every, limit_bytes=1000) == (9, pieces, [])


def test_pieces_of_a_batch_are_all_that_it_reads(folder: Path, tmp_path: Path) -> None:
    """Also those in the middle of a window that spans several."""
    spec = spec_of(folder, context=1500)
    dataset = open_dataset(spec, Member("x", MemoryNetwork(), spec, tmp_path, own=folder).places)
    numbers = [number for _, number in dataset.pieces_of("training", np.array([0]))]  # type: ignore[attr-defined]
    assert numbers == [0, 1, 2]
    manifest = read_manifest(folder)
    assert [p.place for p in manifest.pieces()] == list(range(len(manifest.pieces())))
    first = manifest.pieces()[0]
    assert len(content_of(folder, first)) == first.bytes
