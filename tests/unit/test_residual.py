import numpy as np
import pytest

from node.exchange.codecs.codec import Codec
from node.exchange.codecs.registry import CODECS, codec_named
from node.exchange.error_feedback import Residual

SPAN = slice(256, 768)


def normal(seed: int, num_elements: int = 512) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(num_elements, dtype=np.float32)


EXACT = ("fp32/1", "int8/1", "int4/1")
"""Codecs of which a value always comes back as zero or within a factor of two of itself."""


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_sent_and_kept_are_what_was_accumulated(codec: Codec) -> None:
    residual = Residual(1024)
    residual.values[SPAN] = normal(0)
    accumulated = residual.owed(SPAN, normal(1), normal(2))
    sent = codec.decode(codec.encode(accumulated), 512)
    residual.settle_taken(SPAN, accumulated, sent)
    kept = residual.values[SPAN]
    off = np.abs(kept.astype(np.float64) + sent - accumulated)
    if codec.name in EXACT:
        assert not off.any()
    assert (off <= np.spacing(np.abs(kept)) / 2).all()
    assert kept.any() == (codec.name != "fp32/1")


def test_a_value_that_comes_back_far_from_itself_is_rounded_once() -> None:
    """As sign codecs send it. The error is half a unit in the last place of what is kept, at most."""
    residual = Residual(512)
    accumulated = normal(1)
    sent = np.copysign(np.float32(1 / 3), accumulated)
    residual.settle_taken(slice(0, 512), accumulated, sent)
    off = np.abs(residual.values.astype(np.float64) + sent - accumulated)
    assert off.any()
    assert (off <= np.spacing(np.abs(residual.values)) / 2).all()


def test_a_missed_pseudo_gradient_counts_in_the_next_round() -> None:
    residual = Residual(1024)
    first = residual.owed(SPAN, normal(1), normal(2))
    np.testing.assert_array_equal(first, normal(1) - normal(2))
    residual.settle_missed(SPAN, first)
    second = residual.owed(SPAN, normal(3), normal(4))
    np.testing.assert_array_equal(second, (normal(3) - normal(4)) + first)


def test_owing_settles_nothing() -> None:
    residual = Residual(512)
    residual.values[:] = normal(0)
    published = normal(2)
    residual.owed(slice(0, 512), normal(1), published)
    assert residual.values.tobytes() == normal(0).tobytes()
    assert published.tobytes() == normal(2).tobytes()


def test_other_spans_are_left_alone() -> None:
    residual = Residual(1024)
    residual.values[:] = normal(0, 1024)
    residual.settle_missed(SPAN, normal(1))
    residual.settle_taken(SPAN, normal(1), normal(2))
    np.testing.assert_array_equal(residual.values[:256], normal(0, 1024)[:256])
    np.testing.assert_array_equal(residual.values[768:], normal(0, 1024)[768:])


def test_without_error_feedback_only_missed_work_is_kept() -> None:
    residual = Residual(1024, error_feedback=False)
    codec = codec_named("int4")
    accumulated = residual.owed(SPAN, normal(1), normal(2))
    residual.settle_missed(SPAN, accumulated)
    np.testing.assert_array_equal(residual.values[SPAN], accumulated)
    accumulated = residual.owed(SPAN, normal(3), normal(4))
    residual.settle_taken(SPAN, accumulated, codec.decode(codec.encode(accumulated), 512))
    assert not residual.values.any()


def test_old_errors_decay_and_missed_work_does_not() -> None:
    residual = Residual(1024, decay=0.75)
    accumulated = residual.owed(SPAN, normal(1), normal(2))
    residual.settle_missed(SPAN, accumulated)
    np.testing.assert_array_equal(residual.values[SPAN], accumulated)
    sent = normal(3)
    residual.settle_taken(SPAN, accumulated, sent)
    np.testing.assert_array_equal(residual.values[SPAN], (accumulated - sent) * np.float32(0.75))


def test_a_reducers_error_is_owed_beside_all_else() -> None:
    residual = Residual(1024)
    residual.values[SPAN] = normal(0)
    residual.add(SPAN, normal(1))
    np.testing.assert_array_equal(residual.values[SPAN], normal(0) + normal(1))
    assert not residual.values[:256].any()


def test_what_was_settled_does_not_change_with_its_source() -> None:
    residual = Residual(512)
    accumulated = normal(1)
    residual.settle_missed(slice(0, 512), accumulated)
    accumulated[:] = 0
    assert residual.values.tobytes() == normal(1).tobytes()


@pytest.mark.parametrize(
    "span", [slice(900, 1412), slice(-512, None), slice(0, 1024, 2), slice(0, 1)]
)
def test_a_span_that_does_not_fit_is_refused(span: slice) -> None:
    residual = Residual(1024)
    with pytest.raises(ValueError, match="slice"):
        residual.settle_missed(span, normal(1))
    assert not residual.values.any()
