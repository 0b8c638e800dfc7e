"""The libp2p daemon that the hivemind wheel ships: its process and its steering socket.

The only file that touches hivemind. We start p2pd ourselves and use hivemind's client for it
(not hivemind.P2P) for four reasons: its sockets and key lie in a folder that only we can read,
since whoever can write to them can pretend to be any peer; a Ctrl-C at the terminal does not kill
it before the node has said goodbye; it serves as a relay for nobody; and its death is seen at once.

p2pd ends by itself within seconds when the process that started it is killed: it watches the
persistent control connection, and, before there is one, its idle timeout.
"""

import asyncio
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.resources import as_file, files
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import structlog

from node.exchange.peers import Limits
from node.exchange.transport.dialling import Allowance, why_not_dialled
from node.exchange.transport.rates.tcp import TcpPacing
from node.exchange.transport.streams import BROKEN, drop
from node.exchange.transport.tunnels import Tunnels, host_and_port
from protocol.errors import SystemRefusedError
from protocol.files.leftovers import TemporaryFolder
from protocol.trust.identity import Identity
from protocol.trust.proxy import Proxy, ProxyRefusedError
from protocol.wire.sockets import connection_to, looked_up

_START_SECONDS = 60.0
_STOP_SECONDS = 5.0
_BESIDE_PROXY_SECONDS = 2.0  # for an address to answer directly, where there is a proxy
_NO_CLIENT_SECONDS = 60  # p2pd ends when nobody connects to it for so long after its start

StreamCallback = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Called with the authenticated libp2p peer id of who opened the stream."""

_log = structlog.get_logger(__name__)


class DaemonError(ConnectionError):
    """p2pd could not do it: no such peer, nobody answers there, or p2pd itself is gone."""


@dataclass(slots=True, kw_only=True)
class _Dial:
    """Of one peer, for all who wait for it."""

    task: asyncio.Task[None]
    num_waiting: int = 0


class P2pd:
    """A running p2pd. Make one with `start`; `died` is set when it ends without being stopped."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        folder: TemporaryFolder,
        limits: Limits,
        proxy: Proxy | None,
        here: Callable[[], Collection[str]],
    ) -> None:
        self.died = asyncio.Event()
        self.tcp_pacing = TcpPacing(process.pid, limits)
        self._process = process
        self._limits = limits
        self._temporary = folder
        self._folder = folder.path
        self._last_lines: deque[str] = deque(maxlen=3)
        self._is_stopping = False
        self._stack = AsyncExitStack()
        self._client: Any = None  # hivemind carries no types
        self._watch: asyncio.Task[None] | None = None
        self._tunnels = None if proxy is None else Tunnels(proxy)
        self.here = here
        self._allowance = Allowance()
        self._dials: dict[tuple[str, tuple[str, ...]], _Dial] = {}  # by peer id and places

    @classmethod
    async def start(
        cls,
        identity: Identity,
        *,
        listen_multiaddrs: tuple[str, ...],
        on_streams: Mapping[str, StreamCallback],
        limits: Limits | None = None,
        asks_router: bool = False,
        proxy: Proxy | None = None,
        here: Callable[[], Collection[str]] | None = None,
    ) -> "P2pd":
        """Starts p2pd and listens; raises SystemRefusedError when it does not come up.

        Streams that peers open go to whom `on_streams` names for their protocol. With `asks_router` it asks
        the router, by UPnP and NAT-PMP, to forward its port while it runs. Peers that it cannot dial itself,
        it dials through the `proxy`. `here` are the hosts by which it is told where it may dial
        (node.exchange.transport.dialling): those that it listens on, unless others are said.
        """
        _load_hivemind()
        folder = TemporaryFolder("p2pd", has_sockets=True)
        try:
            process = await _launch(
                identity, folder.path, listen_multiaddrs, asks_router=asks_router
            )
            listening = [address.split("/")[2] for address in listen_multiaddrs]
            daemon = cls(process, folder, limits or Limits(), proxy, here or (lambda: listening))
        except BaseException:
            folder.remove()
            raise
        try:
            async with asyncio.timeout(_START_SECONDS):
                await daemon._come_up(identity, on_streams)
        except BaseException as error:
            await daemon.stop()
            if isinstance(error, BROKEN):
                raise SystemRefusedError(
                    f"the libp2p daemon did not start: {daemon.last_words or error}",
                    next_step="choose another --listen or --port, or stop what listens there",
                ) from error
            raise
        return daemon

    @property
    def last_words(self) -> str:
        """The end of what p2pd printed."""
        return " / ".join(self._last_lines)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def by_proxy(self) -> frozenset[str]:
        """Peers, by peer id, that it has dialled through the proxy, as long as that lasts."""
        return frozenset() if self._tunnels is None else self._tunnels.peer_ids

    async def multiaddrs(self) -> tuple[str, ...]:
        """Where p2pd listens; a wildcard address is given as those of the interfaces."""
        _, addresses = await self._client.identify()
        return tuple(str(address) for address in addresses)

    async def connect(self, peer_id: str, multiaddrs: tuple[str, ...]) -> None:
        """Connects unless connected; raises DaemonError. Streams that want it at once share a dial.

        A member may tell whatever places it likes, and others again and again:
        node.exchange.transport.dialling says which are dialled, and how often.

        libp2p does not dial an address again that did not answer: for 5 s at first, and for minutes when
        that went on for long. A peer that comes back would stay away for so long. So p2pd is told to dial
        only what answers now.
        """
        if peer_id in await self.connected_peer_ids():
            return
        place = peer_id, multiaddrs
        if (dial := self._dials.get(place)) is None:
            task = asyncio.create_task(
                self._dial_first_to_answer(peer_id, multiaddrs), name="a dial"
            )
            dial = self._dials[place] = _Dial(task=task)
            task.add_done_callback(lambda done: self._end_dial(place, done))
        dial.num_waiting += 1
        try:
            await asyncio.shield(dial.task)
        finally:
            dial.num_waiting -= 1
            if not dial.num_waiting:  # nobody wants it any more
                dial.task.cancel()

    def _end_dial(self, place: tuple[str, tuple[str, ...]], done: asyncio.Task[None]) -> None:
        del self._dials[place]
        if not done.cancelled():
            done.exception()  # whoever waited has been told

    async def _dial_first_to_answer(self, peer_id: str, multiaddrs: tuple[str, ...]) -> None:
        now = asyncio.get_running_loop().time()
        if wait := self._allowance.take(peer_id, len(multiaddrs), now=now):
            raise DaemonError(f"it was dialled often lately: next in {wait:.0f} s")
        here = self.here()
        reasons = []
        refusal: ProxyRefusedError | None = None
        tunnels, seconds = self._tunnels, self._limits.knock_seconds
        patience = seconds if tunnels is None else min(seconds, _BESIDE_PROXY_SECONDS)
        async for multiaddr, why_not in knocked(multiaddrs, here=here, seconds=patience):
            try:
                if not why_not:
                    await self.dial(peer_id, multiaddr)
                    return
                reasons.append(f"{multiaddr}: {why_not}")
            except DaemonError as error:
                reasons.append(str(error))
        if tunnels is not None:
            for multiaddr in multiaddrs:
                place = host_and_port(multiaddr)
                if place is not None and why_not_dialled(place[0], here):
                    continue
                try:
                    async with tunnels.to(multiaddr, peer_id=peer_id, seconds=seconds) as local:
                        await self.dial(peer_id, local)
                        return
                except OSError as error:  # DaemonError is one
                    reasons.append(str(error))
                    refusal = error if isinstance(error, ProxyRefusedError) else refusal
        if peer_id not in await self.connected_peer_ids():  # else it has dialled us meanwhile
            raise DaemonError("; ".join(reasons) or "it has told no address") from refusal

    async def dial(self, peer_id: str, multiaddr: str) -> None:
        """Connects to an address, whether it answers or not; raises DaemonError."""
        from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
        from hivemind.utils.multiaddr import Multiaddr

        try:
            address = Multiaddr(multiaddr)
        except ValueError as error:
            raise DaemonError(f"not a multiaddress: {error}") from error
        await self._ask(self._client.connect(PeerID.from_base58(peer_id), [address]))

    async def disconnect(self, peer_id: str) -> None:
        """Ends all connections with a peer, and with them their streams; raises DaemonError."""
        from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID

        await self._ask(self._client.disconnect(PeerID.from_base58(peer_id)))

    async def connected_peer_ids(self) -> frozenset[str]:
        """Who is connected to us, by peer id."""
        return frozenset(await self.connected_hosts())

    async def connected_hosts(self) -> dict[str, frozenset[str]]:
        """Who is connected to us, by peer id, and at which addresses."""
        peers = await self._ask(self._client.list_peers())
        return {
            peer.peer_id.to_base58(): frozenset(str(a).split("/")[2] for a in peer.addrs)
            for peer in peers
        }

    async def open_stream(
        self, peer_id: str, protocol: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a stream to a connected peer; raises DaemonError.

        hivemind's stream_open leaves its socket open when it fails or is cancelled; with churn
        that would leak one at each try. So the same exchange is done here.
        """
        from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import (
            raise_if_failed,
            read_pbmsg_safe,
            write_pbmsg,
        )
        from hivemind.proto import p2pd_pb2

        async def negotiate() -> None:
            request = p2pd_pb2.Request(
                type=p2pd_pb2.Request.STREAM_OPEN,
                streamOpen=p2pd_pb2.StreamOpenRequest(
                    peer=PeerID.from_base58(peer_id).to_bytes(), proto=[protocol]
                ),
            )
            await write_pbmsg(writer, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
            raise_if_failed(response)

        self.tcp_pacing.wake()
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._folder / "control"))
        except OSError as error:
            raise DaemonError(f"the libp2p daemon does not answer: {error}") from error
        try:
            await self._ask(negotiate())
        except BaseException:
            drop(writer)
            raise
        return reader, writer

    async def stop(self) -> None:
        """Ends p2pd and removes its folder; nothing of it is left afterwards."""
        self._is_stopping = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        if self._client is not None:
            self._client.close()
        if self._tunnels is not None:
            await self._tunnels.close()
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await self._stack.aclose()
        self._temporary.remove()

    async def _come_up(self, identity: Identity, on_streams: Mapping[str, StreamCallback]) -> None:
        from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
        from hivemind.utils.multiaddr import Multiaddr

        assert self._process.stdout is not None
        while not (line := await self._process.stdout.readline()).startswith(b"Peer ID:"):
            if not line:
                await self._process.wait()  # else stop() and asyncio would both want to reap it
                raise DaemonError("it ended at once")
            self._note(line)
        self._watch = asyncio.create_task(self._read_output(), name="p2pd output")

        async def accept(
            on_stream: StreamCallback,
            info: Any,
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
        ) -> None:
            self.tcp_pacing.wake()
            await on_stream(info.peer_id.to_base58(), reader, writer)

        self._client = await Client.create(
            control_maddr=Multiaddr(f"/unix{self._folder}/control"),
            listen_maddr=Multiaddr(f"/unix{self._folder}/streams"),
        )
        peer_id, _ = await self._client.identify()
        if peer_id.to_base58() != identity.peer_id:
            raise DaemonError(f"it calls itself {peer_id}, not {identity.peer_id}")
        self.tcp_pacing.look()
        await self._stack.enter_async_context(self._client.listen())
        for protocol, on_stream in on_streams.items():
            await self._ask(self._client.stream_handler(protocol, partial(accept, on_stream)))

    async def _ask(self, conversation: Awaitable[Any]) -> Any:
        """Awaits a conversation on the control socket; its many failures become DaemonError."""
        from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

        try:
            return await conversation
        except P2PDaemonError as error:
            raise DaemonError(str(error).removeprefix("Connect failed. msg=")) from error
        except (OSError, EOFError) as error:
            raise DaemonError(f"the libp2p daemon does not answer: {error}") from error

    async def _read_output(self) -> None:
        """Reads p2pd's output to its end, which is p2pd's: an unread pipe would block it."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._note(line)
        status = await self._process.wait()
        self.tcp_pacing.close()
        if not self._is_stopping:
            _log.error("the libp2p daemon died", status=status, last_words=self.last_words)
            self.died.set()

    def _note(self, line: bytes) -> None:
        text = line.decode(errors="replace").strip()
        self._last_lines.append(text)
        _log.debug("p2pd", line=text)


async def _launch(
    identity: Identity, folder: Path, listen_multiaddrs: tuple[str, ...], *, asks_router: bool
) -> asyncio.subprocess.Process:
    # In memory that only p2pd inherits: a key in a folder would stay there when we are killed.
    key = os.memfd_create("identity")
    with os.fdopen(key, "wb") as file, as_file(files("hivemind.hivemind_cli") / "p2pd") as program:
        file.write(identity.libp2p_key())
        file.flush()
        return await asyncio.create_subprocess_exec(
            program,
            f"-id=/proc/self/fd/{key}",
            f"-listen=/unix{folder}/control",
            f"-hostAddrs={','.join(listen_multiaddrs)}",
            f"-idleTimeout={_NO_CLIENT_SECONDS}s",
            "-relay=0",
            "-relayService=0",
            "-autonat=0",
            f"-natPortMap={int(asks_router)}",
            "-connManager=0",  # it would close connections beyond a count; the roster is the limit
            pass_fds=(key,),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,  # a Ctrl-C at the terminal is for the daemon of the node
        )


_ENVIRONMENT = {
    "GOLOG_LOG_LEVEL": "error",
    "GOLOG_LOG_FMT": "json",
    # libp2p dials from the port that it listens on. When two nodes dial each other at once, or one
    # keeps knocking at the other's firewall, TCP joins the two calls into one that both have begun,
    # and the handshake fails for as long as that goes on.
    "LIBP2P_TCP_REUSEPORT": "false",
}


def _load_hivemind() -> None:
    """Imports what we use of hivemind and undoes what that does to logging.

    Only that: the first lines of its packages would import its averagers, and with them torch and
    scipy, for seconds of every node's start. So the packages are there without having been run.

    It renames WARNING for the whole process, installs a handler of its own that prints to stderr,
    and warns about peers that are merely away, which our errors say already.
    """
    for name in _PACKAGES:
        if name not in sys.modules and (spec := find_spec(name)) is not None:
            sys.modules[name] = module_from_spec(spec)
    from hivemind.utils.logging import use_hivemind_log_handler

    use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)
    logging.addLevelName(logging.WARNING, "WARNING")


_PACKAGES = ("hivemind", "hivemind.utils", "hivemind.p2p")
"""Outer ones first; nothing but the modules within is asked for by those that we use."""


async def knocked(
    multiaddrs: Sequence[str], *, here: Collection[str], seconds: float
) -> AsyncIterator[tuple[str, str]]:
    """Which addresses answer by TCP, the quickest first; with "", or with why one does not.

    What is no address of TCP does not: p2pd would dial all that libp2p knows, as web sockets, and a member
    tells what it likes. Of a name it is the address that answers: resolved again it might be another one.
    """
    names = asyncio.Semaphore(_NAMES_AT_ONCE)
    # One end for all: no name is asked for in the place of one that was given up a moment before.
    until = asyncio.get_running_loop().time() + seconds
    knocks = [
        asyncio.ensure_future(_knock(multiaddr, here, until, names)) for multiaddr in multiaddrs
    ]
    late = f"no answer within {seconds:g} s"
    try:
        for knock in asyncio.as_completed(knocks):
            multiaddr, why_not = await knock
            yield multiaddr, late if why_not is None else why_not
    finally:
        for each in knocks:
            each.cancel()


async def _knock(
    multiaddr: str, here: Collection[str], until: float, names: asyncio.Semaphore
) -> tuple[str, str | None]:
    """As above; None where there was no answer in time."""
    place = host_and_port(multiaddr)
    if place is None:
        return multiaddr, "no address of TCP"
    host, port = place
    if why_not := why_not_dialled(host, here):
        return multiaddr, why_not
    try:
        async with asyncio.timeout_at(until):
            async with names:
                hosts = await looked_up(host, port, family=_FAMILIES[multiaddr.split("/")[1]])
            reasons = [why_not_dialled(each, here) for each in hosts]
            if all(reasons):
                return multiaddr, f"{host} is {', '.join(hosts)}: {reasons[0]}"
            dialled = [each for each, why in zip(hosts, reasons, strict=True) if not why]
            _, writer = await connection_to(dialled[:_MOST_OF_ONE_NAME], port)
            each = str(writer.get_extra_info("peername")[0])
            drop(writer)
            return f"/ip{6 if ':' in each else 4}/{each}/tcp/{port}", ""
    except TimeoutError:
        return multiaddr, None
    except OSError as error:
        # None for several addresses of one name, below zero for no such name.
        code = error.errno or 0
        return multiaddr, os.strerror(code) if code > 0 else str(error)
    except (ValueError, OverflowError) as error:
        return multiaddr, str(error)


_MOST_OF_ONE_NAME = 2
"""Addresses that are dialled: a name may have hundreds, and whoever has it chooses which."""

_NAMES_AT_ONCE = 2
"""Of one member: it may tell names that no server resolves, and each takes a place for long."""

_FAMILIES = {
    "ip4": socket.AF_INET,
    "ip6": socket.AF_INET6,
    "dns": socket.AF_UNSPEC,
    "dns4": socket.AF_INET,
    "dns6": socket.AF_INET6,
}
