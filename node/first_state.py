"""The weights that a run begins with where they are given: written once, when the run is made.

One file in the safetensors format holds the trained tensors, fp32, by their canonical names. Some node
has it and is started with it (`--weights`); the others fetch the state from that node as joiners do, and
all compare its digest with the run's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from node.outer_state import Vector, outer_digest
from protocol.errors import BadDataError, ConfigError, NoInputError
from protocol.layout import Layout, layout_of
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
    """Fills `out` with the run's first weights from the file, or from the folder that it is in.

    Tensor by tensor, so that it takes no memory of its own. Raises NoInputError where there is none,
    BadDataError for tensors that the run does not have so, and ConfigError for other weights than
    the run begins with.
    """
    if spec.first_digest is None:
        raise ConfigError(
            f"run {spec.run.name!r} draws its first weights from its seed: --weights {path} has no effect",
            next_step="leave --weights out",
        )
    file = path / FIRST_WEIGHTS if path.is_dir() else path
    if not file.is_file():
        raise NoInputError(
            f"{file} is not there",
            next_step=f"name {FIRST_WEIGHTS} from the folder that 'atoll coordinator init' made, or leave "
            "--weights out and fetch the weights from a node that has them",
        )
    with _refusing(file), safe_open(file, framework="numpy") as tensors:
        names = set(tensors.keys())
        for place in layout_of(spec).places:
            if place.name not in names:
                raise BadDataError(
                    f"{file} has no tensor {place.name!r}, which the run's model has",
                    next_step="name the file that was written when this run was made",
                )
            values = tensors.get_tensor(place.name)
            if values.shape != place.shape or values.dtype != np.float32:
                raise BadDataError(
                    f"{place.name} in {file} is {values.dtype} {list(values.shape)}, and the run's is "
                    f"float32 {list(place.shape)}",
                    next_step="name the file that was written when this run was made",
                )
            out[place.offset : place.offset + place.num_elements] = values.reshape(-1)
    digest = digest_of_first(out)
    if digest != spec.first_digest:
        raise ConfigError(
            f"{file} holds the weights {digest.hex()[:12]}, and run {spec.run.name!r} begins with "
            f"{spec.first_digest.hex()[:12]}",
            next_step="name the file that was written when this run was made, or leave --weights out and "
            "fetch the weights from a node that has them",
        )


@contextmanager
def _refusing(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise BadDataError(
            f"{file} cannot be read: {error}",
            next_step="copy it again from the folder where the run was made",
        ) from error
