"""A batch in parts has the gradients of the batch at once, whatever the parts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # is public
from torch.nn.parallel import DistributedDataParallel

from node.island.models.architecture import Counted
from node.island.models.decoder_modules import Decoder, Objective
from node.island.parallel.modules import accumulate_gradients
from protocol.run.models import DecoderModel

MODEL = DecoderModel(
    hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=24, context=16
)
WINDOWS = torch.randint(256, (7, 17), generator=torch.Generator().manual_seed(1))
TOKENS, TARGETS = WINDOWS[:, :-1], WINDOWS[:, 1:]


@pytest.fixture
def objective() -> Objective:
    torch.manual_seed(0)
    return Objective(Decoder(MODEL))


def gradients_of(objective: Objective, **options: Any) -> tuple[Tensor, list[Tensor]]:
    objective.zero_grad()
    micro_batch = int(options.pop("micro_batch"))
    loss = accumulate_gradients(objective, TOKENS, TARGETS, micro_batch=micro_batch, **options)
    return loss, [p.grad.clone() for p in objective.parameters() if p.grad is not None]


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 6])
def test_parts_add_up_to_the_gradients_of_the_whole_batch(
    objective: Objective, micro_batch: int
) -> None:
    loss, whole = gradients_of(objective, micro_batch=0)
    same_loss, added = gradients_of(objective, micro_batch=micro_batch)
    assert torch.allclose(loss, same_loss, rtol=1e-6)
    assert len(whole) == len(added) == len(list(objective.parameters()))
    for one, other in zip(whole, added, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)


def test_all_at_once_is_one_plain_backward_to_the_bit(objective: Objective) -> None:
    loss, gradients = gradients_of(objective, micro_batch=0)
    objective.zero_grad()
    plain = objective(TOKENS, TARGETS)
    plain.backward()
    assert torch.equal(loss, plain)
    for gradient, parameter in zip(gradients, objective.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad)


@pytest.mark.parametrize(("micro_batch", "sizes"), [(0, [7]), (3, [3, 3, 1]), (9, [7])])
def test_no_more_samples_than_allowed_are_in_the_model_together(
    objective: Objective, micro_batch: int, sizes: list[int]
) -> None:
    seen: list[int] = []
    objective.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    gradients_of(objective, micro_batch=micro_batch)
    assert seen == sizes


def test_a_loss_scale_scales_the_gradients_and_not_the_loss(objective: Objective) -> None:
    loss, plain = gradients_of(objective, micro_batch=3)
    same_loss, scaled = gradients_of(objective, micro_batch=3, loss_scale=1024.0)
    assert torch.equal(loss, same_loss)
    for one, other in zip(plain, scaled, strict=True):
        assert torch.allclose(1024 * one, other, rtol=1e-6)


class Summed(nn.Module):
    """The same objective, as a sum and how many targets are in it."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, tokens: Tensor, targets: Tensor) -> Counted:
        number = torch.tensor(targets.numel())
        return Counted(total=self.objective(tokens, targets) * number, number=number)


@pytest.mark.parametrize("micro_batch", [0, 3])
def test_a_loss_with_a_count_is_divided_by_the_mean_count_of_all_ranks(
    objective: Objective, micro_batch: int
) -> None:
    """Optimizers take any multiple of a gradient alike, so a whole training would not show it."""
    plain_loss, plain = gradients_of(objective, micro_batch=micro_batch)
    objective.zero_grad()
    loss = accumulate_gradients(
        Summed(objective),
        TOKENS,
        TARGETS,
        micro_batch=micro_batch,
        mean_over_ranks=lambda count: 2 * count,  # other ranks have more targets
    )
    assert torch.allclose(2 * loss, plain_loss)
    for one, parameter in zip(plain, objective.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(one, 2 * parameter.grad, rtol=1e-4, atol=1e-7)


def test_ranks_exchange_gradients_once_for_a_batch(
    objective: Objective, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]  # is public
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(objective)
        exchanged: list[Tensor] = []
        parallel.register_comm_hook(None, noting(exchanged))
        accumulate_gradients(parallel, TOKENS, TARGETS, micro_batch=2)
    finally:
        dist.destroy_process_group()
    gradients = [p.grad for p in objective.parameters() if p.grad is not None]
    assert sum(values.numel() for values in exchanged) == sum(g.numel() for g in gradients)
    squares = sum(float(g.square().sum()) for g in gradients)
    assert sum(float(v.square().sum()) for v in exchanged) == pytest.approx(squares)  # the last


def noting(
    exchanged: list[Tensor],
) -> Callable[[object, GradBucket], torch.futures.Future[Tensor]]:
    """A hook that keeps what ranks exchange."""

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        exchanged.append(bucket.buffer().clone())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    return hook
