"""Audited reducers in a whole swarm, by production's code: honest ones agree, liars lose their place."""

from dataclasses import replace
from typing import Any

import pytest
from liar import Turned

from coordinator.swarm.state import MemberState
from lab.simulation.swarm import Life, SimulatedRun, identity_of, simulate
from node.exchange.auditing import Auditor
from node.exchange.exchange import Exchange
from node.exchange.reduction import Reduction, Sender, SliceResult
from node.exchange.round.state import MakeAgain
from node.exchange.transport.transport import Want, WantInput
from node.island.data.corpus import Corpus, read_corpus
from protocol.trust.rulings import RulingKind
from protocol.wire.messages import Audited
from protocol.wire.payload import Payload
from protocol.wire.rounds import NodeId
from tests.tiny_runs import tiny

NUM_NODES = 5
LIAR = identity_of(1).node_id


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    spec = tiny()
    folder = tmp_path_factory.mktemp("text")
    return read_corpus(spec.data, context=spec.model.context, batch=spec.inner.batch, folder=folder)


def run(
    corpus: Corpus,
    *,
    audit: float = 1.0,
    rounds: int = 4,
    has_liar: bool = True,
    **tables: Any,
) -> SimulatedRun:
    changes: dict[str, Any] = {
        "outer": {"audit": audit, **tables.pop("outer", {})},
        "run": {"min_nodes": NUM_NODES - has_liar, "rounds": rounds},
        **tables,
    }
    honest, liar = Life(), Life(is_liar=True, absences=((500.0, None),))
    lives = [liar if has_liar and place == 1 else honest for place in range(NUM_NODES)]
    return simulate(tiny(**changes), lives=lives, corpus=corpus, within_seconds=1000)


@pytest.fixture(scope="module")
def clean(corpus: Corpus) -> SimulatedRun:
    return run(corpus, audit=0.0, has_liar=False)


def pointing_elsewhere(monkeypatch: pytest.MonkeyPatch, *, from_round: int = 2) -> None:
    """The liar hands out its mean turned round: as long as an honest one, so no bound cuts it."""
    made = Reduction.result

    def lying(self: Reduction, *, sender: Sender, **rest: Any) -> SliceResult | None:
        is_its_own = sender.signer is not None and sender.node_id == LIAR
        if is_its_own and self.plan.round >= from_round:
            self = replace(self, uplink=Turned(self.uplink))  # type: ignore[arg-type]
        return made(self, sender=sender, **rest)

    monkeypatch.setattr(Reduction, "result", lying)


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"exchange": {"uplink": "topk64", "downlink": "topk64"}},
        {"outer": {"merge": "centred-clipping"}},
        {"exchange": {"overlap": "keep"}},
    ],
    ids=["as a rule", "with large errors that are kept", "by the momentum", "with overlap"],
)
def test_all_honest_reducers_are_found_right_bit_for_bit(
    tables: dict[str, Any], corpus: Corpus
) -> None:
    audited = run(corpus, has_liar=False, **tables)
    assert audited.final.is_finished
    assert not audited.final.rulings
    for commit in audited.commits:
        assert all(outcome.digest is not None for outcome in commit.slices), commit
    reason = audited.final.recent[-1].reason
    assert reason.count("audited by") == len(audited.commits[-1].slices)
    assert reason.count(": agreed") == len(audited.commits[-1].slices), reason
    assert not any(member.audits.num_voided for member in audited.final.members.values())


def test_audits_change_no_bit_of_an_honest_run(clean: SimulatedRun, corpus: Corpus) -> None:
    audited = run(corpus, has_liar=False)
    assert [each.loss for each in audited.held_out] == [each.loss for each in clean.held_out]
    assert set(audited.digests.values()) == set(clean.digests.values())


def test_a_reducer_that_points_elsewhere_is_put_out_at_once_and_the_others_learn_on(
    clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointing_elsewhere(monkeypatch)
    attacked = run(corpus)
    assert attacked.final.is_finished
    (ruling,) = attacked.final.rulings
    assert (ruling.kind, ruling.node_id) == (RulingKind.QUARANTINED, LIAR)
    assert ruling.by == "the coordinator" and "found another result" in ruling.reason
    assert attacked.final.members[LIAR].state is MemberState.QUARANTINED
    assert len(attacked.digests) == NUM_NODES - 1
    assert set(attacked.digests.values()) == {attacked.final.outer_digest}
    assert attacked.held_out[-1].loss < 1.03 * clean.held_out[-1].loss
    void = [o.void_reason for c in attacked.commits for o in c.slices if o.digest is None]
    assert void and all("is convicted" in why for why in void)


def test_without_audits_it_does_as_it_likes(
    clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the test above would say nothing."""
    pointing_elsewhere(monkeypatch)
    attacked = run(corpus, audit=0.0)
    assert not attacked.final.rulings
    assert all(outcome.digest is not None for c in attacked.commits for outcome in c.slices)
    assert attacked.held_out[-1].loss > clean.held_out[-1].loss


def test_a_reducer_that_gives_no_inputs_has_its_slice_void_and_reduces_less_and_less(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    supply = Exchange.supply

    async def stingy(self: Exchange, sender: NodeId, want: Want) -> Payload | None:
        if self._rules.node_id == LIAR and isinstance(want, WantInput):
            return None
        return await supply(self, sender, want)

    monkeypatch.setattr(Exchange, "supply", stingy)
    attacked = run(corpus, rounds=8)
    assert attacked.final.is_finished and not attacked.final.rulings
    record = attacked.final.members[LIAR].audits
    assert record.num_voided > 1
    void = [c.round for c in attacked.commits for o in c.slices if o.digest is None]
    assert len(void) == record.num_voided < 4, "it reduces in few rounds of eight"


def auditing_falsely(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Auditor.audited

    async def lying(self: Auditor, order: MakeAgain) -> Audited:
        finding = await honest(self, order)
        if self.state.rules.node_id == LIAR:
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
    assert not any(each.num_contradicted or each.num_voided for each in others)


def test_an_auditor_that_does_not_answer_costs_the_audit_alone(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Auditor.audited

    async def silent(self: Auditor, order: MakeAgain) -> Audited:
        if self.state.rules.node_id == LIAR:
            raise RuntimeError("away")
        return await honest(self, order)

    monkeypatch.setattr(Auditor, "audited", silent)
    deadlines = {"train": 20, "contribute": 30, "commit": 40}
    attacked = run(corpus, rounds=8, deadlines=deadlines)
    assert attacked.final.is_finished
    assert all(outcome.digest is not None for c in attacked.commits for outcome in c.slices)
    assert not any(m.audits.num_voided for m in attacked.final.members.values())
    record = attacked.final.members[LIAR].audits
    assert 0 < record.num_unanswered < 4, "it is asked less and less"
    assert attacked.begins[-1] < 40 * record.num_unanswered, (
        "no round takes longer than its deadline"
    )
