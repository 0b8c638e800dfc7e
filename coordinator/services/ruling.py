"""Where rulings are made and brought back: one at a time, as each builds on the one before."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence

import structlog

from coordinator.config import rules_of
from coordinator.driver import Driver, Session
from coordinator.services import checks
from coordinator.store import Store
from coordinator.swarm.actions import QuarantineAsked
from coordinator.swarm.events import Ruled, RulingsLearned
from protocol.amendments import Changes, amended, in_force
from protocol.errors import AtollError, BadDataError, ConfigError, NoInputError, UsageError
from protocol.messages import RulingsTold
from protocol.rounds import NodeId
from protocol.run_spec import RunSpec
from protocol.trust.equivocation import Equivocation
from protocol.trust.rulings import (
    ABOUT_NODES,
    RUN_OWNER,
    Ruling,
    RulingKind,
    RulingVerifier,
    SignedRuling,
    digest_of,
    follows,
    in_words,
)
from protocol.trust.signing import CommitSigner

_log = structlog.get_logger()

MOST_RULINGS = 4096
"""In one message: a ruling has some hundred bytes, and a message 4 MiB at most."""

_RULED_ANEW = ABOUT_NODES | {
    RulingKind.PAUSED,
    RulingKind.RESUMED,
    RulingKind.STOPPED,
    RulingKind.AMENDED,
}

LEAST_ID_LENGTH = 4
COORDINATOR = "the coordinator"


class Rulings:
    """Makes them. `wall_clock` gives UTC seconds."""

    def __init__(
        self,
        driver: Driver,
        run: RunSpec,
        signer: CommitSigner,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._driver = driver
        self._run = run
        self._signer = signer
        self._verifier = RulingVerifier(signer.public_key)
        self._wall_clock = wall_clock
        self._turn = asyncio.Lock()
        self._made_aside: set[asyncio.Task[None]] = set()
        driver.on_convicted = self._on_convicted

    @property
    def store(self) -> Store:
        """Where they are kept."""
        return self._driver.store

    @property
    def all(self) -> tuple[Ruling, ...]:
        """Those made so far."""
        return self._driver.state.rulings

    def signed(self, ruling: Ruling) -> SignedRuling:
        """With the authority's signature; the same bytes each time."""
        return SignedRuling(ruling=ruling, signature=self._signer.signature_of(ruling.statement))

    async def make(self, event: Ruled) -> Ruling:
        """Makes a ruling; durable when this returns. Raises UsageError for one that changes nothing."""
        async with self._turn:
            return await self._make(event)

    async def amend(self, changes: Changes, *, more_rounds: int, reason: str) -> Ruling:
        """Amends the run's rules from the next round on; see protocol.amendments for what it raises."""
        async with self._turn:
            spec = in_force(self._run, self.all)
            if more_rounds:
                if "run.rounds" in dict(changes):
                    raise UsageError(
                        "the rounds are given twice",
                        next_step="extend the run, or amend run.rounds",
                    )
                changes = (*changes, ("run.rounds", spec.run.rounds + more_rounds))
            if not changes:
                raise UsageError(
                    "nothing is amended", next_step="'atoll run amend run.rounds=200', for example"
                )
            becomes = amended(spec, changes)
            if becomes == spec:
                raise UsageError(
                    "the run has these values already", next_step="'atoll status' shows the run"
                )
            rules = rules_of(becomes)
            return await self._make(
                self.event(
                    RulingKind.AMENDED, changes=tuple(sorted(changes)), rules=rules, reason=reason
                )
            )

    def event(self, kind: RulingKind, *, by: str = RUN_OWNER, **fields: object) -> Ruled:
        """What is to be ruled now."""
        return Ruled(kind=kind, by=by, unix_seconds=round(self._wall_clock(), 3), **fields)  # type: ignore[arg-type] # the caller's keywords, passed on

    async def _make(self, event: Ruled) -> Ruling:
        return (await self._driver.apply(event)).state.rulings[-1]

    async def learn(self, brought: Sequence[SignedRuling], *, session: Session) -> int:
        """Takes over what is missing here; returns how many rulings there are then.

        Raises BadDataError for one that this run's authority never signed.
        """
        checks.at_most(brought, MOST_RULINGS, of="rulings")
        for signed in brought:
            self._verifier.check(signed)
        async with self._turn:
            known = frozenset(self.all)
            lacking = [one.ruling for one in brought if one.ruling not in known]
            chain = list(self.all)
            while lacking and follows(lacking[0], chain[-1] if chain else None):
                chain.append(lacking.pop(0))
            if news := tuple(chain[len(self.all) :]):
                rules = rules_of(in_force(self._run, chain))
                event = RulingsLearned(rulings=news, rules=rules)
                await self._driver.apply(event, session=session)
            for ruling in lacking:
                await self._rule_anew(ruling, session)
            return len(self.all)

    async def _rule_anew(self, ruling: Ruling, session: Session) -> None:
        """Takes over what was ruled before this copy was made, where others were ruled since."""
        if ruling.kind not in _RULED_ANEW:
            return
        try:
            is_amending = ruling.kind is RulingKind.AMENDED
            rules = rules_of(in_force(self._run, (*self.all, ruling))) if is_amending else None
            event = Ruled(
                kind=ruling.kind,
                by=ruling.by,
                unix_seconds=ruling.unix_seconds,
                node_id=ruling.node_id,
                node_name=ruling.node_name,
                reason=ruling.reason,
                changes=ruling.changes,
                rules=rules,
                from_round=ruling.from_round,
            )
            await self._driver.apply(event, session=session)
        except (
            UsageError,
            ConfigError,
        ) as error:  # it holds already, or what came since forbids it
            _log.warning(
                "a ruling that was brought back does not hold",
                what=in_words(ruling),
                why=error.what,
            )

    def missing(self, num_kept: int, digest: bytes) -> Iterator[RulingsTold]:
        """What a node lacks that keeps so many; all where it keeps others than these."""
        known = self.all
        if digest_of(known[:num_kept]) != digest or num_kept > len(known):
            num_kept = 0
        for start in range(num_kept, len(known), MOST_RULINGS):
            yield RulingsTold(rulings=known[start : start + MOST_RULINGS])

    def standing_of(self, node_id: NodeId) -> Ruling | None:
        """The latest ruling that says how a node stands."""
        return self._driver.state.latest_rulings.get(node_id)

    async def note_joined(self, node_id: str, *, node_name: str, invite_id: str) -> None:
        """Notes who joined by which invite; once for each of both."""
        async with self._turn:
            for known in self.all:
                is_joining = known.kind is RulingKind.JOINED
                if is_joining and (known.node_id, known.invite_id) == (node_id, invite_id):
                    return
            event = self.event(
                RulingKind.JOINED,
                by=COORDINATOR,
                node_id=NodeId(node_id),
                node_name=node_name,
                invite_id=invite_id,
            )
            await self._make(event)

    async def expel_for(self, equivocation: Equivocation) -> bool:
        """Expels the member that a proof is of; once for each, or a readmitted one would go again."""
        node_id, reason = equivocation.node_id, equivocation.reason
        async with self._turn:
            if any(known.node_id == node_id and known.reason == reason for known in self.all):
                return False
            standing = self.standing_of(node_id)
            if standing is not None and standing.kind is RulingKind.EXPELLED:
                return False
            await self._make(
                self.event(
                    RulingKind.EXPELLED,
                    by=COORDINATOR,
                    node_id=node_id,
                    node_name=self._name_of(node_id),
                    reason=reason,
                )
            )
            return True

    def _on_convicted(self, asked: QuarantineAsked) -> None:
        task = asyncio.get_running_loop().create_task(self._quarantine(asked))
        self._made_aside.add(task)
        task.add_done_callback(self._made_aside.discard)

    async def _quarantine(self, asked: QuarantineAsked) -> None:
        event = self.event(
            RulingKind.QUARANTINED,
            by=COORDINATOR,
            node_id=asked.node_id,
            node_name=asked.node_name,
            reason=asked.reason,
        )
        try:
            await self.make(event)
        except AtollError as error:  # it is barred already, or the coordinator ends
            _log.warning("no ruling was made", node=asked.node_id, why=error.what)

    def _name_of(self, node_id: NodeId) -> str:
        member = self._driver.state.members.get(node_id)
        return "" if member is None else member.node_name

    def find(self, asked: str) -> tuple[NodeId, str]:
        """The id and the name of a node by its name, its id, or the beginning of that.

        Raises NoInputError for one that never joined, UsageError where several are meant.
        """
        asked = checks.name(asked, of="the node's name")
        members = self._driver.state.members
        names = {one.node_id: one.node_name for one in self.store.enrolled()}
        names |= {node_id: member.node_name for node_id, member in members.items()}
        found = [node_id for node_id, name in names.items() if asked in (name, node_id)]
        if not found and len(asked) >= LEAST_ID_LENGTH:
            found = [node_id for node_id in names if node_id.startswith(asked)]
        if not found:
            raise NoInputError(
                f"no node {asked!r} has joined", next_step="'atoll nodes' lists names and ids"
            )
        if len(found) > 1:
            ids = ", ".join(node_id[:12] for node_id in sorted(found))
            raise UsageError(
                f"{asked!r} may be any of {len(found)} nodes: {ids}",
                next_step="give the id instead of the name",
            )
        return found[0], names[found[0]]


def changes_from_wire(pairs: Sequence[tuple[str, str]]) -> Changes:
    """Keys with their values, which are JSON on the wire. Raises BadDataError."""
    changes = []
    for key, text in pairs:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, int | float | str | bool):
            raise BadDataError(f"the value of {key!r} cannot be read")
        changes.append((checks.name(key, of="a key"), value))
    return tuple(sorted(changes))
