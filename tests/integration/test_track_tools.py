"""`atoll track` with the real tools, offline, at a real coordinator: they have each round once, and texts."""

import asyncio
import json
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import Home, create_home
from lab.processes.family import atoll_command, atoll_environment
from tests.integration.coordinator_scene import LOCAL, described, serving
from tests.integration.played_swarm import Played, played
from tests.otlp_receiver import Receiver

RUN = """
[run]
name = "tracked"
rounds = 400
min_nodes = 2
[evaluation]
every_rounds = 2
prompts = ["Once ", "The sea"]
"""
WROTE = "upon a time"


def home_in(folder: Path) -> Home:
    return create_home(folder, config=LOCAL, text=lambda building: described(building, RUN))


async def until_round(play: Played, number: int) -> int:
    """Waits until this round is committed; returns one that was then."""
    async with asyncio.timeout(120), play.news:
        await play.news.wait_for(lambda: max(play.base, default=0) > number)
        return max(play.base) - 1


async def tracked(home: Home, *words: str) -> None:
    """Runs the command in a process of its own, as people do."""
    process = await asyncio.create_subprocess_exec(
        *atoll_command("track", *words, "--once", "--dir", home.directory),
        env=atoll_environment({"PYTHONPATH": os.environ.get("PYTHONPATH", "")}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()


async def tracked_twice(home: Home, *words: str) -> int:
    """Starts the command at two times of a run; returns a round that both have written up to at least."""
    play = Played(train_seconds=0.3, writes=WROTE)
    async with serving(home), played(home, ["attic", "campus"], play):
        newest = await until_round(play, 4)
        await tracked(home, *words)
        newest = await until_round(play, newest + 2)
        await tracked(home, *words)
    return newest


def assert_once_each(rounds: list[int], up_to: int) -> None:
    assert len(rounds) == len(set(rounds)), "a round is there twice"
    assert set(range(1, up_to)) <= set(rounds)


async def test_opentelemetry_has_each_round_once_with_when_nodes_did_what(tmp_path: Path) -> None:
    receiver, home = Receiver(), home_in(tmp_path / "home")
    try:
        where = ("--endpoint", receiver.endpoint, "--out", str(tmp_path / "out"))
        up_to = await tracked_twice(home, "--to", "opentelemetry", *where)
    finally:
        receiver.close()
    assert_once_each(receiver.rounds, up_to)
    names = {span.name for span in receiver.spans}
    assert {"round", "attic", "campus", "train", "send and receive", "apply"} <= names
    whole = sorted(
        (span for span in receiver.spans if span.name == "round"),
        key=lambda span: span.start_time_unix_nano,
    )
    ends = [span.end_time_unix_nano for span in whole[:-1]]
    begins = [span.start_time_unix_nano for span in whole[1:]]
    assert all(end <= begin + 10**8 for end, begin in zip(ends, begins, strict=True)), "overlap"


@pytest.mark.nightly
async def test_trackio_has_each_round_once_and_texts(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="the extra trackio is not installed: it takes 100 MB")
    up_to = await tracked_twice(
        home_in(tmp_path / "home"), "--to", "trackio", "--out", str(tmp_path / "out")
    )
    with sqlite3.connect(tmp_path / "out" / "tracked.db") as database:
        rows = [json.loads(row) for (row,) in database.execute("SELECT metrics FROM metrics")]
    assert_once_each([row["round"] for row in rows if "round/seconds" in row], up_to)
    assert any(WROTE in json.dumps(row.get("texts", "")) for row in rows)
    assert any("loss/held_out" in row for row in rows)


@pytest.mark.nightly
async def test_weights_and_biases_have_each_round_once_and_texts(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed: it takes 100 MB")
    up_to = await tracked_twice(
        home_in(tmp_path / "home"), "--to", "wandb", "--out", str(tmp_path / "out")
    )
    files = sorted((tmp_path / "out").rglob("*.wandb"))
    assert len(files) == 2, "one for each start"
    rows = [row for file in files for row in history_of(file)]
    assert_once_each([row["round"] for row in rows if "round/seconds" in row], up_to)
    assert any("loss/held_out" in row for row in rows)
    tables = [file.read_text() for file in (tmp_path / "out").rglob("*.table.json")]
    assert any(WROTE in table for table in tables)
    ours = {"logs", "media", "table"}
    told = {path.name for path in (tmp_path / "out").rglob("*") if path.is_dir()}
    assert ours <= told
    assert not [*(tmp_path / "out").rglob("wandb-metadata.json")], "nothing of this machine"


BLOCK_BYTES, HEADER_BYTES, FIRST_BYTES = 32768, 7, 7


def history_of(file: Path) -> Iterator[dict[str, Any]]:
    """What was logged, from a file of Weights & Biases: LevelDB's log format with records of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, gathered = file.read_bytes(), FIRST_BYTES, b""
    while at + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER_BYTES:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + HEADER_BYTES])
        gathered += data[at + HEADER_BYTES : at + HEADER_BYTES + length]
        at += HEADER_BYTES + length
        if kind in (1, 4):  # whole, or its last part
            record, gathered = Record.FromString(gathered), b""
            items = record.history.item
            if items:
                yield {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in items
                }
