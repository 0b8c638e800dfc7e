"""What a run owner sees of screening: whose contributions reducers took only in part, or not at all."""

from dataclasses import replace

import pytest

from coordinator.round_rows import MOST_SCREENED, figures_of
from coordinator.services.status import confirmed_shares
from coordinator.swarm.books import SCREENED_ROUNDS, book, recent_screening, screenings_of, unbook
from coordinator.swarm.members import Screening
from coordinator.swarm.state import SwarmState
from protocol.terminal.node_words import screening_in_words, work_in_words
from protocol.terminal.status_words import screened_in_words
from protocol.v1 import status_pb2
from protocol.wire.rounds import WHOLE, Commit, NodeId
from tests.unit.swarm_scene import Scene, digest_of

NAMES = ("a", "b", "c")
CUT, OUT, WHOLE_ONE = NodeId("a"), NodeId("b"), NodeId("c")


def after_rounds(number: int) -> Scene:
    scene = Scene(min_nodes=3, rounds=100)
    for name in NAMES:
        scene.attach(name, invite=name)
    for each in range(1, number + 1):
        scene.commit(*NAMES)
        scene.apply(digest_of(f"after {each}"), *NAMES)
    return scene


def clipped(commit: Commit) -> Commit:
    """In its first slice half of one is taken, and nothing of another; in the others all of all."""
    first, *others = commit.slices
    taken = {CUT: WHOLE // 2, OUT: 0, WHOLE_ONE: WHOLE}
    factors = tuple(taken[contributor.node_id] for contributor in first.contributors)
    return replace(commit, slices=(replace(first, factors=factors), *others))


def with_screening(scene: Scene) -> tuple[SwarmState, Commit]:
    """The newest round as if reducers had cut two of its contributors."""
    commit = scene.state.recent[-1].commit
    return book(unbook(scene.state, commit), clipped(commit)), clipped(commit)


def test_a_commit_says_of_whom_reducers_took_how_much() -> None:
    commit = clipped(after_rounds(1).state.recent[-1].commit)
    num_slices = len(commit.slices)
    assert num_slices > 1
    of_all = Screening(round=1, num_contributions=num_slices)
    assert screenings_of(commit) == {
        CUT: replace(of_all, num_clipped=1),
        OUT: replace(of_all, num_left_out=1),
        WHOLE_ONE: of_all,
    }


def test_it_is_summed_over_the_latest_rounds_and_goes_with_a_round_that_is_taken_back() -> None:
    scene = after_rounds(3)
    state, commit = with_screening(scene)
    member = state.members[OUT]
    found = recent_screening(member, 3)
    assert (found.num_contributions, found.num_left_out) == (3 * len(commit.slices), 1)
    assert recent_screening(member, 3 + SCREENED_ROUNDS).num_contributions == 0
    gone = unbook(state, commit).members[OUT]
    assert [screening.round for screening in gone.screenings] == [1, 2]
    assert recent_screening(gone, 3).num_left_out == 0


def test_what_is_remembered_of_a_member_has_an_end_and_outlives_its_session() -> None:
    scene = after_rounds(SCREENED_ROUNDS + 3)
    kept = scene.member("a").screenings
    assert len(kept) == SCREENED_ROUNDS and kept[-1].round == SCREENED_ROUNDS + 3
    scene.attach("a", invite="a", at=0)
    assert scene.member("a").screenings == kept


def test_the_figures_of_a_round_name_those_first_of_whom_least_was_taken() -> None:
    scene = after_rounds(1)
    state, commit = with_screening(scene)
    closed = replace(scene.state.recent[-1], commit=commit)
    figures = figures_of(state, closed)
    assert [one.node_name for one in figures.screened] == ["b", "a"]
    num = len(commit.slices)
    assert screened_in_words(figures) == f"b: 1 left out of {num}; a: 1 clipped of {num}"
    many = [replace(commit.slices[0].contributors[0], node_id=NodeId(f"x{n}")) for n in range(40)]
    first = replace(
        commit.slices[0], contributors=tuple(many), contributions=(), factors=(0,) * len(many)
    )
    all_out = replace(commit, slices=(first, *commit.slices[1:]))
    assert len(figures_of(state, replace(closed, commit=all_out)).screened) == MOST_SCREENED
    assert screened_in_words(figures_of(scene.state, scene.state.recent[-1])) == "-"


def test_confirmed_work_is_shown_of_who_is_here_once_there_is_any() -> None:
    assert not confirmed_shares(after_rounds(0).state)
    scene = after_rounds(2)
    assert confirmed_shares(scene.state) == pytest.approx(dict.fromkeys(NAMES, 1 / 3))
    scene.leave("a")
    assert confirmed_shares(scene.state) == pytest.approx({"b": 1 / 2, "c": 1 / 2})


def test_people_read_it_in_words() -> None:
    told = status_pb2.Screening(num_contributions=12, num_clipped=3, num_left_out=2)
    assert screening_in_words(told) == "2 left out, 3 clipped of 12"
    assert screening_in_words(status_pb2.Screening(num_contributions=12)) == "none of 12"
    assert screening_in_words(status_pb2.Screening()) == "-"
    assert work_in_words(status_pb2.NodeStatus(confirmed_work_share=0.254)) == "25%"
    assert work_in_words(status_pb2.NodeStatus(confirmed_work_share=0)) == "0%"
    assert work_in_words(status_pb2.NodeStatus()) == "-"


def test_a_loop_that_tells_no_loss_does_not_lower_that_of_its_round() -> None:
    scene = after_rounds(1)
    for name, loss in zip(NAMES, (-2.0, 0.0, -4.0), strict=True):
        scene.train(name, loss=loss)
    scene.commit(*NAMES)
    assert figures_of(scene.state, scene.state.recent[-1]).loss == -3.0
