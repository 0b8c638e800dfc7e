"""The swarm of benchmarks/exchange: nodes in hosts of the network lab, and the coordinator's core."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from benchmarks.exchange.case import Case
from coordinator.swarm.events import Attached, Event, HeartbeatSeen, Reported, Tell
from coordinator.swarm.state import Rules
from coordinator.swarm.transition import initial_state, step
from lab.network.lab import NetworkLab
from lab.processes.family import ProcessorTime, processor_time
from protocol.errors import SystemRefusedError
from protocol.run.models import Layout
from protocol.run.run_spec import ExchangeSection
from protocol.trust.identity import node_id_of
from protocol.v1 import round_pb2, session_pb2
from protocol.wire import convert
from protocol.wire.messages import Applied, Held, Reduced, RoundCommitted, RoundOpened, Trained
from protocol.wire.payload import WireTotals, grown
from protocol.wire.rounds import (
    Commit,
    ContributionDigest,
    Contributor,
    CorpusSummary,
    Digest,
    LayoutSummary,
    NodeId,
    PeerAddress,
    Plan,
    RosterEntry,
)
from protocol.wire.vitals import UNMEASURED, LinkRates

RUN = Digest(bytes(32))
TOKENS = 8
POLL_SECONDS = 0.05

ESTIMATED_BYTES = 100
"""By so much two nodes' counts of what one sent the other may differ: headers are estimates."""


@dataclass(slots=True, kw_only=True)
class Node:
    """One child process as the benchmark sees it."""

    host: str
    process: asyncio.subprocess.Process
    node_id: NodeId = field(init=False)
    address: PeerAddress | None = None
    totals: WireTotals = field(default_factory=dict)  # when the latest round was counted
    sent_bytes: int = 0  # in that round, to peers
    received_bytes: int = 0

    @property
    def is_helper(self) -> bool:
        """Whether it reduces only."""
        return self.host.startswith("helper")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTime:
    """One round that was measured."""

    seconds: float  # as over the links that are meant, whatever the motion
    limit_seconds: float
    counted_bytes: int  # sent by all, as the ledger has it
    seen_bytes: int  # sent by all, as the lab has it
    most_sent_bytes: int  # by one node
    received_bytes: int  # by all: the same but for what came twice
    clock_seconds: float  # from the plan to the same state everywhere: what processor time is of
    processor: ProcessorTime

    @property
    def ratio(self) -> float:
        return self.seconds / self.limit_seconds


class Swarm:
    """The nodes of one case, and the coordinator's core."""

    def __init__(self, case: Case, lab: NetworkLab) -> None:
        self._case = case
        self._lab = lab
        self.nodes: list[Node] = []
        self._patience = patience = case.patience_seconds
        rules = Rules(
            total_rounds=10**6,
            min_nodes=case.num_nodes,
            inner_steps=1,
            batch=1,
            context=TOKENS,
            train_seconds=patience,
            contribute_seconds=patience,
            commit_seconds=patience,
            apply_seconds=patience,
            lease_seconds=1e6,
            evaluate_every_rounds=10**6,
            slice_elements=case.slice_elements,
            layout=Layout.of([("w", (case.num_elements,))]).summary(),
            codecs=ExchangeSection.model_validate(
                {"uplink": case.codecs.uplink, "downlink": case.codecs.downlink}
            ).codecs,
        )
        self._state = initial_state(rules, RUN)
        self._next_plan: Plan | None = None

    @property
    def learnt_rates(self) -> list[tuple[float | None, float | None]]:
        """What the core goes by of each node's link, up and down, bytes per second in this motion."""
        members = [self._state.members[node.node_id] for node in self.nodes]
        return [
            (member.rates.up_bytes_per_second, member.rates.down_bytes_per_second)
            for member in members
        ]

    async def start(self) -> None:
        """Starts all nodes and lets them attach."""
        order = {
            "num_elements": self._case.num_elements,
            "uplink": self._case.codecs.uplink,
            "downlink": self._case.codecs.downlink,
            "stripes": self._case.stripes,
            "slow_motion": self._case.slow_motion,
        }
        for host in self._lab.hosts:
            command = self._lab.command(host, [sys.executable, "-m", "benchmarks.exchange.node"])
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                limit=1 << 24,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            node = Node(host=host, process=process)
            self.nodes.append(node)
            self._tell(node, host=self._lab.address(host), tokens=TOKENS, **order)
        told = [await self._hear(node, "started") for node in self.nodes]
        for node, started in zip(self.nodes, told, strict=True):
            key = bytes.fromhex(started["public_key"])
            node.node_id = node_id_of(key)
            node.address = PeerAddress(public_key=key, multiaddrs=tuple(started["multiaddrs"]))
        # The first plan comes with the last node, so helpers are there before.
        for node, started in reversed(list(zip(self.nodes, told, strict=True))):
            self._attach(node, started)
            if self._case.num_helpers and not node.is_helper:
                self._shut_out(node)
        members = (
            RosterEntry(node_id=n.node_id, node_name=n.host, address=n.address)
            for n in self.nodes
            if n.address is not None
        )
        roster = session_pb2.Roster(members=map(convert.fields_to_wire, members))
        await self._all("roster", roster, answer="met")

    @property
    def _training(self) -> list[Node]:
        return [node for node in self.nodes if not node.is_helper]

    def _attach(self, node: Node, started: dict[str, Any]) -> None:
        assert node.address is not None
        layout = session_pb2.LayoutSummary.FromString(base64.b64decode(started["layout"]))
        self._step(
            Attached(
                node_id=node.node_id,
                node_name=node.host,
                address=node.address,
                device="cpu",
                num_ranks=1,
                version="1",
                run_digest=RUN,
                layout=convert.from_wire(layout, LayoutSummary),
                codecs=self._state.rules.codecs,
                corpus=CorpusSummary(digest=RUN, num_samples=10**9, num_bytes=10**9),
                outer_round=0,
                outer_digest=Digest(bytes.fromhex(started["digest"])),
                process_id=1,
                is_helper=node.is_helper,
            )
        )

    def _shut_out(self, node: Node) -> None:
        """Nobody dials the node any more, as behind a symmetric NAT; the core is told of it."""
        self._lab.firewall(node.host)
        self._alive(node, unreachable=tuple(n.node_id for n in self._training if n is not node))

    def _alive(
        self, node: Node, *, unreachable: tuple[NodeId, ...], rates: LinkRates = UNMEASURED
    ) -> None:
        member = self._state.members[node.node_id]
        self._step(
            HeartbeatSeen(
                node_id=node.node_id,
                session_id=member.session_id,
                outer_round=member.outer_round,
                outer_digest=member.outer_digest,
                unreachable=unreachable,
                rates=rates,
            )
        )

    async def stop(self) -> None:
        """Ends the nodes."""
        for node in self.nodes:
            assert node.process.stdin is not None
            node.process.stdin.close()
        for node in self.nodes:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(30):
                    await node.process.wait()
            if node.process.returncode is None:
                node.process.kill()
                await node.process.wait()

    async def round(self) -> tuple[RoundTime, Plan]:
        """One round from its plan to the same state on all nodes."""
        plan, self._next_plan = self._next_plan, None
        assert plan is not None, self._state.open_round
        began_at, processor_before = time.monotonic(), processor_time(os.getpid())
        await self._all("plan", convert.to_wire(plan, round_pb2.Plan), answer="opened")
        seen_before = self._seen()
        trained = Trained(inner_steps=1, samples=1, tokens=TOKENS, loss=1.0, seconds=1.0)
        for node in self._training:
            self._step(Reported(node_id=node.node_id, round=plan.round, report=trained))
        for node in self._training:
            self._tell(node, do="contribute")
        began: list[float] = []
        ended: list[float] = []
        await asyncio.gather(*(self._follow(node, plan, began, ended) for node in self.nodes))
        await self._count()
        limit_seconds = max(
            8 * max(node.sent_bytes, node.received_bytes) / self._case.rate(number)
            for number, node in enumerate(self.nodes)
        )
        measured = RoundTime(
            seconds=(max(ended) - min(began)) / self._case.slow_motion,
            limit_seconds=limit_seconds,
            counted_bytes=sum(node.sent_bytes for node in self.nodes),
            seen_bytes=self._seen() - seen_before,
            most_sent_bytes=max(node.sent_bytes for node in self.nodes),
            received_bytes=sum(node.received_bytes for node in self.nodes),
            clock_seconds=time.monotonic() - began_at,
            processor=processor_time(os.getpid()) - processor_before,
        )
        return measured, plan

    async def _follow(self, node: Node, plan: Plan, began: list[float], ended: list[float]) -> None:
        """Takes a node's reports in until it has applied the round."""
        held: dict[int, float] = {}
        while True:
            told = await self._hear(node)
            match told["said"]:
                case "contributing":
                    began.append(told["at"])
                case "reduced":
                    digest = told["digest"]
                    contributors = tuple(
                        Contributor(node_id=NodeId(n), samples=1, tokens=t)
                        for n, t, _ in told["contributors"]
                    )
                    self._step(
                        Reported(
                            node_id=node.node_id,
                            round=told["round"],
                            report=Reduced(
                                slice_index=told["slice"],
                                digest=None if digest is None else Digest(bytes.fromhex(digest)),
                                contributors=contributors,
                                contributions=tuple(
                                    ContributionDigest(bytes.fromhex(each))
                                    for *_, each in told["contributors"]
                                ),
                            ),
                        )
                    )
                case "held":
                    held[told["slice"]] = told["at"]
                    self._step(
                        Reported(
                            node_id=node.node_id,
                            round=told["round"],
                            report=Held(
                                slice_index=told["slice"],
                                digest=Digest(bytes.fromhex(told["digest"])),
                            ),
                        )
                    )
                case "applied":
                    # A result that had to be fetched was held by then at the latest.
                    all_held = len(held) == len(plan.slices)
                    ended.append(max(held.values()) if all_held else told["at"])
                    self._note(node, told)
                    return

    async def _count(self) -> None:
        """Takes in what each node has sent and received in this round.

        A node counts what it has sent when the receiver has answered, which may be after the round's
        end: then a round would seem to need less than it does, and the next one more. So it waits until
        all that arrived was also sent, or nothing is counted any more: what is sent twice is only
        counted so by who receives it.
        """
        before = {node.host: node.totals for node in self.nodes}
        last: list[WireTotals] = []
        changed_at = time.monotonic()
        while True:
            for node in self.nodes:
                self._tell(node, do="count")
            for node in self.nodes:
                told = (await self._hear(node, "counted"))["wire"]
                node.totals = {kind: (sent, received) for kind, (sent, received) in told.items()}
                grew = grown(before[node.host], node.totals)
                bulk = [grew[kind] for kind in ("contribution", "result")]
                node.sent_bytes, node.received_bytes = map(sum, zip(*bulk, strict=True))
            missing = sum(node.received_bytes - node.sent_bytes for node in self.nodes)
            if missing <= ESTIMATED_BYTES * len(self.nodes) ** 2:
                return
            if (totals := [node.totals for node in self.nodes]) != last:
                last, changed_at = totals, time.monotonic()
            elif time.monotonic() >= changed_at + self._case.quiet_seconds:
                return
            await asyncio.sleep(POLL_SECONDS)

    def _note(self, node: Node, told: dict[str, Any]) -> None:
        """Takes in that a node has applied a round."""
        if self._case.by_bandwidth:
            unreachable = self._state.members[node.node_id].unreachable
            rates = LinkRates(up_bytes_per_second=told["up"], down_bytes_per_second=told["down"])
            self._alive(node, unreachable=unreachable, rates=rates)
        digest = Digest(bytes.fromhex(told["digest"]))
        self._step(
            Reported(node_id=node.node_id, round=told["round"], report=Applied(outer_digest=digest))
        )

    def _step(self, event: Event) -> None:
        transition = step(self._state, event, time.monotonic())
        self._state = transition.state
        for action in transition.actions:
            match action:
                case Tell(message=RoundCommitted(commit=commit)):
                    for node in self.nodes:
                        self._tell(node, do="commit", message=_encoded(commit))
                case Tell(message=RoundOpened(plan=plan)):
                    self._next_plan = plan

    def _seen(self) -> int:
        """Bytes between all hosts so far, as the lab counts packets."""
        pairs = itertools.permutations(self._lab.hosts, 2)
        return sum(self._lab.traffic(*pair).delivered_bytes for pair in pairs)

    async def _all(self, do: str, message: Message, *, answer: str) -> None:
        encoded = base64.b64encode(message.SerializeToString()).decode()
        for node in self.nodes:
            self._tell(node, do=do, message=encoded)
        for node in self.nodes:
            await self._hear(node, answer)

    def _tell(self, node: Node, **order: Any) -> None:
        assert node.process.stdin is not None
        node.process.stdin.write(json.dumps(order).encode() + b"\n")

    async def _hear(self, node: Node, expected: str | None = None) -> dict[str, Any]:
        assert node.process.stdout is not None
        async with asyncio.timeout(self._patience):
            line = await node.process.stdout.readline()
        told: dict[str, Any] = json.loads(line) if line else {"said": "nothing: it ended"}
        if told["said"] in ("failed", "nothing: it ended") or expected not in (None, told["said"]):
            raise SystemRefusedError(f"{node.host} said {told}", next_step="read its words above")
        return told


def _encoded(commit: Commit) -> str:
    return base64.b64encode(convert.commit_to_wire(commit).SerializeToString()).decode()
