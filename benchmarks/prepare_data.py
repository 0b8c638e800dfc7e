"""What it takes to prepare much text and to read it again: bytes a second, and memory that stays flat.

    python -m benchmarks.prepare_data --gigabytes 0.2
    python -m benchmarks.prepare_data --gigabytes 10 --folder /mnt/large

Texts of this machine's own files are repeated until there are so many bytes, each as a document with a
counter of its own, in JSON lines; a tokenizer is trained on them unless one is named. Prints lines of
JSON: what preparing took with the peak of anonymous memory over all its processes (mapped files are not
in it), and what a node takes to open the result and to read random batches of it.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.measurement import parser_of
from lab.processes.family import MARK, Family, atoll_command, atoll_environment
from node.island.data.dataset import SampleOrder
from node.island.data.manifest import read_manifest
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from protocol.run.models import DecoderModel
from protocol.run.run_spec import DataSection, InnerSection, RunSpec

TEXTS = ("/usr/share/doc/**/copyright", "/usr/share/common-licenses/*", "/usr/lib/python3*/**/*.py")
FILE_BYTES = 256 << 20
VOCABULARY = 16384
POLL_SECONDS = 0.1
CONTEXT, BATCH, NUM_BATCHES = 1024, 8, 400


def texts_of(patterns: tuple[str, ...]) -> list[str]:
    """Texts of between one and a hundred kilobytes that are on this machine."""
    found = [path for pattern in patterns for path in sorted(Path("/").glob(pattern[1:]))]
    texts = []
    for path in found[:5000]:
        if path.is_file() and 1000 < path.stat().st_size < 100_000:
            texts.append(path.read_text(errors="replace"))
    if not texts:
        raise SystemExit(f"no texts match {patterns}: name others with --texts")
    return texts


def write_documents(folder: Path, texts: list[str], num_bytes: int) -> int:
    """Files of JSON lines; returns how many documents."""
    written, number, file_bytes = 0, 0, 0
    file = None
    try:
        while written < num_bytes:
            if file is None or file_bytes >= FILE_BYTES:
                if file is not None:
                    file.close()
                file, file_bytes = (folder / f"{written // FILE_BYTES:04}.jsonl").open("w"), 0
            line = json.dumps({"text": f"document {number}\n{texts[number % len(texts)]}"}) + "\n"
            file.write(line)
            number += 1
            written += len(line)
            file_bytes += len(line)
    finally:
        if file is not None:
            file.close()
    return number


def train_tokenizer(path: Path, texts: list[str], *, vocab_size: int = VOCABULARY) -> None:
    """A byte-level BPE over a little of the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:300], trainer)
    tokenizer.save(str(path))


def anonymous_bytes(process_id: int) -> int:
    """Of one process; 0 when it has ended."""
    try:
        rollup = Path(f"/proc/{process_id}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(
        int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Anonymous:")
    )


def prepare_measured(
    inputs: Path, out: Path, tokenizer: Path | None, options: list[str]
) -> Iterator[tuple[str, object]]:
    """Types the command, and watches its processes."""
    mark = uuid.uuid4().hex
    family = Family(mark)
    command = ["data", "prepare", str(inputs), "--out", str(out), *options]
    if tokenizer is not None:
        command += ["--tokenizer", str(tokenizer)]
    began_at = time.monotonic()
    process = subprocess.Popen(
        atoll_command(*command), env=atoll_environment({MARK: mark}), stdout=subprocess.DEVNULL
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(anonymous_bytes(each) for each in family.members()))
        time.sleep(POLL_SECONDS)
    if process.returncode:
        raise SystemExit(process.returncode)
    yield "seconds", round(time.monotonic() - began_at, 2)
    yield "peak_anonymous_bytes", peak
    yield "result_bytes", sum(path.stat().st_size for path in out.iterdir())


def read_measured(out: Path) -> Iterator[tuple[str, object]]:
    """Opens the tokens and reads random batches, as a rank does."""
    manifest = read_manifest(out)
    spec = RunSpec(
        model=DecoderModel(context=CONTEXT, vocab_size=manifest.vocab_size),
        data=DataSection(source="tokens", paths=(str(out),), digest=manifest.digest().hex()),
        inner=InnerSection(batch=BATCH),
    )
    before = anonymous_bytes(os.getpid())
    began_at = time.monotonic()
    dataset = open_dataset(spec, DataPlaces(folder=Path("/")))
    yield "opening_seconds", round(time.monotonic() - began_at, 4)
    order = SampleOrder(seed=0, num_samples=dataset.num_samples, num_together=dataset.num_together)
    began_at = time.monotonic()
    checksum, peak = 0, 0
    for number in range(NUM_BATCHES):
        tokens = dataset.batch("training", order.indices(number * BATCH, BATCH)).tokens
        checksum ^= int(np.bitwise_xor.reduce(tokens, axis=None))
        peak = max(peak, anonymous_bytes(os.getpid()))
    seconds = time.monotonic() - began_at
    yield "samples", dataset.num_samples
    yield "tokens_read_per_second", round(NUM_BATCHES * BATCH * CONTEXT / seconds)
    yield "reading_anonymous_bytes", peak - before
    yield "checksum", checksum


def main() -> None:
    """Runs it and prints what came of it."""
    parser = parser_of(__doc__)
    parser.add_argument("--gigabytes", type=float, default=0.2, help="of text, before tokens")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--texts", nargs="+", default=TEXTS, help="globs of files to repeat")
    parser.add_argument("--tokenizer", type=Path, help="default: one trained on the texts")
    parser.add_argument("--bytes", action="store_true", help="no tokenizer: bytes")
    parser.add_argument("options", nargs="*", help="of 'atoll data prepare', after --")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as place:
        folder = Path(place)
        inputs = folder / "text"
        inputs.mkdir()
        texts = texts_of(tuple(chosen.texts))
        num_documents = write_documents(inputs, texts, round(chosen.gigabytes * 1e9))
        tokenizer = chosen.tokenizer
        if tokenizer is None and not chosen.bytes:
            tokenizer = folder / "tokenizer.json"
            train_tokenizer(tokenizer, texts)
        text_bytes = sum(path.stat().st_size for path in inputs.iterdir())
        row: dict[str, object] = {
            "what": "prepare",
            "text_bytes": text_bytes,
            "documents": num_documents,
            "cores": len(os.sched_getaffinity(0)),
            "options": chosen.options,
        }
        row |= dict(prepare_measured(inputs, folder / "tokens", tokenizer, chosen.options))
        row["bytes_per_second"] = round(text_bytes / float(str(row["seconds"])))
        print(json.dumps(row), flush=True)
        print(json.dumps({"what": "read"} | dict(read_measured(folder / "tokens"))), flush=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        print(json.dumps({"what": "this process", "peak_resident_bytes": peak}), file=sys.stderr)


if __name__ == "__main__":
    main()
