"""Members that keep back what others wait for, or make what nobody can use: rounds go on without them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message
from structlog.testing import capture_logs

from coordinator.swarm.standing import BRIEF_TRIAL_SECONDS, LEAST_TRIAL_SECONDS, TRIAL_MARGIN
from coordinator.swarm.takeover import SILENT, UNMADE, UNMADE_AGAIN
from lab.simulation.swarm import Life, SimulatedRun, identity_of
from node.exchange.codecs.codec import CodecError
from node.exchange.giving import Push, Pushes
from node.exchange.outer import Outer
from node.exchange.reduction import Reduction, SliceResult
from node.exchange.round.transition import TIMES_OTHERS, TRAINED_LEAST_SECONDS, TRAINED_TIMES_OTHERS
from node.island.data.dataset import Corpus
from protocol.trust.evidence import proven_by
from protocol.trust.rulings import RulingKind
from protocol.v1 import session_pb2
from protocol.wire.payload import CONTRIBUTION, RESULT, Payload, PayloadHeader
from protocol.wire.rounds import NodeId
from tests.integration.liars_scene import (
    CALLED,
    IDLER,
    LIAR,
    LONG,
    SHORT,
    has_void_slices,
    nonsense,
    run_with_an_idler,
    seconds_of,
)


def seconds_with_an_idler(corpus: Corpus, idler: Life, *, rounds: int = 8) -> list[float]:
    """How long each round but the last takes; all rounds but the first have the idler's lease."""
    attacked = run_with_an_idler(corpus, idler, rounds=rounds)
    assert not has_void_slices(attacked)
    assert any(LIAR in {a.node_id for a in c.assignments} for c in attacked.commits), "it idles"
    return seconds_of(attacked)


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


@pytest.mark.parametrize("audit", [0.05, 0.0])
def test_who_makes_results_that_do_not_decode_is_put_out_in_the_same_round_and_nobody_waits(
    audit: float, clean: SimulatedRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    results_that_do_not_decode(monkeypatch)
    attacked = run_with_an_idler(corpus, outer={"audit": audit})
    (out,) = attacked.final.rulings
    assert (out.kind, out.node_id, out.by) == (RulingKind.QUARANTINED, LIAR, "the coordinator")
    assert "of round 2 that does not decode, as " in out.reason
    proof = proven_by(out, run_digest=attacked.final.run_digest)
    assert proof.startswith("its signed result, which ")
    assert max(seconds_of(attacked)) < 5 + 1, "as long as a clean round, and the slice once more"
    assert not has_void_slices(attacked)
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
    attacked = run_with_an_idler(corpus, deadlines=LONG)
    assert not attacked.final.rulings
    assert max(seconds_of(attacked)) <= 5 + SILENT.least_seconds + 0.5
    assert not has_void_slices(attacked)
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
    idler = replace(IDLER, says=says_nothing)
    attacked = run_with_an_idler(corpus, idler, deadlines=LONG, rounds=8)
    assert not attacked.final.rulings
    assert not has_void_slices(attacked)
    longest, *others = sorted(seconds_of(attacked), reverse=True)
    assert 5 < longest <= 5 + UNMADE.least_seconds + 0.5
    assert others[0] <= 5 + UNMADE_AGAIN.least_seconds + 0.5
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
    with capture_logs() as logs:
        attacked = run_with_an_idler(corpus)
    said = [each for each in logs if each["event"] == "a result does not decode, says a member"]
    assert said and {each["by"] for each in said} == {CALLED}
    assert len(said) == len({(each["round"], each["slice"]) for each in said}), "once for each"
    assert not attacked.final.rulings
    assert not has_void_slices(attacked)
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
    attacked = run_with_an_idler(corpus)
    (expelled,) = attacked.final.rulings
    assert (expelled.kind, expelled.node_id) == (RulingKind.EXPELLED, LIAR)
    assert proven_by(expelled, run_digest=attacked.final.run_digest) == "its two signatures"
    assert max(seconds_of(attacked)) < 5 + 1
