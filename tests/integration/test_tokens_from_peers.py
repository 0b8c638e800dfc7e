"""Nodes with some of the shards train on all of them: what they lack comes from the other members."""

import signal
from pathlib import Path

import pytest

from coordinator.rules import rules_of
from coordinator.store import Store
from coordinator.swarm.ledger import Ledger
from node.island.data.dataset import SampleOrder
from node.island.data.manifest import read_manifest
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.data.token_shards import TokenShards
from protocol.run.run_files import load_run_file
from protocol.run.run_spec import RunSpec
from tests.integration.test_token_swarm import digest_of
from tests.integration.typed_commands import Swarm, until
from tests.tiny_runs import tiny, tiny_text
from tests.unit.tokens_scene import small_shards

NOWHERE = "on-the-owners-machine"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens in several shards."""
    return small_shards(tmp_path_factory.mktemp("data"), piece_bytes=2048)


def run_text(folder: Path, **run: object) -> str:
    return tiny_text(
        run={"name": "peers", **run},
        data={"source": "tokens", "paths": [NOWHERE], "digest": digest_of(folder)},
        inner={"steps": 30, "batch": 4},
    )


def ledger_of(swarm: Swarm) -> tuple[RunSpec, Ledger]:
    """What the coordinator's database says, once it has ended."""
    spec = load_run_file(swarm.home / "run.toml")
    store = Store.open(swarm.home)
    try:
        return spec, store.load(rules_of(spec), spec.digest()).ledger
    finally:
        store.close()


@pytest.mark.nightly
def test_two_nodes_with_half_of_the_shards_each_train_a_whole_epoch_each_sample_once(
    folder: Path, tmp_path: Path
) -> None:
    """The second half comes without a manifest, too."""
    manifest = read_manifest(folder)
    halves = {"even": manifest.training[::2], "odd": manifest.training[1::2] + manifest.held_out}
    for name, shards in halves.items():
        (tmp_path / name).mkdir()
        for shard in shards:
            (tmp_path / name / shard.tokens).write_bytes((folder / shard.tokens).read_bytes())
    (tmp_path / "even" / "manifest.json").write_bytes((folder / "manifest.json").read_bytes())
    swarm = Swarm(tmp_path / "swarm", run_text(folder, rounds=8, min_nodes=2))
    try:
        invite = swarm.invite("--uses", "2")
        for name in halves:
            swarm.join(name, invite)
        nodes = {
            name: swarm.start_node(name, "--data", str(tmp_path / name)) for name in ("odd", "even")
        }
        for node in nodes.values():
            node.ends(node.shared_memory())
            assert "run finished" in node.log and "restart" not in node.log
        assert "the manifest of the run's tokens has come" in nodes["odd"].log
        run = swarm.status().run
        assert run.committed_round == 8 and run.digests_agree
        for name, told in swarm.nodes().items():
            given = {kind.kind: kind for kind in told.heartbeat.wire}["data"]
            assert given.sent_bytes > 1000 and given.received_bytes > 1000, name
    finally:
        swarm.end()
    spec, ledger = ledger_of(swarm)
    [committed] = ledger.committed
    dataset = open_dataset(spec, DataPlaces(folder=folder, own=str(folder)))
    assert committed.first == 0 and committed.end >= dataset.num_samples > 500
    for name, shards in halves.items():
        kept = {path.stem for path in (swarm.folder / name / "data-cache").glob("*.piece")}
        own = {digest for shard in shards for digest in manifest.files[shard.tokens].pieces}
        others = {d for shard in manifest.training for d in manifest.files[shard.tokens].pieces}
        assert kept >= others - own and not kept & (own - others)


@pytest.mark.nightly
def test_a_flipped_byte_is_named_by_the_node_that_asked_which_waits_for_a_member_that_has_it_right(
    folder: Path, tmp_path: Path
) -> None:
    """Two libraries give tokens and train nothing; the student has no data at all."""
    library = tmp_path / "library"
    library.mkdir()
    for path in folder.iterdir():
        (library / path.name).write_bytes(path.read_bytes())
    file, number = _first_piece(folder)
    content = bytearray((library / file).read_bytes())
    content[number * 2048 + 7] ^= 1
    (library / file).write_bytes(content)
    swarm = Swarm(tmp_path / "swarm", run_text(folder, rounds=3, min_nodes=1))
    try:
        invite = swarm.invite("--uses", "3")
        for name in ("library", "student", "second"):
            swarm.join(name, invite)
        swarm.start_node("library", "--loop", "--data", str(library))
        student = swarm.start_node("student")
        student.says(f"{file} is damaged: piece {number}")
        student.says(f"no member gives piece {number} of {file}")
        swarm.does("waiting for the run's tokens", "student")

        def status_tells() -> bool:
            return (
                "data = in node.toml" in swarm.nodes()["student"].heartbeat.waiting_for
                and "student trains nothing now: its own line says why" in swarm.status().run.reason
            )

        until(status_tells, student.log)
        second = swarm.start_node("second", "--loop", "--data", str(folder))
        for node in (student, second):
            node.ends(node.shared_memory())
            assert "run finished" in node.log
        assert swarm.status().run.committed_round == 3
    finally:
        swarm.end()


@pytest.mark.nightly
def test_a_node_whose_disk_has_damaged_what_it_fetched_fetches_it_again_and_trains_on(
    folder: Path, tmp_path: Path
) -> None:
    """Every piece, and while it was stopped: what ranks have read once is in their memory."""
    swarm = Swarm(tmp_path / "swarm", run_text(folder, rounds=6, min_nodes=1))
    try:
        invite = swarm.invite("--uses", "2")
        for name in ("library", "student"):
            swarm.join(name, invite)
        library = swarm.start_node("library", "--loop", "--data", str(folder))
        student = swarm.start_node("student")
        student.says("applied  ", times=2)
        student.stop(signal.SIGTERM)
        cached = sorted((swarm.folder / "student" / "data-cache").glob("*.piece"))
        as_they_were = [path.read_bytes() for path in cached]
        for path in cached:
            path.write_bytes(bytes(path.stat().st_size))
        student = swarm.start_node("student")
        for node in (student, library):
            node.ends(node.shared_memory())
            assert "run finished" in node.log
        assert student.log.count("was damaged in") == 2, "told once, and as why ranks start again"
        restored = [path.read_bytes() for path in cached if path.exists()]
        assert restored and all(content in as_they_were for content in restored)
    finally:
        swarm.end()


def _first_piece(folder: Path) -> tuple[str, int]:
    """The piece that the run's first sample is in."""
    tokens = {"source": "tokens", "paths": [NOWHERE], "digest": digest_of(folder)}
    dataset = open_dataset(tiny(data=tokens), DataPlaces(folder=folder, own=str(folder)))
    assert isinstance(dataset, TokenShards)
    order = SampleOrder(seed=1, num_samples=dataset.num_samples, num_together=dataset.num_together)
    return next(iter(dataset.pieces_of("training", order.indices(0, 1))))
