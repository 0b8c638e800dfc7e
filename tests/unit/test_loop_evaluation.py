"""What a training loop measures the global parameters by, and how it is left after that."""

import copy
import linecache
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import atoll
from atoll.evaluation import digest_of_function
from node.island.island import Evaluation
from node.island.models.decoder_modules import Decoder
from node.island.ranks.faults import LoopGoneError
from tests.unit.loop_scene import Normed, ends, nudge, scene, work


async def test_a_loop_evaluates_the_global_parameters_by_its_own_function(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        seen = []

        def evaluate() -> tuple[float, int, float]:
            seen.append(next(model.parameters()).flatten()[0].item())
            return 1.5, 99, 0.75

        def train(swarm: atoll.Swarm) -> float:
            with torch.no_grad():
                next(model.parameters()).fill_(7.0)
            swarm.step(tokens=1)
            return next(model.parameters()).flatten()[0].item()

        thread = await one.joined(train, model=model, evaluate=evaluate)
        able = one.island.ability
        assert able.trains and able.evaluates and able.software.startswith("a loop with torch ")
        assert able.evaluates_by == digest_of_function(evaluate) != ""
        await one.train(work(steps=1))
        evaluation = await one.island.evaluate()
        assert evaluation == Evaluation(loss=1.5, tokens=99, metric=0.75)
        await one.stops(thread)
        assert (seen, one.ended) == ([0.5], [7.0]), "its own weights are back"


async def test_running_statistics_are_computed_for_the_global_parameters_and_for_the_end(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        model = Normed(one.spec)
        mean, seen = model.norm.get_buffer("running_mean"), list[float]()

        def see() -> None:
            # What the model makes of a batch: here its first parameter.
            value = next(model.module.parameters()).flatten()[0].item()
            model.norm(torch.full((2, 1), value))

        def evaluate() -> float:
            seen.append(mean.item())
            return 1.5

        def train(swarm: atoll.Swarm) -> float:
            with torch.no_grad():
                next(model.module.parameters()).fill_(7.0)
            see()
            swarm.step(tokens=1)
            seen.append(mean.item())
            return mean.item()

        thread = await one.joined(train, model=model, evaluate=evaluate, statistics=see)
        await one.train(work(steps=1))
        assert (await one.island.evaluate()) is not None
        assert seen == [0.5], "of the global parameters, whatever the loop has seen"
        one.vectors.parameters[:] = -1.0
        await one.island.adopt(0)
        await one.stops(thread)
        assert one.ended == [-1.0], "of those that the model ends with"


async def test_an_evaluation_draws_alike_each_time_and_the_loop_draws_on_as_if_there_were_none(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        seen: list[tuple[float, ...]] = []

        def evaluate() -> float:
            seen.append((torch.rand(()).item(), random.random(), np.random.rand()))
            torch.manual_seed(5)  # as one does who wants the same noise each time
            return 1.5

        def train(swarm: atoll.Swarm) -> bool:
            torch.manual_seed(7)
            wanted = torch.rand(2)[1].item()
            torch.manual_seed(7)
            torch.rand(())
            swarm.step(tokens=1)
            return torch.rand(()).item() == wanted

        thread = await one.joined(train, evaluate=evaluate)
        await one.train(work(steps=1))
        for _ in range(2):
            await one.island.evaluate()
        await one.stops(thread)
        assert one.ended == [True]
        assert len(seen) == 2 and seen[0] == seen[1]


async def test_a_metric_that_is_no_number_is_left_out_and_the_loss_counts(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        thread = await one.joined(
            lambda swarm: swarm.step(tokens=1), evaluate=lambda: (1.5, 99, math.nan)
        )
        await one.train(work(steps=1))
        assert await one.island.evaluate() == Evaluation(loss=1.5, tokens=99)
        await one.stops(thread)


@pytest.mark.parametrize(
    "found", [math.nan, None, (1.0, -3), (1.0, 2, 3, 4), (1.0, 2, "high"), torch.ones(2)]
)
async def test_an_evaluation_that_is_no_loss_ends_the_loop_with_what_it_was(
    tmp_path: Path, found: Any
) -> None:
    async with scene(tmp_path) as one:
        thread = await one.joined(lambda swarm: swarm.step(tokens=1), evaluate=lambda: found)
        await one.train(work(steps=1))
        with pytest.raises(LoopGoneError, match="and not a finite loss"):
            await one.island.evaluate()
        await ends(thread)
        assert isinstance(one.ended[0], atoll.SwarmError)


@pytest.mark.parametrize(
    ("is_average", "is_compiled"), [(False, False), (True, False), (False, True)]
)
async def test_an_average_that_is_measured_in_the_place_of_the_global_parameters_ends_the_loop(
    tmp_path: Path, is_average: bool, is_compiled: bool
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        forward = torch.compile(model, backend="eager", fullgraph=True) if is_compiled else model

        def evaluate() -> float:
            own = [parameter.clone() for parameter in model.parameters()]
            with torch.no_grad():
                for parameter in model.parameters() if is_average else ():
                    parameter.mul_(0.9)
                forward(torch.zeros(1, 4, dtype=torch.int64))
                for parameter, value in zip(model.parameters(), own, strict=True):
                    parameter.copy_(value)
            return 1.5

        thread = await one.joined(
            lambda swarm: swarm.step(tokens=1), model=model, evaluate=evaluate
        )
        await one.train(work(steps=1))
        if is_average:
            with pytest.raises(LoopGoneError, match="has measured other weights than those that"):
                await one.island.evaluate()
        else:
            found = await one.island.evaluate()
            assert found is not None and found.loss == 1.5
            await one.stops(thread)
        await ends(thread)


@pytest.mark.parametrize("measures", ["average", "both", "rounded copy"])
async def test_an_average_in_a_model_of_its_own_is_no_measure_of_the_swarm_and_may_be_beside_it(
    tmp_path: Path, measures: str
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        forward = torch.compile(model, backend="eager")
        average, rounded = AveragedModel(model), copy.deepcopy(model).bfloat16()
        unmade = nn.Module.__new__(Decoder)  # as while it is unpickled
        tokens = torch.zeros(1, 4, dtype=torch.int64)

        def evaluate() -> float:
            if measures == "rounded copy":
                rounded.load_state_dict(model.state_dict())
                return rounded(tokens).float().square().mean().item()
            loss = average(tokens).square().mean().item()
            return forward(tokens).square().mean().item() if measures == "both" else loss

        thread = await one.joined(
            lambda swarm: swarm.step(tokens=1), model=model, evaluate=evaluate
        )
        await one.train(work(steps=1))
        if measures == "average":
            with pytest.raises(
                LoopGoneError, match=r"has measured other weights .* may be its metric"
            ):
                await one.island.evaluate()
        else:
            assert (await one.island.evaluate()) is not None
            await one.stops(thread)
        await ends(thread)
        del unmade


@pytest.mark.parametrize(
    ("made", "is_told"), [("before", True), ("after", False), ("by torch", False), ("fixed", False)]
)
async def test_an_average_of_the_weights_that_join_has_replaced_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, made: str, is_told: bool
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        early = None if made == "after" else copy.deepcopy(model)
        by_torch = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

        def train(swarm: atoll.Swarm) -> None:
            average = early or copy.deepcopy(model)
            while not swarm.is_over:
                nudge(model)
                with torch.no_grad():
                    for slow, new in zip(average.parameters(), model.parameters(), strict=True):
                        slow.lerp_(new, 0.1 if made in ("before", "after") else 0.0)
                by_torch.update_parameters(model)
                swarm.step(tokens=1)

        thread = await one.joined(train, model=model)
        await one.train(work(steps=2))
        await one.stops(thread)
    assert one.ended == [None]
    assert ("an average of this model was made before join" in caplog.text) is is_told


@pytest.mark.parametrize("kind", ["list", "dictionary", "list after", "initial weights"])
async def test_an_average_kept_as_tensors_is_told_as_one_in_a_module_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        slow = [each.detach().clone() for each in model.parameters()]
        shadow = {name: each.detach().clone() for name, each in model.named_parameters()}

        def train(swarm: atoll.Swarm) -> None:
            late = [each.detach().clone() for each in model.parameters()]
            while not swarm.is_over:
                nudge(model)
                with torch.no_grad():
                    kept = {"list": slow, "list after": late}.get(kind, [])
                    for average, new in zip(kept, model.parameters(), strict=False):
                        average.lerp_(new, 0.1)
                    for name, new in model.named_parameters() if kind == "dictionary" else ():
                        shadow[name] = 0.9 * shadow[name] + 0.1 * new
                swarm.step(tokens=1)

        thread = await one.joined(train, model=model)
        await one.train(work(steps=2))
        await one.stops(thread)
    assert one.ended == [None]
    told = "an average of this model was made before join" in caplog.text
    assert told is (kind in ("list", "dictionary"))


async def test_a_model_that_is_saved_whole_as_it_is_evaluated_loads_and_runs(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        tokens = torch.zeros(1, 4, dtype=torch.int64)

        def evaluate() -> float:
            torch.save(model, tmp_path / "best.pt")
            return float(copy.deepcopy(model)(tokens).mean())

        thread = await one.joined(
            lambda swarm: swarm.step(tokens=1), model=model, evaluate=evaluate
        )
        await one.train(work(steps=1))
        found = await one.island.evaluate()
        await one.stops(thread)
        best = torch.load(tmp_path / "best.pt", weights_only=False)
        assert found is not None and found.loss == float(best(tokens).mean())


async def test_a_model_trains_on_in_its_own_modes_after_an_evaluation(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        frozen, *_ = list(model.children())
        frozen.eval()
        modes = [module.training for module in model.modules()]

        def evaluate() -> float:
            model.eval()  # and nobody calls train() again
            return 1.0

        def train(swarm: atoll.Swarm) -> list[bool]:
            swarm.step(tokens=1)
            return [module.training for module in model.modules()]

        thread = await one.joined(train, model=model, evaluate=evaluate)
        await one.train(work(steps=1))
        await one.island.evaluate()
        await one.stops(thread)
        assert one.ended == [modes]


def measure(scale: float) -> float:
    return scale


class Measure:
    def __call__(self) -> float:
        return 2.0


def test_functions_that_evaluate_are_told_apart_by_what_they_say() -> None:
    def measure_twice(scale: float) -> float:
        return 2 * scale

    made: dict[str, Any] = {}
    exec("def measure(): return 1.0", made)
    assert digest_of_function(None) == ""
    assert digest_of_function(partial(measure, 1.0)) == digest_of_function(measure)
    assert digest_of_function(Measure()) == digest_of_function(Measure.__call__)
    functions = (measure, measure_twice, Measure(), made["measure"])
    assert len({digest_of_function(function) for function in functions}) == 4


def test_what_exec_made_has_no_source_even_where_python_remembers_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, Any] = {}
    exec("def measure(): return 1.0", made)
    assert digest_of_function(made["measure"]) == "a function without source"
    lines = ["import train\n"]  # as Python 3.13 remembers those of `python -c`
    monkeypatch.setitem(linecache.cache, "<string>", (13, None, lines, "<string>"))
    assert digest_of_function(made["measure"]) == "a function without source"
