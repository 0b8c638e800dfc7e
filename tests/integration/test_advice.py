"""Advice for a run over slow links, asked for, taken and followed by real processes in a network lab."""

import json
from pathlib import Path
from typing import Any

import pytest

from lab.network.lab import NetworkLab
from lab.network.links import Link
from tests.integration.lab_swarm import COORDINATOR, asked, started, swarm_in, until
from tests.integration.typed_commands import atoll, done
from tests.tiny_runs import tiny_text

NODES = ("one", "other")
MBIT = 8.0
LINK = Link(up_bits_per_second=MBIT * 1e6, down_bits_per_second=MBIT * 1e6, delay_seconds=0.02)
RUN = tiny_text(
    run={"name": "advice", "rounds": 2000, "min_nodes": 2},
    model={
        "hidden_size": 128,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 352,
        "context": 32,
    },
    inner={"steps": 2, "batch": 4},
    exchange={"uplink": "fp32", "downlink": "fp32"},
    evaluation={"every_rounds": 1000, "samples": 16},
)

pytestmark = [pytest.mark.usefixtures("may_make_network_labs"), pytest.mark.nightly]


def test_who_takes_the_advice_sends_fewer_bytes_for_a_step_and_trains_as_many(
    tmp_path: Path,
) -> None:
    with (
        NetworkLab(dict.fromkeys((COORDINATOR, *NODES), LINK)) as lab,
        swarm_in(lab, tmp_path / "swarm", RUN) as swarm,
    ):
        started(lab, swarm, NODES)

        def run() -> dict[str, Any]:
            return asked(lab, swarm, "status")["run"]

        def typed(*command: str) -> str:
            with lab.inside(COORDINATOR):
                return done(atoll(*command, "--dir", swarm.home))

        until(lambda: run()["committed_round"] >= 8)
        advice = json.loads(typed("run", "advise", "--json", "--rtt", "40ms"))
        assert 0.4 * MBIT < advice["up_bits_per_second"] / 1e6 < 1.1 * MBIT
        assert advice["better"]["expected_utilisation"] > 2 * advice["now"]["expected_utilisation"]
        assert advice["amend"]
        text = typed("run", "advise", "--rtt", "40ms")
        assert "to change it from the next round on: atoll run amend" in text
        before = run()
        typed("run", "amend", *advice["amend"])
        with lab.inside(COORDINATOR):
            soon = atoll("run", "advise", "--dir", swarm.home)
        assert soon.code == 75 and "by the rules in force" in soon.err
        first = before["committed_round"] + 2

        def by_new_rules() -> list[dict[str, Any]]:
            return [each for each in asked(lab, swarm, "rounds") if each["round"] > first]

        until(lambda: len(by_new_rules()) >= 4)
        assert run()["digests_agree"]
        steps = advice["better"]["steps"]
        assert all(node["inner_steps"] in (0, steps) for node in asked(lab, swarm, "nodes"))
        left = (run()["total_rounds"] - first) * steps
        assert left == pytest.approx((2000 - first) * 2, rel=0.05)
        old = [each for each in asked(lab, swarm, "rounds") if each["round"] < first - 1]
        bytes_of_step = sent_of(old) / 2, sent_of(by_new_rules()) / steps
        assert bytes_of_step[1] < bytes_of_step[0] / 4
        again = json.loads(typed("run", "advise", "--json", "--rtt", "40ms"))
        assert again["now"]["steps"] == steps
        assert again["utilisation"] > advice["utilisation"]


def sent_of(rounds: list[dict[str, Any]]) -> float:
    """Bytes that a round's nodes sent, in the mean."""
    assert rounds
    return sum(count["sent_bytes"] for each in rounds for count in each["wire"]["counts"]) / len(
        rounds
    )
