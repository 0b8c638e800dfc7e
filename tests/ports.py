"""Ports that tests give to servers which they start later."""

import random
import socket

BELOW_THE_KERNELS = range(20_000, 32_000)
"""The kernel takes others for connections, so none has the port before the server does."""

_RANDOM = random.SystemRandom()
_GIVEN: set[int] = set()


def free_port(host: str = "127.0.0.1") -> int:
    """One on which nothing listens, and that this process was not given before: it may not listen yet."""
    while True:
        port = _RANDOM.choice(BELOW_THE_KERNELS)
        if port in _GIVEN:
            continue
        try:
            socket.create_server((host, port)).close()
        except OSError:
            continue
        _GIVEN.add(port)
        return port
