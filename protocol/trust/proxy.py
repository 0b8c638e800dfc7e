"""The HTTP proxy by which a network lets connections out, where its member has named one.

It is asked by CONNECT (RFC 9110, 9.3.6) for a tunnel to one host and port, and carries that as it is: TLS
with the coordinator, or libp2p with a member. It sees addresses, times and sizes. Nothing that stands in an
environment names one: who may write there would say by whom a coordinator is asked.
"""

import base64
import socket
from dataclasses import dataclass, field
from urllib.parse import quote, unquote, urlsplit

from protocol.errors import UsageError
from protocol.trust.invite import endpoint_of
from protocol.wire.sockets import blocking_connection_to

MAX_ANSWER_BYTES = 1 << 14

_PORT = 3128  # what proxies listen on, where nobody says


class ProxyRefusedError(OSError):
    """The proxy answers, and makes no tunnel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A proxy that speaks plain HTTP to who asks it."""

    host: str
    port: int
    user: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def read(cls, text: str) -> "Proxy":
        """From what a person types: "http://me:secret@proxy.example:3128". Raises UsageError."""
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            port = parts.port or _PORT
        except ValueError as error:
            raise _unreadable(text, str(error)) from error
        if parts.scheme != "http":
            raise _unreadable(
                text, f"proxies are spoken to by http, not by {parts.scheme or 'nothing'}"
            )
        if not parts.hostname or parts.path.strip("/") or parts.query:
            raise _unreadable(text, "it is no host and port")
        return cls(
            host=parts.hostname,
            port=port,
            user=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
        )

    @property
    def url(self) -> str:
        """Whole, with the password."""
        user = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}@" if self.user else ""
        return f"http://{user}{self.endpoint}"

    @property
    def endpoint(self) -> str:
        """Host and port, for people."""
        return endpoint_of(self.host, self.port)

    def request(self, host: str, port: int) -> bytes:
        """Asks for a tunnel."""
        to = endpoint_of(host, port)
        lines = [f"CONNECT {to} HTTP/1.1", f"Host: {to}"]
        if self.user:
            pair = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
            lines.append(f"Proxy-Authorization: Basic {pair}")
        return "\r\n".join([*lines, "", ""]).encode()

    def check(self, head: bytes, host: str, port: int) -> None:
        """Raises ProxyRefusedError where the head of an answer is not that of a tunnel."""
        first = head.partition(b"\r\n")[0].decode("ascii", errors="replace")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1."):
            raise ProxyRefusedError(f"what answers at {self.endpoint} is no HTTP proxy")
        if not status.startswith("2"):
            said = "".join(c for c in status[:80] if c.isprintable())
            raise ProxyRefusedError(
                f"the proxy {self.endpoint} lets nobody through to {endpoint_of(host, port)} ({said})"
            )

    def connected(self, host: str, port: int, *, timeout: float) -> socket.socket:
        """A tunnel. Blocks; `timeout` is for each answer. Raises OSError."""
        try:
            made = blocking_connection_to(self.host, self.port, seconds=timeout)
        except TimeoutError as error:
            raise ProxyRefusedError(f"the proxy {self.endpoint} does not answer in time") from error
        except OSError as error:
            why = error.strerror or str(error)
            raise ProxyRefusedError(f"the proxy {self.endpoint} does not answer ({why})") from error
        try:
            made.sendall(self.request(host, port))
            head = b""
            while not head.endswith(b"\r\n\r\n"):  # not a byte more, which is the tunnel's
                byte = made.recv(1)
                if not byte or len(head) >= MAX_ANSWER_BYTES:
                    raise ProxyRefusedError(f"the proxy {self.endpoint} hangs up")
                head += byte
            self.check(head, host, port)
        except TimeoutError as error:
            made.close()
            raise ProxyRefusedError(f"the proxy {self.endpoint} does not answer in time") from error
        except BaseException:
            made.close()
            raise
        return made


def _unreadable(text: str, why: str) -> UsageError:
    return UsageError(
        f"{text.rsplit('@', 1)[-1]!r} is no proxy: {why}", next_step="write http://HOST:PORT"
    )
