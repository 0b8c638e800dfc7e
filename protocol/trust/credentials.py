"""What a node or an operator keeps to reach its coordinator: one folder, whole or not there.

The folder holds link.toml (where the coordinator is), ca.pem (the only root to trust), client.pem
and client.key. link.toml is removed first and written last, so a folder with it is complete.
"""

import json
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from protocol.errors import (
    AtollError,
    BadDataError,
    NoInputError,
    NotPermittedError,
    ProtocolMismatchError,
)
from protocol.files.durable import (
    expanded,
    make_folder,
    read_secret,
    remove_durably,
    write_atomically,
)
from protocol.trust import pki
from protocol.trust.invite import endpoint_of

LINK_FILE = "link.toml"
AUTHORITY_FILE = "ca.pem"
CERTIFICATE_FILE = "client.pem"
KEY_FILE = "client.key"

COORDINATOR_FILE = "coordinator.toml"
"""What only a coordinator's folder has."""

HOME_VARIABLE = "ATOLL_DIR"


def find_home(explicit: Path | None) -> Path:
    """The folder of this node or operator.

    What was given, else $ATOLL_DIR, else the current folder when it has joined a swarm, else the
    user's data folder. The folder need not exist.
    """
    if explicit is not None:
        return explicit
    if from_environment := os.environ.get(HOME_VARIABLE):
        return expanded(from_environment)
    here = Path.cwd()
    return here if (here / LINK_FILE).is_file() else Path(platformdirs.user_data_path("atoll"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The way to a coordinator's control plane, and the right to use it."""

    swarm_id: str
    run_name: str
    host: str
    control_port: int
    authority_pem: bytes
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)

    @property
    def endpoint(self) -> str:
        """Host and port of the control plane."""
        return endpoint_of(self.host, self.control_port)

    @property
    def principal(self) -> pki.Principal:
        """Whom the certificate speaks for."""
        return pki.principal_of(self.certificate_pem)

    def check(self) -> None:
        """Raises ProtocolMismatchError unless all parts belong together and to the swarm."""
        if self.principal.swarm_id != self.swarm_id:
            raise ProtocolMismatchError(
                f"the certificate is of swarm {self.principal.swarm_id}, not of {self.swarm_id}"
            )
        if not pki.has_issued(self.authority_pem, self.certificate_pem):
            raise ProtocolMismatchError("the certificate is not signed by the swarm's authority")
        if not pki.is_key_of(self.key_pem, self.certificate_pem):
            raise ProtocolMismatchError("the private key is not that of the certificate")

    def save(self, directory: Path) -> None:
        """Writes the folder, replacing credentials that are there.

        Whenever it is interrupted, the folder holds the old credentials, the new ones, or none.
        """
        make_folder(directory, mode=0o700)
        remove_durably(directory / LINK_FILE)
        write_atomically(directory / AUTHORITY_FILE, self.authority_pem)
        write_atomically(directory / CERTIFICATE_FILE, self.certificate_pem)
        write_atomically(directory / KEY_FILE, self.key_pem, mode=0o600)
        lines = (
            f"swarm_id = {_quoted(self.swarm_id)}",
            f"run_name = {_quoted(self.run_name)}",
            f"host = {_quoted(self.host)}",
            f"control_port = {self.control_port}",
        )
        write_atomically(directory / LINK_FILE, ("\n".join(lines) + "\n").encode())

    @classmethod
    def load(cls, directory: Path) -> "Credentials":
        """Reads the folder; raises NoInputError when it has none, BadDataError when damaged."""
        link_path = directory / LINK_FILE
        if not link_path.is_file():
            if (directory / COORDINATOR_FILE).is_file():
                raise NoInputError(
                    f"{directory} is a coordinator's folder, and its coordinator was never started",
                    next_step=f"'atoll coordinator start {directory}'; a node has a folder of its own, "
                    "which 'atoll join INVITE' makes",
                )
            raise NoInputError(
                f"no swarm joined in {directory}", next_step="join one with 'atoll join INVITE'"
            )
        try:
            link = tomllib.loads(link_path.read_text(encoding="utf-8"))
            credentials = cls(
                swarm_id=_text(link, "swarm_id"),
                run_name=_text(link, "run_name"),
                host=_text(link, "host"),
                control_port=_port(link, "control_port"),
                authority_pem=(directory / AUTHORITY_FILE).read_bytes(),
                certificate_pem=(directory / CERTIFICATE_FILE).read_bytes(),
                key_pem=read_secret(directory / KEY_FILE),
            )
            credentials.check()
        except NotPermittedError:
            raise
        except PermissionError as error:
            raise NoInputError(
                f"cannot read {error.filename}: {error.strerror}",
                next_step="run as the user who joined the swarm",
            ) from error
        except (OSError, ValueError, AtollError) as error:
            raise BadDataError(
                f"the credentials in {directory} are damaged: {error}",
                next_step="join again with 'atoll join INVITE'",
            ) from error
        return credentials


def _quoted(text: str) -> str:
    """A TOML basic string: JSON's, except that TOML also wants DEL escaped, and no surrogates."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _text(link: dict[str, object], key: str) -> str:
    value = link.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{LINK_FILE} gives no {key}")
    return value


def _port(link: dict[str, object], key: str) -> int:
    value = link.get(key)
    if not isinstance(value, int) or not 0 < value < 1 << 16:
        raise ValueError(f"{LINK_FILE}: {key} = {value!r} is not a port")
    return value
