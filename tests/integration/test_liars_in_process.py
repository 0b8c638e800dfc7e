"""Liars in a whole swarm, by production's code: the run learns on, and who shouts is left out."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from google.protobuf.message import Message
from structlog.testing import capture_logs

from coordinator.swarm.conviction import MOST_AGAINST
from coordinator.swarm.members import Against, MemberState
from coordinator.swarm.slices import MOST_TIMES_USUAL
from coordinator.swarm.takeover import (
    SILENT_LEAST_SECONDS,
    UNMADE_AGAIN_LEAST_SECONDS,
    UNMADE_LEAST_SECONDS,
)
from coordinator.swarm.weighing import BRIEF_TRIAL_SECONDS, LEAST_TRIAL_SECONDS, TRIAL_MARGIN
from lab.simulation.swarm import Life, SimulatedRun, identity_of, simulate
from node.disk.round_folder import Retention
from node.exchange.codecs.codec import CodecError
from node.exchange.giving import Push, Pushes
from node.exchange.outer import Outer
from node.exchange.owing import Owing
from node.exchange.reduction import Reduction, Sender, SliceResult
from node.exchange.round import transition
from node.exchange.round.state import (
    TIMES_OTHERS,
    TRAINED_LEAST_SECONDS,
    TRAINED_TIMES_OTHERS,
    Tell,
)
from node.island.data.dataset import Corpus
from node.outer_state import Vector
from protocol.trust.evidence import proven_by
from protocol.trust.receipts import PayloadSigner, Receipt
from protocol.trust.rulings import RulingKind
from protocol.v1 import session_pb2
from protocol.wire.messages import LeftOutSeen
from protocol.wire.payload import CONTRIBUTION, RESULT, Payload, PayloadHeader
from protocol.wire.rounds import OWN_LOOP, WHOLE, ContributionDigest, Digest, NodeId
from tests.tiny_runs import tiny

NUM_NODES = 5
LIAR, CALLED = identity_of(1).node_id, "node-2"


def run(corpus: Corpus, *, screening: bool = True) -> SimulatedRun:
    spec = tiny(outer={"screening": screening}, run={"min_nodes": NUM_NODES})
    return simulate(spec, lives=[Life()] * NUM_NODES, corpus=corpus)


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


@pytest.fixture(scope="module")
def clean(corpus: Corpus) -> SimulatedRun:
    return run(corpus)


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
    whole = "a part of this node's work does not count, and is let go"
    told = [each["next_step"] for each in logs if each["event"].startswith(whole)]
    assert told and "whether this node's data" in told[0]
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


LONG = {"train": 600, "contribute": 660, "commit": 720, "apply": 60, "lease": 15}
SHORT = {"train": 20, "contribute": 30, "commit": 40, "apply": 10, "lease": 15}
"""Deadlines; a round takes five virtual seconds where nobody is waited for."""


def seconds_with_an_idler(corpus: Corpus, idler: Life, *, rounds: int = 8) -> list[float]:
    """How long each round but the last takes; all rounds but the first have the idler's lease."""
    spec = tiny(run={"rounds": rounds, "min_nodes": NUM_NODES - 1}, deadlines=SHORT)
    honest = Life(seconds_per_inner_step=1.0)
    lives = [idler if place == 1 else honest for place in range(NUM_NODES)]
    attacked = simulate(spec, lives=lives, corpus=corpus, within_seconds=1000)
    assert attacked.final.is_finished
    assert all(outcome.digest is not None for c in attacked.commits for outcome in c.slices)
    assert any(LIAR in {a.node_id for a in c.assignments} for c in attacked.commits), "it idles"
    return [after - before for before, after in pairwise(attacked.begins)]


IDLER = Life(seconds_per_inner_step=1.0, is_liar=True, absences=((500.0, None),))


def test_who_keeps_its_lease_and_reports_nothing_lengthens_a_first_round_by_a_bounded_factor(
    corpus: Corpus,
) -> None:
    def silent(message: Any) -> Any:
        if isinstance(message, session_pb2.ReportRequest):
            del message.reports[:]
        return message

    seconds = seconds_with_an_idler(corpus, replace(IDLER, says=silent))
    most = max(TRIAL_MARGIN * 5.0, 5.0 + LEAST_TRIAL_SECONDS)
    assert max(seconds) <= most + 0.01 < SHORT["train"]
    assert sorted(seconds)[-2] <= 5.0 + BRIEF_TRIAL_SECONDS + 0.01, "and then nobody waits for long"


Keeps = Callable[[PayloadHeader, NodeId], bool]
"""Whether the liar keeps a contribution of its own from a reducer."""

FROM_ONE = identity_of(2).node_id


@pytest.mark.parametrize(
    ("keeps", "most_longer"),
    [
        pytest.param(lambda header, peer: True, 2, id="from all"),
        pytest.param(
            lambda header, peer: peer == FROM_ONE, 2, id="from one", marks=pytest.mark.nightly
        ),
        pytest.param(
            lambda header, peer: header.round % 3 == 0,
            5,
            id="in each third round",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            lambda header, peer: peer == identity_of(2 + header.round % 3).node_id,
            13,
            id="from one after the other",
        ),
    ],
)
def test_who_says_that_it_has_trained_and_keeps_its_contributions_lengthens_one_round_by_less_than_half(
    keeps: Keeps, most_longer: int, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its own work into its own slices, so all results do not lack it."""
    start = Pushes.start

    def keeping(self: Pushes, push: Push) -> None:
        header = push.payload.header
        is_own = (header.sender_id, header.kind) == (LIAR, CONTRIBUTION)
        if not (is_own and keeps(header, push.peer)):
            start(self, push)

    monkeypatch.setattr(Pushes, "start", keeping)
    seconds = seconds_with_an_idler(corpus, IDLER, rounds=24)
    long = [took for took in seconds if took > TIMES_OTHERS * 5 + 0.01]
    most = max(TRAINED_TIMES_OTHERS * 5, 5 + TRAINED_LEAST_SECONDS)
    assert len(long[:17]) == 1 and max(seconds) <= most + 0.01
    assert sum(took > 5.01 for took in seconds) <= most_longer


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


def nonsense(payload: Payload, *, is_signed_for: bool = True) -> Payload:
    """The same with a body of the right size that no codec takes, and its digest where that is asked for."""
    body = b"\xff" * len(payload.body)
    if not is_signed_for:
        return Payload(header=payload.header, body=body)
    header = replace(payload.header, body_digest=Digest(blake3(body).digest()))
    return Payload(header=header, body=body)


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


def results_that_do_not_decode(
    monkeypatch: pytest.MonkeyPatch, *, to: Callable[[NodeId], bool] = lambda peer: True
) -> None:
    """From the second round on the liar signs and reports nonsense; `to` says who is sent it."""
    result_of, start = Outer.result_of, Pushes.start

    def lying(self: Outer, reduction: Reduction, fragment: int) -> SliceResult | None:
        made = result_of(self, reduction, fragment)
        if made is None or self.node_id != LIAR or reduction.plan.round < 2:
            return made
        false = nonsense(made.payload)
        header = replace(false.header, process_id=made.payload.header.process_id)
        return replace(made, payload=Payload(header=header.signed(identity_of(1)), body=false.body))

    def sending(self: Pushes, push: Push) -> None:
        header = push.payload.header
        is_lie = (header.kind, header.sender_id) == (RESULT, LIAR) and header.round > 1
        if not is_lie or to(push.peer):
            start(self, push)

    monkeypatch.setattr(Outer, "result_of", lying)
    monkeypatch.setattr(Pushes, "start", sending)


def seconds_of(attacked: SimulatedRun) -> list[float]:
    return [after - before for before, after in pairwise(attacked.begins)]


@pytest.mark.parametrize("audit", [0.05, 0.0])
def test_who_makes_results_that_do_not_decode_is_put_out_in_the_same_round_and_nobody_waits(
    audit: float, clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    results_that_do_not_decode(monkeypatch)
    spec = tiny(outer={"audit": audit}, run={"min_nodes": NUM_NODES - 1}, deadlines=SHORT)
    life = Life(seconds_per_inner_step=1.0)
    lives = [IDLER if place == 1 else life for place in range(NUM_NODES)]
    attacked = simulate(spec, lives=lives, corpus=corpus, within_seconds=1000)
    assert attacked.final.is_finished
    (out,) = attacked.final.rulings
    assert (out.kind, out.node_id, out.by) == (RulingKind.QUARANTINED, LIAR, "the coordinator")
    assert "of round 2 that does not decode, as " in out.reason
    proof = proven_by(out, run_digest=attacked.final.run_digest)
    assert proof.startswith("its signed result, which ")
    assert max(seconds_of(attacked)) < 5 + 1, "as long as a clean round, and the slice once more"
    assert all(outcome.digest is not None for c in attacked.commits for outcome in c.slices)
    assert attacked.held_out[-1].loss < 1.03 * clean.held_out[-1].loss


@pytest.mark.parametrize("keeps_from", ["all", pytest.param("most", marks=pytest.mark.nightly)])
def test_who_keeps_its_results_has_another_one_make_them_and_no_round_lasts_to_its_deadline(
    keeps_from: str, clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Pushes.start

    def keeping(self: Pushes, push: Push) -> None:
        header = push.payload.header
        is_kept = (header.kind, header.sender_id) == (RESULT, LIAR) and header.round > 1
        if not is_kept or (keeps_from == "most" and push.peer == FROM_ONE):
            start(self, push)

    monkeypatch.setattr(Pushes, "start", keeping)
    spec = tiny(run={"min_nodes": NUM_NODES - 1}, deadlines=LONG)
    life = Life(seconds_per_inner_step=1.0)
    lives = [IDLER if place == 1 else life for place in range(NUM_NODES)]
    attacked = simulate(spec, lives=lives, corpus=corpus, within_seconds=1000)
    assert attacked.final.is_finished and not attacked.final.rulings
    assert max(seconds_of(attacked)) <= 5 + SILENT_LEAST_SECONDS + 0.5
    assert all(outcome.digest is not None for c in attacked.commits for outcome in c.slices)
    assert attacked.final.members[LIAR].audits.num_void > 0
    assert attacked.held_out[-1].loss < 1.03 * clean.held_out[-1].loss


def test_who_makes_no_results_lengthens_a_round_by_half_and_the_next_ones_by_a_little(
    clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept its place among the reducers, and each round lasted five times as long."""
    made = Outer.result_of

    def nothing(self: Outer, reduction: Reduction, fragment: int) -> SliceResult | None:
        if self.node_id == LIAR and reduction.plan.round > 1:
            raise CodecError("it makes none")
        return made(self, reduction, fragment)

    def says_nothing(message: Message) -> Message:
        if isinstance(message, session_pb2.ReportRequest):
            kept = [
                each for each in message.reports if each.round < 2 or not each.HasField("reduced")
            ]
            del message.reports[:]
            message.reports.extend(kept)
        return message

    monkeypatch.setattr(Outer, "result_of", nothing)
    spec = tiny(run={"min_nodes": NUM_NODES - 1, "rounds": 8}, deadlines=LONG)
    life = Life(seconds_per_inner_step=1.0)
    idler = replace(IDLER, says=says_nothing)
    lives = [idler if place == 1 else life for place in range(NUM_NODES)]
    attacked = simulate(spec, lives=lives, corpus=corpus, within_seconds=1000)
    assert attacked.final.is_finished and not attacked.final.rulings
    assert all(outcome.digest is not None for c in attacked.commits for outcome in c.slices)
    longest, *others = sorted(seconds_of(attacked), reverse=True)
    assert 5 < longest <= 5 + UNMADE_LEAST_SECONDS + 0.5
    assert others[0] <= 5 + UNMADE_AGAIN_LEAST_SECONDS + 0.5
    assert attacked.final.members[LIAR].audits.back_at_round == 0, "others could have it rest else"
    assert attacked.held_out[-1].loss < 1.03 * clean.held_out[-1].loss


def test_who_says_that_good_results_do_not_decode_harms_nobody(
    clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses whatever comes to it, of everybody."""
    check = Outer.check_result

    def lying(self: Outer, payload: Payload, own: Payload | None, *, drawn: int) -> float | None:
        if self.node_id == LIAR and payload.header.round > 1:
            raise CodecError("it says so")
        return check(self, payload, own, drawn=drawn)

    monkeypatch.setattr(Outer, "check_result", lying)
    spec = tiny(run={"min_nodes": NUM_NODES - 1}, deadlines=SHORT)
    life = Life(seconds_per_inner_step=1.0)
    lives = [IDLER if place == 1 else life for place in range(NUM_NODES)]
    with capture_logs() as logs:
        attacked = simulate(spec, lives=lives, corpus=corpus, within_seconds=1000)
    said = [each for each in logs if each["event"] == "a result does not decode, says a member"]
    assert said and {each["by"] for each in said} == {CALLED}
    assert len(said) == len({(each["round"], each["slice"]) for each in said}), "once for each"
    assert attacked.final.is_finished and not attacked.final.rulings
    assert all(outcome.digest is not None for c in attacked.commits for outcome in c.slices)
    assert max(seconds_of(attacked)) < 5 + 1
    honest = [m for n, m in attacked.final.members.items() if n != LIAR]
    assert all(m.audits.num_disputed == m.audits.num_void == 0 for m in honest)
    assert not attacked.final.members[LIAR].work.by_stretch, "what it says counts no more"


def test_who_gives_some_a_good_result_and_others_nonsense_is_expelled_by_its_own_signatures(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Pushes.start

    def lying(self: Pushes, push: Push) -> None:
        header = push.payload.header
        is_lie = (header.kind, header.sender_id) == (RESULT, LIAR) and header.round > 1
        if is_lie and push.peer == identity_of(3).node_id:
            false = nonsense(push.payload)
            signed = false.header.signed(identity_of(1))
            push = replace(push, payload=Payload(header=signed, body=false.body))
        start(self, push)

    monkeypatch.setattr(Pushes, "start", lying)
    spec = tiny(run={"min_nodes": NUM_NODES - 1}, deadlines=SHORT)
    life = Life(seconds_per_inner_step=1.0)
    lives = [IDLER if place == 1 else life for place in range(NUM_NODES)]
    attacked = simulate(spec, lives=lives, corpus=corpus, within_seconds=1000)
    assert attacked.final.is_finished
    (expelled,) = attacked.final.rulings
    assert (expelled.kind, expelled.node_id) == (RulingKind.EXPELLED, LIAR)
    assert proven_by(expelled, run_digest=attacked.final.run_digest) == "its two signatures"
    assert max(seconds_of(attacked)) < 5 + 1


def test_where_nobody_audits_nonsense_counts_for_nothing_and_costs_no_place(
    clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    contribute_nonsense(monkeypatch)
    spec = tiny(outer={"audit": 0.0}, run={"min_nodes": NUM_NODES})
    attacked = simulate(spec, lives=[Life()] * NUM_NODES, corpus=corpus)
    assert attacked.final.is_finished and not attacked.final.rulings
    assert attacked.held_out[-1].loss < 1.03 * clean.held_out[-1].loss
