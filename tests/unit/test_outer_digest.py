"""The digest of an outer state: kept up to date from what has changed, it is that of the whole."""

from functools import partial
from typing import Any

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node import outer_state
from node.exchange.codecs.codec import Tiles
from node.exchange.outer_optimizer import Nesterov, OuterOptimizer, Sgd
from node.outer_state import PIECE_ELEMENTS, OuterDigest, Vector, outer_digest
from protocol.run.models import Layout
from protocol.wire.rounds import BLOCK
from tests.unit.exchange_scene import A, B, commit_of, outer_of, result_of
from tests.unit.golden.golden_file import matches_golden

NUM = 1000


def as_described(parameters: Vector, momentum: Vector, piece_elements: int) -> bytes:
    """By the words of docs/protocol.md."""
    state = parameters.astype("<f4").tobytes() + momentum.astype("<f4").tobytes()
    piece_bytes = 4 * piece_elements
    pieces = [
        blake3.blake3(state[start : start + piece_bytes]).digest()
        for start in range(0, len(state), piece_bytes)
    ]
    return pieces[0] if len(pieces) == 1 else blake3.blake3(b"".join(pieces)).digest()


def state_of(num_elements: int) -> tuple[Vector, Vector]:
    parameters = (np.arange(num_elements, dtype=np.int64) * 2654435761 % 1000003).astype(np.float32)
    return parameters, parameters[::-1] / np.float32(8)


def test_the_digest_of_a_state_never_changes() -> None:
    assert PIECE_ELEMENTS == 1 << 19  # a change of it is a change of the protocol
    digests = [outer_digest(*state_of(num)) for num in (100, PIECE_ELEMENTS // 2, 700_001)]
    assert matches_golden("outer-digests", b"".join(digests))
    for digest, num in zip(digests, (100, PIECE_ELEMENTS // 2, 700_001), strict=True):
        assert digest == as_described(*state_of(num), PIECE_ELEMENTS)


edits = st.lists(st.tuples(st.integers(0, NUM - 1), st.integers(1, NUM)), max_size=4)


@given(piece=st.integers(1, 2 * NUM + 1), edits=edits, has_momentum_changed=st.booleans())
def test_what_changed_is_enough_to_read(
    piece: int, edits: list[tuple[int, int]], has_momentum_changed: bool
) -> None:
    parameters, momentum = state_of(NUM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outer_state, "PIECE_ELEMENTS", piece)
        digest = OuterDigest(parameters, momentum, each_run=partial(Tiles(3).each_run, unit=1))
        spans = [slice(first, min(first + length, NUM)) for first, length in edits]
        for number, span in enumerate(spans):
            parameters[span] += np.float32(1 + number)
            if has_momentum_changed:
                momentum[span] -= np.float32(1 + number)
        digest.renew(spans, has_momentum_changed=has_momentum_changed)
        assert digest.value == as_described(parameters, momentum, piece)
        assert digest.value == outer_digest(parameters, momentum)


def test_what_has_not_changed_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer_state, "PIECE_ELEMENTS", 100)
    parameters, momentum = state_of(NUM)
    digest = OuterDigest(parameters, momentum)
    before = digest.value
    parameters[400] += 1
    digest.renew([slice(0, 400), slice(500, NUM)])
    assert digest.value == before
    digest.renew([slice(400, 401)], has_momentum_changed=False)
    assert digest.value == outer_digest(parameters, momentum) != before


@pytest.mark.parametrize(
    "optimizer", [Nesterov(learning_rate=0.6, momentum=0.9), Sgd(learning_rate=0.6)]
)
def test_after_every_commit_the_digest_is_that_of_the_whole_state(
    optimizer: OuterOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outer_state, "PIECE_ELEMENTS", 100)
    fragments = [[("a", (3 * BLOCK,))], [("b", (2 * BLOCK + 7,))]]
    outer = outer_of(A, layout=Layout.of(*fragments))
    outer._optimizer = optimizer
    seen = {outer.digest}
    for round in range(1, 6):
        fragment = round % 2
        index = round % 3  # of the other slices, all are void
        num_elements = BLOCK if index < 2 or fragment == 0 else 7
        result = result_of(
            np.full(num_elements, round, dtype=np.float32), sender_id=B, round=round, index=index
        )
        outer.apply(commit_of(outer, result, fragment=fragment), {index: result})
        assert outer.digest == outer.snapshot().outer_digest()
        seen.add(outer.digest)
    assert len(seen) == 6
    outer.restore(outer_of(A, layout=outer.layout).snapshot(), None)
    assert outer.digest == outer.snapshot().outer_digest()


def test_who_looks_while_the_state_moves_never_sees_a_round_with_anothers_digest() -> None:
    outer, other = outer_of(A), outer_of(A)
    seen = []
    renew = outer._digest.renew

    def looked_at(*spans: Any, **more: Any) -> None:
        seen.append((outer.position, (outer.round, outer.digest)))
        renew(*spans, **more)
        seen.append((outer.position, (outer.round, outer.digest)))

    outer._digest.renew = looked_at  # type: ignore[method-assign]
    first = outer.position
    result = result_of(np.ones(BLOCK, dtype=np.float32), sender_id=B)
    outer.apply(commit_of(outer, result), {0: result})
    second = outer.position
    outer.restore(other.snapshot(), None)
    assert [position for position, _ in seen] == [first, first, second, second]
    assert all(position == apart for position, apart in seen)
    assert (second.round, outer.position) == (1, first)
