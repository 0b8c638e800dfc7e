"""What a chaos run cost: throughput, recovery times, void slices. Pure, from the evidence.

A recovery lasts from the kill to the commit that holds the first work which the node did after it:
a contribution that was under way when its sender died does not count, though it may be committed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from lab.processes.faults import Fault
from lab.processes.invariants import Evidence, Samples, digests_of, samples_of
from lab.processes.logs import Entry
from lab.processes.swarm import COORDINATOR


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One fault that happened."""

    victim: str
    kind: str
    at: float  # wall clock
    round: int | None  # None: it came by time
    phase: str | None
    is_final: bool  # the victim did not come back
    recovery_seconds: float | None  # None: it did not take part again before the run was over


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run in figures."""

    num_rounds: int
    num_slices: int
    num_committed_slices: int
    tokens: int  # of the rounds after the first one with all nodes
    seconds: float  # from that one's commit to the last
    samples: Samples
    num_digests: int  # (round, digest) that nodes told of
    num_tellers: int  # nodes that told of one
    kills: Sequence[Kill]
    num_not_struck: int  # faults whose phase or victim did not come
    rounds: Sequence[Mapping[str, Any]]

    @property
    def tokens_per_second(self) -> float:
        """Committed."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Raw results, one JSON object for each thing."""
        for closed in reversed(self.rounds):
            yield {"what": "round", "run": name, **closed}
        for kill in self.kills:
            yield {"what": "kill", "run": name, **asdict(kill)}
        figures = {k: v for k, v in asdict(self).items() if k not in ("rounds", "kills")}
        yield {"what": "sum", "run": name, "tokens_per_second": self.tokens_per_second, **figures}


def seconds_of(entry: Entry) -> float:
    """When a line was written, on the wall clock."""
    return datetime.fromisoformat(entry["timestamp"]).timestamp()


def commit_times(entries: Mapping[str, Sequence[Entry]]) -> dict[int, float]:
    """When rounds were committed: when the coordinator, or else the first node, told of it."""
    times: dict[int, float] = {}
    for of_member in entries.values():
        for entry in of_member:
            if entry.get("event") == "phase" and entry["phase"] in ("committed", "applying"):
                at = seconds_of(entry)
                times[entry["round"]] = min(at, times.get(entry["round"], at))
    return times


def recovered_at(evidence: Evidence, name: str, killed_at: float) -> float | None:
    """When the first commit came that holds work of this node from after the kill.

    For the coordinator: when it committed the next round.
    """
    times = commit_times(evidence.entries)
    if name == COORDINATOR:
        return min((at for at in times.values() if at > killed_at), default=None)
    contributed = (
        entry["round"]
        for entry in evidence.entries[name]
        if entry.get("event") == "phase"
        and entry["phase"] == "contributing"
        and seconds_of(entry) > killed_at
    )
    for number in contributed:
        if name in evidence.contributors.get(number, ()) and number in times:
            return times[number]
    return None


def began(evidence: Evidence, names: Sequence[str]) -> tuple[int, float]:
    """The first round whose commit holds work of all these nodes, and when it came.

    What is before it is the nodes' first start, in which they race for the cores.
    """
    times = commit_times(evidence.entries)
    everybody = (n for n in sorted(times) if set(names) <= evidence.contributors.get(n, set()))
    first = next(everybody, min(times))
    return first, times[first]


def outcome_of(
    evidence: Evidence, faults: Sequence[Fault], *, names: Sequence[str], gone: Set[str]
) -> Outcome:
    """The figures of one run that these nodes began."""
    kills = []
    for fault in faults:
        if (fired := fault.fired) is None:
            continue
        name = fault.victim.name
        back_at = recovered_at(evidence, name, fired.at)
        kills.append(
            Kill(
                victim=name,
                kind=fault.kind,
                at=fired.at,
                round=fired.round,
                phase=fired.phase,
                is_final=name in gone and back_at is None,
                recovery_seconds=None if back_at is None else back_at - fired.at,
            )
        )
    times = commit_times(evidence.entries)
    told = digests_of(evidence)
    first_round, began_at = began(evidence, names)
    return Outcome(
        num_rounds=len(evidence.rounds),
        num_slices=sum(closed["num_slices"] for closed in evidence.rounds),
        num_committed_slices=sum(closed["num_committed_slices"] for closed in evidence.rounds),
        tokens=sum(c["tokens"] for c in evidence.rounds if c["round"] > first_round),
        seconds=max(times.values()) - began_at,
        samples=samples_of(evidence),
        num_digests=sum(len(by_digest) for by_digest in told.values()),
        num_tellers=len({n for by in told.values() for names in by.values() for n in names}),
        kills=kills,
        num_not_struck=sum(fault.fired is None for fault in faults),
        rounds=evidence.rounds,
    )


def report(undisturbed: Outcome, disturbed: Outcome, broken: Sequence[str]) -> list[str]:
    """All of it in lines."""
    num_void = disturbed.num_slices - disturbed.num_committed_slices
    by_struck = Counter(_struck(kill) for kill in disturbed.kills)
    struck = ", ".join(f"{count} × {what}" for what, count in sorted(by_struck.items()))
    share = (
        disturbed.tokens_per_second / undisturbed.tokens_per_second
        if undisturbed.tokens_per_second
        else 0.0
    )
    kept = [kill for kill in disturbed.kills if not kill.is_final]
    of_nodes = [kill for kill in kept if kill.victim != COORDINATOR]
    of_coordinator = [kill for kill in kept if kill.victim == COORDINATOR]
    samples = disturbed.samples
    return [
        f"kills            {len(disturbed.kills)} ({struck}); {disturbed.num_not_struck} more "
        "were planned and did not come to it",
        f"rounds           {disturbed.num_rounds} committed; {num_void} of {disturbed.num_slices} "
        "slices void",
        f"throughput       {disturbed.tokens_per_second:,.0f} of {undisturbed.tokens_per_second:,.0f} "
        f"committed tokens/s: {share:.0%} of the undisturbed run",
        "                 the machine is shared: restarted processes load torch on the cores that "
        "others train on",
        f"recovery         {in_words(of_nodes)}",
        "                 of nodes: from the kill to the commit with the node's next work",
        *(
            f"  after {what:<14} {in_words([k for k in of_nodes if _struck(k) == what])}"
            for what in sorted({_struck(kill) for kill in of_nodes})
        ),
        f"coordinator      {in_words(of_coordinator)}; to the next commit",
        f"samples          {samples.committed} committed, {samples.lost} lost, "
        f"{samples.double_counted} double-counted",
        "                 places of the sample order by the commits in the database, and the rest by "
        "'atoll data'",
        f"digests          {disturbed.num_digests} pairs of round and digest, told by "
        f"{disturbed.num_tellers} nodes",
        f"invariants       {'all hold' if not broken else 'BROKEN'}",
        *(f"  {sentence}" for sentence in broken),
    ]


def _struck(kill: Kill) -> str:
    if kill.victim == COORDINATOR:
        return "the coordinator"
    return {"kill": "a daemon", "kill a rank of": "a rank", "kill p2pd of": "p2pd"}[kill.kind]


def in_words(kills: Sequence[Kill]) -> str:
    """Median, 90 % and worst of the recovery times, and how many never recovered."""
    seconds = sorted(k.recovery_seconds for k in kills if k.recovery_seconds is not None)
    if not seconds:
        return f"none of {len(kills)}"
    middle, ninth = (seconds[int(part * (len(seconds) - 1) + 0.5)] for part in (0.5, 0.9))
    never = len(kills) - len(seconds)
    return (
        f"median {middle:.1f} s, 90 % within {ninth:.1f} s, worst {seconds[-1]:.1f} s, of "
        f"{len(seconds)}" + (f"; {never} were not back before the end" if never else "")
    )
