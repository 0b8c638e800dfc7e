"""What a loop's own functions draw at random while they measure: the same each time, and on all nodes."""

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader


@contextmanager
def drawing_alike(model: nn.Module, *, seed: int = 0) -> Iterator[None]:
    """Within it what is drawn at random is the same each time and on all nodes, as a diffusion's noise.

    After it the loop draws on as if there had been none: of a seed that the function has set itself, nodes
    would train on the same samples from then on. So they would where the function reads by the loop's loader.
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
            with _loaders_begin_anew():
                yield
        finally:
            random.setstate(own[0])
            np.random.set_state(own[1])


@contextmanager
def _loaders_begin_anew() -> Iterator[None]:
    """Within it no DataLoader goes on with an iterator from outside, nor after it with one from within.

    One with persistent_workers has a single iterator: whoever iterates anew starts it again also for the loop
    that is in the midst of it, in an order that all nodes draw alike.
    """
    # By its type, for proxies answer for others.
    loaders = [each for each in gc.get_objects() if issubclass(type(each), DataLoader)]
    kept = [(each, vars(each).get("_iterator")) for each in loaders]
    for loader in loaders:
        loader._iterator = None
    try:
        yield
    finally:
        for loader, iterator in kept:
            loader._iterator = iterator
