"""What export and sampling read of a snapshot: the parameters, checked, and no more memory than these."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from node.config import SNAPSHOTS_FOLDER
from node.disk.snapshot_folder import SnapshotFolder
from node.disk.snapshots import Owed, Snapshot
from node.kept import keep_run, kept_model
from node.outer_state import PIECE_ELEMENTS
from protocol.errors import BadDataError, ConfigError
from protocol.run.models import layout_of
from protocol.wire.rounds import Digest
from tests.tiny_runs import tiny

RUN, LAYOUT = Digest(bytes(range(32))), Digest(bytes(range(32, 64)))
PIECE_BYTES = 4 * PIECE_ELEMENTS


def state(round: int, num_elements: int) -> tuple[Snapshot, Owed]:
    values = np.random.default_rng(round).normal(size=(4, num_elements)).astype(np.float32)
    snapshot = Snapshot(
        round=round,
        run_digest=RUN,
        layout_digest=LAYOUT,
        parameters=values[0],
        momentum=values[1],
    )
    return snapshot, Owed(residual=values[2], reducer_error={0: values[3][:7]})


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "num_elements", [100, PIECE_ELEMENTS // 2, PIECE_ELEMENTS, 2 * PIECE_ELEMENTS + 7]
)
def test_the_parameters_come_as_they_were_with_round_and_digest(
    tmp_path: Path, num_elements: int
) -> None:
    folder = SnapshotFolder(tmp_path)
    assert folder.load_parameters(RUN, LAYOUT) is None
    for round in (1, 2):
        folder.save(*state(round, num_elements))
    found = folder.load_parameters(RUN, LAYOUT)
    saved, _ = state(2, num_elements)
    assert found is not None
    assert (found.round, found.outer_digest) == (2, saved.outer_digest())
    assert found.values.tobytes() == saved.parameters.tobytes()
    assert not found.values.flags.writeable


def test_no_more_memory_is_taken_than_the_parameters_and_a_few_pieces(tmp_path: Path) -> None:
    num_elements = 8 * PIECE_ELEMENTS
    folder = SnapshotFolder(tmp_path)
    folder.save(*state(1, num_elements))

    def peak_of(load: object) -> int:
        tracemalloc.start()
        assert callable(load)
        load(RUN, LAYOUT)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    def copied(run: Digest, layout: Digest) -> object:
        kept = folder.load_newest(run, layout)
        assert kept is not None and kept[1] is not None
        return [kept[0].parameters.copy(), kept[0].momentum.copy()]

    assert peak_of(copied) >= 8 * num_elements, "the measure sees nothing"
    # What is read is mapped; only the reducer's error is copied, which outlives the file.
    assert peak_of(folder.load_newest) < 4 * num_elements + PIECE_BYTES
    assert peak_of(folder.load_parameters) < 4 * num_elements + 5 * PIECE_BYTES


def test_what_is_owed_is_not_read(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    path = folder.save(*state(1, 100))
    flip(path, -1)  # in the reducer's error
    flip(path, -401)  # in the residual
    with pytest.raises(BadDataError):
        folder.load_newest(RUN, LAYOUT)
    found = folder.load_parameters(RUN, LAYOUT)
    assert found is not None
    assert found.values.tobytes() == state(1, 100)[0].parameters.tobytes()


def test_export_and_sampling_read_the_parameters_alone(tmp_path: Path) -> None:
    spec = tiny()
    layout = layout_of(spec)
    saved, owed = state(4, layout.num_elements)
    saved = replace(saved, run_digest=spec.digest(), layout_digest=layout.summary().digest)
    keep_run(tmp_path, spec)
    flip(SnapshotFolder(tmp_path / SNAPSHOTS_FOLDER).save(saved, owed), -1)
    model = kept_model(tmp_path)
    assert (model.round, model.outer_digest) == (4, saved.outer_digest())
    assert model.parameters.tobytes() == saved.parameters.tobytes()


def test_any_flipped_byte_gives_the_older_snapshot_or_the_same_parameters(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    folder.save(*state(1, 100))
    path = folder.save(*state(2, 100))
    whole = path.read_bytes()
    right = {round: state(round, 100)[0].parameters.tobytes() for round in (1, 2)}
    begin_of_owed = len(whole) - 4 * (100 + 7)
    num_passed_over = 0
    for place in range(0, len(whole), 3):
        flip(path, place)
        with capture_logs() as logs:
            found = folder.load_parameters(RUN, LAYOUT)
        assert found is not None
        assert found.values.tobytes() == right[found.round], place
        if begin_of_owed - 800 <= place < begin_of_owed:
            assert found.round == 1, "a damaged parameter or momentum was taken"
        if found.round == 1:
            num_passed_over += 1
            assert [entry["log_level"] for entry in logs] == ["warning"]
            assert logs[0]["path"] == str(path)
        path.write_bytes(whole)
    assert num_passed_over > 300


def test_a_damaged_momentum_alone_is_an_error_for_the_person(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    flip(folder.save(*state(1, 100)), -900)
    with pytest.raises(BadDataError, match="damaged"):
        folder.load_parameters(RUN, LAYOUT)


def test_a_file_under_another_rounds_name_is_passed_over(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    folder.save(*state(1, 100))
    newest = folder.save(*state(2, 100))
    newest.rename(newest.with_name("round-00000003.safetensors"))
    found = folder.load_parameters(RUN, LAYOUT)
    assert found is not None and found.round == 1


def test_files_of_another_run_or_layout_are_refused_by_name(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    folder.save(*state(1, 100))
    other = Digest(b"\xee" * 32)
    with pytest.raises(ConfigError, match=r"run 000102030405, not to eeeeeeeeeeee"):
        folder.load_parameters(other, LAYOUT)
    with pytest.raises(ConfigError, match=r"layout 202122232425, not to eeeeeeeeeeee"):
        folder.load_parameters(RUN, other)
