"""A loop that starts again goes on with what its optimizer had learnt, and its owner does nothing for it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import atoll
from atoll.moments import FOLDER
from node.island.models.decoder_modules import Decoder
from node.island.ranks.faults import LoopGoneError
from tests.islands.rank_scene import small_spec
from tests.loop_optimizers import Lookahead, ScheduleFree
from tests.unit.loop_scene import Scene, ends, scene, work

Optimizer = torch.optim.Optimizer
Make = Callable[[nn.Module], Any]

KEPT = f"{FOLDER}/rank-0-of-1.pt"


class Masters(Optimizer):
    """Adds to weights in fp32, with a momentum, and rounds them to the model's; counts steps in its group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # of no use here
        (group,) = self.param_groups
        group["count"] += 1
        for parameter in group["params"]:
            state = self.state[parameter]
            master = state.setdefault("master", parameter.float())
            mean = state.setdefault("momentum_buffer", torch.zeros_like(master))
            mean.mul_(0.9).add_(parameter.grad)
            parameter.copy_(master.sub_(mean, alpha=group["lr"] / group["count"]))


class Quantised(torch.Tensor):
    """As moments of 8 bits have their own kinds."""


def adamw(model: nn.Module, **changes: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01} | changes)


def two_halves(model: nn.Module) -> list[Optimizer]:
    """Of two optimizers each has a part, as those of a GAN."""
    parameters = list(model.parameters())
    return [
        torch.optim.AdamW(parameters[::2], lr=0.01),
        torch.optim.SGD(parameters[1::2], lr=0.1, momentum=0.9),
    ]


MAKES: dict[str, Make] = {
    "AdamW": adamw,
    "AdamW, fused": lambda model: adamw(model, fused=True),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5),
    "ASGD": lambda model: torch.optim.ASGD(model.parameters(), lr=0.01),
    "Lookahead": lambda model: Lookahead(model.parameters()),
    "schedule-free": lambda model: ScheduleFree(model.parameters()),
    "masters": lambda model: Masters(model.parameters()),
    "two": two_halves,
}


def training(model: nn.Module, optimizers: Any, *, until_round: int, steps: int = 0) -> Any:
    """A loop that takes other gradients in each step, alike in each start, and ends with that round."""
    each_of = optimizers if isinstance(optimizers, list) else [optimizers]

    def train(swarm: atoll.Swarm) -> None:
        for number in range(steps, 1000):
            draws = torch.Generator().manual_seed(number)
            for parameter in model.parameters():
                # Smaller and smaller, so that an optimizer which begins anew goes much further.
                size = parameter.shape
                parameter.grad = (torch.randn(size, generator=draws) + 1) * 0.7**number
                parameter.grad = parameter.grad.to(parameter.dtype)
            for each in each_of:
                each.step()
            told = swarm.step(tokens=1)
            if told.is_over or told.round >= until_round:
                break

    return train


async def rounds(one: Scene, first: int, last: int, *, steps: int = 4) -> list[np.ndarray]:
    published = []
    for round in range(first, last + 1):
        await one.train(work(round, steps=steps))
        await one.island.publish(0)
        published.append(one.vectors.published.copy())
        # What others trained is in it too.
        one.vectors.parameters[:] = 0.5 * (one.vectors.published + one.vectors.parameters) + 0.01
        await one.island.adopt(0)
    return published


async def starts(one: Scene, make: Make, *, until_round: int, seed: int, steps: int = 0) -> Any:
    torch.manual_seed(seed)
    model = Decoder(one.spec.decoder)
    optimizer = make(model)
    train = training(model, optimizer, until_round=until_round, steps=steps)
    return await one.joined(train, model=model, optimizer=optimizer), optimizer


async def ends_at(one: Scene, thread: Any, round: int) -> None:
    """The loop hears of this round and leaves."""
    with pytest.raises(LoopGoneError):
        await one.train(work(round, steps=4))
    await ends(thread)


@pytest.mark.parametrize("name", MAKES)
async def test_a_loop_that_starts_again_trains_as_if_it_had_never_ended(
    tmp_path: Path, name: str
) -> None:
    make, found = MAKES[name], []
    for is_restarted in (False, True):
        folder = tmp_path / str(is_restarted)
        folder.mkdir()
        async with scene(folder) as one:
            thread, _ = await starts(one, make, until_round=3 if is_restarted else 99, seed=1)
            await rounds(one, 1, 2)
            if is_restarted:
                await ends_at(one, thread, 3)
                thread, _ = await starts(one, make, until_round=99, seed=2, steps=8)
            found.append(np.concatenate(await rounds(one, 3, 4)))
            await one.stops(thread)
    never_ended, restarted = found
    assert not np.allclose(never_ended, 0.5, atol=1e-4), "it trains"
    np.testing.assert_allclose(restarted, never_ended, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (
            "another kind",
            "it is of torch.optim.adamw.AdamW, and this loop has torch.optim.adam.Adam",
        ),
        ("amsgrad", "amsgrad is True, and was False"),
        ("damaged", "it cannot be read"),
        ("another run", "it is of another run"),
        ("other rates", None),
        ("no state", "it is of torch.optim.adamw.AdamW, and this loop has torch.optim.sgd.SGD"),
    ],
)
async def test_what_does_not_fit_is_not_taken_and_the_loop_is_told_why(
    tmp_path: Path, then: str, why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    makes: dict[str, Make] = {
        "another kind": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        "amsgrad": lambda model: adamw(model, amsgrad=True),
        "other rates": lambda model: adamw(model, lr=0.5, weight_decay=0.2, betas=(0.8, 0.9)),
        "no state": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5),
    }
    spec = small_spec()
    async with scene(tmp_path, spec) as one:
        thread, _ = await starts(one, adamw, until_round=2, seed=1)
        await rounds(one, 1, 1)
        await ends_at(one, thread, 2)
    if then == "damaged":
        (tmp_path / KEPT).write_bytes(b"no file of torch")
    if then == "another run":
        spec = spec.model_copy(update={"run": spec.run.model_copy(update={"seed": 77})})
    caplog.clear()
    async with scene(tmp_path, spec) as one:
        thread, optimizer = await starts(one, makes.get(then, adamw), until_round=99, seed=2)
        await rounds(one, 2, 2)
        await one.stops(thread)
    anew = [each for each in caplog.messages if "this loop's optimizer begins anew" in each]
    goes_on = [each for each in caplog.messages if "goes on from the state that was kept" in each]
    assert (len(anew), len(goes_on)) == ((0, 1) if why is None else (1, 0))
    if why is None:
        (group,) = optimizer.param_groups
        assert (group["lr"], group["weight_decay"], group["betas"]) == (0.5, 0.2, (0.8, 0.9))
    else:
        assert f"its node's folder keeps: {why}" in anew[0]


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("turns", ["comes", "goes", "stays"])
async def test_a_scheduler_that_moves_momentum_and_bounds_may_come_and_go_between_two_starts(
    tmp_path: Path, turns: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def plain(model: nn.Module) -> Optimizer:
        if kind == "SGD":
            return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.8)
        return adamw(model, betas=(0.8, 0.9))

    def cycled(model: nn.Module) -> Optimizer:
        optimizer = plain(model)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=100)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    first, second = (plain if turns == "comes" else cycled), (plain if turns == "goes" else cycled)
    async with scene(tmp_path) as one:
        thread, _ = await starts(one, first, until_round=2, seed=1)
        await rounds(one, 1, 1)
        await ends_at(one, thread, 2)
        thread, optimizer = await starts(one, second, until_round=99, seed=2)
        await rounds(one, 2, 2)
        await one.stops(thread)
    assert sum("goes on from the state that was kept" in each for each in caplog.messages) == 1
    if turns == "goes":
        (group,) = optimizer.param_groups
        own = group["momentum"] if kind == "SGD" else group["betas"][0]
        assert own == 0.8, "a setting is that of the new start"


async def test_a_loop_that_loads_a_state_by_itself_keeps_that_one(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        thread, _ = await starts(one, adamw, until_round=2, seed=1)
        await rounds(one, 1, 1)
        await ends_at(one, thread, 2)

        def loaded(model: nn.Module) -> Optimizer:
            optimizer = adamw(model)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            return optimizer

        thread, optimizer = await starts(one, loaded, until_round=99, seed=2)
        await rounds(one, 2, 2)
        await one.stops(thread)
        assert {int(state["step"]) for state in optimizer.state.values()} == {1 + 4}


async def test_the_state_is_kept_while_a_loop_trains_for_it_may_be_killed(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        thread, _ = await starts(one, adamw, until_round=99, seed=1)
        await rounds(one, 1, 2)
        assert (tmp_path / KEPT).stat().st_mode & 0o777 == 0o600
        kept = torch.load(tmp_path / KEPT, weights_only=True)
        assert (kept["round"], kept["steps"]) == (1, 4), "and the next time a minute later"
        await one.stops(thread)
        assert torch.load(tmp_path / KEPT, weights_only=True)["round"] == 2


UNFIT: dict[str, tuple[Make, Any, str | None]] = {
    "no number": (adamw, torch.tensor(torch.nan), "exp_avg of {} has values that are no finite"),
    "a plain number that is none": (adamw, float("nan"), "exp_avg of {} is no number"),
    "a list": (adamw, [1, 2], "exp_avg of {} is of type list, no tensor and no number"),
    "a kind of tensor": (adamw, Quantised(), "exp_avg of {} is of type Quantised, no plain tensor"),
    "lbfgs": (lambda model: torch.optim.LBFGS(model.parameters()), None, "of type "),
    "nothing to keep": (lambda model: torch.optim.SGD(model.parameters(), lr=0.01), None, None),
}


@pytest.mark.parametrize("was_kept", [False, True])
@pytest.mark.parametrize("how", UNFIT)
async def test_a_state_that_is_of_no_use_is_not_kept_nor_is_an_older_one_and_that_is_said(
    tmp_path: Path, how: str, was_kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make, becomes, why = UNFIT[how]
    async with scene(tmp_path) as one:
        torch.manual_seed(1)
        model = Decoder(one.spec.decoder)
        optimizer = make(model)
        if was_kept:
            (tmp_path / KEPT).parent.mkdir()
            (tmp_path / KEPT).write_bytes(b"of an earlier start")
        name, first = next(iter(model.named_parameters()))

        def train(swarm: atoll.Swarm) -> None:
            while not swarm.is_over:
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step(lambda: 0.0)
                kept = optimizer.state[first].get("exp_avg")
                if becomes is not None:
                    optimizer.state[first]["exp_avg"] = becomes
                swarm.step(tokens=1)
                if becomes is not None:
                    optimizer.state[first]["exp_avg"] = kept

        thread = await one.joined(train, model=model, optimizer=optimizer)
        await rounds(one, 1, 1, steps=2)
        assert not (tmp_path / KEPT).exists()
        await one.stops(thread)
        assert one.ended == [None]
    told = [each for each in caplog.messages if "the optimizer's state is not kept" in each]
    assert len(told) == (why is not None or was_kept), "and once"
    for each in told:
        assert ("what was kept before is removed" in each) is was_kept
        assert (why or "it has none now").format(name) in each
        assert "begins with none" in each


async def test_of_a_loop_that_had_more_ranks_before_nothing_older_is_left(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    for name in ("rank-0-of-2.pt", "rank-1-of-2.pt"):
        (folder / name).write_bytes(b"of an earlier start")
    async with scene(tmp_path) as one:
        thread, _ = await starts(one, adamw, until_round=99, seed=1)
        await rounds(one, 1, 1)
        await one.stops(thread)
    assert [path.name for path in folder.iterdir()] == [Path(KEPT).name]


async def test_a_disk_that_takes_no_new_state_keeps_the_older_one_and_the_loop_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path) as one:
        thread, _ = await starts(one, adamw, until_round=99, seed=1)
        await rounds(one, 1, 1)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(torch, "save", full)
        await rounds(one, 2, 2)
        await one.stops(thread)
    assert torch.load(tmp_path / KEPT, weights_only=True)["round"] == 1
    (told,) = [each for each in caplog.messages if "could not be kept" in each]
    assert "a loop that starts again goes on from an older one" in told


async def test_a_disk_that_does_not_take_it_is_told_once_and_the_loop_trains_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).write_text("a file where a folder should be")
    async with scene(tmp_path) as one:
        thread, _ = await starts(one, adamw, until_round=99, seed=1)
        await rounds(one, 1, 3)
        await one.stops(thread)
        assert one.ended == [None]
    told = [each for each in caplog.messages if "state could not be kept" in each]
    assert len(told) == 1 and KEPT in told[0]
