"""A snapshot is the state of its round, bit for bit, whatever changes while it is written."""

import random
import threading
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.disk import snapshots
from node.disk.snapshot_folder import SnapshotFolder
from node.disk.snapshots import Owed, Snapshot, SnapshotWriting
from protocol.wire.rounds import Digest
from tests.property.effort import examples

NUM_ELEMENTS, PIECE = 1000, 16
RUN, LAYOUT = Digest(bytes(range(32))), Digest(bytes(range(32, 64)))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "PIECE_ELEMENTS", PIECE)


class World:
    """Vectors that change by fragments, as commits change them, and what was saved of them."""

    def __init__(self, folder: Path, cuts: list[int]) -> None:
        edges = [0, *sorted(set(cuts)), NUM_ELEMENTS]
        self.fragments = [slice(a, b) for a, b in pairwise(edges)]
        self.values = np.random.default_rng(0).normal(size=(3, NUM_ELEMENTS)).astype(np.float32)
        # By fragment: each commit puts another one in its place.
        self.errors: dict[int, np.ndarray] = {}
        self.round = 0
        self.folder = SnapshotFolder(folder)
        self.writing: SnapshotWriting | None = None
        self.expected: dict[int, bytes] = {}

    def commit(self, fragment: int) -> None:
        span = self.fragments[fragment % len(self.fragments)]
        if self.writing is not None:
            self.writing.keep(span)
        self.values[:, span] += np.float32(1)
        self.round += 1
        size = span.stop - span.start
        self.errors[span.start] = np.full(size, self.round, dtype=np.float32)

    def begin(self) -> SnapshotWriting:
        parameters, momentum, residual = self.values
        errors = dict(sorted(self.errors.items()))
        self.expected[self.round] = b"".join(map(bytes, (self.values, *errors.values())))
        self.writing = self.folder.begin(
            Snapshot(
                round=self.round,
                run_digest=RUN,
                layout_digest=LAYOUT,
                parameters=parameters,
                momentum=momentum,
            ),
            Owed(residual=residual, reducer_error=errors),
            order=self.fragments,
        )
        return self.writing

    def check(self, round: int) -> None:
        loaded = self.folder.load_newest(RUN, LAYOUT)
        assert loaded is not None and loaded[1] is not None
        snapshot, owed = loaded
        assert snapshot.round == round
        assert owed is not None
        vectors = (snapshot.parameters, snapshot.momentum, *owed.tensors().values())
        assert b"".join(vector.tobytes() for vector in vectors) == self.expected[round]


@examples(200)
@given(
    cuts=st.lists(st.integers(1, NUM_ELEMENTS - 1), max_size=7),
    lives=st.lists(
        st.dictionaries(st.integers(0, 4 * NUM_ELEMENTS // PIECE), st.integers(0, 7), max_size=6),
        min_size=1,
        max_size=4,
    ),
)
def test_commits_between_any_two_pieces_leave_no_trace(
    cuts: list[int], lives: list[dict[int, int]]
) -> None:
    """`lives`: of each snapshot after which piece a commit comes, and of which fragment."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        world = World(Path(folder), cuts)
        for commits in lives:
            writing, num_pieces = world.begin(), 0

            def between(num_bytes: int, commits: dict[int, int] = commits) -> None:
                nonlocal num_pieces
                if num_pieces in commits:
                    world.commit(commits[num_pieces])
                num_pieces += 1

            writing._pace = between  # type: ignore[method-assign]
            round = writing.round
            writing.write()
            world.check(round)
            world.writing = None
            world.commit(0)


@pytest.mark.parametrize("seed", range(8))
def test_so_it_is_with_commits_in_another_thread(tmp_path: Path, seed: int) -> None:
    world, rng = World(tmp_path, [100, 300, 500, 900]), random.Random(seed)
    for _ in range(5):
        writing = world.begin()
        round = writing.round
        failures: list[Any] = []

        def write(writing: SnapshotWriting = writing, failures: list[Any] = failures) -> None:
            try:
                writing.write(is_patient=True)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        while thread.is_alive():
            world.commit(rng.randrange(5))
        thread.join()
        assert not failures
        world.check(round)
