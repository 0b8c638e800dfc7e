"""A web server for a folder, with ranges, which can misbehave; and a certificate that nobody knows."""

import gzip
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Served:
    """A web server for a folder; it notes what is asked for, and can misbehave."""

    def __init__(self, folder: Path, tls: ssl.SSLContext | None) -> None:
        self.asked: list[tuple[str, str]] = []
        self.failures = 0
        """So many answers are errors of the server."""
        self.cuts = 0
        """So many answers end before half of their bytes."""
        self.knows_ranges = True
        self.says_length = True
        self.packs = False
        """Answers are compressed, whoever asks."""
        self.pages = 0
        """So many answers are a web page, as of a login."""
        self.moved_to = ""
        """An address that answers name in place of the file."""
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name, span = self.path.strip("/"), self.headers["Range"] or ""
                served.asked.append((name, span))
                if served.failures:
                    served.failures -= 1
                    self.send_error(503)
                    return
                if served.moved_to:
                    self.send_response(302)
                    self.send_header("Location", f"{served.moved_to}/{name}")
                    self.end_headers()
                    return
                if served.pages:
                    served.pages -= 1
                    self.send_response(200)
                    self.send_header("Content-Type", "text/html; charset=utf-8")
                    self.end_headers()
                    self.wfile.write(b"\n<!DOCTYPE html><title>Please log in</title>")
                    return
                path = folder / name
                if not path.is_file():
                    self.send_error(404)
                    return
                content = path.read_bytes()
                whole = len(content)
                if served.knows_ranges:
                    first, last = (int(each) for each in span.removeprefix("bytes=").split("-"))
                    content = content[first : last + 1]
                self.send_response(206 if served.knows_ranges else 200)
                if served.knows_ranges:
                    last = first + len(content) - 1
                    self.send_header("Content-Range", f"bytes {first}-{last}/{whole}")
                if served.packs:
                    content = gzip.compress(content)
                    self.send_header("Content-Encoding", "gzip")
                if served.says_length:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if served.cuts:
                    served.cuts -= 1
                    content = content[: len(content) // 2]
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
            self.url = f"https://localhost:{self.server.server_port}"

    def of_tokens(self) -> list[str]:
        return [name for name, _ in self.asked if name.endswith(".tokens")]


@contextmanager
def serving(folder: Path, tls: ssl.SSLContext | None = None) -> Iterator[Served]:
    served = Served(folder, tls)
    thread = threading.Thread(target=served.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        served.server.shutdown()
        served.server.server_close()
        thread.join()


def certificate_of(name: str, folder: Path) -> ssl.SSLContext:
    """What somebody serves TLS with whom nobody knows; the certificate stays in the folder's cert.pem."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context
