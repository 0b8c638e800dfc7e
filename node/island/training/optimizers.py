"""The inner optimizers: AdamW on everything, or Muon on the layers' matrices and AdamW on the rest.

With `sparse`, embedding tables have an AdamW of their own that leaves rows without a gradient alone.

Muon's iteration needs whole matrices: `WholeMatrices` makes them out of shards, each on one rank. Every rank
gets about as much work, and twice over the network goes no more than its own shards ("Muon is scalable for
LLM training", Liu et al., 2025, section 2.3, gathers all of a matrix on all ranks and has each of them
iterate).

Each group carries the `peak_rate` that the schedule scales. What lives elsewhere: the schedule
(protocol.run.schedule), clipping and the step itself (node.island.training.trainer).
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from node.island.models.architecture import Roles, roles_of
from node.island.parallel.mesh import dealt, extent_of, local_of
from protocol.run.run_spec import InnerSection

_ADAM_EPSILON = 1e-8
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPSILON = 1e-7  # of a norm that may be 0
_MOST_ELEMENTS_AT_ONCE = 1 << 22  # small matrices are iterated together, large ones alone

Corners = list[int]
"""A box of a matrix: first row and column, rows, columns."""


class WholeMatrices:
    """Matrices of which each rank of a group has a box. All its ranks make the same calls."""

    def __init__(self, matrices: list[Tensor], group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._shapes = [tuple(matrix.shape) for matrix in matrices]
        extents = [extent_of(matrix) for matrix in matrices]
        own = torch.tensor([start + size for start, size in extents], device=matrices[0].device)
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, own, group=group)
        self._boxes: list[list[Corners]] = torch.stack(every).tolist()
        work = [rows * columns * min(rows, columns) for rows, columns in self._shapes]
        self._dealt = dealt(work, len(every))

    def apply(
        self, function: Callable[[list[Tensor]], list[Tensor]], parts: list[Tensor]
    ) -> list[Tensor]:
        """The rank's boxes of what a function of whole matrices makes of them."""
        own = self._boxes[self._rank]
        to_owners = [[parts[i] for i in turn] for turn in self._dealt]
        mine = self._dealt[self._rank]
        from_ranks = [[boxes[i] for i in mine] for boxes in self._boxes]
        received = self._exchanged(to_owners, from_ranks, parts[0])
        whole = [parts[0].new_empty(self._shapes[i]) for i in mine]
        for boxes, pieces in zip(from_ranks, received, strict=True):
            for matrix, box, piece in zip(whole, boxes, pieces, strict=True):
                _cut(matrix, box).copy_(piece)
        results = function(whole)
        to_ranks = [
            [_cut(matrix, box) for matrix, box in zip(results, boxes, strict=True)]
            for boxes in from_ranks
        ]
        from_owners = [[own[i] for i in turn] for turn in self._dealt]
        returned = self._exchanged(to_ranks, from_owners, parts[0])
        places = dict(zip(chain(*self._dealt), chain(*returned), strict=True))
        return [places[i] for i in range(len(parts))]

    def _exchanged(
        self, sent: list[list[Tensor]], expected: list[list[Corners]], like: Tensor
    ) -> Iterator[list[Tensor]]:
        """What each rank has for this one, in the order of ranks; a rank may have nothing."""
        flat = torch.cat([like.new_empty(0), *(each.reshape(-1) for each in chain(*sent))])
        sizes = [[rows * columns for _, _, rows, columns in boxes] for boxes in expected]
        received = like.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            received,
            flat,
            output_split_sizes=[sum(each) for each in sizes],
            input_split_sizes=[sum(piece.numel() for piece in pieces) for pieces in sent],
            group=self._group,
        )
        pieces = iter(torch.split(received, list(chain(*sizes))))
        return (
            [next(pieces).view(rows, columns) for _, _, rows, columns in boxes]
            for boxes in expected
        )


def _cut(matrix: Tensor, box: Corners) -> Tensor:
    row, column, rows, columns = box
    return matrix.narrow(0, row, rows).narrow(1, column, columns)


Gather = Callable[[list[Tensor]], WholeMatrices]
"""Finds the way to whole matrices from those that ranks have parts of."""


class _Uncompiled(Optimizer):
    """An optimizer without what torch wraps around its methods for those who compile them.

    Nobody here does, and the first call of such a method imports torch's compiler: a second of each start.
    """

    add_param_group = inspect.unwrap(Optimizer.add_param_group)


class AdamW(_Uncompiled, torch.optim.AdamW):
    """torch's own (Loshchilov and Hutter, 2019)."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def inner_optimizers(
    model: nn.Module,
    inner: InnerSection,
    *,
    roles: Roles | None = None,
    iteration_dtype: torch.dtype = torch.float32,
    iteration_device: torch.device | None = None,
    gather: Gather | None = None,
) -> list[Optimizer]:
    """The optimizers that together step every trained parameter once; their order is fixed.

    `roles` says which parameters Muon takes and which are tables; by kind of module when it is not
    given. `gather` is for models whose matrices are spread over ranks; Muon iterates on
    `iteration_device`, which need not be where an offloaded model is.
    """
    roles = roles_of(model) if roles is None else roles
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizers: list[Optimizer] = []
    if inner.sparse and (tables := [p for p in trained if p in roles.tables]):
        optimizers.append(RowwiseAdamW.of_run(tables, inner))
        trained = [p for p in trained if p not in roles.tables]
    matrices = [p for p in trained if p in roles.matrices]
    if inner.optimizer == "muon" and matrices:
        optimizers.append(
            Muon(
                [{"params": matrices, "peak_rate": inner.muon_peak_rate}],
                lr=inner.muon_peak_rate,
                momentum=inner.muon_momentum_or_default,
                weight_decay=inner.weight_decay,
                iteration_dtype=iteration_dtype,
                iteration_device=iteration_device,
                whole=gather(list(matrices)) if gather is not None else None,
            )
        )
        trained = [p for p in trained if p not in roles.matrices]
    if trained:
        optimizers.append(_adamw(trained, roles, inner))
    return optimizers


def iteration_dtype_of(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What Muon iterates in: fp16's range is too small for it, and a CPU would emulate bf16."""
    is_bf16 = dtype == torch.bfloat16 and device.type != "cpu"
    return torch.bfloat16 if is_bf16 else torch.float32


def _adamw(parameters: list[nn.Parameter], roles: Roles, inner: InnerSection) -> AdamW:
    """AdamW; only matrices of layers and head decay."""
    decayed = [p for p in parameters if p.ndim > 1 and p not in roles.tables]
    others = [p for p in parameters if p.ndim <= 1 or p in roles.tables]
    groups = [
        {"params": decayed, "weight_decay": inner.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW(
        [group | {"peak_rate": inner.learning_rate} for group in groups if group["params"]],
        lr=inner.learning_rate,
        betas=(inner.beta1, inner.beta2),
        eps=_ADAM_EPSILON,
        fused=True,
    )


class RowwiseAdamW(_Uncompiled):
    """AdamW on tables of which a batch looks up few rows: rows without a gradient are left alone.

    Plain AdamW moves every row in every step, by the momentum of gradients long past. Here a row's
    moments and its count of steps move with its own gradients only, so its first steps are corrected
    for their bias as AdamW's first ones are. Tables do not decay. Whole rows of a table that is
    sharded by rows are on one rank, which alone looks at them.
    """

    def __init__(
        self,
        tables: Iterable[Tensor] | list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float = _ADAM_EPSILON,  # ZeRO 1 makes another one of all defaults
    ) -> None:
        super().__init__(tables, {"lr": lr, "betas": betas, "eps": eps})

    @classmethod
    def of_run(cls, tables: list[nn.Parameter], inner: InnerSection) -> "RowwiseAdamW":
        """As [inner] has it."""
        return cls(
            [{"params": tables, "peak_rate": inner.learning_rate}],
            lr=inner.learning_rate,
            betas=(inner.beta1, inner.beta2),
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch overloads it for closures
        """Moves the rows that have a gradient other than zero."""
        assert closure is None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for table in group["params"]:
                if table.grad is None:
                    continue
                state: dict[str, Any] = self.state[table]
                if not state:
                    state.update(self.zero_state(table))
                gradient = local_of(table.grad)
                rows = gradient.flatten(1).ne(0).any(dim=1).nonzero().squeeze(1)
                own = gradient[rows]
                mean, square, steps = (
                    local_of(state[key]) for key in ("exp_avg", "exp_avg_sq", "row_steps")
                )
                new_mean = mean[rows].lerp_(own, 1 - beta1)
                new_square = square[rows].mul_(beta2).addcmul_(own, own, value=1 - beta2)
                new_steps = steps[rows] + 1
                mean[rows], square[rows], steps[rows] = new_mean, new_square, new_steps
                scale = (1 - beta2**new_steps).sqrt() / (1 - beta1**new_steps)  # [rows, 1]
                direction = new_mean / (new_square.sqrt() + group["eps"] * scale)
                values = local_of(table)
                values[rows] = values[rows] - group["lr"] * scale * direction

    @staticmethod
    def zero_state(table: Tensor) -> dict[str, Tensor]:
        """Of a table that no step has touched yet."""
        whole = table.detach()
        return {
            "exp_avg": torch.zeros_like(whole),
            "exp_avg_sq": torch.zeros_like(whole),
            "row_steps": torch.zeros_like(whole.narrow(1, 0, 1)),
        }


class Muon(_Uncompiled):
    """Steps by the orthogonalised momentum of each matrix.

    Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks". The update is
    scaled to the size of AdamW's, 0.2 · sqrt(longer side), so that AdamW's learning rate and weight
    decay suit it (Liu et al., 2025, "Muon is scalable for LLM training", section 2.2).
    `torch.optim.Muon` does the same, but always iterates in bf16, which a CPU has to emulate.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor] | list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        iteration_dtype: torch.dtype = torch.float32,
        iteration_device: torch.device | None = None,
        whole: WholeMatrices | None = None,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.iteration_dtype = iteration_dtype
        self._iteration_device = iteration_device
        self._whole = whole

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch overloads it for closures
        """Moves every matrix that has a gradient, some at a time; the gradients are used up."""
        assert closure is None
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            directions = [self._momentum_of(p, group["momentum"]) for p in with_gradient]
            for place, update in self._orthogonalised(directions):
                values = local_of(with_gradient[place])
                values.mul_(1 - group["lr"] * group["weight_decay"])
                longer = max(with_gradient[place].shape)
                values.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(longer))

    def _momentum_of(self, parameter: Tensor, momentum: float) -> Tensor:
        """Nesterov's: the running mean, moved once more towards the gradient, in whose place it is."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient = local_of(parameter.grad)
        mean = local_of(state["momentum_buffer"]).lerp_(gradient, 1 - momentum)
        return gradient.lerp_(mean, momentum)

    def _orthogonalised(self, directions: list[Tensor]) -> Iterable[tuple[int, Tensor]]:
        if self._whole is None:
            return orthogonalised(directions, self.iteration_dtype, self._iteration_device)
        lower = [each.to(self.iteration_dtype) for each in directions]
        return enumerate(self._whole.apply(self._all_orthogonalised, lower))

    def _all_orthogonalised(self, matrices: list[Tensor]) -> list[Tensor]:
        updates = dict(orthogonalised(matrices, self.iteration_dtype, self._iteration_device))
        return [updates[place] for place in range(len(matrices))]


def orthogonalised(
    matrices: list[Tensor], dtype: torch.dtype, device: torch.device | None = None
) -> Iterator[tuple[int, Tensor]]:
    """The place and about U Vᵀ of each matrix U S Vᵀ, where and as it is: singular values 0.7 to 1.2.

    Five steps of a Newton–Schulz iteration whose coefficients grow small singular values fastest
    and do not converge to exactly one (Jordan et al., 2024). Matrices of a shape go together, one
    after the other come out: all of them would be as much memory as the model. They iterate on
    `device`, if one is given: what a CPU keeps for a GPU takes it minutes.
    """
    for chunk in _chunks(matrices):
        lying = torch.stack([_lying(matrices[i]) for i in chunk])
        stacked = lying.to(device or lying.device, dtype)  # [N, short, long]
        for i, update in zip(chunk, _iterated(stacked), strict=True):
            standing = update.T if matrices[i].shape[0] > matrices[i].shape[1] else update
            yield i, standing.to(matrices[i])


def _lying(matrix: Tensor) -> Tensor:
    """With no more rows than columns: the Gram matrix is then the smaller one."""
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def _chunks(matrices: list[Tensor]) -> Iterator[list[int]]:
    """Places of matrices of one lying shape, as many as may be stacked at once."""

    def shape_at(i: int) -> tuple[int, ...]:
        return tuple(sorted(matrices[i].shape))

    for shape, places in groupby(sorted(range(len(matrices)), key=shape_at), key=shape_at):
        together = max(1, _MOST_ELEMENTS_AT_ONCE // math.prod(shape))
        alike = list(places)
        for start in range(0, len(alike), together):
            yield alike[start : start + together]


def _iterated(x: Tensor) -> Tensor:
    """Newton–Schulz on a stack of matrices [N, short, long]."""
    a, b, c = _COEFFICIENTS
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPSILON)  # spectral norms are now ≤ 1
    for _ in range(_ITERATIONS):
        gram = x @ x.mT  # [N, short, short]
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
