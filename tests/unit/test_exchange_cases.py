"""What benchmarks/exchange measures, and what it makes of it; the measuring itself needs root."""

import os
import subprocess
import sys
from dataclasses import fields
from typing import Any, get_args
from xml.etree import ElementTree

import pytest

from benchmarks.exchange.case import Case, codecs_named, count_of
from benchmarks.exchange.command import chosen_cases, parser
from benchmarks.exchange.node import stretched
from benchmarks.exchange.report import COLUMNS, as_markdown, cells_of, drawn, newest
from coordinator.rules import rules_of
from lab.processes.family import processor_time, ticks_of_machine, ticks_of_tree
from node.exchange.peers import Limits, Waits
from protocol.errors import UsageError
from protocol.run.run_spec import CodecName
from tests.tiny_runs import tiny

SVG = "{http://www.w3.org/2000/svg}"


def cases(*arguments: str) -> list[Case]:
    return chosen_cases(parser().parse_args(arguments))


def test_a_size_on_the_wire_is_as_large_with_every_codec() -> None:
    found = cases("--nodes", "2", "--megabytes", "4", "--codecs", *get_args(CodecName))
    assert [case.megabytes for case in found] == pytest.approx([4.0] * len(found), rel=1e-3)
    assert len({case.num_elements for case in found}) > 8


def test_a_model_is_as_large_with_every_codec() -> None:
    int4, top_k = cases("--nodes", "2", "--parameters", "8m", "--codecs", "int4", "topk64/topk256")
    assert int4.num_elements == top_k.num_elements == 8_000_000
    assert int4.megabytes == pytest.approx(8 * 4.125 / 8)
    assert top_k.megabytes < int4.megabytes / 20
    assert (top_k.codecs.uplink, top_k.codecs.downlink) == ("topk64", "topk256")
    assert str(top_k.codecs) == "topk64/topk256" and str(int4.codecs) == "int4"


def test_slices_are_cut_as_a_coordinator_cuts_them() -> None:
    for codec in ("int4", "topk64"):
        run = tiny(exchange={"uplink": codec, "downlink": codec})
        (case,) = cases("--nodes", "2", "--megabytes", "4", "--codecs", codec)
        assert case.slice_elements == rules_of(run).slice_elements


@pytest.mark.parametrize("text", ["int5", "/int4", "int4/int4/int4", "int4/1", ""])
def test_a_codec_that_is_not_there_is_refused_with_those_that_are(text: str) -> None:
    with pytest.raises(UsageError, match="choose of fp32, bf16"):
        codecs_named(text)


@pytest.mark.parametrize(
    ("text", "count"), [("8m", 8_000_000), ("0.5M", 500_000), ("20k", 20_000), ("164288", 164_288)]
)
def test_parameters_are_counted_as_people_write_them(text: str, count: int) -> None:
    assert count_of(text) == count


@pytest.mark.parametrize("text", ["", "0", "m", "8 m", "-1", "8t"])
def test_what_is_no_number_of_parameters_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no number of parameters"):
        count_of(text)


def test_with_more_nodes_links_get_slower_unless_each_has_its_own_rate() -> None:
    shared = cases("--nodes", "2", "4", "16", "--megabytes", "4", "--mbit", "100")
    assert [case.mbit for case in shared] == [100, 50, 12.5]
    each = cases("--nodes", "2", "16", "--megabytes", "4", "--mbit-each", "20")
    assert [case.mbit for case in each] == [20, 20]
    with pytest.raises(SystemExit):
        cases("--mbit", "100", "--mbit-each", "20")


def test_slow_motion_has_as_many_bytes_under_way_and_stretches_all_waiting() -> None:
    at_once, slow = (
        cases("--nodes", "2", "--megabytes", "4", "--slow-motion", factor)[0]
        for factor in ("1", "10")
    )
    assert slow.rate(0) == at_once.rate(0)  # limits are those of the links that are meant
    link, slow_link = at_once.links()["node-0"], slow.links()["node-0"]
    assert slow_link.up_bits_per_second == pytest.approx(link.up_bits_per_second / 10)
    assert slow_link.delay_seconds == pytest.approx(10 * link.delay_seconds)
    whole = 2 * 4e6 * 8 / at_once.rate(0)
    assert slow.patience_seconds > at_once.patience_seconds > 10 * whole
    assert slow.patience_seconds > 10 * 10 * whole
    assert slow.quiet_seconds == pytest.approx(10 * at_once.quiet_seconds)
    assert at_once.quiet_seconds > at_once.round_trip_ms / 1e3


@pytest.mark.parametrize("usual", [Limits(), Waits()])
def test_in_slow_motion_everything_waits_longer_and_takes_no_more(usual: Limits | Waits) -> None:
    slow = stretched(usual, 10)
    for field in fields(usual):
        factor = 10 if field.name.endswith("_seconds") else 1
        assert getattr(slow, field.name) == factor * getattr(usual, field.name)


def stat(process_id: int, parent: int, user: int, system: int) -> str:
    """A line of /proc/PID/stat, of a process with an awkward name."""
    fields = ["S", str(parent), *["0"] * 9, str(user), str(system), *["0"] * 30]
    return f"{process_id} (a ) name) {' '.join(fields)}"


def test_processor_time_is_that_of_a_process_and_of_all_below_it() -> None:
    stats = {
        "1": stat(1, 0, 1000, 1000),
        "10": stat(10, 1, 1, 2),
        "11": stat(11, 10, 10, 20),
        "12": stat(12, 11, 100, 200),
        "13": stat(13, 1, 5000, 5000),
    }
    assert ticks_of_tree(stats, 10) == 333
    assert ticks_of_tree(stats, 99) == 0


def test_a_machine_is_busy_with_all_that_is_not_idle() -> None:
    text = "cpu  1 20 300 40000 500000 6 70 800 1 20\ncpu0 9 9 9 9 9 9 9 9 9 9\n"
    assert ticks_of_machine(text) == 1 + 20 + 300 + 6 + 70 + 800  # guests are in user's already


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_what_a_child_computes_counts_for_its_parent() -> None:
    script = (
        "import sys, time\n"
        "while time.process_time() < 0.3: pass\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()"
    )
    before = processor_time(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        took = processor_time(os.getpid()) - before
    assert took.ours > 0.25


def row(**changed: Any) -> dict[str, Any]:
    """A line of results."""
    (case,) = cases("--nodes", "4", "--megabytes", "4", "--mbit-each", "20", "--slow-motion", "10")
    line = {
        "cores": 2,
        **case.words(),
        "congestion_control": "cubic",
        "pause_seconds": 1.0,
        "seconds": 4.0,
        "limit_seconds": 3.2,
        "ratio": 1.25,
        "ratio_least": 1.2,
        "ratio_most": 1.5,
        "plain_seconds": None,
        "cores_ours": 0.4,
        "cores_machine": 0.5,
        "slices": [0.25] * 4,
    }
    assert changed.keys() <= line.keys()
    return line | changed


def test_a_row_says_what_was_measured_and_whether_cores_counted() -> None:
    cells = dict(zip(COLUMNS, cells_of(row()), strict=True))
    assert cells["nodes"] == "4" and cells["MB"] == "4" and cells["Mbit/s"] == "20"
    assert cells["slow motion"] == "× 10" and cells["took / limit"] == "1.25"
    assert cells["spread"] == "1.20 to 1.50"
    assert (cells["cores, ours"], cells["cores, all"]) == ("0.40", "0.50 of 2")


def test_a_line_from_before_there_were_so_many_words_has_a_row() -> None:
    newer = ("slow_motion", "keeps_window", "congestion_control", "cores_ours", "cores_machine")
    old = {key: value for key, value in row().items() if key not in newer}
    cells = dict(zip(COLUMNS, cells_of(old), strict=True))
    assert cells["TCP"] == "bbr" and cells["slow motion"] == "× 1"
    assert cells["cores, ours"] == ""
    assert as_markdown([old]).count("\n") == 2


def test_of_lines_of_one_case_the_last_counts() -> None:
    first, other, last = row(ratio=1.9), row(num_nodes=8), row(ratio=1.25)
    assert [(r["num_nodes"], r["ratio"]) for r in newest([first, other, last])] == [
        (4, 1.25),
        (8, 1.25),
    ]


def figure(*rows: dict[str, Any]) -> tuple[list[str], int, int]:
    """Its words, and how many marks and lines through them it has."""
    drawing = ElementTree.fromstring(drawn(rows))
    words = [text.text or "" for text in drawing.iter(f"{SVG}text")]
    return words, len(list(drawing.iter(f"{SVG}circle"))), len(list(drawing.iter(f"{SVG}polyline")))


def test_the_figure_names_in_its_legend_what_rows_differ_in_and_in_its_title_what_they_share() -> (
    None
):
    words, marks, lines = figure(
        *(row(num_nodes=nodes, megabytes=size) for nodes in (4, 16) for size in (1.0, 4.0))
    )
    assert (marks, lines) == (4, 2)
    assert {"4 nodes", "16 nodes", "1.25", "the links' limit"} <= set(words)
    (title,) = [word for word in words if word.startswith("One round's exchange")]
    assert "20 Mbit/s" in title and "cubic" in title and "int4" in title
    assert "nodes" not in title


def test_series_come_by_their_number_of_nodes_in_whatever_order_they_were_measured() -> None:
    words, _, _ = figure(row(num_nodes=16), row(num_nodes=2), row(num_nodes=4))
    assert [word for word in words if word.endswith("nodes")] == ["2 nodes", "4 nodes", "16 nodes"]


def test_codecs_are_named_at_their_marks_and_not_joined_by_a_line() -> None:
    words, marks, _ = figure(row(), row(codec="ec1", megabytes=1.0), row(codec="topk64"))
    assert marks == 3 and {"int4", "ec1", "topk64"} <= set(words)
    assert any("7,757,575 parameters" in word for word in words)
    assert "polyline" not in drawn([row(), row(codec="ec1", megabytes=1.0)])


def test_uneven_slices_are_a_series_of_their_own_for_they_move_the_limit() -> None:
    words, marks, _ = figure(
        row(), row(by_bandwidth=False), row(megabytes=1.0, slices=[0.1, 0.4, 0.5])
    )
    assert marks == 3 and "uneven slices" in words


def test_rows_with_a_slow_link_are_not_in_the_figure() -> None:
    assert figure(row(), row(slow=0.2))[1] == 1
    with pytest.raises(ValueError, match="no row with equal links"):
        drawn([row(slow=0.2)])
