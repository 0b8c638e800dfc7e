"""Who decides: confirmed work, and not the number of keys."""

from dataclasses import replace

import pytest

from coordinator.services.session import names_with_other_data
from coordinator.swarm.books import book, credited, earned, taken_back, unbook
from coordinator.swarm.members import Member, MemberState, Work
from coordinator.swarm.weighing import HALF_LIFE_ROUNDS, cap_of, say_of, worth
from protocol.wire.messages import RefetchAsked, RoundCommitted
from protocol.wire.rounds import WHOLE, NodeId
from tests.unit.swarm_scene import CORPUS, INITIAL, TOKENS, Scene, digest_of, of_kind

LIE = digest_of("a lie")
HONEST = ("honest-a", "honest-b", "honest-c")
LIARS = ("liar-1", "liar-2", "liar-3", "liar-4")


def of_three(*, rounds: int = 2, invites: tuple[str, ...] = ("a", "b", "c")) -> Scene:
    """Three nodes have trained some rounds, each joined by an invite of its own unless told."""
    scene = Scene(min_nodes=3)
    for name, invite in zip(HONEST, invites, strict=True):
        scene.attach(name, invite=invite)
    for number in range(1, rounds + 1):
        scene.commit(*HONEST)
        scene.apply(digest_of(f"after {number}"), *HONEST)
    return scene


def with_liars(scene: Scene) -> Scene:
    """Four keys of one invite join, and are in the next plan."""
    number = scene.state.committed_round
    digest = scene.state.outer_digest
    assert digest is not None
    scene.attach(*LIARS, at=number, digest=digest, invite="liars")
    scene.commit(*HONEST)
    scene.apply(digest_of(f"after {number + 1}"), *HONEST, *LIARS)
    assert {str(a.node_id) for a in scene.round.assignments} == {*HONEST, *LIARS}
    return scene


def commit_without_liars(scene: Scene) -> None:
    """They train nothing: no result has a contribution of theirs."""
    leased = {str(a.node_id): a.num_samples * 8 for a in scene.round.assignments}
    honest = {name: leased[name] for name in HONEST if name in leased}
    scene.commit(*HONEST, tokens=honest)


def test_four_keys_that_train_nothing_decide_no_digest_while_they_are_here_or_after() -> None:
    scene = with_liars(of_three())
    commit_without_liars(scene)
    scene.apply(LIE, *LIARS)
    scene.apply(digest_of("after 4"), *HONEST)
    assert scene.state.outer_digest == digest_of("after 4")
    assert {scene.member(n).state for n in HONEST} == {MemberState.READY}
    assert {scene.member(n).state for n in LIARS} == {MemberState.DIVERGED}
    for name in LIARS:
        scene.leave(name)
    assert scene.state.outer_digest == digest_of("after 4")


def test_liars_that_report_before_the_deadline_alone_decide_nothing_by_that() -> None:
    scene = with_liars(of_three())
    commit_without_liars(scene)
    scene.apply(LIE, *LIARS)
    scene.wait_until(scene.round.apply_deadline)
    assert scene.state.outer_digest is None, "the others have as much time again"
    scene.apply(digest_of("after 4"), *HONEST)
    assert scene.state.outer_digest == digest_of("after 4")


def test_liars_that_are_fast_decide_nothing_while_the_run_files_time_to_apply_lasts() -> None:
    """Plans give what the latest rounds took: two seconds, and most of the weight may once need more."""
    scene = with_liars(of_three())
    scene.state = replace(scene.state, open_round=replace(scene.round, apply_seconds=2.0))
    commit_without_liars(scene)
    began, most = scene.round.committed_at, scene.state.rules.apply_seconds
    scene.apply(LIE, *LIARS)
    assert scene.round.apply_deadline == began + 2
    scene.wait_until(began + 0.95 * most)
    assert scene.state.outer_digest is None
    scene.apply(digest_of("after 4"), *HONEST)
    assert scene.state.outer_digest == digest_of("after 4")
    assert {scene.member(n).state for n in LIARS} == {MemberState.DIVERGED}


def test_whoever_reports_decides_once_the_run_files_time_is_over() -> None:
    """A run does not stand still for members that are here and never apply."""
    scene = with_liars(of_three())
    commit_without_liars(scene)
    began, most = scene.round.committed_at, scene.state.rules.apply_seconds
    scene.apply(digest_of("after 4"), HONEST[0])
    scene.wait_until(began + 2 * most)
    assert scene.state.outer_digest == digest_of("after 4")


def test_two_members_that_hold_a_result_only_for_each_other_do_not_commit_it() -> None:
    scene = with_liars(of_three())
    made_up = digest_of("made up")
    for progress in scene.round.slices:
        reducer, index = str(progress.slice.reducer_id), progress.slice.index
        if reducer in LIARS:
            scene.reduce(reducer, index, made_up, {"liar-1": TOKENS})
            for liar in LIARS:
                scene.hold(liar, index, made_up)
        else:
            scene.reduce(reducer, index, digest_of("right"))
            for name in HONEST:
                scene.hold(name, index, digest_of("right"))
    scene.wait_until(scene.round.commit_deadline)
    (told,) = of_kind(scene.log, RoundCommitted)[3:]
    committed = {outcome.digest for outcome in told.commit.slices} - {None}
    assert committed == {digest_of("right")}


def test_while_nobody_has_work_each_invite_weighs_alike_and_two_thirds_decide() -> None:
    scene = Scene(min_nodes=6)
    scene.attach(*LIARS, invite="liars")
    for name, invite in (("honest-a", "a"), ("honest-b", "b")):
        scene.attach(name, invite=invite)
    weights = scene.round.say
    assert weights is not None and not weights.is_confirmed
    of_liars = sum(weights.weights[NodeId(name)] for name in LIARS)
    assert of_liars == weights.weights[NodeId("honest-a")] == weights.weights[NodeId("honest-b")]
    scene.train("honest-b")
    index, reducer = 0, str(scene.round.slices[0].slice.reducer_id)
    assert reducer == "honest-a"
    scene.reduce(reducer, index, LIE)
    for name in LIARS[:3]:
        scene.hold(name, index, LIE)
    assert "58 % of the weight" in scene.reason  # a third, and three quarters of another
    scene.hold("liar-4", index, LIE)
    assert "slice 0" not in scene.reason


@pytest.mark.parametrize("invites", [("all", "all", "all"), ("a", "b", "c")])
def test_with_one_invite_for_all_honest_nodes_commit_as_with_one_each(
    invites: tuple[str, ...],
) -> None:
    scene = of_three(rounds=4, invites=invites)
    say = say_of(scene.state.members.values(), 4)
    assert say.is_confirmed and len(set(say.weights.values())) == 1
    for progress in scene.round.slices:
        reducer, index = str(progress.slice.reducer_id), progress.slice.index
        scene.reduce(reducer, index, digest_of("right"))
        scene.hold(HONEST[index - 1], index, digest_of("right"))  # two of three are more than half
    assert scene.state.committed_round == 5


def test_a_slice_that_the_survivors_hold_commits_at_the_deadline() -> None:
    """Two of four die in mid-round, and nothing has told the coordinator of it yet."""
    names = ("node-a", "node-b", "node-c", "node-d")
    scene = Scene(min_nodes=4)
    scene.attach(*names)
    for number in (1, 2):
        scene.commit(*names)
        scene.apply(digest_of(f"after {number}"), *names)
    for name in ("node-a", "node-b"):
        scene.train(name)
    right = digest_of("right")
    for progress in scene.round.slices[:2]:
        scene.reduce(str(progress.slice.reducer_id), progress.slice.index, right)
        for name in ("node-a", "node-b"):
            scene.hold(name, progress.slice.index, right)
    assert scene.state.committed_round == 2, "half of the weight is not more than half"
    scene.wait_until(scene.round.commit_deadline)
    (told,) = of_kind(scene.log, RoundCommitted)[2:]
    assert [outcome.digest for outcome in told.commit.slices[:2]] == [right, right]


def test_a_joiner_without_work_neither_holds_up_a_commit_nor_decides_it() -> None:
    scene = of_three()
    scene.attach("joiner", at=2, digest=digest_of("after 2"), invite="joiner")
    scene.commit(*HONEST)
    scene.apply(digest_of("after 3"), *HONEST, "joiner")
    right = digest_of("right")
    for progress in scene.round.slices:
        scene.reduce(str(progress.slice.reducer_id), progress.slice.index, right)
        scene.hold("honest-a", progress.slice.index, right)
        scene.hold("joiner", progress.slice.index, right)
    assert scene.state.committed_round == 3
    for progress in scene.round.slices:
        scene.hold("honest-b", progress.slice.index, right)
    assert scene.state.committed_round == 4


def test_who_comes_first_does_not_choose_the_first_state() -> None:
    scene = Scene(min_nodes=3)
    scene.attach("liar", digest=LIE, invite="liar")
    scene.attach("honest-a", invite="a")
    assert not of_kind(scene.log, RefetchAsked), "nobody fetches a state that may be outweighed"
    scene.attach("honest-b", invite="b")
    assert scene.state.outer_digest == INITIAL
    assert scene.member("liar").state is MemberState.DIVERGED


def test_a_round_brings_each_its_tokens_by_the_part_of_the_fragment_that_took_them() -> None:
    scene = of_three(rounds=0)
    for progress in scene.round.slices:
        reducer, index = str(progress.slice.reducer_id), progress.slice.index
        names = HONEST if index else ("honest-a",)
        scene.reduce(reducer, index, digest_of("right"), dict.fromkeys(names, TOKENS))
        for name in HONEST:
            if scene.state.committed_round == 0:
                scene.hold(name, index, digest_of("right"))
    slices = scene.state.recent[0].commit.slices
    part = sum(s.num_elements for s in slices[1:])
    whole = part + slices[0].num_elements
    assert scene.member("honest-a").work.newest_tokens == TOKENS
    assert scene.member("honest-b").work.newest_tokens == TOKENS * part // whole


def test_a_round_that_is_taken_back_leaves_no_work_and_the_same_one_again_as_much() -> None:
    scene = of_three()
    commit = scene.state.recent[0].commit
    before = {n: m.work.by_stretch for n, m in scene.state.members.items()}
    gone = unbook(scene.state, commit)
    assert {m.work.by_stretch for m in gone.members.values()} == {((0, TOKENS),)}
    again = book(gone, commit)
    assert {n: m.work.by_stretch for n, m in again.members.items()} == before


def test_what_a_clip_cut_off_is_no_work() -> None:
    scene = of_three()
    commit = scene.state.recent[0].commit
    before = credited(scene.state, commit)
    half = [WHOLE // 2] + [WHOLE] * (len(commit.slices[0].contributors) - 1)
    clipped = replace(
        commit, slices=tuple(replace(each, factors=tuple(half)) for each in commit.slices)
    )
    after = credited(scene.state, clipped)
    first = commit.slices[0].contributors[0].node_id
    assert after == {**before, first: before[first] // 2}


def test_older_rounds_count_half_after_each_half_life_and_nothing_in_the_end() -> None:
    work = earned(Work(), 1, 100)
    now = [worth(work, 1 + lives * HALF_LIFE_ROUNDS) for lives in range(9)]
    assert now == [12800, 6400, 3200, 1600, 800, 400, 200, 100, 0]
    later = earned(work, 8 * HALF_LIFE_ROUNDS, 7)
    assert later.by_stretch == ((8, 7),)
    assert taken_back(earned(work, 2, 5), 2).by_stretch == work.by_stretch
    assert taken_back(earned(work, 2, 5), 1) == earned(work, 2, 5)


def of(name: str, tokens: int, invite: str) -> Member:
    known = Scene(min_nodes=9)
    known.attach(name, invite=invite)
    return replace(known.member(name), work=earned(Work(), 1, tokens))


def test_many_small_keys_take_no_say_from_one_with_more_work() -> None:
    members = [of("large", 1000, "all"), *(of(f"small-{n}", 5, "all") for n in range(100))]
    say = say_of(members, 1)
    assert 2 * say.weights[NodeId("large")] > sum(say.weights.values())


def test_members_of_one_invite_weigh_no_more_than_twice_what_is_usual_for_one() -> None:
    members = [of(f"own-{n}", 100, f"own-{n}") for n in range(4)]
    members += [of(f"many-{n}", 60, "many") for n in range(10)]
    say = say_of(members, 1)
    together = sum(say.weights[NodeId(f"many-{n}")] for n in range(10))
    assert together == 2 * 100 * 128 < 600 * 128
    assert cap_of([100, 100, 100, 100, 600]) == 200, "its own work is not usual by itself"
    assert cap_of([100, 100, 600, 600]) == 799, "of two like it, it is"
    assert cap_of([600, 20, 1]) == 20, "less than all others together"
    assert cap_of([600, 1]) == 601, "the smaller of two would decide alone"
    assert cap_of([600], own=50) == cap_of([600, 0], own=50) == 49


def test_a_result_that_its_reducer_alone_holds_is_void_though_nobody_else_was_heard() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("honest-a", "honest-b")
    scene.reduce(str(scene.round.slices[0].slice.reducer_id), 0, digest_of("right"))
    scene.wait(80)
    commit = scene.state.recent[-1].commit
    assert commit.round == 1 and all(outcome.digest is None for outcome in commit.slices)


def test_steps_that_the_speed_seen_does_not_explain_are_no_work() -> None:
    scene = of_three(rounds=0)
    for number in (1, 2):
        for name in HONEST:
            scene.train(name, seconds=1e-3 if (name, number) == ("honest-c", 2) else 5)
        scene.commit(*HONEST)
        scene.apply(digest_of(f"after {number}"), *HONEST)
    a_step = scene.state.rules.batch * scene.state.rules.context
    earned_by = {name: scene.member(name).work.newest_tokens for name in HONEST}
    assert earned_by == {"honest-a": TOKENS, "honest-b": TOKENS, "honest-c": a_step}


def test_a_node_is_told_who_trains_on_other_data_where_all_should_train_on_the_same() -> None:
    scene = Scene(min_nodes=3)
    other = replace(CORPUS, digest=digest_of("another split"))
    none = replace(other, num_samples=0)  # of a loop with a loader of its own, or not here yet
    scene.attach("a", "b")
    scene.attach("c", corpus=other)
    scene.attach("d", corpus=none)
    told = {name: names_with_other_data(scene.state, NodeId(name)) for name in "abcd"}
    assert told == {"a": ["c"], "b": ["c"], "c": ["a", "b"], "d": []}
    rules = replace(scene.state.rules, has_private_data=True)
    assert names_with_other_data(replace(scene.state, rules=rules), NodeId("c")) == []
