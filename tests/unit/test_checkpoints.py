"""Which checkpoints there are, which are read, and how ranks come to one when they start."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from node.island.checkpoints.folder import (
    About,
    Checkpoint,
    CheckpointFolder,
    Kept,
    Loaded,
    Resuming,
)
from node.island.ranks.faults import RankDiedError
from protocol.run.run_spec import InnerSection, RunSpec
from protocol.wire.rounds import Digest

RUN, LAYOUT, OTHER = (Digest(bytes([n]) * 32) for n in (1, 2, 3))


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(
        path=tmp_path / "inner", run_digest=RUN, layout_digest=LAYOUT, every_rounds=3
    )


def write(
    folder: CheckpointFolder,
    round_: int,
    *,
    run: Digest = RUN,
    layout: Digest = LAYOUT,
) -> None:
    folder.make_room(round_)
    building = folder.building(round_)
    building.mkdir(parents=True)
    (building / "moments").write_bytes(b"moments of round %d" % round_)
    folder.seal(
        About(
            run_digest=run.hex(),
            layout_digest=layout.hex(),
            round=round_,
            mesh="1 rank",
        )
    )
    folder.finish(round_)


def rounds(folder: CheckpointFolder) -> list[int]:
    return [checkpoint.about.round for checkpoint in folder.whole()]


def test_the_two_newest_are_kept_and_read_newest_first(folder: CheckpointFolder) -> None:
    for round_ in (9, 10, 11):
        write(folder, round_)
    assert rounds(folder) == [11, 10]
    assert sorted(path.name for path in folder.path.iterdir()) == ["round-10", "round-11"]


def test_one_of_an_earlier_round_makes_later_ones_history_that_was_left(
    folder: CheckpointFolder,
) -> None:
    for round_ in (9, 10, 11, 10):
        write(folder, round_)
    assert rounds(folder) == [10]


def test_what_is_not_finished_is_not_read_and_makes_room(folder: CheckpointFolder) -> None:
    write(folder, 1)
    folder.building(2).mkdir()
    (folder.building(2) / "moments").write_bytes(b"mom")
    assert rounds(folder) == [1]
    folder.remove_unfinished()
    assert [path.name for path in folder.path.iterdir()] == ["round-1"]


def damage(path: Path) -> None:
    path.write_bytes(b"Moments" + path.read_bytes()[7:])


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda path: damage(path / "moments"), "moments is damaged"),
        (lambda path: (path / "moments").unlink(), "files are missing, or there are others"),
        (lambda path: (path / "more").touch(), "files are missing, or there are others"),
        (lambda path: (path / "checkpoint.json").unlink(), "its checkpoint.json is not there"),
        (lambda path: (path / "checkpoint.json").write_text("{"), "not there or damaged"),
    ],
)
def test_a_damaged_one_is_left_out_with_the_reason(folder: CheckpointFolder, harm, why) -> None:  # type: ignore[no-untyped-def]
    write(folder, 1)
    write(folder, 2)
    harm(folder.path / "round-2")
    with capture_logs() as lines:
        assert rounds(folder) == [1]
    (line,) = lines
    assert (line["event"], line["path"]) == ("checkpoint left out", str(folder.path / "round-2"))
    assert why in line["why"]


def test_those_of_another_run_or_model_are_left_out(folder: CheckpointFolder) -> None:
    write(folder, 1, run=OTHER)
    write(folder, 2, layout=OTHER)
    with capture_logs() as lines:
        assert rounds(folder) == []
    assert "its model has another layout" in lines[0]["why"]
    assert "it is of another run" in lines[1]["why"]


def test_there_is_never_room_for_more_than_two(folder: CheckpointFolder) -> None:
    for round_ in (9, 10):
        write(folder, round_)
    folder.make_room(11)
    folder.building(11).mkdir()
    assert rounds(folder) == [10]
    need = folder.need(1000, 10)
    assert need.num_bytes == 2 * (8 * 1000 + 8192 * 10)
    assert need.held_bytes == sum(p.stat().st_size for p in folder.path.rglob("*") if p.is_file())


def test_a_damaged_newest_one_does_not_cost_the_one_before_it(folder: CheckpointFolder) -> None:
    for round_ in (1, 2):
        write(folder, round_)
    damage(folder.path / "round-2" / "moments")
    assert rounds(folder) == [1]
    folder.make_room(3)
    assert [path.name for path in folder.path.iterdir()] == ["round-1"]


class Ranks:
    """What loading comes to, by round; those that are not named are taken over."""

    def __init__(self, **fates: str | BaseException) -> None:
        self.tried: list[int] = []
        self._fates = {int(name[1:]): fate for name, fate in fates.items()}

    async def load(self, checkpoint: Checkpoint) -> Loaded:
        self.tried.append(checkpoint.about.round)
        fate = self._fates.get(checkpoint.about.round, "")
        if isinstance(fate, BaseException):
            raise fate
        return Loaded(failure=fate)


def resuming_from(folder: CheckpointFolder | None) -> Resuming:
    return Resuming(folder, RunSpec(inner=InnerSection(steps=500, beta2=0.95)))


async def test_a_start_goes_on_from_the_newest_that_loads_and_says_so(
    folder: CheckpointFolder,
) -> None:
    write(folder, 1)
    write(folder, 2)
    ranks = Ranks(r2="it does not fit")
    resuming = resuming_from(folder)
    with capture_logs() as lines:
        await resuming.resume(ranks.load)
        resuming.tell_of_training(token_clock=64)
    assert ranks.tried == [2, 1]
    assert [line["event"] for line in lines] == [
        "checkpoint left out",
        "inner optimizer goes on from its checkpoint",
    ]
    assert (lines[0]["why"], lines[1]["round"]) == ("it does not fit", 1)


async def test_after_the_run_went_back_no_checkpoint_of_an_undone_round_is_taken(
    folder: CheckpointFolder,
) -> None:
    for number in (3, 6):
        write(folder, number)
    resuming = resuming_from(folder)
    resuming.leave_out_after = 4
    loaded: list[int] = []

    async def load(checkpoint: Checkpoint) -> Loaded:
        loaded.append(checkpoint.about.round)
        return Loaded()

    await resuming.resume(load)
    assert loaded == [3]
    await resuming_from(folder).resume(load)
    assert loaded == [3, 3], "that of the undone round is gone for good"


async def test_a_checkpoint_comes_after_so_many_rounds_but_no_sooner_than_the_disk_is_spared(
    folder: CheckpointFolder,
) -> None:
    now = 0.0
    spared = replace(folder, every_rounds=3, least_seconds=100.0)
    resuming = Resuming(spared, RunSpec(), clock=lambda: now)
    await resuming.resume(Ranks().load)
    kept = []
    for second in range(0, 400, 20):
        now = float(second)
        if resuming.folder_if_due(is_last=False):
            kept.append(second)
    assert kept == [0, 100, 200, 300]  # every third round would be 60 seconds apart
    assert resuming.folder_if_due(is_last=True) is spared
    await resuming.resume(Ranks().load)  # ranks that died: what is there may be of long ago
    assert resuming.folder_if_due(is_last=False) is spared


async def test_a_start_without_any_says_in_mid_run_that_learning_rates_rise(
    folder: CheckpointFolder,
) -> None:
    resuming = resuming_from(folder)
    with capture_logs() as lines:
        await resuming.resume(Ranks().load)
        resuming.tell_of_training(token_clock=64)
        resuming.tell_of_training(token_clock=128)
    (rises,) = lines  # of a new run there is nothing to miss, and nothing to say
    assert rises["event"].startswith("re-warm-up: learning rates rise")
    assert rises["inner_steps"] == 40


async def test_a_run_that_begins_has_no_re_warm_up_to_tell_of(folder: CheckpointFolder) -> None:
    resuming = resuming_from(folder)
    await resuming.resume(Ranks().load)
    with capture_logs() as lines:
        resuming.tell_of_training(token_clock=0)
        resuming.tell_of_training(token_clock=64)
    assert not lines


async def test_a_checkpoint_that_a_rank_died_of_is_not_met_again(folder: CheckpointFolder) -> None:
    write(folder, 1)
    write(folder, 2)
    resuming = resuming_from(folder)
    with pytest.raises(RankDiedError):
        await resuming.resume(Ranks(r2=RankDiedError("rank 0 was ended by SIGSEGV")).load)
    again = Ranks()
    await resuming.resume(again.load)
    assert again.tried == [1]


async def test_a_start_that_is_cancelled_keeps_the_checkpoint(folder: CheckpointFolder) -> None:
    write(folder, 1)
    with pytest.raises(asyncio.CancelledError):
        await resuming_from(folder).resume(Ranks(r1=asyncio.CancelledError()).load)
    assert rounds(folder) == [1]


async def test_a_start_removes_what_was_being_written_at_a_death(folder: CheckpointFolder) -> None:
    folder.building(7).mkdir(parents=True)
    await resuming_from(folder).resume(Ranks().load)
    assert not list(folder.path.iterdir())


async def test_the_first_round_after_a_start_is_kept_and_then_every_third(
    folder: CheckpointFolder,
) -> None:
    resuming = resuming_from(folder)
    await resuming.resume(Ranks().load)
    due = [resuming.folder_if_due(is_last=False) is not None for _ in range(7)]
    assert due == [True, False, False, True, False, False, True]
    assert resuming.folder_if_due(is_last=True) is folder
    await resuming.resume(Ranks().load)
    assert resuming.folder_if_due(is_last=False) is folder


async def test_without_a_folder_nothing_is_kept_or_said_of_it() -> None:
    resuming = resuming_from(None)
    with capture_logs() as lines:
        await resuming.resume(Ranks().load)
        assert resuming.folder_if_due(is_last=True) is None
    assert not lines


def test_people_are_told_of_checkpoints_that_were_not_written(folder: CheckpointFolder) -> None:
    resuming = resuming_from(folder)
    with capture_logs() as lines:
        resuming.tell_of_keeping(1, Kept(is_busy=False, failure=""))
        resuming.tell_of_keeping(4, Kept(is_busy=False, failure="no space left"))
        resuming.tell_of_keeping(7, Kept(is_busy=True, failure=""))
    assert [(line["log_level"], line["event"]) for line in lines] == [
        ("warning", "checkpoint not written"),
        ("warning", "no checkpoint: the one before is still being written"),
    ]
    assert lines[0]["why"] == "no space left"
