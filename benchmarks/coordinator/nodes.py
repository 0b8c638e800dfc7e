"""Nodes that train nothing: real sessions with a coordinator over TLS, for loading it.

Each has an identity, a certificate and a connection of its own, renews its lease, and reports in
every round what a node would: its training, the slices it reduces, the results it holds, the state
it applied. What it says of them is made up, and equal among nodes that hold the same.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import blake3
import grpc.aio

from node.link.session import MOST_REPORTS
from protocol.errors import AtollError, TemporaryError, UnavailableError
from protocol.run.models import layout_of
from protocol.run.run_files import run_from_json
from protocol.trust.credentials import Credentials
from protocol.trust.identity import Identity
from protocol.v1 import round_pb2, session_pb2
from protocol.v1.session_pb2_grpc import SessionServiceStub
from protocol.wire import convert
from protocol.wire.channel import open_channel
from protocol.wire.payload import RESULT, Payload, PayloadHeader
from protocol.wire.rounds import Digest, NodeId
from protocol.wire.versions import MERGE


@dataclass(slots=True)
class Timings:
    """What the nodes saw, in seconds; times of day are of the monotonic clock."""

    heartbeats: list[float] = field(default_factory=list)  # how long each took
    reports: list[float] = field(default_factory=list)
    plans: dict[int, list[float]] = field(default_factory=dict)  # round -> when each node got it
    commits: dict[int, list[float]] = field(default_factory=dict)
    num_repeated: int = 0  # calls with reports that were not answered within their deadline
    plan_bytes: int = 0  # of the last one
    roster_bytes: int = 0  # of all that came


_IDENTITIES: dict[NodeId, Identity] = {}
"""Of all nodes of this process: each knows what any of them has reduced."""


def header_of(plan: round_pb2.Plan, part: round_pb2.Slice, reducer: Identity) -> PayloadHeader:
    """Of a slice's result, as its reducer signs it; the same bytes whoever asks."""
    return Payload.seal(
        kind=RESULT,
        run_digest=Digest(bytes(32)),
        round=plan.round,
        fragment=plan.fragment,
        slice_index=part.index,
        start=part.start,
        num_elements=part.num_elements,
        codec="int4/1",
        sender_id=reducer.node_id,
        body=b"body",
        norm=1.0,
        base_digest=plan.base_digest,
        plan_opened_at=plan.opened_at,
        signer=reducer,
    ).header


class SimulatedNode:
    """One session. `run` takes part until the run is finished; `beat` renews the lease once."""

    def __init__(
        self,
        *,
        identity: Identity,
        credentials: Credentials,
        name: str,
        timings: Timings,
        outer_round: int = 0,
        train_seconds: float = 0.0,
    ) -> None:
        """`outer_round` is of the state that it holds; a round's training takes `train_seconds`."""
        self.node_id = identity.node_id
        self._identity = _IDENTITIES[identity.node_id] = identity
        self.name = name
        self._timings = timings
        self._channel = open_channel(credentials)
        self._session = SessionServiceStub(self._channel)
        self._session_id = 0
        self._round = outer_round  # that it has applied
        self._train_seconds = train_seconds
        self._heartbeat_seconds = 5.0
        self.attached = asyncio.Event()
        self.is_finished = False

    async def attach(self) -> None:
        """Opens the session."""
        run = await self._session.GetRun(session_pb2.GetRunRequest())
        spec = run_from_json(run.run_json)
        response = await self._session.Attach(
            session_pb2.AttachRequest(
                node_name=self.name,
                address=session_pb2.PeerAddress(
                    public_key=self._identity.public_key, multiaddrs=["/ip4/127.0.0.1/tcp/1"]
                ),
                run_digest=run.run_digest,
                layout=convert.to_wire(layout_of(spec).summary(), session_pb2.LayoutSummary),
                codecs=spec.exchange.codecs,
                corpus=session_pb2.CorpusSummary(
                    digest=CORPUS, num_samples=10**9, num_bytes=10**12
                ),
                outer_round=self._round,
                outer_digest=state_at(self._round),
                device="simulated",
                num_ranks=1,
                version="0",
                merge_version=MERGE,
                process_id=1,
            )
        )
        self._session_id = response.session_id
        self._heartbeat_seconds = response.heartbeat_seconds
        self.attached.set()

    async def run(self) -> None:
        """Takes part in rounds, and keeps the lease meanwhile."""
        keeping = asyncio.create_task(self._keep_lease())
        try:
            request = session_pb2.SubscribeRequest(session_id=self._session_id)
            async for event in self._session.Subscribe(request):
                await self._hear(event)
                if self.is_finished:
                    return
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def close(self) -> None:
        """Ends the connection; the coordinator sees it break."""
        await self._channel.close()

    async def beat(self) -> None:
        """One heartbeat."""
        began_at = time.monotonic()
        await self._session.Heartbeat(
            session_pb2.HeartbeatRequest(
                session_id=self._session_id,
                outer_round=self._round,
                outer_digest=state_at(self._round),
                activity="training",
                inner_step=7,
                loss=2.5,
                tokens_per_second=1000.0,
                wire=[
                    session_pb2.WireCount(kind=kind, sent_bytes=10**9, received_bytes=10**9)
                    for kind in ("contribution", "result", "snapshot", "control")
                ],
            )
        )
        self._timings.heartbeats.append(time.monotonic() - began_at)

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            with suppress(AtollError, grpc.aio.AioRpcError):
                await self.beat()

    async def _hear(self, event: session_pb2.SubscribeResponse) -> None:
        match event.WhichOneof("event"):
            case "roster" | "roster_change":
                self._timings.roster_bytes += event.ByteSize()
            case "plan":
                plan = event.plan
                self._timings.plans.setdefault(plan.round, []).append(time.monotonic())
                self._timings.plan_bytes = event.ByteSize()
                if self._train_seconds:
                    await asyncio.sleep(self._train_seconds)
                await self._report(plan.round, *self._reports(plan))
            case "commit":
                commit = event.commit
                self._timings.commits.setdefault(commit.round, []).append(time.monotonic())
                self._round = commit.round
                applied = session_pb2.AppliedReport(outer_digest=state_at(commit.round))
                await self._report(commit.round, session_pb2.Report(applied=applied))
            case "evaluate":
                evaluated = session_pb2.EvaluatedReport(held_out_loss=2.5, tokens=1)
                await self._report(event.evaluate.round, session_pb2.Report(evaluated=evaluated))
            case "finished":
                self.is_finished = True

    def _reports(self, plan: round_pb2.Plan) -> Iterator[session_pb2.Report]:
        """All that a node reports of a round before its commit."""
        own = next(a for a in plan.assignments if a.node_id == self.node_id)
        yield session_pb2.Report(
            trained=session_pb2.TrainedReport(
                inner_steps=own.inner_steps,
                samples=own.num_samples,
                tokens=1,
                loss=2.5,
                seconds=1.0,
            )
        )
        for part in plan.slices:
            if part.reducer_id == self.node_id:
                header = header_of(plan, part, self._identity)
                contributors = [
                    round_pb2.Contributor(
                        node_id=a.node_id,
                        samples=a.num_samples,
                        tokens=1,
                        contribution=_digest(f"{a.node_id} {plan.round}/{part.index}")[:16],
                    )
                    for a in plan.assignments
                ]
                yield session_pb2.Report(
                    reduced=session_pb2.ReducedReport(
                        slice_index=part.index,
                        digest=header.digest,
                        header=header.encode(),
                        contributors=contributors,
                    )
                )
        for part in plan.slices:
            if part.reducer_id != self.node_id:
                digest = header_of(plan, part, _IDENTITIES[NodeId(part.reducer_id)]).digest
                yield session_pb2.Report(
                    held=session_pb2.HeldReport(slice_index=part.index, digest=digest)
                )

    async def _report(self, number: int, *reports: session_pb2.Report) -> None:
        """In batches, as node.link.session sends what has gathered."""
        for report in reports:
            report.round = number
        for start in range(0, len(reports), MOST_REPORTS):
            batch = reports[start : start + MOST_REPORTS]
            request = session_pb2.ReportRequest(session_id=self._session_id, reports=batch)
            began_at = time.monotonic()
            while not await self._is_heard(request):
                self._timings.num_repeated += 1
            self._timings.reports.append(time.monotonic() - began_at)

    async def _is_heard(self, request: session_pb2.ReportRequest) -> bool:
        """Whether the coordinator has answered in time; a node says it again otherwise."""
        try:
            await self._session.Report(request)
        except (UnavailableError, TemporaryError):
            return False
        return True


def _digest(text: str) -> bytes:
    return blake3.blake3(text.encode()).digest()


def state_at(number: int) -> Digest:
    """The digest of the outer state after a round."""
    return Digest(_digest(f"state {number}"))


CORPUS = Digest(_digest("corpus"))
