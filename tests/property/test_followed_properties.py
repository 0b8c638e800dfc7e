"""From every going back a swarm trains again: with liars of one invite, and disks that die, in the world."""

from dataclasses import dataclass, field, replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from coordinator.swarm.events import Ruled, Started, WithdrawalAsked
from coordinator.swarm.explain import explain
from coordinator.swarm.going_back import latest_in_reach
from coordinator.swarm.members import MemberState
from protocol.errors import UsageError
from protocol.trust.rulings import COORDINATOR, RUN_OWNER, RulingKind
from protocol.wire.rounds import NodeId
from tests.property.effort import examples
from tests.unit.going_back_scene import Kept
from tests.unit.swarm_scene import Scene

ROUNDS = 8
BEATS = 40
BEAT_SECONDS = 15.0
"""Members say what they hold so often, for six times as long as a going back waits."""


@dataclass(frozen=True, kw_only=True)
class Person:
    """A member as it is, and as it says."""

    name: str
    invite: str
    is_honest: bool
    first_kept: int  # of an honest one's disk, up to the latest round; of a liar's, as it says
    dies_at_beat: int | None  # its disk
    download_beats: int  # to fetch a state from one that has it
    says_to_hold: bool  # of a liar: as soon as the run went back


@dataclass(kw_only=True)
class World:
    people: list[Person]
    kept: Kept = field(default_factory=lambda: Kept(scene=Scene(min_nodes=2, rounds=100)))
    held_since: dict[str, int] = field(default_factory=dict)  # by honest ones, the beat

    def begin(self) -> None:
        kept = self.kept
        rules = kept.scene.state.rules
        kept.scene.state = replace(
            kept.scene.state, rules=replace(rules, min_nodes=len(self.people))
        )
        for person in self.people:
            kept.attach(person.name, invite=person.invite)
        kept.scene.state = replace(kept.scene.state, rules=rules)
        kept.rounds(ROUNDS)
        for person in self.people:
            kept.reach(person.name, (person.first_kept, ROUNDS))

    @property
    def honest(self) -> list[Person]:
        return [person for person in self.people if person.is_honest]

    def beat(self, number: int, target: int) -> None:
        """All say what they hold; honest ones come to hold what their disks have, or somebody gives."""
        kept = self.kept
        kept.scene.wait(BEAT_SECONDS)
        for person in self.people:
            if kept.scene.member(person.name).state is MemberState.QUARANTINED:
                continue
            if self.comes_to_hold(person, number, target) or self.holds(person):
                kept.follow(person.name)
            else:
                kept.beat(person.name)
            if kept.scene.state.open_round is not None:
                return

    def holds(self, person: Person) -> bool:
        return person.name in self.held_since or (not person.is_honest and person.says_to_hold)

    def comes_to_hold(self, person: Person, number: int, target: int) -> bool:
        if not person.is_honest or self.holds(person):
            return False
        is_alive = person.dies_at_beat is None or number < person.dies_at_beat
        has_fetched = any(
            since + person.download_beats <= number for since in self.held_since.values()
        )
        if (is_alive and person.first_kept <= target) or has_fetched:
            self.held_since[person.name] = number
            return True
        return False

    def restart(self) -> None:
        """The coordinator dies and comes back from its database; all attach with what they hold."""
        held = {p.name: self.kept.scene.member(p.name) for p in self.people}
        self.kept.scene.do(Started())
        for name, member in held.items():
            self.kept.scene.attach(
                name,
                at=member.outer_round,
                digest=member.outer_digest,
                incarnation=member.outer_incarnation,
                invite=member.invite_id,
            )
            reach = member.reach_back
            self.kept.reach(name, *((span.first, span.last) for span in reach))


def people_of(draw: st.DrawFn) -> list[Person]:
    liars_hold = draw(st.booleans(), label="liars say to hold")

    def person(place: int, invite: str, *, is_honest: bool) -> Person:
        return Person(
            name=f"{'honest' if is_honest else 'liar'}-{place}",
            invite=invite,
            is_honest=is_honest,
            first_kept=draw(st.integers(0, ROUNDS), label="keeps from") if is_honest else 0,
            dies_at_beat=draw(st.sampled_from([None, 0, 0, 2]), label="its disk dies"),
            download_beats=draw(st.integers(1, 5), label="downloads for"),
            says_to_hold=liars_hold,
        )

    num_honest = draw(st.integers(2, 5))
    invites = [
        "one",
        "two",
        *draw(st.lists(st.sampled_from(["one", "three"]), min_size=3, max_size=3)),
    ]
    people = [person(n, invites[n], is_honest=True) for n in range(num_honest)]
    liars = draw(st.integers(0, num_honest - 1))
    return people + [person(n, "the liars'", is_honest=False) for n in range(liars)]


worlds = st.composite(people_of)()


@settings(examples(50), deadline=None)
@given(
    people=worlds,
    wanted=st.integers(1, ROUNDS - 1),
    by=st.sampled_from(["the run owner", "one believed", "itself"]),
    believes=st.integers(0, 8),
    restarts_at=st.sampled_from([None, None, 1, 4]),
)
def test_from_every_going_back_the_swarm_trains_again(
    people: list[Person], wanted: int, by: str, believes: int, restarts_at: int | None
) -> None:
    world = World(people=people)
    world.begin()
    kept = world.kept
    believed: Person | None = None
    target = wanted
    if by == "itself":
        reached = latest_in_reach(kept.scene.state, wanted)
        if reached is None:
            event("nothing in reach")
            return
        target = reached
        assert any(person.first_kept <= target for person in world.honest), "liars alone say so"
        kept.go_back(target, by=COORDINATOR)
    elif by == "one believed":
        saying = [person for person in people if person.first_kept <= wanted]
        if not saying:
            return
        believed = saying[believes % len(saying)]
        kept.go_back(wanted, node_id=NodeId(believed.name), node_name=believed.name)
    else:
        try:
            kept.go_back(wanted)
        except UsageError as refused:
            event("refused")
            assert refused.next_step and kept.scene.state.committed_round == ROUNDS
            return
    world.beat(0, target)
    may_follow = bool(world.held_since)
    for number in range(1, BEATS):
        if number == restarts_at and kept.scene.state.open_round is None:
            world.restart()
        if kept.scene.state.open_round is None and not withdrawals(kept):
            world.beat(number, target)
    if may_follow:
        event("followed")
        trains_from(world, target)
        return
    if believed is not None and not believed.is_honest and believed.says_to_hold:
        event("the run owner believed a liar")
        typed = f"'atoll nodes quarantine {believed.name}' withdraws the going back"
        assert typed in explain(kept.scene.state, kept.scene.now)
        kept.scene.do(
            Ruled(
                kind=RulingKind.QUARANTINED,
                by=RUN_OWNER,
                unix_seconds=0.0,
                node_id=NodeId(believed.name),
            )
        )
        for number in range(BEATS):
            if not withdrawals(kept):
                world.beat(number, target)
    event("withdrawn")
    assert withdrawals(kept), explain(kept.scene.state, kept.scene.now)
    kept.withdraw()
    kept.bring(world.honest[0].name, ROUNDS)
    kept.scene.wait(kept.scene.state.rules.apply_seconds)  # who says to hold less is waited for
    assert kept.scene.state.committed_round == ROUNDS
    assert "'atoll run resume' goes on" in explain(kept.scene.state, kept.scene.now)
    kept.scene.do(Ruled(kind=RulingKind.RESUMED, by=RUN_OWNER, unix_seconds=0.0))
    trains_from(world, ROUNDS)


def withdrawals(kept: Kept) -> list[WithdrawalAsked]:
    return [each for each in kept.scene.log if isinstance(each, WithdrawalAsked)]


def trains_from(world: World, round: int) -> None:
    """The next round is of honest members that hold the state, and commits."""
    kept = world.kept
    state = kept.scene.state
    assert state.open_round is not None, explain(state, kept.scene.now)
    assert (state.open_round.number, state.open_round.base_digest) == (
        round + 1,
        kept.settled_once[round].outer_digest,
    )
    here = {str(a.node_id) for a in state.open_round.assignments}
    assert here & {person.name for person in world.honest}
    kept.rounds(1)
    assert kept.scene.state.recent[-1].commit.round == round + 1
    assert not kept.scene.state.recent[-1].is_void
