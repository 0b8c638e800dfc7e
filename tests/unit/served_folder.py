"""A web server for a folder, with ranges; it notes what is asked for, and can misbehave."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Served:
    """A web server for a folder; it notes what is asked for, and can misbehave."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[tuple[str, str]] = []
        self.failures = 0
        """So many answers are errors of the server."""
        self.knows_ranges = True
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name, span = self.path.strip("/"), self.headers["Range"] or ""
                served.asked.append((name, span))
                if served.failures:
                    served.failures -= 1
                    self.send_error(503)
                    return
                path = folder / name
                if not path.is_file():
                    self.send_error(404)
                    return
                content = path.read_bytes()
                if served.knows_ranges:
                    first, last = (int(each) for each in span.removeprefix("bytes=").split("-"))
                    content = content[first : last + 1]
                self.send_response(206 if served.knows_ranges else 200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def of_tokens(self) -> list[str]:
        return [name for name, _ in self.asked if name.endswith(".tokens")]


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    served = Served(folder)
    thread = threading.Thread(target=served.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        served.server.shutdown()
        served.server.server_close()
        thread.join()
