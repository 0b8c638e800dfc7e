"""One contender of benchmarks/wan over one kind of link: started, followed, ended, evaluated.

Nobody evaluates while a contender trains: nodes keep their global weights from time to time, and
this process measures them when the contender has ended.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.wan.peers import atoll
from benchmarks.wan.peers.contender import Contender, not_installed
from benchmarks.wan.peers.order import Order
from benchmarks.wan.peers.stage import MIDDLE, ContenderFailedError, Stage
from benchmarks.wan.report import Measured, Point
from lab.network.lab import NetworkLab
from lab.network.links import Link
from lab.network.switch import DEVICE
from node.island.data.dataset import read_corpus
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh import Mesh
from node.island.training.trainer import Trainer
from node.outer_state import Vector
from protocol.run.run_files import validated
from protocol.run.run_spec import RunSpec

CONGESTION_CONTROL = "cubic"
"""What most machines use."""

_POLL_SECONDS = 0.2
_SAMPLES_AT_ONCE = 16
_PEERS = "benchmarks.wan.peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Links and training that all contenders of a table share."""

    num_nodes: int
    mbit: float  # of each host's downlink; 0: without a limit
    up_share: float  # the uplink's part of it
    round_trip_ms: float  # between two hosts
    step_seconds: float
    seconds: float  # of training
    most_steps: int | None  # or an end by inner steps: of all variants with the same tokens
    num_saves: int
    tables: Mapping[str, Mapping[str, Any]]  # of the run file

    def links(self) -> dict[str, Link]:
        """The nodes, and the host of a coordinator or a lighthouse, all with the same link."""
        rate = 1e6 * self.mbit or float("inf")
        # Two links make a path, and a round trip passes it twice.
        link = Link(
            up_bits_per_second=rate * self.up_share,
            down_bits_per_second=rate,
            delay_seconds=self.round_trip_ms / 4e3,
        )
        names = [*(f"node-{number}" for number in range(1, self.num_nodes + 1)), MIDDLE]
        return dict.fromkeys(names, link)

    def tables_of(self, contender: Contender) -> dict[str, dict[str, Any]]:
        """The run file with what the contender sets otherwise."""
        names = self.tables.keys() | contender.tables.keys()
        return {
            name: {**self.tables.get(name, {}), **contender.tables.get(name, {})} for name in names
        }

    def spec(self, contender: Contender) -> RunSpec:
        return validated(self.tables_of(contender), origin=f"the run file of {contender.name}")

    def steps_between(self, contender: Contender) -> int:
        """Inner steps from one exchange of it to the next."""
        return self.spec(contender).inner.steps if contender.has_rounds else 1

    def shared_spec(self) -> RunSpec:
        """What all contenders are judged by."""
        tables = {name: dict(table) for name, table in self.tables.items()}
        return validated(tables, origin="the benchmark's run file")


class Judge:
    """Measures the held-out loss of weights, for all contenders on the same samples."""

    def __init__(self, run: RunSpec) -> None:
        # More samples at once than are trained on: fewer passes for the same sum.
        inner = run.inner.model_copy(update={"batch": _SAMPLES_AT_ONCE})
        spec = run.model_copy(update={"inner": inner})
        self.first = initial_parameters(spec)
        corpus = read_corpus(
            spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
        )
        self._trainer = Trainer(
            spec=spec,
            corpus=corpus,
            device=torch.device("cpu"),
            mesh=Mesh(),
            clock=time.monotonic,
        )
        self.first_loss = self.loss(self.first)

    def loss(self, weights: Vector) -> float:
        """Nats per byte."""
        self._trainer.adopt(weights)
        return self._trainer.evaluate().loss


def measure(
    contender: Contender, case: Case, judge: Judge, show: Callable[[str], None]
) -> Measured:
    """Lets one contender train; a failure is told in its row, as the others can still be measured."""
    row = Measured(name=contender.name, words=contender.words, is_atoll=contender.is_atoll)
    if not contender.is_installed:
        return replace(row, trouble=not_installed(contender))
    with tempfile.TemporaryDirectory(prefix="atoll-wan-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        try:
            saved, troubles = _train(contender, case, folder, show)
        except ContenderFailedError as error:
            return replace(row, trouble=f"failed: {error.what.splitlines()[-1]}")
        if not saved:
            return replace(row, trouble="no exchange ended in time")
        show(f"{contender.name}: evaluating {len(saved)} models")
        points = [Point(seconds=0, inner_steps=0, tokens=0, sent_bytes=0, loss=judge.first_loss)]
        step_tokens = case.num_nodes * case.spec(contender).tokens_per_inner_step
        for said in saved:
            points.append(
                Point(
                    seconds=said["seconds"],
                    inner_steps=said["steps"],
                    tokens=said["steps"] * step_tokens,
                    sent_bytes=said["sent_bytes"],
                    loss=judge.loss(np.load(folder / said["path"])),
                )
            )
        return replace(
            row,
            points=tuple(points),
            step_seconds=case.step_seconds,
            late_share=saved[-1]["late_steps"] / saved[-1]["steps"],
            replicas_apart=_apart(folder, judge.first),
            trouble=troubles,
        )


def orders_of(contender: Contender, case: Case, lab: NetworkLab, folder: Path) -> list[Order]:
    """What each node is told."""
    nodes = [host for host in lab.hosts if host != MIDDLE]
    return [
        Order(
            rank=rank,
            addresses=tuple(lab.address(host) for host in nodes),
            middle=lab.address(MIDDLE),
            interface=DEVICE,
            tables=case.tables_of(contender),
            options=contender.options,
            step_seconds=case.step_seconds,
            save_seconds=case.seconds / case.num_saves,
            last_step=case.most_steps,
            folder=folder,
        )
        for rank in range(len(nodes))
    ]


def _train(
    contender: Contender, case: Case, folder: Path, show: Callable[[str], None]
) -> tuple[list[dict[str, Any]], str]:
    """What the first node saved, with the bytes sent by then; and what went wrong meanwhile."""
    with (
        NetworkLab(case.links(), congestion_control=CONGESTION_CONTROL) as lab,
        Stage(lab, orders_of(contender, case, lab, folder), folder) as stage,
    ):
        _start(contender, stage)
        show(f"{contender.name}: starting")
        stage.until(lambda: all(stage.said(rank) for rank in range(case.num_nodes)), "training")
        began_at = min(stage.said(rank)[0]["at"] for rank in range(case.num_nodes))
        sent_before = _sent(lab)
        saved: list[dict[str, Any]] = []
        while time.monotonic() < began_at + case.seconds and not _has_ended(saved, case):
            stage.check()
            news = [said for said in stage.said(0) if said["said"] == "saved"][len(saved) :]
            for said in news:
                sent = _sent(lab)
                sent_bytes = max(sent[host] - sent_before[host] for host in sent)
                saved.append(said | {"seconds": said["at"] - began_at, "sent_bytes": sent_bytes})
                show(f"{contender.name}: {said['steps']} inner steps, {saved[-1]['seconds']:.0f} s")
                if _has_ended(saved, case):
                    break
            time.sleep(_POLL_SECONDS)
        troubles = {
            said["what"]
            for rank in range(case.num_nodes)
            for said in stage.said(rank)
            if said["said"] == "trouble"
        }
        return saved, "; ".join(sorted(troubles)[:3])


def _has_ended(saved: Sequence[Mapping[str, Any]], case: Case) -> bool:
    """Whether the newest weights are those after the last inner step."""
    return bool(case.most_steps and saved and saved[-1]["steps"] >= case.most_steps)


def _start(contender: Contender, stage: Stage) -> None:
    if contender.is_atoll:
        atoll.start(stage)
        return
    module = f"{_PEERS}.{contender.module}"
    if contender.has_lighthouse:
        num_nodes = str(len(stage.orders))
        stage.start(MIDDLE, "lighthouse", stage.module(module, "lighthouse", num_nodes))
        stage.until(lambda: bool(stage.log_text("lighthouse")), "the lighthouse")
    for host, _, order_file in stage.nodes():
        stage.start(host, host, stage.module(module, order_file))


def _sent(lab: NetworkLab) -> dict[str, int]:
    """Bytes of packets that each node has got through to others so far."""
    sent = dict.fromkeys((host for host in lab.hosts if host != MIDDLE), 0)
    for one, other in itertools.permutations(lab.hosts, 2):
        if one != MIDDLE:
            sent[one] += lab.traffic(one, other).delivered_bytes
    return sent


def _apart(folder: Path, first: Vector) -> float | None:
    """How far two nodes' weights are apart after the last exchange that both kept; None: no such one.

    As a share of how far they have moved since the run began.
    """
    exchanges = [
        {int(path.stem.rpartition("-")[2]) for path in folder.glob(f"weights-{rank}-*.npy")}
        for rank in (0, 1)
    ]
    both = exchanges[0] & exchanges[1]
    if not both:
        return None
    one, other = (np.load(folder / f"weights-{rank}-{max(both)}.npy") for rank in (0, 1))
    return float(np.linalg.norm(one - other) / np.linalg.norm(one - first))
