"""Grafana's dashboard and the alerts ask for metrics and labels that there are; panels do not overlap."""

import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.dashboard.run_metrics import RUN_METRICS
from protocol.terminal import cli
from protocol.web.metrics import NODE_METRICS
from tests.unit.test_docs import check_command_line

ROOT = Path(cli.__file__).parents[2]
BOARD: dict[str, Any] = json.loads((ROOT / "docs" / "grafana.json").read_text())
ALERTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "docs" / "alerts.yaml").read_text())[
    "groups"
][0]["rules"]
METRICS = {metric.name: metric for metric in (*RUN_METRICS, *NODE_METRICS)}
OF_PROMETHEUS = {"job"}


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = BOARD["panels"]
    assert len(found) > 10
    return found


def queries() -> list[str]:
    asked = [target["expr"] for panel in panels() for target in panel["targets"]]
    variables = [v["definition"] for v in BOARD["templating"]["list"] if v["type"] == "query"]
    return [*asked, *variables, *alarms()]


def alarms() -> list[str]:
    return [alert["expr"] for alert in ALERTS]


def test_every_query_asks_for_metrics_and_labels_that_there_are() -> None:
    for query in queries():
        selected = re.findall(r"(atoll_\w+)(?:\{([^}]*)\})?", query)
        assert selected, query
        for name, matchers in selected:
            labels = set(re.findall(r"(\w+)\s*=~?", matchers))
            assert labels <= {*METRICS[name].labels, *OF_PROMETHEUS}, query


def test_a_legend_names_labels_that_its_series_have() -> None:
    for panel in panels():
        for target in panel["targets"]:
            (name, *_) = re.findall(r"atoll_\w+", target["expr"])
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= {
                *METRICS[name].labels
            }, panel["title"]


def test_counters_are_asked_for_their_growth_where_that_is_drawn_over_time() -> None:
    for panel in panels():
        for target in panel["targets"]:
            for name in re.findall(r"(?:rate|increase)\((atoll_\w+)", target["expr"]):
                assert METRICS[name].kind == "counter", panel["title"]


def test_alarms_say_what_is_wrong_and_what_to_type() -> None:
    assert len({alert["alert"] for alert in ALERTS}) == len(ALERTS) > 10
    for alert in ALERTS:
        assert alert["alert"].startswith("Atoll") and alert["annotations"]["summary"].endswith(".")
        for line in re.findall(r"'(atoll [^']*)'", alert["annotations"]["next"]):
            check_command_line(line)
    for query in alarms():
        for function, name in re.findall(r"(increase|over_time|resets)\((atoll_\w+)", query):
            assert (METRICS[name].kind == "counter") == (function == "increase"), query


HOUR = 60
"""Minutes, which the series below have a value for each."""

HOLDS = {
    "up": "1x3000",
    "atoll_uptime_seconds": "0+60x3000",
    "atoll_committed_tokens_total": "5000+100x3000",
    "atoll_run_finished": "0x3000",
    "atoll_run_paused": "0x3000",
    "atoll_min_nodes": "2x3000",
    'atoll_members{state="ready"}': "8x3000",
    "atoll_digests_agree": "1x3000",
    "atoll_held_out_loss_nats": "3x3000",
    "atoll_run_info": "1x3000",
    "atoll_backup_age_seconds": "300x3000",
    "atoll_backup_failures": "0x3000",
    "atoll_backup_abandoned": "0x3000",
    "atoll_disk_low": "0x3000",
    "atoll_disk_write_seconds": "0.1x3000",
    'atoll_node_time_share{node="node-1",part="waiting"}': "0.2x3000",
    'atoll_node_late_work_let_go_rounds_total{node="node-1"}': "0x3000",
}
"""Of a run for which no alarm rings: how Prometheus' tests write series, a value each minute."""

NODE = {"node": "node-1"}
READY = {"state": "ready"}
WAITING = 'atoll_node_time_share{node="node-1",part="waiting"}'
LET_GO = 'atoll_node_late_work_let_go_rounds_total{node="node-1"}'

OWN = '{instance="node-1:9101"}'
OWN_WAITING, OWN_LET_GO = (each.replace("{", OWN[:-1] + ",") for each in (WAITING, LET_GO))
"""What a node serves itself, whose metrics are scraped beside the coordinator's and in the same job."""

CASES: list[tuple[str, dict[str, str | None], int, dict[str, dict[str, str]]]] = [
    ("all is well", {}, 30 * HOUR, {}),
    ("a run just begins", {"atoll_committed_tokens_total": "0x3000"}, 20, {}),
    (
        "it was paused for 90 minutes and goes on",
        {
            "atoll_committed_tokens_total": "5000x95 5100+100x3000",
            "atoll_run_paused": "1x90 0x3000",
        },
        92,
        {},
    ),
    (
        "it stands still",
        {"atoll_committed_tokens_total": "0+100x60 6000x3000"},
        61 + 61,
        {"AtollStandsStill": {}},
    ),
    (
        "it stood still for 40 minutes",
        {"atoll_committed_tokens_total": "0+100x60 6000x40 6100x3000"},
        61 + 50,
        {},
    ),
    ("it is paused", {"atoll_run_paused": "1x3000"}, HOUR, {"AtollPaused": {}}),
    (
        "a node waited in the last round before the pause",
        {"atoll_run_paused": "1x3000", WAITING: "0.9x3000"},
        2 * HOUR,
        {"AtollPaused": {}},
    ),
    (
        "a node waits",
        {WAITING: "0.9x3000"},
        2 * HOUR,
        {"AtollNodeWaits": {**NODE, "part": "waiting"}},
    ),
    (
        "the coordinator is away, and its series with it",
        {"up": "1x60 0x3000", "atoll_run_finished": "0x60", "atoll_run_paused": "0x60"},
        24 * HOUR,
        {"AtollCoordinatorAway": {}},
    ),
    (
        "it was stopped after the run's end",
        {"up": "1x60 0x3000", "atoll_run_finished": "0x50 1x10"},
        70,
        {},
    ),
    (
        "a node with metrics of its own has left for good",
        {f"up{OWN}": "1x60 0x3000", f"atoll_node_info{OWN}": "1x60"},
        24 * HOUR,
        {},
    ),
    (
        "such a node waits in a pause, and tells of work let go that the coordinator tells as well",
        {"atoll_run_paused": "1x3000", OWN_WAITING: "0.9x3000", OWN_LET_GO: "0x60 3x3000"},
        2 * HOUR,
        {"AtollPaused": {}},
    ),
    (
        "it restarts",
        {"atoll_uptime_seconds": "0+60x10 0+60x10 0+60x10 0+60x10 0+60x3000"},
        50,
        {"AtollCoordinatorRestarts": {}},
    ),
    (
        "two nodes at least, and one",
        {'atoll_members{state="ready"}': "1x3000"},
        20,
        {"AtollTooFewNodes": {}},
    ),
    (
        "nobody is there",
        {'atoll_members{state="ready"}': "2x60 0x3000", "atoll_min_nodes": "1x3000"},
        80,
        {"AtollTooFewNodes": {}, "AtollNodesGone": READY},
    ),
    (
        "half are gone",
        {'atoll_members{state="ready"}': "8x60 4x3000"},
        80,
        {"AtollNodesGone": READY},
    ),
    ("states differ", {"atoll_digests_agree": "0x3000"}, 20, {"AtollStatesDiffer": {}}),
    (
        "the loss rises",
        {"atoll_held_out_loss_nats": "3x60 3.4x3000"},
        61 + HOUR,
        {"AtollLossRises": {}},
    ),
    ("copies fail", {"atoll_backup_failures": "4x3000"}, 1, {"AtollNoBackup": {}}),
    ("nobody makes them", {"atoll_backup_abandoned": "1x3000"}, 1, {"AtollNoBackup": {}}),
    ("the newest is old", {"atoll_backup_age_seconds": "90000x3000"}, 1, {"AtollNoBackup": {}}),
    (
        "there is none",
        {
            "atoll_backup_age_seconds": None,
            "atoll_backup_failures": None,
            "atoll_backup_abandoned": None,
        },
        61,
        {"AtollNeverBackedUp": {}},
    ),
    ("the disk is low", {"atoll_disk_low": "1x3000"}, 1, {"AtollDiskLow": {}}),
    ("the disk is slow", {"atoll_disk_write_seconds": "4x3000"}, 1, {"AtollDiskSlow": {}}),
    ("work is let go", {LET_GO: "0x60 3x3000"}, 70, {"AtollWorkLetGo": NODE}),
    (
        "a finished run asks for nothing",
        {
            "atoll_run_finished": "1x3000",
            "atoll_committed_tokens_total": "5000x3000",
            'atoll_members{state="ready"}': "8x60 0x3000",
            "atoll_backup_age_seconds": "90000x3000",
        },
        5 * HOUR,
        {},
    ),
]


def test_each_alarm_has_a_case_in_which_it_rings_with_metrics_that_there_are() -> None:
    assert {name for *_, rings in CASES for name in rings} == {each["alert"] for each in ALERTS}
    told = {*HOLDS, *(name for _, changes, *_ in CASES for name in changes)}
    for series in told - {"up", f"up{OWN}"}:
        metric = METRICS[series.partition("{")[0]]
        assert set(re.findall(r"(\w+)=", series)) <= {*metric.labels, "instance"}
    asked = {name for query in alarms() for name in re.findall(r"atoll_\w+", query)}
    assert asked == {series.partition("{")[0] for series in HOLDS} - {"up"}


def test_rules_have_the_keys_durations_and_brackets_that_prometheus_takes() -> None:
    for alert in ALERTS:
        assert (
            {"alert", "expr", "annotations"}
            <= set(alert)
            <= {"alert", "expr", "annotations", "for"}
        )
        for told in (alert.get("for", "1m"), *re.findall(r"\[([^]]*)\]", alert["expr"])):
            assert re.fullmatch(r"[1-9]\d*[smhd]", told), alert["alert"]
        left = re.sub(r"\w+|[<>=!]=|[-+*/<>=,\"\s.]", "", alert["expr"])
        for _ in range(9):
            left = re.sub(r"\(\)|\[\]|\{\}", "", left)
        assert not left, alert["expr"]


def test_alarms_ring_when_they_should_in_prometheus(tmp_path: Path) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool comes with Debian's package prometheus")
    rules = ROOT / "docs" / "alerts.yaml"
    ours = {"job": "atoll", "instance": "here"}
    annotations = {each["alert"]: each["annotations"] for each in ALERTS}
    tests = []
    for name, changes, minute, rings in CASES:
        series = {key: values for key, values in {**HOLDS, **changes}.items() if values}
        tests.append(
            {
                "name": name,
                "interval": "1m",
                "input_series": [
                    {"series": _with_labels(key, ours), "values": values}
                    for key, values in series.items()
                ],
                "alert_rule_test": [
                    {
                        "eval_time": f"{minute}m",
                        "alertname": alert,
                        "exp_alerts": [
                            {"exp_labels": {**ours, **rings[alert]}, "exp_annotations": told}
                        ]
                        if alert in rings
                        else [],
                    }
                    for alert, told in annotations.items()
                ],
            }
        )
    cases = tmp_path / "cases.yaml"
    cases.write_text(
        yaml.safe_dump(
            {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests},
            width=10000,
        )
    )
    for command in (["check", "rules", str(rules)], ["test", "rules", str(cases)]):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def _with_labels(series: str, labels: dict[str, str]) -> str:
    name, _, others = series.partition("{")
    missing = [f'{k}="{v}"' for k, v in labels.items() if f"{k}=" not in others]
    pairs = [others.rstrip("}")] * bool(others) + missing
    return f"{name}{{{','.join(pairs)}}}"


def test_no_alarm_takes_void_commits_for_progress() -> None:
    """They are counted among commits, so a run in which nothing counts any more would never ring."""
    assert not [query for query in alarms() if "atoll_commits_total" in query]
    assert "void ones included" in METRICS["atoll_commits_total"].meaning


def test_values_of_labels_are_those_that_metrics_have() -> None:
    told = {
        "state": {"ready"},
        "direction": {"sent"},
        "part": {"compute", "waiting"},
        "job": {"atoll"},
    }
    asked = {
        (label, value)
        for query in queries()
        for label, value in re.findall(r'(\w+)="(\w+)"', query)
    }
    assert asked == {(label, value) for label, values in told.items() for value in values}
    text = (ROOT / "docs" / "watching.md").read_text()
    assert all(f"`{value}`" in text for value in told["part"])


def test_each_panel_says_what_it_shows_and_covers_no_other() -> None:
    for panel in panels():
        assert panel["title"] and panel["description"].endswith(".")
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    for one, other in combinations([panel["gridPos"] for panel in panels()], 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below
    assert len({panel["id"] for panel in panels()}) == len(panels())
