"""What is found out of a function's model before there is a run, and what is refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from node.island.models.architecture import BufferWatch, tensors_of
from node.island.models.code import digest_of
from node.island.models.describing import describe, first_vector
from node.island.models.function import random_module
from node.models.describing import HAS_LOADED, describe_run
from protocol.errors import AtollError, BadDataError, ConfigError
from protocol.run.models import Description, FunctionModel
from protocol.run.run_files import load_run_folder
from protocol.run.run_spec import DataSection, RunSpec
from tests.run_functions import Centred, Net, pairs
from tests.unit.function_scene import HERE, described_with, spec_of, trainer_of, undescribed
from tests.unit.work_scene import inner_work


def test_a_description_says_tensors_layers_plan_operations_and_code() -> None:
    spec = spec_of()
    described = spec.description
    assert described is not None
    assert spec.tensors[0].name == "table.weight" and spec.tensors[0].layer is None
    assert {t.layer for t in spec.tensors} == {None, 0, 1, 2}
    assert described.tensor_plan["layers.*.up"] == "column"
    assert described.flops_per_token == 6 * (3 * 2 * 16 * 32 + 16 * 3)
    own = {f.relative_to(HERE).as_posix() for f in (HERE / "tests").rglob("*.py")}
    assert described.sources.keys() == own, "of what is installed, its package"
    code = HERE / "tests" / "run_functions.py"
    assert described.sources["tests/run_functions.py"] == digest_of(code)


@pytest.mark.parametrize("rows", [255, 256])
def test_a_table_with_fewer_rows_than_there_are_tokens_is_refused_when_the_run_is_made(
    rows: int,
) -> None:
    spec = RunSpec(
        model=FunctionModel(
            source="function",
            function="tests.run_functions:bigrams",
            arguments={"rows": rows},
            context=16,
        ),
        data=DataSection(source="text", paths=("*.txt",)),
    )
    spec = spec.model_copy(update={"description": describe(spec, HERE)})
    if rows == 256:
        first_vector(spec)
        return
    with pytest.raises(BadDataError, match="have 256 different tokens, and the loss of"):
        first_vector(spec)


def test_a_buffer_that_training_changes_is_refused_by_name_but_for_running_statistics() -> None:
    with pytest.raises(ConfigError, match=r"changes the buffer 0\.\w+ of a Centred") as caught:
        spec_of("tests.run_functions:net_with_own_mean", "tests.run_functions:rows")
    assert "make it a parameter" in caught.value.next_step
    assert "persistent=False" in caught.value.next_step
    with_cache = described_with("net_with_own_mean", "rows", persistent=False)
    trainer_of(with_cache).train(inner_work(2), lambda _: None)
    described = spec_of("tests.run_functions:net_with_batch_norm", "tests.run_functions:rows")
    assert described.description is not None
    assert described.description.num_running_statistics == 1
    module = nn.Sequential(nn.BatchNorm1d(4), Centred(4))
    watch = BufferWatch([module])
    module.eval()(torch.ones(2, 4))
    watch.check()
    module[0].train()(torch.ones(2, 4))
    watch.check()
    module.train()(torch.ones(2, 4))
    with pytest.raises(ConfigError, match=r"changes the buffer 1\.mean"):
        watch.check()


@pytest.mark.parametrize(
    ("kind", "words"),
    [("drawn", "is another at each call"), ("of weights", "is made of parameters")],
)
def test_a_buffer_that_is_not_the_same_everywhere_is_refused_by_name(kind: str, words: str) -> None:
    def described(of: str) -> RunSpec:
        spec = undescribed("tests.run_functions:net_with_waves", "tests.run_functions:rows")
        model = spec.model.model_copy(update={"arguments": {"kind": of}})
        spec = spec.model_copy(update={"model": model})
        return spec.model_copy(update={"description": describe(spec, None)})

    with pytest.raises(ConfigError, match=f"the buffer waves of a Waves {words}") as caught:
        described(kind)
    assert "requires_grad=False" in caught.value.next_step
    assert {described(of).num_parameters for of in ("frozen", "seeded", "sparse")} == {5}


@pytest.mark.parametrize(
    ("dtype", "next_step"), [("bfloat16", "module.float"), ("complex64", "view_as_complex")]
)
def test_a_parameter_of_another_type_is_refused_with_what_to_make_of_it(
    dtype: str, next_step: str
) -> None:
    spec = undescribed("tests.run_functions:net_with_type", "tests.run_functions:rows")
    model = spec.model.model_copy(update={"arguments": {"dtype": dtype}})
    with pytest.raises(ConfigError, match=f"the parameter weight is torch.{dtype}") as caught:
        describe(spec.model_copy(update={"model": model}), None)
    assert next_step in caught.value.next_step


@pytest.mark.parametrize(
    ("model", "data", "match"),
    [
        ("net_with_unused", "rows", "the loss does not depend on the parameter unused.weight"),
        ("nothing", "samples", r"returns NoneType instead of \(module, loss\)"),
        ("failing", "samples", r"failed: ZeroDivisionError: at depth 1 \(run_functions\.py, line"),
        ("none_such", "samples", "has no function 'none_such'"),
        ("net", "nothing", r"returns NoneType instead of \(training, held_out\)"),
        ("samples", "samples", r"returns Samples where a torch module should be"),
        (
            "net_with_a_loss_for_each",
            "samples",
            r"gives a tensor of shape \[2\] instead of a scalar",
        ),
        (
            "net_with_a_mistake",
            "samples",
            r"the loss .* fails with two samples, on c\w+: KeyError: 'wrods' \(run_functions\.py, line",
        ),
        (
            "net",
            "ragged",
            r"no batch can be made: RuntimeError: stack expects each tensor .* entry 1; give items",
        ),
        ("net", "stream", r"a training dataset of type range_iterator, which has no __len__"),
    ],
)
def test_what_is_no_model_or_no_data_is_told_in_a_sentence(
    model: str, data: str, match: str
) -> None:
    with pytest.raises(AtollError, match=match):
        spec_of(f"tests.run_functions:{model}", f"tests.run_functions:{data}")


def test_a_module_without_values_is_refused_with_what_gives_it_some() -> None:
    spec = undescribed("tests.run_functions:net_on_meta", "tests.run_functions:samples")
    with pytest.raises(
        BadDataError, match=r"on the meta device, where table\.weight has no"
    ) as told:
        random_module(spec)
    assert "to_empty" in told.value.next_step


def test_a_function_that_reads_the_values_of_parameters_is_told_that_there_are_none() -> None:
    with pytest.raises(ConfigError, match="cannot be called on meta tensors") as told:
        spec_of("tests.run_functions:net_that_reads_its_weights")
    assert "read no values of parameters, as torch's orthogonal does" in told.value.next_step


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("besides", r"layers\.1 takes something else than what layers\.0 gives"),
        ("alone", "squash takes something else than what layers.3 gives"),
        ("afterwards", "the model gives something else than what head gives"),
        ("twice", "squash is called twice"),
        ("left out", "the model gives something else than what squash gives"),
        ("unknown", r"they name 'blocks\.\*', and the model has no such module"),
        ("nested", "they name layers.0 twice, or a part of it besides"),
        ("more than a call", "has no attribute 'head'"),
    ],
)
def test_stages_that_are_no_chain_are_refused_when_described(how: str, match: str) -> None:
    spec = undescribed("tests.run_functions:unchained", "tests.run_functions:samples")
    model = spec.model.model_copy(update={"arguments": {"how": how}})
    with pytest.raises(ConfigError, match=match) as caught:
        describe(spec.model_copy(update={"model": model}), HERE)
    assert '{"stages": ["embed", "layers.*", "head"]}' in caught.value.next_step


def test_stages_are_described_by_what_leaves_them_and_what_they_cost() -> None:
    described = spec_of("tests.run_functions:chain").description
    assert described is not None
    layers = [(f"layers.{i}",) for i in range(4)]
    # What has nothing to train goes with what comes after it: no gradient would begin there.
    modules = [unit.modules for unit in described.stages]
    assert modules == [("table",), *layers, ("squash", "head")]
    assert [unit.output for unit in described.stages] == [(16,)] * 5 + [(40,)]
    costs = [unit.operations for unit in described.stages]
    assert costs == [0, *[2 * 2 * 16 * 32] * 4, 2 * 16 * 40]


@pytest.mark.parametrize(
    ("kind", "compares"),
    [
        ("mean", False),
        ("weighted", False),
        ("counted", False),
        ("noisy", False),
        ("negatives", True),
        ("noisy negatives", True),
        ("over the batch", True),
        ("of two", True),
    ],
)
def test_a_loss_over_samples_of_a_batch_together_is_known(kind: str, compares: bool) -> None:
    described = trying_a_loss(kind)
    assert described.compares_samples == compares
    assert described.num_samples == len(pairs()[0])


@pytest.mark.parametrize(
    ("how", "is_loaded"),
    [
        ("drawn", False),
        ("drawn from a seed of its own", False),
        ("loaded", True),
        ("loaded but for a head", True),
        ("a head alone", False),
    ],
)
def test_weights_that_a_function_loads_are_told_from_those_that_it_draws(
    how: str, is_loaded: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    torch.save(Net(16, 40).state_dict(), tmp_path / "checkpoint.pt")
    (tmp_path / "run.toml").write_text(
        '[model]\nsource = "function"\nfunction = "tests.run_functions:net_of_checkpoint"\n'
        f'arguments = {{ file = "{tmp_path / "checkpoint.pt"}", how = "{how}" }}\n'
        '[data]\nsource = "function"\nfunction = "tests.run_functions:samples"\n[inner]\nbatch = 8\n'
    )
    set_seed = torch.manual_seed
    facts = describe_run(tmp_path, source=None, is_forced=False)
    assert torch.manual_seed is set_seed
    assert facts["has_loaded"] == is_loaded
    assert (HAS_LOADED in facts["notes"]) == is_loaded
    described = load_run_folder(tmp_path, "run.toml")
    assert described.goes_on_with_weights == is_loaded
    assert "has_loaded" not in described.canonical_json(), "nodes are not sent it"
    assert not [told for told in recwarn if "no-op" in str(told.message)]


def test_a_batch_with_anything_but_tensors_is_refused_when_the_run_is_made() -> None:
    with pytest.raises(
        BadDataError, match="has 'thing 0' of type str, and ranks take tensors alone"
    ):
        spec_of("tests.run_functions:net_with_scalars", "tests.run_functions:named_things")


def test_a_parameter_without_values_is_refused_by_name_and_a_frozen_one_is_not() -> None:
    module = nn.Linear(4, 1)
    module.prompts = nn.Parameter(torch.empty(0, 4))
    with pytest.raises(ConfigError, match=r"prompts of shape \[0, 4\] has no values to train"):
        tensors_of(module)
    module.prompts.requires_grad_(False)
    assert [shape.name for shape in tensors_of(module)] == ["weight", "bias"]


def test_parameters_that_are_two_over_the_same_values_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"table\.weight and head\.weight are two over the same"):
        first_vector(spec_of("tests.run_functions:net_tied_by_data", "tests.run_functions:rows"))


def test_a_codebook_is_refused_when_the_run_is_made() -> None:
    """Shapes do not show what is written to `.data`."""
    with pytest.raises(ConfigError, match="changes the buffer codes of a Coded"):
        trying_a_loss("codebook")


def test_a_loss_that_is_a_sum_over_its_batch_is_refused_with_what_to_return() -> None:
    with pytest.raises(BadDataError, match="is a sum over its batch: ") as caught:
        trying_a_loss("sum")
    assert "(sum, count)" in caught.value.next_step


def trying_a_loss(kind: str) -> Description:
    description = described_with("net_with_a_loss", "pairs", kind=kind).description
    assert description is not None
    return description
