"""The transport over the internet: libp2p streams, encrypted and authenticated by each node's key.

libp2p itself lets anyone in who has a key. Membership is checked here, against the roster.
"""

import asyncio
import resource
from collections.abc import AsyncIterator, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import structlog

from node.exchange.peers import (
    Limits,
    PeerUnreachableError,
    TransferHandler,
    TransferRefusedError,
    Want,
    do_nothing,
)
from node.exchange.transport.carrying import Carrying
from node.exchange.transport.connections import Connections, Punching, punching_daemon
from node.exchange.transport.p2pd import DaemonError, P2pd, StreamCallback
from node.exchange.transport.rates.traffic import Traffic
from node.exchange.transport.rates.uplink import first_streams
from node.exchange.transport.receiver import StreamAdmission
from node.exchange.transport.sending import Sending
from node.exchange.transport.serving import Server, fetch_over
from node.exchange.transport.streams import BROKEN, FrameError, TransferStream, drop, refuse
from node.exchange.transport.whereabouts import WHEREABOUTS, Tell, answer, asked_of
from node.heavy import cancelled
from node.machine.addresses import (
    ON_LOOPBACK,
    Reachability,
    announced,
    by_route,
    forwarded_among,
    interface_addresses,
    route_to,
    told_addresses,
    visible_now,
)
from protocol.trust.identity import Identity, peer_id_of
from protocol.trust.rulings import Address
from protocol.v1 import transfer_pb2 as wire
from protocol.wire.payload import Payload, WireCounts
from protocol.wire.rounds import NodeId, RosterEntry, Way
from protocol.wire.vitals import LinkState

PROTOCOL = "atoll/6/transfer"
"""What libp2p calls our streams; a change on the wire is a new number."""

CARRYING = "atoll/1/carry"
"""Those that a third member carries."""

MOST_AT_REST = 16
"""Streams that a node keeps open over pauses, to all peers together: they take places with those."""

MOST_REMEMBERED = 256
"""Names of nodes that were members."""

MOST_ASKED = 16
"""Members that are asked at once where the coordinator is; the next time others are."""

# A peer that is turned away is told why, as far as that costs little.
_TURNED_AWAY = Limits(idle_seconds=2.0, max_streams_per_peer=2, max_streams=16)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """What runs from the start of a transport to its end."""

    daemon: P2pd
    server: Server
    connections: Connections
    sharing: asyncio.Task[None]  # of the uplink


class Libp2pTransport:
    """Transport over a p2pd process of its own. Several transfers with a peer run at once.

    Members that do not reach each other may have `carry_share` of its uploads. `whereabouts` is what it
    tells those that hold an invite.
    `max_upload_bytes_per_second` is on the wire, and for all transfers together; None is no limit.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        counts: WireCounts,
        reachability: Reachability = ON_LOOPBACK,
        carry_share: float = 0.0,
        whereabouts: Tell = lambda _: (),
        limits: Limits | None = None,
        max_upload_bytes_per_second: float | None = None,
        while_moving: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._identity = identity
        self._reachability = reachability
        self._limits = within_open_files(limits or Limits())
        self._traffic = Traffic(
            counts,
            limits=self._limits,
            allowed_bytes_per_second=max_upload_bytes_per_second,
            while_moving=while_moving,
        )
        self._started: _Started | None = None
        self._turning_away = StreamAdmission(_TURNED_AWAY)
        self._multiaddrs: tuple[str, ...] = ()
        self._visible: tuple[str, ...] = ()  # as p2pd had it at its start
        self._own_addresses: tuple[str, ...] = ()  # of this machine
        self._members: dict[NodeId, RosterEntry] = {}
        self._peer_ids: dict[NodeId, str] = {}  # as libp2p has them
        self._node_ids: dict[str, NodeId] = {}
        self._were_here: dict[str, str] = {}  # names of those that are no members now, by peer id
        self._whereabouts = whereabouts
        self._num_asked = 0
        self._on_streams: dict[str, StreamCallback] = {
            PROTOCOL: partial(self._serve, self._admit_stream),
            CARRYING: partial(self._serve, self._admit_carried),
        }
        self._punching = Punching(
            token=reachability.punching_token,
            start_daemon=punching_daemon(
                identity, on_streams=self._on_streams, limits=self._limits
            ),
            limits=self._limits,
            on_connection=self._traffic.made_connection,
            here=self._here,
        )
        self._carrying = Carrying(
            identity,
            share=carry_share,
            limits=self._limits,
            traffic=self._traffic,
            open_direct=self._open_direct,
        )
        self._shows_outside = False
        self._serving: set[asyncio.Task[None]] = set()
        self._sendings: dict[NodeId, Sending] = {}

    async def start(self, handler: TransferHandler) -> None:
        """Starts p2pd and listens. Raises SystemRefusedError when it does not come up."""
        if (allowed := self._traffic.allowed_bytes_per_second) is not None:
            _log.info("uploads are paced", bytes_per_second=allowed)
        daemon = await P2pd.start(
            self._identity,
            listen_multiaddrs=self._reachability.listen_multiaddrs,
            on_streams=self._on_streams
            | {
                PROTOCOL: self._on_tcp_stream,
                WHEREABOUTS: partial(self._serve, self._tell_whereabouts),
            },
            limits=self._limits,
            asks_router=self._reachability.asks_router,
            proxy=self._reachability.proxy,
            here=self._here,
        )
        self._traffic.kernel = daemon.tcp_pacing
        try:
            self._visible = await daemon.multiaddrs()
            await self._look_at_addresses()
        except BaseException:
            await daemon.stop()
            raise
        _log.info("peers are told of", addresses=self._multiaddrs)
        connections = Connections(
            daemon,
            self._identity.peer_id,
            limits=self._limits,
            on_connection=self._traffic.made_connection,
        )
        connections.set_roster(tuple(self._members.values()))
        sharing = asyncio.create_task(
            daemon.tcp_pacing.share(lambda: self._traffic.uplink.meter.most_bytes_per_second),
            name="uplink sharing",
        )
        sharing.add_done_callback(_tell_fault)
        self._started = _Started(
            daemon=daemon,
            server=Server(handler, limits=self._limits),
            connections=connections,
            sharing=sharing,
        )

    async def stop(self) -> None:
        """Ends all transfers and p2pd; safe to call more than once."""
        started, self._started = self._started, None
        if started is not None:
            await started.connections.stop()
        await self._punching.stop()
        await cancelled(self._serving if started is None else [started.sharing, *self._serving])
        if started is not None:
            started.server.receiver.clear()
        for sending in self._sendings.values():
            await sending.close()
        if started is not None:
            await started.daemon.stop()

    @property
    def _running(self) -> _Started:
        """Raises DaemonError before the start, and after the end."""
        if self._started is None:
            raise DaemonError("this node's transport is stopped")
        return self._started

    @property
    def multiaddrs(self) -> tuple[str, ...]:
        """Where peers find us, without the peer id; known once started."""
        return self._multiaddrs

    def _here(self) -> tuple[str, ...]:
        """By which it is decided whether loopback is dialled."""
        own = (address.split("/")[2] for address in self._multiaddrs)
        return (*own, self._reachability.coordinator_host())

    async def wait_failed(self) -> str:
        """Returns the reason once p2pd has died under us: then every transfer fails for good."""
        daemon = self._running.daemon
        await daemon.died.wait()
        return f"the libp2p daemon died: {daemon.last_words}"

    async def heed_addresses(self) -> bool:
        """See Transport.heed_addresses."""
        started = self._running
        before, told = self._own_addresses, self._multiaddrs
        if await self._look_at_addresses() and self._reachability.asks_router:
            found = await started.daemon.multiaddrs()
            forwarded = forwarded_among(found, before=self._visible, own=self._own_addresses)
            self._multiaddrs = (*forwarded, *self._multiaddrs)
        gone = set(before) - set(self._own_addresses)
        if gone:
            started.connections.begin_anew()
            self._punching.begin_anew()
        return bool(gone) or self._multiaddrs != told

    async def _look_at_addresses(self) -> bool:
        """Finds out what peers are told of from now on; returns False where it is nothing new."""
        own = await asyncio.to_thread(interface_addresses)
        self._own_addresses = tuple(dict.fromkeys(each.address for each in own))
        of_node = self._reachability
        route = await route_to(of_node.coordinator_host())
        told = told_addresses(own, route=route, interface=of_node.interface)
        if not told and self._multiaddrs:
            return False  # it has none for a moment
        visible = visible_now(self._visible, of_node.listen_multiaddrs, told)
        self._multiaddrs = by_route(announced(visible, of_node.announce_host), route)
        return bool(told)

    def set_roster(self, members: tuple[RosterEntry, ...]) -> None:
        """Says who is a member now. Anyone else is refused before a body is read."""
        others = tuple(entry for entry in members if entry.node_id != self._identity.node_id)
        gone = {p: self._members[n].node_name for p, n in self._node_ids.items()}
        self._members = {entry.node_id: entry for entry in others}
        self._peer_ids = {entry.node_id: peer_id_of(entry.address.public_key) for entry in others}
        self._node_ids = {peer_id: node_id for node_id, peer_id in self._peer_ids.items()}
        were_here = (self._were_here | gone).items()
        left = [(p, name) for p, name in were_here if p not in self._node_ids]
        self._were_here = dict(left[-MOST_REMEMBERED:])
        self._carrying.set_roster(self._members)
        self._punching.set_roster(
            {self._peer_ids[entry.node_id]: entry.address.multiaddrs for entry in others}
        )
        if self._started is not None:
            self._started.connections.set_roster(others)

    def seen(self) -> LinkState:
        """See Transport.seen. We send no faster than our owner allows, whatever the link carries."""
        if self._started is None:
            return LinkState()
        unreachable, here = self._unreachable(), self._started.connections.connected
        carriers = self._carrying.through
        return LinkState(
            unreachable=unreachable,
            narrow=self._narrow(),
            punched=self._named(self._punching.connected - here),
            by_proxy=self._named(self._started.daemon.by_proxy & here),
            through={peer: carriers[peer] for peer in unreachable if peer in carriers},
            carry_bytes_per_second=self._carrying.bytes_per_second,
            outside_token=b"" if self._punching.why_not else self._punching.token,
            outside_by_ipv6=self._punching.place_by_ipv6 if self._shows_outside else "",
            link_rates=self._traffic.rates,
            upload_pace=self._traffic.pace(sum(s.is_waiting for s in self._sendings.values())),
        )

    def _unreachable(self) -> tuple[NodeId, ...]:
        apart = set(self._running.connections.unreachable()) - self._punching.connected
        return tuple(sorted({*self._named(apart), *self._narrow()}))

    def _narrow(self) -> tuple[NodeId, ...]:
        if not (hosts := self._running.daemon.tcp_pacing.narrow_hosts):
            return ()
        return self._named(self._running.connections.at(hosts) - self._punching.connected)

    def _named(self, peer_ids: AbstractSet[str]) -> tuple[NodeId, ...]:
        """Members among these, in order."""
        return tuple(sorted(self._node_ids[p] for p in peer_ids if p in self._node_ids))

    def set_ways(self, ways: tuple[Way, ...]) -> None:
        """See Transport.set_ways."""
        self._carrying.set_ways(ways)

    async def show_outside(self, observers: Sequence[tuple[str, int]]) -> bool:
        """See Transport.show_outside."""
        if not self._punching.token:
            return False
        self._punching.leave_to_tcp(self._running.connections.connected)
        is_needed = bool(self._unreachable() or self._punching.connected)
        did, self._shows_outside = self._shows_outside, is_needed and bool(observers)
        if self._shows_outside:
            await self._punching.show(observers)
        return self._shows_outside and not did

    def heed_outside(self, seen: Sequence[str]) -> None:
        """See Transport.heed_outside."""
        self._punching.heed_outside(tuple(seen))

    def punch(self, peer: NodeId, multiaddr: str) -> None:
        """See Transport.punch. Whoever is connected by TCP meanwhile is not dialled."""
        peer_id = self._peer_ids.get(peer)
        if peer_id is not None and peer_id not in self._running.connections.connected:
            self._punching.punch(peer_id, multiaddr)

    async def coordinator_addresses(self, pin: bytes) -> list[Address]:
        """See Transport.coordinator_addresses."""
        if (started := self._started) is None:
            return []
        here = sorted(started.connections.connected & self._node_ids.keys())
        start = self._num_asked % max(1, len(here))
        asked = [*here[start:], *here[:start]][:MOST_ASKED]
        self._num_asked += len(asked)
        told = await asyncio.gather(
            *(asked_of(started.daemon, peer_id, pin, self._traffic) for peer_id in asked)
        )
        return list(dict.fromkeys(address for addresses in told for address in addresses))

    def round_trip_seconds(self, peer: NodeId) -> float:
        """See Transport.round_trip_seconds."""
        if (sending := self._sendings.get(peer)) is None:
            return self._limits.first_round_trip_seconds
        return sending.round_trip_seconds

    async def push(self, peer: NodeId, payload: Payload, *, timeout_seconds: float) -> bytes:
        """See Transport.push."""
        entry = self._member(peer)
        if (sending := self._sendings.get(peer)) is None:
            sending = self._sendings[peer] = self._sending_to(peer)
        async with self._in_time(entry, timeout_seconds), self._traffic.place():
            return await sending.push(payload)

    def _sending_to(self, peer: NodeId) -> Sending:
        return Sending(
            open_stream=lambda: self._stream_to(self._member(peer)),
            num_at_first=lambda round_trip_seconds: first_streams(
                round_trip_seconds=round_trip_seconds,
                num_others=sum(s.is_sending for p, s in self._sendings.items() if p != peer),
                bytes_per_second=self._traffic.allowed_bytes_per_second,
                most=self._limits.max_streams_per_body,
            ),
            most_at_rest=lambda: MOST_AT_REST // max(1, len(self._members)),
            traffic=self._traffic,
            limits=self._limits,
        )

    async def fetch(
        self,
        peer: NodeId,
        want: Want,
        *,
        max_body_bytes: int,
        timeout_seconds: float,
        heard: Callable[[], None] = do_nothing,
    ) -> Payload:
        """See Transport.fetch."""
        entry = self._member(peer)
        async with self._in_time(entry, timeout_seconds), self._stream_to(entry) as stream:
            with self._traffic.receiving():
                return await fetch_over(stream, want, max_body_bytes=max_body_bytes, heard=heard)

    def _member(self, peer: NodeId) -> RosterEntry:
        entry = self._members.get(peer)
        if entry is None:
            raise PeerUnreachableError(f"{peer} is not on the roster")
        return entry

    @asynccontextmanager
    async def _in_time(self, entry: RosterEntry, timeout_seconds: float) -> AsyncIterator[None]:
        """Bounds a transfer with a member; what goes wrong becomes the contract's errors."""
        name = f"{entry.node_name} ({entry.node_id})"
        try:
            async with asyncio.timeout(timeout_seconds) as deadline:
                yield
        except FrameError as error:
            raise TransferRefusedError(f"{name} speaks another protocol: {error}") from error
        except BROKEN as error:
            why = f"no end within {timeout_seconds:g} s" if deadline.expired() else str(error)
            raise PeerUnreachableError(f"{name}: {why}") from error

    @asynccontextmanager
    async def _stream_to(self, entry: RosterEntry) -> AsyncIterator[TransferStream]:
        """A stream of a transfer: of its request, or of parts."""
        stream = await self._open(entry)
        try:
            yield stream
        finally:
            stream.abort()  # whatever mattered was answered: nothing is left to flush
            stream.count_ended()

    async def _open(self, entry: RosterEntry) -> TransferStream:
        """Directly where that can be, and through whom a plan names where not."""
        if not self._is_connected(entry) and self._carrying.carriers_to(entry.node_id):
            return await self._carrying.open(entry)
        return await self._open_direct(entry, PROTOCOL)

    def _is_connected(self, entry: RosterEntry) -> bool:
        peer_id = self._peer_ids[entry.node_id]
        if peer_id in self._punching.connected:
            return True
        is_here = peer_id in self._running.connections.connected
        return is_here and entry.node_id not in self._narrow()

    async def _open_direct(self, entry: RosterEntry, protocol: str = CARRYING) -> TransferStream:
        peer_id = self._peer_ids[entry.node_id]
        for is_last_try in (False, True):
            daemon, connections = self._running.daemon, self._running.connections
            if peer_id in self._punching.connected - connections.connected:
                try:
                    reader, writer = await self._punching.open_stream(peer_id, protocol)
                    break
                except DaemonError:
                    self._punching.give_up(peer_id)
                    if is_last_try:
                        raise
                    continue
            await daemon.connect(peer_id, entry.address.multiaddrs)
            connections.saw(peer_id)
            try:
                reader, writer = await daemon.open_stream(peer_id, protocol)
                break
            except DaemonError:
                # The connection was dead already, and p2pd knows now: dial once more.
                connections.lost(peer_id)
                if is_last_try:
                    raise
        return self._stream(reader, writer, self._limits)

    def _stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits
    ) -> TransferStream:
        return TransferStream(
            reader,
            writer,
            idle_seconds=limits.idle_seconds,
            traffic=self._traffic,
        )

    async def _on_tcp_stream(
        self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._started is not None and peer_id in self._node_ids:
            self._started.connections.saw(peer_id)
        await self._serve(self._admit_stream, peer_id, reader, writer)

    async def _tell_whereabouts(
        self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        stream = self._stream(reader, writer, _TURNED_AWAY)
        try:
            with self._turning_away.let_in(peer_id):
                await answer(stream, self._whereabouts)
        except (TransferRefusedError, FrameError, *BROKEN):
            pass  # too many ask, or the one that asks has gone
        finally:
            stream.count_ended()

    async def _serve(
        self,
        admit: StreamCallback,
        peer_id: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Serves one inbound stream. Must not raise: asyncio would print it."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await admit(peer_id, reader, writer)
        except asyncio.CancelledError:
            pass  # by stop(); nobody awaits this task, and asyncio would log the cancellation
        finally:
            drop(writer)
            self._serving.discard(task)

    def _tell_refused(self, peer_id: str) -> None:
        """A coordinator that gave nodes up, or starts anew, has them back one after the other."""
        if (name := self._were_here.get(peer_id)) is not None:
            _log.info("refused a stream of a node that the coordinator does not count now", of=name)
        else:
            _log.warning("refused a stream of a stranger", peer_id=peer_id)

    async def _admit_stream(
        self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        sender = self._node_ids.get(peer_id)
        if sender is None:
            self._tell_refused(peer_id)
            await self._turn_away(peer_id, "you are not on the roster", reader, writer)
            return
        await self._answer(sender, reader, writer)

    async def _answer(
        self, sender: NodeId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            server = self._running.server
            await server.serve(self._stream(reader, writer, self._limits), sender)
        except TransferRefusedError as refusal:  # there is no place
            await self._turn_away(sender, str(refusal), reader, writer)
        except FrameError as error:
            _log.warning("a member speaks another protocol", sender=sender, error=str(error))
        except BROKEN as error:
            _log.info("a transfer broke off", sender=sender, error=repr(error))

    async def _admit_carried(
        self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        sender = self._node_ids.get(peer_id)
        stream = self._stream(reader, writer, self._limits)
        if sender is None:
            self._tell_refused(peer_id)
            return
        try:
            origin = await self._carrying.answer(stream, sender)
        except TransferRefusedError as refusal:
            _log.info("carries no stream", of=sender, why=str(refusal))
            with suppress(*BROKEN):
                await refuse(stream, str(refusal))
                await stream.outlast()
        except FrameError as error:
            _log.warning("a member speaks another protocol", sender=sender, error=str(error))
        except BROKEN as error:
            _log.debug("a stream to be carried broke off", sender=sender, error=repr(error))
        else:
            if origin is not None:
                await self._answer(origin, reader, writer)
        finally:
            stream.count_ended()

    async def _turn_away(
        self, peer: str, reason: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Says why, if not too many wait for that. Reads the request first, or the answer gets lost."""
        stream = self._stream(reader, writer, _TURNED_AWAY)
        try:
            with self._turning_away.let_in(peer):
                await stream.receive(wire.TransferRequest)
                await refuse(stream, reason)
                await stream.outlast()
        except (TransferRefusedError, FrameError, *BROKEN):
            pass  # then it is not told
        finally:
            stream.count_ended()


def within_open_files(limits: Limits) -> Limits:
    """With a line that leaves half of the files that may be open to all else: a stream is one."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return limits
    room = max(0, allowed // 2 - limits.max_streams)
    return replace(limits, max_waiting_streams=min(limits.max_waiting_streams, room))


def _tell_fault(sharing: asyncio.Task[None]) -> None:
    if not sharing.cancelled() and (error := sharing.exception()) is not None:
        _log.error("the uplink is not dealt out any more", exc_info=error)
