"""When which node did what in the latest rounds, and what rounds took and lost, heard from transitions.

Times are of the coordinator's clock: when its report came, which is what others wait for.
"""

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog
from pydantic import TypeAdapter, ValidationError

from coordinator.swarm.events import Tell
from coordinator.swarm.state import Round, SwarmState
from coordinator.swarm.transition import Transition
from protocol.files.rolling import RollingFile, lines_of
from protocol.wire.messages import AuditAsked, RoundCommitted, SliceTakenOver
from protocol.wire.rounds import NodeId

_log = structlog.get_logger()

KEPT_ROUNDS = 20

MOST_NODES = 64
"""Of a round that are drawn: those that were last. Of larger rounds reducing and receiving is not kept."""


MOST_ROWS = 40
"""Of all rounds that are drawn: the whole goes to every reader each second."""


@dataclass(slots=True, kw_only=True)
class Stages:
    """When one node was done with each stage of a round; None: not yet, or never."""

    name: str
    trained: float | None = None
    reduced: float | None = None  # the last of its slices
    held: float | None = None  # the first result of all slices that it held
    applied: float | None = None


@dataclass(slots=True, kw_only=True)
class RoundTimes:
    """One round."""

    number: int
    opened: float
    heard: float  # from when on reports were heard: later than opened after a start in mid-round
    committed: float | None = None
    ended: float | None = None
    reason: str = ""
    ended_unix: float | None = None  # by the machine's clock, in seconds since 1970
    nodes: dict[NodeId, Stages] = field(default_factory=dict)


class Timeline:
    """Hears every transition; keeps the latest rounds in memory.

    It begins with what is known of rounds that are over, and gives each that ends to `keep`. `unix_of` tells
    what the machine's clock shows at a time of the coordinator's.
    """

    def __init__(
        self,
        known: Iterable[RoundTimes] = (),
        *,
        keep: Callable[[RoundTimes], None] = lambda times: None,
        unix_of: Callable[[float], float | None] = lambda at: None,
    ) -> None:
        self._rounds: deque[RoundTimes] = deque(known, maxlen=KEPT_ROUNDS)
        self._keep = keep
        self._unix_of = unix_of

    @property
    def rounds(self) -> list[RoundTimes]:
        """Oldest first; the last one may be in flight."""
        return list(self._rounds)

    def of(self, number: int) -> RoundTimes | None:
        """A round that is in memory."""
        return next((times for times in reversed(self._rounds) if times.number == number), None)

    def hear(self, before: SwarmState, transition: Transition) -> None:
        """A step was taken."""
        was, now, at = before.open_round, transition.state.open_round, transition.at
        if was is now:
            return
        latest = self._rounds[-1] if self._rounds else None
        is_over = was is not None and (now is None or now.number != was.number)
        if was is not None and is_over and latest is not None and latest.number == was.number:
            self._end(latest, was, transition, at)
        if now is None:
            return
        if latest is None or latest.number != now.number or latest.opened != now.opened_at:
            latest = self._begun(now, transition.state, at)
        self._note(latest, now, at)

    def _begun(self, current: Round, state: SwarmState, at: float) -> RoundTimes:
        members = state.members
        times = RoundTimes(
            number=current.number,
            opened=current.opened_at,
            heard=at,
            nodes={
                a.node_id: Stages(
                    name=members[a.node_id].node_name if a.node_id in members else a.node_id[:8]
                )
                for a in current.assignments
            },
        )
        self._rounds.append(times)
        return times

    def _end(self, times: RoundTimes, was: Round, transition: Transition, at: float) -> None:
        closed = transition.state.last_closed
        if times.committed is None and transition.state.committed_round >= was.number:
            times.committed = at
        if closed is not None and closed.commit.round == was.number:
            times.reason = closed.reason
        for node_id in transition.state.members:
            member, stages = transition.state.members[node_id], times.nodes.get(node_id)
            if stages is not None and stages.applied is None and member.outer_round >= was.number:
                stages.applied = at
        times.ended, times.ended_unix = at, self._unix_of(at)
        self._keep(_latest_nodes(times))

    def _note(self, times: RoundTimes, current: Round, at: float) -> None:
        nodes = times.nodes
        for node_id in _latest_first(current.trained_at):  # the latest report stands last
            if node_id not in nodes or nodes[node_id].trained is not None:
                break
            nodes[node_id].trained = current.trained_at[node_id]
        for node_id in _latest_first(current.applied):
            if node_id not in nodes or nodes[node_id].applied is not None:
                break
            nodes[node_id].applied = at
        if current.commit is not None and times.committed is None:
            times.committed = current.committed_at
        if len(nodes) > MOST_NODES:
            return  # each report would be looked for among all
        waiting = {s.slice.reducer_id for s in current.slices if s.digest is None}
        for progress in current.slices:
            reducer_id = progress.slice.reducer_id
            if reducer_id in nodes and reducer_id not in waiting:
                nodes[reducer_id].reduced = nodes[reducer_id].reduced or at
        for node_id, results in current.held.items():
            if node_id in nodes and len(results) == len(current.slices):
                nodes[node_id].held = nodes[node_id].held or at


def _latest_first(told: Mapping[NodeId, object]) -> Iterator[NodeId]:
    """Dicts keep the order in which they grew, and reports are only ever added."""
    assert isinstance(told, dict)
    return reversed(told)


def waited_for(times: RoundTimes) -> str:
    """Whom the others waited for, and at what, in words; empty while nobody is known to be last.

    Of each stage it is the node that was done last, when that was more than a quarter of the round
    after the one in the middle.
    """
    end = times.committed or times.ended
    if end is None:
        return ""
    told = []
    for stage, words in (("trained", "to train"), ("reduced", "to reduce"), ("held", "to receive")):
        done = sorted(
            (at, stages.name)
            for stages in times.nodes.values()
            if (at := getattr(stages, stage)) is not None
        )
        absent = [s.name for s in times.nodes.values() if getattr(s, stage) is None]
        if stage == "trained" and absent:
            more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
            told.append(f"{', '.join(absent[:3])}{more} did not finish in time")
        if len(done) > 1 and done[-1][0] - done[len(done) // 2 - 1][0] > (end - times.opened) / 4:
            told.append(f"{done[-1][1]} was last {words}")
    return "; ".join(told)


def shown(rounds: Sequence[RoundTimes], *, now: float) -> list[Mapping[str, object]]:
    """The latest rounds for the page, newest first, of MOST_ROWS nodes in all; one round at least."""
    told: list[Mapping[str, object]] = []
    num_rows = 0
    for times in reversed(rounds):
        num_rows += min(len(times.nodes), MOST_NODES)
        if told and num_rows > MOST_ROWS:
            break
        told.append(as_shown(times, now=now))
    return told


def _latest_nodes(times: RoundTimes) -> RoundTimes:
    """The round with no more than the MOST_NODES nodes that were done last, or never."""

    def lateness(node: tuple[NodeId, Stages]) -> float:
        stages = node[1]
        done = filter(None, (stages.trained, stages.held, stages.applied))
        return max(done, default=float("inf"))

    if len(times.nodes) <= MOST_NODES:
        return times
    latest = sorted(times.nodes.items(), key=lateness, reverse=True)[:MOST_NODES]
    return replace(times, nodes=dict(latest))


def as_shown(times: RoundTimes, *, now: float) -> Mapping[str, object]:
    """One round for the page: seconds since it was opened, of its last MOST_NODES nodes."""

    def since(at: float | None) -> float | None:
        return None if at is None else round(max(0.0, at - times.opened), 2)

    latest = _latest_nodes(times).nodes.values()
    return {
        "round": times.number,
        "ago": round(now - times.opened, 1),
        "seconds": since(now if times.ended is None else times.ended),
        "committed": since(times.committed),
        "isOpen": times.ended is None,
        "reason": times.reason,
        "waitedFor": waited_for(times),
        "nodes": [
            {
                "name": stages.name,
                "trained": since(stages.trained),
                "reduced": since(stages.reduced),
                "held": since(stages.held),
                "applied": since(stages.applied),
            }
            for stages in sorted(latest, key=lambda stages: stages.name)
        ],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCounts:
    """As of one instant."""

    commits: int  # void ones included
    void_slices: int
    takeovers: int
    audits: int  # that members were asked for
    phase_seconds: Mapping[str, float]  # of phases that there were, the present one included


class RoundTally:
    """Hears every transition; counts from when it was made, in coordinator time."""

    def __init__(self, state: SwarmState, *, now: float) -> None:
        self._commits = 0
        self._void_slices = 0
        self._takeovers = 0
        self._audits = 0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._phase = _phase_of(state)
        self._since = now

    def hear(self, transition: Transition) -> None:
        """A step was taken."""
        for action in transition.actions:
            match action:
                case Tell(message=RoundCommitted(commit=commit)):
                    self._commits += 1
                    self._void_slices += sum(s.digest is None for s in commit.slices)
                case Tell(message=SliceTakenOver()):
                    self._takeovers += 1
                case Tell(message=AuditAsked(), to=to):
                    self._audits += len(to or ())
        self._count_up_to(transition.at)
        self._phase = _phase_of(transition.state)

    def counts(self, now: float) -> RoundCounts:
        """So far."""
        self._count_up_to(now)
        return RoundCounts(
            commits=self._commits,
            void_slices=self._void_slices,
            takeovers=self._takeovers,
            audits=self._audits,
            phase_seconds=dict(self._seconds),
        )

    def _count_up_to(self, now: float) -> None:
        self._seconds[self._phase] += now - self._since
        self._since = now


def _phase_of(state: SwarmState) -> str:
    if state.is_finished:
        return "finished"
    return "waiting" if state.open_round is None else state.open_round.phase.value


# When which node did what in rounds that are over: a file beside the database, across starts.
#
# It is for people alone: nothing is decided by it, a backup goes without it, and what a full disk does not
# take is only not shown.


MOST_BYTES = 4_000_000
"""Of the file, and of the one before: about as many rounds of 8 nodes as the database keeps whole."""

_TIMES = TypeAdapter(RoundTimes)


class TimesFile:
    """Takes rounds when they end; `of` reads them again."""

    def __init__(self, path: Path) -> None:
        self._file = RollingFile(path, most_bytes=MOST_BYTES)
        self._is_writable = True

    def add(self, times: RoundTimes) -> None:
        """Keeps a round. That the disk refuses is said once."""
        try:
            self._file.append([_TIMES.dump_json(times).decode()])
            self._is_writable = True
        except OSError as error:
            if self._is_writable:
                _log.warning(
                    "times of rounds are not kept", file=str(self._file.path), why=str(error)
                )
            self._is_writable = False

    def of(self, number: int) -> RoundTimes | None:
        """The latest that is kept of a round; a run that went back has made it twice. For a thread aside."""
        begins = f'{{"number":{number},'
        found = None
        for line in lines_of(self._file.path):
            if line.startswith(begins):
                found = _times_of(line) or found
        return found

    def latest(self) -> list[RoundTimes]:
        """The latest rounds, oldest first: what the page draws after a start."""
        lines = list(lines_of(self._file.path))[-KEPT_ROUNDS:]
        return [times for line in lines if (times := _times_of(line)) is not None]


def _times_of(line: str) -> RoundTimes | None:
    """None for a line that was cut when the machine stopped."""
    try:
        return _TIMES.validate_python(json.loads(line))
    except (ValueError, ValidationError):
        return None
