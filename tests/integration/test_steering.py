"""A run owner steers a run and its members, with real processes and the commands that people type."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from protocol.v1 import status_pb2
from tests.integration.typed_commands import Swarm, atoll, done, refused, typed_here, until
from tests.tiny_runs import tiny_text

RUN = tiny_text(
    run={"name": "steered", "rounds": 400, "min_nodes": 2},
    inner={"steps": 1_000_000},
    deadlines={"train": 1, "contribute": 20, "commit": 30},
    evaluation={"every_rounds": 500},
)


def owner(swarm: Swarm, *arguments: str) -> str:
    return done(typed_here(*arguments, "--dir", swarm.home))


def run_of(swarm: Swarm) -> status_pb2.RunStatus:
    return swarm.status().run


def committed(swarm: Swarm, more: int) -> None:
    """Waits until so many more rounds are committed."""
    wanted = run_of(swarm).committed_round + more
    until(lambda: run_of(swarm).committed_round >= wanted, f"round {wanted}")


def test_an_amendment_that_costs_loss_says_so_and_one_that_costs_none_says_nothing(
    tmp_path: Path,
) -> None:
    swarm = Swarm(
        tmp_path / "swarm", tiny_text(run={"rounds": 99, "min_nodes": 2}, inner={"steps": 15})
    )
    try:
        said = owner(swarm, "run", "amend", "inner.steps=5")
        assert (
            "loss: [outer] momentum = 0.6 overshoots where each parameter is exchanged every 5"
            in said
        )
        assert "loss: amend it back" in said
        assert "loss: " not in owner(swarm, "run", "amend", "outer.learning_rate=0.6")
        assert "loss: " not in owner(swarm, "run", "amend", "inner.steps=20")
        assert "exchanged 9 times in the whole run" in owner(
            swarm, "run", "amend", "run.rounds=9", "inner.steps=99"
        )
    finally:
        swarm.end()


@pytest.mark.nightly
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
    swarm.coordinator.kill()
    swarm.start_coordinator()
    until(lambda: "paused by the run owner" in run_of(swarm).reason, "the pause to hold")
    refused(atoll("run", "pause", "--dir", swarm.home), 64, "paused already", "atoll run resume")
    assert (run_of(swarm).committed_round, run_of(swarm).open_round) == (at, 0)
    owner(swarm, "run", "resume")
    committed(swarm, 1)

    # So few bytes say nothing of a link.
    refused(atoll("run", "advise", "--dir", swarm.home), 75, "has measured its link yet")

    said = owner(swarm, "run", "amend", "outer.learning_rate=0.3", "inner.learning_rate=0.02")
    assert "inner.learning_rate = 0.02, outer.learning_rate = 0.3 from round" in said
    assert "run.rounds = 450" in owner(swarm, "run", "extend", "50")
    codecs = ("exchange.uplink='ec2'", "exchange.downlink='int8'")
    assert 'exchange.uplink = "ec2/2"' in owner(swarm, "run", "amend", *codecs)
    for name in ("a", "b", "c"):
        log = {"a": a, "b": b, "c": c}[name]
        log.says('exchange.downlink = "int8/1"')
    committed(swarm, 2)
    assert (run_of(swarm).total_rounds, len(run_of(swarm).amendments)) == (450, 3)
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
    refused(atoll("run", "pause", "--dir", swarm.home), 64, "is finished", "atoll run extend N")

    told: list[dict[str, Any]] = json.loads(owner(swarm, "audit", "--json"))
    kinds = [ruling["kind"] for ruling in told]
    assert kinds == [
        *("invited", "joined", "joined", "invited", "joined", "approved"),
        *("paused", "resumed", "amended", "amended", "amended"),
        *("quarantined", "readmitted", "expelled", "stopped"),
    ]
    assert [ruling["before"] for ruling in told[1:]] == [ruling["digest"] for ruling in told[:-1]]
    assert "15 rulings, all signed, none missing" in owner(swarm, "audit")
    assert "the rack" in owner(swarm, "invite", "list")

    # Nobody is here any more. Who comes now is told so, and does not wait.
    home = swarm.folder / "d"
    joined = atoll("join", swarm.invite(), "--dir", home, "--name", "d")
    assert "no member is here that holds its final state" in done(joined)
    d = swarm.start_node("d")
    d.ends_with(74, "no member is here that holds its final state", "type 'atoll export OUT' where")
    assert "loading torch" not in d.log and "attached" not in d.log
    swarm.start_node("a").ends(set())


@pytest.mark.nightly
def test_a_finished_run_is_extended_and_nodes_that_went_home_train_on_from_its_end(
    tmp_path: Path,
) -> None:
    swarm = Swarm(
        tmp_path / "swarm",
        tiny_text(
            run={"name": "longer", "rounds": 3, "min_nodes": 2},
            inner={"steps": 20, "schedule": "linear", "final_fraction": 0.0},
            deadlines={"train": 20, "contribute": 40, "commit": 60},
            evaluation={"every_rounds": 1},
        ),
    )
    try:
        invite = swarm.invite("--uses", "2")
        for name in ("a", "b"):
            swarm.join(name, invite)
        first = [swarm.start_node(name) for name in ("a", "b")]
        for node in first:
            node.ends(node.shared_memory())
        ended = run_of(swarm)
        assert ended.phase == status_pb2.RUN_PHASE_FINISHED and ended.committed_round == 3
        done(atoll("export", swarm.folder / "before", "--dir", swarm.folder / "a"))
        swarm.coordinator.kill()
        swarm.start_coordinator()

        longer = ("run", "extend", "3", "--dir", swarm.home)
        refused(atoll(*longer), 64, "more rounds would train nothing", "inner.final_fraction=0.1")
        said = owner(swarm, "run", "amend", "run.rounds=6", "inner.final_fraction=0.2")
        assert "run.rounds = 6 from round 4 on" in said
        opened = run_of(swarm)
        assert opened.phase == status_pb2.RUN_PHASE_WAITING and opened.total_rounds == 6
        assert "0 of 2" in opened.reason or "waiting for 2 more nodes" in opened.reason
        again = [swarm.start_node(name) for name in ("a", "b")]
        for node in again:
            node.ends(node.shared_memory())
            assert "inner optimizer goes on from its checkpoint" in node.log
            assert "re-warm-up" not in node.log and "refetch" not in node.log
            assert "all 6 rounds are committed" in node.log
        run = run_of(swarm)
        assert run.phase == status_pb2.RUN_PHASE_FINISHED and run.digests_agree
        assert (run.committed_round, run.data.free_again_samples) == (6, 0)
        assert run.data.committed_samples >= 2 * ended.data.committed_samples * 0.9
        assert [told.round for told in run.held_out_losses][-4:] == [3, 4, 5, 6]
        losses = {told.round: told.loss for told in run.held_out_losses}
        assert losses[6] < losses[3], losses
        done(atoll("export", swarm.folder / "after", "--dir", swarm.folder / "b"))
        before, after = (
            (swarm.folder / name / "model.safetensors").read_bytes() for name in ("before", "after")
        )
        assert before != after
    finally:
        swarm.end()


@pytest.mark.nightly
def test_a_fork_goes_on_with_the_momentum_the_schedule_and_the_samples_of_its_run(
    tmp_path: Path,
) -> None:
    text = tiny_text(
        run={"name": "parent", "rounds": 40, "min_nodes": 1},
        inner={"steps": 10},
        deadlines={"train": 20, "contribute": 40, "commit": 60},
        evaluation={"every_rounds": 1},
    )
    parent = Swarm(tmp_path / "parent", text)
    child: Swarm | None = None
    try:
        parent.join("a", parent.invite())
        node = parent.start_node("a")
        committed(parent, 4)
        owner(parent, "run", "stop")
        node.ends(node.shared_memory())
        ended, made = run_of(parent), tmp_path / "fork"
        at = ended.committed_round
        forking = ("node", "fork", str(at), "--to", made, "--dir", parent.folder / "a")
        said = done(atoll(*forking, "--keep-progress"))
        assert f"goes on at {at / 40:.1%} of the schedule and {ended.token_clock:,} tokens" in said
        description = json.loads((made / "description.json").read_text())
        assert description["first_digest"] == ended.outer_digest.hex()
        trained = ended.data.committed_samples
        assert description["beginning"]["trained"] == [0, trained]
        parent.end()
        files = (made / "description.json", made / "first.safetensors")
        child = Swarm(tmp_path / "child", (made / "run.toml").read_text(), beside=files)
        assert run_of(child).token_clock == ended.token_clock
        assert run_of(child).data.committed_samples == trained
        invite = child.invite("--uses", "2")
        for name in ("b", "c"):
            child.join(name, invite)
        b = child.start_node("b", "--weights", str(made))
        committed(child, 1)
        c = child.start_node("c")
        c.says("applied")
        assert "reading the first weights" in b.log and "re-warm-up" in b.log
        run = run_of(child)
        assert run.digests_agree and run.token_clock > ended.token_clock
        before, first = (
            next(told.loss for told in losses.held_out_losses if told.round == round)
            for losses, round in ((ended, at), (run, 0))
        )
        assert abs(before - first) < 1e-6, "it begins with another state"
    finally:
        parent.end()
        if child is not None:
            child.end()


def test_all_that_a_run_owner_types_is_obeyed_before_anybody_trains_and_told_in_the_audit(
    swarm: Swarm,
) -> None:
    """What nodes make of it: test_members.py, tests/chaos, and the long test above."""
    swarm.join("a", swarm.invite("--needs-approval", "--label", "the rack"))
    refused(typed_here("run", "resume", "--dir", swarm.home), 64, "the run is not paused")
    owner(swarm, "run", "pause", "--reason", "the cluster moves")
    assert run_of(swarm).paused.endswith("'atoll run resume' goes on")
    swarm.coordinator.kill()
    swarm.start_coordinator()
    assert "paused by the run owner since" in run_of(swarm).reason, "a restart has lost the pause"
    refused(atoll("run", "pause", "--dir", swarm.home), 64, "paused already", "atoll run resume")
    owner(swarm, "run", "resume")
    assert not run_of(swarm).paused

    said = owner(swarm, "run", "amend", "inner.learning_rate=0.002", "exchange.uplink='ec2'")
    assert "inner.learning_rate = 0.002" in said and 'exchange.uplink = "ec2/2"' in said
    said = owner(swarm, "run", "extend", "50")
    assert "run.rounds = 450" in said and "go on by 'atoll node start'" in said
    assert (run_of(swarm).total_rounds, len(run_of(swarm).amendments)) == (450, 2)
    refused(
        typed_here("run", "amend", "inner.learning_rate=-1", "--dir", swarm.home),
        78,
        "learning_rate",
    )
    refused(
        typed_here("run", "rollback", "300", "--dir", swarm.home), 64, "round 300 is not behind"
    )
    said = owner(swarm, "run", "move", "train2.example.org")
    assert f"moves to train2.example.org, port {swarm.control_port}" in said
    move = ("run", "move", "127.0.0.1", "--port", "7710", "--enrolment-port", "7711")
    owner(swarm, *move, "--reason", "a larger machine")
    refused(typed_here(*move, "--dir", swarm.home), 64, "told already", "127.0.0.1, port 7710")

    assert "may take part" in owner(swarm, "nodes", "approve", "a")
    owner(swarm, "nodes", "quarantine", "a", "--reason", "an odd loss")
    owner(swarm, "nodes", "readmit", "a")
    assert "is expelled" in owner(swarm, "nodes", "expel", "a", "--reason", "it sends noise")
    refused(atoll("status", "--dir", swarm.folder / "a"), 79, "it sends noise")
    swarm.start_node("a").ends_with(79, "the run owner has expelled a", "it sends noise")

    refused(typed_here("run", "stop", "--dir", swarm.home), 64, "no round has begun")
    told: list[dict[str, Any]] = json.loads(owner(swarm, "audit", "--json"))
    assert [ruling["kind"] for ruling in told] == [
        *("invited", "joined", "paused", "resumed", "amended", "amended", "moved", "moved"),
        *("approved", "quarantined", "readmitted", "expelled"),
    ]
    assert [ruling["before"] for ruling in told[1:]] == [ruling["digest"] for ruling in told[:-1]]
    assert "12 rulings, all signed, none missing" in owner(swarm, "audit")


def test_a_viewer_looks_on_and_may_do_nothing_else(swarm: Swarm) -> None:
    viewer = swarm.folder / "viewer"
    invite = swarm.invite("--role", "viewer", "--label", "the press")
    said = done(atoll("join", invite, "--dir", viewer, "--name", "press"))
    assert "as a viewer" in said and f"next: atoll status --watch --dir {viewer}" in said
    shown = json.loads(done(typed_here("status", "--json", "--dir", viewer)))
    assert shown["run"]["run_name"] == "steered" and shown["nodes"] == []
    done(typed_here("rounds", "--dir", viewer))
    refused(atoll("node", "start", "--dir", viewer), 77, "is a viewer's folder")
    for command in (("invite", "list"), ("nodes", "expel", "x"), ("run", "pause"), ("audit",)):
        refused(typed_here(*command, "--dir", viewer), 77, "only the run owner may do this")
    owner(swarm, "nodes", "expel", "press")
    refused(typed_here("status", "--dir", viewer), 79, "the run owner has expelled press")
    swarm.coordinator.stop(signal.SIGTERM)
    refused(typed_here("run", "pause", "--dir", swarm.home), 69, "no coordinator answers")
