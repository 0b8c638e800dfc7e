"""A node that its owner has paused: it stays a member and applies commits, and trains nothing.

A file in the node's folder says so, so it stays paused over restarts; a running node looks for it.
"""

from collections.abc import Callable
from pathlib import Path

from node.config import require_node_folder
from protocol.errors import UsageError
from protocol.files.durable import remove_durably, write_atomically
from protocol.files.folder_lock import FolderLock

PAUSED_FILE = "paused"

LOOK_SECONDS = 1.0
"""How often a running node looks."""


def is_paused(folder: Path) -> bool:
    """Whether the owner of the folder's node has paused it."""
    return (folder / PAUSED_FILE).exists()


def why_paused(folder: Path) -> str:
    """Why the owner lets it train nothing, with what ends that; empty where it may train."""
    return "'atoll node resume'" if is_paused(folder) else ""


def pause_node(folder: Path, *, say: Callable[[str], None]) -> None:
    """Pauses it, now or when it starts. Raises UsageError when it is."""
    require_node_folder(folder)
    if is_paused(folder):
        raise UsageError(
            f"the node in {folder} is paused already", next_step="'atoll node resume' ends that"
        )
    write_atomically(folder / PAUSED_FILE, b"")
    if FolderLock.holder_of(folder) is None:
        say(f"no node runs in {folder} now: it is paused when it starts")
    else:
        say("it ends its inner step, contributes what it has, and trains nothing from then on")


def resume_node(folder: Path, *, say: Callable[[str], None]) -> None:
    """Lets it train again. Raises UsageError when it is not paused."""
    require_node_folder(folder)
    if not is_paused(folder):
        raise UsageError(
            f"the node in {folder} is not paused", next_step="'atoll status' shows what it does"
        )
    remove_durably(folder / PAUSED_FILE)
    say("it trains again from the next round on")
