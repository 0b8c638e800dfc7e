"""Whether the network lab is what it says: a link's rate, the round trip, and the loss, measured.

    python -m lab.network

Two hosts, plain sockets, TCP with cubic, and one round trip's worth of buffer before each wire. The
rate is what the receiver reads once the connection is up to speed; the headers of TCP and IP take
3.5 % of it. Prints a table and, last, JSON.
"""

import argparse
import json
import platform
import socket
import statistics
import sys
import threading
import time
from contextlib import closing

from lab.network.lab import LabUnavailableError, NetworkLab
from lab.network.links import Link
from lab.processes.family import nothing_left
from protocol.terminal import console

RATES_MBIT = (10, 100)
DELAY_SECONDS = 0.05
"""From one host to the other."""

WARM_UP_SECONDS = 5.0
LOSS = 0.02

_CHUNK_BYTES = 1 << 16
_NUM_PINGS = 100
_NUM_LOST_OR_NOT = 20_000
_AT_ONCE = 100  # datagrams, which a socket's buffer holds
_NETWORK_SECONDS = 60.0  # no answer by then is a bug
_MEASURED_SECONDS = 10.0


def measure_rate(mbit: int, seconds: float) -> dict[str, object]:
    """One TCP connection through links of that rate in both hosts."""
    rate = mbit * 1e6
    link = Link(
        up_bits_per_second=rate,
        down_bits_per_second=rate,
        delay_seconds=DELAY_SECONDS / 2,
        buffer_bytes=int(rate * 2 * DELAY_SECONDS / 8),
    )
    with (
        NetworkLab({"near": link, "far": link}, congestion_control="cubic") as lab,
        closing(lab.socket("far")) as listener,
        closing(lab.socket("near")) as sender,
    ):
        listener.bind((lab.address("far"), 0))
        listener.listen()
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()
        has_ended = threading.Event()
        sending = threading.Thread(target=_send_until, args=(sender, has_ended))
        sending.start()
        with closing(receiver):
            _receive_for(receiver, WARM_UP_SECONDS)
            before = lab.traffic("near", "far")
            received_bytes, took = _receive_for(receiver, seconds)
            after = lab.traffic("near", "far")
            has_ended.set()
        sending.join()
    carried = (after.delivered_bytes - before.delivered_bytes) * 8 / took
    return {
        "what": f"TCP at {mbit} Mbit/s",
        "set": mbit,
        "measured": round(received_bytes * 8 / took / 1e6, 2),
        "share": round(received_bytes * 8 / took / rate, 3),
        "share_with_headers": round(carried / rate, 3),
        "overflowed_packets": after.overflowed_packets - before.overflowed_packets,
    }


def measure_round_trip() -> dict[str, object]:
    """Datagrams there and back, one after the other."""
    link = Link(delay_seconds=DELAY_SECONDS / 2)
    with (
        NetworkLab({"near": link, "far": link}) as lab,
        closing(lab.socket("near", socket.SOCK_DGRAM)) as near,
        closing(lab.socket("far", socket.SOCK_DGRAM)) as far,
    ):
        far.bind((lab.address("far"), 0))
        for one in (near, far):
            one.settimeout(_NETWORK_SECONDS)
        seconds = []
        for _ in range(_NUM_PINGS):
            started = time.monotonic()
            near.sendto(b"there", far.getsockname())
            _, sender = far.recvfrom(_CHUNK_BYTES)
            far.sendto(b"back", sender)
            near.recv(_CHUNK_BYTES)
            seconds.append(time.monotonic() - started)
    return {
        "what": "round trip, ms",
        "set": 2e3 * DELAY_SECONDS,
        "measured": round(1e3 * statistics.median(seconds), 2),
        "p95": round(1e3 * statistics.quantiles(seconds, n=20)[-1], 2),
        "worst": round(1e3 * max(seconds), 2),
    }


def measure_loss() -> dict[str, object]:
    """Datagrams over a path of which one link loses some."""
    with (
        NetworkLab({"near": Link(loss=LOSS), "far": Link()}) as lab,
        closing(lab.socket("near", socket.SOCK_DGRAM)) as near,
        closing(lab.socket("far", socket.SOCK_DGRAM)) as far,
    ):
        far.bind((lab.address("far"), 0))
        far.setblocking(False)
        num_received = 0
        for num_sent in range(_AT_ONCE, _NUM_LOST_OR_NOT + 1, _AT_ONCE):
            for _ in range(_AT_ONCE):
                near.sendto(b"lost or not", far.getsockname())
            traffic = lab.traffic("near", "far")
            while traffic.delivered_packets + traffic.dropped_packets < num_sent:
                traffic = lab.traffic("near", "far")
            num_received += _drain(far)
    return {
        "what": "loss, %",
        "set": 1e2 * LOSS,
        "measured": round(1e2 * (1 - num_received / num_sent), 2),
        "packets": num_sent,
    }


def _send_until(sender: socket.socket, has_ended: threading.Event) -> None:
    chunk = bytes(_CHUNK_BYTES)
    try:
        while not has_ended.is_set():
            sender.sendall(chunk)
    except ConnectionError:
        return  # the receiver has heard enough


def _receive_for(receiver: socket.socket, seconds: float) -> tuple[int, float]:
    """Bytes that came, and the time they really took."""
    started, num_bytes = time.monotonic(), 0
    while (took := time.monotonic() - started) < seconds:
        num_bytes += len(receiver.recv(_CHUNK_BYTES))
    return num_bytes, took


def _drain(receiver: socket.socket) -> int:
    count = 0
    try:
        while receiver.recv(_CHUNK_BYTES):
            count += 1
    except BlockingIOError:
        pass
    return count


def main() -> None:
    """Measures all, prints."""
    parser = argparse.ArgumentParser(prog="python -m lab.network", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=_MEASURED_SECONDS, help="for each rate (default 10)"
    )
    seconds = parser.parse_args().seconds
    try:
        rows = [measure_rate(mbit, seconds) for mbit in RATES_MBIT]
        rows += [measure_round_trip(), measure_loss()]
    except LabUnavailableError as error:
        sys.exit(str(error))
    columns = ("what", "set", "measured", "besides")
    cells = [(*(f"{row[name]}" for name in columns[:3]), _besides(row)) for row in rows]
    console.terminal().print(console.table(columns, cells, right=("set", "measured")))
    print(json.dumps({"machine": f"{platform.system()} on {platform.machine()}", "rows": rows}))


def _besides(row: dict[str, object]) -> str:
    rest = {name: value for name, value in row.items() if name not in ("what", "set", "measured")}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in rest.items())


if __name__ == "__main__":
    with nothing_left():
        main()
