"""The contenders of benchmarks/wan: their settings hold, and one that is missing says so."""

import argparse
import dataclasses
import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.wan import command as wan
from benchmarks.wan.peers import atoll_rank
from benchmarks.wan.peers.contender import BY_NAME, CONTENDERS, PUBLISHED, Contender, named
from benchmarks.wan.peers.order import ORDER_VARIABLE, Order, Teller
from benchmarks.wan.peers.training import first_sample
from benchmarks.wan.run import Case, measure
from lab.simulation.inline_island import lone_work, unseen
from node.island.data.dataset import read_corpus
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh import Mesh
from node.island.training.trainer import Trainer
from protocol.errors import UsageError
from protocol.files.durable import toml_of
from protocol.run.run_files import validated
from protocol.run.run_spec import InnerSection, RunSpec
from tests.tiny_runs import tiny


def chosen(*arguments: str) -> argparse.Namespace:
    return wan.parser().parse_args(arguments)


def case_of(*arguments: str) -> Case:
    (case,) = wan.cases_of(chosen(*arguments))
    return case


def order_of(folder: Path, spec: RunSpec) -> Order:
    return Order(
        rank=0,
        addresses=("127.0.0.1", "127.0.0.2"),
        middle="127.0.0.3",
        interface="lo",
        tables=spec.model_dump(mode="json"),
        step_seconds=0.0,
        save_seconds=10.0,
        folder=folder,
    )


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_every_contender_has_a_file_and_a_run_that_is_valid(contender: Contender) -> None:
    assert importlib.util.find_spec(f"benchmarks.wan.peers.{contender.module}") is not None
    spec = case_of().spec(contender)
    assert spec.run.min_nodes == 2


def test_contenders_differ_in_how_they_exchange_only() -> None:
    """And in what they evaluate themselves, which says nothing of how they are judged."""
    case = case_of()
    own = {"exchange", "outer", "inner", "evaluation"}
    kept = {
        contender.name: case.spec(contender).model_dump(exclude=own) for contender in CONTENDERS
    }
    assert len({str(one) for one in kept.values()}) == 1
    inner = [case.spec(c).inner.model_dump(exclude={"learning_rate"}) for c in CONTENDERS]
    assert all(one == inner[0] for one in inner)


def test_a_variant_differs_in_the_inner_steps_between_its_exchanges_only() -> None:
    case = case_of("--inner-steps", "5")
    for name in ("gloo-diloco-bf16", "torchft-overlap-most", "hivemind", "atoll-ec2"):
        plain, variant = BY_NAME[name], named(f"{name}@20")
        assert variant.name == f"{name}@20"
        assert (case.steps_between(plain), case.steps_between(variant)) == (5, 20)
        assert dataclasses.replace(variant, name=name, tables=plain.tables) == plain
        one, other = case.spec(plain), case.spec(variant)
        assert one.tokens_per_inner_step == other.tokens_per_inner_step
        assert other.model_copy(update={"inner": one.inner}) == one
        assert other.inner.model_copy(update={"steps": 5}) == one.inner
        # What its nodes are told is what the judge and the table think.
        assert case.tables_of(variant)["inner"]["steps"] == 20


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nobody", r"no contender 'nobody'.*name one of atoll"),
        ("nobody@5", "no contender 'nobody'"),
        ("atoll@", "'' is no number of inner steps.*write atoll@20"),
        ("atoll@0", "'0' is no number"),
        ("atoll@often", "'often' is no number"),
        ("ddp-fp16@20", "exchanges at every inner step, not at every 20.*name it ddp-fp16"),
    ],
)
def test_a_name_that_nobody_has_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        named(name)


def test_of_what_is_published_every_one_that_could_win_has_variants_and_none_is_there_twice() -> (
    None
):
    variants = [named(name) for name in PUBLISHED]
    case = case_of()
    keys = [(c.name.partition("@")[0], case.steps_between(c)) for c in variants]
    assert len(set(keys)) == len(keys)
    for name in ("atoll-ec2-ec2", "gloo-diloco-bf16", "torchft-overlap-most"):
        assert sum(base == name for base, _ in keys) > 1


def test_an_end_by_steps_is_one_where_all_have_just_exchanged() -> None:
    contenders = [named(name) for name in ("atoll@3", "gloo-diloco@20", "ddp")]
    wan.check_ends(case_of("--steps", "120"), contenders)
    wan.check_ends(case_of(), contenders)
    with pytest.raises(UsageError, match=r"--steps 100: not all .*choose a multiple of 60"):
        wan.check_ends(case_of("--steps", "100"), contenders)


def test_what_a_contender_evaluates_itself_does_not_change_the_judge() -> None:
    case = case_of()
    (own,) = {case.spec(c).evaluation.samples for c in CONTENDERS if c.is_atoll}
    assert own < case.shared_spec().evaluation.samples


def test_a_missing_peer_gets_a_row_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = dataclasses.replace(BY_NAME["torchft"], needs="no_such_peer")
    nobody: Any = None  # it must not come to be judged
    row = measure(missing, case_of(), nobody, lambda line: None)
    assert not row.has_trained
    assert row.trouble == "not installed: pip install 'atoll[peers]' brings no_such_peer"


def test_a_link_has_half_of_the_paths_delay_and_the_share_of_its_rate() -> None:
    links = case_of("--rates", "10", "--round-trips", "200", "--up-shares", "0.2").links()
    assert set(links) == {"node-1", "node-2", "middle"}
    link = links["node-1"]
    assert link.up_bits_per_second == pytest.approx(2e6)
    assert link.down_bits_per_second == pytest.approx(10e6)
    assert 4 * link.delay_seconds == pytest.approx(0.2)


def test_the_run_file_can_be_changed_and_mistakes_are_told() -> None:
    spec = case_of("--set", "outer.momentum=0.6", "inner.learning_rate=1e-3").spec(CONTENDERS[0])
    assert (spec.outer.momentum, spec.inner.learning_rate) == (0.6, 1e-3)
    with pytest.raises(UsageError, match="is no JSON value"):
        case_of("--set", "outer.momentum=high")


@pytest.mark.parametrize("name", ["atoll", "atoll-fp32"])
def test_atolls_run_file_says_the_same_as_its_tables(name: str) -> None:
    case = case_of()
    tables = case.tables_of(BY_NAME[name])
    written = tomllib.loads(toml_of(tables))
    assert validated(written, origin="the file") == case.spec(BY_NAME[name])


def test_peers_train_each_sample_once_and_those_of_a_round_before_the_next() -> None:
    inner = InnerSection(steps=3, batch=2)
    rounds = [
        [
            first_sample(inner, step, rank, num_nodes=2) + place
            for rank in range(2)
            for step in range(3 * round_, 3 * round_ + 3)
            for place in range(inner.batch)
        ]
        for round_ in range(2)
    ]
    assert rounds == [list(range(12)), list(range(12, 24))]


def test_an_order_is_read_as_it_was_written(tmp_path: Path) -> None:
    order = order_of(tmp_path, tiny())
    assert Order.read(order.write()) == order
    assert order.address == "127.0.0.1"


def test_weights_are_kept_once_in_a_while_and_not_at_each_exchange(tmp_path: Path) -> None:
    now = [50.0]
    order = order_of(tmp_path, tiny())
    order.write()
    teller = Teller(order, clock=lambda: now[0])
    teller.begin()
    for exchanges, at in enumerate((55.0, 61.0, 62.0, 85.0), start=1):
        now[0] = at
        vector = np.full(3, exchanges, np.float32)
        teller.save_if_due(vector.copy, exchanges=exchanges, steps=exchanges, late_steps=0)
    kept = {path.name for path in tmp_path.glob("weights-*")}
    assert kept == {"weights-0-2.npy", "weights-0-4.npy"}
    assert np.load(tmp_path / "weights-0-4.npy").tolist() == [4.0, 4.0, 4.0]
    assert order.log.read_text().count("saved") == 2


def test_weights_after_the_last_step_are_kept_though_others_were_a_moment_ago(
    tmp_path: Path,
) -> None:
    now = [50.0]
    order = dataclasses.replace(order_of(tmp_path, tiny()), last_step=20)
    assert Order.read(order.write()).last_step == 20
    teller = Teller(order, clock=lambda: now[0])
    teller.begin()
    for exchanges, at in enumerate((61.0, 62.0, 63.0, 64.0), start=1):
        now[0] = at
        teller.save_if_due(
            lambda: np.zeros(3, np.float32), exchanges=exchanges, steps=7 * exchanges, late_steps=0
        )
    assert {path.name for path in tmp_path.glob("weights-*")} == {
        "weights-0-1.npy",
        "weights-0-3.npy",
    }


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Order:
    """Trainers of this test are watched as those of Atoll's ranks in the benchmark are."""
    order = dataclasses.replace(order_of(tmp_path, tiny()), save_seconds=1e-9)
    monkeypatch.setenv(ORDER_VARIABLE, str(order.write()))
    for name in ("__init__", "_inner_step", "adopt", "merge", "evaluate_at"):
        monkeypatch.setattr(Trainer, name, getattr(Trainer, name))  # put back after the test
    atoll_rank.watch_trainers()
    return order


def test_atolls_ranks_keep_the_global_parameters_that_they_adopt(watched: Order) -> None:
    spec = watched.spec
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    trainer: Any = Trainer(
        spec=spec, corpus=corpus, device=torch.device("cpu"), mesh=Mesh(), clock=lambda: 0.0
    )
    parameters = initial_parameters(spec)
    trainer.adopt(parameters)
    assert not watched.log.read_text(), "first weights are no exchange"
    trainer.train(lone_work(spec, 2), unseen)
    trainer.evaluate_at(parameters)
    assert [path.name for path in watched.folder.glob("weights-*")] == []
    parameters += 1
    trainer.merge(parameters, parameters.copy(), 0, is_taken=True)
    (kept,) = watched.folder.glob("weights-*")
    assert np.array_equal(np.load(kept), parameters)
    assert trainer.watch.pace.steps == 2
