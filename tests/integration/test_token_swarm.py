"""Swarms train on tokens: the same state everywhere, each sample once, and what is damaged comes anew."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.swarm.weighing import common_corpus
from lab.simulation.swarm import Life, simulate
from node.config import SETTINGS_FILE
from node.island.data.dataset import Dataset
from node.island.data.manifest import read_manifest
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from protocol.run.run_spec import RunSpec
from tests.integration.typed_commands import Swarm, atoll, done
from tests.tiny_runs import tiny, tiny_text
from tests.unit.served_folder import serving
from tests.unit.tokens_scene import write_jsonl, write_tokenizer

VOCABULARY = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of a few hundred documents, as a person makes them."""
    place = tmp_path_factory.mktemp("data")
    write_jsonl(place / "a.jsonl", 300)
    tokenizer = write_tokenizer(place / "tokenizer")
    tokens = place / "tokens"
    command = ("data", "prepare", place / "*.jsonl", "--tokenizer", tokenizer, "--out", tokens)
    assert read_digest(done(atoll(*command, "--held-out", "0.1"))) == digest_of(tokens)
    return tokens


def read_digest(said: str) -> str:
    return said.partition('digest = "')[2].partition('"')[0]


def digest_of(tokens: Path) -> str:
    return read_manifest(tokens).digest().hex()


def run_on(
    tokens: Path, *, at: str | None = None, **tables: dict[str, object]
) -> dict[str, dict[str, object]]:
    return {
        **tables,
        "model": {"vocab_size": VOCABULARY, **tables.get("model", {})},
        "data": {"source": "tokens", "paths": [at or str(tokens)], "digest": digest_of(tokens)},
    }


def opened(spec: RunSpec) -> Dataset:
    return open_dataset(spec, DataPlaces(folder=Path("/")))


def test_nodes_on_tokens_end_in_one_state_and_learn(folder: Path) -> None:
    spec = tiny(**run_on(folder))
    finished = simulate(spec, lives=[Life()] * 3, corpus=opened(spec))
    assert set(finished.digests.values()) == {finished.final.outer_digest}
    first, *_, last = finished.held_out
    assert first.loss == pytest.approx(np.log(VOCABULARY), abs=0.2)
    assert last.loss < first.loss - 1
    corpus = common_corpus(finished.final)
    assert corpus is not None and corpus.digest.hex() == digest_of(folder)
    again = simulate(spec, lives=[Life()] * 3, corpus=opened(spec))
    assert again.digests == finished.digests


@pytest.mark.nightly
def test_a_real_swarm_trains_on_tokens_and_a_flipped_byte_of_one_node_comes_from_the_other(
    folder: Path, tmp_path: Path
) -> None:
    """The second has the tokens elsewhere, and one byte of them is wrong: alone it waits, and says so."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in folder.iterdir():
        (elsewhere / path.name).write_bytes(path.read_bytes())
    shard = elsewhere / read_manifest(folder).training[0].tokens
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    run = tiny_text(
        **run_on(folder, at="wherever", run={"name": "tokens", "rounds": 3, "min_nodes": 1})
    )
    swarm = Swarm(tmp_path / "swarm", run)
    try:
        invite = swarm.invite("--uses", "2")
        homes = {name: swarm.join(name, invite) for name in ("whole", "damaged")}
        settings = homes["whole"] / SETTINGS_FILE
        settings.write_text(settings.read_text().replace('data = ""', f'data = "{folder}"'))
        lost = swarm.start_node("damaged", "--data", str(tmp_path / "nowhere"))
        lost.ends_with(66, "nowhere holds no tokens", "data in node.toml")
        damaged = swarm.start_node("damaged", "--data", str(elsewhere))
        damaged.says(f"{shard} is damaged: piece 0")
        damaged.says(f"no member gives piece 0 of {shard.name} (damaged in {shard})")
        whole = swarm.start_node("whole")
        for node in (whole, damaged):
            node.ends(node.shared_memory())
            assert "run finished" in node.log
        assert damaged.log.count("rank died") == 1
        status = swarm.status()
        assert status.run.committed_round == 3
        losses = [measured.loss for measured in status.run.held_out_losses]
        assert losses[-1] < losses[0]
    finally:
        swarm.end()


@pytest.mark.nightly
def test_each_sample_of_an_epoch_is_trained_once(folder: Path) -> None:
    """Two nodes; the run is long enough for the whole epoch."""
    spec = tiny(
        **run_on(folder, run={"rounds": 12, "min_nodes": 2}, inner={"steps": 30, "batch": 8})
    )
    dataset = opened(spec)
    finished = simulate(spec, lives=[Life()] * 2, corpus=dataset)
    ledger = finished.final.ledger
    [committed] = ledger.committed
    assert committed.first == 0 and committed.end >= dataset.num_samples
    assert finished.final.token_clock == committed.num_samples * spec.model.context
    assert replace(ledger, committed=()).leased == ()


@pytest.mark.nightly
def test_nodes_with_some_of_the_shards_and_with_none_train_together(
    folder: Path, tmp_path: Path
) -> None:
    """What they lack comes from a web server."""
    half = tmp_path / "half"
    half.mkdir()
    for shard in read_manifest(folder).training[::2]:
        (half / shard.tokens).write_bytes((folder / shard.tokens).read_bytes())
    with serving(folder) as served:
        tables = run_on(folder, at=served.url, run={"name": "far", "rounds": 3, "min_nodes": 2})
        swarm = Swarm(tmp_path / "swarm", tiny_text(**tables))
        try:
            invite = swarm.invite("--uses", "2")
            for name in ("half", "none"):
                swarm.join(name, invite)
            nodes = [swarm.start_node("half", "--data", str(half)), swarm.start_node("none")]
            for node in nodes:
                node.ends(node.shared_memory())
                assert "run finished" in node.log
            run = swarm.status().run
            assert run.committed_round == 3 and run.digests_agree
        finally:
            swarm.end()
        cached = {
            home: list((swarm.folder / home / "data-cache").iterdir()) for home in ("half", "none")
        }
        assert len(cached["none"]) > len(cached["half"]) > 1
