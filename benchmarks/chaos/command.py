"""A swarm of real processes that are killed, about one in every round, beside one that nothing befalls.

    python -m benchmarks.chaos [--nodes 6] [--rounds 60] [--seed 0] [--kills-per-round 1] [--out DIR]
    python -m benchmarks.chaos --short

The same swarm trains twice on loopback: for fewer rounds undisturbed, then with faults. Drawn from
the seed (benchmarks.chaos.plan): SIGKILL for a node's daemon, one of its ranks, its p2pd, or the
coordinator, half of them when the victim enters a phase of the round, half at any time. Victims come
back in their folders after a pause; some nodes never do, and new ones join in their place.

Ranks train in turns (benchmarks.chaos.turns), so that each node has a speed of its own, whoever is dead.
Rounds end at their deadline for training. Prints what it cost and whether everything still holds
(lab.processes.invariants), and ends with 1 when it does not. Raw results go to DIR/results.jsonl.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.plan import PlannedFault, plan_faults
from benchmarks.chaos.report import Outcome, outcome_of, report
from benchmarks.chaos.turns import Turns
from benchmarks.measurement import machine, parser_of
from lab.processes.faults import Fault, Faults
from lab.processes.invariants import broken, gather
from lab.processes.logs import Entry
from lab.processes.swarm import CommandFailedError, Member, RealSwarm
from lab.run_files import TINY_MODEL
from protocol.errors import ExitCode
from protocol.files.durable import toml_of

STARTING_ROUNDS = 2
"""The first nodes begin before the last are there. Neither faults nor figures count these rounds."""

GOODBYE_SECONDS = 10.0
"""Nodes that are not up to date when the run is finished wait long for somebody who is. We do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is run."""

    num_nodes: int
    rounds: int
    undisturbed_rounds: int
    seed: int
    num_faults: int
    num_joiners: int
    round_seconds: float


class Chaos:
    """Carries out planned faults while a swarm trains."""

    def __init__(self, swarm: RealSwarm, plan: Sequence[PlannedFault], shape: Shape) -> None:
        self.faults = Faults(swarm.logs)
        self.gone: set[str] = set()  # nodes that do not come back
        self.newest_round = 0
        self.first_round: int | None = None  # of faults: that in which all nodes take part
        self._swarm = swarm
        self._takes_part_in: dict[str, int] = {}  # node → its newest round since it was started
        self._late = set(names_of(shape.num_nodes))
        self._coming = list(plan)
        self._round_seconds = shape.round_seconds
        self._rng = random.Random(shape.seed)
        self._joining: list[str] = []
        self._back_at: dict[str, float] = {}
        swarm.logs.listen(self._hear)

    def _hear(self, name: str, entry: Entry) -> None:
        """The coordinator's word can die with it; the nodes have the round from its plan."""
        if entry.get("event") == "run":  # it starts anew
            self._takes_part_in.pop(name, None)
        if entry.get("event") != "phase":
            return
        if entry["phase"] in ("opened", "training"):
            self.newest_round = max(self.newest_round, entry["round"])
        if entry["phase"] == "training":
            self._takes_part_in[name] = entry["round"]
        if entry["phase"] == "contributing":
            self._late.discard(name)

    def step(self) -> None:
        """Arms what is due, and starts again who has ended by itself."""
        if self.first_round is None and not self._late:
            self.first_round = self.newest_round + 1
        while self._coming and self.first_round is not None:
            planned = self._coming[0]
            number = self.first_round - 1 + planned.round
            # Before the round begins, lest its first phase be missed; but a time counts within it.
            is_due = number <= self.newest_round + int(planned.phase is not None)
            if not is_due or not self._arm(planned, number):
                break
            del self._coming[0]
        if self._joining and not self._swarm.coordinator.has_ended:
            self._let_join(self._joining[0])
        self._bring_back()

    def _arm(self, planned: PlannedFault, number: int) -> bool:
        """False when nobody can be struck now."""
        victim = self._victim_of(planned)
        if victim is None:
            return False
        kill = {"rank": self.faults.kill_rank, "p2pd": self.faults.kill_p2pd}.get(
            planned.kind, self.faults.kill
        )
        fault = kill(victim)
        if planned.joiner is not None:
            self.gone.add(victim.name)
        elif planned.kind != "rank":
            fault.then_restart(after_seconds=planned.pause_seconds)
        if planned.phase is not None:
            fault.when(round=number, phase=planned.phase)
        else:
            fault.after(planned.part * self._round_seconds)
        if planned.joiner is not None:
            self._joining.append(planned.joiner)
        return True

    def _victim_of(self, planned: PlannedFault) -> Member | None:
        busy = {fault.victim.name for fault in self.faults.left} | self.gone
        if planned.kind == "coordinator":
            candidates = [self._swarm.coordinator]
        else:
            known = (self._swarm.nodes.get(name) for name in planned.victims)
            candidates = [node for node in known if node is not None and self._fits(node, planned)]
        return next((m for m in candidates if m.name not in busy and not m.has_ended), None)

    def _fits(self, node: Member, planned: PlannedFault) -> bool:
        """Whether the node will pass the phase; a time finds it wherever it is, also starting."""
        if planned.phase is None:
            return True
        return self._takes_part_in.get(node.name, -1) >= self.newest_round - 1

    def _let_join(self, name: str) -> None:
        with suppress(
            CommandFailedError
        ):  # the coordinator is just away: the next step tries again
            (node,) = self._swarm.join(name)
            node.start()
            self._joining.remove(name)

    def _bring_back(self) -> None:
        """Nodes that ended by themselves, as when their ranks died too often."""
        awaited = {fault.victim.name for fault in self.faults.left if fault.fired is not None}
        busy = awaited | self.gone
        for name, node in self._swarm.nodes.items():
            if name in busy or not node.has_ended:
                self._back_at.pop(name, None)
            elif time.monotonic() >= self._back_at.setdefault(
                name, time.monotonic() + self._rng.uniform(0, 3)
            ):
                node.start()


def run_file(shape: Shape, rounds: int) -> str:
    """The run, with rounds of about the length that was asked for."""
    train = shape.round_seconds
    return toml_of(
        {
            "run": {"name": "chaos", "rounds": rounds, "min_nodes": 2},
            "model": TINY_MODEL,
            "inner": {"steps": 400, "batch": 4},
            "deadlines": {
                "train": train,
                "contribute": train + 3,
                "commit": train + 5,
                "apply": 20,
                "lease": 4,
            },
            "evaluation": {"every_rounds": 10, "samples": 16},
        }
    )


def train(folder: Path, shape: Shape, plan: Sequence[PlannedFault]) -> tuple[Outcome, list[str]]:
    """Runs one swarm to its end; what came of it, and what is broken."""
    rounds = STARTING_ROUNDS + (shape.rounds if plan else shape.undisturbed_rounds)
    with (
        RealSwarm(folder, run_file(shape, rounds)) as swarm,
        Turns(swarm, num_nodes=shape.num_nodes),
    ):
        chaos = Chaos(swarm, plan, shape)
        for node in swarm.join(*names_of(shape.num_nodes)):
            node.start()
        told = -1

        def is_finished() -> bool:
            nonlocal told
            chaos.step()
            if swarm.committed_round > told:
                told = swarm.committed_round
                num_fired = sum(fault.fired is not None for fault in chaos.faults.all)
                show(f"{folder.name}: round {told} of {rounds}, {num_fired} faults so far")
            return swarm.is_finished

        limit = 120 + rounds * (shape.round_seconds + 15)
        stuck = []
        try:
            swarm.until(is_finished, "the end of the run", seconds=limit)
        except TimeoutError as error:
            stuck = [f"the run did not end within {limit:.0f} s: {error}"]
        dismiss(swarm)
        evidence = gather(swarm)
        left = swarm.left_nothing()
        outcome = outcome_of(
            evidence, chaos.faults.all, names=names_of(shape.num_nodes), gone=chaos.gone
        )
        return outcome, [*stuck, *broken(evidence), *left, *failures_of(swarm, chaos.faults.all)]


def names_of(num_nodes: int) -> list[str]:
    """What the nodes are called."""
    return [f"node-{number}" for number in range(1, num_nodes + 1)]


def dismiss(swarm: RealSwarm) -> None:
    """Waits until the nodes have ended, and stops those that wait for a state nobody has."""
    nodes = swarm.nodes.values()
    with suppress(TimeoutError):
        swarm.until(
            lambda: all(node.has_ended for node in nodes), "goodbyes", seconds=GOODBYE_SECONDS
        )
    for node in nodes:
        node.send(signal.SIGTERM)
    swarm.until(lambda: all(node.has_ended for node in nodes), "the nodes to stop")


def failures_of(swarm: RealSwarm, faults: Sequence[Fault]) -> list[str]:
    """Processes that ended otherwise than well or by our hand."""
    found = []
    for member in swarm.members:
        is_stripped = any(f.victim is member and f.fired and f.kind != "kill" for f in faults)
        allowed: set[int] = {0, -signal.SIGKILL}
        allowed |= {ExitCode.SYSTEM} if is_stripped else set()
        odd = [code for code in member.exit_codes if code not in allowed]
        if odd:
            found.append(f"{member.name} ended with {odd}; read {member.log}")
    return found


def show(text: str) -> None:
    """Progress, for who watches."""
    print(text, file=sys.stderr, flush=True)


def shape_of(chosen: argparse.Namespace) -> Shape:
    """The whole benchmark, or the short one of the tests."""
    rounds, num_nodes = (8, 3) if chosen.short else (chosen.rounds, chosen.nodes)
    num_faults = 4 if chosen.short else round(chosen.kills_per_round * rounds)
    return Shape(
        num_nodes=num_nodes,
        rounds=rounds,
        undisturbed_rounds=max(2, rounds // 3),
        seed=chosen.seed,
        num_faults=num_faults,
        num_joiners=rounds // 15,
        round_seconds=2.5 if chosen.short else chosen.round_seconds,
    )


def run(shape: Shape, out: Path) -> int:
    """Both runs, the report, the raw results; the exit code."""
    plan = plan_faults(
        random.Random(shape.seed),
        names=names_of(shape.num_nodes),
        rounds=shape.rounds,
        num_faults=shape.num_faults,
        joiners=[f"joiner-{number}" for number in range(1, shape.num_joiners + 1)],
    )
    undisturbed, broken_before = train(out / "undisturbed", shape, ())
    disturbed, broken_after = train(out / "faults", shape, plan)
    what_broke = [*broken_before, *broken_after]
    print("\n".join(report(undisturbed, disturbed, what_broke)))
    lines: list[dict[str, Any]] = [
        {"what": "shape", **machine(), **asdict(shape)},
        *({"what": "planned", **asdict(planned)} for planned in plan),
        *undisturbed.lines("undisturbed"),
        *disturbed.lines("faults"),
        *({"what": "broken", "sentence": sentence} for sentence in what_broke),
    ]
    with (out / "results.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return int(bool(what_broke))


def main() -> int:
    """Runs what the command line asks for; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", type=int, default=6, help="default 6")
    parser.add_argument("--rounds", type=int, default=60, help="with faults (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default 0)")
    parser.add_argument("--kills-per-round", type=float, default=1.0, help="default 1")
    parser.add_argument(
        "--round-seconds", type=float, default=10.0, help="for training (default 10)"
    )
    parser.add_argument("--out", type=Path, help="folder for results and logs; it must not exist")
    parser.add_argument(
        "--short",
        action="store_true",
        help="3 nodes, 8 rounds of 2.5 s, 4 kills, whatever else is said",
    )
    chosen = parser.parse_args()
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, mode=0o700)
        return run(shape_of(chosen), chosen.out.resolve())
    folder = Path(tempfile.mkdtemp(prefix="atoll-chaos-"))
    code = run(shape_of(chosen), folder)
    if code:
        print(f"logs and results stay in {folder}")
    else:
        shutil.rmtree(folder)
    return code
