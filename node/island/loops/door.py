"""Where training loops come in: a Unix socket in the node's folder, for its own user alone."""

import asyncio
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from node.island.loops.messages import GREETING, MAX_LINE_BYTES, Word, word_of
from node.outer_state import SHARED_MEMORY, SharedNames
from protocol.errors import SystemRefusedError
from protocol.files.leftovers import LONGEST_SOCKET_BYTES

log = structlog.get_logger()

SOCKET_FILE = "loop.socket"

_BACKLOG = 64
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user and group


class Visitor:
    """A connection of one rank of a loop. Messages that nobody hears any more are dropped."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process_id: int
    ) -> None:
        self.process_id = process_id
        self._reader = reader
        self._writer = writer

    async def hear(self) -> Word | None:
        """The next word; None when the other end is gone. Raises ValueError for no word of ours."""
        try:
            line = await self._reader.readline()
        except OSError:
            return None
        return word_of(line) if line.endswith(b"\n") else None

    def say(self, message: dict[str, Any]) -> None:
        """Sends a message, some time."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Ends the connection, after what was said."""
        self._writer.close()


class Door:
    """Listens, and lets each visitor in with descriptors of the shared vectors."""

    def __init__(
        self, path: Path, names: SharedNames, let_in: Callable[[Visitor], Awaitable[None]]
    ) -> None:
        self.path = path
        self._names = names
        self._let_in = let_in
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Listens from now on. A socket that a killed daemon left is replaced: the folder is ours."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.path.unlink(missing_ok=True)
            _bind(listener, self.path)
            self.path.chmod(0o600)  # nobody gets in before: it does not listen yet
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise SystemRefusedError(
                f"{self.path}, where training loops come in, cannot be made: {error.strerror}",
                next_step="let the node's folder be on a disk of this machine that you may write to",
            ) from error
        self._listener = listener
        self._start(self._listen(listener))

    async def close(self) -> None:
        """Lets nobody in any more; visitors that are in stay."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            self._start(self._greet(connection))

    async def _greet(self, connection: socket.socket) -> None:
        process_id, user, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user != os.geteuid():
            log.warning(
                "a training loop of another user was refused", user=user, process=process_id
            )
            connection.close()
            return
        visitor = None
        try:
            self._hand_vectors(connection)
            reader, writer = await asyncio.open_unix_connection(
                sock=connection, limit=MAX_LINE_BYTES
            )
            visitor = Visitor(reader, writer, process_id)
            await self._let_in(visitor)
        except OSError as error:
            log.warning("a training loop could not come in", process=process_id, why=str(error))
        finally:
            if visitor is None:
                connection.close()
            else:
                visitor.close()

    def _hand_vectors(self, connection: socket.socket) -> None:
        """Global parameters cannot be written through what the loop gets: they are the swarm's."""
        descriptors = []
        try:
            for name, mode in (
                (self._names.parameters, os.O_RDONLY),
                (self._names.published, os.O_RDWR),
            ):
                descriptors.append(os.open(SHARED_MEMORY / name, mode | os.O_CLOEXEC))
            socket.send_fds(connection, [GREETING], descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _bind(listener: socket.socket, path: Path) -> None:
    """Binds to a path of any length: a long one by way of its folder's descriptor."""
    if len(os.fsencode(path)) <= LONGEST_SOCKET_BYTES:
        listener.bind(os.fspath(path))
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
