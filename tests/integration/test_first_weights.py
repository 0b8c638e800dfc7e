"""Runs that begin with given weights: one node has them, the others fetch them from it."""

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from node.exchange.state.chunks import CHUNK_BYTES
from node.kept import kept_model
from node.models.reading import digest_of_first, write_first
from protocol.run.models import FIRST_WEIGHTS, Description, layout_of
from protocol.run.run_files import DESCRIPTION_FILE, description_file, load_run_file
from tests.integration.typed_commands import Running, Swarm, done, typed_here, until
from tests.tiny_runs import tiny_text

RUN = tiny_text(run={"name": "given", "rounds": 2, "min_nodes": 2})


def give_weights(home: Path) -> None:
    """Gives the run of a folder first weights, as 'atoll node describe' does."""
    spec = load_run_file(home / "run.toml")
    weights = np.random.default_rng(5).normal(0, 0.02, spec.num_parameters).astype(np.float32)
    write_first(home / FIRST_WEIGHTS, layout_of(spec), weights)
    description = Description(first_digest=digest_of_first(weights).hex())
    described = spec.model_copy(update={"description": description})
    (home / DESCRIPTION_FILE).write_bytes(description_file(described))


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path / "swarm", RUN, complete=give_weights)
    yield swarm
    swarm.end()


@pytest.mark.nightly
def test_a_node_without_the_first_weights_fetches_them_from_the_one_that_has_them(
    swarm: Swarm,
) -> None:
    invite = swarm.invite("--uses", "3")
    homes = [swarm.join(name, invite) for name in ("without", "with")]
    swarm.join("neither", invite)
    without = swarm.start_node("without")
    without.says("the first weights come from a node that has them")
    without.says("attached")
    told = done(typed_here("status", "--dir", swarm.home))
    assert "waiting for a node that holds the run's first weights" in told
    assert "atoll node start --weights" in told
    assert " joining " in told and "NOT the same" not in told, "it is as it should be"
    without.says("no node here has the weights that the run begins with; this one waits")
    until(
        lambda: (
            swarm.nodes()["without"].heartbeat.waiting_for
            == "a node that has the weights that the run begins with"
        ),
        "a wait that has its reason",
    )
    neither = swarm.start_node("neither")
    neither.says("no node here has the weights that the run begins with; this one waits")
    assert "serving a state" not in without.log, "it has none yet"
    neither.stop(signal.SIGTERM)
    having = swarm.start_node("with", "--weights", str(swarm.home / FIRST_WEIGHTS))
    memories = without.shared_memory(), having.shared_memory()
    without.ends(memories[0])
    having.ends(memories[1])
    one, other = map(kept_model, homes)
    assert one.round == other.round == 2
    assert one.outer_digest == other.outer_digest
    assert "what this node owed is let go" not in without.log, "it never owed anything"


def snapshot_bytes(swarm: Swarm, name: str) -> int:
    """What a node has given of states, as it says."""
    wire = swarm.nodes()[name].heartbeat.wire
    return sum(count.sent_bytes for count in wire if count.kind == "snapshot")


@pytest.mark.nightly
def test_nodes_that_wait_for_the_first_weights_give_each_other_what_they_have_of_them(
    tmp_path: Path,
) -> None:
    """The owner's uplink is slow, and the state is of some twenty chunks beside zeros."""
    model = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "ffn_size": 1280, "context": 32}
    run = {"name": "given", "rounds": 1, "min_nodes": 3}
    swarm = Swarm(tmp_path / "swarm", tiny_text(run=run, model=model), complete=give_weights)
    try:
        invite = swarm.invite("--uses", "3")
        for name in ("one", "other", "owner"):
            swarm.join(name, invite)
        waiting = [swarm.start_node(name) for name in ("one", "other")]
        for node in waiting:
            node.says("this one waits")
        weights = ("--weights", str(swarm.home / FIRST_WEIGHTS))
        swarm.start_node("owner", *weights, "--max-upload", "20mbit")
        for node in waiting:
            node.says("state fetched")
        until(
            lambda: min(snapshot_bytes(swarm, name) for name in ("one", "other")) > CHUNK_BYTES,
            "chunks that each of them gave the other",
        )
        assert (
            snapshot_bytes(swarm, "owner")
            < 1.8 * 4 * load_run_file(swarm.home / "run.toml").num_parameters
        )
    finally:
        swarm.end()


def test_other_weights_than_the_runs_are_refused_with_both_digests(
    swarm: Swarm, tmp_path: Path
) -> None:
    swarm.join("node", swarm.invite())
    spec = load_run_file(swarm.home / "run.toml")
    wrong = tmp_path / "wrong.safetensors"
    write_first(wrong, layout_of(spec), np.ones(spec.num_parameters, np.float32))
    swarm.start_node("node", "--weights", str(wrong)).ends_with(
        78, "wrong.safetensors holds the weights", "and run 'given' begins with"
    )
    wrong.write_bytes((swarm.home / FIRST_WEIGHTS).read_bytes()[:-9])
    swarm.start_node("node", "--weights", str(wrong)).ends_with(65, "wrong.safetensors")
    swarm.start_node("node", "--weights", "nowhere").ends_with(66, "nowhere is not there")


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Swarm]:
    """A run whose first round never opens: it waits for three nodes."""
    text = tiny_text(run={"name": "given", "rounds": 2, "min_nodes": 3})
    swarm = Swarm(tmp_path / "swarm", text, complete=give_weights)
    yield swarm
    swarm.end()


@pytest.mark.nightly
@pytest.mark.parametrize("is_killed", [False, True])
def test_first_weights_are_kept_by_the_node_that_was_given_them_and_by_one_that_fetched_them(
    waiting: Swarm, is_killed: bool
) -> None:
    """Restarted before the first round, neither needs another node, or the file."""

    def end(node: Running) -> None:
        if is_killed:
            node.process.kill()
            node.process.wait()
            # A p2pd that outlives it for a moment still holds what the next start would clear.
            until(lambda: not node.processes(), f"{node.processes()} to end")
        else:
            node.stop(signal.SIGTERM)

    invite = waiting.invite("--uses", "2")
    for name in ("given", "fetching"):
        waiting.join(name, invite)
    given = waiting.start_node("given", "--weights", str(waiting.home / FIRST_WEIGHTS))
    waiting.does("waiting", "given")
    end(given)
    given = waiting.start_node("given")
    given.says("reading what this node has kept")
    given.says("resuming from disk")
    fetching = waiting.start_node("fetching")
    fetching.says("applied")
    waiting.does("waiting", "given", "fetching")
    end(given)
    end(fetching)
    fetching = waiting.start_node("fetching")
    fetching.says("resuming from disk")
    waiting.does("waiting", "fetching")
    fetching.stop(signal.SIGTERM)
