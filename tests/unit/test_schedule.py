"""The learning rate depends on how far the run has come, and on nothing else."""

from typing import Literal

import pytest

from node.island.checkpoints.folder import rewarming_steps
from node.island.island import InnerWork
from node.island.training.trainer import Rewarming
from protocol.errors import ConfigError
from protocol.run.models import DecoderModel
from protocol.run.run_files import validated
from protocol.run.run_spec import InnerSection, RunSection, RunSpec
from protocol.run.schedule import Position, Schedule, share_of_peak
from tests.unit.work_scene import inner_work

COSINE = InnerSection(warmup_tokens=100, total_tokens=1100, final_fraction=0.2, schedule="cosine")
LINEAR = COSINE.model_copy(update={"schedule": "linear"})
WSD = COSINE.model_copy(update={"schedule": "wsd", "decay_fraction": 0.25})


def at_tokens(inner: InnerSection, tokens: float) -> float:
    """The share where the token clock stands there, of a run with `total_tokens`."""
    assert inner.total_tokens is not None
    progress = min(1.0, tokens / inner.total_tokens)
    return share_of_peak(inner, Position(progress=progress, tokens=tokens))


def at_progress(inner: InnerSection, progress: float, tokens: float = 1e9) -> float:
    """The share so far into a run that goes by its rounds."""
    return share_of_peak(inner, Position(progress=progress, tokens=tokens))


def work_of(round: int, inner_steps: int, **changes: int) -> InnerWork:
    return inner_work(inner_steps, round=round, **changes)


@pytest.mark.parametrize(
    ("token_clock", "rate"),
    [
        (0, 0.0),
        (25, 0.25),
        (100, 1.0),
        (350, 0.2 + 0.8 * 0.8535534),
        (600, 0.6),
        (1100, 0.2),
        (9999, 0.2),
    ],
)
def test_cosine_rises_in_the_warm_up_then_falls_to_its_final_fraction(
    token_clock: int, rate: float
) -> None:
    assert at_tokens(COSINE, token_clock) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("token_clock", "rate"),
    [(50, 0.5), (100, 1.0), (350, 0.8), (600, 0.6), (1100, 0.2), (9999, 0.2)],
)
def test_linear_falls_evenly_after_its_warm_up(token_clock: int, rate: float) -> None:
    assert at_tokens(LINEAR, token_clock) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("token_clock", "rate"),
    [(50, 0.5), (100, 1.0), (825, 1.0), (962, 0.6 + 0.8 / 550), (1100, 0.2), (9999, 0.2)],
)
def test_wsd_stays_until_the_last_part_of_the_run_then_falls_evenly(
    token_clock: int, rate: float
) -> None:
    assert at_tokens(WSD, token_clock) == pytest.approx(rate)


def test_wsd_falls_over_a_fifth_of_the_run_unless_told_otherwise() -> None:
    wsd = InnerSection(schedule="wsd", final_fraction=0.0)
    rates = [at_progress(wsd, progress) for progress in (0.8, 0.9, 1.0)]
    assert rates == pytest.approx([1.0, 0.5, 0.0])


def test_a_decay_that_reaches_into_the_warm_up_begins_after_it() -> None:
    wsd = WSD.model_copy(update={"decay_fraction": 1.0})
    rates = [at_tokens(wsd, clock) for clock in (50, 100, 600, 1100)]
    assert rates == pytest.approx([0.5, 1.0, 0.6, 0.2])


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (
            {"schedule": "wsd", "warmup_tokens": 900, "total_tokens": 1000},
            "a warm-up of 900 tokens and a decay over 200 do not fit into total_tokens 1000",
        ),
        ({"decay_fraction": 0.3}, 'decay_fraction = 0.3 belongs to schedule = "wsd", not to "cosi'),
        ({"schedule": "wsd", "decay_fraction": 0.0}, r"decay_fraction = 0.0: input should be gre"),
        ({"schedule": "step"}, "schedule = 'step': input should be 'constant', 'cosine', 'linear'"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(inner: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validated({"inner": inner}, origin="run.toml")


def test_a_constant_schedule_stays_after_its_warm_up() -> None:
    constant = COSINE.model_copy(update={"schedule": "constant"})
    rates = [at_tokens(constant, clock) for clock in (50, 100, 10**9)]
    assert rates == [0.5, 1.0, 1.0]


TEN_ROUNDS = RunSpec(
    run=RunSection(rounds=10, min_nodes=1),
    model=DecoderModel(context=32),
    inner=InnerSection(steps=4, batch=2, final_fraction=0.0, schedule="linear", warmup_tokens=0),
)


def rates_of_a_run(spec: RunSpec, steps_of_rounds: list[int]) -> list[float]:
    """Of a node that takes so many inner steps in each round."""
    return [
        share_of_peak(spec.inner, work_of(number, steps).position(spec, step))
        for number, steps in enumerate(steps_of_rounds, start=1)
        for step in range(steps)
    ]


def test_without_total_tokens_a_schedule_goes_by_closed_rounds_whatever_tokens_they_brought() -> (
    None
):
    rates = rates_of_a_run(TEN_ROUNDS, [4] * 10)
    assert rates == pytest.approx([1 - (step + 0.5) / 40 for step in range(40)])
    for num_participants in (1, 4, 1000):
        work = work_of(
            5, 4, token_clock=10**12, round_tokens=10**9, num_participants=num_participants
        )
        assert work.position(TEN_ROUNDS, 2).progress == pytest.approx((4 + 2.5 / 4) / 10)


def test_nodes_of_all_speeds_have_the_same_rate_at_the_same_part_of_a_round() -> None:
    fast, slow = rates_of_a_run(TEN_ROUNDS, [12] * 10), rates_of_a_run(TEN_ROUNDS, [4] * 10)
    assert fast[1::3] == pytest.approx(slow)  # the middle of three steps is the middle of one
    assert [fast[-1], slow[-1]] == pytest.approx([1 / 240, 1 / 80])


def test_what_is_left_of_a_round_goes_on_where_it_was() -> None:
    rest = work_of(3, 3, steps_before=5)
    assert [rest.position(TEN_ROUNDS, step) for step in range(3)] == [
        work_of(3, 8).position(TEN_ROUNDS, 5 + step) for step in range(3)
    ]


def test_with_total_tokens_a_schedule_goes_by_the_token_clock() -> None:
    inner = TEN_ROUNDS.inner.model_copy(update={"total_tokens": 1000})
    spec = TEN_ROUNDS.model_copy(update={"inner": inner})
    late = work_of(9, 4, token_clock=100, round_tokens=200)
    positions = [late.position(spec, step) for step in range(4)]
    assert [at.tokens for at in positions] == [125, 175, 225, 275]
    assert [at.progress for at in positions] == pytest.approx([0.125, 0.175, 0.225, 0.275])
    beyond = work_of(2, 4, token_clock=5000, round_tokens=200).position(spec, 0)
    assert (beyond.progress, share_of_peak(inner, beyond)) == (1.0, 0.0)


def test_neither_the_first_inner_step_of_a_run_nor_the_last_has_a_rate_of_zero() -> None:
    warmed = TEN_ROUNDS.inner.model_copy(update={"warmup_tokens": None})
    rates = rates_of_a_run(TEN_ROUNDS.model_copy(update={"inner": warmed}), [4] * 10)
    assert rates[0] == pytest.approx(0.5 / 4)  # a tenth of the run is its four first steps
    assert min(rates) > 0.0
    counted = warmed.model_copy(update={"warmup_tokens": 400})
    first = work_of(1, 4, round_tokens=80).position(TEN_ROUNDS, 0)
    assert share_of_peak(counted, first) == pytest.approx(10 / 400)


def test_without_warmup_tokens_a_tenth_of_the_run_warms_up() -> None:
    assert [at_progress(InnerSection(), p) for p in (0.0, 0.05, 0.1)] == [0.0, 0.5, 1.0]


def test_a_warm_up_in_tokens_of_a_run_without_total_tokens_caps_a_fall_that_begins_at_once() -> (
    None
):
    inner = InnerSection(schedule="linear", final_fraction=0.0, warmup_tokens=1000)
    assert at_progress(inner, 0.1, tokens=500) == pytest.approx(0.5)
    assert at_progress(inner, 0.4, tokens=500) == pytest.approx(0.5)
    assert at_progress(inner, 0.6, tokens=5000) == pytest.approx(0.4)


def test_a_run_shorter_than_its_warm_up_ends_at_the_final_fraction() -> None:
    short = COSINE.model_copy(update={"total_tokens": 50})
    assert at_tokens(short, 100) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("scaling", "scales"),
    [("none", [1.0, 1.0, 1.0]), ("linear", [1.0, 2.0, 8.0]), ("sqrt", [1.0, 2**0.5, 8**0.5])],
)
def test_rates_follow_the_participants_by_the_rule_of_the_run(
    scaling: Literal["none", "linear", "sqrt"], scales: list[float]
) -> None:
    spec = RunSpec(run=RunSection(min_nodes=2), inner=InnerSection(scaling=scaling))
    assert [Schedule.of(spec).scale_of(nodes) for nodes in (2, 4, 16)] == pytest.approx(scales)


@pytest.mark.parametrize(
    ("beta2", "steps", "rewarming"),
    [(0.95, 500, 40), (0.95, 30, 30), (0.999, 5000, 2000), (0.0, 9, 2)],
)
def test_a_re_warm_up_takes_as_long_as_the_second_moment_remembers_but_a_round_at_most(
    beta2: float, steps: int, rewarming: int
) -> None:
    assert rewarming_steps(RunSpec(inner=InnerSection(beta2=beta2, steps=steps))) == rewarming


def shares(rewarming: Rewarming, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        taken.append(rewarming.share())
        rewarming.stepped()
    return taken


def test_learning_rates_rise_from_zero_moments_in_mid_run() -> None:
    rewarming = Rewarming(3)
    rewarming.begin(token_clock=64)
    assert shares(rewarming, 2) == [0.25, 0.5]
    rewarming.begin(token_clock=128)  # the next round goes on with it
    assert shares(rewarming, 3) == [0.75, 1.0, 1.0]
    rewarming.begin(token_clock=256)
    assert rewarming.share() == 1.0


def test_the_first_round_of_a_run_has_the_run_files_warm_up_only() -> None:
    rewarming = Rewarming(3)
    rewarming.begin(token_clock=0)
    assert shares(rewarming, 2) == [1.0, 1.0]
    rewarming.begin(token_clock=64)
    assert rewarming.share() == 1.0


def test_moments_that_were_kept_finish_the_rise_that_they_were_in() -> None:
    rewarming = Rewarming(3)
    rewarming.go_on(steps_left=1)
    rewarming.begin(token_clock=64)
    assert shares(rewarming, 2) == [0.75, 1.0]
