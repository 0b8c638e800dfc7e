"""An invite: one line of text with which a machine finds a coordinator, knows it, and may join.

Text: `atoll1-` and lower-case base32 without padding of: length of everything (2 bytes), port (2),
pin (32), secret (32), invite id and host (each a length byte and UTF-8), and a check (4 bytes of
BLAKE3), all big-endian. The length tells a truncated invite from a mistyped one. Behind the host there may be
members that know where the coordinator is: of each the public key (32), port (2) and host.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import blake3

from protocol.errors import BadDataError, UsageError
from protocol.trust.armour import Armour
from protocol.wire.rounds import PeerAddress

PIN_BYTES = 32
SECRET_BYTES = 32
MAX_HOST_BYTES = 253  # a host name's longest form (RFC 1035)
MAX_INVITE_ID_BYTES = 64

KEY_BYTES = 32
MOST_MEMBERS = 2
"""That an invite names: each makes it half as long again."""

_SECRET_CONTEXT = "atoll invite secret 1"


def hash_of_secret(secret: bytes) -> bytes:
    """What the coordinator stores of an invite's secret, 32 bytes."""
    return blake3.blake3(secret, derive_key_context=_SECRET_CONTEXT).digest()


def endpoint_of(host: str, port: int) -> str:
    """Host and port as URIs and gRPC write them: IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


INVITE = Armour(
    prefix="atoll1-",
    noun="invite",
    ask_again="copy it again, or ask the run owner for a new one: 'atoll invite create'",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvitedBy:
    """A member that an invite names beside the coordinator: its key, and where libp2p dials it."""

    public_key: bytes
    host: str
    port: int

    def __post_init__(self) -> None:
        check_endpoint(self.host, self.port)
        if len(self.public_key) != KEY_BYTES:
            raise ValueError("a member's key has 32 bytes")

    @property
    def multiaddr(self) -> str:
        """As libp2p writes it."""
        try:
            kind = f"ip{ipaddress.ip_address(self.host).version}"
        except ValueError:
            kind = "dns"
        return f"/{kind}/{self.host}/tcp/{self.port}"

    @classmethod
    def at(cls, public_key: bytes, multiaddr: str) -> "InvitedBy | None":
        """By a multiaddress that a member tells of itself; None where an invite cannot name it."""
        match multiaddr.split("/"):
            case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port] if port.isdigit():
                try:
                    return cls(public_key=public_key, host=host, port=int(port))
                except UsageError:
                    return None
        return None

    @property
    def is_local(self) -> bool:
        """Whether it is an address that not all of the internet dials."""
        try:
            return not ipaddress.ip_address(self.host).is_global
        except ValueError:
            return False  # a name


def named_members(addresses: Iterable[PeerAddress]) -> list[InvitedBy]:
    """One address of each, a name or of the whole internet where there is one; without those of neither."""
    named = []
    for address in addresses:
        found = (InvitedBy.at(address.public_key, each) for each in address.multiaddrs)
        known = sorted((each for each in found if each is not None), key=lambda one: one.is_local)
        named += known[:1]
    return named


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """Where to enrol, whom to expect there, and the right to do so.

    `port` is the enrolment port; `pin` is `pki.pin_of` the server's certificate; `secret` is known
    only to who holds the invite. Raises UsageError for a host or port that cannot be.
    """

    host: str
    port: int
    pin: bytes
    invite_id: str
    secret: bytes = field(repr=False)
    members: tuple[InvitedBy, ...] = ()
    """Who knows where the coordinator is, should it have moved."""

    def __post_init__(self) -> None:
        check_endpoint(self.host, self.port)
        if len(self.pin) != PIN_BYTES or len(self.secret) != SECRET_BYTES:
            raise ValueError("an invite's pin and secret have 32 bytes each")
        if not 0 < len(self.invite_id.encode()) <= MAX_INVITE_ID_BYTES:
            raise ValueError(f"{self.invite_id!r} is not an invite id")

    @property
    def endpoint(self) -> str:
        """Host and port of the enrolment service."""
        return endpoint_of(self.host, self.port)

    def at(self, host: str, port: int) -> "Invite":
        """The same at another address; raises UsageError for one that cannot be."""
        return replace(self, host=host, port=port, members=())

    def encode(self) -> str:
        """The invite as text, around 160 characters, and 70 more for each member."""
        invite_id, host = self.invite_id.encode(), self.host.encode()
        content = b"".join(
            (
                self.port.to_bytes(2),
                self.pin,
                self.secret,
                len(invite_id).to_bytes(1),
                invite_id,
                len(host).to_bytes(1),
                host,
                *(_packed(member) for member in self.members),
            )
        )
        return INVITE.encode(content)

    @classmethod
    def decode(cls, text: str) -> "Invite":
        """Reads an invite; raises BadDataError (Armour.decode)."""
        return cls._unpack(INVITE.decode(text))

    @classmethod
    def _unpack(cls, content: bytes) -> "Invite":
        """Reads what the check covers. It can only be wrong when somebody made it so."""
        try:
            port, pin, secret = int.from_bytes(content[:2]), content[2:34], content[34:66]
            id_end = 67 + content[66]
            invite_id = content[67:id_end].decode()
            host_end = id_end + 1 + content[id_end]
            host = content[id_end + 1 : host_end].decode()
            if host_end > len(content):
                raise ValueError("its lengths do not add up")
            members = _members_in(content[host_end:])
            return cls(
                host=host,
                port=port,
                pin=pin,
                invite_id=invite_id,
                secret=secret,
                members=members,
            )
        except (IndexError, ValueError, UsageError) as error:
            raise BadDataError(
                f"not a valid invite: {error}", next_step=INVITE.ask_again
            ) from error


def _packed(member: InvitedBy) -> bytes:
    host = member.host.encode()
    return member.public_key + member.port.to_bytes(2) + len(host).to_bytes(1) + host


def _members_in(content: bytes) -> tuple[InvitedBy, ...]:
    """Raises ValueError, IndexError or UsageError for what is none."""
    members: list[InvitedBy] = []
    while content:
        end = KEY_BYTES + 3 + content[KEY_BYTES + 2]
        if end > len(content) or len(members) == MOST_MEMBERS:
            raise ValueError("its lengths do not add up")
        members.append(
            InvitedBy(
                public_key=content[:KEY_BYTES],
                port=int.from_bytes(content[KEY_BYTES : KEY_BYTES + 2]),
                host=content[KEY_BYTES + 3 : end].decode(),
            )
        )
        content = content[end:]
    return tuple(members)


def check_endpoint(host: str, port: int) -> None:
    """Raises UsageError for a host or port that cannot be."""
    if not _is_host(host):
        raise UsageError(f"{host!r} is not a host", next_step="give a host name or an IP address")
    if not 0 < port < 1 << 16:
        raise UsageError(f"{port} is not a port", next_step="give one from 1 to 65535")


def _is_host(text: str) -> bool:
    """Whether it can be a host name or an address, which is not to say that it is there."""
    try:
        text.encode("idna")  # what the socket module does to every host, and raises for
    except UnicodeError:
        return False
    return 0 < len(text.encode()) <= MAX_HOST_BYTES and not re.search(r"[\s/\[\]@]", text)
