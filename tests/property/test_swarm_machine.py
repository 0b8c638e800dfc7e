"""The core against random worlds; what must hold stands in swarm_world and swarm_books."""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from coordinator.swarm.events import Detached, Reported, StreamBroken, Ticked, Woke
from protocol.wire.messages import Draining, Reduced
from protocol.wire.rounds import ContributionDigest, Contributor, Digest, NodeId
from tests.property.effort import examples
from tests.property.swarm_nodes import SimulatedNode, sender_of, spoiled
from tests.property.swarm_world import PAUSE_SECONDS, World

NODE = st.integers(min_value=0, max_value=4)
SOMETIMES_A_NODE = st.none() | st.none() | NODE
LIE = st.sampled_from([Digest(b"lie 1"), Digest(b"lie 2")])
ORDER = st.integers(min_value=0, max_value=2**32 - 1).map(Random)  # one draw, not one a message
LATE = st.sampled_from([0, 1, 30, 3600, 7 * 24 * 3600, None])
MISSING = st.none() | st.none() | st.sampled_from([NodeId("n0"), NodeId("n2")])


class SwarmMachine(RuleBasedStateMachine):
    world: World

    @initialize(
        num_nodes=st.sampled_from([3, 2, 4, 1]),
        min_nodes=st.integers(min_value=1, max_value=3),
        total_rounds=st.sampled_from([2, 4, 50]),
        adapts_deadlines=st.booleans(),
        has_overlap=st.booleans(),
        round_steps=st.sampled_from([None, None, 2, 7]),
        has_helper=st.booleans(),
    )
    def begin(
        self,
        num_nodes: int,
        min_nodes: int,
        total_rounds: int,
        adapts_deadlines: bool,
        has_overlap: bool,
        round_steps: int | None = None,
        has_helper: bool = False,
    ) -> None:
        self.world = World(
            num_nodes=num_nodes,
            min_nodes=min(min_nodes, num_nodes),
            total_rounds=total_rounds,
            adapts_deadlines=adapts_deadlines,
            has_overlap=has_overlap,
            round_steps=round_steps,
            has_helper=has_helper,
        )
        self.all_without_a_session_attach()

    def node(self, number: int) -> SimulatedNode:
        nodes = list(self.world.nodes.values())
        return nodes[number % len(nodes)]

    @rule()
    def all_without_a_session_attach(self) -> None:
        for node in self.world.nodes.values():
            if node.session_id is None:
                self.world.attach(node, has_restarted=False)

    @rule(missing=MISSING, idle=SOMETIMES_A_NODE, order=ORDER, liar=SOMETIMES_A_NODE, lie=LIE)
    def all_work(
        self,
        missing: NodeId | None,
        idle: int | None,
        order: Random,
        liar: int | None,
        lie: Digest,
    ) -> None:
        for _ in range(2):  # a result is held only after its reducer has it
            for number, node in enumerate(self.world.nodes.values()):
                events = self.world.work(node, missing=missing, is_idle=number == idle)
                self.world.send(node, *events)
        self.messages_arrive(order, liar, lie)

    @rule(order=ORDER, liar=SOMETIMES_A_NODE, lie=LIE)
    def all_apply(self, order: Random, liar: int | None, lie: Digest) -> None:
        for node in self.world.nodes.values():
            self.world.send(node, *self.world.catch_up(node))
        self.messages_arrive(order, liar, lie)

    def messages_arrive(self, order: Random, liar: int | None, lie: Digest) -> None:
        """In any order, some of them twice, some much later; all of a liar's spoiled."""
        messages, self.world.under_way = self.world.under_way, []
        order.shuffle(messages)
        num_late = len(messages) // 8
        self.world.under_way = messages[:num_late]
        for session_id, event in (*messages[num_late:], *messages[-2:]):
            sender = self.world.nodes[sender_of(event) or NodeId("")]
            is_lie = liar is not None and sender is self.node(liar)
            if sender.session_id == session_id:
                lied = spoiled(event, lie, sender) if is_lie else event
                self.world.arrive(session_id, lied)

    @precondition(lambda self: self.world.under_way)
    @rule(num_lost=st.integers(min_value=0, max_value=9))
    def late_messages_arrive_or_are_lost(self, num_lost: int) -> None:
        messages = self.world.under_way[num_lost:]
        self.world.under_way = []
        for session_id, event in messages:
            self.world.arrive(session_id, event)

    @rule(number=NODE)
    def one_works_and_applies(self, number: int) -> None:
        node = self.node(number)
        for event in (*self.world.catch_up(node), *self.world.work(node)):
            self.world.arrive_at_once(node, event)

    @rule(number=NODE, unreachable=st.lists(NODE, max_size=2))
    def send_a_heartbeat_that_comes_late(self, number: int, unreachable: list[int]) -> None:
        node = self.node(number)
        node.unreachable = tuple({self.node(n).node_id for n in unreachable} - {node.node_id})
        if (beat := node.heartbeat()) is not None:
            self.world.send(node, beat)

    @rule(number=NODE)
    def evaluate(self, number: int) -> None:
        self.world.evaluate(self.node(number))

    @rule(
        number=NODE,
        fault=st.sampled_from(
            [
                "leaves",
                "restarts",
                "restarts without its newest state",
                "reconnects",
                "has another state",
                "drains",
                "loses its stream",
                "is copied",
            ]
        ),
    )
    def a_node_fails(self, number: int, fault: str) -> None:
        node = self.node(number)
        match fault:
            case "is copied":
                self.world.a_copy_asks(node)
            case "has another state":
                committed = self.world.state.committed_round
                node.go_astray(max(0, committed + number % 3 - 1), Digest(b"another state"))
                self.world.attach(node, has_restarted=True)
            case "leaves" | "drains" | "loses its stream" if node.session_id is None:
                pass
            case "leaves":
                assert node.session_id is not None
                self.world.deliver(
                    Detached(node_id=node.node_id, session_id=node.session_id, reason="")
                )
            case "drains":
                node.is_draining = True
                self.world.arrive_at_once(
                    node, Reported(node_id=node.node_id, round=0, report=Draining())
                )
            case "loses its stream":
                assert node.session_id is not None
                self.world.deliver(StreamBroken(node_id=node.node_id, session_id=node.session_id))
            case _:
                self.world.attach(
                    node,
                    has_restarted=fault != "reconnects",
                    loses_newest=fault == "restarts without its newest state",
                )

    @rule()
    def all_leave(self) -> None:
        """The holders of what was just committed among them."""
        for node in self.world.nodes.values():
            if node.session_id is not None:
                self.world.deliver(
                    Detached(node_id=node.node_id, session_id=node.session_id, reason="")
                )

    @precondition(lambda self: self.world.state.open_round)
    @rule(number=NODE, index=st.integers(min_value=-1, max_value=4), lie=LIE)
    def somebody_says_to_have_reduced(self, number: int, index: int, lie: Digest) -> None:
        current, node = self.world.state.open_round, self.node(number)
        assert current is not None
        node.held.setdefault((current.number, index), set()).add(lie)
        node.unsaved_since = None  # the base is on the disk before anything of the round is told
        self.world.arrive_at_once(
            node,
            Reported(
                node_id=node.node_id,
                round=current.number,
                report=Reduced(
                    slice_index=index,
                    digest=lie,
                    contributors=(Contributor(node_id=NodeId("n0"), samples=1, tokens=1),),
                    contributions=(ContributionDigest(bytes(16)),),
                ),
            ),
        )

    @rule(number=NODE, lie=LIE, leaves=st.booleans())
    def one_decides_alone_what_is_agreed_on(self, number: int, lie: Digest, leaves: bool) -> None:
        """A liar reports in time; the others live, and apply the commit too late, twice."""
        node = self.node(number)
        for event in self.world.catch_up(node):
            self.world.arrive_at_once(node, spoiled(event, lie, node))
        self.time_passes(seconds=22, silent=None)
        if leaves and node.session_id is not None:
            self.world.deliver(
                Detached(node_id=node.node_id, session_id=node.session_id, reason="")
            )

    @rule()
    def the_database_is_backed_up(self) -> None:
        self.world.back_up()

    @precondition(lambda self: self.world.copy is not None)
    @rule(order=ORDER, late_seconds=LATE, pause_seconds=st.sampled_from([0, 0, 6, 40]))
    def the_coordinator_goes_back_to_the_backup(
        self, order: Random, late_seconds: float | None, pause_seconds: float
    ) -> None:
        """Nodes come whenever they like, or so late one after the other; or as other rules say."""
        self.world.restore()
        if late_seconds is not None:
            self.world.all_bring_back(order, late_seconds=late_seconds, pause_seconds=pause_seconds)

    @precondition(lambda self: self.world.signed)
    @rule(number=NODE, place=st.integers(min_value=0, max_value=20))
    def somebody_brings_back_an_old_commit(self, number: int, place: int) -> None:
        signed = self.world.signed
        place = place % len(signed)
        before = signed[-2 - place] if place + 2 <= len(signed) else None
        self.world.learn(self.node(number), before, signed[-1 - place])

    @rule(seconds=st.sampled_from([1, 5, 11, 35]), silent=SOMETIMES_A_NODE)
    def time_passes(self, seconds: int, silent: int | None) -> None:
        """With heartbeats of all nodes but one."""
        until = self.world.now + seconds
        while self.world.now < until:
            self.world.now = min(until, self.world.now + 5)
            for number, node in enumerate(self.world.nodes.values()):
                beat = node.heartbeat()
                if beat is not None and number != silent:
                    self.world.deliver(beat)
            self.world.deliver(Ticked())

    @rule(seconds=st.sampled_from([5, 100]))
    def the_coordinator_sleeps(self, seconds: int) -> None:
        self.world.now += seconds
        self.world.deliver(Woke(pause_seconds=PAUSE_SECONDS))

    def teardown(self) -> None:
        if hasattr(self, "world") and not self.world.has_failed:
            self.world.recover()


SwarmMachine.TestCase.settings = settings(examples(150), stateful_step_count=40)
TestSwarmMachine = SwarmMachine.TestCase


@pytest.mark.parametrize("total_rounds", [2, 4])
def test_a_round_whose_base_was_lost_does_not_commit_what_only_a_liar_holds(
    total_rounds: int,
) -> None:
    """Found at random once: the state after round 1 was gone, and round 2 could not be taken back."""
    machine, lie = SwarmMachine(), Digest(b"lie 1")
    machine.begin(3, 1, total_rounds, adapts_deadlines=False, has_overlap=False)
    machine.somebody_says_to_have_reduced(number=0, index=0, lie=lie)
    machine.all_leave()
    machine.all_without_a_session_attach()
    machine.one_works_and_applies(number=0)
    machine.a_node_fails(number=0, fault="restarts without its newest state")
    machine.somebody_says_to_have_reduced(number=0, index=0, lie=lie)
    machine.all_leave()
    machine.teardown()


def test_a_lie_that_was_agreed_on_and_that_nobody_holds_does_not_stop_the_run() -> None:
    """Random worlds hardly ever get there: the liar must leave, and the others apply the commit."""
    machine, lie = SwarmMachine(), Digest(b"lie 1")
    machine.begin(3, 2, 50, adapts_deadlines=False, has_overlap=False)
    machine.all_work(missing=None, idle=None, order=Random(0), liar=None, lie=lie)
    machine.one_decides_alone_what_is_agreed_on(number=0, lie=lie, leaves=True)
    assert machine.world.state.outer_digest == lie
    machine.all_apply(order=Random(1), liar=None, lie=lie)
    assert machine.world.state.open_round is None
    machine.time_passes(seconds=11, silent=0)
    assert machine.world.state.outer_digest == lie, "the liar has done most of the work"
    machine.time_passes(seconds=31, silent=0)
    assert machine.world.state.outer_digest != lie
    assert machine.world.state.open_round is not None
    machine.teardown()


@pytest.mark.parametrize("total_rounds", [2, 4])
def test_the_loss_of_a_state_that_is_taken_back_goes_with_it(total_rounds: int) -> None:
    """Random worlds hardly ever get there: all lose the state that one of them has just evaluated."""
    machine, lie = SwarmMachine(), Digest(b"lie 1")
    machine.begin(3, 1, total_rounds, adapts_deadlines=False, has_overlap=False)
    world = machine.world
    for number in (1, 2):
        machine.all_work(missing=None, idle=None, order=Random(0), liar=None, lie=lie)
        assert world.state.committed_round == number
        if number == 2:  # else the run would be over with the loss
            machine.a_node_fails(number=0, fault="restarts")
        for late in (1, 2) if number == 2 else (0, 1, 2):
            machine.one_works_and_applies(number=late)
    while (asked := world.state.evaluating) is None or asked.round < 2:
        machine.time_passes(seconds=1, silent=None)
    world.evaluate(world.nodes[asked.node_ids[0]])
    assert [kept.round for kept in world.state.held_out][-1] == 2
    for number in range(3):
        machine.a_node_fails(number=number, fault="restarts without its newest state")
    while world.state.incarnation == 0:
        machine.time_passes(seconds=11, silent=None)
    assert all(kept.round < 2 for kept in world.state.held_out)
    machine.teardown()
