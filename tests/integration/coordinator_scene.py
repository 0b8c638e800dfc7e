"""A real coordinator over real TLS, and nodes that train nothing and say what a test wants."""

import asyncio
import tomllib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

from benchmarks.coordinator.nodes import header_of
from coordinator.app import Coordinator
from coordinator.config import AUTHORITY_KEY_FILE, Home, create_home
from coordinator.relay.line import Carriage
from coordinator.settings import CoordinatorConfig
from protocol.run.models import Description, TensorShape, layout_of
from protocol.run.run_files import DESCRIPTION_FILE, description_file, run_from_json, validated
from protocol.trust.credentials import Credentials
from protocol.trust.enrolment import enrol
from protocol.trust.identity import Identity
from protocol.trust.invite import Invite
from protocol.trust.pki import Authority
from protocol.v1 import operator_pb2, round_pb2, session_pb2
from protocol.v1.operator_pb2_grpc import OperatorServiceStub
from protocol.v1.session_pb2_grpc import SessionServiceStub
from protocol.v1.status_pb2_grpc import StatusServiceStub
from protocol.wire import convert
from protocol.wire.channel import open_blocking_channel, open_channel
from protocol.wire.versions import MERGE
from tests.ports import free_port

PATIENCE_SECONDS = 30.0
LOCAL = CoordinatorConfig(
    host="127.0.0.1", control_port=0, enrolment_port=0, advertise="127.0.0.1", dashboard=""
)
RUN = '[run]\nname = "tested"\nrounds = 2\nmin_nodes = 2\n'
START, MIDDLE = b"\x10" * 32, b"\x20" * 32
NUM_ELEMENTS = 1024
FLAT = Description(tensors=(TensorShape(name="w", shape=(NUM_ELEMENTS,)),))


def described(folder: Path, text: str = RUN) -> str:
    """Gives the run a model of one tensor."""
    spec = validated(tomllib.loads(text), origin="run.toml").model_copy(
        update={"description": FLAT}
    )
    (folder / DESCRIPTION_FILE).write_bytes(description_file(spec))
    return text


def new_home(folder: Path, *, host: str = "127.0.0.1") -> Home:
    """One with ports of its own, for it may come back to them."""
    config = LOCAL.with_changes(host=host, control_port=free_port(), enrolment_port=free_port())
    return create_home(folder, config=config, text=described)


def authority_of(home: Home) -> Authority:
    key_pem = (home.directory / AUTHORITY_KEY_FILE).read_bytes()
    return Authority(certificate_pem=home.authority_pem, key_pem=key_pem)


@asynccontextmanager
async def serving(home: Home, carriage: Carriage | None = None) -> AsyncIterator[Coordinator]:
    coordinator = await Coordinator.start(home, home.config, carriage)
    try:
        yield coordinator
    finally:
        await coordinator.stop()


async def invite_from(home: Home, *, uses: int = 2, seconds: float = 60.0) -> tuple[Invite, str]:
    """An invite, and its name; asked for as 'atoll invite create' does, but without blocking."""

    def ask() -> operator_pb2.CreateInviteResponse:
        with open_blocking_channel(Credentials.load(home.directory)) as channel:
            request = operator_pb2.CreateInviteRequest(max_uses=uses, valid_seconds=seconds)
            response: operator_pb2.CreateInviteResponse = OperatorServiceStub(channel).CreateInvite(
                request
            )
            return response

    made = await asyncio.to_thread(ask)
    return Invite.decode(made.invite), made.invite_id


MADE: dict[tuple[int, int], bytes] = {}
"""The results that fake nodes have reported, by round and slice."""


def result(slice_index: int, *, round: int = 1) -> bytes:
    """The digest of what was reported of a slice."""
    return MADE[round, slice_index]


class FakeNode:
    """A node that trains nothing and says what the test wants."""

    def __init__(self, identity: Identity, credentials: Credentials, name: str) -> None:
        self.identity, self.credentials, self.name = identity, credentials, name
        self.node_id = identity.node_id
        self.session_id = 0
        self.events: AsyncIterator[session_pb2.SubscribeResponse]
        self.connect()

    def connect(self) -> None:
        self._channel = open_channel(self.credentials)
        self.session = SessionServiceStub(self._channel)
        self.status = StatusServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def attach(self, **changes: object) -> session_pb2.AttachResponse:
        run = await self.session.GetRun(session_pb2.GetRunRequest())
        spec = run_from_json(run.run_json)
        request = session_pb2.AttachRequest(
            node_name=self.name,
            address=session_pb2.PeerAddress(
                public_key=self.identity.public_key, multiaddrs=["/ip4/127.0.0.1/tcp/1"]
            ),
            run_digest=run.run_digest,
            layout=convert.to_wire(layout_of(spec).summary(), session_pb2.LayoutSummary),
            codecs=spec.exchange.codecs,
            corpus=session_pb2.CorpusSummary(
                digest=b"c" * 32,
                num_samples=10,
                num_bytes=99,
                num_held_out_tokens=30,
                num_held_out_bytes=60,
            ),
            outer_digest=START,
            device="cpu",
            num_ranks=1,
            version="0",
            merge_version=MERGE,
        )
        request.MergeFrom(session_pb2.AttachRequest(**changes))  # type: ignore[arg-type]
        response: session_pb2.AttachResponse = await self.session.Attach(request)
        self.session_id = response.session_id
        return response

    def subscribe(self) -> None:
        request = session_pb2.SubscribeRequest(session_id=self.session_id)
        self.events = self.session.Subscribe(request).__aiter__()

    async def beat(self, outer_round: int = 0, outer_digest: bytes = START) -> None:
        await self.session.Heartbeat(
            session_pb2.HeartbeatRequest(
                session_id=self.session_id, outer_round=outer_round, outer_digest=outer_digest
            )
        )

    async def next(self, kind: str) -> session_pb2.SubscribeResponse:
        """The next event of a kind; those of others are passed over."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                event = await anext(self.events)
                if event.WhichOneof("event") == kind:
                    return event

    async def report(self, number: int, **report: object) -> None:
        made = session_pb2.Report(round=number)
        made.MergeFrom(session_pb2.Report(**report))  # type: ignore[arg-type]
        request = session_pb2.ReportRequest(session_id=self.session_id, reports=[made])
        await self.session.Report(request)

    async def trained(self, number: int) -> None:
        report = session_pb2.TrainedReport(
            inner_steps=15, samples=120, tokens=1000, loss=2.0, seconds=1.0
        )
        await self.report(number, trained=report)

    async def reduced(
        self, plan: round_pb2.Plan, *, cut: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Reduces its slices, with a contribution of every participant; `cut` is in 65,536ths."""
        contributors = [
            round_pb2.Contributor(
                node_id=a.node_id,
                samples=min(120, 8 * a.inner_steps),
                tokens=min(1000, 100 * a.inner_steps),
                contribution=bytes(16),
                cut=cut.get(a.node_id, 0),
            )
            for a in plan.assignments
        ]
        for part in plan.slices:
            if part.reducer_id == self.node_id:
                header = header_of(plan, part, self.identity)
                MADE[plan.round, part.index] = header.digest
                reduced = session_pb2.ReducedReport(
                    slice_index=part.index,
                    digest=header.digest,
                    header=header.encode(),
                    contributors=contributors,
                )
                await self.report(plan.round, reduced=reduced)

    async def held(self, plan: round_pb2.Plan) -> None:
        for part in plan.slices:
            digest = MADE.get((plan.round, part.index), bytes([200 + part.index]) * 32)
            held = session_pb2.HeldReport(slice_index=part.index, digest=digest)
            await self.report(plan.round, held=held)

    async def applied(self, number: int, digest: bytes) -> None:
        await self.report(number, applied=session_pb2.AppliedReport(outer_digest=digest))


async def joined(invite: Invite, name: str) -> FakeNode:
    identity = Identity.generate()
    return FakeNode(identity, await enrol(invite, identity, name), name)


@asynccontextmanager
async def two_nodes(home: Home) -> AsyncIterator[tuple[FakeNode, FakeNode]]:
    invite, _ = await invite_from(home)
    nodes = await joined(invite, "node-a"), await joined(invite, "node-b")
    try:
        for node in nodes:
            await node.attach()
            node.subscribe()
        yield nodes
    finally:
        await asyncio.gather(*(node.close() for node in nodes))
