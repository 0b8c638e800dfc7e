"""What the database keeps of closed rounds: all of the latest, a little of all, nothing of what is gone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator import round_rows
from coordinator.database import row_of
from coordinator.store import Store
from coordinator.swarm import membership
from coordinator.swarm.events import CommitLearned, Event
from coordinator.swarm.state import ClosedRound, HeldOut, HolderLoss, SwarmState
from protocol.trust.signing import CommitSigner, commit_statement
from protocol.wire.rounds import NodeId
from tests.unit.swarm_scene import LAYOUT, TOKENS, Scene, digest_of

SIGNER = CommitSigner(Ed25519PrivateKey.from_private_bytes(bytes(32)))
KEPT = 20
Keeps = Callable[[int], None]


@pytest.fixture
def keeps(monkeypatch: pytest.MonkeyPatch) -> Keeps:
    """Sets how many rounds are kept whole."""

    def keep(num_rounds: int) -> None:
        monkeypatch.setattr(round_rows, "KEPT_ROUNDS", num_rounds)
        monkeypatch.setattr(membership, "KEPT_ROUNDS", num_rounds)

    return keep


class SavedScene(Scene):
    """A scene whose every step is saved."""

    def __init__(self, store: Store, *, min_nodes: int, rounds: int) -> None:
        super().__init__(min_nodes=min_nodes, rounds=rounds)
        self.store = store

    def do(self, event: Event) -> None:
        before = self.state
        super().do(event)
        self.store.save(before, self.state, now=self.now)

    def run(self, num_rounds: int, *names: str) -> None:
        for _ in range(num_rounds):
            self.commit(*names, tokens=dict.fromkeys(names, TOKENS))
            self.apply(digest_of(f"after {self.state.committed_round}"), *names)


def two_nodes(store: Store, num_rounds: int) -> SavedScene:
    scene = SavedScene(store, min_nodes=2, rounds=10**6)
    scene.attach("node-a", "node-b")
    scene.run(num_rounds, "node-a", "node-b")
    return scene


def kept_commit(store: Store, number: int) -> tuple[Any, ...] | None:
    """What stays of a round's commit: round, incarnation, base, outer state, statement, signature."""
    with store._database.reading() as connection:
        return row_of(connection, "commits", "WHERE round = ?", (number,))


def test_rounds_that_are_long_over_leave_their_digests_their_signature_and_thinned_figures(
    keeps: Keeps,
) -> None:
    keeps(KEPT)
    store = Store(Store.in_memory()._database, sign=SIGNER.signature_of)
    scene = two_nodes(store, 3)
    first = store.latest_rounds(9)[-1]
    assert first.commit.round == 1
    newest = 12 * KEPT
    scene.run(newest - 3, "node-a", "node-b")
    whole = [closed.commit.round for closed in store.latest_rounds(10**6)]
    assert whole == list(range(newest, newest - KEPT, -1))
    assert [commit.round for commit in store.commits_after(0, limit=2)] == [
        whole[-1],
        whole[-1] + 1,
    ]
    kept = kept_commit(store, 1)
    assert kept is not None
    *told, statement, signature = kept
    assert told == [1, 0, first.commit.base_digest, first.commit.outer_digest]
    assert first.commit.outer_digest == digest_of("after 1")
    assert statement == blake3(commit_statement(first.commit)).digest()
    assert SIGNER.has_signed(replace(first.commit, signature=signature))
    for number in range(1, newest + 1):
        assert kept_commit(store, number) is not None
    shown = [figures.round for figures in store.latest_figures(10**6)]
    assert shown[:KEPT] == whole
    assert shown[KEPT:] == [
        *(number for number in range(newest - KEPT, newest - 10 * KEPT, -1) if number % 10 == 0),
        *(number for number in range(newest - 10 * KEPT, 0, -1) if number % 100 == 0),
    ]


def test_a_run_that_goes_on_from_what_is_kept_is_the_same_run(keeps: Keeps, tmp_path: Path) -> None:
    keeps(KEPT)
    store = Store.open(tmp_path, sign=SIGNER.signature_of)
    scene = two_nodes(store, 3 * KEPT)
    store.close()
    again = Store.open(tmp_path)
    again.check()
    loaded = again.load(scene.state.rules, scene.state.run_digest)
    assert (loaded.recent, loaded.ledger) == (scene.state.recent, scene.state.ledger)
    assert (loaded.token_clock, loaded.committed_round) == (3 * KEPT * 2 * TOKENS, 3 * KEPT)


def test_what_was_taken_back_is_in_no_table_any_more() -> None:
    store = Store.in_memory()
    scene = two_nodes(store, 3)
    real = scene.state.recent[-1]
    scene.wait(160)  # nobody reports: two void rounds
    assert [closed.is_void for closed in scene.state.recent] == [False, True, True]
    # Round 3 went otherwise: it was committed once more, and nothing came after it.
    taken_back = replace(real.commit, incarnation=1, slices=real.commit.slices[:1])
    scene.do(CommitLearned(commit=taken_back, node_id=NodeId("node-a")))
    assert scene.state.committed_round == 3
    assert [closed.commit.round for closed in store.latest_rounds(9)] == [3, 2, 1]
    assert store.latest_rounds(1)[0].commit.incarnation == 1
    assert [figures.round for figures in store.latest_figures(9)] == [3, 2, 1]
    assert [kept_commit(store, number) is None for number in (3, 4, 5)] == [False, True, True]


def test_held_out_losses_have_rows_of_their_own_and_those_of_states_that_are_no_more_go(
    tmp_path: Path,
) -> None:
    def loss(number: int, value: float = 2.5) -> HeldOut:
        own = HolderLoss(node_id=NodeId("node-a"), loss=value, weight=9, tokens=64)
        return HeldOut(round=number, loss=value, tokens=64, holders=(own,) * (number % 2))

    store = Store.open(tmp_path)
    scene = two_nodes(store, 1)
    state = scene.state
    written: list[str] = []
    store._database._connection.set_trace_callback(written.append)
    all_losses = (
        *((loss(1),), (loss(1), loss(2)), (loss(1), loss(2), loss(3)), (loss(1), loss(2, 9.0))),
        *((loss(1),), (), (loss(4),)),
    )
    for losses in all_losses:
        written.clear()
        after = replace(state, held_out=losses)
        store.save(state, after, now=scene.now)
        state = after
        assert sum("INTO held_out" in text for text in written) <= 1  # not all of them each time
        assert store.load(state.rules, state.run_digest).held_out == losses


def three_nodes(scene: SavedScene) -> None:
    """The third joins in the first round, and takes part in the second."""
    names = ("node-a", "node-b", "node-c")
    scene.attach(*names)
    scene.commit("node-a", "node-b")
    scene.apply(digest_of("after 1"), *names)
    scene.run(1, *names)


def test_a_member_is_forgotten_when_it_was_gone_for_as_many_rounds_as_are_kept(
    keeps: Keeps,
) -> None:
    keeps(KEPT)
    store = Store.in_memory()
    scene = SavedScene(store, min_nodes=2, rounds=1000)
    three_nodes(scene)
    scene.leave("node-c")
    scene.run(KEPT, "node-a", "node-b")
    assert scene.state.members[NodeId("node-c")].committed_tokens == TOKENS
    scene.run(1, "node-a", "node-b")
    assert scene.state.members.keys() == {"node-a", "node-b"}
    loaded = store.load(scene.state.rules, scene.state.run_digest)
    assert loaded.members.keys() == {"node-a", "node-b"}
    # Its key is still signed by the authority: it attaches, as one that was never here.
    scene.attach("node-c")
    assert scene.state.members[NodeId("node-c")].committed_tokens == 0
    assert store.load(scene.state.rules, scene.state.run_digest).members.keys() == {
        *("node-a", "node-b", "node-c")
    }


def test_a_member_that_was_behind_for_long_is_remembered_from_when_it_went(keeps: Keeps) -> None:
    keeps(KEPT)
    scene = SavedScene(Store.in_memory(), min_nodes=2, rounds=1000)
    scene.attach("node-a", "node-b")
    scene.run(2, "node-a", "node-b")
    scene.attach("node-c")  # it holds the initial state, and fetches for long
    scene.run(2 * KEPT, "node-a", "node-b")
    assert NodeId("node-c") in scene.state.members
    scene.leave("node-c")
    scene.run(KEPT, "node-a", "node-b")
    assert NodeId("node-c") in scene.state.members
    scene.run(1, "node-a", "node-b")
    assert NodeId("node-c") not in scene.state.members


def test_a_member_that_is_gone_and_named_by_the_round_in_flight_is_remembered(keeps: Keeps) -> None:
    keeps(0)
    scene = SavedScene(Store.in_memory(), min_nodes=2, rounds=1000)
    three_nodes(scene)
    scene.leave("node-c")
    scene.commit("node-a", "node-b")
    assert NodeId("node-c") in {a.node_id for a in scene.round.assignments}
    assert NodeId("node-c") in scene.state.members
    scene.apply(digest_of("after"), "node-a", "node-b")
    scene.commit("node-a", "node-b")
    assert scene.state.members.keys() == {"node-a", "node-b"}


def typical(num_nodes: int, rounds: int) -> tuple[SwarmState, list[ClosedRound]]:
    """A state, and the rounds that it closed: as many slices as plans have with large models."""
    scene = Scene(
        min_nodes=num_nodes,
        rounds=10**6,
        layout=replace(LAYOUT, fragment_elements=(1 << 26,)),
        slice_elements=1 << 16,
    )
    names = [f"node-{number}".ljust(32, "x") for number in range(num_nodes)]
    for place, name in enumerate(names):  # the first two, each with its invite, decide together
        scene.attach(name, invite=name if place < 2 else "the others'")
    closed = []
    for number in range(rounds):
        scene.commit(*names)
        scene.apply(digest_of(f"after {number}"), *names)
        last = scene.state.last_closed
        assert last is not None
        slices = tuple(replace(o, holder_ids=tuple(map(NodeId, names))) for o in last.commit.slices)
        closed.append(replace(last, commit=replace(last.commit, slices=slices)))
    return replace(scene.state, recent=tuple(closed)), closed


def test_a_round_of_eight_nodes_takes_few_bytes_and_after_a_while_few_hundred(
    keeps: Keeps,
) -> None:
    state, (first,) = typical(8, 1)
    assert len(first.commit.slices) == 64

    def database_bytes(num_rounds: int, kept: int) -> int:
        keeps(kept)
        store = Store(Store.in_memory()._database, sign=SIGNER.signature_of)
        before = replace(state, open_round=None, recent=())
        for number in range(1, num_rounds + 1):
            commit = replace(first.commit, round=number)
            closed = replace(first, commit=commit, plan=replace(first.plan, round=number))
            after = replace(before, committed_round=number, recent=(closed,))
            store.save(before, after, now=float(number))
            before = after
        (num_pages,) = store._database._connection.execute("PRAGMA page_count").fetchone()
        return 4096 * int(num_pages)

    whole, thinned = database_bytes(50, 50), database_bytes(100, 20)
    assert 2000 < whole / 50 < 8000
    assert (database_bytes(500, 20) - thinned) / 400 < 350  # for each round that a run goes on


def test_a_commit_of_a_hundred_nodes_takes_no_more_than_on_the_wire() -> None:
    state, (closed,) = typical(100, 1)
    store = Store(Store.in_memory()._database, sign=SIGNER.signature_of)
    store.save(replace(state, recent=()), state, now=1.0)
    connection = store._database._connection
    (num_bytes,) = connection.execute(
        "SELECT length(commit_message) + length(plan) + length(rest) FROM closed_rounds"
    ).fetchone()
    assert num_bytes < len(commit_statement(closed.commit))
    assert store.latest_rounds(1) == (closed,)
