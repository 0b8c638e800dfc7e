"""Calls that find the coordinator: with a certificate of today, and at the address where it is now.

`RenewingCalls` is a stub over a channel that is opened anew with each new certificate. A certificate is
renewed in the session, or, where the coordinator refuses the one that there is, by the identity on the
joining port. Calls in flight go on over the channel on which they began, the stream of messages too.

Where the run owner has told that the coordinator moves, calls look for it at both addresses in turns: each
that finds nobody has the next ones go to the other one. Once it has answered at the new one, only that stays.
So they do where its name has led while it answered: a network whose names fail may reach it all the same.
A node that starts, and finds nobody, asks the members that its folder names as well: it was off when the rest
was told. A running one that is away for a while asks those that it is connected to: it may have been cut off.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio
import structlog

from node.link.calls import AskMembers
from protocol.errors import (
    AtollError,
    CertificateRefusedError,
    HeldBackError,
    NotPermittedError,
    OtherSwarmError,
    TemporaryError,
    UnavailableError,
)
from protocol.trust.credentials import Credentials
from protocol.trust.enrolment import no_new_one, renew_by_identity, renewal_request, taken
from protocol.trust.handshake import addresses_of, fetch_certificate
from protocol.trust.identity import Identity
from protocol.trust.invite import InvitedBy, endpoint_of, named_members
from protocol.trust.pki import pin_of
from protocol.trust.rulings import Address
from protocol.v1.session_pb2_grpc import SessionServiceStub
from protocol.wire.channel import DEADLINE_SECONDS, open_channel
from protocol.wire.payload import WireCounts
from protocol.wire.rounds import NodeId, RosterEntry
from protocol.wire.sockets import in_own_thread

log = structlog.get_logger()

ASK_MEMBERS_AGAIN_SECONDS = 60.0

MOST_KEPT_MEMBERS = 4
"""In link.toml."""


def kept_members(
    kept: Sequence[InvitedBy], met: Sequence[RosterEntry], *, own_id: NodeId
) -> tuple[InvitedBy, ...]:
    """Whom a node's folder names: those of before where they are, then others, if all can dial them first.

    Nobody is forgotten while nobody is here.
    """
    here = named_members(entry.address for entry in met if entry.node_id != own_id)
    if not here:
        return tuple(kept)
    were = {member.public_key for member in kept}
    ordered = sorted(here, key=lambda one: (one.is_local, one.public_key not in were))
    return tuple(ordered[:MOST_KEPT_MEMBERS])


class RenewingCalls:
    """A SessionStub. Leave it as a context manager: it closes its channels.

    `ask_members` is how those that credentials name are asked where the coordinator is.
    """

    def __init__(
        self,
        credentials: Credentials,
        identity: Identity,
        counts: WireCounts,
        ask_members: AskMembers | None = None,
    ) -> None:
        self._ask_members = ask_members
        self._asked_at = -math.inf
        self._has_told_of_asking = False  # since it has answered last
        self._credentials = credentials
        self._identity = identity
        self._counts = counts
        self._channel = open_channel(credentials, counts)
        self._stream_channel: grpc.aio.Channel | None = None  # of the messages, the last time
        self._led_to: dict[str, tuple[str, ...]] = {}  # a name, when somebody answered there
        self._is_by_address = False
        self._noting: asyncio.Task[None] | None = None  # where the channel's name leads
        self._is_at_the_other = False  # than link.toml has first
        self._turn = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "RenewingCalls":
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in {self._channel, self._stream_channel}:
            if channel is not None:
                await channel.close()
        self._end_noting()
        await asyncio.gather(*self._closing, return_exceptions=True)

    @property
    def credentials(self) -> Credentials:
        """Those that new connections are made with."""
        return self._credentials

    def __getattr__(self, method: str) -> Callable[[Any], Any]:
        """The call of that name."""
        if method.startswith("_"):
            raise AttributeError(method)
        return self._streamed if method == "Subscribe" else self._unary(method)

    def _unary(self, method: str) -> Callable[[Any], Any]:
        async def call(request: Any) -> Any:
            used, channel = self._credentials, self._channel
            try:
                answer = await getattr(SessionServiceStub(channel), method)(request)
                if channel is self._channel and self._noting is None:
                    self._noting = asyncio.create_task(self._note_addresses())
                if self._is_at_the_other and used is self._credentials:
                    self._found()
                self._has_told_of_asking = False
                return answer
            except CertificateRefusedError as error:
                try:
                    await self._renew_refused(used, error)
                except OtherSwarmError:
                    if used is self._credentials:
                        self._look_at_the_other()
                    raise
                answer = await getattr(SessionServiceStub(self._channel), method)(request)
                log.info("the certificate was refused, and the identity has got a new one")
                return answer
            except UnavailableError:
                if channel is self._channel:
                    self._look_further()
                raise

        return call

    def moves_to(self, address: Address) -> None:
        """The coordinator will be there: calls that find nobody look there in turns. Kept in link.toml."""
        ours = self._credentials
        there = (address.host, address.control_port)
        if there == (ours.host, ours.control_port) or self._is_at_the_other:
            return
        self._credentials = replace(ours, elsewhere=address)
        self._credentials.save_renewed()
        log.info("the coordinator will move", to=endpoint_of(*there))

    def meets(self, members: Sequence[RosterEntry]) -> None:
        """Keeps in link.toml who else is here, for a start that finds no coordinator."""
        ours = self._credentials
        own_id = NodeId(ours.principal.node_id or "")
        kept = kept_members(ours.members, members, own_id=own_id)
        if set(kept) != set(ours.members):
            self._credentials = replace(ours, members=kept)
            self._credentials.save_link()

    async def look_elsewhere(self, ask: AskMembers | None = None) -> bool:
        """Asks members where the coordinator is; later calls go there. Not again for a while.

        A running node says how it asks those that it is connected to. Else those are asked that link.toml
        names. Returns whether the coordinator shows its certificate at another address; that is kept once
        it has answered there.
        """
        now = asyncio.get_running_loop().time()
        members = self._credentials.members
        if ask is None and (self._ask_members is None or not members):
            return False
        if now < self._asked_at + ASK_MEMBERS_AGAIN_SECONDS:
            return False
        self._asked_at = now
        where = [endpoint_of(member.host, member.port) for member in members]
        whom = {"members": where} if ask is None else {}
        say = log.debug if self._has_told_of_asking else log.info
        self._has_told_of_asking = True
        say("asking members where the coordinator is", **whom)
        asked = ask or self._ask_members
        assert asked is not None
        try:
            found = self._credentials.unknown_among(await asked(self._credentials))
        except AtollError as error:
            log.warning("members are not asked", why=error.what, next_step=error.next_step)
            return False
        shown = [await self._shows_our_pin(address) for address in found]
        there = next(
            (address for address, is_shown in zip(found, shown, strict=True) if is_shown), None
        )
        if there is None:
            say("they know no other address where it answers, or do not answer", told=len(found))
            return False
        if self._is_at_the_other:
            self._look_at_the_other()
        self._credentials = replace(self._credentials, elsewhere=there)
        self._look_at_the_other()
        return True

    async def _shows_our_pin(self, address: Address) -> bool:
        """Whether the coordinator is there: members may be mistaken, or lie, and are not believed."""
        pin, proxy = pin_of(self._credentials.server_root_pem), self._credentials.proxy
        try:
            certificate = await in_own_thread(
                lambda: fetch_certificate(address.host, address.control_port, proxy)
            )
        except AtollError as error:
            log.info("a member names a place where no coordinator is", why=error.what)
            return False
        return pin_of(certificate) == pin

    def _look_at_the_other(self) -> None:
        if self._credentials.elsewhere is not None:
            self._is_by_address = False
            self._credentials = self._credentials.at_the_other
            self._is_at_the_other = not self._is_at_the_other
            self.reconnect()

    def _look_further(self) -> None:
        """Calls that find nobody go where the name has led before, and then to the other place, in turns."""
        ours = self._credentials
        before = self._led_to.get(ours.host, ())
        if self._is_by_address:
            self._led_to[ours.host] = (*before[1:], *before[:1])
        self._is_by_address = not self._is_by_address and bool(before)
        if self._is_by_address or ours.elsewhere is None:
            self.reconnect()
        else:
            self._look_at_the_other()

    async def _note_addresses(self) -> None:
        """While the name leads somewhere. A proxy looks it up by itself."""
        host, proxy = self._credentials.host, self._credentials.proxy
        if not self._is_by_address and proxy is None:
            found = await in_own_thread(partial(addresses_of, host))
            self._led_to[host] = found or self._led_to.get(host, ())

    def _end_noting(self) -> None:
        if self._noting is not None:
            self._noting.cancel()
            self._noting = None

    def _opened(self) -> grpc.aio.Channel:
        self._end_noting()
        address = self._led_to[self._credentials.host][0] if self._is_by_address else None
        return open_channel(self._credentials, self._counts, address=address)

    def _found(self) -> None:
        """Somebody of ours has answered where the coordinator was to move to."""
        self._credentials = replace(self._credentials, elsewhere=None)
        self._is_at_the_other = False
        self._credentials.save_renewed()
        log.info("the coordinator has moved", to=self._credentials.endpoint)

    def _streamed(self, request: Any) -> Any:
        """A stream that breaks is not opened again here: the session attaches before."""
        before, self._stream_channel = self._stream_channel, self._channel
        if before is not None and before is not self._channel:
            self._close(before)
        return SessionServiceStub(self._channel).Subscribe(request)

    async def renew(self) -> float:
        """A new certificate by the one that there is; returns in how many seconds to do so again."""
        async with self._turn:
            stub = SessionServiceStub(self._channel)
            answer = await stub.Renew(renewal_request(self._credentials, self._identity))
            self._go_on_with(taken(self._credentials, answer))
            return answer.renew_in_seconds

    async def _renew_refused(self, used: Credentials, refusal: CertificateRefusedError) -> None:
        """By the identity. Raises why not, or the refusal where who answers there is none of ours."""
        async with self._turn:
            if used is not self._credentials:
                return  # another call has done it meanwhile
            try:
                renewed = await renew_by_identity(self._credentials, self._identity)
            except (NotPermittedError, HeldBackError, TemporaryError):
                raise
            except AtollError as error:
                log.debug("no new certificate", why=error.what)
                raise no_new_one(self._credentials, refusal, error) from error
            self._go_on_with(renewed)

    def _go_on_with(self, renewed: Credentials) -> None:
        renewed.save_renewed()
        before, self._credentials = self._channel, renewed
        self._channel = self._opened()
        if before is not self._stream_channel:
            self._close(before)

    def reconnect(self) -> None:
        """Later calls go over a new connection. Those in flight may still be answered."""
        before, self._channel = self._channel, self._opened()
        if before is not self._stream_channel:
            self._close(before)

    def _close(self, channel: grpc.aio.Channel) -> None:
        """When the calls on it have ended."""
        task = asyncio.create_task(channel.close(DEADLINE_SECONDS))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
