"""The link that opens a run's page, and the token in it where more than this machine reaches the page."""

import secrets
from pathlib import Path

from coordinator.config import CoordinatorConfig
from protocol.files.durable import read_secret, write_atomically
from protocol.terminal.typed import is_loopback, web_address_of
from protocol.trust.invite import endpoint_of

TOKEN_FILE = "page.token"
"""In the coordinator's folder: who removes it and starts anew makes all links of before useless."""

_TOKEN_BYTES = 16
_EVERYWHERE = frozenset({"0.0.0.0", "::"})


def page_token(folder: Path) -> str:
    """The folder's token; makes one at the first start. Raises NotPermittedError, SystemRefusedError."""
    path = folder / TOKEN_FILE
    if not path.exists():
        write_atomically(path, f"{secrets.token_urlsafe(_TOKEN_BYTES)}\n".encode(), mode=0o600)
    return read_secret(path).decode().strip()


def page_link(folder: Path, config: CoordinatorConfig, port: int) -> str:
    """What a browser opens."""
    host, _ = web_address_of(config.dashboard)
    if is_loopback(host):
        return f"http://{endpoint_of(host, port)}/"
    shown = config.advertise if host in _EVERYWHERE else host
    return f"http://{endpoint_of(shown, port)}/?token={page_token(folder)}"
