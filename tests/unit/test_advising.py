"""What 'atoll run advise' makes of a running run: by what was measured, and only what may be amended."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.presets.advising import (
    LAST_ROUNDS,
    Advice,
    advice_for,
    amendments_of,
    as_json,
    rows_of,
    rules_since,
    verdict_of,
)
from coordinator.presets.choosing import often_steps
from coordinator.presets.loss import SPARSE
from protocol.errors import TemporaryError, UsageError
from protocol.run.amendments import amended, changes_of
from protocol.run.models import Description, TensorShape
from protocol.run.run_files import validated
from protocol.run.run_spec import RunSpec
from protocol.trust.rulings import RulingKind
from protocol.v1 import session_pb2
from protocol.v1 import status_pb2 as pb
from tests.unit.rulings_scene import amendment

MBIT = 125_000.0
MODEL = {
    "hidden_size": 512,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 4,
    "ffn_size": 1408,
    "context": 512,
}


def run_of(*, rounds: int = 6000, **tables: dict[str, Any]) -> RunSpec:
    """A run of 24 million parameters."""
    run = {"rounds": rounds, "min_nodes": 3}
    return validated({"run": run, "model": MODEL, **tables}, origin="the test")


def status_of(spec: RunSpec, *, mbit: float, steps_per_second: float = 2.0) -> pb.GetStatusResponse:
    """Three nodes with such links, after a sixth of the rounds."""
    node = pb.NodeStatus(
        state=pb.NODE_STATE_READY,
        inner_steps_per_second=steps_per_second,
        link_rates=session_pb2.LinkRates(
            up_bytes_per_second=mbit * MBIT, down_bytes_per_second=3 * mbit * MBIT
        ),
    )
    run = pb.RunStatus(
        committed_round=spec.run.rounds // 6,
        total_rounds=spec.run.rounds,
        num_parameters=spec.num_parameters,
    )
    return pb.GetStatusResponse(run=run, nodes=[node] * 3)


def rounds_of(seconds: float, *, num_nodes: int = 3) -> list[pb.RoundSummary]:
    return [
        pb.RoundSummary(
            round=1000 - i,
            seconds=seconds,
            num_committed_slices=3,
            num_participants=num_nodes,
        )
        for i in range(12)
    ]


def asked(
    spec: RunSpec,
    *,
    mbit: float,
    rounds: Sequence[pb.RoundSummary] | None = None,
    first_round: int = 1,
    **status: float,
) -> Advice:
    told = status_of(spec, mbit=mbit, **status)
    return advice_for(
        spec,
        told.run,
        told.nodes,
        rounds_of(20.0) if rounds is None else rounds,
        first_round=first_round,
        round_trip_seconds=0.1,
    )


def test_links_that_carry_more_than_the_run_asks_are_used_more_often() -> None:
    spec = run_of(inner={"steps": 240}, exchange={"overlap": "keep"})
    advice = asked(spec, mbit=200, rounds=rounds_of(121.0))
    assert advice.better.setting.steps < 240
    assert advice.better.loss < advice.now.loss
    assert advice.utilisation == pytest.approx(120 / 121)


def test_a_swarm_that_waits_for_slow_links_gets_more_steps_or_fewer_bits() -> None:
    spec = run_of(inner={"steps": 16}, exchange={"uplink": "fp32", "downlink": "fp32"})
    advice = asked(spec, mbit=5, rounds=rounds_of(300.0))
    better, now = advice.better, advice.now
    assert now.prediction.utilisation < 0.5 < better.prediction.utilisation
    assert advice.utilisation == pytest.approx(8 / 300)
    assert better.prediction.bytes_per_round < now.prediction.bytes_per_round


def test_nodes_that_share_a_rounds_tokens_take_the_fewer_steps_the_more_they_are() -> None:
    tokens = 3 * 60 * run_of().tokens_per_inner_step
    spec = run_of(inner={"round_tokens": tokens})
    for num_nodes, steps in ((3, 60), (6, 30)):
        advice = asked(spec, mbit=50, rounds=rounds_of(20.0, num_nodes=num_nodes))
        assert advice.now.setting.steps == steps


def test_what_its_settings_cost_those_who_take_part_is_said() -> None:
    outer = {"optimizer": "sgd", "learning_rate": 1.0, "momentum": 0.0}
    spec = run_of(inner={"steps": 12, "optimizer": "muon"}, outer=outer)
    costs = "loss: [outer] a plain mean learns less than Nesterov's step"
    for num_nodes in (2, 4):
        advice = asked(spec, mbit=50, rounds=rounds_of(20.0, num_nodes=num_nodes))
        assert any(line.startswith(costs) for line in verdict_of(advice)) == (num_nodes > 2)
        assert bool(as_json(advice)["costs"]) == (num_nodes > 2)


def test_what_is_advised_can_be_amended_and_leaves_as_many_steps_to_train() -> None:
    spec = run_of(inner={"steps": 16}, exchange={"uplink": "fp32", "downlink": "fp32"})
    advice = asked(spec, mbit=20)
    (line,) = [line for line in verdict_of(advice) if "atoll run amend" in line]
    typed = line.partition("atoll run amend ")[2].split()
    assert typed == amendments_of(advice) == as_json(advice)["amend"]
    becomes = amended(spec, changes_of(typed))
    left = (becomes.run.rounds - 1000) * becomes.inner.steps
    assert 0 <= left - 5000 * 16 < becomes.inner.steps
    assert (becomes.exchange.uplink, becomes.inner.steps) == (
        advice.better.setting.uplink,
        advice.better.setting.steps,
    )


def test_who_takes_the_advice_is_told_to_leave_it_as_it_is() -> None:
    spec = run_of(inner={"steps": 16}, exchange={"uplink": "fp32", "downlink": "fp32"})
    advice = asked(spec, mbit=20)
    again = asked(amended(spec, changes_of(amendments_of(advice))), mbit=20)
    assert not again.changes and again.better == again.now
    assert any("leave it as it is" in line for line in verdict_of(again))
    assert [row[0] for row in rows_of(again)] == ["now", "as expected"]
    assert [row[0] for row in rows_of(advice)] == ["now", "as expected", "better"]


@pytest.mark.parametrize("num_nodes", [2, 3])
def test_a_run_with_outer_momentum_is_not_advised_to_exchange_so_often_that_it_overshoots(
    num_nodes: int,
) -> None:
    rounds = rounds_of(20.0, num_nodes=num_nodes)
    fast: dict[str, Any] = {"mbit": 9000.0, "steps_per_second": 0.01, "rounds": rounds}
    deadlines = {"train": 20_000, "contribute": 21_000, "commit": 22_000}
    with_momentum = run_of(rounds=100, inner={"steps": 60}, deadlines=deadlines)
    advice = asked(with_momentum, **fast)
    assert advice.better.setting.interval > often_steps(num_nodes) and advice.wants_fork
    assert any("atoll node fork" in line for line in verdict_of(advice))
    plain = run_of(
        rounds=100,
        inner={"steps": 60},
        deadlines=deadlines,
        outer={"optimizer": "sgd", "learning_rate": 1.0},
    )
    advice = asked(plain, **fast)
    assert advice.better.setting.interval <= often_steps(num_nodes) and not advice.wants_fork


def test_weights_that_a_function_has_drawn_are_no_steps_that_a_run_has_behind_it() -> None:
    """They have a digest, as given ones do, for one node starts with them; a fork's were trained."""
    tensor = TensorShape(name="module.weight", shape=(512, 2048))
    model = {"source": "function", "function": "net:model"}
    spec = validated({"run": {"rounds": 90, "min_nodes": 3}, "model": model}, origin="the test")

    def seldom(**told: Any) -> float:
        description = Description(tensors=(tensor,), **told)
        of_function = spec.model_copy(update={"description": description})
        return asked(of_function, mbit=100).now.above.seldom

    drawn = {"first_digest": "ab" * 32}
    assert seldom(**drawn) == seldom()
    assert seldom(**drawn, first_fragments=1) < seldom()


def test_fragments_overlap_sparse_codecs_and_shared_steps_stay_as_the_run_has_them() -> None:
    sparse = {"uplink": "topk64", "downlink": "topk256", "fragments": 4, "overlap": "keep"}
    advice = asked(run_of(inner={"steps": 40}, exchange=sparse), mbit=1000)
    assert {key for key, _ in advice.changes} <= {"inner.steps", "run.rounds"}
    assert advice.better.setting.fragments == 4 and advice.better.setting.has_overlap
    shared = run_of(inner={"steps": 40, "batch": 8, "round_tokens": 8 * 512 * 120})
    assert asked(shared, mbit=1).better.setting.steps == 40
    dense = asked(run_of(inner={"steps": 40}), mbit=0.05, steps_per_second=50.0)
    assert dense.better.setting.uplink not in SPARSE


def test_rounds_need_not_be_longer_than_the_run_s_deadlines() -> None:
    deadlines = {"train": 30, "contribute": 60, "commit": 90}
    spec = run_of(inner={"steps": 20}, deadlines=deadlines)
    advice = asked(spec, mbit=2)
    assert advice.better.prediction.training_seconds <= 30


def test_too_few_rounds_by_the_rules_in_force_and_unknown_links_are_said() -> None:
    spec = run_of()
    with pytest.raises(TemporaryError, match="2 rounds committed by the rules in force"):
        asked(spec, mbit=20, first_round=999)
    with pytest.raises(TemporaryError, match="none of 3 nodes has measured its link"):
        asked(spec, mbit=0)
    finished = status_of(spec, mbit=20)
    finished.run.phase = pb.RUN_PHASE_FINISHED
    with pytest.raises(UsageError, match="the run is finished"):
        advice_for(
            spec,
            finished.run,
            finished.nodes,
            rounds_of(20.0),
            first_round=1,
            round_trip_seconds=0.1,
        )
    void = [pb.RoundSummary(round=9, seconds=700.0, num_participants=3)] * LAST_ROUNDS
    with pytest.raises(TemporaryError, match="0 rounds"):
        asked(spec, mbit=20, rounds=void)
    assert asked(spec, mbit=20, rounds=[*void, *rounds_of(20.0)]).round_seconds == 20.0


def test_only_amendments_of_steps_and_codecs_make_older_rounds_count_for_nothing() -> None:
    ruled = [
        amendment(40, 1, inner__steps=12),
        amendment(70, 2, outer__learning_rate=0.5),
    ]
    assert rules_since([]) == 1
    assert rules_since(ruled) == 40
    back = replace(amendment(25, 3, run__rounds=9), kind=RulingKind.ROLLED_BACK, changes=())
    assert rules_since([*ruled, back]) == 25
    assert rules_since([*ruled, back, amendment(31, 4, exchange__uplink=0)]) == 31


@given(
    steps=st.sampled_from([1, 4, 16, 60, 240]),
    codecs=st.sampled_from([("int4", "int4"), ("ec2", "ec2"), ("fp32", "bf16"), ("ec1", "ec1")]),
    fragments=st.sampled_from([1, 3, 8]),
    overlap=st.sampled_from(["none", "keep", "blend"]),
    mbit=st.floats(0.5, 5000),
    steps_per_second=st.floats(0.05, 20),
)
def test_nothing_is_advised_that_is_expected_to_lose_more(
    steps: int,
    codecs: tuple[str, str],
    fragments: int,
    overlap: str,
    mbit: float,
    steps_per_second: float,
) -> None:
    spec = run_of(
        inner={"steps": steps},
        exchange={
            "uplink": codecs[0],
            "downlink": codecs[1],
            "fragments": fragments,
            "overlap": overlap,
        },
    )
    advice = asked(spec, mbit=mbit, steps_per_second=steps_per_second)
    assert advice.better.loss <= advice.now.loss
    assert bool(advice.changes) == (advice.better.setting != advice.now.setting)
    if advice.changes:
        amended(spec, changes_of(amendments_of(advice)))
