"""Who checks what members have trained, and what the coordinator makes of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from coordinator.store import Store
from coordinator.streams import what_holds_for
from coordinator.swarm.events import QuarantineAsked, Reported, Ruled, Tell
from coordinator.swarm.members import SpotCheck, Work
from coordinator.swarm.shares import step_budgets
from coordinator.swarm.spot_checks import EXPECTED_SHARE, most_score
from coordinator.swarm.transition import initial_state
from protocol.errors import BadDataError
from protocol.trust.evidence import of_spot_checks, proven_by
from protocol.trust.identity import Identity
from protocol.trust.rulings import OWN, RulingKind
from protocol.wire.findings import SpotChecked
from protocol.wire.messages import SpotCheckAsked
from protocol.wire.rounds import OWN_LOOP, CorpusSummary, Digest, NodeId
from tests.unit.rulings_scene import quarantine
from tests.unit.swarm_scene import CORPUS, Scene, digest_of, of_kind

STEPS = 64  # of two samples
NAMES = ("a", "b", "c", "d", "e")
TRAINED, NOTHING = 4.0, 0.0  # what honest checkers score, on average

Scores = Callable[[NodeId, NodeId], float]
"""What a checker tells of a contributor."""


def scene_of(*names: str, share: float = 1.0, invites: dict[str, str] | None = None) -> Scene:
    """A round is open; each member is of an invite of its own unless told."""
    scene = Scene(min_nodes=len(names), rounds=1000, inner_steps=STEPS)
    scene.amend(audited_share=share)
    scene.state = replace(scene.state, audit_secret=b"secret")
    for name in names:
        scene.attach(name, invite=(invites or {}).get(name, name))
    return scene


def do_round(scene: Scene, *names: str) -> list[tuple[NodeId, SpotCheckAsked]]:
    """All train and commit a round and apply it; returns who is asked to check what."""
    before = len(scene.log)
    for name in names:
        steps = asked_steps(scene)[NodeId(name)]
        scene.train(name, tokens=2 * steps * 8, inner_steps=steps, seconds=steps / 20)
    scene.commit(*names)
    number = scene.state.committed_round
    scene.apply(digest_of(f"state {number}"), *names)
    return [
        (action.to[0], action.message)
        for action in scene.log[before:]
        if isinstance(action, Tell) and isinstance(action.message, SpotCheckAsked) and action.to
    ]


def order_of(check: SpotCheck) -> SpotCheckAsked:
    return SpotCheckAsked(
        round=check.round, contributor_id=check.contributor_id, seed=check.seed, seconds=1.0
    )


def answer(scene: Scene, checker: NodeId, asked: SpotCheckAsked, score: float, n: int = 32) -> None:
    found = SpotChecked(
        contributor_id=asked.contributor_id, num_samples=n, gap=score / 100, score=score
    )
    scene.do(Reported(node_id=checker, round=asked.round, report=found))


def own(scene: Scene, invite: str) -> None:
    """The run owner says that an invite is for his own machines."""
    kind = RulingKind.INVITED
    scene.do(Ruled(kind=kind, by="test", unix_seconds=0.0, invite_id=invite, changes=OWN))


def ruled(scene: Scene, kind: RulingKind, node: str) -> None:
    scene.do(Ruled(kind=kind, by="test", unix_seconds=0.0, node_id=NodeId(node), node_name=node))


def convicted(scene: Scene) -> list[NodeId]:
    return [a.conviction.node_id for a in scene.log if isinstance(a, QuarantineAsked)]


def rounds_until_convicted(scene: Scene, scores: Scores, *names: str, most: int = 40) -> int:
    """How many rounds pass until somebody is convicted; `most` for nobody."""
    for number in range(1, most):
        for checker, asked in do_round(scene, *names):
            answer(scene, checker, asked, scores(checker, asked.contributor_id))
            if convicted(scene):
                return number
    return most


def freeloading(*names: str) -> Scores:
    """Honest checkers all, with these members that train nothing."""
    return lambda checker, contributor: NOTHING if contributor in names else TRAINED


def test_who_trains_nothing_is_convicted_within_ten_checks_and_all_its_work_counts_no_more() -> (
    None
):
    scene = scene_of(*NAMES)

    rounds = rounds_until_convicted(scene, freeloading("c"), *NAMES)

    assert rounds <= 10
    assert convicted(scene) == ["c"]
    assert scene.member("c").work == Work()
    (reason,) = [a.conviction.reason for a in scene.log if isinstance(a, QuarantineAsked)]
    assert reason.startswith("it has not trained what it was leased: ")
    assert "others usually" in reason


def test_nobody_is_convicted_where_all_train() -> None:
    scene = scene_of(*NAMES)

    assert rounds_until_convicted(scene, freeloading(), *NAMES) == 40


def test_nobody_is_convicted_where_checks_show_nothing_of_anybody() -> None:
    scene = scene_of(*NAMES)

    assert rounds_until_convicted(scene, freeloading(*NAMES), *NAMES) == 40


def test_one_checker_convicts_nobody_however_often_it_checks() -> None:
    scene = scene_of(*NAMES)

    def scores(checker: NodeId, contributor: NodeId) -> float:
        return -10.0 if checker == "a" else TRAINED

    assert rounds_until_convicted(scene, scores, *NAMES) == 40


def test_two_members_of_one_invite_convict_nobody_of_another() -> None:
    names = ("a", "b", "c")
    scene = scene_of(*names, invites={"a": "theirs", "b": "theirs"})

    assert rounds_until_convicted(scene, freeloading("c"), *names) == 40


@pytest.mark.parametrize(("num_honest", "num_keys"), [(2, 4), (4, 4), (4, 8)])
def test_copying_keys_of_one_invite_shield_none_of_theirs_by_their_weight(
    num_honest: int, num_keys: int
) -> None:
    """Also where they have most of the work; nor does their praise save any."""
    honest, keys = NAMES[:num_honest], tuple(f"key-{n}" for n in range(num_keys))
    scene = scene_of(*honest, *keys, invites=dict.fromkeys(keys, "theirs"))

    def scores(checker: NodeId, contributor: NodeId) -> float:
        return 1e9 if checker in keys else NOTHING if contributor in keys else TRAINED

    assert rounds_until_convicted(scene, scores, *honest, *keys, most=30) < 30
    assert set(convicted(scene)) <= set(keys)


def test_the_run_owners_own_machines_convict_where_there_is_one_other_invite() -> None:
    names = ("a", "b", "c")
    scene = scene_of(*names, invites={"a": "mine", "b": "mine"})
    own(scene, "mine")

    assert rounds_until_convicted(scene, freeloading("c"), *names) < 40
    assert convicted(scene) == ["c"]


def test_strangers_with_less_work_than_the_run_owners_own_convict_none_of_those() -> None:
    """Its own stand by each other, for the run owner vouches for them."""
    mine, theirs = ("a", "b", "c", "d"), ("x", "y", "z")
    scene = scene_of(*mine, *theirs, invites=dict.fromkeys(mine, "mine"))
    own(scene, "mine")

    def scores(checker: NodeId, contributor: NodeId) -> float:
        return -10.0 if checker in theirs and contributor in mine else TRAINED

    assert rounds_until_convicted(scene, scores, *mine, *theirs) == 40


def test_an_accomplice_that_praises_saves_nobody() -> None:
    scene = scene_of(*NAMES)

    def scores(checker: NodeId, contributor: NodeId) -> float:
        return 1e9 if checker == "a" and contributor == "c" else freeloading("c")("b", contributor)  # type: ignore[arg-type]

    assert rounds_until_convicted(scene, scores, *NAMES) <= 20
    assert convicted(scene) == ["c"]


def test_a_checker_is_another_member_of_another_invite_that_can_evaluate() -> None:
    scene = scene_of(*NAMES, invites={"a": "one", "b": "one"})
    members = {**scene.state.members}
    members[NodeId("e")] = replace(members[NodeId("e")], cannot_evaluate=True)
    scene.state = replace(scene.state, members=members)

    asked = do_round(scene, *NAMES)

    assert sorted(order.contributor_id for _, order in asked) == list(NAMES)
    invites = {name: scene.member(name).invite_id for name in NAMES}
    assert all(invites[checker] != invites[order.contributor_id] for checker, order in asked)
    assert "e" not in {checker for checker, _ in asked}


def test_checks_are_drawn_by_a_secret_and_by_their_share() -> None:
    drawn = {
        secret: tuple(
            order.contributor_id
            for _ in range(10)
            for _, order in do_round(scene, *NAMES)
            if order.contributor_id
        )
        for secret in (b"one", b"other")
        for scene in [scene_of(*NAMES, share=0.3)]
        for scene.state in [replace(scene.state, audit_secret=secret)]
    }

    assert drawn[b"one"] != drawn[b"other"]
    assert all(5 <= len(each) <= 25 for each in drawn.values()), "about 15 of 50"


def test_a_loop_of_a_members_own_is_not_checked_for_samples_that_it_need_not_train() -> None:
    """It trained what its own loader gave, and was put in quarantine for that."""
    scene = scene_of(*NAMES)
    scene.attach("c", device=OWN_LOOP, cannot_evaluate=True, invite="c")

    rounds = rounds_until_convicted(scene, freeloading("c"), *NAMES, most=20)

    assert rounds == 20 and not convicted(scene)
    checked = {order.contributor_id for order in of_kind(scene.log, SpotCheckAsked)}
    assert checked == set(NAMES) - {"c"}


@pytest.mark.parametrize("num_ranks", [4, 5])
def test_loops_shield_nobody_with_ranks_by_their_weight(num_ranks: int) -> None:
    """They check nobody. With half of the weight they had no conviction, however much they made up."""
    ranks, loops = NAMES[:num_ranks], ("x", "y", "z")
    scene = scene_of(*ranks, *loops)
    for name in loops:
        scene.attach(name, device=OWN_LOOP, cannot_evaluate=True, invite=name)
    members = {**scene.state.members}
    for name in loops:
        member = members[NodeId(name)]
        members[NodeId(name)] = replace(member, work=Work(by_stretch=((0, 10**9),)))
    scene.state = replace(scene.state, members=members)

    assert rounds_until_convicted(scene, freeloading("c"), *ranks, *loops) < 40
    assert convicted(scene) == ["c"]


def test_ranks_of_two_invites_beside_loops_of_more_convict_nobody_of_a_third() -> None:
    ranks, loops = NAMES[:3], ("x", "y", "z")
    scene = scene_of(*ranks, *loops)
    for name in loops:
        scene.attach(name, device=OWN_LOOP, cannot_evaluate=True, invite=name)

    def scores(checker: NodeId, contributor: NodeId) -> float:
        return -10.0 if checker in "ab" and contributor == "c" else TRAINED

    assert rounds_until_convicted(scene, scores, *ranks, *loops) == 40


@pytest.mark.parametrize(
    "other",
    [
        replace(CORPUS, digest=digest_of("another Python's library")),
        replace(CORPUS, held_out_digest=digest_of("another Python's library")),
    ],
)
def test_who_has_other_data_checks_nobody_and_is_checked_by_those_that_have_the_same(
    other: CorpusSummary,
) -> None:
    """Samples of the same numbers are others there: all would seem to have trained nothing."""
    scene = scene_of(*NAMES)
    usual = replace(CORPUS, held_out_digest=digest_of("as it was"))
    others = {NodeId("d"), NodeId("e")}
    for name in NAMES:
        scene.attach(name, invite=name, corpus=other if name in others else usual)
    asked = [order for _ in range(6) for order in do_round(scene, *NAMES)]
    assert {order.contributor_id for _, order in asked} == set(NAMES) - others, (
        "of two one alone would check, who convicts nobody"
    )
    for checker, order in asked:
        assert (checker in others) == (order.contributor_id in others)


def close_with_less_of_c_in_one(scene: Scene, how: str) -> None:
    """A round in which one reducer has nothing of c, or less than the others."""
    number = scene.round.number
    steps = asked_steps(scene)
    for name in NAMES:
        mine = steps[NodeId(name)]
        scene.train(name, tokens=2 * mine * 8, inner_steps=mine, seconds=mine / 20)
    whole = {name: 2 * steps[NodeId(name)] * 8 for name in NAMES}
    for progress in scene.round.slices:
        index, reducer = progress.slice.index, progress.slice.reducer_id
        tokens, is_the_one = dict(whole), index == 0
        if is_the_one and how == "kept from one":
            del tokens["c"]
        samples = None
        if is_the_one and how == "fewer samples to one":
            samples, tokens["c"] = {"c": 3}, 3 * 8
        left_out = ("c",) if is_the_one and how == "left out by one" else ()
        result = digest_of(f"result {number}/{index}")
        scene.reduce(reducer, index, result, tokens, samples, left_out=left_out)
        for name in NAMES:
            if scene.state.committed_round < number:
                scene.hold(name, index, result)
    scene.apply(digest_of(f"state {number}"), *NAMES)


LESS = pytest.mark.parametrize("how", ["kept from one", "left out by one", "fewer samples to one"])


@LESS
def test_who_gives_one_reducer_less_than_the_others_is_checked_all_the_same(how: str) -> None:
    """It went unchecked, for want of one slice, and earned nearly as much."""
    scene = scene_of(*NAMES)
    close_with_less_of_c_in_one(scene, how)
    (check,) = [c for c in scene.state.spot_checks if c.contributor_id == "c"]
    assert check.num_samples == 2 * STEPS
    num_slices = len(NAMES) - 1  # of four blocks
    assert check.part == (1.0 if how == "fewer samples to one" else 1 - 1 / num_slices)


@LESS
def test_who_trains_nothing_and_gives_one_reducer_less_is_convicted(how: str) -> None:
    scene, scores = scene_of(*NAMES), freeloading("c")
    for _ in range(20):
        close_with_less_of_c_in_one(scene, how)
        for check in scene.state.spot_checks:
            checker, contributor = check.checker_id, check.contributor_id
            answer(scene, checker, order_of(check), scores(checker, contributor))
        if convicted(scene):
            break
    assert convicted(scene) == ["c"]


def test_of_work_that_came_in_part_less_is_expected() -> None:
    """Else a node behind a slow link, whose last slices come too late, were convicted for it."""
    scene = scene_of(*NAMES)
    for _ in range(2):
        checks = do_round(scene, *NAMES)
        halves = [replace(c, part=0.5) for c in scene.state.spot_checks if c.contributor_id == "c"]
        others = [c for c in scene.state.spot_checks if c.contributor_id != "c"]
        scene.state = replace(scene.state, spot_checks=(*others, *halves))
        for checker, asked in sorted(checks, key=lambda order: order[1].contributor_id == "c"):
            answer(scene, checker, asked, TRAINED)
    of_c, of_a = scene.member("c").spots[-1].expected, scene.member("a").spots[-1].expected
    assert of_c == pytest.approx(of_a * 0.5**0.5) and of_a > 0


@pytest.mark.parametrize("why", ["has_private_data", "compares_samples"])
def test_nobody_is_checked_where_single_samples_say_nothing(why: str) -> None:
    scene = scene_of(*NAMES)
    changes: dict[str, Any] = {why: True}
    scene.amend(**changes)
    assert not [order for _ in range(3) for order in do_round(scene, *NAMES)]


def test_nobody_is_checked_where_the_share_is_0() -> None:
    assert not do_round(scene_of(*NAMES, share=0.0), *NAMES)


def test_only_who_was_asked_is_heard_and_once() -> None:
    scene = scene_of(*NAMES)
    checker, asked = do_round(scene, *NAMES)[0]
    other = next(NodeId(n) for n in NAMES if n not in (checker, asked.contributor_id))

    answer(scene, other, asked, TRAINED)
    answer(scene, checker, asked, TRAINED)
    answer(scene, checker, asked, -TRAINED)

    (finding,) = scene.member(asked.contributor_id).spots
    assert (finding.checker_id, finding.score) == (checker, TRAINED)


@pytest.mark.parametrize("num_samples", [0, 15, 129])
def test_a_finding_of_too_few_samples_or_of_more_than_were_leased_shows_nothing(
    num_samples: int,
) -> None:
    scene = scene_of(*NAMES)
    checker, asked = do_round(scene, *NAMES)[0]

    answer(scene, checker, asked, TRAINED, n=num_samples)

    assert not scene.member(asked.contributor_id).spots


def test_a_score_counts_no_more_than_can_be() -> None:
    scene = scene_of(*NAMES)
    checker, asked = do_round(scene, *NAMES)[0]

    answer(scene, checker, asked, -1e9)

    assert scene.member(asked.contributor_id).spots[0].score == -most_score(32)


def test_what_is_expected_is_what_others_scored_by_then() -> None:
    scene = scene_of(*NAMES)
    first, second = do_round(scene, *NAMES), do_round(scene, *NAMES)
    for checker, asked in first:
        answer(scene, checker, asked, TRAINED)
    for checker, asked in second:
        answer(scene, checker, asked, 2 * TRAINED)

    spots = [scene.member(name).spots for name in NAMES]
    assert min(finding.expected for (finding, _) in spots) == 0, "nothing was known at first"
    assert spots[0][1].expected == pytest.approx(EXPECTED_SHARE * TRAINED)


def asked_steps(scene: Scene) -> dict[NodeId, int]:
    return {a.node_id: a.inner_steps for a in scene.round.assignments}


def test_who_checks_is_asked_to_train_less_by_the_time_that_its_checks_take() -> None:
    scene = Scene(min_nodes=5, rounds=1000, inner_steps=100)
    scene.amend(audited_share=0.3, batch=8)
    scene.state = replace(scene.state, audit_secret=b"secret")
    for name in NAMES:
        scene.attach(name, invite=name)
    assert set(asked_steps(scene).values()) == {100}
    for _ in range(8):
        for name in NAMES:
            steps = asked_steps(scene)[NodeId(name)]
            scene.train(name, tokens=8 * steps * 8, inner_steps=steps, seconds=steps / 20)
        scene.commit(*NAMES)
        asked = {check.checker_id for check in scene.state.spot_checks if not check.is_planned_for}
        scene.apply(digest_of(f"state {scene.state.committed_round}"), *NAMES)
        for node_id, steps in asked_steps(scene).items():
            # 128 samples and as many others, at two states, are 512 passes: 21.3 steps of 8 samples.
            assert steps == 100 if node_id not in asked else 35 <= steps <= 100 - 21
        assert all(check.is_planned_for for check in scene.state.spot_checks)
        for check in scene.state.spot_checks:
            answer(scene, check.checker_id, order_of(check), TRAINED)


def test_a_lease_stays_as_large_as_what_a_check_of_it_wants() -> None:
    scene = Scene(min_nodes=5, rounds=1000, inner_steps=20)
    scene.amend(audited_share=1.0)
    scene.state = replace(scene.state, audit_secret=b"secret")
    for name in NAMES:
        scene.attach(name, invite=name)
    do_round(scene, *NAMES)
    assert min(asked_steps(scene).values()) == 8, "16 samples"


def test_steps_of_a_round_that_all_share_stay_the_same_where_some_check() -> None:
    scene = Scene(min_nodes=4, inner_steps=100, round_steps=400)
    scene.attach(*NAMES[:4])
    members = [scene.member(name) for name in NAMES[:4]]
    rules = replace(scene.state.rules, batch=8)

    asked = step_budgets(members, rules, checking={NodeId("a"): 50.0, NodeId("b"): -5.0})

    assert sum(asked.values()) == 400
    assert asked[NodeId("a")] < 60 and min(asked[NodeId(n)] for n in "bcd") >= 110


def test_who_comes_back_hears_what_it_is_to_check() -> None:
    scene = scene_of(*NAMES)
    checker, asked = do_round(scene, *NAMES)[0]

    def told() -> list[SpotCheckAsked]:
        messages = what_holds_for(scene.state, scene.member(checker), scene.now)
        return [m for m in messages if isinstance(m, SpotCheckAsked)]

    assert asked in told()
    answer(scene, checker, asked, TRAINED)
    assert asked not in told()


def test_a_member_that_is_readmitted_is_not_held_to_what_was_measured_before() -> None:
    """Nor to what checkers that were asked before tell after it was convicted."""
    scene = scene_of(*NAMES)
    pending: list[tuple[NodeId, SpotCheckAsked]] = []
    while not convicted(scene):
        told = do_round(scene, *NAMES)
        for place, (checker, asked) in enumerate(told):
            if convicted(scene):
                pending += told[place:]
                break
            answer(scene, checker, asked, freeloading("c")(checker, asked.contributor_id))
    pending += do_round(scene, *NAMES)  # it is here until it is ruled

    for checker, asked in pending:
        answer(scene, checker, asked, freeloading("c")(checker, asked.contributor_id))
    ruled(scene, RulingKind.QUARANTINED, "c")
    ruled(scene, RulingKind.READMITTED, "c")
    scene.attach("c", at=scene.state.committed_round, digest=scene.state.outer_digest)

    assert pending and not scene.member("c").spots
    assert not [check for check in scene.state.spot_checks if check.contributor_id == "c"]
    others = [name for name in NAMES if name != "c"]
    while "c" not in [a.node_id for a in scene.round.assignments]:
        do_round(scene, *others)
    for _ in range(20):  # it trains from now on
        for checker, asked in do_round(scene, *NAMES):
            answer(scene, checker, asked, TRAINED)
    assert convicted(scene) == ["c"], "once, and not for what was before"
    assert len(scene.member("c").spots) == 20


def test_a_test_goes_on_where_it_was_when_the_coordinator_comes_back_from_its_database() -> None:
    """So who can have it restart loses and gains nothing by that."""
    scene, store = scene_of(*NAMES), Store.in_memory()
    empty = initial_state(scene.state.rules, scene.state.run_digest)
    rounds = 0
    while not convicted(scene):
        rounds += 1
        for checker, asked in do_round(scene, *NAMES):
            store.save(empty, scene.state, now=scene.now)
            restored = store.load(scene.state.rules, scene.state.run_digest)
            was = scene.state
            assert {n: m.spots for n, m in restored.members.items()} == {
                n: m.spots for n, m in was.members.items()
            }
            assert restored.spot_checks == was.spot_checks
            scene.state = replace(restored, audit_secret=b"secret")
            answer(scene, checker, asked, freeloading("c")(checker, asked.contributor_id))
    assert rounds == rounds_until_convicted(scene_of(*NAMES), freeloading("c"), *NAMES)


def signed_by(identity: Identity) -> SpotChecked:
    found = SpotChecked(contributor_id=NodeId("c"), num_samples=40, gap=0.0, score=-1.0)
    return found.signed(identity, run_digest=b"r" * 32, round=3)


def test_signed_checks_are_evidence_about_the_member_that_they_are_of() -> None:
    run = Digest(b"r" * 32)
    checkers = [Identity.generate(), Identity.generate()]
    evidence = of_spot_checks([signed_by(each) for each in (*checkers, checkers[0])])

    assert (
        proven_by(quarantine("c", evidence), run_digest=run) == "3 signed spot checks of 2 members"
    )
    with pytest.raises(BadDataError, match="evidence about c"):
        proven_by(quarantine("d", evidence), run_digest=run)
    with pytest.raises(BadDataError, match="another run"):
        proven_by(quarantine("c", evidence), run_digest=Digest(b"s" * 32))


def test_a_changed_check_is_no_evidence() -> None:
    changed = replace(signed_by(Identity.generate()), score=-9.0)

    with pytest.raises(BadDataError, match="signature"):
        proven_by(quarantine("c", of_spot_checks([changed])), run_digest=Digest(b"r" * 32))
