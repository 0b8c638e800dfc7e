"""A run is forked from a snapshot, and exported at any round of which one is kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from coordinator.rules import rules_of
from coordinator.swarm.ledger import lease
from coordinator.swarm.transition import initial_state
from node.config import SNAPSHOTS_FOLDER
from node.disk.round_folder import Retention
from node.disk.snapshot_folder import SnapshotFolder
from node.disk.snapshots import Snapshot
from node.kept import KeptModel, keep_run, kept_model
from node.models.forking import RUN_FILE, fork
from node.models.reading import read_first
from node.outer_state import Vector
from protocol.errors import (
    BadDataError,
    CannotCreateError,
    ConfigError,
    ExitCode,
    NoInputError,
    UsageError,
)
from protocol.run.amendments import span_of
from protocol.run.models import FIRST_WEIGHTS, Beginning, Description, layout_of
from protocol.run.run_files import load_run_folder
from protocol.run.run_spec import RunSpec
from protocol.terminal import cli, console
from protocol.terminal.query import StatusLink
from protocol.v1 import status_pb2 as pb
from protocol.wire.rounds import Digest
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


def told_of(model: KeptModel, **books: Any) -> pb.GetRoundResponse:
    summary = pb.RoundSummary(round=model.round, outer_digest=model.outer_digest)
    return pb.GetRoundResponse(summary=summary, books_after=pb.Books(**books) if books else None)


def test_a_fork_that_keeps_its_progress_begins_with_all_that_the_run_had(
    home: Path, tmp_path: Path
) -> None:
    model = kept_model(home, 16)
    told = told_of(model, token_clock=5000, used_up=[0, 24, 32, 40])
    spec = fork(model, home, tmp_path / "fork", told=told)
    assert load_run_folder(tmp_path / "fork", RUN_FILE) == spec
    assert spec.run.rounds == 90 - 16 and spec.first_digest == model.outer_digest
    assert (spec.beginning.round, spec.beginning.tokens) == (16, 5000)
    assert spec.beginning.progress == pytest.approx(16 / 90)
    weights = np.empty(spec.num_parameters, np.float32)
    momentum = read_first(tmp_path / "fork" / FIRST_WEIGHTS, spec, weights)
    assert momentum is not None and (momentum == 1.0).all() and (weights == 2.0).all()
    state = initial_state(rules_of(spec), spec.digest())
    assert (state.token_clock, state.outer_digest) == (5000, model.outer_digest)
    ledger, (gap, new) = lease(state.ledger, [8, 8])
    assert (gap.first, new.first, ledger.frontier()) == (24, 40, 48)
    spans = [span_of(spec, [], round) for round in (1, 74)]
    assert (spans[0].begin, spans[1].end) == (pytest.approx(16 / 90), 1.0)
    assert spans[0].end - spans[0].begin == pytest.approx(1 / 90), "the schedule has jumped"


def test_what_a_fork_cannot_go_on_with_is_refused(home: Path, tmp_path: Path) -> None:
    model, to = kept_model(home, 16), tmp_path / "fork"
    with pytest.raises(NoInputError, match="which samples were trained until round 16"):
        fork(model, home, to, told=told_of(model))
    other = told_of(replace(model, outer_digest=Digest(bytes(32))), token_clock=1)
    with pytest.raises(BadDataError, match="another state than the run had"):
        fork(model, home, to, told=other)
    with pytest.raises(NoInputError, match="have not agreed yet"):
        fork(model, home, to, told=pb.GetRoundResponse(summary=pb.RoundSummary(round=16)))
    with pytest.raises(UsageError, match="leaves none to go on with") as refused:
        last = replace(model, round=90)
        fork(last, home, to, told=told_of(last, token_clock=1))
    assert "atoll run extend" in str(refused.value.next_step)
    assert not to.exists()


def test_the_momentum_must_be_that_of_the_run(home: Path, tmp_path: Path) -> None:
    model = kept_model(home, 16)
    plain = fork(model, home, tmp_path / "plain")
    going_on = fork(model, home, tmp_path / "going-on", told=told_of(model, token_clock=1))
    weights = np.empty(plain.num_parameters, np.float32)
    for folder, spec in (("plain", going_on), ("going-on", plain)):
        with pytest.raises(ConfigError, match="holds the weights"):
            read_first(tmp_path / folder, spec, weights)


def test_a_fork_with_other_fragments_is_refused_before_its_weights_are(tmp_path: Path) -> None:
    """They would lie in another order, and no node could begin with them."""
    home = node_home(tmp_path / "deep", model={"num_layers": 2})
    fork(kept_model(home, 16), home, tmp_path / "fork")
    run_file = tmp_path / "fork" / RUN_FILE
    text = run_file.read_text()
    run_file.write_text(f"{text}\n[exchange]\nfragments = 2\n")
    assert "[exchange]" not in text
    with pytest.raises(ConfigError, match=r"fragments = 2: .* is of 1, so write fragments = 1"):
        load_run_folder(tmp_path / "fork", RUN_FILE)


def test_descriptions_from_before_a_fork_could_go_on_have_the_digest_that_they_had() -> None:
    spec = tiny().model_copy(update={"description": Description(first_digest="ab" * 32)})
    told = json.loads(spec.canonical_json())["description"]
    assert told["first_digest"] and not {"beginning", "first_fragments"} & told.keys()


@pytest.mark.parametrize("trained", [(0,), (4, 4), (0, 8, 6, 12)])
def test_samples_that_are_no_pieces_in_order_are_refused(trained: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match="first places and ends in turns"):
        Beginning(trained=trained)


def test_snapshots_are_listed_with_the_figures_of_their_rounds(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [pb.HeldOutLoss(round=16, loss=2.5), pb.HeldOutLoss(round=20, loss=2.0)]
    status = pb.GetStatusResponse(run=pb.RunStatus(held_out_losses=losses))

    def one(link: StatusLink, number: int) -> pb.GetRoundResponse:
        if number == 16:
            raise NoInputError("round 16 is too old to be kept")
        return pb.GetRoundResponse(summary=pb.RoundSummary(round=number, loss=3.0, tokens=1000))

    monkeypatch.setattr(StatusLink, "status", lambda link: status)
    monkeypatch.setattr(StatusLink, "round", one)
    damaged = home / SNAPSHOTS_FOLDER / "round-00000024.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4])
    assert console.run(cli.root, ["node", "snapshots", "--json", "--dir", str(home)]) == 0
    newest, cut, old = json.loads(capsys.readouterr().out)
    assert (newest["round"], newest["loss"], newest["held_out"]) == (25, 3.0, None)
    assert newest["digest"] == kept_model(home).outer_digest.hex()
    assert (
        newest["num_bytes"]
        == (home / SNAPSHOTS_FOLDER / "round-00000025.safetensors").stat().st_size
    )
    assert (cut["round"], cut["digest"]) == (24, "")
    assert cut["damage"].startswith("it is no snapshot")
    assert (old["round"], old["loss"], old["held_out"]) == (16, None, 2.5)
    assert console.run(cli.root, ["node", "snapshots", "--dir", str(home)]) == 0
    header, first, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["round", "loss", "held-out", "tokens", "size", "digest"]
    assert first.split()[:4] == ["25", "3.000", "-", "1.0k"]


def test_snapshots_are_listed_without_figures_when_no_coordinator_answers(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert console.run(cli.root, ["node", "snapshots", "--dir", str(home)]) == 0
    told = capsys.readouterr()
    assert [line.split()[:2] for line in told.out.splitlines()[1:]] == [
        *(["25", "-"], ["24", "-"], ["16", "-"])
    ]
    assert told.err.startswith("without figures: ")


def test_a_folder_without_snapshots_is_told_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "node").mkdir()
    words = ["node", "snapshots", "--dir", str(tmp_path / "node")]
    assert console.run(cli.root, words) == ExitCode.NO_INPUT
    assert "atoll join" in capsys.readouterr().err


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
