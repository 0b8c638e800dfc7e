"""The weights that a run begins with where they are given.

They are those of a transformers folder, or of one file in the safetensors format that was written when
the run was made: the trained tensors, fp32, by their canonical names. Some node is started with them
(`--weights`); the others fetch the state from that node as joiners do, and all compare its digest with
the run's.
"""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from node.model_folder import CONFIG, read_tensors, read_weights
from node.outer_state import Vector, outer_digest
from node.tensor_file import tensors_in
from protocol.errors import ConfigError, NoInputError
from protocol.layout import Layout
from protocol.rounds import Digest
from protocol.run_spec import RunSpec

FIRST_WEIGHTS = "first.safetensors"


def digest_of_first(parameters: Vector) -> Digest:
    """The digest of the outer state that begins with these weights: its momentum is zero."""
    return outer_digest(parameters, np.zeros_like(parameters))


def write_first(path: Path, layout: Layout, parameters: Vector) -> None:
    """Writes the file; `parameters` are in canonical order. Raises OSError or SafetensorError."""
    tensors = {
        place.name: parameters[place.offset : place.offset + place.num_elements].reshape(
            place.shape
        )
        for place in layout.places
    }
    save_file(tensors, path, metadata={"format": "pt"})


def read_first(path: Path, spec: RunSpec, out: Vector) -> None:
    """Fills `out` with the run's first weights, from the file or the transformers folder.

    Tensor by tensor, so that it takes no memory of its own. Raises NoInputError where there are none,
    BadDataError for tensors that the run does not have so, and ConfigError for other weights than
    the run begins with.
    """
    if spec.first_digest is None:
        raise ConfigError(
            f"run {spec.run.name!r} draws its first weights from its seed: --weights {path} has no effect",
            next_step="leave --weights out",
        )
    if (path / CONFIG).is_file():
        read_weights(path, spec, out)
    else:
        file = path / FIRST_WEIGHTS if path.is_dir() else path
        if not file.is_file():
            raise NoInputError(
                f"{file} is not there",
                next_step="name the transformers folder that the run was made from, or the "
                f"{FIRST_WEIGHTS} of the folder that 'atoll init' made; or leave --weights out and fetch "
                "them from a node that has them",
            )
        read_tensors(tensors_in(file), spec, out, origin=file)
    digest = digest_of_first(out)
    if digest != spec.first_digest:
        raise ConfigError(
            f"{path} holds the weights {digest.hex()[:12]}, and run {spec.run.name!r} begins with "
            f"{spec.first_digest.hex()[:12]}",
            next_step="name what the run was made from, or leave --weights out and fetch them from a node "
            "that has them",
        )
