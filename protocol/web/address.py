"""Where pages are served: "HOST:PORT", as people write it. Imports nothing of the web server."""

_LARGEST_PORT = 65535


def web_address_of(text: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:8080", "[::1]:8080" or "8080", which is on loopback.

    Raises ValueError with what is wrong.
    """
    host, separator, port = text.rpartition(":")
    if not separator:
        host = "127.0.0.1"
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_whole = is_bracketed or ":" not in host
    host = host[1:-1] if is_bracketed else host
    if not host or not is_whole or not port.isascii() or not port.isdigit():
        raise ValueError("not HOST:PORT, such as 127.0.0.1:8080")
    if int(port) > _LARGEST_PORT:
        raise ValueError(f"port {port} is above {_LARGEST_PORT}")
    return host, int(port)
