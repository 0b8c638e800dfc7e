"""A node that is put together: what its start leaves in memory, and what runs beside the control loop."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lab.run_files import TINY_MODEL
from node import assembly
from node.config import SNAPSHOTS_FOLDER, NodeSettings
from node.daemon import Holdings
from node.disk.snapshot_folder import SnapshotFolder
from node.disk.snapshots import Owed, Snapshot
from node.hosts.leading import HostsIsland
from node.hosts.wire import Publish
from node.island.models.first_weights import initial_parameters
from node.machine.hardware import look_around
from protocol.errors import ConfigError
from protocol.run.models import DecoderModel, Layout, layout_of
from protocol.service.notify import ServiceManager
from protocol.trust.identity import Identity
from protocol.trust.pki import Authority, Principal, Role, new_swarm_id
from protocol.wire.payload import WireCounts
from protocol.wire.rounds import NodeId
from tests.tiny_runs import run_of, tiny

SPEC = tiny()
MODEL = DecoderModel(**TINY_MODEL)
LAYOUT = layout_of(SPEC)


class Signals:
    manager = ServiceManager.of_environment({})

    @contextmanager
    def draining(self, *_: object, **__: object) -> Iterator[None]:
        yield


def saved_state(folder: Path, *, layout: Layout = LAYOUT) -> Snapshot:
    snapshot = Snapshot(
        round=7,
        run_digest=SPEC.digest(),
        layout_digest=layout.summary().digest,
        parameters=np.arange(layout.num_elements, dtype=np.float32),
        momentum=np.ones(layout.num_elements, dtype=np.float32),
    )
    owed = Owed(residual=snapshot.momentum, reducer_error={0: snapshot.momentum[:5]})
    SnapshotFolder(folder / SNAPSHOTS_FOLDER).save(snapshot, owed)
    return snapshot


async def run_with(
    monkeypatch: pytest.MonkeyPatch, folder: Path, look: Callable[[Any], object]
) -> None:
    """Puts a node together, and looks at its outer state when it would run."""

    class Daemon:
        def __init__(self, *, holdings: Holdings, **_: object) -> None:
            self._outer: Any = holdings.outer

        drain = vitals = None

        async def run(self) -> str:
            look(self._outer)
            self._outer = None
            return "looked at"

    monkeypatch.setattr(assembly, "Daemon", Daemon)
    monkeypatch.setattr(assembly, "Libp2pTransport", lambda **_: None)
    monkeypatch.setattr(assembly, "_island_of", lambda *_: None)
    start = assembly.NodeStart(
        folder=folder,
        settings=NodeSettings(name="attic", device="cpu"),
        credentials=SimpleNamespace(  # type: ignore[arg-type]
            proxy=None,
            host="127.0.0.1",
            authority_pem=Authority.create(new_swarm_id()).certificate_pem,
            principal=Principal(swarm_id=new_swarm_id(), role=Role.NODE, node_id=NodeId("a" * 32)),
            certificate_pem=b"",
        ),
        identity=Identity.generate(),
        spec=SPEC,
        rules=SPEC,
        link=None,  # type: ignore[arg-type]
        counts=WireCounts(),
        current_credentials=lambda: None,  # type: ignore[arg-type, return-value]
    )
    why = await assembly.run_daemon(start, look_around("cpu"), Signals())  # type: ignore[arg-type]
    assert why == "looked at"


def test_what_was_read_from_the_disk_leaves_the_memory_before_the_node_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is 12 bytes a parameter, for as long as the node runs; only the reducer's error is kept as it is."""
    saved = saved_state(tmp_path)
    read: list[weakref.ref[Any]] = []
    load = SnapshotFolder.load_newest

    def watched(*arguments: Any) -> Any:
        kept = load(*arguments)
        assert kept is not None
        snapshot, owed = kept
        assert owed is not None
        vectors = (snapshot.parameters, snapshot.momentum, owed.residual)
        read.extend(weakref.ref(vector) for vector in vectors)
        return kept

    monkeypatch.setattr(SnapshotFolder, "load_newest", watched)

    def look(outer: Any) -> None:
        gc.collect()
        assert len(read) == 3
        assert [reference() for reference in read] == [None] * 3
        assert outer.round == 7
        assert outer.digest == saved.outer_digest()
        assert (outer.owed().residual == 1).all()

    asyncio.run(run_with(monkeypatch, tmp_path, look))


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_first_weights_are_drawn_beside_the_loop_and_only_where_nothing_takes_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_snapshot: bool
) -> None:
    if has_snapshot:
        saved_state(tmp_path)
    loop_thread = threading.get_ident()
    drawn_in: list[int] = []
    parts = {"initial_parameters": initial_parameters}
    heavy = {"load_newest": SnapshotFolder.load_newest}

    def drawn(*arguments: Any, **named: Any) -> Any:
        drawn_in.append(threading.get_ident())
        return parts["initial_parameters"](*arguments, **named)

    def loaded(*arguments: Any) -> Any:
        assert threading.get_ident() != loop_thread
        return heavy["load_newest"](*arguments)

    def look(outer: Any) -> None:
        if not has_snapshot:
            expected = initial_parameters(SPEC)
            assert outer.snapshot().parameters.tobytes() == expected.tobytes()

    monkeypatch.setattr(assembly, "initial_parameters", drawn)
    monkeypatch.setattr(SnapshotFolder, "load_newest", loaded)
    asyncio.run(run_with(monkeypatch, tmp_path, look))
    assert len(drawn_in) == (0 if has_snapshot else 1)
    assert loop_thread not in drawn_in


def test_a_folder_of_another_run_is_refused_and_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_state(tmp_path, layout=Layout.of([("w", (256,))]))
    with pytest.raises(ConfigError, match="belongs to layout"):
        asyncio.run(run_with(monkeypatch, tmp_path, lambda outer: None))
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("num_threads", [2, 5])
def test_first_weights_are_the_same_bits_with_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    seeded = run_of(MODEL, seed=7)
    one = initial_parameters(seeded)
    out = np.full_like(one, np.nan)
    assert initial_parameters(seeded, num_threads=num_threads, out=out) is out
    assert out.tobytes() == one.tobytes()
    monkeypatch.setattr(
        "node.island.models.first_weights._ELEMENTS_AT_ONCE", 256
    )  # tensors of many parts
    assert initial_parameters(seeded, num_threads=num_threads).tobytes() == one.tobytes()


class Noting(np.ndarray[Any, Any]):
    """A vector that knows in which threads it was written."""

    written_in: set[int]

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]  # numpy adds in other ways too
        Noting.written_in.add(threading.get_ident())
        return super().__iadd__(other)

    def fill(self, value: Any) -> None:
        Noting.written_in.add(threading.get_ident())
        super().fill(value)

    def __setitem__(self, place: Any, value: Any) -> None:
        Noting.written_in.add(threading.get_ident())
        super().__setitem__(place, value)


def test_what_hosts_published_is_added_up_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published = np.full(LAYOUT.num_elements, 9, dtype=np.float32).view(Noting)
    Noting.written_in = set()

    class Own:
        async def publish(self, fragment: int) -> None:
            np.asarray(published)[:4] = 1

    class Other:
        async def give(self, order: Publish, *, into: Any) -> None:
            into[4:8] = 2

    island = object.__new__(HostsIsland)
    island._shared = SimpleNamespace(published=published)  # type: ignore[assignment]
    island._layout = LAYOUT
    island._own = Own()  # type: ignore[assignment]
    island._others = [Other(), Other()]  # type: ignore[list-item]

    async def publish() -> int:
        await island.publish(0)
        return threading.get_ident()

    loop_thread = asyncio.run(publish())
    assert published[:9].tolist() == [1] * 4 + [4] * 4 + [0]
    assert Noting.written_in
    assert loop_thread not in Noting.written_in
