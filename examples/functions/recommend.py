"""Ratings of items by users: two embedding tables, of which a batch looks up few rows.

With `[inner] sparse = true` rows that a batch does not look up stay as they are. With `shard` in node.toml
the tables are cut by rows, so that together the ranks hold what none could.
"""

import numpy as np
import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor, Tensor]


class Factors(nn.Module):
    """A rating is the product of a user's and an item's vector, and what each has by itself."""

    def __init__(self, num_users: int, num_items: int, size: int) -> None:
        super().__init__()
        self.users = nn.Embedding(num_users, size + 1)
        self.items = nn.Embedding(num_items, size + 1)
        self.mean = nn.Linear(1, 1, bias=False)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Ratings [B] of users [B] for items [B]."""
        user, item = self.users(users), self.items(items)
        product = (user[:, :-1] * item[:, :-1]).sum(dim=1)
        return product + user[:, -1] + item[:, -1] + self.mean(torch.ones_like(user[:, :1]))[:, 0]


def model(users: int = 600, items: int = 200, size: int = 8):
    """What [model] function names."""
    return Factors(users, items, size), loss


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of a rating."""
    users, items, ratings = batch
    return (module(users, items) - ratings).square().mean()


class Ratings:
    """Some ratings of a table of low rank, drawn from a seed."""

    def __init__(self, seed: int, count: int, users: int, items: int) -> None:
        tastes = np.random.default_rng(0)
        likes, has = tastes.standard_normal((users, 3)), tastes.standard_normal((items, 3))
        draws = np.random.default_rng(seed)
        self._users = draws.integers(users, size=count)
        self._items = draws.integers(items, size=count)
        exact = (likes[self._users] * has[self._items]).sum(axis=1) / 2 + 3
        self._ratings = (exact + 0.1 * draws.standard_normal(count)).astype(np.float32)

    def __len__(self) -> int:
        return len(self._ratings)

    def __getitem__(self, index: int) -> tuple[np.int64, np.int64, np.float32]:
        return self._users[index], self._items[index], self._ratings[index]


def data(users: int = 600, items: int = 200, count: int = 12000):
    """What [data] function names."""
    return Ratings(1, count, users, items), Ratings(2, count // 8, users, items)
