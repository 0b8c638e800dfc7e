"""What a loop does between join and step: it trains, and what else changes its weights is found."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.optimizers import Optimizers
from atoll.ranks import Ranks
from atoll.watch import Watch
from atoll.weights import Weights
from node.island.models.decoder_modules import Decoder
from node.island.ranks.faults import LoopGoneError
from tests.loop_optimizers import Lookahead, Masters, ScheduleFree
from tests.unit.loop_scene import Scene, ends, nudge, scene, work
from tests.unit.test_loop_weights import Small, flat, places_of, weights_of

Optimizer = torch.optim.Optimizer


def take_steps(model: nn.Module, optimizer: Optimizer, count: int) -> None:
    for _ in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def weights_beside(model: nn.Module, optimizer: Optimizer) -> tuple[Weights, Optimizers]:
    weights, optimizers = weights_of(model), Optimizers(optimizer)
    weights.copies_of = optimizers.copies_of
    weights.parameters.mul_(64).round_().div_(64)  # so that bf16 holds sums exactly
    weights.adopt(None, is_taken=True)
    return weights, optimizers


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, Lookahead, ScheduleFree])
def test_after_an_adoption_an_optimizer_goes_on_as_if_it_had_always_been_there(
    kind: Callable[..., Optimizer],
) -> None:
    """Of gradients that do not depend on the weights, both nodes' steps must be the same."""
    models = [Small(), Small()]
    trained = []
    for model, way in zip(models, (0.0, 2.0), strict=True):
        torch.manual_seed(3)
        optimizer = kind(model.parameters())
        weights, optimizers = weights_beside(model, optimizer)
        take_steps(model, optimizer, 3)
        assert optimizers.find_copies(model.parameters()) == (
            {"slow"} if kind is Lookahead else {"z"} if kind is ScheduleFree else set()
        )
        weights.parameters.copy_(flat(model) + way)
        weights.adopt(0, is_taken=True)
        take_steps(model, optimizer, 5)
        trained.append(flat(model) - way)
    torch.testing.assert_close(*trained, rtol=0, atol=1e-3 if kind is torch.optim.AdamW else 1e-5)


def test_fp32_masters_in_an_optimizers_state_begin_at_what_was_taken_over() -> None:
    model = Small(torch.bfloat16)
    optimizer = Masters(model.parameters())
    weights, optimizers = weights_beside(model, optimizer)
    take_steps(model, optimizer, 1)
    assert optimizers.find_copies(model.parameters()) == {"master"}
    weights.parameters.add_(4.0)
    weights.adopt(0, is_taken=True)
    take_steps(model, optimizer, 1)
    assert torch.equal(flat(model), (weights.parameters.bfloat16().float() - 0.25).bfloat16())


def test_gradients_in_a_state_are_no_copies_and_neither_is_the_parameter_itself() -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()  # as of the square of its norm
    optimizer.step()
    for parameter in model.parameters():
        kept = optimizer.state[parameter]["old"] = parameter.data.clone()
        parameter.data = kept  # as SAM undoes its first step
    optimizers = Optimizers(optimizer)
    assert optimizers.find_copies(model.parameters()) == set()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adafactor])
def test_the_count_of_steps_of_a_scalar_that_is_near_it_is_no_copy(
    kind: Callable[..., Optimizer],
) -> None:
    """As beside the temperature of a contrastive loss: moving the count would spoil the optimizer's state."""
    model = Small()
    model.scale = nn.Parameter(torch.tensor(1.0))
    optimizer = kind(model.parameters(), lr=1e-3)
    take_steps(model, optimizer, 1)
    assert optimizer.state[model.scale]["step"] == 1
    assert Optimizers(optimizer).find_copies(model.parameters()) == set()


async def rounds(one: Scene, count: int, steps: int = 3) -> None:
    for round in range(1, count + 1):
        await one.train(work(round, steps=steps))
        await one.island.publish(0)
        one.vectors.parameters[:] = one.vectors.published + 0.001
        await one.island.adopt(0)


def stepping(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    before: Callable[[int], None],
    after: Callable[[int], None],
) -> Callable[[atoll.Swarm], int]:
    def train(swarm: atoll.Swarm) -> int:
        number = 0
        while not swarm.is_over:
            before(number)
            take_steps(model, optimizer, 1)
            after(number)
            swarm.step(tokens=1)
            number += 1
        return number

    return train


def nothing(_number: int) -> None:
    """What a loop does beside its steps."""


async def test_what_a_schedule_free_optimizer_evaluates_is_exchanged_and_what_it_trains_goes_on(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        optimizer = ScheduleFree(model.parameters())
        evaluated = []

        def evaluate() -> float:
            optimizer.eval()
            evaluated.append(flat(model))
            optimizer.train()
            return 1.0

        thread = await one.joined(
            stepping(model, optimizer, before=nothing, after=nothing),
            model=model,
            optimizer=optimizer,
            evaluate=evaluate,
        )
        # With gradients of 1, z goes down by 0.25 a step, and x is the mean of all z so far.
        z, x, steps = 0.5, 0.5, 0
        for round in (1, 2):
            await one.train(work(round, steps=2))
            for _ in range(2):
                steps += 1
                z -= 0.25
                x += (z - x) / steps
            await one.island.publish(0)
            assert one.vectors.published == pytest.approx(x, abs=1e-5)
            one.vectors.parameters[:] = 3.0 * round
            await one.island.adopt(0)
            z, x = z + 3.0 * round - x, 3.0 * round
            assert (await one.island.evaluate()) is not None
            assert torch.equal(evaluated[-1], torch.full_like(evaluated[-1], x))
        await one.stops(thread)
        assert one.ended == [4]
        assert torch.equal(flat(model), torch.full_like(flat(model), 6.0)), "it ends with x"


async def test_a_state_that_was_loaded_with_its_weights_before_join_moves_with_them(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        optimizer = Lookahead(model.parameters())
        take_steps(model, optimizer, 3)
        before = [(p.detach() - optimizer.state[p]["slow"]).clone() for p in model.parameters()]
        train = stepping(model, optimizer, before=nothing, after=nothing)
        thread = await one.joined(train, model=model, optimizer=optimizer)
        await one.island.adopt()
        for parameter, way in zip(model.parameters(), before, strict=True):
            assert (parameter == 0.5).all()
            torch.testing.assert_close(parameter - optimizer.state[parameter]["slow"], way)
        await one.stops(thread)


async def refused(one: Scene, train: Callable[[atoll.Swarm], int], words: str, **how: Any) -> None:
    thread = await one.joined(train, **how)
    with pytest.raises(LoopGoneError, match=words):
        await rounds(one, 3)
    await ends(thread)
    assert isinstance(one.ended[0], atoll.ModelMismatchError), one.ended


@pytest.mark.parametrize("when", [0, 2, 7])
@pytest.mark.parametrize("is_after", [False, True])
async def test_a_checkpoint_that_is_loaded_after_join_ends_the_loop_before_it_is_published(
    tmp_path: Path, when: int, is_after: bool
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        saved = copy.deepcopy(model.state_dict())

        def load(number: int) -> None:
            if number == when:
                model.load_state_dict(saved)

        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        before, after = (nothing, load) if is_after else (load, nothing)
        train = stepping(model, optimizer, before=before, after=after)
        await refused(one, train, "something beside the optimizer has moved", model=model)
        if when == 7:
            assert abs(one.vectors.published - 0.5).max() < 0.01, "of the rounds before"
        else:
            assert not one.vectors.published.any()


@pytest.mark.parametrize("is_after", [False, True])
async def test_weights_that_are_kept_in_bounds_or_swapped_for_an_evaluation_train_on(
    tmp_path: Path, is_after: bool
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        average = copy.deepcopy(model.state_dict())

        def do_much(_number: int) -> None:
            for parameter in model.parameters():
                parameter.data.clamp_(-1.0, 1.0)
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(average)
            model.load_state_dict(own)
            model.to(torch.float64).to(torch.float32)

        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        before, after = (nothing, do_much) if is_after else (do_much, nothing)
        size = len(one.vectors.parameters)
        one.vectors.parameters[:] = torch.randn(size, generator=torch.Generator().manual_seed(1))
        thread = await one.joined(
            stepping(model, optimizer, before=before, after=after), model=model
        )
        await rounds(one, 4)
        await one.stops(thread)
        assert one.ended == [12]


@pytest.mark.parametrize("is_given", [True, False])
async def test_parameters_that_are_replaced_in_mid_run_end_the_loop_that_steps_the_old_ones(
    tmp_path: Path, is_given: bool
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        parameters = list(model.parameters())

        def replace(number: int) -> None:
            if number == 4:
                model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

        def train(swarm: atoll.Swarm) -> int:
            number = 0
            while not swarm.is_over:
                replace(number)
                swarm.step(tokens=1)
                number += 1
            return number

        how = {"optimizer": optimizer} if is_given else {}
        thread = await one.joined(train, model=model, **how)
        words = "the optimizer does not step" if is_given else "24 inner steps have changed nothing"
        with pytest.raises(LoopGoneError, match=words):
            await rounds(one, 12)
        await ends(thread)


async def test_a_weight_that_is_parametrized_in_mid_run_is_named_and_nothing_published(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        linear = next(m for m in model.modules() if isinstance(m, nn.Linear))

        def train(swarm: atoll.Swarm) -> int:
            nudge(model)
            swarm.step(tokens=1)
            nn.utils.parametrizations.weight_norm(linear)
            nudge(model)
            swarm.step(tokens=1)
            swarm.step(tokens=1)
            return 3

        await refused(one, train, "and this model has no such tensor", model=model)


async def test_an_average_that_is_left_in_the_model_ends_the_loop(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        average: list[Tensor] = []

        def swap(number: int) -> None:
            if not average:
                average.extend(parameter.detach() + 0.01 for parameter in model.parameters())
            if number == 8:
                for parameter, mean in zip(model.parameters(), average, strict=True):
                    parameter.data.copy_(mean)

        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        train = stepping(model, optimizer, before=nothing, after=swap)
        await refused(one, train, "or an average that is left in the model", model=model)


class Clipping(torch.optim.SGD):
    """Keeps weights and gradients within bounds by itself."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # of no use here
        parameters = self.param_groups[0]["params"]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        super().step()
        for parameter in parameters:
            parameter.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("where", ["after each step", "in a hook", "in its step"])
def test_weights_that_are_clipped_may_come_back_into_bounds_that_the_swarm_has_left(
    where: str,
) -> None:
    """As a WGAN's critic, most of whose weights are at their bounds; momentum takes them beyond."""
    model = Small()
    kind = Clipping if where == "in its step" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-4)

    def clip(*_: object) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    if where == "in a hook":
        optimizer.register_step_post_hook(clip)
    weights, optimizers = weights_beside(model, optimizer)
    clip()
    watch = Watch(model, places=places_of(model), optimizers=optimizers, ranks=Ranks.of(model))
    watch.given(weights.bits(), None)
    factors = torch.tensor([1.1, 1.1, 0.9]).repeat(len(flat(model)))[: len(flat(model))]

    def round() -> None:
        for number in range(4):
            take_steps(model, optimizer, 1)
            if where == "after each step":
                clip()
            watch.took_a_step(is_first=number == 0, counts=True)
        watch.ends(4, weights.bits)
        own = watch.values()
        weights.parameters.copy_(flat(model) * factors)
        weights.adopt(0, is_taken=True)
        watch.given(weights.bits(), own)

    try:
        for _ in range(4):
            round()
    finally:
        watch.close()


def test_an_embedding_with_sparse_gradients_trains_and_is_seen_to_learn() -> None:
    model = nn.Embedding(8, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights, optimizers = weights_beside(model, optimizer)
    watch = Watch(model, places=places_of(model), optimizers=optimizers, ranks=Ranks.of(model))
    watch.given(weights.bits(), None)
    model(torch.tensor([3, 3])).sum().backward()
    optimizer.step()
    watch.took_a_step(is_first=True, counts=True)
    watch.ends(1, weights.bits)
    watch.close()
    assert watch.has_moved and not watch.advice(follows=True)


def test_optimizers_of_a_parameter_each_as_in_a_backward_pass_are_not_looked_at_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.ModuleList(nn.Linear(3, 3) for _ in range(10))
    alone = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    watch = Watch(model, places=places_of(model), optimizers=Optimizers(None), ranks=alone)
    watch.given({}, None)
    looks: list[Tensor] = []
    values = watch.values

    def counted() -> Tensor:
        looks.append(values())
        return looks[-1]

    monkeypatch.setattr(watch, "values", counted)
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in model.parameters()]
    for _ in range(3):
        for optimizer in optimizers:
            take_steps(model, optimizer, 1)
        watch.took_a_step(is_first=False, counts=True)
    assert len(looks) == 3
    watch.ends_alone()
    take_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    assert len(looks) == 6
    watch.close()


async def test_a_loop_that_calls_step_for_each_micro_batch_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def train(swarm: atoll.Swarm) -> int:
            number = 0
            while not swarm.is_over:
                if number % 2 == 1:
                    take_steps(model, optimizer, 1)
                swarm.step(tokens=1)
                number += 1
            return number

        thread = await one.joined(train, model=model)
        await rounds(one, 3, steps=6)
        await one.stops(thread)
        assert caplog.text.count("the optimizer has taken 3 steps in 6 calls of step()") == 1


@pytest.mark.parametrize("follows", [False, True])
async def test_a_schedule_by_the_steps_of_a_loop_is_told_once_unless_it_follows_the_run(
    tmp_path: Path, follows: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def train(swarm: atoll.Swarm) -> None:
            number = 0
            while not swarm.is_over:
                far = swarm.progress if follows else number / 100
                optimizer.param_groups[0]["lr"] = 1e-4 * (1 - far / 2)
                take_steps(model, optimizer, 1)
                swarm.step(tokens=1)
                number += 1

        thread = await one.joined(train, model=model, optimizer=optimizer)
        await rounds(one, 4, steps=5)
        await one.stops(thread)
        words = "the learning rate changes by a schedule of this loop's own"
        assert caplog.text.count(words) == (not follows)


async def test_what_a_loop_leaves_untrained_of_the_run_is_told_once_by_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        *trained, last = model.parameters()
        last.requires_grad_(False)
        optimizer = torch.optim.SGD(trained, lr=1e-4)
        last.requires_grad_(True)  # as the run has it, when the loop joins
        train = stepping(model, optimizer, before=nothing, after=nothing)
        thread = await one.joined(train, model=model)
        await rounds(one, 5, steps=10)
        await one.stops(thread)
        name = list(dict(model.named_parameters()))[-1]
        assert (
            caplog.text.count(f"30 inner steps have changed nothing of {name}, which the run") == 1
        )


@pytest.mark.parametrize("teaches", [False, True])
async def test_steps_without_anything_to_learn_are_told_and_only_others_that_change_nothing_end_it(
    tmp_path: Path, teaches: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As in GRPO while no answer has a reward; but a gradient and a learning rate of 0 is a mistake."""
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.0 if teaches else 1e-3, weight_decay=0
        )

        def train(swarm: atoll.Swarm) -> None:
            while not swarm.is_over:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, float(teaches))
                optimizer.step()
                swarm.step(tokens=1)

        thread = await one.joined(train, model=model)
        if teaches:
            with pytest.raises(
                LoopGoneError, match="have changed nothing of the model that joined"
            ):
                await rounds(one, 3, steps=10)
        else:
            await rounds(one, 4, steps=10)
            await one.stops(thread)
            assert caplog.text.count("30 inner steps had gradients of nothing but zeros") == 1
            assert "have changed nothing of" not in caplog.text
        await ends(thread)


@pytest.mark.parametrize("has_gradient", [False, True])
async def test_steps_that_told_no_tokens_may_change_nothing_however_many_they_are(
    tmp_path: Path, has_gradient: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As in GRPO while no answer has a reward: with a gradient of zeros, or without the optimizer's step."""
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def train(swarm: atoll.Swarm) -> bool:
            while not swarm.is_over:
                if has_gradient:
                    for parameter in model.parameters():
                        parameter.grad = torch.zeros_like(parameter)
                    optimizer.step()
                swarm.step(tokens=0)
            return True

        thread = await one.joined(train, model=model)
        await rounds(one, 4, steps=10)
        await one.stops(thread)
        assert one.ended == [True]
        assert "nothing" not in caplog.text  # neither of gradients nor of what was changed


async def test_an_average_that_is_put_in_as_the_loop_leaves_is_not_contributed(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def train(swarm: atoll.Swarm) -> None:
            for _ in range(5):
                take_steps(model, optimizer, 1)
                swarm.step(tokens=1)
            for parameter in model.parameters():
                parameter.data += 1.0

        thread = await one.joined(train, model=model)
        with pytest.raises(LoopGoneError, match="something beside the optimizer has moved"):
            await one.train(work(steps=9))
        await ends(thread)
        assert isinstance(one.ended[-1], atoll.ModelMismatchError)


async def test_a_loop_whose_data_lead_back_to_its_own_optimum_in_some_steps_trains_on(
    tmp_path: Path,
) -> None:
    """As a convex problem does on a node with other data than the others have."""
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def train(swarm: atoll.Swarm) -> bool:
            while not swarm.is_over:
                for parameter in model.parameters():
                    parameter.grad = parameter.detach() - 3.0
                optimizer.step()
                swarm.step(tokens=1)
            return True

        thread = await one.joined(train, model=model)
        for round in range(1, 6):
            await one.train(work(round, steps=20))
            await one.island.publish(0)
            one.vectors.parameters[:] = 0.5 * one.vectors.published - 0.5  # and of one at -1
            await one.island.adopt(0)
        await one.stops(thread)
        assert one.ended == [True]
