"""Presets for any swarm: slower links never send more, and nothing is compressed more than it must be."""

import tomllib
from dataclasses import replace
from itertools import pairwise

from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from coordinator.presets.choosing import LEVEL, SOON_STEPS, Value, chosen
from coordinator.presets.cost import (
    GOAL,
    PAYLOAD_HEADER_BYTES,
    HostSpeeds,
    Prediction,
    Setting,
    Situation,
    predicted,
)
from coordinator.presets.ladder import Given, ladder
from coordinator.presets.settling import settled
from coordinator.presets.toml_edit import with_values
from protocol.run.run_spec import validated

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


def load_of(prediction: Prediction, *, headers: float = 0.0) -> float:
    """Bytes that the link carries for each second of inner steps, without so many of each round."""
    return (prediction.bytes_per_round - headers) / prediction.training_seconds


@examples(300)
@given(situations, givens, hosts, st.floats(1e-4, 1))
def test_a_slower_link_never_leads_to_more_bytes(
    situation: Situation, told: Given, host: HostSpeeds, factor: float
) -> None:
    fast, slow = chosen(situation, told, host), chosen(slower(situation, factor), told, host)
    # More fragments bring results sooner with as many bytes, but for their headers.
    headers = 2 * (situation.num_nodes - 1) * PAYLOAD_HEADER_BYTES
    most = load_of(fast.prediction, headers=headers) * (1 + 1e-6)
    # Where neither is enough, slow start may turn around two that are level.
    kept = predicted(slower(situation, factor), fast.setting, host)
    is_level = kept.utilisation > LEVEL**2 * slow.prediction.utilisation and not slow.meets_goal
    assert load_of(slow.prediction, headers=headers) <= most or is_level
    best = fast.prediction.utilisation / LEVEL + 1e-9
    assert slow.prediction.utilisation <= best or slow.meets_goal


@examples(200)
@given(situations, givens)
def test_bytes_never_rise_along_the_ladder(situation: Situation, told: Given) -> None:
    """Of whole intervals, that is: fragments of them add headers."""
    loads = [load_of(predicted(situation, rung[0])) for rung in ladder(situation, told)]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(loads))


@examples(200)
@given(situations, givens, hosts)
def test_the_first_that_is_good_enough_is_chosen_or_else_the_best(
    situation: Situation, told: Given, host: HostSpeeds
) -> None:
    plan = chosen(situation, told, host)
    rungs = [
        {setting: predicted(situation, setting, host) for setting in rung}
        for rung in ladder(situation, told)
    ]
    best = [max(each.utilisation for each in rung.values()) for rung in rungs]
    place = next(place for place, rung in enumerate(rungs) if plan.setting in rung)
    if plan.meets_goal:
        # Who comes before and reaches the goal too is the same but for a finer codec, and late.
        for earlier, share in zip(rungs[:place], best[:place], strict=True):
            soonest = min(
                s.late_steps for s in earlier.values() if s.utilisation >= min(GOAL, share)
            )
            is_late = soonest > max(SOON_STEPS, plan.setting.interval // 2)
            is_alike = next(iter(earlier)).interval == plan.setting.interval
            assert share < GOAL or (is_late and is_alike)
    else:
        assert max(best) < GOAL
        assert plan.prediction.utilisation >= LEVEL * max(best)
    sooner = [
        setting
        for setting, each in rungs[place].items()
        if each.late_steps < plan.prediction.late_steps
        and each.utilisation >= min(GOAL, best[place])
    ]
    assert not sooner or plan.prediction.late_steps <= SOON_STEPS


@examples(200)
@given(situations, givens)
def test_fragments_never_change_how_often_parameters_are_exchanged(
    situation: Situation, told: Given
) -> None:
    usual = 0
    for rung in ladder(situation, told):
        assert len({setting.interval for setting in rung}) == 1
        usual = usual or rung[0].interval
        if rung[0].interval > usual:
            assert situation.total_steps >= 16 * rung[0].interval or ("run", "rounds") in told


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
