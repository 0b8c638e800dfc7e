"""What members that lie do to a swarm: its loss, rounds and time beside those of the same swarm without them.

    python -m benchmarks.attacks [--quick] [--attacks NAME ...] [--liars 2] [--merges agreeing ...]
        [--seeds 0 1] [--uneven] [--audit 0.05]

Eight nodes in virtual time (lab.simulation.swarm): the coordinator's core, store and desks, and the nodes'
daemons, exchange and codecs are those of production. Each node joins by an invite of its own. Liars are
ordinary nodes whose island publishes other things than it has trained, that tell the coordinator something
else than what they do, or that sign and send something else than they should. They know what honest nodes
published last. The Sybils are four keys for each liar, all of one invite.

Each row has the held-out loss of the final state over the one without liars (same seed, same merge), the
time of the run over that one's, how long its three longest rounds are over the middle one, whether all honest
nodes hold the same state, in which round a contribution
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import structlog
import torch
from blake3 import blake3
from google.protobuf.message import Message

from benchmarks.measurement import Row, Rows, add_results, markdown, parser_of, read_rows
from coordinator.swarm.members import BARRED
from lab.misreading import Misreading
from lab.simulation.plain_calls import spec_of
from lab.simulation.swarm import (
    Life,
    RunStuckError,
    SimulatedNode,
    SimulatedRun,
    identity_of,
    simulate,
)
from node.exchange.codecs.registry import codec_named
from node.exchange.mean import norm_of
from node.exchange.reduction import Reduction, SliceResult
from node.exchange.screening import CONTRADICTS_BELOW
from node.island.data.dataset import Corpus, read_corpus
from node.outer_state import Vector
from protocol.errors import AtollError
from protocol.run.run_spec import OuterSection
from protocol.v1 import session_pb2 as pb
from protocol.wire.payload import CONTRIBUTION, RESULT, Payload, PayloadHeader
from protocol.wire.rounds import WHOLE, Digest, NodeId

NODES = 8
SECONDS_A_STEP = 1.0  # virtual
MOST_SECONDS = 36_000.0  # virtual; a clean run takes four minutes
LIARS_LIVE_SECONDS = (
    9000.0  # virtual, longer than any of these runs: one in quarantine waits for ever
)
Z_OF_ALIE = 1.5
"""Standard deviations off the mean: what Baruch et al. 2019 ("A Little Is Enough") find to go unnoticed."""

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


@dataclass(slots=True, kw_only=True)
class Known:
    """What liars know: the pseudo-gradients that honest nodes published last, by their places."""

    last: dict[int, Vector] = field(default_factory=dict)

    def mean(self) -> Vector:
        """Of the honest ones [n]."""
        middle: Vector = np.mean(list(self.last.values()), axis=0).astype(np.float32)
        return middle

    def spread(self) -> Vector:
        """Their standard deviation [n]."""
        spread: Vector = np.std(list(self.last.values()), axis=0).astype(np.float32)
        return spread


Lie = Callable[[Vector, Known], Vector]
"""What a liar publishes, of its own pseudo-gradient [n] and what it knows; both descend when subtracted."""

Says = Callable[[Message], Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """What each liar does."""

    lie: Callable[[np.random.Generator], Lie] | None = None
    says: Says | None = None
    has_poisoned_labels: bool = False
    trained_share: float = 1.0  # of the inner steps that it says it has taken
    seconds_a_step: float = SECONDS_A_STEP
    lies: Callable[[SimulatedNode], None] | None = None
    keys: int = 1
    """That each liar has; several are all of one invite. With none it is not there at all."""


def times(factor: float) -> Callable[[np.random.Generator], Lie]:
    """Its own work, so many times."""
    return lambda _: lambda own, known: own * np.float32(factor)


def everywhere(value: float) -> Callable[[np.random.Generator], Lie]:
    """One number in all places."""
    return lambda _: lambda own, known: np.full_like(own, value)


def gaussian(rng: np.random.Generator) -> Lie:
    """Noise with ten times the norm of its own work."""

    def lie(own: Vector, known: Known) -> Vector:
        noise = rng.standard_normal(own.size, dtype=np.float32)
        return noise * np.float32(10 * np.linalg.norm(own) / np.linalg.norm(noise))

    return lie


def a_little_is_enough(_: np.random.Generator) -> Lie:
    """The honest ones' mean, off by what their own spread hides."""
    return lambda own, known: (
        known.mean() - np.float32(Z_OF_ALIE) * known.spread() if known.last else own
    )


def inner_product(_: np.random.Generator) -> Lie:
    """Against the honest ones' mean (Xie et al. 2020, "Fall of Empires"), at its own norm."""

    def lie(own: Vector, known: Known) -> Vector:
        if not known.last:
            return -own
        against = -known.mean()
        return against * np.float32(np.linalg.norm(own) / (np.linalg.norm(against) + 1e-30))

    return lie


def beside_the_momentum(_: np.random.Generator) -> Lie:
    """The same in all that is new: at right angles to where the model has been going."""
    went: list[Vector] = []

    def lie(own: Vector, known: Known) -> Vector:
        if not known.last:
            return -own
        middle = known.mean()
        way = went.pop() if went else np.zeros_like(middle)
        along = float(middle @ way) / (float(way @ way) + 1e-30)
        against = np.float32(along) * way - middle
        went.append(np.float32(0.7) * way + middle)
        return against * np.float32(np.linalg.norm(own) / (np.linalg.norm(against) + 1e-30))

    return lie


def as_far_as_hidden(rng: np.random.Generator) -> Lie:
    """Against their mean as far as `agreeing` takes for usual, and noise for the rest of its own norm."""

    def lie(own: Vector, known: Known) -> Vector:
        if not known.last:
            return own
        units = [each / (np.linalg.norm(each) + 1e-30) for each in known.last.values()]
        middle = np.mean(units, axis=0)
        # Its length is also how far each agrees with it on average.
        length = float(np.linalg.norm(middle)) + 1e-30
        usual = median(float(one @ other) for one, other in combinations(units, 2))
        part = min(1.0, 0.8 * CONTRADICTS_BELOW * max(0.0, usual) / length)
        noise = rng.standard_normal(own.size, dtype=np.float32)
        hidden = noise * ((1 - part**2) ** 0.5 / np.linalg.norm(noise)) - middle * (part / length)
        told: Vector = (hidden * np.linalg.norm(own)).astype(np.float32)
        return told

    return lie


def copied(_: np.random.Generator) -> Lie:
    """What an honest node published last: no work of its own."""
    return lambda own, known: next(iter(known.last.values()), np.zeros_like(own))


def copied_mean(_: np.random.Generator) -> Lie:
    """What honest nodes published last, on average: no work of its own."""
    return lambda own, known: known.mean() if known.last else own


def with_the_mean(_: np.random.Generator) -> Lie:
    """The same, and its own work on top, at the norm of the mean."""

    def lie(own: Vector, known: Known) -> Vector:
        if not known.last:
            return own
        middle = known.mean()
        both = middle + own
        return both * np.float32(np.linalg.norm(middle) / (np.linalg.norm(both) + 1e-30))

    return lie


def stale(_: np.random.Generator) -> Lie:
    """What it has trained first, in every round."""
    first: list[Vector] = []

    def lie(own: Vector, known: Known) -> Vector:
        first.append(own.copy())
        return first[0]

    return lie


def claims_speed(message: Message) -> Message:
    """Says that it trains 20,000 times as fast, and that its link carries a terabyte a second."""
    if isinstance(message, pb.ReportRequest):
        for report in message.reports:
            if report.HasField("trained"):
                report.trained.seconds /= 20_000
    if isinstance(message, pb.HeartbeatRequest):
        message.link_rates.up_bytes_per_second = 1e12
        message.link_rates.down_bytes_per_second = 1e12
    return message


def votes_for_a_made_up_state(message: Message) -> Message:
    """Reports a digest that no honest node has, the same one as the other liars."""
    made_up = b"\x66" * 32
    if isinstance(message, pb.ReportRequest):
        for report in message.reports:
            if report.HasField("applied"):
                report.applied.outer_digest = made_up
    if isinstance(message, pb.HeartbeatRequest) and message.outer_round:
        message.outer_digest = made_up
    return message


def reports_nothing(message: Message) -> Message:
    """Keeps its lease, and tells of nothing that it did."""
    if isinstance(message, pb.ReportRequest):
        del message.reports[:]
    return message


FIRST_LIE = 2
"""The round from which on liars lie that send others something else: they have work by then."""

Sends = Callable[[NodeId, Payload], Sequence[Payload]]
"""What a liar sends a peer in the place of a payload of its own."""


def _sending(node: SimulatedNode, sends: Sends) -> None:
    honest = node.transport.push

    async def push(peer: NodeId, payload: Payload, *, timeout_seconds: float) -> bytes:
        if payload.header.round < FIRST_LIE or payload.header.sender_id != node.node_id:
            return await honest(peer, payload, timeout_seconds=timeout_seconds)
        answer = b""
        for told in sends(peer, payload):
            answer = await honest(peer, told, timeout_seconds=timeout_seconds)
        return answer

    node.transport.push = push  # type: ignore[method-assign] # a liar's


def _signed(node: SimulatedNode, header: PayloadHeader, body: bytes, norm: float) -> Payload:
    changed = replace(header, body_digest=Digest(blake3(body).digest()), norm=norm)
    return Payload(header=changed.signed(node.identity), body=body)


def _turned(node: SimulatedNode, payload: Payload) -> Payload:
    """The same backwards, well-formed and signed."""
    header = payload.header
    codec = codec_named(header.codec)
    body = codec.encode(-codec.decode(payload.body, header.num_elements))
    norm = (
        norm_of(codec.decode(body, header.num_elements)) if header.kind == RESULT else header.norm
    )
    return _signed(node, header, body, norm)


def signs_two_contributions(node: SimulatedNode) -> None:
    """Each reducer gets its work, and then the same backwards for the same slot."""

    def sends(_: NodeId, payload: Payload) -> Sequence[Payload]:
        is_contribution = payload.header.kind == CONTRIBUTION
        return [payload, _turned(node, payload)] if is_contribution else [payload]

    _sending(node, sends)


def signs_two_results(node: SimulatedNode) -> None:
    """Every other member gets another result than it reports."""

    def sends(peer: NodeId, payload: Payload) -> Sequence[Payload]:
        is_lie = payload.header.kind == RESULT and int(peer[:2], 16) % 2 == 0
        return [_turned(node, payload) if is_lie else payload]

    _sending(node, sends)


def sends_nonsense(node: SimulatedNode) -> None:
    """Contributions whose scales are NaN, of the right size and digest and signed, that no codec takes."""

    def sends(_: NodeId, payload: Payload) -> Sequence[Payload]:
        if payload.header.kind != CONTRIBUTION:
            return [payload]
        body = b"\xff" * len(payload.body)
        return [_signed(node, payload.header, body, payload.header.norm)]

    _sending(node, sends)


def keeps_contributions(node: SimulatedNode) -> None:
    """It says that it has trained, and takes its work into its own slices alone."""
    _sending(node, lambda _, payload: [] if payload.header.kind == CONTRIBUTION else [payload])


def keeps_results(node: SimulatedNode) -> None:
    """It reports the results of its slices, and sends them to nobody."""
    _sending(node, lambda _, payload: [] if payload.header.kind == RESULT else [payload])


def reduces_backwards(node: SimulatedNode) -> None:
    """Its results are the means of its slices turned round: as long as honest ones, so no bound cuts them."""
    honest = node.outer.result_of

    def lying(reduction: Reduction, fragment: int) -> SliceResult | None:
        if reduction.plan.round >= FIRST_LIE:
            turned: Any = Misreading(reduction.uplink)
            reduction = replace(reduction, uplink=turned)
        return honest(reduction, fragment)

    node.outer.result_of = lying  # type: ignore[method-assign] # a liar's


def makes_nonsense_of_its_slices(node: SimulatedNode) -> None:
    """It reports, signs and sends results that no codec takes, the same to all."""
    honest = node.outer.result_of

    def lying(reduction: Reduction, fragment: int) -> SliceResult | None:
        made = honest(reduction, fragment)
        if made is None or reduction.plan.round < FIRST_LIE:
            return made
        header, body = made.payload.header, b"\xff" * len(made.payload.body)
        return replace(made, payload=_signed(node, header, body, header.norm))

    node.outer.result_of = lying  # type: ignore[method-assign] # a liar's


ATTACKS: Mapping[str, Attack] = {
    "away": Attack(keys=0),
    "sign flip × 1": Attack(lie=times(-1)),
    "sign flip × 10": Attack(lie=times(-10)),
    "scale × 100": Attack(lie=times(100)),
    "1e30": Attack(lie=everywhere(1e30)),
    "Gaussian × 10": Attack(lie=gaussian),
    "ALIE": Attack(lie=a_little_is_enough),
    "inner product": Attack(lie=inner_product),
    "beside the momentum": Attack(lie=beside_the_momentum),
    "as far as hidden": Attack(lie=as_far_as_hidden),
    "copy": Attack(lie=copied),
    "copied mean": Attack(lie=copied_mean),
    "a tenth": Attack(trained_share=0.1),
    "a tenth and the mean": Attack(lie=with_the_mean, trained_share=0.1),
    "nothing": Attack(lie=times(0)),
    "stale": Attack(lie=stale),
    "label poison": Attack(has_poisoned_labels=True),
    "false speed": Attack(says=claims_speed),
    "made-up state": Attack(says=votes_for_a_made_up_state),
    "idle": Attack(says=reports_nothing),
    "slow": Attack(seconds_a_step=100 * SECONDS_A_STEP),
    "kept contributions": Attack(lies=keeps_contributions),
    "kept results": Attack(lies=keeps_results),
    "NaN": Attack(lies=sends_nonsense),
    "two contributions": Attack(lies=signs_two_contributions),
    "two results": Attack(lies=signs_two_results),
    "lying reducer": Attack(lies=reduces_backwards),
    "nonsense results": Attack(lies=makes_nonsense_of_its_slices),
    "Sybils": Attack(lie=times(-1), says=votes_for_a_made_up_state, keys=4),
}

UNSCREENED = "unscreened"
"""Beside the merges: the mean of all that comes."""

WORST = ("sign flip × 10", "ALIE", "inner product", "label poison")
QUICK = ("beside the momentum", "lying reducer")


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
                _longest_in_words([run for run, _ in pairs]),
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


def _longest_in_words(runs: Sequence[Row]) -> str:
    """The longest rounds, the second and the third, each of the run where it is longest."""
    told = [run["longest"] for run in runs if "longest" in run]
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
        help="two of the worst, 6 rounds, one seed",
    )
    add_results(parser)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if chosen.quick:
        chosen.attacks, chosen.seeds, chosen.rounds = list(QUICK), [0], 6
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
