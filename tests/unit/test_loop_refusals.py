"""Which training loops a node refuses or ends, for their models and words are not the run's."""

import asyncio
import json
import socket
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from node.island.loops.door import SOCKET_FILE
from node.island.loops.messages import VERSION, Hello, word_of
from node.island.models.decoder_modules import Decoder
from node.island.ranks.faults import LoopGoneError
from protocol.run.models import Description
from protocol.run.run_spec import RunSpec
from tests.islands.rank_scene import small_spec
from tests.unit.loop_scene import Normed, come_in_bare, ends, nudge, scene, steps_on_samples, work


async def test_running_statistics_that_nobody_computes_are_refused_before_anything_moves(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        await ends(one.loop(steps_on_samples, model=Normed(one.spec)))
        (error,) = one.ended
        assert isinstance(error, atoll.ModelMismatchError)
        assert "norm (BatchNorm1d) keeps running statistics" in str(error)
        assert not one.island.ability.trains


async def test_a_buffer_that_the_first_step_changes_ends_the_loop_with_its_name(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        model = Normed(one.spec).eval()
        model.register_buffer("codebook", torch.zeros(3))

        def train(swarm: atoll.Swarm) -> None:
            model.get_buffer("codebook").add_(1.0)
            swarm.step(tokens=1)

        thread = await one.joined(train, model=model)
        with pytest.raises(LoopGoneError, match="changes the buffer codebook of a Normed"):
            await one.train(work())
        await ends(thread)
        assert isinstance(one.ended[0], atoll.ModelMismatchError)


class WithBody(nn.Module):
    """The run's decoder, and a layer beside it that is frozen."""

    def __init__(self, spec: RunSpec, value: float) -> None:
        super().__init__()
        self.module = Decoder(spec.decoder)
        self.body = nn.Linear(3, 3, bias=False).requires_grad_(False)
        nn.init.constant_(self.body.weight, value)


async def test_a_loop_with_another_frozen_body_than_the_run_s_is_refused_before_anything_moves(
    tmp_path: Path,
) -> None:
    spec = small_spec()
    spec = spec.model_copy(
        update={"description": Description(frozen_values={"body.weight": (2.0,) * 8})}
    )
    async with scene(tmp_path, spec) as one:
        model = WithBody(spec, 3.0)
        before = [parameter.clone() for parameter in model.parameters()]
        await ends(one.loop(steps_on_samples, model=model))
        (error,) = one.ended
        assert isinstance(error, atoll.ModelMismatchError)
        assert "body.weight is another one here" in str(error)
        assert all(map(torch.equal, before, model.parameters()))
        one.loop(steps_on_samples, model=WithBody(spec, 2.0))
        await one.is_here()


async def test_an_average_of_weights_within_the_model_ends_the_loop_with_its_name(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        model = WithBody(one.spec, 2.0)

        def train(swarm: atoll.Swarm) -> None:
            nudge(model)
            model.body.weight.data.lerp_(
                torch.ones(3, 3), 0.01
            )  # no version of torch's counts that
            swarm.step(tokens=1)

        thread = await one.joined(train, model=model)
        with pytest.raises(LoopGoneError, match=r"changes body\.weight, which is frozen"):
            await one.train(work())
        await ends(thread)


@pytest.mark.parametrize("added", [False, True])
async def test_a_layer_that_is_trained_from_some_round_on_and_not_by_the_run_ends_the_loop(
    tmp_path: Path, added: bool
) -> None:
    async with scene(tmp_path) as one:
        model = WithBody(one.spec, 2.0)

        def train(swarm: atoll.Swarm) -> None:
            nudge(model)
            swarm.step(tokens=1)
            if added:
                model.register_module("late", nn.Linear(3, 3, bias=False))
            else:
                model.body.requires_grad_(True)
            nudge(model)
            swarm.step(tokens=1)

        thread = await one.joined(train, model=model)
        await one.train(work(1, steps=1))
        name = "late" if added else "body"
        with pytest.raises(LoopGoneError, match=rf"trains {name}\.weight \[3, 3\], which the run"):
            await one.train(work(2))
        await ends(thread)


async def test_a_model_that_is_not_the_run_s_is_refused_before_anything_moves(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        wider = one.spec.decoder.model_copy(update={"ffn_size": 48})
        model = Decoder(wider)
        before = [parameter.clone() for parameter in model.parameters()]
        thread = one.loop(steps_on_samples, model=model)
        await ends(thread)
        (error,) = one.ended
        assert isinstance(error, atoll.ModelMismatchError)
        assert "gate_proj.weight is [48, 16] in this model and [24, 16] in the run" in str(error)
        assert all(map(torch.equal, before, model.parameters()))
        assert not one.island.ability.trains
        thread = one.loop(steps_on_samples)  # the door is open for the right one
        await one.is_here()


async def test_a_loop_of_another_version_is_refused(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        answer = await asyncio.to_thread(come_in_bare, one, version=99)
        refusal = await asyncio.to_thread(answer.hear)
        assert refusal is not None and refusal["kind"] == "refused"
        assert f"speaks version 99 and the node version {VERSION}" in refusal["what"]


async def test_nonsense_is_told_and_harms_nobody(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:

        def speak() -> bytes:
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(str(one.home / SOCKET_FILE))
                link.recv(1)
                link.sendall(b'{"kind": "hello", "rank": -1}\n')
                return link.recv(1)

        assert await asyncio.to_thread(speak) == b""
        one.loop(steps_on_samples)
        await one.is_here()


@pytest.mark.parametrize("when", ["training", "evaluating"])
async def test_a_loop_that_says_what_the_node_cannot_read_ends_with_what_that_was(
    when: str, tmp_path: Path
) -> None:
    """It would say the same again after coming back, and so for ever."""

    def say_nonsense(swarm: atoll.Swarm) -> None:
        swarm._session.say({"kind": "stepped", "number": 1, "steps": "two"})

    def evaluate() -> float:
        say_nonsense(one.swarms[0])
        return 1.0

    def train(swarm: atoll.Swarm) -> None:
        one.swarms.append(swarm)
        if when == "training":
            say_nonsense(swarm)
        while not swarm.step(tokens=1).is_over:
            pass

    async with scene(tmp_path) as one:
        thread = await one.joined(train, evaluate=evaluate)
        if when == "evaluating":
            await one.train(work(steps=1))
        with pytest.raises(LoopGoneError, match=r"stepped\.steps"):
            await (one.island.evaluate() if when == "evaluating" else one.train(work(steps=1)))
        await ends(thread)
        assert isinstance(one.ended[0], atoll.SwarmError)
        assert "stepped.steps" in str(one.ended[0]) and "same version" in str(one.ended[0])
        assert not one.island.ability.trains
        nobody = await asyncio.wait_for(one.train(work(steps=1)), 5)  # and no 20 s of waiting
        assert nobody.inner_steps == 0


def test_a_word_is_read_strictly_and_refused_in_a_sentence() -> None:
    hello = {
        "kind": "hello",
        "version": VERSION,
        "group": "g",
        "rank": 0,
        "world_size": 1,
        "evaluates": False,
    }
    assert isinstance(word_of(json.dumps(hello).encode()), Hello)
    with pytest.raises(ValueError, match=r"hello\.rank"):
        word_of(json.dumps({**hello, "rank": "0"}).encode())
    with pytest.raises(ValueError, match="kind"):
        word_of(b'{"kind": "pickle"}')


async def test_a_worker_of_a_loader_that_asks_for_samples_is_refused_and_the_loop_goes_on(
    tmp_path: Path,
) -> None:
    def train(swarm: atoll.Swarm) -> list[list[int]]:
        samples = swarm.samples()
        with (
            pytest.MonkeyPatch.context() as patch
        ):  # a real fork beside our threads may never return
            patch.setattr("os.getpid", lambda: -1)
            with pytest.raises(atoll.SamplesError, match="num_workers=0"):
                next(samples)
        return [numbers for _, numbers in steps_on_samples(swarm)]

    async with scene(tmp_path) as one:
        thread = await one.joined(train)
        report = await one.train(work())
        assert report.inner_steps == work().inner_steps
        await one.stops(thread)
        (numbers,) = one.ended
        assert len(numbers) == report.inner_steps


async def test_a_loader_that_takes_leased_numbers_for_its_batches_trains_each_once(
    tmp_path: Path,
) -> None:
    def train(swarm: atoll.Swarm) -> list[int]:
        seen: list[int] = []
        dataset = TensorDataset(torch.arange(1 << 20))
        loader = DataLoader(dataset, batch_sampler=swarm.samples())  # type: ignore[arg-type] # tensors count like lists
        for (batch,) in loader:
            seen += batch.tolist()
            swarm.step(loss=1.0)
        return seen

    async with scene(tmp_path) as one:
        thread = await one.joined(train)
        report = await one.train(work())
        await one.stops(thread)
        (seen,) = one.ended
        assert len(set(seen)) == len(seen) == report.samples
