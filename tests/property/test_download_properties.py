"""Whatever donors do, a joiner ends with the swarm's state or with nothing."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.simulation.virtual_time import run_in_virtual_time
from node.exchange.peers import TransferRefusedError, Waits, Want, WantChunk, WantManifest
from node.exchange.state.chunks import Manifest, ManifestError
from protocol.wire.payload import Payload
from tests.unit.download_scene import (
    CHUNK_BYTES,
    JOINER,
    NUM_CHUNKS,
    DonorNode,
    DownloadScene,
    Supply,
    assert_is,
    changed,
    cut_small,
    state_at,
)

NEWEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Trick:
    """What a donor does to answers, from one request on."""

    name: str
    from_request: int
    chunk: int
    seed: int

    def play_on(self, scene: DownloadScene, donor: DonorNode) -> None:
        if self.name == "lie":
            donor.lie(seed=1000 + self.seed)
            return
        doing = getattr(self, f"_{self.name}")
        num_asked = 0

        async def supply(want: Want, honestly: Supply) -> Payload | None:
            nonlocal num_asked
            num_asked += 1
            if num_asked > self.from_request:
                return await doing(scene, donor, want, honestly)
            return await honestly(want)

        donor.misbehave = supply

    async def _damage(
        self, scene: DownloadScene, donor: DonorNode, want: Want, honestly: Supply
    ) -> Payload | None:
        payload = await honestly(want)
        if payload is None or not payload.body:
            return payload
        body = bytearray(payload.body)
        body[self.seed % len(body)] ^= 1
        is_sealed_anew = bool(self.chunk % 2)
        return (
            changed(payload, bytes(body))
            if is_sealed_anew
            else Payload(header=payload.header, body=bytes(body))
        )

    async def _die(
        self, scene: DownloadScene, donor: DonorNode, want: Want, honestly: Supply
    ) -> Payload | None:
        scene.network.detach(donor.transport)
        return None

    async def _stall(
        self, scene: DownloadScene, donor: DonorNode, want: Want, honestly: Supply
    ) -> Payload | None:
        await asyncio.sleep(1e6)
        return None

    async def _move_on(
        self, scene: DownloadScene, donor: DonorNode, want: Want, honestly: Supply
    ) -> Payload | None:
        if donor.states[-1].round < NEWEST:
            donor.states = [state_at(donor.states[-1].round + 1)]
            donor.donor.drop()
        return await honestly(want)

    async def _swap(
        self, scene: DownloadScene, donor: DonorNode, want: Want, honestly: Supply
    ) -> Payload | None:
        """Gives another chunk, or another round's manifest, than was asked for."""
        if isinstance(want, WantManifest):
            return await honestly(WantManifest(oldest_round=0))
        assert isinstance(want, WantChunk)
        payload = await honestly(want)
        other = donor.states[-1].read(
            self.chunk * CHUNK_BYTES, self.chunk * CHUNK_BYTES + CHUNK_BYTES
        )
        return payload and changed(payload, other)

    async def _forge(
        self, scene: DownloadScene, donor: DonorNode, want: Want, honestly: Supply
    ) -> Payload | None:
        """Gives a manifest with one false digest."""
        payload = await honestly(want)
        if payload is None or not isinstance(want, WantManifest):
            return payload
        body = bytearray(payload.body)
        body[-1 - self.seed % (32 * NUM_CHUNKS)] ^= 1
        with pytest.raises(ManifestError, match="another state"):  # the form is right
            Manifest.from_body(bytes(body))
        return changed(payload, bytes(body))

    async def _refuse(
        self, scene: DownloadScene, donor: DonorNode, want: Want, honestly: Supply
    ) -> Payload | None:
        """Has enough to do, now and then."""
        if isinstance(want, WantChunk) and (want.index + self.seed) % 3 == 0:
            raise TransferRefusedError("busy; go on with the transfers that you have")
        return await honestly(want)


tricks = st.builds(
    Trick,
    name=st.sampled_from(["lie", "damage", "die", "stall", "move_on", "swap", "forge", "refuse"]),
    from_request=st.integers(0, 15),
    chunk=st.integers(0, NUM_CHUNKS - 1),
    seed=st.integers(0, 5000),
)
donors = st.tuples(st.integers(6, NEWEST), st.none() | tricks, st.sampled_from([0.5, 2.0, 20.0]))


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> object:
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch)
        yield


@given(
    cast=st.lists(donors, min_size=1, max_size=5),
    kills_at=st.lists(st.floats(0.1, 20.0), max_size=2),
    has_honest_donor=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_swarms_state_or_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    cast: list[tuple[int, Trick | None, float]],
    kills_at: list[float],
    has_honest_donor: bool,
) -> None:
    folder = tmp_path_factory.mktemp("node")
    run_in_virtual_time(_try(lambda: DownloadScene(folder), cast, kills_at, has_honest_donor))


async def _try(
    make_scene: Callable[[], DownloadScene],
    cast: list[tuple[int, Trick | None, float]],
    kills_at: list[float],
    has_honest_donor: bool,
) -> None:
    scene = make_scene()
    for place, (round, trick, chunks_per_second) in enumerate(cast):
        donor = await scene.add(f"donor-{place}", state_at(round))
        scene.network.slow_down(donor.node_id, chunks_per_second * CHUNK_BYTES)
        if trick is not None:
            trick.play_on(scene, donor)
    if has_honest_donor:
        await scene.add("honest", state_at(7))
    settled = {round: state_at(round).outer_digest() for round in (6, 7, NEWEST)}
    scene.settled = dict(settled)

    for seconds in kills_at:  # the joiner is killed in the middle, and started again
        fetching = asyncio.create_task(scene.fetch(await scene.joiner(), oldest_round=6))
        await asyncio.wait((fetching,), timeout=seconds)
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        await scene.transport.stop()

    download = await scene.joiner()
    try:
        async with asyncio.timeout(4 * Waits().distrust_seconds):
            found = await scene.fetch_in_the_end(download, oldest_round=6)
    except TimeoutError:
        assert not has_honest_donor
    else:
        assert_is(found, state_at(found.round))
        assert found.outer_digest() == settled[found.round]
        await download.taken_over()
    await scene.transport.stop()
    for donor in scene.donors.values():
        donor.donor.drop()
        await donor.transport.stop()
    assert JOINER not in scene.donors
    assert asyncio.all_tasks() == {asyncio.current_task()}
