"""A run owner steers a run and its members, with real processes and the commands that people type."""

import json
import signal
from pathlib import Path
from typing import Any

from typed_commands import Swarm, atoll, done, refused, until

from node.kept import kept_model
from protocol.v1 import status_pb2
from tests.tiny_runs import tiny_text

RUN = tiny_text(
    run={"name": "steered", "rounds": 400, "min_nodes": 2},
    inner={"steps": 1_000_000},
    deadlines={"train": 1, "contribute": 20, "commit": 30},
    evaluation={"every_rounds": 500},
)


def owner(swarm: Swarm, *arguments: str) -> str:
    return done(atoll(*arguments, "--dir", swarm.home))


def run_of(swarm: Swarm) -> status_pb2.RunStatus:
    return swarm.status().run


def committed(swarm: Swarm, more: int) -> None:
    """Waits until so many more rounds are committed."""
    wanted = run_of(swarm).committed_round + more
    until(lambda: run_of(swarm).committed_round >= wanted, f"round {wanted}")


def test_a_run_is_paused_amended_extended_and_stopped_and_members_are_approved_and_expelled(
    swarm: Swarm,
) -> None:
    invite = swarm.invite("--uses", "2", "--label", "the rack")
    for name in ("a", "b"):
        swarm.join(name, invite)
    swarm.join("c", swarm.invite("--needs-approval"))
    a, b, c = (swarm.start_node(name) for name in ("a", "b", "c"))
    c.says("c has joined and waits until the run owner approves it")
    committed(swarm, 1)
    assert swarm.nodes()["c"].state == status_pb2.NODE_STATE_UNAPPROVED
    assert not c.has_torch() and "loading torch" not in c.log
    assert "may take part" in owner(swarm, "nodes", "approve", "c")
    c.says("applied")

    done(atoll("node", "pause", "--dir", swarm.folder / "c"))
    c.says("paused by its owner")
    resting = "waiting for its owner: 'atoll node resume'"
    until(lambda: swarm.nodes()["c"].heartbeat.activity == resting, "c to rest")
    until(lambda: swarm.nodes()["c"].inner_steps == 0, "c to be in no plan")
    committed(swarm, 2)
    # It is not where others are for as long as it applies a commit that they have applied.
    until(lambda: swarm.nodes()["c"].state == status_pb2.NODE_STATE_READY, "c to be up to date")
    newest = json.loads(owner(swarm, "rounds", "--json"))[0]
    assert newest["num_participants"] == newest["num_contributors"] == 2
    refused(atoll("node", "pause", "--dir", swarm.folder / "c"), 64, "is paused already")
    done(atoll("node", "resume", "--dir", swarm.folder / "c"))
    until(lambda: swarm.nodes()["c"].inner_steps > 0, "c to train again")

    refused(atoll("run", "resume", "--dir", swarm.home), 64, "the run is not paused")
    owner(swarm, "run", "pause", "--reason", "the cluster moves")
    until(lambda: not run_of(swarm).open_round, "the round in flight to end")
    assert "paused by the run owner since" in run_of(swarm).reason
    assert run_of(swarm).paused.endswith("'atoll run resume' goes on")
    at = run_of(swarm).committed_round
    swarm.coordinator.process.send_signal(signal.SIGKILL)
    swarm.coordinator.process.wait()
    swarm.start_coordinator()
    until(lambda: "paused by the run owner" in run_of(swarm).reason, "the pause to hold")
    refused(atoll("run", "pause", "--dir", swarm.home), 64, "paused already", "atoll run resume")
    assert (run_of(swarm).committed_round, run_of(swarm).open_round) == (at, 0)
    owner(swarm, "run", "resume")
    committed(swarm, 1)

    said = owner(swarm, "run", "amend", "outer.learning_rate=0.3", "inner.learning_rate=0.02")
    assert "inner.learning_rate = 0.02, outer.learning_rate = 0.3 from round" in said
    assert "run.rounds = 450" in owner(swarm, "run", "extend", "50")
    for name in ("a", "b", "c"):
        log = {"a": a, "b": b, "c": c}[name]
        log.says("run.rounds = 450")
    committed(swarm, 2)
    assert (run_of(swarm).total_rounds, len(run_of(swarm).amendments)) == (450, 2)
    shorter = atoll("run", "amend", "run.rounds=1", "--dir", swarm.home)
    refused(shorter, 64, "less than the rounds that have begun")

    owner(swarm, "nodes", "quarantine", "c", "--reason", "an odd loss")
    c.says("the run owner holds this node back")
    committed(swarm, 1)
    owner(swarm, "nodes", "readmit", "c")
    until(lambda: swarm.nodes()["c"].inner_steps > 0, "c to be back in a plan")

    assert "is expelled" in owner(swarm, "nodes", "expel", "c", "--reason", "it sends noise")
    c.ends_with(79, "the run owner has expelled c", "it sends noise")
    refused(atoll("status", "--dir", swarm.folder / "c"), 79, "it sends noise")
    late = swarm.start_node("c")
    late.ends_with(79, "the run owner has expelled c")
    committed(swarm, 1)

    memory = a.shared_memory(), b.shared_memory()
    assert "was stopped after round" in owner(swarm, "run", "stop", "--reason", "good enough")
    a.ends(memory[0])
    b.ends(memory[1])
    assert "the run owner has stopped the run after round" in a.log
    run = run_of(swarm)
    assert run.phase == status_pb2.RUN_PHASE_FINISHED and run.digests_agree
    assert run.committed_round == run.total_rounds == run.held_out_losses[-1].round
    assert not any("refetch" in log.log for log in (a, b)), "an amendment split the swarm"
    refused(atoll("run", "extend", "5", "--dir", swarm.home), 64, "the run is finished")

    told: list[dict[str, Any]] = json.loads(owner(swarm, "audit", "--json"))
    kinds = [ruling["kind"] for ruling in told]
    assert kinds == [
        *("invited", "joined", "joined", "invited", "joined", "approved"),
        *("paused", "resumed", "amended", "amended"),
        *("quarantined", "readmitted", "expelled", "stopped"),
    ]
    assert [ruling["before"] for ruling in told[1:]] == [ruling["digest"] for ruling in told[:-1]]
    assert "14 rulings, all signed, none missing" in owner(swarm, "audit")
    assert "the rack" in owner(swarm, "invite", "list")


def test_a_viewer_looks_on_and_may_do_nothing_else(swarm: Swarm) -> None:
    viewer = swarm.folder / "viewer"
    invite = swarm.invite("--role", "viewer", "--label", "the press")
    said = done(atoll("join", invite, "--dir", viewer, "--name", "press"))
    assert "as a viewer" in said and f"next: atoll status --watch --dir {viewer}" in said
    shown = json.loads(done(atoll("status", "--json", "--dir", viewer)))
    assert shown["run"]["run_name"] == "steered" and shown["nodes"] == []
    done(atoll("rounds", "--dir", viewer))
    refused(atoll("node", "start", "--dir", viewer), 77, "is a viewer's folder")
    for command in (("invite", "list"), ("nodes", "expel", "x"), ("run", "pause"), ("audit",)):
        refused(atoll(*command, "--dir", viewer), 77, "only the run owner may do this")
    owner(swarm, "nodes", "expel", "press")
    refused(atoll("status", "--dir", viewer), 79, "the run owner has expelled press")
    swarm.coordinator.stop(signal.SIGTERM)
    refused(atoll("run", "pause", "--dir", swarm.home), 69, "no coordinator answers")


def test_a_finished_run_goes_on_another_day_with_its_nodes_as_they_are(tmp_path: Path) -> None:
    run = tiny_text(run={"name": "short", "rounds": 2, "min_nodes": 1}, inner={"steps": 2})
    swarm = Swarm(tmp_path / "short", run)
    try:
        home = swarm.join("a", swarm.invite())
        swarm.start_node("a").ends_with(0, "all 2 rounds are committed")
        first = kept_model(home)
        refused(
            atoll("run", "pause", "--dir", swarm.home), 64, "finished since round 2", "run extend N"
        )
        swarm.coordinator.stop(signal.SIGTERM)
        swarm.start_coordinator()
        assert "run.rounds = 4 from round 3 on" in owner(swarm, "run", "extend", "2")
        assert run_of(swarm).phase == status_pb2.RUN_PHASE_WAITING
        swarm.start_node("a").ends_with(0, "all 4 rounds are committed")
        last = kept_model(home)
        assert (first.round, last.round) == (2, 4)
        assert last.outer_digest != first.outer_digest
        assert run_of(swarm).committed_round == 4
    finally:
        swarm.end()
