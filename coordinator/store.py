"""The coordinator's memory on disk: its run file, the state, closed rounds, invites, enrolled nodes.

What was answered is on the disk. What to remember is the core's decision; nothing is decided here
except whether an invite can be redeemed, because that must be one transaction. The run file is kept
with the first state: one that was changed since is refused by key and value.
"""

import json
import sqlite3
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from coordinator import round_rows
from coordinator.database import (
    DATABASE_NAME,
    Change,
    DamagedError,
    Database,
    put,
    row_of,
    rows_of,
    to_save,
    without_rows,
)
from coordinator.invite_rows import Invites
from coordinator.round_rows import JSON, Sign, load_round, save_round
from coordinator.swarm.bounds import KEPT_COMMITS, norms_of, stride_of
from coordinator.swarm.events import Undone
from coordinator.swarm.ledger import Ledger
from coordinator.swarm.members import PRESENT, Member
from coordinator.swarm.state import (
    ClosedRound,
    HeldOut,
    HolderLoss,
    Round,
    RoundPhase,
    Rules,
    SeenNorms,
    SwarmState,
    Written,
    trimmed,
)
from coordinator.swarm.steering import with_rulings
from coordinator.swarm.transition import initial_state
from protocol.errors import ConfigError
from protocol.files.durable import as_typed, toml_of, write_atomically
from protocol.run.amendments import AMENDABLE
from protocol.run.run_files import (
    DESCRIPTION_FILE,
    description_file,
    run_from_json,
    tables_of,
    validated_file,
)
from protocol.run.run_spec import RunSpec
from protocol.terminal import console
from protocol.trust.rulings import SignedRuling, ruling_from_json
from protocol.v1 import round_pb2
from protocol.v1.status_pb2 import RoundSummary
from protocol.wire import convert
from protocol.wire.channel import RETRY_CAP_SECONDS
from protocol.wire.rounds import Commit, Digest, SourceLoss

MOST_NAMED = 3
"""Changed keys that a refusal names, and the number of the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChange:
    """One key of the run file with its value when the run began, and now; None: left out."""

    table: str
    key: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"[{self.table}] {self.key} was {_value(self.before)} and is {_value(self.after)}"

    @property
    def undone(self) -> str:
        """What to type to have it as it was."""
        if self.before is None:
            return f"remove {self.key} from [{self.table}]"
        return f"write {self.key} = {_value(self.before)} into [{self.table}]"


def changes_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[RunChange]:
    """Keys whose values differ, in the order of the tables."""
    for table in dict.fromkeys((*after, *before)):
        old, new = before.get(table) or {}, after.get(table) or {}
        for key in dict.fromkeys((*new, *old)):
            if old.get(key) != new.get(key):
                yield RunChange(table=table, key=key, before=old.get(key), after=new.get(key))


def keep_or_compare(database: Database, run: RunSpec, path: Path) -> None:
    """Keeps the run file with the first state of the run; raises ConfigError when it changed since."""
    with database.reading() as connection:
        has_begun = row_of(connection, "swarm") is not None
        row = row_of(connection, "run_file")
    text = run.canonical_json()
    if not has_begun and row != (1, text):
        with database.writing() as connection:
            put(connection, "run_file", [(1, text)])
    if not has_begun or row is None:
        return
    changes = list(changes_between(json.loads(row[1]), json.loads(text)))
    if not changes:
        return
    named = "; ".join(map(str, changes[:MOST_NAMED]))
    more = f"; and {len(changes) - MOST_NAMED} more" if len(changes) > MOST_NAMED else ""
    undone = ", ".join(change.undone for change in changes[:MOST_NAMED])
    keys = [f"{change.table}.{change.key}" for change in changes]
    amend = ""
    is_given = all(change.after is not None for change in changes)
    if is_given and all(key in AMENDABLE for key in keys):
        values = " ".join(
            f"{key}={_value(change.after)}" for key, change in zip(keys, changes, strict=True)
        )
        amend = f", and type 'atoll run amend {values}'"
    raise ConfigError(
        f"{path} has changed since the run began: {named}{more}",
        next_step=f"{undone} of {path}, then start again{amend}; or start a new run with "
        f"'atoll init NEWDIR --run {as_typed(path)}'",
    )


def may_have_begun(folder: Path) -> bool:
    """Whether a run's file may not change any more; read without the lock, which its coordinator may have.

    Where the database cannot be read, its start says why.
    """
    path = folder / DATABASE_NAME
    if not path.is_file():
        return False
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        ) as connection:
            return connection.execute("SELECT 1 FROM swarm").fetchone() is not None
    except sqlite3.Error:
        return True


def write_lost_anew(run_file: Path) -> list[Path]:
    """Writes a run file that is gone, or its description, as the database beside it has them.

    Says and returns which. Only of a run that has begun, and only where what is written reads as the run that
    its state is of: else nothing is, and who loads the file says that it is not there.
    """
    described_in = run_file.with_name(DESCRIPTION_FILE)
    if (run_file.exists() and described_in.exists()) or not may_have_begun(run_file.parent):
        return []
    database = run_file.with_name(DATABASE_NAME).absolute()
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            kept = row_of(connection, "run_file")
            if kept is None:
                return []
            run = run_from_json(kept[1])
            if run_file.exists() and run.description is None:
                return []  # nothing is lost; a state may be large
            state = row_of(connection, "swarm")
        if state is None:
            return []
        text = toml_of(tables_of(run))
        written = validated_file(tomllib.loads(text), origin=DATABASE_NAME)
        written = written.model_copy(update={"description": run.description})
        if written.digest() != _STATE.validate_json(state[1])[0].run_digest:
            return []
    except (sqlite3.Error, ValidationError, ConfigError):  # the start says what is wrong with it
        return []
    lost = {}
    if run.description is not None and not described_in.exists():
        lost[described_in] = description_file(run)
    if not run_file.exists():
        header = (
            f"# Written from {DATABASE_NAME}, since the file was gone. Defaults are left out.\n\n"
        )
        lost[run_file] = (header + text).encode()
    for path, data in lost.items():
        write_atomically(path, data)
        console.say(f"{path} was gone, and is written anew from {DATABASE_NAME}", err=True)
    return list(lost)


def _value(value: object) -> str:
    """As TOML has it."""
    return "left out" if value is None else json.dumps(value)


CLOCK_SAVE_SECONDS = 5.0
"""The clock is written this often when nothing else is: what a crash can add to a deadline."""

_STATE = TypeAdapter(tuple[SwarmState], config=JSON)
_MEMBER = TypeAdapter(tuple[Member], config=JSON)
_LEDGER = TypeAdapter(tuple[Ledger], config=JSON)
_TEXTS = TypeAdapter(tuple[tuple[str, ...]], config=JSON)
_HOLDERS = TypeAdapter(
    tuple[tuple[HolderLoss, ...]] | tuple[tuple[HolderLoss, ...], tuple[SourceLoss, ...]],
    config=JSON,
)
"""Losses of holders, and behind them those of sources where there are any."""

T = TypeVar("T")


class Store:
    """The one writer. Its methods raise SystemRefusedError when the disk refuses.

    `sign` puts the coordinator's signature under commits that are written; a copy that is only read
    needs none.
    """

    def __init__(self, database: Database, *, sign: Sign | None = None) -> None:
        self._database = database
        self._sign = sign
        self._saved_now = 0.0
        self._round_held: Round | None = None  # by the database, in rows of its own
        self._staged: tuple[float, Round | None] = 0.0, None  # these two after the next commit
        with database.reading() as connection:
            if (row := row_of(connection, "clock")) is not None:
                self._saved_now = row[1]
        self.invites = Invites(database)

    @classmethod
    def open(cls, directory: Path, *, sign: Sign | None = None) -> Self:
        """Opens or makes the store of a coordinator's folder, for this process alone."""
        database = Database.open(directory)
        try:
            return cls(database, sign=sign)
        except BaseException:
            database.close()
            raise

    @classmethod
    def in_memory(cls) -> Self:
        """A store that forgets, for simulations: the same code on a database without a file."""
        return cls(Database.in_memory())

    def close(self) -> None:
        """Lets another coordinator have the folder."""
        self._database.close()

    @property
    def saved_now(self) -> float:
        """The coordinator's time at the latest save: where its clock goes on after a restart."""
        return self._saved_now

    # The swarm's state

    def keep_or_compare(self, run: RunSpec, path: Path) -> None:
        """Keeps the run file `path`; raises ConfigError with the keys that changed since the run began."""
        keep_or_compare(self._database, run, path)

    def load(self, rules: Rules, run_digest: Digest) -> SwarmState:
        """The state as last saved, or the initial one. Present members get a fresh lease.

        `rules` are the run file's with all amendments. Raises ConfigError when the database belongs to
        another run file.
        """
        rulings = tuple(signed.ruling for signed in self.rulings())
        with self._database.reading() as connection:
            row = row_of(connection, "swarm")
            if row is None:
                if row_of(connection, "clock") or row_of(connection, "commits"):
                    raise DamagedError("the swarm's own row is missing")
                return with_rulings(initial_state(rules, run_digest), rulings)
            (state,) = _STATE.validate_json(row[1])
            members = [_MEMBER.validate_json(text)[0] for _, text in rows_of(connection, "members")]
            held_out, written = _held_out(connection), _written(connection)
            open_round = load_round(connection)
            ledger = Ledger()
            if (row := row_of(connection, "ledger")) is not None:
                (ledger,) = _LEDGER.validate_json(row[1])
            elif open_round is not None or row_of(connection, "commits"):
                raise DamagedError("the ledger's own row is missing")
            recent = _recent_rounds(connection)
            earlier: tuple[ClosedRound, ...] = ()
            if open_round is not None and open_round.phase is RoundPhase.APPLYING:
                earlier = _recent_rounds(connection, last=open_round.number - 1)
            norms = _norms(connection, rules)
        if state.run_digest != run_digest:
            raise ConfigError(
                f"the database {self._database.path} is of run file {state.run_digest.hex()[:8]}…, "
                f"but run.toml is {run_digest.hex()[:8]}…",
                next_step="put the old run.toml back, or start a new run with 'atoll init NEWDIR'",
            )
        state = replace(
            state,
            rules=rules,
            members={member.node_id: self._with_fresh_lease(member, rules) for member in members},
            open_round=open_round,
            recent=recent,
            earlier=earlier,
            norms=norms,
            ledger=ledger,
            held_out=held_out,
            written=written,
        )
        return with_rulings(state, rulings)

    def _with_fresh_lease(self, member: Member, rules: Rules) -> Member:
        """Leases are not saved, and nobody could renew one while the coordinator was down."""
        if member.state not in PRESENT:
            return member
        # Nodes may be in their longest pause, and a round must not lose its participants by it.
        seconds = rules.lease_seconds + RETRY_CAP_SECONDS
        return replace(member, lease_until=self._saved_now + seconds)

    def save(self, before: SwarmState, *after: SwarmState, now: float) -> None:
        """Makes the steps from `before`, which the database holds, durable at `now`: all or none.

        `after` are the states that they led to, in their order.
        """
        if changes := self.news(before, *after, now=now):
            self.stage(changes, now=now)
            self.commit()

    def news(self, before: SwarmState, *after: SwarmState, now: float) -> list[Change]:
        """What of the steps has to be written; nothing when only time has passed, and little of it."""
        changes = [Change.between(one, other) for one, other in pairwise(to_save(before, after))]
        is_clock_old = now - self._saved_now >= CLOCK_SAVE_SECONDS
        is_any = is_clock_old or any(change.is_any for change in changes)
        return changes if after and is_any else []

    def stage(self, changes: Sequence[Change], *, now: float) -> None:
        """Writes what is news; the wait for the disk is for `commit`."""
        round_held = self._round_held
        with self._database.staging() as connection:
            for change in changes:
                self._write(connection, change, round_held)
                round_held = change.after.open_round
            put(connection, "clock", [(1, float(now))])
            if not self._saved_now or any(change.are_scalars_new for change in changes):
                scalars = _text(_STATE, without_rows(changes[-1].after))
                put(connection, "swarm", [(1, scalars)])
        self._staged = now, round_held

    def commit(self) -> None:
        """Waits until the disk has what was staged; when it raises, nothing has happened.

        The one method that may be called in another thread.
        """
        self._database.commit()
        self._saved_now, self._round_held = self._staged

    def _write(self, connection: sqlite3.Connection, change: Change, held: Round | None) -> None:
        """Writes all that has tables of its own; `held` is the round that they hold."""
        after = change.after
        put(connection, "members", [(m.node_id, _text(_MEMBER, m)) for m in change.members])
        connection.executemany(
            "DELETE FROM members WHERE node_id = ?", [(node_id,) for node_id in change.gone]
        )
        if change.is_round_new:
            save_round(connection, held, after.open_round)
        if change.is_ledger_new:
            put(connection, "ledger", [(1, _text(_LEDGER, after.ledger))])
        if change.num_losses_kept is not None:
            first = change.num_losses_kept
            connection.execute("DELETE FROM held_out WHERE place >= ?", (first,))
            losses = zip(count(first), after.held_out[first:], strict=False)
            put(
                connection,
                "held_out",
                (
                    (
                        *(place, h.round, float(h.loss), h.tokens, h.metric),
                        _losses_text(h),
                    )
                    for place, h in losses
                ),
            )
        connection.executemany(
            "DELETE FROM written WHERE round = ?", [(number,) for number in change.forgotten]
        )
        put(
            connection,
            "written",
            ((w.round, w.node_id, _text(_TEXTS, w.texts), w.why_not) for w in change.written),
        )
        if change.rulings:
            sign = self._sign or (lambda _: b"")
            put(
                connection,
                "rulings",
                [(r.number, r.canonical_json(), sign(r.statement)) for r in change.rulings],
            )
        if change.is_taken_back or change.closed:
            round_rows.forget_after(connection, after.committed_round)
        for closed in change.closed:
            round_rows.save_closed(connection, after, closed, self._sign)
        if change.closed:
            round_rows.thin_out(connection, after.committed_round)

    # Closed rounds

    def commits_after(self, round_number: int, limit: int = 64) -> tuple[Commit, ...]:
        """The commits of later rounds than this one that are kept whole, oldest first."""
        with self._database.reading() as connection:
            listed = round_rows.commits_after(connection, round_number, limit)
            return tuple(map(convert.commit_from_wire, listed))

    def page_of_commits(
        self, round_number: int, *, limit: int, max_bytes: int
    ) -> tuple[round_pb2.Commit, ...]:
        """The first of them as messages, until one passes so many bytes. For a thread aside."""
        page: list[round_pb2.Commit] = []
        with self._database.reading_aside() as connection:
            for message in round_rows.commits_after(connection, round_number, limit):
                page.append(message)
                max_bytes -= message.ByteSize()
                if max_bytes < 0:
                    break
        return tuple(page)

    def undone_after(self, round_number: int, *, rules: Rules) -> Undone:
        """What going back to the state after a round undoes, and what was known then. For a thread aside."""
        with self._database.reading_aside() as connection:
            return Undone(
                commits=_whole_commits_after(connection, round_number),
                recent=_recent_rounds(connection, last=round_number),
                norms=_norms(connection, rules, last=round_number),
            )

    def whole_commits_after(self, round_number: int) -> tuple[Commit, ...]:
        """Those that are kept whole, unsigned, oldest first. For a thread aside."""
        with self._database.reading_aside() as connection:
            return _whole_commits_after(connection, round_number)

    def latest_rounds(self, limit: int) -> tuple[ClosedRound, ...]:
        """The latest closed rounds that are kept whole, newest first."""
        with self._database.reading() as connection:
            return tuple(round_rows.latest_closed(connection, limit))

    def latest_figures(self, limit: int) -> tuple[RoundSummary, ...]:
        """The latest rounds' figures, newest first; of rounds that are long over only some are kept.

        For a thread aside.
        """
        with self._database.reading_aside() as connection:
            return tuple(round_rows.latest_figures(connection, limit))

    def closed_round(self, round_number: int) -> tuple[RoundSummary | None, ClosedRound | None]:
        """What is kept of a closed round: its figures, and all of it. For a thread aside."""
        with self._database.reading_aside() as connection:
            whole = next(round_rows.latest_closed(connection, 1, last=round_number), None)
            return round_rows.figures_at(connection, round_number), (
                whole if whole is not None and whole.commit.round == round_number else None
            )

    def rulings(self, after: int = 0, *, limit: int = 1 << 60) -> tuple[SignedRuling, ...]:
        """Rulings of greater numbers, in order, with their signatures; at most so many."""
        with self._database.reading() as connection:
            rows = rows_of(
                connection, "rulings", "WHERE number > ? ORDER BY number LIMIT ?", (after, limit)
            )
            return tuple(
                SignedRuling(ruling=ruling_from_json(text), signature=signature)
                for _, text, signature in rows
            )

    def check(self) -> None:
        """Reads all rows; raises BadDataError at the first that is not what was written."""
        with self._database.reading() as connection:
            names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            for (table,) in names.fetchall():
                for _ in rows_of(connection, table):
                    pass


def _whole_commits_after(connection: sqlite3.Connection, round_number: int) -> tuple[Commit, ...]:
    later = round_rows.commits_after(connection, round_number, 1 << 60)
    return tuple(replace(convert.commit_from_wire(commit), signature=b"") for commit in later)


def _recent_rounds(
    connection: sqlite3.Connection, *, last: int = 1 << 62
) -> tuple[ClosedRound, ...]:
    """Up to round `last` the newest that is not void, and the void ones after it, oldest first."""
    num_read = 8
    while True:
        closed = tuple(round_rows.latest_closed(connection, num_read, last=last))[::-1]
        recent = trimmed(closed)
        if len(recent) < len(closed) or len(closed) < num_read or not recent[0].is_void:
            return recent
        num_read *= 4


def _held_out(connection: sqlite3.Connection) -> tuple[HeldOut, ...]:
    """Held-out losses, in the order in which they were measured."""
    rows = rows_of(connection, "held_out", "ORDER BY place")
    found = []
    for _, number, loss, tokens, metric, text in rows:
        holders, *by_source = _HOLDERS.validate_json(text)
        found.append(
            HeldOut(
                round=number,
                loss=loss,
                tokens=tokens,
                metric=metric,
                holders=holders,
                by_source=by_source[0] if by_source else (),
            )
        )
    return tuple(found)


def _losses_text(held_out: HeldOut) -> str:
    if not held_out.by_source:
        return _HOLDERS.dump_json((held_out.holders,)).decode()
    return _HOLDERS.dump_json((held_out.holders, held_out.by_source)).decode()


def _written(connection: sqlite3.Connection) -> tuple[Written, ...]:
    """What nodes wrote on from the run's prompts, by round."""
    return tuple(
        Written(
            round=number, node_id=node_id, texts=_TEXTS.validate_json(texts)[0], why_not=why_not
        )
        for number, node_id, texts, why_not in rows_of(connection, "written", "ORDER BY round")
    )


def _norms(
    connection: sqlite3.Connection, rules: Rules, *, last: int = 1 << 62
) -> tuple[SeenNorms, ...]:
    """What the latest commits up to round `last` applied, as far as results are bounded by it."""
    num_commits = KEPT_COMMITS * len(rules.layout.fragment_elements)
    latest = round_rows.latest_closed(connection, num_commits, last=last)
    return norms_of(
        (each.commit, stride_of(rules, each.plan, each.trained)) for each in reversed(list(latest))
    )


def _text(adapter: TypeAdapter[tuple[T]], value: T) -> str:
    return adapter.dump_json((value,)).decode()
