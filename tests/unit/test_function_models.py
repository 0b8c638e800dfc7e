"""Models and data of functions: what they may return, and what is trained with them."""

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from node.island.data.functions import FunctionData
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.models.architecture import SUMS, BufferWatch, copy_parameters, tensors_of
from node.island.models.describing import describe, first_vector
from node.island.models.function import FunctionArchitecture, beside_the_trained, random_module
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import (
    PLAIN,
    LocalTraining,
    MeshShape,
    check_local,
    check_shape,
)
from node.island.parallel.modules import compile_layers, refuse_scalars
from node.island.training import engine
from node.island.training.optimizers import inner_optimizers
from node.island.training.trainer import Trainer
from protocol.errors import BadDataError, ConfigError
from protocol.run.models import Description, FunctionModel, Layout, layout_of
from protocol.run.run_files import load_run_file, validated
from protocol.run.run_spec import DataSection, EvaluationSection, InnerSection, RunSpec
from tests import run_functions
from tests.run_functions import Ending, Net, Scaled
from tests.unit.function_scene import (
    EXAMPLES,
    HERE,
    described_with,
    spec_of,
    trainer_of,
    undescribed,
)
from tests.unit.test_transformers_models import with_text
from tests.unit.work_scene import inner_work


def test_muon_takes_the_matrices_of_layers_and_neither_table_nor_head() -> None:
    model = Net(8, 40)
    muon, _ = inner_optimizers(model, InnerSection(optimizer="muon"))
    taken = {id(p) for group in muon.param_groups for p in group["params"]}
    named = {name for name, p in model.named_parameters() if id(p) in taken}
    assert named == {f"layers.{i}.{part}.weight" for i in range(3) for part in ("up", "down")}


def test_training_a_function_learns_and_its_metric_is_told() -> None:
    spec = spec_of()
    trainer = trainer_of(spec)
    before = trainer.evaluate()
    assert before.metric is not None and 0.0 <= before.metric <= 1.0
    report = trainer.train(inner_work(60), lambda progress: None)
    assert report.tokens == 60 * 8  # a sample counts one
    assert trainer.evaluate().loss != before.loss
    assert report.loss < before.loss


@pytest.mark.parametrize("name", ["vision", "fraud", "recommend"])
def test_each_example_learns(name: str) -> None:
    spec = load_run_file(EXAMPLES / f"{name}.toml")
    spec = spec.model_copy(update={"description": describe(spec, EXAMPLES)})
    trainer = trainer_of(spec)
    before = trainer.evaluate()
    trainer.train(inner_work(150), lambda progress: None)
    after = trainer.evaluate()
    assert after.loss < 0.8 * before.loss
    assert (after.metric is None) == (name == "recommend")
    if before.metric is not None:
        assert after.metric is not None and after.metric > max(0.7, before.metric)


def test_a_language_model_of_ones_own_trains_on_the_tokens_that_others_do(tmp_path: Path) -> None:
    spec = RunSpec(
        model=FunctionModel(source="function", function="tests.run_functions:bigrams", context=16),
        data=DataSection(source="text", paths=("*.txt",), held_out=0.2),
        inner=InnerSection(batch=4, learning_rate=0.1, schedule="constant", warmup_tokens=0),
        evaluation=EvaluationSection(samples=5),
    )
    spec = spec.model_copy(update={"description": describe(spec, HERE)})
    places = DataPlaces(folder=with_text(tmp_path))
    trainer = Trainer(
        spec=spec,
        corpus=open_dataset(spec, places),
        device=torch.device("cpu"),
        mesh=Mesh(),
        clock=lambda: 0.0,
    )
    trainer.adopt(first_vector(spec))
    before = trainer.evaluate()
    report = trainer.train(inner_work(40), lambda progress: None)
    assert (report.tokens, before.tokens) == (40 * 4 * 16, 5 * 16)
    assert before.loss > 4.5
    assert trainer.evaluate().loss < 2.0


def test_what_a_function_draws_besides_parameters_is_the_same_on_all_nodes() -> None:
    spec = undescribed("tests.run_functions:net_with_waves", "tests.run_functions:rows")
    tensors = tensors_of(random_module(spec))
    spec = spec.model_copy(update={"description": Description(tensors=tuple(tensors))})
    one, other = (FunctionArchitecture(spec).part(Mesh(), 0).get_buffer("waves") for _ in range(2))
    assert torch.equal(one, other)


def test_a_sample_that_is_not_there_is_told_by_its_number() -> None:
    data = FunctionData(undescribed("tests.run_functions:net", "tests.run_functions:rows"))
    data._splits["training"] = Ending()
    data.batch("training", np.arange(8))
    with pytest.raises(BadDataError, match=r"gives no training sample 41: ValueError: row 41 is"):
        data.batch("training", np.array([3, 41]))
    with pytest.raises(BadDataError, match=r"ending gives no training sample 4\d: ValueError"):
        spec_of("tests.run_functions:net_with_batch_norm", "tests.run_functions:ending")


def test_evaluators_of_a_model_with_batch_norm_agree_whatever_they_have_trained() -> None:
    spec = spec_of("tests.run_functions:net_with_batch_norm", "tests.run_functions:draws")
    fresh, trained = trainer_of(spec), trainer_of(spec)
    trained.train(inner_work(5), lambda _: None)
    parameters = first_vector(spec)
    (loss, places) = fresh.evaluate_at(parameters), [0, 5]
    assert trained.evaluate_at(parameters) == loss
    assert trained.losses_at(parameters, places) == fresh.losses_at(parameters, places)
    # And it is that of a model with the whole data's mean and variance.
    module, _ = run_functions.net_with_batch_norm()
    copy_parameters(module, layout_of(spec), parameters)
    training, held_out = (
        torch.stack([each[i] for i in range(64)]) for each in run_functions.draws()
    )
    untold = module.eval()(held_out).square().mean().item()
    module[1].momentum = None
    module.train()(training)
    exact = module.eval()(held_out).square().mean().item()
    assert loss.loss == pytest.approx(exact, rel=0.1)
    assert loss.loss != pytest.approx(untold, rel=0.5), "a test that can fail"


@pytest.mark.parametrize("how", ["parametrized", "hooked"])
def test_spectral_norm_divides_by_the_norm_of_the_weights_that_are_measured(how: str) -> None:
    spec = described_with("net_with_spectral_norm", "draws", how=how)
    assert spec.description is not None and spec.description.num_running_statistics == 2
    fresh, trained = trainer_of(spec), trainer_of(spec)
    trained.train(inner_work(5), lambda _: None)
    parameters = np.empty(spec.num_parameters, np.float32)
    trained.publish(parameters, 0)
    loss = fresh.evaluate_at(parameters)
    own = [each.clone() for each in trained._engine.vectors()]
    assert trained.evaluate_at(parameters) == loss != trained.evaluate_at(-2 * parameters)
    assert all(map(torch.equal, own, trained._engine.vectors())), "training goes on by its own"
    module, _ = run_functions.net_with_spectral_norm(how=how)
    copy_parameters(module, layout_of(spec), parameters)
    held_out = torch.stack([run_functions.draws()[1][i] for i in range(64)])
    untold = module.eval()(held_out).square().mean().item()
    module.load_state_dict(beside_the_trained(spec, parameters, None), strict=False)
    exact = module(held_out).square().mean().item()
    assert loss.loss == pytest.approx(exact, rel=1e-4)
    assert loss.loss != pytest.approx(untold, rel=1e-3), "a test that can fail"
    for weight in (module[0].weight, module[2].weight):
        assert float(torch.linalg.matrix_norm(weight.detach(), 2)) == pytest.approx(1, abs=1e-4)


def test_a_loss_that_draws_is_the_same_at_each_measure_and_training_draws_as_without_any() -> None:
    spec = spec_of("tests.run_functions:net_with_noise", "tests.run_functions:noisy")
    fresh, trained = trainer_of(spec), trainer_of(spec)
    random.seed(5)
    trained.train(inner_work(3), lambda _: None)
    parameters, places = first_vector(spec), [0, 5, 5]
    random.seed(7)
    before = random.getstate(), torch.get_rng_state()
    loss, losses = fresh.evaluate_at(parameters), fresh.losses_at(parameters, places)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert trained.evaluate_at(parameters) == loss == fresh.evaluate_at(parameters)
    assert trained.losses_at(parameters, places) == losses
    assert losses[1] == losses[2] != losses[0]


@pytest.mark.parametrize("shape", [MeshShape(tensor=2), MeshShape(pipeline=2)])
def test_batch_norm_wants_ranks_with_the_whole_model(shape: MeshShape) -> None:
    spec = spec_of("tests.run_functions:net_with_batch_norm_and_plans", "tests.run_functions:rows")
    with pytest.raises(
        ConfigError, match="running statistics, as batch norm's, want ranks with the"
    ):
        check_shape(shape, spec)
    check_shape(MeshShape(replicate=2, shard=2), spec)


def test_a_dataset_may_make_its_own_batches() -> None:
    spec = undescribed("tests.run_functions:net", "tests.run_functions:padded")
    batch = FunctionData(spec).batch("training", np.array([0, 2]))
    assert batch.tolist() == [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]


def test_tensor_parallel_without_a_plan_is_refused_and_what_works_is_said() -> None:
    spec = spec_of("tests.run_functions:net_without_plan")
    with pytest.raises(ConfigError, match="the function of Net gives none") as caught:
        check_shape(MeshShape(tensor=2), spec)
    assert "replicate and shard work" in caught.value.next_step
    with pytest.raises(ConfigError, match=r"tp = 3 does not divide the rows of table\.weight = 40"):
        check_shape(MeshShape(tensor=3), spec_of())


@pytest.mark.parametrize("function", ["chain", "chain_with_metric_of_its_own"])
def test_a_metric_at_the_end_of_a_pipeline_is_of_what_the_loss_asks_for(function: str) -> None:
    spec = spec_of(f"tests.run_functions:{function}")
    ends = FunctionArchitecture(spec)
    module = random_module(spec)
    ends.stages = [module]
    batch = FunctionData(spec).batch("held_out", np.arange(7))
    (words,), _ = ends.enter((batch,))
    assert torch.equal(words, batch["words"])
    output = module(words)
    if function == "chain":
        assert ends.leave_metric(output, (batch,)) == ends.metric(module, (batch,))
    else:
        with pytest.raises(ConfigError, match="with something else than the loss does"):
            ends.leave_metric(output, (batch,))


def test_a_pipeline_of_a_function_is_refused_without_stages_or_with_more_ranks_than_stages() -> (
    None
):
    spec = spec_of("tests.run_functions:net")
    with pytest.raises(ConfigError, match="the function of Net names none in its plan") as caught:
        check_shape(MeshShape(pipeline=2), spec)
    assert "replicate and shard work, and tp" in caught.value.next_step
    spec = spec_of("tests.run_functions:chain")
    check_shape(MeshShape(pipeline=6), spec)
    with pytest.raises(ConfigError, match=r"7 stages .* and it has 6 modules one after another"):
        check_shape(MeshShape(pipeline=7), spec)


@pytest.mark.parametrize(
    "local",
    [LocalTraining(activation_checkpointing="selective"), LocalTraining(compile=True)],
    ids=["selective", "compile"],
)
def test_layers_of_a_function_are_recomputed_and_compiled_to_the_same_effect(
    local: LocalTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "compile_layers", partial(compile_layers, backend="aot_eager"))
    spec = spec_of("tests.run_functions:chain")
    losses = [
        trainer_of(spec, each).train(inner_work(5), lambda progress: None).loss
        for each in (PLAIN, local)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_what_is_done_layer_by_layer_is_refused_where_there_are_none() -> None:
    spec = spec_of("tests.run_functions:flat", "tests.run_functions:rows")
    check_local(spec, LocalTraining(micro_batch=1))
    for local in (
        LocalTraining(activation_checkpointing="selective"),
        LocalTraining(activation_checkpointing="full"),
        LocalTraining(compile=True),
    ):
        with pytest.raises(ConfigError, match="no layers were found in this model"):
            check_local(spec, local)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_scalars_are_adopted_trained_and_published_like_all_else(optimizer: str) -> None:
    spec = spec_of(
        "tests.run_functions:net_with_scalars", "tests.run_functions:pairs", optimizer=optimizer
    )
    trainer = trainer_of(spec)
    trainer.train(inner_work(3), lambda progress: None)
    found = np.zeros(spec.num_parameters, np.float32)
    trainer.publish(found, 0)
    places = {place.name: place.offset for place in layout_of(spec).places}
    gains = found[[places["gains.0"], places["gains.1"]]]
    assert not np.isclose(gains, (1.0, 2.0), atol=1e-4).any()
    assert np.allclose(gains, (1.0, 2.0), atol=0.2)


def test_scalars_are_not_sharded_and_that_is_said() -> None:
    with pytest.raises(ConfigError, match=r"the parameter gains\.0 has no dimension") as caught:
        refuse_scalars(Scaled())
    assert "set zero = 1 or shard = 1" in caught.value.next_step
    refuse_scalars(Net(4, 4))


def test_frozen_parameters_are_no_part_of_the_run_and_proved_by_their_digest() -> None:
    spec = spec_of("tests.run_functions:net_with_frozen_table")
    assert "table.weight" not in [t.name for t in spec.tensors]
    trainer = trainer_of(spec)
    trainer.take_base(None)
    trainer.train(inner_work(3), lambda progress: None)
    assert spec.description is not None and spec.description.frozen_digest is not None
    frozen = [name for name, p in random_module(spec).named_parameters() if not p.requires_grad]
    assert spec.description.frozen_values.keys() == {*frozen, *(name + SUMS for name in frozen)}
    other = spec.description.model_copy(update={"frozen_digest": "0" * 64})
    with pytest.raises(BadDataError, match="is not the same here: its digest is"):
        trainer_of(spec.model_copy(update={"description": other})).take_base(None)


def test_functions_in_a_run_file_are_checked() -> None:
    with pytest.raises(ConfigError, match='needs function = "MODULE:FUNCTION"'):
        validated({"data": {"source": "function"}}, origin="the test")
    with pytest.raises(ConfigError, match=r'goes with \[model\] source = "function"'):
        validated({"data": {"source": "function", "function": "a:b"}}, origin="the test")


def test_stages_of_one_rank_have_buffers_of_the_same_names() -> None:
    stages = [nn.BatchNorm1d(2, track_running_stats=False) for _ in range(2)]
    for stage in stages:
        stage.register_buffer("table", torch.ones(2))
    watch = BufferWatch(stages)
    watch.check()
    stages[0].get_buffer("table").data += 1
    with pytest.raises(ConfigError, match="the buffer table of a BatchNorm1d"):
        watch.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_of_a_vector_that_cannot_be_written_go_into_parameters_of_any_type(
    dtype: torch.dtype,
) -> None:
    module = nn.Linear(3, 2, dtype=dtype)
    module.scale = nn.Parameter(torch.ones((), dtype=dtype))
    layout = Layout.of([("weight", (2, 3)), ("bias", (2,)), ("scale", (1,))])
    vector = np.arange(9, dtype=np.float32)
    vector.flags.writeable = False
    copy_parameters(module, layout, vector)
    assert module.weight.tolist() == [[0, 1, 2], [3, 4, 5]] and module.bias.tolist() == [6, 7]
    assert module.scale.item() == 8 and module.weight.dtype == dtype
