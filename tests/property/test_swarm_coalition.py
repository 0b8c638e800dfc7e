"""Two of six members lie together, in random worlds: nothing that they make up is committed or agreed on.

They report states that nobody has, hand what they reduce to each other alone and say that they hold it,
report results of slices that are not theirs, accuse others of being out of reach, say that results of others
do not decode, make such results themselves, and claim any speed. They
train less than the others do, and at most one of the others is away at a time, or later than it should be by
one deadline: so less than half of the confirmed work is theirs when something is decided.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.swarm.events import Detached, Event, RefusalSeen, Reported, Ruled, Ticked
from coordinator.swarm.members import PRESENT
from coordinator.swarm.state import RoundPhase
from coordinator.swarm.weighing import LEAST_INVITES, say_of, unchecked, weight_of
from protocol.trust.rulings import RulingKind
from protocol.wire.findings import ResultRefused
from protocol.wire.messages import Held, Reduced, Trained
from protocol.wire.rounds import OWN_LOOP, ContributionDigest, Contributor, Digest, NodeId, Slice
from tests.property.effort import examples
from tests.property.swarm_nodes import CORPUS, SimulatedNode, State, Swarm
from tests.property.swarm_world import RUN, World
from tests.unit.payload_scene import header_of_result

LIARS = (NodeId("n0"), NodeId("n1"))  # the smallest ids: what is decided by an id is theirs
HONEST = tuple(NodeId(f"n{number}") for number in range(2, 6))
MADE_UP_STATE, MADE_UP_RESULT = Digest(b"a state of theirs"), Digest(b"a result of theirs")

MOST_IN_A_ROUND = 2 * 3 * 2 * 4
"""Tokens of the two together: three inner steps of two samples of four."""

LIAR, ORDER = st.sampled_from(LIARS), st.integers(0, 2**32 - 1).map(Random)
OTHERS = replace(CORPUS, digest=Digest(b"other data"))
NEVER = 1e-12
"""Of contributions are checked: members might be, and none is."""
CLAIMS = st.sampled_from(("", "", "a loop", "other data"))
SOME = st.lists(st.sampled_from((*LIARS, *HONEST)), max_size=6, unique=True)


@dataclass
class Liar(SimulatedNode):
    """Keeps up like an honest node, so that it stays in plans, and tells what suits it."""

    makes_up_state: bool = False
    makes_up_results: bool = False
    gives_them_to_all: bool = False  # who then finds that they do not decode
    refuses: bool = False  # whatever honest ones have made

    @property
    def told(self) -> State:
        number, digest, incarnation = self.state
        return number, MADE_UP_STATE if self.makes_up_state else digest, incarnation

    def work(self, swarm: Swarm, *, missing: NodeId | None, is_idle: bool) -> list[Event]:
        honest = super().work(swarm, missing=missing, is_idle=is_idle)
        if not self.makes_up_results or self.plan is None:
            return honest
        events: list[Event] = [each for each in honest if not _is_of_results(each)]
        for part in self.plan.slices:
            self.reduced.pop((self.plan.round, part.index), None)  # nobody gets what it reduced
            held = Held(slice_index=part.index, digest=MADE_UP_RESULT)
            for report in (_reduced(part.index, self.plan.participants), held):
                events.append(Reported(node_id=self.node_id, round=self.plan.round, report=report))
        return [_boasted(each) for each in events]


def _is_of_results(event: Event) -> bool:
    return isinstance(event, Reported) and isinstance(event.report, Reduced | Held)


def _reduced(index: int, participants: Collection[NodeId]) -> Reduced:
    """Only liars are in it, with all that a lease may hold."""
    names = sorted(set(participants).intersection(LIARS))
    return Reduced(
        slice_index=index,
        digest=MADE_UP_RESULT,
        contributors=tuple(Contributor(node_id=n, samples=6, tokens=24) for n in names),
        contributions=tuple(ContributionDigest(bytes(16)) for _ in names),
    )


def _boasted(event: Event) -> Event:
    if isinstance(event, Reported) and isinstance(event.report, Trained):
        return replace(event, report=replace(event.report, seconds=1e-6))
    return event


def refusal(by: NodeId, number: int, part: Slice, digest: Digest) -> RefusalSeen:
    """As the edge has it, but for keys."""
    header = header_of_result(
        part, run_digest=RUN, round=number, body_bytes=1, body_digest=Digest(bytes(32))
    )
    refused = ResultRefused(slice_index=part.index, digest=digest, round=number)
    return RefusalSeen(node_id=by, refused=refused, result=header)


class CoalitionMachine(RuleBasedStateMachine):
    world: World
    num_seen: Counter[str]
    is_unchecked: bool  # they say that nobody can check them, and have an invite each

    @initialize(
        min_nodes=st.integers(1, 4),
        adapts_deadlines=st.booleans(),
        has_overlap=st.booleans(),
        has_one_invite=st.booleans(),
        claims=CLAIMS,
    )
    def begin(
        self,
        min_nodes: int,
        adapts_deadlines: bool,
        has_overlap: bool,
        has_one_invite: bool,
        claims: str,
    ) -> None:
        self.world = World(
            num_nodes=6,
            min_nodes=min_nodes,
            total_rounds=50,
            adapts_deadlines=adapts_deadlines,
            has_overlap=has_overlap,
            audited_share=NEVER if claims else 0.0,
        )
        self.num_seen = Counter()
        nodes = self.world.nodes
        nodes.update({n: Liar(node_id=n) for n in LIARS})
        for node_id, node in nodes.items():
            is_slow = bool(claims) and node_id in HONEST  # so that liars have most of the work
            node.seconds_per_inner_step = 4.0 if is_slow else 1.0
            node.invite_id = "" if has_one_invite else "theirs" if node_id in LIARS else node_id
        self.is_unchecked = bool(claims) and not has_one_invite
        for liar in map(self.liar, LIARS if self.is_unchecked else ()):
            liar.invite_id = liar.node_id
            liar.device = OWN_LOOP if claims == "a loop" else liar.device
            liar.corpus = OTHERS if claims == "other data" else liar.corpus
        for node_id in (*HONEST, *LIARS):  # a first state is what most of those who are here hold
            self.world.attach(nodes[node_id], has_restarted=False)

    def liar(self, node_id: NodeId) -> Liar:
        liar = self.world.nodes[node_id]
        assert isinstance(liar, Liar)
        return liar

    @rule(who=LIAR, state=st.booleans(), results=st.booleans(), accused=SOME, hides=st.booleans())
    def a_liar_changes_its_mind(
        self, who: NodeId, state: bool, results: bool, accused: list[NodeId], hides: bool
    ) -> None:
        liar = self.liar(who)
        liar.makes_up_state, liar.makes_up_results = state, results
        liar.gives_them_to_all, liar.refuses = not hides, hides
        liar.unreachable = tuple(n for n in accused if n != who)

    @rule(order=ORDER, do_liars_train=st.booleans())
    def all_work(self, order: Random, do_liars_train: bool) -> None:
        for _ in range(2):  # a result is held only after its reducer has it
            nodes = list(self.world.nodes.values())
            order.shuffle(nodes)
            for node in nodes:
                is_idle = node.node_id in LIARS and not (do_liars_train and self.may_earn())
                self.note_lies(node)
                self.world.arrive_at_once(node, *self.world.work(node, is_idle=is_idle))
            for node in nodes:
                self.refuse(node)

    @rule(order=ORDER)
    def all_apply(self, order: Random) -> None:
        nodes = list(self.world.nodes.values())
        order.shuffle(nodes)
        for node in nodes:
            self.note_lies(node)
            self.world.arrive_at_once(node, *self.world.catch_up(node))

    @rule(order=ORDER)
    def only_the_liars_are_in_time(self, order: Random) -> None:
        """They vote at once; the others live, and apply what is committed after the deadline, once."""
        for who in LIARS:
            self.note_lies(self.liar(who))
            self.world.arrive_at_once(self.liar(who), *self.world.catch_up(self.liar(who)))
        current = self.world.state.open_round
        if current is not None and current.phase is RoundPhase.APPLYING:
            while self.world.now <= current.apply_deadline:
                self.let_pass(min(4, current.apply_deadline + 0.125 - self.world.now))
        self.all_apply(order)

    def refuse(self, node: SimulatedNode) -> None:
        """Honest ones refuse what does not decode, and liars what others have made."""
        current = self.world.state.open_round
        if current is None or node.session_id is None or current.phase is RoundPhase.APPLYING:
            return
        for progress in current.slices:
            maker = self.world.nodes[progress.slice.reducer_id]
            if isinstance(node, Liar):
                is_refused = node.refuses and maker.node_id in HONEST
            else:
                is_given = isinstance(maker, Liar) and maker.gives_them_to_all
                is_refused = is_given and progress.digest == MADE_UP_RESULT
            if is_refused and progress.digest is not None:
                self.num_seen["false refusals" if isinstance(node, Liar) else "refusals"] += 1
                event = refusal(node.node_id, current.number, progress.slice, progress.digest)
                self.world.arrive_at_once(node, event)
                self.put_out_the_convicted()

    def put_out_the_convicted(self) -> None:
        """As the edge does; then the run owner takes them in again, so that they lie in later rounds too."""
        for conviction in self.world.state.convicted:
            assert conviction.node_id in LIARS, "an honest one is put out"
            self.num_seen["convictions"] += 1
            for kind in (RulingKind.QUARANTINED, RulingKind.READMITTED):
                self.world.deliver(
                    Ruled(kind=kind, by="x", unix_seconds=0.0, node_id=conviction.node_id)
                )

    def note_lies(self, node: SimulatedNode) -> None:
        """How often what they make up might have become the swarm's."""
        current = self.world.state.open_round
        if not isinstance(node, Liar) or current is None or node.session_id is None:
            return
        is_applying = current.phase is RoundPhase.APPLYING
        takes_part = any(a.node_id == node.node_id for a in current.assignments)
        self.num_seen["votes for a made-up state"] += is_applying and node.makes_up_state
        self.num_seen["made-up results"] += not is_applying and takes_part and node.makes_up_results
        self.num_seen["accusations"] += len(node.unreachable)

    @rule(
        who=st.sampled_from(HONEST),
        fault=st.sampled_from(["reconnects", "restarts", "loses its newest state", "leaves"]),
    )
    def one_of_the_others_fails(self, who: NodeId, fault: str) -> None:
        node, nodes = self.world.nodes[who], self.world.nodes
        if any(nodes[other].session_id is None for other in HONEST):
            return  # one at a time
        if fault == "leaves" and self.is_unchecked:
            return  # of those that have work there may be no more than it takes
        if fault == "leaves":
            assert node.session_id is not None
            self.world.deliver(
                Detached(node_id=node.node_id, session_id=node.session_id, reason="")
            )
        else:
            self.world.attach(
                node,
                has_restarted=fault != "reconnects",
                loses_newest=fault == "loses its newest state",
            )

    @precondition(lambda self: any(n.session_id is None for n in self.world.nodes.values()))
    @rule()
    def all_who_are_away_come_back(self) -> None:
        for node in self.world.nodes.values():
            if node.session_id is None:
                self.world.attach(node, has_restarted=False)

    @rule(seconds=st.sampled_from([1, 5, 11, 35]), order=ORDER)
    def time_passes(self, seconds: int, order: Random) -> None:
        """In which who is here applies what is committed."""
        until = self.world.now + seconds
        while self.world.now < until:
            self.let_pass(min(2, until - self.world.now))
            self.all_apply(order)

    def let_pass(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.deliver(Ticked())
        for node in self.world.nodes.values():
            if (beat := node.heartbeat()) is not None:
                self.world.deliver(beat)

    @invariant()
    def nothing_made_up_is_the_swarms(self) -> None:
        state = self.world.state
        assert state.outer_digest != MADE_UP_STATE, "the swarm agreed on a state that nobody has"
        for commit in self.world.signed:
            assert commit.outer_digest != MADE_UP_STATE
            assert MADE_UP_RESULT not in {outcome.digest for outcome in commit.slices}
        for closed in state.recent:
            assert closed.commit.outer_digest != MADE_UP_STATE

    def may_earn(self) -> bool:
        """Whether the others have more work than two can earn in a round, beside what these have.

        Where nobody can check these two it is enough that three of the others have some.
        """
        tokens = {
            n: sum(t for _, t in m.work.by_stretch) for n, m in self.world.state.members.items()
        }
        if self.is_unchecked:
            return sum(tokens.get(n, 0) > 0 for n in HONEST) >= LEAST_INVITES
        here = sum(t for n, t in tokens.items() if self.world.state.members[n].state in PRESENT)
        return here - 2 * sum(tokens.get(n, 0) for n in LIARS) > 2 * MOST_IN_A_ROUND

    def share_of_liars(self) -> float:
        """Of the weight of all who are present."""
        present = [m for m in self.world.state.members.values() if m.state in PRESENT]
        say = say_of(present, self.world.state.committed_round, unchecked(self.world.state))
        return weight_of(say, LIARS) / weight_of(say, (m.node_id for m in present))

    @invariant()
    def less_than_half_of_the_work_is_theirs(self) -> None:
        """Or the law above would say too much."""
        assert self.share_of_liars() < 1 / 2
        work = {
            n: sum(t for _, t in m.work.by_stretch) for n, m in self.world.state.members.items()
        }
        is_most = 2 * sum(work.get(n, 0) for n in LIARS) > sum(work.values())
        self.num_seen["liars with most of the work"] += is_most

    def teardown(self) -> None:
        """With the liars still lying rounds commit again, once the others are here."""
        if not hasattr(self, "world") or self.world.has_failed:
            return
        self.all_who_are_away_come_back()
        goal = self.world.num_fruitful + 2
        for number in range(60):
            if self.world.num_fruitful >= goal or self.world.books.is_finished:
                return
            self.all_work(Random(number), do_liars_train=False)
            self.all_apply(Random(number))
            self.time_passes(5, Random(number))
            self.nothing_made_up_is_the_swarms()
        raise AssertionError(f"no progress: {self.world.state}")


CoalitionMachine.TestCase.settings = settings(examples(12), stateful_step_count=15)
TestCoalitionMachine = CoalitionMachine.TestCase


def test_the_liars_of_these_worlds_try_what_they_may() -> None:
    """Else the laws above would hold for want of lies: in five short worlds, counted."""
    num_seen: Counter[str] = Counter()
    for seed in range(5):
        random, machine = Random(seed), CoalitionMachine()
        machine.begin(
            2,
            adapts_deadlines=False,
            has_overlap=False,
            has_one_invite=bool(seed % 2),
            claims="a loop" if seed == 4 else "",
        )
        for _ in range(10):
            for who in LIARS:
                machine.a_liar_changes_its_mind(
                    who,
                    random.random() < 0.5,
                    random.random() < 0.5 and not machine.is_unchecked,  # else they are put out
                    list(HONEST[:3]) if random.random() < 0.3 else [],
                    random.random() < 0.5,
                )
            may = random.random() < 0.3 or machine.is_unchecked
            machine.all_work(random, do_liars_train=may)
            if random.random() < 0.3:
                machine.only_the_liars_are_in_time(random)
            machine.all_apply(random)
            machine.time_passes(5, random)
            machine.nothing_made_up_is_the_swarms()
            machine.less_than_half_of_the_work_is_theirs()
        machine.teardown()
        num_seen += machine.num_seen
        num_seen["commits"] += machine.world.num_fruitful
    assert num_seen["votes for a made-up state"] > 8, num_seen
    assert num_seen["made-up results"] > 8, num_seen
    assert num_seen["refusals"] > 8 and num_seen["convictions"] > 2, num_seen
    assert num_seen["false refusals"] > 8, num_seen
    assert num_seen["liars with most of the work"] > 2, num_seen
    assert num_seen["commits"] > 20, num_seen
