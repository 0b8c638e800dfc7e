"""What plain TCP takes for the bytes of one round between two nodes, in the same network lab.

The least that any protocol over one connection can take there: no processes to talk to, no codec, no
encryption. Each side sends its contribution, and its result as the other's contribution comes in:
piece by piece, as slices do. What benchmarks/exchange takes longer is ours.
"""

import socket
import threading
import time

from lab.network.lab import NetworkLab

PORT = 7000
_CHUNK_BYTES = 1 << 16


class _End:
    """One side of the connection."""

    def __init__(self, connection: socket.socket, *, contribution_bytes: int, pieces: int) -> None:
        self._connection = connection
        self._sizes = [contribution_bytes // pieces] * pieces
        self._num_received = 0
        self._has_moved = threading.Condition()
        self.ended_at = 0.0

    def exchange(self, start: threading.Barrier) -> None:
        self._num_received = 0
        start.wait()
        receiving = threading.Thread(target=self._receive)
        receiving.start()
        for size in self._sizes:
            self._connection.sendall(bytes(size))
        due = 0
        for size in self._sizes:
            due += size
            with self._has_moved:
                self._has_moved.wait_for(lambda due=due: self._num_received >= due)  # type: ignore[misc]
            self._connection.sendall(bytes(size))
        receiving.join()

    def _receive(self) -> None:
        whole = 2 * sum(self._sizes)
        while self._num_received < whole:
            chunk = self._connection.recv(min(_CHUNK_BYTES, whole - self._num_received))
            if not chunk:
                raise EOFError("the other side of a plain exchange is gone")
            with self._has_moved:
                self._num_received += len(chunk)
                self._has_moved.notify()
        self.ended_at = time.monotonic()


def plain_seconds(
    lab: NetworkLab, *, contribution_bytes: int, pieces: int, num_rounds: int, pause_seconds: float
) -> list[float]:
    """How long each of so many rounds takes; the first, which also warms TCP up, does not count.

    `contribution_bytes` go each way, and as many again as the result.
    """
    one, other = lab.hosts[:2]
    with lab.socket(one) as listener:
        listener.bind((lab.address(one), PORT))
        listener.listen()
        with lab.socket(other) as near:
            near.connect((lab.address(one), PORT))
            far, _ = listener.accept()
            with far:
                ends = [
                    _End(connection, contribution_bytes=contribution_bytes, pieces=pieces)
                    for connection in (near, far)
                ]
                return [_round(ends, pause_seconds=pause_seconds) for _ in range(1 + num_rounds)][
                    1:
                ]


def _round(ends: list[_End], *, pause_seconds: float) -> float:
    time.sleep(pause_seconds)
    start = threading.Barrier(len(ends) + 1)
    threads = [threading.Thread(target=end.exchange, args=(start,)) for end in ends]
    for thread in threads:
        thread.start()
    start.wait()
    began_at = time.monotonic()
    for thread in threads:
        thread.join()
    return max(end.ended_at for end in ends) - began_at
