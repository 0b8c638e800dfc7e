"""A node's life at its turns: what comes twice, late, in the wrong order, or in the middle."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from node.disk.history import History
from node.disk.round_folder import Retention
from node.exchange.state.on_disk import StateOnDisk
from protocol.errors import UnavailableError
from protocol.run.run_spec import RunSpec
from protocol.trust.rulings import RulingKind
from protocol.wire.messages import (
    Applied,
    CommitsWanted,
    Evaluated,
    EvaluationAsked,
    Held,
    ParticipantsDeparted,
    Reduced,
    RefetchAsked,
    RoundCommitted,
    RoundOpened,
    RulingsTold,
    Trained,
)
from protocol.wire.rounds import Assignment, Commit, Digest, SliceOutcome
from tests.unit.daemon_scene import TRAIN_SECONDS, Life
from tests.unit.exchange_scene import NUM_ELEMENTS, TOKENS, A, B, in_virtual_time, plan_for
from tests.unit.rulings_scene import ruling_of


@in_virtual_time
async def test_a_node_says_once_that_the_swarm_calls_it_by_another_name() -> None:
    life = Life()
    life.link.called = "attic-2"
    with capture_logs() as logs:
        async with life:
            life.link.say(UnavailableError("broken"))
            await asyncio.sleep(60)
    assert life.link.num_attached == 2
    assert life.daemon.called == "attic-2"
    (told,) = [line for line in logs if "another node is called attic" in line["event"]]
    assert "calls this one attic-2" in told["event"]
    assert "node.toml" in told["next_step"]


@in_virtual_time
async def test_a_plan_that_comes_again_is_trained_once() -> None:
    async with Life() as life:
        plan = life.plan(1)
        life.link.say(RoundOpened(plan=plan), RoundOpened(plan=plan))
        await asyncio.sleep(2)
        life.link.say(UnavailableError("broken"))  # and comes once more after a break
        await asyncio.sleep(2)
        life.link.say(RoundOpened(plan=plan))
        await asyncio.sleep(60)
        commit = life.commit(plan)
        life.link.say(RoundCommitted(commit=commit), RoundCommitted(commit=commit))
        await asyncio.sleep(1)
        life.link.say(RoundOpened(plan=plan))
        await asyncio.sleep(60)
        assert life.island.calls == ["start", "adopt", "train", "publish", "adopt"]
        assert life.outer.round == 1
        np.testing.assert_array_equal(life.outer._parameters, -1.0)


@in_virtual_time
async def test_a_round_too_short_for_its_ranks_to_tell_of_it_has_a_loss_and_a_speed_all_the_same() -> (
    None
):
    async with Life() as life:
        await life.opened(1, seconds=60)
        told = life.link.heartbeats[-1]
        assert (told.loss, told.tokens_per_second) == (1.0, TOKENS / 5.0)


@in_virtual_time
async def test_the_same_plan_after_the_work_is_done_makes_the_node_report_it_once_more() -> None:
    async with Life() as life:
        plan = await life.opened(1, seconds=60)
        said = list(life.link.reports)
        assert [type(report) for _, report in said] == [Trained, Reduced, Held]
        life.link.say(RoundOpened(plan=plan))  # as a coordinator does that lost its memory of it
        await asyncio.sleep(1)
        assert life.link.reports == [*said, *said]


@in_virtual_time
async def test_another_plan_of_the_round_is_served_with_what_was_trained_already() -> None:
    async with Life() as life:
        life.link.say(RoundOpened(plan=life.plan(1)))
        await asyncio.sleep(60)
        smaller = Assignment(node_id=A, inner_steps=1, first_sample=0, num_samples=1)
        assert smaller.num_samples * RunSpec().model.context == 128
        other = life.plan(1, assignments=(smaller,))
        life.link.say(RoundOpened(plan=other))
        await asyncio.sleep(60)
        assert life.island.calls == ["start", "adopt", "train", "publish"]
        assert [report.tokens for _, report in life.link.reported(Trained)] == [TOKENS] * 2
        first, second = (report for _, report in life.link.reported(Reduced))
        assert [c.tokens for c in second.contributors] == [TOKENS]
        assert first.digest == second.digest
        life.link.reports.pop(1)
        life.link.say(RoundCommitted(commit=life.commit(other)))
        await asyncio.sleep(1)
        np.testing.assert_array_equal(life.outer._parameters, -1.0)


@in_virtual_time
async def test_a_commit_that_comes_while_the_node_trains_ends_the_training_and_is_applied() -> None:
    async with Life() as life:
        plan = life.plan(1)
        outcome = SliceOutcome(index=0, start=0, num_elements=NUM_ELEMENTS, digest=None)
        void = Commit(round=1, fragment=0, base_digest=plan.base_digest, slices=(outcome,))
        life.link.say(RoundOpened(plan=plan))
        await asyncio.sleep(1)
        life.link.say(RoundCommitted(commit=void))
        await asyncio.sleep(1)
        assert life.outer.round == 1
        ((_, trained),) = life.link.reported(Trained)
        assert trained.tokens == TOKENS // 2  # what was taken by then
        np.testing.assert_array_equal(life.outer.owed().residual, 0.0)
        assert life.outer.owing.let_go_rounds > 0, (
            "trained in vain, and its samples are leased again"
        )


@in_virtual_time
async def test_a_coordinator_that_lacks_commits_gets_them_and_a_fault_in_it_ends_the_node() -> None:
    async with Life() as life:
        plan = await life.opened(1, seconds=60)
        commit = life.commit(plan)
        life.link.say(RoundCommitted(commit=commit))
        await asyncio.sleep(1)
        life.link.say(CommitsWanted(after_round=0))
        await asyncio.sleep(9)
        assert [c.round for brought in life.link.brought for c in brought] == [1]
        life.link.submit_commits = None  # type: ignore[assignment, method-assign]  # the fault
        life.link.say(CommitsWanted(after_round=0))
        await asyncio.sleep(9)
        assert life.running is not None
        with pytest.raises(TypeError):  # rather than a task that nobody awaits
            life.running.result()


@in_virtual_time
async def test_a_void_commit_that_passed_unheard_is_settled_before_the_next_plan() -> None:
    """The digest is as before, so nothing else would tell; the round's work would be dropped."""
    async with Life() as life:
        first = await life.opened(1, seconds=60)
        life.commit(first, is_void=True)
        second = await life.opened(2, seconds=60)
        life.link.say(RoundCommitted(commit=life.commit(second)))
        await asyncio.sleep(1)
        np.testing.assert_array_equal(
            life.outer._parameters, -1.0
        )  # the work of a void round is let go
        assert not life.outer.owed().residual.any()


@in_virtual_time
async def test_a_plan_that_waited_for_its_turn_has_that_much_less_time() -> None:
    async with Life() as life:
        life.island.evaluation_seconds = 4.0
        life.link.say(EvaluationAsked(round=0), RoundOpened(plan=life.plan(1, train_seconds=10.0)))
        await asyncio.sleep(5)
        (work,) = life.island.works
        assert work.max_seconds == pytest.approx(6.0)


@in_virtual_time
async def test_the_ranks_learn_how_many_take_part() -> None:
    async with Life() as life:
        plan = life.plan(1)
        other = replace(plan.assignments[0], node_id=B)
        life.link.say(RoundOpened(plan=replace(plan, assignments=(*plan.assignments, other))))
        await asyncio.sleep(5)
        (work,) = life.island.works
        assert work.num_participants == 2


@in_virtual_time
async def test_heartbeats_say_how_ranks_are_laid_out_and_how_the_host_shares_its_link() -> None:
    async with Life() as life:
        await asyncio.sleep(5)
        beat = life.link.heartbeats[-1]
        assert (beat.mesh, beat.congestion_control) == ("shard 2", "bbr")
        life.outer.owing.let_go_rounds = 1.5
        await asyncio.sleep(5)
        assert life.link.heartbeats[-1].let_go_rounds == 1.5


@in_virtual_time
async def test_heartbeats_say_what_the_node_made_of_the_round_that_ended_last() -> None:
    async with Life() as life:
        plan = await life.opened(1, seconds=TRAIN_SECONDS + 5)
        assert life.link.heartbeats[-1].utilisation is None
        life.link.say(RoundCommitted(commit=life.commit(plan)))
        await asyncio.sleep(5)
        made = life.link.heartbeats[-1].utilisation
        assert made is not None
        assert made.round == 1
        assert made.tokens_per_second == pytest.approx(TOKENS / 5.0)  # as the island reports
        assert made.compute_share == pytest.approx(5.0 / (TRAIN_SECONDS + 5), rel=0.01)
        assert made.waiting_share == pytest.approx(1 - made.compute_share, rel=0.01)


@in_virtual_time
async def test_encoding_and_applying_are_the_exchange_and_not_waiting() -> None:
    heavy_seconds = 0.0

    async def slow(work: Callable[[], Any]) -> Any:
        nonlocal heavy_seconds
        await asyncio.sleep(0.25)
        heavy_seconds += 0.25
        return work()

    async with Life(heavy=slow) as life:
        plan = await life.opened(1, seconds=1)
        before = heavy_seconds
        await asyncio.sleep(TRAIN_SECONDS + 5)
        life.link.say(RoundCommitted(commit=life.commit(plan)))
        await asyncio.sleep(20)
        made = life.link.heartbeats[-1].utilisation
        assert made is not None
        assert made.exchange_share > 0
        # Saving the state is heavy as well, and comes after the round.
        total = TRAIN_SECONDS + 6
        assert 0.5 / total <= made.exchange_share <= (heavy_seconds - before + 0.25) / total
        parts = (made.compute_share, made.publish_share, made.adopt_share, made.exchange_share)
        assert sum(parts) + made.waiting_share == pytest.approx(1.0)


@in_virtual_time
async def test_departures_heard_before_the_round_is_open_are_not_waited_for() -> None:
    async with Life() as life:
        life.island.evaluation_seconds = 4.0
        plan = plan_for(A, B, base_digest=life.outer.digest, contribute_seconds=1e6)
        life.link.say(
            EvaluationAsked(round=0),
            RoundOpened(plan=plan),
            ParticipantsDeparted(round=1, node_ids=(B,)),
        )
        await asyncio.sleep(60)
        ((_, reduced),) = life.link.reported(Reduced)
        assert [c.node_id for c in reduced.contributors] == [A]


@in_virtual_time
async def test_a_plan_on_another_base_is_not_trained() -> None:
    async with Life() as life:
        life.link.say(RoundOpened(plan=plan_for(A, base_digest=Digest(bytes(32)))))
        await asyncio.sleep(60)
        assert not life.island.works


@in_virtual_time
async def test_a_node_evaluates_while_the_bytes_of_the_next_round_travel() -> None:
    async with Life() as life:
        life.island.evaluation_seconds = 4.0
        plan = life.plan(1)
        life.link.say(RoundOpened(plan=plan), EvaluationAsked(round=0))
        await asyncio.sleep(TRAIN_SECONDS + 1)
        assert life.link.reported(Reduced), "its contribution did not wait"
        assert not life.link.reported(Evaluated)
        life.link.say(RoundCommitted(commit=life.commit(plan)))
        await asyncio.sleep(10)
        assert [number for number, _ in life.link.reported(Evaluated)] == [0]
        assert life.island.calls.index("evaluate") < life.island.calls.index("adopt", 2)
        assert life.outer.round == 1


@in_virtual_time
async def test_only_the_state_that_was_asked_for_is_evaluated() -> None:
    async with Life() as life:
        life.link.say(EvaluationAsked(round=1), EvaluationAsked(round=0))
        await asyncio.sleep(1)
        assert life.island.calls == ["start", "adopt", "evaluate"]
        assert [number for number, _ in life.link.reported(Evaluated)] == [0]


@in_virtual_time
async def test_a_coordinator_that_is_away_while_the_node_catches_up_is_waited_for() -> None:
    async with Life() as life:
        void = SliceOutcome(index=0, start=0, num_elements=NUM_ELEMENTS, digest=None)
        life.link.commits = (
            Commit(round=1, fragment=0, base_digest=life.outer.digest, slices=(void,)),
        )
        life.link.committed_round, life.link.lists_after = 1, 60.0
        life.link.say(UnavailableError("broken"))
        await asyncio.sleep(50)
        assert life.outer.round == 0
        await asyncio.sleep(50)
        assert [number for number, _ in life.link.reported(Applied)] == [1]


@in_virtual_time
async def test_a_request_to_refetch_a_state_that_is_right_moves_nothing() -> None:
    async with Life() as life:
        life.link.say(RefetchAsked(round=0, outer_digest=life.outer.digest, reason="odd"))
        await asyncio.sleep(5)
        assert life.island.calls == ["start", "adopt"]
        assert not life.link.reported(Applied)


def test_a_node_goes_back_drops_what_it_learnt_since_and_refuses_older_plans(
    tmp_path: Path,
) -> None:
    @in_virtual_time
    async def run() -> None:
        history = History(None)
        disk = StateOnDisk(
            tmp_path,
            history=history,
            clock=asyncio.get_running_loop().time,
            retention=Retention(keep=9, every=1),
        )
        async with Life(disk=disk, history=history) as life:
            states = [life.outer.digest]
            listed: list[Commit] = []
            for number in (1, 2, 3):
                plan = await life.opened(number, seconds=60)
                commit = life.commit(plan)
                life.link.say(RoundCommitted(commit=commit))
                await asyncio.sleep(1)
                states.append(life.outer.digest)
                listed.append(replace(commit, outer_digest=life.outer.digest))
                life.link.commits = tuple(listed)
            in_flight = await life.opened(4, seconds=1)
            ruling = ruling_of(
                RulingKind.ROLLED_BACK,
                from_round=2,
                last_round=3,
                incarnation=1,
                outer_digest=states[1].hex(),
            )
            life.link.commits = (listed[0],)
            life.island.calls.clear()
            life.link.say(RulingsTold(rulings=(ruling,), signatures=(b"",)))
            await asyncio.sleep(5)
            assert life.outer.position == (1, states[1])
            assert life.island.calls == ["publish", "begin anew after 1", "adopt"]
            assert not life.outer.owed().residual.any()
            assert history.at(2) is None
            assert life.link.reported(Applied)[-1][0] == 1
            old = replace(in_flight, round=2, base_digest=states[1])
            life.island.calls.clear()
            life.link.say(RoundOpened(plan=old))
            await asyncio.sleep(60)
            assert life.island.calls == []
            life.link.say(RulingsTold(rulings=(ruling,), signatures=(b"",)))
            life.link.say(RoundOpened(plan=replace(old, num_rulings=1)))
            await asyncio.sleep(60)
            assert life.island.calls == ["train", "publish"]

    run()


@pytest.mark.parametrize("planned_before", [1, 5])
@in_virtual_time
async def test_a_node_that_went_back_to_another_history_trains_what_is_planned_there(
    planned_before: int,
) -> None:
    """What it had trained from the other state is no pseudo-gradient of this one."""
    async with Life() as life:
        life.link.say(RoundOpened(plan=life.plan(1)))
        await asyncio.sleep(60)
        assert len(life.island.works) == 1
        life.daemon._duties.last_planned_round = planned_before
        other = life.outer.snapshot()
        life.outer.restore(replace(other, parameters=other.parameters + 1), None)
        life.link.say(RoundOpened(plan=life.plan(1)))
        await asyncio.sleep(60)
        assert len(life.island.works) == 2
