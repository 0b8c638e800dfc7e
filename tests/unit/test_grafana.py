"""Grafana's dashboard and the alerts ask for metrics and labels that there are; panels do not overlap."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml
from test_docs import check_command_line

from coordinator.dashboard.run_metrics import RUN_METRICS
from protocol.terminal import cli
from protocol.web.node_metrics import NODE_METRICS

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
    return [alert["expr"] for alert in ALERTS if not alert["expr"].startswith("up{")]


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


def test_no_alarm_takes_void_commits_for_progress() -> None:
    """They are counted among commits, so a run in which nothing counts any more would never ring."""
    assert not [query for query in alarms() if "atoll_commits_total" in query]
    assert "void ones included" in METRICS["atoll_commits_total"].meaning


def test_values_of_labels_are_those_that_metrics_have() -> None:
    told = {
        "state": {"ready"},
        "direction": {"sent"},
        "part": {"compute", "waiting"},
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
