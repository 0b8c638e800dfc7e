"""Where rulings are made and brought back: one at a time, as each builds on the one before."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import structlog

from coordinator.config import Home
from coordinator.driver import Driver, Session
from coordinator.rules import rules_in_force, rules_of
from coordinator.services import checks
from coordinator.store import Store
from coordinator.swarm.events import (
    GoBack,
    QuarantineAsked,
    Ruled,
    RulingAsked,
    RulingsLearned,
    Undone,
    WithdrawalAsked,
)
from coordinator.swarm.going_back import HistoryMovedError
from coordinator.swarm.state import Alarm, next_round
from protocol.errors import (
    AtollError,
    BadDataError,
    ConfigError,
    NoInputError,
    UnavailableError,
    UsageError,
)
from protocol.run.amendments import (
    Changes,
    amended,
    in_force,
    refuse_at_rest,
    refuse_leaps,
    schedule_of,
    span_of,
    with_versions,
)
from protocol.run.run_spec import RunSpec
from protocol.terminal.console import seconds_in_words
from protocol.trust.evidence import Equivocation, Evidence
from protocol.trust.rulings import (
    ABOUT_NODES,
    CERTIFICATES,
    COORDINATOR,
    MOST_RULINGS,
    NOBODY,
    NUMBER,
    RUN_OWNER,
    Ruling,
    RulingKind,
    RulingVerifier,
    SignedRuling,
    decision_of,
    digest_of,
    follows,
    in_words,
    least_key,
    num_in_a_message,
)
from protocol.trust.signing import CommitSigner
from protocol.wire.messages import RulingsTold
from protocol.wire.rounds import Commit, Digest, NodeId

_log = structlog.get_logger()

_RULED_ANEW = ABOUT_NODES | {
    RulingKind.PAUSED,
    RulingKind.RESUMED,
    RulingKind.STOPPED,
    RulingKind.AMENDED,
    RulingKind.ROLLED_BACK,
    RulingKind.WITHDRAWN,
    RulingKind.MOVED,
}

MOST_TRIES = 20
"""Rounds may be closed while the database is asked what going back undoes: each costs a try."""
NEWER_FOLDER = (
    "stop this coordinator, and start the folder that has the newer key, or change this one's: "
    "'atoll coordinator rotate DIR'"
)

FIRST_KEY = 1
"""The number of the coordinator's key that a run begins with, which needs no ruling."""

LEAST_ID_LENGTH = 4


CLOCK_OFF_SECONDS = 300.0


def tell_of_clock(rulings: Iterable[Ruling], *, now: float) -> None:
    """Tells the run owner of a clock that is behind what this run has seen: invites expire by it."""
    behind = max((ruling.unix_seconds for ruling in rulings), default=now) - now
    if behind > CLOCK_OFF_SECONDS:
        _log.warning(
            f"this machine's clock is {seconds_in_words(behind)} behind the run's latest ruling, so invites "
            "that have expired may be good again",
            next_step="set it, as with 'timedatectl set-ntp true'; training goes on meanwhile",
        )


class Rulings:
    """Makes them. `wall_clock` gives UTC seconds; without a `verifier` the signer's key is the only one."""

    def __init__(
        self,
        driver: Driver,
        run: RunSpec,
        signer: CommitSigner,
        *,
        verifier: RulingVerifier | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._driver = driver
        self._run = run
        self._signer = signer
        self._verifier = verifier or RulingVerifier(signer.public_key)
        self._wall_clock = wall_clock
        self._turn = asyncio.Lock()
        self._going_back = asyncio.Lock()
        self._made_aside: set[asyncio.Task[None]] = set()
        driver.on_ruling_asked = self._start_ruling

    @property
    def store(self) -> Store:
        """Where they are kept."""
        return self._driver.store

    @property
    def run_digest(self) -> Digest:
        """Of the run that they are of."""
        return self._driver.state.run_digest

    @property
    def all(self) -> tuple[Ruling, ...]:
        """Those made so far."""
        return self._driver.state.rulings

    def signed(self, ruling: Ruling) -> SignedRuling:
        """With the authority's signature; the same bytes each time."""
        return SignedRuling(ruling=ruling, signature=self._signer.signature_of(ruling.statement))

    async def make(self, kind: RulingKind, *, by: str = RUN_OWNER, **fields: object) -> Ruling:
        """Makes a ruling; durable when this returns. Raises UsageError for one that changes nothing."""
        async with self._turn:
            return await self._make(kind, by=by, **fields)

    async def amend(self, changes: Changes, *, more_rounds: int, reason: str) -> Ruling:
        """Amends the run's rules from the next round on; see protocol.run.amendments for what it raises."""
        async with self._turn:
            state, spec = self._driver.state, in_force(self._run, self.all)
            if more_rounds:
                if "run.rounds" in dict(changes):
                    raise UsageError(
                        "the rounds are given twice",
                        next_step="extend the run, or amend run.rounds",
                    )
                # Those until its end, where the run was stopped before its file's last round.
                changes = (*changes, ("run.rounds", state.rules.total_rounds + more_rounds))
            if not changes:
                raise UsageError(
                    "nothing is amended", next_step="'atoll run amend run.rounds=200', for example"
                )
            becomes = amended(spec, changes)
            refuse_leaps(spec, becomes)
            schedule = schedule_of(self._run, self.all).amended(next_round(state), dict(changes))
            rules = rules_of(becomes, began=self._run, schedule=schedule)
            if becomes == spec and rules.total_rounds == state.rules.total_rounds:
                raise UsageError(
                    "the run has these values already", next_step="'atoll status' shows the run"
                )
            if rules.total_rounds > state.rules.total_rounds:
                refuse_at_rest(becomes, progress=self._progress(becomes))
            versioned = tuple(sorted(with_versions(changes)))
            return await self._make(
                RulingKind.AMENDED, changes=versioned, rules=rules, reason=reason
            )

    def _progress(self, spec: RunSpec) -> float:
        """How far the schedule is where the next round begins; 1 is its end."""
        state, total_tokens = self._driver.state, spec.inner.total_tokens
        if total_tokens is not None:
            return state.token_clock / total_tokens
        return span_of(self._run, self.all, next_round(state)).begin

    async def go_back(
        self,
        round: int,
        *,
        reason: str,
        by: str = RUN_OWNER,
        evidence: Evidence = (),
        believed: str = "",
    ) -> Ruling:
        """Has the run go back to the state after a round. Raises UsageError where it cannot.

        `believed` names a node which the run owner believes that it keeps that state.
        """
        node_id, node_name = self.find(believed) if believed else (NOBODY, "")
        async with self._turn:
            for _ in range(MOST_TRIES):
                with suppress(HistoryMovedError):
                    return await self._make(
                        RulingKind.ROLLED_BACK,
                        by=by,
                        reason=reason,
                        evidence=evidence,
                        node_id=node_id,
                        node_name=node_name,
                        from_round=round + 1,
                        undone=await self._undone_after(round),
                    )
            raise UsageError(
                "rounds are closed faster than the run can go back",
                next_step="'atoll run pause' first, and then again",
            )

    def _start_ruling(self, asked: RulingAsked) -> None:
        task = asyncio.create_task(self._rule_by_itself(asked))
        self._made_aside.add(task)
        task.add_done_callback(self._made_aside.discard)

    async def _rule_by_itself(self, asked: RulingAsked) -> None:
        """The core asks again where this fails and is still wanted."""
        try:
            match asked:
                case GoBack(alarm=alarm):
                    await self._go_back_by_itself(alarm)
                case WithdrawalAsked(withdrawn=gone):
                    await self.make(
                        RulingKind.WITHDRAWN,
                        by=COORDINATOR,
                        reason=asked.reason,
                        from_round=gone.from_round,
                        last_round=gone.last_round,
                        incarnation=gone.incarnation,
                        outer_digest=gone.outer_digest,
                    )
                case QuarantineAsked(conviction=found):
                    await self.make(
                        RulingKind.QUARANTINED,
                        by=COORDINATOR,
                        node_id=found.node_id,
                        node_name=found.node_name,
                        reason=found.reason,
                        evidence=found.evidence,
                    )
        except AtollError as error:  # what was ruled meanwhile has met it, or the disk is full
            _log.warning("no ruling was made", why=error.what)

    async def _go_back_by_itself(self, alarm: Alarm) -> None:
        """Makes the ruling, or pauses where the run cannot go back. One alarm after the other."""
        async with self._going_back:
            if self._driver.state.alarm == alarm:  # else what was ruled meanwhile has met it
                await self._go_back_for(alarm)

    async def _go_back_for(self, alarm: Alarm) -> None:
        reason, evidence = alarm.reason, alarm.evidence
        try:
            if alarm.round is not None:
                try:
                    await self.go_back(
                        alarm.round, reason=reason, by=COORDINATOR, evidence=evidence
                    )
                    return
                except UsageError as error:
                    reason = f"{reason}, and {error.what}"
            await self.make(RulingKind.PAUSED, by=COORDINATOR, reason=reason)
        except AtollError as error:  # it is over, or was paused meanwhile, or the disk is full
            _log.error("the run does not go back by itself", why=error.what, reason=alarm.reason)

    async def _undone_after(self, round: int) -> Undone:
        rules = self._driver.state.rules
        return await self._driver.aside(lambda: self.store.undone_after(round, rules=rules))

    async def _undone_by(self, rulings: Sequence[Ruling]) -> dict[int, Undone]:
        """For each going back among rulings that were made elsewhere, what it undoes here."""
        rounds = {r.from_round - 1 for r in rulings if r.kind is RulingKind.ROLLED_BACK}
        return {round: await self._undone_after(round) for round in sorted(rounds)}

    async def announce_key(self, number: int, bundle: bytes) -> None:
        """Rules that a key signs from now on which has taken the place of another one."""
        if number <= max(FIRST_KEY, least_key(self.all)):
            return
        changes = ((CERTIFICATES, bundle.decode()), (NUMBER, number))
        async with self._turn:
            await self._make(RulingKind.KEYED, changes=changes)

    def has_signed(self, commit: Commit) -> bool:
        """Whether this run's coordinator has made a commit."""
        return self._verifier.has_signed(commit, self.all)

    async def _make(self, kind: RulingKind, *, by: str = RUN_OWNER, **fields: object) -> Ruling:
        at = round(self._wall_clock(), 3)
        event = Ruled(kind=kind, by=by, unix_seconds=at, **fields)  # type: ignore[arg-type] # the caller's keywords, passed on
        return (await self._driver.apply(event)).state.rulings[-1]

    async def learn(self, brought: Sequence[SignedRuling], *, session: Session) -> int:
        """Takes over what is missing here; returns how many rulings there are then.

        Raises BadDataError for one that this run's authority never signed.
        """
        checks.at_most(brought, MOST_RULINGS, of="rulings")
        async with self._turn:
            known = frozenset(self.all)
            lacking = self._signed_rightly([one for one in brought if one.ruling not in known])
            chain = list(self.all)
            while lacking and follows(lacking[0], chain[-1] if chain else None):
                chain.append(lacking.pop(0))
            if news := tuple(chain[len(self.all) :]):
                rules = rules_in_force(self._run, chain)
                undone = await self._undone_by(news)
                event = RulingsLearned(rulings=news, rules=rules, undone=undone)
                await self._driver.apply(event, session=session)
            for ruling in lacking:
                await self._rule_anew(ruling, session)
            await self._readmit([*news, *lacking])
            return len(self.all)

    async def _readmit(self, learned: Sequence[Ruling]) -> None:
        """Lets in again who joined after this coordinator's copy was made, by an invite that it knows."""
        for ruling in learned:
            node_id, invite_id = ruling.node_id, ruling.invite_id
            if ruling.kind is not RulingKind.JOINED or self.store.invites.member(node_id):
                continue
            readmit = partial(
                self.store.invites.readmit,
                invite_id,
                node_id=node_id,
                node_name=ruling.node_name,
            )
            if await self._driver.write(readmit):
                name = ruling.node_name
                _log.info("readmitted: it joined after the copy", node=name, invite=invite_id)
                if ruling not in self.all:
                    await self._note_joined(node_id, node_name=name, invite_id=invite_id)

    def _signed_rightly(self, brought: Sequence[SignedRuling]) -> list[Ruling]:
        """Without those by a key that had been replaced; raises BadDataError for one that nobody signed.

        Raises UnavailableError where a later key than ours has signed: then this copy is too old to serve.
        """
        verifier = self._verifier
        for signed in brought:
            verifier = verifier.after(signed.ruling)
            verifier.check(signed)
        if verifier.trust.newest > self._verifier.trust.newest:
            _log.error(
                "this folder has a coordinator's key that was replaced",
                next_step=NEWER_FOLDER,
            )
            raise UnavailableError(
                "the coordinator goes on from a copy whose key was replaced since",
                next_step="the run owner starts the newer folder, or changes the key again",
            )
        changes = [one for one in self.all if one.kind is RulingKind.KEYED]
        found: list[Ruling] = []
        for signed in brought:
            least = least_key(one for one in changes if one.number <= signed.ruling.number)
            if verifier.trust.has_signed(signed.ruling.statement, signed.signature, least=least):
                found.append(signed.ruling)
            else:
                _log.warning(
                    "a ruling by a key that was replaced is left out",
                    what=in_words(signed.ruling),
                    next_step="rule it again, if it is yours",
                )
        return found

    async def _rule_anew(self, ruling: Ruling, session: Session) -> None:
        """Takes over what was ruled before this copy was made, where others were ruled since."""
        if ruling.kind not in _RULED_ANEW:
            return
        try:
            is_amending = ruling.kind is RulingKind.AMENDED
            rules = rules_in_force(self._run, (*self.all, ruling)) if is_amending else None
            undone = (await self._undone_by([ruling])).get(ruling.from_round - 1)
            event = Ruled(**decision_of(ruling), rules=rules, undone=undone)
            await self._driver.apply(event, session=session)
        except (UsageError, ConfigError) as error:  # it holds already, or cannot any more
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
        while num_kept < len(known):
            page = known[num_kept : num_kept + MOST_RULINGS]
            page = page[: num_in_a_message(page)]
            yield RulingsTold(rulings=page)
            num_kept += len(page)

    def standing_of(self, node_id: NodeId) -> Ruling | None:
        """The latest ruling that says how a node stands."""
        return self._driver.state.latest_rulings.get(node_id)

    @property
    def own_invites(self) -> tuple[str, ...]:
        """Those by which the run owner's own machines join."""
        return self._driver.state.own_invites

    async def note_joined(self, node_id: str, *, node_name: str, invite_id: str) -> None:
        """Notes who joined by which invite; once for each of both."""
        async with self._turn:
            await self._note_joined(node_id, node_name=node_name, invite_id=invite_id)

    async def _note_joined(self, node_id: str, *, node_name: str, invite_id: str) -> None:
        for known in self.all:
            is_joining = known.kind is RulingKind.JOINED
            if is_joining and (known.node_id, known.invite_id) == (node_id, invite_id):
                return
        await self._make(
            RulingKind.JOINED,
            by=COORDINATOR,
            node_id=NodeId(node_id),
            node_name=node_name,
            invite_id=invite_id,
        )

    async def expel_for(self, equivocation: Equivocation, evidence: Evidence) -> bool:
        """Expels the member that a proof is of; once for each, or a readmitted one would go again."""
        node_id, reason = equivocation.node_id, equivocation.reason
        async with self._turn:
            if any(known.node_id == node_id and known.reason == reason for known in self.all):
                return False
            standing = self.standing_of(node_id)
            if standing is not None and standing.kind is RulingKind.EXPELLED:
                return False
            await self._make(
                RulingKind.EXPELLED,
                by=COORDINATOR,
                node_id=node_id,
                node_name=self._name_of(node_id),
                reason=reason,
                evidence=evidence,
            )
            return True

    def _name_of(self, node_id: NodeId) -> str:
        member = self._driver.state.members.get(node_id)
        return "" if member is None else member.node_name

    def find(self, asked: str) -> tuple[NodeId, str]:
        """The id and the name of a node by its name, its id, or the beginning of that.

        Raises NoInputError for one that never joined, UsageError where several are meant.
        """
        asked = checks.name(asked, of="the node's name")
        members = self._driver.state.members
        names = {one.node_id: one.node_name for one in self.store.invites.members()}
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


def refuse_replaced_key(home: Home, rulings: Sequence[Ruling]) -> None:
    """Raises ConfigError for a folder whose key may not sign any more."""
    if home.key_number < least_key(rulings):
        raise ConfigError(
            f"the coordinator's key in {home.directory} was replaced since: its database says so",
            next_step=NEWER_FOLDER,
        )


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
