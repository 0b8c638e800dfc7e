"""A loop that puts other weights over the swarm's ends with a sentence, and no other does."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import atoll
from atoll.moves import Adoption
from atoll.optimizers import Optimizers
from node.island.models.decoder_modules import Decoder
from node.island.ranks.faults import LoopGoneError
from tests.unit.loop_scene import ends, scene, work

SIZE = 200


class Masters(torch.optim.Optimizer):
    """Keeps weights of its own, as optimizers of bf16 parameters do, and writes them over the model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self._masters = [parameter.detach().clone() for parameter in model.parameters()]

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # of no use here
        for parameter, master in zip(self.param_groups[0]["params"], self._masters, strict=True):
            parameter.detach().copy_(master.add_(0.01))


@pytest.mark.parametrize("is_told", [False, True])
async def test_an_optimizer_that_keeps_weights_of_its_own_ends_the_loop(
    tmp_path: Path, is_told: bool
) -> None:
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        masters = Masters(model)
        plain = torch.optim.SGD(model.parameters(), lr=0.01)

        def train(swarm: atoll.Swarm) -> int:
            steps = 0
            while not swarm.is_over:
                for parameter in model.parameters():
                    parameter.grad = -torch.ones_like(parameter)
                (masters if is_told else plain).step()
                swarm.step(tokens=1)
                steps += 1
            return steps

        thread = await one.joined(train, model=model)
        for round in (1, 2):
            one.vectors.parameters[:] += 1.0
            if round == 2 and is_told:
                with pytest.raises(LoopGoneError, match="has put weights of this loop's own back"):
                    await one.train(work(2))
                break
            await one.train(work(round))
            await one.island.publish(0)
            await one.island.adopt(0)
        if not is_told:
            await one.stops(thread)
            assert one.ended == [6]
        await ends(thread)


@pytest.mark.parametrize("is_kept", [False, True])
async def test_a_backward_pass_through_what_was_computed_before_step_is_told_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_kept: bool
) -> None:
    """As of a GAN that calls step() between its networks' turns."""
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def squares() -> Tensor:
            return torch.stack([each.square().sum() for each in model.parameters()]).sum()

        def train(swarm: atoll.Swarm) -> None:
            squares().backward()
            before = squares()
            swarm.step(tokens=1)
            if not is_kept:
                optimizer.step()
            before.backward()

        thread = await one.joined(train, model=model)
        if is_kept:
            await one.train(work(1, steps=1))
            await one.island.publish(0)
            one.vectors.parameters[:] += 1.0
            await one.island.adopt(0)
        with pytest.raises(LoopGoneError, match="modified by an inplace operation"):
            await one.train(work(2, steps=2))
        await ends(thread)
        assert ("call step() after the last backward pass" in caplog.text) is is_kept


def rounds(
    draws: torch.Generator,
    *,
    steps: int,
    length: float,
    rate: float,
    spread: float,
    keeps: float = 0.0,
    pull: float = 0.0,
) -> None:
    """Eight rounds of a loop whose steps have a common direction.

    It `keeps` so much of its own weights, or its fifth step has such a `pull` to them.
    """
    adoption = Adoption()
    direction = torch.randn(SIZE, generator=draws)
    state = torch.zeros(SIZE)
    own = before = state.clone()

    def step(values: Tensor) -> Tensor:
        return values + length * (direction + spread * torch.randn(SIZE, generator=draws))

    for _ in range(8):
        for number in range(steps):
            own = step(own)
            if number == 4:
                own = own + pull * (before - own)
            adoption.took_a_step(own)
        if adoption.is_undone():
            raise adoption.refusal()
        others = steps * length * (direction + 0.5 * torch.randn(SIZE, generator=draws))
        state = state + rate * (0.5 * (own - state) + 0.5 * others)
        adoption.took_over(own, state)
        before = own
        own = keeps * own + (1 - keeps) * state


@given(
    steps=st.integers(1, 40),
    rate=st.floats(0.0, 2.0),
    spread=st.floats(0.0, 5.0),
    seed=st.integers(0, 99),
)
def test_a_loop_that_trains_on_from_what_it_took_over_is_let_be(
    steps: int, rate: float, spread: float, seed: int
) -> None:
    draws = torch.Generator().manual_seed(seed)
    rounds(draws, steps=steps, length=1e-3, rate=rate, spread=spread)


@pytest.mark.parametrize("rate", [0.3, 0.7, 1.0])
def test_a_loop_that_goes_on_from_its_own_is_found_after_some_rounds(rate: float) -> None:
    draws = torch.Generator().manual_seed(0)
    with pytest.raises(atoll.ModelMismatchError, match="in 2 rounds one after another"):
        rounds(draws, steps=30, length=1e-3, rate=rate, spread=1.0, keeps=1.0)


@pytest.mark.parametrize("pull", [0.5, 0.9])
def test_a_loop_that_is_pulled_a_part_of_the_way_back_is_found_too(pull: float) -> None:
    """As by slow weights that an optimizer keeps where nobody finds them."""
    draws = torch.Generator().manual_seed(0)
    with pytest.raises(atoll.ModelMismatchError, match="all or in part"):
        rounds(draws, steps=30, length=1e-3, rate=0.7, spread=1.0, pull=pull)


@pytest.mark.parametrize("puts_back", [True, False])
async def test_an_evaluation_that_leaves_other_weights_ends_the_loop(
    tmp_path: Path, puts_back: bool
) -> None:
    """As an RWKV does, which scales its weights back at its next training step."""
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)

        def evaluate() -> float:
            with torch.no_grad():
                for factor in (2.0, 0.5) if puts_back else (2.0,):
                    next(model.parameters()).mul_(factor)
            return 1.0

        thread = await one.joined(
            lambda swarm: swarm.step(tokens=1), model=model, evaluate=evaluate
        )
        await one.train(work(steps=1))
        if puts_back:
            found = await one.island.evaluate()
            assert found is not None and found.loss == 1.0
            await one.stops(thread)
        else:
            with pytest.raises(LoopGoneError, match="has left other weights in the model than it"):
                await one.island.evaluate()
        await ends(thread)


@pytest.mark.parametrize("is_told", [True, False])
def test_lbfgs_learns_no_curvature_from_where_the_swarm_has_moved_the_weights(
    is_told: bool,
) -> None:
    inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))

    def lbfgs(model: nn.Module) -> torch.optim.LBFGS:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=2)

    def step(model: nn.Module, optimizer: torch.optim.LBFGS) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = (model(inputs).squeeze() - inputs.sum(1).sin()).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, fresh = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = lbfgs(model)
    for _ in range(3):
        step(model, optimizer)
    with torch.no_grad():
        model.weight += torch.tensor([[1.0, -2.0, 0.5]])
    if is_told:
        Optimizers(optimizer).forget_curvature()
    fresh.load_state_dict(model.state_dict())
    step(model, optimizer)
    step(fresh, lbfgs(fresh))
    assert torch.equal(model.weight, fresh.weight) is is_told, "a test that can fail"
