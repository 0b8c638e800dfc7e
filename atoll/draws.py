"""What a loop's own functions draw at random while they measure: the same each time, and on all nodes."""

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
            with _loaders_begin_anew(seed):
                yield
        finally:
            random.setstate(own[0])
            np.random.set_state(own[1])


@contextmanager
def _loaders_begin_anew(seed: int) -> Iterator[None]:
    """Within it no DataLoader goes on with an iterator from outside, nor after it with one from within.

    One with persistent_workers has a single iterator: whoever iterates anew starts it again also for the loop
    that is in the midst of it, in an order that all nodes draw alike. Generators that loaders were given draw
    alike too, and then go on as if nothing had been drawn.
    """
    # By its type, for proxies answer for others; accelerate's have another one within that has the iterator.
    found = [each for each in gc.get_objects() if issubclass(type(each), DataLoader)]
    loaders = [each for each in found if "_iterator" in vars(each)]
    kept = [(each, each._iterator) for each in loaders]
    drawers = {id(each): each for loader in loaders for each in _generators_of(loader)}.values()
    drawn = [(each, each.get_state()) for each in drawers]
    for loader in loaders:
        loader._iterator = None
    for each in drawers:
        each.manual_seed(seed)
    try:
        yield
    finally:
        for loader, iterator in kept:
            loader._iterator = iterator
        for each, state in drawn:
            each.set_state(state)


def _generators_of(loader: "DataLoader[Any]") -> Iterator[torch.Generator]:
    """Its own, and those of its samplers."""
    batches = loader.batch_sampler
    for holder in (loader, loader.sampler, batches, getattr(batches, "sampler", None)):
        if isinstance(found := getattr(holder, "generator", None), torch.Generator):
            yield found
