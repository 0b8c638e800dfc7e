"""A relay's line: where it is, whose certificate it has, and the right to be carried by it. And its folder.

The line is `atoll-relay1-` and base32 of: port (2 bytes), pin (32), secret (32), and the host. A relay's
folder holds relay.json (certificate, key, secret), relay.line, and ports.json: which coordinator has which
port, by what its own secret hashes to. A coordinator's folder holds through.json: the line, and that secret.
"""

import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from protocol.errors import BadDataError, NoInputError, UsageError
from protocol.files.durable import expanded, read_secret, write_atomically
from protocol.trust.armour import Armour
from protocol.trust.handshake import PinnedKey
from protocol.trust.invite import (
    PIN_BYTES,
    SECRET_BYTES,
    check_endpoint,
    endpoint_of,
    hash_of_secret,
)

RELAY_FILE = "relay.json"
LINE_FILE = "relay.line"
PORTS_FILE = "ports.json"
THROUGH_FILE = "through.json"

_ARMOUR = Armour(
    prefix="atoll-relay1-",
    noun="relay line",
    ask_again=f"copy it again from {LINE_FILE} in the relay's folder",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLine:
    """Where a relay listens for coordinators, whom to expect there, and the right to be carried.

    `pin` is `pki.pin_of` its certificate. Raises UsageError for a host or port that cannot be.
    """

    host: str
    port: int
    pin: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        check_endpoint(self.host, self.port)

    @property
    def endpoint(self) -> str:
        """Host and port that coordinators dial."""
        return endpoint_of(self.host, self.port)

    def encode(self) -> str:
        """The line, around 150 characters."""
        return _ARMOUR.encode(self.port.to_bytes(2) + self.pin + self.secret + self.host.encode())

    @classmethod
    def decode(cls, text: str) -> Self:
        """Reads a line; raises BadDataError (Armour.decode)."""
        content = _ARMOUR.decode(text)
        pin_end = 2 + PIN_BYTES
        secret_end = pin_end + SECRET_BYTES
        try:
            return cls(
                host=content[secret_end:].decode(),
                port=int.from_bytes(content[:2]),
                pin=content[2:pin_end],
                secret=content[pin_end:secret_end],
            )
        except (UnicodeDecodeError, UsageError) as error:
            raise BadDataError(
                f"not a valid relay line: {error}", next_step=_ARMOUR.ask_again
            ) from error


class RelayKey(PinnedKey):
    """What a relay keeps: its certificate with the key, and the secret that lets coordinators in."""

    __slots__ = ()

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Made at the first use. Raises BadDataError."""
        return cls.of_file(
            folder / RELAY_FILE,
            when_damaged="remove it; coordinators then need the new line of the next start",
        )

    def line(self, host: str, port: int) -> RelayLine:
        """For the coordinators that it may carry."""
        return RelayLine(host=host, port=port, pin=self.pin, secret=self.secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carriage:
    """A coordinator's way through a relay. `owner` is its own secret: it alone gets its ports again."""

    line: RelayLine
    owner: bytes = field(repr=False)

    @classmethod
    def new(cls, text: str) -> Self:
        """Of a line, or of a file that holds one. Raises BadDataError, NoInputError."""
        text = text.strip()
        if not text.lower().startswith("atoll-relay"):
            try:
                text = expanded(text).read_text(encoding="utf-8", errors="replace").strip()
            except OSError as error:
                raise NoInputError(
                    f"{text!r} is neither a relay line nor a file with one: {error.strerror}",
                    next_step=f"give the line of 'atoll relay start', or its file {LINE_FILE}",
                ) from error
        return cls(line=RelayLine.decode(text), owner=secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def of_folder(cls, folder: Path) -> Self | None:
        """What a coordinator's folder holds; None where it is dialled directly. Raises BadDataError."""
        path = folder / THROUGH_FILE
        if not path.exists():
            return None
        try:
            values = json.loads(read_secret(path))
            return cls(line=RelayLine.decode(values["line"]), owner=bytes.fromhex(values["owner"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, BadDataError) as error:
            raise BadDataError(
                f"{path} is damaged: {error}",
                next_step="give the relay's line again: --through LINE",
            ) from error

    @classmethod
    def chosen(cls, folder: Path, text: str | None) -> Self | None:
        """What a start goes by: the line that is given, which the folder then keeps, or the one it has.

        With the same relay its owner's secret stays, and so its ports. "none" forgets the relay.
        """
        path = folder / THROUGH_FILE
        if text is None:
            return cls.of_folder(folder)
        if text == "none":
            path.unlink(missing_ok=True)
            return None
        given = cls.new(text)
        try:
            kept = cls.of_folder(folder)
        except BadDataError:
            kept = None
        if kept is not None and kept.line.pin == given.line.pin:
            given = cls(line=given.line, owner=kept.owner)
        values = {"line": given.line.encode(), "owner": given.owner.hex()}
        write_atomically(path, json.dumps(values).encode(), mode=0o600)
        return given


class KeptPorts:
    """Which coordinator has which port of a relay, over its restarts."""

    def __init__(self, path: Path) -> None:
        """Raises BadDataError."""
        self._path = path
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else "{}"
            self._owners = {int(port): str(owner) for port, owner in json.loads(text).items()}
        except (OSError, ValueError, AttributeError) as error:
            raise BadDataError(
                f"{path} is damaged", next_step="remove it: coordinators take their ports again"
            ) from error

    def taken(self, ports: tuple[int, ...], owner: bytes) -> list[int]:
        """Those of the ports that another coordinator has."""
        ours = hash_of_secret(owner).hex()
        return [port for port in ports if self._owners.get(port, ours) != ours]

    def give(self, ports: tuple[int, ...], owner: bytes) -> None:
        """Notes whose they are now, and that this coordinator has no others."""
        ours = hash_of_secret(owner).hex()
        kept = {port: whose for port, whose in self._owners.items() if whose != ours}
        kept |= dict.fromkeys(ports, ours)
        if kept != self._owners:
            self._owners = kept
            write_atomically(self._path, json.dumps(kept, indent=2).encode(), mode=0o600)
