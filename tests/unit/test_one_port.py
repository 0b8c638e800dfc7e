"""Whom the first message of TLS names, and an HTTP proxy as people type it."""

import ssl
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.relay.one_port import Unheard, server_name_in
from protocol.errors import UsageError
from protocol.trust.proxy import Proxy, ProxyRefusedError

if TYPE_CHECKING:
    from coordinator.relay.stream import Connection


def hello(server_hostname: str | None, *, alpn: int = 0) -> bytes:
    """What OpenSSL says first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if alpn:
        context.set_alpn_protocols(["h2", *("x" * 250 for _ in range(alpn))])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=server_hostname)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("alpn", [0, 5])
@pytest.mark.parametrize("name", ["0a1b.atoll.invalid", "join.0a1b.atoll.invalid"])
def test_a_first_message_names_whom_it_wants(name: str, alpn: int) -> None:
    assert server_name_in(hello(name, alpn=alpn)) == name


def test_who_dials_an_address_names_nobody() -> None:
    assert server_name_in(hello(None)) == server_name_in(hello("192.0.2.1")) == ""


@given(st.binary(max_size=600), st.integers(0, 600))
def test_whatever_else_comes_names_nobody_or_breaks_nothing(noise: bytes, cut: int) -> None:
    whole = hello("0a1b.atoll.invalid")
    assert server_name_in(whole[: min(cut, len(whole) - 1)]) in ("", "0a1b.atoll.invalid")
    assert isinstance(server_name_in(noise), str)
    assert isinstance(server_name_in(whole[:40] + noise), str)


def test_a_proxy_is_read_as_it_is_written() -> None:
    proxy = Proxy.read("http://me:se%3Acret%2F@proxy.example:8080/")
    assert (proxy.host, proxy.port, proxy.user, proxy.password) == (
        *("proxy.example", 8080),
        *("me", "se:cret/"),
    )
    assert Proxy.read(proxy.url) == proxy
    assert "se:cret" not in repr(proxy) and proxy.endpoint == "proxy.example:8080"
    assert Proxy.read("proxy.example") == Proxy(host="proxy.example", port=3128)
    assert Proxy.read("http://[2001:db8::1]:3128").endpoint == "[2001:db8::1]:3128"


@pytest.mark.parametrize(
    "text", ["https://proxy:3128", "http://", "http://proxy/path", "proxy:port", "socks5://p:1"]
)
def test_what_is_no_proxy_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Proxy.read(text)
    assert caught.value.next_step == "write http://HOST:PORT"


def test_a_proxy_is_asked_for_a_tunnel_with_what_it_wants_to_know() -> None:
    proxy = Proxy.read("http://me:secret@proxy:3128")
    assert proxy.request("2001:db8::1", 443) == (
        b"CONNECT [2001:db8::1]:443 HTTP/1.1\r\nHost: [2001:db8::1]:443\r\n"
        b"Proxy-Authorization: Basic bWU6c2VjcmV0\r\n\r\n"
    )
    proxy.check(b"HTTP/1.0 200 OK\r\n\r\n", "run.example", 443)
    with pytest.raises(
        ProxyRefusedError, match=r"lets nobody through to run.example:7700 \(403 no\)"
    ):
        proxy.check(b"HTTP/1.1 403 no\r\n\r\n", "run.example", 7700)
    with pytest.raises(ProxyRefusedError, match="is no HTTP proxy"):
        proxy.check(b"SSH-2.0-x\r\n\r\n", "run.example", 7700)


def test_of_those_that_say_nothing_the_oldest_of_an_address_go_and_then_the_oldest_of_all() -> None:
    unheard = Unheard(most=4, most_per_address=2)
    one, two, three, four, five, six = (cast("Connection", object()) for _ in range(6))
    assert unheard.add(one, "office") is unheard.add(two, "office") is None
    assert unheard.add(three, "office") is one
    unheard.remove(one)
    unheard.remove(one)
    assert unheard.add(four, "home") is None
    unheard.remove(three)  # it has spoken
    assert unheard.add(five, "office") is unheard.add(six, "train") is None
    assert unheard.add(one, "lab") is two, "the oldest of all"
    unheard.remove(two)
    for spoken in (one, four, five, six):
        unheard.remove(spoken)
    assert unheard.add(two, "office") is unheard.add(three, "office") is None
