"""Which set of parts hosts go on from, whatever order they come in, and whose folder is whose."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from node.hosts.following import Shelf
from node.hosts.leading import Arrangement, arranged
from node.hosts.wire import OpenShelf, Part
from node.island.checkpoints.folder import About, CheckpointFolder
from protocol.errors import SystemRefusedError
from protocol.wire.rounds import Digest

RUN, LAYOUT = (Digest(bytes([n]) * 32) for n in (1, 2))
MESH = "shard 4 (ZeRO 3)"


def of(host: int, *set_ids: str, num_hosts: int = 2) -> list[Part]:
    """What one host has, the newest first."""
    return [Part(set_id=set_id, host=host, num_hosts=num_hosts) for set_id in set_ids]


def of_3(host: int, *set_ids: str) -> list[Part]:
    return of(host, *set_ids, num_hosts=3)


def some(order: tuple[int, ...], *lacks: str) -> Arrangement:
    return Arrangement(order=order, lacks=lacks)


def test_a_set_can_be_had_when_all_of_its_parts_are_here() -> None:
    others = [of_3(1, "b", "a"), of_3(2, "a")]
    assert arranged(of_3(0, "b", "a"), others) == some(
        (0, 1), "host 2's part of it is not here", ""
    )
    assert arranged(of_3(0, "b", "a"), [of_3(1, "b", "a"), of_3(2, "b", "a")]) == some(
        (0, 1), "", ""
    )


def test_hosts_that_come_in_another_order_get_the_places_that_they_had() -> None:
    others = [of(3, "a", num_hosts=4), of(1, "a", num_hosts=4), of(2, "a", num_hosts=4)]
    assert arranged(of(0, "a", num_hosts=4), others) == some((1, 2, 0), "")


def test_a_set_that_was_written_in_other_places_can_be_had_as_well() -> None:
    first, second = of_3(1, "b") + of_3(2, "a"), of_3(2, "b") + of_3(1, "a")
    assert arranged(of_3(0, "b", "a"), [first, second]) == some((0, 1), "", "")
    assert arranged(of_3(0, "b", "a"), [second, first]) == some((1, 0), "", "")


def test_the_newest_set_that_can_be_had_decides_on_the_places() -> None:
    first, second = of_3(2, "b"), of_3(1, "b", "a") + of_3(2, "lost")
    assert arranged(of_3(0, "lost", "b"), [first, second]).order == (1, 0)


def test_hosts_that_were_not_there_when_it_was_written_come_last() -> None:
    assert arranged(of(0, "a"), [[], of(1, "another"), of(1, "a")]) == some((2, 0, 1), "")


def test_what_more_hosts_wrote_than_are_here_cannot_be_had() -> None:
    assert arranged(of_3(0, "a"), [of_3(1, "a")]) == some((0,), "host 2's part of it is not here")


def test_what_the_leader_wrote_alone_is_whole_whoever_follows() -> None:
    alone = [Part(set_id="", host=0, num_hosts=1)]
    assert arranged(alone, [of(1, "a"), []]) == some((0, 1), "")


def test_a_leader_that_followed_when_it_was_written_reads_it_with_the_one_that_led() -> None:
    assert arranged(of_3(1, "a"), [of_3(2, "a"), of_3(0, "a")]) == some((1, 0), "")


def test_a_set_of_which_the_leader_has_nothing_is_none() -> None:
    assert arranged([], [of(0, "a"), of(1, "a")]) == some((0, 1))


@pytest.mark.parametrize(
    ("others", "lack"),
    [
        ([of_3(1, "a"), []], "host 2's part of it is not here"),
        ([[], []], "host 1's and host 2's part of it is not here"),
        (
            [of_3(1, "a"), of_3(2, "of the same round, trained again")],
            "host 2's part of it is not here",
        ),
        ([of_3(1, "a"), of_3(1, "a")], "host 2's part of it is not here"),  # a folder was copied
    ],
)
def test_without_a_complete_set_hosts_stay_as_they_came(
    others: list[list[Part]], lack: str
) -> None:
    assert arranged(of_3(0, "a"), others) == some((0, 1), lack)


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
        OpenShelf(
            run_digest=RUN.hex(),
            layout_digest=LAYOUT.hex(),
            every_rounds=1,
            num_hosts=2,
            num_elements=1000,
            num_parts=10,
        )
    )


def test_a_follower_tells_what_it_has_and_forgets_what_was_being_written(tmp_path: Path) -> None:
    write(tmp_path, 4)
    write(tmp_path, 5)
    (tmp_path / ".round-6").mkdir()
    shelf = Shelf(tmp_path)
    assert opened(shelf) == of(1, "set 5", "set 4")
    assert not (tmp_path / ".round-6").exists()
    assert shelf.part_of("set 4") == tmp_path / "round-4"
    assert shelf.part_of("of others") is None
    assert opened(shelf) == of(1, "set 5", "set 4")  # for the next start of its ranks
    shelf.close()


def test_hosts_tell_of_parts_of_any_mesh_and_number_of_hosts_but_a_host_alone_reads_its_own(
    tmp_path: Path,
) -> None:
    write(tmp_path, 1, num_hosts=1)
    write(tmp_path, 2, mesh="replicate 4", num_hosts=4)
    shelf = Shelf(tmp_path)
    with capture_logs() as lines:
        assert opened(shelf) == of(1, "set 2", num_hosts=4)
    assert [line["why"] for line in lines] == [
        "one host wrote it alone: where it leads, it can be read"
    ]
    shelf.close()
    alone = CheckpointFolder(path=tmp_path, run_digest=RUN, layout_digest=LAYOUT, every_rounds=1)
    with capture_logs() as lines:
        assert [checkpoint.about.round for checkpoint in alone.whole()] == [1]
    assert [line["why"] for line in lines] == [
        "it is one of the parts that 4 hosts wrote: --hosts 4 reads them"
    ]


def test_two_followers_do_not_share_a_folder(tmp_path: Path) -> None:
    one = Shelf(tmp_path / "inner-two")
    with pytest.raises(SystemRefusedError, match=r"another follower .*--name, or .*--checkpoints"):
        Shelf(tmp_path / "inner-two")
    one.close()
    Shelf(tmp_path / "inner-two").close()
