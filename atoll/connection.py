"""The way to the node's daemon: its Unix socket, messages as lines of JSON, the shared vectors.

The daemon is a program of another environment, and shares no code with this package: what is said is
listed in Atoll's node.island.loops.messages, and VERSION changes with it.
"""

import json
import mmap
import os
import select
import shlex
import socket
import struct
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.errors import ConnectionLostError, NoNodeError, SwarmError

VERSION = 9

SOCKET_FILE = "loop.socket"
HOME_VARIABLE = "ATOLL_DIR"

_MAX_SOCKET_PATH_BYTES = 107  # unix(7)
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user and group
_ANSWER_SECONDS = 30.0  # that the daemon may take to let a loop in
_POLL_SECONDS = 0.2

Message = dict[str, Any]


def find_folder(explicit: str | os.PathLike[str] | None) -> Path:
    """The node's folder, found as `atoll node start` finds it.

    What was given, else $ATOLL_DIR, else the current folder when it has joined a swarm, else the user's
    data folder.
    """
    if explicit is not None:
        return Path(explicit).expanduser()
    if from_environment := os.environ.get(HOME_VARIABLE):
        return Path(from_environment).expanduser()
    here = Path.cwd()
    if (here / "link.toml").is_file():
        return here
    data = os.environ.get("XDG_DATA_HOME", "").strip()
    return (Path(data) if data else Path.home() / ".local" / "share") / "atoll"


_open: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _let_go() -> None:
    for link in _open:
        with suppress(OSError):
            os.close(link.detach())


# Workers of a DataLoader outlive a killed loop for a while: the node would take it for alive.
os.register_at_fork(after_in_child=_let_go)


class Connection:
    """One rank's connection. Messages come in order; what is lost raises ConnectionLostError."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        _open.add(link)
        self._buffer = bytearray()
        self._descriptors: tuple[int, ...] = ()

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        wait_seconds: float,
        is_alive: Callable[[], bool] = lambda: True,
        on_wait: Callable[[], None] = lambda: None,
    ) -> "Connection":
        """Connects, and waits so long for a node that is not there yet, or is being started again.

        `on_wait` is called once where it has to wait. Raises NoNodeError, at once when `is_alive` says that
        nobody will come.
        """
        give_up_at = time.monotonic() + wait_seconds
        has_told = False
        while True:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                _connect(link, folder / SOCKET_FILE)
                connection = cls(link)
                connection._be_greeted()
                return connection
            except (OSError, ConnectionLostError) as error:
                link.close()
                if time.monotonic() >= give_up_at or not is_alive():
                    raise NoNodeError(
                        f"no node that serves training loops runs in {folder}",
                        next_step=f"start it: atoll node start --loop --dir {shlex.quote(str(folder))}",
                    ) from error
            except BaseException:
                link.close()
                raise
            if not has_told:
                has_told = True
                on_wait()
            time.sleep(_POLL_SECONDS)

    def _be_greeted(self) -> None:
        """Takes the descriptors of the shared vectors, from a daemon of our own user alone."""
        _, user, _ = _CREDENTIALS.unpack(
            self._link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user != os.geteuid():
            raise SwarmError(
                f"the node belongs to user {user}, and this program to user {os.geteuid()}",
                next_step="run both as one user",
            )
        self._link.settimeout(_ANSWER_SECONDS)
        greeting, descriptors, _, _ = socket.recv_fds(self._link, 1, 2)
        self._descriptors = tuple(descriptors)
        if not greeting or len(descriptors) != 2:
            self.close()
            raise ConnectionLostError("the node has closed its door")
        self._link.settimeout(None)

    def vectors(
        self, num_elements: int, published_elements: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The global parameters, which cannot be written to, and room to publish a fragment: fp32, flat."""
        parameters = mmap.mmap(self._descriptors[0], 4 * num_elements, prot=mmap.PROT_READ)
        published = mmap.mmap(self._descriptors[1], 4 * published_elements)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of what cannot be written; so it shall be
            return (
                torch.from_numpy(np.frombuffer(parameters, np.float32)),
                torch.from_numpy(np.frombuffer(published, np.float32)),
            )

    def say(self, message: Message) -> None:
        """Sends a message."""
        try:
            self._link.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ConnectionLostError("the node is gone") from error

    def hear(self, timeout_seconds: float | None = None) -> Message | None:
        """The next message; None when none comes in so long."""
        while (end := self._buffer.find(b"\n")) < 0:
            if not self._read(timeout_seconds):
                return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        message: Message = json.loads(line)
        return message

    def _read(self, timeout_seconds: float | None) -> bool:
        if self._link.fileno() < 0:
            raise ConnectionLostError("the connection is closed")
        try:
            if not select.select([self._link], [], [], timeout_seconds)[0]:
                return False
            more = self._link.recv(1 << 16)
        except OSError as error:
            raise ConnectionLostError("the node is gone") from error
        if not more:
            raise ConnectionLostError("the node is gone")
        self._buffer += more
        return True

    def close(self) -> None:
        """Ends the connection; what `vectors` returned stays mapped while it is referred to."""
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors = ()
        self._link.close()


def _connect(link: socket.socket, path: Path) -> None:
    """To a path of any length: a long one by way of its folder's descriptor."""
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH_BYTES:
        link.connect(os.fspath(path))
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        link.connect(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
