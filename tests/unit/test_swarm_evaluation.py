"""Which states are evaluated, by whom, and which losses are kept."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from coordinator.journal import News, news_of
from coordinator.swarm.events import GoBack, Tell
from coordinator.swarm.explain import alike_in_words, differing_in_words
from coordinator.swarm.losses import plausible_losses
from coordinator.swarm.transition import Transition
from protocol.wire.messages import EvaluationAsked, RoundOpened
from protocol.wire.rounds import OWN_LOOP, CorpusSummary, NodeId
from tests.unit import swarm_scene
from tests.unit.swarm_scene import (
    CORPUS,
    INITIAL,
    Scene,
    asked_of,
    contribution_from,
    digest_of,
    of_kind,
)

NODES = ("node-a", "node-b")


def test_states_that_are_due_are_evaluated_by_one_node_each_in_turn() -> None:
    scene = Scene(min_nodes=2, rounds=5, evaluate_every=2)
    scene.attach(*NODES)
    for _ in range(5):
        scene.run_round(*NODES)
    rounds = [ask.round for ask in of_kind(scene.log, EvaluationAsked)]
    asked = list(zip(rounds, asked_of(scene.log, EvaluationAsked), strict=True))
    assert asked == [(0, "node-a"), (2, "node-b"), (4, "node-a"), (5, "node-a")]


def test_who_evaluates_is_sent_its_plan_first_and_so_trains_first() -> None:
    scene = Scene(min_nodes=2, rounds=5, evaluate_every=1)
    scene.attach(*NODES)
    for _ in range(3):
        told = [type(action.message) for action in scene.actions[-2:] if isinstance(action, Tell)]
        assert told == [RoundOpened, EvaluationAsked]
        scene.run_round(*NODES)


def test_an_evaluation_has_time_until_the_round_that_its_node_trains_in_is_applied() -> None:
    scene = Scene(min_nodes=2, rounds=5)
    scene.attach(*NODES)
    asked = scene.state.evaluating
    assert asked is not None
    assert asked.until == scene.round.commit_deadline + scene.state.rules.apply_seconds


def test_a_state_is_evaluated_at_once_when_no_round_follows_it_yet() -> None:
    scene = Scene(min_nodes=2, rounds=5, evaluate_every=1)
    scene.attach(*NODES)
    scene.evaluate("node-a", round=0)
    scene.commit(*NODES)
    scene.apply(digest_of("state 1"), "node-a")
    scene.leave("node-b")
    assert scene.state.open_round is None
    (asked,) = scene.asked(EvaluationAsked)
    assert asked.round == 1 and asked_of(scene.actions, EvaluationAsked) == ["node-a"]
    scene.evaluate("node-a", round=1)
    scene.attach("node-b", at=1, digest=digest_of("state 1"))
    assert scene.round.number == 2
    assert len(of_kind(scene.log, EvaluationAsked)) == 2, "once for each state"


def test_an_evaluation_counts_once_and_only_from_the_node_that_was_asked() -> None:
    scene = Scene(min_nodes=2)
    scene.attach(*NODES)
    scene.evaluate("node-b", round=0)
    scene.evaluate("node-a", round=1)
    assert list(scene.state.held_out) == []
    scene.evaluate("node-a", round=0, loss=3.25)
    scene.evaluate("node-a", round=0, loss=9.0)
    assert [(kept.round, kept.loss) for kept in scene.state.held_out] == [(0, 3.25)]


def test_of_a_node_that_is_waited_for_it_is_said_that_it_may_be_evaluating() -> None:
    scene = Scene(min_nodes=2, evaluate_every=1)
    scene.attach(*NODES)
    scene.commit(*NODES)
    assert scene.reason.endswith("node-a may still measure the loss of round 0")
    scene.apply(digest_of("state 1"), "node-a")
    assert "waiting for node-b to apply round 1" in scene.reason and "measure" not in scene.reason


def test_an_evaluation_never_holds_up_a_round() -> None:
    scene = Scene(min_nodes=2, evaluate_every=1)
    scene.attach(*NODES)
    scene.run_round(*NODES)
    scene.run_round(*NODES)
    assert scene.round.number == 3
    scene.evaluate("node-b", round=1)  # too late: superseded
    scene.evaluate("node-a", round=2)
    assert [loss.round for loss in scene.state.held_out] == [2]


def holder(name: str, held_out_tokens: int) -> CorpusSummary:
    return CorpusSummary(
        digest=digest_of(name),
        num_samples=1000,
        num_bytes=9000,
        num_held_out_tokens=held_out_tokens,
    )


def three_holders() -> Scene:
    """Of four nodes two have the same data."""
    scene = Scene(min_nodes=4, evaluate_every=1, has_private_data=True)
    for name, corpus in (
        *(("node-a", holder("clinic", 100)), ("node-b", holder("bank", 300))),
        *(("node-c", holder("bank", 300)), ("node-d", holder("shop", 600))),
    ):
        scene.attach(name, corpus=corpus)
    return scene


def test_of_private_data_a_node_of_each_holder_is_asked_and_held_out_tokens_weigh() -> None:
    scene = three_holders()
    assert asked_of(scene.log, EvaluationAsked) == ["node-a", "node-b", "node-d"]
    scene.evaluate("node-d", round=0, loss=3.0)
    scene.evaluate("node-d", round=0, loss=9.0)
    scene.evaluate("node-c", round=0, loss=9.0)
    scene.evaluate("node-a", round=0, loss=1.0)
    assert list(scene.state.held_out) == [], "the bank has not answered"
    scene.evaluate("node-b", round=0, loss=2.0)
    (kept,) = scene.state.held_out
    assert kept.loss == pytest.approx((100 * 1.0 + 300 * 2.0 + 600 * 3.0) / 1000)
    assert [(one.node_id, one.loss, one.weight) for one in kept.holders] == [
        ("node-a", 1.0, 100),
        ("node-b", 2.0, 300),
        ("node-d", 3.0, 600),
    ]
    assert scene.state.evaluating is None
    scene.commit("node-a", "node-b", "node-c", "node-d")
    scene.apply(digest_of("state 1"), "node-a", "node-b", "node-c", "node-d")
    assert asked_of(scene.log, EvaluationAsked)[3:] == ["node-a", "node-c", "node-d"]


HARD = {"node-a": 4.0, "node-b": 1.0, "node-c": 1.0, "node-d": 4.0}
"""What models come to on the holders' data: texts are not equally hard."""


def rounds_of_holders(scene: Scene, number: int, **times: float) -> list[GoBack]:
    """So many rounds, each evaluated by a node of each holder; `times` as much by some."""
    begun = len(scene.log)
    for _ in range(number):
        asked = scene.state.evaluating
        assert asked is not None
        for node_id in asked.node_ids:
            loss = HARD[node_id] * times.get(node_id.replace("-", "_"), 1.0)
            scene.evaluate(node_id, round=asked.round, loss=loss)
        if any(isinstance(action, GoBack) for action in scene.log[begun:]):
            break
        names = ("node-a", "node-b", "node-c", "node-d")
        scene.commit(*names)
        scene.apply(digest_of(f"state {scene.state.committed_round}"), *names)
    return [action for action in scene.log[begun:] if isinstance(action, GoBack)]


def watching_holders() -> Scene:
    scene = three_holders()
    scene.amend(watches_loss=True)
    assert not rounds_of_holders(scene, 6), "two are further above the mean than any jump is"
    return scene


def test_a_holder_is_compared_with_what_was_found_on_its_own_data() -> None:
    """Else a run whose holders' texts are not equally hard went back again and again."""
    scene = watching_holders()
    assert not rounds_of_holders(scene, 3, node_a=0.99, node_d=0.99)


def test_where_two_holders_find_a_jump_on_their_own_data_the_run_goes_back() -> None:
    """Also where the mean hardly moves, as these are the easy ones."""
    scene = watching_holders()
    (action,) = rounds_of_holders(scene, 1, node_a=1.6, node_b=1.6, node_c=1.6)
    assert action.alarm.reason.startswith(
        "the held-out loss was 1.600 after round 6, and was 1.000 after round 5"
    )


def test_where_one_holder_alone_finds_a_jump_nothing_follows() -> None:
    scene = watching_holders()
    assert not rounds_of_holders(scene, 3, node_d=1.6)


def test_a_holder_that_is_gone_or_late_is_left_out_of_the_mean() -> None:
    scene = three_holders()
    scene.evaluate("node-a", round=0, loss=1.0)
    scene.leave("node-d")
    assert scene.state.evaluating is not None
    assert scene.state.evaluating.node_ids == ("node-b",)
    scene.wait_until(scene.state.evaluating.until)
    (kept,) = scene.state.held_out
    assert (kept.loss, [one.node_id for one in kept.holders]) == (1.0, ["node-a"])


def test_an_evaluation_that_is_superseded_keeps_what_holders_have_said_of_its_state() -> None:
    scene = three_holders()
    scene.evaluate("node-a", round=0, loss=1.0)
    scene.evaluate("node-b", round=0, loss=2.0)
    scene.commit("node-a", "node-b", "node-c", "node-d")
    scene.apply(digest_of("state 1"), "node-a", "node-b", "node-c", "node-d")
    (kept,) = scene.state.held_out
    assert (kept.round, kept.loss) == (0, pytest.approx((100 * 1.0 + 300 * 2.0) / 400))
    for name in ("node-a", "node-c", "node-d"):
        scene.evaluate(name, round=1, loss=1.0)
    assert [loss.round for loss in scene.state.held_out] == [0, 1]


def test_of_the_same_data_no_holders_are_told_apart() -> None:
    scene = Scene(min_nodes=2)
    scene.attach(*NODES)
    scene.evaluate("node-a", round=0)
    assert [loss.holders for loss in scene.state.held_out] == [()]


OTHER = replace(CORPUS, digest=digest_of("one file more"))
OTHER_HELD_OUT = replace(CORPUS, held_out_digest=digest_of("one file more"))
KNOWN_HELD_OUT = replace(CORPUS, held_out_digest=digest_of("as it was"))


@pytest.mark.parametrize(
    ("others", "usual"),
    [
        (OTHER, CORPUS),
        (OTHER_HELD_OUT, KNOWN_HELD_OUT),
        (replace(CORPUS, num_samples=0), CORPUS),  # a loop's own
    ],
)
@pytest.mark.parametrize("watches_loss", [False, True])
def test_who_has_other_data_than_most_is_not_asked_for_a_loss(
    others: CorpusSummary, usual: CorpusSummary, watches_loss: bool
) -> None:
    scene = Scene(min_nodes=4, rounds=8, evaluate_every=1)
    scene.amend(watches_loss=watches_loss)
    scene.attach("node-b", corpus=others)
    nodes = ("node-a", "node-c", "node-d")
    scene.attach(*nodes, corpus=usual)
    for _ in range(6):
        scene.commit("node-b", *nodes)
        scene.apply(digest_of(f"state {scene.state.committed_round}"), "node-b", *nodes)
    asked = set(asked_of(scene.log, EvaluationAsked))
    assert asked == set(nodes)


def test_a_node_that_tells_nothing_of_its_held_out_text_is_asked_as_before() -> None:
    scene = Scene(min_nodes=2, rounds=9, evaluate_every=1)
    scene.attach("node-a", corpus=KNOWN_HELD_OUT)
    scene.attach("node-b", corpus=CORPUS)  # of the release before
    for _ in range(3):
        scene.run_round(*NODES)
    assert set(asked_of(scene.log, EvaluationAsked)) == set(NODES)


def alone_with(corpus: CorpusSummary, *losses: float) -> Scene:
    """A swarm of one whose text is another from the last loss on; it goes by the loss."""
    scene = Scene(min_nodes=1, rounds=20, evaluate_every=1)
    scene.amend(watches_loss=True)
    scene.attach("node-a", corpus=KNOWN_HELD_OUT)
    for number, loss in enumerate(losses[:-1]):
        scene.evaluate("node-a", round=number, loss=loss)
        scene.commit("node-a")
        scene.apply(digest_of(f"state {number + 1}"), "node-a")
    last = len(losses) - 1
    scene.attach("node-a", corpus=corpus, at=last, digest=digest_of(f"state {last}"))
    scene.evaluate("node-a", round=last, loss=losses[-1])
    return scene


def test_a_loss_on_another_text_is_no_jump_of_the_model_and_begins_a_curve_of_its_own() -> None:
    losses = (3.0, 2.9, 2.8, 2.7, 2.6, 5.0)
    assert alone_with(KNOWN_HELD_OUT, *losses).state.alarm is not None
    for corpus in (OTHER, OTHER_HELD_OUT):
        scene = alone_with(corpus, *losses)
        assert scene.state.alarm is None
        assert scene.state.held_out_text_from == 5
        assert [each.loss for each in scene.state.held_out] == list(losses)
        assert [each.loss for each in plausible_losses(scene.state, 6)[0]] == [5.0]


def loops(**functions: str) -> Scene:
    """A swarm of loops that each evaluate by a function, after so many seconds."""
    scene = Scene(min_nodes=len(functions), rounds=50, evaluate_every=1)
    for name, function in functions.items():
        scene.attach(name, device=OWN_LOOP, corpus=replace(CORPUS, num_samples=0))
        scene.beat(name, at=0, digest=INITIAL, evaluates_by=function)
    return scene


def evaluate_for(scene: Scene, rounds: int, *names: str) -> list[NodeId]:
    """Who is asked in so many rounds."""
    since = len(scene.log)
    for _ in range(rounds):
        number = scene.state.committed_round
        if scene.state.evaluating is not None:
            scene.evaluate(str(scene.state.evaluating.node_ids[0]), round=number)
        scene.commit(*names)
        scene.apply(digest_of(f"state {scene.state.committed_round}"), *names)
    return asked_of(scene.log[since:], EvaluationAsked)


@pytest.mark.parametrize("watches_loss", [False, True])
def test_losses_by_other_functions_are_not_mixed_in_one_curve(watches_loss: bool) -> None:
    names = ("a", "b", "c")
    scene = loops(a="of mine", b="of theirs", c="of theirs")
    scene.amend(watches_loss=watches_loss)
    evaluate_for(scene, 1, *names)
    by = scene.state.held_out_text
    asked = set(evaluate_for(scene, 8, *names))
    assert asked == ({"a"} if by == "of mine" else {"b", "c"})
    assert scene.state.held_out_text_from == 0


def evaluations_of(scene: Scene, losses: Mapping[str, float], rounds: int) -> list[News]:
    """Has all who are asked say what they find, in so many rounds; returns what is told of it."""
    told: list[News] = []
    for _ in range(rounds):
        number = scene.state.committed_round
        asked = scene.state.evaluating
        assert asked is not None
        for node_id in asked.node_ids:
            before = scene.state
            scene.evaluate(str(node_id), round=number, loss=losses[node_id])
            told += news_of(before, Transition(state=scene.state, actions=(), at=scene.now))
        scene.commit(*losses)
        scene.apply(digest_of(f"state {scene.state.committed_round}"), *losses)
    return [news for news in told if news.what == "held-out losses of one state differ"]


def test_evaluators_who_find_other_losses_of_one_state_are_told_once_and_until_they_agree() -> None:
    scene = loops(a="same", b="same", c="same")
    scene.amend(watches_loss=True, min_nodes=2)
    scene.commit("a", "b", "c")
    scene.apply(digest_of(f"state {scene.state.committed_round}"), "a", "b", "c")
    noise = {"a": 2.0, "b": 2.05, "c": 2.09}
    assert evaluations_of(scene, noise, 2) == [] and differing_in_words(scene.state) == ""
    (told,) = evaluations_of(scene, {"a": 2.0, "b": 2.5, "c": 2.0}, 3)
    words = differing_in_words(scene.state)
    number = scene.state.committed_round - 1
    assert words.startswith(f"a finds 2.000 and b 2.500 of the state after round {number}: they ")
    assert told.level == "warning" and "a finds 2.000 and b 2.500" in str(told.facts["why"])
    with_one_gone = replace(scene.state, evaluating=None)
    assert evaluations_of(scene, noise, 1) == [] and differing_in_words(scene.state) == ""

    scene.state = with_one_gone
    scene.leave("b")
    scene.commit("a", "c")
    scene.apply(digest_of(f"state {scene.state.committed_round}"), "a", "c")
    assert differing_in_words(scene.state) == words, "nobody has evaluated since"
    evaluations_of(scene, {"a": 2.0, "c": 2.0}, 1)
    assert differing_in_words(scene.state) == ""


def round_with_losses(scene: Scene, **losses: float) -> tuple[str, int]:
    """A round whose nodes tell these; what is said of them then, and how often that was news."""
    before = scene.state
    for name, loss in losses.items():
        scene.train(name, loss=loss)
    scene.commit(*losses)
    told = news_of(before, Transition(state=scene.state, actions=(), at=scene.now))
    scene.apply(digest_of(f"state {scene.state.committed_round}"), *losses)
    return alike_in_words(scene.state), [one.what for one in told].count(
        "loops train on the same samples"
    )


def test_loops_that_draw_the_same_batches_are_told_once_and_until_they_do_not() -> None:
    scene = loops(a="", b="", c="")
    scene.attach("ranks")
    own = {"c": 0.0, "ranks": 3.0316274}  # one tells no loss, and one trains what it has leased
    assert round_with_losses(scene, a=3.0316274, b=3.0316276, **own) == ("", 0)
    words, num_news = round_with_losses(scene, a=3.0316274, b=3.0316274, **own)
    assert words.startswith("a, b have trained on the same samples in round 2: ")
    assert num_news == 1
    assert round_with_losses(scene, a=2.9316274, b=2.9316274, **own)[1] == 0
    coarse = (3.09375, 2.7316)  # of 16 bits, or rounded: equal by chance
    for loss in coarse:
        assert round_with_losses(scene, a=loss, b=loss, **own) == ("", 0)


@pytest.mark.parametrize("loss", [0.0, 3.09375])
def test_loops_with_losses_of_16_bits_or_none_are_known_by_what_they_contribute(
    loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = loops(a="", b="", c="")
    assert round_with_losses(scene, a=loss, b=loss, c=loss) == ("", 0)
    with monkeypatch.context() as alike:
        alike.setattr(
            swarm_scene,
            "contribution_from",
            lambda node, index: contribution_from("a" if node in "ab" else node, index),
        )
        words, num_news = round_with_losses(scene, a=loss, b=loss, c=loss)
        assert words.startswith("a, b have trained on the same samples in round 2: ")
        assert num_news == 1
        assert round_with_losses(scene, a=loss, b=2.5, c=2.5) == ("", 0)
    assert round_with_losses(scene, a=loss, b=loss, c=loss) == ("", 0)


def test_private_texts_that_are_not_equally_hard_are_no_difference() -> None:
    scene = three_holders()
    asked = scene.state.evaluating
    assert asked is not None
    for number, node_id in enumerate(asked.node_ids):
        scene.evaluate(str(node_id), round=0, loss=1.0 + number)
    assert scene.state.held_out[-1].holders and scene.state.differing is None


def test_when_nobody_evaluates_by_the_curves_function_it_begins_anew_by_another() -> None:
    scene = loops(a="of mine", b="of theirs", c="of theirs")
    evaluate_for(scene, 3, "a", "b", "c")
    assert scene.state.held_out_text == "of theirs"
    for name in ("b", "c"):
        scene.beat(
            name,
            at=scene.state.committed_round,
            digest=scene.member(name).outer_digest,
            cannot_evaluate=True,
        )
    assert set(evaluate_for(scene, 3, "a", "b", "c")[1:]) == {"a"}
    assert scene.state.held_out_text == "of mine"
    assert scene.state.held_out_text_from > 3


def test_a_node_that_trains_the_runs_data_evaluates_before_loops_that_have_it_too() -> None:
    scene = Scene(min_nodes=2, rounds=50, evaluate_every=1)
    scene.attach("a", device=OWN_LOOP)
    scene.attach("b")
    scene.beat("a", at=0, digest=INITIAL, evaluates_by="of mine")
    evaluate_for(scene, 1, "a", "b")
    assert set(evaluate_for(scene, 6, "a", "b")) == {"b"}
