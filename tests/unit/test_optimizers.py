"""Which optimizer steps what, and that Muon's step is the one in its papers and in torch."""

import math

import pytest
import torch
from torch import Tensor, nn

from benchmarks.island.memory import most_taken
from node.island.models.decoder_modules import Decoder
from node.island.training.optimizers import (
    AdamW,
    Muon,
    RowwiseAdamW,
    inner_optimizers,
    orthogonalised,
)
from protocol.errors import ConfigError
from protocol.run.models import DecoderModel
from protocol.run.run_files import validated
from protocol.run.run_spec import InnerSection
from tests.run_functions import Net

MODEL = DecoderModel(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    ffn_size=24,
    context=16,
    tie_embeddings=False,
)


def random_matrices(*shapes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def muon_of(matrix: Tensor, *, momentum: float = 0.95, weight_decay: float = 0.0) -> Muon:
    return Muon([matrix], lr=0.1, momentum=momentum, weight_decay=weight_decay)


def test_only_matrices_and_the_head_decay() -> None:
    decoder = Decoder(MODEL)
    (adamw,) = inner_optimizers(decoder, InnerSection())
    decayed, others = adamw.param_groups
    names = {id(parameter): name for name, parameter in decoder.named_parameters()}
    assert decayed["weight_decay"] == InnerSection().weight_decay
    assert others["weight_decay"] == 0.0
    assert sorted(names[id(p)] for p in others["params"]) == [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    ]
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_adamws_steps_are_torchs_to_the_bit() -> None:
    first, gradients = random_matrices((5, 7)), random_matrices((5, 7), (5, 7), (5, 7))
    moved = []
    for kind in (AdamW, torch.optim.AdamW):
        weight = torch.nn.Parameter(first[0].clone())
        optimizer = kind([{"params": [weight]}], lr=0.1, weight_decay=0.2, fused=True)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        moved.append((weight.detach(), *optimizer.state[weight].values()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*moved, strict=True))


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_muon_takes_the_matrices_of_layers_and_adamw_all_else_once(tie_embeddings: bool) -> None:
    decoder = Decoder(MODEL.model_copy(update={"tie_embeddings": tie_embeddings}))
    inner = InnerSection(optimizer="muon", muon_learning_rate=0.02, muon_momentum=0.9)
    muon, adamw = inner_optimizers(decoder, inner)
    names = {id(parameter): name for name, parameter in decoder.named_parameters()}
    taken = [names[id(p)] for group in muon.param_groups for p in group["params"]]
    left = [names[id(p)] for group in adamw.param_groups for p in group["params"]]
    assert len(taken) == 7
    assert all("_proj" in name for name in taken)
    assert sorted(taken + left) == sorted(names.values())
    assert {g["peak_rate"] for g in muon.param_groups} == {0.02}
    assert {g["momentum"] for g in muon.param_groups} == {0.9}
    assert {g["peak_rate"] for g in adamw.param_groups} == {inner.learning_rate}


def test_muon_takes_adamws_learning_rate_unless_it_has_its_own() -> None:
    muon, _ = inner_optimizers(Decoder(MODEL), InnerSection(optimizer="muon", learning_rate=0.5))
    assert muon.param_groups[0]["peak_rate"] == 0.5
    assert muon.param_groups[0]["momentum"] == 0.95


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_orthogonalising_keeps_the_singular_vectors_and_evens_out_the_values(
    shape: tuple[int, int],
) -> None:
    (matrix,) = random_matrices(shape)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    ((_, result),) = orthogonalised([100 * matrix], torch.float32)
    inside = left.T @ result @ right.T
    assert values.max() / values.min() > 2  # else there would be nothing to even out
    assert torch.allclose(inside, torch.diag(inside.diag()), atol=1e-4)
    assert 0.6 < inside.diag().min() <= inside.diag().max() < 1.3


def test_matrices_that_go_together_come_out_as_if_alone() -> None:
    matrices = random_matrices((6, 20), (8, 8), (20, 6), (6, 20), (8, 8), (1, 5))
    together = dict(orthogonalised(matrices, torch.float32))
    assert sorted(together) == list(range(len(matrices)))
    for place, matrix in enumerate(matrices):
        ((_, alone),) = orthogonalised([matrix], torch.float32)
        result = together[place]
        assert result.shape == matrix.shape
        assert torch.allclose(result, alone, atol=1e-5)


def test_matrices_that_are_too_large_together_go_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = random_matrices((6, 20), (6, 20), (20, 6))
    together = dict(orthogonalised(matrices, torch.float32))
    monkeypatch.setattr("node.island.training.optimizers._MOST_ELEMENTS_AT_ONCE", 240)
    in_turn = dict(orthogonalised(matrices, torch.float32))
    assert together.keys() == in_turn.keys() == {0, 1, 2}
    assert all(torch.allclose(together[place], in_turn[place], atol=1e-5) for place in together)


def test_what_is_offloaded_iterates_on_the_device_of_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = torch.device("meta")
    seen: list[tuple[torch.device, torch.dtype]] = []

    def iterated(x: torch.Tensor) -> torch.Tensor:
        seen.append((x.device, x.dtype))
        return torch.ones(x.shape, dtype=x.dtype)

    monkeypatch.setattr("node.island.training.optimizers._iterated", iterated)
    decoder = Decoder(MODEL)
    muon, _ = inner_optimizers(
        decoder,
        InnerSection(optimizer="muon"),
        iteration_dtype=torch.bfloat16,
        iteration_device=elsewhere,
    )
    for parameter in decoder.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [matrix.detach().clone() for matrix in muon.param_groups[0]["params"]]
    muon.step()
    assert set(seen) == {(elsewhere, torch.bfloat16)}
    after = muon.param_groups[0]["params"]
    assert all(
        new.device.type == "cpu" and new.dtype == torch.float32 and (new < old).all()
        for old, new in zip(before, after, strict=True)
    )


def test_a_step_takes_memory_for_few_matrices_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.island.training.optimizers._MOST_ELEMENTS_AT_ONCE", 32 * 32)
    matrices = [torch.nn.Parameter(each) for each in random_matrices(*[(32, 32)] * 24)]
    muon = Muon(matrices, lr=0.1, momentum=0.9, weight_decay=0.0)
    for _ in range(2):  # the first makes the momentum
        for matrix in matrices:
            matrix.grad = torch.ones_like(matrix)
        most = most_taken(muon.step)
    assert 0 < most <= 8 * 4 * 32 * 32  # what the iteration of one takes, not 24


def test_a_matrix_without_gradient_gets_no_update_and_a_zero_one_no_nan() -> None:
    still, zero = torch.ones(3, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    zero.grad = torch.zeros(3, 4)
    Muon([still, zero], lr=0.1, momentum=0.9, weight_decay=0.5).step()
    assert torch.equal(still, torch.ones(3, 4))
    assert torch.allclose(zero, torch.full((3, 4), 0.95))  # its weight decay alone


@pytest.mark.parametrize("shape", [(12, 12), (8, 24), (24, 8)])
def test_steps_are_those_of_torchs_muon_within_its_bf16(shape: tuple[int, int]) -> None:
    start, *gradients = random_matrices(shape, shape, shape, shape)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    muon = muon_of(ours, weight_decay=0.3)
    peer = torch.optim.Muon(
        [theirs], lr=0.1, weight_decay=0.3, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for gradient in gradients:
        for matrix, optimizer in ((ours, muon), (theirs, peer)):
            matrix.grad = gradient.clone()
            optimizer.step()
    moved = (ours - start).norm()
    assert moved > 0.5 * 3 * 0.1 * 0.2 * math.sqrt(start.numel()) * 0.7
    assert (ours - theirs).norm() < 0.02 * moved  # bf16 has 8 bits: 0.4 % an operation


def test_an_update_has_the_size_of_adamws_whatever_the_shape() -> None:
    for shape in ((16, 16), (8, 64), (64, 8)):
        matrix, gradient = random_matrices(shape, shape)
        before = matrix.clone()
        matrix.requires_grad_().grad = gradient
        muon_of(matrix, momentum=0.0).step()
        moved = (matrix.detach() - before).square().mean().sqrt()
        assert 0.7 * 0.02 < moved < 1.2 * 0.02


@pytest.mark.parametrize("key", ["muon_learning_rate", "muon_momentum"])
def test_a_key_of_muon_is_refused_without_muon(key: str) -> None:
    message = f'{key} = 0.5 belongs to optimizer = "muon", not to "adamw"'
    with pytest.raises(ConfigError, match=message):
        validated({"inner": {key: 0.5}}, origin="run.toml")


def test_rows_that_no_batch_looks_up_stay_to_the_bit_and_the_others_move() -> None:
    table = nn.Embedding(6, 4)
    optimizer = RowwiseAdamW.of_run([*table.parameters()], InnerSection(sparse=True))
    before = table.weight.detach().clone()
    for rows in ([0, 3], [3], [5]):
        table.zero_grad()
        table(torch.tensor(rows)).square().sum().backward()
        optimizer.step()
    moved = (table.weight != before).any(dim=1)
    assert moved.tolist() == [True, False, False, True, False, True]
    assert optimizer.state[table.weight]["row_steps"].squeeze(1).tolist() == [
        1,
        0,
        0,
        2,
        0,
        1,
    ]


def test_a_row_with_a_gradient_in_each_step_is_stepped_as_by_adamw() -> None:
    values = torch.randn(5, 3)
    inner = InnerSection(learning_rate=0.05)
    rowwise, plain = (nn.Parameter(values.clone()) for _ in range(2))
    ours = RowwiseAdamW.of_run([rowwise], inner)
    theirs = torch.optim.AdamW([plain], lr=0.05, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(4):
        gradient = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        rowwise.grad, plain.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(rowwise, plain, rtol=1e-5, atol=1e-6)


def test_only_tables_are_stepped_row_by_row_and_only_when_asked_for() -> None:
    model = Net(8, 40)
    (adamw,) = inner_optimizers(model, InnerSection())
    assert isinstance(adamw, torch.optim.AdamW)
    rowwise, _ = inner_optimizers(model, InnerSection(sparse=True))
    assert isinstance(rowwise, RowwiseAdamW)
    assert [p is model.table.weight for g in rowwise.param_groups for p in g["params"]] == [True]
