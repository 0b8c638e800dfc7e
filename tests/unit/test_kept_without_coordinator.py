"""What a node keeps to be read without a coordinator: if it is damaged or lost, what helps is said."""

import json
from pathlib import Path

import pytest

from node.island.data.places import DataPlaces
from node.kept import PLACES_FILE, RUN_FILE, keep_places, keep_run, kept_model, kept_run, places_of
from protocol.errors import AtollError, BadDataError, NoInputError
from protocol.trust.identity import Identity
from tests.tiny_runs import tiny
from tests.unit.test_credentials import joined

DAMAGES = [b"", b'{"run": {"na', b"\xff\xfe" * 400, b"[]", b"null", b'{"folder": 3}']


def read_places(folder: Path) -> DataPlaces:
    return places_of(folder, base=None, typed_in=folder)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node's folder with a snapshot, of a coordinator that is gone."""
    joined().save(tmp_path)
    Identity.generate().save(tmp_path / "identity.key")
    keep_run(tmp_path, tiny())
    keep_places(tmp_path, DataPlaces(folder=tmp_path, own="tokens"))
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "round-00000003.safetensors").write_bytes(b"weights")
    return tmp_path


def test_a_run_file_without_all_of_its_keys_is_not_read_as_the_run_of_the_defaults(
    node: Path,
) -> None:
    kept = json.loads(tiny().canonical_json())
    (node / RUN_FILE).write_text(json.dumps(kept, indent=1))
    assert kept_run(node) == tiny()
    del kept["inner"]
    for part in ("{}", json.dumps(kept)):
        (node / RUN_FILE).write_text(part)
        with pytest.raises(BadDataError, match="it is not what a node writes there"):
            kept_run(node)


@pytest.mark.parametrize("damage", DAMAGES[:-1])
def test_a_damaged_run_file_is_copied_from_another_node_where_no_coordinator_gives_it(
    node: Path, damage: bytes
) -> None:
    (node / RUN_FILE).write_bytes(damage)
    with pytest.raises(BadDataError) as refused:
        kept_model(node)
    told_briefly(refused.value)
    assert f"copy {RUN_FILE} from another node's folder" in refused.value.next_step
    other = node / "other"
    other.mkdir()
    keep_run(other, tiny())
    (node / RUN_FILE).write_bytes((other / RUN_FILE).read_bytes())
    assert kept_run(node) == tiny()


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_places_are_removed_and_written_into_the_settings(
    node: Path, damage: bytes
) -> None:
    assert read_places(node).own == "tokens"
    (node / PLACES_FILE).write_bytes(damage)
    with pytest.raises(BadDataError) as refused:
        read_places(node)
    told_briefly(refused.value)
    assert "remove it, and name in node.toml, as data and base," in refused.value.next_step
    (node / PLACES_FILE).unlink()
    (node / "node.toml").write_text(f"data = {json.dumps('elsewhere')}\n")
    assert read_places(node).own == "elsewhere"


def test_snapshots_whose_run_file_is_lost_are_not_taken_for_none(node: Path) -> None:
    (node / RUN_FILE).unlink()
    with pytest.raises(NoInputError, match="says what the snapshots beside it are of") as refused:
        kept_model(node)
    assert f"copy {RUN_FILE} from another node's folder" in refused.value.next_step
    (node / "snapshots" / "round-00000003.safetensors").unlink()
    with pytest.raises(NoInputError, match="holds no committed state yet"):
        kept_model(node)


def told_briefly(refused: AtollError) -> None:
    """No bytes of the file, and no words of Python's."""
    assert len(refused.what) < 250 and "Error(" not in refused.what and "\\x" not in refused.what
    assert "atoll node start --dir" in refused.next_step
