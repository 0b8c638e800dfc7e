"""Audited reducers in a whole swarm, by production's code: honest ones agree, liars lose their place."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.swarm.members import MemberState, Verdict
from lab.misreading import Misreading
from lab.simulation.coordinator import Outage
from lab.simulation.memory_transport import MemoryNetwork
from lab.simulation.swarm import (
    Life,
    RunStuckError,
    Script,
    SimulatedNode,
    SimulatedRun,
    identity_of,
    simulate,
)
from node.disk.round_folder import Retention
from node.exchange.auditing import Auditor
from node.exchange.exchange import Exchange
from node.exchange.peers import Want, WantInput
from node.exchange.reduction import Reduction, Sender, SliceResult
from node.island.data.dataset import Corpus
from protocol.trust.evidence import proven_by
from protocol.trust.rulings import RulingKind
from protocol.wire.findings import Audited
from protocol.wire.payload import Payload
from protocol.wire.rounds import AUDIT_ROUNDS, NodeId
from tests.tiny_runs import tiny

NUM_NODES = 5
LIAR = identity_of(1).node_id


def run(
    corpus: Corpus,
    *,
    audit: float = 1.0,
    rounds: int = 4,
    has_liar: bool = True,
    disks: Path | None = None,
    outage: Outage | None = None,
    script: Script | None = None,
    **tables: Any,
) -> SimulatedRun:
    """A round takes five virtual seconds; with `disks` nodes keep every state."""
    changes: dict[str, Any] = {
        "outer": {"audit": audit, **tables.pop("outer", {})},
        "run": {"min_nodes": NUM_NODES - has_liar, "rounds": rounds},
        **tables,
    }
    honest = Life(seconds_per_inner_step=1.0, retention=Retention(keep=100, every=1))
    liar = replace(honest, is_liar=True, absences=((500.0, None),))
    lives = [liar if has_liar and place == 1 else honest for place in range(NUM_NODES)]
    return simulate(
        tiny(**changes),
        lives=lives,
        corpus=corpus,
        disks=disks,
        outage=outage,
        script=script,
        within_seconds=1000,
    )


async def audit_all(_: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
    """An owner under attack amends the share, some rounds after the start."""
    await asyncio.sleep(12.0)
    await nodes[0].coordinator.rulings.amend((("outer.audit", 1.0),), more_rounds=0, reason="")


@pytest.fixture(scope="module")
def clean(corpus: Corpus) -> SimulatedRun:
    return run(corpus, audit=0.0, has_liar=False)


def misreading(
    monkeypatch: pytest.MonkeyPatch, *, from_round: int = 2, times: float = -1.0
) -> None:
    """The liar hands out its mean turned round: as long as an honest one, so no bound cuts it.

    Or somewhat longer, which leads where it must.
    """
    made = Reduction.result

    def lying(self: Reduction, *, sender: Sender, **rest: Any) -> SliceResult | None:
        is_its_own = sender.signer is not None and sender.node_id == LIAR
        if is_its_own and self.plan.round >= from_round:
            self = replace(self, uplink=Misreading(self.uplink, times))  # type: ignore[arg-type]
        return made(self, sender=sender, **rest)

    monkeypatch.setattr(Reduction, "result", lying)


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"exchange": {"uplink": "topk64", "downlink": "topk64"}},
        {"outer": {"merge": "norm-preserving"}},
        {"exchange": {"overlap": "keep"}},
    ],
    ids=["as a rule", "with large errors that are kept", "by their norms", "with overlap"],
)
def test_all_honest_reducers_are_found_right_bit_for_bit(
    tables: dict[str, Any], corpus: Corpus
) -> None:
    audited = run(corpus, has_liar=False, **tables)
    assert audited.final.is_finished
    assert not audited.final.rulings
    for commit in audited.commits:
        assert all(outcome.digest is not None for outcome in commit.slices), commit
    before, last = audited.commits[-2:]
    reason = audited.final.recent[-1].reason
    assert reason.count(f"of round {before.round} audited by") == len(before.slices)
    assert reason.count(": agreed") == len(before.slices), reason
    found = {audit.slice.index: audit.verdict for audit in audited.final.audits}
    assert found == {part.index: Verdict.AGREED for part in last.slices}, "the end waits for it"
    assert not any(member.audits.num_disputed for member in audited.final.members.values())


def test_a_share_of_audits_that_is_raised_in_mid_run_holds_and_changes_no_bit(
    corpus: Corpus,
) -> None:
    """With the reducer's errors of rounds before, which nodes kept all along."""
    small: dict[str, Any] = {
        "has_liar": False,
        "rounds": 6,
        "inner": {"batch": 3},
        "exchange": {"uplink": "topk64", "downlink": "topk64"},
    }
    hardly, amended = (run(corpus, audit=1e-9, script=s, **small) for s in (None, audit_all))
    assert hardly.num_audits == 0 and amended.num_audits > 0
    assert amended.final.is_finished and len(amended.final.rulings) == 1
    assert {audit.verdict for audit in amended.final.audits} == {Verdict.AGREED}
    assert set(amended.digests.values()) == set(hardly.digests.values())


def test_a_liar_that_a_small_share_would_miss_is_convicted_once_the_share_is_raised(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    misreading(monkeypatch, times=1.5)
    missed = run(corpus, audit=1e-9, rounds=8)
    assert not missed.final.rulings
    caught = run(corpus, audit=1e-9, rounds=8, script=audit_all, disks=tmp_path)
    kinds = [ruling.kind for ruling in caught.final.rulings]
    assert kinds[0] is RulingKind.AMENDED and RulingKind.QUARANTINED in kinds
    assert caught.final.members[LIAR].state is MemberState.QUARANTINED


def test_audits_change_no_bit_of_an_honest_run(corpus: Corpus) -> None:
    """Of leases of 15 samples: larger ones are spot-checked too, and who does that trains less."""
    small: dict[str, Any] = {"has_liar": False, "inner": {"batch": 3}}
    clean, audited = run(corpus, audit=0.0, **small), run(corpus, **small)
    assert audited.num_audits > 0
    assert [each.loss for each in audited.held_out] == [each.loss for each in clean.held_out]
    assert set(audited.digests.values()) == set(clean.digests.values())


def assert_undone(attacked: SimulatedRun, clean: SimulatedRun, *, before_round: int) -> None:
    """The liar is out, its round and those after it are made again, and nothing of it is left."""
    assert attacked.final.is_finished
    out, back = attacked.final.rulings
    assert (out.kind, out.node_id) == (RulingKind.QUARANTINED, LIAR)
    assert out.by == "the coordinator" and "found another result" in out.reason
    assert (back.kind, back.from_round) == (RulingKind.ROLLED_BACK, before_round)
    assert back.by == "the coordinator" and "is convicted" in back.reason
    run_digest = attacked.final.run_digest
    for ruling in (out, back):
        assert "signed findings of" in proven_by(ruling, run_digest=run_digest)
    assert back.last_round < before_round + AUDIT_ROUNDS
    assert attacked.final.members[LIAR].state is MemberState.QUARANTINED
    assert len(attacked.digests) == NUM_NODES - 1
    assert set(attacked.digests.values()) == {attacked.final.outer_digest}
    assert attacked.held_out[-1].loss < 1.03 * clean.held_out[-1].loss
    for commit in attacked.commits:
        assert commit.incarnation == int(commit.round >= before_round)
        assert all(outcome.digest is not None for outcome in commit.slices)
        named = {c.node_id for outcome in commit.slices for c in outcome.contributors}
        assert LIAR not in named or commit.round < before_round
    (whole,) = attacked.final.ledger.committed
    assert whole.first == 0 and not attacked.final.ledger.leased, "samples are trained again"


def test_a_lie_that_is_committed_is_undone_and_who_told_it_is_put_out(
    clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    misreading(monkeypatch)
    assert_undone(run(corpus, disks=tmp_path), clean, before_round=2)


def test_a_lie_that_leads_elsewhere_needs_no_lot_to_be_undone(
    clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its contributors find it, each by its own contribution alone."""
    misreading(monkeypatch)
    attacked = run(corpus, audit=1e-9, disks=tmp_path)
    assert_undone(attacked, clean, before_round=2)
    assert attacked.num_audits == NUM_NODES - 1, "all others, of one slice"


def test_a_lie_in_the_last_round_is_undone_before_the_run_ends(
    clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    misreading(monkeypatch, from_round=4)
    assert_undone(run(corpus, disks=tmp_path), clean, before_round=4)


def test_where_nobody_can_go_back_the_run_pauses_and_says_why(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    misreading(monkeypatch)
    with pytest.raises(RunStuckError, match="no node that is here can go back to before"):
        run(corpus)


def test_without_audits_it_does_as_it_likes(
    clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the test above would say nothing."""
    misreading(monkeypatch)
    attacked = run(corpus, audit=0.0)
    assert not attacked.final.rulings
    assert all(outcome.digest is not None for c in attacked.commits for outcome in c.slices)
    assert attacked.held_out[-1].loss > clean.held_out[-1].loss


def test_a_reducer_that_gives_no_inputs_has_its_rounds_undone_and_reduces_less_and_less(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    supply = Exchange.supply

    async def stingy(self: Exchange, sender: NodeId, want: Want) -> Payload | None:
        if self._rules.node_id == LIAR and isinstance(want, WantInput):
            return None
        return await supply(self, sender, want)

    monkeypatch.setattr(Exchange, "supply", stingy)
    attacked = run(corpus, rounds=8, disks=tmp_path)
    assert attacked.final.is_finished
    record = attacked.final.members[LIAR].audits
    assert 1 < record.num_disputed < 4, "it reduces in few rounds of eight"
    assert {r.kind for r in attacked.final.rulings} == {RulingKind.ROLLED_BACK}
    assert all("could not make it again" in ruling.reason for ruling in attacked.final.rulings)
    for ruling in attacked.final.rulings:
        assert "signed findings of" in proven_by(ruling, run_digest=attacked.final.run_digest)
    assert len(attacked.digests) == NUM_NODES, "nobody is put out for it"


def auditing_falsely(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Auditor.audited

    async def lying(self: Auditor) -> Audited:
        finding = await honest(self)
        if self.rules.node_id == LIAR:
            return replace(finding, found=b"f" * 32, why="a lie")
        return finding

    monkeypatch.setattr(Auditor, "audited", lying)


def test_who_audits_falsely_makes_nothing_void_and_loses_its_say(
    clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    auditing_falsely(monkeypatch)
    attacked = run(corpus, rounds=8)
    assert attacked.final.is_finished and not attacked.final.rulings
    assert all(outcome.digest is not None for c in attacked.commits for outcome in c.slices)
    record = attacked.final.members[LIAR].audits
    assert 2 <= record.num_contradicted <= NUM_NODES, "after that round it is asked no more"
    others = [m.audits for n, m in attacked.final.members.items() if n != LIAR]
    assert not any(each.num_contradicted or each.num_disputed for each in others)


def test_an_auditor_that_does_not_answer_costs_the_audit_alone(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Auditor.audited

    async def silent(self: Auditor) -> Audited:
        if self.rules.node_id == LIAR:
            raise RuntimeError("away")
        return await honest(self)

    monkeypatch.setattr(Auditor, "audited", silent)
    deadlines = {"train": 20, "contribute": 30, "commit": 40}
    attacked = run(corpus, rounds=8, deadlines=deadlines)
    assert attacked.final.is_finished
    assert all(outcome.digest is not None for c in attacked.commits for outcome in c.slices)
    assert not any(m.audits.num_disputed for m in attacked.final.members.values())
    record = attacked.final.members[LIAR].audits
    assert 0 < record.num_unanswered < 4, "it is asked less and less"
    # Of a spot check a piece may be under way: less than an inner step here.
    assert attacked.begins[-1] < 7 * 6, "and no round waits for it"
