"""What a node serves of its state, for how long, and how many copies of it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lab.simulation.memory_transport import MemoryNetwork
from node.disk.snapshots import Snapshot
from node.exchange.peers import WantChunk, WantChunkMap, WantManifest
from node.exchange.state.chunks import Arrivals, Arriving, Manifest, read_map
from node.exchange.state.donor import COPY_KEPT_SECONDS, COPY_LONGEST_SECONDS, MOST_COPIES
from protocol.wire.payload import CHUNK, CHUNK_MAP, MANIFEST, Payload
from protocol.wire.rounds import Digest, NodeId
from tests.unit.download_scene import (
    CHUNK_BYTES,
    LAYOUT,
    NUM_CHUNKS,
    NUM_ELEMENTS,
    ROUNDS_BEHIND,
    RUN,
    DonorNode,
    manifest_of,
    small_chunks,
    state_at,
)
from tests.unit.exchange_scene import in_virtual_time

__all__ = ["small_chunks"]

pytestmark = pytest.mark.usefixtures("small_chunks")


class Opened(DonorNode):
    """Counts how often a state is opened."""

    def __init__(self, *states: Snapshot) -> None:
        super().__init__(MemoryNetwork(), NodeId("donor"), *states)
        self.num_opened = 0

    async def _open(self, want: WantManifest) -> Snapshot | None:
        self.num_opened += 1
        await asyncio.sleep(0)
        return await super()._open(want)

    async def round_for(self, oldest_round: int, newest_round: int | None = None) -> int | None:
        payload = await self.donor.manifest(
            WantManifest(oldest_round=oldest_round, newest_round=newest_round)
        )
        return None if payload is None else payload.header.round

    async def first_chunk(self, round: int) -> Payload | None:
        digest = manifest_of(state_at(round)).chunk_digests[0]
        return await self.donor.chunk(WantChunk(round=round, index=0, digest=digest))


@in_virtual_time
async def test_all_who_join_together_get_one_copy() -> None:
    node = Opened(state_at(7))
    rounds = await asyncio.gather(*(node.round_for(1) for _ in range(8)))
    assert rounds == [7] * 8
    assert node.num_opened == 1


@in_virtual_time
async def test_a_state_that_is_undone_while_it_is_opened_is_not_served() -> None:
    node = Opened(state_at(17), state_at(2))
    asked = asyncio.create_task(node.round_for(2))
    await asyncio.sleep(0)
    assert node.num_opened == 1
    node.states = [state_at(2)]
    node.donor.drop()
    assert await asked is None
    assert await node.round_for(2) == 2
    assert await node.first_chunk(17) is None


@in_virtual_time
async def test_headers_say_what_a_manifest_and_a_chunk_are() -> None:
    node = Opened(state_at(7))
    payload = await node.donor.manifest(WantManifest(oldest_round=7, newest_round=7))
    assert payload is not None
    manifest = Manifest.from_body(payload.body)
    assert manifest == manifest_of(state_at(7))
    assert (payload.header.kind, payload.header.num_elements) == (MANIFEST, NUM_ELEMENTS)
    want = WantChunk(round=7, index=2, digest=manifest.chunk_digests[2])
    chunk = await node.donor.chunk(want)
    assert chunk is not None
    assert chunk.body == state_at(7).read(*manifest.span(2))
    header = chunk.header
    assert (header.kind, header.round, header.slice_index) == (CHUNK, 7, 2)
    assert (header.start, header.num_elements) == (2 * CHUNK_BYTES // 4, CHUNK_BYTES // 4)
    assert header.body_digest == want.digest


@in_virtual_time
async def test_only_the_chunks_of_what_is_served_are_given() -> None:
    node = Opened(state_at(7))
    assert await node.first_chunk(7) is None  # nobody asked for its manifest
    await node.round_for(1)
    right = manifest_of(state_at(7)).chunk_digests
    assert await node.first_chunk(7) is not None
    assert await node.first_chunk(8) is None
    for index, digest in ((0, right[1]), (len(right), right[0]), (2**32 - 1, right[0])):
        want = WantChunk(round=7, index=index, digest=digest)
        assert await node.donor.chunk(want) is None
    assert await node.donor.chunk(WantChunk(round=7, index=0, digest=Digest(b""))) is None


@in_virtual_time
async def test_a_copy_is_kept_while_it_is_asked_for_and_dropped_a_while_after() -> None:
    node = Opened(state_at(7))
    await node.round_for(1)
    node.states = [state_at(8)]
    for _ in range(5):
        await asyncio.sleep(COPY_KEPT_SECONDS - 1)
        assert await node.first_chunk(7) is not None
    await asyncio.sleep(2 * COPY_KEPT_SECONDS)
    assert not node.donor._copies
    assert await node.first_chunk(7) is None


@in_virtual_time
async def test_a_copy_that_is_far_behind_is_given_to_none_but_who_fetches_it() -> None:
    node = Opened(state_at(7))
    await node.round_for(1)
    node.states = [state_at(7 + ROUNDS_BEHIND)]
    assert await node.round_for(1) == 7
    node.states = [state_at(8 + ROUNDS_BEHIND)]
    assert await node.round_for(7, 7) == 7
    assert await node.round_for(1) == 8 + ROUNDS_BEHIND
    assert await node.round_for(8, 9) is None


@in_virtual_time
async def test_there_are_never_more_copies_than_two_and_none_is_held_for_ever() -> None:
    node = Opened(state_at(7))
    for number in range(7, 7 + MOST_COPIES):
        node.states = [state_at(number)]
        assert await node.round_for(number) == number
    node.states = [state_at(20)]
    while asyncio.get_running_loop().time() < COPY_LONGEST_SECONDS:
        assert await node.round_for(20) is None  # both are being fetched
        assert len(node.donor._copies) == MOST_COPIES
        for number in range(7, 7 + MOST_COPIES):
            assert await node.first_chunk(number) is not None
        await asyncio.sleep(COPY_KEPT_SECONDS / 2)
    assert await node.round_for(20) == 20
    assert sorted(node.donor._copies) == [8, 20]


def damaged(state: Snapshot) -> Callable[[int, int], bytes]:
    return lambda start, stop: state.read(start, stop)[:-1] + b"?"


@in_virtual_time
async def test_a_state_that_is_damaged_on_disk_is_not_offered() -> None:
    class Damaged(Opened):
        async def _open(self, want: WantManifest) -> Snapshot | None:
            class State:
                round = 7
                outer_digest = staticmethod(state_at(7).outer_digest)
                read = staticmethod(damaged(state_at(7)))

            return State()  # type: ignore[return-value]

    node = Damaged(replace(state_at(7)))
    assert await node.round_for(1) is None
    assert not node.donor._copies


@in_virtual_time
async def test_a_donor_that_stops_leaves_no_timer() -> None:
    node = Opened(state_at(7))
    await node.round_for(1)
    assert node.donor._timer is not None
    node.donor.drop()
    assert node.donor._timer is None
    assert await node.first_chunk(7) is None


# What has come of a state that is on its way here


class Fetching(DonorNode):
    """Has some chunks of round 7, and no state of its own."""

    def __init__(self, *chunks: int, folder: Path | None = None) -> None:
        self.arrivals = Arrivals(folder, run_digest=RUN, layout_digest=LAYOUT)
        super().__init__(
            MemoryNetwork(), NodeId("fetching"), arriving=lambda: self.arrivals.current
        )
        self.manifest = manifest_of(state_at(7))
        arriving = self.arrivals.begin(self.manifest)
        for index in chunks:
            arriving.put(index, state_at(7).read(*self.manifest.span(index)))

    @property
    def arriving(self) -> Arriving:
        assert self.arrivals.current is not None
        return self.arrivals.current

    async def chunk(self, index: int, *, round: int = 7) -> Payload | None:
        digest = self.manifest.chunk_digests[index]
        return await self.donor.chunk(WantChunk(round=round, index=index, digest=digest))

    async def chunk_map(self, *, round: int = 7, digest: Digest | None = None) -> set[int] | None:
        want = WantChunkMap(round=round, outer_digest=digest or self.manifest.outer_digest)
        payload = await self.donor.chunk_map(want)
        if payload is None:
            return None
        assert (payload.header.kind, payload.header.round) == (CHUNK_MAP, round)
        return set(read_map(payload.body, NUM_CHUNKS).nonzero()[0].tolist())


@pytest.mark.parametrize("on_disk", [True, False])
@in_virtual_time
async def test_what_has_come_of_a_state_is_given_on_and_nothing_else(
    tmp_path: Path, on_disk: bool
) -> None:
    node = Fetching(2, 9, folder=tmp_path if on_disk else None)
    assert await node.chunk_map() == {2, 9}
    for index in range(NUM_CHUNKS):
        payload = await node.chunk(index)
        if index in {2, 9}:
            assert payload is not None
            assert payload.body == state_at(7).read(*node.manifest.span(index))
            assert (payload.header.kind, payload.header.slice_index) == (CHUNK, index)
        else:
            assert payload is None, "what has not come are zeros"
    assert await node.chunk(2, round=8) is None
    assert await node.donor.manifest(WantManifest(oldest_round=0)) is None


def damage(folder: Path, *, at: int) -> None:
    (path,) = folder.glob("*.arriving")
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(8))


@in_virtual_time
async def test_what_was_damaged_after_it_came_is_not_given_on(tmp_path: Path) -> None:
    node = Fetching(2, 9, folder=tmp_path)
    damage(tmp_path, at=node.manifest.span(2)[0])
    assert await node.chunk(2) is None
    assert await node.chunk(9) is not None


@in_virtual_time
async def test_what_was_let_go_meanwhile_is_not_held(tmp_path: Path) -> None:
    node = Fetching(2, folder=tmp_path)
    arriving = node.arriving
    node.arrivals.discard()
    assert await node.chunk(2) is None
    assert await node.chunk_map() is None
    assert arriving.get(2) is None


@in_virtual_time
async def test_a_map_is_of_the_state_that_is_asked_for() -> None:
    node = Fetching(2)
    assert await node.chunk_map(round=8) is None
    assert await node.chunk_map(digest=Digest(bytes(32))) is None


@in_virtual_time
async def test_who_serves_a_state_has_all_of_it_and_opens_none_for_the_question() -> None:
    node = Opened(state_at(7))
    want = WantChunkMap(round=7, outer_digest=state_at(7).outer_digest())
    assert await node.donor.chunk_map(want) is None
    assert node.num_opened == 0
    await node.round_for(7)
    payload = await node.donor.chunk_map(want)
    assert payload is not None
    assert read_map(payload.body, NUM_CHUNKS).all()


def test_what_a_map_does_not_reach_is_not_held() -> None:
    assert not read_map(b"", NUM_CHUNKS).any()
    assert read_map(b"\xff", NUM_CHUNKS).nonzero()[0].tolist() == list(range(8))
    assert read_map(b"\xff" * 99, NUM_CHUNKS).size == NUM_CHUNKS
