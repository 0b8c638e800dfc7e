"""Where the ranks of all hosts meet: a store of torch's on one interface, a fresh one each time.

Within the network of the island nothing is encrypted or authenticated, neither this nor what ranks
send each other; docs/footguns.md says so.
"""

import fcntl
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

from node.island.ranks.aside import Aside
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_SIOCGIFADDR = 0x8915


async def open_store(host: str) -> tuple[Aside, int]:
    """A store that listens on this address alone until it is closed; and its port."""
    aside = Aside(_store, host)
    try:
        port: int = await aside.answer()
    except BaseException:
        aside.close()
        raise
    return aside, port


def _store(connection: "Connection[int, None]", host: str) -> None:
    import torch.distributed as dist

    listening = socket.create_server((host, 0))
    port: int = listening.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]  # is public
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # else it would listen on all addresses
    )
    connection.send(port)
    with suppress(EOFError, OSError):
        connection.recv()  # until the daemon closes it, or ends
    del store


def interface_of(address: str) -> str:
    """The network interface that has an IPv4 address, as NCCL and gloo want it named."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise ConfigError(
        f"no network interface of this machine has the address {address}",
        next_step="give --island-listen an IPv4 address of the link to the other hosts",
    )
