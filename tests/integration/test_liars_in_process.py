"""Liars in a whole swarm, by production's code: the run learns on, and who shouts is left out."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from google.protobuf.message import Message
from structlog.testing import capture_logs

from coordinator.swarm.bounds import MOST_TIMES_USUAL
from coordinator.swarm.members import Against, MemberState
from coordinator.swarm.penalties import MOST_AGAINST
from lab.simulation.swarm import Life, SimulatedRun, identity_of, simulate
from node.disk.round_folder import Retention
from node.exchange.giving import Push, Pushes
from node.exchange.outer import Outer
from node.exchange.owing import Owing
from node.exchange.reduction import Reduction, Sender, SliceResult
from node.exchange.round import transition
from node.exchange.round.state import Tell
from node.island.data.dataset import Corpus
from node.outer_state import Vector
from protocol.trust.evidence import proven_by
from protocol.trust.receipts import PayloadSigner, Receipt
from protocol.trust.rulings import RulingKind
from protocol.v1 import session_pb2
from protocol.wire.findings import LeftOutSeen
from protocol.wire.payload import CONTRIBUTION, RESULT, Payload, PayloadHeader
from protocol.wire.rounds import OWN_LOOP, WHOLE, ContributionDigest, Digest, NodeId
from tests.integration.liars_scene import CALLED, LIAR, NUM_NODES, SHORT, nonsense, run
from tests.tiny_runs import tiny

MADE_UP = Digest(b"\x66" * 32)
LIE_FROM = 4
"""By then all have worked."""


def calls_itself_a_loop(message: Message) -> Message:
    """And tells of a made-up state, once it has worked."""
    if isinstance(message, session_pb2.AttachRequest):
        message.device = OWN_LOOP
    if isinstance(message, session_pb2.ReportRequest):
        for report in message.reports:
            if report.HasField("applied") and report.round >= LIE_FROM:
                report.applied.outer_digest = MADE_UP
    if isinstance(message, session_pb2.HeartbeatRequest) and message.outer_round >= LIE_FROM:
        message.outer_digest = MADE_UP
    return message


def test_members_that_nobody_can_check_settle_no_state_with_most_of_the_work(
    corpus: Corpus,
) -> None:
    """Of as many invites as the others, with two keys each. They did, whatever they had trained."""
    num, keys = 3, 2
    spec = tiny(
        run={"min_nodes": num, "rounds": LIE_FROM + 1},
        outer={"audit": 0.05, "merge": "mean"},
        evaluation={"every_rounds": 100},
    )
    honest = [Life(invite=f"honest-{n}") for n in range(num)]
    fast = Life(says=calls_itself_a_loop, is_liar=True, absences=((600.0, None),))
    liars = [replace(fast, invite=f"liar-{n}") for n in range(num) for _ in range(keys)]
    done = simulate(spec, lives=[*honest, *liars], corpus=corpus, within_seconds=1000)

    members = done.final.members
    work = {n: sum(t for _, t in m.work.by_stretch) for n, m in members.items()}
    of_honest = sum(work[identity_of(place).node_id] for place in range(num))
    assert 0 < 2 * of_honest < sum(work.values())
    assert {done.digests[identity_of(place).node_id] for place in range(num)} == {
        done.final.outer_digest
    }
    assert MADE_UP not in {commit.outer_digest for commit in done.commits}


def contribute_times(lie: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the nodes contributes so many times what it owes."""
    accumulated = Owing.accumulated

    def told(self: Owing, start: int, num_elements: int, *, out: Vector | None = None) -> Vector:
        values = accumulated(self, start, num_elements, out=out)
        return values if self.sender.node_id != LIAR else np.float32(lie) * values

    monkeypatch.setattr(Owing, "accumulated", told)


def test_screening_changes_no_bit_of_a_clean_run(clean: SimulatedRun, corpus: Corpus) -> None:
    without = run(corpus, screening=False)
    assert [held_out.loss for held_out in without.held_out] == [
        held_out.loss for held_out in clean.held_out
    ]
    assert all(
        not outcome.factors and outcome.factor == WHOLE and outcome.norm > 0
        for commit in clean.commits
        for outcome in commit.slices
    )


@pytest.mark.parametrize("lie", [-10, 1e30])
def test_a_member_that_shouts_is_left_out_and_the_others_learn(
    lie: float, clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    contribute_times(lie, monkeypatch)
    attacked = run(corpus)
    assert attacked.final.is_finished
    assert attacked.held_out[-1].loss < 1.03 * clean.held_out[-1].loss
    cut = [outcome.factor_of(LIAR) for c in attacked.commits for outcome in c.slices]
    assert max(cut) < 0.3
    own = {c.node_id for c in attacked.commits[0].slices[0].taken}
    assert len(own - {LIAR}) == NUM_NODES - 1, "nobody else pays for it"


def test_who_pulls_against_the_others_in_all_rounds_sits_out_and_the_run_goes_on(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the usual norm. It is a member still, and holds the run's final state."""
    contribute_times(-1, monkeypatch)
    rules = {"run": {"min_nodes": NUM_NODES - 1, "rounds": MOST_AGAINST + 4}, "deadlines": SHORT}
    spec = tiny(**rules, outer={"merge": "agreeing"})
    lives = [Life(seconds_per_inner_step=1.0)] * NUM_NODES
    with capture_logs() as logs:
        attacked = simulate(spec, lives=lives, corpus=corpus, within_seconds=1000)
    assert attacked.final.is_finished and not attacked.final.rulings
    planned = [c.round for c in attacked.commits if LIAR in {a.node_id for a in c.assignments}]
    assert MOST_AGAINST <= max(planned) <= MOST_AGAINST + 2
    whole = (
        "this node's work moves the weights more than twice as far as the others' does, or against"
    )
    told = [each["next_step"] for each in logs if each["event"].startswith(whole)]
    assert told and "the data that the others have" in told[0]
    others = [m for n, m in attacked.final.members.items() if n != LIAR]
    assert all(member.against == Against() for member in others)
    assert len(attacked.digests) == NUM_NODES
    assert set(attacked.digests.values()) == {attacked.final.outer_digest}


def test_without_screening_one_member_ruins_the_run(
    clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    contribute_times(-10, monkeypatch)
    assert run(corpus, screening=False).held_out[-1].loss > 1.2 * clean.held_out[-1].loss


def test_a_lying_reducer_moves_its_slice_by_a_few_times_the_usual_at_most(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second round on it hands out a thousand times the mean; it is bounded by the first."""
    made = Reduction.result

    def lying(self: Reduction, *, sender: Sender, **rest: object) -> SliceResult | None:
        if sender.node_id == LIAR and self.plan.round > 1:
            self = replace(self, uplink=Louder(self.uplink))  # type: ignore[arg-type]
        return made(self, sender=sender, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Reduction, "result", lying)
    attacked = run(corpus)
    assert attacked.final.is_finished
    factors = [outcome.factor for c in attacked.commits[1:] for outcome in c.slices]
    assert min(factors) < WHOLE // 50
    assert sum(factor < WHOLE for factor in factors) == len(attacked.commits) - 1, "only its own"
    place = factors.index(min(factors)) % len(attacked.commits[0].slices)
    applied = [
        outcome.norm * outcome.factor / WHOLE
        for outcome in (commit.slices[place] for commit in attacked.commits)
    ]
    led = [seen.stride for seen in attacked.final.norms]
    assert len(led) == len(applied) and led[1] > led[0], "the first round holds the warm-up"
    for number in range(1, len(applied)):
        further = max(1.0, led[number] / min(led[:number]))
        assert applied[number] <= MOST_TIMES_USUAL * further * max(applied[:number])


class Louder:
    """A codec whose bodies are read a thousand times too large."""

    def __init__(self, codec: object) -> None:
        self._codec = codec

    def __getattr__(self, name: str) -> object:
        return getattr(self._codec, name)

    def reader(self, body: bytes, num_elements: int) -> object:
        read = self._codec.reader(body, num_elements)  # type: ignore[attr-defined]

        def louder(first: int, past: int, out: Vector) -> None:
            read(first, past, out)
            np.multiply(out, np.float32(1000), out=out)

        return louder


def test_who_hands_different_results_to_different_members_is_expelled_by_its_own_signatures(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second round on all but one of the others get another result than is reported."""
    start = Pushes.start
    believes = identity_of(0).node_id

    def lying(self: Pushes, push: Push) -> None:
        header = push.payload.header
        is_lie = header.kind == RESULT and header.sender_id == LIAR and header.round > 1
        if is_lie and push.peer != believes:
            body = push.payload.body
            other = body[:-1] + bytes([body[-1] ^ 1])
            header = replace(header, body_digest=Digest(blake3(other).digest()))
            push = replace(push, payload=Payload(header=header.signed(identity_of(1)), body=other))
        start(self, push)

    monkeypatch.setattr(Pushes, "start", lying)
    monkeypatch.setattr(Outer, "check_result", lambda self, payload, own, drawn: None)
    spec = tiny(run={"min_nodes": NUM_NODES - 1})
    lives = [Life(is_liar=place == 1) for place in range(NUM_NODES)]
    with capture_logs() as logs:
        attacked = simulate(spec, lives=lives, corpus=corpus)
    assert attacked.final.is_finished
    (said,) = [each for each in logs if each["event"] == "member expelled"]
    assert said["node"] == CALLED and said["shown_by"].startswith("node-")
    (expelled,) = [r for r in attacked.final.rulings if r.kind is RulingKind.EXPELLED]
    assert expelled.node_id == LIAR and expelled.by == "the coordinator"
    assert "it signed two different results to slice" in expelled.reason
    proof = proven_by(expelled, run_digest=attacked.final.run_digest)
    assert proof == "its two signatures"
    assert attacked.final.members[LIAR].state is MemberState.EXPELLED
    assert len(attacked.digests) == NUM_NODES - 1
    assert set(attacked.digests.values()) == {attacked.final.outer_digest}


def leaving_out_of_its_slices(victim: NodeId, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second round on the liar gives a receipt to everybody, and reduces without one of them."""
    made = Reduction.result

    def lying(self: Reduction, *, sender: Sender, **rest: Any) -> SliceResult | None:
        is_its_own = sender.signer is not None and sender.node_id == LIAR
        if is_its_own and self.plan.round > 1:
            taken = {n: each for n, each in self.contributions.items() if n != victim}
            self = replace(self, contributions=taken)
        return made(self, sender=sender, **rest)

    honest = PayloadSigner.signed_result

    def unguarded(
        self: PayloadSigner, result: Payload, contributions: Mapping[NodeId, ContributionDigest]
    ) -> Payload:
        if result.header.sender_id == LIAR:
            return self.signed(result)
        return honest(self, result, contributions)

    monkeypatch.setattr(Reduction, "result", lying)
    monkeypatch.setattr(PayloadSigner, "signed_result", unguarded)


def run_with_receipts(
    corpus: Corpus, disks: Path, *, min_nodes: int, step_seconds: float = 0.0
) -> SimulatedRun:
    """Hardly a slice is audited by lot: receipts convict without."""
    spec = tiny(outer={"audit": 1e-9}, run={"min_nodes": min_nodes})
    honest = Life(retention=Retention(keep=100, every=1), seconds_per_inner_step=step_seconds)
    liar = replace(honest, is_liar=True, absences=((500.0, None),))
    lives = [liar if place == 1 else honest for place in range(NUM_NODES)]
    return simulate(spec, lives=lives, corpus=corpus, disks=disks, within_seconds=1000)


def test_a_reducer_that_leaves_out_what_it_took_is_convicted_by_its_own_receipt(
    clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    victim = identity_of(3).node_id
    leaving_out_of_its_slices(victim, monkeypatch)
    attacked = run_with_receipts(corpus, tmp_path, min_nodes=NUM_NODES - 1)
    assert attacked.final.is_finished
    out, back = attacked.final.rulings
    assert (out.kind, out.node_id, out.by) == (RulingKind.QUARANTINED, LIAR, "the coordinator")
    assert "left node-4 out of slice" in out.reason
    assert (back.kind, back.from_round) == (RulingKind.ROLLED_BACK, 2)
    run_digest = attacked.final.run_digest
    for ruling in (out, back):
        assert proven_by(ruling, run_digest=run_digest) == "its receipt and its report"
    assert attacked.final.members[LIAR].state is MemberState.QUARANTINED
    assert len(attacked.digests) == NUM_NODES - 1
    assert attacked.held_out[-1].loss < 1.03 * clean.held_out[-1].loss
    for commit in attacked.commits[1:]:
        for outcome in commit.slices:
            assert victim in {c.node_id for c in outcome.contributors}, "what it did counts"


def test_honest_reducers_give_receipts_that_convict_nobody(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = []
    receipt = PayloadSigner.receipt

    def counted(
        self: PayloadSigner, contribution: PayloadHeader, *, attempt: int
    ) -> Receipt | None:
        given.append(contribution)
        return receipt(self, contribution, attempt=attempt)

    monkeypatch.setattr(PayloadSigner, "receipt", counted)
    honest = run_with_receipts(corpus, tmp_path, min_nodes=NUM_NODES)
    assert honest.final.is_finished and not honest.final.rulings
    slices = sum(len(commit.slices) for commit in honest.commits)
    assert len(given) == slices * (NUM_NODES - 1), "its own one nobody signs for"


def test_a_receipt_for_what_is_in_the_result_convicts_nobody_and_is_logged(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One shows all receipts that it gets, whatever the commit says."""
    tell = transition._tell_if_left_out

    def accusing(turn: Any, index: int) -> None:
        known = turn.state.slices[index]
        if turn.state.rules.node_id == LIAR and known.receipt:
            turn.actions.append(Tell(report=LeftOutSeen(receipt=known.receipt)))
        else:
            tell(turn, index)

    monkeypatch.setattr(transition, "_tell_if_left_out", accusing)
    with capture_logs() as logs:
        accused = run_with_receipts(corpus, tmp_path, min_nodes=NUM_NODES)
    assert accused.final.is_finished and not accused.final.rulings
    false = [each for each in logs if each["event"] == "an accusation proves nothing"]
    assert len(false) > NUM_NODES and {each["by"] for each in false} == {CALLED}
    whys = {each["why"].split(" of round")[0].split(" on slice")[0] for each in false}
    assert whys <= {"the report", "no report"}


def test_a_false_accusation_expels_nobody_and_is_logged(corpus: Corpus) -> None:
    """One shows two results of another, of which it has changed one."""

    def accusing(message: Any) -> Any:
        if isinstance(message, session_pb2.ReportRequest):
            for report in list(message.reports):
                if report.WhichOneof("report") == "reduced" and report.reduced.header:
                    false = PayloadHeader.decode(report.reduced.header)
                    victim = identity_of(2)
                    one = replace(false, sender_id=victim.node_id, sender_key=victim.public_key)
                    two = replace(one, norm=7.0)
                    shown = session_pb2.EquivocationReport(one=one.encode(), other=two.encode())
                    message.reports.add(round=report.round, equivocation=shown)
        return message

    spec = tiny(run={"min_nodes": NUM_NODES})
    lives = [Life(says=accusing if place == 1 else None) for place in range(NUM_NODES)]
    with capture_logs() as logs:
        accused = simulate(spec, lives=lives, corpus=corpus)
    assert accused.final.is_finished and not accused.final.rulings
    assert len(accused.digests) == NUM_NODES
    assert [each for each in logs if each["event"] == "an accusation proves nothing"]


def contribute_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second round on one member signs contributions that do not decode."""
    signed = PayloadSigner.signed

    def lying(self: PayloadSigner, payload: Payload) -> Payload:
        header = payload.header
        if header.kind == CONTRIBUTION and header.sender_id == LIAR and header.round > 1:
            payload = nonsense(payload)
        return signed(self, payload)

    monkeypatch.setattr(PayloadSigner, "signed", lying)


def test_who_signs_contributions_that_no_codec_takes_is_put_in_quarantine(
    clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contribute_nonsense(monkeypatch)
    attacked = run_with_receipts(corpus, tmp_path, min_nodes=NUM_NODES - 1, step_seconds=1.0)
    assert attacked.final.is_finished
    (out,) = attacked.final.rulings
    assert (out.kind, out.node_id, out.by) == (RulingKind.QUARANTINED, LIAR, "the coordinator")
    assert "does not decode, as " in out.reason
    proof = proven_by(out, run_digest=attacked.final.run_digest)
    assert proof.startswith("its reducer's signed report, and signed findings of ")
    assert attacked.final.members[LIAR].state is MemberState.QUARANTINED
    planned = [c.round for c in attacked.commits if LIAR in {a.node_id for a in c.assignments}]
    assert max(planned) <= 3, "it is out while the next round goes on"
    assert len(attacked.digests) == NUM_NODES - 1
    assert attacked.held_out[-1].loss < 1.03 * clean.held_out[-1].loss


def test_a_reducer_that_calls_an_honest_contribution_undecodable_is_the_one_that_goes(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    victim = identity_of(3).node_id
    made = Reduction.result

    def lying(self: Reduction, *, sender: Sender, **rest: Any) -> SliceResult | None:
        is_its_own = sender.signer is not None and sender.node_id == LIAR
        if is_its_own and self.plan.round > 1 and victim in self.contributions:
            false = nonsense(self.contributions[victim], is_signed_for=False)
            self = replace(self, contributions={**self.contributions, victim: false})
        return made(self, sender=sender, **rest)

    monkeypatch.setattr(Reduction, "result", lying)
    attacked = run_with_receipts(corpus, tmp_path, min_nodes=NUM_NODES - 1, step_seconds=1.0)
    assert attacked.final.is_finished
    out, back = attacked.final.rulings
    assert (out.kind, out.node_id) == (RulingKind.QUARANTINED, LIAR)
    assert "found another result" in out.reason
    assert (back.kind, back.from_round) == (RulingKind.ROLLED_BACK, 2)
    assert attacked.final.members[victim].state is not MemberState.QUARANTINED


def test_where_nobody_audits_nonsense_counts_for_nothing_and_costs_no_place(
    clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    contribute_nonsense(monkeypatch)
    spec = tiny(outer={"audit": 0.0}, run={"min_nodes": NUM_NODES})
    attacked = simulate(spec, lives=[Life()] * NUM_NODES, corpus=corpus)
    assert attacked.final.is_finished and not attacked.final.rulings
    assert attacked.held_out[-1].loss < 1.03 * clean.held_out[-1].loss
