"""Code that a run brings: who may run it, what belongs to it, and what an export has of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from node.island.models.code import (
    check_functions,
    code_digest,
    digest_of,
    file_of,
    files_of,
    sources_of,
)
from node.island.models.describing import describe, first_vector
from node.island.models.function import random_module
from node.models.card import Origin
from node.models.export import export_model
from protocol.errors import (
    BadDataError,
    ExitCode,
    NoInputError,
    NotPermittedError,
    ProtocolMismatchError,
    UsageError,
)
from protocol.run.models import FunctionModel
from protocol.run.run_spec import DataSection, RunSpec
from protocol.wire.rounds import Digest
from tests import run_functions
from tests.unit.function_scene import spec_of, trainer_of, undescribed


def test_code_of_a_run_is_refused_with_the_line_that_allows_it() -> None:
    spec = spec_of()
    with pytest.raises(NotPermittedError, match="trains with code of its own") as caught:
        check_functions(spec, allowed=("other",), code=None)
    mine = f"my-run@{code_digest(spec)[:16]}"
    assert f'allow_functions = ["other", "{mine}"]' in caught.value.next_step
    assert caught.value.exit_code == ExitCode.NO_PERMISSION
    for allowed in ("my-run", mine):
        check_functions(spec, allowed=("other", allowed), code=None)


def test_a_permission_with_a_digest_is_for_that_code_and_shows_what_it_is(tmp_path: Path) -> None:
    spec = with_code(tmp_path)
    allowed = (f"my-run@{code_digest(spec)[:16]}",)
    check_functions(spec, allowed=allowed, code=tmp_path)
    (tmp_path / "layers.py").write_text("WIDTH = 9\n")
    changed = with_sources(spec, sources_of(spec, tmp_path))
    with pytest.raises(NotPermittedError, match="has allowed other code, my-run@") as caught:
        check_functions(changed, allowed=allowed, code=tmp_path)
    assert f"layers.py {digest_of(tmp_path / 'layers.py')[:12]}" in caught.value.what
    model = spec.model.model_copy(update={"arguments": {"command": "rm"}})
    with pytest.raises(NotPermittedError):
        check_functions(spec.model_copy(update={"model": model}), allowed=allowed, code=tmp_path)


def test_a_file_that_differs_from_the_runs_is_refused_and_never_run(tmp_path: Path) -> None:
    spec = with_code(tmp_path)
    check_functions(spec, allowed=("my-run",), code=tmp_path)
    (tmp_path / "own_data.py").write_text("raise SystemExit('it was run')\n")
    with pytest.raises(ProtocolMismatchError, match=r"own_data\.py is not the run's code"):
        check_functions(spec, allowed=("my-run",), code=tmp_path)


def with_sources(spec: RunSpec, sources: dict[str, str]) -> RunSpec:
    described = (spec.description or describe(spec_of(), None)).model_copy(
        update={"sources": sources}
    )
    return spec.model_copy(update={"description": described})


def with_code(folder: Path) -> RunSpec:
    """A run of two modules, of which one imports a third and a fourth lies deeper."""
    (folder / "own_model.py").write_text("import layers\n\ndef net(): ...\n")
    (folder / "own_data.py").write_text("def rows(): ...\n")
    (folder / "layers.py").write_text("WIDTH = 8\n")
    (folder / "parts").mkdir()
    (folder / "parts" / "head.py").write_text("DEPTH = 2\n")
    (folder / "notes.txt").write_text("of no run\n")
    spec = undescribed("own_model:net", "own_data:rows")
    return with_sources(spec, sources_of(spec, folder))


@pytest.mark.parametrize("name", ["own_model.py", "layers.py", "parts/head.py"])
def test_a_file_that_the_code_may_import_is_looked_at_as_well(tmp_path: Path, name: str) -> None:
    spec = with_code(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hook.py").touch()  # neither hidden folders nor other files are imported
    (tmp_path / "notes.txt").write_text("changed\n")
    check_functions(spec, allowed=("my-run",), code=tmp_path)
    kept = (tmp_path / name).read_text()
    (tmp_path / name).write_text("raise SystemExit('it was run')\n")
    with pytest.raises(ProtocolMismatchError, match=rf"{name} is not the run's code"):
        check_functions(spec, allowed=("my-run",), code=tmp_path)
    (tmp_path / name).write_text(kept)
    (tmp_path / "parts" / "json.py").touch()
    with pytest.raises(ProtocolMismatchError, match=r"parts/json\.py lies beside the run's code"):
        check_functions(spec, allowed=("my-run",), code=tmp_path)
    (tmp_path / "parts" / "json.py").unlink()
    (tmp_path / "parts" / "head.py").unlink()
    with pytest.raises(ProtocolMismatchError, match=r"parts/head\.py is not here"):
        check_functions(spec, allowed=("my-run",), code=tmp_path)


def test_code_behind_a_link_is_looked_at_and_links_in_circles_end(tmp_path: Path) -> None:
    code, elsewhere = tmp_path / "code", tmp_path / "elsewhere"
    code.mkdir()
    elsewhere.mkdir()
    (elsewhere / "deep.py").touch()
    (elsewhere / "back").symlink_to(code)
    (code / "linked").symlink_to(elsewhere)
    assert sorted(with_code(code).description.sources) == [  # type: ignore[union-attr]
        *("layers.py", "linked/deep.py", "own_data.py", "own_model.py", "parts/head.py")
    ]


def test_looking_for_a_module_in_a_package_runs_neither(tmp_path: Path) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    for name in ("__init__.py", "inner.py"):
        (package / name).write_text("raise SystemExit('it was run')\n")
    assert file_of("own_package.inner:f", tmp_path) == package / "inner.py"
    with pytest.raises(NoInputError, match=r"there is no module 'own_package\.other'"):
        file_of("own_package.other:f", tmp_path)


def test_of_a_module_that_is_installed_its_package_is_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_package" / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/__init__.py", "inner/net.py", "rows.py"):
        (tmp_path / "their_package" / name).touch()
    (tmp_path / "their_module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for function in ("their_package.inner.net:f", "their_package.inner:f"):
        found = files_of(undescribed(function, "their_module:rows"), tmp_path / "nothing")
        assert sorted(found) == [
            *("their_module.py", "their_package/__init__.py", "their_package/inner/__init__.py"),
            *("their_package/inner/net.py", "their_package/rows.py"),
        ]


def loaded_as_its_card_says(
    spec: RunSpec,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    code: Path | None = None,
    **how: Any,
) -> nn.Module:
    """What the code of the model card makes of an export, each of whose values is 1 more than at first."""
    trained = first_vector(spec) + 1
    origin = Origin(run="my-run", run_digest=spec.digest(), round=3, outer_digest=Digest(bytes(32)))
    export_model(spec=spec, parameters=trained, origin=origin, out=out, code=code, **how)
    lines = (out / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(out)
    found: dict[str, Any] = {}
    exec(lines, found)
    module: nn.Module = found["module"]
    return module


def test_the_card_of_a_model_with_batch_norm_computes_its_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of("tests.run_functions:net_with_batch_norm", "tests.run_functions:draws")
    module = loaded_as_its_card_says(spec, tmp_path / "out", monkeypatch)
    assert not module.training
    model, norm, *_ = module.children()
    before = model(torch.stack(list(run_functions.draws()[0])))
    torch.testing.assert_close(
        norm.get_buffer("running_mean"), before.mean(dim=0), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        norm.get_buffer("running_var"), before.var(dim=0), rtol=0.2, atol=1e-3
    )


def test_with_the_run_s_code_an_export_has_the_statistics_that_evaluations_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of("tests.run_functions:net_with_batch_norm", "tests.run_functions:draws")
    module = loaded_as_its_card_says(spec, tmp_path / "out", monkeypatch, code=tmp_path)
    assert not module.training
    trainer = trainer_of(spec)
    evaluation = trainer.evaluate_at(first_vector(spec) + 1)
    held_out = torch.stack(list(run_functions.draws()[1]))
    assert module(held_out).square().mean().item() == pytest.approx(evaluation.loss, rel=1e-5)
    assert "running_mean" not in (tmp_path / "out" / "README.md").read_text()


def test_the_card_of_a_run_of_loops_takes_a_module_that_comes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = RunSpec(
        model=FunctionModel(source="function", function="tests.run_functions:net_alone"),
        data=DataSection(source="loop"),
    )
    spec = bare.model_copy(update={"description": describe(bare, None)})
    module = loaded_as_its_card_says(spec, tmp_path / "out", monkeypatch, code=tmp_path)
    assert not module.training
    weight = module.get_submodule("0").weight
    assert isinstance(weight, torch.Tensor)
    assert float(torch.linalg.matrix_norm(weight.detach(), 2)) == pytest.approx(1, abs=1e-4)
    origin = Origin(run="my-run", run_digest=spec.digest(), round=3, outer_digest=Digest(bytes(32)))
    out = tmp_path / "without"
    export_model(spec=spec, parameters=first_vector(spec), origin=origin, out=out)
    assert "        module.train()(batch)\n" in (out / "README.md").read_text()


@pytest.mark.parametrize("is_of_loops", [False, True])
def test_an_export_without_statistics_names_only_ways_to_them_that_there_are(
    is_of_loops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of("tests.run_functions:net_with_batch_norm", "tests.run_functions:draws")
    if is_of_loops:
        spec = spec.model_copy(update={"data": DataSection(source="loop")})
    origin = Origin(run="my-run", run_digest=spec.digest(), round=3, outer_digest=Digest(bytes(32)))
    out = tmp_path / "out"
    problem = export_model(spec=spec, parameters=first_vector(spec), origin=origin, out=out)
    assert "the file is without its running statistics" in problem
    assert "README.md has lines" in problem
    assert ("--code" in problem) is not is_of_loops
    assert ("a loop holds after its block" in problem) is is_of_loops
    if is_of_loops:
        with pytest.raises(UsageError, match=r"""are \[data\] source = "loop\""""):
            loaded_as_its_card_says(spec, tmp_path / "with", monkeypatch, code=tmp_path)


def test_an_export_runs_no_code_that_is_not_the_run_s_and_none_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of("tests.run_functions:net_with_batch_norm", "tests.run_functions:draws")
    assert spec.description is not None
    other = spec.description.model_copy(
        update={"sources": dict.fromkeys(spec.description.sources, "0" * 64)}
    )
    changed = spec.model_copy(update={"description": other})
    with pytest.raises(ProtocolMismatchError, match="is not the run's code"):
        loaded_as_its_card_says(changed, tmp_path / "out", monkeypatch, code=tmp_path)
    with pytest.raises(UsageError, match="running statistics, as batch norm's, or frozen values"):
        loaded_as_its_card_says(spec_of(), tmp_path / "out", monkeypatch, code=tmp_path)
    assert not (tmp_path / "out").exists()


def test_with_the_run_s_code_an_export_has_what_is_not_trained_whatever_a_later_torch_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of("tests.run_functions:net_with_frozen_table")
    first = random_module(spec)
    torch.manual_seed(spec.run.seed + 1)
    module = loaded_as_its_card_says(spec, tmp_path / "out", monkeypatch, code=tmp_path)
    assert torch.equal(module.get_parameter("table.weight"), first.get_parameter("table.weight")), (
        "frozen"
    )
    assert torch.equal(module.get_parameter("head.bias"), first.get_parameter("head.bias") + 1)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "manual_seed" not in card and "and what is not trained." in card
    assert spec.description is not None
    other = spec.description.model_copy(update={"frozen_digest": "0" * 64})
    drawn_otherwise = spec.model_copy(update={"description": other})
    with pytest.raises(BadDataError, match="is not the same here: its digest is"):
        loaded_as_its_card_says(drawn_otherwise, tmp_path / "no", monkeypatch, code=tmp_path)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("has_code", [False, True])
def test_a_model_of_several_files_is_read_whole_as_its_card_says(
    has_code: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of("tests.run_functions:net_with_frozen_table")
    code, out = tmp_path if has_code else None, tmp_path / "out"
    module = loaded_as_its_card_says(spec, out, monkeypatch, code=code, shard_bytes=256)
    assert len(list(out.glob("*.safetensors"))) > 1
    first = random_module(spec).state_dict()
    for name, value in module.state_dict().items():
        assert torch.equal(value, first[name] + (0 if name == "table.weight" else 1)), name


def test_an_export_says_how_the_function_makes_its_model_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of("tests.run_functions:net_with_frozen_table")
    module = loaded_as_its_card_says(spec, tmp_path / "out", monkeypatch)
    first = random_module(spec)
    assert torch.equal(module.get_parameter("table.weight"), first.get_parameter("table.weight")), (
        "frozen"
    )
    assert torch.equal(module.get_parameter("head.bias"), first.get_parameter("head.bias") + 1)
