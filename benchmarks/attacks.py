"""What members that lie do to a swarm: its loss, rounds and time beside those of the same swarm without them.

    python -m benchmarks.attacks [--quick] [--attacks NAME ...] [--liars 2] [--merges agreeing ...]
        [--seeds 0 1] [--uneven] [--audit 0.05]

Eight nodes in virtual time (lab.simulation.swarm): the coordinator's core, store and desks, and the nodes'
daemons, exchange and codecs are those of production. Each node joins by an invite of its own. Liars are
ordinary nodes whose island publishes other things than it has trained, that tell the coordinator something
else than what they do, or that sign and send something else than they should. They know what honest nodes
published last. The Sybils are four keys for each liar, all of one invite.

Each row has the held-out loss of the final state over the one without liars (same seed, same merge), the
time of the run over that one's, how long its three longest rounds are over the middle one of that run,
whether all honest nodes hold the same state, in which round a contribution
of a liar was first clipped or left out, how many of the honest ones were, summed over rounds, in which round
the last of the liars that were put out or sit out took part last, and whether honest nodes did.

With `--uneven` each node trains on an eighth of the text of its own. `--audit` is the share of contributions
that members spot-check, and of slices that they make again: who only says that it trains is found by that.

With `--results FILE` each row is written when it is there, and a command that was cut goes on after the
last.
"""

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import structlog
import torch

from benchmarks.lies import ATTACKS, SECONDS_A_STEP, Attack, Known
from benchmarks.measurement import Row, Rows, add_results, markdown, parser_of, read_rows
from coordinator.swarm.members import BARRED
from lab.simulation.plain_calls import spec_of
from lab.simulation.swarm import Life, RunStuckError, SimulatedRun, identity_of, simulate
from node.island.data.dataset import Corpus, read_corpus
from node.outer_state import Vector
from protocol.errors import AtollError
from protocol.run.run_spec import OuterSection
from protocol.wire.rounds import WHOLE, NodeId

NODES = 8
MOST_SECONDS = 36_000.0  # virtual; a clean run takes four minutes
LIARS_LIVE_SECONDS = (
    9000.0  # virtual, longer than any of these runs: one in quarantine waits for ever
)

TABLES: dict[str, dict[str, Any]] = {
    "run": {"rounds": 24, "min_nodes": NODES - 2},
    "model": {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 192,
        "context": 64,
    },
    "inner": {"steps": 10, "batch": 4, "learning_rate": 3e-3},
    "outer": {"learning_rate": 0.7, "momentum": 0.3},
    "exchange": {"uplink": "int4", "downlink": "int4"},
    "evaluation": {"every_rounds": 4, "samples": 256},
}


UNSCREENED = "unscreened"
"""Beside the merges: the mean of all that comes."""

QUICK = (
    "1e30",
    "beside the momentum",
    "made-up state",
    "kept contributions",
    "kept results",
    "no results",
    "lying reducer",
)
"""One of each kind: what harms the model, the state, the rounds' time, and a slice."""

QUICK_ROUNDS = 5


def part_of(corpus: Corpus, place: int) -> Corpus:
    """The same number of samples, all of them from one eighth of the text."""
    size = len(corpus.training)
    own = corpus.training[place * size // NODES : (place + 1) * size // NODES]
    return replace(corpus, training=np.resize(own, size))


def lives_of(
    attack: Attack, corpus: Corpus, *, liars: int, seed: int, is_uneven: bool
) -> list[Life]:
    """Honest nodes, and behind them the liars."""
    known = Known()

    def watched(place: int) -> Callable[[Vector, Vector], None]:
        def see(parameters: Vector, published: Vector) -> None:
            known.last[place] = parameters - published

        return see

    def lying(place: int) -> Callable[[Vector, Vector], None] | None:
        if attack.lie is None:
            return None
        lie = attack.lie(np.random.default_rng([seed, place]))

        def publish(parameters: Vector, published: Vector) -> None:
            with np.errstate(all="ignore"):
                np.subtract(parameters, lie(parameters - published, known), out=published)

        return publish

    honest = NODES - liars

    def data_of(place: int) -> Corpus | None:
        own = part_of(corpus, place) if is_uneven else corpus
        if place >= honest and attack.has_poisoned_labels:
            return replace(own, training=255 - own.training)
        return own

    return [
        *(
            Life(
                seconds_per_inner_step=SECONDS_A_STEP,
                on_published=watched(place),
                corpus=data_of(place),
                invite=f"invite-{place}",
            )
            for place in range(honest)
        ),
        *(
            Life(
                # A little later than the honest ones, so that liars know what these published.
                seconds_per_inner_step=1.01 * attack.seconds_a_step,
                on_published=lying(place),
                says=attack.says,
                trained_share=attack.trained_share,
                is_liar=True,
                absences=((LIARS_LIVE_SECONDS, None),),
                corpus=data_of(min(place, NODES - 1)),
                invite="liars" if attack.keys > 1 else f"invite-{place}",
                lies=attack.lies,
            )
            for place in range(honest, honest + liars * attack.keys)
        ),
    ]


def outcome_of(wanted: Row) -> Row:
    """Runs one swarm; the attack is one of ATTACKS, or "clean" for a swarm without liars."""
    name, liars, merge, seed = (wanted[key] for key in ("attack", "liars", "merge", "seed"))
    rules = {"merge": "mean", "screening": False} if merge == UNSCREENED else {"merge": merge}
    outer = TABLES["outer"] | rules | {"audit": wanted["audit"]}
    run = TABLES["run"] | {"rounds": wanted["rounds"]}
    spec = spec_of(TABLES | {"run": run, "outer": outer}, seed=seed)
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    attack, is_uneven = ATTACKS.get(name, Attack()), wanted["uneven"]
    lives = lives_of(attack, corpus, liars=liars, seed=seed, is_uneven=is_uneven)
    row, began = dict(wanted), time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as disks:  # whose snapshots the run goes back to
            done = simulate(
                spec, lives=lives, corpus=corpus, disks=Path(disks), within_seconds=MOST_SECONDS
            )
    except (RunStuckError, AtollError) as error:
        return row | {"ended": f"{type(error).__name__}: {error}"[:200]}
    row["keys"] = liars * attack.keys
    return row | _figures(done, liars) | {"took": round(time.monotonic() - began, 1)}


def _figures(done: SimulatedRun, liars: int) -> Row:
    honest = {identity_of(place).node_id for place in range(NODES - liars)}
    members = done.final.members.items()
    all_out = {n for n, m in members if m.state in BARRED or m.against.num_times_out}
    barred = all_out - honest
    put_out = [c.round for c in done.commits if barred & {a.node_id for a in c.assignments}]
    lasted = [later - one for one, later in pairwise(done.begins)]
    noticed: int | None = None
    refused = 0
    for commit in done.commits:
        not_whole = set[NodeId]()
        for outcome in (each for each in commit.slices if each.digest is not None):
            factors = outcome.factors or [WHOLE] * len(outcome.contributors)
            here = {
                c.node_id
                for c, factor in zip(outcome.contributors, factors, strict=True)
                if factor == WHOLE
            }
            not_whole |= {a.node_id for a in commit.assignments} - here
        refused += len(not_whole & honest)
        if noticed is None and not_whole - honest:
            noticed = commit.round
    return {
        "loss": done.held_out[-1].loss,
        "seconds": done.seconds if done.final.finished_at is None else done.final.finished_at,
        "usual": round(median(lasted), 2),  # seconds of a round
        "longest": [round(each / median(lasted), 2) for each in sorted(lasted)[:-4:-1]],
        "same": len({done.digests.get(node_id) for node_id in honest}) == 1,
        "noticed": noticed,
        "honest_refused": refused,
        "put_out": len(barred),
        "honest_put_out": len(all_out & honest),
        "put_out_after": max(put_out, default=None),
    }


def rows_of(
    names: Sequence[str],
    *,
    liars: Sequence[int],
    merges: Sequence[str],
    seeds: Sequence[int],
    **alike: Any,
) -> Iterator[Row]:
    """What is to be run: the clean swarms first. `alike` is what all rows have in common."""
    for merge, seed in product(merges, seeds):
        yield {"attack": "clean", "liars": 0, "merge": merge, "seed": seed, **alike}
    for name, count, merge, seed in product(names, liars, merges, seeds):
        yield {"attack": name, "liars": count, "merge": merge, "seed": seed, **alike}


def report(rows: Sequence[Row]) -> str:
    """One line for each attack, number of liars and merge: means over the seeds, and their spread."""
    same = ("merge", "seed", "rounds", "uneven", "audit", "invites")
    clean = {tuple(map(r.get, same)): r for r in rows if r["attack"] == "clean"}
    groups: dict[tuple[str, int, str, str], list[Row]] = {}
    for row in rows:
        where = ("uneven, " if row["uneven"] else "") + (
            "" if row.get("invites") else "no invites, "
        )
        where += f"{row['rounds']} rounds, audit {row['audit']:g}"
        groups.setdefault((row["attack"], row["liars"], row["merge"], where), []).append(row)
    lines = []
    for (name, liars, merge, where), runs in groups.items():
        pairs = [(run, clean.get(tuple(map(run.get, same)), run)) for run in runs]
        if why := next(filter(None, (_incomparable(run, base) for run, base in pairs)), ""):
            lines.append((name, liars, merge, where, why, *[""] * 6))
            continue
        losses = [run["loss"] / base["loss"] for run, base in pairs]
        lines.append(
            (
                name,
                liars,
                merge,
                where,
                f"{mean(losses):.3f} ({min(losses):.3f}–{max(losses):.3f})",
                f"{max(run['seconds'] / base['seconds'] for run, base in pairs):.2f}",
                _longest_in_words(pairs),
                "yes" if all(run["same"] for run, _ in pairs) else "NO",
                min((run["noticed"] for run, _ in pairs if run["noticed"]), default="–"),
                sum(run["honest_refused"] for run, _ in pairs),
                _put_out_in_words([run for run, _ in pairs]),
            )
        )
    columns = (
        *(
            "attack",
            "liars",
            "merge",
            "of",
            "loss ×",
            "time ×",
            "longest rounds",
            "same",
            "noticed",
        ),
        *("honest refused", "put out"),
    )
    return markdown(columns, lines)


def _incomparable(run: Row, base: Row) -> str:
    """Why a run cannot be compared with `base`, the clean one, or itself where there is none; or empty."""
    if "ended" in run:
        return str(run["ended"])
    if base["attack"] != "clean":
        return f"no clean run of seed {run['seed']} to compare with"
    return f"the clean run of seed {run['seed']}: {base['ended']}" if "ended" in base else ""


def longest_of(run: Row, base: Row) -> list[float]:
    """How long a run's longest rounds are over the middle one of the clean run; none of an older row."""
    if "usual" not in run or "usual" not in base:
        return []
    return [round(each * run["usual"] / base["usual"], 2) for each in run["longest"]]


def _longest_in_words(pairs: Sequence[tuple[Row, Row]]) -> str:
    """The longest rounds, the second and the third, each of the run where it is longest."""
    told = [longest_of(run, base) for run, base in pairs]
    return ", ".join(f"{max(each):.2f}" for each in zip(*told, strict=False)) or "–"


def _put_out_in_words(runs: Sequence[Row]) -> str:
    num = sum(run["put_out"] for run in runs)
    num_honest = sum(run.get("honest_put_out", 0) for run in runs)
    if num_honest:
        return f"{num}, AND {num_honest} HONEST"
    if not num:
        return "–"
    of = sum(run["keys"] if "keys" in run else run["liars"] for run in runs)
    after = max((run["put_out_after"] or 0 for run in runs), default=0)
    return f"{num} of {of} after {after}" if after else f"{num} of {of}, all they did is undone"


def main() -> None:
    """Runs what is not in the results yet, then prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--liars", type=int, nargs="+", default=[2])
    parser.add_argument("--merges", nargs="+", default=["agreeing"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=TABLES["run"]["rounds"])
    parser.add_argument("--uneven", action="store_true", help="each node has text of its own")
    parser.add_argument("--audit", type=float, default=OuterSection().audit)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one attack of each kind, five rounds, one seed: two minutes on one core",
    )
    add_results(parser)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if chosen.quick:
        chosen.attacks, chosen.seeds, chosen.rounds = list(QUICK), [0], QUICK_ROUNDS
    known = [] if chosen.results is None else read_rows(chosen.results)
    rows = Rows(chosen.results)
    wanted = list(
        rows_of(
            chosen.attacks,
            liars=chosen.liars,
            merges=chosen.merges,
            seeds=chosen.seeds,
            rounds=chosen.rounds,
            uneven=chosen.uneven,
            audit=chosen.audit,
            invites=True,
        )
    )
    todo = [row for row in wanted if not any(row.items() <= there.items() for there in known)]
    began = time.monotonic()
    for place, row in enumerate(todo):
        rows.add(outcome_of(row))
        left = (time.monotonic() - began) / (place + 1) * (len(todo) - place - 1)
        print(f"{place + 1} of {len(todo)}, about {left / 60:.0f} min left", flush=True)
    print(report([*known, *rows.rows]))


if __name__ == "__main__":
    main()
