"""One node of benchmarks/exchange: a real exchange over real libp2p, without training.

Runs as a process of its own in a host of the network lab. Orders come as lines of JSON on standard
input, and answers and reports go out the same way; protobuf messages in them are base64.
"""

import asyncio
import base64
import json
import logging
import sys
import time
from dataclasses import fields, replace
from random import Random
from typing import Any, TypeVar

import numpy as np
import structlog

from node.disk.history import History
from node.exchange.codecs.registry import codec_named
from node.exchange.error_feedback import ReducerError, Residual
from node.exchange.exchange import Exchange
from node.exchange.outer import Outer
from node.exchange.outer_optimizer import OuterRules, RateScale, Sgd
from node.exchange.owing import Owing
from node.exchange.peers import Limits, Patience, Waits
from node.exchange.reduction import Sender
from node.exchange.round.state import Rules
from node.exchange.state.catch_up import CoordinatorCalls
from node.exchange.state.sources import StateHere
from node.exchange.transport.libp2p import Libp2pTransport
from node.heavy import in_thread
from node.machine.addresses import Reachability
from node.machine.hardware import keep_freed_memory
from protocol.run.models import Layout
from protocol.trust.identity import Identity
from protocol.trust.receipts import PayloadSigner
from protocol.v1 import round_pb2, session_pb2
from protocol.wire import convert
from protocol.wire.messages import Held, Reduced, Report
from protocol.wire.payload import WireCounts
from protocol.wire.rounds import Commit, Digest, Plan, RosterEntry

RUN = Digest(bytes(32))

Value = TypeVar("Value", bound=Limits | Waits)


def stretched(waits: Value, factor: float) -> Value:
    """For links on which everything takes so many times as long."""
    names = [field.name for field in fields(waits) if field.name.endswith("_seconds")]
    return replace(waits, **{name: factor * getattr(waits, name) for name in names})


def say(**message: Any) -> None:
    """One line to the benchmark."""
    print(json.dumps(message), flush=True)


class BenchmarkNode:
    """Owes the same pseudo-gradient in every round."""

    def __init__(self, order: dict[str, Any]) -> None:
        identity = Identity.generate()
        self._tokens: int = order["tokens"]
        self._counts = WireCounts()
        num_elements = order["num_elements"]
        layout = Layout.of([("w", (num_elements,))])
        rng = np.random.default_rng(identity.public_key[0])
        rules = OuterRules(
            uplink=codec_named(order["uplink"]),
            downlink=codec_named(order["downlink"]),
            optimizer=Sgd(learning_rate=1.0),
            rate_scale=RateScale(scaling="none", full_round_samples=1),
        )
        signer = PayloadSigner(identity)
        sender = Sender(run_digest=RUN, node_id=identity.node_id, signer=signer)
        parameters = np.zeros(num_elements, dtype=np.float32)
        owing = Owing(
            layout=layout,
            parameters=parameters,
            published=rng.standard_normal(num_elements, dtype=np.float32),
            rules=rules,
            residual=Residual(num_elements, error_feedback=False),
            reducer_error=ReducerError(rule="drop"),
            sender=sender,
        )
        self.outer = Outer(owing)
        self.transport = Libp2pTransport(
            identity=identity,
            counts=self._counts,
            reachability=Reachability(listen_multiaddrs=(f"/ip4/{order['host']}/tcp/0",)),
            limits=stretched(Limits(max_streams_per_body=order["stripes"]), order["slow_motion"]),
        )
        self.exchange = Exchange(
            Rules(
                node_id=identity.node_id,
                run_digest=RUN,
                context=self._tokens,  # one sample is assigned
                uplink=self.outer.uplink,
                downlink=self.outer.downlink,
                waits=stretched(Waits(), order["slow_motion"]),
            ),
            StateHere(outer=self.outer, history=History(None), disk=None, heavy=in_thread),
            transport=self.transport,
            coordinator=CoordinatorCalls(
                report=self._report,
                list_commits=self._list_commits,
                bring_back=self._bring_back,
                patience=Patience(Random(0)),
            ),
        )
        self._public_key = identity.public_key
        self._commits: list[Commit] = []

    async def start(self) -> None:
        await self.transport.start(self.exchange)
        summary = convert.to_wire(self.outer.layout.summary(), session_pb2.LayoutSummary)
        say(
            said="started",
            public_key=self._public_key.hex(),
            multiaddrs=self.transport.multiaddrs,
            layout=base64.b64encode(summary.SerializeToString()).decode(),
            digest=self.outer.digest.hex(),
        )

    async def obey(self, order: dict[str, Any]) -> None:
        message = base64.b64decode(order.get("message", ""))
        match order["do"]:
            case "roster":
                roster = session_pb2.Roster.FromString(message)
                members = tuple(convert.from_wire(m, RosterEntry) for m in roster.members)
                self.exchange.set_roster(members)
                say(said="met")
            case "plan":
                plan = convert.from_wire(round_pb2.Plan.FromString(message), Plan)
                await self.exchange.open_round(plan)
                say(said="opened")
            case "contribute":
                say(said="contributing", at=time.monotonic())
                await self.exchange.contribute(samples=1, tokens=self._tokens)
            case "commit":
                commit = convert.commit_from_wire(round_pb2.Commit.FromString(message))
                self._commits.append(commit)
                await self.exchange.apply(commit)
                rates = self.transport.seen().link_rates
                say(
                    said="applied",
                    at=time.monotonic(),
                    round=commit.round,
                    digest=self.outer.digest.hex(),
                    up=rates.up_bytes_per_second,
                    down=rates.down_bytes_per_second,
                )
            case "count":
                say(said="counted", wire=dict(self._counts.totals()))

    def _report(self, round: int, report: Report) -> None:
        now = time.monotonic()
        match report:
            case Reduced(slice_index=index, digest=digest):
                say(
                    said="reduced",
                    round=round,
                    slice=index,
                    at=now,
                    digest=None if digest is None else digest.hex(),
                    contributors=[
                        (c.node_id, c.tokens, contribution.hex())
                        for c, contribution in zip(
                            report.contributors, report.contributions, strict=True
                        )
                    ],
                )
            case Held(slice_index=index, digest=digest):
                say(said="held", round=round, slice=index, at=now, digest=digest.hex())

    async def _list_commits(self, after_round: int) -> tuple[Commit, ...]:
        return tuple(c for c in self._commits if c.round > after_round)

    async def _bring_back(self, _: int) -> bool:
        """Nobody lacks a commit here."""
        return True


async def run() -> None:
    """Obeys until standard input ends."""
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    order = json.loads(await reader.readline())
    keep_freed_memory()  # as a node does
    node = BenchmarkNode(order)
    working: set[asyncio.Task[None]] = set()
    try:
        await node.start()
        while line := await reader.readline():
            task = asyncio.create_task(node.obey(json.loads(line)))
            working.add(task)
            task.add_done_callback(working.discard)
            task.add_done_callback(_end_on_error)
    finally:
        await node.exchange.stop()
        await node.transport.stop()


def _end_on_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        say(said="failed", why=repr(error))


if __name__ == "__main__":
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    asyncio.run(run())
