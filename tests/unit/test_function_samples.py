"""Samples of functions: how they are numbered, and known to be the same on all nodes."""

import numpy as np
import torch

from node.island.data.functions import FunctionData, traits_of
from tests.unit.function_scene import spec_of


def test_samples_of_a_function_are_numbered_and_known_by_their_code() -> None:
    spec = spec_of()
    data = FunctionData(spec)
    assert (data.num_samples, data.num_held_out_samples) == (200, 31)
    batch = data.batch("held_out", np.array([3, 5]))
    assert batch["words"].shape == (2, 5) and batch["label"].shape == (2,)
    assert data.batch("held_out", np.array([], np.int64))["label"].shape == (1,)
    assert data.summary() == FunctionData(spec).summary()
    assert spec.description is not None
    other = spec.description.model_copy(update={"sources": {}})
    changed = FunctionData(spec.model_copy(update={"description": other}))
    assert changed.summary().digest != data.summary().digest


def test_what_a_function_draws_from_global_generators_is_the_same_on_all_nodes() -> None:
    spec = spec_of(data="tests.run_functions:unseeded_split")
    before = torch.random.get_rng_state()
    one, other = FunctionData(spec), FunctionData(spec)
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's generators go on"
    numbers = np.arange(8)
    assert torch.equal(*(d.batch("training", numbers)["label"] for d in (one, other)))
    assert one.summary() == other.summary()


def test_samples_that_differ_from_node_to_node_have_another_digest() -> None:
    spec = spec_of(data="tests.run_functions:samples_by_hash")
    one, other = (FunctionData(spec).summary() for _ in range(2))
    assert one.num_samples == other.num_samples and one.digest != other.digest


def test_samples_that_are_augmented_anew_are_compared_by_what_stays() -> None:
    spec = spec_of(data="tests.run_functions:augmented")
    assert FunctionData(spec).summary() == FunctionData(spec).summary()


def test_traits_tell_samples_apart_and_not_the_roundings_of_two_machines() -> None:
    image = np.random.default_rng(1).standard_normal((3, 8, 8)).astype(np.float32)
    image -= image.mean()
    assert traits_of((image, 3)) == traits_of((image * np.float32(1 + 1e-6) + 1e-8, 3))
    assert traits_of((image, 3)) != traits_of((image, 4))
    assert traits_of((image, 3)) != traits_of((image * 1.5, 3))
    assert traits_of((image, 3)) != traits_of((image[:2], 3))
    assert traits_of({"text": "a"}) != traits_of({"text": "b"})
    assert traits_of(torch.ones(3, dtype=torch.bfloat16)) == traits_of(torch.ones(3).bfloat16())
    assert traits_of(("a", np.zeros(0))) and traits_of(object()) == traits_of(object())
    assert traits_of((image, 3), has_values=False) == traits_of((image + 1, 4), has_values=False)
