"""Loss over bits a value: seeds are paired, and what has run is not run again."""

import itertools
import math
from typing import Any, get_args

import pytest

from benchmarks.convergence.bits import NOTHING_LOST, SERIES, costs_of, drawn, table
from benchmarks.convergence.command import digest_of, run_all
from benchmarks.convergence.parts import PARTS, codecs_part
from protocol.run.run_spec import CodecName


def line(codec: str, seed: int, loss: float, *, part: str = "bits") -> dict[str, Any]:
    return {
        "part": part,
        "setting": codec,
        "seed": seed,
        "loss": loss,
        "bits_up": 4.0,
        "bits_down": 2.0,
    }


def test_the_curve_has_every_codec_in_one_series() -> None:
    drawn_codecs = list(itertools.chain(*SERIES.values()))
    assert sorted([NOTHING_LOST, *drawn_codecs]) == sorted(get_args(CodecName))
    assert [setting.name for setting in PARTS["bits"]()] == list(get_args(CodecName))


def test_losses_are_compared_seed_by_seed_with_fp32() -> None:
    """Seeds lie further apart than codecs do."""
    lines = [line("fp32", 0, 2.0), line("fp32", 1, 3.0)]
    lines += [line("int4", 0, 2.01), line("int4", 1, 3.03), line("int4", 2, 9.0)]
    (cost,) = costs_of(lines)
    assert cost.more == pytest.approx((0.01, 0.03))
    assert cost.mean == pytest.approx(0.02) and cost.error == pytest.approx(0.01)
    assert cost.bits == 3.0
    assert "| int4 | 3.00 | +0.020 ± 0.010 | 2 | +0.010 to +0.030 |" in table([cost])


def test_one_seed_has_no_error_and_other_parts_are_not_read() -> None:
    lines = [line("fp32", 0, 2.0), line("ec2", 0, 2.5), line("int4", 0, 2.0, part="codecs")]
    (cost,) = costs_of(lines)
    assert cost.codec == "ec2" and cost.error == math.inf
    assert "± " not in "".join(table([cost]))
    assert costs_of([line("int4", 0, 2.0)]) == []  # nothing to compare it with


def test_the_figure_shows_codecs_and_says_what_is_far_above() -> None:
    lines = [line("fp32", 0, 2.0), line("int4", 0, 2.01), line("topk64", 0, 2.5)]
    text = drawn(costs_of(lines))
    assert ">int4<" in text and ">topk64 +0.50<" in text and ">fp32<" in text


def test_what_another_part_has_run_is_not_run_again() -> None:
    """The same digest is the same run; with no process started, nothing was."""
    both_ways = {
        "int4": "int4 / int4, keep",
        "int8": "int8 / int8",
        "topk64": "topk64 / topk64, keep",
    }
    known = {setting.name: setting for setting in codecs_part()}
    done = [
        line(name, 0, 2.0, part="codecs") | {"digest": digest_of(known[name], 0)}
        for name in both_ways.values()
    ]
    wanted = [setting for setting in PARTS["bits"]() if setting.name in both_ways]
    found = list(run_all({"bits": wanted}, seeds=[0], processes=1, done=done))
    assert {(each["part"], each["setting"]) for each in found} == {
        ("bits", name) for name in both_ways
    }
    assert all(each["loss"] == 2.0 for each in found)
    assert not list(run_all({"bits": wanted}, seeds=[0], processes=1, done=[*done, *found]))
