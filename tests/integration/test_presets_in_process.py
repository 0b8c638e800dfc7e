"""Presets in whole swarms: the prediction is what rounds take, and settled run files train."""

from pathlib import Path

import pytest

from benchmarks.presets import checked, checks
from coordinator.config import Home, create_home, settle_preset
from lab.simulation.swarm import Life, simulate
from protocol.errors import ConfigError
from protocol.run.run_files import load_run_file
from protocol.run.run_spec import RunSpec
from protocol.terminal import cli, console
from tests.integration.coordinator_scene import LOCAL, serving

CHECKS = dict(checks())

MODEL = """\
[model]
hidden_size = 32
num_layers = 6
num_heads = 2
num_kv_heads = 1
ffn_size = 64
context = 32
"""

ASKED = f"""\
[run]
name = "slow"
rounds = 400
min_nodes = 3

{MODEL}
[inner]
steps = 3
batch = 4

[exchange]
preset = "auto"
link = "300kbit"
inner_step = "50ms"

[evaluation]
every_rounds = 4
samples = 16
"""


@pytest.mark.parametrize("name", CHECKS)
def test_rounds_take_what_was_predicted(name: str) -> None:
    """Within 4 % of the time, and 15 % of the bytes: headers are shorter, and deflate is the build's."""
    found = checked(CHECKS[name])
    assert found.round_seconds == pytest.approx(found.prediction.round_seconds, rel=0.04)
    assert found.bytes_per_round == pytest.approx(found.predicted_bytes, rel=0.15)


def trained(asked: RunSpec) -> None:
    """Trains two rounds of each fragment to their end, to the same weights everywhere."""
    tables = asked.model_dump(mode="json")
    tables["run"]["rounds"] = 2 * asked.exchange.fragments
    spec = RunSpec.model_validate(tables)
    num_nodes = spec.run.min_nodes
    assert spec.outer.audit > 0
    run = simulate(spec, lives=[Life(seconds_per_inner_step=0.05)] * num_nodes)
    assert len(run.digests) == num_nodes
    assert len(set(run.digests.values())) == 1
    assert run.final.committed_round == spec.run.rounds
    assert all(outcome.digest for commit in run.commits for outcome in commit.slices)
    assert run.final.token_clock > 0


def test_a_swarm_trains_by_the_file_that_init_wrote(tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_text(MODEL)
    made = tmp_path / "made"
    words = (
        f"init {made} --model {tmp_path}/model.toml --link 256kbit --step 20ms --nodes 2 --steps 4"
    )
    assert console.run(cli.root, [*words.split(), "--total-steps", "160"]) == 0
    spec = load_run_file(made / "run.toml")
    assert spec.inner.steps == 4 and spec.outer.optimizer == "sgd"
    trained(spec)


async def test_a_coordinator_starts_from_what_it_settled_and_only_once(tmp_path: Path) -> None:
    home = tmp_path / "home"
    create_home(home, config=LOCAL, text='[run]\nname = "slow"\n')
    (home / "run.toml").write_text(ASKED)
    with pytest.raises(ConfigError, match="not settled yet"):
        Home.load(home)
    settled = settle_preset(home)
    assert settled is not None and settled.plan.setting.has_overlap
    assert Home.load(home).run == settled.spec
    assert settle_preset(home) is None
    async with serving(Home.load(home)):
        pass
    async with serving(Home.load(home)):  # the digest is the one that the database has
        pass
    (home / "run.toml").write_text(ASKED)
    with pytest.raises(ConfigError, match="once the run has started"):
        settle_preset(home)
    assert (home / "run.toml").read_text() == ASKED


def test_the_run_of_a_coordinator_whose_file_asks_for_a_preset_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "asked.toml").write_text(ASKED)
    home = tmp_path / "home"
    words = f"coordinator init {home} --run {tmp_path}/asked.toml --host 127.0.0.1"
    assert console.run(cli.root, words.split()) == 0
    shown = capsys.readouterr().out
    assert "exchange.uplink" in shown and "of the time" in shown
    run = Home.load(home).run
    assert (run.inner.steps, run.run.rounds) == (3, 400)  # as given
    assert run.exchange.overlap == "keep" and run.exchange.fragments > 1
    trained(run)


def test_a_wrong_link_makes_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "asked.toml").write_text(ASKED.replace("300kbit", "fast"))
    words = f"coordinator init {tmp_path}/home --run {tmp_path}/asked.toml"
    assert console.run(cli.root, words.split()) == 78
    said = capsys.readouterr().err
    assert "'fast' is no link" in said and "next: " in said
    assert not (tmp_path / "home").exists()
