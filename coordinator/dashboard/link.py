"""Where a run's page is served, and the link that opens it; beyond this machine with a token in it."""

import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from coordinator.settings import CoordinatorConfig
from protocol.errors import SystemRefusedError
from protocol.files.durable import read_secret, write_atomically
from protocol.terminal.console import is_loopback, web_address_of
from protocol.trust.invite import endpoint_of

if TYPE_CHECKING:
    from coordinator.dashboard.pages import Pages
    from protocol.web.server import WebServer

log = structlog.get_logger()

TOKEN_FILE = "page.token"
"""In the coordinator's folder: who removes it and starts anew makes all links of before useless."""

NEXT_PORTS = 10
"""So many are tried for pages that nobody has chosen an address for, before the system chooses one."""

_TOKEN_BYTES = 16
_WHOLE = re.compile(r"[!-~]{22,}")  # as long as one of ours, should somebody have chosen their own
_EVERYWHERE = frozenset({"0.0.0.0", "::"})


def page_token(folder: Path) -> str:
    """The folder's token; makes one at the first start, and where it is damaged: half of it can be guessed.

    Raises NotPermittedError, SystemRefusedError.
    """
    path = folder / TOKEN_FILE
    if path.exists():
        found = read_secret(path).decode(errors="replace").strip()
        if _WHOLE.fullmatch(found):
            return found
        log.warning(
            "the page's token was damaged, and there is another: links of before are useless",
            path=str(path),
        )
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    write_atomically(path, f"{token}\n".encode(), mode=0o600)
    return token


def page_link(folder: Path, config: CoordinatorConfig, port: int) -> str:
    """What a browser opens."""
    host, _ = web_address_of(config.dashboard)
    if is_loopback(host):
        return f"http://{endpoint_of(host, port)}/"
    shown = config.advertise if host in _EVERYWHERE else host
    return f"http://{endpoint_of(shown, port)}/?token={page_token(folder)}"


def open_dashboard(config: CoordinatorConfig, pages: "Pages", *, token: str) -> "WebServer | None":
    """Serves them at its address, and in place of the usual one at the next that is free, or not at all.

    Raises SystemRefusedError for an address that somebody has chosen.
    """
    from protocol.web.server import WebServer

    host, first = web_address_of(config.dashboard)
    why, is_chosen = "", not config.has_usual_dashboard
    next_ones = range(first, min(first + NEXT_PORTS, 65536))
    for port in (first,) if is_chosen else (*next_ones, 0):
        try:
            server = WebServer.open(
                (host, port),
                pages.by_path(),
                option="--dashboard",
                streams=pages.streams(),
                token=token,
                open_pages=("/healthz",),
            )
        except SystemRefusedError as error:
            if is_chosen:
                raise
            why = error.what
            continue
        if port != first:
            log.warning("the page's usual port is taken", usual=first, page_at=server.port)
        return server
    log.warning("no page is served", why=why, next_step="choose its address with --dashboard")
    return None
