"""A real model trained on over slow links: a transformers folder and text go in, a better folder comes out.

    python -m benchmarks.learning.real_model --model ./SmolLM2-135M --text 'corpus/*.txt' --minutes 30
    python -m benchmarks.learning.real_model --model ./SmolLM2-135M --text 'corpus/*.txt' --lora 16

Two nodes in the network lab, each behind its own link, go on training the model on tokens of the text, by
the commands that people type. One has the weights; the other fetches them over its link. Reported are the
held-out bits per byte at each evaluation, tokens, bytes on the wire, and the memory of each node's processes
at its fullest; at the end the export must load in transformers with the state's own logits and write text.
Appends a line to `--output`; `--report` prints what the lines say.
"""

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measurement import Rows, add_results, parser_of, read_rows
from benchmarks.wan.peers.stage import MIDDLE, ContenderFailedError, Stage
from lab.network.lab import NetworkLab
from lab.network.links import Link
from protocol.trust.invite import INVITE

NODES = ("has-weights", "fetches")
OUTPUT = Path("docs/results/real-model.jsonl")
POLL_SECONDS = 5.0
START_SECONDS = 900.0  # to fetch the weights and to compile codecs, on a busy machine
_CLI = "protocol.terminal.cli"

_WRITES = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
prompt = tokenizer(sys.argv[2], return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]))
"""


def main() -> None:
    """Trains and reports."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="a transformers folder")
    parser.add_argument("--text", nargs="+", help="files and globs")
    parser.add_argument("--minutes", type=float, default=30.0, help="of training")
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--delay-ms", type=float, default=25.0, help="one way, of each link")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="inner steps of a round")
    parser.add_argument("--rounds", type=int, default=1000, help="at most")
    parser.add_argument("--by", default="decoder", choices=("decoder", "transformers"))
    parser.add_argument(
        "--lora", type=int, help="rank of adapters; the model itself stays as it is"
    )
    parser.add_argument("--prompt", default="The")
    add_results(parser, OUTPUT)
    parser.add_argument("--report", action="store_true")
    chosen = parser.parse_args()
    if not chosen.report:
        if chosen.model is None or not chosen.text:
            parser.error("--model and --text say what is trained on what")
        Rows(chosen.results, is_printed=False).add(trained(chosen))
    for row in read_rows(chosen.results):
        print(in_words(row))


def trained(chosen: argparse.Namespace) -> dict[str, Any]:
    """One run in the lab, and what came of it."""
    rate = 1e6 * chosen.mbit
    slow = Link(
        up_bits_per_second=rate,
        down_bits_per_second=rate,
        delay_seconds=chosen.delay_ms / 1000,
    )
    links = {MIDDLE: Link(), **dict.fromkeys(NODES, slow)}
    with tempfile.TemporaryDirectory(prefix="atoll-real-model-") as place, NetworkLab(links) as lab:
        folder = Path(place)
        with Stage(lab, [], folder) as stage:
            _start(stage, chosen)
            curve, fullest = _followed(stage, 60 * chosen.minutes, chosen.context)
            status = _status(stage)
            out = folder / "out"
            for node in NODES if status["run"]["phase"] != "finished" else ():
                stage.run(node, stage.module(_CLI, "node", "drain", "--dir", folder / node))
            merged = ("--merged", "--base", chosen.model.resolve()) if chosen.lora else ()
            export = ("export", out, "--dir", folder / NODES[1], *merged)
            stage.run(MIDDLE, stage.module(_CLI, *export))
            command = [*stage.module("x")[:2], "-c", _WRITES, out, chosen.prompt]
            text = stage.run(MIDDLE, command)
    return {
        "model": chosen.model.resolve().name,
        "by": f"adapters of rank {chosen.lora}" if chosen.lora else chosen.by,
        "mbit": chosen.mbit,
        "parameters": int(status["run"]["num_parameters"]),
        "context": chosen.context,
        "batch": chosen.batch,
        "steps": chosen.steps,
        "rounds": int(status["run"]["committed_round"]),
        "curve": curve,
        "fullest_bytes": fullest,
        "text": text.strip(),
    }


def _start(stage: Stage, chosen: argparse.Namespace) -> None:
    """Tokens, run, coordinator, members, nodes."""
    folder, home = stage.folder, stage.folder / "run"
    tokens = folder / "tokens"
    prepare = (*chosen.text, "--tokenizer", chosen.model.resolve(), "--held-out", "0.05")
    stage.run(MIDDLE, stage.module(_CLI, "data", "prepare", *prepare, "--out", tokens))
    trained = ("--lora", str(chosen.lora)) if chosen.lora else ("--by", chosen.by)
    model = ("--from", chosen.model.resolve(), *trained, "--data", tokens)
    sizes = {"--context": chosen.context, "--batch": chosen.batch, "--steps": chosen.steps}
    sized = [str(each) for option in sizes.items() for each in option]
    init = ("init", home, *model, *sized)
    address = stage.lab.address(MIDDLE)
    stage.run(MIDDLE, stage.module(_CLI, *init, "--nodes", "2", "--host", address))
    text = (home / "run.toml").read_text()
    for key, value in (("rounds", chosen.rounds), ("every_rounds", 2), ("samples", 32)):
        text = re.sub(rf"(?m)^{key} = \d+", f"{key} = {value}", text, count=1)
    (home / "run.toml").write_text(text)
    stage.start(MIDDLE, "coordinator", stage.module(_CLI, "coordinator", "start", home))
    stage.until(lambda: "coordinator ready" in stage.log_text("coordinator"), "the coordinator")
    printed = stage.run(
        MIDDLE, stage.module(_CLI, "invite", "create", "--uses", "2", "--dir", home)
    )
    invite = INVITE.first_in(printed)
    assert invite is not None, printed
    first = home / "first.safetensors"
    weights = first if first.exists() else chosen.model.resolve()
    for node in NODES:
        join = ("join", "--dir", folder / node, "--name", node)
        stage.run(node, stage.module(_CLI, *join), ATOLL_INVITE=invite)
        start = ("node", "start", "--dir", folder / node, "--listen", stage.lab.address(node))
        given = ("--base", chosen.model.resolve()) if chosen.lora else ()
        given = (*given, "--weights", weights) if node == NODES[0] else given
        stage.start(node, node, stage.module(_CLI, *start, *given))


def _followed(
    stage: Stage, seconds: float, context: int
) -> tuple[list[dict[str, float]], dict[str, int]]:
    """Evaluations as they come, from the first round on, and each node's memory at its fullest."""
    curve: list[dict[str, float]] = []
    fullest = dict.fromkeys(NODES, 0)
    began_at, waits_until = None, time.monotonic() + START_SECONDS
    while began_at is None or time.monotonic() < began_at + seconds:
        time.sleep(POLL_SECONDS)
        stage.check()
        for node in NODES:
            fullest[node] = max(fullest[node], _anonymous_bytes(stage.process_id(node)))
        run = _status(stage)["run"]
        if began_at is None and int(run["open_round"]):
            began_at = time.monotonic()
        if began_at is None and time.monotonic() > waits_until:
            raise ContenderFailedError(f"no round has opened: {stage.last_words()}")
        for measured in run["held_out_losses"][len(curve) :]:
            curve.append(
                {
                    "round": int(measured["round"]),
                    "seconds": round(time.monotonic() - (began_at or time.monotonic()), 1),
                    "tokens": int(run["data"]["committed_samples"]) * context,
                    "nats_per_token": measured["loss"],
                    "bits_per_byte": _bits_per_byte(stage),
                    "sent_bytes": _sent(run),
                }
            )
            print(json.dumps(curve[-1]), flush=True)
        if run["phase"] == "finished":
            break
    return curve, fullest


def _status(stage: Stage) -> dict[str, Any]:
    command = stage.module(_CLI, "status", "--json", "--dir", stage.folder / "run")
    told: dict[str, Any] = json.loads(stage.run(MIDDLE, command))
    return told


def _bits_per_byte(stage: Stage) -> float:
    told = stage.run(MIDDLE, stage.module(_CLI, "status", "--dir", stage.folder / "run"))
    found = re.search(r"([\d.]+) bits a byte", told)
    return float(found[1]) if found else 0.0


def _sent(run: dict[str, Any]) -> int:
    """Of all nodes, but for the control plane."""
    wire = run.get("wire", {}).get("counts", [])
    return sum(int(each["sent_bytes"]) for each in wire if each["kind"] != "control")


def _anonymous_bytes(process_id: int) -> int:
    """Memory of a process and of all that came of it: its own, and shared memory once."""
    total, shared = 0, 0
    for found in (process_id, *_children_of(process_id)):
        try:
            text = Path(f"/proc/{found}/status").read_text()
        except OSError:
            continue
        sizes = dict(re.findall(r"(Rss\w+):\s+(\d+) kB", text))
        total += 1024 * int(sizes.get("RssAnon", 0))
        shared = max(shared, 1024 * int(sizes.get("RssShmem", 0)))
    return total + shared


def _children_of(process_id: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{process_id}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *_children_of(child)]
    return found


def in_words(row: dict[str, Any]) -> str:
    """A row for people."""
    first, last = row["curve"][0], row["curve"][-1]
    memory = max(row["fullest_bytes"].values()) / 2**30
    return (
        f"{row['model']} ({row['parameters'] / 1e6:.1f}M, {row['by']}) at {row['mbit']:g} Mbit/s: "
        f"{first['bits_per_byte']:.4f} → {last['bits_per_byte']:.4f} bits a byte in {last['tokens']:,} "
        f"tokens, {row['rounds']} rounds and {last['seconds'] / 60:.1f} min; "
        f"{memory:.1f} GiB a node at its fullest"
    )


if __name__ == "__main__":
    main()
