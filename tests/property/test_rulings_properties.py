"""Rulings in any order: nobody who is barred takes part, the chain holds, and the disk tells all of it."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from coordinator.swarm.events import Ruled
from coordinator.swarm.members import BARRED
from coordinator.swarm.membership import roster_of
from coordinator.swarm.steering import with_rulings
from protocol.errors import AtollError, ExpelledError, HeldBackError
from protocol.trust.rulings import ROUNDS, RUN_OWNER, RulingKind, follows
from protocol.wire.rounds import NodeId
from tests.unit.swarm_scene import Scene, digest_of

NODES = ("a", "b", "c")
KINDS = (
    RulingKind.EXPELLED,
    RulingKind.QUARANTINED,
    RulingKind.READMITTED,
    RulingKind.PAUSED,
    RulingKind.RESUMED,
    RulingKind.STOPPED,
)
STEP = st.tuples(
    st.sampled_from(("attach", "round", "extend", "evaluate", *KINDS)), st.sampled_from(NODES)
)


def take(scene: Scene, what: str | RulingKind, node: str) -> None:
    """One thing that happens; what makes no sense now is refused and changes nothing."""
    before = scene.state
    try:
        match what:
            case RulingKind():
                scene.do(
                    Ruled(
                        kind=what,
                        by=RUN_OWNER,
                        unix_seconds=0.0,
                        node_id=NodeId(node),
                        node_name=node,
                    )
                )
            case "attach":
                scene.attach(node)
            case "extend":
                total = before.rules.total_rounds + 1
                scene.do(
                    Ruled(
                        kind=RulingKind.AMENDED,
                        by=RUN_OWNER,
                        unix_seconds=0.0,
                        changes=((ROUNDS, total),),
                        rules=replace(before.rules, total_rounds=total),
                    )
                )
            case "evaluate":
                if before.evaluating is not None:
                    for asked in before.evaluating.node_ids:
                        scene.evaluate(asked, round=before.evaluating.round)
            case _ if scene.state.open_round is not None:
                here = [a.node_id for a in scene.round.assignments]
                here = [n for n in here if scene.state.members[n].state not in BARRED]
                scene.commit(*here)
                if scene.state.committed_round > before.committed_round:
                    scene.apply(digest_of(f"state {scene.state.committed_round}"), *here)
    except (ExpelledError, HeldBackError):
        assert before.latest_rulings[NodeId(node)].kind in (
            RulingKind.EXPELLED,
            RulingKind.QUARANTINED,
        )
        assert what == "attach"
    except AtollError:
        assert scene.state == before, "refused, and yet it changed something"


@given(st.lists(STEP, max_size=30))
def test_whatever_is_ruled_barred_nodes_take_no_part_and_the_chain_holds(
    steps: list[tuple[str | RulingKind, str]],
) -> None:
    scene = Scene(min_nodes=1, rounds=2)
    scene.attach("a")
    for what, node in steps:
        was_open = scene.state.open_round
        take(scene, what, node)
        state = scene.state
        barred = {
            n
            for n, ruling in state.latest_rulings.items()
            if ruling.kind in (RulingKind.EXPELLED, RulingKind.QUARANTINED)
        }
        assert not barred & {entry.node_id for entry in roster_of(state)}
        assert {n for n, m in state.members.items() if m.state in BARRED} == barred & set(
            state.members
        )
        opened = state.open_round
        if opened is not None and (was_open is None or was_open.number < opened.number):
            assert not barred & {a.node_id for a in opened.assignments}
            assert opened.num_rulings == len(state.rulings)
        assert not state.is_finished or state.committed_round == state.rules.total_rounds
        if state.committed_round < state.rules.total_rounds:
            assert (state.finished_at, state.end_waits_until) == (None, None)
        if state.stopped is not None:
            assert state.committed_round <= state.rules.total_rounds == state.stopped.from_round - 1
        assert all(follows(later, before) for before, later in pairwise(state.rulings))
        bare = replace(state, rulings=(), latest_rulings={}, paused=None, stopped=None)
        assert with_rulings(bare, state.rulings) == state
