"""How large a coordinator's database becomes: many rounds through the real core and the real store.

    python -m benchmarks.coordinator.database --rounds 100000 --nodes 8

Every round is played as nodes would: plan, reports, commit, agreement, and a held-out loss every tenth.
The database is on the disk, with its log of writes. Prints a line of JSON at each power of ten and at
the end: the file's bytes, bytes for each round, and what it takes to read it all again at a start.
"""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.measurement import parser_of
from coordinator.store import Store
from coordinator.swarm.events import Attached, Event, Reported, ReportedTogether
from coordinator.swarm.state import Rules, SwarmState
from coordinator.swarm.transition import step
from protocol.trust.signing import CommitSigner
from protocol.wire.messages import Applied, Evaluated, Held, Reduced, Trained
from protocol.wire.rounds import (
    CONTRIBUTION_DIGEST_BYTES,
    ContributionDigest,
    Contributor,
    CorpusSummary,
    Digest,
    LayoutSummary,
    NodeId,
    PeerAddress,
)

BATCH, CONTEXT, INNER_STEPS = 4, 256, 10
NUM_ELEMENTS = 1 << 26
"""Of the model that is pretended to be trained: enough for as many slices as plans have at most."""

IN_A_SAVE = 200
"""Steps that share a commit to the disk."""

_DIGEST = Digest(bytes(32))
_LAYOUT = LayoutSummary(digest=_DIGEST, fragment_elements=(NUM_ELEMENTS,))
_CODECS = ("int4/1", "int4/1")


def main() -> None:
    """Fills a database in a temporary folder."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--nodes", type=int, default=8)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), num_rounds=asked.rounds, num_nodes=asked.nodes)


def fill(folder: Path, *, num_rounds: int, num_nodes: int) -> int:
    """Plays so many rounds into a folder's database; returns its bytes."""
    rules = Rules(
        total_rounds=num_rounds + 1,
        min_nodes=num_nodes,
        inner_steps=INNER_STEPS,
        batch=BATCH,
        context=CONTEXT,
        train_seconds=600,
        contribute_seconds=660,
        commit_seconds=720,
        apply_seconds=60,
        lease_seconds=1e9,
        evaluate_every_rounds=10,
        slice_elements=1 << 18,
        layout=_LAYOUT,
        codecs=_CODECS,
    )
    node_ids = [NodeId(f"{number:032x}") for number in range(num_nodes)]
    signer = CommitSigner(Ed25519PrivateKey.generate())
    store = Store.open(folder, sign=signer.signature_of)
    state = store.load(rules, _DIGEST)
    states = [state]
    for node_id in node_ids:
        states.append(step(states[-1], attached(node_id), 1.0).state)
    milestone = 10
    for number in range(1, num_rounds + 1):
        now = float(number)
        for event in events_of(states[-1], node_ids):
            states.append(step(states[-1], event, now).state)
        assert states[-1].committed_round == number, "the round must have committed"
        if len(states) > IN_A_SAVE or number in (milestone, num_rounds):
            store.save(*states, now=now)
            del states[:-1]
        if number in (milestone, num_rounds):
            milestone *= 10 if number == milestone else 1
            report(folder, rules, number, store)
    store.close()
    return (folder / "atoll.db").stat().st_size


def state_of(number: int) -> Digest:
    """The digest of the outer state after a round."""
    return digest_of(number, -1)


def events_of(
    state: SwarmState,
    node_ids: Sequence[NodeId],
    state_after: Callable[[int], Digest] = state_of,
) -> list[Event]:
    """All that nodes tell of the round in flight, and of the evaluation that was asked for."""
    current, context = state.open_round, state.rules.context
    assert current is not None
    number = current.number
    contributors = tuple(
        Contributor(node_id=a.node_id, samples=a.num_samples, tokens=a.num_samples * context)
        for a in current.assignments
    )
    results = {p.slice.index: digest_of(number, p.slice.index) for p in current.slices}
    reduced = [
        Reported(
            node_id=progress.slice.reducer_id,
            round=number,
            report=Reduced(
                slice_index=progress.slice.index,
                digest=results[progress.slice.index],
                contributors=contributors,
                contributions=tuple(
                    contribution_of(number, progress.slice.index, each.node_id)
                    for each in contributors
                ),
            ),
        )
        for progress in current.slices
    ]
    held = [
        Reported(node_id=node_id, round=number, report=Held(slice_index=index, digest=digest))
        for node_id in node_ids
        for index, digest in results.items()
    ]
    trained: list[Event] = [
        Reported(
            node_id=each.node_id,
            round=number,
            report=Trained(
                inner_steps=INNER_STEPS,
                samples=each.samples,
                tokens=each.tokens,
                loss=2.5,
                seconds=1.25,
            ),
        )
        for each in contributors
    ]
    asked = state.evaluating
    if asked is not None:
        losses: list[Event] = [
            Reported(
                node_id=evaluator,
                round=asked.round,
                report=Evaluated(held_out_loss=2.5, tokens=4096),
            )
            for evaluator in asked.node_ids
        ]
        trained = [*losses, *trained]
    applied = [
        Reported(
            node_id=node_id,
            round=number,
            report=Applied(
                outer_digest=state_after(number),
                wire={"contribution": (number * 1000, number * 1000)},
            ),
        )
        for node_id in node_ids
    ]
    return [*trained, ReportedTogether(reports=(*reduced, *held)), *applied]


def digest_of(number: int, index: int) -> Digest:
    """Bytes that no compression makes smaller, as digests are."""
    return Digest(hashlib.blake2b(f"{number}/{index}".encode(), digest_size=32).digest())


def contribution_of(number: int, index: int, node_id: NodeId) -> ContributionDigest:
    """Likewise, of what a node contributed to a slice."""
    name = f"{number}/{index}/{node_id}".encode()
    digest = hashlib.blake2b(name, digest_size=CONTRIBUTION_DIGEST_BYTES).digest()
    return ContributionDigest(digest)


def attached(node_id: NodeId) -> Attached:
    """A node that begins with the initial state."""
    return Attached(
        node_id=node_id,
        node_name=f"node-{node_id[-4:]}",
        address=PeerAddress(public_key=bytes(32), multiaddrs=("/ip4/192.0.2.1/tcp/4001",)),
        device="NVIDIA H100 80GB HBM3",
        num_ranks=8,
        version="1",
        run_digest=_DIGEST,
        layout=_LAYOUT,
        codecs=_CODECS,
        corpus=CorpusSummary(digest=_DIGEST, num_samples=10**9, num_bytes=10**12),
        outer_round=0,
        outer_digest=_DIGEST,
    )


def report(folder: Path, rules: Rules, number: int, store: Store) -> None:
    """Prints what the database has become."""
    num_bytes = sum(path.stat().st_size for path in folder.glob("atoll.db*"))
    began = time.perf_counter()
    store.check()
    loaded = store.load(rules, _DIGEST)
    line = {
        "rounds": number,
        "bytes": num_bytes,
        "bytes_per_round": round(num_bytes / number, 1),
        "whole_rounds": len(store.latest_rounds(number)),
        "figures": len(store.latest_figures(number)),
        "held_out_losses": len(loaded.held_out),
        "seconds_to_read_all": round(time.perf_counter() - began, 2),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
