"""When a node's owner lets it train, by the clock, the power supply and what else runs there."""

import asyncio
import os
from dataclasses import replace
from datetime import time
from pathlib import Path

import pytest

from node.config import TEMPLATE, load_settings
from node.machine import limits
from node.machine.limits import (
    Limits,
    Seen,
    Ticks,
    Usage,
    active_desktops,
    hours_of,
    is_on_battery,
    others_share,
    seconds_since_key,
    why_not,
)
from protocol.errors import ConfigError

NOON = Seen(at=time(12, 0))


def may_train(limits: Limits, seen: Seen, *, was_in_use: bool = False) -> bool:
    return not why_not(limits, seen, was_in_use=was_in_use)


@pytest.mark.parametrize(
    ("at", "is_within"),
    [
        (time(21, 59), False),
        (time(22, 0), True),
        (time(3, 0), True),
        (time(6, 59, 59), True),
        (time(7, 0), False),
        (time(12, 15), True),
        (time(12, 30), False),
        (time(23, 59), True),
    ],
)
def test_hours_go_over_midnight_and_end_before_their_end(at: time, is_within: bool) -> None:
    limits = Limits(hours=hours_of("22-7:00, 12:00-12:30"))
    assert may_train(limits, Seen(at=at)) is is_within


def test_hours_that_are_none_are_refused_and_told_with_the_key(tmp_path: Path) -> None:
    for text in ("22", "25-7", "7-7", "7:60-8", "7-24:30", "at night"):
        with pytest.raises(ValueError, match="no part of a day"):
            hours_of(text)
    assert may_train(Limits(hours=hours_of("0-24")), NOON)
    (tmp_path / "node.toml").write_text('name = "n"\nhours = "at night"\n')
    with pytest.raises(ConfigError, match=r"hours = 'at night': write hours as 22:00-07:00"):
        load_settings(tmp_path)


def test_a_node_without_limits_trains_whatever_is_seen() -> None:
    busy = Seen(
        at=time(3), is_on_battery=True, seconds_since_key=0, others_share=1, in_use_by=("ana",)
    )
    assert may_train(Limits(), busy) and not Limits().is_any
    assert (
        why_not(Limits(on_battery=False), busy, was_in_use=False)
        == "this machine runs on its battery"
    )
    assert "ana" in why_not(Limits(only_idle=True), busy, was_in_use=False)


def test_a_machine_is_idle_when_nobody_types_and_little_else_runs() -> None:
    limits = Limits(only_idle=True)
    assert may_train(limits, replace(NOON, seconds_since_key=301, others_share=0.24))
    assert not may_train(limits, replace(NOON, seconds_since_key=299))
    assert "take 25% of" in why_not(limits, replace(NOON, others_share=0.25), was_in_use=False)


def test_a_machine_at_the_border_of_idle_does_not_change_its_mind_all_the_time() -> None:
    limits, between = Limits(only_idle=True), replace(NOON, others_share=0.2)
    assert may_train(limits, between) and not may_train(limits, between, was_in_use=True)


def supply(root: Path, name: str, **files: str) -> None:
    folder = root / "sys/class/power_supply" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(f"{text}\n")


def test_a_laptop_is_on_battery_when_its_mains_is_off(tmp_path: Path) -> None:
    assert not is_on_battery(tmp_path), "a machine without supplies to tell of"
    supply(tmp_path, "hidpp_0", type="Battery", scope="Device", status="Discharging")
    assert not is_on_battery(tmp_path), "that is its mouse"
    supply(tmp_path, "AC", type="Mains", online="1")
    supply(tmp_path, "BAT0", type="Battery", status="Discharging")
    assert not is_on_battery(tmp_path)
    supply(tmp_path, "AC", online="0")
    assert is_on_battery(tmp_path)
    supply(tmp_path, "BAT0", status="Full")
    assert not is_on_battery(tmp_path)


def test_the_latest_key_in_any_terminal_counts(tmp_path: Path) -> None:
    assert seconds_since_key(1000.0, tmp_path) is None
    for name, at in (("tty1", 100), ("pts/0", 900), ("pts/ptmx", 999)):
        path = tmp_path / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (at, at))
    assert seconds_since_key(1000.0, tmp_path) == 100.0


def test_only_desktops_that_are_not_idle_count() -> None:
    sessions = "Name=ana\nType={}\nIdleHint={}\n"
    blocks = [sessions.format(*each) for each in (("tty", "no"), ("wayland", "yes"))]
    assert active_desktops("\n".join(blocks)) == ()
    assert active_desktops("\n".join([*blocks, sessions.format("x11", "no")])) == (
        "ana at a desktop",
    )
    assert active_desktops("") == ()


def test_what_came_of_the_node_is_not_others_work(tmp_path: Path) -> None:
    def tells(ticks: dict[int, tuple[int, int]], *, busy: int, idle: int) -> Ticks:
        proc = tmp_path / "proc"
        proc.mkdir(exist_ok=True)
        (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1\n")
        for process_id, (parent, spent) in ticks.items():
            (proc / str(process_id)).mkdir(exist_ok=True)
            fields = f"S {parent} " + "0 " * 9 + f"{spent} 0 0"
            (proc / str(process_id) / "stat").write_text(f"{process_id} (a) b) {fields}\n")
        return Ticks.read(10, tmp_path)

    before = tells({10: (1, 5), 11: (10, 50), 12: (11, 0), 99: (1, 7)}, busy=100, idle=100)
    assert before.own == 55
    after = tells({10: (1, 5), 11: (10, 70), 12: (11, 20), 99: (1, 27)}, busy=160, idle=140)
    assert others_share(before, after) == pytest.approx(0.2)
    assert others_share(after, after) == 0.0


def test_this_machine_can_be_looked_at() -> None:
    ticks = Ticks.read(os.getpid())
    assert 0 < ticks.own <= ticks.busy <= ticks.total
    machine = Usage(Limits(only_idle=True, on_battery=False))
    machine.look()
    assert machine.why_not == "" or machine.why_not.startswith("this machine ")


def test_what_was_in_use_is_idle_again_only_well_below_the_border() -> None:
    shares = iter((0.2, 0.3, 0.2, 0.1, 0.2))
    machine = Usage(Limits(only_idle=True), look=lambda: replace(NOON, others_share=next(shares)))
    trains = []
    for _ in range(5):
        machine.look()
        trains.append(not machine.why_not)
    assert trains == [True, False, False, True, True]


async def test_what_holds_is_looked_at_again_and_again() -> None:
    seen = [NOON, replace(NOON, is_on_battery=True)]
    watch = Usage(Limits(on_battery=False), look=lambda: seen[0])
    async with watch.watched(every_seconds=0.001):
        assert watch.why_not == ""
        del seen[0]
        async with asyncio.timeout(30):
            while not watch.why_not:  # noqa: ASYNC110 - a thread sets no event
                await asyncio.sleep(0.001)
        assert watch.why_not == "this machine runs on its battery"
    async with Usage(Limits(), look=lambda: pytest.fail("nothing to look for")).watched():
        pass


def test_the_words_of_node_toml_are_what_counts() -> None:
    assert limits.LOOK_SECONDS < 60
    assert "for five minutes, and other programs take less than a quarter" in TEMPLATE.replace(
        "\n# ", " "
    )
