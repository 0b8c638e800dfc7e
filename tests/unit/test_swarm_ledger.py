"""Samples: counted once when a commit took them, else leased again before new ones."""

from dataclasses import replace

from coordinator.swarm.books import book, unbook
from coordinator.swarm.events import SamplesSkipped
from coordinator.swarm.ledger import (
    Ledger,
    Places,
    end_ahead,
    free_again,
    num_reached,
    reopen,
    settle,
)
from protocol.wire.messages import ParticipantsIdle, RefetchAsked, RoundOpened
from protocol.wire.rounds import BOOK_PLACES, Assignment, CorpusSummary, NodeId, book_of_data
from tests.unit.swarm_scene import (
    INITIAL,
    STEP_TOKENS,
    TOKENS,
    Scene,
    digest_of,
    of_kind,
    two_nodes,
)

AFTER = digest_of("after")
EIGHT = [f"node-{i}" for i in range(8)]


def next_round(
    scene: Scene, *names: str, tokens: dict[str, int], samples: dict[str, int] | None = None
) -> None:
    scene.commit(*names, tokens=tokens, samples=samples)
    scene.apply(digest_of(f"after {scene.state.committed_round}"), *names)


def leases(scene: Scene) -> list[tuple[int, int]]:
    """First and number of the samples of each assignment in flight."""
    return [(a.first_sample, a.num_samples) for a in scene.round.assignments]


def pieces(places: tuple[Places, ...]) -> list[tuple[int, int]]:
    return [(piece.first, piece.end) for piece in places]


def test_what_is_committed_is_merged_and_the_next_round_begins_after_it() -> None:
    scene = two_nodes()
    assert leases(scene) == [(0, 10), (10, 10)]
    assert pieces(scene.state.ledger.leased) == [(0, 10), (10, 20)]
    next_round(scene, "node-a", "node-b", tokens={"node-a": TOKENS, "node-b": TOKENS})
    assert pieces(scene.state.ledger.committed) == [(0, 20)]
    assert leases(scene) == [(20, 10), (30, 10)]
    assert free_again(scene.state.ledger) == ()


def test_what_a_contributor_was_leased_and_no_commit_took_is_leased_again_first() -> None:
    scene = two_nodes()
    next_round(scene, "node-a", "node-b", tokens={"node-a": TOKENS})
    assert pieces(scene.state.ledger.committed) == [(0, 10)]
    assert leases(scene) == [(10, 10), (20, 10)]


def test_a_void_round_gives_all_its_samples_back() -> None:
    scene = two_nodes()
    scene.wait(80)
    assert scene.round.number == 2
    assert scene.state.ledger.committed == ()
    assert leases(scene) == [(0, 10), (10, 10)]


def test_samples_of_a_lost_node_stay_leased_until_its_round_is_over() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a", "node-b", "node-c")
    next_round(scene, "node-a", "node-b", "node-c", tokens=dict.fromkeys(["node-a"], TOKENS))
    scene.leave("node-b")
    assert pieces(scene.state.ledger.leased) == [(10, 20), (20, 30), (30, 40)]


def test_a_piece_too_short_for_full_steps_waits_for_its_neighbours() -> None:
    scene = two_nodes()
    two_steps = 2 * STEP_TOKENS
    next_round(scene, "node-a", "node-b", tokens={"node-a": two_steps, "node-b": TOKENS})
    assert pieces(scene.state.ledger.committed) == [(0, 4), (10, 20)]
    assert pieces(free_again(scene.state.ledger)) == [(4, 10)]
    assert leases(scene) == [(20, 10), (30, 10)]
    next_round(scene, "node-a", "node-b", tokens={"node-b": TOKENS})
    assert leases(scene) == [(20, 10), (40, 10)], "six waiting samples are no full range"


def test_the_end_of_the_last_lease_goes_on_into_new_samples() -> None:
    scene = two_nodes()
    two_steps = 2 * STEP_TOKENS
    next_round(scene, "node-a", "node-b", tokens={"node-a": TOKENS, "node-b": two_steps})
    assert leases(scene) == [(14, 10), (24, 10)]
    assert scene.state.ledger.frontier() == 34


def test_a_slower_node_takes_the_short_piece() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a", "node-b")
    scene.train("node-a", seconds=1)
    scene.train("node-b", seconds=4)
    step = STEP_TOKENS
    next_round(scene, "node-a", "node-b", tokens={"node-a": 3 * step, "node-b": TOKENS})
    assert leases(scene) == [(20, 10), (6, 2)]


def test_a_part_of_an_inner_step_is_not_counted() -> None:
    scene = two_nodes()
    partial = {"node-a": 5, "node-b": 5}
    next_round(scene, "node-a", "node-b", tokens={"node-a": 9, "node-b": 40}, samples=partial)
    assert pieces(scene.state.ledger.committed) == [(0, 4), (10, 14)]


def test_samples_are_counted_whole_however_few_of_their_tokens_count() -> None:
    scene = two_nodes()
    tokens, samples = {"node-a": 1, "node-b": 30}, {"node-a": 10, "node-b": 6}
    next_round(scene, "node-a", "node-b", tokens=tokens, samples=samples)
    assert pieces(scene.state.ledger.committed) == [(0, 16)]
    assert scene.state.token_clock == 31
    assert scene.member("node-a").committed_tokens == 1
    assert scene.state.last_closed is not None
    assert scene.state.last_closed.tokens == 31


def test_samples_without_a_token_to_predict_are_used_up_and_trained_by_nobody_else() -> None:
    scene = two_nodes()
    scene.train("node-a", tokens=0, samples=10)
    scene.train("node-b")
    assert of_kind(scene.log, ParticipantsIdle)[-1].node_ids == ("node-a",)
    next_round(scene, "node-a", "node-b", tokens={"node-b": TOKENS})
    assert pieces(scene.state.ledger.committed) == [(0, 20)]
    assert scene.state.token_clock == TOKENS


def test_a_node_alone_comes_past_samples_without_a_token_to_predict() -> None:
    scene = Scene(min_nodes=1)
    scene.attach("node-a")
    scene.train("node-a", tokens=0, samples=10)
    scene.reduce("node-a", 0, None)
    closed = scene.state.last_closed
    assert closed is not None and closed.is_void and closed.tokens == 0
    assert pieces(scene.state.ledger.committed) == [(0, 10)]
    assert leases(scene) == [(10, 10)]


def test_samples_that_nobody_trained_are_leased_again() -> None:
    """As those of a node whose time was over before its first step."""
    scene = Scene(min_nodes=1)
    scene.attach("node-a")
    scene.train("node-a", tokens=0, samples=0, inner_steps=0)
    scene.reduce("node-a", 0, None)
    assert leases(scene) == [(0, 10)]


def test_what_is_taken_back_leaves_samples_without_tokens_used_up() -> None:
    scene = two_nodes()
    scene.train("node-b", tokens=0, samples=10)
    scene.commit("node-a", "node-b", tokens={"node-a": TOKENS})
    assert pieces(scene.state.ledger.committed) == [(0, 20)]
    commit = scene.round.commit
    assert commit is not None
    again = book(unbook(scene.state, commit), commit)
    assert (again.ledger, again.token_clock) == (scene.state.ledger, scene.state.token_clock)
    void = replace(
        commit,
        slices=tuple(replace(one, digest=None, contributors=()) for one in commit.slices),
    )
    taken_back = book(unbook(scene.state, commit), void)
    assert pieces(taken_back.ledger.committed) == [(10, 20)]
    assert taken_back.token_clock == 0


def test_samples_count_by_the_largest_weight_in_any_slice() -> None:
    scene = two_nodes()
    for name, index, tokens in (
        ("node-a", 0, {"node-a": STEP_TOKENS, "node-b": TOKENS}),
        ("node-b", 1, {"node-a": 2 * STEP_TOKENS}),
    ):
        scene.reduce(name, index, AFTER, tokens)
        scene.hold("node-b" if name == "node-a" else "node-a", index, AFTER)
    assert pieces(scene.state.ledger.committed) == [(0, 4), (10, 20)]


def test_no_round_leases_a_sample_that_is_committed() -> None:
    scene = Scene(min_nodes=8)
    scene.attach(*EIGHT)
    for number in range(6):
        tokens = {n: STEP_TOKENS * ((i + number) % 6) for i, n in enumerate(EIGHT)}
        next_round(scene, *EIGHT, tokens={n: t for n, t in tokens.items() if t})
    seen: set[int] = set()
    plans = [send.plan for send in of_kind(scene.log, RoundOpened)]
    for number, plan in enumerate(plans[:-1]):
        for i, a in enumerate(plan.assignments):
            taken = range(a.first_sample, a.first_sample + 2 * ((i + number) % 6))
            assert not seen & set(taken)
            seen |= set(taken)
    assert sum(p.num_samples for p in scene.state.ledger.committed) == len(seen)
    assert plans[0].base_digest == INITIAL


# Samples that are taken out


def test_what_is_taken_out_is_not_leased_and_what_is_leased_now_is_trained_to_its_end() -> None:
    scene = two_nodes()
    scene.do(SamplesSkipped(pieces=(Places(first=10, end=30),)))
    assert leases(scene) == [(0, 10), (10, 10)]
    next_round(scene, "node-a", "node-b", tokens={"node-a": TOKENS})
    assert leases(scene) == [(30, 10), (40, 10)], "what no commit took of 10 to 20 is out as well"
    assert free_again(scene.state.ledger) == ()


def test_places_before_a_piece_that_is_taken_out_ahead_are_leased_first() -> None:
    scene = two_nodes()
    scene.do(SamplesSkipped(pieces=(Places(first=30, end=36),)))
    next_round(scene, "node-a", "node-b", tokens={"node-a": TOKENS, "node-b": TOKENS})
    assert leases(scene) == [(20, 10), (36, 10)]


def test_what_is_taken_out_twice_is_out_once() -> None:
    scene = two_nodes()
    for first, end in ((50, 60), (40, 54), (44, 50)):
        scene.do(SamplesSkipped(pieces=(Places(first=first, end=end),)))
    assert pieces(scene.state.ledger.skipped) == [(40, 60)]


# Data that stays with its holders


def data_of(name: str) -> CorpusSummary:
    return CorpusSummary(digest=digest_of(name), num_samples=100, num_bytes=1000)


def test_each_data_holder_has_a_book_of_its_own_and_equal_data_share_one() -> None:
    scene = Scene(min_nodes=3, has_private_data=True)
    scene.attach("node-a", corpus=data_of("clinic"))
    scene.attach("node-b", corpus=data_of("bank"))
    scene.attach("node-c", corpus=data_of("bank"))
    clinic, bank = (book_of_data(digest_of(name)) * BOOK_PLACES for name in ("clinic", "bank"))
    assert leases(scene) == [(clinic, 10), (bank, 10), (bank + 10, 10)]
    next_round(scene, "node-a", "node-b", "node-c", tokens={"node-a": TOKENS, "node-c": TOKENS})
    assert leases(scene) == [(clinic + 10, 10), (bank, 10), (bank + 20, 10)]
    assert num_reached(scene.state.ledger) == 20 + 30


def test_a_book_outlives_its_holder() -> None:
    scene = Scene(min_nodes=1, has_private_data=True)
    scene.attach("node-a", corpus=data_of("clinic"))
    next_round(scene, "node-a", tokens={"node-a": TOKENS})
    scene.leave("node-a")
    scene.attach("node-b", at=1, digest=digest_of("after 1"), corpus=data_of("clinic"))
    scene.wait(80)
    scene.apply(digest_of("after 1"), "node-b")
    clinic = book_of_data(digest_of("clinic")) * BOOK_PLACES
    assert leases(scene) == [(clinic + 10, 10)]
    assert pieces(scene.state.ledger.committed) == [(clinic, clinic + 10)]


# Given weights


def test_no_round_opens_before_a_node_holds_the_first_weights() -> None:
    scene = Scene(min_nodes=1, first_digest=digest_of("given"))
    scene.attach("node-a", digest=INITIAL)
    assert scene.state.open_round is None
    assert [asked.outer_digest for asked in scene.asked(RefetchAsked)] == [digest_of("given")]
    assert "waiting for a node that holds the run's first weights" in scene.reason
    scene.attach("node-b", digest=digest_of("given"))
    assert [a.node_id for a in scene.round.assignments] == ["node-b"]
    scene.leave("node-b")
    assert scene.state.outer_digest == digest_of("given"), "nobody else's weights take their place"


def test_a_holder_of_the_first_weights_without_a_loop_is_not_asked_for_weights() -> None:
    scene = Scene(min_nodes=1, first_digest=digest_of("given"))
    scene.attach("node-a", digest=digest_of("given"), cannot_train=True)
    assert "first weights" not in scene.reason
    assert "0 of 1 are ready; node-a trains nothing now" in scene.reason
    scene.beat("node-a", at=0, digest=digest_of("given"))
    assert scene.state.open_round is not None


def test_what_a_void_round_gave_back_stays_leased_ahead_when_that_round_is_booked_anew() -> None:
    """As where the state that void rounds were built on is taken back."""
    of_void = Assignment(node_id=NodeId("node-a"), inner_steps=5, first_sample=10, num_samples=10)
    ahead = replace(of_void, node_id=NodeId("node-b"))
    ledger = Ledger(leased=(Places(first=10, end=20),), ahead=(ahead,), frontiers={0: 20})
    again = settle(reopen(ledger, [of_void], {}), [of_void], {})
    assert again == ledger
    assert end_ahead(again, {NodeId("node-b")}).leased == ()
