"""What amendments make of a run's rules, and how a schedule goes on from where it is."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import steering
from coordinator.rules import rules_of
from node.exchange.outer_optimizer import outer_rules_of
from node.island.parallel.auto_mesh import node_bytes
from protocol.errors import AtollError, ConfigError, UsageError
from protocol.run.amendments import (
    AMENDABLE,
    RATES,
    TEXTS,
    amended,
    changes_codecs,
    changes_of,
    in_force,
    refuse_at_rest,
    refuse_leaps,
    span_of,
    still_in_force,
    with_versions,
)
from protocol.run.run_files import validated
from protocol.run.run_spec import RunSpec
from protocol.run.schedule import Position, Span, share_of_peak
from protocol.trust.rulings import Ruling, RulingKind
from tests.unit.rulings_scene import amendment, ruling_of
from tests.unit.work_scene import inner_work

SPEC = validated({"run": {"rounds": 10}}, origin="the test")


def test_an_amendment_holds_from_its_round_on_and_the_digest_of_the_run_stays() -> None:
    rulings = [amendment(3, outer__learning_rate=0.5), amendment(5, outer__learning_rate=0.4)]
    rates = [in_force(SPEC, rulings, round=round).outer.learning_rate for round in range(1, 7)]
    assert rates == [0.7, 0.7, 0.5, 0.5, 0.4, 0.4]
    assert in_force(SPEC, rulings).outer.learning_rate == 0.4
    assert in_force(SPEC, rulings, round=2) == SPEC


def test_the_amendments_that_docs_and_help_show_can_be_made_of_a_plain_run_file() -> None:
    root = Path(steering.__file__).parents[1]
    texts = [path.read_text() for path in (root / "docs").glob("*.md")]
    shown = re.findall(
        r"atoll run amend ((?:[\w.]+=\S+ ?)+)", "\n".join([*texts, steering.amend.help or ""])
    )
    assert len(shown) > 4
    for words in shown:
        changes = changes_of([word.rstrip("`.") for word in words.split()])
        assert amended(SPEC, changes)


def test_the_share_of_audits_changes_at_the_coordinator_alone() -> None:
    """Nodes go by whether anything is audited, so a share above 0 stays above 0, and 0 stays 0."""
    more = amended(SPEC, (("outer.audit", 0.5),))
    assert rules_of(more) == replace(rules_of(SPEC), audited_share=0.5)
    assert str(outer_rules_of(more).merging) == str(outer_rules_of(SPEC).merging)
    assert node_bytes(more) == node_bytes(SPEC)
    unaudited = validated({"outer": {"audit": 0}}, origin="the test")
    for spec, share, advice in ((SPEC, 0, "outer.audit=0.2"), (unaudited, 0.1, "atoll node fork")):
        with pytest.raises(UsageError, match="audit cannot change") as refused:
            amended(spec, (("outer.audit", share),))
        assert refused.value.next_step is not None and advice in refused.value.next_step


def test_what_was_amended_again_is_not_told_any_more() -> None:
    rulings = [
        amendment(3, 1, run__rounds=300),
        amendment(4, 2, inner__learning_rate=0.02, inner__steps=40),
        amendment(6, 3, inner__learning_rate=0.002),
        amendment(2, 4, run__rounds=200),  # brought back late
    ]
    told = [(one.number, dict(one.changes)) for one in still_in_force(rulings)]
    assert told == [
        (1, {"run.rounds": 300}),
        (2, {"inner.steps": 40}),
        (3, {"inner.learning_rate": 0.002}),
    ]
    kept = in_force(SPEC, still_in_force(rulings))
    assert kept == in_force(SPEC, rulings)


def test_what_is_brought_back_late_holds_in_the_order_of_its_round() -> None:
    rulings = [amendment(5, 1, run__rounds=30), amendment(3, 2, run__rounds=20)]
    assert in_force(SPEC, rulings).run.rounds == 30


def test_what_was_amended_before_the_run_went_back_holds_from_the_first_undone_round_on() -> None:
    back = ruling_of(RulingKind.ROLLED_BACK, 2, from_round=4, last_round=8, incarnation=1)
    before = [amendment(7, 1, outer__learning_rate=0.5, run__rounds=20)]
    assert in_force(SPEC, before, round=4) == SPEC
    rulings = [*before, back, amendment(4, 3, outer__learning_rate=0.2)]
    rates = [in_force(SPEC, rulings, round=round).outer.learning_rate for round in (3, 4, 7, 9)]
    assert rates == [0.7, 0.2, 0.2, 0.2], "the later of two holds"
    spans = [span_of(SPEC, rulings, round) for round in range(3, 7)]
    assert (spans[0].begin, spans[0].end) == (0.2, pytest.approx(0.3))
    assert all(one.end == pytest.approx(other.begin) for one, other in pairwise(spans))
    assert spans[1].end - spans[1].begin == pytest.approx(0.7 / 17)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("run.rounds", UsageError, "is no KEY=VALUE"),
        ("run.rounds=many", UsageError, "'many' is no value for run.rounds"),
        ("run.rounds=[1]", UsageError, "is no value"),
        ("run.rounds=0", ConfigError, "rounds = 0"),
        ("run.rounds=2.5", ConfigError, "rounds = 2.5"),
        ("run.seed=4", UsageError, "it says which run this is"),
        ("exchange.fragments=2", UsageError, "what nodes still owe is laid out by it"),
        ("exchange.uplink='int5'", UsageError, "there is no codec 'int5' for exchange.uplink"),
        ("exchange.uplink=int5", UsageError, "there is no codec 'int5' for exchange.uplink"),
        ("outer.merge=median", ConfigError, "merge = 'median'"),
        ("outer.merge=a mean", UsageError, "'a mean' is no value for outer.merge"),
        ("exchange.uplink=4", UsageError, "there is no codec 4"),
        ("exchange.residual_decay=2", ConfigError, "residual_decay = 2"),
        ("exchange.downlink='int8/2'", UsageError, "no codec 'int8/2' .* in this release"),
        ("model.context=9", UsageError, "the weights have its shapes"),
        ("outer.rate=9", UsageError, "no key 'outer.rate'"),
        ("rounds=9", UsageError, r"no key 'rounds'; did you mean 'run\.rounds'\?"),
        ("exchnge.downlink=int8", UsageError, r"did you mean 'exchange\.downlink'\?"),
        ("deadlines.train=700", ConfigError, "deadlines must rise"),
        ("inner.muon_learning_rate=0.1", UsageError, "its optimizer is adamw"),
    ],
)
def test_what_cannot_change_says_why(text: str, kind: type[AtollError], words: str) -> None:
    with pytest.raises(kind, match=words) as refused:
        amended(SPEC, changes_of([text]))
    assert refused.value.next_step and "atoll init" not in refused.value.next_step


def test_who_would_change_the_data_hears_of_a_fork_and_of_taking_samples_out() -> None:
    with pytest.raises(UsageError, match="leased samples are places") as refused:
        amended(SPEC, changes_of(['data.source="text"']))
    assert refused.value.next_step is not None
    assert "atoll node fork" in refused.value.next_step
    assert "atoll data skip" in refused.value.next_step


@pytest.mark.parametrize("key", RATES)
def test_a_rate_that_leaps_is_refused_with_the_most_that_it_may_be(key: str) -> None:
    table, _, name = key.partition(".")
    tables = {
        "inner": {"optimizer": "muon", "muon_learning_rate": 0.02},
        "outer": {"learning_rate": 0.02},
    }
    muon = validated(tables, origin="the test")
    before = getattr(getattr(muon, table), name)
    with pytest.raises(UsageError, match="times what is in force") as refused:
        refuse_leaps(muon, amended(muon, ((key, 11 * before),)))
    advised = changes_of([str(refused.value.next_step).rpartition(" ")[2].rstrip("'")])
    raised = amended(muon, advised)
    refuse_leaps(muon, raised)
    refuse_leaps(raised, muon)  # it may fall as far as one likes


@pytest.mark.parametrize(
    "text", ["exchange.uplink=ec2", "exchange.uplink='ec2'", "outer.merge = agreeing"]
)
def test_a_text_comes_with_the_quotes_of_toml_or_without(text: str) -> None:
    ((key, value),) = changes_of([text])
    assert value == ("agreeing" if key == "outer.merge" else "ec2")


def test_texts_without_quotes_are_all_keys_whose_values_are_texts() -> None:
    tables = SPEC.model_dump()
    values = {key: tables[key.partition(".")[0]][key.partition(".")[2]] for key in AMENDABLE}
    assert {key for key, value in values.items() if isinstance(value, str)} == TEXTS


def test_the_decay_of_errors_is_amended_and_is_no_codec() -> None:
    changes = with_versions(changes_of(["exchange.residual_decay=0.95"]))
    assert changes == (("exchange.residual_decay", 0.95),)
    assert amended(SPEC, changes).exchange.residual_decay == 0.95
    ruling = amendment(4, 1, exchange__residual_decay=0.95)
    assert not changes_codecs(ruling)
    decays = [in_force(SPEC, [ruling], round=round).exchange.residual_decay for round in (3, 4)]
    assert decays == [1.0, 0.95]


def test_steps_of_a_run_whose_nodes_share_tokens_cannot_change() -> None:
    tables = {
        "run": {"rounds": 4},
        "inner": {"round_tokens": 64 * 8 * 100},
        "model": {"context": 64},
    }
    spec = validated(tables, origin="the test")
    with pytest.raises(UsageError, match=r"share .inner. round_tokens"):
        amended(spec, (("inner.steps", 3),))


def spans(spec: RunSpec, rulings: list[Ruling], last: int) -> list[Span]:
    return [span_of(spec, rulings, round) for round in range(1, last + 1)]


@given(
    rounds=st.integers(2, 40),
    extensions=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), max_size=4),
)
def test_a_schedule_goes_on_without_a_jump_and_ends_with_the_last_round(
    rounds: int, extensions: list[tuple[int, int]]
) -> None:
    spec = validated({"run": {"rounds": rounds}}, origin="the test")
    rulings: list[Ruling] = []
    total, earliest = rounds, 1
    for step, more in extensions:
        from_round = min(earliest + step, total)
        total += more
        rulings.append(amendment(from_round, len(rulings) + 1, run__rounds=total))
        earliest = from_round
    told = spans(spec, rulings, total)
    assert told[0].begin == 0.0 and told[-1].end == 1.0
    assert all(
        before.end == pytest.approx(after.begin, abs=1e-12) for before, after in pairwise(told)
    )
    assert all(span.begin < span.end for span in told)


def test_a_run_without_amendments_has_the_spans_of_its_rounds() -> None:
    assert spans(SPEC, [], 10) == [Span(begin=r / 10, end=(r + 1) / 10) for r in range(10)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_run_that_is_extended_after_its_end_stays_at_the_rate_that_it_ended_with(
    schedule: str,
) -> None:
    spec = validated({"run": {"rounds": 10}, "inner": {"schedule": schedule}}, origin="the test")
    longer = [amendment(11, run__rounds=20)]
    told = spans(spec, longer, 20)
    assert told[10:] == [Span(begin=1.0, end=1.0)] * 10
    after = Position(progress=told[10].begin, tokens=0.0)
    assert share_of_peak(spec.inner, after) == pytest.approx(0.1)
    assert share_of_peak(spec.inner, after, final_fraction=0.3) == pytest.approx(0.3)


def test_rounds_are_not_added_where_the_rate_has_fallen_to_0() -> None:
    at_rest = validated({"inner": {"final_fraction": 0.0}}, origin="the test")
    refuse_at_rest(at_rest, progress=0.99)
    refuse_at_rest(amended(at_rest, (("inner.final_fraction", 0.1),)), progress=1.0)
    constant = validated(
        {"inner": {"final_fraction": 0.0, "schedule": "constant"}}, origin="the test"
    )
    refuse_at_rest(constant, progress=1.0)
    with pytest.raises(UsageError, match="train nothing") as refused:
        refuse_at_rest(at_rest, progress=1.0)
    assert "inner.final_fraction=0.1" in str(refused.value.next_step)


def test_learning_rates_of_an_extended_run_follow_the_span_of_their_round() -> None:
    rulings = [amendment(6, run__rounds=20)]
    span = span_of(SPEC, rulings, 6)
    assert (span.begin, span.end) == (0.5, pytest.approx(0.5 + 0.5 / 15))
    work = inner_work(2, round=6, num_samples=16, progress_begin=span.begin, progress_end=span.end)
    middle = work.position(SPEC, 0).progress
    assert span.begin < middle < span.end
    assert middle == pytest.approx(span.begin + (span.end - span.begin) / 4)
