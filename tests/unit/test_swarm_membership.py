from dataclasses import replace

import pytest

from coordinator.swarm.events import (
    EndSession,
    HistoryTold,
    OpenSession,
    SendRoster,
    StreamBroken,
    Ticked,
    Woke,
)
from coordinator.swarm.members import MemberState
from coordinator.swarm.membership import roster_of
from coordinator.swarm.weighing import common_corpus
from protocol.errors import ProtocolMismatchError, SessionEndedError
from protocol.wire.messages import CommitsWanted, ParticipantsDeparted, RefetchAsked, RoundOpened
from protocol.wire.rounds import NodeId
from protocol.wire.versions import MERGE
from tests.unit.swarm_scene import CORPUS, INITIAL, LAYOUT, Scene, asked_of, digest_of, of_kind

WRONG = digest_of("wrong")
AFTER = digest_of("after")


def test_the_first_node_defines_the_initial_state_and_a_different_one_is_told_to_refetch() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a")
    assert scene.state.outer_digest == INITIAL
    assert scene.member("node-a").state is MemberState.READY
    scene.attach("node-b", digest=WRONG)
    assert scene.member("node-b").state is MemberState.DIVERGED
    (refetch,) = scene.asked(RefetchAsked)
    assert (refetch.round, refetch.outer_digest) == (0, INITIAL)
    assert asked_of(scene.actions, RefetchAsked) == ["node-b"]
    scene.beat("node-b", at=0, digest=INITIAL)
    assert scene.member("node-b").state is MemberState.READY


def test_the_initial_state_is_chosen_anew_when_nobody_who_holds_it_is_left() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a", digest=WRONG)
    scene.attach("node-b")
    scene.leave("node-a")
    assert scene.state.outer_digest == INITIAL
    assert scene.member("node-b").state is MemberState.READY


def test_a_node_of_another_run_or_layout_is_refused_with_both_digests() -> None:
    scene = Scene()
    scene.attach("node-a")
    before = scene.state
    with pytest.raises(ProtocolMismatchError, match=r"run 77726f6e.*run 72727272"):
        scene.attach("node-b", run=WRONG)
    with pytest.raises(ProtocolMismatchError, match=r"layout 77726f6e.*by 6c6c6c6c"):
        scene.attach("node-b", layout=replace(LAYOUT, digest=WRONG))
    with pytest.raises(ProtocolMismatchError):
        scene.attach("node-b", layout=replace(LAYOUT, fragment_elements=(512, 512)))
    assert scene.state == before


@pytest.mark.parametrize("name", ["liar", "node-a"])
def test_nothing_of_the_run_is_learnt_from_who_is_first_or_alone(name: str) -> None:
    """A foreign layout or codec is refused at a run's start, and after everyone has left."""
    scene = Scene()
    for _ in range(2):
        for foreign in (("foreign/1", "foreign/1"), ("int4/2", "int4/1"), ("int4/1",), ()):
            with pytest.raises(ProtocolMismatchError, match="where the run has int4/1 and int4/1"):
                scene.attach(name, codecs=foreign)
        for shapes in ((4, 0), (512, 512)):
            with pytest.raises(ProtocolMismatchError, match="cuts the model by layout"):
                scene.attach(name, layout=replace(LAYOUT, fragment_elements=shapes))
        scene.attach("node-a", "node-b")
        scene.leave("node-a")
        scene.leave("node-b")


def test_a_release_that_merges_otherwise_is_refused_and_convicts_nobody() -> None:
    scene = Scene()
    scene.attach("node", merge_version=MERGE)
    for told, merges in ((0, 1), (MERGE + 1, MERGE + 1)):  # the first releases tell none
        with pytest.raises(
            ProtocolMismatchError, match=f"merges by version {merges} of the ari"
        ) as error:
            scene.attach("another", merge_version=told)
        assert "install the coordinator's version of Atoll" in str(error.value)


def test_a_node_with_another_corpus_takes_part() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a")
    scene.attach("node-b", corpus=replace(CORPUS, num_bytes=1))
    assert scene.round.assignments[1].node_id == "node-b"
    assert scene.member("node-b").corpus.num_bytes == 1


def test_the_corpus_is_what_most_of_the_weight_tells_of_not_the_first_to_attach() -> None:
    scene = Scene(min_nodes=4)
    waits, other = replace(CORPUS, num_samples=0), replace(CORPUS, digest=WRONG)
    scene.attach("a-waits", corpus=waits, cannot_train=True, invite="1")
    assert common_corpus(scene.state) is None
    scene.attach("a-liar", corpus=other, invite="2")
    assert common_corpus(scene.state) == other  # nobody else tells of any yet
    scene.attach("b", invite="3")
    scene.attach("c", invite="4")
    assert common_corpus(scene.state) == CORPUS
    for name in ("a-liar", "b", "c"):
        scene.leave(name)
    assert common_corpus(scene.state) == CORPUS, "of those that are gone, where nobody has any"


def test_a_new_session_ends_the_one_before() -> None:
    scene = Scene()
    scene.attach("node-a", "node-a")
    sessions = [action.session_id for action in of_kind(scene.log, OpenSession)]
    assert len(set(sessions)) == 2
    with pytest.raises(SessionEndedError, match="attach again"):
        scene.beat("node-a", at=0, digest=INITIAL, session_id=sessions[0])
    scene.beat("node-a", at=0, digest=INITIAL, session_id=sessions[1])


def test_a_silent_member_is_lost_at_the_end_of_its_lease_and_not_before() -> None:
    scene = Scene(lease_seconds=15)
    scene.attach("node-a", "node-b")
    scene.now += 14.9
    scene.beat("node-b", at=0, digest=INITIAL)
    assert scene.member("node-a").state is MemberState.READY
    scene.now += 0.1
    scene.do(Ticked())
    assert scene.member("node-a").state is MemberState.LOST
    assert [e.node_id for e in scene.asked(EndSession)] == ["node-a"]
    assert scene.asked(SendRoster)
    assert [entry.node_id for entry in roster_of(scene.state)] == ["node-b"]
    with pytest.raises(SessionEndedError, match="lost"):
        scene.beat("node-a", at=0, digest=INITIAL)


def test_a_late_heartbeat_saves_its_lease_while_nobody_has_noticed() -> None:
    scene = Scene(lease_seconds=15)
    scene.attach("node-a")
    scene.now += 20
    scene.beat("node-a", at=0, digest=INITIAL)
    assert scene.member("node-a").state is MemberState.READY


def test_participants_learn_who_departed_and_not_of_others() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a", "node-b", "node-c")  # node-c comes after the plan
    scene.leave("node-c")
    assert not scene.asked(ParticipantsDeparted)
    scene.leave("node-b")
    assert scene.asked(ParticipantsDeparted) == [
        ParticipantsDeparted(round=1, node_ids=(NodeId("node-b"),))
    ]
    with pytest.raises(SessionEndedError):
        scene.leave("node-b")


def test_a_node_behind_joins_and_is_ready_once_it_has_caught_up() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a", "node-b")
    scene.commit("node-a", "node-b")
    scene.apply(AFTER, "node-a", "node-b")
    scene.attach("node-c")
    assert scene.member("node-c").state is MemberState.JOINING
    assert not scene.asked(RefetchAsked)
    scene.apply(AFTER, "node-c")
    assert scene.member("node-c").state is MemberState.READY


def test_a_node_ahead_of_the_swarm_is_asked_for_its_commits_and_goes_back_without_any() -> None:
    scene = Scene()
    scene.attach("node-a")
    scene.attach("node-b", at=7, digest=AFTER)
    assert scene.member("node-b").state is MemberState.JOINING
    assert scene.asked(CommitsWanted) == [CommitsWanted(after_round=0)]
    assert asked_of(scene.actions, CommitsWanted) == ["node-b"]
    assert not scene.asked(RefetchAsked)
    scene.do(HistoryTold(node_id=NodeId("node-b")))
    assert asked_of(scene.actions, RefetchAsked) == ["node-b"]
    assert [ask.round for ask in scene.asked(RefetchAsked)] == [0]


def test_a_wrong_digest_in_a_heartbeat_is_answered_once_and_not_at_each_heartbeat() -> None:
    scene = Scene()
    scene.attach("node-a", "node-b")
    asked = []
    for digest in (WRONG, WRONG, WRONG, AFTER, AFTER):
        scene.beat("node-b", at=0, digest=digest)
        asked.append(len(scene.asked(RefetchAsked)))
    assert asked == [1, 0, 0, 1, 0]
    assert scene.member("node-b").state is MemberState.DIVERGED


def test_an_old_heartbeat_that_arrives_late_does_not_unsettle_a_ready_member() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a", "node-b")
    scene.commit("node-a", "node-b")
    scene.apply(AFTER, "node-a", "node-b")
    scene.beat("node-a", at=0, digest=INITIAL)
    assert scene.member("node-a").state is MemberState.READY
    assert scene.member("node-a").outer_round == 1


def test_a_participant_that_attaches_again_stays_one_and_no_second_plan_is_made() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a", "node-b")
    scene.attach("node-b")
    assert scene.round.assignments[1].node_id == "node-b"
    assert len(of_kind(scene.log, RoundOpened)) == 1


def test_tokens_stay_on_the_account_of_a_node_that_comes_back() -> None:
    scene = Scene()
    scene.attach("node-a")
    scene.commit()
    scene.apply(AFTER, "node-a")
    scene.leave("node-a")
    scene.attach("node-a", at=1, digest=AFTER)
    assert scene.member("node-a").committed_tokens == scene.state.token_clock > 0


def test_a_node_whose_stream_broke_is_lost_when_its_next_heartbeat_does_not_come() -> None:
    scene = Scene(lease_seconds=15)
    scene.attach("node-a", "node-b", "node-c")
    for name in ("node-a", "node-b"):
        session_id = scene.member(name).session_id
        scene.do(StreamBroken(node_id=NodeId(name), session_id=session_id))
        scene.do(StreamBroken(node_id=NodeId(name), session_id=session_id - 7))  # an older one
    scene.wait(2)
    scene.beat("node-b", at=0, digest=INITIAL)
    scene.wait(1)
    states = [scene.member(name).state for name in ("node-a", "node-b", "node-c")]
    assert states == [MemberState.LOST, MemberState.READY, MemberState.READY]
    lost = scene.member("node-a")
    scene.do(StreamBroken(node_id=lost.node_id, session_id=lost.session_id))
    assert scene.member("node-a") == lost


def test_after_a_sleep_of_the_coordinator_the_present_have_time_to_come_back() -> None:
    scene = Scene(lease_seconds=15)
    scene.attach("node-a", "node-b", "node-c")
    scene.leave("node-c")
    left = scene.member("node-c")
    scene.now += 14
    scene.beat("node-a", at=0, digest=INITIAL)
    scene.do(Woke(pause_seconds=15))
    assert scene.member("node-a").lease_until == scene.now + 30
    assert scene.member("node-b").lease_until == scene.now + 30
    assert scene.member("node-c") == left
    scene.now += 29
    scene.beat("node-a", at=0, digest=INITIAL)
    scene.now += 1
    scene.do(Woke(pause_seconds=-20))  # a lease that is longer already is not cut
    assert scene.member("node-a").lease_until == scene.now + 14
    assert scene.member("node-b").state is MemberState.LOST
