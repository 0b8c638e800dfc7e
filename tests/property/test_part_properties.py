"""Bodies in parts, over streams that break anywhere."""

import random

from hypothesis import given
from hypothesis import strategies as st

from node.exchange.peers import LEAST_PART_BYTES
from node.exchange.transport.receiver import Assembly
from node.exchange.transport.sender import OutgoingBody
from node.exchange.transport.streams import part_bytes_for
from tests.property.effort import examples

SIZE = 5 * LEAST_PART_BYTES + 100  # six parts


@examples(30)
@given(seed=st.integers(0, 2**32), break_share=st.floats(0, 0.8))
def test_a_body_arrives_whole_in_any_order_and_over_streams_that_break(
    seed: int, break_share: float
) -> None:
    rng = random.Random(seed)
    body = rng.randbytes(SIZE)
    assembly = Assembly(body_bytes=SIZE, part_bytes=part_bytes_for(SIZE))
    out = OutgoingBody(SIZE)
    for _ in range(1000):
        if not out.missing:
            break
        under_way = [index for _ in range(3) if (index := out.take()) is not None]
        rng.shuffle(under_way)
        for index in list(under_way):
            if rng.random() < break_share:
                break
            if index not in assembly.held:  # else the acknowledgement alone was lost
                span = assembly.begin(index)
                assembly.write(span.start, body[span])
                assembly.end(index)
            if rng.random() < break_share:
                break
            out.acknowledge(index)
            under_way.remove(index)
        out.give_back(under_way)
    assert not out.missing
    assert assembly.is_complete
    assert assembly.body() == body
