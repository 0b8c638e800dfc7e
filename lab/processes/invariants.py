"""What must hold of a swarm whatever was killed: judged from logs, commands' answers, and commits.

`gather` collects the evidence once everything has ended; all else here is pure, and tells what is
broken in sentences. Nothing broken is an empty list.
"""

import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.store import Store
from coordinator.swarm.ledger import committed_samples
from coordinator.swarm.state import ClosedRound
from lab.processes.logs import Entry
from lab.processes.swarm import COORDINATOR, RealSwarm
from protocol.run.run_files import load_run_file

EXPECTED_ERRORS = frozenset({"the libp2p daemon died"})
"""Lines of level error that a fault causes: the death of a process that the node has to have."""

MOST_ROUNDS = 1000
"""What `atoll rounds` gives at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """A participant's places of the sample order that one commit took: first, …, end − 1."""

    round: int
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that a swarm left behind."""

    total_rounds: int
    context: int  # tokens of a sample
    entries: Mapping[str, Sequence[Entry]]  # by member
    rounds: Sequence[Mapping[str, Any]]  # of `atoll rounds --json`
    run: Mapping[str, Any]  # of `atoll status --json`
    nodes: Sequence[Mapping[str, Any]]  # of `atoll nodes --json`
    data: Mapping[str, Any]  # of `atoll data --json`
    taken: Sequence[Places]  # of the commits in the coordinator's database
    # Names of nodes whose work is in a round's commit, by the round.
    contributors: Mapping[int, frozenset[str]]


def gather(swarm: RealSwarm) -> Evidence:
    """Asks, then ends the coordinator, and reads the commits in its database."""
    rounds = swarm.asked("rounds", "--limit", str(MOST_ROUNDS))
    run = swarm.asked("status")["run"]
    nodes, data = swarm.asked("nodes"), swarm.asked("data")
    swarm.coordinator.send(signal.SIGTERM)
    swarm.until(lambda: swarm.coordinator.has_ended, "the coordinator to end")
    store = Store.open(swarm.coordinator.home)
    try:
        closed = store.latest_rounds(MOST_ROUNDS)
    finally:
        store.close()
    spec = load_run_file(swarm.coordinator.home / "run.toml")
    names = {node["node_id"]: node["node_name"] for node in nodes}
    return Evidence(
        total_rounds=spec.run.rounds,
        context=spec.model.context,
        entries={member.name: swarm.logs.said_by(member.name) for member in swarm.members},
        rounds=rounds,
        run=run,
        nodes=nodes,
        data=data,
        taken=[places for one in closed for places in _taken(one, batch=spec.inner.batch)],
        contributors={
            one.commit.round: frozenset(
                names[contributor.node_id]
                for outcome in one.commit.slices
                for contributor in outcome.contributors
            )
            for one in closed
        },
    )


def _taken(closed: ClosedRound, *, batch: int) -> list[Places]:
    samples = committed_samples(closed.commit, batch=batch)
    return [
        Places(
            round=closed.commit.round,
            first=leased.first_sample,
            end=leased.first_sample + samples[leased.node_id],
        )
        for leased in closed.plan.assignments
        if samples.get(leased.node_id, 0) > 0
    ]


def broken(evidence: Evidence) -> list[str]:
    """Everything that does not hold, in sentences."""
    return [
        *broken_rounds(evidence),
        *broken_digests(evidence),
        *broken_ledger(evidence),
        *errors_in(evidence.entries),
    ]


def broken_rounds(evidence: Evidence) -> list[str]:
    """The run is finished, and every round has exactly one commit.

    A coordinator that is killed at the right moment tells of a commit only in its database; so
    there may be fewer lines than commits, and never more.
    """
    found = []
    if evidence.run["phase"] != "finished":
        found.append(f"the run is {evidence.run['phase']}, not finished")
    listed = sorted(closed["round"] for closed in evidence.rounds)
    if listed != list(range(1, evidence.total_rounds + 1)):
        found.append(f"the rounds of {evidence.total_rounds} that have a commit are {listed}")
    told: dict[tuple[int, int], int] = defaultdict(int)
    for entry in evidence.entries[COORDINATOR]:
        if entry.get("event") == "round committed":
            told[entry["round"], entry.get("incarnation", 0)] += 1
    found += [f"round {r} was committed {n} times" for (r, _), n in told.items() if n > 1]
    return found


def digests_of(evidence: Evidence) -> dict[tuple[int, int], dict[str, set[str]]]:
    """(round, incarnation) → digest → the nodes that told of it.

    The incarnation, where nodes log one, says how often the coordinator had taken rounds back:
    such a round is committed again, with other results.
    """
    told: dict[tuple[int, int], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, entries in evidence.entries.items():
        for entry in entries:
            if entry.get("event") == "applied":
                told[entry["round"], entry.get("incarnation", 0)][entry["digest"]].add(name)
    return told


def broken_digests(evidence: Evidence) -> list[str]:
    """Every node that tells of a round has the same digest, and the coordinator has that digest."""
    found = []
    told = digests_of(evidence)
    for (number, _), by_digest in sorted(told.items()):
        if len(by_digest) > 1:
            who = {digest: sorted(names) for digest, names in by_digest.items()}
            found.append(f"digests of round {number} differ: {who}")
    agreed = {closed["round"]: closed["outer_digest"] for closed in evidence.rounds}
    last = {number: max(i for r, i in told if r == number) for number, _ in told}
    for number, incarnation in last.items():
        digest = agreed.get(number, "")
        for told_digest in told[number, incarnation]:
            if not digest.startswith(told_digest):
                found.append(
                    f"round {number} is {digest[:12]} to the coordinator, not {told_digest}"
                )
    if not told:
        found.append("no node has told of a digest")
    if not evidence.run["digests_agree"]:
        found.append("the coordinator says that digests differ")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What became of the places that were ever leased, counted anew from the commits."""

    committed: int
    double_counted: int  # places that more than one commit took
    lost: int  # places that are in no commit, not leased, and will not be leased again


def samples_of(evidence: Evidence) -> Samples:
    """Lays the commits' places side by side, and beside them what `atoll data` says is open."""
    committed = double = end = 0
    for places in sorted(evidence.taken, key=lambda places: (places.first, places.end)):
        num_new = max(0, places.end - max(places.first, end))
        committed += num_new
        double += places.end - places.first - num_new
        end = max(end, places.end)
    data = evidence.data
    open_ = data["leased_samples"] + data["free_again_samples"]
    return Samples(
        committed=committed, double_counted=double, lost=data["frontier"] - committed - open_
    )


def broken_ledger(evidence: Evidence) -> list[str]:
    """No sample is lost or counted twice, and all who count tokens come to the same sum.

    Of text as it is, where every place in a sample counts.
    """
    found = []
    samples = samples_of(evidence)
    if samples.double_counted:
        found.append(f"{samples.double_counted} samples are in two commits")
    if samples.lost:
        found.append(f"{samples.lost} samples are lost")
    if evidence.data["committed_samples"] != samples.committed:
        found.append(
            f"the ledger holds {evidence.data['committed_samples']} committed samples, the commits "
            f"{samples.committed}"
        )
    sums = {
        "token clock": evidence.run["token_clock"],
        "rounds": sum(closed["tokens"] for closed in evidence.rounds),
        "nodes": sum(node["committed_tokens"] for node in evidence.nodes),
        "ledger": evidence.data["committed_samples"] * evidence.context,
    }
    if len(set(sums.values())) > 1:
        found.append(f"committed tokens differ: {sums}")
    return found


def errors_in(entries: Mapping[str, Iterable[Entry]]) -> list[str]:
    """Tracebacks and errors that no fault explains."""
    found = []
    for name, of_member in entries.items():
        for entry in of_member:
            text = str(entry.get("text", ""))
            is_bug = "Traceback" in text or "a bug in Atoll" in text or "exception" in entry
            is_error = entry.get("level") in ("error", "critical")
            if is_bug or (is_error and entry.get("event") not in EXPECTED_ERRORS):
                found.append(f"{name} says: {text or dict(entry)}")
    return found
