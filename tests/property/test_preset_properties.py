"""Presets for any swarm: slower links never send more, and nothing is compressed more than it must be."""

import tomllib
from dataclasses import replace
from itertools import pairwise

from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from coordinator.presets.choosing import Given, Value, chosen, ladder
from coordinator.presets.cost import (
    GOAL,
    HostSpeeds,
    Prediction,
    Setting,
    Situation,
    predicted,
)
from coordinator.presets.settling import settled
from coordinator.presets.toml_edit import with_values
from protocol.run_spec import validated

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
    has_codec_cost=st.booleans(),
)

keys: dict[tuple[str, str], st.SearchStrategy[object]] = {
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
    return prediction.bytes_per_round / prediction.training_seconds


@examples(300)
@given(situations, givens, hosts, st.floats(1e-4, 1))
def test_a_slower_link_never_leads_to_more_bytes(
    situation: Situation, told: Given, host: HostSpeeds, factor: float
) -> None:
    fast, slow = chosen(situation, told, host), chosen(slower(situation, factor), told, host)
    # Where two settings compute equally well, the last bit of a division decides.
    most = load_of(fast.prediction) * (1 + 1e-9)
    assert load_of(slow.prediction) <= most
    assert slow.prediction.utilisation <= fast.prediction.utilisation + 1e-9 or slow.meets_goal


@examples(200)
@given(situations, givens)
def test_bytes_never_rise_along_the_ladder(situation: Situation, told: Given) -> None:
    loads = [load_of(predicted(situation, setting)) for setting in ladder(situation, told)]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(loads))


@examples(200)
@given(situations, givens, hosts)
def test_the_first_that_is_good_enough_is_chosen_or_else_the_best(
    situation: Situation, told: Given, host: HostSpeeds
) -> None:
    plan = chosen(situation, told, host)
    settings = list(ladder(situation, told))
    shares = {s: predicted(situation, s, host).utilisation for s in settings}
    if plan.meets_goal:
        before = settings[: settings.index(plan.setting)]
        assert all(shares[setting] < GOAL for setting in before)
        assert shares[plan.setting] >= GOAL
    else:
        assert shares[plan.setting] == max(shares.values()) < GOAL


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
    assert predicted(slower(situation, factor), setting).utilisation <= here.utilisation
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
