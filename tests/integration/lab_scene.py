"""Sockets in the hosts of a network lab, and what they see of it."""

import select
import socket
from contextlib import ExitStack, suppress

from lab.network.lab import NetworkLab
from tests.integration.typed_commands import until

SECONDS = 60.0  # for what takes far less on an idle machine


class Post:
    """A datagram socket in each host, to see what gets from where to where."""

    def __init__(self, lab: NetworkLab, sockets: ExitStack) -> None:
        self._lab = lab
        self._boxes = {
            host: sockets.enter_context(lab.socket(host, socket.SOCK_DGRAM)) for host in lab.hosts
        }
        for host, box in self._boxes.items():
            box.bind((lab.address(host), 0))
            box.setblocking(False)

    def send(self, source: str, target: str, *contents: bytes) -> None:
        """Sends, and waits until the switch has delivered or dropped all of it."""
        before = self._num_done(source, target)
        for content in contents:
            self._boxes[source].sendto(content, self._boxes[target].getsockname())
        until(
            lambda: self._num_done(source, target) == before + len(contents),
            f"packets from {source} to {target}",
        )

    def received(self, host: str) -> list[bytes]:
        found = []
        with suppress(BlockingIOError):
            while True:
                found.append(self._boxes[host].recv(1 << 16))
        return found

    def gets_through(self, source: str, target: str) -> bool:
        self.send(source, target, b"hello")
        return self.received(target) == [b"hello"]

    def ways(self) -> set[str]:
        hosts = self._lab.hosts
        return {
            f"{one}→{other}"
            for one in hosts
            for other in hosts
            if one != other and self.gets_through(one, other)
        }

    def _num_done(self, source: str, target: str) -> int:
        traffic = self._lab.traffic(source, target)
        return traffic.delivered_packets + traffic.dropped_packets


def listen(lab: NetworkLab, host: str, sockets: ExitStack) -> socket.socket:
    listener = sockets.enter_context(lab.socket(host))
    listener.bind((lab.address(host), 0))
    listener.listen()
    listener.settimeout(SECONDS)
    return listener


def begin_to_dial(
    lab: NetworkLab, host: str, listener: socket.socket, sockets: ExitStack
) -> socket.socket:
    dialler = sockets.enter_context(lab.socket(host))
    dialler.setblocking(False)
    with suppress(BlockingIOError):
        dialler.connect(listener.getsockname())
    return dialler


def is_refused(lab: NetworkLab, source: str, listener: socket.socket, sockets: ExitStack) -> bool:
    """Dials until the firewall has refused it twice: SYNs are sent again after a second."""
    target = next(host for host in lab.hosts if lab.address(host) == listener.getsockname()[0])
    before = lab.traffic(source, target).refused_packets
    dialler = begin_to_dial(lab, source, listener, sockets)

    def has_an_end() -> bool:
        is_connected = select.select([], [dialler], [], 0)[1]
        return bool(is_connected) or lab.traffic(source, target).refused_packets >= before + 2

    until(has_an_end, f"{source} dialling {target}")
    return not select.select([], [dialler], [], 0)[1]


def talk(dialler: socket.socket, listener: socket.socket) -> bool:
    """Whether a dialled connection carries bytes both ways."""
    dialler.settimeout(SECONDS)
    select.select([], [dialler], [], SECONDS)
    accepted, _ = listener.accept()
    with accepted:
        dialler.sendall(b"there")
        accepted.sendall(b"back")
        return (accepted.recv(100), dialler.recv(100)) == (b"there", b"back")
