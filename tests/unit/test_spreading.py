"""Which chunk a joiner asks whom for, where others fetch the same state."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from node.exchange.fetching import Job, Outcome, Silences
from node.exchange.peers import Waits
from node.exchange.state.spreading import ChunkMap, Spreading
from protocol.wire.rounds import Digest, NodeId

NUM_CHUNKS = 60
HOLDER = NodeId("holder")
ONE, OTHER, THIRD = (NodeId(name) for name in ("one", "other", "third"))
EVERY = range(NUM_CHUNKS)


def having(*chunks: int) -> ChunkMap:
    has = np.zeros(NUM_CHUNKS, dtype=np.bool_)
    has[list(chunks)] = True
    return has


def spreading_of(
    node_id: NodeId,
    *donors: NodeId,
    silences: Silences | None = None,
    maps: Mapping[NodeId, ChunkMap] = MappingProxyType({}),
) -> Spreading:
    spreading = Spreading(
        EVERY,
        donors,
        silences or Silences(lambda donor: 0.0, Waits()),
        node_id=node_id,
        num_chunks=NUM_CHUNKS,
        outer_digest=Digest(bytes(32)),
    )
    for other, chunk_map in maps.items():
        spreading.take_map(other, chunk_map)
    spreading.put_in_order()
    return spreading


def come_in_order(spreading: Spreading, most: int = NUM_CHUNKS) -> list[int]:
    """What is asked for, where all come as soon as they are asked for."""
    order: list[int] = []
    while len(order) < most and (job := spreading.begin(0.0)) is not None:
        order.append(job.key)
        spreading.end(job, Outcome.ARRIVED, 0.0)
    return order


def test_joiners_take_different_chunks_from_the_holder_without_a_word() -> None:
    nothing = having()
    names = (ONE, OTHER, THIRD)
    taken = {
        name: come_in_order(
            spreading_of(name, HOLDER, maps={n: nothing for n in names if n != name}), 12
        )
        for name in names
    }
    assert len(set().union(*taken.values())) == 36, "each of them another dozen"


def test_all_chunks_are_asked_for_in_the_end_whoever_they_fall_to() -> None:
    order = come_in_order(spreading_of(ONE, HOLDER, maps={OTHER: having(), THIRD: having()}))
    assert sorted(order) == list(EVERY)


def test_a_joiner_helps_another_from_the_end_of_its_list() -> None:
    one = come_in_order(spreading_of(ONE, HOLDER, maps={OTHER: having()}))
    other = come_in_order(spreading_of(OTHER, HOLDER, maps={ONE: having()}))
    num_ours = next(n for n in EVERY if set(one[:n]) | set(other[: NUM_CHUNKS - n]) == set(EVERY))
    assert one[num_ours:] == other[: NUM_CHUNKS - num_ours][::-1]


def test_what_the_fewest_others_have_is_asked_for_first() -> None:
    spreading = spreading_of(
        ONE, HOLDER, maps={OTHER: having(*range(50)), THIRD: having(*range(40))}
    )
    spreading.drop_donor(OTHER)
    spreading.drop_donor(THIRD)
    order = come_in_order(spreading)
    assert [set(order[:10]), set(order[10:20])] == [set(range(50, 60)), set(range(40, 50))]


def test_an_other_is_asked_for_chunks_of_its_map_alone() -> None:
    spreading = spreading_of(ONE, maps={OTHER: having(3, 5)})
    assert sorted(come_in_order(spreading)) == [3, 5]
    spreading.take_map(OTHER, having(3, 5, 7))
    assert come_in_order(spreading) == [7]


def test_while_the_holder_gives_what_is_rare_others_give_what_they_have() -> None:
    spreading = spreading_of(ONE, HOLDER, maps={OTHER: having(*range(30))})
    jobs = [spreading.begin(0.0) for _ in range(4)]
    asked = {(job.donor, job.key < 30) for job in jobs if job is not None}
    assert asked == {(HOLDER, False), (OTHER, True)}


def test_the_holder_is_asked_for_what_others_have_rather_than_for_nothing() -> None:
    spreading = spreading_of(ONE, HOLDER, maps={OTHER: having(*range(59))})
    order = [job for job in iter(lambda: spreading.begin(0.0), None) if job.donor == HOLDER]
    assert len(order) == 2
    assert order[0].key == 59


def test_one_that_has_all_of_it_counts_as_a_holder() -> None:
    spreading = spreading_of(ONE, HOLDER, maps={OTHER: having(1)})
    assert (spreading.num_whole, spreading.others) == (1, (OTHER,))
    spreading.take_map(OTHER, having(*EVERY))
    assert (spreading.num_whole, spreading.others) == (2, ())


def test_a_chunk_that_an_other_did_not_give_waits_for_the_next() -> None:
    spreading = spreading_of(ONE, maps={OTHER: having(3), THIRD: having(3)})
    first = spreading.begin(0.0)
    assert first is not None
    assert spreading.begin(0.0) is None, "nobody has anything else"
    spreading.end(first, Outcome.OUT, 0.0)
    second = spreading.begin(0.0)
    assert second is not None
    assert {first.donor, second.donor} == {OTHER, THIRD}
    assert spreading.begin(0.0) is None


def test_what_is_overdue_is_asked_of_another_while_nobody_has_the_rest() -> None:
    spreading = spreading_of(ONE, maps={OTHER: having(3), THIRD: having(3)})
    first = spreading.begin(0.0)
    assert first is not None
    spreading.hear(first.donor, 9.9)
    assert spreading.begin(9.9) is None
    at = 9.9 + spreading.seconds_until_overdue(9.9)
    second = spreading.begin(at)
    assert second is not None
    assert (second.key, {first.donor, second.donor}) == (3, {OTHER, THIRD})
    assert spreading.end(second, Outcome.ARRIVED, at) == (first,)


def test_one_that_sends_is_waited_for_rather_than_one_that_was_silent() -> None:
    silences = Silences(lambda donor: 0.0, Waits())
    silences.note(OTHER, 0.0)
    spreading = spreading_of(ONE, THIRD, silences=silences, maps={OTHER: having(1, 2)})
    asked = [job.donor for job in iter(lambda: spreading.begin(0.0), None)]
    assert asked == [THIRD, THIRD]
    spreading.drop_donor(THIRD)
    job = spreading.begin(0.0)
    assert job is not None
    assert job.donor == OTHER


def test_what_is_under_way_from_one_that_is_dropped_ends_by_itself() -> None:
    spreading = spreading_of(ONE, HOLDER, maps={OTHER: having(3)})
    jobs: list[Job[int]] = list(iter(lambda: spreading.begin(0.0), None))
    spreading.drop_donor(OTHER)
    assert spreading.num_asked == 2
    for job in jobs:
        assert spreading.end(job, Outcome.ARRIVED, 0.0) == ()
    assert len(come_in_order(spreading)) == NUM_CHUNKS - len(jobs)
