"""`atoll init` writes a run file that a coordinator takes, says why, and refuses what makes no sense."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from benchmarks.presets import situation_of
from coordinator import new_run as command
from coordinator.config import Home, run_text
from coordinator.presets.advising import measured_links
from coordinator.presets.choosing import chosen
from coordinator.presets.cost import Link, exchange_bytes_per_second
from coordinator.presets.view import warnings_of
from node.island.parallel.auto_mesh import node_bytes
from protocol.run.models import DecoderModel
from protocol.run.run_files import load_run_file
from protocol.run.run_spec import RunSpec
from protocol.terminal import cli, console
from protocol.terminal.console import bytes_in_words, count_in_words, seconds_in_words
from protocol.terminal.query import StatusLink
from protocol.v1 import status_pb2 as pb
from protocol.v1.session_pb2 import LinkRates
from tests.unit.test_cli import loaded_by

TINY = """\
[model]
hidden_size = 32
num_layers = 6
num_heads = 2
num_kv_heads = 1
ffn_size = 64
context = 32
"""


def init(folder: Path, *arguments: str) -> int:
    """Makes a run; what it trains is then in the folder's run.toml."""
    made = folder / f"run-{len(list(folder.glob('run-*')))}"
    code = console.run(cli.root, ["init", str(made), "--host", "127.0.0.1", *arguments])
    if code == 0:
        (folder / "run.toml").write_bytes((made / "run.toml").read_bytes())
    return code


def test_the_file_is_one_that_a_coordinator_takes(tmp_path: Path) -> None:
    assert (
        init(tmp_path, "--link", "10mbit", "--model", "125m", "--step", "1s", "--nodes", "5") == 0
    )
    written = tmp_path / "run.toml"
    spec = load_run_file(written)
    assert isinstance(spec.model, DecoderModel)
    assert (spec.model.hidden_size, spec.model.num_layers) == (768, 18)
    assert spec.run.min_nodes == 5
    asked = replace(situation_of("125m", 10), num_nodes=5, total_steps=10_000)
    setting = chosen(asked).setting
    assert (spec.exchange.uplink, spec.exchange.downlink) == (setting.uplink, setting.downlink)
    assert (spec.exchange.fragments, spec.inner.steps) == (setting.fragments, setting.steps)
    assert spec.exchange.overlap == "keep" and setting.has_overlap
    assert spec.inner.steps * spec.run.rounds >= 10_000 > spec.inner.steps * (spec.run.rounds - 1)
    text = written.read_text()
    assert "Every value here is the default" not in text


def test_every_key_of_the_template_is_still_there_and_explained(tmp_path: Path) -> None:
    assert init(tmp_path, "--link", "100mbit", "--name", "x-1") == 0
    keys = re.findall(r"^(?:# )?(\w+) = \S.*# \S", (tmp_path / "run.toml").read_text(), re.M)
    defaults = RunSpec().model_dump(exclude={"description"})
    assert sorted(keys) == sorted(key for table in defaults.values() for key in table)
    assert load_run_file(tmp_path / "run.toml").run.name == "x-1"


@pytest.mark.parametrize(
    ("folder", "called"),
    [
        ("second-run", "second-run"),
        ("My Run_2", "my-run-2"),
        ("2030.01", "2030-01"),
        ("x" * 80, "x" * 63),
        ("___", "my-run"),
    ],
)
def test_a_run_is_called_as_its_folder_and_the_next_command_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, called: str
) -> None:
    assert console.run(cli.root, ["init", str(tmp_path / folder)]) == 0
    assert load_run_file(tmp_path / folder / "run.toml").run.name == called
    typed = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(typed) == ["atoll", "coordinator", "start", str(tmp_path / folder)]


@pytest.mark.parametrize(
    ("options", "ports", "page"),
    [
        ((), (7700, 7701), 7702),
        (("--port", "43000"), (43000, 43001), 43002),
        (("--port", "43000", "--enrolment-port", "43010"), (43000, 43010), 43011),
        (("--enrolment-port", "43010"), (7700, 43010), 43011),
        (("--port", "0"), (0, 0), 7702),
        (("--port", "65534"), (65534, 65535), 7702),
    ],
)
def test_runs_with_ports_of_their_own_share_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    ports: tuple[int, int],
    page: int,
) -> None:
    monkeypatch.setattr(command, "_is_free", lambda host, port: True)
    assert init(tmp_path, *options) == 0
    config = Home.load(tmp_path / "run-0").config
    assert (config.control_port, config.enrolment_port) == ports
    assert config.dashboard == f"127.0.0.1:{page}"
    assert config.has_usual_dashboard  # where it is taken, the next that is free does as well
    assert config.with_changes(
        dashboard="127.0.0.1:7702"
    ).has_usual_dashboard  # of folders of before
    assert not config.with_changes(dashboard="127.0.0.1:9000").has_usual_dashboard


def test_every_choice_is_printed_with_its_value_and_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # so that no reason is folded
    arguments = ("--link", "20mbit/5mbit", "--model", "42m", "--step", "300ms")
    assert init(tmp_path, *arguments, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert init(tmp_path, *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(told["choices"]) >= 14
    for choice in told["choices"]:
        (line,) = [row for row in lines if row.startswith(f"{choice['key']} ")]
        assert str(choice["value"]) in line
        assert choice["reason"] and choice["reason"] in line
    assert told["verdict"] in lines
    interval = told["steps_between_exchanges"]
    words = f"each parameter is exchanged every {interval} inner steps, {told['exchanges']} times"
    assert any(line.startswith(words) for line in lines)
    assert told["situation"]["up_bits_per_second"] == 5e6
    assert told["situation"]["congestion_control"] == "cubic"
    link = Link(bits_per_second=5e6, round_trip_seconds=0.1, congestion_control="cubic")
    share = link.share_of(told["prediction"]["bytes_per_round"])
    assert told["prediction"]["link_share"] == pytest.approx(share)
    assert told["meets_goal"] is True
    assert told["prediction"]["utilisation"] >= 0.95
    assert not told["step_is_assumed"]
    values = load_run_file(tmp_path / "run.toml").model_dump(mode="json")
    for choice in told["choices"]:
        table, key = choice["key"].split(".")
        assert values[table][key] == choice["value"]


def test_the_congestion_control_that_is_told_decides_what_links_are_counted_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--link", "10mbit", "--model", "125m", "--step", "1s", "--json")
    plans = {}
    for said in ("cubic", "bbr", None):
        assert init(tmp_path, *arguments, *(["--congestion", said] if said else [])) == 0
        plans[said] = json.loads(capsys.readouterr().out)
        del plans[said]["folder"]
    assert plans[None] == plans["cubic"]
    assert plans["bbr"]["prediction"]["link_share"] > plans["cubic"]["prediction"]["link_share"]
    assert any("with bbr" in choice["reason"] for choice in plans["bbr"]["choices"])
    assert "with cubic" in (tmp_path / "run.toml").read_text()


def test_what_is_assumed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init(tmp_path, "--link", "100mbit", "--model", "1b") == 0
    assert "assumed: nodes of 50 TFLOP/s, so inner steps of 31.9 s" in capsys.readouterr().out


def test_what_a_run_costs_a_node_and_how_long_it_takes_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--link", "100mbit", "--model", "125m", "--step", "1s", "--nodes", "4")
    assert init(tmp_path, *arguments) == 0
    told = capsys.readouterr().out
    assert init(tmp_path, *arguments, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    parameters = values["situation"]["num_parameters"]
    assert f"for {count_in_words(parameters)} parameters, 4 nodes" in told
    assert values["node_bytes"].keys() == {"daemon", "ranks", "disk"}
    assert 12 < values["node_bytes"]["daemon"] / parameters < 12 + 4 + 2 * 4 / 4 + 4
    assert values["node_bytes"]["ranks"] == 16 * parameters
    assert values["node_bytes"]["disk"] == 88 * parameters
    memory, ranks, disk = map(bytes_in_words, values["node_bytes"].values())
    assert f"a node takes about {memory} of memory beside {ranks} in its ranks" in told
    assert f" and {disk} of disk" in told
    a_round = values["prediction"]["round_seconds"]
    assert values["rounds"] == load_run_file(tmp_path / "run.toml").run.rounds
    assert values["run_seconds"] == pytest.approx(values["rounds"] * a_round)
    assert f"a round takes {seconds_in_words(a_round)}, the run of " in told
    assert f" {seconds_in_words(values['run_seconds'])}\n" in told
    sent = sum(values["prediction"][part] for part in ("bytes_per_round", "audit_bytes"))
    assert f"sends and receives {bytes_in_words(sent)} a" in told
    assert values["warnings"] == [] and "warning" not in told


def test_a_new_run_says_the_memory_that_those_who_join_it_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--link", "100mbit", "--model", "0.2m", "--step", "100ms", "--nodes", "2")
    assert init(tmp_path, *arguments, "--json") == 0
    told = json.loads(capsys.readouterr().out)["node_bytes"]["daemon"]
    assert told == pytest.approx(node_bytes(load_run_file(tmp_path / "run.toml")), rel=0.01)


def test_rounds_of_hours_are_warned_of_with_what_shortens_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--link", "100mbit", "--model", "7b", "--step", "400s", "--steps", "30")
    assert init(tmp_path, *arguments) == 0
    *_, warning = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert warning.startswith("warning: a round takes ")
    assert "fewer inner steps shorten it: --steps, now 30" in warning
    assert init(tmp_path, *arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == [warning]


def test_rounds_of_hours_by_their_exchange_are_warned_of_too() -> None:
    given = {("exchange", "fragments"): 1, ("exchange", "uplink"): "int4"}
    (warning,) = warnings_of(chosen(situation_of("7b", 0.3), given))
    assert "the exchange takes most of it: faster links or a smaller model" in warning


def test_a_speed_says_as_much_as_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for arguments in (["--speed", "2048"], ["--step", "500ms"]):  # of 8 samples of 128 tokens
        assert init(tmp_path, "--link", "1mbit", "--json", *arguments) == 0
        found.append(json.loads(capsys.readouterr().out)["prediction"])
    assert found[0] == found[1]


def test_inner_steps_that_are_given_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(tmp_path, "--link", "256kbit", "--step", "1ms", "--steps", "77", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert load_run_file(tmp_path / "run.toml").inner.steps == 77
    (choice,) = [c for c in told["choices"] if c["key"] == "inner.steps"]
    assert choice == {"key": "inner.steps", "value": 77, "given": True, "reason": "given"}
    assert "chosen: given" not in (tmp_path / "run.toml").read_text()
    assert told["meets_goal"] is False and "nodes compute for only" in told["verdict"]


def test_short_rounds_that_are_given_come_with_the_plain_mean_also_without_a_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(tmp_path, "--steps", "5") == 0
    outer = load_run_file(tmp_path / "run.toml").outer
    assert (outer.optimizer, outer.learning_rate, outer.momentum) == ("sgd", 1.0, 0.0)
    assert "loss: " not in capsys.readouterr().out
    assert init(tmp_path, "--steps", "15") == 0
    assert load_run_file(tmp_path / "run.toml").outer.optimizer == "nesterov"


def test_a_run_file_of_ones_own_is_told_which_of_its_settings_cost_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(
        "[run]\nrounds = 8\nmin_nodes = 2\n[inner]\nsteps = 15\n[outer]\nmomentum = 0.6\n"
    )
    assert init(tmp_path, "--run", str(tmp_path / "mine.toml")) == 0
    assert "loss: [outer] momentum = 0.6 overshoots" in capsys.readouterr().out


def test_a_run_of_hardly_any_steps_exchanges_after_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(tmp_path, "--link", "100mbit", "--total-steps", "5") == 0
    spec = load_run_file(tmp_path / "run.toml")
    assert (spec.run.rounds, spec.inner.steps) == (5, 1)
    said = capsys.readouterr().out
    assert "each parameter is exchanged every inner step, 5 times" in said
    assert "5 exchanges of each parameter cost a tenth or more of the loss" in said


def test_a_model_of_ones_own_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TINY)
    assert init(tmp_path, "--link", "1mbit", "--model", str(tmp_path / "mine.toml")) == 0
    mine = load_run_file(tmp_path / "mine.toml")
    assert load_run_file(tmp_path / "run.toml").model == mine.model


def test_what_else_a_file_with_a_model_says_is_told_to_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, arguments = tmp_path / "mine.toml", ["--link", "1mbit", "--model"]
    mine.write_text(f"[inner]\nbatch = 7\n{TINY}[exchange]\nuplink = 'fp32'\n")
    assert init(tmp_path, *arguments, str(mine)) == 0
    assert "only [model] is taken, not [exchange], [inner]" in capsys.readouterr().out
    mine.write_text(TINY)
    assert init(tmp_path, *arguments, str(mine)) == 0
    assert "is taken" not in capsys.readouterr().out
    mine.write_text("[inner]\nbatch = 7\n")
    assert init(tmp_path, *arguments, str(mine)) == 78
    assert "has no [model]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["--link", "fast"], "'fast' is no link", 64),
        (["--link", "-5mbit"], "'-5mbit' is no link", 64),
        (["--link", "0mbit"], "'0mbit' is too slow", 64),
        (["--link", "100mbit", "--model", "9b"], "'9b' is neither a size nor a file", 64),
        (["--link", "100mbit", "--rtt", "soon"], "'soon' is no time", 64),
        (["--link", "100mbit", "--step", "0s"], "'0s' is no time", 64),
        (["--link", "100mbit", "--speed", "0"], "0.0 is not in the range", 64),
        (["--link", "100mbit", "--nodes", "1"], "an exchange takes two nodes", 64),
        (["--link", "100mbit", "--name", "Nö"], "'Nö' is not a name for a run", 64),
        (["--link", "100mbit", "--step", "1s", "--speed", "5"], "the same thing twice", 64),
        (["--link", "100mbit", "--nodes", "0"], "0 is not in the range", 64),
        (["--port", "65535"], "--port 65535 leaves no port after it for joining", 64),
        (["--step", "1s"], "--step 1s has no effect while nothing is chosen", 64),
        (["--total-steps", "9"], "--total-steps 9 has no effect while nothing is chosen", 64),
        (["--model", "3m", "--from", "."], "both say what is trained", 64),
        (["--function", "a:b", "--model", "3m"], "both say what is trained", 64),
        (["--function", "a:b", "--lora", "4"], "both say what is trained", 64),
        (["--function", "a"], "--function a names no function", 64),
        (["--function", "a:b"], "nothing what it learns from", 64),
        (["--loop", "--data", "x"], "--loop and --data both say what it learns from", 64),
        (["--loop", "--private"], "--loop and --private both say what it learns from", 64),
        (["--data-function", "a:b"], "goes with a model that a function makes", 64),
        (["--data-function", "b", "--function", "a:b"], "--data-function b names no function", 64),
        (
            ["--function", "a:b", "--data", "x", "--data-function", "a:c"],
            "both say what it learns",
            64,
        ),
        (["--lora", "4"], "--lora 4 has no effect without a model of transformers", 64),
        (["--lora", "4", "--from", ".", "--by", "decoder"], "goes with --by transformers", 64),
        (["--lora", "0", "--from", "."], "0 is not in the range", 64),
        (["--by", "transformers"], "--by transformers has no effect without a model", 64),
        (["--private", "--data", "x"], "--private goes without --data", 64),
        (["--tokenizer", "x"], "--tokenizer x has no effect without --private", 64),
        (["--link", "100mbit", "--measured", "."], "--link and --measured both tell", 64),
        (["--link", "100mbit", "--congestion", "reno"], "'reno' is not one of 'cubic', 'bbr'", 64),
        (["--measured", ".", "--congestion", "bbr"], "--congestion bbr says nothing beside", 64),
        (
            ["--link", "100mbit", "--steps", "77", "--total-steps", "76"],
            "--steps 77 are more than --total-steps 76",
            64,
        ),
    ],
)
def test_a_mistake_is_a_sentence_and_nothing_is_written(
    arguments: list[str], words: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(tmp_path, *arguments) == code
    said = capsys.readouterr().err
    assert words in said and "\n  next: " in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hidden_size = 63", "63"),
        ('source = "mamba"', "'mamba'"),
    ],
)
def test_a_model_file_with_a_mistake_is_refused(
    line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(f"[model]\n{line}\n")
    assert init(tmp_path, "--link", "1mbit", "--model", str(tmp_path / "mine.toml")) == 78
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run.toml").exists()


def test_a_folder_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run-0").mkdir()
    (tmp_path / "run-0" / "precious").touch()
    assert console.run(cli.root, ["init", str(tmp_path / "run-0")]) == 73
    assert "exists and is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run-0").iterdir()] == ["precious"]


def test_what_a_run_file_says_is_not_said_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(TINY)
    beside = ["init", str(tmp_path / "made"), "--run", str(tmp_path / "mine.toml")]
    assert console.run(cli.root, [*beside, "--model", "3m"]) == 64
    assert "--model 3m has no effect with --run" in capsys.readouterr().err
    assert console.run(cli.root, [*beside, "--host", "127.0.0.1"]) == 0
    assert load_run_file(tmp_path / "made" / "run.toml") == load_run_file(tmp_path / "mine.toml")


def test_nothing_named_is_the_template_for_two_nodes(tmp_path: Path) -> None:
    assert init(tmp_path) == 0
    assert (tmp_path / "run.toml").read_text() == run_text(name="run-0")


def test_a_new_decoder_comes_with_muon_and_the_rates_that_suit_both_optimizers(
    tmp_path: Path,
) -> None:
    assert init(tmp_path, "--model", "3m", "--batch", "4") == 0
    inner = load_run_file(tmp_path / "run.toml").inner
    assert (inner.optimizer, inner.batch) == ("muon", 4)
    assert (inner.muon_learning_rate, inner.learning_rate) == (2.4e-3, 1e-2)


def test_adamw_alone_has_the_rate_of_its_size_and_muon_none(tmp_path: Path) -> None:
    assert init(tmp_path, "--model", "3m", "--optimizer", "adamw") == 0
    inner = load_run_file(tmp_path / "run.toml").inner
    assert (inner.optimizer, inner.learning_rate) == ("adamw", 2e-3)
    assert inner.muon_learning_rate is None


def status_of(*rates: tuple[float, float] | None, **state: int) -> pb.GetStatusResponse:
    nodes = [
        pb.NodeStatus(
            state=state.get("state", pb.NODE_STATE_READY),  # type: ignore[arg-type]
            link_rates=rate
            and LinkRates(up_bytes_per_second=rate[0], down_bytes_per_second=rate[1]),
        )
        for rate in rates
    ]
    return pb.GetStatusResponse(nodes=nodes)


def test_links_that_a_swarm_has_measured_are_those_of_its_slowest_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = status_of((1e6, 9e6), (5e6, 4e6), None)
    monkeypatch.setattr(StatusLink, "status", lambda self: answer)
    assert init(tmp_path, "--measured", str(tmp_path), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    situation = told["situation"]
    assert situation["up_bits_per_second"] == 8e6
    assert situation["down_bits_per_second"] == 32e6
    assert situation["congestion_control"] is None
    assert told["prediction"]["link_share"] == 1.0
    assert situation["num_nodes"] == load_run_file(tmp_path / "run.toml").run.min_nodes == 3


def test_nodes_that_do_not_use_bbr_are_told_of_and_who_does_not_say_is_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = status_of((1e6, 1e6), (1e6, 1e6), (1e6, 1e6))
    monkeypatch.setattr(StatusLink, "status", lambda self: answer)
    for node, said in zip(answer.nodes, ("bbr", "reno", ""), strict=True):
        node.heartbeat.congestion_control = said
    assert init(tmp_path, "--measured", str(tmp_path)) == 0
    assert "2 of 3 nodes use cubic, or do not say and count so" in capsys.readouterr().out
    for node in answer.nodes:
        node.heartbeat.congestion_control = "bbr"
    assert init(tmp_path, "--measured", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []


def test_the_nodes_own_work_is_as_fast_as_the_slowest_node_measured_it_or_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = status_of((1e6, 1e6), (1e6, 1e6), (1e6, 1e6))
    monkeypatch.setattr(StatusLink, "status", lambda self: answer)
    assert init(tmp_path, "--measured", str(tmp_path)) == 0
    assert "own work is assumed to be as fast as one core" in capsys.readouterr().out
    for node, times, codec in zip(
        answer.nodes, (0.5, 2.0, 0.01), ("int4", "ec2", "newer"), strict=True
    ):
        told = node.heartbeat.exchange_speed
        table = exchange_bytes_per_second("int4" if codec == "newer" else codec, "ec2")
        told.bytes_per_second, told.uplink, told.downlink = times * table, codec, "ec2"
    assert init(tmp_path, "--measured", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["situation"]["arithmetic"] == pytest.approx(0.5)
    assert init(tmp_path, "--measured", str(tmp_path)) == 0
    assert "own work is 0.5 times as fast" in capsys.readouterr().out


def test_one_direction_stands_for_both_until_both_are_known() -> None:
    links = measured_links(status_of((0.0, 2e6)).nodes)
    assert (links.up_bits_per_second, links.down_bits_per_second) == (16e6, 16e6)


def test_nodes_that_are_gone_count_only_when_nobody_is_there() -> None:
    lost = status_of((1e6, 1e6), state=pb.NODE_STATE_LOST).nodes
    assert measured_links(lost).num_nodes == 1
    both = measured_links([*lost, *status_of((3e6, 2e6)).nodes])
    assert (both.up_bits_per_second, both.num_nodes) == (24e6, 1)


@pytest.mark.parametrize("answer", [status_of(), status_of(None, None)])
def test_without_a_measurement_nothing_is_guessed(
    answer: pb.GetStatusResponse,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(StatusLink, "status", lambda self: answer)
    assert init(tmp_path, "--measured", str(tmp_path)) == 75
    wanted = "none of 2 nodes has measured its link yet" if answer.nodes else "no node has come yet"
    assert wanted in capsys.readouterr().err
    assert not (tmp_path / "run.toml").exists()


def test_it_loads_neither_torch_nor_the_exchange(tmp_path: Path) -> None:
    code, modules = loaded_by(["init", str(tmp_path / "run"), "--link", "1mbit"])
    assert code == 0
    assert not {"torch", "hivemind", "grpc", "node"} & modules


@pytest.mark.parametrize(
    ("train", "contribute", "commit"), [(10, 10, 20), (10, 20, 20), (20, 10, 30), (10, 30, 20)]
)
def test_deadlines_that_are_equal_or_fall_are_refused(
    train: float, contribute: float, commit: float
) -> None:
    deadlines = {"train": train, "contribute": contribute, "commit": commit}
    with pytest.raises(ValidationError, match="deadlines must rise"):
        RunSpec.model_validate({"deadlines": deadlines})
    RunSpec.model_validate({"deadlines": {"train": 10, "contribute": 10.1, "commit": 10.2}})
