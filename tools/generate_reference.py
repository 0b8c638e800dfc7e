"""Writes docs/reference.md from the code: commands, keys of all files, and what a model of a size takes.

With --check, only compares and exits 1 on a difference.
"""

import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from benchmarks.measurement import markdown
from coordinator.config import RUN_TEMPLATE
from coordinator.dashboard.run_metrics import RUN_METRICS
from coordinator.presets.composing import NAMED_MODELS, USUAL_NODES
from coordinator.presets.cost import (
    DISK_BYTES,
    FP32_BYTES,
    RANK_BYTES,
    Setting,
    Situation,
    bytes_per_round,
)
from coordinator.settings import CoordinatorConfig
from node.config import OF_HELPERS, TEMPLATE
from protocol.run.node_memory import daemon_bytes
from protocol.terminal import cli
from protocol.terminal.console import bytes_in_words, count_in_words, seconds_in_words
from protocol.web.metrics import NODE_METRICS, Metric

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
WIDTH = 118
LINK_BITS_PER_SECOND = 100e6
OF_NODES = ("node", "node_id")

Row = tuple[str, ...]


def reference() -> str:
    """The page's text."""
    return (
        "\n\n".join(
            [
                "# Reference",
                "Written from the code by `python tools/generate_reference.py`.",
                "## What a model takes",
                *_requirements(),
                "## Commands",
                "`--help` says all of each.",
                markdown_left(("for", "command", "what it does", "under it"), _commands()),
                "## The run file",
                "`run.toml` is written by `atoll init`, and never changes after the first start: [amendments]"
                "(coordinators.md#steering) change what may change.",
                *_run_file(),
                "## The node file",
                "`node.toml` is written by `atoll join`. Options of `atoll node start` come first. Relative"
                " paths\nbegin where that is typed.",
                markdown_left(("key", "at first", "what it is", "helpers"), _node_file()),
                "## The coordinator's file",
                "`coordinator.toml` is written by `atoll init`; of port 0 the system makes one at a start.",
                markdown_left(("key", "at first", "what it is"), _coordinator_file()),
                "## Metrics",
                textwrap.fill(
                    "For Prometheus. What is not known is left out, and never 0. Losses are in nats per "
                    "token, unless a function of the run's own has another unit. Phases, commits, takeovers "
                    "and audits are counted from the start of the coordinator's process.",
                    WIDTH,
                ),
                "Of the run, from the coordinator:",
                markdown_left(("metric", "labels", "meaning"), _metrics(RUN_METRICS)),
                "Of each node that is there, by its latest heartbeat; a node serves its own. Each has the"
                " labels\n`node` and `node_id`, and:",
                markdown_left(
                    ("metric", "labels", "meaning"), _metrics(NODE_METRICS, of_all=OF_NODES)
                ),
            ]
        ).replace("\n\n\n", "\n\n")
        + "\n"
    )


def markdown_left(columns: Row, rows: Iterator[Row]) -> str:
    """A table of words: no column is on the right."""
    return markdown(columns, rows).replace("---:", "---")


def _requirements() -> Iterator[str]:
    rate = f"{LINK_BITS_PER_SECOND / 1e6:g} Mbit/s"
    yield textwrap.fill(
        "By `atoll init --model SIZE`: what a node takes beside the activations of its batch. Its ranks "
        "hold one copy of the model, and it is one of four that reduce, by int4 both ways and in one "
        f"fragment. A round's bytes are sent and received; at {rate} they take the time beside them at "
        "least. `atoll init --link 100mbit` chooses coarser codecs, fragments and overlap where that is "
        "much. `atoll node doctor` says what a run takes on a machine.",
        WIDTH,
    )
    columns = (
        "size",
        "parameters",
        "ranks",
        "daemon",
        "/dev/shm",
        "disk",
        "a round sends",
        "which takes",
    )
    yield markdown(columns, _sizes())


def _sizes() -> Iterator[Row]:
    for name, named in NAMED_MODELS.items():
        count = named.num_parameters
        setting = Setting(uplink="int4", downlink="int4", fragments=1, has_overlap=False, steps=1)
        situation = Situation(
            num_parameters=count,
            num_layers=named.model.num_layers,
            num_nodes=USUAL_NODES,
            down_bits_per_second=LINK_BITS_PER_SECOND,
            up_bits_per_second=LINK_BITS_PER_SECOND,
            round_trip_seconds=0,
            seconds_per_inner_step=1,
            total_steps=1,
        )
        daemon = daemon_bytes(
            num_elements=count,
            largest_fragment=count,
            num_reducers=USUAL_NODES,
            keeps_error=True,
            uplink="int4",
            downlink="int4",
            is_audited=True,
        )
        sent = bytes_per_round(situation, setting)
        yield (
            f"`{name}`",
            count_in_words(count),
            bytes_in_words(RANK_BYTES * count),
            bytes_in_words(daemon),
            bytes_in_words(2 * FP32_BYTES * count),
            bytes_in_words(DISK_BYTES * count),
            bytes_in_words(int(sent)),
            seconds_in_words(8 * sent / LINK_BITS_PER_SECOND),
        )


def _commands() -> Iterator[Row]:
    context = cli.root.make_context("atoll", [], resilient_parsing=True)
    for who, entries in cli.SECTIONS.items():
        for entry in entries:
            command = cli.root.get_command(context, entry.name)
            assert command is not None
            under = ", ".join(f"`{name}`" for name in _shown_in(command))
            yield who, f"`atoll {entry.name}`", _cell(entry.summary), under


def _shown_in(command: click.Command) -> Iterator[str]:
    """The names of a group's commands."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                yield name


def _run_file() -> Iterator[str]:
    """Its tables; what stands above a table in the template comes before it."""
    said: list[str] = []
    rows: list[list[str]] = []
    for line in RUN_TEMPLATE.partition("\n\n")[2].splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            if rows:
                yield _run_table(rows)
            yield f"### [{match[1]}]"
            if said:
                yield textwrap.fill(" ".join(said), WIDTH)
            said, rows = [], []
        elif match := re.fullmatch(r"(# )?(\w+) = (.*?) +# (.*)", line):
            rows.append([match[2], "left out" if match[1] else f"`{match[3]}`", match[4]])
        elif match := re.fullmatch(r" +# (.*)", line):
            rows[-1][2] += f" {match[1]}"
        elif line.startswith("# "):
            said.append(line.removeprefix("# "))
    yield _run_table(rows)


def _run_table(rows: list[list[str]]) -> str:
    cells = ((f"`{key}`", default, _cell(text)) for key, default, text in rows)
    return markdown_left(("key", "in the template", "what it is"), cells)


def _node_file() -> Iterator[Row]:
    for block in TEMPLATE.strip().split("\n\n")[1:]:
        lines = block.splitlines()
        text = " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))
        found = [re.fullmatch(r"(\w+) = (.*)", line) for line in lines if not line.startswith("#")]
        pairs = [(match[1], match[2]) for match in found if match is not None]
        defaults = dict.fromkeys(
            "the folder's" if key == "name" else f"`{value}`" for key, value in pairs
        )
        yield (
            ", ".join(f"`{key}`" for key, _ in pairs),
            ", ".join(defaults),
            _cell(text),
            "too" if OF_HELPERS.issuperset(key for key, _ in pairs) else "",
        )


def _coordinator_file() -> Iterator[Row]:
    for line in CoordinatorConfig().to_toml().splitlines():
        if match := re.fullmatch(r"(\w+) = (\S+)(?: +# (.*))?", line):
            yield (
                f"`{match[1]}`",
                f"`{json.dumps(json.loads(match[2]))}`",
                _cell(match[3] or "where it listens"),
            )


def _metrics(declared: Iterable[Metric], *, of_all: Row = ()) -> Iterator[Row]:
    for metric in declared:
        labels = ", ".join(f"`{label}`" for label in metric.labels if label not in of_all)
        yield f"`{metric.name}`", labels, _cell(metric.meaning)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Writes the page, or with --check compares."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(reference())
    elif not PAGE.exists() or PAGE.read_text() != reference():
        sys.exit("docs/reference.md is not what the code says; run 'make generate'")


if __name__ == "__main__":
    main()
