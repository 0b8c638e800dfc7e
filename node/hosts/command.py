"""A follower from the outside: what starts it, and that nothing of it stays.

Importing it takes seconds: torch comes with it.
"""

import asyncio
from importlib import metadata
from pathlib import Path

from node.hosts.following import follow
from node.hosts.parts import Shelf
from node.hosts.token import HostToken
from node.island.data.places import DataPlaces
from node.island.ranks.forkserver import end_forkserver, prepare_forkserver
from node.outer_state import tell_leftovers
from node.stopping import StopSignals


async def run_follower(
    token: HostToken, *, name: str, device: str, checkpoints: Path, data: str
) -> str:
    """Follows until the leader ends or its owner stops it; returns why.

    The last thing that its process does: signals are ignored from then on.
    """
    shelf = Shelf(checkpoints)
    tell_leftovers()
    prepare_forkserver()
    with StopSignals():
        try:
            return await follow(
                token,
                name=name,
                device=device,
                version=metadata.version("atoll"),
                data=DataPlaces(
                    folder=Path.cwd(),
                    own=data,
                    cache=checkpoints.with_name(f"{checkpoints.name}-data"),
                ),
                shelf=shelf,
            )
        except asyncio.CancelledError:
            return "stopped by its owner"
        finally:
            end_forkserver()
            shelf.close()
