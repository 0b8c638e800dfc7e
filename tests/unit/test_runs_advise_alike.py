"""All ways of making a run give the same advice: the template, the demo and the presets."""

import tomllib
from pathlib import Path

import pytest

from coordinator.config import RUN_TEMPLATE
from coordinator.presets.choosing import chosen
from coordinator.presets.composing import BESIDE_MUON_TIMES, MUON_TIMES, NAMED_MODELS
from coordinator.presets.cost import Situation
from coordinator.rules import rules_of
from node.demo.command import DEFAULT_ROUNDS, RUN_FILE
from node.exchange.outer_optimizer import rate_scale_of
from protocol.errors import ConfigError
from protocol.run.run_files import load_run_file, validated
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import Contributor, NodeId

TEMPLATE = validated(tomllib.loads(RUN_TEMPLATE), origin="template")
DEMO = validated(
    tomllib.loads(RUN_FILE.format(seed=0, rounds=DEFAULT_ROUNDS, num_nodes=3)), origin="demo"
)


def test_the_walk_trains_with_the_settings_of_the_demo() -> None:
    for table in ("model", "data", "inner", "outer", "exchange"):
        assert getattr(TEMPLATE, table) == getattr(DEMO, table), table
    assert TEMPLATE.run.min_nodes == 2, "the walk invites two"


@pytest.mark.parametrize("spec", [TEMPLATE, DEMO], ids=["template", "demo"])
def test_the_outer_optimizer_is_what_a_preset_takes_for_as_many_exchanges(spec: RunSpec) -> None:
    situation = Situation(
        num_parameters=spec.num_parameters,
        num_layers=spec.num_layers,
        num_nodes=spec.run.min_nodes,
        down_bits_per_second=100e6,
        up_bits_per_second=100e6,
        round_trip_seconds=0.1,
        seconds_per_inner_step=0.1,
        total_steps=spec.run.rounds * spec.inner.steps,
    )
    plan = chosen(situation, {("run", "rounds"): spec.run.rounds, ("inner", "steps"): 15})
    told = {c.key: c.value for c in plan.choices if c.table == "outer" and c.key != "audit"}
    assert told == spec.outer.model_dump(include=set(told))
    assert {spec.exchange.uplink, spec.exchange.downlink} == {"int4"}


def test_the_smallest_size_is_the_templates_model_with_its_batch_and_rates() -> None:
    named, inner = NAMED_MODELS["0.2m"], TEMPLATE.inner
    assert (named.model, named.batch) == (TEMPLATE.model, inner.batch)
    assert inner.learning_rate == pytest.approx(BESIDE_MUON_TIMES * named.learning_rate)
    assert inner.muon_learning_rate == pytest.approx(MUON_TIMES * named.learning_rate)


def run_file(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_round_tokens_beside_steps_are_refused_with_both_values(tmp_path: Path) -> None:
    path = run_file(tmp_path, "[inner]\nsteps = 30\nround_tokens = 30720\n")
    with pytest.raises(
        ConfigError, match=r"\[inner\] steps = 30 and round_tokens = 30720 both say"
    ):
        load_run_file(path)
    # What a coordinator sends spells the defaults out, and is no conflict.
    spec = load_run_file(run_file(tmp_path, "[inner]\nround_tokens = 30720\n"))
    assert validated(spec.model_dump(mode="json"), origin="the wire") == spec


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (
            {"inner": {"round_tokens": 30000}},
            "round_tokens = 30000 is not whole inner steps of 1024 tokens, [inner] batch = 8 times "
            "[model] context = 128: write 29696 or 30720",
        ),
        (
            {"run": {"min_nodes": 4}, "inner": {"round_tokens": 3072}},
            "round_tokens = 3072: an inner step of each of [run] min_nodes = 4 is 4096 tokens",
        ),
    ],
)
def test_round_tokens_that_are_no_whole_steps_are_refused_with_all_keys(
    tables: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        validated(tables, origin="run.toml")
    assert words in refused.value.what


def test_shared_tokens_are_the_full_round_that_all_else_goes_by() -> None:
    spec = validated(
        {"run": {"min_nodes": 3}, "inner": {"round_tokens": 30720}, "outer": {"scaling": "sqrt"}},
        origin="run.toml",
    )
    assert (spec.round_steps, spec.node_steps) == (30, 10)
    rules = rules_of(spec)
    assert (rules.round_steps, rules.inner_steps) == (30, 10)
    full = (Contributor(node_id=NodeId("a"), samples=30720 // spec.model.context, tokens=1),)
    assert rate_scale_of(spec).of(full) == 1
