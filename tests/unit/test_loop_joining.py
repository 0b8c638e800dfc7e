"""How training loops come to a node, go, and come back."""

import asyncio
import logging
import math
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Adafactor

import atoll
from node.island.loops.door import SOCKET_FILE, refusal_of
from node.island.loops.messages import VERSION, Hello
from node.island.models.decoder_modules import Decoder
from node.island.models.first_weights import initial_parameters
from node.island.ranks.faults import LoopGoneError
from protocol.run.run_spec import InnerSection
from tests.islands.rank_scene import small_spec
from tests.unit.loop_scene import come_in_bare, ends, nudge, scene, steps_on_samples, work


async def test_without_a_loop_nothing_is_trained_and_nobody_waits(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        report = await one.train(work())
        assert (report.inner_steps, report.tokens) == (0, 0)
        await one.island.adopt()
        assert await one.island.evaluate() is None
        with pytest.raises(LoopGoneError, match="no training loop to publish"):
            await one.island.publish(0)


async def test_a_loop_that_died_soon_comes_back_and_a_round_waits_for_it_and_not_for_ever(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, return_seconds=0.2) as one:
        connection = await asyncio.to_thread(come_in_bare, one)
        await one.is_here()
        connection.close()
        with pytest.raises(LoopGoneError, match=f"process {os.getpid()}, is gone"):
            for _ in range(100):
                await one.island.adopt()
                await asyncio.sleep(0.01)
        began_at = asyncio.get_running_loop().time()
        assert (await one.train(work())).inner_steps == 0
        assert asyncio.get_running_loop().time() - began_at >= 0.2
        assert (await one.train(work(2, max_seconds=math.inf))).inner_steps == 0


async def test_a_loop_that_was_interrupted_while_it_waited_goes_on_with_the_global_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the stop button of a notebook, whose next cell calls `step` again."""
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)

        def train(swarm: atoll.Swarm) -> tuple[atoll.Step, float]:
            nudge(model)
            with monkeypatch.context() as patch:
                patch.setattr(swarm._session, "_trained", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    swarm.step(tokens=1)
            with torch.no_grad():
                next(model.parameters()).fill_(7.0)
            found = swarm.step(tokens=1), next(model.parameters()).flatten()[0].item()
            for _ in range(2):
                nudge(model)
                swarm.step(tokens=1)
            return found

        def interrupted(_: object) -> None:
            raise KeyboardInterrupt

        thread = await one.joined(train, model=model)
        with pytest.raises(LoopGoneError, match="it was interrupted"):
            await one.train(work(steps=1))
        await one.is_here()
        await one.train(work(2, steps=2))
        await one.stops(thread)
        step = atoll.Step(round=2, is_replaced=True, steps_left=2, is_over=False)
        assert one.ended == [(step, 0.5)]


async def test_a_hung_loop_is_given_up_and_joins_again_when_it_wakes_up(tmp_path: Path) -> None:
    async with scene(tmp_path, hang_seconds=0.05) as one:
        wakes_up = threading.Event()

        def train(swarm: atoll.Swarm) -> int:
            swarm.step(tokens=1)
            wakes_up.wait(20)
            return sum(1 for _ in iter(lambda: swarm.step(tokens=1).is_over, True))

        thread = await one.joined(train)
        with pytest.raises(LoopGoneError, match="gave no sign of life for"):
            await one.train(work())
        assert not one.island.ability.trains
        wakes_up.set()
        await one.is_here()
        assert (await one.train(work())).inner_steps == 3
        await one.stops(thread)
        assert isinstance(one.ended[0], int)


async def test_a_loop_that_freezes_one_of_its_networks_for_now_comes_back_to_its_node(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, hang_seconds=0.05) as one:
        wakes_up = threading.Event()
        model = Decoder(one.spec.decoder)

        def train(swarm: atoll.Swarm) -> bool:
            nudge(model)
            swarm.step(tokens=1)
            wakes_up.wait(20)
            next(model.parameters()).requires_grad_(False)  # as a GAN does in the other's turn
            while not swarm.step(tokens=1).is_over:
                pass
            return True

        thread = await one.joined(train, model=model)
        with pytest.raises(LoopGoneError, match="gave no sign of life for"):
            await one.train(work())
        wakes_up.set()
        await one.is_here()
        await one.stops(thread)
        assert one.ended == [True]


async def test_what_the_optimizer_steps_beside_the_model_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as one:
        model, head = Decoder(one.spec.decoder), nn.Linear(3, 2, bias=False)
        frozen = nn.Linear(5, 5).requires_grad_(False)
        stepped = [*model.parameters(), *head.parameters(), *frozen.parameters()]
        with caplog.at_level(logging.WARNING, logger="atoll"):
            await one.joined(steps_on_samples, model=model, optimizer=torch.optim.SGD(stepped))
        assert "the optimizer also steps a parameter [2, 3], which the model" in caplog.text


async def test_a_loop_whose_optimizer_chooses_its_own_rate_trains(tmp_path: Path) -> None:
    """As Adafactor of transformers, whose groups have no number as their rate."""
    async with scene(tmp_path) as one:
        model = Decoder(one.spec.decoder)
        optimizer = Adafactor(model.parameters())
        assert optimizer.param_groups[0]["lr"] is None
        thread = await one.joined(steps_on_samples, model=model, optimizer=optimizer)
        report = await one.train(work(steps=2))
        await one.stops(thread)
        assert report.inner_steps == 2
        assert isinstance(one.ended[0], list), one.ended


@pytest.mark.parametrize("is_trained", [False, True])
async def test_a_loop_whose_trained_weights_a_new_run_replaces_is_told_so(
    is_trained: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as one:
        one.vectors.parameters[:] = initial_parameters(one.spec)
        model = Decoder(one.spec.decoder)
        gain = model.get_parameter("model.norm.weight")
        if is_trained:
            with torch.no_grad():
                gain[0] += 0.1
        thread = await one.joined(steps_on_samples, model=model)
        await one.train(work())
        await one.stops(thread)
    told = [told for told in caplog.messages if "begins with new weights" in told]
    assert len(told) == is_trained
    assert all("values of model.norm.weight are all the same in the run" in each for each in told)


@pytest.mark.parametrize(
    ("takes", "by", "is_told"),
    [
        ("learning_rate", torch.optim.AdamW, True),
        ("muon_learning_rate", torch.optim.AdamW, False),
        ("learning_rate", type("Muon", (torch.optim.SGD,), {}), False),
    ],
)
async def test_a_loop_that_takes_the_rate_beside_muon_for_matrices_is_told_once(
    takes: str,
    by: Callable[..., torch.optim.Optimizer],
    is_told: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = small_spec()
    rates = {"optimizer": "muon", "muon_learning_rate": 0.012, "learning_rate": 0.05}
    inner = InnerSection.model_validate(spec.inner.model_dump(mode="json") | rates)
    spec = spec.model_copy(update={"inner": inner})
    async with scene(tmp_path, spec) as one:
        model = Decoder(spec.decoder)
        optimizer = by(model.parameters(), lr=1.0)

        def train(swarm: atoll.Swarm) -> None:
            while not swarm.is_over:
                for group in optimizer.param_groups:
                    group["lr"] = getattr(swarm, takes)
                _ = swarm.learning_rate
                nudge(model)
                swarm.step(tokens=1)

        thread = await one.joined(train, model=model, optimizer=optimizer)
        await one.train(work(1))
        await one.train(work(2))
        await one.stops(thread)
    told = [told for told in caplog.messages if "which a run with Muon has" in told]
    assert len(told) == is_told
    assert all("at its peak 0.05, and Muon's 0.012" in each for each in told)


@pytest.mark.parametrize(
    ("joins_in", "by", "is_told"),
    [
        (5, "adamw", True),
        (5, "adamw with its state", False),
        (5, "sgd", False),
        (1, "adamw", False),
    ],
)
async def test_a_loop_whose_optimizer_begins_anew_in_a_run_in_progress_is_told_so(
    joins_in: int, by: str, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = small_spec()
    async with scene(tmp_path, spec) as one:
        model = Decoder(spec.decoder)
        kind = torch.optim.SGD if by == "sgd" else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=1e-3)

        def step() -> None:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

        if "state" in by:
            step()

        def train(swarm: atoll.Swarm) -> None:
            while not swarm.is_over:
                step()
                swarm.step(tokens=1)

        thread = await one.joined(train, model=model, optimizer=optimizer)
        await one.train(work(joins_in))
        await one.train(work(joins_in + 1))
        await one.stops(thread)
    told = [each for each in caplog.messages if "this loop's optimizer begins anew" in each]
    assert len(told) == is_told
    assert all("the run is in round 5" in each for each in told)


A_LOOP_THAT_FORKS = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from tests.unit.loop_scene import come_in_bare

connection = come_in_bare(SimpleNamespace(home=Path(sys.argv[1])))
child = os.fork()
if child == 0:
    signal.pause()
print("here", flush=True)
try:
    sys.stdin.read(1)
    connection.close()
    sys.stdin.read()
finally:
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


async def test_a_process_that_a_loop_has_forked_does_not_keep_it_alive(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        # Not in this process: gRPC, which other tests use in it, crashes forked children.
        loop = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", A_LOOP_THAT_FORKS, str(one.home)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert loop.stdin is not None and loop.stdout is not None
        assert await loop.stdout.readline() == b"here\n"
        await one.is_here()
        loop.stdin.write(b"x")
        async with asyncio.timeout(20):
            while one.island.ability.trains:  # noqa: ASYNC110 - as in is_here
                await asyncio.sleep(0.01)
        ended, _ = await loop.communicate(b"")
        assert int(ended) == -signal.SIGTERM  # it lived until then


async def test_a_loop_is_here_with_its_last_rank_and_gone_with_the_first_that_goes(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as one:
        first = await asyncio.to_thread(come_in_bare, one, rank=1, world_size=2)
        assert not one.island.ability.trains
        second = await asyncio.to_thread(come_in_bare, one, rank=0, world_size=2)
        await one.is_here()
        order = asyncio.ensure_future(one.island.adopt())
        for rank in (first, second):
            told = await asyncio.to_thread(rank.hear)
            assert told is not None and (told["kind"], told["fragment"]) == ("adopt", None)
            assert not order.done()
            rank.say({"kind": "done", "number": told["number"]})
        await order
        first.close()
        goodbye = await asyncio.to_thread(second.hear)
        assert goodbye is not None and goodbye["kind"] == "goodbye" and not goodbye["is_over"]
        assert "its rank 1" in goodbye["why"]


async def test_a_second_loop_is_refused_with_the_process_that_is_there(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        one.loop(steps_on_samples)
        await one.is_here()
        hello = Hello(
            kind="hello", version=VERSION, group="other", rank=0, world_size=1, evaluates=False
        )
        refusal = refusal_of(hello, os.getpid() + 1, one.island._loop)
        assert refusal is not None
        assert refusal[0] == f"another training loop is with this node: process {os.getpid()}"


async def test_a_program_that_joins_twice_is_told_to_leave_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with scene(tmp_path) as one:
        one.loop(steps_on_samples)
        await one.is_here()
        await ends(one.loop(steps_on_samples))
        assert f"{tmp_path.name}: left the swarm" not in caplog.text, "of one that never was in it"
        assert "this program has joined already, and has not left" in str(one.ended[0])
        assert "leave()" in str(one.ended[0])
        assert one.island.ability.trains


async def test_no_node_is_said_with_the_command_that_starts_one(tmp_path: Path) -> None:
    with pytest.raises(atoll.NoNodeError, match=f"atoll node start --loop --dir {tmp_path}"):
        atoll.join(torch.nn.Linear(1, 1), folder=tmp_path, wait_seconds=0.0)


async def test_a_loop_that_waits_says_for_what_and_where_more_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("atoll.session.FIRST_WAIT_SECONDS", 0.0)
    with pytest.raises(atoll.NoNodeError):
        atoll.join(torch.nn.Linear(1, 1), folder=tmp_path, wait_seconds=0.3)
    assert "yet, so this waits up to 0.3 s for one: atoll node start --loop" in caplog.text
    assert "nothing to train" not in caplog.text
    async with scene(tmp_path) as one:

        def step(swarm: atoll.Swarm) -> None:
            nudge(swarm._session._model)
            swarm.step(tokens=1)

        thread = await one.joined(step)
        told = f"nothing to train for 0 s; what the swarm waits for: atoll status --dir {tmp_path}"
        async with asyncio.timeout(20):
            while told not in caplog.text:  # noqa: ASYNC110 - it is in another thread's log
                await asyncio.sleep(0.01)
        await one.train(work(steps=1))
        await one.stops(thread)
        assert caplog.text.count(told) == 1, "once it has trained, waits are short"


async def test_the_socket_is_its_owner_s_and_of_any_length_and_gone_afterwards(
    tmp_path: Path,
) -> None:
    home = tmp_path / ("a-long-name-" * 12)
    home.mkdir()
    async with scene(home) as one:
        path = home / SOCKET_FILE
        assert len(os.fsencode(path)) > 108
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        one.loop(steps_on_samples)
        await one.is_here()
    assert not path.exists()


async def test_a_socket_that_a_killed_daemon_left_is_replaced(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / SOCKET_FILE))
    left.close()
    async with scene(tmp_path) as one:
        one.loop(steps_on_samples)
        await one.is_here()


async def test_what_a_loop_gets_of_the_global_parameters_cannot_be_written(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        connection = await asyncio.to_thread(come_in_bare, one)
        parameters, published = connection.vectors(*one.vectors.names.sizes)
        assert (parameters == 0.5).all()
        published[0] = 3.0
        assert one.vectors.published[0] == 3.0
        descriptor = connection._descriptors[0]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(descriptor, b"x")
        connection.close()


@pytest.mark.parametrize("is_meant", [False, True])
async def test_a_loop_that_ends_by_itself_before_the_run_is_told_that_the_run_goes_on(
    tmp_path: Path, is_meant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as one:

        def train(swarm: atoll.Swarm) -> None:
            swarm.step(tokens=1)
            if is_meant:
                swarm.leave("it was told to")

        thread = await one.joined(train)
        await one.train(work(steps=9))
        await ends(thread)
        assert caplog.text.count("the run goes on without it: let it train until") == (not is_meant)
