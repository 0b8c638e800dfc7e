"""Every place of the sample order has its sample, and nothing is kept to find it."""

import numpy as np
import pytest

from node.island.data.dataset import WINDOW, SampleOrder, permuted

HUGE = 10**15 + 37


def test_every_epoch_of_any_size_has_every_sample_once() -> None:
    for num_samples in range(1, 2001):
        samples = SampleOrder(seed=num_samples, num_samples=num_samples).indices(0, num_samples)
        assert np.array_equal(np.sort(samples), np.arange(num_samples))


def test_each_epoch_has_an_order_of_its_own() -> None:
    order = SampleOrder(seed=3, num_samples=50)
    first, second = order.indices(0, 50), order.indices(50, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert not np.array_equal(first, second)


def test_a_place_means_the_same_sample_however_it_is_asked_for() -> None:
    whole = SampleOrder(seed=3, num_samples=7).indices(0, 40)
    order = SampleOrder(seed=3, num_samples=7)
    for first in (30, 0, 5, 13):
        assert np.array_equal(order.indices(first, 10), whole[first : first + 10])
    assert not np.array_equal(SampleOrder(seed=4, num_samples=7).indices(0, 40), whole)


def test_places_of_a_huge_order_are_all_different() -> None:
    order = SampleOrder(seed=1, num_samples=HUGE)
    samples = np.concatenate([order.indices(first, 50_000) for first in (0, 10**9, HUGE - 50_000)])
    assert len(np.unique(samples)) == 150_000
    assert samples.min() >= 0 and samples.max() < HUGE
    # They are spread over all samples, as if drawn: the mean's deviation is 1/√12 of the size by √150000.
    assert samples.mean() / HUGE == pytest.approx(0.5, abs=4 / np.sqrt(12 * 150_000))


def test_every_sample_is_as_likely_at_every_place() -> None:
    """χ² of how often each sample is at each place, over its degrees of freedom, is near 1."""
    for num_samples in (5, 12, 30):
        num_epochs = 2000
        times = np.zeros((num_samples, num_samples))
        order = SampleOrder(seed=9, num_samples=num_samples)
        for epoch in range(num_epochs):
            found = order.indices(epoch * num_samples, num_samples)
            times[np.arange(num_samples), found] += 1
        expected = num_epochs / num_samples
        chi_squared = ((times - expected) ** 2 / expected).sum()
        freedom = (num_samples - 1) ** 2
        assert chi_squared / freedom == pytest.approx(1, abs=6 * np.sqrt(2 / freedom))


def test_another_key_gives_another_permutation() -> None:
    places = np.arange(1000, dtype=np.uint64)
    one, other = (permuted(places, 1000, np.full(10, key, np.uint64)) for key in (1, 2))
    assert (one == other).mean() < 0.02


def test_the_sample_order_never_changes() -> None:
    assert SampleOrder(seed=0, num_samples=10).indices(8, 6).tolist() == [6, 0, 9, 8, 0, 5]
    far = SampleOrder(seed=5, num_samples=10**12).indices(10**13 + 3, 3)
    assert far.tolist() == [707169238883, 636316106087, 372644529697]


def test_an_order_of_no_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        SampleOrder(seed=0, num_samples=0)


@pytest.mark.parametrize("num_samples", [7, 63, 640, 641, 6400, 20_000, 70_001])
@pytest.mark.parametrize("num_together", [2, 10])
def test_an_order_by_groups_has_every_sample_once_in_each_epoch(
    num_samples: int, num_together: int
) -> None:
    order = SampleOrder(seed=3, num_samples=num_samples, num_together=num_together)
    first, second = (order.indices(at, num_samples) for at in (0, num_samples))
    assert np.array_equal(np.sort(first), np.arange(num_samples))
    assert np.array_equal(np.sort(second), np.arange(num_samples))
    assert not np.array_equal(first, second)
    assert np.array_equal(
        order.indices(num_samples // 3, 7),
        np.concatenate((first, second))[num_samples // 3 : num_samples // 3 + 7],
    )


def test_a_stretch_of_places_draws_from_few_groups_all_over_the_data() -> None:
    num_samples, num_together = 1_000_000, 100
    order = SampleOrder(seed=3, num_samples=num_samples, num_together=num_together)
    pieces = order.indices(200_000, 3000) // num_together
    assert (
        len(np.unique(pieces)) <= 2 * 2 * WINDOW
    )  # groups lie across pieces, and windows across places
    assert pieces.max() - pieces.min() > 0.8 * num_samples / num_together
    plain = SampleOrder(seed=3, num_samples=num_samples).indices(200_000, 3000) // num_together
    assert len(np.unique(plain)) > 2000


def test_little_data_is_one_window() -> None:
    """Then groups would only make the order less mixed."""
    grouped = SampleOrder(seed=3, num_samples=640, num_together=10)
    plain = SampleOrder(seed=3, num_samples=640)
    assert np.array_equal(grouped.indices(0, 640), plain.indices(0, 640))
