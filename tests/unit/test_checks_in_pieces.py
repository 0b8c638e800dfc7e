"""Spot checks go on in pieces, so that nothing else that a node owes a round waits for a whole one."""

from collections.abc import Sequence

import numpy as np
import pytest

from node.duties.lasting_island import Checks
from node.exchange.spot_checks import SpotCheckReady, piece_of
from protocol.wire.findings import SpotChecked
from protocol.wire.messages import SpotCheckAsked
from protocol.wire.rounds import AUDIT_ROUNDS, LEAST_CHECKED, NodeId

BATCH = 16
NUM = 40


def ready_of(round: int, name: str = "b", num: int = NUM) -> SpotCheckReady:
    return SpotCheckReady(
        asked=SpotCheckAsked(round=round, contributor_id=NodeId(name), seed=1, seconds=10.0),
        fragment=0,
        half=np.zeros(1, np.float32),
        leased=tuple(range(num)),
        unleased=tuple(range(1000, 1000 + num)),
    )


class Scene:
    """Ranks that know each sample by its place, and what a checker has reported."""

    def __init__(self, *, measures: bool = True) -> None:
        self.pieces: list[tuple[str, tuple[int, ...]]] = []
        self.reported: list[tuple[int, SpotChecked]] = []
        self._measures = measures
        self.checks = Checks(
            gains=self._gains,
            report=lambda round, found: self.reported.append((round, found)),
            batch=BATCH,
        )

    async def _gains(self, ready: SpotCheckReady, places: Sequence[int]) -> list[float] | None:
        self.pieces.append((ready.asked.contributor_id, tuple(places)))
        return [self.gain(place) for place in places] if self._measures else None

    @staticmethod
    def gain(place: int) -> float:
        return float((place * 7919) % 101) + (20.0 if place < 1000 else 0.0)

    def expected(self, ready: SpotCheckReady, num: int) -> SpotChecked:
        leased, unleased = ready.leased[:num], ready.unleased[:num]
        return ready.found(list(map(self.gain, leased)), list(map(self.gain, unleased)))

    async def measure(self, times: int) -> None:
        for _ in range(times):
            await self.checks.go_on()


async def test_a_check_is_measured_in_pieces_of_both_kinds_and_reported_once_it_is_whole() -> None:
    scene, ready = Scene(), ready_of(3)
    scene.checks.add(ready)
    size = piece_of(NUM, BATCH)
    num_pieces = -(-NUM // size)
    assert num_pieces > 4

    await scene.measure(num_pieces - 1)
    assert not scene.reported and scene.checks.of == "b"
    await scene.measure(1)

    assert scene.reported == [(3, scene.expected(ready, NUM))]
    assert scene.checks.of is None
    measured = [place for _, places in scene.pieces for place in places]
    assert sorted(measured) == sorted((*ready.leased, *ready.unleased))
    for _, places in scene.pieces:
        assert sum(place < 1000 for place in places) == len(places) / 2 <= size


async def test_what_is_measured_when_a_check_gets_too_old_counts_as_so_many_samples() -> None:
    scene, ready, later = Scene(), ready_of(3), ready_of(4, "c")
    scene.checks.add(ready)
    scene.checks.add(later)
    size = piece_of(NUM, BATCH)
    pieces = -(-LEAST_CHECKED // size)
    await scene.measure(pieces)

    scene.checks.applied(3 + AUDIT_ROUNDS - 2)
    assert not scene.reported, "one more round may be committed before findings count no more"
    scene.checks.applied(3 + AUDIT_ROUNDS - 1)

    assert scene.reported == [(3, scene.expected(ready, pieces * size))]
    assert scene.reported[0][1].num_samples == pieces * size < NUM
    await scene.measure(-(-NUM // size))
    assert scene.reported[1:] == [(4, scene.expected(later, NUM))], (
        "and nothing of it is in the next"
    )


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
async def test_who_trained_samples_that_alone_have_no_loss_is_not_accused(loss: float) -> None:
    scene, second = Scene(), ready_of(4, "c")
    scene.checks.add(ready_of(3))
    scene.checks.add(second)
    scene.gain = lambda place: loss if place == 1 else 1.0  # type: ignore[method-assign]
    await scene.measure(1)
    assert not scene.reported and scene.checks.of == "c"


async def test_fewer_samples_than_show_anything_are_reported_by_nobody() -> None:
    scene = Scene()
    scene.checks.add(ready_of(3))
    await scene.measure((LEAST_CHECKED - 1) // piece_of(NUM, BATCH))

    scene.checks.applied(3 + AUDIT_ROUNDS - 1)

    assert not scene.reported and scene.checks.of is None


async def test_a_check_of_an_undone_round_is_dropped_with_what_is_measured_of_it() -> None:
    scene, first, second = Scene(), ready_of(3), ready_of(2, "c")
    for ready in (first, second, ready_of(4, "d")):
        scene.checks.add(ready)
    await scene.measure(2)

    scene.checks.forget_after(2)
    await scene.measure(-(-NUM // piece_of(NUM, BATCH)))

    assert scene.reported == [(2, scene.expected(second, NUM))]
    assert scene.checks.of is None


async def test_where_ranks_measure_nothing_a_check_is_left_out() -> None:
    scene = Scene(measures=False)
    scene.checks.add(ready_of(3))
    await scene.measure(1)
    assert not scene.reported and scene.checks.of is None


@pytest.mark.parametrize("num", [LEAST_CHECKED, 23, 128])
def test_the_standard_error_of_a_score_is_one_for_any_number_of_samples(num: int) -> None:
    rng = np.random.default_rng(num)
    ready = ready_of(1, num=num)
    scores = [ready.found(*rng.normal(size=(2, num)).tolist()).score for _ in range(4000)]
    assert np.std(scores) == pytest.approx(1.0, abs=0.04)
    assert np.mean(scores) == pytest.approx(0.0, abs=0.06)


def test_a_state_that_moves_between_pieces_makes_no_score_larger() -> None:
    """Half of each piece is leased, so what all of its samples gain by the state is in both halves."""
    rng, num, size = np.random.default_rng(5), 32, 4
    ready = ready_of(1, num=num)
    scores = []
    for _ in range(4000):
        moved = np.repeat(rng.normal(scale=2.0, size=num // size), size)
        scores.append(ready.found(*(rng.normal(size=(2, num)) + moved).tolist()).score)
    assert np.std(scores) < 1.0


def test_a_piece_takes_half_an_inner_step_or_a_sixteenth_of_the_check() -> None:
    # Four passes for each leased sample, and a sample takes three passes to train.
    assert 4 * piece_of(128, 64) / (3 * 64) == 0.5
    assert piece_of(128, 512) == 192, "all of it, in less than half an inner step"
    assert piece_of(128, 2) == 8
    assert piece_of(16, 1) == 1
