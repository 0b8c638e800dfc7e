"""What exchanges cost models of 5 to 60 million parameters, beside data parallelism. For a GPU.

    python -m benchmarks.learning.larger_models [--device cuda] [--sizes 5M 20M 60M] [--processes 12]
        [--text 'FOLDER/**/*.py'] [--ratios 50 300] [--report] [--results docs/results/larger-models.jsonl]

Two nodes train a byte language model by plain calls (lab.simulation.plain_calls), turn by turn on one device,
compiled and in bf16 on a GPU; several runs share it. First data parallelism is tried with three inner rates
for a fifth of the steps, and the best is everybody's. `--ratios 50 300` also runs what presets choose where
the model in fp32 takes the link so many inner steps. What is in the file of results is not run again.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import structlog
import torch

from benchmarks.learning.data_parallel import train_data_parallel
from benchmarks.measurement import Rows, add_results, asked_by, markdown, parser_of, read_rows
from coordinator.presets.choosing import chosen
from coordinator.presets.cost import Setting as Preset
from coordinator.presets.cost import Situation
from coordinator.presets.loss import above
from lab.processes.family import nothing_left
from lab.simulation.plain_calls import Setting, spec_of, train_swarm
from node.island.data.dataset import read_corpus
from node.island.parallel.mesh_shape import LocalTraining
from protocol.run.models import DecoderModel
from protocol.run.run_spec import RunSpec

RESULTS = Path("docs/results/larger-models.jsonl")
NUM_NODES = 2
PLAIN_MEAN, NESTEROV = (1.0, 0.0), (0.7, 0.6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model, its batch, and the rates that are tried."""

    model: dict[str, Any]
    batch: int  # samples of a node and inner step
    steps: int
    rates: dict[str, tuple[float, ...]]
    beside: float  # AdamW's, of what Muon leaves to it


SIZES = {
    "5M": Size(
        model={
            "hidden_size": 256,
            "num_layers": 6,
            "num_heads": 8,
            "num_kv_heads": 4,
            "ffn_size": 704,
            "context": 256,
            "qk_norm": True,
        },
        batch=32,
        steps=1400,
        rates={"adamw": (5e-4, 1e-3, 2e-3), "muon": (2.5e-3, 5e-3, 1e-2)},
        beside=3e-3,
    ),
    "20M": Size(
        model={
            "hidden_size": 512,
            "num_layers": 6,
            "num_heads": 8,
            "num_kv_heads": 4,
            "ffn_size": 1408,
            "context": 512,
            "qk_norm": True,
        },
        batch=32,
        steps=700,
        rates={"adamw": (5e-4, 1e-3, 2e-3), "muon": (2e-3, 4e-3, 8e-3)},
        beside=2e-3,
    ),
    "60M": Size(
        model={
            "hidden_size": 768,
            "num_layers": 10,
            "num_heads": 12,
            "num_kv_heads": 4,
            "ffn_size": 2048,
            "context": 512,
            "qk_norm": True,
        },
        batch=16,
        steps=700,
        rates={"muon": (1.5e-3, 3e-3, 6e-3)},
        beside=1e-3,
    ),
    "tiny": Size(
        model={
            "hidden_size": 16,
            "num_layers": 1,
            "num_heads": 1,
            "num_kv_heads": 1,
            "ffn_size": 32,
            "context": 16,
        },
        batch=2,
        steps=20,
        rates={"adamw": (3e-3, 6e-3), "muon": (1e-2, 2e-2)},
        beside=6e-3,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One run; without an interval it is data parallelism."""

    size: str
    optimizer: str
    rate: float
    steps: int
    interval: int = 0  # inner steps of a round, which exchanges one fragment
    fragments: int = 1
    codec: str = ""  # both ways
    outer: tuple[float, float] = PLAIN_MEAN  # rate and momentum of Nesterov's step
    late_steps: int = 0  # inner steps that results are late; nodes train on meanwhile
    ratio: int = 0  # of the link that presets chose all this for
    text: str = ""  # a glob; else the standard library's source
    seed: int = 0


def run(tried: Try, device: str, threads: int) -> float:
    """The held-out loss at the end, in nats per byte."""
    torch.set_num_threads(threads)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    size = SIZES[tried.size]
    inner: dict[str, Any] = {
        "batch": size.batch,
        "learning_rate": tried.rate,
        "steps": tried.interval or 1,
    }
    if tried.optimizer == "muon":
        inner |= {"optimizer": "muon", "muon_learning_rate": tried.rate}
        inner["learning_rate"] = size.beside
    outer_rate, momentum = tried.outer
    exchange: dict[str, Any] = {"fragments": tried.fragments}
    exchange |= dict.fromkeys(("uplink", "downlink"), tried.codec or "fp32")
    late = {"overlap": "keep", "blend": 0.5} if tried.late_steps else {}
    tables: dict[str, dict[str, Any]] = {
        "run": {"rounds": tried.steps // (tried.interval or 1), "min_nodes": NUM_NODES},
        "model": size.model,
        "inner": inner,
        "outer": {"learning_rate": outer_rate, "momentum": momentum},
        "exchange": exchange | late,
        "evaluation": {"samples": 512},
    }
    if tried.text:
        tables["data"] = {"source": "text", "paths": [tried.text]}
    spec = spec_of(tables, seed=tried.seed)
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    on_gpu = device != "cpu"
    local = LocalTraining(precision="bf16" if on_gpu else "fp32", compile=on_gpu)
    if not tried.interval:
        return train_data_parallel(
            spec, corpus, learning_rate=spec.inner.learning_rate, device=device, local=local
        )
    setting = Setting(name="larger", tables=tables, late_steps=tried.late_steps)
    return train_swarm(setting, spec, corpus, device=device, local=local).loss


def tuning(size: str, text: str) -> list[Try]:
    """Data parallelism with each rate, for a fifth of the steps."""
    steps = max(1, SIZES[size].steps // 5)
    return [
        Try(size=size, optimizer=optimizer, rate=rate, steps=steps, text=text)
        for optimizer, rates in SIZES[size].rates.items()
        for rate in rates
    ]


def preset_for(ceiling: Try, ratio: int) -> Try:
    """What presets choose for that model where it takes the link `ratio` inner steps in fp32.

    Rounds have as many steps as chosen, or fewer so that the run ends with a whole one.
    """
    model = RunSpec(model=DecoderModel(**SIZES[ceiling.size].model))
    bits_per_second = 32 * model.num_parameters / ratio
    plan = chosen(
        Situation(
            num_parameters=model.num_parameters,
            num_layers=model.num_layers,
            num_nodes=NUM_NODES,
            down_bits_per_second=bits_per_second,
            up_bits_per_second=bits_per_second,
            round_trip_seconds=0.05,
            seconds_per_inner_step=1.0,
            total_steps=ceiling.steps,
            inner_optimizer=ceiling.optimizer,
        )
    )
    if plan.setting.uplink != plan.setting.downlink:
        raise ValueError(f"presets choose two codecs, which no try has: {plan.setting}")
    values = {(choice.table, choice.key): choice.value for choice in plan.choices}
    steps = max(n for n in range(1, plan.setting.steps + 1) if ceiling.steps % n == 0)
    return replace(
        ceiling,
        interval=steps,
        fragments=plan.setting.fragments,
        codec=plan.setting.uplink,
        outer=(float(values["outer", "learning_rate"]), float(values["outer", "momentum"])),
        late_steps=min(steps, plan.prediction.late_steps),
        ratio=ratio,
    )


def tries_of(
    size: str, best: dict[str, float], seed: int, *, text: str, ratios: Sequence[int] = ()
) -> list[Try]:
    """The runs that are compared."""
    found: list[Try] = []
    for optimizer in sorted(best, reverse=True):
        ceiling = Try(
            size=size,
            optimizer=optimizer,
            rate=best[optimizer],
            steps=SIZES[size].steps,
            text=text,
            seed=seed,
        )
        found += [preset_for(ceiling, ratio) for ratio in ratios]
        swarm = replace(ceiling, interval=50, codec="ec2", outer=NESTEROV)
        if size == "tiny":
            swarm = replace(swarm, interval=5)
            found += [ceiling, swarm, replace(swarm, late_steps=5)]
            continue
        if size == "60M":
            found.append(ceiling)
            continue
        found += [
            ceiling,
            swarm,
            replace(swarm, late_steps=50),
            replace(swarm, interval=10, outer=PLAIN_MEAN),
        ]
    return found


def best_rates(known: dict[Try, float], size: str, text: str) -> dict[str, float]:
    """By the tuning runs on this text, of each optimizer."""
    found: dict[str, float] = {}
    for optimizer in SIZES[size].rates:
        runs = [t for t in tuning(size, text) if t.optimizer == optimizer and t in known]
        if runs:
            found[optimizer] = min(runs, key=known.__getitem__).rate
    return found


def report(known: dict[Try, float]) -> Iterator[str]:
    """A table for each size and text: the ceiling's loss, how far others end above it, and the formula's."""
    for size, text in sorted({(tried.size, tried.text) for tried in known}):
        ends = {
            tried: loss
            for tried, loss in known.items()
            if (tried.size, tried.text, tried.steps) == (size, text, SIZES[size].steps)
        }
        rows: list[Sequence[object]] = []
        for swarm in sorted({replace(t, seed=0) for t in ends if t.interval}, key=str):
            ceiling = Try(
                size=size,
                optimizer=swarm.optimizer,
                rate=swarm.rate,
                steps=swarm.steps,
                text=text,
            )
            found = [
                (ends[beside], ends[tried])
                for seed in sorted({tried.seed for tried in ends})
                if (beside := replace(ceiling, seed=seed)) in ends
                and (tried := replace(swarm, seed=seed)) in ends
            ]
            if not found:
                continue
            expected = above(
                Preset(
                    uplink=swarm.codec,
                    downlink=swarm.codec,
                    fragments=swarm.fragments,
                    has_overlap=swarm.late_steps > 0,
                    steps=swarm.interval,
                ),
                num_nodes=NUM_NODES,
                total_steps=swarm.steps,
                late_steps=swarm.late_steps,
                inner_optimizer=swarm.optimizer,
            )
            rows.append(
                (
                    swarm.optimizer,
                    f"R = {swarm.ratio}" if swarm.ratio else "",
                    " ".join(map(str, swarm.outer)),
                    swarm.interval * swarm.fragments,
                    swarm.fragments,
                    swarm.codec,
                    swarm.late_steps or "no",
                    ", ".join(f"{least:.4f}" for least, _ in found),
                    ", ".join(f"{100 * (loss / least - 1):+.1f} %" for least, loss in found),
                    f"{100 * expected.whole:+.1f} %",
                )
            )
        if rows:
            columns = (
                *("optimizer", "chosen for", "outer", "every", "fragments", "codec", "late by"),
                *("data parallel", "above", "by the formula"),
            )
            table = markdown(columns, rows)
            yield f"{size} {text}\n\n{table}"


def known_in(file: Path) -> dict[Try, float]:
    """What was run already."""
    return {asked_by(Try, row): row["loss"] for row in read_rows(file)}


def main() -> None:
    """Tunes, runs what is missing, and prints the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["5M"])
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", default="", help="a glob; else the standard library's source")
    parser.add_argument("--ratios", type=int, nargs="*", default=[], metavar="R")
    parser.add_argument("--report", action="store_true", help="print what is there, run nothing")
    add_results(parser, RESULTS)
    options = parser.parse_args()
    known, results = known_in(options.results), Rows(options.results)
    if not options.report:
        threads = max(1, len(os.sched_getaffinity(0)) // options.processes)
        about = {"device": options.device}
        if options.device != "cpu":
            about["device"] = torch.cuda.get_device_name()
        pool = ProcessPoolExecutor(options.processes, mp_context=get_context("spawn"))
        with pool:

            def all_of(tries: list[Try]) -> None:
                missing = [tried for tried in tries if tried not in known]
                futures = {
                    pool.submit(run, tried, options.device, threads): tried for tried in missing
                }
                for future in as_completed(futures):
                    tried = futures[future]
                    known[tried] = future.result()
                    results.add(about | asdict(tried) | {"loss": known[tried]})

            all_of([tried for size in options.sizes for tried in tuning(size, options.text)])
            wanted = [
                tried
                for size in options.sizes
                for tried in tries_of(
                    size,
                    best_rates(known, size, options.text),
                    options.seed,
                    text=options.text,
                    ratios=options.ratios,
                )
            ]
            # Those that say most first: a lent GPU may be gone before the last.
            all_of(
                sorted(wanted, key=lambda t: (not t.ratio, t.interval not in (0, 50), t.late_steps))
            )
    print("\n\n".join(report(known)))


if __name__ == "__main__":
    with nothing_left():
        main()
