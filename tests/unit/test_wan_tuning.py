"""What the slow-link benchmark's settings are found by: which trials there are, and that all end alike."""

import argparse

import pytest

from benchmarks.wan.tuning import AVERAGE, parser, trials_of
from protocol.errors import UsageError


def chosen(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(arguments)


def test_every_pair_of_outer_settings_is_tried_with_each_number_of_steps_between_exchanges() -> (
    None
):
    trials = trials_of(
        chosen("--every", "5", "20", "--outers", "0.7,0.3", "--learning-rates", "2e-3")
    )
    assert [(trial.steps_between, trial.outer) for trial in trials] == [
        (5, (0.7, 0.3)),
        (5, AVERAGE),
        (20, (0.7, 0.3)),
        (20, AVERAGE),
        (1, None),
    ]
    assert len({str(trial) for trial in trials}) == len(trials)
    assert {trial.inner_steps for trial in trials if trial.outer} == {300}


def test_trials_that_would_end_with_other_numbers_of_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--swarm-steps 100: .*choose a multiple of 60"):
        trials_of(chosen("--every", "3", "20", "--swarm-steps", "100"))
