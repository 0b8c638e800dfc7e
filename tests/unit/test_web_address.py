"""Where pages are served, as people write it."""

import pytest

from protocol.terminal.console import web_address_of


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("8080", ("127.0.0.1", 8080)),  # nobody is meant to find it on all interfaces by accident
        ("[::1]:9", ("::1", 9)),
        ("pages.example.org:0", ("pages.example.org", 0)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert web_address_of(text) == address


@pytest.mark.parametrize("text", ["", ":80", "host", "host:", "::1:80", "host:x", "host:٣", "[]:1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not HOST:PORT, such as 127\.0\.0\.1:8080"):
        web_address_of(text)


def test_ports_end_at_65535() -> None:
    with pytest.raises(ValueError, match="port 65536 is above 65535"):
        web_address_of("127.0.0.1:65536")
