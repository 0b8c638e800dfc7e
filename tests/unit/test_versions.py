"""What this release reads of its own and of the one before: messages, and the coordinator's database."""

import json
import os
import re
import sqlite3
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from coordinator.database import DATABASE_NAME
from coordinator.invite_rows import Invite
from coordinator.store import Store
from coordinator.swarm.events import Ruled
from coordinator.swarm.transition import initial_state, step
from node.first_look import other_software
from node.installed import software_of
from protocol.errors import ProtocolMismatchError
from protocol.run.models import TransformersModel
from protocol.run.run_files import run_from_json
from protocol.run.run_spec import LATER_KEYS, DataSection, RunSpec
from protocol.terminal.status_words import functions_in_words, releases_in_words, software_in_words
from protocol.trust.rulings import RUN_OWNER, RulingKind
from protocol.v1 import session_pb2, status_pb2
from protocol.wire import versions
from protocol.wire.rounds import OWN_LOOP, Digest, NodeId
from protocol.wire.versions import (
    DATABASE,
    OLDEST_WIRE,
    OURS,
    WIRE,
    code_digest,
    refuse_foreign_wire,
    release,
)
from tests.unit.golden.golden_file import golden_bytes, matches_golden
from tests.unit.swarm_scene import PLAIN_RULES as RULES

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parent.parent.parent
RUN = Digest(b"\x99" * 32)
NODE = NodeId("a" * 32)
TOKENS = DataSection(source="tokens", private=True)
BUILT = TransformersModel(source="transformers", context=8)

ATTACH = session_pb2.AttachRequest(
    node_name="attic",
    address=session_pb2.PeerAddress(public_key=b"k" * 32, multiaddrs=["/ip4/192.0.2.1/tcp/1"]),
    run_digest=RUN,
    layout=session_pb2.LayoutSummary(digest=b"l" * 32, fragment_elements=[1024]),
    device="cpu",
    num_ranks=1,
    version="0.1.0",
    codecs=["int4/1", "int4/1"],
)
ATTACHED = session_pb2.AttachResponse(
    session_id=3, lease_seconds=15.0, heartbeat_seconds=3.0, committed_round=7, node_name="attic"
)


@pytest.mark.parametrize(
    ("name", "message"), [("attach-wire-1", ATTACH), ("attached-wire-1", ATTACHED)]
)
def test_messages_of_the_version_before_are_read_and_understood(
    name: str, message: Message
) -> None:
    assert matches_golden(name, message.SerializeToString(deterministic=True))
    read = type(message).FromString(golden_bytes(name))
    assert read == message
    refuse_foreign_wire(read.wire_version, whose="the node", here="the coordinator")  # type: ignore[attr-defined]


def test_each_takes_its_own_version_and_the_one_before_and_the_nodes_owner_reads_who_is_older(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = ("the node", "the coordinator")
    for told in (0, OLDEST_WIRE, WIRE):
        refuse_foreign_wire(told, whose=both[0], here=both[1])
    assert WIRE - OLDEST_WIRE <= 1
    monkeypatch.setattr(versions, "OLDEST_WIRE", WIRE)
    for whose, here in (both, both[::-1]):
        for told, older in ((WIRE + 1, here), (WIRE - 1, whose)):
            with pytest.raises(ProtocolMismatchError, match=f"^{whose} .*, and {here} ") as refused:
                refuse_foreign_wire(told, whose=whose, here=here)
            asks = refused.value.next_step.startswith("ask the run owner")
            assert asks == (older == "the coordinator"), refused.value.next_step


def database_in(folder: Path) -> None:
    """A run that was paused, and has an invite and a member."""
    store = Store.open(folder)
    state = initial_state(RULES, RUN)
    paused = Ruled(kind=RulingKind.PAUSED, by=RUN_OWNER, unix_seconds=1.0, reason="the move")
    after = step(state, paused, now=1.0).state
    store.save(state, after, now=1.0)
    store.invites.add(
        Invite(
            invite_id="inv", secret_hash=b"h" * 32, max_uses=2, expires_utc_seconds=60.0, host="h"
        )
    )
    store.invites.redeem(
        "inv", b"h" * 32, node_id=NODE, node_name="attic", public_key=b"k" * 32, now=1.0
    )
    store.close()


@pytest.mark.parametrize("version", sorted(DATABASE.reads))
def test_databases_of_every_version_that_is_read_open_whole(tmp_path: Path, version: int) -> None:
    golden = GOLDEN / f"database-{version}.sql"
    if os.environ.get("ATOLL_REWRITE_GOLDEN") == "1" and version == DATABASE.writes:
        made = tmp_path / "made"
        made.mkdir()
        database_in(made)
        connection = sqlite3.connect(made / DATABASE_NAME)
        golden.write_text("\n".join(connection.iterdump()) + "\n")
        connection.close()
    connection = sqlite3.connect(tmp_path / DATABASE_NAME)
    connection.executescript(golden.read_text() + f"PRAGMA user_version = {version};")
    connection.close()
    store = Store.open(tmp_path)
    try:
        store.check()
        state = store.load(RULES, RUN)
        assert state.paused is not None and state.paused.reason == "the move"
        member = store.invites.member(NODE)
        assert member is not None and member.node_name == "attic"
    finally:
        store.close()


def test_files_of_other_versions_are_named_with_the_release_that_opens_them() -> None:
    assert DATABASE.writes in DATABASE.reads and DATABASE.reads <= set(DATABASE.releases)
    assert "opens it, 0.1.0," in DATABASE.next_step(DATABASE.writes)
    assert "or a later one" in DATABASE.next_step(DATABASE.writes + 1)
    assert "between releases" in DATABASE.next_step(1)
    told = [DATABASE.next_step(version) for version in (1, DATABASE.writes, DATABASE.writes + 1)]
    assert "pip" not in "".join(told), "the name may be somebody else's where packages are found"


def test_a_status_says_who_runs_which_release_where_they_differ() -> None:
    def node(name: str, version: str) -> status_pb2.NodeStatus:
        return status_pb2.NodeStatus(
            node_name=name, version=version, state=status_pb2.NODE_STATE_READY
        )

    assert releases_in_words([node("a", "0.1.0"), node("b", "0.1.0")]) == ""
    mixed = [node("a", "0.1.0"), node("b", "0.2.0"), node("c", "0.1.0")]
    assert releases_in_words(mixed) == "0.1.0: a, c; 0.2.0: b"


def test_a_status_says_whose_torch_and_python_compute_where_they_differ() -> None:
    def node(name: str, software: str, state: Any = status_pb2.NODE_STATE_READY) -> Any:
        found = status_pb2.NodeStatus(node_name=name, state=state)
        found.heartbeat.software = software
        return found

    new, old = "Python 3.13, torch 2.14", "Python 3.13, torch 2.13"
    gone = node("d", old, status_pb2.NODE_STATE_LEFT)
    same = [node("a", new), node("b", new), node("helper", ""), gone]
    assert software_in_words(same) == ""
    told = software_in_words([*same, node("c", old)])
    assert told == f"{old}: c; {new}: a, b: what nodes compute of the same samples may differ"

    loops = [node(name, f"a loop with the frozen values {name}") for name in ("e", "f")]
    for loop in loops:
        loop.device = OWN_LOOP
    assert software_in_words([*same, loops[0]]) == "", "a loop tells other things than ranks"
    assert "values e: e; a loop with the frozen values f: f: what" in software_in_words(loops)

    assert functions_in_words(loops) == ""
    for loop in loops:
        loop.heartbeat.evaluates_by = "0a1b2c3d"
    assert functions_in_words([*same, *loops]) == ""
    loops[1].heartbeat.evaluates_by = "4e5f6a7b"
    told = (
        "loops evaluate by other functions, one at a time for the curve: 0a1b2c3d: e; 4e5f6a7b: f"
    )
    assert functions_in_words([*same, *loops]) == told

    def joining(ours: str, *members: Any) -> str:
        return " ".join(other_software(ours, status_pb2.GetStatusResponse(nodes=members)))

    assert joining(new, *same) == joining(old, *same, node("c", old)) == joining(old) == ""
    assert joining(old, *loops) == ""
    assert f"{old} here, and {new} on a: what is computed" in joining(old, *same)


@pytest.mark.parametrize(
    ("spec", "programs"),
    [
        (RunSpec(), ["Python 3.12.4", "torch 2.13"]),  # whose own library is the text
        (RunSpec(data=TOKENS), ["Python 3.12", "torch 2.13"]),
        (RunSpec(model=BUILT, data=TOKENS), ["Python 3.12", "torch 2.13", "transformers 5.23"]),
    ],
)
def test_a_node_tells_the_versions_that_decide_what_it_computes(
    spec: RunSpec, programs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
    monkeypatch.setattr("node.installed.metadata.version", there.__getitem__)
    monkeypatch.setattr("node.installed.platform.python_version", lambda: "3.12.4")
    assert software_of(spec) == ", ".join(programs)


# Runs of the release before: a digest that changes ends each of them at an upgrade

KEYS = """
data: across_documents arguments digest function held_out most_weight paths private source tokenizer
deadlines: adapt apply commit contribute floor lease train
description:
evaluation: every_rounds go_back samples
exchange: blend downlink error_feedback fragments overlap reducer_error residual_decay uplink
inner: batch beta1 beta2 clip decay_fraction final_fraction learning_rate muon_learning_rate
    muon_momentum optimizer round_tokens scaling schedule sparse steps total_tokens warmup_tokens
    weight_decay
lora: alpha rank targets
model: attention_bias context ffn_size head_size hidden_size logit_softcap mlp_bias norm_epsilon
    num_heads num_kv_heads num_layers qk_norm rope_scaling rope_theta sliding_layers sliding_window
    source tie_embeddings vocab_size
outer: audit learning_rate merge momentum optimizer scaling screening
run: min_nodes name rounds seed
"""


def test_keys_of_run_files_that_came_later_are_left_out_where_they_say_nothing() -> None:
    """A new key goes into LATER_KEYS, and not into KEYS."""
    known: dict[str, list[str]] = {}
    for line in KEYS.replace("\n    ", " ").strip().splitlines():
        table, _, keys = line.partition(":")
        known[table] = keys.split()
    tables = json.loads(RunSpec().canonical_json())
    assert {table: sorted(values or ()) for table, values in tables.items()} == known
    assert run_from_json(RunSpec().canonical_json()) == RunSpec()
    for table, key in LATER_KEYS:
        assert key not in known[table]


def test_a_later_key_that_says_something_is_part_of_the_run() -> None:
    spec = RunSpec()
    told = spec.model_copy(
        update={"evaluation": spec.evaluation.model_copy(update={"prompts": ("Once",)})}
    )
    assert told.digest() != spec.digest() and run_from_json(told.canonical_json()) == told


def test_two_states_of_the_code_between_releases_are_told_apart(tmp_path: Path) -> None:
    for room in OURS:
        (tmp_path / room / "deeper").mkdir(parents=True)
        (tmp_path / room / "deeper" / "one.py").write_text(f"{room}\n")
    seen = {code_digest(tmp_path)}
    (tmp_path / "node" / "deeper" / "one.py").write_text("node, mended\n")
    seen.add(code_digest(tmp_path))
    (tmp_path / "node" / "deeper" / "one.py").rename(tmp_path / "node" / "one.py")
    seen.add(code_digest(tmp_path))
    assert len(seen) == 3 and all(re.fullmatch("[0-9a-f]{8}", told) for told in seen)
    (tmp_path / "node" / "notes.txt").write_text("no code")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").touch()
    assert code_digest(tmp_path) in seen, "only what runs counts"
    assert code_digest(tmp_path / "tests") == "", "as in an archive"


def test_sources_that_nobody_installed_have_no_number_and_run_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = code_digest(ROOT)
    assert release() == f"{metadata.version('atoll')}+{code}"

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    release.cache_clear()
    assert release() == f"0+{code}"
    release.cache_clear()
    rooms = [
        file for room in ("coordinator", "node", "protocol") for file in (ROOT / room).rglob("*.py")
    ]
    asking = [file.name for file in rooms if 'version("atoll")' in file.read_text()]
    assert asking == ["versions.py"], "who asks by itself ends as a bug in Atoll"
