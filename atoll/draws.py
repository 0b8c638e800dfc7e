"""What a loop's own functions draw at random while they measure: the same each time, and on all nodes."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def drawing_alike(model: nn.Module, *, seed: int = 0) -> Iterator[None]:
    """Within it what is drawn at random is the same each time and on all nodes, as a diffusion's noise.

    After it the loop draws on as if there had been none: of a seed that the function has set itself, nodes
    would train on the same samples from then on.
    """
    own = random.getstate(), np.random.get_state()
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            # No torch.manual_seed: it reaches devices that are not put back.
            for each in (
                torch.default_generator,
                *map(torch.cuda.default_generators.__getitem__, devices),
            ):
                each.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
        finally:
            random.setstate(own[0])
            np.random.set_state(own[1])
