"""Rulings in the core: who may take part, whether rounds open, and when the run ends."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from coordinator.swarm.events import EndSession, Ruled, RulingsLearned, Started
from coordinator.swarm.members import PRESENT, MemberState
from coordinator.swarm.membership import roster_of
from coordinator.swarm.state import Rules
from coordinator.swarm.steering import with_rulings
from protocol.errors import ExpelledError, HeldBackError, UsageError
from protocol.trust.rulings import (
    OWN,
    ROUNDS,
    RUN_OWNER,
    RulingKind,
    follows,
    in_words,
    ruling_from_json,
)
from protocol.wire.messages import ParticipantsDeparted, RoundOpened, RulingsTold, RunFinished
from protocol.wire.rounds import NodeId
from tests.unit.swarm_scene import Scene, of_kind


def ruled(scene: Scene, kind: RulingKind, node: str = "", **fields: Any) -> None:
    scene.do(
        Ruled(
            kind=kind,
            by=RUN_OWNER,
            unix_seconds=1.7e9,
            node_id=NodeId(node),
            node_name=node,
            **fields,
        )
    )


def amended_rules(scene: Scene, **changes: Any) -> Rules:
    return replace(scene.state.rules, **changes)


def test_who_joins_by_an_invite_of_the_run_owners_own_is_that_before_the_ruling_and_after() -> None:
    scene = Scene(min_nodes=3)
    scene.attach("early", invite="mine")
    scene.attach("other", invite="other")
    ruled(scene, RulingKind.INVITED, invite_id="other")
    ruled(scene, RulingKind.INVITED, invite_id="mine", changes=OWN)
    assert (
        in_words(scene.state.rulings[-1]) == "invite mine was made for the run owner's own machines"
    )
    scene.attach("late", invite="mine")
    assert {n for n, m in scene.state.members.items() if m.is_own} == {"early", "late"}
    assert with_rulings(scene.state, scene.state.rulings).own_invites == ("mine",)


def test_an_invite_lets_in_so_many_at_once_by_the_latest_ruling_that_says_how_many() -> None:
    scene = Scene(min_nodes=5)
    ruled(scene, RulingKind.INVITED, invite_id="club", changes=(("max_nodes", 2), ("own", True)))
    assert in_words(scene.state.rulings[-1]).endswith("own machines, for 2 nodes at once")
    scene.attach("a", "b", invite="club")
    scene.attach("x", invite="other")
    with pytest.raises(HeldBackError, match="here: a, b"):
        scene.attach("c", invite="club")
    assert scene.state.own_invites == ("club",)
    ruled(scene, RulingKind.INVITED, invite_id="club", changes=(("max_nodes", 1),))
    assert {n for n, m in scene.state.members.items() if m.state is MemberState.READY} > {"a", "b"}
    scene.leave("a")
    with pytest.raises(
        HeldBackError, match="lets 1 of its nodes take part at once, and so many are here: b"
    ):
        scene.attach("c", invite="club")
    again = with_rulings(scene.state, scene.state.rulings)
    assert (again.invite_limits, again.own_invites) == ({"club": 1}, ("club",))
    ruled(scene, RulingKind.INVITED, invite_id="club", changes=(("max_nodes", 0),))
    scene.attach("c", invite="club")
    assert scene.state.invite_limits == {}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (RulingKind.EXPELLED, MemberState.EXPELLED),
        (RulingKind.QUARANTINED, MemberState.QUARANTINED),
    ],
)
def test_a_barred_node_is_out_of_the_round_at_once(kind: RulingKind, how: MemberState) -> None:
    scene = Scene(min_nodes=2)
    scene.attach("a", "b", "c")
    assert [a.node_id for a in scene.round.assignments] == ["a", "b"]
    ruled(scene, kind, "b", reason="noise")
    assert scene.member("b").state is how
    (ended,) = scene.asked(EndSession)
    assert ended.reason == f"the run owner decided: b was {how}: noise"
    (departed,) = scene.asked(ParticipantsDeparted)
    assert departed.node_ids == ("b",)
    assert {progress.slice.reducer_id for progress in scene.round.slices} == {"a"}
    assert "b" not in [entry.node_id for entry in roster_of(scene.state)]
    ruled(scene, RulingKind.READMITTED, "b")
    assert scene.member("b").state is MemberState.LEFT
    scene.attach("b")
    assert scene.member("b").state in PRESENT


def test_a_pause_lets_the_round_in_flight_end_and_opens_no_other() -> None:
    scene = Scene(min_nodes=1)
    scene.attach("a")
    ruled(scene, RulingKind.PAUSED, reason="night")
    scene.run_round("a")
    assert scene.state.open_round is None
    assert scene.reason == (
        "paused by the run owner since 2023-11-14 22:13:20 UTC: night; 'atoll run resume' goes on"
    )
    ruled(scene, RulingKind.RESUMED)
    assert scene.round.number == 2


def test_a_stop_makes_the_round_in_flight_the_last_one() -> None:
    scene = Scene(min_nodes=1, rounds=10)
    scene.attach("a")
    scene.run_round("a")
    ruled(scene, RulingKind.STOPPED, reason="enough")
    scene.run_round("a")
    assert not scene.state.is_finished
    scene.evaluate("a", round=2)
    (finished,) = scene.asked(RunFinished)
    assert finished.round == 2
    assert finished.reason.startswith("the run owner has stopped the run after round 2: enough; ")


def test_a_paused_run_can_be_stopped() -> None:
    scene = Scene(min_nodes=1)
    scene.attach("a")
    ruled(scene, RulingKind.PAUSED)
    scene.run_round("a")
    ruled(scene, RulingKind.STOPPED)
    scene.evaluate("a", round=1)
    assert scene.state.is_finished


def test_an_amendment_holds_from_the_next_round_on_and_every_plan_names_it() -> None:
    scene = Scene(min_nodes=1, rounds=1)
    scene.attach("a")
    rules = amended_rules(scene, total_rounds=3, inner_steps=7)
    ruled(scene, RulingKind.AMENDED, changes=(("run.rounds", 3),), rules=rules)
    assert scene.state.rulings[-1].from_round == 2
    (told,) = scene.asked(RulingsTold)
    assert told.rulings == scene.state.rulings
    scene.run_round("a")
    plans = [opened.plan for opened in of_kind(scene.log, RoundOpened)]
    assert [(plan.round, plan.num_rulings) for plan in plans] == [(1, 0), (2, 1)]
    assert plans[1].assignments[0].inner_steps == 7


def test_a_coordinator_that_starts_waits_for_no_barred_node() -> None:
    scene = Scene(min_nodes=1)
    scene.attach("a", "b")
    ruled(scene, RulingKind.EXPELLED, "b")
    scene.do(Started())
    assert scene.state.awaited is not None and scene.state.awaited.node_ids == ("a",)


def test_a_node_that_was_barred_while_it_asked_to_attach_is_refused() -> None:
    scene = Scene(min_nodes=1)
    scene.attach("a", "b")
    ruled(scene, RulingKind.EXPELLED, "b")
    with pytest.raises(ExpelledError, match="the run owner has expelled b"):
        scene.attach("b")
    assert scene.member("b").state is MemberState.EXPELLED


def begun() -> Scene:
    scene = Scene(min_nodes=1, rounds=3)
    scene.attach("a", "b")
    scene.run_round("a", "b")
    return scene


def stopped() -> Scene:
    scene = begun()
    ruled(scene, RulingKind.STOPPED)
    return scene


def finished() -> Scene:
    scene = stopped()
    scene.run_round("a", "b")
    scene.evaluate("a", round=2)
    scene.evaluate("b", round=2)
    assert scene.state.is_finished
    return scene


def test_more_rounds_open_a_finished_run_again_for_nodes_that_have_gone_home() -> None:
    scene = finished()
    scene.leave("a")
    scene.leave("b")
    rules = amended_rules(scene, total_rounds=4)
    ruled(scene, RulingKind.AMENDED, changes=((ROUNDS, 4),), rules=rules)
    assert scene.state.rulings[-1].from_round == 3
    assert scene.state.stopped is None and not scene.state.is_finished
    assert (scene.state.finished_at, scene.state.end_waits_until) == (None, None)
    assert scene.reason.startswith("waiting for 1 more node")
    bare = replace(scene.state, rulings=(), stopped=scene.state.rulings[-1], own_invites=("x",))
    assert with_rulings(bare, scene.state.rulings) == scene.state, "a start from the disk stops it"
    state = scene.state.outer_digest
    assert state is not None
    scene.attach("a", at=2, digest=state)
    assert scene.round.number == 3 and not scene.asked(RunFinished)
    scene.run_round("a")
    scene.run_round("a")
    scene.evaluate("a", round=4)
    assert scene.state.is_finished and scene.reason.startswith("all 4 rounds are committed")


def test_a_run_that_is_being_stopped_goes_on_when_it_is_extended() -> None:
    scene = stopped()
    assert scene.state.rules.total_rounds == 2
    rules = amended_rules(scene, total_rounds=3)
    ruled(scene, RulingKind.AMENDED, changes=((ROUNDS, 3),), rules=rules)
    scene.run_round("a", "b")
    assert scene.round.number == 3


def test_an_end_that_was_waited_for_begins_anew_after_an_extension() -> None:
    """Else the clock would have had something to do ever since, and the next end come at once."""
    scene = Scene(min_nodes=1, rounds=1, evaluate_every=1)
    scene.attach("a", "b")
    scene.run_round("a", "b")
    assert scene.state.end_waits_until is not None
    rules = amended_rules(scene, total_rounds=2)
    ruled(scene, RulingKind.AMENDED, changes=((ROUNDS, 2),), rules=rules)
    assert scene.state.end_waits_until is None
    scene.run_round("a", "b")
    assert not scene.state.is_finished


def test_an_older_copy_that_was_finished_learns_that_the_run_goes_on() -> None:
    scene, older = finished(), finished()
    rules = amended_rules(scene, total_rounds=5)
    ruled(scene, RulingKind.AMENDED, changes=((ROUNDS, 5),), rules=rules)
    older.do(RulingsLearned(rulings=scene.state.rulings, rules=rules))
    assert not older.state.is_finished and older.state.rules.total_rounds == 5


def test_a_finished_run_is_opened_by_no_other_amendment() -> None:
    scene = finished()
    rules = amended_rules(scene, total_rounds=9, min_nodes=2)
    with pytest.raises(UsageError, match="finished since round 2") as refused:
        ruled(scene, RulingKind.AMENDED, changes=(("run.min_nodes", 2),), rules=rules)
    assert "atoll run extend" in str(refused.value.next_step)
    same = amended_rules(scene, total_rounds=2)
    with pytest.raises(UsageError, match="finished since round 2"):
        ruled(scene, RulingKind.AMENDED, changes=((ROUNDS, 2),), rules=same)


@pytest.mark.parametrize(
    ("scene", "kind", "words"),
    [
        (begun, RulingKind.RESUMED, "the run is not paused"),
        (begun, RulingKind.READMITTED, "a is neither expelled nor quarantined"),
        (stopped, RulingKind.PAUSED, "the run is being stopped: round 2 is its last"),
        (stopped, RulingKind.STOPPED, "the run is being stopped"),
        (finished, RulingKind.PAUSED, "the run is finished since round 2"),
        (finished, RulingKind.AMENDED, "the run is finished since round 2"),
        (lambda: Scene(), RulingKind.STOPPED, "no round has begun"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(
    scene: Any, kind: RulingKind, words: str
) -> None:
    stage = scene()
    before = stage.state
    with pytest.raises(UsageError, match=words):
        ruled(stage, kind, "a")
    assert stage.state == before


def all_done() -> Scene:
    scene = begun()
    for _ in range(2):
        scene.run_round("a", "b")
    scene.evaluate("a", round=3)
    scene.evaluate("b", round=3)
    assert scene.state.is_finished
    return scene


def test_a_finished_run_goes_on_when_rounds_are_added_and_ends_anew_after_them() -> None:
    scene = all_done()
    rules = amended_rules(scene, total_rounds=4)
    ruled(scene, RulingKind.AMENDED, changes=((ROUNDS, 4),), rules=rules)
    assert not scene.state.is_finished and scene.state.finished_at is None
    assert [m.plan.round for m in scene.asked(RoundOpened)] == [4]
    scene.run_round("a", "b")
    scene.evaluate("a", round=4)
    assert [m.round for m in of_kind(scene.log, RunFinished)] == [3, 4]


def test_a_finished_run_that_gets_no_more_rounds_stays_as_it_is() -> None:
    scene = all_done()
    before = scene.state
    for changes in ({"min_nodes": 2}, {"total_rounds": 3}):
        with pytest.raises(UsageError, match="the run is finished since round 3") as refused:
            ruled(scene, RulingKind.AMENDED, rules=amended_rules(scene, **changes))
        assert "'atoll run extend N'" in refused.value.next_step
    assert scene.state == before


def test_an_older_copy_of_a_finished_run_goes_on_by_the_rounds_that_nodes_tell_were_added() -> None:
    scene, older = all_done(), all_done()
    rules = amended_rules(scene, total_rounds=5)
    ruled(scene, RulingKind.AMENDED, changes=((ROUNDS, 5),), rules=rules)
    older.do(RulingsLearned(rulings=scene.state.rulings, rules=scene.state.rules))
    assert not older.state.is_finished
    assert with_rulings(older.state, older.state.rulings) == older.state


def test_rulings_form_a_chain_and_a_state_from_the_disk_stands_as_before() -> None:
    scene = begun()
    ruled(scene, RulingKind.EXPELLED, "b")
    ruled(scene, RulingKind.PAUSED)
    ruled(scene, RulingKind.READMITTED, "b")
    rulings = scene.state.rulings
    assert follows(rulings[0], None)
    assert all(follows(later, before) for before, later in pairwise(rulings))
    bare = replace(scene.state, rulings=(), latest_rulings={}, paused=None, stopped=None)
    assert with_rulings(bare, rulings) == scene.state


def test_rulings_that_were_brought_back_bar_nodes_and_those_that_do_not_follow_are_left_out() -> (
    None
):
    scene, older = begun(), begun()
    ruled(scene, RulingKind.PAUSED)
    ruled(scene, RulingKind.EXPELLED, "b")
    older.do(RulingsLearned(rulings=scene.state.rulings[1:], rules=older.state.rules))
    assert older.state.rulings == ()
    older.do(RulingsLearned(rulings=scene.state.rulings, rules=older.state.rules))
    assert older.state.rulings == scene.state.rulings
    assert older.member("b").state is MemberState.EXPELLED and older.state.paused is not None


def test_a_ruling_that_this_release_may_pass_over_has_its_place_in_the_chain() -> None:
    scene = begun()
    ruled(scene, RulingKind.PAUSED)
    fields = json.loads(scene.state.rulings[0].canonical_json()) | {
        "number": 2,
        "before": scene.state.rulings[0].digest().hex(),
        "kind": "greeted",
        "optional": ["kind"],
    }
    told = ruling_from_json(json.dumps(fields, sort_keys=True, separators=(",", ":")))
    scene.do(RulingsLearned(rulings=(told,), rules=scene.state.rules))
    ruled(scene, RulingKind.RESUMED)
    rulings = scene.state.rulings
    assert [ruling.kind for ruling in rulings] == ["paused", "passed over", "resumed"]
    assert follows(rulings[1], rulings[0]) and follows(rulings[2], rulings[1])
    assert with_rulings(replace(scene.state, rulings=(), paused=None), rulings) == scene.state


def test_a_ruling_that_is_made_anew_keeps_the_round_that_it_is_from() -> None:
    scene = begun()
    rules = amended_rules(scene, total_rounds=9)
    ruled(scene, RulingKind.AMENDED, changes=(("run.rounds", 9),), rules=rules, from_round=1)
    assert scene.state.rulings[-1].from_round == 1
