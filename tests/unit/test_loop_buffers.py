"""What of a loop's model no exchange averages: running statistics are computed, all else is refused."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import accelerate  # type: ignore[import-untyped]  # it has no types
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import atoll.running_statistics as loops_statistics
import node.island.models.running_statistics as ranks_statistics
from atoll.errors import ModelMismatchError, SwarmError
from atoll.optimizers import Optimizers
from atoll.ranks import Ranks
from atoll.running_statistics import RunningStatistics
from atoll.watch import Watch
from node.island.models import architecture as of_ranks
from protocol.errors import ConfigError

ALONE = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
KINDS = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(3),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
}


def statistics_of(
    model: Any, compute: Callable[[], object] | None, **how: list[torch.Tensor]
) -> RunningStatistics:
    return RunningStatistics(model, averaged=how.get("averaged", []), compute=compute, ranks=ALONE)


def mean_in(norm: nn.Module) -> torch.Tensor:
    return norm.get_buffer("running_mean")


def batches(count: int = 6) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(3)
    return [torch.randn(16, 3, 4, 4, generator=draws) * 2 + 5 for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_they_become_means_over_the_batches_and_the_norm_is_otherwise_as_it_was(kind: str) -> None:
    model = nn.Sequential(KINDS[kind](), nn.Dropout(0.5))
    norm, seen = model[0], batches()
    model(torch.full((4, 3, 4, 4), torch.nan))  # what it trained on before does not count
    model.eval()  # as of a model that somebody else has saved
    statistics_of(model, lambda: [model(batch) for batch in seen]).settle()
    dims = (0, 2, 3) if kind == "BatchNorm2d" else (2, 3)
    means = torch.stack([b.mean(dims) for b in seen])
    variances = torch.stack([b.var(dims, unbiased=True) for b in seen])
    if kind == "InstanceNorm2d":  # a mean over samples, and then over batches
        means, variances = means.mean(1), variances.mean(1)
    assert torch.allclose(mean_in(norm), means.mean(0), atol=1e-5)
    assert torch.allclose(norm.get_buffer("running_var"), variances.mean(0), rtol=1e-4)
    assert norm.momentum == 0.1 and not norm.training and not norm._forward_pre_hooks


def test_around_an_evaluation_they_are_those_of_its_weights_and_then_the_loop_s_own() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    model(torch.full((4, 3, 4, 4), 7.0))
    own = mean_in(model[0]).clone()
    with statistics_of(model, lambda: [model(batch) for batch in batches()]).of_these_weights():
        assert (mean_in(model[0]) - 5).abs().max() < 0.5
    assert torch.equal(mean_in(model[0]), own) and model[0].num_batches_tracked == 1


def test_nodes_that_draw_batches_of_the_same_data_find_the_same_and_train_on_by_their_own_draws() -> (
    None
):
    found, drawn = [], []
    data = TensorDataset(torch.randn(64, 3, 2, 2, generator=torch.Generator().manual_seed(1)))
    for seed in (1, 2):
        torch.manual_seed(seed)
        drawn.append(torch.randn(3))
        torch.manual_seed(seed)
        norm = nn.BatchNorm2d(3)
        loader = DataLoader(data, batch_size=4, shuffle=True)

        def see_some(norm: nn.Module = norm, loader: Any = loader) -> None:
            for (batch,) in itertools.islice(loader, 2):
                norm(batch)

        statistics_of(norm, see_some).settle()
        found.append(mean_in(norm))
        assert torch.equal(torch.randn(3), drawn[-1]), "what it draws next is its own"
    assert torch.equal(*found)
    assert not torch.equal(*drawn)


def test_a_generator_that_the_loop_s_loader_was_given_draws_alike_for_statistics_and_then_goes_on() -> (
    None
):
    data = TensorDataset(torch.randn(24, 3, 2, 2, generator=torch.Generator().manual_seed(1)))
    found = []
    for seed in (1, 2):
        orders = []
        for is_measured in (False, True):
            norm, own = nn.BatchNorm2d(3), torch.Generator().manual_seed(seed)
            loader = DataLoader(data, batch_size=2, shuffle=True, generator=own)

            def see_some(norm: nn.Module = norm, loader: Any = loader) -> None:
                for (batch,) in itertools.islice(loader, 4):
                    norm(batch)

            statistics, order = statistics_of(norm, see_some), []
            for _ in range(2):
                for number, (batch,) in enumerate(loader):
                    order.append(float(batch[0, 0, 0, 0]))
                    if is_measured and number == 5:
                        statistics.settle()
                        found.append(mean_in(norm).clone())
            orders.append(order)
        assert orders[0] == orders[1], "as if nothing had been measured"
    for each in found:
        assert torch.equal(each, found[0]), "at all times and on all nodes"


@pytest.mark.parametrize("by", ["torch", "accelerate"])
@pytest.mark.parametrize("is_read_before", [False, True])
def test_a_loop_reads_on_by_its_loader_where_statistics_read_by_the_same_persistent_workers(
    is_read_before: bool, by: str
) -> None:
    orders, found = [], []
    data = TensorDataset(torch.randn(24, 3, 2, 2, generator=torch.Generator().manual_seed(1)))
    for seed in (1, 2):
        norm = nn.BatchNorm2d(3)
        loader = DataLoader(
            data, batch_size=1, shuffle=True, num_workers=1, persistent_workers=True
        )
        if by == "accelerate":
            loader = accelerate.data_loader.prepare_data_loader(loader)

        def see_some(norm: nn.Module = norm, loader: Any = loader) -> None:
            for (batch,) in itertools.islice(loader, 4):
                norm(batch)

        statistics = statistics_of(norm, see_some)
        torch.manual_seed(seed)
        if is_read_before:
            statistics.settle()
        order = []
        for number, (batch,) in enumerate(loader):
            order.append(float(batch[0, 0, 0, 0]))
            if number in (5, 9):
                statistics.settle()
                found.append(mean_in(norm).clone())
        assert sorted(order) == sorted(data.tensors[0][:, 0, 0, 0].tolist()), "each sample once"
        orders.append(order)
        again = [float(batch[0, 0, 0, 0]) for (batch,) in loader]
        assert sorted(again) == sorted(order) and again != order
    assert orders[0][10:] != orders[1][10:], "nodes train on in orders of their own"
    for each in found:
        assert torch.equal(each, found[0]), "and find the same"


def test_a_compiled_model_is_not_compiled_for_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    compiles = 0

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., object]:
        nonlocal compiles
        compiles += 1
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    compiled(batches()[0])
    before = compiles
    statistics_of(compiled, lambda: [compiled(batch) for batch in batches(12)]).settle()
    assert compiles == before
    assert mean_in(model[1]).abs().max() > 0


def test_a_norm_that_is_frozen_while_the_loop_trains_keeps_its_own() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    model[0].eval()
    mean_in(model[0]).fill_(1.0)
    statistics = statistics_of(model, lambda: [model(batch) for batch in batches()])
    statistics.look()
    statistics.settle()
    assert (mean_in(model[0]) == 1).all() and not model[0].training
    assert (mean_in(model[1]) != 0).all()


def test_a_model_with_them_is_refused_where_nobody_says_how_they_are_computed() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    with pytest.raises(ModelMismatchError, match=r"0 and 1 more \(BatchNorm2d\)") as refusal:
        statistics_of(model, None).refuse_if_untold()
    assert "statistics=FUNCTION" in str(refusal.value)
    statistics_of(model.eval(), None).refuse_if_untold()  # all are frozen
    statistics_of(nn.BatchNorm2d(3, track_running_stats=False), None).refuse_if_untold()
    averaged = list(model.buffers())  # by the run itself
    statistics_of(model.train(), None, averaged=averaged).refuse_if_untold()


def test_a_function_that_runs_no_norm_is_told() -> None:
    with pytest.raises(SwarmError, match="has run none of the model's norms"):
        statistics_of(nn.BatchNorm2d(3), lambda: None).settle()


class Counting(nn.Module):
    seen: torch.Tensor
    mask: torch.Tensor

    def __init__(self, *, is_persistent: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=is_persistent)
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.mask.copy_(self.mask.clone())  # as DistributedDataParallel does: to the same
        return x * self.mask


class Looking:
    """A loop's watch over a model of which the run trains nothing, called as that of ranks."""

    def __init__(self, model: nn.Module) -> None:
        model.requires_grad_(False)
        names = statistics_of(model, None).names
        self._watch = Watch(
            model, places=(), optimizers=Optimizers(None), ranks=ALONE, but_for=names
        )

    def check(self) -> None:
        self._watch.look()


def watch_of(model: nn.Module) -> Looking:
    return Looking(model)


def test_other_buffers_that_training_changes_are_refused_by_name_and_caches_are_not() -> None:
    model = nn.Sequential(Counting(is_persistent=True), nn.BatchNorm1d(3))
    watch = watch_of(model)
    watch.check()
    model(torch.randn(4, 3))
    with pytest.raises(ModelMismatchError, match=r"changes the buffer 0\.seen of a Counting"):
        watch.check()
    model[0] = Counting(is_persistent=False)
    watch = watch_of(model)
    model(torch.randn(4, 3))
    watch.check()
    model[0].mask = torch.zeros(3)  # another in its place
    with pytest.raises(ModelMismatchError, match=r"0\.mask"):
        watch.check()


class Codebook(nn.Module):
    """Its averages as most libraries write them: to `.data`, of which torch counts no change."""

    codes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("codes", torch.tensor([1.0, torch.nan, torch.inf]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.codes.data[0] *= 0.9
        out: torch.Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("watching", [watch_of, lambda model: of_ranks.BufferWatch([model])])
def test_a_codebook_that_is_moved_behind_torch_s_back_is_refused(
    watching: Callable[[nn.Module], Any],
) -> None:
    model = Codebook()
    watch = watching(model)
    model.eval()(torch.ones(2, 3))
    watch.check()
    model.train()(torch.ones(2, 3))
    assert model.codes._version == 0
    with pytest.raises(
        (ModelMismatchError, ConfigError), match=r"changes the buffer codes of a Codebook"
    ):
        watch.check()


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda matrix: matrix.to_sparse(),
    "csr": lambda matrix: matrix.to_sparse_csr(),
    "csc": lambda matrix: matrix.to_sparse_csc(),
    "conjugate": lambda matrix: matrix.to(torch.complex64).conj(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("watching", [watch_of, lambda model: of_ranks.BufferWatch([model])])
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("changed", [2 * torch.eye(3), torch.eye(3)[[0, 0, 1]], torch.ones(3, 3)])
def test_buffers_of_any_layout_are_watched_as_others_are(
    changed: torch.Tensor, kind: str, watching: Callable[[nn.Module], Any]
) -> None:
    """As the edges of a graph, whose weights and places may change, or a transform."""
    model = nn.Module()
    model.register_buffer("edges", LAYOUTS[kind](torch.eye(3)))
    watch = watching(model)
    watch.check()
    model.edges = LAYOUTS[kind](changed)
    with pytest.raises((ModelMismatchError, ConfigError), match="changes the buffer edges"):
        watch.check()


def norm_of(module: Any) -> float:
    return float(torch.linalg.matrix_norm(module.weight.flatten(1), 2))


@pytest.mark.parametrize("kind", ["parametrized", "hooked", "after another"])
def test_spectral_norm_is_each_node_s_own_until_it_is_measured_or_kept(kind: str) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 16, 3)
    if kind == "after another":
        nn.utils.parametrizations.weight_norm(conv)
    put = nn.utils.spectral_norm if kind == "hooked" else nn.utils.parametrizations.spectral_norm
    model, pixels = nn.Sequential(put(conv)), torch.randn(1, 8, 4, 4)
    watch, statistics = watch_of(model), statistics_of(model, None)
    model(pixels)
    watch.check()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))  # as the swarm's
    model.eval()(pixels)
    assert norm_of(model[0]) > 1.02, "a test that can fail"
    own = [buffer.clone() for buffer in model.buffers()]
    with statistics.of_these_weights():
        model(pixels)
        assert norm_of(model[0]) == pytest.approx(1, abs=1e-4)
    assert all(map(torch.equal, own, model.buffers()))
    statistics.settle()
    model(pixels)
    assert norm_of(model[0]) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        *("SpectralVectors", "spectral_vectors_of", "leading_vectors"),
        *("MOST_LOOKS", "BETWEEN_LOOKS", "NEAR_ENOUGH", "_parametrized", "_hooked", "_whole"),
    ],
)
def test_loops_and_ranks_make_spectral_norm_s_vectors_by_the_same_code(name: str) -> None:
    """Twice, for what loops import knows nothing of the island; nodes of both kinds hold one state."""
    of_a_loop, of_a_rank = getattr(loops_statistics, name), getattr(ranks_statistics, name)
    if isinstance(of_a_loop, int | float):
        assert of_a_loop == of_a_rank
    else:
        assert inspect.getsource(of_a_loop) == inspect.getsource(of_a_rank)
