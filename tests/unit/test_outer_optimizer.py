import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from node.exchange.codecs.codec import TILE_ELEMENTS
from node.exchange.outer_optimizer import Nesterov, OuterOptimizer, Sgd, outer_optimizer_of
from protocol.errors import ConfigError, SystemRefusedError
from protocol.run.run_files import load_run_file, run_from_json
from protocol.run.run_spec import OuterSection
from tests.unit.golden.golden_file import matches_golden

NESTEROV = Nesterov(learning_rate=0.6, momentum=0.9)
SGD = Sgd(learning_rate=0.6)
both = pytest.mark.parametrize("optimizer", [NESTEROV, SGD], ids=["nesterov", "sgd"])


def normal(num_elements: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(num_elements, dtype=np.float32)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(NESTEROV, {"momentum": 0.9, "nesterov": True}), (SGD, {})],
    ids=["nesterov", "sgd"],
)
def test_it_moves_as_torch_does(optimizer: OuterOptimizer, options: dict[str, Any]) -> None:
    num_elements = TILE_ELEMENTS + 100
    parameters, momentum = normal(num_elements, 0), np.zeros(num_elements, dtype=np.float32)
    peer = torch.nn.Parameter(torch.from_numpy(parameters.copy()))
    torch_optimizer = torch.optim.SGD([peer], lr=0.6, dampening=0, **options)
    for seed in range(1, 6):
        mean = normal(num_elements, seed)
        optimizer.apply(parameters, momentum, mean)
        peer.grad = torch.from_numpy(mean)
        torch_optimizer.step()
    np.testing.assert_allclose(parameters, peer.detach().numpy(), rtol=1e-6, atol=4e-6)


@both
def test_two_halves_are_the_whole(optimizer: OuterOptimizer) -> None:
    num_elements = 2 * TILE_ELEMENTS + 77
    whole = normal(num_elements, 0), normal(num_elements, 1)
    halves = whole[0].copy(), whole[1].copy()
    mean = normal(num_elements, 2)
    optimizer.apply(*whole, mean)
    for part in (slice(TILE_ELEMENTS // 2 + 3, None), slice(None, TILE_ELEMENTS // 2 + 3)):
        optimizer.apply(halves[0][part], halves[1][part], mean[part])
    assert [vector.tobytes() for vector in whole] == [vector.tobytes() for vector in halves]


@both
@pytest.mark.parametrize("rate_scale", [1.0, 0.7937005])
def test_every_operation_rounds_once(optimizer: OuterOptimizer, rate_scale: float) -> None:
    """Fails for fused forms: the same steps in float64, rounded to fp32 after each.

    For one sum or product of fp32 numbers the detour over float64 rounds as fp32 does.
    """

    def rounded(values: np.ndarray) -> np.ndarray:
        return values.astype(np.float32).astype(np.float64)

    parameters, momentum, mean = (normal(1000, seed) for seed in range(3))
    p, m, g = (vector.astype(np.float64) for vector in (parameters, momentum, mean))
    scale = np.float32(rate_scale)
    learning_rate = rounded(rounded(np.array(0.6)) * np.float64(scale))
    decay = rounded(np.array(0.9))
    update = g
    if optimizer is NESTEROV:
        m = rounded(rounded(decay * m) + g)
        update = rounded(g + rounded(decay * m))
    p = rounded(p - rounded(learning_rate * update))
    optimizer.apply(parameters, momentum, mean, scale)
    np.testing.assert_array_equal(parameters, p)
    np.testing.assert_array_equal(momentum, m)


@pytest.mark.parametrize(
    ("name", "optimizer", "rate_scale"),
    [("nesterov", NESTEROV, 1), ("nesterov-scaled", NESTEROV, 0.7937005), ("sgd", SGD, 1)],
)
def test_the_bits_are_the_same_on_every_machine(
    name: str, optimizer: OuterOptimizer, rate_scale: float
) -> None:
    index = np.arange(64)
    parameters, momentum, mean = (
        ((index * factor % 61 - 30) / 7).astype(np.float32) for factor in (13, 29, 47)
    )
    momentum[0], mean[0] = 2.0**-149, -(2.0**-148)
    for _ in range(3):
        optimizer.apply(parameters, momentum, mean, np.float32(rate_scale))
    assert matches_golden(name, b"".join(v.astype("<f4").tobytes() for v in (parameters, momentum)))


def test_sgd_leaves_momentum_alone() -> None:
    momentum = np.zeros(4, dtype=np.float32)
    SGD.apply(normal(4, 0), momentum, normal(4, 1))
    assert not momentum.any()


def test_unequal_lengths_and_types_change_nothing() -> None:
    ones = np.ones(4, dtype=np.float32)
    wrong: list[np.ndarray[Any, Any]] = [np.ones(3, np.float32), np.ones(1, np.float32), np.ones(4)]
    for mean in wrong:
        with pytest.raises(ValueError, match=r"differ in length|not all float32"):
            NESTEROV.apply(ones, ones.copy(), mean)
    assert (ones == 1).all()


def test_a_thread_that_flushes_subnormals_is_refused() -> None:
    ones = np.ones(4, dtype=np.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        with pytest.raises(SystemRefusedError, match="subnormal"):
            NESTEROV.apply(ones, ones.copy(), ones.copy())
    finally:
        torch.set_flush_denormal(False)
    assert (ones == 1).all()


def test_the_run_file_chooses() -> None:
    assert isinstance(outer_optimizer_of(OuterSection()), Nesterov)
    assert isinstance(outer_optimizer_of(OuterSection(optimizer="sgd", momentum=0)), Sgd)


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_momentum_beside_sgd_is_refused_with_its_value(tmp_path: Path, momentum: float) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[outer]\noptimizer = "sgd"\nmomentum = {momentum}\n')
    with pytest.raises(ConfigError) as caught:
        load_run_file(path)
    assert f'[outer] momentum = {momentum} belongs to optimizer = "nesterov"' in caught.value.what
    assert "remove momentum" in (caught.value.next_step or "")


@pytest.mark.parametrize("line", ["", "momentum = 0", "momentum = 0.0"])
def test_sgd_without_momentum_is_taken_by_coordinators_and_nodes(tmp_path: Path, line: str) -> None:
    """What a coordinator sends holds the default as if it were given."""
    path = tmp_path / "run.toml"
    path.write_text(f'[outer]\noptimizer = "sgd"\n{line}\n')
    spec = load_run_file(path)
    assert run_from_json(spec.canonical_json()) == spec


@pytest.mark.parametrize(
    ("key", "value"), [("learning_rate", 1e-60), ("learning_rate", 1e60), ("momentum", 1 - 1e-12)]
)
def test_what_fp32_cannot_hold_is_refused(tmp_path: Path, key: str, value: float) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[outer]\n{key} = {value!r}\n")
    with pytest.raises(
        ConfigError, match=rf"\[outer\].*{key} = {re.escape(repr(value))} is .* in fp32"
    ):
        load_run_file(path)
