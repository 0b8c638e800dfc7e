"""What the owner of a node asks of it from another process: to leave with its work, or to train nothing.

A paused node stays a member and applies commits. A file in its folder says so, so it stays paused over
restarts; a running node looks for it.
"""

import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

from node.config import SETTINGS_FILE, load_settings, require_node_folder
from node.stopping import GOODBYE_SECONDS
from protocol.errors import SystemRefusedError, UsageError
from protocol.files.durable import FolderLock, remove_durably, write_atomically

PAUSED_FILE = "paused"

LOOK_SECONDS = 1.0
"""How often a running node looks."""


def drain_node(folder: Path, *, within_seconds: float, say: Callable[[str], None]) -> None:
    """Signals the folder's node and waits until it has ended. Raises AtollError.

    The node's own limit holds as well (drain_within in node.toml), so `within_seconds` only shortens it. When
    it has not ended within the limit it is signalled again, and leaves at once.
    """
    require_node_folder(folder)
    process_id = FolderLock.holder_of(folder)
    try:
        process = -1 if process_id is None else os.pidfd_open(process_id)
    except ProcessLookupError:
        process = -1
    # Looked at again: from here on the handle is that of the very process that holds the folder.
    if process_id is None or process < 0 or FolderLock.holder_of(folder) != process_id:
        raise SystemRefusedError(
            f"no node runs in {folder}, so there is nothing to drain",
            next_step="'ps' shows what runs; choose another folder with --dir DIR",
        )
    try:
        say(f"draining the node in {folder} (process {process_id}), {within_seconds:g} s at most")
        own_seconds = load_settings(folder).drain_within
        if own_seconds < within_seconds:
            say(
                f"its own limit is {own_seconds:g} s (drain_within in {folder / SETTINGS_FILE}, unless "
                "it was started with --drain-within): it may leave sooner than asked"
            )
        if _ends(process, signal.SIGTERM, within_seconds):
            return
        say("out of time: it leaves at once")
        if not _ends(process, signal.SIGTERM, GOODBYE_SECONDS):
            raise SystemRefusedError(
                f"the node in {folder} (process {process_id}) does not end",
                next_step=f"see its log, or 'kill -KILL {process_id}'",
            )
    finally:
        os.close(process)


def _ends(process: int, number: signal.Signals, seconds: float) -> bool:
    """Signals the process behind a pidfd; whether it ends within so long."""
    try:
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([process], [], [], seconds)
    return bool(ended)


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
