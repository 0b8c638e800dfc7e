"""Atoll for training loops of one's own: `atoll.join(model, optimizer)` makes one an island of a swarm.

Imports torch, numpy and the standard library, nothing else. The node is a program of its own, in an
environment of its own: `atoll node start --loop`.
"""

from typing import TYPE_CHECKING, Any

from atoll.errors import ModelMismatchError, NoNodeError, RunOverError, SamplesError, SwarmError
from atoll.session import Run
from atoll.swarm import Step, Swarm, join
from atoll.training import Batch

if TYPE_CHECKING:
    from atoll.trainer import TrainerCallback

__all__ = [
    "Batch",
    "ModelMismatchError",
    "NoNodeError",
    "Run",
    "RunOverError",
    "SamplesError",
    "Step",
    "Swarm",
    "SwarmError",
    "TrainerCallback",
    "join",
]


def __getattr__(name: str) -> Any:
    """Imports transformers only for who asks for the callback."""
    if name == "TrainerCallback":
        from atoll.trainer import TrainerCallback

        return TrainerCallback
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
