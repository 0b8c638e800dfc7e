"""What each node has given over the whole run: rounds, bytes, hours. Heard from transitions, in a file.

For people alone, as the times of rounds are. Rounds are counted again from the database after a crash, and
bytes from what nodes tell of themselves; of hours a crash costs the last minute.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog
from pydantic import TypeAdapter, ValidationError

from coordinator.swarm.members import PRESENT, Member
from coordinator.swarm.state import ClosedRound, SwarmState
from coordinator.swarm.transition import Transition
from protocol.wire.payload import WireTotals
from protocol.wire.rounds import NodeId

LOOK_SECONDS = 5.0
"""Who is present is looked at so often, and when a round closes: of thousands of nodes, not at each call."""

SAVE_SECONDS = 60.0

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """By one node."""

    num_rounds: int = 0  # committed with something of its work; of a helper those it was in
    sent_bytes: int = 0
    received_bytes: int = 0
    present_seconds: float = 0.0
    process_id: int = 0  # of which the latest bytes are
    process_sent: int = 0  # by that process so far
    process_received: int = 0


@dataclass(slots=True, kw_only=True)
class Tally:
    """Of all nodes that ever took part, or are here."""

    through_round: int = 0
    by_node: dict[NodeId, Given] = field(default_factory=dict)

    def of(self, node_id: NodeId) -> Given:
        """What a node has given; nothing before its first round."""
        return self.by_node.get(node_id, Given())

    def count_rounds(self, closed: Iterable[ClosedRound]) -> None:
        """Counts rounds that it has not counted, oldest first. A round that is made again counts again."""
        for one in closed:
            if one.commit.round <= self.through_round or one.is_void:
                continue
            self.through_round = one.commit.round
            taken = {
                contributor.node_id
                for outcome in one.commit.slices
                if outcome.digest is not None
                for contributor in outcome.taken
            }
            helped = {a.node_id for a in one.plan.assignments if not a.trains}
            for node_id in taken | helped:
                before = self.of(node_id)
                self.by_node[node_id] = replace(before, num_rounds=before.num_rounds + 1)

    def look(self, members: Mapping[NodeId, Member], *, seconds: float) -> None:
        """Counts `seconds` for who is present, and the bytes that members have told of since."""
        for member in members.values():
            before = self.by_node.get(member.node_id)
            is_present = member.state in PRESENT
            if before is None and not is_present:
                continue
            self.by_node[member.node_id] = _looked_at(
                before or Given(), member, seconds=seconds if is_present else 0.0
            )

    def forget_idle(self, members: Mapping[NodeId, Member]) -> None:
        """Forgets who had a part in no round and is gone: anybody with an invite makes keys without end."""
        self.by_node = {
            node_id: given
            for node_id, given in self.by_node.items()
            if given.num_rounds or node_id in members
        }


def _looked_at(before: Given, member: Member, *, seconds: float) -> Given:
    sent, received = _sums(member.wire_told)
    is_same = member.process_id == before.process_id
    return replace(
        before,
        present_seconds=before.present_seconds + seconds,
        sent_bytes=before.sent_bytes + max(0, sent - before.process_sent * is_same),
        received_bytes=before.received_bytes + max(0, received - before.process_received * is_same),
        process_id=member.process_id,
        process_sent=max(sent, before.process_sent * is_same),
        process_received=max(received, before.process_received * is_same),
    )


def _sums(totals: WireTotals) -> tuple[int, int]:
    return sum(sent for sent, _ in totals.values()), sum(got for _, got in totals.values())


_TALLY = TypeAdapter(Tally)


class GivenFile:
    """Keeps the tally up to date, and its file now and then."""

    def __init__(
        self, path: Path, *, closed: Callable[[], Iterable[ClosedRound]], now: float
    ) -> None:
        """Reads the file; `closed` gives the rounds that the database holds whole, newest first."""
        self._path = path
        self.tally = _read(path)
        self.tally.count_rounds(reversed(list(closed())))
        self._looked_at = self._saved_at = now
        self._is_writable = True

    def hear(self, transition: Transition) -> None:
        """A step was taken."""
        state, at = transition.state, transition.at
        last = state.last_closed
        through_round = min(self.tally.through_round, state.committed_round)  # it went back
        self.tally.through_round = through_round
        is_closed = last is not None and last.commit.round > self.tally.through_round
        if not is_closed and at - self._looked_at < LOOK_SECONDS:
            return
        self._look(state, at)
        if at - self._saved_at >= SAVE_SECONDS:
            self._saved_at = at
            self.tally.forget_idle(state.members)
            self.save()

    def _look(self, state: SwarmState, at: float) -> None:
        self.tally.count_rounds(state.recent)
        self.tally.look(state.members, seconds=max(0.0, at - self._looked_at))
        self._looked_at = at

    def save(self) -> None:
        """Writes the file, whole or not at all. That the disk refuses is said once."""
        unfinished = self._path.with_name(self._path.name + ".new")
        try:
            unfinished.write_bytes(_TALLY.dump_json(self.tally))
            unfinished.replace(self._path)
            self._is_writable = True
        except OSError as error:
            if self._is_writable:
                _log.warning(
                    "what nodes have given is not kept", file=str(self._path), why=str(error)
                )
            self._is_writable = False


def _read(path: Path) -> Tally:
    try:
        return _TALLY.validate_python(json.loads(path.read_text()))
    except FileNotFoundError:
        return Tally()
    except (OSError, ValueError, ValidationError) as error:
        _log.warning("what nodes have given is counted anew", file=str(path), why=str(error))
        return Tally()
