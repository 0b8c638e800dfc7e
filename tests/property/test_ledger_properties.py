"""Whatever is leased and whatever commits: every place is committed, leased or free, never two."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.swarm.ledger import Ledger, Places, free_again, lease, lease_again, reopen, settle
from protocol.wire.rounds import Assignment, NodeId
from tests.property.effort import examples

BATCH = 3
ROUNDS = st.lists(
    st.lists(  # for each participant: inner steps, and those that commit
        st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=5
    ),
    max_size=12,
)


def places_in(pieces: tuple[Places, ...]) -> list[int]:
    return [place for piece in pieces for place in range(piece.first, piece.end)]


@examples(600)
@given(rounds=ROUNDS)
def test_every_place_is_in_one_book_and_counts_once(rounds: list[list[tuple[int, int]]]) -> None:
    ledger, counted = Ledger(), set[int]()
    for participants in rounds:
        assignments, taken = [], {}
        for number, (steps, num_committed) in enumerate(participants):
            before = ledger
            ledger, (places,) = lease(ledger, [steps * BATCH])
            assert not set(places_in((places,))) & set(
                places_in((*before.committed, *before.leased))
            )
            node_id = NodeId(f"n{number}")
            taken[node_id] = min(steps, num_committed) * BATCH
            assignments.append(
                Assignment(
                    node_id=node_id,
                    inner_steps=steps,
                    first_sample=places.first,
                    num_samples=places.num_samples,
                )
            )
        ledger = settle(ledger, assignments, taken)
        for a in assignments:
            fresh = set(range(a.first_sample, a.first_sample + taken[a.node_id]))
            assert not counted & fresh
            counted |= fresh
        committed = places_in(ledger.committed)
        assert set(committed) == counted
        assert ledger.leased == ()
        free = places_in(free_again(ledger))
        assert sorted(committed + free) == list(range(ledger.frontier()))
        for piece, following in zip(ledger.committed, ledger.committed[1:], strict=False):
            assert piece.end < following.first, "neighbours are merged"
        assert all(p.first % BATCH == p.end % BATCH == 0 for p in ledger.committed)


def leased_one_by_one(ledger: Ledger, wanted: list[int]) -> tuple[Ledger, list[Places]]:
    """What `lease` promises, looking at all free pieces for each."""
    leased = []
    for num_samples in wanted:
        fitting = (
            piece.first
            for piece in free_again(ledger)
            if piece.num_samples >= num_samples or piece.end == ledger.frontier()
        )
        first = next(fitting, ledger.frontier())
        places = Places(first=first, end=first + num_samples)
        leased.append(places)
        ledger = replace(
            ledger,
            leased=tuple(sorted((*ledger.leased, places), key=lambda piece: piece.first)),
            frontiers={0: max(ledger.frontier(), places.end)},
        )
    return ledger, leased


SIZES = st.lists(st.integers(1, 6), max_size=20)


def assignments_of(leased: list[Places]) -> list[Assignment]:
    return [
        Assignment(
            node_id=NodeId(f"n{number}"),
            inner_steps=1,
            first_sample=places.first,
            num_samples=places.num_samples,
        )
        for number, places in enumerate(leased)
    ]


@examples(600)
@given(rounds=st.lists(st.tuples(SIZES, st.data()), max_size=6))
def test_leasing_for_many_at_once_is_leasing_for_one_after_the_other(
    rounds: list[tuple[list[int], st.DataObject]],
) -> None:
    ledger = Ledger()
    for wanted, data in rounds:
        expected = leased_one_by_one(ledger, wanted)
        assert lease(ledger, wanted) == expected
        ledger, leased = expected
        assignments = assignments_of(leased)
        taken = {
            a.node_id: data.draw(st.sampled_from((0, 0, a.num_samples // 2, a.num_samples)))
            for a in assignments
        }
        settled = settle(ledger, assignments, taken)
        assert reopen(settled, assignments, taken) == ledger
        assert lease_again(settle(ledger, assignments, {}), assignments) == ledger
        ledger = settled
