"""A round's arithmetic as a whole: bits that no number of threads changes, streams that are read once."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from benchmarks.outer_arithmetic import PARTS, RoundsOfOneNode, Stages, measured
from node.exchange.codecs import entropy
from node.exchange.codecs.codec import ONE_THREAD, TILE_ELEMENTS, Tiles
from node.exchange.codecs.deflate import inflated_head
from node.exchange.codecs.registry import CODECS
from protocol.run.node_memory import CODEC_BITS, daemon_bytes
from protocol.run.run_spec import OuterSection

VALUES = 5 * TILE_ELEMENTS + 300
NODES = 2


def rounds_of(codec: str, *, threads: int = 1, fragments: int = 1) -> RoundsOfOneNode:
    return RoundsOfOneNode(
        codec=codec,
        values=VALUES,
        nodes=NODES,
        fragments=fragments,
        tiles=Tiles(threads) if threads > 1 else ONE_THREAD,
    )


def no_clock() -> Stages:
    return Stages(lambda: 0.0)


@pytest.mark.parametrize("codec", ["int4", "ec2", "topk64"])
def test_whatever_the_number_of_threads_rounds_come_to_the_same_bits(codec: str) -> None:
    """State, what is owed, what the reducer keeps and each body that travels."""
    found = []
    for threads in (1, 2, 5):
        rounds = rounds_of(codec, threads=threads, fragments=2)
        bodies = []
        for _ in range(4):
            _, results = rounds.run(no_clock())
            bodies += [payload.digest for payload in results.values()]
        owed = {name: vector.tobytes() for name, vector in rounds.outer.owed().tensors().items()}
        found.append((rounds.outer.digest, owed, bodies))
    assert found[0] == found[1] == found[2]
    assert len(found[0][1]) > 1  # the reducer's error is among it


def test_a_stream_is_inflated_where_it_arrives_and_never_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Contributions once at their reducer, results once when they come; what is our own, not at all."""
    num_inflated = 0
    inflate = inflated_head

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal num_inflated
        num_inflated += 1
        return inflate(*arguments, **named)

    rounds = rounds_of("ec2")
    own, others = (
        sum(-(-part.num_elements // TILE_ELEMENTS) for part in rounds.slices if is_own(part))
        for is_own in (
            lambda part: part.reducer_id == rounds.ids[0],
            lambda part: part.reducer_id != rounds.ids[0],
        )
    )
    monkeypatch.setattr(entropy, "inflated_head", counted)
    rounds.run(no_clock())
    assert num_inflated == NODES * own + others


def test_no_more_memory_is_held_than_what_is_said() -> None:
    """Of eight fragments: three vectors of the model, one of a fragment, the error of what is reduced."""
    tracemalloc.start()
    try:
        rounds = rounds_of("int4", fragments=8)
        for _ in range(16):
            rounds.run(no_clock())
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    num_elements = rounds.outer.layout.num_elements
    said = daemon_bytes(
        num_elements=num_elements,
        largest_fragment=VALUES,
        num_reducers=NODES,
        keeps_error=True,
        uplink="int4",
        downlink="int4",
        is_audited=False,
    )
    assert 14.5 * num_elements < held < said < 15.2 * num_elements
    kept = rounds.outer.owing.reducer_error.values
    assert kept is not None
    assert sum(values.size for values in kept.values()) == pytest.approx(
        num_elements / NODES, rel=0.01
    )
    assert np.count_nonzero(rounds.outer.owed().residual) > 0


def test_each_codec_is_counted_with_bits_that_its_bodies_have() -> None:
    values = np.random.default_rng(0).standard_normal(1 << 21, dtype=np.float32)
    assert set(CODEC_BITS) == {codec.name.partition("/")[0] for codec in CODECS}
    for codec in CODECS:
        bits = 8 * len(codec.encode(values)) / values.size
        assert 0.9 * bits <= CODEC_BITS[codec.name.partition("/")[0]] <= 1.1 * bits, codec.name


@pytest.mark.parametrize("compares", [True, False])
def test_the_benchmark_times_comparisons_where_it_is_asked_to(compares: bool) -> None:
    rounds = RoundsOfOneNode(
        codec="int4",
        values=VALUES,
        nodes=3,
        fragments=1,
        tiles=ONE_THREAD,
        rules=OuterSection(merge="agreeing" if compares else "mean"),
        finds_agreement=compares,
    )
    (found,) = measured(rounds, values=VALUES, repeats=1, threads=1)
    assert {part for part in PARTS if found.seconds.get(part)} == (
        set(PARTS) if compares else set()
    )
