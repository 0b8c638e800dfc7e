"""Writes what a coordinator's folder holds after a long run, without going through all of its rounds.

The latest rounds are played through the real core and the real store, and before them stand the rows that
the store would have kept: figures thinned out by its own rule, a commit for each round, held-out losses,
texts, times of rounds and news. What is in them is made up.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.coordinator.database import IN_A_SAVE, attached, events_of
from benchmarks.coordinator.nodes import CORPUS, state_at
from coordinator import round_rows
from coordinator.app import TIMES_FILE
from coordinator.config import Home
from coordinator.dashboard.news_file import KEPT, NewsFile
from coordinator.dashboard.timeline import MOST_NODES, RoundTimes, Stages, TimesFile
from coordinator.database import NEWS_FILE, Database, put
from coordinator.journal import News
from coordinator.round_rows import wire_ledger
from coordinator.rules import rules_of
from coordinator.store import Store
from coordinator.swarm.state import HeldOut, SwarmState, Written
from coordinator.swarm.transition import initial_state, step
from protocol.trust.signing import CommitSigner
from protocol.v1 import status_pb2 as pb
from protocol.wire.rounds import NodeId

EVALUATED_EVERY = 10
"""Rounds; as runs do unless they say otherwise."""

TEXTS, TEXT_CHARACTERS = 64, 2000

KEPT_TIMES = 200
"""Rounds whose times are written: more than the page reads at a start."""


def write_long_run(
    home: Home,
    names: Sequence[tuple[NodeId, str]],
    *,
    num_rounds: int,
    num_played: int,
    round_seconds: float,
) -> None:
    """Fills the folder's database, which no coordinator may have open, with the rounds up to `num_rounds`."""
    chance = random.Random(7)
    first_played = num_rounds - num_played
    rules = rules_of(home.run)
    signer = CommitSigner.of_key(home.issuer.key_pem)
    store = Store.open(home.directory, sign=signer.signature_of)
    try:
        store.keep_or_compare(home.run, home.directory / "run.toml")
        empty = store.load(rules, home.run.digest())
        old = replace(
            initial_state(
                replace(rules, lease_seconds=1e9), home.run.digest()
            ),  # nobody beats here
            committed_round=first_played,
            outer_digest=state_at(first_played),
            token_clock=first_played * 1000 * len(names),
            held_out=tuple(
                HeldOut(round=number, loss=_loss(number) + 0.1, tokens=4096)
                for number in range(0, first_played, EVALUATED_EVERY)
            ),
            written=tuple(
                Written(
                    round=first_played - EVALUATED_EVERY * (TEXTS - place),
                    node_id=names[0][0],
                    texts=tuple("and so on " * (TEXT_CHARACTERS // 10) for _ in range(2)),
                )
                for place in range(TEXTS)
                if first_played >= EVALUATED_EVERY * TEXTS
            ),
            wire={"result": (first_played * 10**6, first_played * 10**6)},
            all_reduce_bytes=first_played * 10**9,
        )
        store.save(empty, old, now=first_played * round_seconds)
    finally:
        store.close()
    _write_rows(home, num_rounds=first_played, num_nodes=len(names), chance=chance)
    store = Store.open(home.directory, sign=signer.signature_of)
    try:
        _play(store, old, home, names, num_rounds=num_rounds, round_seconds=round_seconds)
    finally:
        store.close()
    times = TimesFile(home.directory / TIMES_FILE)
    for number in range(max(1, num_rounds - KEPT_TIMES), num_rounds + 1):
        times.add(_times(number, names, round_seconds, chance))
    news = NewsFile(home.directory / NEWS_FILE)
    for place in range(KEPT):
        facts = {"node": names[place % len(names)][1], "device": "NVIDIA H100 80GB HBM3"}
        news.add([News(level="info", what="node attached", facts=facts)], unix_seconds=1e9 + place)


def _loss(number: int) -> float:
    return 1.8 + 6 / math.sqrt(math.sqrt(number + 1))


def _write_rows(home: Home, *, num_rounds: int, num_nodes: int, chance: random.Random) -> None:
    database = Database.open(home.directory)
    try:
        with database.writing() as connection:
            put(
                connection,
                "commits",
                (
                    (number, 0, state_at(number - 1), state_at(number), bytes(32), bytes(64))
                    for number in range(1, num_rounds + 1)
                ),
            )
            put(
                connection,
                "figures",
                (
                    (number, _figures(number, num_nodes, chance).SerializeToString())
                    for number in range(1, num_rounds + 1)
                ),
            )
            # In the order in which the store does, at every tenth round.
            round_rows.thin_out(connection, num_rounds - num_rounds % round_rows.THINNED_BY)
    finally:
        database.close()


def _figures(number: int, num_nodes: int, chance: random.Random) -> pb.RoundSummary:
    sent = 10**6 * num_nodes
    return pb.RoundSummary(
        round=number,
        num_participants=num_nodes,
        num_slices=num_nodes,
        num_committed_slices=num_nodes,
        num_contributors=num_nodes,
        tokens=1000 * num_nodes,
        seconds=10 * (1 + 0.1 * chance.random()),
        loss=_loss(number) + 0.05 * chance.random(),
        outer_digest=state_at(number),
        reason="all slices are committed",
        wire=wire_ledger({"contribution": (sent, sent), "result": (sent, sent)}, 10**9),
    )


def _play(
    store: Store,
    state: SwarmState,
    home: Home,
    names: Sequence[tuple[NodeId, str]],
    *,
    num_rounds: int,
    round_seconds: float,
) -> None:
    """The rounds after the state's, of all nodes together, through the core and into the store."""
    states, now = [state], state.committed_round * round_seconds
    for node_id, name in names:
        comes = replace(
            attached(node_id),
            node_name=name,
            run_digest=home.run.digest(),
            layout=state.rules.layout,
            codecs=state.rules.codecs,
            corpus=replace(attached(node_id).corpus, digest=CORPUS),
            outer_round=state.committed_round,
            outer_digest=state_at(state.committed_round),
            process_id=1,
        )
        states.append(step(states[-1], comes, now).state)
    node_ids = [node_id for node_id, _ in names]
    while states[-1].committed_round < num_rounds:
        number, now = states[-1].committed_round + 1, now + round_seconds
        for told in events_of(states[-1], node_ids, state_at):
            states.append(step(states[-1], told, now).state)
        assert states[-1].committed_round == number, "the round must have committed"
        if len(states) > IN_A_SAVE or number == num_rounds:
            store.save(*states, now=now)
            del states[:-1]


def _times(
    number: int, names: Sequence[tuple[NodeId, str]], seconds: float, chance: random.Random
) -> RoundTimes:
    def at(share: float) -> float:
        return (number - 1 + share + 0.1 * chance.random()) * seconds

    return RoundTimes(
        number=number,
        opened=(number - 1) * seconds,
        heard=(number - 1) * seconds,
        committed=at(0.8),
        ended=number * seconds,
        reason="all slices are committed",
        nodes={
            node_id: Stages(name=name, trained=at(0.5), held=at(0.7), applied=at(0.85))
            for node_id, name in names[:MOST_NODES]
        },
    )
