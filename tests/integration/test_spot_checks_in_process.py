"""Spot checks in a whole swarm, by production's code: who trains stays, who only says so loses its place."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lies import keeps_from_one
from coordinator.swarm.members import MemberState
from lab.simulation.coordinator import Outage
from lab.simulation.memory_transport import MemoryNetwork
from lab.simulation.swarm import Life, SimulatedNode, SimulatedRun, identity_of, simulate
from node.duties.duties import Duties
from node.duties.work import Work
from node.island.data.dataset import Corpus
from node.outer_state import Vector
from protocol.trust.evidence import proven_by
from protocol.trust.rulings import RulingKind
from protocol.v1 import session_pb2
from protocol.wire.messages import RoundCommitted
from protocol.wire.rounds import Commit
from tests.tiny_runs import tiny

NUM_NODES, LIAR_PLACE, ROUNDS = 5, 4, 40
LIAR = identity_of(LIAR_PLACE).node_id
MODEL = {"hidden_size": 32, "num_heads": 2, "ffn_size": 64, "context": 32}
HONEST = Life(seconds_per_inner_step=1.0)


def run(
    corpus: Corpus, lives: Sequence[Life], *, rounds: int = ROUNDS, **more: Any
) -> SimulatedRun:
    """A round takes sixteen virtual seconds; each contributor of each is checked."""
    spec = tiny(
        outer={"audit": 1.0},
        run={"min_nodes": NUM_NODES - 1, "rounds": rounds},
        model=MODEL,
        inner={"steps": 16, "batch": 8, "learning_rate": 2e-2},
        evaluation={"every_rounds": 100},
    )
    private = replace(corpus, context=MODEL["context"])
    return simulate(spec, lives=lives, corpus=private, within_seconds=2000, **more)


def with_liar(liar: Life) -> list[Life]:
    return [*[HONEST] * LIAR_PLACE, as_liar(liar)]


def as_liar(life: Life) -> Life:
    """It waits in quarantine for ever, so it is killed once the others are done."""
    return replace(life, is_liar=True, absences=((1000.0, None),))


class Copier:
    """Publishes the mean of what others have published in the round: no work of its own."""

    def __init__(self) -> None:
        self.others: dict[int, Vector] = {}

    def watch(self, place: int) -> Life:
        def see(parameters: Vector, published: Vector) -> None:
            self.others[place] = parameters - published

        return replace(HONEST, on_published=see)

    def copy(self, parameters: Vector, published: Vector) -> None:
        middle = np.mean(list(self.others.values()), axis=0, dtype=np.float32)
        np.subtract(parameters, middle, out=published)


def put_out(done: SimulatedRun) -> dict[str, str]:
    return {
        ruling.node_id: ruling.reason
        for ruling in done.final.rulings
        if ruling.kind is RulingKind.QUARANTINED
    }


def expect_liar_put_out(done: SimulatedRun) -> None:
    """It alone, with evidence; the others finish the run."""
    assert set(put_out(done)) == {LIAR}
    assert "has not trained what it was leased" in put_out(done)[LIAR]
    (ruling,) = [r for r in done.final.rulings if r.kind is RulingKind.QUARANTINED]
    assert "signed spot checks of" in proven_by(ruling, run_digest=done.final.run_digest)
    assert done.final.members[LIAR].state is MemberState.QUARANTINED
    assert done.final.committed_round == ROUNDS
    later = [c for c in done.commits if LIAR not in {a.node_id for a in c.assignments}]
    assert later, "plans go on without it"


def test_nobody_that_trains_is_put_out_and_who_keeps_its_work_from_one_reducer_is_checked_all_the_same(
    corpus: Corpus,
) -> None:
    done = run(corpus, with_liar(replace(HONEST, lies=keeps_from_one)), rounds=18)

    assert not put_out(done), "all of them train"
    named = [
        sum(LIAR in {c.node_id for c in outcome.contributors} for outcome in commit.slices)
        for commit in done.commits[2:]
    ]
    assert max(named) == NUM_NODES - 1, "one slice always lacks it"
    for node_id, member in done.final.members.items():
        assert len(member.spots) > 5, "each is checked in nearly every round"
        scores = [finding.score for finding in member.spots]
        # It is checked by what the other reducers got.
        assert np.mean(scores) > (1.0 if node_id == LIAR else 1.3)


def test_rounds_take_no_longer_where_members_check_each_other(corpus: Corpus) -> None:
    """Who checks trains less, and checks while the others train: else a round lasts a third longer."""
    spec = tiny(
        outer={"audit": 0.5},
        run={"min_nodes": NUM_NODES, "rounds": 8},
        inner={"steps": 16, "batch": 8},
        evaluation={"every_rounds": 100},
    )
    done = simulate(spec, lives=[HONEST] * NUM_NODES, corpus=corpus, within_seconds=2000)

    assert sum(len(member.spots) for member in done.final.members.values()) > 8
    assert max(after - before for before, after in pairwise(done.begins)) <= 16.01
    least = [min(a.inner_steps for a in commit.assignments) for commit in done.commits]
    assert min(least) <= 16 - 6 and max(least) == 16


def test_a_commit_waits_for_a_piece_of_a_check_at_most_and_no_audit_goes_unanswered(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check takes two thirds of a round here, and each member has one or more to do in every round."""
    told: dict[tuple[Duties, int], float] = {}
    waited: list[float] = []
    put, apply = Duties.put, Duties._apply

    def noting(self: Duties, work: Work) -> None:
        if isinstance(work, RoundCommitted):
            told.setdefault((self, work.commit.round), asyncio.get_running_loop().time())
        put(self, work)

    async def measuring(self: Duties, commit: Commit) -> None:
        since = told.get((self, commit.round))
        if since is not None:
            waited.append(asyncio.get_running_loop().time() - since)
        await apply(self, commit)

    monkeypatch.setattr(Duties, "put", noting)
    monkeypatch.setattr(Duties, "_apply", measuring)
    spec = tiny(
        outer={"audit": 1.0},
        run={"min_nodes": NUM_NODES, "rounds": 7},
        inner={"steps": 16, "batch": 4},
    )
    done = simulate(spec, lives=[HONEST] * NUM_NODES, corpus=corpus, within_seconds=1000)

    assert len(waited) >= 7 * NUM_NODES
    assert max(waited) < 1.0, "virtual seconds: less than an inner step"
    members = done.final.members.values()
    assert done.num_audits > 7 and not any(m.audits.num_unanswered for m in members)
    assert sum(len(member.spots) for member in members) > 7, "and members check each other"


@pytest.mark.nightly
def test_who_copies_the_mean_of_the_others_is_put_out(corpus: Corpus) -> None:
    copier = Copier()
    liar = replace(HONEST, seconds_per_inner_step=1.01, on_published=copier.copy)

    expect_liar_put_out(run(corpus, [*map(copier.watch, range(LIAR_PLACE)), as_liar(liar)]))


@pytest.mark.nightly
def test_who_is_readmitted_and_trains_stays_and_a_restart_of_the_coordinator_loses_no_finding(
    corpus: Corpus, tmp_path: Path
) -> None:
    copier, is_reformed, restarts = Copier(), False, (50.0, 66.0)

    def copy_or_train(parameters: Vector, published: Vector) -> None:
        if not is_reformed:
            copier.copy(parameters, published)

    async def readmit(_: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        nonlocal is_reformed
        coordinator = nodes[0].coordinator
        while LIAR not in coordinator.driver.state.latest_rulings:  # noqa: ASYNC110 (it tells nobody)
            await asyncio.sleep(1)
        await asyncio.sleep(40)
        is_reformed = True
        await coordinator.rulings.make(
            RulingKind.READMITTED, by="the test", node_id=LIAR, node_name="node-5"
        )

    liar = replace(HONEST, seconds_per_inner_step=1.01, on_published=copy_or_train)
    done = run(
        corpus,
        [*map(copier.watch, range(LIAR_PLACE)), liar],
        rounds=52,
        script=readmit,
        outage=[Outage(dies_at=at, returns_at=at + 3) for at in restarts],
        disks=tmp_path,
    )

    about_nodes = [(r.kind, r.node_id) for r in done.final.rulings if r.node_id]
    assert about_nodes == [(RulingKind.QUARANTINED, LIAR), (RulingKind.READMITTED, LIAR)]
    rounds = [
        session_pb2.SpotCheckedReport.FromString(bytes.fromhex(piece.split()[1])).round
        for piece in done.final.rulings[0].evidence
    ]
    measured = [done.begins[number - 1] for number in rounds]
    assert min(measured) < restarts[0] < max(measured), "of before a restart too"
    assert len(done.digests) == NUM_NODES and len({*done.digests.values()}) == 1
    since = done.final.members[LIAR].spots
    assert len(since) > 5 and np.mean([finding.score for finding in since]) > 1.5
    takes_part = [LIAR in {a.node_id for a in commit.assignments} for commit in done.commits]
    assert not all(takes_part) and all(takes_part[-5:])


@pytest.mark.nightly
def test_who_trains_an_eighth_of_what_it_says_is_put_out(corpus: Corpus) -> None:
    expect_liar_put_out(run(corpus, with_liar(replace(HONEST, trained_share=1 / 8))))
