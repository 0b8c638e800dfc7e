"""Getting from the state that a node holds to the committed one, among donors that lie, die and lag."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from node.disk.history import History
from node.disk.snapshots import Owed, Snapshot
from node.exchange import giving
from node.exchange.fetching import FIRST_FROM_ONE, MOST_AT_ONCE
from node.exchange.giving import HeldResults
from node.exchange.outer import NotApplicableError, Outer
from node.exchange.peers import (
    LONGEST_PAUSE_SECONDS,
    Waits,
    Want,
    WantChunk,
    WantManifest,
    WantResult,
)
from node.exchange.state.catch_up import ROUNDS_AHEAD, CatchUp
from node.exchange.state.chunks import Manifest
from node.exchange.state.on_disk import Saving, StateOnDisk
from protocol.wire.messages import Held
from protocol.wire.payload import Payload
from protocol.wire.rounds import Commit, Digest, NodeId
from tests.unit.download_scene import changed, cut_small
from tests.unit.exchange_scene import (
    CONTRIBUTE_SECONDS,
    A,
    B,
    C,
    Scene,
    after_rounds,
    committed_round,
    in_virtual_time,
)

WAITS = Waits()

Listing = Callable[..., Sequence[Commit]]
"""Of a round and the commits that there were: those that the coordinator lists as later."""


@pytest.fixture
def nobody_can_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """No node keeps results: whoever is behind needs a state."""
    monkeypatch.setattr(giving, "KEPT_ROUNDS", 0)


@in_virtual_time
async def test_a_node_replays_what_it_missed_from_whoever_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = await after_rounds(3, A, B, C)
    await scene.nodes[A].transport.stop()
    monkeypatch.setattr(giving, "KEPT_ROUNDS", 1)
    await scene.nodes[C].exchange.catch_up(3)
    assert scene.nodes[C].outer.digest == scene.nodes[A].outer.digest
    assert scene.nodes[C].exchange.waiting_for() == ""
    # It can pass them on, but keeps no more of them than anyone.
    held = scene.nodes[C].exchange._held
    assert [held.get(number, 0) is not None for number in (1, 2, 3)] == [False, False, True]
    await scene.stop()


class Liar:
    """Answers every request for a state with something that looks right."""

    def __init__(self, scene: Scene, node_id: NodeId) -> None:
        self.num_asked = 0
        self._handler = scene.nodes[node_id].exchange
        self._honest = self._handler.supply
        self._handler.supply = self.supply  # type: ignore[method-assign]

    async def supply(self, sender: NodeId, want: Want) -> Payload | None:
        self.num_asked += 1
        payload = await self._honest(sender, want)
        if payload is None or not isinstance(want, WantChunk):
            return payload
        body = bytearray(payload.body)
        body[-1] ^= 1
        return changed(payload, bytes(body))


@in_virtual_time
async def test_results_of_several_rounds_come_from_all_holders_at_once() -> None:
    num_rounds = 3 * ROUNDS_AHEAD
    scene = await after_rounds(num_rounds, A, B, C)
    given: dict[NodeId, list[int]] = {A: [], B: []}
    ahead, under_way, most_under_way = 0, 0, 0
    for node_id in given:
        scene.network.slow_down(node_id, 10_000)  # a result takes a tenth of a second and more
        honest = scene.nodes[node_id].exchange.supply

        async def supply(
            sender: NodeId, want: Want, node_id: NodeId = node_id, honest: Any = honest
        ) -> Payload | None:
            nonlocal ahead
            assert isinstance(want, WantResult)
            given[node_id].append(want.round)
            ahead = max(ahead, want.round - scene.nodes[C].outer.round)
            return await honest(sender, want)

        scene.nodes[node_id].exchange.supply = supply  # type: ignore[method-assign]
    fetch = scene.nodes[C].transport.fetch

    async def counted(*arguments: Any, **named: Any) -> Payload:
        nonlocal under_way, most_under_way
        under_way += 1
        most_under_way = max(most_under_way, under_way)
        try:
            return await fetch(*arguments, **named)
        finally:
            under_way -= 1

    scene.nodes[C].transport.fetch = counted  # type: ignore[method-assign]
    await scene.nodes[C].exchange.catch_up(num_rounds)
    assert scene.nodes[C].outer.digest == scene.nodes[A].outer.digest
    every_slice_once = sorted(2 * list(range(1, num_rounds + 1)))
    assert sorted(given[A] + given[B]) == every_slice_once
    assert min(len(given[A]), len(given[B])) >= num_rounds // 2  # a fair share from each
    assert 2 * FIRST_FROM_ONE < most_under_way <= MOST_AT_ONCE
    assert ahead == ROUNDS_AHEAD  # so memory is bounded
    await scene.stop()


@in_virtual_time
async def test_two_that_hold_half_of_the_results_each_are_enough() -> None:
    scene = await after_rounds(3, A, B, C)
    for node_id, slice_index in ((A, 1), (B, 0)):  # each lacks what it is preferred for
        held = scene.nodes[node_id].exchange._held
        held._payloads = {key: p for key, p in held._payloads.items() if key[1] == slice_index}
    began_at = asyncio.get_running_loop().time()
    await scene.nodes[C].exchange.catch_up(3)
    assert scene.nodes[C].outer.digest == scene.nodes[A].outer.digest
    assert asyncio.get_running_loop().time() == began_at  # without asking anybody again later
    await scene.stop()


@in_virtual_time
async def test_a_state_comes_from_several_donors_while_their_rounds_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(giving, "KEPT_ROUNDS", 1)
    cut_small(monkeypatch, 512)
    scene = await Scene.of(A, B, C, codec="int4")
    for node_id in (A, B):
        scene.network.slow_down(node_id, 900)
    await committed_round(scene, 1, A, B)
    await committed_round(scene, 2, A, B)
    catching_up = asyncio.create_task(scene.nodes[C].exchange.catch_up(2))
    await asyncio.sleep(3)  # asked for results in vain, then for manifests
    began_at = asyncio.get_running_loop().time()
    await committed_round(scene, 3, A, B)
    assert asyncio.get_running_loop().time() == began_at + 1  # nobody waited for the joiner
    assert not catching_up.done()
    await catching_up
    assert scene.nodes[C].outer.digest == scene.commits[1].outer_digest
    await scene.nodes[C].exchange.catch_up(3)
    assert scene.nodes[C].outer.digest == scene.nodes[A].outer.digest
    sent = [scene.nodes[n].transport._counts.totals()["snapshot"][0] for n in (A, B)]
    assert min(sent) > 512
    await scene.stop()


@pytest.mark.usefixtures("nobody_can_replay")
@in_virtual_time
async def test_a_lying_donor_costs_time_and_never_correctness() -> None:
    scene = await Scene.of(A, B, C)
    liar = Liar(scene, A)
    await committed_round(scene, 1, A, B)
    await scene.nodes[C].exchange.catch_up(1)
    assert liar.num_asked > 1  # for the manifest, and for the chunk
    assert scene.nodes[C].outer.digest == scene.nodes[B].outer.digest
    await scene.stop()


@in_virtual_time
async def test_after_a_cut_between_all_nodes_results_still_bring_them_on() -> None:
    """Nobody has the new state yet: whoever waited for a snapshot only would wait for ever."""
    scene = await Scene.of(A, B, C)
    plan = await scene.open_round(1, A, B, C)
    scene.network.cut(A, C)
    for node in scene.nodes.values():
        await node.contribute(1.0)
    await asyncio.sleep(CONTRIBUTE_SECONDS + 1)
    commit = scene.close_round(plan)  # B holds all, A and C lack each other's
    scene.network.cut(A, B)
    scene.network.cut(B, C)
    held = scene.nodes[B].exchange._held
    held._payloads = {key: p for key, p in held._payloads.items() if p.header.sender_id == B}
    applying = [asyncio.create_task(n.exchange.apply(commit)) for n in scene.nodes.values()]
    await asyncio.sleep(300)
    assert not any(task.done() for task in applying)
    for pair in ((A, B), (B, C), (A, C)):
        scene.network.mend(*pair)
    await asyncio.wait_for(asyncio.gather(*applying), 2 * LONGEST_PAUSE_SECONDS)
    assert len({node.outer.digest for node in scene.nodes.values()}) == 1
    await scene.stop()


@pytest.mark.usefixtures("nobody_can_replay")
@in_virtual_time
async def test_a_snapshot_is_not_fetched_before_its_digest_is_settled() -> None:
    scene = await after_rounds(1, A, B, C)
    scene.commits[-1] = replace(scene.commits[-1], outer_digest=None)
    catching_up = asyncio.create_task(scene.nodes[C].exchange.catch_up(1))
    await asyncio.sleep(30)
    assert scene.nodes[A].transport._counts.totals()["snapshot"] == (0, 0)
    scene.settle(A)
    scene.nodes[C].patience.tell()
    await asyncio.wait_for(catching_up, 5)
    assert scene.nodes[C].outer.round == 1
    await scene.stop()


@pytest.mark.usefixtures("nobody_can_replay")
@in_virtual_time
async def test_a_donor_of_a_round_that_never_was_is_not_waited_for() -> None:
    scene = await after_rounds(1, A, B, C)
    honest = scene.nodes[A].exchange.supply

    async def supply(sender: NodeId, want: Want) -> Payload | None:
        payload = await honest(sender, want)
        if payload is None or not isinstance(want, WantManifest):
            return payload
        manifest = replace(Manifest.from_body(payload.body), round=99)
        return changed(payload, manifest.to_body(), round=99)

    scene.nodes[A].exchange.supply = supply  # type: ignore[method-assign]
    await asyncio.wait_for(scene.nodes[C].exchange.catch_up(1), 10)
    assert scene.nodes[C].outer.digest == scene.nodes[B].outer.digest
    await scene.stop()


@in_virtual_time
async def test_a_round_that_the_coordinator_does_not_list_is_not_waited_for() -> None:
    scene = await Scene.of(A, B)
    await scene.nodes[A].exchange.catch_up(7)  # it went back to a copy of its database
    assert scene.nodes[A].outer.round == 0
    await scene.stop()


@in_virtual_time
async def test_a_node_further_behind_than_commits_are_kept_is_told_before_what_it_owes_goes() -> (
    None
):
    scene = await Scene.of(A, B, C)
    for number in (1, 2, 3, 4):
        await committed_round(scene, number, *((A, B, C) if number == 1 else (A, B)))
    late = scene.nodes[C]
    restored = late.outer.restore
    were_told: list[bool] = []
    del scene.commits[1]  # as a coordinator does that keeps the latest two
    with capture_logs() as logs:

        def restore(snapshot: Snapshot, owed: Owed | None) -> None:
            were_told.append(any(entry["event"].startswith("further behind") for entry in logs))
            restored(snapshot, owed)

        late.outer.restore = restore  # type: ignore[method-assign]
        await late.exchange.catch_up(4)
    assert late.outer.digest == scene.nodes[A].outer.digest
    assert were_told == [True]
    (told, *_) = (entry for entry in logs if entry["event"].startswith("further behind"))
    assert (told["log_level"], told["round"], told["oldest_kept"]) == ("warning", 1, 3)
    await scene.stop()


@in_virtual_time
async def test_a_node_that_restarts_after_contributing_counts_nothing_twice() -> None:
    scene = await after_rounds(1, A, B)
    plan = await scene.open_round(2, A, B)
    for node in scene.nodes.values():
        node.outer.owing.residual.most_owed = math.inf  # else nothing is owed of a void round
        await node.contribute(3.0)
    scene.network.cut(A, B)
    commit_of_nothing = scene.close_round(plan, void=(0, 1))
    for node in scene.nodes.values():
        await node.exchange.apply(commit_of_nothing)
    scene.settle(A)
    scene.network.mend(A, B)
    on_disk = (scene.nodes[A].outer.snapshot(), scene.nodes[A].outer.owed())
    assert on_disk[1].residual.all()
    plan = await scene.open_round(3, A, B)
    for node in scene.nodes.values():
        await node.contribute(4.0)
    await asyncio.sleep(1)
    commit = scene.close_round(plan)
    await scene.add(A, on_disk)  # killed before it applied
    await scene.nodes[B].exchange.apply(commit)
    scene.settle(B)
    await scene.nodes[A].exchange.catch_up(3)
    assert scene.nodes[A].outer.digest == scene.nodes[B].outer.digest
    assert not scene.nodes[A].residual.any()  # the 3 and the 4 were taken together
    assert not scene.nodes[A].reported(Held, 3)
    await scene.stop()


@pytest.mark.usefixtures("nobody_can_replay")
@in_virtual_time
async def test_a_state_that_the_swarm_never_agreed_on_is_not_taken_however_long_it_is_offered() -> (
    None
):
    scene = await after_rounds(2, A, B, C)
    scene.commits[-1] = replace(scene.commits[-1], outer_digest=None)
    held = scene.nodes[A].outer.digest
    began_at = asyncio.get_running_loop().time()
    assert not await scene.nodes[C].exchange._catch_up._listed.is_the_swarms(None, 2, held)
    assert asyncio.get_running_loop().time() >= began_at + WAITS.settle_seconds
    catching_up = asyncio.create_task(scene.nodes[C].exchange.catch_up(1))
    await asyncio.sleep(10 * WAITS.settle_seconds)  # all donors are at round 2
    assert scene.nodes[C].outer.round == 0
    assert not catching_up.done()
    scene.settle(A)
    await asyncio.wait_for(catching_up, WAITS.settle_seconds)
    assert scene.nodes[C].outer.position == scene.nodes[A].outer.position
    await scene.stop()


@in_virtual_time
async def test_while_a_commit_is_being_applied_nobody_saves_or_copies_half_of_it(
    tmp_path: Path,
) -> None:
    scene = await Scene.of(A, B)
    node = scene.nodes[A]
    plan = await scene.open_round(1, A, B)
    for each in scene.nodes.values():
        await each.contribute(1.0)
    await asyncio.sleep(1)
    commit = scene.close_round(plan)
    may_apply = asyncio.Event()
    saves: list[int] = []

    async def slow(work: Callable[[], Any]) -> Any:
        await may_apply.wait()
        return work()

    class Disk(StateOnDisk):
        def begin(self, outer: Outer, held: HeldResults, *, is_last: bool = False) -> Saving:
            saves.append(outer.round)
            return super().begin(outer, held, is_last=is_last)

    node.exchange._catch_up._heavy = slow
    node.exchange._disk = Disk(tmp_path, history=History(None))
    applying = asyncio.create_task(node.exchange.apply(commit))
    await asyncio.sleep(1)
    saving = asyncio.create_task(node.exchange.save())
    await asyncio.sleep(1)
    assert await node.exchange.supply(B, WantManifest(oldest_round=0)) is None
    assert not saves
    may_apply.set()
    await asyncio.gather(applying, saving)
    assert saves == [1]
    await scene.stop()


async def leaps_owing(list_commits: Listing | None = None) -> Scene:
    """C owes 3 of each element, and takes the state over to which others had three rounds without it."""
    scene = await Scene.of(A, B, C)
    c = scene.nodes[C]
    c.outer.restore(c.outer.snapshot(), Owed(residual=c.outer.snapshot().parameters + 3))
    for number in (1, 2, 3):
        await committed_round(scene, number, A, B)
    if list_commits is not None:

        async def listed(after_round: int) -> tuple[Commit, ...]:
            return tuple(list_commits(after_round, *scene.commits))

        c.exchange._catch_up._listed.after = listed
    await c.exchange.catch_up(1)
    assert c.outer.position == scene.nodes[A].outer.position
    await scene.stop()
    return scene


def with_other(commits: Sequence[Commit], place: int, name: str) -> list[Commit]:
    """The commits, one of which has another digest."""
    changes: dict[str, Any] = {name: Digest(b"o" * 32)}
    changed = replace(commits[place], **changes)
    return [*commits[:place], changed, *commits[place + 1 :]]


@pytest.mark.usefixtures("nobody_can_replay")
@pytest.mark.parametrize(
    "list_commits",
    [
        lambda after, one, two, three: {0: [one], 2: [three]}.get(after, []),
        lambda after, *were: were[after:] if after else with_other(were, 2, "outer_digest"),
        lambda after, *were: were[after:] if after else with_other(were, 1, "base_digest"),
    ],
    ids=["are not all known", "end at another state", "do not follow on each other"],
)
@in_virtual_time
async def test_what_is_owed_goes_with_a_leap_whose_commits_do_not_lead_to_its_state(
    list_commits: Listing,
) -> None:
    """One that is missing may have taken it, and so may one that the coordinator took back."""
    scene = await leaps_owing(list_commits)
    assert not scene.nodes[C].residual.any()


@pytest.mark.usefixtures("nobody_can_replay")
@in_virtual_time
async def test_what_is_owed_stays_owed_through_a_leap_whose_commits_are_all_known() -> None:
    scene = await leaps_owing()
    assert (scene.nodes[C].residual == 3).all()


@in_virtual_time
async def test_who_is_behind_by_more_than_a_page_of_commits_still_owes_what_it_owed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(giving, "KEPT_ROUNDS", 1)  # nobody can replay
    scene = await Scene.of(A, B, C)
    plan = await scene.open_round(1, A, B, C)
    for node in scene.nodes.values():
        node.outer.owing.residual.most_owed = math.inf  # else nothing is owed of a void round
        await node.contribute(1.0)
    await asyncio.sleep(1)
    commit = scene.close_round(plan, void=(0, 1, 2))
    for node in scene.nodes.values():
        await node.exchange.apply(commit)
    scene.settle(A)
    owed = scene.nodes[C].residual.copy()
    assert owed.all()
    for number in range(2, 70):
        await committed_round(scene, number, A, B)
    await scene.nodes[C].exchange.catch_up(69)
    assert scene.nodes[C].outer.digest == scene.nodes[A].outer.digest
    np.testing.assert_array_equal(scene.nodes[C].residual, owed)
    await scene.stop()


@pytest.mark.usefixtures("nobody_can_replay")
@in_virtual_time
async def test_a_state_that_does_not_fit_is_refused_and_another_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = await after_rounds(2, A, B, C)
    outer, honest = scene.nodes[C].outer, scene.nodes[C].outer.leap
    before = outer.position
    seen: list[object] = []

    def leap(*arguments: Any) -> None:
        if not seen:
            seen.append(outer.position)
            raise NotApplicableError("the parameters of round 2 have another shape")
        honest(*arguments)

    monkeypatch.setattr(outer, "leap", leap)
    with capture_logs() as logs:
        await scene.nodes[C].exchange.catch_up(2)
    assert seen == [before]
    (said,) = [entry for entry in logs if entry["event"] == "a state that was fetched is refused"]
    assert said["log_level"] == "warning" and "another shape" in said["why"]
    assert outer.position == scene.nodes[A].outer.position
    await scene.stop()


@pytest.mark.usefixtures("nobody_can_replay")
@pytest.mark.parametrize("way", ["a leap", "a refetch"])
@pytest.mark.parametrize("end", ["it goes on", "it is stopped right after the move"])
@in_virtual_time
async def test_a_state_never_stands_without_its_history(
    monkeypatch: pytest.MonkeyPatch, way: str, end: str
) -> None:
    scene = await after_rounds(2, A, B, C)
    catch_up, outer = scene.nodes[C].exchange._catch_up, scene.nodes[C].outer
    lists_since_move: list[int] = []
    honest = catch_up._listed.after

    async def list_commits(after_round: int) -> tuple[Commit, ...]:
        assert outer.round == 0 or catch_up._history.at(outer.round) is not None
        lists_since_move.append(outer.round)
        return await honest(after_round)

    async def heavy(work: Callable[[], Any]) -> Any:
        result = work()
        if outer.round and end != "it goes on":
            raise asyncio.CancelledError
        return result

    monkeypatch.setattr(catch_up._listed, "after", list_commits)
    monkeypatch.setattr(catch_up, "_heavy", heavy)
    digest = scene.commits[-1].outer_digest
    assert digest is not None
    go = catch_up.to_round(2) if way == "a leap" else catch_up.replace(2, digest)
    if end == "it goes on":
        await go
    else:
        with pytest.raises(asyncio.CancelledError):
            await go
    assert outer.round == 2
    assert catch_up._history.at(2) is not None and catch_up._history.at(1) is not None
    await scene.stop()


def told_after_each_move(
    monkeypatch: pytest.MonkeyPatch, catch_up: CatchUp, outer: Outer
) -> list[int]:
    """The incarnations that heartbeats tell which fall between a move and what follows it."""
    told: list[int] = []

    async def heavy(work: Callable[[], Any]) -> Any:
        before = outer.round
        result = work()
        if outer.round != before:
            told.append(catch_up._history.incarnation_at(outer.round))
        return result

    monkeypatch.setattr(catch_up, "_heavy", heavy)
    return told


@in_virtual_time
async def test_a_heartbeat_right_after_a_commit_is_applied_tells_of_its_incarnation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a coordinator whose run once went back takes the state for one that is undone."""
    scene = await Scene.of(A, B)
    node = scene.nodes[A]
    plan = await scene.open_round(1, A, B)
    for each in scene.nodes.values():
        await each.contribute(1.0)
    await asyncio.sleep(1)
    commit = replace(scene.close_round(plan), incarnation=2)
    told = told_after_each_move(monkeypatch, node.exchange._catch_up, node.outer)
    await node.exchange.apply(commit)
    assert told == [2]
    await scene.stop()


@pytest.mark.usefixtures("nobody_can_replay")
@in_virtual_time
async def test_a_heartbeat_right_after_a_leap_tells_of_the_incarnation_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = await after_rounds(2, A, B, C)
    catch_up = scene.nodes[C].exchange._catch_up
    honest = catch_up._listed.before

    async def before(round: int) -> tuple[Commit, ...]:
        return tuple(replace(commit, incarnation=2) for commit in await honest(round))

    monkeypatch.setattr(catch_up._listed, "before", before)
    told = told_after_each_move(monkeypatch, catch_up, scene.nodes[C].outer)
    await catch_up.to_round(2)
    assert told == [2]
    await scene.stop()


@in_virtual_time
async def test_what_a_round_that_was_taken_back_was_followed_by_accuses_nobody(
    tmp_path: Path,
) -> None:
    """The list that a node waits by is older than the one by which it goes on."""
    scene = await Scene.of(A, B, C, folder=tmp_path)
    node = scene.nodes[C]
    await node.exchange.save()
    for number in (1, 2):
        await committed_round(scene, number, A, B)
    for each in (A, B):
        await scene.nodes[each].transport.stop()
    first = node.outer.digest
    with capture_logs() as told:
        catching_up = asyncio.create_task(node.exchange.catch_up(2))
        await asyncio.sleep(20)
        assert node.outer.round == 0
        scene.commits = [
            replace(
                commit,
                incarnation=1,
                base_digest=first,
                outer_digest=first,
                slices=tuple(
                    replace(outcome, digest=None, contributors=(), contributions=(), holder_ids=())
                    for outcome in commit.slices
                ),
            )
            for commit in scene.commits
        ]
        await asyncio.wait_for(catching_up, 600)
    assert node.outer.position == (2, first)
    assert "a made-up state is refused" not in [line["event"] for line in told]
    await scene.stop()
