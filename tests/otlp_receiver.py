"""What receives OpenTelemetry's traces over HTTP on this machine, and decodes them by their own types."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    reason="opentelemetry-proto is not installed: pip install -e '.[dev]'",
)


class Receiver:
    """What receives OTLP over HTTP on this machine; `answers` are statuses and bodies yet to be given."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.headers: dict[str, str] = {}
        self.answers: list[tuple[int, bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = receiver.answers.pop(0) if receiver.answers else (200, b"")
                receiver.headers = {name.lower(): value for name, value in self.headers.items()}
                if status == 200 and self.path == "/v1/traces":
                    receiver.requests.append(service.ExportTraceServiceRequest.FromString(body))
                self.send_response(status if self.path == "/v1/traces" else 404)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def rounds(self) -> list[int]:
        return [value_of(span, "atoll.round") for span in self.spans if not span.parent_span_id]


def value_of(span: Any, key: str) -> Any:
    (value,) = (one.value for one in span.attributes if one.key == key)
    return getattr(value, value.WhichOneof("value"))
