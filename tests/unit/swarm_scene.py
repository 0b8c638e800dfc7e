"""A swarm on stage, for tests of the pure core: one line for each thing that happens."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from coordinator.swarm.events import (
    Action,
    Attached,
    Detached,
    Event,
    HeartbeatSeen,
    Reported,
    StreamBroken,
    Tell,
    Ticked,
)
from coordinator.swarm.members import Member
from coordinator.swarm.state import Round, Rules, SwarmState
from coordinator.swarm.transition import Transition, initial_state, next_deadline, step
from protocol.wire.messages import Applied, Draining, Evaluated, Held, Reduced, Report, Trained
from protocol.wire.payload import WireTotals
from protocol.wire.rounds import (
    WHOLE,
    ContributionDigest,
    Contributor,
    CorpusSummary,
    Digest,
    LayoutSummary,
    NodeId,
    PeerAddress,
)

LAYOUT = LayoutSummary(digest=Digest(b"l" * 32), fragment_elements=(1024,))
CODECS = ("int4/1", "int4/1")
PLAIN_RULES = Rules(
    total_rounds=100,
    min_nodes=2,
    inner_steps=5,
    batch=2,
    context=8,
    train_seconds=60,
    contribute_seconds=70,
    commit_seconds=80,
    apply_seconds=10,
    lease_seconds=15,
    evaluate_every_rounds=1,
    layout=LAYOUT,
    codecs=CODECS,
)
"""Where a test is not about rules."""

T = TypeVar("T")
RUN = Digest(b"r" * 32)
INITIAL = Digest(b"0" * 32)
CORPUS = CorpusSummary(digest=Digest(b"c" * 32), num_samples=1000, num_bytes=9000)
STEP_TOKENS = 2 * 8
TOKENS = 5 * STEP_TOKENS  # that a node trains in a full round


def digest_of(text: str) -> Digest:
    return Digest(text.encode().ljust(32, b"."))


def contribution_from(node: str, index: int) -> ContributionDigest:
    """What a node sends of a slice, by its digest."""
    return ContributionDigest(f"{node} to {index}".encode().ljust(16, b".")[:16])


class Scene:
    def __init__(
        self,
        *,
        min_nodes: int = 1,
        rounds: int = 10,
        evaluate_every: int = 1000,
        lease_seconds: float = 10_000,
        **rules: Any,
    ) -> None:
        """`rules` are others of Rules, by their names."""
        whole = replace(
            PLAIN_RULES,
            total_rounds=rounds,
            min_nodes=min_nodes,
            apply_seconds=20,
            lease_seconds=lease_seconds,
            evaluate_every_rounds=evaluate_every,
            floor_seconds=5,
            **rules,
        )
        self._num_processes: Counter[str] = Counter()
        self.state: SwarmState = initial_state(whole, RUN)
        self.now = 1000.0
        self.reason = ""
        self.actions: tuple[Action, ...] = ()  # of the latest event
        self.log: list[Action] = []  # of all of them

    def amend(self, **rules: Any) -> None:
        """Other rules from now on, by their names."""
        self.state = replace(self.state, rules=replace(self.state.rules, **rules))

    def change(self, *names: str, **facts: Any) -> None:
        """Other facts of these members, or of all."""
        chosen = set(names) or set(self.state.members)
        members = {
            node_id: replace(member, **facts) if node_id in chosen else member
            for node_id, member in self.state.members.items()
        }
        self.state = replace(self.state, members=members)

    def do(self, event: Event) -> None:
        before, transition = self.state, step(self.state, event, self.now)
        self.state, self.actions = transition.state, transition.actions
        self.reason = transition.reason
        self.log.extend(self.actions)
        self.hear(before, transition)

    def hear(self, before: SwarmState, told: Transition) -> None:
        """What a test makes of each transition."""

    def asked(self, kind: type[T]) -> list[T]:
        """The actions, or messages, of one kind that the latest event led to."""
        return of_kind(self.actions, kind)

    def member(self, name: str) -> Member:
        return self.state.members[NodeId(name)]

    @property
    def round(self) -> Round:
        assert self.state.open_round is not None, self.reason
        return self.state.open_round

    def attach(
        self,
        *names: str,
        at: int = 0,
        digest: Digest | None = INITIAL,
        run: Digest = RUN,
        layout: LayoutSummary | None = None,
        is_new_process: bool = True,  # or the same one whose session broke
        incarnation: int = 0,
        is_beside: bool = False,  # the process before it goes on
        node_name: str | None = None,  # its node id unless told
        invite: str = "",
        **facts: Any,
    ) -> None:
        """`facts` are others of Attached, by their names."""
        assert digest is not None, "no state is settled"
        usual = {"device": "cpu", "num_ranks": 1, "codecs": CODECS, "corpus": CORPUS}
        facts = {**usual, **facts}
        for name in names:
            self._num_processes[name] += is_new_process
            before = self.state.members.get(NodeId(name))
            if before is not None and is_new_process and not is_beside:  # the kernel sees to it
                self.do(StreamBroken(node_id=NodeId(name), session_id=before.session_id))
            self.do(
                Attached(
                    node_id=NodeId(name),
                    node_name=node_name or name,
                    address=PeerAddress(public_key=name.encode().ljust(32), multiaddrs=()),
                    version="1",
                    run_digest=run,
                    layout=layout or self.state.rules.layout,
                    outer_round=at,
                    outer_digest=digest,
                    outer_incarnation=incarnation,
                    process_id=self._num_processes[name],
                    invite_id=invite,
                    **facts,
                )
            )

    def beat(
        self,
        name: str,
        *,
        at: int,
        digest: Digest | None,
        session_id: int | None = None,
        unreachable: tuple[str, ...] = (),
        incarnation: int = 0,
        carry: float = 0.0,
        through: Mapping[str, str] | None = None,
        **facts: Any,
    ) -> None:
        """`facts` are others of HeartbeatSeen, by their names."""
        assert digest is not None, "no state is settled"
        if session_id is None:
            session_id = self.member(name).session_id
        self.do(
            HeartbeatSeen(
                node_id=NodeId(name),
                session_id=session_id,
                outer_round=at,
                outer_digest=digest,
                outer_incarnation=incarnation,
                unreachable=tuple(map(NodeId, unreachable)),
                carry_bytes_per_second=carry,
                through={NodeId(one): NodeId(by) for one, by in (through or {}).items()},
                **facts,
            )
        )

    def report(self, name: str, report: Report, *, round: int | None = None) -> None:
        """A node tells something about its part in a round, the open one unless told."""
        number = self.round.number if round is None else round
        self.do(Reported(node_id=NodeId(name), round=number, report=report))

    def drain(self, name: str) -> None:
        self.report(name, Draining(), round=0)

    def leave(self, name: str) -> None:
        session_id = self.member(name).session_id
        self.do(Detached(node_id=NodeId(name), session_id=session_id, reason="tired"))

    def train(
        self,
        name: str,
        *,
        tokens: int = TOKENS,
        samples: int | None = None,
        inner_steps: int = 5,
        seconds: float = 1.0,
        loss: float = 2.0,
    ) -> None:
        """All tokens of its samples count, unless `samples` says how many there were."""
        trained = Trained(
            inner_steps=inner_steps,
            samples=self._samples_of(tokens) if samples is None else samples,
            tokens=tokens,
            loss=loss,
            seconds=seconds,
        )
        self.report(name, trained)

    def _samples_of(self, tokens: int) -> int:
        return -(-tokens // self.state.rules.context)

    def reduce(
        self,
        name: str,
        index: int,
        digest: Digest | None,
        tokens: dict[str, int] | None = None,
        samples: dict[str, int] | None = None,
        undecodable: Sequence[str] = (),
        left_out: Collection[str] = (),
        norm: float = 0.0,
    ) -> None:
        """`tokens` by contributor; all participants with their full budget unless told.

        All of their samples count, unless `samples` says of some how many there were. Nothing counts of
        whom the reducer has left out, or says that it sent what does not decode.
        """
        nothing_of = {*undecodable, *left_out}
        samples = samples or {}
        if tokens is None:
            context = self.state.rules.context
            tokens = {str(a.node_id): a.num_samples * context for a in self.round.assignments}
        self.report(
            name,
            Reduced(
                slice_index=index,
                digest=digest,
                contributors=tuple(
                    Contributor(
                        node_id=NodeId(node),
                        samples=samples.get(node, self._samples_of(count)),
                        tokens=count,
                    )
                    for node, count in tokens.items()
                ),
                contributions=tuple(contribution_from(node, index) for node in tokens),
                factors=tuple(0 if node in nothing_of else WHOLE for node in tokens)
                if nothing_of
                else (),
                undecodable=tuple(map(NodeId, sorted(undecodable))),
                norm=norm,
            ),
        )

    def hold(
        self, name: str, index: int, digest: Digest, *, agreement: float | None = None
    ) -> None:
        held = Held(slice_index=index, digest=digest, agreement=agreement)
        self.report(name, held)

    def apply(
        self,
        digest: Digest | None,
        *names: str,
        round: int | None = None,
        incarnation: int = 0,
        wire: WireTotals | None = None,
    ) -> None:
        assert digest is not None, "no state is settled"
        for name in names:
            number = self.state.committed_round if round is None else round
            applied = Applied(outer_digest=digest, incarnation=incarnation, wire=wire or {})
            self.report(name, applied, round=number)

    def evaluate(self, name: str, *, round: int, loss: float = 1.5) -> None:
        self.report(name, Evaluated(held_out_loss=loss, tokens=64), round=round)

    def commit(
        self,
        *holders: str,
        tokens: dict[str, int] | None = None,
        samples: dict[str, int] | None = None,
        left_out_by: Mapping[str, Collection[str]] | None = None,
        norm: float = 0.0,
    ) -> None:
        """Every slice is reduced, and held by `holders`: the round commits.

        `left_out_by` says of some reducers of whom they take nothing.
        """
        number = self.round.number
        for progress in self.round.slices:
            index = progress.slice.index
            result = digest_of(f"result {number}/{index}")
            reducer = progress.slice.reducer_id
            left_out = (left_out_by or {}).get(reducer, ())
            self.reduce(reducer, index, result, tokens, samples, left_out=left_out, norm=norm)
            for holder in holders:
                if self.state.committed_round < number:
                    self.hold(holder, index, result)
        assert self.state.committed_round == number, self.reason

    def run_round(self, *names: str) -> None:
        """The round in progress is committed, and these apply it."""
        self.commit(*names)
        self.apply(digest_of(f"state {self.state.committed_round}"), *names)

    def wait_until(self, time: float) -> None:
        """Lets time pass as the edge does it: a tick at each deadline."""
        while (deadline := next_deadline(self.state)) is not None and deadline <= time:
            self.now = max(self.now, deadline)
            self.do(Ticked())
            assert next_deadline(self.state) != deadline, "the edge would spin"
        self.now = time

    def wait(self, seconds: float) -> None:
        self.wait_until(self.now + seconds)


def two_nodes() -> Scene:
    """A run of two nodes, which are here."""
    scene = Scene(min_nodes=2)
    scene.attach("node-a", "node-b")
    return scene


def three_nodes() -> Scene:
    """A run of three nodes, which are here."""
    scene = Scene(min_nodes=3)
    scene.attach("node-a", "node-b", "node-c")
    return scene


def of_kind(actions: Iterable[Action], kind: type[T]) -> list[T]:
    """Actions of a kind, and messages of it that are to be told."""
    told = [action.message if isinstance(action, Tell) else action for action in actions]
    return [each for each in told if isinstance(each, kind)]


def asked_of(actions: Iterable[Action], kind: type[Any]) -> list[NodeId]:
    """Who is told a message of a kind, in order."""
    told = [a for a in actions if isinstance(a, Tell) and isinstance(a.message, kind)]
    return [node_id for each in told for node_id in each.to or ()]
