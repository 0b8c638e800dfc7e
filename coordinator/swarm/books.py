"""What a commit counts: tokens, in all and per member, work, samples in the ledger, bytes saved. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from coordinator.swarm.ledger import (
    committed_samples,
    committed_tokens,
    lease_again,
    reopen,
    settle,
)
from coordinator.swarm.state import SwarmState, Work
from coordinator.swarm.weighing import credited, earned, taken_back
from coordinator.swarm.wire_ledger import all_reduce_bytes
from protocol.rounds import Commit, NodeId


def book(state: SwarmState, commit: Commit) -> SwarmState:
    """Counts what the commit took; the rest of its leases is free again."""
    samples = committed_samples(commit, batch=state.rules.batch)
    credit = credited(state, commit)
    works = {n: earned(m.work, commit.round, credit.get(n, 0)) for n, m in state.members.items()}
    state = _with_tokens(state, commit, works, sign=1)
    return replace(state, ledger=settle(state.ledger, commit.assignments, samples))


def unbook(state: SwarmState, commit: Commit) -> SwarmState:
    """Undoes `book`: its samples are leased as they were when the round was in flight."""
    samples = committed_samples(commit, batch=state.rules.batch)
    works = {n: taken_back(m.work, commit.round) for n, m in state.members.items()}
    state = _with_tokens(state, commit, works, sign=-1)
    return replace(state, ledger=reopen(state.ledger, commit.assignments, samples))


def book_learned(state: SwarmState, commit: Commit) -> SwarmState:
    """Books a commit whose plan this coordinator has no memory of."""
    state = replace(state, ledger=lease_again(state.ledger, commit.assignments))
    return book(state, commit)


def _with_tokens(
    state: SwarmState, commit: Commit, works: Mapping[NodeId, Work], *, sign: int
) -> SwarmState:
    tokens = committed_tokens(commit)
    members = {
        node_id: replace(
            m,
            committed_tokens=m.committed_tokens + sign * tokens.get(node_id, 0),
            work=works[node_id],
        )
        for node_id, m in state.members.items()
    }
    token_clock = state.token_clock + sign * sum(tokens.values())
    averaging_bytes = state.all_reduce_bytes + sign * all_reduce_bytes(state, commit)
    return replace(
        state, members=members, token_clock=token_clock, all_reduce_bytes=averaging_bytes
    )
