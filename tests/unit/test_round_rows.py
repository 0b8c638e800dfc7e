"""The round in flight on disk: after every step a restart finds it as it was."""

from coordinator.round_rows import PACKED_FROM, packed, unpacked
from coordinator.store import Store
from coordinator.swarm.events import Event, RefusalSeen
from protocol.trust.identity import Identity
from protocol.wire.findings import ResultRefused
from tests.unit.payload_scene import header_of_result
from tests.unit.swarm_scene import RUN, TOKENS, Scene, digest_of

RESULT, OTHER = digest_of("result"), digest_of("other")


class SavedScene(Scene):
    """A scene whose every step is saved and read back."""

    def __init__(self, *, min_nodes: int) -> None:
        super().__init__(min_nodes=min_nodes)
        self.store = Store.in_memory()
        self.num_statements: list[int] = []

    def do(self, event: Event) -> None:
        before = self.state
        super().do(event)
        written: list[str] = []
        connection = self.store._database._connection
        connection.set_trace_callback(written.append)
        self.store.save(before, self.state, now=self.now)
        connection.set_trace_callback(None)
        self.num_statements.append(sum("round_parts" in text for text in written))
        loaded = self.store.load(self.state.rules, self.state.run_digest)
        assert loaded.open_round == self.state.open_round


def test_a_round_comes_back_as_it_was_after_every_report_and_takeover() -> None:
    scene = SavedScene(min_nodes=3)
    scene.attach("node-a", "node-b", "node-c")
    scene.train("node-a")
    scene.reduce("node-b", 1, RESULT)
    scene.hold("node-a", 0, OTHER)
    scene.leave("node-b")  # what was held of its slice is forgotten
    assert scene.round.slices[1].attempt == 1
    assert all(1 not in results for results in scene.round.held.values())
    scene.reduce("node-a", 1, OTHER, {"node-a": TOKENS, "node-c": TOKENS})
    for index in (0, 2):
        scene.reduce(str(scene.round.slices[index].slice.reducer_id), index, RESULT)
    for index in (0, 1, 2):
        for name in ("node-a", "node-c"):
            if scene.state.committed_round == 0:
                digest = scene.round.slices[index].digest
                assert digest is not None
                scene.hold(name, index, digest)
    assert scene.state.committed_round == 1
    scene.apply(digest_of("state 1"), "node-a")
    scene.apply(digest_of("state 1"), "node-c")
    assert scene.state.outer_digest == digest_of("state 1")


def test_who_refuses_a_result_is_known_after_a_restart_with_its_signature() -> None:
    scene = SavedScene(min_nodes=3)
    by = Identity.generate()
    scene.attach("node-a", "node-b", str(by.node_id))
    part = next(p.slice for p in scene.round.slices if p.slice.reducer_id == "node-a")
    header = header_of_result(part, run_digest=RUN, round=1, body_digest=RESULT)
    refused = ResultRefused(slice_index=part.index, digest=header.digest, header=header.encode())
    signed = refused.signed(by, run_digest=RUN, round=1)
    scene.do(RefusalSeen(node_id=by.node_id, refused=signed, result=header))
    loaded = scene.store.load(scene.state.rules, scene.state.run_digest).open_round
    assert loaded is not None
    (refusal,) = loaded.slices[part.index].refusals
    assert refusal.refused == signed and not refusal.refused.forgery(by.node_id)


def test_a_report_writes_only_its_own_rows() -> None:
    scene = SavedScene(min_nodes=8)
    scene.attach(*(f"node-{number}" for number in range(8)))
    for number in range(8):
        scene.train(f"node-{number}")
        assert scene.num_statements[-1] == 2  # what was trained, and when
    scene.reduce("node-3", 3, RESULT)
    assert scene.num_statements[-1] == 2  # the slice, and that its reducer holds it
    scene.hold("node-5", 3, RESULT)
    assert scene.num_statements[-1] == 1


def test_long_messages_are_deflated_and_short_ones_are_not() -> None:
    message = b"node-a " * PACKED_FROM
    assert len(packed(message)) < len(message) / 10
    assert unpacked(packed(message)) == message
    assert unpacked(packed(b"short")) == packed(b"short") == b"short"
