"""Real processes in a network lab, whose addresses change and whose routers forget in mid-run."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.network.lab import NetworkLab
from lab.network.links import Link
from node.kept import kept_model
from tests.integration.lab_swarm import COORDINATOR, asked, started, swarm_in
from tests.integration.typed_commands import Running, Swarm
from tests.tiny_runs import tiny_text

NODES = ("one", "two", "three")
ACCESS = Link(up_bits_per_second=20e6, down_bits_per_second=100e6, delay_seconds=0.02)
SLOW = Link(up_bits_per_second=200e3, down_bits_per_second=2e6, delay_seconds=0.02)
"""Half of a round goes by while bodies of nine kilobytes are on their way."""

pytestmark = pytest.mark.usefixtures("may_make_network_labs")

Change = Callable[[NetworkLab, str], object]


def run_of(rounds: int) -> str:
    return tiny_text(
        run={"name": "moving", "rounds": rounds, "min_nodes": len(NODES)},
        inner={"steps": 1_000_000},  # rounds end at their deadline
        deadlines={"train": 2, "contribute": 12, "commit": 24},
        evaluation={"every_rounds": rounds},
    )


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    with NetworkLab(dict.fromkeys((COORDINATOR, *NODES), ACCESS)) as lab:
        yield lab


@pytest.fixture
def begin(lab: NetworkLab, tmp_path: Path) -> Iterator[Callable[[int], Swarm]]:
    with ExitStack() as stack:

        def begun(rounds: int) -> Swarm:
            return stack.enter_context(swarm_in(lab, tmp_path / "swarm", run_of(rounds)))

        yield begun


def no_round_is_lost(
    lab: NetworkLab,
    swarm: Swarm,
    running: dict[str, Running],
    *,
    most_cut: int,
    most_void: int = 0,
) -> None:
    """The run ends with the same state everywhere, and no slice of any round was void, or few were.

    At most one in a round: that of a reducer which the coordinator did not hear in time. No more rounds
    than `most_cut` went without a delivery.
    """
    for node in running.values():
        node.ends(set())
        assert "run finished" in node.log
    assert "node lost" not in swarm.coordinator.log
    run, rounds = asked(lab, swarm, "status")["run"], asked(lab, swarm, "rounds")
    assert (run["phase"], run["digests_agree"]) == ("finished", True)
    assert len(rounds) == run["committed_round"]
    void = [r["num_slices"] - r["num_committed_slices"] for r in rounds]
    assert max(void) <= 1 and sum(void) <= most_void, void
    assert all(r["num_participants"] == len(NODES) for r in rounds), rounds
    cut = [r["round"] for r in rounds if r["num_contributors"] < r["num_participants"]]
    assert len(cut) <= most_cut, cut
    models = [kept_model(swarm.folder / name) for name in NODES]
    assert {model.outer_digest.hex() for model in models} == {run["outer_digest"]}


@pytest.mark.nightly
def test_a_node_that_moves_in_mid_run_is_found_at_its_new_address_and_misses_no_round(
    lab: NetworkLab, begin: Callable[[int], Swarm]
) -> None:
    swarm = begin(8)
    running = started(lab, swarm, NODES)
    for number, name in enumerate(NODES, start=2):
        swarm.coordinator.says("round opened", times=number)
        lab.move(name)
    swarm.coordinator.says("round opened", times=6)
    lab.forget_conversations("one")  # and nobody tells it so
    no_round_is_lost(lab, swarm, running, most_cut=1)
    for name, node in running.items():
        assert f"peers_are_told=('/ip4/{lab.address(name)}/tcp/" in node.log
    assert all(lab.traffic(a, b).cut_packets for a, b in [("one", "two"), ("two", "one")])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("change", "every_rounds", "most_void"),
    [(NetworkLab.move, 2, 0), (NetworkLab.forget_conversations, 5, 4)],
    ids=["moves", "forgets"],
)
def test_a_swarm_in_which_every_pair_changes_address_again_and_again_loses_no_round(
    lab: NetworkLab,
    begin: Callable[[int], Swarm],
    change: Change,
    every_rounds: int,
    most_void: int,
) -> None:
    """What a router forgets nobody tells: it is found within six seconds, and deadlines have five."""
    for name in NODES:
        lab.set_link(name, SLOW)
    num_rounds = 20  # as many as 'atoll rounds' tells of
    swarm = begin(num_rounds)
    running = started(lab, swarm, NODES)
    changing = itertools.cycle(NODES)
    changes = range(2, num_rounds, every_rounds)
    for number in changes:
        swarm.coordinator.says("round opened", times=number)
        change(lab, next(changing))
    no_round_is_lost(lab, swarm, running, most_cut=len(changes), most_void=most_void)
