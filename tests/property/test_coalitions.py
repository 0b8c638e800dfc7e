"""Liars among members: with less than half of the confirmed weight they decide nothing, however many keys."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coordinator.swarm.books import earned
from coordinator.swarm.members import Member, MemberState, Work
from coordinator.swarm.standing import LEAST_TRIAL_SECONDS, TRIAL_MARGIN
from coordinator.swarm.transition import initial_state
from coordinator.swarm.weighing import (
    cap_of,
    heaviest,
    is_enough,
    say_of,
    unchecked,
    unchecked_of,
    weight_of,
    worth,
)
from protocol.wire.rounds import OWN_LOOP, CorpusSummary, Digest, NodeId, PeerAddress
from tests.property.effort import examples
from tests.unit.swarm_scene import PLAIN_RULES, Scene

LIE, RIGHT = Digest(b"a lie"), Digest(b"right")
WORKS = st.lists(st.integers(0, 10**6), min_size=1, max_size=12)
INVITES = st.lists(st.sampled_from("abc"), min_size=24, max_size=24)


def members_of(honest: list[int], lying: list[int], invites: list[str]) -> dict[NodeId, Member]:
    """Members with so much work each; the liars' ids come first, so ties would be theirs."""
    some = Member(
        node_id=NodeId("some"),
        node_name="some",
        address=PeerAddress(public_key=b"k" * 32, multiaddrs=()),
        device="cpu",
        num_ranks=1,
        version="1",
        corpus=CorpusSummary(digest=RIGHT, num_samples=1, num_bytes=1),
        state=MemberState.READY,
        session_id=1,
        lease_until=1.0,
        outer_round=0,
        outer_digest=RIGHT,
    )
    kinds = {"a-liar": lying, "honest": honest}
    names = [
        (NodeId(f"{k}-{n}"), work) for k, works in kinds.items() for n, work in enumerate(works)
    ]
    return {
        name: replace(some, node_id=name, invite_id=invite, work=earned(Work(), 1, work))
        for (name, work), invite in zip(names, invites, strict=False)
    }


@examples(300)
@given(honest=WORKS, lying=WORKS, invites=INVITES)
def test_a_coalition_with_less_than_half_of_the_weight_decides_no_digest_and_no_slice(
    honest: list[int], lying: list[int], invites: list[str]
) -> None:
    members = members_of(honest, lying, invites)
    say = say_of(members.values(), 1)
    liars = [n for n in members if n.startswith("a-liar")]
    assume(2 * weight_of(say, liars) < weight_of(say, members))
    reports: dict[NodeId, Digest] = {n: LIE if n in liars else RIGHT for n in members}
    assert heaviest(say, reports) == RIGHT
    assert not is_enough(say, liars, list(members))


@examples(500)
@given(
    honest=st.lists(
        st.lists(st.integers(1, 10**6), min_size=1, max_size=3), min_size=2, max_size=7
    ),
    lying=st.lists(st.integers(0, 10**9), min_size=1, max_size=12),
)
def test_no_invite_decides_alone_where_two_others_have_work_whatever_its_keys_have_done(
    honest: list[list[int]], lying: list[int]
) -> None:
    """For any work of any keys: whoever is in one invite, the others need only agree."""
    works = [work for of_one in honest for work in of_one]
    invites = [f"own-{n}" for n, of_one in enumerate(honest) for _ in of_one]
    members = members_of(works, lying, ["liars"] * len(lying) + invites)
    say = say_of(members.values(), 1)
    working = {m.invite_id for n, m in members.items() if worth(m.work, 1)}
    for invite in {"liars", *invites}:
        if len(working - {invite}) < 2:
            continue  # the smaller of two would decide alone
        some = [n for n, member in members.items() if member.invite_id == invite]
        others = [n for n in members if n not in some]
        assert 2 * weight_of(say, some) < weight_of(say, members)
        assert not is_enough(say, some, list(members)) and is_enough(say, others, list(members))
        reports: dict[NodeId, Digest] = {n: LIE if n in some else RIGHT for n in members}
        assert heaviest(say, reports) == RIGHT


@given(
    others=st.lists(st.integers(1, 10**6), min_size=2, max_size=9),
    more=st.lists(st.integers(0, 10**9), min_size=2, max_size=2),
    own=st.integers(0, 10**6),
)
def test_no_invite_moves_what_it_may_weigh_by_working_more_than_all_others(
    others: list[int], more: list[int], own: int
) -> None:
    caps = {cap_of([*others, max(others) + each], own=own) for each in more}
    assert len(caps) == 1


@pytest.mark.parametrize("keys", [3, 5, 6, 7, 9, 30])
def test_keys_of_one_invite_beside_six_have_a_quarter_of_the_weight_however_many_they_are(
    keys: int,
) -> None:
    members = members_of([100] * 6, [100] * keys, ["liars"] * keys + [f"own-{n}" for n in range(6)])
    say = say_of(members.values(), 1)
    liars = [n for n in members if n.startswith("a-liar")]
    assert 4 * weight_of(say, liars) <= weight_of(say, members)


@pytest.mark.parametrize("invites", [["all"] * 10, ["liars"] * 9 + ["other"]])
def test_of_one_or_two_invites_work_alone_decides(invites: list[str]) -> None:
    """Docs say so: a cap would have the smaller of two invites decide alone."""
    members = members_of([100], [100] * 9, invites)
    say = say_of(members.values(), 1)
    assert is_enough(say, [n for n in members if n.startswith("a-liar")], list(members))


@examples(300)
@given(own=WORKS, strangers=WORKS, invites=INVITES)
def test_the_run_owners_own_machines_weigh_by_their_work_and_strangers_with_less_decide_nothing(
    own: list[int], strangers: list[int], invites: list[str]
) -> None:
    """Also with one stranger's invite, and where strangers together are most by invites or by keys."""
    assume(sum(strangers) < sum(own))
    of_own = ["own"] * len(own)
    members = members_of(own, strangers, [*invites[: len(strangers)], *of_own])
    members = {n: replace(m, is_own=m.invite_id == "own") for n, m in members.items()}
    say = say_of(members.values(), 1)
    mine = [n for n, member in members.items() if member.is_own]
    others = [n for n in members if n not in mine]
    assert all(say.weights[n] == worth(members[n].work, 1) for n in mine)
    assert not is_enough(say, others, list(members))
    assert len(mine) == 1 or is_enough(say, mine, list(members)), "its owner's run goes on"
    reports: dict[NodeId, Digest] = {n: RIGHT if n in mine else LIE for n in members}
    assert heaviest(say, reports) == RIGHT


@examples(100)
@given(own=st.integers(1, 10**6), lying=st.lists(st.integers(0, 10**9), min_size=1, max_size=9))
def test_one_invite_decides_nothing_against_the_run_owners_own_however_little_these_have_done(
    own: int, lying: list[int]
) -> None:
    members = members_of([own], lying, [*(["liars"] * len(lying)), "own"])
    members = {n: replace(m, is_own=m.invite_id == "own") for n, m in members.items()}
    say = say_of(members.values(), 1)
    reports: dict[NodeId, Digest] = {n: RIGHT if m.is_own else LIE for n, m in members.items()}
    assert heaviest(say, reports) == RIGHT


def test_a_run_whose_owners_invite_brings_most_nodes_begins_beside_strangers_that_idle() -> None:
    members = members_of([0] * 8, [0, 0], ["one", "two", *["own"] * 8])
    mine = [n for n, member in members.items() if member.invite_id == "own"]
    before = say_of(members.values(), 0)
    assert not is_enough(before, mine, list(members)), "each invite weighs alike"
    members = {n: replace(m, is_own=n in mine) for n, m in members.items()}
    assert is_enough(say_of(members.values(), 0), mine, list(members))


@examples(300)
@given(honest=WORKS, lying=st.integers(0, 10**7), keys=st.integers(1, 200))
def test_work_split_over_many_keys_of_the_invite_that_all_have_decides_no_more_than_in_one(
    honest: list[int], lying: int, keys: int
) -> None:
    assume(lying < sum(honest))
    split = [lying // keys] * keys
    members = members_of(honest, split, ["all"] * (len(honest) + keys))
    say = say_of(members.values(), 1)
    liars = [n for n in members if n.startswith("a-liar")]
    assert say.is_confirmed
    assert not is_enough(say, liars, list(members))


CHECKING = replace(PLAIN_RULES, audited_share=0.05)
OTHER = CorpusSummary(digest=LIE, num_samples=1, num_bytes=1)
TELLS_OTHER_HELD_OUT = replace(OTHER, digest=RIGHT, held_out_digest=LIE)
UNCHECKED = st.sampled_from(("a loop", "other data", "other held-out data"))


def as_kind(member: Member, kind: str) -> Member:
    if kind == "a loop":
        return replace(member, device=OWN_LOOP)
    return replace(member, corpus=OTHER if kind == "other data" else TELLS_OTHER_HELD_OUT)


@examples(500)
@given(
    honest=st.lists(st.integers(1, 10**6), min_size=3, max_size=8),
    lying=st.lists(
        st.tuples(st.integers(1, 10**9), st.integers(0, 9), UNCHECKED), min_size=1, max_size=12
    ),
)
def test_who_says_that_nobody_can_check_it_decides_nothing_whatever_it_claims_to_have_done(
    honest: list[int], lying: list[tuple[int, int, str]]
) -> None:
    """Of as many invites as the honest ones, and with any number of keys and any work."""
    invites = [f"theirs-{place % len(honest)}" for _, place, _ in lying]
    members = members_of(
        honest, [work for work, _, _ in lying], [*invites, *(f"own-{n}" for n in range(8))]
    )
    for place, (_, _, kind) in enumerate(lying):
        name = NodeId(f"a-liar-{place}")
        members[name] = as_kind(members[name], kind)
    told_held_out = {NodeId(f"honest-{n}") for n in range(len(honest))}
    for name in told_held_out:  # as today's releases do
        corpus = replace(members[name].corpus, held_out_digest=RIGHT)
        members[name] = replace(members[name], corpus=corpus)
    say = say_of(members.values(), 1, unchecked_of(members.values()))
    liars = [n for n in members if n.startswith("a-liar")]
    if len({kind for _, _, kind in lying}) == 1 and lying[0][2] != "a loop":
        assume(len(set(invites)) < len(honest))  # else nobody knows which data are the run's
    assert 2 * weight_of(say, liars) < weight_of(say, members)
    assert heaviest(say, {n: LIE if n in liars else RIGHT for n in members}) == RIGHT
    assert not is_enough(say, liars, list(members))
    assert is_enough(say, [n for n in members if n not in liars], list(members))
    unbounded = say_of(members.values(), 1).weights
    assert all(say.weights[n] for n in members if unbounded[n]), "nobody becomes a newcomer by it"


@examples(300)
@given(
    loops=st.lists(st.integers(1, 10**6), min_size=2, max_size=9),
    lying=st.lists(st.integers(1, 10**9), min_size=1, max_size=9),
    invites=st.lists(st.integers(0, 7), min_size=9, max_size=9),
)
def test_ranks_of_fewer_invites_than_honest_loops_gain_nothing_by_being_ranks(
    loops: list[int], lying: list[int], invites: list[int]
) -> None:
    """Else a few keys with ranks and a little work had the most say beside many loops."""
    theirs = [f"theirs-{place % (len(loops) - 1)}" for place in invites[: len(lying)]]
    members = members_of(loops, lying, [*theirs, *(f"own-{n}" for n in range(9))])
    members = {n: m if n.startswith("a-liar") else as_kind(m, "a loop") for n, m in members.items()}
    assert say_of(members.values(), 1, unchecked_of(members.values())) == say_of(
        members.values(), 1
    )


@examples(300)
@given(
    own=st.lists(st.integers(1, 10**6), min_size=1, max_size=3),
    ranks=st.lists(st.integers(1, 10**6), min_size=0, max_size=4),
    lying=st.lists(st.integers(1, 10**9), min_size=1, max_size=4),
    is_own_a_loop=st.booleans(),
)
def test_the_run_owners_own_machines_are_checked_by_their_owner(
    own: list[int], ranks: list[int], lying: list[int], is_own_a_loop: bool
) -> None:
    assume(max(2, len(lying)) <= len(own) + len(ranks))
    kinds = [*(["own"] * len(own)), *(f"rank-{n}" for n in range(len(ranks)))]
    liars_invites = [f"liar-{n}" for n in range(len(lying))]
    members = members_of([*own, *ranks], lying, [*liars_invites, *kinds])
    for name, member in members.items():
        if name.startswith("a-liar") or (is_own_a_loop and member.invite_id == "own"):
            members[name] = as_kind(member, "a loop")
        members[name] = replace(members[name], is_own=member.invite_id == "own")
    say = say_of(members.values(), 1, unchecked_of(members.values()))
    liars = [n for n in members if n.startswith("a-liar")]
    assert 2 * weight_of(say, liars) < weight_of(say, members)


def test_an_invite_with_a_loop_lends_it_none_of_the_say_of_its_ranks() -> None:
    members = members_of([10] * 3, [1, 1000], ["liar", "liar", *(f"own-{n}" for n in range(3))])
    loop = NodeId("a-liar-1")
    members[loop] = as_kind(members[loop], "a loop")
    assert unchecked_of(members.values()) == {"a-liar-0", "a-liar-1"}


@pytest.mark.parametrize("change", ["has_private_data", "compares_samples", "audited_share"])
def test_where_nobody_is_checked_all_weigh_by_their_work(change: str) -> None:
    members = members_of([10] * 4, [1000] * 2, [f"{n}" for n in range(6)])
    members = {n: as_kind(m, "a loop") if n.startswith("a-liar") else m for n, m in members.items()}
    changes: dict[str, Any] = {change: 0.0 if change == "audited_share" else True}
    rules = replace(CHECKING, **changes)
    state = replace(initial_state(CHECKING, RIGHT), members=members)
    assert unchecked(state) == {n for n in members if n.startswith("a-liar")}
    assert not unchecked(replace(state, rules=rules))


@examples(100)
@given(num_keys=st.integers(1, 20), num_honest=st.integers(2, 6))
def test_keys_of_one_invite_without_work_decide_nothing_among_invites_without_work(
    num_keys: int, num_honest: int
) -> None:
    invites = ["liars"] * num_keys + [f"own-{n}" for n in range(num_honest)]
    members = members_of([0] * num_honest, [0] * num_keys, invites)
    say = say_of(members.values(), 0)
    liars = [n for n in members if n.startswith("a-liar")]
    assert not say.is_confirmed
    assert not is_enough(say, liars, list(members))
    assert heaviest(say, {n: LIE if n in liars else RIGHT for n in members}) == RIGHT


@settings(examples(40))
@given(
    num_honest=st.integers(2, 6),
    num_idle=st.integers(1, 3),
    seconds=st.lists(st.floats(0.1, 39.0), min_size=6, max_size=6),
)
def test_newcomers_that_idle_lengthen_no_round_by_more_than_half_and_the_slow_are_not_left_out(
    num_honest: int, num_idle: int, seconds: list[float]
) -> None:
    """In a first round, where keys alone weigh; with a third of the invites at most."""
    assume(2 * num_idle <= num_honest)
    scene = Scene(min_nodes=num_honest + num_idle)
    honest = [f"honest-{place}" for place in range(num_honest)]
    idle = [f"a-liar-{place}" for place in range(num_idle)]
    for name in (*idle, *honest):
        scene.attach(name, invite=name)
    began, times = scene.round.opened_at, dict(zip(honest, seconds, strict=False))
    while times:
        first = min(times, key=lambda name: times[name])
        if began + times[first] > scene.now:
            scene.wait_until(min(began + times[first], scene.now + 0.25))
        if scene.round.hurried_at is not None:  # each ends its inner step, and hands in what it has
            times = {name: min(t, scene.now - began + 0.1) for name, t in times.items()}
        if began + times[first] <= scene.now:
            scene.train(first, inner_steps=3)
            del times[first]
    assert not scene.round.is_excused, "all that work had the time to hand in"
    slowest = max(scene.round.trained_at.values()) - began
    scene.wait_until(began + max(TRIAL_MARGIN * slowest, slowest + LEAST_TRIAL_SECONDS) + 1e-6)
    assert set(scene.round.on_trial) == set(map(NodeId, idle))
    assert {p.slice.reducer_id for p in scene.round.slices}.isdisjoint(scene.round.on_trial)
