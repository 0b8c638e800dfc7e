"""Real pseudo-gradients to try codecs on: what the demo's model learns in each of some rounds.

One node in this process, without an exchange: the next round starts from the weights that the last
one ended with, and a pseudo-gradient is the difference of the two.
"""

import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.learning.data_parallel import demo_spec
from lab.simulation.inline_island import lone_work, unseen
from node.island.data.dataset import read_corpus
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh import Mesh
from node.island.training.trainer import Trainer
from node.outer_state import Vector
from protocol.run.run_spec import RunSpec


def demo_pseudo_gradients(*, rounds: int) -> list[Vector]:
    """The pseudo-gradients [all elements] of the demo's first rounds, in canonical order."""
    return pseudo_gradients_of(demo_spec(seed=0, rounds=rounds, num_nodes=1, codec="fp32"))


def pseudo_gradients_of(spec: RunSpec) -> list[Vector]:
    """Those of all rounds of a run, trained by one node."""
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    trainer = Trainer(
        spec=spec, corpus=corpus, device=torch.device("cpu"), mesh=Mesh(), clock=time.monotonic
    )
    parameters = initial_parameters(spec)
    pseudo_gradients = []
    for training_round in range(spec.run.rounds):
        trainer.adopt(parameters)
        trainer.train(lone_work(spec, spec.inner.steps, round=training_round + 1), unseen)
        published = np.empty_like(parameters)
        trainer.publish(published, 0)
        pseudo_gradients.append(parameters - published)
        parameters = published
    return pseudo_gradients
