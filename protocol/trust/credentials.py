"""What a node or an operator keeps to reach its coordinator: one folder, whole or not there.

The folder holds link.toml (where the coordinator is), ca.pem (whom to believe in the end), client.key, and
client.pem: the certificate and behind it those of the coordinator (protocol.trust.signing.Bundle).
link.toml is removed first and written last, so a folder with it is complete. A renewal removes nothing.
"""

import os
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import platformdirs

from protocol.errors import (
    AtollError,
    BadDataError,
    NoInputError,
    NotPermittedError,
    ProtocolMismatchError,
    UsageError,
)
from protocol.files.durable import (
    TOML_ENCODING,
    as_typed,
    expanded,
    make_folder,
    read_secret,
    remove_durably,
    toml_value,
    whose_it_is,
    write_atomically,
)
from protocol.trust import pki
from protocol.trust.invite import InvitedBy, endpoint_of
from protocol.trust.proxy import Proxy
from protocol.trust.rulings import Address
from protocol.trust.signing import Bundle, Trust

LINK_FILE = "link.toml"
AUTHORITY_FILE = "ca.pem"
CERTIFICATE_FILE = "client.pem"
KEY_FILE = "client.key"

IDENTITY_FILE = "identity.key"
"""What a node or a viewer has beside them: the key that names it (protocol.trust.identity)."""

COORDINATOR_FILE = "coordinator.toml"
"""What only a coordinator's folder has."""

MOST_FOLDERS_NAMED = 3

HOME_VARIABLE = "ATOLL_DIR"


def find_home(explicit: Path | None) -> Path:
    """The folder of this node or operator.

    What was given, else $ATOLL_DIR, else the current folder when it has joined a swarm, else the
    user's data folder. The folder need not exist. Raises UsageError where no folder is the user's.
    """
    if explicit is not None:
        return explicit
    if from_environment := os.environ.get(HOME_VARIABLE):
        return expanded(from_environment)
    here = Path.cwd()
    if (here / LINK_FILE).is_file():
        return here
    try:
        return Path(platformdirs.user_data_path("atoll"))
    except RuntimeError as error:
        raise UsageError(
            "no folder is named, and this user has no home folder for one",
            next_step=f"name it by --dir, or by {HOME_VARIABLE} in the environment",
        ) from error


def folders_here(*markers: str, besides: Path) -> list[str]:
    """Which folders in the current one have such a file: one of them may be meant where none was named.

    Members' come first: a coordinator's does for queries alone.
    """
    found = {path.parent for marker in markers for path in Path().glob(f"*/{marker}")}
    others = sorted(path for path in found if path.absolute() != besides.absolute())
    return list(map(str, sorted(others, key=lambda path: not (path / IDENTITY_FILE).is_file())))


def in_place_of(folder: Path, *markers: str) -> str:
    """The option that names a folder here, in words; empty where there is none."""
    names = folders_here(*markers, besides=folder)
    return " or ".join(f"--dir {as_typed(name)}" for name in names[:MOST_FOLDERS_NAMED])


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The way to a coordinator's control plane, and the right to use it."""

    swarm_id: str
    run_name: str
    host: str
    control_port: int
    authority_pem: bytes
    certificate_pem: bytes  # a bundle
    key_pem: bytes = field(repr=False)
    enrolment_port: int = 0  # where a new certificate is got without the old one; 0: not known
    elsewhere: Address | None = None  # where it moves to, as the run owner has told
    members: tuple[InvitedBy, ...] = ()  # who knows where it is, should it not be there
    proxy: Proxy | None = None  # by which this network lets connections out, to all
    folder: Path | None = field(default=None, compare=False)  # that they were read from

    @property
    def endpoint(self) -> str:
        """Host and port of the control plane."""
        return endpoint_of(self.host, self.control_port)

    @property
    def ports(self) -> tuple[int, ...]:
        """Those of the coordinator's that are known."""
        return tuple(port for port in (self.control_port, self.enrolment_port) if port)

    @property
    def at_the_other(self) -> "Credentials":
        """The same where the coordinator moves to, and the other way round; itself where it does not move."""
        if self.elsewhere is None:
            return self
        here = Address(
            host=self.host, control_port=self.control_port, enrolment_port=self.enrolment_port
        )
        return replace(self, **asdict(self.elsewhere), elsewhere=here)

    def unknown_among(self, addresses: Iterable[Address]) -> list[Address]:
        """Those of the addresses where a coordinator may be that is neither here nor at the other."""
        known = {(one.host, one.control_port) for one in (self, self.at_the_other)}
        return [
            address
            for address in addresses
            if address.control_port and (address.host, address.control_port) not in known
        ]

    @property
    def bundle(self) -> Bundle:
        """The certificates, by what they are for."""
        return Bundle.read(self.certificate_pem)

    @property
    def leaf_pem(self) -> bytes:
        """The holder's own certificate."""
        return self.bundle.leaf_pem or self.certificate_pem

    @property
    def server_root_pem(self) -> bytes:
        """What a coordinator's port must show, or be certified by: its own certificate where we know it."""
        return self.bundle.server_pem or self.authority_pem

    @property
    def principal(self) -> pki.Principal:
        """Whom the certificate speaks for."""
        return pki.principal_of(self.leaf_pem)

    def check(self) -> None:
        """Raises ProtocolMismatchError unless all parts belong together and to the swarm."""
        if self.principal.swarm_id != self.swarm_id:
            raise ProtocolMismatchError(
                f"the certificate is of swarm {self.principal.swarm_id}, not of {self.swarm_id}"
            )
        bundle = self.bundle
        if bundle.newest:
            authority_pem = Trust.of_authority(
                self.authority_pem, self.certificate_pem
            ).authority_pem
            issuers = (bundle.coordinators_pem[0],)
        else:
            authority_pem, issuers = self.authority_pem, (self.authority_pem,)
        if not any(pki.has_issued(issuer, bundle.leaf_pem) for issuer in issuers):
            raise ProtocolMismatchError("the certificate is not signed by the swarm's authority")
        if bundle.server_pem and not pki.has_issued(authority_pem or b"", bundle.server_pem):
            raise ProtocolMismatchError(
                "the certificate of the coordinator's ports is not signed by the swarm's authority"
            )
        if not pki.is_key_of(self.key_pem, self.leaf_pem):
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
        self._write_link(directory)

    def save_link(self) -> None:
        """Writes where the coordinator is, and who knows it, into the folder that they were read from."""
        if self.folder is not None:
            self._write_link(self.folder)

    def _write_link(self, directory: Path) -> None:
        lines = (
            f"swarm_id = {toml_value(self.swarm_id)}",
            f"run_name = {toml_value(self.run_name)}",
            f"host = {toml_value(self.host)}",
            f"control_port = {self.control_port}",
            *((f"enrolment_port = {self.enrolment_port}",) if self.enrolment_port else ()),
            *(() if self.proxy is None else (f"proxy = {toml_value(self.proxy.url)}",)),
            *(() if self.elsewhere is None else _table(self.elsewhere)),
            *(line for member in self.members for line in _table_of(member)),
        )
        is_secret = self.proxy is not None and bool(self.proxy.password)
        text = ("\n".join(lines) + "\n").encode()
        write_atomically(directory / LINK_FILE, text, mode=0o600 if is_secret else 0o644)

    def save_renewed(self) -> None:
        """Writes what a renewal changes into the folder they were read from, one whole file at a time."""
        if self.folder is None:
            return
        write_atomically(self.folder / CERTIFICATE_FILE, self.certificate_pem)
        self._write_link(self.folder)

    def renewed(self, certificate_pem: bytes) -> "Credentials":
        """With a new certificate for the same key.

        Raises ProtocolMismatchError for one of somebody else, or of a coordinator before ours.
        """
        found = replace(self, certificate_pem=certificate_pem)
        found.check()
        if found.principal != self.principal:
            raise ProtocolMismatchError(
                f"the coordinator gave a certificate for {found.principal.uri}, "
                f"not for {self.principal.uri}"
            )
        if found.bundle.newest < self.bundle.newest:
            raise ProtocolMismatchError(
                f"the coordinator's key is number {found.bundle.newest}, and number "
                f"{self.bundle.newest} has replaced it",
                next_step="ask the run owner what answers in the coordinator's place",
            )
        return found

    @classmethod
    def load(
        cls, directory: Path, *, markers: Sequence[str] = (LINK_FILE, COORDINATOR_FILE)
    ) -> "Credentials":
        """Reads the folder; raises NoInputError when it has none, BadDataError when damaged.

        `markers` are files of folders that may be meant in its place: a node's work needs IDENTITY_FILE.
        """
        link_path = directory / LINK_FILE
        if not link_path.is_file():
            if (directory / COORDINATOR_FILE).is_file():
                raise NoInputError(
                    f"{directory} is a coordinator's folder, and its coordinator was never started",
                    next_step=f"'atoll coordinator start {as_typed(directory)}'; a node has a folder of "
                    "its own, which 'atoll join INVITE' makes",
                )
            near = in_place_of(directory, *markers)
            raise NoInputError(
                f"no swarm joined in {directory}",
                next_step="join one with 'atoll join INVITE'"
                + (f", or name a folder that is here: {near}" if near else ""),
            )
        try:
            link = tomllib.loads(link_path.read_text(encoding=TOML_ENCODING))
            credentials = cls(
                swarm_id=_text(link, "swarm_id"),
                run_name=_text(link, "run_name"),
                host=_text(link, "host"),
                control_port=_port(link, "control_port"),
                authority_pem=(directory / AUTHORITY_FILE).read_bytes(),
                certificate_pem=(directory / CERTIFICATE_FILE).read_bytes(),
                key_pem=read_secret(directory / KEY_FILE),
                enrolment_port=_port(link, "enrolment_port") if "enrolment_port" in link else 0,
                elsewhere=_elsewhere(link),
                members=_members(link),
                proxy=Proxy.read(_text(link, "proxy")) if "proxy" in link else None,
                folder=directory,
            )
            credentials.check()
        except NotPermittedError:
            raise
        except PermissionError as error:
            raise NoInputError(
                f"cannot read {error.filename}: {error.strerror}",
                next_step=whose_it_is(Path(error.filename or directory))
                or "run as the user who joined the swarm",
            ) from error
        except (OSError, ValueError, AtollError) as error:
            why = str(error)
            if isinstance(error, OSError) and error.filename:
                why = f"{error.filename}: {error.strerror}"
            raise BadDataError(
                f"the credentials in {directory} are damaged: {why}",
                next_step=mended_by(directory),
            ) from error
        return credentials


def mended_by(folder: Path) -> str:
    """What to type where the credentials in a folder do not hold: its key and its work stay."""
    name = as_typed(folder)
    if (folder / COORDINATOR_FILE).is_file():
        return f"'atoll coordinator start {name}' writes {LINK_FILE} anew, or says what to restore"
    return f"join again with 'atoll join INVITE --dir {name}': its identity and its work stay"


def _table(elsewhere: Address) -> tuple[str, ...]:
    return (
        "[elsewhere]",
        f"host = {toml_value(elsewhere.host)}",
        f"control_port = {elsewhere.control_port}",
        *((f"enrolment_port = {elsewhere.enrolment_port}",) if elsewhere.enrolment_port else ()),
    )


def _elsewhere(link: dict[str, object]) -> Address | None:
    table = link.get("elsewhere")
    if not isinstance(table, dict):
        return None
    return Address(
        host=_text(table, "host"),
        control_port=_port(table, "control_port"),
        enrolment_port=_port(table, "enrolment_port") if "enrolment_port" in table else 0,
    )


def _table_of(member: InvitedBy) -> tuple[str, ...]:
    return (
        "[[members]]",
        f"key = {toml_value(member.public_key.hex())}",
        f"host = {toml_value(member.host)}",
        f"port = {member.port}",
    )


def _members(link: dict[str, object]) -> tuple[InvitedBy, ...]:
    tables = link.get("members", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{LINK_FILE}: members are no tables")
    return tuple(
        InvitedBy(
            public_key=bytes.fromhex(_text(table, "key")),
            host=_text(table, "host"),
            port=_port(table, "port"),
        )
        for table in tables
    )


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
