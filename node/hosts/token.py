"""What lets a host follow a leader: where it listens, whose certificate it has, and a secret.

The follower sends the secret only to who holds the certificate's key, and the leader reads nothing
else before it. Both last as long as the leader's folder.
"""

import base64
import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from protocol.errors import BadDataError, NoInputError
from protocol.files.durable import read_secret, refusing, write_atomically
from protocol.trust.pki import Authority, new_swarm_id, pin_of

TOKEN_FILE = "island.token"
_KEY_FILE = "island.key"
_PREFIX = "atoll-island-"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostToken:
    """What a follower is given."""

    host: str
    port: int
    pin: bytes  # of the leader's certificate
    secret: str

    def text(self) -> str:
        """For a file, or a shell's variable."""
        values = [self.host, self.port, self.pin.hex(), self.secret]
        return _PREFIX + base64.urlsafe_b64encode(json.dumps(values).encode()).decode()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises BadDataError."""
        try:
            if not text.startswith(_PREFIX):
                raise ValueError
            values = json.loads(base64.urlsafe_b64decode(text.removeprefix(_PREFIX)))
            host, port, pin, secret = values
            return cls(host=str(host), port=int(port), pin=bytes.fromhex(pin), secret=str(secret))
        except (ValueError, TypeError) as error:
            raise BadDataError(
                "that is not a whole island token",
                next_step=f"copy the leader's {TOKEN_FILE} again",
            ) from error

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises NoInputError, BadDataError."""
        try:
            return cls.parse(path.read_text().strip())
        except (OSError, UnicodeDecodeError) as error:
            raise NoInputError(
                f"{path} cannot be read",
                next_step=f"copy {TOKEN_FILE} from the leader's folder",
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderKey:
    """What the leader keeps."""

    certificate_pem: bytes
    key_pem: bytes
    secret: str

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Made at the first use, and readable to its owner only."""
        path = folder / _KEY_FILE
        if not path.exists():
            issued = Authority.create(new_swarm_id()).issue_server()
            values = {
                "certificate": issued.certificate_pem.decode(),
                "key": issued.key_pem.decode(),
                "secret": secrets.token_hex(32),
            }
            write_atomically(path, json.dumps(values).encode(), mode=0o600)
        try:
            values = json.loads(read_secret(path))
            return cls(
                certificate_pem=values["certificate"].encode(),
                key_pem=values["key"].encode(),
                secret=values["secret"],
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadDataError(
                f"{path} is damaged", next_step="remove it; hosts then need the new token"
            ) from error

    def token(self, host: str, port: int) -> HostToken:
        """For the hosts that may follow."""
        return HostToken(host=host, port=port, pin=pin_of(self.certificate_pem), secret=self.secret)

    def write_token(self, folder: Path, host: str, port: int) -> Path:
        """The file to copy to the other hosts."""
        path = folder / TOKEN_FILE
        with refusing(path):
            write_atomically(path, self.token(host, port).text().encode() + b"\n", mode=0o600)
        return path
