"""The metadata services of clouds, played by a real web server on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

AWS_ACTION = "/latest/meta-data/spot/instance-action"
GCP = "/computeMetadata/v1/instance/"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"


class Metadata:
    """What a machine's metadata service says; what is not said is not found."""

    def __init__(self) -> None:
        self.says: dict[str, str] = {}
        self.token = "first"
        self.asked: list[str] = []
        metadata = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def answer(self, status: int, body: str = "") -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def do_PUT(self) -> None:
                is_token = self.path == "/latest/api/token"
                lives = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
                self.answer(200 if is_token and lives else 400, metadata.token)

            def do_GET(self) -> None:
                metadata.asked.append(self.path)
                if self.path.startswith("/latest/"):
                    if self.headers.get("X-aws-ec2-metadata-token") != metadata.token:
                        return self.answer(401)
                elif self.path.startswith("/computeMetadata/"):
                    if self.headers.get("Metadata-Flavor") != "Google":
                        return self.answer(403)
                elif self.headers.get("Metadata") != "true":
                    return self.answer(400)
                said = metadata.says.get(self.path)
                return self.answer(404) if said is None else self.answer(200, said)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def serving() -> Iterator[Metadata]:
    metadata = Metadata()
    thread = threading.Thread(target=metadata.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield metadata
    finally:
        metadata.server.shutdown()
        thread.join()
        metadata.server.server_close()


def in_seconds(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
