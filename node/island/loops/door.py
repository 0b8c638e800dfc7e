"""Where training loops come in, and who is in one: a Unix socket in the folder, for its own user alone."""

import asyncio
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from node.heavy import cancelled
from node.island.data.dataset import Batch, Dataset, Indices, SampleOrder
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from node.island.island import NO_DATA, InnerWork
from node.island.loops.messages import (
    GREETING,
    MAX_LINE_BYTES,
    VERSION,
    Hello,
    Word,
    no_samples,
    samples,
    word_of,
)
from node.outer_state import SharedNames
from protocol.errors import (
    AtollError,
    ConfigError,
    NoInputError,
    NotPermittedError,
    SystemRefusedError,
)
from protocol.files.leftovers import LONGEST_SOCKET_BYTES
from protocol.run.run_spec import RunSpec
from protocol.wire.sockets import ignore_end_of

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
        ignore_end_of(writer)

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
        await cancelled(self._tasks)
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
            descriptors.append(self._names.open_parameters(os.O_RDONLY))
            descriptors.append(self._names.open_published(os.O_RDWR))
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


# The ranks of one start of a contributor's program: who may be one of them, and which samples they get.
#
# A loop may ask for the samples that its order to train has leased, as numbers or tokens.


@dataclass(slots=True, kw_only=True, eq=False)
class Loop:
    """The ranks of one start of a program."""

    group: str
    world_size: int
    evaluates: bool
    visitors: dict[int, Visitor] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    is_fresh: bool = True  # it has not adopted the global parameters yet
    unpublished_steps: int = 0
    is_done: bool = False  # it has left with its work
    software: str = ""  # as its ranks tell it
    evaluates_by: str = ""  # likewise

    @property
    def is_whole(self) -> bool:
        """Whether all ranks take orders."""
        return len(self.ready) == self.world_size

    def say(self, message: dict[str, Any]) -> None:
        """Says it to all ranks."""
        for visitor in self.visitors.values():
            visitor.say(message)


def refusal_of(hello: Hello, process_id: int, here: Loop | None) -> tuple[str, str] | None:
    """Why a rank may not come in, and what its owner may do; None when it may. Pure."""
    if hello.version != VERSION:
        return (
            f"the loop's package atoll speaks version {hello.version} and the node version {VERSION}",
            "install the same version of Atoll in both environments",
        )
    if hello.rank >= hello.world_size:
        return (f"rank {hello.rank} of {hello.world_size} is none", "")
    if here is not None and (
        here.group != hello.group
        or here.world_size != hello.world_size
        or hello.rank in here.visitors
    ):
        processes = [visitor.process_id for visitor in here.visitors.values()]
        if process_id in processes:  # as a cell of a notebook that was run again
            return (
                "this program has joined already, and has not left",
                "call leave() on what that atoll.join returned, or use it in a `with`; where nothing holds "
                "it any more, start the program again",
            )
        return (
            f"another training loop is with this node: process {', '.join(map(str, processes))}",
            "end that one first; a second loop needs a node of its own, in a folder of its own",
        )
    return None


NUMBERS_AT_ONCE = 4096  # of samples, in one message
TOKENS_AT_ONCE = 1 << 18  # likewise


class LeasedSamples:
    """The run's data as this node has it; a loop with data of its own needs none here."""

    def __init__(self, spec: RunSpec, places: DataPlaces) -> None:
        self._spec = spec
        self._places = places
        self._order: SampleOrder | None = None
        self._dataset: Dataset | None = None  # opened for the first loop that wants tokens
        self._why_none = ""
        self.summary = NO_DATA

    def look(self) -> None:
        """Finds out what is here. Heavy. A run's own code is run by loops alone, never here."""
        if self._spec.data.source == "loop":
            self._why_none = "the run names no data, so its loops train on their own"
            return
        if self._spec.data.source == "function":
            self._why_none = "the run's samples come from a function, which the loop calls itself"
            return
        try:
            found = open_dataset(self._spec, self._places)
        except (NoInputError, NotPermittedError, ConfigError) as error:
            log.warning("the run's data is not here: loops need data of their own", why=error.what)
            self._why_none = error.what
            return
        self.summary = found.summary()
        self._order = SampleOrder.of(self._spec.run.seed, found)

    def told(self, work: InnerWork, first_step: int, *, wants_tokens: bool) -> dict[str, Any]:
        """The message with samples of as many steps as it holds, or why there are none. Heavy."""
        if self._order is None:
            return no_samples(self._why_none)
        batch = self._spec.inner.batch
        at_once = NUMBERS_AT_ONCE // batch
        if wants_tokens:
            at_once = TOKENS_AT_ONCE // self._spec.tokens_per_inner_step
        steps = max(0, min(work.inner_steps - first_step, max(1, at_once)))
        numbers = self._order.indices(work.first_sample + first_step * batch, steps * batch)
        if not wants_tokens and self._spec.data.source != "tokens":
            return samples(numbers, None)  # text has no masks: none of it needs to be read
        try:
            if self._dataset is None:
                self._dataset = open_dataset(self._spec, self._places)
            if not wants_tokens:
                return samples(numbers, None, self._targets_of(self._dataset, numbers))
            # What the next message tells, too, may be far: it is on its way while the loop trains.
            later = min(2 * steps, work.inner_steps - first_step)
            ahead = self._order.indices(work.first_sample + first_step * batch, later * batch)
            self._dataset.expect("training", ahead)
            found = self._dataset.batch("training", numbers)
        except AtollError as error:
            return no_samples(error.what)
        assert isinstance(found, Batch)  # only functions give other things
        return samples(numbers, found)

    def _targets_of(self, dataset: Dataset, numbers: Indices) -> list[int] | None:
        """How many of each sample's are to be predicted; None where it is all of them."""
        context = self._spec.model.context
        if dataset.num_counted("training", numbers) == len(numbers) * context:
            return None
        return [dataset.num_counted("training", numbers[i : i + 1]) for i in range(len(numbers))]
