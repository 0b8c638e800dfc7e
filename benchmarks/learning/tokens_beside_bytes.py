"""A swarm on tokens beside one on bytes: bits per byte of the same held-out text, after the same time.

    python -m benchmarks.learning.tokens_beside_bytes --seconds 120

Both prepare the same documents ('atoll data prepare'), so the same ones are held out; the tokenizer is
trained on the text within seconds, or named. Two nodes train in one process, one after the other, the same
decoder but for the table of its vocabulary, which gets the same time, not the same rounds: how many rounds
fit is measured before. Prints a table as Markdown and lines of JSON. On a machine with other work the
times, and so the table, mean nothing.
"""

import logging
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from benchmarks.measurement import Row, Rows, add_results, markdown, parser_of
from benchmarks.prepare_data import train_tokenizer
from lab.simulation.swarm import Life, SimulatedRun, simulate
from node.island.data.dataset import stdlib_files
from node.island.data.manifest import Manifest
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.data.preparing import prepare
from node.island.data.shard_plan import Wanted
from protocol.run.run_files import validated
from protocol.run.run_spec import RunSpec

CALIBRATING_ROUNDS = 3
NUM_NODES = 2
MODEL = {"hidden_size": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 384}


def prepared(folder: Path, name: str, texts: Path, tokenizer: Path | None) -> tuple[Path, Manifest]:
    """The text as tokens or as bytes."""
    made = prepare(
        Wanted(inputs=(str(texts),), out=folder / name, tokenizer=tokenizer, held_out=0.05, jobs=2),
        on_state=lambda state: None,
        say=print,
    )
    return folder / name, made.manifest


def spec_of(place: Path, manifest: Manifest, *, context: int, rounds: int, seed: int) -> RunSpec:
    """The run on one of the two, evaluated five times on its way."""
    return validated(
        {
            "run": {"rounds": rounds, "min_nodes": NUM_NODES, "seed": seed},
            "model": {**MODEL, "context": context, "vocab_size": manifest.vocab_size},
            "data": {
                "source": "tokens",
                "paths": [str(place)],
                "digest": manifest.digest().hex(),
            },
            "inner": {"steps": 15, "batch": 8},
            "evaluation": {"every_rounds": max(1, rounds // 5), "samples": 64},
        },
        origin="the benchmark",
    )


def trained(spec: RunSpec) -> tuple[SimulatedRun, float]:
    """What a swarm comes to, and the seconds that it took."""
    corpus = open_dataset(spec, DataPlaces(folder=Path("/")))
    began_at = time.monotonic()
    run = simulate(spec, lives=[Life()] * NUM_NODES, corpus=corpus)
    return run, time.monotonic() - began_at


def measure(
    name: str, place: Path, manifest: Manifest, *, context: int, seconds: float, seed: int
) -> list[dict[str, object]]:
    """Rows of a swarm that trains for so long: at each evaluation the time and the bits per byte."""
    held_out_bytes = manifest.text_bytes("held_out")
    assert held_out_bytes is not None
    tokens_per_byte = manifest.num_tokens("held_out") / held_out_bytes
    calibrated = spec_of(place, manifest, context=context, rounds=CALIBRATING_ROUNDS, seed=seed)
    _, calibrating_seconds = trained(calibrated)
    rounds = max(CALIBRATING_ROUNDS, round(seconds / calibrating_seconds * CALIBRATING_ROUNDS))
    spec = spec_of(place, manifest, context=context, rounds=rounds, seed=seed)
    run, took_seconds = trained(spec)
    return [
        {
            "what": name,
            "seed": seed,
            "vocabulary": manifest.vocab_size,
            "parameters": spec.num_parameters,
            "bytes_per_token": round(1 / tokens_per_byte, 3),
            "round": held_out.round,
            "seconds": round(took_seconds * held_out.round / rounds, 1),
            "nats_per_token": round(held_out.loss, 4),
            "bits_per_byte": round(held_out.loss / math.log(2) * tokens_per_byte, 4),
        }
        for held_out in run.held_out
    ]


def table(rows: Sequence[Row]) -> str:
    """The end of each swarm, as Markdown."""
    last = {(row["what"], row["seed"]): row for row in rows}.values()
    columns = ("tokens", "vocabulary", "parameters", "bytes a token", "rounds", "seconds")
    keys = ("what", "vocabulary", "parameters", "bytes_per_token", "round", "seconds")
    return markdown(
        (*columns, "nats a token", "bits a byte"),
        [[row[key] for key in (*keys, "nats_per_token", "bits_per_byte")] for row in last],
    )


def main() -> None:
    """Runs both and prints what came of them."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="of training, for each")
    parser.add_argument("--context", type=int, default=128, help="tokens, or bytes, of a sample")
    parser.add_argument("--tokenizer", type=Path, help="default: one trained on the text")
    parser.add_argument("--vocabulary", type=int, default=4096, help="of the one that is trained")
    parser.add_argument("--texts", type=Path, help="a folder; default: Python's standard library")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    add_results(parser)
    chosen = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    results = Rows(chosen.results)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        texts, tokenizer = chosen.texts, chosen.tokenizer
        if texts is None:
            texts = folder / "texts"
            texts.mkdir()
            for number, file in enumerate(stdlib_files()):
                (texts / f"{number:04}.txt").write_bytes(file.path.read_bytes())
        if tokenizer is None:
            tokenizer = folder / "tokenizer.json"
            sources = sorted(path for path in texts.rglob("*") if path.is_file())
            train_tokenizer(
                tokenizer,
                [path.read_text(errors="replace") for path in sources],
                vocab_size=chosen.vocabulary,
            )
        for name, used in (("bytes", None), (tokenizer.name, tokenizer)):
            place, manifest = prepared(folder, name.removesuffix(".json"), texts, used)
            for seed in chosen.seeds:
                for row in measure(
                    name,
                    place,
                    manifest,
                    context=chosen.context,
                    seconds=chosen.seconds,
                    seed=seed,
                ):
                    results.add(row)
    print(table(results.rows))


if __name__ == "__main__":
    main()
