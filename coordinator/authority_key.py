"""The authority's private key on disk: as it is, encrypted by a passphrase, or elsewhere.

Nothing but a change of keys needs it (coordinator.rotation), and so may ask a person for the passphrase.
"""

import os
import sys
from pathlib import Path

import click
from cryptography.hazmat.primitives import serialization

from protocol.errors import BadDataError, NoInputError, NotPermittedError, UsageError
from protocol.files.durable import read_secret, write_atomically
from protocol.trust.pki import is_key_of

PASSPHRASE_VARIABLE = "ATOLL_PASSPHRASE"
LEAST_CHARACTERS = 12

_MOST_PASSPHRASE_BYTES = 1024


def passphrase_from(descriptor: int | None, *, what: str, is_new: bool = False) -> bytes:
    """From a file descriptor, else $ATOLL_PASSPHRASE, else from the person at the terminal.

    Raises UsageError where there is none of these, or where a new one is too short.
    """
    if descriptor is not None:
        try:
            text = os.read(descriptor, _MOST_PASSPHRASE_BYTES).decode().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"no passphrase can be read from file descriptor {descriptor}",
                next_step="open it for the command: --passphrase-fd 3 3< FILE",
            ) from error
    elif PASSPHRASE_VARIABLE in os.environ:
        text = os.environ[PASSPHRASE_VARIABLE]
    elif sys.stdin.isatty():
        text = click.prompt(what, hide_input=True, confirmation_prompt=is_new, err=True)
    else:
        raise UsageError(
            f"the authority's key needs a passphrase, and {PASSPHRASE_VARIABLE} is not set",
            next_step="set it, give --passphrase-fd, or run the command at a terminal",
        )
    if is_new and len(text) < LEAST_CHARACTERS:
        raise UsageError(
            f"a passphrase of {len(text)} characters is guessed",
            next_step=f"choose one of at least {LEAST_CHARACTERS}: five words, for example",
        )
    return text.encode()


def is_encrypted(key_pem: bytes) -> bool:
    """Whether a key needs a passphrase."""
    return b"ENCRYPTED" in key_pem.partition(b"\n")[0]


def passphrase_of(path: Path, descriptor: int | None = None) -> bytes:
    """What opens a key; nothing where it is not encrypted. Raises NoInputError, UsageError."""
    if not is_encrypted(_read(path)):
        return b""
    return passphrase_from(descriptor, what=f"Passphrase of {path}")


def read_authority_key(path: Path, passphrase: bytes) -> bytes:
    """The key, PEM and not encrypted. Raises NoInputError where it lies elsewhere, NotPermittedError."""
    key_pem = _read(path)
    if not is_encrypted(key_pem):
        return key_pem
    try:
        key = serialization.load_pem_private_key(key_pem, password=passphrase)
    except (ValueError, TypeError) as error:
        raise NotPermittedError(
            f"the passphrase does not open {path}", next_step="type it again"
        ) from error
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def key_beside(path: Path) -> Path:
    """Where a change of the authority's key leaves the new one until it takes its place."""
    return path.with_name(f"{path.name}.new")


def refuse_damaged(path: Path, authority_pem: bytes) -> None:
    """Raises BadDataError for a key that is damaged or another authority's; it may also lie elsewhere.

    Else that would show on the day when keys have to change, and all backups would hold the damaged one. Of
    an encrypted key only the frame can be read.
    """
    if not path.is_file():
        return
    key_pem = _read(path)
    if is_encrypted(key_pem) and _is_framed(key_pem):
        return
    if not is_encrypted(key_pem) and is_key_of(key_pem, authority_pem):
        return
    raise BadDataError(
        f"{path} is damaged, or not the key of this run's authority",
        next_step="put an older backup's in its place. Where there is none, move it away: the run goes on "
        "without it, and its keys then stay as they are",
    )


def _is_framed(key_pem: bytes) -> bool:
    try:
        serialization.load_pem_private_key(key_pem, password=None)
    except TypeError:  # it is whole, as far as can be seen without the passphrase
        return True
    except ValueError:
        return False
    return False


def _read(path: Path) -> bytes:
    try:
        return read_secret(path)
    except OSError as error:
        raise NoInputError(
            f"the authority's key cannot be read at {path}: {error.strerror}",
            next_step="bring it from where it lies, and name it: --authority-key FILE",
        ) from error


def encrypted(key_pem: bytes, passphrase: bytes) -> bytes:
    """A key, PEM, that the passphrase opens; raises BadDataError for what is none."""
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError) as error:
        raise BadDataError("not a private key, or cut off") from error
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(passphrase),
    )


def write_authority_key(path: Path, key_pem: bytes) -> None:
    """Replaces the key at once, whole or not at all, for its owner alone."""
    write_atomically(path, key_pem, mode=0o600)
