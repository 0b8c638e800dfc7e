"""A run goes back by the command, with real processes: digests agree, and an export is what it was."""

import json
import os
import re
import signal

import pytest

from tests.integration.typed_commands import Swarm, atoll, done, refused, until
from tests.tiny_runs import tiny_text

RUN = tiny_text(
    run={"name": "regretted", "rounds": 400, "min_nodes": 2},
    inner={"steps": 1_000_000},
    deadlines={"train": 1, "contribute": 20, "commit": 30},
    evaluation={"every_rounds": 500},
)


@pytest.mark.nightly
def test_a_run_goes_back_and_on_and_what_was_exported_before_is_exported_again(
    swarm: Swarm,
) -> None:
    def committed(round: int) -> None:
        until(lambda: swarm.status().run.committed_round >= round, f"round {round}")

    invite = swarm.invite("--uses", "2")
    for name in ("a", "b"):
        swarm.join(name, invite)
        settings = swarm.folder / name / "node.toml"
        text = settings.read_text() if settings.is_file() else ""
        text = text.replace("keep_snapshots = 2", "").replace("keep_every = 8", "")
        settings.write_text(f"{text}\nkeep_snapshots = 100\nkeep_every = 1\n")
    a, b = (swarm.start_node(name) for name in ("a", "b"))
    committed(4)
    before, again = swarm.folder / "before", swarm.folder / "again"
    done(atoll("export", before, "--round", "3", "--dir", swarm.folder / "a"))
    refused(
        atoll("export", swarm.folder / "no", "--round", "77", "--dir", swarm.folder / "a"),
        66,
        "no snapshot of round 77",
        "take a round that is there",
    )
    refused(atoll("run", "rollback", "300", "--dir", swarm.home), 64, "round 300 is not behind")
    committed(5)
    said = done(
        atoll("run", "rollback", "3", "--reason", "the loss has jumped", "--dir", swarm.home)
    )
    assert "the run went back to the state after round 3; rounds 4 to" in said
    assert "to which a, b contributed: the loss has jumped" in said
    for log in (a, b):
        log.says("the run goes back")
        log.says("went back")
    committed(5)
    run = swarm.status().run
    assert run.digests_agree
    assert run.went_back[0].startswith("the run went back to the state after round")
    assert run.rounds_in_reach
    rounds = {
        one["round"]: one
        for one in json.loads(done(atoll("rounds", "--json", "--dir", swarm.home)))
    }
    assert [rounds[number]["incarnation"] for number in (3, 4, 5)] == [0, 1, 1]
    done(atoll("export", again, "--round", "3", "--dir", swarm.folder / "b"))
    weights = "model.safetensors"
    assert (before / weights).read_bytes() == (again / weights).read_bytes()
    (told,) = [
        ruling
        for ruling in json.loads(done(atoll("audit", "--json", "--dir", swarm.home)))
        if ruling["kind"] == "rolled_back"
    ]
    assert (told["from_round"], told["contributors"]) == (4, ["a", "b"])
    assert told["outer_digest"] == rounds[3]["outer_digest"]


@pytest.mark.nightly
def test_a_round_that_one_node_keeps_is_gone_back_to_when_the_run_owner_believes_it(
    swarm: Swarm,
) -> None:
    def committed(round: int, *, incarnation: int) -> None:
        def is_so() -> bool:
            rounds = json.loads(done(atoll("rounds", "--json", "--dir", swarm.home)))
            return any(r["round"] >= round and r["incarnation"] == incarnation for r in rounds)

        until(is_so, f"round {round} of incarnation {incarnation}")

    invite = swarm.invite("--uses", "2")
    for name, kept in (("keeps", "keep_snapshots = 100\nkeep_every = 1"), ("forgets", "")):
        swarm.join(name, invite)
        settings = swarm.folder / name / "node.toml"
        text = settings.read_text() if settings.is_file() else ""
        text = text.replace("keep_snapshots = 2", "").replace("keep_every = 8", "")
        settings.write_text(f"{text}\n{kept or 'keep_snapshots = 0'}\n")
    for name in ("keeps", "forgets"):
        swarm.start_node(name)
    committed(6, incarnation=0)
    refused(
        atoll("run", "rollback", "2", "--dir", swarm.home),
        64,
        "keeps alone says that the run can go back to round 2",
        "'atoll run rollback 2 --believe keeps' if you know that node",
    )
    refused(
        atoll("run", "rollback", "2", "--believe", "forgets", "--dir", swarm.home),
        64,
        "forgets is not here, or does not say that it can go back to round 2",
    )
    said = done(atoll("run", "rollback", "2", "--believe", "keeps", "--dir", swarm.home))
    assert "the state after round 2, which keeps alone said to keep; rounds 3 to" in said
    committed(4, incarnation=1)
    said = done(atoll("run", "rollback", "0", "--dir", swarm.home))
    assert "the run went back to the state after round 0; rounds 1 to" in said
    committed(2, incarnation=2)
    assert swarm.status().run.digests_agree


@pytest.mark.nightly
def test_where_one_disk_failed_under_all_nodes_the_status_names_the_way_back_and_it_leads_on(
    swarm: Swarm,
) -> None:
    """All come back more than a round behind, and nobody could go on without the run owner."""
    invite = swarm.invite("--uses", "2")
    names = ("a", "b")
    for name in names:
        swarm.join(name, invite)
        settings = swarm.folder / name / "node.toml"
        text = settings.read_text() if settings.is_file() else ""
        text = text.replace("keep_snapshots = 2", "").replace("keep_every = 8", "")
        settings.write_text(f"{text}\nkeep_snapshots = 100\nkeep_every = 1\n")
    nodes = [swarm.start_node(name) for name in names]
    until(lambda: swarm.status().run.committed_round >= 6, "round 6")
    for node in nodes:
        for process_id in node.processes():
            signal.pidfd_send_signal(os.pidfd_open(process_id), signal.SIGKILL)
        node.process.wait()
    for name in names:
        for file in (swarm.folder / name / "snapshots").iterdir():  # results are there too
            number = re.search(r"\d+", file.name)
            if number is not None and int(number[0]) > 3:
                file.unlink()
    for name in names:
        swarm.start_node(name)

    def way_back() -> "re.Match[str] | None":
        return re.search(r"'atoll (run rollback 3)'$", swarm.status().run.reason)

    until(lambda: way_back() is not None, "the way back", seconds=120)
    assert "nobody here holds the state after round" in swarm.status().run.reason
    typed = way_back()
    assert typed is not None
    done(atoll(*typed[1].split(), "--dir", swarm.home))
    until(lambda: swarm.status().run.committed_round >= 5, "rounds after it")
    run = swarm.status().run
    assert run.digests_agree and "after round 3" in run.went_back[0]
