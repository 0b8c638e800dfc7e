"""Chaos runs are drawn from a seed: the same faults again, everywhere where faults may be."""

import random
from collections import Counter

import pytest

from benchmarks.chaos.plan import (
    COORDINATOR_PHASES,
    KINDS,
    NODE_PHASES,
    QUIET_ROUNDS,
    PlannedFault,
    plan_faults,
)

NAMES = [f"node-{number}" for number in range(1, 7)]
JOINERS = ["joiner-1", "joiner-2", "joiner-3"]


def plan(seed: int = 0, *, rounds: int = 60, num_faults: int = 60) -> tuple[PlannedFault, ...]:
    return plan_faults(
        random.Random(seed), names=NAMES, rounds=rounds, num_faults=num_faults, joiners=JOINERS
    )


def test_a_seed_gives_the_same_faults_again_and_another_seed_others() -> None:
    assert plan(0) == plan(0)
    assert plan(0) != plan(1)


@pytest.mark.parametrize("seed", range(20))
def test_faults_come_in_order_and_leave_the_ends_of_the_run_alone(seed: int) -> None:
    rounds = [fault.round for fault in plan(seed)]
    assert rounds == sorted(rounds) and len(rounds) == 60
    assert min(rounds) > QUIET_ROUNDS and max(rounds) <= 60 - 2 * QUIET_ROUNDS
    phases = [fault.phase for fault in plan(seed)]
    assert 10 < phases.count(None) < 50  # at any time
    for fault in plan(seed):
        if fault.phase is not None:
            is_node = fault.kind != "coordinator"
            assert fault.phase in (NODE_PHASES if is_node else COORDINATOR_PHASES)


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_of_fault_is_in_a_run_of_four(seed: int) -> None:
    assert Counter(f.kind for f in plan(seed, rounds=8, num_faults=4)) == Counter(
        kind for kind, _ in KINDS
    )


def test_kinds_come_in_their_proportions() -> None:
    counts = Counter(fault.kind for fault in plan())
    assert counts == {"daemon": 30, "rank": 12, "p2pd": 9, "coordinator": 9}


def test_joiners_come_for_daemons_that_do_not_come_back_and_are_victims_then() -> None:
    planned = plan()
    coming = [(index, f) for index, f in enumerate(planned) if f.joiner is not None]
    assert [fault.joiner for _, fault in coming] == JOINERS
    assert all(fault.kind == "daemon" for _, fault in coming)
    for index, fault in enumerate(planned):
        joined = {f.joiner for i, f in coming if i < index}
        expected = set() if fault.kind == "coordinator" else {*NAMES, *joined}
        assert set(fault.victims) == expected
