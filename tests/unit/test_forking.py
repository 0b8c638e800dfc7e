"""A run is forked from a snapshot, and exported at any round of which one is kept."""

from pathlib import Path

import numpy as np
import pytest

from node.config import SNAPSHOTS_FOLDER
from node.disk.round_folder import Retention
from node.disk.snapshot_folder import SnapshotFolder
from node.disk.snapshots import Snapshot
from node.kept import keep_run, kept_model
from node.models.forking import RUN_FILE, fork
from node.models.reading import read_first
from node.outer_state import Vector
from protocol.errors import CannotCreateError, NoInputError
from protocol.run.layout import layout_of
from protocol.run.models import FIRST_WEIGHTS
from protocol.run.run_spec import RunSpec, load_run_folder
from protocol.terminal import cli, console
from tests.tiny_runs import tiny


def weights_of(round: int, size: int) -> Vector:
    return np.full(size, round / 8, np.float32)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return node_home(tmp_path / "node")


def node_home(home: Path, **tables: dict[str, object]) -> Path:
    """A node's folder with snapshots of some rounds."""
    spec = tiny(run={"name": "first", "rounds": 90}, **tables)
    layout = layout_of(spec)
    home.mkdir()
    keep_run(home, spec)
    folder = SnapshotFolder(home / SNAPSHOTS_FOLDER, retention=Retention(keep=2, every=8))
    for round in (6, 8, 14, 16, 23, 24, 25):
        parameters = weights_of(round, layout.num_elements)
        snapshot = Snapshot(
            round=round,
            run_digest=spec.digest(),
            layout_digest=layout.summary().digest,
            parameters=parameters,
            momentum=np.ones_like(parameters),
        )
        folder.save(snapshot, None)
    return home


def test_the_last_two_snapshots_are_kept_and_the_latest_of_every_eighth_round(home: Path) -> None:
    assert SnapshotFolder(home / SNAPSHOTS_FOLDER).rounds() == [25, 24, 16]


def test_a_model_is_read_at_any_round_of_which_there_is_a_snapshot(home: Path) -> None:
    assert kept_model(home).round == 25
    assert kept_model(home, 16).parameters[0] == 2.0
    with pytest.raises(NoInputError, match="no snapshot of round 14") as refused:
        kept_model(home, 14)
    assert refused.value.next_step is not None and "16, 24, 25" in refused.value.next_step


def test_a_fork_begins_with_the_weights_of_its_round(home: Path, tmp_path: Path) -> None:
    model = kept_model(home, 16)
    spec = fork(model, home, tmp_path / "fork")
    assert spec.run.name == "first-from-16" and spec.run.rounds == 90
    written = load_run_folder(tmp_path / "fork", RUN_FILE)
    assert written == spec
    assert replace_name(written, "first") == model.spec
    weights = np.empty(written.num_parameters, np.float32)
    read_first(tmp_path / "fork" / FIRST_WEIGHTS, written, weights)
    assert (weights == 2.0).all()
    with pytest.raises(CannotCreateError, match="is not empty"):
        fork(model, home, tmp_path / "fork")


def replace_name(spec: RunSpec, name: str) -> RunSpec:
    run = spec.run.model_copy(update={"name": name})
    return spec.model_copy(update={"run": run, "description": None})


def test_a_coordinator_is_made_for_a_fork_with_other_rules(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "fork"
    assert console.run(cli.root, ["node", "fork", "16", "--to", str(made), "--dir", str(home)]) == 0
    run_file = made / RUN_FILE
    text = run_file.read_text()
    run_file.write_text(text.replace("\nrounds = 90", "\nrounds = 30"))
    capfd.readouterr()
    assert (
        console.run(
            cli.root, ["init", str(tmp_path / "new"), "--run", str(run_file), "--port", "0"]
        )
        == 0
    )
    told = capfd.readouterr().out
    assert f"--weights {tmp_path / 'new' / FIRST_WEIGHTS}" in told
    spec = load_run_folder(tmp_path / "new", RUN_FILE)
    assert spec.first_digest == load_run_folder(made, RUN_FILE).first_digest is not None
