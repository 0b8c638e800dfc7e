"""A loop's model beside the outer state: names, what is refused, and the arithmetic of rounding."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import atoll
from atoll import watch
from atoll.frozen import check_frozen, few_values, software_of, summed
from atoll.optimizers import Optimizers
from atoll.ranks import Ranks
from atoll.watch import Watch
from atoll.weights import Overlap, Place, Weights, canonical, check_model
from node.island.models.architecture import FEW, SUMS, few_values_of

ROWS, COLUMNS = 6, 5


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(COLUMNS, ROWS, bias=False, dtype=dtype)
        self.second = nn.Linear(ROWS, COLUMNS, dtype=dtype)


def places_of(model: nn.Module) -> list[Place]:
    places, offset = [], 0
    for name, parameter in model.named_parameters():
        places.append(Place(name=name, shape=tuple(parameter.shape), offset=offset))
        offset += parameter.numel()
    return places


def weights_of(
    model: nn.Module,
    *,
    overlap: Overlap = "none",
    local_share: float = 0.0,
    places: list[Place] | None = None,
) -> Weights:
    places = places or places_of(model)
    num_elements = sum(place.num_elements for place in places)
    return Weights(
        model=model,
        places=places,
        fragments=[(0, num_elements)],
        overlap=overlap,
        local_share=local_share,
        rank=0,
        parameters=torch.randn(num_elements, generator=torch.Generator().manual_seed(1)),
        published=torch.zeros(num_elements),
    )


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def train(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def pseudo_gradient(weights: Weights) -> Tensor:
    weights.publish(0)
    return weights.parameters - weights.published


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_what_is_not_trained_publishes_the_global_parameters_bit_by_bit(dtype: torch.dtype) -> None:
    weights = weights_of(Small(dtype))
    weights.adopt(None, is_taken=True)
    weights.publish(0)
    assert torch.equal(weights.published, weights.parameters)


def test_bf16_publishes_what_was_trained_and_not_what_adopting_rounded_away() -> None:
    model = Small(torch.bfloat16)
    weights = weights_of(model)
    weights.adopt(None, is_taken=True)
    before = flat(model)
    assert (before - weights.parameters).abs().max() > 1e-3, "adopting rounds"
    train(model, 0.25)
    trained = flat(model) - before
    assert torch.allclose(-pseudo_gradient(weights), trained, atol=1e-6)


def test_a_scalar_is_one_value_of_the_run() -> None:
    """The run describes it with a dimension, as it does all else."""
    model = nn.Linear(3, 2)
    model.register_parameter("temperature", nn.Parameter(torch.tensor(2.0)))
    described = [replace(place, shape=place.shape or (1,)) for place in places_of(model)]
    check_model(model, described)
    weights = weights_of(model, places=described)
    weights.adopt(None, is_taken=True)
    assert torch.equal(flat(model), weights.parameters)
    train(model, 0.25)
    assert torch.allclose(-pseudo_gradient(weights), torch.full((9,), 0.25), atol=1e-6)
    with pytest.raises(
        atoll.ModelMismatchError, match=r"temperature is \[\] in this model and \[2\]"
    ):
        check_model(model, [replace(p, shape=p.shape or (2,)) for p in places_of(model)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_over_many_rounds_of_keep_nothing_but_what_was_trained_is_published(
    dtype: torch.dtype,
) -> None:
    """One node whose pseudo-gradients are applied as they are: no rounding may add up."""
    model = Small(dtype)
    weights = weights_of(model, overlap="keep")
    weights.adopt(None, is_taken=True)
    trained = weights.parameters.clone()
    ahead = torch.zeros_like(trained)
    for _ in range(20):
        before = flat(model)
        train(model, 0.125)
        trained += ahead + flat(model) - before  # what of the step the parameter's type held
        delta = pseudo_gradient(weights)
        before = flat(model)
        train(model, 0.125)  # while the bytes travel
        ahead = flat(model) - before
        weights.parameters.sub_(delta)
        weights.adopt(0, is_taken=True)
    assert (weights.parameters - trained).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overlap", ["none", "keep", "blend"])
def test_pieces_of_any_size_bring_the_same_bits(
    dtype: torch.dtype, overlap: Overlap, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for size in (1 << 23, 12, 5, 1):  # elements: all at once, some rows, one row or less
        monkeypatch.setattr(atoll.weights, "PIECE_ELEMENTS", size)
        found.append(_lived(Small(dtype), overlap, device="cpu"))
        assert len(found[0]) == len(found[-1]) == 8
        assert all(torch.equal(one, other) for one, other in zip(found[0], found[-1], strict=True))


def _lived(model: Small, overlap: Overlap, *, device: str) -> list[Tensor]:
    """What is published and held over some rounds, the last of which is not taken."""
    weights = weights_of(model.to(device), overlap=overlap, local_share=0.5)
    weights.adopt(None, is_taken=True)
    told = []
    for round in range(4):
        train(model, 0.3)
        weights.publish(0)
        told.append(weights.published.clone())
        train(model, -0.7)
        weights.parameters.add_(0.1 * weights.published)
        weights.adopt(0, is_taken=round < 3)
        told.append(flat(model).cpu())
    kept = weights.aside()
    weights.show_global()
    weights.put_back(kept)
    assert torch.equal(flat(model).cpu(), told[-1])
    return told


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA shows no GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overlap", ["none", "keep", "blend"])
def test_a_gpu_brings_the_same_values_as_the_cpu_but_for_rounding(
    dtype: torch.dtype, overlap: Overlap
) -> None:
    torch.manual_seed(3)
    here, there = Small(dtype), Small(dtype)
    found = zip(
        _lived(here, overlap, device="cpu"), _lived(there, overlap, device="cuda"), strict=True
    )
    tolerance = 1e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-6
    for one, other in found:
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_keep_puts_what_was_trained_since_publishing_on_top() -> None:
    model = Small()
    weights = weights_of(model, overlap="keep")
    weights.adopt(None, is_taken=True)
    train(model, 1.0)
    weights.publish(0)
    train(model, 0.5)
    weights.parameters.add_(3.0)
    weights.adopt(0, is_taken=True)
    assert torch.allclose(flat(model), weights.parameters + 0.5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keep_goes_a_part_of_the_way_to_the_global_parameters_and_publishes_the_rest(
    dtype: torch.dtype,
) -> None:
    model = Small(dtype)
    weights = weights_of(model, overlap="keep", local_share=0.25)
    weights.parameters.zero_()
    weights.adopt(None, is_taken=True)
    train(model, 1.0)
    weights.publish(0)
    train(model, 0.5)  # while the bytes travel
    weights.parameters.fill_(2.0)
    weights.adopt(0, is_taken=True)
    assert torch.equal(flat(model), torch.full_like(weights.parameters, 1.5 + 0.75 * (2.0 - 1.0)))
    assert torch.equal(-pseudo_gradient(weights), torch.full_like(weights.parameters, 0.25))
    train(model, 0.5)
    weights.adopt(0, is_taken=False)
    assert torch.equal(flat(model), torch.full_like(weights.parameters, 2.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blend_mixes_and_what_was_not_taken_is_rebased(dtype: torch.dtype) -> None:
    model = Small(dtype)
    weights = weights_of(model, overlap="blend", local_share=0.25)
    weights.parameters.zero_()
    weights.adopt(None, is_taken=True)
    train(model, 1.0)
    weights.publish(0)
    weights.parameters.fill_(2.0)
    weights.adopt(0, is_taken=True)
    assert torch.equal(flat(model), torch.full_like(weights.parameters, 1.75))
    assert torch.equal(-pseudo_gradient(weights), torch.full_like(weights.parameters, -0.25))
    train(model, 0.5)
    weights.adopt(0, is_taken=False)
    assert torch.equal(flat(model), torch.full_like(weights.parameters, 2.5))


def test_a_fragment_leaves_the_others_alone() -> None:
    model = Small()
    weights = weights_of(model)
    first = ROWS * COLUMNS
    weights.fragments = [(0, first), (first, len(weights.parameters) - first)]
    before = flat(model)
    weights.adopt(1, is_taken=True)
    assert torch.equal(flat(model)[:first], before[:first])
    assert torch.equal(flat(model)[first:], weights.parameters[first:])
    weights.published.fill_(7.0)
    weights.publish(1)  # to the beginning of what there is for any one fragment
    num_published = len(weights.parameters) - first
    assert torch.equal(weights.published[:num_published], flat(model)[first:])
    assert (weights.published[num_published:] == 7.0).all()


def test_own_weights_come_back_after_the_global_ones_were_shown() -> None:
    model = Small()
    weights = weights_of(model)
    before = flat(model)
    own = weights.aside()
    weights.show_global()
    assert torch.equal(flat(model), weights.parameters)
    weights.put_back(own)
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("module.first.weight", "first.weight"),
        ("_orig_mod.module.first.weight", "first.weight"),
        ("_forward_module.module.first.weight", "first.weight"),
        ("_forward_module._orig_mod.first.weight", "first.weight"),
        ("_original_module.first.weight", "first.weight"),
        ("layers.0._checkpoint_wrapped_module._orig_mod.w", "layers.0.w"),
        ("first.module.weight", "first.module.weight"),
    ],
)
def test_wrappers_of_torch_leave_names_as_they_are(name: str, known: str) -> None:
    assert canonical(name) == known


def test_a_compiled_or_wrapped_model_is_the_run_s() -> None:
    model = Small()
    check_model(torch.compile(model), places_of(model))  # type: ignore[arg-type]
    check_model(nn.ModuleDict({"module": model}), places_of(model))


def refused(model: nn.Module, places: list[Place], *words: str) -> None:
    with pytest.raises(atoll.ModelMismatchError) as refusal:
        check_model(model, places)
    for word in words:
        assert word in str(refusal.value)


def test_what_is_not_the_run_s_is_refused_by_name_and_both_shapes() -> None:
    model = Small()
    places = places_of(model)
    other = [*places[:-1], Place(name="second.bias", shape=(7,), offset=60)]
    refused(model, other, "second.bias is [5] in this model and [7] in the run")
    refused(model, [*places, Place(name="third", shape=(2,), offset=99)], "third [2]", "no such")
    refused(model, places[:-1], "trains second.bias [5], which the run does not")
    model.second.bias.requires_grad_(False)
    refused(model, places, "second.bias", "frozen in this model", "freeze it after join")
    check_model(model, places[:-1])


def test_tied_parameters_count_once_under_either_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 3)
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.embedding.weight

    names = ("embedding.weight", "head.weight")
    for name in names:
        check_model(Tied(), [Place(name=name, shape=(4, 3), offset=0)])
    both = [Place(name=name, shape=(4, 3), offset=12 * at) for at, name in enumerate(names)]
    refused(Tied(), both, "trains embedding.weight and head.weight apart", "they are tied")
    by_data = Tied()
    by_data.head.weight = nn.Parameter(by_data.embedding.weight.data)
    refused(by_data, both, "trains embedding.weight and head.weight apart", "they are tied")
    by_data.head.weight = nn.Parameter(by_data.embedding.weight.clone())
    check_model(by_data, both)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model = Small()
    Optimizers(torch.optim.SGD(model.parameters(), lr=1.0)).check(model, places_of(model))
    halves: list[Any] = [
        torch.optim.SGD(part.parameters(), lr=1.0) for part in (model.first, model.second)
    ]
    Optimizers(halves).check(model, places_of(model))
    with pytest.raises(atoll.ModelMismatchError, match=r"does not step second\.weight"):
        Optimizers(halves[0]).check(model, places_of(model))
    with pytest.raises(atoll.ModelMismatchError, match=r"first.weight \[6, 5\]"):
        other = torch.optim.SGD(Small().parameters(), lr=1.0)
        Optimizers(other).check(model, places_of(model))


def test_what_is_no_optimizer_is_refused_by_its_type() -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for other in ({"both": optimizer}, [torch.optim.lr_scheduler.StepLR(optimizer, 3)]):
        kind = type(other[0] if isinstance(other, list) else other).__name__
        with pytest.raises(atoll.ModelMismatchError, match=f"a value of type {kind}, which has no"):
            Optimizers(other).check(model, places_of(model))


def head_on_a_body(seed: int, dtype: torch.dtype = torch.float32) -> Small:
    """Its second layer is trained; the first one is frozen, as drawn from a seed."""
    torch.manual_seed(seed)
    model = Small(dtype)
    model.first.requires_grad_(False)
    return model


def frozen_of(model: nn.Module) -> dict[str, tuple[float, ...]]:
    return few_values_of({n: p for n, p in model.named_parameters() if not p.requires_grad})


@pytest.mark.parametrize("shape", [(1,), (3, 2), (7, 11), (64, 129), (1100, 1024)])
def test_a_loop_chooses_the_values_that_the_run_has_written_down(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    written = few_values_of({"it": values})
    assert few_values(values, FEW) == pytest.approx(written["it"], rel=1e-5)
    assert summed(values).sums == pytest.approx(written["it" + SUMS], abs=1e-4)
    assert summed(values).norm == pytest.approx(float(values.double().norm()), rel=1e-5)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
)
def test_a_frozen_body_may_be_rounded(dtype: torch.dtype) -> None:
    few = frozen_of(head_on_a_body(3))
    model = head_on_a_body(3)
    model.first.to(dtype)
    check_frozen(model, few)
    check_frozen(torch.compile(model), few)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_body_of_another_seed_is_refused_by_name(dtype: torch.dtype) -> None:
    few = frozen_of(head_on_a_body(3))
    for model in (head_on_a_body(4, dtype), torch.compile(head_on_a_body(4, dtype))):
        with pytest.raises(atoll.ModelMismatchError, match=r"first\.weight is another one here"):
            check_frozen(model, few)  # type: ignore[arg-type]
    ruined = head_on_a_body(3)
    ruined.first.weight.data.fill_(torch.nan)
    with pytest.raises(atoll.ModelMismatchError, match="one of its values is nan"):
        check_frozen(ruined, few)


def test_a_further_trained_body_is_refused_and_whole_numbers_and_other_names_are_not_compared() -> (
    None
):
    model = head_on_a_body(3)
    few = frozen_of(model)
    tuned = head_on_a_body(3)
    tuned.first.weight.data *= 1.02
    with pytest.raises(atoll.ModelMismatchError, match="another one here than in the run"):
        check_frozen(tuned, few)
    check_frozen(tuned, {"elsewhere.weight": few["first.weight"]})
    tuned.first.weight = nn.Parameter(
        torch.ones(ROWS, COLUMNS).to(torch.uint8), requires_grad=False
    )
    check_frozen(tuned, few)


@given(seed=st.integers(0, 2**32), num=st.integers(1, 40), in_bf16=st.booleans())
@settings(max_examples=50, deadline=None)
def test_a_frozen_body_that_differs_anywhere_is_refused(seed: int, num: int, in_bf16: bool) -> None:
    """Also where none of the values differs that are written down one by one."""
    draws = torch.Generator().manual_seed(seed)
    model = nn.Module()
    model.body = nn.Parameter(torch.randn(3000, generator=draws), requires_grad=False)
    few = few_values_of({"body": model.body})
    kept = {(2 * place + 1) * 3000 // (2 * FEW) for place in range(FEW)}
    others = [place for place in range(3000) if place not in kept]
    chosen = torch.tensor(others)[torch.randperm(len(others), generator=draws)]
    if in_bf16:
        model.body.data = model.body.data.to(torch.bfloat16)
        num += 200  # rounding moves the sums as well
    check_frozen(model, few)
    # Of several sizes: of equal changes as many with either sign would leave all sums as they are.
    model.body[chosen[:num]] += 1.0 + torch.rand(num, generator=draws)
    with pytest.raises(atoll.ModelMismatchError, match=r"body is another one here .* all together"):
        check_frozen(model, few)


def test_a_body_in_other_types_or_of_runs_without_sums_is_compared_as_far_as_it_can_be() -> None:
    model = head_on_a_body(3)
    few = frozen_of(model)
    model.first.to(torch.bfloat16).float()  # a checkpoint of 16 bits, read as fp32
    check_frozen(model, few)
    model.first.weight.data[0, 0] += 100.0
    check_frozen(model, {name: each for name, each in few.items() if SUMS not in name})
    with pytest.raises(atoll.ModelMismatchError):
        check_frozen(model, few)


def test_a_buffer_of_the_checkpoint_that_the_run_names_is_compared_and_statistics_are_not() -> None:
    model = nn.Module()
    model.register_buffer("scales", torch.arange(5.0))
    model.norm = nn.BatchNorm1d(3)
    few = few_values_of({n: b + 1 for n, b in model.named_buffers()})
    with pytest.raises(atoll.ModelMismatchError, match="scales is another one"):
        check_frozen(model, few)
    few = few_values_of({"scales": torch.arange(5.0), "norm.running_mean": torch.ones(3)})
    check_frozen(model, few)


def watch_of(model: nn.Module) -> Watch:
    alone = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    return Watch(model, places=(), optimizers=Optimizers(None), ranks=alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64])
def test_a_loop_that_changes_any_value_of_what_is_frozen_is_refused(dtype: torch.dtype) -> None:
    """As a codebook does, of which training moves the rows that were used."""
    model = nn.Module()
    model.codes = nn.Parameter((torch.rand(3000) * 99).to(dtype), requires_grad=False)
    model.other = nn.Parameter(torch.ones(2), requires_grad=False)
    watching = watch_of(model)
    watching.look()
    with torch.no_grad():
        model.codes[7] += 1  # none of the few that are compared one by one
    with pytest.raises(atoll.ModelMismatchError, match="the loop changes codes, which is frozen"):
        watching.look()


def test_what_is_frozen_of_a_large_model_is_compared_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "SUMMED_AT_A_LOOK", 100)
    model = nn.ModuleList(nn.Linear(20, 20, bias=False) for _ in range(5)).requires_grad_(False)
    watching = watch_of(model)
    for _ in range(7):
        watching.look()
    model[1].get_parameter("weight").data[0, 1] += 1.0
    for _ in range(4):
        watching.look()  # of the other four
    with pytest.raises(atoll.ModelMismatchError, match=r"the loop changes 1\.weight"):
        watching.look()


def test_loops_compare_with_each_other_what_the_run_cannot() -> None:
    """A body of 4 bits, or a teacher beside the model: of them the run tells nothing."""

    def quantised(seed: int) -> Small:
        model = head_on_a_body(3)
        draws = torch.Generator().manual_seed(seed)
        packed = torch.randint(0, 255, (ROWS, COLUMNS // 2), generator=draws, dtype=torch.uint8)
        model.first.weight = nn.Parameter(packed, requires_grad=False)
        model.register_buffer("codes", torch.arange(4))
        return model

    few = frozen_of(head_on_a_body(3))
    assert "frozen" not in software_of(head_on_a_body(3), few), "the run tells all of it"
    assert "frozen" not in software_of(head_on_a_body(3, torch.bfloat16), few)
    told = software_of(quantised(1), few)
    assert re.fullmatch(r"a loop with torch \d+\.\d+ and the frozen values [0-9a-f]{12}", told)
    assert told == software_of(quantised(1), few) == software_of(torch.compile(quantised(1)), few)  # type: ignore[arg-type]
    assert told != software_of(quantised(2), few)
    changed = quantised(1)
    changed.get_buffer("codes")[3] = 9
    assert told != software_of(changed, few)


def test_loops_whose_adapters_are_scaled_otherwise_are_told_apart_where_the_run_knows_none() -> (
    None
):
    """As those of a function's model, of which the run knows shapes."""

    def adapted(alpha: int) -> nn.Module:
        body: Any = head_on_a_body(3)
        return get_peft_model(body, LoraConfig(r=2, lora_alpha=alpha, target_modules=["first"]))

    told = software_of(adapted(4), {})
    assert ", adapters scaled by 2 and the frozen values" in told
    assert told == software_of(adapted(4), {}) != software_of(adapted(8), {})
    assert "scaled by 4" in software_of(adapted(8), {})
    assert "adapters" not in software_of(head_on_a_body(3), {})


def test_of_many_frozen_parameters_all_have_sums_and_none_that_json_cannot_hold() -> None:
    many = {str(number): torch.ones(2) for number in range(1000)}
    few = few_values_of(many)
    assert {name for name in few if SUMS in name} == {name + SUMS for name in many}
    assert 128 <= sum(len(few[name]) == FEW for name in many) <= 256
    assert few_values_of({}) == few_values_of({"inf": torch.tensor([torch.inf])}) == {}
    assert few_values_of({"none": torch.ones(0), "whole": torch.ones(3, dtype=torch.int8)}) == {}


@pytest.mark.parametrize("before", [torch.float32, torch.bfloat16])
def test_a_model_whose_type_changes_while_its_bytes_travel_adopts_what_comes(
    before: torch.dtype,
) -> None:
    after = torch.bfloat16 if before == torch.float32 else torch.float32
    model = Small(before)
    weights = weights_of(model, overlap="keep")
    weights.parameters.zero_()
    weights.adopt(None, is_taken=True)
    train(model, 1.0)
    weights.publish(0)
    model.to(after)
    train(model, 0.5)
    weights.parameters.fill_(2.0)
    weights.adopt(0, is_taken=True)
    assert torch.equal(flat(model), torch.full_like(weights.parameters, 2.5))
    assert torch.equal(-pseudo_gradient(weights), torch.full_like(weights.parameters, 0.5))
