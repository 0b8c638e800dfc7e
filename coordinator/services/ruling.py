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
from coordinator.swarm.events import Ruled, RulingsLearned
from protocol.amendments import Changes, amended, in_force
from protocol.errors import BadDataError, NoInputError, TemporaryError, UsageError
from protocol.messages import RulingsTold
from protocol.rounds import NodeId
from protocol.run_spec import RunSpec
from protocol.trust.rulings import (
    RUN_OWNER,
    Ruling,
    RulingKind,
    RulingVerifier,
    SignedRuling,
    digest_of,
    in_words,
)
from protocol.trust.signing import CommitSigner

_log = structlog.get_logger()

MOST_RULINGS = 4096
"""In one message: a ruling has some hundred bytes, and a message 4 MiB at most."""

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
            rules = rules_of(amended(spec, changes))
            return await self._make(
                self.event(
                    RulingKind.AMENDED, changes=tuple(sorted(changes)), rules=rules, reason=reason
                )
            )

    def event(self, kind: RulingKind, *, by: str = RUN_OWNER, **fields: object) -> Ruled:
        """What is to be ruled now."""
        return Ruled(kind=kind, by=by, unix_seconds=round(self._wall_clock(), 3), **fields)  # type: ignore[arg-type] # the caller's keywords, passed on

    async def _make(self, event: Ruled) -> Ruling:
        if self._driver.state.awaited is not None and event.by == RUN_OWNER:
            raise TemporaryError(
                "the coordinator has just started and waits for nodes, which may know of rulings that "
                "it lacks",
                next_step="try again once 'atoll status' says that it goes on",
            )
        return (await self._driver.apply(event)).state.rulings[-1]

    async def learn(self, brought: Sequence[SignedRuling], *, session: Session) -> int:
        """Takes over what is missing here; returns how many rulings there are then.

        Raises BadDataError for one that this run's authority never signed.
        """
        checks.at_most(brought, MOST_RULINGS, of="rulings")
        for signed in brought:
            self._verifier.check(signed)
        async with self._turn:
            known = len(self.all)
            news = tuple(one.ruling for one in brought if one.ruling.number > known)
            forked = [
                one.ruling
                for one in brought
                if one.ruling.number <= known and self.all[one.ruling.number - 1] != one.ruling
            ]
            for ruling in forked:
                _log.warning(
                    "a ruling from before this copy was made does not hold: another has its number",
                    number=ruling.number,
                    what=in_words(ruling),
                    next_step="rule anew if it shall hold",
                )
            if news and news[0].before == digest_of(self.all).hex():
                rules = rules_of(in_force(self._run, (*self.all, *news)))
                await self._driver.apply(RulingsLearned(rulings=news, rules=rules), session=session)
            return len(self.all)

    def missing(self, num_kept: int, digest: bytes) -> Iterator[RulingsTold]:
        """What a node lacks that keeps so many; all where it keeps others than these."""
        known = self.all
        if digest_of(known[:num_kept]) != digest or num_kept > len(known):
            num_kept = 0
        for start in range(num_kept, len(known), MOST_RULINGS):
            yield RulingsTold(rulings=known[start : start + MOST_RULINGS])

    def standing_of(self, node_id: NodeId) -> Ruling | None:
        """The latest ruling that says how a node stands."""
        return self._driver.state.standings.get(node_id)

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
