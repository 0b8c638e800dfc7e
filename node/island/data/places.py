"""Where a node has the data of its run, as its owner says. Importing it costs nothing."""

from dataclasses import dataclass
from pathlib import Path

DEFAULT_CACHE_BYTES = 20 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlaces:
    """Folders and limits for the data of a run."""

    folder: Path  # where relative paths begin
    own: str = ""  # before the run file's paths; "" for none
    code: Path | None = None  # where functions of the run are found, beside what is installed
    base: Path | None = None  # the model that the run's adapters belong to
    cache: Path | None = None  # for what is fetched; None: nothing can be
    cache_bytes: int = DEFAULT_CACHE_BYTES
    has_supply: bool = (
        False  # whether the daemon has what is not here come from peers before it is read
    )
