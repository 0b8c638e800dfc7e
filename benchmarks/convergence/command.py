"""Held-out loss of swarms against inner steps, nodes, codecs, feedback, optimizers, text and lateness.

    python -m benchmarks.convergence [--parts steps codecs …] [--seeds 0 1 2] [--processes 2]
        [--results docs/results/convergence.jsonl] [--figure docs/figures/frontier.svg] [--report]
        [--bits-figure docs/figures/codec-bits.svg] [--quick]

Every setting trains a byte language model of 0.1 million parameters with the same initial weights,
samples and number of inner steps (in whole rounds: never more) for each seed, through the real trainer,
codecs, means and outer optimizer (lab.simulation.plain_calls). So settings are compared seed by seed. What is
in the file of results already is not run again; --report only prints its tables.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import blake3
import structlog
import torch

from benchmarks.convergence import bits as convergence_bits
from benchmarks.convergence.parts import PARTS, quick_part
from benchmarks.convergence.report import Losses, frontier, frontier_drawn, frontier_table
from benchmarks.convergence.settings import DATA_PARALLEL
from benchmarks.learning.data_parallel import train_data_parallel
from benchmarks.measurement import Rows, add_results, parser_of, read_rows
from lab.simulation.plain_calls import Setting, Trained, spec_of, train_swarm
from node.island.data.dataset import read_corpus

RESULTS = Path("docs/results/convergence.jsonl")


def trained(setting: Setting, seed: int) -> Trained:
    """One run."""
    spec = spec_of(setting.tables, seed=seed)
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    if not setting.name.startswith(DATA_PARALLEL):
        return train_swarm(setting, spec, corpus)
    began = time.monotonic()
    # A larger batch may want another learning rate: the better of two is the baseline.
    loss = min(
        train_data_parallel(spec, corpus, learning_rate=rate)
        for rate in (
            spec.inner.learning_rate,
            spec.inner.learning_rate / math.sqrt(spec.run.min_nodes),
        )
    )
    seconds = time.monotonic() - began
    return Trained(loss=loss, bits_up=None, bits_down=None, seconds=seconds)


def one_run(part: str, setting: Setting, seed: int) -> dict[str, Any]:
    """A line of results."""
    return {
        "part": part,
        "setting": setting.name,
        "seed": seed,
        "digest": digest_of(setting, seed),
        **asdict(trained(setting, seed)),
    }


def digest_of(setting: Setting, seed: int) -> str:
    """Of all that the benchmark says of a run; not of the code, nor of the run file's defaults."""
    is_data_parallel = setting.name.startswith(DATA_PARALLEL)
    said = [setting.tables, setting.drop_rate, setting.own_text, is_data_parallel, seed]
    if setting.late_steps:  # left out where it is none, as in results from before there was any
        said.append(setting.late_steps)
    return blake3.blake3(json.dumps(said, sort_keys=True).encode()).hexdigest(length=8)


def run_all(
    parts: dict[str, list[Setting]],
    *,
    seeds: list[int],
    processes: int,
    done: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Runs what is not done yet; equal settings of two parts run once. Seed by seed."""
    known = {line["digest"]: line for line in done}
    named = {(line["part"], line["setting"], line["digest"]) for line in done}
    wanted: dict[str, list[tuple[str, Setting, int]]] = {}
    for seed in seeds:
        for part, settings in parts.items():
            for setting in settings:
                digest = digest_of(setting, seed)
                if (part, setting.name, digest) in named:
                    continue
                if digest in known:
                    yield known[digest] | {"part": part, "setting": setting.name}
                else:
                    wanted.setdefault(digest, []).append((part, setting, seed))
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_on_one_thread) as pool:
        futures = {pool.submit(one_run, *runs[0]): runs for runs in wanted.values()}
        for future in as_completed(futures):
            line = future.result()
            for part, setting, _ in futures[future]:
                yield line | {"part": part, "setting": setting.name}


def _on_one_thread() -> None:
    """So that runs may go side by side; and quiet."""
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


def main() -> None:
    """Runs the parts asked for, appends to the results and prints the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=2, help="runs side by side")
    add_results(parser, RESULTS)
    parser.add_argument("--figure", type=Path, help="where loss against bytes is drawn, as SVG")
    parser.add_argument(
        "--bits-figure", type=Path, help="where loss against bits a value is drawn, as SVG"
    )
    parser.add_argument("--report", action="store_true", help="only print what is there")
    parser.add_argument("--quick", action="store_true", help="tiny runs, to see that it works")
    chosen = parser.parse_args()
    parts = {part: PARTS[part]() for part in chosen.parts}
    if chosen.quick:
        parts = {"quick": quick_part()}
    lines = read_rows(chosen.results)
    if not chosen.report:
        results = Rows(chosen.results, is_printed=False)
        for line in run_all(
            parts, seeds=chosen.seeds, processes=chosen.processes, done=list(lines)
        ):
            lines.append(results.add(line))
            print(
                f"{line['part']}: {line['setting']}, seed {line['seed']}: {line['loss']:.4f} "
                f"({line['seconds']:.0f} s)",
                file=sys.stderr,
            )
    order = [(part, setting.name) for part, settings in parts.items() for setting in settings]
    lines = [line for line in lines if (line["part"], line["setting"]) in order]
    losses = Losses(sorted(lines, key=lambda line: order.index((line["part"], line["setting"]))))
    for part in losses.parts():
        print("\n".join(losses.table(part)), end="\n\n")
    print("\n".join(losses.claims()))
    if points := frontier(lines):
        print("\n".join(["", *frontier_table(points)]))
        if chosen.figure is not None:
            chosen.figure.write_text(frontier_drawn(points))
    if costs := convergence_bits.costs_of(lines):
        print("\n".join(["", *convergence_bits.table(costs)]))
        if chosen.bits_figure is not None:
            chosen.bits_figure.write_text(convergence_bits.drawn(costs))
