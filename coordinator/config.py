"""A coordinator's folder: what lies in it, how `init` makes it whole, how `start` reads it.

run.toml          the run file; its digest stands in every round, so it never changes
description.json  what building its model has shown, where it had to be built; likewise
coordinator.toml  where to listen
ca.pem, ca.key    the authority, behind it certificates for it by authorities before; ca.key may lie elsewhere
coordinator.pem, coordinator.key   what signs commits and rulings, and issues members' certificates
server.pem, server.key             of the ports
client.pem, client.key, link.toml   the run owner's credentials (protocol.trust.credentials)
through.json      the relay that carries it, if any (coordinator.relay.line)
atoll.db, lock    coordinator.store
"""

import errno
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from coordinator.database import DATABASE_NAME
from coordinator.presets.settling import Settled, settled_run_file, wants_settling
from coordinator.relay.line import THROUGH_FILE
from coordinator.settings import CONFIG_FILE, CoordinatorConfig, load_config, local_host
from protocol.errors import (
    NEXT_STEP_FOR_REFUSAL,
    AtollError,
    BadDataError,
    CannotCreateError,
    ConfigError,
    NoInputError,
    ProtocolMismatchError,
    UsageError,
)
from protocol.files.durable import (
    as_typed,
    is_taken,
    read_secret,
    read_toml,
    refusing,
    whole_folder,
    whose_it_is,
    write_atomically,
)
from protocol.run.run_files import DESCRIPTION_FILE, load_run_folder, validated
from protocol.run.run_spec import RunSection, RunSpec
from protocol.trust.credentials import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    LINK_FILE,
    MOST_FOLDERS_NAMED,
    Credentials,
    folders_here,
)
from protocol.trust.pki import Authority, Issuer, has_issued, is_key_of, new_swarm_id
from protocol.trust.rulings import RulingVerifier
from protocol.trust.signing import Bundle, first_of, number_of

RUN_FILE = "run.toml"

AUTHORITY_KEY_FILE = "ca.key"

ISSUER_FILE = "coordinator.pem"

ISSUER_KEY_FILE = "coordinator.key"

SERVER_FILE = "server.pem"

SERVER_KEY_FILE = "server.key"

HOME_FILES = (
    RUN_FILE,
    CONFIG_FILE,
    AUTHORITY_FILE,
    ISSUER_FILE,
    ISSUER_KEY_FILE,
    SERVER_FILE,
    SERVER_KEY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
)
"""What `init` makes and no start changes."""

SOME_HOME_FILES = (AUTHORITY_KEY_FILE, THROUGH_FILE)
"""What a folder may be without: the first where it lies elsewhere, the second where no relay carries its
coordinator."""

RUN_TEMPLATE = (resources.files("coordinator") / "run_template.toml").read_text(encoding="utf-8")
"""What a new folder has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A coordinator's folder, read and checked."""

    directory: Path
    config: CoordinatorConfig
    run: RunSpec
    authorities_pem: bytes
    issuer: Issuer
    coordinators_pem: bytes  # the newest first; nothing where the authority is the coordinator
    server_pem: bytes
    server_key_pem: bytes
    operator_pem: bytes
    operator_key_pem: bytes

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Reads the folder; raises NoInputError when it is none, ConfigError for a wrong file."""
        if not (directory / CONFIG_FILE).is_file():
            raise NoInputError(
                f"{directory} is not a coordinator's folder: {CONFIG_FILE} is not there",
                next_step=f"name the run's folder, as {' or '.join(here)}"
                if (here := folders_here(CONFIG_FILE, besides=directory)[:MOST_FOLDERS_NAMED])
                else "name the run's folder; 'atoll init DIR' makes a new one",
            )
        finish_rotation(directory)
        if (directory / AUTHORITY_KEY_FILE).is_file():
            _read_secret(directory / AUTHORITY_KEY_FILE)  # nobody else may read it, used or not
        home = cls(
            directory=directory,
            config=load_config(directory / CONFIG_FILE),
            run=_load_run(directory),
            authorities_pem=_read(directory / AUTHORITY_FILE),
            issuer=Issuer(
                certificate_pem=_first_of(directory / ISSUER_FILE),
                key_pem=_read_secret(directory / ISSUER_KEY_FILE),
            ),
            coordinators_pem=_read(directory / ISSUER_FILE),
            server_pem=_read(directory / SERVER_FILE),
            server_key_pem=_read_secret(directory / SERVER_KEY_FILE),
            operator_pem=_read(directory / CERTIFICATE_FILE),
            operator_key_pem=_read_secret(directory / KEY_FILE),
        )
        home._check_keys()
        return home

    def _check_keys(self) -> None:
        """Raises BadDataError for a key or certificate that is damaged, or another's than its pair.

        gRPC would refuse to listen without a reason, and who joins would get what nobody believes.
        """
        with _damaged(self.directory / AUTHORITY_FILE):
            Bundle.read(self.authorities_pem)
        with _damaged(self.directory / ISSUER_FILE):
            Bundle.read(self.coordinators_pem)
        for name, pem, key_name, key_pem in (
            (ISSUER_FILE, self.issuer.certificate_pem, ISSUER_KEY_FILE, self.issuer.key_pem),
            (SERVER_FILE, self.server_pem, SERVER_KEY_FILE, self.server_key_pem),
            (CERTIFICATE_FILE, self.operator_pem, KEY_FILE, self.operator_key_pem),
        ):
            with _damaged(self.directory / name):
                Bundle.read(pem)
                leaf_pem = first_of(pem)
            if not is_key_of(key_pem, leaf_pem):
                raise BadDataError(
                    f"{self.directory / key_name} is damaged, or not the key of {name}",
                    next_step=_AFTER_LOSS,
                )
            by_name, by_pem = AUTHORITY_FILE, self.authority_pem
            if name == CERTIFICATE_FILE:
                by_name, by_pem = ISSUER_FILE, self.issuer.certificate_pem
            if not has_issued(by_pem, leaf_pem):
                raise BadDataError(
                    f"{self.directory / name} is not of the same run as {by_name}",
                    next_step=_AFTER_LOSS,
                )

    @property
    def authority_pem(self) -> bytes:
        """The certificate of the authority that there is now."""
        return first_of(self.authorities_pem)

    @property
    def tail_pem(self) -> bytes:
        """What stands behind members' certificates (protocol.trust.signing)."""
        return b"".join((self.server_pem, self.coordinators_pem, self.authorities_pem))

    @property
    def key_number(self) -> int:
        """Of the coordinator's key, from 1 on."""
        return number_of(self.issuer.certificate_pem)

    @property
    def verifier(self) -> RulingVerifier:
        """Checks what this run's coordinators have signed."""
        return RulingVerifier.of_authority(self.authority_pem, self.coordinators_pem)

    def save_link(self, *, host: str, control_port: int) -> None:
        """Tells commands on this machine where the coordinator listens now.

        Works from what the folder holds besides link.toml, so a start that was interrupted while
        it wrote that file is put right by the next.
        """
        operator = Credentials(
            swarm_id=self.issuer.swarm_id,
            run_name=self.run.run.name,
            host=local_host(host),
            control_port=control_port,
            authority_pem=self.authorities_pem,
            certificate_pem=self.operator_pem,
            key_pem=self.operator_key_pem,
        )
        try:
            if Credentials.load(self.directory) == operator:
                return
        except AtollError:
            with refusing(self.directory / LINK_FILE):
                (self.directory / LINK_FILE).unlink(missing_ok=True)
        operator.save(self.directory)


def rotation_folder(directory: Path) -> Path:
    """Where new keys lie until they have taken the places of the old ones."""
    return directory / "keys.new"


def unfinished_rotation_folder(directory: Path) -> Path:
    """Where new keys lie until all of them are there."""
    return directory / "keys.new.part"


def finish_rotation(directory: Path) -> None:
    """Puts new keys in their places, where that was begun. May be repeated, and interrupted."""
    new = rotation_folder(directory)
    if not new.is_dir():
        return
    for path in sorted(new.iterdir()):
        with suppress(FileNotFoundError):  # another command has done it
            path.replace(directory / path.name)
    with suppress(OSError):
        new.rmdir()


def run_text(*, name: str | None) -> str:
    """The text of a new run.toml: the template with that name."""
    if name is None:
        return RUN_TEMPLATE
    try:
        RunSection(name=name)
    except ValidationError as error:
        raise UsageError(
            f"{name!r} is not a name for a run",
            next_step="use lower-case letters, digits and hyphens, 63 at most: --name my-run",
        ) from error
    return RUN_TEMPLATE.replace('"my-run"', f'"{name}"', 1)


def settle_preset(directory: Path) -> Settled | None:
    """Writes a preset out that was put into the folder's run.toml before the first start.

    None when there is none. Raises ConfigError for one that comes later, or cannot be answered.
    """
    path = directory / RUN_FILE
    if not path.is_file():
        return None  # Home.load says what is missing
    if (directory / DATABASE_NAME).exists() and wants_settling(
        read_toml(path, when_missing="restore it")
    ):
        raise ConfigError(
            f"{path}: a preset cannot be asked for once the run has started",
            next_step="write the file as it was, or make a new run with 'atoll init'",
        )
    settled = settled_run_file(path)
    if settled is not None:
        write_atomically(path, settled.text.encode())
    return settled


def require_free(directory: Path) -> None:
    """Raises CannotCreateError when the folder exists and is not empty."""
    if is_taken(directory):
        raise CannotCreateError(
            f"{directory.absolute()} exists and is not empty",
            next_step="choose another folder, or, if it is a coordinator's, "
            f"'atoll coordinator start {as_typed(directory.absolute())}'",
        )


def create_home(
    directory: Path,
    *,
    config: CoordinatorConfig,
    text: str | Callable[[Path], str],
) -> Home:
    """Makes a coordinator's folder for the run file `text`: all of it, or nothing.

    `text` may be what returns it and writes beside it, into the folder that is given, what else belongs
    to the run.

    Raises CannotCreateError when the folder exists and is not empty.
    """
    directory = directory.absolute()
    require_free(directory)
    authority = Authority.create(new_swarm_id())
    coordinator = authority.issue_coordinator(1)
    server = authority.issue_server()
    operator = coordinator.issue_operator()
    tail_pem = b"".join(
        (server.certificate_pem, coordinator.certificate_pem, authority.certificate_pem)
    )
    with whole_folder(directory) as building:
        text = text if isinstance(text, str) else text(building)
        validated(tomllib.loads(text), origin=RUN_FILE)
        for name, content, mode in (
            (RUN_FILE, text.encode(), 0o644),
            (CONFIG_FILE, config.to_toml().encode(), 0o644),
            (AUTHORITY_FILE, authority.certificate_pem, 0o644),
            (AUTHORITY_KEY_FILE, authority.key_pem, 0o600),
            (SERVER_FILE, server.certificate_pem, 0o644),
            (SERVER_KEY_FILE, server.key_pem, 0o600),
            (ISSUER_FILE, coordinator.certificate_pem, 0o644),
            (ISSUER_KEY_FILE, coordinator.key_pem, 0o600),
            (CERTIFICATE_FILE, operator.certificate_pem + tail_pem, 0o644),
            (KEY_FILE, operator.key_pem, 0o600),
        ):
            write_atomically(building / name, content, mode=mode)
        if config.control_port:  # otherwise the port, and so the link, is only known after a start
            Home.load(building).save_link(host=config.host, control_port=config.control_port)
    return Home.load(directory)


def _load_run(directory: Path) -> RunSpec:
    try:
        return load_run_folder(directory, RUN_FILE)
    except (ConfigError, NoInputError) as error:
        if not (directory / DATABASE_NAME).is_file():
            raise
        # With gRPC, which `init` goes without. Only now: to look into a database leaves files beside it.
        from coordinator.store import may_have_begun, write_lost_anew

        if write_lost_anew(directory / RUN_FILE):
            return load_run_folder(directory, RUN_FILE)
        if isinstance(error, ConfigError) and may_have_begun(directory):
            error.next_step = (  # what it was cannot change any more, so to correct it is no use
                f"remove {directory / RUN_FILE} and {DESCRIPTION_FILE} beside it, and type it again: both "
                f"are then written anew, as {DATABASE_NAME} has them"
            )
        raise


def _read_secret(path: Path) -> bytes:
    return _read(path, by=read_secret)


def _read(path: Path, by: Callable[[Path], bytes] = Path.read_bytes) -> bytes:
    try:
        return by(path)
    except OSError as error:
        next_step = _AFTER_LOSS
        if isinstance(error, PermissionError):
            next_step = whose_it_is(path) or NEXT_STEP_FOR_REFUSAL[errno.EACCES]
        raise NoInputError(
            f"{path} cannot be read: {error.strerror}", next_step=next_step
        ) from error


def _first_of(path: Path) -> bytes:
    with _damaged(path):
        return first_of(_read(path))


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except ProtocolMismatchError as error:
        raise BadDataError(f"{path} is damaged: {error.what}", next_step=_AFTER_LOSS) from error


_AFTER_LOSS = "restore it from a backup; without it nodes cannot know this coordinator"
