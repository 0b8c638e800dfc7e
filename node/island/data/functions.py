"""Samples that a function of the run gives: [data] source = "function"; implements Dataset.

The function returns two map-style datasets, to train on and held out; sample number i is item i. Items
are collated by the dataset's own `collate_fn`, or as torch does it: tensors, arrays and numbers, in
tuples or dictionaries.
"""

from typing import Any, cast

import blake3
import numpy as np
from torch.utils.data import default_collate

from node.island.data.dataset import Indices, Tree
from node.island.data.manifest import Split
from node.island.models.code import called, code_digest, refuse, said
from protocol.errors import BadDataError, NoInputError
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import CorpusSummary, Digest


class FunctionData:
    """Two map-style datasets, and the batches of them."""

    def __init__(self, spec: RunSpec) -> None:
        """Calls the function. Raises ConfigError, or BadDataError for something else than two datasets."""
        assert spec.data.function is not None
        self._function = spec.data.function
        self._context = spec.model.context
        found = called(self._function, spec.data.arguments)
        if not isinstance(found, tuple) or len(found) != 2:
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

    @property
    def num_together(self) -> int:
        """See Dataset."""
        return 1

    def expect(self, split: Split, indices: Indices) -> None:
        """See Dataset. Where the function has its samples is its own business."""

    def summary(self) -> CorpusSummary:
        """See Dataset. Samples are known by the function's code and their numbers; nobody reads them all."""
        text = f"{self._function}:{self._code}:{self.num_samples}:{self.num_held_out_samples}"
        return CorpusSummary(
            digest=Digest(blake3.blake3(text.encode()).digest()),
            num_samples=self.num_samples,
            num_bytes=0,
        )

    def batch(self, split: Split, indices: Indices) -> Tree:
        """See Dataset. Of no indices the first sample: ranks without samples go through the model too."""
        numbers = cast("list[int]", np.atleast_1d(indices).tolist()) or [0]
        dataset = self._splits[split]
        collate = getattr(dataset, "collate_fn", default_collate)
        try:
            return collate([dataset[number] for number in numbers])
        except Exception as error:
            raise BadDataError(
                f"the run's function {self._function} returns samples of which no batch can be made: "
                f"{said(error)}",
                next_step="give items of one shape, or give the dataset a method collate_fn(items), which "
                "pads them and returns the batch",
            ) from error

    def num_counted(self, split: Split, indices: Indices) -> int:
        """See Dataset."""
        return len(indices) * self._context
