"""Going back at any moment of any round leaves what there was after the round, and counts no sample twice."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.swarm.events import CommitLearned, RulingsLearned
from coordinator.swarm.ledger import free_again
from coordinator.swarm.members import MemberState
from coordinator.swarm.state import RoundPhase, SwarmState
from coordinator.swarm.weighing import worth
from protocol.wire.rounds import Commit, Digest, NodeId
from tests.property.effort import examples
from tests.unit.going_back_scene import NODES, Kept
from tests.unit.swarm_scene import Scene, digest_of


def counts_of(state: SwarmState) -> object:
    """What a state says of what was trained, apart from leases."""
    return (
        state.committed_round,
        state.outer_digest,
        state.token_clock,
        state.all_reduce_bytes,
        state.ledger.committed,
        state.norms,
        [closed.commit for closed in state.recent],
        {
            n: (m.committed_tokens, worth(m.work, 9999), m.work.by_stretch)
            for n, m in state.members.items()
        },
    )


@settings(examples(60), deadline=None)
@given(
    visits=st.lists(
        st.tuples(st.integers(2, 5), st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=3
    ),
    late=st.integers(0, 4),
)
def test_going_back_at_any_moment_leaves_what_there_was(
    visits: list[tuple[int, int, int]], late: int
) -> None:
    kept = Kept()
    for name in NODES[:2]:
        kept.attach(name)
    num_rounds = 0
    for rounds, moments, back in visits:
        for _ in range(rounds):
            for _ in kept.moments():
                pass
            num_rounds += 1
            if num_rounds == late:
                kept.attach(NODES[2])
        for _, _ in zip(range(moments), kept.moments(), strict=False):
            pass
        latest = kept.scene.state.committed_round
        round = max(1, latest - back)
        if round == latest:
            continue
        then = kept.settled[round]
        kept.go_back(round)
        now = kept.scene.state
        known = {n: m for n, m in now.members.items() if n in then.members}
        assert counts_of(replace(now, members=known)) == counts_of(then)
        ready = [m for m in now.members.values() if m.state is MemberState.READY]
        assert all((m.outer_round, m.outer_digest) == (round, now.outer_digest) for m in ready)
        current = now.open_round  # opened at once where enough have yet to apply what is undone
        assert current is None or (current.number, current.base_digest) == (
            round + 1,
            then.outer_digest,
        )
        assert len(now.ledger.leased) == (0 if current is None else len(current.assignments))
        assert now.ledger.ahead == ()
        free = sum(piece.num_samples for piece in free_again(now.ledger))
        committed = sum(piece.num_samples for piece in now.ledger.committed)
        leased = sum(piece.num_samples for piece in now.ledger.leased)
        assert free + leased + committed == now.ledger.frontier()
        for commit in kept.made:
            if commit.round > round:
                kept.scene.do(CommitLearned(commit=commit, node_id=NodeId("a")))
        assert kept.scene.state.committed_round == round, "what is undone came back"
        from_disk = kept.store.load(now.rules, now.run_digest)
        assert counts_of(from_disk) == counts_of(now)
        kept.all_follow()
        assert kept.scene.state.open_round is not None
        assert kept.scene.round.phase is RoundPhase.TRAINING


@settings(examples(30), deadline=None)
@given(copied_after=st.integers(0, 5), back=st.integers(1, 4), is_told_first=st.booleans())
def test_an_older_copy_that_learns_the_ruling_comes_to_the_same_counts(
    copied_after: int, back: int, is_told_first: bool
) -> None:
    """Whether the ruling comes first, or the commits that it undoes."""
    kept = Kept()
    for name in NODES[:2]:
        kept.attach(name)
    copy = kept.scene.state
    for number in range(1, 6):
        for _ in kept.moments():
            pass
        if number == copied_after:
            copy = kept.scene.state
    round = 5 - back
    if round < 1:
        return
    older = Kept()
    older.scene.state, older.scene.now = copy, kept.scene.now
    older.saved = older.scene.state
    older.store.save(Scene(min_nodes=2, rounds=100).state, copy, now=kept.scene.now)
    kept_rounds = kept.store.latest_rounds(100)[::-1]
    for closed in kept_rounds[:copied_after]:
        one = replace(copy, committed_round=closed.commit.round, recent=(closed,))
        older.store.save(replace(one, recent=()), one, now=kept.scene.now)
    undone = kept.made[round:]
    then = kept.settled[round]
    kept.go_back(round)

    def learn_ruling() -> None:
        here = older.store.undone_after(round, rules=kept.scene.state.rules)
        older.scene.do(
            RulingsLearned(rulings=kept.scene.state.rulings, rules=copy.rules, undone={round: here})
        )

    def learn(commits: list[Commit]) -> None:
        for commit in commits:
            older.scene.do(CommitLearned(commit=commit, node_id=NodeId("a")))
            older.scene.apply(kept_digest(commit), "a", "b", round=commit.round)
            older.save()

    def kept_digest(commit: Commit) -> Digest:
        return digest_of(f"state {commit.round}, made {commit.round}")

    before_ruling = kept.made[copied_after : len(kept.made)]
    if is_told_first:
        learn_ruling()
        learn([c for c in before_ruling if c.round <= round])
        learn(undone)
    else:
        learn(before_ruling)
        learn_ruling()
    state = older.scene.state
    assert (state.committed_round, state.outer_digest) == (round, then.outer_digest)
    assert state.token_clock == then.token_clock
    assert state.ledger.committed == then.ledger.committed
    assert state.incarnation == kept.scene.state.incarnation
