"""The follower's side: its ranks do what the leader's do, for as long as the leader is there."""

import asyncio
import json
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import structlog

from node.hosts.parts import Shelf
from node.hosts.rendezvous import interface_of
from node.hosts.token import HostToken
from node.hosts.wire import Message, Wire, connect
from node.island.checkpoints.folder import About
from node.island.data.places import DataPlaces
from node.island.island import InnerWork, Progress
from node.island.models.code import check_functions
from node.island.parallel.mesh_shape import MeshShape
from node.island.ranks.commands import Keep, MeetingPoint
from node.island.ranks.launcher import ProcessIsland
from node.island.ranks.usable_devices import usable_devices
from node.island.training.local_training import LocalTraining
from node.outer_state import SharedVectors, Vector
from protocol.errors import AtollError, ExitCode, NotPermittedError, UnavailableError
from protocol.layout import Layout, layout_of
from protocol.run_spec import run_from_json

log = structlog.get_logger()

_RETRY_SECONDS = 2.0


async def follow(
    token: HostToken, *, name: str, device: str, version: str, data: DataPlaces, shelf: Shelf
) -> str:
    """Follows until the leader says that it is over; returns why it ended.

    While the leader is away, it is asked again every two seconds. The data is read in `data`, and
    parts of checkpoints lie on the shelf. Raises AtollError.
    """
    usable = await usable_devices(device, 1)
    kind = usable.names[0].partition(":")[0]
    has_waited = False
    while True:
        try:
            wire = await connect(token)
        except UnavailableError as error:
            if not has_waited:
                log.info("waiting for the leader", why=error.what)
            has_waited = True
            await asyncio.sleep(_RETRY_SECONDS)
            continue
        has_waited = False
        following = _Following(wire, device=device, data=data, shelf=shelf)
        try:
            await wire.send({"name": name, "version": version, "device_kind": kind})
            answer = await wire.receive()
            if "refused" in answer:
                raise NotPermittedError(
                    f"the leader refuses this host: {answer['refused']}",
                    next_step="install the leader's version, or choose --device",
                )
            log.info("following", leader=f"{token.host}:{token.port}")
            await following.serve()
            return "the leader has ended"
        except (OSError, EOFError):
            log.warning("the leader is gone: waiting for it", leader=f"{token.host}:{token.port}")
            await asyncio.sleep(_RETRY_SECONDS)
        finally:
            await following.close()


class _Following:
    """One connection's ranks."""

    def __init__(self, wire: Wire, *, device: str, data: DataPlaces, shelf: Shelf) -> None:
        self._wire = wire
        self._shelf = shelf
        self._device = device
        self._data = data
        self._layout: Layout | None = None
        self._shared: SharedVectors | None = None
        self._island: ProcessIsland | None = None
        self._calls: asyncio.Queue[Message] = asyncio.Queue()
        self._stopping: list[asyncio.Task[None]] = []

    async def serve(self) -> None:
        """Carries out the leader's calls in turn until the last. Raises EOFError, OSError."""
        listening = asyncio.create_task(self._listen())
        working = asyncio.create_task(self._work())
        try:
            await asyncio.wait({listening, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
            else:
                await listening
        finally:
            for task in (listening, working):
                task.cancel()
            await asyncio.gather(listening, working, return_exceptions=True)

    async def close(self) -> None:
        """Ends the ranks and gives the memory back."""
        if self._island is not None:
            await self._island.stop()
        if self._shared is not None:
            self._shared.close()
        self._wire.close()

    async def _listen(self) -> None:
        while True:
            message = await self._wire.receive()
            if "num_elements" in message:
                await self._wire.receive_vector(message, self._place_of(message))
            if message["call"] == "stop" and self._island is not None:
                # At once: what it is to end may hang, as a rank of another host has died.
                self._stopping.append(asyncio.create_task(self._island.stop()))
            self._calls.put_nowait(message)

    def _place_of(self, message: Message) -> Vector:
        """Where a call's values belong: parameters, or what all hosts published of a fragment."""
        assert self._shared is not None and self._layout is not None, "values come after the start"
        fragment = message["arguments"].get("fragment")
        if message["call"] == "hold":
            return self._shared.published[: self._layout.fragments[fragment].num_elements]
        whole = self._shared.parameters
        return whole if fragment is None else whole[self._layout.fragments[fragment].span]

    async def _work(self) -> None:
        while True:
            message = await self._calls.get()
            number = message["number"]
            if message["call"] == "end":
                with suppress(OSError):
                    await self._wire.send({"number": number, "answer": {}})
                return
            try:
                await self._carry_out(message["call"], number, message["arguments"])
            except AtollError as error:
                if error.exit_code == ExitCode.INTERNAL:
                    log.error("a rank failed", error=str(error))
                await self._wire.send(
                    {
                        "number": number,
                        "fault": type(error).__name__,
                        "what": error.what,
                        "next_step": error.next_step,
                    }
                )

    async def _carry_out(self, call: str, number: int, arguments: dict[str, Any]) -> None:
        answer: Message = {}
        vector = None
        if call == "start":
            answer = await self._start(**arguments)
        elif call == "shelve":
            parts = await asyncio.to_thread(self._shelf.open, **arguments)
            answer = {"parts": [asdict(part) for part in parts]}
        elif self._island is None or self._shared is None or self._layout is None:
            pass  # it was never started: there is nothing to stop
        elif call == "adopt":
            await self._island.adopt(arguments["fragment"], is_taken=arguments["is_taken"])
        elif call == "train":

            def tell(progress: Progress) -> None:
                told = {"number": number, "progress": asdict(progress)}
                telling.add(asyncio.ensure_future(self._wire.send(told)))

            telling: set[asyncio.Future[None]] = set()
            answer = asdict(await self._island.train(InnerWork(**arguments["work"]), tell))
            await asyncio.gather(*telling)
        elif call == "publish":
            fragment = int(arguments["fragment"])
            vector = self._shared.published[: self._layout.fragments[fragment].num_elements]
            vector[:] = 0  # what other hosts publish
            await self._island.publish(fragment)
        elif call == "load":
            about = About.model_validate(arguments["about"])
            loaded = await self._island.load(about, self._shelf.part_of(about.set_id))
            if not loaded.failure:
                self._island.resuming.goes_on_from(about, loaded)
            answer = asdict(loaded)
        elif call == "keep":
            order = Keep(self._shelf.folder, **arguments)
            answer = asdict(await self._island.set_aside(order))
        elif call == "evaluate":
            answer = asdict(await self._island.evaluate())
        elif call == "stop":
            await self._island.stop()
        await self._wire.send({"number": number, "answer": answer}, vector)

    async def _start(  # its ranks were stopped, or never started
        self,
        *,
        spec: dict[str, Any],
        shape: dict[str, Any],
        local: dict[str, Any],
        first_rank: int,
        num_ranks: int,
        host: str,
        port: int,
        num_hosts: int,
    ) -> Message:
        run = run_from_json(json.dumps(spec))
        check_functions(
            run, allowed=(), code=None
        )  # the leader's owner does not speak for this machine's
        if self._shared is None:
            self._layout = layout_of(run)
            self._shared = SharedVectors.create(
                self._layout.num_elements, self._layout.largest_fragment
            )
        usable = await usable_devices(self._device, num_ranks)
        self._island = ProcessIsland(
            spec=run,
            names=self._shared.names,
            devices=usable.names,
            shape=MeshShape(**shape),
            ranks=range(first_rank, first_rank + num_ranks),
            data=self._data,
            local=LocalTraining(**local),
        )
        interface = interface_of(self._wire.own_host)
        self._island.meet_at(
            MeetingPoint(host=host, port=port, interface=interface, num_hosts=num_hosts)
        )
        summary = await self._island.bring_up()
        return {"corpus": summary.digest.hex()}
