"""Presets for any swarm: what is chosen loses least or nearly, and slower links never promise less loss."""

import math
import tomllib
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.presets.choosing import HEADERS, NEAR, Plan, Value, chosen
from coordinator.presets.cost import HostSpeeds, Prediction, Setting, Situation, predicted
from coordinator.presets.costly import costs_in_words
from coordinator.presets.loss import SLOPE, SPARSE, Given, above, settings_of
from coordinator.presets.settling import settled, with_values
from protocol.run.run_files import validated
from tests.property.effort import examples

rates = st.floats(3e5, 1e11)
situations = st.builds(
    Situation,
    num_parameters=st.integers(10_000, 10**11),
    num_layers=st.integers(1, 100),
    num_nodes=st.integers(2, 300),
    down_bits_per_second=rates,
    up_bits_per_second=rates,
    round_trip_seconds=st.floats(0, 1),
    seconds_per_inner_step=st.floats(1e-3, 1e3),
    total_steps=st.integers(1, 10**7),
    congestion_control=st.sampled_from(["cubic", "bbr", None]),
)
speeds = st.floats(0.05, 100)
hosts = st.builds(
    HostSpeeds,
    apply=speeds,
    sums=speeds,
    digest=speeds,
    copy=speeds,
    codecs=st.floats(0.1, 1e3),
)

keys: dict[tuple[str, str], st.SearchStrategy[object]] = {
    ("run", "rounds"): st.integers(1, 10_000),
    ("inner", "steps"): st.integers(1, 1000),
    ("exchange", "uplink"): st.sampled_from(["fp32", "int8", "int4", "int2", "topk64"]),
    ("exchange", "downlink"): st.sampled_from(["fp32", "int8", "ec3", "sign"]),
    ("exchange", "fragments"): st.integers(1, 8),
    ("exchange", "overlap"): st.sampled_from(["none", "blend", "keep"]),
    ("exchange", "error_feedback"): st.booleans(),
}
givens = st.fixed_dictionaries({}, optional=keys)


def slower(situation: Situation, factor: float) -> Situation:
    return replace(
        situation,
        down_bits_per_second=situation.down_bits_per_second * factor,
        up_bits_per_second=situation.up_bits_per_second * factor,
    )


def load_of(prediction: Prediction) -> float:
    """Bytes that the link carries for each second of inner steps."""
    return (prediction.bytes_per_round + prediction.audit_bytes) / prediction.training_seconds


def loss_of(plan: Plan) -> float:
    """What presets choose by."""
    return plan.above.whole - SLOPE * math.log(plan.prediction.utilisation)


@examples(200)
@given(situations, givens, hosts, st.floats(1e-4, 1))
def test_a_slower_link_never_promises_less_loss(
    situation: Situation, told: Given, host: HostSpeeds, factor: float
) -> None:
    """Of what was the same choice, that is: sparse codecs come in only where links are slow."""
    fast, slow = chosen(situation, told, host), chosen(slower(situation, factor), told, host)
    if not {fast.setting.uplink, slow.setting.uplink} & SPARSE.keys():
        assert loss_of(slow) >= loss_of(fast) - NEAR - 1e-9


@examples(200)
@given(situations, givens)
def test_all_that_may_be_chosen_keeps_to_what_is_given(situation: Situation, told: Given) -> None:
    found = settings_of(situation, told)
    assert found and len(found) == len(set(found))
    for setting in found:
        assert told.get(("exchange", "uplink"), setting.uplink) == setting.uplink
        assert told.get(("exchange", "downlink"), setting.downlink) == setting.downlink
        assert told.get(("exchange", "fragments"), setting.fragments) == setting.fragments
        assert (told.get(("exchange", "overlap"), "none") == "none") or setting.has_overlap
        if ("run", "rounds") not in told:
            assert told.get(("inner", "steps"), setting.steps) == setting.steps


@examples(200)
@given(situations, givens, hosts)
def test_nothing_loses_much_less_than_what_is_chosen_and_nothing_as_good_sends_less(
    situation: Situation, told: Given, host: HostSpeeds
) -> None:
    plan = chosen(situation, told, host)
    dense = [
        (setting, predicted(situation, setting, host))
        for setting in settings_of(situation, told)
        if setting.uplink not in SPARSE
    ]
    if plan.setting.uplink in SPARSE:
        return
    losses = {
        setting: above(
            setting,
            num_nodes=situation.num_nodes,
            total_steps=situation.total_steps,
            late_steps=there.late_steps,
            inner_optimizer=situation.inner_optimizer,
        ).whole
        - SLOPE * math.log(there.utilisation)
        for setting, there in dense
    }
    least = min(losses.values())
    assert losses[plan.setting] <= least + NEAR
    sent = load_of(plan.prediction) * plan.prediction.training_seconds / plan.setting.steps
    for setting, there in dense:
        if losses[setting] < losses[plan.setting] - 1e-12:
            assert sent <= (1 + HEADERS) * (
                load_of(there) * there.training_seconds / setting.steps
            ) * (1 + 1e-9)


@examples(200)
@given(situations, givens)
def test_no_interval_is_longer_than_was_measured_for_runs_as_short(
    situation: Situation, told: Given
) -> None:
    for setting in settings_of(situation, told):
        is_fixed = {("run", "rounds"), ("inner", "steps"), ("exchange", "fragments")} & told.keys()
        assert situation.total_steps >= 16 * setting.interval or setting.interval == 1 or is_fixed


settings = st.builds(
    Setting,
    uplink=st.sampled_from(["int4", "ec2", "sign"]),
    downlink=st.sampled_from(["int4", "ec2", "sign"]),
    fragments=st.integers(1, 16),
    has_overlap=st.booleans(),
    steps=st.integers(1, 500),
)


@examples(200)
@given(situations, settings, st.floats(0.01, 1))
def test_a_prediction_is_a_share_and_worse_links_make_it_smaller(
    situation: Situation, setting: Setting, factor: float
) -> None:
    here = predicted(situation, setting)
    assert 0 < here.utilisation <= 1
    there = predicted(slower(situation, factor), setting)
    assert there.utilisation <= here.utilisation * (1 + 1e-12)
    hidden = predicted(situation, replace(setting, has_overlap=True))
    assert (
        hidden.utilisation >= predicted(situation, replace(setting, has_overlap=False)).utilisation
    )


@examples(60)
@given(
    st.integers(2, 20),
    st.sampled_from(["300kbit", "5mbit", "100mbit/20mbit", "12.5MB/s"]),
    st.sampled_from(["1ms", "200ms", "1.5s", "2m"]),
    st.integers(1, 40),
    st.integers(1, 10_000_000),
    st.sampled_from(["", 'downlink = "int8"\n', 'overlap = "keep"\n', "error_feedback = false\n"]),
)
def test_whatever_is_asked_a_run_file_comes_of_it(
    num_nodes: int, link: str, inner_step: str, num_layers: int, total_steps: int, more: str
) -> None:
    text = (
        f"[model]\nnum_layers = {num_layers}\n"
        f'[exchange]\npreset = "auto"\nlink = "{link}"\ninner_step = "{inner_step}"\n'
        f"nodes = {num_nodes}\ntotal_steps = {total_steps}\n{more}"
    )
    made = settled(text, origin="run.toml")
    assert made.spec.inner.steps == made.plan.setting.steps
    assert made.spec.exchange.fragments == made.plan.setting.fragments
    assert made.spec == validated(tomllib.loads(made.text), origin="again")


names = st.sampled_from(["a", "b", "c", "d"])
scalars: st.SearchStrategy[Value] = (
    st.integers(-(10**9), 10**9)
    | st.floats(1e-9, 1e9)
    | st.booleans()
    | st.text("xyz -_/é", max_size=6)
)


@examples(200)
@given(
    st.dictionaries(names, st.dictionaries(names, scalars, max_size=4), max_size=4),
    st.dictionaries(st.tuples(names, names), st.tuples(scalars, st.just("")), max_size=6),
    st.sets(st.tuples(names, names), max_size=3),
)
def test_editing_a_file_changes_what_is_asked_and_nothing_else(
    tables: dict[str, dict[str, Value]],
    values: dict[tuple[str, str], tuple[Value, str]],
    retired: set[tuple[str, str]],
) -> None:
    retired -= values.keys()
    text = with_values("", {(t, k): (v, "") for t in tables for k, v in tables[t].items()})
    edited = tomllib.loads(with_values(text, values, retired=retired))
    expected = {t: dict(keys) for t, keys in tables.items() if keys}
    for table, key in retired & {(t, k) for t in expected for k in expected[t]}:
        del expected[table][key]
    for (table, key), (value, _) in values.items():
        expected.setdefault(table, {})[key] = value
    assert edited == expected


@examples(200)
@given(situations, st.integers(16, 10**7), st.sampled_from(["adamw", "muon"]))
def test_what_is_chosen_is_never_said_to_cost_loss(
    situation: Situation, total_steps: int, optimizer: str
) -> None:
    situation = replace(situation, total_steps=total_steps, inner_optimizer=optimizer)
    tables: dict[str, dict[str, Value]] = {
        "run": {"min_nodes": situation.num_nodes},
        "model": {"num_layers": situation.num_layers},
        "inner": {"optimizer": optimizer},
    }
    for choice in chosen(situation).choices:
        tables.setdefault(choice.table, {})[choice.key] = choice.value
    spec = validated(tables, origin="what is chosen")
    assert list(costs_in_words(spec, num_nodes=situation.num_nodes)) == []
    fewer = spec.model_copy(update={"run": spec.run.model_copy(update={"min_nodes": 2})})
    assert list(costs_in_words(fewer)) == []
