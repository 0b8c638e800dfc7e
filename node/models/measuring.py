"""The held-out loss of a model that a node keeps, measured here: without a coordinator, on the CPU."""

import time
import warnings
from dataclasses import replace

import torch

from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.island import Evaluation
from node.island.models.code import find_code
from node.island.parallel.mesh import Mesh
from node.island.training.trainer import Trainer
from node.kept import KeptModel


def held_out_loss(model: KeptModel, places: DataPlaces, *, samples: int | None) -> Evaluation:
    """Over as many held-out samples as the run evaluates, or others. Raises AtollError without its data.

    The GPU stays with the node, which may be training. What peers gave is read from the node's cache.
    """
    spec = model.spec
    if samples is not None:
        evaluation = spec.evaluation.model_copy(update={"samples": samples})
        spec = spec.model_copy(update={"evaluation": evaluation})
    find_code(places.code)
    is_given = spec.data.source == "tokens" and not spec.data.private
    trainer = Trainer(
        spec=spec,
        corpus=open_dataset(spec, replace(places, has_supply=is_given)),
        device=torch.device("cpu"),
        mesh=Mesh(),
        clock=time.monotonic,
    )
    trainer.take_base(places.base)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch warns of what cannot be written, as a snapshot's file
        return trainer.evaluate_at(model.parameters)
