"""Which set of parts hosts go on from, whatever order they come in, and whose folder is whose."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from node.hosts.parts import Arrangement, Part, Shelf, arranged
from node.island.checkpoints import About, CheckpointFolder
from protocol.errors import SystemRefusedError
from protocol.rounds import Digest

RUN, LAYOUT = (Digest(bytes([n]) * 32) for n in (1, 2))
MESH = "shard 4 (ZeRO 3)"


def of(host: int, *set_ids: str) -> list[Part]:
    """What one host has, the newest first."""
    return [Part(set_id=set_id, host=host) for set_id in set_ids]


def some(order: tuple[int, ...], *set_ids: str) -> Arrangement:
    return Arrangement(order=order, set_ids=frozenset(set_ids))


def test_the_newest_set_of_which_all_hosts_have_their_part_decides() -> None:
    assert arranged(of(0, "b", "a"), [of(1, "b", "a"), of(2, "a")]) == some((0, 1), "a")
    assert arranged(of(0, "b", "a"), [of(1, "b", "a"), of(2, "b", "a")]) == some((0, 1), "a", "b")


def test_hosts_that_come_in_another_order_get_the_places_that_they_had() -> None:
    assert arranged(of(0, "a"), [of(3, "a"), of(1, "a"), of(2, "a")]) == some((1, 2, 0), "a")


def test_a_set_that_was_written_in_other_places_is_not_to_be_had() -> None:
    first, second = of(1, "b") + of(2, "a"), of(2, "b") + of(1, "a")
    assert arranged(of(0, "b", "a"), [first, second]) == some((0, 1), "b")


@pytest.mark.parametrize(
    ("own", "others"),
    [
        ([], [of(1, "a"), of(2, "a")]),
        (of(0, "a"), [of(1, "a"), []]),
        (of(0, "a"), [of(1, "a"), of(2, "of the same round, trained again")]),
        (of(1, "a"), [of(0, "a"), of(2, "a")]),  # the leader followed when it was written
        (of(0, "a"), [of(1, "a"), of(1, "a")]),  # a folder was copied
    ],
)
def test_without_a_complete_set_hosts_stay_as_they_came(
    own: list[Part], others: list[list[Part]]
) -> None:
    assert arranged(own, others) == some((0, 1))


def write(path: Path, round_: int, *, num_hosts: int = 2, mesh: str = MESH) -> None:
    folder = CheckpointFolder(path=path, run_digest=RUN, layout_digest=LAYOUT, every_rounds=1)
    folder.building(round_).mkdir(parents=True)
    folder.seal(
        About(
            run_digest=RUN.hex(),
            layout_digest=LAYOUT.hex(),
            round=round_,
            mesh=mesh,
            num_hosts=num_hosts,
            host=1,
            set_id=f"set {round_}",
        )
    )
    folder.finish(round_)


def opened(shelf: Shelf) -> list[Part]:
    return shelf.open(
        run_digest=RUN.hex(),
        layout_digest=LAYOUT.hex(),
        every_rounds=1,
        num_hosts=2,
        mesh=MESH,
        num_elements=1000,
        num_parts=10,
    )


def test_a_follower_tells_what_it_has_and_forgets_what_was_being_written(tmp_path: Path) -> None:
    write(tmp_path, 4)
    write(tmp_path, 5)
    (tmp_path / ".round-6").mkdir()
    shelf = Shelf(tmp_path)
    assert opened(shelf) == of(1, "set 5", "set 4")
    assert not (tmp_path / ".round-6").exists()
    assert shelf.checkpoint("set 4").path == tmp_path / "round-4"
    assert opened(shelf) == of(1, "set 5", "set 4")  # for the next start of its ranks
    shelf.close()


def test_a_part_is_read_by_the_mesh_and_number_of_hosts_that_wrote_it_alone(tmp_path: Path) -> None:
    write(tmp_path, 1, num_hosts=1)
    write(tmp_path, 2, mesh="replicate 4")
    shelf = Shelf(tmp_path)
    with capture_logs() as lines:
        assert opened(shelf) == []
    assert [line["why"] for line in lines] == [
        f"it is one host's part of the mesh replicate 4, and only that mesh can read it: "
        f"this one is {MESH}",
        "each host of an island has its own part: that one's were 1, and this one's are 2",
    ]
    shelf.close()
    alone = CheckpointFolder(path=tmp_path, run_digest=RUN, layout_digest=LAYOUT, every_rounds=1)
    assert [checkpoint.about.round for checkpoint in alone.whole()] == [1]


def test_two_followers_do_not_share_a_folder(tmp_path: Path) -> None:
    one = Shelf(tmp_path / "inner-two")
    with pytest.raises(SystemRefusedError, match=r"another follower .*--name, or .*--checkpoints"):
        Shelf(tmp_path / "inner-two")
    one.close()
    Shelf(tmp_path / "inner-two").close()
