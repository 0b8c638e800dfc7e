"""Samples that a function of the run gives: [data] source = "function"; implements Dataset.

The function returns two map-style datasets, to train on and held out; sample number i is item i. Items
are collated by the dataset's own `collate_fn`, or as torch does it: tensors, arrays and numbers, in
tuples or dictionaries.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import blake3
import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from node.island.data.dataset import Dataset, Indices, Tree, held_out_choice
from node.island.data.manifest import Split
from node.island.models.code import called, code_digest, refuse, said
from protocol.errors import BadDataError, NoInputError
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import CorpusSummary, Digest

COMPARED: tuple[tuple[Split, int], ...] = (("training", 24), ("held_out", 8))
"""How many samples nodes compare: all would be read at each start."""


class FunctionData(Dataset):
    """Two map-style datasets, and the batches of them.

    What the function draws from random, numpy's global generator or torch's is the same on all nodes.
    """

    def __init__(self, spec: RunSpec) -> None:
        """Calls the function. Raises ConfigError, or BadDataError for something else than two datasets."""
        assert spec.data.function is not None
        self._function = spec.data.function
        self._context = spec.model.context
        self._seed = spec.run.seed
        with drawing(self._seed):
            found = called(self._function, spec.data.arguments)
        if not isinstance(found, tuple | list) or len(found) != 2:  # random_split gives a list
            raise refuse(self._function, f"{type(found).__name__} instead of (training, held_out)")
        self._splits: dict[Split, Any] = {"training": found[0], "held_out": found[1]}
        for split, dataset in self._splits.items():
            if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
                raise BadDataError(
                    f"the run's function {self._function} returns a {split} dataset of type "
                    f"{type(dataset).__name__}, which has no __len__ and __getitem__",
                    next_step="return a dataset with a length, whose sample number i is item i; of a "
                    "DataLoader its dataset, of a stream a list or a file of what it gives",
                )
        if self.num_samples < spec.inner.batch or self.num_held_out_samples < 1:
            raise NoInputError(
                f"{self._function} gives {self.num_samples} samples to train on and "
                f"{self.num_held_out_samples} held out, but one batch takes {spec.inner.batch} and "
                "evaluation at least 1",
                next_step="lower [inner] batch, or give more samples",
            )
        self._code = code_digest(spec)

    @property
    def num_samples(self) -> int:
        """See Dataset."""
        return len(self._splits["training"])

    @property
    def num_held_out_samples(self) -> int:
        """See Dataset."""
        return len(self._splits["held_out"])

    def summary(self) -> CorpusSummary:
        """See Dataset. Samples are known by the function's code, their number, and some of them."""
        return self._summary

    @cached_property
    def _summary(self) -> CorpusSummary:
        text = f"{self._function}:{self._code}:{self.num_samples}:{self.num_held_out_samples}"
        hasher = blake3.blake3(text.encode())
        for split, most in COMPARED:
            for number in held_out_choice(most, len(self._splits[split])).tolist():
                hasher.update(self._known_by(split, number))
        return CorpusSummary(
            digest=Digest(hasher.digest()), num_samples=self.num_samples, num_bytes=0
        )

    def _known_by(self, split: Split, number: int) -> bytes:
        """What a sample is known by; of one that is another at each reading its kind alone."""
        once, again = (traits_of(self._read(split, number)) for _ in range(2))
        if once == again:
            return once
        return traits_of(self._read(split, number), has_values=False)

    def _read(self, split: Split, number: int) -> Tree:
        with drawing(self._seed + number):  # what augments samples draws as well
            return self._item(split, number)

    def _item(self, split: Split, number: int) -> Tree:
        try:
            return self._splits[split][number]
        except Exception as error:
            raise BadDataError(
                f"the run's function {self._function} gives no {split} sample {number}: {said(error)}",
                next_step="let the dataset give an item for each number below its length",
            ) from error

    def batch(self, split: Split, indices: Indices) -> Tree:
        """See Dataset. Of no indices the first sample: ranks without samples go through the model too."""
        numbers = cast("list[int]", np.atleast_1d(indices).tolist()) or [0]
        collate = getattr(self._splits[split], "collate_fn", default_collate)
        items = [self._item(split, number) for number in numbers]
        try:
            batch = collate(items)
        except Exception as error:
            raise BadDataError(
                f"the run's function {self._function} returns samples of which no batch can be made: "
                f"{said(error)}",
                next_step="give items of one shape, or give the dataset a method collate_fn(items), which "
                "pads them and returns the batch",
            ) from error
        for leaf in tree_leaves(batch):
            if not hasattr(leaf, "to"):  # a device; parts of a batch are rows of all that it has
                raise BadDataError(
                    f"a batch of the run's function {self._function} has {short(leaf)} of type "
                    f"{type(leaf).__name__}, and ranks take tensors alone",
                    next_step="leave it out of the samples, or have collate_fn(items) of the dataset "
                    "make a tensor of it",
                )
        return batch

    def num_counted(self, split: Split, indices: Indices) -> int:
        """See Dataset."""
        return len(indices) * self._context


def short(value: object) -> str:
    """A value as people see it, not longer than a line."""
    told = repr(value)
    return told if len(told) <= _MOST_SHOWN else f"{told[: _MOST_SHOWN - 1]}…"


_MOST_SHOWN = 40

_CPU = torch.device("cpu")


@contextmanager
def drawing(seed: int, device: torch.device = _CPU) -> Iterator[None]:
    """Within it global generators of random numbers begin with a seed, and then go on as before.

    That of a device beside the CPU has to be named.
    """
    before = random.getstate(), np.random.get_state()
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        draw_from(seed, device)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def draw_from(seed: int, device: torch.device = _CPU) -> None:
    """Has global generators of random numbers begin with a seed."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.manual_seed(seed)  # of all devices, and of the CPU again


def seed_of(*key: object) -> int:
    """A seed for what a key names, the same on all machines."""
    text = ":".join(map(str, key))
    return int.from_bytes(blake3.blake3(text.encode()).digest(length=7), "little")


def traits_of(sample: Tree, *, has_values: bool = True) -> bytes:
    """Bytes by which two samples are told apart: equal ones have the same on all machines.

    Of floating-point values mean and deviation to three digits, as two machines may round a transform
    differently; of all else the values. Without values types and shapes alone.
    """
    return b";".join(_traits_of_leaf(leaf, has_values) for leaf in tree_leaves(sample))


def _traits_of_leaf(leaf: Any, has_values: bool) -> bytes:
    kind = type(leaf).__name__.encode()
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu()
        leaf = leaf.float().numpy() if leaf.is_floating_point() else leaf.numpy()
    if isinstance(leaf, bytes | str):
        value = leaf.encode() if isinstance(leaf, str) else leaf
        return kind + (blake3.blake3(value).digest() if has_values else b"")
    if not isinstance(leaf, np.ndarray | np.generic | int | float | complex):
        return kind  # what only the function's own collate_fn knows
    values = np.asarray(leaf)
    kind += f"{values.dtype.kind}{values.shape}".encode()
    if not has_values:
        return kind
    if values.dtype.kind == "f":
        mean, deviation = _moments(values)
        scale = abs(mean) + deviation or 1.0
        return kind + f"{mean / scale:.3f}:{scale:.3g}".encode()
    return kind + blake3.blake3(np.ascontiguousarray(values).tobytes()).digest()


def _moments(values: "np.ndarray[Any, Any]") -> tuple[float, float]:
    exact = values.astype(np.float64)
    return (float(exact.mean()), float(exact.std())) if exact.size else (0.0, 0.0)
