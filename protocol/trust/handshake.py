"""TLS without gRPC: certificates before they are trusted, why a call failed, and servers known by a pin.

gRPC reports "nothing listens", "not our coordinator" and "it refuses our certificate" alike, as
UNAVAILABLE with some text; the ssl module tells them apart.
"""

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import ssl
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Self
from urllib.request import getproxies

from protocol.errors import (
    NOT_STARTED,
    AtollError,
    BadDataError,
    CertificateRefusedError,
    ProtocolMismatchError,
    UnavailableError,
)
from protocol.files.durable import read_secret, write_atomically
from protocol.files.leftovers import temporary_directory
from protocol.trust.credentials import Credentials, mended_by
from protocol.trust.invite import SECRET_BYTES, Invite, endpoint_of
from protocol.trust.pki import Authority, is_coordinators, new_swarm_id, pin_of, server_name
from protocol.trust.proxy import Proxy, ProxyRefusedError
from protocol.wire.sockets import NO_WAY, blocking_connection_to, connection_to, looked_up

TIMEOUT_SECONDS = 5.0
"""For connecting and for each answer within a handshake."""

LOOK_UP_SECONDS = 8.0
"""For a name: a resolver goes on to the next name server after five."""

WEB_PORT = 443
"""The one that nearly all networks let out."""

_PROTOCOLS = ["h2", *("x" * 250 for _ in range(5))]
"""gRPC's, and what makes a first message as large as gRPC's is, which fills a packet: it may be lost."""

_CUT_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError)

_CLOCK_ERRORS = {9, 10}  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED


def nothing_answers(host: str, port: int, error: OSError) -> UnavailableError:
    """The sentence for a coordinator that cannot be reached."""
    if isinstance(error, ProxyRefusedError):
        return UnavailableError(
            f"no way to the coordinator at {endpoint_of(host, port)}: {error}",
            next_step="check --proxy, or proxy in link.toml; where it leads to port 443 alone, ask the "
            "run owner to serve there: 'atoll coordinator start --one-port 443'",
        )
    reason = (
        "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
    )
    endpoint, here = endpoint_of(host, port), _elsewhere_in_words(host, error)
    if here:
        endpoint += f", which is {here} here"
    next_step = NOT_STARTED
    if isinstance(error, socket.gaierror):
        next_step = (
            f"check the name, and this machine's network: 'getent hosts {host}' shows an address where the "
            "name is known; a guest network wants you to sign in by a browser first"
        )
    elif error.errno in NO_WAY:
        places = addresses_of(host) or (host,)
        family = " and ".join(sorted({"IPv6" if ":" in one else "IPv4" for one in places}))
        next_step = (
            f"if this machine is in a network, it is one without {family}: ask the run owner for an invite "
            "to another address of the coordinator ('atoll invite create --host HOST')"
        )
    elif proxy := getproxies().get("https"):
        next_step += (
            f"; Atoll goes through the proxy {proxy_in_words(proxy)} of https_proxy only if it is told to: "
            f"'atoll join --proxy {proxy_in_words(proxy)}', or proxy in link.toml"
        )
    elif isinstance(error, TimeoutError) and port != WEB_PORT:
        next_step += (
            f"; where this network lets out port {WEB_PORT} alone, ask the run owner to serve there: "
            f"'atoll coordinator start --one-port {WEB_PORT}'"
        )
    if here:
        next_step += "; if that is not its address, sign in to this network by a browser"
    return UnavailableError(f"no coordinator answers at {endpoint} ({reason})", next_step=next_step)


def _elsewhere_in_words(host: str, error: OSError) -> str:
    """Where a name leads here, which may be elsewhere in a guest network; empty for addresses."""
    return "" if isinstance(error, socket.gaierror) else " and ".join(addresses_of(host)[:2])


def addresses_of(host: str) -> tuple[str, ...]:
    """Where a name leads here; none for an address, and where no name is looked up now. Blocks."""
    try:
        found = [str(one[4][0]) for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return ()
    return tuple(one for one in dict.fromkeys(found) if one != host)


def proxy_in_words(url: str) -> str:
    """Host and port of a proxy, without the password that may stand before them."""
    return url.rsplit("@", 1)[-1].split("//", 1)[-1].rstrip("/")


def another_in_its_place(endpoint: str) -> UnavailableError:
    """The sentence for what answers, by TLS or without, and is no coordinator at all.

    Not for good: a laptop in a guest network finds its coordinator again elsewhere.
    """
    return UnavailableError(
        f"what answers at {endpoint} is no coordinator: another program, the sign-in page of a guest "
        "network, or a firewall that looks into connections, is in its place",
        next_step="sign in to this network in a browser, or use another network; if it is none of these, ask "
        "the run owner for the coordinator's host and port",
    )


def answer_lost(endpoint: str) -> UnavailableError:
    """The sentence for a coordinator that accepts a connection, and is not heard after that."""
    return UnavailableError(
        f"{endpoint} accepts connections, and its certificate does not arrive: either it is stopped, or "
        "larger packets get lost on the way",
        next_step="lower this machine's MTU and try again: 'sudo ip link set dev NAME mtu 1280', with the "
        "NAME that 'ip route get' shows",
    )


def no_connection(endpoint: str) -> UnavailableError:
    """The sentence for a coordinator that was not reached in time, nobody knows why."""
    return UnavailableError(
        f"no connection to the coordinator at {endpoint} came to be in time",
        next_step="check this machine's network, and that it finds the name: "
        f"'getent hosts {endpoint.rpartition(':')[0].strip('[]')}'",
    )


def _broken_off(endpoint: str, error: OSError) -> AtollError:
    """The sentence for a handshake that came to no end."""
    if isinstance(error, TimeoutError):
        return answer_lost(endpoint)
    if isinstance(error, ssl.SSLError) and not isinstance(error, _CUT_OFF):
        if "ALERT" not in (error.reason or ""):  # what came is no TLS
            return another_in_its_place(endpoint)
        return ProtocolMismatchError(
            f"what answers at {endpoint} is not a coordinator ({error.reason})",
            next_step="check host and port",
        )
    return UnavailableError(
        f"the handshake with {endpoint} broke off ({error.strerror or error})",
        next_step="try again; if it stays so, look at the coordinator's log, or try another network",
    )


def connected(host: str, port: int, proxy: Proxy | None) -> socket.socket:
    """A connection, through a proxy where there is one. Blocks. Raises OSError."""
    if proxy is not None:
        return proxy.connected(host, port, timeout=TIMEOUT_SECONDS)
    return blocking_connection_to(host, port, seconds=TIMEOUT_SECONDS)


def fetch_certificate(host: str, port: int, proxy: Proxy | None = None) -> bytes:
    """The certificate of whoever answers there, PEM: not to be believed yet. Blocks.

    Raises UnavailableError when nothing is there, or what speaks no TLS, and ProtocolMismatchError when it
    refuses ours.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(_PROTOCOLS)
    try:
        connection = connected(host, port, proxy)
    except OSError as error:
        raise nothing_answers(host, port, error) from error
    try:
        with connection, context.wrap_socket(connection, server_hostname=host) as tls:
            return ssl.DER_cert_to_PEM_cert(tls.getpeercert(True) or b"").encode()
    except OSError as error:
        raise _broken_off(endpoint_of(host, port), error) from error


def fetch_pinned_certificate(invite: Invite, proxy: Proxy | None = None) -> bytes:
    """The certificate at the invite's address, PEM, which is known to be the one it pins. Blocks.

    Raises UnavailableError when no coordinator is there and ProtocolMismatchError when it is another one.
    """
    certificate = fetch_certificate(invite.host, invite.port, proxy)
    pin = pin_of(certificate)
    if pin != invite.pin:
        if not is_coordinators(certificate):
            raise another_in_its_place(invite.endpoint)
        raise ProtocolMismatchError(
            f"the coordinator at {invite.endpoint} has certificate {pin.hex()[:16]}…, "
            f"the invite is for {invite.pin.hex()[:16]}…",
            next_step="ask the run owner for a new invite: 'atoll invite create'",
        )
    return certificate


class Diagnosis:
    """Finds out why calls with some credentials do not reach their coordinator."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._lock = threading.Lock()
        self._made: ssl.SSLContext | None = None

    def find(self) -> AtollError | None:
        """Tries a handshake. None when it succeeds: then it was the call that failed. Blocks.

        Raises nothing: what it finds is what it returns.
        """
        found = self._attempt()
        # A coordinator that stops while we look hangs up as if it refused us. It has closed its
        # port by then, so a second look tells the two apart, and a node does not give up for good.
        return self._attempt() if isinstance(found, ProtocolMismatchError) else found

    def _attempt(self) -> AtollError | None:
        host, port = self._credentials.host, self._credentials.control_port
        try:
            connection = connected(host, port, self._credentials.proxy)
        except OSError as error:
            return nothing_answers(host, port, error)
        with connection:
            return self._shake_hands(connection)

    def _shake_hands(self, connection: socket.socket) -> AtollError | None:
        endpoint, swarm_id = self._credentials.endpoint, self._credentials.swarm_id
        try:
            context = self._context()
        except ssl.SSLError as error:  # our own, and nothing that was answered
            return CertificateRefusedError(
                f"this member's certificate is not of its key ({error.reason})",
                next_step=self._mended_by,
            )
        try:
            tls = context.wrap_socket(connection, server_hostname=server_name(swarm_id))
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in _CLOCK_ERRORS:
                return ProtocolMismatchError(
                    f"the certificate of the coordinator at {endpoint} is out of date here "
                    f"({error.verify_message})",
                    next_step="set this machine's clock",
                )
            if self._is_another_in_its_place():
                return another_in_its_place(endpoint)
            return CertificateRefusedError(
                f"the coordinator at {endpoint} is not of swarm {swarm_id}",
                next_step="check host and port, or join its swarm with 'atoll join INVITE'",
            )
        except OSError as error:
            return _broken_off(endpoint, error)
        with tls:
            return (
                None
                if _is_welcome(tls)
                else CertificateRefusedError(
                    f"the coordinator at {endpoint} refuses this certificate",
                    next_step=self._mended_by,
                )
            )

    @property
    def _mended_by(self) -> str:
        folder = self._credentials.folder
        return "join again with 'atoll join INVITE'" if folder is None else mended_by(folder)

    def _is_another_in_its_place(self) -> bool:
        try:
            ours = self._credentials
            certificate = fetch_certificate(ours.host, ours.control_port, ours.proxy)
        except AtollError:
            return False
        return not is_coordinators(certificate)

    def _context(self) -> ssl.SSLContext:
        """Made once, since it needs the key in a file for a moment."""
        with self._lock:
            if self._made is None:
                context = ssl.create_default_context(
                    cadata=self._credentials.server_root_pem.decode()
                )
                context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC
                context.set_alpn_protocols(_PROTOCOLS)
                with tempfile.TemporaryDirectory(dir=temporary_directory()) as folder:
                    certificate, key = Path(folder) / "client.pem", Path(folder) / "client.key"
                    certificate.write_bytes(self._credentials.leaf_pem)
                    key.write_bytes(self._credentials.key_pem)
                    context.load_cert_chain(certificate, key)
                self._made = context
            return self._made


def _is_welcome(tls: ssl.SSLSocket) -> bool:
    """Whether the server goes on after it has judged our certificate.

    In TLS 1.3 our side is done before that. A gRPC server that accepts sends its HTTP/2 settings at
    once; one that refuses closes the connection, without an alert.
    """
    try:
        return bool(tls.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False


# Servers known by a pin, the digest of their certificate, by whatever name they are dialled.
#
# No authority stands behind them: whoever dials was given the pin, and a secret to be let in by. So do the
# desk of an island's leader for its hosts, and a relay for coordinators.


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedKey:
    """What such a server keeps."""

    certificate_pem: bytes
    key_pem: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    @classmethod
    def of_file(cls, path: Path, *, when_damaged: str) -> Self:
        """Made at the first use, and readable to its owner only.

        Raises BadDataError with the next step `when_damaged`.
        """
        if not path.exists():
            server = Authority.create(new_swarm_id()).issue_server()
            made = {
                "certificate": server.certificate_pem.decode(),
                "key": server.key_pem.decode(),
                "secret": secrets.token_hex(SECRET_BYTES),
            }
            write_atomically(path, json.dumps(made).encode(), mode=0o600)
        try:
            values = json.loads(read_secret(path))
            return cls(
                certificate_pem=values["certificate"].encode(),
                key_pem=values["key"].encode(),
                secret=bytes.fromhex(values["secret"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadDataError(f"{path} is damaged", next_step=when_damaged) from error

    @property
    def pin(self) -> bytes:
        """What others know it by."""
        return pin_of(self.certificate_pem)

    def server_context(self) -> ssl.SSLContext:
        """Its side of TLS 1.3."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Python takes keys from files only.
        with NamedTemporaryFile(prefix="atoll-pinned-", dir=temporary_directory()) as file:
            Path(file.name).write_bytes(self.certificate_pem + self.key_pem)
            context.load_cert_chain(file.name)
        return context


async def pinned_connection(
    host: str, port: int, pin: bytes, *, another: ProtocolMismatchError, limit: int = 1 << 16
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection by TLS 1.3 to the server of this pin, on which nothing has been said yet.

    Raises OSError where nobody answers, and `another` where another server does.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # anybody may answer, and is asked for the pin then
    hosts = await looked_up(host, port, seconds=LOOK_UP_SECONDS)
    reader, writer = await connection_to(
        hosts, port, ssl=context, server_hostname=host, limit=limit
    )
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if not hmac.compare_digest(hashlib.sha256(certificate).digest(), pin):
        writer.transport.abort()
        raise another
    return reader, writer
