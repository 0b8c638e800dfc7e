"""Other keys for a run that goes on: the coordinator's, and with it the authority's.

New files are made aside and take their places together; a folder that was left in between is put right when
it is read the next time. An authority's key elsewhere waits beside the old one until the next change.
The next start announces the key to the nodes (coordinator.services.ruling).
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from coordinator.authority_key import (
    encrypted,
    is_encrypted,
    key_beside,
    passphrase_from,
    passphrase_of,
    read_authority_key,
    write_authority_key,
)
from coordinator.config import (
    AUTHORITY_KEY_FILE,
    ISSUER_FILE,
    ISSUER_KEY_FILE,
    SERVER_FILE,
    SERVER_KEY_FILE,
    Home,
    finish_rotation,
    rotation_folder,
    unfinished_rotation_folder,
)
from protocol.errors import BadDataError, UsageError
from protocol.files.durable import FolderLock, read_secret, sync_folder, write_atomically
from protocol.trust.credentials import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE
from protocol.trust.pki import Authority, is_key_of
from protocol.trust.signing import Bundle

_STOP_IT = "stop the coordinator first: nodes wait for it, and go on when it is back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """What a change of keys is made with. `now` is UTC seconds."""

    directory: Path
    with_authority: bool = False
    authority_key: Path | None = None  # where it lies, if not in the folder
    descriptor: int | None = None  # that the passphrase is read from
    now: float

    @property
    def key_path(self) -> Path:
        """Where the authority's key lies."""
        return self.authority_key or self.directory / AUTHORITY_KEY_FILE

    @property
    def is_key_in_folder(self) -> bool:
        """Whether the authority's key lies among the folder's files, so that it changes with them."""
        return self.key_path.absolute() == (self.directory / AUTHORITY_KEY_FILE).absolute()

    def make(self) -> int:
        """Changes the keys of a folder whose coordinator does not run; returns the new key's number.

        Numbers are times, so that a copy of the folder from before never gives one again. Raises
        SystemRefusedError while the coordinator runs, and what reading the authority's key does.
        """
        Home.load(self.directory)  # is it a coordinator's?
        lock = FolderLock.take(self.directory, holder="coordinator", next_step=_STOP_IT)
        try:
            return self._make(Home.load(self.directory))
        finally:
            lock.release()

    def _make(self, home: Home) -> int:
        beside = key_beside(self.key_path)
        passphrase = passphrase_of(self.key_path, self.descriptor)
        authority = self._authority_of(home, passphrase)
        authorities_pem = home.authorities_pem
        kept = b""
        if self.with_authority:
            successor = Authority.create(authority.swarm_id)
            handed_on = authority.certify_successor(successor.certificate_pem)
            # By which authorities handed on to others, without the latest one's for itself.
            before = Bundle.read(home.authorities_pem).authorities_pem[1:]
            authorities_pem = b"".join((successor.certificate_pem, handed_on, *before))
            # Kept as the old one was: with the same passphrase, if it had one.
            kept = encrypted(successor.key_pem, passphrase) if passphrase else successor.key_pem
            if not self.is_key_in_folder:
                write_authority_key(beside, kept)
            authority = successor
        number = max(home.key_number + 1, int(self.now))
        coordinator = authority.issue_coordinator(number)
        server, operator = authority.issue_server(), coordinator.issue_operator()
        coordinators_pem = coordinator.certificate_pem + home.coordinators_pem
        tail_pem = server.certificate_pem + coordinators_pem + authorities_pem
        self._take_places(
            (AUTHORITY_FILE, authorities_pem, 0o644),
            (ISSUER_FILE, coordinators_pem, 0o644),
            (ISSUER_KEY_FILE, coordinator.key_pem, 0o600),
            (SERVER_FILE, server.certificate_pem, 0o644),
            (SERVER_KEY_FILE, server.key_pem, 0o600),
            (CERTIFICATE_FILE, operator.certificate_pem + tail_pem, 0o644),
            (KEY_FILE, operator.key_pem, 0o600),
            *([(AUTHORITY_KEY_FILE, kept, 0o600)] if kept and self.is_key_in_folder else []),
        )
        if self.with_authority and not self.is_key_in_folder:
            beside.replace(self.key_path)
            sync_folder(self.key_path.parent)
        Home.load(self.directory)
        return number

    def _authority_of(self, home: Home, passphrase: bytes) -> Authority:
        """The folder's authority with its key. Raises BadDataError for a key that is not the authority's."""
        beside = key_beside(self.key_path)
        key_pem = read_authority_key(self.key_path, passphrase)
        if not is_key_of(key_pem, home.authority_pem) and beside.is_file():
            new_pem = read_authority_key(beside, passphrase)
            # The change before was cut off after its new keys had become the folder's.
            if is_key_of(new_pem, home.authority_pem):
                key_pem = new_pem
                beside.replace(self.key_path)
                sync_folder(self.key_path.parent)
        if not is_key_of(key_pem, home.authority_pem):
            raise BadDataError(
                f"{self.key_path} is not the key of the authority of {self.directory}",
                next_step="name the right one: --authority-key FILE",
            )
        return Authority(certificate_pem=home.authority_pem, key_pem=key_pem)

    def _take_places(self, *files: tuple[str, bytes, int]) -> None:
        """Makes files, by name, content and mode, the folder's: all of them or none."""
        new = rotation_folder(self.directory)
        unfinished = unfinished_rotation_folder(self.directory)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        for name, content, mode in files:
            write_atomically(unfinished / name, content, mode=mode)
        unfinished.rename(new)  # from here on the new keys are the folder's
        sync_folder(self.directory)  # else a power cut could keep the next steps and not this one
        finish_rotation(self.directory)


def protect(directory: Path, *, descriptor: int | None) -> Path:
    """Encrypts the authority's key in a folder; returns its path. Raises UsageError where it has one."""
    Home.load(directory)  # is it a coordinator's?
    path = directory / AUTHORITY_KEY_FILE
    if path.is_file() and is_encrypted(read_secret(path)):
        raise UsageError(
            f"{path} is encrypted already", next_step="'openssl pkey' changes its passphrase"
        )
    key_pem = read_authority_key(path, b"")
    passphrase = passphrase_from(descriptor, what=f"New passphrase of {path}", is_new=True)
    write_authority_key(path, encrypted(key_pem, passphrase))
    return path
