from fractions import Fraction

import numpy as np
import pytest

from node.exchange.outer_optimizer import RateScale, rate_scale_of
from protocol.run.run_spec import InnerSection, OuterSection, RunSection, RunSpec
from protocol.wire.rounds import Contributor, NodeId

FULL = 1000
"""Samples of a full round of min_nodes."""


def contributors(*samples: int) -> tuple[Contributor, ...]:
    return tuple(
        Contributor(node_id=NodeId(str(place)), samples=count, tokens=1)
        for place, count in enumerate(samples)
    )


def test_without_a_rule_the_rate_never_changes() -> None:
    scale = RateScale(scaling="none", full_round_samples=FULL)
    assert scale.of(contributors(1)) == scale.of(contributors(FULL, 7 * FULL)) == 1


def test_a_full_round_of_the_fewest_nodes_takes_the_rate_as_it_is() -> None:
    for scaling in ("sqrt", "cbrt"):
        scale = RateScale(scaling=scaling, full_round_samples=FULL)
        assert scale.of(contributors(FULL // 2, FULL // 2)) == 1


def test_the_cube_root_gives_the_published_rates() -> None:
    scale = RateScale(scaling="cbrt", full_round_samples=FULL)
    rates = [0.4 * float(scale.of(contributors(*[FULL] * nodes))) for nodes in (1, 2, 4, 8)]
    assert rates == pytest.approx([0.4, 0.504, 0.635, 0.8], abs=1e-3)


def test_fewer_steps_count_like_fewer_nodes() -> None:
    scale = RateScale(scaling="sqrt", full_round_samples=FULL)
    assert scale.of(contributors(FULL // 4)) == scale.of(contributors(*[FULL // 8] * 2)) == 0.5


@pytest.mark.parametrize(("scaling", "degree"), [("sqrt", 2), ("cbrt", 3)])
def test_a_factor_is_the_root_to_all_bits_that_fp32_has(scaling: str, degree: int) -> None:
    """Judged in integers: no library's root is asked."""
    for tokens in (1, 2, 3, 999, 1001, 123_456_789, 2**62):
        factor = RateScale(scaling=scaling, full_round_samples=FULL).of(contributors(tokens))  # type: ignore[arg-type]
        assert factor.dtype == np.float32
        below, above = (
            Fraction(float(np.nextafter(factor, np.float32(side)))) for side in (0, np.inf)
        )
        assert below**degree < Fraction(tokens, FULL) < above**degree


def test_the_run_file_chooses() -> None:
    spec = RunSpec(
        run=RunSection(min_nodes=2),
        inner=InnerSection(steps=10),
        outer=OuterSection(scaling="sqrt"),
    )
    full_round = 2 * 10 * spec.inner.batch
    assert rate_scale_of(spec).of(contributors(4 * full_round)) == 2
