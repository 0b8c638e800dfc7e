"""Whatever members say, holes are punched by pairs, by those present, and never in a hurry."""

from collections import defaultdict
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.swarm.events import HeartbeatSeen, Tell, Turn
from coordinator.swarm.members import PRESENT, MemberState
from coordinator.swarm.membership import heartbeat
from coordinator.swarm.reach import FIRST_WAIT_SECONDS
from coordinator.swarm.transition import initial_state
from protocol.wire.messages import PunchAsked
from protocol.wire.rounds import Digest, NodeId
from tests.property.effort import examples
from tests.property.test_reach_properties import NAMES, RULES, member

DIGEST = Digest(bytes(32))
HERE = NAMES[:4]
GONE = dict(
    zip(NAMES[4:], (MemberState.LOST, MemberState.LEFT, MemberState.EXPELLED), strict=False)
)
OUTSIDE = st.sampled_from(
    [
        (),
        ("/ip4/203.0.113.1/udp/1/quic-v1",) * 2,
        ("/ip4/203.0.113.2/udp/2/quic-v1",) * 2,
        ("/ip4/203.0.113.2/udp/2/quic-v1", "/ip4/203.0.113.2/udp/3/quic-v1"),
    ]
)
BEATS = st.lists(
    st.tuples(
        st.sampled_from(HERE),
        st.lists(st.sampled_from(NAMES), max_size=5, unique=True),
        OUTSIDE,
        st.floats(0, 40),
    ),
    max_size=60,
)


@given(BEATS)
@examples(200)
def test_whoever_is_told_to_dial_is_dialled_by_the_other_at_once(
    beats: list[tuple[NodeId, list[NodeId], tuple[str, ...], float]],
) -> None:
    members = [member(node_id, MemberState.READY, []) for node_id in HERE]
    members += [
        replace(member(node_id, state, []), outside=("/ip4/203.0.113.9/udp/9/quic-v1",))
        for node_id, state in GONE.items()
    ]
    turn = Turn(state=initial_state(RULES, DIGEST), now=0.0)
    for each in members:
        turn.put_member(each)
    seen: dict[NodeId, tuple[str, ...]] = {}
    tried: dict[frozenset[NodeId], list[float]] = defaultdict(list)  # since they were apart
    for node_id, unreachable, outside, seconds in beats:
        turn.now += seconds
        turn.actions.clear()
        seen[node_id] = outside
        heartbeat(
            turn,
            HeartbeatSeen(
                node_id=node_id,
                session_id=1,
                outer_round=0,
                outer_digest=DIGEST,
                unreachable=tuple(unreachable),
                outside=outside,
            ),
        )
        state = turn.state
        for pair in list(tried):
            one, other = pair
            apart = (
                other in state.members[one].unreachable or one in state.members[other].unreachable
            )
            if not apart:
                del tried[pair]
        asked = {
            (action.to[0], action.message.node_id): action.message.multiaddr
            for action in turn.actions
            if isinstance(action, Tell) and isinstance(action.message, PunchAsked) and action.to
        }
        for (who, whom), multiaddr in asked.items():
            assert state.members[who].state in PRESENT
            assert (whom, who) in asked
            assert who != whom
            assert multiaddr == seen[whom][0]
            if who < whom:
                times = tried[frozenset((who, whom))]
                assert not times or turn.now >= times[-1] + FIRST_WAIT_SECONDS
                times.append(turn.now)
