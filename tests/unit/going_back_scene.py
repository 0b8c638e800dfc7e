"""A swarm on stage with a database, which can go back: for tests of the pure core."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from coordinator.store import Store
from coordinator.swarm.events import BaseLearned, CommitLearned, HistoryTold, Ruled, WithdrawalAsked
from coordinator.swarm.state import SwarmState
from protocol.trust.rulings import COORDINATOR, RUN_OWNER, RulingKind
from protocol.wire.rounds import Commit, Digest, NodeId, RoundSpan
from tests.unit.swarm_scene import INITIAL, Scene, digest_of

NODES = ("a", "b", "c")
EVERYWHERE = (RoundSpan(first=1, last=1000),)


@dataclass(kw_only=True)
class Kept:
    """A swarm with a database, and its state after each round as it was settled."""

    scene: Scene = field(default_factory=lambda: Scene(min_nodes=2, rounds=100))
    store: Store = field(default_factory=Store.in_memory)
    saved: SwarmState | None = None
    settled: dict[int, SwarmState] = field(default_factory=dict)
    settled_once: dict[int, SwarmState] = field(default_factory=dict)  # also those undone since
    made: list[Commit] = field(default_factory=list)  # all that there ever were
    num_applied: int = 0

    def save(self) -> None:
        before = self.saved or self.scene.state
        self.store.save(before, self.scene.state, now=self.scene.now)
        self.saved = self.scene.state

    def attach(self, name: str, *, invite: str = "") -> None:
        state = self.scene.state
        at = state.committed_round
        if state.open_round is not None and state.open_round.commit is not None:
            at -= 1
        digest = self.state_after(at)
        self.scene.attach(name, at=at, digest=digest, incarnation=state.incarnation, invite=invite)
        self.reach(name)
        self.save()

    def state_after(self, number: int) -> Digest:
        if number == 0:
            return INITIAL
        kept = self.settled[number].outer_digest
        assert kept is not None
        return kept

    def reach(self, name: str, *spans: tuple[int, int]) -> None:
        """What a node says of where it can go back to: everywhere unless told."""
        reach = tuple(RoundSpan(first=first, last=last) for first, last in spans) or EVERYWHERE
        self.scene.change(name, reach_back=reach)

    def beat(self, name: str) -> None:
        """Says what it said before; it has yet to go anywhere."""
        member = self.scene.member(name)
        self._say(name, member.outer_round, member.outer_digest, member.outer_incarnation)

    def follow(self, name: str) -> None:
        """A node comes to hold the state that the run went back to, or says so."""
        state = self.scene.state
        assert state.outer_digest is not None
        incarnation = state.recent[-1].commit.incarnation if state.recent else 0
        self._say(name, state.committed_round, state.outer_digest, incarnation)

    def _say(self, name: str, at: int, digest: Digest, incarnation: int) -> None:
        reach = self.scene.member(name).reach_back
        self.scene.beat(name, at=at, digest=digest, incarnation=incarnation)
        self.scene.change(name, reach_back=reach)

    def withdraw(self) -> None:
        """Makes the ruling that the core has asked for last, as the edge does."""
        asked = [each for each in self.scene.log if isinstance(each, WithdrawalAsked)][-1]
        gone = asked.withdrawn
        self.scene.do(
            Ruled(
                kind=RulingKind.WITHDRAWN,
                by=COORDINATOR,
                unix_seconds=0.0,
                reason=asked.reason,
                from_round=gone.from_round,
                last_round=gone.last_round,
                incarnation=gone.incarnation,
                outer_digest=gone.outer_digest,
            )
        )
        self.save()

    def bring(self, name: str, upto: int) -> None:
        """A node brings the commits that led to the state it holds, as far as there are."""
        for commit in self.made:
            if commit.round <= upto:
                base = self.scene.state.outer_digest
                if base is None and self.scene.state.committed_round == commit.round - 1:
                    before = self.scene.state.recent[-1].commit
                    self.scene.do(BaseLearned(after=before, digest=commit.base_digest))
                self.scene.do(CommitLearned(commit=commit, node_id=NodeId(name)))
                self.save()
        self.scene.do(HistoryTold(node_id=NodeId(name)))
        self.save()

    def moments(self) -> Iterator[None]:
        """What happens in a round, piece by piece."""
        scene = self.scene
        if scene.state.open_round is None:
            return
        here = [str(a.node_id) for a in scene.round.assignments]
        for name in here:
            scene.train(name)
            yield
        number = scene.round.number
        scene.commit(*here, norm=float(number))
        self.made.append(scene.state.recent[-1].commit)
        yield
        self.num_applied += 1
        digest = digest_of(f"state {number}, made {self.num_applied}")
        for name in here:
            scene.apply(digest, name, incarnation=scene.state.incarnation)
            self.save()
            if scene.state.outer_digest == digest:
                self.settled[number] = self.settled_once[number] = scene.state
            yield

    def rounds(self, number: int) -> None:
        for _ in range(number):
            for _ in self.moments():
                pass

    def go_back(self, round: int, **fields: Any) -> None:
        self.save()
        asked = {
            "by": RUN_OWNER,
            "undone": self.store.undone_after(round, rules=self.scene.state.rules),
            **fields,
        }
        self.scene.do(
            Ruled(
                kind=RulingKind.ROLLED_BACK,
                unix_seconds=0.0,
                from_round=round + 1,
                **asked,
            )
        )
        self.save()
        self.settled = {number: s for number, s in self.settled.items() if number <= round}

    def all_follow(self) -> None:
        state = self.scene.state
        assert state.outer_digest is not None
        for name in NODES:
            if NodeId(name) in state.members:
                self.scene.beat(
                    name,
                    at=state.committed_round,
                    digest=state.outer_digest,
                    incarnation=self.settled[state.committed_round].recent[-1].commit.incarnation,
                )
                self.reach(name)
        self.save()
