"""Functions that runs of the tests bring."""

import os
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 — its usual name
from torch.utils.data import Dataset, Subset, TensorDataset


class Net(nn.Module):
    """A table, layers that are alike, a head."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(3))
        self.head = nn.Linear(width, 3)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words).mean(dim=1)  # [B, width]
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.head(x)
        return out


class Gain(nn.Module):
    """One number for all that goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.gain = Gain()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.gain(torch.relu(self.up(self.norm(x)))))
        return out


def mean_loss(module: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch["words"]), batch["label"])


def summed_loss(module: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Only labels other than 0 count."""
    nats = F.cross_entropy(module(batch["words"]), batch["label"], reduction="none")
    counted = (batch["label"] != 0).float()
    return (nats * counted).sum(), counted.sum()


def accuracy(module: nn.Module, batch: Any) -> Tensor:
    return (module(batch["words"]).argmax(dim=1) == batch["label"]).float().mean()


PLAN = {
    "layers.*.up": "column",
    "layers.*.gain": "sequence",  # it sees a part of what is inside on each rank
    "layers.*.down": "row",
    "table": "table",
}


def net(width: int = 16, rows: int = 40, counts: bool = False) -> Any:
    return Net(width, rows), summed_loss if counts else mean_loss, accuracy, PLAN


def net_with_wrong_plan(how: str) -> Any:
    """What sees a part of its inputs on each rank is said to see all of them; or what is cut stays so."""
    wrong = {"gradient": {"layers.*.gain": "replicate"}, "shapes": {"layers.*.down": "replicate"}}[
        how
    ]
    return Net(16, 40), mean_loss, None, {**PLAN, **wrong}


def net_without_plan() -> Any:
    return Net(8, 40), mean_loss


def net_of_checkpoint(file: str, how: str) -> Any:
    """A net that begins with weights of a file, all or some, or with none of them."""
    if how == "drawn from a seed of its own":
        torch.manual_seed(7)
    net, loaded = Net(16, 40), torch.load(file)
    if how == "loaded":
        net.load_state_dict(loaded)
    elif how == "loaded but for a head":
        net.load_state_dict(
            {n: values for n, values in loaded.items() if "head" not in n}, strict=False
        )
    elif how == "a head alone":
        net.head.load_state_dict({n: loaded[f"head.{n}"] for n in ("weight", "bias")})
    return net, mean_loss


def bigrams(rows: int = 256) -> Any:
    """A language model of one's own: what follows a byte depends on that byte alone."""

    def loss(module: nn.Module, batch: Any) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)

    return nn.Embedding(rows, 256), loss


def llama() -> Any:
    """A model of transformers', made here."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, vocab_size=256, num_attention_heads=2, rope_theta=5e5)

    def loss(module: nn.Module, batch: Any) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(module(tokens).logits.flatten(0, 1), targets.flatten())

    return LlamaForCausalLM(config), loss


def net_with_frozen_table() -> Any:
    module = Net(8, 40)
    module.table.weight.requires_grad_(False)
    return module, mean_loss


def net_alone() -> Any:
    return net_with_spectral_norm()[0]


def net_with_batch_norm() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), squares


def net_with_spectral_norm(how: str = "parametrized", normed: bool = False) -> Any:
    put: Any = {
        "parametrized": nn.utils.parametrizations.spectral_norm,
        "hooked": nn.utils.spectral_norm,
    }[how]
    middle = nn.BatchNorm1d(32) if normed else nn.Tanh()
    layers = put(nn.Linear(4, 32)), middle, put(nn.Linear(32, 1, bias=False))
    return nn.Sequential(*layers), squares


def deep_net_with_spectral_norm() -> Any:
    put = nn.utils.parametrizations.spectral_norm
    layers = (nn.Sequential(put(nn.Linear(4, 4)), nn.ReLU()) for _ in range(2))
    return nn.Sequential(nn.Sequential(*layers), nn.Linear(4, 1)), squares


def deep_net_with_batch_norm() -> Any:
    layers = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(2))
    return nn.Sequential(nn.Sequential(*layers), nn.Linear(4, 1)), squares


def net_with_batch_norm_and_plans() -> Any:
    return *net_with_batch_norm(), None, {"0": "column", "stages": ["*"]}


class Centred(nn.Module):
    """Takes a mean of all that it has seen away, which it keeps in a buffer."""

    mean: Tensor

    def __init__(self, width: int, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(dim=0), 0.1)
        return x - self.mean


def net_with_own_mean(persistent: bool = True) -> Any:
    return nn.Sequential(Centred(4, persistent), nn.Linear(4, 1)), squares


class Waves(nn.Module):
    """Random Fourier features, or a copy of what a table begins with, in a buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)
        if kind == "seeded":
            waves = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        elif kind == "frozen":
            self.waves = nn.Parameter(torch.randn(4, 4), requires_grad=False)
            return
        elif kind == "sparse":
            waves = torch.eye(4).to_sparse()
        elif kind == "of weights":
            waves = self.out.weight.detach().clone().expand(4, 4)
        else:
            waves = torch.from_numpy(np.random.randn(4, 4).astype(np.float32))
        self.register_buffer("waves", waves)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.sin(x @ self.waves))
        return out


def net_with_waves(kind: str = "drawn") -> Any:
    return Waves(kind), squares


def net_with_type(dtype: str) -> Any:
    return nn.Linear(4, 1).to(getattr(torch, dtype)), squares


def net_tied_by_data() -> Any:
    module = nn.ModuleDict({"table": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
    module["head"].weight.data = module["table"].weight.data
    return module, lambda module, batch: module["head"](module["table"](batch)).square().mean()


def net_on_meta() -> Any:
    with torch.device("meta"):
        return Net(4, 8), mean_loss


def net_that_reads_its_weights() -> Any:
    return nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), mean_loss


def net_with_unused() -> Any:
    module = nn.ModuleDict({"used": nn.Linear(4, 1), "unused": nn.Linear(4, 1)})
    return module, lambda module, batch: module["used"](batch).square().mean()


def net_with_a_loss_for_each() -> Any:
    return Net(8, 40), lambda module, batch: F.cross_entropy(
        module(batch["words"]), batch["label"], reduction="none"
    )


def net_with_a_mistake() -> Any:
    return Net(8, 40), lambda module, batch: mean_loss(module, {"words": batch["wrods"]})


def squares(module: nn.Module, batch: Tensor) -> Tensor:
    return module(batch).square().mean()


def nothing() -> Any:
    return None


def failing(depth: int = 1) -> Any:
    raise ZeroDivisionError(f"at depth {depth}")


class Samples(Dataset[dict[str, Any]]):
    """Bags of words with a label that follows from them."""

    def __init__(self, seed: int, count: int) -> None:
        draws = np.random.default_rng(seed)
        self._words = draws.integers(40, size=(count, 5))

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = self._words[index]
        return {"words": words, "label": int(words.sum()) % 3}


def samples(count: int = 200) -> Any:
    return Samples(1, count), Samples(2, 31)


def unseeded_split() -> Any:
    return torch.utils.data.random_split(Samples(1, 200), (150, 50))


def samples_by_hash() -> Any:
    """As of a set's order, or a folder's: another one in each process, here at each call."""
    seed = int.from_bytes(os.urandom(4))
    return Samples(seed, 200), Samples(2, 31)


class Augmented(Samples):
    """Draws at each reading, from a generator that nobody else seeds."""

    _draws = np.random.default_rng()

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"words": self._draws.integers(40, size=5)}


def augmented() -> Any:
    return Augmented(1, 200), Augmented(2, 31)


class Rows:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


def rows() -> Any:
    return Rows(), Rows()


class Ending(Rows):
    """Has no sample from the 40th on, whatever its length says."""

    def __getitem__(self, index: int) -> Tensor:
        if index >= 40:
            raise ValueError(f"row {index} is damaged")
        return super().__getitem__(index)


def ending() -> Any:
    return Ending(), Rows()


class Noisy(Rows):
    """Held out as in training: what makes batches of it draws from all global generators."""

    def collate_fn(self, items: list[Tensor]) -> Tensor:
        drawn = random.random() + np.random.random() + torch.rand(())
        return torch.stack(items) / 64 + drawn


def noisy() -> Any:
    return Noisy(), Noisy()


def net_with_noise() -> Any:
    """As of diffusion: the loss draws at each call."""
    return nn.Linear(4, 1), lambda module, x: module(x + torch.randn_like(x)).square().mean()


class Draws:
    """Rows drawn from a seed, with a mean and a variance."""

    def __init__(self, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        self._rows = 3 + 2 * torch.randn(64, 4, generator=draws)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index]


def draws() -> Any:
    return Draws(1), Draws(2)


class Ragged:
    """Row i has i + 1 places."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(index + 1)


class Padded(Ragged):
    def collate_fn(self, items: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(items, batch_first=True)


def ragged() -> Any:
    return Ragged(), Ragged()


def padded() -> Any:
    return Padded(), Padded()


def stream() -> Any:
    return iter(range(10)), Ragged()


class Chain(nn.Module):
    """Modules one after another, of different size, the last two with nothing to train between."""

    def __init__(self, width: int, *, tied: bool) -> None:
        super().__init__()
        self.table = Bag(40, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(4))
        self.squash = nn.Tanh()
        self.head = nn.Linear(width, 40, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.squash(x))
        return out


class Bag(nn.Embedding):
    """The mean of what words stand for."""

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words).mean(dim=1)  # [B, width]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = _Layer(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


STAGES = ("table", "layers.*", "squash", "head")

CHAIN_PLAN = {
    "layers.*.inner.up": "column",
    "layers.*.inner.gain": "sequence",
    "layers.*.inner.down": "row",
    "stages": STAGES,
}


def chain(tied: bool = True, counts: bool = False) -> Any:
    return Chain(16, tied=tied), summed_loss if counts else mean_loss, accuracy, CHAIN_PLAN


class Unchained(Chain):
    """Stages that are none, in ways that names and shapes do or do not show."""

    def __init__(self, how: str) -> None:
        super().__init__(16, tied=False)
        self.how = how
        if how == "alone":
            self.scale = nn.Parameter(torch.ones(16))

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for layer in self.layers:
            y = layer(x)
            x = x + y if self.how == "besides" else y
        if self.how == "in place":
            x.mul_(2)
        if self.how == "alone":
            x = x * self.scale
        out: Tensor = self.head(self.squash(x))
        if self.how == "afterwards":
            out = out - 1
        if self.how == "twice":
            out = self.head(self.squash(x))
        return out


def unchained(how: str, **_: Any) -> Any:
    stages = {"unknown": ("table", "blocks.*"), "nested": (*STAGES, "layers.*.inner")}
    plan = {"stages": stages.get(how, STAGES[:-1] if how == "left out" else STAGES)}
    loss = loss_of_matrix if how == "more than a call" else mean_loss
    return Unchained(how), loss, None, plan


def loss_of_matrix(module: Any, batch: Any) -> Tensor:
    return mean_loss(module, batch) + module.head.weight.square().sum()


def flat() -> Any:
    return nn.Linear(4, 1), squares


def chain_with_metric_of_its_own() -> Any:
    def of_other_words(module: nn.Module, batch: Any) -> Tensor:
        return module((batch["words"] + 1) % 40).mean()

    return Chain(16, tied=True), mean_loss, of_other_words, CHAIN_PLAN


def pairs(count: int = 64) -> Any:
    """Two views of each thing, and its kind."""
    draws = torch.Generator().manual_seed(0)
    things = torch.randn(count, 6, generator=draws)
    views = things + 0.1 * torch.randn(count, 6, generator=draws)
    rows = TensorDataset(things, views, torch.arange(count) % 3)
    return Subset(rows, range(count - 16)), Subset(rows, range(count - 16, count))


class Coded(nn.Linear):
    codes: Tensor

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("codes", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.codes.data.mul_(0.9)
        return super().forward(x)


def net_with_a_loss(kind: str) -> Any:
    if kind == "codebook":
        return Coded(), lambda module, batch: _loss_of("mean", module, batch)
    return nn.Linear(6, 3), lambda module, batch: _loss_of(kind, module, batch)


def _loss_of(kind: str, module: nn.Module, batch: Any) -> Any:
    one, other, label = batch
    nats = F.cross_entropy(module(one), label, reduction="none")
    if "negatives" in kind:
        noise = torch.randn_like(one) * ("noisy" in kind)
        likeness = module(one + noise) @ module(other).T
        return F.cross_entropy(likeness, torch.arange(len(one), device=one.device))
    match kind:
        case "mean":
            return nats.mean()
        case "sum":
            return nats.sum()
        case "weighted":
            return F.cross_entropy(module(one), label, weight=torch.tensor([1.0, 5.0, 0.1]))
        case "counted":
            return nats.sum(), torch.tensor(len(nats))
        case "noisy":
            return (module(one + torch.randn_like(one)) - module(other)).square().mean()
        case "over the batch":
            return (module(one) / module(one).std(dim=0, correction=0)).square().mean()
        case _:
            if len(one) < 2:
                raise ValueError("no pair")
            return nats.mean()


class Scaled(nn.Module):
    """Scalars that are trained, as CLIP's temperature: parameters without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList(nn.Parameter(torch.tensor(1.0 + i)) for i in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, things: Tensor) -> Tensor:
        out: Tensor = self.gains[0] * self.head(self.gains[1] * things)
        return out


def net_with_scalars() -> Any:
    return Scaled(), lambda module, batch: _loss_of("mean", module, batch)


class _Named(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, place: int) -> Any:
        return {"thing": torch.ones(6), "name": f"thing {place}"}


def named_things() -> Any:
    return _Named(), _Named()
