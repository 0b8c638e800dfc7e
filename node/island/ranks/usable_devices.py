"""Asks torch which devices are usable, and how much memory they have left.

Not in the daemon, and not only because torch is not there: who asks a GPU for its free memory keeps a
context on it, some hundreds of megabytes that belong to the ranks. Which devices are wanted is
node.island.ranks.devices' business.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from node.island.ranks.aside import Aside
from node.island.ranks.devices import bytes_per_rank, devices_of

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableDevices:
    """A device for each rank, and the memory that each rank may take of it now."""

    names: tuple[str, ...]
    bytes_per_rank: int


async def usable_devices(choice: str, num_ranks: int | None = None) -> UsableDevices:
    """What `devices_of` says, by torch's word; raises ConfigError with what there is.

    For the CPU nobody need be asked.
    """
    if choice == "cpu":
        return _looked_up(choice, num_ranks)
    aside = Aside(_devices, choice, num_ranks)
    try:
        usable: UsableDevices = await aside.answer()
    finally:
        aside.close()
    return usable


def _devices(
    connection: "Connection[UsableDevices, None]", choice: str, num_ranks: int | None
) -> None:
    connection.send(_looked_up(choice, num_ranks))


def _looked_up(choice: str, num_ranks: int | None) -> UsableDevices:
    names = devices_of(choice, num_ranks)
    return UsableDevices(names=names, bytes_per_rank=bytes_per_rank(names))
