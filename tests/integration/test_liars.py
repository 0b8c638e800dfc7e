"""Members that lie, as real processes: the node's real command with one thing replaced (liar.py)."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.swarm.penalties import FEWEST_ROUNDS_OUT, MOST_AGAINST
from lab.simulation.swarm import Life, simulate
from node.island.data.dataset import read_corpus
from tests.integration.liar import LIES
from tests.integration.typed_commands import ROOT, Running, Swarm, atoll, done, rests, until
from tests.tiny_runs import tiny, tiny_text

HONEST = ("one", "two", "three")
SECONDS = 240.0
FIVE_ROUNDS: dict[str, dict[str, object]] = {"run": {"rounds": 5, "min_nodes": 3}}
DEADLINES = {"train": 60, "contribute": 90, "commit": 120}


class Scene:
    """A swarm with some liars in it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        run = {"name": "liars", "rounds": 5, "min_nodes": 3, **changes.pop("run", {})}
        tables = {"deadlines": DEADLINES, "evaluation": {"every_rounds": 1}, **changes}
        self.swarm = Swarm(folder / "swarm", tiny_text(run=run, **tables))

    def start(self, lie: str, *liars: str) -> dict[str, Running]:
        """All are in the first round. Each honest node has an invite of its own; the liars have one."""
        for name in HONEST:
            self.swarm.join(name, self.swarm.invite())
        invite = self.swarm.invite("--uses", str(len(liars)))
        for name in liars:
            self.swarm.join(name, invite)
        self.owner("run", "pause")
        honest = {name: self.swarm.start_node(name) for name in HONEST}
        started = honest | {name: self.start_liar(name, lie) for name in liars}
        self.swarm.coordinator.says("node ready", times=len(started))
        self.owner("run", "resume")
        return started

    def start_liar(self, name: str, lie: str) -> Running:
        assert lie in LIES
        through = (sys.executable, "-P", str(ROOT / "tests" / "integration" / "liar.py"), lie)
        home = rests(self.swarm.folder / name)
        return self.swarm.start("node", "start", "--dir", home, through=through)

    def owner(self, *command: str) -> str:
        """What the run owner types, and what is answered."""
        return done(atoll(*command, "--dir", self.swarm.home, COLUMNS="400"))

    def asked(self, *command: str) -> Any:
        return json.loads(done(atoll(*command, "--json", "--dir", self.swarm.home)))

    def rounds(self) -> list[Any]:
        """Closed rounds, oldest first."""
        return list(reversed(self.asked("rounds", "--limit", "100")))

    def nodes(self) -> dict[str, Any]:
        """All nodes by their names."""
        return {node["node_name"]: node for node in self.asked("nodes")}

    def screened(self) -> set[str]:
        """Whose contributions were in a round."""
        return {name for name, node in self.nodes().items() if node.get("screening")}

    def losses(self) -> list[float]:
        """Held-out losses, oldest first."""
        return [each["loss"] for each in self.asked("status")["run"]["held_out_losses"]]

    def finishes(self) -> None:
        self.swarm.coordinator.says("run finished")

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        until(is_so, f"{what}\n{self.swarm.coordinator.log}", seconds=SECONDS)


@pytest.fixture
def scene_of(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def scene(**changes: dict[str, object]) -> Scene:
        scenes.append(Scene(tmp_path, **changes))
        return scenes[-1]

    yield scene
    for each in scenes:
        each.swarm.end()


@pytest.mark.nightly
def test_who_contributes_a_thousand_times_too_much_is_left_out_and_named_and_expelled(
    scene_of: Callable[..., Scene],
) -> None:
    # Rounds end at their deadline: none is over before the test has seen it.
    scene = scene_of(
        run={"rounds": 9, "min_nodes": 3},
        inner={"steps": 1_000_000},
        deadlines={"train": 2, "contribute": 30, "commit": 60},
    )
    started = scene.start("contributes too much", "liar")
    scene.until(lambda: len(scene.screened()) == 4, "contributions of all")
    nodes = scene.nodes()
    screening = nodes["liar"]["screening"]
    assert screening["num_left_out"] == screening["num_contributions"] > 0
    assert nodes["liar"]["confirmed_work_share"] == 0
    assert not any(nodes[name]["screening"]["num_left_out"] for name in HONEST)
    table = scene.owner("nodes")
    assert re.search(r" (\d+) left out of \1 ", table) and "none of" in table, table
    assert "liar: " in scene.owner("rounds")

    scene.owner("nodes", "expel", "liar", "--reason", "shouts")
    started["liar"].ends_with(79, "shouts")
    scene.finishes()
    rounds = scene.rounds()
    named = [{one["node_name"]: one for one in closed.get("screened", [])} for closed in rounds]
    assert "liar" in named[0] and not any(set(names) - {"liar"} for names in named)
    losses = scene.losses()
    assert losses[-1] < 0.9 * losses[0]
    # How much is trained in two seconds is the machine's matter; near the end losses go up and down a little.
    assert all(loss < 1.05 * min(losses[:number]) for number, loss in enumerate(losses) if number)


@pytest.mark.nightly
def test_who_pulls_against_the_others_sits_out_and_comes_back_to_one_round(
    scene_of: Callable[..., Scene],
) -> None:
    # Now and then a round speaks for it, on a busy machine, and it is a few rounds more until it is out.
    run = {"rounds": MOST_AGAINST + FEWEST_ROUNDS_OUT + 28, "min_nodes": 3}
    scene = scene_of(run=run, outer={"merge": "agreeing"}, evaluation={"every_rounds": 8})
    started = scene.start("pulls backwards", "liar")
    scene.finishes()
    num_nodes = {closed["round"]: closed["num_participants"] for closed in scene.rounds()}
    assert set(num_nodes) == set(range(1, run["rounds"] + 1))
    assert set(num_nodes.values()) == {3, 4}
    without = [number for number, num in num_nodes.items() if num == len(HONEST)]
    out_since, back = without[0], without[0] + FEWEST_ROUNDS_OUT
    assert out_since > MOST_AGAINST
    assert without[:FEWEST_ROUNDS_OUT] == list(range(out_since, back))
    assert back not in without, "it comes back"
    assert any(number > back for number in without), "and sits out again"
    assert "most of the others point against" in scene.swarm.coordinator.log
    assert "twice as far as the others' does, or against most" in started["liar"].log
    nodes, digest = scene.nodes(), scene.rounds()[-1]["outer_digest"]
    assert {node["heartbeat"]["outer_digest"] for node in nodes.values()} == {digest}
    losses = scene.losses()
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.nightly
def test_who_reduces_backwards_is_audited_and_put_out_and_what_it_made_is_undone(
    scene_of: Callable[..., Scene],
) -> None:
    scene = scene_of(run={"rounds": 6, "min_nodes": 3}, outer={"audit": 1.0})
    scene.start("reduces backwards", "liar")
    scene.finishes()
    nodes, last = scene.nodes(), scene.rounds()[-1]
    assert nodes["liar"]["state"] == "quarantined"
    for name in HONEST:
        heartbeat = nodes[name]["heartbeat"]
        assert (heartbeat["outer_round"], heartbeat["outer_digest"]) == (6, last["outer_digest"])
    audit = scene.owner("audit")
    assert "liar was quarantined" in audit and "found another result than it has signed" in audit
    assert "the coordinator" in audit and "liar is convicted" in audit, audit
    assert audit.count("(proven by signed findings of") == 2, audit
    rounds = scene.rounds()
    assert ": agreed" in " ".join(closed["reason"] for closed in rounds)
    assert {closed["incarnation"] for closed in rounds if closed["round"] >= 3} == {1}
    assert scene.asked("status")["run"]["digests_agree"]
    losses = scene.losses()
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.nightly
def test_who_makes_results_that_do_not_decode_is_put_out_at_once_and_no_round_waits(
    scene_of: Callable[..., Scene],
) -> None:
    scene = scene_of(run={"rounds": 5, "min_nodes": 3})
    scene.start("reduces to nonsense", "liar")
    scene.finishes()
    assert scene.nodes()["liar"]["state"] == "quarantined"
    audit = scene.owner("audit")
    assert "liar was quarantined" in audit and "of round 3 that does not decode" in audit, audit
    assert audit.count("(proven by its signed result, which") == 1, audit
    rounds = scene.rounds()
    assert all(closed["num_committed_slices"] == closed["num_slices"] for closed in rounds)
    assert max(closed["seconds"] for closed in rounds) < DEADLINES["contribute"]
    assert {closed["incarnation"] for closed in rounds} == {0}, "nothing had to be undone"
    digest, nodes = rounds[-1]["outer_digest"], scene.nodes()
    for name in HONEST:
        heartbeat = nodes[name]["heartbeat"]
        assert (heartbeat["outer_round"], heartbeat["outer_digest"]) == (5, digest)


@pytest.fixture(scope="module")
def clean_loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss that four honest nodes come to."""
    spec = tiny(**FIVE_ROUNDS)
    folder = tmp_path_factory.mktemp("text")
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=folder
    )
    return simulate(spec, lives=[Life()] * 4, corpus=corpus).held_out[-1].loss


@pytest.mark.nightly
def test_who_contributes_a_thousand_times_too_much_costs_the_others_nothing_but_its_work(
    scene_of: Callable[..., Scene], clean_loss: float
) -> None:
    scene = scene_of(**FIVE_ROUNDS)
    scene.start("contributes too much", "liar")
    scene.finishes()
    assert scene.losses()[-1] < 1.05 * clean_loss
    nodes = scene.nodes()
    assert nodes["liar"]["screening"]["num_left_out"] > 0
    assert not any(nodes[name]["screening"]["num_left_out"] for name in HONEST)


@pytest.mark.nightly
def test_two_of_one_invite_that_make_up_states_are_the_ones_that_diverge(
    scene_of: Callable[..., Scene],
) -> None:
    scene = scene_of(run={"rounds": 5, "min_nodes": 3})
    started = scene.start("makes up states", "liar-1", "liar-2")
    scene.finishes()
    log = scene.swarm.coordinator.log
    diverged = [line for line in log.splitlines() if "node diverged" in line]
    assert any("liar-" in line for line in diverged), log
    assert not any(f"node={name}" in line for line in diverged for name in HONEST), log
    nodes, digest = scene.nodes(), scene.rounds()[-1]["outer_digest"]
    for name in HONEST:
        heartbeat = nodes[name]["heartbeat"]
        assert (heartbeat["outer_round"], heartbeat["outer_digest"]) == (5, digest)
        assert "was wrong" not in started[name].log and "made up" not in started[name].log


@pytest.mark.nightly
def test_who_keeps_its_lease_and_reports_nothing_holds_up_one_round_and_no_other(
    scene_of: Callable[..., Scene],
) -> None:
    deadlines = {"train": 20, "contribute": 25, "commit": 30}
    scene = scene_of(run={"rounds": 5, "min_nodes": 3}, deadlines=deadlines)
    scene.start("reports nothing", "liar")
    scene.finishes()
    first, *later = scene.rounds()
    assert all(2 * closed["seconds"] < first["seconds"] for closed in later)
    assert all(closed["num_committed_slices"] == closed["num_slices"] for closed in later)
    losses = scene.losses()
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.nightly
def test_who_says_that_it_trains_20000_times_as_fast_takes_nobodys_steps(
    scene_of: Callable[..., Scene],
) -> None:
    scene = scene_of(run={"rounds": 5, "min_nodes": 3}, inner={"steps": 40})
    scene.start("boasts", "liar")
    scene.finishes()
    nodes = scene.nodes()
    tokens = {name: int(node["committed_tokens"]) for name, node in nodes.items()}
    assert tokens["liar"] > 0
    assert all(3 * tokens[name] > tokens["liar"] for name in HONEST), tokens
